//! Journeys from made-up event streams whose truth is known: every sort of connection, as every tier
//! of observers would report it; then lost, repeated, out of order, sent again, merged.
//!
//! With everything seen the truth must be found. With less, nothing false may be said.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use inspector::evidence::trace::{HookCount, TierUse, Watched, WatchedHook};
use inspector::judge::journey::{Answer, Conclusion, VipLookups, conclude};
use inspector::judge::{Outcome, Served};
use inspector::trace::journey::{
    Context, Device, DeviceKind, Direction, FrontendAddress, Joiner, Journey, Limits, Tie,
};
use inspector::trace::sighting::{Flow, Hook, Neighbour, Packet, RanProgram, Sighting, Tier};
use proptest::prelude::*;

const LO: u32 = 1;
const ENO1: u32 = 2;
const WG0: u32 = 3;
const LXC1: u32 = 10;
const LXC2: u32 = 11;

const TCP: u8 = 6;
const UDP: u8 = 17;
const SYN: u8 = 2;
const RST: u8 = 4;
const PSH: u8 = 8;
const ACK: u8 = 16;

const MS: u64 = 1_000_000;
const START_NS: u64 = 1_000_000_000_000;
const END_NS: u64 = START_NS + 60_000 * MS;

/// An address of the family: the IPv6 form ends in the IPv4 one.
fn ip(v6: bool, octets: [u8; 4]) -> IpAddr {
    let v4 = Ipv4Addr::from(octets);
    if v6 {
        let [a, b, c, d] = octets.map(u16::from);
        Ipv6Addr::new(0xfd00, 0, 0, 0, a, b, c, d).into()
    } else {
        v4.into()
    }
}

fn vip(v6: bool) -> IpAddr {
    ip(v6, [192, 168, 2, 20])
}

fn local(v6: bool, device: u32) -> (IpAddr, u16) {
    (ip(v6, [10, 77, 1, if device == LXC1 { 128 } else { 55 }]), 8443)
}

fn remote(v6: bool) -> (IpAddr, u16) {
    (ip(v6, [192, 168, 2, 60]), 8080)
}

fn node(v6: bool) -> IpAddr {
    ip(v6, [192, 168, 2, 10])
}

fn context() -> Context {
    let mut context = Context::default();
    for v6 in [false, true] {
        context.vips.insert(vip(v6));
        for protocol in [TCP, UDP] {
            context.frontends.push(FrontendAddress {
                address: vip(v6),
                port: 443,
                protocol,
                proxy_port: None,
            });
        }
        context.backends.extend([local(v6, LXC1), local(v6, LXC2), remote(v6)]);
        context.next_hops.insert(remote(v6).0);
        context.host_addresses.insert(node(v6));
    }
    for (ifindex, name, kind) in [
        (LO, "lo", DeviceKind::Inner),
        (ENO1, "eno1", DeviceKind::Outside),
        (WG0, "wg0", DeviceKind::Outside),
        (LXC1, "lxc1", DeviceKind::Pod),
        (LXC2, "lxc2", DeviceKind::Pod),
    ] {
        context.devices.insert(ifindex, Device { name: name.to_owned(), kind });
    }
    context
}

/// What happens to a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sort {
    /// To a pod of this node, without passing the pod's device.
    LocalPeer,
    /// To a pod of this node, through the pod's device.
    LocalQueue,
    /// To another node, with this node's address as source.
    Remote,
    /// Up the stack with the VIP, whose neighbour does not answer.
    Untranslated,
    /// Up the stack with the VIP, whose neighbour is known: no look-up at all.
    UntranslatedKnown,
    /// Handed to the local proxy.
    Proxied,
    /// No backend: an ICMP error as the VIP.
    NoBackend,
    /// Dropped in BPF.
    Dropped,
    /// To a pod that refuses.
    Refused,
    /// To a pod that says nothing.
    Silent,
    /// A process of the node, not translated.
    Socket,
    /// A pod, translated at its device.
    Pod,
    /// A packet that a pod sends on, not translated.
    FromPod,
    /// The first attempt is not translated, the second is.
    LateProgram,
    /// A connection to the backend itself: no journey.
    Direct,
}

const SORTS: [Sort; 15] = [
    Sort::LocalPeer,
    Sort::LocalQueue,
    Sort::Remote,
    Sort::Untranslated,
    Sort::UntranslatedKnown,
    Sort::Proxied,
    Sort::NoBackend,
    Sort::Dropped,
    Sort::Refused,
    Sort::Silent,
    Sort::Socket,
    Sort::Pod,
    Sort::FromPod,
    Sort::LateProgram,
    Sort::Direct,
];

/// One connection, and how it is disguised.
#[derive(Debug, Clone)]
#[allow(clippy::struct_excessive_bools, reason = "properties that vary on their own")]
struct Connection {
    sort: Sort,
    v6: bool,
    udp: bool,
    /// Whether it comes in through wg0 rather than eno1.
    vpn: bool,
    start_ms: u64,
    first: u32,
    port: u16,
    /// The first packet comes twice.
    again: bool,
    /// Data follows.
    data: bool,
}

/// What is true of a connection.
#[derive(Debug, Clone)]
#[allow(clippy::struct_excessive_bools, reason = "properties that vary on their own")]
struct Truth {
    sort: Sort,
    path: String,
    /// What of it may be said; the first is what must be found when all is seen.
    outcomes: Vec<Outcome>,
    backend: Option<String>,
    source: Option<String>,
    /// Whether the VIP was looked up for it before it was translated.
    looked_up: bool,
    served: bool,
    refused: bool,
    unreachable: bool,
}

/// Makes sightings as the chosen tiers would.
struct Maker<'t> {
    tiers: &'t BTreeSet<Tier>,
    made: Vec<Sighting>,
    /// Which connection is behind a time.
    owner: HashMap<u64, usize>,
    connection: usize,
    /// The next buffer's address: few, so that they are used again.
    buffer: u64,
}

impl Maker<'_> {
    fn put(&mut self, tier: Tier, when_ns: u64, hook: Hook, ifindex: u32) -> Option<&mut Sighting> {
        if !self.tiers.contains(&tier) {
            return None;
        }
        // No two at one time, so that a time tells whose sighting it is.
        let mut monotonic_ns = when_ns;
        while self.owner.contains_key(&monotonic_ns) {
            monotonic_ns += 1;
        }
        self.owner.insert(monotonic_ns, self.connection);
        self.made.push(Sighting {
            monotonic_ns,
            hook,
            tier,
            ifindex,
            skb: None,
            packet: None,
            neighbour: None,
            mark: None,
            detail: None,
            flow: None,
            asked: None,
            program: None,
            headers: None,
        });
        self.made.last_mut()
    }

    /// A packet at a hook that sees its buffer.
    fn at(&mut self, tier: Tier, when_ns: u64, hook: Hook, ifindex: u32, packet: &Packet) {
        let skb = 0xffff_8880_0000_0000 + self.buffer * 256;
        if let Some(one) = self.put(tier, when_ns, hook, ifindex) {
            one.packet = Some(packet.clone());
            one.skb = (tier != Tier::Tc).then_some(skb);
        }
    }

    fn arrives(&mut self, when_ns: u64, ifindex: u32, packet: &Packet) {
        self.at(Tier::Tracepoint, when_ns, Hook::Receive, ifindex, packet);
        self.at(Tier::Tc, when_ns + 300, Hook::TcIngress, ifindex, packet);
    }

    /// Cilium's program at a device: what comes in and what comes out.
    fn program(&mut self, when_ns: u64, ifindex: u32, packet: &Packet, after: &Packet, code: u32) {
        self.at(Tier::Program, when_ns + 600, Hook::ProgramEntry, ifindex, packet);
        self.at(Tier::Program, when_ns + 900, Hook::ProgramExit, ifindex, after);
        if let Some(one) = self.made.last_mut().filter(|one| one.hook == Hook::ProgramExit) {
            one.detail = Some(code.to_string());
        }
    }

    fn leaves(&mut self, when_ns: u64, ifindex: u32, packet: &Packet) {
        self.at(Tier::Tracepoint, when_ns, Hook::Queue, ifindex, packet);
        if matches!(ifindex, ENO1 | WG0) {
            self.at(Tier::Tc, when_ns + 200, Hook::TcEgress, ifindex, packet);
        }
        self.at(Tier::Tracepoint, when_ns + 400, Hook::Transmit, ifindex, packet);
    }

    /// A neighbour is looked up for a packet, and asked for.
    fn looks_up(&mut self, when_ns: u64, ifindex: u32, address: IpAddr, packet: &Packet) {
        let neighbour = Some(Neighbour { address, state: Some("INCOMPLETE".to_owned()) });
        for (tier, after_ns, hook) in [
            (Tier::Tracepoint, 0, Hook::NeighCreate),
            (Tier::Tracepoint, 300, Hook::NeighResolve),
            (Tier::Kprobe, 200, Hook::NeighResolve),
            (Tier::Kprobe, 400, Hook::NeighSolicit),
            (Tier::Tc, 600, Hook::TcEgress),
        ] {
            let skb = 0xffff_8880_0000_0000 + self.buffer * 256;
            if let Some(one) = self.put(tier, when_ns + after_ns, hook, ifindex) {
                one.neighbour.clone_from(&neighbour);
                if tier == Tier::Kprobe && hook == Hook::NeighResolve {
                    one.packet = Some(packet.clone());
                    one.skb = Some(skb);
                }
                if tier == Tier::Tc {
                    one.detail = Some("request".to_owned());
                }
            }
        }
    }

    fn routes(&mut self, when_ns: u64, output: u32, packet: &Packet) {
        if let Some(one) = self.put(Tier::Tracepoint, when_ns, Hook::Route, output) {
            one.flow = Some(Flow {
                source: packet.source,
                destination: packet.destination,
                protocol: packet.protocol,
                gateway: None,
            });
        }
    }

    fn drops(&mut self, when_ns: u64, ifindex: u32, packet: &Packet, reason: &str) {
        self.at(Tier::Tracepoint, when_ns, Hook::Drop, ifindex, packet);
        if let Some(one) = self.made.last_mut().filter(|one| one.hook == Hook::Drop) {
            one.detail = Some(reason.to_owned());
        }
    }
}

impl Connection {
    fn client(&self, id: usize) -> (IpAddr, u16) {
        let last = u8::try_from(id % 200).expect("small") + 30;
        let address = match self.sort {
            Sort::Socket | Sort::Direct => node(self.v6),
            Sort::Pod => local(self.v6, LXC2).0,
            _ if self.vpn => ip(self.v6, [10, 90, 0, last]),
            _ => ip(self.v6, [192, 168, 2, last + 20]),
        };
        (address, self.port)
    }

    fn packet(&self, from: (IpAddr, u16), to: (IpAddr, u16), tcp: (u32, u32, u8)) -> Packet {
        let payload_length = u32::from(self.udp) * 32;
        Packet {
            source: from.0,
            destination: to.0,
            protocol: if self.udp { UDP } else { TCP },
            ports: Some((from.1, to.1)),
            tcp: (!self.udp).then_some(tcp),
            icmp: None,
            quoted: None,
            // Where nothing else tells packets apart, these do.
            ip_id: if self.v6 { 0 } else { self.port },
            flow_label: if self.v6 { u32::from(self.port) } else { 0 },
            ttl: if self.sort == Sort::FromPod { 63 } else { 64 },
            fragment: false,
            length: 60 + payload_length,
            payload_length,
        }
    }

    /// Makes what happens, and says what is true of it.
    #[allow(clippy::too_many_lines, reason = "one sort after another")]
    fn happen(&self, id: usize, maker: &mut Maker<'_>) -> Truth {
        maker.connection = id;
        let v6 = self.v6;
        let client = self.client(id);
        let frontend = (vip(v6), 443);
        let arrival = match self.sort {
            Sort::Pod | Sort::FromPod => LXC2,
            _ if self.vpn => WG0,
            _ => ENO1,
        };
        let syn = self.packet(client, frontend, (self.first, 0, SYN));
        let server_first = self.first.wrapping_mul(31).wrapping_add(7);
        let syn_ack =
            |from, to| self.packet(from, to, (server_first, self.first.wrapping_add(1), SYN | ACK));
        let (pod, pod_device) = (local(v6, LXC1), LXC1);
        let start = START_NS + (200 + self.start_ms) * MS + id as u64 * 7_000;
        let mut truth = Truth {
            sort: self.sort,
            path: match self.sort {
                Sort::Socket | Sort::Direct => "socket on host".to_owned(),
                Sort::Pod => "pod".to_owned(),
                Sort::FromPod => "forwarded from pod".to_owned(),
                _ => format!("forwarded via {}", if self.vpn { "wg0" } else { "eno1" }),
            },
            outcomes: vec![Outcome::DnatBeforeNeigh],
            backend: None,
            source: None,
            looked_up: false,
            served: false,
            refused: false,
            unreachable: false,
        };
        let name = |to: (IpAddr, u16)| std::net::SocketAddr::from(to).to_string();
        let attempts: u64 = if self.again || self.sort == Sort::LateProgram { 2 } else { 1 };
        for attempt in 0..attempts {
            maker.buffer = (maker.buffer + 1) % 5;
            let t = start + attempt * 1_050 * MS;
            let last = attempt + 1 == attempts;
            if !matches!(self.sort, Sort::Socket | Sort::Direct) {
                maker.arrives(t, arrival, &syn);
            }
            let untranslated = |maker: &mut Maker<'_>, out: u32, answers: bool| {
                maker.routes(t + 4_000, out, &syn);
                if answers {
                    maker.leaves(t + 8_000, out, &syn);
                } else {
                    maker.looks_up(t + 6_000, out, frontend.0, &syn);
                }
            };
            match self.sort {
                Sort::LocalPeer | Sort::LocalQueue | Sort::Refused | Sort::Silent | Sort::Pod => {
                    let to = self.packet(client, pod, (self.first, 0, SYN));
                    maker.program(t, arrival, &syn, &to, 7);
                    if self.sort != Sort::LocalPeer {
                        maker.leaves(t + 12_000, pod_device, &to);
                    }
                    truth.backend = Some(name(pod));
                    if last && self.sort != Sort::Silent {
                        let reply = |from| match self.sort {
                            Sort::Refused => self.packet(
                                from,
                                client,
                                (0, self.first.wrapping_add(1), RST | ACK),
                            ),
                            _ => syn_ack(from, client),
                        };
                        maker.buffer = (maker.buffer + 1) % 5;
                        maker.arrives(t + 60_000, pod_device, &reply(pod));
                        maker.program(t + 60_000, pod_device, &reply(pod), &reply(frontend), 7);
                        maker.leaves(t + 72_000, arrival, &reply(frontend));
                        truth.refused = self.sort == Sort::Refused && !self.udp;
                        truth.served = !truth.refused;
                    }
                }
                Sort::Remote => {
                    let source = (node(v6), self.port ^ 0x4000);
                    let to = self.packet(source, remote(v6), (self.first, 0, SYN));
                    maker.program(t, arrival, &syn, &to, 7);
                    maker.looks_up(t + 5_000, ENO1, remote(v6).0, &to);
                    maker.leaves(t + 12_000, ENO1, &to);
                    truth.backend = Some(name(remote(v6)));
                    truth.source = Some(name(source));
                    if last {
                        maker.buffer = (maker.buffer + 1) % 5;
                        let back = syn_ack(remote(v6), source);
                        maker.arrives(t + 160_000, ENO1, &back);
                        let out = syn_ack(frontend, client);
                        maker.program(t + 160_000, ENO1, &back, &out, 7);
                        maker.leaves(t + 172_000, arrival, &out);
                        truth.served = true;
                    }
                }
                Sort::Untranslated => {
                    untranslated(maker, ENO1, false);
                    if last {
                        maker.drops(t + 3_000 * MS, ENO1, &syn, "NEIGH_FAILED");
                    }
                    truth.outcomes = vec![Outcome::Untranslated];
                    truth.looked_up = true;
                }
                Sort::UntranslatedKnown => {
                    untranslated(maker, ENO1, true);
                    truth.outcomes = vec![Outcome::Untranslated];
                }
                Sort::Socket => {
                    maker.looks_up(t, ENO1, frontend.0, &syn);
                    maker.leaves(t + 900_000, ENO1, &syn);
                    truth.outcomes = vec![Outcome::Untranslated];
                    truth.looked_up = true;
                }
                Sort::FromPod => {
                    untranslated(maker, ENO1, false);
                    truth.outcomes = vec![Outcome::Untranslated];
                    truth.looked_up = true;
                }
                Sort::Proxied => {
                    maker.at(Tier::Kprobe, t + 5_000, Hook::LocalDeliver, arrival, &syn);
                    let marked = |one: &&mut Sighting| one.hook == Hook::LocalDeliver;
                    if let Some(one) = maker.made.last_mut().filter(marked) {
                        // 13606 in network order, and the proxy's mark.
                        one.mark = Some(0x2635_0200);
                    }
                    maker.routes(t + 4_000, LO, &syn);
                    truth.outcomes = vec![Outcome::ProxiedBeforeNeigh];
                    if last {
                        maker.leaves(t + 90_000, arrival, &syn_ack(frontend, client));
                        truth.served = true;
                    }
                }
                Sort::NoBackend => {
                    let mut error = self.packet(frontend, client, (0, 0, 0));
                    error.protocol = if v6 { 58 } else { 1 };
                    error.ports = None;
                    error.tcp = None;
                    error.icmp = Some(if v6 { (1, 4) } else { (3, 3) });
                    error.quoted = Some(Box::new(syn.clone()));
                    maker.leaves(t + 6_000, arrival, &error);
                    truth.outcomes = vec![Outcome::NoBackend];
                    truth.unreachable = true;
                }
                Sort::Dropped => {
                    maker.program(t, arrival, &syn, &syn, 2);
                    maker.drops(t + 2_000, arrival, &syn, "TC_INGRESS");
                    truth.outcomes = vec![Outcome::Dropped];
                }
                Sort::LateProgram => {
                    let to = self.packet(client, pod, (self.first, 0, SYN));
                    if attempt == 0 {
                        untranslated(maker, ENO1, false);
                    } else {
                        maker.program(t, arrival, &syn, &to, 7);
                        maker.leaves(t + 12_000, pod_device, &to);
                        maker.arrives(t + 60_000, pod_device, &syn_ack(pod, client));
                        maker.leaves(t + 72_000, arrival, &syn_ack(frontend, client));
                    }
                    truth.backend = Some(name(pod));
                    truth.outcomes = vec![Outcome::Unknown];
                    truth.looked_up = true;
                    truth.served = true;
                }
                Sort::Direct => {
                    let to = self.packet(client, pod, (self.first, 0, SYN));
                    maker.leaves(t + 2_000, pod_device, &to);
                    if last {
                        maker.arrives(t + 60_000, pod_device, &syn_ack(pod, client));
                    }
                    truth.outcomes = Vec::new();
                }
            }
        }
        let flows = matches!(self.sort, Sort::LocalPeer | Sort::LocalQueue);
        if self.data && flows && !self.udp {
            let t = start + (attempts - 1) * 1_050 * MS + 400_000;
            let numbers = (self.first.wrapping_add(1), server_first.wrapping_add(1), PSH | ACK);
            // Two segments that the device has merged, and that are apart on the other side.
            let mut request = self.packet(client, frontend, numbers);
            request.payload_length = 2800;
            request.length += 2800;
            maker.arrives(t, arrival, &request);
            if self.sort == Sort::LocalQueue {
                for part in 0..2 {
                    let numbers = (numbers.0.wrapping_add(part * 1400), numbers.1, numbers.2);
                    let mut cut = self.packet(client, pod, numbers);
                    cut.payload_length = 1400;
                    cut.length += 1400;
                    maker.leaves(t + 12_000 + u64::from(part) * 500, pod_device, &cut);
                }
            }
        }
        truth
    }
}

/// What the tiers watch.
fn watched(tiers: &BTreeSet<Tier>) -> Watched {
    let every = |hooks: &[Hook]| -> Vec<WatchedHook> {
        hooks.iter().map(|hook| WatchedHook { hook: *hook, ifindexes: None }).collect()
    };
    let at = |hook, devices: &[u32]| WatchedHook { hook, ifindexes: Some(devices.to_vec()) };
    let tiers = tiers
        .iter()
        .map(|tier| TierUse {
            tier: *tier,
            hooks: match tier {
                Tier::Tc => vec![
                    at(Hook::TcIngress, &[ENO1, WG0, LXC1, LXC2]),
                    at(Hook::TcEgress, &[ENO1, WG0]),
                ],
                Tier::Tracepoint => every(&[
                    Hook::Receive,
                    Hook::Queue,
                    Hook::Transmit,
                    Hook::Route,
                    Hook::NeighCreate,
                    Hook::NeighResolve,
                    Hook::Drop,
                ]),
                Tier::Kprobe => {
                    every(&[Hook::NeighResolve, Hook::NeighSolicit, Hook::LocalDeliver])
                }
                Tier::Program => vec![
                    at(Hook::ProgramEntry, &[ENO1, WG0, LXC1, LXC2]),
                    at(Hook::ProgramExit, &[ENO1, WG0, LXC1, LXC2]),
                ],
                Tier::Netlink => Vec::new(),
            },
            attached: Vec::new(),
            missing: Vec::new(),
            reason: None,
        })
        .collect();
    Watched { started_ns: START_NS, tiers, ..Watched::default() }
}

/// A generator that is good enough to choose with, and the same each time.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides.max(1)
    }
}

/// How the stream is disturbed.
#[derive(Debug, Clone, Copy)]
struct Trouble {
    seed: u64,
    /// Of a thousand sightings.
    lost: u64,
    repeated: u64,
    /// How far apart in time sightings may change places, milliseconds.
    jumbled_ms: u64,
    /// Somebody else asks for the VIP, this often.
    noise: u64,
}

/// What came of it all.
struct Run {
    truths: Vec<Truth>,
    journeys: Vec<(Journey, Conclusion)>,
    owner: HashMap<u64, usize>,
}

fn run(connections: &[Connection], tiers: &BTreeSet<Tier>, trouble: Trouble) -> Run {
    let mut maker =
        Maker { tiers, made: Vec::new(), owner: HashMap::new(), connection: 0, buffer: 0 };
    let truths: Vec<Truth> =
        connections.iter().enumerate().map(|(id, one)| one.happen(id, &mut maker)).collect();
    let mut dice = Dice(trouble.seed | 1);
    maker.connection = usize::MAX;
    for _ in 0..trouble.noise {
        let when_ns = START_NS + dice.roll(12_000 * MS);
        let hook = if dice.roll(2) == 0 { Hook::NeighCreate } else { Hook::NeighResolve };
        if let Some(one) = maker.put(Tier::Tracepoint, when_ns, hook, ENO1) {
            one.neighbour = Some(Neighbour { address: vip(false), state: None });
        }
    }
    let mut watched = watched(tiers);
    let mut counts: BTreeMap<(Tier, Hook), HookCount> = BTreeMap::new();
    let mut stream: Vec<(u64, Sighting)> = Vec::new();
    for one in maker.made {
        let count = counts.entry((one.tier, one.hook)).or_insert(HookCount {
            tier: one.tier,
            hook: one.hook,
            matched: 0,
            lost: 0,
        });
        count.matched += 1;
        if dice.roll(1000) < trouble.lost {
            count.lost += 1;
            continue;
        }
        let delay = |dice: &mut Dice| dice.roll(trouble.jumbled_ms * MS + 1);
        if dice.roll(1000) < trouble.repeated {
            stream.push((one.monotonic_ns + delay(&mut dice), one.clone()));
        }
        stream.push((one.monotonic_ns + delay(&mut dice), one));
    }
    stream.sort_by_key(|(when_ns, _)| *when_ns);
    watched.counts = counts.into_values().collect();
    let context = context();
    let mut joiner = Joiner::new(context.clone(), Limits::default());
    let mut journeys = Vec::new();
    for (_, sighting) in stream {
        joiner.add(sighting);
        journeys.extend(joiner.take());
    }
    journeys.extend(joiner.finish(END_NS));
    watched.joined = joiner.counts();
    let journeys = journeys
        .into_iter()
        .map(|one| {
            let conclusion = conclude(&one, &context, &watched);
            (one, conclusion)
        })
        .collect();
    Run { truths, journeys, owner: maker.owner }
}

impl Run {
    /// Whose journey it is: every packet in it must say the same.
    fn owner(&self, journey: &Journey) -> usize {
        let owners: BTreeSet<usize> = journey
            .steps
            .iter()
            .filter(|step| step.tie != Tie::Time && step.sighting.packet.is_some())
            .map(|step| self.owner[&step.sighting.monotonic_ns])
            .collect();
        assert_eq!(owners.len(), 1, "one journey, several connections: {journey:#?}");
        *owners.first().expect("one")
    }

    /// Nothing that is said is false.
    fn assert_sound(&self) {
        for (journey, one) in &self.journeys {
            let truth = &self.truths[self.owner(journey)];
            let text = format!("{one}\n{truth:#?}\n{journey:#?}");
            assert_ne!(truth.sort, Sort::Direct, "no packet carried the VIP: {text}");
            let path = one.path.to_string();
            assert!(path == "unknown path" || path == truth.path, "path {path}: {text}");
            let known = one.outcome != Outcome::Unknown;
            // Of a connection that fared now so, now so, what was seen may be one of them.
            let half = truth.sort == Sort::LateProgram && one.attempts <= 1;
            if known && !half {
                assert!(truth.outcomes.contains(&one.outcome), "outcome {}: {text}", one.outcome);
            }
            if let Some(translation) = &one.translation {
                assert_eq!(Some(&translation.backend), truth.backend.as_ref(), "{text}");
                if translation.source.is_some() {
                    assert_eq!(translation.source, truth.source, "{text}");
                }
            }
            if truth.looked_up {
                assert_ne!(one.vip_lookups, VipLookups::None, "the VIP was looked up: {text}");
            }
            if let VipLookups::Seen { for_packet: 1.., .. } = one.vip_lookups {
                assert!(truth.looked_up, "{text}");
            }
            match &one.answer {
                Answer::Answered { .. } => assert!(truth.served, "{text}"),
                Answer::Refused { .. } => assert!(truth.refused, "{text}"),
                Answer::Unreachable { .. } => assert!(truth.unreachable, "{text}"),
                Answer::Reset { .. } => panic!("nothing was reset: {text}"),
                Answer::Silent { .. } | Answer::NotYet { .. } => {}
            }
            match one.served {
                Served::Yes => assert!(truth.served, "{text}"),
                Served::No => assert!(!truth.served, "{text}"),
                Served::Partly | Served::Unknown => {}
            }
        }
    }

    /// With everything seen, everything is found.
    fn assert_complete(&self) {
        let mut found: Vec<usize> = self.journeys.iter().map(|(one, _)| self.owner(one)).collect();
        found.sort_unstable();
        let expected: Vec<usize> =
            (0..self.truths.len()).filter(|id| self.truths[*id].sort != Sort::Direct).collect();
        assert_eq!(found, expected, "one journey for each connection");
        for (journey, one) in &self.journeys {
            let truth = &self.truths[self.owner(journey)];
            let text = format!("{one}\n{truth:#?}\n{journey:#?}");
            assert_eq!(one.path.to_string(), truth.path, "{text}");
            assert_eq!(one.outcome, truth.outcomes[0], "{text}");
            assert_eq!(one.served == Served::Yes, truth.served, "{text}");
            assert_eq!(matches!(one.answer, Answer::Refused { .. }), truth.refused, "{text}");
            let backend = one.translation.as_ref().map(|one| one.backend.clone());
            assert_eq!(backend, truth.backend, "{text}");
            let source = one.translation.as_ref().and_then(|one| one.source.clone());
            assert_eq!(source, truth.source, "{text}");
            let looked_up = matches!(one.vip_lookups, VipLookups::Seen { for_packet: 1.., .. });
            assert_eq!(looked_up, truth.looked_up, "{text}");
            assert!(journey.steps.iter().any(|step| step.direction == Direction::Request));
        }
    }
}

fn connections(most: usize) -> impl Strategy<Value = Vec<Connection>> {
    let one = (
        prop::sample::select(&SORTS[..]),
        any::<[bool; 5]>(),
        0_u64..9_000,
        // Few numbers, so that connections have the same.
        prop_oneof![4 => any::<u32>(), 1 => 0_u32..3],
        any::<u16>(),
    );
    prop::collection::vec(one, 1..most).prop_map(|all| {
        all.into_iter()
            .enumerate()
            .map(|(id, (sort, [v6, udp, vpn, again, data], start_ms, first, port))| {
                let udp = udp && !matches!(sort, Sort::Refused | Sort::LateProgram | Sort::Silent);
                // Where the node puts its own address in the client's place, the numbers are all
                // that joins, and 32 bits are not the same by chance.
                let first = match sort {
                    Sort::Remote | Sort::Direct => 0x8000_0000 | u32::try_from(id).expect("few"),
                    _ => first & 0x7fff_ffff,
                };
                Connection {
                    sort,
                    v6,
                    udp,
                    vpn,
                    start_ms,
                    first,
                    // The node's own connections differ in nothing but the port.
                    port: 1024 + u16::try_from(id).expect("few") * 64 + port % 64,
                    again: again && !udp,
                    data,
                }
            })
            .collect()
    })
}

fn tiers() -> impl Strategy<Value = BTreeSet<Tier>> {
    prop::sample::subsequence(vec![Tier::Tc, Tier::Tracepoint, Tier::Kprobe, Tier::Program], 1..=4)
        .prop_map(|tiers| tiers.into_iter().collect())
}

fn all_tiers() -> BTreeSet<Tier> {
    [Tier::Tc, Tier::Tracepoint, Tier::Kprobe, Tier::Program].into()
}

/// Connections of which no two have the same numbers: what tells them apart when the node puts its
/// own address in the client's place.
fn distinct(mut connections: Vec<Connection>) -> Vec<Connection> {
    for (id, one) in connections.iter_mut().enumerate() {
        one.first = one.first.wrapping_mul(64).wrapping_add(u32::try_from(id).expect("few") + 1);
    }
    connections
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn with_everything_seen_the_truth_is_found(
        connections in connections(12), seed in any::<u64>(), jumbled_ms in 0_u64..40,
    ) {
        let connections = distinct(connections);
        let trouble = Trouble { seed, lost: 0, repeated: 200, jumbled_ms, noise: 0 };
        let run = run(&connections, &all_tiers(), trouble);
        run.assert_sound();
        run.assert_complete();
    }

    #[test]
    fn fewer_tiers_say_less_and_nothing_false(
        connections in connections(12), tiers in tiers(), seed in any::<u64>(),
        jumbled_ms in 0_u64..40, noise in 0_u64..40,
    ) {
        let trouble = Trouble { seed, lost: 0, repeated: 100, jumbled_ms, noise };
        run(&connections, &tiers, trouble).assert_sound();
    }

    #[test]
    fn loss_says_less_and_nothing_false(
        connections in connections(12), tiers in tiers(), seed in any::<u64>(),
        lost in 1_u64..700, jumbled_ms in 0_u64..150, noise in 0_u64..40,
    ) {
        let trouble = Trouble { seed, lost, repeated: 100, jumbled_ms, noise };
        run(&connections, &tiers, trouble).assert_sound();
    }
}

#[test]
fn every_sort_is_found_by_the_tiers_that_can_see_it() {
    // What tc alone, and tc with tracepoints (which is what a locked-down kernel has), make of each.
    for (sort, tc, with_tracepoints) in [
        (Sort::LocalPeer, Outcome::DnatBeforeNeigh, Outcome::DnatBeforeNeigh),
        (Sort::LocalQueue, Outcome::DnatBeforeNeigh, Outcome::DnatBeforeNeigh),
        (Sort::Remote, Outcome::DnatBeforeNeigh, Outcome::DnatBeforeNeigh),
        (Sort::Untranslated, Outcome::Unknown, Outcome::Untranslated),
        (Sort::UntranslatedKnown, Outcome::Untranslated, Outcome::Untranslated),
        (Sort::NoBackend, Outcome::NoBackend, Outcome::NoBackend),
        (Sort::Dropped, Outcome::Unknown, Outcome::Dropped),
        (Sort::Refused, Outcome::DnatBeforeNeigh, Outcome::DnatBeforeNeigh),
        (Sort::Silent, Outcome::Unknown, Outcome::DnatBeforeNeigh),
        (Sort::Socket, Outcome::Untranslated, Outcome::Untranslated),
        (Sort::FromPod, Outcome::Unknown, Outcome::Untranslated),
        (Sort::Pod, Outcome::DnatBeforeNeigh, Outcome::DnatBeforeNeigh),
        // Without a mark it is not seen who answered.
        (Sort::Proxied, Outcome::Unknown, Outcome::Unknown),
    ] {
        for v6 in [false, true] {
            let connection = Connection {
                sort,
                v6,
                udp: false,
                vpn: true,
                start_ms: 0,
                first: 77,
                port: 40_000,
                again: false,
                data: false,
            };
            let trouble = Trouble { seed: 1, lost: 0, repeated: 0, jumbled_ms: 0, noise: 0 };
            for (tiers, expected) in [
                (BTreeSet::from([Tier::Tc]), tc),
                (BTreeSet::from([Tier::Tc, Tier::Tracepoint]), with_tracepoints),
            ] {
                let run = run(std::slice::from_ref(&connection), &tiers, trouble);
                run.assert_sound();
                let [(_, one)] = run.journeys.as_slice() else { panic!("{sort:?}: one journey") };
                assert_eq!(one.outcome, expected, "{sort:?} by {tiers:?}: {one}");
            }
        }
    }
}

#[test]
fn a_million_sightings_are_bounded_and_accounted_for() {
    let limits = Limits {
        journeys: 500,
        steps: 24,
        waiting: 1_000,
        neighbours: 300,
        past: 2_000,
        ..Limits::default()
    };
    // Each journey holds at most its steps, and 64 tuples, numbers and buffers, in two places.
    let most = limits.waiting
        + limits.neighbours
        + 256
        + limits.journeys * (4 + limits.steps + 16 + 2 * 3 * 64)
        + 2 * limits.past
        + 2;
    let mut joiner = Joiner::new(context(), limits);
    let mut dice = Dice(0x5eed);
    let (mut begun, mut ended, mut held) = (0_u64, 0_u64, 0);
    let mut owners: BTreeSet<(IpAddr, u16)> = BTreeSet::new();
    let mut now_ns = START_NS;
    let hooks = [Hook::TcIngress, Hook::Queue, Hook::Transmit, Hook::Drop, Hook::NeighResolve];
    for number in 0..1_000_000_u64 {
        now_ns += dice.roll(2_000);
        let port = u16::try_from(dice.roll(60_000)).expect("16 bits") + 1;
        let client = (ip(false, [10, 90, u8::try_from(dice.roll(4)).expect("small"), 9]), port);
        let to = if dice.roll(4) == 0 { local(false, LXC1) } else { (vip(false), 443) };
        let packet = Packet {
            source: client.0,
            destination: to.0,
            protocol: if dice.roll(8) == 0 { UDP } else { TCP },
            ports: Some((client.1, to.1)),
            tcp: None,
            icmp: None,
            quoted: None,
            ip_id: 0,
            flow_label: 0,
            ttl: 64,
            fragment: false,
            length: 60,
            payload_length: 0,
        };
        let tcp = (packet.protocol == TCP).then(|| {
            let flags = [SYN, ACK, SYN | ACK, RST | ACK][usize::try_from(dice.roll(4)).expect("4")];
            (u32::try_from(dice.roll(1 << 32)).expect("32 bits"), 5, flags)
        });
        let neighbour = (dice.roll(10) == 0).then(|| Neighbour {
            address: vip(false),
            state: Some(dice.roll(1 << 20).to_string()),
        });
        let blind = neighbour.is_some() && dice.roll(2) == 0;
        joiner.add(Sighting {
            monotonic_ns: now_ns - dice.roll(5_000),
            hook: hooks[usize::try_from(dice.roll(5)).expect("5")],
            tier: Tier::Tracepoint,
            ifindex: [ENO1, LXC1][usize::try_from(dice.roll(2)).expect("2")],
            skb: Some(dice.roll(50_000)),
            packet: (!blind).then_some(Packet { tcp, ..packet }),
            neighbour,
            mark: Some(u32::try_from(dice.roll(1 << 30)).expect("32 bits")),
            detail: None,
            flow: None,
            asked: None,
            program: None,
            headers: None,
        });
        if number % 1_000 == 0 {
            for one in joiner.take() {
                ended += 1;
                begun += u64::from(owners.insert(one.client.expect("a client")));
                assert!(one.steps.len() <= limits.steps + 16, "{}", one.steps.len());
            }
            held = held.max(joiner.held());
            assert!(joiner.held() <= most, "{} things held, {most} allowed", joiner.held());
        }
    }
    let rest = joiner.finish(now_ns + 1);
    ended += rest.len() as u64;
    let counts = joiner.counts();
    assert_eq!(counts.sightings, 1_000_000);
    // More came than there was room for, and what made room was counted.
    assert!(counts.cut_short > 10_000, "{counts:?}");
    assert!(begun > 10_000 && ended > begun, "{begun} {ended}");
    assert!(held > limits.journeys * 4, "{held} held: the limits were not reached");
    // Whatever is still held is bounded by what past connections leave.
    assert!(joiner.held() <= 2 * limits.past + limits.neighbours + 256 + 2, "{}", joiner.held());
}

/// An ARP request goes out in a buffer in which another packet may have been just before.
#[test]
fn a_question_on_its_way_out_is_tied_to_no_packet_by_its_buffer() {
    let syn = Packet {
        source: ip(false, [192, 168, 2, 50]),
        destination: vip(false),
        protocol: TCP,
        ports: Some((40_000, 443)),
        tcp: Some((7, 0, SYN)),
        icmp: None,
        quoted: None,
        ip_id: 1,
        flow_label: 0,
        ttl: 64,
        fragment: false,
        length: 60,
        payload_length: 0,
    };
    let sighting = |after_ns, tier, hook, packet: Option<&Packet>| Sighting {
        monotonic_ns: START_NS + after_ns,
        hook,
        tier,
        ifindex: ENO1,
        skb: Some(0xffff_8880_0000_1000),
        packet: packet.cloned(),
        neighbour: packet.is_none().then(|| Neighbour { address: vip(false), state: None }),
        mark: None,
        detail: None,
        flow: None,
        asked: None,
        program: None,
        headers: None,
    };
    let lookups = |tier| {
        let mut joiner = Joiner::new(context(), Limits::default());
        joiner.add(sighting(0, Tier::Tracepoint, Hook::Receive, Some(&syn)));
        joiner.add(sighting(MS, tier, Hook::NeighSolicit, None));
        let journeys = joiner.finish(END_NS);
        assert_eq!(journeys.len(), 1);
        let steps = &journeys[0].steps;
        let found: Vec<Tie> = steps
            .iter()
            .filter(|step| step.sighting.neighbour.is_some())
            .map(|step| step.tie)
            .collect();
        found
    };
    assert!(!lookups(Tier::Tracepoint).contains(&Tie::Skb));
    // What a kprobe names is the packet that waits.
    assert_eq!(lookups(Tier::Kprobe), [Tie::Skb]);
}

/// A policy denies what was translated: that is no translation that leads anywhere.
#[test]
fn what_a_program_translates_and_drops_is_dropped_and_what_it_redirects_is_translated() {
    let syn = Packet {
        source: ip(false, [192, 168, 2, 50]),
        destination: vip(false),
        protocol: TCP,
        ports: Some((40_000, 443)),
        tcp: Some((7, 0, SYN)),
        icmp: None,
        quoted: None,
        ip_id: 1,
        flow_label: 0,
        ttl: 64,
        fragment: false,
        length: 60,
        payload_length: 0,
    };
    let (pod, port) = local(false, LXC1);
    let translated = Packet { destination: pod, ports: Some((40_000, port)), ..syn.clone() };
    let tiers = [Tier::Tc, Tier::Tracepoint, Tier::Program].into();
    let seen = |code: &str, dropped: bool| {
        let program = RanProgram { id: 4711, name: "cil_from_netdev".to_owned() };
        let mut joiner = Joiner::new(context(), Limits::default());
        let mut add = |after_ns, tier, hook, packet: &Packet, detail: Option<&str>| {
            joiner.add(Sighting {
                monotonic_ns: START_NS + after_ns,
                hook,
                tier,
                ifindex: ENO1,
                skb: Some(0xffff_8880_0000_1000),
                packet: Some(packet.clone()),
                neighbour: None,
                mark: None,
                detail: detail.map(str::to_owned),
                flow: None,
                asked: None,
                program: (tier == Tier::Program).then(|| program.clone()),
                headers: None,
            });
        };
        add(0, Tier::Tracepoint, Hook::Receive, &syn, None);
        add(10, Tier::Program, Hook::ProgramEntry, &syn, None);
        add(20, Tier::Program, Hook::ProgramExit, &translated, Some(code));
        if dropped {
            add(30, Tier::Tracepoint, Hook::Drop, &translated, Some("TC_INGRESS"));
        }
        let journeys = joiner.finish(START_NS + 10_000 * MS);
        assert_eq!(journeys.len(), 1);
        conclude(&journeys[0], &context(), &watched(&tiers))
    };
    let by = |verdict: &str| Some(format!("cil_from_netdev (program 4711, returned {verdict})"));
    let of = |one: &Conclusion| one.translation.as_ref().and_then(|one| one.by.clone());
    for dropped in [false, true] {
        let one = seen("2 TC_ACT_SHOT", dropped);
        assert_eq!((one.outcome, one.served), (Outcome::Dropped, Served::No), "{one}");
        assert_eq!(of(&one), by("TC_ACT_SHOT 2"));
        assert!(one.why.contains("Cilium's program on eno1 dropped it"), "{}", one.why);
    }
    let one = seen("7 TC_ACT_REDIRECT", false);
    assert_eq!((one.outcome, one.served), (Outcome::DnatBeforeNeigh, Served::No), "{one}");
    assert_eq!(of(&one), by("TC_ACT_REDIRECT 7"));
    let text = format!("translated to {pod}:{port} by cil_from_netdev (program 4711, returned");
    assert!(one.to_string().contains(&text), "{one}");
}

/// A router that tells of a shorter way has sent the packet on: that is no answer, and the real one is
/// waited for.
#[test]
fn an_icmp_redirect_ends_no_wait_for_an_answer() {
    let syn = Packet {
        source: ip(false, [192, 168, 2, 50]),
        destination: vip(false),
        protocol: TCP,
        ports: Some((40_000, 443)),
        tcp: Some((7, 0, SYN)),
        icmp: None,
        quoted: None,
        ip_id: 1,
        flow_label: 0,
        ttl: 64,
        fragment: false,
        length: 60,
        payload_length: 0,
    };
    let error = |icmp| Packet {
        source: ip(false, [192, 168, 2, 10]),
        destination: syn.source,
        protocol: 1,
        ports: None,
        tcp: None,
        icmp: Some(icmp),
        quoted: Some(Box::new(syn.clone())),
        ..syn.clone()
    };
    let sighting = |after_ns, hook, skb, packet: &Packet| Sighting {
        monotonic_ns: START_NS + after_ns,
        hook,
        tier: Tier::Tracepoint,
        ifindex: ENO1,
        skb: Some(skb),
        packet: Some(packet.clone()),
        neighbour: None,
        mark: None,
        detail: None,
        flow: None,
        asked: None,
        program: None,
        headers: None,
    };
    let over = |icmp| {
        let mut joiner = Joiner::new(context(), Limits::default());
        joiner.add(sighting(0, Hook::Receive, 1, &syn));
        joiner.add(sighting(MS, Hook::Queue, 2, &error(icmp)));
        joiner.advance(START_NS + 1_000 * MS);
        joiner.take().len()
    };
    // Redirect, host; and what is an answer: host unreachable.
    assert_eq!(over((5, 1)), 0);
    assert_eq!(over((3, 1)), 1);
}

/// A machine is busy, and the next hop has to be looked up first.
#[test]
fn a_packet_that_leaves_late_with_the_nodes_address_is_the_one_that_arrived() {
    let syn = Packet {
        source: ip(false, [192, 168, 2, 50]),
        destination: vip(false),
        protocol: TCP,
        ports: Some((40_000, 443)),
        tcp: Some((7, 0, SYN)),
        icmp: None,
        quoted: None,
        ip_id: 1,
        flow_label: 0,
        ttl: 64,
        fragment: false,
        length: 60,
        payload_length: 0,
    };
    let (backend, port) = remote(false);
    let translated = Packet {
        source: node(false),
        destination: backend,
        ports: Some((50_000, port)),
        ..syn.clone()
    };
    let outcome = |after_ns, sequence| {
        let mut joiner = Joiner::new(context(), Limits::default());
        let mut add = |after_ns, hook, packet: &Packet| {
            joiner.add(Sighting {
                monotonic_ns: START_NS + after_ns,
                hook,
                tier: Tier::Tc,
                ifindex: ENO1,
                skb: None,
                packet: Some(packet.clone()),
                neighbour: None,
                mark: None,
                detail: None,
                flow: None,
                asked: None,
                program: None,
                headers: None,
            });
        };
        add(0, Hook::TcIngress, &syn);
        let tcp = Some((sequence, 0, SYN));
        add(after_ns, Hook::TcEgress, &Packet { tcp, ..translated.clone() });
        let journeys = joiner.finish(START_NS + 10_000 * MS);
        assert_eq!(journeys.len(), 1);
        conclude(&journeys[0], &context(), &watched(&[Tier::Tc].into())).outcome
    };
    for after_ns in [MS, 15 * MS, 900 * MS] {
        assert_eq!(outcome(after_ns, 7), Outcome::DnatBeforeNeigh, "{after_ns}");
        // Another number is another connection.
        assert_ne!(outcome(after_ns, 8), Outcome::DnatBeforeNeigh, "{after_ns}");
    }
    // The client would have tried again.
    assert_ne!(outcome(1_500 * MS, 7), Outcome::DnatBeforeNeigh);
}
