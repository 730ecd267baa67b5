//! Which Cilium release wrote the maps, and what differs between releases.
//!
//! Nothing in bpffs says a version. The release is told from which pins exist ([`detect`]), as a
//! range; what a reader must do differently is one table, [`BEHAVIOUR`]. Code asks the table and
//! never compares releases itself, except where words are printed
//! ([`flags`](super::flags), [`metrics`](super::metrics)).

use std::{collections::HashSet, fmt};

use serde::{Deserialize, Serialize};

/// A Cilium release, oldest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Release {
    /// 1.10
    #[serde(rename = "1.10")]
    V1_10,
    /// 1.11
    #[serde(rename = "1.11")]
    V1_11,
    /// 1.12
    #[serde(rename = "1.12")]
    V1_12,
    /// 1.13
    #[serde(rename = "1.13")]
    V1_13,
    /// 1.13.90: development after 1.13, with the backend maps of 1.14 but without its run-time
    /// configuration.
    #[serde(rename = "1.13.90")]
    V1_13_90,
    /// 1.14
    #[serde(rename = "1.14")]
    V1_14,
    /// 1.15
    #[serde(rename = "1.15")]
    V1_15,
    /// 1.16
    #[serde(rename = "1.16")]
    V1_16,
    /// 1.17
    #[serde(rename = "1.17")]
    V1_17,
    /// 1.18
    #[serde(rename = "1.18")]
    V1_18,
    /// 1.19
    #[serde(rename = "1.19")]
    V1_19,
    /// 1.20
    #[serde(rename = "1.20")]
    V1_20,
    /// 1.21
    #[serde(rename = "1.21")]
    V1_21,
}

impl Release {
    /// Every release, oldest first.
    pub const ALL: [Self; 13] = [
        Self::V1_10,
        Self::V1_11,
        Self::V1_12,
        Self::V1_13,
        Self::V1_13_90,
        Self::V1_14,
        Self::V1_15,
        Self::V1_16,
        Self::V1_17,
        Self::V1_18,
        Self::V1_19,
        Self::V1_20,
        Self::V1_21,
    ];

    /// The version as text: `1.18`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::V1_10 => "1.10",
            Self::V1_11 => "1.11",
            Self::V1_12 => "1.12",
            Self::V1_13 => "1.13",
            Self::V1_13_90 => "1.13.90",
            Self::V1_14 => "1.14",
            Self::V1_15 => "1.15",
            Self::V1_16 => "1.16",
            Self::V1_17 => "1.17",
            Self::V1_18 => "1.18",
            Self::V1_19 => "1.19",
            Self::V1_20 => "1.20",
            Self::V1_21 => "1.21",
        }
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The releases that may have written a set of pins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ReleaseRange {
    /// The oldest.
    pub at_least: Release,
    /// The newest.
    pub at_most: Release,
}

impl ReleaseRange {
    /// The release to go by where only one can be had: the newest.
    #[must_use]
    pub fn assumed(self) -> Release {
        self.at_most
    }

    /// What that release does.
    #[must_use]
    pub fn behaviour(self) -> &'static Behaviour {
        self.assumed().behaviour()
    }
}

impl fmt::Display for ReleaseRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { at_least, at_most } = self;
        if at_least == at_most {
            write!(f, "{at_most}")
        } else {
            write!(f, "{at_least} to {at_most}")
        }
    }
}

/// A pin whose presence says "this release or a later one"; ends in `*` where it is a prefix.
const SINCE: &[(&str, Release)] = &[
    ("cilium_lb4_backends_v2", Release::V1_11),
    ("cilium_lb6_backends_v2", Release::V1_11),
    ("cilium_egress_gw_policy_v4", Release::V1_12),
    ("cilium_egresscall_policy", Release::V1_12),
    ("cilium_lb4_backends_v3", Release::V1_13_90),
    ("cilium_lb6_backends_v3", Release::V1_13_90),
    ("cilium_runtime_config", Release::V1_14),
    ("cilium_l2_responder_v4", Release::V1_14),
    ("cilium_node_map", Release::V1_14),
    ("cilium_skip_lb4", Release::V1_16),
    ("cilium_skip_lb6", Release::V1_16),
    ("cilium_lb_act", Release::V1_16),
    ("cilium_node_map_v2", Release::V1_16),
    ("cilium_policy_v2_*", Release::V1_17),
    ("cilium_ipcache_v2", Release::V1_18),
    ("cilium_policystats", Release::V1_18),
    ("cilium_l2_responder_v6", Release::V1_19),
    ("cilium_subnet_map", Release::V1_19),
    ("cilium_devices", Release::V1_20),
    ("cilium_percpu_trace_id", Release::V1_19),
    // Seen in 1.21 and not in the development state of 1.20 of February 2026; what the final 1.20
    // has is not known.
    ("cilium_policy_v3_*", Release::V1_20),
];

/// Pins of maps that every node has from a release on, whatever its configuration: if none of the
/// group is there, the release is the given one or an earlier one.
const BEFORE: &[(&[&str], Release)] = &[
    (
        &[
            "cilium_lb4_backends_v2",
            "cilium_lb6_backends_v2",
            "cilium_lb4_backends_v3",
            "cilium_lb6_backends_v3",
        ],
        Release::V1_10,
    ),
    (&["cilium_lb4_backends_v3", "cilium_lb6_backends_v3"], Release::V1_13),
    (&["cilium_runtime_config"], Release::V1_13_90),
    (&["cilium_node_map_v2"], Release::V1_15),
    (&["cilium_policy_v2_*", "cilium_policy_v3_*"], Release::V1_16),
    (&["cilium_ipcache_v2"], Release::V1_17),
    (&["cilium_devices"], Release::V1_19),
    (&["cilium_policy_v3_*"], Release::V1_20),
];

/// Tells the releases that may have written a set of pins.
///
/// `names` are the names of all pins below `tc/globals`; `any_proto` is whether some service key
/// has a protocol other than 0. Pins that an upgrade left behind do no harm: the newest ones
/// decide.
#[must_use]
pub fn detect<'a>(names: impl Iterator<Item = &'a str>, any_proto: bool) -> ReleaseRange {
    let names: HashSet<&str> = names.collect();
    let has = |pin: &str| match pin.strip_suffix('*') {
        Some(prefix) => names.iter().any(|name| name.starts_with(prefix)),
        None => names.contains(pin),
    };
    let mut at_least = if any_proto { Release::V1_17 } else { Release::V1_10 };
    for (pin, since) in SINCE {
        if *since > at_least && has(pin) {
            at_least = *since;
        }
    }
    let mut at_most = Release::V1_21;
    for (pins, before) in BEFORE {
        if *before < at_most && !pins.iter().any(|pin| has(pin)) {
            at_most = *before;
        }
    }
    // The responder maps depend on the configuration, but from 1.19 on one comes with the other
    // where the node has IPv6.
    if has("cilium_l2_responder_v4")
        && has("cilium_lb6_services_v2")
        && !has("cilium_l2_responder_v6")
    {
        at_most = at_most.min(Release::V1_18);
    }
    // What is there counts more than what is missing: a pin can be removed, not invented.
    ReleaseRange { at_least, at_most: at_most.max(at_least) }
}

/// In which order the datapath looks for a packet's frontend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LookupOrder {
    /// Protocol 0 only: keys have no protocol.
    AnyProtocol,
    /// The packet's protocol, then protocol 0.
    ExactThenAny,
    /// The packet's protocol; for packets from outside then the wildcard entry (port 0,
    /// protocol 0), which means "drop".
    ExactThenWildcard,
}

/// Which flag makes look-ups from inside go to the internal scope.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InternalScope {
    /// externalTrafficPolicy: Local.
    ExtLocal,
    /// Two scopes.
    TwoScopes,
}

/// What happens to a packet from outside for a frontend without selectable backends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NoBackend {
    /// As if there were no such service: it goes on to the kernel, which routes it by its
    /// destination.
    ToStack,
    /// It is dropped (reason 158).
    Drop,
    /// The client gets an ICMP message, by default; configuration may choose to drop, and from
    /// 1.19 on to pass it to the kernel.
    Reject,
}

/// What a socket gets that connects to a frontend without selectable backends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SocketAnswer {
    /// Nothing: the socket keeps the frontend's address, and its packets leave through the kernel.
    Untranslated,
    /// `EPERM`
    NotPermitted,
    /// `EHOSTUNREACH`
    HostUnreachable,
}

/// Whether terminating backends are used if there are no active ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LoneTerminating {
    /// No: the frontend counts as one without backends.
    Unused,
    /// If the agent was told to.
    Configurable,
    /// Yes: they are in the count.
    Used,
}

/// What the bytes of `qcount` in a master entry mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Qcount {
    /// Padding: slots above `count` are those of backends that are not selectable, and only a
    /// look-up tells how many there are.
    Padding,
    /// Number of slots above `count`.
    NotSelectable,
}

/// What the flags of a backend slot mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SlotFlags {
    /// Nothing, they are 0.
    Zero,
    /// 0, or bit 14: the backend is quarantined.
    Quarantined,
    /// The master's flags again.
    CopyOfMaster,
}

/// What `lb list` has on one group of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Grouping {
    /// A frontend with all of its slots.
    Frontend,
    /// One entry of the map; the slot stands behind the frontend.
    Slot,
}

/// The form of a backend in `lb list --backends`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BackendsForm {
    /// There is no such view.
    Absent,
    /// `TCP://10.0.0.1:80`
    AddressPort,
    /// `TCP://10.0.0.1`
    Address,
}

/// The form of a frontend in `lb list --frontends`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FrontendsForm {
    /// There is no such view.
    Absent,
    /// `ID COUNT (REVNAT) [0x60 0x0]`
    Count,
    /// `ID COUNT[QCOUNT] (REVNAT) [0x60 0x0]`
    CountQcount,
}

/// What `cilium-dbg bpf lb list` prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "independent columns of a table")]
pub struct LbListFormat {
    /// What one group of rows is.
    pub grouping: Grouping,
    /// Whether addresses have `/TCP` behind the port.
    pub protocol: bool,
    /// Whether rows have the slot behind the reverse NAT index, and the header says so.
    pub slot: bool,
    /// Whether a space follows the flags of a master entry, and the proxy port of an L7 one.
    pub space_after_flags: bool,
    /// Whether a backend of another cluster has `@ID` behind its address.
    pub cluster: bool,
    /// The view of backends.
    pub backends: BackendsForm,
    /// The view of frontends. Its first number is the raw 32 bits also for affinity and L7.
    pub frontends: FrontendsForm,
    /// Whether there is a view of source ranges.
    pub source_ranges: bool,
}

/// Where the agent's list of a service's backends says that one is quarantined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QuarantinedWord {
    /// From the state of the backend's entry.
    OfBackend,
    /// Nowhere: it is shown as `active`.
    Never,
    /// From its place above the count: the backend's entry is active.
    OfSlot,
}

/// What `cilium-dbg service list` prints. It asks the agent, not the maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "independent columns of a table")]
pub struct ServiceListFormat {
    /// Whether addresses have `/TCP` behind the port.
    pub protocol: bool,
    /// Whether backends have `(active)` behind them.
    pub state: bool,
    /// Which backends are called quarantined.
    pub quarantined: QuarantinedWord,
    /// Whether an L7 frontend has one more backend, `127.0.0.1:PROXYPORT` (`[::1]`), that is in no
    /// map.
    pub l7_backend: bool,
    /// Whether of a node port only the row of 0.0.0.0 (`[::]`) is shown, not those of the node's
    /// addresses.
    pub node_port_surrogate_only: bool,
}

/// What a release does that a reader must know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Behaviour {
    /// The release.
    pub release: Release,
    /// How frontends are looked up.
    pub lookup: LookupOrder,
    /// When look-ups from inside go to the internal scope.
    pub internal_scope: InternalScope,
    /// Packets from outside for a frontend without backends.
    pub no_backend: NoBackend,
    /// Sockets that connect to a frontend without backends.
    pub socket_no_backend: SocketAnswer,
    /// Whether sockets too leave a frontend alone that is delegated to a local proxy.
    pub delegates_sockets: bool,
    /// Terminating backends without active ones.
    pub lone_terminating: LoneTerminating,
    /// Whether backends in maintenance have slots.
    pub maintenance_slots: bool,
    /// Meaning of `qcount`.
    pub qcount: Qcount,
    /// Meaning of a slot's flags.
    pub slot_flags: SlotFlags,
    /// Text of `bpf lb list`.
    pub lb_list: LbListFormat,
    /// Text of `service list`.
    pub service_list: ServiceListFormat,
}

impl Release {
    /// The row of [`BEHAVIOUR`].
    #[must_use]
    pub fn behaviour(self) -> &'static Behaviour {
        // The table is in the order of the enum; a test holds it to that.
        &BEHAVIOUR[self as usize]
    }
}

const V1_10: Behaviour = Behaviour {
    release: Release::V1_10,
    lookup: LookupOrder::AnyProtocol,
    internal_scope: InternalScope::ExtLocal,
    no_backend: NoBackend::ToStack,
    socket_no_backend: SocketAnswer::Untranslated,
    delegates_sockets: false,
    lone_terminating: LoneTerminating::Unused,
    maintenance_slots: true,
    qcount: Qcount::Padding,
    slot_flags: SlotFlags::Zero,
    lb_list: LbListFormat {
        grouping: Grouping::Frontend,
        protocol: false,
        slot: false,
        space_after_flags: false,
        cluster: false,
        backends: BackendsForm::Absent,
        frontends: FrontendsForm::Absent,
        source_ranges: false,
    },
    service_list: ServiceListFormat {
        protocol: false,
        state: false,
        quarantined: QuarantinedWord::OfBackend,
        l7_backend: false,
        node_port_surrogate_only: false,
    },
};

const V1_11: Behaviour = Behaviour { release: Release::V1_11, ..V1_10 };

const V1_12: Behaviour = Behaviour {
    release: Release::V1_12,
    lb_list: LbListFormat {
        slot: true,
        backends: BackendsForm::AddressPort,
        frontends: FrontendsForm::Count,
        ..V1_11.lb_list
    },
    service_list: ServiceListFormat { state: true, ..V1_11.service_list },
    ..V1_11
};

const V1_13: Behaviour = Behaviour {
    release: Release::V1_13,
    no_backend: NoBackend::Drop,
    lb_list: LbListFormat { source_ranges: true, ..V1_12.lb_list },
    ..V1_12
};

// Seen in a capture: two scopes, `EPERM` for sockets, backends without port in their view.
const V1_13_90: Behaviour = Behaviour {
    release: Release::V1_13_90,
    internal_scope: InternalScope::TwoScopes,
    socket_no_backend: SocketAnswer::NotPermitted,
    lb_list: LbListFormat { backends: BackendsForm::Address, ..V1_13.lb_list },
    ..V1_13
};

const V1_14: Behaviour = Behaviour {
    release: Release::V1_14,
    lone_terminating: LoneTerminating::Configurable,
    ..V1_13_90
};

const V1_15: Behaviour =
    Behaviour { release: Release::V1_15, no_backend: NoBackend::Reject, ..V1_14 };

const V1_16: Behaviour = Behaviour {
    release: Release::V1_16,
    lb_list: LbListFormat { grouping: Grouping::Slot, space_after_flags: true, ..V1_15.lb_list },
    ..V1_15
};

const V1_17: Behaviour = Behaviour {
    release: Release::V1_17,
    lookup: LookupOrder::ExactThenAny,
    qcount: Qcount::NotSelectable,
    slot_flags: SlotFlags::Quarantined,
    lb_list: LbListFormat {
        protocol: true,
        frontends: FrontendsForm::CountQcount,
        ..V1_16.lb_list
    },
    service_list: ServiceListFormat { protocol: true, ..V1_16.service_list },
    ..V1_16
};

const V1_18: Behaviour = Behaviour {
    release: Release::V1_18,
    lone_terminating: LoneTerminating::Used,
    slot_flags: SlotFlags::CopyOfMaster,
    lb_list: LbListFormat { cluster: true, ..V1_17.lb_list },
    service_list: ServiceListFormat {
        quarantined: QuarantinedWord::Never,
        node_port_surrogate_only: true,
        ..V1_17.service_list
    },
    ..V1_17
};

// Seen in a capture of its development state of October 2025.
const V1_19: Behaviour = Behaviour {
    release: Release::V1_19,
    lookup: LookupOrder::ExactThenWildcard,
    maintenance_slots: false,
    delegates_sockets: true,
    service_list: ServiceListFormat { quarantined: QuarantinedWord::OfSlot, ..V1_18.service_list },
    ..V1_18
};

// The socket's answer and the proxy among the backends were seen to be those of 1.19 and 1.21; that
// they changed with 1.20 is an assumption.
const V1_20: Behaviour = Behaviour {
    release: Release::V1_20,
    socket_no_backend: SocketAnswer::HostUnreachable,
    service_list: ServiceListFormat { l7_backend: true, ..V1_19.service_list },
    ..V1_19
};

const V1_21: Behaviour = Behaviour { release: Release::V1_21, ..V1_20 };

/// What each release does, in the order of [`Release`]. Each row says what changed since the one
/// before it.
pub static BEHAVIOUR: [Behaviour; Release::ALL.len()] =
    [V1_10, V1_11, V1_12, V1_13, V1_13_90, V1_14, V1_15, V1_16, V1_17, V1_18, V1_19, V1_20, V1_21];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_order() {
        for (index, release) in Release::ALL.into_iter().enumerate() {
            assert_eq!(release as usize, index);
            assert_eq!(release.behaviour().release, release);
            assert_eq!(serde_json::to_string(&release).unwrap(), format!("\"{release}\""));
        }
        assert!(Release::ALL.is_sorted());
    }

    fn range(names: &[&str], any_proto: bool) -> String {
        detect(names.iter().copied(), any_proto).to_string()
    }

    #[test]
    fn releases_by_their_pins() {
        assert_eq!(range(&["cilium_lb4_services_v2", "cilium_lb4_backends"], false), "1.10");
        let v1_11 = ["cilium_lb4_backends_v2", "cilium_policy_00012", "cilium_ipcache"];
        assert_eq!(range(&v1_11, false), "1.11 to 1.13");
        let v1_12 = [&v1_11[..], &["cilium_egress_gw_policy_v4"]].concat();
        assert_eq!(range(&v1_12, false), "1.12 to 1.13");
        let v1_14 = ["cilium_lb4_backends_v3", "cilium_runtime_config", "cilium_node_map"];
        assert_eq!(range(&v1_14[..1], false), "1.13.90");
        assert_eq!(range(&v1_14, false), "1.14 to 1.15");
        let v1_16 = [&v1_14[..], &["cilium_node_map_v2", "cilium_policy_00012"]].concat();
        assert_eq!(range(&v1_16, false), "1.16");
        let v1_17 = [&v1_16[..], &["cilium_policy_v2_00012"]].concat();
        assert_eq!(range(&v1_17, true), "1.17");
        let v1_18 = [&v1_17[..], &["cilium_ipcache_v2", "cilium_ipcache"]].concat();
        assert_eq!(range(&v1_18, true), "1.18 to 1.19");
        let v1_18 = [&v1_18[..], &["cilium_l2_responder_v4", "cilium_lb6_services_v2"]].concat();
        assert_eq!(range(&v1_18, true), "1.18");
        let v1_19 = [&v1_18[..], &["cilium_l2_responder_v6", "cilium_percpu_trace_id"]].concat();
        assert_eq!(range(&v1_19, true), "1.19");
        let v1_20 = [&v1_19[..], &["cilium_devices"]].concat();
        assert_eq!(range(&v1_20, true), "1.20");
        let v1_21 = [&v1_20[..], &["cilium_policy_v3_00012"]].concat();
        assert_eq!(range(&v1_21, true), "1.20 to 1.21");
    }

    #[test]
    fn what_an_upgrade_left_behind_does_no_harm() {
        let names = [
            "cilium_lb4_backends",
            "cilium_lb4_backends_v2",
            "cilium_lb4_backends_v3",
            "cilium_runtime_config",
            "cilium_node_map_v2",
            "cilium_policy_00012",
        ];
        assert_eq!(range(&names, false), "1.16");
        // Protocols in the keys say 1.17, although what 1.17 always has is missing.
        assert_eq!(range(&names, true), "1.17");
        assert_eq!(range(&[], true), "1.17");
        assert_eq!(range(&[], false), "1.10");
    }
}
