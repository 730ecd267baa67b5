//! Opens Cilium's pinned maps, read-only, and reads them.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

use super::{
    bpffs::GLOBALS,
    dump::{self, Method},
};
use crate::{
    cilium::layout::{self, Layout, LayoutError, MapType},
    evidence::{Coverage, Entries, MapRecord},
    sys::bpf::{self, MapInfo, ObjectKind},
};

/// An open map and what the kernel says of it.
#[derive(Debug)]
pub struct OpenMap {
    /// Name of the pin.
    pub name: String,
    /// Path of the pin.
    pub path: PathBuf,
    /// Read-only descriptor.
    pub fd: OwnedFd,
    /// What the kernel says of the map.
    pub info: MapInfo,
    /// Its layout.
    pub layout: &'static Layout,
}

/// Why a pinned map could not be used.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// The pin could not be opened.
    #[error("cannot open {path} read-only: {source}{}", hint(source))]
    Open {
        /// Path of the pin.
        path: PathBuf,
        /// The error of `BPF_OBJ_GET`.
        source: io::Error,
    },
    /// The pin holds a program, a link or something else.
    #[error("{path} is no map but {kind}: something else took Cilium's name")]
    NoMap {
        /// Path of the pin.
        path: PathBuf,
        /// What it is.
        kind: ObjectKind,
    },
    /// The kernel did not say what the map is.
    #[error("the kernel does not describe {path}: {source}")]
    Info {
        /// Path of the pin.
        path: PathBuf,
        /// The error of `BPF_OBJ_GET_INFO_BY_FD`.
        source: io::Error,
    },
    /// The map has a layout that this version does not know.
    #[error("{0}; this inspect does not know that Cilium release: use a newer one")]
    Layout(LayoutError),
    /// The map could not be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// Path of the pin.
        path: PathBuf,
        /// The error of the look-up.
        source: io::Error,
    },
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            ": run as root, or with CAP_BPF and read access to bpffs"
        }
        _ => "",
    }
}

impl MapError {
    /// Whether more privilege would have helped.
    #[must_use]
    pub fn is_permission(&self) -> bool {
        matches!(self, Self::Open { source, .. } | Self::Read { source, .. } | Self::Info { source, .. }
            if source.kind() == io::ErrorKind::PermissionDenied)
    }
}

/// Opens the map that is pinned as `name` below the BPF file system `root`.
///
/// # Errors
/// [`MapError`]: what is wrong with the pin or the map.
pub fn open(root: &Path, name: &str) -> Result<OpenMap, (MapError, Option<MapInfo>)> {
    let path = root.join(GLOBALS).join(name);
    let fd = bpf::open_pin(&path).map_err(|source| {
        // The kernel opens no link read-only and says EINVAL, as for a file that is no pin; of a
        // folder it says EACCES, as if privilege were missing.
        let kind = match source.raw_os_error() {
            Some(libc::EINVAL) if path.is_file() => Some(ObjectKind::Link),
            Some(libc::EACCES) if path.is_dir() => Some(ObjectKind::Other),
            _ => None,
        };
        match kind {
            Some(kind) => (MapError::NoMap { path: path.clone(), kind }, None),
            None => (MapError::Open { path: path.clone(), source }, None),
        }
    })?;
    let kind = bpf::object_kind(fd.as_fd())
        .map_err(|source| (MapError::Info { path: path.clone(), source }, None))?;
    if kind != ObjectKind::Map {
        return Err((MapError::NoMap { path, kind }, None));
    }
    let info = bpf::map_info(fd.as_fd())
        .map_err(|source| (MapError::Info { path: path.clone(), source }, None))?;
    match layout::detect(name, info.map_type, info.key_size, info.value_size) {
        Ok(layout) => Ok(OpenMap { name: name.to_owned(), path, fd, info, layout }),
        Err(error) => Err((MapError::Layout(error), Some(info))),
    }
}

impl OpenMap {
    /// Reads all entries.
    ///
    /// # Errors
    /// [`MapError::Read`].
    pub fn read(&self, cpus: usize) -> Result<MapRecord, MapError> {
        let dump = dump::read(&self.fd, &self.info, cpus)
            .map_err(|source| MapError::Read { path: self.path.clone(), source })?;
        Ok(MapRecord {
            coverage: Coverage::All,
            method: dump.method,
            complete: dump.complete,
            total: Some(dump.entries.len() as u64),
            entries: dump.entries,
            ..self.describe(cpus)
        })
    }

    /// Looks up the given keys and records those that are there.
    ///
    /// # Errors
    /// [`MapError::Read`].
    pub fn lookup<'a>(
        &self,
        cpus: usize,
        keys: impl IntoIterator<Item = &'a [u8]>,
    ) -> Result<MapRecord, MapError> {
        let mut record = self.describe(cpus);
        let mut value = vec![0; record.entries.value_len()];
        for key in keys {
            let found = bpf::lookup(self.fd.as_fd(), &self.info, key, &mut value, cpus)
                .map_err(|source| MapError::Read { path: self.path.clone(), source })?;
            if found {
                record.entries.push(key, &value);
            }
        }
        Ok(record)
    }

    /// A record without entries yet.
    fn describe(&self, cpus: usize) -> MapRecord {
        let MapInfo { map_type, id, key_size, value_size, max_entries, flags, name: _ } = self.info;
        MapRecord {
            name: self.name.clone(),
            path: self.path.display().to_string(),
            id,
            map_type,
            key_size,
            value_size,
            max_entries,
            flags,
            coverage: Coverage::Selected,
            method: Method::Lookup,
            complete: true,
            total: None,
            problem: None,
            entries: Entries::new(key_size as usize, bpf::value_len(&self.info, cpus)),
        }
    }
}

/// A record of a map that could not be used, so that the problem stays in the evidence.
#[must_use]
pub fn failed(root: &Path, name: &str, error: &MapError, info: Option<&MapInfo>) -> MapRecord {
    let field = |pick: fn(&MapInfo) -> u32| info.map_or(0, pick);
    MapRecord {
        name: name.to_owned(),
        path: root.join(GLOBALS).join(name).display().to_string(),
        id: field(|info| info.id),
        map_type: info.map_or(MapType(0), |info| info.map_type),
        key_size: field(|info| info.key_size),
        value_size: field(|info| info.value_size),
        max_entries: field(|info| info.max_entries),
        flags: field(|info| info.flags),
        coverage: Coverage::None,
        method: Method::Lookup,
        complete: false,
        total: None,
        problem: Some(error.to_string()),
        entries: Entries::default(),
    }
}
