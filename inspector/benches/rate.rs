//! How many packets of a VIP a second the observers stand: a real device, a sender that holds a rate,
//! and the session that `inspect trace` has, reading, joining and concluding. Every packet is the
//! first of a connection of its own, which is the dearest that a packet can be.
//!
//! Run by `cargo xtask bench`. Prints what was sent, lost and used, and fails if the goal is not met
//! or a loss is not counted. Needs root. Sender, kernel and session share the machine's CPUs with
//! whatever else runs: the best of some rounds counts, and the machine's load is printed beside it.

#[path = "../tests/flood/mod.rs"]
mod flood;
#[path = "../tests/net/mod.rs"]
mod net;

use std::{
    fs,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use flood::{Sender, hardware_address, journeys, plan};
use inspector::{
    evidence::trace::Stopped,
    trace::{TraceError, session::Session, sighting::Hook, sighting::Tier},
};
use net::{CLIENT_DEVICE, DEVICE, Host, node_and_client};

/// Matching packets a second, without loss.
const GOAL: u32 = 100_000;
/// How long each round sends.
const TIME: u32 = 4;
const ROUNDS: usize = 5;
/// What a sender may fall short of its rate.
const SHORT: f64 = 0.01;

/// What became of a round.
struct Round {
    arrived: u64,
    time: Duration,
    journeys: u64,
    /// Events lost at tc, which sees every packet once, and at all hooks.
    lost_tc: u64,
    lost: u64,
    events: u64,
    cut_short: u64,
    /// Processor time of the thread that reads.
    reading: Duration,
    /// Memory of the process that was not there before, at most, bytes.
    memory: u64,
}

impl Round {
    fn rate(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "millions")]
        let arrived = self.arrived as f64;
        arrived / self.time.as_secs_f64()
    }
}

/// Resident memory that is no file's, bytes.
fn memory() -> u64 {
    let text = fs::read_to_string("/proc/self/status").expect("/proc");
    let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib: u64 = line
        .and_then(|line| line.split_whitespace().next()?.parse().ok())
        .expect("RssAnon in /proc/self/status");
    kib * 1024
}

/// Processor time of this thread.
fn processor_time() -> Duration {
    // SAFETY: timespec is plain data, for which all zeros are valid.
    let mut time: libc::timespec = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a live value.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or_default())
}

fn round(
    (node, client): (&Host, &Host),
    sender: &mut Sender,
    tiers: &[Tier],
    rate: Option<u32>,
) -> Round {
    node.run(|| {
        let (evidence, context) = flood::node(DEVICE);
        let plan = plan(DEVICE, tiers);
        let before = memory();
        let mut session = Session::start(&evidence, context, plan, None).expect("a session");
        for tier in &session.watched().tiers {
            assert!(tier.tier == Tier::Kprobe || tier.reason.is_none(), "{tier:?}");
        }
        let begun = processor_time();
        let mut most = before;
        let step = |session: &mut Session| {
            let ignore = &mut |_: &_, _: &_, _: &_| Ok(());
            session.step::<TraceError>(Duration::from_millis(20), ignore).expect("step");
        };
        let count = rate.unwrap_or(3 * GOAL) * TIME;
        let (arrived, time) = thread::scope(|scope| {
            let sending = scope.spawn(|| {
                client.run(|| {
                    let begun = Instant::now();
                    let arrived = sender.send(count, rate);
                    (arrived, begun.elapsed())
                })
            });
            while !sending.is_finished() {
                step(&mut session);
                most = most.max(memory());
            }
            sending.join().expect("the sender")
        });
        let ignore = &mut |_: &_, _: &_, _: &_| Ok(());
        let trace = session.finish::<TraceError>(Stopped::Duration, ignore).expect("the end");
        let counts = &trace.watched.counts;
        let tc = counts.iter().find(|count| count.hook == Hook::TcIngress).expect("tc ingress");
        assert_eq!(tc.matched, arrived, "what tc has counted: {counts:?}");
        let lost = counts.iter().map(|count| count.lost).sum();
        let journeys = journeys(&trace);
        if tiers == [Tier::Tc] {
            assert_eq!(journeys + lost, arrived, "journeys, lost and sent: {:?}", trace.watched);
        }
        Round {
            arrived,
            time,
            journeys,
            lost_tc: tc.lost,
            lost,
            events: counts.iter().map(|count| count.matched).sum(),
            cut_short: trace.watched.joined.cut_short,
            reading: processor_time().saturating_sub(begun),
            memory: most - before,
        }
    })
}

fn load() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().unwrap_or("?").to_owned()
}

/// A count in thousands.
fn thousands(count: u64) -> String {
    format!("{}.{}", count / 1000, count / 100 % 10)
}

fn main() -> ExitCode {
    // Cargo asks benches for their tests, too.
    if std::env::args().any(|argument| argument == "--test" || argument == "--list") {
        return ExitCode::SUCCESS;
    }
    let (node, client) = node_and_client();
    let to = node.run(|| hardware_address(DEVICE));
    let mut sender = client.run(|| Sender::new(CLIENT_DEVICE, to));
    let mut met = true;
    println!(
        "| tiers | wanted | packets/s | events | lost | journeys (cut short) | reading | memory | load |"
    );
    println!("|---|---:|---:|---:|---:|---:|---:|---:|---:|");
    let all = [Tier::Tc, Tier::Netlink, Tier::Tracepoint, Tier::Kprobe];
    for (name, tiers) in [("tc", &[Tier::Tc][..]), ("every", &all)] {
        for rate in [Some(GOAL), None] {
            let mut is_met = rate.is_none();
            for _ in 0..if rate.is_some() { ROUNDS } else { 1 } {
                let round = round((&node, &client), &mut sender, tiers, rate);
                let wanted = rate.map_or("all".to_owned(), |rate| rate.to_string());
                println!(
                    "| {name} | {wanted} | {:.0} | {} k | {} ({} at tc) | {} k ({} k) | {:.0} % | {} MiB | {} |",
                    round.rate(),
                    thousands(round.events),
                    round.lost,
                    round.lost_tc,
                    thousands(round.journeys),
                    thousands(round.cut_short),
                    round.reading.as_secs_f64() / round.time.as_secs_f64() * 100.0,
                    round.memory >> 20,
                    load()
                );
                is_met |= round.lost == 0
                    && rate.is_some_and(|rate| round.rate() >= f64::from(rate) * (1.0 - SHORT));
                if is_met {
                    break;
                }
            }
            if !is_met {
                eprintln!("rate: {GOAL} packets a second without loss by tier {name}: not met");
            }
            met &= is_met;
        }
    }
    if met { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
