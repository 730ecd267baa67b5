//! The joiner: sightings in, journeys out.
//!
//! Its memory is bounded by [`Limits`], whatever comes in; what had to make room is counted.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;

use foldhash::HashMap;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::window::Window;
use super::{ATTEMPT_GAP_NS, Context, Direction, Journey, Step, Tie};
use crate::trace::sighting::{Hook, Packet, Sighting, Tier};

pub(super) const TCP: u8 = 6;
pub(super) const UDP: u8 = 17;
const SCTP: u8 = 132;
const ICMPV6: u8 = 58;

const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const ACK: u8 = 0x10;

/// How long a buffer's address stands for the packet that was seen in it.
const SKB_NS: u64 = 1_000_000_000;
/// The same where there is no packet to compare with.
const SKB_BLIND_NS: u64 = 50_000_000;
/// How soon after a packet arrived it is seen with another source address. It is held back while the
/// next hop is looked up; after a second TCP tries again.
const REPLACED_NS: u64 = 1_000_000_000;
/// How far apart two sightings of one UDP packet can be that nothing but its length and its IP id or
/// flow label join: translation takes microseconds, and others may have the same a moment later.
const UDP_NS: u64 = 1_000_000;
/// Keys and buffers that one journey may hold.
const KEYS: usize = 64;
/// How many look-ups that only the time ties to it a journey takes.
const LOOSE_PER_JOURNEY: usize = 16;
/// How long before a packet leaves its neighbour can have been looked up.
const BEFORE_LEAVING_NS: u64 = 10_000_000;
/// How often it is looked which journeys are over, in the time of the sightings.
const SWEEP_NS: u64 = 20_000_000;

/// How much the joiner holds, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Journeys that are under way.
    pub journeys: usize,
    /// Kinds of step of one journey.
    pub steps: usize,
    /// Sightings that wait for earlier ones.
    pub waiting: usize,
    /// How long each waits, nanoseconds.
    pub wait_ns: u64,
    /// Look-ups of neighbours that no packet is known for.
    pub neighbours: usize,
    /// Connections that are over, by whose addresses later packets are recognised.
    pub past: usize,
    /// How long a journey is watched after its answer, nanoseconds.
    pub settle_ns: u64,
    /// How long one without an answer is watched after its last packet, nanoseconds.
    pub patience_ns: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            journeys: 8192,
            steps: 96,
            waiting: 65536,
            wait_ns: 100_000_000,
            neighbours: 4096,
            past: 32768,
            settle_ns: 200_000_000,
            // TCP tries again after 1, 2 and 4 seconds.
            patience_ns: 5_000_000_000,
        }
    }
}

/// What became of the sightings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Counts {
    /// Sightings that came in.
    pub sightings: u64,
    /// Reports that came twice.
    pub duplicates: u64,
    /// Sightings of packets that belong to no journey: the first packet was not seen, or they are
    /// none of the VIP's.
    pub unmatched: u64,
    /// Sightings that fit several journeys equally well, and were left out.
    pub ambiguous: u64,
    /// Sightings of connections whose journey was over.
    pub after: u64,
    /// Sightings of packets that are no connection's: ICMP, later fragments.
    pub other: u64,
    /// Sightings that came too late to be put in order.
    pub late: u64,
    /// Journeys that had to make room before their time.
    pub cut_short: u64,
    /// Kinds of step for which journeys had no room.
    pub steps_not_kept: u64,
    /// Look-ups of neighbours that had to make room.
    pub neighbours_not_kept: u64,
    /// Connections to a backend whose packets never carried the VIP: translated at connect, or
    /// meant for the backend itself.
    pub without_vip: u64,
}

/// Whether it is an ICMP message that only tells the sender of a shorter way: the packet goes on.
fn is_redirect(sighting: &Sighting) -> bool {
    const REDIRECT_V4: u8 = 5;
    const REDIRECT_V6: u8 = 137;
    let packet = sighting.packet.as_ref();
    packet.is_some_and(|packet| match (packet.source, packet.icmp) {
        (IpAddr::V4(_), Some((kind, _))) => kind == REDIRECT_V4,
        (IpAddr::V6(_), Some((kind, _))) => kind == REDIRECT_V6,
        (_, None) => false,
    })
}

/// How often the VIP was asked for and answered for on the wire, on one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub struct Question {
    /// Index of the device.
    pub ifindex: u32,
    /// ARP requests or neighbour solicitations for the VIP that arrived.
    pub requests: u64,
    /// Answers for the VIP that left.
    pub replies: u64,
}

/// Who talks to whom, in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Tuple {
    protocol: u8,
    source: (IpAddr, u16),
    destination: (IpAddr, u16),
}

impl Tuple {
    fn of(packet: &Packet) -> Option<Self> {
        let (from, to) = packet.ports?;
        Some(Self {
            protocol: packet.protocol,
            source: (packet.source, from),
            destination: (packet.destination, to),
        })
    }

    fn reversed(self) -> Self {
        Self { source: self.destination, destination: self.source, ..self }
    }
}

/// TCP's numbers, which the load balancer keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Numbers {
    /// A first packet, by its sequence number.
    First(u32),
    /// The answer to it, by the number that it acknowledges.
    Answer(u32),
    /// Any other, by both numbers.
    Other(u32, u32),
}

impl Numbers {
    fn of(packet: &Packet) -> Option<Self> {
        let (sequence, acknowledged, flags) = packet.tcp.filter(|_| packet.protocol == TCP)?;
        Some(match flags & (SYN | ACK | RST) {
            SYN => Self::First(sequence),
            // A reset of a first packet has sequence number 0.
            both if both & (SYN | RST) != 0 && both & ACK != 0 => Self::Answer(acknowledged),
            _ => Self::Other(sequence, acknowledged),
        })
    }
}

/// Whose numbers these are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    One(u64, Direction),
    /// More than one journey's: they prove nothing.
    Many,
}

/// What a tuple belongs to.
#[derive(Debug, Clone, Copy)]
struct Bound {
    journey: u64,
    direction: Direction,
    /// First sequence number of the connection, where it was seen.
    first: Option<u32>,
}

/// What NAT leaves alone of a packet without numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Print {
    payload_length: u32,
    ip_id: u16,
    flow_label: u32,
}

impl Print {
    fn of(packet: &Packet) -> Self {
        Self {
            payload_length: packet.payload_length,
            ip_id: packet.ip_id,
            flow_label: packet.flow_label,
        }
    }

    /// Whether it tells packets apart.
    fn tells(self) -> bool {
        self.ip_id != 0 || self.flow_label != 0
    }
}

/// The packet in a buffer.
#[derive(Debug, Clone, Copy)]
struct InBuffer {
    journey: u64,
    direction: Direction,
    last_ns: u64,
    protocol: u8,
    sequence: Option<u32>,
    print: Print,
}

/// A journey under way.
#[derive(Debug)]
struct Open {
    /// The tuple of packets that carry the VIP.
    vip: Option<Tuple>,
    /// What its socket asked for, where an observer said so.
    asked: Option<(IpAddr, u16)>,
    /// Source of its first packet.
    source: (IpAddr, u16),
    /// Where it was translated to.
    backend: Option<(IpAddr, u16)>,
    protocol: u8,
    first: Option<u32>,
    /// The last request, and when.
    last_request: (Print, u64),
    steps: Vec<Step>,
    steps_not_kept: u64,
    last_ns: u64,
    answered: bool,
    tuples: Vec<Tuple>,
    numbers: Vec<Numbers>,
    buffers: Vec<u64>,
}

/// Joins sightings into journeys.
#[derive(Debug)]
pub struct Joiner {
    context: Context,
    limits: Limits,
    window: Window,
    open: BTreeMap<u64, Open>,
    next: u64,
    /// Those of which no packet carried the VIP so far.
    without_vip: BTreeSet<u64>,
    tuples: HashMap<Tuple, Bound>,
    numbers: HashMap<Numbers, Owner>,
    buffers: HashMap<u64, InBuffer>,
    /// Journeys by protocol and the client's address and port.
    sources: HashMap<(u8, IpAddr, u16), Vec<u64>>,
    /// Those without an answer so far, by the addresses of client and VIP.
    unanswered: HashMap<(IpAddr, IpAddr), BTreeSet<u64>>,
    /// When the last requests over UDP were, and whose.
    requests: VecDeque<(u64, u64)>,
    /// Tuples of journeys that are over, oldest first.
    past: VecDeque<Tuple>,
    /// Look-ups of neighbours that no packet is known for, in the order of time.
    loose: VecDeque<Sighting>,
    /// Sightings that have the time of the last one.
    same_time: Vec<Sighting>,
    questions: BTreeMap<u32, Question>,
    swept_ns: u64,
    done: Vec<Journey>,
    counts: Counts,
}

impl Joiner {
    /// A joiner without any sightings.
    #[must_use]
    pub fn new(context: Context, limits: Limits) -> Self {
        Self {
            window: Window::new(limits.wait_ns, limits.waiting),
            context,
            limits,
            open: BTreeMap::new(),
            next: 0,
            without_vip: BTreeSet::new(),
            tuples: HashMap::default(),
            numbers: HashMap::default(),
            buffers: HashMap::default(),
            sources: HashMap::default(),
            unanswered: HashMap::default(),
            requests: VecDeque::new(),
            past: VecDeque::new(),
            loose: VecDeque::new(),
            same_time: Vec::new(),
            questions: BTreeMap::new(),
            swept_ns: 0,
            done: Vec::new(),
            counts: Counts::default(),
        }
    }

    /// Takes a sighting in.
    pub fn add(&mut self, sighting: Sighting) {
        self.counts.sightings += 1;
        if self.window.push(sighting) {
            self.counts.late += 1;
        }
        self.release(false);
    }

    /// Time has come to `now_ns` of `CLOCK_MONOTONIC`, whether anything was seen or not.
    pub fn advance(&mut self, now_ns: u64) {
        self.window.advance(now_ns);
        self.release(false);
    }

    /// The journeys that came to an end since this was last asked, in the order of their beginning.
    pub fn take(&mut self) -> Vec<Journey> {
        std::mem::take(&mut self.done)
    }

    /// Ends all journeys: observation ended at `now_ns`.
    pub fn finish(&mut self, now_ns: u64) -> Vec<Journey> {
        self.window.advance(now_ns);
        self.release(true);
        let all: Vec<u64> = self.open.keys().copied().collect();
        let now_ns = now_ns.max(self.window.settled_ns());
        for id in all {
            self.close(id, now_ns, false);
        }
        self.requests.clear();
        self.take()
    }

    /// What became of the sightings so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// How the VIP was asked for on the wire, by device.
    #[must_use]
    pub fn questions(&self) -> Vec<Question> {
        self.questions.values().copied().collect()
    }

    /// How many things of any kind are held: what [`Limits`] bounds.
    #[must_use]
    pub fn held(&self) -> usize {
        let steps: usize = self
            .open
            .values()
            .map(|open| {
                open.steps.len() + open.tuples.len() + open.numbers.len() + open.buffers.len()
            })
            .sum();
        let sources: usize = self.sources.values().map(Vec::len).sum();
        let unanswered: usize = self.unanswered.values().map(BTreeSet::len).sum();
        self.window.len()
            + self.open.len()
            + steps
            + sources
            + unanswered
            + self.requests.len()
            + self.tuples.len()
            + self.numbers.len()
            + self.buffers.len()
            + self.past.len()
            + self.loose.len()
            + self.same_time.len()
    }

    fn release(&mut self, all: bool) {
        while let Some(sighting) = self.window.pop(all) {
            let now_ns = sighting.monotonic_ns;
            if self.came_before(&sighting) {
                self.counts.duplicates += 1;
            } else {
                self.join(sighting);
            }
            if now_ns >= self.swept_ns.saturating_add(SWEEP_NS) {
                self.sweep(now_ns);
            }
        }
        let settled = self.window.settled_ns();
        if settled >= self.swept_ns.saturating_add(SWEEP_NS) {
            self.sweep(settled);
        }
    }

    /// Whether the very same was reported just before.
    fn came_before(&mut self, sighting: &Sighting) -> bool {
        // More at one nanosecond than CPUs can report is no real input.
        const AT_ONCE: usize = 256;
        if self.same_time.first().is_none_or(|first| first.monotonic_ns != sighting.monotonic_ns) {
            self.same_time.clear();
        } else if self.same_time.contains(sighting) {
            return true;
        }
        // Mostly nothing else has this time, and there is nothing to be kept for.
        let is_followed = self.window.next_ns() == Some(sighting.monotonic_ns);
        if is_followed && self.same_time.len() < AT_ONCE {
            self.same_time.push(sighting.clone());
        }
        false
    }

    fn join(&mut self, sighting: Sighting) {
        match &sighting.packet {
            Some(packet) if packet.quoted.is_some() => self.join_error(sighting),
            Some(packet) if packet.fragment && packet.ports.is_none() => self.counts.other += 1,
            // A neighbour solicitation is a packet of its own.
            Some(packet) if packet.protocol == ICMPV6 && is_question(&sighting) => {
                self.join_neighbour(sighting);
            }
            Some(packet) if !matches!(packet.protocol, TCP | UDP | SCTP) => self.counts.other += 1,
            Some(_) => self.join_packet(sighting),
            None if sighting.neighbour.is_some() => self.join_neighbour(sighting),
            None if sighting.flow.is_some() => self.join_route(sighting),
            None => self.join_blind(sighting, Direction::Request),
        }
    }

    /// A packet of a connection.
    fn join_packet(&mut self, sighting: Sighting) {
        let Some(packet) = &sighting.packet else { return };
        let Some(tuple) = Tuple::of(packet) else {
            self.counts.other += 1;
            return;
        };
        let (id, direction, tie) = match self.find(&sighting, packet, tuple) {
            Found::Journey(id, direction, tie) => (id, direction, tie),
            Found::Past => {
                self.counts.after += 1;
                return;
            }
            Found::Several => {
                self.counts.ambiguous += 1;
                return;
            }
            Found::Nothing => {
                let Some(id) = self.begin(&sighting, packet, tuple) else {
                    self.counts.unmatched += 1;
                    return;
                };
                (id, Direction::Request, Tie::Packet)
            }
        };
        self.learn(id, direction, &sighting, tuple);
        self.step(id, direction, tie, sighting);
    }

    /// Whose packet this is.
    fn find(&mut self, sighting: &Sighting, packet: &Packet, tuple: Tuple) -> Found {
        let numbers = Numbers::of(packet);
        let first = match numbers {
            Some(Numbers::First(sequence)) => Some(sequence),
            _ => None,
        };
        if let Some(bound) = self.tuples.get(&tuple).copied() {
            // Another first number is another connection with the same ports.
            let other = first.is_some() && first != bound.first;
            if !other {
                return if self.open.contains_key(&bound.journey) {
                    Found::Journey(bound.journey, bound.direction, Tie::Packet)
                } else {
                    Found::Past
                };
            }
        }
        match numbers.and_then(|numbers| self.numbers.get(&numbers).copied()) {
            Some(Owner::One(id, direction))
                if self.may_be(id, direction, tuple, sighting.monotonic_ns) =>
            {
                return Found::Journey(id, direction, Tie::Packet);
            }
            Some(Owner::Many) => {
                return self
                    .by_source(packet, tuple, sighting.monotonic_ns)
                    .unwrap_or(Found::Several);
            }
            _ => {}
        }
        if let Some(found) = self.in_buffer(sighting, packet, tuple) {
            return found;
        }
        self.by_source(packet, tuple, sighting.monotonic_ns).unwrap_or(Found::Nothing)
    }

    /// Whether a packet with a journey's numbers can be its own: one that carries the VIP names the
    /// client, and any other goes to a backend or comes from one.
    fn may_be(&self, id: u64, direction: Direction, tuple: Tuple, now_ns: u64) -> bool {
        let Some(open) = self.open.get(&id) else { return false };
        let (near, far) = match direction {
            Direction::Reply => (tuple.destination, tuple.source),
            _ => (tuple.source, tuple.destination),
        };
        if self.context.vips.contains(&far.0) {
            return match open.vip {
                Some(vip) => (vip.source, vip.destination) == (near, far),
                // A journey whose translated packet was seen first, since its arrival was not: if
                // its source was replaced too, the numbers alone do not prove that it is this one.
                None => open.source == near,
            };
        }
        if near != open.source && !self.may_replace(open, direction, near.0, now_ns) {
            return false;
        }
        match open.backend {
            Some(backend) => backend == far,
            None => self.context.is_backend(far.0, far.1),
        }
    }

    /// Whether the node may have put this address in the client's place. It does so in the moment of
    /// translation and with an address of its own; the same numbers otherwise are chance.
    fn may_replace(&self, open: &Open, direction: Direction, address: IpAddr, now_ns: u64) -> bool {
        let hosts = &self.context.host_addresses;
        let soon =
            direction != Direction::Request || now_ns.abs_diff(open.last_request.1) <= REPLACED_NS;
        soon && !open.answered && (hosts.is_empty() || hosts.contains(&address))
    }

    /// By the buffer that the packet is in.
    fn in_buffer(&self, sighting: &Sighting, packet: &Packet, tuple: Tuple) -> Option<Found> {
        let held = self.buffers.get(&sighting.skb?)?;
        let same = held.protocol == packet.protocol
            && sighting.monotonic_ns.abs_diff(held.last_ns) <= SKB_NS
            && match (packet.tcp, held.sequence) {
                (Some((sequence, _, _)), Some(held)) => sequence == held,
                (None, None) => Print::of(packet) == held.print,
                _ => false,
            };
        let fits = same && self.may_be(held.journey, held.direction, tuple, sighting.monotonic_ns);
        fits.then_some(Found::Journey(held.journey, held.direction, Tie::Skb))
    }

    /// By the client's address and port, and what NAT leaves alone.
    fn by_source(&self, packet: &Packet, tuple: Tuple, now_ns: u64) -> Option<Found> {
        let to_backend = self.context.is_backend(tuple.destination.0, tuple.destination.1);
        let from_backend = self.context.is_backend(tuple.source.0, tuple.source.1);
        let carries_vip = self.context.vips.contains(&tuple.destination.0);
        let (client, far, direction) = if to_backend || carries_vip {
            (tuple.source, tuple.destination, Direction::Request)
        } else if from_backend {
            (tuple.destination, tuple.source, Direction::Reply)
        } else {
            return None;
        };
        let fits = |open: &Open| {
            let translated = if carries_vip {
                // Its translated packet came first; there is no other way to be without the VIP.
                open.vip.is_none()
            } else {
                open.vip.is_some() && open.backend.is_none_or(|backend| backend == far)
            };
            let numbers = match (packet.tcp, open.first, direction) {
                (Some((sequence, acknowledged, flags)), Some(first), direction) => {
                    let further = match direction {
                        Direction::Request => sequence.wrapping_sub(first),
                        _ => acknowledged.wrapping_sub(first.wrapping_add(1)),
                    };
                    if flags & SYN == 0 { further < 1 << 30 } else { further == 0 }
                }
                _ => true,
            };
            translated && numbers
        };
        let candidates: Vec<u64> = self
            .sources
            .get(&(tuple.protocol, client.0, client.1))
            .into_iter()
            .flatten()
            .copied()
            .filter(|id| self.open.get(id).is_some_and(fits))
            .collect();
        match candidates.as_slice() {
            [] => {}
            [one] => return Some(Found::Journey(*one, direction, Tie::Packet)),
            _ => return Some(Found::Several),
        }
        if tuple.protocol != UDP || !to_backend {
            return None;
        }
        self.by_print(packet, tuple, now_ns)
    }

    /// A UDP packet whose source the node has replaced by itself.
    fn by_print(&self, packet: &Packet, tuple: Tuple, now_ns: u64) -> Option<Found> {
        let print = Print::of(packet);
        let mut found = None;
        for (_, id) in &self.requests {
            let Some(open) = self.open.get(id).filter(|_| found != Some(*id)) else { continue };
            let (last, when_ns) = open.last_request;
            let same_port = open.source.1 == tuple.source.1;
            if open.protocol == UDP
                && open.vip.is_some()
                && open.backend.is_none_or(|backend| backend == tuple.destination)
                && last == print
                && (print.tells() || same_port)
                && now_ns.abs_diff(when_ns) <= UDP_NS
            {
                if found.is_some() {
                    return Some(Found::Several);
                }
                found = Some(*id);
            }
        }
        found.map(|id| Found::Journey(id, Direction::Request, Tie::Packet))
    }

    /// Begins a journey, if this packet can be its first.
    fn begin(&mut self, sighting: &Sighting, packet: &Packet, tuple: Tuple) -> Option<u64> {
        let carries_vip = self.context.vips.contains(&tuple.destination.0);
        let first = match Numbers::of(packet) {
            Some(Numbers::First(sequence)) => Some(sequence),
            // Nothing begins with a reset, and no answer is a first packet.
            Some(Numbers::Answer(_)) => return None,
            Some(Numbers::Other(..)) if packet.tcp.is_some_and(|tcp| tcp.2 & RST != 0) => {
                return None;
            }
            _ => None,
        };
        let may_begin = carries_vip || packet.protocol != TCP || first.is_some();
        let concerns_us = carries_vip
            || sighting.asked.is_some_and(|asked| self.context.vips.contains(&asked.0))
            || self.context.is_backend(tuple.destination.0, tuple.destination.1);
        if !may_begin || !concerns_us {
            return None;
        }
        if self.open.len() >= self.limits.journeys {
            self.make_room(sighting.monotonic_ns);
        }
        let id = self.next;
        self.next += 1;
        self.open.insert(
            id,
            Open {
                vip: None,
                asked: None,
                source: tuple.source,
                backend: None,
                protocol: packet.protocol,
                first,
                last_request: (Print::of(packet), sighting.monotonic_ns),
                steps: Vec::new(),
                steps_not_kept: 0,
                last_ns: sighting.monotonic_ns,
                answered: false,
                tuples: Vec::new(),
                numbers: Vec::new(),
                buffers: Vec::new(),
            },
        );
        self.without_vip.insert(id);
        self.sources.entry((packet.protocol, tuple.source.0, tuple.source.1)).or_default().push(id);
        if let Some(first) = first {
            self.own(id, Numbers::First(first), Direction::Request);
            self.own(id, Numbers::Answer(first.wrapping_add(1)), Direction::Reply);
        }
        Some(id)
    }

    /// Remembers by what other packets of the connection are recognised.
    fn learn(&mut self, id: u64, direction: Direction, sighting: &Sighting, tuple: Tuple) {
        let Some(packet) = &sighting.packet else { return };
        let carries_vip = self.context.vips.contains(&tuple.destination.0);
        let Some(open) = self.open.get_mut(&id) else { return };
        if let Some(asked) = sighting.asked.filter(|asked| self.context.vips.contains(&asked.0)) {
            open.asked = Some(asked);
        }
        let first = open.first;
        match direction {
            Direction::Request if carries_vip && open.vip.is_none() => {
                open.vip = Some(tuple);
                if !open.answered {
                    let pair = (tuple.source.0, tuple.destination.0);
                    self.unanswered.entry(pair).or_default().insert(id);
                }
            }
            Direction::Request if carries_vip => {}
            Direction::Request => open.backend = Some(tuple.destination),
            Direction::Reply if !self.context.vips.contains(&tuple.source.0) => {
                open.backend.get_or_insert(tuple.source);
            }
            _ => {}
        }
        if open.vip.is_some() || open.asked.is_some() {
            self.without_vip.remove(&id);
        }
        if direction == Direction::Request {
            open.last_request = (Print::of(packet), sighting.monotonic_ns);
            if packet.protocol == UDP {
                self.request(id, sighting.monotonic_ns);
            }
        }
        let (forward, back) = match direction {
            Direction::Reply => (tuple.reversed(), tuple),
            _ => (tuple, tuple.reversed()),
        };
        self.bind(id, forward, Direction::Request, first);
        self.bind(id, back, Direction::Reply, first);
        if let Some(numbers @ Numbers::Other(..)) = Numbers::of(packet) {
            self.own(id, numbers, direction);
        }
        if let Some(skb) = sighting.skb {
            let Some(open) = self.open.get_mut(&id) else { return };
            let held = InBuffer {
                journey: id,
                direction,
                last_ns: sighting.monotonic_ns,
                protocol: packet.protocol,
                sequence: packet.tcp.map(|tcp| tcp.0),
                print: Print::of(packet),
            };
            if open.buffers.contains(&skb) {
                self.buffers.insert(skb, held);
            } else if open.buffers.len() < KEYS {
                open.buffers.push(skb);
                self.buffers.insert(skb, held);
            }
        }
    }

    /// Remembers whose request over UDP was last, for as long as that says something.
    fn request(&mut self, id: u64, now_ns: u64) {
        let is_full = self.requests.len() >= self.limits.journeys;
        while let Some((when_ns, _)) = self.requests.front()
            && (is_full || now_ns.saturating_sub(*when_ns) > UDP_NS)
        {
            self.requests.pop_front();
            if is_full {
                break;
            }
        }
        self.requests.push_back((now_ns, id));
    }

    fn bind(&mut self, id: u64, tuple: Tuple, direction: Direction, first: Option<u32>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        if !open.tuples.contains(&tuple) {
            if open.tuples.len() >= KEYS {
                return;
            }
            open.tuples.push(tuple);
        }
        self.tuples.insert(tuple, Bound { journey: id, direction, first });
    }

    fn own(&mut self, id: u64, numbers: Numbers, direction: Direction) {
        let Some(open) = self.open.get_mut(&id) else { return };
        if open.numbers.contains(&numbers) {
            return;
        }
        if open.numbers.len() >= KEYS {
            return;
        }
        open.numbers.push(numbers);
        self.numbers
            .entry(numbers)
            .and_modify(|owner| {
                if !matches!(owner, Owner::One(other, _) if *other == id) {
                    *owner = Owner::Many;
                }
            })
            .or_insert(Owner::One(id, direction));
    }

    /// Adds what was seen to a journey.
    fn step(&mut self, id: u64, direction: Direction, tie: Tie, sighting: Sighting) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let now_ns = sighting.monotonic_ns;
        open.last_ns = open.last_ns.max(now_ns);
        let is_answer = match direction {
            Direction::Reply => true,
            Direction::Error => !is_redirect(&sighting),
            Direction::Request | Direction::Neighbour => false,
        };
        let vip = open.vip.filter(|_| is_answer && !open.answered);
        open.answered |= is_answer;
        let not_kept = add_step(&mut open.steps, self.limits.steps, direction, tie, sighting);
        open.steps_not_kept += not_kept;
        self.counts.steps_not_kept += not_kept;
        self.forget_unanswered(id, vip);
    }

    /// An ICMP error: it belongs to the connection whose packet it quotes.
    fn join_error(&mut self, sighting: Sighting) {
        let quoted = sighting.packet.as_ref().and_then(|packet| packet.quoted.as_deref());
        let Some((quoted, tuple)) = quoted.and_then(|one| Some((one, Tuple::of(one)?))) else {
            self.counts.unmatched += 1;
            return;
        };
        let bound = self.tuples.get(&tuple).map(|bound| bound.journey);
        let by_number = || match Numbers::of(quoted).and_then(|one| self.numbers.get(&one)) {
            Some(Owner::One(id, direction))
                if self.may_be(*id, *direction, tuple, sighting.monotonic_ns) =>
            {
                Some(*id)
            }
            _ => None,
        };
        let by_source = || match self.by_source(quoted, tuple, sighting.monotonic_ns) {
            Some(Found::Journey(id, _, _)) => Some(id),
            _ => None,
        };
        match bound.or_else(by_number).or_else(by_source) {
            Some(id) if self.open.contains_key(&id) => {
                self.step(id, Direction::Error, Tie::Packet, sighting);
            }
            Some(_) => self.counts.after += 1,
            None => self.counts.unmatched += 1,
        }
    }

    /// A neighbour, without the packet that it was looked up for.
    fn join_neighbour(&mut self, sighting: Sighting) {
        let Some(neighbour) = &sighting.neighbour else { return };
        let is_vip = self.context.vips.contains(&neighbour.address);
        let answers = sighting.detail.as_deref() == Some("reply");
        if is_vip && matches!(sighting.hook, Hook::TcIngress | Hook::TcEgress) {
            let question = self
                .questions
                .entry(sighting.ifindex)
                .or_insert_with(|| Question { ifindex: sighting.ifindex, ..Question::default() });
            match (sighting.hook, answers) {
                (Hook::TcIngress, false) => {
                    question.requests += 1;
                    return;
                }
                (Hook::TcEgress, true) => {
                    question.replies += 1;
                    return;
                }
                // Somebody else answers for it; this node asks for it.
                _ => {}
            }
        }
        if answers || sighting.hook == Hook::TcIngress {
            return;
        }
        // A question on its way out has a buffer of its own, in which another packet may have been
        // just before; what a kprobe names is the buffer of the packet that waits.
        let is_own = sighting.tier != Tier::Kprobe
            && matches!(sighting.hook, Hook::NeighSolicit | Hook::Queue | Hook::Transmit);
        if sighting.packet.is_none() && !is_own && self.in_blind_buffer(&sighting).is_some() {
            self.join_blind(sighting, Direction::Neighbour);
            return;
        }
        if self.loose.len() >= self.limits.neighbours.max(1) {
            self.loose.pop_front();
            self.counts.neighbours_not_kept += 1;
        }
        let place = self.loose.partition_point(|one| one.monotonic_ns <= sighting.monotonic_ns);
        self.loose.insert(place, sighting);
    }

    /// A route look-up of which only addresses are known: it fits one journey, or none.
    fn join_route(&mut self, sighting: Sighting) {
        let Some(flow) = &sighting.flow else { return };
        let mut found = None;
        let ids = self.unanswered.get(&(flow.source, flow.destination));
        // The newest first: most often two of them fit, if any, and the rest need no look.
        for id in ids.into_iter().flatten().rev() {
            let Some(open) = self.open.get(id) else { continue };
            let fits = (flow.protocol == 0 || flow.protocol == open.protocol)
                && sighting.monotonic_ns.abs_diff(open.last_ns) <= SKB_BLIND_NS;
            if fits {
                if found.is_some() {
                    self.counts.ambiguous += 1;
                    return;
                }
                found = Some(*id);
            }
        }
        match found {
            Some(id) => self.step(id, Direction::Request, Tie::Time, sighting),
            None => self.counts.unmatched += 1,
        }
    }

    /// The packet that was in the buffer a moment ago, if there is one.
    fn in_blind_buffer(&self, sighting: &Sighting) -> Option<InBuffer> {
        let held = self.buffers.get(&sighting.skb?)?;
        (sighting.monotonic_ns.abs_diff(held.last_ns) <= SKB_BLIND_NS
            && self.open.contains_key(&held.journey))
        .then_some(*held)
    }

    /// Something without a packet, of which only the buffer is known.
    fn join_blind(&mut self, sighting: Sighting, direction: Direction) {
        let Some(held) = self.in_blind_buffer(&sighting) else {
            self.counts.unmatched += 1;
            return;
        };
        let direction = match direction {
            Direction::Neighbour => Direction::Neighbour,
            _ => held.direction,
        };
        // The buffer is free now, and somebody else's next.
        if let (Hook::Drop, Some(skb)) = (sighting.hook, sighting.skb) {
            self.buffers.remove(&skb);
        }
        self.step(held.journey, direction, Tie::Skb, sighting);
    }

    /// Ends the journeys that are over.
    fn sweep(&mut self, now_ns: u64) {
        self.swept_ns = now_ns;
        let over: Vec<u64> = self
            .open
            .iter()
            .filter(|(_, open)| {
                let idle = now_ns.saturating_sub(open.last_ns);
                let wait =
                    if open.answered { self.limits.settle_ns } else { self.limits.patience_ns };
                idle >= wait
            })
            .map(|(id, _)| *id)
            .collect();
        for id in over {
            self.close(id, now_ns, false);
        }
    }

    /// Ends a journey before its time: one that never carried the VIP, else the oldest.
    fn make_room(&mut self, now_ns: u64) {
        let without = self.without_vip.first().copied();
        let Some(id) = without.or_else(|| self.open.keys().next().copied()) else { return };
        let answered = self.open.get(&id).is_some_and(|open| open.answered);
        self.close(id, now_ns, !answered);
    }

    fn forget_source(&mut self, id: u64, protocol: u8, source: (IpAddr, u16)) {
        let key = (protocol, source.0, source.1);
        if let Some(ids) = self.sources.get_mut(&key) {
            ids.retain(|other| *other != id);
            if ids.is_empty() {
                self.sources.remove(&key);
            }
        }
    }

    fn forget_unanswered(&mut self, id: u64, vip: Option<Tuple>) {
        let Some(vip) = vip else { return };
        let pair = (vip.source.0, vip.destination.0);
        if let Some(ids) = self.unanswered.get_mut(&pair) {
            ids.remove(&id);
            if ids.is_empty() {
                self.unanswered.remove(&pair);
            }
        }
    }

    fn close(&mut self, id: u64, now_ns: u64, cut_short: bool) {
        let Some(mut open) = self.open.remove(&id) else { return };
        self.without_vip.remove(&id);
        self.forget_source(id, open.protocol, open.source);
        self.forget_unanswered(id, open.vip);
        for numbers in &open.numbers {
            self.numbers.remove(numbers);
        }
        for skb in &open.buffers {
            if self.buffers.get(skb).is_some_and(|held| held.journey == id) {
                self.buffers.remove(skb);
            }
        }
        for tuple in &open.tuples {
            if self.tuples.get(tuple).is_some_and(|bound| bound.journey == id) {
                self.past.push_back(*tuple);
            }
        }
        while self.past.len() > self.limits.past {
            let Some(tuple) = self.past.pop_front() else { break };
            let is_past =
                self.tuples.get(&tuple).is_some_and(|one| !self.open.contains_key(&one.journey));
            if is_past {
                self.tuples.remove(&tuple);
            }
        }
        let Some(frontend) = open.vip.map(|vip| vip.destination).or(open.asked) else {
            self.counts.without_vip += 1;
            return;
        };
        if cut_short {
            self.counts.cut_short += 1;
        }
        self.add_loose(&mut open, frontend.0);
        open.steps.sort_by_key(|step| step.sighting.monotonic_ns);
        self.done.push(Journey {
            protocol: open.protocol,
            frontend,
            client: open.vip.map(|vip| vip.source),
            from_start: open.protocol != TCP || open.first.is_some(),
            steps: open.steps,
            steps_not_kept: open.steps_not_kept,
            until_ns: now_ns,
            cut_short,
        });
    }

    /// Adds the look-ups that happened meanwhile, of the VIP and of what lies on the way.
    fn add_loose(&mut self, open: &mut Open, vip: IpAddr) {
        let Some(start_ns) = open.steps.iter().map(|step| step.sighting.monotonic_ns).min() else {
            return;
        };
        // A packet that is first seen when it leaves was given to a neighbour before.
        let first = open.steps.iter().min_by_key(|step| step.sighting.monotonic_ns);
        let arrived = first.is_some_and(|step| {
            matches!(step.sighting.hook, Hook::TcIngress | Hook::Receive | Hook::ProgramEntry)
        });
        let start_ns = if arrived { start_ns } else { start_ns.saturating_sub(BEFORE_LEAVING_NS) };
        let from = self.loose.partition_point(|one| one.monotonic_ns < start_ns);
        let until = self.loose.partition_point(|one| one.monotonic_ns <= open.last_ns + SKB_NS);
        let mut room = LOOSE_PER_JOURNEY;
        for sighting in self.loose.range(from..until) {
            let address = sighting.neighbour.as_ref().map(|neighbour| neighbour.address);
            let on_the_way = address.is_some_and(|address| {
                address == vip
                    || open.source.0 == address
                    || open.backend.is_some_and(|backend| backend.0 == address)
                    || self.context.next_hops.contains(&address)
            });
            if !on_the_way {
                continue;
            }
            if room == 0 {
                open.steps_not_kept += 1;
                self.counts.steps_not_kept += 1;
                break;
            }
            let before = open.steps.len();
            // They come after everything else: some room is theirs alone.
            let most = self.limits.steps + LOOSE_PER_JOURNEY;
            add_step(&mut open.steps, most, Direction::Neighbour, Tie::Time, sighting.clone());
            room -= open.steps.len() - before;
        }
    }
}

/// Whether a neighbour is asked for on the wire.
fn is_question(sighting: &Sighting) -> bool {
    sighting.neighbour.is_some()
        && matches!(sighting.hook, Hook::TcIngress | Hook::TcEgress | Hook::NeighSolicit)
}

/// Whose packet something is.
enum Found {
    Journey(u64, Direction, Tie),
    /// One that is over.
    Past,
    /// It fits more than one.
    Several,
    Nothing,
}

/// What makes two sightings one kind of step.
fn is_alike(step: &Step, direction: Direction, tie: Tie, sighting: &Sighting) -> bool {
    // Of the flags, those that say what the packet is for; of the rest, where it comes from and goes.
    let shape = |packet: &Option<Packet>| {
        packet.as_ref().map(|packet| {
            let flags = packet.tcp.map(|tcp| tcp.2 & (SYN | RST | ACK));
            (packet.source, packet.destination, packet.ports, flags, packet.icmp)
        })
    };
    let one = &step.sighting;
    (step.direction, step.tie, one.hook, one.tier, one.ifindex)
        == (direction, tie, sighting.hook, sighting.tier, sighting.ifindex)
        && shape(&one.packet) == shape(&sighting.packet)
        && (&one.neighbour, one.mark, &one.detail, &one.flow, &one.program)
            == (
                &sighting.neighbour,
                sighting.mark,
                &sighting.detail,
                &sighting.flow,
                &sighting.program,
            )
}

/// Adds a sighting to some steps; the number of steps for which there was no room.
fn add_step(
    steps: &mut Vec<Step>,
    room: usize,
    direction: Direction,
    tie: Tie,
    sighting: Sighting,
) -> u64 {
    let now_ns = sighting.monotonic_ns;
    let alike = steps.iter().position(|step| is_alike(step, direction, tie, &sighting));
    match alike {
        Some(index) => {
            let step = &mut steps[index];
            step.times += 1;
            let first_ns = step.sighting.monotonic_ns;
            let apart = now_ns.abs_diff(step.last_ns).min(now_ns.abs_diff(first_ns));
            if apart > ATTEMPT_GAP_NS {
                step.attempts += 1;
            }
            step.last_ns = step.last_ns.max(now_ns);
            if now_ns < first_ns {
                step.sighting = sighting;
            }
            0
        }
        None if steps.len() < room => {
            steps.push(Step { direction, tie, times: 1, attempts: 1, last_ns: now_ns, sighting });
            0
        }
        None => 1,
    }
}
