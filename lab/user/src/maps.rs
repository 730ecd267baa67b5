//! Captured maps as real ones: created, filled and pinned.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use inspector::cilium::layout::MapType;

use crate::{
    bpf,
    capture::{CapturedMap, Entry, MapSpec, encode_hex},
};

/// Entries that one batch update carries. The kernel copies keys and values one at a time, so
/// larger batches gain nothing; this bounds the buffers.
const BATCH: usize = 8192;

/// Size of Cilium's Maglev tables unless configured otherwise (`--bpf-lb-maglev-table-size`).
const MAGLEV_TABLE_SIZE: u32 = 16381;

/// Why a map could not be made, changed or read.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// The kernel refused to create a map.
    #[error(
        "cannot create the map {name} ({map_type}, key {key} and value {value} bytes, max {max}, \
         flags {flags:#x}): {source}{hint}"
    )]
    Create {
        /// Name of the pin.
        name: String,
        /// Type of the map.
        map_type: MapType,
        /// Key size, bytes.
        key: u32,
        /// Value size, bytes.
        value: u32,
        /// Capacity, entries.
        max: u32,
        /// Flags.
        flags: u32,
        /// What the kernel said.
        source: io::Error,
        /// What to do; starts with `; ` or is empty.
        hint: &'static str,
    },
    /// A call on an entry failed.
    #[error("{call} of the key {key} in the map {name}: {source}")]
    Entry {
        /// The call of bpf(2).
        call: &'static str,
        /// Name of the map.
        name: String,
        /// The key, hex.
        key: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// A call on a map, a program or a pin failed.
    #[error("{call} for {object}: {source}")]
    Call {
        /// The call.
        call: &'static str,
        /// The map or path.
        object: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// A pin that is something else.
    #[error("{name} is no map (the kernel calls it {kind})")]
    NotAMap {
        /// Name of the pin.
        name: String,
        /// `bpf-prog`, `bpf_link` and the like.
        kind: String,
    },
    /// A key or value of a size that the map does not have.
    #[error("{name}: a {part} of {found} bytes, but this map's have {expected}")]
    Size {
        /// Name of the map.
        name: String,
        /// `key` or `value`.
        part: &'static str,
        /// Bytes given.
        found: usize,
        /// Bytes needed.
        expected: usize,
    },
    /// Per-CPU values that cannot be added up.
    #[error(
        "{name}: captured on {captured} CPUs, this machine has {here}, and values of {size} bytes \
         are no counters that could be added up"
    )]
    PerCpu {
        /// Name of the map.
        name: String,
        /// CPUs in the capture.
        captured: usize,
        /// CPUs here.
        here: usize,
        /// Value size, bytes.
        size: u32,
    },
    /// A map of maps whose entry has no inner map.
    #[error("{name}: no inner map for the key {key}")]
    NoInner {
        /// Name of the outer map.
        name: String,
        /// The key, hex.
        key: String,
    },
}

/// A map in the kernel, kept open.
#[derive(Debug)]
pub struct MapHandle {
    fd: OwnedFd,
    name: String,
    id: u32,
    spec: MapSpec,
}

impl MapHandle {
    /// Creates a map. `name` is for messages; what the kernel keeps is `spec.name`.
    ///
    /// A map of maps gets as template an array with one entry that has the size of a Maglev table
    /// of Cilium's default; [`MapHandle::create_outer`] takes another.
    ///
    /// # Errors
    /// [`MapError::Create`].
    pub fn create(name: &str, spec: &MapSpec) -> Result<Self, MapError> {
        if spec.is_map_in_map() {
            let template = MapSpec {
                map_type: MapType::ARRAY,
                key_size: 4,
                value_size: 4 * MAGLEV_TABLE_SIZE,
                max_entries: 1,
                flags: 0,
                name: "cilium_maglev_inner".into(),
            };
            return Self::create_outer(name, spec, &Self::create("the inner template", &template)?);
        }
        Self::create_with(name, spec, None)
    }

    /// Creates a map of maps whose inner maps are like `template`.
    ///
    /// # Errors
    /// [`MapError::Create`].
    pub fn create_outer(name: &str, spec: &MapSpec, template: &Self) -> Result<Self, MapError> {
        Self::create_with(name, spec, Some(template.fd.as_fd()))
    }

    fn create_with(
        name: &str,
        spec: &MapSpec,
        inner: Option<BorrowedFd<'_>>,
    ) -> Result<Self, MapError> {
        let fd = bpf::map_create(spec, inner).map_err(|source| MapError::Create {
            name: name.to_owned(),
            map_type: spec.map_type,
            key: spec.key_size,
            value: spec.value_size,
            max: spec.max_entries,
            flags: spec.flags,
            hint: match source.raw_os_error() {
                Some(libc::EPERM) => "; run as root (CAP_BPF and CAP_NET_ADMIN are needed)",
                Some(libc::ENOMEM) => {
                    "; free some memory, or raise RLIMIT_MEMLOCK on kernels before 5.11"
                }
                _ => "",
            },
            source,
        })?;
        Self::from_fd(fd, name)
    }

    /// Opens a pinned map for reading and writing.
    ///
    /// # Errors
    /// [`MapError::Call`], [`MapError::NotAMap`].
    pub fn open(path: &Path) -> Result<Self, MapError> {
        let fd = bpf::get(path).map_err(call("BPF_OBJ_GET", path.display()))?;
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        Self::from_fd(fd, &name)
    }

    /// Opens the map with this id.
    ///
    /// # Errors
    /// [`MapError::Call`].
    pub fn by_id(id: u32) -> Result<Self, MapError> {
        let fd =
            bpf::map_by_id(id).map_err(call("BPF_MAP_GET_FD_BY_ID", format!("map id {id}")))?;
        Self::from_fd(fd, &format!("map id {id}"))
    }

    fn from_fd(fd: OwnedFd, name: &str) -> Result<Self, MapError> {
        match bpf::kind(bpf::fd(&fd)).map_err(call("looking at the kind of", name))? {
            kind if kind == "bpf-map" => {}
            kind => return Err(MapError::NotAMap { name: name.to_owned(), kind }),
        }
        let (id, spec) =
            bpf::map_info(bpf::fd(&fd)).map_err(call("BPF_OBJ_GET_INFO_BY_FD", name))?;
        Ok(Self { fd, name: name.to_owned(), id, spec })
    }

    /// The kernel's id of the map.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }

    /// What the kernel says that it was created with.
    #[must_use]
    pub fn spec(&self) -> &MapSpec {
        &self.spec
    }

    /// Pins the map at `path`, which must lie in a bpffs.
    ///
    /// # Errors
    /// [`MapError::Call`].
    pub fn pin(&self, path: &Path) -> Result<(), MapError> {
        bpf::pin(self.fd.as_fd(), path).map_err(call("BPF_OBJ_PIN", path.display()))
    }

    /// Sets an entry. Values of per-CPU maps: all possible CPUs in a row, each padded to 8 bytes.
    ///
    /// # Errors
    /// [`MapError::Size`], [`MapError::Entry`].
    pub fn update(&self, key: &[u8], value: &[u8]) -> Result<(), MapError> {
        self.check("key", key, self.spec.key_size as usize)?;
        self.check("value", value, self.user_value_size()?)?;
        bpf::map_update(self.fd.as_fd(), key, value)
            .map_err(|source| self.entry_error("BPF_MAP_UPDATE_ELEM", key, source))
    }

    /// Puts an inner map under `key` of a map of maps.
    ///
    /// # Errors
    /// [`MapError::Size`], [`MapError::Entry`].
    pub fn update_inner(&self, key: &[u8], inner: &Self) -> Result<(), MapError> {
        use std::os::fd::AsRawFd;
        self.update(key, &inner.fd.as_raw_fd().to_ne_bytes())
    }

    /// Removes an entry.
    ///
    /// # Errors
    /// [`MapError::Size`], [`MapError::Entry`] (no such key among them).
    pub fn delete(&self, key: &[u8]) -> Result<(), MapError> {
        self.check("key", key, self.spec.key_size as usize)?;
        bpf::map_delete(self.fd.as_fd(), key)
            .map_err(|source| self.entry_error("BPF_MAP_DELETE_ELEM", key, source))
    }

    /// Looks an entry up; `None` when there is none. In a map of maps the value is the id of the
    /// inner map, in a program array that of the program.
    ///
    /// # Errors
    /// [`MapError::Size`], [`MapError::Entry`].
    pub fn lookup(&self, key: &[u8]) -> Result<Option<Vec<u8>>, MapError> {
        self.check("key", key, self.spec.key_size as usize)?;
        bpf::map_lookup(self.fd.as_fd(), key, self.user_value_size()?)
            .map_err(|source| self.entry_error("BPF_MAP_LOOKUP_ELEM", key, source))
    }

    /// All entries, by walking the keys: for a map that nobody changes meanwhile. Empty places of
    /// arrays whose values are programs, events or maps are left out.
    ///
    /// # Errors
    /// [`MapError::Call`], [`MapError::Entry`].
    pub fn entries(&self) -> Result<Vec<Entry>, MapError> {
        let mut entries = Vec::<Entry>::new();
        let mut last: Option<Vec<u8>> = None;
        let sparse = self.spec.holds_objects() || self.spec.map_type == MapType::ARRAY_OF_MAPS;
        loop {
            let key_size = self.spec.key_size as usize;
            let next = bpf::map_next_key(self.fd.as_fd(), last.as_deref(), key_size)
                .map_err(call("BPF_MAP_GET_NEXT_KEY", &self.name))?;
            let Some(key) = next else { return Ok(entries) };
            match self.lookup(&key)? {
                Some(value) => entries.push(Entry { key: key.clone(), value }),
                None if sparse => {}
                None => {
                    let gone = io::Error::from_raw_os_error(libc::ENOENT);
                    return Err(self.entry_error("BPF_MAP_LOOKUP_ELEM", &key, gone));
                }
            }
            last = Some(key);
        }
    }

    /// Sets many entries, by batch updates where the kernel has them for this type of map.
    ///
    /// # Errors
    /// [`MapError::Size`], [`MapError::Entry`], [`MapError::Call`].
    pub fn fill<'a>(
        &self,
        entries: impl IntoIterator<Item = (&'a [u8], &'a [u8])>,
    ) -> Result<(), MapError> {
        let key_size = self.spec.key_size as usize;
        let value_size = self.user_value_size()?;
        let mut entries = entries.into_iter().peekable();
        while entries.peek().is_some() {
            let mut keys = Vec::new();
            let mut values = Vec::new();
            let mut count = 0;
            for (key, value) in entries.by_ref().take(BATCH) {
                self.check("key", key, key_size)?;
                self.check("value", value, value_size)?;
                keys.extend_from_slice(key);
                values.extend_from_slice(value);
                count += 1;
            }
            let done = bpf::map_update_batch(self.fd.as_fd(), &keys, &values, count)
                .map_err(call("BPF_MAP_UPDATE_BATCH", &self.name))?;
            if !done {
                let pairs = keys.chunks_exact(key_size).zip(values.chunks_exact(value_size));
                for (key, value) in pairs {
                    self.update(key, value)?;
                }
            }
        }
        Ok(())
    }

    fn user_value_size(&self) -> Result<usize, MapError> {
        Ok(self.spec.user_value_size(cpus()?))
    }

    fn check(&self, part: &'static str, bytes: &[u8], expected: usize) -> Result<(), MapError> {
        if bytes.len() == expected {
            return Ok(());
        }
        Err(MapError::Size { name: self.name.clone(), part, found: bytes.len(), expected })
    }

    fn entry_error(&self, call: &'static str, key: &[u8], source: io::Error) -> MapError {
        MapError::Entry { call, name: self.name.clone(), key: encode_hex(key), source }
    }
}

/// For `map_err`: names the call and the object.
fn call(call: &'static str, object: impl ToString) -> impl FnOnce(io::Error) -> MapError {
    move |source| MapError::Call { call, object: object.to_string(), source }
}

fn cpus() -> Result<usize, MapError> {
    bpf::possible_cpus().map_err(call("counting the possible CPUs", "per-CPU maps"))
}

/// Where Cilium pins its maps below the root of a bpffs.
#[must_use]
pub fn globals(bpffs: &Path) -> PathBuf {
    bpffs.join("tc/globals")
}

/// Creates a captured map and fills it.
///
/// Program and perf event arrays stay empty: their entries were kernel objects. Per-CPU values are
/// fitted to this machine's CPUs such that sums over CPUs stay what they were.
///
/// # Errors
/// [`MapError`].
pub fn load_map(map: &CapturedMap) -> Result<MapHandle, MapError> {
    let spec = &map.spec;
    if spec.is_map_in_map() {
        return load_outer(map);
    }
    let handle = MapHandle::create(&map.name, spec)?;
    if spec.holds_objects() {
        return Ok(handle);
    }
    if spec.map_type.is_per_cpu() {
        let here = cpus()?;
        let fitted = map
            .entries
            .iter()
            .map(|entry| fit_cpus(&map.name, spec, &entry.value, here))
            .collect::<Result<Vec<_>, _>>()?;
        handle.fill(
            map.entries.iter().zip(&fitted).map(|(entry, value)| (&entry.key[..], &value[..])),
        )?;
    } else {
        handle.fill(map.entries.iter().map(|entry| (&entry.key[..], &entry.value[..])))?;
    }
    Ok(handle)
}

/// How many ids the tables in a Maglev map have: those of the first, or Cilium's default where there
/// is none, as [`MapHandle::create`] assumes.
///
/// # Errors
/// [`MapError::Call`], [`MapError::Entry`].
pub fn maglev_table_size(outer: &MapHandle) -> Result<u32, MapError> {
    for entry in outer.entries()? {
        if let Some(id) = entry.value.first_chunk::<4>() {
            return Ok(MapHandle::by_id(u32::from_ne_bytes(*id))?.spec.value_size / 4);
        }
    }
    Ok(MAGLEV_TABLE_SIZE)
}

fn load_outer(map: &CapturedMap) -> Result<MapHandle, MapError> {
    let inner = map
        .inner
        .iter()
        .map(|(key, inner)| Ok((key, load_map(inner)?)))
        .collect::<Result<BTreeMap<_, _>, MapError>>()?;
    let handle = match inner.values().next() {
        Some(template) => MapHandle::create_outer(&map.name, &map.spec, template)?,
        None => MapHandle::create(&map.name, &map.spec)?,
    };
    for entry in &map.entries {
        let inner = inner.get(&entry.key).ok_or_else(|| MapError::NoInner {
            name: map.name.clone(),
            key: encode_hex(&entry.key),
        })?;
        handle.update_inner(&entry.key, inner)?;
    }
    Ok(handle)
}

/// Fits a per-CPU value to `here` CPUs: zeros for CPUs that the captured machine did not have; the
/// counters of CPUs that this one does not have are added to the last one's.
///
/// # Errors
/// [`MapError::PerCpu`] where values would have to be added up that are no counters.
pub fn fit_cpus(
    name: &str,
    spec: &MapSpec,
    value: &[u8],
    here: usize,
) -> Result<Vec<u8>, MapError> {
    let each = spec.user_value_size(1);
    let mut fitted = value.to_vec();
    fitted.resize(here * each, 0);
    if value.len() <= fitted.len() {
        return Ok(fitted);
    }
    let word = match spec.value_size {
        size if size % 8 == 0 => 8,
        size if size % 4 == 0 => 4,
        size => {
            let captured = value.len() / each;
            return Err(MapError::PerCpu { name: name.to_owned(), captured, here, size });
        }
    };
    let last = fitted.len() - each;
    for other in value[fitted.len()..].chunks_exact(each) {
        for (sum, add) in fitted[last..].chunks_exact_mut(word).zip(other.chunks_exact(word)) {
            add_little_endian(sum, add);
        }
    }
    Ok(fitted)
}

/// Adds two numbers of the same width, as captures (all little endian) hold them.
fn add_little_endian(sum: &mut [u8], add: &[u8]) {
    let mut carry = 0;
    for (byte, add) in sum.iter_mut().zip(add) {
        let total = u16::from(*byte) + u16::from(*add) + carry;
        [*byte, _] = total.to_le_bytes();
        carry = total >> 8;
    }
}
