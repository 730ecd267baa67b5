//! The health maps: the backend that a health probe's socket is meant for.
//!
//! The value is that of the backends map of the same version.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use zerocopy::IntoBytes;

use super::{
    backends::{BackendState, Body},
    error::{DecodeError, EncodeError},
    layout::Layout,
    order::HostU64,
    proto::Protocol,
    raw,
};

/// A health probe's socket and its backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Health {
    /// Cookie of the socket.
    pub cookie: u64,
    /// Address of the backend.
    pub address: IpAddr,
    /// Port of the backend.
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

impl Health {
    /// Reads an entry.
    ///
    /// # Errors
    /// [`DecodeError::Size`] if key or value are not as long as `layout` says.
    pub fn decode(layout: &'static Layout, key: &[u8], value: &[u8]) -> Result<Self, DecodeError> {
        let cookie = raw::key::<HostU64>(layout, key)?.get();
        let body = Body::decode(layout, value)?;
        let Body { address, port, protocol, state, cluster_id, zone } = body;
        Ok(Self { cookie, address, port, protocol, state, cluster_id, zone })
    }

    /// The bytes of key and value in `layout`.
    ///
    /// # Errors
    /// [`EncodeError`] if the backend is of the other family, or has a cluster or zone that this
    /// generation has no room for.
    pub fn encode(&self, layout: &'static Layout) -> Result<(Vec<u8>, Vec<u8>), EncodeError> {
        let Self { cookie, address, port, protocol, state, cluster_id, zone } = *self;
        let body = Body { address, port, protocol, state, cluster_id, zone };
        Ok((HostU64::new(cookie).as_bytes().to_vec(), body.encode(layout)?))
    }
}
