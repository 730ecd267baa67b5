//! Real packets that were made to arrive on devices as if clients had sent them: what was sent, what
//! the hooks saw of it, and what it left.

use std::net::{IpAddr, SocketAddr};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    simulation::{Effect, Skipped},
    trace::Watched,
};
use crate::{packet::Flow, trace::journey::Journey};

/// Everything that was injected.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub struct Injection {
    /// How long an answer was waited for, nanoseconds.
    pub wait_ns: u64,
    /// The packets, each with its control, in the order in which they were sent.
    pub probes: Vec<Probe>,
    /// What was watched meanwhile, and how well.
    pub watched: Watched,
    /// Entries that the packets caused in Cilium's maps, and whether they are gone again.
    pub effects: Vec<Effect>,
    /// Entries of the kernel's own tables that were there for the packets, and whether they are gone
    /// again.
    pub kernel: Vec<Undone>,
    /// What was not injected, and why.
    pub skipped: Vec<Skipped>,
    /// Whether it was ended by a signal before it was done.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub interrupted: bool,
    /// Why nothing was sent at all, where a weaker proof spoke against it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stopped: Option<String>,
}

/// One frontend on one device: a client's packet, and its control.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Probe {
    /// The frontend, as in the verdict: `192.168.2.20:443/TCP`.
    pub frontend: String,
    /// Index of the device on which the packets arrive.
    pub ifindex: u32,
    /// Its name.
    pub device: String,
    /// Whether packets of the device have an Ethernet header.
    pub ethernet: bool,
    /// IP protocol number: 6 (TCP, one SYN) or 17 (UDP, one datagram).
    pub protocol: u8,
    /// What the datagram says, hexadecimal digits.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub payload: String,
    /// To whom the answer goes, in words.
    pub answer_to: String,
    /// What an injected packet does not pass, though a client's does.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub passed_by: Vec<String>,
    /// The packet for the frontend.
    pub client: Shot,
    /// The same packet to an address that is no frontend.
    pub control: Shot,
}

/// One packet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Shot {
    /// Its source address.
    pub source: IpAddr,
    /// Its source port.
    pub source_port: u16,
    /// Its destination address.
    pub destination: IpAddr,
    /// Its destination port.
    pub destination_port: u16,
    /// When it was sent, nanoseconds of `CLOCK_MONOTONIC`; nothing if it was not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sent_ns: Option<u64>,
    /// Why it did not arrive, where it did not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Whether the connection was given up afterwards with a reset from the same client.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reset: bool,
    /// What the hooks saw of it; nothing if they saw nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub journey: Option<Journey>,
}

/// Something in the kernel's own tables that was there for the packets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Undone {
    /// What it is, in words.
    pub what: String,
    /// Why it could not be removed, where it could not; nothing if it is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left: Option<String>,
}

impl Shot {
    /// Where the packet comes from.
    #[must_use]
    pub fn from(&self) -> SocketAddr {
        (self.source, self.source_port).into()
    }

    /// Where it is to go.
    #[must_use]
    pub fn to(&self) -> SocketAddr {
        (self.destination, self.destination_port).into()
    }

    /// Both ends.
    #[must_use]
    pub fn flow(&self, protocol: u8) -> Flow {
        Flow {
            source: self.source,
            source_port: self.source_port,
            destination: self.destination,
            destination_port: self.destination_port,
            protocol,
        }
    }

    /// Whether a journey is that of this packet.
    #[must_use]
    pub fn is(&self, journey: &Journey) -> bool {
        journey.client == Some((self.source, self.source_port))
            && journey.frontend == (self.destination, self.destination_port)
    }
}
