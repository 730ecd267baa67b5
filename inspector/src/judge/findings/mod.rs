//! The findings: what was seen, what it means, what to do next. Their ids are stable: people
//! write them into CI.

mod paths;

use std::{collections::BTreeSet, fmt, net::IpAddr, str::FromStr};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    Outcome, PathVerdict, Served,
    attached::Facts,
    programmed::{
        AGENT_TIMEOUT_S, Location, Programmed, ProgrammedBackend, ProgrammedFrontend, TrafficPolicy,
    },
};
use crate::{
    cilium::{ipcache::Ipcache, layout::MapKind, proto::Protocol, services::Scope},
    evidence::{
        Evidence, VipQuery,
        tables::{Problem, Tables},
    },
};

/// How bad a finding is, worst first.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Explains why clients are not served.
    Error,
    /// May become an error, or makes the answer doubtful.
    Warning,
    /// Prevents a false diagnosis.
    Note,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Error => "error",
            Self::Warning => "warning",
            Self::Note => "note",
        })
    }
}

macro_rules! finding_ids {
    ($($(#[$doc:meta])* $name:ident = $id:literal, $severity:ident;)*) => {
        /// What was found. The ids are stable.
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
        )]
        pub enum FindingId {
            $($(#[$doc])* #[serde(rename = $id)] $name,)*
        }

        impl FindingId {
            /// Every finding of this version.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// The id, as in files and on the command line.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$name => $id),* }
            }

            /// How bad it is.
            #[must_use]
            pub fn severity(self) -> Severity {
                match self { $(Self::$name => Severity::$severity),* }
            }
        }
    };
}

finding_ids! {
    /// The VIP (or the port that was asked for) is no frontend on this node.
    FrontendAbsent = "frontend-absent", Error;
    /// Slots without a master entry: the look-up finds nothing.
    FrontendMasterMissing = "frontend-master-missing", Error;
    /// A frontend without any backend.
    FrontendNoBackends = "frontend-no-backends", Error;
    /// Only terminating backends are left.
    FrontendOnlyTerminating = "frontend-only-terminating", Error;
    /// Slots that lead nowhere: missing, or naming a backend that is not there.
    FrontendSlotDangling = "frontend-slot-dangling", Error;
    /// This node answers for the VIP, policy Local, and has no backend.
    AnnouncedNoLocalBackend = "announced-no-local-backend", Error;
    /// No node answers for the VIP (several nodes).
    AnnouncedNowhere = "announced-nowhere", Error;
    /// More than one node answers for the VIP (several nodes).
    AnnouncedTwice = "announced-twice", Error;
    /// A backend is not on the node that should have it (several nodes).
    BackendNotOnItsNode = "backend-not-on-its-node", Error;
    /// Nodes have the Service in different states (several nodes).
    NodesDiffer = "nodes-differ", Warning;
    /// A wildcard entry drops what comes for an address of this node.
    WildcardOnNodeAddress = "wildcard-on-node-address", Error;
    /// The reverse NAT entry is missing or restores something else.
    ReverseNatMissing = "reverse-nat-missing", Error;
    /// Source ranges are checked and let nobody through.
    SourceRangeDenied = "source-range-denied", Error;
    /// The same Cilium program is attached twice in one direction of a device.
    AttachDuplicate = "attach-duplicate", Error;
    /// A foreign program runs before Cilium's and can end the chain.
    AttachShadowed = "attach-shadowed", Error;
    /// Attached programs use other maps than the pinned ones.
    StalePins = "stale-pins", Error;
    /// A device from which clients come has no program of Cilium's that load-balances.
    DeviceNoDatapath = "device-no-datapath", Error;
    /// Socket-LB was set up and is not in force.
    SocketLbIneffective = "socket-lb-ineffective", Error;
    /// The way of marked packets to the local proxy is broken.
    ProxyPathBroken = "proxy-path-broken", Error;
    /// There is no living way to a backend.
    BackendUnreachable = "backend-unreachable", Error;
    /// This node answers for the VIP on a device that is down.
    CarrierDownAnnouncing = "carrier-down-announcing", Error;
    /// Packets are translated, and the backend refuses.
    BackendRefuses = "backend-refuses", Error;
    /// Packets are translated, and the backend does not answer.
    BackendSilent = "backend-silent", Error;
    /// The VIP is asked for where this node has a responder entry, and nothing answers.
    AnnounceSilent = "announce-silent", Error;
    /// A better proof contradicts a worse one.
    ProofConflict = "proof-conflict", Warning;
    /// Not everything that happened was seen.
    EventsLost = "events-lost", Warning;
    /// A frontend is in the maps and not in the agent.
    GhostFrontend = "ghost-frontend", Warning;
    /// A pinned link holds nothing.
    PinHoldsNothing = "pin-holds-nothing", Warning;
    /// A load balancer map has no room left.
    MapFull = "map-full", Error;
    /// A load balancer map has little room left.
    MapNearlyFull = "map-nearly-full", Warning;
    /// A map could not be read or understood.
    MapNotRead = "map-not-read", Warning;
    /// The agent gave no sign of life: the responder is silent.
    AgentDead = "agent-dead", Warning;
    /// Two BPF file systems hold Cilium's pins.
    TwoBpffs = "two-bpffs", Warning;
    /// External and internal scope have different backends.
    ScopesDiffer = "scopes-differ", Warning;
    /// A terminating backend is still in a slot.
    BackendTerminating = "backend-terminating", Warning;
    /// Flag bits without a meaning.
    UnknownFlags = "frontend-unknown-flags", Warning;
    /// A map of an older generation is left over.
    OlderGeneration = "map-older-generation", Note;
    /// The VIP's neighbour entry looks alarming, and nothing looks it up.
    NeighbourIrrelevant = "neighbour-irrelevant", Note;
    /// A WireGuard device that no client has used.
    NoClientYet = "no-client-yet", Note;
    /// A device without Ethernet header takes smaller packets than the backends send.
    L3Mtu = "l3-mtu", Note;
    /// `ping` of a VIP proves nothing.
    PingProvesNothing = "ping-proves-nothing", Note;
    /// A socket on the node is another path than a forwarded packet.
    NodeProbeOtherPath = "node-probe-other-path", Note;
    /// An L7 frontend is not DNAT'd.
    L7IsNotDnat = "l7-is-not-dnat", Note;
    /// Whether the backends answer was not tried.
    BackendNotProbed = "backend-not-probed", Note;
}

impl fmt::Display for FindingId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FindingId {
    /// What several nodes together show.
    pub const OF_SEVERAL_NODES: &[Self] = &[
        Self::AnnouncedNowhere,
        Self::AnnouncedTwice,
        Self::AnnouncedNoLocalBackend,
        Self::FrontendNoBackends,
        Self::BackendNotOnItsNode,
        Self::NodesDiffer,
    ];

    /// Whether one node alone can never show it.
    #[must_use]
    pub fn takes_several_nodes(self) -> bool {
        matches!(
            self,
            Self::AnnouncedNowhere
                | Self::AnnouncedTwice
                | Self::BackendNotOnItsNode
                | Self::NodesDiffer
        )
    }
}

/// A word that is no finding's id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no finding")]
pub struct FindingIdError(String);

impl FromStr for FindingId {
    type Err = FindingIdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .iter()
            .copied()
            .find(|id| id.as_str() == text)
            .ok_or_else(|| FindingIdError(text.to_owned()))
    }
}

/// One finding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Finding {
    /// What it is.
    pub id: FindingId,
    /// How bad it is.
    pub severity: Severity,
    /// The frontend it is about, if it is about one.
    pub frontend: Option<String>,
    /// The path it is about, if it is about one.
    pub path: Option<String>,
    /// What was seen, with the numbers.
    pub seen: String,
    /// What it means.
    pub meaning: String,
    /// What to do or check next.
    pub next: String,
}

/// Identities up to this one are the same on every cluster.
const RESERVED_IDENTITIES: u32 = 255;

/// Collects findings.
struct Findings(Vec<Finding>);

impl Findings {
    /// A finding about a path.
    fn add_on(&mut self, id: FindingId, path: &str, seen: String, meaning: &str, next: &str) {
        self.add(id, None, seen, meaning, next);
        if let Some(added) = self.0.last_mut() {
            added.path = Some(path.to_owned());
        }
    }

    fn add(
        &mut self,
        id: FindingId,
        frontend: Option<&str>,
        seen: String,
        meaning: &str,
        next: &str,
    ) {
        self.0.push(Finding {
            id,
            severity: id.severity(),
            frontend: frontend.map(str::to_owned),
            path: None,
            seen,
            meaning: meaning.to_owned(),
            next: next.to_owned(),
        });
    }
}

/// All findings that state alone establishes, worst first.
pub(super) fn find(
    evidence: &Evidence,
    tables: &Tables,
    programmed: &Programmed,
    query: &VipQuery,
    paths: &[PathVerdict],
    facts: &Facts,
) -> Vec<Finding> {
    let mut findings = Findings(Vec::new());
    absent(&mut findings, tables, programmed, query);
    for frontend in &programmed.frontends {
        if frontend.master {
            backends(&mut findings, programmed, frontend, query);
            restrictions(&mut findings, frontend, paths);
        } else {
            findings.add(
                FindingId::FrontendMasterMissing,
                Some(&frontend.frontend),
                format!(
                    "{} has {} slots and no master entry",
                    frontend.frontend,
                    frontend.backends.len()
                ),
                "the datapath looks the master entry up first and finds no service: the packet is \
                 not translated",
                "the agent writes the master last: if this stays, restart the agent on this node \
                 and report it",
            );
        }
    }
    scopes_differ(&mut findings, programmed);
    announcement(&mut findings, tables, programmed, query);
    wildcard_on_node_address(&mut findings, evidence, tables, programmed, query);
    maps(&mut findings, evidence, tables);
    paths::find(&mut findings, evidence, programmed, query, paths, facts);
    notes(&mut findings, programmed, query, paths);
    findings.0.sort_by_key(|finding| finding.severity);
    findings.0
}

fn absent(findings: &mut Findings, tables: &Tables, programmed: &Programmed, query: &VipQuery) {
    if tables.doubt(MapKind::Services, query.address).is_some() || !programmed.frontends.is_empty()
    {
        return;
    }
    let address = query.address;
    let (nearest, next) = if tables.family_absent {
        (
            format!(
                "; this node has no {} load balancer maps",
                if address.is_ipv4() { "IPv4" } else { "IPv6" }
            ),
            "Cilium runs without this address family here (enable-ipv4, enable-ipv6 in its \
             configuration)",
        )
    } else if !programmed.others.is_empty() {
        (
            format!("; the address has {}", programmed.others.join(", ")),
            "check the Service's ports, and the protocol",
        )
    } else if let Some(endpoint) = tables.endpoints.get(&address) {
        if endpoint.flags.is_host() {
            (
                "; it is an address of this node".to_owned(),
                "an address of the node has NodePort frontends only on the ports of NodePort \
                 Services: ask for ADDR:PORT, or for the VIP of the LoadBalancer Service",
            )
        } else {
            (
                format!(
                    "; it is a pod on this node (endpoint {}, ifindex {})",
                    endpoint.lxc_id, endpoint.ifindex
                ),
                "a pod is reached by its own address, no load balancer takes part: look at the \
                 Service's VIP instead",
            )
        }
    } else if let Some(entry) = tables.ipcache.get(&address).filter(|entry| !is_world(entry)) {
        let what = match entry.identity.reserved_name() {
            Some(name) => format!("known as {name}"),
            None => format!("a pod or host elsewhere (identity {})", entry.identity.0),
        };
        (
            format!("; it is {what}"),
            "ask for the VIP of the Service, not for the address of a pod or node",
        )
    } else {
        (
            String::new(),
            "check that the Service has this address in status.loadBalancer.ingress, and that the \
             agent of this node is up to date (`cilium-dbg status`)",
        )
    };
    let meaning = if programmed.wildcards.is_empty() {
        "nothing on this node translates a packet to it: it goes up the stack with that \
         destination"
    } else {
        "Cilium knows the address, not the port: the wildcard entry drops such packets in BPF, \
         without an answer"
    };
    findings.add(
        FindingId::FrontendAbsent,
        None,
        format!("{query} is no frontend on this node{nearest}"),
        meaning,
        next,
    );
}

/// A wildcard entry (Cilium 1.19 and later) of an address that is the node's own. It drops what arrives
/// on a device for that address and is for no frontend: answers to connections of the node's own, and
/// answers of backends elsewhere, to which packets are sent on from that address. It concerns the VIP
/// that it is of, and every VIP with a backend elsewhere.
fn wildcard_on_node_address(
    findings: &mut Findings,
    evidence: &Evidence,
    tables: &Tables,
    programmed: &Programmed,
    query: &VipQuery,
) {
    let links = || evidence.network.iter().flat_map(|network| &network.links);
    let sent_on = programmed
        .frontends
        .iter()
        .flat_map(|frontend| &frontend.backends)
        .filter(|backend| backend.selectable)
        .find(|backend| matches!(backend.location, Location::Remote { .. }))
        .and_then(|backend| backend.address.as_deref());
    for frontend in tables.frontends() {
        let address = frontend.key.address;
        if !frontend.key.is_wildcard() || address.is_ipv4() != query.address.is_ipv4() {
            continue;
        }
        let text = address.to_string();
        let device = links().find(|link| {
            link.addresses.iter().any(|one| one.split('/').next() == Some(text.as_str()))
        });
        let known = tables.endpoints.get(&address).is_some_and(|one| one.flags.is_host());
        if device.is_none() && !known {
            continue;
        }
        let whose = match (address == query.address, sent_on) {
            (true, _) => String::new(),
            (false, Some(backend)) => format!("; {query} has a backend elsewhere, {backend}"),
            (false, None) => continue,
        };
        let on = device.map_or_else(String::new, |link| format!(" on {}", link.name));
        findings.add(
            FindingId::WildcardOnNodeAddress,
            None,
            format!("{address} is an address of this node{on} and has a wildcard entry{whose}"),
            "what arrives on a device for this address and is for no frontend is dropped in BPF (drop \
             reason 158, Service backend not found): answers to connections of the node's own, \
             answers of backends elsewhere, to which clients' packets are sent on from this address, \
             and what is meant for the node's own servers",
            "give the Service an address that no node has, or a loadBalancerClass that is not Cilium's; \
             later patch releases of 1.19 remove the entry by themselves when the address is a \
             node's: update Cilium",
        );
    }
}

/// Whether the IP cache knows no more of an address than that it is outside of the cluster.
fn is_world(entry: &Ipcache) -> bool {
    entry.identity.reserved_name().is_none_or(|name| name.starts_with("world"))
        && entry.identity.0 <= RESERVED_IDENTITIES
}

/// What the slots of a frontend tell.
fn backends(
    findings: &mut Findings,
    programmed: &Programmed,
    frontend: &ProgrammedFrontend,
    query: &VipQuery,
) {
    // The proxy of an L7 frontend chooses; its slots are not used on the way there.
    let proxied = frontend.l7_proxy_port.is_some();
    if frontend.count == 0 && !proxied {
        no_backends(findings, programmed, frontend, query);
        return;
    }
    let dangling: Vec<_> =
        frontend.backends.iter().filter(|backend| backend.selectable && backend.dangling).collect();
    if !dangling.is_empty() && !proxied {
        dangling_slots(findings, frontend, &dangling);
    }
    if let Some(table) = frontend.maglev.as_ref().filter(|table| table.nowhere > 0) {
        findings.add(
            FindingId::FrontendSlotDangling,
            Some(&frontend.frontend),
            format!(
                "{}: {} of {} places of its Maglev table name a backend that is not there",
                frontend.frontend, table.nowhere, table.places
            ),
            "connections that fall on such a place are dropped, the others work",
            "restart the agent on this node, which makes the table again",
        );
    }
    if terminating(frontend) > 0 {
        backend_terminating(findings, frontend);
    }
    if frontend.reverse_nat.good == Some(false) && frontend.count > 0 && !proxied {
        reverse_nat_missing(findings, frontend);
    }
}

fn terminating(frontend: &ProgrammedFrontend) -> usize {
    frontend.backends.iter().filter(|backend| backend.state == "terminating").count()
}

fn no_backends(
    findings: &mut Findings,
    programmed: &Programmed,
    frontend: &ProgrammedFrontend,
    query: &VipQuery,
) {
    let name = Some(frontend.frontend.as_str());
    let terminating = terminating(frontend);
    let announced = programmed.announcement.answering
        && frontend.scope == Scope::External
        && frontend.external_traffic_policy == TrafficPolicy::Local;
    if announced {
        findings.add(
            FindingId::AnnouncedNoLocalBackend,
            name,
            format!(
                "this node answers for {} and {} has externalTrafficPolicy Local and 0 \
                 backends here",
                query.address, frontend.frontend
            ),
            "the announcer is elected without regard to backends: clients reach this node, \
             which has nowhere to send them, and it does not heal by itself",
            "use externalTrafficPolicy Cluster for announced Services, or make sure that every \
             node that may announce runs a backend",
        );
    }
    if terminating > 0 {
        findings.add(
            FindingId::FrontendOnlyTerminating,
            name,
            format!("{} has 0 choosable backends, {terminating} terminating", frontend.frontend),
            "the last backends are on their way out and new connections are refused or dropped",
            "check why no new pod is ready",
        );
    } else {
        let elsewhere = match frontend.qcount {
            0 => String::new(),
            others => format!(" ({others} quarantined or otherwise not choosable)"),
        };
        findings.add(
            FindingId::FrontendNoBackends,
            name,
            format!("{} has 0 choosable backends{elsewhere}", frontend.frontend),
            "a packet for it is rejected or dropped in BPF",
            if frontend.external_traffic_policy == TrafficPolicy::Local {
                "with policy Local only pods of this node count: see where they run, and \
                 whether they are ready"
            } else {
                "check that the Service's selector matches ready pods"
            },
        );
    }
}

fn dangling_slots(
    findings: &mut Findings,
    frontend: &ProgrammedFrontend,
    dangling: &[&ProgrammedBackend],
) {
    // A damaged count can be 65535.
    const NAMED: usize = 8;
    let mut slots: Vec<String> = dangling
        .iter()
        .take(NAMED)
        .map(|backend| match backend.id {
            0 => format!("slot {} ({})", backend.slot, backend.state),
            id => format!("slot {} ({} {id})", backend.slot, backend.state),
        })
        .collect();
    if dangling.len() > NAMED {
        slots.push(format!("and {} more", dangling.len() - NAMED));
    }
    let meaning = if dangling.len() == usize::from(frontend.count) {
        "every connection is dropped"
    } else {
        "connections that choose such a slot are dropped, the others work: the VIP fails now \
         and then"
    };
    findings.add(
        FindingId::FrontendSlotDangling,
        Some(&frontend.frontend),
        format!(
            "{}: {} of {} slots lead nowhere: {}",
            frontend.frontend,
            dangling.len(),
            frontend.count,
            slots.join(", ")
        ),
        meaning,
        "the agent's view and the maps differ: compare with `cilium-dbg service list`, then \
         restart the agent on this node",
    );
}

fn backend_terminating(findings: &mut Findings, frontend: &ProgrammedFrontend) {
    let terminating = terminating(frontend);
    let all = frontend
        .backends
        .iter()
        .filter(|backend| backend.selectable)
        .all(|backend| backend.state == "terminating");
    findings.add(
        FindingId::BackendTerminating,
        Some(&frontend.frontend),
        format!(
            "{}: {terminating} of {} backends are terminating",
            frontend.frontend,
            frontend.backends.len()
        ),
        if all && frontend.count > 0 {
            "they are the last ones and still used until they are gone"
        } else {
            "they get no new connections and are gone soon"
        },
        "nothing, during a roll-out; otherwise see why the pods do not go",
    );
}

fn reverse_nat_missing(findings: &mut Findings, frontend: &ProgrammedFrontend) {
    let seen = match &frontend.reverse_nat.restores {
        None => format!(
            "{}: reverse NAT entry {} is not there",
            frontend.frontend, frontend.reverse_nat.id
        ),
        Some(other) => format!(
            "{}: reverse NAT entry {} restores {other}",
            frontend.frontend, frontend.reverse_nat.id
        ),
    };
    findings.add(
        FindingId::ReverseNatMissing,
        Some(&frontend.frontend),
        seen,
        "requests are translated and reach the backend, replies do not come back as the VIP: \
         the client sees a time-out",
        "restart the agent on this node, which writes the entry again",
    );
}

fn restrictions(findings: &mut Findings, frontend: &ProgrammedFrontend, paths: &[PathVerdict]) {
    let Some(ranges) = &frontend.source_ranges else { return };
    let denied = paths
        .iter()
        .find(|path| path.frontend == frontend.frontend && path.outcome == Outcome::Denied);
    let Some(why) = denied.and_then(|path| path.why.last()) else { return };
    findings.add(
        FindingId::SourceRangeDenied,
        Some(&frontend.frontend),
        format!("{}: {why}", frontend.frontend),
        if ranges.ranges.is_empty() {
            "every client is denied in BPF"
        } else {
            "this client is denied in BPF, without an answer"
        },
        "check loadBalancerSourceRanges of the Service",
    );
}

/// Where new connections go.
fn addresses(frontend: &ProgrammedFrontend) -> BTreeSet<&str> {
    frontend
        .backends
        .iter()
        .filter(|backend| backend.selectable)
        .filter_map(|backend| backend.address.as_deref())
        .collect()
}

fn scopes_differ(findings: &mut Findings, programmed: &Programmed) {
    for inside in programmed.frontends.iter().filter(|one| one.scope == Scope::Internal) {
        let outside = programmed.frontends.iter().find(|other| {
            (other.port, other.protocol, other.scope)
                == (inside.port, inside.protocol, Scope::External)
        });
        let Some(outside) = outside else {
            findings.add(
                FindingId::ScopesDiffer,
                Some(&inside.frontend),
                format!("{} has an internal scope and no external one", inside.frontend),
                "an entry that was left behind: clients from outside do not reach it",
                "nothing, if no Service has this port on this address; else restart the agent",
            );
            continue;
        };
        if outside.unread() + inside.unread() > 0 {
            continue;
        }
        let (out, within) = (addresses(outside), addresses(inside));
        if out != within {
            let others = if out.len() == within.len() { "other backends, " } else { "" };
            findings.add(
                FindingId::ScopesDiffer,
                Some(&outside.frontend),
                format!(
                    "{}: {} backends in the external scope, {others}{} in the internal",
                    outside.frontend,
                    out.len(),
                    within.len()
                ),
                "clients from outside and clients of the cluster meet different backends, as \
                 externalTrafficPolicy and internalTrafficPolicy say",
                "a probe from the node or from a pod says nothing about clients from outside",
            );
        }
    }
}

fn announcement(
    findings: &mut Findings,
    tables: &Tables,
    programmed: &Programmed,
    query: &VipQuery,
) {
    let announcement = &programmed.announcement;
    let Some(silent) = announcement.agent_silent_s else { return };
    if silent < AGENT_TIMEOUT_S {
        return;
    }
    let since = match silent {
        u64::MAX if tables.agent_liveness_ns.is_some_and(|alive| alive > 0) => {
            "the agent's last sign of life lies in the future, which the datapath takes for long \
             ago"
            .to_owned()
        }
        u64::MAX => "the agent has given no sign of life since this node booted".to_owned(),
        seconds => format!("the agent's last sign of life was {seconds} s ago"),
    };
    let meaning = if announcement.entries.is_empty() {
        format!(
            "translation goes on with the state of that moment; this node does not announce {} \
             anyway",
            query.address
        )
    } else {
        format!(
            "translation goes on with the state of that moment, but the L2 responder is silent: \
             clients that do not have {} in their ARP cache cannot reach it through this node",
            query.address
        )
    };
    findings.add(
        FindingId::AgentDead,
        None,
        since,
        &meaning,
        "see whether cilium-agent runs on this node",
    );
}

fn maps(findings: &mut Findings, evidence: &Evidence, tables: &Tables) {
    let mounts: Vec<String> =
        evidence.bpffs.iter().map(|bpffs| bpffs.path.display().to_string()).collect();
    if let Some(read) = evidence.bpffs.iter().find(|bpffs| bpffs.read)
        && mounts.len() > 1
    {
        findings.add(
            FindingId::TwoBpffs,
            None,
            format!(
                "{} BPF file systems hold Cilium's pins: {}; read was {}",
                mounts.len(),
                mounts.join(", "),
                read.path.display()
            ),
            "a second BPF file system was mounted: attached programs may use the maps of the \
             other one",
            "compare with --bpffs; a restart of the agent after the mounts are right settles it",
        );
    }
    for record in &evidence.maps {
        let kinds = [MapKind::Services, MapKind::Backends, MapKind::ReverseNat];
        let Some((kind, _, _)) = record.kind() else { continue };
        let (Some(total), true) = (record.total, kinds.contains(&kind)) else { continue };
        let max = u64::from(record.max_entries);
        let fill = format!("{} holds {total} of {max} entries", record.name);
        // The agent stops at the last entry or at the one before, depending on the map.
        // An empty map is not full, however small it is.
        if total > 0 && total.saturating_add(1) >= max {
            findings.add(
                FindingId::MapFull,
                None,
                fill,
                "new Services and backends cannot be written: some work, others do not",
                "raise --bpf-lb-map-max (Helm: bpf.lbMapMax), or bring the number of Services down",
            );
        } else if total.saturating_mul(10) >= max * 9 {
            findings.add(
                FindingId::MapNearlyFull,
                None,
                fill,
                "when it is full, new Services and backends cannot be written",
                "raise --bpf-lb-map-max (Helm: bpf.lbMapMax) before that",
            );
        }
    }
    for problem in &tables.problems {
        match problem {
            Problem::Map { .. }
            | Problem::Entry { .. }
            | Problem::KeysTwice { .. }
            | Problem::Incomplete { .. }
            | Problem::UnknownScope { .. } => findings.add(
                FindingId::MapNotRead,
                None,
                problem.to_string(),
                "what this map says is missing from the answer",
                "`inspect doctor` says what can be read here and what for",
            ),
            Problem::OlderGeneration { .. } => findings.add(
                FindingId::OlderGeneration,
                None,
                problem.to_string(),
                "left over from an upgrade; the datapath does not use it",
                "nothing",
            ),
            Problem::UnknownFlags { frontend, .. } => findings.add(
                FindingId::UnknownFlags,
                Some(frontend),
                problem.to_string(),
                "written by a newer Cilium than this inspect knows, or damaged",
                "use a newer inspect",
            ),
            // Told of frontend by frontend.
            Problem::SlotWithoutBackend { .. }
            | Problem::SlotsMissing { .. }
            | Problem::SlotsWithoutMaster { .. } => {}
        }
    }
}

fn notes(
    findings: &mut Findings,
    programmed: &Programmed,
    query: &VipQuery,
    paths: &[PathVerdict],
) {
    if programmed.frontends.is_empty() {
        return;
    }
    let icmp = match query.address {
        IpAddr::V4(_) => Protocol(1),
        IpAddr::V6(_) => Protocol(58),
    };
    if programmed.frontends.iter().all(|frontend| frontend.protocol != icmp) {
        findings.add(
            FindingId::PingProvesNothing,
            None,
            format!("{} has no ICMP frontend", query.address),
            "Cilium's load balancer never translates ICMP: no answer to `ping` is no symptom",
            "probe with the protocol and port of the frontend, from where the client is",
        );
    }
    for frontend in &programmed.frontends {
        if let Some(port) = frontend.l7_proxy_port {
            findings.add(
                FindingId::L7IsNotDnat,
                Some(&frontend.frontend),
                format!("{} is an L7 frontend with the local proxy port {port}", frontend.frontend),
                "its packets keep the VIP as destination and go to the proxy on this node: no \
                 backend appears in a trace, and none is needed here",
                "see whether the proxy listens (`ss -ltn`)",
            );
        }
    }
    let unproven = paths.iter().any(|path| path.served != Served::No);
    if unproven {
        findings.add(
            FindingId::NodeProbeOtherPath,
            None,
            "a socket on this node takes another path than a packet that arrives on a device"
                .to_owned(),
            "`curl` on the node is translated at connect (or not at all): it says nothing about \
             clients from outside, and they say nothing about it",
            "judge each path by its own line",
        );
    }
    let backends = programmed.frontends.iter().any(|frontend| frontend.usable() > 0);
    if unproven && backends {
        findings.add(
            FindingId::BackendNotProbed,
            None,
            "whether the backends answer was not tried".to_owned(),
            "a backend that refuses or is silent looks the same in the maps",
            "connect to a backend's address and port from this node",
        );
    }
}
