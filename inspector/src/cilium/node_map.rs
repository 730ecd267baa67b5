//! The node map: node address to node id.
//!
//! Layout: `struct node_key`, `struct node_value` of Cilium's `bpf/lib/common.h`. Two generations:
//! `cilium_node_map` (1.14+), `cilium_node_map_v2` (1.16+), whose value has an encryption key too.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use zerocopy::IntoBytes;

use super::{
    error::{DecodeError, EncodeError},
    layout::Layout,
    order::HostU16,
    raw::{self, assert_sizes, either, raw_struct},
};

raw_struct! {
    /// Key of both generations, 20 bytes.
    struct NodeKey {
        /// Padding, zero.
        pub pad: [u8; 3],
        /// 1 for IPv4, 2 for IPv6.
        pub family: u8,
        /// Address; of IPv4 the first 4 bytes, the rest zero.
        pub address: [u8; 16],
    }

    /// Value of `cilium_node_map_v2`, 4 bytes. That of `cilium_node_map` is the id alone.
    struct NodeValueV2 {
        /// Node id, which only this node knows.
        pub id: HostU16,
        /// SPI (index of the encryption key), 0 is none.
        pub spi: u8,
        /// Padding, zero.
        pub pad: u8,
    }
}
assert_sizes! { NodeKey = 20, NodeValueV2 = 4 }

/// An address of a node of the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Node {
    /// Address.
    pub address: IpAddr,
    /// Node id, which only this node knows.
    pub id: u16,
    /// SPI (index of the encryption key), 0 is none; 0 in the first generation.
    pub spi: u8,
}

impl Node {
    /// Reads an entry.
    ///
    /// # Errors
    /// [`DecodeError::Size`] if key or value are not as long as `layout` says,
    /// [`DecodeError::Field`] for an unknown address family.
    pub fn decode(layout: &'static Layout, key: &[u8], value: &[u8]) -> Result<Self, DecodeError> {
        let key: &NodeKey = raw::key(layout, key)?;
        let address = either::decode(layout, key.family, key.address)?;
        if layout.generation >= 2 {
            let value: &NodeValueV2 = raw::value(layout, value)?;
            return Ok(Self { address, id: value.id.get(), spi: value.spi });
        }
        let id: &HostU16 = raw::value(layout, value)?;
        Ok(Self { address, id: id.get(), spi: 0 })
    }

    /// The bytes of key and value in `layout`.
    ///
    /// # Errors
    /// [`EncodeError::Field`] for an SPI in the first generation.
    pub fn encode(&self, layout: &'static Layout) -> Result<(Vec<u8>, Vec<u8>), EncodeError> {
        let (family, address) = either::encode(self.address);
        let key = NodeKey { pad: [0; 3], family, address };
        let value = NodeValueV2 { id: self.id.into(), spi: self.spi, pad: 0 };
        if layout.generation >= 2 {
            return Ok(raw::pair(&key, &value));
        }
        if self.spi != 0 {
            return Err(EncodeError::Field {
                map: layout.name,
                field: "spi",
                found: self.spi.into(),
                expected: "0 in this layout, which has no such field",
            });
        }
        Ok((key.as_bytes().to_vec(), value.id.as_bytes().to_vec()))
    }
}
