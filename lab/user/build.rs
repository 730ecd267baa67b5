//! Builds the stand-in for Cilium's datapath.

use std::path::Path;
use std::process::ExitCode;

#[path = "../../xtask/build/ebpf.rs"]
mod ebpf;

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    ebpf::run(&root, "inspector-lab-ebpf", "lab/ebpf", &[])
}
