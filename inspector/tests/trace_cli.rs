//! `inspect vip --trace` and `inspect trace`: real connections through a lab's node, watched from
//! the command line, and the verdict on them. Needs root.

mod net;
mod node;
mod run;

use std::{
    ffi::OsStr,
    fs,
    io::{BufRead, BufReader},
    os::unix::process::ExitStatusExt,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use inspector_lab::{Ns, lab::exec_outside};
use node::Node;
use run::{Ran, inspect, run, sealed};
use serde_json::Value;
use tempfile::TempDir;

/// The newest capture whose programs this kernel can attach: before Linux 6.6 there is no tcx.
fn newest() -> &'static str {
    if net::release() >= (6, 6) { "v1.21-tcx" } else { "v1.18-clsact" }
}

/// The program at work on a node, whose hooks are live.
struct Watching {
    child: Child,
    _folder: TempDir,
}

impl Watching {
    /// Starts it in the node, by a process without socket load balancing, and waits until it says
    /// that it is ready.
    fn start(node: &Node, arguments: &[&str]) -> Self {
        node.0.set_agent_alive().expect("a sign of life");
        let folder = TempDir::new().expect("a folder");
        let ready = folder.path().join("ready");
        let spawn = || {
            let (first, rest) = arguments.split_at(1);
            let ready = [OsStr::new("--ready-file"), ready.as_os_str()];
            let [first, rest] = [first, rest].map(|part| part.iter().map(OsStr::new));
            let mut command = inspect(first.chain(ready).chain(rest));
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
            let command = exec_outside(node.0.record(), Ns::Node, &mut command).expect("the node");
            command.spawn().expect("the program runs")
        };
        let mut child = node.0.run_alone(None, spawn).expect("mounts of its own");
        let deadline = Instant::now() + Duration::from_secs(30);
        while !ready.exists() {
            if child.try_wait().expect("the program").is_some() {
                let output = child.wait_with_output().expect("its output");
                panic!("{arguments:?} ended before it was ready: {output:?}");
            }
            assert!(Instant::now() < deadline, "{arguments:?} is not ready after 30 s");
            thread::sleep(Duration::from_millis(5));
        }
        Self { child, _folder: folder }
    }

    fn signal(&self, signal: i32) {
        let id = i32::try_from(self.child.id()).expect("a number");
        // SAFETY: the call takes numbers; the child has not been waited for.
        assert_eq!(unsafe { libc::kill(id, signal) }, 0);
    }

    /// What it says in the end.
    fn ran(self) -> Ran {
        let output = self.child.wait_with_output().expect("its output");
        let ran = Ran {
            code: output.status.code(),
            out: String::from_utf8(output.stdout).expect("UTF-8"),
            err: String::from_utf8(output.stderr).expect("UTF-8"),
        };
        assert!(!ran.err.contains("panicked") && output.status.signal().is_none(), "{ran:?}");
        ran
    }
}

/// Asks about a VIP with these arguments, and connects meanwhile.
fn traced(node: &Node, arguments: &[&str], traffic: impl FnOnce()) -> Ran {
    let watching =
        Watching::start(node, &[&["vip", "--trace=60s", "-o", "json"], arguments].concat());
    traffic();
    watching.ran()
}

/// Outcome, served and proof of a path.
#[track_caller]
fn fate(ran: &Ran, port: &str, path: &str) -> (String, String, String) {
    let path = node::path(ran, port, path);
    let text = |member: &str| path[member].as_str().expect("text").to_owned();
    (text("outcome"), text("served"), text("grade"))
}

fn is(outcome: &str, served: &str, grade: &str) -> (String, String, String) {
    (outcome.to_owned(), served.to_owned(), grade.to_owned())
}

/// What the connections on a path came to.
#[track_caller]
fn conclusions(ran: &Ran, path: &str) -> Vec<Value> {
    let json = ran.json();
    let all = json["observed"]["conclusions"].as_array().expect("conclusions");
    let named = |one: &&Value| {
        let device = one["path"]["device"].as_str().unwrap_or_default();
        match one["path"]["kind"].as_str().expect("a kind of path") {
            "forwarded" => path == format!("forwarded via {device}"),
            "socket-on-host" => path == "socket on host",
            other => path == other,
        }
    };
    all.iter().filter(named).cloned().collect()
}

/// The one connection on a path.
#[track_caller]
fn conclusion(ran: &Ran, path: &str) -> Value {
    let found = conclusions(ran, path);
    assert_eq!(found.len(), 1, "{path}: {ran:?}");
    found[0].clone()
}

fn connect(node: &Node, from: Ns, protocol: &str, vip: &str, port: u16, ok: bool) {
    let outcome = node.connect(from, protocol, vip, port);
    assert_eq!(outcome.ok, ok, "{outcome:?}");
}

const PATHS: [(Ns, &str); 2] = [(Ns::Client, "forwarded via eno1"), (Ns::Vpn, "forwarded via wg0")];

/// Two connections of each client, which are served: the proof, and the same from the file.
fn is_proved(capture: &str, vip: &str) {
    let node = Node::new(capture);
    let folder = TempDir::new().expect("a folder");
    let file = folder.path().join("evidence.json");
    let file = file.to_str().expect("UTF-8");
    let ran = traced(&node, &[vip, "--count", "4", "--save", file], || {
        for _ in 0..2 {
            for (from, _) in PATHS {
                connect(&node, from, "tcp", vip, 443, true);
            }
        }
    });
    assert_eq!(ran.code, Some(0), "{ran:?}");
    for (_, path) in PATHS {
        assert_eq!(fate(&ran, "443/TCP", path), is("dnat-before-neigh", "yes", "observed"));
        let why = node::why(&ran, "443/TCP", path);
        let words = "observed: 2 of 2 journeys translated before any neighbour look-up, 2 answered";
        assert!(why.contains(words), "{why}");
        for one in conclusions(&ran, path) {
            assert_eq!(one["vip_lookups"]["kind"], "none", "{one}");
            assert_eq!(one["answer"]["as_vip"], true, "{one}");
        }
        assert_eq!(conclusions(&ran, path).len(), 2);
    }
    let observed = &ran.json()["observed"];
    assert_eq!((&observed["journeys"], &observed["stopped"]), (&4.into(), &"count".into()));
    // Nothing came from elsewhere: what is programmed stands.
    assert_eq!(node::path(&ran, "443/TCP", "socket on host")["grade"], "programmed");

    let again = run(&mut inspect(["evidence", "judge", file, "-o", "json"]));
    assert_eq!(again.code, Some(0), "{again:?}");
    assert_eq!(again.json()["verdict"], ran.json()["verdict"]);
    assert_eq!(again.json()["observed"], ran.json()["observed"]);
    // The counter-test: without what is known of the hooks, nothing that was not seen is "none".
    let mut content: Value =
        serde_json::from_slice(&fs::read(file).expect("the evidence")).expect("JSON");
    for tier in content["trace"]["watched"]["tiers"].as_array_mut().expect("tiers") {
        tier["hooks"] = Value::Array(Vec::new());
    }
    content.as_object_mut().expect("an object").remove("verdict");
    fs::write(file, sealed(content)).expect("a file");
    let blind = run(&mut inspect(["evidence", "judge", file, "-o", "json"]));
    let why = node::why(&blind, "443/TCP", PATHS[0].1);
    assert!(!why.contains("before any neighbour look-up"), "{why}");
}

#[test]
fn a_served_vip_is_proved_on_both_paths() {
    is_proved("v1.21-tcx", "192.168.2.20");
}

#[test]
fn a_served_ipv6_vip_is_proved_on_both_paths() {
    is_proved("v1.21-tcx", "fd00:2::20");
}

#[test]
fn a_served_vip_is_proved_in_front_of_clsact_filters() {
    is_proved("v1.18-clsact", "192.168.2.20");
}

#[test]
fn a_served_ipv6_vip_is_proved_in_front_of_clsact_filters() {
    is_proved("v1.18-clsact", "fd00:2::20");
}

#[test]
fn without_ciliums_program_the_look_up_of_the_vip_is_seen() {
    for vip in ["192.168.2.20", "fd00:2::20"] {
        let node = Node::new("v1.18-wg0-detached");
        let ran = traced(&node, &[vip, "--count", "2"], || {
            connect(&node, Ns::Client, "tcp", vip, 443, true);
            connect(&node, Ns::Vpn, "tcp", vip, 443, false);
        });
        assert_eq!(ran.code, Some(1), "{ran:?}");
        assert_eq!(
            fate(&ran, "443/TCP", "forwarded via eno1"),
            is("dnat-before-neigh", "yes", "observed")
        );
        assert_eq!(
            fate(&ran, "443/TCP", "forwarded via wg0"),
            is("untranslated", "no", "observed"),
            "{ran:?}"
        );
        let one = conclusion(&ran, "forwarded via wg0");
        let lookups = one["lookups"].as_array().expect("look-ups");
        let of_vip = |lookup: &&Value| lookup["is_vip"] == true && lookup["device"] == "eno1";
        assert!(lookups.iter().any(|lookup| of_vip(&lookup)), "{one}");
        assert_eq!(one["vip_lookups"]["kind"], "seen", "{one}");
        assert!(one.get("translation").is_none(), "{one}");
    }
}

#[test]
fn a_frontend_without_backend_is_seen_to_reject() {
    let node = Node::new(newest());
    let ran = traced(&node, &["192.168.2.29", "--count", "1"], || {
        connect(&node, Ns::Client, "tcp", "192.168.2.29", 80, false);
    });
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert_eq!(fate(&ran, "80/TCP", PATHS[0].1), is("no-backend", "no", "observed"));
    assert_eq!(conclusion(&ran, PATHS[0].1)["answer"]["kind"], "unreachable");
}

#[test]
fn a_backend_that_refuses_is_told_from_a_datapath_that_does_not_work() {
    let node = Node::new("v1.21-tcx");
    node.let_backends_refuse();
    let ran = traced(&node, &["192.168.2.20", "--count", "1"], || {
        connect(&node, Ns::Client, "tcp", "192.168.2.20", 443, false);
    });
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert_eq!(fate(&ran, "443/TCP", PATHS[0].1), is("dnat-before-neigh", "no", "observed"));
    let seen = ran.seen("backend-refuses");
    assert!(seen.len() == 1 && seen[0].starts_with("1 of 1 connections"), "{seen:?}");
    assert_eq!(conclusion(&ran, PATHS[0].1)["answer"]["kind"], "refused");
}

#[test]
fn a_backend_that_says_nothing_is_not_served_whatever_is_programmed() {
    let node = Node::new(newest());
    for pod in [1, 2] {
        node.ip(Ns::Pod(pod), "route add blackhole 192.168.2.50");
    }
    let ran = traced(&node, &["192.168.2.20", "--count", "1"], || {
        connect(&node, Ns::Client, "tcp", "192.168.2.20", 443, false);
    });
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let path = node::path(&ran, "443/TCP", PATHS[0].1);
    assert_eq!(path["served"], "no", "{path}");
    let seen = ran.seen("backend-silent");
    assert!(seen.len() == 1 && seen[0].contains("got no answer"), "{seen:?}");
    assert_eq!(conclusion(&ran, PATHS[0].1)["answer"]["kind"], "silent");
}

#[test]
fn a_silent_backend_elsewhere_was_sent_the_packet() {
    let node = Node::new(newest());
    node.ip(Ns::Host60, "route add blackhole 192.168.2.10/32");
    let ran = traced(&node, &["192.168.2.32", "--count", "1"], || {
        connect(&node, Ns::Client, "tcp", "192.168.2.32", 80, false);
    });
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert_eq!(fate(&ran, "80/TCP", PATHS[0].1), is("dnat-before-neigh", "no", "observed"));
    let seen = ran.seen("backend-silent");
    assert!(seen.len() == 1 && seen[0].contains("192.168.2.60:8080"), "{seen:?}");
}

#[test]
fn a_remote_backend_has_its_next_hop_looked_up_and_the_vip_never() {
    let node = Node::new(newest());
    node.ip(Ns::Node, "neigh flush to 192.168.2.60");
    let ran = traced(&node, &["192.168.2.32", "--count", "2"], || {
        for (from, _) in PATHS {
            connect(&node, from, "tcp", "192.168.2.32", 80, true);
        }
    });
    assert_eq!(ran.code, Some(0), "{ran:?}");
    for (_, path) in PATHS {
        assert_eq!(
            fate(&ran, "80/TCP", path),
            is("dnat-before-neigh", "yes", "observed"),
            "{ran:?}"
        );
        let one = conclusion(&ran, path);
        assert_eq!(one["translation"]["seen"], true, "{one}");
        assert_eq!(one["translation"]["backend"], "192.168.2.60:8080", "{one}");
        let source = one["translation"]["source"].as_str().expect("a source");
        assert!(source.starts_with("192.168.2.10:"), "{one}");
        assert_eq!(one["vip_lookups"]["kind"], "none", "{one}");
    }
    let one = conclusion(&ran, PATHS[0].1);
    let looked_up = one["lookups"].as_array().expect("look-ups");
    assert!(looked_up.iter().any(|one| one["address"] == "192.168.2.60"), "{one}");
}

#[test]
fn udp_is_proved_by_its_answer() {
    let node = Node::new("v1.21-tcx");
    let ran = traced(&node, &["192.168.2.22:25565/udp", "--count", "2"], || {
        for (from, _) in PATHS {
            connect(&node, from, "udp", "192.168.2.22", 25565, true);
        }
        // Another protocol of the same port is not asked about.
        connect(&node, Ns::Client, "tcp", "192.168.2.22", 25565, true);
    });
    assert_eq!(ran.code, Some(0), "{ran:?}");
    for (_, path) in PATHS {
        assert_eq!(fate(&ran, "25565/UDP", path), is("dnat-before-neigh", "yes", "observed"));
        assert_eq!(conclusion(&ran, path)["frontend"], "192.168.2.22:25565/UDP");
    }
}

#[test]
fn a_packet_for_the_proxy_is_known_by_its_mark() {
    let node = Node::new("v1.21-l7lb");
    let ran = traced(&node, &["192.168.2.30", "--count", "2"], || {
        for (from, _) in PATHS {
            connect(&node, from, "tcp", "192.168.2.30", 80, false);
        }
    });
    for (_, path) in PATHS {
        assert_eq!(fate(&ran, "80/TCP", path), is("proxied-before-neigh", "no", "observed"));
        assert!(conclusion(&ran, path)["proxy_port"].is_u64());
    }
}

/// Connects from where it is started and prints what it is told.
const CONNECT: [&str; 4] =
    ["--", "bash", "-c", "echo started; exec 3<>/dev/tcp/192.168.2.20/443 && cat <&3"];

#[test]
fn a_socket_of_the_node_is_told_from_a_forwarded_packet() {
    let node = Node::new("v1.21-tcx");
    // In the cgroup with socket load balancing no packet ever carries the VIP.
    let ran = node.vip(&[&["192.168.2.20", "--trace"][..], &CONNECT].concat());
    assert_eq!(ran.code, Some(3), "{ran:?}");
    let observed = &ran.json()["observed"];
    assert_eq!((&observed["journeys"], &observed["without_vip"]), (&0.into(), &1.into()));
    assert_eq!(observed["stopped"], "command");
    assert!(ran.err.contains("started") && ran.err.contains("tcp 8443 peer="), "{ran:?}");

    // Outside of it, the kernel is asked for the VIP itself.
    let ran = node.vip_outside(&[&["192.168.2.20", "--trace"][..], &CONNECT].concat());
    assert_eq!(fate(&ran, "443/TCP", "socket on host"), is("untranslated", "no", "observed"));
    for (_, path) in PATHS {
        assert_eq!(fate(&ran, "443/TCP", path), is("dnat-before-neigh", "yes", "programmed"));
        assert!(conclusions(&ran, path).is_empty());
    }
    assert!(ran.err.contains("the command ended with"), "{ran:?}");
}

#[test]
fn where_nobody_connects_nothing_is_observed() {
    let node = Node::new("v1.21-tcx");
    let ran = node.vip(&["192.168.2.20", "--trace=300ms"]);
    assert_eq!(ran.code, Some(3), "{ran:?}");
    assert_eq!(node::answer(&ran).0, "yes");
    for (_, path) in PATHS {
        assert_eq!(fate(&ran, "443/TCP", path), is("dnat-before-neigh", "yes", "programmed"));
    }
    let lines = ran.json()["observed"]["not_observed"].to_string();
    assert!(lines.contains("forwarded via wg0 on 443/TCP: no client came"), "{lines}");
    // A claim is held against what is programmed: one that does not hold is told.
    let of = |claim| node.vip(&["192.168.2.20", "--trace=100ms", "--expect", claim]).code;
    assert_eq!((of("served"), of("not-served")), (Some(3), Some(1)));

    let table = node.inspect(&["vip", "192.168.2.20", "--trace=100ms"]);
    assert!(table.out.contains("Observed: no connection in"), "{table:?}");
    assert!(table.out.contains("tc, netlink, tracepoint"), "{table:?}");
}

#[test]
fn a_simulation_proves_the_path_on_which_nobody_came() {
    let node = Node::new("v1.21-tcx");
    let ran = traced(&node, &["192.168.2.20", "--count", "1", "--simulate"], || {
        connect(&node, Ns::Vpn, "tcp", "192.168.2.20", 443, true);
    });
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let [eno1, wg0] = PATHS.map(|(_, path)| fate(&ran, "443/TCP", path));
    assert_eq!(eno1, is("dnat-before-neigh", "yes", "simulated"));
    assert_eq!(wg0, is("dnat-before-neigh", "yes", "observed"));
}

#[test]
fn only_the_clients_and_devices_that_were_asked_for_are_seen() {
    let node = Node::new("v1.21-tcx");
    let ran = traced(&node, &["192.168.2.20", "--source", "10.90.0.2", "--count", "2"], || {
        for from in [Ns::Client, Ns::Vpn, Ns::Client, Ns::Vpn] {
            connect(&node, from, "tcp", "192.168.2.20", 443, true);
        }
    });
    assert_eq!(conclusions(&ran, "forwarded via wg0").len(), 2, "{ran:?}");
    assert_eq!(conclusions(&ran, "forwarded via eno1").len(), 0, "{ran:?}");

    let ran = traced(&node, &["192.168.2.20", "--via", "wg0", "--count", "1"], || {
        connect(&node, Ns::Vpn, "tcp", "192.168.2.20", 443, true);
    });
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_eq!(fate(&ran, "443/TCP", PATHS[1].1), is("dnat-before-neigh", "yes", "observed"));
}

#[test]
fn clients_are_masked_in_what_was_seen_and_the_verdict_stays() {
    let node = Node::new("v1.21-tcx");
    let folder = TempDir::new().expect("a folder");
    let file = folder.path().join("evidence.json");
    let file = file.to_str().expect("UTF-8");
    let arguments = ["192.168.2.32", "--count", "2", "--mask", "clients", "--save", file];
    let ran = traced(&node, &arguments, || {
        for (from, _) in PATHS {
            connect(&node, from, "tcp", "192.168.2.32", 80, true);
        }
    });
    let text = fs::read_to_string(file).expect("the evidence");
    assert!(text.contains("\"journeys\"") && !text.contains("10.90.0.2\""), "{text}");
    let again = run(&mut inspect(["evidence", "judge", file, "-o", "json"]));
    for (_, path) in PATHS {
        assert_eq!(fate(&again, "80/TCP", path), fate(&ran, "80/TCP", path));
        assert_eq!(fate(&again, "80/TCP", path), is("dnat-before-neigh", "yes", "observed"));
    }
}

#[test]
fn it_can_be_started_from_another_network_namespace() {
    let node = Node::new("v1.21-tcx");
    node.0.set_agent_alive().expect("a sign of life");
    let inside = node.0.netns(Ns::Node).expect("the node");
    let bpffs = node.0.bpffs().to_str().expect("UTF-8").to_owned();
    let start = || {
        let mut command = inspect([
            "vip",
            "192.168.2.20",
            "--trace",
            "-o",
            "json",
            "--bpffs",
            &bpffs,
            "--netns",
            inside.to_str().expect("UTF-8"),
            // Where it was started is where the client is.
            "--",
            "bash",
            "-c",
            "exec 3<>/dev/tcp/192.168.2.20/443 && cat <&3; readlink /proc/self/ns/net >&2",
        ]);
        run(node.0.exec_in(Ns::Client, &mut command).expect("the client"))
    };
    let ran = node.0.run_alone(None, start).expect("mounts of its own");
    assert_eq!(conclusions(&ran, "forwarded via eno1").len(), 1, "{ran:?}");
    assert_eq!(
        fate(&ran, "443/TCP", "forwarded via eno1"),
        is("dnat-before-neigh", "yes", "observed")
    );
}

#[test]
fn a_signal_ends_it_with_the_answer_so_far() {
    let node = Node::new("v1.21-tcx");
    for signal in [libc::SIGINT, libc::SIGTERM] {
        let arguments = ["vip", "192.168.2.20", "--trace=10m", "-o", "json"];
        let watching = Watching::start(&node, &arguments);
        connect(&node, Ns::Client, "tcp", "192.168.2.20", 443, true);
        watching.signal(signal);
        let ran = watching.ran();
        assert_eq!(ran.code, Some(0), "{ran:?}");
        assert_eq!(ran.json()["observed"]["stopped"], "interrupt");
        assert_eq!(conclusions(&ran, "forwarded via eno1").len(), 1);
    }
}

#[test]
fn readiness_is_written_to_a_descriptor_and_packets_to_a_capture() {
    use pcap_file::pcapng::{Block, PcapNgReader, blocks::enhanced_packet::EnhancedPacketOption};

    let node = Node::new("v1.21-tcx");
    node.0.set_agent_alive().expect("a sign of life");
    let folder = TempDir::new().expect("a folder");
    let capture = folder.path().join("packets.pcapng");
    let run_it = || {
        // The shell opens the descriptor, and connects as soon as something can be read from it.
        let script = format!(
            "exec {} vip 192.168.2.20 --trace=60s --count 1 --ready-fd 7 --pcap {} -o json 7>&1 >{}",
            env!("CARGO_BIN_EXE_inspect"),
            capture.display(),
            folder.path().join("out").display()
        );
        let mut command = Command::new("bash");
        command.args(["-c", &script]).stdout(Stdio::piped()).env_remove("INSPECT_BPFFS");
        let command = exec_outside(node.0.record(), Ns::Node, &mut command).expect("the node");
        command.spawn().expect("bash")
    };
    let mut child = node.0.run_alone(None, run_it).expect("mounts of its own");
    let mut ready = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut line = String::new();
    ready.read_line(&mut line).expect("a line");
    assert_eq!(line, "ready\n");
    // Closed after that.
    assert_eq!(ready.read_line(&mut line).expect("the end"), 0);
    connect(&node, Ns::Vpn, "tcp", "192.168.2.20", 443, true);
    assert_eq!(child.wait().expect("an end").code(), Some(0));

    let bytes = fs::read(&capture).expect("the capture");
    let mut reader = PcapNgReader::new(bytes.as_slice()).expect("a capture");
    let (mut interfaces, mut comments) = (0, Vec::new());
    while let Some(block) = reader.next_block() {
        match block.expect("a block") {
            Block::InterfaceDescription(_) => interfaces += 1,
            Block::EnhancedPacket(packet) => {
                comments.extend(packet.options.iter().filter_map(|option| match option {
                    EnhancedPacketOption::Comment(text) => Some(text.to_string()),
                    _ => None,
                }));
            }
            _ => {}
        }
    }
    assert!(interfaces >= 4 && comments.len() >= 8, "{interfaces} {comments:?}");
    assert!(comments.iter().all(|one| one.contains("arrived on wg0")), "{comments:?}");
}

#[test]
fn connections_are_shown_as_they_end() {
    let node = Node::new(newest());
    // Of one VIP, as lines of JSON.
    let watching =
        Watching::start(&node, &["trace", "192.168.2.20:443", "-o", "json", "--count", "2"]);
    for (from, _) in PATHS {
        connect(&node, from, "tcp", "192.168.2.20", 443, true);
    }
    let ran = watching.ran();
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let lines: Vec<Value> =
        ran.out.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(lines.len(), 2, "{ran:?}");
    assert_eq!(lines[0]["path"]["device"], "eno1");
    assert_eq!(lines[1]["path"]["device"], "wg0");
    assert!(ran.err.contains("2 connections; watched: tc, netlink, tracepoint"), "{ran:?}");

    // Of every VIP.
    let watching = Watching::start(&node, &["trace", "--count", "2"]);
    connect(&node, Ns::Client, "tcp", "192.168.2.20", 443, true);
    connect(&node, Ns::Vpn, "tcp", "192.168.2.32", 80, true);
    let ran = watching.ran();
    assert_eq!(ran.code, Some(0), "{ran:?}");
    for words in [
        "> 192.168.2.20:443/TCP: arrived on eno1; translated to",
        "> 192.168.2.32:80/TCP: arrived on wg0; translated to 192.168.2.60:8080",
    ] {
        let flat = ran.out.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(flat.contains(words), "{words} in {flat}");
    }

    // Nobody came.
    let ran = node.inspect(&["trace", "192.168.2.20", "--for", "200ms"]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(3), ""), "{ran:?}");
    assert!(ran.err.contains("no connection came"), "{ran:?}");
}

/// Ids of the programs that a process holds.
fn programs_of(pid: u32) -> Vec<u32> {
    let mut ids = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fdinfo")).expect("its descriptors") {
        let Ok(text) = fs::read_to_string(entry.expect("an entry").path()) else { continue };
        let line = text.lines().find_map(|line| line.strip_prefix("prog_id:"));
        ids.extend(line.and_then(|id| id.trim().parse::<u32>().ok()));
    }
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// Those of the programs that the kernel still has.
fn left(programs: &[u32]) -> Vec<u32> {
    aya::programs::loaded_programs()
        .filter_map(|one| Some(one.ok()?.id()))
        .filter(|id| programs.contains(id))
        .collect()
}

#[test]
fn everything_is_detached_however_it_ends() {
    let node = Node::new(newest());
    let arguments = ["trace", "192.168.2.20"];
    for end in ["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL", "closed"] {
        let mut watching = Watching::start(&node, &arguments);
        let programs = programs_of(watching.child.id());
        // Both kinds for devices with an Ethernet header, that for those without, and tracepoints.
        assert!(programs.len() >= 14, "{end}: {programs:?}");
        assert_eq!(left(&programs).len(), programs.len(), "{end}: the test cannot see them");
        match end {
            "SIGINT" => watching.signal(libc::SIGINT),
            "SIGTERM" => watching.signal(libc::SIGTERM),
            "SIGHUP" => watching.signal(libc::SIGHUP),
            "SIGKILL" => watching.signal(libc::SIGKILL),
            _ => drop(watching.child.stdout.take()),
        }
        let status = watching.child.wait().expect("an end");
        match end {
            "SIGKILL" => assert_eq!(status.signal(), Some(libc::SIGKILL)),
            // Who reads no more has seen enough.
            "closed" => assert_eq!(status.code(), Some(0)),
            _ => assert_eq!(status.code(), Some(3), "{end}"),
        }
        // The kernel frees what nobody holds any more a little later.
        let deadline = Instant::now() + Duration::from_secs(5);
        while !left(&programs).is_empty() {
            assert!(Instant::now() < deadline, "{end}: left: {:?}", left(&programs));
            thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn a_command_that_is_not_done_is_ended_with_the_watching() {
    let node = Node::new("v1.21-tcx");
    let ran = node.vip(&[
        "192.168.2.20",
        "--trace=300ms",
        "--",
        "bash",
        "-c",
        "echo pid $$; exec sleep 600",
    ]);
    assert_eq!(ran.json()["observed"]["stopped"], "duration");
    let pid = ran.err.lines().find_map(|line| line.strip_prefix("pid ")).expect("its number");
    assert!(!Path::new("/proc").join(pid).exists(), "{pid} still runs");

    // Nor does it outlive a death without a farewell.
    let sleep = ["--", "bash", "-c", "echo pid $$; exec sleep 600"];
    let mut watching =
        Watching::start(&node, &[&["vip", "192.168.2.20", "--trace"][..], &sleep].concat());
    let mut said = BufReader::new(watching.child.stderr.take().expect("a pipe"));
    let mut line = String::new();
    said.read_line(&mut line).expect("a line");
    let pid = line.trim().strip_prefix("pid ").expect("its number").to_owned();
    watching.signal(libc::SIGKILL);
    watching.child.wait().expect("an end");
    // It holds the other end.
    line.clear();
    assert_eq!(said.read_line(&mut line).expect("the end"), 0, "{pid}: {line}");

    let ran = node.inspect(&["vip", "192.168.2.20", "--trace", "--", "/no/such/command"]);
    ran.refused(2, &["cannot run `/no/such/command`"]);
}

#[test]
fn what_is_asked_wrongly_is_refused() {
    let folder = TempDir::new().expect("a folder");
    let there = folder.path().join("there");
    fs::write(&there, "").expect("a file");
    let there = there.to_str().expect("UTF-8");
    for (arguments, words) in [
        (&["vip", "192.0.2.1", "--trace=0s"][..], &["nothing is seen in no time"][..]),
        (&["vip", "192.0.2.1", "--trace=soon"], &["give a duration such as"]),
        (&["vip", "192.0.2.1", "--trace=1000y"], &["more than a year"]),
        (&["vip", "192.0.2.1", "--trace", "--count", "0"], &["--count"]),
        (&["vip", "192.0.2.1", "--count", "3"], &["--count is about tracing: give --trace too"]),
        (&["vip", "192.0.2.1", "--", "true"], &["-- COMMAND is about tracing"]),
        (&["vip", "192.0.2.1", "--pcap", "x"], &["--pcap is about tracing"]),
        (&["vip", "192.0.2.1", "--trace", "--from", there], &["--trace needs the node"]),
        (
            &["vip", "192.0.2.1", "--trace", "--from", there, "--from", there],
            &["--trace needs the node"],
        ),
        (&["vip", "192.0.2.1", "--trace", "--ready-fd", "1"], &["standard stream"]),
        (&["vip", "192.0.2.1", "--trace", "--ready-fd", "77"], &["--ready-fd 77 is not open"]),
        (&["vip", "192.0.2.1", "--trace", "--ready-file", there], &["is there already"]),
        (&["vip", "192.0.2.1", "--trace", "--pcap", "/no/such/x"], &["cannot write --pcap"]),
        (
            &["vip", "192.0.2.1", "--trace", "--pcap", "/dev/null", "--mask", "clients"],
            &["leave out --mask or --pcap"],
        ),
        (&["trace", "192.0.2.1", "--from", there], &["neither --from nor --save"]),
        (&["trace", "192.0.2.1", "--source", "fd00::1"], &["different IP families"]),
        (&["trace", "192.0.2.1", "-o", "html"], &["has no form `html`"]),
        (&["trace", "rubbish"], &["no IP address"]),
    ] {
        run(&mut inspect(arguments)).usage(words);
    }
}

#[test]
fn doctor_says_which_tiers_there_are_and_why_not_the_others() {
    let node = Node::new(newest());
    let json = node.inspect(&["doctor", "-o", "json"]).json();
    let of = |name: &str| {
        let abilities = json["abilities"].as_array().expect("abilities");
        let what = format!("tracing: {name}");
        abilities.iter().find(|one| one["what"] == what.as_str()).expect("the tier").clone()
    };
    for name in ["tc", "netlink", "tracepoint"] {
        assert_eq!(of(name)["status"], "good", "{}", of(name));
    }
    // What it says of each is what tracing then finds.
    agree(&json, &node.vip(&["192.168.2.20", "--trace=50ms"]).json(), true);

    // With less privilege too.
    for without in ["-perfmon,-sys_admin", "-net_admin,-sys_admin"] {
        let asks = |arguments: &[&str]| {
            let mut command = Command::new("setpriv");
            command.args(["--bounding-set", without, "--inh-caps", "-all"]);
            command.arg(env!("CARGO_BIN_EXE_inspect")).args(arguments).args(["-o", "json"]);
            run(node.0.exec_in(Ns::Node, &mut command).expect("the node"))
        };
        let doctor = asks(&["doctor"]).json();
        let ran = asks(&["vip", "192.168.2.20", "--trace=50ms"]);
        assert_eq!(ran.code, Some(3), "{without}: {ran:?}");
        agree(&doctor, &ran.json(), false);
    }
}

#[test]
fn where_programs_cannot_be_traced_the_others_see_what_they_see() {
    let node = Node::new(newest());
    let reason = |ran: &Ran| {
        let json = ran.json();
        let tiers = json["observed"]["tiers"].as_array().expect("tiers");
        let of = |name: &str| tiers.iter().find(|tier| tier["tier"] == name).expect("the tier");
        for name in ["tc", "netlink", "tracepoint"] {
            assert_eq!(of(name)["used"], true, "{tiers:?}");
        }
        let program = of("program");
        let reason = program["reason"].as_str().map(str::to_owned);
        assert_eq!(program["used"] == true, reason.is_none(), "{program}");
        reason
    };
    // Some kernels refuse it to everybody.
    let ran = traced(&node, &["192.168.2.20", "--count", "1"], || {
        connect(&node, Ns::Client, "tcp", "192.168.2.20", 443, true);
    });
    assert_eq!(fate(&ran, "443/TCP", PATHS[0].1), is("dnat-before-neigh", "yes", "observed"));
    if let Some(reason) = reason(&ran) {
        assert!(reason.contains("refuses to trace programs (EPERM"), "{reason}");
        let table = node.inspect(&["vip", "192.168.2.20", "--trace=50ms"]);
        assert!(table.out.contains("not program: this kernel refuses"), "{table:?}");
    }
    // And every kernel to those who may not open programs.
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set", "-sys_admin", "--inh-caps", "-all"]);
    command.arg(env!("CARGO_BIN_EXE_inspect"));
    command.args(["vip", "192.168.2.20", "--trace=50ms", "-o", "json"]);
    let ran = run(node.0.exec_in(Ns::Node, &mut command).expect("the node"));
    assert_eq!(reason(&ran).as_deref(), Some("needs CAP_SYS_ADMIN"), "{ran:?}");
}

/// Checks that each kind of observers was used if doctor said so; and why not, in the same words.
#[track_caller]
fn agree(doctor: &Value, traced: &Value, words: bool) {
    let abilities = doctor["abilities"].as_array().expect("abilities");
    let tiers = traced["observed"]["tiers"].as_array().expect("tiers");
    assert_eq!(tiers.len(), 5);
    for tier in tiers {
        let what = format!("tracing: {}", tier["tier"].as_str().expect("a name"));
        let said = abilities.iter().find(|one| one["what"] == what.as_str()).expect("the tier");
        assert_eq!(said["status"] == "good", tier["used"] == true, "{said} and {tier}");
        if words && tier["used"] != true {
            assert_eq!(said["found"], tier["reason"], "{said} and {tier}");
        }
    }
}
