//! Captured maps as real ones: what is read back from the kernel is what the files hold.
//!
//! Needs root and bpf(2); fails without.

use std::{collections::BTreeSet, fs, path::Path, time::Duration};

use inspector::cilium::layout::MapType;
use inspector_lab::{
    Agent, Capture, Lab, MapHandle, bpf,
    capture::{self, CapturedMap, Entry, MapSpec},
    maps,
};

/// What the kernel must hold of a captured map: the entries, those of per-CPU maps fitted to this
/// machine by adding up, independently of the code under test.
fn expected(map: &CapturedMap) -> BTreeSet<Entry> {
    map.entries
        .iter()
        .map(|entry| Entry { key: entry.key.clone(), value: summed(&map.spec, &entry.value) })
        .collect()
}

fn found(map: &CapturedMap, handle: &MapHandle) -> BTreeSet<Entry> {
    let entries = handle.entries().expect("reading the map back");
    let count = entries.len();
    let set: BTreeSet<Entry> = entries
        .into_iter()
        .map(|entry| Entry { value: summed(&map.spec, &entry.value), ..entry })
        .collect();
    assert_eq!(set.len(), count, "{}: an entry came twice", map.name);
    set
}

/// A per-CPU value as its sum over CPUs; any other as it is.
fn summed(spec: &MapSpec, value: &[u8]) -> Vec<u8> {
    if !spec.map_type.is_per_cpu() {
        return value.to_vec();
    }
    let size = spec.value_size as usize;
    let word = if size.is_multiple_of(8) { 8 } else { 4 };
    let mut sum = vec![0u64; size / word];
    for cpu in value.chunks_exact(size.next_multiple_of(8)) {
        for (total, add) in sum.iter_mut().zip(cpu[..size].chunks_exact(word)) {
            let mut bytes = [0; 8];
            bytes[..word].copy_from_slice(add);
            *total += u64::from_le_bytes(bytes);
        }
    }
    sum.into_iter().flat_map(u64::to_le_bytes).collect()
}

#[test]
fn every_capture_of_the_project_is_in_the_kernel_as_in_its_files() {
    let captures = capture::list_project().expect("the project's captures");
    // 10 full captures, the large one, and 4 and 5 states of faults.
    let faults = captures.iter().filter(|path| path.to_string_lossy().contains("-faults/")).count();
    assert_eq!((captures.len() - faults, faults), (11, 9), "{captures:#?}");

    let mut entries = 0;
    for path in captures {
        let capture = Capture::open(&path).expect("the capture");
        let lab = Lab::builder().capture(&path).agent(Agent::Dead).up().expect("a lab");
        let pins: BTreeSet<String> = fs::read_dir(maps::globals(lab.bpffs()))
            .expect("the pins")
            .map(|entry| entry.expect("a pin").file_name().into_string().expect("a name"))
            .collect();
        let names: BTreeSet<String> = capture.maps().map(|map| map.name.clone()).collect();
        assert_eq!(pins, names, "{}", path.display());

        for map in capture.maps() {
            let handle = lab.map(&map.name).expect("the pinned map");
            assert_eq!(handle.spec(), &map.spec, "{}: {}", path.display(), map.name);
            if map.spec.map_type == MapType::PROG_ARRAY {
                assert_eq!(handle.lookup(&[0; 4]).expect("a look-up"), None, "an empty array");
                continue;
            }
            assert_eq!(found(map, &handle), expected(map), "{}: {}", path.display(), map.name);
            entries += map.entries.len();
        }
    }
    // Guards against comparing nothing with nothing.
    assert!(entries > 60_000, "only {entries} entries compared");
}

#[test]
fn per_cpu_values_keep_their_sum_on_fewer_and_on_more_cpus() {
    let spec = MapSpec {
        map_type: MapType::PERCPU_HASH,
        key_size: 8,
        value_size: 16,
        max_entries: 1,
        flags: 1,
        name: "m".into(),
    };
    let value: Vec<u8> = [1u64, 10, 2, 20, 3, 30].into_iter().flat_map(u64::to_le_bytes).collect();
    for cpus in 1..6 {
        let fitted = maps::fit_cpus("m", &spec, &value, cpus).expect("counters");
        assert_eq!(fitted.len(), cpus * 16);
        assert_eq!(summed(&spec, &fitted), summed(&spec, &value));
    }

    let narrow = MapSpec { value_size: 4, ..spec.clone() };
    let value: Vec<u8> = [7u64, 8, 9].into_iter().flat_map(u64::to_le_bytes).collect();
    let fitted = maps::fit_cpus("m", &narrow, &value, 2).expect("counters");
    assert_eq!(fitted, [7u64, 17].into_iter().flat_map(u64::to_le_bytes).collect::<Vec<u8>>());

    let odd = MapSpec { value_size: 3, ..spec };
    let error = maps::fit_cpus("m", &odd, &[0; 24], 2).expect_err("no counters");
    assert_eq!(
        error.to_string(),
        "m: captured on 3 CPUs, this machine has 2, and values of 3 bytes are no counters that \
         could be added up"
    );
}

#[test]
fn a_map_of_maps_gets_real_inner_maps() {
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).expect("a file");
    write(
        "cilium_lb4_maglev.hex",
        "# type=13 id=1 key=2 value=4 max=16 flags=0x1 name=cilium_lb4_magl\n\
         0005 11000000\n0006 12000000\n# entries=2\n",
    );
    write(
        "cilium_lb4_maglev.inner-0005.hex",
        "# type=2 id=17 key=4 value=12 max=1 flags=0x0 name=inner\n00000000 010000000200000003000000\n",
    );
    write(
        "cilium_lb4_maglev.inner-0006.hex",
        "# type=2 id=18 key=4 value=12 max=1 flags=0x0 name=inner\n00000000 040000000500000006000000\n",
    );
    let lab = Lab::builder().capture(folder.path()).up().expect("a lab");
    let outer = lab.map("cilium_lb4_maglev").expect("the outer map");
    for (key, value) in [
        ([0, 5], [1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]),
        ([0, 6], [4, 0, 0, 0, 5, 0, 0, 0, 6, 0, 0, 0]),
    ] {
        let id = outer.lookup(&key).expect("a look-up").expect("an entry");
        let inner =
            MapHandle::by_id(u32::from_ne_bytes(id.try_into().expect("an id"))).expect("it");
        assert_eq!(inner.lookup(&[0; 4]).expect("a look-up").expect("an entry"), value);
    }
}

#[test]
fn malformed_states_can_be_made() {
    let lab =
        Lab::builder().project("v1.21-tcx").only(["cilium_lb4_services_v2"]).up().expect("a lab");
    let services = lab.map("cilium_lb4_services_v2").expect("the map");
    let first = services.entries().expect("the entries").remove(0);
    services.delete(&first.key).expect("there");
    assert_eq!(services.lookup(&first.key).expect("a look-up"), None);
    services.update(&first.key, &[0xff; 12]).expect("an update");
    assert_eq!(services.lookup(&first.key).expect("a look-up"), Some(vec![0xff; 12]));
    let error = services.update(&first.key, &[0; 11]).expect_err("too short");
    assert_eq!(
        error.to_string(),
        "cilium_lb4_services_v2: a value of 11 bytes, but this map's have 12"
    );

    let odd = MapSpec { key_size: 13, ..services.spec().clone() };
    lab.put_map("cilium_lb4_services_v2", &odd).expect("another map in its place");
    assert_eq!(lab.map("cilium_lb4_services_v2").expect("the map").spec().key_size, 13);

    lab.put_program("cilium_lb4_services_v2").expect("a program in its place");
    let error = lab.map("cilium_lb4_services_v2").expect_err("no map");
    assert_eq!(
        error.to_string(),
        "cilium_lb4_services_v2 is no map (the kernel calls it bpf-prog)"
    );
    lab.unpin("cilium_lb4_services_v2").expect("a pin");
    assert!(!lab.pin_path("cilium_lb4_services_v2").exists());
}

#[test]
fn the_agent_lives_if_it_is_meant_to() {
    let liveness = |lab: &Lab| {
        let map = lab.map("cilium_runtime_config").expect("the map");
        let value = map.lookup(&1u32.to_ne_bytes()).expect("a look-up").expect("an entry");
        u64::from_ne_bytes(value.try_into().expect("8 bytes"))
    };
    let builder = || Lab::builder().project("v1.21-tcx").only(["cilium_runtime_config"]);
    let before = bpf::monotonic_ns();
    let lab = builder().up().expect("a lab");
    let alive = liveness(&lab);
    assert!((before..=bpf::monotonic_ns()).contains(&alive), "{before} {alive}");
    std::thread::sleep(Duration::from_millis(2));
    lab.set_agent_alive().expect("an update");
    assert!(liveness(&lab) > alive);

    let dead = builder().agent(Agent::Dead).up().expect("a lab");
    // As captured: see maps/cilium_runtime_config.hex.
    assert_eq!(liveness(&dead), 0x056f_553f_6671);
}

#[test]
fn labs_share_nothing_and_leave_nothing() {
    let first = Lab::builder().project("v1.21-tcx").up().expect("a lab");
    let second = Lab::builder().project("v1.18-tcx").up().expect("another");
    assert_ne!(first.bpffs(), second.bpffs());
    let key = [0; 12];
    let map = first.map("cilium_lb4_services_v2").expect("the map");
    map.update(&key, &[1; 12]).expect("an update");
    let other = second.map("cilium_lb4_services_v2").expect("the map");
    assert_eq!(other.lookup(&key).expect("a look-up"), None);
    let (id, folder) = (map.id(), first.bpffs().parent().expect("its folder").to_owned());
    drop(map);
    assert!(mounted(first.bpffs()));
    first.down().expect("all removed");

    assert!(!folder.exists());
    assert!(!mounted(&folder.join("bpffs")));
    assert!(second.bpffs().exists());
    // The kernel frees a map shortly after its last reference.
    let freed = (0..200).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        MapHandle::by_id(id).is_err()
    });
    assert!(freed, "the map {id} is still there");
}

#[test]
fn a_panic_removes_the_lab() {
    let folder = std::sync::Mutex::new(None);
    let result = std::panic::catch_unwind(|| {
        let lab = Lab::builder().project("v1.18-faults/01-backend-missing").up().expect("a lab");
        *folder.lock().expect("the folder") = Some(lab.bpffs().to_owned());
        panic!("on purpose");
    });
    assert!(result.is_err());
    let folder = folder.into_inner().expect("the lock").expect("a lab was made");
    assert!(!folder.exists() && !mounted(&folder));
}

#[test]
fn a_lab_that_cannot_be_made_leaves_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    // LPM tries refuse to be made without BPF_F_NO_PREALLOC.
    let text = "# type=11 id=1 key=12 value=1 max=16 flags=0x0 name=trie\n# entries=0\n";
    fs::write(folder.path().join("trie.hex"), text).expect("a file");
    let name = format!("cannot-be-{}", std::process::id());
    let error = Lab::builder().capture(folder.path()).name(&name).up().expect_err("EINVAL");
    assert_eq!(
        error.to_string(),
        "cannot create the map trie (lpm_trie, key 12 and value 1 bytes, max 16, flags 0x0): \
         Invalid argument (os error 22)"
    );
    assert!(!Path::new("/run/inspector-lab").join(name).exists());
}

#[test]
fn a_name_is_taken_once() {
    let name = &format!("taken-{}", std::process::id());
    let lab = Lab::builder().name(name).up().expect("a lab");
    let error = Lab::builder().name(name).up().expect_err("in use");
    assert_eq!(
        error.to_string(),
        format!(
            "a lab named {name} is up already; choose another name, or remove it with `down --name \
             {name}`"
        )
    );
    let error = inspector_lab::state::down(name).expect_err("owned");
    assert_eq!(
        error.to_string(),
        format!(
            "the lab {name} belongs to a running process (process {}); end that instead",
            std::process::id()
        )
    );
    assert!(lab.bpffs().exists());
    drop(lab);
    Lab::builder().name(name).up().expect("free again");
    let error = Lab::builder().name("Not/good").up().expect_err("a bad name");
    assert!(error.to_string().starts_with("`Not/good` cannot be the name of a lab"), "{error}");
}

fn mounted(path: &Path) -> bool {
    let path = path.to_str().expect("a path");
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
    mounts.lines().any(|line| line.split(' ').nth(4) == Some(path))
}
