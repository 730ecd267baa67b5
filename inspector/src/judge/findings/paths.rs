//! Findings about the way of a packet: programs, devices, neighbours, the local proxy.

use std::net::IpAddr;

use super::{FindingId, Findings};
use crate::{
    evidence::{Evidence, VipQuery, network::Network},
    judge::{
        Outcome, PathVerdict,
        attached::{Facts, Met},
        datapath,
        programmed::{Programmed, ProgrammedFrontend},
        stack,
    },
};

/// All of them.
pub(super) fn find(
    findings: &mut Findings,
    evidence: &Evidence,
    programmed: &Programmed,
    query: &VipQuery,
    paths: &[PathVerdict],
    facts: &Facts,
) {
    if let Some(datapath) = datapath::datapath(evidence) {
        // Devices without a program are told of with what that means for the VIP.
        let others =
            datapath.findings.into_iter().filter(|one| one.id != FindingId::DeviceNoDatapath);
        findings.0.extend(others);
    }
    conflicts(findings, paths);
    if programmed.frontends.is_empty() {
        return;
    }
    no_datapath(findings, query, paths, facts);
    socket_lb(findings, evidence, facts);
    unreachable_backends(findings, evidence, programmed);
    let Some(network) = &evidence.network else { return };
    proxy_path(findings, evidence, network, programmed, query);
    announcing_devices(findings, network, programmed);
    mtu(findings, network, facts);
    no_client(findings, network);
    neighbour(findings, network, query, paths);
    ghosts(findings, network, programmed);
}

/// Paths on which a better proof contradicts what is programmed.
fn conflicts(findings: &mut Findings, paths: &[PathVerdict]) {
    for path in paths {
        let Some(simulated) = path.simulated.as_ref().filter(|one| one.conflict) else { continue };
        let denied = simulated.denied.as_ref().filter(|denied| !denied.good);
        let seen = match denied {
            Some(denied) => format!(
                "{} {}: {} is outside of its source ranges, and its packet was {}",
                path.frontend, path.path, denied.source, denied.result
            ),
            None => format!(
                "{} {}: programmed is {}; of {} simulated packets each was {}",
                path.frontend,
                path.path,
                simulated.programmed,
                simulated.packets,
                simulated.came()
            ),
        };
        findings.add_on(
            FindingId::ProofConflict,
            &path.path,
            seen,
            "what Cilium's program does is not what the maps, as they were read, say: the state \
             changed in between, the program uses other maps, or this tool does not know the \
             release; the simulation is the better proof",
            "run it again; if it stays, save the evidence (--save FILE) and report it",
        );
        if let Some(added) = findings.0.last_mut() {
            added.frontend = Some(path.frontend.clone());
        }
    }
}

/// Devices without a program that load-balances, from which clients come.
fn no_datapath(findings: &mut Findings, query: &VipQuery, paths: &[PathVerdict], facts: &Facts) {
    for (device, met) in &facts.devices {
        let (Met::Nothing(what) | Met::NoLoadBalancer(what)) = met else { continue };
        let path = format!("forwarded via {}", device.name);
        let verdict = paths.iter().find(|verdict| verdict.path == path);
        let fate = verdict.and_then(|verdict| verdict.why.last()).map_or("", String::as_str);
        findings.add_on(
            FindingId::DeviceNoDatapath,
            &path,
            format!("{}: {what}", device.name),
            &format!("a packet for {} that arrives there is not translated: {fate}", query.address),
            "add the device to Cilium's `devices` (or restart the agent if it was added later); if \
             no client comes in there, narrow the question with --via",
        );
    }
}

/// Socket-LB that was set up and is not in force for this process.
fn socket_lb(findings: &mut Findings, evidence: &Evidence, facts: &Facts) {
    let Some(attachments) = &evidence.attachments else { return };
    let pinned = attachments.links.iter().filter(|link| link.path.contains("/socketlb/")).count();
    // connect, else sendmsg (UDP sockets that do not connect).
    let ineffective = facts.host.iter().find_map(|met| match met {
        Met::Nothing(what) => Some(what),
        _ => None,
    });
    let Some(what) = ineffective.filter(|_| pinned > 0) else { return };
    findings.add_on(
        FindingId::SocketLbIneffective,
        "socket on host",
        format!("Cilium has {pinned} socket-LB links pinned, but {what}"),
        "processes of the host connect to the VIP itself: the packets leave through the stack, \
         where its neighbour matters",
        "Cilium's cgroup root is not above this process, or its links sit on a cgroup that is gone: \
         see `inspect datapath`, then restart the agent",
    );
}

/// Backends to which there is no living way.
fn unreachable_backends(findings: &mut Findings, evidence: &Evidence, programmed: &Programmed) {
    for frontend in &programmed.frontends {
        let hops = stack::hops(evidence, frontend);
        let dead: Vec<&stack::Hop> = hops.iter().filter(|hop| hop.dead).collect();
        if let Some(first) = dead.first() {
            findings.add(
                FindingId::BackendUnreachable,
                Some(&frontend.frontend),
                format!(
                    "{}: the way to {} of {} backends is dead: {}",
                    frontend.frontend,
                    dead.len(),
                    hops.len(),
                    first.text
                ),
                "packets are translated and then cannot leave: this neighbour matters, the VIP's \
                 does not",
                "see whether the backend's node is up and answers on this network",
            );
        }
    }
}

/// The way from the mark to the local proxy.
fn proxy_path(
    findings: &mut Findings,
    evidence: &Evidence,
    network: &Network,
    programmed: &Programmed,
    query: &VipQuery,
) {
    let v6 = query.address.is_ipv6();
    let config = |name: &str| network.node_config.contains_key(name);
    for frontend in &programmed.frontends {
        let Some(port) = frontend.l7_proxy_port else { continue };
        // Without the switch and without the rule the datapath knows no L7: it balances.
        let ruled = stack::has_proxy_rule(network, v6);
        if !config("ENABLE_L7_LB") && (!network.node_config.is_empty() || !ruled) {
            continue;
        }
        let broken = stack::proxy_way(evidence, network, port, v6).broken;
        if !broken.is_empty() {
            findings.add(
                FindingId::ProxyPathBroken,
                Some(&frontend.frontend),
                format!("{}: {}", frontend.frontend, broken.join("; ")),
                "packets are marked for the local proxy in BPF and do not get there",
                "see whether the proxy (Envoy) runs on this node, and whether the agent could write \
                 its rules",
            );
        }
    }
}

/// Devices on which this node answers for the VIP.
fn announcing_devices(findings: &mut Findings, network: &Network, programmed: &Programmed) {
    for entry in &programmed.announcement.entries {
        let Some(link) = network.link(entry.ifindex) else { continue };
        if let Some(what) = link.dead() {
            findings.add(
                FindingId::CarrierDownAnnouncing,
                None,
                format!(
                    "this node has a responder entry for the VIP on {}, which {what}",
                    link.name
                ),
                "nobody's ARP request reaches it there, and the lease keeps other nodes silent",
                "see the link, or take the device out of the announcement policy",
            );
        }
    }
}

/// Devices without Ethernet header whose packets are smaller than those of backends.
fn mtu(findings: &mut Findings, network: &Network, facts: &Facts) {
    let largest =
        network.links.iter().filter(|link| link.name.starts_with("lxc")).map(|link| link.mtu).max();
    for (device, _) in &facts.devices {
        let Some(link) = network.link(device.ifindex).filter(|link| !link.ethernet) else {
            continue;
        };
        let Some(backends) = largest.filter(|largest| *largest > link.mtu) else { continue };
        findings.add_on(
            FindingId::L3Mtu,
            &format!("forwarded via {}", device.name),
            format!("MTU {} on {}, {backends} on the pods' devices", link.mtu, device.name),
            "replies that are larger cannot leave there: half of a page loads, unless the client \
             announced a smaller segment size",
            "look for \"FIB lookup failed\" with error 8 in the drop counters; lower the pods' MTU \
             or clamp the segment size",
        );
    }
}

/// WireGuard devices to which nobody ever came.
fn no_client(findings: &mut Findings, network: &Network) {
    for device in &network.wireguard {
        if device.peers.iter().any(|peer| peer.handshake_s.is_some()) {
            continue;
        }
        let name = stack::device_name(network, device.ifindex);
        findings.add_on(
            FindingId::NoClientYet,
            &format!("forwarded via {name}"),
            format!("{name}: {} peers, no handshake yet", device.peers.len()),
            "no client has ever come in there: nothing can be observed on it",
            "connect a client first; what is said of this path is derived from state",
        );
    }
}

/// An alarming neighbour entry of the VIP that nothing looks up.
fn neighbour(findings: &mut Findings, network: &Network, query: &VipQuery, paths: &[PathVerdict]) {
    let alarming: Vec<String> = network
        .neighbours
        .iter()
        .filter(|entry| entry.address == query.address)
        .filter(|entry| matches!(entry.state.as_str(), "INCOMPLETE" | "FAILED"))
        .map(|entry| format!("{} on {}", entry.state, stack::device_name(network, entry.ifindex)))
        .collect();
    if alarming.is_empty() {
        return;
    }
    let on = |path: &&PathVerdict| path.outcome == Outcome::Untranslated;
    let forwarded: Vec<&PathVerdict> =
        paths.iter().filter(|path| path.path.starts_with("forwarded via")).collect();
    let undecided = forwarded.iter().any(|path| path.outcome == Outcome::Unknown);
    if forwarded.is_empty() || forwarded.iter().any(on) || undecided {
        return;
    }
    let others: Vec<&str> = paths.iter().filter(on).map(|path| path.path.as_str()).collect();
    let exception = if others.is_empty() {
        String::new()
    } else {
        format!("; it matters for: {}", unique(&others).join(", "))
    };
    findings.add(
        FindingId::NeighbourIrrelevant,
        None,
        format!("the neighbour entry of {} is {}", query.address, alarming.join(", ")),
        &format!(
            "no forwarded packet looks it up: on those paths the VIP is translated or ends in BPF \
             before any neighbour look-up{exception}"
        ),
        "nothing: this is what a node sees that announces the address itself",
    );
}

fn unique<'t>(texts: &[&'t str]) -> Vec<&'t str> {
    let mut unique: Vec<&str> = Vec::new();
    for text in texts {
        if !unique.contains(text) {
            unique.push(text);
        }
    }
    unique
}

/// Frontends in the maps that the agent does not have.
fn ghosts(findings: &mut Findings, network: &Network, programmed: &Programmed) {
    let Some(agent) = &network.agent_frontends else { return };
    let known = |frontend: &ProgrammedFrontend| {
        // The agent lists node ports under the unspecified address only, in newer releases.
        let any = match frontend.address {
            IpAddr::V4(address) => frontend.frontend.replacen(&address.to_string(), "0.0.0.0", 1),
            IpAddr::V6(address) => frontend.frontend.replacen(&address.to_string(), "::", 1),
        };
        agent.iter().any(|one| *one == frontend.frontend || *one == any)
    };
    for frontend in programmed.frontends.iter().filter(|frontend| !known(frontend)) {
        findings.add(
            FindingId::GhostFrontend,
            Some(&frontend.frontend),
            format!("{} is in the maps and not in the agent", frontend.frontend),
            "a leftover: the datapath goes on translating it to backends that may be gone",
            "restart the agent on this node, which removes what it does not know",
        );
    }
}
