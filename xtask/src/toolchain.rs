//! What the BPF side needs to be built, and where it is looked for.
//!
//! This file is compiled into `xtask`, which installs these things, and into the build scripts of
//! the crates with eBPF programs, which use them. It therefore depends on nothing but `std`.
//!
//! Three versions go together: the compiler (`rust-toolchain.toml`), its LLVM, which bpf-linker
//! loads at run time, and core's source, which is compiled for the BPF target.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The bpf-linker that works with the LLVM 22 of rustc 1.95; from 0.11 on it wants LLVM 23.
pub const BPF_LINKER_VERSION: &str = "0.10.3";

/// Where set-up puts the tools it installs, one folder per tool and version:
/// `$INSPECTOR_TOOLS`, else `$XDG_CACHE_HOME/inspector-tools`, else `~/.cache/inspector-tools`.
///
/// It is outside of `target`, so that `cargo clean` or a second clone does not cost minutes.
/// `None` if neither a home nor one of the two variables is set.
pub fn tools_dir() -> Option<PathBuf> {
    if let Some(dir) = non_empty("INSPECTOR_TOOLS") {
        return Some(dir);
    }
    let cache =
        non_empty("XDG_CACHE_HOME").or_else(|| env::home_dir().map(|home| home.join(".cache")))?;
    Some(cache.join("inspector-tools"))
}

fn non_empty(variable: &str) -> Option<PathBuf> {
    env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// The folder of one tool in one version below [`tools_dir`], as given to `cargo install --root`.
pub fn tool_root(tools: &Path, name: &str, version: &str) -> PathBuf {
    tools.join(format!("{name}-{version}"))
}

/// A bpf-linker of the right version: set-up's own, else the one on the search path.
pub fn bpf_linker() -> Option<PathBuf> {
    let own = tools_dir().map(|dir| {
        tool_root(&dir, "bpf-linker", BPF_LINKER_VERSION).join("bin").join("bpf-linker")
    });
    own.into_iter()
        .chain(
            env::split_paths(&env::var_os("PATH").unwrap_or_default())
                .map(|dir| dir.join("bpf-linker")),
        )
        .filter(|path| path.is_file())
        .find(|path| says_version(path, "bpf-linker", BPF_LINKER_VERSION))
}

/// Whether `path --version` answers `name version`.
pub fn says_version(path: &Path, name: &str, version: &str) -> bool {
    Command::new(path).arg("--version").output().is_ok_and(|out| {
        out.status.success()
            && String::from_utf8_lossy(&out.stdout).trim() == format!("{name} {version}")
    })
}

/// The `library` folder of the compiler's own source below its sysroot, there or not.
pub fn library_in(sysroot: &Path) -> PathBuf {
    sysroot.join("lib/rustlib/src/rust/library")
}

/// Whether `library` holds what `-Z build-std=core` reads.
pub fn library_is_complete(library: &Path) -> bool {
    library.join("core/src/lib.rs").is_file() && library.join("Cargo.lock").is_file()
}

/// The sysroot of `rustc`, or what went wrong.
pub fn sysroot(rustc: &Path) -> Result<PathBuf, String> {
    let out = Command::new(rustc)
        .args(["--print", "sysroot"])
        .output()
        .map_err(|error| format!("cannot run {}: {error}", rustc.display()))?;
    if !out.status.success() {
        return Err(format!(
            "{} --print sysroot failed: {}",
            rustc.display(),
            String::from_utf8_lossy(&out.stderr).trim()
        ));
    }
    Ok(PathBuf::from(String::from_utf8_lossy(&out.stdout).trim()))
}
