//! The program tier: entry and exit of Cilium's own programs at ingress of the watched devices.
//!
//! Of what a program tail-calls nothing is seen but the end: the exit of the program that is
//! attached is that of the whole chain, with its verdict and the packet as it left it. One program
//! may be attached to several devices, so that the packet tells the device.
//!
//! The agent may replace its programs at any moment. Ours hold the old one, and see no more packets:
//! so it is looked again from time to time, and what is new is traced from then on.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use aya::Ebpf;
use aya::maps::{Array, Map, MapData};
use aya_obj::Object;
use aya_obj::generated::bpf_map_type;
use inspector_common::observe::name;

use super::observe::TierStatus;
use super::offsets::Kernel;
use super::sighting::{Hook, RanProgram, Tier};
use crate::sys::around::{self, Around, Refused, When};
use crate::sys::btf::Btf;
use crate::sys::host;
use crate::sys::program::{self, ProgramInfo, Target, attach_type};
use crate::sys::tc::{Direction, RouteSocket};

/// Programs that are traced at most: each costs two of our own. The devices on which clients'
/// packets arrive come first.
const MOST: usize = 16;

/// How often it is looked whether programs were replaced.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// How often a program is asked for anew that is gone between question and use.
const TRIES: usize = 2;

/// Why nothing of the tier works where the kernel refuses it to everybody.
const LOCKED: &str = "this kernel refuses to trace programs (EPERM of BPF_PROG_LOAD, with every \
                      capability that it takes): kernel lockdown, or another policy";

/// What it takes; opening a program by its id is for the last one.
pub(super) const CAPABILITIES: [&str; 3] = ["CAP_BPF", "CAP_PERFMON", "CAP_SYS_ADMIN"];

/// What is missing where that is.
const WHAT: &str = "entry and exit of Cilium's programs";

/// What is traced, as long as this lives.
pub(super) struct Programs {
    /// Our programs, not yet bound to maps.
    object: Option<Object>,
    /// Descriptors of their maps, by name; of its own is the one that names the program.
    maps: BTreeMap<String, OwnedFd>,
    /// Where packets come in.
    devices: Vec<(String, u32)>,
    /// Inode number of the network namespace that they are in.
    netns: u32,
    /// Programs that are or were traced, by id.
    traced: BTreeMap<u32, Traced>,
    /// Names of all that were ever traced.
    names: BTreeMap<u32, String>,
    /// Those that could not be, and why.
    refused: BTreeMap<u32, (String, String)>,
    /// Those that are not Cilium's.
    others: BTreeSet<u32>,
    /// Which programs were where when it was last looked.
    seen: BTreeMap<u32, BTreeSet<u32>>,
    /// What was replaced meanwhile, by device and name.
    replaced: Vec<(String, String)>,
    /// Why nothing can be traced.
    reason: Option<String>,
    looked: Instant,
}

/// One program, and what holds ours.
struct Traced {
    name: String,
    /// Closing them detaches.
    _links: [OwnedFd; 2],
}

/// A program of Cilium's that is attached.
struct Found {
    info: ProgramInfo,
    fd: OwnedFd,
    name: String,
    /// Type id of its first function, in its BTF.
    function: Option<u32>,
}

impl Programs {
    /// Traces what is attached to these devices now. `netns` is the inode number of this thread's
    /// network namespace.
    pub(super) fn start(
        ebpf: &Ebpf,
        bytes: &[u8],
        kernel: &Kernel,
        netns: u32,
        devices: Vec<(String, u32)>,
    ) -> Self {
        let mut programs = Self {
            object: None,
            maps: BTreeMap::new(),
            devices,
            netns,
            traced: BTreeMap::new(),
            names: BTreeMap::new(),
            refused: BTreeMap::new(),
            others: BTreeSet::new(),
            seen: BTreeMap::new(),
            replaced: Vec::new(),
            reason: kernel.base.clone(),
            looked: Instant::now(),
        };
        if programs.reason.is_none() {
            programs.look(Some((ebpf, bytes)));
        }
        programs
    }

    /// Looks again, if it is time to; whether something is traced that was not, or the other way
    /// round. It does nothing in another network namespace than that of the devices.
    pub(super) fn follow(&mut self) -> bool {
        if self.reason.is_some() || self.looked.elapsed() < LOOK_EVERY {
            return false;
        }
        self.looked = Instant::now();
        if !super::observe::netns().is_ok_and(|netns| netns == self.netns) {
            return false;
        }
        self.look(None)
    }

    /// What is known of the program with this id.
    pub(super) fn named(&self, id: u32) -> Option<RanProgram> {
        let name = self.names.get(&id)?.clone();
        Some(RanProgram { id, name })
    }

    fn look(&mut self, first: Option<(&Ebpf, &[u8])>) -> bool {
        let mut now = self.at_devices();
        let known: BTreeSet<u32> =
            self.traced.keys().chain(self.refused.keys()).chain(&self.others).copied().collect();
        let mut fresh: Vec<u32> = Vec::new();
        for (_, ifindex) in &self.devices {
            for id in now.get(ifindex).into_iter().flatten() {
                if !known.contains(id) && !fresh.contains(id) {
                    fresh.push(*id);
                }
            }
        }
        if fresh.is_empty() && now == self.seen {
            return false;
        }
        // What is gone between the question and the use was replaced: that is asked for anew.
        let mut found = Vec::new();
        for attempt in 1..=TRIES {
            let mut gone = false;
            found.clear();
            for id in &fresh {
                match Found::open(*id) {
                    Ok(Some(one)) => found.push(one),
                    Ok(None) => {
                        self.others.insert(*id);
                    }
                    Err(error) if error.raw_os_error() == Some(libc::ENOENT) => gone = true,
                    Err(error) => {
                        let what = format!("program {id}");
                        let why = match error.raw_os_error() {
                            Some(libc::EPERM) => "needs CAP_SYS_ADMIN".to_owned(),
                            _ => format!("opening it: {error}"),
                        };
                        self.refused.insert(*id, (what, why));
                    }
                }
            }
            if !gone || attempt == TRIES {
                break;
            }
            now = self.at_devices();
            fresh = now
                .values()
                .flatten()
                .copied()
                .filter(|id| !known.contains(id))
                .collect::<BTreeSet<_>>()
                .into_iter()
                .collect();
        }
        if let Some((ebpf, bytes)) = first {
            // Where nothing can be traced, nothing has to be made ready.
            let refused = found.iter().find(|one| one.function.is_some());
            let refused = refused.and_then(Found::refusal);
            let prepared = refused.map_or_else(|| self.prepare(ebpf, bytes), Err);
            if let Err(why) = prepared {
                self.reason = Some(why);
                return true;
            }
        }
        // Between the end of one and the beginning of the next something may have come by.
        for (device, ifindex) in &self.devices {
            let (before, after) = (self.seen.get(ifindex), now.get(ifindex));
            let gone = before.into_iter().flatten().filter(|id| {
                self.traced.contains_key(id) && !after.is_some_and(|after| after.contains(id))
            });
            for id in gone {
                let name = self.names.get(id).map_or("", String::as_str);
                let replaced = (device.clone(), format!("{name} (program {id})"));
                if first.is_none() && !self.replaced.contains(&replaced) {
                    self.replaced.push(replaced);
                }
            }
        }
        let attached: BTreeSet<u32> = now.values().flatten().copied().collect();
        self.traced.retain(|id, _| attached.contains(id));
        self.refused.retain(|id, _| attached.contains(id));
        self.others.retain(|id| attached.contains(id));
        let room = MOST.saturating_sub(self.traced.len());
        for one in found.split_off(room.min(found.len())) {
            let why = format!("more than {MOST} programs are not traced");
            self.refused.insert(one.info.id, (one.label(), why));
        }
        for (one, result) in self.trace_all(found) {
            match result {
                Ok(links) => {
                    self.names.insert(one.info.id, one.name.clone());
                    self.traced.insert(one.info.id, Traced { name: one.name, _links: links });
                }
                Err(why) => {
                    self.refused.insert(one.info.id, (one.label(), why));
                }
            }
        }
        self.seen = now;
        true
    }

    /// Ids of the programs at ingress of each device, our own and other kinds included. A device
    /// that is gone has none.
    fn at_devices(&self) -> BTreeMap<u32, BTreeSet<u32>> {
        let mut route = RouteSocket::open().ok();
        let classifiers = route.as_mut().and_then(|route| route.classifiers().ok());
        let mut all = BTreeMap::new();
        for (_, ifindex) in &self.devices {
            let mut here = BTreeSet::new();
            // The peer of a netkit pair sends, and this end receives.
            for attach_type in [attach_type::TCX_INGRESS, attach_type::NETKIT_PEER] {
                let found = program::query(Target::Device(*ifindex), attach_type);
                here.extend(found.into_iter().flatten().map(|one| one.program));
            }
            if let Some(route) = &mut route
                && classifiers.as_ref().is_some_and(|all| all.contains_key(ifindex))
                && let Ok(filters) = route.filters(*ifindex, Direction::Ingress)
            {
                here.extend(filters.iter().filter_map(|one| one.bpf.as_ref()?.program));
            }
            all.insert(*ifindex, here);
        }
        all
    }

    /// Takes our programs out of the object file, and keeps the maps open that they use.
    fn prepare(&mut self, ebpf: &Ebpf, bytes: &[u8]) -> Result<(), String> {
        let mut object = Object::parse(bytes).map_err(|error| format!("our programs: {error}"))?;
        let others: BTreeSet<(usize, u64)> = object
            .programs
            .iter()
            .filter(|(program, _)| !name::AROUND.contains(&program.as_str()))
            .map(|(_, program)| program.function_key())
            .collect();
        object.programs.retain(|program, _| name::AROUND.contains(&program.as_str()));
        object.functions.retain(|key, _| !others.contains(key));
        for (name, map) in ebpf.maps() {
            let (Map::Array(data)
            | Map::PerCpuArray(data)
            | Map::HashMap(data)
            | Map::RingBuf(data)) = map
            else {
                continue;
            };
            let fd = data.fd().as_fd().try_clone_to_owned();
            let fd = fd.map_err(|error| format!("a descriptor of map {name}: {error}"))?;
            self.maps.insert(name.to_owned(), fd);
        }
        self.object = Some(object);
        Ok(())
    }

    /// Traces these, several at a time: the verifier takes most of the time.
    fn trace_all(&self, found: Vec<Found>) -> Vec<(Found, Result<[OwnedFd; 2], String>)> {
        let threads = thread::available_parallelism().map_or(1, usize::from).min(found.len());
        let queue = Mutex::new(found.into_iter());
        let done = Mutex::new(Vec::new());
        let work = || {
            loop {
                let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some(one) = next else { break };
                let result = self.trace(&one);
                done.lock().unwrap_or_else(PoisonError::into_inner).push((one, result));
            }
        };
        thread::scope(|scope| {
            for _ in 1..threads {
                // Without it, it takes longer.
                let _ = thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
        done.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// Loads and attaches ours for one program.
    fn trace(&self, found: &Found) -> Result<[OwnedFd; 2], String> {
        let function = found.function.ok_or(
            "it was loaded without BTF, by which alone its entry and exit can be found".to_owned(),
        )?;
        let object = self.object.as_ref().ok_or("our programs were not read")?;
        let target = target(found.info.id)?;
        let mut object = object.clone();
        let text = object.functions.keys().map(|(section, _)| *section).collect();
        let maps: Vec<(String, aya_obj::Map)> = object.maps.drain().collect();
        let descriptors = maps.iter().filter_map(|(map, definition)| {
            let fd = if map == name::TARGET { &target } else { self.maps.get(map)? };
            Some((map.as_str(), fd.as_raw_fd(), definition))
        });
        object.relocate_maps(descriptors, &text).map_err(|error| error.to_string())?;
        object.relocate_calls(&text).map_err(|error| error.to_string())?;
        let [entry, exit] = [(name::AROUND[0], When::Entry), (name::AROUND[1], When::Exit)]
            .map(|(program, when)| load(&object, program, when, found, function));
        let (entry, exit) = (entry?, exit?);
        // The exit first: what is seen at the entry then has one.
        let exit = around::attach(exit.as_fd());
        let exit = exit.map_err(|error| format!("attaching to its exit: {error}"))?;
        let entry = around::attach(entry.as_fd());
        let entry = entry.map_err(|error| format!("attaching to its entry: {error}"))?;
        Ok([entry, exit])
    }

    /// What is traced and what is not.
    pub(super) fn status(&self) -> TierStatus {
        let mut attached = Vec::new();
        let mut missing = Vec::new();
        let mut whole: Vec<u32> = Vec::new();
        for (device, ifindex) in &self.devices {
            let here = self.seen.get(ifindex);
            let (before, without) = (attached.len(), missing.len());
            for id in here.into_iter().flatten() {
                if let Some(traced) = self.traced.get(id) {
                    attached.push(format!("{} on {device} (program {id})", traced.name));
                } else if let Some((what, why)) = self.refused.get(id) {
                    missing.push((format!("{what} on {device}"), why.clone()));
                }
            }
            for (_, what) in self.replaced.iter().filter(|(on, _)| on == device) {
                let why = "it is not attached there any more, and what came by until another one \
                           was traced was not seen";
                missing.push((format!("{what} on {device}"), why.to_owned()));
            }
            if attached.len() > before && missing.len() == without {
                whole.push(*ifindex);
            }
        }
        let reason = match (&self.reason, &attached[..], &missing[..]) {
            (Some(why), ..) | (None, [], [(_, why), ..]) => Some(why.clone()),
            (None, [], []) => {
                Some("no program of Cilium's is at ingress of the watched devices".to_owned())
            }
            _ => None,
        };
        if missing.is_empty()
            && let Some(why) = &reason
        {
            missing.push((WHAT.to_owned(), why.clone()));
        }
        let hooks = if whole.is_empty() {
            Vec::new()
        } else {
            [Hook::ProgramEntry, Hook::ProgramExit].map(|hook| (hook, Some(whole.clone()))).into()
        };
        TierStatus { tier: Tier::Program, hooks, attached, missing, reason }
    }
}

/// A map of its own, which says what program it is about.
fn target(id: u32) -> Result<OwnedFd, String> {
    let definition =
        aya_obj::Map::new_from_params(bpf_map_type::BPF_MAP_TYPE_ARRAY as u32, 4, 4, 1, 0);
    let failed = |error: &dyn std::fmt::Display| format!("map {}: {error}", name::TARGET);
    let data = MapData::create(definition, name::TARGET, None).map_err(|error| failed(&error))?;
    let fd = data.fd().as_fd().try_clone_to_owned().map_err(|error| failed(&error))?;
    let mut map: Array<_, u32> = Map::Array(data).try_into().map_err(|error| failed(&error))?;
    map.set(0, id, 0).map_err(|error| failed(&error))?;
    Ok(fd)
}

fn load(
    object: &Object,
    program: &'static str,
    when: When,
    found: &Found,
    function: u32,
) -> Result<OwnedFd, String> {
    let missing = || format!("this build has no program {program}");
    let key = object.programs.get(program).ok_or_else(missing)?.function_key();
    let code = object.functions.get(&key).ok_or_else(missing)?;
    let instructions: Vec<[u8; 8]> = code
        .instructions
        .iter()
        .map(|one| {
            // SAFETY: an instruction is 8 bytes of integers without padding.
            unsafe { std::mem::transmute_copy::<aya_obj::generated::bpf_insn, [u8; 8]>(one) }
        })
        .collect();
    let around = Around {
        name: program,
        instructions: &instructions,
        license: &object.license,
        when,
        target: found.fd.as_fd(),
        function,
    };
    around::load(&around).map_err(|error| sentence(&error))
}

/// Why it was refused, in one clause.
fn sentence(refused: &Refused) -> String {
    match refused.source.raw_os_error() {
        // CAP_SYS_ADMIN holds the others.
        Some(libc::EPERM) if holds("CAP_SYS_ADMIN") => LOCKED.to_owned(),
        Some(libc::EPERM) => format!("{refused}: needs {}", CAPABILITIES.join(", ")),
        Some(ENOTSUPP) => "this kernel cannot trace programs on this kind of processor".to_owned(),
        _ => refused.to_string(),
    }
}

/// Whether this kernel lets programs be traced, as far as can be told without attaching anything:
/// one that does nothing is loaded for one of Cilium's. Why not, in one clause, in the words of
/// [`Programs::status`]. Where there is none of Cilium's, nothing speaks against it.
pub(super) fn refusal() -> Option<String> {
    let attached = crate::collect::programs::attached_now().ok()?;
    let found = attached.iter().filter_map(|(_, _, id)| Found::open(*id).ok()?);
    found.filter(|one| one.function.is_some()).take(1).find_map(|one| one.refusal())
}

/// The kernel's own number where there are no trampolines for this processor.
const ENOTSUPP: i32 = 524;

fn holds(capability: &str) -> bool {
    host::capabilities().is_ok_and(|held| held.iter().any(|one| one == capability))
}

impl Found {
    /// The program with this id, if it is one of Cilium's.
    fn open(id: u32) -> io::Result<Option<Self>> {
        let fd = program::open(id)?;
        let info = program::info(fd.as_fd())?;
        if name::CLASSIFIERS.contains(&info.name.as_str()) {
            return Ok(None);
        }
        // The kernel keeps 15 bytes of a name: BTF has all of it.
        let bytes = (info.btf != 0).then(|| program::btf(info.btf)).transpose()?;
        let btf = bytes.as_deref().and_then(Btf::new);
        let function = info.function.filter(|_| btf.is_some());
        let whole = function.and_then(|id| btf.as_ref()?.function(id));
        let name = whole.unwrap_or(&info.name).to_owned();
        Ok(is_ciliums(&name).then(|| Self { info, fd, name, function }))
    }

    /// Why this kernel lets no program be traced, if it refuses that with `EPERM`: a program that
    /// does nothing is loaded for this one, and not attached.
    fn refusal(&self) -> Option<String> {
        /// `r0 = 0; exit`
        const NOTHING: [[u8; 8]; 2] = [[0xb7, 0, 0, 0, 0, 0, 0, 0], [0x95, 0, 0, 0, 0, 0, 0, 0]];
        let around = Around {
            name: name::AROUND[0],
            instructions: &NOTHING,
            license: c"Dual MIT/GPL",
            when: When::Entry,
            target: self.fd.as_fd(),
            function: self.function?,
        };
        let refused = around::load(&around).err()?;
        let is_general = matches!(refused.source.raw_os_error(), Some(libc::EPERM | ENOTSUPP));
        is_general.then(|| sentence(&refused))
    }

    fn label(&self) -> String {
        format!("{} (program {})", self.name, self.info.id)
    }
}

/// Whether a program's name is one of Cilium's.
fn is_ciliums(name: &str) -> bool {
    name.starts_with("cil_")
}
