//! The network collector against real state of the kernel, in network namespaces of its own.
//!
//! Needs root, veth, bridge and TUN devices.

mod net;

use std::{
    collections::BTreeSet,
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use inspector::{
    collect::network::{NetworkQuestion, collect},
    evidence::{
        SourceStatus,
        network::{Link, Network, Route},
    },
};
use net::Host;

/// Runs `ip` or another tool in this thread's network namespace.
fn run(line: &str) -> String {
    let mut words = line.split_whitespace();
    let tool = words.next().expect("a tool");
    let output = Command::new(tool)
        .args(words)
        .output()
        .unwrap_or_else(|error| panic!("{tool}: {error}; this test needs it (Debian: iproute2)"));
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

fn batch(lines: &str) {
    for line in lines.lines().map(str::trim).filter(|line| !line.is_empty()) {
        run(line);
    }
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn question(vip: &str, backends: &[&str]) -> NetworkQuestion {
    NetworkQuestion {
        vip: Some(ip(vip)),
        backends: backends.iter().map(|text| ip(text)).collect(),
        ..NetworkQuestion::default()
    }
}

/// Collects; what the kernel tells of routing must have been read completely.
fn read(question: &NetworkQuestion) -> Network {
    let (network, sources) = collect(question);
    for what in ["links", "neighbours", "rules", "table 2004", "routes", "sysctls"] {
        let source = sources.iter().find(|source| source.what == what).expect(what);
        assert_eq!(source.status, SourceStatus::Complete, "{source:?}");
    }
    network
}

fn link<'a>(network: &'a Network, name: &str) -> &'a Link {
    network.links.iter().find(|link| link.name == name).unwrap_or_else(|| panic!("no {name}"))
}

fn route(network: &Network, to: &str, input: Option<&str>) -> Result<Route, String> {
    let input = input.map(|name| link(network, name).ifindex);
    let answer = network.route(ip(to), input);
    answer.unwrap_or_else(|| panic!("nobody asked for {to} from {input:?}")).answer.clone()
}

/// A node like Cilium's: a LAN device, a device without Ethernet header, a bridge with a member.
fn node() -> (Host, Host, fs::File) {
    let (node, client) = (Host::new(), Host::new());
    let tun = node.run(|| {
        batch(
            "ip link set lo up
             ip link add eno1 mtu 1400 address 02:00:00:00:02:0a type veth peer name far
             ip link add br0 type bridge
             ip link add port type veth peer name inner
             ip link set port master br0",
        );
        client.take("far");
        let tun = net::tun("wg0");
        batch(
            "ip link set eno1 up
             ip link set br0 up
             ip link set port up
             ip addr add 192.168.2.10/24 dev eno1
             ip addr add fd00:2::10/64 dev eno1 nodad
             ip addr add 10.90.0.1/24 dev wg0
             ip addr add fd00:90::1/64 dev wg0 nodad
             ip addr add 10.8.0.1 peer 10.8.0.9 dev br0
             ip route add default via 192.168.2.1
             ip route add 10.77.2.0/24 via 192.168.2.60
             ip route add 10.77.1.0/24 dev eno1 src 192.168.2.10
             ip route add blackhole 10.66.0.0/16
             ip route add unreachable 10.67.0.0/16
             ip route add prohibit 10.68.0.0/16
             ip -6 route add blackhole fd00:66::/64
             ip -6 route add fd00:77::/64 via fd00:2::60",
        );
        for name in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
            fs::write(format!("/proc/sys/net/{name}"), "1").expect("forwarding on");
        }
        tun
    });
    client.run(|| {
        batch(
            "ip link set far up
             ip addr add 192.168.2.60/24 dev far
             ip addr add fd00:2::60/64 dev far nodad",
        );
    });
    (node, client, tun)
}

#[test]
fn links_are_what_they_are() {
    let (node, _client, _tun) = node();
    node.run(|| {
        let network = read(&question("192.168.2.20", &[]));
        let eno1 = link(&network, "eno1");
        assert_eq!(eno1.kind.as_deref(), Some("veth"));
        assert!(eno1.up && eno1.carrier && eno1.ethernet);
        assert_eq!(eno1.mtu, 1400);
        assert_eq!(eno1.mac.as_deref(), Some("02:00:00:00:02:0a"));
        assert_eq!(eno1.ifindex, net::index("eno1"));
        for address in ["192.168.2.10/24", "fd00:2::10/64"] {
            assert!(eno1.addresses.iter().any(|one| one == address), "{eno1:?}");
        }
        let wg0 = link(&network, "wg0");
        assert_eq!((wg0.kind.as_deref(), wg0.ethernet, &wg0.mac), (Some("tun"), false, &None));
        assert!(wg0.up && wg0.carrier);
        let port = link(&network, "port");
        assert_eq!(port.master, Some(link(&network, "br0").ifindex));
        assert!(port.up && !port.carrier, "its other end is down: {port:?}");
        assert!(!link(&network, "inner").up);
        assert_eq!(link(&network, "br0").kind.as_deref(), Some("bridge"));
        assert_eq!(link(&network, "lo").kind, None);
        assert!(!link(&network, "lo").ethernet);

        let names: BTreeSet<_> = network.links.iter().map(|link| link.name.as_str()).collect();
        assert_eq!(names, BTreeSet::from(["br0", "eno1", "inner", "lo", "port", "wg0"]));
        let inode = run("stat -Lc %i /proc/self/ns/net");
        assert_eq!(network.namespace.expect("/proc").inode.to_string(), inode.trim());
    });
}

#[test]
fn routes_are_those_of_the_kernel() {
    let (node, _client, _tun) = node();
    node.run(|| {
        let network = read(&question(
            "192.168.2.20",
            &[
                "10.77.2.5",
                "10.77.1.5",
                "10.66.0.1",
                "10.67.0.1",
                "10.68.0.1",
                "192.168.2.10",
                "8.8.8.8",
            ],
        ));
        let eno1 = Some(link(&network, "eno1").ifindex);
        for from in [None, Some("eno1"), Some("wg0"), Some("br0")] {
            let vip = route(&network, "192.168.2.20", from).unwrap();
            assert_eq!((vip.kind.as_str(), vip.output, vip.gateway), ("unicast", eno1, None));
            assert_eq!(vip.table, 254);
            let remote = route(&network, "10.77.2.5", from).unwrap();
            assert_eq!((remote.output, remote.gateway), (eno1, Some(ip("192.168.2.60"))));
            assert_eq!(route(&network, "10.77.1.5", from).unwrap().gateway, None);
            let default = route(&network, "8.8.8.8", from).unwrap();
            assert_eq!(default.gateway, Some(ip("192.168.2.1")));
            assert_eq!(route(&network, "192.168.2.10", from).unwrap().kind, "local");
            for (to, kind) in [
                ("10.66.0.1", "blackhole"),
                ("10.67.0.1", "unreachable"),
                ("10.68.0.1", "prohibit"),
            ] {
                assert_eq!(route(&network, to, from).unwrap().kind, kind, "{to} from {from:?}");
            }
        }
        let own = route(&network, "192.168.2.20", None).unwrap();
        assert_eq!(own.source, Some(ip("192.168.2.10")));

        // A device whose packets arrive on its master is not asked, one that is down neither.
        for name in ["port", "inner", "lo"] {
            let index = link(&network, name).ifindex;
            assert!(network.route(ip("192.168.2.20"), Some(index)).is_none(), "{name}");
        }
        // Sources are hosts behind the device.
        let source = |name: &str| {
            let index = link(&network, name).ifindex;
            network.route(ip("192.168.2.20"), Some(index)).unwrap().source.unwrap()
        };
        assert_eq!(source("eno1"), ip("192.168.2.1"));
        assert_eq!(source("wg0"), ip("10.90.0.2"));
        assert_eq!(source("br0"), ip("10.8.0.9"));
    });
}

#[test]
fn routes_of_ipv6_are_those_of_the_kernel() {
    let (node, _client, _tun) = node();
    node.run(|| {
        let network = read(&question("fd00:2::20", &["fd00:77::5", "fd00:66::1", "2001:db8::7"]));
        let eno1 = Some(link(&network, "eno1").ifindex);
        for from in [None, Some("eno1"), Some("wg0"), Some("br0")] {
            let vip = route(&network, "fd00:2::20", from).unwrap();
            assert_eq!((vip.kind.as_str(), vip.output, vip.gateway), ("unicast", eno1, None));
            let remote = route(&network, "fd00:77::5", from).unwrap();
            assert_eq!((remote.output, remote.gateway), (eno1, Some(ip("fd00:2::60"))));
            assert_eq!(route(&network, "fd00:66::1", from).unwrap().kind, "blackhole");
            assert_eq!(route(&network, "2001:db8::7", from), Err("no route".to_owned()));
        }
        let wg0 = link(&network, "wg0").ifindex;
        let source = network.route(ip("fd00:2::20"), Some(wg0)).unwrap().source;
        assert_eq!(source, Some(ip("fd00:90::2")));
    });
}

#[test]
fn what_keeps_a_packet_from_arriving_is_told_apart() {
    let (node, _client, _tun) = node();
    node.run(|| {
        let asked = question("192.168.2.20", &["10.200.0.1"]);
        batch("ip route del default");
        assert_eq!(route(&read(&asked), "10.200.0.1", Some("eno1")), Err("no route".to_owned()));
        assert_eq!(route(&read(&asked), "10.200.0.1", None), Err("no route".to_owned()));

        fs::write("/proc/sys/net/ipv4/conf/wg0/forwarding", "0").expect("sysctl");
        let network = read(&asked);
        let refused = route(&network, "192.168.2.20", Some("wg0")).unwrap_err();
        assert_eq!(refused, "not forwarded: forwarding is off for wg0");
        assert!(route(&network, "192.168.2.20", Some("eno1")).is_ok());
        fs::write("/proc/sys/net/ipv4/conf/wg0/forwarding", "1").expect("sysctl");

        fs::write("/proc/sys/net/ipv4/conf/wg0/rp_filter", "1").expect("sysctl");
        let mut elsewhere = question("192.168.2.20", &[]);
        let wg0 = net::index("wg0");
        elsewhere.inputs = Some(BTreeSet::from([wg0]));
        assert!(route(&read(&elsewhere), "192.168.2.20", Some("wg0")).is_ok());
        for (source, rp_filter, filtered) in [
            ("192.168.2.50", "1", true),
            ("192.168.2.50", "2", false),
            ("10.99.0.1", "2", true),
            ("10.99.0.1", "0", false),
        ] {
            fs::write("/proc/sys/net/ipv4/conf/wg0/rp_filter", rp_filter).expect("sysctl");
            elsewhere.sources.insert(wg0, vec![ip(source)]);
            let network = read(&elsewhere);
            let answer = route(&network, "192.168.2.20", Some("wg0"));
            if filtered {
                let refused = answer.unwrap_err();
                assert!(
                    refused.starts_with(&format!("rp_filter: packets from {source}")),
                    "{refused}"
                );
            } else {
                assert_eq!(answer.unwrap().kind, "unicast", "{source} with {rp_filter}");
            }
            assert_eq!(network.routes.len(), 2, "the node's own and the one device");
        }

        elsewhere.sources.insert(wg0, vec![ip("127.0.0.7")]);
        let refused = route(&read(&elsewhere), "192.168.2.20", Some("wg0")).unwrap_err();
        assert!(refused.starts_with("martian: no packet from 127.0.0.7"), "{refused}");
    });
}

#[test]
fn neighbours_have_the_states_that_the_kernel_gave_them() {
    let (node, _client, _tun) = node();
    node.run(|| {
        batch(
            "ip neigh add 192.168.2.22 lladdr 02:00:00:00:02:16 dev eno1 nud permanent
             ip neigh add 192.168.2.22 lladdr 02:00:00:00:02:17 dev br0 nud permanent
             ip neigh add 192.168.2.99 lladdr 02:00:00:00:02:63 dev eno1 nud permanent
             ip neigh add fd00:2::22 lladdr 02:00:00:00:02:16 dev eno1 nud stale",
        );
        let send = |to: &str| {
            let socket = UdpSocket::bind((ip("192.168.2.10"), 0)).expect("bind");
            socket.send_to(b"?", (ip(to), 9)).expect("send");
        };
        // Nobody answers for .20; .60 is the gateway of the backend and does.
        send("192.168.2.20");
        send("10.77.2.5");
        let state = |network: &Network, address: &str| {
            let eno1 = link(network, "eno1").ifindex;
            network.neighbour(ip(address), eno1).map(|entry| entry.state.clone())
        };
        let asked = question("192.168.2.20", &["10.77.2.5"]);
        assert_eq!(state(&read(&asked), "192.168.2.20").as_deref(), Some("INCOMPLETE"));
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            let network = read(&asked);
            let (vip, gateway) = (state(&network, "192.168.2.20"), state(&network, "192.168.2.60"));
            assert_eq!(state(&network, "192.168.2.99"), None, "nobody asked for it");
            if vip.as_deref() == Some("FAILED") && gateway.as_deref() == Some("REACHABLE") {
                let eno1 = link(&network, "eno1").ifindex;
                assert_eq!(network.neighbour(ip("192.168.2.20"), eno1).unwrap().mac, None);
                assert!(network.neighbour(ip("192.168.2.60"), eno1).unwrap().mac.is_some());
                break;
            }
            assert!(Instant::now() < end, "VIP {vip:?}, gateway {gateway:?}");
            thread::sleep(Duration::from_millis(50));
        }

        let network = read(&question("192.168.2.22", &[]));
        let mut macs: Vec<_> = network
            .neighbours
            .iter()
            .map(|entry| (entry.ifindex, entry.state.as_str(), entry.mac.as_deref().unwrap()))
            .collect();
        macs.sort_unstable();
        let mut expected = [
            (link(&network, "eno1").ifindex, "PERMANENT", "02:00:00:00:02:16"),
            (link(&network, "br0").ifindex, "PERMANENT", "02:00:00:00:02:17"),
        ];
        expected.sort_unstable();
        assert_eq!(macs, expected, "the VIP's entries on any device");

        let network = read(&question("fd00:2::22", &[]));
        assert_eq!(state(&network, "fd00:2::22").as_deref(), Some("STALE"));
    });
}

#[test]
fn rules_and_the_proxy_table_are_read_in_both_families() {
    let (node, _client, _tun) = node();
    node.run(|| {
        let network = read(&question("192.168.2.20", &[]));
        assert_eq!(network.proxy_routes, [""; 0]);
        assert!(network.rules.iter().all(|rule| rule.mark.is_none()), "{:?}", network.rules);
        batch(
            "ip rule add fwmark 0x200/0xf00 lookup 2004 pref 9
             ip -6 rule add fwmark 0x200/0xf00 lookup 2004 pref 9
             ip rule add to 10.1.0.0/16 blackhole pref 11
             ip route add local default dev lo table 2004
             ip route add 10.1.2.0/24 via 192.168.2.60 dev eno1 table 2004
             ip -6 route add local default dev lo table 2004",
        );
        let network = read(&question("192.168.2.20", &[]));
        let proxy: Vec<_> = network.rules.iter().filter(|rule| rule.table == 2004).collect();
        assert_eq!(proxy.len(), 2);
        for (rule, ipv6) in proxy.iter().zip([false, true]) {
            assert_eq!((rule.ipv6, rule.priority, rule.mark), (ipv6, 9, Some((0x200, 0xf00))));
        }
        let shown: Vec<_> =
            network.rules.iter().map(|rule| (rule.ipv6, rule.priority, rule.table)).collect();
        for expected in [
            (false, 0, 255),
            (false, 11, 0),
            (false, 32766, 254),
            (false, 32767, 253),
            (true, 0, 255),
            (true, 32766, 254),
        ] {
            assert!(shown.contains(&expected), "{expected:?} in {shown:?}");
        }
        assert_eq!(
            network.proxy_routes,
            ["local default dev lo", "unicast 10.1.2.0/24 via 192.168.2.60 dev eno1"]
        );
        assert_eq!(network.proxy_routes_v6, ["local default dev lo"]);
    });
}

#[test]
fn sysctls_are_those_below_proc() {
    let (node, _client, _tun) = node();
    node.run(|| {
        for (name, value) in [
            ("eno1/rp_filter", "2"),
            ("eno1/accept_local", "1"),
            ("wg0/rp_filter", "1"),
            ("all/rp_filter", "2"),
            ("wg0/forwarding", "0"),
        ] {
            fs::write(format!("/proc/sys/net/ipv4/conf/{name}"), value).expect("sysctl");
        }
        let network = read(&question("192.168.2.20", &[]));
        assert_eq!(network.sysctls["net.ipv4.conf.eno1.rp_filter"], 2);
        assert_eq!(network.sysctls["net.ipv4.conf.wg0.forwarding"], 0);
        let mut seen = 0;
        for (name, value) in &network.sysctls {
            let path = format!("/proc/sys/{}", name.replace('.', "/"));
            let there = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
            assert_eq!(there.trim(), value.to_string(), "{name}");
            seen += 1;
        }
        // Five of the namespace, three and one of each of six devices.
        assert_eq!(seen, 5 + 6 * 4);
    });
}

#[test]
fn many_devices_and_neighbours_are_all_read() {
    let node = Host::new();
    node.run(|| {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("batch");
        let mut lines = vec!["link add sw type bridge\nlink set sw up".to_owned()];
        lines.extend((0..100).map(|number| {
            format!(
                "link add a{number} type veth peer name b{number}\n\
                 link set a{number} up\nlink set b{number} up\n\
                 addr add 10.{number}.0.1/24 dev a{number}"
            )
        }));
        lines.extend((0..2000).map(|number| {
            let (high, low) = (number / 200, number % 200 + 10);
            format!(
                "neigh add 10.{high}.0.{low} lladdr 02:00:00:00:00:01 dev a{high} nud permanent"
            )
        }));
        fs::write(&file, lines.join("\n")).expect("write");
        run(&format!("ip -batch {}", file.display()));

        let network = read(&question("10.3.0.17", &["10.9.0.209"]));
        assert_eq!(network.links.len(), 202, "lo, the bridge, and both ends of 100 cables");
        let addresses = network.links.iter().flat_map(|link| &link.addresses);
        assert_eq!(addresses.filter(|text| text.ends_with(".0.1/24")).count(), 100);
        let found: BTreeSet<_> = network.neighbours.iter().map(|entry| entry.address).collect();
        assert_eq!(found, BTreeSet::from([ip("10.3.0.17"), ip("10.9.0.209")]));
        // All that are up, but lo: each asked for both, beside the node's own.
        assert_eq!(network.routes.len(), 2 * (1 + 201));
        for number in [0, 57, 99] {
            let from = format!("a{number}");
            let answer = route(&network, "10.9.0.209", Some(&from)).unwrap_err();
            assert_eq!(answer, format!("not forwarded: forwarding is off for {from}"));
        }
        let own = route(&network, "10.9.0.209", None).unwrap();
        assert_eq!(own.output, Some(link(&network, "a9").ifindex));
    });
}

/// Everything of the network that `ip` shows.
fn everything() -> String {
    [
        "link",
        "addr",
        "route show table all",
        "-6 route show table all",
        "rule",
        "-6 rule",
        "neigh show nud all",
        "-6 neigh show nud all",
        "neigh show proxy",
    ]
    .map(|what| format!("# {what}\n{}", run(&format!("ip {what}"))))
    .concat()
}

#[test]
fn asking_changes_nothing() {
    let (node, _client, _tun) = node();
    node.run(|| {
        // The kernel itself sends router solicitations and the like while devices come up; it is
        // done when two looks are the same.
        let end = Instant::now() + Duration::from_secs(20);
        let mut before = everything();
        loop {
            thread::sleep(Duration::from_millis(500));
            let now = everything();
            if now == before {
                break;
            }
            assert!(Instant::now() < end, "the namespace does not settle");
            before = now;
        }
        for _ in 0..3 {
            for (vip, backends) in [
                ("192.168.2.20", ["10.77.2.5", "192.168.2.77", "10.66.0.1"]),
                ("fd00:2::20", ["fd00:77::5", "fd00:2::77", "fd00:66::1"]),
            ] {
                let network = read(&question(vip, &backends));
                assert!(network.routes.len() > 10, "it did ask");
                assert_eq!(network.neighbours, []);
            }
        }
        assert_eq!(everything(), before);
        // The counter-test: a packet does leave a trace that the comparison sees.
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).expect("bind");
        socket.send_to(b"?", (Ipv4Addr::new(192, 168, 2, 20), 9)).expect("send");
        let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).expect("bind");
        socket.send_to(b"?", (ip("fd00:2::20"), 9)).expect("send");
        let after = everything();
        assert!(after.contains("192.168.2.20 dev eno1") && after.contains("fd00:2::20 dev eno1"));
    });
}
