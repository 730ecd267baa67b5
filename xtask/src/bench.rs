//! `cargo xtask bench`: what the commands cost on ten thousand services, in real maps, and what the
//! observers cost a packet.

use anyhow::Result;

use crate::{process, root, setup};

/// Sets up, builds with optimisation and measures.
pub fn run() -> Result<()> {
    let prefix = root::prefix()?;
    setup::ensure()?;
    let mut bench = process::cargo();
    bench.args(["bench", "--package", "inspector"]);
    root::run_through(&mut bench, &prefix);
    process::run(&mut bench)
}
