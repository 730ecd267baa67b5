//! The observers on a real kernel: real packets on real devices, in network namespaces that the test
//! makes. Needs root.

mod net;

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use aya::programs::{ProgramFd, SchedClassifier, TcAttachType, loaded_links, loaded_programs};
use inspector::sys::tc::{Direction, RouteSocket};
use inspector::sys::test_run::{self, Given};
use inspector::trace::TraceError;
use inspector::trace::observe::{Backend, Chain, HookCount, Observers, Plan, Watched};
use inspector::trace::sighting::{Hook, Packet, Sighting, Tier};
use net::{
    CLIENT_DEVICE, CLIENT_V4, CLIENT_V6, DEVICE, index, node_and_client, release, send_frame, tun,
};

const VIP_V4: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 20);
const VIP_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, 0x20);
/// Next to the VIPs, and not watched.
const CONTROL_V4: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 21);
const CONTROL_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, 0x21);

/// What [`attached`] says when nothing is.
const NOTHING: [u32; 0] = [];

const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const SYN: u8 = 2;

/// Both VIPs, at tc ingress of a device and nowhere else.
fn plan(device: &str) -> Plan {
    Plan {
        addresses: [IpAddr::from(VIP_V4), VIP_V6.into()]
            .map(|address| Watched { address, port: None })
            .into(),
        ingress: vec![device.to_owned()],
        tiers: [Tier::Tc].into(),
        headers: true,
        ..Plan::default()
    }
}

fn start(plan: &Plan) -> Observers {
    let observers = Observers::start(plan).expect("start");
    for status in observers.status() {
        assert_eq!(status.reason, None, "{status:?}");
        assert!(status.missing.is_empty(), "{status:?}");
    }
    observers
}

/// Reads `count` sightings, and then for a while whether there are more, which is a failure.
fn read(observers: &mut Observers, count: usize) -> Vec<Sighting> {
    const PATIENCE: Duration = Duration::from_secs(5);
    const SILENCE: Duration = Duration::from_millis(200);
    let mut sightings = Vec::new();
    let mut deadline = Instant::now() + if count == 0 { SILENCE } else { PATIENCE };
    loop {
        while let Some(sighting) = observers.next().expect("event") {
            sightings.push(sighting);
            if sightings.len() == count {
                deadline = Instant::now() + SILENCE;
            }
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            assert_eq!(sightings.len(), count, "{sightings:#?}");
            return sightings;
        }
        observers.wait(left).expect("wait");
    }
}

fn packet(sighting: &Sighting) -> &Packet {
    sighting.packet.as_ref().unwrap_or_else(|| panic!("no packet in {sighting:?}"))
}

fn assert_counts(observers: &Observers, hook: Hook, matched: u64) {
    assert_eq!(
        observers.counts().expect("counts"),
        [HookCount { tier: Tier::Tc, hook, matched, lost: 0 }]
    );
    assert_eq!(observers.malformed(), 0);
}

#[test]
fn real_packets_for_a_vip_are_seen_and_others_are_not() {
    let (node, client) = node_and_client();
    node.run(|| {
        let mut observers = start(&plan(DEVICE));
        let before = monotonic();

        client.run(|| {
            for (vip, control, source) in [
                (IpAddr::from(VIP_V4), IpAddr::from(CONTROL_V4), IpAddr::from(CLIENT_V4)),
                (IpAddr::from(VIP_V6), IpAddr::from(CONTROL_V6), IpAddr::from(CLIENT_V6)),
            ] {
                for to in [control, vip, control] {
                    send_udp((source, 40001).into(), (to, 53).into(), b"hello");
                    send_syn((source, 40002).into(), (to, 443).into());
                }
            }
        });

        let mut sightings = read(&mut observers, 4);
        for sighting in &sightings {
            assert!(
                (before.as_nanos()..=monotonic().as_nanos())
                    .contains(&u128::from(sighting.monotonic_ns)),
                "{sighting:?} is not between {before:?} and now"
            );
            assert_eq!((sighting.hook, sighting.tier), (Hook::TcIngress, Tier::Tc));
            assert_eq!(sighting.ifindex, index(DEVICE));
            assert_eq!((sighting.skb, sighting.mark), (None, Some(0)));
            assert!(!packet(sighting).fragment, "{sighting:?}");
        }
        sightings.sort_by_key(|one| (packet(one).destination, packet(one).protocol));
        let [tcp_v4, udp_v4, tcp_v6, udp_v6] = sightings.as_slice() else {
            panic!("not four: {sightings:#?}");
        };

        for (sighting, vip, source, ip_header) in [
            (udp_v4, IpAddr::from(VIP_V4), IpAddr::from(CLIENT_V4), 20),
            (udp_v6, VIP_V6.into(), CLIENT_V6.into(), 40),
        ] {
            let packet = packet(sighting);
            assert_eq!((packet.destination, packet.source), (vip, source));
            assert_eq!(packet.protocol, UDP);
            assert_eq!(packet.ports, Some((40001, 53)));
            assert_eq!(packet.tcp, None);
            assert_eq!((packet.length, packet.payload_length), (ip_header + 8 + 5, 5));
            // No payload leaves the kernel.
            let headers = sighting.headers.as_ref().expect("headers");
            assert_eq!(headers.len(), usize::try_from(ip_header + 8).expect("small"));
        }
        for (sighting, vip, source) in [
            (tcp_v4, IpAddr::from(VIP_V4), IpAddr::from(CLIENT_V4)),
            (tcp_v6, VIP_V6.into(), CLIENT_V6.into()),
        ] {
            let packet = packet(sighting);
            assert_eq!((packet.destination, packet.source), (vip, source));
            assert_eq!(packet.protocol, TCP);
            assert_eq!(packet.ports, Some((40002, 443)));
            // The ECN bits (0xc0) depend on the system's settings.
            assert_eq!(packet.tcp.map(|(_, ack, flags)| (ack, flags & 0x3f)), Some((0, SYN)));
            assert_eq!((packet.payload_length, packet.ttl), (0, 64));
        }
        assert_counts(&observers, Hook::TcIngress, 4);
    });
}

#[test]
fn options_extension_headers_fragments_and_vlan_tags_are_understood() {
    let (node, client) = node_and_client();
    node.run(|| {
        let mut observers = start(&plan(DEVICE));

        client.run(|| {
            // Four times "no operation".
            send_udp_with(
                VIP_V4.into(),
                1,
                b"options",
                libc::IPPROTO_IP,
                libc::IP_OPTIONS,
                &[1; 4],
            );
            // One destination options header, of padding.
            let padding = [0, 0, 1, 4, 0, 0, 0, 0];
            let (level, name) = (libc::IPPROTO_IPV6, libc::IPV6_DSTOPTS);
            send_udp_with(VIP_V6.into(), 2, b"extension", level, name, &padding);
            // More than one frame takes, twice.
            send_udp((CLIENT_V4, 40001).into(), (VIP_V4, 3).into(), &[0; 3000]);
            send_udp((CLIENT_V6, 40001).into(), (VIP_V6, 4).into(), &[0; 3000]);
            // The kernel takes the outer tag off before tc sees the frame, the inner one stays.
            let mut frame = vec![0xff; 12];
            frame.extend([0x88, 0xa8, 0, 7, 0x81, 0x00, 0, 8, 0x08, 0x00]);
            frame.extend(ipv4(UDP, &[&[0, 9, 0, 5, 0, 12, 0, 0], b"vlan".as_slice()].concat()));
            send_frame(CLIENT_DEVICE, &frame);
        });

        let sightings = read(&mut observers, 9);
        let packets: Vec<&Packet> = sightings.iter().map(packet).collect();
        let to_port = |port| {
            let found: Vec<_> = packets
                .iter()
                .filter(|packet| packet.ports.is_some_and(|(_, destination)| destination == port))
                .collect();
            let [packet] = found.as_slice() else {
                panic!("not one packet to port {port}: {packets:#?}");
            };
            (**packet).clone()
        };
        let options = to_port(1);
        assert_eq!((options.length, options.payload_length), (24 + 8 + 7, 7));
        let extension = to_port(2);
        assert_eq!((extension.length, extension.payload_length), (40 + 8 + 8 + 9, 9));
        assert_eq!((extension.protocol, extension.fragment), (UDP, false));
        let vlan = to_port(5);
        assert_eq!((vlan.source, vlan.payload_length), (CLIENT_V4.into(), 4));

        for first in [to_port(3), to_port(4)] {
            let fragments: Vec<_> = packets
                .iter()
                .filter(|packet| packet.fragment && packet.destination == first.destination)
                .collect();
            assert_eq!(fragments.len(), 3, "{fragments:#?}");
            assert_eq!(fragments.iter().filter(|fragment| fragment.ports.is_some()).count(), 1);
            assert_eq!(fragments.iter().map(|fragment| fragment.payload_length).sum::<u32>(), 3000);
            for fragment in fragments {
                assert_eq!(fragment.protocol, UDP);
                assert_ne!(fragment.ip_id, 0);
                assert_eq!(fragment.ip_id, first.ip_id);
            }
        }
        assert_counts(&observers, Hook::TcIngress, 9);
    });
}

#[test]
fn packets_of_a_device_without_link_layer_header_are_seen() {
    net::Host::new().run(|| {
        let mut device = tun("wg0");
        let mut observers = start(&plan("wg0"));

        // Source port 51600, destination port 443, sequence number, offset of 24 bytes, SYN.
        let mut syn = vec![0xc9, 0x90, 0x01, 0xbb, 0x01, 0x23, 0x45, 0x67, 0, 0, 0, 9, 0x60, 0x02];
        syn.extend([0; 10]);
        syn.extend(b"abc");
        let v4 = ipv4(TCP, &syn);
        let v6 = ipv6(VIP_V6, TCP, &syn);
        let control = ipv6(CONTROL_V6, TCP, &syn);
        for packet in [&control, &v4, &v6, &control] {
            assert_eq!(device.write(packet).expect("write to the TUN device"), packet.len());
        }

        let mut sightings = read(&mut observers, 2);
        sightings.sort_by_key(|one| packet(one).destination);
        for (sighting, sent) in sightings.iter().zip([&v4, &v6]) {
            assert_eq!(sighting.ifindex, index("wg0"));
            // Without the payload.
            assert_eq!(sighting.headers.as_deref(), Some(&sent[..sent.len() - 3]));
        }
        let expected = Packet {
            source: CLIENT_V4.into(),
            destination: VIP_V4.into(),
            protocol: TCP,
            ports: Some((51600, 443)),
            tcp: Some((0x0123_4567, 9, SYN)),
            icmp: None,
            quoted: None,
            ip_id: 0xabcd,
            flow_label: 0,
            ttl: 64,
            fragment: false,
            length: 20 + 27,
            payload_length: 3,
        };
        assert_eq!(
            sightings.iter().map(packet).collect::<Vec<_>>(),
            [
                &expected,
                &Packet {
                    source: CLIENT_V6.into(),
                    destination: VIP_V6.into(),
                    ip_id: 0,
                    flow_label: 0x5_4321,
                    length: 40 + 27,
                    ..expected.clone()
                }
            ]
        );
        assert_counts(&observers, Hook::TcIngress, 2);
    });
}

#[test]
fn icmp_errors_count_for_the_packet_that_they_quote() {
    net::Host::new().run(|| {
        let mut device = tun("wg0");
        let mut observers = start(&plan("wg0"));
        let udp = [0x9c, 0x41, 0, 53, 0, 8, 0, 0];
        let error = |quoted: &[u8]| {
            // Host unreachable, from the client to an address that is not watched.
            let mut packet = ipv4(ICMP, &[&[3, 1, 0, 0, 0, 0, 0, 0], quoted].concat());
            packet[16..20].copy_from_slice(&CONTROL_V4.octets());
            packet
        };
        let mut elsewhere = ipv4(UDP, &udp);
        elsewhere[16..20].copy_from_slice(&CONTROL_V4.octets());
        for packet in [error(&elsewhere), error(&ipv4(UDP, &udp))] {
            assert_eq!(device.write(&packet).expect("write to the TUN device"), packet.len());
        }
        let sightings = read(&mut observers, 1);
        let packet = packet(&sightings[0]);
        assert_eq!((packet.destination, packet.icmp), (CONTROL_V4.into(), Some((3, 1))));
        let quoted = packet.quoted.as_ref().expect("a quoted packet");
        assert_eq!((quoted.source, quoted.destination), (CLIENT_V4.into(), VIP_V4.into()));
        assert_eq!((quoted.protocol, quoted.ports), (UDP, Some((0x9c41, 53))));
    });
}

#[test]
fn ports_backends_and_clients_narrow_it() {
    const BACKEND: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 5);
    net::Host::new().run(|| {
        let mut device = tun("wg0");
        let narrowed = Plan {
            addresses: vec![Watched { address: VIP_V4.into(), port: Some((443, TCP)) }],
            backends: vec![Backend { address: BACKEND.into(), port: 8443, protocol: UDP }],
            ..plan("wg0")
        };
        let mut observers = start(&narrowed);
        let udp = |from: u16, to: u16| {
            let ([a, b], [c, d]) = (from.to_be_bytes(), to.to_be_bytes());
            vec![a, b, c, d, 0, 8, 0, 0]
        };
        let tcp = |to: u16| {
            let mut header = udp(1, to);
            header.extend([0, 0, 0, 0, 0x50, 2, 0, 0, 0, 0, 0, 0]);
            header
        };
        let between = |source: Ipv4Addr, destination: Ipv4Addr, mut packet: Vec<u8>| {
            packet[12..16].copy_from_slice(&source.octets());
            packet[16..20].copy_from_slice(&destination.octets());
            packet
        };
        let packets = [
            (true, ipv4(TCP, &tcp(443))),
            (false, ipv4(TCP, &tcp(444))),
            (false, ipv4(UDP, &udp(1, 443))),
            // Ping.
            (false, ipv4(ICMP, &[8, 0, 0, 0, 0, 0, 0, 0])),
            (true, between(CLIENT_V4, BACKEND, ipv4(UDP, &udp(7, 8443)))),
            (true, between(BACKEND, CLIENT_V4, ipv4(UDP, &udp(8443, 7)))),
            (false, between(BACKEND, CLIENT_V4, ipv4(UDP, &udp(7, 8443)))),
            (false, between(CLIENT_V4, BACKEND, ipv4(TCP, &tcp(8443)))),
        ];
        for (_, packet) in &packets {
            assert_eq!(device.write(packet).expect("write to the TUN device"), packet.len());
        }
        let ports = |sightings: Vec<Sighting>| -> Vec<_> {
            sightings.iter().map(|one| (packet(one).protocol, packet(one).ports)).collect()
        };
        assert_eq!(
            ports(read(&mut observers, packets.iter().filter(|one| one.0).count())),
            [(TCP, Some((1, 443))), (UDP, Some((7, 8443))), (UDP, Some((8443, 7)))]
        );

        // Of another client, whoever sends.
        let mut observers = start(&Plan { clients: vec![CONTROL_V4.into()], ..narrowed.clone() });
        for (_, packet) in &packets {
            assert_eq!(device.write(packet).expect("write to the TUN device"), packet.len());
        }
        let packet = between(BACKEND, CONTROL_V4, ipv4(UDP, &udp(8443, 9)));
        assert_eq!(device.write(&packet).expect("write to the TUN device"), packet.len());
        assert_eq!(ports(read(&mut observers, 1)), [(UDP, Some((8443, 9)))]);
    });
}

#[test]
fn questions_for_a_watched_neighbour_are_seen_at_tc_netlink_and_tracepoints() {
    let absent: [IpAddr; 2] =
        ["192.0.2.99".parse().expect("it"), "2001:db8:1::99".parse().expect("it")];
    let control: [IpAddr; 2] =
        ["192.0.2.98".parse().expect("it"), "2001:db8:1::98".parse().expect("it")];
    let (node, _client) = node_and_client();
    node.run(|| {
        let mut observers = start(&Plan {
            next_hops: absent.into(),
            egress: vec![DEVICE.to_owned()],
            ingress: Vec::new(),
            tiers: [Tier::Tc, Tier::Netlink, Tier::Tracepoint].into(),
            addresses: Vec::new(),
            ..plan(DEVICE)
        });
        for to in control.iter().chain(&absent) {
            let any: IpAddr = if to.is_ipv4() {
                Ipv4Addr::UNSPECIFIED.into()
            } else {
                Ipv6Addr::UNSPECIFIED.into()
            };
            send_udp((any, 40001).into(), (*to, 53).into(), b"");
        }
        // The kernel gives up after three seconds.
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut seen = Vec::new();
        let failed = |seen: &[Sighting], address| {
            seen.iter().any(|one: &Sighting| {
                one.neighbour.as_ref().is_some_and(|neighbour| {
                    neighbour.address == address && neighbour.state.as_deref() == Some("FAILED")
                })
            })
        };
        while !absent.iter().all(|address| failed(&seen, *address)) {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "{seen:#?}");
            observers.wait(left).expect("wait");
            while let Some(sighting) = observers.next().expect("event") {
                seen.push(sighting);
            }
        }
        for sighting in &seen {
            assert_eq!(sighting.ifindex, index(DEVICE), "{sighting:?}");
        }
        for address in absent {
            let of = |tier, hook, state: Option<&str>| {
                seen.iter().filter(|one| (one.tier, one.hook) == (tier, hook)).any(|one| {
                    one.neighbour.as_ref().is_some_and(|neighbour| {
                        neighbour.address == address
                            && (state.is_none() || neighbour.state.as_deref() == state)
                    })
                })
            };
            assert!(of(Tier::Tracepoint, Hook::NeighCreate, None), "{seen:#?}");
            assert!(of(Tier::Tracepoint, Hook::NeighResolve, Some("INCOMPLETE")), "{seen:#?}");
            assert!(of(Tier::Tracepoint, Hook::NeighSolicit, None), "{seen:#?}");
            assert!(of(Tier::Tc, Hook::NeighSolicit, None), "{seen:#?}");
            assert!(of(Tier::Netlink, Hook::NeighUpdate, Some("FAILED")), "{seen:#?}");
            let route = seen
                .iter()
                .find(|one| one.flow.as_ref().is_some_and(|flow| flow.destination == address));
            let route = route.unwrap_or_else(|| panic!("no route look-up: {seen:#?}"));
            assert_eq!((route.hook, route.tier), (Hook::Route, Tier::Tracepoint));
            assert_eq!(route.flow.as_ref().expect("it").gateway, None);
        }
        for address in control {
            assert!(
                !seen.iter().any(|one| {
                    one.neighbour.as_ref().is_some_and(|neighbour| neighbour.address == address)
                }),
                "{seen:#?}"
            );
        }
    });
}

#[test]
fn tracepoints_see_packets_of_this_network_namespace_alone() {
    let (node, client) = node_and_client();
    let vips = Plan { ingress: Vec::new(), tiers: [Tier::Tracepoint].into(), ..plan(DEVICE) };
    let in_the_node = |work: &dyn Fn()| {
        // What the client's kernel does is seen by an observer that is there, and by none here.
        let mut here = start(&vips);
        work();
        std::thread::sleep(Duration::from_millis(300));
        let mut seen = Vec::new();
        while let Some(sighting) = here.next().expect("event") {
            seen.push(sighting);
        }
        seen
    };
    let send = || {
        client.run(|| send_udp((CLIENT_V4, 40001).into(), (VIP_V4, 53).into(), b"hello"));
    };
    let node_saw = node.run(|| in_the_node(&send));
    let hooks = |seen: &[Sighting]| -> BTreeSet<Hook> { seen.iter().map(|one| one.hook).collect() };
    assert!(hooks(&node_saw).contains(&Hook::Receive), "{node_saw:#?}");
    for hook in [Hook::Queue, Hook::Transmit] {
        assert!(!hooks(&node_saw).contains(&hook), "the client's: {node_saw:#?}");
    }
    // The node does not forward, and says why it drops it.
    let drop = node_saw.iter().find(|one| one.hook == Hook::Drop);
    let drop = drop.unwrap_or_else(|| panic!("no drop: {node_saw:#?}"));
    assert_eq!(packet(drop).ports, Some((40001, 53)));
    let reason = drop.detail.as_deref().expect("a reason");
    assert!(reason.starts_with("IP_"), "{reason}");
    let received = node_saw.iter().find(|one| one.hook == Hook::Receive).expect("seen above");
    assert!(received.skb.is_some() && received.skb == drop.skb, "{node_saw:#?}");
    assert_eq!(received.ifindex, node.run(|| index(DEVICE)));

    let client_saw = client.run(|| in_the_node(&send));
    assert!(hooks(&client_saw).contains(&Hook::Queue), "{client_saw:#?}");
    assert!(hooks(&client_saw).contains(&Hook::Transmit), "{client_saw:#?}");
    assert!(!hooks(&client_saw).contains(&Hook::Drop), "the node's: {client_saw:#?}");
    let queued = client_saw.iter().find(|one| one.hook == Hook::Queue).expect("seen above");
    let packet = packet(queued);
    assert_eq!((packet.length, packet.payload_length), (20 + 8 + 5, 5));
}

#[test]
fn resets_and_errors_that_the_stack_sends_are_seen_with_their_packet() {
    let own: IpAddr = "192.0.2.10".parse().expect("it");
    let (node, client) = node_and_client();
    node.run(|| {
        let mut observers = start(&Plan {
            addresses: vec![Watched { address: own, port: None }],
            ingress: Vec::new(),
            tiers: [Tier::Tracepoint].into(),
            ..plan(DEVICE)
        });
        client.run(|| {
            send_syn((CLIENT_V4, 40002).into(), (own, 443).into());
            send_udp((CLIENT_V4, 40001).into(), (own, 53).into(), b"hello");
        });
        // Where the tracepoint does not tell it, the status has to.
        let tells_reset = release() >= (6, 10);
        let name = if tells_reset {
            "tcp_send_reset"
        } else {
            "tcp_send_reset (before Linux 6.10: not of closed ports)"
        };
        let attached = &observers.status()[0].attached;
        assert!(attached.iter().any(|one| one == name), "{attached:?}");
        let deadline = Instant::now() + Duration::from_secs(5);
        let mut seen: Vec<Sighting> = Vec::new();
        let find = |seen: &[Sighting], hook| seen.iter().find(|one| one.hook == hook).cloned();
        let (reset, error) = loop {
            while let Some(sighting) = observers.next().expect("event") {
                seen.push(sighting);
            }
            let reset = find(&seen, Hook::TcpReset);
            if let Some(error) = find(&seen, Hook::IcmpSend)
                && reset.is_some() == tells_reset
            {
                break (reset, error);
            }
            assert!(Instant::now() < deadline, "{seen:#?}");
            observers.wait(Duration::from_millis(100)).expect("wait");
        };
        if let Some(reset) = reset {
            assert_eq!(packet(&reset).ports, Some((40002, 443)));
            assert_eq!(reset.ifindex, index(DEVICE));
        }
        assert_eq!(packet(&error).ports, Some((40001, 53)));
        assert_eq!(error.detail.as_deref(), Some("type 3, code 3"));
        let dropped: BTreeSet<_> = seen
            .iter()
            .filter(|one| one.hook == Hook::Drop)
            .filter_map(|one| one.detail.as_deref())
            .collect();
        assert!(dropped.contains("NO_SOCKET"), "{dropped:?}");
    });
}

#[test]
fn events_that_find_no_room_are_counted_as_lost() {
    const SENT: u64 = 200;
    let (node, client) = node_and_client();
    node.run(|| {
        // One page: room for fewer than 20 events.
        let mut observers = start(&Plan { ring_bytes: 1, ..plan(DEVICE) });
        client.run(|| {
            for _ in 0..SENT {
                send_udp((CLIENT_V4, 40001).into(), (VIP_V4, 53).into(), b"");
            }
        });

        let deadline = Instant::now() + Duration::from_secs(5);
        let count = loop {
            let counts = observers.counts().expect("counts");
            if let [count] = counts.as_slice()
                && count.matched == SENT
            {
                break *count;
            }
            assert!(Instant::now() < deadline, "{counts:?}");
            std::thread::sleep(Duration::from_millis(10));
        };
        let mut seen = 0;
        while observers.next().expect("event").is_some() {
            seen += 1;
        }
        assert!(seen > 0 && count.lost > 0, "{seen} seen, {} lost", count.lost);
        assert_eq!(seen + count.lost, SENT);
    });
}

#[test]
fn malformed_packets_are_counted_but_are_no_sighting() {
    let (node, client) = node_and_client();
    node.run(|| {
        let mut observers = start(&plan(DEVICE));
        client.run(|| {
            let mut frame = vec![0xff; 12];
            frame.extend([0x08, 0x00]);
            frame.extend(ipv4(UDP, &[0, 9, 0, 5, 0, 8, 0, 0]));
            // A header of 12 bytes.
            frame[14] = 0x43;
            send_frame(CLIENT_DEVICE, &frame);
        });
        read(&mut observers, 0);
        assert_eq!(observers.malformed(), 1);
        assert_eq!(
            observers.counts().expect("counts"),
            [HookCount { tier: Tier::Tc, hook: Hook::TcIngress, matched: 1, lost: 0 }]
        );
    });
}

#[test]
fn it_is_first_lets_packets_go_on_and_is_gone_when_dropped() {
    let (node, client) = node_and_client();
    node.run(|| {
        assert_eq!(attached(), NOTHING);
        let mut early = start(&plan(DEVICE));
        let early_ids = attached();
        assert_eq!(early_ids.len(), 1);
        let mut late = start(&plan(DEVICE));
        let ids = attached();
        assert_eq!(ids.len(), 2);
        assert_eq!(ids[1], early_ids[0], "the later one is not first");

        // Both see the packet: the first one has let it go on.
        client.run(|| send_udp((CLIENT_V4, 40001).into(), (VIP_V4, 53).into(), b""));
        assert_eq!(read(&mut late, 1).len(), 1);
        assert_eq!(read(&mut early, 1).len(), 1);

        drop(late);
        assert_eq!(attached(), early_ids);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            let _observers = early;
            panic!("on purpose");
        }));
        assert!(panicked.is_err());
        assert_eq!(attached(), NOTHING);
    });
}

#[test]
fn clsact_is_in_front_of_an_older_filter_and_lets_packets_go_on() {
    let (node, client) = node_and_client();
    let clsact = Plan { chain: Chain::Clsact, egress: vec![DEVICE.to_owned()], ..plan(DEVICE) };
    node.run(|| {
        let mut early = start(&clsact);
        assert_eq!(early.status()[0].attached, ["eno1 ingress (clsact)", "eno1 egress (clsact)"]);
        let early_filters = filters();
        assert_eq!(early_filters.len(), 2);
        let mut late = start(&clsact);
        let all = filters();
        assert_eq!(all.len(), 4);
        assert_eq!(all[1], early_filters[0], "the later one is not first");
        client.run(|| send_udp((CLIENT_V4, 40001).into(), (VIP_V4, 53).into(), b""));
        assert_eq!(read(&mut late, 1)[0].hook, Hook::TcIngress);
        assert_eq!(read(&mut early, 1).len(), 1);
        assert_eq!(tcx(), NOTHING, "tcx was not asked for");
        // The one that made the qdisc goes first; it is not empty then.
        drop(early);
        assert_eq!(filters().len(), 2);
        drop(late);
        assert_eq!(filters(), NOTHING);
    });
    // Alone, it takes its qdisc along.
    let (node, _client) = node_and_client();
    node.run(|| {
        drop(start(&clsact));
        assert!(!has_clsact());
    });
}

/// What a victim does when it has attached.
const ROLE: &str = "INSPECTOR_TEST_VICTIM";
const NAME: &str = "nothing_is_left_after_drop_panic_and_death";
const READY: &str = "victim: ";

/// This test is its own victim: in the process that it starts, it attaches and meets its end.
#[test]
fn nothing_is_left_after_drop_panic_and_death() {
    if let Some(role) = std::env::var_os(ROLE) {
        victim(role.to_str().expect("text"));
    }
    // Without tcx, the newest is clsact.
    let chains: &[&str] = if has_tcx() { &["newest", "clsact"] } else { &["newest"] };
    for chain in chains {
        for end in ["drop", "panic", "SIGKILL", "SIGTERM", "SIGINT"] {
            let (node, _client) = node_and_client();
            // A process is in the network namespace of the thread that starts it.
            node.run(|| meets_its_end(chain, end));
        }
    }
}

fn victim(role: &str) -> ! {
    let (chain, end) = role.split_once(' ').expect("two words");
    let plan = Plan {
        chain: if chain == "newest" { Chain::Newest } else { Chain::Clsact },
        egress: vec![DEVICE.to_owned()],
        tiers: [Tier::Tc, Tier::Netlink, Tier::Tracepoint].into(),
        ..plan(DEVICE)
    };
    let before = descriptors();
    let observers = start(&plan);
    println!("{READY}{}", descriptors().difference(&before).cloned().collect::<Vec<_>>().join(" "));
    match end {
        "drop" => drop(observers),
        "panic" => {
            let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
                let _observers = observers;
                panic!("on purpose");
            }));
            assert!(panicked.is_err());
        }
        _ => {
            std::thread::sleep(Duration::from_mins(1));
            panic!("nobody ended this process");
        }
    }
    println!("{READY}done");
    std::thread::sleep(Duration::from_mins(1));
    panic!("nobody ended this process");
}

/// What BPF objects this process holds by descriptors: `prog_id 7`, with a `-` between.
fn descriptors() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir("/proc/self/fdinfo").expect("/proc") {
        let Ok(text) = std::fs::read_to_string(entry.expect("an entry").path()) else { continue };
        for line in text.lines() {
            if let Some((key @ ("map_id" | "prog_id" | "link_id"), id)) = line.split_once(':') {
                found.insert(format!("{key}-{}", id.trim()));
            }
        }
    }
    found
}

/// Those of the objects that the kernel still has.
fn still_there(objects: &[String]) -> Vec<String> {
    let mut all = BTreeSet::new();
    for program in loaded_programs().filter_map(Result::ok) {
        all.insert(format!("prog_id-{}", program.id()));
    }
    for map in aya::maps::loaded_maps().filter_map(Result::ok) {
        all.insert(format!("map_id-{}", map.id()));
    }
    for link in loaded_links().filter_map(Result::ok) {
        all.insert(format!("link_id-{}", link.id()));
    }
    objects.iter().filter(|object| all.contains(*object)).cloned().collect()
}

fn meets_its_end(chain: &str, end: &str) {
    let mut victim = Command::new(std::env::current_exe().expect("self"))
        .args(["--exact", NAME, "--nocapture"])
        .env(ROLE, format!("{chain} {end}"))
        .stdout(Stdio::piped())
        .spawn()
        .expect("start this test once more");
    let mut said = BufReader::new(victim.stdout.take().expect("piped"))
        .lines()
        .map_while(Result::ok)
        .filter_map(|line| line.split_once(READY).map(|(_, rest)| rest.to_owned()));
    let objects = said.next().unwrap_or_else(|| panic!("{chain} {end}: it did not attach"));
    let objects: Vec<String> = objects.split(' ').map(str::to_owned).collect();
    let of = |kind: &str| objects.iter().filter(|object| object.starts_with(kind)).count();
    assert!(of("prog_id") >= 13 && of("map_id") >= 6, "{objects:?}");
    let pid = i32::try_from(victim.id()).expect("a process id");
    let signal = match end {
        "SIGTERM" => libc::SIGTERM,
        "SIGINT" => libc::SIGINT,
        _ => libc::SIGKILL,
    };
    if matches!(end, "drop" | "panic") {
        assert_eq!(said.next().as_deref(), Some("done"), "{chain} {end}");
    } else {
        assert!(of("link_id") >= 13, "{objects:?}");
        assert_eq!(still_there(&objects), objects, "{chain} {end}: the test cannot see them");
        let expected = if chain == "newest" && has_tcx() { (1, 0) } else { (0, 2) };
        assert_eq!((tcx().len(), filters().len()), expected);
        // SAFETY: no pointers are involved; the process is our child, not yet waited for.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
        let status = victim.wait().expect("wait");
        assert_eq!(status.signal(), Some(signal), "{status}");
    }
    // The kernel frees what nobody holds any more a little later, and the guard has to wake up.
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let left = (still_there(&objects), tcx(), filters(), has_clsact());
        if left == (Vec::new(), Vec::new(), Vec::new(), false) {
            break;
        }
        assert!(Instant::now() < deadline, "{chain} {end}: left: {left:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    let _ = victim.kill();
    let _ = victim.wait();
}

#[test]
fn traffic_through_a_watched_device_is_byte_for_byte_the_same() {
    let (node, client) = node_and_client();
    let syn = [&[0, 1, 1, 0xbb][..], &[7; 8], &[0x50, 2], &[9; 6], b"payload"].concat();
    let frame = |ethertype: [u8; 2], packet: Vec<u8>| {
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
        frame.extend(ethertype);
        frame.extend(packet);
        frame
    };
    let mut arp = vec![0, 1, 8, 0, 6, 4, 0, 1];
    arp.extend([2, 0, 0, 0, 0, 2, 192, 0, 2, 10, 0, 0, 0, 0, 0, 0]);
    arp.extend(VIP_V4.octets());
    let solicitation =
        [&[135, 0, 0, 0, 0, 0, 0, 0][..], &VIP_V6.octets(), &[1, 1], &[2; 6]].concat();
    let frames = [
        (true, frame([8, 0], ipv4(TCP, &syn))),
        (
            true,
            frame(
                [8, 0],
                ipv4(ICMP, &[&[3, 1, 0, 0, 0, 0, 0, 0], &ipv4(UDP, &[1; 8])[..]].concat()),
            ),
        ),
        (true, frame([0x86, 0xdd], ipv6(VIP_V6, TCP, &syn))),
        (true, frame([8, 6], arp)),
        (true, frame([0x86, 0xdd], ipv6(CONTROL_V6, 58, &solicitation))),
        (false, frame([0x86, 0xdd], ipv6(CONTROL_V6, TCP, &syn))),
        (false, frame([0x88, 0xb5], vec![0x45; 60])),
    ];
    node.run(|| {
        let mut observers = start(&Plan { egress: vec![DEVICE.to_owned()], ..plan(DEVICE) });
        // Egress: what the client's device gets is what was sent.
        let received = client.run(|| {
            let tap = net::tap(CLIENT_DEVICE);
            node.run(|| frames.iter().for_each(|(_, frame)| send_frame(DEVICE, frame)));
            net::frames(&tap, |frame| frames.iter().any(|(_, sent)| sent == frame), frames.len())
        });
        let sent: Vec<_> = frames.iter().map(|(_, frame)| frame.clone()).collect();
        assert_eq!(received, sent);
        let matching = frames.iter().filter(|(matches, _)| *matches).count();
        let seen = read(&mut observers, matching);
        assert!(seen.iter().all(|one| matches!(one.hook, Hook::TcEgress | Hook::NeighSolicit)));
        assert_eq!(seen.iter().filter(|one| one.neighbour.is_some()).count(), 2, "{seen:#?}");

        // Ingress and egress: what the kernel says that the program made of packet and context.
        let given = Given {
            ifindex: index(DEVICE),
            mark: 0x1234,
            priority: 5,
            control_buffer: [1, 2, 3, 4, 5],
        };
        for direction in [Direction::Ingress, Direction::Egress] {
            let program = first(direction);
            for (_, frame) in &frames {
                let ran = test_run::repeated(program.as_fd(), frame, &given, 1).expect("run");
                assert_eq!(ran.returned, -1, "TCX_NEXT");
                assert_eq!((&ran.packet, ran.left), (frame, given));
            }
            assert_eq!(read(&mut observers, matching).len(), matching);
        }
    });
}

/// Until they are attached, most of the time is the verifier's.
#[test]
fn the_verifier_goes_over_no_program_many_times() {
    // How often, on the average of all instructions of a program. Older verifiers know less of what
    // they need not look at again.
    let times = if release() >= (6, 6) { 4 } else { 40 };
    let (node, _client) = node_and_client();
    node.run(|| {
        let egress = vec![DEVICE.to_owned()];
        let every = Plan { tiers: Plan::default().tiers, egress, ..plan(DEVICE) };
        let observers = Observers::start(&every).expect("start");
        // Our own descriptors, since others' programs may have the same names.
        let mut seen = 0;
        for file in std::fs::read_dir("/proc/self/fdinfo").expect("/proc") {
            let info = std::fs::read_to_string(file.expect("/proc").path()).unwrap_or_default();
            let Some(id) = info.lines().find_map(|line| line.strip_prefix("prog_id:")) else {
                continue;
            };
            let id: u32 = id.trim().parse().expect("a number");
            let Some(program) = loaded_programs().flatten().find(|program| program.id() == id)
            else {
                continue;
            };
            let name = program.name_as_str().unwrap_or_default();
            let verified = program.verified_instruction_count().expect("Linux 5.16");
            let all = program.size_translated().expect("a size") / 8;
            assert!(verified <= times * all, "{name}: {verified} for {all} instructions");
            seen += 1;
        }
        let tracepoints = observers.status().iter().find(|one| one.tier == Tier::Tracepoint);
        let at_least = 2 + tracepoints.expect("asked for").attached.len();
        assert!(seen >= at_least, "{seen} of {at_least} programs");
    });
}

#[test]
fn a_device_that_is_not_there_is_named() {
    net::Host::new().run(|| {
        for name in ["nosuch0", "a-name-that-is-too-long-for-a-device", "", "nul\0"] {
            let error = Observers::start(&plan(name)).expect_err("attached to nothing");
            assert!(matches!(error, TraceError::Device { .. }), "{error}");
            assert!(error.to_string().contains(&format!("of device {name}: ")), "{error}");
        }
    });
}

/// Whether this kernel has tcx. Since Linux 6.6 it has to.
fn has_tcx() -> bool {
    let has = SchedClassifier::query_tcx("lo", TcAttachType::Ingress).is_ok();
    assert_eq!(has, release() >= (6, 6), "tcx in Linux {:?}", release());
    has
}

/// Ids of the programs at the device's tcx ingress, in the order in which they run; none where there
/// is no tcx.
fn tcx() -> Vec<u32> {
    if !has_tcx() {
        return Vec::new();
    }
    let (_, programs) = SchedClassifier::query_tcx(DEVICE, TcAttachType::Ingress).expect("tcx");
    programs.iter().map(aya::programs::ProgramInfo::id).collect()
}

/// Ids of the programs at the device's ingress, in the order in which they run: at tcx, or filters
/// where there is no tcx.
fn attached() -> Vec<u32> {
    if has_tcx() { tcx() } else { filters_at(Direction::Ingress) }
}

/// Ids of the programs of the device's filters, in the order in which they run: ingress, egress.
fn filters() -> Vec<u32> {
    [Direction::Ingress, Direction::Egress].into_iter().flat_map(filters_at).collect()
}

fn filters_at(direction: Direction) -> Vec<u32> {
    let mut route = RouteSocket::open().expect("route netlink");
    let filters = route.filters(index(DEVICE), direction).expect("filters").into_iter();
    filters.map(|filter| filter.bpf.expect("bpf").program.expect("a program")).collect()
}

/// The program that is first at one direction of the device.
fn first(direction: Direction) -> ProgramFd {
    let kind = match direction {
        Direction::Ingress => TcAttachType::Ingress,
        Direction::Egress => TcAttachType::Egress,
    };
    let first = if has_tcx() {
        let (_, programs) = SchedClassifier::query_tcx(DEVICE, kind).expect("tcx");
        programs[0].id()
    } else {
        filters_at(direction)[0]
    };
    let program = loaded_programs().filter_map(Result::ok).find(|program| program.id() == first);
    program.expect("a loaded program").fd().expect("the program")
}

fn has_clsact() -> bool {
    let mut route = RouteSocket::open().expect("route netlink");
    route.classifiers().expect("qdiscs").contains_key(&index(DEVICE))
}

/// Now, on the clock that the kernel stamps events with.
fn monotonic() -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a timespec to be written.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    assert_eq!(result, 0);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).expect("below 10^9"))
}

fn send_udp(from: SocketAddr, to: SocketAddr, payload: &[u8]) {
    // The guard that another test has just forked may hold the socket before this one a moment longer.
    let deadline = Instant::now() + Duration::from_secs(5);
    let socket = loop {
        match UdpSocket::bind(from) {
            Err(error)
                if error.kind() == std::io::ErrorKind::AddrInUse && Instant::now() < deadline =>
            {
                std::thread::sleep(Duration::from_millis(10));
            }
            result => break result.expect("bind"),
        }
    };
    assert_eq!(socket.send_to(payload, to).expect("send"), payload.len());
}

/// Sends a datagram from a socket with one option set.
fn send_udp_with(vip: IpAddr, port: u16, payload: &[u8], level: i32, option: i32, value: &[u8]) {
    let from = if vip.is_ipv4() { IpAddr::from(CLIENT_V4) } else { CLIENT_V6.into() };
    let socket = UdpSocket::bind((from, 40001)).expect("bind");
    // SAFETY: the pointer is to a live slice of the length given.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            value.as_ptr().cast(),
            u32::try_from(value.len()).expect("a short option"),
        )
    };
    assert_eq!(result, 0, "setsockopt: {}", std::io::Error::last_os_error());
    assert_eq!(socket.send_to(payload, (vip, port)).expect("send"), payload.len());
}

/// Starts a TCP connection and gives it up before the kernel would send its SYN again.
fn send_syn(from: SocketAddr, to: SocketAddr) {
    let (family, size) = match from {
        SocketAddr::V4(_) => (libc::AF_INET, size_of::<libc::sockaddr_in>()),
        SocketAddr::V6(_) => (libc::AF_INET6, size_of::<libc::sockaddr_in6>()),
    };
    let size = u32::try_from(size).expect("a small size");
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: no pointers are involved.
    let socket = unsafe { libc::socket(family, kind, 0) };
    assert!(socket >= 0, "socket: {}", std::io::Error::last_os_error());
    // SAFETY: the descriptor was just made, and belongs to nothing else.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    let (from, to) = (raw_address(from), raw_address(to));
    // SAFETY: the pointer is to a live address of at least this size.
    let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const from).cast(), size) };
    assert_eq!(bound, 0, "bind: {}", std::io::Error::last_os_error());
    // SAFETY: as above.
    let connected = unsafe { libc::connect(socket.as_raw_fd(), (&raw const to).cast(), size) };
    let error = std::io::Error::last_os_error();
    assert_eq!(connected, -1);
    assert_eq!(error.raw_os_error(), Some(libc::EINPROGRESS), "connect: {error}");
}

/// The address as the kernel takes it. `sockaddr_in6` begins like `sockaddr_in` up to the port.
fn raw_address(address: SocketAddr) -> libc::sockaddr_in6 {
    // SAFETY: sockaddr_in6 is plain data, for which all zeros are valid.
    let mut raw: libc::sockaddr_in6 = unsafe { std::mem::zeroed() };
    raw.sin6_port = address.port().to_be();
    match address.ip() {
        IpAddr::V4(ip) => {
            raw.sin6_family = u16::try_from(libc::AF_INET).expect("a small number");
            // IPv4's address stands where IPv6 has its flow label.
            raw.sin6_flowinfo = u32::from_ne_bytes(ip.octets());
        }
        IpAddr::V6(ip) => {
            raw.sin6_family = u16::try_from(libc::AF_INET6).expect("a small number");
            raw.sin6_addr.s6_addr = ip.octets();
        }
    }
    raw
}

/// An IPv4 packet from the client to the VIP, with identification 0xabcd.
fn ipv4(protocol: u8, payload: &[u8]) -> Vec<u8> {
    let [high, low] = u16::try_from(20 + payload.len()).expect("a short packet").to_be_bytes();
    let mut packet = vec![0x45, 0, high, low, 0xab, 0xcd, 0, 0, 64, protocol, 0, 0];
    packet.extend(CLIENT_V4.octets());
    packet.extend(VIP_V4.octets());
    packet.extend(payload);
    packet
}

/// An IPv6 packet from the client, with flow label 0x54321.
fn ipv6(to: Ipv6Addr, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let [high, low] = u16::try_from(payload.len()).expect("a short packet").to_be_bytes();
    let mut packet = vec![0x60, 0x05, 0x43, 0x21, high, low, protocol, 64];
    packet.extend(CLIENT_V6.octets());
    packet.extend(to.octets());
    packet.extend(payload);
    packet
}
