//! Evidence files that are kept in the tree, as earlier versions wrote them: they are read and
//! judged as they were. And what may be done to a file without changing its verdict, and what not:
//! a signature, a mask, a field of a later minor, an edit.
//!
//! The files are written anew, or more of them, with `INSPECTOR_WRITE_EVIDENCE=1`, which needs root;
//! what is there is never written over.

mod node;
mod run;

use std::{fs, path::PathBuf};

use inspector::{
    evidence::file::Document,
    judge::{self, Judgement, Severity},
};
use inspector_lab::{Capture, Ns, evidence::evidence};
use minisign::KeyPair;
use node::Node;
use run::{inspect, run, sealed};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Capture and VIP of each file.
const KEPT: [(&str, &str); 5] = [
    ("v1.13-clsact", "192.168.2.20"),
    ("v1.18-wg0-detached", "192.168.2.20"),
    ("v1.18-tcx", "192.168.2.24"),
    ("v1.21-tcx", "192.168.2.21"),
    ("v1.21-l7lb", "192.168.2.30"),
];

fn folder() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/evidence"))
}

fn file_of(minor: &str, capture: &str, vip: &str) -> PathBuf {
    folder().join(minor).join(format!("{capture}-{vip}.json"))
}

/// Frontend, path, outcome, served of each path.
fn paths(verdict: &Value) -> Vec<[String; 4]> {
    let all = verdict["paths"].as_array().expect("paths");
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    all.iter()
        .map(|one| ["frontend", "path", "outcome", "served"].map(|key| text(&one[key])))
        .collect()
}

/// Holds a judgement of today against the verdict of when the file was written: the same answer, the
/// same paths, every finding that was there, and no error that was not. Words may be better, and
/// there may be more notes.
fn same(said: &Value, now: &Judgement, what: &str) {
    let verdict = serde_json::to_value(&now.verdict).expect("JSON");
    assert_eq!(verdict["served"], said["served"], "{what}");
    assert_eq!(paths(&verdict), paths(said), "{what}");
    let found: Vec<&str> = now.verdict.findings.iter().map(|one| one.id.as_str()).collect();
    let before: Vec<&str> = said["findings"]
        .as_array()
        .expect("findings")
        .iter()
        .map(|one| one["id"].as_str().expect("an id"))
        .collect();
    for id in &before {
        assert!(found.contains(id), "{what}: {id} is not found any more: {found:?}");
    }
    for finding in now.verdict.findings.iter().filter(|one| one.severity == Severity::Error) {
        assert!(before.contains(&finding.id.as_str()), "{what}: a new error {}", finding.id);
    }
}

/// What is collected on a lab node, without what is particular to the machine that it is on.
fn collected(capture: &str, vip: &str) -> Vec<u8> {
    let node = Node::new(capture);
    // Cilium had no sign of life of the agent before 1.14.
    if node.0.pin_path("cilium_runtime_config").exists() {
        node.0.set_agent_alive().expect("a sign of life");
    }
    let alone = || {
        let mut command = inspect(["vip", vip, "-o", "evidence"]);
        run(node.0.exec_in(Ns::Node, &mut command).expect("the node"))
    };
    let ran = node.0.run_alone(None, alone).expect("mounts of its own");
    let mut value: Value = serde_json::from_str(&ran.out).expect("evidence");
    value["host"]["name"] = json!("node1");
    value["host"]["boot_id"] = json!("00000000-0000-4000-8000-000000000001");
    value["tool"]["arguments"] = json!(["inspect", "vip", vip, "-o", "evidence"]);
    sealed(value)
}

#[test]
fn kept_files_are_judged_as_they_were() {
    if std::env::var_os("INSPECTOR_WRITE_EVIDENCE").is_some() {
        for (capture, vip) in KEPT {
            let file = file_of("1.0", capture, vip);
            if !file.exists() {
                fs::create_dir_all(file.parent().expect("a folder")).expect("mkdir");
                fs::write(&file, collected(capture, vip)).expect("a file");
            }
        }
    }
    let mut count = 0;
    let mut answers = Vec::new();
    for minor in fs::read_dir(folder()).expect("the folder of kept files") {
        for file in fs::read_dir(minor.expect("an entry").path()).expect("a folder") {
            let path = file.expect("an entry").path();
            let what = path.display().to_string();
            let document = Document::read(&path).unwrap_or_else(|error| panic!("{error}"));
            let now = judge::judge(&document.evidence).unwrap_or_else(|error| panic!("{error}"));
            let said = document.evidence.verdict.as_ref().expect("what was said");
            same(said, &now, &what);
            answers.push(now.verdict.served.to_string());
            count += 1;
        }
    }
    assert!(count >= KEPT.len(), "kept files are missing: {count}");
    answers.sort();
    answers.dedup();
    assert!(answers.len() > 1, "the kept files are too alike: {answers:?}");
}

fn a_file(name: &str) -> (TempDir, PathBuf, Document) {
    let folder = TempDir::new().expect("a folder");
    let file = folder.path().join(name);
    let (capture, vip) = KEPT[2];
    let document = Document::read(&file_of("1.0", capture, vip)).expect("a kept file");
    document.write(&file).expect("a file");
    (folder, file, document)
}

#[test]
fn a_later_minor_is_read_and_an_edit_is_not() {
    let (_folder, file, document) = a_file("later.json");
    let path = file.to_str().expect("UTF-8");
    let before = run(&mut inspect(["evidence", "judge", path, "-o", "json"]));
    let mut later = document.as_json().clone();
    later["minor"] = json!(99);
    later["a_new_part"] = json!({"with": [1, 2, 3]});
    later["host"]["a_new_field"] = json!(true);
    fs::write(&file, sealed(later)).expect("a file");
    let after = run(&mut inspect(["evidence", "judge", path, "-o", "json"]));
    assert_eq!((after.code, after.out), (before.code, before.out));

    let text = fs::read_to_string(&file).expect("a file");
    fs::write(&file, text.replace("192.168.2.24", "192.168.2.25")).expect("a file");
    run(&mut inspect(["evidence", "judge", path])).refused(2, &["was changed after"]);
    fs::write(&file, &text[..text.len() / 2]).expect("a file");
    run(&mut inspect(["evidence", "judge", path])).refused(2, &["is cut off"]);
}

#[test]
fn a_signature_is_that_of_one_key_on_one_file() {
    let (folder, file, _) = a_file("signed.json");
    let path = file.to_str().expect("UTF-8");
    let at = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    for name in ["ours", "theirs"] {
        let pair = KeyPair::generate_unencrypted_keypair().expect("a key pair");
        let secret = pair.sk.to_box(None).expect("a box").into_string();
        fs::write(at(name), secret).expect("a file");
        let public = pair.pk.to_box().expect("a box").into_string();
        fs::write(at(&format!("{name}.pub")), public).expect("a file");
    }
    let verify = |key: &str| run(&mut inspect(["evidence", "verify", path, "--public-key", key]));
    verify(&at("ours.pub")).refused(2, &["signed.json.minisig"]);
    let ran = run(&mut inspect(["evidence", "sign", path, "--key", &at("ours")]));
    assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""), "{ran:?}");
    let ran = verify(&at("ours.pub"));
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(ran.out.contains("signed: evidence sha256:"), "{ran:?}");
    // The key itself serves as well as its file.
    let text = fs::read_to_string(at("ours.pub")).expect("a file");
    assert_eq!(verify(text.lines().last().expect("the key")).code, Some(0));
    let ran = verify(&at("theirs.pub"));
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.out.contains("is not signed by this key"), "{ran:?}");
    // Another document, whole in itself, under the same signature.
    let mut value = Document::read(&file).expect("evidence").as_json().clone();
    value["host"]["name"] = json!("another");
    fs::write(&file, sealed(value)).expect("a file");
    assert_eq!(run(&mut inspect(["evidence", "verify", path])).code, Some(0));
    let ran = verify(&at("ours.pub"));
    assert_eq!(ran.code, Some(1), "{ran:?}");
    // What is no key.
    verify("nonsense").refused(2, &["no usable public key"]);
    let ran = run(&mut inspect(["evidence", "sign", path, "--key", path]));
    ran.refused(2, &["no usable secret key"]);
}

#[test]
fn clients_are_masked_and_the_verdict_stays() {
    let folder = TempDir::new().expect("a folder");
    let at = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let (plain, masked) = (at("plain.json"), at("masked.json"));
    let mut outcomes = Vec::new();
    for source in ["10.6.0.11", "10.9.9.9", "192.168.2.50", "172.20.7.7"] {
        let capture = Capture::project("v1.21-tcx").expect("a capture");
        let mut query: inspector::evidence::VipQuery = "192.168.2.24".parse().expect("a VIP");
        query.source = Some(source.parse().expect("an address"));
        let mut evidence = evidence(&capture, query).expect("evidence");
        evidence.tool.arguments = vec!["--source".to_owned(), source.to_owned()];
        let said = judge::judge(&evidence).expect("a judgement");
        evidence.verdict = Some(serde_json::to_value(&said.verdict).expect("JSON"));
        outcomes.extend(said.verdict.paths.iter().map(|path| path.outcome));
        Document::new(evidence).write(plain.as_ref()).expect("a file");
        let save = ["--from", &plain, "--source", source, "--save", &masked, "--mask", "clients"];
        let ran = run(&mut inspect([&["vip", "192.168.2.24"], &save[..]].concat()));
        assert!(ran.code.is_some_and(|code| code < 2), "{ran:?}");
        let text = fs::read_to_string(&masked).expect("a file");
        let value: Value = serde_json::from_str(&text).expect("JSON");
        // A range of the Service may be one client: then its address is no secret.
        let ranges = said.programmed.frontends.iter().filter_map(|one| one.source_ranges.as_ref());
        let told = ranges.flat_map(|one| &one.ranges).any(|range| range.ends_with("/32"));
        assert!(told || !value["subject"].to_string().contains(source), "{source}: {value:#}");
        assert!(told || !value["tool"].to_string().contains(source), "{source}");
        let document = Document::read(masked.as_ref()).expect("evidence with a good hash");
        let now = judge::judge(&document.evidence).expect("a judgement");
        assert_eq!(now.verdict.served, said.verdict.served, "{source}");
        let of = |one: &Judgement| -> Vec<_> {
            one.verdict.paths.iter().map(|path| (path.path.clone(), path.outcome)).collect()
        };
        assert_eq!(of(&now), of(&said), "{source}");
    }
    outcomes.sort_by_key(|outcome| outcome.as_str());
    outcomes.dedup();
    assert!(outcomes.len() > 1, "the sources make no difference: {outcomes:?}");
    // What a WireGuard peer may send from is a client's address too.
    let capture = Capture::project("v1.21-tcx").expect("a capture");
    let mut evidence =
        evidence(&capture, "192.168.2.20".parse().expect("a VIP")).expect("evidence");
    let network = evidence.network.as_mut().expect("a network");
    network.wireguard.push(inspector::evidence::network::WireGuard {
        ifindex: 1,
        peers: vec![inspector::evidence::network::WireGuardPeer {
            endpoint: true,
            handshake_s: Some(5),
            received: 1,
            sent: 1,
            allowed: vec!["10.90.0.77/32".to_owned()],
        }],
    });
    let document = Document::new(evidence);
    let masked = inspector::evidence::mask::clients(&document).expect("a mask");
    let text = masked.as_json().to_string();
    assert!(!text.contains("10.90.0.77"), "{text}");
    let shown = &masked.as_json()["network"]["wireguard"][0]["peers"][0]["allowed"][0];
    assert!(shown.as_str().is_some_and(|one| one.starts_with("198.18.0.")), "{shown}");
    let (one, other) = (judge::judge(&document.evidence), judge::judge(&masked.evidence));
    assert_eq!(one.expect("a judgement").verdict, other.expect("a judgement").verdict);
}
