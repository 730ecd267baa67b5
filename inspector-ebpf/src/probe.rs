//! The kprobe tier: functions of the kernel, at their entry. One program serves all functions that
//! take the same arguments and mean the same.

use aya_ebpf::macros::kprobe;
use aya_ebpf::programs::ProbeContext;
use inspector_common::observe::{hook, tier};

use crate::emit::Report;
use crate::kernel::{Place, index_of, key_of, neighbour, packet};
use crate::watched::is_neighbour;

/// Programs for functions that take the packet as this argument.
macro_rules! packets {
    ($($name:ident: $skb:literal, $hook:ident, $place:ident;)*) => {$(
        #[kprobe]
        #[allow(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
        pub fn $name(ctx: ProbeContext) -> u32 {
            if let Some(skb) = ctx.arg($skb) {
                packet(tier::KPROBE, hook::$hook, skb, Place::$place, None);
            }
            0
        }
    )*};
}

// The number in a name is that of the argument, where functions differ in it.
packets! {
    kp_local_deliver: 0, LOCAL_DELIVER, Network;
    kp_local_deliver_1: 1, LOCAL_DELIVER, Network;
    kp_local_deliver_2: 2, LOCAL_DELIVER, Network;
    kp_forward: 0, FORWARD, Network;
    kp_route: 0, ROUTE, Network;
    kp_queue: 0, QUEUE, Network;
    kp_transmit: 0, TRANSMIT, Network;
    kp_tcp_reset: 1, TCP_RESET, Network;
}

/// Programs for functions that take a neighbour and the packet for it.
macro_rules! neighbours {
    ($($name:ident: $hook:ident;)*) => {$(
        #[kprobe]
        #[allow(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
        pub fn $name(ctx: ProbeContext) -> u32 {
            if let (Some(neigh), Some(skb)) = (ctx.arg(0), ctx.arg(1)) {
                neighbour(tier::KPROBE, hook::$hook, neigh, skb, None);
            }
            0
        }
    )*};
}

neighbours! {
    kp_neigh_resolve: NEIGH_RESOLVE;
    kp_neigh_solicit: NEIGH_SOLICIT;
}

/// `(tbl, pkey, dev, …)`
#[kprobe]
#[allow(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn kp_neigh_create(ctx: ProbeContext) -> u32 {
    if let (Some(table), Some(key), Some(device)) = (ctx.arg(0), ctx.arg(1), ctx.arg(2))
        && let Some(address) = key_of(table, key)
        && is_neighbour(&address)
        && let Some(ifindex) = index_of(device)
    {
        let mut report = Report::new(tier::KPROBE, hook::NEIGH_CREATE);
        report.neighbour = address;
        report.ifindex = ifindex;
        report.send();
    }
    0
}

/// `(skb, type, code, …)`
#[kprobe]
#[allow(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn kp_icmp_send(ctx: ProbeContext) -> u32 {
    if let (Some(skb), Some(kind), Some(code)) = (ctx.arg(0), ctx.arg::<u8>(1), ctx.arg::<u8>(2)) {
        let value = u32::from(kind) << 8 | u32::from(code);
        packet(tier::KPROBE, hook::ICMP_SEND, skb, Place::Network, Some(value));
    }
    0
}
