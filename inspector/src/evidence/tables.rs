//! The maps in the evidence as typed tables, with everything that is malformed said.
//!
//! Decoding happens once, here; judging and printing look at these tables only.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    net::IpAddr,
};

use serde::Serialize;

use super::{Evidence, MapRecord, Subject};
use crate::cilium::{
    backends::Backend,
    endpoints::Endpoint,
    flags::ServiceFlags,
    ipcache::Ipcache,
    l2_responder::L2Responder,
    layout::{Family, LAYOUTS, Layout, MapKind},
    release::{self, Release, ReleaseRange},
    reverse_nat::ReverseNat,
    runtime_config::{AGENT_LIVENESS, RuntimeConfig},
    services::{ServiceKey, ServiceValue},
    source_range::SourceRange,
};

/// An entry of a services map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServiceEntry {
    /// The key.
    pub key: ServiceKey,
    /// The value.
    pub value: ServiceValue,
}

/// The load balancer's state as tables, sorted by key.
#[derive(Debug)]
pub struct Tables {
    /// The releases that can have written these maps.
    pub releases: ReleaseRange,
    /// All service entries, masters before their slots.
    services: Vec<ServiceEntry>,
    backends: [Vec<Backend>; 2],
    /// Reverse NAT entries, by family and index.
    pub reverse_nat: BTreeMap<(Family, u16), ReverseNat>,
    /// Source ranges, by family and reverse NAT index.
    pub source_ranges: BTreeMap<(Family, u16), Vec<SourceRange>>,
    /// Local endpoints and addresses of the node.
    pub endpoints: HashMap<IpAddr, Endpoint>,
    /// Entries of the IP cache that were looked up, by the address that was asked for.
    pub ipcache: HashMap<IpAddr, Ipcache>,
    /// Responder entries.
    pub l2_responder: Vec<L2Responder>,
    /// The agent's last sign of life, `CLOCK_MONOTONIC` nanoseconds; 0 is "never".
    pub agent_liveness_ns: Option<u64>,
    /// What is wrong with the maps themselves.
    pub problems: Vec<Problem>,
    /// Whether Cilium has no load balancer maps of the VIP's family here (see
    /// [`Tables::for_vip`]).
    pub family_absent: bool,
}

/// One frontend: a master entry and its slots, either of which may be missing.
#[derive(Debug, Clone, Copy)]
pub struct Frontend<'t> {
    /// Key of the master entry.
    pub key: ServiceKey,
    /// Value of the master entry.
    pub master: Option<&'t ServiceValue>,
    /// The slots that are there, in ascending order.
    pub slots: &'t [ServiceEntry],
}

/// Something that is wrong with the maps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Problem {
    /// A map could not be opened, read or understood.
    Map {
        /// Name of the pin.
        map: String,
        /// Why.
        reason: String,
    },
    /// An entry could not be decoded.
    Entry {
        /// Name of the map.
        map: String,
        /// Why.
        reason: String,
    },
    /// Several entries have the same key, which the kernel does not allow.
    KeysTwice {
        /// The table.
        table: String,
        /// How many entries are too many.
        count: usize,
    },
    /// The map changed faster than it could be read.
    Incomplete {
        /// Name of the map.
        map: String,
    },
    /// An older generation of a map is there beside the one in use.
    OlderGeneration {
        /// Name of the older map.
        map: String,
        /// Name of the one that the datapath uses.
        superseded_by: String,
    },
    /// A slot names a backend that is not there.
    SlotWithoutBackend {
        /// The frontend.
        frontend: String,
        /// The slot.
        slot: u16,
        /// The backend's id.
        backend: u32,
        /// Whether the datapath can choose this slot.
        selectable: bool,
    },
    /// The master counts more backends than there are slots.
    SlotsMissing {
        /// The frontend.
        frontend: String,
        /// How many slots are not there.
        missing: usize,
        /// The first of them.
        first: u16,
        /// The master's count.
        count: u16,
    },
    /// Slots have no master.
    SlotsWithoutMaster {
        /// The frontend.
        frontend: String,
        /// How many slots.
        slots: usize,
    },
    /// Flag bits that this release gives no meaning to.
    UnknownFlags {
        /// The frontend.
        frontend: String,
        /// The bits.
        bits: u16,
    },
    /// A scope that no release writes.
    UnknownScope {
        /// The frontend.
        frontend: String,
        /// The scope byte.
        scope: u8,
    },
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Map { map: _, reason } => f.write_str(reason),
            Self::Entry { map, reason } => write!(f, "{map}: an entry cannot be decoded: {reason}"),
            Self::KeysTwice { table, count } => {
                write!(f, "{table}: {count} entries repeat the key of another and were passed over")
            }
            Self::Incomplete { map } => {
                write!(f, "{map} changed faster than it could be read: entries may be missing")
            }
            Self::OlderGeneration { map, superseded_by } => {
                write!(f, "{map} is left over beside {superseded_by}, which is the one in use")
            }
            Self::SlotWithoutBackend { frontend, slot, backend, selectable } => {
                let chosen = if *selectable { "" } else { " (a slot that is never chosen)" };
                write!(
                    f,
                    "{frontend}: slot {slot} names backend {backend}, which is not there{chosen}"
                )
            }
            Self::SlotsMissing { frontend, missing: 1, first, count } => {
                write!(f, "{frontend}: slot {first} of {count} is not there")
            }
            Self::SlotsMissing { frontend, missing, first, count } => {
                write!(f, "{frontend}: {missing} of {count} slots are not there, from slot {first}")
            }
            Self::SlotsWithoutMaster { frontend, slots } => {
                write!(f, "{frontend}: {slots} slots without a master entry")
            }
            Self::UnknownFlags { frontend, bits } => {
                write!(f, "{frontend}: flag bits {bits:#06x} mean nothing in this Cilium release")
            }
            Self::UnknownScope { frontend, scope } => {
                write!(f, "{frontend}: scope {scope} is neither external (0) nor internal (1)")
            }
        }
    }
}

impl Tables {
    /// Reads the tables out of the evidence.
    #[must_use]
    pub fn new(evidence: &Evidence) -> Self {
        let pins =
            || evidence.bpffs.iter().filter(|bpffs| bpffs.read).flat_map(|bpffs| &bpffs.pins);
        let any_proto = evidence.services_by_protocol.keys().any(|name| name != "ANY");
        let mut tables = Self {
            releases: release::detect(pins().map(String::as_str), any_proto),
            services: Vec::new(),
            backends: [Vec::new(), Vec::new()],
            reverse_nat: BTreeMap::new(),
            source_ranges: BTreeMap::new(),
            endpoints: HashMap::new(),
            ipcache: HashMap::new(),
            l2_responder: Vec::new(),
            agent_liveness_ns: None,
            problems: Vec::new(),
            family_absent: false,
        };
        for record in &evidence.maps {
            if let Some(reason) = &record.problem {
                tables
                    .problems
                    .push(Problem::Map { map: record.name.clone(), reason: reason.clone() });
                continue;
            }
            if !record.complete {
                tables.problems.push(Problem::Incomplete { map: record.name.clone() });
            }
            match record.layout() {
                Ok(layout) => tables.add(record, layout),
                Err(error) => tables
                    .problems
                    .push(Problem::Map { map: record.name.clone(), reason: error.to_string() }),
            }
        }
        tables.sort();
        tables.find_older_generations(pins().map(String::as_str));
        tables.find_malformed(evidence);
        tables
    }

    /// Reads the tables for a question about one VIP: what the evidence lacks for it is a problem.
    #[must_use]
    pub fn for_vip(evidence: &Evidence, address: IpAddr) -> Self {
        const NEEDED: [MapKind; 3] = [MapKind::Services, MapKind::Backends, MapKind::ReverseNat];
        const HELPFUL: [MapKind; 4] = [
            MapKind::SourceRange,
            MapKind::L2Responder,
            MapKind::RuntimeConfig,
            MapKind::Endpoints,
        ];
        let mut tables = Self::new(evidence);
        let pins: Vec<&str> = evidence
            .bpffs
            .iter()
            .filter(|bpffs| bpffs.read)
            .flat_map(|bpffs| bpffs.pins.iter().map(String::as_str))
            .collect();
        let of_kind = |name: &str, kind: MapKind, family: Family| {
            LAYOUTS.iter().any(|layout| {
                layout.name == name
                    && layout.kind == kind
                    && layout.family.is_none_or(|other| other == family)
            })
        };
        let family = family_of(address);
        let pinned = |kind, family| pins.iter().copied().rfind(|pin| of_kind(pin, kind, family));
        let other = if family == Family::V4 { Family::V6 } else { Family::V4 };
        tables.family_absent = NEEDED.iter().all(|&kind| pinned(kind, family).is_none())
            && NEEDED.iter().any(|&kind| pinned(kind, other).is_some());
        if tables.family_absent {
            return tables;
        }
        let has_ranges = tables.frontends().any(|frontend| {
            frontend.key.address == address
                && frontend.master.is_some_and(|master| master.flags().source_range())
        });
        for kind in NEEDED.into_iter().chain(HELPFUL) {
            if evidence.maps.iter().any(|record| of_kind(&record.name, kind, family)) {
                continue;
            }
            match pinned(kind, family) {
                Some(pin) => tables.problems.push(Problem::Map {
                    map: pin.to_owned(),
                    reason: format!("{pin} was not collected into this evidence"),
                }),
                None if NEEDED.contains(&kind) || kind == MapKind::SourceRange && has_ranges => {
                    // The name of the newest generation stands for the map that is not there.
                    let newest = LAYOUTS
                        .iter()
                        .filter(|layout| layout.kind == kind && layout.family == Some(family))
                        .max_by_key(|layout| layout.generation);
                    let map = newest.map_or("", |layout| layout.name).to_owned();
                    let reason = format!("{map} is not pinned, nor an older form of it");
                    tables.problems.push(Problem::Map { map, reason });
                }
                None => {}
            }
        }
        tables
    }

    /// Why what the maps of this kind say for a VIP may be incomplete; nothing if it is complete.
    #[must_use]
    pub fn doubt(&self, kind: MapKind, address: IpAddr) -> Option<&Problem> {
        let family = family_of(address);
        self.problems.iter().find(|problem| match problem {
            Problem::Map { map, .. } | Problem::Entry { map, .. } | Problem::Incomplete { map } => {
                LAYOUTS.iter().any(|layout| {
                    layout.name == map
                        && layout.kind == kind
                        && layout.family.is_none_or(|other| other == family)
                })
            }
            _ => false,
        })
    }

    /// Sorts by key. A key is unique in the kernel; one that comes twice all the same (padding
    /// that differs, evidence made by hand) counts once, so that what follows may rely on it.
    fn sort(&mut self) {
        fn unique<T, K: Ord>(table: &mut Vec<T>, key: impl Fn(&T) -> K) -> usize {
            let before = table.len();
            table.sort_unstable_by_key(&key);
            table.dedup_by_key(|entry| key(entry));
            before - table.len()
        }

        let services = unique(&mut self.services, |entry| entry.key);
        let [v4, v6] = self.backends.each_mut().map(|table| unique(table, |backend| backend.id));
        for (table, count) in [("services", services), ("IPv4 backends", v4), ("IPv6 backends", v6)]
        {
            if count > 0 {
                self.problems.push(Problem::KeysTwice { table: table.to_owned(), count });
            }
        }
    }

    fn add(&mut self, record: &MapRecord, layout: &'static Layout) {
        let mut bad = None;
        {
            let mut note = |result: Result<(), crate::cilium::error::DecodeError>| {
                if let Err(error) = result {
                    bad.get_or_insert(error);
                }
            };
            let entries = record.entries.iter();
            match layout.kind {
                MapKind::Services => {
                    self.services.reserve(entries.len());
                    for (key, value) in entries {
                        note(ServiceKey::decode(layout.name, key).and_then(|key| {
                            let value = ServiceValue::decode(layout.name, value)?;
                            self.services.push(ServiceEntry { key, value });
                            Ok(())
                        }));
                    }
                }
                MapKind::Backends => {
                    let backends = &mut self.backends[family_index(layout.family)];
                    backends.reserve(entries.len());
                    for (key, value) in entries {
                        note(
                            Backend::decode(layout, key, value)
                                .map(|backend| backends.push(backend)),
                        );
                    }
                }
                MapKind::ReverseNat => {
                    let family = layout.family.unwrap_or(Family::V4);
                    for (key, value) in entries {
                        note(ReverseNat::decode(layout, key, value).map(|entry| {
                            self.reverse_nat.insert((family, entry.index), entry);
                        }));
                    }
                }
                MapKind::SourceRange => {
                    let family = layout.family.unwrap_or(Family::V4);
                    for (key, value) in entries {
                        note(SourceRange::decode(layout, key, value).map(|range| {
                            self.source_ranges
                                .entry((family, range.rev_nat_index))
                                .or_default()
                                .push(range);
                        }));
                    }
                }
                MapKind::Endpoints => {
                    for (key, value) in entries {
                        note(Endpoint::decode(layout, key, value).map(|endpoint| {
                            self.endpoints.insert(endpoint.address, endpoint);
                        }));
                    }
                }
                MapKind::Ipcache => {
                    for (key, value) in entries {
                        note(Ipcache::decode(layout, key, value).map(|entry| {
                            self.ipcache.insert(entry.address, entry);
                        }));
                    }
                }
                MapKind::L2Responder => {
                    for (key, value) in entries {
                        note(
                            L2Responder::decode(layout, key, value)
                                .map(|entry| self.l2_responder.push(entry)),
                        );
                    }
                    self.l2_responder.sort_by_key(|entry| (entry.address, entry.ifindex));
                }
                MapKind::RuntimeConfig => {
                    for (key, value) in entries {
                        note(RuntimeConfig::decode(layout, key, value).map(|entry| {
                            if entry.index == AGENT_LIVENESS {
                                self.agent_liveness_ns = Some(entry.value);
                            }
                        }));
                    }
                }
                _ => {}
            }
        }
        if let Some(error) = bad {
            self.problems
                .push(Problem::Entry { map: record.name.clone(), reason: error.to_string() });
        }
    }

    /// Reports maps of an older generation that stand beside a newer one.
    fn find_older_generations<'a>(&mut self, pins: impl Iterator<Item = &'a str>) {
        let present: Vec<&Layout> =
            pins.flat_map(|pin| LAYOUTS.iter().filter(move |layout| layout.name == pin)).collect();
        for older in &present {
            let newer = present
                .iter()
                .filter(|newer| (newer.kind, newer.family) == (older.kind, older.family))
                .filter(|newer| newer.name != older.name && newer.generation > older.generation)
                .max_by_key(|newer| newer.generation);
            if let Some(newer) = newer {
                self.problems.push(Problem::OlderGeneration {
                    map: older.name.to_owned(),
                    superseded_by: newer.name.to_owned(),
                });
            }
        }
    }

    fn find_malformed(&mut self, evidence: &Evidence) {
        let release = self.releases.at_most;
        // A list of frontends alone is made without backends.
        let read = |family: Family| {
            evidence.subject != Subject::Tables
                || evidence.maps.iter().any(|record| {
                    record.kind().is_some_and(|(kind, of, _)| {
                        kind == MapKind::Backends && of.is_none_or(|of| of == family)
                    })
                })
        };
        let known = [IpAddr::from([0; 4]), IpAddr::from([0; 16])].map(|address| {
            read(family_of(address)) && self.doubt(MapKind::Backends, address).is_none()
        });
        let has_backends = |key: &ServiceKey| known[usize::from(key.address.is_ipv6())];
        let mut found = Vec::new();
        for frontend in self.frontends() {
            let name = || FrontendName { key: frontend.key, release }.to_string();
            if let crate::cilium::services::Scope::Other(scope) = frontend.key.scope {
                found.push(Problem::UnknownScope { frontend: name(), scope });
            }
            let count = frontend.master.map_or(0, |master| master.count.get());
            if let Some(master) = frontend.master {
                let unknown = master.flags().unknown(release);
                if unknown != ServiceFlags(0) {
                    found.push(Problem::UnknownFlags { frontend: name(), bits: unknown.0 });
                }
            } else {
                let slots = frontend.slots.len();
                found.push(Problem::SlotsWithoutMaster { frontend: name(), slots });
            }
            let chosen = frontend.slots.partition_point(|entry| entry.key.slot <= count);
            let missing = usize::from(count) - chosen;
            if missing > 0 {
                let gap = (1..=count)
                    .zip(frontend.slots.iter().map(|entry| entry.key.slot).chain([0]))
                    .find(|(expected, present)| expected != present);
                let first = gap.map_or(count, |(expected, _)| expected);
                found.push(Problem::SlotsMissing { frontend: name(), missing, first, count });
            }
            if !has_backends(&frontend.key) {
                continue;
            }
            for entry in frontend.slots {
                let backend = entry.value.union.get();
                if self.backend(entry.key.address, backend).is_none() {
                    found.push(Problem::SlotWithoutBackend {
                        frontend: name(),
                        slot: entry.key.slot,
                        backend,
                        selectable: entry.key.slot <= count,
                    });
                }
            }
        }
        self.problems.extend(found);
    }

    /// All service entries, sorted by address, port, protocol, scope and slot.
    #[must_use]
    pub fn services(&self) -> &[ServiceEntry] {
        &self.services
    }

    /// All backends of a family, sorted by id.
    #[must_use]
    pub fn backends(&self, family: Family) -> &[Backend] {
        &self.backends[family_index(Some(family))]
    }

    /// The backend with this id in the map that serves the family of `frontend`.
    #[must_use]
    pub fn backend(&self, frontend: IpAddr, id: u32) -> Option<&Backend> {
        let backends = &self.backends[usize::from(frontend.is_ipv6())];
        backends.binary_search_by_key(&id, |backend| backend.id).ok().map(|index| &backends[index])
    }

    /// All frontends in the order of their keys.
    pub fn frontends(&self) -> impl Iterator<Item = Frontend<'_>> {
        self.services.chunk_by(|one, other| master_key(one.key) == master_key(other.key)).map(
            |group| {
                let (master, slots) = match group.split_first() {
                    Some((first, slots)) if first.key.is_master() => (Some(&first.value), slots),
                    _ => (None, group),
                };
                Frontend { key: master_key(group[0].key), master, slots }
            },
        )
    }

    /// The newest release that can have written these maps: its words and rules are used.
    #[must_use]
    pub fn release(&self) -> Release {
        self.releases.at_most
    }

    /// The reverse NAT entry with this index, for a frontend of the given address's family.
    #[must_use]
    pub fn reverse_nat_of(&self, frontend: IpAddr, index: u16) -> Option<&ReverseNat> {
        self.reverse_nat.get(&(family_of(frontend), index))
    }
}

/// The family of an address.
#[must_use]
pub fn family_of(address: IpAddr) -> Family {
    if address.is_ipv4() { Family::V4 } else { Family::V6 }
}

fn master_key(key: ServiceKey) -> ServiceKey {
    ServiceKey { slot: 0, ..key }
}

fn family_index(family: Option<Family>) -> usize {
    usize::from(family == Some(Family::V6))
}

/// A frontend as Cilium prints it: `192.168.2.20:443/TCP`, `/i` behind for the internal scope, no
/// protocol for releases whose keys have none.
#[derive(Debug, Clone, Copy)]
pub struct FrontendName {
    /// Key of the frontend.
    pub key: ServiceKey,
    /// Release whose form is used.
    pub release: Release,
}

impl fmt::Display for FrontendName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ServiceKey { address, port, protocol, scope, slot: _ } = self.key;
        match address {
            IpAddr::V4(address) => write!(f, "{address}:{port}")?,
            IpAddr::V6(address) => write!(f, "[{address}]:{port}")?,
        }
        if self.release >= Release::V1_17 {
            write!(f, "/{protocol}")?;
        }
        if scope == crate::cilium::services::Scope::Internal {
            f.write_str("/i")?;
        }
        Ok(())
    }
}
