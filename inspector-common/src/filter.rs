//! Which packets matter, decided in the kernel for every packet that goes by, and how much of such
//! a packet is headers.
//!
//! It runs under the verifier as well as in tests on the host: every loop is bounded, nothing is
//! allocated, no length in the packet is believed before it is compared. It reads as little as it
//! can: most packets do not matter.

use core::hint::black_box;

use crate::observe::{Address, Endpoint, HEADER_BYTES, role};
use crate::packet::{ICMP, ICMPV6, SCTP, TCP, UDP, is_extension};

/// A packet from its IP header on.
pub trait Source {
    /// `N` words as they stand in memory from `offset` (bytes) on, or nothing if the headers end
    /// before.
    fn words<const N: usize>(&self, offset: u32) -> Option<[u32; N]>;
}

/// What is watched.
pub trait Sets {
    /// Whether the address may have a [`role`]: a quick answer, of which "no" is certain.
    fn maybe(&self, address: &Address) -> bool;
    /// The roles of an address.
    fn roles(&self, address: &Address) -> u32;
    /// Whether the endpoint is watched.
    fn endpoint(&self, endpoint: &Endpoint) -> bool;
    /// Whether packets that this address exchanges with a watched one matter.
    fn client(&self, address: &Address) -> bool;
}

/// What the filter has read of an IP header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// Source address.
    pub source: Address,
    /// Destination address.
    pub destination: Address,
    /// The transport protocol, behind IPv6's extension headers.
    pub protocol: u8,
    /// The fragment's offset, as it stands in memory: where it is not 0, there is no transport
    /// header. (A `bool` would keep two ways apart, see [`veiled`].)
    pub later: u32,
    /// Offset of the transport header, bytes.
    pub end: u32,
}

/// The same value, of which the verifier knows nothing any more; `key` is anything that was read from
/// the packet.
///
/// What the verifier knows of a value (that it is UDP's number on this way, that there is no role on
/// that one) keeps ways apart that do the same from here on, and it would go over the rest of the
/// program for each of them: most of the time until the observers are attached.
#[inline(always)]
#[must_use]
pub fn veiled(value: u32, key: u32) -> u32 {
    black_box(value ^ key) ^ key
}

/// More extension headers than this are not followed, and those of quoted packets are not: each one
/// more makes the verifier's work longer. Ports and types are then those of no protocol.
const EXTENSION_HEADERS: u32 = 4;

/// The offset in the second word of an IPv4 header, as it stands in memory.
const FRAGMENT_OFFSET_V4: u32 = u32::from_ne_bytes([0, 0, 0x1f, 0xff]);
/// The offset in the first word of IPv6's fragment header, as it stands in memory.
const FRAGMENT_OFFSET_V6: u32 = u32::from_ne_bytes([0, 0, 0xff, 0xf8]);

const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
const NEIGHBOUR_SOLICITATION: u8 = 135;

impl Head {
    /// No header.
    pub const NONE: Self =
        Self { source: Address::NONE, destination: Address::NONE, protocol: 0, later: 0, end: 0 };

    /// Reads the IP header that the packet begins with; nothing if there is none.
    #[inline(always)]
    pub fn read<S: Source>(packet: &S) -> Option<Self> {
        let [first] = packet.words::<1>(0)?;
        match first.to_ne_bytes()[0] >> 4 {
            4 => Self::v4(packet, 0),
            6 => Self::v6(packet),
            _ => None,
        }
    }

    /// Reads the IPv4 header at `at`; nothing if there is none.
    #[inline(always)]
    pub fn v4<S: Source>(packet: &S, at: u32) -> Option<Self> {
        let [first, second, third, source, destination] = packet.words::<5>(at)?;
        let [version_length, ..] = first.to_ne_bytes();
        if version_length >> 4 != 4 {
            return None;
        }
        Some(Self {
            source: Address::v4(source),
            destination: Address::v4(destination),
            protocol: third.to_ne_bytes()[1],
            later: second & FRAGMENT_OFFSET_V4,
            // Whoever reads all of it will see that less is wrong.
            end: at + u32::from(version_length & 0xf).max(5) * 4,
        })
    }

    /// Reads the IPv6 header that the packet begins with, and goes over its extension headers;
    /// nothing if there is none.
    #[inline(always)]
    pub fn v6<S: Source>(packet: &S) -> Option<Self> {
        let mut head = Self::v6_fixed(packet, 0)?;
        for _ in 0..EXTENSION_HEADERS {
            if head.later != 0 || !is_extension(head.protocol) {
                break;
            }
            let [word] = packet.words::<1>(head.end)?;
            let [following, units, ..] = word.to_ne_bytes();
            let units = u32::from(units);
            let (length, later) = match head.protocol {
                FRAGMENT => (8, word & FRAGMENT_OFFSET_V6),
                AUTHENTICATION => ((units + 2) * 4, 0),
                _ => ((units + 1) * 8, 0),
            };
            head.end += length;
            head.later = later;
            head.protocol = following;
        }
        head.later = veiled(head.later, head.source.words[0]);
        Some(head)
    }

    #[inline(always)]
    fn v6_fixed<S: Source>(packet: &S, at: u32) -> Option<Self> {
        // All at once: a reading costs more than what is read.
        let words = packet.words::<10>(at)?;
        if words[0].to_ne_bytes()[0] >> 4 != 6 {
            return None;
        }
        Some(Self {
            source: Address::v6([words[2], words[3], words[4], words[5]]),
            destination: Address::v6([words[6], words[7], words[8], words[9]]),
            protocol: words[1].to_ne_bytes()[2],
            later: 0,
            end: at + 40,
        })
    }

    /// [`protocol`](Self::protocol), see [`veiled`].
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "it was a u8 before")]
    fn veiled_protocol(&self) -> u8 {
        veiled(u32::from(self.protocol), self.source.words[0]) as u8
    }

    /// Whether it is a fragment without transport header.
    #[inline(always)]
    fn is_later(&self) -> bool {
        veiled(self.later, self.source.words[0]) != 0
    }

    #[inline(always)]
    const fn is_v6(&self) -> bool {
        self.destination.family == 6
    }

    /// Whether the packet matters: by its own addresses and ports, or by those that an ICMP error
    /// quotes.
    #[inline(always)]
    pub fn matters<S: Source, W: Sets>(&self, packet: &S, sets: &W) -> bool {
        if self.pair_matters(packet, sets) {
            return true;
        }
        // No closures here: one that is not put in its place is a program of its own, and before
        // Linux 6.2 the verifier keeps all ways apart where there is more than one.
        let Some(at) = self.quoted(packet) else { return false };
        // The family of both is the same.
        let quoted = if self.is_v6() { Self::v6_fixed(packet, at) } else { Self::v4(packet, at) };
        match quoted {
            Some(quoted) => quoted.pair_matters(packet, sets),
            None => false,
        }
    }

    #[inline(always)]
    fn pair_matters<S: Source, W: Sets>(&self, packet: &S, sets: &W) -> bool {
        let key = self.source.words[0];
        let to = if sets.maybe(&self.destination) { sets.roles(&self.destination) } else { 0 };
        let from = if sets.maybe(&self.source) { sets.roles(&self.source) } else { 0 };
        let (to, from) = (veiled(to, key), veiled(from, key));
        if (to | from) & (role::ANY_PORT | role::SOME_PORTS) == 0 {
            return false;
        }
        let to = if sets.client(&self.source) { to } else { 0 };
        let from = if sets.client(&self.destination) { from } else { 0 };
        let (to, from) = (veiled(to, key), veiled(from, key));
        if (to | from) & role::ANY_PORT != 0 {
            return true;
        }
        if (to | from) & role::SOME_PORTS == 0 {
            return false;
        }
        if self.is_later() {
            return true;
        }
        let protocol = self.veiled_protocol();
        if !matches!(protocol, TCP | UDP | SCTP) {
            return false;
        }
        let Some([ports]) = packet.words::<1>(self.end) else { return false };
        let [a, b, c, d] = ports.to_ne_bytes();
        let endpoint = |address, port| Endpoint { address, port, protocol, reserved: 0 };
        to & role::SOME_PORTS != 0
            && sets.endpoint(&endpoint(self.destination, u16::from_be_bytes([c, d])))
            || from & role::SOME_PORTS != 0
                && sets.endpoint(&endpoint(self.source, u16::from_be_bytes([a, b])))
    }

    /// Offset of the packet that this one quotes, if it is an ICMP error.
    #[inline(always)]
    fn quoted<S: Source>(&self, packet: &S) -> Option<u32> {
        let is_v6 = self.is_v6();
        if self.is_later() || self.veiled_protocol() != if is_v6 { ICMPV6 } else { ICMP } {
            return None;
        }
        let [word] = packet.words::<1>(self.end)?;
        is_icmp_error(is_v6, word.to_ne_bytes()[0]).then_some(self.end + 8)
    }

    /// The address that a neighbour solicitation asks for.
    #[inline(always)]
    pub fn solicited<S: Source>(&self, packet: &S) -> Option<Address> {
        if self.is_later() || self.veiled_protocol() != ICMPV6 || !self.is_v6() {
            return None;
        }
        let [word] = packet.words::<1>(self.end)?;
        if word.to_ne_bytes()[0] != NEIGHBOUR_SOLICITATION {
            return None;
        }
        packet.words::<4>(self.end + 8).map(Address::v6)
    }

    /// How many bytes from the IP header on are headers: IP's, the transport's, and of an ICMP error
    /// those of the packet that it quotes. At most [`HEADER_BYTES`], and `length`, which is that of
    /// the packet.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "HEADER_BYTES is small")]
    pub fn header_length<S: Source>(&self, packet: &S, length: u32) -> u32 {
        let more = match self.veiled_protocol() {
            _ if self.is_later() => 0,
            TCP => match packet.words::<1>(self.end + 12) {
                Some([word]) => u32::from((word.to_ne_bytes()[0] >> 4).max(5)) * 4,
                None => 0,
            },
            UDP => 8,
            SCTP => 12,
            ICMP | ICMPV6 => self.icmp_length(packet),
            _ => 0,
        };
        let all = veiled(self.end + more, self.source.words[0]);
        all.min(length).min(HEADER_BYTES as u32)
    }

    #[inline(always)]
    fn icmp_length<S: Source>(&self, packet: &S) -> u32 {
        match self.quoted(packet) {
            Some(at) => match packet.words::<1>(at) {
                Some([word]) => {
                    let [first, ..] = word.to_ne_bytes();
                    // With the first eight bytes of the transport's: ports and TCP's sequence.
                    8 + 8 + if first >> 4 == 4 { u32::from(first & 0xf) * 4 } else { 40 }
                }
                None => 8,
            },
            // The target of a neighbour solicitation is a header's part too.
            None => 8 + if self.solicited(packet).is_some() { 16 } else { 0 },
        }
    }
}

/// Whether messages of this type quote the packet that they are about.
#[inline(always)]
#[must_use]
pub const fn is_icmp_error(is_v6: bool, kind: u8) -> bool {
    if is_v6 { kind >= 1 && kind <= 4 } else { matches!(kind, 3 | 4 | 5 | 11 | 12) }
}

#[cfg(test)]
mod tests;
