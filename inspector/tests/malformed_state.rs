//! Each malformed state, made in real maps by changing what a real Cilium had written: the finding
//! says so with its numbers, and the unchanged maps do not raise it.
//!
//! Needs root and bpf(2); fails without.

mod run;

use std::net::IpAddr;

use inspector::{
    cilium::{
        proto::Protocol,
        reverse_nat::ReverseNat,
        services::{Scope, ServiceKey},
    },
    sys::host,
};
use inspector_lab::{Agent, Lab, MapHandle};
use run::{Ran, maps_alone, on};

/// A frontend with two backends, in either family.
const WEB: [&str; 2] = ["192.168.2.20", "fd00:2::20"];

struct Node {
    lab: Lab,
    vip: IpAddr,
}

impl Node {
    fn new(capture: &str, vip: &str) -> Self {
        let lab = Lab::builder().project(capture).up().expect("a lab");
        Self { lab, vip: vip.parse().expect("an address") }
    }

    fn ask(&self) -> Ran {
        maps_alone(&self.lab, &["vip", &self.vip.to_string(), "-o", "json"])
    }

    fn map(&self, table: &str) -> MapHandle {
        let family = if self.vip.is_ipv4() { 4 } else { 6 };
        self.lab.map(&format!("cilium_lb{family}_{table}")).expect("a map")
    }

    fn key(&self, port: u16, protocol: Protocol, slot: u16) -> ServiceKey {
        ServiceKey { address: self.vip, port, protocol, scope: Scope::External, slot }
    }

    /// Changes an entry of the services map.
    fn change(&self, key: &ServiceKey, change: impl FnOnce(&mut [u8])) {
        let services = self.map("services_v2");
        let bytes = key.encode();
        let mut value = services.lookup(&bytes).expect("a look-up").expect("an entry");
        change(&mut value);
        services.update(&bytes, &value).expect("an update");
    }

    fn set_count(&self, count: u16) {
        let master = self.key(443, Protocol::TCP, 0);
        self.change(&master, |value| value[4..6].copy_from_slice(&count.to_le_bytes()));
    }

    fn name(&self) -> String {
        match self.vip {
            IpAddr::V4(vip) => format!("{vip}:443/TCP"),
            IpAddr::V6(vip) => format!("[{vip}]:443/TCP"),
        }
    }

    /// The backend that a slot names.
    fn backend(&self, slot: u16) -> u32 {
        let key = self.key(443, Protocol::TCP, slot).encode();
        let value = self.map("services_v2").lookup(&key).expect("a look-up").expect("a slot");
        u32::from_le_bytes(value[..4].try_into().expect("4 bytes"))
    }
}

/// Checks that nothing is wrong: the counter-test of each state.
#[track_caller]
fn sound(ran: &Ran) {
    assert_eq!(ran.code, Some(3), "{ran:?}");
    // Other labs may be up on this machine.
    let bad: Vec<_> = ran
        .findings()
        .into_iter()
        .filter(|(id, severity, _)| severity != "note" && id != "two-bpffs")
        .collect();
    assert_eq!(bad, [], "{ran:?}");
}

/// Checks that a finding is there once, how bad it is and what was seen.
#[track_caller]
fn found(ran: &Ran, id: &str, severity: &str, seen: &str) {
    let all = ran.findings();
    let these: Vec<_> = all.iter().filter(|one| one.0 == id).collect();
    assert!(these.len() == 1, "{id} in {all:#?}");
    assert_eq!((these[0].1.as_str(), these[0].2.as_str()), (severity, seen));
}

/// The share of a frontend on each path on which a client comes from outside.
#[track_caller]
fn shares(ran: &Ran) -> Vec<Option<f64>> {
    let verdict = &ran.json()["verdict"];
    let paths = verdict["paths"].as_array().expect("paths").clone();
    let shares: Vec<_> = paths
        .iter()
        .filter(|path| path["path"].as_str().expect("a path").starts_with("forwarded"))
        .map(|path| path["share"].as_f64())
        .collect();
    assert!(!shares.is_empty(), "{ran:?}");
    shares
}

#[test]
fn a_slot_whose_backend_is_gone() {
    for vip in WEB {
        let node = Node::new("v1.21-tcx", vip);
        let before = node.ask();
        sound(&before);
        assert!(shares(&before).iter().all(Option::is_none), "{before:?}");

        let gone = node.backend(2);
        let backends = node.map("backends_v3");
        let kept = backends.lookup(&gone.to_le_bytes()).expect("a look-up").expect("a backend");
        backends.delete(&gone.to_le_bytes()).expect("a delete");
        let name = node.name();
        let ran = node.ask();
        assert_eq!(ran.code, Some(1), "{ran:?}");
        assert_eq!(ran.json()["verdict"]["served"], "partly");
        let seen =
            format!("{name}: 1 of 2 slots lead nowhere: slot 2 (backend is not there {gone})");
        found(&ran, "frontend-slot-dangling", "error", &seen);
        assert!(shares(&ran).iter().all(|share| *share == Some(0.5)), "{ran:?}");

        // Three of four.
        for slot in [3, 4] {
            let first = node.key(443, Protocol::TCP, 1).encode();
            let services = node.map("services_v2");
            let value = services.lookup(&first).expect("a look-up").expect("a slot");
            services.update(&node.key(443, Protocol::TCP, slot).encode(), &value).expect("a slot");
        }
        node.set_count(4);
        let ran = node.ask();
        assert!(shares(&ran).iter().all(|share| *share == Some(0.75)), "{ran:?}");
        assert!(ran.seen("frontend-slot-dangling")[0].contains("1 of 4 slots"), "{ran:?}");
        let table = maps_alone(&node.lab, &["vip", vip]).out;
        assert!(table.contains("at most 75 %"), "{table}");

        // A slot behind the count is never chosen: nothing is lost.
        node.set_count(1);
        let ran = node.ask();
        assert_eq!(ran.code, Some(3), "{ran:?}");
        assert_eq!(ran.seen("frontend-slot-dangling"), [""; 0]);

        node.set_count(2);
        backends.delete(&node.backend(1).to_le_bytes()).expect("a delete");
        let ran = node.ask();
        assert_eq!((ran.code, &ran.json()["verdict"]["served"]), (Some(1), &"no".into()));
        assert!(ran.seen("frontend-slot-dangling")[0].contains("2 of 2 slots"), "{ran:?}");
        backends.update(&gone.to_le_bytes(), &kept).expect("an update");
        assert!(shares(&node.ask()).iter().all(|share| *share == Some(0.5)));
    }
}

#[test]
fn a_count_larger_than_the_slots_that_are_there() {
    for vip in WEB {
        let node = Node::new("v1.21-tcx", vip);
        sound(&node.ask());
        let name = node.name();
        node.set_count(5);
        let ran = node.ask();
        assert_eq!(ran.code, Some(1), "{ran:?}");
        let seen = format!(
            "{name}: 3 of 5 slots lead nowhere: slot 3 (slot is not there), slot 4 (slot is not \
             there), slot 5 (slot is not there)"
        );
        found(&ran, "frontend-slot-dangling", "error", &seen);
        assert!(shares(&ran).iter().all(|share| *share == Some(0.4)), "{ran:?}");
        let list = on(&node.lab, &["lb", "list"]);
        let says = format!("inspect: {name}: 3 of 5 slots are not there, from slot 3\n");
        assert_eq!((list.code, list.err), (Some(0), says));

        // A hole, and the worst count.
        node.map("services_v2").delete(&node.key(443, Protocol::TCP, 1).encode()).expect("gone");
        node.set_count(2);
        let list = on(&node.lab, &["service", "list"]);
        let says = format!("inspect: {name}: slot 1 of 2 is not there\n");
        assert_eq!((list.code, list.err), (Some(0), says));
        node.set_count(u16::MAX);
        let ran = node.ask();
        let seen = &ran.seen("frontend-slot-dangling")[0];
        assert!(seen.contains("65534 of 65535 slots lead nowhere"), "{seen}");
        assert!(seen.ends_with("and 65526 more") && seen.len() < 500, "{seen}");
        for form in ["table", "markdown"] {
            let text = maps_alone(&node.lab, &["vip", vip, "-o", form]).out;
            assert!(text.contains("3 to 65535"), "{text}");
            assert!(text.lines().count() < 200, "{} lines", text.lines().count());
        }
    }
}

#[test]
fn a_master_without_slots() {
    for vip in WEB {
        let node = Node::new("v1.21-tcx", vip);
        sound(&node.ask());
        for slot in [1, 2] {
            let key = node.key(443, Protocol::TCP, slot).encode();
            node.map("services_v2").delete(&key).expect("a delete");
        }
        let ran = node.ask();
        assert_eq!((ran.code, &ran.json()["verdict"]["served"]), (Some(1), &"no".into()));
        let seen = format!(
            "{}: 2 of 2 slots lead nowhere: slot 1 (slot is not there), slot 2 (slot is not there)",
            node.name()
        );
        found(&ran, "frontend-slot-dangling", "error", &seen);
        assert!(ran.json()["verdict"]["sentence"].as_str().expect("text").starts_with("NO: "));
    }
}

#[test]
fn slots_without_a_master() {
    for vip in WEB {
        let node = Node::new("v1.21-tcx", vip);
        sound(&node.ask());
        let key = node.key(443, Protocol::TCP, 0).encode();
        node.map("services_v2").delete(&key).expect("a delete");
        let ran = node.ask();
        assert_eq!((ran.code, &ran.json()["verdict"]["served"]), (Some(1), &"no".into()));
        let seen = format!("{} has 2 slots and no master entry", node.name());
        found(&ran, "frontend-master-missing", "error", &seen);
        let list = on(&node.lab, &["lb", "list"]);
        let says = format!("inspect: {}: 2 slots without a master entry\n", node.name());
        assert_eq!((list.code, list.err), (Some(0), says));
    }
}

#[test]
fn flag_bits_that_the_release_does_not_know() {
    let node = Node::new("v1.13-clsact", WEB[0]);
    let before = node.ask();
    assert_eq!(before.seen("frontend-unknown-flags"), [""; 0], "{before:?}");
    node.change(&node.key(443, Protocol::ANY, 0), |value| value[9] |= 0xc0);
    let seen = "192.168.2.20:443: flag bits 0xc000 mean nothing in this Cilium release";
    found(&node.ask(), "frontend-unknown-flags", "warning", seen);
}

#[test]
fn a_scope_that_no_release_writes() {
    let node = Node::new("v1.21-tcx", WEB[0]);
    sound(&node.ask());
    let services = node.map("services_v2");
    let master = node.key(443, Protocol::TCP, 0);
    let value = services.lookup(&master.encode()).expect("a look-up").expect("an entry");
    let odd = ServiceKey { scope: Scope::Other(7), ..master };
    services.update(&odd.encode(), &value).expect("an update");
    let ran = node.ask();
    let seen = "192.168.2.20:443/TCP: scope 7 is neither external (0) nor internal (1)";
    found(&ran, "map-not-read", "warning", seen);

    // Nothing but such an entry.
    let alone = Node { vip: "192.168.2.99".parse().expect("an address"), ..node };
    assert_eq!(alone.ask().code, Some(1), "no frontend at all");
    let odd = ServiceKey { address: alone.vip, ..odd };
    services.update(&odd.encode(), &value).expect("an update");
    let ran = alone.ask();
    assert_eq!(ran.code, Some(3), "{ran:?}");
    let sentence = ran.json()["verdict"]["sentence"].as_str().expect("text").to_owned();
    assert!(sentence.starts_with("CANNOT TELL: ") && sentence.contains("scope"), "{sentence}");

    // Nothing but an internal one: a sentence, not half of one.
    services.delete(&odd.encode()).expect("a delete");
    let inside = ServiceKey { scope: Scope::Internal, ..odd };
    services.update(&inside.encode(), &value).expect("an update");
    let ran = alone.ask();
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let sentence = ran.json()["verdict"]["sentence"].as_str().expect("text").to_owned();
    assert!(sentence.contains("443/TCP has no entry for clients from outside"), "{sentence}");
}

#[test]
fn a_reverse_nat_entry_that_is_gone_or_wrong() {
    for vip in WEB {
        let node = Node::new("v1.21-tcx", vip);
        sound(&node.ask());
        let master = node.key(443, Protocol::TCP, 0).encode();
        let value = node.map("services_v2").lookup(&master).expect("a look-up").expect("an entry");
        let index = u16::from_be_bytes([value[6], value[7]]);
        let reverse = node.map("reverse_nat");
        let right = ReverseNat { index, address: node.vip, port: 443 };
        let (key, value) = right.encode();
        assert_eq!(reverse.lookup(&key).expect("a look-up"), Some(value));

        let wrong = ReverseNat { port: 8443, ..right };
        reverse.update(&key, &wrong.encode().1).expect("an update");
        let name = node.name();
        let restored = name.replace(":443/TCP", ":8443");
        let ran = node.ask();
        let seen = format!("{name}: reverse NAT entry {index} restores {restored}");
        found(&ran, "reverse-nat-missing", "error", &seen);
        assert_eq!((ran.code, &ran.json()["verdict"]["served"]), (Some(1), &"no".into()));
        let table = maps_alone(&node.lab, &["vip", vip]).out;
        assert!(table.contains("NAT WRONG") || table.contains("WRONG"), "{table}");

        reverse.delete(&key).expect("a delete");
        let ran = node.ask();
        let seen = format!("{name}: reverse NAT entry {index} is not there");
        found(&ran, "reverse-nat-missing", "error", &seen);
        assert_eq!(ran.code, Some(1), "{ran:?}");
    }
}

/// Writes the agent's sign of life: `seconds` ago, or in the future.
fn set_alive(lab: &Lab, seconds: i64) {
    let now = i64::try_from(host::monotonic().as_nanos()).expect("not that long ago");
    let alive = now - seconds * 1_000_000_000;
    let map = lab.map("cilium_runtime_config").expect("a map");
    map.update(&1_u32.to_ne_bytes(), &alive.to_ne_bytes()).expect("an update");
}

#[test]
fn an_agent_that_is_dead_or_from_the_future() {
    let node = Node::new("v1.21-tcx", WEB[0]);
    let answering = |ran: &Ran| ran.json()["programmed"]["announcement"]["answering"] == true;
    for alive in [0, 1, 13] {
        set_alive(&node.lab, alive);
        let ran = node.ask();
        sound(&ran);
        assert!(answering(&ran), "{alive} s: {ran:?}");
    }
    // A machine that booted a moment ago has no time so long ago.
    for silent in [16, 25] {
        set_alive(&node.lab, silent);
        let ran = node.ask();
        let seen = format!("the agent's last sign of life was {silent} s ago");
        found(&ran, "agent-dead", "warning", &seen);
        assert!(!answering(&ran), "{ran:?}");
        let ran = maps_alone(&node.lab, &["vip", WEB[0], "--expect", "announced"]);
        assert_eq!(ran.code, Some(1), "{ran:?}");
    }
    set_alive(&node.lab, -3600);
    let ran = node.ask();
    let seen = "the agent's last sign of life lies in the future, which the datapath takes for \
                long ago";
    found(&ran, "agent-dead", "warning", seen);
    assert!(!answering(&ran), "{ran:?}");

    let map = node.lab.map("cilium_runtime_config").expect("a map");
    map.update(&1_u32.to_ne_bytes(), &[0; 8]).expect("an update");
    let ran = node.ask();
    let seen = "the agent has given no sign of life since this node booted";
    found(&ran, "agent-dead", "warning", seen);

    // The captured liveness is that of another machine, long gone or not yet here.
    let lab = Lab::builder().project("v1.21-tcx").agent(Agent::Dead).up().expect("a lab");
    let ran = maps_alone(&lab, &["vip", WEB[0], "-o", "json"]);
    assert_eq!(ran.seen("agent-dead").len(), 1, "{ran:?}");
}

#[test]
fn scopes_with_as_many_but_other_backends_differ() {
    // externalTrafficPolicy Local with a pod here: two scopes.
    let node = Node::new("v1.21-tcx", "192.168.2.31");
    let services = node.map("services_v2");
    let entries = services.entries().expect("the entries");
    let mine: Vec<ServiceKey> = entries
        .iter()
        .filter_map(|entry| ServiceKey::decode("cilium_lb4_services_v2", &entry.key).ok())
        .filter(|key| key.address == node.vip && key.port != 0)
        .collect();
    let before = node.ask();
    assert!(before.seen("scopes-differ")[0].contains("1 backends in the external scope, 2"));

    // The internal scope gets one backend too: the other one.
    let inside = |slot: u16| {
        let key = mine.iter().find(|key| key.scope == Scope::Internal && key.slot == slot);
        *key.expect("an entry")
    };
    let outside = mine.iter().find(|key| key.scope == Scope::External && key.slot == 1);
    let used = services.lookup(&outside.expect("a slot").encode()).expect("a look-up");
    let used = used.expect("a slot")[..4].to_vec();
    let other = [1, 2]
        .map(|slot| services.lookup(&inside(slot).encode()).expect("a look-up").expect("a slot"))
        .into_iter()
        .find(|value| value[..4] != used)
        .expect("another backend");
    services.update(&inside(1).encode(), &other).expect("an update");
    node.change(&inside(0), |value| value[4..6].copy_from_slice(&1_u16.to_le_bytes()));
    let seen = &node.ask().seen("scopes-differ")[0];
    assert!(seen.contains("1 backends in the external scope, other backends, 1 in"), "{seen}");

    // The same backend in both: no difference.
    let mut same = other;
    same[..4].copy_from_slice(&used);
    services.update(&inside(1).encode(), &same).expect("an update");
    assert_eq!(node.ask().seen("scopes-differ"), [""; 0]);
}
