//! The backends maps: backend id to address and state.
//!
//! Layout: `struct lb4_backend` and `struct lb6_backend` of Cilium's `bpf/lib/common.h`. Three
//! generations: 1.10 has keys of 2 bytes, 1.11 to 1.13 of 4; from 1.14 the value has 4 bytes more,
//! for the cluster id and (1.16) the zone. Within the third generation 1.14 has an 8-bit cluster
//! id where later versions have 16 bits; its neighbour byte is padding and zero, so that one
//! decoder serves all.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use zerocopy::IntoBytes;

use super::{
    error::{DecodeError, EncodeError},
    layout::{Family, Layout},
    order::{HostU16, HostU32, NetU16},
    proto::Protocol,
    raw::{self, RawAddress, assert_sizes, raw_struct},
};

raw_struct! {
    /// The part of a backend value that all generations have: 8 bytes (IPv4) or 20 (IPv6).
    struct BackendHead<A> {
        /// Address of the backend.
        pub address: A,
        /// Port of the backend.
        pub port: NetU16,
        /// IP protocol number from 1.17, 0 before. The datapath does not use it.
        pub proto: u8,
        /// State; padding (zero) in 1.10 and 1.11.
        pub state: u8,
    }

    /// What the third generation adds, 4 bytes.
    struct BackendTail {
        /// Cluster of the backend, 0 is this one.
        pub cluster_id: HostU16,
        /// Index into the agent's zone table, 0 is none (1.16+).
        pub zone: u8,
        /// Padding, zero.
        pub pad: u8,
    }

    /// Value of the third generation (1.14+): 12 bytes (IPv4) or 24 (IPv6).
    struct BackendV3<A> {
        /// As in the older generations.
        pub head: BackendHead<A>,
        /// Cluster and zone.
        pub tail: BackendTail,
    }
}
assert_sizes! {
    BackendHead<[u8; 4]> = 8, BackendHead<[u8; 16]> = 20,
    BackendV3<[u8; 4]> = 12, BackendV3<[u8; 16]> = 24,
}

/// Whether new connections are sent to a backend, as the backends map says it.
///
/// From 1.18 a quarantined backend is `active` here; only its place behind the frontend's count
/// tells that it is quarantined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BackendState {
    /// Takes new connections.
    Active,
    /// Its pod is going away ("terminating-not-serving" too).
    Terminating,
    /// Fails its health check.
    Quarantined,
    /// Taken out by hand.
    Maintenance,
    /// A value that no Cilium version writes.
    #[serde(untagged)]
    Other(u8),
}

impl BackendState {
    /// The word that Cilium prints; `None` for a value that it has no word for.
    #[must_use]
    pub fn as_str(self) -> Option<&'static str> {
        match self {
            Self::Active => Some("active"),
            Self::Terminating => Some("terminating"),
            Self::Quarantined => Some("quarantined"),
            Self::Maintenance => Some("maintenance"),
            Self::Other(_) => None,
        }
    }
}

impl From<u8> for BackendState {
    fn from(value: u8) -> Self {
        match value {
            0 => Self::Active,
            1 => Self::Terminating,
            2 => Self::Quarantined,
            3 => Self::Maintenance,
            other => Self::Other(other),
        }
    }
}

impl From<BackendState> for u8 {
    fn from(value: BackendState) -> Self {
        match value {
            BackendState::Active => 0,
            BackendState::Terminating => 1,
            BackendState::Quarantined => 2,
            BackendState::Maintenance => 3,
            BackendState::Other(other) => other,
        }
    }
}

/// A backend, without regard to family and generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Backend {
    /// Id, by which service slots refer to it.
    pub id: u32,
    /// Address.
    pub address: IpAddr,
    /// Port.
    pub port: u16,
    /// Protocol, [`Protocol::ANY`] before 1.17.
    pub protocol: Protocol,
    /// State.
    pub state: BackendState,
    /// Cluster, 0 is this one.
    pub cluster_id: u16,
    /// Index into the agent's zone table, 0 is none.
    pub zone: u8,
}

impl Backend {
    /// Reads an entry.
    ///
    /// # Errors
    /// [`DecodeError::Size`] if key or value are not as long as `layout` says.
    pub fn decode(layout: &'static Layout, key: &[u8], value: &[u8]) -> Result<Self, DecodeError> {
        let id = if layout.key_size == 2 {
            raw::key::<HostU16>(layout, key)?.get().into()
        } else {
            raw::key::<HostU32>(layout, key)?.get()
        };
        let body = Body::decode(layout, value)?;
        let Body { address, port, protocol, state, cluster_id, zone } = body;
        Ok(Self { id, address, port, protocol, state, cluster_id, zone })
    }

    /// The bytes of key and value in `layout`.
    ///
    /// # Errors
    /// [`EncodeError`] if the backend is of the other family, or has an id, cluster or zone that
    /// this generation has no room for.
    pub fn encode(&self, layout: &'static Layout) -> Result<(Vec<u8>, Vec<u8>), EncodeError> {
        let Self { id, address, port, protocol, state, cluster_id, zone } = *self;
        let key = if layout.key_size == 2 {
            let id = u16::try_from(id).map_err(|_| EncodeError::Field {
                map: layout.name,
                field: "id",
                found: id.into(),
                expected: "at most 65535 in this layout",
            })?;
            HostU16::new(id).as_bytes().to_vec()
        } else {
            HostU32::new(id).as_bytes().to_vec()
        };
        let body = Body { address, port, protocol, state, cluster_id, zone };
        Ok((key, body.encode(layout)?))
    }
}

/// A backend value, which the health maps hold as well.
#[derive(Debug, Clone, Copy)]
pub(super) struct Body {
    pub address: IpAddr,
    pub port: u16,
    pub protocol: Protocol,
    pub state: BackendState,
    pub cluster_id: u16,
    pub zone: u8,
}

impl Body {
    pub fn decode(layout: &'static Layout, value: &[u8]) -> Result<Self, DecodeError> {
        match layout.family {
            Some(Family::V4) => Self::decode_as::<[u8; 4]>(layout, value),
            _ => Self::decode_as::<[u8; 16]>(layout, value),
        }
    }

    fn decode_as<A: RawAddress>(
        layout: &'static Layout,
        value: &[u8],
    ) -> Result<Self, DecodeError> {
        let (head, cluster_id, zone) = if layout.generation >= 3 {
            let value: &BackendV3<A> = raw::value(layout, value)?;
            (&value.head, value.tail.cluster_id.get(), value.tail.zone)
        } else {
            (raw::value::<BackendHead<A>>(layout, value)?, 0, 0)
        };
        Ok(Self {
            address: head.address.to_ip(),
            port: head.port.get(),
            protocol: Protocol(head.proto),
            state: head.state.into(),
            cluster_id,
            zone,
        })
    }

    pub fn encode(&self, layout: &'static Layout) -> Result<Vec<u8>, EncodeError> {
        raw::check_family(layout, self.address)?;
        let mut bytes = match self.address {
            IpAddr::V4(address) => self.head(address.octets()).as_bytes().to_vec(),
            IpAddr::V6(address) => self.head(address.octets()).as_bytes().to_vec(),
        };
        if layout.generation >= 3 {
            let tail = BackendTail { cluster_id: self.cluster_id.into(), zone: self.zone, pad: 0 };
            bytes.extend_from_slice(tail.as_bytes());
        } else {
            for (field, found) in
                [("cluster id", self.cluster_id.into()), ("zone", u64::from(self.zone))]
            {
                if found != 0 {
                    let expected = "0 in this layout, which has no such field";
                    return Err(EncodeError::Field { map: layout.name, field, found, expected });
                }
            }
        }
        Ok(bytes)
    }

    fn head<A: RawAddress>(&self, address: A) -> BackendHead<A> {
        BackendHead {
            address,
            port: self.port.into(),
            proto: self.protocol.0,
            state: self.state.into(),
        }
    }
}
