//! Simulation: Cilium's own program, as the kernel has it attached, run on a client's packet that
//! was never sent.
//!
//! It proves what the program does with the state as it is now, on a device on which no client is
//! to be found. It proves nothing of what comes after the program: the redirect is not performed,
//! later hooks do not run, no backend is asked.
//!
//! The program runs for real, so what it writes into Cilium's maps is there: see [`effects`] for
//! how that is found and taken back. Each client's packet has its control: the same packet to an
//! address that is no frontend, which must come back untouched.

pub mod effects;
pub mod source;

use std::{
    collections::{BTreeSet, HashMap, hash_map::Entry},
    fs::{File, TryLockError},
    io,
    net::IpAddr,
    os::fd::{AsFd as _, OwnedFd},
    thread,
    time::{Duration, Instant},
};

use effects::{Maps, Occupied};
use source::Ports;

use crate::{
    cilium::mac::Mac,
    collect::programs,
    evidence::{
        Evidence, Hex, SourceStatus, VipQuery,
        programs::{Attachments, DETAILS, DEVICES, HookKind},
        simulation::{Purpose, Run, Simulation, Skipped, Step},
    },
    judge::targets::{self, Port, Target},
    packet::{self, Flow, Macs},
    sys::{signals::Held, test_run},
};

/// More than this for one frontend on one device tells nothing more.
pub const MOST_PACKETS: u32 = 10_000;

/// Unless the user says otherwise: enough to see each of four backends with a certainty of 99.96 %.
pub const USUAL_PACKETS: u32 = 32;

/// `XDP_PASS`
const XDP_PASS: i32 = 2;

/// `TC_ACT_UNSPEC`, which is tcx's "next" too.
const TC_NEXT: i32 = -1;

/// What is to be simulated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// At most this many packets for each frontend on each device.
    pub at_most: u32,
    /// Source of the packets, instead of an address that belongs to nobody.
    pub source: Option<IpAddr>,
}

/// Why nothing was simulated.
#[derive(Debug, thiserror::Error)]
pub enum SimulateError {
    /// Which programs are attached is not known.
    #[error("cannot simulate: which programs run where was not read: {0}")]
    NotRead(String),
    /// A program was replaced between the question which one is attached and its run.
    #[error(
        "cannot simulate: Cilium's program {program} on {device} was replaced meanwhile, again and \
         again: try once more when the agent has settled"
    )]
    Replaced {
        /// Program id.
        program: u32,
        /// The device.
        device: String,
    },
    /// The kernel refuses.
    #[error("cannot simulate: {what}: {source}{}", hint(source))]
    Refused {
        /// What was to be done.
        what: String,
        /// The kernel's answer.
        source: io::Error,
    },
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            ": run as root, or with CAP_SYS_ADMIN (to open Cilium's programs and maps by id), \
             CAP_BPF and CAP_NET_ADMIN"
        }
        _ => "",
    }
}

/// Simulates clients' packets for the VIP on every device on which they can arrive, and adds what
/// came of it to the evidence.
///
/// The evidence must be of this moment and of this thread's network namespace. `held` is the
/// promise that a signal does not end the process before everything is taken back; when one comes,
/// the rest is left out.
///
/// # Errors
/// [`SimulateError`]; whatever had been run before is taken back all the same.
pub fn run(
    evidence: &mut Evidence,
    query: &VipQuery,
    request: &Request,
    held: &Held,
) -> Result<(), SimulateError> {
    let simulation = simulate(evidence, query, request, held)?;
    evidence.simulation = Some(simulation);
    Ok(())
}

fn simulate(
    evidence: &Evidence,
    query: &VipQuery,
    request: &Request,
    held: &Held,
) -> Result<Simulation, SimulateError> {
    let attachments = known_programs(evidence).map_err(SimulateError::NotRead)?;
    let Some(_lock) = lock(evidence, held)? else {
        return Ok(Simulation { interrupted: true, ..Simulation::default() });
    };
    let devices = targets::devices(evidence, query.address);
    let ports = targets::ports(evidence, query);
    let used: Vec<u32> =
        devices.iter().flat_map(|device| device.programs.iter().map(|one| one.1)).collect();
    let maps = Maps::open(attachments, &used, query.address, evidence.host.cpus).map_err(
        |(map, source)| SimulateError::Refused { what: format!("opening the map {map}"), source },
    )?;
    let mut simulator = Simulator {
        evidence,
        query,
        request,
        maps: &maps,
        programs: HashMap::new(),
        source_ports: Ports::from_any(),
        simulation: Simulation { at_most: request.at_most, ..Simulation::default() },
    };
    for device in &devices {
        if let Some(why) = simulator.unfit(device) {
            simulator.skip(device, None, why);
            continue;
        }
        let mut controlled = BTreeSet::new();
        for port in &ports {
            if held.pending() {
                simulator.simulation.interrupted = true;
                return Ok(simulator.simulation);
            }
            simulator.frontend(device, port, &mut controlled, held)?;
        }
    }
    still_attached(&devices, &simulator)?;
    Ok(simulator.simulation)
}

/// The programs that are attached, if it is known which; else why not.
pub(crate) fn known_programs(evidence: &Evidence) -> Result<&Attachments, String> {
    let Some(attachments) = &evidence.attachments else {
        return Err("it was not asked for".to_owned());
    };
    let unread = evidence.sources.iter().find(|source| {
        [DEVICES, DETAILS].contains(&source.what.as_str()) && source.status == SourceStatus::Failed
    });
    match unread {
        Some(source) => Err(source.reason.clone().unwrap_or_default()),
        None => Ok(attachments),
    }
}

/// The MAC address that the node knows a client by, so that none is made up for a real one.
pub(crate) fn client_mac(maps: &Maps, evidence: &Evidence, source: IpAddr, ifindex: u32) -> Mac {
    let neighbour = || {
        let network = evidence.network.as_ref()?;
        network.neighbour(source, ifindex)?.mac.as_ref()?.parse().ok()
    };
    maps.client_mac(source).or_else(neighbour).unwrap_or(source::CLIENT_MAC)
}

/// How long another simulation or injection on this node is waited for.
const PATIENCE: Duration = Duration::from_mins(1);

/// Two simulations at once would take each other's entries for those of real clients: the second
/// waits. Nothing if a signal came meanwhile.
pub(crate) fn lock(evidence: &Evidence, held: &Held) -> Result<Option<File>, SimulateError> {
    let refused = |what: &str, source| SimulateError::Refused { what: what.to_owned(), source };
    let Some(bpffs) = evidence.bpffs.iter().find(|bpffs| bpffs.read) else {
        return Err(SimulateError::NotRead("no BPF file system was read".to_owned()));
    };
    let folder = File::open(&bpffs.path).map_err(|error| refused("locking bpffs", error))?;
    let start = Instant::now();
    loop {
        match folder.try_lock() {
            Ok(()) => return Ok(Some(folder)),
            Err(TryLockError::Error(error)) => return Err(refused("locking bpffs", error)),
            Err(TryLockError::WouldBlock) if held.pending() => return Ok(None),
            Err(TryLockError::WouldBlock) if start.elapsed() > PATIENCE => {
                return Err(refused(
                    "another simulation or injection has been running on this node for a minute",
                    io::ErrorKind::ResourceBusy.into(),
                ));
            }
            Err(TryLockError::WouldBlock) => thread::sleep(Duration::from_millis(2)),
        }
    }
}

/// That what was run is what runs there.
fn still_attached(devices: &[Target], simulator: &Simulator<'_>) -> Result<(), SimulateError> {
    if simulator.simulation.runs.is_empty() {
        return Ok(());
    }
    let now = programs::attached_now().map_err(SimulateError::NotRead)?;
    for device in devices {
        for (hook, program, _) in &device.programs {
            let ran = simulator.programs.contains_key(program);
            if ran && !now.contains(&(device.ifindex, *hook, *program)) {
                return Err(SimulateError::Replaced {
                    program: *program,
                    device: device.device.clone(),
                });
            }
        }
    }
    Ok(())
}

struct Simulator<'e> {
    evidence: &'e Evidence,
    query: &'e VipQuery,
    request: &'e Request,
    maps: &'e Maps,
    /// Opened once: many devices may share one.
    programs: HashMap<u32, OwnedFd>,
    source_ports: Ports,
    simulation: Simulation,
}

/// A packet to be run.
struct Packet<'p> {
    purpose: Purpose,
    device: &'p Target,
    port: &'p Port,
    source: IpAddr,
    destination: (IpAddr, u16),
}

impl Simulator<'_> {
    fn skip(&mut self, device: &Target, frontend: Option<&Port>, why: String) {
        self.simulation.skipped.push(Skipped {
            device: device.device.clone(),
            frontend: frontend.map(|port| port.frontend.clone()),
            why,
        });
    }

    /// Why nothing can be simulated on a device.
    fn unfit(&self, device: &Target) -> Option<String> {
        if device.programs.is_empty() {
            return Some("no program of Cilium's runs there".to_owned());
        }
        if let Some(why) = &device.other_maps {
            return Some(format!("{why}: whose connections a run would touch cannot be told"));
        }
        match (device.ethernet, device.mac) {
            (None, _) => return Some("what kind of device it is was not read".to_owned()),
            (Some(true), None) => return Some("it has no MAC address".to_owned()),
            _ => {}
        }
        if device.programs.iter().any(|one| one.0 == HookKind::XdpOffload) {
            return Some("Cilium's XDP program runs in the hardware".to_owned());
        }
        let source = self.request.source?;
        if self.taken().contains(&source) {
            return Some(format!("{source} is an address of this node, or the VIP: no client's"));
        }
        (!source::fits(source, device.ethernet == Some(true)))
            .then(|| format!("not from {source}: {}", source::L3_TRICK))
    }

    /// Everything about one frontend on one device.
    fn frontend(
        &mut self,
        device: &Target,
        port: &Port,
        controlled: &mut BTreeSet<u8>,
        held: &Held,
    ) -> Result<(), SimulateError> {
        if ![6, 17].contains(&port.protocol) {
            let why = "only TCP and UDP packets are made".to_owned();
            self.skip(device, Some(port), why);
            return Ok(());
        }
        let v6 = self.query.address.is_ipv6();
        let ethernet = device.ethernet == Some(true);
        if let Some(source) = self.request.source
            && port.backends.iter().any(|backend| backend.0 == source)
        {
            self.skip(device, Some(port), format!("{source} is a backend, no client"));
            return Ok(());
        }
        let usual = self.request.source.unwrap_or_else(|| {
            source::nobodies(v6, ethernet)
                .find(|&source| self.is_free(source, port))
                .unwrap_or_else(|| source::nobody(v6, ethernet))
        });
        // Where only some sources are let through, one that is and one that is not.
        let mut sources = vec![usual];
        if let (Some(ranges), None) = (&port.ranges, self.request.source)
            && !ranges.admit(usual)
        {
            match source::admitted(ranges, v6, ethernet, &self.taken()) {
                Some(source) => sources.push(source),
                None if ranges.list.is_empty() || ranges.deny => {}
                None if ethernet => {
                    let why = "no free address in its source ranges".to_owned();
                    self.skip(device, Some(port), why);
                }
                None => {
                    let why =
                        format!("no source of its source ranges can be used: {}", source::L3_TRICK);
                    self.skip(device, Some(port), why);
                }
            }
        }
        for source in sources {
            let packet =
                |purpose, destination| Packet { purpose, device, port, source, destination };
            let Some(control) = self.control_address(port) else {
                let why = "every control address is a frontend".to_owned();
                self.skip(device, Some(port), why);
                return Ok(());
            };
            self.once(&packet(Purpose::ControlAddress, (control, port.port)))?;
            self.series(&packet(Purpose::Client, (self.query.address, port.port)), held)?;
            if controlled.insert(port.protocol)
                && let Some(unused) = self.unused_port()
            {
                self.once(&packet(Purpose::ControlPort, (self.query.address, unused)))?;
            }
        }
        Ok(())
    }

    /// Whether a client has nothing that a run would change.
    fn is_free(&self, source: IpAddr, port: &Port) -> bool {
        let flow = Flow {
            source,
            source_port: self.source_ports.last(),
            destination: self.query.address,
            destination_port: port.port,
            protocol: port.protocol,
        };
        match self.maps.watch(flow, port.reverse_nat, &port.backends) {
            Ok(watch) => {
                watch.release();
                true
            }
            Err(Occupied::Connection) => true,
            Err(Occupied::Client(_)) => false,
        }
    }

    /// Addresses that may not be made a client.
    fn taken(&self) -> Vec<IpAddr> {
        let links = self.evidence.network.iter().flat_map(|network| &network.links);
        links
            .flat_map(|link| &link.addresses)
            .filter_map(|address| address.split_once('/')?.0.parse().ok())
            .chain([self.query.address])
            .collect()
    }

    /// An address that is no frontend.
    fn control_address(&self, port: &Port) -> Option<IpAddr> {
        let is_free = |address: &IpAddr| !self.maps.is_frontend(*address, port.port, port.protocol);
        source::controls(self.query.address.is_ipv6()).find(is_free)
    }

    /// A port of the VIP that is no frontend, below those of node ports.
    fn unused_port(&self) -> Option<u16> {
        let address = self.query.address;
        let is_used =
            |port: u16| [6, 17].iter().any(|&one| self.maps.is_frontend(address, port, one));
        (19_000..20_000).rev().find(|&port| !is_used(port))
    }

    /// Packets with different source ports, until every backend was seen.
    fn series(&mut self, packet: &Packet<'_>, held: &Held) -> Result<(), SimulateError> {
        let mut backends = BTreeSet::new();
        let mut lost = false;
        for _ in 0..self.request.at_most {
            if held.pending() {
                self.simulation.interrupted = true;
                break;
            }
            let Some(run) = self.once(packet)? else { break };
            let to = destination(run).filter(|to| *to != packet.destination);
            match to {
                Some(to) if packet.port.backends.contains(&to) => drop(backends.insert(to)),
                _ => lost = true,
            }
            // Where some are lost, how many is what is asked for.
            let all_seen = backends.len() >= packet.port.selectable;
            let share = packet.port.dangling || (lost && !backends.is_empty());
            if (all_seen && !share) || (lost && backends.is_empty() && !packet.port.dangling) {
                break;
            }
        }
        Ok(())
    }

    /// Runs one packet and takes back what it left. Nothing if the packet cannot be used.
    fn once(&mut self, packet: &Packet<'_>) -> Result<Option<&Run>, SimulateError> {
        let Packet { purpose, device, port, source, destination } = *packet;
        let ethernet = device.ethernet == Some(true);
        let mut flow = Flow {
            source,
            source_port: self.source_ports.another(),
            destination: destination.0,
            destination_port: destination.1,
            protocol: port.protocol,
        };
        let ports = &mut self.source_ports;
        let found = self.maps.watch_free(&mut flow, port.reverse_nat, &port.backends, &[], ports);
        let mut watch = match found {
            Ok(watch) => watch,
            Err(occupied) => {
                let why = match occupied {
                    Occupied::Client(what) => format!(
                        "the client {source} is in use ({what}), which a run would change: choose \
                         another with --source"
                    ),
                    Occupied::Connection => {
                        format!("no free source port of {source}: choose another with --source")
                    }
                };
                self.skip(device, Some(port), why);
                return Ok(None);
            }
        };
        let macs = device.mac.filter(|_| ethernet).map(|own| Macs {
            source: client_mac(self.maps, self.evidence, source, device.ifindex),
            destination: own,
        });
        let Some(bytes) = packet::opening(&flow, fastrand::u32(..), macs, PAYLOAD) else {
            watch.release();
            return Ok(None);
        };
        let mut run = Run {
            purpose,
            frontend: port.frontend.clone(),
            ifindex: device.ifindex,
            device: device.device.clone(),
            source,
            source_port: flow.source_port,
            destination: flow.destination,
            destination_port: flow.destination_port,
            protocol: flow.protocol,
            ethernet,
            steps: Vec::new(),
            problem: None,
        };
        // Whatever happens, what was run so far is taken back by `watch`.
        let result = steps(&mut self.programs, device, bytes, &mut run);
        let effects = watch.take_back();
        self.simulation.effects.extend(effects);
        // What is there for a backend that nobody knew of may be somebody else's.
        if let Some((to, _)) = self::destination(&run)
            .filter(|to| *to != destination && to.0 != source && !port.backends.contains(to))
        {
            let why = format!(
                "a packet went to {to}, which is no backend that was read: conntrack entries of \
                 {source} with it were left to expire"
            );
            self.skip(device, Some(port), why);
        }
        result?;
        self.simulation.runs.push(run);
        Ok(self.simulation.runs.last())
    }
}

/// What a UDP datagram says.
const PAYLOAD: &[u8] = b"inspect";

/// Sends a packet through the programs of a device.
fn steps(
    open: &mut HashMap<u32, OwnedFd>,
    device: &Target,
    mut packet: Vec<u8>,
    run: &mut Run,
) -> Result<(), SimulateError> {
    for &(hook, program, ref name) in &device.programs {
        let refused = |source: io::Error| match source.raw_os_error() {
            Some(libc::ENOENT) => {
                SimulateError::Replaced { program, device: device.device.clone() }
            }
            _ => SimulateError::Refused {
                what: format!("running {name} (program {program}) on {}", device.device),
                source,
            },
        };
        let is_xdp = hook.is_xdp();
        let fd = match open.entry(program) {
            Entry::Occupied(open) => open.into_mut(),
            Entry::Vacant(new) => {
                let fd = test_run::open(program).map_err(refused)?;
                let expected = if is_xdp { test_run::XDP } else { test_run::SCHED_CLS };
                let found = test_run::program_type(&fd).map_err(refused)?;
                if found != expected {
                    return Err(SimulateError::Refused {
                        what: format!(
                            "{name} (program {program}) on {} is of type {found}",
                            device.device
                        ),
                        source: io::ErrorKind::Unsupported.into(),
                    });
                }
                new.insert(fd)
            }
        };
        let ran = if is_xdp {
            test_run::xdp(fd.as_fd(), device.ifindex, &packet)
        } else {
            test_run::classifier(fd.as_fd(), device.ifindex, &packet)
        };
        let ran = match ran {
            Ok(ran) => ran,
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => {
                run.problem = Some(format!("{} is gone", device.device));
                return Ok(());
            }
            Err(error) => return Err(refused(error)),
        };
        run.steps.push(Step {
            hook,
            program,
            name: name.clone(),
            packet_in: Hex(&packet).to_string(),
            packet_out: Hex(&ran.packet).to_string(),
            returned: ran.returned,
            mark: ran.mark,
            control_buffer: ran.control_buffer,
        });
        let goes_on = if is_xdp { ran.returned == XDP_PASS } else { ran.returned == TC_NEXT };
        // Behind XDP comes tc; within tc the next program is for packets that this one left to it.
        if !goes_on {
            break;
        }
        packet = ran.packet;
    }
    Ok(())
}

/// Where a run's packet is to go in the end.
fn destination(run: &Run) -> Option<(IpAddr, u16)> {
    let packet = crate::evidence::parse_hex(&run.steps.last()?.packet_out)?;
    let flow = packet::read(&packet)?.flow()?;
    Some((flow.destination, flow.destination_port))
}
