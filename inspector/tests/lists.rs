//! `inspect lb list` and `inspect service list` on real kernel maps that hold captured state,
//! against what `cilium-dbg` printed at the same moment.
//!
//! Needs root and bpf(2); fails without.

mod common;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
};

use common::{CAPTURES, inspect, stdout};
use inspector_lab::{Capture, Lab};

/// The rows of a listing as a multiset: the cell of the first column that a continuation row
/// leaves empty is filled in, runs of spaces divide the cells.
fn rows(text: &str) -> BTreeMap<Vec<String>, usize> {
    let mut rows = BTreeMap::new();
    let mut group = String::new();
    let mut lines = text.lines();
    let header = lines.next().expect("a header");
    *rows.entry(vec![header.trim_end().to_owned()]).or_default() += 1;
    for line in lines {
        let mut cells: Vec<String> = line
            .split("   ")
            .map(|cell| cell.trim().to_owned())
            .filter(|cell| !cell.is_empty())
            .collect();
        if line.starts_with(' ') {
            cells.insert(0, group.clone());
        } else {
            group.clone_from(&cells[0]);
        }
        *rows.entry(cells).or_default() += 1;
    }
    rows
}

#[test]
fn lb_list_prints_what_cilium_dbg_printed() {
    let mut compared = 0;
    let mut views = 0;
    for name in CAPTURES {
        let capture = Capture::project(name).expect("a capture of the project");
        let lab = Lab::builder().project(name).up().expect("a lab");
        for (flag, file) in [
            (None, "cilium/lb-list.txt"),
            (Some("--frontends"), "cilium/lb-list-frontends.txt"),
            (Some("--backends"), "cilium/lb-list-backends.txt"),
            (Some("--revnat"), "cilium/lb-list-revnat.txt"),
            (Some("--source-ranges"), "cilium/lb-list-source-ranges.txt"),
        ] {
            let theirs = capture.text(file).expect("what cilium-dbg printed");
            let arguments: Vec<&str> = ["lb", "list"].into_iter().chain(flag).collect();
            let ours = inspect(&lab, &arguments);
            // Without the backends, nothing is said of them.
            assert!(flag != Some("--frontends") || ours.stderr.is_empty(), "{name}: {ours:?}");
            let (ours, theirs) = (rows(stdout(&ours)), rows(&theirs));
            let missing: Vec<_> =
                theirs.iter().filter(|row| ours.get(row.0) != Some(row.1)).collect();
            let extra: Vec<_> =
                ours.iter().filter(|row| theirs.get(row.0) != Some(row.1)).collect();
            assert!(
                missing.is_empty() && extra.is_empty(),
                "{name} {file}: missing {missing:#?}, extra {extra:#?}"
            );
            assert!(theirs.len() > 1, "{name} {file}: nothing to compare");
            compared += theirs.values().sum::<usize>();
            views += 1;
        }
    }
    eprintln!("{compared} rows in {views} listings of {} captures are the same", CAPTURES.len());
}

/// A row of `service list`: what stands in the first three columns, then the backends.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Service {
    id: u16,
    frontend: String,
    kind: String,
    /// Address and state.
    backends: Vec<(String, String)>,
}

/// Reads what `service list` prints.
fn services(text: &str) -> Vec<Service> {
    let mut services: Vec<Service> = Vec::new();
    for line in text.lines().skip(1) {
        let cells: Vec<&str> =
            line.split("   ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
        let backend = if line.starts_with(' ') {
            cells[0]
        } else {
            // The list of 1.13 has its line numbers before the id where it was taken with `grep -n`;
            // here the first cell is the id alone.
            services.push(Service {
                id: cells[0].parse().expect("an id"),
                frontend: cells[1].to_owned(),
                kind: cells[2].to_owned(),
                backends: Vec::new(),
            });
            match cells.get(3) {
                Some(backend) => backend,
                None => continue,
            }
        };
        let (_, backend) = backend.split_once(" => ").expect("a number and a backend");
        let (address, state) = backend.split_once(' ').expect("an address and a state");
        services.last_mut().expect("a row").backends.push((address.to_owned(), state.to_owned()));
    }
    services
}

/// Without the protocol, which keys rewritten to protocol 0 do not hold.
fn without_protocol(address: &str) -> &str {
    let scope = address.strip_suffix("/i").unwrap_or(address);
    scope.split('/').next().unwrap_or(scope)
}

/// The kinds of difference that there can be, in the words of `docs/service-list.md`.
fn differences(ours: &[Service], theirs: &[Service]) -> Vec<String> {
    let mut kinds = Vec::new();
    let by_id = |list: &[Service]| -> BTreeMap<u16, Service> {
        list.iter().map(|service| (service.id, service.clone())).collect()
    };
    let (ours, theirs) = (by_id(ours), by_id(theirs));
    let ids: BTreeSet<u16> = ours.keys().chain(theirs.keys()).copied().collect();
    for id in ids {
        let (Some(mine), Some(other)) = (ours.get(&id), theirs.get(&id)) else {
            kinds.push("frontend only in one of the two".to_owned());
            continue;
        };
        if mine.frontend != other.frontend {
            let same = without_protocol(&mine.frontend) == without_protocol(&other.frontend)
                && mine.frontend.ends_with("/i") == other.frontend.ends_with("/i");
            kinds
                .push(if same { "protocol not in the key" } else { "frontend differs" }.to_owned());
        }
        if mine.kind != other.kind {
            kinds.push("type differs".to_owned());
        }
        let states = |service: &Service| -> BTreeMap<String, String> {
            service
                .backends
                .iter()
                .map(|(address, state)| (without_protocol(address).to_owned(), state.clone()))
                .collect()
        };
        let (mine, other) = (states(mine), states(other));
        for (address, state) in &other {
            match mine.get(address) {
                None => kinds.push(format!("backend {state} not in the maps")),
                Some(shown) if shown != state => kinds.push(format!("{state} shown as {shown}")),
                Some(_) => {}
            }
        }
        kinds.extend(
            mine.keys()
                .filter(|address| !other.contains_key(*address))
                .map(|_| "backend only in the maps".to_owned()),
        );
    }
    kinds
}

#[test]
fn service_list_differs_from_cilium_dbg_only_as_documented() {
    let mut table = String::from("| Difference | Count | Captures |\n| --- | --- | --- |\n");
    let mut counts: BTreeMap<String, (usize, BTreeSet<&str>)> = BTreeMap::new();
    let (mut frontends, mut same_order) = (0, 0);
    // The agent was down when this one was taken: nobody could be asked for the list.
    let captures = CAPTURES.iter().filter(|name| **name != "v1.18-wg0-detached");
    for name in captures.clone() {
        let capture = Capture::project(name).expect("a capture of the project");
        let lab = Lab::builder().project(name).up().expect("a lab");
        let theirs = services(&capture.text("cilium/service-list.txt").expect("the list"));
        let ours = services(stdout(&inspect(&lab, &["service", "list"])));
        frontends += theirs.len();
        for kind in differences(&ours, &theirs) {
            let (count, captures) = counts.entry(kind).or_default();
            *count += 1;
            captures.insert(*name);
        }
        same_order += ours
            .iter()
            .filter(|mine| {
                theirs.iter().any(|other| mine.id == other.id && mine.backends == other.backends)
            })
            .count();
    }
    for (kind, (count, captures)) in &counts {
        let captures: Vec<_> = captures.iter().copied().collect();
        writeln!(table, "| {kind} | {count} | {} |", captures.join(", ")).expect("text");
    }
    writeln!(
        table,
        "\nOf {frontends} frontends in {} captures, {same_order} have the same backends in the same \
         order with the same states.",
        captures.count()
    )
    .expect("text");
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/service-list.md");
    let documented = std::fs::read_to_string(path).expect("docs/service-list.md");
    assert!(
        documented.contains(&table),
        "docs/service-list.md does not hold what was measured:\n\n{table}"
    );
}
