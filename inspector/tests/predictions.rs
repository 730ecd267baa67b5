//! Predicted served or not served, against what really happened to each connection of the
//! captures: from the LAN, from the VPN, from the node and from pods, IPv4 and IPv6.
//!
//! The captures are judged as evidence; no kernel takes part.

mod common;

use std::collections::BTreeMap;

use common::{CAPTURES, Probe};
use inspector::judge::{self, Judgement, Outcome, PathVerdict, Served};
use inspector_lab::{Capture, evidence::evidence};

/// The address from which a probe came.
fn source(probe: &Probe) -> Option<&'static str> {
    let v6 = probe.dst.contains(':');
    if probe.from.starts_with("client") {
        Some(if v6 { "fd00:2::50" } else { "192.168.2.50" })
    } else if probe.from.starts_with("vpn") {
        Some(if v6 { "fd00:90::2" } else { "10.90.0.2" })
    } else {
        None
    }
}

/// The path that a probe took.
fn path(probe: &Probe) -> &'static str {
    match probe.from.as_str() {
        from if from.starts_with("client") => "forwarded via eno1",
        from if from.starts_with("vpn") => "forwarded via wg0",
        from if from.starts_with("the node") => "socket on host",
        from if from.contains("in the socket-LB cgroup") => "pod",
        // Outside of the cgroup a pod's packets are on their own, as if it forwarded them.
        _ => "forwarded from pod",
    }
}

fn judged(capture: &Capture, probe: &Probe) -> Judgement {
    let mut query = probe.query();
    query.source = source(probe).map(|source| source.parse().expect("an address"));
    judge::judge(&evidence(capture, query).expect("evidence")).expect("a VIP")
}

/// The verdict on the probe's path; nothing if the VIP is no frontend.
fn verdict<'j>(judgement: &'j Judgement, probe: &Probe) -> Option<&'j PathVerdict> {
    judgement.verdict.paths.iter().find(|verdict| verdict.path == path(probe))
}

/// Where prediction and outcome differ, and why: what was seen, as `capture: path to VIP`.
const DISAGREEMENTS: &[(&str, &str)] = &[
    (
        "v1.13-clsact: forwarded via eno1 to 10.90.0.1:30443/tcp",
        "the client has no route to the address of wg0: the packet never reached the node",
    ),
    (
        "v1.13-clsact: pod to 192.168.2.31:80/tcp",
        "one of two backends is out of reach, and the one connection fell on it: predicted partly",
    ),
    (
        "v1.18-wg0-detached: forwarded via wg0 to 192.168.2.10:30443/tcp",
        "an address of the node itself: which processes listen was not captured, so unknown",
    ),
    ("v1.18-wg0-detached: forwarded via wg0 to 192.168.2.10:30080/tcp", "as above"),
    ("v1.18-wg0-detached: forwarded via wg0 to 192.168.2.10:30029/tcp", "as above"),
    ("v1.18-wg0-detached: forwarded via wg0 to fd00:2::10:30443/tcp", "as above"),
    (
        "v1.18-l7lb: forwarded via eno1 to 192.168.2.37:80/tcp",
        "the backend's node does not exist; the neighbour entry of the way there was not yet (or no \
         longer) there when neighbours were captured",
    ),
    ("v1.18-l7lb: forwarded via wg0 to 192.168.2.37:80/tcp", "as above"),
    ("v1.18-l7lb: socket on host to 192.168.2.21:8443/tcp", "as above"),
    (
        "v1.19-tcx: forwarded from pod to 10.96.0.1:443/tcp",
        "the node routes its cluster addresses to cilium_host; what that device's program does with \
         a packet for an address of nobody is not judged",
    ),
    ("v1.21-l7lb: forwarded via eno1 to 192.168.2.37:80/tcp", "as for the same VIP of v1.18-l7lb"),
    ("v1.21-l7lb: forwarded via wg0 to 192.168.2.37:80/tcp", "as above"),
    ("v1.21-l7lb: socket on host to 192.168.2.21:8443/tcp", "as above"),
];

#[test]
fn predictions_agree_with_what_happened() {
    let (mut all, mut agree) = (0, 0);
    let mut disagreements: BTreeMap<String, String> = BTreeMap::new();
    for name in CAPTURES {
        let capture = Capture::project(name).expect("a capture");
        let probes: Vec<Probe> =
            serde_json::from_str(&capture.text("probes.json").expect("probes")).expect("JSON");
        for probe in probes {
            // A loopback address is no VIP.
            if probe.query().address.is_loopback() {
                continue;
            }
            all += 1;
            let judgement = judged(&capture, &probe);
            let (served, text) = match verdict(&judgement, &probe) {
                Some(verdict) => {
                    (verdict.served, format!("{} ({})", verdict.outcome, verdict.why.join("; ")))
                }
                None => (judgement.verdict.served, judgement.verdict.sentence.clone()),
            };
            let right = match served {
                Served::Yes | Served::Partly => probe.ok,
                Served::No => !probe.ok,
                Served::Unknown => false,
            };
            if right {
                agree += 1;
                continue;
            }
            let Probe { dst, port, proto, ok, .. } = &probe;
            disagreements.insert(
                format!("{name}: {} to {dst}:{port}/{proto}", path(&probe)),
                format!("predicted {served}: {text}; it {}", if *ok { "worked" } else { "failed" }),
            );
        }
    }
    eprintln!("{agree} of {all} predictions agree with what happened");
    let expected: Vec<&str> = DISAGREEMENTS.iter().map(|(what, _)| *what).collect();
    for (what, text) in &disagreements {
        let reason = DISAGREEMENTS.iter().find(|(known, _)| known == what).map(|(_, why)| *why);
        eprintln!("{what}: {text}: {}", reason.unwrap_or("UNEXPLAINED"));
        assert!(expected.contains(&what.as_str()), "{what}: {text}");
    }
    assert_eq!(
        disagreements.len(),
        expected.len(),
        "a prediction became right: {disagreements:#?}"
    );
    assert!(agree * 100 >= all * 97, "{agree} of {all}");
}

/// What the given path of the capture's VIP comes to.
fn outcome(capture: &str, vip: &str, path: &str) -> PathVerdict {
    let capture = Capture::project(capture).expect("a capture");
    let judgement =
        judge::judge(&evidence(&capture, vip.parse().expect("a VIP")).expect("evidence"))
            .expect("a VIP");
    judgement
        .verdict
        .paths
        .into_iter()
        .find(|verdict| verdict.path == path)
        .unwrap_or_else(|| panic!("no path {path}"))
}

#[test]
fn without_a_program_on_wg0_the_neighbour_matters_there_and_only_there() {
    let vpn = outcome("v1.18-wg0-detached", "192.168.2.20:443/tcp", "forwarded via wg0");
    assert_eq!((vpn.outcome, vpn.served), (Outcome::Untranslated, Served::No));
    assert_eq!(
        vpn.neighbour.as_deref(),
        Some("192.168.2.20 on eno1: FAILED (matters on this path)")
    );
    let lan = outcome("v1.18-wg0-detached", "192.168.2.20:443/tcp", "forwarded via eno1");
    assert_eq!((lan.outcome, lan.served), (Outcome::DnatBeforeNeigh, Served::Yes));
    assert_eq!(lan.neighbour.as_deref(), Some("none: local pod"));
    // The same node with the program.
    let vpn = outcome("v1.18-tcx", "192.168.2.20:443/tcp", "forwarded via wg0");
    assert_eq!((vpn.outcome, vpn.served), (Outcome::DnatBeforeNeigh, Served::Yes));
}

#[test]
fn clsact_comes_to_the_same_as_tcx() {
    for vip in ["192.168.2.20", "192.168.2.21", "192.168.2.22", "192.168.2.29", "192.168.2.32"] {
        let judged = |name: &str| {
            let capture = Capture::project(name).expect("a capture");
            let evidence = evidence(&capture, vip.parse().expect("a VIP")).expect("evidence");
            let paths = judge::judge(&evidence).expect("a VIP").verdict.paths;
            paths
                .into_iter()
                .map(|path| (path.frontend, path.path, path.outcome, path.served))
                .collect::<Vec<_>>()
        };
        assert_eq!(judged("v1.18-clsact"), judged("v1.18-tcx"), "{vip}");
    }
}

#[test]
fn an_l7_frontend_is_proxied_where_the_datapath_knows_l7() {
    for capture in ["v1.18-l7lb", "v1.21-l7lb"] {
        let lan = outcome(capture, "192.168.2.30:80/tcp", "forwarded via eno1");
        // Nobody listened on the proxy port.
        assert_eq!((lan.outcome, lan.served), (Outcome::ProxiedBeforeNeigh, Served::No));
    }
    let lan = outcome("v1.21-tcx", "192.168.2.30:80/tcp", "forwarded via eno1");
    assert_eq!((lan.outcome, lan.served), (Outcome::DnatBeforeNeigh, Served::Yes));
}

#[test]
fn pods_take_the_path_that_their_programs_give_them() {
    let pod = |capture: &str, path: &str| {
        let verdict = outcome(capture, "192.168.2.20:443/tcp", path);
        (verdict.outcome, verdict.served)
    };
    assert_eq!(pod("v1.18-tcx", "pod"), (Outcome::SocketTranslated, Served::Yes));
    assert_eq!(pod("v1.18-tcx", "forwarded from pod"), (Outcome::Untranslated, Served::No));
    let hostns = "v1.18-sock-hostns-only";
    assert_eq!(pod(hostns, "pod"), (Outcome::DnatBeforeNeigh, Served::Yes));
    assert_eq!(pod(hostns, "forwarded from pod"), (Outcome::DnatBeforeNeigh, Served::Yes));
}

#[test]
fn sockets_leave_external_ips_alone_that_are_not_of_this_node() {
    let path = |capture: &str, vip: &str, path: &str| {
        let verdict = outcome(capture, vip, path);
        (verdict.outcome, verdict.served)
    };
    for capture in ["v1.13-clsact", "v1.18-tcx", "v1.19-tcx", "v1.21-tcx"] {
        let vip = "192.168.2.33:80/tcp";
        assert_eq!(path(capture, vip, "socket on host").0, Outcome::Untranslated, "{capture}");
        assert_eq!(path(capture, vip, "pod").0, Outcome::Untranslated, "{capture}");
        let outside = path(capture, vip, "forwarded via eno1");
        assert_eq!(outside, (Outcome::DnatBeforeNeigh, Served::Yes), "{capture}");
    }
    // An address of the node itself, which nobody can be robbed of.
    for vip in ["192.168.2.10:8089/tcp", "[fd00:2::10]:8089/tcp"] {
        for from in ["socket on host", "pod"] {
            let verdict = path("v1.19-tcx", vip, from);
            assert_eq!(verdict, (Outcome::SocketTranslated, Served::Yes), "{vip} {from}");
        }
    }
    // Without backends it is refused before its type is looked at.
    let none = path("v1.19-tcx", "192.168.2.62:80/tcp", "socket on host");
    assert_eq!(none, (Outcome::NoBackend, Served::No));
}
