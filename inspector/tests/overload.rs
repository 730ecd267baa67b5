//! More packets than can be read: whatever was lost is counted, exactly, hook by hook. Needs root.

mod flood;
mod net;

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use flood::{Sender, hardware_address, journeys, plan};
use inspector::{
    evidence::trace::{Stopped, Trace},
    trace::{
        TraceError,
        observe::{HookCount, Observers, Plan},
        session::Session,
        sighting::{Hook, Tier},
    },
};
use net::{CLIENT_DEVICE, DEVICE, Host, node_and_client};

/// What was read of each hook.
type Seen = BTreeMap<(Tier, Hook), u64>;

/// Hooks that every packet of the flood passes once: it arrives, and is dropped for want of a route.
const EACH: [(Tier, Hook); 3] = [
    (Tier::Tc, Hook::TcIngress),
    (Tier::Tracepoint, Hook::Receive),
    (Tier::Tracepoint, Hook::Drop),
];

fn start(plan: &Plan) -> Observers {
    let observers = Observers::start(plan).expect("start");
    for status in observers.status() {
        assert_eq!((&status.reason, &status.missing), (&None, &Vec::new()), "{status:?}");
    }
    observers
}

/// Reads what there is.
fn drain(observers: &mut Observers, seen: &mut Seen) {
    while let Some(sighting) = observers.next().expect("event") {
        *seen.entry((sighting.tier, sighting.hook)).or_default() += 1;
    }
}

/// What was read and what was lost is what matched, at every hook; and at those that every packet
/// passes, all of the packets.
fn is_exact(observers: &Observers, seen: &Seen, arrived: u64) {
    let counts = observers.counts().expect("counts");
    for HookCount { tier, hook, matched, lost } in &counts {
        let read = seen.get(&(*tier, *hook)).copied().unwrap_or(0);
        assert_eq!(read + lost, *matched, "{tier:?} {hook:?}: {counts:?}, read {seen:?}");
    }
    for (tier, hook) in EACH {
        let count = counts.iter().find(|count| (count.tier, count.hook) == (tier, hook));
        let count = count.unwrap_or_else(|| panic!("no {tier:?} {hook:?} in {counts:?}"));
        assert_eq!(count.matched, arrived, "{counts:?}");
    }
    assert_eq!(observers.malformed(), 0);
}

/// Runs `work` on a node that is watched as `plan` says, with what sends to it.
fn flooded(work: impl FnOnce(&Host, &mut Sender) + Send) {
    let (node, client) = node_and_client();
    let to = node.run(|| hardware_address(DEVICE));
    let mut sender = client.run(|| Sender::new(CLIENT_DEVICE, to));
    node.run(|| work(&client, &mut sender));
}

#[test]
fn what_is_lost_while_nobody_reads_is_counted() {
    flooded(|client, sender| {
        let plan = Plan { ring_bytes: 64 << 10, ..plan(DEVICE, &[Tier::Tc, Tier::Tracepoint]) };
        let mut observers = start(&plan);
        let mut seen = Seen::new();
        let mut arrived = 0;
        // Once full, once emptied, and full again.
        for _ in 0..2 {
            arrived += client.run(|| sender.send(20_000, None));
            drain(&mut observers, &mut seen);
            is_exact(&observers, &seen, arrived);
        }
        let counts = observers.counts().expect("counts");
        for (tier, hook) in EACH {
            // Some of both, or nothing was shown.
            let count = counts.iter().find(|count| (count.tier, count.hook) == (tier, hook));
            assert!(count.is_some_and(|count| count.lost > 0), "{counts:?}");
            assert!(seen.get(&(tier, hook)).is_some_and(|read| *read > 0), "{seen:?}");
        }
    });
}

#[test]
fn what_is_lost_while_it_is_read_is_counted() {
    flooded(|client, sender| {
        // Room for a dozen: the reader is always behind.
        let plan = Plan { ring_bytes: 4096, ..plan(DEVICE, &[Tier::Tc, Tier::Tracepoint]) };
        let mut observers = start(&plan);
        let mut seen = Seen::new();
        let is_over = AtomicBool::new(false);
        let arrived = thread::scope(|scope| {
            let sending = scope.spawn(|| {
                let arrived = client.run(|| sender.send(50_000, None));
                is_over.store(true, Ordering::Release);
                arrived
            });
            while !is_over.load(Ordering::Acquire) && !sending.is_finished() {
                drain(&mut observers, &mut seen);
                observers.wait(Duration::from_millis(10)).expect("wait");
            }
            sending.join().expect("the sender")
        });
        drain(&mut observers, &mut seen);
        is_exact(&observers, &seen, arrived);
        let lost: u64 = observers.counts().expect("counts").iter().map(|count| count.lost).sum();
        assert!(lost > 0, "nothing was lost");
        assert!(seen.values().sum::<u64>() > 0, "nothing was read");
    });
}

fn lost(trace: &Trace) -> u64 {
    trace.watched.counts.iter().map(|count| count.lost).sum()
}

/// A session that tc alone reports to, with room for some 200 events: what became of the packets that
/// were sent meanwhile.
fn session(work: impl FnOnce(&mut dyn FnMut(bool), &mut dyn FnMut(u32) -> u64) -> u64 + Send) {
    flooded(|client, sender| {
        let (evidence, context) = flood::node(DEVICE);
        let plan = Plan { ring_bytes: 64 << 10, ..plan(DEVICE, &[Tier::Tc]) };
        let mut session = Session::start(&evidence, context, plan, None).expect("a session");
        let mut step = |waits| {
            let time = Duration::from_millis(if waits { 50 } else { 0 });
            session.step::<TraceError>(time, &mut |_, _, _| Ok(())).expect("step");
        };
        let mut send = |count| client.run(|| sender.send(count, None));
        let arrived = work(&mut step, &mut send);
        let trace =
            session.finish::<TraceError>(Stopped::Duration, &mut |_, _, _| Ok(())).expect("end");
        let watched = &trace.watched;
        assert_eq!(journeys(&trace) + lost(&trace), arrived, "{watched:?}");
        assert_eq!(watched.joined.sightings, journeys(&trace), "{watched:?}");
        assert!(lost(&trace) > 0 && journeys(&trace) > 0, "{watched:?}");
    });
}

#[test]
fn packets_are_journeys_or_counted_where_the_session_slept() {
    session(|_, send| send(10_000));
}

#[test]
fn packets_are_journeys_or_counted_where_the_session_reads_too_seldom() {
    session(|step, send| {
        let mut arrived = 0;
        for number in 0..40 {
            arrived += send(500);
            step(number % 2 == 0);
        }
        arrived
    });
}

#[test]
fn more_connections_than_can_be_held_are_cut_short_and_not_forgotten() {
    flooded(|client, sender| {
        let (evidence, context) = flood::node(DEVICE);
        let plan = plan(DEVICE, &[Tier::Tc]);
        let mut session = Session::start(&evidence, context, plan, None).expect("a session");
        // More at once than a joiner holds, in parts for which the ring buffer has room.
        let mut arrived = 0;
        for _ in 0..20 {
            arrived += client.run(|| sender.send(1000, None));
            session
                .step::<TraceError>(Duration::from_millis(20), &mut |_, _, _| Ok(()))
                .expect("step");
        }
        let trace =
            session.finish::<TraceError>(Stopped::Duration, &mut |_, _, _| Ok(())).expect("end");
        assert_eq!((lost(&trace), journeys(&trace)), (0, arrived), "{:?}", trace.watched);
        assert!(trace.watched.joined.cut_short > 0, "{:?}", trace.watched.joined);
    });
}
