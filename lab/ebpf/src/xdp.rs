//! The program at XDP: services whose backend is elsewhere, before the kernel has made a packet of
//! the frame. Everything else goes on to the program at tc.

use core::mem::MaybeUninit;

use aya_ebpf::EbpfContext as _;
use aya_ebpf::bindings::{bpf_fib_lookup, xdp_action};
use aya_ebpf::helpers::generated::{
    bpf_csum_diff, bpf_fib_lookup as fib_lookup, bpf_redirect, bpf_xdp_load_bytes,
    bpf_xdp_store_bytes,
};
use aya_ebpf::macros::xdp;
use aya_ebpf::programs::XdpContext;

use crate::config::{enable_l7_lb, enable_reject};
use crate::device::{node_source, remember};
use crate::maps::{FLOWS, Tuple};
use crate::packet::{self, ETHERNET, Reason, TCP, UDP};
use crate::service::{self, Client, L7, ROUTABLE};
use crate::traces::{self, Note};

/// The number of this program among Cilium's files.
const FILE: u8 = 4;

const PASS: u32 = xdp_action::XDP_PASS;
const DROP: u32 = xdp_action::XDP_DROP;

/// What [`balance`] says where the packet is for the backend that was noted.
const BALANCED: u32 = 100;

#[inline(always)]
fn load<T: Copy>(ctx: &XdpContext, at: u32) -> Option<T> {
    let mut value = MaybeUninit::<T>::uninit();
    let size = u32::try_from(size_of::<T>()).ok()?;
    // SAFETY: the kernel fills as many bytes as the value has, of a type that any bytes are one of.
    unsafe {
        let error = bpf_xdp_load_bytes(ctx.ctx, at, value.as_mut_ptr().cast(), size);
        (error == 0).then(|| value.assume_init())
    }
}

#[inline(always)]
fn store<T: Copy>(ctx: &XdpContext, at: u32, value: &T) -> Option<()> {
    let size = u32::try_from(size_of::<T>()).ok()?;
    let from = core::ptr::from_ref(value).cast_mut().cast();
    // SAFETY: the kernel reads as many bytes as the value has.
    let error = unsafe { bpf_xdp_store_bytes(ctx.ctx, at, from, size) };
    (error == 0).then_some(())
}

/// Ingress of the devices to the outside, before everything else.
#[xdp]
#[expect(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn cil_xdp_entry(ctx: XdpContext) -> u32 {
    match load::<u16>(&ctx, 12).map(u16::from_be) {
        Some(0x0800) => handle::<false>(&ctx),
        Some(0x86dd) => handle::<true>(&ctx),
        _ => PASS,
    }
}

/// As [`packet::parse`].
#[inline(always)]
fn parse<const V6: bool>(ctx: &XdpContext) -> Option<(Tuple, u32)> {
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
    if V6 {
        tuple.protocol = load(ctx, ETHERNET + 6)?;
        tuple.source = load(ctx, ETHERNET + 8)?;
        tuple.destination = load(ctx, ETHERNET + 24)?;
        l4 = ETHERNET + 40;
    } else {
        let first: u8 = load(ctx, ETHERNET)?;
        let fragment: u16 = load(ctx, ETHERNET + 6)?;
        if u16::from_be(fragment) & 0x3fff != 0 {
            return None;
        }
        tuple.protocol = load(ctx, ETHERNET + 9)?;
        tuple.source[0] = load(ctx, ETHERNET + 12)?;
        tuple.destination[0] = load(ctx, ETHERNET + 16)?;
        l4 = ETHERNET + u32::from(first & 0xf) * 4;
    }
    if tuple.protocol != TCP && tuple.protocol != UDP {
        return None;
    }
    tuple.source_port = load(ctx, l4)?;
    tuple.destination_port = load(ctx, l4 + 2)?;
    Some((tuple, l4))
}

#[inline(always)]
fn handle<const V6: bool>(ctx: &XdpContext) -> u32 {
    let Some((old, l4)) = parse::<V6>(ctx) else { return PASS };
    // SYN without ACK.
    let opening = old.protocol == TCP && load::<u8>(ctx, l4 + 13).unwrap_or(0) & 0x12 == 2;
    if service::is_for_none::<V6>(&old) {
        return drop(ctx, Reason::NoService);
    }
    if !opening && let Some(known) = FLOWS.get_ptr(old) {
        // SAFETY: a found entry is valid while this program runs; it is copied at once.
        let new = unsafe { *known };
        return forward::<V6>(ctx, l4, &old, &new);
    }
    let mut note =
        Note { backend: 0, rev_nat: 0, opening, outside: true, local: false, pod: false };
    let mut new = old;
    match balance::<V6>(ctx, &old, &mut new, &mut note) {
        BALANCED => {
            if remember(&old, &mut new, true) != 0
                || traces::connection::<V6>(&old, &new, &note) != 0
            {
                return DROP;
            }
            if let Some(mac) = load::<[u8; 6]>(ctx, 6) {
                traces::neighbour::<V6>(&old.source, mac);
            }
            forward::<V6>(ctx, l4, &old, &new)
        }
        action => action,
    }
}

#[inline(always)]
fn drop(ctx: &XdpContext, reason: Reason) -> u32 {
    let bytes = ctx.data_end().wrapping_sub(ctx.data());
    packet::count(reason, FILE, line!(), bytes as u64);
    DROP
}

/// As [`crate::device`]'s, for packets from outside; what needs more than a new address is passed
/// on: to a pod, to the proxy, an answer to the client.
#[inline(never)]
fn balance<const V6: bool>(ctx: &XdpContext, old: &Tuple, new: &mut Tuple, note: &mut Note) -> u32 {
    let (vip, port) = (&old.destination, old.destination_port);
    let Some(found) = service::find::<V6>(vip, port, old.protocol, false) else {
        return PASS;
    };
    if !service::admits::<V6>(&found.service, &old.source) {
        return drop(ctx, Reason::NotInSourceRange);
    }
    if found.service.flags & ROUTABLE == 0 {
        return drop(ctx, Reason::ClusterIp);
    }
    if enable_l7_lb.load() != 0 && found.service.flags2 & L7 != 0 {
        return PASS;
    }
    if found.service.count == 0 {
        let tell = enable_reject.load() != 0 && !V6;
        return if tell { PASS } else { drop(ctx, Reason::NoService) };
    }
    let known = traces::known_backend::<V6>(old, note.opening);
    let client = Client { id: old.source, is_netns: false };
    let Some(target) = service::choose::<V6>(&found, vip, port, &client, known, Some(old)) else {
        return drop(ctx, Reason::NoService);
    };
    if packet::endpoint::<V6>(&target.address).is_some() {
        return PASS;
    }
    new.destination = target.address;
    new.destination_port = target.port;
    new.source = node_source::<V6>();
    note.backend = target.id;
    note.rev_nat = found.service.rev_nat;
    BALANCED
}

/// A checksum in a header after what it covers has changed by `difference`.
#[expect(clippy::cast_possible_truncation, reason = "a sum of 32 bits, folded to 16")]
#[inline(always)]
fn changed(sum: u16, difference: u32) -> u16 {
    let sum = u64::from(!sum) + u64::from(difference);
    let sum = (sum & 0xffff) + (sum >> 16 & 0xffff) + (sum >> 32);
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    !(sum as u16)
}

/// The difference between the first `size` bytes of two tuples: 32 are the addresses, 36 the ports
/// too.
#[inline(always)]
fn difference(old: &Tuple, new: &Tuple, size: u32) -> u32 {
    // SAFETY: both pointers are to 40 bytes.
    let sum = unsafe {
        bpf_csum_diff(
            core::ptr::from_ref(old).cast_mut().cast(),
            size,
            core::ptr::from_ref(new).cast_mut().cast(),
            size,
            0,
        )
    };
    #[expect(clippy::cast_possible_truncation, reason = "a sum of 32 bits")]
    #[expect(clippy::cast_sign_loss, reason = "an error cannot be: the size is a multiple of 4")]
    return sum as u32;
}

#[inline(always)]
fn rewrite<const V6: bool>(ctx: &XdpContext, l4: u32, old: &Tuple, new: &Tuple) -> Option<()> {
    let all = difference(old, new, 36);
    let field = l4 + if old.protocol == UDP { 6 } else { 16 };
    let sum: u16 = load(ctx, field)?;
    // A datagram may have none.
    if old.protocol == TCP || sum != 0 {
        let sum = changed(sum, all);
        let sum = if old.protocol == UDP && sum == 0 { 0xffff } else { sum };
        store(ctx, field, &sum)?;
    }
    store(ctx, l4, &new.source_port)?;
    store(ctx, l4 + 2, &new.destination_port)?;
    if V6 {
        let hops: u8 = load(ctx, ETHERNET + 7)?;
        store(ctx, ETHERNET + 7, &hops.checked_sub(1).filter(|hops| *hops > 0)?)?;
        store(ctx, ETHERNET + 8, &new.source)?;
        return store(ctx, ETHERNET + 24, &new.destination);
    }
    let [hops, protocol]: [u8; 2] = load(ctx, ETHERNET + 8)?;
    let less = hops.checked_sub(1).filter(|hops| *hops > 0)?;
    let sum: u16 = load(ctx, ETHERNET + 10)?;
    let word = |hops| u32::from(u16::from_ne_bytes([hops, protocol]));
    let sum = changed(sum, difference(old, new, 32));
    let sum = changed(sum, word(less) + (0xffff - word(hops)));
    store(ctx, ETHERNET + 8, &less)?;
    store(ctx, ETHERNET + 10, &sum)?;
    store(ctx, ETHERNET + 12, &new.source[0])?;
    store(ctx, ETHERNET + 16, &new.destination[0])
}

/// Rewritten and sent to the next hop. Where the kernel has none to offer (a pod, a neighbour yet to
/// be asked for), the packet is passed on as it came: the program at tc does the same to it.
#[inline(never)]
fn forward<const V6: bool>(ctx: &XdpContext, l4: u32, old: &Tuple, new: &Tuple) -> u32 {
    if packet::endpoint::<V6>(&new.destination).is_some() {
        return PASS;
    }
    // SAFETY: all of it are numbers, of which zero is a value.
    let mut question: bpf_fib_lookup = unsafe { core::mem::zeroed() };
    question.family = if V6 { packet::AF_INET6 } else { packet::AF_INET };
    question.l4_protocol = new.protocol;
    // SAFETY: the kernel hands a valid context to the program.
    let here = unsafe { (*ctx.ctx).ingress_ifindex };
    question.ifindex = here;
    if V6 {
        question.__bindgen_anon_3.ipv6_src = new.source;
        question.__bindgen_anon_4.ipv6_dst = new.destination;
    } else {
        question.__bindgen_anon_3.ipv4_src = new.source[0];
        question.__bindgen_anon_4.ipv4_dst = new.destination[0];
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
    if answer != 0 {
        return PASS;
    }
    if rewrite::<V6>(ctx, l4, old, new).is_none()
        || store(ctx, 0, &question.dmac).is_none()
        || store(ctx, 6, &question.smac).is_none()
    {
        return DROP;
    }
    if question.ifindex == here {
        return xdp_action::XDP_TX;
    }
    // SAFETY: the helper takes plain numbers.
    #[expect(clippy::cast_possible_truncation, reason = "actions are below 5")]
    #[expect(clippy::cast_sign_loss, reason = "and not negative")]
    return unsafe { bpf_redirect(question.ifindex, 0) } as u32;
}
