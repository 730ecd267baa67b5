//! What the attached programs mean: for each device and socket hook, whether what runs there
//! load-balances from the very maps that were read.
//!
//! A program on a device is not enough: it must be Cilium's, reach the pinned services map (itself
//! or through tail calls), and be met by the packet before something else ends the chain.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque},
    fmt,
};

use inspector_common::observe::name::CLASSIFIERS;
use schemars::JsonSchema;
use serde::Serialize;

use super::{Finding, FindingId, attached::is_inner};
use crate::{
    cilium::layout::{Family, MapKind},
    evidence::{
        Evidence, MapRecord, SourceStatus,
        programs::{
            Attachments, CgroupHook, DETAILS, DEVICES, DeviceHook, Filter, HookKind, OtherFilter,
            PinnedLink, Program, UsedMap,
        },
    },
};

/// Whether something reaches the pinned services map of one family.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case", tag = "reaches")]
pub enum Reach {
    /// The program uses the map itself.
    Itself,
    /// A program that it tail-calls does.
    TailCall {
        /// Names of the programs on the way, the one that uses the map last.
        via: Vec<String>,
    },
    /// It uses a map of the same name and layout, but another one: what the pinned map says is not
    /// what this program does.
    OtherMap {
        /// Id of the map that it uses.
        map: u32,
    },
    /// It reaches no services map: Cilium's program may be there for another purpose.
    No,
    /// There is no program that could.
    NoProgram,
    /// It could not be told.
    Unknown {
        /// What is missing.
        why: String,
    },
}

impl Reach {
    /// Yes, no, or unknown.
    #[must_use]
    pub fn known(&self) -> Option<bool> {
        match self {
            Self::Itself | Self::TailCall { .. } => Some(true),
            Self::OtherMap { .. } | Self::No | Self::NoProgram => Some(false),
            Self::Unknown { .. } => None,
        }
    }

    /// The more a packet gets of it, the lower.
    fn rank(&self) -> u8 {
        match self {
            Self::Itself => 0,
            Self::TailCall { .. } => 1,
            Self::Unknown { .. } => 2,
            Self::OtherMap { .. } => 3,
            Self::No => 4,
            Self::NoProgram => 5,
        }
    }
}

impl fmt::Display for Reach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Itself => f.write_str("itself"),
            Self::TailCall { .. } => f.write_str("tail call"),
            Self::OtherMap { map } => write!(f, "OTHER MAP {map}"),
            Self::No => f.write_str("no"),
            Self::NoProgram => f.write_str("no program"),
            Self::Unknown { .. } => f.write_str("unknown"),
        }
    }
}

/// What holds a program at its hook.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case", tag = "held_by")]
pub enum Holder {
    /// The hook itself: a clsact filter, or XDP set by netlink.
    Hook,
    /// A link that Cilium pinned.
    Pinned {
        /// Link id.
        link: u32,
        /// Path of the pin.
        path: String,
    },
    /// A link without a pin of Cilium's: it is gone with the process that holds it.
    Unpinned {
        /// Link id.
        link: u32,
    },
}

/// A program on a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct HookProgram {
    /// The hook.
    pub hook: HookKind,
    /// Place in the chain of this hook, from 0.
    pub order: u32,
    /// Program id.
    pub program: u32,
    /// Its name, where it is known.
    pub name: Option<String>,
    /// The name of the filter, for clsact.
    pub filter: Option<String>,
    /// Whether it is Cilium's.
    pub is_cilium: bool,
    /// What holds it there.
    pub holder: Holder,
    /// Whether it reaches the pinned IPv4 services map; nothing if none was read.
    pub services_v4: Option<Reach>,
    /// Whether it reaches the pinned IPv6 services map; nothing if none was read.
    pub services_v6: Option<Reach>,
    /// Whether services are translated at this hook by this kind of program, if it can at all: not
    /// by `cil_to_netdev` and its like, which share the tail calls of their device.
    pub translates: bool,
    /// Values of its read-only data, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub constants: BTreeMap<String, u64>,
}

impl HookProgram {
    /// Whether it reaches the pinned services map of this family.
    #[must_use]
    pub fn services(&self, family: Family) -> Option<&Reach> {
        match family {
            Family::V4 => self.services_v4.as_ref(),
            Family::V6 => self.services_v6.as_ref(),
        }
    }
}

/// Something foreign that a packet meets before Cilium's program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Shadow {
    /// The hook that Cilium's program is on.
    pub hook: HookKind,
    /// Cilium's program.
    pub shadowed: u32,
    /// The hook of the foreign one.
    pub foreign_hook: HookKind,
    /// What it is: a program's name and id, or a filter.
    pub foreign: String,
    /// Whether it can keep a packet from Cilium's program: not our own observer, and not a filter
    /// for another protocol than IP.
    pub can_end: bool,
}

/// The same Cilium program more than once in one direction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Duplicate {
    /// Its name.
    pub name: String,
    /// Hook and program id of each.
    pub at: Vec<(HookKind, u32)>,
}

/// What runs on a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct DeviceDatapath {
    /// Interface index.
    pub ifindex: u32,
    /// Its name, where it is known.
    pub name: Option<String>,
    /// All programs, in the order in which an arriving packet meets them, egress after ingress.
    pub programs: Vec<HookProgram>,
    /// clsact filters that are no BPF programs.
    pub other_filters: Vec<OtherFilter>,
    /// Cilium's programs at ingress that something foreign comes before.
    pub shadows: Vec<Shadow>,
    /// Cilium's programs that are there more than once.
    pub duplicates: Vec<Duplicate>,
    /// Why it is not known what runs here, where it is not.
    pub unknown: Option<String>,
}

impl DeviceDatapath {
    /// The programs that an arriving packet meets, in order: XDP, tcx or netkit, clsact.
    pub fn ingress(&self) -> impl Iterator<Item = &HookProgram> {
        self.programs.iter().filter(|program| is_ingress(program.hook))
    }

    /// Whether a packet that arrives on this device can be looked up in the pinned services map of
    /// this family: the best that Cilium's programs at ingress do. `None` if no such map was read.
    ///
    /// Programs that come before are told of in [`shadows`](Self::shadows); they are no part of
    /// this answer.
    #[must_use]
    pub fn services(&self, family: Family) -> Option<Reach> {
        let best = self
            .ingress()
            .filter(|program| program.is_cilium && program.translates)
            .filter_map(|program| program.services(family))
            .min_by_key(|reach| reach.rank())
            .cloned();
        let unknown = || self.unknown.clone().map(|why| Reach::Unknown { why });
        match best {
            Some(reach) if reach.known() == Some(true) => Some(reach),
            Some(reach) => Some(unknown().unwrap_or(reach)),
            // Without a program it matters not whether the map was read.
            None => {
                let is_cilium = self.ingress().any(|one| one.is_cilium && one.translates);
                if is_cilium { None } else { Some(unknown().unwrap_or(Reach::NoProgram)) }
            }
        }
    }

    /// Whether any program here is Cilium's.
    #[must_use]
    pub fn has_cilium(&self) -> bool {
        self.programs.iter().any(|program| program.is_cilium)
    }

    /// The first foreign thing that can keep a packet from Cilium's program at ingress.
    #[must_use]
    pub fn shadowed_by(&self) -> Option<&Shadow> {
        self.shadows.iter().find(|shadow| shadow.can_end)
    }
}

/// A program on a socket hook.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct SocketProgram {
    /// The hook: `connect4`, `sendmsg6`, ….
    pub hook: String,
    /// Place in the order of execution, from 0.
    pub order: u32,
    /// Program id.
    pub program: u32,
    /// Its name, where it is known.
    pub name: Option<String>,
    /// Whether it is Cilium's.
    pub is_cilium: bool,
    /// Whether it reaches the pinned services map of the hook's family; nothing if none was read,
    /// or the hook has no family.
    pub services: Option<Reach>,
}

/// The socket hooks in force for one cgroup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct SocketDatapath {
    /// Whose cgroup: `root`, `self` or `pid N`.
    pub subject: String,
    /// Path of the cgroup below the cgroup2 mount, where it was found.
    pub cgroup: Option<String>,
    /// Why it could not be asked, where it could not.
    pub problem: Option<String>,
    /// The programs, by hook, in the order of execution.
    pub programs: Vec<SocketProgram>,
}

impl SocketDatapath {
    /// Whether what a process does at this hook (`connect4`, `sendmsg6`, …) is looked up in the
    /// pinned services map. `None` if no such map was read.
    #[must_use]
    pub fn services(&self, hook: &str) -> Option<Reach> {
        if let Some(why) = &self.problem {
            return Some(Reach::Unknown { why: why.clone() });
        }
        let mut here = self.programs.iter().filter(|one| one.hook == hook && one.is_cilium);
        let Some(first) = here.next() else { return Some(Reach::NoProgram) };
        std::iter::once(first)
            .chain(here)
            .filter_map(|one| one.services.clone())
            .min_by_key(Reach::rank)
    }
}

/// A pinned map of which attached programs use another one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct StaleMap {
    /// Name of the pin.
    pub name: String,
    /// Id of the pinned map.
    pub pinned: u32,
    /// Id of the map of the same name and layout that programs use.
    pub used: u32,
    /// Ids of the attached Cilium programs that reach it.
    pub programs: Vec<u32>,
}

/// Why a pinned link holds nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct IdlePin {
    /// Path of the pin.
    pub path: String,
    /// Program id.
    pub program: u32,
    /// Why.
    pub why: String,
}

/// Everything about the attached programs of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Datapath {
    /// Every device, by index.
    pub devices: Vec<DeviceDatapath>,
    /// The socket hooks of each cgroup that was asked for.
    pub sockets: Vec<SocketDatapath>,
    /// Pinned links that hold nothing.
    pub idle_pins: Vec<IdlePin>,
    /// Pinned maps of which attached programs use another one.
    pub stale_maps: Vec<StaleMap>,
    /// What is wrong, worst first.
    pub findings: Vec<Finding>,
}

/// What runs on one device. `None` if attached programs were not read.
#[must_use]
pub fn device(evidence: &Evidence, ifindex: u32) -> Option<DeviceDatapath> {
    Some(View::new(evidence)?.device(ifindex))
}

/// What is in force for a subject (`root`, `self`, `pid N`). `None` if it was not asked for.
#[must_use]
pub fn socket(evidence: &Evidence, subject: &str) -> Option<SocketDatapath> {
    View::new(evidence)?.socket(subject)
}

/// Everything. `None` if attached programs were not read.
#[must_use]
pub fn datapath(evidence: &Evidence) -> Option<Datapath> {
    let view = View::new(evidence)?;
    let attachments = view.attachments;
    let indexes: BTreeSet<u32> = attachments
        .devices
        .iter()
        .map(|device| device.ifindex)
        .chain(attachments.hooks.iter().map(|hook| hook.ifindex))
        .collect();
    let devices: Vec<_> = indexes.into_iter().map(|ifindex| view.device(ifindex)).collect();
    let sockets: Vec<_> =
        attachments.cgroups.iter().filter_map(|asked| view.socket(&asked.subject)).collect();
    let idle_pins = idle_pins(attachments);
    let stale_maps = view.stale_maps();
    let mut findings = findings(attachments, &devices, &idle_pins, &stale_maps);
    findings.extend(without_datapath(evidence, &devices));
    findings.sort_by_key(|finding| finding.severity);
    Some(Datapath { devices, sockets, idle_pins, stale_maps, findings })
}

/// Devices that Cilium's state names as managed and on which none of its programs is met.
fn without_datapath(evidence: &Evidence, devices: &[DeviceDatapath]) -> Vec<Finding> {
    let is_met = |ifindex: u32| {
        devices.iter().any(|device| {
            device.ifindex == ifindex
                && (device.unknown.is_some()
                    || device.ingress().any(|program| program.is_cilium && program.translates))
        })
    };
    evidence
        .devices
        .iter()
        .filter(|device| !is_met(device.ifindex))
        .filter_map(|device| {
            let name = device.name.as_deref().filter(|name| !is_inner(name))?;
            Some(Finding {
                id: FindingId::DeviceNoDatapath,
                severity: FindingId::DeviceNoDatapath.severity(),
                frontend: None,
                path: Some(format!("forwarded via {name}")),
                seen: format!(
                    "{name}: Cilium's state names it ({}), and no program of Cilium's is met by a \
                     packet that arrives there",
                    device.named_by.join(", ")
                ),
                meaning: "packets that arrive there go up the stack untranslated".to_owned(),
                next: "restart the agent, which attaches its programs again".to_owned(),
            })
        })
        .collect()
}

/// Whether a hook is met by an arriving packet.
fn is_ingress(hook: HookKind) -> bool {
    match hook {
        HookKind::XdpNative
        | HookKind::XdpGeneric
        | HookKind::XdpOffload
        | HookKind::TcxIngress
        | HookKind::ClsactIngress
        // What a pod sends passes the peer's program, which is its way in to the host.
        | HookKind::NetkitPeer => true,
        HookKind::TcxEgress | HookKind::ClsactEgress | HookKind::NetkitPrimary => false,
    }
}

/// What the questions need of the evidence.
struct View<'a> {
    evidence: &'a Evidence,
    attachments: &'a Attachments,
    services_v4: Option<&'a MapRecord>,
    services_v6: Option<&'a MapRecord>,
    /// By id: a node has thousands of programs, each of which is asked about often.
    programs: HashMap<u32, &'a Program>,
    maps: HashMap<u32, &'a UsedMap>,
    hooks: HashMap<u32, Vec<&'a DeviceHook>>,
}

impl<'a> View<'a> {
    fn new(evidence: &'a Evidence) -> Option<Self> {
        let services = |family| {
            evidence
                .maps
                .iter()
                .filter(|map| {
                    map.id != 0
                        && matches!(map.kind(), Some((MapKind::Services, Some(of), _)) if of == family)
                })
                .max_by_key(|map| map.kind().map(|(_, _, generation)| generation))
        };
        let attachments = evidence.attachments.as_ref()?;
        let mut hooks: HashMap<u32, Vec<&DeviceHook>> = HashMap::new();
        for hook in &attachments.hooks {
            hooks.entry(hook.ifindex).or_default().push(hook);
        }
        Some(Self {
            evidence,
            attachments,
            programs: attachments.programs.iter().map(|one| (one.id, one)).collect(),
            maps: attachments.maps.iter().map(|one| (one.id, one)).collect(),
            hooks,
            services_v4: services(Family::V4),
            services_v6: services(Family::V6),
        })
    }

    /// Why a source was not read as far as it should, if it was not.
    fn missing(&self, what: &str) -> Option<String> {
        self.evidence
            .sources
            .iter()
            .find(|source| source.what == what && source.status == SourceStatus::Failed)
            .map(|source| {
                source.reason.clone().unwrap_or_else(|| format!("{what} could not be read"))
            })
    }

    fn device(&self, ifindex: u32) -> DeviceDatapath {
        let other_filters = &self.attachments.other_filters;
        let mut here = self.hooks.get(&ifindex).cloned().unwrap_or_default();
        here.sort_by_key(|hook| (hook.kind, hook.order));
        let programs: Vec<HookProgram> = here.iter().map(|hook| self.hook_program(hook)).collect();
        let other_filters: Vec<OtherFilter> =
            other_filters.iter().filter(|one| one.ifindex == ifindex).cloned().collect();
        DeviceDatapath {
            ifindex,
            name: self.attachments.device_name(ifindex).map(str::to_owned),
            shadows: shadows(&here, &programs, &other_filters),
            duplicates: duplicates(&programs),
            programs,
            other_filters,
            unknown: self.missing(DEVICES),
        }
    }

    fn hook_program(&self, hook: &DeviceHook) -> HookProgram {
        let program = self.program(hook.program);
        let filter = hook.filter.as_ref().and_then(|filter| filter.name.clone());
        let name = program.map(|program| program.name.clone());
        let is_cilium = self.is_cilium(hook.program, filter.as_deref());
        let holder = match hook.link {
            None => Holder::Hook,
            Some(link) => match self.attachments.links.iter().find(|pin| pin.id == link) {
                Some(pin) => Holder::Pinned { link, path: pin.path.clone() },
                None => Holder::Unpinned { link },
            },
        };
        HookProgram {
            hook: hook.kind,
            order: hook.order,
            program: hook.program,
            translates: translates(hook.kind, name.as_deref(), filter.as_deref()),
            name,
            filter,
            is_cilium,
            holder,
            services_v4: self.services_v4.map(|map| self.reach(hook.program, map)),
            services_v6: self.services_v6.map(|map| self.reach(hook.program, map)),
            constants: program.map(|program| program.constants.clone()).unwrap_or_default(),
        }
    }

    fn socket(&self, subject: &str) -> Option<SocketDatapath> {
        let asked = self.attachments.cgroups.iter().find(|asked| asked.subject == subject)?;
        let programs = self
            .attachments
            .cgroup
            .iter()
            .filter(|hook| hook.subject == subject)
            .map(|hook| {
                let CgroupHook { attach_type, order, program, .. } = hook;
                let services = if attach_type.ends_with('4') {
                    self.services_v4
                } else if attach_type.ends_with('6') {
                    self.services_v6
                } else {
                    None
                };
                SocketProgram {
                    hook: attach_type.clone(),
                    order: *order,
                    program: *program,
                    name: self.program(*program).map(|one| one.name.clone()),
                    is_cilium: self.is_cilium(*program, None),
                    services: services.map(|map| self.reach(*program, map)),
                }
            })
            .collect();
        Some(SocketDatapath {
            subject: asked.subject.clone(),
            cgroup: asked.cgroup.clone(),
            problem: asked.problem.clone(),
            programs,
        })
    }

    /// Whether a program reaches a pinned map, by the shortest way.
    fn reach(&self, program: u32, pinned: &MapRecord) -> Reach {
        let mut other = None;
        let mut unknown = None;
        let mut seen = HashSet::from([program]);
        let mut queue = VecDeque::from([(program, Vec::new())]);
        while let Some((id, via)) = queue.pop_front() {
            let Some(found) = self.program(id) else {
                unknown.get_or_insert_with(|| {
                    self.missing(DETAILS).unwrap_or_else(|| {
                        format!("program {id} was unloaded before it could be read")
                    })
                });
                continue;
            };
            if found.maps.contains(&pinned.id) {
                return if via.is_empty() { Reach::Itself } else { Reach::TailCall { via } };
            }
            if other.is_none() {
                other = self.twin(&found.maps, pinned);
            }
            for &next in &found.tail_calls {
                if seen.insert(next) {
                    let mut via = via.clone();
                    via.push(match self.program(next) {
                        Some(program) => program.name.clone(),
                        None => format!("program {next}"),
                    });
                    queue.push_back((next, via));
                }
            }
        }
        match (other, unknown) {
            (Some(map), _) => Reach::OtherMap { map },
            (None, Some(why)) => Reach::Unknown { why },
            (None, None) => Reach::No,
        }
    }

    /// Of these maps, one that has the name and the layout of a pinned one, but is another.
    fn twin(&self, maps: &[u32], pinned: &MapRecord) -> Option<u32> {
        let mut used = maps.iter().filter_map(|id| self.maps.get(id));
        used.find(|map| is_twin(map, pinned)).map(|map| map.id)
    }

    fn program(&self, id: u32) -> Option<&'a Program> {
        self.programs.get(&id).copied()
    }

    /// Pinned maps of which attached Cilium programs use a twin, and not the pinned one.
    fn stale_maps(&self) -> Vec<StaleMap> {
        let mut stale: BTreeMap<(&str, u32, u32), BTreeSet<u32>> = BTreeMap::new();
        let mut reached_by: BTreeMap<u32, HashSet<u32>> = BTreeMap::new();
        let attached = self.attachments.hooks.iter().map(|hook| {
            (hook.program, hook.filter.as_ref().and_then(|filter| filter.name.as_deref()))
        });
        let attached =
            attached.chain(self.attachments.cgroup.iter().map(|hook| (hook.program, None)));
        for (program, filter) in attached {
            if self.is_cilium(program, filter) {
                reached_by.entry(program).or_insert_with(|| self.all_maps(program));
            }
        }
        for pinned in self.evidence.maps.iter().filter(|map| map.id != 0) {
            let twins: Vec<u32> = self
                .attachments
                .maps
                .iter()
                .filter(|map| is_twin(map, pinned))
                .map(|map| map.id)
                .collect();
            for twin in twins {
                for (program, maps) in &reached_by {
                    if maps.contains(&twin) && !maps.contains(&pinned.id) {
                        let key = (pinned.name.as_str(), pinned.id, twin);
                        stale.entry(key).or_default().insert(*program);
                    }
                }
            }
        }
        stale
            .into_iter()
            .map(|((name, pinned, used), programs)| StaleMap {
                name: name.to_owned(),
                pinned,
                used,
                programs: programs.into_iter().collect(),
            })
            .collect()
    }

    /// Whether a program is Cilium's: by its name, as the agent itself decides; where that is not
    /// known or says nothing, by its filter's name or by Cilium's pin of the link that holds it.
    fn is_cilium(&self, program: u32, filter: Option<&str>) -> bool {
        let of_cilium = |name: &str| name.starts_with("cil_");
        let described = self.program(program);
        if described.is_some_and(|program| of_cilium(&program.name)) {
            return true;
        }
        let by_filter = filter.is_some_and(|filter| {
            of_cilium(filter) || LEGACY_FILTERS.iter().any(|start| filter.starts_with(start))
        });
        let by_pin = |link: &PinnedLink| {
            link.program == program && link.path.rsplit('/').next().is_some_and(of_cilium)
        };
        by_filter || (described.is_none() && self.attachments.links.iter().any(by_pin))
    }

    /// Every map that a program or one that it can tail-call uses.
    fn all_maps(&self, program: u32) -> HashSet<u32> {
        let mut maps = HashSet::new();
        let mut seen = HashSet::new();
        let mut next = vec![program];
        while let Some(id) = next.pop() {
            if let Some(found) = self.program(id).filter(|_| seen.insert(id)) {
                maps.extend(&found.maps);
                next.extend(&found.tail_calls);
            }
        }
        maps
    }
}

/// Whether a map has the name and the layout of a pinned one, but is another.
fn is_twin(map: &UsedMap, pinned: &MapRecord) -> bool {
    // The kernel keeps 15 bytes of the name.
    let name = pinned.name.get(..15).unwrap_or(&pinned.name);
    map.id != pinned.id
        && map.name == name
        && map.map_type == pinned.map_type.0
        && (map.key_size, map.value_size) == (pinned.key_size, pinned.value_size)
}

/// Beginnings of the filter names of Cilium before its programs had names of their own.
const LEGACY_FILTERS: [&str; 5] = ["cilium-", "bpf_netdev", "bpf_host", "bpf_lxc", "bpf_overlay"];

/// Whether services are translated at this hook by this kind of program.
///
/// On ingress and XDP by every one of Cilium's but `cil_to_…` (a packet to the host or a pod is
/// past translation); on egress by `cil_from_host` alone, through which the host's own packets go.
/// Programs of one object share their tail calls, so that reach alone does not tell.
fn translates(hook: HookKind, name: Option<&str>, filter: Option<&str>) -> bool {
    let is_to = [name, filter].into_iter().flatten().any(|name| name.starts_with("cil_to_"));
    let is_from_host =
        [name, filter].into_iter().flatten().any(|name| name.starts_with("cil_from_host"));
    if is_ingress(hook) { !is_to } else { is_from_host }
}

/// What comes before Cilium's programs at ingress.
fn shadows(
    hooks: &[&DeviceHook],
    programs: &[HookProgram],
    other_filters: &[OtherFilter],
) -> Vec<Shadow> {
    let mut found = Vec::new();
    for (index, cilium) in programs.iter().enumerate() {
        if !cilium.is_cilium || !is_ingress(cilium.hook) {
            continue;
        }
        for (hook, foreign) in hooks.iter().zip(programs).take(index) {
            if foreign.is_cilium || !is_ingress(foreign.hook) {
                continue;
            }
            let name = foreign.name.as_deref().or(foreign.filter.as_deref()).unwrap_or("unknown");
            // Netkit's program and XDP are chains of their own, but all before clsact.
            found.push(Shadow {
                hook: cilium.hook,
                shadowed: cilium.program,
                foreign_hook: foreign.hook,
                foreign: format!("{name} (program {})", foreign.program),
                can_end: !CLASSIFIERS.contains(&name) && hook.filter.as_ref().is_none_or(meets_ip),
            });
        }
        if cilium.hook == HookKind::ClsactIngress {
            let priority = hooks[index].filter.as_ref().map_or(0, |filter| filter.priority);
            let before = other_filters.iter().filter(|other| {
                other.kind == HookKind::ClsactIngress
                    && other.chain == 0
                    && other.priority < priority
            });
            found.extend(before.map(|other| Shadow {
                hook: cilium.hook,
                shadowed: cilium.program,
                foreign_hook: other.kind,
                foreign: format!("{} filter of priority {}", other.filter, other.priority),
                can_end: true,
            }));
        }
    }
    found
}

/// Whether a filter is met by IP packets without a `goto` to its chain.
fn meets_ip(filter: &Filter) -> bool {
    /// `ETH_P_ALL`, `ETH_P_IP`, `ETH_P_IPV6`
    const IP: [u16; 3] = [0x0003, 0x0800, 0x86dd];
    filter.chain == 0 && IP.contains(&filter.protocol)
}

/// Cilium programs that are attached more than once in one direction.
fn duplicates(programs: &[HookProgram]) -> Vec<Duplicate> {
    let mut by_name: BTreeMap<(bool, String), Vec<(HookKind, u32)>> = BTreeMap::new();
    for program in programs.iter().filter(|program| program.is_cilium) {
        let name = program
            .name
            .clone()
            .filter(|name| name.starts_with("cil_"))
            .or_else(|| program.filter.clone())
            .unwrap_or_else(|| format!("program {}", program.program));
        by_name
            .entry((is_ingress(program.hook), name))
            .or_default()
            .push((program.hook, program.program));
    }
    by_name
        .into_iter()
        .filter(|(_, at)| at.len() > 1)
        .map(|((_, name), at)| Duplicate { name, at })
        .collect()
}

fn idle_pins(attachments: &Attachments) -> Vec<IdlePin> {
    attachments
        .links
        .iter()
        .filter_map(|link| {
            let PinnedLink { path, program, cgroup_id, ifindex, defunct, shown, kind, .. } = link;
            let why = match (defunct, shown, ifindex, cgroup_id) {
                (true, _, Some(_), _) => "its device is gone".to_owned(),
                (true, _, _, Some(_)) => "its cgroup is gone".to_owned(),
                (true, ..) => "what it was attached to is gone".to_owned(),
                (false, Some(false), Some(ifindex), _) => {
                    let name = attachments.device_name(*ifindex).unwrap_or("no device here");
                    format!(
                        "the kernel does not show it at the {kind} hook of interface {ifindex} \
                         ({name}): its device is in another network namespace"
                    )
                }
                _ => return None,
            };
            Some(IdlePin { path: path.clone(), program: *program, why })
        })
        .collect()
}

/// A device in words.
fn device_name(device: &DeviceDatapath) -> String {
    device.name.clone().unwrap_or_else(|| format!("interface {}", device.ifindex))
}

fn findings(
    attachments: &Attachments,
    devices: &[DeviceDatapath],
    idle_pins: &[IdlePin],
    stale_maps: &[StaleMap],
) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut add = |id: FindingId, path: Option<String>, seen: String, meaning: &str, next: &str| {
        found.push(Finding {
            id,
            severity: id.severity(),
            frontend: None,
            path,
            seen,
            meaning: meaning.to_owned(),
            next: next.to_owned(),
        });
    };
    for device in devices {
        let path = || Some(format!("forwarded via {}", device_name(device)));
        for Duplicate { name, at } in &device.duplicates {
            let places: Vec<String> = at
                .iter()
                .map(|(hook, id)| format!("{} (program {id})", hook_name(*hook)))
                .collect();
            add(
                FindingId::AttachDuplicate,
                path(),
                format!(
                    "{name} is attached {} times to {}: {}",
                    at.len(),
                    device_name(device),
                    places.join(", ")
                ),
                "only the first one takes effect, and it may be an old one, with old \
                 configuration and old maps",
                "remove what an earlier Cilium left (`tc filter show dev DEV ingress`, `bpftool \
                 net show`), or restart the agent, which cleans up the filters that it replaced",
            );
        }
        let mut told = BTreeSet::new();
        for Shadow { hook, foreign_hook, foreign, can_end, .. } in &device.shadows {
            if *can_end && told.insert((*foreign_hook, foreign)) {
                add(
                    FindingId::AttachShadowed,
                    path(),
                    format!(
                        "on {}, {foreign} at {} comes before Cilium's program at {}",
                        device_name(device),
                        hook_name(*foreign_hook),
                        hook_name(*hook)
                    ),
                    "a packet for which it returns a verdict of its own never meets Cilium's \
                     program and is not translated",
                    "find out whose it is (`bpftool prog show id ID`), and attach it after Cilium's \
                     or let it pass what it does not handle (TCX_NEXT, TC_ACT_UNSPEC, XDP_PASS)",
                );
            }
        }
    }
    for StaleMap { name, pinned, used, programs } in stale_maps {
        let names: BTreeSet<&str> = programs
            .iter()
            .filter_map(|id| attachments.program(*id))
            .map(|program| program.name.as_str())
            .collect();
        let names: Vec<&str> = names.into_iter().collect();
        add(
            FindingId::StalePins,
            None,
            format!(
                "{} ({} programs) use map {used}, the pin {name} is map {pinned}",
                names.join(", "),
                programs.len()
            ),
            "the programs do not see what the pinned map says, and neither does this report say \
             what they do",
            "restart the agent on this node, so that it loads its programs with the pinned maps",
        );
    }
    if !idle_pins.is_empty() {
        let (first, rest) = idle_pins.split_at(1);
        let more =
            if rest.is_empty() { String::new() } else { format!(", and {} more", rest.len()) };
        add(
            FindingId::PinHoldsNothing,
            None,
            format!("{}: {}{more}", first[0].path, first[0].why),
            "the pin proves nothing: no packet meets its program there",
            "if the device or cgroup came back under the same name, restart the agent, so that it \
             attaches its programs again; else nothing has to be done",
        );
    }
    found.sort_by_key(|finding: &Finding| finding.severity);
    found
}

/// A hook in words.
#[must_use]
pub fn hook_name(hook: HookKind) -> &'static str {
    match hook {
        HookKind::XdpNative => "xdp native",
        HookKind::XdpGeneric => "xdp generic",
        HookKind::XdpOffload => "xdp offload",
        HookKind::TcxIngress => "tcx ingress",
        HookKind::ClsactIngress => "clsact ingress",
        HookKind::NetkitPrimary => "netkit primary",
        HookKind::NetkitPeer => "netkit peer",
        HookKind::TcxEgress => "tcx egress",
        HookKind::ClsactEgress => "clsact egress",
    }
}
