//! Stories from the field, told again on a node of the lab: what is said, and what really happens
//! to connections at the same time.
//!
//! Needs root, bpf(2), a cgroup2 mount and TUN devices; fails without.

mod node;
mod run;

use std::{
    net::{TcpListener, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use inspector::cilium::{
    proto::Protocol,
    services::{Scope, ServiceKey},
};
use inspector_lab::Ns;
use node::{Node, absent, answer, fate, finding, found, is, sound};

const WEB: &str = "192.168.2.20";
const TWINS: &str = "192.168.2.22";
const ENO1: &str = "forwarded via eno1";
const WG0: &str = "forwarded via wg0";

fn said(served: &str, sentence: &str) -> (String, String) {
    (served.to_owned(), sentence.to_owned())
}

/// Port and protocol, scope and slot of a frontend, as a key.
fn key(vip: &str, place: (u16, Protocol), scope: Scope, slot: u16) -> ServiceKey {
    let address = vip.parse().expect("an address");
    ServiceKey { address, port: place.0, protocol: place.1, scope, slot }
}

/// Gives the TCP half of the twins externalTrafficPolicy Local and one backend, on another node:
/// the entries of 192.168.2.21, which is so, under the name of 192.168.2.22.
fn make_tcp_twin_local(node: &Node) {
    const LOCAL: (u16, Protocol) = (8443, Protocol::TCP);
    const TCP: (u16, Protocol) = (25565, Protocol::TCP);
    let services = node.0.map("cilium_lb4_services_v2").expect("a map");
    let value = |key: &ServiceKey| services.lookup(&key.encode()).expect("a look-up");
    let put = |key: &ServiceKey, value: &[u8]| {
        services.update(&key.encode(), value).expect("an update");
    };
    // Number of the reverse NAT entry: bytes 6 and 7.
    let master = key(TWINS, TCP, Scope::External, 0);
    let own = value(&master).expect("an entry")[6..8].to_vec();
    for (scope, slots) in [(Scope::External, 0), (Scope::Internal, 1)] {
        for slot in 0..=slots {
            let from = key("192.168.2.21", LOCAL, scope, slot);
            let mut entry = value(&from).unwrap_or_else(|| panic!("no entry {from:?}"));
            entry[6..8].copy_from_slice(&own);
            put(&key(TWINS, TCP, scope, slot), &entry);
        }
    }
    services.delete(&key(TWINS, TCP, Scope::External, 1).encode()).expect("a delete");
}

#[test]
fn announced_where_there_is_no_backend_and_the_twin_that_is_alive() {
    let node = Node::new("v1.21-tcx");
    // Before, both answer.
    let ran = node.vip(&[TWINS]);
    sound(&ran);
    assert_eq!(
        answer(&ran),
        said(
            "yes",
            "YES via eno1 and wg0: 25565/TCP, 25565/UDP translated to a backend in BPF before any \
             neighbour look-up"
        )
    );
    assert!(node.connect(Ns::Client, "tcp", TWINS, 25565).ok);

    make_tcp_twin_local(&node);
    let dead = "this node answers ARP for 192.168.2.22 on eno1, but 25565/TCP has 0 backends in its \
                external scope (externalTrafficPolicy Local); 1 in the internal scope, not on this \
                node";
    let ran = node.vip(&["192.168.2.22:25565/tcp"]);
    assert_eq!((ran.code, answer(&ran)), (Some(1), said("no", &format!("NO: {dead}"))));
    found(
        &ran,
        "announced-no-local-backend",
        "error",
        "this node answers for 192.168.2.22 and 192.168.2.22:25565/TCP has externalTrafficPolicy \
         Local and 0 backends here",
    );
    found(
        &ran,
        "scopes-differ",
        "warning",
        "192.168.2.22:25565/TCP: 0 backends in the external scope, 1 in the internal",
    );
    for path in [ENO1, WG0] {
        assert_eq!(fate(&ran, "25565/TCP", path), is("no-backend", "no", "none: it ends in BPF"));
    }
    // The same address, the other protocol: alive.
    let ran = node.vip(&["192.168.2.22:25565/udp"]);
    absent(&ran, "announced-no-local-backend");
    assert_eq!((ran.code, answer(&ran).0.as_str()), (Some(0), "yes"), "{ran:?}");
    // Asked of the address, one is told of both.
    let ran = node.vip(&[TWINS]);
    let alive = "25565/UDP translated to a backend in BPF before any neighbour look-up via eno1 and \
                 wg0";
    let both = format!("PARTLY: {dead}; {alive}");
    assert_eq!((ran.code, answer(&ran)), (Some(1), said("partly", &both)));

    // And so it is: from the LAN and from the VPN.
    for from in [Ns::Client, Ns::Vpn] {
        let tcp = node.connect(from, "tcp", TWINS, 25565);
        assert!(!tcp.ok && tcp.error.is_some(), "{tcp:?}");
        assert!(node.connect(from, "udp", TWINS, 25565).ok, "{from}");
    }
    // 192.168.2.31 has the same policy and a pod here; of another node nothing is wrong with it.
    let ran = node.vip(&["192.168.2.31"]);
    absent(&ran, "announced-no-local-backend");
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(node.connect(Ns::Client, "tcp", "192.168.2.31", 80).ok);

    // The agent is dead: nobody is answered, and the sentence does not say so any more.
    let liveness = node.0.map("cilium_runtime_config").expect("a map");
    liveness.update(&1_u32.to_ne_bytes(), &1_u64.to_ne_bytes()).expect("an update");
    let mut command = run::inspect(["vip", "192.168.2.22:25565/tcp", "-o", "json"]);
    let ran = run::run(node.0.exec_in(Ns::Node, &mut command).expect("the node"));
    absent(&ran, "announced-no-local-backend");
    assert!(!answer(&ran).1.contains("answers ARP"), "{ran:?}");
}

#[test]
fn a_backend_of_the_internal_scope_that_is_here() {
    let node = Node::new("v1.21-tcx");
    make_tcp_twin_local(&node);
    // The backend of the UDP half is a pod of this node; its TCP one has the number before it.
    let services = node.0.map("cilium_lb4_services_v2").expect("a map");
    let inside = key(TWINS, (25565, Protocol::TCP), Scope::Internal, 1).encode();
    let mut slot = services.lookup(&inside).expect("a look-up").expect("a slot");
    slot[..4].copy_from_slice(&9_u32.to_ne_bytes());
    services.update(&inside, &slot).expect("an update");
    let sentence = answer(&node.vip(&["192.168.2.22:25565/tcp"])).1;
    let ends = "1 in the internal scope, 1 of them on this node";
    assert!(sentence.ends_with(ends), "{sentence}");
}

#[test]
fn translated_to_a_backend_on_which_nothing_listens() {
    let node = Node::new("v1.21-tcx");
    let first = node.connect(Ns::Client, "tcp", "192.168.2.27", 80);
    assert!(first.ok, "{first:?}");
    // Its one backend is given a port on which nothing listens.
    let services = node.0.map("cilium_lb4_services_v2").expect("a map");
    let slot = key("192.168.2.27", (80, Protocol::TCP), Scope::External, 1).encode();
    let id = services.lookup(&slot).expect("a look-up").expect("a slot")[..4].to_vec();
    let backends = node.0.map("cilium_lb4_backends_v3").expect("a map");
    let mut backend = backends.lookup(&id).expect("a look-up").expect("a backend");
    backend[4..6].copy_from_slice(&9_u16.to_be_bytes());
    backends.update(&id, &backend).expect("an update");

    let ran = node.vip(&["192.168.2.27"]);
    assert_eq!((ran.code, answer(&ran).0.as_str()), (Some(0), "yes"), "{ran:?}");
    assert_eq!(fate(&ran, "80/TCP", ENO1), is("dnat-before-neigh", "yes", "none: local pod"));
    let table = node.inspect(&["vip", "192.168.2.27"]).out;
    assert!(table.contains(":9/TCP"), "{table}");
    found(&ran, "backend-not-probed", "note", "whether the backends answer was not tried");
    let meaning = finding(&ran, "backend-not-probed")["meaning"].to_string();
    assert!(meaning.contains("refuses"), "{meaning}");
    let refused = node.connect(Ns::Client, "tcp", "192.168.2.27", 80);
    assert_eq!(
        refused.error.as_deref(),
        Some("ConnectionRefusedError [Errno 111] Connection refused")
    );
}

/// Sets its flag when it is dropped, panics included.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs `work` while a process of the node, not covered by socket-LB, asks for `vip` again and
/// again: nobody answers it.
fn while_the_node_asks_in_vain<T>(node: &Node, vip: &str, work: impl FnOnce() -> T) -> T {
    let done = AtomicBool::new(false);
    let ask = || {
        let socket = UdpSocket::bind(("0.0.0.0", 0)).expect("a socket");
        while !done.load(Ordering::Relaxed) {
            // What was asked in vain comes back as an error of a later call.
            let _ = socket.send_to(b"anybody?", (vip, 443));
            thread::sleep(Duration::from_millis(20));
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| node.0.run_in(Ns::Node, ask).expect("the node"));
        let _stop = Stop(&done);
        let shown = || node.ip(Ns::Node, &format!("neigh show {vip} dev eno1"));
        while !["INCOMPLETE", "FAILED"].iter().any(|state| shown().contains(state)) {
            thread::sleep(Duration::from_millis(10));
        }
        work()
    })
}

#[test]
fn a_neighbour_entry_that_looks_alarming_and_has_no_bearing() {
    let node = Node::new("v1.21-tcx");
    while_the_node_asks_in_vain(&node, WEB, || {
        for from in [Ns::Vpn, Ns::Client] {
            let outcome = node.connect(from, "tcp", WEB, 443);
            assert!(outcome.ok, "{from}: {outcome:?}");
        }
        let ran = node.vip(&[WEB]);
        let (served, sentence) = answer(&ran);
        assert_eq!((ran.code, served.as_str()), (Some(0), "yes"), "{ran:?}");
        let begins = "YES via eno1 and wg0: 443/TCP translated to a backend in BPF before any \
                      neighbour look-up (its neighbour entry, ";
        let state = sentence.strip_prefix(begins).unwrap_or_else(|| panic!("{sentence}"));
        assert!(
            ["INCOMPLETE, has no bearing)", "FAILED, has no bearing)"].contains(&state),
            "{sentence}"
        );
        assert_eq!(finding(&ran, "neighbour-irrelevant")["severity"], "note");
        for path in [ENO1, WG0] {
            assert_eq!(
                fate(&ran, "443/TCP", path),
                is("dnat-before-neigh", "yes", "none: local pod")
            );
        }
        for from in [Ns::Vpn, Ns::Client] {
            assert!(node.connect(from, "tcp", WEB, 443).ok, "{from}");
        }
    });
}

#[test]
fn the_same_of_an_l7_frontend_whose_proxy_is_on_the_node() {
    const L7: &str = "192.168.2.30";
    let node = Node::new("v1.21-l7lb");
    let listen = || TcpListener::bind(("0.0.0.0", 10042)).expect("a listener");
    let _proxy = node.0.run_in(Ns::Node, listen).expect("the node");
    while_the_node_asks_in_vain(&node, L7, || {
        let ran = node.vip(&[L7]);
        let sentence = answer(&ran).1;
        let begins = "YES via eno1 and wg0: 80/TCP handed to the local proxy in BPF before any \
                      neighbour look-up (its neighbour entry, ";
        assert!(sentence.starts_with(begins), "{sentence}");
        assert_eq!(finding(&ran, "neighbour-irrelevant")["severity"], "note");
        found(
            &ran,
            "l7-is-not-dnat",
            "note",
            "192.168.2.30:80/TCP is an L7 frontend with the local proxy port 10042",
        );
    });
}

#[test]
fn a_probe_from_the_node_takes_another_path() {
    let node = Node::new("v1.21-tcx");
    // It fails on the node, where nothing translates this socket, and works through wg0.
    let ran = node.vip_outside(&[WEB]);
    assert_eq!(finding(&ran, "node-probe-other-path")["severity"], "note");
    assert_eq!(fate(&ran, "443/TCP", "socket on host").1, "no");
    assert_eq!(fate(&ran, "443/TCP", WG0).1, "yes");
    assert!(!node.connect(Ns::Node, "tcp", WEB, 443).ok);
    assert!(node.connect(Ns::Vpn, "tcp", WEB, 443).ok);
    // And the other way about: socket-LB works on the node, and through wg0 nothing does.
    node.detach("devices/wg0/links/cil_from_netdev");
    let ran = node.vip(&[WEB]);
    assert_eq!(finding(&ran, "node-probe-other-path")["severity"], "note");
    assert_eq!(fate(&ran, "443/TCP", "socket on host").1, "yes");
    assert_eq!(fate(&ran, "443/TCP", WG0).1, "no");
    assert!(!node.connect(Ns::Vpn, "tcp", WEB, 443).ok);
}

#[test]
fn ping_and_ports_that_are_not_there_prove_nothing() {
    let node = Node::new("v1.21-tcx");
    let ran = node.vip(&[WEB]);
    found(&ran, "ping-proves-nothing", "note", "192.168.2.20 has no ICMP frontend");

    for (asked, seen) in [
        (
            "192.168.2.20:8080",
            "192.168.2.20:8080 is no frontend on this node; the address has 192.168.2.20:443/TCP",
        ),
        (
            "192.168.2.20:443/udp",
            "192.168.2.20:443/UDP is no frontend on this node; the address has \
             192.168.2.20:443/TCP",
        ),
        ("192.168.2.99", "192.168.2.99 is no frontend on this node"),
    ] {
        let ran = node.vip(&[asked]);
        found(&ran, "frontend-absent", "error", seen);
        assert_eq!((ran.code, answer(&ran)), (Some(1), said("no", &format!("NO: {seen}"))));
        absent(&ran, "ping-proves-nothing");
    }
    assert!(!node.connect(Ns::Client, "tcp", WEB, 8080).ok);
    assert!(!node.connect(Ns::Client, "udp", WEB, 443).ok);
    assert!(node.connect(Ns::Client, "tcp", WEB, 443).ok);
}

#[test]
fn a_frontend_that_is_left_to_a_local_proxy() {
    /// In the second byte of flags: delegated, from 1.18 on.
    const DELEGATED: u8 = 1 << 3;
    const WEB_PORT: (u16, Protocol) = (443, Protocol::TCP);
    let node = Node::new("v1.21-tcx");
    assert_eq!(fate(&node.vip(&[WEB]), "443/TCP", ENO1).0, "dnat-before-neigh");
    let services = node.0.map("cilium_lb4_services_v2").expect("a map");
    let set = |vip: &str, port| {
        let master = key(vip, port, Scope::External, 0).encode();
        let mut value = services.lookup(&master).expect("a look-up").expect("a frontend");
        value[9] |= DELEGATED;
        services.update(&master, &value).expect("an update");
    };
    // Both backends are pods of this node: their packets go up the stack, sockets are left alone.
    set(WEB, WEB_PORT);
    let ran = node.vip(&[WEB]);
    for path in [ENO1, WG0, "socket on host"] {
        let (outcome, served, _) = fate(&ran, "443/TCP", path);
        assert_eq!((outcome.as_str(), served.as_str()), ("untranslated", "unknown"), "{path}");
    }
    let reasons = node::why(&ran, "443/TCP", ENO1);
    assert!(
        reasons.contains(
            "delegated: packets for 2 of 2 backends, which are on this node, are left to a local \
             proxy"
        ),
        "{reasons}"
    );
    // The backend of this one is elsewhere: it is translated as ever.
    set("192.168.2.32", (80, Protocol::TCP));
    let ran = node.vip(&["192.168.2.32"]);
    assert_eq!(fate(&ran, "80/TCP", ENO1).0, "dnat-before-neigh");
}
