//! `wg0` without `WireGuard`: a TUN device at each end and a process that carries packets between.
//!
//! A TUN device has no Ethernet header, like a `WireGuard` device, which is what matters to whoever
//! looks at packets on it. Kernels that have neither `WireGuard` nor another device of this kind
//! (ipip, sit) have TUN; VXLAN-GPE, which would need no process, wants a tunnel key in every
//! route. The process ends when it is told to, or when a device is gone.

use std::{
    convert::Infallible,
    ffi::CStr,
    fs::OpenOptions,
    io,
    os::fd::{AsRawFd, OwnedFd},
};

use crate::child;

/// `struct ifreq`, as TUNSETIFF takes it.
#[repr(C)]
struct Ifreq {
    name: [u8; libc::IFNAMSIZ],
    flags: libc::c_short,
    rest: [u8; 22],
}

/// `_IOW('T', 218, unsigned int)`: the interface index that the device shall get.
const TUNSETIFINDEX: libc::Ioctl = 0x4004_54da;

/// A device of IP packets, without the four bytes that may stand before each.
#[expect(clippy::cast_possible_truncation, reason = "0x1001 fits")]
const FLAGS: libc::c_short = (libc::IFF_TUN | libc::IFF_NO_PI) as libc::c_short;

/// Name of the process that carries packets, as `ps` shows it (at most 15 bytes).
pub const PUMP: &CStr = c"ilab-pump";

/// Makes a TUN device in the network namespace of the calling thread; it lives as long as the
/// descriptor. `index` is its interface index, 0 for any.
///
/// # Errors
/// What the system said: `EPERM` without `CAP_NET_ADMIN`, `ENOENT` where the kernel has no TUN.
pub fn create(name: &str, index: u32) -> io::Result<OwnedFd> {
    let device = OpenOptions::new().read(true).write(true).open("/dev/net/tun")?;
    let mut request = Ifreq { name: [0; libc::IFNAMSIZ], flags: FLAGS, rest: [0; 22] };
    if name.len() >= request.name.len() {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    if index != 0 {
        // SAFETY: the kernel reads one unsigned int.
        check(unsafe { libc::ioctl(device.as_raw_fd(), TUNSETIFINDEX, &raw const index) })?;
    }
    // SAFETY: the kernel reads and writes one struct ifreq, which `request` has the layout and
    // size (40 bytes) of.
    check(unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNSETIFF, &raw mut request) })?;
    Ok(device.into())
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Starts the process that carries packets between two TUN devices (see [`child::start`]).
///
/// # Errors
/// What the system said.
pub fn pump(one: OwnedFd, other: OwnedFd) -> io::Result<()> {
    // Allocated here, because the child must not. An IP packet is no longer.
    let packet = vec![0; 65536];
    // SAFETY: `life` makes system calls and nothing else.
    unsafe { child::start(PUMP, &[one, other], packet, |packet| life(packet)) }
}

/// The life of the pump, whose devices are the descriptors 3 and 4.
fn life(packet: &mut [u8]) -> Infallible {
    let mut ends = [3, 4].map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
    loop {
        // SAFETY: poll writes into the two entries of `ends`.
        if unsafe { libc::poll(ends.as_mut_ptr(), 2, -1) } < 0 {
            continue;
        }
        for (from, to) in [(0, 1), (1, 0)] {
            if ends[from].revents == 0 {
                continue;
            }
            // SAFETY: read writes at most the buffer's length into it.
            let length =
                unsafe { libc::read(ends[from].fd, packet.as_mut_ptr().cast(), packet.len()) };
            match usize::try_from(length) {
                Ok(length) if length > 0 => {
                    // A device that is down refuses the packet: lost, as on any link.
                    // SAFETY: write reads `length` bytes, which read has just filled.
                    unsafe { libc::write(ends[to].fd, packet.as_ptr().cast(), length) };
                }
                // The device is gone (EBADFD), or down (EIO) while packets were waiting.
                // SAFETY: errno's address is valid for this thread; _exit ends the process.
                _ => unsafe {
                    if *libc::__errno_location() == libc::EBADFD {
                        libc::_exit(0);
                    }
                },
            }
        }
    }
}
