//! The raw entries of one map.

use std::{collections::HashSet, fmt};

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{self, SeqAccess, Visitor},
};

/// Raw entries of one map: keys and values of fixed lengths, kept in two flat buffers as the
/// kernel hands them out.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Entries {
    key_len: usize,
    value_len: usize,
    keys: Vec<u8>,
    values: Vec<u8>,
}

impl Entries {
    /// No entries yet; lengths in bytes.
    #[must_use]
    pub fn new(key_len: usize, value_len: usize) -> Self {
        Self { key_len, value_len, keys: Vec::new(), values: Vec::new() }
    }

    /// From flat buffers that hold the same number of keys and values.
    ///
    /// # Panics
    /// If they do not.
    #[must_use]
    pub fn from_parts(key_len: usize, value_len: usize, keys: Vec<u8>, values: Vec<u8>) -> Self {
        assert!(keys.len() * value_len == values.len() * key_len, "as many keys as values");
        Self { key_len, value_len, keys, values }
    }

    /// Length of a key in bytes.
    #[must_use]
    pub fn key_len(&self) -> usize {
        self.key_len
    }

    /// Length of a value in bytes, all CPUs together for a per-CPU map.
    #[must_use]
    pub fn value_len(&self) -> usize {
        self.value_len
    }

    /// Number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.keys.len().checked_div(self.key_len).unwrap_or_default()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Appends an entry.
    ///
    /// # Panics
    /// If the lengths are not those of the map.
    pub fn push(&mut self, key: &[u8], value: &[u8]) {
        assert_eq!((key.len(), value.len()), (self.key_len, self.value_len));
        self.keys.extend_from_slice(key);
        self.values.extend_from_slice(value);
    }

    /// The entries as `(key, value)`, in the order in which they were read.
    #[must_use]
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&[u8], &[u8])> {
        self.keys
            .chunks_exact(self.key_len.max(1))
            .zip(self.values.chunks_exact(self.value_len.max(1)))
    }

    /// Drops later entries with a key that was there before.
    pub(crate) fn keep_first_of_each_key(&mut self) {
        let mut seen = HashSet::with_capacity(self.len());
        let keep: Vec<bool> = self.iter().map(|(key, _)| seen.insert(key)).collect();
        if keep.iter().all(|&keep| keep) {
            return;
        }
        let mut kept = Self::new(self.key_len, self.value_len);
        for ((key, value), _) in self.iter().zip(&keep).filter(|(_, keep)| **keep) {
            kept.push(key, value);
        }
        *self = kept;
    }

    /// Keeps the entries for which `keep` says so.
    pub fn retain(&mut self, keep: impl FnMut(&[u8], &[u8]) -> bool) {
        *self = self.selected(keep);
    }

    /// The entries for which `keep` says so.
    #[must_use]
    pub fn selected(&self, mut keep: impl FnMut(&[u8], &[u8]) -> bool) -> Self {
        let mut kept = Self::new(self.key_len, self.value_len);
        for (key, value) in self.iter() {
            if keep(key, value) {
                kept.push(key, value);
            }
        }
        kept
    }
}

/// Writes bytes as lower-case hexadecimal digits.
pub(crate) struct Hex<'a>(pub(crate) &'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in self.0 {
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl Serialize for Hex<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Reads hexadecimal digits, two for each byte.
pub(crate) fn parse_hex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    if !digits.len().is_multiple_of(2) || !text.is_ascii() {
        return None;
    }
    digits
        .chunks_exact(2)
        .map(|pair| {
            let high = char::from(pair[0]).to_digit(16)?;
            let low = char::from(pair[1]).to_digit(16)?;
            u8::try_from(high << 4 | low).ok()
        })
        .collect()
}

/// One entry as it stands in a file; what `decoded` says is derived from the bytes and not read.
#[derive(Deserialize)]
struct RawEntry {
    key: String,
    value: String,
}

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EntriesVisitor;

        impl<'de> Visitor<'de> for EntriesVisitor {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of entries with `key` and `value` in hexadecimal digits")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Entries, A::Error> {
                let mut entries = Entries::default();
                let mut number = 0_usize;
                while let Some(raw) = seq.next_element::<RawEntry>()? {
                    let bytes = |text: &str, part: &str| {
                        parse_hex(text).ok_or_else(|| {
                            de::Error::custom(format_args!(
                                "entry {number}: the {part} is not a row of hexadecimal digit pairs"
                            ))
                        })
                    };
                    let key = bytes(&raw.key, "key")?;
                    let value = bytes(&raw.value, "value")?;
                    if number == 0 {
                        entries = Entries::new(key.len(), value.len());
                    }
                    if key.is_empty()
                        || key.len() != entries.key_len
                        || value.len() != entries.value_len
                    {
                        return Err(de::Error::custom(format_args!(
                            "entry {number}: key of {} and value of {} bytes where the map has {} \
                             and {}",
                            key.len(),
                            value.len(),
                            entries.key_len,
                            entries.value_len
                        )));
                    }
                    entries.push(&key, &value);
                    number += 1;
                }
                Ok(entries)
            }
        }

        deserializer.deserialize_seq(EntriesVisitor)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn hex_is_read_back(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            prop_assert_eq!(parse_hex(&Hex(&bytes).to_string()), Some(bytes));
        }

        #[test]
        fn any_text_is_hex_or_refused(text in ".{0,40}") {
            if let Some(bytes) = parse_hex(&text) {
                prop_assert_eq!(Hex(&bytes).to_string(), text.to_ascii_lowercase());
            }
        }
    }

    #[test]
    fn an_entry_that_came_twice_is_kept_once() {
        let mut entries = Entries::new(1, 1);
        for (key, value) in [(1, 10), (2, 20), (1, 11)] {
            entries.push(&[key], &[value]);
        }
        entries.keep_first_of_each_key();
        let left: Vec<_> = entries.iter().map(|(key, value)| (key[0], value[0])).collect();
        assert_eq!(left, [(1, 10), (2, 20)]);
    }

    #[test]
    fn entries_of_different_lengths_are_refused() {
        let error = serde_json::from_str::<Entries>(
            r#"[{"key":"0102","value":"03"},{"key":"01","value":"03"}]"#,
        )
        .unwrap_err();
        assert!(error.to_string().contains("entry 1: key of 1 and value of 1 bytes"), "{error}");
    }
}
