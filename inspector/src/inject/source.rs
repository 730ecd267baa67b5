//! Whose packet it is to be, and to whom its control goes: addresses that nobody has.

use std::{
    collections::{BTreeSet, HashMap},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::AsFd as _,
};

use crate::{
    cilium::{
        ipcache::Ipcache,
        l2_responder::L2Responder,
        layout::{LAYOUTS, MapKind},
    },
    collect::{
        maps,
        network::{self, networks},
    },
    evidence::{
        Evidence,
        network::{Link, Network, Route},
        tables::{Tables, family_of},
    },
    judge::{cidr, contains},
    sys::{bpf, netlink::NetlinkError},
};

/// How many addresses of a network are looked at.
const CANDIDATES: u32 = 200;
/// Where looking begins in a network: for clients, and for their controls.
const CLIENT: u8 = 77;
const CONTROL: u8 = 99;

/// Networks larger than that are half of the world, or all of it: nobody's own.
const SHORTEST: u8 = 8;

/// What is known of who has which address, now.
pub struct Addresses<'e> {
    network: Option<&'e Network>,
    /// Networks without gateway that are routed to a device, by its interface index.
    on_link: Vec<(u32, (IpAddr, u8))>,
    taken: BTreeSet<IpAddr>,
    ipcache: Vec<maps::OpenMap>,
    responders: Vec<maps::OpenMap>,
    cpus: usize,
    /// Answers of the kernel, so that it is asked once.
    routes: HashMap<IpAddr, Option<Route>>,
}

impl<'e> Addresses<'e> {
    /// Looks who is there.
    ///
    /// # Errors
    /// The neighbour table or the routes cannot be read.
    pub fn new(
        evidence: &'e Evidence,
        vip: IpAddr,
        backends: impl IntoIterator<Item = IpAddr>,
    ) -> Result<Self, NetlinkError> {
        let tables = Tables::for_vip(evidence, vip);
        let network = evidence.network.as_ref();
        let own = network.iter().flat_map(|network| &network.links).flat_map(networks);
        let mut taken: BTreeSet<IpAddr> = own.map(|(address, _)| address).collect();
        taken.insert(vip);
        taken.extend(backends);
        taken.extend(tables.endpoints.keys());
        taken.extend(network::neighbours_now()?.iter().map(|one| one.address));
        let mut on_link = Vec::new();
        for way in network::ways_now()? {
            let (address, bits) = way.destination;
            // Whoever has a route of his own is somebody; so is a gateway that nobody used lately.
            if bits == whole(address) {
                taken.insert(address);
            } else if let (Some(output), true) = (way.output, way.gateways.is_empty()) {
                on_link.push((output, way.destination));
            }
            taken.extend(way.gateways);
        }
        let root = evidence.bpffs.iter().find(|bpffs| bpffs.read).map(|bpffs| &bpffs.path);
        let open = |kind: MapKind| -> Vec<maps::OpenMap> {
            let layouts = LAYOUTS.iter().filter(|layout| layout.kind == kind);
            layouts.filter_map(|layout| maps::open(root?, layout.name).ok()).collect()
        };
        Ok(Self {
            network,
            on_link,
            taken,
            ipcache: open(MapKind::Ipcache),
            responders: open(MapKind::L2Responder),
            cpus: evidence.host.cpus,
            routes: HashMap::new(),
        })
    }

    /// Whether the node has this address itself.
    #[must_use]
    pub fn is_own(&self, address: IpAddr) -> bool {
        let links = self.network.iter().flat_map(|network| &network.links);
        links.flat_map(networks).any(|(own, _)| own == address)
    }

    /// The kernel's way to an address; nothing if there is none.
    pub fn route(&mut self, address: IpAddr) -> Option<Route> {
        let ask = || network::routes_now(&[address]).ok()?.pop()?.ok();
        self.routes.entry(address).or_insert_with(ask).clone()
    }

    /// An address of the device's own network for a client, that nobody has; best one that is no
    /// WireGuard peer's either.
    pub fn client(
        &mut self,
        link: &Link,
        v6: bool,
        fits: &dyn Fn(IpAddr) -> bool,
    ) -> Option<IpAddr> {
        let all = self.candidates(link, v6, CLIENT, fits);
        let peers = self.peers(link.ifindex);
        let free = |one: &&IpAddr| !peers.iter().any(|range| contains(range, **one));
        all.iter()
            .find(free)
            .or_else(|| {
                let host = |one: &&IpAddr| {
                    let bits = if v6 { "/128" } else { "/32" };
                    peers.iter().any(|range| range.ends_with(bits) && contains(range, **one))
                };
                all.iter().find(|one| !host(one))
            })
            .copied()
    }

    /// An address beside the VIP, in the network on whose link it is, that nobody has; what becomes
    /// of a packet to it is what would become of one to the VIP, were that no frontend.
    pub fn control(&mut self, vip: IpAddr, fits: &dyn Fn(IpAddr) -> bool) -> Option<IpAddr> {
        let network = self.network?;
        let holds = |link: &&Link| {
            link.addresses.iter().any(|range| is_network(range) && contains(range, vip))
        };
        let link = network.links.iter().find(holds)?;
        let beside = |one: IpAddr| {
            let same = |range: &String| contains(range, vip) && contains(range, one);
            link.addresses.iter().any(same) && fits(one)
        };
        self.candidates(link, vip.is_ipv6(), CONTROL, &beside).first().copied()
    }

    /// Addresses on the link of a device that nobody is known to have.
    fn candidates(
        &mut self,
        link: &Link,
        v6: bool,
        first: u8,
        fits: &dyn Fn(IpAddr) -> bool,
    ) -> Vec<IpAddr> {
        /// More than one is needed only where WireGuard peers have the first.
        const OF_PEERS: usize = 24;
        let enough = if self.is_wireguard(link.ifindex) { OF_PEERS } else { 1 };
        let mut found = Vec::new();
        // A device's own networks, and what is routed to it without a gateway: with WireGuard often
        // only that.
        let routed = self.on_link.iter().filter(|(output, _)| *output == link.ifindex);
        let all: Vec<_> = networks(link).chain(routed.map(|(_, network)| *network)).collect();
        for (own, bits) in all.into_iter().filter(|(own, _)| own.is_ipv6() == v6) {
            if is_link_local(own) || bits < SHORTEST {
                continue;
            }
            for step in 0..CANDIDATES {
                let Some(one) = host(own, bits, u32::from(first) + step) else { break };
                let is_new = !self.taken.contains(&one) && !found.contains(&one);
                if is_new && fits(one) && self.is_nobodys(one, link.ifindex) {
                    found.push(one);
                    if found.len() >= enough {
                        return found;
                    }
                }
            }
        }
        found
    }

    /// An address inside of networks that let clients through, that nobody is known to have: of a
    /// single one it is known that somebody has it.
    pub fn within(
        &mut self,
        ranges: &[String],
        v6: bool,
        fits: &dyn Fn(IpAddr) -> bool,
    ) -> Option<IpAddr> {
        let networks = ranges.iter().filter_map(|range| cidr(range));
        for (start, bits) in networks.filter(|(start, _)| start.is_ipv6() == v6) {
            let Some(bits) = u8::try_from(bits).ok().filter(|bits| *bits >= SHORTEST) else {
                continue;
            };
            for step in 0..CANDIDATES {
                let Some(one) = host(start, bits, u32::from(CLIENT) + step) else { break };
                let is_local = self.route(one).is_some_and(|route| route.kind != "unicast");
                if !is_local && !self.taken.contains(&one) && !self.in_ipcache(one) && fits(one) {
                    return Some(one);
                }
            }
        }
        None
    }

    /// Whether Cilium knows nobody with this address, and the kernel's way to it is the link itself.
    fn is_nobodys(&mut self, address: IpAddr, ifindex: u32) -> bool {
        let on_link = self.route(address).is_some_and(|route| {
            route.kind == "unicast" && route.gateway.is_none() && route.output == Some(ifindex)
        });
        on_link && !self.in_ipcache(address) && !self.is_announced(address, Some(ifindex))
    }

    /// Whether this node answers for the address on the device, or on any: it is another VIP.
    #[must_use]
    pub fn is_announced(&self, address: IpAddr, ifindex: Option<u32>) -> bool {
        let links = self.network.iter().flat_map(|network| &network.links);
        let mut ifindexes =
            links.map(|link| link.ifindex).filter(|one| ifindex.is_none_or(|only| only == *one));
        ifindexes.any(|ifindex| {
            let (key, _) = L2Responder { address, ifindex, answers: 0 }.encode();
            self.responders.iter().any(|map| {
                map.layout.family == Some(family_of(address)) && self.value(map, &key).is_some()
            })
        })
    }

    fn value(&self, map: &maps::OpenMap, key: &[u8]) -> Option<Vec<u8>> {
        let mut value = vec![0; bpf::value_len(&map.info, self.cpus)];
        let found = bpf::lookup(map.fd.as_fd(), &map.info, key, &mut value, self.cpus);
        found.is_ok_and(|found| found).then_some(value)
    }

    /// Whether Cilium has an identity for the address that is no part of the world outside.
    #[must_use]
    pub fn in_ipcache(&self, address: IpAddr) -> bool {
        /// Reserved identities of the world: any, IPv4, IPv6.
        const WORLD: [u32; 4] = [0, 2, 9, 10];
        /// Those above are of prefixes that policies name.
        const LOCAL: u32 = 1 << 24;
        let entry = Ipcache {
            address,
            prefix_len: whole(address),
            cluster_id: 0,
            identity: crate::cilium::ipcache::Identity(0),
            tunnel_endpoint: None,
            encrypt_key: 0,
            flags: crate::cilium::ipcache::IpcacheFlags(0),
            word8: 0,
        };
        self.ipcache.iter().any(|map| {
            let Ok((key, _)) = entry.encode(map.layout) else { return false };
            // The kernel looks the longest prefix up.
            let Some(value) = self.value(map, &key) else { return false };
            Ipcache::decode(map.layout, &key, &value).is_ok_and(|found| {
                let identity = found.identity.0;
                !WORLD.contains(&identity) && identity < LOCAL
            })
        })
    }

    /// The ranges of the peers of a WireGuard device; of another device there are none.
    #[must_use]
    pub fn peers(&self, ifindex: u32) -> Vec<String> {
        let all = self.network.iter().flat_map(|network| &network.wireguard);
        let here = all.filter(|device| device.ifindex == ifindex);
        here.flat_map(|device| &device.peers).flat_map(|peer| &peer.allowed).cloned().collect()
    }

    /// Whether a device is one of WireGuard's.
    #[must_use]
    pub fn is_wireguard(&self, ifindex: u32) -> bool {
        self.network
            .is_some_and(|network| network.wireguard.iter().any(|one| one.ifindex == ifindex))
    }
}

/// Whether a range is more than one address.
fn is_network(range: &str) -> bool {
    !range.ends_with(if range.contains(':') { "/128" } else { "/32" })
}

/// Length of the prefix of a single address.
fn whole(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

/// Whether an address holds on one link only: a pod could not answer it.
#[must_use]
pub fn is_link_local(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(one) if one.is_unicast_link_local())
}

/// The host with this number in a network, around its end; nothing if the network has no room for
/// one beside its own address and that of who is at its other end.
fn host(own: IpAddr, bits: u8, number: u32) -> Option<IpAddr> {
    match own {
        IpAddr::V4(own) => {
            let room = 32_u32.checked_sub(bits.into()).filter(|room| *room >= 3)?;
            // Not more than the last byte: far from gateways at either end of a large network.
            let size = 1_u32 << room.min(8);
            let hosts = size - 2;
            let base = u32::from(own) & !(size - 1);
            Some(Ipv4Addr::from(base + 1 + (number - 1) % hosts).into())
        }
        IpAddr::V6(own) => {
            let room = 128_u32.checked_sub(bits.into()).filter(|room| *room >= 3)?;
            let size = 1_u128 << room.min(16);
            let hosts = size - 2;
            let base = u128::from(own) & !(size - 1);
            // The hexadecimal digits read like the IPv4 number.
            let number = u128::from_str_radix(&number.to_string(), 16).ok()?;
            Some(Ipv6Addr::from(base + 1 + (number - 1) % hosts).into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_inside_of_their_network_and_neither_end_of_it() {
        let at = |own: &str, bits, number| {
            host(own.parse().unwrap(), bits, number).map(|one| one.to_string())
        };
        assert_eq!(at("192.168.2.10", 24, 77).as_deref(), Some("192.168.2.77"));
        assert_eq!(at("10.90.0.1", 16, 77).as_deref(), Some("10.90.0.77"));
        assert_eq!(at("10.0.0.1", 29, 77).as_deref(), Some("10.0.0.5"));
        // The other one is who is at the other end.
        assert_eq!(at("10.0.0.1", 30, 77), None);
        assert_eq!(at("fd00:2::1", 126, 77), None);
        assert_eq!(at("10.0.0.1", 31, 77), None);
        assert_eq!(at("10.0.0.1", 32, 77), None);
        assert_eq!(at("fd00:2::1", 64, 77).as_deref(), Some("fd00:2::77"));
        assert_eq!(at("fd00:2::1", 128, 77), None);
        for number in 1..300 {
            let Some(IpAddr::V4(one)) = host("10.1.2.3".parse().unwrap(), 26, number) else {
                continue;
            };
            assert!((1..63).contains(&one.octets()[3]), "{number}: {one}");
        }
    }
}
