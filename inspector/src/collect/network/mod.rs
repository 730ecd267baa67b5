//! The network of a node: what the kernel answers when it is asked, and nothing that it would have
//! to do for that.
//!
//! Everything is read in two steps. [`Snapshot::take`] reads what no question can narrow (links,
//! addresses, neighbours, rules), which can be done beside the maps. [`Snapshot::answer`] then asks
//! for the routes of a VIP and of its backends, which are known only when the maps were read, and
//! keeps of the rest what matters for them.

pub mod agent;
mod listening;
pub mod node_config;
mod rtnetlink;
mod tool;
mod tproxy;
mod wireguard;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

pub(crate) use rtnetlink::networks;
use rtnetlink::{AF_INET, AF_INET6, Device, RawNeighbour, RouteQuestion};

use crate::{
    evidence::{
        Source, SourceStatus,
        network::{Link, Namespace, Neighbour, Network, Route, RouteAnswer, Rule, WireGuard},
    },
    sys::netlink::{Netlink, NetlinkError},
};

/// The table through which packets with a proxy mark reach a local socket.
pub const PROXY_TABLE: u32 = 2004;

/// Source addresses for a packet of which nothing better is known: documentation networks, which
/// belong to nobody (RFC 5737, RFC 3849).
const NOBODY_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
const NOBODY_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1));

/// What to learn of the network.
#[derive(Debug, Clone, Default)]
pub struct NetworkQuestion {
    /// The VIP.
    pub vip: Option<IpAddr>,
    /// Addresses of its backends.
    pub backends: BTreeSet<IpAddr>,
    /// Local ports of the proxies of its L7 frontends.
    pub proxy_ports: BTreeSet<u16>,
    /// Interface indexes of the devices on which a packet for the VIP could arrive; nothing for
    /// every device that is up, except loopback devices and ports of a bridge or a bond, whose
    /// packets arrive on their master.
    pub inputs: Option<BTreeSet<u32>>,
    /// Source addresses of packets that arrive on devices of which the kernel does not tell: the
    /// pods' addresses, by the interface index of the pods' devices.
    pub sources: BTreeMap<u32, Vec<IpAddr>>,
    /// The agent's state directory, if it is not the usual one ([`node_config::STATE`]).
    pub state: Option<PathBuf>,
    /// The socket of the agent's API, if the agent is to be asked.
    pub agent: Option<PathBuf>,
}

/// Reads the network.
///
/// The sources say what was read; a part that could not be read is missing in the result and its
/// source says why.
#[must_use]
pub fn collect(question: &NetworkQuestion) -> (Network, Vec<Source>) {
    Snapshot::take().answer(question)
}

/// All neighbour entries of this thread's network namespace, as they are now.
///
/// # Errors
/// [`NetlinkError`].
pub fn neighbours_now() -> Result<Vec<Neighbour>, NetlinkError> {
    let mut netlink = Netlink::open(libc::NETLINK_ROUTE)?;
    let (all, _) = rtnetlink::neighbours(&mut netlink)?;
    Ok(all.into_iter().map(Neighbour::from).collect())
}

/// The kernel's ways for packets of this node's own, or the numbers of its errors.
///
/// # Errors
/// [`NetlinkError`] if it cannot be asked.
pub fn routes_now(destinations: &[IpAddr]) -> Result<Vec<Result<Route, i32>>, NetlinkError> {
    let mut netlink = Netlink::open(libc::NETLINK_ROUTE)?;
    let questions: Vec<RouteQuestion> = destinations
        .iter()
        .map(|&destination| RouteQuestion { destination, input: None })
        .collect();
    rtnetlink::routes(&mut netlink, &questions)
}

/// A unicast route of any table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Way {
    /// The network that it leads to, and the length of its prefix.
    pub destination: (IpAddr, u8),
    /// Device through which packets leave; nothing where there are several.
    pub output: Option<u32>,
    /// Next hops; none if the network is on the link.
    pub gateways: Vec<IpAddr>,
}

/// All unicast routes of this thread's network namespace, of every table.
///
/// # Errors
/// [`NetlinkError`].
pub fn ways_now() -> Result<Vec<Way>, NetlinkError> {
    let mut netlink = Netlink::open(libc::NETLINK_ROUTE)?;
    both(|family| rtnetlink::ways(&mut netlink, family)).map(|(ways, _)| ways)
}

/// What was read before the question was known.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    namespace: Option<Namespace>,
    devices: Vec<Device>,
    neighbours: Vec<RawNeighbour>,
    rules: Vec<Rule>,
    proxy_routes: Vec<(u8, String)>,
    sysctls: BTreeMap<String, i64>,
    wireguard: Vec<WireGuard>,
    sources: Vec<Source>,
}

impl Snapshot {
    /// Reads the network namespace of this thread.
    #[must_use]
    pub fn take() -> Self {
        let mut this = Self { namespace: namespace(), ..Self::default() };
        match Netlink::open(libc::NETLINK_ROUTE) {
            Ok(mut netlink) => this.dump(&mut netlink),
            Err(error) => {
                for what in ["links", "neighbours", "rules", "table 2004"] {
                    this.sources.push(failed(what, &error));
                }
            }
        }
        this.read_sysctls();
        this.read_wireguard();
        this
    }

    fn dump(&mut self, netlink: &mut Netlink) {
        let links = rtnetlink::links(netlink).and_then(|(mut devices, steady)| {
            let steady = rtnetlink::addresses(netlink, &mut devices)? && steady;
            Ok((devices, steady))
        });
        self.devices = self.told("links", links).unwrap_or_default();
        self.neighbours =
            self.told("neighbours", rtnetlink::neighbours(netlink)).unwrap_or_default();
        let rules = both(|family| rtnetlink::rules(netlink, family));
        self.rules = self.told("rules", rules).unwrap_or_default();
        let names: HashMap<u32, &str> = self
            .devices
            .iter()
            .map(|device| (device.link.ifindex, device.link.name.as_str()))
            .collect();
        let routes = both(|family| {
            let name = |ifindex| {
                names.get(&ifindex).map_or_else(|| format!("if{ifindex}"), |&name| name.to_owned())
            };
            let (routes, steady) = rtnetlink::table(netlink, family, PROXY_TABLE, name)?;
            Ok((routes.into_iter().map(|route| (family, route)).collect(), steady))
        });
        self.proxy_routes = self.told("table 2004", routes).unwrap_or_default();
    }

    /// Notes how a dump went.
    fn told<T>(&mut self, what: &str, result: Result<(T, bool), NetlinkError>) -> Option<T> {
        match result {
            Ok((all, steady)) => {
                self.sources.push(if steady {
                    source(what, SourceStatus::Complete, None)
                } else {
                    let reason = "they changed faster than they could be read".to_owned();
                    source(what, SourceStatus::Partial, Some(reason))
                });
                Some(all)
            }
            Err(error) => {
                self.sources.push(failed(what, &error));
                None
            }
        }
    }

    fn read_sysctls(&mut self) {
        const GLOBAL: [&str; 5] = [
            "net.ipv4.ip_forward",
            "net.ipv4.conf.all.forwarding",
            "net.ipv4.conf.all.rp_filter",
            "net.ipv4.conf.all.accept_local",
            "net.ipv6.conf.all.forwarding",
        ];
        let mut missing = Vec::new();
        for name in GLOBAL {
            match read_sysctl(name) {
                Ok(value) => {
                    self.sysctls.insert(name.to_owned(), value);
                }
                // A kernel without IPv6 has none.
                Err(error)
                    if error.kind() == io::ErrorKind::NotFound && name.starts_with("net.ipv6") => {}
                Err(error) => missing.push(format!("{name}: {error}")),
            }
        }
        for Device { link, sysctls, .. } in &self.devices {
            for (family, name, value) in sysctls {
                self.sysctls.insert(format!("net.{family}.conf.{}.{name}", link.name), *value);
            }
        }
        self.sources.push(if missing.is_empty() {
            source("sysctls", SourceStatus::Complete, None)
        } else {
            let reason = format!("not readable below /proc/sys: {}", missing.join(", "));
            source("sysctls", SourceStatus::Partial, Some(reason))
        });
    }

    fn read_wireguard(&mut self) {
        let ifindexes: Vec<u32> = self
            .devices
            .iter()
            .filter(|device| device.link.kind.as_deref() == Some("wireguard"))
            .map(|device| device.link.ifindex)
            .collect();
        if ifindexes.is_empty() {
            let reason = "there is no WireGuard device".to_owned();
            self.sources.push(source("WireGuard", SourceStatus::Absent, Some(reason)));
            return;
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let devices = wireguard::devices(&ifindexes, now);
        self.wireguard = self.told("WireGuard", devices).unwrap_or_default();
    }

    /// The name of a device.
    #[must_use]
    pub fn device_name(&self, ifindex: u32) -> Option<&str> {
        self.devices
            .iter()
            .find(|device| device.link.ifindex == ifindex)
            .map(|device| device.link.name.as_str())
    }

    /// Asks what depends on the question, and keeps of the rest what matters for it.
    #[must_use]
    pub fn answer(mut self, question: &NetworkQuestion) -> (Network, Vec<Source>) {
        let routes = self.routes(question);
        let neighbours = self.wanted_neighbours(question, &routes);
        let mut network = Network { routes, ..Network::default() };
        read_proxies(&question.proxy_ports, &mut network, &mut self.sources);
        let state = question.state.as_deref().unwrap_or(Path::new(node_config::STATE));
        read_node_config(state, &mut network, &mut self.sources);
        read_agent(question, &mut network, &mut self.sources);
        let Self {
            namespace,
            devices,
            neighbours: _,
            rules,
            proxy_routes,
            sysctls,
            wireguard,
            sources,
        } = self;
        let (v4, v6): (Vec<_>, Vec<_>) =
            proxy_routes.into_iter().partition(|(family, _)| *family == AF_INET);
        let texts = |routes: Vec<(u8, String)>| routes.into_iter().map(|(_, text)| text).collect();
        let network = Network {
            namespace,
            links: devices.into_iter().map(|device| device.link).collect(),
            neighbours: neighbours.into_iter().map(Into::into).collect(),
            rules,
            proxy_routes: texts(v4),
            proxy_routes_v6: texts(v6),
            sysctls,
            wireguard,
            ..network
        };
        (network, sources)
    }

    /// The entries of the VIP on any device, and of the next hops of the routes.
    fn wanted_neighbours(
        &self,
        question: &NetworkQuestion,
        routes: &[RouteAnswer],
    ) -> Vec<RawNeighbour> {
        let mut wanted: BTreeSet<IpAddr> = question.backends.iter().copied().collect();
        wanted.extend(question.vip);
        wanted.extend(routes.iter().filter_map(|route| route.answer.as_ref().ok()?.gateway));
        self.neighbours.iter().filter(|entry| wanted.contains(&entry.address)).copied().collect()
    }

    /// Asks for the routes: of each destination, for the node's own packets and for those that
    /// arrive on each of the devices.
    fn routes(&mut self, question: &NetworkQuestion) -> Vec<RouteAnswer> {
        let destinations: BTreeSet<IpAddr> =
            question.backends.iter().copied().chain(question.vip).collect();
        if destinations.is_empty() {
            return Vec::new();
        }
        let inputs = self.inputs(question);
        let mut questions = Vec::new();
        for &destination in &destinations {
            questions.push(RouteQuestion { destination, input: None });
            questions.extend(
                inputs
                    .iter()
                    .filter(|(_, source)| source.is_ipv4() == destination.is_ipv4())
                    .map(|&input| RouteQuestion { destination, input: Some(input) }),
            );
        }
        let answers = Netlink::open(libc::NETLINK_ROUTE).and_then(|mut netlink| {
            let answers = rtnetlink::routes(&mut netlink, &questions)?;
            // Where a packet is refused, it is of interest where its source is looked for.
            let sources: BTreeSet<IpAddr> = questions
                .iter()
                .zip(&answers)
                .filter(|(_, answer)| **answer == Err(libc::EINVAL))
                .filter_map(|(question, _)| Some(question.input?.1))
                .collect();
            let back: Vec<_> = sources
                .into_iter()
                .map(|destination| RouteQuestion { destination, input: None })
                .collect();
            let ways_back = rtnetlink::routes(&mut netlink, &back)?;
            let ways_back = back.iter().map(|question| question.destination).zip(ways_back);
            Ok((answers, ways_back.collect()))
        });
        match answers {
            Ok((answers, ways_back)) => {
                self.sources.push(source("routes", SourceStatus::Complete, None));
                self.interpret(&questions, answers, &ways_back)
            }
            Err(error) => {
                self.sources.push(failed("routes", &error));
                Vec::new()
            }
        }
    }

    /// The devices on which a packet could arrive, each with the source address that such a packet
    /// could have, for either family.
    fn inputs(&self, question: &NetworkQuestion) -> Vec<(u32, IpAddr)> {
        let kinds: HashMap<u32, Option<&str>> = self
            .devices
            .iter()
            .map(|device| (device.link.ifindex, device.link.kind.as_deref()))
            .collect();
        let arrives = |device: &&Device| {
            if let Some(inputs) = &question.inputs {
                return inputs.contains(&device.link.ifindex);
            }
            let master = device.link.master.and_then(|master| kinds.get(&master).copied()?);
            device.link.up
                && !device.loopback
                && !master.is_some_and(|kind| ["bridge", "bond", "team"].contains(&kind))
        };
        let own = rtnetlink::own_addresses(&self.devices);
        self.devices
            .iter()
            .filter(arrives)
            .flat_map(|device| {
                let ifindex = device.link.ifindex;
                let given = question.sources.get(&ifindex).map_or(&[][..], Vec::as_slice);
                [NOBODY_V4, NOBODY_V6].map(|nobody| {
                    let fits = |address: &IpAddr| {
                        address.is_ipv4() == nobody.is_ipv4()
                            && !own.contains(address)
                            && question.vip != Some(*address)
                    };
                    let source = given
                        .iter()
                        .chain(&device.peers)
                        .copied()
                        .find(fits)
                        .or_else(|| self.wireguard_peer(ifindex, fits))
                        .or_else(|| neighbour_in_network(&device.link, fits));
                    (ifindex, source.unwrap_or(nobody))
                })
            })
            .collect()
    }

    /// An address that a peer of a WireGuard device may have: from any other, WireGuard itself
    /// would take no packet.
    fn wireguard_peer(&self, ifindex: u32, fits: impl Fn(&IpAddr) -> bool) -> Option<IpAddr> {
        let device = self.wireguard.iter().find(|device| device.ifindex == ifindex)?;
        device.peers.iter().flat_map(|peer| &peer.allowed).find_map(|allowed| {
            let (address, prefix) = allowed.split_once('/')?;
            let (address, prefix) = (address.parse().ok()?, prefix.parse().ok()?);
            let whole = if IpAddr::is_ipv4(&address) { 32 } else { 128 };
            if prefix == whole {
                return Some(address).filter(&fits);
            }
            host_in_network(address, prefix, &fits)
        })
    }

    /// Turns the kernel's answers into words.
    fn interpret(
        &self,
        questions: &[RouteQuestion],
        answers: Vec<Result<Route, i32>>,
        ways_back: &HashMap<IpAddr, Result<Route, i32>>,
    ) -> Vec<RouteAnswer> {
        let own: HashMap<IpAddr, Option<i32>> = questions
            .iter()
            .zip(&answers)
            .filter(|(question, _)| question.input.is_none())
            .map(|(question, answer)| (question.destination, answer.as_ref().err().copied()))
            .collect();
        questions
            .iter()
            .zip(answers)
            .map(|(question, answer)| RouteAnswer {
                destination: question.destination,
                input: question.input.map(|(ifindex, _)| ifindex),
                source: question.input.map(|(_, source)| source),
                answer: answer.or_else(|number| {
                    let own = own.get(&question.destination).copied().flatten();
                    self.refusal(question, number, own, ways_back)
                }),
            })
            .collect()
    }

    /// What the kernel means by an error. A route that says where a packet ends is an answer too;
    /// for IPv4 the kernel tells of it by the error alone, which it uses for other reasons too.
    /// `own` is its error for a packet of the node's own to the same destination; `ways_back` are
    /// the routes to the sources.
    fn refusal(
        &self,
        question: &RouteQuestion,
        number: i32,
        own: Option<i32>,
        ways_back: &HashMap<IpAddr, Result<Route, i32>>,
    ) -> Result<Route, String> {
        let ends = |kind: &str| {
            let kind = kind.to_owned();
            Ok(Route { kind, output: None, gateway: None, source: None, table: 0 })
        };
        let input = question.input.map(|(ifindex, source)| {
            (self.device_name(ifindex).unwrap_or("a device that is gone"), source)
        });
        match (number, input) {
            (libc::ENETUNREACH, _) => Err("no route".to_owned()),
            (libc::EACCES, _) => ends("prohibit"),
            (libc::EINVAL, _) if own == Some(libc::EINVAL) => ends("blackhole"),
            (libc::EHOSTUNREACH, _) if own == Some(libc::EHOSTUNREACH) => ends("unreachable"),
            (libc::EHOSTUNREACH, Some((device, _))) => {
                Err(format!("not forwarded: forwarding is off for {device}"))
            }
            (libc::EINVAL | libc::EXDEV, Some((device, source))) => {
                // Kernels before 6.14 have a number of its own for this.
                if number == libc::EXDEV || self.is_filtered(question, ways_back.get(&source)) {
                    return Err(format!(
                        "rp_filter: packets from {source} are not expected on {device}, which \
                         filters by the reverse path"
                    ));
                }
                Err(format!("martian: no packet from {source} to it may arrive on {device}"))
            }
            (libc::ENODEV, _) => Err("the device is gone".to_owned()),
            _ => Err(io::Error::from_raw_os_error(number).to_string()),
        }
    }

    /// Whether the reverse path filter of the device refuses the packet: the higher of its value
    /// and that of `all` is in force; 1 wants the way back to lead through the same device, 2 any
    /// way back (kernel documentation, ip-sysctl).
    fn is_filtered(&self, question: &RouteQuestion, back: Option<&Result<Route, i32>>) -> bool {
        let Some((ifindex, _)) = question.input else { return false };
        let value = |device: &str| {
            let name = format!("net.ipv4.conf.{device}.rp_filter");
            self.sysctls.get(&name).copied().unwrap_or_default()
        };
        let back = back.and_then(|answer| answer.as_ref().ok());
        // A source that is the node's own is refused for that.
        if back.is_some_and(|route| route.kind != "unicast") {
            return false;
        }
        match value("all").max(self.device_name(ifindex).map_or(0, value)) {
            1 => back.is_none_or(|route| route.output != Some(ifindex)),
            2 => back.is_none(),
            _ => false,
        }
    }
}

/// An address that a host on the link could have, from the networks of its addresses.
fn neighbour_in_network(link: &Link, fits: impl Fn(&IpAddr) -> bool) -> Option<IpAddr> {
    rtnetlink::networks(link).find_map(|(address, prefix)| host_in_network(address, prefix, &fits))
}

/// The address of a host in the network of `address`; a network of one has none, and the link-local
/// one of IPv6 is no network of its own.
fn host_in_network(address: IpAddr, prefix: u8, fits: &impl Fn(&IpAddr) -> bool) -> Option<IpAddr> {
    /// As many addresses are tried: the node's own are few.
    const TRIED: usize = 64;

    match address {
        IpAddr::V4(address) => {
            let host_bits = u32::from(32_u8.checked_sub(prefix)?);
            let mask = 1_u32.checked_shl(host_bits).map_or(u32::MAX, |size| size - 1);
            let network = address.to_bits() & !mask;
            // The first and the last are the network's own, except in one of two (RFC 3021).
            let hosts = if mask == 1 { 0..2 } else { 1..mask };
            let hosts = hosts.take(TRIED).map(|host| Ipv4Addr::from_bits(network | host).into());
            hosts.into_iter().find(fits)
        }
        IpAddr::V6(address) if !address.is_unicast_link_local() => {
            let host_bits = u32::from(128_u8.checked_sub(prefix)?);
            let mask = 1_u128.checked_shl(host_bits).map_or(u128::MAX, |size| size - 1);
            let network = address.to_bits() & !mask;
            // The first is the routers' anycast address.
            let hosts = (1..=mask).take(TRIED);
            hosts.map(|host| Ipv6Addr::from_bits(network | host).into()).find(fits)
        }
        IpAddr::V6(_) => None,
    }
}

/// Reads what stands between a marked packet and the proxy of an L7 frontend.
fn read_proxies(ports: &BTreeSet<u16>, network: &mut Network, sources: &mut Vec<Source>) {
    const RULES: &str = "TPROXY rules";
    const SOCKETS: &str = "listening sockets";
    if ports.is_empty() {
        let reason = "no frontend has a proxy port";
        sources.extend(
            [RULES, SOCKETS]
                .map(|what| source(what, SourceStatus::NotAttempted, Some(reason.to_owned()))),
        );
        return;
    }
    let found = tproxy::read();
    network.tproxy = found.rules;
    sources.push(source(RULES, found.status, found.reason));
    let listening = listening::tcp(ports).and_then(|tcp| Ok((tcp, listening::udp(ports)?)));
    match listening {
        Ok((tcp, udp)) => {
            network.listening = tcp;
            network.listening_udp = udp;
            sources.push(source(SOCKETS, SourceStatus::Complete, None));
        }
        Err(error) => {
            let reason = format!("cannot read /proc/thread-self/net: {error}");
            sources.push(source(SOCKETS, SourceStatus::Failed, Some(reason)));
        }
    }
}

/// Reads what the datapath was compiled with.
fn read_node_config(state: &Path, network: &mut Network, sources: &mut Vec<Source>) {
    let what = "node_config.h";
    sources.push(match node_config::read(state) {
        Ok(Some(macros)) => {
            network.node_config = macros;
            source(what, SourceStatus::Complete, None)
        }
        Ok(None) => {
            let reason = format!("there is none below {}", state.display());
            source(what, SourceStatus::Absent, Some(reason))
        }
        Err(error) => {
            let reason = format!("cannot read it below {}: {error}", state.display());
            source(what, SourceStatus::Failed, Some(reason))
        }
    });
}

/// Asks the agent, if that is wanted.
fn read_agent(question: &NetworkQuestion, network: &mut Network, sources: &mut Vec<Source>) {
    let what = "agent's services";
    let (Some(socket), Some(vip)) = (&question.agent, question.vip) else {
        let reason = "it is asked with --agent".to_owned();
        sources.push(source(what, SourceStatus::NotAttempted, Some(reason)));
        return;
    };
    match agent::frontends(socket, vip) {
        Ok(frontends) => {
            network.agent_frontends = Some(frontends);
            sources.push(source(what, SourceStatus::Complete, None));
        }
        Err(error) => sources.push(failed(what, &error)),
    }
}

/// The network namespace of this thread.
fn namespace() -> Option<Namespace> {
    let meta = fs::metadata("/proc/thread-self/ns/net").ok()?;
    Some(Namespace { inode: meta.ino(), chosen: None })
}

/// Both families in one: a dump of each.
fn both<T>(
    mut dump: impl FnMut(u8) -> Result<(Vec<T>, bool), NetlinkError>,
) -> Result<(Vec<T>, bool), NetlinkError> {
    let (mut all, steady) = dump(AF_INET)?;
    match dump(AF_INET6) {
        Ok((more, also)) => {
            all.extend(more);
            Ok((all, steady && also))
        }
        // A kernel without IPv6.
        Err(error) if matches!(error.errno(), Some(libc::EOPNOTSUPP | libc::EAFNOSUPPORT)) => {
            Ok((all, steady))
        }
        Err(error) => Err(error),
    }
}

/// Reads a sysctl of this thread's network namespace.
fn read_sysctl(name: &str) -> io::Result<i64> {
    let text = fs::read_to_string(format!("/proc/sys/{}", name.replace('.', "/")))?;
    text.trim().parse().map_err(|_| io::Error::from(io::ErrorKind::InvalidData))
}

fn source(what: &str, status: SourceStatus, reason: Option<String>) -> Source {
    Source { what: what.to_owned(), status, reason }
}

fn failed(what: &str, error: &dyn std::error::Error) -> Source {
    source(what, SourceStatus::Failed, Some(error.to_string()))
}
