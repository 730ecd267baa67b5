//! What a connection to a service leaves in Cilium's maps: the entries that a real one makes for its
//! first packet. Nothing here follows a connection further, and nothing but the choice of a backend
//! reads the entries.
//!
//! Each kind of entry is made in a function of its own: keys and values of all of them would not
//! fit into the stack of one.

use aya_ebpf::helpers::bpf_ktime_get_ns;

use crate::config::{world_ipv4, world_ipv6};
use crate::maps::{
    CT_ANY4, CT_ANY6, CT4, CT6, Conntrack, NEIGHBOURS4, NEIGHBOURS6, SNAT4, SNAT6, Snat, Tuple,
    TupleKey,
};
use crate::packet::TCP;

/// Kinds of entries, as the flags in the key say them.
const OUT: u8 = 0;
const IN: u8 = 1;
const RELATED: u8 = 2;
const SERVICE: u8 = 4;

/// How long an entry of a connection that is not established is kept, seconds.
const LIFETIME: u32 = 60;

/// State bits in a value: the client or the backend has closed; through a frontend from outside.
const CLOSING: u16 = 3;
const NODE_PORT: u16 = 0x20;

const SYN: u8 = 2;

/// What there is to note of a connection, beside its ends.
#[expect(clippy::struct_excessive_bools, reason = "independent facts about one packet")]
pub struct Note {
    /// Id of the backend.
    pub backend: u32,
    /// Of the service, network byte order.
    pub rev_nat: u16,
    /// Whether the packet opens a TCP connection.
    pub opening: bool,
    /// Whether the client is outside of this node.
    pub outside: bool,
    /// Whether the backend is on this node.
    pub local: bool,
    /// Whether it is a pod there.
    pub pod: bool,
}

/// Seconds of the monotonic clock: Cilium's measure for entries.
#[inline(always)]
pub fn now() -> u64 {
    // SAFETY: the helper takes nothing and cannot fail.
    unsafe { bpf_ktime_get_ns() / 1_000_000_000 }
}

/// Ports in the order in which a key of the kind has them, `dport` first; none for what is related.
#[inline(always)]
fn ports(tuple: &Tuple, kind: u8) -> (u16, u16) {
    if kind & RELATED != 0 {
        (0, 0)
    } else if kind == SERVICE {
        (tuple.source_port, tuple.destination_port)
    } else {
        (tuple.destination_port, tuple.source_port)
    }
}

#[inline(always)]
fn key4(tuple: &Tuple, kind: u8) -> TupleKey<u32> {
    let (dport, sport) = ports(tuple, kind);
    let protocol = if kind & RELATED != 0 { 1 } else { tuple.protocol };
    // A service's entry has the addresses as they are in the packet, the others exchanged.
    let (daddr, saddr) = if kind == SERVICE {
        (tuple.destination[0], tuple.source[0])
    } else {
        (tuple.source[0], tuple.destination[0])
    };
    TupleKey { daddr, saddr, dport, sport, protocol, flags: kind }
}

#[inline(always)]
fn key6(tuple: &Tuple, kind: u8) -> TupleKey<[u32; 4]> {
    let (dport, sport) = ports(tuple, kind);
    let protocol = if kind & RELATED != 0 { 58 } else { tuple.protocol };
    let (daddr, saddr) = if kind == SERVICE {
        (tuple.destination, tuple.source)
    } else {
        (tuple.source, tuple.destination)
    };
    TupleKey { daddr, saddr, dport, sport, protocol, flags: kind }
}

/// The backend that an earlier packet of this connection to a service was given; 0 for none. As in
/// Cilium, an entry counts however old it is, unless a new connection finds one that has ended.
#[inline(never)]
pub fn known_backend<const V6: bool>(tuple: &Tuple, opening: bool) -> u32 {
    let tcp = tuple.protocol == TCP;
    let entry = if V6 {
        let key = key6(tuple, SERVICE);
        if tcp { CT6.get_ptr(key) } else { CT_ANY6.get_ptr(key) }
    } else {
        let key = key4(tuple, SERVICE);
        if tcp { CT4.get_ptr(key) } else { CT_ANY4.get_ptr(key) }
    };
    let Some(entry) = entry else { return 0 };
    // SAFETY: a found entry is valid while this program runs.
    let (flags, backend) = unsafe { ((*entry).flags, (*entry).head[1]) };
    if opening && flags & CLOSING != 0 {
        return 0;
    }
    #[expect(clippy::cast_possible_truncation, reason = "ids have 32 bits")]
    return backend as u32;
}

/// Notes one entry of a connection.
#[inline(never)]
fn conntrack<const V6: bool>(tuple: &Tuple, kind: u8, note: &Note) -> i32 {
    #[expect(clippy::cast_possible_truncation, reason = "136 years")]
    let now = now() as u32;
    let incoming = kind & IN != 0;
    let seen = if note.opening { SYN } else { 0 };
    let identity = if V6 { world_ipv6.load() } else { world_ipv4.load() };
    let value = Conntrack {
        head: [0, if kind == SERVICE { u64::from(note.backend) } else { 0 }],
        packets: 0,
        bytes: 0,
        lifetime: now + LIFETIME,
        flags: if kind == OUT && note.outside { NODE_PORT } else { 0 },
        rev_nat: if kind == OUT || kind == SERVICE { note.rev_nat } else { 0 },
        word40: 0,
        tx_flags: if incoming { 0 } else { seen },
        rx_flags: if incoming { seen } else { 0 },
        identity: if kind == SERVICE || !note.outside { 0 } else { identity },
        last_tx: if incoming { 0 } else { now },
        last_rx: if incoming { now } else { 0 },
    };
    let tcp = tuple.protocol == TCP && kind & RELATED == 0;
    let noted = if V6 {
        let key = key6(tuple, kind);
        if tcp { CT6.insert(key, value, 0) } else { CT_ANY6.insert(key, value, 0) }
    } else {
        let key = key4(tuple, kind);
        if tcp { CT4.insert(key, value, 0) } else { CT_ANY4.insert(key, value, 0) }
    };
    noted.err().unwrap_or(0)
}

/// Notes how packets with the ends `tuple` are rewritten, for one direction.
#[inline(never)]
fn snat<const V6: bool>(tuple: &Tuple, kind: u8, to: &[u32; 4], port: u16) -> i32 {
    // Unlike those of conntrack, these keys have everything as it is in the packet.
    let (dport, sport, protocol, flags) =
        (tuple.destination_port, tuple.source_port, tuple.protocol, kind);
    let noted = if V6 {
        let (daddr, saddr) = (tuple.destination, tuple.source);
        let key = TupleKey { daddr, saddr, dport, sport, protocol, flags };
        let value =
            Snat { created: now(), needs_ct: 0, pad1: [0; 2], address: *to, port, pad2: [0; 3] };
        SNAT6.insert(key, value, 0)
    } else {
        let (daddr, saddr) = (tuple.destination[0], tuple.source[0]);
        let key = TupleKey { daddr, saddr, dport, sport, protocol, flags };
        let value =
            Snat { created: now(), needs_ct: 0, pad1: [0; 2], address: to[0], port, pad2: [0; 1] };
        SNAT4.insert(key, value, 0)
    };
    noted.err().unwrap_or(0)
}

/// Notes a connection from `old` (client to VIP) that was translated to `new` (client or, towards a
/// backend elsewhere, the node, to the backend). The result is what the kernel said of an entry
/// that could not be made.
#[inline(never)]
pub fn connection<const V6: bool>(old: &Tuple, new: &Tuple, note: &Note) -> i32 {
    let mut error = conntrack::<V6>(old, SERVICE, note);
    let mut tuple = *old;
    tuple.destination = new.destination;
    tuple.destination_port = new.destination_port;
    error |= conntrack::<V6>(&tuple, OUT, note);
    if note.pod {
        if !note.outside {
            error |= conntrack::<V6>(&tuple, OUT | RELATED, note);
        }
        error |= conntrack::<V6>(&tuple, IN, note);
        error |= conntrack::<V6>(&tuple, IN | RELATED, note);
    }
    if note.outside && !note.local {
        error |= snat::<V6>(&tuple, OUT, &new.source, new.source_port);
        tuple.source = new.destination;
        tuple.source_port = new.destination_port;
        tuple.destination = new.source;
        tuple.destination_port = new.source_port;
        error |= snat::<V6>(&tuple, IN, &old.source, old.source_port);
    }
    error
}

/// Notes the MAC address that a client's packet came from. As in Cilium, on a device without
/// Ethernet headers these are bytes of the packet, of no use to anyone.
#[inline(always)]
pub fn neighbour<const V6: bool>(client: &[u32; 4], [a, b, c, d, e, f]: [u8; 6]) -> i32 {
    let mac = [a, b, c, d, e, f, 0, 0];
    let noted =
        if V6 { NEIGHBOURS6.insert(client, mac, 0) } else { NEIGHBOURS4.insert(client[0], mac, 0) };
    noted.err().unwrap_or(0)
}
