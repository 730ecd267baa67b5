//! Developer commands: `cargo xtask COMMAND`.
//!
//! One file per command. This crate builds with nothing but the compiler, so that it can install
//! what everything else needs.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod dist;
mod lint;
mod process;
mod root;
mod setup;
mod test;
mod toolchain;

/// Developer commands of inspector.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Install what the build needs: the BPF linker and core's source for the BPF target.
    Setup,
    /// Check the formatting, the lints and the dependencies.
    Lint,
    /// Set up, lint and run every test (needs root: uses sudo where it is not).
    Test,
    /// Build the one static binary that is copied to a node.
    Dist,
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Setup => setup::run(),
        Command::Lint => lint::run(),
        Command::Test => test::run(),
        Command::Dist => dist::run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
