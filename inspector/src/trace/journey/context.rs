//! What has to be known of the node to tell packets apart.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

/// A frontend whose packets are followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FrontendAddress {
    /// Address: the VIP.
    pub address: IpAddr,
    /// Port.
    pub port: u16,
    /// Number of the transport protocol; 0 for any (Cilium before 1.17).
    pub protocol: u8,
    /// L7: port of the local proxy.
    pub proxy_port: Option<u16>,
}

/// What a device is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// Packets from outside of the node arrive there.
    Outside,
    /// The node's side of a pod's device: what arrives there comes from the pod.
    Pod,
    /// Loopback, and Cilium's own devices.
    Inner,
}

/// A device of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Its name.
    pub name: String,
    /// What it is for.
    pub kind: DeviceKind,
}

/// What has to be known of the node to tell packets apart.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Context {
    /// The addresses whose packets are followed.
    pub vips: BTreeSet<IpAddr>,
    /// Their frontends.
    pub frontends: Vec<FrontendAddress>,
    /// Addresses and ports of the backends.
    pub backends: BTreeSet<(IpAddr, u16)>,
    /// Addresses that are looked up as neighbours on the way to backends and back to clients.
    pub next_hops: BTreeSet<IpAddr>,
    /// Addresses of the node itself, one of which it can put in the client's place; none if they are
    /// not known.
    pub host_addresses: BTreeSet<IpAddr>,
    /// Devices by their index.
    pub devices: BTreeMap<u32, Device>,
}

impl Context {
    /// Name of a device: `eno1`, or `interface 7` if it is not known.
    #[must_use]
    pub fn device(&self, ifindex: u32) -> String {
        match self.devices.get(&ifindex) {
            Some(device) => device.name.clone(),
            None => format!("interface {ifindex}"),
        }
    }

    /// The frontend with this address.
    #[must_use]
    pub fn frontend(&self, address: IpAddr, port: u16, protocol: u8) -> Option<&FrontendAddress> {
        self.frontends.iter().find(|one| {
            (one.address, one.port) == (address, port)
                && (one.protocol == protocol || one.protocol == 0)
        })
    }

    /// Whether there is a backend with this address and port.
    #[must_use]
    pub fn is_backend(&self, address: IpAddr, port: u16) -> bool {
        self.backends.contains(&(address, port))
    }
}
