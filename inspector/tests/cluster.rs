//! Three lab nodes on one LAN, each with maps, programs and an announcer of its own: the two-node
//! story told by the merged evidence, what `diff` says before and after the fix, and what really
//! happens to a client meanwhile.
//!
//! Needs root, bpf(2), a cgroup2 mount and TUN devices; fails without.

mod node;
mod run;

use std::{
    fs,
    io::Write,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::Stdio,
};

use inspector::{
    cilium::{
        proto::Protocol,
        services::{Scope, ServiceKey},
    },
    evidence::file::Document,
    judge::{cluster, diff},
};
use inspector_lab::{Capture, Lab, Ns, evidence::evidence};
use node::Node;
use run::{Ran, inspect, run};
use serde_json::Value;
use tempfile::TempDir;

const VIP: &str = "192.168.2.22";
const TCP: (u16, Protocol) = (25565, Protocol::TCP);

fn key(vip: &str, place: (u16, Protocol), scope: Scope, slot: u16) -> [u8; 12] {
    let address = vip.parse().expect("an address");
    let key = ServiceKey { address, port: place.0, protocol: place.1, scope, slot };
    key.encode().try_into().expect("an IPv4 key")
}

/// Gives 192.168.2.22:25565/TCP externalTrafficPolicy Local: with its backend here, or without.
fn make_local(node: &Node, here: bool) {
    let services = node.0.map("cilium_lb4_services_v2").expect("a map");
    let value = |key: &[u8]| services.lookup(key).expect("a look-up").expect("an entry");
    let put = |key: &[u8], value: &[u8]| services.update(key, value).expect("an update");
    let own = key(VIP, TCP, Scope::External, 0);
    let number = value(&own)[6..8].to_vec();
    let slot = value(&key(VIP, TCP, Scope::External, 1));
    // The entries of VIPs that are so: .31 with a pod here, .21 without.
    let (like, place) = if here {
        ("192.168.2.31", (80, Protocol::TCP))
    } else {
        ("192.168.2.21", (8443, Protocol::TCP))
    };
    for scope in [Scope::External, Scope::Internal] {
        let mut master = value(&key(like, place, scope, 0));
        master[6..8].copy_from_slice(&number);
        if here {
            master[4..6].copy_from_slice(&1_u16.to_ne_bytes());
        }
        put(&key(VIP, TCP, scope, 0), &master);
        let slot = match (here, scope) {
            (true, _) => Some(slot.clone()),
            (false, Scope::Internal) => {
                let mut other = value(&key(like, place, scope, 1));
                other[6..8].copy_from_slice(&number);
                Some(other)
            }
            (false, _) => None,
        };
        match slot {
            Some(slot) => put(&key(VIP, TCP, scope, 1), &slot),
            None => services.delete(&key(VIP, TCP, scope, 1)).expect("a delete"),
        }
    }
}

/// Gives 192.168.2.22:25565/TCP externalTrafficPolicy Cluster: the entries that Cilium had for it.
fn make_cluster(node: &Node) {
    let capture = Capture::project("v1.21-tcx").expect("a capture");
    let captured = capture.map("cilium_lb4_services_v2").expect("its services");
    let of_frontend = |key: &[u8]| {
        let own = key_of_frontend();
        key[..6] == own[..6] && key[8] == own[8]
    };
    let services = node.0.map("cilium_lb4_services_v2").expect("a map");
    for entry in services.entries().expect("its entries") {
        let stays = captured.entries.iter().any(|one| one.key == entry.key);
        if of_frontend(&entry.key) && !stays {
            services.delete(&entry.key).expect("a delete");
        }
    }
    let captured: Vec<_> = captured.entries.iter().filter(|one| of_frontend(&one.key)).collect();
    assert!(captured.len() > 1, "the capture has a master and a slot");
    for entry in captured {
        services.update(&entry.key, &entry.value).expect("an update");
    }
}

fn key_of_frontend() -> [u8; 12] {
    key(VIP, TCP, Scope::External, 0)
}

/// Key of the responder entry of the VIP on a node's eno1.
fn responder(node: &Node) -> Vec<u8> {
    let address: Ipv4Addr = VIP.parse().expect("an address");
    [&address.octets()[..], &node.index("eno1").to_le_bytes()].concat()
}

fn announce(node: &Node, yes: bool) {
    let map = node.0.map("cilium_l2_responder_v4").expect("a map");
    let key = responder(node);
    let there = map.lookup(&key).expect("a look-up").is_some();
    match (yes, there) {
        (true, false) => map.update(&key, &[0; 8]).expect("an update"),
        (false, true) => map.delete(&key).expect("a delete"),
        _ => {}
    }
}

struct Cluster {
    nodes: Vec<Node>,
    folder: TempDir,
}

impl Cluster {
    /// Three nodes of the same Cilium, their switches joined, of which the first announces the VIP
    /// and the second has its backend.
    fn new() -> Self {
        let labs = Lab::builder().project("v1.21-tcx").datapath(true).up_cluster(3);
        let labs = labs.expect("labs (this test needs root, bpf(2), a cgroup2 mount, TUN devices)");
        let nodes: Vec<Node> = labs.into_iter().map(Node).collect();
        for (index, node) in nodes.iter().enumerate() {
            make_local(node, index == 1);
            announce(node, index == 0);
        }
        Self { nodes, folder: TempDir::new().expect("a folder") }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Evidence of each node about the VIP, under host names of their own.
    fn collect(&self, moment: &str) -> Vec<PathBuf> {
        let mut files = Vec::new();
        for (index, node) in self.nodes.iter().enumerate() {
            let file = self.path(&format!("{moment}-n{}.json", index + 1));
            let ran = node.inspect(&["vip", VIP, "--save", file.to_str().expect("UTF-8")]);
            assert!(ran.code.is_some_and(|code| code < 2), "{ran:?}");
            files.push(file);
        }
        files
    }

    /// Whether a client in the LAN gets an answer, with nothing in its ARP cache.
    fn client(&self) -> bool {
        self.nodes[0].ip(Ns::Client, "neigh flush all");
        self.nodes[1].0.set_agent_alive().expect("a sign of life");
        self.nodes[0].connect(Ns::Client, "tcp", VIP, 25565).ok
    }
}

fn merge(files: &[PathBuf], arguments: &[&str]) -> Ran {
    let files = files.iter().map(|file| file.to_str().expect("UTF-8"));
    let all: Vec<&str> = ["evidence", "merge"].into_iter().chain(files).collect();
    run(&mut inspect([&all[..], arguments].concat()))
}

fn ids(cluster: &Value) -> Vec<String> {
    let findings = cluster["findings"].as_array().expect("findings");
    findings.iter().map(|one| one["id"].as_str().expect("text").to_owned()).collect()
}

#[test]
fn the_two_node_story_from_three_nodes_in_one_command() {
    let cluster = Cluster::new();
    assert!(!cluster.client(), "the announcer has no backend");
    let before = cluster.collect("before");

    let ran = merge(&before, &["-o", "json"]);
    assert_eq!((ran.code, ran.err.as_str()), (Some(1), ""), "{ran:?}");
    let merged = ran.json();
    let sentence = merged["sentence"].as_str().expect("a sentence");
    assert_eq!(merged["announcers"], serde_json::json!(["n1"]), "{sentence}");
    assert_eq!(
        sentence,
        "PARTLY: n1 announces 192.168.2.22, but 25565/TCP has externalTrafficPolicy Local and no \
         backend there, its backends are on n2; n2 could"
    );
    assert_eq!(ids(&merged), ["announced-no-local-backend"], "{merged:#}");
    let seen = merged["findings"][0]["seen"].as_str().expect("text");
    assert!(seen.ends_with("0 backends there; n2 has"), "{seen}");

    // The same with `vip`, in every form, and from one stream as logs have it.
    let from: Vec<&str> =
        before.iter().flat_map(|file| ["--from", file.to_str().expect("UTF-8")]).collect();
    for form in ["table", "json", "markdown", "junit", "github", "html"] {
        let merged = merge(&before, &["-o", form]);
        let asked = run(&mut inspect([&["vip", VIP, "-o", form], &from[..]].concat()));
        assert_eq!((asked.code, &asked.out), (merged.code, &merged.out), "{form}");
        for word in ["n1", "n2", "n3", "announced-no-local-backend"] {
            assert!(merged.out.contains(word), "{form}: no {word} in {}", merged.out);
        }
    }
    let mut stream = String::new();
    for node in &cluster.nodes {
        let ran = node.inspect(&["vip", VIP, "-o", "evidence"]);
        assert_eq!(ran.out.lines().count(), 1, "one line for each node");
        stream += &ran.out;
    }
    let mut child = inspect(["evidence", "merge", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program runs");
    child.stdin.take().expect("a pipe").write_all(stream.as_bytes()).expect("it reads");
    let output = child.wait_with_output().expect("it ends");
    let table = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(table.starts_with(sentence), "{table}");
    let junit = merge(&before, &["-o", "junit"]).out;
    let document = roxmltree::Document::parse(&junit).expect("XML");
    let failed = |name: &str| {
        document.descendants().any(|node| {
            node.has_tag_name("failure")
                && node.parent().and_then(|case| case.attribute("name")) == Some(name)
        })
    };
    assert!(failed("announced-no-local-backend") && failed("served"), "{junit}");

    // The lease moves to the node with the backend: served, and the client sees it.
    announce(&cluster.nodes[0], false);
    announce(&cluster.nodes[1], true);
    assert!(cluster.client(), "n2 announces and has the backend, over the joined LAN");
    let after = cluster.collect("after");
    let ran = merge(&after, &[]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(
        ran.out.starts_with("YES: n2 announces 192.168.2.22 and serves it; n1, n3 would not"),
        "{ran:?}"
    );
    // What changed on the first node, in the words of the domain.
    let differ = |one: &Path, other: &Path, more: &[&str]| {
        let files = [one.to_str().expect("UTF-8"), other.to_str().expect("UTF-8")];
        run(&mut inspect([&["evidence", "diff"], &files[..], more].concat()))
    };
    let ran = differ(&before[0], &after[0], &[]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    for line in
        ["responder entry on eno1 gone", "this node: answers for it -> does not answer for it"]
    {
        assert!(ran.out.contains(line), "no `{line}` in {}", ran.out);
    }
    let ran = differ(&before[0], &before[0], &["--ignore", "none"]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "no difference\n"));
    let ran = differ(&before[2], &after[2], &["--ignore", "ids,counters,times,neighbours"]);
    assert_eq!(ran.code, Some(0), "nothing happened on the third node: {ran:?}");
    // The other fix: Cluster. Back to the first announcer, with the policy of the UDP twin.
    let ran = differ(&before[0], &before[1], &["-o", "json"]);
    let changes = ran.json()["changes"].to_string();
    assert!(changes.contains("backends that can be chosen"), "{changes}");
}

/// The policy flipped to Cluster on every node, as an operator would, and flipped back.
#[test]
fn the_policy_flipped_and_back_is_named_by_diff_and_seen_by_a_client() {
    let cluster = Cluster::new();
    let differ = |one: &Path, other: &Path, more: &[&str]| {
        let files = [one.to_str().expect("UTF-8"), other.to_str().expect("UTF-8")];
        run(&mut inspect([&["evidence", "diff"], &files[..], more].concat()))
    };
    let expects = |files: &[PathBuf], claims: &[&str]| {
        let claims: Vec<&str> = claims.iter().flat_map(|claim| ["--expect", claim]).collect();
        let from = files.iter().flat_map(|file| ["--from", file.to_str().expect("UTF-8")]);
        let all: Vec<&str> = ["vip", VIP, "-o", "json"].into_iter().chain(from).collect();
        run(&mut inspect([&all[..], &claims].concat()))
    };
    assert!(!cluster.client(), "Local: the announcer has no backend");
    let local = cluster.collect("local");
    assert_eq!(ids(&merge(&local, &["-o", "json"]).json()), ["announced-no-local-backend"]);

    cluster.nodes.iter().for_each(make_cluster);
    assert!(cluster.client(), "Cluster: whoever announces it serves it");
    let flipped = cluster.collect("flipped");
    let ran = merge(&flipped, &[]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(
        ran.out
            .starts_with("YES: n1 announces 192.168.2.22 and serves it; so would every other node"),
        "{ran:?}"
    );
    assert!(ids(&merge(&flipped, &["-o", "json"]).json()).is_empty());

    // The announcer, before and after, in the words of the domain.
    let ran = differ(&local[0], &flipped[0], &[]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    for line in [
        "externalTrafficPolicy: Local -> Cluster",
        "backends that can be chosen: 0 -> 1",
        "25565/TCP: no-backend (served: no) -> dnat-before-neigh (served: yes)",
        "finding announced-no-local-backend on 192.168.2.22:25565/TCP gone",
    ] {
        assert!(ran.out.contains(line), "no `{line}` in {}", ran.out);
    }
    // What did not change is not told: who announces it, programs, devices.
    for word in ["responder entry", "cil_from_netdev", "device "] {
        assert!(!ran.out.contains(word), "{word} in {}", ran.out);
    }
    // On the node that has the backend the policy alone changed, not whether it serves.
    let ran = differ(&local[1], &flipped[1], &["-o", "json"]);
    let changes = ran.json()["changes"].as_array().expect("changes").clone();
    assert!(changes.iter().any(|one| one["what"] == "externalTrafficPolicy"), "{changes:#?}");
    assert!(changes.iter().all(|one| one["what"] != "served"), "{changes:#?}");

    // And back.
    cluster.nodes.iter().enumerate().for_each(|(index, node)| make_local(node, index == 1));
    assert!(!cluster.client(), "Local again");
    let back = cluster.collect("back");
    for (one, other) in local.iter().zip(&back) {
        // Whom a node knows by ARP moves by itself.
        let ran = differ(one, other, &["--ignore", "ids,counters,times,neighbours"]);
        assert_eq!((ran.code, ran.out.as_str()), (Some(0), "no difference\n"));
    }
    let ran = differ(&flipped[0], &back[0], &[]);
    assert!(ran.out.contains("externalTrafficPolicy: Cluster -> Local"), "{ran:?}");

    claims_about_several_nodes(&local, &flipped, &expects);
    masked_when_merged(&cluster, &local);
}

/// Claims are held against the cluster, or against each node by its name.
fn claims_about_several_nodes(
    local: &[PathBuf],
    flipped: &[PathBuf],
    expects: &dyn Fn(&[PathBuf], &[&str]) -> Ran,
) {
    let told = |ran: &Ran| -> Vec<(String, Option<String>, String)> {
        let json = ran.json();
        let all = json["expectations"].as_array().expect("expectations");
        let text = |value: &Value| value.as_str().map(str::to_owned);
        all.iter()
            .map(|one| {
                (
                    text(&one["claim"]).expect("a claim"),
                    text(&one["node"]),
                    text(&one["met"]).expect("a word"),
                )
            })
            .collect()
    };
    let row = |claim: &str, node: Option<&str>, met: &str| {
        (claim.to_owned(), node.map(str::to_owned), met.to_owned())
    };
    let claims = ["served", "announced", "no-errors", "has-backend"];
    let ran = expects(flipped, &claims);
    assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""), "{ran:?}");
    let mut wanted = vec![row("served", None, "yes"), row("announced", None, "yes")];
    wanted.push(row("no-errors", None, "yes"));
    for claim in ["no-errors", "has-backend"] {
        wanted.extend(["n1", "n2", "n3"].map(|node| row(claim, Some(node), "yes")));
    }
    assert_eq!(told(&ran), wanted);
    // The same claims where two nodes have no backend.
    let ran = expects(local, &claims);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let found = told(&ran);
    for (claim, node, met) in [
        ("served", None, "no"),
        ("announced", None, "yes"),
        ("no-errors", None, "no"),
        ("has-backend", Some("n1"), "no"),
        ("has-backend", Some("n2"), "yes"),
        ("has-backend", Some("n3"), "no"),
    ] {
        assert!(found.contains(&row(claim, node, met)), "{claim} {node:?}: {found:#?}");
    }
    // Claims alone decide: what is wrong, and is expected, is no failure.
    let finding = "finding:announced-no-local-backend";
    let ran = expects(local, &["not-announced@wg0", finding, "no-finding:announced-twice"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let ran = expects(flipped, &[finding]);
    assert_eq!((ran.code, told(&ran)), (Some(1), vec![row(finding, None, "no")]));
    let ran = expects(local, &["not-announced"]);
    assert_eq!((ran.code, told(&ran)), (Some(1), vec![row("not-announced", None, "no")]));
    // Each form has them, and each node by its name.
    for form in ["table", "json", "markdown", "junit", "github", "html"] {
        let ran = merge(local, &["-o", form, "--expect", "has-backend"]);
        assert_eq!(ran.code, Some(1), "{form}: {ran:?}");
        assert!(ran.out.contains("has-backend"), "{form}: {}", ran.out);
    }
    let junit = merge(local, &["-o", "junit", "--expect", "has-backend"]).out;
    let document = roxmltree::Document::parse(&junit).expect("XML");
    let failed: Vec<_> = document
        .descendants()
        .filter(|node| node.has_tag_name("failure"))
        .filter_map(|node| node.parent()?.attribute("name"))
        .collect();
    assert_eq!(failed, ["has-backend on n1", "has-backend on n3"], "claims alone fail: {junit}");
}

/// Evidence that is saved together is masked where that is wanted, and says the same.
fn masked_when_merged(cluster: &Cluster, files: &[PathBuf]) {
    let mut sources = Vec::new();
    for (index, file) in files.iter().enumerate() {
        let text = fs::read(file).expect("evidence");
        let mut value: Value = serde_json::from_slice(&text).expect("JSON");
        let client = format!("203.0.113.{}", index + 1);
        let mut arguments = value["tool"]["arguments"].as_array().expect("arguments").clone();
        arguments.extend(["--source".into(), client.clone().into()]);
        value["tool"]["arguments"] = arguments.into();
        value["network"]["routes"][0]["source"] = client.clone().into();
        sources.push(client);
        let changed = Document::resealed(value.to_string().as_bytes()).expect("evidence");
        changed.write(file).expect("a file");
    }
    let saved = cluster.path("merged.json");
    let save = ["--save", saved.to_str().expect("UTF-8")];
    let plain = merge(files, &save);
    let text = fs::read_to_string(&saved).expect("a file");
    assert!(sources.iter().all(|client| text.contains(client)), "the clients are there at first");
    let masked = merge(files, &[&save[..], &["--mask", "clients"]].concat());
    assert_eq!((masked.code, &masked.out), (plain.code, &plain.out));
    let text = fs::read_to_string(&saved).expect("a file");
    for client in &sources {
        assert!(!text.contains(client.as_str()), "{client} in the masked file");
    }
    let documents = Document::read_all(&saved).expect("evidence with good hashes");
    assert_eq!(documents.len(), files.len());
    let again = merge(&[saved], &[]);
    assert_eq!((again.code, &again.out), (plain.code, &plain.out), "the verdict stays");
}

#[test]
fn no_announcer_two_of_them_and_a_backend_that_its_node_does_not_know() {
    let cluster = Cluster::new();
    announce(&cluster.nodes[0], false);
    let merged = merge(&cluster.collect("none"), &["-o", "json"]);
    assert_eq!(merged.code, Some(1), "{merged:?}");
    assert_eq!(ids(&merged.json()), ["announced-nowhere"], "{}", merged.out);

    announce(&cluster.nodes[1], true);
    announce(&cluster.nodes[2], true);
    let merged = merge(&cluster.collect("two"), &["-o", "json"]);
    assert_eq!(merged.code, Some(1), "{merged:?}");
    let found = ids(&merged.json());
    assert_eq!(found, ["announced-no-local-backend", "announced-twice"], "{}", merged.out);

    // The first node takes a backend to be on the second, which knows nothing of it.
    let first = &cluster.nodes[0].0;
    announce(&cluster.nodes[2], false);
    let services = first.map("cilium_lb4_services_v2").expect("a map");
    let slot = services.lookup(&key(VIP, TCP, Scope::Internal, 1)).expect("a look-up");
    let backends = first.map("cilium_lb4_backends_v3").expect("a map");
    let backend = backends.lookup(&slot.expect("a slot")[..4]).expect("a look-up").expect("it");
    let ipcache = first.map("cilium_ipcache_v2").expect("a map");
    let mut entry_key = vec![64, 0, 0, 0, 0, 0, 0, 1];
    entry_key.extend(&backend[..4]);
    entry_key.extend([0; 12]);
    let mut value = vec![0; 24];
    value[..4].copy_from_slice(&1234_u32.to_ne_bytes());
    value[4..8].copy_from_slice(&[192, 168, 2, 11]);
    ipcache.update(&entry_key, &value).expect("an update");
    let merged = merge(&cluster.collect("lost"), &["-o", "json"]).json();
    let findings = merged["findings"].as_array().expect("findings");
    let one = findings.iter().find(|one| one["id"] == "backend-not-on-its-node");
    let seen = one.unwrap_or_else(|| panic!("{merged:#}"))["seen"].as_str().expect("text");
    assert!(seen.starts_with("n1 sends to ") && seen.contains("on n2 (192.168.2.11)"), "{seen}");
}

/// From captures, without a kernel: nodes of different versions, and every class of difference.
#[test]
fn captures_are_compared_and_merged_as_they_are() {
    let of = |name: &str, vip: &str| {
        let capture = Capture::project(name).expect("a capture");
        evidence(&capture, vip.parse().expect("a VIP")).expect("evidence")
    };
    let (one, other) = (of("v1.18-tcx", "192.168.2.20"), of("v1.18-wg0-detached", "192.168.2.20"));
    let changes = diff::diff(&one, &other, &diff::Class::MOVING).expect("a comparison");
    let lines: Vec<String> =
        changes.iter().map(|change| format!("{} | {change}", change.part)).collect();
    assert!(
        lines.contains(
            &"forwarded via wg0 | 443/TCP: dnat-before-neigh (served: yes) -> untranslated \
              (served: no)"
                .to_owned()
        ),
        "{lines:#?}"
    );
    assert!(
        lines.iter().any(|line| line.starts_with("device wg0 | cil_from_netdev on tcx ingress")
            && line.ends_with("gone")),
        "{lines:#?}"
    );
    let same = diff::diff(&one, &one, &[]).expect("a comparison");
    assert!(same.is_empty(), "{same:?}");
    diff::diff(&one, &of("v1.18-tcx", "192.168.2.21"), &[]).expect_err("another VIP");

    let merged = cluster::judge([&one, &other], "192.168.2.20".parse().expect("a VIP"));
    let merged = merged.expect("a judgement");
    let names: Vec<&str> = merged.nodes.iter().map(|node| node.name.as_str()).collect();
    assert_eq!(names, ["captured", "captured#2"], "the same host name is told apart");
}
