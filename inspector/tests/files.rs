//! Evidence as files: who may read what is saved, what is too large to be any, what `verify` says to
//! programs, and a whole node compared with itself.
//!
//! Needs root and bpf(2); fails without.

mod run;

use std::{
    fs::{self, File},
    os::unix::fs::PermissionsExt,
    path::Path,
    process::Stdio,
};

use inspector::evidence::file::{Document, LIMIT};
use inspector_lab::{Capture, Lab, evidence::evidence};
use run::{Ran, inspect, on, run};
use serde_json::{Value, json};
use tempfile::TempDir;

fn mode(path: &Path) -> u32 {
    fs::metadata(path).expect("a file").permissions().mode() & 0o7777
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

fn save(path: &Path, vip: &str) {
    let capture = Capture::project("v1.21-tcx").expect("a capture");
    let evidence = evidence(&capture, vip.parse().expect("a VIP")).expect("evidence");
    Document::new(evidence).write(path).expect("a file");
}

#[test]
fn saved_evidence_is_its_makers_alone_unless_the_file_was_there() {
    let folder = TempDir::new().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let (one, other) = (at("one.json"), at("other.json"));
    save(&one, "192.168.2.22");
    save(&other, "192.168.2.22");
    let list = at("list.yaml");
    fs::write(&list, "vips:\n  - vip: 192.168.2.22\n").expect("a file");
    let (from, list) = (text(&one).to_owned(), text(&list).to_owned());
    let ways: [&[&str]; 4] = [
        &["vip", "192.168.2.22", "--from", &from],
        &["evidence", "judge", &from],
        &["check", &list, "--from", &from],
        &["evidence", "merge", &from, text(&other)],
    ];
    for (number, arguments) in ways.into_iter().enumerate() {
        let saved = at(&format!("saved{number}.json"));
        let write = || {
            let ran = run(&mut inspect([arguments, &["--save", text(&saved)]].concat()));
            assert!(ran.code.is_some_and(|code| code < 2) && ran.err.is_empty(), "{ran:?}");
            Document::read_all(&saved).expect("evidence");
        };
        write();
        assert_eq!(mode(&saved), 0o600, "{arguments:?}: new");
        // Whoever opened it to others, and gave it away, is not overruled.
        fs::set_permissions(&saved, fs::Permissions::from_mode(0o640)).expect("chmod");
        std::os::unix::fs::chown(&saved, Some(1234), Some(2345)).expect("chown (needs root)");
        write();
        assert_eq!(mode(&saved), 0o640, "{arguments:?}: replaced");
        let metadata = fs::metadata(&saved).expect("a file");
        let owner = (
            std::os::unix::fs::MetadataExt::uid(&metadata),
            std::os::unix::fs::MetadataExt::gid(&metadata),
        );
        assert_eq!(owner, (1234, 2345), "{arguments:?}");
    }
}

#[test]
fn what_is_too_large_to_be_evidence_is_refused_with_its_limit() {
    let folder = TempDir::new().expect("a folder");
    let large = folder.path().join("large.json");
    // A hole takes no room on the disk.
    File::create(&large).expect("a file").set_len(LIMIT + 1).expect("a size");
    let words = ["larger than the 256 MiB", "ten thousand services take 21 MiB"];
    for from in [text(&large), "/dev/zero"] {
        run(&mut inspect(["vip", "192.168.2.22", "--from", from])).refused(2, &words);
        run(&mut inspect(["evidence", "merge", from])).refused(2, &words);
    }
    let mut command = inspect(["evidence", "judge", "-"]);
    command.stdin(Stdio::from(File::open("/dev/zero").expect("zeros")));
    run(&mut command).refused(2, &words);
    // As much as is read: not refused for its size.
    File::options().write(true).open(&large).expect("it").set_len(LIMIT).expect("a size");
    run(&mut inspect(["evidence", "judge", text(&large)])).refused(2, &["it is not JSON"]);
}

#[test]
fn verify_tells_programs_what_it_tells_people() {
    let folder = TempDir::new().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let (good, edited, none) = (at("good.json"), at("edited.json"), at("none.json"));
    save(&good, "192.168.2.22");
    let whole = Document::read(&good).expect("evidence");
    let changed = fs::read_to_string(&good).expect("text");
    let changed = changed.replacen("\"minor\": 1", "\"minor\": 2", 1);
    fs::write(&edited, changed).expect("a file");
    fs::write(&none, "{").expect("a file");
    let verify = |files: &[&Path], more: &[&str]| {
        let files: Vec<&str> = files.iter().map(|file| text(file)).collect();
        run(&mut inspect([&["evidence", "verify"], &files[..], more].concat()))
    };
    let ran = verify(&[&good], &["-o", "json"]);
    assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""), "{ran:?}");
    let wanted = json!({
        "schema": "inspector.verify/1",
        "good": true,
        "files": [{ "file": text(&good), "whole": true, "sha256": whole.sha256 }],
    });
    assert_eq!(ran.json(), wanted);

    let ran = verify(&[&good, &edited], &["-o", "json"]);
    assert_eq!((ran.code, ran.err.as_str()), (Some(1), ""), "{ran:?}");
    let said = ran.json();
    assert_eq!(said["good"], false);
    let bad = &said["files"][1];
    assert_eq!((&bad["whole"], &bad["sha256"]), (&json!(false), &Value::Null), "{bad}");
    let error = bad["error"].as_str().expect("why");
    assert!(error.contains("was changed after it was collected"), "{error}");
    // The same sentences for people.
    let told = verify(&[&good, &edited], &[]);
    assert_eq!(told.code, ran.code);
    assert!(told.out.contains(error) && told.out.contains(&whole.sha256), "{told:?}");
    // What is no evidence is an error, and told of in both forms.
    let ran = verify(&[&none, &good], &["-o", "json"]);
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(ran.err.contains("cut off") && ran.json()["good"] == false, "{ran:?}");
    assert_eq!(ran.json()["files"][1]["whole"], true);
    verify(&[&good], &["-o", "junit"]).refused(2, &["use one of table, json"]);
}

/// Bytes of the services map: flags at 8 and 9 of the value, count at 4 and 5.
#[test]
fn a_whole_node_is_compared_by_vip() {
    let lab = Lab::builder().project("v1.21-tcx").up();
    let lab = lab.expect("a lab (this test needs root and bpf(2))");
    let folder = TempDir::new().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let collect = |name: &str, arguments: &[&str]| {
        let path = at(name);
        let ran = on(&lab, &[arguments, &["--save", text(&path)]].concat());
        assert_eq!(ran.code, Some(0), "{ran:?}");
        path
    };
    let differ = |one: &Path, other: &Path, more: &[&str]| -> Ran {
        run(&mut inspect([&["evidence", "diff", text(one), text(other)], more].concat()))
    };
    let before = collect("before.json", &["service", "list"]);
    let again = collect("again.json", &["lb", "list"]);
    let ran = differ(&before, &again, &[]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "no difference\n"), "{ran:?}");

    // One VIP loses its only backend to maintenance, another its frontend, and a backend is left
    // that nobody has.
    let services = lab.map("cilium_lb4_services_v2").expect("a map");
    let backends = lab.map("cilium_lb4_backends_v3").expect("a map");
    let of = |vip: [u8; 4]| {
        let all = services.entries().expect("entries");
        all.into_iter().filter(move |entry| entry.key[..4] == vip).collect::<Vec<_>>()
    };
    let gone = of([192, 168, 2, 20]);
    assert!(gone.len() > 1, "it has a master and slots");
    for entry in &gone {
        services.delete(&entry.key).expect("a delete");
    }
    let slots = of([192, 168, 2, 22]);
    let slot = slots.iter().find(|entry| entry.key[6..8] != [0, 0]).expect("a slot");
    let id = &slot.value[..4];
    let mut backend = backends.lookup(id).expect("a look-up").expect("a backend");
    // State, after address, port and protocol: maintenance.
    backend[7] = 3;
    backends.update(id, &backend).expect("an update");
    let mut stray = backend.clone();
    stray[..4].copy_from_slice(&[203, 0, 113, 5]);
    stray[7] = 0;
    backends.update(&60_000_u32.to_ne_bytes(), &stray).expect("an update");

    let after = collect("after.json", &["service", "list"]);
    let ran = differ(&before, &after, &[]);
    assert_eq!((ran.code, ran.err.as_str()), (Some(1), ""), "{ran:?}");
    let lines: Vec<&str> = ran.out.lines().collect();
    // Grouped by VIP, those without a change left out.
    let heads: Vec<&str> = lines.iter().copied().filter(|line| !line.starts_with(' ')).collect();
    assert!(heads.contains(&"192.168.2.20") && heads.contains(&"192.168.2.22"), "{heads:?}");
    assert!(heads.contains(&"node") && !heads.contains(&"192.168.2.24"), "{heads:?}");
    let below = |head: &str| -> Vec<&str> {
        let rest = lines.iter().copied().skip_while(move |line| *line != head).skip(1);
        rest.take_while(|line| line.starts_with(' ')).map(str::trim).collect()
    };
    assert!(below("192.168.2.20").contains(&"frontend gone"), "{ran:?}");
    let changed = below("192.168.2.22");
    assert!(
        changed.iter().any(|line| line.contains(": active, ") && line.contains("-> maintenance, ")),
        "{changed:?}"
    );
    let of_node = below("node");
    assert!(
        of_node.iter().any(|line| line.starts_with("backend 203.0.113.5:")
            && line.ends_with(" of no frontend new (active)")),
        "{of_node:?}"
    );
    let json = differ(&after, &before, &["-o", "json"]).json();
    let back = json["changes"].as_array().expect("changes");
    assert!(
        back.iter().any(|one| one["vip"] == "192.168.2.20"
            && one["what"] == "frontend"
            && one["before"].is_null()),
        "{back:#?}"
    );
    // What cannot be compared is refused, not taken for equal.
    let ids = collect("backends.json", &["lb", "list", "--backends"]);
    differ(&ids, &ids, &[]).refused(3, &["no services with their backends"]);
    let vip = at("vip.json");
    save(&vip, "192.168.2.22");
    differ(&before, &vip, &[]).refused(3, &["all services of a node", "one VIP"]);
}
