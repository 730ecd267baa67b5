//! Running other programs, with errors that say which one.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, io};

use anyhow::{Context as _, Result, bail};

/// The crates that are built for the BPF target and never for the host.
pub const EBPF: [&str; 2] = ["inspector-ebpf", "inspector-lab-ebpf"];

/// The workspace's top folder.
pub fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace")
}

/// Where cargo puts what it builds.
pub fn target_dir() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| workspace().join("target"), |dir| workspace().join(dir))
}

/// The cargo that runs us, in the workspace's top folder.
///
/// Cargo's variables about the package it runs are taken away: build scripts further down would
/// take them for their own.
pub fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace());
    for (name, _) in env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("CARGO_PKG_")) {
            command.env_remove(name);
        }
    }
    command.env_remove("CARGO_MANIFEST_DIR").env_remove("CARGO_MANIFEST_PATH");
    command
}

/// The compiler that builds the workspace.
pub fn rustc() -> Command {
    let mut command = Command::new(env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    command.current_dir(workspace());
    command
}

/// Lets an interrupt end what is started from here on.
///
/// A shell without job control lets what it starts in the background ignore SIGINT, and all that this
/// starts with it: tests that send one would wait for ever.
pub fn heed_interrupts() {
    // SAFETY: no handler is set, and the call does not fail with a valid signal.
    unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
}

/// Shows the command, runs it and waits; anything but success is an error.
pub fn run(command: &mut Command) -> Result<()> {
    eprintln!("$ {}", shown(command));
    let status = command.status().with_context(|| cannot_start(command))?;
    if !status.success() {
        bail!("`{}` failed: {status}", shown(command));
    }
    Ok(())
}

/// Runs the command and returns what it wrote to its output; anything but success is an error that
/// quotes the last line it wrote to its error output.
pub fn output(command: &mut Command) -> Result<String> {
    let out = command.stdin(Stdio::null()).output().with_context(|| cannot_start(command))?;
    if !out.status.success() {
        let stderr = String::from_utf8_lossy(&out.stderr);
        let last = stderr.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("no message");
        bail!("`{}` failed: {}", shown(command), last.trim());
    }
    String::from_utf8(out.stdout)
        .with_context(|| format!("`{}` printed something that is not UTF-8", shown(command)))
}

/// Whether a program of that name is on the search path.
pub fn is_installed(name: &str) -> bool {
    env::split_paths(&env::var_os("PATH").unwrap_or_default()).any(|dir| dir.join(name).is_file())
}

/// Removes a folder and what is in it, if it is there.
pub fn remove_dir(path: &Path) -> Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

fn cannot_start(command: &Command) -> String {
    format!("cannot start `{}`: is it installed?", command.get_program().display())
}

/// The command as one would type it, the program by its file name alone.
fn shown(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let mut text = program.file_name().unwrap_or(OsStr::new("?")).to_string_lossy().into_owned();
    for argument in command.get_args() {
        text.push(' ');
        text.push_str(&argument.to_string_lossy());
    }
    text
}
