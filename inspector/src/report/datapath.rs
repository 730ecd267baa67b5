//! Which programs are attached where, for a terminal, as Markdown and as JSON.

use std::io::{self, Write};

use comfy_table::{Cell, Color, ColumnConstraint, Table, Width};
use serde::Serialize;

use super::{
    markdown::escape,
    table::{Style, new_table, write_findings},
};
use crate::{
    cilium::layout::Family,
    evidence::{Evidence, SourceStatus, programs::Attachments},
    judge::datapath::{
        Datapath, DeviceDatapath, Holder, HookProgram, Reach, SocketDatapath, hook_name,
    },
};

/// What is printed of the evidence beside the analysis.
#[derive(Debug, Clone, Copy)]
pub struct Report<'a> {
    /// The analysis.
    pub datapath: &'a Datapath,
    /// What it rests on.
    pub evidence: &'a Evidence,
}

/// One row of the table of devices.
struct Row {
    device: String,
    hook: String,
    program: String,
    id: String,
    services: String,
    held: String,
    color: Option<Color>,
}

const HEADER: [&str; 6] = ["DEVICE", "HOOK", "PROGRAM", "ID", "SERVICES", "HELD BY"];
const SOCKET_HEADER: [&str; 5] = ["CGROUP", "HOOK", "PROGRAM", "ID", "SERVICES"];
/// Columns that a program's name has at least, of 80: those of `cil_from_container` and a space.
const NAME: u16 = 19;

impl Report<'_> {
    /// Writes it for a terminal.
    ///
    /// # Errors
    /// The error of the writer.
    pub fn write_table(&self, style: Style, out: &mut dyn Write) -> io::Result<()> {
        let Self { datapath, evidence } = *self;
        let mut table = new_table(style);
        table.set_header(HEADER);
        for Row { device, hook, program, id, services, held, color } in self.rows(style.verbose) {
            let services = Cell::new(services);
            let services = match color {
                Some(color) => services.fg(color),
                None => services,
            };
            table.add_row([
                Cell::new(device),
                Cell::new(hook),
                Cell::new(program),
                Cell::new(id),
                services,
                Cell::new(held),
            ]);
        }
        finish(&mut table);
        print(&table, out)?;
        if let Some(bare) = self.bare_devices() {
            writeln!(out, "\nWithout programs: {bare}")?;
        }
        if !datapath.sockets.is_empty() {
            let mut table = new_table(style);
            table.set_header(SOCKET_HEADER);
            for row in self.socket_rows() {
                table.add_row(row);
            }
            writeln!(out)?;
            finish(&mut table);
            print(&table, out)?;
        }
        if !datapath.idle_pins.is_empty() {
            writeln!(out, "\nPins that hold nothing:")?;
            for pin in &datapath.idle_pins {
                writeln!(out, "  {} (program {}): {}", pin.path, pin.program, pin.why)?;
            }
        }
        if !datapath.findings.is_empty() {
            writeln!(out)?;
            write_findings(&datapath.findings, style, out)?;
        }
        if style.quiet {
            return Ok(());
        }
        for line in not_told(evidence) {
            writeln!(out, "\nNot told: {line}")?;
        }
        Ok(())
    }

    /// Writes it as Markdown; `sha256` is that of the evidence.
    ///
    /// # Errors
    /// The error of the writer.
    pub fn write_markdown(&self, sha256: &str, out: &mut dyn Write) -> io::Result<()> {
        let Self { datapath, evidence } = *self;
        writeln!(out, "# Datapath of {}\n", escape(&evidence.host.name))?;
        writeln!(
            out,
            "Collected {} on kernel {}. Evidence SHA-256 `{sha256}`.\n",
            evidence.time.ended,
            escape(&evidence.host.kernel)
        )?;
        header(&HEADER, out)?;
        for Row { device, hook, program, id, services, held, color: _ } in self.rows(true) {
            line([device, hook, program, id, services, held], out)?;
        }
        if let Some(bare) = self.bare_devices() {
            writeln!(out, "\nWithout programs: {}", escape(&bare))?;
        }
        if !datapath.sockets.is_empty() {
            writeln!(out, "\n## Socket hooks\n")?;
            header(&SOCKET_HEADER, out)?;
            for row in self.socket_rows() {
                line(row, out)?;
            }
        }
        if !datapath.idle_pins.is_empty() {
            writeln!(out, "\n## Pins that hold nothing\n")?;
            for pin in &datapath.idle_pins {
                writeln!(
                    out,
                    "- {} (program {}): {}",
                    escape(&pin.path),
                    pin.program,
                    escape(&pin.why)
                )?;
            }
        }
        if !datapath.findings.is_empty() {
            writeln!(out, "\n## Findings\n")?;
            for finding in &datapath.findings {
                writeln!(
                    out,
                    "- **{}** ({}): {}. {}. Next: {}.",
                    finding.id,
                    finding.severity,
                    escape(&finding.seen),
                    escape(&finding.meaning),
                    escape(&finding.next)
                )?;
            }
        }
        for text in not_told(evidence) {
            writeln!(out, "\nNot told: {}", escape(&text))?;
        }
        Ok(())
    }

    /// Writes it as JSON: the analysis, and the attachments that it rests on.
    ///
    /// # Errors
    /// The error of the writer.
    pub fn write_json(&self, out: &mut dyn Write) -> io::Result<()> {
        #[derive(Serialize)]
        struct Document<'a> {
            schema: &'static str,
            node: &'a str,
            collected: &'a str,
            #[serde(flatten)]
            datapath: &'a Datapath,
            attachments: Option<&'a Attachments>,
            not_measured: Vec<String>,
        }
        let document = Document {
            schema: "inspector.datapath/1",
            node: &self.evidence.host.name,
            collected: &self.evidence.time.ended,
            datapath: self.datapath,
            attachments: self.evidence.attachments.as_ref(),
            not_measured: not_told(self.evidence),
        };
        serde_json::to_writer_pretty(&mut *out, &document)?;
        out.write_all(b"\n")
    }

    /// A row for each program and each filter that is none, in the order of the packet.
    fn rows(&self, full: bool) -> Vec<Row> {
        let mut rows = Vec::new();
        for device in &self.datapath.devices {
            let name = format!("{} ({})", device_name(device), device.ifindex);
            let mut name = Some(name);
            for program in &device.programs {
                let (services, color) = services(program);
                rows.push(Row {
                    device: name.take().unwrap_or_default(),
                    hook: numbered(device, program),
                    program: program_name(program, full),
                    id: program.program.to_string(),
                    services,
                    held: held(&program.holder, full),
                    color,
                });
            }
            for filter in &device.other_filters {
                rows.push(Row {
                    device: name.take().unwrap_or_default(),
                    hook: hook_name(filter.kind).to_owned(),
                    program: format!("{} filter, priority {}", filter.filter, filter.priority),
                    id: String::new(),
                    services: "foreign".to_owned(),
                    held: "filter".to_owned(),
                    color: Some(Color::Yellow),
                });
            }
        }
        rows
    }

    fn bare_devices(&self) -> Option<String> {
        let bare: Vec<String> = self
            .datapath
            .devices
            .iter()
            .filter(|device| device.programs.is_empty() && device.other_filters.is_empty())
            .map(|device| format!("{} ({})", device_name(device), device.ifindex))
            .collect();
        (!bare.is_empty()).then(|| bare.join(", "))
    }

    fn socket_rows(&self) -> Vec<[String; 5]> {
        let mut rows = Vec::new();
        for socket in &self.datapath.sockets {
            let SocketDatapath { subject, cgroup, problem, programs } = socket;
            let mut place = Some(match cgroup {
                Some(cgroup) => format!("{subject}: {cgroup}"),
                None => subject.clone(),
            });
            if let Some(problem) = problem {
                let place = place.take().unwrap_or_default();
                let text = format!("unknown: {problem}");
                rows.push([place, String::new(), text, String::new(), String::new()]);
            } else if programs.is_empty() {
                let place = place.take().unwrap_or_default();
                let text = "none".to_owned();
                rows.push([place, String::new(), text, String::new(), String::new()]);
            }
            for program in programs {
                let name = program.name.as_deref().unwrap_or("unknown");
                rows.push([
                    place.take().unwrap_or_default(),
                    program.hook.clone(),
                    name.to_owned(),
                    program.program.to_string(),
                    match (&program.services, program.is_cilium) {
                        (_, false) => "foreign".to_owned(),
                        (Some(reach), true) => reach.to_string(),
                        (None, true) => "-".to_owned(),
                    },
                ]);
            }
        }
        rows
    }
}

fn device_name(device: &DeviceDatapath) -> &str {
    device.name.as_deref().unwrap_or("?")
}

/// `tcx ingress`, with the place in the chain where there are several.
fn numbered(device: &DeviceDatapath, program: &HookProgram) -> String {
    let several = device.programs.iter().filter(|one| one.hook == program.hook).count() > 1;
    let name = hook_name(program.hook);
    if several { format!("{name} #{}", program.order + 1) } else { name.to_owned() }
}

fn program_name(program: &HookProgram, full: bool) -> String {
    let name = program.name.as_deref().or(program.filter.as_deref()).unwrap_or("unknown");
    let mut text = name.to_owned();
    if full && let Some(filter) = &program.filter {
        text.push_str(" as ");
        text.push_str(filter);
    }
    text
}

/// The answer of both families in one cell.
fn services(program: &HookProgram) -> (String, Option<Color>) {
    if !program.is_cilium {
        return ("foreign".to_owned(), Some(Color::Yellow));
    }
    if !program.translates {
        return ("-".to_owned(), None);
    }
    let families = [(Family::V4, "IPv4"), (Family::V6, "IPv6")];
    let told: Vec<(&str, &Reach)> = families
        .into_iter()
        .filter_map(|(family, word)| Some((word, program.services(family)?)))
        .collect();
    let color = |reach: &Reach| match reach.known() {
        Some(true) => Color::Green,
        Some(false) => Color::Red,
        None => Color::Yellow,
    };
    match told.as_slice() {
        [] => ("no services map".to_owned(), Some(Color::Yellow)),
        [(_, one)] => (one.to_string(), Some(color(one))),
        [(_, one), (_, other), ..] if one.to_string() == other.to_string() => {
            (one.to_string(), Some(color(one)))
        }
        [(word, one), (other_word, other), ..] => {
            let worse = if one.known() == Some(true) { other } else { one };
            (format!("{word} {one}, {other_word} {other}"), Some(color(worse)))
        }
    }
}

fn held(holder: &Holder, full: bool) -> String {
    match holder {
        Holder::Hook => "hook".to_owned(),
        Holder::Pinned { link, path } if full => format!("link {link}, {path}"),
        Holder::Unpinned { link } if full => format!("link {link}, not pinned"),
        Holder::Pinned { .. } => "pin".to_owned(),
        Holder::Unpinned { .. } => "link".to_owned(),
    }
}

/// What could not be read, or not in full.
fn not_told(evidence: &Evidence) -> Vec<String> {
    evidence
        .sources
        .iter()
        .filter(|source| matches!(source.status, SourceStatus::Failed | SourceStatus::Partial))
        .map(|source| match &source.reason {
            Some(reason) => format!("{}: {reason}", source.what),
            None => source.what.clone(),
        })
        .collect()
}

/// Little space between columns, and names that are not cut.
fn finish(table: &mut Table) {
    for column in table.column_iter_mut() {
        column.set_padding((0, 1));
    }
    if let Some(program) = table.column_mut(2) {
        program.set_constraint(ColumnConstraint::LowerBoundary(Width::Fixed(NAME)));
    }
    if let Some(id) = table.column_mut(3) {
        id.set_constraint(ColumnConstraint::ContentWidth);
    }
}

fn print(table: &Table, out: &mut dyn Write) -> io::Result<()> {
    for line in table.lines() {
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

fn header(titles: &[&str], out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "| {} |", titles.join(" | "))?;
    writeln!(out, "|{}", " --- |".repeat(titles.len()))
}

fn line<const N: usize>(cells: [String; N], out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "| {} |", cells.map(|cell| escape(&cell)).join(" | "))
}
