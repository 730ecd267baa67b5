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
