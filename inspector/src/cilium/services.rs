//! The services maps: frontends (slot 0, the master entry) and their backend slots.
//!
//! Layout: `struct lb4_key`, `struct lb6_key` and `struct lb4_service` of Cilium's
//! `bpf/lib/common.h`; the sizes are the same from 1.10 to 1.21, fields were taken from padding.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{
    error::DecodeError,
    flags::ServiceFlags,
    layout::{Family, Layout},
    order::{HostU16, HostU32, NetU16},
    proto::Protocol,
    raw,
};

/// Key of `cilium_lb4_services_v2`, 12 bytes.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Service4Key {
    /// Frontend address.
    pub address: [u8; 4],
    /// Frontend port; 0 in a wildcard entry.
    pub port: NetU16,
    /// 0 for the master entry, 1.. for the backend slots.
    pub slot: HostU16,
    /// IP protocol number; 0 (any) before 1.17 and in wildcard entries.
    pub proto: u8,
    /// 0 external, 1 internal.
    pub scope: u8,
    /// Padding, zero.
    pub pad: [u8; 2],
}

/// Key of `cilium_lb6_services_v2`, 24 bytes.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Service6Key {
    /// Frontend address.
    pub address: [u8; 16],
    /// Frontend port; 0 in a wildcard entry.
    pub port: NetU16,
    /// 0 for the master entry, 1.. for the backend slots.
    pub slot: HostU16,
    /// IP protocol number; 0 (any) before 1.17 and in wildcard entries.
    pub proto: u8,
    /// 0 external, 1 internal.
    pub scope: u8,
    /// Padding, zero.
    pub pad: [u8; 2],
}

/// Value of both services maps, 12 bytes.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct ServiceValue {
    /// Slots: backend id. Master: see [`ServiceValue::affinity_timeout_s`],
    /// [`ServiceValue::algorithm`] and [`ServiceValue::l7_proxy_port`].
    pub union: HostU32,
    /// Master: number of selectable backends. Slots: 0.
    pub count: HostU16,
    /// Reverse NAT index, in network order unlike its neighbours.
    pub rev_nat_index: NetU16,
    /// Flag bits 0 to 7, see [`ServiceFlags`].
    pub flags: u8,
    /// Flag bits 8 to 15.
    pub flags2: u8,
    /// Master, 1.17+: backends that own slots behind `count` but are not selectable.
    pub qcount: HostU16,
}

impl ServiceValue {
    /// The 16 flag bits.
    #[must_use]
    pub fn flags(&self) -> ServiceFlags {
        ServiceFlags::from_bytes(self.flags, self.flags2)
    }

    /// Session affinity timeout in seconds (meaningful in a master entry with the affinity flag).
    #[must_use]
    pub fn affinity_timeout_s(&self) -> u32 {
        self.union.get() & 0x00ff_ffff
    }

    /// Algorithm byte of a master entry: 0 the node's default, 1 random, 2 Maglev (1.17+).
    #[must_use]
    pub fn algorithm(&self) -> u8 {
        (self.union.get() >> 24) as u8
    }

    /// Proxy port of an L7 master entry: its low 16 bits, already in network order.
    #[must_use]
    pub fn l7_proxy_port(&self) -> u16 {
        let bytes = self.union.as_bytes();
        u16::from_be_bytes([bytes[0], bytes[1]])
    }

    /// Reads a value.
    ///
    /// # Errors
    /// [`DecodeError::Size`] if `bytes` are not 12.
    pub fn decode(map: &'static str, bytes: &[u8]) -> Result<Self, DecodeError> {
        Self::read_from_bytes(bytes).map_err(|_| DecodeError::Size {
            map,
            part: "value",
            expected: size_of::<Self>(),
            found: bytes.len(),
        })
    }
}

/// From where a frontend's backends are seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// From outside the cluster.
    External,
    /// From sockets and pods of the cluster (printed as `/i`).
    Internal,
    /// A value that no Cilium version writes.
    #[serde(untagged)]
    Other(u8),
}

impl From<u8> for Scope {
    fn from(value: u8) -> Self {
        match value {
            0 => Self::External,
            1 => Self::Internal,
            other => Self::Other(other),
        }
    }
}

impl From<Scope> for u8 {
    fn from(value: Scope) -> Self {
        match value {
            Scope::External => 0,
            Scope::Internal => 1,
            Scope::Other(other) => other,
        }
    }
}

/// A key of either services map, without regard to the family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ServiceKey {
    /// Frontend address.
    pub address: IpAddr,
    /// Frontend port, 0 in a wildcard entry.
    pub port: u16,
    /// Protocol, [`Protocol::ANY`] before 1.17.
    pub protocol: Protocol,
    /// Scope.
    pub scope: Scope,
    /// 0 for the master entry, 1.. for the backend slots.
    pub slot: u16,
}

impl From<&Service4Key> for ServiceKey {
    fn from(key: &Service4Key) -> Self {
        Self {
            address: IpAddr::V4(Ipv4Addr::from(key.address)),
            port: key.port.get(),
            protocol: Protocol(key.proto),
            scope: key.scope.into(),
            slot: key.slot.get(),
        }
    }
}

impl From<&Service6Key> for ServiceKey {
    fn from(key: &Service6Key) -> Self {
        Self {
            address: IpAddr::V6(Ipv6Addr::from(key.address)),
            port: key.port.get(),
            protocol: Protocol(key.proto),
            scope: key.scope.into(),
            slot: key.slot.get(),
        }
    }
}

impl ServiceKey {
    /// Reads a key: 12 bytes are IPv4, 24 are IPv6.
    ///
    /// # Errors
    /// [`DecodeError::Size`] for any other length.
    pub fn decode(map: &'static str, bytes: &[u8]) -> Result<Self, DecodeError> {
        if let Ok(key) = Service4Key::ref_from_bytes(bytes) {
            return Ok(key.into());
        }
        if let Ok(key) = Service6Key::ref_from_bytes(bytes) {
            return Ok(key.into());
        }
        Err(DecodeError::Size { map, part: "key", expected: 12, found: bytes.len() })
    }

    /// The bytes of this key, 12 or 24 by the family of the address.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match self.address {
            IpAddr::V4(address) => Service4Key {
                address: address.octets(),
                port: self.port.into(),
                slot: self.slot.into(),
                proto: self.protocol.0,
                scope: self.scope.into(),
                pad: [0; 2],
            }
            .as_bytes()
            .to_vec(),
            IpAddr::V6(address) => Service6Key {
                address: address.octets(),
                port: self.port.into(),
                slot: self.slot.into(),
                proto: self.protocol.0,
                scope: self.scope.into(),
                pad: [0; 2],
            }
            .as_bytes()
            .to_vec(),
        }
    }

    /// Whether this is the master entry of a frontend.
    #[must_use]
    pub fn is_master(&self) -> bool {
        self.slot == 0
    }

    /// Whether this is a wildcard (drop) entry of Cilium 1.19 and later.
    #[must_use]
    pub fn is_wildcard(&self) -> bool {
        self.slot == 0 && self.port == 0 && self.protocol == Protocol::ANY
    }
}

/// An entry of the services maps: key and value together, without regard to the family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Service {
    /// The key.
    #[serde(flatten)]
    pub key: ServiceKey,
    /// Slots: backend id. Master: what [`ServiceValue::affinity_timeout_s`],
    /// [`ServiceValue::algorithm`] and [`ServiceValue::l7_proxy_port`] make of it.
    pub union: u32,
    /// Master: number of selectable backends.
    pub count: u16,
    /// Master, 1.17+: number of backends behind `count` that are not selectable.
    pub qcount: u16,
    /// Reverse NAT index.
    pub rev_nat_index: u16,
    /// Flags.
    pub flags: ServiceFlags,
}

impl Service {
    /// Reads an entry.
    ///
    /// # Errors
    /// [`DecodeError::Size`] if key or value are not as long as `layout` says.
    pub fn decode(layout: &'static Layout, key: &[u8], value: &[u8]) -> Result<Self, DecodeError> {
        let key = match layout.family {
            Some(Family::V4) => raw::key::<Service4Key>(layout, key)?.into(),
            _ => raw::key::<Service6Key>(layout, key)?.into(),
        };
        let value: &ServiceValue = raw::value(layout, value)?;
        Ok(Self {
            key,
            union: value.union.get(),
            count: value.count.get(),
            qcount: value.qcount.get(),
            rev_nat_index: value.rev_nat_index.get(),
            flags: value.flags(),
        })
    }

    /// The raw value.
    #[must_use]
    pub fn value(&self) -> ServiceValue {
        let [flags, flags2] = self.flags.to_bytes();
        ServiceValue {
            union: self.union.into(),
            count: self.count.into(),
            rev_nat_index: self.rev_nat_index.into(),
            flags,
            flags2,
            qcount: self.qcount.into(),
        }
    }

    /// The bytes of key and value.
    #[must_use]
    pub fn encode(&self) -> (Vec<u8>, Vec<u8>) {
        (self.key.encode(), self.value().as_bytes().to_vec())
    }
}
