//! One entry of any map that inspector reads, for evidence files and machine-readable output.

use serde::{Deserialize, Serialize};

use super::{
    active::ActiveConnections,
    affinity::{Affinity, AffinityMatch},
    backends::Backend,
    conntrack::Conntrack,
    devices::Device,
    endpoints::Endpoint,
    error::{DecodeError, EncodeError},
    health::Health,
    ipcache::Ipcache,
    l2_responder::L2Responder,
    layout::{Layout, MapKind},
    maglev::Maglev,
    metrics::Metric,
    node_map::Node,
    nodeport_neigh::NodeportNeigh,
    raw,
    reverse_nat::ReverseNat,
    reverse_sk::ReverseSk,
    runtime_config::RuntimeConfig,
    services::Service,
    skip_lb::SkipLb,
    snat::Snat,
    source_range::SourceRange,
};

/// An entry of any kind.
///
/// Serialized as an object with the entry's own fields and `kind`, the name of the
/// [`MapKind`].
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Entry {
    /// A frontend or one of its backend slots.
    Services(Service),
    /// A backend.
    Backends(Backend),
    /// A reverse NAT entry.
    ReverseNat(ReverseNat),
    /// A translated socket.
    ReverseSk(ReverseSk),
    /// A session.
    Affinity(Affinity),
    /// A backend of a service with session affinity.
    AffinityMatch(AffinityMatch),
    /// A client prefix of a frontend.
    SourceRange(SourceRange),
    /// A frontend that has a Maglev table.
    Maglev(Maglev),
    /// A health probe.
    Health(Health),
    /// A frontend that is reached directly.
    SkipLb(SkipLb),
    /// Connection counters.
    ActiveConnections(ActiveConnections),
    /// An address that this node answers for.
    L2Responder(L2Responder),
    /// A number of the run-time configuration.
    RuntimeConfig(RuntimeConfig),
    /// A local endpoint.
    Endpoints(Endpoint),
    /// A prefix's identity.
    Ipcache(Ipcache),
    /// A connection.
    Conntrack(Conntrack),
    /// A source NAT mapping.
    Snat(Snat),
    /// A metric.
    Metrics(Metric),
    /// A node address.
    NodeMap(Node),
    /// A client's Ethernet address.
    NodeportNeigh(NodeportNeigh),
    /// A device that Cilium manages.
    Devices(Device),
}

impl Entry {
    /// Reads an entry of the map that `layout` describes.
    ///
    /// # Errors
    /// [`DecodeError`] if key or value are not as long as the layout says, or hold what no entry of
    /// the map can hold.
    pub fn decode(layout: &'static Layout, key: &[u8], value: &[u8]) -> Result<Self, DecodeError> {
        Ok(match layout.kind {
            MapKind::Services => Self::Services(Service::decode(layout, key, value)?),
            MapKind::Backends => Self::Backends(Backend::decode(layout, key, value)?),
            MapKind::ReverseNat => Self::ReverseNat(ReverseNat::decode(layout, key, value)?),
            MapKind::ReverseSk => Self::ReverseSk(ReverseSk::decode(layout, key, value)?),
            MapKind::Affinity => Self::Affinity(Affinity::decode(layout, key, value)?),
            MapKind::AffinityMatch => {
                Self::AffinityMatch(AffinityMatch::decode(layout, key, value)?)
            }
            MapKind::SourceRange => Self::SourceRange(SourceRange::decode(layout, key, value)?),
            MapKind::Maglev => Self::Maglev(Maglev::decode(layout, key, value)?),
            MapKind::Health => Self::Health(Health::decode(layout, key, value)?),
            MapKind::SkipLb => Self::SkipLb(SkipLb::decode(layout, key, value)?),
            MapKind::ActiveConnections => {
                Self::ActiveConnections(ActiveConnections::decode(layout, key, value)?)
            }
            MapKind::L2Responder => Self::L2Responder(L2Responder::decode(layout, key, value)?),
            MapKind::RuntimeConfig => {
                Self::RuntimeConfig(RuntimeConfig::decode(layout, key, value)?)
            }
            MapKind::Endpoints => Self::Endpoints(Endpoint::decode(layout, key, value)?),
            MapKind::Ipcache => Self::Ipcache(Ipcache::decode(layout, key, value)?),
            MapKind::Conntrack => Self::Conntrack(Conntrack::decode(layout, key, value)?),
            MapKind::Snat => Self::Snat(Snat::decode(layout, key, value)?),
            MapKind::Metrics => Self::Metrics(Metric::decode(layout, key, value)?),
            MapKind::NodeMap => Self::NodeMap(Node::decode(layout, key, value)?),
            MapKind::NodeportNeigh => {
                Self::NodeportNeigh(NodeportNeigh::decode(layout, key, value)?)
            }
            MapKind::Devices => Self::Devices(Device::decode(layout, key, value)?),
        })
    }

    /// The bytes of key and value in the map that `layout` describes.
    ///
    /// # Errors
    /// [`EncodeError`] if the entry is of another kind or family than the map, or has something that
    /// the layout has no room for.
    pub fn encode(&self, layout: &'static Layout) -> Result<(Vec<u8>, Vec<u8>), EncodeError> {
        let found = self.kind();
        if found != layout.kind {
            return Err(EncodeError::Kind { map: layout.name, expected: layout.kind, found });
        }
        match self {
            Self::Services(entry) => {
                raw::check_family(layout, entry.key.address).map(|()| entry.encode())
            }
            Self::Backends(entry) => entry.encode(layout),
            Self::ReverseNat(entry) => {
                raw::check_family(layout, entry.address).map(|()| entry.encode())
            }
            Self::ReverseSk(entry) => entry.encode(layout),
            Self::Affinity(entry) => entry.encode(layout),
            Self::AffinityMatch(entry) => Ok(entry.encode()),
            Self::SourceRange(entry) => {
                raw::check_family(layout, entry.address).map(|()| entry.encode())
            }
            Self::Maglev(entry) => Ok(entry.encode()),
            Self::Health(entry) => entry.encode(layout),
            Self::SkipLb(entry) => {
                raw::check_family(layout, entry.address).map(|()| entry.encode())
            }
            Self::ActiveConnections(entry) => Ok(entry.encode()),
            Self::L2Responder(entry) => {
                raw::check_family(layout, entry.address).map(|()| entry.encode())
            }
            Self::RuntimeConfig(entry) => Ok(entry.encode()),
            Self::Endpoints(entry) => Ok(entry.encode()),
            Self::Ipcache(entry) => entry.encode(layout),
            Self::Conntrack(entry) => entry.encode(layout),
            Self::Snat(entry) => entry.encode(layout),
            Self::Metrics(entry) => Ok(entry.encode()),
            Self::NodeMap(entry) => entry.encode(layout),
            Self::NodeportNeigh(entry) => {
                raw::check_family(layout, entry.address).map(|()| entry.encode())
            }
            Self::Devices(entry) => Ok(entry.encode()),
        }
    }

    /// The kind of map that such entries are in.
    #[must_use]
    pub fn kind(&self) -> MapKind {
        match self {
            Self::Services(_) => MapKind::Services,
            Self::Backends(_) => MapKind::Backends,
            Self::ReverseNat(_) => MapKind::ReverseNat,
            Self::ReverseSk(_) => MapKind::ReverseSk,
            Self::Affinity(_) => MapKind::Affinity,
            Self::AffinityMatch(_) => MapKind::AffinityMatch,
            Self::SourceRange(_) => MapKind::SourceRange,
            Self::Maglev(_) => MapKind::Maglev,
            Self::Health(_) => MapKind::Health,
            Self::SkipLb(_) => MapKind::SkipLb,
            Self::ActiveConnections(_) => MapKind::ActiveConnections,
            Self::L2Responder(_) => MapKind::L2Responder,
            Self::RuntimeConfig(_) => MapKind::RuntimeConfig,
            Self::Endpoints(_) => MapKind::Endpoints,
            Self::Ipcache(_) => MapKind::Ipcache,
            Self::Conntrack(_) => MapKind::Conntrack,
            Self::Snat(_) => MapKind::Snat,
            Self::Metrics(_) => MapKind::Metrics,
            Self::NodeMap(_) => MapKind::NodeMap,
            Self::NodeportNeigh(_) => MapKind::NodeportNeigh,
            Self::Devices(_) => MapKind::Devices,
        }
    }
}
