//! Watching packets for a while: when it begins, what runs meanwhile, and when it ends.

use std::{
    cell::Cell,
    fs::{self, File, OpenOptions},
    io::{self, BufWriter, IsTerminal, Write},
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
        unix::fs::MetadataExt,
        unix::process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context as _, bail};
use inspector::{
    collect::CollectError,
    evidence::{
        Evidence, VipQuery,
        trace::{Stopped, Trace},
    },
    judge::journey::Conclusion,
    sys::{
        host,
        signals::{self, Held},
    },
    trace::{
        journey::{Context, Journey},
        pcapng,
        session::{self, Session},
    },
};

use super::{
    args::{Resolved, Watch},
    output,
};

/// How long the answers to a command's last packets are waited for.
const GRACE: Duration = Duration::from_millis(500);
/// How often it is looked whether it is to end.
const TICK: Duration = Duration::from_millis(50);
/// How often progress is shown.
const PROGRESS: Duration = Duration::from_millis(250);
/// How long a command may take to end when it is told to.
const FAREWELL: Duration = Duration::from_secs(2);

/// What is handed each connection that came to an end.
pub type Each<'e> = dyn FnMut(&Journey, &Conclusion, &Context) -> anyhow::Result<()> + Send + 'e;

/// What is told that the hooks are live, and where packets go: opened before anything else, so that
/// what is wrong with it is said at once.
#[derive(Debug)]
pub struct Prepared {
    ready_fd: Option<File>,
    ready_file: Option<PathBuf>,
    pcap: Option<(PathBuf, File)>,
}

/// Checks what can be checked before the node is read.
pub fn prepare(args: &Watch, options: &Resolved) -> anyhow::Result<Prepared> {
    let ready_fd = args.ready_fd.map(take_fd).transpose()?;
    if let Some(path) = &args.ready_file
        && path.symlink_metadata().is_ok()
    {
        bail!("--ready-file {} is there already: remove it, or name another", path.display());
    }
    if args.pcap.is_some() && options.mask.is_some() {
        bail!("--pcap writes the addresses of clients as they are: leave out --mask or --pcap");
    }
    let pcap = args.pcap.as_ref().map(|path| {
        let file = File::create(path)
            .map_err(|error| anyhow::anyhow!("cannot write --pcap {}: {error}", path.display()))?;
        anyhow::Ok((path.clone(), file))
    });
    Ok(Prepared { ready_fd, ready_file: args.ready_file.clone(), pcap: pcap.transpose()? })
}

/// Takes over a file descriptor that whoever started this has left open.
fn take_fd(fd: i32) -> anyhow::Result<File> {
    if (0..=2).contains(&fd) {
        bail!("--ready-fd {fd} is a standard stream: open another descriptor, such as 3");
    }
    // SAFETY: the calls take numbers; what is no descriptor is refused.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    if flags < 0 {
        bail!("--ready-fd {fd} is not open: open it where inspect is started, as in `{fd}>FILE`");
    }
    if flags & libc::O_ACCMODE == libc::O_RDONLY {
        bail!("--ready-fd {fd} is open for reading alone: open it for writing, as in `{fd}>FILE`");
    }
    // SAFETY: as above; the command is not to keep it open.
    unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
    // SAFETY: it is open, this program has opened no file yet that it would keep, and nobody else
    // here closes it.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

impl Prepared {
    /// Says that every hook is live.
    fn ready(&mut self) -> anyhow::Result<()> {
        // Not with the error as a cause: nobody at that end is an error, at standard output it is
        // none.
        if let Some(mut file) = self.ready_fd.take()
            && let Err(error) = file.write_all(b"ready\n")
        {
            bail!("cannot write to --ready-fd: {error}");
        }
        if let Some(path) = &self.ready_file {
            let made = OpenOptions::new().write(true).create_new(true).open(path);
            if let Err(error) = made.and_then(|mut file| file.write_all(b"ready\n")) {
                bail!("cannot make --ready-file {}: {error}", path.display());
            }
        }
        Ok(())
    }
}

/// When to stop.
#[derive(Debug, Clone, Copy)]
pub struct Until {
    /// After this time; without it, not before something else ends it.
    pub duration: Option<Duration>,
    /// Whether to stop when nobody reads standard output any more.
    pub unread: bool,
}

/// Watches, in the network namespace that was chosen. Everything is detached when it returns,
/// whatever it returns.
pub fn watch(
    (evidence, queries, context): (&Evidence, &[VipQuery], Context),
    args: &Watch,
    prepared: Prepared,
    until: Until,
    options: &Resolved,
    each: &mut Each<'_>,
) -> anyhow::Result<Trace> {
    // A signal ends the watching and not the program.
    let held = signals::hold();
    let mut work = Some((context, prepared));
    let mut run = || {
        let Some((context, prepared)) = work.take() else { bail!("nothing to watch") };
        Watcher { evidence, queries, args, until, options, held: &held }
            .run(context, prepared, each)
    };
    match &options.netns {
        Some(netns) => netns.run(run).map_err(CollectError::from)?,
        None => run(),
    }
}

struct Watcher<'w> {
    evidence: &'w Evidence,
    queries: &'w [VipQuery],
    args: &'w Watch,
    until: Until,
    options: &'w Resolved,
    held: &'w Held,
}

impl Watcher<'_> {
    fn run(
        &self,
        context: Context,
        mut prepared: Prepared,
        each: &mut Each<'_>,
    ) -> anyhow::Result<Trace> {
        let mut capture = prepared.pcap.take().map(Capture::new).transpose()?;
        let mut plan = session::plan(self.evidence, self.queries, &context);
        plan.headers = capture.is_some();
        let mut session = Session::start(self.evidence, context, plan, self.args.count)?;
        let progress =
            Progress::new(self.until.duration, self.options, !self.args.command.is_empty());
        let mut each = |journey: &Journey, conclusion: &Conclusion, context: &Context| {
            if let Some(capture) = &mut capture {
                capture.add(journey, conclusion, context)?;
            }
            // What is printed now would stand behind it.
            progress.clear();
            each(journey, conclusion, context)
        };
        prepared.ready()?;
        let mut command = self.command()?;
        let deadline = self.until.duration.map(|time| Instant::now() + time);
        let mut ended: Option<Instant> = None;
        let stopped = loop {
            let now = Instant::now();
            if self.held.take() {
                break Stopped::Interrupt;
            }
            if session.is_full() {
                break Stopped::Count;
            }
            if ended.is_some_and(|ended| now >= ended + GRACE) {
                break Stopped::Command;
            }
            if deadline.is_some_and(|deadline| now >= deadline) {
                break Stopped::Duration;
            }
            if self.until.unread && is_unread() {
                return Err(io::Error::from(io::ErrorKind::BrokenPipe).into());
            }
            if let Some(running) = &mut command
                && ended.is_none()
                && let Some(status) = running.0.try_wait()?
            {
                ended = Some(now);
                self.tell(status);
            }
            progress.show(session.journeys());
            let left = [deadline, ended.map(|ended| ended + GRACE)]
                .into_iter()
                .flatten()
                .map(|end| end.saturating_duration_since(now))
                .min();
            session.step(left.map_or(TICK, |left| left.min(TICK)), &mut each)?;
        };
        progress.clear();
        let trace = session.finish(stopped, &mut each)?;
        // Told to end, if it has not: it was there for the traffic alone.
        drop(command);
        if let Some(capture) = capture {
            capture.finish()?;
        }
        Ok(trace)
    }

    /// Says how a command ended that did not end well.
    fn tell(&self, status: ExitStatus) {
        if !status.success() && !self.options.quiet {
            output::say(format_args!("the command ended with {status}; what was seen counts"));
        }
    }

    /// Starts the command, if there is one: in the network namespace in which this program was
    /// started, with its standard output where ours for messages is.
    fn command(&self) -> anyhow::Result<Option<Running>> {
        let Some((program, arguments)) = self.args.command.split_first() else { return Ok(None) };
        let mut command = Command::new(program);
        let messages = io::stderr().as_fd().try_clone_to_owned().context("standard error")?;
        command.args(arguments).stdout(Stdio::from(messages));
        let start = Path::new("/proc/self/ns/net");
        let inode = |path: &Path| fs::metadata(path).map(|file| file.ino());
        let namespace = if inode(start)? == inode(Path::new("/proc/thread-self/ns/net"))? {
            None
        } else {
            Some(File::open(start)?)
        };
        self.held.let_through(&mut command);
        // SAFETY: between fork and exec the closure makes system calls alone, with a descriptor that
        // it owns and with numbers.
        unsafe {
            command.pre_exec(move || {
                if let Some(file) = &namespace
                    && libc::setns(file.as_raw_fd(), libc::CLONE_NEWNET) != 0
                {
                    return Err(io::Error::last_os_error());
                }
                // Not to outlive this program, should that be killed.
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
                Ok(())
            });
        }
        match command.spawn() {
            Ok(child) => Ok(Some(Running(child))),
            Err(error) => bail!("cannot run `{}`: {error}", program.to_string_lossy()),
        }
    }
}

/// A command under way, which is told to end when this is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        if !matches!(self.0.try_wait(), Ok(None)) {
            return;
        }
        if let Ok(id) = i32::try_from(self.0.id()) {
            // SAFETY: the call takes numbers; the child has not been waited for, so the number is
            // still its own.
            unsafe { libc::kill(id, libc::SIGTERM) };
        }
        let deadline = Instant::now() + FAREWELL;
        while matches!(self.0.try_wait(), Ok(None)) {
            if Instant::now() >= deadline {
                drop(self.0.kill());
                drop(self.0.wait());
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Whether nobody reads standard output any more.
fn is_unread() -> bool {
    let mut one = libc::pollfd { fd: libc::STDOUT_FILENO, events: 0, revents: 0 };
    // SAFETY: the call reads and writes one pollfd.
    let ready = unsafe { libc::poll(&raw mut one, 1, 0) };
    ready > 0 && one.revents & (libc::POLLERR | libc::POLLNVAL) != 0
}

/// A line on a terminal that says how far it is.
struct Progress {
    began: Instant,
    shown: Cell<Option<Instant>>,
    duration: Option<Duration>,
    visible: bool,
}

impl Progress {
    fn new(duration: Option<Duration>, options: &Resolved, has_command: bool) -> Self {
        // A command writes there too.
        let visible = !has_command && !options.quiet && io::stderr().is_terminal();
        Self { began: Instant::now(), shown: Cell::new(None), duration, visible }
    }

    fn show(&self, journeys: u64) {
        if !self.visible || self.shown.get().is_some_and(|shown| shown.elapsed() < PROGRESS) {
            return;
        }
        self.shown.set(Some(Instant::now()));
        let seconds = self.began.elapsed().as_secs();
        let of = self
            .duration
            .map_or_else(String::new, |time| format!(" of {}", humantime::format_duration(time)));
        let connections = if journeys == 1 { "connection" } else { "connections" };
        let text =
            format!("\r\x1b[Kwatching: {seconds}s{of}, {journeys} {connections}; Ctrl-C ends it");
        drop(io::stderr().lock().write_all(text.as_bytes()));
    }

    fn clear(&self) {
        if self.shown.get().is_some() {
            drop(io::stderr().lock().write_all(b"\r\x1b[K"));
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

/// The packets of connections, as a file.
struct Capture {
    path: PathBuf,
    writer: pcapng::Writer<BufWriter<File>>,
}

impl Capture {
    fn new((path, file): (PathBuf, File)) -> anyhow::Result<Self> {
        let day = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let offset = day.saturating_sub(host::monotonic());
        let writer = pcapng::Writer::new(BufWriter::new(file), offset);
        let writer = writer.map_err(|error| failed(&path, &error))?;
        Ok(Self { path, writer })
    }

    fn add(
        &mut self,
        journey: &Journey,
        conclusion: &Conclusion,
        context: &Context,
    ) -> anyhow::Result<()> {
        let comment = conclusion.to_string();
        for step in &journey.steps {
            self.writer
                .write(&step.sighting, &comment, context)
                .map_err(|error| failed(&self.path, &error))?;
        }
        Ok(())
    }

    fn finish(self) -> anyhow::Result<()> {
        self.writer.finish().map_err(|error| failed(&self.path, &error))
    }
}

fn failed(path: &Path, error: &io::Error) -> anyhow::Error {
    anyhow::anyhow!("cannot write --pcap {}: {error}", path.display())
}
