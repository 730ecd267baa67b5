//! Services: found with Cilium's keys, and a backend chosen.

use aya_ebpf::helpers::bpf_get_prandom_u32;
use aya_ebpf::maps::lpm_trie::Key;

use crate::maps::{
    BACKENDS4, BACKENDS6, SERVICES4, SERVICES6, SOURCE_RANGES4, SOURCE_RANGES6, Service, ServiceKey,
};

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

/// Whether everything to this address that no service takes is to be dropped.
#[inline(always)]
pub fn is_wildcard<const V6: bool>(address: &[u32; 4]) -> bool {
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

/// A backend by chance, or, where the service wants a client to stay with one, by the client's
/// address. `None` where slot or backend are missing.
#[inline(always)]
pub fn choose<const V6: bool>(
    found: &Found,
    address: &[u32; 4],
    port: u16,
    client: &[u32; 4],
) -> Option<Target> {
    let number = if found.service.flags & AFFINITY != 0 {
        let [a, b, c, d] = *client;
        // Knuth's multiplier spreads neighbouring addresses.
        (a ^ b ^ c ^ d).wrapping_mul(2_654_435_761) >> 16
    } else {
        // SAFETY: the helper takes nothing and cannot fail.
        unsafe { bpf_get_prandom_u32() }
    };
    let count = u32::from(found.service.count);
    if count == 0 {
        return None;
    }
    #[expect(clippy::cast_possible_truncation, reason = "below a u16, and one more")]
    let slot = (number % count + 1) as u16;
    let slot = entry::<V6>(address, port, slot, found.protocol, found.scope)?;
    if V6 {
        let backend = BACKENDS6.get_ptr(slot.union)?;
        // SAFETY: as in `entry`.
        let backend = unsafe { *backend };
        Some(Target { address: backend.address, port: backend.port })
    } else {
        let backend = BACKENDS4.get_ptr(slot.union)?;
        // SAFETY: as in `entry`.
        let backend = unsafe { *backend };
        Some(Target { address: [backend.address, 0, 0, 0], port: backend.port })
    }
}

/// The proxy port of an L7 service, network byte order.
#[expect(clippy::cast_possible_truncation, reason = "the low half is the port")]
#[inline(always)]
pub fn proxy_port(service: &Service) -> u16 {
    service.union as u16
}
