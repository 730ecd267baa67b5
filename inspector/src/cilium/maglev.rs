//! The Maglev maps: reverse NAT index to a look-up table of backend ids.
//!
//! The outer map is pinned and holds, for every frontend that uses Maglev and has a backend, a map
//! with one entry: the table. The tables' size (251, 509, .. 131071 entries) is configuration. Ids
//! in the table have 16 bits in 1.10 and 32 from 1.11 on, as in the backends maps.

use serde::{Deserialize, Serialize};
use zerocopy::FromBytes;

use super::{
    error::DecodeError,
    layout::Layout,
    order::{HostU16, HostU32, NetU16},
    raw,
};

/// An entry of the outer map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Maglev {
    /// Reverse NAT index of the frontend.
    pub rev_nat_index: u16,
    /// Id of the map that holds the table.
    pub table_id: u32,
}

impl Maglev {
    /// Reads an entry.
    ///
    /// # Errors
    /// [`DecodeError::Size`] if key or value are not as long as `layout` says.
    pub fn decode(layout: &'static Layout, key: &[u8], value: &[u8]) -> Result<Self, DecodeError> {
        let key: &NetU16 = raw::key(layout, key)?;
        let value: &HostU32 = raw::value(layout, value)?;
        Ok(Self { rev_nat_index: key.get(), table_id: value.get() })
    }

    /// The bytes of key and value.
    #[must_use]
    pub fn encode(&self) -> (Vec<u8>, Vec<u8>) {
        raw::pair(&NetU16::new(self.rev_nat_index), &HostU32::new(self.table_id))
    }
}

/// A table, borrowed from the value of an inner map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaglevTable<'a> {
    /// Ids of 16 bits (1.10).
    Ids16(&'a [HostU16]),
    /// Ids of 32 bits (1.11+).
    Ids32(&'a [HostU32]),
}

impl<'a> MaglevTable<'a> {
    /// Views the value of an inner map as a table. `backends` is the layout of the backends map
    /// that the ids refer to: it tells how long they are.
    ///
    /// # Errors
    /// [`DecodeError::Size`] if the value is not a whole number of ids.
    pub fn decode(backends: &'static Layout, value: &'a [u8]) -> Result<Self, DecodeError> {
        let (table, expected) = if backends.key_size == 2 {
            (FromBytes::ref_from_bytes(value).ok().map(Self::Ids16), 2)
        } else {
            (FromBytes::ref_from_bytes(value).ok().map(Self::Ids32), 4)
        };
        table.ok_or(DecodeError::Size {
            map: "maglev table",
            part: "value",
            expected: value.len().next_multiple_of(expected),
            found: value.len(),
        })
    }

    /// Number of places in the table.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Ids16(ids) => ids.len(),
            Self::Ids32(ids) => ids.len(),
        }
    }

    /// Whether the table has no places.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The backend ids, place by place.
    pub fn ids(&self) -> impl Iterator<Item = u32> + use<'a> {
        let (short, long): (&'a [HostU16], &'a [HostU32]) = match *self {
            Self::Ids16(ids) => (ids, &[]),
            Self::Ids32(ids) => (&[], ids),
        };
        short.iter().map(|id| id.get().into()).chain(long.iter().map(|id| id.get()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cilium::layout::{MapType, detect};

    #[test]
    fn tables_of_both_widths() {
        let v1 = detect("cilium_lb4_backends", MapType::HASH, 2, 8).unwrap();
        let v3 = detect("cilium_lb4_backends_v3", MapType::HASH, 4, 12).unwrap();
        let bytes = [0x29, 0, 0x2a, 0, 0, 0, 1, 0];
        let table = MaglevTable::decode(v1, &bytes).unwrap();
        assert_eq!(table.ids().collect::<Vec<_>>(), [0x29, 0x2a, 0, 1]);
        let table = MaglevTable::decode(v3, &bytes).unwrap();
        assert_eq!(table.ids().collect::<Vec<_>>(), [0x002a_0029, 0x0001_0000]);
        assert_eq!(table.len(), 2);
        assert_eq!(
            MaglevTable::decode(v3, &bytes[..6]),
            Err(DecodeError::Size { map: "maglev table", part: "value", expected: 8, found: 6 })
        );
        assert!(MaglevTable::decode(v1, &[]).unwrap().is_empty());
    }
}
