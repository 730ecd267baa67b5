//! The property that the `decode` target looks for a counterexample to. Shared by the fuzz target
//! and the test that runs the corpus; both have the module `cilium` in their root.

use super::cilium::{entry::Entry, layout::LAYOUTS};

/// The first byte chooses the layout, the second the length of the key (its low bit set: the
/// layout's own; else itself), the rest is key and value.
///
/// Returns whether the bytes were an entry.
///
/// # Panics
/// If an entry changes by being written and read again.
pub fn decode(input: &[u8]) -> bool {
    let [layout, length, rest @ ..] = input else { return false };
    let layout = &LAYOUTS[usize::from(*layout) % LAYOUTS.len()];
    let length = if length & 1 == 1 { layout.key_size as usize } else { usize::from(*length) };
    let Some((key, value)) = rest.split_at_checked(length) else { return false };
    let Ok(entry) = Entry::decode(layout, key, value) else { return false };
    let (key, value) = entry.encode(layout).expect("what was read has room where it came from");
    let again = Entry::decode(layout, &key, &value).expect("what was written is an entry");
    assert_eq!(again, entry, "changed by being written and read again");
    let bytes = again.encode(layout).expect("as before");
    assert_eq!(bytes, (key, value), "other bytes when written again");
    true
}
