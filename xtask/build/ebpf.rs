//! Builds an eBPF crate, after a look at whether that can work.
//!
//! This file is part of the build scripts of `inspector` and of the lab, and of nothing else. It
//! uses `aya-build`, which both have as a build dependency.

use std::env;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

// One place says which versions go together and where set-up puts them.
#[path = "../src/toolchain.rs"]
mod toolchain;

#[path = "strip.rs"]
mod strip;

/// Builds the crate `name` in `folder` (relative to `root`, the workspace) into `OUT_DIR/name`; it
/// reads the crates in the folders `also`.
pub fn run(root: &Path, name: &str, folder: &str, also: &[&str]) -> ExitCode {
    let own = [
        "Cargo.lock",
        "Cargo.toml",
        "xtask/src/toolchain.rs",
        "xtask/build/ebpf.rs",
        "xtask/build/strip.rs",
    ];
    for path in also.iter().chain([&folder]).chain(&own) {
        println!("cargo::rerun-if-changed={}", root.join(path).display());
    }
    for variable in ["INSPECTOR_TOOLS", "XDG_CACHE_HOME", "HOME", "PATH"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    if let Err(sentence) = build(&root.join(folder), name) {
        println!("cargo::error={sentence}");
    }
    // Also after an error: cargo itself says that there was one, and shows the sentence alone.
    ExitCode::SUCCESS
}

fn build(folder: &Path, name: &str) -> Result<(), String> {
    let (linker, library) = find()?;
    println!("cargo::rerun-if-changed={}", linker.display());
    println!("cargo::rerun-if-changed={}", library.join("Cargo.lock").display());

    let mut path = vec![linker.parent().map(PathBuf::from).unwrap_or_default()];
    path.extend(env::split_paths(&env::var_os("PATH").unwrap_or_default()));
    let path =
        env::join_paths(path).map_err(|error| format!("PATH cannot be extended: {error}"))?;
    // SAFETY: a build script's main thread is the only one, nothing reads the environment meanwhile.
    unsafe {
        env::set_var("PATH", path);
        // Core is built from source, which a stable compiler allows only so. It is set here and not
        // for the workspace, where build scripts would take the compiler for a nightly.
        env::set_var("RUSTC_BOOTSTRAP", "1");
        // Whatever the inner cargo prints comes out as a warning: let it print only such.
        env::set_var("CARGO_TERM_QUIET", "true");
    }
    let toolchain = env::var("RUSTUP_TOOLCHAIN").unwrap_or_else(|_| "stable".to_owned());
    aya_build::build_ebpf(
        [aya_build::Package {
            name,
            root_dir: folder.to_str().ok_or("the path of the workspace is not UTF-8")?,
            ..Default::default()
        }],
        aya_build::Toolchain::Custom(&toolchain),
    )
    .map_err(|error| format!("the eBPF programs could not be built: {error:#}"))?;
    let file = env::var_os("OUT_DIR").map(|folder| Path::new(&folder).join(name));
    let file = file.ok_or("OUT_DIR is not set")?;
    let object = std::fs::read(&file).and_then(|bytes| {
        let stripped = strip::strip(&bytes).map_err(std::io::Error::other)?;
        std::fs::write(&file, stripped)
    });
    object.map_err(|error| format!("{}: {error}", file.display()))
}

/// The BPF linker and core's source.
fn find() -> Result<(PathBuf, PathBuf), String> {
    let linker = toolchain::bpf_linker().ok_or_else(|| {
        format!(
            "bpf-linker {}, which links the eBPF programs, is missing: run `cargo xtask setup`",
            toolchain::BPF_LINKER_VERSION
        )
    })?;
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let library = toolchain::library_in(&toolchain::sysroot(Path::new(&rustc))?);
    if !toolchain::library_is_complete(&library) {
        return Err(format!(
            "core's source, which the eBPF programs are built with, is missing at {}: run `cargo \
             xtask setup`",
            library.display()
        ));
    }
    Ok((linker, library))
}
