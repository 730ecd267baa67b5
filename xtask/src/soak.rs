//! `cargo xtask soak [MINUTES]`: whether the observers grow or leave something behind in the long run.

use anyhow::Result;

use crate::{process, root, setup};

/// What can be said.
#[derive(clap::Args)]
pub struct Arguments {
    /// How long, minutes; 1 is enough for a first look.
    #[arg(default_value_t = 10.0)]
    minutes: f64,
}

/// Sets up, builds with optimisation and lets it run.
pub fn run(arguments: &Arguments) -> Result<()> {
    let prefix = root::prefix()?;
    setup::ensure()?;
    let mut soak = process::cargo();
    soak.args(["bench", "--package", "inspector", "--bench", "soak"]);
    root::run_through(&mut soak, &prefix);
    soak.arg("--").arg(arguments.minutes.to_string());
    process::run(&mut soak)
}
