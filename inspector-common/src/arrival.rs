//! What the tc observer keeps in its maps and reports.

/// An IP address with its family: the key of the set of watched VIPs.
///
/// IPv4-mapped IPv6 is no substitute for the family: `::ffff:192.0.2.1` can stand in an IPv6
/// header, and is not 192.0.2.1.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "user", derive(zerocopy::FromBytes, zerocopy::Immutable))]
pub struct Address {
    /// The address in network byte order; IPv4 takes the first four bytes, the rest is zero.
    pub octets: [u8; 16],
    /// 4 or 6.
    pub family: u32,
}

impl Address {
    /// An IPv4 address.
    #[inline(always)]
    #[must_use]
    pub const fn v4(octets: [u8; 4]) -> Self {
        let [a, b, c, d] = octets;
        Self { octets: [a, b, c, d, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], family: 4 }
    }

    /// An IPv6 address.
    #[inline(always)]
    #[must_use]
    pub const fn v6(octets: [u8; 16]) -> Self {
        Self { octets, family: 6 }
    }
}

/// Key of the counters: one device, one VIP.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CountKey {
    /// The VIP.
    pub vip: Address,
    /// Index of the device at whose ingress the packet was seen.
    pub ifindex: u32,
}

/// What one CPU has counted for a [`CountKey`].
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Count {
    /// Packets. A packet that the device has merged from several (GRO) is one.
    pub packets: u64,
    /// Bytes, the link layer's header included.
    pub bytes: u64,
}

/// What one CPU has counted that belongs to no single VIP.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Totals {
    /// Events that were not reported because the ring buffer was full.
    pub lost_events: u64,
    /// Packets for a watched VIP whose headers contradict themselves. They are counted for their
    /// VIP, but reported by no event.
    pub malformed: u64,
    /// Packets for a watched VIP that were not counted for it because the counters' map was full.
    pub uncounted: u64,
}

/// The packet is a fragment.
pub const FLAG_FRAGMENT: u16 = 1 << 0;
/// The ports were in the packet: TCP, UDP or SCTP, and not a later fragment.
pub const FLAG_PORTS: u16 = 1 << 1;

/// One packet for a watched VIP, as it was when it arrived at a device.
///
/// It has no padding: every byte is written before it is reported.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(zerocopy::FromBytes, zerocopy::Immutable))]
pub struct ArrivalEvent {
    /// When, in nanoseconds of `CLOCK_MONOTONIC`.
    pub monotonic_ns: u64,
    /// Source address.
    pub source: Address,
    /// Destination address: the VIP.
    pub destination: Address,
    /// Index of the device.
    pub ifindex: u32,
    /// Length in bytes from the IP header to the end of the packet.
    pub length: u32,
    /// IPv6: flow label. IPv4: 0.
    pub flow_label: u32,
    /// TCP: sequence number. Otherwise 0.
    pub tcp_sequence: u32,
    /// Length in bytes of what follows the transport header.
    pub payload_length: u32,
    /// IPv4: identification. IPv6: the lower half of the fragment header's, if there is one, else
    /// 0.
    pub ip_id: u16,
    /// Source port, 0 without [`FLAG_PORTS`].
    pub source_port: u16,
    /// Destination port, 0 without [`FLAG_PORTS`].
    pub destination_port: u16,
    /// `FLAG_` bits.
    pub flags: u16,
    /// Number of the transport protocol, after IPv6's extension headers.
    pub protocol: u8,
    /// TCP: the flags byte (FIN is bit 0). Otherwise 0.
    pub tcp_flags: u8,
    /// Zero.
    pub reserved: [u8; 2],
}

// The compiler would pad silently, and padding would carry kernel memory to user space.
const _: () = assert!(size_of::<ArrivalEvent>() == 80);
const _: () = assert!(size_of::<Address>() == 20);
const _: () = assert!(size_of::<CountKey>() == 24);

/// Names of the program and its maps in the object file.
pub mod name {
    /// The classifier.
    pub const PROGRAM: &str = "observe_arrival";
    /// Hash, [`Address`](super::Address) → `u8` without meaning: the VIPs watched.
    pub const VIPS: &str = "VIPS";
    /// Hash, device index → [`LinkLayer`](crate::packet::LinkLayer) as its number.
    pub const DEVICES: &str = "DEVICES";
    /// Per-CPU hash, [`CountKey`](super::CountKey) → [`Count`](super::Count).
    pub const COUNTS: &str = "COUNTS";
    /// Per-CPU array with one [`Totals`](super::Totals).
    pub const TOTALS: &str = "TOTALS";
    /// Ring buffer of [`ArrivalEvent`](super::ArrivalEvent).
    pub const EVENTS: &str = "EVENTS";
}

#[cfg(feature = "user")]
mod user {
    use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

    use super::{Address, Count, CountKey, Totals};

    // SAFETY: repr(C) of plain integers without padding (see the assertions above).
    unsafe impl aya::Pod for Address {}
    // SAFETY: as for Address.
    unsafe impl aya::Pod for CountKey {}
    // SAFETY: repr(C) of two u64.
    unsafe impl aya::Pod for Count {}
    // SAFETY: repr(C) of three u64.
    unsafe impl aya::Pod for Totals {}

    impl From<IpAddr> for Address {
        fn from(address: IpAddr) -> Self {
            match address {
                IpAddr::V4(address) => Self::v4(address.octets()),
                IpAddr::V6(address) => Self::v6(address.octets()),
            }
        }
    }

    impl From<Address> for IpAddr {
        fn from(address: Address) -> Self {
            if address.family == 4 {
                let [a, b, c, d, ..] = address.octets;
                Ipv4Addr::new(a, b, c, d).into()
            } else {
                Ipv6Addr::from(address.octets).into()
            }
        }
    }
}
