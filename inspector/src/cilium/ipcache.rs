//! The ipcache: prefix to security identity and, for pods elsewhere, the node they run on.
//!
//! Layout: `struct ipcache_key` and `struct remote_endpoint_info` of Cilium's `bpf/lib/common.h`
//! and `bpf/lib/eps.h`. Two generations: `cilium_ipcache` (up to 1.17) knows IPv4 tunnel endpoints
//! only, `cilium_ipcache_v2` (1.18+) both families.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};

use super::{
    error::{DecodeError, EncodeError},
    layout::Layout,
    order::{HostU16, HostU32},
    raw::{self, assert_sizes, either, raw_struct},
    release::Release,
};

raw_struct! {
    /// Key of both generations (LPM tries), 24 bytes.
    struct IpcacheKey {
        /// Bits of the key that must match: 32 (cluster, padding, family) and the prefix length.
        pub prefix_len: HostU32,
        /// Cluster of the prefix, 0 is this one (1.15+).
        pub cluster_id: HostU16,
        /// Padding, zero. 1.14 has an 8-bit cluster id here.
        pub pad: u8,
        /// 1 for IPv4, 2 for IPv6.
        pub family: u8,
        /// Address; of IPv4 the first 4 bytes, the rest zero.
        pub address: [u8; 16],
    }

    /// Value of `cilium_ipcache`, 12 bytes.
    struct IpcacheV1 {
        /// Security identity.
        pub identity: HostU32,
        /// Tunnel endpoint, 0.0.0.0 if there is none.
        pub tunnel_endpoint: [u8; 4],
        /// 1.14: node id. 1.10 to 1.13: the low byte is the encryption key index. Else padding.
        pub word8: HostU16,
        /// Encryption key index (1.14+).
        pub key: u8,
        /// See [`IpcacheFlags`] (1.16+).
        pub flags: u8,
    }

    /// Value of `cilium_ipcache_v2`, 24 bytes.
    struct IpcacheV2 {
        /// Security identity.
        pub identity: HostU32,
        /// Tunnel endpoint; of IPv4 the first 4 bytes, the rest zero.
        pub tunnel_endpoint: [u8; 16],
        /// Padding, zero.
        pub pad: [u8; 2],
        /// Encryption key index.
        pub key: u8,
        /// See [`IpcacheFlags`].
        pub flags: u8,
    }
}
assert_sizes! { IpcacheKey = 24, IpcacheV1 = 12, IpcacheV2 = 24 }

/// How packets to a prefix are treated.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct IpcacheFlags(pub u8);

impl IpcacheFlags {
    /// Packets are not tunnelled (1.16+).
    pub const SKIP_TUNNEL: u8 = 1;
    /// There is a tunnel endpoint (second generation).
    pub const HAS_TUNNEL_ENDPOINT: u8 = 2;
    /// The tunnel endpoint is an IPv6 address (second generation).
    pub const TUNNEL_ENDPOINT_V6: u8 = 4;
    /// The prefix is in another cluster (1.19+).
    pub const REMOTE_CLUSTER: u8 = 8;

    /// Bits that no known version has a meaning for.
    #[must_use]
    pub fn unknown(self) -> u8 {
        let known = Self::SKIP_TUNNEL
            | Self::HAS_TUNNEL_ENDPOINT
            | Self::TUNNEL_ENDPOINT_V6
            | Self::REMOTE_CLUSTER;
        self.0 & !known
    }
}

/// A security identity; the reserved ones have names.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Identity(pub u32);

impl Identity {
    /// This node itself.
    pub const HOST: Self = Self(1);

    /// The name of a reserved identity.
    #[must_use]
    pub fn reserved_name(self) -> Option<&'static str> {
        Some(match self.0 {
            0 => "unknown",
            1 => "host",
            2 => "world",
            3 => "unmanaged",
            4 => "health",
            5 => "init",
            6 => "remote-node",
            7 => "kube-apiserver",
            8 => "ingress",
            9 => "world-ipv4",
            10 => "world-ipv6",
            _ => return None,
        })
    }
}

/// An ipcache entry of either generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Ipcache {
    /// Address, of which the first [`Ipcache::prefix_len`] bits count.
    pub address: IpAddr,
    /// Prefix length in bits, 0 to 32 or 128.
    pub prefix_len: u8,
    /// Cluster of the prefix, 0 is this one.
    pub cluster_id: u16,
    /// Security identity.
    pub identity: Identity,
    /// Address of the node to which packets are tunnelled.
    pub tunnel_endpoint: Option<IpAddr>,
    /// Encryption key index, 0 is none. Up to 1.13 it is elsewhere:
    /// [`Ipcache::encrypt_key_of`].
    pub encrypt_key: u8,
    /// Flags.
    pub flags: IpcacheFlags,
    /// First generation: node id (1.14), or the encryption key index (1.10 to 1.13). The sizes do
    /// not tell which.
    pub word8: u16,
}

impl Ipcache {
    /// Reads an entry.
    ///
    /// # Errors
    /// [`DecodeError::Size`] if key or value are not as long as `layout` says,
    /// [`DecodeError::Field`] for an unknown address family or an impossible prefix length.
    pub fn decode(layout: &'static Layout, key: &[u8], value: &[u8]) -> Result<Self, DecodeError> {
        let key: &IpcacheKey = raw::key(layout, key)?;
        let address = either::decode(layout, key.family, key.address)?;
        let prefix_len = raw::prefix_len(layout, key.prefix_len.get(), address)?;
        let cluster_id = key.cluster_id.get();
        if layout.generation >= 2 {
            let value: &IpcacheV2 = raw::value(layout, value)?;
            let tunnel_endpoint = if value.flags & IpcacheFlags::TUNNEL_ENDPOINT_V6 != 0 {
                IpAddr::V6(Ipv6Addr::from(value.tunnel_endpoint))
            } else {
                either::v4(value.tunnel_endpoint)
            };
            return Ok(Self {
                address,
                prefix_len,
                cluster_id,
                identity: Identity(value.identity.get()),
                tunnel_endpoint: Some(tunnel_endpoint).filter(|address| !address.is_unspecified()),
                encrypt_key: value.key,
                flags: IpcacheFlags(value.flags),
                word8: 0,
            });
        }
        let value: &IpcacheV1 = raw::value(layout, value)?;
        let tunnel_endpoint = Ipv4Addr::from(value.tunnel_endpoint);
        Ok(Self {
            address,
            prefix_len,
            cluster_id,
            identity: Identity(value.identity.get()),
            tunnel_endpoint: Some(IpAddr::V4(tunnel_endpoint))
                .filter(|address| !address.is_unspecified()),
            encrypt_key: value.key,
            flags: IpcacheFlags(value.flags),
            word8: value.word8.get(),
        })
    }

    /// The encryption key index, for an entry that `release` wrote.
    #[must_use]
    pub fn encrypt_key_of(&self, release: Release) -> u8 {
        if release < Release::V1_13_90 { self.word8.to_le_bytes()[0] } else { self.encrypt_key }
    }

    /// The bytes of key and value in `layout`. A prefix length above that of the address is cut to
    /// it; in the second generation the flag for the tunnel endpoint's family follows the address.
    ///
    /// # Errors
    /// [`EncodeError::Family`] for an IPv6 tunnel endpoint in the first generation,
    /// [`EncodeError::Field`] for a [`Ipcache::word8`] in the second.
    pub fn encode(&self, layout: &'static Layout) -> Result<(Vec<u8>, Vec<u8>), EncodeError> {
        let (family, address) = either::encode(self.address);
        let bits = self.prefix_len.min(raw::address_bits(self.address));
        let key = IpcacheKey {
            prefix_len: (32 + u32::from(bits)).into(),
            cluster_id: self.cluster_id.into(),
            pad: 0,
            family,
            address,
        };
        let identity = self.identity.0.into();
        if layout.generation >= 2 {
            if self.word8 != 0 {
                return Err(EncodeError::Field {
                    map: layout.name,
                    field: "word8",
                    found: self.word8.into(),
                    expected: "0 in this layout, which has no such field",
                });
            }
            let mut flags = self.flags.0;
            let mut tunnel_endpoint = [0; 16];
            if let Some(endpoint) = self.tunnel_endpoint {
                tunnel_endpoint = either::encode(endpoint).1;
                flags &= !IpcacheFlags::TUNNEL_ENDPOINT_V6;
                if endpoint.is_ipv6() {
                    flags |= IpcacheFlags::TUNNEL_ENDPOINT_V6;
                }
            }
            let value =
                IpcacheV2 { identity, tunnel_endpoint, pad: [0; 2], key: self.encrypt_key, flags };
            return Ok(raw::pair(&key, &value));
        }
        let tunnel_endpoint = match self.tunnel_endpoint {
            None => [0; 4],
            Some(IpAddr::V4(endpoint)) => endpoint.octets(),
            Some(address) => return Err(EncodeError::Family { map: layout.name, address }),
        };
        let value = IpcacheV1 {
            identity,
            tunnel_endpoint,
            word8: self.word8.into(),
            key: self.encrypt_key,
            flags: self.flags.0,
        };
        Ok(raw::pair(&key, &value))
    }
}
