//! What injected packets leave, and taking it back: entries of Cilium's maps by exact key (as after a
//! simulation), and of the kernel's own tables those that are about the client or the control and
//! were not there before.

use std::{collections::BTreeSet, net::IpAddr};

use crate::{
    cilium::mac::Mac,
    collect::network,
    evidence::{injection::Undone, simulation::Effect},
    packet::Flow,
    simulate::{effects::Watch, source::CLIENT_MAC},
    sys::{change, netlink::NetlinkError},
};

/// Takes everything back when it is dropped, if that was not done before.
pub struct Undo<'m> {
    watches: Vec<Watch<'m>>,
    /// Neighbours that were there before: never touched.
    before: BTreeSet<(u32, IpAddr)>,
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
        let ours = CLIENT_MAC.to_string();
        let mut before = BTreeSet::new();
        for one in network::neighbours_now()? {
            let left_over = one.mac.as_ref().is_some_and(|mac| mac.parse() == Ok(CLIENT_MAC));
            debug_assert!(!left_over || one.mac.as_ref() == Some(&ours));
            if left_over && change::remove_neighbour(one.ifindex, one.address).is_ok() {
                continue;
            }
            before.insert((one.ifindex, one.address));
        }
        Ok(Self { watches: Vec::new(), before, addresses, flows: Vec::new(), done: false })
    }

    /// Adds a packet that is about to be sent.
    pub fn packet(&mut self, flow: Flow, watch: Watch<'m>) {
        self.flows.push(flow);
        self.watches.push(watch);
    }

    /// Lets the kernel believe that the client is at a MAC address that nobody has, so that its
    /// answer leaves and nobody has to be asked for. Whether that was done: not if there is an entry.
    pub fn neighbour(&mut self, ifindex: u32, address: IpAddr, mac: Mac) -> bool {
        !self.before.contains(&(ifindex, address))
            && change::add_neighbour(ifindex, address, mac).is_ok()
    }

    /// Takes everything back.
    pub fn finish(mut self) -> (Vec<Effect>, Vec<Undone>) {
        self.take_back()
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
        match network::neighbours_now() {
            Ok(now) => {
                for one in now {
                    let is_new = !self.before.contains(&(one.ifindex, one.address));
                    let mac: Option<Mac> = one.mac.as_ref().and_then(|mac| mac.parse().ok());
                    // One that answered is somebody's.
                    let nobodys = mac.is_none_or(|mac| mac == CLIENT_MAC || mac.is_zero());
                    if is_new && nobodys && self.addresses.contains(&one.address) {
                        let what = format!("neighbour entry of {} ({})", one.address, one.state);
                        note(what, change::remove_neighbour(one.ifindex, one.address));
                    }
                }
            }
            Err(error) => {
                note("neighbour entries".to_owned(), Err(std::io::Error::other(error)));
            }
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
