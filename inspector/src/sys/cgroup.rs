//! The cgroup2 hierarchy: where it is mounted, where a process is in it, and where a cgroup is of
//! which only the id is known.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
    path::{Path, PathBuf},
};

use super::mounts::{self, Mount};

/// The reachable mounts of the cgroup2 hierarchy, of which there is one per kernel: those that
/// show the most of it first.
///
/// # Errors
/// The error of reading the mount table.
pub fn mounts() -> io::Result<Vec<Mount>> {
    let mut found = mounts::of_type("cgroup2")?;
    found.sort_by_key(|mount| height(&mount.root));
    Ok(found)
}

/// How far down in the hierarchy the root of a mount is, as seen from this cgroup namespace, whose
/// own root is 0 and whose parents the kernel shows as `/..`.
fn height(root: &Path) -> isize {
    root.components()
        .map(|part| match part {
            std::path::Component::ParentDir => -1,
            std::path::Component::Normal(_) => 1,
            _ => 0,
        })
        .sum()
}

/// The cgroup of a process (of this one without a pid), as the kernel names it in this cgroup
/// namespace: `/system.slice/ssh.service`, or `/../other` outside of the namespace's root.
///
/// # Errors
/// `NotFound` if there is no such process, `Unsupported` if it is in no cgroup2 hierarchy.
pub fn of_process(pid: Option<u32>) -> io::Result<PathBuf> {
    let process = pid.map_or_else(|| "self".to_owned(), |pid| pid.to_string());
    let text = std::fs::read_to_string(format!("/proc/{process}/cgroup"))?;
    text.lines()
        .find_map(|line| line.strip_prefix("0::"))
        .map(|path| PathBuf::from(path.strip_suffix(" (deleted)").unwrap_or(path)))
        .ok_or_else(|| {
            io::Error::new(io::ErrorKind::Unsupported, "the process is in no cgroup2 hierarchy")
        })
}

/// The folder of a cgroup in one of the mounts, and its path below the mount; `None` if none of
/// them shows it.
#[must_use]
pub fn locate(mounts: &[Mount], cgroup: &Path) -> Option<(PathBuf, PathBuf)> {
    mounts.iter().find_map(|mount| {
        let below = cgroup.strip_prefix(&mount.root).ok()?;
        let leaves = below.components().any(|part| part == std::path::Component::ParentDir);
        (!leaves).then(|| (mount.target.join(below), Path::new("/").join(below)))
    })
}

/// Opens the folder of a cgroup, to be asked about.
///
/// # Errors
/// The error of `open(2)`.
pub fn open(folder: &Path) -> io::Result<File> {
    std::fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY).open(folder)
}

/// `struct file_handle` with the handle of a kernfs node: its 64-bit id.
#[repr(C)]
struct KernfsHandle {
    bytes: u32,
    kind: i32,
    // Two halves, since the kernel's structure has no padding here.
    id: [u8; 8],
}

/// `FILEID_KERNFS`
const FILEID_KERNFS: i32 = 0xfe;

/// The path of the cgroup with this id below the mount; `None` if it was removed, even if the
/// kernel still holds what is left of it.
///
/// # Errors
/// The error of `open_by_handle_at(2)`: `EPERM` without `CAP_DAC_READ_SEARCH`.
pub fn by_id(mount: &Mount, id: u64) -> io::Result<Option<PathBuf>> {
    let root = open(&mount.target)?;
    let mut handle = KernfsHandle { bytes: 8, kind: FILEID_KERNFS, id: id.to_ne_bytes() };
    // SAFETY: the handle is a file_handle of the length that it says.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_open_by_handle_at,
            root.as_raw_fd(),
            std::ptr::from_mut(&mut handle),
            libc::O_PATH | libc::O_CLOEXEC,
        )
    };
    if fd < 0 {
        let error = io::Error::last_os_error();
        return match error.raw_os_error() {
            Some(libc::ESTALE) => Ok(None),
            _ => Err(error),
        };
    }
    let fd = i32::try_from(fd).map_err(|_| io::Error::from_raw_os_error(libc::EBADF))?;
    // SAFETY: the kernel just returned this descriptor; nobody else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let path = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
    Ok(path.strip_prefix(&mount.target).ok().map(|below| Path::new("/").join(below)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(root: &str, target: &str) -> Mount {
        Mount {
            target: target.into(),
            root: root.into(),
            device: "0:30".to_owned(),
            fs_type: "cgroup2".to_owned(),
        }
    }

    #[test]
    fn cgroups_are_found_below_the_mount_that_shows_them() {
        let whole = [mount("/", "/sys/fs/cgroup")];
        assert_eq!(
            locate(&whole, Path::new("/a.slice/b")),
            Some(("/sys/fs/cgroup/a.slice/b".into(), "/a.slice/b".into()))
        );
        assert_eq!(locate(&whole, Path::new("/")), Some(("/sys/fs/cgroup/".into(), "/".into())));
        // Outside of this cgroup namespace.
        assert_eq!(locate(&whole, Path::new("/../other")), None);
        // A container that has the host's hierarchy mounted beside its own.
        let both = [mount("/../..", "/run/cilium/cgroupv2"), mount("/", "/sys/fs/cgroup")];
        assert_eq!(
            locate(&both, Path::new("/../../kubepods/x")),
            Some(("/run/cilium/cgroupv2/kubepods/x".into(), "/kubepods/x".into()))
        );
        assert_eq!(
            locate(&both, Path::new("/inner")),
            Some(("/sys/fs/cgroup/inner".into(), "/inner".into()))
        );
        assert!(height(&both[0].root) < height(&both[1].root));
    }

    #[test]
    fn this_process_is_in_a_cgroup() {
        assert!(of_process(None).expect("cgroup2, on this machine").starts_with("/"));
        let error = of_process(Some(u32::MAX)).expect_err("no process has this id");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
