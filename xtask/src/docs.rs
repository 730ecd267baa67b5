//! `cargo xtask docs`: writes the pages that hold what the program prints.

use anyhow::Result;

use crate::{process, root, setup};

/// Sets up and runs the test that holds the pages to the program, told to write them first.
pub fn run() -> Result<()> {
    let prefix = root::prefix()?;
    setup::ensure()?;
    let mut test = process::cargo();
    test.args(["test", "--package", "inspector", "--test", "docs"]);
    test.env("INSPECTOR_WRITE_DOCS", "1");
    root::run_through(&mut test, &prefix);
    process::run(&mut test)
}
