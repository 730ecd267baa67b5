//! The endpoints map, `cilium_lxc`: local pods, and the node's own addresses.
//!
//! Layout: `struct endpoint_key` and `struct endpoint_info` of Cilium's `bpf/lib/common.h`; the
//! sizes are the same from 1.10 to 1.21, newer fields were taken from padding.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::{
    error::DecodeError,
    layout::Layout,
    mac::Mac,
    order::{HostU16, HostU32},
    raw::{self, assert_sizes, either, raw_struct},
};

raw_struct! {
    /// Key of `cilium_lxc`, 20 bytes.
    struct EndpointKey {
        /// Address; of IPv4 the first 4 bytes, the rest zero.
        pub address: [u8; 16],
        /// 1 for IPv4, 2 for IPv6.
        pub family: u8,
        /// Encryption key index of the tunnel map that shared this struct; zero here.
        pub key: u8,
        /// Cluster of the address, 0 is this one (1.15+; 1.14 has 8 bits, earlier padding).
        pub cluster_id: HostU16,
    }

    /// Value of `cilium_lxc`, 48 bytes.
    struct EndpointInfo {
        /// Index of the endpoint's device in the node's namespace; 0 for node addresses.
        pub ifindex: HostU32,
        /// Not used.
        pub unused: [u8; 2],
        /// Endpoint id.
        pub lxc_id: HostU16,
        /// See [`EndpointFlags`].
        pub flags: HostU32,
        /// Padding before the 8-byte fields.
        pub pad1: [u8; 4],
        /// Ethernet address of the endpoint.
        pub mac: [u8; 6],
        /// Padding of the 8-byte union.
        pub pad2: [u8; 2],
        /// Ethernet address of the node's side.
        pub node_mac: [u8; 6],
        /// Padding of the 8-byte union.
        pub pad3: [u8; 2],
        /// Security identity (1.14+).
        pub sec_id: HostU32,
        /// Index of the device that the endpoint is attached to (1.17+).
        pub parent_ifindex: HostU32,
        /// Padding. 1.21 has route information here, which it printed as 0 wherever it was seen.
        pub pad4: [u8; 8],
    }
}
assert_sizes! { EndpointKey = 20, EndpointInfo = 48 }

/// What kind of endpoint it is.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct EndpointFlags(pub u32);

impl EndpointFlags {
    /// An address of the node itself.
    pub const HOST: u32 = 1;
    /// An endpoint in the node's network namespace (1.17+).
    pub const AT_HOST_NETNS: u32 = 2;
    /// IPv4 packets of this endpoint are not masqueraded (1.19+).
    pub const SKIP_MASQUERADE_V4: u32 = 4;
    /// IPv6 packets of this endpoint are not masqueraded (1.19+).
    pub const SKIP_MASQUERADE_V6: u32 = 8;

    /// Whether this is an address of the node itself.
    #[must_use]
    pub fn is_host(self) -> bool {
        self.0 & Self::HOST != 0
    }

    /// Bits that no known version has a meaning for.
    #[must_use]
    pub fn unknown(self) -> u32 {
        let known =
            Self::HOST | Self::AT_HOST_NETNS | Self::SKIP_MASQUERADE_V4 | Self::SKIP_MASQUERADE_V6;
        self.0 & !known
    }
}

/// A local endpoint, or an address of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Endpoint {
    /// Address.
    pub address: IpAddr,
    /// Cluster of the address, 0 is this one.
    pub cluster_id: u16,
    /// The key byte of the key; zero.
    pub key: u8,
    /// Index of the endpoint's device in the node's namespace; 0 for node addresses.
    pub ifindex: u32,
    /// Endpoint id; 0 for node addresses.
    pub lxc_id: u16,
    /// Flags.
    pub flags: EndpointFlags,
    /// Ethernet address of the endpoint.
    pub mac: Mac,
    /// Ethernet address of the node's side.
    pub node_mac: Mac,
    /// Security identity; 0 before 1.14.
    pub sec_id: u32,
    /// Index of the device that the endpoint is attached to; 0 before 1.17.
    pub parent_ifindex: u32,
}

impl Endpoint {
    /// Reads an entry.
    ///
    /// # Errors
    /// [`DecodeError::Size`] if key or value are not as long as `layout` says,
    /// [`DecodeError::Field`] for an unknown address family.
    pub fn decode(layout: &'static Layout, key: &[u8], value: &[u8]) -> Result<Self, DecodeError> {
        let key: &EndpointKey = raw::key(layout, key)?;
        let value: &EndpointInfo = raw::value(layout, value)?;
        Ok(Self {
            address: either::decode(layout, key.family, key.address)?,
            cluster_id: key.cluster_id.get(),
            key: key.key,
            ifindex: value.ifindex.get(),
            lxc_id: value.lxc_id.get(),
            flags: EndpointFlags(value.flags.get()),
            mac: Mac(value.mac),
            node_mac: Mac(value.node_mac),
            sec_id: value.sec_id.get(),
            parent_ifindex: value.parent_ifindex.get(),
        })
    }

    /// The bytes of key and value.
    #[must_use]
    pub fn encode(&self) -> (Vec<u8>, Vec<u8>) {
        let (family, address) = either::encode(self.address);
        let key =
            EndpointKey { address, family, key: self.key, cluster_id: self.cluster_id.into() };
        let value = EndpointInfo {
            ifindex: self.ifindex.into(),
            unused: [0; 2],
            lxc_id: self.lxc_id.into(),
            flags: self.flags.0.into(),
            pad1: [0; 4],
            mac: self.mac.0,
            pad2: [0; 2],
            node_mac: self.node_mac.0,
            pad3: [0; 2],
            sec_id: self.sec_id.into(),
            parent_ifindex: self.parent_ifindex.into(),
            pad4: [0; 8],
        };
        raw::pair(&key, &value)
    }
}
