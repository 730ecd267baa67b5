//! What simulated packets say: each run read on its own, then all of one frontend on one device
//! together, and weighed against what is programmed.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::{IpAddr, SocketAddr},
};

use schemars::JsonSchema;
use serde::Serialize;

use super::{Grade, Outcome, PathVerdict, Served, datapath};
use crate::{
    cilium::metrics,
    evidence::{
        Evidence, Subject, parse_hex,
        programs::HookKind,
        simulation::{Purpose, Run, Simulation},
        tables::Tables,
    },
    packet::{self, Flow, Headers, TTL},
};

/// What simulated packets of one frontend on one device came to.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct SimulatedPath {
    /// What becomes of a packet, by the simulation alone.
    pub outcome: Outcome,
    /// What was programmed, before the simulation was looked at.
    pub programmed: Outcome,
    /// Whether the two contradict each other.
    pub conflict: bool,
    /// Source of the packets.
    pub source: IpAddr,
    /// Number of packets.
    pub packets: usize,
    /// What they came to, in words, and how many of them did.
    pub results: BTreeMap<String, usize>,
    /// Part of the packets that were translated or handed to the proxy, from 0 to 1.
    pub share: f64,
    /// Details of the first packet: TTL, MAC addresses, source NAT.
    pub details: Vec<String>,
    /// The control: the same packet to an address that is no frontend.
    pub control: Control,
    /// The same packet to a port of the VIP that is no frontend, where it was run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control_port: Option<Control>,
    /// Packets from a source outside of the frontend's source ranges, where there were any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub denied: Option<Control>,
}

/// A packet that something else is expected of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Control {
    /// Source of the packet.
    pub source: IpAddr,
    /// Where it was to go.
    pub destination: SocketAddr,
    /// What it came to, in words.
    pub result: String,
    /// Whether that is what is expected.
    pub good: bool,
}

/// What was simulated in all, and what is left of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct SimulationSummary {
    /// Number of packets, controls included.
    pub packets: usize,
    /// The devices on which they were made to arrive.
    pub devices: Vec<String>,
    /// Number of entries in Cilium's maps that they caused and that were taken back.
    pub taken_back: usize,
    /// Entries that could not be taken back: map, key and why.
    pub left: Vec<String>,
    /// Devices without Ethernet header, on which the source is one that the kernel's test run can
    /// carry.
    pub without_ethernet: Vec<String>,
    /// What was not simulated, and why, a line each.
    pub not_simulated: Vec<String>,
}

impl SimulationSummary {
    pub(super) fn new(simulation: &Simulation, simulated: &Simulated) -> Self {
        let devices: BTreeSet<&str> =
            simulation.runs.iter().map(|run| run.device.as_str()).collect();
        let without: BTreeSet<&str> = simulation
            .runs
            .iter()
            .filter(|run| !run.ethernet)
            .map(|run| run.device.as_str())
            .collect();
        let left = simulation.effects.iter().filter_map(|effect| {
            let why = effect.left.as_ref()?;
            Some(format!("{} ({}), key {}: {why}", effect.map, effect.what, effect.key))
        });
        Self {
            packets: simulation.runs.len(),
            devices: devices.into_iter().map(str::to_owned).collect(),
            taken_back: simulation.effects.iter().filter(|one| one.left.is_none()).count(),
            left: left.collect(),
            without_ethernet: without.into_iter().map(str::to_owned).collect(),
            not_simulated: not_simulated(simulation, &simulated.left_out),
        }
    }
}

impl fmt::Display for SimulationSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { packets, devices, taken_back, left, without_ethernet, not_simulated: _ } = self;
        if *packets == 0 {
            return f.write_str("no packet: nothing is proved by simulation");
        }
        write!(f, "{packets} packets, controls among them, on {}; ", devices.join(", "))?;
        match taken_back {
            0 => f.write_str("they left no entry in Cilium's maps but counters and rate limits")?,
            1 => f.write_str("the entry that they left in Cilium's maps was taken back")?,
            more => {
                write!(f, "the {more} entries that they left in Cilium's maps were taken back")?;
            }
        }
        if *taken_back > 0 {
            f.write_str(", what they added to its counters and took from its rate limits was not")?;
        }
        if !left.is_empty() {
            write!(f, "; STILL THERE: {}", left.join("; "))?;
        }
        if !without_ethernet.is_empty() {
            let names = without_ethernet.join(", ");
            write!(f, "; on {names}: {}", crate::simulate::source::L3_TRICK)?;
        }
        Ok(())
    }
}

impl SimulatedPath {
    /// What the packets came to, in one line: the results, and the details of the first.
    #[must_use]
    pub fn came(&self) -> String {
        let details = self.details.join(", ");
        match (details.is_empty(), self.results.len()) {
            (true, _) => list(&self.results),
            (false, 1) => format!("{} ({details})", list(&self.results)),
            (false, _) => format!("{}; the first: {details}", list(&self.results)),
        }
    }
}

/// What was not simulated, and why, a line each.
fn not_simulated(simulation: &Simulation, left_out: &[String]) -> Vec<String> {
    let skipped = simulation.skipped.iter().map(|one| {
        let frontend = one.frontend.as_deref().unwrap_or("every frontend");
        format!("simulation of {frontend} on {}: {}", one.device, one.why)
    });
    let problems = simulation.runs.iter().filter_map(|run| {
        let problem = run.problem.as_ref()?;
        Some(format!("simulation of {} on {}: {problem}", run.frontend, run.device))
    });
    let mut lines: Vec<String> = skipped.chain(problems).chain(left_out.iter().cloned()).collect();
    lines.dedup();
    if simulation.interrupted {
        lines.push("simulation: ended by a signal before it was done".to_owned());
    }
    lines
}

/// Why a run is not what it says that it is, if so: a file may have been edited.
fn doubt(evidence: &Evidence, run: &Run) -> Option<String> {
    if run.problem.is_some() {
        return None;
    }
    let Some(first) = run.steps.first() else { return Some("no program had its turn".to_owned()) };
    let Some(packet) = parse_hex(&first.packet_in).and_then(|bytes| packet::read(&bytes)) else {
        return Some("its packet cannot be read".to_owned());
    };
    let said = Flow {
        source: run.source,
        source_port: run.source_port,
        destination: run.destination,
        destination_port: run.destination_port,
        protocol: run.protocol,
    };
    if packet.flow() != Some(said) || packet.macs.is_some() != run.ethernet {
        return Some("its packet is not the one that is told of".to_owned());
    }
    if let Subject::Vip(query) = evidence.subject {
        let to = SocketAddr::from((run.destination, run.destination_port));
        let is_vip = run.destination == query.address;
        let good = match run.purpose {
            Purpose::Client => {
                is_vip && run.frontend.split('/').next() == Some(to.to_string().as_str())
            }
            Purpose::ControlAddress => !is_vip,
            Purpose::ControlPort => is_vip,
        };
        if !good {
            return Some(format!("its packet was for {to}"));
        }
    }
    let attachments = evidence.attachments.as_ref()?;
    let attached = |program: u32| {
        attachments.hooks.iter().any(|hook| (hook.ifindex, hook.program) == (run.ifindex, program))
    };
    if let Some(step) = run.steps.iter().find(|step| !attached(step.program)) {
        return Some(format!("program {} is not attached to {}", step.program, run.device));
    }
    let name = attachments.device_name(run.ifindex);
    (name != Some(run.device.as_str()))
        .then(|| format!("interface {} is not {}", run.ifindex, run.device))
}

/// What one packet came to.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Came {
    /// It has another destination now.
    Translated(SocketAddr),
    /// It is marked for the proxy at this port.
    Proxied(u16),
    /// It was turned into an ICMP error to the client.
    Unreachable,
    /// It was turned into a reset to the client.
    Reset,
    /// It was dropped; Cilium's reason, where it left one.
    Dropped(Option<u8>),
    /// It came back as it was, for the stack.
    Untouched,
    /// Something else.
    Other(String),
}

impl fmt::Display for Came {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Translated(to) => write!(f, "translated to {to}"),
            Self::Proxied(port) => write!(f, "marked for the proxy port {port}"),
            Self::Unreachable => f.write_str("answered with ICMP unreachable"),
            Self::Reset => f.write_str("answered with a TCP reset"),
            Self::Dropped(None) => f.write_str("dropped"),
            Self::Dropped(Some(reason)) => match metrics::reason_text(*reason) {
                Some(text) => write!(f, "dropped ({reason}: {text})"),
                None => write!(f, "dropped (reason {reason})"),
            },
            Self::Untouched => f.write_str("untouched"),
            Self::Other(text) => f.write_str(text),
        }
    }
}

/// `DROP_NO_SERVICE`: no backend, or a wildcard entry.
const NO_SERVICE: u8 = 158;
/// `DROP_NOT_IN_SRC_RANGE`
const NOT_IN_SOURCE_RANGE: u8 = 177;

/// `TC_ACT_UNSPEC` (also tcx's "next"), `TC_ACT_OK` and `TC_ACT_SHOT`.
const TC_NEXT: i32 = -1;
const TC_OK: i32 = 0;
const TC_SHOT: i32 = 2;
/// `TC_ACT_REDIRECT`
const TC_REDIRECT: i32 = 7;

/// `XDP_ABORTED`, `XDP_DROP` and `XDP_PASS`.
const XDP_ABORTED: i32 = 0;
const XDP_DROP: i32 = 1;
const XDP_PASS: i32 = 2;

/// Mark of packets for the proxy, below its port.
const MARK_TO_PROXY: u32 = 0x0200;
const MARK_MASK: u32 = 0x0f00;

impl Came {
    /// Reads a run. Nothing if it was not run.
    fn read(run: &Run) -> Option<Self> {
        let last = run.steps.last()?;
        let is_xdp = last.hook.is_xdp();
        let dropped = if is_xdp {
            [XDP_ABORTED, XDP_DROP].contains(&last.returned)
        } else {
            last.returned == TC_SHOT
        };
        if dropped {
            // The reasons of drops begin at 130.
            let reason = u8::try_from(last.control_buffer[2] & 0xff).ok();
            return Some(Self::Dropped(reason.filter(|&reason| reason >= 130)));
        }
        let to_stack = if is_xdp {
            last.returned == XDP_PASS
        } else {
            [TC_NEXT, TC_OK].contains(&last.returned)
        };
        let Some(headers) = parse_hex(&last.packet_out).and_then(|bytes| packet::read(&bytes))
        else {
            return Some(Self::Other(format!(
                "turned into something that is no IP packet ({})",
                action(last.hook, last.returned)
            )));
        };
        let to_client = headers.destination == run.source;
        if to_client && headers.is_unreachable() {
            return Some(Self::Unreachable);
        }
        if to_client && headers.is_reset {
            return Some(Self::Reset);
        }
        let sent_to = (run.destination, run.destination_port);
        match headers.flow() {
            Some(flow) if (flow.destination, flow.destination_port) != sent_to => {
                return Some(Self::Translated((flow.destination, flow.destination_port).into()));
            }
            _ => {}
        }
        if last.mark & MARK_MASK == MARK_TO_PROXY && last.mark >> 16 != 0 {
            // The upper half holds the port as it is in a packet.
            let port = u16::try_from(last.mark >> 16).unwrap_or(0).swap_bytes();
            return Some(Self::Proxied(port));
        }
        let unchanged = run.steps.first().map(|step| &step.packet_in) == Some(&last.packet_out);
        Some(match (to_stack, unchanged) {
            (true, true) => Self::Untouched,
            (true, false) => Self::Other("changed, but not its destination".to_owned()),
            (false, _) => Self::Other(format!(
                "its destination kept, and {}",
                action(last.hook, last.returned)
            )),
        })
    }

    fn outcome(&self) -> Outcome {
        match self {
            Self::Translated(_) => Outcome::DnatBeforeNeigh,
            Self::Proxied(_) => Outcome::ProxiedBeforeNeigh,
            Self::Unreachable | Self::Reset | Self::Dropped(Some(NO_SERVICE)) => Outcome::NoBackend,
            Self::Dropped(Some(NOT_IN_SOURCE_RANGE)) => Outcome::Denied,
            Self::Dropped(_) => Outcome::Dropped,
            Self::Untouched => Outcome::Untranslated,
            Self::Other(_) => Outcome::Unknown,
        }
    }

    fn is_served(&self) -> bool {
        matches!(self, Self::Translated(_) | Self::Proxied(_))
    }
}

/// What a program returned, in words.
fn action(hook: HookKind, returned: i32) -> String {
    match (hook.is_xdp(), returned) {
        (false, TC_REDIRECT) | (true, 4) => "redirected".to_owned(),
        (true, 3) => "sent back out of the device".to_owned(),
        (_, other) => format!("the program returned {other}"),
    }
}

/// All runs of the evidence, by device and frontend.
#[derive(Debug, Default)]
pub(super) struct Simulated {
    runs: BTreeMap<(u32, String), Vec<Run>>,
    /// The first control of a port, by device and protocol.
    ports: BTreeMap<(u32, u8), Run>,
    /// Runs that are not what they say, a line each.
    left_out: Vec<String>,
}

/// What a simulation does to the rest of a verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Weight {
    /// Nothing more is to be said.
    Nothing,
    /// The packet is translated, which was not known: which neighbour matters is to be said.
    Translated,
    /// It is not: what the stack does is to be said.
    Untranslated,
}

impl Simulated {
    pub fn new(evidence: &Evidence) -> Self {
        let mut simulated = Self::default();
        for run in evidence.simulation.iter().flat_map(|simulation| &simulation.runs) {
            if let Some(doubt) = doubt(evidence, run) {
                simulated.left_out.push(format!(
                    "simulation of {} on {}: a run was left out, for {doubt}",
                    run.frontend, run.device
                ));
                continue;
            }
            if run.purpose == Purpose::ControlPort {
                simulated.ports.entry((run.ifindex, run.protocol)).or_insert_with(|| run.clone());
            }
            let runs = simulated.runs.entry((run.ifindex, run.frontend.clone())).or_default();
            runs.push(run.clone());
        }
        simulated
    }

    /// What the packets for a frontend came to on a device. `admits` says which sources its source
    /// ranges let through.
    pub fn path(
        &self,
        evidence: &Evidence,
        tables: &Tables,
        ifindex: u32,
        frontend: &str,
        backends: &[String],
        admits: impl Fn(IpAddr) -> bool,
    ) -> Option<Proof<'_>> {
        let runs = self.runs.get(&(ifindex, frontend.to_owned()))?;
        let of = |purpose: Purpose| runs.iter().filter(move |run| run.purpose == purpose);
        let came = of(Purpose::Client).filter_map(|run| Some((run, Came::read(run)?)));
        let (admitted, refused): (Vec<_>, Vec<_>) = came.partition(|(run, _)| admits(run.source));
        let control = |run: &Run, good: &dyn Fn(&Came) -> bool| {
            let came = Came::read(run)?;
            Some(Control {
                source: run.source,
                destination: (run.destination, run.destination_port).into(),
                good: good(&came),
                result: came.to_string(),
            })
        };
        let untouched = |came: &Came| *came == Came::Untouched;
        let controls: Vec<Control> =
            of(Purpose::ControlAddress).filter_map(|run| control(run, &untouched)).collect();
        // One that failed voids the proof, whatever the others say.
        let worst = controls.iter().find(|one| !one.good).or(controls.first()).cloned();
        let protocol = runs.first()?.protocol;
        let port = self.ports.get(&(ifindex, protocol));
        // On releases with wildcard entries the packet is dropped, before them it is left alone.
        let no_service =
            |came: &Came| matches!(came, Came::Untouched | Came::Dropped(Some(NO_SERVICE)));
        let denied = |came: &Came| matches!(came, Came::Dropped(None | Some(NOT_IN_SOURCE_RANGE)));
        let details = |run: &Run| details(evidence, tables, run);
        Some(Proof {
            shadow: datapath::device(evidence, ifindex)
                .and_then(|device| Some(device.shadowed_by()?.foreign.clone())),
            stranger: admitted.iter().find_map(|(_, came)| match came {
                Came::Translated(to) => {
                    let to = to.to_string();
                    // `10.77.1.65:8443/TCP`; without a protocol before 1.17.
                    let known =
                        backends.iter().any(|one| one.split('/').next() == Some(to.as_str()));
                    (!known).then_some(to)
                }
                _ => None,
            }),
            details: admitted
                .iter()
                .find(|(_, came)| came.is_served())
                .map(|(run, _)| details(run))
                .unwrap_or_default(),
            admitted,
            denied: refused.first().and_then(|(run, _)| control(run, &denied)),
            control: worst,
            control_port: port.and_then(|run| control(run, &no_service)),
        })
    }
}

/// What can be said of the first packet beside its destination.
fn details(evidence: &Evidence, tables: &Tables, run: &Run) -> Vec<String> {
    let mut details = Vec::new();
    let headers = run.steps.last().and_then(|step| packet::read(&parse_hex(&step.packet_out)?));
    let Some(headers @ Headers { source, destination, ttl, macs, .. }) = headers else {
        return details;
    };
    if destination == run.destination || destination == run.source {
        return details;
    }
    if source != run.source {
        details.push(format!("source NAT to {source}"));
    }
    if ttl != TTL {
        details.push(format!("TTL {ttl} of {TTL}"));
    }
    if let (Some(macs), Some(_)) = (macs, headers.flow()) {
        let to = macs.destination;
        let entry = evidence
            .network
            .iter()
            .flat_map(|network| &network.neighbours)
            .find(|one| one.mac.as_ref().is_some_and(|mac| mac.parse() == Ok(to)));
        let before = run.steps.first().and_then(|step| packet::read(&parse_hex(&step.packet_in)?));
        let unchanged = before.and_then(|one| one.macs) == Some(macs);
        let pod = tables.endpoints.get(&destination).filter(|pod| pod.mac == to);
        if pod.is_some() {
            details.push(format!("MAC {to} of the pod, from the endpoint map"));
        } else if let Some(entry) = entry {
            details.push(format!("MAC {to} of the neighbour entry of {}", entry.address));
        } else if !unchanged && !to.is_zero() {
            details.push(format!("MAC {to}"));
        } else {
            details.push("MAC left to the neighbour look-up for the next hop".to_owned());
        }
    }
    details
}

/// What the runs of one frontend on one device prove.
#[derive(Debug)]
pub(super) struct Proof<'r> {
    admitted: Vec<(&'r Run, Came)>,
    denied: Option<Control>,
    control: Option<Control>,
    control_port: Option<Control>,
    details: Vec<String>,
    /// Where a packet went that is no backend of the frontend.
    stranger: Option<String>,
    /// Something foreign that a packet may meet before Cilium's program.
    shadow: Option<String>,
}

impl Proof<'_> {
    /// Weighs the proof against what is programmed, and writes into the verdict what comes of it.
    pub fn weigh(self, verdict: &mut PathVerdict) -> Weight {
        let Some(control) = self.control.clone() else {
            verdict.why.push("simulated, but without a control: no proof".to_owned());
            return Weight::Nothing;
        };
        let programmed = verdict.outcome;
        let Some((first, first_came)) = self.admitted.first().cloned() else {
            return self.denied_alone(verdict, control, programmed);
        };
        let served = self.admitted.iter().filter(|(_, came)| came.is_served()).count();
        let packets = self.admitted.len();
        // What serves some clients is what becomes of a packet; the rest is its share.
        let decisive = self.admitted.iter().find(|(_, came)| came.is_served());
        let came = decisive.map_or(first_came, |(_, came)| came.clone());
        let mut results = BTreeMap::new();
        for (_, came) in &self.admitted {
            *results.entry(came.to_string()).or_insert(0) += 1;
        }
        #[allow(clippy::cast_precision_loss, reason = "at most some thousand packets")]
        let share = served as f64 / packets as f64;
        let mut simulated = SimulatedPath {
            outcome: came.outcome(),
            programmed,
            conflict: false,
            source: first.source,
            packets,
            results,
            share,
            details: self.details,
            control,
            control_port: self.control_port,
            denied: self.denied,
        };
        let weight = if simulated.control.good {
            if let Some(stranger) = &self.stranger {
                simulated.conflict = true;
                verdict.why.push(format!(
                    "a simulated packet went to {stranger}, which is none of the frontend's backends"
                ));
            }
            settle(verdict, &mut simulated, &came, self.shadow.as_deref())
        } else {
            void(verdict, &simulated);
            Weight::Nothing
        };
        verdict.simulated = Some(simulated);
        weight
    }

    /// Every packet came from outside of the source ranges.
    fn denied_alone(
        self,
        verdict: &mut PathVerdict,
        control: Control,
        programmed: Outcome,
    ) -> Weight {
        let Some(denied) = self.denied else { return Weight::Nothing };
        let mut simulated = SimulatedPath {
            outcome: if denied.good { Outcome::Denied } else { Outcome::Unknown },
            programmed,
            conflict: !denied.good,
            source: denied.source,
            packets: 1,
            results: BTreeMap::from([(denied.result.clone(), 1)]),
            share: 0.0,
            details: Vec::new(),
            control,
            control_port: self.control_port,
            denied: Some(denied),
        };
        if !simulated.control.good {
            simulated.conflict = false;
            void(verdict, &simulated);
        } else if simulated.conflict {
            verdict.why.push(line(&simulated));
        } else if programmed == Outcome::Denied {
            verdict.grade = Grade::Simulated;
        }
        // Else it says nothing of the clients that are let through.
        verdict.simulated = Some(simulated);
        Weight::Nothing
    }
}

/// The control failed: nothing is proved, and the program does not do what is known of it.
fn void(verdict: &mut PathVerdict, simulated: &SimulatedPath) {
    let Control { source, destination, result, .. } = &simulated.control;
    let results = list(&simulated.results);
    verdict.why.push(format!(
        "the simulation proves nothing, for its control failed: {source} to {destination}, which \
         is no frontend, was {result}; the packet for the frontend was {results}"
    ));
    verdict.outcome = Outcome::Unknown;
    verdict.served = Served::Unknown;
    verdict.share = None;
    verdict.neighbour = None;
}

/// Lets the better proof stand.
fn settle(
    verdict: &mut PathVerdict,
    simulated: &mut SimulatedPath,
    came: &Came,
    shadow: Option<&str>,
) -> Weight {
    let programmed = simulated.programmed;
    let seen = simulated.outcome;
    if let Some(denied) = &simulated.denied
        && !denied.good
    {
        simulated.conflict = true;
        verdict.why.push(format!(
            "{} is outside of the source ranges, and was {}",
            denied.source, denied.result
        ));
    }
    if let Some(shadow) = shadow {
        verdict.why.push(format!(
            "the simulation ran Cilium's program alone, without {shadow} in front of it"
        ));
        return Weight::Nothing;
    }
    if seen == Outcome::Unknown {
        verdict.why.push(line(simulated));
        return Weight::Nothing;
    }
    if agrees(programmed, came) {
        verdict.grade = Grade::Simulated;
        // Some are lost where all were to be served.
        if simulated.share < 1.0 && came.is_served() && verdict.share.is_none() {
            simulated.conflict = true;
            verdict.why.push(line(simulated));
            verdict.share = Some(simulated.share);
            if verdict.served == Served::Yes {
                verdict.served = Served::Partly;
            }
        }
        return Weight::Nothing;
    }
    simulated.conflict |= programmed != Outcome::Unknown;
    verdict.why.push(line(simulated));
    verdict.grade = Grade::Simulated;
    verdict.outcome = seen;
    let lost = simulated.share < 1.0;
    match seen {
        Outcome::DnatBeforeNeigh => {
            verdict.share = lost.then_some(simulated.share);
            // Where nothing was known before, nothing is known of the way back either.
            if programmed != Outcome::Unknown {
                verdict.served = if lost { Served::Partly } else { Served::Yes };
            }
            Weight::Translated
        }
        Outcome::ProxiedBeforeNeigh => {
            verdict.served = Served::Unknown;
            verdict.why.push("whether the proxy answers is not known".to_owned());
            verdict.neighbour = Some("none: handed to the local proxy".to_owned());
            Weight::Nothing
        }
        Outcome::Untranslated => Weight::Untranslated,
        _ => {
            verdict.share = None;
            verdict.served = Served::No;
            verdict.neighbour = Some("none: it ends in BPF".to_owned());
            Weight::Nothing
        }
    }
}

/// Whether a packet came to what is programmed.
fn agrees(programmed: Outcome, came: &Came) -> bool {
    match came {
        // Without a reason it can be any of these.
        Came::Dropped(None) => {
            matches!(programmed, Outcome::NoBackend | Outcome::Denied | Outcome::Dropped)
        }
        // The reason of wildcard entries as well.
        Came::Dropped(Some(NO_SERVICE)) => {
            matches!(programmed, Outcome::NoBackend | Outcome::Dropped)
        }
        came => came.outcome() == programmed,
    }
}

/// `translated to 10.77.1.65:8443 (14), translated to 10.77.1.128:8443 (18)`
fn list(results: &BTreeMap<String, usize>) -> String {
    if let (1, Some(only)) = (results.len(), results.keys().next()) {
        return only.clone();
    }
    let parts: Vec<String> =
        results.iter().map(|(result, count)| format!("{result} ({count})")).collect();
    parts.join(", ")
}

/// What was simulated, in one sentence, its control with it.
fn line(simulated: &SimulatedPath) -> String {
    let SimulatedPath { source, packets, control, .. } = simulated;
    let number = if *packets == 1 { "1 packet".to_owned() } else { format!("{packets} packets") };
    format!(
        "simulated: {number} from {source}: {}; control to {}: {}",
        simulated.came(),
        control.destination,
        control.result
    )
}
