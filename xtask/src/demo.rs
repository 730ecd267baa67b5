//! `cargo xtask demo`: the main job, on the lab.

use std::process::Command;

use anyhow::Result;

use crate::{process, root, setup};

/// Sets up, builds, and shows three VIPs. Built before root comes into play, so that nothing in the
/// target folder belongs to root.
pub fn run() -> Result<()> {
    let prefix = root::prefix()?;
    setup::ensure()?;
    process::run(process::cargo().args([
        "build",
        "--package",
        "inspector",
        "--bin",
        "inspect",
        "--example",
        "demo",
    ]))?;
    let demo = process::target_dir().join("debug").join("examples").join("demo");
    let mut command = match prefix.split_first() {
        Some((program, words)) => {
            let mut command = Command::new(program);
            command.args(words).arg(demo);
            command
        }
        None => Command::new(demo),
    };
    process::run(&mut command)
}
