//! `down`: removes a lab that was left up, or what a killed `up` left.

use std::process::ExitCode;

use clap::Args;
use inspector_lab::{StateError, state};

#[derive(Debug, Args)]
pub struct Down {
    /// Name of the lab
    #[arg(long, default_value = super::DEFAULT_NAME)]
    name: String,

    /// Remove every lab that no running process owns
    #[arg(long, conflicts_with = "name")]
    all: bool,
}

impl Down {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        if !self.all {
            state::down(&self.name)?;
            return Ok(ExitCode::SUCCESS);
        }
        state::check_root()?;
        let mut problem = None;
        for name in state::list()? {
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
}
