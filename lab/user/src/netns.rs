//! Network namespaces of a lab: made, entered, found and removed.
//!
//! They are named as `ip netns` names them (files below `/run/netns`), so that
//! `ip -n ilab-NAME-node` works. `ip netns exec` mounts a new /sys and so hides a bpffs below it;
//! nothing here does that.

use std::{
    fmt, fs, io,
    os::fd::{AsFd, OwnedFd},
    os::unix::fs::MetadataExt,
    panic,
    path::{Path, PathBuf},
    str::FromStr,
    thread,
};

use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, setns, unshare},
};

use crate::state::{Process, StateError, call, open_file, unmount};

/// No source, file system type or data: for changes to mounts.
const NONE: Option<&str> = None;

/// Where iproute2 keeps its names for network namespaces.
const RUN_NETNS: &str = "/run/netns";

/// A place in the lab: a network namespace with its role.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Ns {
    /// The Cilium node.
    Node,
    /// The client in the node's LAN, 192.168.2.50.
    Client,
    /// The client behind `wg0`, 10.90.0.2.
    Vpn,
    /// The plain host in the node's LAN, 192.168.2.60.
    Host60,
    /// The switch of the LAN.
    Lan,
    /// A pod of the node, counted from 1 in the order of the interface indexes of their devices.
    Pod(u8),
}

impl fmt::Display for Ns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node => f.write_str("node"),
            Self::Client => f.write_str("client"),
            Self::Vpn => f.write_str("vpn"),
            Self::Host60 => f.write_str("host60"),
            Self::Lan => f.write_str("lan"),
            Self::Pod(number) => write!(f, "pod{number}"),
        }
    }
}

impl FromStr for Ns {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let unknown = || {
            format!("`{text}` is no place in the lab: node, client, vpn, host60, lan, pod1, pod2 …")
        };
        Ok(match text {
            "node" => Self::Node,
            "client" => Self::Client,
            "vpn" => Self::Vpn,
            "host60" => Self::Host60,
            "lan" => Self::Lan,
            _ => match text.strip_prefix("pod").map(str::parse) {
                Some(Ok(number)) if number > 0 => Self::Pod(number),
                _ => return Err(unknown()),
            },
        })
    }
}

/// The file that stands for the namespace `role` of the lab `name`.
#[must_use]
pub fn path(name: &str, role: Ns) -> PathBuf {
    Path::new(RUN_NETNS).join(format!("ilab-{name}-{role}"))
}

/// The namespaces that the lab `name` has now.
///
/// # Errors
/// [`StateError::Call`].
pub fn all(name: &str) -> Result<Vec<Ns>, StateError> {
    let entries = match fs::read_dir(RUN_NETNS) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(call("listing", RUN_NETNS)(error)),
    };
    let prefix = format!("ilab-{name}-");
    let mut found = Vec::new();
    for entry in entries {
        let file = entry.map_err(call("listing", RUN_NETNS))?.file_name();
        // A role holds no hyphen: what is left of another lab's longer name is no role.
        let role: Option<Ns> =
            file.to_str().and_then(|file| file.strip_prefix(&prefix)?.parse().ok());
        found.extend(role);
    }
    found.sort();
    Ok(found)
}

/// Prepares `/run/netns` as `ip netns add` does: a mount point of its own that mount namespaces
/// share, so that names made on either side can be removed on the other. True if it was this call
/// that mounted it. The caller holds the lock on the folder of labs.
///
/// # Errors
/// [`StateError::Call`].
pub fn prepare() -> Result<bool, StateError> {
    fs::create_dir_all(RUN_NETNS).map_err(call("mkdir", RUN_NETNS))?;
    let share = || mount(NONE, RUN_NETNS, NONE, MsFlags::MS_SHARED | MsFlags::MS_REC, NONE);
    match share() {
        Ok(()) => Ok(false),
        Err(nix::errno::Errno::EINVAL) => {
            let flags = MsFlags::MS_BIND | MsFlags::MS_REC;
            mount(Some(RUN_NETNS), RUN_NETNS, NONE, flags, NONE)
                .map_err(call("mounting", RUN_NETNS))?;
            share().map_err(call("sharing", RUN_NETNS))?;
            Ok(true)
        }
        Err(errno) => Err(call("sharing", RUN_NETNS)(errno)),
    }
}

/// Undoes [`prepare`], if nobody has a namespace there. The caller holds the lock on the folder of
/// labs, and knows that a lab mounted it.
///
/// # Errors
/// [`StateError::Call`].
pub fn unprepare() -> Result<(), StateError> {
    match fs::read_dir(RUN_NETNS) {
        Ok(mut entries) => {
            if entries.next().is_some() {
                return Ok(());
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(call("listing", RUN_NETNS)(error)),
    }
    unmount(Path::new(RUN_NETNS))?;
    // Not empty means that someone has just made a namespace: then it is theirs.
    let _ = fs::remove_dir(RUN_NETNS);
    Ok(())
}

/// Makes the namespace `role` of the lab `name` (see [`prepare`]).
///
/// # Errors
/// [`StateError::Call`].
pub fn create(name: &str, role: Ns) -> Result<OwnedFd, StateError> {
    let path = path(name, role);
    fs::File::create_new(&path).map_err(call("creating", path.display()))?;
    in_thread(|| {
        unshare(CloneFlags::CLONE_NEWNET).map_err(call("making the network namespace", role))?;
        mount(Some("/proc/thread-self/ns/net"), &path, NONE, MsFlags::MS_BIND, NONE)
            .map_err(call("mounting the network namespace at", path.display()))
    })?;
    open_file(&path)
}

/// Runs `work` in the namespace, on a thread of its own: the caller stays where it is.
///
/// # Errors
/// [`StateError::Call`], or what `work` returns.
pub fn run_in<T: Send, E: From<StateError> + Send>(
    namespace: &OwnedFd,
    work: impl FnOnce() -> Result<T, E> + Send,
) -> Result<T, E> {
    in_thread(|| {
        setns(namespace.as_fd(), CloneFlags::CLONE_NEWNET)
            .map_err(call("entering", "a network namespace"))?;
        work()
    })
}

/// Runs `work` on a new thread and waits for it; a panic there is one here.
fn in_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| match scope.spawn(work).join() {
        Ok(result) => result,
        Err(payload) => panic::resume_unwind(payload),
    })
}

/// The processes that run in a namespace of the lab `name`.
///
/// # Errors
/// [`StateError::Call`].
pub fn processes_in(name: &str) -> Result<Vec<Process>, StateError> {
    let mut namespaces = Vec::new();
    for role in all(name)? {
        let path = path(name, role);
        let meta = fs::metadata(&path).map_err(call("looking at", path.display()))?;
        namespaces.push((meta.dev(), meta.ino()));
    }
    if namespaces.is_empty() {
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").map_err(call("listing", "/proc"))? {
        let entry = entry.map_err(call("listing", "/proc"))?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // A process that has ended meanwhile is in no namespace.
        let Ok(meta) = fs::metadata(entry.path().join("ns/net")) else { continue };
        if namespaces.contains(&(meta.dev(), meta.ino())) {
            found.extend(Process::now(pid));
        }
    }
    Ok(found)
}

/// Removes every namespace of the lab `name`; devices in them go with them.
///
/// # Errors
/// The first that could not be removed.
pub fn remove_all(name: &str) -> Result<(), StateError> {
    for role in all(name)? {
        let path = path(name, role);
        unmount(&path)?;
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(call("removing", path.display())(error));
            }
            _ => {}
        }
    }
    Ok(())
}
