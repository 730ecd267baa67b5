//! `inspect lb list` and `inspect service list` on real kernel maps that hold captured state,
//! against what `cilium-dbg` printed at the same moment.
//!
//! Needs root and bpf(2); fails without.

use std::{
    collections::BTreeMap,
    process::{Command, Output},
};

use inspector_lab::{Capture, Lab};

/// The captures that come with the outputs of `cilium-dbg`.
const CAPTURES: &[&str] = &[
    "v1.13-clsact",
    "v1.18-tcx",
    "v1.18-clsact",
    "v1.18-wg0-detached",
    "v1.18-l7lb",
    "v1.18-sock-hostns-only",
    "v1.18-proto-any",
    "v1.21-tcx",
    "v1.21-l7lb",
];

fn inspect(lab: &Lab, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_inspect"))
        .args(arguments)
        .env("INSPECT_BPFFS", lab.bpffs())
        .output()
        .expect("the program runs")
}

fn stdout(output: &Output) -> &str {
    assert!(output.status.success(), "{output:?}");
    std::str::from_utf8(&output.stdout).expect("UTF-8")
}

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
            group = cells[0].clone();
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
