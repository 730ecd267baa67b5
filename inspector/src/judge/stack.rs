//! What the kernel's stack does with a packet, from routes and neighbours: with one that still
//! carries the VIP, and with one that was translated to a backend.

use std::net::IpAddr;

use super::{
    Served,
    programmed::{Location, Programmed, ProgrammedFrontend},
};
use crate::evidence::{Evidence, network::Network};

/// What becomes of a packet in the stack.
pub(super) struct InStack {
    /// Whether its sender is served.
    pub served: Served,
    /// What happens, as a clause.
    pub why: String,
    /// The neighbour entry that matters.
    pub neighbour: Option<String>,
    /// Whether the neighbour of the VIP itself is looked up.
    pub asks_for_vip: bool,
}

impl InStack {
    fn new(served: Served, why: impl Into<String>) -> Self {
        Self { served, why: why.into(), neighbour: None, asks_for_vip: false }
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
    let asks_for_vip = gateway.is_none();
    let (served, why) = match (gateway, known) {
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
        (None, false) if matches!(state, "INCOMPLETE" | "FAILED") => (
            Served::No,
            format!("it goes up the stack and the kernel asks for the VIP on {device} in vain"),
        ),
        (None, false) => (
            Served::Unknown,
            format!("it goes up the stack and the kernel asks for the VIP on {device}"),
        ),
    };
    InStack { served, why, neighbour, asks_for_vip }
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

/// The neighbours that matter once a packet was translated: those on the way to the backends.
pub(super) fn after_translation(evidence: &Evidence, frontend: &ProgrammedFrontend) -> String {
    let mut hops: Vec<String> = Vec::new();
    for backend in frontend.backends.iter().filter(|backend| backend.selectable) {
        let hop = match (&backend.location, backend_address(backend.address.as_deref())) {
            (_, None) => continue,
            (Location::LocalEndpoint { .. }, _) => "none: local pod".to_owned(),
            (Location::ThisNode, _) => "none: this node".to_owned(),
            (Location::Remote { .. } | Location::Unknown, Some(address)) => {
                next_hop(evidence, address)
            }
        };
        if !hops.contains(&hop) {
            hops.push(hop);
        }
    }
    hops.join("; ")
}

/// The address of `10.0.0.1:80/TCP` or `[fd00::1]:80`.
pub(super) fn backend_address(text: Option<&str>) -> Option<IpAddr> {
    let place = text?.split('/').next()?;
    let (address, _) = place.rsplit_once(':')?;
    address.trim_start_matches('[').trim_end_matches(']').parse().ok()
}

fn next_hop(evidence: &Evidence, backend: IpAddr) -> String {
    let Some(network) = &evidence.network else {
        return format!("next hop to {backend}: not read");
    };
    match network.route(backend, None).map(|asked| &asked.answer) {
        None => format!("next hop to {backend}: not asked for"),
        Some(Err(error)) => format!("next hop to {backend}: none ({error})"),
        Some(Ok(route)) => {
            let target = route.gateway.unwrap_or(backend);
            let Some(output) = route.output else {
                return format!("next hop to {backend}: its route names no device");
            };
            let state = network
                .neighbour(target, output)
                .map_or("absent", |neighbour| neighbour.state.as_str());
            format!("{target} on {}: {state}", device_name(network, output))
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
