//! Expectations (`--expect`): claims that a verdict meets, does not meet, or cannot settle.

use std::{fmt, str::FromStr};

use schemars::JsonSchema;
use serde::Serialize;

use super::{
    FindingId, Grade, Judgement, Outcome, PathVerdict, Served, Severity, cluster::Cluster,
};
use crate::cilium::services::Scope;

/// A claim about a VIP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expectation {
    claim: Claim,
    device: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Claim {
    /// Clients are served.
    Served,
    /// They are not.
    NotServed,
    /// Packets have this outcome.
    Outcome(Outcome),
    /// The proof is at least this strong.
    Grade(Grade),
    /// The VIP is a frontend.
    Programmed,
    /// Every frontend has a usable backend.
    HasBackend,
    /// This node answers for the VIP.
    Announced,
    /// It does not.
    NotAnnounced,
    /// There is such a finding.
    Finding(FindingId),
    /// There is none.
    NoFinding(FindingId),
    /// There is no error at all.
    NoErrors,
}

/// Whether an expectation is met.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Met {
    /// It is.
    Yes,
    /// It is not.
    No,
    /// It cannot be told.
    Unknown,
}

/// An expectation and what became of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Checked {
    /// The claim as it was given.
    pub claim: String,
    /// The node that it was held against, where there are several; nothing if it is about all of
    /// them together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Whether it is met.
    pub met: Met,
    /// Why it is not, or cannot be told.
    pub why: Option<String>,
}

impl Checked {
    /// The claim, and the node where there are several: `has-backend on n1`.
    #[must_use]
    pub fn name(&self) -> String {
        match &self.node {
            Some(node) => format!("{} on {node}", self.claim),
            None => self.claim.clone(),
        }
    }
}

/// Text that is no claim.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExpectationError {
    /// A finding that does not exist.
    #[error("`{0}` is no finding: use one of {list}", list = finding_list())]
    Finding(String),
    /// A device behind a claim that is about all of them.
    #[error("`{0}` is not about a device: leave out what stands behind the @")]
    Device(String),
    /// Anything else.
    #[error(
        "`{0}` is no claim: use served, not-served, programmed, has-backend, announced, not-announced, \
     no-errors, simulated, observed, an outcome (dnat-before-neigh, proxied-before-neigh, socket-translated, \
     no-backend, denied, dropped, untranslated), finding:ID or no-finding:ID; a path claim may end \
     in @DEVICE"
    )]
    Claim(String),
}

fn finding_list() -> String {
    FindingId::ALL.iter().map(|id| id.as_str()).collect::<Vec<_>>().join(", ")
}

impl FromStr for Expectation {
    type Err = ExpectationError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || ExpectationError::Claim(text.to_owned());
        let (claim, device) = match text.split_once('@') {
            Some((claim, device)) if !device.is_empty() => (claim, Some(device.to_owned())),
            Some(_) => return Err(error()),
            None => (text, None),
        };
        let id = |id: &str| {
            id.parse::<FindingId>().map_err(|_| ExpectationError::Finding(id.to_owned()))
        };
        let claim = match claim {
            "served" => Claim::Served,
            "not-served" => Claim::NotServed,
            "programmed" => Claim::Programmed,
            "has-backend" => Claim::HasBackend,
            "announced" => Claim::Announced,
            "not-announced" => Claim::NotAnnounced,
            "no-errors" => Claim::NoErrors,
            "simulated" => Claim::Grade(Grade::Simulated),
            "observed" => Claim::Grade(Grade::Observed),
            other => match (other.strip_prefix("finding:"), other.strip_prefix("no-finding:")) {
                (Some(name), _) => Claim::Finding(id(name)?),
                (_, Some(name)) => Claim::NoFinding(id(name)?),
                _ => Claim::Outcome(
                    Outcome::ALL
                        .into_iter()
                        .find(|outcome| outcome.as_str() == other && *outcome != Outcome::Unknown)
                        .ok_or_else(error)?,
                ),
            },
        };
        let has_paths = matches!(
            claim,
            Claim::Served
                | Claim::NotServed
                | Claim::Outcome(_)
                | Claim::Grade(_)
                | Claim::Announced
                | Claim::NotAnnounced
        );
        if device.is_some() && !has_paths {
            return Err(ExpectationError::Device(text.to_owned()));
        }
        Ok(Self { claim, device })
    }
}

impl fmt::Display for Expectation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.claim {
            Claim::Served => f.write_str("served")?,
            Claim::NotServed => f.write_str("not-served")?,
            Claim::Outcome(outcome) => write!(f, "{outcome}")?,
            Claim::Grade(grade) => write!(f, "{grade}")?,
            Claim::Programmed => f.write_str("programmed")?,
            Claim::HasBackend => f.write_str("has-backend")?,
            Claim::Announced => f.write_str("announced")?,
            Claim::NotAnnounced => f.write_str("not-announced")?,
            Claim::Finding(id) => write!(f, "finding:{id}")?,
            Claim::NoFinding(id) => write!(f, "no-finding:{id}")?,
            Claim::NoErrors => f.write_str("no-errors")?,
        }
        match &self.device {
            Some(device) => write!(f, "@{device}"),
            None => Ok(()),
        }
    }
}

impl Expectation {
    /// Holds the claim against a judgement.
    #[must_use]
    pub fn check(&self, judgement: &Judgement) -> Checked {
        self.checked(None, self.result(judgement))
    }

    fn checked(&self, node: Option<&str>, (met, why): (Met, Option<String>)) -> Checked {
        Checked {
            claim: self.to_string(),
            node: node.map(str::to_owned),
            met,
            why: why.filter(|_| met != Met::Yes),
        }
    }

    /// Holds the claim against several nodes. What clients of the LAN see of a VIP (whether it is
    /// served, who answers for it) and that there is such a finding is held against all of them
    /// together, every other claim against each node, and against what several nodes together show.
    #[must_use]
    pub fn check_cluster(&self, cluster: &Cluster) -> Vec<Checked> {
        let together = |result| vec![self.checked(None, result)];
        let each = || {
            let nodes = cluster.nodes.iter();
            nodes.map(|node| self.checked(Some(&node.name), self.result(&node.judgement)))
        };
        match (&self.claim, &self.device) {
            (Claim::Served, None) => together(by_served(cluster.served, &cluster.sentence)),
            (Claim::NotServed, None) => together(by_not_served(cluster.served, &cluster.sentence)),
            (Claim::Announced | Claim::Finding(_), _) => {
                let of_cluster = match self.claim {
                    Claim::Finding(id) => cluster.findings.iter().any(|one| one.id == id),
                    _ => false,
                };
                let all: Vec<Checked> = each().collect();
                let is = |met: Met| all.iter().any(|one| one.met == met);
                let met = match (of_cluster || is(Met::Yes), is(Met::Unknown) || all.is_empty()) {
                    (true, _) => Met::Yes,
                    (false, true) => Met::Unknown,
                    (false, false) => Met::No,
                };
                together((met, Some(reasons(&all))))
            }
            (Claim::NotAnnounced, _) => {
                let all: Vec<Checked> = each().filter(|one| one.met != Met::Yes).collect();
                let met = if all.iter().any(|one| one.met == Met::No) {
                    Met::No
                } else if all.is_empty() && !cluster.nodes.is_empty() {
                    Met::Yes
                } else {
                    Met::Unknown
                };
                together((met, Some(reasons(&all))))
            }
            (Claim::NoFinding(id), _) => {
                let found = cluster.findings.iter().find(|one| one.id == *id);
                let mut all = Vec::new();
                if found.is_some() || id.takes_several_nodes() {
                    let met = if found.is_some() { Met::No } else { Met::Yes };
                    all.push(self.checked(None, (met, found.map(|one| one.seen.clone()))));
                }
                if !id.takes_several_nodes() {
                    all.extend(each());
                }
                all
            }
            (Claim::NoErrors, _) => {
                let error = cluster.findings.iter().find(|one| one.severity == Severity::Error);
                let met = if error.is_some() { Met::No } else { Met::Yes };
                let why = error.map(|error| format!("{}: {}", error.id, error.seen));
                std::iter::once(self.checked(None, (met, why))).chain(each()).collect()
            }
            _ => each().collect(),
        }
    }

    fn result(&self, judgement: &Judgement) -> (Met, Option<String>) {
        let verdict = &judgement.verdict;
        let programmed = &judgement.programmed;
        // What could not be read can hide a finding as well as a frontend.
        let readable = !verdict.findings.iter().any(|one| one.id == FindingId::MapNotRead);
        let told = |is: bool| match (is, readable) {
            (true, _) => Met::Yes,
            (false, true) => Met::No,
            (false, false) => Met::Unknown,
        };
        let seen = |id: FindingId| {
            verdict.findings.iter().find(|one| one.id == id).map(|one| one.seen.clone())
        };
        match self.claim {
            Claim::Served => match self.device {
                None => by_served(verdict.served, &verdict.sentence),
                Some(_) => self.on_paths(judgement, |path| match path.served {
                    Served::Yes if path.share.is_none() => Met::Yes,
                    Served::Unknown if path.share.is_none() => Met::Unknown,
                    _ => Met::No,
                }),
            },
            Claim::NotServed => match self.device {
                None => by_not_served(verdict.served, &verdict.sentence),
                Some(_) => self.on_paths(judgement, |path| match path.served {
                    Served::No => Met::Yes,
                    Served::Unknown => Met::Unknown,
                    _ => Met::No,
                }),
            },
            Claim::Outcome(outcome) => self.on_paths(judgement, |path| {
                if path.outcome == outcome {
                    Met::Yes
                } else if path.outcome == Outcome::Unknown {
                    Met::Unknown
                } else {
                    Met::No
                }
            }),
            // Without the proof nothing is refuted: it was not had.
            Claim::Grade(grade) => self.on_paths(judgement, |path| {
                if path.grade >= grade && path.outcome != Outcome::Unknown {
                    Met::Yes
                } else {
                    Met::Unknown
                }
            }),
            Claim::Programmed => (
                told(programmed.frontends.iter().any(|frontend| frontend.master)),
                Some(verdict.sentence.clone()),
            ),
            Claim::HasBackend => has_backend(judgement, told),
            Claim::Announced | Claim::NotAnnounced => self.announced(judgement, told),
            Claim::Finding(id) => (told(seen(id).is_some()), Some("it was not found".to_owned())),
            Claim::NoFinding(id) => match seen(id) {
                Some(seen) => (Met::No, Some(seen)),
                None => (
                    if readable { Met::Yes } else { Met::Unknown },
                    Some("not everything could be read".to_owned()),
                ),
            },
            Claim::NoErrors => {
                let error = verdict.findings.iter().find(|one| one.severity == Severity::Error);
                match error {
                    Some(error) => (Met::No, Some(format!("{}: {}", error.id, error.seen))),
                    None => (
                        if readable { Met::Yes } else { Met::Unknown },
                        Some("not everything could be read".to_owned()),
                    ),
                }
            }
        }
    }

    fn announced(
        &self,
        judgement: &Judgement,
        told: impl Fn(bool) -> Met,
    ) -> (Met, Option<String>) {
        let announcement = &judgement.programmed.announcement;
        let on = announcement.entries.iter().any(|entry| {
            self.device.as_deref().is_none_or(|device| entry.device.as_deref() == Some(device))
        }) && announcement.answering;
        let met = if on { Met::Yes } else { told(false) };
        let why = if announcement.entries.is_empty() {
            "this node has no responder entry for it".to_owned()
        } else if announcement.answering && !on {
            "this node answers for it on other devices only".to_owned()
        } else if announcement.agent_silent_s.is_none() {
            "there is a responder entry, but whether the agent lives is not known".to_owned()
        } else if announcement.answering {
            "this node answers for it".to_owned()
        } else {
            "there is a responder entry, but the agent is dead and the responder silent".to_owned()
        };
        match (&self.claim, met) {
            (Claim::Announced, met) => (met, Some(why)),
            (_, Met::Yes) => (Met::No, Some(why)),
            (_, Met::No) => (Met::Yes, None),
            (_, Met::Unknown) => (Met::Unknown, Some(why)),
        }
    }

    /// Holds a claim against the forwarded paths, or against those of one device.
    fn on_paths(
        &self,
        judgement: &Judgement,
        test: impl Fn(&PathVerdict) -> Met,
    ) -> (Met, Option<String>) {
        let mut unknown = None;
        let mut any = false;
        for path in judgement.verdict.paths.iter().filter(|path| match &self.device {
            Some(device) => path.device.as_ref() == Some(device),
            None => path.path == "forwarded" || path.path.starts_with("forwarded via"),
        }) {
            any = true;
            let why = || {
                format!(
                    "{} {}: {} ({})",
                    path.frontend,
                    path.path,
                    path.outcome,
                    path.why.join("; ")
                )
            };
            match test(path) {
                Met::Yes => {}
                Met::No => return (Met::No, Some(why())),
                Met::Unknown => unknown = Some(why()),
            }
        }
        match (any, unknown) {
            (true, None) => (Met::Yes, None),
            (true, why) => (Met::Unknown, why),
            (false, _) => match &self.device {
                Some(device) if !judgement.programmed.frontends.is_empty() => (
                    Met::Unknown,
                    Some(format!("nothing is known of a device {device} on this node")),
                ),
                _ => (Met::No, Some(judgement.verdict.sentence.clone())),
            },
        }
    }
}

fn has_backend(judgement: &Judgement, told: impl Fn(bool) -> Met) -> (Met, Option<String>) {
    let Judgement { programmed, verdict, .. } = judgement;
    let without = programmed
        .frontends
        .iter()
        .filter(|one| one.scope == Scope::External && one.l7_proxy_port.is_none())
        .find(|frontend| frontend.usable() == 0);
    let any = programmed.frontends.iter().any(|frontend| frontend.usable() > 0);
    let why = without.map_or_else(
        || verdict.sentence.clone(),
        |frontend| format!("{} has no usable backend", frontend.frontend),
    );
    (told(without.is_none() && any), Some(why))
}

fn by_served(served: Served, sentence: &str) -> (Met, Option<String>) {
    let met = match served {
        Served::Yes => Met::Yes,
        Served::No | Served::Partly => Met::No,
        Served::Unknown => Met::Unknown,
    };
    (met, Some(sentence.to_owned()))
}

fn by_not_served(served: Served, sentence: &str) -> (Met, Option<String>) {
    let met = match served {
        Served::No => Met::Yes,
        Served::Yes | Served::Partly => Met::No,
        Served::Unknown => Met::Unknown,
    };
    (met, Some(sentence.to_owned()))
}

/// `n1: this node has no responder entry for it; n2: …`
fn reasons(all: &[Checked]) -> String {
    let each = all.iter().map(|one| {
        let node = one.node.as_deref().unwrap_or("together");
        format!("{node}: {}", one.why.as_deref().unwrap_or("it is so"))
    });
    each.collect::<Vec<_>>().join("; ")
}
