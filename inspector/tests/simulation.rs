//! Simulation: the attached programs run on packets that nobody sent, each with its control, and
//! nothing stays of it.
//!
//! Needs root, bpf(2), a cgroup2 mount, TUN devices and iproute2's `ip`; fails without.

mod bpf;
mod node;
mod replaced;
mod run;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::IpAddr,
    os::unix::process::{CommandExt, ExitStatusExt},
    process::{Child, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use bpf::{Code, Map, TCX_INGRESS};
use inspector::{
    cilium::{
        affinity::{Affinity, Client},
        layout::LAYOUTS,
        proto::Protocol,
        services::{Scope, ServiceKey},
    },
    evidence::{file::Document, simulation::Purpose},
};
use inspector_lab::{Lab, MapHandle, Ns, datapath::Xdp};
use node::{Node, absent, answer, contents, fate, finding, is, path, why};
use replaced::in_place_of_cilium;
use run::{Ran, Stranger, inspect, run as finish};
use serde_json::Value;
use tempfile::TempDir;

/// A VIP with two local pods behind 443/TCP.
const WEB: &str = "192.168.2.20";
const ENO1: &str = "forwarded via eno1";
const WG0: &str = "forwarded via wg0";

/// A VIP with session affinity.
const STICKY: &str = "192.168.2.23";

/// What simulated packets came to on a path.
#[track_caller]
fn simulated(ran: &Ran, port: &str, of: &str) -> Value {
    let simulated = path(ran, port, of)["simulated"].clone();
    assert!(simulated.is_object(), "{port} {of} was simulated: {ran:?}");
    simulated
}

/// The results in words, with how many packets came to each.
fn results(simulated: &Value) -> BTreeMap<String, u64> {
    let results = simulated["results"].as_object().expect("results");
    results.iter().map(|(key, value)| (key.clone(), value.as_u64().expect("a number"))).collect()
}

/// Every VIP of a capture, both families, and a ClusterIP.
fn vips() -> Vec<String> {
    let mut vips = vec!["10.96.0.5".to_owned()];
    for last in 20..=47 {
        vips.push(format!("192.168.2.{last}"));
        vips.push(format!("fd00:2::{last}"));
    }
    vips
}

/// On the nodes of real captures, what is simulated is what is programmed: every outcome, on
/// devices with and without an Ethernet header, TCP and UDP, IPv4 and IPv6, each with its control.
#[test]
fn simulation_and_maps_agree_on_every_frontend() {
    let mut covered: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for capture in ["v1.21-tcx", "v1.21-l7lb", "v1.19-tcx", "v1.18-clsact", "v1.18-proto-any"] {
        let node = Node::new(capture);
        let before = contents(&node);
        let mut compared = 0;
        for vip in vips() {
            let ran = node.vip(&[&vip, "--simulate=64"]);
            absent(&ran, "proof-conflict");
            let json = ran.json();
            for path in json["verdict"]["paths"].as_array().expect("paths") {
                let Some(device) = path["device"].as_str() else { continue };
                let name = format!("{capture} {} via {device}", path["frontend"]);
                let simulated = &path["simulated"];
                assert!(simulated.is_object(), "{name}: {json:#}");
                assert_eq!(simulated["control"]["good"], true, "{name}: {simulated:#}");
                assert_ne!(simulated["control_port"]["good"], false, "{name}: {simulated:#}");
                assert_ne!(simulated["denied"]["good"], false, "{name}: {simulated:#}");
                let outcome = simulated["outcome"].as_str().expect("an outcome");
                let port = path["frontend"].as_str().expect("a frontend");
                covered.entry(outcome.to_owned()).or_default().insert(format!(
                    "{device} {} {}",
                    if vip.contains(':') { "v6" } else { "v4" },
                    port.rsplit('/').next().unwrap_or_default()
                ));
                compared += 1;
            }
        }
        assert!(compared > 40, "{capture}: {compared} paths");
        assert_eq!(contents(&node), before, "{capture}");
    }
    for (outcome, wanted) in [
        (
            "dnat-before-neigh",
            &[
                "eno1 v4 TCP",
                "eno1 v6 TCP",
                "wg0 v4 TCP",
                "wg0 v6 TCP",
                "eno1 v4 UDP",
                "wg0 v6 UDP",
            ][..],
        ),
        ("proxied-before-neigh", &["eno1 v4 TCP", "wg0 v4 TCP"]),
        ("no-backend", &["eno1 v4 TCP", "wg0 v4 TCP", "eno1 v6 TCP"]),
        ("denied", &["wg0 v4 TCP"]),
        ("dropped", &["eno1 v4 TCP", "wg0 v4 TCP"]),
    ] {
        let have = covered.get(outcome).unwrap_or_else(|| panic!("{outcome} in {covered:#?}"));
        for one in wanted {
            assert!(have.contains(*one), "{outcome} {one} in {have:#?}");
        }
    }
}

#[test]
fn a_translated_packet_and_its_control_side_by_side() {
    let node = Node::new("v1.21-tcx");
    let ran = node.vip(&[WEB, "--simulate"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    for (device, source) in [(ENO1, "192.0.2.77"), (WG0, "8.0.0.77")] {
        assert_eq!(path(&ran, "443/TCP", device)["grade"], "simulated");
        assert_eq!(
            fate(&ran, "443/TCP", device),
            is("dnat-before-neigh", "yes", "none: local pod")
        );
        let seen = simulated(&ran, "443/TCP", device);
        assert_eq!(seen["source"], source);
        assert_eq!(seen["conflict"], false);
        // Both backends were chosen, or every packet was used up for it.
        let results = results(&seen);
        assert!(results.keys().all(|one| one.starts_with("translated to 10.77.1.")), "{results:?}");
        assert_eq!(results.len(), 2, "{results:?}");
        let details = seen["details"].to_string();
        assert!(details.contains("TTL 63 of 64"), "{details}");
        assert!(details.contains("of the pod, from the endpoint map"), "{details}");
        assert_eq!(seen["control"]["destination"], "203.0.113.77:443");
        assert_eq!(seen["control"]["result"], "untouched");
        // A port that is no frontend meets the wildcard entry of this release.
        let unused = &seen["control_port"];
        assert_eq!(unused["result"], "dropped (158: Service backend not found)");
    }
    // A path that no packet from outside takes is not simulated, and keeps its grade.
    let socket = path(&ran, "443/TCP", "socket on host");
    assert!(socket["simulated"].is_null(), "{socket}");
    assert_eq!(socket["grade"], "programmed");
    // Without being asked for, nothing is run.
    let ran = node.vip(&[WEB]);
    assert!(path(&ran, "443/TCP", ENO1)["simulated"].is_null());
    assert!(ran.json()["simulation"].is_null());
}

#[test]
fn a_backend_elsewhere_is_reached_with_source_nat() {
    let node = Node::new("v1.21-tcx");
    let ran = node.vip(&["192.168.2.32", "--simulate"]);
    for device in [ENO1, WG0] {
        let seen = simulated(&ran, "80/TCP", device);
        assert_eq!(results(&seen), BTreeMap::from([("translated to 192.168.2.60:8080".into(), 1)]));
        let details = seen["details"].to_string();
        assert!(details.contains("source NAT to 192.168.2.10"), "{details}");
    }
}

#[test]
fn the_share_of_connections_that_a_dangling_slot_costs() {
    let node = Node::new("v1.21-tcx");
    let services = node.0.map("cilium_lb4_services_v2").expect("services");
    let mut key = ServiceKey {
        address: WEB.parse().expect("an address"),
        port: 443,
        protocol: Protocol::TCP,
        scope: Scope::External,
        slot: 2,
    };
    assert!(services.lookup(&key.encode()).expect("a look-up").is_some());
    services.delete(&key.encode()).expect("a slot");
    let ran = node.vip(&[WEB, "--simulate=400"]);
    absent(&ran, "proof-conflict");
    for device in [ENO1, WG0] {
        let path = path(&ran, "443/TCP", device);
        assert_eq!(path["share"], 0.5);
        assert_eq!(path["grade"], "simulated");
        let seen = simulated(&ran, "443/TCP", device);
        let results = results(&seen);
        assert_eq!(results.values().sum::<u64>(), 400, "{results:?}");
        let share = seen["share"].as_f64().expect("a share");
        // Half of 400, give or take six standard deviations.
        assert!((0.35..0.65).contains(&share), "{share}: {results:?}");
        assert!(results.keys().any(|one| one.starts_with("dropped")), "{results:?}");
    }
    // All slots gone: nobody is served.
    key.slot = 1;
    services.delete(&key.encode()).expect("a slot");
    let ran = node.vip(&[WEB, "--simulate=5"]);
    assert_eq!(fate(&ran, "443/TCP", ENO1).1, "no");
    absent(&ran, "proof-conflict");
}

#[test]
fn a_program_that_translates_everything_proves_nothing() {
    let node = Node::new("v1.21-tcx");
    // The destination of whatever comes by becomes 10.77.1.9, behind 14 + 16 bytes.
    let _link = in_place_of_cilium(&node, |services| {
        Code::tc("cil_from_netdev").uses(services).writes(30, [10, 77, 1, 9]).returns(0).load()
    });
    let programmed = node.vip(&[WEB, "--via", "eno1"]);
    assert_eq!(fate(&programmed, "443/TCP", ENO1).0, "dnat-before-neigh");

    let ran = node.vip(&[WEB, "--via", "eno1", "--simulate"]);
    assert_eq!((ran.code, answer(&ran).0.as_str()), (Some(3), "unknown"), "{ran:?}");
    assert_eq!(fate(&ran, "443/TCP", ENO1), is("unknown", "unknown", ""));
    assert_eq!(path(&ran, "443/TCP", ENO1)["grade"], "programmed");
    let control = &simulated(&ran, "443/TCP", ENO1)["control"];
    assert_eq!(
        (&control["good"], &control["result"]),
        (&false.into(), &"translated to 10.77.1.9:443".into())
    );
    // Both packets are told of.
    let reasons = why(&ran, "443/TCP", ENO1);
    assert!(reasons.contains("its control failed: 192.0.2.77 to 203.0.113.77:443"), "{reasons}");
    assert!(
        reasons.contains("the packet for the frontend was translated to 10.77.1.9:443"),
        "{reasons}"
    );
}

#[test]
fn a_simulation_that_contradicts_the_maps_stands_and_is_told() {
    let node = Node::new("v1.21-tcx");
    // It has the services map, and lets everything go on.
    let _link = in_place_of_cilium(&node, |services| {
        Code::tc("cil_from_netdev").uses(services).returns(0).load()
    });
    let ran = node.vip(&[WEB, "--via", "eno1"]);
    assert_eq!(fate(&ran, "443/TCP", ENO1).0, "dnat-before-neigh");
    absent(&ran, "proof-conflict");
    let ran = node.vip(&[WEB, "--via", "eno1", "--simulate"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let (outcome, served, neighbour) = fate(&ran, "443/TCP", ENO1);
    assert_eq!((outcome.as_str(), served.as_str()), ("untranslated", "no"));
    assert!(neighbour.contains("matters on this path"), "{neighbour}");
    assert_eq!(path(&ran, "443/TCP", ENO1)["grade"], "simulated");
    let told = finding(&ran, "proof-conflict");
    assert_eq!((&told["severity"], &told["path"]), (&"warning".into(), &ENO1.into()));
    let seen = told["seen"].as_str().expect("text");
    assert!(seen.contains("programmed is dnat-before-neigh"), "{seen}");
    assert!(seen.ends_with("was untouched"), "{seen}");
}

#[test]
fn a_foreign_program_in_front_is_not_what_was_simulated() {
    let node = Node::new("v1.21-tcx");
    let eno1 = node.index("eno1");
    let attach = || Code::tc("somebody_elses").returns(2).load().tcx(eno1, TCX_INGRESS, true);
    let _link = node.0.run_in(Ns::Node, attach).expect("the node");
    let ran = node.vip(&[WEB, "--via", "eno1", "--simulate"]);
    assert_eq!(fate(&ran, "443/TCP", ENO1).0, "unknown", "{ran:?}");
    absent(&ran, "proof-conflict");
    let reasons = why(&ran, "443/TCP", ENO1);
    assert!(reasons.contains("the simulation ran Cilium's program alone, without "), "{reasons}");
    assert!(!node.connect(Ns::Client, "tcp", WEB, 443).ok);
}

#[test]
fn xdp_comes_before_tc() {
    let node = Node::new("v1.21-tcx");
    let eno1 = node.index("eno1");
    let attach = |result| {
        let attach = || Code::xdp("cil_xdp_entry").returns(result).load().xdp(eno1, true);
        node.0.run_in(Ns::Node, attach).expect("the node")
    };
    let save = TempDir::new().expect("a folder");
    let file = save.path().join("evidence.json");
    let steps = || -> Vec<(String, i32)> {
        let file = file.to_str().expect("UTF-8");
        node.vip(&[WEB, "--via", "eno1", "--simulate", "--save", file]);
        let evidence = Document::read(file.as_ref()).expect("evidence").evidence;
        let runs = evidence.simulation.expect("a simulation").runs;
        let run = runs.iter().find(|run| run.purpose == Purpose::Client).expect("a client's");
        run.steps.iter().map(|step| (step.name.clone(), step.returned)).collect()
    };
    let link = attach(2);
    assert_eq!(steps(), [("cil_xdp_entry".into(), 2), ("cil_from_netdev".into(), 7)]);
    drop(link);
    // One that drops everything drops the control too, and so proves nothing.
    let _link = attach(1);
    assert_eq!(steps(), [("cil_xdp_entry".into(), 1)]);
    let ran = node.vip(&[WEB, "--via", "eno1", "--simulate"]);
    assert_eq!(fate(&ran, "443/TCP", ENO1).0, "unknown");
    let reasons = why(&ran, "443/TCP", ENO1);
    assert!(reasons.contains("its control failed"), "{reasons}");
}

#[test]
fn a_backend_elsewhere_is_reached_from_xdp() {
    let lab = Lab::builder().project("v1.21-tcx").xdp("eno1", Xdp::Generic).up().expect("a lab");
    let node = Node(lab);
    let folder = TempDir::new().expect("a folder");
    let file = folder.path().join("evidence.json");
    let save = file.to_str().expect("UTF-8");
    let steps = |vip: &str| {
        let ran = node.vip(&[vip, "--via", "eno1", "--simulate", "--save", save]);
        absent(&ran, "proof-conflict");
        let evidence = Document::read(&file).expect("evidence").evidence;
        let runs = evidence.simulation.expect("a simulation").runs;
        let run = runs.into_iter().find(|run| run.purpose == Purpose::Client);
        let steps = run.expect("a client's packet").steps;
        (ran, steps.into_iter().map(|step| step.name).collect::<Vec<_>>())
    };
    // Sent on by XDP, which knows the next hop once somebody has asked for it: tc never sees it.
    assert!(node.connect(Ns::Client, "tcp", "192.168.2.32", 80).ok);
    let before = contents(&node);
    let (ran, names) = steps("192.168.2.32");
    assert_eq!(names, ["cil_xdp_entry"]);
    assert_eq!(path(&ran, "80/TCP", ENO1)["grade"], "simulated");
    let seen = simulated(&ran, "80/TCP", ENO1);
    assert_eq!(results(&seen), BTreeMap::from([("translated to 192.168.2.60:8080".into(), 1)]));
    // A local pod's is passed on to tc.
    let (ran, names) = steps(WEB);
    assert_eq!(names, ["cil_xdp_entry", "cil_from_netdev"]);
    assert_eq!(path(&ran, "443/TCP", ENO1)["grade"], "simulated");
    assert_eq!(contents(&node), before);
}

#[test]
fn a_device_without_a_program_is_not_simulated_and_it_is_said() {
    let node = Node::new("v1.21-tcx");
    node.detach("devices/wg0/links/cil_from_netdev");
    let ran = node.vip(&[WEB, "--simulate"]);
    assert_eq!(path(&ran, "443/TCP", WG0)["grade"], "programmed");
    assert!(path(&ran, "443/TCP", WG0)["simulated"].is_null());
    assert_eq!(path(&ran, "443/TCP", ENO1)["grade"], "simulated");
    let unsaid = ran.json()["not_measured"].to_string();
    assert!(
        unsaid.contains("simulation of every frontend on wg0: no program of Cilium's runs there"),
        "{unsaid}"
    );
}

#[test]
fn whose_packet_it_is_can_be_chosen() {
    let node = Node::new("v1.21-tcx");
    // It lets 192.168.2.0/24 and 10.1.2.3 through.
    for (source, outcome, served) in
        [("192.168.2.99", "dnat-before-neigh", "yes"), ("10.1.2.4", "denied", "no")]
    {
        let ran = node.vip(&["192.168.2.24", "--via", "eno1", "--source", source, "--simulate"]);
        let (found, how, _) = fate(&ran, "80/TCP", ENO1);
        assert_eq!((found.as_str(), how.as_str()), (outcome, served), "{source}");
        assert_eq!(path(&ran, "80/TCP", ENO1)["grade"], "simulated");
        assert_eq!(simulated(&ran, "80/TCP", ENO1)["source"], source);
    }
    // Nobody chosen: one that is let through, and one that is not.
    let ran = node.vip(&["192.168.2.24", "--via", "eno1", "--simulate"]);
    let seen = simulated(&ran, "80/TCP", ENO1);
    assert_eq!(seen["outcome"], "dnat-before-neigh");
    assert_eq!(seen["denied"]["source"], "192.0.2.77");
    assert_eq!(seen["denied"]["result"], "dropped (177: Denied by LB src range check)");
    // On a device without Ethernet header not every source will do.
    let ran = node.vip(&[WEB, "--via", "wg0", "--source", "10.90.0.2", "--simulate"]);
    assert!(path(&ran, "443/TCP", WG0)["simulated"].is_null());
    assert_eq!(path(&ran, "443/TCP", WG0)["grade"], "programmed");
    let unsaid = ran.json()["not_measured"].to_string();
    assert!(unsaid.contains("on wg0: not from 10.90.0.2: the kernel's test run"), "{unsaid}");
}

/// The layout of a map of the lab.
fn layout(name: &str) -> &'static inspector::cilium::layout::Layout {
    LAYOUTS.iter().find(|layout| layout.name == name).expect("a layout")
}

#[test]
fn a_client_that_is_there_is_left_alone() {
    let node = Node::new("v1.21-tcx");
    let client: IpAddr = "192.168.2.99".parse().expect("an address");
    let sessions = node.0.map("cilium_lb4_affinity").expect("the sessions");
    let ran = node.vip(&[STICKY]);
    let frontend = &ran.json()["programmed"]["frontends"][0];
    let id = frontend["reverse_nat"]["id"].as_u64().expect("an id");
    let session = Affinity {
        client: Client::Address(client),
        rev_nat_index: u16::try_from(id).expect("an index"),
        last_used: 7,
        backend_id: 1,
    };
    let (key, value) = session.encode(layout("cilium_lb4_affinity")).expect("an entry");
    sessions.update(&key, &value).expect("an update");
    let before = contents(&node);
    let ran = node.vip(&[STICKY, "--via", "eno1", "--source", "192.168.2.99", "--simulate"]);
    assert_eq!(contents(&node), before);
    let unsaid = ran.json()["not_measured"].to_string();
    assert!(
        unsaid.contains("the client 192.168.2.99 is in use (session affinity of 192.168.2.99)"),
        "{unsaid}"
    );
    // One that has connections to the backends.
    let ran = node.vip(&[STICKY, "--via", "eno1", "--source", "192.168.2.50", "--simulate"]);
    assert_eq!(contents(&node), before);
    let unsaid = ran.json()["not_measured"].to_string();
    assert!(
        unsaid.contains(
            "the client 192.168.2.50 is in use (it has, or had not long ago, connections to 10.77.1."
        ),
        "{unsaid}"
    );
    assert_eq!(path(&ran, "80/TCP", ENO1)["grade"], "programmed");
    // Another client can be simulated, and leaves no session.
    let ran = node.vip(&[STICKY, "--via", "eno1", "--simulate"]);
    assert_eq!(path(&ran, "80/TCP", ENO1)["grade"], "simulated");
    assert_eq!(contents(&node), before);
}

#[test]
fn what_the_runs_left_is_taken_back() {
    for (capture, device) in [("v1.21-tcx", "eno1"), ("v1.18-clsact", "wg0")] {
        let node = Node::new(capture);
        let before = contents(&node);
        let folder = TempDir::new().expect("a folder");
        let file = folder.path().join("evidence.json");
        let save = file.to_str().expect("UTF-8");
        for (vip, wanted) in [
            // A local pod, IPv4 and IPv6; a session; a backend elsewhere; UDP.
            (WEB, &["conntrack", "ICMP errors"][..]),
            ("fd00:2::20", &["conntrack", "ICMP errors"]),
            ("192.168.2.23", &["session affinity"]),
            ("192.168.2.32", &["source NAT: ", "source NAT, back"]),
            ("192.168.2.22", &["conntrack"]),
        ] {
            let ran = node.vip(&[vip, "--via", device, "--simulate=8", "--save", save]);
            let simulation =
                Document::read(&file).expect("evidence").evidence.simulation.expect("a simulation");
            assert!(!simulation.runs.is_empty(), "{capture} {vip}: {ran:?}");
            assert!(
                simulation.effects.iter().all(|effect| effect.left.is_none()),
                "{simulation:#?}"
            );
            for what in wanted {
                assert!(
                    simulation.effects.iter().any(|effect| effect.what.contains(what)),
                    "{capture} {vip}: {what} in {:#?}",
                    simulation.effects
                );
            }
            if device == "eno1" {
                let macs = simulation.effects.iter().filter(|one| one.what.starts_with("MAC"));
                assert!(macs.count() > 0, "{:#?}", simulation.effects);
            }
            let taken = ran.json()["simulation"]["taken_back"].as_u64();
            assert_eq!(taken, Some(simulation.effects.len() as u64));
            assert_eq!(contents(&node), before, "{capture} {vip}");
        }
    }
}

/// `inspect vip … --simulate=10000` on a VIP of which every other connection fails, so that it
/// takes a while.
fn long_run(node: &Node) -> Child {
    let services = node.0.map("cilium_lb4_services_v2").expect("services");
    let key = ServiceKey {
        address: WEB.parse().expect("an address"),
        port: 443,
        protocol: Protocol::TCP,
        scope: Scope::External,
        slot: 2,
    };
    services.delete(&key.encode()).expect("a slot");
    node.0.set_agent_alive().expect("a sign of life");
    let mut command = inspect(["vip", WEB, "--simulate=10000", "-o", "json"]);
    let command = node.0.exec_in(Ns::Node, &mut command).expect("the node");
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    // Signals that the test's own shell holds back would be held back there too.
    // SAFETY: between fork and exec the closure makes one system call and allocates nothing.
    unsafe {
        command.pre_exec(|| {
            let mut empty = std::mem::zeroed();
            libc::sigemptyset(&raw mut empty);
            libc::sigprocmask(libc::SIG_SETMASK, &raw const empty, std::ptr::null_mut());
            Ok(())
        });
    }
    command.spawn().expect("inspect")
}

/// Waits until packets were simulated: those that are dropped are counted.
fn wait_for_runs(counters: &MapHandle) {
    let read = || counters.entries().expect("entries");
    let before = read();
    let start = Instant::now();
    while read() == before {
        assert!(start.elapsed() < Duration::from_mins(1), "no packet was simulated");
    }
}

#[test]
fn a_signal_in_the_middle_leaves_nothing() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        let node = Node::new("v1.21-tcx");
        let mut before = contents(&node);
        let counters = node.0.map("cilium_metrics").expect("counters");
        let child = long_run(&node);
        wait_for_runs(&counters);
        let pid = i32::try_from(child.id()).expect("a process");
        // SAFETY: the child is ours and has not been waited for.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
        let output = child.wait_with_output().expect("the child");
        assert_eq!(output.status.signal(), Some(signal), "{output:?}");
        assert!(output.stdout.is_empty(), "{output:?}");
        let after = contents(&node);
        // The slot that `long_run` has removed.
        before.insert("cilium_lb4_services_v2".to_owned(), after["cilium_lb4_services_v2"].clone());
        assert_eq!(after, before);
    }
}

#[test]
fn programs_that_are_replaced_meanwhile_are_asked_for_again() {
    let node = Node::new("v1.21-tcx");
    let done = AtomicBool::new(false);
    let eno1 = node.index("eno1");
    let services = Map::by_id(node.0.map("cilium_lb4_services_v2").expect("services").id());
    node.detach("devices/eno1/links/cil_from_netdev");
    thread::scope(|scope| {
        // One program after the other, with a moment without any in between.
        scope.spawn(|| {
            let churn = || {
                while !done.load(Ordering::Relaxed) {
                    let program = Code::tc("cil_from_netdev").uses(&services).returns(0).load();
                    let _link = program.tcx(eno1, TCX_INGRESS, true);
                    thread::sleep(Duration::from_millis(3));
                }
            };
            node.0.run_in(Ns::Node, churn).expect("the node");
        });
        for _ in 0..20 {
            let ran = node.vip(&[WEB, "--via", "eno1", "--simulate"]);
            match ran.code {
                // It could be told, or not again and again.
                Some(0 | 1) => assert!(ran.err.is_empty(), "{ran:?}"),
                Some(3) => assert!(
                    ran.err.is_empty() || ran.err.contains("was replaced meanwhile"),
                    "{ran:?}"
                ),
                _ => panic!("{ran:?}"),
            }
        }
        done.store(true, Ordering::Relaxed);
    });
}

/// A program that leaves a packet to the next one is not the last word.
#[test]
fn the_program_behind_one_that_says_next_is_run_too() {
    let node = Node::new("v1.21-tcx");
    let eno1 = node.index("eno1");
    let attach = || Code::tc("cil_from_netdev").returns(-1).load().tcx(eno1, TCX_INGRESS, true);
    let _link = node.0.run_in(Ns::Node, attach).expect("the node");
    let ran = node.vip(&[WEB, "--via", "eno1", "--simulate"]);
    assert_eq!(simulated(&ran, "443/TCP", ENO1)["outcome"], "dnat-before-neigh", "{ran:?}");
    assert!(node.connect(Ns::Client, "tcp", WEB, 443).ok);
}

/// Where the maps that were read are not all that the program uses, nobody knows whose entries a
/// run would touch.
#[test]
fn maps_that_were_not_read_are_left_alone() {
    let node = Node::new("v1.21-tcx");
    assert!(node.connect(Ns::Client, "tcp", WEB, 443).ok);
    node.0.unpin("cilium_lb4_backends_v3").expect("a pin");
    let before = contents(&node);
    let ran = node.vip(&[WEB, "--via", "eno1", "--source", "192.168.2.50", "--simulate"]);
    assert!(path(&ran, "443/TCP", ENO1)["simulated"].is_null(), "{ran:?}");
    let unsaid = ran.json()["simulation"]["not_simulated"].to_string();
    assert!(unsaid.contains("whose connections a run would touch cannot be told"), "{unsaid}");
    assert_eq!(contents(&node), before);
}

/// What a run that was killed has left of the usual client keeps nobody from the next.
#[test]
fn another_client_where_the_usual_one_is_in_use() {
    let node = Node::new("v1.21-tcx");
    let ran = node.vip(&[STICKY]);
    let id = ran.json()["programmed"]["frontends"][0]["reverse_nat"]["id"].as_u64();
    let session = Affinity {
        client: Client::Address("192.0.2.77".parse().expect("an address")),
        rev_nat_index: id.and_then(|id| u16::try_from(id).ok()).expect("an index"),
        last_used: 7,
        backend_id: 1,
    };
    let (key, value) = session.encode(layout("cilium_lb4_affinity")).expect("an entry");
    let sessions = node.0.map("cilium_lb4_affinity").expect("the sessions");
    sessions.update(&key, &value).expect("an update");
    let ran = node.vip(&[STICKY, "--via", "eno1", "--simulate"]);
    assert_eq!(simulated(&ran, "80/TCP", ENO1)["source"], "192.0.2.78");
}

#[test]
fn two_at_once_wait_for_each_other() {
    let node = Node::new("v1.21-tcx");
    let before = contents(&node);
    thread::scope(|scope| {
        let runs: Vec<_> =
            (0..4).map(|_| scope.spawn(|| node.vip(&[WEB, "--simulate=16"]))).collect();
        for run in runs {
            let ran = run.join().expect("a run");
            for device in [ENO1, WG0] {
                assert_eq!(path(&ran, "443/TCP", device)["grade"], "simulated", "{ran:?}");
            }
        }
    });
    assert_eq!(contents(&node), before);
}

/// A file whose runs are not what they say is judged without them, and says so.
#[test]
fn runs_that_were_edited_are_left_out() {
    let node = Node::new("v1.21-tcx");
    let folder = TempDir::new().expect("a folder");
    let file = folder.path().join("evidence.json");
    let save = file.to_str().expect("UTF-8");
    node.vip(&[WEB, "--via", "eno1", "--simulate", "--save", save]);
    let whole: Value = serde_json::from_slice(&fs::read(&file).expect("a file")).expect("JSON");
    let edit = |change: &dyn Fn(&mut Value), words: &str| {
        let mut edited = whole.clone();
        for run in edited["simulation"]["runs"].as_array_mut().expect("runs") {
            change(run);
        }
        fs::write(&file, run::sealed(edited)).expect("a file");
        let ran = finish(&mut inspect(["vip", WEB, "--from", save, "-o", "json"]));
        assert_eq!(path(&ran, "443/TCP", ENO1)["grade"], "programmed", "{words}: {ran:?}");
        let unsaid = ran.json()["not_measured"].to_string();
        assert!(unsaid.contains(words), "{words} in {unsaid}");
    };
    edit(&|run| run["steps"][0]["packet_in"] = "zz".into(), "its packet cannot be read");
    edit(&|run| run["steps"][0]["packet_in"] = "".into(), "its packet cannot be read");
    edit(&|run| run["protocol"] = 17.into(), "its packet is not the one that is told of");
    edit(&|run| run["destination"] = "1.2.3.4".into(), "its packet is not the one");
    edit(&|run| run["ethernet"] = false.into(), "its packet is not the one");
    edit(&|run| run["steps"][0]["program"] = 1.into(), "program 1 is not attached to eno1");
    edit(&|run| run["steps"] = Value::Array(Vec::new()), "no program had its turn");
    edit(&|run| run["device"] = "lo".into(), "is not lo");
    // Without the control there is no proof, and the claim of one is not met.
    let mut edited = whole.clone();
    let runs = edited["simulation"]["runs"].as_array_mut().expect("runs");
    runs.retain(|run| run["purpose"] == "client");
    fs::write(&file, run::sealed(edited)).expect("a file");
    let ran = finish(&mut inspect([
        "vip",
        WEB,
        "--from",
        save,
        "-o",
        "json",
        "--expect",
        "simulated@eno1",
    ]));
    assert_eq!(ran.code, Some(3), "{ran:?}");
    assert!(why(&ran, "443/TCP", ENO1).contains("without a control: no proof"), "{ran:?}");
    // A packet that went somewhere else than the maps say.
    let mut edited = whole.clone();
    for run in edited["simulation"]["runs"].as_array_mut().expect("runs") {
        if run["purpose"] == "client" {
            let out = run["steps"][0]["packet_out"].as_str().expect("bytes");
            let moved = format!("{}01020304{}", &out[..60], &out[68..]);
            run["steps"][0]["packet_out"] = moved.into();
        }
    }
    fs::write(&file, run::sealed(edited)).expect("a file");
    let ran = finish(&mut inspect(["vip", WEB, "--from", save, "-o", "json"]));
    assert_eq!(ran.seen("proof-conflict").len(), 1, "{ran:?}");
    assert!(why(&ran, "443/TCP", ENO1).contains("none of the frontend's backends"), "{ran:?}");
}

#[test]
fn the_claim_of_a_proof() {
    let node = Node::new("v1.21-tcx");
    let claim = ["--expect", "simulated"];
    assert_eq!(node.vip(&[&[WEB, "--simulate"], &claim[..]].concat()).code, Some(0));
    assert_eq!(node.vip(&[&[WEB], &claim[..]].concat()).code, Some(3));
    // wg0 takes none of these clients.
    let ran = node.vip(&[&[WEB, "--simulate", "--source", "192.168.2.99"], &claim[..]].concat());
    assert_eq!(ran.code, Some(3), "{ran:?}");
    let eno1 = ["--expect", "simulated@eno1"];
    let ran = node.vip(&[&[WEB, "--simulate", "--source", "192.168.2.99"], &eno1[..]].concat());
    assert_eq!(ran.code, Some(0), "{ran:?}");
}

#[test]
fn the_same_verdict_from_the_file() {
    let node = Node::new("v1.21-tcx");
    let folder = TempDir::new().expect("a folder");
    let file = folder.path().join("evidence.json");
    let save = file.to_str().expect("UTF-8");
    for vip in [WEB, "192.168.2.24", "192.168.2.29", "fd00:2::22"] {
        let live = node.vip(&[vip, "--simulate", "--save", save]);
        let again = finish(&mut inspect(["evidence", "judge", save, "-o", "json"]));
        assert_eq!(live.code, again.code);
        assert_eq!(live.json()["verdict"], again.json()["verdict"]);
        assert_eq!(live.json()["simulation"], again.json()["simulation"]);
        // Packets as they were, in and out.
        let evidence = Document::read(&file).expect("evidence").evidence;
        for run in evidence.simulation.expect("a simulation").runs {
            for step in &run.steps {
                assert!(step.packet_in.len() >= 80 && step.packet_out.len() >= 80, "{step:?}");
            }
        }
    }
    // Every form of the output tells of the control.
    for form in ["table", "markdown"] {
        let ran = finish(&mut inspect(["evidence", "judge", save, "-o", form]));
        assert!(ran.out.contains("[2001:db8:ffff::4d]:25565"), "{form}: {ran:?}");
        assert!(ran.out.contains("untouched"), "{form}: {ran:?}");
    }
}

#[test]
fn a_masked_client_is_in_no_packet_and_the_verdict_stays() {
    let node = Node::new("v1.21-tcx");
    let folder = TempDir::new().expect("a folder");
    let whole = folder.path().join("whole.json");
    let whole = whole.to_str().expect("UTF-8");
    for (vip, source) in [(WEB, "192.168.2.99"), ("192.168.2.29", "192.168.2.99")] {
        node.vip(&[vip, "--via", "eno1", "--source", source, "--simulate=2", "--save", whole]);
        let masked = folder.path().join("masked.json");
        let masked = masked.to_str().expect("UTF-8");
        let judge = |file: &str, more: &[&str]| {
            finish(&mut inspect([&["vip", vip, "--from", file, "-o", "json"], more].concat()))
        };
        let before = judge(whole, &["--mask", "clients", "--save", masked]);
        let text = fs::read_to_string(masked).expect("the masked file");
        for form in [source, "c0a80263"] {
            assert!(fs::read_to_string(whole).expect("the file").contains(form), "{form}");
            assert!(!text.contains(form), "{form} in the masked file");
        }
        let after = judge(masked, &[]);
        assert_eq!(before.code, after.code);
        let outcome = |ran: &Ran| ran.json()["verdict"]["paths"][0]["simulated"]["outcome"].clone();
        assert_eq!(outcome(&before), outcome(&after));
        assert!(outcome(&after).is_string());
    }
}

#[test]
fn what_cannot_be_asked_is_refused() {
    let node = Node::new("v1.21-tcx");
    for number in ["0", "10001", "-1", "many"] {
        node.inspect(&["vip", WEB, &format!("--simulate={number}")]).usage(&["--simulate"]);
    }
    for source in ["0.0.0.0", "127.0.0.1", "224.0.0.1", "255.255.255.255", "nobody"] {
        node.inspect(&["vip", WEB, "--simulate", "--source", source]).usage(&["--source"]);
    }
    node.inspect(&["vip", WEB, "--simulate", "--via", "eno1,"]).usage(&["--via"]);
    for source in [WEB, "192.168.2.10", "10.90.0.1"] {
        let ran = node.vip(&[WEB, "--simulate", "--source", source, "--via", "eno1"]);
        let unsaid = ran.json()["simulation"]["not_simulated"].to_string();
        assert!(unsaid.contains("no client's"), "{source}: {unsaid}");
    }
    let folder = TempDir::new().expect("a folder");
    let file = folder.path().join("evidence.json");
    let save = file.to_str().expect("UTF-8");
    node.vip(&[WEB, "--save", save]);
    node.inspect(&["vip", WEB, "--from", save, "--simulate"])
        .refused(2, &["--simulate needs the node"]);
    // Without privilege: no half answer.
    let stranger = Stranger::new();
    let bpffs = node.0.bpffs().to_str().expect("UTF-8");
    finish(&mut stranger.inspect(&["vip", WEB, "--bpffs", bpffs, "--simulate"]))
        .refused(3, &["CAP_"]);
}
