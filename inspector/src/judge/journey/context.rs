//! What evidence says of a node that is needed to tell packets apart.

use crate::{
    cilium::services::Scope,
    evidence::{Evidence, VipQuery, tables::Tables},
    judge::{attached, programmed::Programmed, stack},
    trace::journey::{Context, Device, DeviceKind, FrontendAddress},
};

/// What evidence says of a node that is needed to tell the packets of a VIP apart: those of its
/// frontends, of every backend they can choose, and the devices.
#[must_use]
pub fn context(evidence: &Evidence, query: &VipQuery) -> Context {
    let tables = Tables::for_vip(evidence, query.address);
    let programmed = Programmed::new(evidence, &tables, query);
    let mut context = Context { vips: [query.address].into(), ..Context::default() };
    for frontend in &programmed.frontends {
        let address = FrontendAddress {
            address: frontend.address,
            port: frontend.port,
            protocol: frontend.protocol.0,
            proxy_port: frontend.l7_proxy_port,
        };
        if frontend.scope != Scope::Internal || !context.frontends.contains(&address) {
            context.frontends.push(address);
        }
        for backend in &frontend.backends {
            context.backends.extend(stack::backend_endpoint(backend.address.as_deref()));
        }
    }
    let is_pod = |ifindex: u32, name: &str| {
        name.starts_with("lxc") || tables.endpoints.values().any(|one| one.ifindex == ifindex)
    };
    let mut add = |ifindex: u32, name: &str| {
        let kind = if is_pod(ifindex, name) {
            DeviceKind::Pod
        } else if attached::is_inner(name) {
            DeviceKind::Inner
        } else {
            DeviceKind::Outside
        };
        context.devices.entry(ifindex).or_insert_with(|| Device { name: name.to_owned(), kind });
    };
    if let Some(network) = &evidence.network {
        for link in &network.links {
            add(link.ifindex, &link.name);
        }
    }
    let network = evidence.network.iter();
    for address in network.flat_map(|network| &network.links).flat_map(|link| &link.addresses) {
        let address = address.split('/').next().and_then(|address| address.parse().ok());
        context.host_addresses.extend::<Option<std::net::IpAddr>>(address);
    }
    if let Some(attachments) = &evidence.attachments {
        for device in &attachments.devices {
            add(device.ifindex, &device.name);
        }
    }
    for device in &evidence.devices {
        if let Some(name) = &device.name {
            add(device.ifindex, name);
        }
    }
    if let Some(network) = &evidence.network {
        for asked in &network.routes {
            if let Ok(route) = &asked.answer
                && asked.destination != query.address
                && route.kind == "unicast"
            {
                context.next_hops.insert(route.gateway.unwrap_or(asked.destination));
            }
        }
    }
    context
}
