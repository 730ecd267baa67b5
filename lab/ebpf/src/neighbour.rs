//! The L2 responder: answers for VIPs that this node announces.

use aya_ebpf::helpers::bpf_ktime_get_ns;
use aya_ebpf::helpers::generated::bpf_redirect;
use aya_ebpf::programs::TcContext;

use crate::config::interface_mac;
use crate::maps::{RESPONDER4, RESPONDER6, RUNTIME_CONFIG, Responder4, Responder6};
use crate::packet::{self, DROP, ETHERNET, STACK};
use crate::reject::{checksum, pseudo_checksum, resize};

/// Index of the agent's last sign of life in the runtime configuration.
const AGENT_LIVENESS: u32 = 1;

/// How long an agent is believed to live after its last sign of life, nanoseconds.
const BELIEF: u64 = 15_000_000_000;

#[inline(always)]
fn agent_lives() -> bool {
    let Some(last) = RUNTIME_CONFIG.get(AGENT_LIVENESS) else { return false };
    // SAFETY: the helper takes nothing and cannot fail.
    let now = unsafe { bpf_ktime_get_ns() };
    *last != 0 && now.wrapping_sub(*last) < BELIEF
}

#[inline(always)]
fn mac() -> [u8; 6] {
    let [a, b, c, d, e, f, ..] = interface_mac.load().to_ne_bytes();
    [a, b, c, d, e, f]
}

/// Counts an answer. Not at once, for want of atomics in the compiler's BPF target: two answers at
/// the same moment may be counted as one.
#[inline(always)]
fn count(answers: *mut u64) {
    // SAFETY: a found entry is valid and aligned while this program runs.
    unsafe { *answers += 1 };
}

#[inline(always)]
fn send_back(ctx: &TcContext) -> i32 {
    // SAFETY: the helper takes plain numbers.
    packet::code(unsafe { bpf_redirect(packet::ifindex(ctx), 0) })
}

/// Answers an ARP request for an announced VIP; everything else goes to the stack.
#[inline(always)]
pub fn answer_arp(ctx: &TcContext) -> i32 {
    let at = ETHERNET as usize;
    // Ethernet, IPv4, lengths 6 and 4, request.
    let Ok(head) = ctx.load::<[u8; 8]>(at) else { return STACK };
    if head != [0, 1, 8, 0, 6, 4, 0, 1] {
        return STACK;
    }
    let (Ok(sender), Ok(sender_ip), Ok(address)) =
        (ctx.load::<[u8; 6]>(at + 8), ctx.load::<[u8; 4]>(at + 14), ctx.load::<u32>(at + 24))
    else {
        return STACK;
    };
    let key = Responder4 { address, ifindex: packet::ifindex(ctx) };
    let Some(answers) = RESPONDER4.get_ptr_mut(key) else { return STACK };
    if !agent_lives() {
        return STACK;
    }
    let mac = mac();
    let written = ctx
        .store(0, &[sender, mac], 0)
        .and_then(|()| ctx.store(at + 6, &[0_u8, 2], 0))
        .and_then(|()| ctx.store(at + 8, &mac, 0))
        .and_then(|()| ctx.store(at + 14, &address, 0))
        .and_then(|()| ctx.store(at + 18, &sender, 0))
        .and_then(|()| ctx.store(at + 24, &sender_ip, 0));
    if written.is_err() {
        return DROP;
    }
    count(answers);
    send_back(ctx)
}

/// Answers a neighbour solicitation for an announced VIP; `None` for every other packet.
#[inline(always)]
pub fn answer_solicitation(ctx: &TcContext) -> Option<i32> {
    let (address, asker) = solicitation(ctx)?;
    let key = Responder6 { address, ifindex: packet::ifindex(ctx), pad: 0 };
    let answers = RESPONDER6.get_ptr_mut(key)?;
    // From nowhere: someone looks whether the address is taken. Not for the responder.
    if !agent_lives() || asker == [0; 4] {
        return None;
    }
    if advertise(ctx, address, asker).is_err() {
        return Some(DROP);
    }
    count(answers);
    Some(send_back(ctx))
}

/// Answers a pod that looks for its router, which is the node: the kernel would not, because the
/// address is on another device. `None` for every other packet.
#[inline(always)]
pub fn answer_pod(ctx: &TcContext) -> Option<i32> {
    let (address, asker) = solicitation(ctx)?;
    if !packet::is_node(packet::endpoint::<true>(&address)?) {
        return None;
    }
    Some(if advertise(ctx, address, asker).is_err() { DROP } else { send_back(ctx) })
}

const ICMPV6: u8 = 58;

/// Whom the packet looks for, and who does, if it is a neighbour solicitation.
#[inline(always)]
fn solicitation(ctx: &TcContext) -> Option<([u32; 4], [u32; 4])> {
    const SOLICITATION: u8 = 135;
    let at = ETHERNET as usize;
    if ctx.load::<u8>(at + 6).ok()? != ICMPV6 || ctx.load::<u8>(at + 40).ok()? != SOLICITATION {
        return None;
    }
    Some((ctx.load(at + 48).ok()?, ctx.load(at + 8).ok()?))
}

/// Turns the packet into the answer: `address` is here.
#[inline(always)]
fn advertise(ctx: &TcContext, address: [u32; 4], asker: [u32; 4]) -> Result<(), i64> {
    /// Header, target, and the option with the MAC address.
    const PAYLOAD: u8 = 32;
    let at = ETHERNET as usize;
    let sender: [u8; 6] = ctx.load(6)?;
    let mac = mac();
    let [v0, v1, v2, v3] = address;
    let [c0, c1, c2, c3] = asker;
    let word = |a, b, c, d| u32::from_ne_bytes([a, b, c, d]);
    let ip = [word(0x60, 0, 0, 0), word(0, PAYLOAD, ICMPV6, 255), v0, v1, v2, v3, c0, c1, c2, c3];
    let mut icmp = [
        // Advertisement; solicited, and to override.
        word(136, 0, 0, 0),
        word(0x60, 0, 0, 0),
        v0,
        v1,
        v2,
        v3,
        // Option 2, the target's address; length in units of eight bytes.
        word(2, 1, mac[0], mac[1]),
        word(mac[2], mac[3], mac[4], mac[5]),
    ];
    let sum = checksum(&icmp, pseudo_checksum(&ip, PAYLOAD));
    icmp[0] |= u32::from(sum) << 16;
    resize(ctx, ETHERNET + 40 + u32::from(PAYLOAD))?;
    ctx.store(at, &ip, 0)?;
    ctx.store(at + 40, &icmp, 0)?;
    ctx.store(0, &[sender, mac], 0)
}
