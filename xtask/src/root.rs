//! What has to be run as root.

use std::env;
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt as _;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::process;

/// The words that go in front of a command to run it as root with this environment: none if we are
/// root, else `sudo` and what keeps the search path.
///
/// # Errors
/// If we are not root and there is no sudo.
pub fn prefix() -> Result<Vec<OsString>> {
    if is_root()? {
        return Ok(Vec::new());
    }
    if !process::is_installed("sudo") {
        bail!(
            "this needs root (network namespaces, loading BPF programs): run it as root, or install sudo"
        );
    }
    // sudo replaces the search path by its own even when it keeps the environment.
    let mut path = OsString::from("PATH=");
    path.push(env::var_os("PATH").unwrap_or_default());
    Ok(vec!["sudo".into(), "--preserve-env".into(), "env".into(), path])
}

/// Makes cargo run what it builds through these words, the building itself not.
pub fn run_through(cargo: &mut Command, prefix: &[OsString]) {
    if prefix.is_empty() {
        return;
    }
    let words: Vec<_> = prefix.iter().map(|word| toml_string(&word.to_string_lossy())).collect();
    let runner = format!("target.'cfg(all())'.runner = [{}]", words.join(", "));
    cargo.args(["--config", &runner]);
}

/// A TOML basic string.
fn toml_string(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

/// Whether this process has root's user id.
fn is_root() -> Result<bool> {
    let me =
        std::fs::metadata("/proc/self").context("cannot read /proc/self: is /proc mounted?")?;
    Ok(me.uid() == 0)
}
