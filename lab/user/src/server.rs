//! Servers where a capture has backends: they say who answered whom.
//!
//! One process per place answers for all of its addresses and ports. Over TCP it sends one line and
//! ends the connection, over UDP it answers every packet with the line:
//! `pod1 tcp 8443 peer=192.168.2.50:47894 local=10.77.1.143`. The place is named as in the captures'
//! `answered_by`.

use std::{
    convert::Infallible,
    ffi::CStr,
    fmt::{self, Write as _},
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket},
    os::fd::OwnedFd,
};

use crate::{
    capture::Capture,
    child,
    netns::{self, Ns},
    plan::Plan,
    state::StateError,
};

/// Name of the processes, as `ps` shows it (at most 15 bytes).
pub const NAME: &CStr = c"ilab-server";

/// The plain host in the LAN, which some services have as a backend.
const HOST60: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(192, 168, 2, 60)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 2, 0, 0, 0, 0, 0, 0x60)),
];

/// How many TCP connections one server keeps open for clients that do not end them.
const CONNECTIONS: usize = 64;

/// Why a server could not be started.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// A namespace.
    #[error(transparent)]
    State(#[from] StateError),
    /// A socket or the process.
    #[error("starting the server in {place} ({what}): {source}")]
    Start {
        /// The place.
        place: Ns,
        /// The address, or the process.
        what: String,
        /// What the system said.
        source: io::Error,
    },
}

/// A transport protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Transport {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        })
    }
}

/// Addresses, ports and protocols of the capture's backends, sorted. Cilium before 1.17 does not
/// say which protocol: then it is both.
#[must_use]
pub fn backends(capture: &Capture) -> Vec<(SocketAddr, Transport)> {
    let mut found = Vec::new();
    for (size, names) in [
        (4, ["cilium_lb4_backends_v3", "cilium_lb4_backends_v2"]),
        (16, ["cilium_lb6_backends_v3", "cilium_lb6_backends_v2"]),
    ] {
        let Some(map) = names.into_iter().find_map(|name| capture.map(name)) else { continue };
        for entry in &map.entries {
            // The address, then the port (network byte order), then the protocol.
            let Some((address, rest)) = entry.value.split_at_checked(size) else { continue };
            let [high, low, protocol, ..] = *rest else { continue };
            let address = match <[u8; 4]>::try_from(address) {
                Ok(v4) => IpAddr::from(v4),
                Err(_) => match <[u8; 16]>::try_from(address) {
                    Ok(v6) => IpAddr::from(v6),
                    Err(_) => continue,
                },
            };
            let address = SocketAddr::from((address, u16::from_be_bytes([high, low])));
            if matches!(protocol, 0 | 6) {
                found.push((address, Transport::Tcp));
            }
            if matches!(protocol, 0 | 17) {
                found.push((address, Transport::Udp));
            }
        }
    }
    found.sort();
    found.dedup();
    found
}

/// Starts the servers of the lab `name`: for those of `backends` that are pods of the node or the
/// plain host in its LAN.
///
/// # Errors
/// [`ServerError`].
pub fn start(
    name: &str,
    plan: &Plan,
    backends: &[(SocketAddr, Transport)],
) -> Result<(), ServerError> {
    let pods = plan.pods().map(|pod| (Ns::Pod(pod.number), &pod.addresses[..]));
    for (place, addresses) in pods.chain([(Ns::Host60, &HOST60[..])]) {
        let here = backends.iter().filter(|(address, _)| addresses.contains(&address.ip()));
        let here: Vec<_> = here.copied().collect();
        if here.is_empty() {
            continue;
        }
        let namespace = crate::state::open_file(&netns::path(name, place))?;
        netns::run_in(&namespace, || serve(place, &here))?;
    }
    Ok(())
}

fn serve(place: Ns, addresses: &[(SocketAddr, Transport)]) -> Result<(), ServerError> {
    let failed =
        |what: String| move |source| ServerError::Start { place, what: what.clone(), source };
    let mut sockets: Vec<OwnedFd> = Vec::new();
    for (address, transport) in addresses {
        let failed = failed(format!("{transport} {address}"));
        sockets.push(match transport {
            Transport::Tcp => {
                let listener = TcpListener::bind(address).map_err(&failed)?;
                listener.set_nonblocking(true).map_err(&failed)?;
                listener.into()
            }
            Transport::Udp => {
                let socket = UdpSocket::bind(address).map_err(&failed)?;
                socket.set_nonblocking(true).map_err(&failed)?;
                socket.into()
            }
        });
    }
    let who = match place {
        Ns::Host60 => "ext".to_owned(),
        place => place.to_string(),
    };
    let none = libc::pollfd { fd: -1, events: libc::POLLIN, revents: 0 };
    let mut polled = vec![none; addresses.len() + CONNECTIONS];
    for (number, listener) in (3..).zip(&mut polled[..addresses.len()]) {
        listener.fd = number;
    }
    let server = Server { who, addresses: addresses.to_vec(), polled, next: 0 };
    // SAFETY: `Server::live` makes system calls, and formats into memory that it has.
    unsafe { child::start(NAME, &sockets, server, Server::live) }
        .map_err(failed("the process".to_owned()))
}

struct Server {
    who: String,
    addresses: Vec<(SocketAddr, Transport)>,
    /// The sockets at [`Self::addresses`], then the open connections (-1: none).
    polled: Vec<libc::pollfd>,
    /// The connection that is given up for the next one.
    next: usize,
}

impl Server {
    /// The life of a server process.
    fn live(&mut self) -> Infallible {
        loop {
            let count = self.polled.len() as libc::nfds_t;
            // SAFETY: poll writes into `count` entries.
            if unsafe { libc::poll(self.polled.as_mut_ptr(), count, -1) } < 0 {
                continue;
            }
            let (listeners, connections) = self.polled.split_at_mut(self.addresses.len());
            for (socket, (local, transport)) in listeners.iter().zip(&self.addresses) {
                if socket.revents == 0 {
                    continue;
                }
                match transport {
                    Transport::Tcp => {
                        if let Some(new) = greet(socket.fd, &self.who, local) {
                            let old = &mut connections[self.next];
                            self.next = (self.next + 1) % CONNECTIONS;
                            close(old.fd);
                            old.fd = new;
                            old.revents = 0;
                        }
                    }
                    Transport::Udp => answer(socket.fd, &self.who, local),
                }
            }
            for connection in connections.iter_mut().filter(|connection| connection.revents != 0) {
                let mut rest = [0_u8; 1024];
                // SAFETY: recv writes at most the buffer's length into it.
                let length = unsafe {
                    libc::recv(
                        connection.fd,
                        rest.as_mut_ptr().cast(),
                        rest.len(),
                        libc::MSG_DONTWAIT,
                    )
                };
                if length <= 0 {
                    close(connection.fd);
                    connection.fd = -1;
                }
            }
        }
    }
}

fn close(fd: i32) {
    if fd >= 0 {
        // SAFETY: the descriptor is this process's, and is forgotten by the caller.
        unsafe { libc::close(fd) };
    }
}

/// Takes a connection, sends the line and says that there is no more.
fn greet(listener: i32, who: &str, local: &SocketAddr) -> Option<i32> {
    let mut peer = Peer::new();
    let (address, size) = peer.room();
    // SAFETY: the kernel writes at most the size of a sockaddr_storage.
    let connection = unsafe { libc::accept4(listener, address, size, libc::SOCK_CLOEXEC) };
    if connection < 0 {
        return None;
    }
    let line = Line::new(who, Transport::Tcp, local, &peer);
    // SAFETY: send reads the line's length from it; a client that is gone costs nothing.
    unsafe {
        libc::send(connection, line.bytes.as_ptr().cast(), line.length, libc::MSG_NOSIGNAL);
        libc::shutdown(connection, libc::SHUT_WR);
    }
    Some(connection)
}

fn answer(socket: i32, who: &str, local: &SocketAddr) {
    let mut peer = Peer::new();
    let mut question = [0_u8; 2048];
    let (address, size) = peer.room();
    // SAFETY: the kernel writes at most the buffer's length, and the size of a sockaddr_storage.
    let length = unsafe {
        libc::recvfrom(socket, question.as_mut_ptr().cast(), question.len(), 0, address, size)
    };
    if length < 0 {
        return;
    }
    let line = Line::new(who, Transport::Udp, local, &peer);
    let (address, size) = peer.room();
    // SAFETY: sendto reads the line and the address, which the kernel has just written.
    unsafe { libc::sendto(socket, line.bytes.as_ptr().cast(), line.length, 0, address, *size) };
}

/// The address of a client, as the kernel writes it.
struct Peer {
    storage: libc::sockaddr_storage,
    size: libc::socklen_t,
}

impl Peer {
    fn new() -> Self {
        // SAFETY: all of it are numbers, of which zero is a value.
        let storage = unsafe { std::mem::zeroed() };
        #[expect(clippy::cast_possible_truncation, reason = "128 bytes")]
        let size = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
        Self { storage, size }
    }

    fn room(&mut self) -> (*mut libc::sockaddr, &mut libc::socklen_t) {
        ((&raw mut self.storage).cast(), &mut self.size)
    }

    fn address(&self) -> SocketAddr {
        let storage = &raw const self.storage;
        if i32::from(self.storage.ss_family) == libc::AF_INET6 {
            // SAFETY: the family says that this is what stands there; the storage is large enough
            // and aligned for all families.
            let v6 = unsafe { *storage.cast::<libc::sockaddr_in6>() };
            (Ipv6Addr::from(v6.sin6_addr.s6_addr), u16::from_be(v6.sin6_port)).into()
        } else {
            // SAFETY: as above.
            let v4 = unsafe { *storage.cast::<libc::sockaddr_in>() };
            (Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes()), u16::from_be(v4.sin_port)).into()
        }
    }
}

/// The line of an answer, in memory of its own.
struct Line {
    bytes: [u8; 256],
    length: usize,
}

impl Line {
    fn new(who: &str, transport: Transport, local: &SocketAddr, peer: &Peer) -> Self {
        let mut line = Self { bytes: [0; 256], length: 0 };
        let peer = peer.address();
        // It fits: two addresses and a few words. What did not would be cut off.
        let _ =
            writeln!(line, "{who} {transport} {} peer={peer} local={}", local.port(), local.ip());
        line
    }
}

impl fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = self.bytes.get_mut(self.length..).unwrap_or_default();
        let fits = text.len().min(room.len());
        room[..fits].copy_from_slice(&text.as_bytes()[..fits]);
        self.length += fits;
        if fits == text.len() { Ok(()) } else { Err(fmt::Error) }
    }
}
