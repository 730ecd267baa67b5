//! `cargo xtask test`: everything that has to hold before a change is taken. CI runs the same.

use anyhow::Result;

use crate::{lint, process, root, setup};

/// Runs set-up, lints and every test, what is cheap first.
pub fn run() -> Result<()> {
    // Asked before anything that takes time.
    let prefix = root::prefix()?;
    lint::format()?;
    setup::ensure()?;
    lint::dependencies()?;
    lint::clippy()?;

    let mut tests = process::cargo();
    tests.args(["test", "--workspace", "--exclude", "inspector-ebpf", "--no-fail-fast"]);
    if !prefix.is_empty() {
        let words: Vec<_> =
            prefix.iter().map(|word| toml_string(&word.to_string_lossy())).collect();
        let runner = format!("target.'cfg(all())'.runner = [{}]", words.join(", "));
        tests.args(["--config", &runner]);
    }
    process::run(&mut tests)
}

/// A TOML basic string.
fn toml_string(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}
