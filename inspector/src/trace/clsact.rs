//! The tc tier by clsact filters, where the kernel has no tcx or tcx is not wanted.
//!
//! A filter lives as long as its device, not as its maker. So that nothing stays when this process
//! is killed, a second one, the guard, waits for the end of it and takes away what it has left:
//! before anything is attached it knows the names of all that will be. It does nothing else, holds
//! nothing else open, and signals do not end it.
//!
//! A filter that is new at a priority comes before the older ones of that priority
//! (`list_add_rcu` in `cls_bpf_change`,
//! <https://github.com/torvalds/linux/blob/v6.18/net/sched/cls_bpf.c>), and "unspecified" leads on to
//! the next one: that is how the observer is in front of Cilium's filter.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use super::device::Device;
use crate::sys::netlink::push_attribute;
use crate::sys::tc::{Direction, RouteSocket};

const RTM_NEWQDISC: u16 = 36;
const RTM_DELQDISC: u16 = 37;
const RTM_NEWTFILTER: u16 = 44;
const RTM_DELTFILTER: u16 = 45;
const RTM_GETTFILTER: u16 = 46;

/// `NLM_F_REQUEST | NLM_F_ACK`
const ASK: u16 = 0x5;
/// `NLM_F_CREATE | NLM_F_EXCL`
const MAKE: u16 = 0x600;
/// `NLM_F_REQUEST | NLM_F_DUMP`
const DUMP: u16 = 0x301;

const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
const TCA_BPF_FD: u16 = 6;
const TCA_BPF_NAME: u16 = 7;
const TCA_BPF_FLAGS: u16 = 8;
/// `TCA_BPF_FLAG_ACT_DIRECT`
const DIRECT: u32 = 1;

/// Handle and parent of a clsact qdisc.
const CLSACT: (u32, u32) = (0xffff_0000, 0xffff_fff1);
/// `ETH_P_ALL`
const EVERY_PROTOCOL: u16 = 3;
/// Cilium's, where no filter says otherwise.
const PRIORITY: u16 = 1;

/// Filters of this process on some devices, and the process that guards them.
#[derive(Debug)]
pub(super) struct Clsact {
    plan: Cleanup,
    filters: Vec<Filter>,
    socket: OwnedFd,
    /// Its other end is the guard's: what is written tells it that all is done.
    guard: Option<(OwnedFd, libc::pid_t)>,
}

/// Why it could not be made ready.
#[derive(Debug)]
pub(super) struct Failed {
    /// Index of the device, if it is one device's fault.
    pub(super) ifindex: Option<u32>,
    pub(super) source: io::Error,
}

impl From<io::Error> for Failed {
    fn from(source: io::Error) -> Self {
        Self { ifindex: None, source }
    }
}

/// A filter that is to be attached.
#[derive(Debug, Clone, Copy)]
struct Filter {
    ifindex: u32,
    direction: Direction,
    handle: u32,
    priority: u16,
}

/// Ready-made messages: between `fork` and `_exit` nothing may be allocated.
#[derive(Debug, Default)]
struct Cleanup {
    filters: Vec<Vec<u8>>,
    qdiscs: Vec<Qdisc>,
}

#[derive(Debug)]
struct Qdisc {
    ifindex: u32,
    lists: [Vec<u8>; 2],
    delete: Vec<u8>,
}

impl Clsact {
    /// Makes ready for these devices: sees what is there, starts the guard, and adds clsact qdiscs
    /// where there are none.
    pub(super) fn prepare(wanted: &[(Device, Direction)]) -> Result<Self, Failed> {
        let on = |ifindex| move |source| Failed { ifindex: Some(ifindex), source };
        let mut route = RouteSocket::open()?;
        let there = route.classifiers()?;
        let mut filters: Vec<Filter> = Vec::new();
        let mut plan = Cleanup::default();
        let mut makes = Vec::new();
        for &(Device { ifindex, .. }, direction) in wanted {
            let present = route.filters(ifindex, direction).map_err(on(ifindex))?;
            let first = present.iter().map(|one| one.priority).min();
            let priority = first.unwrap_or(PRIORITY);
            // Such as no other filter of this priority has.
            let mut handle = 0x4953_0000 | std::process::id() & 0xffff;
            while present.iter().any(|one| one.handle == handle) {
                handle = handle.wrapping_add(0x1_0000);
            }
            let filter = Filter { ifindex, direction, handle, priority };
            plan.filters.push(filter.message(RTM_DELTFILTER, 0, None));
            filters.push(filter);
            let is_new = !there.contains_key(&ifindex);
            if is_new && !plan.qdiscs.iter().any(|qdisc| qdisc.ifindex == ifindex) {
                plan.qdiscs.push(Qdisc {
                    ifindex,
                    lists: [Direction::Ingress, Direction::Egress].map(|direction| {
                        message(RTM_GETTFILTER, DUMP, &header(ifindex, 0, parent(direction), 0))
                    }),
                    delete: qdisc(RTM_DELQDISC, 0, ifindex),
                });
                makes.push((ifindex, qdisc(RTM_NEWQDISC, MAKE, ifindex)));
            }
        }
        // SAFETY: no pointers are involved.
        let socket = unsafe {
            owned(libc::socket(
                libc::AF_NETLINK,
                libc::SOCK_RAW | libc::SOCK_CLOEXEC,
                libc::NETLINK_ROUTE,
            ))?
        };
        let guard = Some(guard(&plan, &socket)?);
        let made = Self { plan, filters, socket, guard };
        for (ifindex, make) in makes {
            match ask(made.socket.as_raw_fd(), &make) {
                // Somebody was faster; it is removed if it is empty, whoever made it.
                0 | libc::EEXIST => {}
                number => return Err(on(ifindex)(io::Error::from_raw_os_error(number))),
            }
        }
        Ok(made)
    }

    /// Attaches a program in front of all filters of one direction of a device.
    pub(super) fn attach(
        &self,
        device: Device,
        direction: Direction,
        program: BorrowedFd<'_>,
        name: &str,
    ) -> io::Result<()> {
        let filter = self
            .filters
            .iter()
            .find(|one| one.ifindex == device.ifindex && one.direction == direction)
            .ok_or(io::ErrorKind::NotFound)?;
        let message = filter.message(RTM_NEWTFILTER, MAKE, Some((program, name)));
        match ask(self.socket.as_raw_fd(), &message) {
            0 => Ok(()),
            number => Err(io::Error::from_raw_os_error(number)),
        }
    }
}

impl Drop for Clsact {
    fn drop(&mut self) {
        self.plan.run(self.socket.as_raw_fd());
        if let Some((pipe, child)) = self.guard.take() {
            let mut status = 0;
            // SAFETY: the byte and the status live as long as the calls; the child is ours and has
            // not been waited for.
            unsafe {
                libc::write(pipe.as_raw_fd(), [0_u8].as_ptr().cast(), 1);
                drop(pipe);
                while libc::waitpid(child, &raw mut status, 0) < 0
                    && io::Error::last_os_error().raw_os_error() == Some(libc::EINTR)
                {
                }
            }
        }
    }
}

impl Cleanup {
    /// Removes what is there of it. Allocates nothing. What is gone already is no matter, and there
    /// is nobody to tell anything else to.
    fn run(&self, socket: libc::c_int) {
        for filter in &self.filters {
            ask(socket, filter);
        }
        for qdisc in &self.qdiscs {
            if qdisc.lists.iter().all(|list| is_empty(socket, list)) {
                ask(socket, &qdisc.delete);
            }
        }
    }
}

impl Filter {
    fn message(&self, kind: u16, flags: u16, program: Option<(BorrowedFd<'_>, &str)>) -> Vec<u8> {
        let info = u32::from(self.priority) << 16 | u32::from(EVERY_PROTOCOL.to_be());
        let mut body = header(self.ifindex, self.handle, parent(self.direction), info);
        push_attribute(&mut body, TCA_KIND, b"bpf\0");
        if let Some((program, name)) = program {
            let mut options = Vec::new();
            push_attribute(&mut options, TCA_BPF_FD, &program.as_raw_fd().to_ne_bytes());
            push_attribute(&mut options, TCA_BPF_NAME, &[name.as_bytes(), b"\0"].concat());
            push_attribute(&mut options, TCA_BPF_FLAGS, &DIRECT.to_ne_bytes());
            push_attribute(&mut body, TCA_OPTIONS, &options);
        }
        message(kind, ASK | flags, &body)
    }
}

fn qdisc(kind: u16, flags: u16, ifindex: u32) -> Vec<u8> {
    let mut body = header(ifindex, CLSACT.0, CLSACT.1, 0);
    push_attribute(&mut body, TCA_KIND, b"clsact\0");
    message(kind, ASK | flags, &body)
}

const fn parent(direction: Direction) -> u32 {
    match direction {
        Direction::Ingress => 0xffff_fff2,
        Direction::Egress => 0xffff_fff3,
    }
}

/// `struct tcmsg`.
fn header(ifindex: u32, handle: u32, parent: u32, info: u32) -> Vec<u8> {
    [0, ifindex, handle, parent, info].iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// `struct nlmsghdr` and what follows.
fn message(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
    let mut message = Vec::with_capacity(16 + body.len());
    message.extend(u32::try_from(16 + body.len()).unwrap_or(u32::MAX).to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    message.extend([0; 8]);
    message.extend(body);
    message
}

/// Takes a descriptor that a call has returned.
///
/// # Safety
/// It must belong to nobody else.
unsafe fn owned(fd: libc::c_int) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the caller promises it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Starts the guard.
fn guard(plan: &Cleanup, socket: &OwnedFd) -> io::Result<(OwnedFd, libc::pid_t)> {
    let mut ends = [0; 2];
    // SAFETY: the kernel writes two descriptors.
    let (read, write) = unsafe {
        if libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) != 0 {
            return Err(io::Error::last_os_error());
        }
        (owned(ends[0])?, owned(ends[1])?)
    };
    // SAFETY: the child makes system calls alone and allocates nothing, so that it does not matter
    // what other threads were doing.
    match unsafe { libc::fork() } {
        0 => watch(plan, read.as_raw_fd(), socket.as_raw_fd()),
        child if child > 0 => Ok((write, child)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The guard: waits for the end of the process that started it, or its word that all is done.
fn watch(plan: &Cleanup, pipe: libc::c_int, socket: libc::c_int) -> ! {
    // SAFETY: system calls on descriptors and memory of this process's own.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::sigprocmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut());
        // Signals for the terminal's foreground processes are not for it either.
        libc::setsid();
        libc::prctl(libc::PR_SET_NAME, c"inspect-guard".as_ptr());
        // Above where both go.
        let (pipe, socket) =
            (libc::fcntl(pipe, libc::F_DUPFD, 10), libc::fcntl(socket, libc::F_DUPFD, 10));
        libc::dup2(pipe, 0);
        libc::dup2(socket, 1);
        // Above all the other end of the pipe, and our programs and maps.
        libc::syscall(libc::SYS_close_range, 2, libc::c_uint::MAX, 0);
        let mut byte = [0_u8];
        loop {
            match libc::read(0, byte.as_mut_ptr().cast(), 1) {
                0 => {
                    plan.run(1);
                    libc::_exit(0);
                }
                1 => libc::_exit(0),
                _ => {}
            }
        }
    }
}

/// Sends a request and returns the number of its error, 0 for none. Allocates nothing.
fn ask(socket: libc::c_int, message: &[u8]) -> i32 {
    if !send(socket, message) {
        return libc::EIO;
    }
    let mut buffer = [0_u8; 4096];
    loop {
        let Some(length) = receive(socket, &mut buffer) else { return libc::EIO };
        // NLMSG_ERROR: the acknowledgement.
        if length >= 20 && buffer[4..6] == 2_u16.to_ne_bytes() {
            let [a, b, c, d] = [buffer[16], buffer[17], buffer[18], buffer[19]];
            return -i32::from_ne_bytes([a, b, c, d]);
        }
    }
}

/// Whether a list of filters is empty; `false` if it cannot be told. Allocates nothing.
fn is_empty(socket: libc::c_int, list: &[u8]) -> bool {
    if !send(socket, list) {
        return false;
    }
    let mut buffer = [0_u8; 16 * 1024];
    let mut empty = true;
    loop {
        let Some(length) = receive(socket, &mut buffer) else { return false };
        let mut at = 0;
        while let Some(&[a, b, c, d, kind_a, kind_b, ..]) = buffer.get(at..length) {
            match u16::from_ne_bytes([kind_a, kind_b]) {
                // NLMSG_DONE, NLMSG_ERROR.
                3 => return empty,
                2 => return false,
                _ => empty = false,
            }
            let step = u32::from_ne_bytes([a, b, c, d]) as usize;
            if step < 16 {
                return false;
            }
            at += step.next_multiple_of(4);
        }
    }
}

fn send(socket: libc::c_int, message: &[u8]) -> bool {
    // SAFETY: a live slice; the kernel is the receiver of a socket that is not connected.
    let sent = unsafe { libc::send(socket, message.as_ptr().cast(), message.len(), 0) };
    usize::try_from(sent) == Ok(message.len())
}

fn receive(socket: libc::c_int, buffer: &mut [u8]) -> Option<usize> {
    loop {
        // SAFETY: a live slice that is written to.
        let got = unsafe { libc::recv(socket, buffer.as_mut_ptr().cast(), buffer.len(), 0) };
        match usize::try_from(got) {
            Ok(0) => return None,
            Ok(length) => return Some(length),
            Err(_) if io::Error::last_os_error().raw_os_error() == Some(libc::EINTR) => {}
            Err(_) => return None,
        }
    }
}
