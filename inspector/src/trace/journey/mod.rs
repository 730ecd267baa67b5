//! Journeys: what many hooks reported, joined into the ways of single connections.
//!
//! A journey is one connection: the first packet from a client to a VIP with its repetitions, what
//! became of it at every hook, and the answer. Only joining is done here, by what address
//! translation cannot change; what a journey proves is judged elsewhere, from the same record.
//!
//! What belongs together is told by, in this order: the addresses and ports that were seen to belong
//! to the connection, TCP's numbers (the load balancer keeps them, ports and addresses it does not),
//! the kernel's packet buffer for a moment, and, for UDP, what else NAT leaves alone. Where two
//! connections fit equally well, the sighting is left out and counted: a journey too short proves
//! less, one that mixes two connections proves something false.

mod context;
mod join;
mod window;

pub use context::{Context, Device, DeviceKind, FrontendAddress};
pub use join::{Counts, Joiner, Limits, Question};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::sighting::Sighting;

/// Which way something went.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// From the client.
    Request,
    /// To the client.
    Reply,
    /// An ICMP error about a packet of the connection.
    Error,
    /// No packet: a neighbour was looked up meanwhile.
    Neighbour,
}

/// By what a sighting was found to belong to a journey.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Tie {
    /// By the packet's headers.
    Packet,
    /// By the buffer that held the packet just before.
    Skb,
    /// By nothing but the time: it can belong to something else.
    Time,
}

/// What one hook reported of a connection, once or more often.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Step {
    /// Which way it went.
    pub direction: Direction,
    /// By what it was found to belong here.
    pub tie: Tie,
    /// How often the hook reported the like.
    pub times: u64,
    /// How many of these were apart by more than [`ATTEMPT_GAP_NS`]: the sender tried again.
    pub attempts: u32,
    /// When it was last reported, nanoseconds of `CLOCK_MONOTONIC`.
    pub last_ns: u64,
    /// The first report.
    pub sighting: Sighting,
}

/// Packets of a connection that are further apart than this are attempts of their own; below it
/// they are copies of one, or parts of one. TCP waits longer than that before it tries again.
pub const ATTEMPT_GAP_NS: u64 = 150_000_000;

/// One connection, as the hooks saw it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Journey {
    /// Number of the transport protocol.
    pub protocol: u8,
    /// Address and port that the client asked for.
    pub frontend: (std::net::IpAddr, u16),
    /// Address and port of the client, as the packets for the VIP carried them; nothing if no
    /// packet ever did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<(std::net::IpAddr, u16)>,
    /// Whether the first packet of a TCP connection was seen, and not only later ones.
    pub from_start: bool,
    /// What was seen, in the order of time.
    pub steps: Vec<Step>,
    /// How many further kinds of step there was no room for.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub steps_not_kept: u64,
    /// Until when it was watched, nanoseconds of `CLOCK_MONOTONIC`.
    pub until_ns: u64,
    /// Whether it had to make room for others before its time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cut_short: bool,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
pub(crate) fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Journey {
    /// When the first of it was seen, nanoseconds of `CLOCK_MONOTONIC`.
    #[must_use]
    pub fn start_ns(&self) -> u64 {
        self.steps.first().map_or(self.until_ns, |step| step.sighting.monotonic_ns)
    }
}
