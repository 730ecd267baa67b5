//! Classic tc filters on a clsact qdisc, over netlink.
//!
//! aya attaches such filters under the program's own name only, and rtnetlink has no bpf filters;
//! the name is what tells Cilium's filters apart. The messages are those of `rtnetlink(7)`, numbers
//! in host byte order.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, sendto, socket,
};

const TC_H_CLSACT: u32 = 0xffff_fff1;
const TC_H_INGRESS: u32 = 0xffff_fff2;
const TC_H_EGRESS: u32 = 0xffff_fff3;

const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
const TCA_BPF_FD: u16 = 6;
const TCA_BPF_NAME: u16 = 7;
const TCA_BPF_FLAGS: u16 = 8;
const TCA_BPF_FLAG_ACT_DIRECT: u32 = 1;

/// All protocols, as a filter says it: network byte order.
const ETH_P_ALL: u32 = 3_u16.to_be() as u32;

/// Length of a netlink header, and of a tc message's.
const NETLINK: usize = 16;

/// Attaches a program to a device of this thread's network namespace, as Cilium does without tcx:
/// clsact, priority 1, handle 1, direct action.
///
/// # Errors
/// What the kernel said; `EPERM` without `CAP_NET_ADMIN`.
pub fn attach(index: u32, egress: bool, name: &str, program: BorrowedFd<'_>) -> io::Result<()> {
    let socket = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkRoute,
    )?;
    let mut qdisc = message(libc::RTM_NEWQDISC, index, 0xffff_0000, TC_H_CLSACT, 0);
    attribute(&mut qdisc, TCA_KIND, b"clsact\0");
    match request(&socket, qdisc) {
        // The other direction's has been made.
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {}
        result => result?,
    }

    let parent = if egress { TC_H_EGRESS } else { TC_H_INGRESS };
    let mut filter = message(libc::RTM_NEWTFILTER, index, 1, parent, 1 << 16 | ETH_P_ALL);
    attribute(&mut filter, TCA_KIND, b"bpf\0");
    let mut options = Vec::new();
    attribute(&mut options, TCA_BPF_FD, &program.as_raw_fd().to_ne_bytes());
    attribute(&mut options, TCA_BPF_NAME, &[name.as_bytes(), b"\0"].concat());
    attribute(&mut options, TCA_BPF_FLAGS, &TCA_BPF_FLAG_ACT_DIRECT.to_ne_bytes());
    attribute(&mut filter, TCA_OPTIONS, &options);
    request(&socket, filter)
}

/// The beginning of a request; its length is set when it is sent.
fn message(kind: u16, index: u32, handle: u32, parent: u32, info: u32) -> Vec<u8> {
    let flags = libc::NLM_F_REQUEST | libc::NLM_F_ACK | libc::NLM_F_CREATE | libc::NLM_F_EXCL;
    let mut message = vec![0; 4];
    message.extend(kind.to_ne_bytes());
    message.extend(flags.cast_unsigned().to_ne_bytes()[..2].iter());
    // Sequence and port: one request at a time.
    message.extend([0; 8]);
    // struct tcmsg: family (and padding), index, handle, parent, info.
    message.extend([0; 4]);
    for word in [index, handle, parent, info] {
        message.extend(word.to_ne_bytes());
    }
    message
}

fn attribute(message: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let length = u16::try_from(value.len() + 4).expect("attributes of a filter are short");
    message.extend(length.to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(value);
    message.resize(message.len().next_multiple_of(4), 0);
}

fn request(socket: &OwnedFd, mut message: Vec<u8>) -> io::Result<()> {
    let length = u32::try_from(message.len()).expect("a filter's message is short");
    message[..4].copy_from_slice(&length.to_ne_bytes());
    let kernel = NetlinkAddr::new(0, 0);
    sendto(socket.as_raw_fd(), &message, &kernel, MsgFlags::empty())?;
    let mut answer = [0; 4096];
    let length = recv(socket.as_fd().as_raw_fd(), &mut answer, MsgFlags::empty())?;
    // struct nlmsgerr begins with the negative error number, 0 for success.
    let error = answer[..length]
        .get(NETLINK..)
        .and_then(|rest| rest.first_chunk::<4>())
        .map(|bytes| i32::from_ne_bytes(*bytes))
        .ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
    if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(-error)) }
}
