//! The run-time configuration map (1.14+): an array of numbers that the agent changes while the
//! datapath runs.
//!
//! Indices: `enum runtime_config` of Cilium's `bpf/lib/common.h`.

use serde::{Deserialize, Serialize};

use super::{
    error::DecodeError,
    layout::Layout,
    order::{HostU32, HostU64},
    raw,
};

/// Index of the offset between the monotonic clock and wall time, in units of 512 ns.
pub const UTIME_OFFSET: u32 = 0;

/// Index of the agent's last sign of life: nanoseconds of `CLOCK_MONOTONIC`, refreshed every
/// second. 0 if there was none yet.
pub const AGENT_LIVENESS: u32 = 1;

/// One number of the run-time configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RuntimeConfig {
    /// Which number, see [`UTIME_OFFSET`] and [`AGENT_LIVENESS`].
    pub index: u32,
    /// The number; the unit depends on the index.
    pub value: u64,
}

impl RuntimeConfig {
    /// Reads an entry.
    ///
    /// # Errors
    /// [`DecodeError::Size`] if key or value are not as long as `layout` says.
    pub fn decode(layout: &'static Layout, key: &[u8], value: &[u8]) -> Result<Self, DecodeError> {
        let index: &HostU32 = raw::key(layout, key)?;
        let value: &HostU64 = raw::value(layout, value)?;
        Ok(Self { index: index.get(), value: value.get() })
    }

    /// The bytes of key and value.
    #[must_use]
    pub fn encode(&self) -> (Vec<u8>, Vec<u8>) {
        raw::pair(&HostU32::new(self.index), &HostU64::new(self.value))
    }
}
