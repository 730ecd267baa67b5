//! The netlink tier: what the kernel tells everybody about its neighbours.

use std::collections::HashSet;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd as _, RawFd};

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

use super::decode::{address, state_name};
use super::sighting::{Hook, Neighbour, Sighting, Tier};
use crate::sys::{host, netlink};

/// `RTMGRP_NEIGH`
const GROUP: u32 = 1 << 2;

/// `RTM_NEWNEIGH` and `RTM_DELNEIGH`
const NEW: u16 = 28;
const DELETED: u16 = 29;
/// `NDA_DST`
const DESTINATION: u16 = 1;

/// Receive buffer, bytes: thousands of notifications.
const ROOM: usize = 1 << 20;

/// A socket that gets the notifications of this thread's network namespace.
#[derive(Debug)]
pub(super) struct Neighbours {
    socket: Socket,
    buffer: Vec<u8>,
    watched: HashSet<IpAddr>,
    pending: std::collections::VecDeque<Sighting>,
    pub(super) matched: u64,
    pub(super) lost: u64,
}

impl Neighbours {
    pub(super) fn open(watched: HashSet<IpAddr>) -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.set_rx_buf_sz(ROOM)?;
        socket.bind(&SocketAddr::new(0, GROUP))?;
        Ok(Self {
            socket,
            buffer: Vec::with_capacity(1 << 16),
            watched,
            pending: std::collections::VecDeque::new(),
            matched: 0,
            lost: 0,
        })
    }

    pub(super) fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// The next notification about a watched neighbour, if there is one; it does not wait.
    pub(super) fn next(&mut self) -> io::Result<Option<Sighting>> {
        loop {
            if let Some(sighting) = self.pending.pop_front() {
                return Ok(Some(sighting));
            }
            self.buffer.clear();
            match self.socket.recv(&mut self.buffer, libc::MSG_DONTWAIT) {
                Ok(_) => {}
                Err(error) => match error.raw_os_error() {
                    Some(libc::EAGAIN) => return Ok(None),
                    Some(libc::EINTR) => continue,
                    // The kernel does not say how many.
                    Some(libc::ENOBUFS) => {
                        self.lost += 1;
                        self.matched += 1;
                        continue;
                    }
                    _ => return Err(error),
                },
            }
            let now = host::monotonic_ns();
            for (kind, body) in netlink::bodies(&self.buffer) {
                if let Some(sighting) = notification(kind, body, now)
                    && let Some(neighbour) = &sighting.neighbour
                    && self.watched.contains(&neighbour.address)
                {
                    self.matched += 1;
                    self.pending.push_back(sighting);
                }
            }
        }
    }
}

/// `struct ndmsg` and its attributes.
fn notification(kind: u16, body: &[u8], now: u64) -> Option<Sighting> {
    if !matches!(kind, NEW | DELETED) {
        return None;
    }
    let ifindex = u32::from_ne_bytes(body.get(4..8)?.try_into().ok()?);
    let state = u16::from_ne_bytes(body.get(8..10)?.try_into().ok()?);
    let (_, destination) =
        netlink::attributes(body.get(12..)?).find(|(kind, _)| *kind == DESTINATION)?;
    Some(Sighting {
        monotonic_ns: now,
        hook: Hook::NeighUpdate,
        tier: Tier::Netlink,
        ifindex,
        skb: None,
        packet: None,
        neighbour: Some(Neighbour {
            address: address(destination)?,
            state: Some(state_name(u32::from(state))),
        }),
        mark: None,
        detail: (kind == DELETED).then(|| "the entry is deleted".to_owned()),
        flow: None,
        asked: None,
        program: None,
        headers: None,
    })
}
