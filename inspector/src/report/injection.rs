//! What was injected: for a terminal and as Markdown; and the three grades of proof side by side.

use std::io::{self, Write};

use super::{
    journeys,
    markdown::escape,
    table::{Style, new_table, port, print},
};
use crate::inject::Plan;
use crate::judge::{InjectedPath, InjectionSummary, Judgement, PathVerdict};

fn injected(paths: &[PathVerdict]) -> impl Iterator<Item = (&PathVerdict, &InjectedPath)> {
    paths.iter().filter_map(|path| Some((path, path.injected.as_ref()?)))
}

/// `: NOT as it must be`, where a control failed.
fn failed(good: bool) -> &'static str {
    if good { "" } else { ": NOT as it must be" }
}

/// The result, and what is to be known of it.
fn result(one: &InjectedPath) -> String {
    let mut text = one.came();
    if let (Some(why), Some(_)) = (&one.why_not, &one.conclusion) {
        text = format!("{text}; proves nothing: {why}");
    }
    for passed_by in &one.passed_by {
        text = format!("{text}; not passed: {passed_by}");
    }
    text
}

/// Writes what would be sent, a few lines for each packet, none of which is broken: addresses are to
/// be read, and copied.
///
/// # Errors
/// The error of the writer.
pub fn write_plan(plan: &Plan, out: &mut (impl Write + ?Sized)) -> io::Result<()> {
    for probe in &plan.probes {
        let what = match (probe.protocol, probe.payload.len() / 2) {
            (6, _) => "SYN".to_owned(),
            (_, 1) => "datagram of 1 byte".to_owned(),
            (_, bytes) => format!("datagram of {bytes} bytes"),
        };
        writeln!(out, "{} via {}", probe.frontend, probe.device)?;
        writeln!(out, "   packet   {what} from {}", probe.client.from())?;
        writeln!(out, "   control  the same to {}", probe.control.to())?;
        writeln!(out, "   answer   to {}", probe.answer_to)?;
        for passed_by in &probe.passed_by {
            writeln!(out, "   not      {passed_by}")?;
        }
    }
    for one in &plan.skipped {
        let frontend = one.frontend.as_deref().unwrap_or("every frontend");
        writeln!(out, "not {frontend} via {}: {}", one.device, one.why)?;
    }
    Ok(())
}

/// Writes what would be sent as JSON: an object with `probes` and `skipped`, as in evidence.
///
/// # Errors
/// The error of the writer.
pub fn write_plan_json(plan: &Plan, out: &mut (impl Write + ?Sized)) -> io::Result<()> {
    let value = serde_json::json!({ "probes": plan.probes, "skipped": plan.skipped });
    serde_json::to_writer_pretty(&mut *out, &value)?;
    writeln!(out)
}

/// Frontend, path, and what each grade of proof says of it.
type Row = [String; 5];

/// The proofs of each path side by side, where there is more than one kind.
fn proofs(judgement: &Judgement) -> Vec<Row> {
    let Judgement { verdict, simulation, injection, .. } = judgement;
    if simulation.is_none() || injection.is_none() {
        return Vec::new();
    }
    let none = || "-".to_owned();
    let forwarded = verdict.paths.iter().filter(|path| path.path.starts_with("forwarded via"));
    forwarded
        .map(|path| {
            let simulated = path.simulated.as_ref();
            let injected = path.injected.as_ref();
            let programmed = match (simulated, injected) {
                (Some(simulated), _) => simulated.programmed,
                (None, Some(injected)) => injected.derived,
                (None, None) => path.outcome,
            };
            [
                path.frontend.clone(),
                path.path.clone(),
                programmed.to_string(),
                simulated.map_or_else(none, |one| {
                    let control = if one.control.good { "" } else { ", control failed" };
                    format!("{}{control}", one.outcome)
                }),
                injected.map_or_else(none, |one| {
                    let answer = one.conclusion.as_ref().map(|one| one.answer.to_string());
                    match (one.proves, answer) {
                        (true, Some(answer)) => format!("{}, {answer}", one.outcome),
                        (true, None) => one.outcome.to_string(),
                        (false, _) => "proves nothing".to_owned(),
                    }
                }),
            ]
        })
        .collect()
}

/// Writes what was injected, for a terminal.
pub(super) fn write(judgement: &Judgement, style: Style, out: &mut impl Write) -> io::Result<()> {
    let Some(injection) = &judgement.injection else { return Ok(()) };
    writeln!(out)?;
    let paths = &judgement.verdict.paths;
    if injected(paths).next().is_some() {
        let mut table = new_table(style);
        table.set_header(["INJECTED", "VIA", "PACKET", "CAME TO"]);
        for (path, one) in injected(paths) {
            table.add_row([
                port(&path.frontend).to_owned(),
                path.device.clone().unwrap_or_default(),
                format!("from {}", one.source),
                result(one),
            ]);
            table.add_row([
                String::new(),
                String::new(),
                format!("control {}", one.control.destination),
                format!("{}{}", one.control.result, failed(one.control.good)),
            ]);
            table.add_row([
                String::new(),
                String::new(),
                "the answer went to".to_owned(),
                one.answer_to.clone(),
            ]);
        }
        print(&table, out)?;
        if style.verbose {
            for (_, one) in injected(paths) {
                for conclusion in one.conclusion.iter().chain(&one.control.conclusion) {
                    journeys::write_hooks(conclusion, style, out)?;
                }
            }
        }
    }
    let mut table = new_table(style);
    table.add_row(["Injected:".to_owned(), summary(injection)]);
    for line in &injection.not_injected {
        table.add_row(["NOT:".to_owned(), short(line).to_owned()]);
    }
    print(&table, out)?;
    let proofs = proofs(judgement);
    if !proofs.is_empty() {
        writeln!(out)?;
        let mut table = new_table(style);
        table.set_header(["PROOFS", "VIA", "PROGRAMMED", "SIMULATED", "INJECTED"]);
        for [frontend, path, programmed, simulated, injected] in proofs {
            let device = path.strip_prefix("forwarded via ").unwrap_or(&path).to_owned();
            table.add_row([port(&frontend).to_owned(), device, programmed, simulated, injected]);
        }
        print(&table, out)?;
    }
    Ok(())
}

/// The summary, and what could not be watched.
fn summary(injection: &InjectionSummary) -> String {
    format!("{injection}; watched: {}", journeys::tiers_text(&injection.tiers))
}

fn short(line: &str) -> &str {
    line.strip_prefix("injection of ").unwrap_or(line)
}

/// Writes what was injected as Markdown.
pub(super) fn write_markdown(judgement: &Judgement, out: &mut impl Write) -> io::Result<()> {
    let Some(injection) = &judgement.injection else { return Ok(()) };
    writeln!(out, "## Injected\n")?;
    writeln!(out, "{}.\n", escape(&summary(injection)))?;
    for line in &injection.not_injected {
        writeln!(out, "- Not: {}", escape(short(line)))?;
    }
    if !injection.not_injected.is_empty() {
        writeln!(out)?;
    }
    for (path, one) in injected(&judgement.verdict.paths) {
        writeln!(
            out,
            "- {} {}, from {}: {}",
            escape(&path.frontend),
            escape(&path.path),
            one.source,
            escape(&result(one))
        )?;
        writeln!(
            out,
            "  - control to {}: {}{}",
            one.control.destination,
            escape(&one.control.result),
            failed(one.control.good)
        )?;
        writeln!(out, "  - the answer went to {}", escape(&one.answer_to))?;
    }
    writeln!(out)?;
    let proofs = proofs(judgement);
    if !proofs.is_empty() {
        writeln!(out, "| Frontend | Path | Programmed | Simulated | Injected |")?;
        writeln!(out, "| --- | --- | --- | --- | --- |")?;
        for row in proofs {
            writeln!(out, "| {} |", row.map(|cell| escape(&cell)).join(" | "))?;
        }
        writeln!(out)?;
    }
    Ok(())
}

/// Rows for a page: frontend, path, packet, and what it came to, controls among them.
pub(super) fn rows(judgement: &Judgement) -> Vec<Vec<String>> {
    let mut rows = Vec::new();
    for (path, one) in injected(&judgement.verdict.paths) {
        rows.push(vec![
            path.frontend.clone(),
            path.path.clone(),
            format!("from {}", one.source),
            result(one),
        ]);
        rows.push(vec![
            String::new(),
            String::new(),
            format!("control to {}", one.control.destination),
            format!("{}{}", one.control.result, failed(one.control.good)),
        ]);
    }
    rows
}

/// What was held against the proof of one path, for the head of a record.
pub(super) fn control_of(path: &PathVerdict) -> Option<String> {
    let one = path.injected.as_ref()?;
    let outcome = if one.proves { one.outcome.to_string() } else { "no proof".to_owned() };
    Some(format!(
        "{} {}: an injected packet from {} came to {outcome}; control: the same to {}, which is no \
         frontend: {}{}",
        path.frontend,
        path.path,
        one.source,
        one.control.destination,
        one.control.result,
        if one.control.good { "" } else { ": failed, no proof" }
    ))
}
