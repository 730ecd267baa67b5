//! Where set-up has put what these tests use.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::{path::PathBuf, process::Command};

#[path = "../../../../xtask/src/deploy_tools.rs"]
pub mod deploy_tools;
#[path = "../../../../xtask/src/toolchain.rs"]
pub mod toolchain;

/// The folder that is tested.
pub const DEPLOY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// A file of a package that set-up has fetched.
pub fn fetched(what: &deploy_tools::Fetched, file: &str) -> PathBuf {
    let path = what.path(file).unwrap_or_else(|| panic!("no place for the tools: set HOME"));
    let package = what.package;
    assert!(path.is_file(), "{} of {package} is missing: run `cargo xtask setup`", path.display());
    path
}

/// A program of those that set-up unpacks: its own, else the system's.
pub fn program(name: &str) -> Command {
    let file = PathBuf::from("usr/bin").join(name);
    match deploy_tools::programs().filter(|root| root.join(&file).is_file()) {
        Some(root) => {
            let mut command = Command::new(root.join(file));
            let libraries = format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH);
            command.env("LD_LIBRARY_PATH", root.join(libraries));
            command
        }
        None => Command::new(name),
    }
}
