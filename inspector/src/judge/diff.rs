//! What differs between two pieces of evidence, in the words of the domain: frontends, backends and
//! their states, responder entries, programs, neighbours that matter, verdicts.
//!
//! Each side is told as facts; a fact that only one side has is new or gone, one that both have with
//! another value has changed. Facts have a class, so that what always moves can be left out.

use std::{
    collections::{BTreeMap, BTreeSet},
    str::FromStr,
};

use schemars::JsonSchema;
use serde::Serialize;

use super::{
    JudgeError, Judgement, datapath, judge_question,
    programmed::{self, ProgrammedFrontend},
};
use crate::{
    cilium::{
        layout::{Family, MapKind},
        services::Scope,
    },
    evidence::{Evidence, MapRecord, Subject, VipQuery, tables::Tables},
};

/// What kind of fact it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// The verdict, its paths and its findings.
    Verdict,
    /// Frontends, backends, policies.
    Services,
    /// Who answers for the VIP.
    Announcement,
    /// Programs on devices and cgroups.
    Programs,
    /// Devices.
    Devices,
    /// Neighbour entries that matter, and routes.
    Neighbours,
    /// The node: host, kernel.
    Node,
    /// Numbers that the kernel or the agent hands out anew: program, map and backend ids.
    Ids,
    /// Numbers that only grow.
    Counters,
    /// Moments and durations.
    Times,
}

impl Class {
    /// Every class.
    pub const ALL: [Self; 10] = [
        Self::Verdict,
        Self::Services,
        Self::Announcement,
        Self::Programs,
        Self::Devices,
        Self::Neighbours,
        Self::Node,
        Self::Ids,
        Self::Counters,
        Self::Times,
    ];

    /// The classes that differ between any two moments.
    pub const MOVING: [Self; 3] = [Self::Ids, Self::Counters, Self::Times];

    /// Its name.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Verdict => "verdict",
            Self::Services => "services",
            Self::Announcement => "announcement",
            Self::Programs => "programs",
            Self::Devices => "devices",
            Self::Neighbours => "neighbours",
            Self::Node => "node",
            Self::Ids => "ids",
            Self::Counters => "counters",
            Self::Times => "times",
        }
    }
}

/// A word that is no class.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is nothing that can be ignored: use some of {list}", list = names())]
pub struct ClassError(String);

fn names() -> String {
    Class::ALL.map(Class::as_str).join(", ")
}

impl FromStr for Class {
    type Err = ClassError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|class| class.as_str() == text)
            .ok_or_else(|| ClassError(text.to_owned()))
    }
}

/// One difference.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Change {
    /// The VIP, or `node` for what is not about one.
    pub vip: String,
    /// The path, frontend or part that it is about.
    pub part: String,
    /// Its class.
    pub class: Class,
    /// What changed.
    pub what: String,
    /// What it was; nothing if it was not there.
    pub before: Option<String>,
    /// What it is; nothing if it is gone.
    pub after: Option<String>,
}

impl std::fmt::Display for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let what = &self.what;
        let with =
            |value: &str| if value.is_empty() { String::new() } else { format!(" ({value})") };
        match (&self.before, &self.after) {
            (Some(before), Some(after)) => write!(f, "{what}: {before} -> {after}"),
            (Some(before), None) => write!(f, "{what} gone{}", with(before)),
            (None, Some(after)) => write!(f, "{what} new{}", with(after)),
            (None, None) => f.write_str(what),
        }
    }
}

/// VIP, part and what: in the order in which they are told.
type Key = (String, Rank, String, String);
/// Parts are told in this order: the verdict, paths, frontends, the rest.
type Rank = u8;

#[derive(Default)]
struct Facts(BTreeMap<Key, (Class, String)>);

impl Facts {
    fn add(
        &mut self,
        place: (&str, Rank, &str),
        class: Class,
        what: impl Into<String>,
        value: impl Into<String>,
    ) {
        let (vip, rank, part) = place;
        self.0.insert((vip.to_owned(), rank, part.to_owned(), what.into()), (class, value.into()));
    }
}

/// What differs between two pieces of evidence about the same VIP, about all of a node's (whole
/// tables), or about its programs.
///
/// # Errors
/// [`JudgeError::OtherVip`] if the two are about different VIPs, [`JudgeError::Unlike`] if they are
/// about different things altogether, [`JudgeError::NoServices`] for tables without services.
pub fn diff(
    before: &Evidence,
    after: &Evidence,
    ignore: &[Class],
) -> Result<Vec<Change>, JudgeError> {
    if let (Subject::Vip(one), Subject::Vip(other)) = (&before.subject, &after.subject)
        && one.address != other.address
    {
        return Err(JudgeError::OtherVip { collected: *one, asked: *other });
    }
    let about = |one: &Evidence| std::mem::discriminant(&one.subject);
    if about(before) != about(after) {
        return Err(JudgeError::Unlike { one: before.subject.kind(), other: after.subject.kind() });
    }
    let (before, after) = (facts(before)?.0, facts(after)?.0);
    let mut keys: Vec<&Key> = before.keys().chain(after.keys()).collect();
    keys.sort();
    keys.dedup();
    let mut changes = Vec::new();
    for key in keys {
        let (one, other) = (before.get(key), after.get(key));
        let Some((class, _)) = other.or(one) else { continue };
        if one == other || ignore.contains(class) {
            continue;
        }
        let (vip, _, part, what) = key.clone();
        let value = |side: Option<&(Class, String)>| side.map(|(_, value)| value.clone());
        changes.push(Change {
            vip,
            part,
            class: *class,
            what,
            before: value(one),
            after: value(other),
        });
    }
    Ok(changes)
}

fn facts(evidence: &Evidence) -> Result<Facts, JudgeError> {
    let mut facts = Facts::default();
    node(&mut facts, evidence);
    programs(&mut facts, evidence);
    match evidence.subject {
        Subject::Vip(query) => {
            // Whatever port was asked for, the whole address is compared.
            let whole = VipQuery { port: None, protocol: None, ..query };
            let asked = if query.port.is_some() { query } else { whole };
            vip(&mut facts, evidence, &judge_question(evidence, asked)?);
        }
        Subject::Datapath { .. } => {}
        Subject::Tables => tables(&mut facts, evidence)?,
    }
    Ok(facts)
}

/// All frontends of a node, and the backends that none of them has.
fn tables(facts: &mut Facts, evidence: &Evidence) -> Result<(), JudgeError> {
    let has = |kind: MapKind| {
        let kinds = evidence.maps.iter().filter(|map| map.problem.is_none());
        kinds.filter_map(MapRecord::kind).any(|(found, _, _)| found == kind)
    };
    if !has(MapKind::Services) || !has(MapKind::Backends) {
        return Err(JudgeError::NoServices);
    }
    let tables = Tables::new(evidence);
    let mut used: BTreeSet<(Family, u32)> = BTreeSet::new();
    for mut one in programmed::of_all(evidence, &tables) {
        // What was not collected is not compared.
        if !has(MapKind::ReverseNat) {
            one.reverse_nat.good = None;
        }
        if !has(MapKind::SourceRange) {
            one.source_ranges = None;
        }
        let family = if one.address.is_ipv4() { Family::V4 } else { Family::V6 };
        used.extend(one.backends.iter().map(|backend| (family, backend.id)));
        frontend(facts, &one.address.to_string(), &one);
    }
    for family in [Family::V4, Family::V6] {
        let of_none =
            tables.backends(family).iter().filter(|one| !used.contains(&(family, one.id)));
        for one in of_none {
            let address = programmed::backend_address(one, tables.release());
            let what = format!("backend {address} of no frontend");
            let state = one.state.as_str().unwrap_or("unknown state");
            let place = ("node", 6, "backends");
            facts.add(place, Class::Services, what.clone(), state);
            facts.add(place, Class::Ids, format!("id of {what}"), one.id.to_string());
        }
    }
    Ok(())
}

fn node(facts: &mut Facts, evidence: &Evidence) {
    let place = ("node", 5, "host");
    facts.add(place, Class::Node, "host name", &evidence.host.name);
    facts.add(place, Class::Node, "kernel", &evidence.host.kernel);
    facts.add(place, Class::Ids, "boot", &evidence.host.boot_id);
    facts.add(place, Class::Times, "collected", &evidence.time.ended);
    for map in &evidence.maps {
        let place = ("node", 6, "maps");
        facts.add(place, Class::Ids, format!("id of {}", map.name), map.id.to_string());
        if let Some(total) = map.total {
            let what = format!("entries of {}", map.name);
            facts.add(place, Class::Counters, what, total.to_string());
        }
        if !map.complete && map.problem.is_none() {
            let why = "it changed faster than it could be read";
            facts.add(place, Class::Node, format!("{} may lack entries", map.name), why);
        }
        if let Some(problem) = &map.problem {
            facts.add(place, Class::Node, format!("{} cannot be read", map.name), problem);
        }
    }
    let Some(network) = &evidence.network else { return };
    for link in &network.links {
        let part = format!("device {}", link.name);
        let place = ("node", 4, part.as_str());
        let state = link.dead().unwrap_or("is up");
        facts.add(place, Class::Devices, "state", state);
        facts.add(place, Class::Devices, "MTU", link.mtu.to_string());
        for address in &link.addresses {
            facts.add(place, Class::Devices, format!("address {address}"), "");
        }
        facts.add(place, Class::Ids, "interface index", link.ifindex.to_string());
    }
    for one in &network.wireguard {
        let name = network.link(one.ifindex).map_or("a device", |link| link.name.as_str());
        let part = format!("device {name}");
        let place = ("node", 4, part.as_str());
        facts.add(place, Class::Devices, "WireGuard peers", one.peers.len().to_string());
        for (index, peer) in one.peers.iter().enumerate() {
            let what = format!("handshake of peer {index}");
            let once = if peer.handshake_s.is_some() { "there was one" } else { "none yet" };
            facts.add(place, Class::Devices, what, once);
            let what = format!("bytes of peer {index}");
            let bytes = format!("{} received, {} sent", peer.received, peer.sent);
            facts.add(place, Class::Counters, what, bytes);
        }
    }
}

fn programs(facts: &mut Facts, evidence: &Evidence) {
    let Some(found) = datapath::datapath(evidence) else { return };
    let details = |id: u32| evidence.attachments.as_ref()?.program(id);
    for device in &found.devices {
        let fallback = format!("interface {}", device.ifindex);
        let part = format!("device {}", device.name.as_deref().unwrap_or(&fallback));
        let place = ("node", 4, part.as_str());
        for program in &device.programs {
            let hook = datapath::hook_name(program.hook);
            let name = program.name.as_deref().unwrap_or("a program without a name");
            let what = format!("{name} on {hook}, place {}", program.order);
            facts.add(place, Class::Programs, what.clone(), "");
            facts.add(place, Class::Ids, format!("id of {what}"), program.program.to_string());
            if let Some(details) = details(program.program) {
                facts.add(place, Class::Ids, format!("tag of {what}"), &details.tag);
                let loaded = details.loaded_ns.to_string();
                facts.add(place, Class::Times, format!("load of {what}"), loaded);
                if let Some(runs) = details.run_count {
                    facts.add(place, Class::Counters, format!("runs of {what}"), runs.to_string());
                }
            }
        }
    }
    for socket in &found.sockets {
        let part = format!("sockets of {}", socket.subject);
        let place = ("node", 4, part.as_str());
        for program in &socket.programs {
            let name = program.name.as_deref().unwrap_or("a program without a name");
            let what = format!("{name} on {}, place {}", program.hook, program.order);
            facts.add(place, Class::Programs, what, "");
        }
    }
}

fn vip(facts: &mut Facts, evidence: &Evidence, judgement: &Judgement) {
    let Judgement { vip, verdict, programmed, .. } = judgement;
    let name = vip.address.to_string();
    let at = |rank: Rank, part: &'static str| (name.as_str(), rank, part);
    facts.add(at(0, "verdict"), Class::Verdict, "served", verdict.served.to_string());
    facts.add(at(0, "verdict"), Class::Node, "maps as of Cilium", &programmed.release);
    for path in &verdict.paths {
        let place = (name.as_str(), 1, path.path.as_str());
        let port = path.frontend.rsplit(':').next().unwrap_or(&path.frontend);
        let share = path.share.map_or_else(String::new, |share| format!(", share {share:.2}"));
        let value = format!("{} (served: {}{share})", path.outcome, path.served);
        facts.add(place, Class::Verdict, port, value);
        facts.add(place, Class::Verdict, format!("proof of {port}"), path.grade.to_string());
        if let Some(neighbour) = &path.neighbour {
            facts.add(place, Class::Neighbours, format!("neighbour of {port}"), neighbour);
        }
    }
    for finding in &verdict.findings {
        let on = finding.path.as_deref().or(finding.frontend.as_deref()).unwrap_or(&name);
        let what = format!("finding {} on {on}", finding.id);
        // The words hold ages and counts: that it is there is what is compared.
        facts.add(at(0, "verdict"), Class::Verdict, what, "");
    }
    let announcement = &programmed.announcement;
    let place = at(3, "announcement");
    let answering =
        if announcement.answering { "answers for it" } else { "does not answer for it" };
    facts.add(place, Class::Announcement, "this node", answering);
    for entry in &announcement.entries {
        let device = entry.device.clone().unwrap_or_else(|| format!("interface {}", entry.ifindex));
        facts.add(place, Class::Announcement, format!("responder entry on {device}"), "");
        let what = format!("answers on {device}");
        facts.add(place, Class::Counters, what, entry.answers.to_string());
    }
    if let Some(seconds) = announcement.agent_silent_s {
        facts.add(place, Class::Times, "agent silent for", format!("{seconds} s"));
    }
    for one in programmed.frontends.iter().chain(&programmed.wildcards) {
        frontend(facts, &name, one);
    }
    let Some(network) = &evidence.network else { return };
    for entry in network.neighbours.iter().filter(|entry| entry.address == vip.address) {
        let device = network.link(entry.ifindex).map_or("?", |link| link.name.as_str());
        let what = format!("neighbour entry of the VIP on {device}");
        facts.add(at(3, "announcement"), Class::Neighbours, what, &entry.state);
    }
}

/// One scope of a frontend of the VIP `name`, and its backends.
fn frontend(facts: &mut Facts, name: &str, frontend: &ProgrammedFrontend) {
    let part = frontend.frontend.clone();
    let place = (name, 2, part.as_str());
    let scope = match (frontend.two_scopes, frontend.scope) {
        (false, _) => "",
        (true, Scope::Internal) => " of the internal scope",
        (true, _) => " of the external scope",
    };
    facts.add(place, Class::Services, "frontend", "");
    let mut say = |what: &str, value: String| facts.add(place, Class::Services, what, value);
    say("type", frontend.service_type.as_str().to_owned());
    say("externalTrafficPolicy", format!("{:?}", frontend.external_traffic_policy));
    say("internalTrafficPolicy", format!("{:?}", frontend.internal_traffic_policy));
    say("backends that can be chosen", frontend.count.to_string());
    say("flags", frontend.flags.clone());
    if let Some(port) = frontend.l7_proxy_port {
        say("L7 proxy port", port.to_string());
    }
    if let Some(ranges) = &frontend.source_ranges {
        let verb = if ranges.deny { "denies" } else { "allows" };
        say("source ranges", format!("{verb} {}", ranges.ranges.join(" ")));
    }
    if let Some(seconds) = frontend.session_affinity_s {
        say("session affinity", format!("{seconds} s"));
    }
    if let Some(good) = frontend.reverse_nat.good {
        let word = if good { "there" } else { "missing or wrong" };
        say("reverse NAT", word.to_owned());
    }
    facts.add(place, Class::Ids, "id", frontend.reverse_nat.id.to_string());
    for backend in &frontend.backends {
        match &backend.address {
            Some(address) => {
                let what = format!("backend {address}{scope}");
                let value = format!("{}, {}", backend.state, whereabouts(backend));
                facts.add(place, Class::Services, what.clone(), value);
                facts.add(place, Class::Ids, format!("id of {what}"), backend.id.to_string());
            }
            None if backend.dangling => {
                let what = format!("slot {}{scope} leads nowhere", backend.slot);
                facts.add(place, Class::Services, what, "");
            }
            None => {}
        }
    }
}

/// Where a backend is, without the numbers that a restart of its pod changes.
fn whereabouts(backend: &super::programmed::ProgrammedBackend) -> String {
    match &backend.location {
        super::programmed::Location::LocalEndpoint { .. } => "local pod".to_owned(),
        other => other.to_string(),
    }
}
