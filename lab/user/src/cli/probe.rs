//! `probe`: connects from every place of a lab to every frontend, and says what happened.

use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
    process::{Child, Command, ExitCode, Stdio},
    time::Duration,
};

use anyhow::{Context, bail};
use clap::Args;
use inspector_lab::{
    Agent, Capture, lab, maps,
    probe::{self, Attempt, Outcome, Source},
    state::{self, Record},
};

#[derive(Debug, Args)]
pub struct Probe {
    /// Name of the lab
    #[arg(long, default_value = super::DEFAULT_NAME)]
    name: String,

    /// How long one connection may take, milliseconds
    #[arg(long, value_name = "MS", default_value_t = 1500)]
    patience: u64,
}

#[derive(Debug, Args)]
pub struct Connect {
    /// How long one connection may take, milliseconds
    #[arg(long, value_name = "MS")]
    patience: u64,
}

impl Probe {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        state::check_root()?;
        let record = Record::read(&self.name)?;
        let Some(path) = record.capture.as_ref().filter(|_| record.netns.is_some()) else {
            bail!(
                "the lab {} has no capture or no network: there is nothing to connect to or from; \
                 make it with `up CAPTURE`",
                self.name
            );
        };
        let attempts = probe::attempts(&Capture::open(path)?)?;
        if record.agent == Agent::Alive
            && maps::globals(&record.bpffs).join("cilium_runtime_config").exists()
        {
            // The L2 responder believes in the agent for 15 seconds after this.
            lab::set_agent_alive(&record.bpffs)?;
        }

        let mut places = BTreeMap::<Source, Vec<usize>>::new();
        for (number, attempt) in attempts.iter().enumerate() {
            let source = attempt.source().with_context(|| {
                format!("`{}` is no place from which the lab could connect", attempt.from)
            })?;
            places.entry(source).or_default().push(number);
        }
        let mut children = Vec::new();
        for (source, numbers) in places {
            let attempts: Vec<&Attempt> = numbers.iter().map(|number| &attempts[*number]).collect();
            children.push((numbers, start(&record, source, &attempts, self.patience)?));
        }
        let mut outcomes: Vec<Option<Outcome>> = vec![None; attempts.len()];
        for (numbers, child) in children {
            let output = child.wait_with_output().context("waiting for the connections")?;
            if !output.status.success() {
                bail!("the process that connects ended early ({})", output.status);
            }
            let some: Vec<Outcome> = serde_json::from_slice(&output.stdout)
                .context("reading what the connections met with")?;
            for (number, outcome) in numbers.into_iter().zip(some) {
                outcomes[number] = Some(outcome);
            }
        }
        let outcomes: Vec<Outcome> = outcomes.into_iter().flatten().collect();
        print(&outcomes)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Starts the process that connects from one place.
fn start(
    record: &Record,
    source: Source,
    attempts: &[&Attempt],
    patience: u64,
) -> anyhow::Result<Child> {
    let program = std::env::current_exe().context("finding this program")?;
    let mut command = Command::new(program);
    command.args(["connect", "--patience", &patience.to_string()]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    if source.in_cgroup {
        lab::exec_in(record, source.place, &mut command)?;
    } else {
        lab::exec_outside(record, source.place, &mut command)?;
    }
    let mut child = command.spawn().context("starting the process that connects")?;
    let mut stdin = child.stdin.take().context("the process that connects has no stdin")?;
    // It reads all of it before it does anything.
    stdin
        .write_all(&serde_json::to_vec(attempts)?)
        .context("telling the process what to connect to")?;
    Ok(child)
}

impl Connect {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let mut text = Vec::new();
        io::stdin().read_to_end(&mut text).context("reading stdin")?;
        let attempts: Vec<Attempt> =
            serde_json::from_slice(&text).context("stdin is not a list of connections")?;
        let outcomes = probe::connect_all(&attempts, Duration::from_millis(self.patience));
        print(&outcomes)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// A list with one outcome per line. Whoever stops reading has read enough.
fn print(outcomes: &[Outcome]) -> anyhow::Result<()> {
    let lines: Vec<String> =
        outcomes.iter().map(serde_json::to_string).collect::<Result<_, _>>()?;
    match writeln!(io::stdout(), "[\n{}\n]", lines.join(",\n")) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => Ok(result?),
    }
}
