//! What is read from the node, read-only: one file for each source, no judgement.

pub mod abilities;
pub mod bpffs;
pub mod dump;
pub mod maps;
pub mod network;
pub mod programs;
mod select;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
    path::{Path, PathBuf},
    thread,
    time::SystemTime,
};

use crate::{
    cilium::layout::{Family, LAYOUTS, Layout, MapKind},
    evidence::{
        Bpffs, Device, Evidence, Host, MapRecord, SCHEMA, SCHEMA_MINOR, Source, SourceStatus,
        Subject, Time, Tool, VipQuery, network::Network, programs::Attachments,
    },
    sys::{
        host,
        netns::{Netns, NetnsError},
    },
};
use maps::{MapError, OpenMap};
use network::NetworkQuestion;
use programs::CgroupSubject;

/// What to collect, and where.
#[derive(Debug, Clone)]
pub struct Options {
    /// The BPF file system to read, instead of the one that is found.
    pub bpffs: Option<PathBuf>,
    /// The question that the evidence is to answer.
    pub question: Question,
    /// Arguments of the program, to be kept in the evidence.
    pub arguments: Vec<String>,
    /// The network namespace to read, instead of that of this thread.
    pub netns: Option<Netns>,
    /// The agent's state directory, if it is not the usual one.
    pub state: Option<PathBuf>,
    /// The socket of the agent's API, if the agent is to be asked for its frontends.
    pub agent: Option<PathBuf>,
    /// A process whose socket hooks are asked for, beside those of the root cgroup and of this
    /// process.
    pub pid: Option<u32>,
}

impl Options {
    /// A question to this node, with everything where it usually is.
    #[must_use]
    pub fn new(question: Question) -> Self {
        Self {
            bpffs: None,
            question,
            arguments: Vec::new(),
            netns: None,
            state: None,
            agent: None,
            pid: None,
        }
    }

    /// The cgroups whose socket hooks the answers need; none if they need no programs.
    fn cgroups(&self, questions: &[Question]) -> Vec<CgroupSubject> {
        if questions.iter().all(Question::is_about_tables) {
            return Vec::new();
        }
        let mut subjects = vec![CgroupSubject::Root, CgroupSubject::Own];
        subjects.extend(self.pid.map(CgroupSubject::Process));
        subjects
    }
}

/// A question to the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Question {
    /// What is programmed for this VIP.
    Vip(VipQuery),
    /// All entries of the maps of these kinds.
    Tables(Vec<MapKind>),
    /// Which programs are attached where, and which maps they reach.
    Datapath,
}

impl Question {
    fn is_about_tables(&self) -> bool {
        matches!(self, Self::Tables(_))
    }
}

/// Why nothing could be collected.
#[derive(Debug, thiserror::Error)]
pub enum CollectError {
    /// The mount table could not be read.
    #[error("cannot read the mount table: {0}")]
    Mounts(io::Error),
    /// No BPF file system has Cilium's pins.
    #[error(
        "no Cilium state found: {} `{}`; run this on a Cilium node, in the mount namespace of the \
         host, or name the BPF file system with --bpffs",
        looked_at(looked),
        bpffs::GLOBALS
    )]
    NoBpffs {
        /// The mounts that were looked at.
        looked: Vec<PathBuf>,
    },
    /// Several BPF file systems have them, none of which is Cilium's usual place.
    #[error(
        "several BPF file systems hold Cilium's maps ({}): name the one to read with --bpffs",
        list(paths)
    )]
    Ambiguous {
        /// Their mounts.
        paths: Vec<PathBuf>,
    },
    /// The place that was named is no BPF file system.
    #[error(
        "{path} is no BPF file system (its type is {found}): give the mount point that `mount -t \
         bpf` shows"
    )]
    NotBpffs {
        /// The place.
        path: PathBuf,
        /// Type of the file system found there.
        found: String,
    },
    /// The BPF file system that was named has no pins of Cilium's.
    #[error(
        "{path} holds no Cilium maps below {}: is this another program's BPF file system?",
        bpffs::GLOBALS
    )]
    NoPins {
        /// The mount.
        path: PathBuf,
    },
    /// The BPF file system could not be looked at.
    #[error("cannot look into {path}: {source}{}", privilege(source))]
    Bpffs {
        /// The place.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No map could be opened for want of privilege.
    #[error("cannot read Cilium's maps: {0}")]
    Permission(MapError),
    /// The network namespace could not be entered.
    #[error(transparent)]
    Netns(#[from] NetnsError),
    /// The number of CPUs could not be told.
    #[error("cannot tell the number of CPUs: {0}")]
    Cpus(io::Error),
    /// A big-endian machine.
    #[error("this machine is big endian, on which Cilium does not run")]
    BigEndian,
}

impl CollectError {
    /// Whether more privilege would have helped.
    #[must_use]
    pub fn is_permission(&self) -> bool {
        match self {
            Self::Permission(_) => true,
            Self::Netns(error) => error.is_permission(),
            Self::Bpffs { source, .. } => source.kind() == io::ErrorKind::PermissionDenied,
            _ => false,
        }
    }
}

fn privilege(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            ": run as root, or with CAP_BPF and read access to bpffs"
        }
        io::ErrorKind::NotFound => ": give the mount point of a BPF file system",
        _ => "",
    }
}

fn list(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

fn looked_at(looked: &[PathBuf]) -> String {
    if looked.is_empty() {
        "no BPF file system is mounted here that could have".to_owned()
    } else {
        format!("{} has no", list(looked))
    }
}

/// The maps that answer a question about a VIP, beside the load balancer's own.
const VIP_KINDS: &[MapKind] = &[
    MapKind::Services,
    MapKind::Backends,
    MapKind::ReverseNat,
    MapKind::SourceRange,
    MapKind::AffinityMatch,
    MapKind::SkipLb,
    MapKind::Maglev,
    MapKind::L2Responder,
    MapKind::RuntimeConfig,
    MapKind::Endpoints,
    MapKind::Ipcache,
    MapKind::NodeMap,
    MapKind::Devices,
];

/// Reads the node.
///
/// # Errors
/// [`CollectError`] if nothing could be read; a single map, or a part of the network, that could
/// not is told of in the evidence instead.
pub fn node(options: &Options) -> Result<Evidence, CollectError> {
    let mut all = answers(options, std::slice::from_ref(&options.question))?;
    // There is one for each question.
    Ok(all.swap_remove(0))
}

/// Reads the node once, for questions about many VIPs: what [`node`] would read for each, all of it
/// as it was at one moment. The question of `options` is not asked.
///
/// # Errors
/// As [`node`].
pub fn vips(options: &Options, queries: &[VipQuery]) -> Result<Vec<Evidence>, CollectError> {
    let questions: Vec<Question> = queries.iter().copied().map(Question::Vip).collect();
    answers(options, &questions)
}

/// Evidence for each of the questions, which are all about VIPs or one alone.
fn answers(options: &Options, questions: &[Question]) -> Result<Vec<Evidence>, CollectError> {
    if cfg!(target_endian = "big") {
        return Err(CollectError::BigEndian);
    }
    match &options.netns {
        Some(netns) => netns.run(|| here(options, questions))?,
        None => here(options, questions),
    }
}

/// What was read of the node for all questions together.
struct Reading<'o> {
    options: &'o Options,
    started: SystemTime,
    cpus: usize,
    bpffs: Vec<Bpffs>,
    /// Not where the questions are about tables.
    attachments: Option<(Attachments, Vec<Source>)>,
    /// Not where the questions are about tables.
    snapshot: Option<network::Snapshot>,
}

/// Reads the node, with the network namespace of this thread.
fn here(options: &Options, questions: &[Question]) -> Result<Vec<Evidence>, CollectError> {
    let started = SystemTime::now();
    let cpus = host::possible_cpus().map_err(CollectError::Cpus)?;
    let bpffs = bpffs::find(options.bpffs.as_deref())?;
    // `find` marks exactly one.
    let Some(read) = bpffs.iter().find(|bpffs| bpffs.read) else {
        return Err(CollectError::NoBpffs { looked: Vec::new() });
    };
    let cgroups = options.cgroups(questions);
    // What the maps name is asked of the network when they were read, all else beside them; the
    // threads are in the network namespace of this one.
    let (snapshot, maps, programs) = thread::scope(|scope| {
        let snapshot = (!questions.iter().all(Question::is_about_tables))
            .then(|| scope.spawn(network::Snapshot::take));
        let programs =
            (!cgroups.is_empty()).then(|| scope.spawn(|| programs::collect(&read.path, &cgroups)));
        let maps = read_maps(read, questions, cpus);
        (snapshot.map(joined), maps, programs.map(joined))
    });
    let groups = maps?;
    let reading = Reading { options, started, cpus, bpffs, attachments: programs, snapshot };
    let mut all: Vec<(usize, Evidence)> =
        groups.into_iter().flat_map(|group| reading.answer_group(questions, group)).collect();
    all.sort_by_key(|(place, _)| *place);
    Ok(all.into_iter().map(|(_, evidence)| evidence).collect())
}

/// What was read of the maps for some of the questions.
struct Group {
    /// Whole maps; of those of a question about programs, what they are.
    records: Vec<MapRecord>,
    /// The questions' places, each with the maps of which it needs single entries.
    questions: Vec<(usize, Vec<MapRecord>)>,
}

impl Reading<'_> {
    /// Evidence for the questions of a group, with their places.
    fn answer_group(&self, questions: &[Question], group: Group) -> Vec<(usize, Evidence)> {
        let Group { mut records, questions: asked } = group;
        let Some(read) = self.bpffs.iter().find(|bpffs| bpffs.read) else { return Vec::new() };
        let services_by_protocol = select::count_protocols(&records);
        let devices = devices(read, &records, |ifindex| match &self.snapshot {
            Some(snapshot) => snapshot.device_name(ifindex).map(ToOwned::to_owned),
            None => host::interface_name(ifindex),
        });
        let addresses: BTreeSet<IpAddr> = asked
            .iter()
            .filter_map(|(place, _)| match &questions[*place] {
                Question::Vip(query) => Some(query.address),
                Question::Tables(_) | Question::Datapath => None,
            })
            .collect();
        select::narrow(&mut records, &addresses);
        let mut answers = Vec::new();
        for (place, looked_up) in asked {
            let question = &questions[place];
            let (maglev, unread) = select::maglev_tables(&looked_up, self.cpus);
            let (network, of_network) = self.network(question, &records);
            let mut kept = match question {
                Question::Vip(query) => select::keep(&records, query.address, &maglev),
                // Such a question is alone.
                Question::Tables(_) | Question::Datapath => std::mem::take(&mut records),
            };
            kept.extend(looked_up);
            kept.sort_by(|one, other| one.name.cmp(&other.name));
            let mut sources: Vec<Source> = kept.iter().map(source_of).collect();
            match &self.attachments {
                Some((_, of_programs)) => sources.extend(of_programs.iter().cloned()),
                None => sources.push(not_attempted(crate::evidence::programs::DEVICES)),
            }
            sources.extend(unread);
            sources.extend(of_network);
            let evidence = Evidence {
                services_by_protocol: services_by_protocol.clone(),
                devices: devices.clone(),
                maglev,
                maps: kept,
                network,
                sources,
                ..self.about(question)
            };
            answers.push((place, evidence));
        }
        answers
    }

    /// The network, as far as it matters for a question; the records are whole.
    fn network(
        &self,
        question: &Question,
        records: &[MapRecord],
    ) -> (Option<Network>, Vec<Source>) {
        let Some(snapshot) = &self.snapshot else {
            return (None, vec![not_attempted("routes and neighbours")]);
        };
        let about = match question {
            Question::Vip(query) => select::network_question(records, query.address),
            Question::Tables(_) | Question::Datapath => NetworkQuestion::default(),
        };
        let (state, agent) = (self.options.state.clone(), self.options.agent.clone());
        let question = NetworkQuestion { state, agent, ..about };
        let (mut network, sources) = snapshot.clone().answer(&question);
        if let Some(namespace) = &mut network.namespace {
            namespace.chosen = self.options.netns.as_ref().map(ToString::to_string);
        }
        (Some(network), sources)
    }

    /// Evidence for a question, without what is in the maps and in the network.
    fn about(&self, question: &Question) -> Evidence {
        Evidence {
            schema: SCHEMA.to_owned(),
            minor: SCHEMA_MINOR,
            tool: Tool {
                name: "inspect".to_owned(),
                version: env!("CARGO_PKG_VERSION").to_owned(),
                arguments: self.options.arguments.clone(),
            },
            host: Host {
                name: host::hostname(),
                boot_id: host::boot_id(),
                kernel: host::kernel_release(),
                architecture: std::env::consts::ARCH.to_owned(),
                cpus: self.cpus,
                capabilities: host::capabilities().unwrap_or_default(),
                lockdown: host::lockdown(),
            },
            time: Time {
                started: rfc3339(self.started),
                ended: rfc3339(SystemTime::now()),
                monotonic_ns: host::monotonic_ns(),
            },
            subject: match question {
                Question::Vip(query) => Subject::Vip(*query),
                Question::Tables(_) => Subject::Tables,
                Question::Datapath => Subject::Datapath { pid: self.options.pid },
            },
            via: Vec::new(),
            bpffs: self.bpffs.clone(),
            devices: Vec::new(),
            services_by_protocol: BTreeMap::new(),
            maglev: Vec::new(),
            maps: Vec::new(),
            attachments: self.attachments.as_ref().map(|(attachments, _)| attachments.clone()),
            network: None,
            trace: None,
            injection: None,
            simulation: None,
            sources: Vec::new(),
            verdict: None,
        }
    }
}

/// What became of a map.
fn source_of(record: &MapRecord) -> Source {
    Source {
        what: record.name.clone(),
        status: match (&record.problem, record.complete) {
            (Some(_), _) => SourceStatus::Failed,
            (None, false) => SourceStatus::Partial,
            (None, true) => SourceStatus::Complete,
        },
        reason: record.problem.clone().or_else(|| {
            (!record.complete).then(|| "the map changed faster than it could be read".to_owned())
        }),
    }
}

fn not_attempted(what: &str) -> Source {
    Source {
        what: what.to_owned(),
        status: SourceStatus::NotAttempted,
        reason: Some("the question does not need it, or this version does not read it".to_owned()),
    }
}

/// What a thread returned; a panic there is one here.
fn joined<T>(thread: thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn rfc3339(time: SystemTime) -> String {
    humantime::format_rfc3339_millis(time).to_string()
}

/// The pins to read: of each kind and family the highest generation that is there.
fn plan(bpffs: &Bpffs, question: &Question) -> Vec<&'static str> {
    let (kinds, family) = match question {
        Question::Vip(query) => {
            (VIP_KINDS, Some(if query.address.is_ipv4() { Family::V4 } else { Family::V6 }))
        }
        Question::Tables(kinds) => (kinds.as_slice(), None),
        Question::Datapath => (VIP_KINDS, None),
    };
    let mut best: BTreeMap<(MapKind, Option<Family>, &str), &'static Layout> = BTreeMap::new();
    for layout in LAYOUTS {
        let wanted = kinds.contains(&layout.kind)
            && (family.is_none() || layout.family.is_none() || layout.family == family);
        if !wanted || bpffs.pins.binary_search_by(|pin| pin.as_str().cmp(layout.name)).is_err() {
            continue;
        }
        // The two conntrack tables of a family stand beside each other; else one supersedes.
        let table = if layout.kind == MapKind::Conntrack { layout.name } else { "" };
        best.entry((layout.kind, layout.family, table))
            .and_modify(|present| {
                if layout.generation > present.generation {
                    *present = layout;
                }
            })
            .or_insert(layout);
    }
    best.into_values().map(|layout| layout.name).collect()
}

/// Opens and reads the maps that the questions need: each map once.
fn read_maps(
    bpffs: &Bpffs,
    questions: &[Question],
    cpus: usize,
) -> Result<Vec<Group>, CollectError> {
    let root = Path::new(&bpffs.path);
    // Questions that need the same maps: those of an IP family.
    let mut plans: BTreeMap<Vec<&'static str>, Vec<usize>> = BTreeMap::new();
    for (place, question) in questions.iter().enumerate() {
        plans.entry(plan(bpffs, question)).or_default().push(place);
    }
    let names: BTreeSet<&'static str> = plans.keys().flatten().copied().collect();
    let mut open = Vec::new();
    let mut records = Vec::new();
    let mut denied = None;
    for &name in &names {
        match maps::open(root, name) {
            Ok(map) => open.push(map),
            Err((error, info)) => {
                records.push(maps::failed(root, name, &error, info.as_ref()));
                if error.is_permission() {
                    denied = Some(error);
                }
            }
        }
    }
    if open.is_empty()
        && let Some(error) = denied
    {
        return Err(CollectError::Permission(error));
    }
    let queries: Vec<&VipQuery> = questions
        .iter()
        .filter_map(|question| match question {
            Question::Vip(query) => Some(query),
            Question::Tables(_) | Question::Datapath => None,
        })
        .collect();
    records.extend(match questions {
        [Question::Tables(_)] => read_all(open.iter(), cpus),
        // What they are, not what is in them.
        [Question::Datapath] => {
            open.iter().map(|map| or_failed(map, map.lookup(cpus, []))).collect()
        }
        _ => select::read(&open, &queries, cpus),
    });
    let alone = plans.len() == 1;
    let mut groups = Vec::new();
    for (plan, places) in plans {
        let of_group: Vec<MapRecord> = if alone {
            std::mem::take(&mut records)
        } else {
            let of_plan = |record: &&MapRecord| plan.contains(&record.name.as_str());
            records.iter().filter(of_plan).cloned().collect()
        };
        let maps = || open.iter().filter(|map| plan.contains(&map.name.as_str()));
        let asked = places.into_iter().map(|place| {
            let looked_up = match &questions[place] {
                Question::Vip(query) => select::look_up(maps(), &of_group, query.address, cpus),
                Question::Tables(_) | Question::Datapath => Vec::new(),
            };
            (place, looked_up)
        });
        let questions = asked.collect();
        groups.push(Group { records: of_group, questions });
    }
    Ok(groups)
}

/// Reads maps whole; the services maps, by far the largest share of the work, on a thread of
/// their own.
fn read_all<'a>(open: impl Iterator<Item = &'a OpenMap>, cpus: usize) -> Vec<MapRecord> {
    let (services, rest): (Vec<_>, Vec<_>) =
        open.partition(|map| map.layout.kind == MapKind::Services);
    let read = |maps: Vec<&OpenMap>| -> Vec<MapRecord> {
        maps.into_iter().map(|map| or_failed(map, map.read(cpus))).collect()
    };
    thread::scope(|scope| {
        let services = scope.spawn(|| read(services));
        let mut records = read(rest);
        match services.join() {
            Ok(services) => records.extend(services),
            Err(panic) => std::panic::resume_unwind(panic),
        }
        records
    })
}

/// The record, or one that says why there is none.
fn or_failed(map: &OpenMap, result: Result<MapRecord, MapError>) -> MapRecord {
    result.unwrap_or_else(|error| {
        let root = map.path.ancestors().nth(3).unwrap_or(Path::new("/"));
        maps::failed(root, &map.name, &error, Some(&map.info))
    })
}

/// Devices that pins and maps name, with the names that they have here and now.
fn devices(
    bpffs: &Bpffs,
    records: &[MapRecord],
    name: impl Fn(u32) -> Option<String>,
) -> Vec<Device> {
    let mut named: BTreeMap<u32, Vec<String>> = BTreeMap::new();
    for pin in &bpffs.pins {
        if let Some(index) = pin.strip_prefix("cilium_calls_netdev_")
            && let Ok(index) = index.parse()
        {
            named.entry(index).or_default().push(pin.clone());
        }
    }
    for record in records {
        let offset = match record.kind() {
            Some((MapKind::Devices, _, _)) => 0,
            Some((MapKind::L2Responder, Some(Family::V4), _)) => 4,
            Some((MapKind::L2Responder, Some(Family::V6), _)) => 16,
            _ => continue,
        };
        for (key, value) in record.entries.iter() {
            let Some(index) = key.get(offset..offset + 4).and_then(|bytes| bytes.try_into().ok())
            else {
                continue;
            };
            // An array has all its elements; the empty ones name no device.
            if offset == 0 && value.iter().all(|&byte| byte == 0) {
                continue;
            }
            let by = named.entry(u32::from_le_bytes(index)).or_default();
            if !by.contains(&record.name) {
                by.push(record.name.clone());
            }
        }
    }
    named
        .into_iter()
        .map(|(ifindex, named_by)| Device { ifindex, name: name(ifindex), named_by })
        .collect()
}
