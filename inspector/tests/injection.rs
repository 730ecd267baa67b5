//! Injection: a real packet arrives on a device as if a client had sent it, is followed to the backend
//! and its answer back, and nothing stays of it. Each case has its control, and its counter-test.
//!
//! Needs root, bpf(2), a cgroup2 mount, TUN devices and iproute2's `ip` and `tc`; fails without.

mod bpf;
mod netfilter;
mod node;
mod replaced;
mod run;

use std::{
    collections::BTreeSet,
    fs,
    io::{Read, Write},
    os::unix::process::CommandExt,
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use bpf::Code;
use inspector::{
    cilium::{
        ipcache::{Identity, Ipcache, IpcacheFlags},
        l2_responder::L2Responder,
        layout::{Family, LAYOUTS},
    },
    evidence::{file::Document, injection::Injection},
};
use inspector_lab::{Ns, probe::Outcome};
use node::{Contents, Node, absent, contents, path, why};
use replaced::in_place_of_cilium;
use run::{Ran, Stranger, inspect, run as finish, sealed};
use serde_json::Value;
use tempfile::TempDir;

const WEB: &str = "192.168.2.20";
const ENO1: &str = "forwarded via eno1";
const WG0: &str = "forwarded via wg0";

/// Injects for a VIP.
fn injected(node: &Node, arguments: &[&str]) -> Ran {
    node.vip(&[arguments, &["--inject", "--yes"]].concat())
}

/// What a packet came to on a path.
#[track_caller]
fn packet(ran: &Ran, port: &str, of: &str) -> Value {
    let injected = path(ran, port, of)["injected"].clone();
    assert!(injected.is_object(), "{port} {of} was injected: {ran:?}");
    injected
}

/// Outcome, served and proof of a path.
#[track_caller]
fn fate(ran: &Ran, port: &str, of: &str) -> (String, String, String) {
    let path = path(ran, port, of);
    let text = |member: &str| path[member].as_str().expect("text").to_owned();
    (text("outcome"), text("served"), text("grade"))
}

fn is(outcome: &str, served: &str, grade: &str) -> (String, String, String) {
    (outcome.to_owned(), served.to_owned(), grade.to_owned())
}

/// The control went up the stack and was asked for as a neighbour.
#[track_caller]
fn control_is_good(packet: &Value) {
    let control = &packet["control"];
    assert_eq!(control["good"], true, "{packet:#}");
    assert_eq!(control["conclusion"]["outcome"], "untranslated", "{packet:#}");
    let result = control["result"].as_str().expect("text");
    assert!(result.contains("looked up as a neighbour"), "{result}");
}

/// The neighbours of the devices on which packets are injected, and what hangs on them.
#[derive(Debug, PartialEq)]
struct Kernel {
    neighbours: BTreeSet<String>,
    links: Vec<String>,
    classifiers: String,
    programs: Vec<u32>,
}

fn kernel(node: &Node) -> Kernel {
    let neighbours = node.ip(Ns::Node, "neigh show nud all");
    let words = |line: &str| line.split(' ').take(3).collect::<Vec<_>>().join(" ");
    let ours = |line: &&str| line.contains("dev eno1") || line.contains("dev wg0");
    let links = node.ip(Ns::Node, "-o link");
    let name = |line: &str| line.split(':').nth(1).expect("a name").trim().to_owned();
    let mut command = Command::new("tc");
    command.arg("qdisc");
    let output = node.0.exec_in(Ns::Node, &mut command).expect("the node").output();
    let output = output.expect("`tc`, of iproute2, which this test needs");
    let devices = [node.index("eno1"), node.index("wg0")];
    let attached = || {
        let all = inspector::collect::programs::attached_now().expect("programs");
        let mut here: Vec<u32> =
            all.into_iter().filter(|one| devices.contains(&one.0)).map(|one| one.2).collect();
        here.sort_unstable();
        here
    };
    Kernel {
        neighbours: neighbours
            .lines()
            .filter(ours)
            // That of a backend elsewhere is no packet's own.
            .filter(|line| !line.contains("NOARP") && !line.starts_with("192.168.2.60 "))
            .map(words)
            .collect(),
        links: links.lines().map(name).collect(),
        classifiers: String::from_utf8(output.stdout).expect("UTF-8"),
        programs: node.0.run_in(Ns::Node, attached).expect("the node"),
    }
}

/// Everything that a packet could change.
fn all(node: &Node) -> (Contents, Kernel) {
    (contents(node), kernel(node))
}

/// Nothing is otherwise than before; said is only what is.
#[track_caller]
fn unchanged(node: &Node, before: &(Contents, Kernel)) {
    let now = all(node);
    let mut changed = Vec::new();
    for (name, entries) in &now.0 {
        let earlier = before.0.get(name).cloned().unwrap_or_default();
        changed.extend(entries.symmetric_difference(&earlier).map(|entry| (name, entry.clone())));
    }
    assert!(changed.is_empty(), "{changed:?}");
    assert_eq!(now.1, before.1);
}

/// The saved injection of a run.
fn saved(node: &Node, arguments: &[&str]) -> (Ran, Injection) {
    let folder = TempDir::new().expect("a folder");
    let file = folder.path().join("evidence.json");
    let save = ["--save", file.to_str().expect("UTF-8")];
    let ran = injected(node, &[arguments, &save].concat());
    let evidence = Document::read(&file).expect("evidence").evidence;
    (ran, evidence.injection.expect("an injection"))
}

fn is_served(capture: &str, vip: &str, sources: [&str; 2]) {
    let node = Node::new(capture);
    let before = all(&node);
    let ran = injected(&node, &[vip]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    for (device, source) in [ENO1, WG0].into_iter().zip(sources) {
        assert_eq!(fate(&ran, "443/TCP", device), is("dnat-before-neigh", "yes", "observed"));
        let packet = packet(&ran, "443/TCP", device);
        assert!(packet["source"].as_str().expect("text").starts_with(source), "{packet:#}");
        let seen = &packet["conclusion"];
        assert_eq!(seen["vip_lookups"]["kind"], "none", "{packet:#}");
        let answer = &seen["answer"];
        assert_eq!((&answer["kind"], &answer["syn_ack"]), (&"answered".into(), &true.into()));
        // As the VIP, through the device on which it came.
        assert_eq!(answer["as_vip"], true, "{packet:#}");
        assert_eq!((&packet["proves"], &packet["reset"]), (&true.into(), &true.into()));
        control_is_good(&packet);
        let why = why(&ran, "443/TCP", device);
        let words = "injected: 1 of 1 packets translated before any neighbour look-up, 1 answered; \
                     control to";
        assert!(why.contains(words), "{why}");
    }
    absent(&ran, "proof-conflict");
    absent(&ran, "backend-not-probed");
    // A path that no packet from outside takes keeps its grade.
    assert!(path(&ran, "443/TCP", "socket on host")["injected"].is_null());
    unchanged(&node, &before);
    assert!(node.connect(Ns::Client, "tcp", vip, 443).ok);
}

#[test]
fn the_whole_way_is_seen_without_a_client() {
    is_served("v1.21-tcx", WEB, ["192.168.2.77:", "10.90.0.77:"]);
}

#[test]
fn the_whole_way_is_seen_over_ipv6() {
    is_served("v1.21-tcx", "fd00:2::20", ["[fd00:2::77]:", "[fd00:90::77]:"]);
}

#[test]
fn the_whole_way_is_seen_in_front_of_clsact_filters() {
    is_served("v1.18-clsact", WEB, ["192.168.2.77:", "10.90.0.77:"]);
}

#[test]
fn the_whole_way_is_seen_over_ipv6_in_front_of_clsact_filters() {
    is_served("v1.18-clsact", "fd00:2::20", ["[fd00:2::77]:", "[fd00:90::77]:"]);
}

/// The Service's target port is one at which nobody listens.
#[test]
fn a_backend_that_refuses_is_no_fault_of_the_datapath() {
    let node = Node::new("v1.21-tcx");
    node.let_backends_refuse();
    let before = all(&node);
    let ran = injected(&node, &[WEB, "--via", "wg0"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    // The other backend was not asked.
    assert_eq!(fate(&ran, "443/TCP", WG0), is("dnat-before-neigh", "partly", "observed"));
    let packet = packet(&ran, "443/TCP", WG0);
    assert_eq!(packet["conclusion"]["answer"]["kind"], "refused", "{packet:#}");
    assert_eq!(packet["reset"], false, "nothing is half open: {packet:#}");
    control_is_good(&packet);
    let seen = ran.seen("backend-refuses");
    assert!(seen.len() == 1 && seen[0].starts_with("1 of 1 connections"), "{seen:?}");
    unchanged(&node, &before);
}

#[test]
fn a_backend_that_says_nothing() {
    let node = Node::new("v1.21-tcx");
    for pod in [1, 2] {
        node.ip(Ns::Pod(pod), "route add blackhole 192.168.2.77");
    }
    node.ip(Ns::Host60, "route add blackhole 192.168.2.10/32");
    let before = all(&node);
    // In a pod.
    let ran = injected(&node, &[WEB, "--via", "eno1"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let local = packet(&ran, "443/TCP", ENO1);
    assert_eq!(local["conclusion"]["answer"]["kind"], "silent", "{local:#}");
    control_is_good(&local);
    let seen = ran.seen("backend-silent");
    assert!(seen.len() == 1 && seen[0].contains("got no answer"), "{ran:?}");
    // Elsewhere.
    let ran = injected(&node, &["192.168.2.32", "--via", "eno1"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert_eq!(fate(&ran, "80/TCP", ENO1), is("dnat-before-neigh", "no", "observed"));
    let seen = ran.seen("backend-silent");
    assert!(seen.len() == 1 && seen[0].contains("192.168.2.60:8080"), "{ran:?}");
    unchanged(&node, &before);
    // The counter-test: from elsewhere it answers.
    let ran = injected(&node, &[WEB, "--via", "wg0"]);
    assert_eq!(fate(&ran, "443/TCP", WG0), is("dnat-before-neigh", "yes", "observed"));
}

#[test]
fn a_frontend_without_backend_rejects() {
    let node = Node::new("v1.21-tcx");
    let before = all(&node);
    let ran = injected(&node, &["192.168.2.29"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    for device in [ENO1, WG0] {
        assert_eq!(fate(&ran, "80/TCP", device), is("no-backend", "no", "observed"));
        let packet = packet(&ran, "80/TCP", device);
        control_is_good(&packet);
        assert_eq!(packet["reset"], false, "no backend was reached: {packet:#}");
    }
    // The stand-in says so to clients that have a MAC address, and drops the others' packets.
    let answer = |device| packet(&ran, "80/TCP", device)["conclusion"]["answer"]["kind"].clone();
    assert_eq!((answer(ENO1), answer(WG0)), ("unreachable".into(), "silent".into()));
    absent(&ran, "proof-conflict");
    unchanged(&node, &before);
}

/// Cilium's program is missing on wg0: the very look-up of the VIP is seen that would be seen of a
/// client's packet. On eno1, in the same run, there is none.
#[test]
fn without_ciliums_program_the_vip_is_looked_up() {
    for vip in [WEB, "fd00:2::20"] {
        let node = Node::new("v1.18-wg0-detached");
        let before = all(&node);
        let ran = injected(&node, &[vip]);
        assert_eq!(ran.code, Some(1), "{ran:?}");
        assert_eq!(fate(&ran, "443/TCP", ENO1), is("dnat-before-neigh", "yes", "observed"));
        let (outcome, served, grade) = fate(&ran, "443/TCP", WG0);
        assert_eq!((outcome.as_str(), grade.as_str()), ("untranslated", "observed"), "{ran:?}");
        assert_eq!(served, "no");
        let on_eno1 = packet(&ran, "443/TCP", ENO1);
        assert_eq!(on_eno1["conclusion"]["vip_lookups"]["kind"], "none", "{on_eno1:#}");
        let on_wg0 = packet(&ran, "443/TCP", WG0);
        assert_eq!(on_wg0["conclusion"]["vip_lookups"]["kind"], "seen", "{on_wg0:#}");
        assert_eq!(on_wg0["reset"], false, "no backend was reached: {on_wg0:#}");
        let lookups = on_wg0["conclusion"]["lookups"].as_array().expect("look-ups");
        assert!(
            lookups.iter().any(|one| one["is_vip"] == true && one["device"] == "eno1"),
            "{on_wg0:#}"
        );
        control_is_good(&on_wg0);
        // The VIP's own entry, that the packet has made, is gone too.
        unchanged(&node, &before);
    }
}

#[test]
fn a_packet_for_the_proxy_is_answered_where_something_listens() {
    let node = Node::new("v1.21-l7lb");
    let before = all(&node);
    // Nobody listens.
    let ran = injected(&node, &["192.168.2.30"]);
    for device in [ENO1, WG0] {
        assert_eq!(fate(&ran, "80/TCP", device), is("proxied-before-neigh", "no", "observed"));
        let packet = packet(&ran, "80/TCP", device);
        assert!(packet["conclusion"]["proxy_port"].is_u64(), "{packet:#}");
        assert_eq!(packet["conclusion"]["drops"][0]["reason"], "NO_SOCKET", "{packet:#}");
        control_is_good(&packet);
    }
    // Table 2004 hands marked packets to the node: there, a socket can take them.
    let port = packet(&ran, "80/TCP", ENO1)["conclusion"]["proxy_port"].as_u64();
    let port = u16::try_from(port.expect("a port")).expect("a port");
    let _listeners = node.listen_as_proxy(port);
    let ran = injected(&node, &["192.168.2.30"]);
    for device in [ENO1, WG0] {
        let packet = packet(&ran, "80/TCP", device);
        assert_eq!(packet["conclusion"]["answer"]["kind"], "answered", "{packet:#}");
        assert_eq!(packet["reset"], true, "{packet:#}");
        let now = fate(&ran, "80/TCP", device);
        assert_eq!(now, is("proxied-before-neigh", "yes", "observed"), "{packet:#}");
    }
    unchanged(&node, &before);
}

#[test]
fn a_backend_elsewhere_answers_by_way_of_this_node() {
    let node = Node::new("v1.21-tcx");
    let before = all(&node);
    let ran = injected(&node, &["192.168.2.32"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    for device in [ENO1, WG0] {
        assert_eq!(fate(&ran, "80/TCP", device), is("dnat-before-neigh", "yes", "observed"));
        let packet = packet(&ran, "80/TCP", device);
        let to = &packet["conclusion"]["translation"];
        assert_eq!((&to["seen"], &to["backend"]), (&true.into(), &"192.168.2.60:8080".into()));
        assert!(to["source"].as_str().expect("text").starts_with("192.168.2.10:"), "{packet:#}");
        assert_eq!(packet["conclusion"]["answer"]["as_vip"], true, "{packet:#}");
        control_is_good(&packet);
    }
    let after = all(&node);
    assert_eq!(after.0, before.0);
    assert_eq!((after.1.links, after.1.programs), (before.1.links, before.1.programs));
}

#[test]
fn a_datagram_proves_by_its_answer_and_its_silence_proves_nothing() {
    let node = Node::new("v1.21-tcx");
    let vip = "192.168.2.22:25565/udp";
    let before = all(&node);
    let (ran, injection) = saved(&node, &[vip, "--payload", "text:hello"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    for device in [ENO1, WG0] {
        assert_eq!(fate(&ran, "25565/UDP", device), is("dnat-before-neigh", "yes", "observed"));
        control_is_good(&packet(&ran, "25565/UDP", device));
    }
    assert!(injection.probes.iter().all(|probe| probe.payload == "68656c6c6f"), "{injection:?}");
    unchanged(&node, &before);
    for pod in [1, 2] {
        node.ip(Ns::Pod(pod), "route add blackhole 10.90.0.77");
    }
    let ran = injected(&node, &[vip, "--via", "wg0"]);
    // What is programmed stands: silence says nothing of a datagram.
    assert_eq!(packet(&ran, "25565/UDP", WG0)["conclusion"]["answer"]["kind"], "silent");
    assert_eq!(path(&ran, "25565/UDP", WG0)["served"], "yes", "{ran:?}");
    absent(&ran, "backend-silent");
}

/// A control that is translated too: the packet for the frontend proves nothing.
#[test]
fn a_program_that_translates_everything_proves_nothing() {
    let node = Node::new("v1.21-tcx");
    // The destination of whatever comes by becomes 10.77.1.9, behind 14 + 16 bytes.
    let _link = in_place_of_cilium(&node, |services| {
        Code::tc("cil_from_netdev").uses(services).writes(30, [10, 77, 1, 9]).returns(0).load()
    });
    let ran = injected(&node, &[WEB, "--via", "eno1"]);
    assert_eq!(path(&ran, "443/TCP", ENO1)["grade"], "programmed", "{ran:?}");
    let packet = packet(&ran, "443/TCP", ENO1);
    assert_eq!(packet["proves"], false, "{packet:#}");
}

/// What is programmed is not what becomes of the packet: told, and what was seen stands.
#[test]
fn a_packet_that_contradicts_the_maps_stands_and_is_told() {
    let node = Node::new("v1.21-tcx");
    let _link = in_place_of_cilium(&node, |services| {
        Code::tc("cil_from_netdev").uses(services).returns(0).load()
    });
    let ran = injected(&node, &[WEB, "--via", "eno1"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert_eq!(fate(&ran, "443/TCP", ENO1), is("untranslated", "no", "observed"));
    let seen = ran.seen("proof-conflict");
    assert!(seen.len() == 1 && seen[0].contains("injected was: 1 of 1 untranslated"), "{seen:?}");
    // Nobody has to answer a datagram: what the maps say of a translation is no answer either.
    let ran = injected(&node, &["192.168.2.22:25565/udp", "--via", "eno1"]);
    let (outcome, served, grade) = fate(&ran, "25565/UDP", ENO1);
    assert_eq!((outcome.as_str(), grade.as_str()), ("untranslated", "observed"), "{ran:?}");
    assert_eq!(served, "unknown", "{ran:?}");
    assert_eq!(ran.code, Some(3), "{ran:?}");
    // With all three grades nothing is sent: the simulation has told it already.
    let ran = node.vip(&[WEB, "--via", "eno1", "--prove", "--yes"]);
    assert!(path(&ran, "443/TCP", ENO1)["injected"].is_null(), "{ran:?}");
    let unsaid = ran.json()["injection"]["not_injected"].to_string();
    assert!(unsaid.contains("the simulation contradicts what is programmed"), "{unsaid}");
    assert_eq!(ran.json()["injection"]["packets"], 0);
}

#[test]
fn all_three_grades_in_one_view() {
    let node = Node::new("v1.21-tcx");
    let before = all(&node);
    let ran = node.vip(&[WEB, "--prove", "--yes"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    for device in [ENO1, WG0] {
        let path = path(&ran, "443/TCP", device);
        assert_eq!(path["simulated"]["programmed"], "dnat-before-neigh");
        assert_eq!(path["simulated"]["outcome"], "dnat-before-neigh");
        assert_eq!(path["injected"]["derived_grade"], "simulated");
        assert_eq!(path["injected"]["outcome"], "dnat-before-neigh");
        assert_eq!(path["grade"], "observed");
    }
    let table = node.inspect(&["vip", WEB, "--prove", "--yes"]);
    let flat = table.out.split_whitespace().collect::<Vec<_>>().join(" ");
    let words = "PROOFS VIA PROGRAMMED SIMULATED INJECTED 443/TCP eno1 dnat-before-neigh \
                 dnat-before-neigh dnat-before-neigh, SYN-ACK of 10.77.1.";
    assert!(flat.contains(words), "{table:?}");
    unchanged(&node, &before);
}

/// Sends nothing, asks nobody, and says all of it.
#[test]
fn what_would_be_sent_is_shown_and_not_sent() {
    let node = Node::new("v1.21-tcx");
    let counters = || node.0.map("cilium_metrics").expect("counters").entries().expect("entries");
    let before = (all(&node), counters());
    let ran = node.vip(&[WEB, "--inject", "--dry-run"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let plan = ran.json();
    let probes = plan["probes"].as_array().expect("probes");
    assert_eq!(probes.len(), 2, "{plan:#}");
    assert_eq!(probes[0]["client"]["source"], "192.168.2.77");
    assert_eq!(probes[0]["answer_to"], "nobody: to the MAC address 00:00:5e:00:53:77 on eno1");
    assert_eq!(probes[0]["control"]["destination"], "192.168.2.99");
    assert_eq!(probes[1]["answer_to"], "whoever is behind wg0");
    let table = node.inspect(&["vip", WEB, "--prove", "--dry-run"]);
    assert!(table.out.contains("2 packets and their controls. Nothing was sent."), "{table:?}");
    assert_eq!((all(&node), counters()), before);
    // Not on a terminal, and nobody has said yes.
    for flag in ["--inject", "--prove"] {
        let ran = node.inspect(&["vip", WEB, flag]);
        ran.refused(2, &["sends real packets", "--dry-run", "--yes"]);
    }
    assert_eq!((all(&node), counters()), before);
}

/// On a terminal the packets are shown, and sent only if the user says yes.
#[test]
fn on_a_terminal_the_user_is_asked() {
    let node = Node::new("v1.21-tcx");
    let before = all(&node);
    let asked = |answer: &str| {
        node.0.set_agent_alive().expect("a sign of life");
        let line = format!("{} vip {WEB} --via wg0 --inject", env!("CARGO_BIN_EXE_inspect"));
        let mut command = Command::new("script");
        command.args(["-qec", &line, "/dev/null"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let command = node.0.exec_in(Ns::Node, &mut command).expect("the node");
        let start = || command.spawn().expect("`script`, of bsdutils, which this test needs");
        let mut child = node.0.run_alone(None, start).expect("mounts of its own");
        let mut input = child.stdin.take().expect("a pipe");
        input.write_all(answer.as_bytes()).expect("an answer");
        let output = child.wait_with_output().expect("its output");
        drop(input);
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let (code, out) = asked("n\n");
    assert_eq!(code, Some(2), "{out}");
    for words in
        ["SYN from", "10.90.0.77", "192.168.2.99", "Send 1 packet", "[y/N]", "nothing was sent"]
    {
        assert!(out.contains(words), "{words} in {out}");
    }
    let (code, out) = asked("y\n");
    assert_eq!(code, Some(0), "{out}");
    assert!(out.contains("YES via") && out.contains("Injected:"), "{out}");
    unchanged(&node, &before);
}

/// Addresses that somebody has are passed over: a neighbour, a frontend, one that Cilium knows.
#[test]
fn nobodys_address_is_chosen() {
    let node = Node::new("v1.21-tcx");
    let source = |arguments: &[&str]| {
        let ran = node.vip(&[&[WEB, "--via", "eno1", "--inject", "--dry-run"], arguments].concat());
        let probe = ran.json()["probes"][0].clone();
        let text = |value: &Value| value.as_str().expect("text").to_owned();
        (text(&probe["client"]["source"]), text(&probe["answer_to"]))
    };
    assert_eq!(source(&[]).0, "192.168.2.77");
    node.ip(Ns::Node, "neigh add 192.168.2.77 dev eno1 lladdr 02:00:00:00:00:77");
    assert_eq!(source(&[]).0, "192.168.2.78");
    node.ip(Ns::Node, "route add 192.168.2.78/32 via 192.168.2.60 dev eno1");
    assert_eq!(source(&[]).0, "192.168.2.79");
    // One that Cilium knows as a node's, and another VIP that this node announces.
    let layout = |name: &str| {
        LAYOUTS.iter().find(|layout| layout.name == name && layout.family != Some(Family::V6))
    };
    let ipcache = Ipcache {
        address: "192.168.2.79".parse().expect("an address"),
        prefix_len: 32,
        cluster_id: 0,
        identity: Identity(6),
        tunnel_endpoint: None,
        encrypt_key: 0,
        flags: IpcacheFlags(0),
        word8: 0,
    };
    let map = ["cilium_ipcache_v2", "cilium_ipcache"].into_iter().find_map(|name| {
        let map = node.0.map(name).ok()?;
        Some((map, layout(name).expect("a layout")))
    });
    let (map, layout) = map.expect("the ipcache");
    let (key, value) = ipcache.encode(layout).expect("an entry");
    map.update(&key, &value).expect("an update");
    assert_eq!(source(&[]).0, "192.168.2.80");
    let responder = L2Responder {
        address: "192.168.2.80".parse().expect("an address"),
        ifindex: node.index("eno1"),
        answers: 0,
    };
    let (key, value) = responder.encode();
    let map = node.0.map("cilium_l2_responder_v4").expect("the responders");
    map.update(&key, &value).expect("an update");
    assert_eq!(source(&[]).0, "192.168.2.81");
    // Whom the user wants: there the answer goes.
    let (source, to) = source(&["--source", "192.168.2.78"]);
    assert_eq!(source, "192.168.2.78");
    assert_eq!(to, "192.168.2.78, by the gateway 192.168.2.60 on eno1");
}

/// The planned packets: device, source and to whom the answer goes.
#[track_caller]
fn planned(node: &Node, arguments: &[&str]) -> Vec<[String; 3]> {
    let ran = node.vip(&[arguments, &["--inject", "--dry-run"]].concat());
    let plan = ran.json();
    let probes = plan["probes"].as_array().unwrap_or_else(|| panic!("probes: {ran:?}"));
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    probes
        .iter()
        .map(|one| [&one["device"], &one["client"]["source"], &one["answer_to"]].map(text))
        .collect()
}

/// Nobody is told that a gateway, a host with a route of its own, or who is at the other end of a
/// point-to-point network were at a MAC address that is made up: packets for it would be lost.
#[test]
fn whom_the_routes_name_is_somebody() {
    let node = Node::new("v1.21-tcx");
    let source = || planned(&node, &[WEB, "--via", "eno1"])[0][1].clone();
    assert_eq!(source(), "192.168.2.77");
    // None of them is in the neighbour table: nothing was sent to them yet.
    node.ip(Ns::Node, "route add 198.51.100.0/24 via 192.168.2.77 dev eno1");
    assert_eq!(source(), "192.168.2.78");
    node.ip(
        Ns::Node,
        "route add 198.51.101.0/24 table 77 nexthop via 192.168.2.78 nexthop via 192.168.2.79",
    );
    assert_eq!(source(), "192.168.2.80");
    node.ip(Ns::Node, "route add 192.168.2.80/32 dev eno1");
    assert_eq!(source(), "192.168.2.81");
    // The only other address of such a network is its other end.
    node.ip(Ns::Node, "addr add 10.9.9.1/30 dev eno1");
    node.ip(Ns::Node, "addr del 192.168.2.10/24 dev eno1");
    assert_eq!(source(), "192.0.2.77");
}

/// A device with an address alone, as WireGuard's often is: its clients are whom routes lead to.
#[test]
fn a_client_is_of_the_networks_that_are_routed_to_a_device() {
    let node = Node::new("v1.21-tcx");
    for arguments in [
        "addr del 10.90.0.1/24 dev wg0",
        "addr add 10.90.0.1/32 dev wg0",
        "route add 10.91.0.0/24 dev wg0",
    ] {
        node.ip(Ns::Node, arguments);
    }
    let only = |of: &str| planned(&node, &[of, "--via", "wg0"]).swap_remove(0);
    assert_eq!(only(WEB), ["wg0", "10.91.0.77", "whoever is behind wg0"]);
    let ran = injected(&node, &[WEB, "--via", "wg0"]);
    assert_eq!(fate(&ran, "443/TCP", WG0), is("dnat-before-neigh", "yes", "observed"));
    // Without any, the answer leaves elsewhere, which is said.
    node.ip(Ns::Node, "route del 10.91.0.0/24 dev wg0");
    let [_, source, to] = only(WEB);
    assert_eq!(source, "192.0.2.77");
    assert!(to.ends_with("on eno1, not back through wg0"), "{to}");
}

/// A single address that a frontend lets through is a client's: no packet is sent in its name
/// unless the user wants it.
#[test]
fn no_real_client_is_taken_because_source_ranges_name_it() {
    let node = Node::new("v1.21-tcx");
    let ranged = "192.168.2.24";
    // It lets 10.1.2.3/32 and 192.168.2.0/24 through.
    let both = planned(&node, &[ranged]);
    let sources: Vec<&str> = both.iter().map(|one| one[1].as_str()).collect();
    assert_eq!(sources, ["192.168.2.77", "192.168.2.77"]);
    let map = node.0.map("cilium_lb4_source_range").expect("the ranges");
    for entry in map.entries().expect("its entries") {
        // Length of the prefix and of what is before it; number, padding, address.
        if entry.key[8..] == [192, 168, 2, 0] {
            map.delete(&entry.key).expect("an entry");
        }
    }
    let ran = node.vip(&[ranged, "--inject", "--dry-run"]);
    let plan = ran.json();
    assert_eq!(plan["probes"].as_array().map(Vec::len), Some(0), "{plan:#}");
    let skipped = plan["skipped"].to_string();
    assert!(skipped.contains("lets only some sources through (10.1.2.3/32)"), "{plan:#}");
    assert!(skipped.contains("--source"), "{plan:#}");
    let [_, source, _] =
        planned(&node, &[ranged, "--via", "wg0", "--source", "10.1.2.3"]).swap_remove(0);
    assert_eq!(source, "10.1.2.3");
}

/// Several frontends with the same backends, as a web server's 80 and 443: what the packet for one has
/// left for a moment does not keep the next from being sent.
#[test]
fn frontends_that_share_their_backends_are_all_asked() {
    let node = Node::new("v1.21-tcx");
    let before = all(&node);
    for source in [&[][..], &["--source", "192.168.2.123"][..]] {
        let ran = injected(&node, &[&["192.168.2.45", "--via", "eno1"], source].concat());
        for port in ["80/TCP", "81/TCP"] {
            let of = packet(&ran, port, ENO1);
            assert_eq!(of["proves"], true, "{port} {of:#}");
            assert_eq!(of["conclusion"]["answer"]["kind"], "answered", "{port} {of:#}");
        }
        unchanged(&node, &before);
    }
    let ran = injected(&node, &["192.168.2.22"]);
    for port in ["25565/TCP", "25565/UDP"] {
        for device in [ENO1, WG0] {
            let now = fate(&ran, port, device);
            assert_eq!(now, is("dnat-before-neigh", "yes", "observed"), "{port} {device}");
        }
    }
    unchanged(&node, &before);
}

/// An answer that does not leave is no proof that a client is served.
#[test]
fn an_answer_that_was_not_seen_to_leave_proves_no_way_back() {
    let node = Node::new("v1.21-tcx");
    let before = all(&node);
    node.ip(Ns::Node, "route add blackhole 10.90.0.77");
    let ran = injected(&node, &[WEB, "--via", "wg0", "--source", "10.90.0.77"]);
    let packet = packet(&ran, "443/TCP", WG0);
    let answer = &packet["conclusion"]["answer"];
    assert_eq!((&answer["kind"], &answer["as_vip"]), (&"answered".into(), &false.into()));
    assert_eq!(fate(&ran, "443/TCP", WG0).2, "programmed", "{packet:#}");
    let why = why(&ran, "443/TCP", WG0);
    assert!(why.contains("the answer was not seen to leave as the VIP"), "{why}");
    // The counter-test.
    node.ip(Ns::Node, "route del blackhole 10.90.0.77");
    let ran = injected(&node, &[WEB, "--via", "wg0", "--source", "10.90.0.77"]);
    assert_eq!(fate(&ran, "443/TCP", WG0), is("dnat-before-neigh", "yes", "observed"));
    unchanged(&node, &before);
}

/// On a node whose netfilter tracks connections, those of the control and of nobody's client go too.
#[test]
fn tracked_connections_are_forgotten() {
    let node = Node::new("v1.21-tcx");
    netfilter::shell(
        &node.0,
        &netfilter::root(),
        "nft add table ip t
         nft 'add chain ip t f { type filter hook forward priority 0; }'
         nft add rule ip t f ct state new accept",
    );
    let (ran, injection) = saved(&node, &[WEB]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let tracked: Vec<_> =
        injection.kernel.iter().filter(|one| one.what.starts_with("tracked")).collect();
    // The controls went through the stack, the others did not.
    assert_eq!(tracked.len(), 2, "{:#?}", injection.kernel);
    assert!(injection.kernel.iter().all(|one| one.left.is_none()), "{:#?}", injection.kernel);
    let table = || fs::read_to_string("/proc/thread-self/net/nf_conntrack").expect("the table");
    let there = node.0.run_in(Ns::Node, table).expect("the node");
    assert!(!there.contains("192.168.2.99"), "{there}");
}

/// A real client is left alone: its neighbour entry, and its connections.
#[test]
fn a_client_that_is_there_keeps_what_it_has() {
    let node = Node::new("v1.21-tcx");
    assert!(node.connect(Ns::Client, "tcp", WEB, 443).ok);
    let before = all(&node);
    let ran = injected(&node, &[WEB, "--via", "eno1", "--source", "192.168.2.50"]);
    // It has connections to the backends, whose entries a packet would change.
    let unsaid = ran.json()["injection"]["not_injected"].to_string();
    assert!(unsaid.contains("the client 192.168.2.50 is in use"), "{ran:?}");
    assert_eq!(ran.code, Some(3), "{ran:?}");
    unchanged(&node, &before);
    let outcome: Outcome = node.connect(Ns::Client, "tcp", WEB, 443);
    assert!(outcome.ok, "{outcome:?}");
}

/// Starts an injection whose backend does not answer, which is waited for.
fn waiting(node: &Node) -> Child {
    for pod in [1, 2] {
        node.ip(Ns::Pod(pod), "route add blackhole 192.168.2.77");
    }
    node.0.set_agent_alive().expect("a sign of life");
    let mut command = inspect(["vip", WEB, "--via", "eno1", "--inject=60s", "--yes", "-o", "json"]);
    let command = node.0.exec_in(Ns::Node, &mut command).expect("the node");
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    // SAFETY: between fork and exec the closure makes one system call and allocates nothing.
    unsafe {
        command.pre_exec(|| {
            let mut empty = std::mem::zeroed();
            libc::sigemptyset(&raw mut empty);
            libc::sigprocmask(libc::SIG_SETMASK, &raw const empty, std::ptr::null_mut());
            Ok(())
        });
    }
    let start = || command.spawn().expect("inspect");
    let child = node.0.run_alone(None, start).expect("mounts of its own");
    // The client's neighbour entry is there when the packet is.
    let start = Instant::now();
    while !node.ip(Ns::Node, "neigh").contains("00:00:5e:00:53:77") {
        assert!(start.elapsed() < Duration::from_mins(1), "nothing was sent");
        thread::sleep(Duration::from_millis(5));
    }
    thread::sleep(Duration::from_millis(200));
    child
}

fn kill(child: &Child, signal: i32) {
    let id = i32::try_from(child.id()).expect("a number");
    // SAFETY: the call takes numbers; the child has not been waited for.
    assert_eq!(unsafe { libc::kill(id, signal) }, 0);
}

fn ended(child: Child) -> Ran {
    let Output { status, stdout, stderr } = child.wait_with_output().expect("its output");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    let ran = Ran { code: status.code(), out: text(stdout), err: text(stderr) };
    assert!(!ran.err.contains("panicked"), "{ran:?}");
    ran
}

#[test]
fn a_signal_in_the_middle_ends_it_with_the_answer_so_far_and_leaves_nothing() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        let node = Node::new("v1.21-tcx");
        let before = all(&node);
        let child = waiting(&node);
        kill(&child, signal);
        let ran = ended(child);
        assert!(matches!(ran.code, Some(0 | 3)), "{ran:?}");
        let unsaid = ran.json()["injection"]["not_injected"].to_string();
        assert!(unsaid.contains("ended by a signal before it was done"), "{unsaid}");
        unchanged(&node, &before);
    }
}

/// Killed, it leaves what expires by itself; what does not expire soon, the next run takes away.
#[test]
fn what_a_killed_run_left_is_gone_after_the_next() {
    let node = Node::new("v1.21-tcx");
    let before = all(&node);
    let child = waiting(&node);
    kill(&child, libc::SIGKILL);
    let output = child.wait_with_output().expect("its end");
    assert_eq!(output.status.code(), None);
    // No device, no qdisc, no program.
    let after = kernel(&node);
    assert_eq!((&after.links, &after.classifiers), (&before.1.links, &before.1.classifiers));
    let start = Instant::now();
    while kernel(&node).programs != before.1.programs {
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", kernel(&node));
        thread::sleep(Duration::from_millis(20));
    }
    assert!(after.neighbours.iter().any(|one| one.contains("192.168.2.77")), "{after:?}");
    let ran = injected(&node, &[WEB, "--via", "wg0"]);
    assert_eq!(fate(&ran, "443/TCP", WG0), is("dnat-before-neigh", "yes", "observed"));
    let mut after = kernel(&node);
    // That nobody is at the control's address the kernel forgets by itself, as after any other
    // packet to nobody.
    after.neighbours.remove("192.168.2.99 dev eno1");
    assert_eq!(after, before.1);
}

#[test]
fn two_at_once_wait_for_each_other() {
    let node = Node::new("v1.21-tcx");
    let before = all(&node);
    thread::scope(|scope| {
        let injections = (0..3).map(|_| scope.spawn(|| injected(&node, &[WEB])));
        let simulations = (0..2).map(|_| scope.spawn(|| node.vip(&[WEB, "--simulate"])));
        let runs: Vec<_> = injections.chain(simulations).collect();
        for run in runs {
            let ran = run.join().expect("a run");
            assert_eq!(ran.code, Some(0), "{ran:?}");
            for device in [ENO1, WG0] {
                assert_ne!(path(&ran, "443/TCP", device)["grade"], "programmed", "{ran:?}");
            }
        }
    });
    unchanged(&node, &before);
}

#[test]
fn a_device_that_goes_away_under_it() {
    let node = Node::new("v1.21-tcx");
    let before = contents(&node);
    let child = waiting(&node);
    node.ip(Ns::Node, "link del eno1");
    // Nothing more is to come; it need not be waited for to its end.
    kill(&child, libc::SIGINT);
    let ran = ended(child);
    assert!(matches!(ran.code, Some(0 | 1 | 3)), "{ran:?}");
    assert!(ran.json()["injection"].is_object(), "{ran:?}");
    assert_eq!(contents(&node), before);
    // And one that is gone, or down, before it.
    node.ip(Ns::Node, "link set wg0 down");
    let ran = injected(&node, &[WEB]);
    assert_eq!(ran.json()["injection"]["packets"], 0, "{ran:?}");
    assert_ne!(ran.code, Some(0), "{ran:?}");
}

#[test]
fn the_same_verdict_from_the_file_and_none_from_one_that_was_edited() {
    let node = Node::new("v1.21-tcx");
    let folder = TempDir::new().expect("a folder");
    let file = folder.path().join("evidence.json");
    let file = file.to_str().expect("UTF-8");
    let ran = injected(&node, &[WEB, "--via", "wg0", "--save", file]);
    let again = finish(&mut inspect(["evidence", "judge", file, "-o", "json"]));
    assert_eq!(again.code, Some(0), "{again:?}");
    assert_eq!(again.json()["verdict"], ran.json()["verdict"]);
    assert_eq!(again.json()["injection"], ran.json()["injection"]);
    let claims = ["--expect", "observed@wg0", "--expect", "dnat-before-neigh@wg0"];
    let claimed = finish(&mut inspect([&["evidence", "judge", file], &claims[..]].concat()));
    assert_eq!(claimed.code, Some(0), "{claimed:?}");

    let content: Value =
        serde_json::from_slice(&fs::read(file).expect("the evidence")).expect("JSON");
    let edited = |change: &dyn Fn(&mut Value)| {
        let mut content = content.clone();
        content.as_object_mut().expect("an object").remove("verdict");
        change(&mut content["injection"]["probes"][0]);
        fs::write(file, sealed(content)).expect("a file");
        let ran = finish(&mut inspect(["evidence", "judge", file, "-o", "json"]));
        let path = path(&ran, "443/TCP", WG0);
        let told = ran.json()["injection"]["not_injected"].to_string();
        (path["grade"].as_str().expect("a grade").to_owned(), told, path)
    };
    assert_eq!(edited(&|_| {}).0, "observed");
    // Another frontend's packet, another client's way, and none at all.
    let (grade, told, _) = edited(&|probe| probe["frontend"] = "192.168.2.20:80/TCP".into());
    assert_eq!(grade, "programmed");
    assert!(told.contains("its packet was for 192.168.2.20:443"), "{told}");
    let (grade, told, _) = edited(&|probe| probe["client"]["source_port"] = 7.into());
    assert_eq!(grade, "programmed");
    assert!(told.contains("what was seen is another packet's way"), "{told}");
    let (grade, _, path) = edited(&|probe| {
        probe["client"].as_object_mut().expect("an object").remove("journey");
    });
    assert_eq!(grade, "programmed");
    assert_eq!(path["injected"]["why_not"], "no hook saw it arrive");
    // Without its control it is no proof.
    let (grade, _, path) = edited(&|probe| {
        probe["control"].as_object_mut().expect("an object").remove("journey");
    });
    assert_eq!(grade, "programmed");
    assert_eq!(path["injected"]["proves"], false);
}

#[test]
fn a_masked_client_is_in_no_packet_and_the_verdict_stays() {
    let node = Node::new("v1.21-tcx");
    let folder = TempDir::new().expect("a folder");
    let file = folder.path().join("evidence.json");
    let file = file.to_str().expect("UTF-8");
    let arguments = ["--via", "wg0", "--source", "10.90.0.123", "--mask", "clients"];
    let ran = injected(&node, &[&[WEB, "--save", file], &arguments[..]].concat());
    assert_eq!(fate(&ran, "443/TCP", WG0), is("dnat-before-neigh", "yes", "observed"));
    let text = fs::read_to_string(file).expect("the evidence");
    let probes = text.find("\"injection\"").expect("the injection");
    // As words and as bytes; the arguments that were typed are masked too.
    for address in ["10.90.0.123", "0a5a007b"] {
        assert!(!text[probes..].contains(address), "{address}");
    }
    let again = finish(&mut inspect(["evidence", "judge", file, "-o", "json"]));
    assert_eq!(fate(&again, "443/TCP", WG0), is("dnat-before-neigh", "yes", "observed"));
}

/// Every form that shows a verdict shows what was injected, and its control.
#[test]
fn every_form_tells_of_it() {
    let node = Node::new("v1.21-tcx");
    let folder = TempDir::new().expect("a folder");
    let file = folder.path().join("evidence.json");
    let file = file.to_str().expect("UTF-8");
    injected(&node, &[WEB, "--via", "wg0", "--save", file]);
    for form in ["table", "markdown", "html", "json"] {
        let ran = finish(&mut inspect(["evidence", "judge", file, "-o", form]));
        let flat = ran.out.split_whitespace().collect::<Vec<_>>().join(" ").replace('\\', "");
        for words in ["10.90.0.77:", "192.168.2.99:443", "looked up as a neighbour"] {
            assert!(flat.contains(words), "{form}: {words} in {flat}");
        }
    }
    let junit = finish(&mut inspect(["evidence", "judge", file, "-o", "junit"]));
    assert!(junit.out.contains(&format!("name=\"{WG0}\"")), "{junit:?}");
}

#[test]
fn what_cannot_be_asked_is_refused() {
    let node = Node::new("v1.21-tcx");
    let refused = |arguments: &[&str], words: &[&str]| {
        node.inspect(&[&["vip", WEB], arguments].concat()).refused(2, words);
    };
    refused(&["--yes"], &["--yes is about injection", "--inject or --prove"]);
    refused(&["--dry-run"], &["--dry-run is about injection"]);
    refused(&["--inject", "--dry-run", "--expect", "observed"], &["--dry-run gives no answer"]);
    refused(&["--inject", "--dry-run", "--save", "/dev/null"], &["--dry-run gives no answer"]);
    refused(&["--payload", "dns"], &["--payload is about injection"]);
    refused(&["--inject", "--yes", "--source", "192.168.2.10"], &["no client's"]);
    refused(&["--inject", "--yes", "--source", "10.77.1.158"], &["it is a backend"]);
    refused(&["--inject", "--yes", "--source", "192.168.2.255"], &["`broadcast`", "no client's"]);
    refused(&["--inject", "--yes", "--source", "192.168.2.21"], &["it is another VIP"]);
    node.inspect(&["vip", "fd00:2::20", "--inject", "--yes", "--source", "fe80::1"])
        .refused(2, &["it is of one link only"]);
    refused(&["--inject", "--dry-run", "-o", "markdown"], &["`table` or `json`"]);
    for (payload, words) in [
        ("", "give dns, hex:DIGITS or text:WORDS"),
        ("hex:0", "no pairs of hexadecimal digits"),
        ("text:", "give 1 to 1024 bytes"),
        ("hello", "give dns, hex:DIGITS or text:WORDS"),
    ] {
        let ran = node.inspect(&["vip", WEB, "--inject", "--yes", "--payload", payload]);
        ran.usage(&[words]);
    }
    for wait in ["10ms", "2m", "soon", "0s"] {
        let wait = format!("--inject={wait}");
        assert_eq!(node.inspect(&["vip", WEB, &wait, "--yes"]).code, Some(2), "{wait}");
    }
    // From a file there is nothing to send.
    let folder = TempDir::new().expect("a folder");
    let file = folder.path().join("evidence.json");
    let file = file.to_str().expect("UTF-8");
    node.vip(&[WEB, "--save", file]);
    node.inspect(&["vip", WEB, "--from", file, "--inject", "--yes"])
        .refused(2, &["--inject needs the node"]);
    // A VIP that nobody has programmed is an answer without any packet.
    let ran = injected(&node, &["192.168.2.99"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert_eq!(ran.json()["injection"]["packets"], 0);
}

/// Who may not change the neighbour table could not take back what stays in it.
#[test]
fn without_the_privilege_to_take_back_nothing_is_sent() {
    let node = Node::new("v1.21-tcx");
    let before = all(&node);
    node.0.set_agent_alive().expect("a sign of life");
    let binary = env!("CARGO_BIN_EXE_inspect");
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set=-net_admin", "--inh-caps=-net_admin", binary]);
    command.args(["vip", WEB, "--inject", "--yes"]);
    let command = node.0.exec_in(Ns::Node, &mut command).expect("the node");
    let start = || command.output().expect("`setpriv`, of util-linux, which this test needs");
    let output = node.0.run_alone(None, start).expect("mounts of its own");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("CAP_NET_ADMIN") && said.lines().count() == 1, "{said}");
    unchanged(&node, &before);
}

/// While the user was asked, or another run waited for, somebody came who has the address.
#[test]
fn whoever_came_meanwhile_gets_no_answer() {
    let node = Node::new("v1.21-tcx");
    node.0.set_agent_alive().expect("a sign of life");
    let line = format!("{} vip {WEB} --via eno1 --inject -o json", env!("CARGO_BIN_EXE_inspect"));
    let mut command = Command::new("script");
    command.args(["-qec", &line, "/dev/null"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let command = node.0.exec_in(Ns::Node, &mut command).expect("the node");
    let start = || command.spawn().expect("`script`, of bsdutils, which this test needs");
    let mut child = node.0.run_alone(None, start).expect("mounts of its own");
    let mut shown = String::new();
    let mut output = child.stdout.take().expect("a pipe");
    while !shown.contains("[y/N]") {
        let mut some = [0; 512];
        let number = output.read(&mut some).expect("its output");
        assert!(number > 0, "no question: {shown}");
        shown.push_str(&String::from_utf8_lossy(&some[..number]));
    }
    assert!(shown.contains("192.168.2.77"), "{shown}");
    node.ip(Ns::Node, "neigh add 192.168.2.77 dev eno1 lladdr 02:00:00:00:00:77");
    child.stdin.take().expect("a pipe").write_all(b"y\n").expect("an answer");
    output.read_to_string(&mut shown).expect("its output");
    child.wait().expect("its end");
    assert!(shown.contains("somebody has 192.168.2.77 by now"), "{shown}");
    let there = node.ip(Ns::Node, "neigh show 192.168.2.77");
    assert!(there.contains("02:00:00:00:00:77"), "{there}");
}

/// Without privilege nothing is sent, and one sentence says what is missing.
#[test]
fn a_user_without_privilege_is_told() {
    let node = Node::new("v1.21-tcx");
    let stranger = Stranger::new();
    let mut command = stranger.inspect(&["vip", WEB, "--inject", "--yes"]);
    let ran = finish(command.env("INSPECT_BPFFS", node.0.bpffs()));
    assert_eq!(ran.code, Some(3), "{ran:?}");
    assert_eq!((ran.out.as_str(), ran.err.lines().count()), ("", 1), "{ran:?}");
}
