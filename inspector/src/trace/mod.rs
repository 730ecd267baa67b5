//! Watching what the kernel does with packets: what we attach, and what it reports.
//!
//! Nothing here changes a packet's way, and everything that is attached is detached when its owner
//! is dropped; when the process dies without that, the kernel does it, since nothing is pinned (and a
//! guard, where it would not: see `clsact`).
//! What the observations mean for a VIP is decided elsewhere.

mod clsact;
mod decode;
mod device;
mod error;
pub mod journey;
mod neighbours;
pub mod observe;
mod offsets;
pub mod pcapng;
mod program;
pub mod session;
pub mod sighting;

pub use error::TraceError;
