//! A real WireGuard device as it is collected: a node and a client that talk through a tunnel.
//!
//! Not every machine's kernel has WireGuard, so that `cargo test` leaves this file out unless it is
//! named; `cargo xtask test` runs it in virtual machines. Needs root.

mod net;

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    time::{Duration, Instant},
};

use inspector::{
    collect::{self, Options, Question},
    evidence::{
        Evidence, SourceStatus, VipQuery,
        network::{WireGuard, WireGuardPeer},
    },
};
use inspector_lab::{
    Lab,
    wireguard::{self, Attribute, Peer, PeerAttribute, peer},
};
use net::{CLIENT_V4, NODE_V4, address, index, netlink, node_and_client, up};
use rtnetlink::LinkWireguard;

const NODE_TUNNEL: Ipv4Addr = Ipv4Addr::new(10, 90, 0, 1);
const CLIENT_TUNNEL: Ipv4Addr = Ipv4Addr::new(10, 90, 0, 2);
const NODE_PORT: u16 = 51820;
const CLIENT_PORT: u16 = 51821;
const VIP: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 168, 2, 20));

fn get() -> Vec<Attribute> {
    wireguard::get("wg0").expect("what the kernel says of wg0")
}

fn set(attributes: Vec<Attribute>) {
    wireguard::set("wg0", attributes).expect("a change of wg0");
}

/// Makes wg0 with this key, port and address; returns its public key.
fn device(key: u8, port: u16, own: Ipv4Addr) -> [u8; 32] {
    netlink(async |handle| {
        let device = LinkWireguard::new("wg0").build();
        handle.link().add(device).execute().await.unwrap_or_else(|error| {
            panic!("this test needs WireGuard in the kernel (CONFIG_WIREGUARD): {error}")
        });
    });
    let public = wireguard::identify("wg0", key, port).expect("a key and a port");
    netlink(async |handle| {
        up(&handle, "wg0").await;
        address(&handle, "wg0", own.into(), 24).await;
    });
    public
}

/// Received and sent bytes of the peer with this key, as the kernel's own counters say.
fn counters(key: [u8; 32]) -> (u64, u64) {
    let peers = get().into_iter().filter_map(|attribute| match attribute {
        Attribute::Peers(peers) => Some(peers),
        _ => None,
    });
    let Peer(attributes) = peers
        .flatten()
        .find(|Peer(attributes)| attributes.contains(&PeerAttribute::PublicKey(key)))
        .expect("the peer");
    let find = |pick: fn(&PeerAttribute) -> Option<u64>| attributes.iter().find_map(pick);
    let received = find(|one| match one {
        PeerAttribute::RxBytes(bytes) => Some(*bytes),
        _ => None,
    });
    let sent = find(|one| match one {
        PeerAttribute::TxBytes(bytes) => Some(*bytes),
        _ => None,
    });
    (received.expect("received bytes"), sent.expect("sent bytes"))
}

fn collected(lab: &Lab) -> Evidence {
    let vip = VipQuery { address: VIP, port: None, protocol: None, source: None };
    collect::node(&Options {
        bpffs: Some(lab.bpffs().to_owned()),
        ..Options::new(Question::Vip(vip))
    })
    .expect("the lab's maps can be read")
}

/// What was collected of wg0, and nothing but it.
fn wg0(evidence: &Evidence) -> WireGuard {
    let source = evidence.sources.iter().find(|one| one.what == "WireGuard").expect("asked");
    assert_eq!(source.status, SourceStatus::Complete, "{source:?}");
    let network = evidence.network.as_ref().expect("the network");
    let link = network.link(index("wg0")).expect("wg0");
    assert_eq!((link.kind.as_deref(), link.ethernet), (Some("wireguard"), false));
    let [device] = network.wireguard.as_slice() else { panic!("{:?}", network.wireguard) };
    device.clone()
}

#[test]
fn peers_of_a_real_tunnel_are_collected() {
    let lab = Lab::builder().project("v1.18-tcx").up().expect("a lab");
    let (node, client) = node_and_client();
    let started = Instant::now();
    let node_key = node.run(|| device(0x11, NODE_PORT, NODE_TUNNEL));
    let client_key = client.run(|| device(0x22, CLIENT_PORT, CLIENT_TUNNEL));
    let silent_key = [0x33; 32];

    // The node knows no endpoint: the client is the one that comes.
    node.run(|| {
        let of_client =
            [(CLIENT_TUNNEL.into(), 32), ("fd00:90::2".parse().expect("an address"), 128)];
        let silent = [(Ipv4Addr::new(10, 91, 0, 0).into(), 16)];
        set(vec![Attribute::Peers(vec![
            peer(client_key, None, &of_client),
            peer(silent_key, None, &silent),
        ])]);
    });
    client.run(|| {
        let endpoint = Some(SocketAddr::from((NODE_V4, NODE_PORT)));
        let all = [(Ipv4Addr::UNSPECIFIED.into(), 0)];
        set(vec![Attribute::Peers(vec![peer(node_key, endpoint, &all)])]);
    });

    // Before: both are silent, and nobody is at the other end.
    let silent = |allowed: &[&str]| WireGuardPeer {
        endpoint: false,
        handshake_s: None,
        received: 0,
        sent: 0,
        allowed: allowed.iter().map(|&text| text.to_owned()).collect(),
    };
    let before = node.run(|| wg0(&collected(&lab)));
    let ifindex = node.run(|| index("wg0"));
    assert_eq!(before.ifindex, ifindex);
    let mut peers = before.peers;
    for peer in &mut peers {
        peer.allowed.sort();
    }
    peers.sort_by(|a, b| a.allowed.cmp(&b.allowed));
    assert_eq!(peers, [silent(&["10.90.0.2/32", "fd00:90::2/128"]), silent(&["10.91.0.0/16"])]);

    // A question and an answer through the tunnel: a handshake, and bytes both ways.
    let wait = Some(Duration::from_secs(60));
    let server = node.run(|| UdpSocket::bind((NODE_TUNNEL, 5353)).expect("a socket"));
    let asker = client.run(|| UdpSocket::bind((CLIENT_TUNNEL, 0)).expect("a socket"));
    server.set_read_timeout(wait).and_then(|()| asker.set_read_timeout(wait)).expect("a limit");
    asker.send_to(b"question", (NODE_TUNNEL, 5353)).expect("sent");
    let mut buffer = [0; 64];
    let (length, from) = server.recv_from(&mut buffer).expect("the question, through the tunnel");
    assert_eq!((&buffer[..length], from.ip()), (b"question".as_slice(), CLIENT_TUNNEL.into()));
    server.send_to(b"answer", from).expect("sent");
    let (length, _) = asker.recv_from(&mut buffer).expect("the answer, through the tunnel");
    assert_eq!(&buffer[..length], b"answer");

    let (evidence, counted) = node.run(|| (collected(&lab), counters(client_key)));
    let device = node.run(|| wg0(&evidence));
    let heard = device.peers.iter().find(|peer| peer.endpoint).expect("a peer with an endpoint");
    let age = heard.handshake_s.expect("a handshake");
    assert!(age <= started.elapsed().as_secs() + 1, "{age} s ago: before the test began");
    assert_eq!((heard.received, heard.sent), counted);
    assert!(heard.received > 0 && heard.sent > 0, "{heard:?}");
    assert!(heard.allowed.contains(&"10.90.0.2/32".to_owned()), "{heard:?}");
    let others: Vec<_> = device.peers.iter().filter(|peer| !peer.endpoint).collect();
    assert_eq!(others, [&silent(&["10.91.0.0/16"])]);

    // No key of anybody is in what would be saved.
    let saved = serde_json::to_string(&evidence).expect("JSON");
    for byte in ["17", "34", "51"] {
        assert!(!saved.contains(&format!("{byte},{byte},{byte}")), "the key of {byte} is there");
    }
    // The client's address is the endpoint, which is not kept either.
    assert!(!saved.contains(&format!("{CLIENT_V4}:{CLIENT_PORT}")));
}
