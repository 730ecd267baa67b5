//! What injected packets prove: each with its control, judged from what the hooks saw as any other
//! connection is.

use std::{collections::BTreeSet, fmt, net::SocketAddr};

use schemars::JsonSchema;
use serde::Serialize;

use super::{
    Finding, FindingId, Grade, Outcome, PathVerdict, Served,
    journey::{self, Answer, Conclusion},
    observed::{self, TierSummary},
    programmed::Programmed,
};
use crate::{
    evidence::{
        Evidence, VipQuery,
        injection::{Injection, Probe, Shot},
    },
    trace::{
        journey::{Context, Direction, Journey},
        sighting::Hook,
    },
};

/// What an injected packet for one frontend on one device came to.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct InjectedPath {
    /// What was derived before, and how well: the better of what is programmed and simulated.
    pub derived: Outcome,
    /// How well that was known.
    pub derived_grade: Grade,
    /// What was seen to become of the packet.
    pub outcome: Outcome,
    /// Whether the two contradict each other.
    pub conflict: bool,
    /// Whether it is a proof: it was followed, and its control shows that it tells something.
    pub proves: bool,
    /// Why it is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why_not: Option<String>,
    /// Source of the packet.
    pub source: SocketAddr,
    /// To whom the answer went, in words.
    pub answer_to: String,
    /// What it did not pass, though a client's packet does.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub passed_by: Vec<String>,
    /// What the hooks saw of it; nothing if they saw nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub conclusion: Option<Conclusion>,
    /// Whether the connection was reset afterwards, so that nothing half open stays at the backend.
    pub reset: bool,
    /// The control: the same packet to an address that is no frontend.
    pub control: InjectedControl,
}

/// The same packet to an address that is no frontend.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct InjectedControl {
    /// Where it was to go.
    pub destination: SocketAddr,
    /// Whether it came to what is expected: it was seen to arrive, and was not translated.
    pub good: bool,
    /// What it came to, in words.
    pub result: String,
    /// What the hooks saw of it; nothing if they saw nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub conclusion: Option<Conclusion>,
}

/// What was injected in all, and what is left of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct InjectionSummary {
    /// Number of packets that arrived, controls not counted.
    pub packets: usize,
    /// The devices on which they arrived.
    pub devices: Vec<String>,
    /// Number of entries in Cilium's maps that they caused and that were taken back.
    pub taken_back: usize,
    /// What was removed from the kernel's own tables.
    pub removed: Vec<String>,
    /// What could not be taken back, and why.
    pub left: Vec<String>,
    /// Number of connections that were reset, for a backend had accepted them or may have.
    pub reset: usize,
    /// Kinds of observers, and what each could not do.
    pub tiers: Vec<TierSummary>,
    /// What was not injected, and why, a line each.
    pub not_injected: Vec<String>,
}

impl InjectionSummary {
    fn new(injection: &Injection, doubts: Vec<String>) -> Self {
        let arrived = |shot: &Shot| shot.sent_ns.is_some() && shot.problem.is_none();
        let sent: Vec<&Probe> =
            injection.probes.iter().filter(|probe| arrived(&probe.client)).collect();
        let devices: BTreeSet<&str> = sent.iter().map(|probe| probe.device.as_str()).collect();
        let left = injection.effects.iter().filter_map(|effect| {
            let why = effect.left.as_ref()?;
            Some(format!("{} ({}), key {}: {why}", effect.map, effect.what, effect.key))
        });
        let stays = injection
            .kernel
            .iter()
            .filter_map(|one| Some(format!("{}: {}", one.what, one.left.as_ref()?)));
        let shots = injection.probes.iter().flat_map(|probe| [&probe.client, &probe.control]);
        Self {
            packets: sent.len(),
            devices: devices.into_iter().map(str::to_owned).collect(),
            taken_back: injection.effects.iter().filter(|one| one.left.is_none()).count(),
            removed: injection
                .kernel
                .iter()
                .filter(|one| one.left.is_none())
                .map(|one| one.what.clone())
                .collect(),
            left: left.chain(stays).collect(),
            reset: shots.filter(|shot| shot.reset).count(),
            tiers: observed::tiers(&injection.watched),
            not_injected: not_injected(injection, doubts),
        }
    }
}

impl fmt::Display for InjectionSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { packets, devices, taken_back, removed, left, reset, tiers: _, not_injected: _ } =
            self;
        match packets {
            0 => return f.write_str("no packet: nothing is proved by injection"),
            1 => f.write_str("1 packet")?,
            more => write!(f, "{more} packets")?,
        }
        let each = if *packets == 1 { "" } else { "each " };
        write!(f, " on {}, {each}with its control", devices.join(", "))?;
        match reset {
            0 => {}
            1 => f.write_str("; 1 connection was reset afterwards")?,
            more => write!(f, "; {more} connections were reset afterwards")?,
        }
        match taken_back {
            0 => f.write_str("; they left no entry in Cilium's maps but counters")?,
            1 => f.write_str("; the entry that they left in Cilium's maps was taken back")?,
            more => {
                write!(f, "; the {more} entries that they left in Cilium's maps were taken back")?;
            }
        }
        if !removed.is_empty() {
            write!(f, "; removed: {}", removed.join(", "))?;
        }
        if !left.is_empty() {
            write!(f, "; STILL THERE: {}", left.join("; "))?;
        }
        Ok(())
    }
}

/// What was not injected, and why, a line each.
fn not_injected(injection: &Injection, doubts: Vec<String>) -> Vec<String> {
    let skipped = injection.skipped.iter().map(|one| {
        let frontend = one.frontend.as_deref().unwrap_or("every frontend");
        format!("injection of {frontend} on {}: {}", one.device, one.why)
    });
    let problems = injection.probes.iter().filter_map(|probe| {
        let problem = probe.client.problem.as_ref().or(probe.control.problem.as_ref())?;
        Some(format!("injection of {} on {}: {problem}", probe.frontend, probe.device))
    });
    let mut lines: Vec<String> = skipped.chain(problems).chain(doubts).collect();
    lines.dedup();
    if injection.interrupted {
        lines.push("injection: ended by a signal before it was done".to_owned());
    }
    lines.extend(injection.stopped.iter().map(|why| format!("injection: not done, for {why}")));
    lines
}

impl InjectedPath {
    /// What the packet came to, in one line.
    #[must_use]
    pub fn came(&self) -> String {
        match (&self.conclusion, &self.why_not) {
            (Some(one), _) => one.to_string(),
            (None, Some(why)) => why.clone(),
            (None, None) => "nothing was seen of it".to_owned(),
        }
    }
}

/// Raises the grade of paths on which packets were injected, and says what was found.
pub(super) fn apply(
    evidence: &Evidence,
    query: &VipQuery,
    programmed: &Programmed,
    paths: &mut [PathVerdict],
) -> Option<(InjectionSummary, Vec<Finding>)> {
    let injection = evidence.injection.as_ref()?;
    let mut context = journey::context(evidence, query);
    context.vips.extend(injection.probes.iter().map(|probe| probe.control.destination));
    let mut findings = Vec::new();
    let mut doubts = Vec::new();
    let mut conclusions = Vec::new();
    for probe in &injection.probes {
        if let Some(doubt) = doubt(probe, query) {
            let (frontend, device) = (&probe.frontend, &probe.device);
            doubts.push(format!("injection of {frontend} on {device}: left out, for {doubt}"));
            continue;
        }
        let of = |path: &&mut PathVerdict| {
            path.frontend == probe.frontend
                && path.device.as_deref() == Some(probe.device.as_str())
                && path.path.starts_with("forwarded via")
        };
        let Some(path) = paths.iter_mut().find(of) else { continue };
        let injected = weigh(probe, injection, &context, programmed, path, &mut findings);
        conclusions.extend(injected.conclusion.clone().filter(|_| injected.proves));
        path.injected = Some(injected);
    }
    let frontends: BTreeSet<&str> = paths.iter().map(|path| path.frontend.as_str()).collect();
    for frontend in frontends {
        observed::backends_of(frontend, &conclusions, &injection.watched, paths, &mut findings);
    }
    observed::events_lost(&injection.watched, &mut findings);
    Some((InjectionSummary::new(injection, doubts), findings))
}

/// Why a packet is not what it says that it is, if so: a file may have been edited.
fn doubt(probe: &Probe, query: &VipQuery) -> Option<String> {
    let to = probe.client.to();
    if probe.client.destination != query.address
        || probe.frontend.split('/').next() != Some(to.to_string().as_str())
    {
        return Some(format!("its packet was for {to}"));
    }
    if probe.control.destination == query.address {
        return Some("its control was for the VIP".to_owned());
    }
    [&probe.client, &probe.control]
        .into_iter()
        .filter_map(|shot| Some((shot, shot.journey.as_ref()?)))
        .any(|(shot, journey)| !shot.is(journey))
        .then(|| "what was seen is another packet's way".to_owned())
}

/// What one packet and its control prove of a path.
fn weigh(
    probe: &Probe,
    injection: &Injection,
    context: &Context,
    programmed: &Programmed,
    path: &mut PathVerdict,
    findings: &mut Vec<Finding>,
) -> InjectedPath {
    let conclude = |shot: &Shot| {
        let journey = shot.journey.as_ref()?;
        Some(conclusion(journey, context, injection))
    };
    let control = control(probe, conclude(&probe.control));
    let seen = conclude(&probe.client);
    let mut injected = InjectedPath {
        derived: path.outcome,
        derived_grade: path.grade,
        outcome: seen.as_ref().map_or(Outcome::Unknown, |one| one.outcome),
        conflict: false,
        proves: false,
        why_not: None,
        source: probe.client.from(),
        answer_to: probe.answer_to.clone(),
        passed_by: probe.passed_by.clone(),
        conclusion: seen.clone(),
        reset: probe.client.reset,
        control,
    };
    let why_not = match &seen {
        _ if probe.client.sent_ns.is_none() && probe.client.problem.is_none() => {
            Some("it was not sent".to_owned())
        }
        _ if probe.client.problem.is_some() => probe.client.problem.clone(),
        None => Some("no hook saw it arrive".to_owned()),
        Some(_) if !injected.control.good => Some(format!(
            "its control failed: the same packet to {}, which is no frontend: {}",
            injected.control.destination, injected.control.result
        )),
        Some(one) if !observed::is_on(one, path) => {
            Some(format!("it was seen on another path: {}", one.path))
        }
        Some(_) => None,
    };
    if let Some(why) = why_not {
        path.why.push(format!("injected, but it proves nothing: {why}"));
        injected.why_not = Some(why);
        return injected;
    }
    let Some(one) = seen else { return injected };
    injected.proves = true;
    let before = path.served;
    injected.conflict = observed::raise_by_one(path, &one, findings);
    one_of_several(path, before, &one, programmed);
    if let Some(last) = path.why.last_mut() {
        let InjectedControl { destination, result, .. } = &injected.control;
        *last = format!("{last}; control to {destination}: {result}");
    }
    if matches!(one.answer, Answer::Answered { as_vip: false, .. }) && !injected.conflict {
        // Whether the client is served is then known no better than before.
        path.grade = injected.derived_grade;
        path.why
            .push("the answer was not seen to leave as the VIP: the way back is no proof".into());
    }
    injected
}

/// One packet asks one backend: what it refuses, others may serve.
fn one_of_several(
    path: &mut PathVerdict,
    before: Served,
    one: &Conclusion,
    programmed: &Programmed,
) {
    let frontends = programmed.frontends.iter();
    let of = frontends.filter(|one| one.frontend.trim_end_matches("/i") == path.frontend);
    let backends: BTreeSet<&str> = of
        .flat_map(|one| &one.backends)
        .filter(|backend| backend.selectable)
        .filter_map(|backend| backend.address.as_deref())
        .collect();
    let asked = one.translation.is_some()
        && matches!(
            one.answer,
            Answer::Refused { .. } | Answer::Silent { .. } | Answer::Unreachable { .. }
        );
    if asked && backends.len() > 1 && path.served == Served::No && before != Served::No {
        path.served = Served::Partly;
        path.share = None;
        path.why.push(format!("one of {} backends was asked", backends.len()));
    }
}

/// What a journey of nobody's proves. That the answer left is all that can be: what happens to it
/// behind the device (no WireGuard peer, nobody at the MAC address) is not the VIP's concern.
fn conclusion(journey: &Journey, context: &Context, injection: &Injection) -> Conclusion {
    let mut one = journey::conclude(journey, context, &injection.watched);
    let leaves = journey.steps.iter().any(|step| {
        let packet = step.sighting.packet.as_ref();
        step.direction == Direction::Reply
            && matches!(step.sighting.hook, Hook::TcEgress | Hook::Queue | Hook::Transmit)
            && packet.is_some_and(|packet| {
                let ports = packet.ports.unwrap_or_default();
                (packet.source, ports.0) == journey.frontend
                    && Some((packet.destination, ports.1)) == journey.client
            })
    });
    if let Answer::Answered { as_vip, .. } = &mut one.answer
        && leaves
    {
        *as_vip = true;
        one.served = Served::Yes;
    }
    one
}

fn control(probe: &Probe, conclusion: Option<Conclusion>) -> InjectedControl {
    let shot = &probe.control;
    let (good, result) = match (&shot.problem, &conclusion) {
        (Some(problem), _) => (false, format!("it did not arrive: {problem}")),
        (None, None) if shot.sent_ns.is_none() => (false, "it was not sent".to_owned()),
        (None, None) => (false, "no hook saw it arrive".to_owned()),
        (None, Some(one)) => {
            let touched = one.translation.is_some()
                || one.proxy_port.is_some()
                || !matches!(one.outcome, Outcome::Untranslated | Outcome::Dropped);
            let looked_up: BTreeSet<String> = one
                .lookups
                .iter()
                .map(|lookup| match &lookup.device {
                    Some(device) => format!("{} on {device}", lookup.address),
                    None => lookup.address.to_string(),
                })
                .collect();
            let looked_up: Vec<String> = looked_up.into_iter().collect();
            let mut result = match &one.translation {
                Some(to) => format!("translated to {}", to.backend),
                None if one.outcome == Outcome::Unknown => {
                    format!("what became of it cannot be told: {}", one.why)
                }
                None if touched => format!("{}: {}", one.outcome, one.why),
                // Where it went, in the words for a VIP.
                None => {
                    let why = one.why.replace("the VIP", &shot.destination.to_string());
                    format!("not translated: {why}")
                }
            };
            if !looked_up.is_empty() {
                result = format!("{result}; looked up as a neighbour: {}", looked_up.join(", "));
            }
            (!touched, result)
        }
    };
    InjectedControl { destination: shot.to(), good, result, conclusion }
}

/// Takes back what no longer holds once packets were injected: that no backend was tried.
pub(super) fn outdated(finding: &Finding, paths: &[PathVerdict]) -> bool {
    let tried = |frontend: &str| {
        paths.iter().filter(|path| path.frontend == frontend).any(|path| {
            let injected = path.injected.as_ref().filter(|one| one.proves);
            injected.and_then(|one| one.conclusion.as_ref()).is_some_and(observed::tried_backend)
        })
    };
    finding.id == FindingId::BackendNotProbed && paths.iter().all(|path| tried(&path.frontend))
}
