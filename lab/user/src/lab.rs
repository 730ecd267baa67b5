//! A lab as a value: made by [`Builder::up`], removed when dropped.

use std::{
    fs, io,
    os::{fd::AsFd, unix::process::CommandExt},
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
};

use nix::sched::{CloneFlags, setns, unshare};

use crate::{
    bpf,
    capture::{self, Capture, CaptureError, MapSpec},
    cgroup, cluster,
    datapath::{self, Datapath, DatapathError, Xdp},
    maps::{self, MapError, MapHandle},
    netns::{self, Ns},
    network::{self, NetworkError},
    plan::{Plan, PlanError},
    server::{self, ServerError},
    signals,
    state::{self, Agent, Process, Record, StateError},
};

/// Index of the agent's liveness in `cilium_runtime_config`: `CLOCK_MONOTONIC` in nanoseconds, host
/// byte order, written once a second by the agent (`RuntimeConfigAgentLiveness` in Cilium's
/// `bpf/lib/time_cache.h` and `pkg/maps/configmap`).
const AGENT_LIVENESS: u32 = 1;

/// Why a lab could not be made or used.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// The capture could not be read.
    #[error(transparent)]
    Capture(#[from] CaptureError),
    /// Something on the machine.
    #[error(transparent)]
    State(#[from] StateError),
    /// A place that the lab does not have.
    #[error("the lab {name} has no {place}: {there}")]
    NoSuchPlace {
        /// Name of the lab.
        name: String,
        /// What was asked for.
        place: Ns,
        /// The places that there are.
        there: String,
    },
    /// Something with the network.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// The node of the capture cannot be made.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Something with a map.
    #[error(transparent)]
    Map(#[from] MapError),
    /// The stand-in datapath.
    #[error(transparent)]
    Datapath(#[from] DatapathError),
    /// A server of the lab.
    #[error(transparent)]
    Server(#[from] ServerError),
}

/// What a lab is to be made of.
#[derive(Debug, Clone, Default)]
pub struct Builder {
    capture: Option<Source>,
    only: Option<Vec<String>>,
    name: Option<String>,
    agent: Agent,
    network: bool,
    datapath: bool,
    xdp: Vec<(String, Xdp)>,
    wireguard: bool,
    /// Which node of a cluster it is, from 1; 0 if it is of none.
    number: u8,
}

#[derive(Debug, Clone)]
enum Source {
    Path(PathBuf),
    Read(Capture),
}

impl Builder {
    /// The capture at this path (see [`Capture::open`]). Without one, the lab's bpffs has an empty
    /// `tc/globals`.
    #[must_use]
    pub fn capture(mut self, path: impl Into<PathBuf>) -> Self {
        self.capture = Some(Source::Path(path.into()));
        self
    }

    /// One of the captures that are part of the project (see [`Capture::project`]).
    #[must_use]
    pub fn project(self, name: &str) -> Self {
        self.capture(capture::project_captures().join(name))
    }

    /// A capture that has been read already (see [`Capture::over`]).
    #[must_use]
    pub fn captured(mut self, capture: Capture) -> Self {
        self.capture = Some(Source::Read(capture));
        self
    }

    /// Makes only these maps of the capture: quicker, where a test needs few.
    #[must_use]
    pub fn only<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.only = Some(names.into_iter().map(Into::into).collect());
        self
    }

    /// The lab's name; by default one that no other lab has.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Whether the lab pretends that Cilium's agent lives; by default it does.
    #[must_use]
    pub fn agent(mut self, agent: Agent) -> Self {
        self.agent = agent;
        self
    }

    /// Whether the lab has a network: the node of the capture and those around it, each in a network
    /// namespace. By default it has maps alone, which is quicker.
    #[must_use]
    pub fn network(mut self, network: bool) -> Self {
        self.network = network;
        self
    }

    /// Whether the lab has a stand-in for Cilium's datapath, attached as the capture records it (and
    /// none where it records nothing), and servers where the capture has backends. It brings the
    /// network with it. By default the lab has neither.
    #[must_use]
    pub fn datapath(mut self, datapath: bool) -> Self {
        self.datapath = datapath;
        self
    }

    /// Whether `wg0` is a real `WireGuard` device, which not every kernel has, instead of a TUN device.
    /// The node knows the client's key and no endpoint: the client is the one that comes.
    #[must_use]
    pub fn wireguard(mut self, wireguard: bool) -> Self {
        self.wireguard = wireguard;
        self
    }

    /// Whether the datapath has a program at XDP on `device` too (`eno1`), which no capture has.
    #[must_use]
    pub fn xdp(mut self, device: &str, mode: Xdp) -> Self {
        self.datapath = true;
        self.xdp.push((device.to_owned(), mode));
        self
    }

    /// Makes as many labs, each a node of one cluster (see [`crate::cluster`]), and joins their LANs. They
    /// are called `NAME-n1`, `NAME-n2`, …, and their commands see the host names `n1`, `n2`, …. A
    /// cluster has a network.
    ///
    /// If it fails, panics or is interrupted by a signal, nothing is left behind.
    ///
    /// # Errors
    /// [`LabError`].
    pub fn up_cluster(mut self, nodes: u8) -> Result<Vec<Lab>, LabError> {
        if !(2..=cluster::MOST).contains(&nodes) {
            return Err(StateError::Nodes { number: nodes, most: cluster::MOST }.into());
        }
        self.network = true;
        let mut labs: Vec<Lab> = Vec::new();
        for number in 1..=nodes {
            let mut builder = self.clone();
            builder.number = number;
            builder.name = self.name.as_ref().map(|name| cluster::lab_name(name, number));
            labs.push(builder.up()?);
            if let [first, .., this] = labs.as_slice() {
                let _step = signals::step();
                network::join(first.name(), this.name(), number)?;
            }
        }
        Ok(labs)
    }

    /// Makes the lab. With a living agent, its liveness entry is fresh when this returns.
    ///
    /// If it fails, panics or is interrupted by a signal, nothing is left behind.
    ///
    /// # Errors
    /// [`LabError`].
    pub fn up(self) -> Result<Lab, LabError> {
        let mut capture = match self.capture {
            Some(Source::Path(path)) => Some(Capture::open(path)?),
            Some(Source::Read(capture)) => Some(capture),
            None => None,
        };
        // Before `only`, which may drop the map that says where the pods are.
        let network = self.network || self.datapath;
        let mut plan = if network { Some(Plan::of(capture.as_ref())?) } else { None };
        if let Some(plan) = &mut plan {
            if self.wireguard {
                plan.use_wireguard();
            }
            cluster::renumber(self.number, plan, capture.as_mut());
        }
        let mut datapath = match &capture {
            Some(capture) if self.datapath => Datapath::of(capture)?,
            _ => None,
        };
        if let Some(datapath) = &mut datapath {
            self.xdp.iter().for_each(|(device, mode)| datapath.set_xdp(device, *mode));
        }
        let (backends, unannounced) = match (&capture, &datapath) {
            (Some(capture), Some(_)) => (server::backends(capture), datapath::unannounced(capture)),
            _ => Default::default(),
        };
        if let (Some(capture), Some(only)) = (&mut capture, &self.only) {
            capture.keep(only)?;
        }
        state::check_root()?;
        signals::watch().map_err(state::call("catching", "signals"))?;

        let mut lab = Lab::claim(self.name, self.agent, capture.as_ref().map(Capture::path))?;
        if self.number > 0 {
            lab.record.host_name = Some(cluster::host_name(self.number));
        }
        // From here on, every way out drops the lab and so removes it.
        {
            let _step = signals::step();
            lab.record.write()?;
            state::mount_bpffs(lab.name())?;
            let globals = maps::globals(lab.bpffs());
            fs::create_dir_all(&globals).map_err(state::call("mkdir", globals.display()))?;
        }
        if let Some(plan) = &plan {
            network::make(lab.name(), plan, signals::step)?;
            lab.record.netns = Some(netns::path(lab.name(), Ns::Node));
            let _step = signals::step();
            lab.record.write()?;
        }
        if let Some(capture) = &capture {
            for map in capture.maps() {
                let _step = signals::step();
                maps::load_map(map)?.pin(&lab.pin_path(&map.name))?;
            }
            if self.agent == Agent::Alive && capture.map("cilium_runtime_config").is_some() {
                lab.set_agent_alive()?;
            }
        }
        if let (Some(plan), Some(datapath)) = (&plan, &datapath) {
            {
                let _step = signals::step();
                network::route_by_node(lab.name(), &unannounced)?;
                if !self.xdp.is_empty() {
                    network::finish_checksums(lab.name())?;
                }
            }
            datapath::attach(lab.name(), lab.bpffs(), plan, datapath, signals::step)?;
            if datapath.hooks().next().is_some() {
                lab.record.cgroup = cgroup::path(lab.name())?;
            }
            let _step = signals::step();
            server::start(lab.name(), plan, &backends, lab.record.cgroup.as_deref())?;
        }
        lab.record.complete = true;
        {
            let _step = signals::step();
            lab.record.write()?;
        }
        Ok(lab)
    }
}

/// A lab that is up, and this process's own. Dropping it removes it.
#[derive(Debug)]
pub struct Lab {
    record: Record,
    /// Whether dropping removes the lab.
    ours: bool,
    /// Kept for what its drop does.
    _lock: state::Lock,
}

impl Lab {
    /// Starts to describe a lab.
    #[must_use]
    pub fn builder() -> Builder {
        Builder::default()
    }

    fn claim(
        name: Option<String>,
        agent: Agent,
        capture: Option<PathBuf>,
    ) -> Result<Self, LabError> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let _step = signals::step();
        let (name, lock) = match name {
            Some(name) => {
                let lock = state::claim(&name)?;
                (name, lock)
            }
            None => loop {
                let count = COUNT.fetch_add(1, Ordering::Relaxed);
                let name = format!("p{}-{count}", std::process::id());
                match state::claim(&name) {
                    Ok(lock) => break (name, lock),
                    // Left by a process that had our number before us and was killed.
                    Err(StateError::InUse { .. }) => {}
                    Err(error) => return Err(error.into()),
                }
            },
        };
        signals::born(&name);
        let pid = std::process::id().cast_signed();
        let record = Record {
            bpffs: state::bpffs(&name),
            name,
            // For whoever reads it from another folder.
            capture: capture.map(|path| std::path::absolute(&path).unwrap_or(path)),
            agent,
            netns: None,
            cgroup: None,
            host_name: None,
            maker: Process::now(pid).unwrap_or(Process { pid, start: 0 }),
            complete: false,
        };
        Ok(Self { record, ours: true, _lock: lock })
    }

    /// The lab's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.record.name
    }

    /// Root of the lab's bpffs: what `--bpffs` and `INSPECT_BPFFS` take.
    #[must_use]
    pub fn bpffs(&self) -> &Path {
        &self.record.bpffs
    }

    /// What is recorded of the lab.
    #[must_use]
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Where the map `name` is or would be pinned.
    #[must_use]
    pub fn pin_path(&self, name: &str) -> PathBuf {
        maps::globals(self.bpffs()).join(name)
    }

    /// Opens the map that is pinned as `name`.
    ///
    /// # Errors
    /// [`MapError::Call`].
    pub fn map(&self, name: &str) -> Result<MapHandle, MapError> {
        MapHandle::open(&self.pin_path(name))
    }

    /// Creates a map as `spec` says, right or wrong, and pins it as `name`, in place of what is
    /// pinned there.
    ///
    /// # Errors
    /// [`MapError`].
    pub fn put_map(&self, name: &str, spec: &MapSpec) -> Result<MapHandle, MapError> {
        let map = MapHandle::create(name, spec)?;
        self.put(name, |path| map.pin(path))?;
        Ok(map)
    }

    /// Pins a program as `name`, in place of what is pinned there.
    ///
    /// # Errors
    /// [`MapError::Call`].
    pub fn put_program(&self, name: &str) -> Result<(), MapError> {
        let program = bpf::load_trivial_program("not_a_map").map_err(|source| MapError::Call {
            call: "BPF_PROG_LOAD",
            object: name.to_owned(),
            source,
        })?;
        self.put(name, |path| {
            bpf::pin(bpf::fd(&program), path).map_err(|source| MapError::Call {
                call: "BPF_OBJ_PIN",
                object: path.display().to_string(),
                source,
            })
        })
    }

    /// Removes the pin `name`, as `rm` does.
    ///
    /// # Errors
    /// [`MapError::Call`].
    pub fn unpin(&self, name: &str) -> Result<(), MapError> {
        let path = self.pin_path(name);
        fs::remove_file(&path).map_err(|source| MapError::Call {
            call: "unlink",
            object: path.display().to_string(),
            source,
        })
    }

    fn put(
        &self,
        name: &str,
        pin: impl FnOnce(&Path) -> Result<(), MapError>,
    ) -> Result<(), MapError> {
        let path = self.pin_path(name);
        if path.exists() {
            self.unpin(name)?;
        }
        pin(&path)
    }

    /// The file of a network namespace of this lab, for setns(2) and `nsenter --net=`.
    ///
    /// # Errors
    /// [`LabError::NoSuchPlace`] where the lab has no such namespace.
    pub fn netns(&self, place: Ns) -> Result<PathBuf, LabError> {
        netns_of(self.name(), place)
    }

    /// Makes `command` run in the lab: in the network namespace of `place`, in the lab's cgroup if
    /// that is the node or a pod and the lab has one, and with `INSPECT_BPFFS` naming the lab's
    /// bpffs.
    ///
    /// # Errors
    /// [`LabError::NoSuchPlace`].
    pub fn exec_in<'a>(
        &self,
        place: Ns,
        command: &'a mut Command,
    ) -> Result<&'a mut Command, LabError> {
        exec_in(&self.record, place, command)
    }

    /// Runs `work` on a thread in the network namespace of `place`; this thread stays where it is.
    ///
    /// # Errors
    /// [`LabError::NoSuchPlace`], [`LabError::State`].
    pub fn run_in<T: Send>(
        &self,
        place: Ns,
        work: impl FnOnce() -> T + Send,
    ) -> Result<T, LabError> {
        let namespace = state::open_file(&self.netns(place)?)?;
        Ok(netns::run_in(&namespace, || Ok::<_, StateError>(work()))?)
    }

    /// Runs `work` on a thread whose view of the mounts has no bpffs but this lab's (other labs are
    /// up at the same time), and in the network namespace of `place` if one is given. Commands
    /// that `work` starts see the same: a search for bpffs finds this one.
    ///
    /// # Errors
    /// [`LabError::NoSuchPlace`], [`LabError::State`].
    pub fn run_alone<T: Send>(
        &self,
        place: Option<Ns>,
        work: impl FnOnce() -> T + Send,
    ) -> Result<T, LabError> {
        let namespace = match place {
            Some(place) => Some(state::open_file(&self.netns(place)?)?),
            None => None,
        };
        Ok(netns::run_alone(namespace.as_ref(), self.bpffs(), work)?)
    }

    /// Writes the present `CLOCK_MONOTONIC` as the agent's sign of life, as the agent does once a
    /// second. The L2 responder falls silent when it is older than 15 s.
    ///
    /// # Errors
    /// [`MapError`], where the lab has no `cilium_runtime_config`.
    pub fn set_agent_alive(&self) -> Result<(), MapError> {
        set_agent_alive(self.bpffs())
    }

    /// Leaves the lab up when this value is dropped: `inspector-lab down` removes it.
    ///
    /// # Errors
    /// [`StateError::Call`].
    pub fn detach(mut self) -> Result<Record, StateError> {
        let _step = signals::step();
        signals::gone(&self.record.name);
        self.ours = false;
        Ok(self.record.clone())
    }

    /// Removes the lab, as dropping it does, and says what could not be removed.
    ///
    /// # Errors
    /// [`StateError::Call`].
    pub fn down(mut self) -> Result<(), StateError> {
        self.remove()
    }

    fn remove(&mut self) -> Result<(), StateError> {
        let _step = signals::step();
        self.ours = false;
        let result = state::remove(&self.record.name);
        signals::gone(&self.record.name);
        result
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if !self.ours {
            return;
        }
        if let Err(error) = self.remove() {
            eprintln!("lab {}: not all of it could be removed: {error}", self.record.name);
        }
    }
}

/// The file of a network namespace of the lab `name`.
///
/// # Errors
/// [`LabError::NoSuchPlace`] where the lab has no such namespace.
pub fn netns_of(name: &str, place: Ns) -> Result<PathBuf, LabError> {
    let there = netns::all(name)?;
    if there.contains(&place) {
        return Ok(netns::path(name, place));
    }
    let there = there.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    Err(LabError::NoSuchPlace {
        name: name.to_owned(),
        place,
        there: if there.is_empty() { "it was made without a network".into() } else { there },
    })
}

/// Makes `command` run in the lab that `record` describes (see [`Lab::exec_in`]).
///
/// # Errors
/// [`LabError::NoSuchPlace`], [`LabError::State`].
pub fn exec_in<'a>(
    record: &Record,
    place: Ns,
    command: &'a mut Command,
) -> Result<&'a mut Command, LabError> {
    let on_node = matches!(place, Ns::Node | Ns::Pod(_));
    enter(record, place, record.cgroup.as_deref().filter(|_| on_node), command)
}

/// As [`exec_in`], but outside of the lab's cgroup: no socket load balancing.
///
/// # Errors
/// [`LabError::NoSuchPlace`], [`LabError::State`].
pub fn exec_outside<'a>(
    record: &Record,
    place: Ns,
    command: &'a mut Command,
) -> Result<&'a mut Command, LabError> {
    enter(record, place, None, command)
}

fn enter<'a>(
    record: &Record,
    place: Ns,
    cgroup: Option<&Path>,
    command: &'a mut Command,
) -> Result<&'a mut Command, LabError> {
    let namespace = state::open_file(&netns_of(&record.name, place)?)?;
    let entrance = cgroup.map(cgroup::entrance).transpose()?;
    let host_name = record.host_name.clone();
    command.env("INSPECT_BPFFS", &record.bpffs);
    // SAFETY: between fork and exec the closure makes a few system calls and allocates nothing.
    Ok(unsafe {
        command.pre_exec(move || {
            if let Some(name) = &host_name {
                unshare(CloneFlags::CLONE_NEWUTS).map_err(io::Error::from)?;
                // The name is a string of this length, and outlives the call.
                if libc::sethostname(name.as_ptr().cast(), name.len()) != 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            if let Some(entrance) = &entrance {
                // The process that writes it is meant by a zero.
                nix::unistd::write(entrance, b"0")?;
            }
            setns(namespace.as_fd(), CloneFlags::CLONE_NEWNET).map_err(io::Error::from)
        })
    })
}

/// Writes the agent's sign of life into the maps pinned below `bpffs` (see
/// [`Lab::set_agent_alive`]).
///
/// # Errors
/// [`MapError`], where there is no `cilium_runtime_config`.
pub fn set_agent_alive(bpffs: &Path) -> Result<(), MapError> {
    let map = MapHandle::open(&maps::globals(bpffs).join("cilium_runtime_config"))?;
    map.update(&AGENT_LIVENESS.to_ne_bytes(), &bpf::monotonic_ns().to_ne_bytes())
}
