//! Which program a packet meets on a path, and whether it load-balances from the maps that we read.

use std::net::IpAddr;

use crate::{
    cilium::layout::{Family, MapKind},
    evidence::{
        Evidence,
        programs::{Attachments, HookKind, Program},
        tables::family_of,
    },
};

/// What a packet (or a socket call) meets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Met {
    /// A program that reaches the services map that was read; what is particular about it.
    LoadBalancer(Option<String>),
    /// Nothing that load-balances.
    Nothing(String),
    /// It was not read.
    NotRead(String),
    /// Something that may or may not let the packet come to Cilium's program, or that uses other
    /// maps.
    Unsure(String),
}

/// A device on which clients' packets can arrive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Device {
    pub ifindex: u32,
    pub name: String,
    /// Its addresses in CIDR notation.
    pub networks: Vec<String>,
}

/// Names of devices that are Cilium's own, or a pod's.
fn is_inner(name: &str) -> bool {
    name == "lo" || name.starts_with("cilium_") || name.starts_with("lxc")
}

/// Devices on which clients' packets can arrive: those that Cilium's state names, those that carry
/// its programs, and those with an address.
pub(super) fn outside_devices(evidence: &Evidence) -> Vec<Device> {
    let networks = |ifindex: u32| {
        evidence
            .network
            .as_ref()
            .and_then(|network| network.link(ifindex))
            .map_or_else(Vec::new, |link| link.addresses.clone())
    };
    let mut devices: Vec<Device> = evidence
        .devices
        .iter()
        .filter_map(|device| {
            let name = device.name.clone()?;
            Some(Device { ifindex: device.ifindex, name, networks: networks(device.ifindex) })
        })
        .collect();
    if let Some(network) = &evidence.network {
        for link in &network.links {
            let known = devices.iter().any(|device| device.ifindex == link.ifindex);
            let carries = evidence
                .attachments
                .as_ref()
                .is_some_and(|attached| cilium_at(attached, link.ifindex).next().is_some());
            if !known && (carries || may_receive(link)) {
                devices.push(Device {
                    ifindex: link.ifindex,
                    name: link.name.clone(),
                    networks: link.addresses.clone(),
                });
            }
        }
    }
    devices.retain(|device| !is_inner(&device.name));
    if !evidence.via.is_empty() {
        devices.retain(|device| evidence.via.contains(&device.name));
    }
    devices.sort_by_key(|device| device.ifindex);
    devices
}

/// Whether clients from outside may come in here: a device with an address that is no bridge of a
/// container engine and no member of something else.
fn may_receive(link: &crate::evidence::network::Link) -> bool {
    const CONTAINERS: [&str; 6] = ["docker", "br-", "virbr", "cni", "flannel", "veth"];
    link.up
        && link.master.is_none()
        && !link.addresses.iter().all(|address| address.starts_with("fe80:"))
        && !CONTAINERS.iter().any(|prefix| link.name.starts_with(prefix))
}

fn cilium_at(
    attachments: &Attachments,
    ifindex: u32,
) -> impl Iterator<Item = &crate::evidence::programs::DeviceHook> {
    attachments.hooks.iter().filter(move |hook| {
        hook.ifindex == ifindex
            && attachments
                .program(hook.program)
                .is_some_and(|program| program.name.starts_with("cil_"))
    })
}

/// Id of the services map of the address's family that was read.
fn services_map(evidence: &Evidence, address: IpAddr) -> Option<u32> {
    evidence
        .maps
        .iter()
        .find(|map| {
            map.kind().is_some_and(|(kind, family, _)| {
                kind == MapKind::Services && family == Some(family_of(address))
            })
        })
        .map(|map| map.id)
}

/// What a packet meets that is received on a device.
pub(super) fn ingress(evidence: &Evidence, address: IpAddr, ifindex: u32) -> Met {
    let Some(attachments) = &evidence.attachments else {
        return Met::NotRead("which programs run on the device was not read".to_owned());
    };
    let order = [
        HookKind::XdpOffload,
        HookKind::XdpNative,
        HookKind::XdpGeneric,
        HookKind::TcxIngress,
        HookKind::ClsactIngress,
    ];
    let mut foreign = None;
    let mut without = None;
    for kind in order {
        for hook in
            attachments.hooks.iter().filter(|hook| (hook.ifindex, hook.kind) == (ifindex, kind))
        {
            let Some(program) = attachments.program(hook.program) else {
                return Met::NotRead(format!(
                    "program {} on the device was not read",
                    hook.program
                ));
            };
            let named = hook
                .filter
                .as_ref()
                .and_then(|filter| filter.name.as_deref())
                .is_some_and(is_legacy_name);
            if !program.name.starts_with("cil_") && !named {
                foreign.get_or_insert(program);
                continue;
            }
            match reach(evidence, attachments, program, address) {
                Reach::Yes => {
                    return match foreign {
                        None => Met::LoadBalancer(Some(format!("{} runs there", program.name))),
                        Some(other) => Met::Unsure(format!(
                            "{} (program {}) runs before {} and may end the chain",
                            other.name, other.id, program.name
                        )),
                    };
                }
                Reach::Other(map) => {
                    return Met::Unsure(format!(
                        "{} uses services map {map}, not the pinned one: the maps shown here are \
                         not what it works with",
                        program.name
                    ));
                }
                Reach::No => {
                    without.get_or_insert(format!(
                        "{} runs there and does not load-balance (it does not reach the services \
                         map)",
                        program.name
                    ));
                }
                Reach::Unknown => {
                    return Met::NotRead(format!(
                        "whether {} reaches the services map could not be read",
                        program.name
                    ));
                }
            }
        }
    }
    Met::Nothing(without.unwrap_or_else(|| "no program of Cilium's runs there".to_owned()))
}

/// Names of clsact filters that Cilium gave before its programs had names of their own.
fn is_legacy_name(name: &str) -> bool {
    ["cil_", "cilium-", "bpf_netdev", "bpf_host", "bpf_lxc"]
        .iter()
        .any(|prefix| name.starts_with(prefix))
}

enum Reach {
    Yes,
    Other(u32),
    No,
    Unknown,
}

fn reach(
    evidence: &Evidence,
    attachments: &Attachments,
    program: &Program,
    address: IpAddr,
) -> Reach {
    let Some(map) = services_map(evidence, address) else { return Reach::Unknown };
    if attachments.reaches(program.id, map) {
        Reach::Yes
    } else if let Some(other) = other_services_map(attachments, program.id, family_of(address)) {
        Reach::Other(other)
    } else {
        Reach::No
    }
}

/// A map that is named like the services map and that the program reaches.
fn other_services_map(attachments: &Attachments, program: u32, family: Family) -> Option<u32> {
    let name = match family {
        Family::V4 => "cilium_lb4_serv",
        Family::V6 => "cilium_lb6_serv",
    };
    attachments
        .maps
        .iter()
        .filter(|map| map.name.starts_with(name))
        .find(|map| attachments.reaches(program, map.id))
        .map(|map| map.id)
}

/// What connect (or sendmsg, for UDP) of a process in a cgroup meets.
pub(super) fn socket(evidence: &Evidence, address: IpAddr, udp: bool, subject: &str) -> Met {
    let Some(attachments) = &evidence.attachments else {
        return Met::NotRead("which cgroup programs run was not read".to_owned());
    };
    let version = if address.is_ipv4() { '4' } else { '6' };
    let call = if udp { "sendmsg" } else { "connect" };
    let hook = format!("{call}{version}");
    match attachments.cgroups.iter().find(|one| one.subject == subject) {
        None => return Met::NotRead("which cgroup programs run was not read".to_owned()),
        Some(asked) => {
            if let Some(problem) = &asked.problem {
                return Met::NotRead(format!("which cgroup programs run: {problem}"));
            }
        }
    }
    for one in
        attachments.cgroup.iter().filter(|one| one.subject == subject && one.attach_type == hook)
    {
        let Some(program) = attachments.program(one.program) else {
            return Met::NotRead(format!("cgroup program {} was not read", one.program));
        };
        if !program.name.starts_with("cil_sock") && !program.name.starts_with("sock") {
            continue;
        }
        return match reach(evidence, attachments, program, address) {
            Reach::Yes => Met::LoadBalancer(Some(format!("{} is in force", program.name))),
            Reach::Other(map) => {
                Met::Unsure(format!("{} uses services map {map}, not the pinned one", program.name))
            }
            Reach::No => Met::Nothing(format!("{} does not load-balance", program.name)),
            Reach::Unknown => Met::NotRead(format!(
                "whether {} reaches the services map could not be read",
                program.name
            )),
        };
    }
    Met::Nothing(format!("no {hook} program of Cilium's is in force for its cgroup"))
}

/// What a packet meets that a pod sends or forwards: the program on the pods' devices. Nothing
/// where there are no pods, or where programs were not read.
pub(super) fn pods(evidence: &Evidence, address: IpAddr) -> Option<Met> {
    let attachments = evidence.attachments.as_ref()?;
    let mut met: Option<Met> = None;
    for hook in &attachments.hooks {
        let ingress = matches!(
            hook.kind,
            HookKind::TcxIngress | HookKind::ClsactIngress | HookKind::NetkitPeer
        );
        let Some(program) = attachments.program(hook.program) else { continue };
        if !ingress || !program.name.starts_with("cil_from_contai") {
            continue;
        }
        let this = match reach(evidence, attachments, program, address) {
            Reach::Yes => Met::LoadBalancer(Some(format!("{} load-balances", program.name))),
            Reach::No => {
                Met::Nothing(format!("{} on the pods' devices does not load-balance", program.name))
            }
            Reach::Other(map) => {
                Met::Unsure(format!("{} uses services map {map}, not the pinned one", program.name))
            }
            Reach::Unknown => Met::NotRead(format!(
                "whether {} reaches the services map could not be read",
                program.name
            )),
        };
        match &met {
            Some(other) if *other != this => {
                return Some(Met::Unsure(
                    "the programs on the pods' devices differ: some load-balance, some do not"
                        .to_owned(),
                ));
            }
            _ => met = Some(this),
        }
    }
    met
}
