//! What has to be known of a device before a program is attached to it.

use std::ffi::CString;
use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd as _;

use super::TraceError;

/// What stands in front of the IP header on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LinkLayer {
    /// An Ethernet header.
    Ethernet,
    /// Nothing: `WireGuard`, TUN, IP tunnels.
    None,
}

/// A device of this thread's network namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Device {
    /// Index in the network namespace.
    pub(super) ifindex: u32,
    /// What stands in front of the IP header of a packet that arrives.
    pub(super) link: LinkLayer,
}

impl Device {
    /// Looks a device up. The kernel is asked by system call: what is mounted at /sys may show
    /// another network namespace.
    pub(super) fn by_name(name: &str) -> Result<Self, TraceError> {
        let failed = |call, source| TraceError::Device { call, device: name.to_owned(), source };

        let c_name = CString::new(name)
            .map_err(|error| failed("if_nametoindex()", io::Error::from(error)))?;
        // SAFETY: c_name is a valid C string for the time of the call.
        let ifindex = unsafe { libc::if_nametoindex(c_name.as_ptr()) };
        if ifindex == 0 {
            return Err(failed("if_nametoindex()", io::Error::last_os_error()));
        }
        let hardware =
            hardware_type(&c_name).map_err(|error| failed("ioctl(SIOCGIFHWADDR)", error))?;
        Ok(Self { ifindex, link: link_layer(hardware) })
    }
}

/// The device's hardware type (`ARPHRD_…`).
fn hardware_type(name: &CString) -> io::Result<u16> {
    // SAFETY: ifreq is plain data, for which all zeros are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let bytes = name.as_bytes();
    // The last byte stays zero: it ends the name.
    if bytes.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(bytes) {
        *to = from.cast_signed();
    }
    // Any socket will do: it stands for the network namespace.
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    // SAFETY: SIOCGIFHWADDR reads and writes one ifreq, which `request` is.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFHWADDR, &raw mut request) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: after success, this member of the union is the one that was written.
    Ok(unsafe { request.ifr_ifru.ifru_hwaddr.sa_family })
}

/// From `linux/if_arp.h`; libc has neither.
const ARPHRD_RAWIP: u16 = 519;
const ARPHRD_IP6GRE: u16 = 823;

/// Which devices hand packets to tc without a link-layer header: those for which the kernel's
/// `dev_is_mac_header_xmit` says so
/// (<https://github.com/torvalds/linux/blob/v6.18/include/linux/if_arp.h>).
fn link_layer(hardware: u16) -> LinkLayer {
    match hardware {
        libc::ARPHRD_TUNNEL
        | libc::ARPHRD_TUNNEL6
        | libc::ARPHRD_SIT
        | libc::ARPHRD_IPGRE
        | ARPHRD_IP6GRE
        | libc::ARPHRD_VOID
        | libc::ARPHRD_NONE
        | ARPHRD_RAWIP
        | libc::ARPHRD_PPP => LinkLayer::None,
        _ => LinkLayer::Ethernet,
    }
}
