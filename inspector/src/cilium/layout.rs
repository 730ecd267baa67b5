//! Which map a pin is, and which generation of its layout: told from its name, type and sizes.
//!
//! Cilium writes no version into bpffs. The table here holds every layout of the maps that
//! inspector reads, from Cilium 1.10 to 1.21-dev; a map that has a known name but other sizes is
//! reported with what was found and what is known, never guessed at. `max_entries` and the map
//! flags are configuration and take no part in the detection.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Kernel map type numbers (`enum bpf_map_type`) that Cilium's maps have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MapType(pub u32);

impl MapType {
    /// `BPF_MAP_TYPE_HASH`
    pub const HASH: Self = Self(1);
    /// `BPF_MAP_TYPE_ARRAY`
    pub const ARRAY: Self = Self(2);
    /// `BPF_MAP_TYPE_PROG_ARRAY`
    pub const PROG_ARRAY: Self = Self(3);
    /// `BPF_MAP_TYPE_PERF_EVENT_ARRAY`
    pub const PERF_EVENT_ARRAY: Self = Self(4);
    /// `BPF_MAP_TYPE_PERCPU_HASH`
    pub const PERCPU_HASH: Self = Self(5);
    /// `BPF_MAP_TYPE_PERCPU_ARRAY`
    pub const PERCPU_ARRAY: Self = Self(6);
    /// `BPF_MAP_TYPE_LRU_HASH`
    pub const LRU_HASH: Self = Self(9);
    /// `BPF_MAP_TYPE_LRU_PERCPU_HASH`
    pub const LRU_PERCPU_HASH: Self = Self(10);
    /// `BPF_MAP_TYPE_LPM_TRIE`
    pub const LPM_TRIE: Self = Self(11);
    /// `BPF_MAP_TYPE_ARRAY_OF_MAPS`
    pub const ARRAY_OF_MAPS: Self = Self(12);
    /// `BPF_MAP_TYPE_HASH_OF_MAPS`
    pub const HASH_OF_MAPS: Self = Self(13);

    /// Whether the kernel keeps this type in hash buckets.
    #[must_use]
    pub fn is_hash(self) -> bool {
        matches!(
            self,
            Self::HASH
                | Self::PERCPU_HASH
                | Self::LRU_HASH
                | Self::LRU_PERCPU_HASH
                | Self::HASH_OF_MAPS
        )
    }

    /// Whether a look-up from user space returns one value per possible CPU, each padded to 8
    /// bytes.
    #[must_use]
    pub fn is_per_cpu(self) -> bool {
        matches!(self, Self::PERCPU_HASH | Self::PERCPU_ARRAY | Self::LRU_PERCPU_HASH)
    }
}

impl fmt::Display for MapType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match *self {
            Self::HASH => "hash",
            Self::ARRAY => "array",
            Self::PROG_ARRAY => "prog_array",
            Self::PERF_EVENT_ARRAY => "perf_event_array",
            Self::PERCPU_HASH => "percpu_hash",
            Self::PERCPU_ARRAY => "percpu_array",
            Self::LRU_HASH => "lru_hash",
            Self::LRU_PERCPU_HASH => "lru_percpu_hash",
            Self::LPM_TRIE => "lpm_trie",
            Self::ARRAY_OF_MAPS => "array_of_maps",
            Self::HASH_OF_MAPS => "hash_of_maps",
            Self(other) => return write!(f, "type {other}"),
        };
        f.write_str(name)
    }
}

/// The IP family that a map serves, where its name says one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// IPv4
    V4,
    /// IPv6
    V6,
}

/// What a map is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MapKind {
    /// Frontends and their backend slots.
    Services,
    /// Backend id to address.
    Backends,
    /// Reverse NAT index to frontend address.
    ReverseNat,
    /// Socket-LB's reverse translation.
    ReverseSk,
    /// Client to backend, for session affinity.
    Affinity,
    /// Which backends belong to which affinity service.
    AffinityMatch,
    /// Allowed (or denied) client prefixes.
    SourceRange,
    /// Reverse NAT index to Maglev table (map in map).
    Maglev,
    /// Socket cookie to backend, for health probes.
    Health,
    /// Sockets that local redirect policies exempt from load balancing.
    SkipLb,
    /// Active connection counters.
    ActiveConnections,
    /// Addresses for which this node answers ARP or neighbour solicitations.
    L2Responder,
    /// Run-time configuration, agent liveness among it.
    RuntimeConfig,
    /// Local endpoints (pods and the node's own addresses).
    Endpoints,
    /// Prefix to identity and node.
    Ipcache,
    /// Connection tracking.
    Conntrack,
    /// Source NAT.
    Snat,
    /// Drop and forward counters.
    Metrics,
    /// Node address to node id.
    NodeMap,
    /// Client to MAC address.
    NodeportNeigh,
    /// Devices that Cilium manages (1.20+).
    Devices,
}

/// One known layout of one map.
#[derive(Debug, PartialEq, Eq)]
pub struct Layout {
    /// Name of the pin below `tc/globals`.
    pub name: &'static str,
    /// What the map is for.
    pub kind: MapKind,
    /// IP family, where the map serves only one.
    pub family: Option<Family>,
    /// Number that orders the layouts of the same kind and family: the highest one present is the
    /// one that the datapath uses.
    pub generation: u8,
    /// Kernel map types that this layout has been seen with.
    pub types: &'static [MapType],
    /// Key size in bytes.
    pub key_size: u32,
    /// Value size in bytes (per CPU, for per-CPU maps).
    pub value_size: u32,
}

/// Why a map's layout could not be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// The name is none of the maps that inspector reads.
    #[error("{name} is not a map that inspector reads")]
    NotRead {
        /// Name of the pin.
        name: String,
    },
    /// The name is known, the type or the sizes are not.
    #[error(
        "{name}: unknown layout: {found_type} with key {found_key} and value {found_value} bytes; \
         known: {known}"
    )]
    Unknown {
        /// Name of the pin.
        name: String,
        /// Map type found.
        found_type: MapType,
        /// Key size found, bytes.
        found_key: u32,
        /// Value size found, bytes.
        found_value: u32,
        /// The known layouts of this name, as text.
        known: String,
    },
}

const HASH: &[MapType] = &[MapType::HASH];
const LRU: &[MapType] = &[MapType::LRU_HASH, MapType::HASH];
const LPM: &[MapType] = &[MapType::LPM_TRIE];
const ARRAY: &[MapType] = &[MapType::ARRAY];
const HASH_OR_ARRAY: &[MapType] = &[MapType::HASH, MapType::ARRAY];
const PERCPU_HASH: &[MapType] = &[MapType::PERCPU_HASH];
const MAP_IN_MAP: &[MapType] = &[MapType::HASH_OF_MAPS];
const V4: Option<Family> = Some(Family::V4);
const V6: Option<Family> = Some(Family::V6);

const fn row(
    name: &'static str,
    kind: MapKind,
    family: Option<Family>,
    generation: u8,
    types: &'static [MapType],
    key_size: u32,
    value_size: u32,
) -> Layout {
    Layout { name, kind, family, generation, types, key_size, value_size }
}

/// Every layout that inspector reads.
pub static LAYOUTS: &[Layout] = &[
    row("cilium_lb4_services_v2", MapKind::Services, V4, 2, HASH, 12, 12),
    row("cilium_lb6_services_v2", MapKind::Services, V6, 2, HASH, 24, 12),
    row("cilium_lb4_backends", MapKind::Backends, V4, 1, HASH, 2, 8),
    row("cilium_lb6_backends", MapKind::Backends, V6, 1, HASH, 2, 20),
    row("cilium_lb4_backends_v2", MapKind::Backends, V4, 2, HASH, 4, 8),
    row("cilium_lb6_backends_v2", MapKind::Backends, V6, 2, HASH, 4, 20),
    row("cilium_lb4_backends_v3", MapKind::Backends, V4, 3, HASH, 4, 12),
    row("cilium_lb6_backends_v3", MapKind::Backends, V6, 3, HASH, 4, 24),
    row("cilium_lb4_reverse_nat", MapKind::ReverseNat, V4, 1, HASH, 2, 6),
    row("cilium_lb6_reverse_nat", MapKind::ReverseNat, V6, 1, HASH, 2, 18),
    row("cilium_lb4_reverse_sk", MapKind::ReverseSk, V4, 1, LRU, 16, 8),
    row("cilium_lb6_reverse_sk", MapKind::ReverseSk, V6, 1, LRU, 32, 20),
    row("cilium_lb4_affinity", MapKind::Affinity, V4, 1, LRU, 16, 16),
    row("cilium_lb6_affinity", MapKind::Affinity, V6, 1, LRU, 24, 16),
    row("cilium_lb_affinity_match", MapKind::AffinityMatch, None, 1, HASH, 8, 1),
    row("cilium_lb4_source_range", MapKind::SourceRange, V4, 1, LPM, 12, 1),
    row("cilium_lb6_source_range", MapKind::SourceRange, V6, 1, LPM, 24, 1),
    row("cilium_lb4_maglev", MapKind::Maglev, V4, 1, MAP_IN_MAP, 2, 4),
    row("cilium_lb6_maglev", MapKind::Maglev, V6, 1, MAP_IN_MAP, 2, 4),
    row("cilium_lb4_health", MapKind::Health, V4, 2, LRU, 8, 8),
    row("cilium_lb4_health", MapKind::Health, V4, 3, LRU, 8, 12),
    row("cilium_lb6_health", MapKind::Health, V6, 2, LRU, 8, 20),
    row("cilium_lb6_health", MapKind::Health, V6, 3, LRU, 8, 24),
    row("cilium_skip_lb4", MapKind::SkipLb, V4, 1, HASH, 16, 1),
    row("cilium_skip_lb6", MapKind::SkipLb, V6, 1, HASH, 32, 1),
    row("cilium_lb_act", MapKind::ActiveConnections, None, 1, LRU, 4, 8),
    row("cilium_l2_responder_v4", MapKind::L2Responder, V4, 1, HASH, 8, 8),
    row("cilium_l2_responder_v6", MapKind::L2Responder, V6, 1, HASH, 24, 8),
    row("cilium_runtime_config", MapKind::RuntimeConfig, None, 1, ARRAY, 4, 8),
    row("cilium_lxc", MapKind::Endpoints, None, 1, HASH, 20, 48),
    row("cilium_ipcache", MapKind::Ipcache, None, 1, LPM, 24, 12),
    row("cilium_ipcache_v2", MapKind::Ipcache, None, 2, LPM, 24, 24),
    row("cilium_ct4_global", MapKind::Conntrack, V4, 1, LRU, 14, 56),
    row("cilium_ct_any4_global", MapKind::Conntrack, V4, 1, LRU, 14, 56),
    row("cilium_ct6_global", MapKind::Conntrack, V6, 1, LRU, 38, 56),
    row("cilium_ct_any6_global", MapKind::Conntrack, V6, 1, LRU, 38, 56),
    row("cilium_snat_v4_external", MapKind::Snat, V4, 1, LRU, 14, 40),
    row("cilium_snat_v6_external", MapKind::Snat, V6, 1, LRU, 38, 56),
    row("cilium_metrics", MapKind::Metrics, None, 1, PERCPU_HASH, 8, 16),
    row("cilium_node_map", MapKind::NodeMap, None, 1, HASH, 20, 2),
    row("cilium_node_map_v2", MapKind::NodeMap, None, 2, HASH, 20, 4),
    row("cilium_nodeport_neigh4", MapKind::NodeportNeigh, V4, 1, LRU, 4, 8),
    row("cilium_nodeport_neigh6", MapKind::NodeportNeigh, V6, 1, LRU, 16, 8),
    row("cilium_devices", MapKind::Devices, None, 1, HASH_OR_ARRAY, 4, 16),
];

/// Finds the layout of the map pinned as `name`.
///
/// Sizes are bytes as the kernel reports them (`struct bpf_map_info`).
///
/// # Errors
/// [`LayoutError::NotRead`] for a name that is none of ours, [`LayoutError::Unknown`] for a known
/// name with another type or other sizes.
pub fn detect(
    name: &str,
    map_type: MapType,
    key_size: u32,
    value_size: u32,
) -> Result<&'static Layout, LayoutError> {
    let mut known = Vec::new();
    for layout in LAYOUTS.iter().filter(|layout| layout.name == name) {
        if layout.types.contains(&map_type)
            && layout.key_size == key_size
            && layout.value_size == value_size
        {
            return Ok(layout);
        }
        known.push(format!(
            "{} with key {} and value {} bytes",
            layout.types[0], layout.key_size, layout.value_size
        ));
    }
    if known.is_empty() {
        return Err(LayoutError::NotRead { name: name.to_owned() });
    }
    Err(LayoutError::Unknown {
        name: name.to_owned(),
        found_type: map_type,
        found_key: key_size,
        found_value: value_size,
        known: known.join(" or "),
    })
}

/// Whether `name` is the pin of a map that inspector reads, whatever its sizes.
#[must_use]
pub fn is_read(name: &str) -> bool {
    LAYOUTS.iter().any(|layout| layout.name == name)
}
