//! `inspector-lab` as people and scripts use it.
//!
//! Needs root, as the other tests of the lab; fails without.

use std::{
    fs,
    os::unix::process::{CommandExt, ExitStatusExt},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use inspector_lab::{MapHandle, maps};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

fn lab(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_inspector-lab"));
    command.args(arguments);
    command
}

fn run(arguments: &[&str]) -> Output {
    lab(arguments).output().expect("inspector-lab")
}

/// Standard error of a run that must have ended with `code`.
fn fails(arguments: &[&str], code: i32) -> String {
    let output = run(arguments);
    let stderr = String::from_utf8(output.stderr).expect("text");
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
    assert!(output.stdout.is_empty(), "{arguments:?}");
    stderr
}

fn succeeds(arguments: &[&str]) -> String {
    let output = run(arguments);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {stderr}");
    // A command in the lab may say what it wants: ip(8) complains of a namespace of another lab
    // that is half-way gone.
    assert!(arguments[0] == "exec" || stderr.is_empty(), "{arguments:?}: {stderr}");
    String::from_utf8(output.stdout).expect("text")
}

/// A name that no other run of these tests has at the same time.
fn name(of: &str) -> String {
    format!("{of}-{}", std::process::id())
}

/// A lab that goes away with the test, whatever happens.
struct Up(String);

impl Up {
    fn new(name: &str, arguments: &[&str]) -> (Self, Value) {
        let up = Self(name.to_owned());
        let line = succeeds(&[&["up", "--name", name], arguments].concat());
        assert_eq!(line.lines().count(), 1, "{line}");
        (up, serde_json::from_str(&line).expect("JSON"))
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        // A test that has taken it down itself finds nothing left here.
        run(&["down", "--name", &self.0]);
    }
}

/// Everything on the machine that belongs to the lab `name`.
fn traces(name: &str) -> Vec<String> {
    let mut traces = Vec::new();
    let folder = Path::new("/run/inspector-lab").join(name);
    if folder.exists() {
        traces.push(folder.display().to_string());
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
    let parts = [format!("/run/inspector-lab/{name}/"), format!("/run/netns/ilab-{name}-")];
    traces.extend(
        mounts
            .lines()
            .filter(|line| parts.iter().any(|part| line.contains(part)))
            .map(ToOwned::to_owned),
    );
    for entry in fs::read_dir("/run/netns").into_iter().flatten() {
        let file = entry.expect("an entry").file_name().into_string().expect("a name");
        if file.starts_with(&format!("ilab-{name}-")) {
            traces.push(file);
        }
    }
    traces.extend(
        inspector_lab::cgroup::path(name)
            .expect("mounts")
            .filter(|path| path.exists())
            .map(|path| path.display().to_string()),
    );
    traces
}

/// Namespaces of pumps and servers now.
fn pumps() -> Vec<PathBuf> {
    let mut pumps = Vec::new();
    for entry in fs::read_dir("/proc").expect("/proc") {
        let path = entry.expect("an entry").path();
        if fs::read_to_string(path.join("comm"))
            .is_ok_and(|name| ["ilab-pump\n", "ilab-server\n"].contains(&&name[..]))
        {
            pumps.extend(fs::read_link(path.join("ns/net")));
        }
    }
    pumps
}

/// The arguments of `exec` in the lab `name`.
fn exec<'a>(name: &'a str, arguments: &[&'a str]) -> Vec<&'a str> {
    [&["exec", "--name", name], arguments].concat()
}

#[test]
fn up_exec_down() {
    let name = &name("cli-all");
    let (_up, record) = Up::new(name, &["v1.21-tcx"]);
    let text =
        |field: &str| record[field].as_str().unwrap_or_else(|| panic!("{record}")).to_owned();
    assert_eq!(text("name"), *name);
    assert_eq!(text("netns"), format!("/run/netns/ilab-{name}-node"));
    let bpffs = text("bpffs");
    assert!(Path::new(&bpffs).join("tc/globals/cilium_lb4_services_v2").exists());

    let links = succeeds(&exec(name, &["--", "ip", "-o", "link"]));
    assert!(links.contains("2: eno1@"), "{links}");
    assert!(links.contains("3: wg0: <POINTOPOINT,MULTICAST,NOARP,UP,LOWER_UP>"), "{links}");
    let address =
        succeeds(&exec(name, &["--in", "client", "--", "ip", "-o", "-4", "addr", "show", "eth0"]));
    assert!(address.contains("192.168.2.50/24"), "{address}");
    // The bpffs is seen, and named, where the command runs.
    let script =
        "ls \"$INSPECT_BPFFS/tc/globals\"; grep -c \" $INSPECT_BPFFS \" /proc/self/mountinfo";
    let seen = succeeds(&exec(name, &["--", "sh", "-c", script]));
    assert!(seen.contains("cilium_lb4_services_v2\n"), "{seen}");
    assert!(seen.ends_with("\n1\n"), "{seen}");

    let error = fails(&["up", "--name", name], 2);
    assert_eq!(
        error,
        format!(
            "error: a lab named {name} is up already; choose another name, or remove it with \
             `down --name {name}`
"
        )
    );
    assert_eq!(succeeds(&["down", "--name", name]), "");
    assert_eq!(traces(name), [""; 0]);
    let error = fails(&["down", "--name", name], 2);
    assert_eq!(error, format!("error: no lab named {name} is up\n"));
    let error = fails(&exec(name, &["--", "true"]), 2);
    assert_eq!(error, format!("error: no lab named {name} is up\n"));
}

#[test]
fn exec_ends_as_its_command_ends() {
    let name = &name("cli-status");
    let (_up, _) = Up::new(name, &["services-10k", "--no-network"]);
    let shell = |script: &str| run(&["exec", "--name", name, "--", "sh", "-c", script]).status;
    assert_eq!(shell("exit 0").code(), Some(0));
    assert_eq!(shell("exit 37").code(), Some(37));
    assert_eq!(shell("kill -TERM $$").signal(), Some(libc::SIGTERM));
    assert_eq!(shell("kill -KILL $$").signal(), Some(libc::SIGKILL));
    let error = fails(&["exec", "--name", name, "--", "/no/such/program"], 127);
    assert_eq!(
        error,
        "error: cannot run /no/such/program: No such file or directory (os error 2)\n"
    );
    let error = fails(&["exec", "--name", name, "--in", "client", "--", "true"], 2);
    assert_eq!(
        error,
        format!("error: the lab {name} has no client: it was made without a network\n")
    );

    // A signal from outside reaches the command, which decides what comes of it.
    let mut child = lab(&["exec", "--name", name, "--", "sh", "-c"])
        .arg("trap 'exit 9' TERM; echo ready; while :; do sleep 0.01; done")
        .stdout(Stdio::piped())
        .spawn()
        .expect("inspector-lab");
    let mut ready = [0; 6];
    std::io::Read::read_exact(child.stdout.as_mut().expect("a pipe"), &mut ready).expect("ready");
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM).expect("a signal");
    assert_eq!(child.wait().expect("its end").code(), Some(9));
}

#[test]
fn the_agent_lives_while_a_command_runs() {
    let liveness = |record: &Value| {
        let bpffs = Path::new(record["bpffs"].as_str().expect("a path"));
        let map = MapHandle::open(&maps::globals(bpffs).join("cilium_runtime_config")).expect("it");
        let value = map.lookup(&1u32.to_ne_bytes()).expect("a look-up").expect("an entry");
        Duration::from_nanos(u64::from_ne_bytes(value.try_into().expect("8 bytes")))
    };
    let (living, lying) = (&name("cli-alive"), &name("cli-dead"));
    let (_up, alive) = Up::new(living, &["--no-network"]);
    let (_up, dead) = Up::new(lying, &["--no-network", "--agent", "dead"]);
    let before = (liveness(&alive), liveness(&dead));
    thread::sleep(Duration::from_millis(100));
    succeeds(&["exec", "--name", living, "--", "true"]);
    let start = liveness(&alive);
    assert!(start > before.0);
    succeeds(&["exec", "--name", living, "--", "sleep", "2.5"]);
    succeeds(&["exec", "--name", lying, "--", "sleep", "1.5"]);
    let end = liveness(&alive);
    // At its start and twice more.
    assert!(end > start + Duration::from_millis(1900), "{start:?} {end:?}");
    assert_eq!(liveness(&dead), before.1);
}

#[test]
fn one_state_of_a_faults_folder_over_a_whole_capture() {
    let arguments = ["v1.18-faults/01-backend-missing", "--over", "v1.18-tcx", "--no-network"];
    let (_up, record) = Up::new(&name("cli-fault"), &arguments);
    let bpffs = Path::new(record["bpffs"].as_str().expect("a path"));
    let entries = |name: &str| {
        let map = MapHandle::open(&maps::globals(bpffs).join(name)).expect("the map");
        map.entries().expect("its entries").len()
    };
    let count = |path: &str| {
        let path = inspector_lab::capture::project_captures().join(path);
        let text = fs::read_to_string(path).expect("the file");
        text.lines().filter(|line| !line.starts_with('#')).count()
    };
    assert_eq!(
        entries("cilium_lb4_backends_v3"),
        count("v1.18-faults/01-backend-missing.cilium_lb4_backends_v3.hex")
    );
    assert_eq!(entries("cilium_ipcache_v2"), count("v1.18-tcx/maps/cilium_ipcache_v2.hex"));
}

#[test]
fn what_is_wrong_is_said_in_one_sentence() {
    let name = &name("cli-wrong");
    let error = fails(&["up", "no/such/capture", "--name", name], 2);
    assert_eq!(
        error,
        "error: no/such/capture: no such capture: give a folder that holds maps/NAME.hex or \
         NAME.hex files, or FOLDER/PREFIX for one state of a faults folder\n"
    );
    let error = fails(&["up", "v1.18-faults", "--name", name], 2);
    assert!(
        error.contains("; it is a folder of 4 states, open one: ")
            && error.ends_with("lab/captures/v1.18-faults/00-baseline\n"),
        "{error}"
    );
    let error = fails(&["up", "--name", "Cli/wrong"], 2);
    assert!(error.starts_with("error: `Cli/wrong` cannot be the name of a lab: "), "{error}");
    assert_eq!(traces(name), [""; 0]);

    // A copy where anyone may run it.
    let folder = tempfile::tempdir().expect("a folder");
    let everyone = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(folder.path(), everyone).expect("permissions");
    let program = folder.path().join("inspector-lab");
    // By another process: no child that is started here meanwhile holds it open for writing then.
    let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_inspector-lab")).arg(&program).status();
    assert!(copied.expect("cp").success());
    for arguments in [&["up"][..], &["down"], &["down", "--all"], &["exec", "--", "true"]] {
        let output = Command::new(&program).args(arguments).uid(65534).output().expect("it runs");
        assert_eq!(output.status.code(), Some(2));
        assert_eq!(
            String::from_utf8_lossy(&output.stderr),
            "error: the lab makes namespaces, mounts and BPF maps and needs root; run it with sudo\n"
        );
    }
}

/// Starts `up` and sends it `signal` after `delay`; the signal that ended it, if one did.
fn interrupted(name: &str, signal: Signal, delay: Duration) -> Option<i32> {
    let mut child = lab(&["up", "--name", name])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("inspector-lab");
    let folder = Path::new("/run/inspector-lab").join(name);
    let start = Instant::now();
    while !folder.exists() && start.elapsed() < Duration::from_secs(10) {
        thread::sleep(Duration::from_micros(200));
    }
    thread::sleep(delay);
    kill(Pid::from_raw(child.id().cast_signed()), signal).expect("a signal");
    child.wait().expect("its end").signal()
}

#[test]
fn a_signal_in_the_middle_of_up_leaves_nothing() {
    let name = &name("cli-signal");
    let mut ended = 0;
    for (index, delay) in [0, 1, 3, 6, 10, 20, 30, 50, 80, 120].into_iter().enumerate() {
        let signal = if index % 2 == 0 { Signal::SIGINT } else { Signal::SIGTERM };
        let delay = Duration::from_millis(delay);
        if let Some(number) = interrupted(name, signal, delay) {
            assert_eq!(number, signal as i32);
            ended += 1;
            assert_eq!(traces(name), [""; 0], "{signal} after {delay:?}");
        } else {
            // It was quicker than the signal: a lab that is up as it should be.
            succeeds(&["exec", "--name", name, "--", "true"]);
            succeeds(&["down", "--name", name]);
        }
    }
    assert!(ended >= 3, "only {ended} of 10 signals came in the middle");
}

#[test]
fn what_a_killed_up_leaves_can_be_removed() {
    let name = &name("cli-killed");
    let mut half_made = 0;
    for delay in [0, 2, 5, 10, 20, 30, 50, 80] {
        let delay = Duration::from_millis(delay);
        let killed = interrupted(name, Signal::SIGKILL, delay).is_some();
        half_made += u32::from(killed && !traces(name).is_empty());
        if killed {
            let error = fails(&["exec", "--name", name, "--", "true"], 2);
            let half = format!("error: the lab {name} is not complete: ");
            let none = format!("error: no lab named {name} is up\n");
            assert!(error.starts_with(&half) || error == none, "{error}");
        }
        let namespaces: Vec<PathBuf> = ["node", "vpn"]
            .iter()
            .filter_map(|role| fs::metadata(format!("/run/netns/ilab-{name}-{role}")).ok())
            .map(|meta| format!("net:[{}]", std::os::unix::fs::MetadataExt::ino(&meta)).into())
            .collect();
        succeeds(&["down", "--name", name]);
        assert_eq!(traces(name), [""; 0], "killed after {delay:?}");
        assert!(!pumps().iter().any(|pump| namespaces.contains(pump)), "killed after {delay:?}");
    }
    assert!(half_made >= 2, "only {half_made} of 8 were killed in the middle");
}

/// Three nodes on one LAN: told apart by address, MAC address, maps and host name, in reach of each
/// other, and gone with one command.
#[test]
fn a_cluster_is_several_labs_on_one_lan() {
    let cluster = name("cluster");
    let lines = succeeds(&["up", "--name", &cluster, "--nodes", "3"]);
    let _up = Up(cluster.clone());
    let records: Vec<Value> =
        lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let names: Vec<String> = (1..=3).map(|number| format!("{cluster}-n{number}")).collect();
    assert_eq!(records.len(), 3, "{lines}");
    for (index, (record, node)) in records.iter().zip(&names).enumerate() {
        assert_eq!(record["name"], **node);
        let at = |place: &str, command: &[&str]| {
            succeeds(&[&["exec", "--name", node, "--in", place, "--"], command].concat())
        };
        assert_eq!(at("node", &["uname", "-n"]).trim(), format!("n{}", index + 1));
        let address = format!("192.168.2.{}", 10 + index);
        let all = at("node", &["ip", "-o", "addr", "show", "dev", "eno1"]);
        assert!(all.contains(&format!("inet {address}/24")), "{all}");
        assert!(all.contains(&format!("inet6 fd00:2::{}/64", 10 + index)), "{all}");
        let link = at("node", &["ip", "-o", "link", "show", "dev", "eno1"]);
        assert!(link.contains(&format!("02:00:00:00:02:{:02x}", 10 + index)), "{link}");
        // NodePort frontends are at the node's own address, and at no other node's.
        let bpffs = PathBuf::from(record["bpffs"].as_str().expect("a path"));
        let services = maps::globals(&bpffs).join("cilium_lb4_services_v2");
        let services = MapHandle::open(&services).expect("a map").entries().expect("entries");
        let of = |last: u8| {
            services.iter().filter(|entry| entry.key[..4] == [192, 168, 2, last]).count()
        };
        for (other, last) in (10..13).enumerate() {
            assert_eq!(of(last) > 0, other == index, "{node}: {last}");
        }
        // Every other node answers for its address.
        for other in (10..13).filter(|last| usize::from(*last - 10_u8) != index) {
            let other = format!("192.168.2.{other}");
            let script =
                format!("(: < /dev/tcp/{other}/9) 2>&1 | grep -m 1 -o 'Connection refused'");
            let answer = at("node", &["timeout", "5", "bash", "-c", &script]);
            assert_eq!(answer.trim(), "Connection refused", "to {other}");
        }
    }
    // The hosts of the LAN are those of the first node.
    let carrier = |node: &str| {
        let arguments =
            ["exec", "--name", node, "--in", "client", "--", "ip", "-o", "link", "show", "eth0"];
        succeeds(&arguments).contains("LOWER_UP")
    };
    assert!(carrier(&names[0]) && !carrier(&names[1]) && !carrier(&names[2]));

    assert!(fails(&["up", "--name", &cluster, "--nodes", "1"], 2).contains("2 to 9 nodes, not 1"));
    succeeds(&["down", "--name", &cluster]);
    for node in &names {
        assert_eq!(traces(node), [""; 0]);
    }
    assert!(fails(&["down", "--name", &cluster], 2).contains("no lab named"));
}
