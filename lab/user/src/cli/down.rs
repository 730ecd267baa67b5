//! `down`: removes a lab that was left up, or what a killed `up` left.

use std::process::ExitCode;

use clap::Args;
use inspector_lab::{StateError, cluster, state};

#[derive(Debug, Args)]
pub struct Down {
    /// Name of the lab, or of a cluster
    #[arg(long, default_value = super::DEFAULT_NAME)]
    name: String,

    /// Remove every lab that no running process owns
    #[arg(long, conflicts_with = "name")]
    all: bool,
}

impl Down {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        if !self.all {
            let nodes = cluster::nodes_of(&self.name, &state::list()?);
            match state::down(&self.name) {
                Err(StateError::NotUp { .. }) if !nodes.is_empty() => {}
                result => {
                    result?;
                    return Ok(ExitCode::SUCCESS);
                }
            }
            return down(nodes);
        }
        state::check_root()?;
        down(state::list()?)
    }
}

/// Removes several labs, those that nobody owns.
fn down(names: Vec<String>) -> anyhow::Result<ExitCode> {
    let mut problem = None;
    for name in names {
        match state::down(&name) {
            // Removed by someone else in the meantime.
            Ok(()) | Err(StateError::NotUp { .. }) => {}
            Err(error @ StateError::Owned { .. }) => eprintln!("left alone: {error}"),
            Err(error) => problem = Some(error),
        }
    }
    match problem {
        Some(error) => Err(error.into()),
        None => Ok(ExitCode::SUCCESS),
    }
}
