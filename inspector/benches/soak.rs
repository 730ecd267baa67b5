//! Whether the observers stand a long time in a world that does not: services churn, devices come and
//! go, connections are made, and they are watched: by one session that lasts all the time, and by
//! others that begin and end beside it, over tcx and clsact in turn.
//!
//! Run by `cargo xtask soak [MINUTES]`. Between two short sessions everything stands still for a
//! moment and is counted: memory, descriptors, threads, maps, programs, links, qdiscs. Prints a table,
//! and fails if something grew, was left behind, or did not happen. Needs root.

use std::{
    collections::BTreeSet,
    fmt, fs, io,
    net::IpAddr,
    process::{Command, ExitCode},
    sync::{
        Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use aya::{maps::loaded_maps, programs::loaded_links, programs::loaded_programs};
use inspector::{
    collect::{self, Options, Question},
    evidence::{Evidence, VipQuery, trace::Stopped, trace::Trace},
    judge::{
        self,
        journey::{self, Conclusion},
    },
    trace::{
        TraceError,
        journey::{Context, Journey},
        observe::{Chain, Plan},
        session::{self, Session},
        sighting::Tier,
    },
};
use inspector_lab::{
    Lab, Ns,
    capture::Entry,
    probe::{self, Attempt},
};

const CAPTURE: &str = "v1.21-tcx";
const VIP: &str = "192.168.2.20";
const PORT: u16 = 443;
const MINUTES: f64 = 10.0;

/// Rows of the table.
const ROWS: u32 = 20;
/// How long a short session watches.
const WATCH: Duration = Duration::from_millis(700);
/// Devices of ours at one time.
const DEVICES: usize = 6;
/// Services that are made and removed in one round.
const SERVICES: u16 = 200;
/// What the kernel puts off may take this long to be gone.
const PATIENCE: Duration = Duration::from_secs(10);

/// Resident memory may grow by this much: the lasting session remembers connections that are over, up
/// to a limit that it may not have reached by then. Those tables take 7 MiB when they are full, and
/// what they outgrew the allocator may keep. In ten minutes it is less than 60 KiB a short session.
const MEMORY_SLACK: u64 = 16 << 20;
/// The part of the time that is not held against the rest: buffers reach their size.
const WARM_UP: f64 = 0.2;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// What happens around the observers.
struct World {
    lab: Lab,
    /// Held for reading by whoever changes something, for writing by whoever counts.
    gate: RwLock<()>,
    stop: AtomicBool,
    answered: AtomicU64,
    unanswered: AtomicU64,
    writes: AtomicU64,
    devices: AtomicU64,
    /// Names of the devices that are there now.
    names: Mutex<Vec<String>>,
}

impl World {
    fn act(&self) -> RwLockReadGuard<'_, ()> {
        self.gate.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn stand_still(&self) -> RwLockWriteGuard<'_, ()> {
        self.gate.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn names(&self) -> Vec<String> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Connections to the VIP, from the LAN and through the VPN.
    fn traffic(&self) -> Result<(), Failure> {
        const AT_ONCE: usize = 8;
        const PAUSE: Duration = Duration::from_millis(10);
        const SILENT: Duration = Duration::from_millis(500);
        for place in [Ns::Client, Ns::Vpn].into_iter().cycle() {
            if self.is_over() {
                break;
            }
            let attempt = Attempt {
                from: place.to_string(),
                proto: "tcp".to_owned(),
                dst: VIP.parse()?,
                port: PORT,
            };
            {
                let _acting = self.act();
                let all = vec![attempt; AT_ONCE];
                let outcomes = self.lab.run_in(place, || probe::connect_all(&all, SILENT))?;
                for outcome in outcomes {
                    let count = if outcome.ok { &self.answered } else { &self.unanswered };
                    count.fetch_add(1, Ordering::Relaxed);
                }
            }
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Services that come and go, and now and then the VIP's own entries, for a moment.
    fn churn(&self) -> Result<(), Failure> {
        const PAUSE: Duration = Duration::from_millis(25);
        let services = self.lab.map("cilium_lb4_services_v2")?;
        let backends = self.lab.map("cilium_lb4_backends_v3")?;
        let captured = services.entries()?;
        let of_backends = backends.entries()?;
        let of_vip: Vec<&Entry> =
            captured.iter().filter(|entry| entry.key.starts_with(&VIP_OCTETS)).collect();
        if of_vip.is_empty() || of_backends.is_empty() {
            return Err(format!("{CAPTURE} has no entries of {VIP}, or no backends").into());
        }
        let count = |writes: usize| self.writes.fetch_add(writes as u64, Ordering::Relaxed);
        let mut made: Vec<Vec<u8>> = Vec::new();
        for round in 0_u16.. {
            if self.is_over() {
                break;
            }
            {
                let _acting = self.act();
                for key in &made {
                    services.delete(key)?;
                }
                count(made.len());
                made.clear();
                for number in 0..SERVICES {
                    let like = of_vip[usize::from(number) % of_vip.len()];
                    let [high, low] =
                        round.wrapping_mul(SERVICES).wrapping_add(number).to_be_bytes();
                    let key = [&[10, 222, high, low], &like.key[4..]].concat();
                    services.update(&key, &like.value)?;
                    made.push(key);
                }
                made.sort();
                made.dedup();
                count(made.len());
                // Written anew as they are, as the agent does when it reconciles.
                for Entry { key, value } in &of_backends {
                    backends.update(key, value)?;
                }
                count(of_backends.len());
                if round.is_multiple_of(20) {
                    for Entry { key, value } in &of_vip {
                        services.delete(key)?;
                        services.update(key, value)?;
                    }
                    count(2 * of_vip.len());
                }
                self.lab.set_agent_alive()?;
            }
            thread::sleep(PAUSE);
        }
        let _acting = self.act();
        for key in &made {
            services.delete(key)?;
        }
        Ok(())
    }

    /// Devices of the node that come and go.
    fn come_and_go(&self) -> Result<(), Failure> {
        const PAUSE: Duration = Duration::from_millis(100);
        for number in 0_u64.. {
            if self.is_over() {
                break;
            }
            {
                let _acting = self.act();
                let name = format!("soak{number}");
                self.ip(&[
                    "link",
                    "add",
                    &name,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    &format!("p{name}"),
                ])?;
                self.ip(&["link", "set", &name, "up"])?;
                self.ip(&["link", "set", &format!("p{name}"), "up"])?;
                let old = {
                    let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
                    names.push(name);
                    (names.len() > DEVICES).then(|| names.remove(0))
                };
                if let Some(old) = old {
                    self.ip(&["link", "delete", &old])?;
                }
                self.devices.fetch_add(1, Ordering::Relaxed);
            }
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    fn ip(&self, arguments: &[&str]) -> Result<(), Failure> {
        let mut command = Command::new("ip");
        let output = self.lab.exec_in(Ns::Node, command.args(arguments))?.output()?;
        if output.status.success() {
            return Ok(());
        }
        let error = String::from_utf8_lossy(&output.stderr);
        Err(format!("ip {}: {}", arguments.join(" "), error.trim()).into())
    }
}

const VIP_OCTETS: [u8; 4] = [192, 168, 2, 20];

/// Kinds of the kernel's objects that a process holds by descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Map,
    Program,
    Link,
}

/// Everything of BPF that this process holds.
fn held() -> io::Result<BTreeSet<(Kind, u32)>> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir("/proc/self/fdinfo")? {
        // The descriptor of this very folder is gone when it is its turn.
        let Ok(text) = fs::read_to_string(entry?.path()) else { continue };
        for line in text.lines() {
            let Some((name, id)) = line.split_once(':') else { continue };
            let kind = match name {
                "map_id" => Kind::Map,
                // A link tells its program's id, too.
                "prog_id" if !text.contains("link_id:") => Kind::Program,
                "link_id" => Kind::Link,
                _ => continue,
            };
            found.extend(id.trim().parse().ok().map(|id| (kind, id)));
        }
    }
    Ok(found)
}

/// Everything of BPF in the kernel, whoever holds it.
fn in_kernel() -> BTreeSet<(Kind, u32)> {
    let mut found = BTreeSet::new();
    // What goes while it is asked for is an error, and gone.
    found.extend(loaded_maps().filter_map(Result::ok).map(|map| (Kind::Map, map.id())));
    let programs = loaded_programs().filter_map(Result::ok);
    found.extend(programs.map(|program| (Kind::Program, program.id())));
    found.extend(loaded_links().filter_map(Result::ok).map(|link| (Kind::Link, link.id())));
    found
}

/// Those of `ours` that are still in the kernel, once as many as `expected` are left or time is over.
fn left(ours: &BTreeSet<(Kind, u32)>, expected: usize) -> BTreeSet<(Kind, u32)> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let left: BTreeSet<_> = in_kernel().intersection(ours).copied().collect();
        if left.len() <= expected || Instant::now() >= deadline {
            return left;
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// What there is while everything stands still.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Count {
    descriptors: usize,
    threads: usize,
    children: usize,
    maps: usize,
    programs: usize,
    links: usize,
    qdiscs: usize,
}

impl Count {
    fn now(ours: &BTreeSet<(Kind, u32)>) -> Result<Self, Failure> {
        // What this process still holds is no leftover of the kernel's: if it is a leak, it grows.
        let expected = held()?.intersection(ours).count();
        let left = left(ours, expected);
        let of = |kind| left.iter().filter(|one| one.0 == kind).count();
        Ok(Self {
            descriptors: entries("/proc/self/fd")?,
            threads: entries("/proc/self/task")?,
            children: children()?,
            maps: of(Kind::Map),
            programs: of(Kind::Program),
            links: of(Kind::Link),
            qdiscs: qdiscs()?,
        })
    }
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { descriptors, threads, children, maps, programs, links, qdiscs } = self;
        write!(
            f,
            "{descriptors} descriptors, {threads} threads, {children} children, {maps} maps, \
             {programs} programs, {links} links, {qdiscs} clsact qdiscs"
        )
    }
}

fn entries(folder: &str) -> io::Result<usize> {
    Ok(fs::read_dir(folder)?.count())
}

fn children() -> io::Result<usize> {
    let mut count = 0;
    for task in fs::read_dir("/proc/self/task")? {
        // A thread may just have ended.
        if let Ok(text) = fs::read_to_string(task?.path().join("children")) {
            count += text.split_whitespace().count();
        }
    }
    Ok(count)
}

/// clsact qdiscs in this thread's network namespace.
fn qdiscs() -> Result<usize, Failure> {
    let output = Command::new("tc").args(["qdisc", "show"]).output()?;
    if !output.status.success() {
        return Err("tc qdisc show: it failed".into());
    }
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().filter(|line| line.starts_with("qdisc clsact")).count())
}

/// Resident memory of this process alone, bytes: without what is mapped from files.
fn memory() -> Result<u64, Failure> {
    let text = fs::read_to_string("/proc/self/status")?;
    let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.split_whitespace().next()).ok_or("no RssAnon in /proc")?;
    Ok(kib.parse::<u64>()? * 1024)
}

/// What was in every cycle.
#[derive(Debug, Default)]
struct Sums {
    cycles: u64,
    journeys: u64,
    served: u64,
    clsact: u64,
    lost: u64,
}

fn lost(trace: &Trace) -> u64 {
    trace.watched.counts.iter().map(|count| count.lost).sum()
}

fn journeys(trace: &Trace) -> u64 {
    let more: u64 = trace.more.iter().map(|more| more.times).sum();
    trace.journeys.len() as u64 + more + trace.not_kept
}

/// Ignores each journey.
#[expect(clippy::unnecessary_wraps, reason = "what a session asks for")]
fn unheeded(_: &Journey, _: &Conclusion, _: &Context) -> Result<(), TraceError> {
    Ok(())
}

fn evidence(world: &World) -> Result<(Evidence, VipQuery), Failure> {
    let address: IpAddr = VIP.parse()?;
    let query = VipQuery { address, port: None, protocol: None, source: None };
    let bpffs = Some(world.lab.bpffs().to_owned());
    let options = Options { bpffs, ..Options::new(Question::Vip(query)) };
    Ok((collect::node(&options)?, query))
}

fn plan(world: &World, evidence: &Evidence, query: VipQuery, context: &Context) -> Plan {
    let mut plan = session::plan(evidence, &[query], context);
    plan.ingress.extend(world.names());
    plan.egress.extend(world.names());
    plan
}

/// One short session, from reading the node to the verdict; what of BPF it held, and `others` did not
/// make before, is put with `ours`.
fn cycle(
    world: &World,
    number: u64,
    others: &BTreeSet<(Kind, u32)>,
    ours: &mut BTreeSet<(Kind, u32)>,
    sums: &mut Sums,
) -> Result<(), Failure> {
    let (mut evidence, query) = evidence(world)?;
    let context = journey::context(&evidence, &query);
    let mut plan = plan(world, &evidence, query, &context);
    if number % 3 == 2 {
        plan.chain = Chain::Clsact;
        sums.clsact += 1;
    }
    let mut session = Session::start(&evidence, context, plan, None)?;
    let missing = session.watched().tiers.iter().find(|tier| tier.tier == Tier::Tc);
    if let Some(reason) = missing.and_then(|tier| tier.reason.as_ref()) {
        return Err(format!("the tc tier: {reason}").into());
    }
    ours.extend(held()?.difference(others));
    let deadline = Instant::now() + WATCH;
    while Instant::now() < deadline {
        session.step(Duration::from_millis(20), &mut unheeded)?;
    }
    let trace = session.finish(Stopped::Duration, &mut unheeded)?;
    sums.cycles += 1;
    sums.journeys += journeys(&trace);
    sums.lost += lost(&trace);
    evidence.trace = Some(trace);
    let judgement = judge::judge(&evidence)?;
    // What is printed of it: the report has to be made, not kept.
    let text = serde_json::to_string(&judgement.verdict)?;
    sums.served += u64::from(text.contains("\"observed\""));
    Ok(())
}

/// The session that lasts.
fn watch(world: &World, session: Session) -> Result<Trace, Failure> {
    let mut session = session;
    while !world.is_over() {
        let _acting = world.act();
        session.step(Duration::from_millis(10), &mut unheeded)?;
    }
    Ok(session.finish(Stopped::Duration, &mut unheeded)?)
}

/// Ends the world on every way out.
struct Over<'w>(&'w World);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Relaxed);
    }
}

/// The counts, and memory in the order of time.
struct Course {
    first: Count,
    memory: Vec<(f64, u64)>,
    wrong: Vec<String>,
}

fn soak(
    world: &World,
    time: Duration,
    ours: &mut BTreeSet<(Kind, u32)>,
) -> Result<Course, Failure> {
    let (evidence, query) = evidence(world)?;
    let context = journey::context(&evidence, &query);
    let plan = plan(world, &evidence, query, &context);
    // The lab's maps, which threads of this process open now and then.
    let others = in_kernel();
    let session = Session::start(&evidence, context, plan, None)?;
    // What is held from here on to the end.
    ours.extend(held()?.difference(&others));
    if in_kernel().is_disjoint(ours) {
        return Err("the kernel shows none of our programs: this needs CAP_SYS_ADMIN".into());
    }

    let begun = Instant::now();
    let mut sums = Sums::default();
    let mut course = Course { first: Count::now(ours)?, memory: Vec::new(), wrong: Vec::new() };
    print_head();
    let lasted = thread::scope(|scope| -> Result<Trace, Failure> {
        let over = Over(world);
        let threads = [
            scope.spawn(|| world.traffic()),
            scope.spawn(|| world.churn()),
            scope.spawn(|| world.come_and_go()),
        ];
        let watcher = scope.spawn(|| watch(world, session));
        let mut threads_known = None;
        let mut row = 1;
        while begun.elapsed() < time {
            cycle(world, sums.cycles, &others, ours, &mut sums)?;
            if threads.iter().any(thread::ScopedJoinHandle::is_finished) || watcher.is_finished() {
                break;
            }
            let still = world.stand_still();
            let count = Count::now(ours)?;
            let memory = memory()?;
            drop(still);
            let at = begun.elapsed();
            course.memory.push((at.as_secs_f64() / time.as_secs_f64(), memory));
            // The threads of this bench itself, and what they have open for good.
            let first = threads_known.get_or_insert_with(|| count.clone());
            if count != *first && course.wrong.len() < 10 {
                course.wrong.push(format!("after {at:.0?}: {count}; at first {first}"));
            }
            if at >= time * row / ROWS {
                row += 1;
                print_row(at, world, &sums, memory, &count);
            }
        }
        drop(over);
        for thread in threads {
            thread.join().map_err(|_| "a thread of the world panicked")??;
        }
        watcher.join().map_err(|_| "the lasting session panicked")?
    })?;
    println!(
        "lasting session: {} journeys, {} events lost; short ones: {} of which {} over clsact, {} \
         journeys, {} events lost",
        journeys(&lasted),
        lost(&lasted),
        sums.cycles,
        sums.clsact,
        sums.journeys,
        sums.lost
    );
    course.wrong.extend(missing(world, time, &sums, &lasted));
    Ok(course)
}

fn print_head() {
    println!(
        "| {:>5} | {:>6} | {:>8} | {:>8} | {:>8} | {:>9} | {:>7} | {:>9} | {:>4} | {:>4} | {:>4} | {:>5} |",
        "s",
        "starts",
        "answered",
        "silent",
        "journeys",
        "writes",
        "devices",
        "memory",
        "fds",
        "maps",
        "prog",
        "links"
    );
    println!("|{}", "---:|".repeat(12));
}

fn print_row(at: Duration, world: &World, sums: &Sums, memory: u64, count: &Count) {
    println!(
        "| {:>5.0} | {:>6} | {:>8} | {:>8} | {:>8} | {:>9} | {:>7} | {:>5} KiB | {:>4} | {:>4} | {:>4} | {:>5} |",
        at.as_secs_f64(),
        sums.cycles,
        world.answered.load(Ordering::Relaxed),
        world.unanswered.load(Ordering::Relaxed),
        sums.journeys,
        world.writes.load(Ordering::Relaxed),
        world.devices.load(Ordering::Relaxed),
        memory / 1024,
        count.descriptors,
        count.maps,
        count.programs,
        count.links,
    );
}

/// What was to happen and did not.
fn missing(world: &World, time: Duration, sums: &Sums, lasted: &Trace) -> Vec<String> {
    // Far less than happens on a machine that has nothing else to do.
    let answered = world.answered.load(Ordering::Relaxed);
    let minutes = time.as_secs_f64() / 60.0;
    #[expect(clippy::cast_precision_loss, reason = "counts of minutes")]
    let rate = |count: u64| count as f64 / minutes;
    let mut lines = Vec::new();
    for (what, happened, at_least) in [
        ("short sessions", rate(sums.cycles), 2.0),
        ("answered connections", rate(answered), 60.0),
        ("journeys of the lasting session", rate(journeys(lasted)), 60.0),
        ("journeys of short sessions", rate(sums.journeys), 10.0),
        ("verdicts with observed paths", rate(sums.served), 1.0),
        ("written entries", rate(world.writes.load(Ordering::Relaxed)), 5000.0),
        ("new devices", rate(world.devices.load(Ordering::Relaxed)), 6.0),
    ] {
        if happened < at_least {
            let line = format!("{what}: {happened:.0} a minute, where {at_least} are the least");
            lines.push(line);
        }
    }
    lines
}

/// The middle one of those in a part of the time.
fn middle(memory: &[(f64, u64)], from: f64, to: f64) -> Option<u64> {
    let mut found: Vec<u64> =
        memory.iter().filter(|(at, _)| (from..to).contains(at)).map(|(_, bytes)| *bytes).collect();
    found.sort_unstable();
    found.get(found.len() / 2).copied()
}

fn run(time: Duration) -> Result<Vec<String>, Failure> {
    // A first one, since a process's first lab makes what stays as long as the process.
    drop(Lab::builder().up()?);
    let before = Count::now(&BTreeSet::new())?;
    let lab = Lab::builder().project(CAPTURE).datapath(true).up()?;
    let world = World {
        lab,
        gate: RwLock::default(),
        stop: AtomicBool::default(),
        answered: AtomicU64::default(),
        unanswered: AtomicU64::default(),
        writes: AtomicU64::default(),
        devices: AtomicU64::default(),
        names: Mutex::default(),
    };
    let mut ours = BTreeSet::new();
    let course = world.lab.run_in(Ns::Node, || soak(&world, time, &mut ours))??;
    let mut wrong = course.wrong;
    drop(world.lab);
    // Whatever was ours at any time is gone.
    let after = Count::now(&ours)?;
    println!("before: {before}");
    println!("while it lasted: {}", course.first);
    println!("after {} objects of BPF: {after}", ours.len());
    // Of the host's own network namespace, in which others may work.
    let before = Count { qdiscs: after.qdiscs, ..before };
    if after != before {
        wrong.push(format!("afterwards: {after}; before: {before}"));
    }
    let third = (1.0 - WARM_UP) / 3.0;
    match (
        middle(&course.memory, WARM_UP, WARM_UP + third),
        middle(&course.memory, 1.0 - third, 2.0),
    ) {
        (Some(early), Some(late)) => {
            println!("memory: {} KiB early, {} KiB late", early / 1024, late / 1024);
            if late > early + MEMORY_SLACK {
                wrong.push(format!("memory grew from {early} to {late} bytes"));
            }
        }
        _ => wrong.push("too short to tell whether memory grows".to_owned()),
    }
    Ok(wrong)
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // Cargo asks benches for their tests, too.
    if arguments.iter().any(|argument| argument == "--test" || argument == "--list") {
        return ExitCode::SUCCESS;
    }
    let minutes = arguments.iter().find_map(|argument| argument.parse().ok()).unwrap_or(MINUTES);
    if !(0.2..=1440.0).contains(&minutes) {
        eprintln!("soak: {minutes} minutes: 0.2 to 1440 can be told");
        return ExitCode::FAILURE;
    }
    match run(Duration::from_secs_f64(minutes * 60.0)) {
        Ok(wrong) if wrong.is_empty() => {
            println!("nothing grew, nothing was left behind");
            ExitCode::SUCCESS
        }
        Ok(wrong) => {
            for line in wrong {
                eprintln!("soak: {line}");
            }
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("soak: {error}; it needs root, bpf(2), a cgroup2 mount, TUN and iproute2");
            ExitCode::FAILURE
        }
    }
}
