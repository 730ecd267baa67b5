//! A judgement as one page: a decision record that needs nothing but itself. No script, no network;
//! light and dark as the reader has it; narrow screens too. It is well-formed XML as well.

use std::io::{self, Write};

use super::{
    injection,
    markdown::{claim_of, control_of},
    picture::{svg, xml},
    table::{announced, details, served, slots},
};
use crate::judge::{
    Judgement, Served, Severity,
    expect::{Checked, Met},
    programmed::Programmed,
};

const STYLE: &str = "\
:root{color-scheme:light dark;--ink:#1a1a1a;--paper:#fff;--soft:#f4f4f4;--line:#c9c9c9;--good:#1a7f37;\
--bad:#b42318;--warn:#8a6100}\
@media(prefers-color-scheme:dark){:root{--ink:#ececec;--paper:#161616;--soft:#222;--line:#4a4a4a;\
--good:#4cc26a;--bad:#ff8a7e;--warn:#e0b23e}}\
*{box-sizing:border-box}body{margin:0 auto;padding:1rem;max-width:72rem;background:var(--paper);\
color:var(--ink);font:1rem/1.5 system-ui,sans-serif;overflow-wrap:break-word}\
h1{font-size:1.5rem}h2{font-size:1.2rem;margin-top:2rem}\
.sentence{font-size:1.1rem;font-weight:600;border-left:.4rem solid var(--line);padding-left:.8rem}\
.yes{border-color:var(--good)}.no{border-color:var(--bad)}.partly,.unknown{border-color:var(--warn)}\
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%}\
th,td{text-align:left;vertical-align:top;padding:.35rem .6rem;border-bottom:1px solid var(--line)}\
th{background:var(--soft)}th,td{white-space:nowrap}td:last-child{white-space:normal;min-width:18rem}\
code{background:var(--soft);padding:0 .2rem;overflow-wrap:anywhere}\
.error{color:var(--bad)}.warning{color:var(--warn)}.ok{color:var(--good)}svg{max-width:none}\
dt{font-weight:600}dd{margin:0 0 .5rem}\
@media(max-width:40rem){body{padding:.6rem}thead{display:none}tr{display:block;padding:.5rem 0;\
border-bottom:1px solid var(--line)}td,td:last-child{display:block;white-space:normal;min-width:0;\
padding:.1rem 0;border:0}td::before{content:attr(data-label) \": \";font-weight:600}}\
@media print{body{max-width:none}}";

/// Writes a table; the cells are text.
fn table(
    header: &[&str],
    rows: impl IntoIterator<Item = Vec<String>>,
    out: &mut (impl Write + ?Sized),
) -> io::Result<()> {
    write!(out, "<div class=\"scroll\"><table><thead><tr>")?;
    for cell in header {
        write!(out, "<th>{cell}</th>")?;
    }
    writeln!(out, "</tr></thead><tbody>")?;
    for row in rows {
        write!(out, "<tr>")?;
        for (name, cell) in header.iter().zip(row) {
            // On a narrow screen the cells stand below each other, each with its name.
            write!(out, "<td data-label=\"{name}\">{}</td>", xml(&cell))?;
        }
        writeln!(out, "</tr>")?;
    }
    writeln!(out, "</tbody></table></div>")
}

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
    let class = match verdict.served {
        Served::Yes => "yes",
        Served::No => "no",
        Served::Partly => "partly",
        Served::Unknown => "unknown",
    };
    let title = format!("{vip} on {node}");
    let title = xml(&title);
    writeln!(out, "<!DOCTYPE html>")?;
    writeln!(
        out,
        "<html xmlns=\"http://www.w3.org/1999/xhtml\" lang=\"en\"><head><meta charset=\"utf-8\"/>\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/><title>{title}\
         </title><style>{STYLE}</style></head><body>"
    )?;
    writeln!(out, "<h1>{title}</h1>")?;
    writeln!(out, "<p id=\"sentence\" class=\"sentence {class}\">{}</p>", xml(&verdict.sentence))?;
    writeln!(out, "<h2>Claim, proof, control</h2><dl>")?;
    for (name, text) in [
        ("Claim", claim_of(judgement, expectations)),
        ("Verdict", format!("served: {}", verdict.served)),
        ("Control", control_of(judgement)),
        ("Collected", format!("{collected}; maps as of Cilium {}", programmed.release)),
        ("Announced here", announced(&programmed.announcement)),
    ] {
        writeln!(out, "<dt>{name}</dt><dd>{}</dd>", xml(&text))?;
    }
    writeln!(out, "<dt>Evidence SHA-256</dt><dd><code>{}</code></dd></dl>", xml(sha256))?;
    if !verdict.paths.is_empty() {
        writeln!(out, "<section id=\"paths\"><h2>Paths</h2>")?;
        let rows = verdict.paths.iter().map(|path| {
            vec![
                path.frontend.clone(),
                path.path.clone(),
                path.outcome.to_string(),
                served(path),
                path.grade.to_string(),
                path.why.join("; "),
            ]
        });
        table(&["Frontend", "Path", "Outcome", "Served", "Proof", "Why"], rows, out)?;
        writeln!(out, "</section><h2>The packet's way</h2><div class=\"scroll\">")?;
        writeln!(out, "{}</div>", svg(judgement))?;
    }
    let injected = injection::rows(judgement);
    if !injected.is_empty() {
        writeln!(out, "<section id=\"injected\"><h2>Injected</h2>")?;
        table(&["Frontend", "Path", "Packet", "Came to"], injected, out)?;
        writeln!(out, "</section>")?;
    }
    if !verdict.findings.is_empty() {
        writeln!(out, "<section id=\"findings\"><h2>Findings</h2>")?;
        for finding in &verdict.findings {
            let class = match finding.severity {
                Severity::Error => "error",
                Severity::Warning => "warning",
                Severity::Note => "note",
            };
            writeln!(
                out,
                "<article data-id=\"{id}\" data-severity=\"{class}\"><h3><span class=\"{class}\">\
                 {class}</span> <code>{id}</code></h3><p class=\"seen\">{}</p><p>{}</p><p>Next: {}\
                 </p></article>",
                xml(&finding.seen),
                xml(&finding.meaning),
                xml(&finding.next),
                id = finding.id
            )?;
        }
        writeln!(out, "</section>")?;
    }
    if !expectations.is_empty() {
        writeln!(out, "<section id=\"expectations\"><h2>Expectations</h2>")?;
        let rows = expectations.iter().map(|checked| {
            let met = match checked.met {
                Met::Yes => "met",
                Met::No => "not met",
                Met::Unknown => "cannot be told",
            };
            vec![checked.name(), met.to_owned(), checked.why.clone().unwrap_or_default()]
        });
        table(&["Claim", "Result", "Why"], rows, out)?;
        writeln!(out, "</section>")?;
    }
    write_programmed(programmed, out)?;
    if !not_measured.is_empty() {
        writeln!(out, "<h2>Not measured</h2><ul>")?;
        for line in not_measured {
            writeln!(out, "<li>{}</li>", xml(line))?;
        }
        writeln!(out, "</ul>")?;
    }
    writeln!(out, "</body></html>")
}

fn write_programmed(programmed: &Programmed, out: &mut (impl Write + ?Sized)) -> io::Result<()> {
    if programmed.frontends.is_empty() {
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
    table(&["Frontend, backend", "State"], rows, out)
}
