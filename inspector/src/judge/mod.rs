//! From evidence to a verdict: a pure function. No I/O, no clock, no kernel.

mod attached;
pub mod cluster;
mod conclude;
pub mod datapath;
pub mod diff;
pub mod expect;
mod findings;
mod injected;
pub mod journey;
pub mod observed;
pub mod programmed;
mod simulated;
mod stack;
pub mod targets;
mod walk;

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use findings::{Finding, FindingId, Severity};
pub use injected::{InjectedControl, InjectedPath, InjectionSummary};
use programmed::Programmed;
pub use simulated::{Control, SimulatedPath, SimulationSummary};
pub(crate) use walk::{cidr, contains};

use crate::evidence::{Evidence, Subject, VipQuery, tables::Tables};

/// Whether something is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Served {
    /// Yes.
    Yes,
    /// No.
    No,
    /// Some of it is not.
    Partly,
    /// It cannot be told.
    Unknown,
}

impl fmt::Display for Served {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Yes => "yes",
            Self::No => "no",
            Self::Partly => "partly",
            Self::Unknown => "unknown",
        })
    }
}

/// What becomes of a packet on a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// Destination rewritten to a backend in BPF, before any neighbour look-up.
    DnatBeforeNeigh,
    /// L7: marked and handed to the local proxy port.
    ProxiedBeforeNeigh,
    /// Rewritten at connect or sendmsg: no packet ever carries the VIP.
    SocketTranslated,
    /// Frontend known, nothing to send to.
    NoBackend,
    /// Source not in the frontend's ranges.
    Denied,
    /// Dropped in BPF for another stated reason.
    Dropped,
    /// Goes to the stack with the VIP as destination: the VIP's neighbour matters.
    Untranslated,
    /// Could not be told.
    Unknown,
}

impl Outcome {
    /// The id, as in files and on the command line.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::DnatBeforeNeigh => "dnat-before-neigh",
            Self::ProxiedBeforeNeigh => "proxied-before-neigh",
            Self::SocketTranslated => "socket-translated",
            Self::NoBackend => "no-backend",
            Self::Denied => "denied",
            Self::Dropped => "dropped",
            Self::Untranslated => "untranslated",
            Self::Unknown => "unknown",
        }
    }

    /// Every outcome.
    pub const ALL: [Self; 8] = [
        Self::DnatBeforeNeigh,
        Self::ProxiedBeforeNeigh,
        Self::SocketTranslated,
        Self::NoBackend,
        Self::Denied,
        Self::Dropped,
        Self::Untranslated,
        Self::Unknown,
    ];
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// How strong a proof is, weakest first.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Grade {
    /// Derived from maps, attachments and known behaviour.
    Programmed,
    /// Cilium's own program, run on a synthetic packet.
    Simulated,
    /// Packets seen at the hooks.
    Observed,
}

impl fmt::Display for Grade {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Programmed => "programmed",
            Self::Simulated => "simulated",
            Self::Observed => "observed",
        })
    }
}

/// What becomes of one frontend on one path.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct PathVerdict {
    /// The frontend: `192.168.2.20:443/TCP`.
    pub frontend: String,
    /// The path: `forwarded via eno1`, `socket on host`, `pod`, `forwarded from pod`.
    pub path: String,
    /// The device of a forwarded path.
    pub device: Option<String>,
    /// What becomes of the packet.
    pub outcome: Outcome,
    /// Whether the client is served.
    pub served: Served,
    /// Share of connections that are served, where it is neither 0 nor 1.
    pub share: Option<f64>,
    /// How strong the proof is.
    pub grade: Grade,
    /// The steps that led there.
    pub why: Vec<String>,
    /// The neighbour entry that matters on this path, where it was read.
    pub neighbour: Option<String>,
    /// What simulated packets came to, where there were any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub simulated: Option<SimulatedPath>,
    /// What an injected packet came to, where there was one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub injected: Option<InjectedPath>,
}

/// The answer about a VIP.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct Verdict {
    /// Whether this node serves the VIP.
    pub served: Served,
    /// The answer in one sentence.
    pub sentence: String,
    /// Every frontend on every path.
    pub paths: Vec<PathVerdict>,
    /// What explains it, worst first.
    pub findings: Vec<Finding>,
}

/// The whole answer: the verdict and what it rests on.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct Judgement {
    /// What was asked.
    pub vip: VipQuery,
    /// Host name of the node.
    pub node: String,
    /// When the evidence was collected, UTC.
    pub collected: String,
    /// The verdict.
    pub verdict: Verdict,
    /// What was observed of real packets, if any were watched.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed: Option<observed::Observation>,
    /// What is programmed.
    pub programmed: Programmed,
    /// What was simulated, where that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub simulation: Option<SimulationSummary>,
    /// What was injected, where that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub injection: Option<InjectionSummary>,
    /// What was not looked at, or could not be, and why.
    pub not_measured: Vec<String>,
}

/// Why evidence holds no answer to a question.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JudgeError {
    /// The evidence is not about a VIP.
    #[error(
        "this evidence holds tables and no question about a VIP: judge it with `inspect vip ADDR --from FILE`"
    )]
    NoQuestion,
    /// The evidence is about programs, and holds no map entries.
    #[error(
        "this evidence holds attached programs and no map entries: show it with `inspect datapath \
         --from FILE`, or collect again with `inspect vip ADDR --save FILE`"
    )]
    NoEntries,
    /// Two pieces of evidence answer different questions.
    #[error(
        "one file is about {one}, the other about {other}: compare files with the same question"
    )]
    Unlike {
        /// What the first is about.
        one: &'static str,
        /// What the second is about.
        other: &'static str,
    },
    /// Tables of which frontends cannot be told.
    #[error(
        "this evidence holds no services with their backends: collect with `inspect service list \
         --save FILE` to compare a whole node"
    )]
    NoServices,
    /// The evidence is about another VIP.
    #[error("this evidence was collected for {collected} and has no answer about {asked}")]
    OtherVip {
        /// What it was collected for.
        collected: VipQuery,
        /// What is asked.
        asked: VipQuery,
    },
}

/// Judges the question that the evidence was collected for.
///
/// # Errors
/// [`JudgeError::NoQuestion`] or [`JudgeError::NoEntries`] if it was collected for none about a VIP.
pub fn judge(evidence: &Evidence) -> Result<Judgement, JudgeError> {
    match evidence.subject {
        Subject::Vip(query) => Ok(judge_vip(evidence, query)),
        Subject::Tables => Err(JudgeError::NoQuestion),
        Subject::Datapath { .. } => Err(JudgeError::NoEntries),
    }
}

/// Judges another question with the same evidence.
///
/// # Errors
/// [`JudgeError::OtherVip`] if the evidence was collected for another address,
/// [`JudgeError::NoEntries`] if it was collected for programs alone.
pub fn judge_question(evidence: &Evidence, query: VipQuery) -> Result<Judgement, JudgeError> {
    match evidence.subject {
        Subject::Vip(collected) if collected.address != query.address => {
            Err(JudgeError::OtherVip { collected, asked: query })
        }
        Subject::Datapath { .. } => Err(JudgeError::NoEntries),
        _ => Ok(judge_vip(evidence, query)),
    }
}

fn judge_vip(evidence: &Evidence, query: VipQuery) -> Judgement {
    let tables = Tables::for_vip(evidence, query.address);
    let programmed = Programmed::new(evidence, &tables, &query);
    let facts = attached::Facts::new(evidence, query.address);
    let mut paths = walk::paths(evidence, &tables, &programmed, &query, &facts);
    // What real packets prove comes last: it is the best proof there is.
    let injected = injected::apply(evidence, &query, &programmed, &mut paths);
    let observed = observed::apply(evidence, &query, &programmed, &mut paths);
    let mut findings = findings::find(evidence, &tables, &programmed, &query, &paths, &facts);
    let observed = observed.map(|(observation, found)| {
        findings.retain(|finding| !observed::outdated(finding, &observation, &paths));
        findings.extend(found);
        observation
    });
    let injection = injected.map(|(summary, found)| {
        findings.retain(|finding| !injected::outdated(finding, &paths));
        findings.extend(found);
        summary
    });
    findings.sort_by_key(|finding| finding.severity);
    let (served, sentence) =
        conclude::conclude(&query, &tables, &programmed, &paths, &findings, evidence);
    let simulation = evidence
        .simulation
        .as_ref()
        .map(|simulation| SimulationSummary::new(simulation, &facts.simulated));
    Judgement {
        vip: query,
        node: evidence.host.name.clone(),
        collected: evidence.time.ended.clone(),
        verdict: Verdict { served, sentence, paths, findings },
        observed,
        programmed,
        not_measured: evidence
            .sources
            .iter()
            .filter(|source| source.status != crate::evidence::SourceStatus::Complete)
            .map(|source| match &source.reason {
                Some(reason) => format!("{}: {reason}", source.what),
                None => source.what.clone(),
            })
            .chain(simulation.iter().flat_map(|summary| summary.not_simulated.clone()))
            .chain(injection.iter().flat_map(|summary| summary.not_injected.clone()))
            .collect(),
        simulation,
        injection,
    }
}
