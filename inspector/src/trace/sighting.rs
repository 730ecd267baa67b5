//! One sighting: what one hook reported of one packet, or of one neighbour, at one moment.
//!
//! This is what every tier of observers delivers and all that journeys are joined from.

use std::net::IpAddr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What kind of observer reported something.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// Our own classifier at a device.
    Tc,
    /// Netlink notifications of neighbours.
    Netlink,
    /// Tracepoints of the kernel.
    Tracepoint,
    /// Kprobes on functions of the kernel.
    Kprobe,
    /// Entry and exit of Cilium's own program.
    Program,
}

/// Where in the kernel something was seen.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Hook {
    /// Ingress of a device, before Cilium's programs.
    TcIngress,
    /// Egress of a device.
    TcEgress,
    /// Cilium's program is entered.
    ProgramEntry,
    /// Cilium's program has returned.
    ProgramExit,
    /// The stack receives from a device: before tc ingress, and again after a redirect.
    Receive,
    /// The stack has decided where the packet goes.
    Route,
    /// The packet is for this host.
    LocalDeliver,
    /// The packet is forwarded.
    Forward,
    /// Queued for sending at a device.
    Queue,
    /// Handed to a device's driver.
    Transmit,
    /// A neighbour entry is made.
    NeighCreate,
    /// A packet is given to a neighbour entry that is to be resolved.
    NeighResolve,
    /// A neighbour is asked for: an ARP request or a neighbour solicitation.
    NeighSolicit,
    /// A neighbour entry changed its state.
    NeighUpdate,
    /// A packet was given up on because its neighbour does not answer.
    NeighDead,
    /// The packet was thrown away.
    Drop,
    /// The stack sends a TCP reset.
    TcpReset,
    /// The stack sends an ICMP error about the packet.
    IcmpSend,
}

/// What one hook reported.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Sighting {
    /// When, nanoseconds of `CLOCK_MONOTONIC`.
    pub monotonic_ns: u64,
    /// Where.
    pub hook: Hook,
    /// Which kind of observer.
    pub tier: Tier,
    /// Index of the device, 0 where there is none.
    pub ifindex: u32,
    /// Address of the kernel's buffer that holds the packet, where tracing may see it. It is used
    /// again for another packet once this one is freed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skb: Option<u64>,
    /// The packet's headers as they were at this hook.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packet: Option<Packet>,
    /// The neighbour that this is about. At the tc hooks, without a packet: the address that an ARP
    /// or NDP packet asks for or answers for; `detail` is then `request` or `reply`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub neighbour: Option<Neighbour>,
    /// The packet's mark.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mark: Option<u32>,
    /// The program that was entered or has returned, at [`Hook::ProgramEntry`] and
    /// [`Hook::ProgramExit`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<RanProgram>,
    /// What the program returned, as number and name, or the name of the reason of a drop.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// The question of a route look-up, at [`Hook::Route`] of a tracepoint, where the packet itself
    /// cannot be seen. `ifindex` is then the device that the answer names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flow: Option<Flow>,
    /// Where the socket that sent the packet asked to go, where the observer knows that it is
    /// elsewhere than the packet says: address and port before a translation at connect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<(IpAddr, u16)>,
    /// The bytes that `packet` was read from: from the IP header (or the ARP packet) on, headers
    /// alone. They are for captures and stay out of JSON.
    #[serde(skip)]
    pub headers: Option<Box<[u8]>>,
}

/// A program of Cilium's that ran.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub struct RanProgram {
    /// Its id.
    pub id: u32,
    /// Its name: `cil_from_netdev`.
    pub name: String,
}

/// What the kernel looked a route up for, and what it found.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub struct Flow {
    /// Source address; unspecified where the kernel has yet to choose one.
    pub source: IpAddr,
    /// Destination address.
    pub destination: IpAddr,
    /// Number of the transport protocol, 0 where the question has none.
    pub protocol: u8,
    /// The gateway that the answer names; none if the destination is on the link, or this host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<IpAddr>,
}

/// A neighbour, as a hook named it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub struct Neighbour {
    /// The address that is looked up: the next hop.
    pub address: IpAddr,
    /// State of its entry, where the hook tells: `INCOMPLETE`, `REACHABLE`, …
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
}

/// The headers of a packet; no payload leaves the kernel.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub struct Packet {
    /// Source address.
    pub source: IpAddr,
    /// Destination address.
    pub destination: IpAddr,
    /// Number of the transport protocol, after IPv6's extension headers.
    pub protocol: u8,
    /// Source and destination port, where the packet has them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ports: Option<(u16, u16)>,
    /// TCP: sequence number, acknowledgement number, flags (FIN is bit 0, SYN bit 1).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tcp: Option<(u32, u32, u8)>,
    /// ICMP: type and code.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub icmp: Option<(u8, u8)>,
    /// The packet that an ICMP error quotes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quoted: Option<Box<Packet>>,
    /// IPv4: identification. IPv6: the lower half of a fragment header's, else 0.
    pub ip_id: u16,
    /// IPv6: flow label. IPv4: 0.
    pub flow_label: u32,
    /// TTL or hop limit.
    pub ttl: u8,
    /// Whether it is a fragment.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fragment: bool,
    /// Length from the IP header to the end, bytes; more than the MTU where a device has merged
    /// packets (GRO) or will cut them (GSO).
    pub length: u32,
    /// Length of what follows the transport header, bytes.
    pub payload_length: u32,
}
