//! `cargo xtask test`: everything that has to hold before a change is taken. CI runs the same.

use std::collections::BTreeSet;

use anyhow::Result;

use crate::{lint, process, root, setup, vm};

/// Kernels, and what is run in virtual machines with them. What takes long there is left out where
/// it says no more than it does here, or in the other kernel.
pub const IN_MACHINES: [(&str, &[&str]); 3] = [
    // Before tcx: filters of clsact, and whether the verifier of that time takes our programs.
    ("6.1", &["--test", "datapath", "--", "clsact_filters_of_all_generations_are_seen"]),
    (
        "6.1",
        &[
            "--test",
            "wireguard",
            "--test",
            "observers",
            "--test",
            "kprobes",
            "--test",
            "programs",
            "--",
            "--skip",
            "nothing_is_left",
            "--skip",
            "of_a_program_on_two_devices",
            "--skip",
            "a_pod_that_never_answers",
            // By an update of a link of tcx.
            "--skip",
            "a_program_that_takes_the_place",
            "--skip",
            "what_is_not_attached_is_said",
        ],
    ),
    (
        "6.12",
        &[
            "--test",
            "wireguard",
            "--test",
            "inject_wireguard",
            "--test",
            "trace_wireguard",
            "--test",
            "netkit",
            "--test",
            "observers",
            "--test",
            "kprobes",
            "--test",
            "programs",
            "--",
            "--skip",
            "nothing_is_left_after_drop_panic_and_death",
        ],
    ),
];

/// Names of the test programs that are run in virtual machines, each once.
pub fn names_in_machines() -> impl Iterator<Item = &'static str> {
    let pairs = IN_MACHINES.iter().flat_map(|(_, arguments)| arguments.windows(2));
    let names = pairs.filter(|pair| pair[0] == "--test").map(|pair| pair[1]);
    names.collect::<BTreeSet<_>>().into_iter()
}

/// Runs set-up, lints and every test, what is cheap first.
pub fn run() -> Result<()> {
    // Asked before anything that takes time.
    let prefix = root::prefix()?;
    process::heed_interrupts();
    lint::format()?;
    // All that the tests use, the programs of netfilter among it.
    setup::run()?;
    lint::dependencies()?;
    lint::clippy()?;

    // The same choice of packages for all tests: another one would have other features, and
    // everything would be built again.
    let packages: Vec<_> = ["--workspace"]
        .into_iter()
        .chain(process::EBPF.iter().flat_map(|name| ["--exclude", name]))
        .collect();
    let mut tests = process::cargo();
    tests.args(["test", "--no-fail-fast"]).args(&packages);
    root::run_through(&mut tests, &prefix);
    process::run(&mut tests)?;

    // What this machine's kernel may lack, or do otherwise.
    for (kernel, chosen) in IN_MACHINES {
        vm::check(kernel, &[packages.as_slice(), chosen].concat())?;
    }
    Ok(())
}
