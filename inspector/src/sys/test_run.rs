//! `BPF_PROG_TEST_RUN`: runs of a loaded program on a packet that was never received.
//!
//! aya runs programs that it has loaded itself; these are Cilium's, opened by their ids. The
//! program runs for real: what it writes into its maps stays. What it returns (a redirect, a drop)
//! is not carried out.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use super::{
    bpf::{self, bpf},
    program,
};

const BPF_PROG_TEST_RUN: libc::c_long = 10;

/// `BPF_PROG_TYPE_SCHED_CLS`
pub const SCHED_CLS: u32 = 3;
/// `BPF_PROG_TYPE_XDP`
pub const XDP: u32 = 6;

/// Room for the packet that comes back, bytes beyond its own: more than any header can add.
const MORE: usize = 2048;

/// The head of `union bpf_attr` for this call, up to Linux 5.9.
#[repr(C)]
#[derive(Default)]
struct Attr {
    prog_fd: u32,
    retval: u32,
    data_size_in: u32,
    data_size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    ctx_size_in: u32,
    ctx_size_out: u32,
    ctx_in: u64,
    ctx_out: u64,
    flags: u32,
    cpu: u32,
}

/// `struct __sk_buff`: what may be given stands in it, and what comes back. The kernel wants room
/// for all of its own, which has grown to 192 bytes, and zeros in what it does not know.
#[repr(C)]
#[derive(Default, Clone, Copy)]
struct SkBuff {
    len: u32,
    pkt_type: u32,
    mark: u32,
    queue_mapping: u32,
    protocol: u32,
    vlan_present: u32,
    vlan_tci: u32,
    vlan_proto: u32,
    priority: u32,
    ingress_ifindex: u32,
    ifindex: u32,
    tc_index: u32,
    cb: [u32; 5],
    hash: u32,
    tc_classid: u32,
    data: u32,
    data_end: u32,
    napi_id: u32,
    family: u32,
    remote_ip4: u32,
    local_ip4: u32,
    remote_ip6: [u32; 4],
    local_ip6: [u32; 4],
    remote_port: u32,
    local_port: u32,
    data_meta: u32,
    flow_keys: u64,
    tstamp: u64,
    rest: [u64; 8],
}

/// `struct xdp_md`
#[repr(C)]
#[derive(Default, Clone, Copy)]
struct XdpMd {
    data: u32,
    data_end: u32,
    data_meta: u32,
    ingress_ifindex: u32,
    rx_queue_index: u32,
    egress_ifindex: u32,
}

/// What a run came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ran {
    /// What the program returned.
    pub returned: i32,
    /// The packet as it left it.
    pub packet: Vec<u8>,
    /// The packet's mark; 0 for XDP.
    pub mark: u32,
    /// The control buffer; zeros for XDP.
    pub control_buffer: [u32; 5],
}

/// What a tc program is told of the packet that it is run on, and what it leaves of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Given {
    /// Index of the packet's device in this thread's network namespace, 0 for loopback.
    pub ifindex: u32,
    /// The packet's mark.
    pub mark: u32,
    /// The packet's priority.
    pub priority: u32,
    /// The control buffer.
    pub control_buffer: [u32; 5],
}

/// What many runs came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repeated {
    /// What the program returned the last time.
    pub returned: i32,
    /// The packet as it left it the last time.
    pub packet: Vec<u8>,
    /// What it left of what it was given.
    pub left: Given,
    /// How long one run took, nanoseconds, the mean of all.
    pub mean_ns: u32,
}

/// Opens the program with this id, to run it.
///
/// # Errors
/// The error of `BPF_PROG_GET_FD_BY_ID`: `ENOENT` if there is none (any more), `EPERM` without
/// `CAP_SYS_ADMIN`.
pub fn open(id: u32) -> io::Result<OwnedFd> {
    program::open(id)
}

/// Runs a tc program on a packet that arrives on the device `ifindex` of this thread's network
/// namespace.
///
/// The kernel takes bytes 12 and 13 for the Ethernet type, whatever the device is.
///
/// # Errors
/// The error of `BPF_PROG_TEST_RUN`: `ENODEV` if there is no such device, `EINVAL` for a packet
/// shorter than 14 bytes or a kernel without contexts (before 5.2), `EPERM` without
/// `CAP_NET_ADMIN`.
pub fn classifier(program: BorrowedFd<'_>, ifindex: u32, packet: &[u8]) -> io::Result<Ran> {
    let context = SkBuff { ifindex, ingress_ifindex: ifindex, ..SkBuff::default() };
    let result = run(program, packet, context, 1);
    let (attr, packet, context) = match result {
        // The device that it came in by may be given since Linux 5.13 only; Cilium reads the other.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            run(program, packet, SkBuff { ifindex, ..SkBuff::default() }, 1)?
        }
        result => result?,
    };
    let returned = attr.retval.cast_signed();
    Ok(Ran { returned, packet, mark: context.mark, control_buffer: context.cb })
}

/// Runs a tc program `repeat` times on one packet: what a run makes of it, the next one gets.
///
/// # Errors
/// As [`classifier`]; `EINTR` if a signal came before the last run.
pub fn repeated(
    program: BorrowedFd<'_>,
    frame: &[u8],
    given: &Given,
    repeat: u32,
) -> io::Result<Repeated> {
    let Given { ifindex, mark, priority, control_buffer: cb } = *given;
    let context = SkBuff { mark, priority, ifindex, cb, ..SkBuff::default() };
    let (attr, packet, after) = run(program, frame, context, repeat)?;
    Ok(Repeated {
        returned: attr.retval.cast_signed(),
        packet,
        left: Given {
            // The kernel says here what it was, whatever the program did.
            ifindex,
            mark: after.mark,
            priority: after.priority,
            control_buffer: after.cb,
        },
        mean_ns: attr.duration,
    })
}

/// Runs a tc program on a frame of no device in particular, and says what it returned.
///
/// # Errors
/// As [`classifier`].
pub(super) fn anywhere(program: BorrowedFd<'_>, frame: &[u8]) -> io::Result<i32> {
    Ok(run(program, frame, SkBuff::default(), 1)?.0.retval.cast_signed())
}

/// Runs an XDP program on a frame that arrives on the device `ifindex` of this thread's network
/// namespace.
///
/// # Errors
/// As [`classifier`]; `EINVAL` also where the device has no receive queue for XDP.
pub fn xdp(program: BorrowedFd<'_>, ifindex: u32, frame: &[u8]) -> io::Result<Ran> {
    let data_end = u32::try_from(frame.len()).unwrap_or(u32::MAX);
    let context = XdpMd { data_end, ingress_ifindex: ifindex, ..XdpMd::default() };
    let (attr, packet, _) = run(program, frame, context, 1)?;
    Ok(Ran { returned: attr.retval.cast_signed(), packet, mark: 0, control_buffer: [0; 5] })
}

fn run<C: Copy>(
    program: BorrowedFd<'_>,
    packet: &[u8],
    context: C,
    repeat: u32,
) -> io::Result<(Attr, Vec<u8>, C)> {
    let mut out = vec![0_u8; packet.len() + MORE];
    let mut after = context;
    let mut attr = Attr {
        prog_fd: bpf::fd_number(program),
        data_size_in: u32::try_from(packet.len()).unwrap_or(u32::MAX),
        data_in: packet.as_ptr() as u64,
        data_size_out: u32::try_from(out.len()).unwrap_or(u32::MAX),
        data_out: out.as_mut_ptr() as u64,
        repeat,
        ctx_size_in: bpf::size_u32::<C>(),
        ctx_in: std::ptr::from_ref(&context) as u64,
        ctx_size_out: bpf::size_u32::<C>(),
        ctx_out: std::ptr::from_mut(&mut after) as u64,
        ..Attr::default()
    };
    // SAFETY: packet and context are read at their lengths, `out` and `after` are written at most
    // at theirs; both kinds of context are plain numbers; all of them outlive the call.
    unsafe { bpf(BPF_PROG_TEST_RUN, &mut attr)? };
    out.truncate(attr.data_size_out as usize);
    Ok((attr, out, after))
}

/// The program type of an open program.
///
/// # Errors
/// The error of `BPF_OBJ_GET_INFO_BY_FD`.
pub fn program_type(program: &OwnedFd) -> io::Result<u32> {
    program::info(program.as_fd()).map(|info| info.program_type)
}
