//! From the paths to one answer and the sentence that says it.

use super::{
    Finding, FindingId, Outcome, PathVerdict, Served,
    programmed::{Announcement, Programmed, ProgrammedFrontend, TrafficPolicy},
};
use crate::{
    cilium::{layout::MapKind, services::Scope},
    evidence::{VipQuery, tables::Tables},
};

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
