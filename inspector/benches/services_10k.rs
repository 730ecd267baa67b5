//! Ten thousand services in real kernel maps: the whole process, and the map read alone.
//!
//! Run by `cargo xtask bench`. Prints what it measured beside what `cilium-dbg` needed on the same
//! maps (`timing.txt` of the capture), and fails if a goal is not met. Needs root.

use std::{
    fmt::Write as _,
    fs::File,
    io::{self, BufRead, BufReader, Read, Write as _},
    mem::MaybeUninit,
    net::Ipv4Addr,
    os::{fd::AsFd, unix::process::CommandExt},
    process::{ChildStdin, ChildStdout, Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use inspector::{
    collect::{dump, maps},
    sys::host,
};
use inspector_lab::{Capture, Lab, Ns};

const CAPTURE: &str = "services-10k";
const RUNS: usize = 21;

/// A command, its twin of `cilium-dbg`, and how many times faster it has to be.
const COMMANDS: &[(&str, Option<&str>, Option<f64>)] = &[
    ("lb list", Some("bpf lb list"), Some(12.0)),
    ("lb list -o json", Some("bpf lb list -o json"), Some(8.0)),
    ("service list", Some("service list"), Some(12.0)),
    ("service list -o json", Some("service list -o json"), Some(8.0)),
    ("lb list --frontends", Some("bpf lb list --frontends"), None),
    ("lb list --backends", Some("bpf lb list --backends"), None),
    ("lb list --revnat", Some("bpf lb list --revnat"), None),
    ("vip 192.168.2.20", None, None),
];

/// The goal for `vip`.
const VIP_GOAL: Duration = Duration::from_millis(25);

/// One run of a process.
struct Run {
    wall: Duration,
    cpu: Duration,
    /// Largest resident set, KiB.
    memory: u64,
    output: u64,
}

/// A process that starts the commands.
///
/// What Linux reports as a process's largest resident set counts what its parent had when it was
/// forked, too. The bench itself has read a capture and is large by then, so a copy of it that was
/// started before does the measuring.
struct Runner {
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Runner {
    fn start() -> Self {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .arg(RUNNER)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the runner starts");
        let input = child.stdin.take().expect("a pipe");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        // It ends when its input does.
        drop(child);
        Self { input, output }
    }

    /// Runs a command on the lab's maps, in its node's network namespace if it has one.
    fn run(&mut self, command: &str, lab: &Lab) -> Run {
        let netns =
            lab.netns(Ns::Node).map_or_else(|_| String::new(), |path| path.display().to_string());
        writeln!(self.input, "{}\t{netns}\t{command}", lab.bpffs().display()).expect("the runner");
        let mut line = String::new();
        self.output.read_line(&mut line).expect("the runner answers");
        let numbers: Vec<u64> = line
            .split_whitespace()
            .map(|number| number.parse().unwrap_or_else(|_| panic!("{line}")))
            .collect();
        let [wall, cpu, memory, output] = numbers[..] else { panic!("{command}: {line}") };
        Run { wall: Duration::from_nanos(wall), cpu: Duration::from_nanos(cpu), memory, output }
    }
}

/// Argument that makes this program a runner.
const RUNNER: &str = "--runner";

/// Runs what is asked for, line by line.
fn serve() {
    for line in io::stdin().lines() {
        let line = line.expect("a line");
        let mut parts = line.splitn(3, '\t');
        let mut part = || parts.next().expect("three parts");
        let (bpffs, netns, command) = (part(), part(), part());
        let run = measure(bpffs, netns, command);
        println!("{} {} {} {}", run.wall.as_nanos(), run.cpu.as_nanos(), run.memory, run.output);
    }
}

fn measure(bpffs: &str, netns: &str, arguments: &str) -> Run {
    let namespace = (!netns.is_empty()).then(|| File::open(netns).expect("a namespace"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_inspect"));
    command
        .args(arguments.split(' '))
        .env("INSPECT_BPFFS", bpffs)
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    if let Some(namespace) = namespace {
        // SAFETY: setns(2) is all that is called between fork and exec.
        unsafe {
            command.pre_exec(move || {
                nix::sched::setns(&namespace, nix::sched::CloneFlags::CLONE_NEWNET)?;
                Ok(())
            });
        }
    }
    let start = Instant::now();
    #[allow(clippy::zombie_processes, reason = "waited for with wait4, which tells what it used")]
    let mut child = command.spawn().expect("the program runs");
    let mut output = Vec::new();
    child.stdout.take().expect("a pipe").read_to_end(&mut output).expect("its output");
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    let mut status = 0;
    let pid = libc::pid_t::try_from(child.id()).expect("a process id");
    // SAFETY: the child is ours and nobody else waits for it; both pointers are valid.
    let waited = unsafe { libc::wait4(pid, &raw mut status, 0, usage.as_mut_ptr()) };
    let wall = start.elapsed();
    assert_eq!(waited, pid, "{}", io::Error::last_os_error());
    let code = libc::WEXITSTATUS(status);
    assert!(libc::WIFEXITED(status) && code != 2 && code < 100, "{arguments}: status {status}");
    // SAFETY: wait4 has filled it.
    let usage = unsafe { usage.assume_init() };
    let time = |time: libc::timeval| {
        Duration::from_secs(time.tv_sec.unsigned_abs())
            + Duration::from_micros(time.tv_usec.unsigned_abs())
    };
    Run {
        wall,
        cpu: time(usage.ru_utime) + time(usage.ru_stime),
        memory: usage.ru_maxrss.unsigned_abs(),
        output: output.len() as u64,
    }
}

fn median<T: Ord + Copy>(mut values: Vec<T>) -> T {
    values.sort_unstable();
    values[values.len() / 2]
}

/// Median wall time and largest memory (MiB) of `cilium-dbg COMMAND`, from `timing.txt`.
fn theirs(timing: &str, command: &str) -> (Duration, f64) {
    let runs: Vec<(Duration, f64)> = timing
        .lines()
        .filter(|line| line.ends_with(&format!(":: cilium-dbg {command}")))
        .map(|line| {
            let field = |name: &str| -> f64 {
                let rest = line.split(name).nth(1).expect(name);
                let number = rest.split(|c: char| !c.is_ascii_digit() && c != '.').next();
                number.and_then(|number| number.parse().ok()).expect(name)
            };
            (Duration::from_secs_f64(field("wall=")), field("maxrss="))
        })
        .collect();
    assert!(!runs.is_empty(), "timing.txt has no `cilium-dbg {command}`");
    let memory = runs.iter().map(|run| run.1).fold(f64::INFINITY, f64::min);
    (median(runs.into_iter().map(|run| run.0).collect()), memory)
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

#[allow(clippy::cast_precision_loss, reason = "sizes of some megabytes")]
fn commands(runner: &mut Runner, lab: &Lab) -> bool {
    let timing = Capture::project(CAPTURE)
        .and_then(|capture| capture.text("timing.txt"))
        .expect("timings of cilium-dbg");
    let mut met = true;
    println!(
        "{:<22} {:>9} {:>9} {:>9}  {:>11} {:>7}  {:>9} {:>9}  goal",
        "inspect", "median", "best", "CPU", "cilium-dbg", "faster", "memory", "of theirs"
    );
    for &(command, twin, factor) in COMMANDS {
        let runs: Vec<Run> = (0..RUNS).map(|_| runner.run(command, lab)).collect();
        let wall = median(runs.iter().map(|run| run.wall).collect());
        let best = runs.iter().map(|run| run.wall).min().expect("runs");
        let cpu = median(runs.iter().map(|run| run.cpu).collect());
        let memory = runs.iter().map(|run| run.memory).max().expect("runs") as f64 / 1024.0;
        print!(
            "{command:<22} {:>6.1} ms {:>6.1} ms {:>6.1} ms",
            milliseconds(wall),
            milliseconds(best),
            milliseconds(cpu)
        );
        let (goal, good) = if let Some(twin) = twin {
            let (their_wall, their_memory) = theirs(&timing, twin);
            let faster = their_wall.as_secs_f64() / wall.as_secs_f64();
            let share = memory / their_memory;
            print!(
                "  {:>8.0} ms {faster:>6.1}x  {memory:>5.1} MiB {:>7.0} %",
                milliseconds(their_wall),
                share * 100.0
            );
            match factor {
                Some(factor) => (format!("{factor:.0}x, 20 %"), faster >= factor && share <= 0.2),
                None => (String::new(), true),
            }
        } else {
            print!("  {:>11} {:>7}  {memory:>5.1} MiB {:>9}", "", "", "");
            (format!("{} ms", VIP_GOAL.as_millis()), wall < VIP_GOAL)
        };
        let word = match (goal.is_empty(), good) {
            (true, _) => "",
            (false, true) => ": met",
            (false, false) => ": NOT MET",
        };
        println!("  {goal}{word}");
        assert!(runs.iter().all(|run| run.output > 100), "{command} printed next to nothing");
        met &= good;
    }
    met
}

/// VIPs in the file for `check`.
const CHECKED: usize = 50;

/// Goal for `check` of that many.
const CHECK_GOAL: Duration = Duration::from_millis(150);

/// `check` of many VIPs: the node is read once.
fn check(runner: &mut Runner, lab: &Lab) -> bool {
    let services = lab.map("cilium_lb4_services_v2").expect("the services");
    let mut vips: Vec<Ipv4Addr> = services
        .entries()
        .expect("their entries")
        .iter()
        .map(|entry| <[u8; 4]>::try_from(&entry.key[..4]).expect("an address").into())
        .collect();
    vips.sort_unstable();
    vips.dedup();
    let every = vips.len() / CHECKED;
    let mut text = String::from("vips:\n");
    for vip in vips.iter().step_by(every).take(CHECKED) {
        writeln!(text, "  - vip: {vip}").expect("text");
    }
    let file = std::env::temp_dir().join(format!("check-{}.yaml", std::process::id()));
    std::fs::write(&file, text).expect("a file");
    let command = format!("check {}", file.display());
    let runs: Vec<Run> = (0..RUNS).map(|_| runner.run(&command, lab)).collect();
    std::fs::remove_file(&file).expect("rm");
    let wall = median(runs.iter().map(|run| run.wall).collect());
    let memory = runs.iter().map(|run| run.memory).max().expect("runs");
    let word = if wall < CHECK_GOAL { "met" } else { "NOT MET" };
    println!(
        "\n`check` of {CHECKED} VIPs: median {:.1} ms, {} MiB  ({} ms: {word})",
        milliseconds(wall),
        memory / 1024,
        CHECK_GOAL.as_millis()
    );
    wall < CHECK_GOAL
}

/// Goal for `vip` on a node with many devices and neighbours.
const CROWD_GOAL: Duration = Duration::from_millis(60);

/// Puts 200 more devices and 2,000 neighbours into the lab's node.
fn crowd(lab: &Lab) {
    let mut batch = String::new();
    for index in 0..100 {
        writeln!(batch, "link add crowd{index} type veth peer name peer{index}").expect("text");
        writeln!(batch, "link set crowd{index} up").expect("text");
        writeln!(batch, "addr add 172.20.{index}.1/24 dev crowd{index}").expect("text");
        for host in 0..20 {
            let mac = format!("02:00:00:00:{index:02x}:{host:02x}");
            writeln!(batch, "neigh add 172.20.{index}.{} lladdr {mac} dev crowd{index}", host + 10)
                .expect("text");
        }
    }
    let mut child = lab
        .exec_in(Ns::Node, Command::new("ip").args(["-batch", "-"]).stdin(Stdio::piped()))
        .expect("the node")
        .spawn()
        .expect("iproute2 is installed");
    child.stdin.take().expect("a pipe").write_all(batch.as_bytes()).expect("the batch");
    assert!(child.wait().expect("ip ends").success());
}

/// `vip` among many devices and neighbours.
fn among_many(runner: &mut Runner) -> bool {
    let lab = match Lab::builder().project(CAPTURE).network(true).up() {
        Ok(lab) => lab,
        Err(error) => panic!("no lab: {error}"),
    };
    crowd(&lab);
    let command = "vip 10.96.0.1";
    let walls = (0..RUNS).map(|_| runner.run(command, &lab).wall);
    let wall = median(walls.collect());
    let word = if wall < CROWD_GOAL { "met" } else { "NOT MET" };
    println!(
        "\n`{command}` with 200 more devices and 2,000 neighbours: median {:.1} ms  ({} ms: {word})",
        milliseconds(wall),
        CROWD_GOAL.as_millis()
    );
    wall < CROWD_GOAL
}

fn read_alone(lab: &Lab) {
    println!("\nreading the maps alone, {RUNS} times:");
    let cpus = host::possible_cpus().expect("CPUs");
    let mut totals = (0, Duration::ZERO, Duration::ZERO);
    for name in ["cilium_lb4_services_v2", "cilium_lb4_backends_v3", "cilium_lb4_reverse_nat"] {
        let map = maps::open(lab.bpffs(), name).map_err(|(error, _)| error).expect(name);
        let time = |read: &dyn Fn() -> dump::Dump| {
            let mut entries = 0;
            let times = (0..RUNS).map(|_| {
                let start = Instant::now();
                entries = read().entries.len();
                start.elapsed()
            });
            (median(times.collect()), entries)
        };
        let (batch, entries) =
            time(&|| dump::read_batches(map.fd.as_fd(), &map.info, cpus).expect("batches"));
        let (by_key, _) =
            time(&|| dump::read_by_key(map.fd.as_fd(), &map.info, cpus).expect("by key"));
        let each =
            |total: Duration| total.as_nanos() / u128::try_from(entries).expect("a count").max(1);
        println!(
            "  {name:<24} {entries:>6} entries: batches {:>5.1} ms ({} ns each), by key {:>5.1} ms \
             ({} ns each)",
            milliseconds(batch),
            each(batch),
            milliseconds(by_key),
            each(by_key)
        );
        totals = (totals.0 + entries, totals.1 + batch, totals.2 + by_key);
    }
    println!(
        "  together {} entries: batches {:.1} ms, by key {:.1} ms",
        totals.0,
        milliseconds(totals.1),
        milliseconds(totals.2)
    );
}

fn main() -> ExitCode {
    // `cargo test --benches` runs this too, to see that it builds.
    if std::env::args().any(|argument| argument == "--test") {
        return ExitCode::SUCCESS;
    }
    if std::env::args().any(|argument| argument == RUNNER) {
        serve();
        return ExitCode::SUCCESS;
    }
    // Before this process grows.
    let mut runner = Runner::start();
    let lab = match Lab::builder().project(CAPTURE).up() {
        Ok(lab) => lab,
        Err(error) => {
            eprintln!("no lab: {error}");
            return ExitCode::FAILURE;
        }
    };
    let mut met = commands(&mut runner, &lab);
    met &= check(&mut runner, &lab);
    read_alone(&lab);
    drop(lab);
    met &= among_many(&mut runner);
    if met { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
