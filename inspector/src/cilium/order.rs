//! Integer types that say in which order their bytes stand in a map.
//!
//! Cilium mixes both orders within one struct (a service's backend slot is in host order, its
//! port and its reverse NAT index in network order), so the order is part of the type.
//! "Host order" is little endian on every architecture Cilium runs on (amd64, arm64); the types
//! say so outright, which lets a file taken on a node be read on any machine.

use zerocopy::byteorder::{little_endian, network_endian};

/// A 16-bit number in network byte order (ports, reverse NAT indices).
pub type NetU16 = network_endian::U16;
/// A 16-bit number in the node's (little endian) byte order.
pub type HostU16 = little_endian::U16;
/// A 32-bit number in the node's (little endian) byte order.
pub type HostU32 = little_endian::U32;
/// A 64-bit number in the node's (little endian) byte order.
pub type HostU64 = little_endian::U64;
