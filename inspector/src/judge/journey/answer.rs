//! What the client got back.

use std::fmt;
use std::net::IpAddr;

use schemars::JsonSchema;
use serde::Serialize;

use super::{SeenPath, View, destination, duration, endpoint, source};
use crate::trace::journey::Direction;
use crate::trace::sighting::Hook;

/// What the client got back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum Answer {
    /// A SYN-ACK, or a packet that is no refusal.
    Answered {
        /// Whether the TCP connection was accepted; else it is some other packet.
        syn_ack: bool,
        /// The backend that answered, where its own packet was seen.
        #[serde(skip_serializing_if = "Option::is_none")]
        backend: Option<String>,
        /// Whether the answer was seen to leave as the VIP.
        as_vip: bool,
        /// How long after the first packet the first of it was seen, nanoseconds.
        after_ns: u64,
    },
    /// A reset of the first packet: nothing listens, or somebody says so.
    Refused {
        /// The backend that sent it, where its own packet was seen.
        #[serde(skip_serializing_if = "Option::is_none")]
        backend: Option<String>,
        /// How long after the first packet, nanoseconds.
        after_ns: u64,
    },
    /// A reset, of a connection that had begun before.
    Reset {
        /// How long after the first packet, nanoseconds.
        after_ns: u64,
    },
    /// An ICMP error that says that it cannot be reached.
    Unreachable {
        /// Who says so.
        by: IpAddr,
        /// Type and code.
        icmp: (u8, u8),
        /// Whether it quotes a packet that was translated: it is then the backend's, or comes from
        /// the way there.
        translated: bool,
        /// How long after the first packet, nanoseconds.
        after_ns: u64,
    },
    /// Nothing, in a time in which an answer was to be expected.
    Silent {
        /// How long it was waited for after the first packet, nanoseconds.
        waited_ns: u64,
    },
    /// Nothing so far: it was not waited long enough.
    NotYet {
        /// How long it was waited for after the first packet, nanoseconds.
        waited_ns: u64,
    },
}

/// How long an answer may take.
const PATIENCE_NS: u64 = 1_000_000_000;

const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const ACK: u8 = 0x10;

impl View<'_> {
    pub(super) fn answer(&self, path: &SeenPath) -> Answer {
        let replies: Vec<_> = self.packets(Direction::Reply).collect();
        let is_reset = |flags: Option<(u32, u32, u8)>| flags.is_some_and(|tcp| tcp.2 & RST != 0);
        let is_vip = |address: IpAddr| self.context.vips.contains(&address);
        let on_host = *path == SeenPath::SocketOnHost;
        // What is dropped later does not reach the client.
        let dropped =
            self.packets(Direction::Reply).any(|(step, _)| step.sighting.hook == Hook::Drop);
        let reaches_client = |hook: Hook| {
            on_host || matches!(hook, Hook::Queue | Hook::TcEgress | Hook::Transmit) && !dropped
        };
        let backend = |reset: bool| {
            replies
                .iter()
                .filter(|(_, packet)| is_reset(packet.tcp) == reset && !is_vip(packet.source))
                .find_map(|(_, packet)| source(packet))
                .map(endpoint)
        };
        if let Some((step, _)) = replies.iter().find(|(_, packet)| !is_reset(packet.tcp)) {
            let syn_ack =
                replies.iter().any(|(_, one)| one.tcp.is_some_and(|tcp| tcp.2 & SYN != 0));
            let as_vip = replies.iter().any(|(step, one)| {
                is_vip(one.source)
                    && reaches_client(step.sighting.hook)
                    && !is_reset(one.tcp)
                    && destination(one) == self.journey.client
            });
            return Answer::Answered {
                syn_ack,
                backend: backend(false),
                as_vip,
                after_ns: self.after_ns(step),
            };
        }
        if let Some((step, packet)) = replies.first() {
            // A first packet is refused with sequence number 0; anything else resets what was there.
            let refuses = packet.tcp.is_some_and(|tcp| tcp.0 == 0 && tcp.2 & ACK != 0);
            if !refuses || !self.journey.from_start {
                return Answer::Reset { after_ns: self.after_ns(step) };
            }
            return Answer::Refused { backend: backend(true), after_ns: self.after_ns(step) };
        }
        let error = self.packets(Direction::Error).find_map(|(step, packet)| {
            let (kind, code) = packet.icmp?;
            let unreachable = match packet.source {
                // Fragmentation needed is no refusal.
                IpAddr::V4(_) => kind == 3 && code != 4,
                IpAddr::V6(_) => kind == 1,
            };
            let quoted = packet.quoted.as_deref()?;
            // One about the reply says nothing to the client.
            let about_request =
                destination(quoted) == Some(self.journey.frontend) || !is_vip(quoted.source);
            (unreachable && about_request).then(|| Answer::Unreachable {
                by: packet.source,
                icmp: (kind, code),
                translated: !is_vip(quoted.destination),
                after_ns: self.after_ns(step),
            })
        });
        if let Some(error) = error {
            return error;
        }
        let waited_ns = self.journey.until_ns.saturating_sub(self.start_ns);
        if waited_ns >= PATIENCE_NS && !self.journey.cut_short {
            Answer::Silent { waited_ns }
        } else {
            Answer::NotYet { waited_ns }
        }
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Answered { syn_ack, backend, as_vip, after_ns } => {
                let what = if *syn_ack { "SYN-ACK" } else { "answer" };
                write!(f, "{what}")?;
                if let Some(backend) = backend {
                    write!(f, " of {backend}")?;
                }
                write!(f, " after {}", duration(*after_ns))?;
                f.write_str(if *as_vip {
                    ", sent to the client as the VIP"
                } else {
                    ", not seen to leave as the VIP"
                })
            }
            Self::Refused { backend: Some(backend), after_ns } => {
                write!(f, "{backend} refuses (RST after {})", duration(*after_ns))
            }
            Self::Refused { backend: None, after_ns } => {
                write!(f, "refused (RST after {}, by whom was not seen)", duration(*after_ns))
            }
            Self::Reset { after_ns } => write!(f, "reset after {}", duration(*after_ns)),
            Self::Unreachable { by, icmp: (kind, code), translated: _, after_ns } => write!(
                f,
                "{by} says that it cannot be reached (ICMP type {kind} code {code} after {})",
                duration(*after_ns)
            ),
            Self::Silent { waited_ns } => write!(f, "no answer in {}", duration(*waited_ns)),
            Self::NotYet { waited_ns } => {
                write!(f, "no answer yet, after {}", duration(*waited_ns))
            }
        }
    }
}
