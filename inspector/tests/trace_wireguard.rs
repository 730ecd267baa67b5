//! A diagnosis that was wrong, replayed with real clients behind a real `WireGuard` device: "the
//! announcer cannot reach its own VIP, its neighbour entry is INCOMPLETE, so clients of the VPN cannot
//! either". They can, and tracing shows why; and shows it where they really cannot.
//!
//! Not every machine's kernel has WireGuard, so that `cargo test` leaves this file out unless it is
//! named; `cargo xtask test` runs it in virtual machines. Needs root, and util-linux's `nsenter`.

mod node;
mod run;

use std::{
    io::Write as _,
    net::{IpAddr, SocketAddr, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use inspector_lab::{
    Ns,
    wireguard::{self, Attribute, PeerAttribute},
};
use node::{Node, absent, answer, found, path, why};
use run::Ran;
use serde_json::Value;

const WEB: [&str; 2] = ["192.168.2.20", "fd00:2::20"];
const L7: &str = "192.168.2.30";
const WG0: &str = "forwarded via wg0";

/// Bytes that the node has received of its peers through the tunnel, as the kernel counts them.
fn received(node: &Node) -> u64 {
    let read = || wireguard::get("wg0").expect("what the kernel says of wg0");
    let attributes = node.0.run_in(Ns::Node, read).expect("the node");
    let peers = attributes.into_iter().filter_map(|attribute| match attribute {
        Attribute::Peers(peers) => Some(peers),
        _ => None,
    });
    peers
        .flatten()
        .flat_map(|peer| peer.0)
        .filter_map(|one| match one {
            PeerAttribute::RxBytes(bytes) => Some(bytes),
            _ => None,
        })
        .sum()
}

/// The node's own stack asks for the VIP, as the one did who concluded from it, and nobody answers.
fn probed_in_vain(node: &Node, vip: &str) {
    let address: IpAddr = vip.parse().expect("an address");
    let send = || {
        let any: SocketAddr = match address {
            IpAddr::V4(_) => ([0, 0, 0, 0], 0).into(),
            IpAddr::V6(_) => ([0_u16; 8], 0).into(),
        };
        let socket = UdpSocket::bind(any).expect("a socket");
        socket.send_to(b"anybody?", (address, 9)).expect("sent");
    };
    node.0.run_in(Ns::Node, send).expect("the node");
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let entry = neighbour(node, vip);
        // Its questions are over: those that are seen from here on are others'.
        if entry.contains("FAILED") {
            break;
        }
        assert!(entry.contains("INCOMPLETE"), "{entry}");
        assert!(Instant::now() < deadline, "{entry}");
        thread::sleep(Duration::from_millis(50));
    }
}

fn neighbour(node: &Node, vip: &str) -> String {
    node.ip(Ns::Node, &format!("neigh show {vip} dev eno1 nud all"))
}

/// `inspect vip VIP --trace -- COMMAND` on the node; the command connects from behind wg0 and prints
/// what it is told.
fn traced(node: &Node, vip: &str, port: u16) -> Ran {
    let client = node.0.netns(Ns::Vpn).expect("the client");
    let inside = format!("--net={}", client.display());
    // Socket load balancing is the node's: a client is in none of its cgroups.
    let cgroup = node.0.record().cgroup.as_ref().expect("socket load balancing");
    let outside = cgroup.parent().expect("a cgroup above").join("cgroup.procs");
    let leave = format!("echo 0 >{}", outside.display());
    let connect = format!("{leave} && exec 3<>/dev/tcp/{vip}/{port} && echo \"told $(cat <&3)\"");
    let command = ["--", "nsenter", &inside, "--", "timeout", "8", "bash", "-c", &connect];
    node.vip(&[&[vip, "--trace"][..], &command].concat())
}

/// The one connection that was seen, on wg0.
#[track_caller]
fn conclusion(ran: &Ran) -> Value {
    let json = ran.json();
    let all = json["observed"]["conclusions"].as_array().expect("conclusions");
    assert_eq!(all.len(), 1, "{ran:?}");
    assert_eq!(all[0]["path"]["device"], "wg0", "{ran:?}");
    all[0].clone()
}

/// Outcome, served and proof of the path by wg0.
#[track_caller]
fn fate(ran: &Ran, port: &str) -> [String; 3] {
    let path = path(ran, port, WG0);
    ["outcome", "served", "grade"].map(|member| path[member].as_str().expect("text").to_owned())
}

#[test]
fn a_failed_neighbour_entry_of_the_vip_has_no_bearing_on_forwarded_packets() {
    let node = Node::with_wireguard("v1.21-tcx");
    for vip in WEB {
        probed_in_vain(&node, vip);
        let before = received(&node);
        let ran = traced(&node, vip, 443);
        assert!(received(&node) > before, "nothing came through the tunnel");
        assert!(
            ran.err.contains("told pod") && ran.err.contains(" tcp 8443 peer="),
            "the client was served: {ran:?}"
        );

        assert_eq!((ran.code, answer(&ran).0.as_str()), (Some(0), "yes"), "{ran:?}");
        assert_eq!(fate(&ran, "443/TCP"), ["dnat-before-neigh", "yes", "observed"], "{ran:?}");
        // Nor does what the node knew before stand, that nobody ever came.
        absent(&ran, "no-client-yet");
        let why = why(&ran, "443/TCP", WG0);
        let words = "observed: 1 of 1 journeys translated before any neighbour look-up, 1 answered";
        assert!(why.contains(words), "{why}");
        let one = conclusion(&ran);
        assert_eq!(one["vip_lookups"]["kind"], "none", "{one:#}");
        assert_eq!(one["answer"]["as_vip"], true, "{one:#}");
        let entry = format!("the neighbour entry of {vip} is FAILED on eno1");
        found(&ran, "neighbour-irrelevant", "note", &entry);
        // It was as bad all the time.
        assert!(neighbour(&node, vip).contains("FAILED"));
    }

    // The counter-test: the same clients and entries, and Cilium's program is not on wg0.
    node.detach("devices/wg0/links/cil_from_netdev");
    for vip in WEB {
        let before = received(&node);
        let ran = traced(&node, vip, 443);
        assert!(received(&node) > before, "nothing came through the tunnel");
        assert!(!ran.err.contains("told "), "the client was served: {ran:?}");

        assert_eq!(ran.code, Some(1), "{ran:?}");
        assert_eq!(fate(&ran, "443/TCP"), ["untranslated", "no", "observed"], "{ran:?}");
        let one = conclusion(&ran);
        assert_eq!(one["vip_lookups"]["kind"], "seen", "{one:#}");
        let lookups = one["lookups"].as_array().expect("look-ups");
        let of_vip = |lookup: &Value| lookup["is_vip"] == true && lookup["device"] == "eno1";
        assert!(lookups.iter().any(of_vip), "{one:#}");
        assert!(one.get("translation").is_none(), "{one:#}");
        absent(&ran, "neighbour-irrelevant");
        let neighbour = path(&ran, "443/TCP", WG0)["neighbour"].to_string();
        assert!(neighbour.contains("matters on this path"), "{neighbour}");
    }
}

/// As it was reported: the frontend is an L7 one, and a proxy on the node takes what comes for it.
#[test]
fn nor_on_what_is_handed_to_the_proxy_of_the_node() {
    let node = Node::with_wireguard("v1.21-l7lb");
    probed_in_vain(&node, L7);
    // Nobody listens.
    let ran = traced(&node, L7, 80);
    assert!(!ran.err.contains("told "), "{ran:?}");
    assert_eq!(fate(&ran, "80/TCP"), ["proxied-before-neigh", "no", "observed"], "{ran:?}");
    let port = conclusion(&ran)["proxy_port"].as_u64().expect("a port");

    let listeners = node.listen_as_proxy(u16::try_from(port).expect("a port"));
    // They end with the process.
    for listener in listeners {
        thread::spawn(move || {
            for client in listener.incoming() {
                let told = client.and_then(|mut client| client.write_all(b"the proxy\n"));
                told.expect("a client");
            }
        });
    }
    let ran = traced(&node, L7, 80);
    assert!(ran.err.contains("told the proxy"), "the client was served: {ran:?}");
    assert_eq!((ran.code, answer(&ran).0.as_str()), (Some(0), "yes"), "{ran:?}");
    assert_eq!(fate(&ran, "80/TCP"), ["proxied-before-neigh", "yes", "observed"], "{ran:?}");
    let one = conclusion(&ran);
    assert_eq!((&one["vip_lookups"]["kind"], &one["proxy_port"]), (&"none".into(), &port.into()));
    let entry = format!("the neighbour entry of {L7} is FAILED on eno1");
    found(&ran, "neighbour-irrelevant", "note", &entry);
    assert!(neighbour(&node, L7).contains("FAILED"));
}
