//! The command line: one file per verb.

mod down;
mod exec;
mod probe;
mod up;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Name of the lab where none is given.
const DEFAULT_NAME: &str = "lab";

/// A Cilium-like node in network namespaces, with captured state in real pinned kernel maps
#[derive(Debug, Parser)]
#[command(version, arg_required_else_help = true)]
pub struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Make a lab; prints one line of JSON with its namespace and bpffs
    Up(up::Up),
    /// Run a command in a lab
    Exec(exec::Exec),
    /// Connect from every place to every frontend and print what happened, as a capture's
    /// probes.json
    Probe(probe::Probe),
    /// Make the connections that are read from stdin, from where this process is
    #[command(hide = true)]
    Connect(probe::Connect),
    /// Remove a lab
    Down(down::Down),
}

impl Arguments {
    /// Does what was asked for.
    ///
    /// # Errors
    /// One sentence that says what is wrong and what to do.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self.verb {
            Verb::Up(verb) => verb.run(),
            Verb::Exec(verb) => verb.run(),
            Verb::Probe(verb) => verb.run(),
            Verb::Connect(verb) => verb.run(),
            Verb::Down(verb) => verb.run(),
        }
    }
}
