//! inspector: what a Cilium node has programmed for a VIP, and what that does to a packet.

pub mod cilium;
pub mod trace;
