//! The way to user space: a count and an event for what matters.

use aya_ebpf::helpers::bpf_ktime_get_ns;
use aya_ebpf::macros::map;
use aya_ebpf::maps::{PerCpuArray, RingBuf};
use inspector_common::filter::{Head, Source};
use inspector_common::observe::{Address, COUNTS as SLOTS, Count, Event, HEADER_BYTES, slot};

#[map]
static COUNTS: PerCpuArray<Count> = PerCpuArray::with_max_entries(SLOTS, 0);

/// User space sets the size before it loads.
#[map]
static EVENTS: RingBuf = RingBuf::with_byte_size(4096, 0);

/// A packet whose headers can be copied.
pub trait Copy: Source {
    /// Copies `length` bytes (1 to [`HEADER_BYTES`]) from the packet's beginning.
    ///
    /// # Safety
    /// `to` must have room for [`HEADER_BYTES`].
    unsafe fn copy(&self, to: *mut u8, length: u32) -> bool;
    /// Length of the packet from its IP header on.
    fn length(&self) -> u32;
}

/// An event with nothing in it but where it comes from.
pub struct Report {
    pub tier: u8,
    pub hook: u8,
    pub flags: u8,
    pub protocol: u8,
    pub skb: u64,
    pub ifindex: u32,
    pub mark: u32,
    pub value: u32,
    pub program: u32,
    pub neighbour: Address,
    pub source: Address,
    pub gateway: Address,
}

impl Report {
    #[inline(always)]
    pub const fn new(tier: u8, hook: u8) -> Self {
        Self {
            tier,
            hook,
            flags: 0,
            protocol: 0,
            skb: 0,
            ifindex: 0,
            mark: 0,
            value: 0,
            program: 0,
            neighbour: Address::NONE,
            source: Address::NONE,
            gateway: Address::NONE,
        }
    }

    /// Reports something without a packet.
    #[inline(always)]
    pub fn send(&self) {
        self.put(0, |_, _| false, 0);
    }

    /// Reports a packet with its headers.
    #[inline(always)]
    pub fn packet<P: Copy>(&self, packet: &P, head: &Head) {
        let length = packet.length();
        // SAFETY: `put` hands out HEADER_BYTES.
        self.put(
            length,
            |to, length| unsafe { packet.copy(to, length) },
            head.header_length(packet, length),
        );
    }

    /// Reports a packet, of which the first `headers` bytes are headers.
    #[inline(always)]
    pub fn first<P: Copy>(&self, packet: &P, headers: u32) {
        // SAFETY: as above.
        self.put(packet.length(), |to, length| unsafe { packet.copy(to, length) }, headers);
    }

    #[inline(always)]
    #[expect(
        clippy::cast_ptr_alignment,
        reason = "the headers begin at a multiple of eight of an event that is aligned so"
    )]
    fn put(&self, length: u32, copy: impl FnOnce(*mut u8, u32) -> bool, headers: u32) {
        let Some(count) = COUNTS.get_ptr_mut(slot(self.tier, self.hook)) else { return };
        // SAFETY: an element of a per-CPU array lives as long as the program. Should an interrupt
        // run the same hook in between, one may not be counted: none here comes from both.
        let count = unsafe { &mut *count };
        count.matched += 1;
        let Some(mut entry) = EVENTS.reserve::<Event>(0) else {
            count.lost += 1;
            return;
        };
        // Exhaustive, so that a new field is not forgotten here.
        let Self {
            tier,
            hook,
            flags,
            protocol,
            skb,
            ifindex,
            mark,
            value,
            program,
            neighbour,
            source,
            gateway,
        } = *self;
        let event = entry.as_mut_ptr();
        // SAFETY: the entry has room for one event, of which every byte is written here.
        unsafe {
            (&raw mut (*event).monotonic_ns).write(bpf_ktime_get_ns());
            (&raw mut (*event).skb).write(skb);
            for (to, address) in [
                (&raw mut (*event).neighbour, neighbour),
                (&raw mut (*event).source, source),
                (&raw mut (*event).gateway, gateway),
            ] {
                // Volatile, as below.
                for (at, word) in address.words.into_iter().enumerate() {
                    (&raw mut (*to).words[at]).write_volatile(word);
                }
                (&raw mut (*to).family).write_volatile(address.family);
            }
            (&raw mut (*event).ifindex).write(ifindex);
            (&raw mut (*event).mark).write(mark);
            (&raw mut (*event).length).write(length);
            (&raw mut (*event).value).write(value);
            (&raw mut (*event).tier).write(tier);
            (&raw mut (*event).hook).write(hook);
            (&raw mut (*event).flags).write(flags);
            (&raw mut (*event).protocol).write(protocol);
            for at in 0..3 {
                (&raw mut (*event).reserved[at]).write_volatile(0);
            }
            (&raw mut (*event).program).write(program);
            let words = (&raw mut (*event).headers).cast::<u64>();
            // Volatile, or the compiler makes a call of it that writes byte by byte.
            for at in 0..HEADER_BYTES / 8 {
                words.add(at).write_volatile(0);
            }
            // Read back, so that the verifier forgets on which of a thousand ways the length came
            // to be: it would go over all of them again for the copy's sake.
            (&raw mut (*event).header_length).write_volatile(headers as u8);
            let headers = u32::from((&raw const (*event).header_length).read_volatile());
            if headers == 0 || !copy(words.cast(), headers) {
                (&raw mut (*event).header_length).write(0);
            }
        }
        entry.submit(0);
    }
}
