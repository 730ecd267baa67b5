//! Walks a model packet through the recorded state, in the order of the datapath.
//!
//! This version knows the maps and not yet the programs: a step that needs to know which program a
//! packet meets ends in `unknown` and says so. What the maps settle alone is settled: a frontend
//! without a backend serves nobody, whatever is attached.

use std::collections::BTreeMap;

use super::{
    Finding, FindingId, Grade, Outcome, PathVerdict, Served,
    programmed::{Announcement, Programmed, ProgrammedFrontend, TrafficPolicy},
};
use crate::{
    cilium::{
        layout::MapKind,
        proto::Protocol,
        release::{NoBackend, SocketAnswer},
        services::Scope,
    },
    evidence::{Evidence, VipQuery, tables::Tables},
};

/// What the maps alone say of one scope of a frontend.
struct Step {
    outcome: Outcome,
    served: Served,
    share: Option<f64>,
    why: Vec<String>,
}

/// Every frontend on every path.
pub(super) fn paths(
    evidence: &Evidence,
    tables: &Tables,
    programmed: &Programmed,
) -> Vec<PathVerdict> {
    let devices: Vec<&str> = evidence
        .devices
        .iter()
        .filter_map(|device| device.name.as_deref())
        .filter(|name| !name.starts_with("cilium_") && !name.starts_with("lxc"))
        .collect();
    let mut paths = Vec::new();
    for (external, internal) in scopes(programmed) {
        let Some(name) = external.or(internal).map(|frontend| &frontend.frontend) else { continue };
        let name = name.trim_end_matches("/i");
        let mut add = |path: String, device: Option<&str>, step: &Step, missing: &str| {
            let mut why = step.why.clone();
            if step.outcome == Outcome::Unknown {
                why.push(missing.to_owned());
            }
            paths.push(PathVerdict {
                frontend: name.to_owned(),
                path,
                device: device.map(str::to_owned),
                outcome: step.outcome,
                served: step.served,
                share: step.share,
                grade: Grade::Programmed,
                why,
                neighbour: None,
            });
        };
        let outside = step(tables, programmed, external, true);
        let attached = "which programs run on the device was not read";
        if devices.is_empty() {
            add("forwarded".to_owned(), None, &outside, attached);
        }
        for device in &devices {
            add(format!("forwarded via {device}"), Some(device), &outside, attached);
        }
        // Sockets and pods see the internal scope where there is one of its own.
        let separate = external.is_none_or(|frontend| frontend.two_scopes);
        let seen_inside = if separate { internal.or(external) } else { external };
        let inside = step(tables, programmed, seen_inside, false);
        add("socket on host".to_owned(), None, &inside, "which cgroup programs run was not read");
        add("pod".to_owned(), None, &inside, "which programs run for the pod was not read");
    }
    paths
}

/// The scopes of each port and protocol: external and internal.
fn scopes(
    programmed: &Programmed,
) -> impl Iterator<Item = (Option<&ProgrammedFrontend>, Option<&ProgrammedFrontend>)> {
    let mut ports: BTreeMap<(u16, Protocol), (Option<_>, Option<_>)> = BTreeMap::new();
    for frontend in &programmed.frontends {
        let (external, internal) = ports.entry((frontend.port, frontend.protocol)).or_default();
        match frontend.scope {
            Scope::External => *external = Some(frontend),
            Scope::Internal => *internal = Some(frontend),
            Scope::Other(_) => {}
        }
    }
    ports.into_values()
}

fn step(
    tables: &Tables,
    programmed: &Programmed,
    frontend: Option<&ProgrammedFrontend>,
    from_outside: bool,
) -> Step {
    let no =
        |outcome, why: String| Step { outcome, served: Served::No, share: None, why: vec![why] };
    let unknown = |why: String| Step {
        outcome: Outcome::Unknown,
        served: Served::Unknown,
        share: None,
        why: vec![why],
    };
    let Some(frontend) = frontend.filter(|frontend| frontend.master) else {
        let scope = if from_outside { "external" } else { "internal" };
        return if from_outside && !programmed.wildcards.is_empty() {
            no(
                Outcome::Dropped,
                format!("no {scope} entry; the address's wildcard entry drops the packet"),
            )
        } else {
            no(Outcome::Untranslated, format!("no {scope} entry: nothing translates the packet"))
        };
    };
    if from_outside {
        if let Some(ranges) = &frontend.source_ranges
            && !ranges.deny
            && ranges.ranges.is_empty()
        {
            if !ranges.complete {
                return unknown("source ranges are checked and could not be read".to_owned());
            }
            return no(
                Outcome::Denied,
                "source ranges are checked and there are none: every source is denied".to_owned(),
            );
        }
        if !frontend.routable {
            return no(
                Outcome::Dropped,
                "the entry is not routable: it may not be reached from outside".to_owned(),
            );
        }
    }
    if let Some(port) = frontend.l7_proxy_port {
        return unknown(format!(
            "L7: handed to the local proxy port {port} if the datapath was built with L7 load \
             balancing"
        ));
    }
    let scope = match frontend.scope {
        Scope::Internal => "internal",
        _ => "external",
    };
    if frontend.count == 0 {
        let answer = no_backend_answer(tables, from_outside);
        return no(Outcome::NoBackend, format!("0 backends in the {scope} scope: {answer}"));
    }
    let usable = frontend.usable();
    let unread = frontend.unread();
    if unread > 0 {
        return unknown(format!(
            "where {unread} of {} slots lead could not be read",
            frontend.count
        ));
    }
    if usable == 0 {
        return no(
            Outcome::NoBackend,
            format!("none of {} slots leads to a backend", frontend.count),
        );
    }
    if from_outside && frontend.reverse_nat.good == Some(false) {
        return no(
            Outcome::Unknown,
            format!(
                "translated, but reverse NAT entry {} is missing or wrong: the client gets no \
                 usable reply",
                frontend.reverse_nat.id
            ),
        );
    }
    // By slot, or by place in the Maglev table, which sockets do not use.
    let maglev = frontend.maglev.as_ref().filter(|_| from_outside);
    let (lost, all, what) = match maglev {
        Some(table) => (table.nowhere, table.places, "places of its Maglev table"),
        None => (usize::from(frontend.count) - usable, usize::from(frontend.count), "slots"),
    };
    #[allow(clippy::cast_precision_loss, reason = "at most 131071 places")]
    let share = (lost > 0).then(|| 1.0 - lost as f64 / all as f64);
    Step {
        outcome: Outcome::Unknown,
        served: Served::Unknown,
        share,
        why: vec![match lost {
            0 => format!("{all} of {all} {what} lead to a backend"),
            lost => {
                format!("{lost} of {all} {what} lead nowhere: that share of connections fails")
            }
        }],
    }
}

/// What a client meets at a frontend without backends, in the release at hand.
fn no_backend_answer(tables: &Tables, from_outside: bool) -> &'static str {
    let behaviour = tables.releases.behaviour();
    if from_outside {
        match behaviour.no_backend {
            NoBackend::ToStack => "the packet goes up the stack as if there were no service",
            NoBackend::Drop => "dropped in BPF",
            NoBackend::Reject => {
                "rejected in BPF with ICMP unreachable (or dropped, as configured)"
            }
        }
    } else {
        match behaviour.socket_no_backend {
            SocketAnswer::Untranslated => "the socket keeps the VIP, its packets go up the stack",
            SocketAnswer::NotPermitted => "connect fails with EPERM",
            SocketAnswer::HostUnreachable => "connect fails with EHOSTUNREACH",
        }
    }
}

/// Whether the node serves the VIP, and the sentence that says so.
pub(super) fn conclude(
    query: &VipQuery,
    tables: &Tables,
    programmed: &Programmed,
    paths: &[PathVerdict],
    findings: &[Finding],
) -> (Served, String) {
    if let Some(problem) = tables.doubt(MapKind::Services, query.address) {
        return (Served::Unknown, format!("CANNOT TELL: {problem}"));
    }
    if let Some(absent) = findings.iter().find(|finding| finding.id == FindingId::FrontendAbsent) {
        return (Served::No, format!("NO: {}", absent.seen));
    }
    // A VIP is for clients from outside: the forwarded paths decide.
    let outside: Vec<_> = paths.iter().filter(|path| path.path.starts_with("forwarded")).collect();
    if outside.is_empty() {
        let names: Vec<&str> =
            programmed.frontends.iter().map(|frontend| frontend.frontend.as_str()).collect();
        return (
            Served::Unknown,
            format!(
                "CANNOT TELL: the entries of {query} ({}) have scopes that this version does not \
                 know",
                names.join(", ")
            ),
        );
    }
    let dead = |path: &&&PathVerdict| path.served == Served::No;
    let served = if outside.iter().all(|path| dead(&path)) {
        Served::No
    } else if outside.iter().any(|path| dead(&path) || path.share.is_some()) {
        Served::Partly
    } else if outside.iter().all(|path| path.served == Served::Yes) {
        Served::Yes
    } else {
        Served::Unknown
    };
    let sentence = match served {
        Served::No | Served::Partly => no_sentence(query, programmed, &outside, served),
        Served::Yes | Served::Unknown => programmed_sentence(programmed),
    };
    (served, sentence)
}

fn no_sentence(
    query: &VipQuery,
    programmed: &Programmed,
    outside: &[&PathVerdict],
    served: Served,
) -> String {
    let word = if served == Served::No { "NO" } else { "PARTLY" };
    let who = answers(&programmed.announcement, query);
    let mut parts = Vec::new();
    let mut healthy = Vec::new();
    for frontend in &programmed.frontends {
        let alone = || {
            programmed.frontends.iter().all(|other| {
                (other.port, other.protocol, other.scope)
                    != (frontend.port, frontend.protocol, Scope::External)
            })
        };
        match frontend.scope {
            Scope::External => {}
            // Clients from outside have no entry for this port.
            Scope::Internal if alone() => {
                let port = format!("{}/{}", frontend.port, frontend.protocol);
                parts.push(format!("{port} has no entry for clients from outside"));
                continue;
            }
            _ => continue,
        }
        let Some(path) = outside.iter().find(|path| path.frontend == frontend.frontend) else {
            continue;
        };
        let port = format!("{}/{}", frontend.port, frontend.protocol);
        if path.served != Served::No && path.share.is_none() {
            healthy.push(port);
        } else if path.outcome == Outcome::NoBackend && frontend.count == 0 {
            parts.push(format!("{port} has {}", no_backends(programmed, frontend)));
        } else {
            parts.push(format!("{port}: {}", path.why.first().map_or("", String::as_str)));
        }
    }
    let mut sentence = format!("{word}: ");
    if let Some(who) = who {
        sentence.push_str(&who);
        sentence.push_str(", but ");
    }
    sentence.push_str(&parts.join("; "));
    if !healthy.is_empty() {
        sentence.push_str("; ");
        sentence.push_str(&healthy.join(", "));
        sentence.push_str(" programmed with backends");
    }
    sentence
}

/// `0 backends in its external scope (Local); 1 in the internal scope, not on this node`
fn no_backends(programmed: &Programmed, frontend: &ProgrammedFrontend) -> String {
    let policy = match frontend.external_traffic_policy {
        TrafficPolicy::Local => " (externalTrafficPolicy Local)",
        TrafficPolicy::Cluster => "",
    };
    let inside = programmed.frontends.iter().find(|other| {
        (other.port, other.protocol, other.scope)
            == (frontend.port, frontend.protocol, Scope::Internal)
    });
    match inside {
        Some(inside) if inside.count > 0 => format!(
            "0 backends in its external scope{policy}; {} in the internal scope, not on this node",
            inside.count
        ),
        Some(_) => format!("0 backends in either scope{policy}"),
        None => format!("0 backends{policy}"),
    }
}

/// `this node answers ARP for 192.168.2.22 on eno1`
fn answers(announcement: &Announcement, query: &VipQuery) -> Option<String> {
    if !announcement.answering {
        return None;
    }
    let devices: Vec<String> = announcement
        .entries
        .iter()
        .map(|entry| entry.device.clone().unwrap_or_else(|| format!("interface {}", entry.ifindex)))
        .collect();
    let protocol = if query.address.is_ipv4() { "ARP" } else { "neighbour solicitations" };
    Some(format!("this node answers {protocol} for {} on {}", query.address, devices.join(", ")))
}

fn programmed_sentence(programmed: &Programmed) -> String {
    let frontends: Vec<String> = programmed
        .frontends
        .iter()
        .filter(|frontend| frontend.scope == Scope::External)
        .map(|frontend| match frontend.l7_proxy_port {
            Some(port) => {
                format!("{}/{} to the proxy port {port}", frontend.port, frontend.protocol)
            }
            None => {
                format!("{}/{}: {}", frontend.port, frontend.protocol, frontend.usable_of_count())
            }
        })
        .collect();
    format!(
        "UNKNOWN: programmed in the maps ({}); whether a packet is translated needs the programs \
         on the devices, which were not read",
        frontends.join("; ")
    )
}
