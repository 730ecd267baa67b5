//! The kprobe tier: real packets through the functions that it watches.
//!
//! Many kernels have no kprobes, so that `cargo test` leaves this file out unless it is named;
//! `cargo xtask test` runs it in virtual machines. Needs root.

mod net;

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::process::{Command, Stdio};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};
use std::thread;
use std::time::{Duration, Instant};

use inspector::trace::observe::{Observers, Plan, TierStatus, Watched};
use inspector::trace::sighting::{Hook, Packet, Sighting, Tier};
use net::{CLIENT_V4, CLIENT_V6, DEVICE, Host, NODE_V4, NODE_V6, index, netlink, node_and_client};
use rtnetlink::RouteMessageBuilder;

/// The test that looks at what is attached in the whole kernel writes, so that it is alone.
static ATTACHED: RwLock<()> = RwLock::new(());

fn among_others() -> RwLockReadGuard<'static, ()> {
    ATTACHED.read().unwrap_or_else(PoisonError::into_inner)
}

/// A function for each thing that is watched.
const FUNCTIONS: [&str; 16] = [
    "__neigh_create",
    "__neigh_event_send",
    "arp_solicit",
    "ndisc_solicit",
    "ip_route_input_noref",
    "ip6_route_input",
    "ip_local_deliver",
    "ip6_input",
    "ip_forward",
    "ip6_forward",
    "__dev_queue_xmit",
    "dev_hard_start_xmit",
    "tcp_v4_send_reset",
    "tcp_v6_send_reset",
    "__icmp_send",
    "icmp6_send",
];

/// Those for which there is another one, and that.
const INSTEAD: [(&str, &str); 3] = [
    ("__neigh_event_send", "neigh_resolve_output"),
    ("ip_local_deliver", "ip_local_deliver_finish"),
    ("ip6_input", "ip6_protocol_deliver_rcu"),
];

const VIP_V4: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 20);
const VIP_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, 0x20);
const UDP: u8 = 17;
const TCP: u8 = 6;

fn names<const N: usize>(names: [&str; N]) -> BTreeSet<String> {
    names.map(str::to_owned).into()
}

/// Kprobes and nothing else, and every packet to or from these.
fn plan<const N: usize>(addresses: [IpAddr; N]) -> Plan {
    Plan {
        addresses: addresses.map(|address| Watched { address, port: None }).into(),
        tiers: [Tier::Kprobe].into(),
        ..Plan::default()
    }
}

fn kprobes(observers: &Observers) -> &TierStatus {
    let found = observers.status().iter().find(|status| status.tier == Tier::Kprobe);
    found.expect("the tier was asked for")
}

fn start(plan: &Plan) -> Observers {
    let observers = Observers::start(plan).expect("start");
    let TierStatus { attached, missing, reason, .. } = kprobes(&observers);
    assert_eq!(*reason, None, "this test needs kprobes");
    assert!(missing.is_empty(), "{missing:#?}");
    let expected = FUNCTIONS.map(|function| {
        let instead = INSTEAD.iter().find(|(first, _)| *first == function);
        match instead {
            Some((_, instead)) if plan.avoid.contains(function) => instead,
            _ => function,
        }
    });
    assert_eq!(*attached, expected);
    observers
}

/// Reads until `enough` is true of what was seen.
fn read(observers: &mut Observers, enough: impl Fn(&[Sighting]) -> bool) -> Vec<Sighting> {
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut seen = Vec::new();
    while !enough(&seen) {
        let left = deadline.saturating_duration_since(Instant::now());
        assert!(!left.is_zero(), "{}", told(&seen));
        observers.wait(left).expect("wait");
        while let Some(sighting) = observers.next().expect("event") {
            seen.push(sighting);
        }
    }
    for sighting in &seen {
        assert_eq!(
            (sighting.tier, sighting.ifindex),
            (Tier::Kprobe, index(DEVICE)),
            "{sighting:?}"
        );
    }
    assert_eq!(observers.malformed(), 0);
    for count in observers.counts().expect("counts") {
        assert_eq!(count.lost, 0, "{count:?}");
    }
    seen
}

/// What was seen, one line each.
fn told(seen: &[Sighting]) -> String {
    let line = |one: &Sighting| {
        let packet = one.packet.as_ref().map(|packet| {
            (packet.source, packet.destination, packet.protocol, packet.ports, packet.icmp)
        });
        let (skb, detail) = (one.skb, one.detail.as_deref());
        format!("\n{:?} {skb:x?} {:?} {packet:?} {detail:?}", one.hook, one.neighbour)
    };
    seen.iter().map(line).collect::<Vec<_>>().concat()
}

fn to(one: &Sighting, address: IpAddr, port: u16) -> bool {
    one.packet.as_ref().is_some_and(|packet| {
        packet.destination == address && packet.ports.is_some_and(|(_, to)| to == port)
    })
}

fn send_udp(from: SocketAddr, to: SocketAddr) {
    let socket = UdpSocket::bind(from).expect("bind");
    assert_eq!(socket.send_to(b"hello", to).expect("send"), 5);
}

#[test]
fn questions_for_a_neighbour_that_does_not_answer_are_seen_with_key_device_and_packet() {
    let _others = among_others();
    let absent = ["192.0.2.99", "2001:db8:1::99"].map(|text| text.parse::<IpAddr>().expect("it"));
    let control = ["192.0.2.98", "2001:db8:1::98"].map(|text| text.parse::<IpAddr>().expect("it"));
    for avoid in [names([]), names(["__neigh_event_send"])] {
        let (node, _client) = node_and_client();
        node.run(|| {
            let next_hops = Plan { next_hops: absent.into(), avoid, ..plan([]) };
            let mut observers = start(&next_hops);
            for address in control.iter().chain(&absent).copied() {
                let any: IpAddr = if address.is_ipv4() {
                    Ipv4Addr::UNSPECIFIED.into()
                } else {
                    Ipv6Addr::UNSPECIFIED.into()
                };
                send_udp((any, 40001).into(), (address, 53).into());
            }
            // The packet for which the entry is made, and for which it is asked.
            let has = |seen: &[Sighting], address, hook, state: Option<&str>| {
                seen.iter().any(|one| {
                    let is_it = one.neighbour.as_ref().is_some_and(|neighbour| {
                        neighbour.address == address && neighbour.state.as_deref() == state
                    });
                    let with_packet = hook == Hook::NeighCreate || to(one, address, 53);
                    one.hook == hook && is_it && with_packet
                })
            };
            // The question itself, as it is queued.
            let asked = |seen: &[Sighting], address: IpAddr| {
                seen.iter().any(|one| {
                    let is_question = match &one.packet {
                        None => address.is_ipv4(),
                        Some(Packet { icmp, .. }) => *icmp == Some((135, 0)),
                    };
                    one.hook == Hook::NeighSolicit
                        && one.neighbour.as_ref().is_some_and(|one| one.address == address)
                        && is_question
                })
            };
            let seen = read(&mut observers, |seen| {
                absent.iter().all(|&address| {
                    has(seen, address, Hook::NeighCreate, None)
                        && has(seen, address, Hook::NeighResolve, Some("NONE"))
                        && has(seen, address, Hook::NeighSolicit, Some("INCOMPLETE"))
                        && asked(seen, address)
                })
            });
            for one in &seen {
                let about = one.neighbour.as_ref().map(|neighbour| neighbour.address);
                assert!(about.is_some_and(|address| absent.contains(&address)), "{one:?}");
            }
        });
    }
}

/// Lets the node send what is for the VIPs to the client, and waits until it can.
fn forward(node: &Host) {
    node.run(|| {
        fs::write("/proc/sys/net/ipv4/ip_forward", "1").expect("forwarding");
        fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1").expect("forwarding");
        netlink(async |handle| {
            let device = index(DEVICE);
            let v4 = RouteMessageBuilder::<Ipv4Addr>::new()
                .destination_prefix(VIP_V4, 32)
                .gateway(CLIENT_V4)
                .output_interface(device)
                .build();
            handle.route().add(v4).execute().await.expect("IPv4 route");
            let v6 = RouteMessageBuilder::<Ipv6Addr>::new()
                .destination_prefix(VIP_V6, 128)
                .gateway(CLIENT_V6)
                .output_interface(device)
                .build();
            handle.route().add(v6).execute().await.expect("IPv6 route");
        });
    });
}

#[test]
fn routes_forwarding_delivery_resets_and_errors_are_seen_with_their_packet() {
    let _others = among_others();
    let avoided = names(INSTEAD.map(|(first, _)| first));
    for avoid in [names([]), avoided] {
        let (node, client) = node_and_client();
        forward(&node);
        node.run(|| {
            let watched = plan([VIP_V4.into(), VIP_V6.into(), NODE_V4.into(), NODE_V6.into()]);
            let mut observers = start(&Plan { avoid, ..watched });
            let ends: [(IpAddr, IpAddr, IpAddr); 2] = [
                (CLIENT_V4.into(), VIP_V4.into(), NODE_V4.into()),
                (CLIENT_V6.into(), VIP_V6.into(), NODE_V6.into()),
            ];
            client.run(|| {
                for (from, vip, node) in ends {
                    send_udp((from, 40001).into(), (vip, 53).into());
                    send_udp((from, 40001).into(), (node, 54).into());
                    // Nobody listens: it is refused.
                    TcpStream::connect_timeout(&(node, 443).into(), Duration::from_secs(5))
                        .expect_err("connected to nobody");
                }
            });
            let find = |seen: &[Sighting], hook, address, port| {
                seen.iter().find(|one| one.hook == hook && to(one, address, port)).cloned()
            };
            let mut expected = Vec::new();
            for (_, vip, node) in ends {
                expected.extend(
                    [Hook::Route, Hook::Forward, Hook::Queue, Hook::Transmit]
                        .map(|hook| (hook, vip, 53)),
                );
                expected.extend(
                    [Hook::Route, Hook::LocalDeliver, Hook::IcmpSend].map(|hook| (hook, node, 54)),
                );
                expected.extend(
                    [Hook::Route, Hook::LocalDeliver, Hook::TcpReset].map(|hook| (hook, node, 443)),
                );
            }
            let seen = read(&mut observers, |seen| {
                expected
                    .iter()
                    .all(|&(hook, address, port)| find(seen, hook, address, port).is_some())
            });
            for &(hook, address, port) in &expected {
                let one = find(&seen, hook, address, port).expect("it was read");
                let first = find(&seen, Hook::Route, address, port).expect("it was read");
                let packet = one.packet.as_ref().expect("a packet");
                assert_eq!(packet.protocol, if port == 443 { TCP } else { UDP });
                // One buffer, from hook to hook.
                assert!(one.skb.is_some() && one.skb == first.skb, "{}", told(&seen));
                let detail = match (hook, address.is_ipv4()) {
                    (Hook::IcmpSend, true) => Some("type 3, code 3"),
                    (Hook::IcmpSend, false) => Some("type 1, code 4"),
                    _ => None,
                };
                assert_eq!(one.detail.as_deref(), detail);
            }
            // What is forwarded is not delivered, and the other way round.
            for (_, vip, node) in ends {
                assert_eq!(find(&seen, Hook::LocalDeliver, vip, 53), None);
                assert_eq!(find(&seen, Hook::Forward, node, 54), None);
                assert_eq!(find(&seen, Hook::Forward, node, 443), None);
            }
        });
    }
}

#[test]
fn what_is_not_attached_is_said() {
    let _others = among_others();
    Host::new().run(|| {
        let part = Plan { avoid: names(["arp_solicit"]), ..plan([VIP_V4.into()]) };
        let observers = Observers::start(&part).expect("start");
        let TierStatus { attached, missing, reason, .. } = kprobes(&observers);
        assert_eq!((attached.len(), reason), (FUNCTIONS.len() - 1, &None));
        let why = "it is to be left alone".to_owned();
        assert_eq!(*missing, [("arp_solicit".to_owned(), why.clone())]);

        let avoid = FUNCTIONS.into_iter().chain(INSTEAD.map(|(_, instead)| instead));
        let none = Plan { avoid: avoid.map(str::to_owned).collect(), ..part };
        let observers = Observers::start(&none).expect("start");
        let TierStatus { attached, missing, reason, .. } = kprobes(&observers);
        assert_eq!((attached.len(), reason), (0, &Some(why)));
        let missing: Vec<_> = missing.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(missing, FUNCTIONS);

        // Where a tracepoint says it, no kprobe says it again.
        let both = Plan { tiers: [Tier::Tracepoint, Tier::Kprobe].into(), ..plan([]) };
        let observers = Observers::start(&both).expect("start");
        let attached = &kprobes(&observers).attached;
        let mut by_tracepoint =
            vec!["__neigh_create", "__dev_queue_xmit", "dev_hard_start_xmit", "__icmp_send"];
        // Before, the tracepoint does not tell those of closed ports.
        if net::release() >= (6, 10) {
            by_tracepoint.extend(["tcp_v4_send_reset", "tcp_v6_send_reset"]);
        }
        let left: Vec<_> =
            FUNCTIONS.into_iter().filter(|name| !by_tracepoint.contains(name)).collect();
        assert_eq!(*attached, left);
    });
}

/// Set for the process that is killed.
const VICTIM: &str = "INSPECTOR_TEST_VICTIM";
const NAME: &str = "nothing_is_left_when_the_process_is_killed";

/// Those of the functions at which the kernel has a kprobe.
fn probed() -> Vec<&'static str> {
    const LIST: &str = "/sys/kernel/debug/kprobes/list";
    let text = fs::read_to_string(LIST).unwrap_or_else(|error| {
        panic!("{LIST}: {error}; this test needs kprobes, and debugfs mounted")
    });
    let has = |function: &&str| text.contains(&format!("  {function}+0x"));
    FUNCTIONS.into_iter().filter(has).collect()
}

/// This test is its own victim, in a process that it starts.
#[test]
fn nothing_is_left_when_the_process_is_killed() {
    if std::env::var_os(VICTIM).is_some() {
        let _observers = start(&plan([VIP_V4.into()]));
        println!("\nattached");
        thread::sleep(Duration::from_mins(1));
        panic!("nobody ended this process");
    }
    let _alone = ATTACHED.write().unwrap_or_else(PoisonError::into_inner);
    let mut victim = Command::new(std::env::current_exe().expect("self"))
        .args(["--exact", NAME, "--nocapture"])
        .env(VICTIM, "1")
        .stdout(Stdio::piped())
        .spawn()
        .expect("start this test once more");
    let said = BufReader::new(victim.stdout.take().expect("piped")).lines();
    let attached = said.map_while(Result::ok).any(|line| line == "attached");
    let while_it_lived = probed();
    victim.kill().expect("kill it");
    victim.wait().expect("wait");
    assert!(attached, "it did not attach");
    assert_eq!(while_it_lived, FUNCTIONS, "the test cannot see them");
    // The kernel frees what nobody holds any more a little later.
    let deadline = Instant::now() + Duration::from_secs(20);
    while !probed().is_empty() {
        assert!(Instant::now() < deadline, "left: {:?}", probed());
        thread::sleep(Duration::from_millis(50));
    }
}
