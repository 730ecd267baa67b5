//! The devices map, `cilium_devices` (1.20+): the devices that Cilium manages.
//!
//! An array with a place for every device index in the first form (1.20-dev), where most entries
//! are zero; a hash with the managed devices only in 1.21.

use serde::{Deserialize, Serialize};

use super::{
    error::DecodeError,
    layout::Layout,
    mac::Mac,
    order::HostU32,
    raw::{self, assert_sizes, raw_struct},
};

raw_struct! {
    /// Value of `cilium_devices`, 16 bytes. The key is the device index.
    struct DeviceValue {
        /// Ethernet address, zero for a device without.
        pub mac: [u8; 6],
        /// Padding, zero.
        pub pad1: [u8; 2],
        /// Bit 0: the device has no Ethernet header.
        pub l3: u8,
        /// Padding, zero.
        pub pad2: [u8; 7],
    }
}
assert_sizes! { DeviceValue = 16 }

/// A device that Cilium manages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Device {
    /// Device index.
    pub ifindex: u32,
    /// Ethernet address, zero for a device without.
    pub mac: Mac,
    /// Whether packets on the device have no Ethernet header.
    pub l3: bool,
}

impl Device {
    /// Reads an entry.
    ///
    /// # Errors
    /// [`DecodeError::Size`] if key or value are not as long as `layout` says.
    pub fn decode(layout: &'static Layout, key: &[u8], value: &[u8]) -> Result<Self, DecodeError> {
        let ifindex: &HostU32 = raw::key(layout, key)?;
        let value: &DeviceValue = raw::value(layout, value)?;
        Ok(Self { ifindex: ifindex.get(), mac: Mac(value.mac), l3: value.l3 & 1 != 0 })
    }

    /// Whether this is a place of the array form that no device uses.
    #[must_use]
    pub fn is_unused(&self) -> bool {
        self.mac.is_zero() && !self.l3
    }

    /// The bytes of key and value.
    #[must_use]
    pub fn encode(&self) -> (Vec<u8>, Vec<u8>) {
        let value = DeviceValue { mac: self.mac.0, pad1: [0; 2], l3: self.l3.into(), pad2: [0; 7] };
        raw::pair(&HostU32::new(self.ifindex), &value)
    }
}
