//! `inspect check`: the node is read once for all VIPs of the file, and each is answered as `inspect
//! vip` answers it.
//!
//! Needs root, bpf(2), a cgroup2 mount and TUN devices; fails without.

mod node;
mod run;

use std::{
    fmt::Write as _,
    fs,
    net::Ipv4Addr,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use inspector_lab::Lab;
use node::Node;
use run::on;
use serde_json::Value;
use tempfile::TempDir;

/// Writes a file that expects something of each VIP.
fn list(folder: &Path, vips: &[&str]) -> String {
    let mut text = String::from("vips:\n");
    for vip in vips {
        writeln!(text, "  - vip: \"{vip}\"\n    expect: [served]").expect("text");
    }
    let path = folder.join("vips.yaml");
    fs::write(&path, text).expect("a file");
    path.to_str().expect("UTF-8").to_owned()
}

/// Evidence, one document a line.
fn documents(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// Takes out what is of the moment or of the command line.
fn timeless(mut document: Value) -> Value {
    let members = document.as_object_mut().expect("an object");
    for name in ["time", "tool", "sha256", "verdict"] {
        assert!(members.remove(name).is_some(), "no {name}");
    }
    let programs = members["attachments"]["programs"].as_array_mut().expect("programs");
    for program in programs {
        for name in ["run_count", "run_time_ns"] {
            program.as_object_mut().expect("a program").remove(name);
        }
    }
    document
}

/// With and without backends, with a policy, a proxy, source ranges, IPv6, and one that is none; a
/// port of one, and one twice.
#[test]
fn every_vip_is_answered_as_if_it_were_asked_for_alone() {
    for capture in ["v1.21-tcx", "v1.18-clsact"] {
        let node = Node::new(capture);
        let folder = TempDir::new().expect("a folder");
        let maps = ["cilium_lb4_services_v2", "cilium_lb6_services_v2"];
        let mut vips: Vec<String> = Vec::new();
        for (map, length) in maps.into_iter().zip([4, 16]) {
            for entry in node.0.map(map).expect("a map").entries().expect("its entries") {
                let key = &entry.key;
                let address: std::net::IpAddr = if length == 4 {
                    <[u8; 4]>::try_from(&key[..4]).expect("four bytes").into()
                } else {
                    <[u8; 16]>::try_from(&key[..16]).expect("sixteen bytes").into()
                };
                let address = address.to_string();
                if !vips.contains(&address) {
                    vips.push(address);
                }
            }
        }
        assert!(vips.iter().any(|vip| vip.contains(':')), "no IPv6 among {vips:?}");
        assert!(vips.len() > 8, "only {vips:?}");
        vips.extend(["192.168.2.22:25565/tcp", "192.168.2.22", "203.0.113.9"].map(str::to_owned));
        let all: Vec<&str> = vips.iter().map(String::as_str).collect();
        let list = list(folder.path(), &all);

        let together = node.inspect(&["check", &list, "-o", "evidence"]);
        assert_eq!((together.code, together.err.as_str()), (Some(0), ""), "{}", together.err);
        let together = documents(&together.out);
        assert_eq!(together.len(), vips.len(), "one document for each, in their order");
        for (vip, document) in vips.iter().zip(&together) {
            let alone = node.inspect(&["vip", vip, "-o", "evidence"]);
            let alone = documents(&alone.out).remove(0);
            let sentence = |one: &Value| one["verdict"]["sentence"].clone();
            assert_eq!(sentence(document), sentence(&alone), "{capture} {vip}");
            let (document, alone) = (timeless(document.clone()), timeless(alone));
            for (name, value) in document.as_object().expect("an object") {
                // The sign of life is renewed for each run.
                if name == "maps" {
                    let still = |maps: &Value| -> Vec<Value> {
                        let maps = maps.as_array().expect("maps").iter().cloned();
                        maps.filter(|map| map["name"] != "cilium_runtime_config").collect()
                    };
                    assert_eq!(still(value), still(&alone[name]), "{capture} {vip}: {name}");
                } else {
                    assert_eq!(*value, alone[name], "{capture} {vip}: {name}");
                }
            }
        }
    }
}

/// A counter in a map runs meanwhile: every document has it as it was at one moment.
#[test]
fn the_maps_are_read_once_for_all_vips() {
    const VIP: &str = "192.168.2.22";
    let lab = Lab::builder().project("v1.21-tcx").up();
    let lab = lab.expect("a lab (this test needs root and bpf(2))");
    let address: Ipv4Addr = VIP.parse().expect("an address");
    let key = [&address.octets()[..], &1_u32.to_le_bytes()].concat();
    let folder = TempDir::new().expect("a folder");
    let list = list(folder.path(), &[VIP; 30]);
    let digits_of_key = inspector_lab::capture::encode_hex(&key);
    let over = AtomicBool::new(false);
    let count = |document: &Value| -> u64 {
        let maps = document["maps"].as_array().expect("maps");
        let map = maps.iter().find(|map| map["name"] == "cilium_l2_responder_v4").expect("the map");
        let entries = map["entries"].as_array().expect("entries");
        let entry = entries.iter().find(|entry| entry["key"] == *digits_of_key).expect("the entry");
        let digits = entry["value"].as_str().expect("digits");
        u64::from_str_radix(digits, 16).expect("eight bytes").swap_bytes()
    };
    let (together, alone) = thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let map = lab.map("cilium_l2_responder_v4").expect("a map");
            let mut number = 1_u64;
            while !over.load(Ordering::Relaxed) {
                map.update(&key, &number.to_ne_bytes()).expect("an update");
                number += 1;
            }
            number
        });
        let together = on(&lab, &["check", &list, "-o", "evidence"]);
        // The control: two runs see two moments.
        let alone = [(); 2].map(|()| on(&lab, &["vip", VIP, "-o", "evidence"]).out);
        over.store(true, Ordering::Relaxed);
        assert!(writer.join().expect("the writer") > 100, "the counter did not run");
        (documents(&together.out), alone)
    });
    let [one, other] = alone.map(|text| count(&documents(&text)[0]));
    assert_ne!(one, other, "the counter stands still");
    assert_eq!(together.len(), 30);
    let seen: Vec<u64> = together.iter().map(count).collect();
    assert!(seen.iter().all(|one| *one == seen[0] && *one > 0), "several moments: {seen:?}");
    let started = |document: &Value| document["time"]["started"].clone();
    assert!(together.iter().all(|one| started(one) == started(&together[0])));
}
