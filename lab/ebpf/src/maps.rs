//! The maps: Cilium's, which the lab has pinned and gives to the loader, and one of our own.
//!
//! Types and sizes here are those of the layouts that the programs read; a pinned map may have
//! larger values (backends have grown at the end). Cilium's fields are in host byte order unless
//! said otherwise.

use aya_ebpf::bindings::BPF_F_NO_PREALLOC;
use aya_ebpf::macros::map;
use aya_ebpf::maps::lpm_trie::LpmTrie;
use aya_ebpf::maps::{Array, HashMap, LruHashMap, ProgramArray};

/// Both ends of a packet, IPv4 addresses in the first word; all in network byte order.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Tuple {
    pub source: [u32; 4],
    pub destination: [u32; 4],
    pub source_port: u16,
    pub destination_port: u16,
    pub protocol: u8,
    /// 4 or 6.
    pub family: u8,
    pub pad: u16,
}

/// What packets of known connections are rewritten to, in both directions. The lab's own: a real
/// Cilium keeps this in its conntrack and NAT maps.
#[map]
pub static FLOWS: LruHashMap<Tuple, Tuple> = LruHashMap::with_max_entries(65_536, 0);

/// Programs that the attached ones tail-call, at [`crate::device::IPV4`] and `IPV6`.
#[map]
pub static CALLS: ProgramArray = ProgramArray::with_max_entries(48, 0);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ServiceKey<A> {
    pub address: A,
    /// Network byte order.
    pub port: u16,
    pub slot: u16,
    pub protocol: u8,
    pub scope: u8,
    pub pad: u16,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Service {
    /// Slot 0: affinity time-out and algorithm, or the proxy port (network byte order, as the low
    /// half); other slots: id of the backend.
    pub union: u32,
    pub count: u16,
    /// Network byte order.
    pub rev_nat: u16,
    pub flags: u8,
    pub flags2: u8,
    pub qcount: u16,
}

#[map]
pub static SERVICES4: HashMap<ServiceKey<u32>, Service> =
    HashMap::with_max_entries(1, BPF_F_NO_PREALLOC);
#[map]
pub static SERVICES6: HashMap<ServiceKey<[u32; 4]>, Service> =
    HashMap::with_max_entries(1, BPF_F_NO_PREALLOC);

/// The part of a backend that all layouts have.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Backend<A> {
    pub address: A,
    /// Network byte order.
    pub port: u16,
    pub protocol: u8,
    pub state: u8,
}

#[map]
pub static BACKENDS4: HashMap<u32, Backend<u32>> = HashMap::with_max_entries(1, BPF_F_NO_PREALLOC);
#[map]
pub static BACKENDS6: HashMap<u32, Backend<[u32; 4]>> =
    HashMap::with_max_entries(1, BPF_F_NO_PREALLOC);

/// Key behind the length of the prefix: the service's `rev_nat` (and padding), the client's address.
#[map]
pub static SOURCE_RANGES4: LpmTrie<[u32; 2], u8> = LpmTrie::with_max_entries(1, BPF_F_NO_PREALLOC);
#[map]
pub static SOURCE_RANGES6: LpmTrie<[u32; 5], u8> = LpmTrie::with_max_entries(1, BPF_F_NO_PREALLOC);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct EndpointKey {
    pub address: [u32; 4],
    /// 1: IPv4, 2: IPv6.
    pub family: u8,
    pub key: u8,
    pub cluster: u16,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Endpoint {
    pub ifindex: u32,
    pub unused: u16,
    pub id: u16,
    pub flags: u32,
    pub pad: u32,
    pub mac: [u8; 8],
    pub node_mac: [u8; 8],
    pub rest: [u32; 4],
}

#[map]
pub static ENDPOINTS: HashMap<EndpointKey, Endpoint> =
    HashMap::with_max_entries(1, BPF_F_NO_PREALLOC);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Responder4 {
    pub address: u32,
    pub ifindex: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Responder6 {
    pub address: [u32; 4],
    pub ifindex: u32,
    pub pad: u32,
}

/// Value: answers sent.
#[map]
pub static RESPONDER4: HashMap<Responder4, u64> = HashMap::with_max_entries(1, BPF_F_NO_PREALLOC);
#[map]
pub static RESPONDER6: HashMap<Responder6, u64> = HashMap::with_max_entries(1, BPF_F_NO_PREALLOC);

#[map]
pub static RUNTIME_CONFIG: Array<u64> = Array::with_max_entries(256, 0);

/// Which VIP a socket believes to talk to. The IPv6 key has four more bytes of padding.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ReverseKey<A, const PAD: usize> {
    pub cookie: u64,
    pub address: A,
    /// Network byte order.
    pub port: u16,
    pub pad: [u16; PAD],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Reverse<A> {
    pub address: A,
    /// Network byte order.
    pub port: u16,
    /// Network byte order.
    pub rev_nat: u16,
}

#[map]
pub static REVERSE_SK4: LruHashMap<ReverseKey<u32, 1>, Reverse<u32>> =
    LruHashMap::with_max_entries(1024, 0);
#[map]
pub static REVERSE_SK6: LruHashMap<ReverseKey<[u32; 4], 3>, Reverse<[u32; 4]>> =
    LruHashMap::with_max_entries(1024, 0);
