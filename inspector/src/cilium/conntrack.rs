//! The conntrack maps: connections that the datapath knows.
//!
//! Layout: `struct ct_entry` of Cilium's `bpf/lib/common.h` (formerly `conntrack.h`), 56 bytes from
//! 1.10 to 1.21, but with a changing first half: counters up to 1.15, a backend id and counters
//! from 1.16 on, and from 1.19 on a NAT address instead of the backend id in entries that are not
//! a service's. The sizes do not tell these apart, so the typed entry has what all of them share,
//! and the first 16 bytes as they are.
//!
//! The key of a **service** entry has the addresses as in the client's packet and the two ports
//! swapped; every other key has the addresses swapped and the ports as in the packet. The typed
//! entry hides this: `source` is always who opened the connection.

use std::{fmt, net::IpAddr};

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use zerocopy::IntoBytes;

use super::{
    error::{DecodeError, EncodeError},
    layout::Layout,
    order::{HostU16, HostU32, HostU64, NetU16},
    proto::Protocol,
    raw::{self, assert_sizes, raw_struct},
    tuple::{Tuple, TupleFlags},
};

raw_struct! {
    /// Value of the conntrack maps, 56 bytes.
    struct ConntrackValue {
        /// Differs between releases, see [`CtHead`].
        pub head: [u8; 16],
        /// Packets; up to 1.15 those sent only. 0 from 1.17 on unless the agent accounts for them.
        pub packets: HostU64,
        /// Bytes, as for the packets.
        pub bytes: HostU64,
        /// When the entry expires, datapath clock.
        pub lifetime: HostU32,
        /// See [`CtFlags`].
        pub flags: HostU16,
        /// Reverse NAT index.
        pub rev_nat_index: NetU16,
        /// Up to 1.17 the index of a device (host order), 1.18 zero, from 1.19 the NAT port
        /// (network order) of entries that are not a service's.
        pub word40: [u8; 2],
        /// TCP flags seen from the source.
        pub tx_flags_seen: u8,
        /// TCP flags seen from the destination.
        pub rx_flags_seen: u8,
        /// Security identity of the source.
        pub source_identity: HostU32,
        /// When a packet from the source was last reported, datapath clock.
        pub last_tx_report: HostU32,
        /// When a packet from the destination was last reported, datapath clock.
        pub last_rx_report: HostU32,
    }
}
assert_sizes! { ConntrackValue = 56 }

/// State bits of a connection.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct CtFlags(pub u16);

impl CtFlags {
    /// The destination has closed.
    pub const RX_CLOSING: u16 = 1 << 0;
    /// The source has closed.
    pub const TX_CLOSING: u16 = 1 << 1;
    /// A NAT46 connection (not used since 1.12).
    pub const NAT46: u16 = 1 << 2;
    /// An endpoint that reached itself through a service.
    pub const LB_LOOPBACK: u16 = 1 << 3;
    /// A TCP packet other than SYN was seen.
    pub const SEEN_NON_SYN: u16 = 1 << 4;
    /// Through a node port or load balancer frontend: replies are translated back.
    pub const NODE_PORT: u16 = 1 << 5;
    /// Redirected to a proxy.
    pub const PROXY_REDIRECT: u16 = 1 << 6;
    /// DSR.
    pub const DSR: u16 = 1 << 7;
    /// From the L7 load balancer (1.12+).
    pub const FROM_L7LB: u16 = 1 << 8;
    /// Came in through a tunnel (1.14+).
    pub const FROM_TUNNEL: u16 = 1 << 10;

    /// Whether replies are translated back to a frontend's address.
    #[must_use]
    pub fn node_port(self) -> bool {
        self.0 & Self::NODE_PORT != 0
    }

    /// Whether either side has closed.
    #[must_use]
    pub fn closing(self) -> bool {
        self.0 & (Self::RX_CLOSING | Self::TX_CLOSING) != 0
    }

    /// The words that `cilium-dbg` prints for the bits that are set.
    pub fn words(self) -> impl Iterator<Item = &'static str> {
        const WORDS: [(u16, &str); 10] = [
            (CtFlags::RX_CLOSING, "RxClosing"),
            (CtFlags::TX_CLOSING, "TxClosing"),
            (CtFlags::NAT46, "Nat64"),
            (CtFlags::LB_LOOPBACK, "LBLoopback"),
            (CtFlags::SEEN_NON_SYN, "SeenNonSyn"),
            (CtFlags::NODE_PORT, "NodePort"),
            (CtFlags::PROXY_REDIRECT, "ProxyRedirect"),
            (CtFlags::DSR, "DSRInternal"),
            (CtFlags::FROM_L7LB, "FromL7LB"),
            (CtFlags::FROM_TUNNEL, "FromTunnel"),
        ];
        WORDS.into_iter().filter(move |(bit, _)| self.0 & bit != 0).map(|(_, word)| word)
    }
}

/// The first 16 bytes of a value, whose meaning depends on release and entry.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct CtHead(pub [u8; 16]);

impl fmt::Display for CtHead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for CtHead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CtHead({self})")
    }
}

impl Serialize for CtHead {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for CtHead {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        // `from_str_radix` would accept a sign.
        Some(&text)
            .filter(|text| text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit()))
            .and_then(|text| u128::from_str_radix(text, 16).ok())
            .map(|head| Self(head.to_be_bytes()))
            .ok_or_else(|| serde::de::Error::custom("expected 32 hexadecimal digits"))
    }
}

/// A connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Conntrack {
    /// Who opened the connection.
    pub source: IpAddr,
    /// Port of the source; 0 for ICMP errors.
    pub source_port: u16,
    /// Where to: the frontend in a service entry, otherwise behind the translation.
    pub destination: IpAddr,
    /// Port of the destination.
    pub destination_port: u16,
    /// Protocol.
    pub protocol: Protocol,
    /// Which kind of entry it is, and for which direction.
    pub tuple_flags: TupleFlags,
    /// State bits.
    pub flags: CtFlags,
    /// Reverse NAT index of the frontend, 0 is none.
    pub rev_nat_index: u16,
    /// Security identity of the source.
    pub source_identity: u32,
    /// When the entry expires. Datapath clock: seconds of `CLOCK_MONOTONIC`, or jiffies / 256
    /// where the agent chose so.
    pub lifetime: u32,
    /// Packets; see [`ConntrackValue::packets`].
    pub packets: u64,
    /// Bytes; see [`ConntrackValue::bytes`].
    pub bytes: u64,
    /// TCP flags seen from the source.
    pub tx_flags_seen: u8,
    /// TCP flags seen from the destination.
    pub rx_flags_seen: u8,
    /// When a packet from the source was last reported, datapath clock.
    pub last_tx_report: u32,
    /// When a packet from the destination was last reported, datapath clock.
    pub last_rx_report: u32,
    /// The first 16 bytes of the value.
    pub head: CtHead,
    /// The two bytes at offset 40: device index, or NAT port, by release.
    pub word40: [u8; 2],
}

impl Conntrack {
    /// Reads an entry.
    ///
    /// # Errors
    /// [`DecodeError::Size`] if key or value are not as long as `layout` says.
    pub fn decode(layout: &'static Layout, key: &[u8], value: &[u8]) -> Result<Self, DecodeError> {
        let Tuple { daddr, saddr, dport, sport, protocol, flags } = Tuple::decode(layout, key)?;
        let (source, source_port, destination, destination_port) = if flags.is_service() {
            (saddr, dport, daddr, sport)
        } else {
            (daddr, sport, saddr, dport)
        };
        let value: &ConntrackValue = raw::value(layout, value)?;
        Ok(Self {
            source,
            source_port,
            destination,
            destination_port,
            protocol,
            tuple_flags: flags,
            flags: CtFlags(value.flags.get()),
            rev_nat_index: value.rev_nat_index.get(),
            source_identity: value.source_identity.get(),
            lifetime: value.lifetime.get(),
            packets: value.packets.get(),
            bytes: value.bytes.get(),
            tx_flags_seen: value.tx_flags_seen,
            rx_flags_seen: value.rx_flags_seen,
            last_tx_report: value.last_tx_report.get(),
            last_rx_report: value.last_rx_report.get(),
            head: CtHead(value.head),
            word40: value.word40,
        })
    }

    /// The backend of a service entry (all releases have it at the same place); `None` for every
    /// other entry.
    #[must_use]
    pub fn backend_id(&self) -> Option<u64> {
        let [_, id] = raw::halves(self.head.0);
        self.tuple_flags.is_service().then(|| u64::from_le_bytes(id))
    }

    /// The bytes of key and value in `layout`.
    ///
    /// # Errors
    /// [`EncodeError::Family`] if one of the addresses is of the other family.
    pub fn encode(&self, layout: &'static Layout) -> Result<(Vec<u8>, Vec<u8>), EncodeError> {
        let key = Self::key(
            layout,
            (self.source, self.source_port),
            (self.destination, self.destination_port),
            self.protocol,
            self.tuple_flags,
        )?;
        let value = ConntrackValue {
            head: self.head.0,
            packets: self.packets.into(),
            bytes: self.bytes.into(),
            lifetime: self.lifetime.into(),
            flags: self.flags.0.into(),
            rev_nat_index: self.rev_nat_index.into(),
            word40: self.word40,
            tx_flags_seen: self.tx_flags_seen,
            rx_flags_seen: self.rx_flags_seen,
            source_identity: self.source_identity.into(),
            last_tx_report: self.last_tx_report.into(),
            last_rx_report: self.last_rx_report.into(),
        };
        Ok((key, value.as_bytes().to_vec()))
    }

    /// The bytes of the key alone, of a connection that `source` opened to `destination` (each an
    /// address and a port, 0 for ICMP errors).
    ///
    /// # Errors
    /// [`EncodeError::Family`] if one of the addresses is of the other family.
    pub fn key(
        layout: &'static Layout,
        source: (IpAddr, u16),
        destination: (IpAddr, u16),
        protocol: Protocol,
        flags: TupleFlags,
    ) -> Result<Vec<u8>, EncodeError> {
        let (daddr, saddr, dport, sport) = if flags.is_service() {
            (destination.0, source.0, source.1, destination.1)
        } else {
            (source.0, destination.0, destination.1, source.1)
        };
        Tuple { daddr, saddr, dport, sport, protocol, flags }.encode(layout)
    }
}
