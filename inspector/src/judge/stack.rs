//! What the kernel's stack does with a packet, from routes and neighbours: with one that still
//! carries the VIP, and with one that was translated to a backend.

use std::net::IpAddr;

use super::{
    Served,
    programmed::{Location, Programmed, ProgrammedFrontend},
};
use crate::evidence::{Evidence, SourceStatus, network::Network};

/// What becomes of a packet in the stack.
pub(super) struct InStack {
    /// Whether its sender is served.
    pub served: Served,
    /// What happens, as a clause.
    pub why: String,
    /// The neighbour entry that matters.
    pub neighbour: Option<String>,
}

impl InStack {
    fn new(served: Served, why: impl Into<String>) -> Self {
        Self { served, why: why.into(), neighbour: None }
    }
}

/// A packet for the VIP that nothing translated, received on `input` or sent by this node.
pub(super) fn untranslated(
    evidence: &Evidence,
    programmed: &Programmed,
    vip: IpAddr,
    input: Option<u32>,
) -> InStack {
    let Some(network) = &evidence.network else {
        return InStack::new(
            Served::Unknown,
            "it goes up the stack with the VIP as destination; routes and neighbours were not read",
        );
    };
    let Some(asked) = network.route(vip, input) else {
        return InStack::new(
            Served::Unknown,
            "it goes up the stack with the VIP as destination; its route was not asked for",
        );
    };
    let route = match &asked.answer {
        Ok(route) => route,
        Err(error) => {
            return InStack::new(
                Served::No,
                format!("it goes up the stack, which has no route for the VIP ({error})"),
            );
        }
    };
    if route.kind == "local" {
        return InStack::new(
            Served::Unknown,
            "it goes up the stack, where the VIP is an address of this node: a process that \
             listens on it answers",
        );
    }
    if route.kind != "unicast" {
        return InStack::new(
            Served::No,
            format!("it goes up the stack, whose route for the VIP is {}", route.kind),
        );
    }
    if input.is_some() && !forwards(network, vip, input) {
        return InStack::new(
            Served::No,
            "it goes up the stack, and this node does not forward packets (ip_forward is 0)",
        );
    }
    let Some(output) = route.output else {
        return InStack::new(Served::Unknown, "it goes up the stack; its route names no device");
    };
    let device = device_name(network, output);
    if let Some(link) = network.link(output)
        && !link.ethernet
    {
        return InStack::new(
            Served::Unknown,
            format!("it goes up the stack and out through {device}, which asks for no neighbour"),
        );
    }
    asked_for(network, programmed, vip, route.gateway, output, &device)
}

/// The packet leaves through an Ethernet device: the kernel asks for the VIP or for a gateway.
fn asked_for(
    network: &Network,
    programmed: &Programmed,
    vip: IpAddr,
    gateway: Option<IpAddr>,
    output: u32,
    device: &str,
) -> InStack {
    let target = gateway.unwrap_or(vip);
    let entry = network.neighbour(target, output);
    let state = entry.map_or("absent", |entry| entry.state.as_str());
    let known = entry.is_some_and(|entry| entry.mac.is_some());
    let neighbour = Some(format!("{target} on {device}: {state} (matters on this path)"));
    let (served, why) = match (gateway, known) {
        (Some(gateway), false) if is_dead(state) => (
            Served::No,
            format!(
                "it goes up the stack and out to the gateway {gateway} on {device}, which does not \
                 answer ({state})"
            ),
        ),
        (Some(gateway), _) => (
            Served::Unknown,
            format!("it goes up the stack and out to the gateway {gateway} on {device}"),
        ),
        (None, true) => (
            Served::Unknown,
            format!(
                "it goes up the stack and out on {device} to {}, which answers for the VIP there",
                entry.and_then(|entry| entry.mac.as_deref()).unwrap_or("another host")
            ),
        ),
        // Nobody else answers for what this node announces, and a node does not hear itself ask.
        (None, false) if programmed.announcement.answering => (
            Served::No,
            format!(
                "it goes up the stack and the kernel asks for the VIP on {device}, which this \
                 node itself announces: nobody answers"
            ),
        ),
        (None, false) if is_dead(state) => (
            Served::No,
            format!("it goes up the stack and the kernel asks for the VIP on {device} in vain"),
        ),
        (None, false) => (
            Served::Unknown,
            format!("it goes up the stack and the kernel asks for the VIP on {device}"),
        ),
    };
    InStack { served, why, neighbour }
}

fn forwards(network: &Network, vip: IpAddr, input: Option<u32>) -> bool {
    let name = input.and_then(|input| network.link(input)).map_or("all", |link| &link.name);
    let keys = match vip {
        IpAddr::V4(_) => {
            [format!("net.ipv4.conf.{name}.forwarding"), "net.ipv4.ip_forward".to_owned()]
        }
        IpAddr::V6(_) => {
            [format!("net.ipv6.conf.{name}.forwarding"), "net.ipv6.conf.all.forwarding".to_owned()]
        }
    };
    // What could not be read is not held against it.
    keys.iter().find_map(|key| network.sysctls.get(key)).is_none_or(|value| *value != 0)
}

/// The name of a device, or its index.
pub(super) fn device_name(network: &Network, ifindex: u32) -> String {
    network.link(ifindex).map_or_else(|| format!("interface {ifindex}"), |link| link.name.clone())
}

/// Whether nobody has answered for the neighbour.
fn is_dead(state: &str) -> bool {
    matches!(state, "INCOMPLETE" | "FAILED")
}

/// The routing table through which marked packets reach a local proxy.
const PROXY_TABLE: u32 = 2004;
/// Mark and mask of packets for a local proxy.
const PROXY_MARK: (u32, u32) = (0x200, 0xf00);

/// Whether a rule sends packets with the proxy's mark to its table.
pub(super) fn has_proxy_rule(network: &Network, v6: bool) -> bool {
    network
        .rules
        .iter()
        .any(|rule| rule.table == PROXY_TABLE && rule.mark == Some(PROXY_MARK) && rule.ipv6 == v6)
}

/// The way of a marked packet to the local proxy.
pub(super) struct ProxyWay {
    /// What is broken, as clauses.
    pub broken: Vec<String>,
    /// What could not be read.
    pub unread: Vec<&'static str>,
}

/// What is known of the way of marked packets to the local proxy.
pub(super) fn proxy_way(evidence: &Evidence, network: &Network, port: u16, v6: bool) -> ProxyWay {
    let routes = if v6 { &network.proxy_routes_v6 } else { &network.proxy_routes };
    let handed = network.tproxy.iter().any(|rule| rule.port == port && rule.ipv6 == v6);
    let in_bpf = network.node_config.contains_key("ENABLE_TPROXY");
    let steps = [
        (
            has_proxy_rule(network, v6),
            "rules",
            format!("no rule sends packets with the proxy's mark to table {PROXY_TABLE}"),
        ),
        (!routes.is_empty(), "table 2004", format!("table {PROXY_TABLE} is empty")),
        (
            network.tproxy.is_empty() || handed || in_bpf,
            "",
            format!("no TPROXY rule hands them to port {port}"),
        ),
        (
            network.listening.contains(&port),
            "listening sockets",
            format!("nothing listens on port {port}"),
        ),
    ];
    let failed = |what: &str| {
        evidence
            .sources
            .iter()
            .any(|source| source.what == what && source.status == SourceStatus::Failed)
    };
    let mut way = ProxyWay { broken: Vec::new(), unread: Vec::new() };
    for (good, source, clause) in steps {
        if failed(source) {
            way.unread.push(source);
        } else if !good {
            way.broken.push(clause);
        }
    }
    way
}

/// The way from here to a backend.
pub(super) struct Hop {
    /// The neighbour that matters, as text.
    pub text: String,
    /// Whether that neighbour does not answer, or there is no route.
    pub dead: bool,
}

/// The way to each backend that can be chosen, in the order of their slots.
pub(super) fn hops(evidence: &Evidence, frontend: &ProgrammedFrontend) -> Vec<Hop> {
    let good = |text: &str| Hop { text: text.to_owned(), dead: false };
    frontend
        .backends
        .iter()
        .filter(|backend| backend.selectable)
        .filter_map(|backend| {
            Some((&backend.location, backend_address(backend.address.as_deref())?))
        })
        .map(|(location, address)| match location {
            Location::LocalEndpoint { .. } => good("none: local pod"),
            Location::ThisNode => good("none: this node"),
            Location::Remote { .. } | Location::Unknown => next_hop(evidence, address),
        })
        .collect()
}

/// The neighbours that matter once a packet was translated: those on the way to the backends.
pub(super) fn after_translation(evidence: &Evidence, frontend: &ProgrammedFrontend) -> String {
    let mut texts: Vec<String> = Vec::new();
    for hop in hops(evidence, frontend) {
        if !texts.contains(&hop.text) {
            texts.push(hop.text);
        }
    }
    texts.join("; ")
}

/// The address of `10.0.0.1:80/TCP` or `[fd00::1]:80`.
pub(super) fn backend_address(text: Option<&str>) -> Option<IpAddr> {
    let place = text?.split('/').next()?;
    let (address, _) = place.rsplit_once(':')?;
    address.trim_start_matches('[').trim_end_matches(']').parse().ok()
}

/// Address and port of `10.0.0.1:80/TCP` or `[fd00::1]:80`.
pub(super) fn backend_endpoint(text: Option<&str>) -> Option<(IpAddr, u16)> {
    let place = text?.split('/').next()?;
    let (_, port) = place.rsplit_once(':')?;
    Some((backend_address(text)?, port.parse().ok()?))
}

fn next_hop(evidence: &Evidence, backend: IpAddr) -> Hop {
    let alive = |text: String| Hop { text, dead: false };
    let Some(network) = &evidence.network else {
        return alive(format!("next hop to {backend}: not read"));
    };
    match network.route(backend, None).map(|asked| &asked.answer) {
        None => alive(format!("next hop to {backend}: not asked for")),
        Some(Err(error)) => {
            Hop { text: format!("next hop to {backend}: none ({error})"), dead: true }
        }
        Some(Ok(route)) => {
            let target = route.gateway.unwrap_or(backend);
            let Some(output) = route.output else {
                return alive(format!("next hop to {backend}: its route names no device"));
            };
            let state = network
                .neighbour(target, output)
                .map_or("absent", |neighbour| neighbour.state.as_str());
            let text = format!("{target} on {}: {state}", device_name(network, output));
            Hop { text, dead: is_dead(state) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_backends() {
        let v4: IpAddr = "10.77.1.5".parse().unwrap();
        let v6: IpAddr = "fd00::5".parse().unwrap();
        assert_eq!(backend_address(Some("10.77.1.5:80/TCP")), Some(v4));
        assert_eq!(backend_address(Some("10.77.1.5:80")), Some(v4));
        assert_eq!(backend_address(Some("[fd00::5]:80/UDP")), Some(v6));
        assert_eq!(backend_address(None), None);
    }
}
