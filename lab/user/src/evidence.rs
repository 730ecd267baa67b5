//! A capture as evidence: what `inspect` would have collected on the node at that moment.
//!
//! Rules can then be held to real nodes without a kernel. Maps come from their files; programs,
//! links, addresses, routes, rules and neighbours from what `bpftool` and `ip` printed.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::PathBuf,
};

use inspector::{
    collect::dump::Method,
    evidence::{
        Bpffs, Coverage, Device, Entries, Evidence, Host, MapRecord, SCHEMA, SCHEMA_MINOR, Subject,
        Time, Tool, VipQuery,
        network::{Link, Neighbour, Network, Route, RouteAnswer, Rule},
        programs::{
            Attachments, CgroupAsked, CgroupHook, DeviceHook, DeviceName, Filter, HookKind,
            Program, UsedMap,
        },
    },
};
use serde_json::Value;

use crate::capture::{Capture, CaptureError, CapturedMap};

/// Index of the agent's liveness in `cilium_runtime_config`.
const AGENT_LIVENESS: [u8; 4] = [1, 0, 0, 0];

/// `BPF_MAP_TYPE_PROG_ARRAY`, as `bpftool` names it.
const PROG_ARRAY: &str = "prog_array";

/// What `inspect vip` would have collected for `query`.
///
/// # Errors
/// [`CaptureError`] where a file of the capture is missing or cannot be read.
pub fn evidence(capture: &Capture, query: VipQuery) -> Result<Evidence, CaptureError> {
    let json = |name: &str| -> Result<Value, CaptureError> {
        let text = capture.text(name)?;
        Ok(serde_json::from_str(&text).unwrap_or(Value::Null))
    };
    let names: BTreeMap<u32, String> = array(&json("ip-addr.json")?)
        .iter()
        .filter_map(|link| Some((number(link, "ifindex")?, text(link, "ifname")?.to_owned())))
        .collect();
    let maps: Vec<MapRecord> = capture.maps().map(record).collect();
    let pins: Vec<String> = capture.maps().map(|map| map.name.clone()).collect();
    Ok(Evidence {
        schema: SCHEMA.to_owned(),
        minor: SCHEMA_MINOR,
        tool: Tool {
            name: "inspector-lab".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            arguments: Vec::new(),
        },
        host: Host { name: "captured".to_owned(), cpus: cpus(capture), ..Host::default() },
        // The agent lived when the capture was taken: its last sign of life is "now".
        time: Time { monotonic_ns: liveness(capture), ..Time::default() },
        subject: Subject::Vip(query),
        via: Vec::new(),
        bpffs: vec![Bpffs {
            path: PathBuf::from("/sys/fs/bpf"),
            device: "0:0".to_owned(),
            read: true,
            pins: pins.clone(),
        }],
        devices: devices(&pins, &names),
        services_by_protocol: protocols(&maps),
        maglev: Vec::new(),
        maps,
        attachments: Some(attachments(
            &json("bpftool-net-show.json")?,
            &json("bpftool-prog-show.json")?,
            &json("bpftool-map-show.json")?,
            &json("bpftool-cgroup-tree.json")?,
            &names,
        )),
        network: Some(network(capture, &json("ip-addr.json")?, &json("ip-neigh.json")?, query)?),
        trace: None,
        sources: Vec::new(),
        simulation: None,
        injection: None,
        verdict: None,
    })
}

fn array(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn text<'a>(value: &'a Value, key: &str) -> Option<&'a str> {
    value.get(key)?.as_str()
}

fn number(value: &Value, key: &str) -> Option<u32> {
    value.get(key)?.as_u64()?.try_into().ok()
}

fn record(map: &CapturedMap) -> MapRecord {
    let spec = &map.spec;
    let value_len = map.entries.first().map_or(spec.value_size as usize, |entry| entry.value.len());
    let mut entries = Entries::new(spec.key_size as usize, value_len);
    for entry in map.entries.iter().filter(|entry| entry.value.len() == value_len) {
        entries.push(&entry.key, &entry.value);
    }
    MapRecord {
        name: map.name.clone(),
        path: format!("/sys/fs/bpf/tc/globals/{}", map.name),
        id: map.id,
        map_type: spec.map_type,
        key_size: spec.key_size,
        value_size: spec.value_size,
        max_entries: spec.max_entries,
        flags: spec.flags,
        coverage: Coverage::All,
        method: Method::File,
        complete: true,
        total: Some(map.entries.len() as u64),
        problem: None,
        entries,
    }
}

/// CPUs of the captured node: how many values an entry of a per-CPU map has.
fn cpus(capture: &Capture) -> usize {
    capture
        .maps()
        .filter(|map| map.spec.map_type.is_per_cpu())
        .find_map(|map| {
            let size = (map.spec.value_size as usize).next_multiple_of(8);
            Some(map.entries.first()?.value.len() / size)
        })
        .unwrap_or(1)
}

fn liveness(capture: &Capture) -> u64 {
    capture
        .map("cilium_runtime_config")
        .and_then(|map| map.entries.iter().find(|entry| entry.key == AGENT_LIVENESS))
        .and_then(|entry| entry.value.as_slice().try_into().ok())
        .map_or(0, u64::from_le_bytes)
}

fn devices(pins: &[String], names: &BTreeMap<u32, String>) -> Vec<Device> {
    pins.iter()
        .filter_map(|pin| {
            let ifindex = pin.strip_prefix("cilium_calls_netdev_")?.parse().ok()?;
            Some(Device {
                ifindex,
                name: names.get(&ifindex).cloned(),
                named_by: vec![pin.clone()],
            })
        })
        .collect()
}

fn protocols(maps: &[MapRecord]) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    for map in maps.iter().filter(|map| map.name.contains("_services_")) {
        for (key, _) in map.entries.iter() {
            // The protocol stands four bytes before the end of the key.
            let protocol = inspector::cilium::proto::Protocol(key[key.len() - 4]);
            *counts.entry(protocol.to_string()).or_default() += 1;
        }
    }
    counts
}

fn attachments(
    net: &Value,
    programs: &Value,
    maps: &Value,
    cgroups: &Value,
    names: &BTreeMap<u32, String>,
) -> Attachments {
    let mut used: Vec<UsedMap> = array(maps)
        .iter()
        .filter_map(|map| {
            Some(UsedMap {
                id: number(map, "id")?,
                name: text(map, "name").unwrap_or_default().to_owned(),
                map_type: 0,
                key_size: number(map, "bytes_key").unwrap_or_default(),
                value_size: number(map, "bytes_value").unwrap_or_default(),
            })
        })
        .collect();
    used.sort_by_key(|map| map.id);
    // The policy arrays are shared by all: they hold the endpoints' policy programs.
    let is_calls =
        |map: &&Value| text(map, "name").is_some_and(|name| name.starts_with("cilium_calls"));
    let arrays: BTreeSet<u32> = array(maps)
        .iter()
        .filter(|map| text(map, "type") == Some(PROG_ARRAY))
        .filter(is_calls)
        .filter_map(|map| number(map, "id"))
        .collect();
    Attachments {
        hooks: hooks(net),
        cgroup: cgroup_hooks(cgroups),
        links: Vec::new(),
        programs: loaded(programs, &arrays),
        devices: names
            .iter()
            .map(|(ifindex, name)| DeviceName { ifindex: *ifindex, name: name.clone() })
            .collect(),
        other_filters: Vec::new(),
        cgroups: ["root", "self"]
            .map(|subject| CgroupAsked {
                subject: subject.to_owned(),
                cgroup: Some("/".to_owned()),
                problem: None,
            })
            .into(),
        maps: used,
    }
}

fn hooks(net: &Value) -> Vec<DeviceHook> {
    let listed = |key: &str| net.get(0).and_then(|all| all.get(key)).map_or(&[][..], array);
    let mut hooks: Vec<DeviceHook> = Vec::new();
    for hook in listed("tc").iter().chain(listed("xdp")) {
        let kind = match text(hook, "kind") {
            Some("tcx/ingress") => HookKind::TcxIngress,
            Some("tcx/egress") => HookKind::TcxEgress,
            Some("clsact/ingress") => HookKind::ClsactIngress,
            Some("clsact/egress") => HookKind::ClsactEgress,
            _ => HookKind::XdpGeneric,
        };
        let program = number(hook, "prog_id").or_else(|| number(hook, "id"));
        let (Some(ifindex), Some(program)) = (number(hook, "ifindex"), program) else { continue };
        let before = hooks.iter().filter(|one| (one.ifindex, one.kind) == (ifindex, kind)).count();
        let clsact = matches!(kind, HookKind::ClsactIngress | HookKind::ClsactEgress);
        hooks.push(DeviceHook {
            ifindex,
            kind,
            order: u32::try_from(before).unwrap_or(u32::MAX),
            program,
            link: number(hook, "link_id"),
            filter: clsact.then(|| Filter {
                name: text(hook, "name").map(str::to_owned),
                priority: 1,
                handle: 1,
                direct_action: true,
                protocol: 3,
                chain: 0,
                block: None,
            }),
        });
    }
    hooks
}

/// The cgroup of the captured agent stands for the root: every process was below it, unless the
/// probe says otherwise.
fn cgroup_hooks(cgroups: &Value) -> Vec<CgroupHook> {
    let mut hooks = Vec::new();
    for cgroup in array(cgroups) {
        let programs = cgroup.get("programs").map_or(&[][..], array);
        for program in programs {
            let Some(attach) = text(program, "attach_type") else { continue };
            // `cgroup_inet4_connect` is `connect4`, `cgroup_udp6_sendmsg` is `sendmsg6`.
            let version = if attach.contains('6') { "6" } else { "4" };
            let call = attach.rsplit('_').next().unwrap_or(attach);
            let Some(id) = number(program, "id") else { continue };
            for subject in ["root", "self"] {
                hooks.push(CgroupHook {
                    subject: subject.to_owned(),
                    cgroup: text(cgroup, "cgroup").unwrap_or_default().to_owned(),
                    attach_type: format!("{call}{version}"),
                    order: 0,
                    program: id,
                });
            }
        }
    }
    hooks
}

/// Programs; those that share a program array are taken for the ones in it, since the captures do
/// not hold what is in program arrays.
fn loaded(programs: &Value, arrays: &BTreeSet<u32>) -> Vec<Program> {
    let maps_of = |program: &Value| -> Vec<u32> {
        array(program.get("map_ids").unwrap_or(&Value::Null))
            .iter()
            .filter_map(|id| id.as_u64()?.try_into().ok())
            .collect()
    };
    let mut members: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for program in array(programs) {
        let Some(id) = number(program, "id") else { continue };
        for map in maps_of(program) {
            if arrays.contains(&map) {
                members.entry(map).or_default().push(id);
            }
        }
    }
    let mut loaded: Vec<Program> = array(programs)
        .iter()
        .filter_map(|program| {
            let id = number(program, "id")?;
            let maps = maps_of(program);
            let mut tail_calls: Vec<u32> = maps
                .iter()
                .filter(|map| arrays.contains(map))
                .filter_map(|map| members.get(map))
                .flatten()
                .copied()
                .filter(|other| *other != id)
                .collect();
            tail_calls.sort_unstable();
            tail_calls.dedup();
            Some(Program {
                id,
                name: text(program, "name").unwrap_or_default().to_owned(),
                name_cut: false,
                program_type: 0,
                tag: text(program, "tag").unwrap_or_default().to_owned(),
                loaded_ns: 0,
                run_count: None,
                run_time_ns: None,
                maps,
                tail_calls,
                constants: BTreeMap::new(),
            })
        })
        .collect();
    loaded.sort_by_key(|program| program.id);
    loaded
}

fn network(
    capture: &Capture,
    addresses: &Value,
    neighbours: &Value,
    query: VipQuery,
) -> Result<Network, CaptureError> {
    let links: Vec<Link> = array(addresses).iter().filter_map(link).collect();
    let index = |name: &str| links.iter().find(|link| link.name == name).map(|link| link.ifindex);
    let mut routes = capture.text("ip-route.txt")?;
    if capture.has("ip-route6.txt") {
        routes.push_str(&capture.text("ip-route6.txt")?);
    }
    let table = routes.lines().filter_map(|line| route(line, &index)).collect::<Vec<_>>();
    let backends: BTreeSet<IpAddr> = capture
        .maps()
        .map(record)
        .filter_map(|map| {
            let layout = map.layout().ok()?;
            (layout.kind == inspector::cilium::layout::MapKind::Backends).then(|| {
                map.entries
                    .iter()
                    .filter_map(|(key, value)| {
                        inspector::cilium::backends::Backend::decode(layout, key, value).ok()
                    })
                    .map(|backend| backend.address)
                    .collect::<Vec<_>>()
            })
        })
        .flatten()
        .collect();
    let inputs = links.iter().map(|link| Some(link.ifindex)).chain([None]);
    let asked = inputs
        .map(|input| (query.address, input))
        .chain(backends.into_iter().map(|backend| (backend, None)))
        .map(|(destination, input)| RouteAnswer {
            destination,
            input,
            source: None,
            answer: answer(&table, destination),
        })
        .collect();
    let flags = if capture.has("extra-agent-flags.txt") {
        capture.text("extra-agent-flags.txt")?
    } else {
        String::new()
    };
    // What the agent compiles in, as far as its flags tell.
    let mut node_config = BTreeMap::from([("ENABLE_NODEPORT".to_owned(), "1".to_owned())]);
    for (flag, name) in [
        ("--enable-envoy-config=true", "ENABLE_L7_LB"),
        ("--bpf-lb-sock-hostns-only=true", "ENABLE_SOCKET_LB_HOST_ONLY"),
    ] {
        if flags.contains(flag) {
            node_config.insert(name.to_owned(), "1".to_owned());
        }
    }
    Ok(Network {
        neighbours: array(neighbours)
            .iter()
            .filter_map(|entry| {
                Some(Neighbour {
                    address: text(entry, "dst")?.parse().ok()?,
                    ifindex: index(text(entry, "dev")?)?,
                    state: entry.get("state")?.get(0)?.as_str()?.to_owned(),
                    mac: text(entry, "lladdr").map(str::to_owned),
                })
            })
            .collect(),
        rules: capture.text("ip-rule.txt")?.lines().filter_map(rule).collect(),
        routes: asked,
        links,
        node_config,
        ..Network::default()
    })
}

fn link(value: &Value) -> Option<Link> {
    let flags: Vec<&str> = array(value.get("flags")?).iter().filter_map(Value::as_str).collect();
    Some(Link {
        ifindex: number(value, "ifindex")?,
        name: text(value, "ifname")?.to_owned(),
        kind: value.get("linkinfo").and_then(|info| text(info, "info_kind")).map(str::to_owned),
        up: flags.contains(&"UP"),
        carrier: flags.contains(&"LOWER_UP"),
        master: None,
        mtu: number(value, "mtu").unwrap_or_default(),
        ethernet: text(value, "link_type") == Some("ether"),
        mac: text(value, "address").map(str::to_owned),
        addresses: array(value.get("addr_info").unwrap_or(&Value::Null))
            .iter()
            .filter_map(|one| {
                Some(format!("{}/{}", text(one, "local")?, number(one, "prefixlen")?))
            })
            .collect(),
    })
}

/// A route of the table, with its prefix.
struct TableRoute {
    network: IpAddr,
    bits: u32,
    local: bool,
    route: Route,
}

/// Reads `192.168.2.0/24 dev eno1 …`, `default via 192.168.2.1 dev eno1`, `local 10.0.0.1 dev …`.
fn route(line: &str, index: &impl Fn(&str) -> Option<u32>) -> Option<TableRoute> {
    let mut words: Vec<&str> = line.split_whitespace().collect();
    let kinds = ["local", "broadcast", "multicast", "anycast", "unreachable", "blackhole"];
    let kind = match words.first() {
        Some(first) if kinds.contains(first) => words.remove(0),
        _ => "unicast",
    };
    let after = |name: &str| {
        words.iter().position(|word| *word == name).and_then(|at| words.get(at + 1)).copied()
    };
    let device = after("dev")?;
    let gateway: Option<IpAddr> = after("via").and_then(|text| text.parse().ok());
    let place = *words.first()?;
    let (network, bits) = if place == "default" {
        match gateway {
            Some(IpAddr::V6(_)) => (IpAddr::from([0; 16]), 0),
            _ => (IpAddr::from([0; 4]), 0),
        }
    } else if let Some((address, bits)) = place.split_once('/') {
        (address.parse().ok()?, bits.parse().ok()?)
    } else {
        let address: IpAddr = place.parse().ok()?;
        (address, if address.is_ipv4() { 32 } else { 128 })
    };
    Some(TableRoute {
        network,
        bits,
        local: kind == "local",
        route: Route {
            kind: kind.to_owned(),
            output: index(device),
            gateway,
            source: after("src").and_then(|text| text.parse().ok()),
            table: if kind == "unicast" { 254 } else { 255 },
        },
    })
}

/// The local table first, then the longest prefix.
fn answer(table: &[TableRoute], destination: IpAddr) -> Result<Route, String> {
    table
        .iter()
        .filter(|one| within(one.network, one.bits, destination))
        .filter(|one| one.local || one.route.kind == "unicast")
        .max_by_key(|one| (one.local, one.bits))
        .map(|one| one.route.clone())
        .ok_or_else(|| "network is unreachable".to_owned())
}

fn within(network: IpAddr, bits: u32, address: IpAddr) -> bool {
    match (network, address) {
        (IpAddr::V4(network), IpAddr::V4(address)) => {
            let mask = u32::MAX.checked_shl(32 - bits.min(32)).unwrap_or(0);
            (u32::from(network) ^ u32::from(address)) & mask == 0
        }
        (IpAddr::V6(network), IpAddr::V6(address)) => {
            let mask = u128::MAX.checked_shl(128 - bits.min(128)).unwrap_or(0);
            (u128::from(network) ^ u128::from(address)) & mask == 0
        }
        _ => false,
    }
}

/// Reads `9: from all fwmark 0x200/0xf00 lookup 2004`; the captured IPv4 rules stand for both
/// families, which Cilium sets alike.
fn rule(line: &str) -> Option<Rule> {
    let (priority, rest) = line.split_once(':')?;
    let words: Vec<&str> = rest.split_whitespace().collect();
    let after = |name: &str| {
        words.iter().position(|word| *word == name).and_then(|at| words.get(at + 1)).copied()
    };
    let hex = |text: &str| u32::from_str_radix(text.trim_start_matches("0x"), 16).ok();
    let mark = after("fwmark").and_then(|text| {
        let (value, mask) = text.split_once('/')?;
        Some((hex(value)?, hex(mask)?))
    });
    let table = match after("lookup")? {
        "local" => 255,
        "main" => 254,
        "default" => 253,
        number => number.parse().ok()?,
    };
    Some(Rule { ipv6: false, priority: priority.trim().parse().ok()?, mark, table })
}
