//! What was read of one map.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize, Serializer, ser::SerializeMap};

use super::{Entries, Hex};
use crate::{
    cilium::{
        entry,
        layout::{self, Family, Layout, LayoutError, MapKind, MapType},
    },
    collect::dump::Method,
};

/// Which of a map's entries a record holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Coverage {
    /// All of them.
    All,
    /// Those that the question needs; an entry that is not here may be in the map.
    Selected,
    /// None: see `problem`.
    None,
}

/// What was read of one map. Sizes in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, JsonSchema)]
pub struct MapRecord {
    /// Name of the pin.
    pub name: String,
    /// Path of the pin.
    pub path: String,
    /// Kernel id of the map.
    pub id: u32,
    /// Map type, the kernel's number.
    #[serde(rename = "type")]
    #[schemars(with = "u32")]
    pub map_type: MapType,
    /// Key size.
    pub key_size: u32,
    /// Value size, of one CPU for per-CPU maps.
    pub value_size: u32,
    /// Largest number of entries.
    pub max_entries: u32,
    /// `BPF_F_*` flags.
    pub flags: u32,
    /// Which entries are here.
    pub coverage: Coverage,
    /// How they were read.
    pub method: Method,
    /// `false` if the map changed faster than it could be read.
    pub complete: bool,
    /// Number of entries in the map, where it was counted.
    #[serde(default)]
    pub total: Option<u64>,
    /// Why the map could not be read or understood.
    #[serde(default)]
    pub problem: Option<String>,
    /// The entries.
    #[schemars(with = "Vec<EntrySchema>")]
    pub entries: Entries,
}

/// Shape of an entry in the file, for the schema alone.
#[derive(JsonSchema)]
#[allow(dead_code, reason = "its fields are read by the schema generator only")]
struct EntrySchema {
    /// Key, hexadecimal digits.
    key: String,
    /// Value, hexadecimal digits; of all CPUs in a row for a per-CPU map.
    value: String,
    /// What the bytes mean; derived from them, for human readers.
    decoded: Option<serde_json::Value>,
}

impl MapRecord {
    /// The layout of this map.
    ///
    /// # Errors
    /// [`LayoutError`] for a map that is not read or has unknown sizes.
    pub fn layout(&self) -> Result<&'static Layout, LayoutError> {
        layout::detect(&self.name, self.map_type, self.key_size, self.value_size)
    }

    /// Checks that the entries have the lengths that the sizes say, `cpus` values for per-CPU maps.
    pub(super) fn check_lengths(&mut self, cpus: usize) -> Result<(), String> {
        let value_size = self.value_size as usize;
        let key_len = self.key_size as usize;
        let value_len = if self.map_type.is_per_cpu() {
            value_size.next_multiple_of(8).saturating_mul(cpus)
        } else {
            value_size
        };
        if self.entries.is_empty() {
            self.entries = Entries::new(key_len, value_len);
        }
        if (self.entries.key_len(), self.entries.value_len()) == (key_len, value_len) {
            return Ok(());
        }
        Err(format!(
            "{}: entries with keys of {} and values of {} bytes, the map has {key_len} and \
             {value_len}",
            self.name,
            self.entries.key_len(),
            self.entries.value_len()
        ))
    }

    /// The same map with other entries.
    #[must_use]
    pub(crate) fn with(&self, entries: Entries, coverage: Coverage) -> Self {
        Self {
            name: self.name.clone(),
            path: self.path.clone(),
            problem: self.problem.clone(),
            coverage,
            entries,
            ..*self
        }
    }

    /// Kind, family and generation, if the layout is known.
    #[must_use]
    pub fn kind(&self) -> Option<(MapKind, Option<Family>, u8)> {
        self.layout().ok().map(|layout| (layout.kind, layout.family, layout.generation))
    }
}

impl Serialize for MapRecord {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // Exhaustive, so that a new field cannot be forgotten in the file.
        let Self {
            name,
            path,
            id,
            map_type,
            key_size,
            value_size,
            max_entries,
            flags,
            coverage,
            method,
            complete,
            total,
            problem,
            entries: _,
        } = self;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("name", name)?;
        map.serialize_entry("path", path)?;
        map.serialize_entry("id", id)?;
        map.serialize_entry("type", map_type)?;
        map.serialize_entry("type_name", &map_type.to_string())?;
        map.serialize_entry("key_size", key_size)?;
        map.serialize_entry("value_size", value_size)?;
        map.serialize_entry("max_entries", max_entries)?;
        map.serialize_entry("flags", flags)?;
        map.serialize_entry("coverage", coverage)?;
        map.serialize_entry("method", method)?;
        map.serialize_entry("complete", complete)?;
        map.serialize_entry("total", total)?;
        map.serialize_entry("problem", problem)?;
        map.serialize_entry("entries", &DecodedEntries(self))?;
        map.end()
    }
}

/// The entries of a record with their meaning beside the bytes.
struct DecodedEntries<'a>(&'a MapRecord);

impl Serialize for DecodedEntries<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Row<'a> {
            key: Hex<'a>,
            value: Hex<'a>,
            #[serde(skip_serializing_if = "Option::is_none")]
            decoded: Option<entry::Entry>,
            #[serde(skip_serializing_if = "Option::is_none")]
            error: Option<String>,
        }

        let layout = self.0.layout().ok();
        serializer.collect_seq(self.0.entries.iter().map(|(key, value)| {
            let (decoded, error) =
                match layout.map(|layout| entry::Entry::decode(layout, key, value)) {
                    Some(Ok(decoded)) => (Some(decoded), None),
                    Some(Err(error)) => (None, Some(error.to_string())),
                    None => (None, None),
                };
            Row { key: Hex(key), value: Hex(value), decoded, error }
        }))
    }
}
