//! What a run leaves in Cilium's maps, found by exact key and taken back.
//!
//! A program that load-balances notes the connection (conntrack), for some services the client's
//! choice (affinity), for a backend elsewhere the source NAT, and the client's MAC address. The
//! keys of all of these follow from the packet and from the backend that was chosen, so nothing has
//! to be searched for, and no entry of anybody else is ever touched: a connection of which an entry
//! was there before is not simulated. Counters (`cilium_metrics`, retry counters) cannot be taken
//! back.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
    os::fd::{AsFd as _, OwnedFd},
};

use super::source::Ports;
use crate::{
    cilium::{
        affinity::{Affinity, Client},
        conntrack::Conntrack,
        layout::{self, Layout, MapKind},
        mac::Mac,
        nodeport_neigh::NodeportNeigh,
        proto::Protocol,
        services::{Scope, ServiceKey},
        snat::Snat,
        tuple::TupleFlags,
    },
    evidence::{Hex, programs::Attachments, simulation::Effect},
    packet::Flow,
    sys::bpf::{self, MapInfo},
};

/// The kinds of maps that a run writes to, and the one that says what is a frontend.
const KINDS: [MapKind; 5] = [
    MapKind::Conntrack,
    MapKind::Affinity,
    MapKind::NodeportNeigh,
    MapKind::Snat,
    MapKind::Services,
];

const ICMP: u8 = 1;
const ICMPV6: u8 = 58;

/// The maps of one IP family, opened for taking entries back.
pub struct Maps {
    open: Vec<Map>,
    cpus: usize,
}

struct Map {
    fd: OwnedFd,
    info: MapInfo,
    layout: &'static Layout,
}

/// An entry by its map and key.
type Place = (usize, Vec<u8>);

/// What could be written by one run, and was not there before it.
pub struct Watch<'m> {
    maps: &'m Maps,
    flow: Flow,
    reverse_nat: u16,
    /// Keys that were there before: never touched.
    before: BTreeSet<Place>,
    /// Backends to which the connection may have gone.
    backends: Vec<(IpAddr, u16)>,
    done: bool,
}

/// Why a connection cannot be simulated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Occupied {
    /// There is such a connection, or was a moment ago: another source port will do.
    Connection,
    /// The client has something that a run would prolong or change, whatever its port.
    Client(String),
}

impl Maps {
    /// Opens the maps that these programs, and those that they tail-call, write to; those of the
    /// family of `address`.
    ///
    /// # Errors
    /// The name of the first map that cannot be opened, and why.
    pub fn open(
        attachments: &Attachments,
        programs: &[u32],
        address: IpAddr,
        cpus: usize,
    ) -> Result<Self, (String, io::Error)> {
        let family = crate::evidence::tables::family_of(address);
        let mut open = Vec::new();
        for id in reached(attachments, programs) {
            let Ok(index) = attachments.maps.binary_search_by_key(&id, |map| map.id) else {
                continue;
            };
            let used = &attachments.maps[index];
            let is_ours = |layout: &&Layout| {
                KINDS.contains(&layout.kind)
                    && layout.family == Some(family)
                    && layout.name.starts_with(&used.name)
                    && (layout.key_size, layout.value_size) == (used.key_size, used.value_size)
            };
            // Several layouts share the 15 bytes of a name; the look-ups below ask by kind alone.
            let Some(layout) = layout::LAYOUTS.iter().find(is_ours) else { continue };
            let opened = if layout.kind == MapKind::Services {
                bpf::open_map_by_id(id)
            } else {
                bpf::open_map_for_cleaning(id)
            };
            let opened = opened.and_then(|fd| Ok((bpf::map_info(fd.as_fd())?, fd)));
            let (info, fd) = match opened {
                Ok(opened) => opened,
                Err(error) => return Err((used.name.clone(), error)),
            };
            open.push(Map { fd, info, layout });
        }
        Ok(Self { open, cpus })
    }

    /// The MAC address that the node has noted for a client.
    #[must_use]
    pub fn client_mac(&self, client: IpAddr) -> Option<Mac> {
        let entry = NodeportNeigh { address: client, mac: Mac::default() };
        let (key, _) = entry.encode();
        self.open
            .iter()
            .enumerate()
            .filter(|(_, map)| map.layout.kind == MapKind::NodeportNeigh)
            .find_map(|(index, map)| {
                let value = self.value(index, &key)?;
                Some(NodeportNeigh::decode(map.layout, &key, &value).ok()?.mac)
            })
    }

    /// Looks whether a connection is free, and notes what is there before it is simulated.
    ///
    /// # Errors
    /// [`Occupied`] if it is not.
    pub fn watch(
        &self,
        flow: Flow,
        reverse_nat: u16,
        backends: &[(IpAddr, u16)],
    ) -> Result<Watch<'_>, Occupied> {
        self.watch_beside(flow, reverse_nat, backends, &[])
    }

    /// Finds a source port of which nothing is known, that of `flow` first, and notes what is there;
    /// `flow` has it then. `earlier` is as for [`watch_beside`](Self::watch_beside).
    ///
    /// # Errors
    /// [`Occupied`] by the client, or by connections wherever it was looked.
    pub fn watch_free(
        &self,
        flow: &mut Flow,
        reverse_nat: u16,
        backends: &[(IpAddr, u16)],
        earlier: &[Watch<'_>],
        ports: &mut Ports,
    ) -> Result<Watch<'_>, Occupied> {
        /// How often another source port is tried where one is in use.
        const ATTEMPTS: u32 = 16;
        for _ in 0..ATTEMPTS {
            match self.watch_beside(*flow, reverse_nat, backends, earlier) {
                Err(Occupied::Connection) => flow.source_port = ports.another(),
                settled => return settled,
            }
        }
        Err(Occupied::Connection)
    }

    /// The same while other packets of ours are under way: what they have left, and will be taken
    /// back, is nobody else's.
    ///
    /// # Errors
    /// [`Occupied`] if it is not free.
    pub fn watch_beside(
        &self,
        flow: Flow,
        reverse_nat: u16,
        backends: &[(IpAddr, u16)],
        earlier: &[Watch<'_>],
    ) -> Result<Watch<'_>, Occupied> {
        let ours: BTreeSet<Place> = earlier.iter().flat_map(Watch::own).collect();
        let mut watch = Watch {
            maps: self,
            flow,
            reverse_nat,
            before: BTreeSet::new(),
            backends: backends.to_vec(),
            done: false,
        };
        for (index, key, what) in watch.keys() {
            let place = (index, key);
            if ours.contains(&place) || self.value(index, &place.1).is_none() {
                continue;
            }
            let occupied = match self.open[index].layout.kind {
                // The same MAC address is written again.
                MapKind::NodeportNeigh => None,
                MapKind::Affinity => Some(Occupied::Client(what)),
                // The entries for ICMP errors have no ports: any connection of the client's.
                _ if what.starts_with(RELATED) => {
                    let whom = what.rsplit(' ').next().unwrap_or_default();
                    Some(Occupied::Client(format!(
                        "it has, or had not long ago, connections to {whom}"
                    )))
                }
                _ => Some(Occupied::Connection),
            };
            if let Some(occupied) = occupied {
                watch.done = true;
                return Err(occupied);
            }
            watch.before.insert(place);
        }
        Ok(watch)
    }

    /// Whether packets to this address and port are for a frontend: by the services map that the
    /// programs use, wildcard entries not counted.
    #[must_use]
    pub fn is_frontend(&self, address: IpAddr, port: u16, protocol: u8) -> bool {
        let services = self.open.iter().enumerate();
        let services = services.filter(|(_, map)| map.layout.kind == MapKind::Services);
        services.into_iter().any(|(index, _)| {
            [Protocol(protocol), Protocol::ANY].into_iter().any(|protocol| {
                let key = ServiceKey { address, port, slot: 0, protocol, scope: Scope::External };
                self.value(index, &key.encode()).is_some()
            })
        })
    }

    fn value(&self, index: usize, key: &[u8]) -> Option<Vec<u8>> {
        let map = &self.open[index];
        let mut value = vec![0; bpf::value_len(&map.info, self.cpus)];
        let found = bpf::lookup(map.fd.as_fd(), &map.info, key, &mut value, self.cpus);
        found.is_ok_and(|found| found).then_some(value)
    }
}

/// How the words for an ICMP entry begin.
const RELATED: &str = "conntrack: ICMP errors";

impl Watch<'_> {
    /// Every key that the run may have written, with what it is in words.
    fn keys(&self) -> Vec<(usize, Vec<u8>, String)> {
        let Flow { source, source_port, destination, destination_port, protocol } = self.flow;
        let protocol = Protocol(protocol);
        let icmp = Protocol(if source.is_ipv4() { ICMP } else { ICMPV6 });
        let mut keys = Vec::new();
        let pairs: BTreeSet<(IpAddr, u16)> = self
            .backends
            .iter()
            .copied()
            .chain([(destination, destination_port)])
            .filter(|(address, _)| address.is_ipv4() == source.is_ipv4())
            .collect();
        for (index, map) in self.maps.open.iter().enumerate() {
            let mut add = |key: Option<Vec<u8>>, what: String| {
                keys.extend(key.map(|key| (index, key, what)));
            };
            match map.layout.kind {
                MapKind::Conntrack => {
                    let entry = |from, to, protocol, flags| {
                        Conntrack::key(map.layout, from, to, protocol, TupleFlags(flags)).ok()
                    };
                    let from = (source, source_port);
                    let to = (destination, destination_port);
                    add(
                        entry(from, to, protocol, TupleFlags::SERVICE),
                        format!("conntrack: {} to the frontend", socket(from)),
                    );
                    for &to in &pairs {
                        for flags in [0, TupleFlags::IN] {
                            let what = format!("conntrack: {} to {}", socket(from), socket(to));
                            add(entry(from, to, protocol, flags), what);
                        }
                        for flags in [TupleFlags::RELATED, TupleFlags::RELATED | TupleFlags::IN] {
                            let what = format!("{RELATED} between {source} and {}", to.0);
                            add(entry((source, 0), (to.0, 0), icmp, flags), what);
                        }
                    }
                }
                MapKind::Affinity => {
                    let session = Affinity {
                        client: Client::Address(source),
                        rev_nat_index: self.reverse_nat,
                        last_used: 0,
                        backend_id: 0,
                    };
                    add(
                        session.encode(map.layout).ok().map(|(key, _)| key),
                        format!("session affinity of {source}"),
                    );
                }
                MapKind::NodeportNeigh => {
                    let entry = NodeportNeigh { address: source, mac: Mac::default() };
                    add(Some(entry.encode().0), format!("MAC address of {source}"));
                }
                MapKind::Snat => {
                    for &to in &pairs {
                        let from = (source, source_port);
                        let key = Snat::key(map.layout, from, to, protocol, TupleFlags(0));
                        let what = format!("source NAT: {} to {}", socket(from), socket(to));
                        add(key.ok(), what);
                    }
                }
                _ => {}
            }
        }
        keys
    }

    /// What is there of it is its own.
    fn own(&self) -> BTreeSet<Place> {
        let keys = self.keys().into_iter().map(|(index, key, _)| (index, key));
        keys.filter(|place| !self.before.contains(place)).collect()
    }

    /// Nothing was run.
    pub fn release(mut self) {
        self.done = true;
    }

    /// Takes back what the run has written.
    pub fn take_back(&mut self) -> Vec<Effect> {
        self.done = true;
        let mut effects = Vec::new();
        for (index, key, what) in self.keys() {
            self.remove(index, &key, what, &mut effects);
        }
        effects
    }

    fn remove(&self, index: usize, key: &[u8], what: String, effects: &mut Vec<Effect>) {
        if self.before.contains(&(index, key.to_vec())) {
            return;
        }
        let Some(value) = self.maps.value(index, key) else { return };
        let map = &self.maps.open[index];
        // The way back of a source NAT is known by the way there.
        if map.layout.kind == MapKind::Snat
            && let Ok(there) = Snat::decode(map.layout, key, &value)
            && !there.tuple_flags.is_in()
        {
            let back = Snat::key(
                map.layout,
                (there.destination, there.destination_port),
                (there.to_address, there.to_port),
                there.protocol,
                TupleFlags(TupleFlags::IN),
            );
            if let Ok(back) = back {
                let what = what.replacen("source NAT", "source NAT, back", 1);
                self.remove(index, &back, what, effects);
            }
        }
        let left = match bpf::delete(map.fd.as_fd(), &map.info, key) {
            // Gone already: taken by the kernel's own clearing (LRU) or by the agent.
            Ok(_) => None,
            Err(error) => Some(error.to_string()),
        };
        effects.push(Effect {
            map: map.info.name.clone(),
            map_id: map.info.id,
            what,
            key: Hex(key).to_string(),
            value: Hex(&value).to_string(),
            left,
        });
    }
}

impl Drop for Watch<'_> {
    /// On a panic too, nothing stays.
    fn drop(&mut self) {
        if !self.done {
            self.take_back();
        }
    }
}

fn socket((address, port): (IpAddr, u16)) -> std::net::SocketAddr {
    (address, port).into()
}

/// Ids of the maps that programs use, those of the programs that they tail-call included.
fn reached(attachments: &Attachments, programs: &[u32]) -> BTreeSet<u32> {
    let by_id: BTreeMap<u32, _> =
        attachments.programs.iter().map(|program| (program.id, program)).collect();
    let mut maps = BTreeSet::new();
    let mut seen = BTreeSet::new();
    let mut next: Vec<u32> = programs.to_vec();
    while let Some(id) = next.pop() {
        if !seen.insert(id) {
            continue;
        }
        let Some(program) = by_id.get(&id) else { continue };
        maps.extend(&program.maps);
        next.extend(&program.tail_calls);
    }
    maps
}
