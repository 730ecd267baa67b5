//! The connection tuple that the conntrack and NAT maps share as their key.
//!
//! Layout: `struct ipv4_ct_tuple` and `struct ipv6_ct_tuple` of Cilium's `bpf/lib/common.h`,
//! packed, the same from 1.10 to 1.21. The names of the fields are Cilium's; which of the two
//! addresses is the sender's depends on the map and on the flags, see
//! [`conntrack`](super::conntrack) and [`snat`](super::snat).

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use zerocopy::IntoBytes;

use super::{
    error::{DecodeError, EncodeError},
    layout::{Family, Layout},
    order::NetU16,
    proto::Protocol,
    raw::{self, RawAddress, assert_sizes, raw_struct},
};

raw_struct! {
    /// Key of the conntrack and NAT maps: 14 bytes (IPv4) or 38 (IPv6).
    struct TupleKey<A> {
        /// First address.
        pub daddr: A,
        /// Second address.
        pub saddr: A,
        /// First port.
        pub dport: NetU16,
        /// Second port.
        pub sport: NetU16,
        /// IP protocol number.
        pub nexthdr: u8,
        /// See [`TupleFlags`].
        pub flags: u8,
    }
}
assert_sizes! { TupleKey<[u8; 4]> = 14, TupleKey<[u8; 16]> = 38 }

/// Flags of a tuple.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct TupleFlags(pub u8);

impl TupleFlags {
    /// Towards the endpoint; without it, away from it (`TUPLE_F_OUT` is 0).
    pub const IN: u8 = 1;
    /// About a connection, not of it (ICMP).
    pub const RELATED: u8 = 2;
    /// From a client to a frontend.
    pub const SERVICE: u8 = 4;

    /// Towards the endpoint.
    #[must_use]
    pub fn is_in(self) -> bool {
        self.0 & Self::IN != 0
    }

    /// About a connection, not of it (ICMP).
    #[must_use]
    pub fn is_related(self) -> bool {
        self.0 & Self::RELATED != 0
    }

    /// From a client to a frontend.
    #[must_use]
    pub fn is_service(self) -> bool {
        self.0 & Self::SERVICE != 0
    }

    /// The word that `cilium-dbg` prints: `SVC`, `IN` or `OUT`.
    #[must_use]
    pub fn direction(self) -> &'static str {
        if self.is_service() {
            "SVC"
        } else if self.is_in() {
            "IN"
        } else {
            "OUT"
        }
    }
}

/// A tuple of either family, with the fields as they stand in the map.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tuple {
    pub daddr: IpAddr,
    pub saddr: IpAddr,
    pub dport: u16,
    pub sport: u16,
    pub protocol: Protocol,
    pub flags: TupleFlags,
}

impl Tuple {
    pub fn decode(layout: &'static Layout, key: &[u8]) -> Result<Self, DecodeError> {
        match layout.family {
            Some(Family::V4) => Self::decode_as::<[u8; 4]>(layout, key),
            _ => Self::decode_as::<[u8; 16]>(layout, key),
        }
    }

    fn decode_as<A: RawAddress>(layout: &'static Layout, key: &[u8]) -> Result<Self, DecodeError> {
        let key: &TupleKey<A> = raw::key(layout, key)?;
        Ok(Self {
            daddr: key.daddr.to_ip(),
            saddr: key.saddr.to_ip(),
            dport: key.dport.get(),
            sport: key.sport.get(),
            protocol: Protocol(key.nexthdr),
            flags: TupleFlags(key.flags),
        })
    }

    pub fn encode(&self, layout: &'static Layout) -> Result<Vec<u8>, EncodeError> {
        raw::check_family(layout, self.daddr)?;
        match (self.daddr, self.saddr) {
            (IpAddr::V4(daddr), IpAddr::V4(saddr)) => {
                Ok(self.key(daddr.octets(), saddr.octets()).as_bytes().to_vec())
            }
            (IpAddr::V6(daddr), IpAddr::V6(saddr)) => {
                Ok(self.key(daddr.octets(), saddr.octets()).as_bytes().to_vec())
            }
            (_, address) => Err(EncodeError::Family { map: layout.name, address }),
        }
    }

    fn key<A: RawAddress>(&self, daddr: A, saddr: A) -> TupleKey<A> {
        TupleKey {
            daddr,
            saddr,
            dport: self.dport.into(),
            sport: self.sport.into(),
            nexthdr: self.protocol.0,
            flags: self.flags.0,
        }
    }
}
