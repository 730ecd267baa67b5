//! What the bytes in Cilium's BPF maps mean.
//!
//! Pure: bytes in, typed entries or a precise error out. Nothing here reads a map, a file or a
//! clock. One file per map; what differs between Cilium versions is told apart by the layout
//! ([`layout`]), never by a version string.

pub mod backends;
pub mod endpoints;
pub mod error;
pub mod flags;
pub mod ipcache;
pub mod l2_responder;
pub mod layout;
pub mod mac;
pub mod order;
pub mod proto;
pub mod raw;
pub mod release;
pub mod reverse_nat;
pub mod runtime_config;
pub mod services;
pub mod source_range;
