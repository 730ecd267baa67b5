//! The metrics map: packets and bytes per reason and direction, and from 1.16 on per place in the
//! datapath's source.
//!
//! Layout: `struct metrics_key` and `struct metrics_value` of Cilium's `bpf/lib/metrics.h` (formerly
//! `common.h`). A per-CPU map: the value holds one pair of counters for every possible CPU.

use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, IntoBytes};

use super::{
    error::DecodeError,
    layout::Layout,
    order::{HostU16, HostU64},
    raw::{self, assert_sizes, raw_struct},
    release::Release,
};

raw_struct! {
    /// Key of `cilium_metrics`, 8 bytes.
    struct MetricKey {
        /// Reason code, see [`reason_text`].
        pub reason: u8,
        /// Direction in the low 2 bits: 1 ingress, 2 egress, 3 service. The rest is padding.
        pub direction: u8,
        /// Line in the source file (1.16+; before: padding).
        pub line: HostU16,
        /// Source file, see [`file_name`] (1.16+; before: padding).
        pub file: u8,
        /// Padding, zero.
        pub pad: [u8; 3],
    }

    /// The counters of one CPU, 16 bytes.
    struct MetricValue {
        /// Packets.
        pub packets: HostU64,
        /// Bytes.
        pub bytes: HostU64,
    }
}
assert_sizes! { MetricKey = 8, MetricValue = 16 }

/// The direction that a metric counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// None was given.
    Unknown,
    /// Into the endpoint or node.
    Ingress,
    /// Out of the endpoint or node.
    Egress,
    /// In socket load balancing.
    Service,
}

impl Direction {
    /// The word that `cilium-dbg bpf metrics list` prints.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "UNKNOWN",
            Self::Ingress => "INGRESS",
            Self::Egress => "EGRESS",
            Self::Service => "SERVICE",
        }
    }

    /// From the low 2 bits of the key's byte.
    fn from_bits(bits: u8) -> Self {
        match bits & 3 {
            0 => Self::Unknown,
            1 => Self::Ingress,
            2 => Self::Egress,
            _ => Self::Service,
        }
    }

    fn bits(self) -> u8 {
        match self {
            Self::Unknown => 0,
            Self::Ingress => 1,
            Self::Egress => 2,
            Self::Service => 3,
        }
    }
}

/// Packets and bytes.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize,
)]
pub struct Counter {
    /// Packets.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
}

/// A metric with its counters.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Metric {
    /// Reason code, see [`reason_text`].
    pub reason: u8,
    /// Direction.
    pub direction: Direction,
    /// Line in the source file, 0 before 1.16.
    pub line: u16,
    /// Source file, 0 before 1.16; see [`file_name`].
    pub file: u8,
    /// The counters, one for each possible CPU.
    pub per_cpu: Vec<Counter>,
}

impl Metric {
    /// Reads an entry: `value` is the values of all possible CPUs in a row.
    ///
    /// # Errors
    /// [`DecodeError::Size`] if the key is not as long as `layout` says, or the value is not that
    /// of at least one CPU.
    pub fn decode(layout: &'static Layout, key: &[u8], value: &[u8]) -> Result<Self, DecodeError> {
        let key: &MetricKey = raw::key(layout, key)?;
        let values = <[MetricValue]>::ref_from_bytes(value)
            .ok()
            .filter(|values| !values.is_empty())
            .ok_or(DecodeError::Size {
                map: layout.name,
                part: "value",
                expected: value.len().max(1).next_multiple_of(size_of::<MetricValue>()),
                found: value.len(),
            })?;
        Ok(Self {
            reason: key.reason,
            direction: Direction::from_bits(key.direction),
            line: key.line.get(),
            file: key.file,
            per_cpu: values
                .iter()
                .map(|value| Counter { packets: value.packets.get(), bytes: value.bytes.get() })
                .collect(),
        })
    }

    /// The sum over all CPUs. Wraps around, as each CPU's counter does.
    #[must_use]
    pub fn total(&self) -> Counter {
        self.per_cpu.iter().fold(Counter::default(), |sum, counter| Counter {
            packets: sum.packets.wrapping_add(counter.packets),
            bytes: sum.bytes.wrapping_add(counter.bytes),
        })
    }

    /// The bytes of key and value.
    #[must_use]
    pub fn encode(&self) -> (Vec<u8>, Vec<u8>) {
        let key = MetricKey {
            reason: self.reason,
            direction: self.direction.bits(),
            line: self.line.into(),
            file: self.file,
            pad: [0; 3],
        };
        let value = self
            .per_cpu
            .iter()
            .map(|counter| MetricValue {
                packets: counter.packets.into(),
                bytes: counter.bytes.into(),
            })
            .flat_map(|value| value.as_bytes().to_vec())
            .collect();
        (key.as_bytes().to_vec(), value)
    }
}

/// The first reason code that is a drop; lower ones count packets that went on.
pub const FIRST_DROP: u8 = 130;

/// The words that Cilium prints for a reason code; `None` for a code that it has no words for.
///
/// Codes were only ever added from 1.10 to 1.21, never renumbered; where a code that had fallen
/// out of use was given to another reason, the newer words are given.
#[must_use]
pub fn reason_text(reason: u8) -> Option<&'static str> {
    Some(match reason {
        0 => "Success",
        2 | 134 => "Invalid packet",
        3 => "Interface",
        4 => "Interface Decrypted",
        5 => "LB, sock cgroup: No backend slot entry found",
        6 => "LB, sock cgroup: No backend entry found",
        7 => "LB, sock cgroup: Reverse entry update failed",
        8 => "LB, sock cgroup: Reverse entry stale",
        9 => "Fragmented packet",
        10 => "Fragmented packet entry update failed",
        11 => "Missed tail call to custom program",
        12 => "Interface Decrypting",
        13 => "Interface Encrypting",
        14 => "LB: sock cgroup: Reverse entry delete succeeded",
        15 => "MTU error message",
        130 => "Invalid source mac",
        131 => "Invalid destination mac",
        132 => "Invalid source ip",
        133 => "Policy denied",
        135 => "CT: Truncated or invalid header",
        136 => "Fragmentation needed",
        137 => "CT: Unknown L4 protocol",
        138 => "CT: Can't create entry from packet",
        139 => "Unsupported L3 protocol",
        140 => "Missed tail call",
        141 => "Error writing to packet",
        142 => "Unknown L4 protocol",
        143 => "Unknown ICMPv4 code",
        144 => "Unknown ICMPv4 type",
        145 => "Unknown ICMPv6 code",
        146 => "Unknown ICMPv6 type",
        147 => "Error retrieving tunnel key",
        148 => "Error retrieving tunnel options",
        149 => "Invalid Geneve option",
        150 => "Unknown L3 target address",
        151 => "Stale or unroutable IP",
        152 => "No matching local container found",
        153 => "Error while correcting L3 checksum",
        154 => "Error while correcting L4 checksum",
        155 => "CT: Map insertion failed",
        156 => "Invalid IPv6 extension header",
        157 => "IP fragmentation not supported",
        158 => "Service backend not found",
        160 => "No tunnel/encapsulation endpoint (datapath BUG!)",
        161 => "NAT 46/64 not enabled",
        162 => "Reached EDT rate-limiting drop horizon",
        163 => "Unknown connection tracking state",
        164 => "Local host is unreachable",
        165 => "No configuration available to perform policy decision",
        166 => "Unsupported L2 protocol",
        167 => "No mapping for NAT masquerade",
        168 => "Unsupported protocol for NAT masquerade",
        169 => "FIB lookup failed",
        170 => "Encapsulation traffic is prohibited",
        171 => "Invalid identity",
        172 => "Unknown sender",
        173 => "NAT not needed",
        174 => "Is a ClusterIP",
        175 => "First logical datagram fragment not found",
        176 => "Forbidden ICMPv6 message",
        177 => "Denied by LB src range check",
        178 => "Socket lookup failed",
        179 => "Socket assign failed",
        180 => "Proxy redirection not supported for protocol",
        181 => "Policy denied by denylist",
        182 => "VLAN traffic disallowed by VLAN filter",
        183 => "Incorrect VNI from VTEP",
        184 => "Failed to update or lookup TC buffer",
        185 => "No SID was found for the IP address",
        186 => "SRv6 state was removed during tail call",
        187 => "L3 translation from IPv4 to IPv6 failed (NAT46)",
        188 => "L3 translation from IPv6 to IPv4 failed (NAT64)",
        189 => "Authentication required",
        190 => "No conntrack map found",
        191 => "No nat map found",
        192 => "Invalid ClusterID",
        193 => "Unsupported packet protocol for DSR encapsulation",
        194 => "No egress gateway found",
        195 => "Traffic is unencrypted",
        196 => "TTL exceeded",
        197 => "No node ID found",
        198 => "Rate limited",
        199 => "IGMP handled",
        200 => "IGMP subscribed",
        201 => "Multicast handled",
        202 => "Host datapath not ready",
        203 => "Endpoint policy program not available",
        204 => "No Egress IP configured",
        205 => "Punt to proxy",
        206 => "No device",
        207 => "First logical datagram fragment not found from world",
        _ => return None,
    })
}

/// The source file that a metric's file number stands for, in the numbering of `release`; `None`
/// before 1.16 and for unknown numbers.
#[must_use]
pub fn file_name(file: u8, release: Release) -> Option<&'static str> {
    /// Header files from number 101 on, 1.16 and 1.17.
    const V1_16: [&str; 15] = [
        "arp.h",
        "drop.h",
        "srv6.h",
        "icmp6.h",
        "nodeport.h",
        "lb.h",
        "mcast.h",
        "ipv4.h",
        "conntrack.h",
        "l3.h",
        "trace.h",
        "encap.h",
        "encrypt.h",
        "host_firewall.h",
        "nodeport_egress.h",
    ];
    /// 1.18
    const V1_18: [&str; 17] = [
        "arp.h",
        "drop.h",
        "srv6.h",
        "icmp6.h",
        "nodeport.h",
        "lb.h",
        "mcast.h",
        "ipv4.h",
        "conntrack.h",
        "local_delivery.h",
        "trace.h",
        "encap.h",
        "encrypt.h",
        "host_firewall.h",
        "nodeport_egress.h",
        "ipv6.h",
        "classifiers.h",
    ];
    /// 1.19 and later
    const V1_19: [&str; 15] = [
        "drop.h",
        "srv6.h",
        "icmp6.h",
        "nodeport.h",
        "lb.h",
        "mcast.h",
        "ipv4.h",
        "conntrack.h",
        "local_delivery.h",
        "trace.h",
        "encap.h",
        "host_firewall.h",
        "nodeport_egress.h",
        "ipv6.h",
        "classifiers.h",
    ];
    if release < Release::V1_16 {
        return None;
    }
    let headers: &[&str] = match release {
        Release::V1_16 | Release::V1_17 => &V1_16,
        Release::V1_18 => &V1_18,
        _ => &V1_19,
    };
    match file {
        1 => Some("bpf_host.c"),
        2 => Some("bpf_lxc.c"),
        3 => Some("bpf_overlay.c"),
        4 => Some("bpf_xdp.c"),
        5 => Some("bpf_sock.c"),
        6 => Some("bpf_network.c"),
        7 => Some("bpf_wireguard.c"),
        _ => headers.get(usize::from(file.checked_sub(101)?)).copied(),
    }
}
