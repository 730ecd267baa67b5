//! Which path a packet took: told by where it was seen, never by its addresses.

use std::fmt;

use schemars::JsonSchema;
use serde::Serialize;

use super::View;
use crate::trace::journey::DeviceKind;

/// The path of a packet, as it was seen.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum SeenPath {
    /// It arrived on a device.
    Forwarded {
        /// The device.
        device: String,
    },
    /// A process of this node sent it.
    SocketOnHost,
    /// A process of a pod sent it.
    Pod {
        /// The pod's device.
        device: String,
    },
    /// A pod sent it on.
    ForwardedFromPod {
        /// The pod's device.
        device: String,
    },
    /// It could not be told.
    Unknown {
        /// What is missing.
        why: String,
    },
}

impl SeenPath {
    /// `arrived on wg0`
    pub(super) fn arrival(&self) -> String {
        match self {
            Self::Forwarded { device } => format!("arrived on {device}"),
            Self::SocketOnHost => "sent by a process of this node".to_owned(),
            Self::Pod { device } => format!("came from a pod on {device}"),
            Self::ForwardedFromPod { device } => format!("sent on by a pod on {device}"),
            Self::Unknown { why } => why.clone(),
        }
    }
}

impl fmt::Display for SeenPath {
    /// As paths are named in a verdict.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Forwarded { device } => write!(f, "forwarded via {device}"),
            Self::SocketOnHost => f.write_str("socket on host"),
            Self::Pod { .. } => f.write_str("pod"),
            Self::ForwardedFromPod { .. } => f.write_str("forwarded from pod"),
            Self::Unknown { .. } => f.write_str("unknown path"),
        }
    }
}

/// The TTL that packets begin with; a router takes one off.
fn is_first_ttl(ttl: u8) -> bool {
    matches!(ttl, 64 | 128 | 255)
}

/// How long after the start of observation a packet can be on its way that arrived before it.
const UNDER_WAY_NS: u64 = 50_000_000;

impl View<'_> {
    /// The path, by the first thing that was seen of a packet from the client.
    pub(super) fn path(&self) -> SeenPath {
        let unknown = |why: String| SeenPath::Unknown { why };
        let Some((first, packet)) = self.requests().next() else {
            return unknown("no packet from the client was seen".to_owned());
        };
        let sighting = &first.sighting;
        let device = self.context.device(sighting.ifindex);
        if super::is_arrival(sighting.hook) {
            return match self.kind(sighting.ifindex) {
                Some(DeviceKind::Outside) => SeenPath::Forwarded { device },
                Some(DeviceKind::Pod) if is_first_ttl(packet.ttl) => SeenPath::Pod { device },
                Some(DeviceKind::Pod) => SeenPath::ForwardedFromPod { device },
                Some(DeviceKind::Inner) | None => {
                    unknown(format!("first seen on {device}, where nothing comes from outside"))
                }
            };
        }
        let at = super::hook_name(sighting.hook);
        if !self.saw_arrivals() {
            return unknown(format!(
                "first seen at {at} on {device}; whether it had arrived somewhere could have been \
                 missed"
            ));
        }
        if sighting.monotonic_ns < self.watched.started_ns.saturating_add(UNDER_WAY_NS) {
            return unknown(format!(
                "first seen at {at} on {device}, too soon after the start to know where it came \
                 from"
            ));
        }
        if !is_first_ttl(packet.ttl) {
            return unknown(format!(
                "first seen at {at} on {device} with TTL {}: it was routed before",
                packet.ttl
            ));
        }
        SeenPath::SocketOnHost
    }
}
