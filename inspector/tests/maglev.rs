//! Maglev tables: the outer map's entry, the inner map behind it, and what a table that names a
//! missing backend means.
//!
//! Needs root and bpf(2); fails without.

mod common;

use common::judge;
use inspector::{
    cilium::layout::MapType,
    judge::{FindingId, Judgement, programmed::Maglev},
};
use inspector_lab::{Lab, MapHandle, capture::MapSpec};

const VIP: &str = "192.168.2.20:443/tcp";
/// Reverse NAT index of that frontend in the capture, and the ids of its backends.
const FRONTEND: u16 = 22;
const BACKENDS: [u32; 2] = [3, 4];
/// The smallest table size that Cilium allows.
const PLACES: u32 = 251;

/// Puts a Maglev table with these ids, turn by turn, behind the frontend.
fn put_table(lab: &Lab, ids: &[u32]) {
    let spec = |map_type, key_size, value_size, max_entries| MapSpec {
        map_type,
        key_size,
        value_size,
        max_entries,
        ..lab.map("cilium_lb4_maglev").expect("the outer map").spec().clone()
    };
    let inner = MapSpec { flags: 0, ..spec(MapType::ARRAY, 4, PLACES * 4, 1) };
    let table = MapHandle::create("cilium_maglev_i", &inner).expect("an inner map");
    let value: Vec<u8> =
        ids.iter().cycle().take(PLACES as usize).flat_map(|id| id.to_le_bytes()).collect();
    table.update(&0_u32.to_ne_bytes(), &value).expect("the table");
    // The captured outer map was made for tables of another size.
    let outer = MapSpec { flags: 0, ..spec(MapType::HASH_OF_MAPS, 2, 4, 64) };
    let outer = MapHandle::create_outer("cilium_lb4_magl", &outer, &table).expect("an outer map");
    outer.update_inner(&FRONTEND.to_be_bytes(), &table).expect("the entry");
    lab.unpin("cilium_lb4_maglev").expect("the old pin is removed");
    outer.pin(&lab.pin_path("cilium_lb4_maglev")).expect("the new pin");
}

fn dangling(judgement: &Judgement) -> Vec<&str> {
    judgement
        .verdict
        .findings
        .iter()
        .filter(|finding| finding.id == FindingId::FrontendSlotDangling)
        .map(|finding| finding.seen.as_str())
        .collect()
}

#[test]
fn a_table_shares_connections_out() {
    let lab = Lab::builder().project("v1.21-tcx").up().expect("a lab");
    let without = judge(&lab, VIP.parse().expect("a VIP"));
    assert_eq!(without.programmed.frontends[0].reverse_nat.id, FRONTEND);
    assert_eq!(without.programmed.frontends[0].maglev, None);

    put_table(&lab, &BACKENDS);
    let judgement = judge(&lab, VIP.parse().expect("a VIP"));
    let table = judgement.programmed.frontends[0].maglev.as_ref().expect("a table");
    let places = [(3, 126), (4, 125)].into_iter().collect();
    assert_eq!(*table, Maglev { places: 251, backends: places, nowhere: 0 });
    assert!(dangling(&judgement).is_empty());
    assert!(judgement.verdict.paths.iter().all(|path| path.share.is_none()));
}

#[test]
fn a_place_without_backend_fails_its_share() {
    let lab = Lab::builder().project("v1.21-tcx").up().expect("a lab");
    // No backend has the last id: every third connection falls on it.
    put_table(&lab, &[BACKENDS[0], BACKENDS[1], 65_000]);
    let judgement = judge(&lab, VIP.parse().expect("a VIP"));
    assert_eq!(
        dangling(&judgement),
        ["192.168.2.20:443/TCP: 83 of 251 places of its Maglev table name a backend that is not \
          there"]
    );
    for path in &judgement.verdict.paths {
        let expected = path.path.starts_with("forwarded").then_some(1.0 - 83.0 / 251.0);
        assert_eq!(path.share, expected, "{path:?}");
    }
}
