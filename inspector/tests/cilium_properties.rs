//! Properties of the decoders that hold for any bytes, of every layout.

mod entries;

use entries::{masked, significant};
use inspector::cilium::{
    entry::Entry,
    error::{DecodeError, EncodeError},
    layout::{Family, LAYOUTS, Layout, MapKind},
};
use proptest::prelude::*;

fn layouts() -> impl Strategy<Value = &'static Layout> {
    prop::sample::select(LAYOUTS.iter().collect::<Vec<_>>())
}

/// A layout, with a key and a value of the right sizes.
fn entries() -> impl Strategy<Value = (&'static Layout, Vec<u8>, Vec<u8>)> {
    layouts().prop_flat_map(|layout| {
        let cpus = if layout.kind == MapKind::Metrics { 1..5_usize } else { 1..2 };
        let key = prop::collection::vec(any::<u8>(), layout.key_size as usize);
        let value = cpus.prop_flat_map(move |cpus| {
            prop::collection::vec(any::<u8>(), cpus * layout.value_size as usize)
        });
        // Family byte and prefix length, which random bytes would hardly ever have right.
        (Just(layout), key, value, 1..3_u8, 0..=128_u32).prop_map(
            |(layout, mut key, value, family, bits)| {
                let family_at = match layout.kind {
                    MapKind::Endpoints => Some(16),
                    MapKind::Ipcache => Some(7),
                    MapKind::NodeMap => Some(3),
                    _ => None,
                };
                if let Some(at) = family_at {
                    key[at] = family;
                }
                if matches!(layout.kind, MapKind::Ipcache | MapKind::SourceRange) {
                    let v4 = layout.family == Some(Family::V4)
                        || layout.kind == MapKind::Ipcache && family == 1;
                    let bits = if v4 { bits % 33 } else { bits };
                    key[..4].copy_from_slice(&(32 + bits).to_le_bytes());
                }
                (layout, key, value)
            },
        )
    })
}

proptest! {
    // No file with failed cases: what fails becomes a test of its own, or an input of the corpus.
    #![proptest_config(ProptestConfig {
        cases: 4096,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Nothing that has a meaning is lost, padding comes out as zero, and the typed form survives
    /// both its own bytes and JSON.
    #[test]
    fn what_is_decoded_is_encoded((layout, key, value) in entries()) {
        let entry = Entry::decode(layout, &key, &value).unwrap();
        let (key2, value2) = entry.encode(layout).unwrap();
        let (key_mask, value_mask) = significant(layout, &key, &value);
        prop_assert_eq!(&key2, &masked(&key, &key_mask), "key of {}", layout.name);
        prop_assert_eq!(&value2, &masked(&value, &value_mask), "value of {}", layout.name);
        prop_assert_eq!(&Entry::decode(layout, &key2, &value2).unwrap(), &entry);

        let json = serde_json::to_string(&entry).unwrap();
        prop_assert_eq!(serde_json::from_str::<Entry>(&json).unwrap(), entry, "{}", json);
    }

    /// Any bytes are an entry or an error, and what is an entry can be written.
    #[test]
    fn no_bytes_panic(
        layout in layouts(),
        key in prop::collection::vec(any::<u8>(), 0..64),
        value in prop::collection::vec(any::<u8>(), 0..128),
    ) {
        if let Ok(entry) = Entry::decode(layout, &key, &value) {
            entry.encode(layout).unwrap();
        }
    }

    /// A key or a value of another length is refused, with the lengths.
    #[test]
    fn other_lengths_are_refused(
        (layout, key, value) in entries(),
        key_length in 0..64_usize,
        value_length in 0..128_usize,
    ) {
        let size = |error| matches!(error, Err(DecodeError::Size { .. }));
        if key_length != key.len() {
            let mut key = key.clone();
            key.resize(key_length, 0);
            prop_assert!(size(Entry::decode(layout, &key, &value)), "key of {}", layout.name);
        }
        let per_cpu = layout.types.iter().any(|map_type| map_type.is_per_cpu());
        let cpus = value_length / layout.value_size as usize;
        let whole = value_length == cpus * layout.value_size as usize;
        let right = if per_cpu { whole && cpus > 0 } else { value_length == value.len() };
        if !right {
            let mut value = value;
            value.resize(value_length, 0);
            prop_assert!(size(Entry::decode(layout, &key, &value)), "value of {}", layout.name);
        }
    }

    /// An entry of one map is never written into another in silence: kind, family or room must do.
    #[test]
    fn entries_do_not_change_maps((layout, key, value) in entries(), other in layouts()) {
        let entry = Entry::decode(layout, &key, &value).unwrap();
        match entry.encode(other) {
            Ok((key, value)) => {
                prop_assert_eq!(layout.kind, other.kind);
                prop_assert_eq!(Entry::decode(other, &key, &value).unwrap(), entry);
            }
            Err(EncodeError::Kind { .. }) => prop_assert_ne!(layout.kind, other.kind),
            Err(EncodeError::Family { .. } | EncodeError::Field { .. }) => {
                prop_assert_ne!(layout, other);
            }
        }
    }
}

/// The values that only few bytes can have.
#[test]
fn impossible_fields_are_named() {
    let layout = |name: &str| LAYOUTS.iter().find(|layout| layout.name == name).unwrap();
    let decode = |name: &str, key: &[u8]| {
        let layout = layout(name);
        Entry::decode(layout, key, &vec![0; layout.value_size as usize])
            .map_err(|error| error.to_string())
    };
    let mut range = [0; 12];
    for (length, right) in [(0, false), (31, false), (32, true), (64, true), (65, false)] {
        range[0] = length;
        assert_eq!(decode("cilium_lb4_source_range", &range).is_ok(), right, "{length}");
    }
    assert_eq!(
        decode("cilium_lb4_source_range", &range).unwrap_err(),
        "cilium_lb4_source_range: prefix length is 65, from 32 to 64 (IPv4)"
    );
    let mut ipcache = [0; 24];
    ipcache[0] = 32;
    assert_eq!(
        decode("cilium_ipcache_v2", &ipcache).unwrap_err(),
        "cilium_ipcache_v2: family is 0, 1 (IPv4) or 2 (IPv6)"
    );
    for (family, length, right) in [(1, 64, true), (1, 65, false), (2, 160, true), (2, 161, false)]
    {
        ipcache[0] = length;
        ipcache[7] = family;
        assert_eq!(decode("cilium_ipcache_v2", &ipcache).is_ok(), right, "{family} {length}");
    }
    let mut endpoint = [0; 20];
    endpoint[16] = 3;
    assert_eq!(
        decode("cilium_lxc", &endpoint).unwrap_err(),
        "cilium_lxc: family is 3, 1 (IPv4) or 2 (IPv6)"
    );
    assert_eq!(
        decode("cilium_lxc", &endpoint[..19]).unwrap_err(),
        "cilium_lxc: key of 19 bytes where 20 are expected"
    );
}
