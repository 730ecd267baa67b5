//! The decoders against what a real Cilium had in its maps, and against what `cilium-dbg` made of
//! it at the same moment.

mod entries;

use std::{collections::BTreeMap, fmt::Write as _, net::IpAddr};

use entries::{masked, significant};
use inspector::cilium::{
    backends::BackendState,
    conntrack::Conntrack,
    endpoints::Endpoint,
    entry::Entry,
    flags::ServiceFlags,
    ipcache::Ipcache,
    layout::{self, Layout, LayoutError, MapKind},
    metrics::{Metric, file_name, reason_text},
    proto::Protocol,
    release::{self, LookupOrder, Qcount, Release, SlotFlags},
    services::{Service, ServiceKey},
    snat::Snat,
};
use inspector_lab::{Capture, capture};

/// Every capture of the project, with its name.
fn captures() -> Vec<(String, Capture)> {
    let root = capture::project_captures();
    let captures: Vec<_> = capture::list_project()
        .unwrap()
        .into_iter()
        .map(|path| {
            let name = path.strip_prefix(&root).unwrap_or(&path).display().to_string();
            (name, Capture::open(&path).unwrap())
        })
        .collect();
    assert!(captures.len() >= 19, "captures are missing: {}", captures.len());
    captures
}

/// The maps of a capture that inspector reads, with their entries.
fn maps(capture: &Capture) -> impl Iterator<Item = (&'static Layout, &[capture::Entry])> {
    capture.maps().filter_map(|map| {
        let spec = &map.spec;
        match layout::detect(&map.name, spec.map_type, spec.key_size, spec.value_size) {
            Ok(layout) => Some((layout, map.entries.as_slice())),
            Err(LayoutError::NotRead { .. }) => None,
            Err(error) => panic!("{}: {error}", map.path.display()),
        }
    })
}

/// All entries of one kind, decoded.
fn decoded<T>(
    capture: &Capture,
    kind: MapKind,
    pick: impl Fn(Entry) -> Option<T>,
) -> impl Iterator<Item = T> {
    maps(capture).filter(move |(layout, _)| layout.kind == kind).flat_map(move |(layout, found)| {
        found
            .iter()
            .map(|entry| {
                pick(Entry::decode(layout, &entry.key, &entry.value).unwrap()).expect("the kind")
            })
            .collect::<Vec<_>>()
    })
}

macro_rules! decoded {
    ($capture:expr, $kind:ident) => {
        decoded($capture, MapKind::$kind, |entry| match entry {
            Entry::$kind(entry) => Some(entry),
            _ => None,
        })
    };
}

#[test]
fn every_entry_is_read_and_written_back() {
    let mut seen: BTreeMap<MapKind, usize> = BTreeMap::new();
    let mut padding: BTreeMap<String, usize> = BTreeMap::new();
    for (name, capture) in captures() {
        for (layout, found) in maps(&capture) {
            *seen.entry(layout.kind).or_default() += found.len();
            for entry in found {
                let whence = || format!("{name}: {}: {:02x?}", layout.name, entry.key);
                let typed = Entry::decode(layout, &entry.key, &entry.value)
                    .unwrap_or_else(|error| panic!("{}: {error}", whence()));
                let (key, value) = typed.encode(layout).unwrap();
                let (key_mask, value_mask) = significant(layout, &entry.key, &entry.value);
                assert_eq!(key, masked(&entry.key, &key_mask), "{}", whence());
                assert_eq!(value, masked(&entry.value, &value_mask), "{}", whence());
                if key != entry.key || value != entry.value {
                    *padding.entry(format!("{name}: {}", layout.name)).or_default() += 1;
                }
            }
        }
    }
    // In none of them does padding hold anything: the bytes are the same to the last bit.
    assert_eq!(padding, BTreeMap::new());
    // What the captures do not show, so that this test is not taken for more than it is. The kinds
    // that are missing have no entries in any capture.
    let missing: Vec<_> = layout::LAYOUTS
        .iter()
        .map(|layout| layout.kind)
        .filter(|kind| seen.get(kind).is_none_or(|count| *count == 0))
        .collect();
    assert!(
        missing.iter().all(|kind| matches!(
            kind,
            MapKind::Maglev | MapKind::Health | MapKind::SkipLb | MapKind::ActiveConnections
        )),
        "{missing:?}"
    );
    assert!(seen[&MapKind::Services] > 30_000, "{seen:?}");
}

/// The release that each capture was taken on, by its name.
fn release_of(name: &str) -> Release {
    if name.starts_with("v1.13") {
        Release::V1_13_90
    } else if name.starts_with("v1.21") {
        Release::V1_21
    } else if name.starts_with("v1.19") {
        Release::V1_19
    } else {
        Release::V1_18
    }
}

#[test]
fn the_release_is_told_from_the_pins() {
    let mut told = 0;
    for (name, capture) in captures() {
        // Only these list what was pinned; the others hold a few maps of a node.
        if !capture.has("find-bpffs.txt") {
            continue;
        }
        let listing = capture.text("find-bpffs.txt").unwrap();
        let pins = listing.lines().filter_map(|path| path.rsplit_once("/globals/")).map(|p| p.1);
        let any_proto =
            decoded!(&capture, Services).any(|service| service.key.protocol != Protocol::ANY);
        assert_eq!(any_proto, !matches!(name.as_str(), "v1.13-clsact" | "v1.18-proto-any"));
        let range = release::detect(pins, any_proto);
        let expected = match release_of(&name) {
            Release::V1_13_90 => "1.13.90",
            Release::V1_18 => "1.18",
            Release::V1_19 => "1.19",
            _ => "1.20 to 1.21",
        };
        assert_eq!(range.to_string(), expected, "{name}");
        assert_eq!(range.assumed(), release_of(&name), "{name}");
        told += 1;
    }
    assert_eq!(told, 10);
}

/// What the table of behaviours says of the services maps, where the maps can tell.
#[test]
fn services_are_as_the_table_of_behaviours_says() {
    let mut frontends = 0;
    for (name, capture) in captures() {
        // In the faults folders entries were removed by hand.
        if name.contains("faults") {
            continue;
        }
        let behaviour = release_of(&name).behaviour();
        let maintenance: Vec<u32> = decoded!(&capture, Backends)
            .filter(|backend| backend.state == BackendState::Maintenance)
            .map(|backend| backend.id)
            .collect();
        let services: BTreeMap<_, _> =
            decoded!(&capture, Services).map(|service| (service.key, service)).collect();
        let mut slots: BTreeMap<_, u16> = BTreeMap::new();
        let (mut wildcards, mut maintenance_slots) = (0, 0);
        for (key, slot) in services.iter().filter(|(key, _)| !key.is_master()) {
            let key = ServiceKey { slot: 0, ..*key };
            let master = &services[&key];
            *slots.entry(key).or_default() += 1;
            let flags = match behaviour.slot_flags {
                SlotFlags::Zero => ServiceFlags(0),
                SlotFlags::CopyOfMaster => master.flags,
                SlotFlags::Quarantined => unreachable!("no capture of 1.17"),
            };
            assert_eq!(slot.flags, flags, "{name}: {key:?}");
            assert_eq!((slot.count, slot.qcount), (0, 0), "{name}: {key:?}");
            maintenance_slots += usize::from(maintenance.contains(&slot.union));
        }
        for (key, master) in services.iter().filter(|(key, _)| key.is_master()) {
            let slots = slots.get(key).copied().unwrap_or(0);
            match behaviour.qcount {
                Qcount::Padding => {
                    assert!(master.qcount == 0 && master.count <= slots, "{name}: {key:?}");
                }
                Qcount::NotSelectable => {
                    assert_eq!(master.count + master.qcount, slots, "{name}: {key:?}");
                }
            }
            wildcards += usize::from(key.is_wildcard());
            frontends += 1;
        }
        assert_eq!(wildcards > 0, behaviour.lookup == LookupOrder::ExactThenWildcard, "{name}");
        assert!(!maintenance.is_empty(), "{name}");
        assert_eq!(maintenance_slots > 0, behaviour.maintenance_slots, "{name}");
    }
    assert!(frontends > 11_000, "{frontends}");
}

/// Lines of a table that `cilium-dbg` printed, without its header, cells cut at runs of spaces.
fn table(capture: &Capture, file: &str) -> Option<Vec<Vec<String>>> {
    let text = capture.has(file).then(|| capture.text(file).unwrap())?;
    Some(
        text.lines()
            .skip(1)
            .filter(|line| !line.trim().is_empty())
            .map(|line| {
                line.trim_end()
                    .split("  ")
                    .map(str::trim)
                    .enumerate()
                    .filter(|(index, cell)| *index == 0 || !cell.is_empty())
                    .map(|(_, cell)| cell.to_owned())
                    .collect()
            })
            .collect(),
    )
}

/// Compares as sets with multiplicity, and counts.
fn same(name: &str, what: &str, mut ours: Vec<String>, mut theirs: Vec<String>) -> usize {
    ours.sort();
    theirs.sort();
    let only = |these: &[String], those: &[String]| -> Vec<String> {
        these.iter().filter(|line| those.binary_search(line).is_err()).cloned().collect()
    };
    let (only_ours, only_theirs) = (only(&ours, &theirs), only(&theirs, &ours));
    assert!(
        ours == theirs,
        "{name}: {what}: {} against {}\nonly from the maps: {only_ours:#?}\nonly printed: {only_theirs:#?}",
        ours.len(),
        theirs.len(),
    );
    ours.len()
}

/// `address:port`, IPv6 in brackets.
fn socket(address: IpAddr, port: u16) -> String {
    std::net::SocketAddr::new(address, port).to_string()
}

#[test]
fn backends_are_what_was_printed() {
    let mut rows = 0;
    for (name, capture) in captures() {
        let Some(table) = table(&capture, "cilium/lb-list-backends.txt") else { continue };
        let ours = decoded!(&capture, Backends)
            .map(|backend| format!("{} {}://{}", backend.id, backend.protocol, backend.address));
        let theirs = table.into_iter().map(|row| row.join(" "));
        rows += same(&name, "backends", ours.collect(), theirs.collect());
    }
    assert!(rows > 300, "{rows}");
}

#[test]
fn reverse_nat_is_what_was_printed() {
    let mut rows = 0;
    for (name, capture) in captures() {
        let Some(table) = table(&capture, "cilium/lb-list-revnat.txt") else { continue };
        let ours = decoded!(&capture, ReverseNat)
            .map(|entry| format!("{} {}", entry.index, socket(entry.address, entry.port)));
        let theirs = table.into_iter().map(|row| row.join(" "));
        rows += same(&name, "reverse NAT", ours.collect(), theirs.collect());
    }
    assert!(rows > 1400, "{rows}");
}

#[test]
fn source_ranges_are_what_was_printed() {
    let mut rows = 0;
    for (name, capture) in captures() {
        let Some(table) = table(&capture, "cilium/lb-list-source-ranges.txt") else { continue };
        let ours = decoded!(&capture, SourceRange).map(|entry| {
            format!("{}/{} ({})", entry.address, entry.prefix_len, entry.rev_nat_index)
        });
        let theirs = table.into_iter().map(|row| row.join(" "));
        rows += same(&name, "source ranges", ours.collect(), theirs.collect());
    }
    assert!(rows > 150, "{rows}");
}

/// The words in the brackets behind every master entry.
#[test]
fn flags_are_what_was_printed() {
    let mut rows = 0;
    for (name, capture) in captures() {
        let Some(table) = table(&capture, "cilium/lb-list.txt") else { continue };
        let release = release_of(&name);
        let theirs = table.iter().filter_map(|row| {
            let cell = row.last()?;
            let (head, flags) = cell.split_once(" [")?;
            let id = head.split_once('(')?.1.split_once(')')?.0;
            Some(format!("{id} {}", flags.split_once(']')?.0))
        });
        let ours = decoded!(&capture, Services).filter(|entry| entry.key.is_master()).map(
            |Service { rev_nat_index, flags, .. }| {
                assert_eq!(flags.unknown(release), ServiceFlags(0), "{name}");
                format!("{rev_nat_index} {}", flags.text(release))
            },
        );
        rows += same(&name, "flags", ours.collect(), theirs.collect());
    }
    assert!(rows > 1700, "{rows}");
}

#[test]
fn endpoints_are_what_was_printed() {
    let mut rows = 0;
    for (name, capture) in captures() {
        let Some(table) = table(&capture, "cilium/endpoints.txt") else { continue };
        let release = release_of(&name);
        let line = |endpoint: Endpoint| {
            let address = match endpoint.address {
                IpAddr::V6(address) if release == Release::V1_13_90 => format!("[{address}]:0"),
                address => format!("{address}:0"),
            };
            if endpoint.flags.is_host() {
                return format!("{address} (localhost)");
            }
            let mut line = format!("{address} id={} ", endpoint.lxc_id);
            if release >= Release::V1_14 {
                write!(line, "sec_id={} ", endpoint.sec_id).unwrap();
            }
            let mac = |mac: inspector::cilium::mac::Mac| mac.to_string().to_uppercase();
            write!(
                line,
                "flags=0x{:04X} ifindex={} mac={} nodemac={}",
                endpoint.flags.0,
                endpoint.ifindex,
                mac(endpoint.mac),
                mac(endpoint.node_mac)
            )
            .unwrap();
            if release >= Release::V1_17 {
                write!(line, " parent_ifindex={}", endpoint.parent_ifindex).unwrap();
            }
            line
        };
        let ours = decoded!(&capture, Endpoints).map(line);
        let theirs = table.into_iter().map(|row| {
            let row = row.join(" ");
            // What 1.21 prints beyond: zero everywhere.
            row.strip_suffix(" rt_info:0").unwrap_or(&row).to_owned()
        });
        rows += same(&name, "endpoints", ours.collect(), theirs.collect());
    }
    assert!(rows > 90, "{rows}");
}

#[test]
fn the_ipcache_is_what_was_printed() {
    let mut rows = 0;
    for (name, capture) in captures() {
        let Some(table) = table(&capture, "cilium/ipcache.txt") else { continue };
        let ours = decoded!(&capture, Ipcache).map(|entry: Ipcache| {
            format!(
                "{}/{} identity={} encryptkey={} tunnelendpoint={}",
                entry.address,
                entry.prefix_len,
                entry.identity.0,
                entry.encrypt_key,
                entry.tunnel_endpoint.unwrap_or([0; 4].into())
            )
        });
        let theirs = table.into_iter().map(|row| row.join(" "));
        rows += same(&name, "ipcache", ours.collect(), theirs.collect());
    }
    assert!(rows > 10, "{rows}");
}

/// The word for a protocol in `ct list` and `nat list`.
fn protocol(protocol: Protocol) -> String {
    match protocol.0 {
        1 => "ICMP".to_owned(),
        58 => "ICMPv6".to_owned(),
        _ => protocol.to_string(),
    }
}

#[test]
fn conntrack_is_what_was_printed() {
    let mut rows = 0;
    for (name, capture) in captures() {
        if !capture.has("cilium/ct-list.txt") {
            continue;
        }
        let release = release_of(&name);
        // Neither release puts an IPv6 address into brackets here.
        let socket = |address: IpAddr, port: u16| format!("{address}:{port}");
        let line = |entry: Conntrack| {
            let mut line = format!(
                "{} {} {} -> {} ",
                protocol(entry.protocol),
                entry.tuple_flags.direction(),
                socket(entry.source, entry.source_port),
                socket(entry.destination, entry.destination_port),
            );
            if entry.tuple_flags.is_related() {
                line += "related ";
            }
            write!(
                line,
                "expires={} Packets={} Bytes={} RxFlagsSeen=0x{:02x} LastRxReport={} \
                 TxFlagsSeen=0x{:02x} LastTxReport={} Flags=0x{:04x} [ ",
                entry.lifetime,
                entry.packets,
                entry.bytes,
                entry.rx_flags_seen,
                entry.last_rx_report,
                entry.tx_flags_seen,
                entry.last_tx_report,
                entry.flags.0,
            )
            .unwrap();
            for word in entry.flags.words() {
                write!(line, "{word} ").unwrap();
            }
            write!(
                line,
                "] RevNAT={} SourceSecurityID={} BackendID={}",
                entry.rev_nat_index,
                entry.source_identity,
                entry.backend_id().unwrap_or(0)
            )
            .unwrap();
            if release >= Release::V1_20 {
                write!(line, " NatPort={}", u16::from_be_bytes(entry.word40)).unwrap();
            }
            line
        };
        let text = capture.text("cilium/ct-list.txt").unwrap();
        let theirs =
            text.lines().map(|line| line.trim_end().to_owned()).filter(|line| !line.is_empty());
        let ours = decoded!(&capture, Conntrack).map(line);
        // Pods send router solicitations by themselves, sometimes between listing and maps: the
        // same entries, seen again a little later.
        let timeless = |line: String| {
            if !line.contains(" -> ff02::2:0 ") {
                return line;
            }
            let clock =
                |word: &&str| !word.starts_with("expires=") && !word.starts_with("LastTxReport=");
            line.split(' ').filter(clock).collect::<Vec<_>>().join(" ")
        };
        rows +=
            same(&name, "conntrack", ours.map(timeless).collect(), theirs.map(timeless).collect());
    }
    assert!(rows > 1000, "{rows}");
}

#[test]
fn nat_is_what_was_printed() {
    let mut rows = 0;
    for (name, capture) in captures() {
        if !capture.has("cilium/nat-list.txt") {
            continue;
        }
        let line = |entry: Snat| {
            format!(
                "{} {} {} -> {} XLATE_{} {} NeedsCT={}",
                protocol(entry.protocol),
                entry.tuple_flags.direction(),
                socket(entry.source, entry.source_port),
                socket(entry.destination, entry.destination_port),
                if entry.tuple_flags.is_in() { "DST" } else { "SRC" },
                socket(entry.to_address, entry.to_port),
                entry.needs_ct,
            )
        };
        let text = capture.text("cilium/nat-list.txt").unwrap();
        // The age depends on when the line was printed.
        let theirs = text.lines().filter(|line| !line.trim().is_empty()).map(|line| {
            let (head, age) = line.trim_end().split_once("Created=").unwrap();
            format!("{head}{}", age.split_once("ago ").unwrap().1)
        });
        let ours = decoded!(&capture, Snat).map(line);
        rows += same(&name, "NAT", ours.collect(), theirs.collect());
    }
    assert!(rows > 50, "{rows}");
}

/// 1.13 printed its metrics some time after its maps were dumped: the same rows, and counters that
/// went on from there.
#[test]
fn metrics_are_what_was_printed() {
    let capture = Capture::project("v1.13-clsact").unwrap();
    let mut ours: BTreeMap<(String, String), (u64, u64)> = BTreeMap::new();
    for metric in decoded!(&capture, Metrics) {
        let total = metric.total();
        let row =
            (reason_text(metric.reason).unwrap().to_owned(), metric.direction.as_str().to_owned());
        assert_eq!(ours.insert(row, (total.packets, total.bytes)), None);
    }
    let theirs: BTreeMap<(String, String), (u64, u64)> = table(&capture, "cilium/metrics.txt")
        .unwrap()
        .into_iter()
        .map(|row| {
            let [reason, direction, packets, bytes] = row.try_into().unwrap();
            ((reason, direction), (packets.parse().unwrap(), bytes.parse().unwrap()))
        })
        .collect();
    assert!(ours.keys().eq(theirs.keys()), "{ours:?} {theirs:?}");
    for (row, (packets, bytes)) in &ours {
        let (later_packets, later_bytes) = theirs[row];
        assert!(later_packets >= *packets && later_bytes >= *bytes, "{row:?}");
    }
}

/// Where a metric comes from: the printed listings of the faults folders name the same files.
#[test]
fn every_metric_has_a_reason_and_a_file() {
    let mut metrics = 0;
    for (name, capture) in captures() {
        for Metric { reason, file, line, .. } in decoded!(&capture, Metrics) {
            assert!(reason_text(reason).is_some(), "{name}: {reason}");
            let file_name = file_name(file, release_of(&name));
            assert_eq!(file_name.is_some(), line != 0, "{name}: {file} {line}");
            metrics += 1;
        }
    }
    assert!(metrics > 150, "{metrics}");
}
