//! The program tier: entry and exit of the programs that are attached on a lab's node, and what
//! follows from what they did.
//!
//! Many kernels refuse to trace programs, so that `cargo test` leaves this file out unless it is
//! named; `cargo xtask test` runs it in virtual machines. Needs root.

mod bpf;
mod net;
mod node;
mod run;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::net::{IpAddr, UdpSocket};
use std::os::fd::AsRawFd as _;
use std::process::{Command, Stdio};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};
use std::thread;
use std::time::{Duration, Instant};

use aya::programs::links::LinkType;
use aya::programs::{loaded_links, loaded_programs};
use inspector::collect::programs::attached_now;
use inspector::evidence::programs::HookKind;
use inspector::sys::program;
use inspector::trace::observe::{Backend, Observers, Plan, TierStatus, Watched};
use inspector::trace::sighting::{Hook, Packet, RanProgram, Sighting, Tier};
use inspector_lab::Ns;
use inspector_lab::lab::exec_outside;
use node::{Node, seen_for};
use run::inspect;
use tempfile::TempDir;

/// The test that looks at what is attached in the whole kernel writes, so that it is alone.
static ATTACHED: RwLock<()> = RwLock::new(());

fn among_others() -> RwLockReadGuard<'static, ()> {
    ATTACHED.read().unwrap_or_else(PoisonError::into_inner)
}

const TCP: u8 = 6;
const SYN: u8 = 2;
const VIPS: [&str; 2] = ["192.168.2.20", "fd00:2::20"];
const CLIENTS: [(Ns, &str); 2] = [(Ns::Client, "eno1"), (Ns::Vpn, "wg0")];
const REDIRECT: &str = "7 TC_ACT_REDIRECT";

/// Before Linux 6.6 there is no tcx.
fn has_tcx() -> bool {
    net::release() >= (6, 6)
}

fn node() -> Node {
    Node::new(if has_tcx() { "v1.21-tcx" } else { "v1.18-clsact" })
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

/// Addresses of a pod, of both families.
fn addresses(node: &Node, pod: u8) -> Vec<IpAddr> {
    let text = node.ip(Ns::Pod(pod), "-o address show scope global");
    let mut words = text.split_whitespace();
    let mut found = Vec::new();
    while let Some(word) = words.next() {
        if matches!(word, "inet" | "inet6") {
            let network = words.next().expect("an address behind its family");
            found.push(ip(network.split('/').next().expect("an address")));
        }
    }
    assert_eq!(found.len(), 2, "{text}");
    found
}

fn pods(node: &Node) -> Vec<IpAddr> {
    [1, 2].into_iter().flat_map(|pod| addresses(node, pod)).collect()
}

/// Addresses that are watched: VIPs with a pod behind them, one without a backend, one with a backend
/// elsewhere, and one that is none.
const WATCHED: [&str; 5] = [VIPS[0], VIPS[1], WITHOUT_BACKEND, WITH_REMOTE_BACKEND, "192.168.2.99"];
const WITHOUT_BACKEND: &str = "192.168.2.29";
const WITH_REMOTE_BACKEND: &str = "192.168.2.32";

/// Nothing but tc beside the tier: in a machine whose processor is emulated, everything that is loaded
/// takes its time.
fn plan(node: &Node) -> Plan {
    let backend = |address, port| Backend { address, port, protocol: TCP };
    let mut backends: Vec<_> = pods(node).into_iter().map(|pod| backend(pod, 8443)).collect();
    backends.push(backend(ip("192.168.2.60"), 8080));
    Plan {
        addresses: WATCHED.map(|vip| Watched { address: ip(vip), port: None }).into(),
        backends,
        ingress: vec!["eno1".to_owned(), "wg0".to_owned()],
        egress: vec!["eno1".to_owned()],
        tiers: [Tier::Tc, Tier::Program].into(),
        ..Plan::default()
    }
}

fn programs(observers: &Observers) -> &TierStatus {
    let found = observers.status().iter().find(|status| status.tier == Tier::Program);
    found.expect("the tier was asked for")
}

/// Observes the node while `traffic` goes through it; what was seen.
fn observed<T: Send>(node: &Node, traffic: impl FnOnce() -> T + Send) -> (T, Vec<Sighting>) {
    let plan = plan(node);
    let work = || {
        let mut observers = Observers::start(&plan).expect("the observers");
        let TierStatus { missing, reason, .. } = programs(&observers);
        assert_eq!((reason, missing), (&None, &Vec::new()), "this test needs fentry");
        let result = traffic();
        let seen = seen_for(&mut observers, Duration::from_secs(1));
        (result, seen)
    };
    node.0.run_in(Ns::Node, work).expect("the node")
}

/// What was seen of Cilium's programs, one line each.
fn told(seen: &[Sighting]) -> String {
    let mut text = String::new();
    for Sighting { hook, ifindex, skb, program, detail, packet, .. } in seen {
        let one = (hook, ifindex, skb, program, detail, packet);
        writeln!(text, "{one:x?}").expect("a string takes it");
    }
    text
}

fn flags(packet: &Packet) -> u8 {
    packet.tcp.map_or(0, |(_, _, flags)| flags & 0x3f)
}

/// The program that is attached at ingress of a device.
fn attached(node: &Node, ifindex: u32) -> u32 {
    let all = node.0.run_in(Ns::Node, || attached_now().expect("what is attached"));
    let here: Vec<u32> = all
        .expect("the node")
        .into_iter()
        .filter(|(device, kind, _)| {
            *device == ifindex && matches!(kind, HookKind::TcxIngress | HookKind::ClsactIngress)
        })
        .map(|(.., program)| program)
        .collect();
    assert_eq!(here.len(), 1, "{here:?}");
    here[0]
}

/// Entry and exit of the client's first packet to an address and port: one buffer, one program, on one
/// device.
fn around<'a>(
    node: &Node,
    seen: &'a [Sighting],
    device: &str,
    to: (&str, u16),
) -> (&'a Sighting, &'a Packet, &'a Packet) {
    let ifindex = node.index(device);
    let is_first = |one: &&Sighting| {
        let frontend = (ip(to.0), to.1);
        one.ifindex == ifindex
            && one.packet.as_ref().is_some_and(|one| flags(one) == SYN && ends(one).1 == frontend)
    };
    let at = |hook| seen.iter().filter(move |one| (one.tier, one.hook) == (Tier::Program, hook));
    let entry = at(Hook::ProgramEntry).find(is_first);
    let entry = entry.unwrap_or_else(|| panic!("{to:?} on {device}: no entry: {}", told(seen)));
    let exit = at(Hook::ProgramExit)
        .find(|one| one.skb == entry.skb && one.monotonic_ns > entry.monotonic_ns);
    let exit = exit.unwrap_or_else(|| panic!("{to:?} on {device}: no exit: {}", told(seen)));
    let program = RanProgram { id: attached(node, ifindex), name: "cil_from_netdev".to_owned() };
    for one in [entry, exit] {
        assert_eq!((one.ifindex, one.program.as_ref()), (ifindex, Some(&program)), "{one:?}");
    }
    assert!(entry.skb.is_some() && entry.detail.is_none(), "{entry:?}");
    // What arrived is what tc in front of it has seen.
    let arrival = seen
        .iter()
        .filter(|one| (one.tier, one.hook) == (Tier::Tc, Hook::TcIngress))
        .find(is_first);
    assert_eq!(arrival.expect("its arrival").packet, entry.packet, "{}", told(seen));
    let packet = |one: &'a Sighting| one.packet.as_ref().expect("a packet");
    (exit, packet(entry), packet(exit))
}

fn ends(packet: &Packet) -> ((IpAddr, u16), (IpAddr, u16)) {
    let (from, to) = packet.ports.expect("ports");
    ((packet.source, from), (packet.destination, to))
}

#[test]
fn packets_are_seen_before_and_after_the_program_with_its_verdict() {
    let _others = among_others();
    let node = node();
    let connect = |from, to, port| node.connect(from, "tcp", to, port);
    let (simulated, seen) = observed(&node, || {
        let ran = node.vip_outside(&[VIPS[0], "--simulate"]);
        for (from, _) in CLIENTS {
            for vip in VIPS {
                let outcome = connect(from, vip, 443);
                assert!(outcome.ok, "{outcome:?}");
            }
            let outcome = connect(from, WITH_REMOTE_BACKEND, 80);
            assert!(outcome.ok, "{outcome:?}");
        }
        for (to, port) in [(WITHOUT_BACKEND, 80), (VIPS[0], 444)] {
            let outcome = connect(Ns::Client, to, port);
            assert!(!outcome.ok, "{outcome:?}");
        }
        // Nobody answers for it in the LAN.
        let outcome = connect(Ns::Vpn, "192.168.2.99", 443);
        assert!(!outcome.ok, "{outcome:?}");
        ran
    });
    for (_, device) in CLIENTS {
        // A pod of this node.
        for vip in VIPS {
            let (exit, before, after) = around(&node, &seen, device, (vip, 443));
            assert_eq!((ends(after).0, before.tcp), (ends(before).0, after.tcp));
            let (pod, port) = ends(after).1;
            assert!(pods(&node).contains(&pod) && port == 8443, "{after:?}");
            assert_eq!(exit.detail.as_deref(), Some(REDIRECT));
        }
        // A backend elsewhere: the node's address in the place of the client's.
        let (exit, before, after) = around(&node, &seen, device, (WITH_REMOTE_BACKEND, 80));
        let ((source, _), backend) = ends(after);
        assert_eq!((source, backend), (ip("192.168.2.10"), (ip("192.168.2.60"), 8080)));
        assert_eq!((before.tcp, exit.detail.as_deref()), (after.tcp, Some(REDIRECT)));
        let leaves = |one: &&Sighting| {
            one.hook == Hook::TcEgress
                && one.packet.as_ref().is_some_and(|one| {
                    (one.source, one.destination, one.ports)
                        == (after.source, after.destination, after.ports)
                })
        };
        assert!(seen.iter().any(|one| leaves(&one)), "{}", told(&seen));
    }
    // None: the same buffer holds the error for the client.
    let (_, before, after) = around(&node, &seen, "eno1", (WITHOUT_BACKEND, 80));
    assert_eq!(after.icmp.map(|(kind, _)| kind), Some(3), "{after:?}");
    assert_eq!((after.source, after.destination), (ip(WITHOUT_BACKEND), before.source));
    assert_eq!(after.quoted.as_deref().map(ends), Some(ends(before)));
    // Not Cilium's: it goes on as it came.
    let (exit, before, after) = around(&node, &seen, "wg0", ("192.168.2.99", 443));
    assert_eq!((before, exit.detail.as_deref()), (after, Some("0 TC_ACT_OK")));
    // A port that is none: since Cilium 1.21 there is an entry that drops it.
    let (exit, before, after) = around(&node, &seen, "eno1", (VIPS[0], 444));
    let verdict = if has_tcx() { "2 TC_ACT_SHOT" } else { "0 TC_ACT_OK" };
    assert_eq!((before, exit.detail.as_deref()), (after, Some(verdict)));

    // The simulation ran the same program, on packets that arrived nowhere.
    assert_eq!(node::path(&simulated, "443/TCP", "forwarded via eno1")["grade"], "simulated");
    let clients: BTreeSet<IpAddr> = seen
        .iter()
        .filter(|one| one.hook == Hook::ProgramEntry)
        .filter_map(|one| one.packet.as_ref())
        .filter(|packet| WATCHED.map(ip).contains(&packet.destination))
        .map(|packet| packet.source)
        .collect();
    let real = ["192.168.2.50", "10.90.0.2", "fd00:2::50", "fd00:90::2"].map(ip);
    assert!(clients.iter().all(|client| real.contains(client)), "{clients:?}");
}

#[test]
fn of_a_program_on_two_devices_the_packet_tells_which() {
    let _others = among_others();
    let node = node();
    let [eno1, wg0] = ["eno1", "wg0"].map(|device| node.index(device));
    let id = attached(&node, eno1);
    if has_tcx() {
        node.detach("devices/wg0/links/cil_from_netdev");
    } else {
        let mut command = Command::new("tc");
        command.args(["filter", "del", "dev", "wg0", "ingress"]);
        let output = node.0.exec_in(Ns::Node, &mut command).expect("the node").output();
        let output = output.expect("`tc`, of iproute2, which this test needs");
        assert!(output.status.success(), "{output:?}");
    }
    let attach = || {
        let shared = bpf::Program { fd: program::open(id).expect("it is attached"), id };
        if has_tcx() {
            return Some(shared.tcx(wg0, bpf::TCX_INGRESS, false));
        }
        shared.filter(wg0, false, "cil_from_netdev-wg0", 1);
        None
    };
    let _link = node.0.run_in(Ns::Node, attach).expect("the node");
    assert_eq!(attached(&node, wg0), id);

    let ((), seen) = observed(&node, || {
        for (from, _) in CLIENTS {
            node.connect(from, "tcp", VIPS[0], 443);
        }
    });
    for (device, client) in [("eno1", "192.168.2.50"), ("wg0", "10.90.0.2")] {
        // Which device it is, and which program, is checked there.
        let (_, before, _) = around(&node, &seen, device, (VIPS[0], 443));
        assert_eq!(before.source, ip(client));
        let ifindex = node.index(device);
        let all =
            seen.iter().filter(|one| one.hook == Hook::ProgramEntry && one.ifindex == ifindex);
        let strangers =
            all.filter_map(|one| one.packet.as_ref()).find(|one| one.source != ip(client));
        assert_eq!(strangers, None);
    }
}

/// Puts another program in the place of the one that a pinned link holds.
fn replace(link: &std::path::Path, id: u32) {
    /// `BPF_LINK_UPDATE`
    const COMMAND: libc::c_long = 29;
    let link = inspector::sys::bpf::open_link_pin(link).expect("the link");
    let program = program::open(id).expect("the program");
    let attr = [link.as_raw_fd().unsigned_abs(), program.as_raw_fd().unsigned_abs(), 0, 0];
    // SAFETY: the attribute is four numbers; the descriptors are open.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, COMMAND, attr.as_ptr(), size_of_val(&attr)) };
    assert_eq!(result, 0, "BPF_LINK_UPDATE: {}", std::io::Error::last_os_error());
}

#[test]
fn a_program_that_takes_the_place_of_another_is_followed() {
    let _others = among_others();
    let node = node();
    let eno1 = node.index("eno1");
    let old = attached(&node, eno1);
    let new = bpf::Code::tc("cil_from_netdev").with_btf().load();
    let link = node.link("devices/eno1/links/cil_from_netdev");
    let plan = plan(&node);
    let work = || {
        let mut observers = Observers::start(&plan).expect("the observers");
        replace(&link, new.id);
        let deadline = Instant::now() + Duration::from_secs(20);
        let name = format!("cil_from_netdev on eno1 (program {})", new.id);
        while !programs(&observers).attached.contains(&name) {
            assert!(Instant::now() < deadline, "{:?}", programs(&observers));
            observers.wait(Duration::from_millis(100)).expect("wait");
            while observers.next().expect("event").is_some() {}
        }
        let status = programs(&observers).clone();
        node.connect(Ns::Client, "tcp", VIPS[0], 443);
        let mut ran = BTreeSet::new();
        while observers.wait(Duration::from_secs(1)).expect("wait") {
            while let Some(sighting) = observers.next().expect("event") {
                if sighting.hook == Hook::ProgramEntry && sighting.ifindex == eno1 {
                    ran.insert(sighting.program.expect("it is known").id);
                }
            }
        }
        (status, ran)
    };
    let (status, ran) = node.0.run_in(Ns::Node, work).expect("the node");
    assert_eq!(ran, [new.id].into());
    // That something may have been missed is said, and its silence proves nothing.
    let said = status.missing.iter().find(|(what, _)| what.contains(&format!("program {old}")));
    assert!(said.is_some_and(|(_, why)| why.contains("not attached there any more")), "{status:?}");
    let whole = status.hooks.iter().flat_map(|(_, devices)| devices.iter().flatten());
    assert_eq!(whole.copied().collect::<BTreeSet<u32>>(), [node.index("wg0")].into());
}

/// Asks about a VIP from the command line while the client in the LAN connects to it.
fn traced(node: &Node, vip: &str) -> run::Ran {
    node.0.set_agent_alive().expect("a sign of life");
    let folder = TempDir::new().expect("a folder");
    let ready = folder.path().join("ready");
    let spawn = || {
        let ready = ready.to_str().expect("UTF-8");
        let arguments = ["vip", vip, "-o", "json", "--trace=2m", "--count", "1"];
        let mut command = inspect(arguments.into_iter().chain(["--ready-file", ready]));
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let command = exec_outside(node.0.record(), Ns::Node, &mut command).expect("the node");
        command.spawn().expect("the program runs")
    };
    let mut child = node.0.run_alone(None, spawn).expect("mounts of its own");
    let deadline = Instant::now() + Duration::from_mins(2);
    while !ready.exists() {
        let ended = child.try_wait().expect("the program");
        assert!(ended.is_none() && Instant::now() < deadline, "not ready: {ended:?}");
        thread::sleep(Duration::from_millis(20));
    }
    let outcome = node.connect(Ns::Client, "tcp", vip, 443);
    assert!(!outcome.ok, "{outcome:?}");
    let output = child.wait_with_output().expect("its output");
    run::Ran {
        code: output.status.code(),
        out: String::from_utf8(output.stdout).expect("UTF-8"),
        err: String::from_utf8(output.stderr).expect("UTF-8"),
    }
}

#[test]
fn a_pod_that_never_answers_was_handed_the_translated_packet() {
    let _others = among_others();
    let node = node();
    let backends: Vec<String> = pods(&node)
        .into_iter()
        .map(|pod| std::net::SocketAddr::from((pod, 8443)).to_string())
        .collect();
    let clients = [("", "192.168.2.50"), ("-6 ", "fd00:2::50")];
    for (vip, (family, client)) in VIPS.into_iter().zip(clients) {
        for pod in [1, 2] {
            node.ip(Ns::Pod(pod), &format!("{family}route add blackhole {client}"));
        }
        let ran = traced(&node, vip);
        assert_eq!(ran.code, Some(1), "{ran:?}");
        let one = &ran.json()["observed"]["conclusions"][0];
        let path = node::path(&ran, "443/TCP", "forwarded via eno1");
        let text = |member: &str| path[member].as_str().expect("text");
        assert_eq!(
            [text("outcome"), text("served"), text("grade")],
            ["dnat-before-neigh", "no", "observed"],
            "{ran:?}"
        );
        assert_eq!(one["answer"]["kind"], "silent", "{one}");
        let translation = &one["translation"];
        assert_eq!(
            (&translation["seen"], &translation["hook"]),
            (&true.into(), &"program-exit".into())
        );
        let backend = translation["backend"].as_str().expect("a backend").to_owned();
        assert!(backends.contains(&backend), "{backend} in {backends:?}");
        let id = attached(&node, node.index("eno1"));
        let by = format!("cil_from_netdev (program {id}, returned TC_ACT_REDIRECT 7)");
        assert_eq!(translation["by"], by.as_str());
        let seen = ran.seen("backend-silent");
        assert!(seen.len() == 1 && seen[0].contains(&backend), "{seen:?}");
        assert!(seen[0].contains("were translated and got no answer"), "{seen:?}");
    }
}

#[test]
fn what_cannot_be_traced_is_said_and_the_rest_is_traced() {
    let _others = among_others();
    let (host, client) = net::node_and_client();
    // Longer than the kernel keeps a program's name.
    let name = "cil_from_netdev_of_a_test";
    host.run(|| {
        let ifindex = net::index(net::DEVICE);
        let without = bpf::Code::tc("cil_without_btf").load();
        let foreign = bpf::Code::tc("somebody_elses").with_btf().load();
        let traced = bpf::Code::tc(name).with_btf().returns(0).load();
        bpf::clsact(ifindex);
        for (priority, program) in [(1, &without), (2, &foreign), (3, &traced)] {
            program.filter(ifindex, false, "a_test", priority);
        }
        let ends: [(IpAddr, IpAddr); 2] = [
            (net::CLIENT_V4.into(), net::NODE_V4.into()),
            (net::CLIENT_V6.into(), net::NODE_V6.into()),
        ];
        let addresses = ends.map(|(_, address)| Watched { address, port: None });
        let plan = Plan {
            addresses: addresses.into(),
            ingress: vec![net::DEVICE.to_owned()],
            tiers: [Tier::Program].into(),
            ..Plan::default()
        };
        let mut observers = Observers::start(&plan).expect("the observers");
        let TierStatus { attached, missing, reason, hooks, .. } = programs(&observers);
        assert_eq!(*attached, [format!("{name} on eno1 (program {})", traced.id)]);
        let [(what, why)] = missing.as_slice() else { panic!("{missing:?}") };
        assert_eq!(*what, format!("cil_without_btf (program {}) on eno1", without.id));
        assert!(why.contains("loaded without BTF") && reason.is_none(), "{why} {reason:?}");
        // Not all that Cilium does there is seen.
        assert!(hooks.is_empty(), "{hooks:?}");

        client.run(|| {
            for (from, to) in ends {
                let socket = UdpSocket::bind((from, 40001)).expect("bind");
                socket.send_to(b"hello", (to, 54)).expect("send");
            }
        });
        let mut seen = Vec::new();
        let deadline = Instant::now() + Duration::from_secs(20);
        let is_sent = |one: &&Sighting, to: IpAddr| {
            one.packet
                .as_ref()
                .is_some_and(|packet| packet.destination == to && packet.ports == Some((40001, 54)))
        };
        for (_, to) in ends {
            let of = |seen: &[Sighting], hook| {
                seen.iter().find(|one| one.hook == hook && is_sent(one, to)).cloned()
            };
            while of(&seen, Hook::ProgramExit).is_none() {
                let left = deadline.saturating_duration_since(Instant::now());
                assert!(!left.is_zero(), "{}", told(&seen));
                observers.wait(left).expect("wait");
                while let Some(sighting) = observers.next().expect("event") {
                    seen.push(sighting);
                }
            }
            let [entry, exit] = [Hook::ProgramEntry, Hook::ProgramExit]
                .map(|hook| of(&seen, hook).unwrap_or_else(|| panic!("{}", told(&seen))));
            assert_eq!((&entry.packet, entry.skb), (&exit.packet, exit.skb));
            let program = RanProgram { id: traced.id, name: name.to_owned() };
            for one in [&entry, &exit] {
                assert_eq!((one.ifindex, one.program.as_ref()), (ifindex, Some(&program)));
            }
            assert_eq!(exit.detail.as_deref(), Some("0 TC_ACT_OK"));
        }
    });
}

/// Links and programs of the tier in the whole kernel.
fn ours() -> (usize, usize) {
    let links = loaded_links()
        .filter_map(|link| link.ok()?.link_type().ok())
        .filter(|kind| *kind == LinkType::Tracing)
        .count();
    let programs = loaded_programs()
        .filter_map(|one| Some(one.ok()?.name_as_str()?.to_owned()))
        .filter(|name| matches!(name.as_str(), "program_entry" | "program_exit"))
        .count();
    (links, programs)
}

#[test]
fn nothing_is_left_however_it_ends() {
    let _alone = ATTACHED.write().unwrap_or_else(PoisonError::into_inner);
    let node = node();
    assert_eq!(ours(), (0, 0));
    // The kernel frees what nobody holds any more a little later.
    let is_gone = || {
        let deadline = Instant::now() + Duration::from_secs(20);
        while ours() != (0, 0) {
            assert!(Instant::now() < deadline, "left: {:?}", ours());
            thread::sleep(Duration::from_millis(50));
        }
    };
    // Two devices, entry and exit.
    let plan = plan(&node);
    let during = node.0.run_in(Ns::Node, || {
        let _observers = Observers::start(&plan).expect("the observers");
        ours()
    });
    assert_eq!(during.expect("the node"), (4, 4));
    is_gone();

    // The devices of the pods too.
    let start = || {
        let mut command = inspect(["trace", VIPS[0]]);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let command = exec_outside(node.0.record(), Ns::Node, &mut command).expect("the node");
        command.spawn().expect("the program runs")
    };
    let mut victim = node.0.run_alone(None, start).expect("mounts of its own");
    // Where the processor is emulated, all that `inspect trace` attaches takes a while.
    let deadline = Instant::now() + Duration::from_mins(2);
    while ours() != (8, 8) {
        let ended = victim.try_wait().expect("the program");
        assert!(ended.is_none() && Instant::now() < deadline, "{ended:?}, attached: {:?}", ours());
        thread::sleep(Duration::from_millis(20));
    }
    victim.kill().expect("kill it");
    victim.wait().expect("wait");
    is_gone();
}
