//! The analysis of attached programs on what `bpftool` showed of a real Cilium's. Needs no root.
//!
//! `bpftool` shows programs with the maps that they use, but not what is in a program array. Of
//! those, the members are taken to be the `tail_…` programs that use the array themselves, to call
//! on: all programs of one object share it.

use std::{collections::BTreeMap, fs, path::PathBuf};

use inspector::{
    cilium::layout::{Family, MapType},
    evidence::{
        Evidence,
        programs::{
            Attachments, CgroupAsked, CgroupHook, DeviceHook, DeviceName, Filter, HookKind,
            Program, UsedMap,
        },
    },
    judge::datapath::{self, DeviceDatapath, Reach},
};
use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Deserialize)]
struct ShownProgram {
    id: u32,
    #[serde(default)]
    name: String,
    tag: String,
    #[serde(default)]
    map_ids: Vec<u32>,
}

#[derive(Deserialize)]
struct ShownMap {
    id: u32,
    #[serde(rename = "type")]
    kind: Value,
    #[serde(default)]
    name: String,
    bytes_key: u32,
    bytes_value: u32,
    max_entries: u32,
}

#[derive(Deserialize)]
struct ShownHook {
    devname: String,
    ifindex: u32,
    kind: String,
    name: String,
    prog_id: Option<u32>,
    link_id: Option<u32>,
    id: Option<u32>,
}

#[derive(Deserialize)]
struct ShownCgroup {
    cgroup: String,
    programs: Vec<ShownCgroupProgram>,
}

#[derive(Deserialize)]
struct ShownCgroupProgram {
    id: u32,
    attach_type: String,
}

fn read<T: serde::de::DeserializeOwned>(capture: &str, file: &str) -> T {
    let path: PathBuf = inspector_lab::capture::project_captures().join(capture).join(file);
    let text = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// bpftool's word for a map type, as the kernel's number, of those that matter here.
fn map_type(kind: &Value) -> u32 {
    match kind.as_str() {
        Some("hash") => MapType::HASH.0,
        Some("prog_array") => MapType::PROG_ARRAY.0,
        // Never compared with a pinned services map.
        _ => 0,
    }
}

#[derive(Deserialize)]
struct ShownNet {
    tc: Vec<ShownHook>,
    xdp: Vec<Value>,
}

/// Devices and what is attached to them.
fn hooks(capture: &str, attachments: &mut Attachments) {
    let net: Vec<ShownNet> = read(capture, "bpftool-net-show.json");
    assert!(net.iter().all(|net| net.xdp.is_empty()), "XDP is not understood by this test");
    let mut orders: BTreeMap<(u32, HookKind), u32> = BTreeMap::new();
    for hook in net.iter().flat_map(|net| &net.tc) {
        let kind = match hook.kind.as_str() {
            "tcx/ingress" => HookKind::TcxIngress,
            "tcx/egress" => HookKind::TcxEgress,
            "clsact/ingress" => HookKind::ClsactIngress,
            "clsact/egress" => HookKind::ClsactEgress,
            other => panic!("{capture}: {other}"),
        };
        let order = orders.entry((hook.ifindex, kind)).or_default();
        let is_clsact = hook.kind.starts_with("clsact");
        attachments.hooks.push(DeviceHook {
            ifindex: hook.ifindex,
            kind,
            order: *order,
            program: hook.prog_id.or(hook.id).expect("a program id"),
            link: hook.link_id,
            filter: is_clsact.then(|| Filter {
                name: Some(hook.name.clone()),
                priority: 1,
                handle: 1,
                direct_action: true,
                protocol: 3,
                chain: 0,
                block: None,
            }),
        });
        *order += 1;
        let device = DeviceName { ifindex: hook.ifindex, name: hook.devname.clone() };
        if !attachments.devices.contains(&device) {
            attachments.devices.push(device);
        }
    }
}

/// The socket hooks, as if the cgroup that has them were the root.
fn cgroups(capture: &str, attachments: &mut Attachments) {
    let cgroups: Vec<ShownCgroup> = read(capture, "bpftool-cgroup-tree.json");
    assert_eq!(cgroups.len(), 1, "{capture}: one cgroup has them");
    for cgroup in cgroups {
        attachments.cgroups.push(CgroupAsked {
            subject: "root".to_owned(),
            cgroup: Some(cgroup.cgroup.clone()),
            problem: None,
        });
        attachments.cgroup.extend(cgroup.programs.into_iter().map(|program| CgroupHook {
            subject: "root".to_owned(),
            cgroup: cgroup.cgroup.clone(),
            attach_type: match program.attach_type.as_str() {
                "cgroup_inet4_connect" => "connect4".to_owned(),
                "cgroup_inet6_connect" => "connect6".to_owned(),
                "cgroup_udp4_sendmsg" => "sendmsg4".to_owned(),
                other => other.to_owned(),
            },
            order: 0,
            program: program.id,
        }));
    }
}

/// Programs, with the members of the program arrays that they use.
fn programs(capture: &str, maps: &[ShownMap]) -> Vec<Program> {
    let programs: Vec<ShownProgram> = read(capture, "bpftool-prog-show.json");
    assert!(programs.len() > 100, "{capture}: not a whole capture");
    let arrays = maps.iter().filter(|map| map.kind == "prog_array" && map.max_entries < 1000);
    let members: BTreeMap<u32, Vec<u32>> = arrays
        .map(|array| {
            let tail = programs
                .iter()
                .filter(|one| one.name.starts_with("tail_") && one.map_ids.contains(&array.id));
            (array.id, tail.map(|one| one.id).collect())
        })
        .collect();
    let tail_calls =
        |maps: &[u32]| maps.iter().filter_map(|map| members.get(map)).flatten().copied().collect();
    programs
        .into_iter()
        .map(|shown| Program {
            id: shown.id,
            name: shown.name,
            name_cut: false,
            program_type: 3,
            tag: shown.tag,
            loaded_ns: 0,
            run_count: None,
            run_time_ns: None,
            tail_calls: tail_calls(&shown.map_ids),
            maps: shown.map_ids,
            constants: BTreeMap::new(),
        })
        .collect()
}

/// The evidence of a capture, with its services maps pinned.
fn evidence(capture: &str) -> Evidence {
    let maps: Vec<ShownMap> = read(capture, "bpftool-map-show.json");
    assert!(maps.len() > 30, "{capture}: not a whole capture");
    let mut attachments = Attachments::default();
    hooks(capture, &mut attachments);
    cgroups(capture, &mut attachments);
    attachments.programs = programs(capture, &maps);
    let mut pinned = Vec::new();
    for map in &maps {
        attachments.maps.push(UsedMap {
            id: map.id,
            name: map.name.clone(),
            map_type: map_type(&map.kind),
            key_size: map.bytes_key,
            value_size: map.bytes_value,
        });
        let name = match map.name.as_str() {
            "cilium_lb4_serv" => "cilium_lb4_services_v2",
            "cilium_lb6_serv" => "cilium_lb6_services_v2",
            _ => continue,
        };
        pinned.push(json!({
            "name": name, "path": name, "id": map.id, "type": 1, "key_size": map.bytes_key,
            "value_size": map.bytes_value, "max_entries": map.max_entries, "flags": 1,
            "coverage": "selected", "method": "lookup", "complete": true, "entries": [],
        }));
    }
    attachments.maps.sort_by_key(|map| map.id);
    assert_eq!(pinned.len(), 2, "{capture}: one services map of each family");
    let mut evidence: Evidence = serde_json::from_value(json!({
        "schema": "inspector.evidence/1", "minor": 0,
        "tool": {"name": "test", "version": "0", "arguments": []},
        "host": {"name": capture, "boot_id": "", "kernel": "", "architecture": "", "cpus": 1,
            "capabilities": []},
        "time": {"started": "", "ended": "", "monotonic_ns": 0},
        "subject": {"kind": "datapath"}, "bpffs": [], "devices": [], "services_by_protocol": {},
        "maps": pinned, "sources": [],
    }))
    .expect("evidence");
    evidence.attachments = Some(attachments);
    evidence
}

fn device(evidence: &Evidence, name: &str) -> Option<DeviceDatapath> {
    let attachments = evidence.attachments.as_ref().expect("attachments");
    let found = attachments.devices.iter().find(|device| device.name == name)?;
    datapath::device(evidence, found.ifindex)
}

/// Both families.
fn services(evidence: &Evidence, name: &str) -> [Option<bool>; 2] {
    let device = device(evidence, name).unwrap_or_else(|| panic!("no device {name}"));
    [Family::V4, Family::V6].map(|family| device.services(family).expect("a map").known())
}

const YES: [Option<bool>; 2] = [Some(true); 2];
const NO: [Option<bool>; 2] = [Some(false); 2];

#[test]
fn devices_that_load_balance_are_told_from_those_that_do_not() {
    for capture in ["v1.18-tcx", "v1.18-clsact", "v1.13-clsact", "v1.21-tcx", "v1.18-l7lb"] {
        let evidence = evidence(capture);
        for (name, expected) in [("eno1", YES), ("wg0", YES), ("cilium_net", NO)] {
            assert_eq!(services(&evidence, name), expected, "{capture}: {name}");
        }
        let eno1 = device(&evidence, "eno1").expect("eno1");
        // The first program uses none of the load balancer's maps itself.
        let Some(Reach::TailCall { via }) = eno1.services(Family::V4) else {
            panic!("{capture}: {eno1:#?}")
        };
        assert!(via.last().expect("a way").starts_with("tail_"), "{capture}: {via:?}");
        // What leaves is no longer translated, though the tail calls are the same.
        let egress = eno1.programs.last().expect("two programs");
        assert!(!egress.translates && egress.is_cilium, "{capture}: {egress:#?}");

        let all = datapath::datapath(&evidence).expect("attachments");
        assert_eq!(all.findings, [], "{capture}");
        assert_eq!(all.stale_maps, [], "{capture}");
        let socket = datapath::socket(&evidence, "root").expect("a cgroup");
        for hook in ["connect4", "connect6", "sendmsg4"] {
            assert_eq!(socket.services(hook), Some(Reach::Itself), "{capture}: {hook}");
        }
    }
}

/// With socket-LB for pods, what a pod forwards is not translated at its device.
#[test]
fn the_programs_of_pods_load_balance_only_without_socket_lb() {
    for (capture, expected) in [
        ("v1.18-tcx", Some(false)),
        ("v1.18-clsact", Some(false)),
        ("v1.21-tcx", Some(false)),
        ("v1.18-sock-hostns-only", Some(true)),
        // L7 frontends are not for sockets.
        ("v1.18-l7lb", Some(true)),
    ] {
        let evidence = evidence(capture);
        let names: Vec<String> = evidence
            .attachments
            .iter()
            .flat_map(|attachments| &attachments.devices)
            .filter(|device| device.name.starts_with("lxc"))
            .map(|device| device.name.clone())
            .collect();
        assert_eq!(names.len(), 2, "{capture}");
        for name in names {
            let [v4, _] = services(&evidence, &name);
            assert_eq!(v4, expected, "{capture}: {name}");
        }
    }
}

#[test]
fn a_device_whose_program_is_gone_does_not_load_balance() {
    let evidence = evidence("v1.18-wg0-detached");
    assert_eq!(services(&evidence, "eno1"), YES);
    assert_eq!(services(&evidence, "wg0"), NO);
    let wg0 = device(&evidence, "wg0").expect("its egress program is there");
    assert_eq!(wg0.services(Family::V4), Some(Reach::NoProgram));
    assert!(wg0.has_cilium());
    assert_eq!(wg0.ingress().count(), 0);
}

#[test]
fn programs_with_other_maps_are_told() {
    let mut evidence = evidence("v1.18-tcx");
    // As if somebody had unpinned the map and the agent had pinned a new one.
    let pinned = evidence
        .maps
        .iter_mut()
        .find(|map| map.name == "cilium_lb4_services_v2")
        .expect("the services map");
    let used = std::mem::replace(&mut pinned.id, 999_999);
    let eno1 = device(&evidence, "eno1").expect("eno1");
    assert_eq!(eno1.services(Family::V4), Some(Reach::OtherMap { map: used }));
    assert_eq!(eno1.services(Family::V6).expect("the other family").known(), Some(true));
    let all = datapath::datapath(&evidence).expect("attachments");
    let ids: Vec<_> = all.findings.iter().map(|finding| finding.id.as_str()).collect();
    assert_eq!(ids, ["stale-pins"]);
    assert_eq!((all.stale_maps[0].pinned, all.stale_maps[0].used), (999_999, used));
}

#[test]
fn what_could_not_be_read_is_unknown_and_not_absent() {
    let mut evidence = evidence("v1.18-wg0-detached");
    evidence.sources.push(inspector::evidence::Source {
        what: inspector::evidence::programs::DEVICES.to_owned(),
        status: inspector::evidence::SourceStatus::Failed,
        reason: Some("not allowed".to_owned()),
    });
    assert_eq!(services(&evidence, "wg0"), [None, None]);
    // What was seen all the same stays true.
    assert_eq!(services(&evidence, "eno1"), YES);

    // A program that is attached and was not described.
    let attachments = evidence.attachments.as_mut().expect("attachments");
    let eno1 = attachments.hooks[0].program;
    attachments.programs.retain(|program| program.id != eno1);
    attachments.links.clear();
    let eno1 = device(&evidence, "eno1").expect("eno1");
    assert_eq!(eno1.programs[0].name, None);
    assert_eq!(eno1.services(Family::V4).expect("a map").known(), None);
}
