//! The filter on the host, on packets in memory.

extern crate std;

use std::collections::{BTreeMap, BTreeSet};
use std::vec::Vec;

use proptest::prelude::*;

use super::*;
use crate::packet::{Ip, MAX_EXTENSION_HEADERS};

const CLIENT: u8 = 7;
const VIP: u8 = 20;
const OTHER: u8 = 21;
const BACKEND: u8 = 30;

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const DESTINATION_OPTIONS: u8 = 60;

/// A packet in memory, behind whose end there are zeros, as the kernel's helpers say it.
struct Packet<'p>(&'p [u8]);

impl Source for Packet<'_> {
    fn words<const N: usize>(&self, offset: u32) -> Option<[u32; N]> {
        let mut words = [0; N];
        let rest = usize::try_from(offset).ok().and_then(|offset| self.0.get(offset..));
        // All or nothing, as they do, too.
        if let Some(bytes) = rest.and_then(|rest| rest.get(..N * 4)) {
            for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *word = u32::from_ne_bytes(*bytes);
            }
        }
        Some(words)
    }
}

/// The same, which says where it ends.
struct Ending<'p>(&'p [u8]);

impl Source for Ending<'_> {
    fn words<const N: usize>(&self, offset: u32) -> Option<[u32; N]> {
        let end = usize::try_from(offset).ok()?.checked_add(N * 4)?;
        (end <= self.0.len()).then(|| Packet(self.0).words(offset)).flatten()
    }
}

/// What is watched, and the sieve made of it as user space makes it.
#[derive(Default)]
struct Watch {
    roles: BTreeMap<(u32, [u32; 4]), u32>,
    endpoints: BTreeSet<(u32, [u32; 4], u16, u8)>,
    clients: Option<BTreeSet<(u32, [u32; 4])>>,
    bits: BTreeSet<u32>,
    /// Lets everything through the sieve.
    coarse: bool,
}

impl Watch {
    fn role(mut self, address: Address, role: u32) -> Self {
        *self.roles.entry((address.family, address.words)).or_default() |= role;
        self.bits.insert(address.bit());
        self
    }

    fn endpoint(mut self, address: Address, port: u16, protocol: u8) -> Self {
        self.endpoints.insert((address.family, address.words, port, protocol));
        self.role(address, role::SOME_PORTS)
    }

    fn client(mut self, address: Address) -> Self {
        self.clients.get_or_insert_default().insert((address.family, address.words));
        self
    }
}

impl Sets for Watch {
    fn maybe(&self, address: &Address) -> bool {
        self.coarse || self.bits.contains(&address.bit())
    }

    fn roles(&self, address: &Address) -> u32 {
        assert!(self.maybe(address), "the map is asked for what the sieve has sorted out");
        self.roles.get(&(address.family, address.words)).copied().unwrap_or(0)
    }

    fn endpoint(&self, endpoint: &Endpoint) -> bool {
        assert_eq!(endpoint.reserved, 0, "it is part of the key");
        let Endpoint { address, port, protocol, .. } = *endpoint;
        self.endpoints.contains(&(address.family, address.words, port, protocol))
    }

    fn client(&self, address: &Address) -> bool {
        self.clients
            .as_ref()
            .is_none_or(|clients| clients.contains(&(address.family, address.words)))
    }
}

/// `192.0.2.LAST`, or `2001:db8::LAST`.
fn address(is_v6: bool, last: u8) -> Address {
    if is_v6 {
        let word = |bytes| u32::from_ne_bytes(bytes);
        Address::v6([word([0x20, 1, 0xd, 0xb8]), 0, 0, word([0, 0, 0, last])])
    } else {
        Address::v4(u32::from_ne_bytes([192, 0, 2, last]))
    }
}

/// A packet with an IP header of its shortest.
fn packet(is_v6: bool, (from, to): (u8, u8), protocol: u8, rest: &[u8]) -> Vec<u8> {
    if is_v6 {
        let length = u16::try_from(rest.len()).expect("short").to_be_bytes();
        let mut packet = std::vec![0x60, 0, 0, 0, length[0], length[1], protocol, 64];
        for last in [from, to] {
            packet.extend([0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]);
        }
        packet.extend(rest);
        return packet;
    }
    options(&[], 0, (from, to), protocol, rest)
}

/// An IPv4 packet with options (a multiple of four) and a fragment field.
fn options(
    options: &[u8],
    fragment: u16,
    (from, to): (u8, u8),
    protocol: u8,
    rest: &[u8],
) -> Vec<u8> {
    let words = u8::try_from(5 + options.len() / 4).expect("15 at most");
    let total = u16::try_from(20 + options.len() + rest.len()).expect("short").to_be_bytes();
    let fragment = fragment.to_be_bytes();
    let mut packet = std::vec![0x40 | words, 0, total[0], total[1], 0, 1];
    packet.extend([fragment[0], fragment[1], 64, protocol, 0, 0]);
    packet.extend([192, 0, 2, from, 192, 0, 2, to]);
    packet.extend(options);
    packet.extend(rest);
    packet
}

/// Ports, and enough behind them for every transport header.
fn transport(source: u16, destination: u16) -> Vec<u8> {
    let mut header = source.to_be_bytes().to_vec();
    header.extend(destination.to_be_bytes());
    header.extend([0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x10, 1, 0, 0, 0, 0, 0]);
    header
}

fn read(packet: &[u8]) -> Head {
    Head::read(&Packet(packet)).expect("an IP header")
}

fn matters(packet: &[u8], watch: &Watch) -> bool {
    let found = read(packet).matters(&Packet(packet), watch);
    // The sieve saves look-ups and decides nothing.
    let coarse = Watch {
        roles: watch.roles.clone(),
        endpoints: watch.endpoints.clone(),
        clients: watch.clients.clone(),
        bits: BTreeSet::new(),
        coarse: true,
    };
    assert_eq!(read(packet).matters(&Packet(packet), &coarse), found);
    found
}

fn header_length(packet: &[u8]) -> u32 {
    let length = u32::try_from(packet.len()).expect("short");
    read(packet).header_length(&Packet(packet), length)
}

const BOTH: [bool; 2] = [false, true];

#[test]
fn addresses_protocol_and_end_are_read() {
    for (is_v6, end) in [(false, 20), (true, 40)] {
        let head = read(&packet(is_v6, (CLIENT, VIP), UDP, &transport(1, 2)));
        assert_eq!(head.source, address(is_v6, CLIENT));
        assert_eq!(head.destination, address(is_v6, VIP));
        assert_eq!((head.protocol, head.end), (UDP, end));
    }
    // With as many options as there can be; a length that is none is taken for the shortest.
    assert_eq!(read(&options(&[1; 40], 0, (CLIENT, VIP), UDP, &[])).end, 60);
    let mut short = packet(false, (CLIENT, VIP), UDP, &[]);
    short[0] = 0x42;
    assert_eq!(read(&short).end, 20);
}

#[test]
fn what_is_no_ip_or_ends_within_its_header_is_none() {
    for is_v6 in BOTH {
        let whole = packet(is_v6, (CLIENT, VIP), UDP, &[]);
        assert!(Head::read(&Ending(&whole)).is_some());
        for cut in [0, 3, whole.len() - 1] {
            assert_eq!(Head::read(&Ending(&whole[..cut])), None, "{cut} bytes");
        }
        let mut other = whole.clone();
        other[0] = 0x55;
        assert_eq!(Head::read(&Packet(&other)), None);
        // tc knows the version from elsewhere, and does not believe it.
        assert_eq!(Head::v4(&Packet(&whole), 0).is_some(), !is_v6);
        assert_eq!(Head::v6(&Packet(&whole)).is_some(), is_v6);
    }
}

#[test]
fn four_extension_headers_are_walked_and_no_more() {
    // Hop-by-hop (16 bytes), routing, authentication (24 bytes), destination options.
    let mut chain = std::vec![ROUTING, 1];
    chain.extend([0; 14]);
    chain.extend([AUTHENTICATION, 0, 0, 0, 0, 0, 0, 0]);
    chain.extend([DESTINATION_OPTIONS, 4]);
    chain.extend([0; 22]);
    let last = chain.len();
    chain.extend([UDP, 0, 0, 0, 0, 0, 0, 0]);
    chain.extend(transport(1, 443));
    let whole = packet(true, (CLIENT, VIP), HOP_BY_HOP, &chain);
    let head = read(&whole);
    assert_eq!((head.protocol, head.end), (UDP, 40 + 16 + 8 + 24 + 8));
    let watch = Watch::default().endpoint(address(true, VIP), 443, UDP);
    assert!(matters(&whole, &watch));

    // One more, and it is the protocol that is seen: the ports are those of no protocol.
    chain[last] = DESTINATION_OPTIONS;
    chain.splice(last + 8..last + 8, [UDP, 0, 0, 0, 0, 0, 0, 0]);
    let whole = packet(true, (CLIENT, VIP), HOP_BY_HOP, &chain);
    assert_eq!(read(&whole).protocol, DESTINATION_OPTIONS);
    assert!(!matters(&whole, &watch));
    let any = Watch::default().role(address(true, VIP), role::ANY_PORT);
    assert!(matters(&whole, &any));
}

#[test]
fn an_address_with_any_port_matters_in_both_directions_and_for_every_protocol() {
    for is_v6 in BOTH {
        let watch = Watch::default().role(address(is_v6, VIP), role::ANY_PORT);
        for protocol in [TCP, UDP, SCTP, 47] {
            for (pair, expected) in
                [((CLIENT, VIP), true), ((VIP, CLIENT), true), ((CLIENT, OTHER), false)]
            {
                let packet = packet(is_v6, pair, protocol, &transport(1, 2));
                assert_eq!(matters(&packet, &watch), expected, "{pair:?} {protocol}");
            }
        }
        // The same words in another family are another address.
        let other = Watch::default()
            .role(Address { family: 10 - address(is_v6, VIP).family, ..address(is_v6, VIP) }, 1);
        assert!(!matters(&packet(is_v6, (CLIENT, VIP), TCP, &transport(1, 2)), &other));
        // As a neighbour alone, no packet of it does.
        let neighbour = Watch::default().role(address(is_v6, VIP), role::NEIGHBOUR);
        assert!(!matters(&packet(is_v6, (CLIENT, VIP), TCP, &transport(1, 2)), &neighbour));
    }
}

#[test]
fn an_endpoint_matters_by_port_and_protocol_on_its_own_side() {
    for is_v6 in BOTH {
        let watch = Watch::default().endpoint(address(is_v6, VIP), 443, TCP).endpoint(
            address(is_v6, BACKEND),
            8443,
            TCP,
        );
        for (pair, protocol, ports, expected) in [
            ((CLIENT, VIP), TCP, (40_000, 443), true),
            ((VIP, CLIENT), TCP, (443, 40_000), true),
            ((CLIENT, BACKEND), TCP, (40_000, 8443), true),
            ((BACKEND, CLIENT), TCP, (8443, 40_000), true),
            // Another port, protocol, or the right port on the other side.
            ((CLIENT, VIP), TCP, (40_000, 444), false),
            ((CLIENT, VIP), UDP, (40_000, 443), false),
            ((CLIENT, VIP), TCP, (443, 40_000), false),
            ((VIP, CLIENT), TCP, (40_000, 443), false),
            ((CLIENT, BACKEND), TCP, (40_000, 443), false),
            ((CLIENT, OTHER), TCP, (443, 443), false),
            // No ports at all.
            ((CLIENT, VIP), 47, (40_000, 443), false),
            // One of the two is enough.
            ((VIP, BACKEND), TCP, (1, 8443), true),
            ((VIP, BACKEND), TCP, (443, 1), true),
            ((VIP, BACKEND), TCP, (8443, 443), false),
        ] {
            let packet = packet(is_v6, pair, protocol, &transport(ports.0, ports.1));
            assert_eq!(matters(&packet, &watch), expected, "{pair:?} {protocol} {ports:?}");
        }
    }
    // Behind options, the ports are elsewhere.
    let watch = Watch::default().endpoint(address(false, VIP), 443, TCP);
    let behind = options(&[1; 12], 0, (CLIENT, VIP), TCP, &transport(40_000, 443));
    assert!(matters(&behind, &watch));
}

#[test]
fn a_fragment_without_ports_matters_by_its_address() {
    let v4 = Watch::default().endpoint(address(false, VIP), 443, UDP);
    for (fragment, port, expected) in [
        // The first: "more fragments", and ports.
        (0x2000, 443, true),
        (0x2000, 444, false),
        // "Don't fragment" is none.
        (0x4000, 443, true),
        (0x4000, 444, false),
        // Later ones: what stands in the place of ports is none.
        (0x0001, 444, true),
        (0x2100, 444, true),
        (0x1fff, 444, true),
    ] {
        let packet = options(&[], fragment, (CLIENT, VIP), UDP, &transport(1, port));
        assert_eq!(matters(&packet, &v4), expected, "{fragment:#x} {port}");
    }
    let v6 = Watch::default().endpoint(address(true, VIP), 443, UDP);
    for (bits, port, expected) in [
        ([0, 1], 443, true),
        ([0, 1], 444, false),
        ([0, 0], 444, false),
        // Bits that are reserved say nothing.
        ([0, 6], 444, false),
        ([0, 8], 444, true),
        ([1, 0], 444, true),
        ([0xff, 0xf9], 444, true),
    ] {
        let mut chain = std::vec![UDP, 0, bits[0], bits[1], 0, 0, 0, 9];
        chain.extend(transport(1, port));
        let packet = packet(true, (CLIENT, VIP), FRAGMENT, &chain);
        assert_eq!(matters(&packet, &v6), expected, "{bits:?} {port}");
        // It has no transport header, and no more than IP's is copied.
        let is_later = bits != [0, 6] && bits[0] != 0 || bits[1] & 0xf8 != 0;
        assert_eq!(header_length(&packet), if is_later { 48 } else { 56 }, "{bits:?}");
    }
    // Behind a later fragment there is no header, whatever it says.
    let chain = [DESTINATION_OPTIONS, 0, 0, 8, 0, 0, 0, 9, TCP, 9, 0, 0, 0, 0, 0, 0];
    assert_eq!(read(&packet(true, (CLIENT, VIP), FRAGMENT, &chain)).end, 48);
}

#[test]
fn clients_narrow_it_to_what_they_exchange_with_the_watched() {
    for is_v6 in BOTH {
        let watch = Watch::default()
            .role(address(is_v6, VIP), role::ANY_PORT)
            .endpoint(address(is_v6, BACKEND), 8443, TCP)
            .client(address(is_v6, CLIENT));
        for (pair, ports, expected) in [
            ((CLIENT, VIP), (1, 2), true),
            ((VIP, CLIENT), (1, 2), true),
            ((CLIENT, BACKEND), (1, 8443), true),
            ((BACKEND, CLIENT), (8443, 1), true),
            ((OTHER, VIP), (1, 2), false),
            ((VIP, OTHER), (1, 2), false),
            ((OTHER, BACKEND), (1, 8443), false),
            ((CLIENT, OTHER), (1, 8443), false),
            // Neither is a client of the other.
            ((VIP, BACKEND), (8443, 8443), false),
        ] {
            let packet = packet(is_v6, pair, TCP, &transport(ports.0, ports.1));
            assert_eq!(matters(&packet, &watch), expected, "{pair:?} {ports:?}");
        }
    }
}

/// An ICMP message of this type with a packet in it.
fn icmp(is_v6: bool, pair: (u8, u8), kind: u8, quoted: &[u8]) -> Vec<u8> {
    let rest = [&[kind, 1, 0, 0, 0, 0, 0, 0], quoted].concat();
    packet(is_v6, pair, if is_v6 { ICMPV6 } else { ICMP }, &rest)
}

#[test]
fn an_icmp_error_matters_for_the_packet_that_it_quotes() {
    for is_v6 in BOTH {
        let watch = Watch::default().endpoint(address(is_v6, VIP), 443, TCP);
        let unreachable = if is_v6 { 1 } else { 3 };
        let quoted = |pair, port| packet(is_v6, pair, TCP, &transport(1, port)[..8]);
        for (kind, pair, port, expected) in [
            (unreachable, (CLIENT, VIP), 443, true),
            (unreachable, (CLIENT, VIP), 444, false),
            (unreachable, (CLIENT, OTHER), 443, false),
            // An echo that carries the same bytes.
            (if is_v6 { 128 } else { 8 }, (CLIENT, VIP), 443, false),
        ] {
            let packet = icmp(is_v6, (OTHER, CLIENT), kind, &quoted(pair, port));
            assert_eq!(matters(&packet, &watch), expected, "{kind} {pair:?} {port}");
        }
        // What an error of the other family quotes is not believed, nor what is no packet.
        let foreign = packet(!is_v6, (CLIENT, VIP), TCP, &transport(1, 443));
        assert!(!matters(&icmp(is_v6, (OTHER, CLIENT), unreachable, &foreign), &watch));
        assert!(!matters(&icmp(is_v6, (OTHER, CLIENT), unreachable, &[]), &watch));
        // An error quotes no error.
        let nested = icmp(is_v6, (OTHER, CLIENT), unreachable, &quoted((CLIENT, VIP), 443));
        assert!(!matters(&icmp(is_v6, (OTHER, CLIENT), unreachable, &nested), &watch));
    }
    // A later fragment's first bytes are no type; the other family's number is no ICMP.
    let rest = [&[3, 1, 0, 0, 0, 0, 0, 0][..], &packet(false, (CLIENT, VIP), TCP, &[])].concat();
    let watch = Watch::default().role(address(false, VIP), role::ANY_PORT);
    assert!(matters(&options(&[], 0, (OTHER, CLIENT), ICMP, &rest), &watch));
    assert!(!matters(&options(&[], 1, (OTHER, CLIENT), ICMP, &rest), &watch));
    assert!(!matters(&options(&[], 0, (OTHER, CLIENT), ICMPV6, &rest), &watch));
}

#[test]
fn errors_are_those_types_that_quote() {
    let v4: Vec<u8> = (0..=255).filter(|kind| is_icmp_error(false, *kind)).collect();
    // Unreachable, source quench, redirect, time exceeded, parameter problem.
    assert_eq!(v4, [3, 4, 5, 11, 12]);
    let v6: Vec<u8> = (0..=255).filter(|kind| is_icmp_error(true, *kind)).collect();
    // Unreachable, too big, time exceeded, parameter problem.
    assert_eq!(v6, [1, 2, 3, 4]);
}

/// A neighbour solicitation for `2001:db8::LAST`, behind what `chain` says.
fn solicitation(next: u8, chain: &[u8], last: u8) -> Vec<u8> {
    let mut rest = chain.to_vec();
    rest.extend([NEIGHBOUR_SOLICITATION, 0, 0, 0, 0, 0, 0, 0]);
    rest.extend([0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]);
    // Option: the asker's link-layer address.
    rest.extend([1, 1, 2, 0, 0, 0, 0, 1]);
    packet(true, (CLIENT, OTHER), next, &rest)
}

#[test]
fn a_neighbour_solicitation_says_for_whom() {
    let asked = |packet: &[u8]| read(packet).solicited(&Packet(packet));
    let plain = solicitation(ICMPV6, &[], VIP);
    assert_eq!(asked(&plain), Some(address(true, VIP)));
    // The target is a header's part, the option is not.
    assert_eq!(header_length(&plain), 40 + 8 + 16);
    let behind = solicitation(HOP_BY_HOP, &[ICMPV6, 0, 0, 0, 0, 0, 0, 0], VIP);
    assert_eq!(asked(&behind), Some(address(true, VIP)));

    let mut advertisement = plain;
    advertisement[40] = NEIGHBOUR_SOLICITATION + 1;
    assert_eq!(asked(&advertisement), None);
    assert_eq!(asked(&solicitation(TCP, &[], VIP)), None);
    // IPv4 with that number.
    let rest = [NEIGHBOUR_SOLICITATION; 40];
    assert_eq!(asked(&packet(false, (CLIENT, OTHER), ICMPV6, &rest)), None);
}

#[test]
fn only_headers_are_copied() {
    let tcp = |offset: u8| {
        let mut header = transport(1, 2);
        header[12] = offset << 4;
        header.extend([0; 100]);
        header
    };
    for (is_v6, ip) in [(false, 20), (true, 40)] {
        let of =
            |protocol, rest: &[u8]| header_length(&packet(is_v6, (CLIENT, VIP), protocol, rest));
        assert_eq!(of(TCP, &tcp(5)), ip + 20);
        assert_eq!(of(TCP, &tcp(15)), ip + 60);
        // Less than there can be is taken for the least.
        assert_eq!(of(TCP, &tcp(0)), ip + 20);
        assert_eq!(of(UDP, &[0; 100]), ip + 8);
        assert_eq!(of(SCTP, &[0; 100]), ip + 12);
        assert_eq!(of(47, &[0; 100]), ip);
        // Never more than there is.
        assert_eq!(of(TCP, &tcp(15)[..30]), ip + 30);
        assert_eq!(of(UDP, &[0; 3]), ip + 3);

        let echo = if is_v6 { 128 } else { 8 };
        let whole = icmp(is_v6, (CLIENT, VIP), echo, &[0; 100]);
        assert_eq!(header_length(&whole), ip + 8);
        // Of an error, with the headers that it quotes and the first eight bytes behind them.
        let quoted = packet(is_v6, (VIP, CLIENT), UDP, &[9; 60]);
        let error = icmp(is_v6, (CLIENT, VIP), if is_v6 { 1 } else { 3 }, &quoted);
        assert_eq!(header_length(&error), ip + 8 + ip + 8);
    }
    let quoted = options(&[1; 40], 0, (VIP, CLIENT), UDP, &[9; 60]);
    let error = icmp(false, (CLIENT, VIP), 3, &quoted);
    assert_eq!(header_length(&error), 20 + 8 + 60 + 8);
    let room = u32::try_from(HEADER_BYTES).expect("small");
    assert_eq!(header_length(&options(&[1; 40], 0, (CLIENT, VIP), TCP, &tcp(15))), 120);
    let chain: Vec<u8> = [UDP, 15].into_iter().chain([0; 126]).chain([0; 40]).collect();
    assert_eq!(header_length(&packet(true, (CLIENT, VIP), HOP_BY_HOP, &chain)), room);
}

/// Extension headers, each with its length in units of eight bytes beyond the first.
fn chain(kinds: &[(u8, u8)], last: u8, rest: &[u8]) -> (u8, Vec<u8>) {
    let mut bytes = Vec::new();
    for (at, (kind, units)) in kinds.iter().enumerate() {
        let next = kinds.get(at + 1).map_or(last, |next| next.0);
        let (said, length) = match *kind {
            FRAGMENT => (0, 8),
            // In units of four bytes, without the first two.
            AUTHENTICATION => (units * 2, usize::from(*units) * 8 + 8),
            _ => (*units, usize::from(*units) * 8 + 8),
        };
        bytes.extend([next, said]);
        bytes.extend(core::iter::repeat_n(0, length - 2));
    }
    bytes.extend(rest);
    (kinds.first().map_or(last, |first| first.0), bytes)
}

proptest! {
    /// The filter and the parser that reads all of a packet agree on what both read.
    #[test]
    fn it_agrees_with_the_parser(
        is_v6: bool,
        words in 0..=10_usize,
        kinds in proptest::collection::vec(
            (
                prop_oneof![
                    Just(HOP_BY_HOP), Just(ROUTING), Just(FRAGMENT), Just(AUTHENTICATION),
                    Just(DESTINATION_OPTIONS)
                ],
                0..3_u8,
            ),
            0..=5,
        ),
        protocol in prop_oneof![Just(TCP), Just(UDP), Just(SCTP), Just(47)],
        payload in 0..40_usize,
    ) {
        let rest: Vec<u8> = transport(1, 2).into_iter().chain(core::iter::repeat_n(0, payload)).collect();
        let bytes = if is_v6 {
            let (next, bytes) = chain(&kinds, protocol, &rest);
            packet(true, (CLIENT, VIP), next, &bytes)
        } else {
            options(&std::vec![1; words * 4], 0, (CLIENT, VIP), protocol, &rest)
        };
        let length = u32::try_from(bytes.len()).expect("short");
        let ip = Ip::find(bytes.as_slice()).expect("an IP header");
        let details = ip.details(bytes.as_slice(), length).expect("well-formed");
        let head = read(&bytes);
        // An authentication header and others of every length are walked alike.
        prop_assert!(u32::try_from(kinds.len()).expect("few") <= MAX_EXTENSION_HEADERS);
        if !is_v6 || kinds.len() <= EXTENSION_HEADERS as usize {
            prop_assert_eq!(head.protocol, details.protocol);
            let headers = details.length - details.payload_length;
            let room = u32::try_from(HEADER_BYTES).expect("small");
            prop_assert_eq!(head.header_length(&Packet(&bytes), length), headers.min(room));
        }
    }

    /// Whatever the bytes are: no panic, no overflow, no more headers than there is.
    #[test]
    fn no_input_is_believed(
        mut bytes in proptest::collection::vec(any::<u8>(), 0..200),
        first in prop_oneof![Just(0x45_u8), Just(0x4f), Just(0x60), any::<u8>()],
        next in prop_oneof![Just(0_u8), Just(43), Just(44), Just(51), Just(58), any::<u8>()],
        protocol in prop_oneof![Just(1_u8), Just(6), Just(17), any::<u8>()],
        roles in 0..8_u32,
    ) {
        for (at, value) in [(0, first), (6, next), (9, protocol)] {
            if let Some(byte) = bytes.get_mut(at) {
                *byte = value;
            }
        }
        let length = u32::try_from(bytes.len()).expect("short");
        let ending = Head::read(&Ending(&bytes));
        if let Some(head) = Head::read(&Packet(&bytes)) {
            let watch = Watch::default().role(head.destination, roles);
            head.matters(&Packet(&bytes), &watch);
            head.matters(&Ending(&bytes), &watch);
            head.solicited(&Packet(&bytes));
            for copied in [
                head.header_length(&Packet(&bytes), length),
                head.header_length(&Ending(&bytes), length),
            ] {
                prop_assert!(copied <= length.min(u32::try_from(HEADER_BYTES).expect("small")));
            }
            // Where it ends decides about extension headers alone.
            if let Some(ending) = ending {
                prop_assert_eq!(ending, head);
            }
        } else {
            prop_assert_eq!(ending, None);
        }
    }
}
