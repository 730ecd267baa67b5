//! Runs of Cilium's own programs on synthetic packets: what went in, what came out, and what they
//! left in Cilium's maps.

use std::net::IpAddr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::programs::HookKind;

/// Everything that was simulated.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub struct Simulation {
    /// At most this many packets were made for each frontend on each device.
    pub at_most: u32,
    /// The runs, in the order in which they were made.
    pub runs: Vec<Run>,
    /// Entries that the runs caused in Cilium's maps, and whether they are gone again.
    pub effects: Vec<Effect>,
    /// What was not simulated, and why.
    pub skipped: Vec<Skipped>,
    /// Whether it was ended by a signal before it was done.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub interrupted: bool,
}

/// What a run is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Purpose {
    /// A client's packet for the frontend.
    Client,
    /// The control: the same packet to an address that is no frontend.
    ControlAddress,
    /// The same packet to a port of the VIP that is no frontend.
    ControlPort,
}

/// One packet and what became of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Run {
    /// What it is for.
    pub purpose: Purpose,
    /// The frontend, as in the verdict: `192.168.2.20:443/TCP`.
    pub frontend: String,
    /// Index of the device on which the packet is made to arrive.
    pub ifindex: u32,
    /// Its name.
    pub device: String,
    /// Source of the packet.
    pub source: IpAddr,
    /// Source port.
    pub source_port: u16,
    /// Destination of the packet.
    pub destination: IpAddr,
    /// Destination port.
    pub destination_port: u16,
    /// IP protocol number.
    pub protocol: u8,
    /// Whether the packet begins with an Ethernet header.
    pub ethernet: bool,
    /// The programs that it went through, in order: XDP first, where Cilium uses it.
    pub steps: Vec<Step>,
    /// Why the kernel did not run it, where it did not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// One program's turn.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Step {
    /// The hook that the program is on.
    pub hook: HookKind,
    /// Program id.
    pub program: u32,
    /// Its name.
    pub name: String,
    /// The packet that it was given, hexadecimal digits, from the first byte that the program sees.
    pub packet_in: String,
    /// The packet that it left.
    pub packet_out: String,
    /// What it returned: `TC_ACT_*` as a signed number, or `XDP_*`.
    pub returned: i32,
    /// The packet's mark afterwards; 0 for XDP, which has none.
    pub mark: u32,
    /// The five words of the control buffer afterwards; zeros for XDP. Where Cilium drops a packet
    /// it leaves the reason in the third.
    pub control_buffer: [u32; 5],
}

/// An entry that a run caused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Effect {
    /// Name of the map, cut by the kernel to 15 bytes.
    pub map: String,
    /// Id of the map.
    pub map_id: u32,
    /// What it is, in words.
    pub what: String,
    /// Key, hexadecimal digits.
    pub key: String,
    /// Value, hexadecimal digits.
    pub value: String,
    /// Why it could not be removed, where it could not; nothing if it is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left: Option<String>,
}

/// Something that was not simulated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Skipped {
    /// The device.
    pub device: String,
    /// The frontend, if it is about one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frontend: Option<String>,
    /// Why.
    pub why: String,
}
