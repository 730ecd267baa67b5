//! A report on manifests, in every form.

use std::io::{self, Write};

use comfy_table::{Cell, Color};
use serde_json::json;

use super::{
    annotations::{self, Annotation},
    junit::{self, Case, Status, Suite},
    markdown::escape,
    table::{Style, new_table, print},
};
use crate::{
    judge::{FindingId, Severity},
    lint::{Answer, Judged, Report, State},
};

fn policies(judged: &Judged) -> String {
    if judged.announced_by.is_empty() { "-".to_owned() } else { judged.announced_by.join(", ") }
}

impl Report {
    /// Writes it for a terminal.
    ///
    /// # Errors
    /// The error of the writer.
    pub fn write_table(&self, style: Style, out: &mut (impl Write + ?Sized)) -> io::Result<()> {
        writeln!(out, "{}", self.sentence)?;
        if style.quiet {
            return Ok(());
        }
        if !self.services.is_empty() {
            writeln!(out)?;
            let mut table = new_table(style);
            table.set_header(["SERVICE", "POLICY", "ANNOUNCED BY", "STATE", "WHY"]);
            for judged in &self.services {
                let state = Cell::new(judged.state.as_str());
                table.add_row([
                    Cell::new(&judged.service),
                    Cell::new(&judged.external_traffic_policy),
                    Cell::new(policies(judged)),
                    match judged.state {
                        State::Flagged => state.fg(Color::Red),
                        State::Unknown => state.fg(Color::Yellow),
                        State::NotAnnounced => state.fg(Color::DarkGrey),
                        State::Good => state,
                    },
                    Cell::new(&judged.why),
                ]);
            }
            print(&table, out)?;
        }
        for finding in &self.findings {
            writeln!(out, "\n{} {}  {}", finding.severity, finding.id, finding.location)?;
            writeln!(out, "  seen   {}", finding.seen)?;
            writeln!(out, "  means  {}", finding.meaning)?;
            writeln!(out, "  next   {}", finding.next)?;
        }
        if !self.not_judged.is_empty() {
            writeln!(out, "\nNot judged:")?;
            for line in &self.not_judged {
                writeln!(out, "  {line}")?;
            }
        }
        Ok(())
    }

    /// Writes it as JSON.
    ///
    /// # Errors
    /// The error of the writer.
    pub fn write_json(&self, out: &mut (impl Write + ?Sized)) -> io::Result<()> {
        serde_json::to_writer_pretty(&mut *out, self)?;
        out.write_all(b"\n")
    }

    /// Writes it as Markdown.
    ///
    /// # Errors
    /// The error of the writer.
    pub fn write_markdown(&self, out: &mut (impl Write + ?Sized)) -> io::Result<()> {
        writeln!(out, "# Announced Services and their backends\n")?;
        writeln!(out, "**{}**\n", escape(&self.sentence))?;
        writeln!(
            out,
            "{} files, {} announcing policies. Established from the manifests alone: no control, \
             nothing was applied.\n",
            self.files, self.policies
        )?;
        if !self.services.is_empty() {
            writeln!(
                out,
                "| Service | Where | externalTrafficPolicy | Announced by | Addresses | State | Why |"
            )?;
            writeln!(out, "| --- | --- | --- | --- | --- | --- | --- |")?;
            for judged in &self.services {
                writeln!(
                    out,
                    "| {} | {} | {} | {} | {} | {} | {} |",
                    escape(&judged.service),
                    escape(&judged.location.to_string()),
                    escape(&judged.external_traffic_policy),
                    escape(&policies(judged)),
                    escape(&judged.addresses.join("; ")),
                    judged.state.as_str(),
                    escape(&judged.why)
                )?;
            }
            writeln!(out)?;
        }
        if !self.findings.is_empty() {
            writeln!(out, "## Findings\n")?;
            for finding in &self.findings {
                writeln!(
                    out,
                    "- **{}** `{}` at {}: {}. {}. Next: {}.",
                    finding.severity,
                    finding.id,
                    escape(&finding.location.to_string()),
                    escape(&finding.seen),
                    escape(&finding.meaning),
                    escape(&finding.next)
                )?;
            }
            writeln!(out)?;
        }
        if !self.not_judged.is_empty() {
            writeln!(out, "## Not judged\n")?;
            for line in &self.not_judged {
                writeln!(out, "- {}", escape(line))?;
            }
        }
        Ok(())
    }

    /// Writes it as `JUnit` XML: one case for each Service, and one for the rule.
    ///
    /// # Errors
    /// The error of the writer.
    pub fn write_junit(&self, out: &mut (impl Write + ?Sized)) -> io::Result<()> {
        let id = FindingId::AnnouncedNoLocalBackend.as_str();
        let mut cases: Vec<Case> = self
            .services
            .iter()
            .map(|judged| Case {
                class: id.to_owned(),
                name: judged.service.clone(),
                status: match judged.state {
                    State::Good => Status::Passed,
                    State::NotAnnounced => Status::Skipped(judged.why.clone()),
                    State::Flagged | State::Unknown => {
                        let finding =
                            self.findings.iter().find(|one| one.service == judged.service);
                        Status::Failed {
                            message: judged.why.clone(),
                            kind: id.to_owned(),
                            text: finding.map_or_else(
                                || judged.why.clone(),
                                |one| format!("{}. {}. Next: {}.", one.seen, one.meaning, one.next),
                            ),
                        }
                    }
                },
                location: Some((judged.location.path.clone(), judged.location.line)),
            })
            .collect();
        cases.push(Case {
            class: "lint".to_owned(),
            name: "something is announced".to_owned(),
            status: if self.answer == Answer::Unknown {
                Status::Failed {
                    message: self.sentence.clone(),
                    kind: "cannot-tell".to_owned(),
                    text: self.not_judged.join("\n"),
                }
            } else {
                Status::Passed
            },
            location: None,
        });
        let suite = Suite {
            name: "inspect lint".to_owned(),
            hostname: None,
            timestamp: None,
            properties: vec![("sentence".to_owned(), self.sentence.clone())],
            cases,
        };
        junit::write(&[suite], out)
    }

    /// Writes it as workflow commands.
    ///
    /// # Errors
    /// The error of the writer.
    pub fn write_annotations(&self, out: &mut (impl Write + ?Sized)) -> io::Result<()> {
        let mut all: Vec<Annotation> = self
            .findings
            .iter()
            .map(|finding| Annotation {
                severity: finding.severity,
                title: format!("{}: {}", finding.id, finding.service),
                message: format!("{}. {}. Next: {}.", finding.seen, finding.meaning, finding.next),
                location: Some((finding.location.path.clone(), finding.location.line)),
            })
            .collect();
        let severity = match self.answer {
            Answer::Yes => Severity::Note,
            Answer::No | Answer::Unknown => Severity::Error,
        };
        all.push(Annotation {
            severity,
            title: "inspect lint".to_owned(),
            message: self.sentence.clone(),
            location: None,
        });
        annotations::write(&all, out)
    }

    /// Writes it as SARIF 2.1.0, for code review.
    ///
    /// # Errors
    /// The error of the writer.
    pub fn write_sarif(&self, out: &mut (impl Write + ?Sized)) -> io::Result<()> {
        let id = FindingId::AnnouncedNoLocalBackend;
        let results: Vec<_> = self
            .findings
            .iter()
            .map(|finding| {
                json!({
                    "ruleId": finding.id.as_str(),
                    "ruleIndex": 0,
                    "level": level(finding.severity),
                    "message": {
                        "text": format!("{}. {}. Next: {}.", finding.seen, finding.meaning, finding.next),
                    },
                    "locations": [{
                        "physicalLocation": {
                            "artifactLocation": { "uri": uri(&finding.location.path) },
                            "region": { "startLine": finding.location.line },
                        },
                        "logicalLocations": [{ "fullyQualifiedName": finding.service }],
                    }],
                    // The same Service is the same result although lines moved.
                    "partialFingerprints": {
                        "service/v1": format!("{}:{}", finding.id, finding.service),
                    },
                })
            })
            .collect();
        let notifications: Vec<_> = self
            .not_judged
            .iter()
            .map(|line| json!({ "level": "note", "message": { "text": line } }))
            .chain(
                (self.answer == Answer::Unknown)
                    .then(|| json!({ "level": "error", "message": { "text": self.sentence } })),
            )
            .collect();
        let document = json!({
            "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
            "version": "2.1.0",
            "runs": [{
                "tool": { "driver": {
                    "name": "inspect",
                    "version": env!("CARGO_PKG_VERSION"),
                    "rules": [{
                        "id": id.as_str(),
                        "shortDescription": {
                            "text": "An announced Service with externalTrafficPolicy Local needs a \
                                     backend on every node that may announce it",
                        },
                        "defaultConfiguration": { "level": level(id.severity()) },
                    }],
                } },
                "invocations": [{
                    "executionSuccessful": self.answer != Answer::Unknown,
                    "toolExecutionNotifications": notifications,
                }],
                "results": results,
            }],
        });
        serde_json::to_writer_pretty(&mut *out, &document)?;
        out.write_all(b"\n")
    }
}

fn level(severity: Severity) -> &'static str {
    match severity {
        Severity::Error => "error",
        Severity::Warning => "warning",
        Severity::Note => "note",
    }
}

/// A path as a relative reference of a URI.
fn uri(path: &str) -> String {
    use std::fmt::Write as _;
    let mut uri = String::new();
    for byte in path.trim_start_matches("./").bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                uri.push(char::from(byte));
            }
            // Writing to a string cannot fail.
            other => drop(write!(uri, "%{other:02X}")),
        }
    }
    uri
}
