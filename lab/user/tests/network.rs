//! The lab's network is the captured node's, and packets flow in it.
//!
//! Needs root, network namespaces, veth, bridge, TUN, and iproute2's `ip` to look at the result
//! with other eyes; fails without.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    path::Path,
    process::Command,
    time::Duration,
};

use inspector_lab::{Capture, Lab, Ns};
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

/// A lab with a network and without maps.
fn network(capture: &str) -> Lab {
    let none: [&str; 0] = [];
    Lab::builder().project(capture).only(none).network(true).up().expect("a lab")
}

/// Output of a command in the lab.
fn output(lab: &Lab, place: Ns, command: &[&str]) -> String {
    let mut process = Command::new(command[0]);
    process.args(&command[1..]);
    let output = lab.exec_in(place, &mut process).expect("the place").output().expect(command[0]);
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// What of `ip -j -d addr` a capture and its lab must agree in, by device.
fn devices(json: &str) -> BTreeMap<String, BTreeMap<&'static str, Value>> {
    let links: Vec<Value> = serde_json::from_str(json).expect("JSON");
    links
        .into_iter()
        .map(|link| {
            let addresses: BTreeSet<String> = link["addr_info"]
                .as_array()
                .expect("addresses")
                .iter()
                .map(|a| {
                    format!("{}/{} {} {}", a["local"], a["prefixlen"], a["scope"], a["broadcast"])
                })
                .collect();
            let mut flags: Vec<String> =
                serde_json::from_value(link["flags"].clone()).expect("flags");
            flags.sort();
            let tun = matches!(link["linkinfo"]["info_kind"].as_str(), Some("tun" | "wireguard"));
            let mut fields = BTreeMap::from([
                ("ifindex", link["ifindex"].clone()),
                ("mtu", link["mtu"].clone()),
                ("link_type", link["link_type"].clone()),
                ("link", link["link"].clone()),
                ("link_index", link["link_index"].clone()),
                ("addresses", serde_json::to_value(addresses).expect("JSON")),
            ]);
            if tun {
                fields.insert("kind", "no Ethernet header".into());
            } else {
                fields.insert("kind", link["linkinfo"]["info_kind"].clone());
                fields.insert("address", link["address"].clone());
                fields.insert("flags", serde_json::to_value(flags).expect("JSON"));
            }
            (link["ifname"].as_str().expect("a name").to_owned(), fields)
        })
        .collect()
}

/// Lines as a set, without what iproute2 versions print differently.
fn lines(text: &str) -> BTreeSet<String> {
    text.lines().map(|line| line.trim_end().to_owned()).collect()
}

#[test]
fn the_node_is_the_captured_one() {
    for name in CAPTURES {
        let capture = Capture::project(name).expect("the capture");
        let lab = network(name);
        let ip = |arguments: &[&str]| output(&lab, Ns::Node, &[&["ip"], arguments].concat());
        let captured = devices(&capture.text("ip-addr.json").expect("captured"));
        assert!(captured.len() >= 7, "{name}: {captured:?}");
        assert_eq!(devices(&ip(&["-j", "-d", "addr"])), captured, "{name}");

        let routes = format!(
            "{}{}",
            ip(&["-4", "route", "show", "table", "all"]),
            ip(&["-6", "route", "show", "table", "all"])
        );
        let captured = lines(&capture.text("ip-route.txt").expect("captured"));
        assert!(captured.len() > 40, "{name}: {captured:?}");
        assert_eq!(lines(&routes), captured, "{name}");

        let rules = lines(&ip(&["rule"]));
        assert_eq!(rules, lines(&capture.text("ip-rule.txt").expect("captured")), "{name}");
    }
}

#[test]
fn pods_have_the_captured_addresses() {
    // From the probes of the captures: which pod answered with which address.
    for (name, addresses) in [
        (
            "v1.13-clsact",
            [["10.77.1.15/32", "fd00:77:1::6c71/128"], ["10.77.1.7/32", "fd00:77:1::3975/128"]],
        ),
        (
            "v1.21-tcx",
            [["10.77.1.228/32", "fd00:77:1::eb2/128"], ["10.77.1.158/32", "fd00:77:1::402b/128"]],
        ),
    ] {
        let lab = network(name);
        for (number, expected) in [1, 2].into_iter().zip(addresses) {
            let text = output(&lab, Ns::Pod(number), &["ip", "-o", "addr", "show", "dev", "eth0"]);
            for address in expected {
                assert!(text.contains(&format!(" {address} ")), "{name} pod{number}: {text}");
            }
        }
    }
}

/// Connects from `from` to a listener on `address` in `to`, over TCP and UDP, both ways.
fn reach(lab: &Lab, from: Ns, to: Ns, address: &str) {
    let address: IpAddr = address.parse().expect("an address");
    let (tcp, udp) = lab
        .run_in(to, || {
            (
                TcpListener::bind((address, 0)).expect("bind"),
                UdpSocket::bind((address, 0)).expect("bind"),
            )
        })
        .expect("the place");
    let (target, udp_target) = (tcp.local_addr().expect("it"), udp.local_addr().expect("it"));
    let server = std::thread::spawn(move || {
        let (mut stream, peer) = tcp.accept().expect("accept");
        let mut bytes = vec![0; 100_000];
        stream.read_exact(&mut bytes).expect("what was sent");
        stream.write_all(&bytes).expect("an answer");
        let mut buffer = [0; 2000];
        udp.set_read_timeout(Some(Duration::from_secs(5))).expect("a time-out");
        let (length, from) = udp.recv_from(&mut buffer).expect("a datagram");
        udp.send_to(&buffer[..length], from).expect("an answer");
        peer
    });
    let own: SocketAddr = lab
        .run_in(from, || {
            let mut stream =
                TcpStream::connect_timeout(&target, Duration::from_secs(5)).expect("a connection");
            stream.set_read_timeout(Some(Duration::from_secs(5))).expect("a time-out");
            // Many packets, so that sizes and order matter.
            let sent: Vec<u8> = (0..100_000u32).map(|i| (i % 251) as u8).collect();
            stream.write_all(&sent).expect("sending");
            let mut back = vec![0; sent.len()];
            stream.read_exact(&mut back).expect("the answer");
            assert_eq!(back, sent);
            let socket = UdpSocket::bind(if address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })
                .expect("bind");
            socket.set_read_timeout(Some(Duration::from_secs(5))).expect("a time-out");
            socket.send_to(b"hello", udp_target).expect("sending");
            let mut buffer = [0; 10];
            let (length, _) = socket.recv_from(&mut buffer).expect("the answer");
            assert_eq!(&buffer[..length], b"hello");
            stream.local_addr().expect("it")
        })
        .expect("the place");
    assert_eq!(server.join().expect("the server"), own, "nothing translates between the two");
}

#[test]
fn clients_reach_the_node_and_each_other() {
    let lab = network("v1.21-tcx");
    reach(&lab, Ns::Client, Ns::Node, "192.168.2.10");
    reach(&lab, Ns::Client, Ns::Node, "fd00:2::10");
    reach(&lab, Ns::Client, Ns::Host60, "192.168.2.60");
    reach(&lab, Ns::Node, Ns::Host60, "fd00:2::60");
    reach(&lab, Ns::Vpn, Ns::Node, "10.90.0.1");
    reach(&lab, Ns::Vpn, Ns::Node, "fd00:90::1");
    // Routed by the node from one device to the other.
    reach(&lab, Ns::Vpn, Ns::Node, "192.168.2.10");
}

#[test]
fn the_node_asks_for_the_neighbour_of_an_address_that_nobody_has() {
    let lab = network("v1.21-tcx");
    let error = lab
        .run_in(Ns::Vpn, || {
            let target = "192.168.2.20:443".parse().expect("an address");
            TcpStream::connect_timeout(&target, Duration::from_millis(400)).expect_err("nobody")
        })
        .expect("the place");
    assert!(
        matches!(error.kind(), std::io::ErrorKind::TimedOut | std::io::ErrorKind::HostUnreachable),
        "{error}"
    );
    let neighbours = output(&lab, Ns::Node, &["ip", "neigh", "show", "192.168.2.20"]);
    assert!(neighbours.contains("dev eno1"), "{neighbours}");
    assert!(neighbours.contains("INCOMPLETE") || neighbours.contains("FAILED"), "{neighbours}");
}

#[test]
fn a_capture_without_a_node_gets_the_bare_one() {
    let lab = network("services-10k");
    reach(&lab, Ns::Client, Ns::Node, "192.168.2.10");
    reach(&lab, Ns::Vpn, Ns::Node, "10.90.0.1");
    let mut command = Command::new("true");
    let error = lab.exec_in(Ns::Pod(1), &mut command).expect_err("no pods");
    assert_eq!(
        error.to_string(),
        format!("the lab {} has no pod1: node, client, vpn, host60, lan", lab.name())
    );
}

#[test]
fn networks_are_apart_and_leave_nothing() {
    let first = network("v1.21-tcx");
    let second = network("v1.18-tcx");
    reach(&first, Ns::Client, Ns::Node, "192.168.2.10");
    reach(&second, Ns::Client, Ns::Node, "192.168.2.10");
    let name = first.name().to_owned();
    // Not waited for: whoever removes the lab ends it.
    let mut sleep = Command::new("sleep");
    sleep.arg("1000");
    let mut sleep =
        first.exec_in(Ns::Client, &mut sleep).expect("the place").spawn().expect("sleep");
    let pumps = pumps_of(&first);
    assert_eq!(pumps.len(), 1, "{pumps:?}");
    let files = files_of(&name);
    assert_eq!(files.len(), 7, "{files:?}");
    first.down().expect("all removed");

    assert_eq!(files_of(&name), [""; 0]);
    assert!(!Path::new("/proc").join(pumps[0].to_string()).exists());
    assert!(!sleep.wait().expect("its end").success());
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
    assert!(!mounts.contains(&format!("ilab-{name}-")), "{mounts}");
    reach(&second, Ns::Client, Ns::Node, "192.168.2.10");
}

/// Names below `/run/netns` of the lab `name`.
fn files_of(name: &str) -> Vec<String> {
    let Ok(entries) = fs::read_dir("/run/netns") else { return Vec::new() };
    let names = entries.map(|e| e.expect("an entry").file_name().into_string().expect("a name"));
    names.filter(|file| file.starts_with(&format!("ilab-{name}-"))).collect()
}

/// Processes of the lab that carry packets.
fn pumps_of(lab: &Lab) -> Vec<i32> {
    let processes = inspector_lab::netns::processes_in(lab.name()).expect("processes");
    processes
        .iter()
        .map(|process| process.pid)
        .filter(|pid| {
            fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "ilab-pump\n")
        })
        .collect()
}

/// Mounts of bpffs that a command sees.
fn bpffs_seen() -> Vec<String> {
    let output = Command::new("cat").arg("/proc/self/mountinfo").output().expect("cat");
    let text = String::from_utf8(output.stdout).expect("text");
    let bpffs = text.lines().filter(|line| line.contains(" - bpf "));
    bpffs.map(|line| line.split(' ').nth(4).expect("a path").to_owned()).collect()
}

#[test]
fn a_command_can_see_one_bpffs_alone() {
    let none: [&str; 0] = [];
    let first = Lab::builder().project("v1.21-tcx").only(none).up().expect("a lab");
    let second = network("v1.21-tcx");
    let path = |lab: &Lab| lab.bpffs().to_str().expect("a path").to_owned();
    let all = bpffs_seen();
    assert!(all.contains(&path(&first)) && all.contains(&path(&second)), "{all:?}");

    assert_eq!(first.run_alone(None, bpffs_seen).expect("a view"), [path(&first)]);
    let (seen, links) = second
        .run_alone(Some(Ns::Node), || {
            (bpffs_seen(), Command::new("ip").arg("link").output().expect("ip").stdout)
        })
        .expect("a view");
    assert_eq!(seen, [path(&second)]);
    assert!(String::from_utf8_lossy(&links).contains("2: eno1@"));
    // Only that view has changed.
    let after = bpffs_seen();
    assert!(after.contains(&path(&first)) && after.contains(&path(&second)), "{after:?}");
}
