//! A judgement for a terminal.

use std::io::{self, Write};

use comfy_table::{Cell, Color, ContentArrangement, Table, presets};

use super::{injection, journeys};
use crate::{
    cilium::services::Scope,
    judge::{
        Finding, Judgement, Outcome, PathVerdict, Served, Severity, SimulationSummary,
        expect::{Checked, Met},
        programmed::{Announcement, ProgrammedBackend, ProgrammedFrontend, TrafficPolicy},
    },
};

/// How to draw.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Style {
    /// Columns of the terminal.
    pub width: u16,
    /// Whether to colour.
    pub color: bool,
    /// Leave out what is not an error, and the details.
    pub quiet: bool,
    /// Show what was not measured, and notes in full.
    pub verbose: bool,
}

/// Writes a judgement.
///
/// # Errors
/// The error of the writer.
pub fn write(
    judgement: &Judgement,
    expectations: &[Checked],
    style: Style,
    out: &mut impl Write,
) -> io::Result<()> {
    let Judgement { vip, node, collected, verdict, observed, programmed, simulation, .. } =
        judgement;
    let not_measured = &judgement.not_measured;
    writeln!(out, "{}", sentence(verdict.served, &verdict.sentence, style))?;
    if style.quiet {
        return write_expectations(expectations, style, out);
    }
    writeln!(out)?;
    writeln!(out, "{vip} on {node}, {collected}; maps as of Cilium {}", programmed.release)?;
    if !programmed.frontends.is_empty() || !programmed.wildcards.is_empty() {
        writeln!(out)?;
        write_frontends(programmed.frontends.iter().chain(&programmed.wildcards), style, out)?;
    }
    if !verdict.paths.is_empty() {
        writeln!(out)?;
        write_paths(&verdict.paths, style, out)?;
    }
    if let Some(observed) = observed {
        writeln!(out)?;
        journeys::write_observation(observed, style, out)?;
    }
    if let Some(simulation) = simulation {
        writeln!(out)?;
        write_simulated(&verdict.paths, simulation, style, out)?;
    }
    injection::write(judgement, style, out)?;
    writeln!(out)?;
    writeln!(out, "Announced here: {}", announced(&programmed.announcement))?;
    if !verdict.findings.is_empty() {
        writeln!(out)?;
        write_findings(&verdict.findings, style, out)?;
    }
    if style.verbose && !not_measured.is_empty() {
        writeln!(out, "\nNot measured:")?;
        for line in not_measured {
            writeln!(out, "  {line}")?;
        }
    }
    write_expectations(expectations, style, out)
}

/// What simulated packets came to, and what they left.
fn write_simulated(
    paths: &[PathVerdict],
    simulation: &SimulationSummary,
    style: Style,
    out: &mut impl Write,
) -> io::Result<()> {
    let simulated: Vec<_> =
        paths.iter().filter_map(|path| Some((path, path.simulated.as_ref()?))).collect();
    if !simulated.is_empty() {
        let mut table = new_table(style);
        table.set_header(["SIMULATED", "VIA", "PACKETS", "CAME TO"]);
        for (path, simulated) in simulated {
            let number = match simulated.packets {
                1 => "1 from".to_owned(),
                packets => format!("{packets} from"),
            };
            // No client of those that the frontend lets through could be simulated.
            let alone =
                simulated.denied.as_ref().is_some_and(|denied| denied.source == simulated.source);
            let outside = if alone { "outside the ranges " } else { "" };
            table.add_row([
                port(&path.frontend).to_owned(),
                path.device.clone().unwrap_or_default(),
                format!("{number} {outside}{}", simulated.source),
                simulated.came(),
            ]);
            let others = [
                Some(("control", &simulated.control)),
                simulated.control_port.as_ref().map(|control| ("unused port", control)),
                // It may be all there is.
                simulated
                    .denied
                    .as_ref()
                    .filter(|denied| denied.source != simulated.source)
                    .map(|denied| ("outside the ranges", denied)),
            ];
            for (what, control) in others.into_iter().flatten() {
                let whom = match what {
                    "outside the ranges" => control.source.to_string(),
                    _ => control.destination.to_string(),
                };
                let failed = if control.good { "" } else { ": NOT as it must be" };
                table.add_row([
                    String::new(),
                    String::new(),
                    format!("{what} {whom}"),
                    format!("{}{failed}", control.result),
                ]);
            }
        }
        print(&table, out)?;
    }
    let mut table = new_table(style);
    table.add_row(["Simulated:".to_owned(), simulation.to_string()]);
    for line in &simulation.not_simulated {
        let line = line.strip_prefix("simulation of ").unwrap_or(line);
        table.add_row(["NOT:".to_owned(), line.to_owned()]);
    }
    print(&table, out)
}

/// The first word of the sentence stands out.
fn sentence(served: Served, sentence: &str, style: Style) -> String {
    let code = match served {
        Served::Yes => "1;32",
        Served::No => "1;31",
        Served::Partly | Served::Unknown => "1;33",
    };
    match (style.color, sentence.split_once(':')) {
        (true, Some((word, rest))) => format!("\x1b[{code}m{word}\x1b[0m:{rest}"),
        _ => sentence.to_owned(),
    }
}

/// An empty table without lines, as wide as the terminal.
#[must_use]
pub fn new_table(style: Style) -> Table {
    let mut table = Table::new();
    table
        .load_preset(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_width(style.width);
    if style.color {
        table.enforce_styling();
    } else {
        table.force_no_tty();
    }
    table
}

/// Prints a table without the spaces that fill its last column.
///
/// # Errors
/// The error of the writer.
pub fn print(table: &Table, out: &mut (impl Write + ?Sized)) -> io::Result<()> {
    for line in table.lines() {
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

fn write_frontends<'a>(
    frontends: impl Iterator<Item = &'a ProgrammedFrontend>,
    style: Style,
    out: &mut impl Write,
) -> io::Result<()> {
    let mut table = new_table(style);
    table.set_header(["FRONTEND / BACKEND", "ID", "TYPE / STATE", "DETAILS"]);
    for frontend in frontends {
        table.add_row([
            Cell::new(&frontend.frontend),
            Cell::new(frontend.reverse_nat.id),
            Cell::new(if frontend.master { frontend.service_type.as_str() } else { "?" }),
            Cell::new(details(frontend)),
        ]);
        for (slots, backend) in slots(frontend) {
            let color = match (backend.dangling, backend.selectable) {
                (true, true) => Some(Color::Red),
                (_, false) => Some(Color::DarkGrey),
                _ => None,
            };
            let cells = [
                format!(
                    "  {slots} => {}",
                    backend.address.as_deref().unwrap_or(if backend.dangling {
                        "nothing"
                    } else {
                        "?"
                    })
                ),
                if backend.id == 0 { String::new() } else { backend.id.to_string() },
                backend.state.clone(),
                match (backend.address.is_some(), backend.selectable) {
                    (true, true) => backend.location.to_string(),
                    (true, false) if backend.state == "active" => {
                        format!(
                            "{}; not chosen: quarantined, or terminating here",
                            backend.location
                        )
                    }
                    (true, false) => format!("{}; not chosen", backend.location),
                    (false, _) if !backend.dangling => "not read".to_owned(),
                    (false, true) => "connections that choose this slot fail".to_owned(),
                    (false, false) => "not chosen".to_owned(),
                },
            ];
            table.add_row(cells.map(|text| {
                let cell = Cell::new(text);
                match color {
                    Some(color) => cell.fg(color),
                    None => cell,
                }
            }));
        }
    }
    print(&table, out)
}

/// The slots of a frontend, those in a row that are not there together: a damaged count can make
/// them 65535.
pub(super) fn slots(
    frontend: &ProgrammedFrontend,
) -> impl Iterator<Item = (String, &ProgrammedBackend)> {
    let missing = |backend: &ProgrammedBackend| backend.id == 0 && backend.address.is_none();
    frontend
        .backends
        .chunk_by(move |one, next| missing(one) && missing(next) && one.state == next.state)
        .filter_map(|run| {
            let (first, last) = (run.first()?, run.last()?);
            let slots = if first.slot == last.slot {
                first.slot.to_string()
            } else {
                format!("{} to {}", first.slot, last.slot)
            };
            Some((slots, first))
        })
}

/// What is particular about a frontend, in a few words.
pub(super) fn details(frontend: &ProgrammedFrontend) -> String {
    if frontend.wildcard {
        return "wildcard: other ports and protocols of the address are dropped".to_owned();
    }
    if !frontend.master {
        return "no master entry".to_owned();
    }
    let mut words = Vec::new();
    match frontend.l7_proxy_port {
        Some(port) => words.push(format!("L7, proxy port {port}")),
        None if frontend.count == 0 => words.push("no backends".to_owned()),
        None => words.push(frontend.usable_of_count()),
    }
    if frontend.scope == Scope::Internal {
        words.push("internal scope".to_owned());
    } else if frontend.two_scopes {
        words.push("external scope".to_owned());
    }
    if frontend.external_traffic_policy == TrafficPolicy::Local {
        words.push("externalTrafficPolicy Local".to_owned());
    }
    if frontend.internal_traffic_policy == TrafficPolicy::Local {
        words.push("internalTrafficPolicy Local".to_owned());
    }
    if let Some(seconds) = frontend.session_affinity_s {
        words.push(format!("session affinity {seconds} s"));
    }
    match &frontend.maglev {
        Some(table) => words.push(format!("Maglev table of {} places", table.places)),
        None => words.extend(frontend.algorithm.map(str::to_owned)),
    }
    if let Some(ranges) = &frontend.source_ranges {
        let verb = if ranges.deny { "denies" } else { "allows" };
        let list = match (ranges.ranges.is_empty(), ranges.complete) {
            (true, true) => "nobody".to_owned(),
            (true, false) => "source ranges that were not read".to_owned(),
            (false, true) => ranges.ranges.join(" "),
            (false, false) => format!("{} and others that were not read", ranges.ranges.join(" ")),
        };
        words.push(format!("{verb} {list}"));
    }
    if !frontend.routable {
        words.push("not routable from outside".to_owned());
    }
    if frontend.dsr {
        words.push("DSR".to_owned());
    }
    let reverse_nat = match (frontend.reverse_nat.good, &frontend.reverse_nat.restores) {
        (Some(true), _) => "reverse NAT there",
        (Some(false), None) => "reverse NAT MISSING",
        (Some(false), Some(_)) => "reverse NAT WRONG",
        (None, _) => "reverse NAT not read",
    };
    words.push(reverse_nat.to_owned());
    words.join(", ")
}

fn write_paths(paths: &[PathVerdict], style: Style, out: &mut impl Write) -> io::Result<()> {
    let mut rows: Vec<(&PathVerdict, [String; 5])> = Vec::new();
    let mut rest = paths;
    while let Some((first, others)) = rest.split_first() {
        // Devices on which the same becomes of a packet share a row.
        let same = others.iter().take_while(|other| is_twin(first, other)).count();
        let (twins, after) = others.split_at(same);
        let mut name = first.path.clone();
        for device in twins.iter().filter_map(|twin| twin.device.as_deref()) {
            name.push_str(", ");
            name.push_str(device);
        }
        let cells = [
            port(&first.frontend).to_owned(),
            name,
            first.outcome.to_string(),
            served(first),
            if first.outcome == Outcome::Unknown {
                "-".to_owned()
            } else {
                first.grade.to_string()
            },
        ];
        rows.push((first, cells));
        rest = after;
    }
    let header = ["FRONTEND", "PATH", "OUTCOME", "SERVED", "PROOF"];
    let width = |column: usize| {
        let cells = rows.iter().map(|(_, cells)| cells[column].chars().count());
        cells.chain([header[column].len()]).max().unwrap_or_default()
    };
    let widths: [usize; 5] = std::array::from_fn(width);
    let line = |cells: [&str; 5]| -> Vec<String> {
        cells.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect()
    };
    writeln!(out, " {}", line(header).join("  ").trim_end())?;
    for (path, cells) in &rows {
        let mut padded = line(cells.each_ref().map(String::as_str));
        if style.color {
            let code = match path.served {
                Served::Yes => "32",
                Served::No => "31",
                Served::Partly | Served::Unknown => "33",
            };
            padded[3] = format!("\x1b[{code}m{}\x1b[0m", padded[3]);
        }
        writeln!(out, " {}", padded.join("  ").trim_end())?;
        let mut details = new_table(style);
        let indent = " ".repeat(widths[0] + 1);
        details.add_row([format!("{indent}why"), path.why.join("; ")]);
        if let Some(neighbour) = &path.neighbour {
            details.add_row([format!("{indent}neighbour"), neighbour.clone()]);
        }
        print(&details, out)?;
    }
    Ok(())
}

/// Whether two verdicts differ in nothing but the device.
fn is_twin(one: &PathVerdict, other: &PathVerdict) -> bool {
    let same = PathVerdict { path: one.path.clone(), device: one.device.clone(), ..other.clone() };
    one.device.is_some() && other.device.is_some() && *one == same
}

/// `443/TCP` of `192.168.2.20:443/TCP`.
pub(super) fn port(frontend: &str) -> &str {
    frontend.rsplit(':').next().unwrap_or(frontend)
}

/// `yes`, `no`, … with the share where it is neither 0 nor 1.
pub(super) fn served(path: &PathVerdict) -> String {
    match path.share {
        Some(share) => format!("{}, at most {:.0} %", path.served, share * 100.0),
        None => path.served.to_string(),
    }
}

/// Who answers ARP, in one line.
pub(super) fn announced(announcement: &Announcement) -> String {
    if let Some(reason) = announcement.unknown.as_ref().filter(|_| announcement.entries.is_empty())
    {
        return format!("unknown ({reason})");
    }
    if !announcement.responder_map {
        return "no (this node has no L2 responder map)".to_owned();
    }
    if announcement.entries.is_empty() {
        return "no (no L2 responder entry for it)".to_owned();
    }
    let entries: Vec<String> = announcement
        .entries
        .iter()
        .map(|entry| {
            let device =
                entry.device.clone().unwrap_or_else(|| format!("interface {}", entry.ifindex));
            format!("{device}, answers so far: {}", entry.answers)
        })
        .collect();
    let agent = match announcement.agent_silent_s {
        Some(u64::MAX) => "no sign of life of the agent: SILENT".to_owned(),
        Some(seconds) if announcement.answering => format!("agent alive {seconds} s ago"),
        Some(seconds) => format!("agent's last sign of life {seconds} s ago: SILENT"),
        None => "agent liveness unknown".to_owned(),
    };
    format!("yes, on {} ({agent})", entries.join("; "))
}

pub(super) fn write_findings(
    findings: &[Finding],
    style: Style,
    out: &mut (impl Write + ?Sized),
) -> io::Result<()> {
    for (index, finding) in findings.iter().enumerate() {
        let Finding { id, severity, frontend: _, path: _, seen, meaning, next } = finding;
        // Notes are many and alike: two lines each, unless more is asked for.
        let short = *severity == Severity::Note && !style.verbose;
        let after_short = index > 0 && findings[index - 1].severity == Severity::Note;
        if index > 0 && !(short && after_short) {
            writeln!(out)?;
        }
        let code = match severity {
            Severity::Error => "1;31",
            Severity::Warning => "1;33",
            Severity::Note => "1;36",
        };
        let mut table = new_table(style);
        if style.color {
            writeln!(out, "\x1b[{code}m{severity}\x1b[0m {id}")?;
        } else {
            writeln!(out, "{severity} {id}")?;
        }
        if short {
            table.add_row(["  ".to_owned(), format!("{seen}; {meaning}")]);
        } else {
            table.add_row(["  seen", seen]);
            table.add_row(["  means", meaning]);
            table.add_row(["  next", next]);
        }
        print(&table, out)?;
    }
    Ok(())
}

pub(super) fn write_expectations(
    expectations: &[Checked],
    style: Style,
    out: &mut (impl Write + ?Sized),
) -> io::Result<()> {
    if expectations.is_empty() {
        return Ok(());
    }
    writeln!(out)?;
    for checked in expectations {
        let (word, code) = match checked.met {
            Met::Yes => ("met", "32"),
            Met::No => ("NOT MET", "31"),
            Met::Unknown => ("CANNOT TELL", "33"),
        };
        let word = if style.color { format!("\x1b[{code}m{word}\x1b[0m") } else { word.to_owned() };
        match &checked.why {
            Some(why) => writeln!(out, "expect {}: {word}: {why}", checked.name())?,
            None => writeln!(out, "expect {}: {word}", checked.name())?,
        }
    }
    Ok(())
}
