//! Three VIPs of a captured Cilium 1.21 node, and what `inspect vip` says of them.
//!
//! Run by `cargo xtask demo`. Loads the capture into real kernel maps in a lab of its own, runs the
//! program on them, and removes the lab, also when it is interrupted. Needs root.

use std::{
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use anyhow::{Context, bail, ensure};
use inspector_lab::{Lab, Ns};

/// A question, the exit code that is right, and what to see in the answer.
const SHOWN: [(&str, i32, &str); 3] = [
    (
        "192.168.2.20",
        0,
        "A healthy VIP. The maps have two backends, both pods of this node; Cilium's program really \
         runs on eno1 and on wg0, reaches those very maps, and translates a packet before anybody \
         looks up a neighbour (exit code 0).",
    ),
    (
        "192.168.2.21",
        1,
        "The trap: externalTrafficPolicy is Local, the only backend is not on this node, and this \
         node was elected to answer ARP. Clients come here and there is nothing to send them to. \
         The internal scope has the backend, so a socket on the node is translated to it: another \
         path, which says nothing about clients from outside (exit code 1).",
    ),
    (
        "192.168.2.39",
        1,
        "No such Service: the answer says what the node knows of the address instead of a bare \
         \"not found\" (exit code 1).",
    ),
];

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<()> {
    let inspect = program()?;
    let lab = Lab::builder().project("v1.21-tcx").datapath(true).up()?;
    println!(
        "A node in network namespaces, with the maps of a real Cilium 1.21 in {} and a stand-in \
         for its programs attached.",
        lab.bpffs().display()
    );
    for (vip, expected, explanation) in SHOWN {
        lab.set_agent_alive()?;
        println!("\n{}\n$ inspect vip {vip}\n", "=".repeat(80));
        let mut command = Command::new(&inspect);
        let command = lab.exec_in(Ns::Node, command.args(["vip", vip]))?;
        // Other labs may be up: this view of the machine has but one BPF file system.
        let status = lab
            .run_alone(Some(Ns::Node), || command.status())?
            .with_context(|| format!("cannot start {}", inspect.display()))?;
        println!("\n--> {explanation}");
        ensure!(
            status.code() == Some(expected),
            "`inspect vip {vip}` ended with {status}, not with exit code {expected}"
        );
    }
    lab.down()?;
    println!("\n{}\nThe lab is gone; nothing is left behind.", "=".repeat(80));
    Ok(())
}

/// The program, which cargo puts one folder above this example.
fn program() -> anyhow::Result<PathBuf> {
    let me = std::env::current_exe().context("cannot tell where this program is")?;
    let folder = me.parent().and_then(Path::parent).context("this program is not in a folder")?;
    let inspect = folder.join("inspect");
    if !inspect.is_file() {
        bail!("{} is not there: run `cargo xtask demo`", inspect.display());
    }
    Ok(inspect)
}
