//! The source NAT maps: how a connection's source is rewritten, and back.
//!
//! Layout: `struct ipv4_nat_entry` and `struct ipv6_nat_entry` of Cilium's `bpf/lib/nat.h`, 40 and
//! 56 bytes from 1.10 to 1.21. Unlike the conntrack key, the key is in natural orientation: source
//! and destination are those of the packet that is rewritten.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use zerocopy::IntoBytes;

use super::{
    error::{DecodeError, EncodeError},
    layout::{Family, Layout},
    order::{HostU64, NetU16},
    proto::Protocol,
    raw::{self, RawAddress, assert_sizes, raw_struct},
    tuple::{Tuple, TupleFlags},
};

raw_struct! {
    /// Value of the NAT maps: 40 bytes (IPv4) or 56 (IPv6).
    struct SnatValue<A, const PAD: usize> {
        /// When the entry was made, datapath clock.
        pub created: HostU64,
        /// Whether a conntrack entry is needed (1.14+; before: whether the source is this host).
        pub needs_ct: HostU64,
        /// Padding, zero.
        pub pad1: [u8; 16],
        /// Address after the rewriting.
        pub to_address: A,
        /// Port after the rewriting.
        pub to_port: NetU16,
        /// Padding, zero.
        pub pad2: [u8; PAD],
    }
}
assert_sizes! { SnatValue<[u8; 4], 2> = 40, SnatValue<[u8; 16], 6> = 56 }

/// One direction of a source NAT mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Snat {
    /// Source of the packet that is rewritten.
    pub source: IpAddr,
    /// Source port.
    pub source_port: u16,
    /// Destination of the packet that is rewritten.
    pub destination: IpAddr,
    /// Destination port.
    pub destination_port: u16,
    /// Protocol.
    pub protocol: Protocol,
    /// Out: the source is rewritten. In: the destination is, back to the original source.
    pub tuple_flags: TupleFlags,
    /// Address after the rewriting.
    pub to_address: IpAddr,
    /// Port after the rewriting.
    pub to_port: u16,
    /// When the entry was made. Datapath clock: seconds of `CLOCK_MONOTONIC`, or jiffies / 256
    /// where the agent chose so.
    pub created: u64,
    /// Whether a conntrack entry is needed (1.14+; before: whether the source is this host).
    pub needs_ct: u64,
}

impl Snat {
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
        let Tuple { daddr, saddr, dport, sport, protocol, flags } = Tuple::decode(layout, key)?;
        let value: &SnatValue<A, PAD> = raw::value(layout, value)?;
        Ok(Self {
            source: saddr,
            source_port: sport,
            destination: daddr,
            destination_port: dport,
            protocol,
            tuple_flags: flags,
            to_address: value.to_address.to_ip(),
            to_port: value.to_port.get(),
            created: value.created.get(),
            needs_ct: value.needs_ct.get(),
        })
    }

    /// The bytes of key and value in `layout`.
    ///
    /// # Errors
    /// [`EncodeError::Family`] if one of the addresses is of the other family.
    pub fn encode(&self, layout: &'static Layout) -> Result<(Vec<u8>, Vec<u8>), EncodeError> {
        raw::check_family(layout, self.to_address)?;
        let key = Self::key(
            layout,
            (self.source, self.source_port),
            (self.destination, self.destination_port),
            self.protocol,
            self.tuple_flags,
        )?;
        let value = match self.to_address {
            IpAddr::V4(address) => self.value::<_, 2>(address.octets()).as_bytes().to_vec(),
            IpAddr::V6(address) => self.value::<_, 6>(address.octets()).as_bytes().to_vec(),
        };
        Ok((key, value))
    }

    /// The bytes of the key alone, of packets from `source` to `destination` (each an address and
    /// a port).
    ///
    /// # Errors
    /// [`EncodeError::Family`] if one of the addresses is of the other family.
    pub fn key(
        layout: &'static Layout,
        source: (IpAddr, u16),
        destination: (IpAddr, u16),
        protocol: Protocol,
        flags: TupleFlags,
    ) -> Result<Vec<u8>, EncodeError> {
        Tuple {
            daddr: destination.0,
            saddr: source.0,
            dport: destination.1,
            sport: source.1,
            protocol,
            flags,
        }
        .encode(layout)
    }

    fn value<A, const PAD: usize>(&self, to_address: A) -> SnatValue<A, PAD> {
        SnatValue {
            created: self.created.into(),
            needs_ct: self.needs_ct.into(),
            pad1: [0; 16],
            to_address,
            to_port: self.to_port.into(),
            pad2: [0; PAD],
        }
    }
}
