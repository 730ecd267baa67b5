//! The few calls of bpf(2) that the lab needs, with file descriptors that own themselves.
//!
//! aya creates maps from an object file's definitions; the lab wants maps of any type, size, flag
//! and name, wrong ones included, and batch updates, which aya does not have. Hence the raw call.

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use inspector::cilium::layout::MapType;

use crate::capture::MapSpec;

/// `ENOTSUPP` of the kernel: an internal number that reaches user space from map operations that
/// a map type lacks, and that libc has no name for.
const ENOTSUPP: i32 = 524;

/// Commands of bpf(2) (`enum bpf_cmd` in the kernel's `include/uapi/linux/bpf.h`).
#[derive(Clone, Copy)]
#[repr(i32)]
enum Cmd {
    MapCreate = 0,
    MapLookupElem = 1,
    MapUpdateElem = 2,
    MapDeleteElem = 3,
    MapGetNextKey = 4,
    ProgLoad = 5,
    ObjPin = 6,
    ObjGet = 7,
    ProgAttach = 8,
    MapGetFdById = 14,
    ObjGetInfoByFd = 15,
    MapUpdateBatch = 26,
    LinkCreate = 28,
}

/// Calls bpf(2) with `attr`, a prefix of the kernel's `union bpf_attr` for `cmd`.
///
/// # Safety
/// `attr` must be laid out as the kernel expects for `cmd`, every pointer in it must be valid for
/// what the kernel does with it during the call, and a file descriptor in it must be open.
unsafe fn bpf<T>(cmd: Cmd, attr: &mut T) -> io::Result<i64> {
    // SAFETY: the caller vouches for the content; the size is that of what is pointed to, and the
    // kernel takes a shorter attr as one that is zero in the rest.
    let result = unsafe {
        libc::syscall(libc::SYS_bpf, cmd as libc::c_int, std::ptr::from_mut(attr), size_of::<T>())
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Wraps the descriptor that a successful bpf(2) returned.
fn owned(result: i64) -> OwnedFd {
    let fd = i32::try_from(result).expect("a file descriptor fits an int");
    // SAFETY: the kernel has just made this descriptor for us (with O_CLOEXEC) and nobody else
    // has it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// A raw descriptor as the unsigned number that bpf(2) takes.
fn raw(fd: BorrowedFd<'_>) -> u32 {
    u32::try_from(fd.as_raw_fd()).expect("an open descriptor is not negative")
}

fn address<T>(bytes: &[T]) -> u64 {
    bytes.as_ptr() as u64
}

/// A name as the kernel keeps it: the first 15 bytes, a zero after them.
fn kernel_name(name: &str) -> [u8; 16] {
    let mut kernel = [0; 16];
    let length = name.len().min(15);
    kernel[..length].copy_from_slice(&name.as_bytes()[..length]);
    kernel
}

#[repr(C)]
#[derive(Default)]
struct MapCreate {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    map_flags: u32,
    inner_map_fd: u32,
    numa_node: u32,
    map_name: [u8; 16],
}

#[repr(C)]
#[derive(Default)]
struct Elem {
    map_fd: u32,
    pad: u32,
    key: u64,
    /// `value` or `next_key`.
    value: u64,
    flags: u64,
}

#[repr(C)]
#[derive(Default)]
struct Batch {
    /// Where to begin, and where it ended: for look-ups only.
    begin: u64,
    end: u64,
    keys: u64,
    values: u64,
    count: u32,
    map_fd: u32,
    elem_flags: u64,
    flags: u64,
}

#[repr(C)]
#[derive(Default)]
struct Obj {
    pathname: u64,
    bpf_fd: u32,
    file_flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct ById {
    id: u32,
    next_id: u32,
    open_flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct InfoByFd {
    bpf_fd: u32,
    info_len: u32,
    info: u64,
}

/// Size of [`MapInfo`], bytes.
#[expect(clippy::cast_possible_truncation, reason = "40 bytes")]
const MAP_INFO_SIZE: u32 = size_of::<MapInfo>() as u32;

/// `struct bpf_map_info` up to the name; the kernel fills as much as it is given room for.
#[repr(C)]
#[derive(Default)]
struct MapInfo {
    map_type: u32,
    id: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    map_flags: u32,
    name: [u8; 16],
}

#[repr(C)]
#[derive(Default)]
struct ProgLoad {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    prog_flags: u32,
    prog_name: [u8; 16],
}

#[repr(C)]
struct LinkCreate {
    prog_fd: u32,
    /// A descriptor or an interface index.
    target: u32,
    attach_type: u32,
    flags: u32,
}

#[repr(C)]
struct ProgAttach {
    target_fd: u32,
    attach_bpf_fd: u32,
    attach_type: u32,
    attach_flags: u32,
}

/// Creates a map; `inner` is the template that a map of maps needs.
///
/// # Errors
/// What the kernel said: `EPERM` without `CAP_BPF` (and `CAP_NET_ADMIN` for some types), `EINVAL`
/// for sizes or flags that the type does not take.
pub fn map_create(spec: &MapSpec, inner: Option<BorrowedFd<'_>>) -> io::Result<OwnedFd> {
    let mut attr = MapCreate {
        map_type: spec.map_type.0,
        key_size: spec.key_size,
        value_size: spec.value_size,
        max_entries: spec.max_entries,
        map_flags: spec.flags,
        inner_map_fd: inner.map_or(0, raw),
        numa_node: 0,
        map_name: kernel_name(&spec.name),
    };
    // SAFETY: MapCreate is the kernel's layout; it holds no pointer, and the inner map's
    // descriptor is borrowed for the call.
    unsafe { bpf(Cmd::MapCreate, &mut attr) }.map(owned)
}

/// Sets one entry (`BPF_ANY`). `value` has the size that [`MapSpec::user_value_size`] says.
///
/// # Errors
/// What the kernel said; `E2BIG` when the map is full.
pub fn map_update(map: BorrowedFd<'_>, key: &[u8], value: &[u8]) -> io::Result<()> {
    let mut attr =
        Elem { map_fd: raw(map), key: address(key), value: address(value), ..Elem::default() };
    // SAFETY: Elem is the kernel's layout; key and value are borrowed for the call and have the
    // map's sizes (checked by `MapHandle`, the only caller).
    unsafe { bpf(Cmd::MapUpdateElem, &mut attr) }.map(drop)
}

/// Removes one entry.
///
/// # Errors
/// What the kernel said; `ENOENT` when there is no such key.
pub fn map_delete(map: BorrowedFd<'_>, key: &[u8]) -> io::Result<()> {
    let mut attr = Elem { map_fd: raw(map), key: address(key), ..Elem::default() };
    // SAFETY: as in `map_update`; there is no value.
    unsafe { bpf(Cmd::MapDeleteElem, &mut attr) }.map(drop)
}

/// Looks one entry up; `None` when there is no such key. `value_size` as
/// [`MapSpec::user_value_size`] says.
///
/// # Errors
/// What the kernel said.
pub fn map_lookup(
    map: BorrowedFd<'_>,
    key: &[u8],
    value_size: usize,
) -> io::Result<Option<Vec<u8>>> {
    let mut value = vec![0; value_size];
    let mut attr = Elem {
        map_fd: raw(map),
        key: address(key),
        value: value.as_mut_ptr() as u64,
        ..Elem::default()
    };
    // SAFETY: as in `map_update`; the kernel writes the map's user value size into `value`, which
    // has room for it.
    match unsafe { bpf(Cmd::MapLookupElem, &mut attr) } {
        Ok(_) => Ok(Some(value)),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The key after `key` (or the first), in the map's own order; `None` at the end.
///
/// # Errors
/// What the kernel said.
pub fn map_next_key(
    map: BorrowedFd<'_>,
    key: Option<&[u8]>,
    key_size: usize,
) -> io::Result<Option<Vec<u8>>> {
    let mut next = vec![0; key_size];
    let mut attr = Elem {
        map_fd: raw(map),
        key: key.map_or(0, address),
        value: next.as_mut_ptr() as u64,
        ..Elem::default()
    };
    // SAFETY: as in `map_update`; the kernel writes one key into `next`.
    match unsafe { bpf(Cmd::MapGetNextKey, &mut attr) } {
        Ok(_) => Ok(Some(next)),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Sets many entries at once: `keys` and `values` hold `count` of each, one after another.
/// `Ok(false)` when this kernel has no batch update for this type of map: then nothing was done.
///
/// # Errors
/// What the kernel said; the entries before the one it refused are set.
pub fn map_update_batch(
    map: BorrowedFd<'_>,
    keys: &[u8],
    values: &[u8],
    count: u32,
) -> io::Result<bool> {
    let mut attr = Batch {
        keys: address(keys),
        values: address(values),
        count,
        map_fd: raw(map),
        ..Batch::default()
    };
    // SAFETY: Batch is the kernel's layout; keys and values are borrowed for the call and hold
    // `count` of the map's sizes (see `MapHandle::fill`, the only caller).
    match unsafe { bpf(Cmd::MapUpdateBatch, &mut attr) } {
        Ok(_) => Ok(true),
        Err(error)
            if matches!(error.raw_os_error(), Some(ENOTSUPP | libc::EOPNOTSUPP))
                || (error.raw_os_error() == Some(libc::EINVAL) && attr.count == count) =>
        {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Pins a map, program or link at `path`, which must lie in a bpffs.
///
/// # Errors
/// What the kernel said; `EEXIST` when the name is taken.
pub fn pin(object: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = Obj { pathname: path.as_ptr() as u64, bpf_fd: raw(object), file_flags: 0 };
    // SAFETY: Obj is the kernel's layout; the path is a C string that lives until after the call.
    unsafe { bpf(Cmd::ObjPin, &mut attr) }.map(drop)
}

/// Opens what is pinned at `path`, for reading and writing.
///
/// # Errors
/// What the kernel said.
pub fn get(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = Obj { pathname: path.as_ptr() as u64, ..Obj::default() };
    // SAFETY: as in `pin`.
    unsafe { bpf(Cmd::ObjGet, &mut attr) }.map(owned)
}

/// Opens the map with this id.
///
/// # Errors
/// What the kernel said; `ENOENT` when there is no such map any more.
pub fn map_by_id(id: u32) -> io::Result<OwnedFd> {
    let mut attr = ById { id, ..ById::default() };
    // SAFETY: ById is the kernel's layout and holds no pointer.
    unsafe { bpf(Cmd::MapGetFdById, &mut attr) }.map(owned)
}

/// What kind of BPF object a descriptor is: `bpf-map`, `bpf-prog`, `bpf_link`. Asking a program for
/// map information does not fail: the kernel fills the buffer with program information.
///
/// # Errors
/// Where `/proc/self/fd` cannot be read.
pub fn kind(object: BorrowedFd<'_>) -> io::Result<String> {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", object.as_raw_fd()))?;
    Ok(link.to_string_lossy().trim_start_matches("anon_inode:").to_owned())
}

/// What the kernel says of a map: its id and what it was created with.
///
/// # Errors
/// What the kernel said.
pub fn map_info(map: BorrowedFd<'_>) -> io::Result<(u32, MapSpec)> {
    let mut info = MapInfo::default();
    let mut attr = InfoByFd {
        bpf_fd: raw(map),
        info_len: MAP_INFO_SIZE,
        info: std::ptr::from_mut(&mut info) as u64,
    };
    // SAFETY: InfoByFd is the kernel's layout; it writes at most `info_len` bytes into `info`, a
    // prefix of `struct bpf_map_info` that is plain numbers.
    unsafe { bpf(Cmd::ObjGetInfoByFd, &mut attr) }?;
    let end = info.name.iter().position(|byte| *byte == 0).unwrap_or(info.name.len());
    let spec = MapSpec {
        map_type: MapType(info.map_type),
        key_size: info.key_size,
        value_size: info.value_size,
        max_entries: info.max_entries,
        flags: info.map_flags,
        name: String::from_utf8_lossy(&info.name[..end]).into_owned(),
    };
    Ok((info.id, spec))
}

/// Attaches a program by a link that lives as long as the descriptor or a pin of it. `target` is a
/// descriptor (cgroups) or an interface index (tcx, in this thread's network namespace), as `kind`
/// (`enum bpf_attach_type`) wants it, or for XDP too; `flags` are that type's.
///
/// # Errors
/// What the kernel said.
pub fn link_create(
    program: BorrowedFd<'_>,
    target: u32,
    kind: u32,
    flags: u32,
) -> io::Result<OwnedFd> {
    let mut attr = LinkCreate { prog_fd: raw(program), target, attach_type: kind, flags };
    // SAFETY: LinkCreate is the kernel's layout and holds no pointer.
    unsafe { bpf(Cmd::LinkCreate, &mut attr) }.map(owned)
}

/// Attaches a program to a cgroup without a link: until the cgroup is gone.
///
/// # Errors
/// What the kernel said.
pub fn prog_attach(program: BorrowedFd<'_>, cgroup: BorrowedFd<'_>, kind: u32) -> io::Result<()> {
    let mut attr = ProgAttach {
        target_fd: raw(cgroup),
        attach_bpf_fd: raw(program),
        attach_type: kind,
        attach_flags: 0,
    };
    // SAFETY: ProgAttach is the kernel's layout and holds no pointer.
    unsafe { bpf(Cmd::ProgAttach, &mut attr) }.map(drop)
}

/// Loads the smallest program there is (a socket filter that returns 0), named `name`.
///
/// # Errors
/// What the kernel said.
pub fn load_trivial_program(name: &str) -> io::Result<OwnedFd> {
    const SOCKET_FILTER: u32 = 1;
    // `r0 = 0; exit`, eight bytes each (struct bpf_insn: opcode, registers, offset, immediate).
    let instructions: [u64; 2] = [
        u64::from_ne_bytes([0xb7, 0, 0, 0, 0, 0, 0, 0]),
        u64::from_ne_bytes([0x95, 0, 0, 0, 0, 0, 0, 0]),
    ];
    let license = c"Dual MIT/GPL";
    let mut attr = ProgLoad {
        prog_type: SOCKET_FILTER,
        insn_cnt: 2,
        insns: address(&instructions),
        license: license.as_ptr() as u64,
        prog_name: kernel_name(name),
        ..ProgLoad::default()
    };
    // SAFETY: ProgLoad is the kernel's layout; instructions and licence live until after the call.
    unsafe { bpf(Cmd::ProgLoad, &mut attr) }.map(owned)
}

/// Number of CPUs that the kernel keeps per-CPU values for: the possible ones, not those on line.
///
/// # Errors
/// Where `/sys/devices/system/cpu/possible` cannot be read.
pub fn possible_cpus() -> io::Result<usize> {
    let path = "/sys/devices/system/cpu/possible";
    let text = std::fs::read_to_string(path)?;
    let bad = || io::Error::new(io::ErrorKind::InvalidData, format!("{path}: `{}`", text.trim()));
    // The kernel's list form: `0-3`, `0`, `0-1,4-5`.
    text.trim().split(',').try_fold(0, |sum, range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let first: usize = first.parse().map_err(|_| bad())?;
        let last: usize = last.parse().map_err(|_| bad())?;
        Ok(sum + last.checked_sub(first).ok_or_else(bad)? + 1)
    })
}

/// `CLOCK_MONOTONIC`, nanoseconds: the clock of Cilium's agent liveness entry.
#[must_use]
pub fn monotonic_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec. CLOCK_MONOTONIC exists on every Linux, so the call
    // cannot fail.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

/// A map's descriptor, borrowed: shorter at the call sites.
pub(crate) fn fd(map: &OwnedFd) -> BorrowedFd<'_> {
    map.as_fd()
}
