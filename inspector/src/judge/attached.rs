//! Which program a packet meets on a path, and whether it load-balances from the maps that we read.

use std::{collections::BTreeSet, net::IpAddr};

use super::{
    datapath::{self, DeviceDatapath, Reach},
    simulated::Simulated,
};
use crate::evidence::{Evidence, network::Link, programs::DeviceHook, tables::family_of};

/// What a packet (or a socket call) meets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Met {
    /// A program that reaches the services map that was read; what is particular about it.
    LoadBalancer(Option<String>),
    /// Nothing that load-balances.
    Nothing(String),
    /// Cilium's program, which does not load-balance: something else may (kube-proxy).
    NoLoadBalancer(String),
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
pub(super) fn is_inner(name: &str) -> bool {
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
            let carries = datapath::device(evidence, link.ifindex)
                .is_some_and(|device| device.ingress().any(|one| one.is_cilium));
            if !known && (carries || may_receive(link)) {
                devices.push(Device {
                    ifindex: link.ifindex,
                    name: link.name.clone(),
                    networks: link.addresses.clone(),
                });
            }
        }
    }
    devices.retain(|device| {
        // Nothing arrives on a device that is down or has no carrier.
        let dead = evidence
            .network
            .as_ref()
            .and_then(|network| network.link(device.ifindex))
            .is_some_and(|link| link.dead().is_some());
        !is_inner(&device.name) && !dead
    });
    if !evidence.via.is_empty() {
        devices.retain(|device| evidence.via.contains(&device.name));
    }
    devices.sort_by_key(|device| device.ifindex);
    devices
}

/// Whether clients from outside may come in here: a device with an address that is no bridge of a
/// container engine and no member of something else.
fn may_receive(link: &Link) -> bool {
    const CONTAINERS: [&str; 6] = ["docker", "br-", "virbr", "cni", "flannel", "veth"];
    link.up
        && link.master.is_none()
        // Nothing ever arrives on these.
        && !matches!(link.kind.as_deref(), Some("dummy" | "ifb" | "nlmon"))
        && !link.addresses.iter().all(|address| address.starts_with("fe80:"))
        && !CONTAINERS.iter().any(|prefix| link.name.starts_with(prefix))
}

/// What a packet meets that is received on a device.
fn ingress(evidence: &Evidence, address: IpAddr, ifindex: u32) -> Met {
    let Some(device) = datapath::device(evidence, ifindex) else {
        return Met::NotRead("which programs run on the device was not read".to_owned());
    };
    at_device(&device, address)
}

/// What a packet meets that comes in through this device.
fn at_device(device: &DeviceDatapath, address: IpAddr) -> Met {
    let family = family_of(address);
    let name = device.ingress().find(|program| program.is_cilium && program.translates).map_or(
        "Cilium's program",
        |program| {
            program.name.as_deref().or(program.filter.as_deref()).unwrap_or("Cilium's program")
        },
    );
    match device.services(family) {
        None => Met::NotRead("no services map was read to compare with".to_owned()),
        Some(Reach::Itself | Reach::TailCall { .. }) => match device.shadowed_by() {
            None => Met::LoadBalancer(Some(format!("{name} runs there"))),
            Some(shadow) => {
                Met::Unsure(format!("{} runs before {name} and may end the chain", shadow.foreign))
            }
        },
        Some(Reach::OtherMap { map }) => Met::Unsure(format!(
            "{name} uses services map {map}, not the pinned one: the maps shown here are not what \
             it works with"
        )),
        Some(Reach::No) => Met::NoLoadBalancer(format!(
            "{name} runs there and does not load-balance (it does not reach the services map)"
        )),
        Some(Reach::NoProgram) => Met::Nothing("no program of Cilium's runs there".to_owned()),
        Some(Reach::Unknown { why }) => Met::NotRead(why),
    }
}

/// What connect (or sendmsg, for UDP) of a process in a cgroup meets.
fn socket(evidence: &Evidence, address: IpAddr, udp: bool, subject: &str) -> Met {
    let Some(socket) = datapath::socket(evidence, subject) else {
        return Met::NotRead("which cgroup programs run was not read".to_owned());
    };
    let version = if address.is_ipv4() { '4' } else { '6' };
    let hook = format!("{}{version}", if udp { "sendmsg" } else { "connect" });
    match socket.services(&hook) {
        None => Met::NotRead("no services map was read to compare with".to_owned()),
        Some(Reach::Itself | Reach::TailCall { .. }) => {
            Met::LoadBalancer(Some(format!("Cilium's {hook} program is in force")))
        }
        Some(Reach::OtherMap { map }) => Met::Unsure(format!(
            "Cilium's {hook} program uses services map {map}, not the pinned one"
        )),
        Some(Reach::No) => {
            Met::Nothing(format!("Cilium's {hook} program does not reach the services map"))
        }
        Some(Reach::NoProgram) => Met::Nothing(format!(
            "no {hook} program of Cilium's is in force for the process's cgroup"
        )),
        Some(Reach::Unknown { why }) => Met::NotRead(why),
    }
}

/// What packets meet that pods send or forward: the programs on the pods' devices. Nothing where
/// there are no pods, or where programs were not read.
fn pods(evidence: &Evidence, address: IpAddr) -> Option<Met> {
    let attachments = evidence.attachments.as_ref()?;
    let of_pod = |hook: &DeviceHook| {
        let name = attachments.program(hook.program).map(|program| program.name.as_str());
        let filter = hook.filter.as_ref().and_then(|filter| filter.name.as_deref());
        let device = attachments.device_name(hook.ifindex).unwrap_or_default();
        let mut names = [name, filter].into_iter().flatten();
        names.any(|name| {
            name.starts_with("cil_from_contai")
                || (device.starts_with("lxc") && name.starts_with("cilium-"))
        })
    };
    let indexes: BTreeSet<u32> =
        attachments.hooks.iter().filter(|hook| of_pod(hook)).map(|hook| hook.ifindex).collect();
    let mut met: Option<Met> = None;
    for ifindex in indexes {
        let this = ingress(evidence, address, ifindex);
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

/// Everything that packets for one address can meet, found once for all frontends.
pub(super) struct Facts {
    /// Devices on which clients' packets can arrive, and what they meet there.
    pub devices: Vec<(Device, Met)>,
    /// Whether something else than Cilium may translate: where Cilium's programs run on a device
    /// from which clients come and do not load-balance, kube-proxy does.
    pub others_translate: bool,
    /// What packets of pods meet on their devices.
    pub pods: Option<Met>,
    /// What connect and sendmsg of a process of the host meet.
    pub host: [Met; 2],
    /// What connect and sendmsg of a process below the root cgroup meet.
    pub root: [Met; 2],
    /// What simulated packets came to.
    pub simulated: Simulated,
}

impl Facts {
    pub fn new(evidence: &Evidence, address: IpAddr) -> Self {
        let sockets =
            |subject: &str| [false, true].map(|udp| socket(evidence, address, udp, subject));
        // A process that was asked for stands for "a process of the host".
        let process = evidence
            .attachments
            .iter()
            .flat_map(|attachments| &attachments.cgroups)
            .find(|asked| asked.subject.starts_with("pid "));
        let host = sockets(process.map_or("self", |asked| asked.subject.as_str()));
        let mut root = sockets("root");
        for (at_root, here) in root.iter_mut().zip(&host) {
            if matches!(at_root, Met::Nothing(_)) && !matches!(here, Met::Nothing(_)) {
                *at_root = Met::NotRead(
                    "socket-LB programs sit below the root cgroup only: whether a pod's cgroup is \
                     covered is told by --pid"
                        .to_owned(),
                );
            }
        }
        let devices: Vec<(Device, Met)> = outside_devices(evidence)
            .into_iter()
            .map(|device| {
                let met = ingress(evidence, address, device.ifindex);
                (device, met)
            })
            .collect();
        Self {
            others_translate: devices.iter().any(|(_, met)| matches!(met, Met::NoLoadBalancer(_))),
            devices,
            pods: pods(evidence, address),
            host,
            root,
            simulated: Simulated::new(evidence),
        }
    }
}
