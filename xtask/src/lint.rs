//! `cargo xtask lint`: formatting, clippy and the dependencies' licences and sources.

use anyhow::Result;

use crate::{process, setup, test};

/// `cargo xtask lint`: sets up and runs every check.
pub fn run() -> Result<()> {
    format()?;
    setup::ensure()?;
    dependencies()?;
    clippy()
}

/// Fails if `cargo fmt` would change a file.
pub fn format() -> Result<()> {
    process::run(process::cargo().args(["fmt", "--all", "--", "--check"]))
}

/// Licences, bans and sources of every dependency; known vulnerabilities too, if the database of
/// them can be had.
pub fn dependencies() -> Result<()> {
    let deny = setup::cargo_deny()?;
    let check = |arguments: &[&str]| {
        let mut command = std::process::Command::new(&deny);
        command.current_dir(process::workspace()).args(arguments);
        command
    };
    process::run(&mut check(&["check", "--hide-inclusion-graph", "licenses", "bans", "sources"]))?;
    match process::output(&mut check(&["fetch", "db"])) {
        Ok(_) => process::run(&mut check(&["check", "--disable-fetch", "advisories"])),
        Err(error) => {
            eprintln!(
                "warning: dependencies were NOT checked for known vulnerabilities: their database \
                 could not be had ({error:#})"
            );
            Ok(())
        }
    }
}

/// Clippy with warnings denied: all targets of the host's crates, those for virtual machines alone
/// among them, and the BPF programs for the BPF target.
pub fn clippy() -> Result<()> {
    let mut host = process::cargo();
    host.args(["clippy", "--workspace"]);
    host.args(process::EBPF.iter().flat_map(|name| ["--exclude", name]));
    host.arg("--all-targets").args(test::names_in_machines().flat_map(|name| ["--test", name]));
    process::run(host.args(["--", "--deny", "warnings"]))?;
    // The same unstable option, allowed in the same way, as in the build scripts.
    let mut bpf = process::cargo();
    bpf.arg("clippy").args(process::EBPF.iter().flat_map(|name| ["--package", name]));
    process::run(
        bpf.args(["--target", "bpfel-unknown-none"])
            .args(["-Z", "build-std=core", "--", "--deny", "warnings"])
            .env("RUSTC_BOOTSTRAP", "1")
            .env("AYA_BPF_TARGET_ARCH", std::env::consts::ARCH),
    )
}
