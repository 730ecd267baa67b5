//! The tracepoint tier. Raw tracepoints: their arguments are those of the kernel's `TP_PROTO`.

use aya_ebpf::macros::raw_tracepoint;
use aya_ebpf::programs::RawTracePointContext;
use inspector_common::observe::{Address, FLAG_FLOW, FLAG_MARK, FLAG_VALUE, hook, tier};

use crate::emit::Report;
use crate::kernel::{Place, index_of, is_ours, key_of, member, neighbour, packet, read};
use crate::watched::{is_neighbour, setting};

/// `NUD_FAILED`
const FAILED: u8 = 0x20;

/// `RTF_REJECT`
const REJECT: u32 = 0x200;

/// Programs that look at the packet in one argument.
macro_rules! packets {
    ($($name:ident: $skb:literal, $hook:ident, $place:ident;)*) => {$(
        #[raw_tracepoint]
        #[allow(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
        pub fn $name(ctx: RawTracePointContext) -> i32 {
            packet(tier::TRACEPOINT, hook::$hook, ctx.arg($skb), Place::$place, None);
            0
        }
    )*};
}

packets! {
    tp_netif_receive_skb: 0, RECEIVE, Data;
    tp_net_dev_queue: 0, QUEUE, Network;
    tp_net_dev_start_xmit: 0, TRANSMIT, Network;
    tp_tcp_send_reset: 1, TCP_RESET, Network;
}

#[raw_tracepoint]
#[allow(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn tp_kfree_skb(ctx: RawTracePointContext) -> i32 {
    let reason: u32 = ctx.arg(2);
    packet(tier::TRACEPOINT, hook::DROP, ctx.arg(0), Place::Network, Some(reason));
    0
}

#[raw_tracepoint]
#[allow(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn tp_icmp_send(ctx: RawTracePointContext) -> i32 {
    let (kind, code): (u8, u8) = (ctx.arg(1), ctx.arg(2));
    let value = u32::from(kind) << 8 | u32::from(code);
    packet(tier::TRACEPOINT, hook::ICMP_SEND, ctx.arg(0), Place::Network, Some(value));
    0
}

/// `(tbl, dev, pkey, n, exempt_from_gc)`
#[raw_tracepoint]
#[allow(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn tp_neigh_create(ctx: RawTracePointContext) -> i32 {
    let Some(address) = key_of(ctx.arg(0), ctx.arg(2)) else { return 0 };
    if is_neighbour(&address)
        && let Some(ifindex) = index_of(ctx.arg(1))
    {
        let mut report = Report::new(tier::TRACEPOINT, hook::NEIGH_CREATE);
        report.neighbour = address;
        report.ifindex = ifindex;
        report.send();
    }
    0
}

/// `(n, rc)`
#[raw_tracepoint]
#[allow(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn tp_neigh_event_send_done(ctx: RawTracePointContext) -> i32 {
    neighbour(tier::TRACEPOINT, hook::NEIGH_RESOLVE, ctx.arg(0), 0, None);
    0
}

/// `(n, rc)`
#[raw_tracepoint]
#[allow(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn tp_neigh_event_send_dead(ctx: RawTracePointContext) -> i32 {
    neighbour(tier::TRACEPOINT, hook::NEIGH_DEAD, ctx.arg(0), 0, None);
    0
}

/// `(n, lladdr, new, flags, nlmsg_pid)`
#[raw_tracepoint]
#[allow(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn tp_neigh_update(ctx: RawTracePointContext) -> i32 {
    let state: u8 = ctx.arg(2);
    neighbour(tier::TRACEPOINT, hook::NEIGH_UPDATE, ctx.arg(0), 0, Some(u32::from(state)));
    0
}

/// `(n, err)`: of the timer's doings only that it has given up.
#[raw_tracepoint]
#[allow(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn tp_neigh_timer_handler(ctx: RawTracePointContext) -> i32 {
    let neigh = ctx.arg(0);
    let state: u8 = member!(neigh, neigh_state);
    if state == FAILED {
        neighbour(tier::TRACEPOINT, hook::NEIGH_UPDATE, neigh, 0, Some(u32::from(FAILED)));
    }
    0
}

/// `(tb_id, flp, nhc, err)`. A look-up that found nothing names no device, and so no network
/// namespace: it is left to the hooks that see the packet then.
#[raw_tracepoint]
#[allow(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn tp_fib_table_lookup(ctx: RawTracePointContext) -> i32 {
    let _ = fib4(&ctx);
    0
}

#[inline(always)]
fn fib4(ctx: &RawTracePointContext) -> Option<()> {
    let (flow, hop): (u64, u64) = (ctx.arg(1), ctx.arg(2));
    if hop == 0 {
        return None;
    }
    let destination = Address::v4(member!(flow, flow4_destination));
    let source = Address::v4(member!(flow, flow4_source));
    if !is_neighbour(&destination) && !is_neighbour(&source) {
        return None;
    }
    let protocol = member!(flow, flow4_protocol);
    let mark = member!(flow, flow4_mark);
    route(hop, source, destination, protocol, mark)
}

/// `(net, res, table, flp)`
#[raw_tracepoint]
#[allow(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn tp_fib6_table_lookup(ctx: RawTracePointContext) -> i32 {
    let _ = fib6(&ctx);
    0
}

#[inline(always)]
fn fib6(ctx: &RawTracePointContext) -> Option<()> {
    let (result, flow): (u64, u64) = (ctx.arg(1), ctx.arg(3));
    let destination = Address::v6(member!(flow, flow6_destination));
    let source = Address::v6(member!(flow, flow6_source));
    if !is_neighbour(&destination) && !is_neighbour(&source) || !is_ours(ctx.arg(0)) {
        return None;
    }
    let hop: u64 = member!(result, result6_hop);
    let flags: u32 = member!(result, result6_flags);
    // Where nothing is found there is an entry all the same, that rejects.
    if hop == 0 || flags & REJECT != 0 {
        return None;
    }
    let protocol = member!(flow, flow6_protocol);
    let mark = member!(flow, flow6_mark);
    route(hop + u64::from(setting!(offsets.hop6_common)), source, destination, protocol, mark)
}

/// Reports a route; `hop` is a `fib_nh_common`.
#[inline(always)]
fn route(hop: u64, source: Address, destination: Address, protocol: u8, mark: u32) -> Option<()> {
    let ifindex = index_of(member!(hop, hop_dev))?;
    let mut report = Report::new(tier::TRACEPOINT, hook::ROUTE);
    report.ifindex = ifindex;
    report.neighbour = destination;
    report.source = source;
    report.protocol = protocol;
    report.mark = mark;
    report.flags = FLAG_FLOW | FLAG_MARK;
    let gateway = hop + u64::from(setting!(offsets.hop_gateway));
    report.gateway = match member!(hop, hop_gateway_family) {
        2_u8 => Address::v4(read(gateway)),
        10 => Address::v6(read(gateway)),
        _ => Address::NONE,
    };
    // No value; said here so that whoever adds one thinks of the flag.
    report.flags &= !FLAG_VALUE;
    report.send();
    Some(())
}
