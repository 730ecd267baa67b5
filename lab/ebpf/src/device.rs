//! The programs on devices.

use aya_ebpf::bindings::BPF_NOEXIST;
use aya_ebpf::helpers::bpf_get_prandom_u32;
use aya_ebpf::macros::classifier;
use aya_ebpf::programs::TcContext;

use crate::config::{enable_l7_lb, enable_reject, nat_ipv4, nat_ipv6_high, nat_ipv6_low};
use crate::maps::{CALLS, FLOWS, Tuple};
use crate::packet::{self, At, DROP, ETHERNET, Reason, STACK};
use crate::service::{self, Client, L7, ROUTABLE};
use crate::traces::{self, Note};
use crate::{neighbour, reject};

/// Where the programs for IPv4 and IPv6 are in [`CALLS`].
pub const IPV4: u32 = 7;
pub const IPV6: u32 = 10;

const P_IPV4: u16 = 0x0800;
const P_ARP: u16 = 0x0806;
const P_IPV6: u16 = 0x86dd;

/// Mark of packets for the L7 proxy; its port (network byte order) is the upper half.
const MARK_TO_PROXY: u32 = 0x0200;

/// Mark of packets that have the node's address as their source now.
const MARK_SNAT_DONE: u32 = 0x0300;

/// What a pod sees as the client when it reaches itself through a service: 169.254.42.1.
const LOOPBACK: u32 = u32::from_ne_bytes([169, 254, 42, 1]);

/// What kind of device a packet was received on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum From {
    /// A device to the outside.
    Outside,
    /// A pod's, where sockets do the load balancing.
    Pod,
    /// A pod's, where it is done for each packet.
    PodBalanced,
}

#[inline(always)]
fn protocol(ctx: &TcContext) -> u16 {
    // SAFETY: the kernel hands a valid __sk_buff to a classifier. The protocol is the low half, in
    // network byte order.
    let protocol = unsafe { (*ctx.skb.skb).protocol };
    #[expect(clippy::cast_possible_truncation, reason = "the low half is all there is")]
    u16::from_be(protocol as u16)
}

/// To the program for the packet's protocol. As in Cilium, a missing one is a drop.
#[inline(always)]
fn call(ctx: &TcContext, index: u32) -> i32 {
    // SAFETY: nothing here has anything to drop.
    unsafe { CALLS.tail_call(ctx, index) };
    DROP
}

/// Ingress of the devices to the outside.
#[classifier]
#[expect(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn cil_from_netdev(ctx: TcContext) -> i32 {
    let has_header = packet::header() != 0;
    match protocol(&ctx) {
        P_ARP if has_header => neighbour::answer_arp(&ctx),
        P_IPV4 => call(&ctx, IPV4),
        P_IPV6 => {
            if has_header && let Some(action) = neighbour::answer_solicitation(&ctx) {
                return action;
            }
            call(&ctx, IPV6)
        }
        _ => STACK,
    }
}

/// Egress of the devices to the outside: a real one masquerades here, and never translates.
#[classifier]
pub fn cil_to_netdev(_: TcContext) -> i32 {
    STACK
}

/// Ingress of `cilium_host` and `cilium_net`.
#[classifier]
pub fn cil_to_host(_: TcContext) -> i32 {
    STACK
}

/// Egress of `cilium_host`: the way from the node's stack to its pods.
#[classifier]
#[expect(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn cil_from_host(ctx: TcContext) -> i32 {
    match protocol(&ctx) {
        P_IPV4 => from_host::<false>(&ctx),
        P_IPV6 => from_host::<true>(&ctx),
        _ => STACK,
    }
}

#[inline(always)]
fn from_host<const V6: bool>(ctx: &TcContext) -> i32 {
    let mut destination = [0; 4];
    let at = ETHERNET as usize;
    if V6 {
        let Ok(address) = ctx.load(at + 24) else { return DROP };
        destination = address;
    } else {
        let Ok(address) = ctx.load(at + 16) else { return DROP };
        destination[0] = address;
    }
    match packet::endpoint::<V6>(&destination) {
        Some(pod) if !packet::is_node(pod) => packet::to_pod::<V6>(ctx, pod, At::Egress, ETHERNET),
        _ => STACK,
    }
}

/// Ingress of the pods' devices: what pods send.
#[classifier]
#[expect(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn cil_from_container(ctx: TcContext) -> i32 {
    match protocol(&ctx) {
        P_IPV4 => call(&ctx, IPV4),
        P_IPV6 => match neighbour::answer_pod(&ctx) {
            Some(action) => action,
            None => call(&ctx, IPV6),
        },
        _ => STACK,
    }
}

#[classifier]
#[expect(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn tail_handle_ipv4_from_netdev(ctx: TcContext) -> i32 {
    handle::<false>(&ctx, From::Outside)
}

#[classifier]
#[expect(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn tail_handle_ipv6_from_netdev(ctx: TcContext) -> i32 {
    handle::<true>(&ctx, From::Outside)
}

#[classifier]
#[expect(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn tail_handle_ipv4(ctx: TcContext) -> i32 {
    handle::<false>(&ctx, From::Pod)
}

#[classifier]
#[expect(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn tail_handle_ipv6(ctx: TcContext) -> i32 {
    handle::<true>(&ctx, From::Pod)
}

#[classifier]
#[expect(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn tail_per_packet_lb_ipv4(ctx: TcContext) -> i32 {
    handle::<false>(&ctx, From::PodBalanced)
}

#[classifier]
#[expect(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn tail_per_packet_lb_ipv6(ctx: TcContext) -> i32 {
    handle::<true>(&ctx, From::PodBalanced)
}

/// What happens to a packet that a device has received.
#[inline(always)]
#[expect(
    clippy::needless_borrows_for_generic_args,
    reason = "what is passed by value is copied, and takes stack of its own"
)]
fn handle<const V6: bool>(ctx: &TcContext, from: From) -> i32 {
    let l3 = packet::header();
    let Some((old, l4)) = packet::parse::<V6>(ctx, l3) else {
        return pass::<V6>(ctx, l3);
    };
    let opening = packet::is_opening(ctx, &old, l4);
    // Services come first, those of the node's own address too: then no answer gets back.
    if from == From::Outside && service::is_for_none::<V6>(&old) {
        return packet::drop(ctx, Reason::NoService);
    }
    // One for both ways: kernels before Linux 6.6 round the stack of each function up, and what is
    // called here takes the rest.
    let mut new = old;
    if !opening && let Some(known) = FLOWS.get_ptr(&old) {
        // SAFETY: a found entry is valid while this program runs; it is copied at once.
        new = unsafe { *known };
        return forward::<V6>(ctx, l3, l4, &old, &new);
    }
    if from == From::Pod {
        return pass::<V6>(ctx, l3);
    }
    let outside = from == From::Outside;
    let mut note = Note { backend: 0, rev_nat: 0, opening, outside, local: false, pod: false };
    match balance::<V6>(ctx, &old, &mut new, &mut note) {
        NO_SERVICE => pass::<V6>(ctx, l3),
        BALANCED => {
            let elsewhere = note.outside && !note.local;
            if remember(&old, &mut new, elsewhere) != 0
                || traces::connection::<V6>(&old, &new, &note) != 0
                || (outside && neighbour_of::<V6>(ctx, &old.source) != 0)
            {
                return DROP;
            }
            if elsewhere {
                ctx.set_mark(MARK_SNAT_DONE);
            }
            forward::<V6>(ctx, l3, l4, &old, &new)
        }
        action => action,
    }
}

#[inline(never)]
fn neighbour_of<const V6: bool>(ctx: &TcContext, client: &[u32; 4]) -> i32 {
    let Ok(mac) = ctx.load(6) else { return 0 };
    traces::neighbour::<V6>(client, mac)
}

/// What [`balance`] may say beside an action: the packet is for no service.
const NO_SERVICE: i32 = -1;
/// The packet is for the backend that was noted.
const BALANCED: i32 = -2;

/// Load balancing, in Cilium's order (the wildcard was looked at before): source range, routable, L7, no backends, backend.
/// What is chosen stands in `new` and `note`; a function by itself, so that its stack is free again
/// when the connection is noted.
#[inline(never)]
fn balance<const V6: bool>(ctx: &TcContext, old: &Tuple, new: &mut Tuple, note: &mut Note) -> i32 {
    let outside = note.outside;
    let vip = &old.destination;
    let Some(found) = service::find::<V6>(vip, old.destination_port, old.protocol, !outside) else {
        return NO_SERVICE;
    };
    if outside && !service::admits::<V6>(&found.service, &old.source) {
        return packet::drop(ctx, Reason::NotInSourceRange);
    }
    if outside && found.service.flags & ROUTABLE == 0 {
        return packet::drop(ctx, Reason::ClusterIp);
    }
    if enable_l7_lb.load() != 0 && found.service.flags2 & L7 != 0 {
        let port = u32::from(service::proxy_port(&found.service));
        ctx.set_mark(MARK_TO_PROXY | port << 16);
        return STACK;
    }
    if found.service.count == 0 {
        let tell = enable_reject.load() != 0 && !V6 && packet::header() != 0;
        return if tell { reject::unreachable(ctx) } else { packet::drop(ctx, Reason::NoService) };
    }
    let known = traces::known_backend::<V6>(old, note.opening);
    let client = Client { id: old.source, is_netns: false };
    let port = old.destination_port;
    let Some(target) = service::choose::<V6>(&found, vip, port, &client, known, Some(old)) else {
        return packet::drop(ctx, Reason::NoService);
    };
    new.destination = target.address;
    new.destination_port = target.port;
    note.backend = target.id;
    note.rev_nat = found.service.rev_nat;
    let endpoint = packet::endpoint::<V6>(&target.address);
    note.local = endpoint.is_some();
    note.pod = endpoint.is_some_and(|endpoint| !packet::is_node(endpoint));
    if !outside {
        if !V6 && new.destination[0] == old.source[0] {
            new.source[0] = LOOPBACK;
        }
    } else if !note.local {
        new.source = node_source::<V6>();
    }
    BALANCED
}

/// The node's address, which connections to backends elsewhere come from.
#[inline(always)]
pub fn node_source<const V6: bool>() -> [u32; 4] {
    if V6 { halves(nat_ipv6_high.load(), nat_ipv6_low.load()) } else { [nat_ipv4.load(), 0, 0, 0] }
}

#[expect(clippy::cast_possible_truncation, reason = "taken apart into halves")]
#[inline(always)]
fn halves(high: u64, low: u64) -> [u32; 4] {
    // The numbers hold the bytes in their order in memory; BPF here is little endian, as the
    // captures are.
    [high as u32, (high >> 32) as u32, low as u32, (low >> 32) as u32]
}

/// Notes both directions of a connection. With `shared`, the new source address is the node's, and
/// another client may have the port: then the connection gets another one.
/// The result is what the kernel said of it.
#[inline(never)]
pub fn remember(old: &Tuple, new: &mut Tuple, shared: bool) -> i32 {
    let back = reversed(old);
    let mut key = reversed(new);
    let flags = if shared { u64::from(BPF_NOEXIST) } else { 0 };
    if FLOWS.insert(key, back, flags).is_err() {
        // SAFETY: a found entry is valid while this program runs.
        let ours = FLOWS.get_ptr(key).is_some_and(|entry| unsafe { *entry == back });
        if !ours {
            // One more try, from the upper half of the ports, is enough for a lab.
            #[expect(clippy::cast_possible_truncation, reason = "any bits will do")]
            // SAFETY: the helper takes nothing and cannot fail.
            let port = unsafe { bpf_get_prandom_u32() } as u16 | 0x8000;
            new.source_port = port.to_be();
            key.destination_port = new.source_port;
            if let Err(error) = FLOWS.insert(key, back, u64::from(BPF_NOEXIST)) {
                return error;
            }
        }
    }
    FLOWS.insert(old, *new, 0).err().unwrap_or(0)
}

#[inline(always)]
fn reversed(tuple: &Tuple) -> Tuple {
    Tuple {
        source: tuple.destination,
        destination: tuple.source,
        source_port: tuple.destination_port,
        destination_port: tuple.source_port,
        ..*tuple
    }
}

/// Translated: to the pod, or where the routes say.
#[inline(never)]
fn forward<const V6: bool>(ctx: &TcContext, l3: u32, l4: u32, old: &Tuple, new: &Tuple) -> i32 {
    if packet::rewrite::<V6>(ctx, l3, l4, old, new).is_err() {
        return DROP;
    }
    match packet::endpoint::<V6>(&new.destination) {
        Some(node) if packet::is_node(node) => STACK,
        Some(pod) => packet::to_pod::<V6>(ctx, pod, At::Ingress, l3),
        None => packet::route::<V6>(ctx, l3, new),
    }
}

/// Not translated: to the pod that it is for, else to the node's stack.
#[inline(always)]
fn pass<const V6: bool>(ctx: &TcContext, l3: u32) -> i32 {
    let mut destination = [0; 4];
    let at = l3 as usize;
    if V6 {
        let Ok(address) = ctx.load(at + 24) else { return STACK };
        destination = address;
    } else {
        let Ok(address) = ctx.load(at + 16) else { return STACK };
        destination[0] = address;
    }
    match packet::endpoint::<V6>(&destination) {
        Some(pod) if !packet::is_node(pod) => packet::to_pod::<V6>(ctx, pod, At::Ingress, l3),
        _ => STACK,
    }
}
