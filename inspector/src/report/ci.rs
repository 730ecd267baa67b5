//! A judgement for CI: as `JUnit` cases and as annotations.
//!
//! One case for each frontend on each path, one for each class of finding, one for each expectation
//! and one for the verdict. Where expectations are given they alone decide, as they do for the exit
//! code: then everything else is told of and fails nothing.

use super::{
    annotations::Annotation,
    junit::{Case, Status, Suite},
};
use crate::judge::{
    Finding, FindingId, Judgement, PathVerdict, Served, Severity,
    expect::{Checked, Met},
};

/// All that is said of a finding.
fn words(finding: &Finding) -> String {
    format!("{}. {}. Next: {}.", finding.seen, finding.meaning, finding.next)
}

/// Whether a path is one that decides the answer.
fn decides(path: &PathVerdict) -> bool {
    path.path == "forwarded" || path.path.starts_with("forwarded via")
}

fn of_path(path: &PathVerdict, decided_by_claims: bool) -> Status {
    let text = format!("{}, {}: {}", path.outcome, path.served, path.why.join("; "));
    match path.served {
        Served::Yes if path.share.is_none() => Status::Passed,
        Served::Unknown => Status::Skipped(text),
        _ if decided_by_claims || !decides(path) => Status::Skipped(text),
        _ => Status::Failed {
            message: text.clone(),
            kind: path.outcome.to_string(),
            text: match &path.neighbour {
                Some(neighbour) => format!("{text}\nneighbour: {neighbour}"),
                None => text,
            },
        },
    }
}

fn of_findings(found: &[&Finding], decided_by_claims: bool) -> Status {
    let Some(first) = found.first() else { return Status::Passed };
    let all: Vec<String> = found.iter().map(|one| words(one)).collect();
    if first.severity == Severity::Error && !decided_by_claims {
        Status::Failed {
            message: first.seen.clone(),
            kind: first.id.to_string(),
            text: all.join("\n"),
        }
    } else {
        Status::Skipped(format!("{}: {}", first.severity, all.join(" ")))
    }
}

fn of_verdict(judgement: &Judgement, decided_by_claims: bool) -> Status {
    let sentence = judgement.verdict.sentence.clone();
    let kind = match judgement.verdict.served {
        Served::Yes => return Status::Passed,
        _ if decided_by_claims => return Status::Skipped(sentence),
        Served::No | Served::Partly => "not-served",
        Served::Unknown => "cannot-tell",
    };
    Status::Failed { message: sentence.clone(), kind: kind.to_owned(), text: sentence }
}

/// What became of a claim, as the status of a case.
pub(super) fn of_claim(checked: &Checked) -> Status {
    let why = checked.why.clone().unwrap_or_default();
    let kind = match checked.met {
        Met::Yes => return Status::Passed,
        Met::No => "not-met",
        Met::Unknown => "cannot-tell",
    };
    Status::Failed {
        message: format!("{}: {why}", checked.name()),
        kind: kind.to_owned(),
        text: why,
    }
}

/// The cases of one judgement; `sha256` is that of the evidence it rests on.
#[must_use]
pub fn suite(judgement: &Judgement, expectations: &[Checked], sha256: &str) -> Suite {
    let Judgement { vip, node, collected, verdict, programmed, not_measured, .. } = judgement;
    let by_claims = !expectations.is_empty();
    let case = |class: String, name: String, status: Status| Case {
        class: format!("{vip}.{class}"),
        name,
        status,
        location: None,
    };
    let mut cases =
        vec![case("verdict".to_owned(), "served".to_owned(), of_verdict(judgement, by_claims))];
    for path in &verdict.paths {
        cases.push(case(path.frontend.clone(), path.path.clone(), of_path(path, by_claims)));
    }
    for id in FindingId::ALL.iter().filter(|id| !id.takes_several_nodes()) {
        let found: Vec<&Finding> = verdict.findings.iter().filter(|one| one.id == *id).collect();
        cases.push(case("findings".to_owned(), id.to_string(), of_findings(&found, by_claims)));
    }
    for checked in expectations {
        cases.push(case("expect".to_owned(), checked.claim.clone(), of_claim(checked)));
    }
    let mut properties = vec![
        ("sentence".to_owned(), verdict.sentence.clone()),
        ("evidence.sha256".to_owned(), sha256.to_owned()),
        ("cilium".to_owned(), programmed.release.clone()),
    ];
    properties.extend(not_measured.iter().map(|line| ("not-measured".to_owned(), line.clone())));
    Suite {
        name: format!("inspect vip {vip}"),
        hostname: Some(node.clone()),
        timestamp: Some(collected.clone()),
        properties,
        cases,
    }
}

/// The annotations of one judgement: the sentence, every path, every finding and every expectation
/// that is not met.
#[must_use]
pub fn annotations(judgement: &Judgement, expectations: &[Checked]) -> Vec<Annotation> {
    let Judgement { vip, node, verdict, .. } = judgement;
    let by_claims = !expectations.is_empty();
    let place = format!("{vip} on {node}");
    // What decides nothing is no error of the run.
    let least = |severity: Severity| if by_claims { Severity::Note } else { severity };
    let one = |severity: Severity, title: String, message: String| Annotation {
        severity,
        title,
        message,
        location: None,
    };
    let mut all = vec![one(
        match verdict.served {
            Served::Yes => Severity::Note,
            _ => least(Severity::Error),
        },
        place.clone(),
        verdict.sentence.clone(),
    )];
    for finding in &verdict.findings {
        all.push(one(
            finding.severity.max(least(finding.severity)),
            format!("{}: {place}", finding.id),
            words(finding),
        ));
    }
    let paths: Vec<String> = verdict
        .paths
        .iter()
        .map(|path| {
            format!("{} {}: {}, served: {}", path.frontend, path.path, path.outcome, path.served)
        })
        .collect();
    if !paths.is_empty() {
        all.push(one(Severity::Note, format!("paths: {place}"), paths.join("\n")));
    }
    all.extend(of_claims(expectations, &place));
    all
}

/// The annotations of the claims that are not met.
pub(super) fn of_claims(expectations: &[Checked], place: &str) -> Vec<Annotation> {
    let not_met = expectations.iter().filter(|checked| checked.met != Met::Yes);
    let annotation = |checked: &Checked| {
        let met = if checked.met == Met::No { "not met" } else { "cannot be told" };
        Annotation {
            severity: Severity::Error,
            title: format!("expect {}: {place}", checked.name()),
            message: format!("{met}: {}", checked.why.as_deref().unwrap_or_default()),
            location: None,
        }
    };
    not_met.map(annotation).collect()
}
