//! The lab's network: the node of a capture and those around it, each in a network namespace.
//!
//! ```text
//!  client 192.168.2.50 ─┐                      ┌─ eno1 (veth) ── node ── lxc… (veth) ── pods
//!  host60 192.168.2.60 ─┴─ lan (a bridge) ─────┘                  └─ wg0 (TUN) ── vpn 10.90.0.2
//! ```
//!
//! Devices, interface indexes, addresses, MAC addresses, routes and rules of the node are those of
//! the capture. Without the stand-in datapath ([`crate::datapath`]) nothing answers for a VIP, and
//! pods are reached only as far as the routes reach them (on a real node BPF does that).

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::{AsRawFd, OwnedFd},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use futures_util::TryStreamExt;
use rtnetlink::{
    Handle, LinkBridge, LinkMessageBuilder, LinkUnspec, LinkVeth, LinkWireguard,
    RouteMessageBuilder,
    packet_route::{
        AddressFamily,
        address::{AddressAttribute, AddressFlags, AddressMessage, AddressScope},
        link::{InfoData, InfoVeth, LinkAttribute, LinkFlags, LinkMessage},
        route::{
            RouteAddress, RouteAttribute, RouteFlags, RouteMessage, RouteProtocol, RouteScope,
            RouteType,
        },
        rule::{RuleAction, RuleAttribute, RuleHeader, RuleMessage},
    },
};

use crate::{
    netns::{self, Ns},
    plan::{Address, Device, Kind, Plan, PlanError, Pod, Route, Rule, Scope, TABLE_LOCAL},
    state::StateError,
    tun, wireguard,
};

/// Name of the switch in the `lan` namespace.
const SWITCH: &str = "lan0";

/// Interface index of the switch; those of the hosts' ports follow. Out of the way of the node's
/// port, which has the index that the capture says.
const SWITCH_INDEX: u32 = 1000;

/// What a change of the network failed with.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// What the capture says of the node cannot be made.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A namespace.
    #[error(transparent)]
    State(#[from] StateError),
    /// A netlink request.
    #[error("{what}: {source}")]
    Netlink {
        /// What was to be done.
        what: String,
        /// What the kernel said.
        source: rtnetlink::Error,
    },
    /// The kernel did not get to the end of what a change entails.
    #[error("the network of {role} did not settle within {} s: {what}", PATIENCE.as_secs())]
    Unsettled {
        /// The place.
        role: Ns,
        /// What was still to come.
        what: String,
    },
    /// A system call or a file.
    #[error("{what}: {source}")]
    Io {
        /// What was to be done.
        what: String,
        /// What the system said.
        source: io::Error,
    },
}

/// How long a namespace may take to settle; on an idle machine it takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(20);

/// For `map_err`: says what was to be done.
fn netlink(what: impl Into<String>) -> impl FnOnce(rtnetlink::Error) -> NetworkError {
    |source| NetworkError::Netlink { what: what.into(), source }
}

/// For `map_err`: says what was to be done.
fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> NetworkError {
    |source| NetworkError::Io { what: what.into(), source }
}

/// The node's addresses in the LAN, which all captures share.
const NODE_IN_LAN: (Ipv4Addr, Ipv6Addr) =
    (Ipv4Addr::new(192, 168, 2, 10), Ipv6Addr::new(0xfd00, 2, 0, 0, 0, 0, 0, 0x10));

/// A host of the LAN: role, last byte of its IPv4 address, last group of its IPv6 address.
const HOSTS: [(Ns, u8, u16); 2] = [(Ns::Client, 50, 0x50), (Ns::Host60, 60, 0x60)];

/// Makes the network of the lab `name`; `step` is called before each part and keeps a signal from
/// falling into it.
///
/// # Errors
/// [`NetworkError`]; what was made until then stays.
pub fn make<G>(name: &str, plan: &Plan, step: impl Fn() -> G) -> Result<(), NetworkError> {
    {
        let _step = step();
        crate::state::prepare_netns()?;
    }
    let mut roles = vec![Ns::Node, Ns::Lan, Ns::Client, Ns::Host60, Ns::Vpn];
    roles.extend(plan.pods().map(|pod| Ns::Pod(pod.number)));
    let mut namespaces = BTreeMap::new();
    for role in roles {
        let _step = step();
        namespaces.insert(role, netns::create(name, role)?);
    }

    {
        let _step = step();
        fill(plan, &namespaces)?;
    }
    for (role, namespace) in &namespaces {
        settle(*role, namespace, &step)?;
    }
    Ok(())
}

/// Makes what is in the namespaces.
fn fill(plan: &Plan, namespaces: &BTreeMap<Ns, OwnedFd>) -> Result<(), NetworkError> {
    let lan = &namespaces[&Ns::Lan];
    in_namespace(lan, async |handle| {
        // The switch and its ports have no addresses, so no time goes by for checking them.
        defaults(false)?;
        add(&handle, LinkBridge::new(SWITCH).index(SWITCH_INDEX).up().build(), SWITCH).await
    })?;
    for (role, v4, v6) in HOSTS {
        in_namespace(&namespaces[&role], async |handle| host(&handle, lan, role, v4, v6).await)?;
    }

    for pod in plan.pods() {
        // Before the pod's end of its device is there: a device takes these when it is made.
        in_namespace(&namespaces[&Ns::Pod(pod.number)], async |_| defaults(true))?;
    }

    let mut tun = None;
    in_namespace(&namespaces[&Ns::Node], async |handle| {
        defaults(false)?;
        forward()?;
        for device in &plan.devices {
            if let Some(end) = device_up(&handle, device, namespaces).await? {
                tun = Some(end);
            }
        }
        for (key, value) in &plan.sysctls {
            restore_sysctl(key, value)?;
        }
        set_up(&handle, "lo", 1).await?;
        for device in &plan.devices {
            for own in &device.addresses {
                add_address(&handle, device.index, *own).await?;
            }
        }
        for route in &plan.routes {
            add_route(&handle, plan, route).await?;
        }
        set_rules(&handle, &plan.rules).await
    })?;

    in_namespace(lan, async |handle| {
        for port in ["node", "client", "host60"] {
            // A node without a device in the LAN.
            if port == "node" && index_of(port).is_err() {
                continue;
            }
            plug(&handle, port).await?;
        }
        Ok(())
    })?;
    for pod in plan.pods() {
        let namespace = &namespaces[&Ns::Pod(pod.number)];
        in_namespace(namespace, async |handle| pod_up(&handle, pod, &plan.routers).await)?;
    }

    let wireguard = plan.devices.iter().find(|device| device.kind == Kind::WireGuard);
    if tun.is_none() && wireguard.is_none() {
        return Ok(());
    }
    let vpn = &namespaces[&Ns::Vpn];
    if let Some(device) = wireguard {
        in_namespace(lan, async |handle| set_up(&handle, "lo", 1).await)?;
        wireguard_in(lan, "wg0", 0, vpn)?;
        connect(device, &namespaces[&Ns::Node], vpn)?;
    }
    in_namespace(vpn, async |handle| {
        defaults(false)?;
        let far = match wireguard {
            Some(_) => None,
            None => Some(tun::create("wg0", 0).map_err(io("making the VPN client's wg0"))?),
        };
        set_up(&handle, "lo", 1).await?;
        let index = index_of("wg0")?;
        let message = LinkUnspec::new_with_index(index).mtu(1420).up().build();
        handle.link().set(message).execute().await.map_err(netlink("setting wg0 up"))?;
        add_address(&handle, index, global([10, 90, 0, 2], 24)).await?;
        add_address(&handle, index, global([0xfd00, 0x90, 0, 0, 0, 0, 0, 2], 64)).await?;
        let v4 = RouteMessageBuilder::<Ipv4Addr>::new().output_interface(index);
        let v4 = v4.scope(RouteScope::Link).build();
        let v6 = RouteMessageBuilder::<Ipv6Addr>::new().output_interface(index).build();
        for route in [v4, v6] {
            let what = "the default route over wg0";
            handle.route().add(route).execute().await.map_err(netlink(what))?;
        }
        let (Some(tun), Some(far)) = (tun, far) else { return Ok(()) };
        tun::pump(tun, far).map_err(io("starting the process between the ends of wg0"))
    })
}

/// Makes a `WireGuard` device of the namespace `lan` and puts it into another; `index` is its interface
/// index there, 0 for any.
fn wireguard_in(
    lan: &OwnedFd,
    name: &str,
    index: u32,
    namespace: &OwnedFd,
) -> Result<(), NetworkError> {
    in_namespace(lan, async |handle| {
        // By another name and index: here both may be in use.
        const MAKING: &str = "making";
        let what = format!("{name} (this kernel may have no WireGuard)");
        add(&handle, LinkWireguard::new(MAKING).build(), &what).await?;
        let mut moved = LinkUnspec::new_with_index(index_of(MAKING)?)
            .name(name)
            .setns_by_fd(namespace.as_raw_fd());
        if let Some(index) = i32::try_from(index).ok().filter(|index| *index > 0) {
            moved = moved.append_extra_attribute(LinkAttribute::NewIfIndex(index));
        }
        handle.link().set(moved.build()).execute().await.map_err(netlink(format!("moving {name}")))
    })
}

/// Makes the two ends of the tunnel know each other. The node knows no endpoint of the client's.
fn connect(device: &Device, node: &OwnedFd, vpn: &OwnedFd) -> Result<(), NetworkError> {
    let failed = || io(format!("setting {} up (WireGuard)", device.name));
    let [node_port, vpn_port] = wireguard::PORTS;
    let identify = |name: &str, key, port| wireguard::identify(name, key, port).map_err(failed());
    let node_key = netns::run_in(node, || identify(&device.name, 0x11, node_port))?;
    let vpn_key = netns::run_in(vpn, || identify("wg0", 0x22, vpn_port))?;
    let know = |name: &str, peer| {
        wireguard::set(name, vec![wireguard::Attribute::Peers(vec![peer])]).map_err(failed())
    };
    let client =
        [(IpAddr::from([10, 90, 0, 2]), 32), (IpAddr::from([0xfd00, 0x90, 0, 0, 0, 0, 0, 2]), 128)];
    netns::run_in(node, || know(&device.name, wireguard::peer(vpn_key, None, &client)))?;
    let endpoint = Some(SocketAddr::from(([127, 0, 0, 1], node_port)));
    let all = [(Ipv4Addr::UNSPECIFIED.into(), 0), (Ipv6Addr::UNSPECIFIED.into(), 0)];
    netns::run_in(vpn, || know("wg0", wireguard::peer(node_key, endpoint, &all)))
}

/// Gives the client of the lab `name` a route by way of the node to each of `addresses`, which lie in
/// the node's LAN: the captures' clients had such for VIPs that no responder announces.
///
/// # Errors
/// [`NetworkError`].
pub fn route_by_node(name: &str, addresses: &[IpAddr]) -> Result<(), NetworkError> {
    let client = crate::state::open_file(&netns::path(name, Ns::Client))?;
    in_namespace(&client, async |handle| {
        for address in addresses {
            let route = match *address {
                IpAddr::V4(address) => RouteMessageBuilder::<Ipv4Addr>::new()
                    .destination_prefix(address, 32)
                    .gateway(NODE_IN_LAN.0)
                    .build(),
                IpAddr::V6(address) => RouteMessageBuilder::<Ipv6Addr>::new()
                    .destination_prefix(address, 128)
                    .gateway(NODE_IN_LAN.1)
                    .build(),
            };
            let what = format!("the client's route to {address}");
            handle.route().add(route).execute().await.map_err(netlink(what))?;
        }
        Ok(())
    })
}

/// Joins the LAN of the lab `other` to that of the lab `first`, whose hosts the LAN has from then on;
/// `number` is that of the node that comes with it.
///
/// # Errors
/// [`NetworkError`].
pub fn join(first: &str, other: &str, number: u8) -> Result<(), NetworkError> {
    let far = crate::state::open_file(&netns::path(first, Ns::Lan))?;
    let near = crate::state::open_file(&netns::path(other, Ns::Lan))?;
    let port = format!("node{number}");
    in_namespace(&near, async |handle| {
        for host in ["client", "host60"] {
            let message = LinkUnspec::new_with_index(index_of(host)?).down().build();
            let what = format!("unplugging {host}");
            handle.link().set(message).execute().await.map_err(netlink(what))?;
        }
        let end = LinkUnspec::new_with_name(&port).setns_by_fd(far.as_raw_fd());
        add(&handle, veth("cross", |near| near, end), "cross").await?;
        plug(&handle, "cross").await
    })?;
    in_namespace(&far, async |handle| plug(&handle, &port).await)
}

/// Connects a device to the switch.
async fn plug(handle: &Handle, port: &str) -> Result<(), NetworkError> {
    let message = LinkUnspec::new_with_index(index_of(port)?).controller(SWITCH_INDEX).up().build();
    let what = format!("connecting {port} to the switch");
    handle.link().set(message).execute().await.map_err(netlink(what))
}

/// Makes the hosts of the LAN finish the checksums of what they send. Between veth devices that is
/// left to whoever needs it, and a program at XDP cannot tell.
///
/// # Errors
/// [`NetworkError`].
pub fn finish_checksums(name: &str) -> Result<(), NetworkError> {
    for place in [Ns::Client, Ns::Host60] {
        let namespace = crate::state::open_file(&netns::path(name, place))?;
        netns::run_in(&namespace, || {
            checksums_by_hand("eth0").map_err(io(format!("SIOCETHTOOL for eth0 of {place}")))
        })?;
    }
    Ok(())
}

/// `ethtool -K DEVICE tx off`.
fn checksums_by_hand(device: &str) -> io::Result<()> {
    /// `ETHTOOL_STXCSUM` of `linux/ethtool.h`.
    const SET_TX_CHECKSUMS: u32 = 0x17;
    /// `SIOCETHTOOL` of `linux/sockios.h`.
    const SIOCETHTOOL: libc::c_ulong = 0x8946;
    let socket = std::net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    // `struct ethtool_value`: command and value, off.
    let mut value = [SET_TX_CHECKSUMS, 0];
    // SAFETY: all of it are numbers, of which zero is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(device.bytes().take(15)) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_data = value.as_mut_ptr().cast();
    // SAFETY: the request names a device and points to the structure of the command, which lives
    // until after the call.
    match unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL as _, &raw mut request) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Waits until the kernel has done what it does after a change in its own time: carriers noticed,
/// addresses usable, and the routes that come with both.
fn settle<G>(role: Ns, namespace: &OwnedFd, step: impl Fn() -> G) -> Result<(), NetworkError> {
    let start = Instant::now();
    loop {
        {
            let _step = step();
            match in_namespace(namespace, async |handle| unsettled(&handle).await)? {
                None => return Ok(()),
                Some(what) if start.elapsed() > PATIENCE => {
                    return Err(NetworkError::Unsettled { role, what });
                }
                Some(_) => {}
            }
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// What is still to come in the namespace of this connection.
async fn unsettled(handle: &Handle) -> Result<Option<String>, NetworkError> {
    let links: Vec<LinkMessage> =
        handle.link().get().execute().try_collect().await.map_err(netlink("listing devices"))?;
    let running = LinkFlags::Running | LinkFlags::LowerUp;
    for link in links {
        let flags = link.header.flags;
        if flags.contains(LinkFlags::Up) && !flags.contains(running) {
            return Ok(Some(format!("the device {} has no carrier", link.header.index)));
        }
    }

    // Addresses with the index of their device: two may have the same one.
    let mut local: BTreeSet<(IpAddr, u32)> = BTreeSet::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let mut request = RouteMessage::default();
        request.header.address_family = family;
        let routes: Vec<RouteMessage> = handle
            .route()
            .get(request)
            .execute()
            .try_collect()
            .await
            .map_err(netlink("listing routes"))?;
        for route in routes {
            if route.header.flags.contains(RouteFlags::Linkdown) {
                return Ok(Some(format!("a route is down: {:?}", route.attributes)));
            }
            if route.header.kind != RouteType::Local {
                continue;
            }
            let mut destination = None;
            let mut device = None;
            for attribute in route.attributes {
                match attribute {
                    RouteAttribute::Destination(RouteAddress::Inet(ip)) => {
                        destination = Some(IpAddr::from(ip));
                    }
                    RouteAttribute::Destination(RouteAddress::Inet6(ip)) => {
                        destination = Some(IpAddr::from(ip));
                    }
                    RouteAttribute::Oif(index) => device = Some(index),
                    _ => {}
                }
            }
            local.extend(destination.zip(device));
        }
    }
    let addresses: Vec<AddressMessage> = handle
        .address()
        .get()
        .execute()
        .try_collect()
        .await
        .map_err(netlink("listing addresses"))?;
    for message in addresses {
        let own = message.attributes.iter().find_map(|attribute| match attribute {
            AddressAttribute::Local(ip) => Some(ip),
            _ => None,
        });
        let own = own.or_else(|| {
            message.attributes.iter().find_map(|attribute| match attribute {
                AddressAttribute::Address(ip) => Some(ip),
                _ => None,
            })
        });
        if let Some(ip) = own.filter(|ip| !local.contains(&(**ip, message.header.index))) {
            return Ok(Some(format!("there is no local route to the address {ip}")));
        }
    }
    // The kernel adds the local route and what goes with it (the anycast address) under one lock,
    // which this change that changes nothing has to wait for.
    set_up(handle, "lo", 1).await?;
    Ok(None)
}

/// Runs `work` in a namespace, with a netlink connection there.
fn in_namespace<T: Send>(
    namespace: &OwnedFd,
    work: impl AsyncFnOnce(Handle) -> Result<T, NetworkError> + Send,
) -> Result<T, NetworkError> {
    netns::run_in(namespace, || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()
            .map_err(io("starting a runtime"))?;
        runtime.block_on(async {
            let (connection, handle, _) =
                rtnetlink::new_connection().map_err(io("opening a netlink socket"))?;
            tokio::spawn(connection);
            work(handle).await
        })
    })
}

/// Settings for devices yet to be made: no waiting for duplicate addresses, no router
/// advertisements, and link-local addresses only where `link_local` says so.
fn defaults(link_local: bool) -> Result<(), NetworkError> {
    for scope in ["all", "default"] {
        sysctl(&format!("net/ipv6/conf/{scope}/accept_dad"), "0")?;
        sysctl(&format!("net/ipv6/conf/{scope}/accept_ra"), "0")?;
    }
    if link_local {
        return Ok(());
    }
    // IN6_ADDR_GEN_MODE_NONE: the captured ones are added instead. Not for `all`: that would give
    // `lo` its address now, and so a second route to it when it is set up.
    sysctl("net/ipv6/conf/default/addr_gen_mode", "1")
}

/// What Cilium's agent sets on every node: forwarding, and no reverse path filter.
fn forward() -> Result<(), NetworkError> {
    sysctl("net/ipv4/ip_forward", "1")?;
    sysctl("net/ipv6/conf/all/forwarding", "1")?;
    sysctl("net/ipv4/conf/all/rp_filter", "0")?;
    sysctl("net/ipv4/conf/default/rp_filter", "0")
}

fn sysctl(key: &str, value: &str) -> Result<(), NetworkError> {
    let path = Path::new("/proc/sys").join(key);
    fs::write(&path, value).map_err(io(format!("writing {value} to {}", path.display())))
}

/// Sets what `sysctl -a` printed. Settings that this kernel does not have or let itself be set, and
/// those that have the value already, are left alone.
fn restore_sysctl(key: &str, value: &str) -> Result<(), NetworkError> {
    let path = Path::new("/proc/sys").join(key.replace('.', "/"));
    match fs::read_to_string(&path) {
        Ok(now) if now.trim() != value => match fs::write(&path, value) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
            result => result.map_err(io(format!("writing {value} to {}", path.display()))),
        },
        _ => Ok(()),
    }
}

/// Index of a device in the namespace of this thread.
fn index_of(name: &str) -> Result<u32, NetworkError> {
    nix::net::if_::if_nametoindex(name)
        .map_err(|errno| io(format!("finding the device {name}"))(errno.into()))
}

async fn add(handle: &Handle, message: LinkMessage, name: &str) -> Result<(), NetworkError> {
    let what = format!("making the device {name}");
    handle.link().add(message).execute().await.map_err(netlink(what))
}

async fn set_up(handle: &Handle, name: &str, index: u32) -> Result<(), NetworkError> {
    let message = LinkUnspec::new_with_index(index).up().build();
    handle.link().set(message).execute().await.map_err(netlink(format!("setting {name} up")))
}

/// An address that is valid anywhere.
fn global(ip: impl Into<IpAddr>, length: u8) -> Address {
    Address { ip: ip.into(), length, scope: Scope::Global }
}

async fn add_address(handle: &Handle, index: u32, own: Address) -> Result<(), NetworkError> {
    let Address { ip, length, scope } = own;
    let mut request = handle.address().add(index, ip, length);
    let message = request.message_mut();
    message.header.scope = match scope {
        Scope::Global => AddressScope::Universe,
        Scope::Link => AddressScope::Link,
        Scope::Host => AddressScope::Host,
    };
    if ip.is_ipv6() {
        // Usable at once.
        message.attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
    } else {
        // The captured node's addresses have no broadcast address; the kernel's routes do without.
        message.attributes.retain(|attribute| !matches!(attribute, AddressAttribute::Broadcast(_)));
    }
    request.execute().await.map_err(netlink(format!("adding the address {ip}/{length}")))
}

/// One end of a veth pair with an explicit index (0: any).
fn end<T>(
    builder: LinkMessageBuilder<T>,
    mac: Option<[u8; 6]>,
    index: u32,
) -> LinkMessageBuilder<T> {
    let builder = builder.index(index);
    match mac {
        Some(mac) => builder.address(mac.to_vec()),
        None => builder,
    }
}

/// A veth pair: `near` here, `far` as it says.
fn veth(
    name: &str,
    near: impl FnOnce(LinkMessageBuilder<LinkVeth>) -> LinkMessageBuilder<LinkVeth>,
    far: LinkMessageBuilder<LinkUnspec>,
) -> LinkMessage {
    // The library sets only the peer's name; the message has room for all of it.
    near(LinkVeth::new(name, "")).set_info_data(InfoData::Veth(InfoVeth::Peer(far.build()))).build()
}

/// A host of the LAN: addresses by its number, the services' internal prefixes by the node.
async fn host(
    handle: &Handle,
    lan: &OwnedFd,
    role: Ns,
    v4: u8,
    v6: u16,
) -> Result<(), NetworkError> {
    defaults(true)?;
    set_up(handle, "lo", 1).await?;
    let port = LinkUnspec::new_with_name(&role.to_string())
        .index(SWITCH_INDEX + u32::from(v4))
        .setns_by_fd(lan.as_raw_fd());
    let mac = Some([2, 0, 0, 0, 2, v4]);
    // The kernel takes the other end's index only beside one for this end.
    let index = 2;
    add(handle, veth("eth0", |near| end(near, mac, index), port), "eth0").await?;
    set_up(handle, "eth0", index).await?;
    add_address(handle, index, global([192, 168, 2, v4], 24)).await?;
    add_address(handle, index, global([0xfd00, 2, 0, 0, 0, 0, 0, v6], 64)).await?;
    if role != Ns::Client {
        return Ok(());
    }
    // As on the captures' client: cluster addresses are behind the node.
    let v4 = RouteMessageBuilder::<Ipv4Addr>::new()
        .destination_prefix(Ipv4Addr::new(10, 96, 0, 0), 16)
        .gateway(NODE_IN_LAN.0)
        .build();
    let v6 = RouteMessageBuilder::<Ipv6Addr>::new()
        .destination_prefix(Ipv6Addr::from([0xfd00, 0x96, 0, 0, 0, 0, 0, 0]), 112)
        .gateway(NODE_IN_LAN.1)
        .build();
    for route in [v4, v6] {
        handle
            .route()
            .add(route)
            .execute()
            .await
            .map_err(netlink("the client's route to services"))?;
    }
    Ok(())
}

/// Makes a device of the node and sets it up. For `wg0`: the descriptor that it lives by.
async fn device_up(
    handle: &Handle,
    device: &Device,
    namespaces: &BTreeMap<Ns, OwnedFd>,
) -> Result<Option<OwnedFd>, NetworkError> {
    let mut tun = None;
    let far = match &device.kind {
        Kind::Lan(index) => Some(
            LinkUnspec::new_with_name("node")
                .index(*index)
                .setns_by_fd(namespaces[&Ns::Lan].as_raw_fd()),
        ),
        Kind::Pod(pod) => Some(end(
            LinkUnspec::new_with_name("eth0")
                .mtu(device.mtu)
                .setns_by_fd(namespaces[&Ns::Pod(pod.number)].as_raw_fd()),
            Some(pod.mac),
            pod.index,
        )),
        // The pair is made with the first of its ends; the second end gets what is its own below.
        Kind::Pair(peer) if *peer > device.index => {
            Some(LinkUnspec::new_with_name("peer").index(*peer))
        }
        Kind::Pair(_) => None,
        Kind::WireGuard => {
            let node = &namespaces[&Ns::Node];
            wireguard_in(&namespaces[&Ns::Lan], &device.name, device.index, node)?;
            None
        }
        Kind::Tun => {
            let what = format!("making the TUN device {}", device.name);
            tun = Some(tun::create(&device.name, device.index).map_err(io(what))?);
            None
        }
    };
    if let Some(far) = far {
        let near = |near| end(near, device.mac, device.index);
        add(handle, veth(&device.name, near, far), &device.name).await?;
    }
    let change = LinkUnspec::new_with_index(device.index)
        .name(device.name.as_str())
        .mtu(device.mtu)
        .arp(device.arp);
    let change = match device.mac {
        Some(mac) => change.address(mac.to_vec()),
        None => change,
    };
    let what = format!("setting {} up", device.name);
    handle.link().set(change.build()).execute().await.map_err(netlink(&what))?;
    if matches!(device.kind, Kind::Pair(_)) {
        // Cilium sets this on both of its devices: packets between them have the node's own
        // addresses as their source.
        sysctl(&format!("net/ipv4/conf/{}/accept_local", device.name), "1")?;
    }
    set_up(handle, &device.name, device.index).await?;
    Ok(tun)
}

/// A pod's end: its addresses, and the router behind its device.
async fn pod_up(handle: &Handle, pod: &Pod, routers: &[IpAddr]) -> Result<(), NetworkError> {
    set_up(handle, "lo", 1).await?;
    let index = index_of("eth0")?;
    set_up(handle, "eth0", index).await?;
    for address in &pod.addresses {
        let length = if address.is_ipv4() { 32 } else { 128 };
        add_address(handle, index, global(*address, length)).await?;
    }
    let has = |v6: bool| pod.addresses.iter().any(|address| address.is_ipv6() == v6);
    for router in routers.iter().filter(|router| has(router.is_ipv6())) {
        let (direct, default) = match *router {
            IpAddr::V4(router) => {
                let route = || RouteMessageBuilder::<Ipv4Addr>::new().output_interface(index);
                let direct = route().destination_prefix(router, 32).scope(RouteScope::Link);
                (direct.build(), route().gateway(router).build())
            }
            IpAddr::V6(router) => {
                let route = || RouteMessageBuilder::<Ipv6Addr>::new().output_interface(index);
                let direct = route().destination_prefix(router, 128);
                (direct.build(), route().gateway(router).build())
            }
        };
        for route in [direct, default] {
            let what = format!("the route to the pod's router {router}");
            handle.route().add(route).execute().await.map_err(netlink(what))?;
        }
    }
    Ok(())
}

/// Adds a captured route; one that the kernel has made by itself is there already.
async fn add_route(handle: &Handle, plan: &Plan, route: &Route) -> Result<(), NetworkError> {
    let what = format!("adding the captured route {route:?}");
    let index = match plan.devices.iter().find(|device| device.name == route.device) {
        Some(device) => device.index,
        None => index_of(&route.device)?,
    };
    match handle.route().add(route_message(route, index)).execute().await {
        Err(rtnetlink::Error::NetlinkError(error))
            if route.kernel && error.raw_code() == -libc::EEXIST =>
        {
            Ok(())
        }
        result => result.map_err(netlink(what)),
    }
}

fn route_message(route: &Route, index: u32) -> RouteMessage {
    let mut builder = RouteMessageBuilder::<IpAddr>::new()
        .output_interface(index)
        .protocol(if route.kernel { RouteProtocol::Kernel } else { RouteProtocol::Boot })
        .kind(if route.local { RouteType::Local } else { RouteType::Unicast })
        .scope(match route.scope {
            Scope::Global => RouteScope::Universe,
            Scope::Link => RouteScope::Link,
            Scope::Host => RouteScope::Host,
        })
        .table_id(route.table);
    if route.metric != 0 {
        builder = builder.priority(route.metric);
    }
    let mut message = builder.build();
    // The builder's own setters can fail for mixed families, which captured routes never are.
    message.header.address_family =
        if route.v6 { AddressFamily::Inet6 } else { AddressFamily::Inet };
    if let Some((address, length)) = route.destination {
        message.header.destination_prefix_length = length;
        message.attributes.push(RouteAttribute::Destination(address.into()));
    }
    message.attributes.extend(route.via.map(|via| RouteAttribute::Gateway(via.into())));
    message.attributes.extend(route.source.map(|source| RouteAttribute::PrefSource(source.into())));
    message
}

/// Makes the policy rules those of the capture, for both families: Cilium sets the same for each,
/// and moves the kernel's rule for the local table behind its own.
async fn set_rules(handle: &Handle, rules: &[Rule]) -> Result<(), NetworkError> {
    // What the kernel sets up by itself in every namespace.
    let kernel = |rule: &Rule| matches!(rule.priority, 0 | 32766 | 32767) && rule.mark.is_none();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        for rule in rules.iter().filter(|rule| !kernel(rule)) {
            let mut request = handle.rule().add();
            *request.message_mut() = rule_message(rule, family);
            let what = format!("adding the captured rule {rule:?}");
            request.execute().await.map_err(netlink(what))?;
        }
        if !rules.is_empty() && !rules.iter().any(|rule| rule.priority == 0) {
            let local = Rule { priority: 0, mark: None, table: TABLE_LOCAL };
            let request = handle.rule().del(rule_message(&local, family));
            request.execute().await.map_err(netlink("removing the rule 0"))?;
        }
    }
    Ok(())
}

fn rule_message(rule: &Rule, family: AddressFamily) -> RuleMessage {
    let mut message = RuleMessage::default();
    message.header = RuleHeader { family, action: RuleAction::ToTable, ..RuleHeader::default() };
    message.attributes.push(RuleAttribute::Priority(rule.priority));
    message.attributes.push(RuleAttribute::Table(rule.table));
    if let Some((mark, mask)) = rule.mark {
        message.attributes.push(RuleAttribute::FwMark(mark));
        message.attributes.push(RuleAttribute::FwMask(mask));
    }
    message
}
