//! What a lab leaves on the machine while it is up, and how that is removed.
//!
//! Everything is found again from the lab's name alone, so that a lab whose maker was killed at
//! any point can be removed: the folder `/run/inspector-lab/NAME` (with the mount of its bpffs and
//! `lab.json`) is made first and removed last, the network namespaces are the files
//! `/run/netns/ilab-NAME-ROLE`, and its processes are those that run in these namespaces. A living owner holds a lock on the folder.

use std::{
    fs::{self, File},
    io,
    os::{fd::OwnedFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    mount::{MntFlags, MsFlags, mount, umount2},
    sys::{
        signal::{Signal, kill},
        wait::{WaitPidFlag, waitpid},
    },
    unistd::{Pid, geteuid},
};
use serde::{Deserialize, Serialize};

use crate::{cgroup, netns, server, tun};

/// The folder that holds one folder per lab.
const RUN: &str = "/run/inspector-lab";

/// Says that a lab, and not someone else, made a mount of `/run/netns`. No name of a lab starts with
/// a dot.
const NETNS_MARK: &str = "/run/inspector-lab/.netns-mounted";

/// How long a process is given to end after SIGTERM.
const PATIENCE: Duration = Duration::from_secs(2);

/// How long an owner may take to end after its lab is up.
const LEAVING: Duration = Duration::from_millis(300);

/// Why a lab could not be made, found or removed.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Not root.
    #[error("the lab makes namespaces, mounts and BPF maps and needs root; run it with sudo")]
    NotRoot,
    /// A name that cannot be part of file names.
    #[error(
        "`{name}` cannot be the name of a lab: use 1 to 40 lower-case letters, digits and hyphens, \
         starting with a letter or digit"
    )]
    BadName {
        /// The name.
        name: String,
    },
    /// The name is taken.
    #[error(
        "a lab named {name} is up already; choose another name, or remove it with `down --name {name}`"
    )]
    InUse {
        /// The name.
        name: String,
    },
    /// A process still owns it.
    #[error("the lab {name} belongs to a running process{owner}; end that instead")]
    Owned {
        /// The name.
        name: String,
        /// ` (PID)`, where known.
        owner: String,
    },
    /// More nodes than fit.
    #[error("a cluster has 2 to {most} nodes, not {number}")]
    Nodes {
        /// How many were asked for.
        number: u8,
        /// How many there can be.
        most: u8,
    },
    /// There is no such lab.
    #[error("no lab named {name} is up")]
    NotUp {
        /// The name.
        name: String,
    },
    /// Called from inside the lab that is to be removed.
    #[error("this shell runs inside the lab {name}; leave it first")]
    Inside {
        /// The name.
        name: String,
    },
    /// A call failed.
    #[error("{call} {object}: {source}")]
    Call {
        /// The call.
        call: &'static str,
        /// What it was done to.
        object: String,
        /// What the system said.
        source: io::Error,
    },
    /// `lab.json` is not what this version writes.
    #[error("{path}: {source}; remove the lab with `down` and make it again")]
    Record {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: serde_json::Error,
    },
}

/// For `map_err`: names the call and the object.
pub(crate) fn call<E: Into<io::Error>>(
    call: &'static str,
    object: impl ToString,
) -> impl FnOnce(E) -> StateError {
    move |source| StateError::Call { call, object: object.to_string(), source: source.into() }
}

/// Whether the lab pretends that Cilium's agent lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Agent {
    /// The liveness entry is refreshed while commands run in the lab.
    #[default]
    Alive,
    /// The liveness entry is left as it was captured.
    Dead,
}

/// A process, told apart from a later one with the same number by its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Process id.
    pub pid: i32,
    /// Start time in clock ticks since boot (field 22 of `/proc/PID/stat`).
    pub start: u64,
}

impl Process {
    /// The process that has this number now.
    #[must_use]
    pub fn now(pid: i32) -> Option<Self> {
        let line = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name in parentheses may itself hold spaces and parentheses.
        let after_name = line.rsplit_once(')')?.1;
        let start = after_name.split_whitespace().nth(19)?.parse().ok()?;
        let state = after_name.split_whitespace().next()?;
        // A zombie has ended; only its parent has not looked yet.
        (state != "Z").then_some(Self { pid, start })
    }

    /// Whether it is still running.
    #[must_use]
    pub fn is_alive(self) -> bool {
        Self::now(self.pid) == Some(self)
    }
}

/// What `lab.json` says of a lab.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Name of the lab.
    pub name: String,
    /// The capture that its maps come from.
    pub capture: Option<PathBuf>,
    /// Whether its agent is meant to live.
    pub agent: Agent,
    /// Root of its bpffs.
    pub bpffs: PathBuf,
    /// The node's network namespace, where the lab has a network.
    pub netns: Option<PathBuf>,
    /// The cgroup whose sockets are load-balanced, where the lab has such programs.
    #[serde(default)]
    pub cgroup: Option<PathBuf>,
    /// The host name that commands in the lab see, where it is a node of a cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_name: Option<String>,
    /// The process that made the lab.
    pub maker: Process,
    /// Whether the making came to its end.
    pub complete: bool,
}

/// The folder of the lab `name`.
#[must_use]
pub fn folder(name: &str) -> PathBuf {
    Path::new(RUN).join(name)
}

/// Where the lab `name` has its bpffs.
#[must_use]
pub fn bpffs(name: &str) -> PathBuf {
    folder(name).join("bpffs")
}

fn record_path(name: &str) -> PathBuf {
    folder(name).join("lab.json")
}

impl Record {
    /// Writes the record such that a reader sees the old or the new one, never half of it.
    ///
    /// # Errors
    /// [`StateError::Call`].
    pub fn write(&self) -> Result<(), StateError> {
        let path = record_path(&self.name);
        let new = path.with_extension("json.new");
        let text = serde_json::to_vec(self)
            .map_err(|source| StateError::Record { path: path.clone(), source })?;
        fs::write(&new, text).map_err(call("writing", new.display()))?;
        fs::rename(&new, &path).map_err(call("renaming", new.display()))
    }

    /// Reads the record of the lab `name`.
    ///
    /// # Errors
    /// [`StateError::NotUp`] where there is none, [`StateError::Record`] where it makes no sense.
    pub fn read(name: &str) -> Result<Self, StateError> {
        check_name(name)?;
        let path = record_path(name);
        match fs::read(&path) {
            Ok(text) => {
                serde_json::from_slice(&text).map_err(|source| StateError::Record { path, source })
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(StateError::NotUp { name: name.to_owned() })
            }
            Err(error) => Err(call("reading", path.display())(error)),
        }
    }
}

/// Names of the labs that are up or half-made, sorted.
///
/// # Errors
/// [`StateError::Call`].
pub fn list() -> Result<Vec<String>, StateError> {
    let entries = match fs::read_dir(RUN) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(call("listing", RUN)(error)),
    };
    let mut names = entries
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<io::Result<Vec<_>>>()
        .map_err(call("listing", RUN))?;
    names.retain(|name| check_name(name).is_ok());
    names.sort();
    Ok(names)
}

/// Checks that this process may make labs.
///
/// # Errors
/// [`StateError::NotRoot`].
pub fn check_root() -> Result<(), StateError> {
    if geteuid().is_root() { Ok(()) } else { Err(StateError::NotRoot) }
}

/// Checks the name of a lab.
///
/// # Errors
/// [`StateError::BadName`].
pub fn check_name(name: &str) -> Result<(), StateError> {
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if (1..=40).contains(&name.len()) && name.chars().all(allowed) && !name.starts_with('-') {
        Ok(())
    } else {
        Err(StateError::BadName { name: name.to_owned() })
    }
}

/// The lock on a lab's folder: whoever holds it owns the lab.
#[derive(Debug)]
pub struct Lock {
    _locked: Flock<File>,
}

impl Lock {
    fn take(name: &str) -> Result<Self, StateError> {
        let path = folder(name);
        let owned = || StateError::Owned {
            name: name.to_owned(),
            owner: Record::read(name)
                .map(|record| format!(" (process {})", record.maker.pid))
                .unwrap_or_default(),
        };
        let folder = File::open(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => StateError::NotUp { name: name.to_owned() },
            _ => call("opening", path.display())(error),
        })?;
        match Flock::lock(folder, FlockArg::LockExclusiveNonblock) {
            Ok(locked) => Ok(Self { _locked: locked }),
            Err((_, Errno::EWOULDBLOCK)) => Err(owned()),
            Err((_, errno)) => Err(call("locking", path.display())(errno)),
        }
    }

    /// As [`Lock::take`], for an owner that is just about to leave the lab to others: the line that
    /// `up` prints is read a moment before `up` ends.
    fn wait(name: &str) -> Result<Self, StateError> {
        let start = Instant::now();
        loop {
            match Self::take(name) {
                Err(StateError::Owned { .. }) if start.elapsed() < LEAVING => {
                    thread::sleep(Duration::from_millis(5));
                }
                result => return result,
            }
        }
    }
}

/// Makes the folder of the lab `name` and takes its lock.
///
/// # Errors
/// [`StateError::InUse`] where the name is taken; [`StateError::Call`].
pub fn claim(name: &str) -> Result<Lock, StateError> {
    check_root()?;
    check_name(name)?;
    let _labs = lock_labs()?;
    let path = folder(name);
    match fs::create_dir(&path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            return Err(StateError::InUse { name: name.to_owned() });
        }
        Err(error) => return Err(call("mkdir", path.display())(error)),
    }
    Lock::take(name)
}

/// Mounts a bpffs of its own for the lab `name`.
///
/// # Errors
/// [`StateError::Call`].
pub fn mount_bpffs(name: &str) -> Result<PathBuf, StateError> {
    let path = bpffs(name);
    fs::create_dir(&path).map_err(call("mkdir", path.display()))?;
    // Every mount of this type is a file system of its own, with its own pins.
    mount(
        Some("inspector-lab"),
        &path,
        Some("bpf"),
        MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC,
        Some("mode=0700"),
    )
    .map_err(call("mounting a bpffs at", path.display()))?;
    Ok(path)
}

/// Removes the lab `name` for someone who does not own it: a complete one that was left up, or
/// what a killed maker left.
///
/// # Errors
/// [`StateError::NotUp`], [`StateError::Owned`], [`StateError::Inside`], [`StateError::Call`].
pub fn down(name: &str) -> Result<(), StateError> {
    check_root()?;
    check_name(name)?;
    if !folder(name).exists() {
        return Err(StateError::NotUp { name: name.to_owned() });
    }
    let _lock = Lock::wait(name)?;
    let ours = ancestors();
    if netns::processes_in(name)?.iter().any(|process| ours.contains(&process.pid)) {
        return Err(StateError::Inside { name: name.to_owned() });
    }
    remove(name)
}

/// Removes whatever there is of the lab `name`, as its owner. What is not there is no error.
///
/// # Errors
/// The first thing that could not be removed; the rest is removed all the same, but for the
/// folder, so that `down` finds the lab again.
pub fn remove(name: &str) -> Result<(), StateError> {
    let mut problems = Vec::new();
    let mut note = |result: Result<(), StateError>| {
        if let Err(problem) = result {
            problems.push(problem);
        }
    };
    note(end_processes(name));
    note(netns::remove_all(name));
    note(unmount(&bpffs(name)));
    note(cgroup::remove(name));
    if let Some(problem) = problems.into_iter().next() {
        return Err(problem);
    }
    let _labs = lock_labs()?;
    let path = folder(name);
    match fs::remove_dir_all(&path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(call("removing", path.display())(error)),
    }
    if !list()?.is_empty() {
        return Ok(());
    }
    // The last lab takes with it what all of them share.
    if Path::new(NETNS_MARK).exists() {
        netns::unprepare()?;
        fs::remove_file(NETNS_MARK).map_err(call("removing", NETNS_MARK))?;
    }
    fs::remove_dir(RUN).map_err(call("removing", RUN))
}

/// Prepares the machine for network namespaces with names.
///
/// # Errors
/// [`StateError::Call`].
pub fn prepare_netns() -> Result<(), StateError> {
    let _labs = lock_labs()?;
    if netns::prepare()? {
        fs::write(NETNS_MARK, "").map_err(call("writing", NETNS_MARK))?;
    }
    Ok(())
}

/// Makes the folder of labs where it is not there, and locks it against other processes that make
/// or remove a lab at this moment.
fn lock_labs() -> Result<Flock<File>, StateError> {
    loop {
        fs::create_dir_all(RUN).map_err(call("mkdir", RUN))?;
        let folder = match File::open(RUN) {
            Ok(folder) => folder,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(call("opening", RUN)(error)),
        };
        let locked = Flock::lock(folder, FlockArg::LockExclusive)
            .map_err(|(_, errno)| call("locking", RUN)(errno))?;
        // Whoever removed the last lab has removed the folder: then what we locked is no longer
        // the one that others see.
        let inode = |meta: fs::Metadata| (meta.dev(), meta.ino());
        let ours = locked.metadata().map(inode).map_err(call("looking at", RUN))?;
        if fs::metadata(RUN).map(inode).is_ok_and(|theirs| theirs == ours) {
            return Ok(locked);
        }
    }
}

/// Takes away every mount at `path`; none is no error.
pub(crate) fn unmount(path: &Path) -> Result<(), StateError> {
    loop {
        match umount2(path, MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) => {}
            // Not a mount (any more), or not there at all.
            Err(Errno::EINVAL | Errno::ENOENT) => return Ok(()),
            // A shell stands in it, or the like: it goes when that does.
            Err(Errno::EBUSY) => {
                umount2(path, MntFlags::UMOUNT_NOFOLLOW | MntFlags::MNT_DETACH)
                    .map_err(call("unmounting", path.display()))?;
            }
            Err(errno) => return Err(call("unmounting", path.display())(errno)),
        }
    }
}

/// Ends the processes of the lab: first politely.
fn end_processes(name: &str) -> Result<(), StateError> {
    let mut processes = netns::processes_in(name)?;
    // A process that holds its lab as a value may itself be in one of its namespaces.
    processes.retain(|process| process.pid != std::process::id().cast_signed());
    let ours: Vec<i32> =
        processes.iter().map(|process| process.pid).filter(|pid| is_ours(*pid)).collect();
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        processes.retain(|process| process.is_alive());
        for process in &processes {
            // Gone in the meantime is what we want.
            let _ = kill(Pid::from_raw(process.pid), signal);
        }
        let start = Instant::now();
        while processes.iter().any(|process| process.is_alive()) && start.elapsed() < PATIENCE {
            thread::sleep(Duration::from_millis(2));
        }
    }
    for pid in ours {
        // If it was our child, it is a zombie until we wait for it; if not, this fails. Other
        // children are waited for by whoever started them.
        let _ = waitpid(Pid::from_raw(pid), Some(WaitPidFlag::WNOHANG));
    }
    match processes.iter().find(|process| process.is_alive()) {
        None => Ok(()),
        Some(process) => {
            Err(call("ending the process", process.pid)(io::Error::from(io::ErrorKind::TimedOut)))
        }
    }
}

/// Whether the process is one that [`tun::pump`] or [`server::start`] has started.
fn is_ours(pid: i32) -> bool {
    let name = fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    [tun::PUMP, server::NAME].iter().any(|ours| name.trim_ascii_end() == ours.to_bytes())
}

/// This process, its parent, and so on to the first.
fn ancestors() -> Vec<i32> {
    let mut pids = Vec::new();
    let mut pid = std::process::id().cast_signed();
    while pid > 0 && !pids.contains(&pid) {
        pids.push(pid);
        let parent = fs::read_to_string(format!("/proc/{pid}/stat")).ok().and_then(|stat| {
            stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse::<i32>().ok()
        });
        pid = parent.unwrap_or(0);
    }
    pids
}

/// A descriptor of a namespace file.
pub(crate) fn open_file(path: &Path) -> Result<OwnedFd, StateError> {
    File::open(path).map(OwnedFd::from).map_err(call("opening", path.display()))
}
