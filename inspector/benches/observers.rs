//! What the observers cost: a packet that does not match, one that does, and starting.
//!
//! Run by `cargo xtask bench`. The kernel itself runs the tc programs a million times over a frame
//! and says how long one run took; an empty program shows what of that is the measuring. Starts are
//! those of a process of its own each, as a command is: what is found out about the kernel once is
//! in them. Prints what it measured, and fails if a goal is not met. Needs root.

use std::{
    fs, io,
    os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd},
    process::{Command, ExitCode},
    time::{Duration, Instant},
};

use aya::programs::{SchedClassifier, TcAttachType};
use inspector::{
    sys::test_run::{self, Given},
    trace::{
        observe::{Backend, Observers, Plan, Watched},
        sighting::Tier,
    },
};
use nix::sched::{CloneFlags, unshare};

const RUNS: u32 = 1_000_000;
/// Runs between two readings of the ring buffer, so that every event finds room.
const CHUNK: u32 = 20_000;
const STARTS: usize = 21;
/// Best of so many.
const ROUNDS: usize = 5;

/// Above an empty program, nanoseconds.
const PASSED_GOAL: f64 = 60.0;
const MATCHED_GOAL: f64 = 400.0;
const START_GOAL: Duration = Duration::from_millis(150);

/// Nanoseconds of one run, the mean of `repeat`.
fn run(program: BorrowedFd<'_>, frame: &[u8], repeat: u32) -> io::Result<u32> {
    let ran = test_run::repeated(program, frame, &Given::default(), repeat)?;
    assert_eq!(ran.returned, -1, "\"go on with the next program\"");
    Ok(ran.mean_ns)
}

/// A classifier that returns "go on with the next program" and does nothing else.
fn empty() -> io::Result<OwnedFd> {
    /// The part of `union bpf_attr` that is for `BPF_PROG_LOAD`.
    #[repr(C)]
    #[derive(Default)]
    struct Load {
        prog_type: u32,
        insn_cnt: u32,
        insns: u64,
        license: u64,
        log_level: u32,
        log_size: u32,
        log_buf: u64,
        kern_version: u32,
        prog_flags: u32,
    }
    const COMMAND: libc::c_long = 5;
    const SCHED_CLS: u32 = 3;
    // r0 = -1; exit
    let instructions: [u64; 2] = [0xffff_ffff_0000_00b7, 0x95];
    let mut attr = Load {
        prog_type: SCHED_CLS,
        insn_cnt: 2,
        insns: instructions.as_ptr() as u64,
        license: c"GPL".as_ptr() as u64,
        ..Load::default()
    };
    // SAFETY: both addresses are those of live values of the sizes that the kernel reads.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, COMMAND, &raw mut attr, size_of::<Load>()) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just returned it.
    Ok(unsafe { OwnedFd::from_raw_fd(i32::try_from(fd).unwrap_or(-1)) })
}

/// A TCP segment with a kilobyte of payload, in a frame.
fn frame(is_v6: bool, last: u8) -> Vec<u8> {
    const PAYLOAD: usize = 1000;
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    let length = u16::try_from(20 + PAYLOAD).unwrap_or_default();
    if is_v6 {
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        frame.extend(length.to_be_bytes());
        frame.extend([6, 64]);
        frame.extend([0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7]);
        frame.extend([0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]);
    } else {
        frame.extend([8, 0, 0x45, 0]);
        frame.extend((length + 20).to_be_bytes());
        frame.extend([0, 1, 0x40, 0, 64, 6, 0, 0, 192, 0, 2, 7, 192, 0, 2, last]);
    }
    frame.extend([0x9c, 0x40, 0x01, 0xbb, 0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x10, 1, 0, 0, 0, 0, 0]);
    frame.extend([0; PAYLOAD]);
    frame
}

/// A node's worth of what can be watched: a VIP, and a thousand backends.
fn plan(devices: &[&str], tiers: &[Tier]) -> Plan {
    let devices: Vec<String> = devices.iter().map(|&device| device.to_owned()).collect();
    Plan {
        addresses: ["192.0.2.20", "2001:db8::14"]
            .map(|address| Watched {
                address: address.parse().expect("an address"),
                port: Some((443, 6)),
            })
            .into(),
        backends: (0..1000_u16)
            .map(|number| {
                let [high, low] = number.to_be_bytes();
                Backend { address: [10, 77, high, low].into(), port: 8443, protocol: 6 }
            })
            .collect(),
        ingress: devices.clone(),
        egress: devices,
        tiers: tiers.iter().copied().collect(),
        ..Plan::default()
    }
}

fn best(mut measure: impl FnMut() -> io::Result<f64>) -> io::Result<f64> {
    let mut best = f64::MAX;
    for _ in 0..ROUNDS {
        best = best.min(measure()?);
    }
    Ok(best)
}

fn packets(met: &mut bool) -> io::Result<()> {
    let mut observers =
        Observers::start(&plan(&["bench0"], &[Tier::Tc])).map_err(io::Error::other)?;
    let (_, programs) =
        SchedClassifier::query_tcx("bench0", TcAttachType::Ingress).map_err(io::Error::other)?;
    let program = programs[0].fd().map_err(io::Error::other)?;
    let empty = empty()?;
    for (name, is_v6) in [("IPv4", false), ("IPv6", true)] {
        let nothing = best(|| run(empty.as_fd(), &frame(is_v6, 21), RUNS).map(f64::from))?;
        let passed = best(|| run(program.as_fd(), &frame(is_v6, 21), RUNS).map(f64::from))?;
        let matched = best(|| {
            let mut sum = 0;
            for _ in 0..RUNS / CHUNK {
                sum += u64::from(run(program.as_fd(), &frame(is_v6, 20), CHUNK)?);
                let mut events = 0;
                while observers.next().map_err(io::Error::other)?.is_some() {
                    events += 1;
                }
                assert_eq!(events, CHUNK, "an event was lost");
            }
            #[expect(clippy::cast_precision_loss, reason = "some hundred thousand")]
            let sum = sum as f64;
            Ok(sum / f64::from(RUNS / CHUNK))
        })?;
        let (passed, matched) = (passed - nothing, matched - nothing);
        println!(
            "{name}: empty program {nothing:.0} ns; above it a packet that does not match \
             {passed:.0} ns (goal {PASSED_GOAL}), one that does {matched:.0} ns (goal \
             {MATCHED_GOAL})"
        );
        *met &= passed <= PASSED_GOAL && matched <= MATCHED_GOAL;
    }
    Ok(())
}

/// What asks this program for one start, and not for the bench.
const START: &str = "--start";

/// Tiers by the name under which a start is asked for.
const CHOICES: [(&str, &[Tier]); 2] = [
    ("tc", &[Tier::Tc]),
    ("every tier", &[Tier::Tc, Tier::Netlink, Tier::Tracepoint, Tier::Kprobe, Tier::Program]),
];

/// One start and one end, and what they took: nanoseconds, nanoseconds, programs, and how many
/// instructions the verifier went over.
fn start(tiers: &[Tier]) -> io::Result<[u64; 4]> {
    let plan = plan(&["bench0", "bench1"], tiers);
    let nanoseconds =
        |start: Instant| u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let begin = Instant::now();
    let observers = Observers::start(&plan).map_err(io::Error::other)?;
    let ready = nanoseconds(begin);
    assert_eq!(observers.status()[0].reason, None, "{observers:?}");
    let (mut programs, mut verified) = (0, 0);
    for file in fs::read_dir("/proc/self/fdinfo")? {
        let info = fs::read_to_string(file?.path()).unwrap_or_default();
        let count = info.lines().find_map(|line| line.strip_prefix("verified_insns:"));
        if let Some(count) = count.and_then(|count| count.trim().parse::<u64>().ok()) {
            programs += 1;
            verified += count;
        }
    }
    let begin = Instant::now();
    drop(observers);
    Ok([ready, nanoseconds(begin), programs, verified])
}

fn starts(met: &mut bool) -> io::Result<()> {
    for (name, _) in CHOICES {
        let (mut times, mut ends, mut last) = (Vec::new(), Vec::new(), [0; 4]);
        for _ in 0..STARTS {
            let output = Command::new(std::env::current_exe()?).args([START, name]).output()?;
            let text = String::from_utf8_lossy(&output.stdout);
            let numbers: Vec<u64> = text.split_whitespace().flat_map(str::parse).collect();
            last = numbers.try_into().map_err(|_| {
                let why = String::from_utf8_lossy(&output.stderr);
                io::Error::other(format!("a start: {text}{why}"))
            })?;
            times.push(Duration::from_nanos(last[0]));
            ends.push(Duration::from_nanos(last[1]));
        }
        times.sort();
        ends.sort();
        let (median, [_, _, programs, verified]) = (times[STARTS / 2], last);
        println!(
            "attached and ready on two devices, {name}: median {median:.0?} (goal \
             {START_GOAL:?}), {:.0?} to {:.0?} in {STARTS} processes; {programs} programs, of which \
             the verifier goes over {verified} instructions; detached: {:.0?}",
            times[0],
            times[STARTS - 1],
            ends[STARTS / 2],
        );
        *met &= median <= START_GOAL;
    }
    Ok(())
}

fn main() -> ExitCode {
    // Cargo asks benches for their tests, too.
    if std::env::args().any(|argument| argument == "--test" || argument == "--list") {
        return ExitCode::SUCCESS;
    }
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, asked, name] = arguments.as_slice()
        && asked == START
        && let Some((_, tiers)) = CHOICES.iter().find(|(choice, _)| choice == name)
    {
        return match start(tiers) {
            Ok(numbers) => {
                println!("{}", numbers.map(|number| number.to_string()).join(" "));
                ExitCode::SUCCESS
            }
            Err(error) => {
                eprintln!("{error}");
                ExitCode::FAILURE
            }
        };
    }
    let mut met = true;
    let result = unshare(CloneFlags::CLONE_NEWNET)
        .map_err(io::Error::from)
        .and_then(|()| {
            let made = Command::new("ip")
                .args(["link", "add", "bench0", "type", "veth", "peer", "name", "bench1"])
                .status()?;
            if made.success() { Ok(()) } else { Err(io::Error::other("ip link add: it failed")) }
        })
        .and_then(|()| packets(&mut met))
        .and_then(|()| starts(&mut met));
    if let Err(error) = result {
        eprintln!("observers: {error}; this bench needs root and iproute2");
        return ExitCode::FAILURE;
    }
    if met {
        ExitCode::SUCCESS
    } else {
        eprintln!("observers: a goal is not met");
        ExitCode::FAILURE
    }
}
