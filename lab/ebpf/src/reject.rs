//! The answer to a client of a service without backends.

use aya_ebpf::helpers::generated::{bpf_csum_diff, bpf_redirect, bpf_skb_change_tail};
use aya_ebpf::programs::TcContext;

use crate::packet::{self, DROP, ETHERNET};

/// Turns the packet into "port unreachable" from the VIP to the client, which takes it as
/// "connection refused", and sends it back through the device that it came from. IPv4 on devices
/// with an Ethernet header alone: for IPv6, and on other devices, the captures' clients heard
/// nothing that they understood.
#[inline(always)]
pub fn unreachable(ctx: &TcContext) -> i32 {
    if answer(ctx).is_err() {
        return DROP;
    }
    // SAFETY: the helper takes plain numbers.
    packet::code(unsafe { bpf_redirect(packet::ifindex(ctx), 0) })
}

/// Exchanges the MAC addresses.
#[inline(always)]
fn turn_around(ctx: &TcContext) -> Result<(), i64> {
    let [destination, source]: [[u8; 6]; 2] = ctx.load(0)?;
    ctx.store(0, &[source, destination], 0)
}

/// The Internet checksum of `bytes`, on top of `sum`, as it stands in a header.
#[inline(always)]
pub fn checksum<const N: usize>(bytes: &[u32; N], sum: u32) -> u16 {
    #[expect(clippy::cast_possible_truncation, reason = "a few dozen")]
    let size = (N * 4) as u32;
    // SAFETY: the pointer is to as many bytes as is said.
    let sum = unsafe {
        bpf_csum_diff(core::ptr::null_mut(), 0, bytes.as_ptr().cast_mut().cast(), size, sum)
    };
    #[expect(clippy::cast_possible_truncation, reason = "a sum of 32 bits, folded to 16")]
    #[expect(clippy::cast_sign_loss, reason = "an error cannot be: the size is a multiple of 4")]
    {
        let sum = sum as u32;
        let sum = (sum & 0xffff) + (sum >> 16);
        let sum = (sum & 0xffff) + (sum >> 16);
        !(sum as u16)
    }
}

#[inline(always)]
fn word(a: u8, b: u8, c: u8, d: u8) -> u32 {
    u32::from_ne_bytes([a, b, c, d])
}

#[inline(always)]
fn answer(ctx: &TcContext) -> Result<(), i64> {
    const LENGTH: u8 = 20 + 8 + 28;
    let at = ETHERNET as usize;
    let original: [u32; 7] = ctx.load(at)?;
    let (client, vip) = (original[3], original[4]);
    let mut ip = [word(0x45, 0, 0, LENGTH), 0, word(64, 1, 0, 0), vip, client];
    let sum = checksum(&ip, 0);
    ip[2] |= u32::from(sum) << 16;
    // Type 3, code 3: no such port.
    let [a, b, c, d, e, f, g] = original;
    let mut icmp = [word(3, 3, 0, 0), 0, a, b, c, d, e, f, g];
    let sum = checksum(&icmp, 0);
    icmp[0] |= u32::from(sum) << 16;

    resize(ctx, ETHERNET + u32::from(LENGTH))?;
    ctx.store(at, &ip, 0)?;
    ctx.store(at + 20, &icmp, 0)?;
    turn_around(ctx)
}

/// What an `ICMPv6` checksum begins with: addresses, length and protocol.
#[inline(always)]
pub fn pseudo_checksum(ip: &[u32; 10], payload: u8) -> u32 {
    let [_, _, a, b, c, d, e, f, g, h] = *ip;
    let header = [a, b, c, d, e, f, g, h, word(0, 0, 0, payload), word(0, 0, 0, 58)];
    u32::from(!checksum(&header, 0))
}

#[inline(always)]
pub fn resize(ctx: &TcContext, length: u32) -> Result<(), i64> {
    // SAFETY: the context is the one that this program was given.
    match unsafe { bpf_skb_change_tail(ctx.skb.skb, length, 0) } {
        0 => Ok(()),
        error => Err(error),
    }
}
