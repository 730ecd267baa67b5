//! A session of tracing: what evidence says of a node becomes a plan, observers watch by it, and what
//! they report becomes a [`Trace`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use super::TraceError;
use super::journey::{Context, DeviceKind, Joiner, Journey, Limits};
use super::observe::{Backend, Observers, Plan, TierStatus, Watched};
use crate::cilium::{
    l2_responder::L2Responder,
    layout::{LAYOUTS, MapKind},
};
use crate::collect::maps;
use crate::evidence::{
    Evidence, VipQuery,
    tables::Tables,
    trace::{self, AnswerCount, Stopped, TierUse, Trace, WatchedHook},
};
use crate::judge::{
    journey::{self, Conclusion, Keeper},
    targets,
};
use crate::sys::host;

/// Transport protocols of a frontend that names none (Cilium before 1.17): TCP, UDP, SCTP.
const ANY: [u8; 3] = [6, 17, 132];

/// How many sightings are read before the clock is looked at again.
const AT_ONCE: usize = 16_384;

/// How many devices may vanish between the look at the node and the start.
const VANISHED: usize = 64;

/// What the observers are to watch for these questions, by what is known of the node.
///
/// At ingress: the devices on which clients' packets arrive (those of `via` if it names some) and
/// those of pods, for replies and for clients in pods. At egress: the devices through which the
/// packet, its reply or a question for a neighbour can leave.
#[must_use]
pub fn plan(evidence: &Evidence, queries: &[VipQuery], context: &Context) -> Plan {
    let mut ingress: Vec<String> = Vec::new();
    let mut egress: Vec<String> = Vec::new();
    let add = |names: &mut Vec<String>, name: &str| {
        if !names.iter().any(|one| one == name) {
            names.push(name.to_owned());
        }
    };
    // The devices are the same for every address.
    if let Some(first) = queries.first() {
        for target in targets::devices(evidence, first.address) {
            add(&mut ingress, &target.device);
            add(&mut egress, &target.device);
        }
    }
    for device in context.devices.values().filter(|device| device.kind == DeviceKind::Pod) {
        add(&mut ingress, &device.name);
    }
    // Cilium's devices, and where the kernel says that packets leave.
    let routes = evidence.network.iter().flat_map(|network| &network.routes);
    let outputs = routes.filter_map(|asked| asked.answer.as_ref().ok()?.output);
    for ifindex in evidence.devices.iter().map(|device| device.ifindex).chain(outputs) {
        if let Some(device) = context.devices.get(&ifindex)
            && device.kind != DeviceKind::Inner
        {
            add(&mut egress, &device.name);
        }
    }
    let mut protocols: BTreeSet<u8> = BTreeSet::new();
    for frontend in &context.frontends {
        match frontend.protocol {
            0 => protocols.extend(ANY),
            one => protocols.extend([one]),
        }
    }
    let mut addresses = Vec::new();
    let mut clients: Vec<IpAddr> = Vec::new();
    for query in queries {
        let watched = |port| Watched { address: query.address, port };
        match (query.port, query.protocol) {
            (None, _) => addresses.push(watched(None)),
            (Some(port), Some(protocol)) => addresses.push(watched(Some((port, protocol.0)))),
            (Some(port), None) => {
                addresses.extend(ANY.map(|protocol| watched(Some((port, protocol)))));
            }
        }
        // The node can put its own address in the client's place.
        if let Some(source) = query.source {
            clients.push(source);
            clients.extend(&context.host_addresses);
        }
    }
    Plan {
        addresses,
        backends: context
            .backends
            .iter()
            .flat_map(|(address, port)| {
                protocols.iter().map(|protocol| Backend {
                    address: *address,
                    port: *port,
                    protocol: *protocol,
                })
            })
            .collect(),
        next_hops: context.next_hops.iter().copied().collect(),
        clients,
        ingress,
        egress,
        ..Plan::default()
    }
}

/// Observers at work, and what they have seen so far. Dropping it detaches them.
#[derive(Debug)]
pub struct Session {
    observers: Observers,
    joiner: Joiner,
    context: Context,
    watched: trace::Watched,
    keeper: Keeper,
    /// How many connections are taken at most.
    at_most: u64,
    responders: Responders,
}

impl Session {
    /// Attaches what the plan wants and the kernel allows, in the network namespace of this thread;
    /// when it returns, all of that is live. The session ends by itself after `at_most` connections,
    /// if there is such a number. Devices that are gone meanwhile (pods come and go) are left out,
    /// and named among what is missing.
    ///
    /// # Errors
    /// As [`Observers::start`].
    pub fn start(
        evidence: &Evidence,
        context: Context,
        mut plan: Plan,
        at_most: Option<u64>,
    ) -> Result<Self, TraceError> {
        let responders = Responders::new(evidence, &context);
        let mut gone = Vec::new();
        let observers = loop {
            match Observers::start(&plan) {
                Err(TraceError::Device { device, source, .. })
                    if source.raw_os_error() == Some(libc::ENODEV) && gone.len() < VANISHED =>
                {
                    plan.ingress.retain(|name| *name != device);
                    plan.egress.retain(|name| *name != device);
                    gone.push(device);
                }
                result => break result?,
            }
        };
        let mut tiers: Vec<TierUse> = observers.status().iter().map(tier_use).collect();
        for tier in tiers.iter_mut().filter(|tier| tier.tier == super::sighting::Tier::Tc) {
            let why = || "the device is gone".to_owned();
            tier.missing.extend(gone.iter().map(|device| (device.clone(), why())));
        }
        Ok(Self {
            joiner: Joiner::new(context.clone(), Limits::default()),
            context,
            watched: trace::Watched {
                started_ns: host::monotonic_ns(),
                tiers,
                ..trace::Watched::default()
            },
            keeper: Keeper::default(),
            at_most: at_most.unwrap_or(u64::MAX),
            responders,
            observers,
        })
    }

    /// What was watched, and how well, as far as it is known by now.
    #[must_use]
    pub fn watched(&self) -> &trace::Watched {
        &self.watched
    }

    /// How many connections have come to an end.
    #[must_use]
    pub fn journeys(&self) -> u64 {
        self.keeper.len()
    }

    /// Whether there are as many as were wanted.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.keeper.len() >= self.at_most
    }

    /// Waits for something to be seen, at most for `timeout`, and takes in what there is. `each` is
    /// handed every connection that came to an end, with what it proves; [`journey::hooks`] makes
    /// the hooks, which are left out of it.
    ///
    /// # Errors
    /// [`TraceError`] if the kernel hands out nothing more, or the error of `each`.
    pub fn step<E: From<TraceError>>(
        &mut self,
        timeout: Duration,
        each: &mut dyn FnMut(&Journey, &Conclusion, &Context) -> Result<(), E>,
    ) -> Result<(), E> {
        self.observers.wait(timeout)?;
        let now = host::monotonic_ns();
        if self.read(AT_ONCE)? {
            self.joiner.advance(now);
        }
        let ended = self.joiner.take();
        self.conclude(ended, each)
    }

    /// Takes in what is left, detaches everything, and says what became of it all.
    ///
    /// # Errors
    /// As [`step`](Self::step); everything is detached then too.
    pub fn finish<E: From<TraceError>>(
        mut self,
        stopped: Stopped,
        each: &mut dyn FnMut(&Journey, &Conclusion, &Context) -> Result<(), E>,
    ) -> Result<Trace, E> {
        /// What comes faster than it can be read would keep this from coming to an end.
        const ROUNDS: usize = 16;
        let ended_ns = host::monotonic_ns();
        for _ in 0..ROUNDS {
            if self.read(AT_ONCE)? {
                break;
            }
        }
        let answers = self.responders.after();
        let ended = self.joiner.finish(ended_ns);
        self.conclude(ended, each)?;
        self.refresh()?;
        let Self { observers, joiner, watched, keeper, .. } = self;
        drop(observers);
        let (journeys, more, not_kept) = keeper.finish();
        Ok(Trace {
            watched,
            ended_ns,
            stopped,
            journeys,
            more,
            not_kept,
            questions: joiner.questions(),
            answers,
        })
    }

    /// Reads up to so many sightings; whether that was all there was.
    fn read(&mut self, at_most: usize) -> Result<bool, TraceError> {
        for _ in 0..at_most {
            match self.observers.next()? {
                // Not every hook was live then: what they did not see would seem not to be.
                Some(sighting) if sighting.monotonic_ns < self.watched.started_ns => {}
                Some(sighting) => self.joiner.add(sighting),
                None => return Ok(true),
            }
        }
        Ok(false)
    }

    fn refresh(&mut self) -> Result<(), TraceError> {
        let counts = self.observers.counts()?;
        self.watched.counts = counts
            .into_iter()
            .map(|count| trace::HookCount {
                tier: count.tier,
                hook: count.hook,
                matched: count.matched,
                lost: count.lost,
            })
            .collect();
        self.watched.joined = self.joiner.counts();
        // Its programs can be replaced meanwhile.
        let is_program = |tier| tier == super::sighting::Tier::Program;
        if let Some(status) = self.observers.status().iter().find(|one| is_program(one.tier))
            && let Some(tier) = self.watched.tiers.iter_mut().find(|one| is_program(one.tier))
        {
            *tier = tier_use(status);
        }
        Ok(())
    }

    fn conclude<E: From<TraceError>>(
        &mut self,
        ended: Vec<Journey>,
        each: &mut dyn FnMut(&Journey, &Conclusion, &Context) -> Result<(), E>,
    ) -> Result<(), E> {
        if ended.is_empty() {
            return Ok(());
        }
        self.refresh()?;
        for journey in ended {
            if self.is_full() {
                break;
            }
            let conclusion = journey::outline(&journey, &self.context, &self.watched);
            each(&journey, &conclusion, &self.context)?;
            self.keeper.add(journey, &conclusion);
        }
        Ok(())
    }
}

fn tier_use(status: &TierStatus) -> TierUse {
    TierUse {
        tier: status.tier,
        hooks: status
            .hooks
            .iter()
            .map(|(hook, ifindexes)| WatchedHook { hook: *hook, ifindexes: ifindexes.clone() })
            .collect(),
        attached: status.attached.clone(),
        missing: status.missing.clone(),
        reason: status.reason.clone(),
    }
}

/// The answer counters of the L2 responder's entries for one VIP.
#[derive(Debug, Default)]
struct Responders {
    map: Option<maps::OpenMap>,
    keys: Vec<Vec<u8>>,
    cpus: usize,
    before: BTreeMap<u32, u64>,
}

impl Responders {
    /// Reads them; of more than one VIP, or where the map cannot be read, there are none.
    fn new(evidence: &Evidence, context: &Context) -> Self {
        let mut vips = context.vips.iter();
        let (Some(vip), None) = (vips.next(), vips.next()) else { return Self::default() };
        let tables = Tables::for_vip(evidence, *vip);
        let keys: Vec<Vec<u8>> = tables
            .l2_responder
            .iter()
            .filter(|entry| entry.address == *vip)
            .map(|entry| entry.encode().0)
            .collect();
        let root = evidence.bpffs.iter().find(|bpffs| bpffs.read).map(|bpffs| &bpffs.path);
        let (Some(root), false) = (root, keys.is_empty()) else { return Self::default() };
        let family = crate::evidence::tables::family_of(*vip);
        let map = LAYOUTS
            .iter()
            .filter(|layout| layout.kind == MapKind::L2Responder && layout.family == Some(family))
            .find_map(|layout| maps::open(root, layout.name).ok());
        let mut found =
            Self { map, keys, cpus: host::possible_cpus().unwrap_or(1), before: BTreeMap::new() };
        found.before = found.read();
        found
    }

    fn read(&self) -> BTreeMap<u32, u64> {
        let Some(map) = &self.map else { return BTreeMap::new() };
        let keys = self.keys.iter().map(Vec::as_slice);
        let Ok(record) = map.lookup(self.cpus, keys) else { return BTreeMap::new() };
        record
            .entries
            .iter()
            .filter_map(|(key, value)| L2Responder::decode(map.layout, key, value).ok())
            .map(|entry| (entry.ifindex, entry.answers))
            .collect()
    }

    /// The counters before and now, of the entries that were there both times.
    fn after(&self) -> Vec<AnswerCount> {
        let now = self.read();
        self.before
            .iter()
            .filter_map(|(ifindex, before)| {
                let after = *now.get(ifindex)?;
                Some(AnswerCount { ifindex: *ifindex, before: *before, after })
            })
            .collect()
    }
}
