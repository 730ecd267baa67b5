//! `cargo xtask test`: everything that has to hold before a change is taken. CI runs the same.

use anyhow::Result;

use crate::{lint, process, root, setup};

/// Runs set-up, lints and every test, what is cheap first.
pub fn run() -> Result<()> {
    // Asked before anything that takes time.
    let prefix = root::prefix()?;
    lint::format()?;
    // All that the tests use, the programs of netfilter among it.
    setup::run()?;
    lint::dependencies()?;
    lint::clippy()?;

    let mut tests = process::cargo();
    tests.args(["test", "--workspace", "--no-fail-fast"]);
    tests.args(process::EBPF.iter().flat_map(|name| ["--exclude", name]));
    root::run_through(&mut tests, &prefix);
    process::run(&mut tests)
}
