//! What the observers keep in their maps and report.

/// An IP address with its family: the key of the set of watched addresses.
///
/// IPv4-mapped IPv6 is no substitute for the family: `::ffff:192.0.2.1` can stand in an IPv6
/// header, and is not 192.0.2.1.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "user", derive(zerocopy::FromBytes, zerocopy::Immutable))]
pub struct Address {
    /// The address as it stands in memory, in network byte order; IPv4 takes the first word, the
    /// rest is zero. Words, since BPF copies a byte at a time what is not aligned.
    pub words: [u32; 4],
    /// 4 or 6; 0 is no address.
    pub family: u32,
}

impl Address {
    /// No address.
    pub const NONE: Self = Self { words: [0; 4], family: 0 };

    /// An IPv4 address, as it stands in memory.
    #[inline(always)]
    #[must_use]
    pub const fn v4(word: u32) -> Self {
        Self { words: [word, 0, 0, 0], family: 4 }
    }

    /// An IPv6 address, as it stands in memory.
    #[inline(always)]
    #[must_use]
    pub const fn v6(words: [u32; 4]) -> Self {
        Self { words, family: 6 }
    }

    /// Number of its bit in the sieve, below [`SIEVE_BITS`].
    #[inline(always)]
    #[must_use]
    pub const fn bit(&self) -> u32 {
        let [a, b, c, d] = self.words;
        // Knuth's multiplicative hash: the upper bits are the good ones.
        (a ^ b ^ c ^ d).wrapping_mul(0x9e37_79b1) >> 16
    }
}

/// Bits of the sieve: the first look at an address, which sorts most packets out without a look-up.
pub const SIEVE_BITS: u32 = 1 << 16;
/// Words of the sieve.
pub const SIEVE_WORDS: usize = SIEVE_BITS as usize / 64;

/// Why an address is watched, as bits of the value in the map of addresses.
pub mod role {
    /// Every packet to or from it.
    pub const ANY_PORT: u32 = 1 << 0;
    /// Packets to or from those of its ports that are in the map of endpoints.
    pub const SOME_PORTS: u32 = 1 << 1;
    /// As a neighbour.
    pub const NEIGHBOUR: u32 = 1 << 2;
}

/// A port of an address: the key of the set of watched endpoints.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Endpoint {
    /// The address.
    pub address: Address,
    /// The port.
    pub port: u16,
    /// Number of the transport protocol.
    pub protocol: u8,
    /// Zero.
    pub reserved: u8,
}

/// What one CPU has counted at one hook.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Count {
    /// What matched.
    pub matched: u64,
    /// What matched and found no room in the ring buffer.
    pub lost: u64,
}

/// Tiers, as numbers in events.
pub mod tier {
    #![expect(missing_docs, reason = "documented in inspector's trace::sighting::Tier")]
    pub const TC: u8 = 0;
    pub const TRACEPOINT: u8 = 1;
    pub const KPROBE: u8 = 2;
    pub const PROGRAM: u8 = 3;
}

/// Hooks, as numbers in events.
pub mod hook {
    #![expect(missing_docs, reason = "documented in inspector's trace::sighting::Hook")]
    pub const TC_INGRESS: u8 = 0;
    pub const TC_EGRESS: u8 = 1;
    pub const PROGRAM_ENTRY: u8 = 2;
    pub const PROGRAM_EXIT: u8 = 3;
    pub const RECEIVE: u8 = 4;
    pub const ROUTE: u8 = 5;
    pub const LOCAL_DELIVER: u8 = 6;
    pub const FORWARD: u8 = 7;
    pub const QUEUE: u8 = 8;
    pub const TRANSMIT: u8 = 9;
    pub const NEIGH_CREATE: u8 = 10;
    pub const NEIGH_RESOLVE: u8 = 11;
    pub const NEIGH_SOLICIT: u8 = 12;
    pub const NEIGH_UPDATE: u8 = 13;
    pub const NEIGH_DEAD: u8 = 14;
    pub const DROP: u8 = 15;
    pub const TCP_RESET: u8 = 16;
    pub const ICMP_SEND: u8 = 17;
}

/// Hooks of one tier in the map of counts, at most.
pub const HOOKS: u32 = 32;
/// Entries of the map of counts.
pub const COUNTS: u32 = 4 * HOOKS;

/// Place of a hook in the map of counts.
#[inline(always)]
#[must_use]
pub const fn slot(tier: u8, hook: u8) -> u32 {
    tier as u32 * HOOKS + hook as u32
}

/// Bytes of headers that an event has room for.
pub const HEADER_BYTES: usize = 128;

/// [`Event::flags`]: `value` means something.
pub const FLAG_VALUE: u8 = 1 << 0;
/// [`Event::flags`]: the headers are those of an ARP packet.
pub const FLAG_ARP: u8 = 1 << 1;
/// [`Event::flags`]: `source`, `neighbour` (the destination) and `gateway` are those of a route
/// look-up.
pub const FLAG_FLOW: u8 = 1 << 2;
/// [`Event::flags`]: `mark` means something.
pub const FLAG_MARK: u8 = 1 << 3;

/// What one hook reports.
///
/// It has no padding: every byte is written before it is reported.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(zerocopy::FromBytes, zerocopy::Immutable))]
pub struct Event {
    /// When, in nanoseconds of `CLOCK_MONOTONIC`.
    pub monotonic_ns: u64,
    /// Address of the kernel's buffer, 0 where it cannot be known.
    pub skb: u64,
    /// The neighbour, or of a route look-up the destination.
    pub neighbour: Address,
    /// Of a route look-up: the source.
    pub source: Address,
    /// Of a route look-up: the gateway.
    pub gateway: Address,
    /// Index of the device, 0 for none.
    pub ifindex: u32,
    /// The packet's mark.
    pub mark: u32,
    /// Length in bytes from the IP header to the end of the packet.
    pub length: u32,
    /// State of a neighbour, reason of a drop, type (times 256) and code of an ICMP error, return
    /// value of a program.
    pub value: u32,
    /// Number of the tier.
    pub tier: u8,
    /// Number of the hook.
    pub hook: u8,
    /// `FLAG_` bits.
    pub flags: u8,
    /// Of a route look-up: number of the transport protocol.
    pub protocol: u8,
    /// How much of `headers` is used.
    pub header_length: u8,
    /// Zero.
    pub reserved: [u8; 3],
    /// Id of the program that was entered or has returned, else 0.
    pub program: u32,
    /// The packet from its IP header (or ARP's) on, headers alone; the rest is zero.
    pub headers: [u8; HEADER_BYTES],
}

// The compiler would pad silently, and padding would carry kernel memory to user space.
const _: () = assert!(size_of::<Event>() == 16 + 3 * 20 + 4 * 4 + 12 + HEADER_BYTES);
const _: () = assert!(size_of::<Event>().is_multiple_of(8));
const _: () = assert!(core::mem::offset_of!(Event, headers).is_multiple_of(8));
const _: () = assert!(size_of::<Address>() == 20);
const _: () = assert!(size_of::<Endpoint>() == 24);

/// Where in the running kernel's structures something stands (bytes from their beginning), from its
/// BTF.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[expect(missing_docs, reason = "each is the kernel's structure and member")]
pub struct Offsets {
    pub skb_len: u32,
    pub skb_protocol: u32,
    pub skb_mark: u32,
    pub skb_head: u32,
    pub skb_data: u32,
    pub skb_tail: u32,
    pub skb_network_header: u32,
    pub skb_dev: u32,
    pub skb_refdst: u32,
    pub skb_sk: u32,
    pub dst_dev: u32,
    pub sk_net: u32,
    pub sk_prot: u32,
    pub proto_name: u32,
    pub dev_ifindex: u32,
    pub dev_net: u32,
    pub net_inum: u32,
    pub neigh_dev: u32,
    pub neigh_state: u32,
    pub neigh_table: u32,
    pub neigh_key: u32,
    pub table_key_len: u32,
    pub flow4_source: u32,
    pub flow4_destination: u32,
    pub flow4_protocol: u32,
    pub flow4_mark: u32,
    pub flow6_source: u32,
    pub flow6_destination: u32,
    pub flow6_protocol: u32,
    pub flow6_mark: u32,
    pub hop_dev: u32,
    pub hop_gateway_family: u32,
    pub hop_gateway: u32,
    pub result6_hop: u32,
    pub result6_flags: u32,
    pub hop6_common: u32,
}

/// What user space tells the programs before it loads them.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Settings {
    /// Inode number of the network namespace that is watched.
    pub netns: u32,
    /// Whether there is a set of clients (1) or every client matters (0).
    pub has_clients: u32,
    /// Offsets in the kernel's structures.
    pub offsets: Offsets,
}

/// Names of programs, maps and globals in the object file.
pub mod name {
    /// The classifiers, by which others know that they are ours.
    pub const CLASSIFIERS: [&str; 4] =
        ["inspect_tc_in", "inspect_tc_out", "inspect_l3_in", "inspect_l3_out"];
    /// Array of one sieve: [`SIEVE_WORDS`](super::SIEVE_WORDS) `u64`.
    pub const SIEVE: &str = "SIEVE";
    /// Hash, [`Address`](super::Address) → [`role`](super::role) bits.
    pub const ADDRESSES: &str = "ADDRESSES";
    /// Hash, [`Endpoint`](super::Endpoint) → `u8` without meaning.
    pub const ENDPOINTS: &str = "ENDPOINTS";
    /// Hash, [`Address`](super::Address) → `u8` without meaning.
    pub const CLIENTS: &str = "CLIENTS";
    /// Per-CPU array of [`Count`](super::Count), by [`slot`](super::slot).
    pub const COUNTS: &str = "COUNTS";
    /// Ring buffer of [`Event`](super::Event).
    pub const EVENTS: &str = "EVENTS";
    /// Array of one `u32`, the id of the program that is watched; not the object's own is used, but
    /// one for each such program.
    pub const TARGET: &str = "TARGET";
    /// What runs at the entry and at the exit of another program.
    pub const AROUND: [&str; 2] = ["program_entry", "program_exit"];
    /// The global [`Settings`](super::Settings).
    pub const SETTINGS: &str = "SETTINGS";
}

#[cfg(feature = "user")]
mod user {
    use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

    use super::{Address, Count, Endpoint, Settings};

    // SAFETY: repr(C) of plain integers without padding (see the assertions above).
    unsafe impl aya::Pod for Address {}
    // SAFETY: as for Address.
    unsafe impl aya::Pod for Endpoint {}
    // SAFETY: repr(C) of two u64.
    unsafe impl aya::Pod for Count {}
    // SAFETY: repr(C) of u32 alone.
    unsafe impl aya::Pod for Settings {}

    impl From<IpAddr> for Address {
        fn from(address: IpAddr) -> Self {
            match address {
                IpAddr::V4(address) => Self::v4(u32::from_ne_bytes(address.octets())),
                IpAddr::V6(address) => {
                    let octets = address.octets();
                    let (words, _) = octets.as_chunks::<4>();
                    let mut all = [0; 4];
                    for (to, from) in all.iter_mut().zip(words) {
                        *to = u32::from_ne_bytes(*from);
                    }
                    Self::v6(all)
                }
            }
        }
    }

    impl Address {
        /// The address, if it is one.
        #[must_use]
        pub fn ip(&self) -> Option<IpAddr> {
            match self.family {
                4 => Some(Ipv4Addr::from(self.words[0].to_ne_bytes()).into()),
                6 => {
                    let mut octets = [0; 16];
                    for (to, from) in octets.as_chunks_mut::<4>().0.iter_mut().zip(self.words) {
                        *to = from.to_ne_bytes();
                    }
                    Some(Ipv6Addr::from(octets).into())
                }
                _ => None,
            }
        }
    }
}
