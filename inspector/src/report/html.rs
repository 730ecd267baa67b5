//! A judgement as one page: a decision record that needs nothing but itself.

use std::io::{self, Write};

use super::{
    injection,
    markdown::{claim_of, control_of},
    page,
    picture::xml,
    table::{announced, details, slots},
    timeline,
};
use crate::judge::{
    Judgement, PathVerdict, SimulationSummary, cluster::Cluster, expect::Checked,
    programmed::Programmed,
};

/// Writes a judgement; `sha256` is that of the evidence it rests on.
///
/// # Errors
/// The error of the writer.
pub fn write(
    judgement: &Judgement,
    expectations: &[Checked],
    sha256: &str,
    out: &mut (impl Write + ?Sized),
) -> io::Result<()> {
    let Judgement { vip, node, collected, verdict, programmed, not_measured, .. } = judgement;
    page::begin(&format!("{vip} on {node}"), (verdict.served, &verdict.sentence), out)?;
    writeln!(out, "<h2>Claim, proof, control</h2>")?;
    let rows = [
        ("Claim", claim_of(judgement, expectations)),
        ("Verdict", format!("served: {}", verdict.served)),
        ("Control", control_of(judgement)),
        ("Collected", format!("{collected}; maps as of Cilium {}", programmed.release)),
        ("Announced here", announced(&programmed.announcement)),
        ("Evidence SHA-256", sha256.to_owned()),
    ];
    page::list(rows, out)?;
    if !verdict.paths.is_empty() {
        writeln!(out, "<section id=\"paths\"><h2>Paths</h2>")?;
        page::paths(judgement, out)?;
        writeln!(out, "</section><h2>The packet's way</h2>")?;
        page::ways(judgement, out)?;
    }
    if let Some(observed) = &judgement.observed {
        timeline::write(observed, out)?;
    }
    if let Some(simulation) = &judgement.simulation {
        write_simulated(&verdict.paths, simulation, out)?;
    }
    write_injected(judgement, out)?;
    page::findings(&verdict.findings, out)?;
    page::expectations(expectations, out)?;
    write_programmed(programmed, out)?;
    page::not_measured(not_measured, out)?;
    page::end(out)
}

impl Cluster {
    /// Writes it as a page; `hashes` are those of the evidence, one for each node.
    ///
    /// # Errors
    /// The error of the writer.
    pub fn write_html(&self, hashes: &[String], out: &mut (impl Write + ?Sized)) -> io::Result<()> {
        let title = format!("{} on {} nodes", self.vip, self.nodes.len());
        page::begin(&title, (self.served, &self.sentence), out)?;
        let announcers = if self.announcers.is_empty() {
            "no node".to_owned()
        } else {
            self.announcers.join(", ")
        };
        let rows = [
            ("Claim", format!("clients of {} are served", self.vip)),
            ("Verdict", format!("served: {}", self.served)),
            ("Announced by", announcers),
        ];
        page::list(rows, out)?;
        page::expectations(&self.expectations, out)?;
        page::findings(&self.findings, out)?;
        writeln!(out, "<section id=\"nodes\"><h2>Nodes</h2>")?;
        let header = ["Node", "Announces", "Frontend", "Path", "Outcome", "Served"];
        page::table(&header, self.rows().into_iter().map(|(_, row, _)| row.to_vec()), out)?;
        writeln!(out, "</section><h2>Evidence</h2>")?;
        let rows = self.nodes.iter().enumerate().map(|(index, node)| {
            let hash = hashes.get(index).cloned().unwrap_or_default();
            vec![node.name.clone(), node.judgement.collected.clone(), hash]
        });
        page::table(&["Node", "Collected", "SHA-256"], rows, out)?;
        for node in &self.nodes {
            let judgement = &node.judgement;
            writeln!(
                out,
                "<details open=\"open\"><summary><b>{}</b>: {}</summary>",
                xml(&node.name),
                xml(&judgement.verdict.sentence)
            )?;
            if !judgement.verdict.paths.is_empty() {
                page::paths(judgement, out)?;
                writeln!(out, "<h3>The packet's way</h3>")?;
                page::ways(judgement, out)?;
            }
            if let Some(observed) = &judgement.observed {
                timeline::write(observed, out)?;
            }
            writeln!(out, "</details>")?;
        }
        page::not_measured(&self.not_measured, out)?;
        page::end(out)
    }
}

/// What simulated packets came to, with their controls, and what they left.
fn write_simulated(
    paths: &[PathVerdict],
    simulation: &SimulationSummary,
    out: &mut (impl Write + ?Sized),
) -> io::Result<()> {
    writeln!(
        out,
        "<section id=\"simulated\"><h2>Simulated</h2><p>{}.</p>",
        xml(&simulation.to_string())
    )?;
    if !simulation.not_simulated.is_empty() {
        writeln!(out, "<ul>")?;
        for line in &simulation.not_simulated {
            let line = line.strip_prefix("simulation of ").unwrap_or(line);
            writeln!(out, "<li>Not: {}</li>", xml(line))?;
        }
        writeln!(out, "</ul>")?;
    }
    let rows: Vec<Vec<String>> = paths
        .iter()
        .filter_map(|path| {
            let one = path.simulated.as_ref()?;
            let control = &one.control;
            let failed = if control.good { "" } else { ": failed, no proof" };
            Some(vec![
                path.frontend.clone(),
                path.path.clone(),
                format!("{} from {}", one.packets, one.source),
                one.came(),
                format!("to {}: {}{failed}", control.destination, control.result),
            ])
        })
        .collect();
    if !rows.is_empty() {
        page::table(&["Frontend", "Path", "Packets", "Came to", "Control"], rows, out)?;
    }
    writeln!(out, "</section>")
}

/// What packets came to that were made to arrive, and each as a timeline.
fn write_injected(judgement: &Judgement, out: &mut (impl Write + ?Sized)) -> io::Result<()> {
    let injected = injection::rows(judgement);
    if injected.is_empty() {
        return Ok(());
    }
    writeln!(out, "<section id=\"injected\"><h2>Injected</h2>")?;
    page::table(&["Frontend", "Path", "Packet", "Came to"], injected, out)?;
    for path in &judgement.verdict.paths {
        if let Some(one) = path.injected.as_ref().and_then(|one| one.conclusion.as_ref()) {
            timeline::journey(one, out)?;
        }
    }
    writeln!(out, "</section>")
}

fn write_programmed(programmed: &Programmed, out: &mut (impl Write + ?Sized)) -> io::Result<()> {
    if programmed.frontends.is_empty() && programmed.wildcards.is_empty() {
        return Ok(());
    }
    writeln!(out, "<h2>Programmed</h2>")?;
    let mut rows = Vec::new();
    for frontend in programmed.frontends.iter().chain(&programmed.wildcards) {
        rows.push(vec![frontend.frontend.clone(), details(frontend)]);
        for (slots, backend) in slots(frontend) {
            let address = backend.address.as_deref().unwrap_or("nothing");
            rows.push(vec![
                format!("slot {slots}: {address}"),
                format!("{}; {}", backend.state, backend.location),
            ]);
        }
    }
    page::table(&["Frontend, backend", "State"], rows, out)
}
