//! `bpf(2)`: open a pin read-only, ask what it is, look entries up one by one or in batches.

use std::{
    ffi::CString,
    fmt, io,
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use crate::cilium::layout::MapType;

const BPF_MAP_LOOKUP_ELEM: libc::c_long = 1;
const BPF_MAP_DELETE_ELEM: libc::c_long = 3;
const BPF_MAP_GET_NEXT_KEY: libc::c_long = 4;
const BPF_OBJ_GET: libc::c_long = 7;
const BPF_MAP_GET_FD_BY_ID: libc::c_long = 14;
pub(super) const BPF_OBJ_GET_INFO_BY_FD: libc::c_long = 15;
const BPF_MAP_LOOKUP_BATCH: libc::c_long = 24;

/// `BPF_F_RDONLY`: the descriptor may read the map and nothing else.
const BPF_F_RDONLY: u32 = 1 << 3;

/// What a pin in bpffs turned out to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ObjectKind {
    /// A map.
    Map,
    /// A program.
    Program,
    /// A link.
    Link,
    /// Something this version does not know (a BTF object, a token, …).
    Other,
}

impl fmt::Display for ObjectKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Map => "a map",
            Self::Program => "a program",
            Self::Link => "a link",
            Self::Other => "something else",
        })
    }
}

/// What the kernel says of a map (`struct bpf_map_info`), sizes in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MapInfo {
    /// Map type.
    pub map_type: MapType,
    /// Id, unique while the map lives.
    pub id: u32,
    /// Key size.
    pub key_size: u32,
    /// Value size (of one CPU, for per-CPU maps).
    pub value_size: u32,
    /// Largest number of entries.
    pub max_entries: u32,
    /// `BPF_F_*` flags.
    pub flags: u32,
    /// Name, cut by the kernel to 15 bytes.
    pub name: String,
}

#[repr(C)]
#[derive(Default)]
struct ObjGetAttr {
    pathname: u64,
    bpf_fd: u32,
    file_flags: u32,
}

#[repr(C)]
#[derive(Default)]
pub(super) struct InfoAttr {
    pub(super) bpf_fd: u32,
    pub(super) info_len: u32,
    pub(super) info: u64,
}

/// What the commands take that turn an id into a descriptor.
#[repr(C)]
#[derive(Default)]
pub(super) struct GetIdAttr {
    pub(super) id: u32,
    pub(super) next_id: u32,
    pub(super) open_flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct ElemAttr {
    map_fd: u32,
    pad: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
#[derive(Default)]
struct BatchAttr {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map_fd: u32,
    elem_flags: u64,
    flags: u64,
}

/// The head of `struct bpf_map_info`, as old as Linux 4.15; the kernel fills what it knows and is
/// asked for no more.
#[repr(C)]
#[derive(Default)]
struct RawMapInfo {
    map_type: u32,
    id: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    map_flags: u32,
    name: [u8; 16],
}

/// Calls `bpf(2)`.
///
/// # Safety
/// `attr` must be the attribute of `command`, and every address in it must be valid for what the
/// kernel reads from or writes to it.
pub(super) unsafe fn bpf<T>(command: libc::c_long, attr: &mut T) -> io::Result<libc::c_long> {
    // SAFETY: the caller promises that the attribute fits the command; its size is given along.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<T>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

pub(super) const BPF_PROG_LOAD: libc::c_long = 5;

/// `union bpf_attr` of `BPF_PROG_LOAD`, up to `attach_prog_fd`.
#[repr(C)]
#[derive(Default)]
pub(super) struct LoadAttr {
    pub prog_type: u32,
    pub insn_cnt: u32,
    pub insns: u64,
    pub license: u64,
    pub log_level: u32,
    pub log_size: u32,
    pub log_buf: u64,
    pub kern_version: u32,
    pub prog_flags: u32,
    pub prog_name: [u8; 16],
    pub prog_ifindex: u32,
    pub expected_attach_type: u32,
    pub prog_btf_fd: u32,
    pub func_info_rec_size: u32,
    pub func_info: u64,
    pub func_info_cnt: u32,
    pub line_info_rec_size: u32,
    pub line_info: u64,
    pub line_info_cnt: u32,
    pub attach_btf_id: u32,
    pub attach_prog_fd: u32,
    pub pad: u32,
}

/// Of what the verifier said, the last that is no account of its work: why it refuses.
#[must_use]
pub fn verifiers_reason(log: &str) -> &str {
    const ACCOUNTS: [&str; 3] = ["processed", "verification time", "stack depth"];
    let is_account = |line: &str| ACCOUNTS.iter().any(|word| line.starts_with(word));
    let mut lines = log.lines().rev();
    lines.find(|line| !line.is_empty() && !is_account(line)).unwrap_or_default()
}

#[allow(clippy::cast_possible_truncation, reason = "structs of a few dozen bytes")]
pub(super) fn size_u32<T>() -> u32 {
    size_of::<T>() as u32
}

/// A descriptor as the unsigned number that `union bpf_attr` wants.
pub(super) fn fd_number(fd: BorrowedFd<'_>) -> u32 {
    fd.as_raw_fd().unsigned_abs()
}

/// Opens a pinned object for reading only.
///
/// # Errors
/// The error of `BPF_OBJ_GET`: `EPERM` or `EACCES` without privilege, `EINVAL` for a pinned link
/// (which the kernel does not open read-only), `ENOTTY`/`EINVAL` for a file that is no pin.
pub fn open_pin(path: &Path) -> io::Result<OwnedFd> {
    open_with(path, BPF_F_RDONLY)
}

/// Opens a pinned link, of which the kernel gives out no read-only descriptor.
///
/// Having it open changes nothing of the link: only `BPF_LINK_UPDATE` and `BPF_LINK_DETACH` on the
/// descriptor would, which nothing here calls, and the pin keeps the link whether or not the
/// descriptor is closed. Only for pins of which [`open_pin`] said `EINVAL`.
///
/// # Errors
/// The error of `BPF_OBJ_GET`: `EPERM` or `EACCES` without privilege or write access to the pin.
pub fn open_link_pin(path: &Path) -> io::Result<OwnedFd> {
    open_with(path, 0)
}

fn open_with(path: &Path, file_flags: u32) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())
        .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let mut attr =
        ObjGetAttr { pathname: path.as_ptr() as u64, file_flags, ..ObjGetAttr::default() };
    // SAFETY: `pathname` is a NUL-terminated string that outlives the call.
    let fd = unsafe { bpf(BPF_OBJ_GET, &mut attr)? };
    // SAFETY: the kernel just returned this descriptor; nobody else owns it.
    unsafe { owned(fd) }
}

/// Opens the map with this id for reading only.
///
/// # Errors
/// The error of `BPF_MAP_GET_FD_BY_ID`: `ENOENT` if the map is gone, `EPERM` without
/// `CAP_SYS_ADMIN`, which the kernel wants for this on top of `CAP_BPF`.
pub fn open_map_by_id(id: u32) -> io::Result<OwnedFd> {
    let mut attr = GetIdAttr { id, open_flags: BPF_F_RDONLY, ..GetIdAttr::default() };
    // SAFETY: the attribute holds no address.
    let fd = unsafe { bpf(BPF_MAP_GET_FD_BY_ID, &mut attr)? };
    // SAFETY: the kernel just returned this descriptor; nobody else owns it.
    unsafe { owned(fd) }
}

/// Opens the map with this id for reading and writing: only to take back what a simulation put
/// there.
///
/// # Errors
/// As [`open_map_by_id`].
pub fn open_map_for_cleaning(id: u32) -> io::Result<OwnedFd> {
    let mut attr = GetIdAttr { id, ..GetIdAttr::default() };
    // SAFETY: the attribute holds no address.
    let fd = unsafe { bpf(BPF_MAP_GET_FD_BY_ID, &mut attr)? };
    // SAFETY: the kernel just returned this descriptor; nobody else owns it.
    unsafe { owned(fd) }
}

/// Deletes one entry; `Ok(false)` if it is not there.
///
/// # Errors
/// The error of `BPF_MAP_DELETE_ELEM`, but for `ENOENT`.
///
/// # Panics
/// If `key` has not the map's key size.
pub fn delete(fd: BorrowedFd<'_>, info: &MapInfo, key: &[u8]) -> io::Result<bool> {
    assert_eq!(key.len(), info.key_size as usize);
    let mut attr =
        ElemAttr { map_fd: fd_number(fd), key: key.as_ptr() as u64, ..ElemAttr::default() };
    // SAFETY: the key has the length that the kernel reads, checked above.
    match unsafe { bpf(BPF_MAP_DELETE_ELEM, &mut attr) } {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Takes a descriptor that a call of `bpf(2)` returned.
///
/// # Safety
/// `fd` must be a descriptor that nobody else owns.
pub(super) unsafe fn owned(fd: libc::c_long) -> io::Result<OwnedFd> {
    let fd = i32::try_from(fd).map_err(|_| io::Error::from_raw_os_error(libc::EBADF))?;
    // SAFETY: the caller promises that nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// What an open BPF object is, from the name of its anonymous inode.
///
/// # Errors
/// The error of reading the link below `/proc/self/fd`.
pub fn object_kind(fd: BorrowedFd<'_>) -> io::Result<ObjectKind> {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
    Ok(match link.as_os_str().as_bytes() {
        b"anon_inode:bpf-map" => ObjectKind::Map,
        b"anon_inode:bpf-prog" => ObjectKind::Program,
        b"anon_inode:bpf_link" | b"anon_inode:bpf-link" => ObjectKind::Link,
        _ => ObjectKind::Other,
    })
}

/// Asks the kernel what a map is.
///
/// # Errors
/// The error of `BPF_OBJ_GET_INFO_BY_FD`.
pub fn map_info(fd: BorrowedFd<'_>) -> io::Result<MapInfo> {
    let mut info = RawMapInfo::default();
    let mut attr = InfoAttr {
        bpf_fd: fd_number(fd),
        info_len: size_u32::<RawMapInfo>(),
        info: std::ptr::from_mut(&mut info) as u64,
    };
    // SAFETY: `info` points to `info_len` writable bytes that outlive the call.
    unsafe { bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attr)? };
    let name = info.name.split(|&byte| byte == 0).next().unwrap_or_default();
    Ok(MapInfo {
        map_type: MapType(info.map_type),
        id: info.id,
        key_size: info.key_size,
        value_size: info.value_size,
        max_entries: info.max_entries,
        flags: info.map_flags,
        name: String::from_utf8_lossy(name).into_owned(),
    })
}

/// Looks one key up; `Ok(false)` if it is not there.
///
/// `key` must have the map's key size, `value` the length that a look-up returns (see
/// [`value_len`]); both are checked by the caller, who made them from [`MapInfo`].
///
/// # Errors
/// The error of `BPF_MAP_LOOKUP_ELEM`, but for `ENOENT`.
///
/// # Panics
/// If the lengths do not fit `info`.
pub fn lookup(
    fd: BorrowedFd<'_>,
    info: &MapInfo,
    key: &[u8],
    value: &mut [u8],
    cpus: usize,
) -> io::Result<bool> {
    assert_eq!(key.len(), info.key_size as usize);
    assert_eq!(value.len(), value_len(info, cpus));
    let mut attr = ElemAttr {
        map_fd: fd_number(fd),
        key: key.as_ptr() as u64,
        value: value.as_mut_ptr() as u64,
        ..ElemAttr::default()
    };
    // SAFETY: both buffers have the lengths that the kernel reads and writes, checked above.
    match unsafe { bpf(BPF_MAP_LOOKUP_ELEM, &mut attr) } {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The key behind `key` (or the first), written to `next`; `Ok(false)` at the end.
///
/// # Errors
/// The error of `BPF_MAP_GET_NEXT_KEY`, but for `ENOENT`.
///
/// # Panics
/// If the lengths do not fit `info`.
pub fn next_key(
    fd: BorrowedFd<'_>,
    info: &MapInfo,
    key: Option<&[u8]>,
    next: &mut [u8],
) -> io::Result<bool> {
    assert!(key.is_none_or(|key| key.len() == info.key_size as usize));
    assert_eq!(next.len(), info.key_size as usize);
    let mut attr = ElemAttr {
        map_fd: fd_number(fd),
        key: key.map_or(0, |key| key.as_ptr() as u64),
        value: next.as_mut_ptr() as u64,
        ..ElemAttr::default()
    };
    // SAFETY: both buffers have the key size that the kernel reads and writes, checked above.
    match unsafe { bpf(BPF_MAP_GET_NEXT_KEY, &mut attr) } {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Bytes that a look-up from user space returns: for per-CPU maps one value for each of `cpus`
/// possible CPUs, each padded to 8 bytes.
#[must_use]
pub fn value_len(info: &MapInfo, cpus: usize) -> usize {
    let size = info.value_size as usize;
    if info.map_type.is_per_cpu() { size.next_multiple_of(8) * cpus } else { size }
}

/// Where a batch look-up stands. Opaque: a bucket number for hash maps, a key for others.
#[derive(Debug, Clone)]
pub struct BatchCursor {
    position: Vec<u8>,
    started: bool,
}

impl BatchCursor {
    /// At the start of a map with keys of `key_size` bytes.
    #[must_use]
    pub fn new(key_size: u32) -> Self {
        // The kernel stores a u32 for hash maps, a key for the rest.
        Self { position: vec![0; (key_size as usize).max(8)], started: false }
    }
}

/// What one batch look-up brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Batch {
    /// More may follow.
    More,
    /// The map is at its end.
    End,
    /// One bucket holds more entries than were asked for: ask again for more.
    TooSmall,
}

/// Reads up to `count` further entries and appends them to `keys` and `values`.
///
/// A hash map gives whole buckets, each under its lock, and each bucket once: no entry comes
/// twice. Others (tries, arrays) are walked by key, where an entry can come twice if the map
/// changes meanwhile.
///
/// # Errors
/// The error of `BPF_MAP_LOOKUP_BATCH`; `EINVAL` or `ENOTSUPP` (524) where the kernel or the map
/// type has no batches.
pub fn lookup_batch(
    fd: BorrowedFd<'_>,
    info: &MapInfo,
    cpus: usize,
    cursor: &mut BatchCursor,
    count: u32,
    keys: &mut Vec<u8>,
    values: &mut Vec<u8>,
) -> io::Result<Batch> {
    let key_len = info.key_size as usize;
    let value_len = value_len(info, cpus);
    keys.reserve(count as usize * key_len);
    values.reserve(count as usize * value_len);
    let mut next = cursor.position.clone();
    let mut attr = BatchAttr {
        in_batch: if cursor.started { cursor.position.as_ptr() as u64 } else { 0 },
        out_batch: next.as_mut_ptr() as u64,
        keys: keys.spare_capacity_mut().as_mut_ptr() as u64,
        values: values.spare_capacity_mut().as_mut_ptr() as u64,
        count,
        map_fd: fd_number(fd),
        ..BatchAttr::default()
    };
    // SAFETY: the two vectors have room for `count` keys and values of the map's sizes, the cursor
    // buffers for a key or a u32, and all outlive the call.
    let result = unsafe { bpf(BPF_MAP_LOOKUP_BATCH, &mut attr) };
    let end = match &result {
        Ok(_) => false,
        Err(error) => match error.raw_os_error() {
            Some(libc::ENOENT) => true,
            Some(libc::ENOSPC) => return Ok(Batch::TooSmall),
            _ => return result.map(|_| Batch::End),
        },
    };
    let got = attr.count.min(count) as usize;
    // SAFETY: the kernel has written `got` keys and values, at most what was reserved.
    unsafe {
        keys.set_len(keys.len() + got * key_len);
        values.set_len(values.len() + got * value_len);
    }
    cursor.position = next;
    cursor.started = true;
    Ok(if end { Batch::End } else { Batch::More })
}
