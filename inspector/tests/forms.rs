//! Every form of output says the same: all of them are made from one evidence, their facts are read
//! back and compared. The evidence is that of the captures, so no root is needed.

mod run;

use std::{collections::BTreeSet, fs};

use inspector::evidence::file::Document;
use inspector_lab::{Capture, evidence::evidence};
use run::{Ran, inspect, run};
use serde_json::Value;
use tempfile::TempDir;

/// Captures and VIPs that differ in what becomes of them.
const CASES: [(&str, &str); 9] = [
    ("v1.21-tcx", "192.168.2.20"),
    ("v1.21-tcx", "192.168.2.21"),
    ("v1.21-tcx", "192.168.2.22"),
    ("v1.21-tcx", "192.168.2.99"),
    ("v1.21-tcx", "fd00:2::20"),
    ("v1.18-wg0-detached", "192.168.2.20"),
    ("v1.18-l7lb", "192.168.2.30"),
    ("v1.13-clsact", "192.168.2.31"),
    ("v1.18-tcx", "192.168.2.24"),
];
const CLAIMS: [&str; 3] = ["served", "announced", "no-finding:announced-no-local-backend"];

/// What a form says.
#[derive(Debug, Default, PartialEq, Eq)]
struct Facts {
    sentence: String,
    /// Frontend, path, outcome, served.
    paths: BTreeSet<[String; 4]>,
    /// Id, severity, what was seen.
    findings: BTreeSet<[String; 3]>,
    /// Claim and whether it is met.
    claims: BTreeSet<[String; 2]>,
}

fn text(value: &Value) -> String {
    value.as_str().expect("text").to_owned()
}

fn of_json(out: &str) -> Facts {
    let all: Value = serde_json::from_str(out).expect("JSON");
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    Facts {
        sentence: text(&all["verdict"]["sentence"]),
        paths: list(&all["verdict"]["paths"])
            .iter()
            .map(|one| ["frontend", "path", "outcome", "served"].map(|key| text(&one[key])))
            .collect(),
        findings: list(&all["verdict"]["findings"])
            .iter()
            .map(|one| ["id", "severity", "seen"].map(|key| text(&one[key])))
            .collect(),
        claims: list(&all["expectations"])
            .iter()
            .map(|one| ["claim", "met"].map(|key| text(&one[key])))
            .collect(),
    }
}

fn unescape(text: &str) -> String {
    let mut plain = String::new();
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        plain.push(if character == '\\' { characters.next().expect("escaped") } else { character });
    }
    plain
}

fn of_markdown(out: &str) -> Facts {
    let mut facts = Facts::default();
    let mut part = "";
    for line in out.lines() {
        if let Some(name) = line.strip_prefix("## ") {
            part = name;
        } else if let Some(sentence) = line.strip_prefix("**").filter(|_| part.is_empty()) {
            facts.sentence = unescape(sentence.trim_end_matches("**"));
        } else if part == "Paths" && line.starts_with("| ") && !line.contains("---") {
            let cells: Vec<String> =
                line.trim_matches(['|', ' ']).split(" | ").map(unescape).collect();
            if cells[0] != "Frontend" {
                let served = cells[3].split(',').next().expect("a word").to_owned();
                facts.paths.insert([cells[0].clone(), cells[1].clone(), cells[2].clone(), served]);
            }
        } else if part == "Findings" && line.starts_with("- **") {
            let (severity, rest) = line[4..].split_once("** `").expect("a severity");
            let (id, rest) = rest.split_once("`: ").expect("an id");
            facts.findings.insert([id.to_owned(), severity.to_owned(), unescape(rest)]);
        } else if part == "Expectations" && line.starts_with("- `") {
            let (claim, rest) = line[3..].split_once("`: ").expect("a claim");
            let met = match rest.split(':').next().expect("a word") {
                "met" => "yes",
                "not met" => "no",
                _ => "unknown",
            };
            facts.claims.insert([claim.to_owned(), met.to_owned()]);
        }
    }
    facts
}

/// Status of each case, by class and name: the outcome, and what was said.
fn of_junit(out: &str, vip: &str, facts: &Facts) {
    let document = roxmltree::Document::parse(out).expect("XML");
    let mut paths = BTreeSet::new();
    let mut findings = BTreeSet::new();
    let mut claims = BTreeSet::new();
    for case in document.descendants().filter(|node| node.has_tag_name("testcase")) {
        let class = case.attribute("classname").expect("a class");
        let class = class.strip_prefix(&format!("{vip}.")).expect("the VIP");
        let name = case.attribute("name").expect("a name").to_owned();
        let said = case.children().find(roxmltree::Node::is_element);
        let message = said.and_then(|node| node.attribute("message")).unwrap_or_default();
        let failed = said.is_some_and(|node| node.has_tag_name("failure"));
        match class {
            "findings" if said.is_some() => {
                findings.insert((name, message.to_owned(), failed));
            }
            "verdict" | "findings" => {}
            "expect" => {
                let kind = said.and_then(|node| node.attribute("type"));
                let met = match kind {
                    None => "yes",
                    Some("not-met") => "no",
                    Some(_) => "unknown",
                };
                claims.insert([name, met.to_owned()]);
            }
            frontend => {
                paths.insert((frontend.to_owned(), name, message.to_owned()));
            }
        }
    }
    assert_eq!(paths.len(), facts.paths.len(), "{paths:#?}");
    for [frontend, path, outcome, served] in &facts.paths {
        let case = paths.iter().find(|one| one.0 == *frontend && one.1 == *path);
        let message = &case.unwrap_or_else(|| panic!("no case {frontend} {path}")).2;
        assert!(
            message.starts_with(&format!("{outcome}, {served}: "))
                || served == "yes" && message.is_empty(),
            "{frontend} {path} {outcome}: {message}"
        );
    }
    let ids: BTreeSet<&String> = facts.findings.iter().map(|one| &one[0]).collect();
    assert_eq!(ids, findings.iter().map(|one| &one.0).collect());
    for [id, severity, seen] in &facts.findings {
        let found = findings.iter().find(|one| one.0 == *id).expect("a case");
        assert!(found.1.contains(seen.as_str()) || severity == "error", "{id}: {found:?}");
        assert_eq!(found.2, severity == "error" && facts.claims.is_empty(), "{id}");
    }
    assert_eq!(claims, facts.claims);
    let sentence = document
        .descendants()
        .find(|node| node.has_tag_name("property") && node.attribute("name") == Some("sentence"))
        .and_then(|node| node.attribute("value"));
    assert_eq!(sentence, Some(facts.sentence.as_str()));
}

fn of_annotations(out: &str, facts: &Facts) {
    let decode = |text: &str| text.replace("%0A", "\n").replace("%2C", ",").replace("%3A", ":");
    let lines: Vec<String> = out.lines().map(|line| decode(line).replace("%25", "%")).collect();
    let has =
        |parts: &[&str]| lines.iter().any(|line| parts.iter().all(|part| line.contains(part)));
    assert!(has(&[&facts.sentence]), "{lines:#?}");
    for [id, _, seen] in &facts.findings {
        assert!(has(&[&format!("title={id}: "), seen]), "{id}: {lines:#?}");
    }
    for [frontend, path, outcome, served] in &facts.paths {
        assert!(has(&[&format!("{frontend} {path}: {outcome}, served: {served}")]), "{lines:#?}");
    }
    for [claim, met] in &facts.claims {
        assert_eq!(has(&[&format!("title=expect {claim}: ")]), met != "yes", "{claim}: {lines:#?}");
    }
    let of = |severity: &str| lines.iter().filter(|line| line.starts_with(severity)).count();
    assert_eq!(of("::"), lines.len());
    if facts.claims.is_empty() {
        let errors = facts.findings.iter().filter(|one| one[1] == "error").count();
        let verdict = usize::from(!facts.sentence.starts_with("YES"));
        assert_eq!(of("::error "), errors + verdict, "{lines:#?}");
    }
}

fn of_table(out: &str, facts: &Facts) {
    let flat = out.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(out.starts_with(&facts.sentence), "{out}");
    let rows: Vec<&str> = out.lines().skip_while(|line| !line.contains("OUTCOME")).collect();
    for [frontend, path, outcome, served] in &facts.paths {
        let port = frontend.rsplit(':').next().expect("a port");
        let device = path.strip_prefix("forwarded via ");
        let is = |row: &&&str| {
            let words: Vec<&str> = row.split_whitespace().collect();
            words.first() == Some(&port)
                && words.contains(&outcome.as_str())
                && words.iter().any(|word| word.trim_end_matches(',') == served)
                && match device {
                    Some(device) => words.iter().any(|word| word.trim_end_matches(',') == device),
                    None => row.contains(path.as_str()),
                }
        };
        assert!(rows.iter().any(|row| is(&row)), "{frontend} {path} {outcome}: {out}");
    }
    let mut count = 0;
    for [id, severity, seen] in &facts.findings {
        assert!(out.lines().any(|line| line == format!("{severity} {id}")), "{id}: {out}");
        let seen = seen.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(flat.contains(&seen), "{id}: {seen} in {flat}");
        count += 1;
    }
    let shown = out
        .lines()
        .filter(|line| ["error ", "warning ", "note "].iter().any(|one| line.starts_with(one)));
    assert_eq!(shown.count(), count, "{out}");
    for [claim, met] in &facts.claims {
        let word = match met.as_str() {
            "yes" => "met",
            "no" => "NOT MET",
            _ => "CANNOT TELL",
        };
        assert!(out.contains(&format!("expect {claim}: {word}")), "{claim}: {out}");
    }
}

/// The page is XML too.
fn of_html(out: &str) -> Facts {
    let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
    let document = roxmltree::Document::parse_with_options(out, options).expect("XML");
    for word in ["http:", "https:", "<script", "url(http", "@import"] {
        let others = out.replace("http://www.w3.org/", "");
        assert!(!others.contains(word), "the page needs the network: {word}");
    }
    let all = |node: roxmltree::Node| -> String {
        node.descendants().filter_map(|one| one.text().filter(|_| one.is_text())).collect()
    };
    let by_id = |id: &str| document.descendants().find(|node| node.attribute("id") == Some(id));
    let rows = |id: &str| -> Vec<Vec<String>> {
        let Some(part) = by_id(id) else { return Vec::new() };
        part.descendants()
            .filter(|node| node.has_tag_name(("http://www.w3.org/1999/xhtml", "tr")))
            .map(|row| {
                let is_cell = |node: &roxmltree::Node| {
                    node.has_tag_name(("http://www.w3.org/1999/xhtml", "td"))
                };
                row.children().filter(is_cell).map(all).collect::<Vec<_>>()
            })
            .filter(|row: &Vec<String>| !row.is_empty())
            .collect()
    };
    let findings = document.descendants().filter(|node| node.attribute("data-id").is_some());
    Facts {
        sentence: all(by_id("sentence").expect("the sentence")),
        paths: rows("paths")
            .into_iter()
            .map(|row| {
                let served = row[3].split(',').next().expect("a word").to_owned();
                [row[0].clone(), row[1].clone(), row[2].clone(), served]
            })
            .collect(),
        findings: findings
            .map(|node| {
                let seen = node.children().find(|one| one.attribute("class") == Some("seen"));
                let of = |name: &str| node.attribute(name).expect("it").to_owned();
                [of("data-id"), of("data-severity"), all(seen.expect("what was seen"))]
            })
            .collect(),
        claims: rows("expectations")
            .into_iter()
            .map(|row| {
                let met = match row[1].as_str() {
                    "met" => "yes",
                    "not met" => "no",
                    _ => "unknown",
                };
                [row[0].clone(), met.to_owned()]
            })
            .collect(),
    }
}

/// Every path is a lane of the picture, with its outcome.
fn of_svg(out: &str, facts: &Facts) {
    let document = roxmltree::Document::parse(out).expect("XML");
    let lanes: Vec<String> = document
        .descendants()
        .filter_map(|node| node.attribute("aria-label").map(str::to_owned))
        .collect();
    assert_eq!(lanes.len(), facts.paths.len());
    for [frontend, path, outcome, _] in &facts.paths {
        assert!(lanes.contains(&format!("{frontend} {path}")), "{lanes:?}");
        assert!(out.contains(&format!(">{outcome}<")), "{outcome}: {out}");
    }
}

fn judged(file: &str, form: &str, claims: &[&str]) -> Ran {
    let claims: Vec<&str> = claims.iter().flat_map(|claim| ["--expect", claim]).collect();
    let ran =
        run(&mut inspect([&["evidence", "judge", file, "-v", "-o", form], &claims[..]].concat()));
    assert_eq!(ran.err, "", "{form}");
    ran
}

#[test]
fn every_form_carries_the_same_facts() {
    let folder = TempDir::new().expect("a folder");
    let file = folder.path().join("evidence.json");
    let path = file.to_str().expect("UTF-8");
    let mut outcomes = BTreeSet::new();
    let mut ids = BTreeSet::new();
    for (capture, vip) in CASES {
        let capture = Capture::project(capture).expect("a capture");
        let evidence = evidence(&capture, vip.parse().expect("a VIP")).expect("evidence");
        Document::new(evidence).write(&file).expect("a file");
        for claims in [&[][..], &CLAIMS[..]] {
            let ran = judged(path, "json", claims);
            let facts = of_json(&ran.out);
            assert!(!facts.sentence.is_empty() && !facts.findings.is_empty(), "{facts:?}");
            outcomes.extend(facts.paths.iter().map(|one| one[2].clone()));
            ids.extend(facts.findings.iter().map(|one| one[0].clone()));
            for form in ["table", "markdown", "junit", "github", "html", "svg"] {
                let other = judged(path, form, claims);
                assert_eq!(other.code, ran.code, "{form}");
                match form {
                    "table" => of_table(&other.out, &facts),
                    "markdown" => {
                        let mut read = of_markdown(&other.out);
                        // What was seen stands before what it means.
                        let findings = std::mem::take(&mut read.findings);
                        assert_eq!(findings.len(), facts.findings.len(), "{vip}");
                        for [id, severity, seen] in &facts.findings {
                            assert!(
                                findings.iter().any(|one| one[0] == *id
                                    && one[1] == *severity
                                    && one[2].starts_with(seen.as_str())),
                                "{id}: {findings:#?}"
                            );
                            read.findings.insert([id.clone(), severity.clone(), seen.clone()]);
                        }
                        assert_eq!(read, facts, "{vip}");
                    }
                    "junit" => of_junit(&other.out, vip, &facts),
                    "html" => assert_eq!(of_html(&other.out), facts, "{vip}"),
                    "svg" => of_svg(&other.out, &facts),
                    _ => of_annotations(&other.out, &facts),
                }
            }
        }
    }
    assert!(outcomes.len() >= 5, "the cases are too alike: {outcomes:?}");
    assert!(ids.len() >= 8, "the cases are too alike: {ids:?}");
}

#[test]
fn a_file_of_expectations_is_held_against_many_vips_with_the_same_claims() {
    let folder = TempDir::new().expect("a folder");
    let capture = Capture::project("v1.21-tcx").expect("a capture");
    let mut lines = String::new();
    for vip in ["192.168.2.20", "192.168.2.21"] {
        let evidence = evidence(&capture, vip.parse().expect("a VIP")).expect("evidence");
        lines += &serde_json::to_string(Document::new(evidence).as_json()).expect("JSON");
        lines += "\n";
    }
    let evidence = folder.path().join("evidence.jsonl");
    fs::write(&evidence, lines).expect("a file");
    let evidence = evidence.to_str().expect("UTF-8");
    let list = folder.path().join("vips.yaml");
    let list = list.to_str().expect("UTF-8");
    let check = |text: &str, form: &str| {
        fs::write(list, text).expect("a file");
        run(&mut inspect(["check", list, "--from", evidence, "-o", form]))
    };
    let good = "vips:\n  - vip: 192.168.2.20\n    expect: [served, dnat-before-neigh@wg0]\n  - vip: \
                192.168.2.21\n    expect: [not-served, 'finding:announced-no-local-backend']\n";
    let ran = check(good, "table");
    assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""), "{ran:?}");
    let bad = good.replace("not-served", "served");
    for form in ["table", "json", "markdown", "junit", "github"] {
        let ran = check(&bad, form);
        assert_eq!(ran.code, Some(1), "{ran:?}");
        for word in ["192.168.2.20", "192.168.2.21", "served"] {
            assert!(ran.out.contains(word), "{form}: no {word} in {}", ran.out);
        }
    }
    let ran = check(&bad, "junit");
    let document = roxmltree::Document::parse(&ran.out).expect("XML");
    let failed: Vec<_> = document
        .descendants()
        .filter(|node| node.has_tag_name("failure"))
        .filter_map(|node| {
            let case = node.parent()?;
            Some((case.attribute("classname")?, case.attribute("name")?))
        })
        .collect();
    assert_eq!(failed, [("192.168.2.21.expect", "served")]);
    // One that cannot be told is no pass, and a VIP that the evidence is not about no answer.
    let unknown = good.replace("served, dnat", "served@eth7, dnat");
    assert_eq!(check(&unknown, "table").code, Some(3));
    check("vips:\n  - vip: 192.168.2.99\n", "table").refused(3, &["no answer about 192.168.2.99"]);
    check("vips:\n  - vip: 192.168.2.20\n    expct: x\n", "table")
        .refused(2, &["vips.yaml:3: `expct` is not known"]);
}
