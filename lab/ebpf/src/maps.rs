//! The maps: Cilium's, which the lab has pinned and gives to the loader, and one of our own.
//!
//! Types and sizes here are those of the layouts that the programs read; a pinned map may have
//! larger values (backends have grown at the end). Cilium's fields are in host byte order unless
//! said otherwise.

use aya_ebpf::bindings::BPF_F_NO_PREALLOC;
use aya_ebpf::macros::map;
use aya_ebpf::maps::lpm_trie::LpmTrie;
use aya_ebpf::maps::{Array, HashMap, LruHashMap, PerCpuHashMap, ProgramArray};

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
/// Cilium finds this in its conntrack and NAT maps, which the stand-in only fills.
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

/// Key of the conntrack and NAT maps; what stands where, see [`crate::traces`]. Network byte order.
#[repr(C, packed(2))]
#[derive(Clone, Copy)]
pub struct TupleKey<A> {
    pub daddr: A,
    pub saddr: A,
    pub dport: u16,
    pub sport: u16,
    pub protocol: u8,
    pub flags: u8,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Conntrack {
    /// The second word of a service's entry is the backend's id.
    pub head: [u64; 2],
    pub packets: u64,
    pub bytes: u64,
    /// Seconds of the monotonic clock, as the reports below.
    pub lifetime: u32,
    pub flags: u16,
    /// Network byte order.
    pub rev_nat: u16,
    pub word40: u16,
    pub tx_flags: u8,
    pub rx_flags: u8,
    pub identity: u32,
    pub last_tx: u32,
    pub last_rx: u32,
}

#[map]
pub static CT4: LruHashMap<TupleKey<u32>, Conntrack> = LruHashMap::with_max_entries(1024, 0);
#[map]
pub static CT6: LruHashMap<TupleKey<[u32; 4]>, Conntrack> = LruHashMap::with_max_entries(1024, 0);
/// Everything but TCP.
#[map]
pub static CT_ANY4: LruHashMap<TupleKey<u32>, Conntrack> = LruHashMap::with_max_entries(1024, 0);
#[map]
pub static CT_ANY6: LruHashMap<TupleKey<[u32; 4]>, Conntrack> =
    LruHashMap::with_max_entries(1024, 0);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Snat<A, const PAD: usize> {
    /// Seconds of the monotonic clock.
    pub created: u64,
    pub needs_ct: u64,
    pub pad1: [u64; 2],
    pub address: A,
    /// Network byte order.
    pub port: u16,
    pub pad2: [u16; PAD],
}

#[map]
pub static SNAT4: LruHashMap<TupleKey<u32>, Snat<u32, 1>> = LruHashMap::with_max_entries(1024, 0);
#[map]
pub static SNAT6: LruHashMap<TupleKey<[u32; 4]>, Snat<[u32; 4], 3>> =
    LruHashMap::with_max_entries(1024, 0);

/// The client is an address (IPv4: the first word) or the cookie of a network namespace.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AffinityKey<const WORDS: usize> {
    pub client: [u32; WORDS],
    /// Network byte order.
    pub rev_nat: u16,
    pub netns: u8,
    pub pad: [u8; 5],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Affinity {
    /// Seconds of the monotonic clock.
    pub last_used: u64,
    pub backend: u32,
    pub pad: u32,
}

#[map]
pub static AFFINITY4: LruHashMap<AffinityKey<2>, Affinity> = LruHashMap::with_max_entries(1024, 0);
#[map]
pub static AFFINITY6: LruHashMap<AffinityKey<4>, Affinity> = LruHashMap::with_max_entries(1024, 0);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct AffinityMatch {
    pub backend: u32,
    /// Network byte order.
    pub rev_nat: u16,
    pub pad: u16,
}

/// Which backends a service with affinity has.
#[map]
pub static AFFINITY_MATCH: HashMap<AffinityMatch, u8> =
    HashMap::with_max_entries(1, BPF_F_NO_PREALLOC);

/// By the service's `rev_nat`: a table of backends' ids. What Cilium has pinned is a map of maps,
/// where a look-up finds a map; the type that is said here is that of the empty map that stands in
/// where there is none, and then nothing is looked up in it.
#[map]
pub static MAGLEV4: HashMap<u16, u32> = HashMap::with_max_entries(1, BPF_F_NO_PREALLOC);
#[map]
pub static MAGLEV6: HashMap<u16, u32> = HashMap::with_max_entries(1, BPF_F_NO_PREALLOC);

/// A client's address to the MAC address that its packet came from.
#[map]
pub static NEIGHBOURS4: LruHashMap<u32, [u8; 8]> = LruHashMap::with_max_entries(1024, 0);
#[map]
pub static NEIGHBOURS6: LruHashMap<[u32; 4], [u8; 8]> = LruHashMap::with_max_entries(1024, 0);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct MetricKey {
    pub reason: u8,
    pub direction: u8,
    pub line: u16,
    pub file: u8,
    pub pad: [u8; 3],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Metric {
    pub packets: u64,
    pub bytes: u64,
}

#[map]
pub static METRICS: PerCpuHashMap<MetricKey, Metric> =
    PerCpuHashMap::with_max_entries(1024, BPF_F_NO_PREALLOC);
