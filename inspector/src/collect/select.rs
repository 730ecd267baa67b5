//! What a question about one VIP needs of the load balancer's maps.
//!
//! The services and backend maps are hash maps: that a VIP has no further port is known only after
//! all entries were seen. So they are read whole and the entries that matter are kept; the number
//! of all is kept too, for the fill of the maps. The agent may change the maps between the read of
//! one and of the other, and a slot would then seem to name a backend that is not there. Such a
//! sight is not believed before it was seen again.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io,
    net::IpAddr,
    os::fd::AsFd,
};

use zerocopy::IntoBytes;

use super::{
    dump,
    maps::{MapError, OpenMap},
    network::NetworkQuestion,
    or_failed, read_all,
};
use crate::{
    cilium::{
        affinity::AffinityMatch,
        backends::Backend,
        endpoints::Endpoint,
        ipcache::IpcacheKey,
        l2_responder::L2Responder,
        layout::{Family, Layout, MapKind},
        maglev::{self, Maglev},
        order::HostU32,
        proto::Protocol,
        reverse_nat::ReverseNat,
        runtime_config,
        services::{ServiceKey, ServiceValue},
        skip_lb::SkipLb,
        source_range::SourceRange,
    },
    evidence::{Coverage, Hex, MaglevTable, MapRecord, Source, SourceStatus, VipQuery, parse_hex},
    sys::bpf,
};

/// How often an inconsistent pair of maps is read again before it is believed.
const ATTEMPTS: usize = 3;

/// Whether all of a map is read: of the others, entries are found by key.
fn is_read_whole(map: &OpenMap) -> bool {
    !matches!(map.layout.kind, MapKind::Ipcache | MapKind::Maglev)
}

/// Reads the maps of which VIPs need something, each whole; [`look_up`] reads the others, and
/// [`keep`] leaves what one VIP needs.
pub(super) fn read(open: &[OpenMap], queries: &[&VipQuery], cpus: usize) -> Vec<MapRecord> {
    let mut records = read_all(open.iter().filter(|map| is_read_whole(map)), cpus);
    let addresses: BTreeSet<IpAddr> = queries.iter().map(|query| query.address).collect();
    for _ in 1..ATTEMPTS {
        if addresses.iter().all(|address| is_consistent(&records, *address)) {
            break;
        }
        let pair = |map: &&OpenMap| {
            matches!(map.layout.kind, MapKind::Services | MapKind::Backends | MapKind::ReverseNat)
        };
        for fresh in read_all(open.iter().filter(pair), cpus) {
            if let Some(stale) = records.iter_mut().find(|record| record.name == fresh.name) {
                *stale = fresh;
            }
        }
    }
    records
}

/// Looks up the entries of a VIP where they are found by key; `records` are the whole maps.
pub(super) fn look_up<'m>(
    open: impl Iterator<Item = &'m OpenMap>,
    records: &[MapRecord],
    address: IpAddr,
    cpus: usize,
) -> Vec<MapRecord> {
    let wanted = Wanted::of(records, address);
    open.filter(|map| !is_read_whole(map))
        .map(|map| or_failed(map, wanted.lookup(map, cpus)))
        .collect()
}

/// Leaves of the services maps the entries of these VIPs, if there are any, and those of the node's own
/// addresses: what follows looks through them for each VIP.
pub(super) fn narrow(records: &mut [MapRecord], addresses: &BTreeSet<IpAddr>) {
    if addresses.is_empty() {
        return;
    }
    let own = own_addresses(records);
    let prefixes: BTreeSet<Vec<u8>> = addresses
        .iter()
        .chain(&own)
        .map(|address| match address {
            IpAddr::V4(address) => address.octets().to_vec(),
            IpAddr::V6(address) => address.octets().to_vec(),
        })
        .collect();
    for record in records {
        let length = match record.kind() {
            Some((MapKind::Services, Some(Family::V4), _)) => 4,
            Some((MapKind::Services, Some(Family::V6), _)) => 16,
            _ => continue,
        };
        let before = record.entries.len();
        record.entries.retain(|key, _| key.get(..length).is_some_and(|key| prefixes.contains(key)));
        if record.entries.len() < before {
            record.coverage = Coverage::Selected;
        }
    }
}

/// Reads the inner maps that the entries of the Maglev maps name.
pub(super) fn maglev_tables(records: &[MapRecord], cpus: usize) -> (Vec<MaglevTable>, Vec<Source>) {
    let mut tables = Vec::new();
    let mut unread = Vec::new();
    for record in records {
        let Ok(layout) = record.layout() else { continue };
        if layout.kind != MapKind::Maglev || record.coverage != Coverage::Selected {
            continue;
        }
        for (key, value) in record.entries.iter() {
            let Ok(entry) = Maglev::decode(layout, key, value) else { continue };
            match maglev_table(entry.table_id, cpus) {
                Ok(value) => tables.push(MaglevTable {
                    map: record.name.clone(),
                    frontend: entry.rev_nat_index,
                    table_id: entry.table_id,
                    value: Hex(&value).to_string(),
                }),
                Err(error) => unread.push(Source {
                    what: format!("{} of frontend {}", record.name, entry.rev_nat_index),
                    status: SourceStatus::Failed,
                    reason: Some(format!("its table {}: {error}", entry.table_id)),
                }),
            }
        }
    }
    (tables, unread)
}

/// The one value of the inner map with this id.
fn maglev_table(id: u32, cpus: usize) -> io::Result<Vec<u8>> {
    let fd = bpf::open_map_by_id(id)?;
    let info = bpf::map_info(fd.as_fd())?;
    let dump = dump::read(&fd, &info, cpus)?;
    dump.entries
        .iter()
        .next()
        .map(|(_, value)| value.to_vec())
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the map is empty"))
}

/// What matters for the VIP `address` of whole maps.
pub(super) fn keep(
    records: &[MapRecord],
    address: IpAddr,
    maglev: &[MaglevTable],
) -> Vec<MapRecord> {
    let mut wanted = Wanted::of(records, address);
    for layout in records.iter().filter_map(|record| record.layout().ok()) {
        if layout.kind == MapKind::Backends {
            for value in maglev.iter().filter_map(|table| parse_hex(&table.value)) {
                if let Ok(table) = maglev::MaglevTable::decode(layout, &value) {
                    wanted.ids.extend(table.ids());
                }
            }
        }
    }
    records.iter().map(|record| wanted.select(record)).collect()
}

/// What is to be asked of the network for the VIP `address`; the records are whole.
pub(super) fn network_question(records: &[MapRecord], address: IpAddr) -> NetworkQuestion {
    let proxy_ports = entries_of(records, address)
        .filter(|(key, value)| key.is_master() && value.flags().l7())
        .map(|(_, value)| value.l7_proxy_port())
        .collect();
    let mut sources: BTreeMap<u32, Vec<IpAddr>> = BTreeMap::new();
    for record in records {
        let Ok(layout) = record.layout() else { continue };
        if layout.kind != MapKind::Endpoints {
            continue;
        }
        for (key, value) in record.entries.iter() {
            let Ok(endpoint) = Endpoint::decode(layout, key, value) else { continue };
            if endpoint.ifindex != 0 && !endpoint.flags.is_host() {
                sources.entry(endpoint.ifindex).or_default().push(endpoint.address);
            }
        }
    }
    NetworkQuestion {
        vip: Some(address),
        backends: Wanted::of(records, address).backend_addresses,
        proxy_ports,
        sources,
        ..NetworkQuestion::default()
    }
}

/// Number of service entries by the protocol in their keys.
pub(super) fn count_protocols(records: &[MapRecord]) -> BTreeMap<String, u64> {
    let mut counts = [0_u64; 256];
    for record in records {
        let Some((MapKind::Services, Some(family), _)) = record.kind() else { continue };
        // The protocol stands four bytes before the end of the key, in both families.
        let offset = match family {
            Family::V4 => 8,
            Family::V6 => 20,
        };
        for (key, _) in record.entries.iter() {
            counts[usize::from(key[offset])] += 1;
        }
    }
    (0_u8..=255)
        .zip(counts)
        .filter(|(_, count)| *count > 0)
        .map(|(number, count)| (Protocol(number).to_string(), count))
        .collect()
}

/// The frontends of `address` as they stand in the records: key and value of each entry.
fn entries_of(
    records: &[MapRecord],
    address: IpAddr,
) -> impl Iterator<Item = (ServiceKey, ServiceValue)> {
    records
        .iter()
        .filter_map(|record| Some((record, record.layout().ok()?)))
        .filter(|(_, layout)| layout.kind == MapKind::Services)
        .flat_map(move |(record, layout)| {
            // Among tens of thousands, few are decoded.
            record.entries.iter().filter(move |(key, _)| starts_with(key, address)).filter_map(
                |(key, value)| {
                    let key = ServiceKey::decode(layout.name, key).ok()?;
                    let value = ServiceValue::decode(layout.name, value).ok()?;
                    Some((key, value))
                },
            )
        })
        .filter(move |(key, _)| key.address == address)
}

/// The node's own addresses, as Cilium knows them.
fn own_addresses(records: &[MapRecord]) -> BTreeSet<IpAddr> {
    records
        .iter()
        .filter_map(|record| Some((record, record.layout().ok()?)))
        .filter(|(_, layout)| layout.kind == MapKind::Endpoints)
        .flat_map(|(record, layout)| {
            let entries = record.entries.iter();
            entries.filter_map(|(key, value)| Endpoint::decode(layout, key, value).ok())
        })
        .filter(|endpoint| endpoint.flags.is_host())
        .map(|endpoint| endpoint.address)
        .collect()
}

/// Whether the key of a services map begins with this address.
fn starts_with(key: &[u8], address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => key.starts_with(&address.octets()),
        IpAddr::V6(address) => key.starts_with(&address.octets()),
    }
}

/// The id that the key of a backend map holds, in two bytes or four by its generation.
fn backend_id(key: &[u8]) -> Option<u32> {
    match *key {
        [low, high] => Some(u16::from_le_bytes([low, high]).into()),
        [a, b, c, d] => Some(u32::from_le_bytes([a, b, c, d])),
        _ => None,
    }
}

/// Whether every slot of the VIP has its backend and every master its slots.
fn is_consistent(records: &[MapRecord], address: IpAddr) -> bool {
    let mut slots: HashMap<ServiceKey, usize> = HashMap::new();
    let mut masters: HashMap<ServiceKey, usize> = HashMap::new();
    let mut ids = BTreeSet::new();
    for (key, value) in entries_of(records, address) {
        let master = ServiceKey { slot: 0, ..key };
        if key.is_master() {
            masters.insert(master, value.count.get().into());
        } else {
            *slots.entry(master).or_default() += 1;
            ids.insert(value.union.get());
        }
    }
    let found = backends(records, &ids).count();
    found == ids.len()
        && masters.iter().all(|(key, count)| slots.get(key).copied().unwrap_or_default() >= *count)
        && slots.keys().all(|key| masters.contains_key(key))
}

/// The backends with these ids.
fn backends<'r>(
    records: &'r [MapRecord],
    ids: &'r BTreeSet<u32>,
) -> impl Iterator<Item = Backend> + 'r {
    records
        .iter()
        .filter_map(|record| Some((record, record.layout().ok()?)))
        .filter(|(_, layout)| layout.kind == MapKind::Backends)
        .flat_map(move |(record, layout)| {
            record
                .entries
                .iter()
                .filter(|(key, _)| backend_id(key).is_some_and(|id| ids.contains(&id)))
                .filter_map(|(key, value)| Backend::decode(layout, key, value).ok())
        })
}

/// What the entries of the VIP refer to.
struct Wanted {
    address: IpAddr,
    ids: BTreeSet<u32>,
    rev_nat: BTreeSet<u16>,
    backend_addresses: BTreeSet<IpAddr>,
    /// The node's own addresses.
    own: BTreeSet<IpAddr>,
}

impl Wanted {
    fn of(records: &[MapRecord], address: IpAddr) -> Self {
        let mut ids = BTreeSet::new();
        let mut rev_nat = BTreeSet::new();
        for (key, value) in entries_of(records, address) {
            rev_nat.insert(value.rev_nat_index.get());
            if !key.is_master() {
                ids.insert(value.union.get());
            }
        }
        let backend_addresses = backends(records, &ids).map(|backend| backend.address).collect();
        Self { address, ids, rev_nat, backend_addresses, own: own_addresses(records) }
    }

    /// Whether an entry of a services map drops what comes for an address of the node.
    fn drops_ours(&self, layout: &Layout, key: &[u8]) -> bool {
        ServiceKey::decode(layout.name, key)
            .is_ok_and(|key| key.is_wildcard() && self.own.contains(&key.address))
    }

    /// The entries that matter. One that cannot be decoded is kept: it may matter.
    fn select(&self, record: &MapRecord) -> MapRecord {
        let Ok(layout) = record.layout() else { return record.clone() };
        let has = |index: u16| self.rev_nat.contains(&index);
        let keep = |key: &[u8], value: &[u8]| -> Option<bool> {
            Some(match layout.kind {
                // A wildcard entry of the node's own address hurts other VIPs too.
                MapKind::Services => starts_with(key, self.address) || self.drops_ours(layout, key),
                MapKind::Backends => self.ids.contains(&backend_id(key)?),
                MapKind::ReverseNat => {
                    let entry = ReverseNat::decode(layout, key, value).ok()?;
                    has(entry.index) || entry.address == self.address
                }
                MapKind::SourceRange => {
                    has(SourceRange::decode(layout, key, value).ok()?.rev_nat_index)
                }
                MapKind::AffinityMatch => {
                    has(AffinityMatch::decode(layout, key, value).ok()?.rev_nat_index)
                }
                MapKind::SkipLb => SkipLb::decode(layout, key, value).ok()?.address == self.address,
                MapKind::L2Responder => {
                    L2Responder::decode(layout, key, value).ok()?.address == self.address
                }
                MapKind::RuntimeConfig => {
                    runtime_config::RuntimeConfig::decode(layout, key, value).ok()?.index
                        <= runtime_config::AGENT_LIVENESS
                }
                MapKind::Endpoints => {
                    let endpoint = Endpoint::decode(layout, key, value).ok()?;
                    endpoint.flags.is_host()
                        || endpoint.address == self.address
                        || self.backend_addresses.contains(&endpoint.address)
                }
                _ => true,
            })
        };
        let entries = record.entries.selected(|key, value| keep(key, value).unwrap_or(true));
        let coverage =
            if entries.len() < record.entries.len() { Coverage::Selected } else { record.coverage };
        record.with(entries, coverage)
    }

    /// Looks up what is found by key alone.
    fn lookup(&self, map: &OpenMap, cpus: usize) -> Result<MapRecord, MapError> {
        let keys: Vec<Vec<u8>> = match map.layout.kind {
            MapKind::Maglev => {
                self.rev_nat.iter().map(|index| index.to_be_bytes().to_vec()).collect()
            }
            // The longest prefix wins, so the full address finds the entry that covers it.
            MapKind::Ipcache => self
                .backend_addresses
                .iter()
                .chain([&self.address])
                .map(|address| ipcache_key(*address))
                .collect(),
            _ => Vec::new(),
        };
        map.lookup(cpus, keys.iter().map(Vec::as_slice))
    }
}

/// The key that asks the IP cache for the longest prefix with `address` in it.
fn ipcache_key(address: IpAddr) -> Vec<u8> {
    let (family, bits, bytes) = match address {
        IpAddr::V4(address) => {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&address.octets());
            (1, 32, bytes)
        }
        IpAddr::V6(address) => (2, 128, address.octets()),
    };
    let key = IpcacheKey {
        // What stands before the address is part of the prefix.
        prefix_len: HostU32::new(32 + bits),
        cluster_id: 0.into(),
        pad: 0,
        family,
        address: bytes,
    };
    key.as_bytes().to_vec()
}
