//! One virtual machine: boots a kernel with the host's files as its own, runs jobs in it, and is
//! gone after.
//!
//! The machine sees the host's root read-only, with a file system in memory above it, so that a
//! program built here runs there, and whatever it changes is forgotten. Beside it there is one
//! shared folder that it can write to. What the jobs print and how they end comes out of two serial
//! ports of virtio; the kernel's console goes to a file.

use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader, PipeReader, PipeWriter, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::archive::Archive;
use super::job::{Job, quoted};
use crate::setup::machines::{Kernel, Tools};

/// How a machine is run.
#[derive(Clone, Copy)]
pub struct Settings {
    /// How long it may take until the first job starts.
    pub boot: Duration,
    /// How long all jobs together may take.
    pub jobs: Duration,
    /// Memory in megabytes.
    pub memory: u32,
    /// Never use the processor's help, even where it works.
    pub emulate: bool,
}

/// What came of a run.
pub struct Outcome {
    /// The exit status of each job, 128 and the signal's number after a signal, and how long it
    /// took.
    pub jobs: Vec<(i32, Duration)>,
    /// How long it took until the first job started.
    pub boot: Duration,
    /// What ran the machine's instructions: `KVM` or `TCG`.
    pub accelerator: &'static str,
}

/// What the machine says of itself.
enum Event {
    Up,
    Ended(usize, i32),
    Done,
}

/// Runs the jobs, in this order and each of them whatever the one before came to, in a machine with
/// this kernel. `folder` is the machine's: the share, the console and what it boots from are there,
/// also after.
///
/// # Errors
/// The kernel panicked, a time-out passed, the machine went off without saying how every job ended,
/// or it could not be started.
pub fn run(
    tools: &Tools,
    kernel: &Kernel,
    folder: &Path,
    jobs: &[Job],
    settings: &Settings,
) -> Result<Outcome> {
    let share = folder.join("share");
    fs::create_dir_all(&share).with_context(|| format!("cannot make {}", share.display()))?;
    for (index, job) in jobs.iter().enumerate() {
        let path = share.join(format!("job-{index:04}"));
        fs::write(&path, job.script())
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    let initramfs = folder.join("initramfs");
    fs::write(&initramfs, archive(tools, kernel)?).context("cannot write the initramfs")?;

    let boot =
        Boot { kernel, initramfs: &initramfs, share: &share, log: &folder.join("console.log") };
    if !settings.emulate && has_kvm() {
        let mut up = false;
        let hurried = Settings { boot: settings.boot.min(KVM_BOOT), ..*settings };
        match attempt(tools, &boot, jobs.len(), &hurried, "KVM", &mut up) {
            // Only where it may be KVM that does not work: once a job ran, nothing is run twice.
            Err(error) if !up => {
                eprintln!("KVM does not work here, the processor is emulated: {error:#}");
            }
            outcome => return outcome,
        }
    }
    attempt(tools, &boot, jobs.len(), settings, "TCG", &mut false)
}

/// What a machine is started with.
struct Boot<'a> {
    kernel: &'a Kernel,
    initramfs: &'a Path,
    share: &'a Path,
    log: &'a Path,
}

/// One run, with this accelerator; `up` says after it whether the machine came up.
fn attempt(
    tools: &Tools,
    boot: &Boot<'_>,
    jobs: usize,
    settings: &Settings,
    accelerator: &'static str,
    up: &mut bool,
) -> Result<Outcome> {
    let pipe = || io::pipe().context("cannot make a pipe");
    let (console, console_end) = pipe()?;
    let (output, output_end) = pipe()?;
    let (status, status_end) = pipe()?;

    let mut command = tools.qemu()?;
    arguments(&mut command, boot, settings, accelerator)?;
    for (name, end) in [("console", &console_end), ("output", &output_end), ("status", &status_end)]
    {
        let number = end.as_raw_fd();
        command.arg("-add-fd").arg(format!("fd={number},set={number}"));
        command.arg("-chardev").arg(format!("file,id={name},path=/dev/fdset/{number},append=on"));
    }
    let start = Instant::now();
    let machine = Machine::start(command, [console_end, output_end, status_end])?;
    thread::scope(|scope| {
        let (sender, events) = mpsc::channel();
        let console = scope.spawn(|| keep(console, boot.log));
        let output = scope.spawn(|| pass_on(output));
        scope.spawn(move || {
            for line in BufReader::new(status).lines().map_while(Result::ok) {
                if let Some(event) = event(&line)
                    && sender.send(event).is_err()
                {
                    break;
                }
            }
        });
        let told = follow(&events, jobs, start, settings, up);
        // Off by itself, unless a time-out passed: it is given a moment for it.
        let is_late = matches!(told, Err(Failure::Boot(_) | Failure::Jobs(..)));
        let errors = machine.stop(if is_late { Duration::ZERO } else { GRACE })?;
        output.join().expect("no panic")?;
        let console = console.join().expect("no panic")?;
        let (boot, jobs) = conclude(told, &console, &errors, boot.log)?;
        Ok(Outcome { jobs, boot, accelerator })
    })
}

/// Where the processor helps, a machine is up within seconds or hangs.
const KVM_BOOT: Duration = Duration::from_secs(30);

/// How long a machine that is done may take to go off.
const GRACE: Duration = Duration::from_secs(10);

/// Whether the processor can run machines itself, and we may ask it to. The device alone says too
/// little: it is there in machines whose processor has nothing of the kind, and hangs in them.
fn has_kvm() -> bool {
    let is_able = fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| {
        text.lines()
            .filter(|line| line.starts_with("flags"))
            .any(|line| line.split_whitespace().any(|flag| matches!(flag, "vmx" | "svm")))
    });
    is_able && File::options().read(true).write(true).open("/dev/kvm").is_ok()
}

/// Why [`follow`] ended without every job's end.
enum Failure {
    /// The machine is off.
    Off,
    /// No job started in time.
    Boot(Duration),
    /// The jobs did not end in time; the number of those that did.
    Jobs(Duration, usize),
}

type Told = (Duration, Vec<(i32, Duration)>);

fn follow(
    events: &mpsc::Receiver<Event>,
    jobs: usize,
    start: Instant,
    settings: &Settings,
    up: &mut bool,
) -> Result<Told, Failure> {
    let mut boot = None;
    let mut last = start;
    let mut ended = Vec::new();
    loop {
        let deadline = boot.map_or(start + settings.boot, |boot| start + boot + settings.jobs);
        let left = deadline.saturating_duration_since(Instant::now());
        let event = events.recv_timeout(left).map_err(|error| match (error, boot) {
            (RecvTimeoutError::Disconnected, _) => Failure::Off,
            (RecvTimeoutError::Timeout, None) => Failure::Boot(settings.boot),
            (RecvTimeoutError::Timeout, Some(_)) => Failure::Jobs(settings.jobs, ended.len()),
        })?;
        let now = Instant::now();
        match event {
            Event::Up => {
                *up = true;
                boot = Some(now - start);
            }
            Event::Ended(index, status) if index == ended.len() => ended.push((status, now - last)),
            Event::Done if ended.len() == jobs => {
                return Ok((boot.unwrap_or_default(), ended));
            }
            // Not in order: something is missing.
            Event::Ended(..) | Event::Done => return Err(Failure::Off),
        }
        last = now;
    }
}

/// One sentence for each way in which a machine can fail.
fn conclude(told: Result<Told, Failure>, console: &str, errors: &str, log: &Path) -> Result<Told> {
    let log = log.display();
    // Whatever else was told: after a panic nothing is to be believed.
    if let Some(panic) = console.lines().find(|line| line.contains("Kernel panic - not syncing")) {
        let reason = panic.split_once("not syncing").map_or(panic, |(_, reason)| reason);
        let reason = reason.trim_start_matches([':', ' ']).trim();
        bail!("the kernel panicked ({reason}); its console is in {log}");
    }
    match told {
        Ok(told) => Ok(told),
        Err(Failure::Boot(limit)) => bail!(
            "the machine did not come up within {} s (--boot-timeout); its console is in {log}",
            limit.as_secs()
        ),
        Err(Failure::Jobs(limit, ended)) => bail!(
            "the commands did not end within {} s (--timeout), {ended} of them did; the machine \
             was stopped, its console is in {log}",
            limit.as_secs()
        ),
        Err(Failure::Off) => {
            let said = console.lines().find_map(|line| Some(line.split_once("vm: ")?.1.trim()));
            let said = said.or_else(|| errors.lines().find(|line| !line.trim().is_empty()));
            match said {
                Some(reason) => bail!(
                    "the machine went off without saying how the command ended: {reason}; its \
                     console is in {log}"
                ),
                None => bail!(
                    "the machine went off without saying how the command ended; its console is in \
                     {log}"
                ),
            }
        }
    }
}

/// A line of the status port.
fn event(line: &str) -> Option<Event> {
    let mut words = line.split_whitespace();
    match (words.next()?, words.next(), words.next()) {
        ("up", Some(_), None) => Some(Event::Up),
        ("ended", Some(index), Some(status)) => {
            Some(Event::Ended(index.parse().ok()?, status.parse().ok()?))
        }
        ("done", None, None) => Some(Event::Done),
        _ => None,
    }
}

/// The kernel's console: into the file as it comes, so that it can be looked at meanwhile.
fn keep(mut console: PipeReader, log: &Path) -> Result<String> {
    let mut file = File::create(log).with_context(|| format!("cannot make {}", log.display()))?;
    let mut text = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let length = console.read(&mut buffer).context("the console")?;
        if length == 0 {
            return Ok(String::from_utf8_lossy(&text).into_owned());
        }
        file.write_all(&buffer[..length])
            .with_context(|| format!("cannot write {}", log.display()))?;
        text.extend(&buffer[..length]);
    }
}

/// The jobs' output: to ours as it comes.
fn pass_on(mut output: PipeReader) -> Result<()> {
    let mut buffer = [0; 4096];
    loop {
        let length = output.read(&mut buffer).context("the output")?;
        if length == 0 {
            return Ok(());
        }
        let mut stdout = io::stdout().lock();
        // Ours may be closed while the machine goes on; how it ended is told all the same.
        let _ = stdout.write_all(&buffer[..length]).and_then(|()| stdout.flush());
    }
}

/// QEMU, which never outlives this value, nor this process.
struct Machine(Child);

impl Machine {
    /// Starts it; it keeps these ends of pipes, and this process does not.
    fn start(mut command: Command, ends: [PipeWriter; 3]) -> Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let numbers = ends.each_ref().map(PipeWriter::as_raw_fd);
        let parent = i32::try_from(std::process::id()).context("a process id")?;
        // SAFETY: between fork and exec only async-signal-safe system calls are made, on
        // descriptors that `ends` keeps open until after.
        unsafe {
            command.pre_exec(move || {
                // However this process ends, kill -9 included.
                if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                    return Err(io::Error::last_os_error());
                }
                // It ended before the line above.
                if libc::getppid() != parent {
                    return Err(io::Error::from_raw_os_error(libc::ESRCH));
                }
                for number in numbers {
                    if libc::fcntl(number, libc::F_SETFD, 0) != 0 {
                        return Err(io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        let child = command.spawn().context("cannot start QEMU")?;
        drop(ends);
        Ok(Self(child))
    }

    /// Waits this long for it to end by itself, ends it, and returns what QEMU said of errors.
    fn stop(mut self, grace: Duration) -> Result<String> {
        let deadline = Instant::now() + grace;
        while self.0.try_wait().context("cannot wait for QEMU")?.is_none()
            && Instant::now() < deadline
        {
            thread::sleep(Duration::from_millis(10));
        }
        // An error says that it has ended by itself.
        let _ = self.0.kill();
        self.0.wait().context("cannot wait for QEMU")?;
        let mut text = String::new();
        if let Some(errors) = self.0.stderr.as_mut() {
            errors.read_to_string(&mut text).context("what QEMU said")?;
        }
        Ok(text)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn arguments(
    command: &mut Command,
    boot: &Boot<'_>,
    settings: &Settings,
    accelerator: &str,
) -> Result<()> {
    command.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]);
    // Not microvm: newer kernels hang in it.
    command.args(["-machine", "pc", "-smp", "2", "-m", &settings.memory.to_string()]);
    command.args(match accelerator {
        "KVM" => ["-accel", "kvm", "-cpu", "host"],
        _ => ["-accel", "tcg,thread=multi", "-cpu", "max"],
    });
    // Uncompressed, which saves seconds where instructions are emulated.
    command.arg("-kernel").arg(boot.kernel.vmlinux()).arg("-initrd").arg(boot.initramfs);
    // Errors and worse go to the console; after a panic the machine goes off, and so it does after
    // an oops, since what a half-dead kernel does proves nothing.
    let mut line =
        "console=ttyS0 earlyprintk=serial loglevel=4 panic=-1 oops=panic apparmor=0".to_owned();
    if accelerator == "TCG" {
        // On a busy host its timer may be late when the kernel looks whether it works, which ends
        // in a panic. With KVM the kernel does not look.
        line.push_str(" no_timer_check");
    }
    command.args(["-append", &line]);
    command.args(["-serial", "chardev:console", "-device", "virtio-serial-pci"]);
    for name in ["output", "status"] {
        command.arg("-device").arg(format!("virtserialport,chardev={name},name={name}"));
    }
    for (tag, path, options) in
        [("root", Path::new("/"), ",readonly=on,multidevs=remap"), ("share", boot.share, "")]
    {
        let path = path.to_str().context("the path of the workspace is not UTF-8")?;
        // A comma ends a value, two are one.
        let path = path.replace(',', ",,");
        command.arg("-fsdev");
        command.arg(format!("local,id={tag},path={path},security_model=none{options}"));
        command.arg("-device").arg(format!("virtio-9p-pci,fsdev={tag},mount_tag={tag}"));
    }
    command.args(["-device", "virtio-rng-pci"]);
    Ok(())
}

/// What the kernel unpacks before anything else runs.
fn archive(tools: &Tools, kernel: &Kernel) -> Result<Vec<u8>> {
    let read =
        |path: &Path| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    let mut archive = Archive::default();
    for folder in ["bin", "boot", "dev", "proc", "sys"] {
        archive.folder(folder);
    }
    archive.device("dev/console", 5, 1);
    archive.file("bin/busybox", &read(&tools.path("busybox")?)?);
    archive.file("init", include_bytes!("init.sh"));
    archive.file("start.sh", include_bytes!("start.sh"));
    archive.file("modprobe.sh", include_bytes!("modprobe.sh"));
    for module in kernel.boot()? {
        let name = module.file_name().context("a module's name")?.to_string_lossy().into_owned();
        archive.file(&format!("boot/{name}"), &read(&module)?);
    }
    let mut settings = Vec::new();
    let modprobe: PathBuf = tools.path("modprobe")?;
    for (name, value) in [
        ("modules", kernel.modules().as_os_str()),
        ("modprobe", modprobe.as_os_str()),
        ("modules_libraries", tools.libraries().as_ref()),
    ] {
        settings.extend(name.bytes());
        settings.push(b'=');
        settings.extend(quoted(value.as_bytes()));
        settings.push(b'\n');
    }
    archive.file("vm.conf", &settings);
    Ok(archive.finish())
}
