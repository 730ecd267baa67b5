//! The kernel's own structures, read at offsets that user space has taken from its BTF.

use core::mem::MaybeUninit;

use aya_ebpf::helpers::generated::bpf_probe_read_kernel;
use inspector_common::filter::{Head, Source, veiled};
use inspector_common::observe::{Address, FLAG_ARP, FLAG_MARK, HEADER_BYTES, hook, tier};

use crate::emit::{Copy, Report};
use crate::program;
use crate::tc::{ARP_LENGTH, VLAN_TAGS, arp_target, ethertype};
use crate::watched::{Watched, is_neighbour, setting};

/// What may be read from the kernel's memory as it stands there.
///
/// # Safety
/// Every pattern of bits has to be a valid value.
pub unsafe trait Number {}

// SAFETY: plain numbers.
unsafe impl Number for u8 {}
// SAFETY: as above.
unsafe impl Number for u16 {}
// SAFETY: as above.
unsafe impl Number for u32 {}
// SAFETY: as above.
unsafe impl Number for u64 {}
// SAFETY: as above.
unsafe impl<T: Number, const N: usize> Number for [T; N] {}

/// Reads a value of the kernel's: zeros if there is none at this address, which nothing here takes
/// for something. (It is not asked whether there was one: every question doubles the ways that the
/// verifier has to go.)
#[inline(always)]
pub fn read<T: Number>(address: u64) -> T {
    let mut value = MaybeUninit::<T>::uninit();
    // SAFETY: the helper checks the address itself and writes all of the value, and no more: zeros
    // where it cannot read, which are valid for the numbers that `Number` stands for.
    unsafe {
        bpf_probe_read_kernel(
            value.as_mut_ptr().cast(),
            size_of::<T>() as u32,
            address as *const core::ffi::c_void,
        );
        value.assume_init()
    }
}

/// Reads a member of a structure.
macro_rules! member {
    ($structure:expr, $offset:ident) => {
        $crate::kernel::read($structure + u64::from($crate::watched::setting!(offsets.$offset)))
    };
}
pub(crate) use member;

/// Where a packet's headers are at a hook.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// `skb->data`: the device has just received it.
    Data,
    /// `skb->network_header`.
    Network,
}

/// The linear part of a packet from its IP header on.
pub struct Packet {
    start: u64,
    /// Bytes there, headers and payload.
    available: u32,
    length: u32,
}

impl Source for Packet {
    #[inline(always)]
    fn words<const N: usize>(&self, offset: u32) -> Option<[u32; N]> {
        let mut words = MaybeUninit::<[u32; N]>::uninit();
        // Beyond the packet's end there may be what another one has left, which decides about no
        // more than whether this one is reported.
        // SAFETY: the helper checks the address itself and writes all of the buffer, and no more:
        // zeros where it cannot read. (Zeros of ours would be written byte by byte, by a loop that
        // the verifier follows round by round.)
        unsafe {
            bpf_probe_read_kernel(
                words.as_mut_ptr().cast(),
                N as u32 * 4,
                (self.start + u64::from(offset)) as *const core::ffi::c_void,
            );
            Some(words.assume_init())
        }
    }
}

impl Copy for Packet {
    #[inline(always)]
    unsafe fn copy(&self, to: *mut u8, length: u32) -> bool {
        if length > self.available {
            return false;
        }
        // What the compiler knows of the length it does not write down; the verifier has to see it.
        let length = (core::hint::black_box(u64::from(length) - 1) & (HEADER_BYTES as u64 - 1)) + 1;
        let length = length as u32;
        // SAFETY: as above; the caller promises the room.
        unsafe {
            bpf_probe_read_kernel(to.cast(), length, self.start as *const core::ffi::c_void) == 0
        }
    }

    #[inline(always)]
    fn length(&self) -> u32 {
        self.length
    }
}

/// What a packet of interest turned out to be. Every member is always written: before Linux 6.3 the
/// verifier refuses to copy what never was, which is what becomes of an enumeration.
struct Found {
    /// Zeros for ARP.
    head: Head,
    /// For whom a question asks; no address if it is none.
    asks_for: Address,
    is_arp: bool,
}

#[inline(always)]
fn find(skb: u64, place: Place) -> Option<(Packet, u16)> {
    let mut protocol: u16 = member!(skb, skb_protocol);
    if !matches!(
        protocol,
        ethertype::IPV4
            | ethertype::IPV6
            | ethertype::ARP
            | ethertype::VLAN
            | ethertype::SERVICE_VLAN
    ) {
        return None;
    }
    let head: u64 = member!(skb, skb_head);
    let data: u64 = member!(skb, skb_data);
    let mut start = data;
    if place == Place::Network {
        let network: u16 = member!(skb, skb_network_header);
        if network != 0 {
            start = head + u64::from(network);
        }
    }
    let tail: u32 = member!(skb, skb_tail);
    let length: u32 = member!(skb, skb_len);
    let end = head + u64::from(tail);
    if start >= end {
        return None;
    }
    let available = (end - start) as u32;
    // What lies in front of `data` counts for the packet, what lies behind does not.
    let length = (u64::from(length) + data).saturating_sub(start) as u32;
    let mut packet = Packet { start, available, length };
    let key = head as u32;
    if place == Place::Data {
        let mut tags = 0;
        for _ in 0..VLAN_TAGS {
            if protocol != ethertype::VLAN && protocol != ethertype::SERVICE_VLAN {
                break;
            }
            let [word] = packet.words::<1>(tags)?;
            let [_, _, high, low] = word.to_ne_bytes();
            protocol = u16::from_ne_bytes([high, low]);
            tags += 4;
        }
        // With or without tags: the same from here on.
        let tags = veiled(tags, key);
        packet.start += u64::from(tags);
        packet.available = packet.available.saturating_sub(tags);
        packet.length = packet.length.saturating_sub(tags);
    }
    Some((packet, veiled(u32::from(protocol), key) as u16))
}

#[inline(always)]
fn look(packet: &Packet, protocol: u16) -> Option<Found> {
    if protocol == ethertype::ARP {
        let address = arp_target(packet)?;
        return is_neighbour(&address).then_some(Found {
            head: Head::NONE,
            asks_for: address,
            is_arp: true,
        });
    }
    // The tag's ethertype stands in the place of the protocol where the tag is in the packet.
    let head = Head::read(packet)?;
    if let Some(address) = head.solicited(packet)
        && is_neighbour(&address)
    {
        return Some(Found { head, asks_for: address, is_arp: false });
    }
    head.matters(packet, &Watched).then_some(Found { head, asks_for: Address::NONE, is_arp: false })
}

/// Reports a packet at a hook, if it matters and is in the watched network namespace.
#[inline(always)]
pub fn packet(of: u8, at: u8, skb: u64, place: Place, value: Option<u32>) {
    let Some((packet, protocol)) = find(skb, place) else { return };
    let Some(found) = look(&packet, protocol) else { return };
    let Some(ifindex) = device(skb) else { return };
    let mut report = Report::new(of, at);
    if of == tier::PROGRAM {
        if program::is_test_run(skb) {
            return;
        }
        report.program = program::target();
    }
    report.skb = skb;
    report.ifindex = ifindex;
    report.mark = member!(skb, skb_mark);
    report.flags |= FLAG_MARK;
    if let Some(value) = value {
        report.value = value;
        report.flags |= inspector_common::observe::FLAG_VALUE;
    }
    // A route is looked up for whom an ARP packet comes from and asks for, too: no packet's.
    if found.is_arp && at == hook::ROUTE {
        return;
    }
    report.neighbour = found.asks_for;
    // Asked when it is queued; that the driver has it then says nothing new.
    if found.asks_for.family != 0 && at == hook::QUEUE {
        report.hook = hook::NEIGH_SOLICIT;
    }
    if found.is_arp {
        report.flags |= FLAG_ARP;
        report.first(&packet, ARP_LENGTH);
    } else {
        report.packet(&packet, &found.head);
    }
}

/// Reports what happens to a neighbour, with the packet that it happens for where there is one.
#[inline(always)]
pub fn neighbour(tier: u8, at: u8, neigh: u64, skb: u64, state: Option<u32>) {
    let table = member!(neigh, neigh_table);
    let key = neigh + u64::from(setting!(offsets.neigh_key));
    let Some(address) = key_of(table, key) else { return };
    if !is_neighbour(&address) {
        return;
    }
    let Some(ifindex) = index_of(member!(neigh, neigh_dev)) else { return };
    let mut report = Report::new(tier, at);
    report.neighbour = address;
    report.ifindex = ifindex;
    let now: u8 = member!(neigh, neigh_state);
    report.value = state.unwrap_or(u32::from(now));
    report.flags |= inspector_common::observe::FLAG_VALUE;
    report.skb = skb;
    if skb != 0
        && let Some((packet, _)) = find(skb, Place::Network)
        && let Some(head) = Head::read(&packet)
    {
        report.packet(&packet, &head);
        return;
    }
    report.send();
}

/// The key of a neighbour in a table of the kernel's.
#[inline(always)]
pub fn key_of(table: u64, key: u64) -> Option<Address> {
    match member!(table, table_key_len) {
        4_u32 => Some(Address::v4(read(key))),
        16 => Some(Address::v6(read(key))),
        _ => None,
    }
}

/// Index of a device, if it is in the watched network namespace.
#[inline(always)]
pub fn index_of(device: u64) -> Option<u32> {
    is_ours(member!(device, dev_net)).then(|| member!(device, dev_ifindex))
}

/// Whether a network namespace is the watched one.
#[inline(always)]
pub fn is_ours(net: u64) -> bool {
    let inum: u32 = member!(net, net_inum);
    inum == setting!(netns)
}

/// Index of a packet's device, if the packet is in the watched network namespace; 0 if it is there
/// but has no device. A packet that has neither device nor socket nor route is nobody's.
#[inline(always)]
fn device(skb: u64) -> Option<u32> {
    let device: u64 = member!(skb, skb_dev);
    let net: u64 = member!(device, dev_net);
    let inum: u32 = member!(net, net_inum);
    if inum != 0 {
        return (inum == setting!(netns)).then(|| member!(device, dev_ifindex));
    }
    // Not a device: the place is used for other things while a socket has the packet.
    let route: u64 = member!(skb, skb_refdst);
    let route = route & !1;
    if route != 0 {
        return index_of(member!(route, dst_dev));
    }
    let socket: u64 = member!(skb, skb_sk);
    (socket != 0 && is_ours(member!(socket, sk_net))).then_some(0)
}
