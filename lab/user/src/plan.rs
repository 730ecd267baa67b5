//! What the node of a capture looked like: its devices, pods, routes and rules, from the files.
//!
//! No I/O but reading the capture; nothing here touches the machine.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str::FromStr,
};

use serde::Deserialize;

use crate::capture::{Capture, CaptureError, encode_hex};

/// Why the node of a capture cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// A file of the capture could not be read.
    #[error(transparent)]
    Capture(#[from] CaptureError),
    /// `ip-addr.json` is not what `ip -j -d addr` prints.
    #[error("{file}: {source}")]
    Json {
        /// The file.
        file: String,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// A device that the lab cannot make.
    #[error(
        "{file}: the device {device} is of the kind `{kind}`; the lab makes veth devices and, for \
         tun and wireguard, TUN devices"
    )]
    Kind {
        /// The file.
        file: String,
        /// Name of the device.
        device: String,
        /// Its kind.
        kind: String,
    },
    /// A veth device whose other end cannot be told.
    #[error("{file}: nothing says where the other end of the veth device {device} is")]
    Peer {
        /// The file.
        file: String,
        /// Name of the device.
        device: String,
    },
    /// A MAC address that is none.
    #[error("{file}: `{found}` is no MAC address (device {device})")]
    Mac {
        /// The file.
        file: String,
        /// Name of the device.
        device: String,
        /// What stands there.
        found: String,
    },
    /// A line of `ip-route.txt` or `ip-rule.txt`.
    #[error("{file}:{line}: {problem}: `{text}`")]
    Line {
        /// The file.
        file: String,
        /// Line number, from 1.
        line: usize,
        /// What is wrong.
        problem: String,
        /// The line.
        text: String,
    },
    /// An entry of `cilium_lxc` that does not fit the rest of the capture.
    #[error("{file}: the endpoint {key}: {problem}")]
    Endpoint {
        /// The file.
        file: String,
        /// Key of the entry, hex.
        key: String,
        /// What is wrong.
        problem: String,
    },
}

/// Everything that the node's part of the network is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The node's devices but `lo`, by interface index.
    pub devices: Vec<Device>,
    /// Routes that the kernel does not make by itself, in the order in which they can be added.
    pub routes: Vec<Route>,
    /// Policy rules; empty where the capture says nothing of them.
    pub rules: Vec<Rule>,
    /// Settings of the node as `(key, value)`, the key as sysctl writes it.
    pub sysctls: Vec<(String, String)>,
    /// What pods take for their router: the address that Cilium keeps on `cilium_host`.
    pub routers: Vec<IpAddr>,
}

/// A device of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Interface index in the node.
    pub index: u32,
    /// Name.
    pub name: String,
    /// What it is, and where its other end is.
    pub kind: Kind,
    /// MTU, bytes.
    pub mtu: u32,
    /// MAC address, where it has one.
    pub mac: Option<[u8; 6]>,
    /// Whether it asks for its neighbours' MAC addresses.
    pub arp: bool,
    /// Addresses.
    pub addresses: Vec<Address>,
}

/// An address of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address {
    /// The address.
    pub ip: IpAddr,
    /// Length of its prefix, bits.
    pub length: u8,
    /// How far it is valid.
    pub scope: Scope,
}

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A veth device whose other end is a port of the LAN's switch, with this interface index
    /// there (0: any).
    Lan(u32),
    /// A veth device whose other end is the node's device with this interface index.
    Pair(u32),
    /// A veth device whose other end is in a pod.
    Pod(Pod),
    /// A device without Ethernet header, whose other end is the VPN client.
    Tun,
    /// The same as a real `WireGuard` device.
    WireGuard,
}

/// A pod's end of its device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// Number, from 1, in the order of the devices' interface indexes.
    pub number: u8,
    /// Interface index in the pod (0: any).
    pub index: u32,
    /// MAC address.
    pub mac: [u8; 6],
    /// Addresses; each is all of its prefix.
    pub addresses: Vec<IpAddr>,
}

/// A route of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// Whether it is one of IPv6.
    pub v6: bool,
    /// Whether packets go to the node itself.
    pub local: bool,
    /// Destination; `None` for the default route.
    pub destination: Option<(IpAddr, u8)>,
    /// Next hop.
    pub via: Option<IpAddr>,
    /// Name of the device.
    pub device: String,
    /// Whether it has the scope `link` (IPv4).
    pub scope: Scope,
    /// Preferred source address.
    pub source: Option<IpAddr>,
    /// Metric, 0 for none.
    pub metric: u32,
    /// Table.
    pub table: u32,
    /// Whether it is marked as the kernel's own.
    pub kernel: bool,
}

/// Scope of a route or an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Anywhere.
    #[default]
    Global,
    /// Directly connected.
    Link,
    /// This host.
    Host,
}

/// A policy rule: which table is looked up for packets with a mark.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// Priority.
    pub priority: u32,
    /// Mark and mask.
    pub mark: Option<(u32, u32)>,
    /// Table.
    pub table: u32,
}

/// The table of routes to the node's own addresses.
pub const TABLE_LOCAL: u32 = 255;
const TABLE_MAIN: u32 = 254;
const TABLE_DEFAULT: u32 = 253;

const ADDRESSES: &str = "ip-addr.json";
const ROUTES: &str = "ip-route.txt";
const RULES: &str = "ip-rule.txt";
const SYSCTLS: &str = "sysctl.txt";

#[derive(Deserialize)]
struct IpLink {
    ifindex: u32,
    link_index: Option<u32>,
    link: Option<String>,
    ifname: String,
    flags: Vec<String>,
    mtu: u32,
    address: Option<String>,
    linkinfo: Option<IpLinkInfo>,
    addr_info: Vec<IpAddress>,
}

#[derive(Deserialize)]
struct IpLinkInfo {
    info_kind: String,
}

#[derive(Deserialize)]
struct IpAddress {
    local: IpAddr,
    prefixlen: u8,
    scope: Scope,
}

impl Plan {
    /// The node of `capture`; the bare one of the captures' description (`eno1` and `wg0`, no
    /// pods) where the capture does not say what its node looked like.
    ///
    /// # Errors
    /// [`PlanError`].
    pub fn of(capture: Option<&Capture>) -> Result<Self, PlanError> {
        match capture {
            Some(capture) if capture.has(ADDRESSES) => Self::captured(capture),
            _ => Ok(Self::bare()),
        }
    }

    fn bare() -> Self {
        let v4 = |bytes: [u8; 4]| IpAddr::from(bytes);
        let v6 = |groups: [u16; 8]| IpAddr::from(groups);
        let address = |ip, length, scope| Address { ip, length, scope };
        let default = |gateway: IpAddr| Route {
            v6: gateway.is_ipv6(),
            local: false,
            destination: None,
            via: Some(gateway),
            device: "eno1".into(),
            scope: Scope::Global,
            source: None,
            metric: if gateway.is_ipv6() { 1024 } else { 0 },
            table: TABLE_MAIN,
            kernel: false,
        };
        Self {
            devices: vec![
                Device {
                    index: 2,
                    name: "eno1".into(),
                    kind: Kind::Lan(3),
                    mtu: 1500,
                    mac: Some([2, 0, 0, 0, 2, 10]),
                    arp: true,
                    addresses: vec![
                        address(v4([192, 168, 2, 10]), 24, Scope::Global),
                        address(v6([0xfd00, 2, 0, 0, 0, 0, 0, 0x10]), 64, Scope::Global),
                        address(v6([0xfe80, 0, 0, 0, 0, 0xff, 0xfe00, 0x020a]), 64, Scope::Link),
                    ],
                },
                Device {
                    index: 3,
                    name: "wg0".into(),
                    kind: Kind::Tun,
                    mtu: 1420,
                    mac: None,
                    arp: false,
                    addresses: vec![
                        address(v4([10, 90, 0, 1]), 24, Scope::Global),
                        address(v6([0xfd00, 0x90, 0, 0, 0, 0, 0, 1]), 64, Scope::Global),
                    ],
                },
            ],
            routes: vec![default(v4([192, 168, 2, 1])), default(v6([0xfd00, 2, 0, 0, 0, 0, 0, 1]))],
            rules: Vec::new(),
            sysctls: Vec::new(),
            routers: Vec::new(),
        }
    }

    /// Makes what leads to the VPN client a real `WireGuard` device.
    pub fn use_wireguard(&mut self) {
        for device in &mut self.devices {
            if device.kind == Kind::Tun {
                device.kind = Kind::WireGuard;
            }
        }
    }

    fn captured(capture: &Capture) -> Result<Self, PlanError> {
        let file = name(capture, ADDRESSES);
        let links: Vec<IpLink> = serde_json::from_str(&capture.text(ADDRESSES)?)
            .map_err(|source| PlanError::Json { file: file.clone(), source })?;
        let routes = if capture.has(ROUTES) {
            parse_routes(&name(capture, ROUTES), &capture.text(ROUTES)?)?
        } else {
            Vec::new()
        };
        let rules = if capture.has(RULES) {
            parse_rules(&name(capture, RULES), &capture.text(RULES)?)?
        } else {
            Vec::new()
        };
        let sysctls = if capture.has(SYSCTLS) {
            let text = capture.text(SYSCTLS)?;
            let pairs = text.lines().filter_map(|line| line.split_once(" = "));
            pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
        } else {
            Vec::new()
        };

        let mut devices = Vec::new();
        let mut pods = 0;
        for link in &links {
            let kind = match link.linkinfo.as_ref().map_or("", |info| info.info_kind.as_str()) {
                "" if link.ifname == "lo" => continue,
                "tun" | "wireguard" => Kind::Tun,
                "veth" if link.ifname.starts_with("lxc") => {
                    pods += 1;
                    Kind::Pod(pod(capture, link, pods)?)
                }
                "veth" => match (&link.link, link.link_index) {
                    (Some(peer), _) => {
                        let peer = links.iter().find(|other| other.ifname == *peer);
                        Kind::Pair(
                            peer.ok_or_else(|| PlanError::Peer {
                                file: file.clone(),
                                device: link.ifname.clone(),
                            })?
                            .ifindex,
                        )
                    }
                    (None, Some(index)) => Kind::Lan(index),
                    (None, None) => {
                        return Err(PlanError::Peer { file, device: link.ifname.clone() });
                    }
                },
                kind => {
                    let (device, kind) = (link.ifname.clone(), kind.to_owned());
                    return Err(PlanError::Kind { file, device, kind });
                }
            };
            devices.push(Device {
                index: link.ifindex,
                name: link.ifname.clone(),
                mtu: link.mtu,
                mac: match (&kind, &link.address) {
                    (Kind::Tun, _) | (_, None) => None,
                    (_, Some(text)) => Some(parse_mac(text).ok_or_else(|| PlanError::Mac {
                        file: file.clone(),
                        device: link.ifname.clone(),
                        found: text.clone(),
                    })?),
                },
                kind,
                arp: !link.flags.iter().any(|flag| flag == "NOARP"),
                addresses: link
                    .addr_info
                    .iter()
                    .map(|a| Address { ip: a.local, length: a.prefixlen, scope: a.scope })
                    .collect(),
            });
        }
        Ok(Self { routers: routers(&devices, &routes), devices, routes, rules, sysctls })
    }

    /// The pods, in the order of their numbers.
    pub fn pods(&self) -> impl Iterator<Item = &Pod> {
        self.devices.iter().filter_map(|device| match &device.kind {
            Kind::Pod(pod) => Some(pod),
            _ => None,
        })
    }
}

/// A file of the capture, for messages.
fn name(capture: &Capture, file: &str) -> String {
    capture.path().join(file).display().to_string()
}

/// The pod behind an `lxc` device, from `cilium_lxc`: key 16 bytes of address, then the family (1:
/// IPv4, 2: IPv6); value the device's interface index (u32) at 0, the pod's MAC at 16.
fn pod(capture: &Capture, link: &IpLink, number: u8) -> Result<Pod, PlanError> {
    let endpoints = capture.map("cilium_lxc").ok_or_else(|| CaptureError::NoSuchMap {
        capture: capture.path(),
        name: "cilium_lxc".into(),
    })?;
    let mut pod = None;
    for entry in &endpoints.entries {
        let error = |problem: String| PlanError::Endpoint {
            file: endpoints.path.display().to_string(),
            key: encode_hex(&entry.key),
            problem,
        };
        let (Some(address), Some(family), Some(index), Some(mac)) = (
            entry.key.first_chunk::<16>(),
            entry.key.get(16),
            entry.value.first_chunk::<4>(),
            entry.value.get(16..).and_then(|rest| rest.first_chunk::<6>()),
        ) else {
            return Err(error("is too short".into()));
        };
        if u32::from_le_bytes(*index) != link.ifindex {
            continue;
        }
        let address = match family {
            1 => IpAddr::from([address[0], address[1], address[2], address[3]]),
            2 => IpAddr::from(*address),
            other => return Err(error(format!("has the unknown address family {other}"))),
        };
        let index = link.link_index.unwrap_or(0);
        let pod = pod.get_or_insert(Pod { number, index, mac: *mac, addresses: Vec::new() });
        if pod.mac != *mac {
            return Err(error(format!("has another MAC address than the rest of {}", link.ifname)));
        }
        pod.addresses.push(address);
    }
    let mut pod = pod.ok_or_else(|| PlanError::Endpoint {
        file: endpoints.path.display().to_string(),
        key: format!("of the device {} (index {})", link.ifname, link.ifindex),
        problem: "is not in the map".into(),
    })?;
    pod.addresses.sort();
    Ok(pod)
}

/// The next hop to the pods' prefix, or the source of the route to it, or an address of
/// `cilium_host`: one per family.
fn routers(devices: &[Device], routes: &[Route]) -> Vec<IpAddr> {
    const HOST: &str = "cilium_host";
    [false, true]
        .into_iter()
        .filter_map(|v6| {
            let main = routes.iter().filter(|route| {
                route.v6 == v6 && route.device == HOST && route.table == TABLE_MAIN
            });
            let via = main.clone().find_map(|route| route.via);
            let source = main.clone().find_map(|route| route.source);
            let host = devices.iter().find(|device| device.name == HOST);
            let own = host.and_then(|host| {
                host.addresses.iter().map(|own| own.ip).find(|a| a.is_ipv6() == v6)
            });
            via.or(source).or(own)
        })
        .collect()
}

fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let bytes: Vec<u8> =
        text.split(':').map(|byte| u8::from_str_radix(byte, 16)).collect::<Result<_, _>>().ok()?;
    bytes.try_into().ok()
}

/// Parses what `ip route show table all` prints for IPv4, then IPv6. Routes that the kernel makes by
/// itself from addresses (those of the table `local`) are left out.
fn parse_routes(file: &str, text: &str) -> Result<Vec<Route>, PlanError> {
    let mut routes = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let error = |problem: String| PlanError::Line {
            file: file.to_owned(),
            line: index + 1,
            problem,
            text: line.to_owned(),
        };
        if !line.trim().is_empty() {
            routes.extend(parse_route(line).map_err(error)?);
        }
    }
    // A next hop must be reachable when its route is added.
    routes.sort_by_key(|route| route.via.is_some());
    Ok(routes)
}

/// `None` for a route that the kernel makes.
fn parse_route(line: &str) -> Result<Option<Route>, String> {
    let mut words = line.split_whitespace();
    let mut next = |what: &str| words.next().ok_or_else(|| format!("ends before {what}"));
    let mut first = next("the destination")?;
    let mut local = false;
    match first {
        "broadcast" | "anycast" | "multicast" => return Ok(None),
        "local" => {
            local = true;
            first = next("the destination")?;
        }
        _ => {}
    }
    let destination = match first {
        "default" => None,
        prefix => Some(parse_prefix(prefix)?),
    };
    let mut route = Route {
        v6: destination.is_some_and(|(address, _)| address.is_ipv6()),
        local,
        destination,
        via: None,
        device: String::new(),
        scope: Scope::Global,
        source: None,
        metric: 0,
        table: TABLE_MAIN,
        kernel: false,
    };
    while let Some(word) = words.next() {
        let value = words.next().ok_or_else(|| format!("`{word}` has no value"))?;
        match word {
            "via" => route.via = Some(parse(value)?),
            "dev" => value.clone_into(&mut route.device),
            "src" => route.source = Some(parse(value)?),
            "metric" => route.metric = parse(value)?,
            "table" => route.table = parse_table(value)?,
            // Only IPv6 routes have a preference.
            "pref" => route.v6 = true,
            "proto" => route.kernel = value == "kernel",
            "scope" => {
                route.scope = match value {
                    "link" => Scope::Link,
                    "host" => Scope::Host,
                    _ => return Err(format!("unknown scope {value}")),
                }
            }
            _ => return Err(format!("unknown word `{word}`")),
        }
    }
    if route.device.is_empty() {
        return Err("has no device".into());
    }
    Ok((route.table != TABLE_LOCAL).then_some(route))
}

/// Parses what `ip rule` prints.
fn parse_rules(file: &str, text: &str) -> Result<Vec<Rule>, PlanError> {
    let parse_rule = |line: &str| -> Result<Rule, String> {
        let (priority, rest) = line.split_once(':').ok_or("has no priority")?;
        let mut rule = Rule { priority: parse(priority)?, mark: None, table: 0 };
        let mut words = rest.split_whitespace();
        while let Some(word) = words.next() {
            let value = words.next().ok_or_else(|| format!("`{word}` has no value"))?;
            match (word, value) {
                ("from", "all") => {}
                ("lookup", table) => rule.table = parse_table(table)?,
                ("fwmark", value) => {
                    let (value, mask) = value.split_once('/').unwrap_or((value, "0xffffffff"));
                    rule.mark = Some((parse_hex(value)?, parse_hex(mask)?));
                }
                _ => return Err(format!("unknown words `{word} {value}`")),
            }
        }
        Ok(rule)
    };
    text.lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
        .map(|(index, line)| {
            parse_rule(line).map_err(|problem| PlanError::Line {
                file: file.to_owned(),
                line: index + 1,
                problem,
                text: line.to_owned(),
            })
        })
        .collect()
}

fn parse<T: FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("`{text}` makes no sense"))
}

fn parse_hex(text: &str) -> Result<u32, String> {
    u32::from_str_radix(text.trim_start_matches("0x"), 16)
        .map_err(|_| format!("`{text}` is no hexadecimal number"))
}

fn parse_table(text: &str) -> Result<u32, String> {
    match text {
        "local" => Ok(TABLE_LOCAL),
        "main" => Ok(TABLE_MAIN),
        "default" => Ok(TABLE_DEFAULT),
        number => parse(number),
    }
}

fn parse_prefix(text: &str) -> Result<(IpAddr, u8), String> {
    let (address, length) = match text.split_once('/') {
        Some((address, length)) => (address, Some(parse::<u8>(length)?)),
        None => (text, None),
    };
    let address: IpAddr = parse(address)?;
    let all = match address {
        IpAddr::V4(_) => Ipv4Addr::BITS,
        IpAddr::V6(_) => Ipv6Addr::BITS,
    };
    let all = u8::try_from(all).map_err(|error| error.to_string())?;
    let length = length.unwrap_or(all);
    if length > all {
        Err(format!("`{text}` has too long a prefix"))
    } else {
        Ok((address, length))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(line: &str) -> Route {
        parse_route(line).expect("a route").expect("not the kernel's")
    }

    #[test]
    fn routes_as_ip_prints_them() {
        let pods =
            route("10.77.1.0/24 via 10.77.1.72 dev cilium_host proto kernel src 10.77.1.72 ");
        assert_eq!(pods.destination, Some(([10, 77, 1, 0].into(), 24)));
        assert_eq!((pods.via, pods.source), (Some([10, 77, 1, 72].into()), pods.via));
        assert_eq!(
            (pods.table, pods.scope, pods.kernel, pods.v6),
            (254, Scope::Global, true, false)
        );

        let router = route("10.77.1.72 dev cilium_host proto kernel scope link ");
        assert_eq!(
            (router.destination, router.scope),
            (Some(([10, 77, 1, 72].into(), 32)), Scope::Link)
        );

        // The two differ in nothing but the words for IPv6.
        let proxy = route("local default dev lo table 2004 proto kernel scope host ");
        assert_eq!(
            (proxy.local, proxy.table, proxy.scope, proxy.v6),
            (true, 2004, Scope::Host, false)
        );
        let proxy = route("local default dev lo table 2004 proto kernel metric 1024 pref medium");
        assert_eq!((proxy.local, proxy.table, proxy.metric, proxy.v6), (true, 2004, 1024, true));

        for kernels in [
            "local 10.90.0.1 dev wg0 table local proto kernel scope host src 10.90.0.1 ",
            "broadcast 10.90.0.255 dev wg0 table local proto kernel scope link src 10.90.0.1 ",
            "anycast fe80:: dev eno1 table local proto kernel metric 0 pref medium",
            "multicast ff00::/8 dev eno1 table local proto kernel metric 256 pref medium",
        ] {
            assert_eq!(parse_route(kernels), Ok(None), "{kernels}");
        }
    }

    #[test]
    fn what_is_no_route_is_named() {
        let text = "default via 192.168.2.1 dev eno1 \n10.0.0.0/8 dev eno1 colour blue\n";
        assert_eq!(
            parse_routes("ip-route.txt", text).expect_err("an unknown word").to_string(),
            "ip-route.txt:2: unknown word `colour`: `10.0.0.0/8 dev eno1 colour blue`"
        );
        for (line, problem) in [
            ("local", "ends before the destination"),
            ("10.0.0.0/33 dev eno1", "`10.0.0.0/33` has too long a prefix"),
            ("nonsense dev eno1", "`nonsense` makes no sense"),
            ("default via 10.0.0.1", "has no device"),
            ("default dev eno1 via", "`via` has no value"),
            ("default dev eno1 scope site", "unknown scope site"),
        ] {
            assert_eq!(parse_route(line), Err(problem.to_owned()), "{line}");
        }
    }

    #[test]
    fn rules_as_ip_prints_them() {
        let text = "9:\tfrom all fwmark 0x200/0xf00 lookup 2004\n100:\tfrom all lookup local\n";
        assert_eq!(
            parse_rules("ip-rule.txt", text).expect("rules"),
            [
                Rule { priority: 9, mark: Some((0x200, 0xf00)), table: 2004 },
                Rule { priority: 100, mark: None, table: 255 },
            ]
        );
        assert_eq!(
            parse_rules("ip-rule.txt", "9:\tfrom 10.0.0.1 lookup main")
                .expect_err("a source")
                .to_string(),
            "ip-rule.txt:1: unknown words `from 10.0.0.1`: `9:\tfrom 10.0.0.1 lookup main`"
        );
    }
}
