//! Mounted file systems of the mount namespace of this thread (`/proc/thread-self/mountinfo`).

use std::{
    ffi::OsString,
    io,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
};

/// One mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Where it is mounted.
    pub target: PathBuf,
    /// Root of the mount within its file system: `/`, or a folder for a bind mount.
    pub root: PathBuf,
    /// Device number, `major:minor`: the same for two mounts of one file system.
    pub device: String,
    /// File system type.
    pub fs_type: String,
}

/// Reads the mounts in mount order (a later one can hide an earlier one).
///
/// # Errors
/// The error of reading the file.
pub fn mounts() -> io::Result<Vec<Mount>> {
    Ok(parse(&std::fs::read("/proc/thread-self/mountinfo")?))
}

fn parse(text: &[u8]) -> Vec<Mount> {
    text.split(|&byte| byte == b'\n').filter_map(parse_line).collect()
}

fn parse_line(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|&byte| byte == b' ');
    let device = fields.nth(2)?;
    let root = fields.next()?;
    let target = fields.next()?;
    let fs_type = fields.skip_while(|field| *field != b"-").nth(1)?;
    Some(Mount {
        target: unescape(target),
        root: unescape(root),
        device: String::from_utf8_lossy(device).into_owned(),
        fs_type: String::from_utf8_lossy(fs_type).into_owned(),
    })
}

/// Undoes the kernel's octal escapes (`\040` is a space).
fn unescape(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, tail)) = rest.split_first() {
        let octal = (byte == b'\\')
            .then(|| tail.get(..3))
            .flatten()
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        if let Some(value) = octal {
            bytes.push(value);
            rest = &tail[3..];
        } else {
            bytes.push(byte);
            rest = tail;
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

/// The mounts of type `bpf` that can be reached, one for each file system at each place.
///
/// A mount that a later mount at the same place covers is left out: its files cannot be reached.
///
/// # Errors
/// The error of reading the mount table.
pub fn bpffs() -> io::Result<Vec<Mount>> {
    of_type("bpf")
}

/// The mounts of one type that can be reached, in mount order.
///
/// # Errors
/// The error of reading the mount table.
pub fn of_type(fs_type: &str) -> io::Result<Vec<Mount>> {
    Ok(visible(mounts()?, fs_type))
}

fn visible(mounts: Vec<Mount>, fs_type: &str) -> Vec<Mount> {
    let mut visible: Vec<Mount> = Vec::new();
    for mount in mounts {
        // Whatever is mounted at a place or above it hides what was there before.
        visible.retain(|earlier| !earlier.target.starts_with(&mount.target));
        visible.push(mount);
    }
    visible.retain(|mount| mount.fs_type == fs_type);
    visible
}

/// The type of the mount that `path` lies in, if the mount table tells.
#[must_use]
pub fn type_of<'a>(mounts: &'a [Mount], path: &Path) -> Option<&'a str> {
    // Of several at one place the last one hides the others: `max_by_key` takes the last.
    mounts
        .iter()
        .filter(|mount| path.starts_with(&mount.target))
        .max_by_key(|mount| mount.target.components().count())
        .map(|mount| mount.fs_type.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"22 1 8:1 / / rw - ext4 /dev/vda rw\n\
        30 22 0:28 / /sys rw - sysfs sysfs rw\n\
        31 30 0:29 / /sys/fs/bpf rw,nosuid shared:11 - bpf bpf rw,mode=700\n\
        40 22 0:40 / /run/a\\040b rw - bpf bpf rw\n\
        41 22 0:41 /tc /mnt/bind rw - bpf bpf rw\n";

    #[test]
    fn bpf_mounts_are_found_with_their_escapes_undone() {
        let found: Vec<_> = visible(parse(TABLE), "bpf")
            .into_iter()
            .map(|mount| (mount.target, mount.root))
            .collect();
        assert_eq!(
            found,
            [
                (PathBuf::from("/sys/fs/bpf"), PathBuf::from("/")),
                (PathBuf::from("/run/a b"), PathBuf::from("/")),
                (PathBuf::from("/mnt/bind"), PathBuf::from("/tc")),
            ]
        );
    }

    #[test]
    fn a_mount_hides_what_was_mounted_there_before() {
        let mut table = TABLE.to_vec();
        table.extend_from_slice(b"50 31 0:50 / /sys/fs/bpf rw - bpf bpf rw\n");
        table.extend_from_slice(b"51 22 0:51 / /run/a\\040b rw - tmpfs tmpfs rw\n");
        let found: Vec<_> = visible(parse(&table), "bpf");
        assert_eq!(found.len(), 2, "{found:?}");
        assert_eq!(found[0].target, PathBuf::from("/mnt/bind"));
        assert_eq!(
            (found[1].device.as_str(), found[1].target.as_path()),
            ("0:50", Path::new("/sys/fs/bpf"))
        );
    }

    #[test]
    fn the_type_of_a_path_is_that_of_the_nearest_mount() {
        let mounts = parse(TABLE);
        assert_eq!(type_of(&mounts, Path::new("/sys/fs/bpf/tc")), Some("bpf"));
        assert_eq!(type_of(&mounts, Path::new("/sys/kernel")), Some("sysfs"));
        assert_eq!(type_of(&mounts, Path::new("/etc")), Some("ext4"));
        let mut table = TABLE.to_vec();
        table.extend_from_slice(b"50 31 0:50 / /sys/fs/bpf rw - tmpfs tmpfs rw\n");
        assert_eq!(type_of(&parse(&table), Path::new("/sys/fs/bpf/tc")), Some("tmpfs"));
    }

    #[test]
    fn lines_that_are_no_mounts_are_passed_over() {
        assert_eq!(parse(b"\n1 2\nrubbish without a dash x y z\n"), []);
    }
}
