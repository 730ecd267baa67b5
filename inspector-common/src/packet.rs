//! Reads the headers of a packet, in two steps: where does it go, and then, for the few packets
//! that matter, everything else.
//!
//! It runs in the kernel under the verifier as well as in tests on the host: every loop is bounded,
//! nothing is allocated, no length in the packet is believed before it is compared.

use crate::arrival::{Address, FLAG_FRAGMENT, FLAG_PORTS};

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

/// What stands in front of the IP header on a device.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkLayer {
    /// An Ethernet header.
    Ethernet = 1,
    /// Nothing: `WireGuard`, TUN, IP tunnels.
    None = 2,
}

impl LinkLayer {
    /// From its number, as it stands in the map of devices.
    #[inline(always)]
    #[must_use]
    pub const fn from_number(number: u32) -> Option<Self> {
        match number {
            1 => Some(Self::Ethernet),
            2 => Some(Self::None),
            _ => None,
        }
    }
}

/// The fixed IP header of a packet, and where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ip {
    /// Offset of the IP header in the packet, bytes.
    pub offset: u32,
    /// The header.
    pub header: IpHeader,
}

/// The fixed part of an IP header, as it stands in the packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IpHeader {
    /// IPv4, options not included.
    V4([u8; 20]),
    /// IPv6, extension headers not included.
    V6([u8; 40]),
}

/// Everything about a packet but its addresses. The fields are those of
/// [`ArrivalEvent`](crate::arrival::ArrivalEvent).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[expect(missing_docs, reason = "documented once, at ArrivalEvent")]
pub struct Details {
    pub length: u32,
    pub flow_label: u32,
    pub tcp_sequence: u32,
    pub payload_length: u32,
    pub ip_id: u16,
    pub source_port: u16,
    pub destination_port: u16,
    pub flags: u16,
    pub protocol: u8,
    pub tcp_flags: u8,
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

/// Does something [`MAX_EXTENSION_HEADERS`] times.
macro_rules! for_each_extension_header {
    ($step:block) => {{
        $step $step $step $step
        $step $step $step $step
        const { assert!(MAX_EXTENSION_HEADERS == 8) }
    }};
}

/// More extension headers than this are not followed. RFC 8200 has six kinds, one of which may
/// come twice.
pub const MAX_EXTENSION_HEADERS: u32 = 8;

const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const ETHERTYPE_VLAN: u16 = 0x8100;
const ETHERTYPE_SERVICE_VLAN: u16 = 0x88a8;
/// VLAN tags that are followed. The outermost tag is usually not in the packet any more: the
/// device or the kernel has moved it into the packet's metadata.
const MAX_VLAN_TAGS: u32 = 2;

const HOP_BY_HOP: u8 = 0;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
const DESTINATION_OPTIONS: u8 = 60;
const SCTP: u8 = 132;
const MOBILITY: u8 = 135;
const HOST_IDENTITY: u8 = 139;
const SHIM6: u8 = 140;

impl Ip {
    /// Finds the IP header. Nothing for what is not IP, or ends before its destination address.
    #[inline(always)]
    pub fn find<P: Bytes + ?Sized>(packet: &P, link: LinkLayer) -> Option<Self> {
        match link {
            LinkLayer::Ethernet => {
                let [.., high, low] = packet.load::<14>(0)?;
                let mut ethertype = u16::from_be_bytes([high, low]);
                let mut offset = 14;
                for _ in 0..MAX_VLAN_TAGS {
                    if ethertype != ETHERTYPE_VLAN && ethertype != ETHERTYPE_SERVICE_VLAN {
                        break;
                    }
                    let [_, _, high, low] = packet.load::<4>(offset)?;
                    ethertype = u16::from_be_bytes([high, low]);
                    offset += 4;
                }
                match ethertype {
                    ETHERTYPE_IPV4 => Self::v4(packet, offset),
                    ETHERTYPE_IPV6 => Self::v6(packet, offset),
                    _ => None,
                }
            }
            LinkLayer::None => match packet.load::<1>(0)?[0] >> 4 {
                4 => Self::v4(packet, 0),
                6 => Self::v6(packet, 0),
                _ => None,
            },
        }
    }

    #[inline(always)]
    fn v4<P: Bytes + ?Sized>(packet: &P, offset: u32) -> Option<Self> {
        let header = packet.load::<20>(offset)?;
        (header[0] >> 4 == 4).then_some(Self { offset, header: IpHeader::V4(header) })
    }

    #[inline(always)]
    fn v6<P: Bytes + ?Sized>(packet: &P, offset: u32) -> Option<Self> {
        let header = packet.load::<40>(offset)?;
        (header[0] >> 4 == 6).then_some(Self { offset, header: IpHeader::V6(header) })
    }

    /// The source address.
    #[inline(always)]
    #[must_use]
    pub fn source(&self) -> Address {
        match &self.header {
            IpHeader::V4(h) => Address::v4([h[12], h[13], h[14], h[15]]),
            IpHeader::V6(h) => Address::v6([
                h[8], h[9], h[10], h[11], h[12], h[13], h[14], h[15], h[16], h[17], h[18], h[19],
                h[20], h[21], h[22], h[23],
            ]),
        }
    }

    /// The destination address.
    #[inline(always)]
    #[must_use]
    pub fn destination(&self) -> Address {
        match &self.header {
            IpHeader::V4(h) => Address::v4([h[16], h[17], h[18], h[19]]),
            IpHeader::V6(h) => Address::v6([
                h[24], h[25], h[26], h[27], h[28], h[29], h[30], h[31], h[32], h[33], h[34], h[35],
                h[36], h[37], h[38], h[39],
            ]),
        }
    }

    /// Reads everything else. `packet_length` is the length of the whole packet, link layer
    /// included, in bytes.
    ///
    /// # Errors
    /// If the headers contradict themselves or the packet's length.
    #[inline(always)]
    pub fn details<P: Bytes + ?Sized>(
        &self,
        packet: &P,
        packet_length: u32,
    ) -> Result<Details, Malformed> {
        let available = packet_length.saturating_sub(self.offset);
        match &self.header {
            IpHeader::V4(header) => self.details_v4(packet, header, available),
            IpHeader::V6(header) => self.details_v6(packet, header, available),
        }
    }

    #[inline(always)]
    fn details_v4<P: Bytes + ?Sized>(
        &self,
        packet: &P,
        header: &[u8; 20],
        available: u32,
    ) -> Result<Details, Malformed> {
        let header_length = u32::from(header[0] & 0x0f) * 4;
        if header_length < 20 {
            return Err(Malformed::HeaderLength);
        }
        // 0 is a merged packet of more than 64 KiB (BIG TCP).
        let said = u32::from(u16::from_be_bytes([header[2], header[3]]));
        let length = if said == 0 { available } else { said };
        if length > available || length < header_length {
            return Err(Malformed::TotalLength);
        }
        let fragment = u16::from_be_bytes([header[6], header[7]]);
        let mut details = Details {
            length,
            ip_id: u16::from_be_bytes([header[4], header[5]]),
            protocol: header[9],
            ..Details::default()
        };
        if fragment & 0x3fff != 0 {
            details.flags |= FLAG_FRAGMENT;
        }
        let is_later_fragment = fragment & 0x1fff != 0;
        transport(packet, self.offset, header_length, is_later_fragment, &mut details)?;
        Ok(details)
    }

    #[inline(always)]
    fn details_v6<P: Bytes + ?Sized>(
        &self,
        packet: &P,
        header: &[u8; 40],
        available: u32,
    ) -> Result<Details, Malformed> {
        // 0 is a jumbogram or a merged packet of more than 64 KiB (BIG TCP).
        let said = u32::from(u16::from_be_bytes([header[4], header[5]]));
        let length = if said == 0 { available } else { said + 40 };
        if length > available {
            return Err(Malformed::TotalLength);
        }
        let mut details = Details {
            length,
            flow_label: u32::from_be_bytes([0, header[1] & 0x0f, header[2], header[3]]),
            ..Details::default()
        };
        let mut next = header[6];
        let mut headers_length = 40;
        let mut is_later_fragment = false;
        // Written out, not a loop: before Linux 6.8 the verifier refuses a loop whose end falls
        // through into its beginning, and where the compiler puts the end is its own affair.
        for_each_extension_header!({
            if is_extension(next) && !is_later_fragment {
                let extension = packet
                    .load::<8>(self.offset + headers_length)
                    .ok_or(Malformed::ExtensionHeader)?;
                let units = u32::from(extension[1]);
                headers_length += match next {
                    FRAGMENT => {
                        // Offset and "more": a fragment header with neither makes no fragment
                        // (RFC 6946).
                        let fragment = u16::from_be_bytes([extension[2], extension[3]]);
                        if fragment & 0xfff9 != 0 {
                            details.flags |= FLAG_FRAGMENT;
                        }
                        is_later_fragment = fragment & 0xfff8 != 0;
                        details.ip_id = u16::from_be_bytes([extension[6], extension[7]]);
                        8
                    }
                    AUTHENTICATION => (units + 2) * 4,
                    _ => (units + 1) * 8,
                };
                next = extension[0];
            }
        });
        if is_extension(next) && !is_later_fragment {
            return Err(Malformed::TooManyExtensionHeaders);
        }
        if headers_length > length {
            return Err(Malformed::ExtensionHeader);
        }
        details.protocol = next;
        transport(packet, self.offset, headers_length, is_later_fragment, &mut details)?;
        Ok(details)
    }
}

#[inline(always)]
const fn is_extension(next: u8) -> bool {
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

/// Reads the transport header behind `ip_headers_length` bytes of IP headers, which are no more than
/// `details.length`.
#[inline(always)]
fn transport<P: Bytes + ?Sized>(
    packet: &P,
    ip_offset: u32,
    ip_headers_length: u32,
    is_later_fragment: bool,
    details: &mut Details,
) -> Result<(), Malformed> {
    let length = details.length - ip_headers_length;
    details.payload_length = length;
    if is_later_fragment {
        return Ok(());
    }
    let offset = ip_offset + ip_headers_length;
    let header_length = match details.protocol {
        TCP => {
            let header = packet.load::<14>(offset).ok_or(Malformed::TransportHeader)?;
            details.tcp_sequence = u32::from_be_bytes([header[4], header[5], header[6], header[7]]);
            details.tcp_flags = header[13];
            let header_length = u32::from(header[12] >> 4) * 4;
            if header_length < 20 {
                return Err(Malformed::TransportHeader);
            }
            header_length
        }
        UDP => 8,
        SCTP => 12,
        _ => return Ok(()),
    };
    if header_length > length {
        return Err(Malformed::TransportHeader);
    }
    let ports = packet.load::<4>(offset).ok_or(Malformed::TransportHeader)?;
    details.source_port = u16::from_be_bytes([ports[0], ports[1]]);
    details.destination_port = u16::from_be_bytes([ports[2], ports[3]]);
    details.flags |= FLAG_PORTS;
    details.payload_length = length - header_length;
    Ok(())
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
        let ip = Ip::find(packet, LinkLayer::None).expect("an IP header");
        ip.details(packet, u32::try_from(packet.len()).expect("short"))
    }

    fn ethernet(ethertype: &[u8], packet: &[u8]) -> Vec<u8> {
        let mut frame = std::vec![0; 12];
        frame.extend(ethertype);
        frame.extend(packet);
        frame
    }

    #[test]
    fn addresses_are_read_behind_any_link_layer() {
        let packet = v4(5, 28, 0, UDP, &UDP_HEADER);
        for (link, frame, offset) in [
            (LinkLayer::None, packet.clone(), 0),
            (LinkLayer::Ethernet, ethernet(&[8, 0], &packet), 14),
            (LinkLayer::Ethernet, ethernet(&[0x81, 0, 0, 7, 8, 0], &packet), 18),
            (LinkLayer::Ethernet, ethernet(&[0x88, 0xa8, 0, 7, 0x81, 0, 0, 8, 8, 0], &packet), 22),
        ] {
            let ip = Ip::find(frame.as_slice(), link).expect("found");
            assert_eq!(ip.offset, offset);
            assert_eq!(ip.source(), Address::v4([10, 0, 0, 1]));
            assert_eq!(ip.destination(), Address::v4([10, 0, 0, 2]));
        }
        let frame = ethernet(&[0x86, 0xdd], &v6(UDP, &UDP_HEADER));
        let ip = Ip::find(frame.as_slice(), LinkLayer::Ethernet).expect("found");
        assert_eq!(ip.source(), Address::v6([1; 16]));
        assert_eq!(ip.destination(), Address::v6([2; 16]));
    }

    #[test]
    fn what_is_not_ip_is_left_alone() {
        let packet = v4(5, 28, 0, UDP, &UDP_HEADER);
        // ARP; IPv6 by the Ethernet header, IPv4 by its own; three tags.
        for ethertype in
            [&[8, 6][..], &[0x86, 0xdd], &[0x81, 0, 0, 7, 0x81, 0, 0, 8, 0x81, 0, 0, 9, 8, 0]]
        {
            assert_eq!(
                Ip::find(ethernet(ethertype, &packet).as_slice(), LinkLayer::Ethernet),
                None
            );
        }
        assert_eq!(Ip::find(&packet[..19], LinkLayer::None), None);
        assert_eq!(Ip::find([].as_slice(), LinkLayer::None), None);
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
                source_port: 1,
                destination_port: 2,
                flags: FLAG_PORTS,
                protocol: UDP,
                ..Details::default()
            }
        );
    }

    #[test]
    fn later_fragments_have_no_ports() {
        let first = details(&v4(5, 28, 0x2000, UDP, &UDP_HEADER)).expect("well-formed");
        assert_eq!((first.flags, first.destination_port), (FLAG_FRAGMENT | FLAG_PORTS, 2));
        let later = details(&v4(5, 28, 1, UDP, &UDP_HEADER)).expect("well-formed");
        assert_eq!((later.flags, later.destination_port), (FLAG_FRAGMENT, 0));
        assert_eq!(later.payload_length, 8);
        // "Don't fragment" is no fragment.
        let whole = details(&v4(5, 28, 0x4000, UDP, &UDP_HEADER)).expect("well-formed");
        assert_eq!(whole.flags, FLAG_PORTS);

        let fragment = |bits: [u8; 2]| {
            let mut chain = std::vec![UDP, 0, bits[0], bits[1], 0, 0, 0, 9];
            chain.extend(UDP_HEADER);
            details(&v6(FRAGMENT, &chain)).expect("well-formed")
        };
        assert_eq!(fragment([0, 1]).flags, FLAG_FRAGMENT | FLAG_PORTS);
        assert_eq!(fragment([0, 8]).flags, FLAG_FRAGMENT);
        assert_eq!(fragment([0, 0]).flags, FLAG_PORTS);
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
            is_ethernet in any::<bool>(),
            family in prop_oneof![Just(0x45u8), Just(0x4f), Just(0x60), any::<u8>()],
            next in prop_oneof![Just(0u8), Just(43), Just(44), Just(51), Just(60), any::<u8>()],
        ) {
            let mut bytes = bytes;
            let link = if is_ethernet { LinkLayer::Ethernet } else { LinkLayer::None };
            let start = if is_ethernet { 14 } else { 0 };
            if let Some(first) = bytes.get_mut(start) {
                *first = family;
            }
            if let Some(header) = bytes.get_mut(start + 6) {
                *header = next;
            }
            if let (true, Some(ethertype)) = (is_ethernet, bytes.get_mut(12..14)) {
                ethertype.copy_from_slice(if family >> 4 == 6 { &[0x86, 0xdd] } else { &[8, 0] });
            }
            let length = u32::try_from(bytes.len()).expect("short");
            if let Some(ip) = Ip::find(bytes.as_slice(), link)
                && let Ok(details) = ip.details(bytes.as_slice(), length)
            {
                prop_assert!(ip.offset + details.length <= length);
                prop_assert!(details.payload_length <= details.length);
            }
        }
    }
}
