//! What real packets prove of the paths: grades are raised, or contradicted.
//!
//! No journey on a path proves nothing about it: what is programmed stands, and is said to be not
//! observed.

use std::collections::{BTreeMap, BTreeSet};

use schemars::JsonSchema;
use serde::Serialize;

use super::{
    Finding, FindingId, Grade, Outcome, PathVerdict, Served,
    journey::{self, Answer, Conclusion, SeenPath, VipLookups, duration},
    programmed::Programmed,
};
use crate::evidence::{
    Evidence, VipQuery,
    trace::{HookCount, Stopped, TierUse, Trace, Watched},
};
use crate::trace::journey::Context;
use crate::trace::sighting::{Hook, Tier};

/// What was observed of real packets.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct Observation {
    /// For how long, nanoseconds.
    pub window_ns: u64,
    /// What ended it.
    pub stopped: Stopped,
    /// Number of connections.
    pub journeys: u64,
    /// What they came to, by frontend and path.
    pub counts: Vec<PathCount>,
    /// Kinds of observers, and what each could not do.
    pub tiers: Vec<TierSummary>,
    /// What was lost, by hook.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<HookCount>,
    /// Paths on which nothing came, and what is needed to observe them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub not_observed: Vec<String>,
    /// Connections to backends whose packets never carried the VIP.
    pub without_vip: u64,
    /// What each of the journeys that are kept proves.
    pub conclusions: Vec<Conclusion>,
}

/// How many connections came to the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct PathCount {
    /// The frontend.
    pub frontend: String,
    /// The path.
    pub path: String,
    /// What became of them.
    pub outcome: Outcome,
    /// Whether the clients were served.
    pub served: Served,
    /// How many.
    pub journeys: u64,
}

/// One kind of observers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct TierSummary {
    /// Which.
    pub tier: Tier,
    /// Whether it was used.
    pub used: bool,
    /// Why not, or what of it was missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// A conclusion, and how many connections came to the same.
struct Weighed {
    conclusion: Conclusion,
    times: u64,
}

/// Raises the grade of paths that were observed, and says what was found.
pub(super) fn apply(
    evidence: &Evidence,
    query: &VipQuery,
    programmed: &Programmed,
    paths: &mut [PathVerdict],
) -> Option<(Observation, Vec<Finding>)> {
    let trace = evidence.trace.as_ref()?;
    let context = journey::context(evidence, query);
    let weighed = weigh(trace, &context);
    let mut findings = Vec::new();
    let mut not_observed: Vec<String> = Vec::new();
    for path in paths.iter_mut() {
        let here: Vec<&Weighed> =
            weighed.iter().filter(|one| is_on(&one.conclusion, path)).collect();
        if here.is_empty() {
            let text = format!("{} on {}", path.path, port(&path.frontend));
            not_observed.push(text);
        } else {
            raise(path, &here, How::Observed, &mut findings);
        }
    }
    let frontends: BTreeSet<&str> = paths.iter().map(|path| path.frontend.as_str()).collect();
    for frontend in frontends {
        let here: Vec<&Weighed> =
            weighed.iter().filter(|one| is_of(&one.conclusion, frontend)).collect();
        backends(frontend, &here, &trace.watched, &mut findings);
        handed_on(frontend, &here, &trace.watched, paths, &mut findings);
    }
    events_lost(&trace.watched, &mut findings);
    announcement(trace, query, programmed, &context, &mut findings);
    let journeys = weighed.iter().map(|one| one.times).sum::<u64>() + trace.not_kept;
    let observation = Observation {
        window_ns: trace.ended_ns.saturating_sub(trace.watched.started_ns),
        stopped: trace.stopped,
        journeys,
        counts: counts(&weighed),
        tiers: tiers(&trace.watched),
        lost: trace.watched.counts.iter().filter(|count| count.lost > 0).copied().collect(),
        not_observed: needed(evidence, not_observed, &weighed),
        without_vip: trace.watched.joined.without_vip,
        conclusions: weighed.into_iter().map(|one| one.conclusion).collect(),
    };
    Some((observation, findings))
}

/// Kinds of observers, and what each could not do.
pub(super) fn tiers(watched: &Watched) -> Vec<TierSummary> {
    let summary = |tier: &TierUse| TierSummary {
        tier: tier.tier,
        used: !tier.hooks.is_empty() || !tier.attached.is_empty(),
        reason: tier.reason.clone().or_else(|| {
            let missing: Vec<String> =
                tier.missing.iter().map(|(what, why)| format!("{what}: {why}")).collect();
            (!missing.is_empty()).then(|| missing.join("; "))
        }),
    };
    watched.tiers.iter().map(summary).collect()
}

/// The conclusions, judged again from what was seen, and how many connections each stands for.
fn weigh(trace: &Trace, context: &Context) -> Vec<Weighed> {
    let mut weighed: Vec<Weighed> = trace
        .journeys
        .iter()
        .map(|journey| Weighed {
            conclusion: journey::conclude(journey, context, &trace.watched),
            times: 1,
        })
        .collect();
    for more in &trace.more {
        if let Some(one) = weighed.get_mut(more.like) {
            one.times = one.times.saturating_add(more.times);
        }
    }
    weighed
}

/// `443/TCP` of `192.168.2.20:443/TCP`.
fn port(frontend: &str) -> &str {
    frontend.rsplit(':').next().unwrap_or(frontend)
}

/// Whether a journey is about a frontend; names before Cilium 1.17 have no protocol.
fn is_of(conclusion: &Conclusion, frontend: &str) -> bool {
    let seen = conclusion.frontend.as_str();
    seen == frontend || seen.split_once('/').is_some_and(|(seen, _)| seen == frontend)
}

pub(super) fn is_on(conclusion: &Conclusion, path: &PathVerdict) -> bool {
    is_of(conclusion, &path.frontend) && conclusion.path.to_string() == path.path
}

/// Whether what was seen is what was derived. From a drop alone it cannot be told for what reason
/// Cilium drops, and the maps tell.
fn agree(derived: Outcome, seen: Outcome) -> bool {
    derived == seen
        || seen == Outcome::Dropped && matches!(derived, Outcome::Denied | Outcome::NoBackend)
}

fn number(weighed: &[&Weighed], is: impl Fn(&Conclusion) -> bool) -> u64 {
    weighed.iter().filter(|one| is(&one.conclusion)).map(|one| one.times).sum()
}

/// Whose packets they were.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    /// Clients' own.
    Observed,
    /// Made here.
    Injected,
}

impl How {
    fn word(self) -> &'static str {
        match self {
            Self::Observed => "observed",
            Self::Injected => "injected",
        }
    }

    fn noun(self) -> &'static str {
        match self {
            Self::Observed => "journeys",
            Self::Injected => "packets",
        }
    }
}

/// What one injected packet says of its path; whether it contradicts what was derived.
pub(super) fn raise_by_one(
    path: &mut PathVerdict,
    conclusion: &Conclusion,
    findings: &mut Vec<Finding>,
) -> bool {
    let before = findings.len();
    let one = Weighed { conclusion: conclusion.clone(), times: 1 };
    raise(path, &[&one], How::Injected, findings);
    findings.len() > before
}

/// What was found of backends by packets that were injected for one frontend.
pub(super) fn backends_of(
    frontend: &str,
    conclusions: &[Conclusion],
    watched: &Watched,
    paths: &[PathVerdict],
    findings: &mut Vec<Finding>,
) {
    let weighed: Vec<Weighed> = conclusions
        .iter()
        .filter(|one| is_of(one, frontend))
        .map(|one| Weighed { conclusion: one.clone(), times: 1 })
        .collect();
    let here: Vec<&Weighed> = weighed.iter().collect();
    backends(frontend, &here, watched, findings);
    handed_on(frontend, &here, watched, paths, findings);
}

/// What journeys on a path say of it.
fn raise(path: &mut PathVerdict, here: &[&Weighed], how: How, findings: &mut Vec<Finding>) {
    let all = number(here, |_| true);
    let unknown = number(here, |one| one.outcome == Outcome::Unknown);
    let derived = path.outcome;
    let mut seen: BTreeMap<&str, (Outcome, u64)> = BTreeMap::new();
    for one in here.iter().filter(|one| one.conclusion.outcome != Outcome::Unknown) {
        let outcome = one.conclusion.outcome;
        seen.entry(outcome.as_str()).or_insert((outcome, 0)).1 += one.times;
    }
    let against: Vec<(Outcome, u64)> = seen
        .values()
        .copied()
        .filter(|(outcome, _)| derived != Outcome::Unknown && !agree(derived, *outcome))
        .collect();
    let texts: Vec<String> =
        seen.values().map(|(outcome, times)| text(*outcome, *times, all, how, here)).collect();
    let served = served(path, here);
    let contradicts_served = path.outcome != Outcome::Unknown
        && path.served == Served::No
        && served == Some(Served::Yes);
    if !against.is_empty() || contradicts_served {
        let example = here.iter().find(|one| {
            against.iter().any(|(outcome, _)| *outcome == one.conclusion.outcome)
                || contradicts_served
        });
        let example = example.map(|one| &one.conclusion);
        findings.push(conflict(path, all, &against, how, example));
    }
    match (seen.len(), unknown) {
        (0, unknown) => {
            let why = here.first().map_or("", |one| one.conclusion.why.as_str());
            path.why.push(format!(
                "{}: {unknown} of {all} {}, whose outcome cannot be told ({why})",
                how.word(),
                how.noun()
            ));
            // That the client got its answer, or none, is seen all the same.
            let tells = |seen: &Served| path.served == Served::Unknown || *seen == Served::No;
            if let Some(served) = served.filter(tells) {
                path.served = served;
                path.share = None;
            }
            return;
        }
        (1, _) => {
            // A reason that the maps tell stays.
            if let Some((outcome, _)) = seen.values().next()
                && !agree(derived, *outcome)
            {
                path.outcome = *outcome;
                path.neighbour = Some(neighbour(*outcome, here));
                if derived != Outcome::Unknown {
                    // What was derived of another outcome says nothing of this one.
                    path.served = Served::Unknown;
                    path.share = None;
                }
            }
            path.grade = path.grade.max(Grade::Observed);
        }
        _ if against.is_empty() && derived != Outcome::Unknown => {
            path.grade = path.grade.max(Grade::Observed);
        }
        // Sometimes one thing, sometimes another.
        _ => path.outcome = Outcome::Unknown,
    }
    path.why.push(format!("{}: {}", how.word(), texts.join(", ")));
    if let Some(served) = served {
        path.served = served;
        let (yes, no) = tally(here);
        path.share = match served {
            #[allow(clippy::cast_precision_loss, reason = "a share")]
            Served::Partly if no > 0 => Some(yes as f64 / (yes + no) as f64),
            Served::Partly => path.share,
            _ => None,
        };
    }
}

/// How many clients were served and not.
fn tally(here: &[&Weighed]) -> (u64, u64) {
    let count = |served: Served| number(here, |one| one.served == served);
    (count(Served::Yes), count(Served::No))
}

/// Whether clients are served, as far as it was seen; nothing if that changes nothing.
fn served(path: &PathVerdict, here: &[&Weighed]) -> Option<Served> {
    match tally(here) {
        (0, 0) => None,
        (0, _) => Some(Served::No),
        // That some are served does not mean that all are.
        (_, 0) if path.served == Served::Partly => None,
        (_, 0) => Some(Served::Yes),
        _ => Some(Served::Partly),
    }
}

/// `17 of 17 journeys translated before any neighbour look-up, 17 answered`
fn text(outcome: Outcome, times: u64, all: u64, how: How, here: &[&Weighed]) -> String {
    let of: Vec<&Weighed> =
        here.iter().copied().filter(|one| one.conclusion.outcome == outcome).collect();
    let clear = of.iter().all(|one| one.conclusion.vip_lookups == VipLookups::None);
    let doubt = of.iter().find_map(|one| match &one.conclusion.vip_lookups {
        lookups @ (VipLookups::NoneSeen { .. } | VipLookups::NotWatched) => {
            Some(lookups.to_string())
        }
        _ => None,
    });
    let before = match (clear, doubt) {
        (true, _) => " before any neighbour look-up".to_owned(),
        (false, Some(doubt)) => format!(" (neighbour look-ups for the VIP: {doubt})"),
        (false, None) => String::new(),
    };
    let what = match outcome {
        Outcome::DnatBeforeNeigh => format!("translated{before}"),
        Outcome::ProxiedBeforeNeigh => format!("handed to the local proxy{before}"),
        Outcome::SocketTranslated => "translated at connect".to_owned(),
        Outcome::NoBackend => "rejected without a backend".to_owned(),
        Outcome::Denied | Outcome::Dropped => "dropped in BPF".to_owned(),
        Outcome::Untranslated => {
            let why = of.first().map_or("", |one| one.conclusion.why.as_str());
            format!("never translated ({why})")
        }
        Outcome::Unknown => "unclear".to_owned(),
    };
    let mut text = format!("{times} of {all} {} {what}", how.noun());
    for (answers, word) in [
        (number(&of, |one| matches!(one.answer, Answer::Answered { .. })), "answered"),
        (number(&of, |one| matches!(one.answer, Answer::Refused { .. })), "refused (RST)"),
        (
            number(&of, |one| matches!(one.answer, Answer::Unreachable { .. })),
            "answered with ICMP unreachable",
        ),
        (number(&of, |one| matches!(one.answer, Answer::Silent { .. })), "without an answer"),
    ] {
        if answers > 0 {
            text = format!("{text}, {answers} {word}");
        }
    }
    text
}

/// The neighbour that matters, as it was seen.
fn neighbour(outcome: Outcome, here: &[&Weighed]) -> String {
    let mut looked_up: Vec<String> = Vec::new();
    for lookup in here.iter().flat_map(|one| &one.conclusion.lookups) {
        let on = lookup.device.as_deref().unwrap_or("?");
        let text = format!("{} on {on}", lookup.address);
        if !looked_up.contains(&text) {
            looked_up.push(text);
        }
    }
    match (looked_up.is_empty(), outcome) {
        (false, _) => format!("looked up: {}", looked_up.join(", ")),
        (true, Outcome::Untranslated) => "the VIP's, or a gateway's (matters on this path)".into(),
        (true, _) => "no look-up seen".to_owned(),
    }
}

fn finding(id: FindingId, seen: String, meaning: &str, next: &str) -> Finding {
    Finding {
        id,
        severity: id.severity(),
        frontend: None,
        path: None,
        seen,
        meaning: meaning.to_owned(),
        next: next.to_owned(),
    }
}

/// What was seen is not what was derived.
fn conflict(
    path: &PathVerdict,
    all: u64,
    against: &[(Outcome, u64)],
    how: How,
    example: Option<&Conclusion>,
) -> Finding {
    let derived = if against.is_empty() {
        format!("{}, not served", path.outcome)
    } else {
        path.outcome.to_string()
    };
    let observed: Vec<String> =
        against.iter().map(|(outcome, times)| format!("{times} of {all} {outcome}")).collect();
    let observed =
        if observed.is_empty() { "clients are served".to_owned() } else { observed.join(", ") };
    let example = example.map_or_else(String::new, |one| format!("; such as: {one}"));
    Finding {
        frontend: Some(path.frontend.clone()),
        path: Some(path.path.clone()),
        ..finding(
            FindingId::ProofConflict,
            format!(
                "{} of {}: {} says {derived} ({}), {} was: {observed}{example}",
                path.path,
                path.frontend,
                path.grade,
                path.why.join("; "),
                how.word(),
            ),
            "the packets went another way than state and known behaviour say: state changed \
             meanwhile, something else than Cilium takes part, or this version of inspect is wrong",
            "collect and trace again; if it stays, save both with --save and report it",
        )
    }
}

/// Backends that refuse, or say nothing.
fn backends(frontend: &str, here: &[&Weighed], watched: &Watched, findings: &mut Vec<Finding>) {
    let backend = |one: &Conclusion| {
        one.translation.as_ref().map_or_else(String::new, |to| to.backend.clone())
    };
    let names = |weighed: &[&Weighed]| {
        let names: BTreeSet<String> = weighed.iter().map(|one| backend(&one.conclusion)).collect();
        names.into_iter().collect::<Vec<_>>().join(", ")
    };
    let refusing: Vec<&Weighed> =
        here.iter().copied().filter(|one| is_refused_by_backend(&one.conclusion)).collect();
    let all = number(here, |one| one.translation.is_some());
    if !refusing.is_empty() {
        let times = number(&refusing, |_| true);
        findings.push(Finding {
            frontend: Some(frontend.to_owned()),
            ..finding(
                FindingId::BackendRefuses,
                format!(
                    "{times} of {all} connections to {frontend} were translated and refused by the \
                     backend ({})",
                    names(&refusing)
                ),
                "the datapath is not the cause: nothing listens on that port of the backend, or it \
                 turns the client away",
                "see whether the application listens on the target port of the Service",
            )
        });
    }
    let silent: Vec<&Weighed> =
        here.iter().copied().filter(|one| is_silent_backend(&one.conclusion, watched)).collect();
    if !silent.is_empty() {
        let times = number(&silent, |_| true);
        let waited = silent.iter().filter_map(|one| match one.conclusion.answer {
            Answer::Silent { waited_ns } => Some(waited_ns),
            _ => None,
        });
        findings.push(Finding {
            frontend: Some(frontend.to_owned()),
            ..finding(
                FindingId::BackendSilent,
                format!(
                    "{times} of {all} connections to {frontend} were translated and got no answer \
                     from the backend in {} ({})",
                    duration(waited.min().unwrap_or_default()),
                    names(&silent)
                ),
                "this node did its part: the packet is lost on the way to the backend, dropped by \
                 a policy there, or the backend does not answer",
                "see whether the backend runs, its network policy, and the way to its node",
            )
        });
    }
}

/// Connections that Cilium's program took, and that nobody answered: what is redirected into a pod
/// is not seen in the node's network namespace any more.
fn handed_on(
    frontend: &str,
    here: &[&Weighed],
    watched: &Watched,
    paths: &[PathVerdict],
    findings: &mut Vec<Finding>,
) {
    let is_translated = |one: &Conclusion| {
        paths.iter().any(|path| is_on(one, path) && path.outcome == Outcome::DnatBeforeNeigh)
    };
    let vanished: Vec<&Weighed> = here
        .iter()
        .copied()
        .filter(|one| is_vanished(&one.conclusion, watched) && is_translated(&one.conclusion))
        .collect();
    if vanished.is_empty() {
        return;
    }
    let waited = vanished.iter().filter_map(|one| match one.conclusion.answer {
        Answer::Silent { waited_ns } => Some(waited_ns),
        _ => None,
    });
    findings.push(Finding {
        frontend: Some(frontend.to_owned()),
        ..finding(
            FindingId::BackendSilent,
            format!(
                "{} of {} connections to {frontend} arrived, did not go up this node's stack, were \
                 not dropped there and got no answer in {}",
                number(&vanished, |_| true),
                number(here, |_| true),
                duration(waited.min().unwrap_or_default()),
            ),
            "Cilium's program took them, and what it redirects into a pod is not seen on the node: \
             the pod drops them, or its reply is lost there",
            "see whether the backend runs, its routes and its network policy",
        )
    });
}

/// Whether nothing was seen of a connection after it arrived, though it would have been, had the
/// stack got it or dropped it.
fn is_vanished(one: &Conclusion, watched: &Watched) -> bool {
    let needed = [Hook::Drop, Hook::Queue, Hook::Receive];
    matches!(one.answer, Answer::Silent { .. })
        && matches!(one.path, SeenPath::Forwarded { .. })
        && one.served == Served::No
        && one.outcome == Outcome::Unknown
        && one.translation.is_none()
        && one.drops.is_empty()
        && one.vip_lookups == VipLookups::None
        && needed.iter().all(|hook| watched.saw_all_everywhere(*hook))
}

/// Whether the backend itself refused, as far as it was seen.
fn is_refused_by_backend(one: &Conclusion) -> bool {
    match &one.answer {
        Answer::Refused { backend: Some(_), .. } => true,
        Answer::Refused { backend: None, .. } => {
            one.translation.as_ref().is_some_and(|translation| translation.seen)
        }
        Answer::Unreachable { by, translated: true, .. } => one
            .translation
            .as_ref()
            .and_then(|to| to.backend.parse::<std::net::SocketAddr>().ok())
            .is_some_and(|backend| backend.ip() == *by),
        _ => false,
    }
}

/// Whether the backend is to blame for the silence: the packet was seen to go there, nothing was
/// seen to be dropped, and an answer would have been seen.
fn is_silent_backend(one: &Conclusion, watched: &Watched) -> bool {
    let replies = [Hook::TcIngress, Hook::Receive, Hook::Drop];
    matches!(one.answer, Answer::Silent { .. })
        && one.frontend.ends_with("/TCP")
        && one.served == Served::No
        && one.drops.is_empty()
        && one.outcome == Outcome::DnatBeforeNeigh
        && one.translation.as_ref().is_some_and(|translation| translation.seen)
        && !matches!(one.path, SeenPath::Unknown { .. })
        && replies.iter().all(|hook| watched.lost(*hook) == 0)
}

/// What was lost on the way from the kernel, and what had to make room here.
pub(super) fn events_lost(watched: &Watched, findings: &mut Vec<Finding>) {
    let mut parts: Vec<String> = watched
        .counts
        .iter()
        .filter(|count| count.lost > 0)
        .map(|count| {
            format!("{}: {} of {}", journey::hook_name(count.hook), count.lost, count.matched)
        })
        .collect();
    let joined = &watched.joined;
    for (number, what) in [
        (joined.cut_short, "journeys ended before their time"),
        (joined.steps_not_kept, "steps of journeys not kept"),
        (joined.neighbours_not_kept, "look-ups of neighbours not kept"),
        (joined.late, "sightings too late to be put in order"),
    ] {
        if number > 0 {
            parts.push(format!("{number} {what}"));
        }
    }
    if parts.is_empty() {
        return;
    }
    findings.push(finding(
        FindingId::EventsLost,
        format!("not everything was seen: {}", parts.join(", ")),
        "what was seen was so; what was not seen may have been all the same, and nothing is \
         concluded from it",
        "narrow the question (--via, a port) or trace for a shorter time",
    ));
}

/// A responder that says nothing though it is asked.
fn announcement(
    trace: &Trace,
    query: &VipQuery,
    programmed: &Programmed,
    context: &Context,
    findings: &mut Vec<Finding>,
) {
    for entry in &programmed.announcement.entries {
        let asked = trace.questions.iter().find(|one| one.ifindex == entry.ifindex);
        let Some(asked) = asked.filter(|one| one.requests > 0 && one.replies == 0) else {
            continue;
        };
        // Only the counter tells: an answer can leave without passing a hook that reports it.
        let Some(counted) = trace.answers.iter().find(|one| one.ifindex == entry.ifindex) else {
            continue;
        };
        if counted.after == counted.before {
            findings.push(finding(
                FindingId::AnnounceSilent,
                format!(
                    "{} requests for {} arrived on {}, where this node has a responder entry, and \
                     its answer counter stays at {}",
                    asked.requests,
                    query.address,
                    context.device(entry.ifindex),
                    counted.after
                ),
                "neighbours on that network do not find this node: the request does not reach \
                 Cilium's program, or the agent is dead",
                "see `inspect datapath` for the device, and whether cilium-agent runs",
            ));
        }
    }
}

fn counts(weighed: &[Weighed]) -> Vec<PathCount> {
    let mut counts: Vec<PathCount> = Vec::new();
    for Weighed { conclusion, times } in weighed {
        let path = conclusion.path.to_string();
        let same = counts.iter_mut().find(|one| {
            (one.frontend.as_str(), one.path.as_str(), one.outcome, one.served)
                == (
                    conclusion.frontend.as_str(),
                    path.as_str(),
                    conclusion.outcome,
                    conclusion.served,
                )
        });
        match same {
            Some(one) => one.journeys += times,
            None => counts.push(PathCount {
                frontend: conclusion.frontend.clone(),
                path,
                outcome: conclusion.outcome,
                served: conclusion.served,
                journeys: *times,
            }),
        }
    }
    counts.sort_by(|one, other| (&one.frontend, &one.path).cmp(&(&other.frontend, &other.path)));
    counts
}

/// What is needed to observe the paths on which nothing came. Where something else came meanwhile,
/// a device has its client.
fn needed(evidence: &Evidence, paths: Vec<String>, weighed: &[Weighed]) -> Vec<String> {
    let came: BTreeSet<String> =
        weighed.iter().map(|one| one.conclusion.path.to_string()).collect();
    let no_client = |path: &str| {
        let network = evidence.network.as_ref()?;
        network.wireguard.iter().find_map(|device| {
            let name = &network.link(device.ifindex)?.name;
            let nobody = device.peers.iter().all(|peer| peer.handshake_s.is_none())
                && !came.contains(&format!("forwarded via {name}"));
            (nobody && path.starts_with(&format!("forwarded via {name} "))).then(|| {
                format!("{name} has {} peers and no handshake yet: no client", device.peers.len())
            })
        })
    };
    paths
        .into_iter()
        .map(|path| match no_client(&path) {
            Some(why) => format!("{path}: {why}; try --simulate"),
            None if path.starts_with("forwarded") => {
                format!("{path}: no client came; connect one meanwhile, or try --simulate")
            }
            None => format!("{path}: nobody connected from there meanwhile"),
        })
        .collect()
}

/// Takes back what no longer holds once packets were seen: that no backend was tried, that no client
/// ever came in by a device.
pub(super) fn outdated(
    finding: &Finding,
    observation: &Observation,
    paths: &[PathVerdict],
) -> bool {
    let tried = |frontend: &str| {
        observation.conclusions.iter().any(|one| is_of(one, frontend) && tried_backend(one))
    };
    let came = |path: &str| observation.conclusions.iter().any(|one| one.path.to_string() == path);
    match finding.id {
        FindingId::BackendNotProbed => paths.iter().all(|path| tried(&path.frontend)),
        FindingId::NoClientYet => finding.path.as_deref().is_some_and(came),
        _ => false,
    }
}

/// Whether a backend was asked, and what it said, if anything, was awaited.
pub(super) fn tried_backend(one: &Conclusion) -> bool {
    one.translation.is_some()
        && matches!(
            one.answer,
            Answer::Answered { .. } | Answer::Refused { .. } | Answer::Silent { .. }
        )
}
