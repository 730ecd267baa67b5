//! Finds the BPF file system that holds Cilium's pins.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use super::CollectError;
use crate::{
    evidence::Bpffs,
    sys::mounts::{self, Mount},
};

/// Where Cilium pins its named maps, below the mount. The name comes from iproute2, which put its
/// maps there; Cilium has kept it.
pub const GLOBALS: &str = "tc/globals";

/// Cilium's places, in the order in which its agent tries them.
const USUAL: [&str; 2] = ["/sys/fs/bpf", "/run/cilium/bpffs"];

/// Finds every BPF file system with Cilium's pins and marks the one to read.
///
/// `chosen` names the mount to read; without it there must be one that is Cilium's usual place, or
/// only one.
///
/// # Errors
/// [`CollectError`] if there is none, several that are equally good, or no permission to look.
pub fn find(chosen: Option<&Path>) -> Result<Vec<Bpffs>, CollectError> {
    let mounted = mounts::bpffs().map_err(CollectError::Mounts)?;
    match chosen {
        Some(path) => named(path, &mounted),
        None => search(&mounted),
    }
}

fn named(path: &Path, mounted: &[Mount]) -> Result<Vec<Bpffs>, CollectError> {
    let absolute = path
        .canonicalize()
        .map_err(|source| CollectError::Bpffs { path: path.to_owned(), source })?;
    // Somebody who pastes the path of the pins means the file system that they are in.
    let root = absolute.ancestors().nth(2).filter(|_| absolute.ends_with(GLOBALS));
    let root = root.unwrap_or(&absolute).to_owned();
    let table = mounts::mounts().map_err(CollectError::Mounts)?;
    match mounts::type_of(&table, &root) {
        Some("bpf") => {}
        other => {
            return Err(CollectError::NotBpffs {
                path: path.to_owned(),
                found: other.unwrap_or("unknown").to_owned(),
            });
        }
    }
    let Some(mut found) = look(&root)? else {
        return Err(CollectError::NoPins { path: root });
    };
    found.read = true;
    let device = found.device.clone();
    let mut all = vec![found];
    // The others are told of, but a problem with one of them is no obstacle.
    all.extend(
        mounted
            .iter()
            .filter_map(|mount| look(&mount.target).ok().flatten())
            .filter(|other| other.device != device),
    );
    Ok(one_for_each_device(all))
}

fn search(mounted: &[Mount]) -> Result<Vec<Bpffs>, CollectError> {
    let mut found = Vec::new();
    let mut refused = None;
    for mount in mounted {
        match look(&mount.target) {
            Ok(Some(bpffs)) => found.push(bpffs),
            Ok(None) => {}
            Err(error) => refused = Some(error),
        }
    }
    let mut found = one_for_each_device(found);
    let choice = USUAL
        .iter()
        .find_map(|usual| found.iter().position(|bpffs| bpffs.path == Path::new(usual)))
        .or_else(|| (found.len() == 1).then_some(0));
    match choice {
        Some(index) => {
            found[index].read = true;
            Ok(found)
        }
        None if !found.is_empty() => Err(CollectError::Ambiguous {
            paths: found.into_iter().map(|bpffs| bpffs.path).collect(),
        }),
        None => Err(refused.unwrap_or_else(|| CollectError::NoBpffs {
            looked: mounted.iter().map(|mount| mount.target.clone()).collect(),
        })),
    }
}

/// The pins below one mount, or `None` if Cilium has none there.
fn look(root: &Path) -> Result<Option<Bpffs>, CollectError> {
    let globals = root.join(GLOBALS);
    let entries = match fs::read_dir(&globals) {
        Ok(entries) => entries,
        Err(error)
            if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
        {
            return Ok(None);
        }
        Err(source) => return Err(CollectError::Bpffs { path: globals, source }),
    };
    let mut pins: Vec<String> = entries
        .filter_map(Result::ok)
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.starts_with("cilium_"))
        .collect();
    if pins.is_empty() {
        return Ok(None);
    }
    pins.sort();
    let device = fs::metadata(&globals)
        .map(|metadata| device_number(metadata.dev()))
        .map_err(|source| CollectError::Bpffs { path: globals, source })?;
    Ok(Some(Bpffs { path: root.to_owned(), device, read: false, pins }))
}

fn device_number(device: u64) -> String {
    format!("{}:{}", libc::major(device), libc::minor(device))
}

/// Keeps one mount of each file system: the one to read, else a usual place, else the first.
fn one_for_each_device(found: Vec<Bpffs>) -> Vec<Bpffs> {
    let mut order: Vec<String> = Vec::new();
    let mut best: BTreeMap<String, Bpffs> = BTreeMap::new();
    let rank = |bpffs: &Bpffs| {
        let usual = USUAL.iter().position(|usual| bpffs.path == PathBuf::from(usual));
        (!bpffs.read, usual.unwrap_or(USUAL.len()))
    };
    for bpffs in found {
        if let Some(present) = best.get_mut(&bpffs.device) {
            if rank(&bpffs) < rank(present) {
                *present = bpffs;
            }
        } else {
            order.push(bpffs.device.clone());
            best.insert(bpffs.device.clone(), bpffs);
        }
    }
    order.iter().filter_map(|device| best.remove(device)).collect()
}
