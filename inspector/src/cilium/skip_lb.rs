//! The maps of frontends that the sockets of one network namespace reach directly, past a local
//! redirect policy (1.16+).
//!
//! Layout: `struct skip_lb4_key` and `struct skip_lb6_key` of Cilium's `bpf/lib/lb.h`.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::{
    error::DecodeError,
    layout::{Family, Layout},
    order::{HostU64, NetU16},
    raw::{self, RawAddress, assert_sizes, raw_struct},
};

raw_struct! {
    /// Key of the maps: 16 bytes (IPv4) or 32 (IPv6).
    struct SkipLbKey<A, const PAD: usize> {
        /// Cookie of the network namespace.
        pub netns_cookie: HostU64,
        /// Frontend address.
        pub address: A,
        /// Frontend port.
        pub port: NetU16,
        /// Padding, zero.
        pub pad: [u8; PAD],
    }
}
assert_sizes! { SkipLbKey<[u8; 4], 2> = 16, SkipLbKey<[u8; 16], 6> = 32 }

/// A frontend that a network namespace reaches directly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SkipLb {
    /// Cookie of the network namespace.
    pub netns_cookie: u64,
    /// Frontend address.
    pub address: IpAddr,
    /// Frontend port.
    pub port: u16,
    /// The value, which has no meaning.
    pub value: u8,
}

impl SkipLb {
    /// Reads an entry.
    ///
    /// # Errors
    /// [`DecodeError::Size`] if key or value are not as long as `layout` says.
    pub fn decode(layout: &'static Layout, key: &[u8], value: &[u8]) -> Result<Self, DecodeError> {
        match layout.family {
            Some(Family::V4) => Self::decode_as::<[u8; 4], 2>(layout, key, value),
            _ => Self::decode_as::<[u8; 16], 6>(layout, key, value),
        }
    }

    fn decode_as<A: RawAddress, const PAD: usize>(
        layout: &'static Layout,
        key: &[u8],
        value: &[u8],
    ) -> Result<Self, DecodeError> {
        let key: &SkipLbKey<A, PAD> = raw::key(layout, key)?;
        let value: &u8 = raw::value(layout, value)?;
        Ok(Self {
            netns_cookie: key.netns_cookie.get(),
            address: key.address.to_ip(),
            port: key.port.get(),
            value: *value,
        })
    }

    /// The bytes of key and value.
    #[must_use]
    pub fn encode(&self) -> (Vec<u8>, Vec<u8>) {
        match self.address {
            IpAddr::V4(address) => raw::pair(&self.key::<_, 2>(address.octets()), &self.value),
            IpAddr::V6(address) => raw::pair(&self.key::<_, 6>(address.octets()), &self.value),
        }
    }

    fn key<A, const PAD: usize>(&self, address: A) -> SkipLbKey<A, PAD> {
        SkipLbKey {
            netns_cookie: self.netns_cookie.into(),
            address,
            port: self.port.into(),
            pad: [0; PAD],
        }
    }
}
