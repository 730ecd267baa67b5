//! What is programmed for a VIP: each frontend with its backends, put together from the maps.
//!
//! No judgement here: this is what the maps say, in the words of the field.

use std::{collections::BTreeMap, net::IpAddr};

use schemars::JsonSchema;
use serde::Serialize;

use crate::{
    cilium::{
        backends::Backend,
        flags::{ServiceFlags, ServiceType},
        ipcache::Identity,
        layout::{Family, MapKind},
        maglev::MaglevTable,
        proto::Protocol,
        release::Release,
        services::{Scope, ServiceKey, ServiceValue},
    },
    evidence::{
        Device, Evidence, VipQuery, parse_hex,
        tables::{Frontend, FrontendName, ServiceEntry, Tables, family_of},
    },
};

/// externalTrafficPolicy or internalTrafficPolicy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub enum TrafficPolicy {
    /// Backends of all nodes.
    Cluster,
    /// Backends of this node only.
    Local,
}

impl TrafficPolicy {
    fn new(local: bool) -> Self {
        if local { Self::Local } else { Self::Cluster }
    }
}

/// One scope of one frontend.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[allow(clippy::struct_excessive_bools, reason = "independent properties, each a field in JSON")]
pub struct ProgrammedFrontend {
    /// As Cilium prints it: `192.168.2.20:443/TCP`, `/i` behind for the internal scope.
    pub frontend: String,
    /// Address.
    pub address: IpAddr,
    /// Port; 0 in a wildcard entry.
    pub port: u16,
    /// Protocol; `ANY` before 1.17 and in wildcard entries.
    #[schemars(with = "String")]
    pub protocol: Protocol,
    /// `external` or `internal`.
    #[schemars(with = "String")]
    pub scope: Scope,
    /// Whether there is a master entry; without one nothing finds the slots.
    pub master: bool,
    /// Whether this is a wildcard entry: packets to the address that no other entry matches are
    /// dropped (1.19+).
    pub wildcard: bool,
    /// Service type.
    #[serde(rename = "type")]
    #[schemars(with = "String")]
    pub service_type: ServiceType,
    /// Flags in the words of `cilium-dbg bpf lb list`.
    pub flags: String,
    /// externalTrafficPolicy.
    pub external_traffic_policy: TrafficPolicy,
    /// internalTrafficPolicy (1.14+).
    pub internal_traffic_policy: TrafficPolicy,
    /// Whether external and internal scope have entries of their own.
    pub two_scopes: bool,
    /// Whether the frontend may be reached from outside of the node.
    pub routable: bool,
    /// Session affinity timeout in seconds.
    pub session_affinity_s: Option<u32>,
    /// Algorithm of this service, where it has one of its own.
    pub algorithm: Option<&'static str>,
    /// L7: port of the local proxy.
    pub l7_proxy_port: Option<u16>,
    /// Whether packets for a backend of this node are left to a local proxy, which is to take them
    /// from the kernel's stack (1.18+).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub delegated: bool,
    /// Source ranges.
    pub source_ranges: Option<SourceRanges>,
    /// Whether it is forwarded with DSR.
    pub dsr: bool,
    /// Number of backends that can be chosen.
    pub count: u16,
    /// Number of further backends that own a slot but are not chosen (1.17+).
    pub qcount: u16,
    /// Share of the choosable slots that lead to a backend, from 0 to 1; nothing without slots, or
    /// where it could not be read where they lead.
    pub usable_share: Option<f64>,
    /// The Maglev table by which backends are chosen instead of by slot, where there is one.
    pub maglev: Option<Maglev>,
    /// Reverse NAT.
    pub reverse_nat: ReverseNatState,
    /// Backends, in the order of their slots.
    pub backends: Vec<ProgrammedBackend>,
}

/// How a frontend's Maglev table shares connections out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Maglev {
    /// Number of places in the table.
    pub places: usize,
    /// Places of each backend id.
    pub backends: BTreeMap<u32, usize>,
    /// Places whose backend is not there.
    pub nowhere: usize,
}

/// Which clients may use a frontend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct SourceRanges {
    /// Whether the ranges deny instead of allow.
    pub deny: bool,
    /// The ranges in CIDR notation, sorted.
    pub ranges: Vec<String>,
    /// Whether they are all there is: the map that holds them was read.
    pub complete: bool,
}

impl SourceRanges {
    /// Whether a source is let through; nothing if not all ranges could be read.
    #[must_use]
    pub fn admit(&self, source: IpAddr) -> Option<bool> {
        let inside = || self.ranges.iter().any(|range| super::walk::contains(range, source));
        self.complete.then(|| inside() != self.deny)
    }
}

/// The reverse NAT entry of a frontend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ReverseNatState {
    /// Index, which is also the frontend's id.
    pub id: u16,
    /// Address and port that the entry restores, if it is there.
    pub restores: Option<String>,
    /// Whether the entry is there and restores this frontend; nothing where that could not be
    /// read.
    pub good: Option<bool>,
}

/// One slot of a frontend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ProgrammedBackend {
    /// Slot number.
    pub slot: u16,
    /// Backend id.
    pub id: u32,
    /// Address and port; nothing if the slot or the backend is not there, or was not read.
    pub address: Option<String>,
    /// Whether the slot leads nowhere for certain: it or its backend is not in the maps.
    pub dangling: bool,
    /// State, in Cilium's words.
    pub state: String,
    /// Whether the datapath chooses this slot.
    pub selectable: bool,
    /// Where the backend is.
    pub location: Location,
}

/// Where a backend is, as far as the maps tell.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Location {
    /// A pod of this node.
    LocalEndpoint {
        /// Endpoint id.
        endpoint: u16,
        /// Interface index of its device on the node.
        ifindex: u32,
    },
    /// An address of this node.
    ThisNode,
    /// Elsewhere.
    Remote {
        /// Node through which it is reached, if the IP cache names one.
        node: Option<IpAddr>,
        /// Security identity, if the IP cache has one.
        identity: Option<u32>,
    },
    /// The maps that tell were not read.
    Unknown,
}

impl std::fmt::Display for Location {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::LocalEndpoint { endpoint, ifindex } => {
                write!(f, "local pod, endpoint {endpoint}, ifindex {ifindex}")
            }
            Self::ThisNode => f.write_str("this node"),
            Self::Remote { node: Some(node), .. } => write!(f, "on node {node}"),
            Self::Remote { node: None, identity: Some(identity) } => {
                let identity = Identity(*identity);
                match identity.reserved_name() {
                    Some(name) if name.starts_with("world") => f.write_str("outside the cluster"),
                    Some(name) => write!(f, "elsewhere ({name})"),
                    None => write!(f, "elsewhere (identity {})", identity.0),
                }
            }
            Self::Remote { node: None, identity: None } => f.write_str("elsewhere"),
            Self::Unknown => f.write_str("unknown"),
        }
    }
}

/// Who answers ARP or neighbour solicitations for the VIP.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Announcement {
    /// Whether this node has the responder map (1.14+ with L2 announcements; IPv6: 1.19+).
    pub responder_map: bool,
    /// Why it cannot be told from the responder map whether this node answers.
    pub unknown: Option<String>,
    /// Entries for this address.
    pub entries: Vec<ResponderEntry>,
    /// Seconds since the agent's last sign of life; nothing where the map has none.
    pub agent_silent_s: Option<u64>,
    /// Whether the responder answers: it falls silent 15 s after the agent did.
    pub answering: bool,
}

/// One responder entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ResponderEntry {
    /// Interface index.
    pub ifindex: u32,
    /// Interface name, if it is known.
    pub device: Option<String>,
    /// Answers so far.
    pub answers: u64,
}

/// The agent counts as gone when it gave no sign of life for this long (the lease duration, to
/// which Cilium's L2 responder compares).
pub const AGENT_TIMEOUT_S: u64 = 15;

/// Everything that is programmed for a VIP.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct Programmed {
    /// The releases that can have written the maps, `1.18` or `1.14 to 1.15`.
    pub release: String,
    /// The frontends that were asked for, wildcard entries apart.
    pub frontends: Vec<ProgrammedFrontend>,
    /// Wildcard entries of the address (1.19+).
    pub wildcards: Vec<ProgrammedFrontend>,
    /// Other frontends of the same address, when only one was asked for.
    pub others: Vec<String>,
    /// L2 announcement.
    pub announcement: Announcement,
}

impl Programmed {
    /// Puts together what the tables hold for `query`.
    #[must_use]
    pub fn new(evidence: &Evidence, tables: &Tables, query: &VipQuery) -> Self {
        let mut frontends = Vec::new();
        let mut wildcards = Vec::new();
        let mut others = Vec::new();
        for frontend in tables.frontends().filter(|found| found.key.address == query.address) {
            if frontend.key.is_wildcard() {
                wildcards.push(ProgrammedFrontend::new(evidence, tables, frontend));
            } else if matches(query, &frontend.key) {
                frontends.push(ProgrammedFrontend::new(evidence, tables, frontend));
            } else {
                others.push(
                    FrontendName { key: frontend.key, release: tables.release() }.to_string(),
                );
            }
        }
        Self {
            release: tables.releases.to_string(),
            frontends,
            wildcards,
            others,
            announcement: Announcement::new(evidence, tables, query),
        }
    }
}

/// Every scope of every frontend of a node, wildcard entries included, in the order of their keys.
pub(super) fn of_all<'t>(
    evidence: &'t Evidence,
    tables: &'t Tables,
) -> impl Iterator<Item = ProgrammedFrontend> + 't {
    tables.frontends().map(|frontend| ProgrammedFrontend::new(evidence, tables, frontend))
}

/// Whether the query asks for this frontend; keys without a protocol match any.
fn matches(query: &VipQuery, key: &ServiceKey) -> bool {
    query.port.is_none_or(|port| port == key.port)
        && query
            .protocol
            .is_none_or(|protocol| protocol == key.protocol || key.protocol == Protocol::ANY)
}

impl ProgrammedFrontend {
    fn new(evidence: &Evidence, tables: &Tables, frontend: Frontend<'_>) -> Self {
        let Frontend { key, master, slots } = frontend;
        let ServiceKey { address, port, protocol, scope, slot: _ } = key;
        let release = tables.release();
        // Without a master the slots still name the frontend's id.
        let any_value = master.or_else(|| slots.first().map(|entry| &entry.value));
        let flags = master.map_or(ServiceFlags(0), ServiceValue::flags);
        let count = master.map_or(0, |master| master.count.get());
        let qcount = master.map_or(0, |master| master.qcount.get());
        let backends = backends(evidence, tables, &frontend, count);
        let usable = backends
            .iter()
            .filter(|backend| backend.selectable && backend.address.is_some())
            .count();
        let all_read =
            backends.iter().all(|one| !one.selectable || one.address.is_some() || one.dangling);
        let id = any_value.map_or(0, |value| value.rev_nat_index.get());
        let random = master.is_some_and(|master| master.algorithm() == 1);
        let maglev = if flags.l7() || random { None } else { maglev(evidence, tables, &key, id) };
        #[allow(clippy::cast_precision_loss, reason = "at most 131071 places")]
        let share = match &maglev {
            Some(table) => Some(1.0 - table.nowhere as f64 / table.places.max(1) as f64),
            None => Some(usable as f64 / f64::from(count.max(1))),
        };
        let ranges = || {
            let mut ranges: Vec<String> = tables
                .source_ranges
                .get(&(family_of(address), id))
                .into_iter()
                .flatten()
                .map(|range| format!("{}/{}", range.address, range.prefix_len))
                .collect();
            ranges.sort();
            ranges
        };
        Self {
            frontend: FrontendName { key, release }.to_string(),
            address,
            port,
            protocol,
            scope,
            master: master.is_some(),
            wildcard: key.is_wildcard(),
            service_type: flags.service_type(),
            flags: flags.text(release).to_string(),
            external_traffic_policy: TrafficPolicy::new(flags.ext_local()),
            internal_traffic_policy: TrafficPolicy::new(flags.int_local()),
            two_scopes: flags.two_scopes(),
            routable: flags.routable(),
            session_affinity_s: master
                .filter(|_| flags.affinity() && !flags.l7())
                .map(ServiceValue::affinity_timeout_s),
            algorithm: master.filter(|_| !flags.l7()).and_then(|master| match master.algorithm() {
                1 => Some("random"),
                2 => Some("maglev"),
                _ => None,
            }),
            delegated: flags.delegated(release),
            l7_proxy_port: master.filter(|_| flags.l7()).map(ServiceValue::l7_proxy_port),
            source_ranges: flags.source_range().then(|| SourceRanges {
                deny: flags.source_range_denies(),
                ranges: ranges(),
                complete: tables.doubt(MapKind::SourceRange, address).is_none(),
            }),
            dsr: flags.dsr(),
            count,
            qcount,
            usable_share: share.filter(|_| count > 0 && all_read),
            maglev,
            reverse_nat: reverse_nat(tables, &key, id),
            backends,
        }
    }

    /// Number of choosable slots of which it could not be read where they lead.
    #[must_use]
    pub fn unread(&self) -> usize {
        self.backends
            .iter()
            .filter(|one| one.selectable && one.address.is_none() && !one.dangling)
            .count()
    }

    /// `2 of 3 backends usable`
    #[must_use]
    pub fn usable_of_count(&self) -> String {
        match self.unread() {
            0 => format!("{} of {} backends usable", self.usable(), self.count),
            unread => format!("{unread} of {} backends not read", self.count),
        }
    }

    /// Number of choosable slots that lead to a backend.
    #[must_use]
    pub fn usable(&self) -> usize {
        self.backends
            .iter()
            .filter(|backend| backend.selectable && backend.address.is_some())
            .count()
    }
}

fn maglev(evidence: &Evidence, tables: &Tables, key: &ServiceKey, id: u16) -> Option<Maglev> {
    let map = match family_of(key.address) {
        Family::V4 => "cilium_lb4_maglev",
        Family::V6 => "cilium_lb6_maglev",
    };
    let record = evidence.maglev.iter().find(|one| one.map == map && one.frontend == id)?;
    let value = parse_hex(&record.value)?;
    let layout = evidence.maps.iter().filter_map(|map| map.layout().ok()).find(|layout| {
        layout.kind == MapKind::Backends && layout.family == Some(family_of(key.address))
    })?;
    let table = MaglevTable::decode(layout, &value).ok()?;
    let mut backends: BTreeMap<u32, usize> = BTreeMap::new();
    for backend in table.ids() {
        *backends.entry(backend).or_default() += 1;
    }
    let nowhere = backends
        .iter()
        .filter(|(id, _)| tables.backend(key.address, **id).is_none())
        .map(|(_, places)| places)
        .sum();
    Some(Maglev { places: table.len(), backends, nowhere })
}

fn reverse_nat(tables: &Tables, key: &ServiceKey, id: u16) -> ReverseNatState {
    let entry = tables.reverse_nat_of(key.address, id);
    ReverseNatState {
        id,
        restores: entry.map(|entry| match entry.address {
            IpAddr::V4(address) => format!("{address}:{}", entry.port),
            IpAddr::V6(address) => format!("[{address}]:{}", entry.port),
        }),
        good: match entry {
            // Wildcard entries have no id and need none.
            _ if key.is_wildcard() => Some(true),
            Some(entry) => Some((entry.address, entry.port) == (key.address, key.port)),
            None => tables.doubt(MapKind::ReverseNat, key.address).is_none().then_some(false),
        },
    }
}

/// All slots, those that the master counts but that are not there included.
fn backends(
    evidence: &Evidence,
    tables: &Tables,
    frontend: &Frontend<'_>,
    count: u16,
) -> Vec<ProgrammedBackend> {
    let slots_read = tables.doubt(MapKind::Services, frontend.key.address).is_none();
    let backends_read = tables.doubt(MapKind::Backends, frontend.key.address).is_none();
    let mut rows = Vec::new();
    let mut slots = frontend.slots.iter().peekable();
    let mut expected = 1..=count;
    loop {
        let next = slots.peek().map(|entry| entry.key.slot);
        let missing = match (expected.clone().next(), next) {
            (Some(slot), Some(present)) if slot < present => Some(slot),
            (Some(slot), None) => Some(slot),
            _ => None,
        };
        if let Some(slot) = missing {
            expected.next();
            rows.push(ProgrammedBackend {
                slot,
                id: 0,
                address: None,
                dangling: slots_read,
                state: if slots_read { "slot is not there" } else { "slot was not read" }
                    .to_owned(),
                selectable: true,
                location: Location::Unknown,
            });
            continue;
        }
        let Some(entry) = slots.next() else { break };
        if expected.clone().next() == Some(entry.key.slot) {
            expected.next();
        }
        rows.push(backend(evidence, tables, entry, count, backends_read));
    }
    rows
}

fn backend(
    evidence: &Evidence,
    tables: &Tables,
    entry: &ServiceEntry,
    count: u16,
    backends_read: bool,
) -> ProgrammedBackend {
    let id = entry.value.union.get();
    let selectable = entry.key.slot <= count;
    let found = tables.backend(entry.key.address, id);
    ProgrammedBackend {
        slot: entry.key.slot,
        id,
        address: found.map(|found| backend_address(found, tables.release())),
        dangling: found.is_none() && backends_read,
        state: found.map_or_else(
            || {
                if backends_read { "backend is not there" } else { "backend was not read" }
                    .to_owned()
            },
            |found| found.state.as_str().unwrap_or("unknown state").to_owned(),
        ),
        selectable,
        location: found.map_or(Location::Unknown, |found| locate(evidence, tables, found.address)),
    }
}

/// Address, port and (from 1.17) protocol of a backend.
pub(super) fn backend_address(backend: &Backend, release: Release) -> String {
    let place = match backend.address {
        IpAddr::V4(address) => format!("{address}:{}", backend.port),
        IpAddr::V6(address) => format!("[{address}]:{}", backend.port),
    };
    if release >= Release::V1_17 { format!("{place}/{}", backend.protocol) } else { place }
}

fn locate(evidence: &Evidence, tables: &Tables, address: IpAddr) -> Location {
    if let Some(endpoint) = tables.endpoints.get(&address) {
        return if endpoint.flags.is_host() {
            Location::ThisNode
        } else {
            Location::LocalEndpoint { endpoint: endpoint.lxc_id, ifindex: endpoint.ifindex }
        };
    }
    let cache = tables.ipcache.get(&address);
    let endpoints_read =
        evidence.maps.iter().any(|map| map.name == "cilium_lxc" && map.problem.is_none());
    let node = cache.and_then(|entry| entry.tunnel_endpoint);
    // What the IP cache knows of a pod of this node is no more than of one behind native routing.
    if node.is_none() && !endpoints_read {
        return Location::Unknown;
    }
    Location::Remote { node, identity: cache.map(|entry| entry.identity.0) }
}

impl Announcement {
    fn new(evidence: &Evidence, tables: &Tables, query: &VipQuery) -> Self {
        let map = match query.address {
            IpAddr::V4(_) => "cilium_l2_responder_v4",
            IpAddr::V6(_) => "cilium_l2_responder_v6",
        };
        let name = |ifindex: u32| {
            evidence
                .devices
                .iter()
                .find(|device| device.ifindex == ifindex)
                .and_then(|Device { name, .. }| name.clone())
        };
        let entries: Vec<_> = tables
            .l2_responder
            .iter()
            .filter(|entry| entry.address == query.address)
            .map(|entry| ResponderEntry {
                ifindex: entry.ifindex,
                device: name(entry.ifindex),
                answers: entry.answers,
            })
            .collect();
        // The datapath subtracts unsigned: a time in the future counts as long ago, as does 0.
        let agent_silent_s = tables.agent_liveness_ns.map(|alive| match alive {
            0 => u64::MAX,
            alive => evidence
                .time
                .monotonic_ns
                .checked_sub(alive)
                .map_or(u64::MAX, |silent| silent / 1_000_000_000),
        });
        let alive = agent_silent_s.is_some_and(|silent| silent < AGENT_TIMEOUT_S);
        Self {
            responder_map: evidence
                .maps
                .iter()
                .any(|record| record.name == map && record.problem.is_none()),
            unknown: tables.doubt(MapKind::L2Responder, query.address).map(ToString::to_string),
            answering: alive && !entries.is_empty(),
            entries,
            agent_silent_s,
        }
    }
}
