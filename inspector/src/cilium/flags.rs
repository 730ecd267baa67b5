//! The 16 flag bits of a service entry, and the words that `cilium-dbg bpf lb list` has for them.

use serde::{Deserialize, Serialize};

/// Flag bits of a service entry: `flags` is bits 0 to 7, `flags2` bits 8 to 15.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ServiceFlags(pub u16);

/// The type of a frontend, as its flags tell it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ServiceType {
    /// No type bit is set.
    #[serde(rename = "ClusterIP")]
    ClusterIp,
    /// An address outside of the cluster's own, given in `spec.externalIPs`.
    #[serde(rename = "ExternalIPs")]
    ExternalIps,
    /// A port on the node's addresses.
    NodePort,
    /// A port on the node's addresses, of one pod.
    HostPort,
    /// The address of a load balancer: a VIP.
    LoadBalancer,
    /// Traffic redirected to a node-local pod.
    LocalRedirect,
}

impl ServiceType {
    /// The name that Cilium prints.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ClusterIp => "ClusterIP",
            Self::ExternalIps => "ExternalIPs",
            Self::NodePort => "NodePort",
            Self::HostPort => "HostPort",
            Self::LoadBalancer => "LoadBalancer",
            Self::LocalRedirect => "LocalRedirect",
        }
    }
}

macro_rules! bits {
    ($($(#[$doc:meta])* $name:ident, $test:ident = $bit:expr;)*) => {
        impl ServiceFlags {
            $($(#[$doc])* pub const $name: u16 = 1 << $bit;)*
            $($(#[$doc])* #[must_use] pub fn $test(self) -> bool { self.0 & Self::$name != 0 })*
        }
    };
}

bits! {
    /// Type `ExternalIPs`.
    EXTERNAL_IPS, external_ips = 0;
    /// Type `NodePort`.
    NODE_PORT, node_port = 1;
    /// externalTrafficPolicy: Local.
    EXT_LOCAL, ext_local = 2;
    /// Type `HostPort`.
    HOST_PORT, host_port = 3;
    /// Session affinity by client IP.
    AFFINITY, affinity = 4;
    /// Type `LoadBalancer`.
    LOAD_BALANCER, load_balancer = 5;
    /// May be reached from outside of the node.
    ROUTABLE, routable = 6;
    /// The client's address is checked against source ranges.
    SOURCE_RANGE, source_range = 7;
    /// Type `LocalRedirect`.
    LOCAL_REDIRECT, local_redirect = 8;
    /// NAT46/64.
    NAT_46X64, nat_46x64 = 9;
    /// L7: handed to a local proxy instead of a backend.
    L7, l7 = 10;
    /// `HostPort`: bound to loopback. Other types (1.18+): delegated to a local L7 proxy.
    LOOPBACK_OR_DELEGATE, loopback_or_delegate = 11;
    /// internalTrafficPolicy: Local.
    INT_LOCAL, int_local = 12;
    /// External and internal scope have entries of their own.
    TWO_SCOPES, two_scopes = 13;
    /// Slots (1.17): quarantined. Master with source ranges: the ranges deny.
    QUARANTINED_OR_DENY, quarantined_or_deny = 14;
    /// Forwarded with DSR instead of SNAT.
    DSR, dsr = 15;
}

impl ServiceFlags {
    /// From the two bytes of a service value.
    #[must_use]
    pub fn from_bytes(flags: u8, flags2: u8) -> Self {
        Self(u16::from(flags) | u16::from(flags2) << 8)
    }

    /// `flags` and `flags2`, as they stand in a service value.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 2] {
        self.0.to_le_bytes()
    }

    /// The type, by the precedence that Cilium uses when several bits are set.
    #[must_use]
    pub fn service_type(self) -> ServiceType {
        if self.external_ips() {
            ServiceType::ExternalIps
        } else if self.node_port() {
            ServiceType::NodePort
        } else if self.load_balancer() {
            ServiceType::LoadBalancer
        } else if self.host_port() {
            ServiceType::HostPort
        } else if self.local_redirect() {
            ServiceType::LocalRedirect
        } else {
            ServiceType::ClusterIp
        }
    }

    /// Whether the source ranges of this (master) entry deny instead of allow.
    #[must_use]
    pub fn source_range_denies(self) -> bool {
        self.source_range() && self.quarantined_or_deny()
    }
}
