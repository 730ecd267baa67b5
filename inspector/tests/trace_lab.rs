//! The observers on a lab's node: real connections through the stand-in for Cilium's datapath, and
//! what was seen of them. Needs root.

mod node;
mod run;

use std::{net::IpAddr, process::Command, time::Duration};

use inspector::{
    sys::tc::{Direction, RouteSocket},
    trace::{
        observe::{Backend, Chain, Observers, Plan, TierStatus, Watched},
        sighting::{Hook, Packet, Sighting, Tier},
    },
};
use inspector_lab::{Ns, probe::Outcome};
use node::{Node, seen_for};

const TCP: u8 = 6;
const SYN: u8 = 2;
const SYN_ACK: u8 = 0x12;

/// What a capture has behind the VIP of these tests.
struct Case {
    capture: &'static str,
    vip: &'static str,
    pods: [&'static str; 2],
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

/// Names of the node's devices that lead to pods.
fn pods(node: &Node) -> Vec<String> {
    let text = node.ip(Ns::Node, "-o link");
    let names = text.lines().filter_map(|line| line.split([':', '@']).nth(1));
    let found: Vec<String> =
        names.map(|name| name.trim().to_owned()).filter(|name| name.starts_with("lxc")).collect();
    assert_eq!(found.len(), 2, "{text}");
    found
}

fn plan(node: &Node, case: &Case) -> Plan {
    let devices = ["eno1".to_owned(), "wg0".to_owned()];
    Plan {
        addresses: vec![Watched { address: ip(case.vip), port: None }],
        backends: case
            .pods
            .map(|pod| Backend { address: ip(pod), port: 8443, protocol: TCP })
            .into(),
        ingress: devices.iter().cloned().chain(pods(node)).collect(),
        egress: devices.into(),
        ..Plan::default()
    }
}

/// Connects while the node is observed; what was seen until a while after the answer.
fn observed(
    node: &Node,
    plan: &Plan,
    from: Ns,
    to: &str,
    port: u16,
) -> (Outcome, Vec<Sighting>, Vec<TierStatus>) {
    node.0
        .run_in(Ns::Node, || {
            let mut observers = Observers::start(plan).expect("the observers");
            let outcome = node.connect(from, "tcp", to, port);
            let seen = seen_for(&mut observers, Duration::from_millis(300));
            (outcome, seen, observers.status().to_vec())
        })
        .expect("the node")
}

/// The sightings at a hook of a tier on a device of packets with these flags from or to a port.
fn of<'a>(
    seen: &'a [Sighting],
    (tier, hook, ifindex): (Tier, Hook, u32),
    matches: impl Fn(&Packet) -> bool + 'a,
) -> Vec<&'a Sighting> {
    seen.iter()
        .filter(|one| (one.tier, one.hook, one.ifindex) == (tier, hook, ifindex))
        .filter(|one| one.packet.as_ref().is_some_and(&matches))
        .collect()
}

fn flags(packet: &Packet) -> u8 {
    packet.tcp.map_or(0, |(_, _, flags)| flags & 0x3f)
}

/// What was seen, one line each.
fn told(seen: &[Sighting]) -> String {
    let first = seen.first().map_or(0, |one| one.monotonic_ns);
    seen.iter()
        .map(|one| {
            let at = i128::from(one.monotonic_ns) - i128::from(first);
            let mut line = format!(
                "\n{:>8} {:?} {:?} {} {:x}",
                at / 1000,
                one.tier,
                one.hook,
                one.ifindex,
                one.skb.unwrap_or_default() & 0xffff_ffff,
            );
            if let Some(packet) = &one.packet {
                let Packet { source, destination, ports, tcp, .. } = packet;
                line = format!("{line} {source} > {destination} {ports:?} {tcp:?}");
            }
            for part in [format!("{:?}", one.neighbour), format!("{:?}", one.flow)] {
                line += &part.replace("None", "");
            }
            line + one.detail.as_deref().unwrap_or_default()
        })
        .collect()
}

/// Whether the kernel looked an address up as a neighbour.
fn looked_up(seen: &[Sighting], address: IpAddr) -> Vec<&Sighting> {
    seen.iter()
        .filter(|one| {
            matches!(
                one.hook,
                Hook::NeighCreate | Hook::NeighResolve | Hook::NeighSolicit | Hook::NeighUpdate
            )
        })
        .filter(|one| one.neighbour.as_ref().is_some_and(|to| to.address == address))
        .collect()
}

/// A connection that is served: what has to be seen of it, in this order of time.
fn is_translated(case: &Case, from: Ns, device: &str) {
    let node = Node::new(case.capture);
    let plan = plan(&node, case);
    is_translated_on(&node, &plan, case, from, device);
}

fn is_translated_on(node: &Node, plan: &Plan, case: &Case, from: Ns, device: &str) {
    let (outcome, seen, status) = observed(node, plan, from, case.vip, 443);
    assert!(outcome.ok, "{outcome:?}");
    for status in &status {
        if matches!(status.tier, Tier::Tc | Tier::Tracepoint | Tier::Netlink) {
            assert_eq!((&status.reason, &status.missing), (&None, &Vec::new()), "{status:?}");
        }
    }
    let vip = ip(case.vip);
    let pod = ip(outcome.backend_ip.as_deref().expect("the backend's address"));
    assert!(case.pods.iter().any(|one| ip(one) == pod), "{outcome:?}");
    let arrival = node.index(device);

    let syn = |packet: &Packet| {
        packet.destination == vip
            && packet.ports.is_some_and(|ports| ports.1 == 443)
            && flags(packet) == SYN
    };
    let arrived = of(&seen, (Tier::Tc, Hook::TcIngress, arrival), syn);
    assert_eq!(arrived.len(), 1, "{}", told(&seen));
    let arrived = arrived[0];
    let sent = arrived.packet.as_ref().expect("a packet");
    let (client, client_port) = (sent.source, sent.ports.expect("ports").0);
    // The same packet as the tracepoint sees it, before tc.
    let received = of(&seen, (Tier::Tracepoint, Hook::Receive, arrival), syn);
    assert_eq!(received.len(), 1, "{}", told(&seen));
    assert!(received[0].monotonic_ns < arrived.monotonic_ns);
    assert_eq!(received[0].packet, arrived.packet);
    assert!(received[0].skb.is_some(), "{:?}", received[0]);

    // Translated, with the sequence number that it came with. A packet that is redirected to a
    // local pod's other end leaves no device of the node; the pod is another network namespace, and
    // its answer is the evidence.
    let answers: Vec<_> = seen
        .iter()
        .filter(|one| (one.tier, one.hook) == (Tier::Tc, Hook::TcIngress))
        .filter(|one| {
            one.packet.as_ref().is_some_and(|packet| {
                (packet.source, packet.destination) == (pod, client)
                    && packet.ports == Some((8443, client_port))
                    && flags(packet) == SYN_ACK
            })
        })
        .collect();
    assert_eq!(answers.len(), 1, "{}", told(&seen));
    assert!(answers[0].monotonic_ns > arrived.monotonic_ns);
    let sequence = |packet: &Packet| packet.tcp.expect("TCP");
    let answer = answers[0].packet.as_ref().expect("a packet");
    assert_eq!(sequence(answer).1, sequence(sent).0.wrapping_add(1));
    // The reply leaves rewritten.
    let reply = |packet: &Packet| {
        (packet.source, packet.destination) == (vip, client)
            && packet.ports == Some((443, client_port))
            && flags(packet) == SYN_ACK
    };
    let replies = of(&seen, (Tier::Tracepoint, Hook::Transmit, arrival), reply);
    assert_eq!(replies.len(), 1, "{}", told(&seen));
    assert!(replies[0].monotonic_ns > answers[0].monotonic_ns);

    // And nobody asked who the VIP is.
    assert!(looked_up(&seen, vip).is_empty(), "{:#?}", looked_up(&seen, vip));
}

const V1_18: Case =
    Case { capture: "v1.18-tcx", vip: "192.168.2.20", pods: ["10.77.1.143", "10.77.1.55"] };
const V1_18_CLSACT: Case =
    Case { capture: "v1.18-clsact", vip: "192.168.2.20", pods: ["10.77.1.28", "10.77.1.141"] };
const V1_21_IPV6: Case =
    Case { capture: "v1.21-tcx", vip: "fd00:2::20", pods: ["fd00:77:1::402b", "fd00:77:1::eb2"] };

#[test]
fn a_client_in_the_lan_is_served_without_a_look_up_of_the_vip() {
    is_translated(&V1_18, Ns::Client, "eno1");
}

#[test]
fn a_client_of_the_vpn_is_served_without_a_look_up_of_the_vip() {
    is_translated(&V1_18, Ns::Vpn, "wg0");
}

#[test]
fn ipv6_is_seen_the_same() {
    is_translated(&V1_21_IPV6, Ns::Client, "eno1");
    is_translated(&V1_21_IPV6, Ns::Vpn, "wg0");
}

/// Priorities, programs and directions of all filters of eno1 and wg0.
fn filters(node: &Node) -> Vec<(u16, Option<u32>, u32)> {
    let devices = [node.index("eno1"), node.index("wg0")];
    node.0
        .run_in(Ns::Node, || {
            let mut route = RouteSocket::open().expect("route netlink");
            let mut found = Vec::new();
            for device in devices {
                for direction in [Direction::Ingress, Direction::Egress] {
                    for filter in route.filters(device, direction).expect("filters") {
                        let program = filter.bpf.expect("bpf").program;
                        found.push((filter.priority, program, device));
                    }
                }
            }
            found
        })
        .expect("the node")
}

#[test]
fn ciliums_own_filters_still_run_behind_ours() {
    let node = Node::new(V1_18_CLSACT.capture);
    let before = filters(&node);
    assert!(before.len() >= 3, "{before:?}");
    for chain in [Chain::Newest, Chain::Clsact] {
        let plan = Plan { chain, ..plan(&node, &V1_18_CLSACT) };
        let during = node.0.run_in(Ns::Node, || {
            let _observers = Observers::start(&plan).expect("the observers");
            filters(&node)
        });
        let during = during.expect("the node");
        if chain == Chain::Clsact {
            assert_eq!(during.len(), before.len() + 4, "{during:?}");
            // In front, at the same priority.
            assert!(during[0].0 == before[0].0 && during[1] == before[0], "{during:?}");
        } else {
            assert_eq!(during, before);
        }
        is_translated_on(&node, &plan, &V1_18_CLSACT, Ns::Client, "eno1");
        is_translated_on(&node, &plan, &V1_18_CLSACT, Ns::Vpn, "wg0");
        assert_eq!(filters(&node), before);
    }
}

#[test]
fn a_remote_backend_is_reached_by_its_own_address_and_the_vip_is_looked_up_by_nobody() {
    let node = Node::new(V1_18.capture);
    let (vip, remote) = (ip("192.168.2.32"), ip("192.168.2.60"));
    let plan = Plan {
        addresses: vec![Watched { address: vip, port: Some((80, TCP)) }],
        backends: vec![Backend { address: remote, port: 8080, protocol: TCP }],
        ..plan(&node, &V1_18)
    };
    // Whoever asked last may still know it.
    let forget = |address: &str| {
        let mut command = Command::new("ip");
        command.args(["neigh", "flush", "to", address]);
        let output = node.0.exec_in(Ns::Node, &mut command).expect("the node").output();
        assert!(output.expect("`ip`, of iproute2").status.success());
    };
    forget("192.168.2.60");
    for (from, device) in [(Ns::Client, "eno1"), (Ns::Vpn, "wg0")] {
        let (outcome, seen, _) = observed(&node, &plan, from, "192.168.2.32", 80);
        assert!(outcome.ok, "{outcome:?}");
        let (arrival, leaves) = (node.index(device), node.index("eno1"));
        let syn = |packet: &Packet| packet.destination == vip && flags(packet) == SYN;
        let received = of(&seen, (Tier::Tracepoint, Hook::Receive, arrival), syn);
        assert_eq!(received.len(), 1, "{}", told(&seen));
        assert_eq!(of(&seen, (Tier::Tc, Hook::TcIngress, arrival), syn).len(), 1);
        let sequence = received[0].packet.as_ref().and_then(|packet| packet.tcp);

        let translated = |packet: &Packet| {
            (packet.source, packet.destination) == (ip("192.168.2.10"), remote)
                && flags(packet) == SYN
        };
        for (tier, hook) in [
            (Tier::Tc, Hook::TcEgress),
            (Tier::Tracepoint, Hook::Queue),
            (Tier::Tracepoint, Hook::Transmit),
        ] {
            let found = of(&seen, (tier, hook, leaves), translated);
            assert_eq!(found.len(), 1, "{hook:?}: {}", told(&seen));
            assert!(found[0].monotonic_ns > received[0].monotonic_ns);
            let packet = found[0].packet.as_ref().expect("a packet");
            assert_eq!(packet.tcp.map(|tcp| tcp.0), sequence.map(|tcp| tcp.0));
            if tier == Tier::Tracepoint {
                assert_eq!(found[0].skb, received[0].skb, "{}", told(&seen));
            }
        }
        assert!(looked_up(&seen, vip).is_empty(), "{}", told(&seen));
        if from == Ns::Client {
            assert!(!looked_up(&seen, remote).is_empty(), "{}", told(&seen));
        }
    }
}

#[test]
fn without_ciliums_program_the_kernel_asks_for_the_vip() {
    let node = Node::new(V1_18.capture);
    node.detach("devices/wg0/links/cil_from_netdev");
    let plan = plan(&node, &V1_18);
    let vip = ip(V1_18.vip);
    let (outcome, seen, _) = observed(&node, &plan, Ns::Vpn, V1_18.vip, 443);
    assert!(!outcome.ok, "{outcome:?}");
    let (wg0, eno1) = (node.index("wg0"), node.index("eno1"));
    let syn = |packet: &Packet| packet.destination == vip && flags(packet) == SYN;
    let arrived = of(&seen, (Tier::Tc, Hook::TcIngress, wg0), syn);
    assert!(!arrived.is_empty(), "{}", told(&seen));
    let asked = looked_up(&seen, vip);
    for (tier, hook) in [
        (Tier::Tracepoint, Hook::NeighCreate),
        (Tier::Tracepoint, Hook::NeighResolve),
        (Tier::Tracepoint, Hook::NeighSolicit),
        (Tier::Tc, Hook::NeighSolicit),
    ] {
        let found = asked.iter().find(|one| (one.tier, one.hook) == (tier, hook));
        let found = found.unwrap_or_else(|| panic!("no {tier:?} {hook:?}: {}", told(&seen)));
        assert_eq!(found.ifindex, eno1, "{}", told(&seen));
        assert!(found.monotonic_ns > arrived[0].monotonic_ns);
    }
    // Nothing was translated.
    for pod in V1_18.pods {
        assert!(
            !seen.iter().any(|one| one.packet.as_ref().is_some_and(|p| p.destination == ip(pod))),
            "{}",
            told(&seen)
        );
    }
    // The other device has its program still.
    let (outcome, seen, _) = observed(&node, &plan, Ns::Client, V1_18.vip, 443);
    assert!(outcome.ok, "{outcome:?}");
    let asked = looked_up(&seen, vip);
    assert!(asked.iter().all(|one| one.hook == Hook::NeighUpdate), "{}", told(&seen));
}

#[test]
fn the_nodes_own_sockets_never_send_to_the_vip() {
    let node = Node::new(V1_18.capture);
    let plan = plan(&node, &V1_18);
    let mut seen = Vec::new();
    node.0
        .run_in(Ns::Node, || {
            let mut observers = Observers::start(&plan).expect("the observers");
            let mut command = Command::new("bash");
            command.args(["-c", "exec 3<>/dev/tcp/192.168.2.20/443 && head -n 1 <&3"]);
            let output = node.0.exec_in(Ns::Node, &mut command).expect("the node").output();
            let output = output.expect("bash");
            assert!(output.status.success(), "{output:?}");
            assert!(output.stdout.starts_with(b"pod"), "{output:?}");
            observers.wait(Duration::from_millis(300)).expect("wait");
            while let Some(sighting) = observers.next().expect("event") {
                seen.push(sighting);
            }
        })
        .expect("the node");
    let vip = ip(V1_18.vip);
    let packets: Vec<&Packet> = seen.iter().filter_map(|one| one.packet.as_ref()).collect();
    assert!(
        packets.iter().any(|packet| {
            V1_18.pods.iter().any(|pod| packet.destination == ip(pod)) && flags(packet) == SYN
        }),
        "{}",
        told(&seen)
    );
    assert!(
        packets.iter().all(|packet| packet.destination != vip && packet.source != vip),
        "{}",
        told(&seen)
    );
    assert!(looked_up(&seen, vip).is_empty(), "{}", told(&seen));
}

#[test]
fn a_pod_without_socket_load_balancing_sends_to_the_vip_itself() {
    let node = Node::new(V1_18.capture);
    let plan = plan(&node, &V1_18);
    let (outcome, seen, _) = observed(&node, &plan, Ns::Pod(2), V1_18.vip, 443);
    assert!(!outcome.ok, "{outcome:?}");
    let vip = ip(V1_18.vip);
    let lxc: Vec<u32> = pods(&node).iter().map(|name| node.index(name)).collect();
    let syn = |packet: &Packet| packet.destination == vip && flags(packet) == SYN;
    let arrived: Vec<_> =
        lxc.iter().flat_map(|lxc| of(&seen, (Tier::Tc, Hook::TcIngress, *lxc), syn)).collect();
    assert!(!arrived.is_empty(), "{}", told(&seen));
    let asked = looked_up(&seen, vip);
    assert!(asked.iter().any(|one| one.hook == Hook::NeighSolicit), "{}", told(&seen));
}
