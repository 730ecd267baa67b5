//! Observers: what is attached to the kernel to see packets go by, and the stream of
//! [`Sighting`]s that it makes.
//!
//! A [`Plan`] says what matters; [`Observers::start`] attaches what this kernel allows, says what it
//! does not ([`TierStatus`]), and returns when every hook is live. Whatever does not match the plan
//! is passed over in the kernel, before anything is written.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use aya::maps::{Array, HashMap, Map, MapData, MapError, PerCpuArray, RingBuf};
use aya::programs::tc::TcAttachOptions;
use aya::programs::{
    KProbe, LinkOrder, Program, ProgramError, RawTracePoint, SchedClassifier, TcAttachType,
};
use aya::{Ebpf, EbpfLoader};
use inspector_common::observe::{
    Address, Count, Endpoint, Event, SIEVE_WORDS, Settings, name, role, slot,
};
use zerocopy::FromBytes as _;

use super::TraceError;
use super::clsact::{self, Clsact};
use super::decode::{self, HOOKS, TIERS, Undecoded};
use super::device::{Device, LinkLayer};
use super::neighbours::Neighbours;
use super::offsets::{self, Kernel};
use super::program::{self, Programs};
use super::sighting::{Hook, Sighting, Tier};
use crate::sys::bpf;
use crate::sys::tc::Direction;

/// Size of the ring buffer for events unless told otherwise, bytes: some 30,000 events.
pub const RING_BYTES: u32 = 8 << 20;

/// What is to be observed, in the network namespace of the thread that starts it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// VIPs, control addresses and others of which every packet to or from matters, and every
    /// look-up as a neighbour.
    pub addresses: Vec<Watched>,
    /// Backends: packets to them are translated ones, packets from them are replies.
    pub backends: Vec<Backend>,
    /// Addresses that matter as neighbours alone: next hops.
    pub next_hops: Vec<IpAddr>,
    /// If not empty: packets matter only if their other address is one of these. (Where the node
    /// puts its own address in the place of the client's, that one has to be here too.)
    pub clients: Vec<IpAddr>,
    /// Names of the devices at whose ingress tc is to watch: where packets arrive, and the pods'
    /// devices for their replies.
    pub ingress: Vec<String>,
    /// Names of the devices at whose egress tc is to watch: where the packet, its reply, or a
    /// question for a neighbour can leave.
    pub egress: Vec<String>,
    /// The kinds of observers wanted.
    pub tiers: BTreeSet<Tier>,
    /// How the tc tier is attached.
    pub chain: Chain,
    /// Names of tracepoints and functions of the kernel that are not to be touched. Another
    /// function takes the place of one where there is another.
    pub avoid: BTreeSet<String>,
    /// Whether sightings keep the bytes of the headers, as captures want them.
    pub headers: bool,
    /// Size of the ring buffer for events, bytes, rounded up to a power of two of pages.
    pub ring_bytes: u32,
}

/// An address of which packets matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Watched {
    /// The address.
    pub address: IpAddr,
    /// Only packets to or from this port and transport protocol; nothing for all.
    pub port: Option<(u16, u8)>,
}

/// A backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Backend {
    /// Its address.
    pub address: IpAddr,
    /// Its port.
    pub port: u16,
    /// Number of the transport protocol.
    pub protocol: u8,
}

/// How the tc tier is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Chain {
    /// tcx, first in the chain; clsact where the kernel has no tcx (before Linux 6.6).
    #[default]
    Newest,
    /// clsact, in front of Cilium's filter of the same priority, also where there is tcx. A clsact
    /// qdisc is added where there is none, and taken away again if nothing else is in it.
    Clsact,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            addresses: Vec::new(),
            backends: Vec::new(),
            next_hops: Vec::new(),
            clients: Vec::new(),
            ingress: Vec::new(),
            egress: Vec::new(),
            tiers: [Tier::Tc, Tier::Netlink, Tier::Tracepoint, Tier::Kprobe, Tier::Program].into(),
            chain: Chain::default(),
            avoid: BTreeSet::new(),
            headers: false,
            ring_bytes: RING_BYTES,
        }
    }
}

/// What could be attached of one tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierStatus {
    /// The tier.
    pub tier: Tier,
    /// The hooks of which everything is reported, each with the indexes of its devices, or nothing
    /// for every device of the network namespace. A hook that is attached for one address family
    /// alone is not among them: its silence proves nothing.
    pub hooks: Vec<(Hook, Option<Vec<u32>>)>,
    /// What is attached: `eno1 ingress (tcx)`, `neigh_create`, ….
    pub attached: Vec<String>,
    /// What is not, though the tier has it: the hook and the reason.
    pub missing: Vec<(String, String)>,
    /// Why nothing of the tier is attached, in one sentence; none if something is.
    pub reason: Option<String>,
}

/// What one hook has counted since it was attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HookCount {
    /// The tier.
    pub tier: Tier,
    /// The hook.
    pub hook: Hook,
    /// What matched, lost ones included.
    pub matched: u64,
    /// What matched and was lost, because the ring buffer (or the netlink socket) was full.
    pub lost: u64,
}

/// Why something of [`Plan::avoid`] is not attached.
const AVOIDED: &str = "it is to be left alone";

const RESETS: &str = "tcp_send_reset";
/// What [`RESETS`] tells on kernels before Linux 6.10.
const RESETS_OF_SOCKETS: &str = "before Linux 6.10: not of closed ports";

/// Tells of IPv4 alone.
const ICMP_ERRORS: &str = "icmp_send";

/// Tracepoints, what their programs have to know of the kernel, and the hook that each is.
const TRACEPOINTS: [(&str, Needs, Hook); 13] = [
    ("neigh_create", Needs::Base, Hook::NeighCreate),
    ("neigh_event_send_done", Needs::Base, Hook::NeighResolve),
    ("neigh_event_send_dead", Needs::Base, Hook::NeighDead),
    ("neigh_update", Needs::Base, Hook::NeighUpdate),
    ("neigh_timer_handler", Needs::Base, Hook::NeighUpdate),
    ("fib_table_lookup", Needs::Fib4, Hook::Route),
    ("fib6_table_lookup", Needs::Fib6, Hook::Route),
    ("netif_receive_skb", Needs::Base, Hook::Receive),
    ("net_dev_queue", Needs::Base, Hook::Queue),
    ("net_dev_start_xmit", Needs::Base, Hook::Transmit),
    ("kfree_skb", Needs::Base, Hook::Drop),
    (RESETS, Needs::Base, Hook::TcpReset),
    (ICMP_ERRORS, Needs::Base, Hook::IcmpSend),
];

/// What a tracepoint's program has to know of the kernel.
#[derive(Debug, Clone, Copy)]
enum Needs {
    Base,
    Fib4,
    Fib6,
}

/// Where the kernel says how kprobes are asked for.
const KPROBES: &str = "/sys/bus/event_source/devices/kprobe/type";

/// One thing to be seen by a kprobe: functions, of which the first that can be probed is taken, with
/// their programs; and the tracepoint that says it better, where that is attached.
struct Probe {
    hook: Hook,
    functions: &'static [(&'static str, &'static str)],
    unless: Option<&'static str>,
}

const fn probe(hook: Hook, functions: &'static [(&'static str, &'static str)]) -> Probe {
    Probe { hook, functions, unless: None }
}

const fn unless(
    tracepoint: &'static str,
    hook: Hook,
    functions: &'static [(&'static str, &'static str)],
) -> Probe {
    Probe { hook, functions, unless: Some(tracepoint) }
}

/// The later ones of a line are next to the first in the path of calls.
const PROBES: [Probe; 16] = [
    unless("neigh_create", Hook::NeighCreate, &[("__neigh_create", "kp_neigh_create")]),
    probe(
        Hook::NeighResolve,
        &[("__neigh_event_send", "kp_neigh_resolve"), ("neigh_resolve_output", "kp_neigh_resolve")],
    ),
    probe(Hook::NeighSolicit, &[("arp_solicit", "kp_neigh_solicit")]),
    probe(Hook::NeighSolicit, &[("ndisc_solicit", "kp_neigh_solicit")]),
    // No others: `ip_rcv_finish` and IPv6's twin can be probed, but are inlined where it matters.
    probe(Hook::Route, &[("ip_route_input_noref", "kp_route")]),
    probe(Hook::Route, &[("ip6_route_input", "kp_route")]),
    probe(
        Hook::LocalDeliver,
        &[
            ("ip_local_deliver", "kp_local_deliver"),
            ("ip_local_deliver_finish", "kp_local_deliver_2"),
        ],
    ),
    probe(
        Hook::LocalDeliver,
        &[("ip6_input", "kp_local_deliver"), ("ip6_protocol_deliver_rcu", "kp_local_deliver_1")],
    ),
    probe(Hook::Forward, &[("ip_forward", "kp_forward")]),
    probe(Hook::Forward, &[("ip6_forward", "kp_forward")]),
    unless("net_dev_queue", Hook::Queue, &[("__dev_queue_xmit", "kp_queue")]),
    unless("net_dev_start_xmit", Hook::Transmit, &[("dev_hard_start_xmit", "kp_transmit")]),
    unless(RESETS, Hook::TcpReset, &[("tcp_v4_send_reset", "kp_tcp_reset")]),
    unless(RESETS, Hook::TcpReset, &[("tcp_v6_send_reset", "kp_tcp_reset")]),
    unless("icmp_send", Hook::IcmpSend, &[("__icmp_send", "kp_icmp_send")]),
    probe(Hook::IcmpSend, &[("icmp6_send", "kp_icmp_send")]),
];

/// Everything that is attached. Dropping it detaches all; so does the end of the process.
pub struct Observers {
    /// Before the programs go: the filters that hold them.
    clsact: Option<Clsact>,
    /// Holds programs and links.
    _ebpf: Ebpf,
    counts: PerCpuArray<MapData, Count>,
    events: RingBuf<MapData>,
    neighbours: Option<Neighbours>,
    programs: Option<Programs>,
    /// Names of the reasons of drops, where they are known.
    reasons: Option<&'static BTreeMap<u32, String>>,
    status: Vec<TierStatus>,
    /// Whether sightings keep the bytes of the headers.
    headers: bool,
    malformed: u64,
}

impl Observers {
    /// Attaches what the plan wants and the kernel allows. When it returns, all of that is live.
    ///
    /// What the kernel refuses is no error but a reason in [`status`](Self::status).
    ///
    /// # Errors
    /// [`TraceError`] if a device of the plan does not exist, or our own programs and maps cannot be
    /// loaded at all (mostly for want of privilege).
    pub fn start(plan: &Plan) -> Result<Self, TraceError> {
        let mut wanted: Vec<(String, Device, Direction)> = Vec::new();
        for (names, direction) in
            [(&plan.ingress, Direction::Ingress), (&plan.egress, Direction::Egress)]
        {
            for name in names {
                let device = Device::by_name(name)?;
                if !wanted.iter().any(|one| one.1 == device && one.2 == direction) {
                    wanted.push((name.clone(), device, direction));
                }
            }
        }
        let wants = |tier| plan.tiers.contains(&tier);
        // First of all, so that the guard does not hold our maps open.
        let clsact = if wants(Tier::Tc)
            && !wanted.is_empty()
            && (plan.chain == Chain::Clsact || !has_tcx(&wanted[0].0))
        {
            let devices: Vec<_> = wanted.iter().map(|one| (one.1, one.2)).collect();
            Some(Clsact::prepare(&devices).map_err(|failed| unprepared(failed, &wanted))?)
        } else {
            None
        };

        let reads = [Tier::Tracepoint, Tier::Kprobe, Tier::Program];
        let is_read = reads.into_iter().any(wants);
        let mut loader = loader(is_read);
        let kernel = is_read.then(offsets::kernel);
        let settings = Settings {
            netns: netns().map_err(TraceError::Netns)?,
            has_clients: u32::from(!plan.clients.is_empty()),
            offsets: kernel.map(|kernel| kernel.offsets).unwrap_or_default(),
        };
        let object = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/inspector-ebpf"));
        let mut ebpf = loader
            .btf(None)
            .map_max_entries(name::EVENTS, plan.ring_bytes)
            .override_global(name::SETTINGS, &settings, true)
            .load(object)
            .map_err(|error| TraceError::Load(Box::new(error)))?;
        fill(&mut ebpf, plan)?;

        let names = programs(plan, &wanted, kernel);
        let (mut classifiers, others): (BTreeMap<&str, &mut Program>, BTreeMap<_, _>) = ebpf
            .programs_mut()
            .filter(|(name, _)| names.contains(*name))
            .partition(|(_, program)| matches!(program, Program::SchedClassifier(_)));
        preload(classifiers.values_mut().map(|program| &mut **program).collect());
        let mut status = Vec::new();
        thread::scope(|scope| {
            // To attach to a device is to wait, one after the other, until whatever runs in the
            // kernel now has come to an end: the others are loaded meanwhile.
            let load = move || preload(others.into_values().collect());
            let _ = thread::Builder::new().spawn_scoped(scope, load);
            if wants(Tier::Tc) {
                status.push(attach_tc(&mut classifiers, &wanted, clsact.as_ref()));
            }
        });
        let mut neighbours = None;
        if wants(Tier::Netlink) {
            let (socket, found) = listen(plan);
            neighbours = socket;
            status.push(found);
        }
        let mut traced = Vec::new();
        if wants(Tier::Tracepoint) {
            let found = attach_tracepoints(&mut ebpf, kernel, &plan.avoid);
            traced.clone_from(&found.attached);
            status.push(found);
        }
        if wants(Tier::Kprobe) {
            status.push(attach_kprobes(&mut ebpf, kernel, &traced, &plan.avoid));
        }
        let mut programs = None;
        if wants(Tier::Program)
            && let Some(kernel) = kernel
        {
            let devices = wanted.iter().filter(|one| one.2 == Direction::Ingress);
            let devices = devices.map(|one| (one.0.clone(), one.1.ifindex)).collect();
            let found = Programs::start(&ebpf, object, kernel, settings.netns, devices);
            status.push(found.status());
            programs = Some(found);
        }
        Ok(Self {
            clsact,
            counts: take(&mut ebpf, name::COUNTS)?,
            events: take(&mut ebpf, name::EVENTS)?,
            _ebpf: ebpf,
            neighbours,
            programs,
            reasons: kernel.map(|kernel| &kernel.reasons),
            status,
            headers: plan.headers,
            malformed: 0,
        })
    }

    /// What is attached and what is not, tier by tier.
    #[must_use]
    pub fn status(&self) -> &[TierStatus] {
        &self.status
    }

    /// The next sighting that has not been read, if there is one; it does not wait. They come in the
    /// order in which the kernel reported them, which is nearly that of time: two CPUs may be a few
    /// microseconds apart, and netlink comes late.
    ///
    /// # Errors
    /// [`TraceError::Mismatch`] if an event is not what it should be, [`TraceError::Netlink`] if the
    /// kernel refuses to hand out notifications.
    #[expect(clippy::should_implement_trait, reason = "an iterator would end where this waits")]
    pub fn next(&mut self) -> Result<Option<Sighting>, TraceError> {
        while let Some(item) = self.events.next() {
            let event = Event::read_from_bytes(&item)
                .map_err(|_| TraceError::Mismatch(format!("an event of {} bytes", item.len())))?;
            match decode::sighting(&event, self.reasons, |id| self.programs.as_ref()?.named(id)) {
                Ok(sighting) => {
                    let headers = self.headers.then(|| decode::headers(&event)).flatten();
                    return Ok(Some(Sighting { headers, ..sighting }));
                }
                Err(Undecoded::Malformed) => self.malformed += 1,
                Err(Undecoded::Unknown) => {
                    return Err(TraceError::Mismatch(format!(
                        "an event of tier {} and hook {}",
                        event.tier, event.hook
                    )));
                }
            }
        }
        let next = match &mut self.neighbours {
            Some(neighbours) => neighbours.next().map_err(TraceError::Netlink)?,
            None => None,
        };
        if next.is_none() {
            self.follow();
        }
        Ok(next)
    }

    /// Traces the programs that have taken the place of others meanwhile.
    fn follow(&mut self) {
        if let Some(programs) = &mut self.programs
            && programs.follow()
            && let Some(status) = self.status.iter_mut().find(|one| one.tier == Tier::Program)
        {
            *status = programs.status();
        }
    }

    /// Waits until there is something to be read by [`next`](Self::next), at most for `timeout`;
    /// `false` if the time is over. A signal ends the wait early, as if the time were over.
    ///
    /// # Errors
    /// [`TraceError::Wait`] if the kernel refuses to wait.
    pub fn wait(&self, timeout: Duration) -> Result<bool, TraceError> {
        let poll = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // One that is negative is passed over.
        let netlink = self.neighbours.as_ref().map_or(-1, Neighbours::fd);
        let mut fds = [poll(self.events.as_fd().as_raw_fd()), poll(netlink)];
        // Rounded up: a wait of 0.5 ms must not become a busy loop.
        let millis = i32::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX);
        // SAFETY: fds points to two pollfd, whose descriptors live as long as self.
        let ready = unsafe { libc::poll(fds.as_mut_ptr(), 2, millis) };
        if ready >= 0 {
            return Ok(ready > 0);
        }
        match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::Interrupted => Ok(false),
            error => Err(TraceError::Wait(error)),
        }
    }

    /// What each hook has counted, in the order of tiers and hooks; hooks at which nothing matched
    /// are left out.
    ///
    /// # Errors
    /// [`TraceError::Map`] if the kernel refuses to read the map.
    pub fn counts(&self) -> Result<Vec<HookCount>, TraceError> {
        let mut all = Vec::new();
        for (tier_number, tier) in TIERS {
            for (hook_number, hook) in HOOKS {
                let slot = slot(tier_number, hook_number);
                let per_cpu = self.counts.get(&slot, 0).map_err(in_map(name::COUNTS))?;
                let matched = per_cpu.iter().map(|count| count.matched).sum();
                let lost = per_cpu.iter().map(|count| count.lost).sum();
                if matched > 0 {
                    all.push(HookCount { tier, hook, matched, lost });
                }
            }
        }
        if let Some(Neighbours { matched, lost, .. }) = self.neighbours
            && matched > 0
        {
            all.push(HookCount { tier: Tier::Netlink, hook: Hook::NeighUpdate, matched, lost });
        }
        all.sort_by_key(|count| (count.tier, count.hook));
        Ok(all)
    }

    /// Packets that matched and have been read, but whose headers contradict themselves: they are
    /// no sightings.
    #[must_use]
    pub fn malformed(&self) -> u64 {
        self.malformed
    }
}

impl Drop for Observers {
    fn drop(&mut self) {
        // The filters hold the programs: they go first, in whatever order the fields stand.
        self.clsact = None;
    }
}

impl fmt::Debug for Observers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observers").field("status", &self.status).finish_non_exhaustive()
    }
}

/// Inode number of this thread's network namespace, by which the kernel's structures name it.
pub(super) fn netns() -> io::Result<u32> {
    use std::os::unix::fs::MetadataExt as _;
    let inode = std::fs::metadata("/proc/thread-self/ns/net")?.ino();
    u32::try_from(inode).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Whether the kernel has tcx. One that has not does not know the question; that it refuses to answer
/// is a matter of privilege.
fn has_tcx(device: &str) -> bool {
    match SchedClassifier::query_tcx(device, TcAttachType::Ingress) {
        Ok(_) => true,
        Err(error) => errno(&error) == Some(libc::EPERM),
    }
}

/// Writes what is watched into the maps.
fn fill(ebpf: &mut Ebpf, plan: &Plan) -> Result<(), TraceError> {
    let mut roles: BTreeMap<IpAddr, u32> = BTreeMap::new();
    let mut ports: BTreeSet<(IpAddr, u16, u8)> = BTreeSet::new();
    for watched in &plan.addresses {
        let role = if let Some((port, protocol)) = watched.port {
            ports.insert((watched.address, port, protocol));
            role::SOME_PORTS
        } else {
            role::ANY_PORT
        };
        *roles.entry(watched.address).or_default() |= role | role::NEIGHBOUR;
    }
    for backend in &plan.backends {
        ports.insert((backend.address, backend.port, backend.protocol));
        *roles.entry(backend.address).or_default() |= role::SOME_PORTS | role::NEIGHBOUR;
    }
    for next_hop in &plan.next_hops {
        *roles.entry(*next_hop).or_default() |= role::NEIGHBOUR;
    }

    // Borrowed: programs that are loaded later want the maps open.
    let mut addresses: HashMap<_, Address, u32> = borrow(ebpf, name::ADDRESSES)?;
    let mut sieve = [0_u64; SIEVE_WORDS];
    for (address, roles) in roles {
        let address = Address::from(address);
        addresses.insert(address, roles, 0).map_err(in_map(name::ADDRESSES))?;
        let bit = address.bit();
        sieve[bit as usize / 64] |= 1 << (bit % 64);
    }
    let mut endpoints: HashMap<_, Endpoint, u8> = borrow(ebpf, name::ENDPOINTS)?;
    for (address, port, protocol) in ports {
        let endpoint = Endpoint { address: address.into(), port, protocol, reserved: 0 };
        endpoints.insert(endpoint, 0, 0).map_err(in_map(name::ENDPOINTS))?;
    }
    let mut clients: HashMap<_, Address, u8> = borrow(ebpf, name::CLIENTS)?;
    for client in &plan.clients {
        clients.insert(Address::from(*client), 0, 0).map_err(in_map(name::CLIENTS))?;
    }
    // Last: nothing matches before.
    let mut map: Array<_, [u64; SIEVE_WORDS]> = borrow(ebpf, name::SIEVE)?;
    map.set(0, sieve, 0).map_err(in_map(name::SIEVE))
}

/// Puts what is attached and what is not together; one reason for all is that of the tier.
fn status(
    tier: Tier,
    hooks: Vec<(Hook, Option<Vec<u32>>)>,
    attached: Vec<String>,
    missing: Vec<(String, String)>,
) -> TierStatus {
    let reason = match (&attached[..], &missing[..]) {
        ([], []) => Some("nothing was to be attached".to_owned()),
        ([], [(_, why), ..]) => Some(why.clone()),
        _ => None,
    };
    TierStatus { tier, hooks, attached, missing, reason }
}

/// Those of the hooks at which nothing is missing, on every device.
fn whole(found: &[(Hook, bool)]) -> Vec<(Hook, Option<Vec<u32>>)> {
    let hooks: BTreeSet<Hook> = found.iter().map(|(hook, _)| *hook).collect();
    hooks
        .into_iter()
        .filter(|hook| found.iter().all(|(one, is_attached)| one != hook || *is_attached))
        .map(|hook| (hook, None))
        .collect()
}

/// The program that watches a device.
fn classifier(device: Device, direction: Direction) -> &'static str {
    match (direction, device.link) {
        (Direction::Ingress, LinkLayer::Ethernet) => "inspect_tc_in",
        (Direction::Ingress, LinkLayer::None) => "inspect_l3_in",
        (Direction::Egress, LinkLayer::Ethernet) => "inspect_tc_out",
        (Direction::Egress, LinkLayer::None) => "inspect_l3_out",
    }
}

/// What loads our programs. To make one means to go over the kernel's whole BTF, and so does
/// [`offsets::kernel`], which is wanted if `is_read`: both at the same time.
fn loader<'a>(is_read: bool) -> EbpfLoader<'a> {
    thread::scope(|scope| {
        let look = move || {
            if is_read {
                offsets::kernel();
            }
            // Looked at once, and wanted when the loader is used.
            aya::features();
        };
        // Without it, it takes longer.
        let _ = thread::Builder::new().spawn_scoped(scope, look);
        EbpfLoader::new()
    })
}

/// What clsact failed with: a device that is gone is said by its name.
fn unprepared(failed: clsact::Failed, wanted: &[(String, Device, Direction)]) -> TraceError {
    let clsact::Failed { ifindex, source } = failed;
    let gone = ifindex.filter(|_| source.raw_os_error() == Some(libc::ENODEV));
    match wanted.iter().find(|(_, device, _)| Some(device.ifindex) == gone) {
        Some((name, ..)) => TraceError::Device { call: "clsact", device: name.clone(), source },
        None => TraceError::Clsact(source),
    }
}

/// Programs that are probably going to be attached.
fn programs(
    plan: &Plan,
    wanted: &[(String, Device, Direction)],
    kernel: Option<&Kernel>,
) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    if plan.tiers.contains(&Tier::Tc) {
        names.extend(wanted.iter().map(|one| classifier(one.1, one.2).to_owned()));
    }
    let is_readable = kernel.is_some_and(|kernel| kernel.base.is_none());
    let traces = is_readable && plan.tiers.contains(&Tier::Tracepoint);
    if traces {
        let tracepoints = TRACEPOINTS.iter().filter(|(name, ..)| !plan.avoid.contains(*name));
        names.extend(tracepoints.map(|(name, ..)| format!("tp_{name}")));
    }
    if is_readable && plan.tiers.contains(&Tier::Kprobe) && Path::new(KPROBES).exists() {
        let probes = PROBES.iter().filter(|probe| !traces || probe.unless.is_none());
        names.extend(probes.map(|probe| probe.functions[0].1.to_owned()));
    }
    names
}

/// Loads programs into the kernel, several at a time: the verifier takes its time. What it refuses is
/// asked for again, and said, when it is to be attached; so is what is left here for want of a thread.
fn preload(programs: Vec<&mut Program>) {
    let threads = thread::available_parallelism().map_or(1, usize::from).min(programs.len());
    let queue = Mutex::new(programs.into_iter());
    let work = || {
        loop {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(program) = next else { break };
            let _ = match program {
                Program::SchedClassifier(program) => program.load(),
                Program::RawTracePoint(program) => program.load(),
                Program::KProbe(program) => program.load(),
                _ => Ok(()),
            };
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            // Without it, it takes longer.
            let _ = thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
}

fn attach_tc(
    programs: &mut BTreeMap<&str, &mut Program>,
    wanted: &[(String, Device, Direction)],
    clsact: Option<&Clsact>,
) -> TierStatus {
    let (mut attached, mut missing) = (Vec::new(), Vec::new());
    let mut devices: BTreeMap<Hook, Vec<u32>> = BTreeMap::new();
    for (name, device, direction) in wanted {
        let (word, kind) = match direction {
            Direction::Ingress => ("ingress", TcAttachType::Ingress),
            Direction::Egress => ("egress", TcAttachType::Egress),
        };
        let program = classifier(*device, *direction);
        let how = if clsact.is_some() { "clsact" } else { "tcx" };
        let hook = format!("{name} {word} ({how})");
        let result =
            loaded(programs.get_mut(program).map(|one| &mut **one), program, SchedClassifier::load)
                .and_then(|classifier| match clsact {
                    Some(clsact) => {
                        let fd = classifier.fd().map_err(|error| sentence(&error))?;
                        let fd = fd.as_fd();
                        clsact
                            .attach(*device, *direction, fd, program)
                            .map_err(|error| format!("the filter on device {name} {word}: {error}"))
                    }
                    None => classifier
                        .attach_with_options(
                            name,
                            kind,
                            TcAttachOptions::TcxOrder(LinkOrder::first()),
                        )
                        .map(drop)
                        .map_err(|error| sentence(&error)),
                });
        match result {
            Ok(()) => {
                attached.push(hook);
                // What leaves is also where the kernel asks for a neighbour.
                let hooks: &[Hook] = match direction {
                    Direction::Ingress => &[Hook::TcIngress],
                    Direction::Egress => &[Hook::TcEgress, Hook::NeighSolicit],
                };
                for hook in hooks {
                    devices.entry(*hook).or_default().push(device.ifindex);
                }
            }
            Err(why) => missing.push((hook, why)),
        }
    }
    let hooks = devices.into_iter().map(|(hook, indexes)| (hook, Some(indexes))).collect();
    status(Tier::Tc, hooks, attached, missing)
}

fn listen(plan: &Plan) -> (Option<Neighbours>, TierStatus) {
    let watched: HashSet<IpAddr> = plan
        .addresses
        .iter()
        .map(|watched| watched.address)
        .chain(plan.backends.iter().map(|backend| backend.address))
        .chain(plan.next_hops.iter().copied())
        .collect();
    let hook = "notifications of neighbours".to_owned();
    match Neighbours::open(watched) {
        Ok(socket) => {
            let hooks = vec![(Hook::NeighUpdate, None)];
            (Some(socket), status(Tier::Netlink, hooks, vec![hook], Vec::new()))
        }
        Err(error) => {
            let why = format!("a netlink socket for notifications of neighbours: {error}");
            (None, status(Tier::Netlink, Vec::new(), Vec::new(), vec![(hook, why)]))
        }
    }
}

fn attach_tracepoints(
    ebpf: &mut Ebpf,
    kernel: Option<&Kernel>,
    avoid: &BTreeSet<String>,
) -> TierStatus {
    let (mut attached, mut missing) = (Vec::new(), Vec::new());
    let mut found = Vec::new();
    for (name, needs, hook) in TRACEPOINTS {
        let unknown = kernel.and_then(|kernel| match needs {
            Needs::Base => kernel.base.as_ref(),
            Needs::Fib4 => kernel.fib4.as_ref(),
            Needs::Fib6 => kernel.fib6.as_ref(),
        });
        let result = match unknown {
            _ if avoid.contains(name) => Err(AVOIDED.to_owned()),
            Some(why) => Err(why.clone()),
            None => tracepoint(ebpf, &format!("tp_{name}")).and_then(|program| {
                program.attach(name).map(drop).map_err(|error| match errno(&error) {
                    Some(libc::ENOENT) => "this kernel has no such tracepoint".to_owned(),
                    _ => sentence(&error),
                })
            }),
        };
        let tells_all = match name {
            RESETS => kernel.is_some_and(|kernel| kernel.tells_all_resets),
            ICMP_ERRORS => false,
            _ => true,
        };
        found.push((hook, result.is_ok() && tells_all));
        match result {
            // By another name, so that a kprobe is attached too.
            Ok(()) if name == RESETS && !tells_all => {
                attached.push(format!("{name} ({RESETS_OF_SOCKETS})"));
            }
            Ok(()) => attached.push(name.to_owned()),
            Err(why) => missing.push((name.to_owned(), why)),
        }
    }
    status(Tier::Tracepoint, whole(&found), attached, missing)
}

/// Why kprobes can do nothing for us on this kernel; nothing if they can.
fn no_kprobes(kernel: &Kernel) -> Option<String> {
    match kernel.base.clone() {
        None if !Path::new(KPROBES).exists() => Some(format!(
            "this kernel has no kprobes ({KPROBES} is not there; CONFIG_KPROBE_EVENTS)"
        )),
        other => other,
    }
}

/// What one kind of observers can be on this node, as far as can be told without attaching it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prospect {
    /// The kind.
    pub tier: Tier,
    /// How it would watch: `tcx, first in the chain`, …; or why it cannot, in one clause.
    pub found: Result<String, String>,
}

/// What each kind of observers can be on this node, for this process and in the network namespace of
/// this thread. It looks only: nothing is attached. `has` says whether a capability is
/// held, and `lockdown` is the kernel's.
#[must_use]
pub fn prospects(has: impl Fn(&str) -> bool, lockdown: Option<&str>) -> Vec<Prospect> {
    let lacks = |names: &[&str]| {
        let lacking: Vec<&str> = names.iter().copied().filter(|name| !has(name)).collect();
        (!lacking.is_empty()).then(|| format!("needs {}", lacking.join(" and ")))
    };
    let kernel = offsets::kernel();
    let locked = (lockdown == Some("confidentiality"))
        .then(|| "kernel lockdown (confidentiality) refuses to read kernel memory".to_owned());
    let traced = lacks(&["CAP_BPF", "CAP_PERFMON"]).or(locked);
    let or = |reason: Option<String>, found: &str| reason.map_or(Ok(found.to_owned()), Err);
    let tc = if has_tcx("lo") {
        "tcx, first in the chain"
    } else {
        "clsact, in front of Cilium's filter (tcx needs Linux 6.6)"
    };
    let program =
        lacks(&program::CAPABILITIES).or_else(|| kernel.base.clone()).or_else(program::refusal);
    [
        (Tier::Tc, or(lacks(&["CAP_BPF", "CAP_NET_ADMIN"]), tc)),
        (Tier::Netlink, Ok("notifications of neighbours".to_owned())),
        (
            Tier::Tracepoint,
            or(
                traced.clone().or_else(|| kernel.base.clone()),
                "raw tracepoints of packets, routes, neighbours and drops",
            ),
        ),
        (
            Tier::Kprobe,
            or(traced.or_else(|| no_kprobes(kernel)), "functions that tracepoints do not cover"),
        ),
        (Tier::Program, or(program, "entry and exit of Cilium's programs at ingress")),
    ]
    .map(|(tier, found)| Prospect { tier, found })
    .into()
}

fn attach_kprobes(
    ebpf: &mut Ebpf,
    kernel: Option<&Kernel>,
    traced: &[String],
    avoid: &BTreeSet<String>,
) -> TierStatus {
    let unusable = kernel.and_then(no_kprobes);
    let (mut attached, mut missing) = (Vec::new(), Vec::new());
    let mut seen = Vec::new();
    for Probe { hook, functions, unless } in PROBES {
        if unless.is_some_and(|tracepoint| traced.iter().any(|name| name == tracepoint)) {
            seen.push((hook, false));
            continue;
        }
        let (name, _) = functions[0];
        if let Some(why) = &unusable {
            missing.push((name.to_owned(), why.clone()));
            seen.push((hook, false));
            continue;
        }
        let mut first = None;
        let found = functions.iter().find(|(function, program)| {
            let result = if avoid.contains(*function) {
                Err(AVOIDED.to_owned())
            } else {
                attach_kprobe(ebpf, function, program)
            };
            result.map_err(|why| first.get_or_insert(why).clone()).is_ok()
        });
        // The next ones in the path of calls do not see all.
        seen.push((hook, found.is_some_and(|(function, _)| *function == name)));
        match (found, first) {
            (Some((function, _)), _) => attached.push((*function).to_owned()),
            (None, why) => missing.push((name.to_owned(), why.unwrap_or_default())),
        }
    }
    status(Tier::Kprobe, whole(&seen), attached, missing)
}

fn attach_kprobe(ebpf: &mut Ebpf, function: &str, program: &str) -> Result<(), String> {
    let program = loaded(ebpf.program_mut(program), program, KProbe::load)?;
    program.attach(function, 0).map(drop).map_err(|error| match errno(&error) {
        Some(libc::ENOENT | libc::EADDRNOTAVAIL | libc::EINVAL) => {
            "this kernel has no such function, or has inlined it".to_owned()
        }
        _ => sentence(&error),
    })
}

fn tracepoint<'a>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut RawTracePoint, String> {
    loaded(ebpf.program_mut(name), name, RawTracePoint::load)
}

/// A program of the object file, loaded into the kernel if it was not yet.
fn loaded<'a, P>(
    program: Option<&'a mut Program>,
    name: &str,
    load: impl FnOnce(&mut P) -> Result<(), ProgramError>,
) -> Result<&'a mut P, String>
where
    &'a mut P: TryFrom<&'a mut Program, Error = ProgramError>,
{
    let program: &'a mut P = program
        .ok_or_else(|| format!("this build has no program {name}"))?
        .try_into()
        .map_err(|error| sentence(&error))?;
    match load(program) {
        Ok(()) | Err(ProgramError::AlreadyLoaded) => Ok(program),
        Err(error) => Err(format!("program {name}: {}", sentence(&error))),
    }
}

/// The error of the system call in an error of aya's.
fn errno(error: &ProgramError) -> Option<i32> {
    let mut source: Option<&dyn std::error::Error> = Some(error);
    while let Some(error) = source {
        if let Some(error) = error.downcast_ref::<io::Error>() {
            return error.raw_os_error();
        }
        source = error.source();
    }
    None
}

/// An error of aya's with its causes, in one line; of the verifier's words the last.
fn sentence(error: &ProgramError) -> String {
    if let ProgramError::LoadError { io_error, verifier_log } = error {
        let log = verifier_log.to_string();
        let last = bpf::verifiers_reason(&log);
        return format!("bpf(BPF_PROG_LOAD): {io_error}; {last}");
    }
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        source = error.source();
    }
    text
}

fn borrow<'a, M: TryFrom<&'a mut Map, Error = MapError>>(
    ebpf: &'a mut Ebpf,
    map: &'static str,
) -> Result<M, TraceError> {
    ebpf.map_mut(map)
        .ok_or_else(|| TraceError::Mismatch(format!("no map {map}")))?
        .try_into()
        .map_err(in_map(map))
}

fn take<M: TryFrom<Map, Error = MapError>>(
    ebpf: &mut Ebpf,
    map: &'static str,
) -> Result<M, TraceError> {
    ebpf.take_map(map)
        .ok_or_else(|| TraceError::Mismatch(format!("no map {map}")))?
        .try_into()
        .map_err(in_map(map))
}

fn in_map(map: &'static str) -> impl Fn(MapError) -> TraceError {
    move |source| TraceError::Map { map, source: Box::new(source) }
}
