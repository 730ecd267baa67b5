//! The programs of netfilter: installed, or unpacked by set-up.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

use inspector_lab::{Lab, Ns};

/// Where the programs of netfilter are: `/`, or the folder into which set-up unpacked them.
pub fn root() -> PathBuf {
    // All of them, as set-up has it: a machine may have iptables and no nft.
    let is_there = |root: &PathBuf| {
        ["iptables-nft-save", "ip6tables-nft-save", "nft"]
            .iter()
            .all(|tool| root.join("usr/sbin").join(tool).exists())
    };
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
    let tools = set("INSPECTOR_TOOLS").or_else(|| cache.map(|cache| cache.join("inspector-tools")));
    let unpacked = tools.map(|tools| tools.join("netfilter"));
    [Some(PathBuf::from("/")), unpacked].into_iter().flatten().find(is_there).expect(
        "iptables and nftables: run `cargo xtask setup`, or install the packages of these names",
    )
}

/// Makes `command` find the programs, and these their libraries and plug-ins.
pub fn with_tools<'a>(command: &'a mut Command, root: &Path) -> &'a mut Command {
    let libraries = root.join("usr/lib").join(format!("{}-linux-gnu", env::consts::ARCH));
    if root != Path::new("/") {
        let also = root.join("lib").join(format!("{}-linux-gnu", env::consts::ARCH));
        let paths = env::join_paths([&libraries, &also]).expect("paths");
        command.env("LD_LIBRARY_PATH", paths).env("XTABLES_LIBDIR", libraries.join("xtables"));
    }
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = [root.join("usr/sbin"), root.join("sbin")];
    let all = folders.into_iter().chain(env::split_paths(&path));
    command.env("PATH", env::join_paths(all).expect("paths"))
}

/// Runs a line of the shell in the lab's node.
pub fn shell(lab: &Lab, root: &Path, script: &str) -> String {
    let mut command = Command::new("sh");
    command.args(["-ec", script]);
    let command = lab.exec_in(Ns::Node, with_tools(&mut command, root)).expect("the node");
    let output = command.output().expect("sh");
    assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}
