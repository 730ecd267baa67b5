//! Links, addresses, neighbours, rules and routes, as rtnetlink has them.
//!
//! A question for a route (`RTM_GETROUTE`) makes the kernel look up its tables as it would for a
//! packet, and stop there: no packet is made and no neighbour entry. Layouts and numbers are those
//! of the kernel's uapi headers `linux/rtnetlink.h`, `if_link.h`, `if_addr.h`, `neighbour.h`,
//! `fib_rules.h`, `ip.h` and `ipv6.h`.

use std::{
    collections::{BTreeMap, HashSet},
    fmt::Write,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use super::Way;
use crate::{
    evidence::network::{Link, Neighbour, Route, Rule},
    sys::netlink::{
        Netlink, NetlinkError, Request, attributes, octets, push_attribute, u16_at, u32_at,
    },
};

const GETLINK: Request = Request { kind: libc::RTM_GETLINK, name: "RTM_GETLINK" };
const GETADDR: Request = Request { kind: libc::RTM_GETADDR, name: "RTM_GETADDR" };
const GETNEIGH: Request = Request { kind: libc::RTM_GETNEIGH, name: "RTM_GETNEIGH" };
const GETRULE: Request = Request { kind: libc::RTM_GETRULE, name: "RTM_GETRULE" };
const GETROUTE: Request = Request { kind: libc::RTM_GETROUTE, name: "RTM_GETROUTE" };

/// Address families, as the 8-bit fields of the headers have them.
pub const AF_INET: u8 = 2;
pub const AF_INET6: u8 = 10;

/// Lengths of the fixed heads of the messages.
const IFINFOMSG: usize = 16;
const IFADDRMSG: usize = 8;
const NDMSG: usize = 12;
const RTMSG: usize = 12;
const FIB_RULE_HDR: usize = 12;

/// Leaves the counters out of links, which are most of their length.
const RTEXT_FILTER_SKIP_STATS: u32 = 1 << 3;

/// A link with what else its message says.
#[derive(Debug, Clone)]
pub struct Device {
    /// The link.
    pub link: Link,
    /// Whether it is a loopback device.
    pub loopback: bool,
    /// Sysctls of the device by the last part of their name, with the family before it:
    /// `ipv4` and `rp_filter`.
    pub sysctls: Vec<(&'static str, &'static str, i64)>,
    /// The other ends of its point-to-point addresses.
    pub peers: Vec<IpAddr>,
}

/// A neighbour entry as it is kept until it is known which ones matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RawNeighbour {
    /// Address.
    pub address: IpAddr,
    /// Interface index.
    pub ifindex: u32,
    /// `NUD_…`
    pub state: u16,
    /// MAC address, where it is known.
    pub mac: Option<[u8; 6]>,
}

/// All links, without addresses, and whether nothing changed meanwhile.
pub fn links(netlink: &mut Netlink) -> Result<(Vec<Device>, bool), NetlinkError> {
    let mut body = vec![0; IFINFOMSG];
    push_attribute(&mut body, libc::IFLA_EXT_MASK, &RTEXT_FILTER_SKIP_STATS.to_ne_bytes());
    netlink.dump(GETLINK, &body, |all: &mut Vec<Device>, message| all.extend(link(message)))
}

fn link(message: &[u8]) -> Option<Device> {
    let hardware = u16_at(message, 2)?;
    let flags = u32_at(message, 8)?;
    let flag = |bit: i32| flags & bit.cast_unsigned() != 0;
    let mut device = Device {
        link: Link {
            ifindex: u32_at(message, 4)?,
            name: String::new(),
            kind: None,
            up: flag(libc::IFF_UP),
            carrier: flag(libc::IFF_LOWER_UP),
            master: None,
            mtu: 0,
            ethernet: hardware == libc::ARPHRD_ETHER,
            mac: None,
            addresses: Vec::new(),
        },
        loopback: flag(libc::IFF_LOOPBACK),
        sysctls: Vec::new(),
        peers: Vec::new(),
    };
    for (kind, value) in attributes(message.get(IFINFOMSG..)?) {
        match kind {
            libc::IFLA_IFNAME => device.link.name = text(value),
            libc::IFLA_MTU => device.link.mtu = u32_at(value, 0).unwrap_or_default(),
            libc::IFLA_MASTER => device.link.master = u32_at(value, 0),
            libc::IFLA_CARRIER => device.link.carrier = value.first().is_some_and(|&on| on != 0),
            // Tunnels have IP addresses here.
            libc::IFLA_ADDRESS => device.link.mac = value.try_into().ok().map(mac),
            libc::IFLA_LINKINFO => {
                device.link.kind = attributes(value)
                    .find(|(kind, _)| *kind == libc::IFLA_INFO_KIND)
                    .map(|(_, value)| text(value));
            }
            libc::IFLA_AF_SPEC => device.sysctls = device_sysctls(value),
            _ => {}
        }
    }
    Some(device)
}

/// The sysctls in `IFLA_AF_SPEC`: an array of 32-bit numbers for each family, the order of which is
/// part of the kernel's interface. This is what `/proc/sys/net/*/conf/DEV` shows.
fn device_sysctls(spec: &[u8]) -> Vec<(&'static str, &'static str, i64)> {
    /// `IFLA_INET_CONF` and `IFLA_INET6_CONF`.
    const INET_CONF: u16 = 1;
    const INET6_CONF: u16 = 2;
    // IPV4_DEVCONF_* count from 1 and stand at their number less one, DEVCONF_* from 0.
    let ipv4 = [("forwarding", 0), ("rp_filter", 7), ("accept_local", 22)];
    let ipv6 = [("forwarding", 0)];
    let mut found = Vec::new();
    for (family, inside) in attributes(spec) {
        let (family, conf, names) = match u8::try_from(family) {
            Ok(AF_INET) => ("ipv4", INET_CONF, &ipv4[..]),
            Ok(AF_INET6) => ("ipv6", INET6_CONF, &ipv6[..]),
            _ => continue,
        };
        let Some((_, numbers)) = attributes(inside).find(|(kind, _)| *kind == conf) else {
            continue;
        };
        found.extend(names.iter().filter_map(|&(name, place)| {
            Some((family, name, i64::from(u32_at(numbers, 4 * place)?.cast_signed())))
        }));
    }
    found
}

/// Adds the addresses of all devices; the result says whether nothing changed meanwhile.
pub fn addresses(netlink: &mut Netlink, devices: &mut [Device]) -> Result<bool, NetlinkError> {
    struct Address {
        ifindex: u32,
        local: IpAddr,
        prefix: u8,
        peer: Option<IpAddr>,
    }

    fn address(message: &[u8]) -> Option<Address> {
        let &[family, prefix, ..] = message else { return None };
        let (mut local, mut other) = (None, None);
        for (kind, value) in attributes(message.get(IFADDRMSG..)?) {
            match kind {
                libc::IFA_LOCAL => local = ip(family, value),
                libc::IFA_ADDRESS => other = ip(family, value),
                _ => {}
            }
        }
        // IPv6 has IFA_LOCAL only beside another end.
        let own = local.or(other)?;
        Some(Address {
            ifindex: u32_at(message, 4)?,
            local: own,
            prefix,
            peer: other.filter(|other| *other != own),
        })
    }

    let (all, steady) = netlink.dump(GETADDR, &[0; IFADDRMSG], |all: &mut Vec<_>, message| {
        all.extend(address(message));
    })?;
    let places: BTreeMap<u32, usize> =
        devices.iter().enumerate().map(|(at, device)| (device.link.ifindex, at)).collect();
    for Address { ifindex, local, prefix, peer } in all {
        if let Some(&at) = places.get(&ifindex) {
            devices[at].link.addresses.push(format!("{local}/{prefix}"));
            devices[at].peers.extend(peer);
        }
    }
    Ok(steady)
}

/// All neighbour entries of both families.
pub fn neighbours(netlink: &mut Netlink) -> Result<(Vec<RawNeighbour>, bool), NetlinkError> {
    netlink.dump(GETNEIGH, &[0; NDMSG], |all: &mut Vec<RawNeighbour>, message| {
        all.extend(neighbour(message));
    })
}

fn neighbour(message: &[u8]) -> Option<RawNeighbour> {
    let (mut address, mut mac) = (None, None);
    for (kind, value) in attributes(message.get(NDMSG..)?) {
        match kind {
            libc::NDA_DST => address = ip(message[0], value),
            libc::NDA_LLADDR => mac = value.try_into().ok(),
            _ => {}
        }
    }
    Some(RawNeighbour {
        address: address?,
        ifindex: u32_at(message, 4)?,
        state: u16_at(message, 8)?,
        mac,
    })
}

impl From<RawNeighbour> for Neighbour {
    fn from(raw: RawNeighbour) -> Self {
        let RawNeighbour { address, ifindex, state, mac: bytes } = raw;
        Self { address, ifindex, state: state_word(state), mac: bytes.map(mac) }
    }
}

/// The state in the words of `ip neigh`; the kernel sets one bit at a time.
fn state_word(state: u16) -> String {
    const WORDS: [(u16, &str); 8] = [
        (libc::NUD_INCOMPLETE, "INCOMPLETE"),
        (libc::NUD_REACHABLE, "REACHABLE"),
        (libc::NUD_STALE, "STALE"),
        (libc::NUD_DELAY, "DELAY"),
        (libc::NUD_PROBE, "PROBE"),
        (libc::NUD_FAILED, "FAILED"),
        (libc::NUD_NOARP, "NOARP"),
        (libc::NUD_PERMANENT, "PERMANENT"),
    ];
    if state == libc::NUD_NONE {
        return "NONE".to_owned();
    }
    WORDS
        .iter()
        .find(|(bit, _)| *bit == state)
        .map_or_else(|| format!("{state:#x}"), |(_, word)| (*word).to_owned())
}

/// The rules of one family.
pub fn rules(netlink: &mut Netlink, family: u8) -> Result<(Vec<Rule>, bool), NetlinkError> {
    let mut body = vec![0; FIB_RULE_HDR];
    body[0] = family;
    netlink.dump(GETRULE, &body, |all: &mut Vec<Rule>, message| all.extend(rule(message)))
}

fn rule(message: &[u8]) -> Option<Rule> {
    /// Attributes of rules.
    const FRA_PRIORITY: u16 = 6;
    const FRA_FWMARK: u16 = 10;
    const FRA_TABLE: u16 = 15;
    const FRA_FWMASK: u16 = 16;
    /// The action of a rule that looks a table up.
    const FR_ACT_TO_TBL: u8 = 1;

    let (mut priority, mut wanted, mut bits) = (0, None, None);
    // Before FRA_TABLE there were eight bits for it.
    let mut table = u32::from(*message.get(4)?);
    for (kind, value) in attributes(message.get(FIB_RULE_HDR..)?) {
        match kind {
            FRA_PRIORITY => priority = u32_at(value, 0)?,
            FRA_FWMARK => wanted = u32_at(value, 0),
            FRA_FWMASK => bits = u32_at(value, 0),
            FRA_TABLE => table = u32_at(value, 0)?,
            _ => {}
        }
    }
    // The kernel writes a mark only if it is not 0, and a mask wherever there is either.
    let mark = match (wanted, bits) {
        (None, None | Some(0)) => None,
        (wanted, bits) => Some((wanted.unwrap_or_default(), bits.unwrap_or(u32::MAX))),
    };
    Some(Rule {
        ipv6: message[0] == AF_INET6,
        priority,
        mark,
        table: if message[7] == FR_ACT_TO_TBL { table } else { 0 },
    })
}

/// The routes of one family in a table, as `ip route` would begin their lines; `name` gives the
/// names of devices.
pub fn table(
    netlink: &mut Netlink,
    family: u8,
    number: u32,
    name: impl Fn(u32) -> String,
) -> Result<(Vec<String>, bool), NetlinkError> {
    let mut body = vec![0; RTMSG];
    body[0] = family;
    push_attribute(&mut body, libc::RTA_TABLE, &number.to_ne_bytes());
    let result = netlink.dump(GETROUTE, &body, |all: &mut Vec<String>, message| {
        let Some(route) = route(message).filter(|route| route.table == number) else { return };
        let to = attributes(message.get(RTMSG..).unwrap_or_default())
            .find(|(kind, _)| *kind == libc::RTA_DST)
            .and_then(|(_, value)| ip(family, value));
        let mut line = match to {
            Some(to) => format!("{} {to}/{}", route.kind, message[1]),
            None => format!("{} default", route.kind),
        };
        if let Some(gateway) = route.gateway {
            let _ = write!(line, " via {gateway}");
        }
        if let Some(output) = route.output {
            let _ = write!(line, " dev {}", name(output));
        }
        all.push(line);
    });
    match result {
        // The kernel's word for a table that nobody has made.
        Err(error) if error.errno() == Some(libc::ENOENT) => Ok((Vec::new(), true)),
        result => result,
    }
}

/// What all the routes of one family, of every table, say of who is where.
pub fn ways(netlink: &mut Netlink, family: u8) -> Result<(Vec<Way>, bool), NetlinkError> {
    let mut body = vec![0; RTMSG];
    body[0] = family;
    netlink.dump(GETROUTE, &body, |all: &mut Vec<Way>, message| all.extend(way(message)))
}

fn way(message: &[u8]) -> Option<Way> {
    /// `struct rtnexthop`: length, flags, hops, interface index; then attributes.
    const RTNH: usize = 8;
    let family = *message.first()?;
    let bits = message[1];
    let zero = if family == AF_INET { vec![0; 4] } else { vec![0; 16] };
    let single = route(message).filter(|route| route.kind == "unicast")?;
    let mut way = Way {
        destination: (ip(family, &zero)?, bits),
        output: single.output,
        gateways: single.gateway.into_iter().collect(),
    };
    for (kind, value) in attributes(message.get(RTMSG..)?) {
        if kind == libc::RTA_DST {
            way.destination.0 = ip(family, value)?;
        }
        if kind != libc::RTA_MULTIPATH {
            continue;
        }
        let mut hops = value;
        while let Some(length) = u16_at(hops, 0).map(usize::from).filter(|one| *one >= RTNH) {
            for (kind, value) in attributes(hops.get(RTNH..length).unwrap_or_default()) {
                way.gateways.extend(gateway(family, kind, value));
            }
            // Each begins at a multiple of four.
            hops = hops.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
    }
    Some(way)
}

/// The next hop that an attribute names; one of the other family too.
fn gateway(family: u8, kind: u16, value: &[u8]) -> Option<IpAddr> {
    match kind {
        libc::RTA_GATEWAY => ip(family, value),
        libc::RTA_VIA => {
            u16_at(value, 0).and_then(|family| ip(family.try_into().ok()?, value.get(2..)?))
        }
        _ => None,
    }
}

/// A question for a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouteQuestion {
    /// Destination.
    pub destination: IpAddr,
    /// Device on which the packet arrives and its source address; nothing for a packet of the
    /// node's own.
    pub input: Option<(u32, IpAddr)>,
}

/// Asks the kernel for routes; the answers are in the order of the questions, and an error is the
/// kernel's number.
pub fn routes(
    netlink: &mut Netlink,
    questions: &[RouteQuestion],
) -> Result<Vec<Result<Route, i32>>, NetlinkError> {
    let bodies: Vec<_> = questions.iter().map(route_question).collect();
    let answers = netlink.ask(GETROUTE, &bodies)?;
    Ok(answers.into_iter().map(|answer| route(&answer?).ok_or(libc::EBADMSG)).collect())
}

fn route_question(question: &RouteQuestion) -> Vec<u8> {
    let RouteQuestion { destination, input } = question;
    let mut body = vec![0; RTMSG];
    let (family, bits) = match destination {
        IpAddr::V4(_) => (AF_INET, 32),
        IpAddr::V6(_) => (AF_INET6, 128),
    };
    body[0] = family;
    body[1] = bits;
    push_attribute(&mut body, libc::RTA_DST, &octets(*destination));
    if let Some((ifindex, source)) = input {
        body[2] = bits;
        push_attribute(&mut body, libc::RTA_SRC, &octets(*source));
        push_attribute(&mut body, libc::RTA_IIF, &ifindex.to_ne_bytes());
    }
    body
}

fn route(message: &[u8]) -> Option<Route> {
    let family = *message.first()?;
    let mut route = Route {
        kind: route_kind(*message.get(7)?),
        output: None,
        gateway: None,
        source: None,
        table: u32::from(message[4]),
    };
    for (kind, value) in attributes(message.get(RTMSG..)?) {
        match kind {
            libc::RTA_OIF => route.output = u32_at(value, 0),
            libc::RTA_GATEWAY | libc::RTA_VIA => route.gateway = gateway(family, kind, value),
            libc::RTA_PREFSRC => route.source = ip(family, value),
            libc::RTA_TABLE => route.table = u32_at(value, 0)?,
            _ => {}
        }
    }
    Some(route)
}

/// `RTN_…` in the words of `ip route`.
fn route_kind(kind: u8) -> String {
    const WORDS: [&str; 12] = [
        "unspec",
        "unicast",
        "local",
        "broadcast",
        "anycast",
        "multicast",
        "blackhole",
        "unreachable",
        "prohibit",
        "throw",
        "nat",
        "xresolve",
    ];
    WORDS.get(usize::from(kind)).map_or_else(|| kind.to_string(), |word| (*word).to_owned())
}

/// The addresses that the node itself has.
pub fn own_addresses(devices: &[Device]) -> HashSet<IpAddr> {
    devices.iter().flat_map(|device| networks(&device.link)).map(|(address, _)| address).collect()
}

/// The addresses of a link with the lengths of their prefixes.
pub fn networks(link: &Link) -> impl Iterator<Item = (IpAddr, u8)> {
    link.addresses.iter().filter_map(|text| {
        let (address, prefix) = text.split_once('/')?;
        Some((address.parse().ok()?, prefix.parse().ok()?))
    })
}

fn ip(family: u8, bytes: &[u8]) -> Option<IpAddr> {
    match family {
        AF_INET => <[u8; 4]>::try_from(bytes).ok().map(|bytes| Ipv4Addr::from(bytes).into()),
        AF_INET6 => <[u8; 16]>::try_from(bytes).ok().map(|bytes| Ipv6Addr::from(bytes).into()),
        _ => None,
    }
}

fn mac(bytes: [u8; 6]) -> String {
    bytes.map(|byte| format!("{byte:02x}")).join(":")
}

/// A text attribute, which ends in a zero.
fn text(value: &[u8]) -> String {
    let end = value.iter().position(|&byte| byte == 0).unwrap_or(value.len());
    String::from_utf8_lossy(&value[..end]).into_owned()
}
