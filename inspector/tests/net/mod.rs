//! Two hosts for a test: a node and a client, each in a network namespace of its own, with a cable
//! between them.
//!
//! The namespaces have no name anywhere: they live as long as a descriptor of them is open or a
//! thread is in them, so that a panic or a kill leaves nothing behind.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::fs::{self, File, OpenOptions};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::{io, thread};

use nix::net::if_::if_nametoindex;
use nix::sched::{CloneFlags, setns, unshare};
use rtnetlink::{Handle, LinkUnspec, LinkVeth, RouteMessageBuilder};

/// The node's device.
pub const DEVICE: &str = "eno1";
/// The client's device.
pub const CLIENT_DEVICE: &str = "uplink";
/// The client's addresses.
pub const CLIENT_V4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 177);
pub const CLIENT_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 0x177);
/// The node's addresses, the client's gateways.
pub const NODE_V4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 10);
pub const NODE_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 0x10);

/// A network namespace.
pub struct Host(File);

impl Host {
    /// A new one, with nothing but a loopback device that is down.
    pub fn new() -> Self {
        let namespace = thread::spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).unwrap_or_else(|error| {
                panic!("unshare(CLONE_NEWNET): {error}; this test must be run as root")
            });
            // Duplicate address detection would hold IPv6 back for seconds.
            for device in ["all", "default"] {
                fs::write(format!("/proc/sys/net/ipv6/conf/{device}/accept_dad"), "0")
                    .expect("IPv6, in this kernel");
            }
            File::open("/proc/thread-self/ns/net").expect("/proc")
        });
        Self(namespace.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    }

    /// Moves a device of this thread's network namespace here.
    pub fn take(&self, device: &str) {
        let index = index(device);
        netlink(async |handle| {
            let message = LinkUnspec::new_with_index(index).setns_by_fd(self.0.as_raw_fd()).build();
            handle.link().set(message).execute().await.expect("move the device");
        });
    }

    /// Runs `work` in this network namespace, on a thread of its own.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            scope
                .spawn(|| {
                    setns(&self.0, CloneFlags::CLONE_NEWNET).expect("setns");
                    work()
                })
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

/// A node and a client with a cable between them, addresses, and the node as the client's gateway.
pub fn node_and_client() -> (Host, Host) {
    let (node, client) = (Host::new(), Host::new());
    let client_fd = client.0.as_raw_fd();
    node.run(|| {
        netlink(async |handle| {
            let cable = LinkVeth::new(DEVICE, CLIENT_DEVICE).build();
            handle.link().add(cable).execute().await.expect("veth, in this kernel");
            let other_end = LinkUnspec::new_with_index(index(CLIENT_DEVICE));
            let other_end = other_end.setns_by_fd(client_fd).build();
            handle.link().set(other_end).execute().await.expect("move the cable's other end");
            up(&handle, DEVICE).await;
            address(&handle, DEVICE, NODE_V4.into(), 24).await;
            address(&handle, DEVICE, NODE_V6.into(), 64).await;
        });
    });
    client.run(|| {
        netlink(async |handle| {
            up(&handle, CLIENT_DEVICE).await;
            address(&handle, CLIENT_DEVICE, CLIENT_V4.into(), 24).await;
            address(&handle, CLIENT_DEVICE, CLIENT_V6.into(), 64).await;
            let v4 = RouteMessageBuilder::<Ipv4Addr>::new().gateway(NODE_V4).build();
            handle.route().add(v4).execute().await.expect("IPv4 route");
            let v6 = RouteMessageBuilder::<Ipv6Addr>::new().gateway(NODE_V6).build();
            handle.route().add(v6).execute().await.expect("IPv6 route");
        });
    });
    (node, client)
}

/// A device without link-layer header: what is written to the file arrives there. It is gone when
/// the file is closed.
pub fn tun(name: &str) -> File {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .expect("/dev/net/tun: this test needs TUN devices (CONFIG_TUN)");
    // SAFETY: ifreq is plain data, for which all zeros are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    assert!(name.len() < request.ifr_name.len(), "{name} is too long for a device");
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_flags =
        i16::try_from(libc::IFF_TUN | libc::IFF_NO_PI).expect("both are small");
    // SAFETY: TUNSETIFF reads and writes one ifreq, which `request` is.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    assert!(result == 0, "ioctl(TUNSETIFF) for {name}: {}", io::Error::last_os_error());
    netlink(async |handle| up(&handle, name).await);
    file
}

/// The first two numbers of the kernel's version.
pub fn release() -> (u32, u32) {
    let text = fs::read_to_string("/proc/sys/kernel/osrelease").expect("/proc");
    let mut numbers = text.split('.').map_while(|number| number.parse().ok());
    (numbers.next().expect("a version"), numbers.next().expect("a version"))
}

/// Sends a frame as it is from a device.
pub fn send_frame(device: &str, frame: &[u8]) {
    let ifindex = i32::try_from(index(device)).expect("an interface index");
    // SAFETY: no pointers are involved.
    let socket = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    assert!(socket >= 0, "socket(AF_PACKET): {}", io::Error::last_os_error());
    // SAFETY: the descriptor was just made, and belongs to nothing else.
    let socket = unsafe { <std::os::fd::OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(socket) };
    // SAFETY: sockaddr_ll is plain data, for which all zeros are valid.
    let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    to.sll_family = u16::try_from(libc::AF_PACKET).expect("a small number");
    to.sll_ifindex = ifindex;
    // SAFETY: both pointers are to live values of the sizes given.
    let sent = unsafe {
        libc::sendto(
            socket.as_raw_fd(),
            frame.as_ptr().cast(),
            frame.len(),
            0,
            (&raw const to).cast(),
            u32::try_from(size_of_val(&to)).expect("a small size"),
        )
    };
    assert_eq!(usize::try_from(sent), Ok(frame.len()), "sendto: {}", io::Error::last_os_error());
}

/// The index of a device of this thread's network namespace.
pub fn index(device: &str) -> u32 {
    if_nametoindex(device).unwrap_or_else(|error| panic!("device {device}: {error}"))
}

/// Runs `work` with netlink of this thread's network namespace.
pub fn netlink(work: impl AsyncFnOnce(Handle)) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build();
    runtime.expect("a runtime").block_on(async {
        let (connection, handle, _) = rtnetlink::new_connection().expect("a netlink socket");
        let connection = tokio::spawn(connection);
        work(handle).await;
        connection.abort();
    });
}

/// Sets a device up.
pub async fn up(handle: &Handle, device: &str) {
    let message = LinkUnspec::new_with_index(index(device)).up().build();
    handle.link().set(message).execute().await.expect("set the device up");
}

/// Gives a device an address.
pub async fn address(handle: &Handle, device: &str, address: IpAddr, prefix: u8) {
    handle.address().add(index(device), address, prefix).execute().await.expect("add the address");
}

/// A socket that gets every frame that a device receives.
pub fn tap(device: &str) -> OwnedFd {
    let every = u16::try_from(libc::ETH_P_ALL).expect("a small number").to_be();
    // SAFETY: no pointers are involved.
    let socket = unsafe {
        libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, i32::from(every))
    };
    assert!(socket >= 0, "socket(AF_PACKET): {}", io::Error::last_os_error());
    // SAFETY: the descriptor was just made, and belongs to nothing else.
    let socket = unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(socket) };
    // SAFETY: sockaddr_ll is plain data, for which all zeros are valid.
    let mut at: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    at.sll_family = u16::try_from(libc::AF_PACKET).expect("a small number");
    at.sll_protocol = every;
    at.sll_ifindex = i32::try_from(index(device)).expect("an interface index");
    let patience = libc::timeval { tv_sec: 5, tv_usec: 0 };
    // SAFETY: the pointers are to live values of the sizes given.
    let result = unsafe {
        libc::bind(
            socket.as_raw_fd(),
            (&raw const at).cast(),
            u32::try_from(size_of_val(&at)).expect("a small size"),
        ) | libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVTIMEO,
            (&raw const patience).cast(),
            u32::try_from(size_of_val(&patience)).expect("a small size"),
        )
    };
    assert_eq!(result, 0, "bind and setsockopt: {}", io::Error::last_os_error());
    socket
}

/// The next `count` frames that a tap gets, others than `wanted` left out.
pub fn frames(tap: &OwnedFd, wanted: impl Fn(&Vec<u8>) -> bool, count: usize) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    while found.len() < count {
        let mut frame = vec![0; 65_536];
        // SAFETY: a live buffer of the length given.
        let length =
            unsafe { libc::recv(tap.as_raw_fd(), frame.as_mut_ptr().cast(), frame.len(), 0) };
        let Ok(length) = usize::try_from(length) else {
            panic!("{} of {count} frames: {}", found.len(), io::Error::last_os_error());
        };
        frame.truncate(length);
        if wanted(&frame) {
            found.push(frame);
        }
    }
    found
}
