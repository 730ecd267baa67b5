//! The evidence: everything that was learned of a node, in one document.
//!
//! Rules rest on this and on nothing else, so a verdict can be judged again from a file, without
//! root and on another machine. Map entries are kept as the raw bytes that the kernel handed out;
//! what they mean is written beside them for human readers and derived again when a file is read.

mod entries;
pub mod file;
pub mod injection;
pub mod mask;
pub mod network;
pub mod programs;
mod record;
pub mod signature;
pub mod simulation;
pub mod tables;
pub mod trace;

use std::{
    collections::BTreeMap,
    fmt,
    net::IpAddr,
    path::{Path, PathBuf},
    str::FromStr,
};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize, Serializer};

pub use entries::Entries;
pub(crate) use entries::{Hex, parse_hex};
pub use record::{Coverage, MapRecord};

use crate::cilium::proto::Protocol;

/// The name of the document format. A reader takes any minor of major 1.
pub const SCHEMA: &str = "inspector.evidence/1";

/// Fields are added within a major; this counts the additions.
pub const SCHEMA_MINOR: u32 = 1;

/// Everything that was learned, from one node at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Evidence {
    /// `inspector.evidence/1`
    pub schema: String,
    /// Minor version of the schema.
    pub minor: u32,
    /// What collected it.
    pub tool: Tool,
    /// Where.
    pub host: Host,
    /// When.
    pub time: Time,
    /// The question that was asked, which is what the entries were chosen for.
    pub subject: Subject,
    /// Devices that the question is narrowed to; all if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub via: Vec<String>,
    /// The BPF file systems that hold Cilium's pins.
    pub bpffs: Vec<Bpffs>,
    /// Network devices that Cilium's pins and maps name.
    pub devices: Vec<Device>,
    /// Number of entries of the services maps by the protocol in their keys, those that are not
    /// kept here included: keys without any protocol are those of Cilium before 1.17.
    pub services_by_protocol: BTreeMap<String, u64>,
    /// The maps that were read.
    pub maps: Vec<MapRecord>,
    /// Maglev tables of the VIP's frontends, where they have one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub maglev: Vec<MaglevTable>,
    /// Attached programs, where they were read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attachments: Option<programs::Attachments>,
    /// The network, where it was read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<network::Network>,
    /// Real packets, where they were observed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<trace::Trace>,
    /// Runs of Cilium's programs on synthetic packets, where that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub simulation: Option<simulation::Simulation>,
    /// Real packets that were made to arrive, where that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub injection: Option<injection::Injection>,
    /// What was looked at, what not, and why.
    pub sources: Vec<Source>,
    /// What was said of it when it was collected. Nothing rests on this: a verdict is judged
    /// again from the rest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<serde_json::Value>,
}

/// The program that collected the evidence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Tool {
    /// `inspect`
    pub name: String,
    /// Its version.
    pub version: String,
    /// Its arguments.
    pub arguments: Vec<String>,
}

/// The machine.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub struct Host {
    /// Host name.
    pub name: String,
    /// Random id of the boot.
    pub boot_id: String,
    /// Kernel release.
    pub kernel: String,
    /// Machine architecture.
    pub architecture: String,
    /// Number of possible CPUs (values of an entry of a per-CPU map).
    pub cpus: usize,
    /// Effective capabilities of the collecting process, of those that matter here.
    pub capabilities: Vec<String>,
    /// Kernel lockdown mode, where the kernel has the feature.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lockdown: Option<String>,
}

/// When the evidence was collected.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub struct Time {
    /// Start, UTC, RFC 3339.
    pub started: String,
    /// End, UTC, RFC 3339.
    pub ended: String,
    /// `CLOCK_MONOTONIC` at the end, nanoseconds: the clock of Cilium's agent liveness.
    pub monotonic_ns: u64,
}

/// What was asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Subject {
    /// One VIP.
    Vip(VipQuery),
    /// The load balancer tables of the node.
    Tables,
    /// Which programs are attached where.
    Datapath {
        /// A process whose socket hooks were asked for.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pid: Option<u32>,
    },
}

impl Subject {
    /// What kind of question it is, in words.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Vip(_) => "one VIP",
            Self::Tables => "all services of a node",
            Self::Datapath { .. } => "the programs of a node",
        }
    }
}

/// A VIP, and which of its frontends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VipQuery {
    /// The address.
    pub address: IpAddr,
    /// Only this port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Only this protocol.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub protocol: Option<Protocol>,
    /// Seen by a client with this address: source ranges depend on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<IpAddr>,
}

impl fmt::Display for VipQuery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.address, self.port) {
            (address, None) => write!(f, "{address}")?,
            (IpAddr::V4(address), Some(port)) => write!(f, "{address}:{port}")?,
            (IpAddr::V6(address), Some(port)) => write!(f, "[{address}]:{port}")?,
        }
        match self.protocol {
            Some(protocol) => write!(f, "/{protocol}"),
            None => Ok(()),
        }
    }
}

/// Text that names no VIP.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VipQueryError {
    /// The address is none.
    #[error(
        "`{0}` is no IP address: give ADDR, ADDR:PORT or ADDR:PORT/PROTO, such as 192.168.2.20, \
         192.168.2.20:443/tcp or [fd00:2::20]:443"
    )]
    Address(String),
    /// The port is none.
    #[error("`{0}` is no port: use a number from 1 to 65535")]
    Port(String),
    /// The protocol is none.
    #[error(transparent)]
    Protocol(#[from] crate::cilium::proto::ProtocolError),
    /// A protocol without a port.
    #[error("`{0}` has a protocol but no port: write ADDR:PORT/PROTO")]
    ProtocolWithoutPort(String),
    /// An address that can be no VIP.
    #[error("{0} can be no VIP: it is {1}")]
    NoVip(IpAddr, &'static str),
}

impl FromStr for VipQuery {
    type Err = VipQueryError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (place, protocol) = match text.split_once('/') {
            Some((place, protocol)) => (place, Some(protocol.parse()?)),
            None => (text, None),
        };
        let (address, port) = split_port(place);
        let address: IpAddr =
            address.parse().map_err(|_| VipQueryError::Address(text.to_owned()))?;
        let port = match port {
            None => None,
            Some(port) => Some(
                port.parse()
                    .ok()
                    .filter(|&port| port != 0)
                    .ok_or_else(|| VipQueryError::Port(port.to_owned()))?,
            ),
        };
        if protocol.is_some() && port.is_none() {
            return Err(VipQueryError::ProtocolWithoutPort(text.to_owned()));
        }
        // A VIP given in the IPv4-mapped form of IPv6 is an IPv4 VIP in Cilium's maps.
        let address = address.to_canonical();
        if address.is_multicast() {
            return Err(VipQueryError::NoVip(address, "a multicast address"));
        }
        if address.is_loopback() {
            return Err(VipQueryError::NoVip(address, "a loopback address"));
        }
        Ok(Self { address, port, protocol, source: None })
    }
}

/// Splits `1.2.3.4:80`, `[::1]:80`, `[::1]` and `::1`; a bare IPv6 address has no port.
fn split_port(place: &str) -> (&str, Option<&str>) {
    if let Some(rest) = place.strip_prefix('[')
        && let Some((address, after)) = rest.split_once(']')
    {
        return match after.strip_prefix(':') {
            Some(port) => (address, Some(port)),
            None if after.is_empty() => (address, None),
            // Not an address: let the caller's parse fail on the whole.
            None => (place, None),
        };
    }
    match place.split_once(':') {
        Some((address, port)) if !port.contains(':') => (address, Some(port)),
        _ => (place, None),
    }
}

/// A BPF file system that holds pins of Cilium's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Bpffs {
    /// Where it is mounted; what is not UTF-8 in it is replaced in a file.
    #[serde(serialize_with = "lossy")]
    pub path: PathBuf,
    /// Device number of the file system, `major:minor`.
    pub device: String,
    /// Whether this is the one that was read.
    pub read: bool,
    /// Names below `tc/globals`, sorted.
    pub pins: Vec<String>,
}

/// A path need not be UTF-8, JSON must be.
fn lossy<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&path.display())
}

/// A network device that Cilium's state names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Device {
    /// Interface index, valid in the network namespace in which the evidence was collected.
    pub ifindex: u32,
    /// Interface name, if there is an interface with this index.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The pin or map that names it.
    pub named_by: Vec<String>,
}

/// The Maglev table of one frontend: the inner map that the outer one names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MaglevTable {
    /// Name of the outer map.
    pub map: String,
    /// Reverse NAT index of the frontend.
    pub frontend: u16,
    /// Kernel id of the inner map.
    pub table_id: u32,
    /// The inner map's one value, hexadecimal digits: a backend id for each place.
    pub value: String,
}

/// How far a source of evidence could be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SourceStatus {
    /// Read completely.
    Complete,
    /// Read in part.
    Partial,
    /// Could not be read.
    Failed,
    /// Not there.
    Absent,
    /// Not looked at.
    NotAttempted,
}

/// One thing that was looked at, or not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Source {
    /// What it is: a map's name, `programs per device`, …
    pub what: String,
    /// How far it could be used.
    pub status: SourceStatus,
    /// Why, where it is not complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vips_are_read_in_every_form() {
        for (text, shown) in [
            ("192.168.2.20", "192.168.2.20"),
            ("192.168.2.20:443", "192.168.2.20:443"),
            ("192.168.2.20:443/tcp", "192.168.2.20:443/TCP"),
            ("fd00:2::20", "fd00:2::20"),
            ("[fd00:2::20]", "fd00:2::20"),
            ("[fd00:2::20]:443/UDP", "[fd00:2::20]:443/UDP"),
            ("::ffff:192.168.2.20", "192.168.2.20"),
        ] {
            assert_eq!(text.parse::<VipQuery>().unwrap().to_string(), shown, "{text}");
        }
    }

    #[test]
    fn rubbish_is_refused_with_what_would_be_right() {
        for (text, says) in [
            ("", "no IP address"),
            ("nonsense", "no IP address"),
            ("192.168.2", "no IP address"),
            ("192.168.2.20:", "no port"),
            ("192.168.2.20:0", "no port"),
            ("192.168.2.20:70000", "no port"),
            ("192.168.2.20:443/icecream", "no protocol"),
            ("192.168.2.20/tcp", "no port"),
            ("[fd00:2::20", "no IP address"),
            ("[fd00:2::20]443", "no IP address"),
            ("224.0.0.1", "multicast"),
            ("127.0.0.1:80", "loopback"),
        ] {
            let error = text.parse::<VipQuery>().unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
