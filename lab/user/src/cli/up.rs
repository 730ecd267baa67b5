//! `up`: makes a lab and leaves it up.

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{Args, ValueEnum};
use inspector_lab::{Agent, Capture, Lab, capture, state};

#[derive(Debug, Args)]
pub struct Up {
    /// Folder of a capture, or FOLDER/PREFIX for one state of a faults folder; a path, or a name
    /// below lab/captures
    #[arg(default_value = "v1.21-tcx")]
    capture: PathBuf,

    /// Name of the lab
    #[arg(long, default_value = super::DEFAULT_NAME)]
    name: String,

    /// Take what the capture lacks from this one
    #[arg(long, value_name = "CAPTURE")]
    over: Option<PathBuf>,

    /// Whether Cilium's agent seems to live while commands run in the lab
    #[arg(long, value_enum, default_value_t = Life::Alive)]
    agent: Life,

    /// Make the maps alone, without network namespaces
    #[arg(long)]
    no_network: bool,

    /// Make a cluster of as many nodes on one LAN: the labs NAME-n1, NAME-n2, …, each with maps,
    /// programs and an announcer of its own; prints one line for each
    #[arg(long, value_name = "NUMBER", conflicts_with = "no_network")]
    nodes: Option<u8>,

    /// Attach no programs, and start no servers where the capture has backends
    #[arg(long)]
    no_datapath: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Life {
    /// Its sign of life is refreshed once a second
    Alive,
    /// Its sign of life is the captured one, from long ago
    Dead,
}

impl Up {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        state::check_root()?;
        let mut capture = Capture::open(find(&self.capture))?;
        if let Some(base) = &self.over {
            capture = capture.over(Capture::open(find(base))?);
        }
        let builder = Lab::builder()
            .captured(capture)
            .name(self.name)
            .network(!self.no_network)
            .datapath(!self.no_network && !self.no_datapath)
            .agent(match self.agent {
                Life::Alive => Agent::Alive,
                Life::Dead => Agent::Dead,
            });
        let labs = match self.nodes {
            Some(nodes) => builder.up_cluster(nodes)?,
            None => vec![builder.up()?],
        };
        // Before the labs are left up: whoever cannot be told of them has none.
        for lab in &labs {
            let line = serde_json::to_string(lab.record())?;
            writeln!(io::stdout(), "{line}")?;
        }
        for lab in labs {
            lab.detach()?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The path as given if there is something, else as a name below `lab/captures`.
fn find(path: &Path) -> PathBuf {
    let named = capture::project_captures().join(path);
    let is_named = named.exists() || Capture::open(&named).is_ok();
    if is_named && !path.exists() { named } else { path.to_owned() }
}
