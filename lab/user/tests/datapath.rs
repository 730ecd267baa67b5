//! The stand-in datapath: attached as captured, and connections fare as they did with a real Cilium.
//!
//! Needs root, a cgroup2 mount, and iproute2's `ip` and `tc` to look at the result with other eyes;
//! fails without.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Write,
    net::IpAddr,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use aya::programs::{SchedClassifier, TcAttachType, loaded_programs};
use inspector_lab::{
    Agent, Capture, Datapath, Lab, Ns, cgroup,
    lab::exec_outside,
    probe::{self, Attempt, Outcome},
};
use serde_json::Value;

const CAPTURES: [&str; 10] = [
    "v1.13-clsact",
    "v1.18-clsact",
    "v1.18-l7lb",
    "v1.18-proto-any",
    "v1.19-tcx",
    "v1.18-sock-hostns-only",
    "v1.18-tcx",
    "v1.18-wg0-detached",
    "v1.21-l7lb",
    "v1.21-tcx",
];

/// Parts of the names of the maps that the stand-in has to do with.
const NEEDED: [&str; 11] = [
    "_affinity",
    "_backends_",
    "_calls_",
    "_l2_responder_",
    "_lxc",
    "_maglev",
    "_node_map_v2",
    "_reverse_sk",
    "_runtime_config",
    "_services_",
    "_source_range",
];

/// How long a connection may take, milliseconds: what is answered is answered at once, but the
/// machine may be busy, and a first packet lost costs a second.
const PATIENCE: &str = "2500";

/// A lab with the datapath of a capture. Of its maps, those that the stand-in reads: without the
/// large tables of connections it is made in half the time.
fn with_agent(capture: &str, agent: Agent) -> Lab {
    let all = Capture::project(capture).expect("the capture");
    let names = all.maps().map(|map| map.name.clone());
    let needed: Vec<String> =
        names.filter(|name| NEEDED.iter().any(|part| name.contains(part))).collect();
    let lab = Lab::builder().captured(all).only(needed).agent(agent).datapath(true);
    lab.up().expect("a lab")
}

/// The same with a living agent.
fn datapath(capture: &str) -> Lab {
    with_agent(capture, Agent::Alive)
}

/// Output of a command in the lab.
fn output(lab: &Lab, place: Ns, command: &[&str]) -> String {
    let mut process = Command::new(command[0]);
    process.args(&command[1..]);
    let output = lab.exec_in(place, &mut process).expect("the place").output().expect(command[0]);
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// Makes connections, all from the place of the first.
fn connect(lab: &Lab, attempts: &[Attempt]) -> Vec<Outcome> {
    let source = attempts[0].source().expect("a place");
    let mut command = Command::new(env!("CARGO_BIN_EXE_inspector-lab"));
    command.args(["connect", "--patience", PATIENCE]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    if source.in_cgroup {
        lab.exec_in(source.place, &mut command).expect("the place");
    } else {
        exec_outside(lab.record(), source.place, &mut command).expect("the place");
    }
    let mut child = command.spawn().expect("inspector-lab");
    let text = serde_json::to_vec(attempts).expect("JSON");
    child.stdin.take().expect("stdin").write_all(&text).expect("written");
    let output = child.wait_with_output().expect("its output");
    assert!(output.status.success());
    serde_json::from_slice(&output.stdout).expect("outcomes")
}

fn attempt(from: &str, proto: &str, dst: &str, port: u16) -> Attempt {
    let dst = dst.parse().expect("an address");
    Attempt { from: from.into(), proto: proto.into(), dst, port }
}

/// Makes one connection.
fn connect_one(lab: &Lab, from: &str, proto: &str, dst: &str, port: u16) -> Outcome {
    connect(lab, &[attempt(from, proto, dst, port)]).remove(0)
}

const NODE: &str = "the node itself (socket LB, same cgroup)";

/// Connections that are *told* something else than the captured ones were, though both fail: the
/// client of the captures of 1.18 and 1.21 had no route to cluster addresses; the lab's client has
/// (as the one of 1.13), and the node drops what is not to be reached from outside.
fn is_told_otherwise(attempt: &Attempt, captured: Option<&str>) -> bool {
    attempt.from == "client (v4)"
        && attempt.dst == IpAddr::from([10, 96, 0, 1])
        && captured == Some("OSError [Errno 101] Network is unreachable")
}

/// Connections that are a matter of chance, in the capture and here: for connections that begin on
/// the node, 192.168.2.31 has one backend here and one on another node, which nobody has.
fn is_by_chance(capture: &str, attempt: &Attempt) -> bool {
    capture == "v1.13-clsact"
        && attempt.dst == IpAddr::from([192, 168, 2, 31])
        && attempt.source().is_some_and(|source| source.in_cgroup)
}

/// Runs the lab's `probe` and compares with what the capture's connections met with.
fn reproduces_the_probes(name: &str, expected: usize) {
    let lab = datapath(name);
    let mut command = Command::new(env!("CARGO_BIN_EXE_inspector-lab"));
    let output = command
        .args(["probe", "--name", lab.name(), "--patience", PATIENCE])
        .output()
        .expect("inspector-lab");
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    let found: Vec<Outcome> = serde_json::from_slice(&output.stdout).expect("outcomes");
    let captured =
        probe::outcomes(&Capture::project(name).expect("the capture")).expect("its probes");
    assert_eq!(captured.len(), expected, "{name}");
    assert_eq!(found.len(), expected, "{name}");

    let mut differ = Vec::new();
    for (captured, found) in captured.iter().zip(&found) {
        assert_eq!(captured.attempt, found.attempt, "{name}");
        if is_by_chance(name, &found.attempt) {
            // Once in four million times it is the same 24 times.
            let many = connect(&lab, &vec![found.attempt.clone(); 24]);
            let ok = many.iter().filter(|outcome| outcome.ok).count();
            assert!((1..24).contains(&ok), "{name}: {ok} of 24: {:?}", found.attempt);
            continue;
        }
        let same = if captured.ok {
            // Which of several pods is a matter of chance; pod or plain host is not.
            let is_pod = |outcome: &Outcome| {
                outcome.answered_by.as_deref().map(|who| who.starts_with("pod"))
            };
            found.ok
                && is_pod(captured) == is_pod(found)
                && captured.backend_port == found.backend_port
                && same_peer(captured, found)
        } else {
            !found.ok
                && (captured.error == found.error
                    || is_told_otherwise(&found.attempt, captured.error.as_deref()))
        };
        if !same {
            differ.push(format!("captured {captured:?}\n     lab {found:?}"));
        }
    }
    assert!(
        differ.is_empty(),
        "{name}: {} of {expected} differ:\n{}",
        differ.len(),
        differ.join("\n")
    );
}

/// Whether the backend saw the same client, ports apart.
fn same_peer(captured: &Outcome, found: &Outcome) -> bool {
    /// What a pod sees of itself when it reaches itself through a service.
    const SELF: &str = "169.254.42.1";
    let host = |outcome: &Outcome| {
        let peer = outcome.peer_seen_by_backend.as_ref()?;
        let host = peer.rsplit_once(':')?.0.trim_matches(['[', ']']);
        Some(host.trim_start_matches("::ffff:").to_owned())
    };
    let (captured_host, found_host) = (host(captured), host(found));
    let is_self = |host: &Option<String>| host.as_deref() == Some(SELF);
    captured_host == found_host
        // A matter of chance too: the pod's own address where the other pod is chosen.
        || (found.attempt.from.starts_with("pod") && (is_self(&captured_host) || is_self(&found_host)))
}

#[test]
fn probes_of_v1_13_clsact() {
    reproduces_the_probes("v1.13-clsact", 120);
}

#[test]
fn probes_of_v1_18_clsact() {
    reproduces_the_probes("v1.18-clsact", 73);
}

#[test]
fn probes_of_v1_18_l7lb() {
    reproduces_the_probes("v1.18-l7lb", 73);
}

#[test]
fn probes_of_v1_18_proto_any() {
    reproduces_the_probes("v1.18-proto-any", 73);
}

#[test]
fn probes_of_v1_18_sock_hostns_only() {
    reproduces_the_probes("v1.18-sock-hostns-only", 73);
}

#[test]
fn probes_of_v1_18_tcx() {
    reproduces_the_probes("v1.18-tcx", 73);
}

#[test]
fn probes_of_v1_18_wg0_detached() {
    reproduces_the_probes("v1.18-wg0-detached", 73);
}

#[test]
fn probes_of_v1_21_l7lb() {
    reproduces_the_probes("v1.21-l7lb", 146);
}

#[test]
fn probes_of_v1_21_tcx() {
    reproduces_the_probes("v1.21-tcx", 146);
}

/// Device, direction and program of everything that the kernel says is in a tcx chain.
fn tcx(lab: &Lab, devices: &[String]) -> BTreeSet<(String, &'static str, String)> {
    lab.run_in(Ns::Node, || {
        let mut found = BTreeSet::new();
        for device in devices {
            for (direction, kind) in
                [("ingress", TcAttachType::Ingress), ("egress", TcAttachType::Egress)]
            {
                let (_, programs) =
                    SchedClassifier::query_tcx(device.as_str(), kind).expect("a tcx query");
                for program in programs {
                    let name = program.name_as_str().expect("a name").to_owned();
                    assert!(found.insert((device.clone(), direction, name)), "twice: {device}");
                }
            }
        }
        found
    })
    .expect("the node")
}

/// The same of classic filters, with the filters' names; and that each is as Cilium's.
fn clsact(lab: &Lab, devices: &[String]) -> BTreeSet<(String, &'static str, String)> {
    let mut found = BTreeSet::new();
    for device in devices {
        for direction in ["ingress", "egress"] {
            let text =
                output(lab, Ns::Node, &["tc", "-j", "filter", "show", "dev", device, direction]);
            let filters: Vec<Value> = serde_json::from_str(&text).expect("JSON");
            for filter in filters.iter().filter(|filter| filter["options"]["bpf_name"].is_string())
            {
                assert_eq!(filter["kind"], "bpf", "{filter}");
                assert_eq!(filter["pref"], 1, "{filter}");
                assert_eq!(filter["protocol"], "all", "{filter}");
                assert_eq!(filter["options"]["handle"], "0x1", "{filter}");
                assert_eq!(filter["options"]["direct-action"], true, "{filter}");
                let name = filter["options"]["bpf_name"].as_str().expect("a name").to_owned();
                assert!(found.insert((device.clone(), direction, name)), "twice: {device}");
            }
        }
    }
    found
}

#[test]
fn programs_are_attached_as_captured() {
    for name in CAPTURES {
        let lab = datapath(name);
        let capture = Capture::project(name).expect("the capture");
        let net: Value = serde_json::from_str(&capture.text("bpftool-net-show.json").expect("it"))
            .expect("JSON");
        let addresses: Value =
            serde_json::from_str(&capture.text("ip-addr.json").expect("it")).expect("JSON");
        let devices: Vec<String> = addresses
            .as_array()
            .expect("devices")
            .iter()
            .map(|device| device["ifname"].as_str().expect("a name").to_owned())
            .collect();
        let mut captured = (BTreeSet::new(), BTreeSet::new());
        for tc in net[0]["tc"].as_array().expect("programs") {
            let (kind, direction) =
                tc["kind"].as_str().expect("a kind").split_once('/').expect("/");
            let direction = if direction == "ingress" { "ingress" } else { "egress" };
            let device = tc["devname"].as_str().expect("a device").to_owned();
            let mut program = tc["name"].as_str().expect("a name").to_owned();
            match kind {
                "tcx" => {
                    // All that the kernel keeps.
                    program.truncate(15);
                    captured.0.insert((device, direction, program));
                }
                _ => {
                    captured.1.insert((device, direction, program));
                }
            }
        }
        assert_eq!(
            captured.0.len() + captured.1.len(),
            if name == "v1.18-wg0-detached" { 8 } else { 9 }
        );
        assert_eq!(tcx(&lab, &devices), captured.0, "{name}");
        assert_eq!(clsact(&lab, &devices), captured.1, "{name}");

        // Pins of links, as `find` printed them; of Cilium 1.13 those of cgroup programs.
        let pins = |text: &str, root: &str| -> BTreeSet<String> {
            text.lines()
                .filter_map(|line| Path::new(line).strip_prefix(root).ok()?.to_str())
                .filter(|line| {
                    let is_link = line.contains("/links/") && line.contains("/cil_");
                    is_link || line.starts_with("tc/globals/cilium_cgroups_")
                })
                .map(str::to_owned)
                .collect()
        };
        let captured = pins(&capture.text("find-bpffs.txt").expect("it"), "/sys/fs/bpf");
        assert!(captured.len() >= 10, "{name}: {captured:?}");
        let bpffs = lab.bpffs().to_str().expect("UTF-8");
        let found = Command::new("find").arg(bpffs).output().expect("find").stdout;
        assert_eq!(pins(&String::from_utf8(found).expect("UTF-8"), bpffs), captured, "{name}");
    }
}

/// Ids of the maps that a program refers to.
fn maps_of(id: u32) -> BTreeSet<u32> {
    let program = loaded_programs()
        .filter_map(Result::ok)
        .find(|program| program.id() == id)
        .expect("the program");
    program.map_ids().expect("its maps").expect("a kernel that tells").into_iter().collect()
}

/// Ids of the programs that stand in a program array of the lab.
fn called(lab: &Lab, array: &str) -> BTreeSet<u32> {
    let entries = lab.map(array).expect(array).entries().expect("its entries");
    entries
        .iter()
        .map(|entry| u32::from_ne_bytes(entry.value[..4].try_into().expect("an id")))
        .collect()
}

#[test]
fn services_are_reached_through_a_tail_call() {
    let lab = datapath("v1.18-tcx");
    let services = lab.map("cilium_lb4_services_v2").expect("it").id();
    let attached = lab
        .run_in(Ns::Node, || {
            let (_, programs) =
                SchedClassifier::query_tcx("eno1", TcAttachType::Ingress).expect("a tcx query");
            programs[0].id()
        })
        .expect("the node");
    let calls = lab.map("cilium_calls_netdev_00002").expect("it").id();
    let maps = maps_of(attached);
    assert!(maps.contains(&calls) && !maps.contains(&services), "{maps:?}");
    let programs = called(&lab, "cilium_calls_netdev_00002");
    assert_eq!(programs.len(), 2, "{programs:?}");
    assert!(programs.into_iter().any(|id| maps_of(id).contains(&services)));
}

/// Whether a program that one of the pods' devices calls reaches the services map.
fn pods_balance(capture: &str) -> bool {
    let lab = datapath(capture);
    let services = lab.map("cilium_lb4_services_v2").expect("it").id();
    let mut programs = BTreeSet::new();
    for entry in fs::read_dir(lab.bpffs().join("cilium/endpoints")).expect("endpoints") {
        let id = entry.expect("an endpoint").file_name().into_string().expect("a number");
        let id: u16 = id.parse().expect("a number");
        programs.extend(called(&lab, &format!("cilium_calls_{id:05}")));
    }
    assert_eq!(programs.len(), 4);
    programs.into_iter().any(|id| maps_of(id).contains(&services))
}

#[test]
fn pods_devices_reach_the_services_where_sockets_do_not() {
    assert!(pods_balance("v1.18-l7lb"));
    // Endpoints are captured in all of them, pins in those with tcx.
    assert!(pods_balance("v1.18-sock-hostns-only"));
    assert!(!pods_balance("v1.18-tcx"));
}

/// What the node knows of an address on `eno1`: the state that `ip neigh` shows, if anything.
fn neighbour(lab: &Lab, address: &str) -> Option<String> {
    let text = output(lab, Ns::Node, &["ip", "-j", "neigh", "show", address, "dev", "eno1"]);
    let entries: Vec<Value> = serde_json::from_str(&text).expect("JSON");
    Some(entries.first()?["state"][0].as_str()?.to_owned())
}

#[test]
fn untranslated_packets_make_the_node_ask_for_the_vip() {
    // With the programs, nobody asks.
    let lab = datapath("v1.18-tcx");
    assert!(connect_one(&lab, "vpn", "tcp", "192.168.2.20", 443).ok);
    assert_eq!(neighbour(&lab, "192.168.2.20"), None);
    drop(lab);

    let lab = datapath("v1.18-wg0-detached");
    let outcome = connect_one(&lab, "vpn", "tcp", "192.168.2.20", 443);
    assert!(!outcome.ok, "{outcome:?}");
    let state = neighbour(&lab, "192.168.2.20").expect("an entry");
    assert!(["INCOMPLETE", "FAILED"].contains(&&state[..]), "{state}");
    // The LAN is served all the same.
    assert!(connect_one(&lab, "client", "tcp", "192.168.2.20", 443).ok);
}

#[test]
fn the_responder_answers_while_the_agent_lives() {
    // The VIP, network byte order, and the index of eno1, host byte order.
    let key = [192, 168, 2, 20, 2, 0, 0, 0];
    let answers = |lab: &Lab| {
        let value = lab.map("cilium_l2_responder_v4").expect("it").lookup(&key).expect("it");
        u64::from_ne_bytes(value.expect("an entry").try_into().expect("eight bytes"))
    };
    let lab = datapath("v1.18-tcx");
    let before = answers(&lab);
    assert!(connect_one(&lab, "client", "tcp", "192.168.2.20", 443).ok);
    assert!(answers(&lab) > before);
    drop(lab);

    // Dead: translation goes on, as the way through wg0 shows, which asks nobody.
    let lab = with_agent("v1.18-tcx", Agent::Dead);
    let before = answers(&lab);
    assert!(!connect_one(&lab, "client", "tcp", "192.168.2.20", 443).ok);
    assert!(connect_one(&lab, "vpn", "tcp", "192.168.2.20", 443).ok);
    assert_eq!(answers(&lab), before);
}

#[test]
fn datagrams_are_translated_both_ways_at_the_socket() {
    let lab = datapath("v1.18-tcx");
    // Not connected: sendmsg there, recvmsg back, and the reply seems to come from the VIP.
    let outcome = connect_one(&lab, NODE, "udp", "192.168.2.22", 25565);
    assert!(outcome.ok, "{outcome:?}");
    assert_eq!(outcome.answered_by.as_deref(), Some("pod1"));
    // Outside of the cgroup nothing translates.
    let pod = "pod2, process outside that cgroup";
    assert!(!connect_one(&lab, pod, "udp", "192.168.2.22", 25565).ok);
}

#[test]
fn a_changed_map_changes_what_happens() {
    let lab = datapath("v1.18-tcx");
    let services = lab.map("cilium_lb4_services_v2").expect("it");
    let key = frontend(0);
    let mut value = services.lookup(&key).expect("it").expect("the frontend");
    let original = value.clone();
    let reaches = |from: &str| connect_one(&lab, from, "tcp", "192.168.2.20", 443);
    assert!(reaches("vpn").ok);
    // Not routable (bit 6 of the flags): dropped from outside, served at the socket.
    value[8] &= !0x40;
    services.update(&key, &value).expect("written");
    assert!(!reaches("vpn").ok);
    assert!(reaches(NODE).ok);
    // No backends.
    value.clone_from(&original);
    value[4] = 0;
    services.update(&key, &value).expect("written");
    let told = |outcome: Outcome| outcome.error.unwrap_or_default();
    assert_eq!(told(reaches("client")), "ConnectionRefusedError [Errno 111] Connection refused");
    assert_eq!(told(reaches(NODE)), "PermissionError [Errno 1] Operation not permitted");
    services.update(&key, &original).expect("written");
    assert!(reaches("vpn").ok);
}

/// Key of 192.168.2.20:443/TCP in the services map, external scope.
fn frontend(slot: u8) -> [u8; 12] {
    [192, 168, 2, 20, 1, 187, slot, 0, 6, 0, 0, 0]
}

/// The faults of the captures' faults folders, made by hand: what then happened there.
#[test]
fn faults_show_as_they_did() {
    let reaches = |lab: &Lab| connect_one(lab, "vpn", "tcp", "192.168.2.20", 443).ok;

    // A backend that is gone: the connections that choose it fail.
    let lab = datapath("v1.18-tcx");
    let slot = lab.map("cilium_lb4_services_v2").expect("it").lookup(&frontend(2)).expect("it");
    let backend = &slot.expect("slot 2")[..4];
    lab.map("cilium_lb4_backends_v3").expect("it").delete(backend).expect("deleted");
    let many = connect(&lab, &vec![attempt("vpn", "tcp", "192.168.2.20", 443); 24]);
    let ok = many.iter().filter(|outcome| outcome.ok).count();
    assert!((1..24).contains(&ok), "{ok} of 24");
    assert_eq!(neighbour(&lab, "192.168.2.20"), None);

    // A frontend that is gone: to the stack, which asks for the VIP.
    lab.map("cilium_lb4_services_v2").expect("it").delete(&frontend(0)).expect("deleted");
    assert!(!reaches(&lab));
    assert!(neighbour(&lab, "192.168.2.20").is_some());
    drop(lab);

    // The same with a wildcard entry: dropped, and nobody asks; without it, as above.
    let lab = datapath("v1.21-tcx");
    let services = lab.map("cilium_lb4_services_v2").expect("it");
    assert!(reaches(&lab));
    services.delete(&frontend(0)).expect("deleted");
    assert!(!reaches(&lab));
    assert_eq!(neighbour(&lab, "192.168.2.20"), None);
    services.delete(&[192, 168, 2, 20, 0, 0, 0, 0, 0, 0, 0, 0]).expect("deleted");
    assert!(!reaches(&lab));
    assert!(neighbour(&lab, "192.168.2.20").is_some());
}

#[test]
fn a_removed_link_ends_the_translation() {
    let lab = datapath("v1.18-tcx");
    assert!(connect_one(&lab, "vpn", "tcp", "192.168.2.20", 443).ok);
    let pin = lab.bpffs().join("cilium/devices/wg0/links/cil_from_netdev");
    fs::remove_file(&pin).expect("the pin");
    // The kernel lets go of the program a moment later.
    let start = Instant::now();
    while !tcx(&lab, &["wg0".to_owned()]).iter().all(|(_, direction, _)| *direction == "egress") {
        assert!(start.elapsed() < Duration::from_secs(5), "it is still attached");
        thread::sleep(Duration::from_millis(10));
    }
    assert!(!connect_one(&lab, "vpn", "tcp", "192.168.2.20", 443).ok);
    assert!(neighbour(&lab, "192.168.2.20").is_some());
}

#[test]
fn nothing_is_left() {
    for capture in ["v1.13-clsact", "v1.21-tcx"] {
        let lab = Lab::builder().project(capture).datapath(true).up().expect("a lab");
        let name = lab.name().to_owned();
        let bpffs = lab.bpffs().to_owned();
        let cgroup = cgroup::path(&name).expect("mounts").expect("a cgroup2");
        assert_eq!(lab.record().cgroup.as_deref(), Some(&*cgroup));
        // The pods' servers, as pods are.
        let inside = fs::read_to_string(cgroup.join("cgroup.procs")).expect("a cgroup");
        assert_eq!(inside.lines().count(), 2, "{inside}");
        let services = lab.map("cilium_lb4_services_v2").expect("it").id();
        let using = || {
            let programs = loaded_programs().filter_map(Result::ok);
            let uses = |maps: Option<Vec<u32>>| maps.is_some_and(|maps| maps.contains(&services));
            programs.filter(|program| program.map_ids().is_ok_and(uses)).count()
        };
        assert!(using() >= 4, "{capture}");
        // A process that is in the cgroup and in no namespace of the lab.
        let mut idle = Command::new("sleep");
        let mut idle = idle.arg("60").spawn().expect("sleep");
        fs::write(cgroup.join("cgroup.procs"), idle.id().to_string()).expect("moved");

        lab.down().expect("removed");
        assert!(!cgroup.exists(), "{capture}");
        assert!(!bpffs.exists(), "{capture}");
        assert!(!idle.wait().expect("ended").success());
        let left = fs::read_dir("/run/netns").map_or(0, |entries| {
            let name = format!("ilab-{name}-");
            entries
                .filter(|entry| {
                    let entry = entry.as_ref().expect("an entry").file_name();
                    entry.to_string_lossy().starts_with(&name)
                })
                .count()
        });
        assert_eq!(left, 0, "{capture}");
        let start = Instant::now();
        while using() > 0 {
            assert!(start.elapsed() < Duration::from_secs(5), "{capture}: programs are left");
            thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn a_capture_without_programs_has_no_datapath() {
    let capture = Capture::project("services-10k").expect("the capture");
    assert_eq!(Datapath::of(&capture).expect("readable"), None);
    // A state of a faults folder has its own say, before the capture that completes it.
    let base = || Capture::project("v1.21-tcx").expect("the capture");
    let state = |name: &str| {
        let state = Capture::project(&format!("v1.21-faults/{name}")).expect("the state");
        Datapath::of(&state.over(base())).expect("readable").expect("a datapath")
    };
    let on_wg0 = |datapath: &Datapath| {
        let on = datapath.devices().iter().filter(|on| on.index == 3);
        on.map(|on| (on.program.clone(), on.egress)).collect::<BTreeMap<_, _>>()
    };
    let whole = on_wg0(&state("00-baseline"));
    assert_eq!(whole.len(), 2, "{whole:?}");
    assert!(!on_wg0(&state("13-wg0-detached")).contains_key("cil_from_netdev"));
}
