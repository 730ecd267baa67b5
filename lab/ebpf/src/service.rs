//! Services: found with Cilium's keys, and a backend chosen.

use aya_ebpf::helpers::bpf_get_prandom_u32;
use aya_ebpf::helpers::generated::bpf_map_lookup_elem;
use aya_ebpf::maps::lpm_trie::Key;

use crate::config::{maglev4_size, maglev6_size};
use crate::maps::{
    AFFINITY_MATCH, AFFINITY4, AFFINITY6, Affinity, AffinityKey, AffinityMatch, BACKENDS4,
    BACKENDS6, MAGLEV4, MAGLEV6, SERVICES4, SERVICES6, SOURCE_RANGES4, SOURCE_RANGES6, Service,
    ServiceKey, Tuple,
};
use crate::traces::now;

pub const EXTERNAL_IP: u8 = 0x01;
pub const AFFINITY: u8 = 0x10;
pub const ROUTABLE: u8 = 0x40;
pub const CHECK_SOURCE: u8 = 0x80;
/// In the second byte.
pub const L7: u8 = 0x04;
pub const TWO_SCOPES: u8 = 0x20;
pub const DENY: u8 = 0x40;

/// A service, and the part of its key that its slots share.
#[derive(Clone, Copy)]
pub struct Found {
    pub service: Service,
    pub protocol: u8,
    pub scope: u8,
}

/// Where connections to a service go.
#[derive(Clone, Copy)]
pub struct Target {
    /// Id of the backend.
    pub id: u32,
    pub address: [u32; 4],
    /// Network byte order.
    pub port: u16,
}

#[inline(always)]
fn entry<const V6: bool>(
    address: &[u32; 4],
    port: u16,
    slot: u16,
    protocol: u8,
    scope: u8,
) -> Option<Service> {
    let entry = if V6 {
        SERVICES6.get_ptr(ServiceKey { address: *address, port, slot, protocol, scope, pad: 0 })?
    } else {
        SERVICES4.get_ptr(ServiceKey {
            address: address[0],
            port,
            slot,
            protocol,
            scope,
            pad: 0,
        })?
    };
    // SAFETY: a found entry is valid while this program runs; it is copied at once.
    Some(unsafe { *entry })
}

/// The service for packets to this address, port and protocol; `internal` for connections that
/// begin on this node, which may see more backends.
#[inline(always)]
pub fn find<const V6: bool>(
    address: &[u32; 4],
    port: u16,
    protocol: u8,
    internal: bool,
) -> Option<Found> {
    let mut found = Found {
        service: Service { union: 0, count: 0, rev_nat: 0, flags: 0, flags2: 0, qcount: 0 },
        protocol,
        scope: 0,
    };
    if let Some(service) = entry::<V6>(address, port, 0, protocol, 0) {
        found.service = service;
    } else {
        // Keys had no protocol before Cilium 1.17.
        found.protocol = 0;
        found.service = entry::<V6>(address, port, 0, 0, 0)?;
    }
    if internal && found.service.flags2 & TWO_SCOPES != 0 {
        found.scope = 1;
        found.service = entry::<V6>(address, port, 0, found.protocol, 1)?;
    }
    Some(found)
}

/// Whether a packet from outside is for an address whose services take none of it, and is to be dropped;
/// a function by itself for the sake of the stack.
#[inline(never)]
pub fn is_for_none<const V6: bool>(old: &Tuple) -> bool {
    let vip = &old.destination;
    is_wildcard::<V6>(vip) && find::<V6>(vip, old.destination_port, old.protocol, false).is_none()
}

/// Whether everything to this address that no service takes is to be dropped.
#[inline(always)]
fn is_wildcard<const V6: bool>(address: &[u32; 4]) -> bool {
    entry::<V6>(address, 0, 0, 0, 0).is_some()
}

/// Whether the service takes clients with this address.
#[inline(always)]
pub fn admits<const V6: bool>(service: &Service, client: &[u32; 4]) -> bool {
    if service.flags & CHECK_SOURCE == 0 {
        return true;
    }
    let id = u32::from(service.rev_nat);
    let listed = if V6 {
        let [a, b, c, d] = *client;
        SOURCE_RANGES6.get(Key::new(160, [id, a, b, c, d])).is_some()
    } else {
        SOURCE_RANGES4.get(Key::new(64, [id, client[0]])).is_some()
    };
    listed != (service.flags2 & DENY != 0)
}

/// Who connects, as session affinity sees it.
#[derive(Clone, Copy)]
pub struct Client {
    /// Its address, or the cookie of its network namespace.
    pub id: [u32; 4],
    /// Which of them.
    pub is_netns: bool,
}

/// A backend by its id.
#[inline(always)]
fn backend<const V6: bool>(id: u32) -> Option<Target> {
    if V6 {
        let backend = BACKENDS6.get_ptr(id)?;
        // SAFETY: as in `entry`.
        let backend = unsafe { *backend };
        Some(Target { id, address: backend.address, port: backend.port })
    } else {
        let backend = BACKENDS4.get_ptr(id)?;
        // SAFETY: as in `entry`.
        let backend = unsafe { *backend };
        Some(Target { id, address: [backend.address, 0, 0, 0], port: backend.port })
    }
}

/// The backend that the client had last, if the service still has it and the time that it is to be
/// remembered is not over; 0 for none.
#[inline(never)]
fn last_backend<const V6: bool>(service: &Service, client: &Client) -> u32 {
    let rev_nat = service.rev_nat;
    let (netns, pad) = (u8::from(client.is_netns), [0; 5]);
    let [a, b, ..] = client.id;
    let entry = if V6 {
        AFFINITY6.get_ptr(AffinityKey { client: client.id, rev_nat, netns, pad })
    } else {
        AFFINITY4.get_ptr(AffinityKey { client: [a, b], rev_nat, netns, pad })
    };
    let Some(entry) = entry else { return 0 };
    // SAFETY: a found entry is valid while this program runs; it is copied at once.
    let Affinity { last_used, backend, .. } = unsafe { *entry };
    let seconds = u64::from(service.union & 0x00ff_ffff);
    if last_used + seconds <= now() {
        return 0;
    }
    let has_it = AFFINITY_MATCH.get_ptr(AffinityMatch { backend, rev_nat, pad: 0 }).is_some();
    if has_it { backend } else { 0 }
}

/// Notes which backend the client has.
#[inline(never)]
fn keep_backend<const V6: bool>(service: &Service, client: &Client, backend: u32) -> i32 {
    let rev_nat = service.rev_nat;
    let (netns, pad) = (u8::from(client.is_netns), [0; 5]);
    let [a, b, ..] = client.id;
    let value = Affinity { last_used: now(), backend, pad: 0 };
    let noted = if V6 {
        AFFINITY6.insert(AffinityKey { client: client.id, rev_nat, netns, pad }, value, 0)
    } else {
        AFFINITY4.insert(AffinityKey { client: [a, b], rev_nat, netns, pad }, value, 0)
    };
    noted.err().unwrap_or(0)
}

/// A number that is the same for all packets of a connection, and well spread.
#[inline(always)]
fn hash(tuple: &Tuple) -> u32 {
    // The steps are those of MurmurHash3.
    let step = |hash: u32, word: u32| {
        let word = word.wrapping_mul(0xcc9e_2d51).rotate_left(15).wrapping_mul(0x1b87_3593);
        (hash ^ word).rotate_left(13).wrapping_mul(5).wrapping_add(0xe654_6b64)
    };
    let [a, b, c, d] = tuple.source;
    let [e, f, g, h] = tuple.destination;
    let ports = u32::from(tuple.source_port) | u32::from(tuple.destination_port) << 16;
    let mut hash = step(step(step(step(0, a), b), c), d);
    hash = step(step(step(step(hash, e), f), g), h);
    hash = step(step(hash, ports), u32::from(tuple.protocol));
    hash = (hash ^ hash >> 16).wrapping_mul(0x85eb_ca6b);
    hash = (hash ^ hash >> 13).wrapping_mul(0xc2b2_ae35);
    hash ^ hash >> 16
}

/// The id that the service's Maglev table has for the connection; 0 where it has no table, or an
/// empty place there.
#[inline(never)]
fn by_table<const V6: bool>(service: &Service, tuple: &Tuple) -> u32 {
    let size = || if V6 { maglev6_size.load() } else { maglev4_size.load() };
    let Some(place) = hash(tuple).checked_rem(size()) else { return 0 };
    let table =
        if V6 { MAGLEV6.get_ptr(service.rev_nat) } else { MAGLEV4.get_ptr(service.rev_nat) };
    let Some(table) = table else { return 0 };
    let first = 0_u32;
    // SAFETY: what a look-up in a map of maps finds is a map, here one with keys of four bytes.
    let ids =
        unsafe { bpf_map_lookup_elem(table.cast_mut().cast(), core::ptr::from_ref(&first).cast()) };
    if ids.is_null() {
        return 0;
    }
    // The verifier does not know what a remainder is. Read again, the size is another number to the
    // compiler, which would leave the comparison out otherwise.
    if place >= size() {
        return 0;
    }
    // SAFETY: the value of the one entry is an array of as many ids as the size says.
    unsafe { *ids.cast::<u32>().add(place as usize) }
}

/// The backend for a connection, in Cilium's order: that of a service's entry in conntrack (`known`,
/// 0 for none), that of the client where the service has affinity, that of the Maglev table for a
/// packet with the ends `packet`, or one by chance. `None` where slot or backend are missing.
#[inline(always)]
pub fn choose<const V6: bool>(
    found: &Found,
    address: &[u32; 4],
    port: u16,
    client: &Client,
    known: u32,
    packet: Option<&Tuple>,
) -> Option<Target> {
    let affine = found.service.flags & AFFINITY != 0;
    let mut target = if known == 0 { None } else { backend::<V6>(known) };
    if target.is_none() && affine {
        let last = last_backend::<V6>(&found.service, client);
        if last != 0 {
            target = backend::<V6>(last);
        }
    }
    if target.is_none() {
        let mut id = match packet {
            Some(packet) => by_table::<V6>(&found.service, packet),
            None => 0,
        };
        if id == 0 {
            id = by_chance::<V6>(found, address, port)?;
        }
        target = backend::<V6>(id);
    }
    let target = target?;
    if affine {
        keep_backend::<V6>(&found.service, client, target.id);
    }
    Some(target)
}

#[inline(always)]
fn by_chance<const V6: bool>(found: &Found, address: &[u32; 4], port: u16) -> Option<u32> {
    // SAFETY: the helper takes nothing and cannot fail.
    let number = unsafe { bpf_get_prandom_u32() };
    let count = u32::from(found.service.count);
    if count == 0 {
        return None;
    }
    #[expect(clippy::cast_possible_truncation, reason = "below a u16, and one more")]
    let slot = (number % count + 1) as u16;
    Some(entry::<V6>(address, port, slot, found.protocol, found.scope)?.union)
}

/// The proxy port of an L7 service, network byte order.
#[expect(clippy::cast_possible_truncation, reason = "the low half is the port")]
#[inline(always)]
pub fn proxy_port(service: &Service) -> u16 {
    service.union as u16
}
