//! `inspector-lab`: the lab for people and scripts; `cargo xtask lab` runs it.
//!
//! Exit status: 0; 2 with one sentence when something is wrong; `exec` passes on what its command
//! ended with.

mod cli;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let arguments = cli::Arguments::parse();
    match arguments.run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}
