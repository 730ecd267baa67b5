//! Counters of opened and closed connections per frontend and zone, `cilium_lb_act` (1.16+, where
//! the agent was asked to count).
//!
//! Layout: `struct lb_act_key` and `struct lb_act_value` of Cilium's `bpf/lib/act.h`.

use serde::{Deserialize, Serialize};

use super::{
    error::DecodeError,
    layout::Layout,
    order::{HostU32, NetU16},
    raw::{self, assert_sizes, raw_struct},
};

raw_struct! {
    /// Key of `cilium_lb_act`, 4 bytes.
    struct ActiveKey {
        /// Reverse NAT index of the frontend, as the datapath has it: in network order.
        pub rev_nat_index: NetU16,
        /// Zone of the backend.
        pub zone: u8,
        /// Padding, zero.
        pub pad: u8,
    }

    /// Value of `cilium_lb_act`, 8 bytes.
    struct ActiveValue {
        /// Connections opened.
        pub opened: HostU32,
        /// Connections closed.
        pub closed: HostU32,
    }
}
assert_sizes! { ActiveKey = 4, ActiveValue = 8 }

/// Connections of a frontend with backends in a zone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ActiveConnections {
    /// Reverse NAT index of the frontend.
    pub rev_nat_index: u16,
    /// Zone of the backends, 0 is none.
    pub zone: u8,
    /// Connections opened so far.
    pub opened: u32,
    /// Connections closed so far.
    pub closed: u32,
}

impl ActiveConnections {
    /// Reads an entry.
    ///
    /// # Errors
    /// [`DecodeError::Size`] if key or value are not as long as `layout` says.
    pub fn decode(layout: &'static Layout, key: &[u8], value: &[u8]) -> Result<Self, DecodeError> {
        let key: &ActiveKey = raw::key(layout, key)?;
        let value: &ActiveValue = raw::value(layout, value)?;
        Ok(Self {
            rev_nat_index: key.rev_nat_index.get(),
            zone: key.zone,
            opened: value.opened.get(),
            closed: value.closed.get(),
        })
    }

    /// The bytes of key and value.
    #[must_use]
    pub fn encode(&self) -> (Vec<u8>, Vec<u8>) {
        let key = ActiveKey { rev_nat_index: self.rev_nat_index.into(), zone: self.zone, pad: 0 };
        let value = ActiveValue { opened: self.opened.into(), closed: self.closed.into() };
        raw::pair(&key, &value)
    }
}
