//! Bad input of every kind: one sentence that says what is wrong, the right exit code, nothing
//! that looks like an answer, no panic, nothing left behind.
//!
//! Needs root and bpf(2); fails without.

mod run;

use std::{
    ffi::OsStr,
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::{ffi::OsStrExt, fs::PermissionsExt, process::CommandExt},
    path::Path,
    process::Stdio,
    thread,
    time::Instant,
};

use inspector::{
    cilium::{backends::Backend, layout::MapType},
    evidence::file::{Document, FileError},
    judge,
};
use inspector_lab::{Capture, Lab, MapHandle, capture::MapSpec};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use run::{
    LB4, Ran, Stranger, captured, in_own_mounts, inspect, layout_of, maps_alone, mount_at,
    mount_cilium, names_in, on, run, sealed, spec_of, without_programs,
};
use serde_json::{Value, json};
use tempfile::TempDir;

const VIP: &str = "192.168.2.20";

fn lab() -> Lab {
    Lab::builder().project("v1.21-tcx").up().expect("a lab")
}

fn folder() -> TempDir {
    TempDir::new().expect("a folder")
}

/// Evidence about [`VIP`] as it is saved.
fn saved(lab: &Lab) -> Vec<u8> {
    let folder = folder();
    let path = folder.path().join("evidence.json");
    let ran = on(lab, &["vip", VIP, "--save", path.to_str().expect("UTF-8")]);
    assert!(ran.code != Some(2) && ran.err.is_empty(), "{ran:?}");
    assert_eq!(names_in(folder.path()), ["evidence.json"], "something else was left");
    without_programs(&fs::read(path).expect("the evidence"))
}

fn content(text: &[u8]) -> Value {
    serde_json::from_slice(text).expect("JSON")
}

/// Asks about [`VIP`] with a file of this text.
fn from(text: &[u8]) -> Ran {
    let folder = folder();
    let path = folder.path().join("evidence.json");
    fs::write(&path, text).expect("a file");
    let path = path.to_str().expect("UTF-8");
    let ran = run(&mut inspect(["vip", VIP, "--from", path]));
    for arguments in [["evidence", "show", path], ["evidence", "judge", path]] {
        let other = run(&mut inspect(arguments));
        assert_eq!(other.code == Some(2), ran.code == Some(2), "{arguments:?}: {other:?} {ran:?}");
    }
    assert_eq!(names_in(folder.path()), ["evidence.json"], "something was written");
    ran
}

#[test]
fn evidence_that_was_cut_off_is_refused_at_any_length() {
    let lab = lab();
    let text = saved(&lab);
    // The last byte is a newline, which nobody misses.
    for length in (1..text.len() - 1).step_by(61).chain(text.len() - 40..text.len() - 1) {
        match Document::parse(Path::new("cut"), &text[..length]) {
            Err(FileError::Truncated { .. }) => {}
            other => panic!("{length} of {} bytes: {other:?}", text.len()),
        }
    }
    for length in [1, 2, 100, text.len() / 2, text.len() - 2] {
        from(&text[..length]).refused(2, &["evidence.json is cut off", "collect or copy it again"]);
    }
    from(b"").refused(2, &["evidence.json is empty"]);
}

#[test]
fn evidence_with_one_bit_changed_is_never_judged() {
    let lab = lab();
    let text = saved(&lab);
    let mut by_hash = 0;
    let mut positions = 0;
    for position in (0..text.len()).step_by(17) {
        let mut changed = text.clone();
        changed[position] ^= 1 << (position % 8);
        positions += 1;
        match Document::parse(Path::new("flipped"), &changed) {
            Ok(_) => panic!("bit {} of byte {position} does not matter", position % 8),
            Err(FileError::Hash { .. }) => by_hash += 1,
            Err(_) => {}
        }
    }
    assert!(positions > 300 && by_hash > positions / 4, "{by_hash} of {positions} by the hash");

    let mut changed = text.clone();
    let at = text.windows(8).position(|window| window == b"\"value\":").expect("a value") + 10;
    changed[at] = if changed[at] == b'0' { b'1' } else { b'0' };
    from(&changed).refused(2, &["was changed after it was collected", "SHA-256"]);
}

#[test]
fn what_is_no_evidence_is_refused() {
    let lab = lab();
    let good = content(&saved(&lab));
    let with = |change: &dyn Fn(&mut Value)| {
        let mut value = good.clone();
        change(&mut value);
        from(&sealed(value))
    };

    assert_eq!(with(&|_| {}).code, Some(3), "the file itself is good");
    with(&|value| value["schema"] = json!("inspector.evidence/2"))
        .refused(2, &["inspector.evidence/2", "this version reads inspector.evidence/1"]);
    with(&|value| value["schema"] = json!(1)).refused(2, &["no field `schema`"]);
    for field in good.as_object().expect("an object").keys() {
        // What was collected later than the first minor need not be there.
        if ["sha256", "via", "maglev"].contains(&field.as_str()) {
            continue;
        }
        let words = ["no evidence file", field.as_str()];
        with(&|value| drop(value.as_object_mut().expect("an object").remove(field)))
            .refused(2, &words);
    }
    let services = good["maps"]
        .as_array()
        .expect("maps")
        .iter()
        .position(|map| map["name"] == "cilium_lb4_services_v2")
        .expect("the services map");
    let entry = |value: &mut Value, part: &str, text: &str| {
        value["maps"][services]["entries"][0][part] = json!(text);
    };
    with(&|value| entry(value, "key", "0102")).refused(2, &["key of 12", "the map has 2"]);
    with(&|value| entry(value, "key", "zz")).refused(2, &["entry 0", "hexadecimal"]);
    with(&|value| entry(value, "value", "")).refused(2, &["value of"]);
    with(&|value| value["maps"][services]["key_size"] = json!(0)).refused(2, &["key"]);
    with(&|value| value["host"]["cpus"] = json!(-1)).refused(2, &["no evidence file"]);
    with(&|value| value["subject"] = json!({"kind": "dream"})).refused(2, &["dream"]);

    from(b"not JSON\n").refused(2, &["it is not JSON"]);
    from(b"[1, 2, 3]").refused(2, &["no field `schema`"]);
    from(&vec![b'['; 100_000]).refused(2, &["it is not JSON"]);
    from(b"\xff\xfe\x00").refused(2, &["it is not JSON"]);

    let folder = folder();
    let path = folder.path().to_str().expect("UTF-8");
    run(&mut inspect(["vip", VIP, "--from", path])).refused(2, &["cannot read", "directory"]);
    run(&mut inspect(["vip", VIP, "--from", "/nonexistent/file"]))
        .refused(2, &["cannot read /nonexistent/file", "No such file"]);
    run(&mut inspect(["vip", VIP, "--from", ""])).usage(&["a value is required"]);
}

#[test]
fn numbers_that_no_kernel_gives_are_survived() {
    let lab = lab();
    let good = content(&saved(&lab));
    for (field, number) in [
        ("max_entries", json!(0)),
        ("max_entries", json!(u32::MAX)),
        ("total", json!(u64::MAX)),
        ("total", json!(u64::MAX / 10 + 1)),
        ("total", json!(0)),
        ("flags", json!(u32::MAX)),
    ] {
        let mut value = good.clone();
        for map in value["maps"].as_array_mut().expect("maps") {
            map[field] = number.clone();
        }
        let text = sealed(value);
        let document = Document::parse(Path::new("odd"), &text).expect("evidence");
        judge::judge(&document.evidence).expect("a judgement");
    }
    let mut value = good.clone();
    value["host"]["cpus"] = json!(usize::MAX);
    value["time"]["monotonic_ns"] = json!(u64::MAX);
    let metrics = json!({
        "name": "cilium_metrics", "path": "", "id": 1, "type": 5, "key_size": 8,
        "value_size": u32::MAX, "max_entries": 1, "flags": 0, "coverage": "all",
        "method": "batch", "complete": true, "entries": [],
    });
    value["maps"].as_array_mut().expect("maps").push(metrics.clone());
    let document = Document::parse(Path::new("odd"), &sealed(value.clone())).expect("evidence");
    judge::judge(&document.evidence).expect("a judgement");
    let maps = value["maps"].as_array_mut().expect("maps");
    maps.last_mut().expect("a map")["entries"] =
        json!([{"key": "0102030405060708", "value": "00"}]);
    from(&sealed(value)).refused(2, &["cilium_metrics"]);
}

#[test]
fn fields_of_a_later_minor_are_kept() {
    let lab = lab();
    let mut value = content(&saved(&lab));
    value["minor"] = json!(7);
    value["weather"] = json!({"rain": [1, 2.5, null, 1.0e300, 0.090_909_090_909_090_91]});
    value["host"]["mood"] = json!("tense");
    value["maps"][0]["colour"] = json!("green");
    value["maps"][1]["entries"][0]["taste"] = json!(18_446_744_073_709_551_615_u64);
    let text = sealed(value);
    let folder = folder();
    let (one, other) = (folder.path().join("a.json"), folder.path().join("b.json"));
    fs::write(&one, &text).expect("a file");
    let ran = run(&mut inspect([
        OsStr::new("vip"),
        OsStr::new(VIP),
        OsStr::new("--from"),
        one.as_os_str(),
        OsStr::new("--save"),
        other.as_os_str(),
    ]));
    assert_eq!((ran.code, ran.err.as_str()), (Some(3), ""), "{ran:?}");
    assert!(fs::read(&other).expect("a file") == text, "the copy differs");
    assert_eq!(names_in(folder.path()), ["a.json", "b.json"]);
}

#[test]
fn evidence_that_cannot_be_saved_leaves_the_old_file() {
    let lab = lab();
    let stranger = Stranger::new();
    let text = saved(&lab);
    let evidence = stranger.path("evidence.json");
    fs::write(&evidence, &text).expect("a file");
    fs::write(stranger.path("old.json"), "old").expect("a file");
    let before = names_in(evidence.parent().expect("a folder"));
    let save = |target: &str| {
        run(&mut stranger.inspect(&[
            "vip",
            VIP,
            "--from",
            evidence.to_str().expect("UTF-8"),
            "--save",
            target,
        ]))
    };
    // The answer that was had is given, and then what is wrong is said.
    let unsaved = |ran: &Ran, words: &[&str]| {
        assert_eq!(ran.code, Some(2), "{ran:?}");
        assert!(ran.out.contains("192.168.2.20:443/TCP"), "{ran:?}");
        assert_eq!(ran.err.lines().count(), 1, "{ran:?}");
        for word in words {
            assert!(ran.err.contains(word), "{word}: {ran:?}");
        }
    };
    let old = stranger.path("old.json");
    unsaved(&save(old.to_str().expect("UTF-8")), &["cannot write", "old.json", "denied"]);
    unsaved(&save("/nonexistent/new.json"), &["cannot write /nonexistent/new.json"]);
    unsaved(&save("/"), &["cannot write /"]);
    unsaved(&save("/dev/full"), &["cannot write /dev/full", "No space left"]);
    save("-").refused(2, &["--save takes a file"]);
    assert_eq!(fs::read(&old).expect("the old file"), b"old");
    assert_eq!(names_in(evidence.parent().expect("a folder")), before);

    // A disk that is full in the middle of it.
    let disk = folder();
    in_own_mounts(|| {
        mount_at(disk.path(), "tmpfs", Some("size=8k"));
        let old = disk.path().join("old.json");
        fs::write(&old, "old").expect("a file");
        assert!(text.len() > 8192, "fits in");
        let paths = [evidence.to_str().expect("UTF-8"), old.to_str().expect("UTF-8")];
        let ran = run(&mut inspect(["vip", VIP, "--from", paths[0], "--save", paths[1]]));
        unsaved(&ran, &["cannot write", "old.json", "No space left"]);
        assert_eq!(fs::read(&old).expect("the old file"), b"old");
        assert_eq!(names_in(disk.path()), ["old.json"]);
    });
}

/// How often a run is interrupted, later each time.
const ROUNDS: u32 = 16;

#[test]
fn an_interrupted_run_leaves_the_old_file_or_the_new_one() {
    let lab = Lab::builder().project("services-10k").up().expect("a lab");
    let folder = folder();
    let path = folder.path().join("evidence.json");
    let start = || {
        fs::write(&path, "old").expect("a file");
        inspect(["lb", "list", "--revnat", "-o", "json", "--save"])
            .arg(&path)
            .env("INSPECT_BPFFS", lab.bpffs())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program runs")
    };
    let began = Instant::now();
    assert!(start().wait().expect("an end").success());
    let whole = began.elapsed();
    let mut ended = [0, 0];
    // From the very beginning to long after the end.
    for round in 0..=ROUNDS {
        let mut child = start();
        thread::sleep(whole * round / (ROUNDS - 4));
        if round == ROUNDS {
            child.wait().expect("an end");
        }
        let pid = Pid::from_raw(i32::try_from(child.id()).expect("a process id"));
        // It may have ended by itself; until it is waited for, its number is not used again.
        if round < ROUNDS {
            kill(pid, Signal::SIGINT).expect("a signal");
        }
        let mut said = String::new();
        child.stderr.take().expect("a pipe").read_to_string(&mut said).expect("text");
        let status = child.wait().expect("an end");
        assert_eq!(said, "", "{status}");
        assert_eq!(names_in(folder.path()), ["evidence.json"], "after {round}: {status}");
        let text = fs::read(&path).expect("a file");
        let new = text != b"old";
        if new {
            Document::parse(&path, &text).expect("whole evidence");
        }
        ended[usize::from(new)] += 1;
    }
    assert!(ended[0] > 0 && ended[1] > 0, "never in between: {ended:?}");
}

#[test]
fn places_without_cilium_say_so() {
    let capture = Capture::project("v1.21-tcx").expect("a capture");
    let folder = folder();
    let place = |name: &str| folder.path().join(name);
    in_own_mounts(|| {
        run(&mut inspect(["vip", VIP])).refused(2, &["no BPF file system is mounted", "--bpffs"]);
        run(&mut inspect(["service", "list"])).refused(2, &["no Cilium state found"]);
        let doctor = run(&mut inspect(["doctor"]));
        assert_eq!(doctor.code, Some(3), "{doctor:?}");
        assert!(doctor.out.contains("Cilium's pins"), "{doctor:?}");

        mount_at(&place("tmpfs"), "tmpfs", None);
        mount_at(&place("bare"), "bpf", None);
        fs::write(place("file"), "").expect("a file");
        for (name, words) in [
            ("tmpfs", &["is no BPF file system", "tmpfs"][..]),
            ("file", &["is no BPF file system"]),
            ("nothing", &["cannot look into", "No such file", "mount point"]),
            ("bare", &["holds no Cilium maps"]),
        ] {
            let path = place(name);
            let path = path.to_str().expect("UTF-8");
            for question in [&["vip", VIP][..], &["lb", "list"], &["service", "list"]] {
                let arguments = [question, &["--bpffs", path]].concat();
                run(&mut inspect(arguments)).refused(2, &[words, &[name]].concat());
            }
        }
        run(&mut inspect(["vip", VIP])).refused(2, &["has no `tc/globals`"]);

        // Pins that a later mount hides are not Cilium's state.
        mount_cilium(&place("hidden"), &capture);
        assert_ne!(run(&mut inspect(["vip", VIP])).code, Some(2));
        mount_at(&place("hidden"), "tmpfs", None);
        run(&mut inspect(["vip", VIP])).refused(2, &["no Cilium state found"]);
        let hidden = place("hidden");
        run(&mut inspect(["vip", VIP, "--bpffs", hidden.to_str().expect("UTF-8")]))
            .refused(2, &["is no BPF file system", "tmpfs"]);
    });
}

#[test]
fn two_places_with_cilium_are_a_finding_or_a_question() {
    let capture = Capture::project("v1.21-tcx").expect("a capture");
    let folder = folder();
    let (one, other) = (folder.path().join("one"), folder.path().join("other"));
    in_own_mounts(|| {
        mount_cilium(&one, &capture);
        let alone = run(&mut inspect(["vip", VIP, "-o", "json"]));
        assert!(alone.seen("two-bpffs").is_empty(), "{alone:?}");

        mount_cilium(&other, &capture);
        let names = [one.to_str().expect("UTF-8"), other.to_str().expect("UTF-8")];
        run(&mut inspect(["vip", VIP]))
            .refused(2, &["several BPF file systems", names[0], names[1], "--bpffs"]);
        let chosen = run(&mut inspect(["vip", VIP, "-o", "json", "--bpffs", names[1]]));
        let seen = chosen.seen("two-bpffs");
        assert_eq!(seen.len(), 1, "{chosen:?}");
        assert!(seen[0].contains(&format!("read was {}", names[1])), "{seen:?}");

        // Cilium's usual place is preferred, and the other one told of.
        mount_cilium(Path::new("/sys/fs/bpf"), &capture);
        let usual = run(&mut inspect(["vip", VIP, "-o", "json"]));
        let seen = usual.seen("two-bpffs");
        assert!(
            seen[0].starts_with("3 BPF") && seen[0].ends_with("read was /sys/fs/bpf"),
            "{seen:?}"
        );
    });
}

#[test]
fn without_privilege_the_missing_one_is_named() {
    let lab = lab();
    let stranger = Stranger::new();
    let bpffs = lab.bpffs().to_str().expect("UTF-8");
    for question in [&["vip", VIP][..], &["lb", "list"], &["service", "list"]] {
        let arguments = [question, &["--bpffs", bpffs]].concat();
        run(&mut stranger.inspect(&arguments)).refused(3, &["CAP_BPF", "denied"]);
    }
    let doctor = run(&mut stranger.inspect(&["doctor", "--bpffs", bpffs]));
    assert_eq!(doctor.code, Some(3), "{doctor:?}");

    // Root without any capability may look into bpffs and not open a map.
    let by_root = stranger.path("by-root.json");
    let mut command = inspect(["vip", VIP, "--bpffs", bpffs, "--save"]);
    command.arg(&by_root);
    // SAFETY: between fork and exec the closure makes system calls and allocates nothing.
    unsafe {
        command.pre_exec(|| {
            for capability in 0..=40 {
                // That the kernel has fewer is no error here.
                libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0);
            }
            Ok(())
        });
    }
    let ran = run(&mut command);
    // Linux 6.5 and newer let everybody read maps that bpffs lets them see.
    let release = inspector::sys::host::kernel_release();
    let mut numbers = release.split(['.', '-']).map(|number| number.parse::<u32>().unwrap_or(0));
    if (numbers.next(), numbers.next()) >= (Some(6), Some(5)) {
        assert!(ran.out.contains("192.168.2.20:443/TCP"), "{ran:?}");
        let saved = Document::read(&by_root).expect("evidence");
        assert_eq!(saved.evidence.host.capabilities, [""; 0]);
    } else {
        ran.refused(3, &["CAP_BPF"]);
    }

    let evidence = stranger.path("evidence.json");
    fs::write(&evidence, saved(&lab)).expect("a file");
    let path = evidence.to_str().expect("UTF-8");
    let ran = run(&mut stranger.inspect(&["vip", VIP, "--from", path]));
    assert_eq!((ran.code, ran.err.as_str()), (Some(3), ""), "{ran:?}");
    assert!(ran.out.contains("192.168.2.20:443/TCP"), "{ran:?}");
    fs::set_permissions(&evidence, fs::Permissions::from_mode(0o600)).expect("chmod");
    run(&mut stranger.inspect(&["vip", VIP, "--from", path]))
        .refused(2, &["cannot read", "denied"]);
}

#[test]
fn a_name_that_something_else_has_costs_its_part_of_the_answer() {
    for (name, kept, lost) in [
        ("cilium_lb4_services_v2", "--backends", "--frontends"),
        ("cilium_lb4_backends_v3", "--frontends", "--backends"),
        ("cilium_lb4_reverse_nat", "--frontends", "--revnat"),
    ] {
        for folder in [false, true] {
            let lab = lab();
            let rows = |view: &str| on(&lab, &["lb", "list", view]).out.lines().count();
            let before = rows(kept);
            if folder {
                lab.unpin(name).expect("unpin");
                fs::create_dir(lab.pin_path(name)).expect("mkdir");
            } else {
                lab.put_program(name).expect("a program");
            }
            let says = format!("{name} is no map but");
            let ran = on(&lab, &["lb", "list", lost]);
            assert_eq!(ran.code, Some(3), "{ran:?}");
            assert!(ran.err.contains(&says), "{ran:?}");
            assert_eq!(rows(kept), before, "{name}: the rest is reported");

            let vip = maps_alone(&lab, &["vip", VIP, "-o", "json"]);
            assert_eq!(vip.code, Some(3), "{vip:?}");
            let seen = vip.seen("map-not-read");
            assert!(seen.len() == 1 && seen[0].contains(&says), "{seen:?}");
            no_false_claims(&vip);
        }
    }
}

/// No finding that only a map which was not read could prove.
#[track_caller]
fn no_false_claims(ran: &Ran) {
    for id in [
        "frontend-absent",
        "frontend-slot-dangling",
        "frontend-no-backends",
        "reverse-nat-missing",
        "source-range-denied",
        "scopes-differ",
    ] {
        assert_eq!(ran.seen(id), [""; 0], "{ran:?}");
    }
    assert!(!ran.out.contains("is not there") || ran.out.contains("not pinned"), "{ran:?}");
}

#[test]
fn unknown_sizes_and_types_are_named_with_those_known() {
    for (name, change) in [
        ("cilium_lb4_services_v2", (16, 12)),
        ("cilium_lb4_backends_v3", (4, 16)),
        ("cilium_lb4_reverse_nat", (2, 8)),
        ("cilium_l2_responder_v4", (12, 8)),
        ("cilium_lxc", (20, 56)),
    ] {
        let lab = lab();
        let known = captured("v1.21-tcx", name).spec;
        for spec in [
            MapSpec { key_size: change.0, value_size: change.1, ..known.clone() },
            MapSpec { map_type: MapType::LRU_HASH, flags: 0, ..known.clone() },
        ] {
            lab.put_map(name, &spec).expect("a map");
            let vip = maps_alone(&lab, &["vip", VIP, "-o", "json"]);
            assert_eq!(vip.code, Some(3), "{vip:?}");
            let seen = vip.seen("map-not-read");
            let found = format!(
                "{name}: unknown layout: {} with key {} and value {} bytes; known: {} with key {}",
                spec.map_type, spec.key_size, spec.value_size, known.map_type, known.key_size
            );
            assert!(seen.len() == 1 && seen[0].starts_with(&found), "{seen:?}: {found}");
            no_false_claims(&vip);
            if name == "cilium_l2_responder_v4" {
                let text = maps_alone(&lab, &["vip", VIP]).out;
                assert!(text.contains("Announced here: unknown (cilium_l2_responder_v4"), "{text}");
                let ran = maps_alone(&lab, &["vip", VIP, "--expect", "not-announced"]);
                assert_eq!(ran.code, Some(3), "{ran:?}");
            }
        }
    }
}

#[test]
fn a_map_that_is_missing_is_not_taken_for_an_empty_one() {
    for (name, view) in [
        ("cilium_lb4_services_v2", None),
        ("cilium_lb4_backends_v3", None),
        ("cilium_lb4_reverse_nat", None),
        ("cilium_lb4_source_range", Some("192.168.2.24")),
    ] {
        let lab = lab();
        let vip = view.unwrap_or(VIP);
        let whole = maps_alone(&lab, &["vip", vip, "-o", "json"]);
        assert_eq!(whole.seen("map-not-read"), [""; 0]);
        lab.unpin(name).expect("unpin");
        let ran = maps_alone(&lab, &["vip", vip, "-o", "json"]);
        assert_eq!(ran.code, Some(3), "{name}: {ran:?}");
        no_false_claims(&ran);
        if view.is_none() {
            let seen = ran.seen("map-not-read");
            assert!(seen.len() == 1 && seen[0].starts_with(name), "{seen:?}");
        }
        for claim in ["programmed", "has-backend", "no-errors"] {
            let ran = maps_alone(&lab, &["vip", vip, "--expect", claim]);
            assert_ne!(ran.code, Some(1), "{name} {claim}: {ran:?}");
        }
    }
    let lab = lab();
    for name in ["cilium_lb4_services_v2", "cilium_lb6_services_v2"] {
        lab.unpin(name).expect("unpin");
    }
    on(&lab, &["service", "list"]).refused(2, &["no services map"]);
    let doctor = on(&lab, &["doctor"]);
    assert_eq!(doctor.code, Some(3), "{doctor:?}");
    assert!(doctor.out.contains("services map"), "{doctor:?}");
}

#[test]
fn evidence_that_was_collected_for_less_leaves_the_rest_open() {
    let lab = lab();
    let folder = folder();
    let path = folder.path().join("frontends.json");
    let path = path.to_str().expect("UTF-8");
    let list = on(&lab, &["lb", "list", "--frontends", "--save", path]);
    assert_eq!(list.code, Some(0), "{list:?}");
    let ran = run(&mut inspect(["vip", VIP, "-o", "json", "--from", path]));
    assert_eq!(ran.code, Some(3), "{ran:?}");
    no_false_claims(&ran);
    let seen = ran.seen("map-not-read");
    assert!(seen.iter().any(|one| one.contains("backends_v3 was not collected")), "{seen:?}");
}

#[test]
fn a_family_that_cilium_does_not_serve_is_a_clear_no() {
    let lab = Lab::builder().project("v1.21-tcx").only(LB4).up().expect("a lab");
    let ran = maps_alone(&lab, &["vip", "fd00:2::20", "-o", "json"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.seen("frontend-absent")[0].contains("no IPv6 load balancer maps"), "{ran:?}");
    assert_eq!(maps_alone(&lab, &["vip", VIP]).code, Some(3));
    assert_eq!(on(&lab, &["lb", "list"]).code, Some(0));
}

#[test]
fn empty_maps_are_no_frontends() {
    let lab = lab();
    for name in LB4 {
        lab.put_map(name, &captured("v1.21-tcx", name).spec).expect("a map");
    }
    let ran = maps_alone(&lab, &["vip", VIP, "-o", "json"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert_eq!(ran.seen("frontend-absent").len(), 1, "{ran:?}");
    assert_eq!(ran.seen("map-full"), [""; 0]);
    let list = on(&lab, &["lb", "list", "--revnat"]);
    assert_eq!((list.code, list.err.as_str()), (Some(0), ""), "{list:?}");
}

/// The backends of the IPv4 frontends in `lb list -o json`: address, port and state.
fn backends_of(ran: &Ran) -> Vec<String> {
    let mut found: Vec<String> = ran.json()["frontends"]
        .as_array()
        .expect("frontends")
        .iter()
        .flat_map(|frontend| {
            let slots = frontend["slots"].as_array().expect("slots").clone();
            slots.into_iter().map(move |slot| {
                let backend = &slot["backend"];
                format!(
                    "{}:{} {} {}:{} {}",
                    frontend["address"],
                    frontend["port"],
                    slot["slot"],
                    backend["address"],
                    backend["port"],
                    backend["state"]
                )
            })
        })
        .filter(|row| row.starts_with("\"1"))
        .collect();
    found.sort();
    found
}

#[test]
fn backend_maps_of_every_generation_are_read() {
    let v3 = captured("v1.21-tcx", "cilium_lb4_backends_v3");
    let put = |lab: &Lab, name: &str, generation: u8| -> MapHandle {
        let layout = layout_of(name, generation);
        let map = lab.put_map(name, &spec_of(name, generation)).expect("a map");
        for entry in &v3.entries {
            let of = layout_of("cilium_lb4_backends_v3", 3);
            let backend = Backend::decode(of, &entry.key, &entry.value).expect("a backend");
            let plain = Backend { cluster_id: 0, zone: 0, ..backend };
            let (key, value) = plain.encode(layout).expect("fits");
            map.update(&key, &value).expect("an update");
        }
        map
    };
    let lab = lab();
    let expected = backends_of(&on(&lab, &["lb", "list", "-o", "json"]));
    assert!(
        expected.len() > 50 && !expected.iter().any(|row| row.contains("null")),
        "{expected:?}"
    );

    // Two at once: the newer is read, whatever the older holds, and the older told of.
    let old = put(&lab, "cilium_lb4_backends", 1);
    let first = v3.entries[0].key[..2].to_vec();
    old.delete(&first).expect("a delete");
    let both = on(&lab, &["lb", "list", "-o", "json"]);
    assert_eq!(backends_of(&both), expected);
    let vip = maps_alone(&lab, &["vip", VIP, "-o", "json"]);
    let seen = vip.seen("map-older-generation");
    assert!(seen.len() == 1 && seen[0].starts_with("cilium_lb4_backends is left over"), "{seen:?}");
    assert_eq!(vip.code, Some(3), "{vip:?}");
    lab.unpin("cilium_lb4_backends").expect("unpin");
    assert_eq!(maps_alone(&lab, &["vip", VIP, "-o", "json"]).seen("map-older-generation"), [""; 0]);

    lab.unpin("cilium_lb4_backends_v3").expect("unpin");
    for (name, generation) in [("cilium_lb4_backends_v2", 2), ("cilium_lb4_backends", 1)] {
        put(&lab, name, generation);
        let ran = on(&lab, &["lb", "list", "-o", "json"]);
        assert_eq!(ran.code, Some(0), "{name}: {}", ran.err);
        assert_eq!(backends_of(&ran), expected, "{name}");
        let vip = maps_alone(&lab, &["vip", VIP, "-o", "json"]);
        assert_eq!(vip.seen("frontend-slot-dangling"), [""; 0], "{name}");
        lab.unpin(name).expect("unpin");
    }
}

#[test]
fn maps_without_room_are_told_of() {
    for name in LB4 {
        let map = captured("v1.21-tcx", name);
        let entries = u32::try_from(map.entries.len()).expect("few");
        for (max, id) in [
            (entries, Some("map-full")),
            (entries + 1, Some("map-full")),
            (entries * 10 / 9, Some("map-nearly-full")),
            (entries * 2, None),
        ] {
            let lab = lab();
            let spec = MapSpec { max_entries: max, ..map.spec.clone() };
            let handle = lab.put_map(name, &spec).expect("a map");
            for entry in &map.entries {
                handle.update(&entry.key, &entry.value).expect("an update");
            }
            let ran = maps_alone(&lab, &["vip", VIP, "-o", "json"]);
            for one in ["map-full", "map-nearly-full"] {
                let expected: Vec<String> = (Some(one) == id)
                    .then(|| format!("{name} holds {entries} of {max} entries"))
                    .into_iter()
                    .collect();
                assert_eq!(ran.seen(one), expected, "{name} {max}");
            }
        }
    }
}

#[test]
fn arguments_that_mean_nothing_are_refused() {
    for (arguments, words) in [
        (&["vip"][..], &["ADDR"][..]),
        (&["vip", ""], &["no IP address"]),
        (&["vip", "nonsense"], &["no IP address", "192.168.2.20:443/tcp"]),
        (&["vip", "192.168.2.20:99999"], &["`99999` is no port"]),
        (&["vip", "192.168.2.20:443/quic"], &["quic"]),
        (&["vip", "192.168.2.20/24"], &["192.168.2.20/24"]),
        (&["vip", "fd00:2::20:443/tcp"], &["no port"]),
        (&["vip", "192.168.2.20", "192.168.2.21"], &["unexpected argument"]),
        (&["vip", "-1"], &["unexpected argument"]),
        (&["vip", "127.0.0.1"], &["loopback"]),
        (&["vip", "239.1.2.3"], &["multicast"]),
        (&["vip", "192.168.2.20\n"], &["no IP address"]),
        (&["vip", VIP, "--expect", "happiness"], &["`happiness` is no claim", "served"]),
        (&["vip", VIP, "--expect", "served@"], &["no claim"]),
        (&["vip", VIP, "--expect", ""], &["no claim"]),
        (&["vip", VIP, "--expect", "unknown"], &["no claim"]),
        (&["vip", VIP, "--expect", "finding:gremlins"], &["`gremlins` is no finding", "map-full"]),
        (&["vip", VIP, "--expect", "no-finding:"], &["is no finding"]),
        (&["vip", VIP, "--expect", "no-errors@eno1"], &["not about a device"]),
        (&["vip", VIP, "-o", "xml"], &["xml", "table, json, markdown"]),
        (&["vip", VIP, "-o"], &["--output"]),
        (&["vip", VIP, "--frobnicate"], &["--frobnicate"]),
        (&["vip", VIP, "-q", "-v"], &["cannot be used with"]),
        (&["vip", VIP, "--color", "mauve"], &["mauve", "auto, always, never"]),
        (&["lb", "list", "--revnat", "--backends"], &["cannot be used with"]),
        (&["lb", "remove"], &["unrecognized subcommand"]),
        (&["evidence", "verify"], &["FILE"]),
        (&["evidence", "show", "x", "--from", "y"], &["as arguments"]),
        (&["doctor", "--from", "x"], &["looks at this node"]),
        (&["completions", "cmd.exe"], &["cmd.exe"]),
        (&["frobnicate"], &["unrecognized subcommand"]),
    ] {
        run(&mut inspect(arguments)).usage(words);
    }
    // Without any argument the help stands where errors stand.
    let ran = run(&mut inspect([""; 0]));
    assert_eq!((ran.code, ran.out.as_str()), (Some(2), ""), "{ran:?}");
}

#[test]
fn paths_that_are_not_utf8_are_paths() {
    let lab = lab();
    let folder = folder();
    let path = folder.path().join(OsStr::from_bytes(b"evid\xffence.json"));
    let mut command = inspect([OsStr::new("vip"), OsStr::new(VIP), OsStr::new("--save")]);
    let ran = run(command.arg(&path).env("INSPECT_BPFFS", lab.bpffs()));
    assert!(ran.code != Some(2) && ran.err.is_empty(), "{ran:?}");
    Document::read(&path).expect("evidence");

    let mount = folder.path().join(OsStr::from_bytes(b"bpf\xff"));
    let capture = Capture::project("v1.21-tcx").expect("a capture");
    in_own_mounts(|| {
        mount_cilium(&mount, &capture);
        let mut command = inspect([OsStr::new("vip"), OsStr::new(VIP), OsStr::new("--save")]);
        let ran = run(command.arg(&path));
        assert!(ran.code != Some(2) && ran.err.is_empty(), "{ran:?}");
    });
    Document::read(&path).expect("evidence");
}

#[test]
fn output_that_nobody_takes_is_no_error_and_output_that_is_lost_is_one() {
    let lab = Lab::builder().project("services-10k").up().expect("a lab");
    let listing = |arguments: &[&str]| {
        let mut command = inspect(arguments);
        command.env("INSPECT_BPFFS", lab.bpffs());
        command
    };
    for arguments in [
        &["lb", "list"][..],
        &["lb", "list", "-o", "json"],
        &["service", "list"],
        &["service", "list", "-o", "json"],
        &["service", "list", "-o", "markdown"],
    ] {
        // As `| head -1` does: read a little and close.
        let mut child = listing(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program runs");
        let mut out = child.stdout.take().expect("a pipe");
        out.read_exact(&mut [0; 16]).expect("a beginning");
        drop(out);
        let ended = child.wait_with_output().expect("an end");
        assert_eq!(ended.status.code(), Some(0), "{arguments:?}");
        assert_eq!(ended.stderr, b"", "{arguments:?}");

        let full = OpenOptions::new().write(true).open("/dev/full").expect("/dev/full");
        let lost = run_with_stdout(&mut listing(arguments), full);
        lost.refused(2, &["No space left"]);
    }
    for arguments in [&["--help"][..], &["man"], &["completions", "bash"], &["evidence", "schema"]]
    {
        let full = OpenOptions::new().write(true).open("/dev/full").expect("/dev/full");
        assert_eq!(run_with_stdout(&mut inspect(arguments), full).code, Some(2), "{arguments:?}");
    }

    // Standard error is lost: the exit code is what is left.
    for target in ["/dev/full", "/dev/null"] {
        let full = OpenOptions::new().write(true).open(target).expect("a device");
        let status = inspect(["vip", VIP, "--from", "/nonexistent"])
            .stderr(full)
            .status()
            .expect("the program runs");
        assert_eq!(status.code(), Some(2), "{target}");
    }
    // Both closed, as a careless service manager leaves them.
    let mut command = listing(&["service", "list"]);
    // SAFETY: between fork and exec the closure makes system calls and allocates nothing.
    unsafe {
        command.pre_exec(|| {
            libc::close(1);
            libc::close(2);
            Ok(())
        });
    }
    assert_eq!(command.status().expect("the program runs").code(), Some(0));
}

fn run_with_stdout(command: &mut std::process::Command, stdout: File) -> Ran {
    let child = command.stdout(stdout).stderr(Stdio::piped()).spawn().expect("the program runs");
    let ended = child.wait_with_output().expect("an end");
    let err = String::from_utf8(ended.stderr).expect("UTF-8");
    assert!(!err.contains("panicked"), "{err}");
    Ran { code: ended.status.code(), out: String::new(), err }
}

#[test]
fn evidence_on_standard_input_is_read_to_its_end() {
    let lab = lab();
    let text = saved(&lab);
    for (length, code) in [(text.len(), 3), (text.len() / 2, 2), (0, 2)] {
        let mut child = inspect(["vip", VIP, "--from", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program runs");
        let mut pipe = child.stdin.take().expect("a pipe");
        match pipe.write_all(&text[..length]) {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => panic!("{error}"),
            _ => drop(pipe),
        }
        assert_eq!(child.wait_with_output().expect("an end").status.code(), Some(code));
    }
}

#[test]
fn evidence_that_would_act_on_the_terminal_is_refused() {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("evidence.json");
    let path = path.to_str().expect("UTF-8");
    let text = r#"{"schema":"inspector.evidence/1","host":{"name":"\u001b]0;owned\u0007"}}"#;
    fs::write(path, text).expect("a file");
    for arguments in [&["evidence", "show", path][..], &["vip", "192.168.2.20", "--from", path]] {
        let ran = run(&mut inspect(arguments));
        assert_eq!((ran.code, ran.out.as_str()), (Some(2), ""), "{ran:?}");
        assert!(ran.err.contains("control characters") && !ran.err.contains('\u{1b}'), "{ran:?}");
    }
}
