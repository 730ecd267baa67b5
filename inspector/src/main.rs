//! The `inspect` command.
fn main() {}
