//! `cargo xtask lab`: builds the lab and becomes it.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use anyhow::{Context as _, Result, anyhow};
use clap::Args;

use crate::{process, root, setup};

#[derive(Args)]
#[command(disable_help_flag = true)]
pub struct Arguments {
    /// What `inspector-lab` takes: `up`, `exec`, `probe`, `down`, each with --help.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    arguments: Vec<OsString>,
}

/// Builds `inspector-lab` and replaces this process by it, as root: what it prints, the signals it
/// gets and the status it ends with are its own. It is built before root comes into play, so that
/// nothing in the target folder belongs to root.
pub fn run(arguments: &Arguments) -> Result<()> {
    setup::ensure()?;
    let mut build = process::cargo();
    build.args(["build", "--quiet", "--package", "inspector-lab"]);
    let status = build.status().context("cannot start cargo")?;
    if !status.success() {
        return Err(anyhow!("the lab does not build: see above"));
    }
    let program = process::target_dir().join("debug").join("inspector-lab");
    // Without root and sudo the lab itself says what it needs root for.
    let mut words = root::prefix().unwrap_or_default();
    words.push(program.clone().into_os_string());
    let mut words = words.iter();
    let mut command = Command::new(words.next().context("no program")?);
    let error = command.args(words).args(&arguments.arguments).exec();
    Err(error).with_context(|| format!("cannot start {}", program.display()))
}
