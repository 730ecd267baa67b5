//! Maps that change while they are read: what nobody touches is always there exactly once, no key
//! comes twice, no value is torn, and an entry that goes away meanwhile is no error.
//!
//! Needs root and bpf(2); fails without.

mod run;

use std::{
    collections::HashMap,
    os::fd::{AsFd, OwnedFd},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use inspector::{
    cilium::layout::MapType,
    collect::dump::{self, Dump, Method},
    sys::{
        bpf::{self, MapInfo},
        host,
    },
};
use inspector_lab::{Lab, MapHandle, capture::MapSpec};

/// How long each kind of map is churned.
const TIME: Duration = Duration::from_millis(1200);
/// Keys below this are never touched.
const STABLE: u32 = 500;
/// Keys up to this come and go.
const KEYS: u32 = 2000;

/// How a map under test is made.
#[derive(Debug, Clone, Copy)]
struct Kind {
    map_type: MapType,
    /// Words of 8 bytes in a value (of one CPU).
    words: usize,
    /// `BPF_F_*` flags.
    flags: u32,
    /// Most entries.
    max: u32,
    /// Whether entries can be deleted.
    deletes: bool,
}

const NO_PREALLOC: u32 = 1;

impl Kind {
    fn spec(self) -> MapSpec {
        MapSpec {
            map_type: self.map_type,
            key_size: if self.is_trie() { 8 } else { 4 },
            value_size: u32::try_from(self.words * 8).expect("small"),
            max_entries: self.max,
            flags: self.flags,
            name: "churned".to_owned(),
        }
    }

    fn is_trie(self) -> bool {
        self.map_type == MapType::LPM_TRIE
    }

    fn key(self, number: u32) -> Vec<u8> {
        if self.is_trie() {
            // A full prefix: every key is a leaf of its own. The bits are mixed, so that
            // neighbours come and go in all parts of the trie.
            let mut key = 32_u32.to_ne_bytes().to_vec();
            key.extend_from_slice(&number.reverse_bits().to_be_bytes());
            return key;
        }
        number.to_ne_bytes().to_vec()
    }

    fn number(self, key: &[u8]) -> u32 {
        if self.is_trie() {
            return u32::from_be_bytes(key[4..8].try_into().expect("8 bytes")).reverse_bits();
        }
        u32::from_ne_bytes(key.try_into().expect("4 bytes"))
    }

    /// Every word of a value tells the key and the round in which it was written.
    fn value(self, number: u32, round: u32, cpus: usize) -> Vec<u8> {
        let word = u64::from(number) << 32 | u64::from(round);
        let cpus = if self.map_type.is_per_cpu() { cpus } else { 1 };
        word.to_ne_bytes().repeat(self.words * cpus)
    }
}

/// A map that is filled, and what the kernel says of it.
struct Churned {
    kind: Kind,
    map: MapHandle,
    fd: OwnedFd,
    info: MapInfo,
    cpus: usize,
}

impl Churned {
    fn new(lab: &Lab, name: &str, kind: Kind) -> Self {
        let map = lab.put_map(name, &kind.spec()).expect("a map");
        let fd = bpf::open_pin(&lab.pin_path(name)).expect("a descriptor");
        let info = bpf::map_info(fd.as_fd()).expect("the kernel describes it");
        let cpus = host::possible_cpus().expect("the number of CPUs");
        let churned = Self { kind, map, fd, info, cpus };
        let filled = if kind.deletes { STABLE } else { KEYS };
        for number in 0..filled {
            churned.write(number, 0);
        }
        churned
    }

    fn write(&self, number: u32, round: u32) {
        let value = self.kind.value(number, round, self.cpus);
        self.map.update(&self.kind.key(number), &value).expect("an update");
    }

    /// Changes everything but the stable entries, again and again.
    fn churn(&self, stop: &AtomicBool, changes: &AtomicU64) {
        let mut random = 0x9e37_79b9_u32;
        let mut there = vec![false; KEYS as usize];
        let mut round = 1;
        while !stop.load(Ordering::Relaxed) {
            // xorshift32
            random ^= random << 13;
            random ^= random >> 17;
            random ^= random << 5;
            let number = STABLE + random % (KEYS - STABLE);
            let is_there = &mut there[number as usize];
            if self.kind.deletes && *is_there {
                self.map.delete(&self.kind.key(number)).expect("a delete");
                *is_there = false;
            } else {
                self.write(number, round);
                *is_there = true;
                round += 1;
            }
            changes.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Checks what was read while others wrote.
    fn check(&self, dump: &Dump, what: &str) {
        let kind = self.kind;
        let mut seen: HashMap<u32, u32> = HashMap::new();
        for (key, value) in dump.entries.iter() {
            let number = kind.number(key);
            assert!(number < kind.max.max(KEYS), "{what}: key {key:02x?} was never written");
            let words: Vec<u64> = value
                .chunks_exact(8)
                .map(|word| u64::from_ne_bytes(word.try_into().expect("8 bytes")))
                .collect();
            assert_eq!(words.len() * 8, self.info_value_len(), "{what}");
            assert!(
                words.iter().all(|word| *word == words[0]) && words[0] >> 32 == u64::from(number),
                "{what}: key {number} has a value that was never written: {words:x?}"
            );
            let round = u32::try_from(words[0] & 0xffff_ffff).expect("32 bits");
            assert!(seen.insert(number, round).is_none(), "{what}: key {number} came twice");
        }
        if dump.complete {
            for number in 0..STABLE {
                assert_eq!(seen.get(&number), Some(&0), "{what}: the stable key {number}");
            }
        }
    }

    fn info_value_len(&self) -> usize {
        bpf::value_len(&self.info, self.cpus)
    }
}

/// Reads a map in all ways while it changes. Says how many reads were complete, of how many.
fn read_while_it_changes(name: &str, kind: Kind) -> HashMap<&'static str, (u32, u32)> {
    let lab = Lab::builder().up().expect("a lab");
    let churned = Churned::new(&lab, name, kind);
    let stop = AtomicBool::new(false);
    let changes = AtomicU64::new(0);
    let mut reads = HashMap::new();
    thread::scope(|scope| {
        // Ends the writer on every way out.
        struct Stop<'a>(&'a AtomicBool);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let _stop = Stop(&stop);
        let writer = scope.spawn(|| churned.churn(&stop, &changes));
        let began = Instant::now();
        while began.elapsed() < TIME {
            assert!(!writer.is_finished(), "the writer ended early");
            let (fd, info, cpus) = (churned.fd.as_fd(), &churned.info, churned.cpus);
            for (way, method, dump) in [
                ("read", Method::Batch, dump::read(fd, info, cpus)),
                ("read_batches", Method::Batch, dump::read_batches(fd, info, cpus)),
                ("read_by_key", Method::Iterate, dump::read_by_key(fd, info, cpus)),
            ] {
                let dump = dump.unwrap_or_else(|error| panic!("{kind:?} {way}: {error}"));
                assert_eq!(dump.method, method, "{kind:?} {way}");
                churned.check(&dump, &format!("{:?} {way}", kind.map_type));
                let (complete, all) = reads.entry(way).or_insert((0, 0));
                *complete += u32::from(dump.complete);
                *all += 1;
            }
        }
    });
    let changes = changes.load(Ordering::Relaxed);
    eprintln!("{kind:?}: complete of all reads {reads:?}, {changes} changes meanwhile");
    assert!(changes > 1000, "hardly anything changed: {changes}");
    reads
}

/// Most reads are complete: "it changed too fast" is not an answer that is given lightly.
fn mostly_complete(reads: &HashMap<&'static str, (u32, u32)>) {
    for (way, (complete, all)) in reads {
        assert!(*all >= 3 && complete * 10 >= all * 9, "{way}: {complete} of {all} complete");
    }
}

#[test]
fn a_hash_map_that_changes() {
    let kind = Kind { map_type: MapType::HASH, words: 2, flags: 0, max: 4096, deletes: true };
    mostly_complete(&read_while_it_changes("preallocated", kind));
    mostly_complete(&read_while_it_changes("not", Kind { flags: NO_PREALLOC, ..kind }));
}

#[test]
fn an_lru_map_that_changes() {
    let map_type = MapType::LRU_HASH;
    // Large enough that nothing is evicted.
    let kind = Kind { map_type, words: 2, flags: 0, max: 16384, deletes: true };
    mostly_complete(&read_while_it_changes("lru", kind));
}

#[test]
fn a_trie_that_changes() {
    let map_type = MapType::LPM_TRIE;
    let kind = Kind { map_type, words: 2, flags: NO_PREALLOC, max: 4096, deletes: true };
    read_while_it_changes("trie", kind);
}

#[test]
fn an_array_that_changes() {
    // One word: the kernel copies no more at once out of an array.
    let kind = Kind { map_type: MapType::ARRAY, words: 1, flags: 0, max: KEYS, deletes: false };
    mostly_complete(&read_while_it_changes("array", kind));
}

#[test]
fn a_hash_map_with_values_for_each_cpu_that_changes() {
    let map_type = MapType::PERCPU_HASH;
    let kind = Kind { map_type, words: 1, flags: 0, max: 4096, deletes: true };
    mostly_complete(&read_while_it_changes("percpu", kind));
}

#[test]
fn a_map_that_nobody_changes_is_read_alike_in_all_ways() {
    let lab = Lab::builder().up().expect("a lab");
    for (name, map_type, flags, max) in [
        ("hash", MapType::HASH, 0, KEYS),
        ("lru", MapType::LRU_HASH, 0, KEYS * 8),
        ("trie", MapType::LPM_TRIE, NO_PREALLOC, KEYS),
        ("array", MapType::ARRAY, 0, KEYS),
        ("percpu", MapType::PERCPU_HASH, 0, KEYS),
    ] {
        let kind = Kind { map_type, words: 1, flags, max, deletes: false };
        let churned = Churned::new(&lab, name, kind);
        let (fd, info, cpus) = (churned.fd.as_fd(), &churned.info, churned.cpus);
        for dump in [
            dump::read(fd, info, cpus),
            dump::read_batches(fd, info, cpus),
            dump::read_by_key(fd, info, cpus),
        ] {
            let dump = dump.expect("a dump");
            assert!(dump.complete, "{name}");
            churned.check(&dump, name);
            assert_eq!(dump.entries.len(), KEYS as usize, "{name}");
        }
    }
}
