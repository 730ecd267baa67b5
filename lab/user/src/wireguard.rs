//! `wg0` as a real `WireGuard` device, where the kernel has them.
//!
//! Both ends are made from the LAN's namespace and put into the node's and the VPN client's: a
//! `WireGuard` device keeps its UDP socket in the namespace that made it, so that the encrypted packets
//! go over the loopback device there and the node's own network is that of the capture.

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkDeserializable, NetlinkMessage, NetlinkPayload,
    NetlinkSerializable,
};
use netlink_packet_generic::{
    GenlFamily, GenlMessage,
    ctrl::{GenlCtrl, GenlCtrlCmd, nlas::GenlCtrlAttrs},
};
use netlink_packet_wireguard::{
    WireguardAddressFamily, WireguardAllowedIp, WireguardAllowedIpAttr as Allowed, WireguardCmd,
    WireguardMessage,
};
pub use netlink_packet_wireguard::{
    WireguardAttribute as Attribute, WireguardPeer as Peer, WireguardPeerAttribute as PeerAttribute,
};
use netlink_sys::{Socket, SocketAddr as NetlinkAddress, protocols::NETLINK_GENERIC};

/// UDP ports of the node's and the VPN client's device.
pub const PORTS: [u16; 2] = [51820, 51821];

/// Sends a message of generic netlink, in the namespace of this thread, and returns the answers.
fn ask<T>(message: T, family: u16, flags: u16) -> io::Result<Vec<T>>
where
    GenlMessage<T>: NetlinkSerializable + NetlinkDeserializable,
    T: GenlFamily + std::fmt::Debug,
{
    let mut message = GenlMessage::from_payload(message);
    message.set_resolved_family_id(family);
    message.finalize();
    let mut message = NetlinkMessage::from(message);
    message.header.flags = NLM_F_REQUEST | flags;
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    let mut socket = Socket::new(NETLINK_GENERIC)?;
    socket.bind_auto()?;
    socket.connect(&NetlinkAddress::new(0, 0))?;
    socket.send(&bytes, 0)?;
    let mut answers = Vec::new();
    loop {
        let (bytes, _) = socket.recv_from_full()?;
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            let answer = NetlinkMessage::<GenlMessage<T>>::deserialize(rest)
                .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))?;
            let length = answer.header.length as usize;
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
            match answer.payload {
                NetlinkPayload::InnerMessage(message) => answers.push(message.payload),
                NetlinkPayload::Done(_) => return Ok(answers),
                NetlinkPayload::Error(error) if error.code.is_none() => return Ok(answers),
                NetlinkPayload::Error(error) => return Err(error.to_io()),
                other => return Err(io::Error::other(format!("generic netlink: {other:?}"))),
            }
        }
    }
}

/// The number of `WireGuard`'s family.
fn family() -> io::Result<u16> {
    let request = GenlCtrl {
        cmd: GenlCtrlCmd::GetFamily,
        nlas: vec![GenlCtrlAttrs::FamilyName("wireguard".to_owned())],
    };
    let answers = ask(request, 0, NLM_F_ACK)?;
    answers
        .iter()
        .flat_map(|answer| &answer.nlas)
        .find_map(|attribute| match attribute {
            GenlCtrlAttrs::FamilyId(id) => Some(*id),
            _ => None,
        })
        .ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// What the kernel says of a device in the namespace of this thread.
///
/// # Errors
/// What the kernel said.
pub fn get(device: &str) -> io::Result<Vec<Attribute>> {
    let attributes = vec![Attribute::IfName(device.to_owned())];
    let request = WireguardMessage { cmd: WireguardCmd::GetDevice, attributes };
    let answers = ask(request, family()?, NLM_F_DUMP)?;
    Ok(answers.into_iter().flat_map(|answer| answer.attributes).collect())
}

/// Changes a device in the namespace of this thread.
///
/// # Errors
/// What the kernel said.
pub fn set(device: &str, attributes: Vec<Attribute>) -> io::Result<()> {
    let mut all = vec![Attribute::IfName(device.to_owned())];
    all.extend(attributes);
    let request = WireguardMessage { cmd: WireguardCmd::SetDevice, attributes: all };
    ask(request, family()?, NLM_F_ACK).map(drop)
}

/// Gives a device a private key (32 times this byte) and a port; returns its public key.
///
/// # Errors
/// What the kernel said.
pub fn identify(device: &str, key: u8, port: u16) -> io::Result<[u8; 32]> {
    set(device, vec![Attribute::PrivateKey([key; 32]), Attribute::ListenPort(port)])?;
    let public = get(device)?.into_iter().find_map(|attribute| match attribute {
        Attribute::PublicKey(key) => Some(key),
        _ => None,
    });
    public.ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// A peer with this public key, who is to be found at `endpoint`, if that is known, and has the
/// addresses `allowed`.
#[must_use]
pub fn peer(key: [u8; 32], endpoint: Option<SocketAddr>, allowed: &[(IpAddr, u8)]) -> Peer {
    let allowed = allowed.iter().map(|&(address, prefix)| {
        let family = match address {
            IpAddr::V4(_) => WireguardAddressFamily::Ipv4,
            IpAddr::V6(_) => WireguardAddressFamily::Ipv6,
        };
        WireguardAllowedIp(vec![
            Allowed::Family(family),
            Allowed::IpAddr(address),
            Allowed::Cidr(prefix),
        ])
    });
    let mut attributes =
        vec![PeerAttribute::PublicKey(key), PeerAttribute::AllowedIps(allowed.collect())];
    attributes.extend(endpoint.map(PeerAttribute::Endpoint));
    Peer(attributes)
}
