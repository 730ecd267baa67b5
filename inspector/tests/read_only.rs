//! No command changes the state of the node: what programs, maps and links there are, what is in
//! the maps, what is pinned, devices, queueing disciplines, filters, addresses, routes, rules and
//! neighbours are the same before and after.
//!
//! Needs root, bpf(2), a cgroup2 mount, TUN devices and iproute2's `ip` and `tc`; fails without.

mod bpf;
mod node;
mod run;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use aya::{
    maps::loaded_maps,
    programs::{loaded_links, loaded_programs},
};
use inspector_lab::{MapHandle, Ns, capture::Entry};
use node::Node;
use run::inspect;
use serde_json::Value;
use sha2::{Digest, Sha256};
use tempfile::TempDir;

/// What a node is, as lines by what they are about.
#[derive(Debug, PartialEq, Eq)]
struct State(BTreeMap<String, BTreeSet<String>>);

/// Ids of everything of a kind in this kernel.
#[derive(Debug, PartialEq, Eq)]
struct Ids([BTreeSet<u32>; 3]);

impl Ids {
    /// What is gone while this looks is left out.
    fn now() -> Self {
        Self([
            loaded_programs().filter_map(|one| Some(one.ok()?.id())).collect(),
            loaded_maps().filter_map(|one| Some(one.ok()?.id())).collect(),
            loaded_links().filter_map(|one| Some(one.ok()?.id())).collect(),
        ])
    }
}

/// Key of the agent's sign of life, which the lab refreshes.
const LIVENESS: [u8; 4] = 1_u32.to_ne_bytes();

impl State {
    fn of(node: &Node) -> Self {
        let mut state = Self(BTreeMap::new());
        state.pins(node.0.bpffs());
        for command in [
            "ip -d link show",
            "ip address show",
            "ip -4 route show table all",
            "ip -6 route show table all",
            "ip -4 rule show",
            "ip -6 rule show",
            "tc qdisc show",
        ] {
            state.lines(command, output(node, command).lines().map(str::to_owned));
        }
        let neighbours = output(node, "ip neigh show nud all");
        state.lines("neighbours", neighbours.lines().map(without_timers));
        for device in devices(node) {
            for hook in ["ingress", "egress"] {
                let command = format!("tc filter show dev {device} {hook}");
                state.lines(&command, output(node, &command).lines().map(str::to_owned));
            }
        }
        for key in ["net/ipv4/ip_forward", "kernel/bpf_stats_enabled"] {
            let read = || fs::read_to_string(Path::new("/proc/sys").join(key)).expect("a sysctl");
            state.lines(key, [node.0.run_in(Ns::Node, read).expect("the node")]);
        }
        state
    }

    fn lines(&mut self, about: &str, lines: impl IntoIterator<Item = String>) {
        self.0.entry(about.to_owned()).or_default().extend(lines);
    }

    /// Everything below a folder of a BPF file system: paths, and what is in maps.
    fn pins(&mut self, folder: &Path) {
        for entry in fs::read_dir(folder).expect("a folder") {
            let entry = entry.expect("an entry");
            let path = entry.path();
            let name = path.display().to_string();
            self.lines("pins", [name.clone()]);
            if entry.file_type().expect("a type").is_dir() {
                self.pins(&path);
            } else if let Ok(map) = MapHandle::open(&path) {
                let mut digest = Sha256::new();
                let mut count = 0;
                for entry in entries(&map) {
                    if name.ends_with("cilium_runtime_config") && entry.key == LIVENESS {
                        continue;
                    }
                    digest.update(&entry.key);
                    digest.update(&entry.value);
                    count += 1;
                }
                let digest = inspector_lab::capture::encode_hex(&digest.finalize());
                self.lines("maps", [format!("{name}: map {}, {count} {digest}", map.id())]);
            }
        }
    }

    /// What differs, for people.
    fn changes(&self, after: &Self) -> Vec<String> {
        let mut changes = Vec::new();
        for about in self.0.keys().chain(after.0.keys()).collect::<BTreeSet<_>>() {
            let (none, of) = (BTreeSet::new(), |state: &'_ Self| state.0.get(about).cloned());
            let (before, now) =
                (of(self).unwrap_or_else(|| none.clone()), of(after).unwrap_or(none));
            changes.extend(before.difference(&now).map(|line| format!("{about}: - {line}")));
            changes.extend(now.difference(&before).map(|line| format!("{about}: + {line}")));
        }
        changes
    }
}

/// What is in a map. Maps of events have no entries that could be read; and of the arrays with a
/// program for each of 65535 endpoints (`cilium_call_policy`), reading takes longer than all else.
fn entries(map: &MapHandle) -> Vec<Entry> {
    if map.spec().holds_objects() && map.spec().max_entries > 1000 {
        return Vec::new();
    }
    match map.entries() {
        Ok(entries) => entries,
        Err(_) if map.spec().holds_objects() => Vec::new(),
        Err(error) => panic!("{error}"),
    }
}

/// A neighbour entry without what time alone changes: whether somebody is known to be there stays.
fn without_timers(line: &str) -> String {
    let (entry, state) = line.rsplit_once(' ').unwrap_or((line, ""));
    let state = match state {
        "REACHABLE" | "STALE" | "DELAY" | "PROBE" => "known",
        "INCOMPLETE" | "FAILED" => "unknown",
        other => other,
    };
    format!("{entry} {state}")
}

#[track_caller]
fn output(node: &Node, command: &str) -> String {
    let mut words = command.split(' ');
    let mut process = Command::new(words.next().expect("a program"));
    process.args(words);
    let output = node.0.exec_in(Ns::Node, &mut process).expect("the node").output();
    let output = output.unwrap_or_else(|error| panic!("`{command}`, of iproute2: {error}"));
    assert!(output.status.success(), "{command}: {output:?}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

fn devices(node: &Node) -> Vec<String> {
    let text = output(node, "ip -j link show");
    let links: Value = serde_json::from_str(&text).expect("JSON");
    let links = links.as_array().expect("devices");
    links.iter().map(|link| link["ifname"].as_str().expect("a name").to_owned()).collect()
}

/// Runs `inspect` on the node, and fails if it cannot even start or finds its arguments wrong.
fn run(node: &Node, arguments: &[&str]) {
    let mut command = inspect(arguments);
    let output = node.0.exec_in(Ns::Node, &mut command).expect("the node").output();
    let output = output.expect("inspect");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.code().is_some_and(|code| code != 2 && code <= 3)
            && !output.stdout.is_empty(),
        "{arguments:?}: {:?} {said}",
        output.status
    );
}

/// A process on the node, in the lab's cgroup; it ends with this.
struct Sleeper(Child);

impl Sleeper {
    fn new(node: &Node) -> Self {
        let mut command = Command::new("sleep");
        command.arg("600").stdin(Stdio::null());
        // SAFETY: one system call between fork and exec.
        unsafe {
            command.pre_exec(|| {
                nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)?;
                Ok(())
            });
        }
        let command = node.0.exec_in(Ns::Node, &mut command).expect("the node");
        Self(command.spawn().expect("sleep"))
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Every command, with what makes it do something of its own.
fn commands(folder: &Path, pid: u32) -> Vec<Vec<String>> {
    let saved = folder.join("saved.json").display().to_string();
    let tables = folder.join("tables.json").display().to_string();
    let mut commands = vec![format!("vip 192.168.2.20 --save {saved}")];
    for vip in [
        "192.168.2.20",
        "192.168.2.21",
        "192.168.2.22:25565/udp",
        "192.168.2.24",
        "192.168.2.30",
        "192.168.2.37",
        "192.168.2.99",
        "192.168.2.10:30443",
        "fd00:2::20",
    ] {
        commands.push(format!("vip {vip}"));
    }
    for form in ["table", "json", "markdown"] {
        commands.push(format!("vip 192.168.2.22 -o {form}"));
    }
    for options in [
        format!("--pid {pid}"),
        "--source 10.90.0.2".to_owned(),
        "--via wg0".to_owned(),
        "--expect served".to_owned(),
        format!("--state {}", folder.display()),
        "--agent=/nonexistent".to_owned(),
        format!("--netns {pid}"),
        "-v".to_owned(),
    ] {
        commands.push(format!("vip 192.168.2.20 {options}"));
    }
    for other in ["datapath", "datapath -o json", "service list", "service list -o json", "doctor"]
    {
        commands.push(other.to_owned());
    }
    commands.push(format!("datapath --pid {pid}"));
    for view in ["", " --frontends", " --backends", " --revnat", " --source-ranges"] {
        commands.push(format!("lb list{view}"));
    }
    commands.push(format!("lb list --save {tables}"));
    for file in [&saved, &tables] {
        commands.push(format!("evidence show {file}"));
        commands.push(format!("evidence verify {file}"));
    }
    commands.push(format!("evidence judge {saved}"));
    commands.push("evidence schema".to_owned());
    commands.iter().map(|line| line.split(' ').map(str::to_owned).collect()).collect()
}

#[test]
fn no_command_changes_anything() {
    let node = Node::new("v1.21-tcx");
    node.0.set_agent_alive().expect("a sign of life");
    let folder = TempDir::new().expect("a folder");
    let sleeper = Sleeper::new(&node);
    let mut before = settled(&node);
    for arguments in commands(folder.path(), sleeper.0.id()) {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        run(&node, &arguments);
        let after = State::of(&node);
        let changes = before.changes(&after);
        assert!(changes.is_empty(), "{arguments:?} changed {changes:#?}");
        before = after;
        leaves_no_objects(&node, &arguments);
    }
}

/// The node once nothing happens on it any more by itself.
fn settled(node: &Node) -> State {
    let mut last = State::of(node);
    for _ in 0..20 {
        thread::sleep(Duration::from_millis(300));
        let now = State::of(node);
        if now == last {
            return now;
        }
        last = now;
    }
    panic!("the node does not come to rest");
}

/// Checks that the kernel has the same programs, maps and links before and after a run. Others on
/// this machine come and go; what this command left behind it would leave behind each time.
fn leaves_no_objects(node: &Node, arguments: &[&str]) {
    let mut last = None;
    for _ in 0..25 {
        let before = Ids::now();
        run(node, arguments);
        // The kernel frees what a process leaves in its own time.
        for _ in 0..5 {
            let after = Ids::now();
            if after == before {
                return;
            }
            last = Some((before.0.clone(), after.0));
            thread::sleep(Duration::from_millis(20));
        }
    }
    let Some((before, after)) = last else { return };
    let left: Vec<_> = before
        .iter()
        .zip(&after)
        .map(|(before, after)| after.symmetric_difference(before).collect::<Vec<_>>())
        .collect();
    panic!("{arguments:?}: programs, maps, links that came or went: {left:?}");
}

/// The recorder sees each kind of change: the test above can fail.
#[test]
fn the_recorder_sees_changes() {
    let node = Node::new("v1.21-tcx");
    let folder = node.0.bpffs().join("made");
    let sees = |about: &str, change: &dyn Fn()| {
        let before = settled(&node);
        change();
        let changes = before.changes(&State::of(&node));
        assert!(
            changes.iter().any(|line| line.starts_with(&format!("{about}: "))),
            "{about}: {changes:#?}"
        );
    };
    let services = node.0.map("cilium_lb4_services_v2").expect("a map");
    let first = services.entries().expect("the entries").remove(0);
    sees("maps", &|| services.delete(&first.key).expect("a delete"));
    let mut other = first.clone();
    other.value[0] ^= 1;
    services.update(&first.key, &first.value).expect("an update");
    sees("maps", &|| services.update(&first.key, &other.value).expect("an update"));
    let config = node.0.map("cilium_runtime_config").expect("a map");
    sees("maps", &|| config.update(&0_u32.to_ne_bytes(), &[7; 8]).expect("an update"));
    sees("pins", &|| fs::create_dir(&folder).expect("mkdir"));
    sees("pins", &|| node.detach("devices/wg0/links/cil_to_netdev"));
    for (about, command) in [
        ("neighbours", "neigh add 192.168.2.77 lladdr 02:00:00:00:00:07 dev eno1"),
        ("neighbours", "neigh replace 192.168.2.77 lladdr 02:00:00:00:00:08 dev eno1"),
        ("ip address show", "address add 192.168.2.11/32 dev eno1"),
        ("ip -4 route show table all", "route add 203.0.113.0/24 dev eno1 table 77"),
        ("ip -6 route show table all", "-6 route add 2001:db8::/32 dev eno1"),
        ("ip -4 rule show", "rule add pref 77 lookup 77"),
        ("ip -6 rule show", "-6 rule add pref 77 lookup 77"),
        ("ip -d link show", "link set wg0 mtu 1300"),
    ] {
        sees(about, &|| {
            node.ip(Ns::Node, command);
        });
    }
    sees("tc qdisc show", &|| {
        output(&node, "tc qdisc add dev eno1 clsact");
    });
    let eno1 = node.index("eno1");
    let filter = || bpf::Code::tc("made_by_a_test").load().filter(eno1, false, "made_by_a_test", 7);
    sees("tc filter show dev eno1 ingress", &|| node.0.run_in(Ns::Node, filter).expect("the node"));
    sees("net/ipv4/ip_forward", &|| {
        let write = || {
            let path = "/proc/sys/net/ipv4/ip_forward";
            let value = fs::read_to_string(path).expect("a sysctl");
            fs::write(path, if value.trim() == "0" { "1" } else { "0" }).expect("a sysctl");
        };
        node.0.run_in(Ns::Node, write).expect("the node");
    });

    // Objects of the kernel: with a program, a map and a link more, none is as it was.
    let before = Ids::now();
    let map = bpf::Map::hash("made_by_a_test", 4, 4);
    let load = || {
        let program = bpf::Code::tc("made_by_a_test").uses(&map).load();
        (program.id, program.tcx(eno1, bpf::TCX_EGRESS, false))
    };
    let (program, link) = node.0.run_in(Ns::Node, load).expect("the node");
    let after = Ids::now();
    for ((before, after), id) in before.0.iter().zip(&after.0).zip([program, map.id, link.id]) {
        assert!(!before.contains(&id) && after.contains(&id), "{id}");
    }
}
