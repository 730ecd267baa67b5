//! Findings about programs, devices, neighbours and the local proxy: each state is made for real on
//! a node of the lab, `inspect vip` is run there, and the same node without the fault does not
//! raise the finding.
//!
//! Needs root, bpf(2), a cgroup2 mount, TUN devices and iproute2's `ip`; fails without.

mod bpf;
mod node;
mod run;

use std::{
    fs,
    io::{Read, Write},
    net::{TcpListener, UdpSocket},
    os::unix::net::UnixListener,
    path::Path,
    thread,
};

use bpf::{Code, TCX_INGRESS};
use inspector_lab::{Capture, Ns};
use node::{Node, absent, answer, fate, finding, found, is, path, sound, why};
use run::{Ran, inspect, run as finish, sealed};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A VIP with two local pods behind 443/TCP.
const WEB: &str = "192.168.2.20";
const ENO1: &str = "forwarded via eno1";
const WG0: &str = "forwarded via wg0";

fn translated() -> (String, String, String) {
    is("dnat-before-neigh", "yes", "none: local pod")
}

#[test]
fn a_device_whose_program_was_detached() {
    let node = Node::new("v1.21-tcx");
    let before = node.vip(&[WEB]);
    sound(&before);
    assert_eq!(before.code, Some(0), "{before:?}");
    assert_eq!(fate(&before, "443/TCP", WG0), translated());
    assert!(node.connect(Ns::Vpn, "tcp", WEB, 443).ok);

    node.detach("devices/wg0/links/cil_from_netdev");
    let ran = node.vip(&[WEB]);
    assert_eq!((ran.code, answer(&ran).0.as_str()), (Some(1), "partly"), "{ran:?}");
    found(&ran, "device-no-datapath", "error", "wg0: no program of Cilium's runs there");
    let told = finding(&ran, "device-no-datapath");
    assert_eq!(told["path"], WG0);
    let meaning = told["meaning"].as_str().expect("text");
    assert!(meaning.contains("this node itself announces: nobody answers"), "{meaning}");
    // A late packet of the connection above may have made the kernel ask already.
    let (outcome, served, neighbour) = fate(&ran, "443/TCP", WG0);
    assert_eq!((outcome.as_str(), served.as_str()), ("untranslated", "no"));
    assert!(neighbour.ends_with("(matters on this path)"), "{neighbour}");
    assert_eq!(fate(&ran, "443/TCP", ENO1), translated());
    // It is as predicted, and the packet that was lost left a neighbour entry that matters.
    assert!(!node.connect(Ns::Vpn, "tcp", WEB, 443).ok);
    assert!(node.connect(Ns::Client, "tcp", WEB, 443).ok);
    let ran = node.vip(&[WEB]);
    let neighbour = fate(&ran, "443/TCP", WG0).2;
    assert!(
        ["INCOMPLETE", "FAILED"]
            .iter()
            .any(|state| neighbour
                == format!("192.168.2.20 on eno1: {state} (matters on this path)")),
        "{neighbour}"
    );
    absent(&ran, "neighbour-irrelevant");

    // Asked of the other device alone, there is nothing to say.
    let ran = node.vip(&[WEB, "--via", "eno1"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    absent(&ran, "device-no-datapath");
}

#[test]
fn a_program_that_is_there_and_does_not_load_balance() {
    let node = Node::new("v1.21-tcx");
    node.detach("devices/wg0/links/cil_from_netdev");
    let wg0 = node.index("wg0");
    // Interface indexes are those of the node.
    let attach = || Code::tc("cil_from_netdev").load().tcx(wg0, TCX_INGRESS, false);
    let _link = node.0.run_in(Ns::Node, attach).expect("the node");
    let ran = node.vip(&[WEB]);
    let seen = "wg0: cil_from_netdev runs there and does not load-balance (it does not reach the \
                services map)";
    found(&ran, "device-no-datapath", "error", seen);
    assert_eq!(fate(&ran, "443/TCP", WG0).0, "untranslated");
}

#[test]
fn a_program_attached_twice() {
    let node = Node::new("v1.21-tcx");
    absent(&node.vip(&[WEB]), "attach-duplicate");
    let first = {
        let datapath = node.inspect(&["datapath", "-o", "json"]).json();
        ingress(&datapath, "eno1")
    };
    let eno1 = node.index("eno1");
    let services = bpf::Map::by_id(node.0.map("cilium_lb4_services_v2").expect("a map").id());
    let attach = || {
        let second = Code::tc("cil_from_netdev").uses(&services).load();
        (second.id, second.tcx(eno1, TCX_INGRESS, false))
    };
    let (second, link) = node.0.run_in(Ns::Node, attach).expect("the node");
    let ran = node.vip(&[WEB]);
    let seen = format!(
        "cil_from_netdev is attached 2 times to eno1: tcx ingress (program {first}), tcx ingress \
         (program {second})"
    );
    found(&ran, "attach-duplicate", "error", &seen);
    assert_eq!(finding(&ran, "attach-duplicate")["path"], ENO1);
    assert_eq!(fate(&ran, "443/TCP", ENO1), translated());
    drop(link);
    absent(&node.vip(&[WEB]), "attach-duplicate");
}

/// The program at tcx ingress of a device.
#[track_caller]
fn ingress(datapath: &Value, device: &str) -> u64 {
    let devices = datapath["devices"].as_array().expect("devices");
    let this = devices.iter().find(|one| one["name"] == device).expect("the device");
    let programs = this["programs"].as_array().expect("programs");
    let first = programs.iter().find(|one| one["hook"] == "tcx-ingress");
    first.unwrap_or_else(|| panic!("{programs:#?}"))["program"].as_u64().expect("an id")
}

#[test]
fn a_foreign_program_that_ends_the_chain_first() {
    /// `TC_ACT_SHOT`
    const DROP: i32 = 2;
    let node = Node::new("v1.21-tcx");
    let eno1 = node.index("eno1");
    let attach = |in_front: bool| {
        let attach = || {
            let program = Code::tc("gatekeeper").returns(DROP).load();
            (program.id, program.tcx(eno1, TCX_INGRESS, in_front))
        };
        node.0.run_in(Ns::Node, attach).expect("the node")
    };
    // Behind Cilium's, it is met by nothing that Cilium handles.
    let (_, behind) = attach(false);
    let ran = node.vip(&[WEB]);
    absent(&ran, "attach-shadowed");
    assert_eq!(fate(&ran, "443/TCP", ENO1), translated());
    assert!(node.connect(Ns::Client, "tcp", WEB, 443).ok);
    drop(behind);

    let (id, front) = attach(true);
    let ran = node.vip(&[WEB]);
    let seen = format!(
        "on eno1, gatekeeper (program {id}) at tcx ingress comes before Cilium's program at tcx \
         ingress"
    );
    found(&ran, "attach-shadowed", "error", &seen);
    assert_eq!(finding(&ran, "attach-shadowed")["path"], ENO1);
    let path = fate(&ran, "443/TCP", ENO1);
    assert_eq!((path.0.as_str(), path.1.as_str()), ("unknown", "unknown"));
    let says =
        format!("gatekeeper (program {id}) runs before cil_from_netdev and may end the chain");
    assert!(why(&ran, "443/TCP", ENO1).ends_with(&says), "{ran:?}");
    assert_eq!(fate(&ran, "443/TCP", WG0), translated());
    assert_eq!((ran.code, answer(&ran).0.as_str()), (Some(3), "unknown"), "{ran:?}");
    assert!(!node.connect(Ns::Client, "tcp", WEB, 443).ok);
    drop(front);
    absent(&node.vip(&[WEB]), "attach-shadowed");
    assert!(node.connect(Ns::Client, "tcp", WEB, 443).ok);
}

#[test]
fn programs_that_use_other_maps_than_the_pinned_ones() {
    const SERVICES: &str = "cilium_lb4_services_v2";
    let node = Node::new("v1.21-tcx");
    absent(&node.vip(&[WEB]), "stale-pins");
    let old = node.0.map(SERVICES).expect("a map");
    let new = node.0.put_map(SERVICES, old.spec()).expect("a map");
    for entry in old.entries().expect("the entries") {
        new.update(&entry.key, &entry.value).expect("an update");
    }
    let ran = node.vip(&[WEB]);
    let told = finding(&ran, "stale-pins");
    assert_eq!(told["severity"], "error");
    let seen = told["seen"].as_str().expect("text");
    let ends = format!("use map {}, the pin {SERVICES} is map {}", old.id(), new.id());
    assert!(seen.ends_with(&ends) && seen.contains("cil_sock4_connect"), "{seen}");
    for (path, program) in
        [(ENO1, "cil_from_netdev"), ("socket on host", "Cilium's connect4 program")]
    {
        assert_eq!(fate(&ran, "443/TCP", path).0, "unknown", "{path}");
        let says = format!("{program} uses services map {}, not the pinned one", old.id());
        assert!(why(&ran, "443/TCP", path).contains(&says), "{ran:?}");
    }
    assert_eq!((ran.code, answer(&ran).0.as_str()), (Some(3), "unknown"), "{ran:?}");
}

#[test]
fn a_pinned_link_whose_device_is_gone() {
    let node = Node::new("v1.21-tcx");
    node.ip(Ns::Node, "link add eno9 type veth peer name eno9x");
    let eno9 = node.index("eno9");
    let attach = || Code::tc("cil_from_netdev").load().tcx(eno9, TCX_INGRESS, false);
    let link = node.0.run_in(Ns::Node, attach).expect("the node");
    let pin = node.link("devices/eno9/links/cil_from_netdev");
    link.pin(&pin);
    drop(link);
    absent(&node.vip(&[WEB]), "pin-holds-nothing");

    node.ip(Ns::Node, "link del eno9");
    let ran = node.vip(&[WEB]);
    let seen = format!("{}: its device is gone", pin.display());
    found(&ran, "pin-holds-nothing", "warning", &seen);
    assert_eq!(fate(&ran, "443/TCP", ENO1), translated());
    assert_eq!(ran.code, Some(0), "a pin that holds nothing harms nobody: {ran:?}");
}

#[test]
fn socket_lb_that_does_not_cover_the_process() {
    let node = Node::new("v1.21-tcx");
    let inside = node.vip(&[WEB]);
    absent(&inside, "socket-lb-ineffective");
    assert_eq!(fate(&inside, "443/TCP", "socket on host").0, "socket-translated");

    let ran = node.vip_outside(&[WEB]);
    let seen = "Cilium has 11 socket-LB links pinned, but no connect4 program of Cilium's is in \
                force for the process's cgroup";
    found(&ran, "socket-lb-ineffective", "error", seen);
    assert_eq!(finding(&ran, "socket-lb-ineffective")["path"], "socket on host");
    assert_eq!(
        fate(&ran, "443/TCP", "socket on host"),
        is("untranslated", "no", "192.168.2.20 on eno1: absent (matters on this path)")
    );
    // Clients from outside are served all the same.
    assert_eq!((ran.code, answer(&ran).0.as_str()), (Some(0), "yes"), "{ran:?}");
    assert!(!node.connect(Ns::Node, "tcp", WEB, 443).ok);
    assert!(node.connect(Ns::Client, "tcp", WEB, 443).ok);
}

#[test]
fn socket_lb_without_its_program_for_sendmsg() {
    const DUAL: &str = "192.168.2.22";
    let node = Node::new("v1.21-tcx");
    absent(&node.vip(&[DUAL]), "socket-lb-ineffective");
    node.detach("socketlb/links/cgroup/cil_sock4_sendmsg");
    let ran = node.vip(&[DUAL]);
    let seen = "Cilium has 10 socket-LB links pinned, but no sendmsg4 program of Cilium's is in \
                force for the process's cgroup";
    found(&ran, "socket-lb-ineffective", "error", seen);
    assert_eq!(fate(&ran, "25565/TCP", "socket on host").0, "socket-translated");
    assert_eq!(fate(&ran, "25565/UDP", "socket on host").0, "untranslated");
}

#[test]
fn the_way_to_the_local_proxy() {
    const L7: &str = "192.168.2.30";
    const PORT: u16 = 10042;
    let node = Node::new("v1.21-l7lb");
    let proxied =
        |served: &str| is("proxied-before-neigh", served, "none: handed to the local proxy");
    let broken = |what: &str| format!("192.168.2.30:80/TCP: {what}");

    // As captured: no proxy.
    let ran = node.vip(&[L7]);
    found(&ran, "proxy-path-broken", "error", &broken("nothing listens on port 10042"));
    for path in [ENO1, WG0] {
        assert_eq!(fate(&ran, "80/TCP", path), proxied("no"));
    }
    assert_eq!(ran.code, Some(1), "{ran:?}");

    let listen = || TcpListener::bind(("0.0.0.0", PORT)).expect("a listener");
    let proxy = node.0.run_in(Ns::Node, listen).expect("the node");
    let ran = node.vip(&[L7]);
    absent(&ran, "proxy-path-broken");
    sound(&ran);
    assert_eq!(fate(&ran, "80/TCP", WG0), proxied("yes"));
    assert_eq!(
        answer(&ran),
        (
            "yes".to_owned(),
            "YES via eno1 and wg0: 80/TCP handed to the local proxy in BPF before any neighbour \
             look-up"
                .to_owned()
        )
    );

    // That of IPv6, which is another table, stays.
    node.ip(Ns::Node, "route flush table 2004");
    assert!(node.ip(Ns::Node, "-6 route show table 2004").contains("default"));
    let ran = node.vip(&[L7]);
    found(&ran, "proxy-path-broken", "error", &broken("table 2004 is empty"));
    // What is broken is not served.
    assert_eq!(fate(&ran, "80/TCP", WG0), proxied("no"));
    assert_eq!(ran.code, Some(1), "{ran:?}");
    // A table that could not be read is not an empty one.
    let failed = edited(&node, L7, |evidence| {
        let sources = evidence["sources"].as_array_mut().expect("sources");
        let table = sources.iter_mut().find(|source| source["what"] == "table 2004");
        table.expect("the table")["status"] = json!("failed");
    });
    absent(&failed, "proxy-path-broken");
    assert_eq!(fate(&failed, "80/TCP", WG0), proxied("unknown"));
    assert!(why(&failed, "80/TCP", WG0).ends_with("table 2004 not read"), "{failed:?}");

    // Without the rule either: that the datapath knows L7 is then told by what it was built with.
    node.ip(Ns::Node, "rule del pref 9");
    let ran = node.vip(&[L7]);
    absent(&ran, "proxy-path-broken");
    assert_eq!(fate(&ran, "80/TCP", WG0).0, "unknown");
    let folder = TempDir::new().expect("a folder");
    let state = folder.path().to_str().expect("UTF-8");
    node::state(folder.path(), &["ENABLE_L7_LB"]);
    let ran = node.vip(&[L7, "--state", state]);
    let all = "no rule sends packets with the proxy's mark to table 2004; table 2004 is empty";
    found(&ran, "proxy-path-broken", "error", &broken(all));
    assert_eq!(fate(&ran, "80/TCP", WG0), proxied("no"));
    drop(proxy);
    let ran = node.vip(&[L7, "--state", state]);
    let all = format!("{all}; nothing listens on port {PORT}");
    found(&ran, "proxy-path-broken", "error", &broken(&all));

    // Built without L7, it balances and needs no proxy.
    node::state(folder.path(), &["ENABLE_IPV4"]);
    let ran = node.vip(&[L7, "--state", state]);
    absent(&ran, "proxy-path-broken");
    assert_eq!(fate(&ran, "80/TCP", WG0), translated());
}

#[test]
fn a_backend_behind_a_next_hop_that_does_not_answer() {
    /// Its backend is on another node, behind the gateway, which the lab does not have.
    const REMOTE: &str = "192.168.2.37";
    let node = Node::new("v1.21-tcx");
    let before = node.vip(&[REMOTE]);
    absent(&before, "backend-unreachable");
    assert_eq!(
        fate(&before, "80/TCP", ENO1),
        is("dnat-before-neigh", "yes", "192.168.2.1 on eno1: absent")
    );
    assert!(!node.connect(Ns::Client, "tcp", REMOTE, 80).ok);
    let ran = node.vip(&[REMOTE]);
    let told = finding(&ran, "backend-unreachable");
    let seen = told["seen"].as_str().expect("text");
    let state = ["INCOMPLETE", "FAILED"]
        .into_iter()
        .find(|state| seen.ends_with(state))
        .unwrap_or_else(|| panic!("{seen}"));
    let expected = format!(
        "192.168.2.37:80/TCP: the way to 1 of 1 backends is dead: 192.168.2.1 on eno1: {state}"
    );
    found(&ran, "backend-unreachable", "error", &expected);
    for path in [ENO1, WG0] {
        assert_eq!(
            fate(&ran, "80/TCP", path),
            is("dnat-before-neigh", "no", &format!("192.168.2.1 on eno1: {state}"))
        );
    }
    assert_eq!(ran.code, Some(1), "{ran:?}");
    // A VIP with local backends, on the same node at the same time.
    absent(&node.vip(&[WEB]), "backend-unreachable");
    assert!(node.connect(Ns::Client, "tcp", WEB, 443).ok);

    // A next hop on the link that answers.
    let plain = "192.168.2.32";
    assert!(node.connect(Ns::Client, "tcp", plain, 80).ok);
    absent(&node.vip(&[plain]), "backend-unreachable");
}

#[test]
fn a_device_that_announces_without_carrier() {
    let node = Node::new("v1.21-tcx");
    absent(&node.vip(&[WEB]), "carrier-down-announcing");
    // The cable is pulled at the switch.
    node.ip(Ns::Lan, "link set node down");
    let ran = node.vip(&[WEB]);
    let seen =
        |what: &str| format!("this node has a responder entry for the VIP on eno1, which {what}");
    found(&ran, "carrier-down-announcing", "error", &seen("has no carrier"));
    // Nothing arrives there; the VPN still works.
    let paths = ran.json()["verdict"]["paths"].to_string();
    assert!(!paths.contains(ENO1), "{paths}");
    assert_eq!(fate(&ran, "443/TCP", WG0), translated());
    let (served, sentence) = answer(&ran);
    assert_eq!((served.as_str(), ran.code), ("partly", Some(1)), "{ran:?}");
    assert!(sentence.starts_with("PARTLY: yes via wg0: "), "{sentence}");
    assert!(
        sentence.ends_with("; but it is announced on eno1, which has no carrier"),
        "{sentence}"
    );
    assert!(!node.connect(Ns::Client, "tcp", WEB, 443).ok);
    assert!(node.connect(Ns::Vpn, "tcp", WEB, 443).ok);
    let only = node.vip(&[WEB, "--via", "eno1"]);
    let says = "NO: nothing arrives on eno1, which has no carrier";
    assert_eq!((only.code, answer(&only)), (Some(1), ("no".to_owned(), says.to_owned())));

    node.ip(Ns::Lan, "link set node up");
    node.ip(Ns::Node, "link set eno1 down");
    let ran = node.vip(&[WEB]);
    found(&ran, "carrier-down-announcing", "error", &seen("is down"));
    let only = node.vip(&[WEB, "--via", "eno1"]);
    assert_eq!(answer(&only).1, "NO: nothing arrives on eno1, which is down");
    node.ip(Ns::Node, "link set wg0 down");
    let ran = node.vip(&[WEB]);
    let says = "NO: no device is up, with carrier, on which clients from outside could come in";
    assert_eq!((ran.code, answer(&ran).1.as_str()), (Some(1), says));
    let other = node.vip(&[WEB, "--via", "eno7"]);
    assert_eq!(answer(&other).1, "CANNOT TELL: this node has no device eno7");
}

#[test]
fn a_dead_agent_answers_for_no_vip() {
    let node = Node::new("v1.21-tcx");
    assert_eq!(node.vip(&[WEB]).code, Some(0));
    let liveness = node.0.map("cilium_runtime_config").expect("the map");
    liveness.update(&1_u32.to_ne_bytes(), &1_u64.to_ne_bytes()).expect("long ago");
    // Without the sign of life that the helper gives.
    let alone = || {
        let mut command = inspect(["vip", WEB, "-o", "json"]);
        finish(node.0.exec_in(Ns::Node, &mut command).expect("the node"))
    };
    let ran = node.0.run_alone(None, alone).expect("mounts of its own");
    assert_eq!(finding(&ran, "agent-dead")["severity"], "warning");
    let (served, sentence) = answer(&ran);
    assert_eq!((served.as_str(), ran.code), ("partly", Some(1)), "{ran:?}");
    assert!(sentence.contains("but the agent is dead and its L2 responder silent"), "{sentence}");
    // Translation goes on, which the paths say.
    assert_eq!(fate(&ran, "443/TCP", WG0), translated());
}

#[test]
fn questions_that_cannot_be_answered_here_are_refused() {
    let node = Node::new("v1.21-tcx");
    let other = node.vip(&[WEB, "--via", "eno1,eno7"]);
    assert_eq!(other.code, Some(3));
    assert_eq!(answer(&other).1, "CANNOT TELL: this node has no device eno7");
    for (arguments, says) in [
        (["--source", "fd00::1"], "different IP families"),
        (["--pid", "0"], "there is no process 0"),
        (["--pid", "4194304"], "there is no process 4194304"),
    ] {
        let ran = node.vip(&[&[WEB][..], &arguments].concat());
        assert_eq!((ran.code, ran.out.as_str()), (Some(2), ""), "{ran:?}");
        assert!(ran.err.contains(says), "{ran:?}");
    }
    // Seen from another place the programs are elsewhere, and nothing is said of them.
    let client = node.0.netns(Ns::Client).expect("the client");
    let ran = node.vip(&[WEB, "--netns", client.to_str().expect("UTF-8")]);
    assert_eq!(ran.code, Some(3), "{ran:?}");
    assert!(answer(&ran).1.contains("another network namespace"), "{ran:?}");
}

/// An agent that answers once with this list of services.
fn agent(socket: &Path, list: &Value) -> thread::JoinHandle<()> {
    let listener = UnixListener::bind(socket).expect("a socket");
    let answer = format!("HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n{list}");
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        let mut request = Vec::new();
        let mut buffer = [0; 1024];
        while !request.ends_with(b"\r\n\r\n") {
            let length = stream.read(&mut buffer).expect("a request");
            assert!(length > 0, "the request ends early");
            request.extend(&buffer[..length]);
        }
        stream.write_all(answer.as_bytes()).expect("an answer");
    })
}

#[test]
fn a_frontend_that_the_agent_does_not_have() {
    let node = Node::new("v1.21-tcx");
    let capture = Capture::project("v1.21-tcx").expect("the capture");
    let list = capture.text("cilium/service-list.json").expect("the agent's list");
    let all: Value = serde_json::from_str(&list).expect("JSON");
    let mut less = all.clone();
    less.as_array_mut().expect("a list").retain(|service| {
        let frontend = &service["spec"]["frontend-address"];
        frontend["ip"] != "192.168.2.22" || frontend["protocol"] != "UDP"
    });
    let count = |list: &Value| list.as_array().expect("a list").len();
    assert_eq!(count(&less) + 1, count(&all));
    let folder = TempDir::new().expect("a folder");
    let ask = |name: &str, list: &Value| {
        let socket = folder.path().join(name);
        let server = agent(&socket, list);
        let ran = node.vip(&["192.168.2.22", &format!("--agent={}", socket.display())]);
        server.join().expect("the agent");
        ran
    };
    absent(&ask("all.sock", &all), "ghost-frontend");
    let ran = ask("less.sock", &less);
    let seen = "192.168.2.22:25565/UDP is in the maps and not in the agent";
    found(&ran, "ghost-frontend", "warning", seen);
    assert_eq!(finding(&ran, "ghost-frontend")["frontend"], "192.168.2.22:25565/UDP");
    // The datapath goes on with it.
    assert_eq!((ran.code, fate(&ran, "25565/UDP", ENO1)), (Some(0), translated()));
    assert!(node.connect(Ns::Client, "udp", "192.168.2.22", 25565).ok);
    // Not asked, nothing is known.
    absent(&node.vip(&["192.168.2.22"]), "ghost-frontend");
}

/// What releases of 1.19 write where a Service's VIP is an address of the node.
#[test]
fn a_wildcard_entry_of_an_address_of_the_node() {
    const ID: &str = "wildcard-on-node-address";
    /// A Service on the node's own address, one with a backend elsewhere, one with pods of this node.
    const VIPS: [&str; 3] = ["192.168.2.10", "192.168.2.32", "192.168.2.20"];
    let node = Node::new("v1.21-tcx");
    let reaches = || {
        [
            // The node as a client, of a plain host in the LAN.
            node.connect(Ns::Node, "tcp", "192.168.2.60", 8080).ok,
            // Sent on to a backend elsewhere, from the node's address.
            node.connect(Ns::Client, "tcp", "192.168.2.32", 80).ok,
            // To a pod of this node.
            node.connect(Ns::Client, "tcp", "192.168.2.20", 443).ok,
            // The Service on the node's address.
            node.connect(Ns::Client, "tcp", "192.168.2.10", 8088).ok,
        ]
    };
    assert_eq!(reaches(), [true; 4]);
    for vip in VIPS {
        absent(&node.vip(&[vip]), ID);
    }
    let services = node.0.map("cilium_lb4_services_v2").expect("a map");
    let wildcard = |vip: [u8; 4]| [&vip[..], &[0; 8]].concat();
    let of_vip = services.lookup(&wildcard([192, 168, 2, 20])).expect("a look-up");
    let value = of_vip.expect("a VIP that is no address of the node has such an entry");
    let key = wildcard([192, 168, 2, 10]);
    assert_eq!(services.lookup(&key).expect("a look-up"), None, "this release writes none");
    services.update(&key, &value).expect("an update");

    assert_eq!(reaches(), [false, false, true, true], "answers to the node's address are dropped");
    let seen = "192.168.2.10 is an address of this node on eno1 and has a wildcard entry";
    found(&node.vip(&["192.168.2.10"]), ID, "error", seen);
    let ran = node.vip(&["192.168.2.32"]);
    let elsewhere = "; 192.168.2.32 has a backend elsewhere, 192.168.2.60:8080/TCP";
    found(&ran, ID, "error", &format!("{seen}{elsewhere}"));
    assert!(finding(&ran, ID)["meaning"].as_str().expect("text").contains("reason 158"));
    // Whose backends are all here is not concerned, nor is the other family.
    absent(&node.vip(&["192.168.2.20"]), ID);
    absent(&node.vip(&["fd00:2::32"]), ID);
    // The same from a file, in a claim, and read once for many VIPs.
    let folder = TempDir::new().expect("a folder");
    let file = folder.path().join("evidence.json");
    let file = file.to_str().expect("UTF-8");
    node.inspect(&["vip", "192.168.2.32", "--save", file]);
    let claim = format!("finding:{ID}");
    let ran = finish(&mut inspect(["evidence", "judge", file, "--expect", &claim]));
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let list = folder.path().join("vips.yaml");
    let lines: Vec<String> = ["finding", "finding", "no-finding"]
        .iter()
        .zip(VIPS)
        .map(|(word, vip)| format!("  - vip: {vip}\n    expect: ['{word}:{ID}']\n"))
        .collect();
    fs::write(&list, format!("vips:\n{}", lines.concat())).expect("a file");
    let ran = node.inspect(&["check", list.to_str().expect("UTF-8")]);
    assert_eq!(ran.code, Some(0), "{ran:?}");

    // A VIP that becomes an address of the node, as far as its devices tell.
    services.delete(&key).expect("a delete");
    assert_eq!(reaches(), [true; 4]);
    absent(&node.vip(&["192.168.2.32"]), ID);
    node.ip(Ns::Node, "addr add 192.168.2.20/32 dev eno1");
    let seen = "192.168.2.20 is an address of this node on eno1 and has a wildcard entry";
    found(&node.vip(&["192.168.2.20"]), ID, "error", seen);
    node.ip(Ns::Node, "addr del 192.168.2.20/32 dev eno1");
    absent(&node.vip(&["192.168.2.20"]), ID);
}

#[test]
fn a_neighbour_entry_that_nothing_looks_up() {
    let node = Node::new("v1.21-tcx");
    absent(&node.vip(&[WEB]), "neighbour-irrelevant");
    // A socket of the node that socket-LB does not cover makes the node ask for its own VIP.
    let send = || {
        let socket = UdpSocket::bind(("0.0.0.0", 0)).expect("a socket");
        socket.send_to(b"anybody?", (WEB, 443)).expect("sent");
    };
    node.0.run_in(Ns::Node, send).expect("the node");
    let ran = node.vip(&[WEB]);
    found(
        &ran,
        "neighbour-irrelevant",
        "note",
        "the neighbour entry of 192.168.2.20 is INCOMPLETE on eno1",
    );
    let told = finding(&ran, "neighbour-irrelevant");
    let meaning = told["meaning"].as_str().expect("text");
    assert!(meaning.ends_with("; it matters for: forwarded from pod"), "{meaning}");
    assert_eq!(fate(&ran, "443/TCP", ENO1), translated());
    assert_eq!(fate(&ran, "443/TCP", WG0), translated());
    assert_eq!(ran.code, Some(0), "{ran:?}");

    // Where a device has lost its program, it is not irrelevant.
    node.detach("devices/wg0/links/cil_from_netdev");
    node.0.run_in(Ns::Node, send).expect("the node");
    let ran = node.vip(&[WEB]);
    absent(&ran, "neighbour-irrelevant");
    assert!(fate(&ran, "443/TCP", WG0).2.ends_with("(matters on this path)"), "{ran:?}");
}

/// Judges what the node's evidence says after a change in memory.
fn edited(node: &Node, vip: &str, edit: impl FnOnce(&mut Value)) -> Ran {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("evidence.json");
    let file = path.to_str().expect("UTF-8");
    node.vip(&[vip, "--save", file]);
    let mut content: Value =
        serde_json::from_slice(&fs::read(&path).expect("the evidence")).expect("JSON");
    content.as_object_mut().expect("an object").remove("verdict");
    edit(&mut content);
    fs::write(&path, sealed(content)).expect("a file");
    run::run(&mut run::inspect(["vip", vip, "-o", "json", "--from", file]))
}

/// The kernel may have no WireGuard: the peers are written into evidence of the lab's node, whose
/// wg0 is a TUN device.
#[test]
fn a_vpn_to_which_no_client_ever_came() {
    let node = Node::new("v1.21-tcx");
    let wg0 = node.index("wg0");
    let with = |handshakes: [Option<u64>; 2]| {
        let peers = handshakes.map(|handshake| {
            json!({
                "endpoint": handshake.is_some(), "handshake_s": handshake, "received": 0,
                "sent": 0, "allowed": ["10.90.0.2/32"],
            })
        });
        edited(&node, WEB, |evidence| {
            evidence["network"]["wireguard"] = json!([{ "ifindex": wg0, "peers": peers }]);
        })
    };
    let ran = with([None, None]);
    found(&ran, "no-client-yet", "note", "wg0: 2 peers, no handshake yet");
    assert_eq!(finding(&ran, "no-client-yet")["path"], WG0);
    assert_eq!(fate(&ran, "443/TCP", WG0), translated());
    assert_eq!(ran.code, Some(0), "nothing is wrong: {ran:?}");
    absent(&with([None, Some(12)]), "no-client-yet");
    absent(&edited(&node, WEB, |_| {}), "no-client-yet");
}

#[test]
fn a_device_without_ethernet_header_and_with_small_packets() {
    let node = Node::new("v1.21-tcx");
    absent(&node.vip(&[WEB]), "l3-mtu");
    node.ip(Ns::Node, "link set wg0 mtu 1280");
    let ran = node.vip(&[WEB]);
    found(&ran, "l3-mtu", "note", "MTU 1280 on wg0, 1420 on the pods' devices");
    assert_eq!(finding(&ran, "l3-mtu")["path"], WG0);
    absent(&node.vip(&[WEB, "--via", "eno1"]), "l3-mtu");
    // As small as the pods' packets.
    for pod in ["lxc2082d2686dee", "lxc4ed9c10b6b39"] {
        node.ip(Ns::Node, &format!("link set {pod} mtu 1280"));
    }
    absent(&node.vip(&[WEB]), "l3-mtu");
}

#[test]
fn a_source_that_is_not_let_through() {
    /// For 192.168.2.0/24 and 10.1.2.3/32 only.
    const RANGED: &str = "192.168.2.24";
    let node = Node::new("v1.21-tcx");
    let ran = node.vip(&[RANGED, "--source", "10.90.0.2"]);
    let clause = "the source 10.90.0.2 is not let through (allowed: 10.1.2.3/32 192.168.2.0/24)";
    let seen = format!("192.168.2.24:80/TCP: {clause}");
    found(&ran, "source-range-denied", "error", &seen);
    for path in [ENO1, WG0] {
        assert_eq!(fate(&ran, "80/TCP", path), is("denied", "no", "none: it ends in BPF"));
    }
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(!node.connect(Ns::Vpn, "tcp", RANGED, 80).ok);

    let ran = node.vip(&[RANGED, "--source", "192.168.2.50"]);
    absent(&ran, "source-range-denied");
    assert_eq!((ran.code, fate(&ran, "80/TCP", ENO1)), (Some(0), translated()));
    assert!(node.connect(Ns::Client, "tcp", RANGED, 80).ok);

    // The other way about: these are denied.
    let denied = "192.168.2.34";
    let ran = node.vip(&[denied, "--source", "192.168.2.50"]);
    let seen = "192.168.2.34:80/TCP: the source 192.168.2.50 is not let through (denied: \
                192.168.2.50/32)";
    found(&ran, "source-range-denied", "error", seen);
    absent(&node.vip(&[denied, "--source", "10.90.0.2"]), "source-range-denied");
    assert!(!node.connect(Ns::Client, "tcp", denied, 80).ok);
    assert!(node.connect(Ns::Vpn, "tcp", denied, 80).ok);

    // Of nobody in particular: only some are let through, which is said and no finding.
    let ran = node.vip(&[RANGED]);
    absent(&ran, "source-range-denied");
    assert!(path(&ran, "80/TCP", WG0)["why"].to_string().contains("only some sources"), "{ran:?}");
}

#[test]
fn the_same_for_ipv6() {
    const WEB6: &str = "fd00:2::20";
    let node = Node::new("v1.21-tcx");
    let before = node.vip(&[WEB6]);
    sound(&before);
    assert_eq!((before.code, fate(&before, "443/TCP", WG0)), (Some(0), translated()));
    assert!(node.connect(Ns::Vpn, "tcp", WEB6, 443).ok);

    // A socket of the node makes the kernel ask for the VIP, which nothing that is forwarded does.
    let send = || {
        let socket = UdpSocket::bind("[::]:0").expect("a socket");
        socket.send_to(b"anybody?", (WEB6, 443)).expect("sent");
    };
    node.0.run_in(Ns::Node, send).expect("the node");
    let ran = node.vip(&[WEB6]);
    let seen = "the neighbour entry of fd00:2::20 is INCOMPLETE on eno1";
    found(&ran, "neighbour-irrelevant", "note", seen);
    assert_eq!(ran.code, Some(0), "{ran:?}");

    node.detach("devices/wg0/links/cil_from_netdev");
    let ran = node.vip(&[WEB6]);
    found(&ran, "device-no-datapath", "error", "wg0: no program of Cilium's runs there");
    absent(&ran, "neighbour-irrelevant");
    let (outcome, served, neighbour) = fate(&ran, "443/TCP", WG0);
    assert_eq!((outcome.as_str(), served.as_str()), ("untranslated", "no"));
    assert!(neighbour.starts_with("fd00:2::20 on eno1: "), "{neighbour}");
    assert!(!node.connect(Ns::Vpn, "tcp", WEB6, 443).ok);
    assert!(node.connect(Ns::Client, "tcp", WEB6, 443).ok);

    // Source ranges of IPv6.
    let ranged = "fd00:2::24";
    let ran = node.vip(&[ranged, "--source", "fd00:90::2", "--via", "eno1"]);
    let seen = "[fd00:2::24]:80/TCP: the source fd00:90::2 is not let through (allowed: \
                fd00:2::/64)";
    found(&ran, "source-range-denied", "error", seen);
    let ran = node.vip(&[ranged, "--source", "fd00:2::50", "--via", "eno1"]);
    absent(&ran, "source-range-denied");
    assert!(node.connect(Ns::Client, "tcp", ranged, 80).ok);
}
