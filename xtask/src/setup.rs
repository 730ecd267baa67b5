//! `cargo xtask setup`: a machine that can build the BPF side.
//!
//! Two things are needed beyond the compiler: a linker that makes BPF objects out of LLVM's
//! bitcode, and core's source, because no prebuilt core exists for the BPF target. The source has
//! to be that of the very compiler. It is taken from where it is there already, else from rustup,
//! else from Debian's package of the same version, which is downloaded and unpacked by a private
//! apt configuration: nothing is installed in the system and no package list of the system
//! changes.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow, bail};

use crate::toolchain::{self, BPF_LINKER_VERSION};
use crate::{process, test};

mod debian;
mod deploy;
pub mod machines;

/// The cargo-deny that `cargo xtask lint` uses.
const CARGO_DENY_VERSION: &str = "0.20.2";

/// `cargo xtask setup`: everything that `cargo xtask test` needs.
pub fn run() -> Result<()> {
    let start = Instant::now();
    ensure()?;
    cargo_deny()?;
    netfilter()?;
    deploy::ensure()?;
    browser()?;
    virtual_machines()?;
    eprintln!("set-up complete after {:.1} s", start.elapsed().as_secs_f64());
    Ok(())
}

/// Makes sure that `cargo build` works: the BPF linker and core's source are there, or are
/// installed now.
pub fn ensure() -> Result<()> {
    bpf_linker()?;
    core_source()
}

/// The path of cargo-deny, which is installed if it is missing.
pub fn cargo_deny() -> Result<PathBuf> {
    let root = toolchain::tool_root(&tools_dir()?, "cargo-deny", CARGO_DENY_VERSION);
    let path = root.join("bin").join("cargo-deny");
    if toolchain::says_version(&path, "cargo-deny", CARGO_DENY_VERSION) {
        eprintln!("cargo-deny {CARGO_DENY_VERSION}: there ({})", path.display());
        return Ok(path);
    }
    // Unoptimised: it runs for a second, and takes minutes less to build.
    cargo_install("cargo-deny", CARGO_DENY_VERSION, &root, &["--debug"])?;
    Ok(path)
}

/// The programs of netfilter, with which tests make rules: the system's, else Debian's, unpacked
/// beside the other tools.
fn netfilter() -> Result<()> {
    let is_there = |root: &Path| {
        ["iptables-nft-save", "ip6tables-nft-save", "nft"]
            .iter()
            .all(|tool| root.join("usr/sbin").join(tool).exists())
    };
    let root = tools_dir()?.join("netfilter");
    if let Some(root) = [Path::new("/"), &root].into_iter().find(|root| is_there(root)) {
        eprintln!("iptables and nftables: there ({})", root.display());
        return Ok(());
    }
    debian::unpack(&["iptables", "nftables"], &root).context(
        "cannot get the programs of netfilter: install the packages iptables and nftables",
    )?;
    eprintln!("iptables and nftables: unpacked ({})", root.display());
    Ok(())
}

/// The browser in which tests look at pages: the system's Chromium, else Debian's build of it without
/// windows, with its libraries and a font, unpacked beside the other tools.
fn browser() -> Result<()> {
    let system = ["chromium", "chromium-headless-shell"];
    if let Some(name) = system.into_iter().find(|name| process::is_installed(name)) {
        eprintln!("browser: there ({name})");
        return Ok(());
    }
    let root = tools_dir()?.join("browser");
    if !root.join("usr/lib/chromium/chromium-headless-shell").exists() {
        eprintln!("browser: missing, downloading Debian's");
        debian::unpack(&["chromium-headless-shell", "fonts-dejavu-core"], &root)
            .context("cannot get a browser: install the package chromium")?;
    }
    eprintln!("browser: there ({})", root.display());
    Ok(())
}

/// The emulator, and the kernels that `cargo xtask test` boots.
fn virtual_machines() -> Result<()> {
    let tools = machines::Tools::get()?;
    let kernels: std::collections::BTreeSet<_> =
        test::IN_MACHINES.iter().map(|(wanted, _)| *wanted).collect();
    for wanted in kernels {
        let kernel = machines::Kernel::get(&tools, wanted, false)?;
        eprintln!("Linux {} for virtual machines: there", kernel.release);
    }
    Ok(())
}

/// A file that one process on this machine holds at a time; free again when the process ends,
/// however it ends.
pub struct Lock {
    _file: File,
}

impl Lock {
    /// Waits until it is free, and says that it waits for `what`.
    pub fn take(path: &Path, what: &str) -> Result<Self> {
        let parent = path.parent().context("the lock has no folder")?;
        fs::create_dir_all(parent).with_context(|| {
            format!(
                "cannot make {}: set INSPECTOR_TOOLS to a folder that can be written to",
                parent.display()
            )
        })?;
        let file = File::create(path).with_context(|| format!("cannot make {}", path.display()))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                eprintln!("waiting for {what} to end");
                file.lock().with_context(|| format!("cannot lock {}", path.display()))?;
            }
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("cannot lock {}", path.display()));
            }
        }
        Ok(Self { _file: file })
    }
}

fn tools_dir() -> Result<PathBuf> {
    toolchain::tools_dir().context(
        "no place for the tools: set HOME, or INSPECTOR_TOOLS to a folder that can be written to",
    )
}

fn bpf_linker() -> Result<()> {
    if let Some(path) = toolchain::bpf_linker() {
        eprintln!("bpf-linker {BPF_LINKER_VERSION}: there ({})", path.display());
        return Ok(());
    }
    let root = toolchain::tool_root(&tools_dir()?, "bpf-linker", BPF_LINKER_VERSION);
    cargo_install("bpf-linker", BPF_LINKER_VERSION, &root, &[])?;
    toolchain::bpf_linker().map(drop).with_context(|| {
        format!(
            "bpf-linker {BPF_LINKER_VERSION} was built but does not run: try `{}`",
            root.join("bin/bpf-linker").display()
        )
    })
}

fn cargo_install(name: &str, version: &str, root: &Path, options: &[&str]) -> Result<()> {
    eprintln!("{name} {version}: missing, building it (a few minutes)");
    fs::create_dir_all(root).with_context(|| {
        format!(
            "cannot make {}: set INSPECTOR_TOOLS to a folder that can be written to",
            root.display()
        )
    })?;
    let mut install = process::cargo();
    install
        .args(["install", name, "--version", version, "--locked", "--quiet"])
        .args(options)
        .arg("--root")
        .arg(root)
        // Its binaries are used by their full path: no need to be told to extend PATH.
        .current_dir(root);
    process::run(&mut install).with_context(|| {
        format!(
            "{name} could not be built: look at the messages above, or install it by hand with \
             `cargo install {name} --version {version} --locked --root {}`",
            root.display()
        )
    })
}

fn core_source() -> Result<()> {
    let rustc = process::rustc();
    let sysroot =
        toolchain::sysroot(Path::new(rustc.get_program())).map_err(|error| anyhow!(error))?;
    let library = toolchain::library_in(&sysroot);
    if toolchain::library_is_complete(&library) {
        eprintln!("core's source: there ({})", library.display());
        return Ok(());
    }
    let version = rustc_version()?;
    eprintln!("core's source for rustc {version}: missing");

    let mut tried = Vec::new();
    for (name, way) in WAYS {
        eprintln!("core's source: trying {name}");
        let outcome = way(&version, &library).and_then(|()| {
            if toolchain::library_is_complete(&library) {
                Ok(())
            } else {
                Err(anyhow!("it gave no {}", library.join("core/src/lib.rs").display()))
            }
        });
        match outcome {
            Ok(()) => {
                eprintln!("core's source: from {name} ({})", library.display());
                return Ok(());
            }
            Err(error) => tried.push(format!("{name}: {error:#}")),
        }
    }
    bail!(
        "core's source for rustc {version} could not be had ({}); put the folder `library` of \
         exactly this compiler's source at {}",
        tried.join("; "),
        library.display()
    )
}

type Way = fn(version: &str, library: &Path) -> Result<()>;

/// How core's source can be had, in the order in which it is tried.
const WAYS: [(&str, Way); 3] = [
    ("rustup", from_rustup),
    ("an installed Debian package", from_installed_package),
    ("a downloaded Debian package", debian::download),
];

/// The compiler's version as Debian writes it: `1.95.0`. A nightly or beta is an error, since no
/// package is of the same day.
fn rustc_version() -> Result<String> {
    let text = process::output(process::rustc().arg("-vV"))?;
    text.lines()
        .find_map(|line| line.strip_prefix("release: "))
        .map(str::to_owned)
        .context("`rustc -vV` names no release")
}

fn from_rustup(_version: &str, _library: &Path) -> Result<()> {
    if !process::is_installed("rustup") {
        bail!("it is not installed");
    }
    process::output(
        Command::new("rustup")
            .args(["component", "add", "rust-src"])
            .current_dir(process::workspace()),
    )
    .map(drop)
}

fn from_installed_package(version: &str, library: &Path) -> Result<()> {
    let source = PathBuf::from(format!("/usr/src/rustc-{version}/library"));
    if !toolchain::library_is_complete(&source) {
        bail!("{} is not there", source.display());
    }
    copy_library(&source, library)
}

/// Copies a `library` folder to its place. It appears there whole or not at all.
fn copy_library(source: &Path, library: &Path) -> Result<()> {
    let parent = library.parent().context("the place for core's source has no parent folder")?;
    fs::create_dir_all(parent).with_context(|| {
        format!("cannot make {}: run this as the owner of the toolchain", parent.display())
    })?;
    let partial = parent.join("library.partial");
    process::remove_dir(&partial)?;
    process::output(Command::new("cp").args(["-RL"]).arg(source).arg(&partial))?;
    process::remove_dir(library)?;
    fs::rename(&partial, library)
        .with_context(|| format!("cannot move core's source to {}", library.display()))
}
