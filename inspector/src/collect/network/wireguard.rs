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

#[cfg(test)]
mod tests {
    use netlink_packet_core::Emitable;
    use netlink_packet_wireguard::{
        WireguardAddressFamily, WireguardAllowedIp, WireguardAllowedIpAttr as Allowed,
        WireguardAttribute as Attribute, WireguardCmd, WireguardMessage, WireguardPeer as Peer,
        WireguardPeerAttribute as PeerAttribute, WireguardTimeSpec,
    };

    use super::*;

    const NOW: Duration = Duration::from_secs(1_796_067_800);

    fn network(family: WireguardAddressFamily, address: &str, prefix: u8) -> WireguardAllowedIp {
        WireguardAllowedIp(vec![
            Allowed::Cidr(prefix),
            Allowed::Family(family),
            Allowed::IpAddr(address.parse().unwrap()),
        ])
    }

    /// A message as the kernel sends it, without its generic header.
    fn message(attributes: Vec<Attribute>) -> Vec<u8> {
        let message = WireguardMessage { cmd: WireguardCmd::GetDevice, attributes };
        let mut bytes = vec![0; message.buffer_len()];
        message.emit(&mut bytes);
        bytes
    }

    /// A device with a peer that was heard of, as in the capture of 1.13, and one that was not;
    /// the first one's addresses go on in the second message.
    fn messages() -> [Vec<u8>; 2] {
        use WireguardAddressFamily::{Ipv4, Ipv6};
        let heard = Peer(vec![
            PeerAttribute::PublicKey([0xa1; 32]),
            PeerAttribute::PresharedKey([0xa2; 32]),
            PeerAttribute::LastHandshake(WireguardTimeSpec {
                seconds: 1_796_067_744,
                nano_seconds: 5,
            }),
            PeerAttribute::PersistentKeepalive(25),
            PeerAttribute::TxBytes(35_560),
            PeerAttribute::RxBytes(37_928),
            PeerAttribute::Endpoint("192.168.2.60:51433".parse().unwrap()),
            PeerAttribute::AllowedIps(vec![network(Ipv4, "10.90.0.2", 32)]),
        ]);
        let rest = Peer(vec![
            PeerAttribute::PublicKey([0xa1; 32]),
            PeerAttribute::AllowedIps(vec![network(Ipv6, "fd00:90::2", 128)]),
        ]);
        let silent = Peer(vec![
            PeerAttribute::PublicKey([0xa3; 32]),
            PeerAttribute::LastHandshake(WireguardTimeSpec { seconds: 0, nano_seconds: 0 }),
            PeerAttribute::TxBytes(0),
            PeerAttribute::RxBytes(0),
            PeerAttribute::AllowedIps(vec![network(Ipv4, "10.91.0.0", 16)]),
        ]);
        [
            message(vec![
                Attribute::ListenPort(51820),
                Attribute::Fwmark(0),
                Attribute::IfIndex(3),
                Attribute::IfName("wg0".to_owned()),
                Attribute::PrivateKey([0xa4; 32]),
                Attribute::PublicKey([0xa5; 32]),
                Attribute::Peers(vec![heard]),
            ]),
            message(vec![Attribute::Peers(vec![rest, silent])]),
        ]
    }

    #[test]
    fn peers_are_read_across_messages_and_keys_are_not() {
        let mut device = None;
        for message in messages() {
            add(&mut device, &message, NOW);
        }
        let device = device.unwrap();
        let heard = WireGuardPeer {
            endpoint: true,
            handshake_s: Some(56),
            received: 37_928,
            sent: 35_560,
            allowed: vec!["10.90.0.2/32".to_owned(), "fd00:90::2/128".to_owned()],
        };
        let silent = WireGuardPeer {
            endpoint: false,
            handshake_s: None,
            received: 0,
            sent: 0,
            allowed: vec!["10.91.0.0/16".to_owned()],
        };
        assert_eq!(device, WireGuard { ifindex: 3, peers: vec![heard, silent] });
        let kept = serde_json::to_string(&device).unwrap();
        for key in ["161", "162", "163", "164", "165", "a1a1", "oaGh"] {
            assert!(!kept.contains(key), "{kept}");
        }
    }

    #[test]
    fn a_message_that_is_cut_short_does_no_harm() {
        let [first, second] = messages();
        for length in 0..first.len() {
            let mut device = None;
            add(&mut device, &first[..length], NOW);
            add(&mut device, &second[..length.min(second.len())], NOW);
        }
    }
}
