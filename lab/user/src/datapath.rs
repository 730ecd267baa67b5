//! The stand-in datapath: which programs a capture records where, and putting ours there.
//!
//! [`Datapath::of`] reads a capture and touches nothing; [`attach`] does it. The programs are those
//! of `lab/ebpf`, named like Cilium's. Nothing needs a clean-up of its own: links live by their pins
//! in the lab's bpffs, filters by the devices in its namespaces, and cgroup programs by its cgroup.

use std::{
    collections::BTreeSet,
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    path::{Path, PathBuf},
};

use aya::{
    Ebpf, EbpfLoader,
    maps::ProgramArray,
    programs::{Program, ProgramFd},
};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
use serde::Deserialize;

use crate::{
    bpf,
    capture::{Capture, CaptureError},
    cgroup, filter, maps,
    netns::{self, Ns},
    plan::{Device, Kind, Plan},
    state::StateError,
};

const NET: &str = "bpftool-net-show.json";
/// The same in one state of a faults folder.
const NET_OF_STATE: &str = "net-show.json";
const CGROUP: &str = "bpftool-cgroup-tree.json";
const LINKS: &str = "bpftool-link-show.json";
const PROGRAMS: &str = "bpftool-prog-show.json";
const FLAGS: &str = "extra-agent-flags.txt";

/// Names of the programs that are attached to devices.
const DEVICE_PROGRAMS: [&str; 5] =
    ["cil_from_netdev", "cil_to_netdev", "cil_from_host", "cil_to_host", "cil_from_container"];

/// Hooks of a cgroup: name as bpftool prints it, number (`enum bpf_attach_type`), what Cilium calls
/// the program, and the pin of Cilium 1.13 and older.
const HOOKS: [(&str, u32, &str, &str); 11] = [
    ("cgroup_inet4_connect", 10, "cil_sock4_connect", "connect4"),
    ("cgroup_inet6_connect", 11, "cil_sock6_connect", "connect6"),
    ("cgroup_inet4_post_bind", 12, "cil_sock4_post_bind", "post_bind4"),
    ("cgroup_inet6_post_bind", 13, "cil_sock6_post_bind", "post_bind6"),
    ("cgroup_udp4_sendmsg", 14, "cil_sock4_sendmsg", "sendmsg4"),
    ("cgroup_udp6_sendmsg", 15, "cil_sock6_sendmsg", "sendmsg6"),
    ("cgroup_udp4_recvmsg", 19, "cil_sock4_recvmsg", "recvmsg4"),
    ("cgroup_udp6_recvmsg", 20, "cil_sock6_recvmsg", "recvmsg6"),
    ("cgroup_inet4_getpeername", 29, "cil_sock4_getpeername", "getpeername4"),
    ("cgroup_inet6_getpeername", 30, "cil_sock6_getpeername", "getpeername6"),
    ("cgroup_inet_sock_release", 34, "cil_sock_release", "sock_release"),
];

/// `BPF_TCX_INGRESS` and `BPF_TCX_EGRESS`.
const TCX: [u32; 2] = [46, 47];

/// `BPF_XDP`.
const XDP: u32 = 37;

/// The program for it.
const XDP_PROGRAM: &str = "cil_xdp_entry";

/// Where the attached programs find those that they tail-call: as in `lab/ebpf/src/device.rs`.
const CALLS: [(u32, &str); 2] = [(7, "ipv4"), (10, "ipv6")];

/// The stand-in's own table of connections, pinned apart from Cilium's maps.
const FLOWS: &str = "inspector-lab/flows";

/// Maps of the programs, and the names that Cilium has pinned them by, newest first.
const MAPS: [(&str, &[&str]); 26] = [
    ("SERVICES4", &["cilium_lb4_services_v2"]),
    ("SERVICES6", &["cilium_lb6_services_v2"]),
    ("BACKENDS4", &["cilium_lb4_backends_v3", "cilium_lb4_backends_v2"]),
    ("BACKENDS6", &["cilium_lb6_backends_v3", "cilium_lb6_backends_v2"]),
    ("SOURCE_RANGES4", &["cilium_lb4_source_range"]),
    ("SOURCE_RANGES6", &["cilium_lb6_source_range"]),
    ("ENDPOINTS", &["cilium_lxc"]),
    ("RESPONDER4", &["cilium_l2_responder_v4"]),
    ("RESPONDER6", &["cilium_l2_responder_v6"]),
    ("RUNTIME_CONFIG", &["cilium_runtime_config"]),
    ("REVERSE_SK4", &["cilium_lb4_reverse_sk"]),
    ("REVERSE_SK6", &["cilium_lb6_reverse_sk"]),
    ("CT4", &["cilium_ct4_global"]),
    ("CT6", &["cilium_ct6_global"]),
    ("CT_ANY4", &["cilium_ct_any4_global"]),
    ("CT_ANY6", &["cilium_ct_any6_global"]),
    ("SNAT4", &["cilium_snat_v4_external"]),
    ("SNAT6", &["cilium_snat_v6_external"]),
    ("AFFINITY4", &["cilium_lb4_affinity"]),
    ("AFFINITY6", &["cilium_lb6_affinity"]),
    ("AFFINITY_MATCH", &["cilium_lb_affinity_match"]),
    ("MAGLEV4", &["cilium_lb4_maglev"]),
    ("MAGLEV6", &["cilium_lb6_maglev"]),
    ("NEIGHBOURS4", &["cilium_nodeport_neigh4"]),
    ("NEIGHBOURS6", &["cilium_nodeport_neigh6"]),
    ("METRICS", &["cilium_metrics"]),
];

/// Why the datapath of a capture could not be put in place.
#[derive(Debug, thiserror::Error)]
pub enum DatapathError {
    /// A file of the capture could not be read.
    #[error(transparent)]
    Capture(#[from] CaptureError),
    /// A file of the capture is not what bpftool prints.
    #[error("{file}: {source}")]
    Json {
        /// The file.
        file: String,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// The capture says something that the stand-in has nothing for.
    #[error("{file}: {problem}; make the lab without the datapath (`--no-datapath`)")]
    Unknown {
        /// The file.
        file: String,
        /// What it says.
        problem: String,
    },
    /// Something on the machine.
    #[error(transparent)]
    State(#[from] StateError),
    /// The kernel refuses the programs or their maps.
    #[error(
        "loading the stand-in datapath for {what}: {source}; make the lab without it \
         (`--no-datapath`)"
    )]
    Load {
        /// The device, or the sockets.
        what: String,
        /// What aya says of it.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The kernel refuses to attach or pin a program.
    #[error(
        "{call} {object}: {source}; make the lab without the datapath (`--no-datapath`), or take a \
         capture with clsact where the kernel is older than 6.6"
    )]
    Attach {
        /// The call.
        call: &'static str,
        /// The program and where it was to be.
        object: String,
        /// What the kernel said.
        source: std::io::Error,
    },
}

/// What a capture records of its datapath.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Datapath {
    devices: Vec<OnDevice>,
    hooks: Vec<Hook>,
    xdp: Vec<(String, Xdp)>,
    settings: Settings,
}

/// How a program at XDP is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Xdp {
    /// By the kernel itself, for packets that it has made already. Every action works everywhere.
    Generic,
    /// By the device's driver. On a veth device, the other end must be set up for it before a
    /// packet can be sent from there: passing and dropping work, sending back does not.
    Native,
}

impl Xdp {
    /// `XDP_FLAGS_SKB_MODE` or `XDP_FLAGS_DRV_MODE`.
    fn flags(self) -> u32 {
        match self {
            Self::Generic => 1 << 1,
            Self::Native => 1 << 2,
        }
    }
}

/// A program on a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OnDevice {
    /// Interface index in the node.
    pub index: u32,
    /// The program.
    pub program: String,
    /// Whether it sees packets that leave.
    pub egress: bool,
    /// The name of the classic filter that it is attached by; `None` for a tcx link.
    pub filter: Option<String>,
}

/// A program on the cgroup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hook {
    /// Number of the hook in [`HOOKS`].
    hook: usize,
    /// Whether it is attached by a link.
    link: bool,
}

/// What was compiled into the captured datapath.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "they are switches, each by itself")]
struct Settings {
    l7: bool,
    hostns_only: bool,
    reject: bool,
    unreachable: bool,
    metrics_say_where: bool,
}

#[derive(Deserialize)]
struct Net {
    tc: Vec<NetTc>,
}

#[derive(Deserialize)]
struct NetTc {
    devname: String,
    ifindex: u32,
    kind: String,
    name: String,
    #[serde(alias = "prog_id")]
    id: u32,
}

#[derive(Deserialize)]
struct CgroupNode {
    programs: Vec<CgroupProgram>,
}

#[derive(Deserialize)]
struct CgroupProgram {
    attach_type: String,
}

#[derive(Deserialize)]
struct Link {
    r#type: String,
}

#[derive(Deserialize)]
struct KernelProgram {
    id: u32,
    #[serde(default)]
    name: String,
}

fn json<T: for<'a> Deserialize<'a>>(capture: &Capture, file: &str) -> Result<T, DatapathError> {
    serde_json::from_str(&capture.text(file)?)
        .map_err(|source| DatapathError::Json { file: name(capture, file), source })
}

/// A file of the capture, for messages.
fn name(capture: &Capture, file: &str) -> String {
    capture.path().join(file).display().to_string()
}

impl Datapath {
    /// What the capture records; `None` where it says nothing of programs on devices.
    ///
    /// # Errors
    /// [`DatapathError::Capture`], [`DatapathError::Json`], [`DatapathError::Unknown`].
    pub fn of(capture: &Capture) -> Result<Option<Self>, DatapathError> {
        // What a fault did to the programs says more than the capture that completes it.
        let Some(net) = [NET_OF_STATE, NET].into_iter().find(|file| capture.has(file)) else {
            return Ok(None);
        };
        let mut devices = Vec::new();
        for net in json::<Vec<Net>>(capture, net)? {
            for tc in net.tc {
                devices.push(on_device(capture, &tc)?);
            }
        }
        let mut hooks = Vec::new();
        if capture.has(CGROUP) {
            // Before links there was nothing but the attachment itself.
            let link = capture.has(LINKS)
                && json::<Vec<Link>>(capture, LINKS)?.iter().any(|link| link.r#type == "cgroup");
            for node in json::<Vec<CgroupNode>>(capture, CGROUP)? {
                for program in node.programs {
                    let hook = HOOKS.iter().position(|hook| hook.0 == program.attach_type);
                    let hook = hook.ok_or_else(|| DatapathError::Unknown {
                        file: name(capture, CGROUP),
                        problem: format!(
                            "the stand-in has no program for the hook {}",
                            program.attach_type
                        ),
                    })?;
                    hooks.push(Hook { hook, link });
                }
            }
        }
        let flags = if capture.has(FLAGS) { capture.text(FLAGS)? } else { String::new() };
        let flag = |wanted: &str| flags.split_whitespace().any(|flag| flag == wanted);
        let settings = Settings {
            // It needs the proxy and its configuration.
            l7: flag("--enable-envoy-config=true"),
            hostns_only: flag("--bpf-lb-sock-hostns-only=true"),
            // Cilium 1.16 brought this map, and 1.15 the answer to the client.
            reject: capture.map("cilium_node_map_v2").is_some(),
            // 1.16 too.
            metrics_say_where: capture.map("cilium_node_map_v2").is_some(),
            // Both new after 1.19.
            unreachable: capture.map("cilium_devices").is_some(),
        };
        Ok(Some(Self { devices, hooks, xdp: Vec::new(), settings }))
    }

    /// With the program for XDP on `device` too. No capture has one: with it, Cilium's own choice of
    /// devices for XDP is a setting.
    pub fn set_xdp(&mut self, device: &str, mode: Xdp) {
        self.xdp.push((device.to_owned(), mode));
    }

    /// The programs on devices.
    #[must_use]
    pub fn devices(&self) -> &[OnDevice] {
        &self.devices
    }

    /// The programs on the cgroup: name of the hook as bpftool prints it, name of the program.
    pub fn hooks(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        self.hooks.iter().map(|hook| (HOOKS[hook.hook].0, HOOKS[hook.hook].2))
    }

    /// Whether a pod's device does load balancing for each packet, because sockets in pods do not.
    fn per_packet(&self) -> bool {
        self.settings.l7 || self.settings.hostns_only
    }
}

/// Addresses of services in the node's LAN for which the capture has no L2 responder: it is older
/// than the responder, or than the one for IPv6. Clients reached them by a route.
#[must_use]
pub fn unannounced(capture: &Capture) -> Vec<IpAddr> {
    let mut found = BTreeSet::new();
    let families = [
        ("cilium_lb4_services_v2", "cilium_l2_responder_v4"),
        ("cilium_lb6_services_v2", "cilium_l2_responder_v6"),
    ];
    for (services, responder) in families {
        if capture.map(responder).is_some() {
            continue;
        }
        for entry in capture.map(services).map_or(&[][..], |map| &map.entries) {
            // The key begins with the address; four or sixteen bytes, by the map's key size.
            let address = match entry.key.len() {
                12 => entry.key.first_chunk::<4>().map(|bytes| IpAddr::from(*bytes)),
                24 => entry.key.first_chunk::<16>().map(|bytes| IpAddr::from(*bytes)),
                _ => None,
            };
            found.extend(address.filter(|address| match address {
                IpAddr::V4(v4) => v4.octets()[..3] == [192, 168, 2] && v4.octets()[3] != 10,
                IpAddr::V6(v6) => v6.segments()[..2] == [0xfd00, 2] && v6.segments()[7] != 0x10,
            }));
        }
    }
    found.into_iter().collect()
}

fn on_device(capture: &Capture, tc: &NetTc) -> Result<OnDevice, DatapathError> {
    let unknown = |problem: String| DatapathError::Unknown { file: name(capture, NET), problem };
    let (kind, direction) = tc.kind.split_once('/').unwrap_or((&tc.kind, ""));
    let egress = match direction {
        "ingress" => false,
        "egress" => true,
        _ => return Err(unknown(format!("`{}` on {} is no direction", tc.kind, tc.devname))),
    };
    let filter = match kind {
        "tcx" => None,
        "clsact" => Some(tc.name.clone()),
        _ => {
            return Err(unknown(format!(
                "the stand-in cannot be attached as `{kind}` to {}",
                tc.devname
            )));
        }
    };
    // A filter is named after program and device, or, by 1.13, after the device alone: then the
    // kernel's name of the program says it, of which 15 bytes are left.
    let mut found =
        tc.name.strip_suffix(&format!("-{}", tc.devname)).unwrap_or(&tc.name).to_owned();
    if found == "cilium" {
        let programs: Vec<KernelProgram> = json(capture, PROGRAMS)?;
        let program = programs.into_iter().find(|program| program.id == tc.id);
        found = program.map(|program| program.name).unwrap_or_default();
    }
    let program = DEVICE_PROGRAMS
        .into_iter()
        .find(|program| *program == found || (found.len() == 15 && program.starts_with(&found)))
        .ok_or_else(|| {
            unknown(format!("the stand-in has no program for `{}` on {}", tc.name, tc.devname))
        })?;
    Ok(OnDevice { index: tc.ifindex, program: program.to_owned(), egress, filter })
}

/// Loads the programs and attaches them in the lab `lab` as `datapath` says; `step` is called
/// before each part and keeps a signal from falling into it.
///
/// # Errors
/// [`DatapathError`]; what was attached until then stays.
pub fn attach<G>(
    lab: &str,
    bpffs: &Path,
    plan: &Plan,
    datapath: &Datapath,
    step: impl Fn() -> G + Sync,
) -> Result<(), DatapathError> {
    let node = crate::state::open_file(&netns::path(lab, Ns::Node))?;
    {
        let _step = step();
        let folder = bpffs.join(FLOWS);
        let folder = folder.parent().unwrap_or(bpffs);
        make_folder(folder)?;
    }
    netns::run_in(&node, || {
        let cookie = netns_cookie()?;
        for device in &plan.devices {
            let programs: Vec<&OnDevice> =
                datapath.devices.iter().filter(|on| on.index == device.index).collect();
            let xdp = datapath.xdp.iter().find(|(name, _)| *name == device.name);
            if programs.is_empty() && xdp.is_none() {
                continue;
            }
            let _step = step();
            attach_device(bpffs, plan, datapath, device, &programs, xdp.map(|(_, mode)| *mode))?;
        }
        if datapath.hooks.is_empty() {
            return Ok(());
        }
        let _step = step();
        attach_sockets(lab, bpffs, datapath, cookie)
    })
}

fn make_folder(path: &Path) -> Result<(), DatapathError> {
    fs::create_dir_all(path).map_err(|source| DatapathError::Attach {
        call: "mkdir",
        object: path.display().to_string(),
        source,
    })
}

/// The cookie of this thread's network namespace, by which programs know it.
fn netns_cookie() -> Result<u64, DatapathError> {
    /// `SO_NETNS_COOKIE`, Linux 5.14.
    const SO_NETNS_COOKIE: libc::c_int = 71;
    let failed = |source| DatapathError::Attach {
        call: "getsockopt",
        object: "SO_NETNS_COOKIE (Linux 5.14)".into(),
        source,
    };
    let socket = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)
        .map_err(|errno| failed(errno.into()))?;
    let mut cookie = 0_u64;
    let mut size: libc::socklen_t = 8;
    // SAFETY: the kernel writes at most `size` bytes, the size of `cookie`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut size,
        )
    };
    if result < 0 { Err(failed(std::io::Error::last_os_error())) } else { Ok(cookie) }
}

/// A number as the programs' read-only data holds it.
fn number(number: u32) -> Vec<u8> {
    number.to_ne_bytes().to_vec()
}

/// A loader that gives the programs the pinned maps. What the capture lacks is an empty map of the
/// stand-in's own.
struct Loader {
    what: String,
    globals: PathBuf,
    flows: PathBuf,
}

impl Loader {
    fn new(bpffs: &Path, what: &str) -> Self {
        Self { what: what.into(), globals: maps::globals(bpffs), flows: bpffs.join(FLOWS) }
    }

    fn failed(&self, source: impl std::error::Error + Send + Sync + 'static) -> DatapathError {
        DatapathError::Load { what: self.what.clone(), source: Box::new(source) }
    }

    fn load(
        &self,
        calls: Option<&Path>,
        constants: &[(&str, Vec<u8>)],
    ) -> Result<Ebpf, DatapathError> {
        let object = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/inspector-lab-ebpf"));
        let mut loader = EbpfLoader::new();
        loader.map_pin_path("FLOWS", self.flows.as_path());
        if let Some(calls) = calls {
            loader.map_pin_path("CALLS", calls);
        }
        for (map, names) in MAPS {
            let pin = names.iter().map(|name| self.globals.join(name)).find(|pin| pin.exists());
            if let Some(pin) = pin {
                loader.map_pin_path(map, pin);
            }
        }
        for (name, value) in constants {
            loader.override_global(name, &value[..], true);
        }
        loader.load(object).map_err(|error| self.failed(error))
    }

    /// Loads one program into the kernel.
    fn program<'a>(&self, ebpf: &'a mut Ebpf, name: &str) -> Result<&'a ProgramFd, DatapathError> {
        let missing = || std::io::Error::other(format!("there is no program {name}"));
        let program = ebpf.program_mut(name).ok_or_else(|| self.failed(missing()))?;
        match program {
            Program::SchedClassifier(program) => program.load(),
            Program::CgroupSockAddr(program) => program.load(),
            Program::CgroupSock(program) => program.load(),
            Program::Xdp(program) => program.load(),
            _ => return Err(self.failed(missing())),
        }
        .map_err(|error| self.failed(error))?;
        let program = ebpf.program(name).ok_or_else(|| self.failed(missing()))?;
        program.fd().map_err(|error| self.failed(error))
    }
}

/// The node's first address of a family on a device that reaches the LAN: what connections to
/// backends elsewhere come from.
fn nat_addresses(plan: &Plan) -> (Ipv4Addr, Ipv6Addr) {
    let lan = plan.devices.iter().filter(|device| matches!(device.kind, Kind::Lan(_)));
    let mut addresses = (Ipv4Addr::UNSPECIFIED, Ipv6Addr::UNSPECIFIED);
    for own in lan.flat_map(|device| &device.addresses) {
        match own.ip {
            IpAddr::V4(ip) if addresses.0.is_unspecified() => addresses.0 = ip,
            IpAddr::V6(ip) if addresses.1.is_unspecified() && !ip.is_unicast_link_local() => {
                addresses.1 = ip;
            }
            _ => {}
        }
    }
    addresses
}

fn attach_device(
    bpffs: &Path,
    plan: &Plan,
    datapath: &Datapath,
    device: &Device,
    programs: &[&OnDevice],
    xdp: Option<Xdp>,
) -> Result<(), DatapathError> {
    let loader = Loader::new(bpffs, &device.name);
    let endpoint = match device.kind {
        Kind::Pod(_) => Some(endpoint_id(bpffs, device.index)?),
        _ => None,
    };
    let outside = matches!(device.kind, Kind::Lan(_) | Kind::Tun | Kind::WireGuard);
    let calls = match endpoint {
        Some(id) => Some(format!("cilium_calls_{id:05}")),
        None if outside => Some(format!("cilium_calls_netdev_{:05}", device.index)),
        None => None,
    };
    let calls = calls.map(|name| loader.globals.join(name));

    let mut mac = [0; 8];
    mac[..6].copy_from_slice(&device.mac.unwrap_or_default());
    let (nat4, nat6) = nat_addresses(plan);
    let nat6 = nat6.octets();
    let (high, low) = nat6.split_at(8);
    // One identity for all the world until one for each IP version came.
    let (world4, world6) = if datapath.settings.metrics_say_where { (9, 10) } else { (2, 2) };
    let constants = [
        ("eth_header_length", number(if device.mac.is_some() { 14 } else { 0 })),
        ("interface_mac", mac.to_vec()),
        ("nat_ipv4", nat4.octets().to_vec()),
        ("nat_ipv6_high", high.to_vec()),
        ("nat_ipv6_low", low.to_vec()),
        ("enable_l7_lb", number(datapath.settings.l7.into())),
        ("enable_reject", number(datapath.settings.reject.into())),
        ("world_ipv4", number(world4)),
        ("world_ipv6", number(world6)),
        ("metrics_say_where", number(datapath.settings.metrics_say_where.into())),
        ("maglev4_size", number(maglev_size(&loader, "cilium_lb4_maglev")?)),
        ("maglev6_size", number(maglev_size(&loader, "cilium_lb6_maglev")?)),
    ];
    let mut ebpf = loader.load(calls.as_deref(), &constants)?;

    // Programs refer to their maps by descriptor until they are loaded: it must stay.
    let map = ebpf.take_map("CALLS").unwrap_or_else(|| unreachable!("the object has CALLS"));
    let mut array = ProgramArray::try_from(map).map_err(|error| loader.failed(error))?;
    if calls.is_some() {
        for (index, family) in CALLS {
            let program = match endpoint {
                Some(_) if datapath.per_packet() => format!("tail_per_packet_lb_{family}"),
                Some(_) => format!("tail_handle_{family}"),
                None => format!("tail_handle_{family}_from_netdev"),
            };
            let fd = loader.program(&mut ebpf, &program)?;
            array.set(index, fd, 0).map_err(|error| loader.failed(error))?;
        }
    }
    if let Some(mode) = xdp {
        let fd = loader.program(&mut ebpf, XDP_PROGRAM)?.as_fd();
        let folder = device.name.replace('.', "-");
        let pin = bpffs.join(format!("cilium/devices/{folder}/links")).join(XDP_PROGRAM);
        let object = format!("{XDP_PROGRAM} on {}", device.name);
        link(fd, device.index, (XDP, mode.flags()), object, &pin)?;
    }
    for on in programs {
        let fd = loader.program(&mut ebpf, &on.program)?.as_fd();
        match &on.filter {
            None => {
                let links = if let Some(id) = endpoint {
                    bpffs.join(format!("cilium/endpoints/{id}/links"))
                } else {
                    // Cilium replaces dots too.
                    let folder = device.name.replace('.', "-");
                    bpffs.join(format!("cilium/devices/{folder}/links"))
                };
                let target = device.index;
                let object = format!("{} on {}", on.program, device.name);
                let kind = (TCX[usize::from(on.egress)], 0);
                link(fd, target, kind, object, &links.join(&on.program))?;
            }
            Some(filter) => {
                filter::attach(device.index, on.egress, filter, fd).map_err(|source| {
                    DatapathError::Attach {
                        call: "attaching the filter",
                        object: format!("{filter} to {}", device.name),
                        source,
                    }
                })?;
            }
        }
    }
    Ok(())
}

/// How many ids the tables of a Maglev map have; 0 where that map is not pinned.
fn maglev_size(loader: &Loader, name: &str) -> Result<u32, DatapathError> {
    let pin = loader.globals.join(name);
    if !pin.exists() {
        return Ok(0);
    }
    let size = maps::MapHandle::open(&pin).and_then(|map| maps::maglev_table_size(&map));
    size.map_err(|error| loader.failed(error))
}

/// Attaches a program by a link, and pins the link.
fn link(
    program: BorrowedFd<'_>,
    target: u32,
    (kind, flags): (u32, u32),
    object: String,
    pin: &Path,
) -> Result<(), DatapathError> {
    let link = bpf::link_create(program, target, kind, flags)
        .map_err(|source| DatapathError::Attach { call: "BPF_LINK_CREATE", object, source })?;
    if let Some(folder) = pin.parent() {
        make_folder(folder)?;
    }
    bpf::pin(link.as_fd(), pin).map_err(|source| DatapathError::Attach {
        call: "BPF_OBJ_PIN",
        object: pin.display().to_string(),
        source,
    })
}

/// Cilium's number of the endpoint behind a device: `cilium_lxc` holds it (u16 at 6) beside the
/// interface index (u32 at 0).
fn endpoint_id(bpffs: &Path, index: u32) -> Result<u16, DatapathError> {
    let pin = maps::globals(bpffs).join("cilium_lxc");
    let failed = |source: std::io::Error| DatapathError::Attach {
        call: "reading",
        object: pin.display().to_string(),
        source,
    };
    let map = maps::MapHandle::open(&pin).map_err(|error| failed(std::io::Error::other(error)))?;
    let entries = map.entries().map_err(|error| failed(std::io::Error::other(error)))?;
    entries
        .iter()
        .find_map(|entry| {
            let value = entry.value.first_chunk::<8>()?;
            let (device, id) = (&value[..4], [value[6], value[7]]);
            (device == index.to_le_bytes()).then(|| u16::from_le_bytes(id))
        })
        .ok_or_else(|| failed(std::io::Error::other(format!("no endpoint at the device {index}"))))
}

fn attach_sockets(
    lab: &str,
    bpffs: &Path,
    datapath: &Datapath,
    cookie: u64,
) -> Result<(), DatapathError> {
    /// The kernel's `EHOSTUNREACH`, on all architectures that the lab runs on.
    const UNREACHABLE: u32 = libc::EHOSTUNREACH.cast_unsigned();
    let cgroup = cgroup::open(&cgroup::create(lab)?)?;
    let loader = Loader::new(bpffs, "sockets");
    let errno = if datapath.settings.unreachable { UNREACHABLE } else { 0 };
    let constants = [
        ("host_netns_cookie", cookie.to_ne_bytes().to_vec()),
        ("enable_l7_lb", number(datapath.settings.l7.into())),
        ("sock_hostns_only", number(datapath.settings.hostns_only.into())),
        ("no_backend_errno", number(errno)),
    ];
    let mut ebpf = loader.load(None, &constants)?;
    for hook in &datapath.hooks {
        let (_, kind, program, old_pin) = HOOKS[hook.hook];
        let fd = loader.program(&mut ebpf, program)?.as_fd();
        let object = format!("{program} on the lab's cgroup");
        if hook.link {
            let pin = bpffs.join("cilium/socketlb/links/cgroup").join(program);
            let target = cgroup.as_raw_fd().cast_unsigned();
            link(fd, target, (kind, 0), object, &pin)?;
        } else {
            bpf::prog_attach(fd, cgroup.as_fd(), kind).map_err(|source| DatapathError::Attach {
                call: "BPF_PROG_ATTACH",
                object,
                source,
            })?;
            let pin = loader.globals.join(format!("cilium_cgroups_{old_pin}"));
            bpf::pin(fd, &pin).map_err(|source| DatapathError::Attach {
                call: "BPF_OBJ_PIN",
                object: pin.display().to_string(),
                source,
            })?;
        }
    }
    Ok(())
}
