//! The lab's own cgroup: what its socket load balancing holds for, instead of the whole machine.
//!
//! A real Cilium attaches its programs to the root of a mounted cgroup2 hierarchy, and so to every
//! process. The lab attaches them to one cgroup, into which `exec` puts what runs on the node and in
//! its pods.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use crate::state::{StateError, call};

/// How long processes that have been ended may take to leave the cgroup.
const PATIENCE: Duration = Duration::from_secs(2);

/// Where the cgroup of the lab `name` is or would be; `None` where no cgroup2 is mounted.
///
/// # Errors
/// [`StateError::Call`].
pub fn path(name: &str) -> Result<Option<PathBuf>, StateError> {
    let mounts = "/proc/thread-self/mountinfo";
    let text = fs::read_to_string(mounts).map_err(call("reading", mounts))?;
    Ok(text.lines().find_map(root).map(|root| root.join(format!("inspector-lab-{name}"))))
}

/// The mount point, if the line of a `mountinfo` is of a cgroup2.
fn root(line: &str) -> Option<&Path> {
    let (mount, file_system) = line.split_once(" - ")?;
    (file_system.split(' ').next() == Some("cgroup2"))
        .then(|| mount.split(' ').nth(4).map(Path::new))
        .flatten()
}

/// Makes the cgroup of the lab `name`.
///
/// # Errors
/// [`StateError::Call`], also where no cgroup2 is mounted.
pub fn create(name: &str) -> Result<PathBuf, StateError> {
    let Some(path) = path(name)? else {
        let missing = io::Error::new(
            io::ErrorKind::NotFound,
            "no cgroup2 is mounted; mount one (`mount -t cgroup2 none /sys/fs/cgroup`), or make \
             the lab without the datapath (`--no-datapath`)",
        );
        return Err(call("making a cgroup for", name)(missing));
    };
    fs::create_dir(&path).map_err(call("mkdir", path.display()))?;
    Ok(path)
}

/// A file to write `0` to, which puts the writing process into the cgroup.
///
/// # Errors
/// [`StateError::Call`].
pub fn entrance(cgroup: &Path) -> Result<OwnedFd, StateError> {
    let file = cgroup.join("cgroup.procs");
    OpenOptions::new()
        .write(true)
        .open(&file)
        .map(OwnedFd::from)
        .map_err(call("opening", file.display()))
}

/// Opens the cgroup itself, to attach programs to it.
///
/// # Errors
/// [`StateError::Call`].
pub fn open(cgroup: &Path) -> Result<OwnedFd, StateError> {
    File::open(cgroup).map(OwnedFd::from).map_err(call("opening", cgroup.display()))
}

/// Removes the cgroup of the lab `name`, where there is one, and ends what still runs in it.
///
/// # Errors
/// [`StateError::Call`].
pub fn remove(name: &str) -> Result<(), StateError> {
    let Some(path) = path(name)? else { return Ok(()) };
    let start = Instant::now();
    loop {
        match fs::remove_dir(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            // Who is in it has been started in this lab. Kernels before 5.14 have no such file, and
            // processes in the lab's namespaces have been ended before.
            Err(error)
                if error.raw_os_error() == Some(libc::EBUSY) && start.elapsed() < PATIENCE =>
            {
                let _ = fs::write(path.join("cgroup.kill"), "1");
                thread::sleep(Duration::from_millis(5));
            }
            result => return result.map_err(call("rmdir", path.display())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cgroup2_is_told_from_other_mounts() {
        let line =
            |kind: &str| format!("30 25 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - {kind} none rw");
        assert_eq!(root(&line("cgroup2")), Some(Path::new("/sys/fs/cgroup")));
        assert_eq!(root(&line("cgroup")), None);
        assert_eq!(root(""), None);
    }
}
