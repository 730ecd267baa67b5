//! What the pages for a browser are made of: head and style, tables, findings, claims. No script, no
//! network: the page itself forbids both. Light and dark as the reader has it, narrow screens too. A
//! page is well-formed XML as well.

use std::io::{self, Write};

use super::{
    picture::{self, xml},
    table::served,
};
use crate::judge::{
    Finding, Judgement, Served, Severity,
    expect::{Checked, Met},
};

const STYLE: &str = "\
:root{color-scheme:light dark;--ink:#1a1a1a;--paper:#fff;--soft:#f4f4f4;--line:#c9c9c9;--good:#1a7f37;\
--bad:#b42318;--warn:#8a6100;--quiet:#595959}\
@media(prefers-color-scheme:dark){:root{--ink:#ececec;--paper:#161616;--soft:#242424;--line:#4a4a4a;\
--good:#4cc26a;--bad:#ff8a7e;--warn:#e0b23e;--quiet:#b0b0b0}}\
*{box-sizing:border-box}body{margin:0 auto;padding:1rem;max-width:72rem;background:var(--paper);\
color:var(--ink);font:1rem/1.5 system-ui,sans-serif;overflow-wrap:anywhere}\
h1{font-size:1.5rem;line-height:1.25}h2{font-size:1.2rem;margin-top:2rem}h3{font-size:1rem;margin:1rem 0 .3rem}\
p{margin:.3rem 0}.sentence{font-size:1.1rem;font-weight:600;border-left:.4rem solid var(--line);\
padding-left:.8rem;margin:1rem 0}\
.sentence.yes{border-color:var(--good)}.sentence.no{border-color:var(--bad)}\
.sentence.partly,.sentence.unknown{border-color:var(--warn)}\
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%}\
th,td{text-align:left;vertical-align:top;padding:.35rem .6rem;border-bottom:1px solid var(--line);\
overflow-wrap:break-word}th{background:var(--soft);white-space:nowrap}\
td:last-child{overflow-wrap:anywhere}\
code{background:var(--soft);padding:0 .2rem}\
.error{color:var(--bad)}.warning{color:var(--warn)}.ok{color:var(--good)}svg{max-width:none}\
article.finding{border-left:.2rem solid var(--line);padding-left:.8rem;margin:.8rem 0}\
dl{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:.3rem 1rem}dt{font-weight:600}dd{margin:0}\
details{margin:1rem 0;border-top:1px solid var(--line);padding-top:.5rem}summary{cursor:pointer}\
.narrow{display:none}ol.way{list-style:none;margin:.3rem 0 0;padding:0}ol.way li{background:var(--soft);\
border:1px solid var(--line);border-radius:.4rem;padding:.3rem .6rem}\
ol.way li+li{margin-top:1.1rem;position:relative}\
ol.way li+li::before{content:\"\\2193\";position:absolute;top:-1.3rem;left:1rem;color:var(--quiet)}\
ol.way li:last-child{border-color:var(--warn)}ol.way.yes li:last-child{border-color:var(--good)}\
ol.way.no li:last-child{border-color:var(--bad)}.quiet{color:var(--quiet)}\
@media(max-width:48rem){body{padding:.6rem}dl{display:block}dd{margin:0 0 .5rem}thead{display:none}\
table,tbody,tr,td{display:block;width:100%}tr{padding:.5rem 0;border-bottom:1px solid var(--line)}\
td{padding:.1rem 0;border:0;overflow-wrap:anywhere}\
td::before{content:attr(data-label) \": \";font-weight:600}.wide{display:none}.narrow{display:block}}\
@media print{body{max-width:none}}";

/// Says that nothing is loaded and nothing runs.
const POLICY: &str =
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'";

/// The class of an answer.
pub(super) fn class_of(served: Served) -> &'static str {
    match served {
        Served::Yes => "yes",
        Served::No => "no",
        Served::Partly => "partly",
        Served::Unknown => "unknown",
    }
}

/// Begins a page: its title, and the answer in one sentence.
pub(super) fn begin(
    title: &str,
    answer: (Served, &str),
    out: &mut (impl Write + ?Sized),
) -> io::Result<()> {
    let title = xml(title);
    let (answered, sentence) = answer;
    writeln!(out, "<!DOCTYPE html>")?;
    writeln!(
        out,
        "<html xmlns=\"http://www.w3.org/1999/xhtml\" lang=\"en\"><head><meta charset=\"utf-8\"/>\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\"/><meta name=\"viewport\" \
         content=\"width=device-width, initial-scale=1\"/><title>{title}</title><style>{STYLE}{}\
         </style></head><body>",
        super::timeline::STYLE
    )?;
    writeln!(out, "<h1>{title}</h1>")?;
    let class = class_of(answered);
    writeln!(out, "<p id=\"sentence\" class=\"sentence {class}\">{}</p>", xml(sentence))
}

/// Ends a page.
pub(super) fn end(out: &mut (impl Write + ?Sized)) -> io::Result<()> {
    writeln!(out, "</body></html>")
}

/// Writes a table; the cells are text.
pub(super) fn table(
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

/// Writes names and what is said of them.
pub(super) fn list<'l>(
    rows: impl IntoIterator<Item = (&'l str, String)>,
    out: &mut (impl Write + ?Sized),
) -> io::Result<()> {
    writeln!(out, "<dl>")?;
    for (name, text) in rows {
        writeln!(out, "<dt>{name}</dt><dd>{}</dd>", xml(&text))?;
    }
    writeln!(out, "</dl>")
}

/// The paths of one node, and the packet's way on each.
pub(super) fn paths(judgement: &Judgement, out: &mut (impl Write + ?Sized)) -> io::Result<()> {
    let rows = judgement.verdict.paths.iter().map(|path| {
        vec![
            path.frontend.clone(),
            path.path.clone(),
            path.outcome.to_string(),
            served(path),
            path.grade.to_string(),
            path.why.join("; "),
        ]
    });
    table(&["Frontend", "Path", "Outcome", "Served", "Proof", "Why"], rows, out)
}

/// The packet's way on each path: a picture, and on narrow screens the same in words.
pub(super) fn ways(judgement: &Judgement, out: &mut (impl Write + ?Sized)) -> io::Result<()> {
    writeln!(out, "<div class=\"scroll wide\">{}</div>", picture::svg(judgement))?;
    writeln!(out, "<div class=\"narrow\">")?;
    for lane in picture::lanes(judgement) {
        writeln!(out, "<h3>{}</h3>", xml(&lane.title))?;
        write!(out, "<ol class=\"way {}\">", class_of(lane.served))?;
        for station in &lane.stations {
            write!(out, "<li>{}</li>", xml(station))?;
        }
        writeln!(out, "</ol><p class=\"quiet\">{}</p>", xml(&lane.neighbour))?;
    }
    writeln!(out, "</div>")
}

/// What explains the answer, if there is anything.
pub(super) fn findings(findings: &[Finding], out: &mut (impl Write + ?Sized)) -> io::Result<()> {
    if findings.is_empty() {
        return Ok(());
    }
    writeln!(out, "<section id=\"findings\"><h2>Findings</h2>")?;
    for finding in findings {
        let class = match finding.severity {
            Severity::Error => "error",
            Severity::Warning => "warning",
            Severity::Note => "note",
        };
        writeln!(
            out,
            "<article class=\"finding\" data-id=\"{id}\" data-severity=\"{class}\"><h3><span \
             class=\"{class}\">{class}</span> <code>{id}</code></h3><p class=\"seen\">{}</p><p>{}</p>\
             <p>Next: {}</p></article>",
            xml(&finding.seen),
            xml(&finding.meaning),
            xml(&finding.next),
            id = finding.id
        )?;
    }
    writeln!(out, "</section>")
}

/// Claims and what became of them, if there are any.
pub(super) fn expectations(
    expectations: &[Checked],
    out: &mut (impl Write + ?Sized),
) -> io::Result<()> {
    if expectations.is_empty() {
        return Ok(());
    }
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
    writeln!(out, "</section>")
}

/// What was not looked at, if there is anything.
pub(super) fn not_measured(lines: &[String], out: &mut (impl Write + ?Sized)) -> io::Result<()> {
    if lines.is_empty() {
        return Ok(());
    }
    writeln!(out, "<h2>Not measured</h2><ul>")?;
    for line in lines {
        writeln!(out, "<li>{}</li>", xml(line))?;
    }
    writeln!(out, "</ul>")
}
