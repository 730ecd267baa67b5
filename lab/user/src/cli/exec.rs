//! `exec`: runs a command in a lab.
//!
//! The command has this process's terminal and process group, so a terminal's signals reach it by
//! themselves; those that another process sends are passed on. Between them, and once a second,
//! the agent's sign of life is refreshed.

use std::{
    io,
    os::{
        fd::AsFd,
        unix::process::{CommandExt, ExitStatusExt},
    },
    process::{Child, Command, ExitCode, ExitStatus},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use clap::Args;
use inspector_lab::{Agent, Ns, lab, maps, state::Record};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        resource::{Resource, setrlimit},
        signal::{SigHandler, SigSet, SigmaskHow, Signal, kill, raise, sigprocmask},
        signalfd::{SfdFlags, SignalFd},
    },
    unistd::Pid,
};

/// How often Cilium's agent gives its sign of life.
const REFRESH: Duration = Duration::from_secs(1);

#[derive(Debug, Args)]
pub struct Exec {
    /// Name of the lab
    #[arg(long, default_value = super::DEFAULT_NAME)]
    name: String,

    /// Where: node, client, vpn, host60, lan, pod1, pod2 … [default: node]
    #[arg(long = "in", value_name = "PLACE")]
    place: Option<Ns>,

    /// The command and its arguments
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

impl Exec {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        inspector_lab::state::check_root()?;
        let record = Record::read(&self.name)?;
        if !record.complete {
            bail!(
                "the lab {name} is not complete: wait for its `up`, or remove it with `down --name \
                 {name}`",
                name = self.name
            );
        }
        let Some((program, arguments)) = self.command.split_first() else {
            bail!("no command was given");
        };
        let mut command = Command::new(program);
        command.args(arguments);
        match self.place {
            // A lab of maps alone has no place to go to.
            None if record.netns.is_none() => {
                command.env("INSPECT_BPFFS", &record.bpffs);
            }
            place => {
                lab::exec_in(&record, place.unwrap_or(Ns::Node), &mut command)?;
            }
        }

        let runtime_config = maps::globals(&record.bpffs).join("cilium_runtime_config");
        let mut refreshed = record.agent == Agent::Alive && runtime_config.exists();
        if refreshed {
            lab::set_agent_alive(&record.bpffs)?;
        }
        let mut signals = Signals::take()?;
        let before = signals.before;
        // SAFETY: between fork and exec the closure makes one system call and allocates nothing.
        unsafe {
            command.pre_exec(move || {
                sigprocmask(SigmaskHow::SIG_SETMASK, Some(&before), None).map_err(io::Error::from)
            });
        }
        let mut child = match command.spawn() {
            Ok(child) => child,
            // As shells and env(1) say it.
            Err(error) => {
                eprintln!("error: cannot run {program}: {error}");
                let missing = error.kind() == io::ErrorKind::NotFound;
                return Ok(ExitCode::from(if missing { 127 } else { 126 }));
            }
        };
        let status = loop {
            if let Some(status) = signals.wait(&mut child, REFRESH)? {
                break status;
            }
            if refreshed && let Err(error) = lab::set_agent_alive(&record.bpffs) {
                // The command may well be what took the map away.
                eprintln!("the agent's sign of life is refreshed no longer: {error}");
                refreshed = false;
            }
        };
        signals.give_back()?;
        Ok(end_like(status))
    }
}

/// Signals to this process, read instead of suffered.
struct Signals {
    fd: SignalFd,
    /// The mask before.
    before: SigSet,
}

impl Signals {
    fn take() -> anyhow::Result<Self> {
        let mask: SigSet = [
            Signal::SIGINT,
            Signal::SIGTERM,
            Signal::SIGHUP,
            Signal::SIGQUIT,
            Signal::SIGUSR1,
            Signal::SIGUSR2,
            Signal::SIGCHLD,
        ]
        .into_iter()
        .collect();
        let before = mask.thread_swap_mask(SigmaskHow::SIG_BLOCK).context("blocking signals")?;
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        Ok(Self { fd: SignalFd::with_flags(&mask, flags).context("reading signals")?, before })
    }

    /// Passes signals on for at most `time`; the status when the child has ended.
    fn wait(&mut self, child: &mut Child, time: Duration) -> anyhow::Result<Option<ExitStatus>> {
        let start = Instant::now();
        loop {
            if let Some(status) = child.try_wait()? {
                return Ok(Some(status));
            }
            let Some(left) = time.checked_sub(start.elapsed()) else { return Ok(None) };
            let mut ready = [PollFd::new(self.fd.as_fd(), PollFlags::POLLIN)];
            // Rounded up: never zero, which would spin.
            let milliseconds = u16::try_from(left.as_millis() + 1).unwrap_or(u16::MAX);
            poll(&mut ready, PollTimeout::from(milliseconds)).context("waiting for signals")?;
            while let Some(info) = self.fd.read_signal().context("reading signals")? {
                let signal = info.ssi_signo.cast_signed();
                // What the kernel sends on behalf of a terminal has gone to the child as well.
                let sent = info.ssi_code <= libc::SI_USER;
                if signal != libc::SIGCHLD && sent {
                    let pid = Pid::from_raw(child.id().cast_signed());
                    // It has not been waited for, so the number is still its own.
                    kill(pid, Signal::try_from(signal)?).context("passing a signal on")?;
                }
            }
        }
    }

    fn give_back(self) -> anyhow::Result<()> {
        self.before.thread_set_mask().context("unblocking signals")
    }
}

/// Ends this process as the child ended: with its status, or by the signal that ended it.
fn end_like(status: ExitStatus) -> ExitCode {
    let Some(number) = status.signal() else {
        let code = status.code().and_then(|code| u8::try_from(code).ok());
        return ExitCode::from(code.unwrap_or(2));
    };
    if let Ok(signal) = Signal::try_from(number) {
        // The command has left a core file, if it was to; ours says nothing.
        let _ = setrlimit(Resource::RLIMIT_CORE, 0, 0);
        // SAFETY: the default action runs no code of this process.
        let _ = unsafe { nix::sys::signal::signal(signal, SigHandler::SigDfl) };
        let _ = raise(signal);
    }
    ExitCode::from(u8::try_from(128 + number).unwrap_or(2))
}
