//! The reverse NAT maps: reverse NAT index to the frontend that a reply must come from.
//!
//! Layout: `struct lb4_reverse_nat` and `struct lb6_reverse_nat` of Cilium's `bpf/lib/common.h`,
//! packed, the same from 1.10 to 1.21. One entry per frontend, scope and node address.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::{
    error::DecodeError,
    layout::{Family, Layout},
    order::NetU16,
    raw::{self, RawAddress, assert_sizes, raw_struct},
};

raw_struct! {
    /// Value of the reverse NAT maps: 6 bytes (IPv4) or 18 (IPv6). The key is a [`NetU16`].
    struct ReverseNatValue<A> {
        /// Frontend address.
        pub address: A,
        /// Frontend port.
        pub port: NetU16,
    }
}
assert_sizes! { ReverseNatValue<[u8; 4]> = 6, ReverseNatValue<[u8; 16]> = 18 }

/// A reverse NAT entry of either family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ReverseNat {
    /// Reverse NAT index, as a number (in the map it is in network order).
    pub index: u16,
    /// Frontend address.
    pub address: IpAddr,
    /// Frontend port.
    pub port: u16,
}

impl ReverseNat {
    /// Reads an entry.
    ///
    /// # Errors
    /// [`DecodeError::Size`] if key or value are not as long as `layout` says.
    pub fn decode(layout: &'static Layout, key: &[u8], value: &[u8]) -> Result<Self, DecodeError> {
        match layout.family {
            Some(Family::V4) => Self::decode_as::<[u8; 4]>(layout, key, value),
            _ => Self::decode_as::<[u8; 16]>(layout, key, value),
        }
    }

    fn decode_as<A: RawAddress>(
        layout: &'static Layout,
        key: &[u8],
        value: &[u8],
    ) -> Result<Self, DecodeError> {
        let index: &NetU16 = raw::key(layout, key)?;
        let value: &ReverseNatValue<A> = raw::value(layout, value)?;
        Ok(Self { index: index.get(), address: value.address.to_ip(), port: value.port.get() })
    }

    /// The bytes of key and value.
    #[must_use]
    pub fn encode(&self) -> (Vec<u8>, Vec<u8>) {
        let key = NetU16::new(self.index);
        let port = self.port.into();
        match self.address {
            IpAddr::V4(address) => {
                raw::pair(&key, &ReverseNatValue { address: address.octets(), port })
            }
            IpAddr::V6(address) => {
                raw::pair(&key, &ReverseNatValue { address: address.octets(), port })
            }
        }
    }
}
