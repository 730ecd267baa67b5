//! Reads the headers of a packet, all of them.
//!
//! No length in the packet is believed before it is compared.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::filter::is_icmp_error;

/// A packet whose bytes can be read by offset.
pub trait Bytes {
    /// The `N` bytes from `offset` on, or nothing if the packet ends before.
    fn load<const N: usize>(&self, offset: u32) -> Option<[u8; N]>;
}

impl Bytes for [u8] {
    fn load<const N: usize>(&self, offset: u32) -> Option<[u8; N]> {
        self.get(usize::try_from(offset).ok()?..)?.first_chunk().copied()
    }
}

/// The fixed part of an IP header, as it stands in the packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ip {
    /// IPv4, options not included.
    V4([u8; 20]),
    /// IPv6, extension headers not included.
    V6([u8; 40]),
}

/// Everything about a packet but its addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Details {
    /// Length in bytes from the IP header to the end of the packet.
    pub length: u32,
    /// Length in bytes of what follows the transport header.
    pub payload_length: u32,
    /// IPv6: flow label. IPv4: 0.
    pub flow_label: u32,
    /// IPv4: identification. IPv6: the lower half of the fragment header's, if there is one, else
    /// 0.
    pub ip_id: u16,
    /// TTL or hop limit.
    pub ttl: u8,
    /// Whether it is a fragment.
    pub is_fragment: bool,
    /// Number of the transport protocol, after IPv6's extension headers.
    pub protocol: u8,
    /// Source and destination port: TCP, UDP or SCTP, and not a later fragment.
    pub ports: Option<(u16, u16)>,
    /// TCP: sequence number, acknowledgement number, the flags byte (FIN is bit 0). Of a quoted
    /// packet the sequence number alone may be there; the others are 0 then.
    pub tcp: Option<(u32, u32, u8)>,
    /// ICMP: type and code.
    pub icmp: Option<(u8, u8)>,
    /// ICMP errors: offset of the packet that is quoted, from the IP header on.
    pub quoted: Option<u32>,
}

/// How a packet's headers contradict themselves.
#[repr(u8)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Malformed {
    /// The IPv4 header says that it is shorter than 20 bytes.
    HeaderLength = 1,
    /// The IP header says a length that is more than there is, or less than its own.
    TotalLength = 2,
    /// A transport header does not fit in, or says an impossible length.
    TransportHeader = 3,
    /// An IPv6 extension header does not fit in.
    ExtensionHeader = 4,
    /// More IPv6 extension headers than [`MAX_EXTENSION_HEADERS`].
    TooManyExtensionHeaders = 5,
}

/// More extension headers than this are not followed. RFC 8200 has six kinds, one of which may
/// come twice.
pub const MAX_EXTENSION_HEADERS: u32 = 8;

/// Number of the protocol.
pub const ICMP: u8 = 1;
/// Number of the protocol.
pub const ICMPV6: u8 = 58;
const HOP_BY_HOP: u8 = 0;
/// Number of the protocol.
pub const TCP: u8 = 6;
/// Number of the protocol.
pub const UDP: u8 = 17;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
const DESTINATION_OPTIONS: u8 = 60;
/// Number of the protocol.
pub const SCTP: u8 = 132;
const MOBILITY: u8 = 135;
const HOST_IDENTITY: u8 = 139;
const SHIM6: u8 = 140;

impl Ip {
    /// Reads the IP header that the packet begins with. Nothing for what is not IP, or ends before
    /// its destination address.
    pub fn find<P: Bytes + ?Sized>(packet: &P) -> Option<Self> {
        match packet.load::<1>(0)?[0] >> 4 {
            4 => Some(Self::V4(packet.load(0)?)),
            6 => Some(Self::V6(packet.load(0)?)),
            _ => None,
        }
    }

    /// The source address.
    #[must_use]
    pub fn source(&self) -> IpAddr {
        match self {
            Self::V4(header) => v4(header, 12),
            Self::V6(header) => v6(header, 8),
        }
    }

    /// The destination address.
    #[must_use]
    pub fn destination(&self) -> IpAddr {
        match self {
            Self::V4(header) => v4(header, 16),
            Self::V6(header) => v6(header, 24),
        }
    }

    /// Reads everything else. `available` is the length of the whole packet, of which `packet` may
    /// hold the headers alone.
    ///
    /// # Errors
    /// If the headers contradict themselves or the packet's length.
    pub fn details<P: Bytes + ?Sized>(
        &self,
        packet: &P,
        available: u32,
    ) -> Result<Details, Malformed> {
        match self {
            Self::V4(header) => details_v4(packet, header, Some(available)),
            Self::V6(header) => details_v6(packet, header, Some(available)),
        }
    }

    /// The same of a packet of which only the beginning is there, because an ICMP error quotes no
    /// more: what its transport header says as far as it goes.
    ///
    /// # Errors
    /// If the headers contradict themselves.
    pub fn quoted_details<P: Bytes + ?Sized>(&self, packet: &P) -> Result<Details, Malformed> {
        match self {
            Self::V4(header) => details_v4(packet, header, None),
            Self::V6(header) => details_v6(packet, header, None),
        }
    }
}

fn v4(header: &[u8], at: usize) -> IpAddr {
    let octets = header.get(at..).and_then(|rest| rest.first_chunk::<4>());
    Ipv4Addr::from(octets.copied().unwrap_or_default()).into()
}

fn v6(header: &[u8], at: usize) -> IpAddr {
    let octets = header.get(at..).and_then(|rest| rest.first_chunk::<16>());
    Ipv6Addr::from(octets.copied().unwrap_or_default()).into()
}

fn details_v4<P: Bytes + ?Sized>(
    packet: &P,
    header: &[u8; 20],
    available: Option<u32>,
) -> Result<Details, Malformed> {
    let header_length = u32::from(header[0] & 0x0f) * 4;
    if header_length < 20 {
        return Err(Malformed::HeaderLength);
    }
    let said = u32::from(u16::from_be_bytes([header[2], header[3]]));
    let length = match available {
        // 0 is a merged packet of more than 64 KiB (BIG TCP).
        Some(available) if said == 0 => available,
        Some(available) if said > available => return Err(Malformed::TotalLength),
        _ => said,
    };
    if length < header_length {
        return Err(Malformed::TotalLength);
    }
    let fragment = u16::from_be_bytes([header[6], header[7]]);
    let details = Details {
        length,
        ip_id: u16::from_be_bytes([header[4], header[5]]),
        ttl: header[8],
        protocol: header[9],
        is_fragment: fragment & 0x3fff != 0,
        ..Details::default()
    };
    let is_later_fragment = fragment & 0x1fff != 0;
    transport(packet, header_length, is_later_fragment, details, available.is_none(), false)
}

fn details_v6<P: Bytes + ?Sized>(
    packet: &P,
    header: &[u8; 40],
    available: Option<u32>,
) -> Result<Details, Malformed> {
    let said = u32::from(u16::from_be_bytes([header[4], header[5]]));
    let length = match available {
        // 0 is a jumbogram or a merged packet of more than 64 KiB (BIG TCP).
        Some(available) if said == 0 => available,
        Some(available) if said + 40 > available => return Err(Malformed::TotalLength),
        _ => said + 40,
    };
    let mut details = Details {
        length,
        flow_label: u32::from_be_bytes([0, header[1] & 0x0f, header[2], header[3]]),
        ttl: header[7],
        ..Details::default()
    };
    let mut next = header[6];
    let mut headers_length = 40;
    let mut is_later_fragment = false;
    let mut headers = 0;
    while is_extension(next) && !is_later_fragment {
        if headers == MAX_EXTENSION_HEADERS {
            return Err(Malformed::TooManyExtensionHeaders);
        }
        headers += 1;
        let extension = packet.load::<8>(headers_length).ok_or(Malformed::ExtensionHeader)?;
        let units = u32::from(extension[1]);
        headers_length += match next {
            FRAGMENT => {
                // Offset and "more": a fragment header with neither makes no fragment (RFC 6946).
                let fragment = u16::from_be_bytes([extension[2], extension[3]]);
                details.is_fragment |= fragment & 0xfff9 != 0;
                is_later_fragment = fragment & 0xfff8 != 0;
                details.ip_id = u16::from_be_bytes([extension[6], extension[7]]);
                8
            }
            AUTHENTICATION => (units + 2) * 4,
            _ => (units + 1) * 8,
        };
        next = extension[0];
    }
    if headers_length > length {
        return Err(Malformed::ExtensionHeader);
    }
    details.protocol = next;
    transport(packet, headers_length, is_later_fragment, details, available.is_none(), true)
}

/// Whether this is an extension header of IPv6, which another header follows.
#[inline(always)]
#[must_use]
pub const fn is_extension(next: u8) -> bool {
    matches!(
        next,
        HOP_BY_HOP
            | ROUTING
            | FRAGMENT
            | AUTHENTICATION
            | DESTINATION_OPTIONS
            | MOBILITY
            | HOST_IDENTITY
            | SHIM6
    )
}

/// Reads the transport header behind `before` bytes of IP headers, which are no more than
/// `details.length`.
fn transport<P: Bytes + ?Sized>(
    packet: &P,
    before: u32,
    is_later_fragment: bool,
    mut details: Details,
    is_quoted: bool,
    is_v6: bool,
) -> Result<Details, Malformed> {
    let length = details.length - before;
    details.payload_length = length;
    if is_later_fragment {
        return Ok(details);
    }
    let own = match details.protocol {
        TCP => match packet.load::<14>(before) {
            Some(header) => {
                let word = |at: usize| {
                    u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
                };
                details.tcp = Some((word(4), word(8), header[13]));
                let own = u32::from(header[12] >> 4) * 4;
                if own < 20 {
                    return Err(Malformed::TransportHeader);
                }
                own
            }
            None if is_quoted => {
                details.tcp = packet
                    .load::<4>(before + 4)
                    .map(|sequence| (u32::from_be_bytes(sequence), 0, 0));
                20
            }
            None => return Err(Malformed::TransportHeader),
        },
        UDP => 8,
        SCTP => 12,
        ICMP | ICMPV6 => {
            let [kind, code] = packet.load::<2>(before).ok_or(Malformed::TransportHeader)?;
            if length < 8 {
                return Err(Malformed::TransportHeader);
            }
            details.icmp = Some((kind, code));
            details.payload_length = length - 8;
            if is_icmp_error(is_v6, kind) {
                details.quoted = Some(before + 8);
            }
            return Ok(details);
        }
        _ => return Ok(details),
    };
    if own > length {
        return Err(Malformed::TransportHeader);
    }
    match packet.load::<4>(before) {
        Some([a, b, c, d]) => {
            details.ports = Some((u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])));
        }
        None if is_quoted => {}
        None => return Err(Malformed::TransportHeader),
    }
    details.payload_length = length - own;
    Ok(details)
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    /// An IPv6 packet: the chain of headers from `next` on, and what the header says as length.
    fn v6(next: u8, chain: &[u8]) -> Vec<u8> {
        let length = u16::try_from(chain.len()).expect("short").to_be_bytes();
        let mut packet = std::vec![0x60, 0x0a, 0xbc, 0xde, length[0], length[1], next, 64];
        packet.extend([1; 16]);
        packet.extend([2; 16]);
        packet.extend(chain);
        packet
    }

    fn v4(ihl: u8, total: u16, fragment: u16, protocol: u8, rest: &[u8]) -> Vec<u8> {
        let [total_high, total_low] = total.to_be_bytes();
        let [fragment_high, fragment_low] = fragment.to_be_bytes();
        let mut packet = std::vec![0x40 | ihl, 0, total_high, total_low, 0x12, 0x34];
        packet.extend([fragment_high, fragment_low, 64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        packet.extend(rest);
        packet
    }

    const UDP_HEADER: [u8; 8] = [0, 1, 0, 2, 0, 8, 0, 0];

    fn details(packet: &[u8]) -> Result<Details, Malformed> {
        let ip = Ip::find(packet).expect("an IP header");
        ip.details(packet, u32::try_from(packet.len()).expect("short"))
    }

    #[test]
    fn addresses_are_read_and_what_is_not_ip_is_left_alone() {
        let packet = v4(5, 28, 0, UDP, &UDP_HEADER);
        let ip = Ip::find(packet.as_slice()).expect("found");
        assert_eq!(ip.source(), IpAddr::from([10, 0, 0, 1]));
        assert_eq!(ip.destination(), IpAddr::from([10, 0, 0, 2]));
        let ip = Ip::find(v6(UDP, &UDP_HEADER).as_slice()).expect("found");
        assert_eq!(ip.source(), IpAddr::from([1; 16]));
        assert_eq!(ip.destination(), IpAddr::from([2; 16]));
        assert_eq!(Ip::find(&packet[..19]), None);
        assert_eq!(Ip::find(&v6(UDP, &[])[..39]), None);
        assert_eq!(Ip::find([0x55; 60].as_slice()), None);
        assert_eq!(Ip::find([].as_slice()), None);
    }

    #[test]
    fn tcp_and_icmp_are_read_and_what_an_error_quotes() {
        let tcp = [0, 1, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0x50, 0x12, 0, 0, 0, 0, 0, 0];
        let found = details(&v4(5, 40, 0, TCP, &tcp)).expect("well-formed");
        assert_eq!((found.ports, found.tcp), (Some((1, 2)), Some((3, 4, 0x12))));
        assert_eq!((found.ttl, found.payload_length), (64, 0));

        let mut error = std::vec![3, 1, 0, 0, 0, 0, 0, 0];
        error.extend(&v4(5, 60, 0, TCP, &tcp)[..28]);
        let packet = v4(5, 56, 0, ICMP, &error);
        let found = details(&packet).expect("well-formed");
        assert_eq!((found.icmp, found.quoted, found.ports), (Some((3, 1)), Some(28), None));
        let quoted = &packet[28..];
        let found = Ip::find(quoted).expect("an IP header").quoted_details(quoted);
        let found = found.expect("well-formed");
        assert_eq!((found.ports, found.tcp), (Some((1, 2)), Some((3, 0, 0))));
        // All of it is there.
        let quoted = v6(TCP, &tcp);
        let found = Ip::find(quoted.as_slice()).expect("it").quoted_details(quoted.as_slice());
        assert_eq!(found.expect("well-formed").tcp, Some((3, 4, 0x12)));
        // Not even the ports are.
        let quoted = v4(5, 60, 0, UDP, &[0; 2]);
        let found = Ip::find(quoted.as_slice()).expect("it").quoted_details(quoted.as_slice());
        assert_eq!(found.expect("well-formed").ports, None);
        // An echo request quotes nothing, and type 3 is an error in both families.
        let echo = details(&v4(5, 28, 0, ICMP, &[8, 0, 0, 0, 0, 0, 0, 0])).expect("well-formed");
        assert_eq!((echo.icmp, echo.quoted), (Some((8, 0)), None));
        let packet = details(&v6(ICMPV6, &[3, 0, 0, 0, 0, 0, 0, 0])).expect("well-formed");
        assert_eq!((packet.icmp, packet.quoted), (Some((3, 0)), Some(48)));
    }

    #[test]
    fn every_kind_of_extension_header_is_walked() {
        // In this order: hop-by-hop, routing, destination options (16 bytes), authentication
        // (24 bytes), fragment (of a packet that is whole), mobility.
        let mut chain = Vec::new();
        chain.extend([ROUTING, 0, 0, 0, 0, 0, 0, 0]);
        chain.extend([DESTINATION_OPTIONS, 0, 0, 0, 0, 0, 0, 0]);
        chain.extend([AUTHENTICATION, 1, 1, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        chain.extend([FRAGMENT, 4]);
        chain.extend([0; 22]);
        chain.extend([MOBILITY, 0, 0, 0, 0, 0, 0x56, 0x78]);
        chain.extend([UDP, 0, 0, 0, 0, 0, 0, 0]);
        chain.extend(UDP_HEADER);
        chain.extend([7; 3]);
        let details = details(&v6(HOP_BY_HOP, &chain)).expect("well-formed");
        assert_eq!(
            details,
            Details {
                length: 40 + u32::try_from(chain.len()).expect("short"),
                flow_label: 0xa_bcde,
                payload_length: 3,
                ip_id: 0x5678,
                ttl: 64,
                ports: Some((1, 2)),
                protocol: UDP,
                ..Details::default()
            }
        );
    }

    #[test]
    fn later_fragments_have_no_ports() {
        let first = details(&v4(5, 28, 0x2000, UDP, &UDP_HEADER)).expect("well-formed");
        assert_eq!((first.is_fragment, first.ports), (true, Some((1, 2))));
        let later = details(&v4(5, 28, 1, UDP, &UDP_HEADER)).expect("well-formed");
        assert_eq!((later.is_fragment, later.ports), (true, None));
        assert_eq!(later.payload_length, 8);
        // "Don't fragment" is no fragment.
        let whole = details(&v4(5, 28, 0x4000, UDP, &UDP_HEADER)).expect("well-formed");
        assert_eq!((whole.is_fragment, whole.ports), (false, Some((1, 2))));

        let fragment = |bits: [u8; 2]| {
            let mut chain = std::vec![UDP, 0, bits[0], bits[1], 0, 0, 0, 9];
            chain.extend(UDP_HEADER);
            let details = details(&v6(FRAGMENT, &chain)).expect("well-formed");
            (details.is_fragment, details.ports)
        };
        assert_eq!(fragment([0, 1]), (true, Some((1, 2))));
        assert_eq!(fragment([0, 8]), (true, None));
        assert_eq!(fragment([0, 0]), (false, Some((1, 2))));
    }

    #[test]
    fn contradictions_are_named() {
        let tcp = [0, 1, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0, 0x50, 2, 0, 0, 0, 0, 0, 0];
        let mut short_tcp = tcp;
        short_tcp[12] = 0x40;
        let mut long_tcp = tcp;
        long_tcp[12] = 0xf0;
        let many: Vec<u8> =
            [HOP_BY_HOP, 0, 0, 0, 0, 0, 0, 0].into_iter().cycle().take(9 * 8).collect();
        for (packet, why) in [
            (v4(4, 28, 0, UDP, &UDP_HEADER), Malformed::HeaderLength),
            (v4(5, 29, 0, UDP, &UDP_HEADER), Malformed::TotalLength),
            (v4(6, 20, 0, UDP, &UDP_HEADER), Malformed::TotalLength),
            (v4(5, 27, 0, UDP, &UDP_HEADER), Malformed::TransportHeader),
            (v4(5, 24, 0, TCP, &[0; 4]), Malformed::TransportHeader),
            (v4(5, 40, 0, TCP, &short_tcp), Malformed::TransportHeader),
            (v4(5, 40, 0, TCP, &long_tcp), Malformed::TransportHeader),
            (v6(UDP, &[0; 7]), Malformed::TransportHeader),
            (v6(HOP_BY_HOP, &[UDP, 0, 0, 0]), Malformed::ExtensionHeader),
            (v6(HOP_BY_HOP, &[UDP, 9, 0, 0, 0, 0, 0, 0]), Malformed::ExtensionHeader),
            (v6(HOP_BY_HOP, &many), Malformed::TooManyExtensionHeaders),
        ] {
            assert_eq!(details(&packet), Err(why), "{packet:x?}");
        }
        details(&v4(5, 40, 0, TCP, &tcp)).expect("the same without the fault");
    }

    #[test]
    fn merged_packets_of_more_than_64_kib_have_the_length_that_is_there() {
        let packet = v4(5, 0, 0, UDP, &UDP_HEADER);
        assert_eq!(details(&packet).expect("well-formed").length, 28);
    }

    proptest! {
        /// Whatever the bytes are: no panic, no overflow, and no length that is not there.
        #[test]
        fn no_input_is_believed(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
            family in prop_oneof![Just(0x45u8), Just(0x4f), Just(0x60), any::<u8>()],
            next in prop_oneof![Just(0u8), Just(43), Just(44), Just(51), Just(60), any::<u8>()],
            protocol in prop_oneof![Just(1u8), Just(6), Just(17), any::<u8>()],
        ) {
            let mut bytes = bytes;
            for (at, value) in [(0, family), (6, next), (9, protocol)] {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = value;
                }
            }
            let bytes = bytes.as_slice();
            let length = u32::try_from(bytes.len()).expect("short");
            if let Some(ip) = Ip::find(bytes) {
                if let Ok(details) = ip.details(bytes, length) {
                    prop_assert!(details.length <= length);
                    prop_assert!(details.payload_length <= details.length);
                }
                let _ = ip.quoted_details(bytes);
            }
        }
    }
}
