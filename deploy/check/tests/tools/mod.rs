//! Where set-up has put what these tests use.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::path::{Path, PathBuf};

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

/// The program: the system's, else the one that set-up has unpacked.
pub fn shellcheck() -> std::process::Command {
    let own = deploy_tools::shellcheck().filter(|root| root.join("usr/bin/shellcheck").is_file());
    match own {
        Some(root) => {
            let mut command = std::process::Command::new(root.join("usr/bin/shellcheck"));
            let libraries = format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH);
            command.env("LD_LIBRARY_PATH", root.join(libraries));
            command
        }
        None => std::process::Command::new(Path::new("shellcheck")),
    }
}
