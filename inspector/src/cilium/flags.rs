//! The 16 flag bits of a service entry, and the words that `cilium-dbg bpf lb list` has for them.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::release::Release;

/// Flag bits of a service entry: `flags` is bits 0 to 7, `flags2` bits 8 to 15.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize,
)]
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

    /// Whether the frontend is delegated to a local L7 proxy (1.18+).
    #[must_use]
    pub fn delegated(self, release: Release) -> bool {
        release >= Release::V1_18 && self.loopback_or_delegate() && !self.host_port()
    }

    /// Whether the source ranges of this (master) entry deny instead of allow.
    #[must_use]
    pub fn source_range_denies(self) -> bool {
        self.source_range() && self.quarantined_or_deny()
    }
}

impl ServiceFlags {
    /// The bits that `release` gives a meaning to.
    #[must_use]
    pub fn known(release: Release) -> Self {
        let mut known = 0x01ff;
        for (since, bits) in [
            (Release::V1_12, Self::NAT_46X64 | Self::L7),
            (Release::V1_13, Self::LOOPBACK_OR_DELEGATE),
            (Release::V1_13_90, Self::INT_LOCAL | Self::TWO_SCOPES),
            (Release::V1_17, Self::QUARANTINED_OR_DENY | Self::DSR),
        ] {
            if release >= since {
                known |= bits;
            }
        }
        Self(known)
    }

    /// The bits that are set although `release` gives them no meaning.
    #[must_use]
    pub fn unknown(self, release: Release) -> Self {
        Self(self.0 & !Self::known(release).0)
    }

    /// The words that `cilium-dbg bpf lb list` of `release` prints for the flags of a master entry,
    /// without the brackets: `LoadBalancer, Local, two-scopes`.
    #[must_use]
    pub fn text(self, release: Release) -> FlagsText {
        FlagsText { flags: self, release }
    }
}

/// The words for flags, see [`ServiceFlags::text`].
#[derive(Debug, Clone, Copy)]
pub struct FlagsText {
    flags: ServiceFlags,
    release: Release,
}

impl fmt::Display for FlagsText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flags = ServiceFlags(self.flags.0 & ServiceFlags::known(self.release).0);
        let host_port = flags.service_type() == ServiceType::HostPort;
        // Up to 1.17 the bit has one meaning whatever the type.
        let loopback = host_port || self.release < Release::V1_18;
        f.write_str(flags.service_type().as_str())?;
        for (set, word) in [
            (flags.ext_local(), "Local"),
            (flags.int_local(), "InternalLocal"),
            (flags.two_scopes(), "two-scopes"),
            (flags.affinity(), "sessionAffinity"),
            (!flags.routable(), "non-routable"),
            (flags.source_range(), "check source-range"),
            (flags.source_range_denies(), "deny"),
            (flags.nat_46x64(), "46x64"),
            (flags.l7(), "l7-load-balancer"),
            (flags.loopback_or_delegate() && loopback, "loopback"),
            (flags.loopback_or_delegate() && !loopback, "delegate-if-local"),
            (flags.quarantined_or_deny() && !flags.source_range(), "quarantined"),
            (flags.dsr(), "dsr"),
        ] {
            if set {
                write!(f, ", {word}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_their_order() {
        for (flags, text) in [
            // From the captures of 1.18 and 1.21.
            ([0x60, 0x00], "LoadBalancer"),
            ([0x64, 0x20], "LoadBalancer, Local, two-scopes"),
            ([0x64, 0x10], "LoadBalancer, Local, InternalLocal"),
            ([0x42, 0x00], "NodePort"),
            ([0x02, 0x00], "NodePort, non-routable"),
            ([0x06, 0x20], "NodePort, Local, two-scopes, non-routable"),
            ([0x00, 0x00], "ClusterIP, non-routable"),
            ([0x10, 0x00], "ClusterIP, sessionAffinity, non-routable"),
            ([0x60, 0x04], "LoadBalancer, l7-load-balancer"),
            ([0xe0, 0x00], "LoadBalancer, check source-range"),
            ([0xe0, 0x40], "LoadBalancer, check source-range, deny"),
            ([0x08, 0x08], "HostPort, non-routable, loopback"),
            ([0x41, 0x00], "ExternalIPs"),
            // Not in the captures.
            ([0x60, 0x08], "LoadBalancer, delegate-if-local"),
            ([0x60, 0x40], "LoadBalancer, quarantined"),
            ([0x60, 0x80], "LoadBalancer, dsr"),
            (
                [0xff, 0xff],
                "ExternalIPs, Local, InternalLocal, two-scopes, sessionAffinity, \
              check source-range, deny, 46x64, l7-load-balancer, delegate-if-local, dsr",
            ),
        ] {
            let flags = ServiceFlags::from_bytes(flags[0], flags[1]);
            assert_eq!(flags.text(Release::V1_18).to_string(), text, "{flags:?}");
            assert_eq!(flags.unknown(Release::V1_18), ServiceFlags(0), "{flags:?}");
        }
    }

    #[test]
    fn older_releases_lack_the_newer_words() {
        let all = ServiceFlags(0xffff);
        assert_eq!(
            all.text(Release::V1_10).to_string(),
            "ExternalIPs, Local, sessionAffinity, check source-range"
        );
        assert_eq!(all.unknown(Release::V1_10), ServiceFlags(0xfe00));
        assert_eq!(all.unknown(Release::V1_12), ServiceFlags(0xf800));
        assert_eq!(all.unknown(Release::V1_13), ServiceFlags(0xf000));
        assert_eq!(all.unknown(Release::V1_16), ServiceFlags(0xc000));
        let delegate = ServiceFlags(0x0860);
        assert_eq!(delegate.text(Release::V1_17).to_string(), "LoadBalancer, loopback");
    }
}
