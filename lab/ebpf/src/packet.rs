//! Packets: read, rewritten, and sent on their way.

use aya_ebpf::EbpfContext as _;
use aya_ebpf::bindings::{
    BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR, TC_ACT_OK, TC_ACT_SHOT, bpf_fib_lookup,
};
use aya_ebpf::helpers::generated::{
    bpf_csum_diff, bpf_fib_lookup as fib_lookup, bpf_redirect, bpf_redirect_neigh,
    bpf_redirect_peer, bpf_skb_change_head, bpf_skb_load_bytes,
};
use aya_ebpf::programs::TcContext;

use crate::config::{eth_header_length, metrics_say_where};
use crate::maps::{ENDPOINTS, Endpoint, EndpointKey, METRICS, Metric, MetricKey, Tuple};

pub const TCP: u8 = 6;
pub const UDP: u8 = 17;
pub const ETHERNET: u32 = 14;

pub const AF_INET: u8 = 2;
pub const AF_INET6: u8 = 10;

/// The endpoint is the node itself.
const ENDPOINT_HOST: u32 = 1;

/// `BPF_FIB_LKUP_RET_NO_NEIGH`: there is a route, and nobody has asked for the next hop yet.
const NO_NEIGH: i64 = 7;

/// Where the packet is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum At {
    /// Received on a device.
    Ingress,
    /// About to leave through one.
    Egress,
}

#[inline(always)]
pub fn ifindex(ctx: &TcContext) -> u32 {
    // SAFETY: the kernel hands a valid __sk_buff to a classifier.
    unsafe { (*ctx.skb.skb).ifindex }
}

/// Reads both ends of a TCP or UDP packet, and where its transport header starts. `None` for
/// everything else: other protocols, fragments, IPv6 with extension headers.
#[inline(always)]
pub fn parse<const V6: bool>(ctx: &TcContext, l3: u32) -> Option<(Tuple, u32)> {
    let mut tuple = Tuple {
        source: [0; 4],
        destination: [0; 4],
        source_port: 0,
        destination_port: 0,
        protocol: 0,
        family: if V6 { 6 } else { 4 },
        pad: 0,
    };
    let l4;
    let at = l3 as usize;
    if V6 {
        tuple.protocol = ctx.load(at + 6).ok()?;
        // Straight to where it belongs: a value in between takes stack of its own.
        // SAFETY: the context is the one that the kernel gave, and both addresses lie side by side.
        let failed = unsafe {
            bpf_skb_load_bytes(
                ctx.skb.skb.cast(),
                l3 + 8,
                core::ptr::from_mut(&mut tuple).cast(),
                32,
            )
        };
        if failed != 0 {
            return None;
        }
        l4 = l3 + 40;
    } else {
        let first: u8 = ctx.load(at).ok()?;
        let fragment: u16 = ctx.load(at + 6).ok()?;
        if u16::from_be(fragment) & 0x3fff != 0 {
            return None;
        }
        tuple.protocol = ctx.load(at + 9).ok()?;
        tuple.source[0] = ctx.load(at + 12).ok()?;
        tuple.destination[0] = ctx.load(at + 16).ok()?;
        l4 = l3 + u32::from(first & 0xf) * 4;
    }
    if tuple.protocol != TCP && tuple.protocol != UDP {
        return None;
    }
    tuple.source_port = ctx.load(l4 as usize).ok()?;
    tuple.destination_port = ctx.load(l4 as usize + 2).ok()?;
    Some((tuple, l4))
}

/// Whether the packet opens a TCP connection.
#[inline(always)]
pub fn is_opening(ctx: &TcContext, tuple: &Tuple, l4: u32) -> bool {
    const SYN: u8 = 2;
    const ACK: u8 = 16;
    let flags = ctx.load::<u8>(l4 as usize + 13).unwrap_or(0);
    tuple.protocol == TCP && flags & (SYN | ACK) == SYN
}

/// Writes the ends `new` into a packet that has the ends `old`, checksums included.
#[inline(always)]
pub fn rewrite<const V6: bool>(
    ctx: &TcContext,
    l3: u32,
    l4: u32,
    old: &Tuple,
    new: &Tuple,
) -> Result<(), i64> {
    let at = l3 as usize;
    // Source and destination lie side by side, and an IPv4 address is one word of four: one
    // difference covers both and both families.
    // SAFETY: both pointers are to 32 bytes, which a Tuple begins with.
    let difference = unsafe {
        bpf_csum_diff(
            core::ptr::from_ref(old).cast_mut().cast(),
            32,
            core::ptr::from_ref(new).cast_mut().cast(),
            32,
            0,
        )
    };
    if difference < 0 {
        return Err(difference);
    }
    let difference = difference.cast_unsigned();
    let (field, udp) = if old.protocol == UDP {
        (l4 as usize + 6, u64::from(BPF_F_MARK_MANGLED_0))
    } else {
        (l4 as usize + 16, 0)
    };
    ctx.l4_csum_replace(field, 0, difference, u64::from(BPF_F_PSEUDO_HDR) | udp)?;
    let ports =
        |tuple: &Tuple| u64::from(tuple.source_port) | u64::from(tuple.destination_port) << 16;
    ctx.l4_csum_replace(field, ports(old), ports(new), 4 | udp)?;
    ctx.store(l4 as usize, &new.source_port, 0)?;
    ctx.store(l4 as usize + 2, &new.destination_port, 0)?;
    if V6 {
        ctx.store(at + 8, &new.source, 0)?;
        ctx.store(at + 24, &new.destination, 0)
    } else {
        ctx.l3_csum_replace(at + 10, 0, difference, 0)?;
        ctx.store(at + 12, &new.source[0], 0)?;
        ctx.store(at + 16, &new.destination[0], 0)
    }
}

/// The node's own endpoint with this address: a pod, or the node itself.
#[inline(always)]
pub fn endpoint<const V6: bool>(address: &[u32; 4]) -> Option<&'static Endpoint> {
    let key = EndpointKey { address: *address, family: if V6 { 2 } else { 1 }, key: 0, cluster: 0 };
    let entry = ENDPOINTS.get_ptr(key)?;
    // SAFETY: the kernel frees an entry of a hash map only when no program runs that may have
    // found it; values change under a reader at worst.
    Some(unsafe { &*entry })
}

#[inline(always)]
pub fn is_node(endpoint: &Endpoint) -> bool {
    endpoint.flags & ENDPOINT_HOST != 0
}

/// Hands the packet to a pod: no route, no neighbour.
#[inline(always)]
pub fn to_pod<const V6: bool>(ctx: &TcContext, to: &Endpoint, from: At, eth: u32) -> i32 {
    if age::<V6>(ctx, eth).is_err() {
        return TC_ACT_SHOT;
    }
    if add_header::<V6>(ctx, eth).is_err() {
        return TC_ACT_SHOT;
    }
    let [a, b, c, d, e, f, ..] = to.mac;
    let [g, h, i, j, k, l, ..] = to.node_mac;
    if ctx.store(0, &[a, b, c, d, e, f, g, h, i, j, k, l], 0).is_err() {
        return TC_ACT_SHOT;
    }
    // SAFETY: both take plain numbers.
    let action = unsafe {
        match from {
            At::Ingress => bpf_redirect_peer(to.ifindex, 0),
            At::Egress => bpf_redirect(to.ifindex, 0),
        }
    };
    code(action)
}

/// Puts an Ethernet header in front of a packet that has none: zeros but for the protocol.
#[inline(always)]
fn add_header<const V6: bool>(ctx: &TcContext, eth: u32) -> Result<(), i64> {
    if eth != 0 {
        return Ok(());
    }
    // SAFETY: the context is the one that this program was given.
    match unsafe { bpf_skb_change_head(ctx.skb.skb, ETHERNET, 0) } {
        0 => ctx.store(12, &(if V6 { 0x86dd_u16 } else { 0x0800 }).to_be(), 0),
        error => Err(error),
    }
}

/// Sends the packet where the node's routes say, by the next hop's neighbour entry.
#[inline(never)]
pub fn route<const V6: bool>(ctx: &TcContext, l3: u32, tuple: &Tuple) -> i32 {
    // SAFETY: all of it are numbers, of which zero is a value.
    let mut question: bpf_fib_lookup = unsafe { core::mem::zeroed() };
    question.family = if V6 { AF_INET6 } else { AF_INET };
    question.l4_protocol = tuple.protocol;
    question.ifindex = ifindex(ctx);
    if V6 {
        question.__bindgen_anon_3.ipv6_src = tuple.source;
        question.__bindgen_anon_4.ipv6_dst = tuple.destination;
    } else {
        question.__bindgen_anon_3.ipv4_src = tuple.source[0];
        question.__bindgen_anon_4.ipv4_dst = tuple.destination[0];
    }
    // SAFETY: the structure is of the kernel's layout, and of the size that is said.
    let answer = unsafe {
        fib_lookup(
            ctx.as_ptr(),
            &raw mut question,
            i32::try_from(size_of::<bpf_fib_lookup>()).unwrap_or(0),
            0,
        )
    };
    // The helper below replaces an Ethernet header: there must be one.
    if (answer != 0 && answer != NO_NEIGH)
        || age::<V6>(ctx, l3).is_err()
        || add_header::<V6>(ctx, l3).is_err()
    {
        return TC_ACT_SHOT;
    }
    // SAFETY: without parameters the helper looks route and neighbour up by itself.
    code(unsafe { bpf_redirect_neigh(question.ifindex, core::ptr::null_mut(), 0, 0) })
}

/// A helper's action, which fits.
#[expect(clippy::cast_possible_truncation, reason = "actions are below 16")]
#[inline(always)]
pub fn code(action: i64) -> i32 {
    action as i32
}

/// One hop less, as a router does.
#[inline(always)]
fn age<const V6: bool>(ctx: &TcContext, l3: u32) -> Result<(), i64> {
    let at = l3 as usize;
    if V6 {
        let hops: u8 = ctx.load(at + 7)?;
        let less = hops.checked_sub(1).filter(|hops| *hops > 0).ok_or(-1)?;
        return ctx.store(at + 7, &less, 0);
    }
    let [hops, protocol]: [u8; 2] = ctx.load(at + 8)?;
    let less = hops.checked_sub(1).filter(|hops| *hops > 0).ok_or(-1)?;
    let word = |hops| u64::from(u16::from_ne_bytes([hops, protocol]));
    ctx.l3_csum_replace(at + 10, word(hops), word(less), 2)?;
    ctx.store(at + 8, &less, 0)
}

/// Length of the Ethernet header on this device: a constant to the verifier.
#[inline(always)]
pub fn header() -> u32 {
    if eth_header_length.load() == 0 { 0 } else { ETHERNET }
}

/// Why Cilium drops a packet: the number in its events and metrics.
#[derive(Clone, Copy)]
pub enum Reason {
    NoService = 158,
    ClusterIp = 174,
    NotInSourceRange = 177,
}

/// Drops a packet as Cilium does, with the reason in the third word of the control buffer, and
/// counts it.
#[inline(always)]
pub fn drop(ctx: &TcContext, reason: Reason) -> i32 {
    /// The number of the program for devices to the outside among Cilium's files.
    const FILE: u8 = 1;
    // SAFETY: the kernel hands a valid __sk_buff to a classifier, which may write these words.
    unsafe { (*ctx.skb.skb).cb[2] = reason as u32 };
    count(reason, FILE, line!(), u64::from(ctx.len()));
    DROP
}

/// Counts a received packet that was dropped, in the counters of this CPU. Where that is to be
/// said, `line` is one of the stand-in's own.
#[inline(always)]
pub fn count(reason: Reason, file: u8, line: u32, bytes: u64) {
    const INGRESS: u8 = 1;
    let (file, line) = if metrics_say_where.load() == 0 { (0, 0) } else { (file, line) };
    #[expect(clippy::cast_possible_truncation, reason = "no file of the stand-in is that long")]
    let line = line as u16;
    let key = MetricKey { reason: reason as u8, direction: INGRESS, line, file, pad: [0; 3] };
    if let Some(metric) = METRICS.get_ptr_mut(key) {
        // SAFETY: a found entry is valid while this program runs, and no other CPU has this value.
        unsafe {
            (*metric).packets += 1;
            (*metric).bytes += bytes;
        }
    } else {
        // Where that fails, the map is full, and one drop goes uncounted.
        let _full = METRICS.insert(key, Metric { packets: 1, bytes }, 0);
    }
}

/// To the node's own stack.
pub const STACK: i32 = TC_ACT_OK;
pub const DROP: i32 = TC_ACT_SHOT;
