//! What the bytes in Cilium's BPF maps mean.
//!
//! Pure: bytes in, typed entries or a precise error out. Nothing here reads a map, a file or a
//! clock. One file per map; what differs between Cilium versions is told apart by the layout
//! ([`layout`]), never by a version string.

pub mod active;
pub mod affinity;
pub mod backends;
pub mod conntrack;
pub mod devices;
pub mod endpoints;
pub mod entry;
pub mod error;
pub mod flags;
pub mod health;
pub mod ipcache;
pub mod l2_responder;
pub mod layout;
pub mod mac;
pub mod maglev;
pub mod metrics;
pub mod node_map;
pub mod nodeport_neigh;
pub mod order;
pub mod proto;
pub mod raw;
pub mod release;
pub mod reverse_nat;
pub mod reverse_sk;
pub mod runtime_config;
pub mod services;
pub mod skip_lb;
pub mod snat;
pub mod source_range;
pub mod tuple;
