//! Injection on a real `WireGuard` device: no peer has ever connected, and the whole way is seen.
//!
//! Not every machine's kernel has WireGuard, so that `cargo test` leaves this file out unless it is
//! named; `cargo xtask test` runs it in virtual machines. Needs root.

mod node;
mod run;

use inspector_lab::{
    Ns,
    wireguard::{self, Attribute, PeerAttribute},
};
use node::{Node, answer, contents, path};

const WEB: &str = "192.168.2.20";
const WG0: &str = "forwarded via wg0";

/// When the peer was last heard of: seconds and nanoseconds of its handshake.
fn handshakes(node: &Node) -> Vec<Vec<PeerAttribute>> {
    let read = || wireguard::get("wg0").expect("what the kernel says of wg0");
    let attributes = node.0.run_in(Ns::Node, read).expect("the node");
    let peers = attributes.into_iter().filter_map(|attribute| match attribute {
        Attribute::Peers(peers) => Some(peers),
        _ => None,
    });
    peers
        .flatten()
        .map(|peer| {
            let is_contact = |one: &PeerAttribute| {
                matches!(one, PeerAttribute::Endpoint(_))
                    || matches!(one, PeerAttribute::RxBytes(bytes) if *bytes > 0)
            };
            peer.0.into_iter().filter(is_contact).collect()
        })
        .collect()
}

#[test]
fn the_whole_way_is_seen_though_no_peer_ever_connected() {
    for vip in [WEB, "fd00:2::20"] {
        let node = Node::with_wireguard("v1.21-tcx");
        let before = contents(&node);
        // Nobody was ever there, and it is said.
        assert_eq!(handshakes(&node), [Vec::new()]);
        let ran = node.vip(&[vip, "--via", "wg0"]);
        assert_eq!(ran.seen("no-client-yet").len(), 1, "{ran:?}");
        assert_eq!(path(&ran, "443/TCP", WG0)["grade"], "programmed");

        let ran = node.vip(&[vip, "--via", "wg0", "--inject", "--yes"]);
        assert_eq!((ran.code, answer(&ran).0.as_str()), (Some(0), "yes"), "{ran:?}");
        let seen = path(&ran, "443/TCP", WG0);
        assert_eq!(
            (&seen["outcome"], &seen["grade"]),
            (&"dnat-before-neigh".into(), &"observed".into())
        );
        let injected = &seen["injected"];
        assert_eq!(injected["proves"], true, "{injected:#}");
        let answer = &injected["conclusion"]["answer"];
        // The answer leaves through wg0 as the VIP, where no peer has the client's address.
        assert_eq!((&answer["syn_ack"], &answer["as_vip"]), (&true.into(), &true.into()));
        assert_eq!(injected["conclusion"]["vip_lookups"]["kind"], "none", "{injected:#}");
        assert_eq!(injected["control"]["good"], true, "{injected:#}");
        let to = injected["answer_to"].as_str().expect("text");
        assert!(to.starts_with("nobody: no WireGuard peer on wg0 has "), "{to}");
        assert_eq!(handshakes(&node), [Vec::new()]);
        assert_eq!(contents(&node), before);
    }
}

/// The counter-test: without Cilium's program on wg0 the VIP is looked up, and the peer's own packets
/// fare as the injected one did.
#[test]
fn a_peer_fares_as_the_injected_packet_did() {
    let node = Node::with_wireguard("v1.21-tcx");
    let ran = node.vip(&[WEB, "--via", "wg0", "--inject", "--yes"]);
    assert_eq!(path(&ran, "443/TCP", WG0)["served"], "yes", "{ran:?}");
    assert!(node.connect(Ns::Vpn, "tcp", WEB, 443).ok);
    assert_ne!(handshakes(&node), [Vec::new()]);

    node.detach("devices/wg0/links/cil_from_netdev");
    let ran = node.vip(&[WEB, "--via", "wg0", "--inject", "--yes"]);
    let seen = path(&ran, "443/TCP", WG0);
    assert_eq!(
        (&seen["outcome"], &seen["grade"]),
        (&"untranslated".into(), &"observed".into()),
        "{ran:?}"
    );
    assert_eq!(seen["injected"]["conclusion"]["vip_lookups"]["kind"], "seen");
    assert!(!node.connect(Ns::Vpn, "tcp", WEB, 443).ok);
}
