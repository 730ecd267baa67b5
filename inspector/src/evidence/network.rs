//! The network of the namespace in which the evidence was collected, as the kernel has it.

use std::{collections::BTreeMap, net::IpAddr};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Links, routes, neighbours and what else decides where a packet goes.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub struct Network {
    /// The network namespace that was read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<Namespace>,
    /// Network devices.
    pub links: Vec<Link>,
    /// What the kernel answers when it is asked for a route.
    pub routes: Vec<RouteAnswer>,
    /// Neighbour entries that matter: of the VIP, and of the next hops to backends.
    pub neighbours: Vec<Neighbour>,
    /// Policy rules.
    pub rules: Vec<Rule>,
    /// IPv4 routes of table 2004, through which marked packets reach a local proxy: `local default
    /// dev lo`, as the line of `ip route` begins.
    pub proxy_routes: Vec<String>,
    /// The same for IPv6.
    #[serde(default)]
    pub proxy_routes_v6: Vec<String>,
    /// Rules that hand packets with a proxy mark to a local socket (TPROXY), by proxy port.
    pub tproxy: Vec<Tproxy>,
    /// Of the proxy ports that frontends name, those at which a TCP socket listens.
    pub listening: Vec<u16>,
    /// Of the same, those at which a UDP socket receives.
    #[serde(default)]
    pub listening_udp: Vec<u16>,
    /// Sysctls by name: `net.ipv4.ip_forward`, `net.ipv4.conf.wg0.rp_filter`, …; a dot in a
    /// device's name stays a dot.
    pub sysctls: BTreeMap<String, i64>,
    /// WireGuard devices.
    pub wireguard: Vec<WireGuard>,
    /// Macros of `node_config.h` that decide at run time, where the agent's state is there.
    pub node_config: BTreeMap<String, String>,
    /// Frontends that the agent has with the VIP as address, where it was asked:
    /// `192.168.2.20:443/TCP`, with `/i` behind it in the internal scope; without a protocol where
    /// the agent does not tell it (before Cilium 1.17).
    #[serde(default)]
    pub agent_frontends: Option<Vec<String>>,
}

/// A network namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Namespace {
    /// Inode number of its file, which `ls -iL /proc/PID/ns/net` shows.
    pub inode: u64,
    /// How it was chosen: the path, name or process id that was given; nothing if it was that in
    /// which the program was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chosen: Option<String>,
}

/// A network device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Link {
    /// Interface index.
    pub ifindex: u32,
    /// Name.
    pub name: String,
    /// Kind: `veth`, `wireguard`, `tun`, `bridge`, …; nothing for a plain device.
    pub kind: Option<String>,
    /// Whether it is administratively up.
    pub up: bool,
    /// Whether it has carrier.
    pub carrier: bool,
    /// Interface index of its master (bridge, bond, VRF).
    pub master: Option<u32>,
    /// MTU in bytes.
    pub mtu: u32,
    /// Whether it has Ethernet headers.
    pub ethernet: bool,
    /// MAC address, where it has one.
    pub mac: Option<String>,
    /// Addresses in CIDR notation.
    pub addresses: Vec<String>,
}

/// A question for a route, and the kernel's answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RouteAnswer {
    /// Destination asked for.
    pub destination: IpAddr,
    /// Device on which the packet arrives; nothing for a packet of this node's own.
    pub input: Option<u32>,
    /// Source address that was asked for, of a packet that arrives: one that a host behind the
    /// device could have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<IpAddr>,
    /// The answer, or why there is none: `no route`, or what begins with `not forwarded:`,
    /// `martian:` or `rp_filter:`, or the kernel's words. A route that says that packets end
    /// (`blackhole`, `unreachable`, `prohibit`) is an answer.
    pub answer: Result<Route, String>,
}

/// A route.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Route {
    /// Kind: `unicast`, `local`, `blackhole`, ….
    pub kind: String,
    /// Device through which the packet leaves.
    pub output: Option<u32>,
    /// Next hop; nothing if the destination is on the link.
    pub gateway: Option<IpAddr>,
    /// Source address that the kernel prefers.
    pub source: Option<IpAddr>,
    /// Table; 0 where the kernel does not tell it (IPv4 packets that end at the node).
    pub table: u32,
}

/// A neighbour entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Neighbour {
    /// Address.
    pub address: IpAddr,
    /// Device.
    pub ifindex: u32,
    /// State in the kernel's words: `REACHABLE`, `STALE`, `INCOMPLETE`, `FAILED`, `PERMANENT`, ….
    pub state: String,
    /// MAC address, where it is known.
    pub mac: Option<String>,
}

/// A policy rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Rule {
    /// Whether it is for IPv6.
    pub ipv6: bool,
    /// Priority.
    pub priority: u32,
    /// Mark and mask, where it has them.
    pub mark: Option<(u32, u32)>,
    /// Table; 0 for a rule that does not look one up.
    pub table: u32,
}

/// A rule that hands marked packets to a local socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Tproxy {
    /// Mark and mask that it matches.
    pub mark: (u32, u32),
    /// Local port.
    pub port: u16,
    /// `tcp` or `udp`, where it says.
    pub protocol: Option<String>,
    /// Whether it is for IPv6.
    pub ipv6: bool,
}

/// A WireGuard device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WireGuard {
    /// Interface index.
    pub ifindex: u32,
    /// Peers.
    pub peers: Vec<WireGuardPeer>,
}

/// A WireGuard peer; its keys are not kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WireGuardPeer {
    /// Whether it has an endpoint.
    pub endpoint: bool,
    /// Seconds since the last handshake; nothing if there was none.
    pub handshake_s: Option<u64>,
    /// Bytes received from it.
    pub received: u64,
    /// Bytes sent to it.
    pub sent: u64,
    /// Allowed addresses in CIDR notation.
    pub allowed: Vec<String>,
}

impl Link {
    /// Why nothing arrives on it, as what can be said of a device; nothing if it is alive.
    #[must_use]
    pub fn dead(&self) -> Option<&'static str> {
        match (self.up, self.carrier) {
            (false, _) => Some("is down"),
            (true, false) => Some("has no carrier"),
            (true, true) => None,
        }
    }
}

impl Network {
    /// The device with this index.
    #[must_use]
    pub fn link(&self, ifindex: u32) -> Option<&Link> {
        self.links.iter().find(|link| link.ifindex == ifindex)
    }

    /// The neighbour entry of an address on a device.
    #[must_use]
    pub fn neighbour(&self, address: IpAddr, ifindex: u32) -> Option<&Neighbour> {
        self.neighbours.iter().find(|one| one.address == address && one.ifindex == ifindex)
    }

    /// The answer to a question for a route.
    #[must_use]
    pub fn route(&self, destination: IpAddr, input: Option<u32>) -> Option<&RouteAnswer> {
        self.routes.iter().find(|one| one.destination == destination && one.input == input)
    }
}
