//! Reads every entry of a map, correctly while somebody else changes it.
//!
//! Batches first: one system call for thousands of entries. A hash map hands out whole buckets
//! under their lock, so an entry can neither come twice nor be torn. Where the kernel or the map
//! type has no batches, the map is walked key by key: a key that was deleted meanwhile makes the
//! kernel start again at the first one, so what was read already is remembered and passed over,
//! and the number of steps is bounded. Either way an entry that is deleted while we read is simply
//! not there, and one that stays throughout is always found.

use std::{
    collections::HashSet,
    io,
    os::fd::{AsFd, BorrowedFd},
};

use serde::{Deserialize, Serialize};

use crate::{
    evidence::Entries,
    sys::bpf::{self, Batch, BatchCursor, MapInfo},
};

/// How a map was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// Batches of many entries.
    Batch,
    /// Key by key.
    Iterate,
    /// Single entries by their exact key.
    Lookup,
    /// Not read from a kernel: loaded from a file.
    File,
}

/// The entries of a map and how they were read.
#[derive(Debug)]
pub struct Dump {
    /// The entries, each key once.
    pub entries: Entries,
    /// How they were read.
    pub method: Method,
    /// `false` if the map changed faster than it could be read: entries may be missing.
    pub complete: bool,
}

/// `ENOTSUPP`, an error number that the kernel keeps from user space's headers but returns here.
const ENOTSUPP: i32 = 524;

/// Most entries that room is made for at once; larger maps are read in several batches.
const BATCH_ENTRIES: u32 = 1 << 18;

/// Reads all entries of the map behind `fd`.
///
/// # Errors
/// The error of the look-up that failed for another reason than the map's changing.
pub fn read(fd: impl AsFd, info: &MapInfo, cpus: usize) -> io::Result<Dump> {
    match read_batches(fd.as_fd(), info, cpus) {
        Err(error) if has_no_batches(&error) => read_by_key(fd.as_fd(), info, cpus),
        other => other,
    }
}

fn has_no_batches(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP | libc::ENOSYS | ENOTSUPP))
}

/// Reads all entries in batches; fails with `EINVAL` or `ENOTSUPP` where there are none.
///
/// # Errors
/// As [`read`].
pub fn read_batches(fd: BorrowedFd<'_>, info: &MapInfo, cpus: usize) -> io::Result<Dump> {
    let value_len = bpf::value_len(info, cpus);
    let mut cursor = BatchCursor::new(info.key_size);
    let mut keys = Vec::new();
    let mut values = Vec::new();
    let mut count = info.max_entries.clamp(1, BATCH_ENTRIES);
    let mut complete = true;
    let bound = max_steps(info);
    loop {
        // A trie starts again at its first key when the last one read is gone.
        if info.key_size > 0 && (keys.len() / info.key_size as usize) as u64 > bound {
            complete = false;
            break;
        }
        match bpf::lookup_batch(fd, info, cpus, &mut cursor, count, &mut keys, &mut values) {
            Ok(Batch::More) => {}
            Ok(Batch::End) => break,
            Ok(Batch::TooSmall) => count = count.saturating_mul(2),
            // A trie or array whose keys vanish faster than the kernel can step over them.
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => {
                complete = false;
                break;
            }
            Err(error) => return Err(error),
        }
    }
    let mut entries = Entries::from_parts(info.key_size as usize, value_len, keys, values);
    if !info.map_type.is_hash() {
        entries.keep_first_of_each_key();
    }
    Ok(Dump { entries, method: Method::Batch, complete })
}

/// How many entries are looked at before a map counts as changing faster than it can be read: each
/// restart walks again over what is there.
fn max_steps(info: &MapInfo) -> u64 {
    u64::from(info.max_entries) * 16 + 4096
}

/// Reads all entries key by key.
///
/// # Errors
/// As [`read`].
pub fn read_by_key(fd: BorrowedFd<'_>, info: &MapInfo, cpus: usize) -> io::Result<Dump> {
    let key_len = info.key_size as usize;
    let mut entries = Entries::new(key_len, bpf::value_len(info, cpus));
    let mut value = vec![0; bpf::value_len(info, cpus)];
    let mut seen: HashSet<Box<[u8]>> = HashSet::new();
    let mut key = vec![0; key_len];
    let mut next = vec![0; key_len];
    let mut started = false;
    let mut steps = max_steps(info);
    while bpf::next_key(fd, info, started.then_some(key.as_slice()), &mut next)? {
        steps -= 1;
        if steps == 0 {
            return Ok(Dump { entries, method: Method::Iterate, complete: false });
        }
        started = true;
        std::mem::swap(&mut key, &mut next);
        if seen.contains(key.as_slice()) {
            continue;
        }
        if bpf::lookup(fd, info, &key, &mut value, cpus)? {
            seen.insert(key.clone().into_boxed_slice());
            entries.push(&key, &value);
        }
    }
    Ok(Dump { entries, method: Method::Iterate, complete: true })
}
