//! The tc observer: sees packets for watched VIPs as they arrive at a device, first in the chain,
//! and lets every packet go on.

use aya_ebpf::bindings::{BPF_F_NO_PREALLOC, BPF_NOEXIST, TC_ACT_UNSPEC};
use aya_ebpf::helpers::bpf_ktime_get_ns;
use aya_ebpf::macros::{classifier, map};
use aya_ebpf::maps::{HashMap, PerCpuArray, PerCpuHashMap, RingBuf};
use aya_ebpf::programs::TcContext;
use aya_log_ebpf::warn;
use inspector_common::arrival::{Address, ArrivalEvent, Count, CountKey, Totals};
use inspector_common::packet::{Bytes, Details, Ip, LinkLayer};

/// The VIPs that are watched.
#[map]
static VIPS: HashMap<Address, u8> = HashMap::with_max_entries(16_384, BPF_F_NO_PREALLOC);

/// What stands in front of the IP header, for each device.
#[map]
static DEVICES: HashMap<u32, u32> = HashMap::with_max_entries(1024, BPF_F_NO_PREALLOC);

#[map]
static COUNTS: PerCpuHashMap<CountKey, Count> =
    PerCpuHashMap::with_max_entries(65_536, BPF_F_NO_PREALLOC);

#[map]
static TOTALS: PerCpuArray<Totals> = PerCpuArray::with_max_entries(1, 0);

/// User space sets the size before it loads.
#[map]
static EVENTS: RingBuf = RingBuf::with_byte_size(4096, 0);

/// Attached at ingress; never decides about a packet.
#[classifier]
#[expect(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn observe_arrival(ctx: TcContext) -> i32 {
    observe(&ctx);
    // "Go on with the next program": TCX_NEXT has the same value.
    TC_ACT_UNSPEC
}

/// The packet of a tc context.
struct Packet<'a>(&'a TcContext);

impl Bytes for Packet<'_> {
    #[inline(always)]
    fn load<const N: usize>(&self, offset: u32) -> Option<[u8; N]> {
        self.0.load(offset as usize).ok()
    }
}

#[inline(always)]
fn observe(ctx: &TcContext) {
    // SAFETY: the kernel hands a valid __sk_buff to a classifier.
    let ifindex = unsafe { (*ctx.skb.skb).ifindex };
    // SAFETY: a u32 is read at once, and is valid whatever a concurrent update writes.
    let Some(link) = (unsafe { DEVICES.get(ifindex) }) else { return };
    let Some(link) = LinkLayer::from_number(*link) else { return };
    let packet = Packet(ctx);
    let Some(ip) = Ip::find(&packet, link) else { return };
    let vip = ip.destination();
    if VIPS.get_ptr(vip).is_none() {
        return;
    }

    let Some(totals) = TOTALS.get_ptr_mut(0) else { return };
    // SAFETY: an element of a per-CPU array lives as long as the program, and nothing else writes
    // this CPU's while a classifier runs on it.
    let totals = unsafe { &mut *totals };
    count(CountKey { vip, ifindex }, ctx.len(), totals);

    match ip.details(&packet, ctx.len()) {
        Ok(details) => report(&ip, ifindex, &details, totals),
        Err(why) => {
            totals.malformed += 1;
            // Anybody can send such packets: the log must not grow with them.
            if totals.malformed.is_power_of_two() {
                warn!(
                    ctx,
                    "device {}: malformed packet for a watched VIP, reason {}; {} on this CPU so far",
                    ifindex,
                    why as u8,
                    totals.malformed
                );
            }
        }
    }
}

#[inline(always)]
fn count(key: CountKey, length: u32, totals: &mut Totals) {
    let mut slot = COUNTS.get_ptr_mut(key);
    if slot.is_none() {
        // Another CPU may have been faster: then this fails, and the look-up succeeds.
        let _ = COUNTS.insert(key, Count::default(), u64::from(BPF_NOEXIST));
        slot = COUNTS.get_ptr_mut(key);
    }
    match slot {
        Some(slot) => {
            // SAFETY: nothing deletes from this map, and this CPU's value is written by nothing
            // else while a classifier runs on it.
            let slot = unsafe { &mut *slot };
            slot.packets += 1;
            slot.bytes += u64::from(length);
        }
        None => totals.uncounted += 1,
    }
}

#[inline(always)]
fn report(ip: &Ip, ifindex: u32, details: &Details, totals: &mut Totals) {
    let Some(mut entry) = EVENTS.reserve::<ArrivalEvent>(0) else {
        totals.lost_events += 1;
        return;
    };
    // Exhaustive, so that a new field is not forgotten here.
    let Details {
        length,
        flow_label,
        tcp_sequence,
        payload_length,
        ip_id,
        source_port,
        destination_port,
        flags,
        protocol,
        tcp_flags,
    } = *details;
    entry.write(ArrivalEvent {
        // SAFETY: the helper takes no argument and cannot fail.
        monotonic_ns: unsafe { bpf_ktime_get_ns() },
        source: ip.source(),
        destination: ip.destination(),
        ifindex,
        length,
        flow_label,
        tcp_sequence,
        payload_length,
        ip_id,
        source_port,
        destination_port,
        flags,
        protocol,
        tcp_flags,
        reserved: [0; 2],
    });
    entry.submit(0);
}
