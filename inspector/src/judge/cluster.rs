//! A VIP over several nodes: who announces it, and whether whoever does can serve it.
//!
//! Each node is judged by itself; here the judgements are laid beside each other. What no single
//! node can see is found here: two announcers or none, a backend that one node believes in and that
//! the node which should have it does not know, policies that differ.

use std::net::IpAddr;

use schemars::JsonSchema;
use serde::Serialize;

use super::{
    Finding, FindingId, JudgeError, Judgement, Served,
    expect::{Checked, Expectation},
    judge_question,
    programmed::{Location, ProgrammedBackend, ProgrammedFrontend, TrafficPolicy},
};
use crate::{
    cilium::services::Scope,
    evidence::{Evidence, VipQuery},
};

/// One node's part.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct NodeView {
    /// Its name: the host name, with a number behind it where several nodes have the same.
    pub name: String,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// Whether it answers ARP or neighbour solicitations for the VIP.
    pub announces: bool,
    /// Its own judgement.
    pub judgement: Judgement,
}

/// The judgement over all nodes.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct Cluster {
    /// `inspector.cluster/1`
    pub schema: &'static str,
    /// What was asked.
    pub vip: VipQuery,
    /// Whether clients are served.
    pub served: Served,
    /// The answer in one sentence.
    pub sentence: String,
    /// Names of the nodes that announce it.
    pub announcers: Vec<String>,
    /// What only several nodes together show, worst first.
    pub findings: Vec<Finding>,
    /// What was expected, and what became of it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub expectations: Vec<Checked>,
    /// What could not be compared, and why.
    pub not_measured: Vec<String>,
    /// The nodes.
    pub nodes: Vec<NodeView>,
}

/// Judges evidence of several nodes about one VIP.
///
/// # Errors
/// As [`judge_question`], for the first node whose evidence is about something else.
pub fn judge<'e>(
    evidence: impl IntoIterator<Item = &'e Evidence>,
    query: VipQuery,
) -> Result<Cluster, JudgeError> {
    let mut nodes: Vec<NodeView> = Vec::new();
    for one in evidence {
        let judgement = judge_question(one, query)?;
        let host = if one.host.name.is_empty() { "node" } else { one.host.name.as_str() };
        let same = nodes
            .iter()
            .filter(|node| node.name == host || node.name.starts_with(&format!("{host}#")));
        let name = match same.count() {
            0 => host.to_owned(),
            count => format!("{host}#{}", count + 1),
        };
        let addresses = one
            .network
            .iter()
            .flat_map(|network| &network.links)
            .flat_map(|link| &link.addresses)
            .filter_map(|address| address.split('/').next()?.parse().ok())
            .collect();
        let announcement = &judgement.programmed.announcement;
        let announces = announcement.answering && !announcement.entries.is_empty();
        nodes.push(NodeView { name, addresses, announces, judgement });
    }
    Ok(conclude(query, nodes))
}

fn names<'n>(nodes: impl IntoIterator<Item = &'n NodeView>) -> String {
    nodes.into_iter().map(|node| node.name.as_str()).collect::<Vec<_>>().join(", ")
}

fn conclude(vip: VipQuery, nodes: Vec<NodeView>) -> Cluster {
    let mut findings = Vec::new();
    let mut not_measured = Vec::new();
    let announcers: Vec<&NodeView> = nodes.iter().filter(|node| node.announces).collect();
    let l2 = nodes.iter().any(|node| node.judgement.programmed.announcement.responder_map);
    for node in &nodes {
        let announcement = &node.judgement.programmed.announcement;
        let unclear = !announcement.entries.is_empty()
            && !announcement.answering
            && announcement.agent_silent_s.is_none();
        if let Some(why) = &announcement.unknown {
            not_measured.push(format!("whether {} announces: {why}", node.name));
        } else if unclear {
            let name = &node.name;
            not_measured
                .push(format!("whether {name} announces: its agent's liveness is not known"));
        }
        for line in &node.judgement.not_measured {
            not_measured.push(format!("{}: {line}", node.name));
        }
    }
    announced(&mut findings, &vip, &nodes, &announcers, l2);
    for node in &announcers {
        cannot_serve(&mut findings, &vip, node, &nodes);
    }
    backends(&mut findings, &mut not_measured, &nodes);
    differ(&mut findings, &nodes);
    findings.sort_by_key(|finding| (finding.severity, finding.id));
    let (served, sentence) = sentence(&vip, &nodes, &announcers, l2);
    Cluster {
        schema: "inspector.cluster/1",
        vip,
        served,
        sentence,
        announcers: announcers.iter().map(|node| node.name.clone()).collect(),
        findings,
        expectations: Vec::new(),
        not_measured,
        nodes,
    }
}

impl Cluster {
    /// Holds claims against it, which from then on alone decide.
    pub fn hold(&mut self, claims: &[Expectation]) {
        self.expectations = claims.iter().flat_map(|claim| claim.check_cluster(self)).collect();
    }
}

fn finding(
    id: FindingId,
    frontend: Option<&str>,
    seen: String,
    meaning: &str,
    next: &str,
) -> Finding {
    Finding {
        id,
        severity: id.severity(),
        frontend: frontend.map(str::to_owned),
        path: None,
        seen,
        meaning: meaning.to_owned(),
        next: next.to_owned(),
    }
}

/// None announces, or more than one.
fn announced(
    findings: &mut Vec<Finding>,
    vip: &VipQuery,
    nodes: &[NodeView],
    announcers: &[&NodeView],
    l2: bool,
) {
    let known = nodes.iter().all(|node| {
        let announcement = &node.judgement.programmed.announcement;
        announcement.unknown.is_none()
    });
    if announcers.is_empty() && l2 && known {
        findings.push(finding(
            FindingId::AnnouncedNowhere,
            None,
            format!("none of {} answers for {}", names(nodes), vip.address),
            "clients of the LAN get no answer to ARP or neighbour solicitations; clients that are \
             routed to a node are not concerned",
            "check that a CiliumL2AnnouncementPolicy selects the Service and a node, the lease \
             cilium-l2announce-… in kube-system, and whether all nodes are among the evidence",
        ));
    }
    if announcers.len() > 1 {
        findings.push(finding(
            FindingId::AnnouncedTwice,
            None,
            format!("{} answer for {}", names(announcers.iter().copied()), vip.address),
            "clients keep whichever answer came last: connections jump between nodes, and breaks \
             come and go",
            "collect again from all nodes at the same moment; if it stays, compare the holder of the \
             lease cilium-l2announce-… with what each agent believes",
        ));
    }
}

/// The usable backends of a frontend on a node that are there.
fn own_backends(frontend: &ProgrammedFrontend) -> usize {
    frontend
        .backends
        .iter()
        .filter(|one| {
            one.selectable
                && matches!(one.location, Location::LocalEndpoint { .. } | Location::ThisNode)
        })
        .count()
}

fn external(node: &NodeView) -> impl Iterator<Item = &ProgrammedFrontend> {
    let frontends = node.judgement.programmed.frontends.iter();
    frontends.filter(|frontend| frontend.scope == Scope::External)
}

/// Nodes that have a backend of their own for a frontend.
fn holders<'n>(nodes: &'n [NodeView], name: &str) -> Vec<&'n NodeView> {
    let has =
        |node: &&NodeView| external(node).any(|one| one.frontend == name && own_backends(one) > 0);
    nodes.iter().filter(has).collect()
}

/// The announcer has nothing to send clients to.
fn cannot_serve(findings: &mut Vec<Finding>, vip: &VipQuery, node: &NodeView, nodes: &[NodeView]) {
    for frontend in external(node) {
        let empty = frontend.l7_proxy_port.is_none() && frontend.usable() == 0;
        if !empty {
            continue;
        }
        let name = frontend.frontend.as_str();
        let holders = holders(nodes, name);
        let elsewhere = if holders.is_empty() {
            "no node among the evidence has one".to_owned()
        } else {
            format!("{} has", names(holders.iter().copied()))
        };
        if frontend.external_traffic_policy == TrafficPolicy::Local {
            findings.push(finding(
                FindingId::AnnouncedNoLocalBackend,
                Some(name),
                format!(
                    "{} answers for {}, {name} has externalTrafficPolicy Local and 0 backends \
                     there; {elsewhere}",
                    node.name, vip.address
                ),
                "the announcer is elected without regard to backends: clients reach a node that has \
                 nowhere to send them, and it does not heal by itself",
                "use externalTrafficPolicy Cluster for announced Services, or make sure that every \
                 node that may announce runs a backend",
            ));
        } else {
            findings.push(finding(
                FindingId::FrontendNoBackends,
                Some(name),
                format!(
                    "{} answers for {} and has 0 backends for {name}; {elsewhere}",
                    node.name, vip.address
                ),
                "clients reach a node that has nowhere to send them",
                "check the Service's selector, and whether a pod is ready",
            ));
        }
    }
}

/// Whether each backend that a node believes in is on the node that should have it.
fn backends(findings: &mut Vec<Finding>, not_measured: &mut Vec<String>, nodes: &[NodeView]) {
    let all = |node: &'_ NodeView| -> Vec<ProgrammedBackend> {
        let frontends = node.judgement.programmed.frontends.iter();
        frontends.flat_map(|frontend| &frontend.backends).cloned().collect()
    };
    let mut told: Vec<(String, String)> = Vec::new();
    for node in nodes {
        for backend in all(node) {
            let (Some(address), Location::Remote { node: Some(home), .. }) =
                (&backend.address, &backend.location)
            else {
                continue;
            };
            let Some(owner) = nodes.iter().find(|other| other.addresses.contains(home)) else {
                let line =
                    format!("whether the backend {address} exists: {home} is not among the nodes");
                if !not_measured.contains(&line) {
                    not_measured.push(line);
                }
                continue;
            };
            let key = (owner.name.clone(), address.clone());
            if owner.name == node.name || told.contains(&key) {
                continue;
            }
            let known = all(owner).into_iter().find(|one| one.address.as_ref() == Some(address));
            let says = match known {
                Some(one)
                    if matches!(
                        one.location,
                        Location::LocalEndpoint { .. } | Location::ThisNode
                    ) =>
                {
                    continue;
                }
                Some(one) => format!("{} has no such pod ({})", owner.name, one.location),
                None => format!("{} does not have it in its maps", owner.name),
            };
            told.push(key);
            findings.push(finding(
                FindingId::BackendNotOnItsNode,
                None,
                format!("{} sends to {address} on {} ({home}), and {says}", node.name, owner.name),
                "connections that choose this backend are sent to a node that does not know it: they \
                 time out",
                "check that the agents of both nodes are up to date (`cilium-dbg status`), and that \
                 the pod is there",
            ));
        }
    }
}

/// Frontends and policies that are not alike on all nodes.
fn differ(findings: &mut Vec<Finding>, nodes: &[NodeView]) {
    let mut all: Vec<&str> = nodes
        .iter()
        .flat_map(|node| &node.judgement.programmed.frontends)
        .map(|frontend| frontend.frontend.as_str())
        .collect();
    all.sort_unstable();
    all.dedup();
    for name in all {
        let found = |node: &'_ NodeView| -> Option<(TrafficPolicy, TrafficPolicy)> {
            let frontends = node.judgement.programmed.frontends.iter();
            let one = frontends.into_iter().find(|one| one.frontend == name)?;
            Some((one.external_traffic_policy, one.internal_traffic_policy))
        };
        // A scope of its own is there only where the policies need it.
        let inner = name.ends_with("/i");
        let without: Vec<&NodeView> = nodes.iter().filter(|node| found(node).is_none()).collect();
        if !inner && !without.is_empty() {
            findings.push(finding(
                FindingId::NodesDiffer,
                Some(name),
                format!("{} do not have {name}", names(without.iter().copied())),
                "the same Service is not programmed alike: the agents have not seen the same state",
                "check `cilium-dbg status` on the nodes that lack it",
            ));
        }
        let policies: Vec<(&NodeView, (TrafficPolicy, TrafficPolicy))> =
            nodes.iter().filter_map(|node| Some((node, found(node)?))).collect();
        if policies.windows(2).any(|pair| pair[0].1 != pair[1].1) {
            let list: Vec<String> = policies
                .iter()
                .map(|(node, (outside, inside))| {
                    format!("{}: external {outside:?}, internal {inside:?}", node.name)
                })
                .collect();
            findings.push(finding(
                FindingId::NodesDiffer,
                Some(name),
                format!("the traffic policies of {name} differ ({})", list.join("; ")),
                "the same Service is not programmed alike: the agents have not seen the same state",
                "check `cilium-dbg status` on the nodes",
            ));
        }
    }
}

/// `25565/TCP` of a frontend's name.
fn port(frontend: &str) -> &str {
    frontend.rsplit(':').next().unwrap_or(frontend)
}

fn sentence(
    vip: &VipQuery,
    nodes: &[NodeView],
    announcers: &[&NodeView],
    l2: bool,
) -> (Served, String) {
    let of = |served: Served| -> Vec<&NodeView> {
        nodes.iter().filter(|node| node.judgement.verdict.served == served).collect()
    };
    let good = of(Served::Yes);
    let could = if good.is_empty() {
        "no node among the evidence serves it".to_owned()
    } else {
        format!("{} could", names(good.iter().copied()))
    };
    match announcers {
        [] if nodes.is_empty() => {
            (Served::Unknown, "CANNOT TELL: no node is among the evidence".to_owned())
        }
        [] if l2 => (
            Served::No,
            format!("NO: none of the {} nodes answers for {}; {could}", nodes.len(), vip.address),
        ),
        [] if good.len() == nodes.len() => {
            (Served::Yes, format!("YES on every node ({}); not announced in the LAN", names(nodes)))
        }
        [] if good.is_empty()
            && of(Served::Unknown).is_empty()
            && of(Served::Partly).is_empty() =>
        {
            (Served::No, format!("NO: served on none of {}", names(nodes)))
        }
        [] if of(Served::Unknown).len() == nodes.len() => {
            (Served::Unknown, format!("CANNOT TELL: on none of {}", names(nodes)))
        }
        [] => (
            Served::Partly,
            format!("PARTLY: served on {} of {} nodes ({})", good.len(), nodes.len(), names(good)),
        ),
        [one] => of_announcer(vip, nodes, one, &good, &could),
        several => {
            let all = several.iter().all(|node| node.judgement.verdict.served == Served::Yes);
            let rest = if all { "each serves it" } else { "not each of them serves it" };
            (
                Served::Partly,
                format!(
                    "PARTLY: {} nodes answer for {} at once ({}); {rest}",
                    several.len(),
                    vip.address,
                    names(several.iter().copied())
                ),
            )
        }
    }
}

/// The sentence where one node announces.
fn of_announcer(
    vip: &VipQuery,
    nodes: &[NodeView],
    one: &NodeView,
    good: &[&NodeView],
    could: &str,
) -> (Served, String) {
    let verdict = &one.judgement.verdict;
    let why = match verdict.served {
        Served::Yes => {
            let place = format!("{} announces {} and serves it", one.name, vip.address);
            let others = nodes.len() - good.len();
            let rest = if others == 0 {
                "so would every other node".to_owned()
            } else {
                let not = nodes.iter().filter(|node| node.judgement.verdict.served != Served::Yes);
                format!("{} would not", names(not))
            };
            return (Served::Yes, format!("YES: {place}; {rest}"));
        }
        Served::Unknown => {
            return (
                Served::Unknown,
                format!(
                    "CANNOT TELL: {} announces {}, and whether it serves is not known",
                    one.name, vip.address
                ),
            );
        }
        Served::No => "NO",
        Served::Partly => "PARTLY",
    };
    let dead: Vec<String> = external(one)
        .filter(|frontend| frontend.l7_proxy_port.is_none() && frontend.usable() == 0)
        .map(|frontend| {
            let holders = holders(nodes, &frontend.frontend);
            let where_ = if holders.is_empty() {
                String::new()
            } else {
                format!(", its backends are on {}", names(holders))
            };
            let policy = match frontend.external_traffic_policy {
                TrafficPolicy::Local => "externalTrafficPolicy Local and no backend there",
                TrafficPolicy::Cluster => "no backend",
            };
            format!("{} has {policy}{where_}", port(&frontend.frontend))
        })
        .collect();
    let reason = if dead.is_empty() {
        let own = verdict.sentence.split_once(": ").map_or("", |(_, rest)| rest);
        own.to_owned()
    } else {
        dead.join("; ")
    };
    (
        verdict.served,
        format!("{why}: {} announces {}, but {reason}; {could}", one.name, vip.address),
    )
}
