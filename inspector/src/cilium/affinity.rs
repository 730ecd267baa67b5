//! Session affinity: which client goes to which backend, and which backends a service with
//! affinity has.
//!
//! Layout: `struct lb4_affinity_key`, `struct lb6_affinity_key`, `struct lb_affinity_val` and
//! `struct lb_affinity_match` of Cilium's `bpf/lib/common.h`, the same from 1.10 to 1.21.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::{
    error::{DecodeError, EncodeError},
    layout::{Family, Layout},
    order::{HostU32, HostU64, NetU16},
    raw::{self, assert_sizes, either, raw_struct},
};

raw_struct! {
    /// Key of the affinity maps: 16 bytes (IPv4, client of 8 bytes) or 24 (IPv6, 16 bytes).
    struct AffinityKey<C> {
        /// Client address (IPv4: the first 4 bytes), or the cookie of its network namespace.
        pub client: C,
        /// Reverse NAT index of the service.
        pub rev_nat_index: NetU16,
        /// Bit 0: the client is a network namespace cookie.
        pub netns: u8,
        /// Padding, zero.
        pub pad: [u8; 5],
    }

    /// Value of the affinity maps, 16 bytes.
    struct AffinityValue {
        /// Datapath clock: seconds of `CLOCK_MONOTONIC`, or jiffies / 256 where the agent chose so.
        pub last_used: HostU64,
        /// Backend id.
        pub backend_id: HostU32,
        /// Padding, zero.
        pub pad: [u8; 4],
    }

    /// Key of `cilium_lb_affinity_match`, 8 bytes.
    struct AffinityMatchKey {
        /// Backend id.
        pub backend_id: HostU32,
        /// Reverse NAT index of the service.
        pub rev_nat_index: NetU16,
        /// Padding, zero.
        pub pad: [u8; 2],
    }
}
assert_sizes! {
    AffinityKey<[u8; 8]> = 16, AffinityKey<[u8; 16]> = 24, AffinityValue = 16, AffinityMatchKey = 8,
}

/// The client of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Client {
    /// A client whose packets arrive.
    Address(IpAddr),
    /// Sockets of the network namespace with this cookie.
    NetnsCookie(u64),
}

/// A session: a client's last backend of a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Affinity {
    /// The client.
    pub client: Client,
    /// Reverse NAT index of the service.
    pub rev_nat_index: u16,
    /// When the session was last used. Datapath clock: seconds of `CLOCK_MONOTONIC`, or
    /// jiffies / 256 where the agent chose so.
    pub last_used: u64,
    /// Id of the backend.
    pub backend_id: u32,
}

impl Affinity {
    /// Reads an entry.
    ///
    /// # Errors
    /// [`DecodeError::Size`] if key or value are not as long as `layout` says.
    pub fn decode(layout: &'static Layout, key: &[u8], value: &[u8]) -> Result<Self, DecodeError> {
        let (client, address, rev_nat_index, netns) = if layout.family == Some(Family::V4) {
            let key: &AffinityKey<[u8; 8]> = raw::key(layout, key)?;
            let mut client = [0; 16];
            client[..8].copy_from_slice(&key.client);
            (client, either::v4(client), key.rev_nat_index, key.netns)
        } else {
            let key: &AffinityKey<[u8; 16]> = raw::key(layout, key)?;
            (key.client, IpAddr::from(key.client), key.rev_nat_index, key.netns)
        };
        let value: &AffinityValue = raw::value(layout, value)?;
        Ok(Self {
            client: if netns & 1 == 0 {
                Client::Address(address)
            } else {
                Client::NetnsCookie(u64::from_le_bytes(raw::halves(client)[0]))
            },
            rev_nat_index: rev_nat_index.get(),
            last_used: value.last_used.get(),
            backend_id: value.backend_id.get(),
        })
    }

    /// The bytes of key and value in `layout`.
    ///
    /// # Errors
    /// [`EncodeError::Family`] for a client of the other family.
    pub fn encode(&self, layout: &'static Layout) -> Result<(Vec<u8>, Vec<u8>), EncodeError> {
        let mut client = [0; 16];
        match self.client {
            Client::Address(address) => {
                raw::check_family(layout, address)?;
                match address {
                    IpAddr::V4(address) => client[..4].copy_from_slice(&address.octets()),
                    IpAddr::V6(address) => client = address.octets(),
                }
            }
            Client::NetnsCookie(cookie) => client[..8].copy_from_slice(&cookie.to_le_bytes()),
        }
        let value = AffinityValue {
            last_used: self.last_used.into(),
            backend_id: self.backend_id.into(),
            pad: [0; 4],
        };
        if layout.family == Some(Family::V4) {
            return Ok(raw::pair(&self.key(raw::halves(client)[0]), &value));
        }
        Ok(raw::pair(&self.key(client), &value))
    }

    fn key<C>(&self, client: C) -> AffinityKey<C> {
        AffinityKey {
            client,
            rev_nat_index: self.rev_nat_index.into(),
            netns: matches!(self.client, Client::NetnsCookie(_)).into(),
            pad: [0; 5],
        }
    }
}

/// That a backend belongs to a service with session affinity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct AffinityMatch {
    /// Id of the backend.
    pub backend_id: u32,
    /// Reverse NAT index of the service.
    pub rev_nat_index: u16,
    /// The value, which has no meaning; zero.
    pub value: u8,
}

impl AffinityMatch {
    /// Reads an entry.
    ///
    /// # Errors
    /// [`DecodeError::Size`] if key or value are not as long as `layout` says.
    pub fn decode(layout: &'static Layout, key: &[u8], value: &[u8]) -> Result<Self, DecodeError> {
        let key: &AffinityMatchKey = raw::key(layout, key)?;
        let value: &u8 = raw::value(layout, value)?;
        Ok(Self {
            backend_id: key.backend_id.get(),
            rev_nat_index: key.rev_nat_index.get(),
            value: *value,
        })
    }

    /// The bytes of key and value.
    #[must_use]
    pub fn encode(&self) -> (Vec<u8>, Vec<u8>) {
        let key = AffinityMatchKey {
            backend_id: self.backend_id.into(),
            rev_nat_index: self.rev_nat_index.into(),
            pad: [0; 2],
        };
        raw::pair(&key, &self.value)
    }
}
