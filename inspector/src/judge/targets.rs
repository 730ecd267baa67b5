//! What can be simulated for a VIP: on which devices, with which programs, for which frontends.

use std::{collections::BTreeSet, net::IpAddr};

use super::{
    attached,
    datapath::{self, DeviceDatapath, Reach},
    programmed::{Programmed, ProgrammedFrontend},
    walk::contains,
};
use crate::{
    cilium::{layout::MapKind, mac::Mac, proto::Protocol, services::Scope},
    evidence::{
        Evidence, VipQuery,
        programs::HookKind,
        tables::{Tables, family_of},
    },
};

/// A device on which clients' packets can arrive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Interface index.
    pub ifindex: u32,
    /// Its name.
    pub device: String,
    /// Whether packets begin with an Ethernet header there; nothing if the device was not read.
    pub ethernet: Option<bool>,
    /// Its MAC address, where it has one.
    pub mac: Option<Mac>,
    /// Cilium's programs that an arriving packet meets, in order, those for XDP first.
    pub programs: Vec<(HookKind, u32, String)>,
    /// Why those programs may not be run: they work with other maps than those that were read, so
    /// that nobody knows whose entries they would touch.
    pub other_maps: Option<String>,
}

/// A frontend of the VIP in its external scope.
#[derive(Debug, Clone, PartialEq)]
pub struct Port {
    /// As in the verdict: `192.168.2.20:443/TCP`.
    pub frontend: String,
    /// Port.
    pub port: u16,
    /// IP protocol number of the packets: of a frontend without one, the one that was asked for,
    /// else TCP.
    pub protocol: u8,
    /// Reverse NAT index.
    pub reverse_nat: u16,
    /// Whether clients stay with their backend.
    pub affinity: bool,
    /// Which sources are let through, where that is restricted.
    pub ranges: Option<Ranges>,
    /// Addresses and ports of all backends that have a slot.
    pub backends: Vec<(IpAddr, u16)>,
    /// Number of different backends that can be chosen.
    pub selectable: usize,
    /// Whether slots, or places of the Maglev table, lead nowhere.
    pub dangling: bool,
}

/// Source ranges of a frontend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ranges {
    /// Whether they deny.
    pub deny: bool,
    /// In CIDR notation.
    pub list: Vec<String>,
}

impl Ranges {
    /// Whether a source is let through.
    #[must_use]
    pub fn admit(&self, source: IpAddr) -> bool {
        self.list.iter().any(|range| contains(range, source)) != self.deny
    }
}

/// The devices on which clients' packets for `address` can arrive, with Cilium's programs there.
#[must_use]
pub fn devices(evidence: &Evidence, address: IpAddr) -> Vec<Target> {
    let tables = Tables::for_vip(evidence, address);
    let unread = [MapKind::Services, MapKind::Backends]
        .into_iter()
        .find_map(|kind| tables.doubt(kind, address).map(ToString::to_string));
    let stale = datapath::datapath(evidence).map(|all| all.stale_maps).unwrap_or_default();
    attached::outside_devices(evidence)
        .into_iter()
        .map(|device| {
            let link = evidence.network.as_ref().and_then(|network| network.link(device.ifindex));
            let here = datapath::device(evidence, device.ifindex);
            let ciliums =
                || here.iter().flat_map(DeviceDatapath::ingress).filter(|one| one.is_cilium);
            let programs: Vec<(HookKind, u32, String)> = ciliums()
                .filter(|one| one.hook.is_xdp())
                .chain(ciliums().filter(|one| !one.hook.is_xdp()))
                .map(|one| {
                    let name = one.name.clone().or_else(|| one.filter.clone());
                    (one.hook, one.program, name.unwrap_or_default())
                })
                .collect();
            let other = stale
                .iter()
                .find(|map| programs.iter().any(|one| map.programs.contains(&one.1)))
                .map(|map| {
                    format!(
                        "its program uses another {} (map {}) than the pinned one (map {})",
                        map.name, map.used, map.pinned
                    )
                });
            let reach = here.as_ref().and_then(|here| here.services(family_of(address)));
            let unknown = match reach {
                Some(Reach::OtherMap { map }) => {
                    Some(format!("its program uses services map {map}, not the pinned one"))
                }
                Some(Reach::Unknown { why }) => Some(why),
                None => Some("no services map was read to compare with".to_owned()),
                _ => None,
            };
            let other_maps = other.or(unknown).or_else(|| unread.clone());
            Target {
                ifindex: device.ifindex,
                device: device.name,
                ethernet: link.map(|link| link.ethernet),
                mac: link.and_then(|link| link.mac.as_ref()?.parse().ok()),
                programs,
                other_maps,
            }
        })
        .collect()
}

/// The frontends that the question is about.
#[must_use]
pub fn ports(evidence: &Evidence, query: &VipQuery) -> Vec<Port> {
    let tables = Tables::for_vip(evidence, query.address);
    let programmed = Programmed::new(evidence, &tables, query);
    programmed
        .frontends
        .iter()
        .filter(|frontend| frontend.scope == Scope::External && frontend.master)
        .map(|frontend| port(frontend, query))
        .collect()
}

fn port(frontend: &ProgrammedFrontend, query: &VipQuery) -> Port {
    let protocol = match (frontend.protocol, query.protocol) {
        (Protocol::ANY, Some(asked)) => asked,
        (Protocol::ANY, None) => Protocol::TCP,
        (protocol, _) => protocol,
    };
    let address = |backend: &super::programmed::ProgrammedBackend| {
        // `10.77.1.65:8443/TCP`; without a protocol before 1.17.
        let place = backend.address.as_deref()?.split('/').next()?;
        let socket: std::net::SocketAddr = place.parse().ok()?;
        Some((socket.ip(), socket.port()))
    };
    let backends: BTreeSet<_> = frontend.backends.iter().filter_map(address).collect();
    let chosen: BTreeSet<_> =
        frontend.backends.iter().filter(|one| one.selectable).filter_map(address).collect();
    Port {
        frontend: frontend.frontend.clone(),
        port: frontend.port,
        protocol: protocol.0,
        reverse_nat: frontend.reverse_nat.id,
        affinity: frontend.session_affinity_s.is_some(),
        ranges: frontend
            .source_ranges
            .as_ref()
            .map(|ranges| Ranges { deny: ranges.deny, list: ranges.ranges.clone() }),
        backends: backends.into_iter().collect(),
        selectable: chosen.len(),
        dangling: frontend.usable() < usize::from(frontend.count)
            || frontend.maglev.as_ref().is_some_and(|table| table.nowhere > 0),
    }
}
