//! A judgement over several nodes, and the differences between two pieces of evidence, in every
//! form.

use std::io::{self, Write};

use comfy_table::{Cell, Color};
use serde_json::json;

use super::{
    annotations::{self, Annotation},
    ci,
    junit::{self, Case, Status, Suite},
    markdown::{self, escape},
    table::{self, Style, new_table, print, write_expectations, write_findings},
};
use crate::judge::{
    FindingId, Served, Severity,
    cluster::{Cluster, NodeView},
    diff::Change,
};

fn announces(node: &NodeView) -> String {
    let announcement = &node.judgement.programmed.announcement;
    let devices: Vec<&str> =
        announcement.entries.iter().filter_map(|entry| entry.device.as_deref()).collect();
    match (node.announces, devices.is_empty()) {
        (true, true) => "yes".to_owned(),
        (true, false) => devices.join(", "),
        (false, _) if !announcement.entries.is_empty() => "silent".to_owned(),
        (false, _) => "no".to_owned(),
    }
}

impl Cluster {
    /// The matrix: node, whether it announces, frontend, path, outcome, served.
    pub(super) fn rows(&self) -> Vec<(&NodeView, [String; 6], Served)> {
        let mut rows = Vec::new();
        for node in &self.nodes {
            let paths = &node.judgement.verdict.paths;
            if paths.is_empty() {
                let served = node.judgement.verdict.served;
                let row = [
                    node.name.clone(),
                    announces(node),
                    "-".to_owned(),
                    "-".to_owned(),
                    "-".to_owned(),
                    served.to_string(),
                ];
                rows.push((node, row, served));
            }
            for path in paths {
                let row = [
                    node.name.clone(),
                    announces(node),
                    path.frontend.clone(),
                    path.path.clone(),
                    path.outcome.to_string(),
                    table::served(path),
                ];
                rows.push((node, row, path.served));
            }
        }
        rows
    }

    /// Writes it for a terminal.
    ///
    /// # Errors
    /// The error of the writer.
    pub fn write_table(&self, style: Style, out: &mut (impl Write + ?Sized)) -> io::Result<()> {
        writeln!(out, "{}", self.sentence)?;
        if style.quiet {
            return write_expectations(&self.expectations, style, out);
        }
        writeln!(out, "\n{} on {} nodes", self.vip, self.nodes.len())?;
        let mut matrix = new_table(style);
        matrix.set_header(["NODE", "ANNOUNCES", "FRONTEND", "PATH", "OUTCOME", "SERVED"]);
        let mut before = "";
        for (node, mut row, served) in self.rows() {
            if before == node.name {
                row[0].clear();
                row[1].clear();
            }
            before = &node.name;
            let last = Cell::new(&row[5]).fg(match served {
                Served::Yes => Color::Green,
                Served::No => Color::Red,
                Served::Partly | Served::Unknown => Color::Yellow,
            });
            let mut cells: Vec<Cell> = row[..5].iter().map(Cell::new).collect();
            cells.push(last);
            matrix.add_row(cells);
        }
        writeln!(out)?;
        print(&matrix, out)?;
        writeln!(out)?;
        for node in &self.nodes {
            writeln!(out, "{}: {}", node.name, node.judgement.verdict.sentence)?;
        }
        if !self.findings.is_empty() {
            writeln!(out)?;
            write_findings(&self.findings, style, out)?;
        }
        write_expectations(&self.expectations, style, out)?;
        if style.verbose && !self.not_measured.is_empty() {
            writeln!(out, "\nNot measured:")?;
            for line in &self.not_measured {
                writeln!(out, "  {line}")?;
            }
        }
        Ok(())
    }

    /// Writes it as Markdown; `hashes` are those of the evidence, one for each node.
    ///
    /// # Errors
    /// The error of the writer.
    pub fn write_markdown(
        &self,
        hashes: &[String],
        out: &mut (impl Write + ?Sized),
    ) -> io::Result<()> {
        writeln!(out, "# {} on {} nodes\n", self.vip, self.nodes.len())?;
        writeln!(out, "**{}**\n", escape(&self.sentence))?;
        let announcers = if self.announcers.is_empty() {
            "no node".to_owned()
        } else {
            self.announcers.join(", ")
        };
        writeln!(out, "Served: {}. Announced by: {}.\n", self.served, escape(&announcers))?;
        writeln!(out, "## Nodes\n")?;
        writeln!(out, "| Node | Announces | Frontend | Path | Outcome | Served |")?;
        writeln!(out, "| --- | --- | --- | --- | --- | --- |")?;
        for (_, row, _) in self.rows() {
            writeln!(out, "| {} |", row.map(|cell| escape(&cell)).join(" | "))?;
        }
        writeln!(
            out,
            "\n| Node | Collected | Says | Evidence SHA-256 |\n| --- | --- | --- | --- |"
        )?;
        for (index, node) in self.nodes.iter().enumerate() {
            writeln!(
                out,
                "| {} | {} | {} | `{}` |",
                escape(&node.name),
                node.judgement.collected,
                escape(&node.judgement.verdict.sentence),
                hashes.get(index).map_or("", String::as_str)
            )?;
        }
        if !self.findings.is_empty() {
            writeln!(out, "\n## Findings\n")?;
            for finding in &self.findings {
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
        }
        if !self.expectations.is_empty() {
            writeln!(out)?;
            markdown::write_expectations(&self.expectations, out)?;
        }
        if !self.not_measured.is_empty() {
            writeln!(out, "\n## Not measured\n")?;
            for line in &self.not_measured {
                writeln!(out, "- {}", escape(line))?;
            }
        }
        Ok(())
    }

    /// Its suites: one for the nodes together, one for each node.
    #[must_use]
    pub fn suites(&self, hashes: &[String]) -> Vec<Suite> {
        let vip = &self.vip;
        let case = |class: &str, name: String, status: Status| Case {
            class: format!("{vip}.{class}"),
            name,
            status,
            location: None,
        };
        let failed = |message: &str, kind: &str, text: String| Status::Failed {
            message: message.to_owned(),
            kind: kind.to_owned(),
            text,
        };
        // Where claims are given they alone decide.
        let by_claims = !self.expectations.is_empty();
        let verdict = match self.served {
            Served::Yes => Status::Passed,
            _ if by_claims => Status::Skipped(self.sentence.clone()),
            Served::Unknown => failed(&self.sentence, "cannot-tell", self.sentence.clone()),
            _ => failed(&self.sentence, "not-served", self.sentence.clone()),
        };
        let mut cases = vec![case("cluster", "served".to_owned(), verdict)];
        for id in FindingId::OF_SEVERAL_NODES {
            let found: Vec<_> = self.findings.iter().filter(|one| one.id == *id).collect();
            let said = |separator: &str| {
                let all: Vec<String> = found
                    .iter()
                    .map(|one| format!("{}. {}. Next: {}.", one.seen, one.meaning, one.next))
                    .collect();
                all.join(separator)
            };
            let status = match found.first() {
                None => Status::Passed,
                Some(first) if first.severity == Severity::Error && !by_claims => {
                    failed(&first.seen, id.as_str(), said("\n"))
                }
                Some(first) => Status::Skipped(format!("{}: {}", first.severity, said(" "))),
            };
            cases.push(case("cluster.findings", id.to_string(), status));
        }
        for checked in &self.expectations {
            cases.push(case("cluster.expect", checked.name(), ci::of_claim(checked)));
        }
        let together = Suite {
            name: format!("inspect evidence merge {vip}"),
            hostname: None,
            timestamp: None,
            properties: vec![
                ("sentence".to_owned(), self.sentence.clone()),
                ("announcers".to_owned(), self.announcers.join(", ")),
            ],
            cases,
        };
        let mut suites = vec![together];
        for (index, node) in self.nodes.iter().enumerate() {
            let hash = hashes.get(index).map_or("", String::as_str);
            let mut suite = ci::suite(&node.judgement, &[], hash);
            suite.name = format!("{} on {}", suite.name, node.name);
            suite.hostname = Some(node.name.clone());
            for case in &mut suite.cases {
                case.class = format!("{}.{}", node.name, case.class);
                // Of a node that need not serve it, this is no failure of the cluster.
                if let Status::Failed { message, .. } = &case.status {
                    if by_claims {
                        case.status = Status::Skipped(message.clone());
                    } else if self.served == Served::Yes {
                        case.status = Status::Skipped(format!("not the announcer: {message}"));
                    }
                }
            }
            suites.push(suite);
        }
        suites
    }

    /// Writes it as `JUnit` XML.
    ///
    /// # Errors
    /// The error of the writer.
    pub fn write_junit(
        &self,
        hashes: &[String],
        out: &mut (impl Write + ?Sized),
    ) -> io::Result<()> {
        junit::write(&self.suites(hashes), out)
    }

    /// Writes it as workflow commands.
    ///
    /// # Errors
    /// The error of the writer.
    pub fn write_annotations(&self, out: &mut (impl Write + ?Sized)) -> io::Result<()> {
        let place = format!("{} on {} nodes", self.vip, self.nodes.len());
        let by_claims = !self.expectations.is_empty();
        let mut all = vec![Annotation {
            severity: if self.served == Served::Yes || by_claims {
                Severity::Note
            } else {
                Severity::Error
            },
            title: place.clone(),
            message: self.sentence.clone(),
            location: None,
        }];
        all.extend(self.nodes.iter().map(|node| Annotation {
            severity: Severity::Note,
            title: format!("{} on {}", self.vip, node.name),
            message: node.judgement.verdict.sentence.clone(),
            location: None,
        }));
        all.extend(self.findings.iter().map(|finding| Annotation {
            severity: if by_claims { Severity::Note } else { finding.severity },
            title: format!("{}: {place}", finding.id),
            message: format!("{}. {}. Next: {}.", finding.seen, finding.meaning, finding.next),
            location: None,
        }));
        all.extend(ci::of_claims(&self.expectations, &place));
        annotations::write(&all, out)
    }
}

/// The changes, grouped by VIP and part, in their order.
fn groups(changes: &[Change]) -> Vec<(&str, &str, Vec<&Change>)> {
    let mut groups: Vec<(&str, &str, Vec<&Change>)> = Vec::new();
    for change in changes {
        match groups.last_mut() {
            Some((vip, part, list)) if *vip == change.vip && *part == change.part => {
                list.push(change);
            }
            _ => groups.push((&change.vip, &change.part, vec![change])),
        }
    }
    groups
}

/// Writes differences for a terminal.
///
/// # Errors
/// The error of the writer.
pub fn write_changes(changes: &[Change], out: &mut (impl Write + ?Sized)) -> io::Result<()> {
    if changes.is_empty() {
        return writeln!(out, "no difference");
    }
    let mut before = "";
    for (vip, part, list) in groups(changes) {
        if vip != before {
            writeln!(out, "{vip}")?;
            before = vip;
        }
        writeln!(out, "  {part}")?;
        for change in list {
            writeln!(out, "    {change}")?;
        }
    }
    Ok(())
}

/// Writes differences as Markdown.
///
/// # Errors
/// The error of the writer.
pub fn write_changes_markdown(
    changes: &[Change],
    out: &mut (impl Write + ?Sized),
) -> io::Result<()> {
    if changes.is_empty() {
        return writeln!(out, "No difference.");
    }
    writeln!(out, "| VIP | Where | What | Before | After |\n| --- | --- | --- | --- | --- |")?;
    let side = |value: &Option<String>| match value.as_deref() {
        None => "-".to_owned(),
        Some("") => "there".to_owned(),
        Some(value) => escape(value),
    };
    for change in changes {
        writeln!(
            out,
            "| {} | {} | {} | {} | {} |",
            escape(&change.vip),
            escape(&change.part),
            escape(&change.what),
            side(&change.before),
            side(&change.after)
        )?;
    }
    Ok(())
}

/// Writes differences as JSON.
///
/// # Errors
/// The error of the writer.
pub fn write_changes_json(changes: &[Change], out: &mut (impl Write + ?Sized)) -> io::Result<()> {
    let document = json!({
        "schema": "inspector.diff/1",
        "same": changes.is_empty(),
        "changes": changes,
    });
    serde_json::to_writer_pretty(&mut *out, &document)?;
    out.write_all(b"\n")
}
