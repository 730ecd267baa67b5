//! The neighbour maps of the node port code: the Ethernet address from which a client's packets
//! came, to which replies go where the kernel does not know better.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::{
    error::DecodeError,
    layout::{Family, Layout},
    mac::Mac,
    raw::{self, assert_sizes, raw_struct},
};

raw_struct! {
    /// Value of the neighbour maps, 8 bytes. The key is the address.
    struct NeighValue {
        /// Ethernet address.
        pub mac: [u8; 6],
        /// Padding, zero.
        pub pad: [u8; 2],
    }
}
assert_sizes! { NeighValue = 8 }

/// A client and its Ethernet address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NodeportNeigh {
    /// Client address.
    pub address: IpAddr,
    /// Ethernet address. For a client behind a device without Ethernet headers these are bytes of
    /// its first packet (seen in 1.13 and 1.18), of no use to anyone.
    pub mac: Mac,
}

impl NodeportNeigh {
    /// Reads an entry.
    ///
    /// # Errors
    /// [`DecodeError::Size`] if key or value are not as long as `layout` says.
    pub fn decode(layout: &'static Layout, key: &[u8], value: &[u8]) -> Result<Self, DecodeError> {
        let address = if layout.family == Some(Family::V4) {
            IpAddr::from(*raw::key::<[u8; 4]>(layout, key)?)
        } else {
            IpAddr::from(*raw::key::<[u8; 16]>(layout, key)?)
        };
        let value: &NeighValue = raw::value(layout, value)?;
        Ok(Self { address, mac: Mac(value.mac) })
    }

    /// The bytes of key and value.
    #[must_use]
    pub fn encode(&self) -> (Vec<u8>, Vec<u8>) {
        let value = NeighValue { mac: self.mac.0, pad: [0; 2] };
        match self.address {
            IpAddr::V4(address) => raw::pair(&address.octets(), &value),
            IpAddr::V6(address) => raw::pair(&address.octets(), &value),
        }
    }
}
