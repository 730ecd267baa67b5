//! The L2 responder maps: for which addresses this node answers ARP requests (IPv4) or neighbour
//! solicitations (IPv6, 1.19+), and on which device.
//!
//! Layout: `struct l2_responder_v4_key`, `struct l2_responder_v6_key` and
//! `struct l2_responder_stats` of Cilium's `bpf/lib/l2_responder.h`. An entry alone does not mean
//! that the node answers: the program falls silent when the agent's sign of life
//! ([`AGENT_LIVENESS`](super::runtime_config::AGENT_LIVENESS)) is too old.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::{
    error::DecodeError,
    layout::{Family, Layout},
    order::{HostU32, HostU64},
    raw::{self, assert_sizes, raw_struct},
};

raw_struct! {
    /// Key of `cilium_l2_responder_v4`, 8 bytes.
    struct L2Responder4Key {
        /// Address that is asked for.
        pub address: [u8; 4],
        /// Index of the device on which the question arrives.
        pub ifindex: HostU32,
    }

    /// Key of `cilium_l2_responder_v6`, 24 bytes.
    struct L2Responder6Key {
        /// Address that is asked for.
        pub address: [u8; 16],
        /// Index of the device on which the question arrives.
        pub ifindex: HostU32,
        /// Padding, zero.
        pub pad: [u8; 4],
    }
}
assert_sizes! { L2Responder4Key = 8, L2Responder6Key = 24 }

/// An address for which this node answers on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct L2Responder {
    /// Address that is asked for.
    pub address: IpAddr,
    /// Index of the device.
    pub ifindex: u32,
    /// Answers sent so far; 0 if nobody asked.
    pub answers: u64,
}

impl L2Responder {
    /// Reads an entry.
    ///
    /// # Errors
    /// [`DecodeError::Size`] if key or value are not as long as `layout` says.
    pub fn decode(layout: &'static Layout, key: &[u8], value: &[u8]) -> Result<Self, DecodeError> {
        let (address, ifindex) = if layout.family == Some(Family::V4) {
            let key: &L2Responder4Key = raw::key(layout, key)?;
            (IpAddr::from(key.address), key.ifindex)
        } else {
            let key: &L2Responder6Key = raw::key(layout, key)?;
            (IpAddr::from(key.address), key.ifindex)
        };
        let answers: &HostU64 = raw::value(layout, value)?;
        Ok(Self { address, ifindex: ifindex.get(), answers: answers.get() })
    }

    /// The bytes of key and value.
    #[must_use]
    pub fn encode(&self) -> (Vec<u8>, Vec<u8>) {
        let ifindex = self.ifindex.into();
        let value = HostU64::new(self.answers);
        match self.address {
            IpAddr::V4(address) => {
                raw::pair(&L2Responder4Key { address: address.octets(), ifindex }, &value)
            }
            IpAddr::V6(address) => {
                let key = L2Responder6Key { address: address.octets(), ifindex, pad: [0; 4] };
                raw::pair(&key, &value)
            }
        }
    }
}
