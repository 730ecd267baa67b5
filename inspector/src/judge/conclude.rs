//! From the paths to one answer and the sentence that says it.

use super::{
    Finding, FindingId, Outcome, PathVerdict, Served,
    programmed::{Announcement, Location, Programmed, ProgrammedFrontend, TrafficPolicy},
    walk::ONLY_SOME,
};
use crate::{
    cilium::{layout::MapKind, services::Scope},
    evidence::{Evidence, VipQuery, tables::Tables},
};

/// Whether the node serves the VIP, and the sentence that says so.
pub(super) fn conclude(
    query: &VipQuery,
    tables: &Tables,
    programmed: &Programmed,
    paths: &[PathVerdict],
    findings: &[Finding],
    evidence: &Evidence,
) -> (Served, String) {
    if let Some(problem) = tables.doubt(MapKind::Services, query.address) {
        return (Served::Unknown, format!("CANNOT TELL: {problem}"));
    }
    if let Some(absent) = findings.iter().find(|finding| finding.id == FindingId::FrontendAbsent) {
        return (Served::No, format!("NO: {}", absent.seen));
    }
    // A VIP is for clients from outside: the forwarded paths decide.
    let outside: Vec<_> = paths
        .iter()
        .filter(|path| path.path.starts_with("forwarded via") || path.path == "forwarded")
        .collect();
    if let Some(why) = elsewhere(evidence) {
        return (Served::Unknown, format!("CANNOT TELL: {why}"));
    }
    if outside.is_empty() {
        return nothing_to_judge(query, programmed, paths, evidence);
    }
    if let Some(name) = no_such_device(evidence) {
        return (Served::Unknown, format!("CANNOT TELL: this node has no device {name}"));
    }
    let dead = |path: &&&PathVerdict| path.served == Served::No;
    let served = if outside.iter().all(|path| dead(&path)) {
        Served::No
    } else if outside.iter().any(|path| {
        path.served == Served::No || path.served == Served::Partly || path.share.is_some()
    }) {
        Served::Partly
    } else if outside.iter().all(|path| path.served == Served::Yes) {
        Served::Yes
    } else {
        Served::Unknown
    };
    let mute = mute(programmed, evidence);
    if let (Served::Yes, Some(why)) = (served, &mute) {
        let sentence = yes_sentence(query, &outside, evidence);
        let sentence = sentence.strip_prefix("YES").unwrap_or(&sentence);
        return (Served::Partly, format!("PARTLY: yes{sentence}; but {why}"));
    }
    let sentence = match served {
        Served::No | Served::Partly => no_sentence(query, programmed, &outside, served),
        Served::Yes => yes_sentence(query, &outside, evidence),
        Served::Unknown => unknown_sentence(programmed, &outside),
    };
    (served, sentence)
}

/// Why clients of the LAN do not find a VIP here that this node is to announce.
fn mute(programmed: &Programmed, evidence: &Evidence) -> Option<String> {
    let announcement = &programmed.announcement;
    let network = evidence.network.as_ref()?;
    let dead = announcement.entries.iter().find_map(|entry| {
        let link = network.link(entry.ifindex)?;
        Some(format!("it is announced on {}, which {}", link.name, link.dead()?))
    });
    if dead.is_some() {
        return dead;
    }
    let silent = !announcement.answering
        && !announcement.entries.is_empty()
        && announcement.agent_silent_s.is_some();
    silent.then(|| {
        "the agent is dead and its L2 responder silent: clients without the VIP in their ARP cache \
         do not find this node"
            .to_owned()
    })
}

/// Whether Cilium's programs are attached, but to devices of another network namespace.
fn elsewhere(evidence: &Evidence) -> Option<&'static str> {
    let attachments = evidence.attachments.as_ref()?;
    let mut links = attachments
        .links
        .iter()
        .filter(|link| matches!(link.kind.as_str(), "tcx" | "xdp" | "netkit") && !link.defunct)
        .peekable();
    links.peek()?;
    links.all(|link| link.shown != Some(true)).then_some(
        "Cilium's programs are attached to devices of another network namespace than this one: run \
         in the host's, or name it with --netns",
    )
}

/// A device of `--via` that this node does not have.
fn no_such_device(evidence: &Evidence) -> Option<&str> {
    let network = evidence.network.as_ref()?;
    let is_here = |name: &&String| network.links.iter().any(|link| link.name == **name);
    evidence.via.iter().find(|name| !is_here(name)).map(String::as_str)
}

/// What can be said without a single path from outside.
fn nothing_to_judge(
    query: &VipQuery,
    programmed: &Programmed,
    paths: &[PathVerdict],
    evidence: &Evidence,
) -> (Served, String) {
    if let Some(network) = &evidence.network {
        let links = || network.links.iter().filter(|link| evidence.via.contains(&link.name));
        if let Some((link, what)) = links().find_map(|link| Some((link, link.dead()?))) {
            return (Served::No, format!("NO: nothing arrives on {}, which {what}", link.name));
        }
        if !evidence.via.is_empty() {
            let names = evidence.via.join(" or ");
            let why = match links().next() {
                None => format!("this node has no device {names}"),
                Some(_) => format!("clients from outside do not come in through {names}"),
            };
            return (Served::Unknown, format!("CANNOT TELL: {why}"));
        }
        if !paths.is_empty() {
            let why = "no device is up, with carrier, on which clients from outside could come in";
            return (Served::No, format!("NO: {why}"));
        }
    }
    let names: Vec<&str> =
        programmed.frontends.iter().map(|frontend| frontend.frontend.as_str()).collect();
    let names = names.join(", ");
    (
        Served::Unknown,
        format!(
            "CANNOT TELL: the entries of {query} ({names}) have scopes that this version does not \
             know"
        ),
    )
}

/// `443/TCP` of a frontend's name.
fn port(path: &PathVerdict) -> &str {
    path.frontend.rsplit(':').next().unwrap_or(&path.frontend)
}

/// The devices of some paths, without repetition: `via eno1 and wg0`.
fn via<'p>(paths: impl Iterator<Item = &'p PathVerdict>) -> String {
    let mut names: Vec<&str> = Vec::new();
    for name in paths.filter_map(|path| path.device.as_deref()) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    match names.split_last() {
        None => String::new(),
        Some((last, [])) => format!(" via {last}"),
        Some((last, rest)) => format!(" via {} and {last}", rest.join(", ")),
    }
}

/// What is done with the packets of the paths that are served.
fn done(paths: &[&PathVerdict]) -> String {
    let ports = |outcome: Outcome| -> Vec<&str> {
        let mut ports: Vec<&str> = Vec::new();
        for path in paths.iter().filter(|path| path.outcome == outcome) {
            if !ports.contains(&port(path)) {
                ports.push(port(path));
            }
        }
        ports
    };
    let mut clauses = Vec::new();
    let translated = ports(Outcome::DnatBeforeNeigh);
    if !translated.is_empty() {
        clauses.push(format!("{} translated to a backend", translated.join(", ")));
    }
    let proxied = ports(Outcome::ProxiedBeforeNeigh);
    if !proxied.is_empty() {
        clauses.push(format!("{} handed to the local proxy", proxied.join(", ")));
    }
    format!("{} in BPF before any neighbour look-up", clauses.join(", "))
}

fn yes_sentence(query: &VipQuery, outside: &[&PathVerdict], evidence: &Evidence) -> String {
    let mut sentence = format!("YES{}: {}", via(outside.iter().copied()), done(outside));
    for path in outside {
        for restriction in path.why.iter().filter(|why| why.starts_with(ONLY_SOME)) {
            if !sentence.contains(restriction.as_str()) {
                sentence = format!("{sentence}; {}: {restriction}", port(path));
            }
        }
    }
    let alarming = evidence.network.iter().flat_map(|network| &network.neighbours).find(|entry| {
        entry.address == query.address && matches!(entry.state.as_str(), "INCOMPLETE" | "FAILED")
    });
    if let Some(entry) = alarming {
        sentence += " (its neighbour entry, ";
        sentence += &entry.state;
        sentence += ", has no bearing)";
    }
    sentence
}

fn no_sentence(
    query: &VipQuery,
    programmed: &Programmed,
    outside: &[&PathVerdict],
    served: Served,
) -> String {
    let word = if served == Served::No { "NO" } else { "PARTLY" };
    let mut parts: Vec<String> = Vec::new();
    let mut good: Vec<&PathVerdict> = Vec::new();
    let mut unsure: Vec<&PathVerdict> = Vec::new();
    let mut rest = outside.to_vec();
    while let Some(first) = rest.first().copied() {
        // Devices on which a frontend fares alike are named together.
        let (same, others): (Vec<_>, Vec<_>) = rest.into_iter().partition(|path| {
            (&path.frontend, path.outcome, path.served, &path.why)
                == (&first.frontend, first.outcome, first.served, &first.why)
        });
        rest = others;
        match (first.served, first.share) {
            (Served::Yes, None) => good.extend(same),
            (Served::Unknown, None) => unsure.extend(same),
            _ => parts.push(format!(
                "{}{} {}",
                port(first),
                if outside.iter().filter(|path| path.frontend == first.frontend).count()
                    == same.len()
                {
                    String::new()
                } else {
                    via(same.iter().copied())
                },
                trouble(programmed, first)
            )),
        }
    }
    let mut sentence = format!("{word}: ");
    if let Some(who) = answers(&programmed.announcement, query) {
        sentence.push_str(&who);
        sentence.push_str(", but ");
    }
    sentence.push_str(&parts.join("; "));
    if !good.is_empty() {
        sentence = format!("{sentence}; {}{}", done(&good), via(good.iter().copied()));
    }
    if !unsure.is_empty() {
        let mut doubtful: Vec<&str> = unsure.iter().map(|path| port(path)).collect();
        doubtful.dedup();
        let via = via(unsure.iter().copied());
        sentence = format!("{sentence}; {} cannot be told{via}", doubtful.join(", "));
    }
    sentence
}

/// What is wrong on a path, behind the port: `has 0 backends …`.
fn trouble(programmed: &Programmed, path: &PathVerdict) -> String {
    let frontend = programmed
        .frontends
        .iter()
        .find(|one| one.frontend == path.frontend && one.scope == Scope::External);
    match (path.outcome, frontend) {
        (Outcome::NoBackend, Some(frontend)) if frontend.count == 0 => {
            format!("has {}", no_backends(programmed, frontend))
        }
        (_, None) => "has no entry for clients from outside".to_owned(),
        (Outcome::Untranslated, _) => format!("is not translated: {}", path.why.join("; ")),
        (Outcome::ProxiedBeforeNeigh, _) => {
            format!("goes to the local proxy: {}", path.why.last().map_or("", String::as_str))
        }
        _ => {
            let why: Vec<&str> = path
                .why
                .iter()
                .map(String::as_str)
                .filter(|why| !why.ends_with("runs there"))
                .collect();
            match path.served {
                Served::Partly => format!("is served in part: {}", why.join("; ")),
                _ => format!("is not served: {}", why.join("; ")),
            }
        }
    }
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
            "0 backends in its external scope{policy}; {} in the internal scope{}",
            inside.count,
            whereabouts(inside)
        ),
        Some(_) => format!("0 backends in either scope{policy}"),
        None => format!("0 backends{policy}"),
    }
}

/// `, not on this node`, of the backends that can be chosen.
fn whereabouts(frontend: &ProgrammedFrontend) -> String {
    let chosen = || frontend.backends.iter().filter(|backend| backend.selectable);
    let here = chosen()
        .filter(|backend| {
            matches!(backend.location, Location::LocalEndpoint { .. } | Location::ThisNode)
        })
        .count();
    if here > 0 {
        format!(", {here} of them on this node")
    } else if chosen().any(|backend| matches!(backend.location, Location::Unknown)) {
        String::new()
    } else {
        ", not on this node".to_owned()
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

fn unknown_sentence(programmed: &Programmed, outside: &[&PathVerdict]) -> String {
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
    let missing = outside
        .iter()
        .find(|path| path.served == Served::Unknown)
        .map_or_else(String::new, |path| path.why.join("; "));
    format!("UNKNOWN: programmed in the maps ({}), but {missing}", frontends.join("; "))
}
