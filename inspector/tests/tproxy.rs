//! Rules that hand packets to a local proxy, as `inspect vip` reads them: on a lab, with rules made
//! by the very tools.
//!
//! Needs root, bpf(2), nftables in the kernel, and the packages iptables and nftables (installed,
//! or unpacked by `cargo xtask setup`); fails without.

mod common;
mod netfilter;

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use inspector::evidence::{SourceStatus, file::Document, network::Tproxy};
use inspector_lab::{Lab, Ns};
use netfilter::{root, shell, with_tools};

/// What `inspect vip 192.168.2.30` finds, with the tools in reach or not.
fn found(lab: &Lab, root: Option<&Path>) -> (Vec<Tproxy>, SourceStatus, Option<String>) {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("evidence.json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_inspect"));
    command.args(["vip", "192.168.2.30", "--save"]).arg(&file).arg("--netns");
    command.arg(lab.netns(Ns::Node).expect("the node")).env("INSPECT_BPFFS", lab.bpffs());
    if let Some(root) = root {
        with_tools(&mut command, root);
    }
    let output: Output = command.output().expect("the program runs");
    assert!(file.exists(), "{}", String::from_utf8_lossy(&output.stderr));
    let evidence = Document::read(&file).expect("evidence").evidence;
    let source = evidence.sources.into_iter().find(|one| one.what == "TPROXY rules");
    let source = source.expect("the source");
    (evidence.network.expect("the network").tproxy, source.status, source.reason)
}

fn rule(port: u16, protocol: &str, ipv6: bool) -> Tproxy {
    // The mark of Cilium's proxies: the port in network byte order above 0x200.
    let mark = (u32::from(port.swap_bytes()) << 16) | 0x200;
    Tproxy { mark: (mark, u32::MAX), port, protocol: Some(protocol.to_owned()), ipv6 }
}

#[test]
fn rules_are_read_from_every_store() {
    let root = root();
    let lab = Lab::builder().project("v1.21-l7lb").network(true).up().expect("a lab");
    assert_eq!(found(&lab, Some(&root)), (Vec::new(), SourceStatus::Complete, None));

    let chain = |tool: &str, address: &str, port: u16, mark: &str| {
        format!(
            "{tool} -t mangle -N CILIUM_PRE_mangle
             {tool} -t mangle -A CILIUM_PRE_mangle -p tcp -m mark --mark {mark} -m comment \
             --comment 'cilium: TPROXY to host cilium proxy' -j TPROXY --on-port {port} \
             --on-ip {address} --tproxy-mark 0x200/0xffffffff
             {tool} -t mangle -A PREROUTING -m comment --comment 'cilium-feeder' \
             -j CILIUM_PRE_mangle\n"
        )
    };
    // 10042 is 0x273a, and 0x3a27 the other way round.
    shell(&lab, &root, &chain("iptables-nft", "127.0.0.1", 10042, "0x3a270200"));
    let of_iptables = vec![rule(10042, "tcp", false)];
    assert_eq!(found(&lab, Some(&root)), (of_iptables.clone(), SourceStatus::Complete, None));

    shell(&lab, &root, &chain("ip6tables-nft", "::1", 10042, "0x3a270200"));
    shell(
        &lab,
        &root,
        "nft add table inet t
         nft add chain inet t pre '{ type filter hook prerouting priority mangle; }'
         nft add rule inet t pre meta l4proto udp meta mark 0x3b270200 tproxy ip to :10043",
    );
    // Without the counters: the lab has traffic of its own.
    let before = shell(&lab, &root, "nft -s list ruleset");
    let (rules, status, reason) = found(&lab, Some(&root));
    let expected = [rule(10042, "tcp", false), rule(10042, "tcp", true), rule(10043, "udp", false)];
    assert_eq!((rules.as_slice(), status, reason), (&expected[..], SourceStatus::Complete, None));
    assert_eq!(shell(&lab, &root, "nft -s list ruleset"), before, "asking changed something");

    // The counter-test: a chain that no packet reaches.
    shell(&lab, &root, "iptables-nft -t mangle -F PREROUTING");
    assert_eq!(found(&lab, Some(&root)).0, expected[1..]);
}

#[test]
fn rules_of_iptables_legacy_are_read() {
    let root = root();
    let lab = Lab::builder().project("v1.21-l7lb").network(true).up().expect("a lab");
    shell(
        &lab,
        &root,
        "XTABLES_LOCKFILE=/dev/null iptables-legacy -t mangle -A PREROUTING -p tcp -m mark \
         --mark 0x3a270200 -j TPROXY --on-port 10042 --on-ip 127.0.0.1",
    );
    let names = lab.run_in(Ns::Node, || {
        fs::read_to_string("/proc/thread-self/net/ip_tables_names").expect("ip_tables")
    });
    assert_eq!(names.expect("the node"), "mangle\n");
    let (rules, status, reason) = found(&lab, Some(&root));
    assert_eq!((rules, reason), (vec![rule(10042, "tcp", false)], None));
    assert_eq!(status, SourceStatus::Complete);
}

#[test]
fn tools_that_are_not_there_are_said() {
    // Only where the system has none: what is installed cannot be hidden from the program.
    let lab = Lab::builder().project("v1.21-l7lb").network(true).up().expect("a lab");
    let (rules, status, reason) = found(&lab, None);
    assert_eq!(rules, []);
    let there = ["iptables-nft-save", "ip6tables-nft-save", "nft"]
        .iter()
        .filter(|tool| Path::new("/usr/sbin").join(tool).exists())
        .count();
    match there {
        3 => assert_eq!((status, reason), (SourceStatus::Complete, None)),
        0 => {
            assert_eq!(status, SourceStatus::Absent);
            assert!(reason.expect("a reason").starts_with("not installed: iptables-nft-save"));
        }
        _ => {
            assert_eq!(status, SourceStatus::Partial);
            assert!(reason.expect("a reason").starts_with("not installed: "));
        }
    }
}
