//! Packets as bytes: the one that a client would send, and what a program has made of it. No I/O.

use std::net::IpAddr;

use etherparse::{
    EtherType, Ethernet2Slice, IpHeaders, IpNumber, LaxNetSlice, LaxSlicedPacket, PacketBuilder,
    PacketBuilderStep, TransportSlice,
};

use crate::cilium::mac::Mac;

/// TTL, or hop limit, of the packets that are made here.
pub const TTL: u8 = 64;

/// Length of an Ethernet header, bytes.
const ETHERNET: usize = 14;

/// Both ends of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Flow {
    /// Source address.
    pub source: IpAddr,
    /// Source port.
    pub source_port: u16,
    /// Destination address, of the same family.
    pub destination: IpAddr,
    /// Destination port.
    pub destination_port: u16,
    /// IP protocol number: 6 (TCP) or 17 (UDP).
    pub protocol: u8,
}

/// The addresses of an Ethernet header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Macs {
    /// From whom.
    pub source: Mac,
    /// To whom.
    pub destination: Mac,
}

/// What can be read of a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Headers {
    /// Ethernet addresses, if it has an Ethernet header.
    pub macs: Option<Macs>,
    /// Source address.
    pub source: IpAddr,
    /// Destination address.
    pub destination: IpAddr,
    /// Transport protocol number.
    pub protocol: u8,
    /// Source and destination port.
    pub ports: Option<(u16, u16)>,
    /// TTL or hop limit.
    pub ttl: u8,
    /// TCP: whether it is a reset.
    pub is_reset: bool,
    /// ICMP: type and code.
    pub icmp: Option<(u8, u8)>,
}

impl Headers {
    /// Both ends, where it has ports.
    #[must_use]
    pub fn flow(&self) -> Option<Flow> {
        let (source_port, destination_port) = self.ports?;
        Some(Flow {
            source: self.source,
            source_port,
            destination: self.destination,
            destination_port,
            protocol: self.protocol,
        })
    }

    /// Whether it says that something cannot be reached.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        match (self.source, self.icmp) {
            (IpAddr::V4(_), Some((kind, _))) => kind == 3,
            (IpAddr::V6(_), Some((kind, _))) => kind == 1,
            (_, None) => false,
        }
    }
}

/// The first packet of a connection: a SYN, or a UDP datagram with `payload`. Checksums are right.
/// Without `macs` it begins with the IP header.
///
/// Nothing if the two addresses are of different families, or the protocol is neither TCP nor UDP.
#[must_use]
pub fn opening(flow: &Flow, sequence: u32, macs: Option<Macs>, payload: &[u8]) -> Option<Vec<u8>> {
    const WINDOW: u16 = 64_240;
    let builder = addressed(flow, macs)?;
    let Flow { source_port, destination_port, protocol, .. } = *flow;
    let mut packet = Vec::new();
    match IpNumber(protocol) {
        IpNumber::TCP => builder
            .tcp(source_port, destination_port, sequence, WINDOW)
            .syn()
            .write(&mut packet, &[]),
        IpNumber::UDP => builder.udp(source_port, destination_port).write(&mut packet, payload),
        _ => return None,
    }
    .ok()?;
    Some(packet)
}

/// The reset of a TCP connection by the client that opened it; `sequence` is that of its SYN.
///
/// Nothing if the two addresses are of different families, or the protocol is not TCP.
#[must_use]
pub fn reset(flow: &Flow, sequence: u32, macs: Option<Macs>) -> Option<Vec<u8>> {
    if IpNumber(flow.protocol) != IpNumber::TCP {
        return None;
    }
    let mut packet = Vec::new();
    addressed(flow, macs)?
        .tcp(flow.source_port, flow.destination_port, sequence.wrapping_add(1), 0)
        .rst()
        .write(&mut packet, &[])
        .ok()?;
    Some(packet)
}

/// A packet up to its IP header.
fn addressed(flow: &Flow, macs: Option<Macs>) -> Option<PacketBuilderStep<IpHeaders>> {
    // The builder's types differ by layer: the two ways come together behind the IP header.
    Some(match (flow.source, flow.destination, macs) {
        (IpAddr::V4(source), IpAddr::V4(destination), Some(macs)) => PacketBuilder::ethernet2(
            macs.source.0,
            macs.destination.0,
        )
        .ipv4(source.octets(), destination.octets(), TTL),
        (IpAddr::V4(source), IpAddr::V4(destination), None) => {
            PacketBuilder::ipv4(source.octets(), destination.octets(), TTL)
        }
        (IpAddr::V6(source), IpAddr::V6(destination), Some(macs)) => PacketBuilder::ethernet2(
            macs.source.0,
            macs.destination.0,
        )
        .ipv6(source.octets(), destination.octets(), TTL),
        (IpAddr::V6(source), IpAddr::V6(destination), None) => {
            PacketBuilder::ipv6(source.octets(), destination.octets(), TTL)
        }
        _ => return None,
    })
}

/// Reads a packet that begins with an IP header or with an Ethernet header; which of the two is
/// told by which lengths fit, since a program may have put an Ethernet header in front.
#[must_use]
pub fn read(packet: &[u8]) -> Option<Headers> {
    if ip_length(packet) == Some(packet.len()) {
        return headers(packet, None);
    }
    let ethernet = Ethernet2Slice::from_slice_without_fcs(packet).ok()?;
    if !matches!(ethernet.ether_type(), EtherType::IPV4 | EtherType::IPV6) {
        return None;
    }
    let macs = Macs { source: Mac(ethernet.source()), destination: Mac(ethernet.destination()) };
    headers(packet.get(ETHERNET..)?, Some(macs))
}

/// Length of an IP packet that begins here, as its header says.
fn ip_length(packet: &[u8]) -> Option<usize> {
    let two =
        |at: usize| Some(usize::from(u16::from_be_bytes(packet.get(at..at + 2)?.try_into().ok()?)));
    match packet.first()? >> 4 {
        4 => two(2),
        6 => Some(two(4)? + 40),
        _ => None,
    }
}

fn headers(packet: &[u8], macs: Option<Macs>) -> Option<Headers> {
    // What a program has cut off at the end takes nothing from the headers.
    let sliced = LaxSlicedPacket::from_ip(packet).ok()?;
    let (source, destination, ttl, protocol) = match sliced.net? {
        LaxNetSlice::Ipv4(ip) => {
            let header = ip.header();
            (
                IpAddr::V4(header.source_addr()),
                IpAddr::V4(header.destination_addr()),
                header.ttl(),
                ip.payload().ip_number,
            )
        }
        LaxNetSlice::Ipv6(ip) => {
            let header = ip.header();
            (
                IpAddr::V6(header.source_addr()),
                IpAddr::V6(header.destination_addr()),
                header.hop_limit(),
                ip.payload().ip_number,
            )
        }
        LaxNetSlice::Arp(_) => return None,
    };
    let mut headers = Headers {
        macs,
        source,
        destination,
        protocol: protocol.0,
        ports: None,
        ttl,
        is_reset: false,
        icmp: None,
    };
    match sliced.transport {
        Some(TransportSlice::Tcp(tcp)) => {
            headers.ports = Some((tcp.source_port(), tcp.destination_port()));
            headers.is_reset = tcp.rst();
        }
        Some(TransportSlice::Udp(udp)) => {
            headers.ports = Some((udp.source_port(), udp.destination_port()));
        }
        Some(TransportSlice::Icmpv4(icmp)) => {
            headers.icmp = Some((icmp.type_u8(), icmp.code_u8()));
        }
        Some(TransportSlice::Icmpv6(icmp)) => {
            headers.icmp = Some((icmp.type_u8(), icmp.code_u8()));
        }
        _ => {}
    }
    Some(headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACS: Macs =
        Macs { source: Mac([2, 0, 0, 0, 0, 1]), destination: Mac([2, 0, 0, 0, 0, 2]) };

    fn flow(source: &str, destination: &str, protocol: u8) -> Flow {
        Flow {
            source: source.parse().unwrap(),
            source_port: 51515,
            destination: destination.parse().unwrap(),
            destination_port: 443,
            protocol,
        }
    }

    #[test]
    fn what_is_made_is_read_back_with_and_without_an_ethernet_header() {
        for (source, destination) in
            [("192.0.2.77", "192.168.2.20"), ("2001:db8::77", "fd00:2::20")]
        {
            for protocol in [6, 17] {
                for macs in [None, Some(MACS)] {
                    let flow = flow(source, destination, protocol);
                    let packet = opening(&flow, 7, macs, b"probe").unwrap();
                    let read = read(&packet).unwrap();
                    assert_eq!(read.flow(), Some(flow));
                    assert_eq!((read.macs, read.ttl), (macs, TTL));
                    assert!(!read.is_reset && !read.is_unreachable());
                }
            }
        }
    }

    #[test]
    fn a_reset_belongs_to_its_connection() {
        let flow = flow("192.0.2.77", "192.168.2.20", 6);
        let packet = reset(&flow, u32::MAX, Some(MACS)).unwrap();
        let read = read(&packet).unwrap();
        assert_eq!((read.flow(), read.is_reset), (Some(flow), true));
        // What comes after the SYN, around the end of the numbers.
        assert_eq!(packet[14 + 20 + 4..][..4], [0; 4]);
        assert_eq!(reset(&Flow { protocol: 17, ..flow }, 7, None), None);
    }

    /// The source that makes the kernel take an IP header for an Ethernet one.
    #[test]
    fn an_ip_packet_whose_source_looks_like_an_ethernet_type_is_an_ip_packet() {
        let flow4 = flow("8.0.0.77", "192.168.2.20", 6);
        let packet = opening(&flow4, 7, None, &[]).unwrap();
        assert_eq!(packet[12..14], [8, 0]);
        assert_eq!(read(&packet).unwrap().macs, None);
        let flow6 = flow("2001:db8:86dd::77", "fd00:2::20", 6);
        let packet = opening(&flow6, 7, None, &[]).unwrap();
        assert_eq!(packet[12..14], [0x86, 0xdd]);
        assert_eq!(read(&packet).unwrap().flow(), Some(flow6));
        // With a header put in front of it, as a program does that sends it on.
        let mut with_header = vec![0; 12];
        with_header.extend([0x86, 0xdd]);
        with_header.extend(&packet);
        assert!(read(&with_header).unwrap().macs.is_some());
    }

    #[test]
    fn checksums_are_right() {
        let packet = opening(&flow("192.0.2.77", "192.168.2.20", 6), 7, None, &[]).unwrap();
        let sum = |bytes: &[u8]| {
            let mut sum: u32 = bytes
                .chunks(2)
                .map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)))
                .sum();
            while sum > 0xffff {
                sum = (sum & 0xffff) + (sum >> 16);
            }
            sum
        };
        assert_eq!(sum(&packet[..20]), 0xffff);
        let mut pseudo = packet[12..20].to_vec();
        pseudo.extend([0, 6, 0, 20]);
        pseudo.extend(&packet[20..]);
        assert_eq!(sum(&pseudo), 0xffff);
    }

    #[test]
    fn what_is_no_packet_is_nothing() {
        for bytes in [&[][..], &[0x45], &[0; 14], &[0xff; 60]] {
            assert_eq!(read(bytes), None, "{bytes:02x?}");
        }
        let mixed = flow("192.0.2.77", "fd00:2::20", 6);
        assert_eq!(opening(&mixed, 0, None, &[]), None);
        assert_eq!(opening(&flow("192.0.2.77", "192.168.2.20", 132), 0, None, &[]), None);
    }
}
