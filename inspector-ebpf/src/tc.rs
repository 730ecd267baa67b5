//! The tc tier: at ingress and egress of devices with and without link-layer header.

use core::mem::MaybeUninit;

use aya_ebpf::bindings::{__sk_buff, TC_ACT_UNSPEC};
use aya_ebpf::helpers::generated::bpf_skb_load_bytes;
use aya_ebpf::macros::classifier;
use aya_ebpf::programs::TcContext;
use inspector_common::filter::{Head, Source};
use inspector_common::observe::{Address, FLAG_ARP, FLAG_MARK, HEADER_BYTES, hook, tier};

use crate::emit::{Copy, Report};
use crate::watched::{Watched, is_neighbour};

/// `ETH_P_…` as they stand in a packet.
pub mod ethertype {
    pub const IPV4: u16 = 0x0800_u16.to_be();
    pub const ARP: u16 = 0x0806_u16.to_be();
    pub const VLAN: u16 = 0x8100_u16.to_be();
    pub const IPV6: u16 = 0x86dd_u16.to_be();
    pub const SERVICE_VLAN: u16 = 0x88a8_u16.to_be();
}

/// VLAN tags that are followed. The outermost tag is usually not in the packet any more: the device
/// or the kernel has moved it into the packet's metadata.
pub const VLAN_TAGS: u32 = 2;

/// Length of an ARP packet for Ethernet and IPv4.
pub const ARP_LENGTH: u32 = 28;

const ETHERNET: u32 = 14;

/// For devices with Ethernet headers.
#[classifier]
#[expect(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn inspect_tc_in(ctx: TcContext) -> i32 {
    observe::<ETHERNET, { hook::TC_INGRESS }>(&ctx)
}

/// For devices with Ethernet headers.
#[classifier]
#[expect(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn inspect_tc_out(ctx: TcContext) -> i32 {
    observe::<ETHERNET, { hook::TC_EGRESS }>(&ctx)
}

/// For devices without link-layer header.
#[classifier]
#[expect(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn inspect_l3_in(ctx: TcContext) -> i32 {
    observe::<0, { hook::TC_INGRESS }>(&ctx)
}

/// For devices without link-layer header.
#[classifier]
#[expect(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn inspect_l3_out(ctx: TcContext) -> i32 {
    observe::<0, { hook::TC_EGRESS }>(&ctx)
}

/// "Go on with the next program": `TCX_NEXT` has the same value.
#[inline(always)]
fn observe<const LINK: u32, const HOOK: u8>(ctx: &TcContext) -> i32 {
    look::<LINK, HOOK>(ctx);
    TC_ACT_UNSPEC
}

/// The packet of a tc context, from `at` on.
struct Packet {
    skb: *mut __sk_buff,
    at: u32,
}

impl Source for Packet {
    #[inline(always)]
    fn words<const N: usize>(&self, offset: u32) -> Option<[u32; N]> {
        let mut words = MaybeUninit::<[u32; N]>::uninit();
        // What is not there is read as zeros, which are no IP header. (It is not asked whether
        // something was: every question doubles the ways that the verifier has to go.)
        // SAFETY: the kernel hands a valid __sk_buff to a classifier; the buffer has this length,
        // and the helper writes all of it, zeros where there is no packet.
        unsafe {
            bpf_skb_load_bytes(
                self.skb.cast(),
                self.at + offset,
                words.as_mut_ptr().cast(),
                N as u32 * 4,
            );
            Some(words.assume_init())
        }
    }
}

impl Copy for Packet {
    #[inline(always)]
    unsafe fn copy(&self, to: *mut u8, length: u32) -> bool {
        // What the compiler knows of the length it does not write down; the verifier has to see it.
        let length = (core::hint::black_box(u64::from(length) - 1) & (HEADER_BYTES as u64 - 1)) + 1;
        let length = length as u32;
        // SAFETY: as above; the caller promises the room.
        unsafe { bpf_skb_load_bytes(self.skb.cast(), self.at, to.cast(), length) == 0 }
    }

    #[inline(always)]
    fn length(&self) -> u32 {
        // SAFETY: as above.
        unsafe { (*self.skb).len }.saturating_sub(self.at)
    }
}

#[inline(always)]
fn look<const LINK: u32, const HOOK: u8>(ctx: &TcContext) {
    let skb = ctx.skb.skb;
    let mut packet = Packet { skb, at: LINK };
    // SAFETY: the kernel hands a valid __sk_buff to a classifier.
    let mut protocol = unsafe { (*skb).protocol } as u16;
    for _ in 0..VLAN_TAGS {
        if LINK == 0 || (protocol != ethertype::VLAN && protocol != ethertype::SERVICE_VLAN) {
            break;
        }
        let Some([word]) = packet.words::<1>(0) else { return };
        let [_, _, high, low] = word.to_ne_bytes();
        protocol = u16::from_ne_bytes([high, low]);
        packet.at += 4;
    }
    // Egress asks, ingress is asked.
    let asks = if HOOK == hook::TC_EGRESS { hook::NEIGH_SOLICIT } else { HOOK };
    let head = match protocol {
        ethertype::IPV4 => Head::v4(&packet, 0),
        ethertype::IPV6 => Head::v6(&packet),
        ethertype::ARP => {
            if let Some(address) = arp_target(&packet)
                && is_neighbour(&address)
            {
                let mut report = report(skb, asks);
                report.neighbour = address;
                report.flags |= FLAG_ARP;
                report.first(&packet, ARP_LENGTH);
            }
            return;
        }
        _ => return,
    };
    let Some(head) = head else { return };
    if let Some(address) = head.solicited(&packet)
        && is_neighbour(&address)
    {
        let mut report = report(skb, asks);
        report.neighbour = address;
        report.packet(&packet, &head);
        return;
    }
    if head.matters(&packet, &Watched) {
        report(skb, HOOK).packet(&packet, &head);
    }
}

#[inline(always)]
fn report(skb: *mut __sk_buff, hook: u8) -> Report {
    let mut report = Report::new(tier::TC, hook);
    // SAFETY: the kernel hands a valid __sk_buff to a classifier.
    unsafe {
        report.ifindex = (*skb).ifindex;
        report.mark = (*skb).mark;
    }
    report.flags = FLAG_MARK;
    report
}

/// The address that an ARP request for Ethernet and IPv4 asks for.
#[inline(always)]
pub fn arp_target<P: Source>(packet: &P) -> Option<Address> {
    let [hardware_protocol, operation, _, _, _, _, target] = packet.words::<7>(0)?;
    // Ethernet, IPv4; six bytes, four bytes, request.
    (hardware_protocol.to_ne_bytes() == [0, 1, 8, 0] && operation.to_ne_bytes() == [6, 4, 0, 1])
        .then_some(Address::v4(target))
}
