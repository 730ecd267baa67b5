//! The rule: what a policy announces from a node needs a backend on that node, or
//! externalTrafficPolicy Cluster.

use super::{
    Answer, File, Finding, Judged, Location, Report, State,
    kustomize::selects,
    model::{Announcement, Model, Policy, Pool, Service, Workload},
    selector::{Operator, Requirement, Selector},
};
use crate::judge::FindingId;

/// The class by which a Service asks for an L2 announcement.
const L2_CLASS: &str = "io.cilium/l2-announcer";
const CONTROL_PLANE: &str = "node-role.kubernetes.io/control-plane";

const MEANING: &str = "the announcer is elected without regard to backends: a node without one \
                       answers ARP for the VIP and has nowhere to send its clients, and it does \
                       not heal by itself";
const NEXT: &str = "use externalTrafficPolicy Cluster for announced Services, or run the backend as \
                    a DaemonSet on every node that the policy selects";

/// Whether every node that may announce is sure to hold a backend.
enum Sure {
    /// It is; what it rests on, and what that takes for granted.
    Yes(String),
    /// It is not, or it cannot be told: why.
    No(String),
}

pub(super) fn judge(files: &[File], model: &Model, mut not_judged: Vec<String>) -> Report {
    let locate = |at: super::yaml::Place| Location {
        path: files.get(at.file).map(|file| file.path.clone()).unwrap_or_default(),
        line: at.line,
    };
    let announcing: Vec<&Announcement> =
        model.announcements.iter().filter(|one| one.announces()).collect();
    for silent in model.announcements.iter().filter(|one| !one.announces()) {
        not_judged.push(format!(
            "policy {} announces nothing: neither loadBalancerIPs nor externalIPs is true",
            silent.name
        ));
    }
    let mut services = Vec::new();
    let mut findings = Vec::new();
    for service in &model.services {
        let by: Vec<&Announcement> =
            announcing.iter().copied().filter(|one| selects_service(one, service)).collect();
        let location = locate(service.at);
        let mut judged = Judged {
            service: format!("{}/{}", service.object.namespace(), service.object.name()),
            location: location.clone(),
            external_traffic_policy: match &service.policy {
                Policy::Cluster => "Cluster".to_owned(),
                Policy::Local => "Local".to_owned(),
                Policy::Other(text) => text.clone(),
            },
            announced_by: by.iter().map(|one| one.name.clone()).collect(),
            addresses: addresses(service, &model.pools),
            state: State::NotAnnounced,
            why: not_announced(service, &announcing),
        };
        if !by.is_empty() {
            (judged.state, judged.why) = match &service.policy {
                Policy::Cluster => (State::Good, "every node forwards to every backend".to_owned()),
                Policy::Other(text) => (
                    State::Unknown,
                    format!("externalTrafficPolicy is `{text}`, which is not rendered"),
                ),
                Policy::Local => match sure(service, &by, model) {
                    Sure::Yes(why) => (State::Good, why),
                    Sure::No(why) => (State::Flagged, why),
                },
            };
        }
        if judged.state == State::Flagged {
            let by = by
                .iter()
                .map(|one| format!("policy {} on {}", one.name, one.where_()))
                .collect::<Vec<_>>()
                .join(" and by ");
            findings.push(Finding {
                id: FindingId::AnnouncedNoLocalBackend,
                severity: FindingId::AnnouncedNoLocalBackend.severity(),
                service: judged.service.clone(),
                location,
                seen: format!(
                    "Service {} has externalTrafficPolicy Local and is announced by {by}; {}",
                    judged.service, judged.why
                ),
                meaning: MEANING.to_owned(),
                next: NEXT.to_owned(),
            });
        }
        services.push(judged);
    }
    let (answer, sentence) = conclude(model, announcing.len(), &services);
    not_judged.extend(model.notes.iter().cloned());
    Report {
        schema: super::SCHEMA,
        answer,
        sentence,
        files: files.len(),
        policies: announcing.len(),
        services,
        findings,
        not_judged,
    }
}

fn selects_service(policy: &Announcement, service: &Service) -> bool {
    // A Service of another class is not the L2 announcer's at all, whatever its externalIPs.
    let class_meets = service.class.as_deref().is_none_or(|class| class == L2_CLASS);
    let has_address = service.load_balancer && policy.load_balancer_ips
        || !service.external_ips.is_empty() && policy.external_ips;
    class_meets && has_address && policy.services.matches(|key| service.label(key))
}

fn not_announced(service: &Service, announcing: &[&Announcement]) -> String {
    match &service.class {
        Some(class) if class != L2_CLASS => {
            format!("its loadBalancerClass {class} is not that of the L2 announcer")
        }
        _ if announcing.is_empty() => "there is no policy that announces".to_owned(),
        _ => "no policy selects it".to_owned(),
    }
}

/// Where its VIP comes from, as far as the tree tells.
fn addresses(service: &Service, pools: &[Pool]) -> Vec<String> {
    let mut all: Vec<String> =
        service.external_ips.iter().map(|address| format!("{address} (externalIPs)")).collect();
    if !service.load_balancer {
        return all;
    }
    all.extend(service.wanted.iter().map(|address| format!("{address} (asked for)")));
    for pool in pools.iter().filter(|pool| !pool.disabled) {
        if pool.services.matches(|key| service.label(key)) {
            all.push(format!("pool {} ({})", pool.name, pool.blocks.join(", ")));
        }
    }
    all
}

/// Whether every node that may announce the Service is sure to run one of its backends.
fn sure(service: &Service, by: &[&Announcement], model: &Model) -> Sure {
    let Some(selector) = &service.selector else {
        return Sure::No(
            "it has no selector: where its endpoints are is not in the tree".to_owned(),
        );
    };
    let backed: Vec<&Workload> = model
        .workloads
        .iter()
        .filter(|one| {
            one.object.namespace() == service.object.namespace() && selects(selector, one.labels())
        })
        .collect();
    if backed.is_empty() {
        return Sure::No(format!(
            "no workload in the tree has pods with its selector ({selector}), so where its \
             backends run cannot be told"
        ));
    }
    let (sets, others): (Vec<_>, Vec<_>) =
        backed.into_iter().partition(|one| one.object.kind == "DaemonSet");
    if sets.is_empty() {
        let titles: Vec<String> = others.iter().map(|one| one.title()).collect();
        return Sure::No(format!(
            "its backends are {}, which need not run on the node that announces",
            titles.join(", ")
        ));
    }
    let mut failed = Vec::new();
    for set in sets {
        let title = set.title();
        match by.iter().map(|policy| covers(set, policy, model)).collect::<Result<Vec<_>, _>>() {
            Ok(grounds) => {
                let mut words: Vec<String> = Vec::new();
                for word in grounds.into_iter().flatten().filter(|word| !word.is_empty()) {
                    if !words.contains(&word) {
                        words.push(word);
                    }
                }
                let taken = if words.is_empty() {
                    String::new()
                } else {
                    format!("; {}", words.join("; "))
                };
                return Sure::Yes(format!("{title} runs on every node that may announce{taken}"));
            }
            Err(why) => failed.push(format!("{title} may be missing there: {why}")),
        }
    }
    Sure::No(failed.join("; "))
}

/// Whether a `DaemonSet`'s pods are sure to run on every node that a policy selects. What is taken
/// for granted is told with a yes, the reason with a no.
fn covers(set: &Workload, policy: &Announcement, model: &Model) -> Result<Vec<String>, String> {
    let places = set.places()?;
    if !model.nodes.is_empty() {
        return covers_nodes(set, policy, model, &places);
    }
    let missing = |place: &Selector| -> Option<String> {
        // Cilium runs on Linux alone.
        let linux = |one: &Requirement| one.key == "kubernetes.io/os" && one.matches(Some("linux"));
        let bare: Vec<String> = place
            .0
            .iter()
            .filter(|one| !linux(one) && !policy.nodes.implies(one))
            .map(ToString::to_string)
            .collect();
        (!bare.is_empty()).then(|| bare.join(", "))
    };
    let mut lacking = Vec::new();
    for place in &places {
        match missing(place) {
            None => {
                lacking.clear();
                break;
            }
            Some(what) => lacking.push(what),
        }
    }
    if !lacking.is_empty() || places.is_empty() {
        return Err(format!(
            "it runs only on nodes with {}, which policy {} does not ask for",
            lacking.join(" or "),
            policy.name
        ));
    }
    let control_plane = Requirement {
        key: CONTROL_PLANE.to_owned(),
        operator: Operator::DoesNotExist,
        values: Vec::new(),
    };
    if set.tolerates_all() {
        return Ok(Vec::new());
    }
    if !policy.nodes.implies(&control_plane) && !set.tolerates(CONTROL_PLANE, "", "NoSchedule") {
        return Err(format!(
            "policy {} leaves control-plane nodes in, whose taint its pods do not tolerate",
            policy.name
        ));
    }
    Ok(vec![
        "that no node has a taint which its pods do not tolerate is taken for granted".to_owned(),
    ])
}

/// The same for nodes that are in the tree, one by one.
fn covers_nodes(
    set: &Workload,
    policy: &Announcement,
    model: &Model,
    places: &[Selector],
) -> Result<Vec<String>, String> {
    let mut count = 0;
    for node in model.nodes.iter().filter(|node| policy.nodes.matches(|key| node.label(key))) {
        count += 1;
        let label = |key: &str| match key {
            // Of matchFields.
            "metadata.name" => Some(node.name()),
            _ => node.label(key),
        };
        if !places.iter().any(|place| place.matches(label)) {
            return Err(format!("its pods do not go to node {}", node.name()));
        }
        let taints = node.root.at(&["spec", "taints"]);
        for taint in taints.map(super::yaml::Node::items).unwrap_or_default() {
            let get = |key: &str| taint.text_of(key).unwrap_or_default();
            let (key, value, effect) = (get("key"), get("value"), get("effect"));
            // DaemonSets tolerate what the node's own state brings.
            let own = key.starts_with("node.kubernetes.io/");
            if effect != "PreferNoSchedule" && !own && !set.tolerates(key, value, effect) {
                return Err(format!(
                    "its pods do not tolerate the taint {key} of node {}",
                    node.name()
                ));
            }
        }
    }
    if count == 0 {
        return Err(format!("no node in the tree is selected by policy {}", policy.name));
    }
    Ok(vec![format!("held against the {count} nodes in the tree")])
}

fn conclude(model: &Model, policies: usize, services: &[Judged]) -> (Answer, String) {
    let count = |state: State| services.iter().filter(|one| one.state == state).count();
    let names = |state: State| -> String {
        let all: Vec<&str> = services
            .iter()
            .filter(|one| one.state == state)
            .map(|one| one.service.as_str())
            .collect();
        all.join(", ")
    };
    let announced = services.len() - count(State::NotAnnounced);
    let (flagged, unknown) = (count(State::Flagged), count(State::Unknown));
    let plural = |count: usize, word: &str| {
        if count == 1 { format!("1 {word}") } else { format!("{count} {word}s") }
    };
    if flagged > 0 {
        return (
            Answer::No,
            format!(
                "NO: {flagged} of {} with externalTrafficPolicy Local may be announced from a node \
                 without a backend: {}",
                plural(announced, "announced Service"),
                names(State::Flagged)
            ),
        );
    }
    let nothing = if model.services.is_empty() && model.announcements.is_empty() {
        Some("there is neither a Service of type LoadBalancer nor a CiliumL2AnnouncementPolicy")
    } else if model.services.is_empty() {
        Some("there is no Service of type LoadBalancer")
    } else if policies == 0 {
        Some("there is no CiliumL2AnnouncementPolicy that announces")
    } else if announced == 0 {
        Some("no policy selects any of the Services")
    } else {
        None
    };
    if let Some(nothing) = nothing {
        return (
            Answer::Unknown,
            format!(
                "CANNOT TELL: {nothing} in what was read, so nothing was held against the rule"
            ),
        );
    }
    if unknown > 0 {
        return (
            Answer::Unknown,
            format!(
                "CANNOT TELL: externalTrafficPolicy is not rendered for {}",
                names(State::Unknown)
            ),
        );
    }
    (
        Answer::Yes,
        format!(
            "YES: {} by {}, each with a backend wherever it may be announced, or externalTrafficPolicy \
             Cluster",
            plural(announced, "Service is announced")
                .replace("Service is announceds", "Services are announced"),
            if policies == 1 { "1 policy".to_owned() } else { format!("{policies} policies") },
        ),
    )
}
