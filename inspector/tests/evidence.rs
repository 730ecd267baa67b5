//! Saved evidence: the same verdict without root, elsewhere and later; what is printed of it; its
//! schema. And evidence that nobody collected: any bytes are judged without a panic.
//!
//! The tests of saved evidence need root and bpf(2); they fail without.

mod run;

use std::{fs, path::Path};

use inspector::{
    evidence::{
        Evidence,
        file::{Document, schema},
        tables::Tables,
    },
    judge::{self, FindingId, expect::Expectation},
    report::{
        json,
        lb_list::{self, View},
        markdown, service_list, table,
    },
};
use inspector_lab::{Lab, capture::encode_hex};
use proptest::prelude::*;
use run::{Stranger, inspect, on, run, sealed};
use serde_json::{Value, json};

/// Captures of every generation, and VIPs that differ in what becomes of them.
const CAPTURES: [&str; 3] = ["v1.13-clsact", "v1.18-tcx", "v1.21-tcx"];
const VIPS: [&str; 10] = [
    "192.168.2.20",
    "192.168.2.20:443/tcp",
    "192.168.2.21",
    "192.168.2.24",
    "192.168.2.26",
    "192.168.2.27",
    "192.168.2.30",
    "192.168.2.99",
    "fd00:2::20",
    "10.96.0.5",
];

/// A lab with a fault: one of two backends of 192.168.2.20 is gone.
fn faulty() -> Lab {
    let lab = Lab::builder().project("v1.21-tcx").up().expect("a lab");
    let services = lab.map("cilium_lb4_services_v2").expect("a map");
    let slot = [192, 168, 2, 20, 1, 187, 2, 0, 6, 0, 0, 0];
    let value = services.lookup(&slot).expect("a look-up").expect("a slot");
    let backends = lab.map("cilium_lb4_backends_v3").expect("a map");
    backends.delete(&value[..4]).expect("a delete");
    lab
}

fn labs() -> Vec<Lab> {
    let mut labs: Vec<Lab> =
        CAPTURES.iter().map(|name| Lab::builder().project(name).up().expect("a lab")).collect();
    labs.push(faulty());
    // One in which packets are translated.
    labs.push(Lab::builder().project("v1.21-tcx").datapath(true).up().expect("a lab"));
    labs
}

/// The agent counts as dead after 15 s, which these tests can take.
fn keep_alive(lab: &Lab) {
    if lab.pin_path("cilium_runtime_config").exists() {
        lab.set_agent_alive().expect("a sign of life");
    }
}

#[test]
fn a_file_is_judged_as_the_node_was_without_root() {
    let stranger = Stranger::new();
    let file = stranger.shared("evidence.json");
    let path = file.to_str().expect("UTF-8");
    let mut codes = [0; 4];
    for lab in labs() {
        for (index, vip) in VIPS.into_iter().enumerate() {
            keep_alive(&lab);
            let live = on(&lab, &["vip", vip, "-o", "json", "--save", path]);
            codes[usize::try_from(live.code.expect("a code")).expect("small")] += 1;
            let document = Document::read(&file).expect("evidence");
            let said = document.evidence.verdict.clone().expect("a verdict");
            assert_eq!(live.json()["verdict"], said, "{vip}");

            let from = run(&mut stranger.inspect(&["vip", vip, "-o", "json", "--from", path]));
            assert_eq!((from.code, &from.out), (live.code, &live.out), "{vip}");
            assert_eq!(from.err, "", "{vip}");
            let judged = run(&mut stranger.inspect(&["evidence", "judge", path, "-o", "json"]));
            assert_eq!((judged.code, &judged.out), (live.code, &live.out), "{vip}");
            assert_eq!(judged.err, "", "the verdict in the file is another: {vip}");

            if index > 3 {
                continue;
            }
            for form in ["table", "markdown"] {
                let live = on(&lab, &["vip", vip, "-o", form, "--save", path]);
                let from = run(&mut stranger.inspect(&["vip", vip, "-o", form, "--from", path]));
                assert_eq!((from.code, &from.out), (live.code, &live.out), "{vip} {form}");
            }
            for claim in ["served", "has-backend", "announced", "no-errors", "programmed"] {
                let live = on(&lab, &["vip", vip, "--expect", claim]);
                let from =
                    run(&mut stranger.inspect(&["evidence", "judge", path, "--expect", claim]));
                assert_eq!(from.code, live.code, "{vip} {claim}");
            }
        }
    }
    assert!(codes[0] > 3 && codes[1] > 3, "all verdicts are alike: {codes:?}");
}

#[test]
fn lists_from_a_file_are_those_of_the_node() {
    let stranger = Stranger::new();
    let file = stranger.shared("evidence.json");
    let path = file.to_str().expect("UTF-8");
    for lab in labs() {
        for list in [
            &["service", "list"][..],
            &["lb", "list"],
            &["lb", "list", "--frontends"],
            &["lb", "list", "--backends"],
            &["lb", "list", "--revnat"],
            &["lb", "list", "--source-ranges"],
        ] {
            let saved = on(&lab, &[list, &["--save", path]].concat());
            assert_eq!(saved.code, Some(0), "{saved:?}");
            for form in ["table", "json", "markdown"] {
                let live = on(&lab, &[list, &["-o", form]].concat());
                let from =
                    run(&mut stranger.inspect(&[list, &["-o", form, "--from", path]].concat()));
                assert_eq!((from.code, &from.out, &from.err), (live.code, &live.out, &live.err));
            }
        }
        // A file with one VIP is not the list of all.
        on(&lab, &["vip", VIPS[0], "--save", path]);
        run(&mut stranger.inspect(&["lb", "list", "--from", path]))
            .refused(2, &["only what concerns 192.168.2.20", "lb list --save"]);
        run(&mut stranger.inspect(&["vip", "192.168.2.21", "--from", path]))
            .refused(3, &["collected for 192.168.2.20", "no answer about 192.168.2.21"]);
    }
}

#[test]
fn files_are_shown_verified_and_described() {
    let lab = faulty();
    let stranger = Stranger::new();
    let path = |name: &str| stranger.shared(name).to_str().expect("UTF-8").to_owned();
    let (vip, lists) = (path("vip.json"), path("lists.json"));
    let live = on(&lab, &["vip", VIPS[0], "-o", "json", "--save", &vip]);
    on(&lab, &["service", "list", "--save", &lists]);

    let show = run(&mut stranger.inspect(&["evidence", "show", &vip]));
    assert_eq!(show.code, Some(0), "{show:?}");
    let sentence = live.json()["verdict"]["sentence"].as_str().expect("text").to_owned();
    let document = Document::read(Path::new(&vip)).expect("evidence");
    for words in ["192.168.2.20", &sentence, &document.sha256, "cilium_lb4_services_v2: 4 of "] {
        assert!(show.out.contains(words), "no `{words}` in {show:?}");
    }
    let whole = run(&mut stranger.inspect(&["evidence", "show", "-o", "json", &vip]));
    assert_eq!(whole.out, fs::read_to_string(&vip).expect("a file"));
    run(&mut stranger.inspect(&["evidence", "judge", &lists])).refused(3, &["inspect vip ADDR"]);

    // Whole, changed, and no evidence at all.
    let changed = path("changed.json");
    let text = fs::read_to_string(&vip).expect("a file");
    fs::write(&changed, text.replace("192.168.2.20", "192.168.2.21")).expect("a file");
    let broken = path("broken.json");
    fs::write(&broken, &text[..text.len() / 2]).expect("a file");
    let good = run(&mut stranger.inspect(&["evidence", "verify", &vip, &lists]));
    assert_eq!((good.code, good.out.lines().count()), (Some(0), 2), "{good:?}");
    let bad = run(&mut stranger.inspect(&["evidence", "verify", &vip, &changed]));
    assert_eq!(bad.code, Some(1), "{bad:?}");
    assert!(bad.out.contains("changed.json was changed after"), "{bad:?}");
    let bad = run(&mut stranger.inspect(&["evidence", "verify", &broken, &vip, &changed]));
    assert_eq!((bad.code, bad.out.lines().count()), (Some(2), 2), "{bad:?}");
    assert!(bad.err.contains("broken.json is cut off"), "{bad:?}");
}

#[test]
fn the_schema_describes_every_file_that_is_saved() {
    let printed = run(&mut inspect(["evidence", "schema"]));
    assert_eq!(printed.json(), schema());
    let validator = jsonschema::validator_for(&schema()).expect("a schema");
    let stranger = Stranger::new();
    let file = stranger.shared("evidence.json");
    let path = file.to_str().expect("UTF-8");
    let mut files = 0;
    let mut check = || {
        let value: Value = serde_json::from_slice(&fs::read(&file).expect("a file")).expect("JSON");
        let errors: Vec<String> = validator
            .iter_errors(&value)
            .map(|error| format!("{}: {error}", error.instance_path()))
            .collect();
        assert_eq!(errors, [""; 0]);
        files += 1;
        value
    };
    let mut last = Value::Null;
    for lab in labs() {
        lab.put_program("cilium_lb6_reverse_nat").expect("a map that cannot be read");
        for vip in VIPS {
            on(&lab, &["vip", vip, "--save", path]);
            check();
        }
        for list in [&["service", "list"][..], &["lb", "list", "--revnat"]] {
            on(&lab, &[list, &["--save", path]].concat());
            last = check();
        }
    }
    assert_eq!(files, 60);

    // And not just anything.
    for field in last.as_object().expect("an object").keys().cloned().collect::<Vec<_>>() {
        let mut value = last.clone();
        value[&field] = json!({"no": "such thing"});
        assert!(!validator.is_valid(&value), "{field} may be anything");
        value.as_object_mut().expect("an object").remove(&field);
        assert!(!validator.is_valid(&value), "{field} may be missing");
    }
}

#[test]
fn table_json_and_markdown_have_the_same_facts() {
    let stranger = Stranger::new();
    let file = stranger.shared("evidence.json");
    let path = file.to_str().expect("UTF-8");
    for lab in labs() {
        for vip in VIPS {
            let json = on(&lab, &["vip", vip, "-o", "json", "--save", path]).json();
            let table = run(&mut inspect(["vip", vip, "-v", "--from", path]));
            let markdown = run(&mut inspect(["vip", vip, "-o", "markdown", "--from", path]));
            // Columns break lines, markup is escaped: compare the words.
            let words = |text: &str| {
                text.replace('\\', "")
                    .split(|c: char| c.is_whitespace() || c == '|')
                    .filter(|word| !word.is_empty())
                    .map(str::to_owned)
                    .collect::<std::collections::HashSet<_>>()
            };
            let (in_table, in_markdown) = (words(&table.out), words(&markdown.out));
            let has = |fact: &str| {
                for word in words(fact) {
                    let bare = word.trim_matches(|c: char| !c.is_alphanumeric());
                    let within = |words: &std::collections::HashSet<String>| {
                        words.iter().any(|other| other.contains(bare))
                    };
                    assert!(within(&in_table), "{vip}: no {bare} of `{fact}` in {}", table.out);
                    assert!(
                        within(&in_markdown),
                        "{vip}: no {bare} of `{fact}` in {}",
                        markdown.out
                    );
                }
            };
            let text = |value: &Value| value.as_str().map(str::to_owned).unwrap_or_default();
            let verdict = &json["verdict"];
            has(&text(&verdict["sentence"]));
            for finding in verdict["findings"].as_array().expect("findings") {
                for part in ["id", "severity", "seen", "meaning", "next"] {
                    has(&text(&finding[part]));
                }
            }
            for path in verdict["paths"].as_array().expect("paths") {
                for part in ["outcome", "served", "grade"] {
                    has(&text(&path[part]));
                }
                for why in path["why"].as_array().expect("reasons") {
                    has(&text(why));
                }
                if let Some(share) = path["share"].as_f64() {
                    has(&format!("{:.0} %", share * 100.0));
                }
            }
            let programmed = &json["programmed"];
            for frontend in programmed["frontends"].as_array().expect("frontends") {
                has(&text(&frontend["frontend"]));
                has(&text(&frontend["type"]));
                has(&frontend["reverse_nat"]["id"].to_string());
                for backend in frontend["backends"].as_array().expect("backends") {
                    has(&text(&backend["address"]));
                    has(&text(&backend["state"]));
                }
            }
            has(&text(&programmed["release"]));
        }
    }
}

#[test]
fn ids_of_findings_are_words_that_expectations_take() {
    for id in FindingId::ALL {
        for claim in [format!("finding:{id}"), format!("no-finding:{id}")] {
            assert_eq!(claim.parse::<Expectation>().expect("a claim").to_string(), claim);
        }
        assert!(
            id.as_str()
                .bytes()
                .all(|byte| byte.is_ascii_lowercase() || b"-0123456789".contains(&byte)),
            "{id}"
        );
    }
    let mut ids: Vec<_> = FindingId::ALL.iter().map(|id| id.as_str()).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), FindingId::ALL.len(), "two findings have the same id");
}

#[test]
fn an_entry_that_comes_twice_counts_once() {
    let stranger = Stranger::new();
    let file = stranger.shared("evidence.json");
    let path = file.to_str().expect("UTF-8");
    let once = on(&faulty(), &["vip", VIPS[0], "-o", "json", "--save", path]).json();
    let mut content: Value =
        serde_json::from_slice(&fs::read(&file).expect("a file")).expect("JSON");
    for map in content["maps"].as_array_mut().expect("maps") {
        let entries = map["entries"].as_array_mut().expect("entries");
        let again = entries.clone();
        entries.extend(again);
    }
    fs::write(&file, sealed(content)).expect("a file");
    let twice = run(&mut inspect(["vip", VIPS[0], "-o", "json", "--from", path]));
    let seen = twice.seen("map-not-read");
    assert_eq!(
        seen,
        [
            "services: 4 entries repeat the key of another and were passed over",
            "IPv4 backends: 1 entries repeat the key of another and were passed over",
        ]
    );
    let twice = twice.json();
    assert_eq!(twice["programmed"]["frontends"], once["programmed"]["frontends"]);
    assert_eq!(twice["verdict"]["paths"], once["verdict"]["paths"]);
}

/// Maps that a judge looks at: name, type, key and value size.
const MAPS: [(&str, u32, usize, usize); 13] = [
    ("cilium_lb4_services_v2", 1, 12, 12),
    ("cilium_lb6_services_v2", 1, 24, 12),
    ("cilium_lb4_backends", 1, 2, 8),
    ("cilium_lb4_backends_v3", 1, 4, 12),
    ("cilium_lb6_backends_v3", 1, 4, 24),
    ("cilium_lb4_reverse_nat", 1, 2, 6),
    ("cilium_lb4_source_range", 11, 12, 1),
    ("cilium_l2_responder_v4", 1, 8, 8),
    ("cilium_runtime_config", 2, 4, 8),
    ("cilium_lxc", 1, 20, 48),
    ("cilium_ipcache_v2", 11, 24, 24),
    ("cilium_devices", 2, 4, 16),
    ("cilium_lb_affinity_match", 1, 8, 1),
];

/// The address that the made-up evidence is about, so that entries of it are likely.
const ADDRESS: [u8; 4] = [192, 168, 2, 20];

/// An entry of any bytes, small numbers more often than large ones, about [`ADDRESS`] mostly.
fn entry(
    name: &'static str,
    key: usize,
    value: usize,
) -> impl Strategy<Value = (Vec<u8>, Vec<u8>)> {
    let byte = prop_oneof![3 => 0_u8..4, 1 => any::<u8>()];
    (proptest::collection::vec(byte.clone(), key), proptest::collection::vec(byte, value), 0_u8..8)
        .prop_map(move |(mut key, value, about)| {
            if about > 0 && name.starts_with("cilium_lb4_services") {
                key[..4].copy_from_slice(&ADDRESS);
            }
            if about > 1 && name.starts_with("cilium_lb4_services") {
                // One frontend: port, protocol; scope and slot stay as they are.
                key[4..6].copy_from_slice(&[0, 80]);
                key[7..9].copy_from_slice(&[0, 6]);
                key[10..12].copy_from_slice(&[0, about % 2]);
            }
            (key, value)
        })
}

fn map_record() -> impl Strategy<Value = Value> {
    let numbers = (any::<u32>(), any::<Option<u64>>(), any::<bool>(), 0_u8..10);
    (0..MAPS.len(), numbers).prop_flat_map(|(index, (max, total, complete, odd))| {
        let (name, map_type, key, value) = MAPS[index];
        proptest::collection::vec(entry(name, key, value), 0..12).prop_map(move |entries| {
            // Some come twice.
            let again = entries.iter().take(usize::from(odd) / 3);
            let rows: Vec<Value> = entries
                .iter()
                .chain(again)
                .map(|(key, value)| json!({"key": encode_hex(key), "value": encode_hex(value)}))
                .collect();
            json!({
                "name": name, "path": name, "id": 1,
                "type": if odd == 0 { 99 } else { map_type },
                "key_size": key, "value_size": value, "max_entries": max, "flags": 0,
                "coverage": "all", "method": "batch", "complete": complete || odd > 2,
                "total": total, "problem": (odd == 1).then_some("a problem"), "entries": rows,
            })
        })
    })
}

fn evidence() -> impl Strategy<Value = Value> {
    let pins = proptest::sample::subsequence(MAPS.map(|map| map.0).to_vec(), 0..=MAPS.len());
    let cpus = prop_oneof![Just(1_usize), Just(0), Just(usize::MAX), any::<usize>()];
    (proptest::collection::vec(map_record(), 0..10), pins, cpus, any::<u64>(), any::<bool>())
        .prop_map(|(maps, pins, cpus, now, read)| {
            json!({
                "schema": "inspector.evidence/1", "minor": 0,
                "tool": {"name": "inspect", "version": "0", "arguments": []},
                "host": {"name": "made up", "boot_id": "", "kernel": "", "architecture": "",
                    "cpus": cpus, "capabilities": []},
                "time": {"started": "", "ended": "", "monotonic_ns": now},
                "subject": {"kind": "vip", "address": "192.168.2.20"},
                "bpffs": [{"path": "/sys/fs/bpf", "device": "0:1", "read": read, "pins": pins}],
                "devices": [{"ifindex": 2, "name": "eno1", "named_by": []}],
                "services_by_protocol": {"TCP": 3}, "maps": maps, "sources": [],
            })
        })
}

/// Judges and prints in every form.
fn judge_and_print(evidence: &Evidence) {
    let judgement = judge::judge(evidence).expect("it is about a VIP");
    let verdict = &judgement.verdict;
    for path in &verdict.paths {
        assert!(
            path.share.is_none_or(|share| share > 0.0 && share < 1.0),
            "a share of {:?} is all or nothing",
            path.share
        );
    }
    let (word, rest) = verdict.sentence.split_once(": ").expect("a word and a reason");
    assert!(!word.is_empty() && !rest.trim().is_empty(), "{:?}", verdict.sentence);
    let checked: Vec<_> = ["served", "not-served", "has-backend", "announced@eno1", "no-errors"]
        .iter()
        .map(|claim| claim.parse::<Expectation>().expect("a claim").check(&judgement))
        .collect();
    let mut out = Vec::new();
    let style = table::Style { width: 80, color: true, quiet: false, verbose: true };
    table::write(&judgement, &checked, style, &mut out).expect("a table");
    json::write(&judgement, &checked, &mut out).expect("JSON");
    markdown::write(&judgement, &checked, "", &mut out).expect("Markdown");

    let tables = Tables::new(evidence);
    let views = [View::Services, View::Frontends, View::Backends, View::RevNat, View::SourceRanges];
    for view in views {
        lb_list::table(&tables, view).write_plain(&mut out).expect("a table");
        lb_list::write_json(&tables, view, &mut out).expect("JSON");
    }
    service_list::table(&tables).write_markdown(&mut out).expect("a table");
    service_list::write_json(&tables, &mut out).expect("JSON");
    for problem in &tables.problems {
        assert!(!problem.to_string().is_empty());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 250, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_are_judged_without_a_panic(content in evidence()) {
        match Document::parse(Path::new("made up"), &sealed(content.clone())) {
            Ok(document) => judge_and_print(&document.evidence),
            Err(error) => prop_assert!(false, "{error}: {content}"),
        }
    }
}
