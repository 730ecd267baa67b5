//! What it costs to join what the hooks reported, without any kernel: nanoseconds for a sighting, and
//! how much is held.
//!
//! Run by `cargo xtask bench`. It has to keep up with 100,000 packets each second, seen at four hooks
//! each, on one of two cores: 2,500 ns for a sighting. Prints what it measured, and fails if that
//! goal is not met.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr},
    process::ExitCode,
    time::Instant,
};

use inspector::trace::{
    journey::{Context, FrontendAddress, Joiner, Limits},
    sighting::{Flow, Hook, Packet, Sighting, Tier},
};

const PACKETS: u32 = 200_000;
/// 100,000 packets each second.
const APART_NS: u64 = 10_000;
const GOAL_NS: f64 = 2_500.0;

const VIP: Ipv4Addr = Ipv4Addr::new(192, 168, 2, 20);
const BACKEND: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 77, 1, 128), 8443);
const TCP: u8 = 6;
const UDP: u8 = 17;
const SYN: u8 = 2;
const ACK: u8 = 16;

/// Which packets there are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Traffic {
    /// Those of a thousand connections, whose translated ones are seen too.
    Data,
    /// Each is the first of its connection, from one of sixteen clients, and gets no answer.
    First(u8),
}

fn packet(number: u32, traffic: Traffic, is_translated: bool) -> Packet {
    let connection = match traffic {
        Traffic::Data => number % 1_000,
        Traffic::First(_) => number,
    };
    // Sixteen clients, and ports of which none is reserved.
    let [_, _, low, client] = connection.to_be_bytes();
    let port = 1024 + u16::from_be_bytes([low, client]) / 2;
    let source = Ipv4Addr::new(192, 168, 2, 50 + client % 16);
    let (tcp, protocol) = match traffic {
        Traffic::Data if number < 1_000 => (Some((connection << 16, 0, SYN)), TCP),
        Traffic::Data => (Some(((connection << 16) + number / 1_000, 7, ACK)), TCP),
        Traffic::First(TCP) => (Some((number.wrapping_mul(0x9e37_79b1), 0, SYN)), TCP),
        Traffic::First(protocol) => (None, protocol),
    };
    let (destination, to) = if is_translated { (BACKEND.0, BACKEND.1) } else { (VIP, 443) };
    Packet {
        source: source.into(),
        destination: destination.into(),
        protocol,
        ports: Some((port, to)),
        tcp,
        icmp: None,
        quoted: None,
        ip_id: u16::try_from(number & 0xffff).unwrap_or(0),
        flow_label: 0,
        ttl: 64,
        fragment: false,
        length: 60,
        payload_length: 20,
    }
}

/// What four hooks report of one packet.
fn sightings(number: u32, traffic: Traffic) -> [Sighting; 4] {
    let hooks = match traffic {
        Traffic::Data => [
            (Hook::Receive, Tier::Tracepoint),
            (Hook::TcIngress, Tier::Tc),
            (Hook::TcEgress, Tier::Tc),
            (Hook::Transmit, Tier::Tracepoint),
        ],
        Traffic::First(_) => [
            (Hook::Receive, Tier::Tracepoint),
            (Hook::TcIngress, Tier::Tc),
            (Hook::Route, Tier::Tracepoint),
            (Hook::Drop, Tier::Tracepoint),
        ],
    };
    let mut at = 1_000_000_000 + u64::from(number) * APART_NS;
    hooks.map(|(hook, tier)| {
        at += 1_000;
        let is_flow = hook == Hook::Route;
        let is_translated = matches!(hook, Hook::TcEgress | Hook::Transmit);
        let packet = packet(number, traffic, is_translated);
        let skb = 0xffff_0000_0000_0000 + u64::from(number % 512) * 256;
        Sighting {
            monotonic_ns: at,
            hook,
            tier,
            ifindex: if is_translated { 10 } else { 2 },
            skb: (tier == Tier::Tracepoint && !is_flow).then_some(skb),
            flow: is_flow.then_some(Flow {
                source: packet.source,
                destination: packet.destination,
                protocol: packet.protocol,
                gateway: None,
            }),
            packet: (!is_flow).then_some(packet),
            neighbour: None,
            mark: Some(0),
            program: None,
            detail: (hook == Hook::Drop).then(|| "NO_SOCKET".to_owned()),
            asked: None,
            headers: Some(vec![0; 40].into()),
        }
    })
}

fn context() -> Context {
    Context {
        vips: [IpAddr::from(VIP)].into(),
        frontends: [TCP, UDP]
            .map(|protocol| FrontendAddress {
                address: VIP.into(),
                port: 443,
                protocol,
                proxy_port: None,
            })
            .into(),
        backends: [(BACKEND.0.into(), BACKEND.1)].into(),
        host_addresses: BTreeSet::from([Ipv4Addr::new(192, 168, 2, 10).into()]),
        ..Context::default()
    }
}

fn main() -> ExitCode {
    // Cargo asks benches for their tests, too.
    if std::env::args().any(|argument| argument == "--test" || argument == "--list") {
        return ExitCode::SUCCESS;
    }
    let mut met = true;
    for (name, traffic) in [
        ("data of 1,000 connections", Traffic::Data),
        ("each packet a new connection, TCP", Traffic::First(TCP)),
        ("each packet a new connection, UDP", Traffic::First(UDP)),
    ] {
        let all: Vec<Sighting> =
            (0..PACKETS).flat_map(|number| sightings(number, traffic)).collect();
        let count = f64::from(PACKETS) * 4.0;
        let mut joiner = Joiner::new(context(), Limits::default());
        let (mut ended, mut held) = (0, 0);
        let start = Instant::now();
        for (at, sighting) in all.into_iter().enumerate() {
            joiner.add(sighting);
            if at % 4096 == 0 {
                ended += joiner.take().len();
                held = held.max(joiner.held());
            }
        }
        let took = start.elapsed();
        ended += joiner.finish(u64::MAX / 2).len();
        #[expect(clippy::cast_precision_loss, reason = "a second or so")]
        let each = took.as_nanos() as f64 / count;
        println!(
            "joiner, {name}: {each:.0} ns for a sighting (goal {GOAL_NS}); {ended} journeys, at most \
             {held} things held; {:?}",
            joiner.counts(),
        );
        met &= each <= GOAL_NS;
    }
    if met {
        ExitCode::SUCCESS
    } else {
        eprintln!("joiner: the goal is not met");
        ExitCode::FAILURE
    }
}
