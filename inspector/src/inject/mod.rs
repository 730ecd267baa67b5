//! Injection: one real packet arrives on a device as if a client had sent it, and the tracer follows
//! it to the backend and its answer back.
//!
//! It proves the whole way on a device on which no client is to be found: what Cilium's programs do,
//! the redirect, every look-up of a neighbour, the backend and its answer are real. Each packet has
//! its control: the same one to an address that is no frontend.
//!
//! What is sent reaches a backend: it is only done when the user wants it, one packet for each
//! frontend on each device. A TCP connection that the backend accepts is reset at once. What the
//! packets leave is taken back, see [`undo`].

pub mod source;
pub mod undo;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, hash_map::Entry},
    io,
    net::IpAddr,
    thread,
    time::{Duration, Instant},
};

use source::Addresses;
use undo::Undo;

use crate::{
    cilium::proto::Protocol,
    evidence::{
        Evidence, Hex, VipQuery,
        injection::{Injection, Probe, Shot},
        network::Link,
        parse_hex,
        programs::HookKind,
        simulation::Skipped,
        trace::Stopped,
    },
    judge::{
        Outcome,
        journey::{self, Answer},
        targets::{self, Port, Target},
    },
    packet::{self, Macs},
    simulate::{
        SimulateError, client_mac,
        effects::{Maps, Occupied, Watch},
        known_programs, lock,
        source::{CLIENT_MAC, Ports, controls, nobody},
    },
    sys::{
        arrive::{Arrival, Arrived},
        change, host,
        netlink::NetlinkError,
        signals::Held,
    },
    trace::{
        TraceError,
        journey::{Journey, Tie},
        session::{self, Session},
        sighting::Hook,
    },
};

/// No more frontends on devices than these at once.
pub const MOST_PROBES: usize = 32;

/// Longest payload of a datagram, bytes: it must fit into one packet of any device.
pub const MOST_PAYLOAD: usize = 1024;

/// Reads what datagrams are to say: `dns` (a query for the name servers of the root, which every name
/// server answers somehow), `hex:0a0b`, or `text:hello`.
///
/// # Errors
/// What is wrong with it.
pub fn payload(text: &str) -> Result<Vec<u8>, String> {
    /// One question, recursion desired: `.`, NS, IN.
    const QUERY: [u8; 15] = [1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 1];
    let bytes = match text.split_once(':') {
        None if text == "dns" => [&fastrand::u16(..).to_be_bytes()[..], &QUERY].concat(),
        Some(("hex", digits)) => {
            parse_hex(digits).ok_or("these are no pairs of hexadecimal digits: such as hex:0a0b")?
        }
        Some(("text", words)) => words.as_bytes().to_vec(),
        _ => return Err("give dns, hex:DIGITS or text:WORDS".to_owned()),
    };
    if bytes.is_empty() || bytes.len() > MOST_PAYLOAD {
        return Err(format!("give 1 to {MOST_PAYLOAD} bytes"));
    }
    Ok(bytes)
}

/// How long after one packet the next is sent, so that look-ups of one are not taken for another's.
const APART: Duration = Duration::from_millis(25);
/// How long a reset may take to its backend before its tracks are removed.
const FAREWELL: Duration = Duration::from_millis(50);
/// How often it is looked whether it is to end.
const TICK: Duration = Duration::from_millis(20);

/// What is to be injected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Source of the packets, instead of an address that nobody has.
    pub source: Option<IpAddr>,
    /// What UDP datagrams say.
    pub payload: Vec<u8>,
    /// How long an answer is waited for.
    pub wait: Duration,
}

/// Why nothing was injected.
#[derive(Debug, thiserror::Error)]
pub enum InjectError {
    /// What has to be known of the node is not.
    #[error("cannot inject: which programs run where was not read: {0}")]
    NotRead(String),
    /// More than anybody wants to send to backends at once.
    #[error(
        "{0} packets (frontends on devices) and their controls are too many to send at once, at most \
         {MOST_PROBES}: narrow the question to a port, or with --via"
    )]
    TooMany(usize),
    /// The source can be no client's.
    #[error("cannot inject packets from {0}: {1}")]
    Source(IpAddr, String),
    /// The kernel refuses.
    #[error("cannot inject: {what}: {source}{}", hint(source))]
    Refused {
        /// What was to be done.
        what: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The network cannot be read.
    #[error("cannot inject: {0}")]
    Network(#[from] NetlinkError),
    /// The packets could not be followed.
    #[error("cannot inject, for the packets could not be followed: {0}")]
    Trace(#[from] TraceError),
    /// Nothing reports that a packet arrives.
    #[error(
        "cannot inject, for the packets could not be followed: no hook that sees them arrive could be \
         watched; `inspect doctor` says why"
    )]
    Blind,
    /// Another run does not come to its end.
    #[error(transparent)]
    Busy(#[from] SimulateError),
}

impl InjectError {
    /// Whether the question is wrong, and not the node.
    #[must_use]
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::TooMany(_) | Self::Source(..))
    }
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            ": run as root, or with CAP_SYS_ADMIN (to open Cilium's maps by id), CAP_BPF, \
             CAP_PERFMON and CAP_NET_ADMIN"
        }
        _ => "",
    }
}

/// What would be sent.
pub struct Plan {
    /// The packets; nothing was sent of them yet.
    pub probes: Vec<Probe>,
    /// What would not be, and why.
    pub skipped: Vec<Skipped>,
    maps: Maps,
    /// For each probe what is known of its frontend and its device.
    ports: Vec<(Port, Target)>,
    request: Request,
}

/// Says what would be sent for the VIP, on every device on which clients' packets can arrive. Sends
/// nothing.
///
/// The evidence must be of this moment and of this thread's network namespace.
///
/// # Errors
/// [`InjectError`].
pub fn plan(evidence: &Evidence, query: &VipQuery, request: &Request) -> Result<Plan, InjectError> {
    let attachments = known_programs(evidence).map_err(InjectError::NotRead)?;
    let devices = targets::devices(evidence, query.address);
    let ports = targets::ports(evidence, query);
    let used: Vec<u32> =
        devices.iter().flat_map(|device| device.programs.iter().map(|one| one.1)).collect();
    let maps = Maps::open(attachments, &used, query.address, evidence.host.cpus).map_err(
        |(map, source)| InjectError::Refused { what: format!("opening the map {map}"), source },
    )?;
    let backends = ports.iter().flat_map(|port| &port.backends).map(|backend| backend.0);
    let mut addresses = Addresses::new(evidence, query.address, backends)?;
    if let Some(source) = request.source {
        let is_backend = ports.iter().any(|port| port.backends.iter().any(|one| one.0 == source));
        if addresses.is_own(source) || source == query.address {
            let why = "it is an address of this node, or the VIP: no client's".to_owned();
            return Err(InjectError::Source(source, why));
        }
        if is_backend {
            return Err(InjectError::Source(source, "it is a backend, no client".to_owned()));
        }
        if let Some(why) = no_clients(source, &mut addresses, &maps) {
            return Err(InjectError::Source(source, why));
        }
    }
    let mut planner = Planner {
        evidence,
        query,
        request,
        maps: &maps,
        addresses,
        source_ports: Ports::from_any(),
        probes: Vec::new(),
        skipped: Vec::new(),
        ports: Vec::new(),
    };
    for device in &devices {
        if let Some(why) = planner.unfit(device) {
            planner.skip(device, None, why);
            continue;
        }
        for port in &ports {
            planner.frontend(device, port);
        }
    }
    let Planner { probes, skipped, ports, .. } = planner;
    if probes.len() > MOST_PROBES {
        return Err(InjectError::TooMany(probes.len()));
    }
    Ok(Plan { probes, skipped, maps, ports, request: request.clone() })
}

/// Why nobody outside can have an address, if so.
fn no_clients(source: IpAddr, addresses: &mut Addresses<'_>, maps: &Maps) -> Option<String> {
    if source::is_link_local(source) {
        return Some("it is of one link only, where a backend is not: no client's".to_owned());
    }
    let kind = addresses.route(source).map(|route| route.kind);
    if let Some(kind) = kind.filter(|kind| ["local", "broadcast", "anycast"].contains(&&**kind)) {
        return Some(format!("the kernel's route to it is `{kind}`: no client's"));
    }
    // The wildcard entry of another VIP (1.19+).
    (maps.is_frontend(source, 0, 0) || addresses.is_announced(source, None))
        .then(|| "it is another VIP of this node: no client's".to_owned())
}

struct Planner<'e> {
    evidence: &'e Evidence,
    query: &'e VipQuery,
    request: &'e Request,
    maps: &'e Maps,
    addresses: Addresses<'e>,
    source_ports: Ports,
    probes: Vec<Probe>,
    skipped: Vec<Skipped>,
    ports: Vec<(Port, Target)>,
}

impl Planner<'_> {
    fn skip(&mut self, device: &Target, frontend: Option<&Port>, why: String) {
        self.skipped.push(Skipped {
            device: device.device.clone(),
            frontend: frontend.map(|port| port.frontend.clone()),
            why,
        });
    }

    /// Why nothing can be injected on a device.
    fn unfit(&self, device: &Target) -> Option<String> {
        if let Some(why) = device.other_maps.as_ref().filter(|_| !device.programs.is_empty()) {
            return Some(format!("{why}: what a packet leaves there could not be taken back"));
        }
        let link = self.evidence.network.as_ref().and_then(|network| network.link(device.ifindex));
        if let Some(dead) = link.and_then(Link::dead) {
            return Some(format!("it {dead}"));
        }
        match (device.ethernet, device.mac) {
            (None, _) => Some("what kind of device it is was not read".to_owned()),
            (Some(true), None) => Some("it has no MAC address".to_owned()),
            _ => None,
        }
    }

    /// One frontend on one device.
    fn frontend(&mut self, device: &Target, port: &Port) {
        if ![6, 17].contains(&port.protocol) {
            self.skip(device, Some(port), "only TCP and UDP packets are made".to_owned());
            return;
        }
        let source = match self.source(device, port) {
            Ok(source) => source,
            Err(why) => {
                self.skip(device, Some(port), why);
                return;
            }
        };
        let Some(control) = self.control(port, source) else {
            self.skip(device, Some(port), "every control address is a frontend".to_owned());
            return;
        };
        let ports = [self.source_ports.another(), self.source_ports.another()];
        let shot = |destination: IpAddr, source_port| Shot {
            source,
            source_port,
            destination,
            destination_port: port.port,
            sent_ns: None,
            problem: None,
            reset: false,
            journey: None,
        };
        let (control, client) = (shot(control, ports[0]), shot(self.query.address, ports[1]));
        let answer_to = self.answer_to(device, source);
        let passed_by = device
            .programs
            .iter()
            .filter(|one| matches!(one.0, HookKind::XdpNative | HookKind::XdpOffload))
            .map(|one| {
                format!(
                    "Cilium's XDP program {} in the driver: the packet arrives behind it",
                    one.2
                )
            })
            .collect();
        self.probes.push(Probe {
            frontend: port.frontend.clone(),
            ifindex: device.ifindex,
            device: device.device.clone(),
            ethernet: device.ethernet == Some(true),
            protocol: port.protocol,
            payload: if Protocol(port.protocol) == Protocol::UDP {
                Hex(&self.request.payload).to_string()
            } else {
                String::new()
            },
            answer_to,
            passed_by,
            client,
            control,
        });
        self.ports.push((port.clone(), device.clone()));
    }

    /// Whose packet it is to be; or why there is nobody.
    fn source(&mut self, device: &Target, port: &Port) -> Result<IpAddr, String> {
        const NOBODY: &str =
            "no address for a client was found that nobody has: choose one with --source";
        if let Some(source) = self.request.source {
            return Ok(source);
        }
        let v6 = self.query.address.is_ipv6();
        let evidence = self.evidence;
        let network = evidence.network.as_ref();
        let Some(link) = network.and_then(|network| network.link(device.ifindex)) else {
            return Err(NOBODY.to_owned());
        };
        let maps = self.maps;
        let (number, protocol) = (port.port, port.protocol);
        let is_free = |one: IpAddr| {
            !maps.is_frontend(one, number, protocol)
                // The wildcard entry of another VIP (1.19+).
                && !maps.is_frontend(one, 0, 0)
                && maps.client_mac(one).is_none()
        };
        let usual = self
            .addresses
            .client(link, v6, &is_free)
            .or_else(|| Some(nobody(v6, true)).filter(|one| !self.addresses.in_ipcache(*one)));
        let usual = usual.ok_or_else(|| NOBODY.to_owned());
        let Some(ranges) = &port.ranges else { return usual };
        if usual.as_ref().is_ok_and(|one| ranges.admit(*one)) {
            return usual;
        }
        // Where only some sources are let through, one of those: but nobody's, as any other.
        let fits = |one: IpAddr| is_free(one) && ranges.admit(one);
        let list: &[String] = if ranges.deny { &[] } else { &ranges.list };
        let own = self.addresses.client(link, v6, &fits);
        let found = own
            .or_else(|| Some(nobody(v6, true)).filter(|one| ranges.admit(*one)))
            .or_else(|| self.addresses.within(list, v6, &fits));
        match found {
            Some(found) => Ok(found),
            // Some are let through: a packet of another would only show that it is none of them.
            None if list.iter().any(|range| range.contains(':') == v6) => Err(format!(
                "it lets only some sources through ({}), and nobody is known to be none of them: \
                 choose a client with --source",
                list.join(" ")
            )),
            None => usual,
        }
    }

    /// An address that is no frontend: beside the VIP, so that what becomes of the packet is what
    /// would become of one to the VIP, were that none; or one for documentation.
    fn control(&mut self, port: &Port, source: IpAddr) -> Option<IpAddr> {
        let (maps, number, protocol) = (self.maps, port.port, port.protocol);
        let fits = |one: IpAddr| {
            one != source
                && !maps.is_frontend(one, number, protocol)
                && !maps.is_frontend(one, 0, 0)
        };
        let beside = self.addresses.control(self.query.address, &fits);
        beside.or_else(|| controls(self.query.address.is_ipv6()).find(|one| fits(*one)))
    }

    /// To whom the answer goes, in words.
    fn answer_to(&mut self, device: &Target, source: IpAddr) -> String {
        let chosen = self.request.source.is_none();
        let Some(route) = self.addresses.route(source) else {
            return format!("nobody: this node has no route to {source}");
        };
        let output = route.output.unwrap_or_default();
        let link = self.evidence.network.as_ref().and_then(|network| network.link(output));
        let on = link.map_or_else(|| format!("interface {output}"), |link| link.name.clone());
        if route.kind != "unicast" {
            return format!("nobody: the route to {source} is `{}`", route.kind);
        }
        // The way back is not the way of a client behind the device.
        let elsewhere = if output == device.ifindex {
            String::new()
        } else {
            format!(", not back through {}", device.device)
        };
        if let Some(gateway) = route.gateway {
            return format!("{source}, by the gateway {gateway} on {on}{elsewhere}");
        }
        if self.addresses.is_wireguard(output) {
            let range = self
                .addresses
                .peers(output)
                .into_iter()
                .filter(|range| crate::judge::contains(range, source))
                .max_by_key(|range| {
                    range.rsplit('/').next().and_then(|bits| bits.parse::<u8>().ok())
                });
            return match range {
                Some(range) => format!("the WireGuard peer on {on} that has {range}{elsewhere}"),
                None => format!("nobody: no WireGuard peer on {on} has {source}"),
            };
        }
        if !link.is_some_and(|link| link.ethernet) {
            return format!("whoever is behind {on}{elsewhere}");
        }
        if chosen && output == device.ifindex {
            return format!("nobody: to the MAC address {CLIENT_MAC} on {on}");
        }
        format!("whoever has {source} on {on}{elsewhere}")
    }
}

/// Sends what was planned, follows it, and adds what came of it to the evidence.
///
/// In the network namespace of this thread. `held` is the promise that a signal does not end the
/// process before everything is taken back; when one comes, the rest is left out.
///
/// # Errors
/// [`InjectError`]; whatever was sent before is taken back all the same.
pub fn run(
    evidence: &mut Evidence,
    query: &VipQuery,
    plan: Plan,
    held: &Held,
) -> Result<(), InjectError> {
    let injection = inject(evidence, query, plan, held)?;
    evidence.injection = Some(injection);
    Ok(())
}

/// A journey that came to its end, what became of the packet, and its answer.
type Seen = (Journey, Outcome, Answer);

fn inject(
    evidence: &Evidence,
    query: &VipQuery,
    plan: Plan,
    held: &Held,
) -> Result<Injection, InjectError> {
    let Plan { probes, skipped, maps, ports, request } = plan;
    let wait_ns = u64::try_from(request.wait.as_nanos()).unwrap_or(u64::MAX);
    let mut injection = Injection { wait_ns, probes, skipped, ..Injection::default() };
    if injection.probes.is_empty() {
        return Ok(injection);
    }
    let Some(_lock) = lock(evidence, held)? else {
        injection.interrupted = true;
        return Ok(injection);
    };
    let shots = || injection.probes.iter().flat_map(|probe| [&probe.control, &probe.client]);
    let controls: BTreeSet<IpAddr> =
        injection.probes.iter().map(|probe| probe.control.destination).collect();
    let sources: BTreeSet<IpAddr> = shots().map(|shot| shot.source).collect();
    let addresses = controls.iter().chain(&sources).copied().chain([query.address]).collect();
    let mut context = journey::context(evidence, query);
    context.vips.extend(&controls);
    context.next_hops.extend(&sources);
    context.next_hops.extend(&controls);
    let mut questions = vec![VipQuery { source: None, ..*query }];
    questions.extend(injection.probes.iter().map(|probe| VipQuery {
        address: probe.control.destination,
        port: Some(probe.control.destination_port),
        protocol: Some(Protocol(probe.protocol)),
        source: None,
    }));
    // Nothing is sent of which something could stay.
    change::may().map_err(|source| InjectError::Refused {
        what: "taking neighbour entries back".to_owned(),
        source,
    })?;
    let mut watch = session::plan(evidence, &questions, &context);
    // Nobody else's packets are of interest; the node can put its own address in the client's place.
    watch.clients = sources.iter().chain(&context.host_addresses).copied().collect();
    let mut session = Session::start(evidence, context, watch, None)?;
    if ![Hook::TcIngress, Hook::Receive].iter().any(|hook| session.watched().watches(*hook)) {
        return Err(InjectError::Blind);
    }
    let mut seen: Vec<Seen> = Vec::new();
    let mut sender = Sender {
        maps: &maps,
        request: &request,
        undo: Undo::new(addresses)?,
        arrivals: HashMap::new(),
        sent: BTreeMap::new(),
        source_ports: Ports::from_any(),
        evidence,
        held,
    };
    sender.send_all(&mut injection, &ports, &mut session, &mut seen)?;
    sender.follow(&mut injection, &mut session, &mut seen)?;
    let stopped = if held.pending() { Stopped::Interrupt } else { Stopped::Duration };
    let trace = session.finish(stopped, &mut collect(&mut seen))?;
    injection.interrupted |= stopped == Stopped::Interrupt;
    injection.watched = trace.watched;
    sender.give_up(&mut injection, &seen)?;
    for (mut journey, ..) in seen {
        tidy(&mut journey);
        let shots = injection.probes.iter_mut().flat_map(|one| [&mut one.control, &mut one.client]);
        if let Some(shot) = shots.into_iter().find(|shot| shot.is(&journey)) {
            shot.journey.get_or_insert(journey);
        }
    }
    (injection.effects, injection.kernel) = sender.undo.finish();
    Ok(injection)
}

/// Leaves out what is not of the packet: the end of the frame that it is a copy of, and look-ups that
/// only the time ties to it, once other packets are under way.
fn tidy(journey: &mut Journey) {
    /// `lo`, to which the frame belongs: it has this index in every network namespace.
    const LOOPBACK: u32 = 1;
    let others_ns = journey.start_ns() + u64::try_from(APART.as_nanos()).unwrap_or(u64::MAX);
    let destination = journey.frontend.0;
    // The frame holds its buffer from before the first step until it is dropped: no step before that
    // has the same one, but a later one can.
    let mut earlier: BTreeSet<Option<u64>> = BTreeSet::new();
    journey.steps.retain(|step| {
        let sighting = &step.sighting;
        let is_first = earlier.insert(sighting.skb);
        let is_original = sighting.hook == Hook::Drop && sighting.ifindex == LOOPBACK && is_first;
        let is_others = step.tie == Tie::Time
            && sighting.monotonic_ns > others_ns
            && sighting.neighbour.as_ref().is_some_and(|one| one.address != destination);
        !is_original && !is_others
    });
}

/// Keeps what is seen.
fn collect(
    seen: &mut Vec<Seen>,
) -> impl FnMut(&Journey, &journey::Conclusion, &crate::trace::journey::Context) -> Result<(), InjectError>
{
    |journey, conclusion, _| {
        seen.push((journey.clone(), conclusion.outcome, conclusion.answer.clone()));
        Ok(())
    }
}

struct Sender<'m> {
    maps: &'m Maps,
    request: &'m Request,
    undo: Undo<'m>,
    /// By interface index.
    arrivals: HashMap<u32, Arrival>,
    /// First sequence numbers and Ethernet addresses, by probe, of packets for frontends and of
    /// controls.
    sent: BTreeMap<(usize, bool), (u32, Macs)>,
    source_ports: Ports,
    held: &'m Held,
    evidence: &'m Evidence,
}

impl<'m> Sender<'m> {
    /// Sends every packet, controls first.
    fn send_all(
        &mut self,
        injection: &mut Injection,
        ports: &[(Port, Target)],
        session: &mut Session,
        seen: &mut Vec<Seen>,
    ) -> Result<(), InjectError> {
        for (index, (port, device)) in ports.iter().enumerate() {
            for is_client in [false, true] {
                if self.held.pending() {
                    injection.interrupted = true;
                    return Ok(());
                }
                let probe = &mut injection.probes[index];
                self.send(index, is_client, probe, port, device)?;
                let until = Instant::now() + APART;
                while let Some(left) = until.checked_duration_since(Instant::now()) {
                    session.step(left, &mut collect(seen))?;
                }
            }
        }
        Ok(())
    }

    /// Sends one packet.
    fn send(
        &mut self,
        index: usize,
        is_client: bool,
        probe: &mut Probe,
        port: &Port,
        device: &Target,
    ) -> Result<(), InjectError> {
        let protocol = probe.protocol;
        let shot = if is_client { &mut probe.client } else { &mut probe.control };
        let mac = client_mac(self.maps, self.evidence, shot.source, device.ifindex);
        let watch = match self.free(shot, protocol, is_client.then_some(port)) {
            Ok(watch) => watch,
            Err(why) => {
                shot.problem = Some(why);
                return Ok(());
            }
        };
        let flow = shot.flow(protocol);
        self.undo.packet(flow, watch);
        if probe.ethernet && self.request.source.is_none() {
            // The plan was made before the user was asked, or another run waited for.
            let made = self.undo.neighbour(device.ifindex, shot.source, mac);
            shot.problem = match made {
                Ok(true) => None,
                Ok(false) => Some(format!("somebody has {} by now: ask again", shot.source)),
                Err(error) => Some(format!(
                    "the kernel takes no neighbour entry for {} on {}: {error}",
                    shot.source, device.device
                )),
            };
            if shot.problem.is_some() {
                return Ok(());
            }
        }
        let sequence = fastrand::u32(..);
        // A device without Ethernet header has no address; the kernel takes the header off there.
        let macs = Macs { source: mac, destination: device.mac.unwrap_or(CLIENT_MAC) };
        self.sent.insert((index, is_client), (sequence, macs));
        let Some(frame) = packet::opening(&flow, sequence, Some(macs), &self.request.payload)
        else {
            shot.problem = Some("no packet can be made for it".to_owned());
            return Ok(());
        };
        shot.sent_ns = Some(host::monotonic_ns());
        shot.problem = self.arrive(device, &frame)?;
        Ok(())
    }

    /// Finds a source port of which nothing is known, and notes what is there of the client.
    fn free(
        &mut self,
        shot: &mut Shot,
        protocol: u8,
        port: Option<&Port>,
    ) -> Result<Watch<'m>, String> {
        let none: &[(IpAddr, u16)] = &[];
        let (reverse_nat, backends) =
            port.map_or((0, none), |port| (port.reverse_nat, port.backends.as_slice()));
        let mut flow = shot.flow(protocol);
        let (earlier, ports) = (self.undo.packets(), &mut self.source_ports);
        let found = self.maps.watch_free(&mut flow, reverse_nat, backends, earlier, ports);
        shot.source_port = flow.source_port;
        found.map_err(|occupied| match occupied {
            Occupied::Client(what) => format!(
                "the client {} is in use ({what}): choose another with --source",
                shot.source
            ),
            Occupied::Connection => {
                format!("no free source port of {}: choose another with --source", shot.source)
            }
        })
    }

    /// Makes a frame arrive; says why it did not.
    fn arrive(&mut self, device: &Target, frame: &[u8]) -> Result<Option<String>, InjectError> {
        let refused = |what: &str| {
            let what = format!("{what} on {}", device.device);
            move |source| InjectError::Refused { what, source }
        };
        let arrival = match self.arrivals.entry(device.ifindex) {
            Entry::Occupied(there) => there.into_mut(),
            Entry::Vacant(new) => {
                let arrival = Arrival::on(device.ifindex)
                    .map_err(refused("loading a program that lets a packet arrive"))?;
                new.insert(arrival)
            }
        };
        let arrived = arrival.frame(frame).map_err(refused("letting a packet arrive"))?;
        Ok(match arrived {
            Arrived::Received => None,
            Arrived::Refused => {
                Some(format!("the kernel did not take the packet: is {} up?", device.device))
            }
            Arrived::NoDevice => Some(format!("{} is gone", device.device)),
            Arrived::Failed(number) => {
                Some(format!("the kernel refuses: {}", io::Error::from_raw_os_error(number)))
            }
        })
    }

    /// Waits for answers. A connection that was accepted is reset as soon as that was seen.
    fn follow(
        &mut self,
        injection: &mut Injection,
        session: &mut Session,
        seen: &mut Vec<Seen>,
    ) -> Result<(), InjectError> {
        let until = Instant::now() + self.request.wait;
        loop {
            self.reset(injection, seen, false)?;
            let is_over = |probe: &Probe| {
                let shot = &probe.client;
                shot.sent_ns.is_none()
                    || shot.problem.is_some()
                    || seen.iter().any(|(journey, ..)| shot.is(journey))
            };
            let left = until.checked_duration_since(Instant::now());
            let Some(left) = left.filter(|_| !self.held.pending()) else { break };
            if injection.probes.iter().all(is_over) {
                break;
            }
            session.step(left.min(TICK), &mut collect(seen))?;
        }
        Ok(())
    }

    /// Resets what may be half open, and lets the resets come to their ends.
    fn give_up(&mut self, injection: &mut Injection, seen: &[Seen]) -> Result<(), InjectError> {
        self.reset(injection, seen, true)?;
        if injection.probes.iter().any(|probe| probe.client.reset || probe.control.reset) {
            thread::sleep(FAREWELL);
        }
        Ok(())
    }

    /// Resets connections that were accepted; at the end also those of which nothing is known.
    fn reset(
        &mut self,
        injection: &mut Injection,
        seen: &[Seen],
        at_the_end: bool,
    ) -> Result<(), InjectError> {
        for (index, probe) in injection.probes.iter_mut().enumerate() {
            let Probe { ifindex, device, protocol, client, control, .. } = probe;
            for (is_client, shot) in [(false, control), (true, client)] {
                if shot.reset || shot.sent_ns.is_none() || shot.problem.is_some() || *protocol != 6
                {
                    continue;
                }
                let known = seen.iter().find(|(journey, ..)| shot.is(journey));
                let half_open = match known.map(|one| (one.1, &one.2)) {
                    Some((_, Answer::Answered { .. })) => true,
                    // It reached no backend.
                    Some((
                        Outcome::Untranslated
                        | Outcome::Dropped
                        | Outcome::Denied
                        | Outcome::NoBackend,
                        _,
                    )) => false,
                    // Nobody is at the control's address.
                    Some((_, Answer::Silent { .. } | Answer::NotYet { .. })) | None => {
                        at_the_end && is_client
                    }
                    Some(_) => false,
                };
                let Some(&(sequence, macs)) = self.sent.get(&(index, is_client)) else { continue };
                if !half_open {
                    continue;
                }
                let flow = shot.flow(*protocol);
                let Some(arrival) = self.arrivals.get(ifindex) else { continue };
                let Some(frame) = packet::reset(&flow, sequence, Some(macs)) else { continue };
                let arrived = arrival.frame(&frame).map_err(|source| InjectError::Refused {
                    what: format!("letting a reset arrive on {device}"),
                    source,
                })?;
                shot.reset = arrived == Arrived::Received;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{
        journey::{Direction, Step},
        sighting::{Sighting, Tier},
    };

    /// What was seen of a packet: the hook, the device, and the buffer.
    fn left_of(seen: &[(Hook, u32, u64)]) -> Vec<(Hook, u32)> {
        let step = |number: usize, (hook, ifindex, skb): (Hook, u32, u64)| Step {
            direction: Direction::Request,
            tie: Tie::Packet,
            times: 1,
            attempts: 1,
            last_ns: 0,
            sighting: Sighting {
                monotonic_ns: number as u64,
                hook,
                tier: Tier::Tracepoint,
                ifindex,
                skb: Some(skb),
                packet: None,
                neighbour: None,
                mark: None,
                detail: None,
                flow: None,
                asked: None,
                headers: None,
                program: None,
            },
        };
        let mut journey = Journey {
            protocol: 6,
            frontend: (IpAddr::from([192, 168, 2, 20]), 443),
            client: None,
            from_start: true,
            steps: seen.iter().enumerate().map(|(number, one)| step(number, *one)).collect(),
            steps_not_kept: 0,
            until_ns: 9,
            cut_short: false,
        };
        tidy(&mut journey);
        journey.steps.iter().map(|step| (step.sighting.hook, step.sighting.ifindex)).collect()
    }

    #[test]
    fn the_end_of_the_frame_itself_is_no_drop_of_the_packet() {
        let arrived = (Hook::Receive, 2, 1);
        // Another packet can have its buffer afterwards.
        let seen = [arrived, (Hook::Drop, 1, 7), (Hook::Route, 2, 7)];
        assert_eq!(left_of(&seen), [(Hook::Receive, 2), (Hook::Route, 2)]);
        // The packet itself, dropped on the way to a socket of the node.
        let seen = [arrived, (Hook::Drop, 1, 1)];
        assert_eq!(left_of(&seen), [(Hook::Receive, 2), (Hook::Drop, 1)]);
        let seen = [arrived, (Hook::Drop, 2, 7)];
        assert_eq!(left_of(&seen), [(Hook::Receive, 2), (Hook::Drop, 2)]);
    }
}
