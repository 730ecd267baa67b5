//! WireGuard devices by generic netlink: who was heard of, and when. Keys are passed over.
//!
//! Layout and numbers are those of `linux/wireguard.h`. The kernel loads WireGuard when its netlink
//! family is asked for, so that is asked only where there is a WireGuard device.

use std::{
    net::{Ipv4Addr, Ipv6Addr},
    time::Duration,
};

use crate::{
    evidence::network::{WireGuard, WireGuardPeer},
    sys::netlink::{
        Netlink, NetlinkError, Request, attributes, push_attribute, u16_at, u32_at, u64_at,
    },
};

/// The controller that knows the numbers of generic netlink families (linux/genetlink.h).
const GETFAMILY: Request = Request { kind: 0x10, name: "CTRL_CMD_GETFAMILY of wireguard" };
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;

const WG_CMD_GET_DEVICE: u8 = 0;
const WGDEVICE_A_IFINDEX: u16 = 1;
const WGDEVICE_A_PEERS: u16 = 8;
const WGPEER_A_ENDPOINT: u16 = 4;
const WGPEER_A_LAST_HANDSHAKE_TIME: u16 = 6;
const WGPEER_A_RX_BYTES: u16 = 7;
const WGPEER_A_TX_BYTES: u16 = 8;
const WGPEER_A_ALLOWEDIPS: u16 = 9;
const WGALLOWEDIP_A_IPADDR: u16 = 2;
const WGALLOWEDIP_A_CIDR_MASK: u16 = 3;

/// Length of `struct genlmsghdr`.
const GENLMSGHDR: usize = 4;

/// Reads the devices with these indexes; `now` is the time since 1970, to tell ages of handshakes.
/// Also returns whether nothing changed meanwhile.
///
/// # Errors
/// [`NetlinkError`]; the kernel tells of WireGuard only with `CAP_NET_ADMIN`.
pub fn devices(ifindexes: &[u32], now: Duration) -> Result<(Vec<WireGuard>, bool), NetlinkError> {
    let mut netlink = Netlink::open(libc::NETLINK_GENERIC)?;
    let mut body = vec![CTRL_CMD_GETFAMILY, 2, 0, 0];
    push_attribute(&mut body, CTRL_ATTR_FAMILY_NAME, b"wireguard\0");
    let answer = netlink.ask(GETFAMILY, &[body])?.pop();
    let family = match answer {
        Some(Ok(answer)) => attributes(answer.get(GENLMSGHDR..).unwrap_or_default())
            .find(|(kind, _)| *kind == CTRL_ATTR_FAMILY_ID)
            .and_then(|(_, value)| u16_at(value, 0))
            .ok_or(NetlinkError::Malformed(GETFAMILY))?,
        Some(Err(number)) => return Err(NetlinkError::refused(GETFAMILY, number)),
        None => return Err(NetlinkError::Malformed(GETFAMILY)),
    };
    let get = Request { kind: family, name: "WG_CMD_GET_DEVICE" };
    let (mut all, mut steady) = (Vec::new(), true);
    for &ifindex in ifindexes {
        let mut body = vec![WG_CMD_GET_DEVICE, 1, 0, 0];
        push_attribute(&mut body, WGDEVICE_A_IFINDEX, &ifindex.to_ne_bytes());
        let device = netlink.dump(get, &body, |device: &mut Option<WireGuard>, message| {
            add(device, message.get(GENLMSGHDR..).unwrap_or_default(), now);
        });
        match device {
            Ok((device, undisturbed)) => {
                steady &= undisturbed;
                all.extend(device);
            }
            // Gone since the links were read.
            Err(error) if error.errno() == Some(libc::ENODEV) => steady = false,
            Err(error) => return Err(error),
        }
    }
    Ok((all, steady))
}

/// Adds what a message says of a device. A device with many peers, and a peer with many allowed
/// addresses, go on in the next message.
fn add(device: &mut Option<WireGuard>, message: &[u8], now: Duration) {
    let find = |wanted| attributes(message).find(|(kind, _)| *kind == wanted);
    if let Some(ifindex) = find(WGDEVICE_A_IFINDEX).and_then(|(_, value)| u32_at(value, 0)) {
        device.get_or_insert_with(|| WireGuard { ifindex, peers: Vec::new() });
    }
    let (Some(device), Some((_, peers))) = (device, find(WGDEVICE_A_PEERS)) else { return };
    for (_, peer) in attributes(peers) {
        let (more, is_new) = read_peer(peer, now);
        match device.peers.last_mut() {
            // The rest of the last one comes without counters.
            Some(last) if !is_new => last.allowed.extend(more.allowed),
            _ => device.peers.push(more),
        }
    }
}

/// A peer, and whether it begins here.
fn read_peer(attributes_of_peer: &[u8], now: Duration) -> (WireGuardPeer, bool) {
    let mut peer = WireGuardPeer {
        endpoint: false,
        handshake_s: None,
        received: 0,
        sent: 0,
        allowed: Vec::new(),
    };
    let mut is_new = false;
    for (kind, value) in attributes(attributes_of_peer) {
        match kind {
            WGPEER_A_ENDPOINT => peer.endpoint = true,
            // struct __kernel_timespec; all zero if there was none.
            WGPEER_A_LAST_HANDSHAKE_TIME => {
                let at = u64_at(value, 0).unwrap_or_default();
                peer.handshake_s = (at != 0).then(|| now.as_secs().saturating_sub(at));
            }
            WGPEER_A_RX_BYTES => {
                is_new = true;
                peer.received = u64_at(value, 0).unwrap_or_default();
            }
            WGPEER_A_TX_BYTES => peer.sent = u64_at(value, 0).unwrap_or_default(),
            WGPEER_A_ALLOWEDIPS => {
                peer.allowed.extend(attributes(value).filter_map(|(_, one)| allowed(one)));
            }
            _ => {}
        }
    }
    (peer, is_new)
}

/// An allowed network in CIDR notation.
fn allowed(attributes_of_it: &[u8]) -> Option<String> {
    let find = |wanted| attributes(attributes_of_it).find(|(kind, _)| *kind == wanted);
    let (_, address) = find(WGALLOWEDIP_A_IPADDR)?;
    let prefix = *find(WGALLOWEDIP_A_CIDR_MASK)?.1.first()?;
    if let Ok(bytes) = <[u8; 4]>::try_from(address) {
        return Some(format!("{}/{prefix}", Ipv4Addr::from(bytes)));
    }
    let bytes = <[u8; 16]>::try_from(address).ok()?;
    Some(format!("{}/{prefix}", Ipv6Addr::from(bytes)))
}
