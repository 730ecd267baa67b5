//! Why bytes are not the entry they should be.

/// Bytes that are not an entry of the map they are said to come from.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The key or the value has another length than the layout says.
    #[error("{map}: {part} of {found} bytes where {expected} are expected")]
    Size {
        /// Name of the map.
        map: &'static str,
        /// `key` or `value`.
        part: &'static str,
        /// Length in bytes that the layout has.
        expected: usize,
        /// Length in bytes that was found.
        found: usize,
    },
    /// A field holds a value that its meaning does not allow.
    #[error("{map}: {field} is {found}, {expected}")]
    Field {
        /// Name of the map.
        map: &'static str,
        /// Name of the field.
        field: &'static str,
        /// What was found.
        found: u64,
        /// What would be right, as a clause: "at most 32".
        expected: &'static str,
    },
}

/// A typed entry that has no place in the map it is to be written for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// The entry is of the other IP family.
    #[error("{map}: {address} is of the other IP family")]
    Family {
        /// Name of the map.
        map: &'static str,
        /// The entry's address.
        address: std::net::IpAddr,
    },
    /// A field does not fit into the bytes that this layout has for it.
    #[error("{map}: {field} is {found}, {expected}")]
    Field {
        /// Name of the map.
        map: &'static str,
        /// Name of the field.
        field: &'static str,
        /// What was to be written.
        found: u64,
        /// What would fit, as a clause: "at most 65535 in this layout".
        expected: &'static str,
    },
    /// The entry is of another kind than the map.
    #[error("{map}: holds {expected:?}, not {found:?}")]
    Kind {
        /// Name of the map.
        map: &'static str,
        /// The kind of the map.
        expected: super::layout::MapKind,
        /// The kind of the entry.
        found: super::layout::MapKind,
    },
}
