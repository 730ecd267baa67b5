//! Which bits of an entry's bytes have a meaning: what decoding and encoding must keep.

use inspector::cilium::layout::{Family, Layout, MapKind};

/// Masks over key and value: 1 bits have a meaning, 0 bits are padding.
///
/// Written from the structs' documentation, independently of the decoders. Some padding depends on
/// the entry (an IPv4 address in a field that holds either family), so the bytes are needed.
pub fn significant(layout: &Layout, key: &[u8], value: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let mut mask = (vec![0xff; key.len()], vec![0xff; value.len()]);
    let (k, v) = (&mut mask.0, &mut mask.1);
    let v4 = layout.family == Some(Family::V4);
    match layout.kind {
        MapKind::Services => pad(k, if v4 { 10..12 } else { 22..24 }),
        // The last byte of the third generation.
        MapKind::Backends | MapKind::Health if layout.generation >= 3 => {
            pad(v, value.len() - 1..value.len());
        }
        MapKind::ReverseSk | MapKind::SkipLb => pad(k, if v4 { 14..16 } else { 26..32 }),
        MapKind::Affinity => {
            let (client, flag) = if v4 { (8, 10) } else { (16, 18) };
            k[flag] = 1;
            pad(k, flag + 1..key.len());
            let netns = key[flag] & 1 != 0;
            match (v4, netns) {
                (true, false) => pad(k, 4..client),
                (false, true) => pad(k, 8..client),
                _ => {}
            }
            pad(v, 12..16);
        }
        MapKind::AffinityMatch | MapKind::SourceRange => pad(k, 6..8),
        MapKind::ActiveConnections => pad(k, 3..4),
        MapKind::L2Responder if !v4 => pad(k, 20..24),
        MapKind::Endpoints => {
            if key[16] == 1 {
                pad(k, 4..16);
            }
            for range in [4..6, 12..16, 22..24, 30..32, 40..48] {
                pad(v, range);
            }
        }
        MapKind::Ipcache => {
            pad(k, 6..7);
            if key[7] == 1 {
                pad(k, 12..24);
            }
            if layout.generation >= 2 {
                pad(v, 20..22);
                if value[23] & 4 == 0 {
                    pad(v, 8..20);
                }
            }
        }
        MapKind::Snat => {
            pad(v, 16..32);
            pad(v, if v4 { 38..40 } else { 50..56 });
        }
        MapKind::Metrics => {
            k[1] = 3;
            pad(k, 5..8);
        }
        MapKind::NodeMap => {
            pad(k, 0..3);
            if key[3] == 1 {
                pad(k, 8..20);
            }
            if layout.generation >= 2 {
                pad(v, 3..4);
            }
        }
        MapKind::NodeportNeigh => pad(v, 6..8),
        MapKind::Devices => {
            pad(v, 6..8);
            v[8] = 1;
            pad(v, 9..16);
        }
        _ => {}
    }
    mask
}

fn pad(mask: &mut [u8], range: std::ops::Range<usize>) {
    mask[range].fill(0);
}

/// `bytes` with everything but the bits of `mask` zeroed.
pub fn masked(bytes: &[u8], mask: &[u8]) -> Vec<u8> {
    bytes.iter().zip(mask).map(|(byte, mask)| byte & mask).collect()
}
