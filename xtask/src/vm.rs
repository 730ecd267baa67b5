//! `cargo xtask vm KERNEL… -- TESTS`: tests in virtual machines with Debian's kernels.
//!
//! What this machine's kernel lacks is tested so: other versions, WireGuard, devices that only some
//! kernels have. The tests are built here and run there.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::Args;

use crate::setup::machines::{Kernel, Tools};
use crate::{process, root, setup};

mod archive;
mod job;
mod machine;

use job::Job;
use machine::Settings;

/// Seconds until a machine is up: some where the processor is emulated, here and on busy machines.
const BOOT_TIMEOUT: u64 = 120;
/// Seconds for all that runs in one machine.
const TIMEOUT: u64 = 900;
/// Megabytes.
const MEMORY: u32 = 1024;

#[derive(Args)]
pub struct Arguments {
    /// Kernels of Debian: how the version begins (6.1, 6.12), or `newest`.
    #[arg(required = true, value_name = "KERNEL")]
    kernels: Vec<String>,
    /// Run this command instead of tests; its exit status is ours.
    #[arg(long, num_args = 1.., allow_hyphen_values = true, value_name = "COMMAND")]
    exec: Vec<OsString>,
    /// Look for newer kernels of these versions than those that were downloaded once.
    #[arg(long)]
    update: bool,
    /// Seconds that a machine may take to come up.
    #[arg(long, default_value_t = BOOT_TIMEOUT, value_name = "SECONDS")]
    boot_timeout: u64,
    /// Seconds that all that runs in one machine may take.
    #[arg(long, default_value_t = TIMEOUT, value_name = "SECONDS")]
    timeout: u64,
    /// Memory of a machine in megabytes.
    #[arg(long, default_value_t = MEMORY, value_name = "MEGABYTES")]
    memory: u32,
    /// Emulate the processor even where KVM works.
    #[arg(long)]
    emulate: bool,
    /// What `cargo test` takes to choose tests, what the tests take after another `--`.
    #[arg(
        last = true,
        value_name = "TESTS",
        conflicts_with = "exec",
        required_unless_present = "exec"
    )]
    tests: Vec<OsString>,
}

/// What the runner that cargo is given takes.
#[derive(Args)]
pub struct Record {
    file: PathBuf,
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<OsString>,
}

/// `cargo xtask vm`.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let settings = Settings {
        boot: Duration::from_secs(arguments.boot_timeout),
        jobs: Duration::from_secs(arguments.timeout),
        memory: arguments.memory,
        emulate: arguments.emulate,
    };
    let jobs = if arguments.exec.is_empty() {
        setup::ensure()?;
        built(&arguments.tests)?
    } else {
        vec![Job::here(arguments.exec.clone())?]
    };
    let tools = Tools::get()?;
    let mut code = ExitCode::SUCCESS;
    for wanted in &arguments.kernels {
        let kernel = Kernel::get(&tools, wanted, arguments.update)?;
        let outcome = in_machine(&tools, &kernel, &jobs, &settings);
        match outcome {
            Ok(0) => {}
            // A command's own status, unless one before failed.
            Ok(status) if code == ExitCode::SUCCESS => code = ExitCode::from(status),
            Ok(_) => {}
            Err(error) => {
                eprintln!("error: Linux {}: {error:#}", kernel.release);
                code = ExitCode::FAILURE;
            }
        }
    }
    Ok(code)
}

/// Runs tests, chosen as `cargo test` takes it, in a machine with this kernel.
///
/// # Errors
/// A test failed, which it said itself, or a machine did.
pub fn check(wanted: &str, tests: &[&str]) -> Result<()> {
    let tools = Tools::get()?;
    let kernel = Kernel::get(&tools, wanted, false)?;
    let tests: Vec<_> = tests.iter().map(OsString::from).collect();
    let jobs = built(&tests)?;
    let settings = Settings {
        boot: Duration::from_secs(BOOT_TIMEOUT),
        jobs: Duration::from_secs(TIMEOUT),
        memory: MEMORY,
        emulate: false,
    };
    let status = in_machine(&tools, &kernel, &jobs, &settings)
        .with_context(|| format!("Linux {}", kernel.release))?;
    if status != 0 {
        bail!("tests failed in Linux {}: see above", kernel.release);
    }
    Ok(())
}

/// Runs the jobs in a machine, says how they ended, and returns the first status that is not 0.
fn in_machine(tools: &Tools, kernel: &Kernel, jobs: &[Job], settings: &Settings) -> Result<u8> {
    let folder = process::target_dir().join("vm").join(&kernel.release);
    let lock = folder.with_added_extension("lock");
    let _lock = setup::Lock::take(&lock, "another run in this kernel")?;
    process::remove_dir(&folder)?;
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;

    let start = Instant::now();
    let outcome = machine::run(tools, kernel, &folder, jobs, settings)?;
    let mut first = 0;
    for (job, (status, took)) in jobs.iter().zip(&outcome.jobs) {
        if *status != 0 {
            first = if first == 0 { *status } else { first };
            eprintln!("Linux {}: {} ended with status {status}", kernel.release, job.name());
        } else if jobs.len() > 1 {
            eprintln!("Linux {}: {} took {:.1} s", kernel.release, job.name(), took.as_secs_f64());
        }
    }
    eprintln!(
        "Linux {} ({}): up after {:.1} s, done after {:.1} s",
        kernel.release,
        outcome.accelerator,
        outcome.boot.as_secs_f64(),
        start.elapsed().as_secs_f64()
    );
    Ok(u8::try_from(first).unwrap_or(1))
}

/// Builds tests and returns how cargo would run them: its runner is replaced by one that writes
/// down the command, the folder and the environment that cargo gave it.
fn built(tests: &[OsString]) -> Result<Vec<Job>> {
    let folder = process::target_dir().join("vm");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let file = folder.join(format!("jobs-{}", std::process::id()));
    let own = std::env::current_exe().context("this program's path")?;
    let runner: Vec<OsString> = vec![own.into(), "vm-record".into(), file.clone().into()];

    let mut cargo = process::cargo();
    cargo.arg("test");
    root::run_through(&mut cargo, &runner);
    let result = process::run(cargo.args(tests))
        .and_then(|()| if file.exists() { Job::read_all(&file) } else { Ok(Vec::new()) });
    let _ = fs::remove_file(&file);
    let jobs = result?;
    if jobs.is_empty() {
        bail!(
            "these words choose no test program: give what `cargo test` takes, such as \
               -p inspector --test datapath"
        );
    }
    let chosen: Vec<_> =
        jobs.iter().map(|job| Ok((job.name(), job.tests()?))).collect::<Result<_>>()?;
    let words: Vec<_> = tests.iter().map(|word| word.to_string_lossy()).collect();
    if let Some(why) = without_tests(&words, &chosen) {
        bail!("{why}");
    }
    Ok(jobs)
}

/// Options of a test program that take a value, which is no filter.
const WITH_VALUE: [&str; 6] =
    ["--skip", "--test-threads", "--logfile", "--color", "--format", "--shuffle-seed"];

/// Says what of these words chooses nothing: a filter that no test's name matches, or a program that
/// is named and would run no test. `chosen` are the programs with the tests that they would run.
/// Such a run would succeed and say nothing.
fn without_tests<W: AsRef<str>>(words: &[W], chosen: &[(String, Vec<String>)]) -> Option<String> {
    let words: Vec<&str> = words.iter().map(AsRef::as_ref).collect();
    let end = words.iter().position(|word| *word == "--").unwrap_or(words.len());
    let (for_cargo, for_tests) = words.split_at(end);

    let mut filters = Vec::new();
    let mut rest = for_tests.iter().skip(1);
    while let Some(word) = rest.next() {
        if WITH_VALUE.contains(word) || *word == "-Z" {
            rest.next();
        } else if !word.starts_with('-') {
            filters.push(*word);
        }
    }
    let is_exact = for_tests.contains(&"--exact");
    let tests = || chosen.iter().flat_map(|(_, names)| names);
    let is_matched = |filter: &str| {
        tests().any(|name| if is_exact { name == filter } else { name.contains(filter) })
    };
    if let Some(filter) = filters.iter().find(|filter| !is_matched(filter)) {
        return Some(format!("no test's name matches {filter}: `-- --list` shows all names"));
    }

    // Those that are named; where none is, cargo has taken all there are, and some have no tests.
    let named: Vec<&str> = for_cargo
        .iter()
        .zip(for_cargo.iter().skip(1))
        .filter(|(option, _)| matches!(**option, "--test" | "--bin" | "--example" | "--bench"))
        .map(|(_, name)| *name)
        .chain(for_cargo.iter().filter_map(|word| word.strip_prefix("--test=")))
        .collect();
    // Two packages may have a program of one name: one of them is enough.
    let runs =
        |program: &str| chosen.iter().any(|(one, names)| one == program && !names.is_empty());
    let empty = chosen.iter().find(|(program, _)| {
        !runs(program) && (named.contains(&program.as_str()) || tests().next().is_none())
    });
    empty.map(|(program, _)| {
        format!("{program} would run no test: name other tests, or leave {program} out")
    })
}

/// `cargo xtask vm-record`: what runs instead of a test program when [`built`] asks cargo for it.
pub fn record(arguments: &Record) -> Result<()> {
    let program = arguments.words.first().context("no program")?;
    // Documentation's tests are built for the moment.
    if !Path::new(program).starts_with(process::target_dir()) {
        bail!("tests in documentation cannot be run in a virtual machine: choose --lib or --test");
    }
    Job::here(arguments.words.clone())?.write_to(&arguments.file)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What [`without_tests`] says of these words, where `some` has the tests `one` and `two` of
    /// which the words have chosen `left`, and `other` has none.
    fn said(words: &str, left: &[&str]) -> Option<String> {
        let words: Vec<_> = words.split_whitespace().collect();
        let left = left.iter().map(|&name| name.to_owned()).collect();
        without_tests(&words, &[("some".to_owned(), left), ("other".to_owned(), Vec::new())])
    }

    #[test]
    fn words_that_choose_no_test_are_told() {
        let both = ["one", "two"];
        assert_eq!(said("-p a", &both), None);
        assert_eq!(said("--test some -- on tw --skip x --test-threads 1", &both), None);
        assert_eq!(said("--test some -- --exact one", &["one"]), None);
        for (words, left, subject) in [
            ("--test some -- one three", &["one"][..], "three"),
            ("--test some -- one thr --nocapture", &["one"], "thr"),
            ("--test some -- --exact on", &["one"], "on"),
            ("--test some --test other", &both, "other"),
            ("--test=other --test some", &both, "other"),
            ("-p a -- --skip o", &[], "some"),
        ] {
            let said = said(words, left).unwrap_or_else(|| panic!("{words}: nothing"));
            assert!(said.contains(subject), "{words}: {said}");
        }
    }

    #[test]
    fn one_of_two_programs_of_a_name_is_enough() {
        let program = |names: &[&str]| {
            ("datapath".to_owned(), names.iter().map(|&name| name.to_owned()).collect())
        };
        let words = ["--test", "datapath", "--", "clsact"];
        assert_eq!(without_tests(&words, &[program(&["of_clsact"]), program(&[])]), None);
        assert!(without_tests(&words, &[program(&[]), program(&[])]).is_some());
    }
}
