//! Developer commands: `cargo xtask COMMAND`.
//!
//! One file per command. This crate builds with nothing but the compiler, so that it can install
//! what everything else needs.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod bench;
mod demo;
mod deploy_tools;
mod dist;
mod docs;
mod lab;
mod lint;
mod process;
mod root;
mod setup;
mod soak;
mod test;
mod toolchain;
mod vm;

/// Developer commands of inspector.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show the main job on the lab: three VIPs of a captured node (needs root).
    Demo,
    /// Install what the build needs: the BPF linker and core's source for the BPF target.
    Setup,
    /// Check the formatting, the lints and the dependencies.
    Lint,
    /// Set up, lint and run every test (needs root: uses sudo where it is not).
    Test,
    /// Measure the commands on ten thousand services (needs root).
    Bench,
    /// Watch a node for minutes while everything on it changes (needs root).
    Soak(soak::Arguments),
    /// Make, use and remove a node in network namespaces with captured maps (up, exec, down).
    Lab(lab::Arguments),
    /// Write the pages that hold what the program prints (needs root).
    Docs,
    /// Run tests, or any command, in virtual machines with Debian's kernels.
    Vm(vm::Arguments),
    /// What `vm` gives cargo as its runner.
    #[command(hide = true)]
    VmRecord(vm::Record),
    /// Build the one static binary that is copied to a node.
    Dist,
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Demo => demo::run(),
        Command::Bench => bench::run(),
        Command::Soak(arguments) => soak::run(&arguments),
        Command::Setup => setup::run(),
        Command::Lint => lint::run(),
        Command::Test => test::run(),
        Command::Lab(arguments) => lab::run(&arguments),
        Command::Docs => docs::run(),
        Command::Dist => dist::run(),
        Command::Vm(arguments) => return exit(vm::run(&arguments)),
        Command::VmRecord(arguments) => vm::record(&arguments),
    };
    exit(result.map(|()| ExitCode::SUCCESS))
}

fn exit(result: anyhow::Result<ExitCode>) -> ExitCode {
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
