//! The source range maps: which client prefixes may (or may not) use a frontend.
//!
//! Layout: `struct lb4_src_range_key` and `struct lb6_src_range_key` of Cilium's
//! `bpf/lib/common.h`. Whether the prefixes allow or deny, and whether they are looked at at all,
//! is in the flags of the frontend's master entry: from 1.19 on entries exist for every frontend of
//! a service, also for those that do not check them.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::{
    error::DecodeError,
    layout::{Family, Layout},
    order::{HostU32, NetU16},
    raw::{self, RawAddress, assert_sizes, raw_struct},
};

raw_struct! {
    /// Key of the source range maps (LPM tries): 12 bytes (IPv4) or 24 (IPv6).
    struct SourceRangeKey<A> {
        /// Bits of the key that must match: 32 (index and padding) and the prefix length.
        pub prefix_len: HostU32,
        /// Reverse NAT index of the frontend.
        pub rev_nat_index: NetU16,
        /// Padding, zero. Part of the prefix: an entry in which it is not is never found.
        pub pad: [u8; 2],
        /// Client prefix.
        pub address: A,
    }
}
assert_sizes! { SourceRangeKey<[u8; 4]> = 12, SourceRangeKey<[u8; 16]> = 24 }

/// A client prefix of a frontend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SourceRange {
    /// Reverse NAT index of the frontend.
    pub rev_nat_index: u16,
    /// Client address, of which the first [`SourceRange::prefix_len`] bits count.
    pub address: IpAddr,
    /// Prefix length of the client addresses in bits, 0 to 32 or 128.
    pub prefix_len: u8,
    /// The value, which has no meaning; zero.
    pub value: u8,
}

impl SourceRange {
    /// Reads an entry.
    ///
    /// # Errors
    /// [`DecodeError::Size`] if key or value are not as long as `layout` says,
    /// [`DecodeError::Field`] for a prefix length that does not cover the index or is longer than
    /// the key.
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
        let key: &SourceRangeKey<A> = raw::key(layout, key)?;
        let value: &u8 = raw::value(layout, value)?;
        let address = key.address.to_ip();
        Ok(Self {
            rev_nat_index: key.rev_nat_index.get(),
            address,
            prefix_len: raw::prefix_len(layout, key.prefix_len.get(), address)?,
            value: *value,
        })
    }

    /// The bytes of key and value. A prefix length above that of the address is cut to it.
    #[must_use]
    pub fn encode(&self) -> (Vec<u8>, Vec<u8>) {
        match self.address {
            IpAddr::V4(address) => raw::pair(&self.key(address.octets()), &self.value),
            IpAddr::V6(address) => raw::pair(&self.key(address.octets()), &self.value),
        }
    }

    fn key<A>(&self, address: A) -> SourceRangeKey<A> {
        let bits = self.prefix_len.min(raw::address_bits(self.address));
        SourceRangeKey {
            prefix_len: (32 + u32::from(bits)).into(),
            rev_nat_index: self.rev_nat_index.into(),
            pad: [0; 2],
            address,
        }
    }
}
