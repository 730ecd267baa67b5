//! A judgement as Markdown, for a decision record or a ticket.

use std::io::{self, Write};

use super::injection;
use super::{
    picture::mermaid,
    table::{announced, details, served, slots},
};
use crate::judge::{
    Grade, Judgement, PathVerdict, SimulationSummary,
    expect::{Checked, Met},
    programmed::Programmed,
};

/// Keeps text from being taken for markup.
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '|' | '*' | '_' | '`' | '[' | ']' | '<' | '>' | '#' | '\\' => {
                escaped.push('\\');
                escaped.push(character);
            }
            '\n' => escaped.push(' '),
            other => escaped.push(other),
        }
    }
    escaped
}

/// The claim that a record is about.
pub(super) fn claim_of(judgement: &Judgement, expectations: &[Checked]) -> String {
    if expectations.is_empty() {
        return format!("clients of {} are served on {}", judgement.vip, judgement.node);
    }
    let claims: Vec<&str> = expectations.iter().map(|one| one.claim.as_str()).collect();
    format!("of {} on {}: {}", judgement.vip, judgement.node, claims.join(", "))
}

/// How the paths were proved, and what was held against the proof.
pub(super) fn control_of(judgement: &Judgement) -> String {
    let count =
        |grade: Grade| judgement.verdict.paths.iter().filter(|path| path.grade == grade).count();
    let (programmed, simulated, observed) =
        (count(Grade::Programmed), count(Grade::Simulated), count(Grade::Observed));
    let mut parts = Vec::new();
    if programmed > 0 {
        parts.push(format!(
            "no control: programmed only ({programmed} paths): derived from maps, attached programs, \
             routes and neighbours; no packet was sent or seen"
        ));
    }
    if simulated > 0 {
        parts.push(format!("{simulated} paths simulated, each with a control"));
    }
    for path in &judgement.verdict.paths {
        if let Some(one) = &path.simulated {
            let control = &one.control;
            parts.push(format!(
                "{} {}: {} packets came to {}; control: the same to {}, which is no frontend: {}{}",
                path.frontend,
                path.path,
                one.packets,
                one.came(),
                control.destination,
                control.result,
                if control.good { "" } else { ": failed, no proof" }
            ));
        }
    }
    parts.extend(judgement.verdict.paths.iter().filter_map(injection::control_of));
    if observed > 0 {
        parts.push(format!("{observed} paths observed: packets were seen"));
    }
    if parts.is_empty() { "no path was judged".to_owned() } else { parts.join("; ") }
}

/// Writes a judgement; `sha256` is that of the evidence it rests on.
///
/// # Errors
/// The error of the writer.
pub fn write(
    judgement: &Judgement,
    expectations: &[Checked],
    sha256: &str,
    out: &mut impl Write,
) -> io::Result<()> {
    let Judgement { vip, node, collected, verdict, observed, programmed, simulation, .. } =
        judgement;
    let not_measured = &judgement.not_measured;
    writeln!(out, "# {vip} on {}\n", escape(node))?;
    writeln!(out, "**{}**\n", escape(&verdict.sentence))?;
    writeln!(
        out,
        "Served: {}. Collected {collected}; maps as of Cilium {}. Evidence SHA-256 `{sha256}`.\n",
        verdict.served, programmed.release
    )?;
    writeln!(out, "## Claim, proof, control\n")?;
    writeln!(out, "- Claim: {}", escape(&claim_of(judgement, expectations)))?;
    writeln!(out, "- Verdict: served: {}", verdict.served)?;
    writeln!(out, "- Control: {}\n", escape(&control_of(judgement)))?;
    write_programmed(programmed, out)?;
    writeln!(out, "Announced here: {}.\n", escape(&announced(&programmed.announcement)))?;
    if !verdict.paths.is_empty() {
        writeln!(out, "## Paths\n")?;
        writeln!(out, "| Frontend | Path | Outcome | Served | Proof | Why |")?;
        writeln!(out, "| --- | --- | --- | --- | --- | --- |")?;
        for path in &verdict.paths {
            writeln!(
                out,
                "| {} | {} | {} | {} | {} | {} |",
                escape(&path.frontend),
                escape(&path.path),
                path.outcome,
                served(path),
                path.grade,
                escape(&path.why.join("; "))
            )?;
        }
        writeln!(out)?;
    }
    if !verdict.paths.is_empty() {
        writeln!(out, "## The packet's way\n\n```mermaid\n{}```\n", mermaid(judgement))?;
    }
    if let Some(observed) = observed {
        super::journeys::write_markdown(observed, out)?;
    }
    if let Some(simulation) = simulation {
        write_simulated(&verdict.paths, simulation, out)?;
    }
    injection::write_markdown(judgement, out)?;
    if !verdict.findings.is_empty() {
        writeln!(out, "## Findings\n")?;
        for finding in &verdict.findings {
            writeln!(
                out,
                "- **{}** `{}`: {}. {}. Next: {}.",
                finding.severity,
                finding.id,
                escape(&finding.seen),
                escape(&finding.meaning),
                escape(&finding.next)
            )?;
        }
        writeln!(out)?;
    }
    write_expectations(expectations, out)?;
    if !not_measured.is_empty() {
        writeln!(out, "## Not measured\n")?;
        for line in not_measured {
            writeln!(out, "- {}", escape(line))?;
        }
    }
    Ok(())
}

/// Claims and what became of them, if there are any.
pub(super) fn write_expectations(
    expectations: &[Checked],
    out: &mut (impl Write + ?Sized),
) -> io::Result<()> {
    if expectations.is_empty() {
        return Ok(());
    }
    writeln!(out, "## Expectations\n")?;
    for checked in expectations {
        let word = match checked.met {
            Met::Yes => "met",
            Met::No => "not met",
            Met::Unknown => "cannot be told",
        };
        let node = checked.node.as_ref().map(|node| format!(" on {}", escape(node)));
        let node = node.unwrap_or_default();
        match &checked.why {
            Some(why) => writeln!(out, "- `{}`{node}: {word}: {}", checked.claim, escape(why))?,
            None => writeln!(out, "- `{}`{node}: {word}", checked.claim)?,
        }
    }
    writeln!(out)
}

/// What simulated packets came to, with their controls, and what they left.
fn write_simulated(
    paths: &[PathVerdict],
    simulation: &SimulationSummary,
    out: &mut impl Write,
) -> io::Result<()> {
    writeln!(out, "## Simulated\n")?;
    writeln!(out, "{}.\n", escape(&simulation.to_string()))?;
    for line in &simulation.not_simulated {
        writeln!(out, "- Not: {}", escape(line.strip_prefix("simulation of ").unwrap_or(line)))?;
    }
    let mut simulated =
        paths.iter().filter_map(|path| Some((path, path.simulated.as_ref()?))).peekable();
    if simulated.peek().is_none() {
        return Ok(());
    }
    writeln!(out, "| Frontend | Path | From | Packets | Came to | Control | Its result |")?;
    writeln!(out, "| --- | --- | --- | --- | --- | --- | --- |")?;
    for (path, simulated) in simulated {
        let control = &simulated.control;
        writeln!(
            out,
            "| {} | {} | {} | {} | {} | {} | {}{} |",
            escape(&path.frontend),
            escape(&path.path),
            simulated.source,
            simulated.packets,
            escape(&simulated.came()),
            control.destination,
            escape(&control.result),
            if control.good { "" } else { ": failed, no proof" }
        )?;
    }
    writeln!(out)
}

fn write_programmed(programmed: &Programmed, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "## Programmed\n")?;
    if programmed.frontends.is_empty() && programmed.wildcards.is_empty() {
        writeln!(out, "Nothing.\n")?;
    } else {
        writeln!(out, "| Frontend | Id | Type | Details |\n| --- | --- | --- | --- |")?;
        for frontend in programmed.frontends.iter().chain(&programmed.wildcards) {
            writeln!(
                out,
                "| {} | {} | {} | {} |",
                escape(&frontend.frontend),
                frontend.reverse_nat.id,
                frontend.service_type.as_str(),
                escape(&details(frontend))
            )?;
        }
        writeln!(out)?;
        if programmed.frontends.iter().any(|frontend| !frontend.backends.is_empty()) {
            writeln!(out, "| Frontend | Slot | Backend | Id | State | Chosen | Where |")?;
            writeln!(out, "| --- | --- | --- | --- | --- | --- | --- |")?;
            for frontend in &programmed.frontends {
                for (slots, backend) in slots(frontend) {
                    writeln!(
                        out,
                        "| {} | {slots} | {} | {} | {} | {} | {} |",
                        escape(&frontend.frontend),
                        escape(backend.address.as_deref().unwrap_or(if backend.dangling {
                            "nothing"
                        } else {
                            "?"
                        })),
                        backend.id,
                        backend.state,
                        if backend.selectable { "yes" } else { "no" },
                        escape(&backend.location.to_string())
                    )?;
                }
            }
            writeln!(out)?;
        }
    }
    Ok(())
}
