//! The command line: what was typed, turned into what it means, and run.

mod args;
mod check;
mod cluster;
mod datapath;
mod doctor;
mod evidence;
mod inject;
mod lint;
mod lists;
mod output;
mod trace;
mod vip;
mod watch;

use std::{io, process::ExitCode};

use clap::{CommandFactory, Parser};

pub use args::Cli;
use args::{Command, Resolved};
use inspector::{collect::CollectError, evidence::file::FileError, inject::InjectError};

/// What a run comes to. The numbers are the exit codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Yes: served, every expectation met, or what was asked for was printed.
    Yes = 0,
    /// No.
    No = 1,
    /// It cannot be told: privilege, kernel or traffic is missing.
    CannotTell = 3,
}

impl From<Answer> for ExitCode {
    fn from(answer: Answer) -> Self {
        Self::from(answer as u8)
    }
}

/// A usage or environment error.
const ENVIRONMENT: u8 = 2;

/// Parses the arguments, runs the command and turns the result into an exit code.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are answers, the rest are errors; clap knows which goes where.
            let code =
                if error.use_stderr() { ExitCode::from(ENVIRONMENT) } else { ExitCode::SUCCESS };
            return match error.print() {
                Ok(()) => code,
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
                Err(_) => ExitCode::from(ENVIRONMENT),
            };
        }
    };
    match run(cli) {
        Ok(answer) => answer.into(),
        // Somebody who pipes into `head` has seen enough.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            output::say(format_args!("{error}"));
            exit_code(&error)
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let direct = cause.downcast_ref::<io::Error>().map(io::Error::kind);
        let through_json =
            cause.downcast_ref::<serde_json::Error>().and_then(serde_json::Error::io_error_kind);
        direct.or(through_json) == Some(io::ErrorKind::BrokenPipe)
            // What was to be read is another matter.
            && !error.is::<FileError>()
    })
}

fn exit_code(error: &anyhow::Error) -> ExitCode {
    let privilege = error.downcast_ref::<CollectError>().is_some_and(CollectError::is_permission);
    // What cannot be simulated or traced is not known; nothing is wrong with the question.
    let unknown = error.is::<inspector::judge::JudgeError>()
        || error.is::<inspector::simulate::SimulateError>()
        || error.downcast_ref::<InjectError>().is_some_and(|error| !error.is_usage())
        || error.is::<inspector::trace::TraceError>();
    if privilege || unknown { Answer::CannotTell.into() } else { ExitCode::from(ENVIRONMENT) }
}

fn run(cli: Cli) -> anyhow::Result<Answer> {
    let Cli { command, common } = cli;
    let options = Resolved::new(common)?;
    match command {
        Command::Vip(args) => vip::run(&args, &options),
        Command::Check { file } => check::run(&file, &options),
        Command::Service { list: args::ServiceCommand::List } => lists::service_list(&options),
        Command::Lb { list: args::LbCommand::List(views) } => lists::lb_list(&views, &options),
        Command::Datapath(args) => datapath::run(&args, &options),
        Command::Evidence { action } => evidence::run(&action, &options),
        Command::Lint { paths } => lint::run(&paths, &options),
        Command::Trace(args) => trace::run(&args, &options),
        Command::Doctor => doctor::run(&options),
        Command::Completions { shell } => {
            // Into memory first: the generator panics where it cannot write.
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "inspect", &mut script);
            output::write_stdout(|out| out.write_all(&script))?;
            Ok(Answer::Yes)
        }
        Command::Man => {
            output::write_stdout(|out| man(out))?;
            Ok(Answer::Yes)
        }
    }
}

/// One page with a section for each command.
fn man(out: &mut dyn io::Write) -> io::Result<()> {
    let mut command = Cli::command();
    command.build();
    let page = clap_mangen::Man::new(command.clone());
    page.render_title(out)?;
    page.render_name_section(out)?;
    page.render_synopsis_section(out)?;
    page.render_description_section(out)?;
    page.render_options_section(out)?;
    for sub in leaves(&command) {
        let page = clap_mangen::Man::new(sub.clone());
        writeln!(out, ".SH {}", sub.get_bin_name().unwrap_or_default().to_uppercase())?;
        if let Some(about) = sub.get_long_about().or_else(|| sub.get_about()) {
            writeln!(out, "{}", about.to_string().replace('-', "\\-"))?;
        }
        page.render_options_section(out)?;
    }
    Ok(())
}

/// The commands that do something, from the nested ones.
fn leaves(command: &clap::Command) -> Vec<&clap::Command> {
    command
        .get_subcommands()
        .filter(|sub| sub.get_name() != "help")
        .flat_map(|sub| if sub.has_subcommands() { leaves(sub) } else { vec![sub] })
        .collect()
}
