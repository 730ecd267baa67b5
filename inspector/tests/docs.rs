//! `docs/examples.md` holds what the program prints, and `docs/findings.md` every finding.
//!
//! `cargo xtask docs` writes the former anew. Needs root; fails without.

mod run;

use std::{fmt::Write as _, fs, path::PathBuf};

use inspector::judge::FindingId;
use inspector_lab::{Lab, Ns};
use run::inspect;

/// A capture, the arguments, and what to see.
const EXAMPLES: &[(&str, &[&str], &str)] = &[
    (
        "v1.21-tcx",
        &["vip", "192.168.2.20"],
        "A healthy VIP. Cilium's program runs on eno1 and on wg0, reaches the pinned services map \
         through a tail call, and translates to a pod of this node: no neighbour look-up takes \
         part. The last line of paths is the router pod's: full socket-LB leaves the pods' devices \
         without a load balancer, so what a pod forwards is not translated.",
    ),
    (
        "v1.21-tcx",
        &["vip", "192.168.2.21"],
        "Announced without a local backend: this node was elected to answer ARP, the policy is \
         Local, and the only backend is not on this node.",
    ),
    (
        "v1.18-wg0-detached",
        &["vip", "192.168.2.20"],
        "The maps are the same, but no program of Cilium's runs on wg0: clients of the VPN are not \
         served, those of the LAN are. Here, and only on this path, the VIP's neighbour matters.",
    ),
    (
        "v1.21-l7lb",
        &["vip", "192.168.2.30"],
        "An L7 frontend: marked for the local proxy instead of translated. Nothing listens on the \
         proxy port.",
    ),
    (
        "v1.21-tcx",
        &["vip", "192.168.2.24", "--source", "10.9.9.9"],
        "Source ranges, as seen by a client that they leave out.",
    ),
    (
        "v1.21-tcx",
        &["vip", "192.168.2.32", "--simulate"],
        "No client is needed: Cilium's own program, run on a packet that was never sent, each with \
         its control. The backend is not on this node, so the packet gets the node's address as \
         its source.",
    ),
];

fn path(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs")).join(name)
}

/// What the program prints in the lab's node, without what is different each time.
fn printed(capture: &str, arguments: &[&str]) -> String {
    let lab = Lab::builder().project(capture).datapath(true).up().expect("a lab");
    lab.set_agent_alive().expect("a sign of life");
    let output = lab
        .run_alone(Some(Ns::Node), || {
            let mut command = inspect(arguments);
            lab.exec_in(Ns::Node, &mut command).expect("the node").output().expect("it runs")
        })
        .expect("the lab alone");
    assert!(output.stderr.is_empty(), "{output:?}");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let host = fs::read_to_string("/proc/sys/kernel/hostname").expect("a host name");
    let mut lines = Vec::new();
    for line in text.lines() {
        let mut line = line.replace(&format!(" on {}, ", host.trim()), " on node1, ");
        if let Some((before, rest)) = line.split_once(" on node1, ")
            && let Some((_, after)) = rest.split_once(';')
        {
            line = format!("{before} on node1, 2026-11-30T12:00:00.000Z;{after}");
        }
        lines.push(line);
    }
    lines.join("\n").replace(lab.name(), "node1")
}

#[test]
fn the_examples_are_what_the_program_prints() {
    let mut page = String::from(
        "# Examples\n\nWhat `inspect` prints in the lab: real kernel maps with the state of a real \
         Cilium, a stand-in for\nits programs attached as they were, in network namespaces. Written \
         by `cargo xtask docs`; a test fails\nif it is not what the program prints.\n",
    );
    for (capture, arguments, text) in EXAMPLES {
        let printed = printed(capture, arguments);
        let command = arguments.join(" ");
        write!(page, "\n## {capture}: `inspect {command}`\n\n{text}\n\n```\n{printed}\n```\n")
            .expect("text");
    }
    let file = path("examples.md");
    if std::env::var_os("INSPECTOR_WRITE_DOCS").is_some() {
        fs::write(&file, &page).expect("the page is written");
    }
    let written = fs::read_to_string(&file).expect("docs/examples.md");
    assert!(
        written == page,
        "docs/examples.md is not what the program prints: run `cargo xtask docs`\n\n{page}"
    );
}

#[test]
fn every_finding_is_documented_with_its_severity() {
    let text = fs::read_to_string(path("findings.md")).expect("docs/findings.md");
    for id in FindingId::ALL {
        let row = format!("| `{id}` | {} |", id.severity());
        assert!(text.contains(&row), "docs/findings.md has no row that begins with {row}");
    }
    let is_row =
        |line: &&str| ["| error |", "| warning |", "| note |"].iter().any(|one| line.contains(one));
    let rows = text.lines().filter(is_row);
    assert_eq!(rows.count(), FindingId::ALL.len(), "a row for something that is no finding");
}
