//! What a journey proves: path, translation, look-ups, answer, outcome.
//!
//! Everything here rests on what was seen. What was not seen proves something only where it would
//! have been: at a hook that was watched and lost nothing. Otherwise it is said to be unknown.

mod answer;
mod context;
mod keep;
mod path;

use std::fmt;
use std::net::IpAddr;

pub use answer::Answer;
pub use context::context;
pub use keep::Keeper;
pub use path::SeenPath;
use schemars::JsonSchema;
use serde::Serialize;

use super::{Outcome, Served};
use crate::evidence::trace::Watched;
use crate::trace::journey::{Context, DeviceKind, Direction, Journey, Step, Tie};
use crate::trace::sighting::{Hook, Packet, Sighting, Tier};

/// What one journey proves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Conclusion {
    /// The frontend, as Cilium names it: `192.168.2.20:443/TCP`.
    pub frontend: String,
    /// The client, where packets showed it: `192.168.2.50:47894`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// The path that it took.
    pub path: SeenPath,
    /// How often the client's first packet came.
    pub attempts: u32,
    /// What became of it.
    pub outcome: Outcome,
    /// Why that is the outcome, or why it cannot be told.
    pub why: String,
    /// Whether the client was served.
    pub served: Served,
    /// The translation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub translation: Option<Translation>,
    /// L7: the proxy port that the packet's mark named.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proxy_port: Option<u16>,
    /// Whether the VIP was looked up as a neighbour before it was translated.
    pub vip_lookups: VipLookups,
    /// Every look-up of a neighbour.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub lookups: Vec<Lookup>,
    /// Packets that were thrown away.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub drops: Vec<Dropped>,
    /// The answer.
    pub answer: Answer,
    /// Every hook that reported it, in the order of time.
    pub hooks: Vec<HookTime>,
}

/// What one hook reported of a journey, and when.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct HookTime {
    /// How long after the first report, nanoseconds.
    pub after_ns: u64,
    /// Which.
    pub hook: Hook,
    /// What kind of observer.
    pub tier: Tier,
    /// The device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Which way it went.
    pub direction: Direction,
    /// By what it belongs to this journey.
    pub tie: Tie,
    /// What it was: addresses and flags of the packet, or the neighbour, and what the hook said.
    pub what: String,
    /// How often.
    pub times: u64,
}

/// A translation to a backend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Translation {
    /// Whether the translated packet itself was seen; else it follows from the reply.
    pub seen: bool,
    /// The backend: `10.77.1.128:8443`.
    pub backend: String,
    /// The source that the packet got instead of the client's, where it got another.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// Cilium's program that made it, where its entry and exit are watched:
    /// `cil_from_netdev (program 4711, returned TC_ACT_REDIRECT 7)`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
    /// Where it was first seen.
    pub hook: Hook,
    /// On which device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// How long after the arrival, nanoseconds.
    pub after_ns: u64,
}

/// Whether the VIP was looked up as a neighbour before it was translated, or at all.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum VipLookups {
    /// It was not: it would have been seen.
    None,
    /// None was seen, and it could have been missed.
    NoneSeen {
        /// Why.
        why: String,
    },
    /// Nothing that sees look-ups was watched.
    NotWatched,
    /// It was.
    Seen {
        /// How often for this very packet.
        for_packet: u64,
        /// How often in that time, for this packet or another.
        meanwhile: u64,
    },
}

/// A look-up of a neighbour.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Lookup {
    /// The address that was looked up.
    pub address: IpAddr,
    /// Whether it is the VIP.
    pub is_vip: bool,
    /// Where it was seen.
    pub hook: Hook,
    /// The device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// State of the entry, where the hook told it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    /// By what it belongs to this journey.
    pub tie: Tie,
    /// How often.
    pub times: u64,
    /// How long after the arrival, nanoseconds.
    pub after_ns: u64,
}

/// A packet that was thrown away.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Dropped {
    /// Which way it went.
    pub direction: Direction,
    /// The kernel's reason.
    pub reason: String,
    /// The device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Its destination then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub destination: Option<String>,
    /// How long after the arrival, nanoseconds.
    pub after_ns: u64,
}

/// `192.168.2.20:443`, `[fd00:2::20]:443`
pub(crate) fn endpoint((address, port): (IpAddr, u16)) -> String {
    std::net::SocketAddr::new(address, port).to_string()
}

/// `18 µs`, `1.2 s`
#[must_use]
pub fn duration(ns: u64) -> String {
    #[allow(clippy::cast_precision_loss, reason = "three digits are printed")]
    let exact = ns as f64;
    match ns {
        0..1_000 => format!("{ns} ns"),
        1_000..1_000_000 => format!("{} µs", ns / 1_000),
        1_000_000..1_000_000_000 => format!("{:.1} ms", exact / 1e6),
        _ => format!("{:.1} s", exact / 1e9),
    }
}

const TCP: u8 = 6;
/// Mark and mask of packets for a local proxy.
const PROXY_MARK: (u32, u32) = (0x200, 0xf00);
/// How soon after a route look-up for the VIP its neighbour is looked up.
const AFTER_ROUTE_NS: u64 = 10_000_000;

/// What the packets of a journey are looked at with.
struct View<'j> {
    journey: &'j Journey,
    context: &'j Context,
    watched: &'j Watched,
    start_ns: u64,
}

/// Hooks that see that a neighbour is looked up; at tc egress, the question that leaves.
const LOOKUPS: [Hook; 5] =
    [Hook::NeighResolve, Hook::NeighCreate, Hook::NeighSolicit, Hook::NeighDead, Hook::TcEgress];

/// Something that was seen of a packet.
struct Seen {
    /// What, as a clause.
    why: String,
    /// For how many of the client's attempts.
    attempts: u32,
}

/// Whether it was seen that a neighbour is looked up.
fn is_lookup(sighting: &Sighting) -> bool {
    sighting.neighbour.is_some()
        && LOOKUPS.contains(&sighting.hook)
        && (sighting.hook != Hook::TcEgress || sighting.packet.is_none())
}

/// Whether a packet has just come in at this hook.
fn is_arrival(hook: Hook) -> bool {
    matches!(hook, Hook::TcIngress | Hook::Receive | Hook::ProgramEntry)
}

/// The port in a mark for the local proxy: the upper half, in network order.
fn proxy_port(mark: u32) -> u16 {
    let [_, _, high, low] = mark.to_le_bytes();
    u16::from_be_bytes([high, low])
}

/// Name of a device, where there is one.
fn device(context: &Context, ifindex: u32) -> Option<String> {
    (ifindex != 0).then(|| context.device(ifindex))
}

/// Destination of a packet, with its port.
fn destination(packet: &Packet) -> Option<(IpAddr, u16)> {
    Some((packet.destination, packet.ports?.1))
}

fn source(packet: &Packet) -> Option<(IpAddr, u16)> {
    Some((packet.source, packet.ports?.0))
}

impl<'j> View<'j> {
    /// Packets from the client, by what they are tied to the journey with.
    fn requests(&self) -> impl Iterator<Item = (&'j Step, &'j Packet)> {
        self.packets(Direction::Request)
    }

    fn packets(&self, direction: Direction) -> impl Iterator<Item = (&'j Step, &'j Packet)> {
        self.journey
            .steps
            .iter()
            .filter(move |step| step.direction == direction && step.tie != Tie::Time)
            .filter_map(|step| Some((step, step.sighting.packet.as_ref()?)))
    }

    fn carries_vip(&self, packet: &Packet) -> bool {
        destination(packet) == Some(self.journey.frontend)
    }

    fn after_ns(&self, step: &Step) -> u64 {
        step.sighting.monotonic_ns.saturating_sub(self.start_ns)
    }

    fn device(&self, ifindex: u32) -> Option<String> {
        device(self.context, ifindex)
    }

    fn kind(&self, ifindex: u32) -> Option<DeviceKind> {
        self.context.devices.get(&ifindex).map(|device| device.kind)
    }

    /// The translated packet itself.
    fn translated(&self) -> Option<(&'j Step, &'j Packet)> {
        self.requests().find(|(_, packet)| !self.carries_vip(packet))
    }

    /// The first packet back that does not carry the VIP yet.
    fn untranslated_reply(&self) -> Option<(&'j Step, &'j Packet)> {
        self.packets(Direction::Reply)
            .find(|(_, packet)| !self.context.vips.contains(&packet.source))
    }

    fn translation(&self) -> Option<Translation> {
        let (seen, step, backend, near) = if let Some((step, packet)) = self.translated() {
            (true, step, destination(packet)?, source(packet))
        } else {
            let (step, packet) = self.untranslated_reply()?;
            (false, step, source(packet)?, destination(packet))
        };
        let client = self.journey.client;
        let new_source = near.filter(|near| client.is_some_and(|client| client != *near));
        Some(Translation {
            seen,
            backend: endpoint(backend),
            source: new_source.map(endpoint),
            by: self.translated_by(step),
            hook: step.sighting.hook,
            device: self.device(step.sighting.ifindex),
            after_ns: self.after_ns(step),
        })
    }

    /// The program at whose exit a packet was first seen translated. It entered with the VIP: else
    /// somebody else may have translated before.
    fn translated_by(&self, exit: &Step) -> Option<String> {
        let program = exit.sighting.program.as_ref()?;
        let entered = self.requests().any(|(step, packet)| {
            step.sighting.hook == Hook::ProgramEntry
                && step.sighting.program.as_ref() == Some(program)
                && step.sighting.ifindex == exit.sighting.ifindex
                && self.carries_vip(packet)
        });
        if exit.sighting.hook != Hook::ProgramExit || !entered {
            return None;
        }
        let returned = exit.sighting.detail.as_deref().unwrap_or_default();
        let returned = match returned.split_once(' ') {
            Some((number, name)) => format!("{name} {number}"),
            None => returned.to_owned(),
        };
        Some(format!("{} (program {}, returned {returned})", program.name, program.id))
    }

    /// A packet that carries the VIP and the mark for the local proxy: not as it arrived, but as
    /// BPF left it.
    fn proxied(&self) -> Option<(&'j Step, u16)> {
        let mut requests = self.requests();
        let (first, _) = requests.next()?;
        let is_marked = |step: &&(&Step, &Packet)| {
            step.0.sighting.mark.is_some_and(|mark| mark & PROXY_MARK.1 == PROXY_MARK.0)
        };
        let found = requests
            .filter(|(step, packet)| {
                self.carries_vip(packet)
                    && step.sighting.monotonic_ns >= first.sighting.monotonic_ns
            })
            .find(|found| is_marked(&found));
        match found {
            Some((step, _)) => Some((step, proxy_port(step.sighting.mark?))),
            None => self.routed_to_proxy(),
        }
    }

    /// The look-up of a route for a packet from the client to the VIP with the mark for the very
    /// port that is programmed: that names no ports of the packet, but no other packet has it.
    fn routed_to_proxy(&self) -> Option<(&'j Step, u16)> {
        let (vip, port) = self.journey.frontend;
        let programmed = self.context.frontend(vip, port, self.journey.protocol)?.proxy_port?;
        let (client, _) = self.journey.client?;
        self.journey.steps.iter().find_map(|step| {
            let flow = step.sighting.flow.as_ref()?;
            let mark = step.sighting.mark?;
            let same = (flow.source, flow.destination) == (client, vip)
                && mark & PROXY_MARK.1 == PROXY_MARK.0
                && proxy_port(mark) == programmed;
            same.then_some((step, programmed))
        })
    }

    /// Where the packet was in the stack, or left it, with the VIP as destination: the first such
    /// place, and for how many attempts this was seen.
    fn with_vip_in_stack(&self) -> Option<(&'j Step, Seen)> {
        let mut all = self.each_in_stack();
        let (first, why) = all.next()?;
        // What ends a packet is reported once for each, and those that waited for a neighbour
        // together end together.
        let attempts = |step: &Step| match step.sighting.hook {
            Hook::Drop | Hook::IcmpSend | Hook::TcpReset => {
                step.attempts.max(u32::try_from(step.times).unwrap_or(u32::MAX))
            }
            _ => step.attempts,
        };
        let attempts = all.map(|(step, _)| attempts(step)).fold(attempts(first), u32::max);
        Some((first, Seen { why, attempts }))
    }

    fn each_in_stack(&self) -> impl Iterator<Item = (&'j Step, String)> {
        self.requests().filter(|(_, packet)| self.carries_vip(packet)).filter_map(|(step, _)| {
            let sighting = &step.sighting;
            if sighting.mark.is_some_and(|mark| mark & PROXY_MARK.1 == PROXY_MARK.0)
                || self.kind(sighting.ifindex) == Some(DeviceKind::Inner)
            {
                return None;
            }
            let on =
                self.device(sighting.ifindex).map_or_else(String::new, |on| format!(" on {on}"));
            let neighbour = sighting.neighbour.as_ref().map(|neighbour| neighbour.address);
            let what = match (sighting.hook, neighbour) {
                (Hook::NeighResolve | Hook::NeighSolicit | Hook::NeighCreate, Some(address)) => {
                    format!("the kernel asked for {address}{on}")
                }
                (Hook::NeighDead, Some(address)) => format!("{address} did not answer{on}"),
                (Hook::Forward, _) => format!("forwarded{on} with the VIP as destination"),
                (Hook::Queue | Hook::TcEgress | Hook::Transmit, _) => {
                    format!("left{on} with the VIP as destination")
                }
                // To the client it says that there is a shorter way, and the packet goes on.
                (Hook::IcmpSend, _) if is_redirect(sighting) => {
                    "the stack forwards it and tells the client of a shorter way (ICMP redirect)"
                        .to_owned()
                }
                (Hook::IcmpSend, _) => "the stack answered with an ICMP error".to_owned(),
                // The proxy's port can be closed too: only a known mark tells.
                (Hook::TcpReset, _) if sighting.mark.is_some() => {
                    "the stack answered with a reset".to_owned()
                }
                (Hook::LocalDeliver, _) if sighting.mark.is_some() => {
                    "delivered on this node with the VIP as destination".to_owned()
                }
                (Hook::Drop, _) => {
                    let reason = reason(sighting.detail.as_deref());
                    is_of_stack(&reason).then(|| format!("dropped in the stack ({reason})"))?
                }
                _ => return None,
            };
            Some((step, what))
        })
    }

    /// A route look-up for the client's packet with the VIP as destination, and right after it a
    /// look-up of a neighbour on the device that the route named.
    fn routed_and_looked_up(&self) -> Option<Seen> {
        let vip = self.journey.frontend.0;
        self.journey.steps.iter().find_map(|route| {
            let flow = route.sighting.flow.as_ref().filter(|flow| flow.destination == vip)?;
            let output = route.sighting.ifindex;
            if !matches!(self.kind(output), Some(DeviceKind::Outside | DeviceKind::Pod)) {
                return None;
            }
            let target = flow.gateway.unwrap_or(vip);
            let routed_ns = route.sighting.monotonic_ns;
            self.journey.steps.iter().find_map(|step| {
                let sighting = &step.sighting;
                let soon =
                    (routed_ns..=routed_ns + AFTER_ROUTE_NS).contains(&sighting.monotonic_ns);
                let same = is_lookup(sighting)
                    && sighting.ifindex == output
                    && sighting.neighbour.as_ref().is_some_and(|one| one.address == target);
                (soon && same).then(|| Seen {
                    why: format!(
                        "routed with the VIP as destination, and {} after that the kernel asked \
                         for {target} on {}",
                        duration(sighting.monotonic_ns - routed_ns),
                        self.context.device(output)
                    ),
                    attempts: route.attempts,
                })
            })
        })
    }

    /// Look-ups of the VIP until `until_ns`: for this packet, and by nothing but the time.
    fn vip_lookups(&self, until_ns: u64) -> VipLookups {
        let mut for_packet = 0;
        let mut meanwhile = 0;
        for step in &self.journey.steps {
            let sighting = &step.sighting;
            let is_vip = sighting
                .neighbour
                .as_ref()
                .is_some_and(|one| one.address == self.journey.frontend.0);
            if !is_vip || !is_lookup(sighting) || sighting.monotonic_ns > until_ns {
                continue;
            }
            match step.tie {
                Tie::Time => meanwhile += step.times,
                Tie::Packet | Tie::Skb => for_packet += step.times,
            }
        }
        if for_packet + meanwhile > 0 {
            return VipLookups::Seen { for_packet, meanwhile };
        }
        let watched: Vec<Hook> =
            LOOKUPS.into_iter().filter(|hook| self.watched.watches(*hook)).collect();
        if watched.is_empty() {
            return VipLookups::NotWatched;
        }
        let lost: u64 = LOOKUPS.into_iter().map(|hook| self.watched.lost(hook)).sum();
        // Of a packet whose arrival was lost, the look-ups belong to no journey.
        let arrivals: u64 = [Hook::TcIngress, Hook::Receive, Hook::ProgramEntry]
            .into_iter()
            .map(|hook| self.watched.lost(hook))
            .sum();
        let doubts = [
            (lost, "sightings of look-ups lost"),
            (arrivals, "sightings of arrivals lost"),
            (self.watched.joined.neighbours_not_kept, "look-ups not kept"),
            (self.watched.joined.ambiguous, "sightings that fit several journeys"),
            (self.watched.joined.late, "sightings that came too late to be put in order"),
            (self.journey.steps_not_kept, "steps of this journey not kept"),
            (u64::from(self.journey.cut_short), "journey cut short"),
        ];
        if let Some((number, what)) = doubts.into_iter().find(|(number, _)| *number > 0) {
            return VipLookups::NoneSeen { why: format!("{number} {what}") };
        }
        if !self.requests().next().is_some_and(|(step, _)| is_arrival(step.sighting.hook)) {
            let why = "the packet was not seen before it left".to_owned();
            return VipLookups::NoneSeen { why };
        }
        // A packet that waits for an entry that is there already makes no entry.
        if !self.watched.saw_all_everywhere(Hook::NeighResolve) {
            let names: Vec<&str> = watched.iter().map(|hook| hook_name(*hook)).collect();
            return VipLookups::NoneSeen { why: format!("watched: {}", names.join(", ")) };
        }
        VipLookups::None
    }

    /// The drop of a packet where BPF programs drop: of one that carries the VIP still, or of one
    /// that is translated.
    fn dropped_in_bpf(&self, translated: bool) -> Option<Seen> {
        let mut requests =
            self.requests().filter(|(_, packet)| self.carries_vip(packet) != translated);
        requests.find_map(|(step, _)| {
            let sighting = &step.sighting;
            let on = self.context.device(sighting.ifindex);
            let why = match sighting.hook {
                Hook::Drop => {
                    let reason = reason(sighting.detail.as_deref());
                    // What is dropped when it leaves had got there translated.
                    let counts = is_of_bpf(&reason) && !(translated && reason == "TC_EGRESS");
                    counts.then(|| format!("dropped in BPF on {on} ({reason})"))
                }
                Hook::ProgramExit => {
                    let code = sighting.detail.as_deref()?.split_whitespace().next()?;
                    (code == TC_ACT_SHOT).then(|| format!("Cilium's program on {on} dropped it"))
                }
                _ => None,
            }?;
            Some(Seen { why, attempts: step.attempts })
        })
    }

    /// Whether the arrival of any packet on any device would have been seen: of the client's, and of
    /// a backend's reply.
    fn saw_arrivals(&self) -> bool {
        let everywhere = self.watched.saw_all_everywhere(Hook::Receive);
        let mut devices = self
            .context
            .devices
            .iter()
            .filter(|(_, device)| device.kind != DeviceKind::Inner)
            .peekable();
        let known = devices.peek().is_some();
        let complete = !self.journey.cut_short
            && self.journey.steps_not_kept == 0
            && self.watched.joined.ambiguous == 0
            && self.watched.joined.late == 0;
        let all = |ifindex: &u32| self.watched.saw_all(Hook::TcIngress, *ifindex);
        complete && (everywhere || known && devices.all(|(ifindex, _)| all(ifindex)))
    }

    /// Whether an answer would have been seen: as it comes from a backend, and as it leaves to the
    /// client.
    fn saw_answers(&self) -> bool {
        let Some((first, _)) = self.requests().next() else { return false };
        let ifindex = first.sighting.ifindex;
        let leaving = [Hook::TcEgress, Hook::Queue, Hook::Transmit];
        self.saw_arrivals() && leaving.iter().any(|hook| self.watched.saw_all(*hook, ifindex))
    }

    /// How often the client's first packet came, and how often it was seen translated.
    fn attempts(&self) -> (u32, u32) {
        let Some((first, packet)) = self.requests().find(|(_, packet)| self.carries_vip(packet))
        else {
            return (0, 0);
        };
        let flags = |packet: &Packet| packet.tcp.map(|tcp| tcp.2 & FIRST_FLAGS);
        // Of the hooks that saw it translated, the one that saw most of it.
        let translated = self
            .requests()
            .filter(|(_, other)| !self.carries_vip(other) && flags(other) == flags(packet))
            .map(|(step, _)| step.attempts)
            .max();
        (first.attempts, translated.unwrap_or(0))
    }

    fn outcome(
        &self,
        path: &SeenPath,
        answer: &Answer,
        translation: Option<&Translation>,
        proxied: Option<(&Step, u16)>,
    ) -> (Outcome, String, VipLookups) {
        if let Some((step, port)) = proxied.filter(|_| self.translated().is_none()) {
            let lookups = self.vip_lookups(step.sighting.monotonic_ns);
            let why = format!("marked for the local proxy port {port}");
            return self.before_any(Outcome::ProxiedBeforeNeigh, why, lookups);
        }
        if self.journey.client.is_none() {
            let why = "its socket asked for the VIP, and no packet carried it".to_owned();
            let translated = self.translated().is_some();
            let outcome = if translated { Outcome::SocketTranslated } else { Outcome::Unknown };
            return (outcome, why, self.vip_lookups(u64::MAX));
        }
        let in_stack = self.with_vip_in_stack();
        let Some(translation) = translation else {
            let lookups = self.vip_lookups(u64::MAX);
            let (outcome, why) = self.without_translation(in_stack, &lookups, answer);
            return (outcome, why, lookups);
        };
        let until_ns = self.start_ns + translation.after_ns;
        let lookups = self.vip_lookups(until_ns);
        let before = in_stack.filter(|(step, _)| step.sighting.monotonic_ns < until_ns);
        if let Some((_, seen)) = before {
            let why = format!("{}, and translated to {} after that", seen.why, translation.backend);
            return (Outcome::Unknown, why, lookups);
        }
        let (attempts, translated) = self.attempts();
        if attempts > 1 && translated < attempts {
            let why = format!(
                "the client tried {attempts} times; {} was seen of what became of each",
                if translation.seen { "not all" } else { "nothing but the reply" }
            );
            return (Outcome::Unknown, why, lookups);
        }
        // A policy, mostly: Cilium looks at it once it knows the backend.
        if let Some(Seen { why, attempts: dropped }) = self.dropped_in_bpf(true) {
            if dropped < attempts {
                let why = format!("the client tried {attempts} times; {dropped} of them: {why}");
                return (Outcome::Unknown, why, lookups);
            }
            let why = format!("translated to {}, and {why}", translation.backend);
            return (Outcome::Dropped, why, lookups);
        }
        if *path == SeenPath::SocketOnHost && !translation.seen {
            let why = "a reply of a backend was seen, and not where the packet was translated";
            return (Outcome::Unknown, why.to_owned(), lookups);
        }
        let why = if translation.seen {
            let by = translation.by.as_ref().map_or_else(String::new, |by| format!(" by {by}"));
            format!("seen translated to {}{by}", translation.backend)
        } else {
            format!("the reply of {} was seen", translation.backend)
        };
        self.before_any(Outcome::DnatBeforeNeigh, why, lookups)
    }

    /// An outcome that rests on there being no look-up of the VIP.
    fn before_any(
        &self,
        outcome: Outcome,
        why: String,
        lookups: VipLookups,
    ) -> (Outcome, String, VipLookups) {
        let VipLookups::Seen { for_packet, .. } = lookups else { return (outcome, why, lookups) };
        let vip = self.journey.frontend.0;
        let why = if for_packet > 0 {
            format!("{why}, after {vip} was looked up as a neighbour")
        } else {
            format!(
                "{why}, and {vip} was looked up as a neighbour meanwhile: for which packet is not \
                 known"
            )
        };
        (Outcome::Unknown, why, lookups)
    }

    fn without_translation(
        &self,
        in_stack: Option<(&Step, Seen)>,
        lookups: &VipLookups,
        answer: &Answer,
    ) -> (Outcome, String) {
        let rejected = match answer {
            Answer::Unreachable { by, .. }
                if *by == self.journey.frontend.0 && self.saw_arrivals() =>
            {
                self.packets(Direction::Error).map(|(step, _)| step.attempts).max()
            }
            _ => None,
        };
        let for_packet = match lookups {
            VipLookups::Seen { for_packet, .. } => *for_packet,
            _ => 0,
        };
        let seen = if let Some(seen) = self.dropped_in_bpf(false) {
            (Outcome::Dropped, seen)
        } else if let Some((_, seen)) = in_stack {
            (Outcome::Untranslated, seen)
        } else if for_packet > 0 {
            let why = format!("the kernel asked for {}", self.journey.frontend.0);
            (Outcome::Untranslated, Seen { why, attempts: 1 })
        } else if let Some(seen) = self.routed_and_looked_up() {
            (Outcome::Untranslated, seen)
        } else if let Some(attempts) = rejected {
            let why = "answered with ICMP unreachable as the VIP, and no backend took part";
            (Outcome::NoBackend, Seen { why: why.to_owned(), attempts })
        } else {
            let why = match answer {
                Answer::Silent { .. } | Answer::NotYet { .. } => {
                    "nothing was seen of it after that: neither translated nor dropped"
                }
                _ => "answered as the VIP; by whom was not seen",
            };
            return (Outcome::Unknown, why.to_owned());
        };
        let (outcome, Seen { why, attempts: seen }) = seen;
        let (attempts, _) = self.attempts();
        if seen < attempts {
            let why = format!(
                "the client tried {attempts} times; what became of {seen} was seen: {outcome}, {why}"
            );
            return (Outcome::Unknown, why);
        }
        (outcome, why)
    }

    fn lookups(&self) -> Vec<Lookup> {
        self.journey
            .steps
            .iter()
            .filter(|step| is_lookup(&step.sighting))
            .filter_map(|step| {
                let neighbour = step.sighting.neighbour.as_ref()?;
                Some(Lookup {
                    address: neighbour.address,
                    is_vip: neighbour.address == self.journey.frontend.0,
                    hook: step.sighting.hook,
                    device: self.device(step.sighting.ifindex),
                    state: neighbour.state.clone(),
                    tie: step.tie,
                    times: step.times,
                    after_ns: self.after_ns(step),
                })
            })
            .collect()
    }

    fn drops(&self) -> Vec<Dropped> {
        self.journey
            .steps
            .iter()
            .filter(|step| step.sighting.hook == Hook::Drop)
            .map(|step| Dropped {
                direction: step.direction,
                reason: reason(step.sighting.detail.as_deref()),
                device: self.device(step.sighting.ifindex),
                destination: step.sighting.packet.as_ref().and_then(destination).map(endpoint),
                after_ns: self.after_ns(step),
            })
            .collect()
    }
}

/// Whether an ICMP message that the stack sends is a redirect.
fn is_redirect(sighting: &Sighting) -> bool {
    let kind = match sighting.packet.as_ref().map(|packet| packet.source) {
        Some(IpAddr::V6(_)) => "type 137,",
        _ => "type 5,",
    };
    sighting.detail.as_deref().is_some_and(|detail| detail.starts_with(kind))
}

/// TCP flags that tell a first packet from later ones: SYN, RST, ACK.
const FIRST_FLAGS: u8 = 0x16;

/// `192.168.2.50:47894 > 192.168.2.20:443 SYN, mark 0x200`
fn what(sighting: &Sighting) -> String {
    let mut parts = Vec::new();
    if let Some(packet) = &sighting.packet {
        let place = |address: IpAddr, port: Option<u16>| match port {
            Some(port) => endpoint((address, port)),
            None => address.to_string(),
        };
        let mut text = format!(
            "{} > {}",
            place(packet.source, packet.ports.map(|ports| ports.0)),
            place(packet.destination, packet.ports.map(|ports| ports.1))
        );
        if let Some((_, _, flags)) = packet.tcp {
            let names: Vec<&str> = FLAG_NAMES
                .into_iter()
                .filter(|(bit, _)| flags & bit != 0)
                .map(|(_, name)| name)
                .collect();
            text = format!("{text} {}", names.join("-"));
        }
        if let Some((kind, code)) = packet.icmp {
            text = format!("{text} ICMP type {kind} code {code}");
        }
        parts.push(text);
    }
    if let Some(flow) = &sighting.flow {
        let via = flow.gateway.map_or_else(String::new, |gateway| format!(" via {gateway}"));
        parts.push(format!("route for {} > {}{via}", flow.source, flow.destination));
    }
    if let Some(neighbour) = &sighting.neighbour {
        let state = neighbour.state.as_ref().map_or_else(String::new, |state| format!(" {state}"));
        parts.push(format!("neighbour {}{state}", neighbour.address));
    }
    if let Some(mark) = sighting.mark.filter(|mark| *mark != 0) {
        parts.push(format!("mark {mark:#x}"));
    }
    parts.extend(sighting.detail.clone());
    parts.join(", ")
}

/// TCP flags by name.
const FLAG_NAMES: [(u8, &str); 5] =
    [(0x02, "SYN"), (0x01, "FIN"), (0x04, "RST"), (0x08, "PSH"), (0x10, "ACK")];

/// What Cilium's program returns for a packet that is thrown away.
const TC_ACT_SHOT: &str = "2";

/// The kernel's reason without what stands before every one.
fn reason(detail: Option<&str>) -> String {
    let detail = detail.unwrap_or("no reason given");
    detail.strip_prefix("SKB_DROP_REASON_").unwrap_or(detail).to_owned()
}

/// Whether a drop with this reason was made by a program at tc or XDP.
fn is_of_bpf(reason: &str) -> bool {
    matches!(reason, "TC_INGRESS" | "TC_EGRESS" | "XDP")
}

/// Whether a drop with this reason was made by the stack, which the packet had reached then.
fn is_of_stack(reason: &str) -> bool {
    reason.starts_with("NEIGH_")
        || reason.starts_with("IP_")
        || reason.starts_with("IPV6_")
        || reason == "NO_SOCKET"
}

/// A hook as in files.
#[must_use]
pub fn hook_name(hook: Hook) -> &'static str {
    match hook {
        Hook::TcIngress => "tc-ingress",
        Hook::TcEgress => "tc-egress",
        Hook::ProgramEntry => "program-entry",
        Hook::ProgramExit => "program-exit",
        Hook::Receive => "receive",
        Hook::Route => "route",
        Hook::LocalDeliver => "local-deliver",
        Hook::Forward => "forward",
        Hook::Queue => "queue",
        Hook::Transmit => "transmit",
        Hook::NeighCreate => "neigh-create",
        Hook::NeighResolve => "neigh-resolve",
        Hook::NeighSolicit => "neigh-solicit",
        Hook::NeighUpdate => "neigh-update",
        Hook::NeighDead => "neigh-dead",
        Hook::Drop => "drop",
        Hook::TcpReset => "tcp-reset",
        Hook::IcmpSend => "icmp-send",
    }
}

/// What a journey proves, given how well it could be seen.
#[must_use]
pub fn conclude(journey: &Journey, context: &Context, watched: &Watched) -> Conclusion {
    Conclusion { hooks: hooks(journey, context), ..outline(journey, context, watched) }
}

/// Every hook that reported a journey, in the order of time: the `hooks` of its [`Conclusion`].
#[must_use]
pub fn hooks(journey: &Journey, context: &Context) -> Vec<HookTime> {
    let start_ns = journey.start_ns();
    let steps = journey.steps.iter().map(|step| HookTime {
        after_ns: step.sighting.monotonic_ns.saturating_sub(start_ns),
        hook: step.sighting.hook,
        tier: step.sighting.tier,
        device: device(context, step.sighting.ifindex),
        direction: step.direction,
        tie: step.tie,
        what: what(&step.sighting),
        times: step.times,
    });
    steps.collect()
}

/// As [`conclude`], without the `hooks`: of the many journeys that are only counted nobody reads
/// them, and they are most of the work.
#[must_use]
pub fn outline(journey: &Journey, context: &Context, watched: &Watched) -> Conclusion {
    let view = View { journey, context, watched, start_ns: journey.start_ns() };
    let path = view.path();
    let answer = view.answer(&path);
    let translation = view.translation();
    let proxied = view.proxied();
    let (outcome, why, vip_lookups) = view.outcome(&path, &answer, translation.as_ref(), proxied);
    let drops = view.drops();
    let served = match (&answer, outcome) {
        (Answer::Answered { as_vip: true, .. }, _)
        | (Answer::Answered { .. }, Outcome::SocketTranslated) => Served::Yes,
        (Answer::Refused { .. } | Answer::Unreachable { .. }, _) | (_, Outcome::Dropped) => {
            Served::No
        }
        // UDP need not answer.
        (Answer::Silent { .. }, _) if journey.protocol == TCP && view.saw_answers() => Served::No,
        _ => Served::Unknown,
    };
    let (address, port) = journey.frontend;
    Conclusion {
        frontend: format!(
            "{}/{}",
            endpoint((address, port)),
            crate::cilium::proto::Protocol(journey.protocol)
        ),
        client: journey.client.map(endpoint),
        path,
        attempts: view.attempts().0,
        outcome,
        why,
        served,
        translation,
        proxy_port: proxied.map(|(_, port)| port),
        vip_lookups,
        lookups: view.lookups(),
        drops,
        answer,
        hooks: Vec::new(),
    }
}

impl fmt::Display for VipLookups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::NoneSeen { why } => write!(f, "none seen ({why})"),
            Self::NotWatched => f.write_str("not watched"),
            Self::Seen { for_packet, meanwhile: 0 } => write!(f, "{for_packet}"),
            Self::Seen { for_packet: 0, meanwhile } => {
                write!(f, "{meanwhile}, for this packet or another")
            }
            Self::Seen { for_packet, meanwhile } => {
                write!(f, "{for_packet}, and {meanwhile} for this packet or another")
            }
        }
    }
}

impl fmt::Display for Conclusion {
    /// The journey in one sentence.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.arrival())?;
        if self.attempts > 1 {
            write!(f, " ({} attempts)", self.attempts)?;
        }
        match (&self.translation, self.proxy_port) {
            (Some(one), _) => {
                write!(f, "; translated to {}", one.backend)?;
                if let Some(source) = &one.source {
                    write!(f, " from {source}")?;
                }
                let on = one.device.as_ref().map_or_else(String::new, |on| format!(" on {on}"));
                if let Some(by) = &one.by {
                    write!(f, " by {by}{on} after {}", duration(one.after_ns))?;
                } else if one.seen {
                    write!(f, " ({}{on}, {})", hook_name(one.hook), duration(one.after_ns))?;
                } else {
                    write!(f, " (inferred from its reply{on}, {})", duration(one.after_ns))?;
                }
            }
            (None, Some(port)) => write!(f, "; marked for the local proxy port {port}")?,
            (None, None) => match self.outcome {
                Outcome::Untranslated => write!(f, "; never translated: {}", self.why)?,
                _ => write!(f, "; {}", self.why)?,
            },
        }
        write!(f, "; neighbour look-ups for the VIP")?;
        let between = self.translation.is_some() || self.proxy_port.is_some();
        write!(f, "{}: {}", if between { " in between" } else { "" }, self.vip_lookups)?;
        let mut others: Vec<String> = Vec::new();
        for lookup in self.lookups.iter().filter(|lookup| !lookup.is_vip) {
            let on = lookup.device.as_deref().unwrap_or("?");
            let text = format!("{} on {on}", lookup.address);
            if !others.contains(&text) {
                others.push(text);
            }
        }
        match (others.is_empty(), &self.vip_lookups) {
            (false, _) => write!(f, " (for the next hop: {})", others.join(", "))?,
            (true, VipLookups::None) => write!(f, " (for the next hop: none)")?,
            _ => {}
        }
        for drop in &self.drops {
            let on = drop.device.as_ref().map_or_else(String::new, |on| format!(" on {on}"));
            let what = if drop.direction == Direction::Reply { "the reply was " } else { "" };
            write!(f, "; {what}dropped{on} ({}, {})", drop.reason, duration(drop.after_ns))?;
        }
        write!(f, "; {}", self.answer)?;
        if self.outcome == Outcome::Unknown
            && (self.translation.is_some() || self.proxy_port.is_some())
        {
            write!(f, "; cannot be told: {}", self.why)?;
        }
        Ok(())
    }
}
