//! IP protocols as Cilium's keys hold them.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// An IP protocol number; 0 means "any" in Cilium's load balancer maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Protocol(pub u8);

impl Protocol {
    /// Any protocol: the keys of Cilium before 1.17, and wildcard entries.
    pub const ANY: Self = Self(0);
    /// TCP
    pub const TCP: Self = Self(6);
    /// UDP
    pub const UDP: Self = Self(17);
    /// SCTP
    pub const SCTP: Self = Self(132);
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::ANY => f.pad("ANY"),
            Self::TCP => f.pad("TCP"),
            Self::UDP => f.pad("UDP"),
            Self::SCTP => f.pad("SCTP"),
            Self(other) => other.fmt(f),
        }
    }
}

/// A protocol that is neither a known name nor a number below 256.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no protocol: use tcp, udp, sctp, any or a number from 0 to 255")]
pub struct ProtocolError(String);

impl FromStr for Protocol {
    type Err = ProtocolError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.to_ascii_lowercase().as_str() {
            "any" => Ok(Self::ANY),
            "tcp" => Ok(Self::TCP),
            "udp" => Ok(Self::UDP),
            "sctp" => Ok(Self::SCTP),
            other => other.parse().map(Self).map_err(|_| ProtocolError(text.to_owned())),
        }
    }
}

impl Serialize for Protocol {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Protocol {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}
