//! A cluster: several labs of one capture, each a node with maps, programs and an announcer of its
//! own, on one LAN.
//!
//! The first node is that of the capture. The others differ in the last byte of their addresses in the
//! LAN and of their MAC address there (192.168.2.10 is the first, 192.168.2.11 the second), in devices
//! and maps alike. The LAN's hosts are those of the first node. Every node has the pods of the capture:
//! where a Service's backends are is for whoever uses the cluster to write into the maps.

use std::net::IpAddr;

use crate::{
    capture::Capture,
    plan::{Kind, Plan, Scope},
};

/// As many nodes can be on the LAN: further ones would take its hosts' addresses.
pub const MOST: u8 = 9;

/// The host name of a node of a cluster, which its lab's name ends in too.
#[must_use]
pub fn host_name(number: u8) -> String {
    format!("n{number}")
}

/// The name of the lab of a node.
#[must_use]
pub fn lab_name(cluster: &str, number: u8) -> String {
    format!("{cluster}-{}", host_name(number))
}

/// The labs among `names` that are nodes of this cluster.
#[must_use]
pub fn nodes_of(cluster: &str, names: &[String]) -> Vec<String> {
    let all: Vec<String> = (1..=MOST).map(|number| lab_name(cluster, number)).collect();
    names.iter().filter(|name| all.contains(name)).cloned().collect()
}

/// Makes the node of the capture another one: in what it is made of and in what its maps hold.
pub(crate) fn renumber(number: u8, plan: &mut Plan, capture: Option<&mut Capture>) {
    let Some(step) = number.checked_sub(1).filter(|step| *step > 0) else { return };
    let mut changes: Vec<(IpAddr, IpAddr)> = Vec::new();
    let mut macs = None;
    for device in &mut plan.devices {
        if !matches!(device.kind, Kind::Lan(_)) {
            continue;
        }
        for address in &mut device.addresses {
            let next = plus(address.ip, step);
            if address.scope != Scope::Link {
                changes.push((address.ip, next));
            }
            address.ip = next;
        }
        if let Some(mac) = &mut device.mac {
            let before = *mac;
            mac[5] = mac[5].wrapping_add(step);
            macs = Some((before, *mac));
        }
    }
    let renewed = |ip: IpAddr| changes.iter().find(|(from, _)| *from == ip).map(|(_, to)| *to);
    for route in &mut plan.routes {
        if let Some((ip, length)) = route.destination
            && let Some(to) = renewed(ip)
        {
            route.destination = Some((to, length));
        }
        route.source = route.source.map(|ip| renewed(ip).unwrap_or(ip));
    }
    let Some(capture) = capture else { return };
    for map in capture.maps_mut() {
        let in_keys = map.name.contains("_services_v") || map.name == "cilium_lxc";
        let in_values = map.name.ends_with("_reverse_nat");
        let of_devices = map.name == "cilium_devices";
        for entry in &mut map.entries {
            let bytes = if in_keys {
                &mut entry.key
            } else if in_values || of_devices {
                &mut entry.value
            } else {
                continue;
            };
            if of_devices {
                if let Some((from, to)) = macs {
                    replace(bytes, &from, &to);
                }
                continue;
            }
            for (from, to) in &changes {
                // Of another family, the first bytes could be the same by accident.
                let fits = match (map.name.contains("lb4"), map.name.contains("lb6")) {
                    (true, _) => from.is_ipv4(),
                    (_, true) => from.is_ipv6(),
                    // The family stands behind the address.
                    _ => bytes.get(16) == Some(if from.is_ipv4() { &1 } else { &2 }),
                };
                if fits {
                    replace(bytes, &octets(*from), &octets(*to));
                }
            }
        }
    }
}

/// An address with a larger last byte.
fn plus(ip: IpAddr, step: u8) -> IpAddr {
    match ip {
        IpAddr::V4(ip) => {
            let [a, b, c, d] = ip.octets();
            [a, b, c, d.wrapping_add(step)].into()
        }
        IpAddr::V6(ip) => {
            let mut octets = ip.octets();
            octets[15] = octets[15].wrapping_add(step);
            octets.into()
        }
    }
}

fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

/// Replaces what the bytes begin with.
fn replace(bytes: &mut [u8], from: &[u8], to: &[u8]) {
    if bytes.starts_with(from) {
        bytes[..to.len()].copy_from_slice(to);
    }
}
