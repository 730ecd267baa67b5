//! `bpf(2)` for programs, links and BTF: what is attached where, and what the kernel says of it.
//!
//! aya 0.14 queries tcx alone, tells id and type of a link and no more, and its program information
//! has no function names; so these calls are made here. All of them only look. Those that turn an
//! id into a descriptor need `CAP_SYS_ADMIN`, the queries `CAP_NET_ADMIN`.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use super::bpf::{self, BPF_OBJ_GET_INFO_BY_FD, GetIdAttr, InfoAttr};

const BPF_PROG_GET_FD_BY_ID: libc::c_long = 13;
const BPF_PROG_QUERY: libc::c_long = 16;
const BPF_BTF_GET_FD_BY_ID: libc::c_long = 19;

/// `BPF_F_QUERY_EFFECTIVE`: those that run, inherited ones included.
const BPF_F_QUERY_EFFECTIVE: u32 = 1;

/// Attach types (`enum bpf_attach_type`) of the hooks that are asked for.
pub mod attach_type {
    /// tcx at ingress, Linux 6.6.
    pub const TCX_INGRESS: u32 = 46;
    /// tcx at egress, Linux 6.6.
    pub const TCX_EGRESS: u32 = 47;
    /// The primary device of a netkit pair, Linux 6.7.
    pub const NETKIT_PRIMARY: u32 = 54;
    /// The peer device of a netkit pair, Linux 6.7.
    pub const NETKIT_PEER: u32 = 55;

    /// The hooks of socket load balancing on a cgroup, with the names that they have here.
    pub const CGROUP: [(&str, u32); 11] = [
        ("connect4", 10),
        ("connect6", 11),
        ("sendmsg4", 14),
        ("sendmsg6", 15),
        ("recvmsg4", 19),
        ("recvmsg6", 20),
        ("getpeername4", 29),
        ("getpeername6", 30),
        ("post_bind4", 12),
        ("post_bind6", 13),
        ("sock_release", 34),
    ];
}

/// One program of a query, in the order in which they run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attached {
    /// Program id.
    pub program: u32,
    /// Link id, where a link holds it and the query tells.
    pub link: Option<u32>,
}

/// What is asked.
#[derive(Debug, Clone, Copy)]
pub enum Target<'fd> {
    /// A device, by its index in the present network namespace.
    Device(u32),
    /// A cgroup, by a descriptor of its folder: the programs in force there.
    Cgroup(BorrowedFd<'fd>),
}

#[repr(C)]
#[derive(Default)]
struct QueryAttr {
    target: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    prog_ids: u64,
    count: u32,
    pad: u32,
    prog_attach_flags: u64,
    link_ids: u64,
    link_attach_flags: u64,
    revision: u64,
}

/// The programs at a hook, in the order in which they run.
///
/// # Errors
/// The error of `BPF_PROG_QUERY`: `EPERM` without `CAP_NET_ADMIN`, `EINVAL` for a hook that this
/// kernel does not know, `ENODEV` for a device that is gone (on netkit: that is none).
pub fn query(target: Target<'_>, attach_type: u32) -> io::Result<Vec<Attached>> {
    // A hook rarely holds more; the kernel says ENOSPC and how many there are if it does.
    let mut room = 16;
    loop {
        let mut programs = vec![0_u32; room as usize];
        let mut links = vec![0_u32; room as usize];
        let mut attr = QueryAttr {
            attach_type,
            prog_ids: programs.as_mut_ptr() as u64,
            count: room,
            ..QueryAttr::default()
        };
        match target {
            Target::Device(ifindex) => {
                attr.target = ifindex;
                attr.link_ids = links.as_mut_ptr() as u64;
            }
            Target::Cgroup(fd) => {
                attr.target = bpf::fd_number(fd);
                attr.query_flags = BPF_F_QUERY_EFFECTIVE;
            }
        }
        // SAFETY: both lists have room for `count` numbers and outlive the call.
        match unsafe { bpf::bpf(BPF_PROG_QUERY, &mut attr) } {
            Ok(_) => {
                let count = attr.count.min(room) as usize;
                return Ok(programs
                    .into_iter()
                    .zip(links)
                    .take(count)
                    .map(|(program, link)| Attached {
                        program,
                        link: Some(link).filter(|&l| l != 0),
                    })
                    .collect());
            }
            // Programs may be added between two attempts: leave some room.
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) && room < 1 << 16 => {
                room = attr.count.max(room) * 2;
            }
            Err(error) => return Err(error),
        }
    }
}

fn by_id(command: libc::c_long, id: u32) -> io::Result<OwnedFd> {
    let mut attr = GetIdAttr { id, ..GetIdAttr::default() };
    // SAFETY: the attribute holds no addresses.
    let fd = unsafe { bpf::bpf(command, &mut attr)? };
    // SAFETY: the kernel just returned this descriptor; nobody else owns it.
    unsafe { bpf::owned(fd) }
}

/// What the kernel says of a program (`struct bpf_prog_info`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramInfo {
    /// Id.
    pub id: u32,
    /// Program type, the kernel's number.
    pub program_type: u32,
    /// Tag: the first 8 bytes of a hash of its instructions.
    pub tag: [u8; 8],
    /// Name, cut by the kernel to 15 bytes.
    pub name: String,
    /// When it was loaded, nanoseconds of `CLOCK_BOOTTIME`.
    pub loaded_ns: u64,
    /// Ids of the maps that it uses.
    pub maps: Vec<u32>,
    /// Id of its BTF object; 0 if it has none.
    pub btf: u32,
    /// Type id of its first function in that BTF, if the kernel tells.
    pub function: Option<u32>,
    /// Nanoseconds that it ran, as far as the kernel counted.
    pub run_time_ns: u64,
    /// Number of its runs, as far as the kernel counted.
    pub run_count: u64,
}

/// `struct bpf_prog_info` up to the run counters of Linux 5.1; older kernels fill less of it.
#[repr(C)]
#[derive(Default)]
struct RawProgramInfo {
    program_type: u32,
    id: u32,
    tag: [u8; 8],
    jited_len: u32,
    xlated_len: u32,
    jited: u64,
    xlated: u64,
    load_time: u64,
    created_by_uid: u32,
    nr_map_ids: u32,
    map_ids: u64,
    name: [u8; 16],
    ifindex: u32,
    gpl_compatible: u32,
    netns_dev: u64,
    netns_ino: u64,
    nr_jited_ksyms: u32,
    nr_jited_func_lens: u32,
    jited_ksyms: u64,
    jited_func_lens: u64,
    btf_id: u32,
    func_info_rec_size: u32,
    func_info: u64,
    nr_func_info: u32,
    nr_line_info: u32,
    line_info: u64,
    jited_line_info: u64,
    nr_jited_line_info: u32,
    line_info_rec_size: u32,
    jited_line_info_rec_size: u32,
    nr_prog_tags: u32,
    prog_tags: u64,
    run_time_ns: u64,
    run_cnt: u64,
}

/// `struct bpf_func_info`.
#[repr(C)]
#[derive(Default)]
struct FuncInfo {
    instruction: u32,
    type_id: u32,
}

/// Asks the kernel for the program with this id.
///
/// # Errors
/// The error of `BPF_PROG_GET_FD_BY_ID` or `BPF_OBJ_GET_INFO_BY_FD`: `ENOENT` if there is none (any
/// more), `EPERM` without `CAP_SYS_ADMIN`.
pub fn program(id: u32) -> io::Result<ProgramInfo> {
    info(open(id)?.as_fd())
}

/// Opens the program with this id.
///
/// # Errors
/// The error of `BPF_PROG_GET_FD_BY_ID`: `ENOENT` if there is none (any more), `EPERM` without
/// `CAP_SYS_ADMIN`.
pub fn open(id: u32) -> io::Result<OwnedFd> {
    by_id(BPF_PROG_GET_FD_BY_ID, id)
}

/// Asks the kernel what an open program is.
///
/// # Errors
/// The error of `BPF_OBJ_GET_INFO_BY_FD`.
pub fn info(fd: BorrowedFd<'_>) -> io::Result<ProgramInfo> {
    // No program may use more than 64 maps.
    let mut maps = [0_u32; 64];
    // The record's size must be the kernel's, which has been this since Linux 4.20; older kernels
    // have no such field, and no BTF either.
    let mut function = FuncInfo::default();
    let mut info = RawProgramInfo {
        nr_map_ids: 64,
        map_ids: maps.as_mut_ptr() as u64,
        nr_func_info: 1,
        func_info_rec_size: bpf::size_u32::<FuncInfo>(),
        func_info: std::ptr::from_mut(&mut function) as u64,
        ..RawProgramInfo::default()
    };
    // SAFETY: the two lists that `info` names have the room that it says and outlive the call.
    unsafe { object_info(fd, &mut info)? };
    let used = (info.nr_map_ids as usize).min(maps.len());
    Ok(ProgramInfo {
        id: info.id,
        program_type: info.program_type,
        tag: info.tag,
        name: c_string(&info.name),
        loaded_ns: info.load_time,
        maps: maps[..used].to_vec(),
        btf: info.btf_id,
        function: (info.nr_func_info > 0 && function.type_id != 0).then_some(function.type_id),
        run_time_ns: info.run_time_ns,
        run_count: info.run_cnt,
    })
}

/// # Safety
/// `T` must be the head of the information structure of the object's kind, every bit pattern of it
/// valid, and every address in it valid for what the kernel writes there.
unsafe fn object_info<T>(fd: BorrowedFd<'_>, info: &mut T) -> io::Result<()> {
    let mut attr = InfoAttr {
        bpf_fd: bpf::fd_number(fd),
        info_len: bpf::size_u32::<T>(),
        info: std::ptr::from_mut(info) as u64,
    };
    // SAFETY: `info` points to `info_len` writable bytes; the rest is the caller's promise.
    unsafe { bpf::bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attr)? };
    Ok(())
}

fn c_string(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// The types of a map's value: id of the BTF object, and type id in it.
///
/// # Errors
/// The error of `BPF_OBJ_GET_INFO_BY_FD`.
pub fn map_value_type(fd: BorrowedFd<'_>) -> io::Result<Option<(u32, u32)>> {
    /// `struct bpf_map_info` up to the types.
    #[repr(C)]
    #[derive(Default)]
    struct Raw {
        head: [u32; 6],
        name: [u8; 16],
        ifindex: u32,
        btf_vmlinux_value_type_id: u32,
        netns_dev: u64,
        netns_ino: u64,
        btf_id: u32,
        btf_key_type_id: u32,
        btf_value_type_id: u32,
        pad: u32,
    }
    let mut raw = Raw::default();
    // SAFETY: the structure is plain data and holds no addresses.
    unsafe { object_info(fd, &mut raw)? };
    Ok((raw.btf_id != 0 && raw.btf_value_type_id != 0)
        .then_some((raw.btf_id, raw.btf_value_type_id)))
}

/// The bytes of the BTF object with this id.
///
/// # Errors
/// The error of `BPF_BTF_GET_FD_BY_ID` or `BPF_OBJ_GET_INFO_BY_FD`: `ENOENT` if there is none (any
/// more), `EPERM` without `CAP_SYS_ADMIN`.
pub fn btf(id: u32) -> io::Result<Vec<u8>> {
    /// The head of `struct bpf_btf_info`.
    #[repr(C)]
    #[derive(Default)]
    struct Raw {
        btf: u64,
        btf_size: u32,
        id: u32,
    }
    let fd = by_id(BPF_BTF_GET_FD_BY_ID, id)?;
    // Cilium's are some 10 KiB; the kernel says how large it is if this is too small.
    let mut room = 64 << 10;
    loop {
        let mut bytes = Vec::<u8>::with_capacity(room as usize);
        let mut raw = Raw { btf: bytes.as_mut_ptr() as u64, btf_size: room, id: 0 };
        // SAFETY: `btf` points to `btf_size` writable bytes that outlive the call.
        unsafe { object_info(fd.as_fd(), &mut raw)? };
        if raw.btf_size > room {
            room = raw.btf_size;
            continue;
        }
        // SAFETY: the kernel has written `btf_size` bytes, at most the capacity.
        unsafe { bytes.set_len(raw.btf_size as usize) };
        return Ok(bytes);
    }
}

/// What the kernel says of a link (`struct bpf_link_info`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkInfo {
    /// Id.
    pub id: u32,
    /// Program id.
    pub program: u32,
    /// What it links to.
    pub target: LinkTarget,
}

/// What a link links to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkTarget {
    /// A cgroup; the id is 0 once the cgroup is gone.
    Cgroup {
        /// Id of the cgroup: the inode number of its folder.
        id: u64,
        /// Attach type.
        attach_type: u32,
    },
    /// XDP on a device; the index is 0 once the device is gone.
    Xdp {
        /// Interface index.
        ifindex: u32,
    },
    /// tcx on a device; the index is 0 once the device is gone.
    Tcx {
        /// Interface index.
        ifindex: u32,
        /// Attach type.
        attach_type: u32,
    },
    /// netkit on a device; the index is 0 once the device is gone.
    Netkit {
        /// Interface index.
        ifindex: u32,
        /// Attach type.
        attach_type: u32,
    },
    /// Something else, with the kernel's number of the link type.
    Other(u32),
}

/// Asks the kernel what a link is.
///
/// # Errors
/// The error of `BPF_OBJ_GET_INFO_BY_FD`.
pub fn link_info(fd: BorrowedFd<'_>) -> io::Result<LinkInfo> {
    /// `struct bpf_link_info`, its union as two words that the kinds below fit into.
    #[repr(C)]
    #[derive(Default)]
    struct Raw {
        link_type: u32,
        id: u32,
        prog_id: u32,
        pad: u32,
        first: [u32; 2],
        second: [u32; 2],
    }
    let mut raw = Raw::default();
    // SAFETY: the structure is plain data; all addresses that a kind of link takes are null.
    unsafe { object_info(fd, &mut raw)? };
    let [first, second] = raw.first;
    let target = match raw.link_type {
        3 => LinkTarget::Cgroup {
            // A u64 in the kernel's structure.
            id: u64::from_ne_bytes(pair(first, second)),
            attach_type: raw.second[0],
        },
        6 => LinkTarget::Xdp { ifindex: first },
        11 => LinkTarget::Tcx { ifindex: first, attach_type: second },
        13 => LinkTarget::Netkit { ifindex: first, attach_type: second },
        other => LinkTarget::Other(other),
    };
    Ok(LinkInfo { id: raw.id, program: raw.prog_id, target })
}

fn pair(first: u32, second: u32) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&first.to_ne_bytes());
    bytes[4..].copy_from_slice(&second.to_ne_bytes());
    bytes
}

/// Whether the kernel counts the runs of programs (`kernel.bpf_stats_enabled`).
#[must_use]
pub fn counts_runs() -> bool {
    std::fs::read_to_string("/proc/sys/kernel/bpf_stats_enabled")
        .is_ok_and(|text| text.trim() != "0")
}
