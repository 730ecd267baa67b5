//! Reading captures: what is there, and one precise sentence for what is wrong.

use std::{collections::BTreeSet, fs, io::Write, path::Path};

use flate2::{Compression, write::GzEncoder};
use inspector_lab::{
    Capture,
    capture::{self, encode_hex, parse_map},
};

const GOOD: &str = "\
# type=1 id=7 key=4 value=2 max=3 flags=0x81 name=backends
01000000 0a0b
02000000 0c0d
# entries=2
";

/// The error of a capture whose only map holds `text`, without the folder.
fn error(text: impl AsRef<[u8]>) -> String {
    error_of("map.hex", text)
}

fn error_of(file: &str, content: impl AsRef<[u8]>) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join(file), content).expect("a file");
    let error = Capture::open(folder.path()).expect_err("wrong content").to_string();
    let prefix = format!("{}/", folder.path().display());
    error.strip_prefix(&prefix).unwrap_or_else(|| panic!("no path in: {error}")).to_owned()
}

#[test]
fn a_good_map() {
    let (spec, entries) = parse_map(GOOD.as_bytes()).expect("a map");
    assert_eq!(spec.map_type.0, 1);
    assert_eq!((spec.key_size, spec.value_size, spec.max_entries), (4, 2, 3));
    assert_eq!((spec.flags, spec.name.as_str()), (0x81, "backends"));
    let entries: Vec<_> =
        entries.iter().map(|e| (encode_hex(&e.key), encode_hex(&e.value))).collect();
    assert_eq!(entries, [("01000000".into(), "0a0b".into()), ("02000000".into(), "0c0d".into())]);
}

#[test]
fn wrong_lines_are_named() {
    let replaced = |from: &str, to: &str| {
        assert!(GOOD.contains(from));
        error(GOOD.replace(from, to))
    };
    let header = "expected the header `# type=N id=N key=N value=N max=N flags=0xN name=NAME`";
    assert_eq!(error(""), format!("map.hex:1: {header}, found ``"));
    assert_eq!(error("01000000 0a0b\n"), format!("map.hex:1: {header}, found `01000000 0a0b`"));
    assert_eq!(replaced(" max=3", ""), "map.hex:1: the header has no `max=`");
    assert_eq!(
        replaced("key=4", "key=four"),
        "map.hex:1: the header's `key=four` is not a number that fits 32 bits"
    );
    assert_eq!(
        replaced("max=3", "max=4294967296"),
        "map.hex:1: the header's `max=4294967296` is not a number that fits 32 bits"
    );
    assert_eq!(
        replaced("0a0b", "0a0"),
        "map.hex:2: the value has 3 hexadecimal digits, an odd number"
    );
    assert_eq!(
        replaced("02000000", "0200000"),
        "map.hex:3: the key has 7 hexadecimal digits, an odd number"
    );
    assert_eq!(
        replaced("0c0d", "0cxd"),
        "map.hex:3: the value has `x` at column 12, which is not a hexadecimal digit"
    );
    assert_eq!(replaced("02000000", "020000"), "map.hex:3: the key has 3 bytes, the header says 4");
    assert_eq!(replaced("0c0d", "0c0d0e"), "map.hex:3: the value has 3 bytes, the header says 2");
    assert_eq!(replaced(" 0c0d", ""), "map.hex:3: there is a key but no value");
    assert_eq!(replaced("0c0d", "0c0d 0e"), "map.hex:3: there is something after the value: `0e`");
    assert_eq!(
        replaced("02000000", "01000000"),
        "map.hex:3: the key 01000000 was already on line 2"
    );
    assert_eq!(
        replaced("02000000 0c0d\n", ""),
        "map.hex:3: the closing line says 2 entries, the file holds 1: it was cut or edited"
    );
    assert_eq!(
        replaced("max=3", "max=1"),
        "map.hex:3: the file holds 2 entries, the header's max is 1"
    );
    let per_cpu = GOOD.replace("type=1", "type=5").replace("0a0b", "0a0b000000000000");
    assert_eq!(
        error(per_cpu),
        "map.hex:3: the value has 2 bytes, which is no whole number of per-CPU values of 8 bytes"
    );
    let mut binary = GOOD.as_bytes().to_vec();
    let place = GOOD.find("0c0d").expect("it");
    binary[place] = 0xff;
    assert_eq!(error(binary), "map.hex:3: not text (invalid UTF-8)");
}

#[test]
fn compressed_files_are_read_and_damage_is_named() {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(GOOD.as_bytes()).expect("compression");
    let whole = encoder.finish().expect("compression");

    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("backends.hex.gz"), &whole).expect("a file");
    let capture = Capture::open(folder.path()).expect("a capture");
    assert_eq!(capture.map("backends").expect("the map").entries.len(), 2);
    fs::write(folder.path().join("backends.hex"), GOOD).expect("a file");
    let error = Capture::open(folder.path()).expect_err("twice").to_string();
    assert!(error.ends_with("backends.hex.gz; remove one of the two"), "{error}");

    for length in 1..whole.len() {
        let error = error_of("map.hex.gz", &whole[..length]);
        assert!(
            error.starts_with("map.hex.gz: damaged or cut off gzip data ("),
            "{length} bytes: {error}"
        );
    }
}

#[test]
fn damage_is_noticed_and_never_panics() {
    let (_, good) = parse_map(GOOD.as_bytes()).expect("a map");
    let mut wrong = 0;
    for index in 0..GOOD.len() {
        for bit in 0..8 {
            let mut bytes = GOOD.as_bytes().to_vec();
            bytes[index] ^= 1 << bit;
            wrong += usize::from(parse_map(&bytes).is_err());
        }
        // Cut off between two lines or in a comment it is a map of fewer entries, whole ones.
        if let Ok((_, entries)) = parse_map(&GOOD.as_bytes()[..index]) {
            assert!(good.starts_with(&entries), "cut off at {index}: {entries:?}");
        }
    }
    // A flip may give another good digit, or stand in the name.
    assert!(wrong > GOOD.len() * 4, "{wrong} of {}", GOOD.len() * 8);
}

#[test]
fn what_is_no_capture() {
    let folder = tempfile::tempdir().expect("a folder");
    let open = |path: &Path| Capture::open(path).expect_err("no capture").to_string();
    assert_eq!(
        open(folder.path()),
        format!(
            "{}: not a capture: no .hex or .hex.gz file in it or in its maps folder",
            folder.path().display()
        )
    );
    assert!(open(&folder.path().join("nothing")).contains(": no such capture: give a folder"));
    assert!(open(Path::new("")).contains(": no such capture: give a folder"));
    assert!(open(Path::new("/")).contains(": not a capture: "));

    // An entry of a map of maps is the id of a map that is gone.
    let outer = "# type=13 id=1 key=2 value=4 max=16 flags=0x0 name=outer\n0005 11000000\n";
    assert_eq!(
        error_of("outer.hex", outer),
        "outer.hex: the entry with key 0005 of a map of maps needs its inner map, in \
         outer.inner-0005.hex beside it"
    );
}

#[test]
fn texts_are_found_compressed_or_not() {
    let capture = Capture::project("v1.21-tcx").expect("the capture");
    assert!(capture.text("cilium/lb-list.txt").expect("it").contains("192.168.2.20:443/TCP"));
    // Compressed in the project.
    assert!(!capture.path().join("cilium/service-list.json").exists());
    assert!(capture.text("cilium/service-list.json").expect("it").starts_with('['));
    assert!(capture.has("probes.json") && !capture.has("outcomes.txt"));
    let error = capture.text("cilium/nothing.txt").expect_err("not there").to_string();
    assert!(
        error.ends_with("v1.21-tcx: holds no file cilium/nothing.txt (nor cilium/nothing.txt.gz)"),
        "{error}"
    );
}

#[test]
fn states_of_a_faults_folder() {
    let folder = capture::project_captures().join("v1.18-faults");
    let states = Capture::states(&folder).expect("the states");
    assert_eq!(
        states,
        ["00-baseline", "01-backend-missing", "03-frontend-missing", "06-not-routable"]
    );
    let baseline = Capture::open(folder.join("00-baseline")).expect("a state");
    let fault = Capture::open(folder.join("01-backend-missing")).expect("a state");
    let names: Vec<&str> = fault.maps().map(|map| map.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "cilium_l2_responder_v4",
            "cilium_lb4_backends_v3",
            "cilium_lb4_reverse_nat",
            "cilium_lb4_services_v2"
        ]
    );
    let keys = |capture: &Capture, map: &str| -> BTreeSet<String> {
        let map = capture.map(map).expect("the map");
        map.entries.iter().map(|entry| encode_hex(&entry.key)).collect()
    };
    // What outcomes.txt says was done.
    let backends = "cilium_lb4_backends_v3";
    let gone: Vec<_> =
        keys(&baseline, backends).difference(&keys(&fault, backends)).cloned().collect();
    assert_eq!(gone, ["04000000"]);
    assert!(fault.text("lb-list.txt").expect("its own").contains("backend 4 not found"));
    assert!(!baseline.text("lb-list.txt").expect("its own").contains("backend 4 not found"));
    assert!(
        fault.text("outcomes.txt").expect("the shared one").contains("##### 01-backend-missing")
    );

    let base = Capture::project("v1.18-tcx").expect("the capture");
    let maps = base.maps().count();
    let over = fault.clone().over(base);
    assert_eq!(over.maps().count(), maps);
    assert_eq!(keys(&over, backends), keys(&fault, backends));
    assert!(over.text("ip-addr.json").expect("the base's").contains("eno1"));
}

#[test]
fn every_file_of_the_project_captures_is_read() {
    let captures = capture::list_project().expect("the captures");
    assert!(captures.len() >= 19, "{captures:?}");
    for path in captures {
        let capture = Capture::open(&path).expect("a capture");
        for map in capture.maps() {
            // The kernel keeps the first 15 bytes of a name.
            let kept = &map.name[..map.name.len().min(15)];
            assert_eq!(map.spec.name, kept, "{}", map.path.display());
        }
    }
}
