//! Attached programs: on the devices of this network namespace, on cgroups, and what they reach.
//!
//! The kernel's own answer for each hook is what counts; pins are read beside it, to show which of
//! them hold nothing. Programs and maps come and go while they are read (the agent replaces its
//! programs at any time): one that is gone between two questions is asked for again once, and then
//! told of, and is never an error.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque},
    fmt::Write as _,
    fs, io,
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
};

use crate::{
    cilium::layout::MapType,
    evidence::{
        Source, SourceStatus,
        programs::{
            Attachments, CGROUPS, CgroupAsked, CgroupHook, DETAILS, DEVICES, DeviceHook,
            DeviceName, Filter, HookKind, LINKS, OtherFilter, PinnedLink, Program, UsedMap,
        },
    },
    sys::{
        bpf::{self, MapInfo, ObjectKind},
        btf::Btf,
        cgroup,
        mounts::Mount,
        program::{self, LinkTarget, ProgramInfo, Target, attach_type},
        tc::{self, Direction, RouteSocket, XdpMode},
    },
};

/// Whose cgroup is asked for the socket programs in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CgroupSubject {
    /// The root of the hierarchy: what is in force there is for every process.
    Root,
    /// This process.
    Own,
    /// Another process.
    Process(u32),
}

impl CgroupSubject {
    fn name(self) -> String {
        match self {
            Self::Root => "root".to_owned(),
            Self::Own => "self".to_owned(),
            Self::Process(pid) => format!("pid {pid}"),
        }
    }
}

/// Reads everything about attached programs.
///
/// `root` is the BPF file system with Cilium's pins. The devices are those of the network namespace
/// of this thread. What could not be read is told of in the sources.
#[must_use]
pub fn collect(root: &Path, subjects: &[CgroupSubject]) -> (Attachments, Vec<Source>) {
    let (mut found, mut vanished) = attempt(root, subjects);
    if !vanished.is_empty() {
        // Programs were replaced meanwhile, so that what was read is of no one moment.
        (found, vanished) = attempt(root, subjects);
    }
    if !vanished.is_empty() {
        found.details.partial(format!(
            "{} vanished while they were read, twice: collect again",
            numbered("program", &vanished)
        ));
    }
    let Found { attachments, devices, details, links, cgroups } = found;
    (attachments, [devices, details, links, cgroups].map(Report::into_source).into())
}

/// The programs on the devices of this thread's network namespace, as they are now: interface
/// index, hook and program id.
///
/// # Errors
/// Why not all hooks could be asked.
pub fn attached_now() -> Result<BTreeSet<(u32, HookKind, u32)>, String> {
    let mut attachments = Attachments::default();
    let mut report = Report::new(DEVICES);
    device_hooks(&mut attachments, &mut report);
    if report.status != SourceStatus::Complete {
        return Err(report.reasons.join("; "));
    }
    Ok(attachments.hooks.iter().map(|hook| (hook.ifindex, hook.kind, hook.program)).collect())
}

/// What one attempt found.
struct Found {
    attachments: Attachments,
    devices: Report,
    details: Report,
    links: Report,
    cgroups: Report,
}

/// Reads everything once; the second result is the programs that vanished meanwhile.
fn attempt(root: &Path, subjects: &[CgroupSubject]) -> (Found, BTreeSet<u32>) {
    let mut attachments = Attachments::default();
    let mut devices = Report::new(DEVICES);
    let mut details = Report::new(DETAILS);
    let mut links = Report::new(LINKS);
    let mut cgroups = Report::new(CGROUPS);
    pinned_links(root, &mut attachments.links, &mut links);
    let asked = device_hooks(&mut attachments, &mut devices);
    cgroup_hooks(subjects, &mut attachments, &mut cgroups);
    let first = attached(&attachments);
    let mut reader = Reader::new();
    reader.follow(first.clone(), &mut details);
    let vanished = reader.vanished.iter().copied().collect();
    (attachments.programs, attachments.maps) = reader.finish(&first);
    relate(&mut attachments, &asked);
    (Found { attachments, devices, details, links, cgroups }, vanished)
}

/// Ids of all programs that something holds, each once, those on devices first.
fn attached(attachments: &Attachments) -> Vec<u32> {
    let mut seen = HashSet::new();
    attachments
        .hooks
        .iter()
        .map(|hook| hook.program)
        .chain(attachments.cgroup.iter().map(|hook| hook.program))
        .chain(attachments.links.iter().map(|link| link.program))
        .filter(|&id| id != 0 && seen.insert(id))
        .collect()
}

fn numbered(what: &str, ids: &BTreeSet<u32>) -> String {
    let list: Vec<String> = ids.iter().map(u32::to_string).collect();
    format!("{what}{} {}", if ids.len() == 1 { "" } else { "s" }, list.join(", "))
}

/// How far one source could be used, and why no further.
struct Report {
    what: &'static str,
    status: SourceStatus,
    reasons: Vec<String>,
}

impl Report {
    fn new(what: &'static str) -> Self {
        Self { what, status: SourceStatus::Complete, reasons: Vec::new() }
    }

    fn add(&mut self, status: SourceStatus, reason: String) {
        // The worse one stands.
        if self.status != SourceStatus::Failed {
            self.status = status;
        }
        if !self.reasons.contains(&reason) {
            self.reasons.push(reason);
        }
    }

    fn partial(&mut self, reason: String) {
        self.add(SourceStatus::Partial, reason);
    }

    fn failed(&mut self, reason: String) {
        self.add(SourceStatus::Failed, reason);
    }

    /// `call` failed for another reason than that something vanished.
    fn error(&mut self, call: &str, error: &io::Error, capability: &str) {
        if error.raw_os_error() == Some(libc::EPERM) {
            self.failed(format!("{call}: {error}: run as root, or with {capability}"));
        } else {
            self.partial(format!("{call}: {error}"));
        }
    }

    fn into_source(self) -> Source {
        let Self { what, status, reasons } = self;
        Source {
            what: what.to_owned(),
            status,
            reason: (!reasons.is_empty()).then(|| reasons.join("; ")),
        }
    }
}

/// The hooks that answered, by device and kind; XDP is not among them, netlink tells it always.
type Asked = BTreeSet<(u32, HookKind)>;

/// Reads the hooks of every device.
fn device_hooks(attachments: &mut Attachments, report: &mut Report) -> Asked {
    let mut asked = Asked::new();
    let mut socket = match RouteSocket::open() {
        Ok(socket) => socket,
        Err(error) => {
            report.failed(format!("route netlink: {error}"));
            return asked;
        }
    };
    let devices = match socket.devices() {
        Ok(devices) => devices,
        Err(error) => {
            report.failed(format!("list of devices (RTM_GETLINK): {error}"));
            return asked;
        }
    };
    let classifiers = socket.classifiers().unwrap_or_else(|error| {
        report.failed(format!("list of qdiscs (RTM_GETQDISC): {error}"));
        BTreeMap::new()
    });
    let mut queries = [
        Query::new(HookKind::TcxIngress, attach_type::TCX_INGRESS),
        Query::new(HookKind::TcxEgress, attach_type::TCX_EGRESS),
        Query::new(HookKind::NetkitPrimary, attach_type::NETKIT_PRIMARY),
        Query::new(HookKind::NetkitPeer, attach_type::NETKIT_PEER),
    ];
    for device in &devices {
        let ifindex = device.ifindex;
        let first = attachments.hooks.len();
        for (order, &(mode, program)) in (0..).zip(&device.xdp) {
            let kind = match mode {
                XdpMode::Native => HookKind::XdpNative,
                XdpMode::Generic => HookKind::XdpGeneric,
                XdpMode::Offload => HookKind::XdpOffload,
            };
            let hook = DeviceHook { ifindex, kind, order, program, link: None, filter: None };
            attachments.hooks.push(hook);
        }
        for query in &mut queries {
            if query.ask(ifindex, &mut attachments.hooks, report) {
                asked.insert((ifindex, query.kind));
            }
        }
        if let Some(classifier) = classifiers.get(&ifindex) {
            filters(&mut socket, ifindex, classifier, attachments, report);
        }
        // In the order in which a packet meets them.
        attachments.hooks[first..].sort_by_key(|hook| (hook.kind, hook.order));
        attachments.devices.push(DeviceName { ifindex, name: device.name.clone() });
    }
    for message in socket.malformed {
        report.partial(format!("a netlink message that was not understood: {message}"));
    }
    asked
}

/// One kind of hook that is asked for by `BPF_PROG_QUERY`.
struct Query {
    kind: HookKind,
    attach_type: u32,
    /// Whether the kernel has it and lets us ask.
    usable: bool,
}

impl Query {
    fn new(kind: HookKind, attach_type: u32) -> Self {
        Self { kind, attach_type, usable: true }
    }

    /// Asks for one device; whether there was an answer.
    fn ask(&mut self, ifindex: u32, hooks: &mut Vec<DeviceHook>, report: &mut Report) -> bool {
        if !self.usable {
            return false;
        }
        match program::query(Target::Device(ifindex), self.attach_type) {
            Ok(found) => {
                hooks.extend((0..).zip(found).map(|(order, attached)| DeviceHook {
                    ifindex,
                    kind: self.kind,
                    order,
                    program: attached.program,
                    link: attached.link,
                    filter: None,
                }));
                true
            }
            Err(error) => {
                match error.raw_os_error() {
                    // A kernel that does not know the hook, or the list of links.
                    Some(libc::EINVAL | libc::E2BIG) => self.usable = false,
                    // No netkit device, its peer, or a device that is gone meanwhile.
                    Some(libc::ENXIO | libc::ENODEV | libc::EACCES | libc::ENOENT) => {}
                    _ => {
                        let denied = error.raw_os_error() == Some(libc::EPERM);
                        self.usable = !denied;
                        report.error("bpf(BPF_PROG_QUERY) of a device", &error, "CAP_NET_ADMIN");
                    }
                }
                false
            }
        }
    }
}

/// The clsact filters of one device.
fn filters(
    socket: &mut RouteSocket,
    ifindex: u32,
    classifier: &tc::Classifier,
    attachments: &mut Attachments,
    report: &mut Report,
) {
    let directions = [
        (Direction::Ingress, HookKind::ClsactIngress, classifier.ingress_block),
        (Direction::Egress, HookKind::ClsactEgress, classifier.egress_block),
    ];
    for (direction, kind, block) in directions {
        if direction == Direction::Egress && !classifier.egress {
            continue;
        }
        let found = match socket.filters(ifindex, direction) {
            Ok(found) => found,
            Err(error) => {
                report.partial(format!("filters of interface {ifindex} (RTM_GETTFILTER): {error}"));
                continue;
            }
        };
        let mut order = 0;
        for tc::Filter { kind: filter, priority, protocol, handle, chain, bpf } in found {
            if let Some(tc::BpfFilter { program: Some(program), name, direct_action }) = bpf {
                let filter =
                    Filter { name, priority, handle, direct_action, protocol, chain, block };
                let filter = Some(filter);
                let hook = DeviceHook { ifindex, kind, order, program, link: None, filter };
                attachments.hooks.push(hook);
                order += 1;
            } else {
                let other = OtherFilter { ifindex, kind, filter, priority, handle, chain };
                attachments.other_filters.push(other);
            }
        }
    }
}

/// Reads the links below `<root>/cilium/**/links`.
fn pinned_links(root: &Path, links: &mut Vec<PinnedLink>, report: &mut Report) {
    let mut folders = VecDeque::from([(root.join("cilium"), false)]);
    let mut mount = None;
    while let Some((folder, is_links)) = folders.pop_front() {
        let entries = match fs::read_dir(&folder) {
            Ok(entries) => entries,
            // Cilium before 1.14 has none; an endpoint's may go meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => {
                report.partial(format!("{}: {error}", folder.display()));
                continue;
            }
        };
        for entry in entries.filter_map(Result::ok) {
            let path = entry.path();
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                let is_links = is_links || entry.file_name() == "links";
                folders.push_back((path, is_links));
            } else if is_links {
                match pinned_link(&path, &mut mount) {
                    Ok(Some(link)) => links.push(link),
                    Ok(None) => {}
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => report.partial(format!("{}: {error}", path.display())),
                }
            }
        }
    }
    links.sort_by(|one, other| one.path.cmp(&other.path));
}

/// One pin; `None` if it is no link.
fn pinned_link(path: &Path, mount: &mut Option<Mount>) -> io::Result<Option<PinnedLink>> {
    // The kernel opens no link read-only: EINVAL tells it from a map or a program, which is not
    // what is looked for here and is not opened otherwise. A link that is open for writing is not
    // touched by that: see `open_link_pin`.
    match bpf::open_pin(path) {
        Ok(_) => return Ok(None),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
        Err(error) => return Err(error),
    }
    let fd = bpf::open_link_pin(path)?;
    if bpf::object_kind(fd.as_fd())? != ObjectKind::Link {
        return Ok(None);
    }
    let info = program::link_info(fd.as_fd())?;
    let mut link = PinnedLink {
        path: path.display().to_string(),
        id: info.id,
        program: info.program,
        kind: String::new(),
        ifindex: None,
        cgroup_id: None,
        attach_type: None,
        defunct: false,
        cgroup: None,
        shown: None,
    };
    let (kind, ifindex, attach_type) = match info.target {
        LinkTarget::Tcx { ifindex, attach_type } => ("tcx", ifindex, Some(attach_type)),
        LinkTarget::Netkit { ifindex, attach_type } => ("netkit", ifindex, Some(attach_type)),
        LinkTarget::Xdp { ifindex } => ("xdp", ifindex, None),
        LinkTarget::Cgroup { id, attach_type } => {
            "cgroup".clone_into(&mut link.kind);
            link.cgroup_id = Some(id);
            link.attach_type = Some(attach_type);
            link.defunct = id == 0;
            if id != 0 {
                cgroup_of(&mut link, id, mount);
            }
            return Ok(Some(link));
        }
        LinkTarget::Other(number) => {
            link.kind = number.to_string();
            return Ok(Some(link));
        }
    };
    kind.clone_into(&mut link.kind);
    link.ifindex = Some(ifindex);
    link.attach_type = attach_type;
    link.defunct = ifindex == 0;
    Ok(Some(link))
}

/// Where the cgroup of a link is. One whose folder was removed can live on in the kernel as long
/// as a socket of it is open, and so does the link on it: no new process can be in it.
fn cgroup_of(link: &mut PinnedLink, id: u64, mount: &mut Option<Mount>) {
    if mount.is_none() {
        *mount = cgroup::mounts().ok().and_then(|mounts| mounts.into_iter().next());
    }
    let Some(mount) = mount else { return };
    match cgroup::by_id(mount, id) {
        Ok(Some(path)) => link.cgroup = Some(path.display().to_string()),
        Ok(None) => link.defunct = true,
        // Not allowed to look: the path stays unknown.
        Err(_) => {}
    }
}

/// Reads the socket hooks of each subject's cgroup.
fn cgroup_hooks(subjects: &[CgroupSubject], attachments: &mut Attachments, report: &mut Report) {
    let mounts = match cgroup::mounts() {
        Ok(mounts) if !mounts.is_empty() => mounts,
        Ok(_) => {
            report.failed(
                "no cgroup2 file system is mounted here: mount one with `mount -t cgroup2 none \
                 DIR`"
                    .to_owned(),
            );
            return;
        }
        Err(error) => {
            report.failed(format!("mount table: {error}"));
            return;
        }
    };
    for &subject in subjects {
        let name = subject.name();
        let mut asked = CgroupAsked { subject: name.clone(), cgroup: None, problem: None };
        match subject_hooks(subject, &mounts, &mut asked.cgroup) {
            Ok(hooks) => attachments.cgroup.extend(hooks),
            Err(error) => {
                report.error(
                    &format!("bpf(BPF_PROG_QUERY) of the cgroup of {name}"),
                    &error,
                    "CAP_NET_ADMIN",
                );
                asked.problem = Some(error.to_string());
            }
        }
        attachments.cgroups.push(asked);
    }
}

fn subject_hooks(
    subject: CgroupSubject,
    mounts: &[Mount],
    path: &mut Option<String>,
) -> io::Result<Vec<CgroupHook>> {
    let not_shown = |cgroup: &Path| {
        io::Error::new(
            io::ErrorKind::NotFound,
            format!("no cgroup2 mount shows its cgroup {}", cgroup.display()),
        )
    };
    let (folder, below) = match subject {
        // The first mount shows the most.
        CgroupSubject::Root => mounts
            .first()
            .map(|mount| (mount.target.clone(), PathBuf::from("/")))
            .ok_or_else(|| not_shown(Path::new("/")))?,
        CgroupSubject::Own | CgroupSubject::Process(_) => {
            let pid = match subject {
                CgroupSubject::Process(pid) => Some(pid),
                _ => None,
            };
            let cgroup = cgroup::of_process(pid)?;
            cgroup::locate(mounts, &cgroup).ok_or_else(|| not_shown(&cgroup))?
        }
    };
    let below = below.display().to_string();
    *path = Some(below.clone());
    let folder = cgroup::open(&folder)?;
    let mut hooks = Vec::new();
    for (name, number) in attach_type::CGROUP {
        let found = match program::query(Target::Cgroup(folder.as_fd()), number) {
            Ok(found) => found,
            // A hook that this kernel does not know.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => continue,
            Err(error) => return Err(error),
        };
        hooks.extend((0..).zip(found).map(|(order, attached)| CgroupHook {
            subject: subject.name(),
            cgroup: below.clone(),
            attach_type: name.to_owned(),
            order,
            program: attached.program,
        }));
    }
    Ok(hooks)
}

/// Joins links and hooks: which link holds an XDP program, which link the kernel does not show.
fn relate(attachments: &mut Attachments, asked: &Asked) {
    let Attachments { hooks, links, .. } = attachments;
    for link in links {
        let Some(ifindex) = link.ifindex.filter(|&ifindex| ifindex != 0) else { continue };
        let kind = match link.attach_type {
            Some(attach_type::TCX_INGRESS) => HookKind::TcxIngress,
            Some(attach_type::TCX_EGRESS) => HookKind::TcxEgress,
            Some(attach_type::NETKIT_PRIMARY) => HookKind::NetkitPrimary,
            Some(attach_type::NETKIT_PEER) => HookKind::NetkitPeer,
            _ if link.kind == "xdp" => {
                // Netlink tells no link id: program and device together name it.
                let held = hooks.iter_mut().find(|hook| {
                    hook.ifindex == ifindex
                        && hook.program == link.program
                        && hook.kind.is_xdp()
                        && hook.link.is_none()
                });
                link.shown = Some(held.is_some());
                if let Some(hook) = held {
                    hook.link = Some(link.id);
                }
                continue;
            }
            _ => continue,
        };
        // The kernel shows the hook of a peer at the primary device, while the link names the peer
        // itself, by its index in its own network namespace: that may be any device's here.
        let is_of_peer = kind == HookKind::NetkitPeer;
        let shown = hooks.iter().any(|hook| {
            hook.kind == kind
                && hook.link == Some(link.id)
                && (is_of_peer || hook.ifindex == ifindex)
        });
        let is_known = shown || (!is_of_peer && asked.contains(&(ifindex, kind)));
        link.shown = is_known.then_some(shown);
    }
}

/// What was read of a map.
#[derive(Debug, Clone)]
struct ReadMap {
    used: UsedMap,
    /// Programs of a program array.
    programs: Vec<u32>,
    /// Whether it may be read-only data with types.
    is_constants: bool,
}

/// Follows programs into the program arrays that they use.
struct Reader {
    programs: BTreeMap<u32, ProgramInfo>,
    /// `None`: it could not be read.
    maps: HashMap<u32, Option<ReadMap>>,
    vanished: HashSet<u32>,
    counts_runs: bool,
}

/// More programs than these are not followed: 500 pods have some 10,000.
const MOST_PROGRAMS: usize = 20_000;
/// Program arrays with more places than these are not read; Cilium's for tail calls have 50.
const LARGEST_ARRAY: u32 = 4096;
/// Program arrays that are not followed, by the kernel's name of them (15 bytes): those of
/// `cilium_call_policy` and `cilium_egresscall_policy`. They have a place for every endpoint of
/// the node (65,535 of them), and a program calls the one that its packet goes to, after services
/// were looked up. To follow them would make every program reach what any endpoint's reaches.
const POLICY_ARRAYS: [&str; 2] = ["cilium_call_pol", "cilium_egressca"];
/// BTF objects that are read to have the full names of programs that are only tail-called.
const MOST_NAMES: usize = 512;
/// `BPF_F_RDONLY_PROG`: programs cannot write the map.
const BPF_F_RDONLY_PROG: u32 = 1 << 7;

impl Reader {
    fn new() -> Self {
        Self {
            programs: BTreeMap::new(),
            maps: HashMap::new(),
            vanished: HashSet::new(),
            counts_runs: program::counts_runs(),
        }
    }

    /// Reads these programs and all that they can tail-call.
    fn follow(&mut self, first: Vec<u32>, report: &mut Report) {
        let mut queue = VecDeque::from(first);
        while let Some(id) = queue.pop_front() {
            if self.programs.contains_key(&id) || self.vanished.contains(&id) {
                continue;
            }
            if self.programs.len() >= MOST_PROGRAMS {
                report.partial(format!("more than {MOST_PROGRAMS} programs: the rest is left out"));
                return;
            }
            let info = match program::program(id) {
                Ok(info) => info,
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
                    self.vanished.insert(id);
                    continue;
                }
                Err(error) => {
                    report.error("bpf(BPF_PROG_GET_FD_BY_ID)", &error, "CAP_SYS_ADMIN");
                    if error.raw_os_error() == Some(libc::EPERM) {
                        return;
                    }
                    continue;
                }
            };
            for &map in &info.maps {
                if let Some(map) = self.maps.entry(map).or_insert_with(|| read_map(map, report)) {
                    queue.extend(&map.programs);
                }
            }
            self.programs.insert(id, info);
        }
    }

    /// The records, with full names and constants: those of `first` always, of others as far as
    /// that is cheap.
    fn finish(self, first: &[u32]) -> (Vec<Program>, Vec<UsedMap>) {
        let first: HashSet<u32> = first.iter().copied().collect();
        let mut names_left = MOST_NAMES;
        let programs = self
            .programs
            .values()
            .map(|info| {
                let is_first = first.contains(&info.id);
                let may_be_cut = info.name.len() == 15;
                let mut name = info.name.clone();
                let mut name_cut = may_be_cut;
                if may_be_cut && (is_first || names_left > 0) {
                    if !is_first {
                        names_left -= 1;
                    }
                    if let Some(full) = full_name(info) {
                        name = full;
                        name_cut = false;
                    }
                }
                let maps = info.maps.iter().filter_map(|id| self.maps.get(id)?.as_ref());
                let mut tail_calls: Vec<u32> =
                    maps.clone().flat_map(|map| &map.programs).copied().collect();
                tail_calls.sort_unstable();
                tail_calls.dedup();
                let mut constants = BTreeMap::new();
                if is_first {
                    for map in maps.filter(|map| map.is_constants) {
                        // Gone meanwhile, or without types: then there is nothing to tell.
                        constants.extend(read_constants(&map.used).unwrap_or_default());
                    }
                }
                let counted = self.counts_runs || info.run_count > 0;
                Program {
                    id: info.id,
                    name,
                    name_cut,
                    program_type: info.program_type,
                    tag: info.tag.iter().fold(String::new(), |mut tag, byte| {
                        // Writing to a string cannot fail.
                        let written = write!(tag, "{byte:02x}");
                        debug_assert!(written.is_ok());
                        tag
                    }),
                    loaded_ns: info.loaded_ns,
                    run_count: counted.then_some(info.run_count),
                    run_time_ns: counted.then_some(info.run_time_ns),
                    maps: info.maps.clone(),
                    tail_calls,
                    constants,
                }
            })
            .collect();
        let mut maps: Vec<UsedMap> =
            self.maps.into_values().flatten().map(|map| map.used).collect();
        maps.sort_by_key(|map| map.id);
        (programs, maps)
    }
}

/// The name of the program's function, if it begins as the kernel's name does.
fn full_name(info: &ProgramInfo) -> Option<String> {
    let function = info.function.filter(|_| info.btf != 0)?;
    let bytes = program::btf(info.btf).ok()?;
    let btf = Btf::new(&bytes)?;
    btf.function(function).filter(|name| name.starts_with(&info.name)).map(str::to_owned)
}

/// Reads one map as far as it matters here; `None` if it is gone or must not be read.
fn read_map(id: u32, report: &mut Report) -> Option<ReadMap> {
    let call = "bpf(BPF_MAP_GET_FD_BY_ID)";
    let gone = |error: &io::Error| error.raw_os_error() == Some(libc::ENOENT);
    let fd = match bpf::open_map_by_id(id) {
        Ok(fd) => fd,
        Err(error) => {
            if !gone(&error) {
                report.error(call, &error, "CAP_SYS_ADMIN");
            }
            return None;
        }
    };
    let info = match bpf::map_info(fd.as_fd()) {
        Ok(info) => info,
        Err(error) => {
            report.error("bpf(BPF_OBJ_GET_INFO_BY_FD) of a map", &error, "CAP_SYS_ADMIN");
            return None;
        }
    };
    let mut programs = Vec::new();
    let is_policy = POLICY_ARRAYS.iter().any(|prefix| info.name.starts_with(prefix));
    if info.map_type == MapType::PROG_ARRAY && !is_policy {
        if info.max_entries > LARGEST_ARRAY {
            report.partial(format!(
                "program array {} ({id}) has {} places and was not read",
                info.name, info.max_entries
            ));
        } else {
            match array_programs(fd.as_fd(), &info) {
                Ok(found) => programs = found,
                Err(error) => {
                    let call = format!("program array {} ({id})", info.name);
                    report.error(&call, &error, "CAP_BPF");
                }
            }
        }
    }
    let is_constants = info.map_type == MapType::ARRAY
        && info.max_entries == 1
        && info.flags & BPF_F_RDONLY_PROG != 0
        && info.name.contains(".rodata");
    let MapInfo { map_type, key_size, value_size, name, .. } = info;
    let used = UsedMap { id, name, map_type: map_type.0, key_size, value_size };
    Some(ReadMap { used, programs, is_constants })
}

/// Ids of the programs in a program array; the kernel has no batches for these.
///
/// # Errors
/// The error of `BPF_MAP_LOOKUP_ELEM`.
fn array_programs(fd: BorrowedFd<'_>, info: &MapInfo) -> io::Result<Vec<u32>> {
    let mut programs = Vec::new();
    let mut value = [0; 4];
    for index in 0..info.max_entries {
        if bpf::lookup(fd, info, &index.to_ne_bytes(), &mut value, 1)? {
            programs.push(u32::from_ne_bytes(value));
        }
    }
    programs.sort_unstable();
    programs.dedup();
    Ok(programs)
}

/// The integers of a read-only data map, by name.
fn read_constants(map: &UsedMap) -> io::Result<BTreeMap<String, u64>> {
    let fd = bpf::open_map_by_id(map.id)?;
    let Some((btf, section)) = program::map_value_type(fd.as_fd())? else {
        return Ok(BTreeMap::new());
    };
    let info = bpf::map_info(fd.as_fd())?;
    let mut data = vec![0; info.value_size as usize];
    if !bpf::lookup(fd.as_fd(), &info, &0_u32.to_ne_bytes(), &mut data, 1)? {
        return Ok(BTreeMap::new());
    }
    let bytes = program::btf(btf)?;
    Ok(Btf::new(&bytes).map(|btf| btf.integers(section, &data)).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_that_happened_to_a_source_stands() {
        let mut report = Report::new("x");
        assert_eq!(report.status, SourceStatus::Complete);
        report.failed("no".to_owned());
        report.partial("half".to_owned());
        report.partial("half".to_owned());
        let source = report.into_source();
        assert_eq!(source.status, SourceStatus::Failed);
        assert_eq!(source.reason.as_deref(), Some("no; half"));
    }

    #[test]
    fn a_program_that_is_gone_is_no_error() {
        let mut report = Report::new("x");
        let mut reader = Reader::new();
        // Ids count up from 1; nobody has loaded so many.
        reader.follow(vec![u32::MAX - 1], &mut report);
        assert!(reader.vanished.contains(&(u32::MAX - 1)), "{:?}: run as root", report.reasons);
        assert_eq!(report.into_source().status, SourceStatus::Complete);
        assert_eq!(reader.finish(&[u32::MAX - 1]), (Vec::new(), Vec::new()));
    }
}
