//! What injected packets leave, and taking it back: entries of Cilium's maps by exact key (as after a
//! simulation), and of the kernel's own tables those that are about the client or the control and
//! were not there before.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    thread,
    time::Duration,
};

use crate::{
    cilium::mac::Mac,
    collect::network,
    evidence::{injection::Undone, network::Neighbour, simulation::Effect},
    packet::Flow,
    simulate::{effects::Watch, source::CLIENT_MAC},
    sys::{change, netlink::NetlinkError},
};

/// Takes everything back when it is dropped, if that was not done before.
pub struct Undo<'m> {
    watches: Vec<Watch<'m>>,
    /// Neighbours that were there before: never touched.
    before: BTreeSet<(u32, IpAddr)>,
    /// Those that were made for a packet.
    made: BTreeSet<(u32, IpAddr)>,
    /// Addresses of which a new neighbour entry is ours: clients, controls and the VIP.
    addresses: BTreeSet<IpAddr>,
    flows: Vec<Flow>,
    done: bool,
}

impl<'m> Undo<'m> {
    /// Notes what is there, for packets with these addresses. What a run before this one has left,
    /// since it was killed, is removed.
    ///
    /// # Errors
    /// The neighbour table cannot be read.
    pub fn new(addresses: BTreeSet<IpAddr>) -> Result<Self, NetlinkError> {
        let mut before = BTreeSet::new();
        for one in network::neighbours_now()? {
            let left_over = one.mac.as_ref().is_some_and(|mac| mac.parse() == Ok(CLIENT_MAC));
            if left_over && change::remove_neighbour(one.ifindex, one.address).is_ok() {
                continue;
            }
            before.insert((one.ifindex, one.address));
        }
        Ok(Self {
            watches: Vec::new(),
            before,
            made: BTreeSet::new(),
            addresses,
            flows: Vec::new(),
            done: false,
        })
    }

    /// The packets so far.
    #[must_use]
    pub fn packets(&self) -> &[Watch<'m>] {
        &self.watches
    }

    /// Adds a packet that is about to be sent.
    pub fn packet(&mut self, flow: Flow, watch: Watch<'m>) {
        self.flows.push(flow);
        self.watches.push(watch);
    }

    /// Lets the kernel believe that the client is at a MAC address that nobody has, so that its
    /// answer leaves and nobody has to be asked for. Whether it does: not if there is an entry, since
    /// then somebody has the address.
    ///
    /// # Errors
    /// Those of the kernel: `EPERM` without `CAP_NET_ADMIN`, `ENODEV` if the device is gone.
    pub fn neighbour(&mut self, ifindex: u32, address: IpAddr, mac: Mac) -> std::io::Result<bool> {
        let place = (ifindex, address);
        if self.made.contains(&place) {
            return Ok(true);
        }
        if self.before.contains(&place) {
            return Ok(false);
        }
        match change::add_neighbour(ifindex, address, mac) {
            Ok(()) => {
                self.made.insert(place);
                Ok(true)
            }
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Takes everything back, and says what that was.
    #[must_use]
    pub fn finish(mut self) -> (Vec<Effect>, Vec<Undone>) {
        self.take_back()
    }

    /// Removes the neighbour entries that are there for the packets. What a packet or a timer holds
    /// for a moment, the kernel only marks as failed: that is asked for again.
    fn remove_neighbours(&self) -> Vec<(String, std::io::Result<bool>)> {
        const ATTEMPTS: usize = 20;
        const PAUSE: Duration = Duration::from_millis(10);
        let mut removed: BTreeMap<(u32, IpAddr), (String, std::io::Result<bool>)> = BTreeMap::new();
        for _ in 0..ATTEMPTS {
            let there = match network::neighbours_now() {
                Ok(now) => now.into_iter().filter(|one| self.is_ours(one)).collect::<Vec<_>>(),
                Err(error) => {
                    let error = std::io::Error::other(error);
                    return vec![("neighbour entries".to_owned(), Err(error))];
                }
            };
            if there.is_empty() {
                return removed.into_values().collect();
            }
            for one in there {
                let result = change::remove_neighbour(one.ifindex, one.address);
                let what = format!("neighbour entry of {} ({})", one.address, one.state);
                let key = (one.ifindex, one.address);
                removed.entry(key).or_insert((what, Ok(true))).1 = result;
            }
            thread::sleep(PAUSE);
        }
        let held = || std::io::Error::other("the kernel holds it, and will forget it by itself");
        let all = removed.into_values();
        all.map(|(what, result)| (what, result.and_then(|_| Err(held())))).collect()
    }

    /// Whether an entry was not there before, is about our addresses and nobody's.
    fn is_ours(&self, one: &Neighbour) -> bool {
        let mac: Option<Mac> = one.mac.as_ref().and_then(|mac| mac.parse().ok());
        !self.before.contains(&(one.ifindex, one.address))
            && self.addresses.contains(&one.address)
            // One that answered is somebody's.
            && mac.is_none_or(|mac| mac == CLIENT_MAC || mac.is_zero())
    }

    fn take_back(&mut self) -> (Vec<Effect>, Vec<Undone>) {
        self.done = true;
        let mut effects = Vec::new();
        for watch in &mut self.watches {
            effects.extend(watch.take_back());
        }
        let mut undone = Vec::new();
        let mut note = |what: String, result: std::io::Result<bool>| match result {
            Ok(true) => undone.push(Undone { what, left: None }),
            Ok(false) => {}
            Err(error) => undone.push(Undone { what, left: Some(error.to_string()) }),
        };
        for (what, result) in self.remove_neighbours() {
            note(what, result);
        }
        for flow in &self.flows {
            let what = format!(
                "tracked connection of {}",
                std::net::SocketAddr::from((flow.source, flow.source_port))
            );
            note(what, change::remove_connection(flow));
        }
        (effects, undone)
    }
}

impl Drop for Undo<'_> {
    /// On an error or a panic too, nothing stays.
    fn drop(&mut self) {
        if !self.done {
            self.take_back();
        }
    }
}
