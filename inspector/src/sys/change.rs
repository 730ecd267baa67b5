//! The few entries of the kernel's own tables that an injected packet needs or leaves: neighbours
//! and tracked connections, each by its exact key.
//!
//! This is the only place that changes anything in the kernel's network by netlink, beside the
//! filters of tracing.

use std::{io, net::IpAddr};

use netlink_sys::{Socket, SocketAddr};

use super::netlink::{self, NLM_F_ACK, octets, push_attribute, push_message};
use crate::{cilium::mac::Mac, packet::Flow};

/// `NLM_F_CREATE | NLM_F_EXCL`
const MAKE: u16 = 0x600;

/// `NFNL_SUBSYS_CTNETLINK << 8 | IPCTNL_MSG_CT_DELETE`
const CT_DELETE: u16 = 1 << 8 | 2;
/// Attributes of a tracked connection (`nfnetlink_conntrack.h`).
const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_IP: u16 = 1;
const CTA_TUPLE_PROTO: u16 = 2;
const CTA_IP_V4: [u16; 2] = [1, 2];
const CTA_IP_V6: [u16; 2] = [3, 4];
const CTA_PROTO_NUM: u16 = 1;
const CTA_PROTO_PORTS: [u16; 2] = [2, 3];
/// `NLA_F_NESTED`
const NESTED: u16 = 0x8000;

/// Makes the kernel believe for a while that an address is at a MAC address on a device. It is no
/// permanent entry: the kernel forgets it by itself when nobody uses it.
///
/// # Errors
/// `AlreadyExists` if there is an entry; `EPERM` without `CAP_NET_ADMIN`; `ENODEV` if the device is
/// gone.
pub fn add_neighbour(ifindex: u32, address: IpAddr, mac: Mac) -> io::Result<()> {
    let mut body = neighbour(ifindex, address, libc::NUD_REACHABLE);
    push_attribute(&mut body, libc::NDA_LLADDR, &mac.0);
    route(libc::RTM_NEWNEIGH, MAKE, &body)
}

/// Whether the kernel lets this process change its neighbour table; changes nothing.
///
/// # Errors
/// `EPERM` without `CAP_NET_ADMIN`.
pub fn may() -> io::Result<()> {
    /// `lo`, in every network namespace: it has no neighbours. The address is for documentation.
    const LOOPBACK: u32 = 1;
    const NOBODY: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 77));
    remove_neighbour(LOOPBACK, NOBODY).map(|_| ())
}

/// Removes a neighbour entry; whether there was one.
///
/// # Errors
/// `EPERM` without `CAP_NET_ADMIN`.
pub fn remove_neighbour(ifindex: u32, address: IpAddr) -> io::Result<bool> {
    let body = neighbour(ifindex, address, libc::NUD_NONE);
    gone(route(libc::RTM_DELNEIGH, 0, &body))
}

/// Removes a connection from the kernel's own connection tracking, by its first direction; whether
/// there was one. A kernel without it has none.
///
/// # Errors
/// `EPERM` without `CAP_NET_ADMIN`.
pub fn remove_connection(flow: &Flow) -> io::Result<bool> {
    let (family, kinds) = match flow.source {
        IpAddr::V4(_) => (libc::AF_INET, CTA_IP_V4),
        IpAddr::V6(_) => (libc::AF_INET6, CTA_IP_V6),
    };
    let mut addresses = Vec::new();
    for (kind, address) in kinds.into_iter().zip([flow.source, flow.destination]) {
        push_attribute(&mut addresses, kind, &octets(address));
    }
    let mut transport = Vec::new();
    push_attribute(&mut transport, CTA_PROTO_NUM, &[flow.protocol]);
    for (kind, port) in CTA_PROTO_PORTS.into_iter().zip([flow.source_port, flow.destination_port]) {
        push_attribute(&mut transport, kind, &port.to_be_bytes());
    }
    let mut tuple = Vec::new();
    push_attribute(&mut tuple, CTA_TUPLE_IP | NESTED, &addresses);
    push_attribute(&mut tuple, CTA_TUPLE_PROTO | NESTED, &transport);
    // struct nfgenmsg: family, version 0, resource 0.
    let mut body = vec![u8::try_from(family).unwrap_or(0), 0, 0, 0];
    push_attribute(&mut body, CTA_TUPLE_ORIG | NESTED, &tuple);
    match gone(ask(libc::NETLINK_NETFILTER, CT_DELETE, 0, &body)) {
        // The kernel's answer where nobody tracks connections.
        Err(error) if no_tracking(&error) => Ok(false),
        result => result,
    }
}

fn no_tracking(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EINVAL | libc::EOPNOTSUPP | libc::EPROTONOSUPPORT | libc::EAFNOSUPPORT)
    )
}

fn gone(result: io::Result<()>) -> io::Result<bool> {
    match result {
        Ok(()) => Ok(true),
        // The device has taken its entries with it.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// `struct ndmsg` and the address.
fn neighbour(ifindex: u32, address: IpAddr, state: u16) -> Vec<u8> {
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let mut body = vec![u8::try_from(family).unwrap_or(0), 0, 0, 0];
    body.extend(ifindex.to_ne_bytes());
    body.extend(state.to_ne_bytes());
    body.extend([0, 0]);
    push_attribute(&mut body, libc::NDA_DST, &octets(address));
    body
}

fn route(kind: u16, flags: u16, body: &[u8]) -> io::Result<()> {
    ask(libc::NETLINK_ROUTE, kind, flags, body)
}

/// Asks for one change, in the network namespace of this thread, and waits for the answer.
fn ask(protocol: i32, kind: u16, flags: u16, body: &[u8]) -> io::Result<()> {
    let socket = Socket::new(protocol.try_into().map_err(io::Error::other)?)?;
    let mut message = Vec::new();
    push_message(&mut message, kind, NLM_F_ACK | flags, 1, body);
    socket.send_to(&message, &SocketAddr::new(0, 0), 0)?;
    let mut answer = Vec::with_capacity(4096);
    socket.recv(&mut answer, 0)?;
    match netlink::bodies(&answer).next() {
        // NLMSG_ERROR, with 0 where there is none.
        Some((2, body)) => match netlink::error_of(body) {
            0 => Ok(()),
            number => Err(io::Error::from_raw_os_error(number)),
        },
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}
