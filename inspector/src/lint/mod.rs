//! The static half: what manifests would announce, before they are applied.
//!
//! A node that answers ARP for a VIP needs a backend of its own if the Service's
//! externalTrafficPolicy is Local. The election of the announcer does not look at backends, so the
//! mistake stands in the manifests already: a Service, and the policy that announces it. Here the
//! two are paired over a whole tree. Pure, as [`crate::judge`] is: text in, report out.
//!
//! The tree is taken as one cluster's. What the tree does not hold (charts that are not rendered,
//! remote bases, Services that controllers make) is named and not guessed.

mod kustomize;
mod model;
mod objects;
mod rules;
mod selector;
pub mod yaml;

use schemars::JsonSchema;
use serde::Serialize;

use crate::judge::{FindingId, Severity};

/// The name of the report's format.
pub const SCHEMA: &str = "inspector.lint/1";

/// A file to look at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    /// Its path, as people are to read it; `/` between folders.
    pub path: String,
    /// Its content.
    pub text: String,
}

/// A place in a file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema)]
pub struct Location {
    /// Path of the file.
    pub path: String,
    /// Line, from 1.
    pub line: usize,
}

impl std::fmt::Display for Location {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.path, self.line)
    }
}

/// A file that is no YAML.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{path}:{line}: {reason}")]
pub struct Malformed {
    /// Path of the file.
    pub path: String,
    /// Line, from 1.
    pub line: usize,
    /// What is wrong.
    pub reason: String,
}

/// Whether the manifests keep to the rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    /// They do.
    Yes,
    /// They do not.
    No,
    /// It cannot be told: nothing was there to hold against it, or it is not rendered.
    Unknown,
}

/// How one Service fares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Announced, and sure to be served wherever it is.
    Good,
    /// Announced, and not sure.
    Flagged,
    /// Announced; what decides is not rendered.
    Unknown,
    /// No policy announces it.
    NotAnnounced,
}

impl State {
    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Flagged => "flagged",
            Self::Unknown => "unknown",
            Self::NotAnnounced => "not announced",
        }
    }
}

/// One Service that could be announced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Judged {
    /// `namespace/name`
    pub service: String,
    /// Where its externalTrafficPolicy stands, else where it begins.
    pub location: Location,
    /// externalTrafficPolicy, as written; `Cluster` where nothing is written.
    pub external_traffic_policy: String,
    /// Names of the policies that announce it.
    pub announced_by: Vec<String>,
    /// Where its addresses come from, as far as the tree tells.
    pub addresses: Vec<String>,
    /// How it fares.
    pub state: State,
    /// Why.
    pub why: String,
}

/// A Service that breaks the rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Finding {
    /// What it is: the same id as on a node.
    pub id: FindingId,
    /// How bad it is.
    pub severity: Severity,
    /// `namespace/name` of the Service.
    pub service: String,
    /// Where its externalTrafficPolicy stands.
    pub location: Location,
    /// What was seen.
    pub seen: String,
    /// What it means.
    pub meaning: String,
    /// What to do.
    pub next: String,
}

/// What was found in a tree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Report {
    /// `inspector.lint/1`
    pub schema: &'static str,
    /// Whether the manifests keep to the rule.
    pub answer: Answer,
    /// The answer in one sentence.
    pub sentence: String,
    /// Number of files that were read.
    pub files: usize,
    /// Number of policies that announce.
    pub policies: usize,
    /// Every Service that could be announced.
    pub services: Vec<Judged>,
    /// Those that break the rule.
    pub findings: Vec<Finding>,
    /// What could not be looked at, and why.
    pub not_judged: Vec<String>,
}

/// Holds a tree of manifests against the rule.
///
/// # Errors
/// Every file that is no YAML, with the line.
pub fn lint(files: &[File]) -> Result<Report, Vec<Malformed>> {
    let contents = objects::read(files);
    if !contents.malformed.is_empty() {
        return Err(contents.malformed);
    }
    let resolved = kustomize::resolve(files, &contents);
    let mut notes: Vec<String> = contents
        .templates
        .iter()
        .map(|index| format!("{}: a template that is not rendered", files[*index].path))
        .collect();
    notes.extend(resolved.notes);
    let model = model::Model::new(resolved.objects);
    Ok(rules::judge(files, &model, notes))
}
