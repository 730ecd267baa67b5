//! The script of the kind cluster on three lab nodes: `deploy/kind/run` itself, with real maps,
//! programs and network namespaces below `docker exec`, and a stand-in for the API server that
//! programs the maps as Cilium does when a Service changes. What the script asserts is asserted of
//! them; and with one fault at a time it has to fail, say what, and take its cluster down.
//!
//! Not of it: Docker, kind, k3d, Kubernetes and Helm themselves.
//!
//! Needs root, bpf(2), a cgroup2 mount, TUN devices, `bash`, `mkfifo`, `flock` and `jq` (the system's,
//! or what `cargo xtask setup` unpacked); fails without.

#[allow(dead_code, reason = "set-up and the tests of deploy/check use the rest")]
#[path = "../../xtask/src/deploy_tools.rs"]
mod deploy_tools;
mod node;
mod run;
#[allow(dead_code, reason = "build scripts use the rest")]
#[path = "../../xtask/src/toolchain.rs"]
mod toolchain;

use std::{
    ffi::CString,
    fs::{self, OpenOptions},
    io::{BufRead as _, BufReader, Write as _},
    net::Ipv4Addr,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
};

use inspector::{
    cilium::{
        proto::Protocol,
        reverse_nat::ReverseNat,
        services::{Scope, ServiceKey},
    },
    lint::yaml::{self, Node as Yaml},
};
use inspector_lab::Ns;
use node::Node;
use tempfile::TempDir;

const NAMES: [&str; 3] = ["inspect-ci-control-plane", "inspect-ci-worker", "inspect-ci-worker2"];
/// The node with the replica.
const HOME: usize = 1;

/// What goes wrong in a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Nothing,
    /// One node loses the backend of the Cluster VIP.
    BackendLost,
    /// A node without a replica serves the Local twin all the same.
    LocalServed,
    /// One node does not hear that the policy was changed.
    FlipUnheard,
    /// One node does not hear that it was changed back.
    BackUnheard,
    /// Another node answers ARP than the one with the lease.
    WrongAnnouncer,
    /// The chart cannot be installed.
    Helm,
    /// There are two nodes.
    NodeLost,
    /// A Service gets no address.
    NoAddress,
    /// Somebody has a cluster of that name.
    Taken,
}

/// Values of the services map, as the capture has them for Services like ours.
struct Templates {
    cluster: Vec<u8>,
    local_here: Vec<u8>,
    local_away: Vec<u8>,
    slot: Vec<u8>,
}

fn key(vip: Ipv4Addr, port: u16, scope: Scope, slot: u16) -> Vec<u8> {
    ServiceKey { address: vip.into(), port, protocol: Protocol::TCP, scope, slot }.encode()
}

/// A Service of the cluster.
struct Service {
    name: String,
    policy: String,
    vip: Ipv4Addr,
    /// How often its address was asked for.
    asked: usize,
}

/// The cluster behind the stand-ins.
struct World {
    nodes: Vec<Node>,
    templates: Vec<Templates>,
    folder: TempDir,
    services: Vec<Service>,
    pool: Option<(Ipv4Addr, Ipv4Addr)>,
    holder: usize,
    fault: Fault,
    is_up: bool,
    patches: usize,
    /// Every command that was given.
    log: Vec<String>,
}

/// What a command came to.
struct Answer(i32, String, String);

fn said(text: impl Into<String>) -> Answer {
    Answer(0, text.into(), String::new())
}

/// What a question to the stand-ins ends with.
const END: u8 = 4;

impl World {
    fn new() -> Self {
        let nodes: Vec<Node> = NAMES.iter().map(|_| Node::new("v1.21-tcx")).collect();
        let templates = nodes
            .iter()
            .map(|node| {
                let map = node.0.map("cilium_lb4_services_v2").expect("a map");
                let value = |vip: [u8; 4], port, slot| {
                    let key = key(vip.into(), port, Scope::External, slot);
                    map.lookup(&key).expect("a look-up").expect("an entry of the capture")
                };
                Templates {
                    cluster: value([192, 168, 2, 22], 25565, 0),
                    local_here: value([192, 168, 2, 31], 80, 0),
                    local_away: value([192, 168, 2, 21], 8443, 0),
                    slot: value([192, 168, 2, 22], 25565, 1),
                }
            })
            .collect();
        Self {
            nodes,
            templates,
            folder: TempDir::new().expect("a folder"),
            services: Vec::new(),
            pool: None,
            holder: 0,
            fault: Fault::Nothing,
            is_up: false,
            patches: 0,
            log: Vec::new(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The root file system of a node, as far as `docker cp` has filled it.
    fn root(&self, node: usize) -> PathBuf {
        self.path(NAMES[node])
    }

    /// Programs a Service on every node, as Cilium does; those in `deaf` keep what they have.
    fn program(&self, index: usize, deaf: &[usize]) {
        let service = &self.services[index];
        let number = 4000 + u16::try_from(index).expect("few Services");
        for (place, node) in self.nodes.iter().enumerate() {
            if deaf.contains(&place) {
                continue;
            }
            let services = node.0.map("cilium_lb4_services_v2").expect("a map");
            let put = |scope, slot, mut value: Vec<u8>| {
                value[6..8].copy_from_slice(&number.to_be_bytes());
                let key = key(service.vip, 80, scope, slot);
                services.update(&key, &value).expect("an update");
            };
            let remove = |scope, slot| {
                let key = key(service.vip, 80, scope, slot);
                if services.lookup(&key).expect("a look-up").is_some() {
                    services.delete(&key).expect("a delete");
                }
            };
            let nat = ReverseNat { index: number, address: service.vip.into(), port: 80 };
            let (nat_key, nat_value) = nat.encode();
            let map = node.0.map("cilium_lb4_reverse_nat").expect("a map");
            map.update(&nat_key, &nat_value).expect("an update");
            let templates = &self.templates[place];
            let count = |mut value: Vec<u8>, count: u16| {
                value[4..6].copy_from_slice(&count.to_ne_bytes());
                value
            };
            if service.policy == "Cluster" {
                put(Scope::External, 0, count(templates.cluster.clone(), 1));
                put(Scope::External, 1, templates.slot.clone());
                remove(Scope::Internal, 1);
                remove(Scope::Internal, 0);
                if self.fault == Fault::BackendLost && place == 2 {
                    put(Scope::External, 0, count(templates.cluster.clone(), 0));
                    remove(Scope::External, 1);
                }
                continue;
            }
            let here = place == HOME || self.fault == Fault::LocalServed && place == 2;
            let like = if here { &templates.local_here } else { &templates.local_away };
            let inside = &templates.local_here;
            put(Scope::External, 0, count(like.clone(), u16::from(here)));
            put(Scope::Internal, 0, count(inside.clone(), 1));
            put(Scope::Internal, 1, templates.slot.clone());
            if here {
                put(Scope::External, 1, templates.slot.clone());
            } else {
                remove(Scope::External, 1);
            }
        }
    }

    /// The responder entries: the node with the lease has one.
    fn announce(&self, vip: Ipv4Addr) {
        let answers = if self.fault == Fault::WrongAnnouncer { 2 } else { self.holder };
        for (place, node) in self.nodes.iter().enumerate() {
            let map = node.0.map("cilium_l2_responder_v4").expect("a map");
            let key = [&vip.octets()[..], &node.index("eno1").to_le_bytes()].concat();
            if place == answers {
                map.update(&key, &[0; 8]).expect("an update");
            } else if map.lookup(&key).expect("a look-up").is_some() {
                map.delete(&key).expect("a delete");
            }
        }
    }

    /// Takes an object as the API server does.
    fn apply(&mut self, text: &str) {
        for document in yaml::parse(0, text).expect("YAML") {
            let object = document.root;
            let name = object.at(&["metadata", "name"]).and_then(Yaml::text).expect("a name");
            match object.text_of("kind") {
                Some("CiliumLoadBalancerIPPool") => {
                    let block = &object.at(&["spec", "blocks"]).expect("blocks").items()[0];
                    let of = |key| block.text_of(key).expect("it").parse().expect("an address");
                    self.pool = Some((of("start"), of("stop")));
                }
                Some("Service") => {
                    let spec = object.get("spec").expect("a spec");
                    assert_eq!(spec.text_of("type"), Some("LoadBalancer"));
                    let (first, _) = self.pool.expect("a pool before the Services");
                    let offset = u32::try_from(self.services.len()).expect("few Services");
                    let policy = spec.text_of("externalTrafficPolicy").expect("a policy");
                    self.services.push(Service {
                        name: name.to_owned(),
                        policy: policy.to_owned(),
                        vip: Ipv4Addr::from_bits(first.to_bits() + offset),
                        asked: 0,
                    });
                    let index = self.services.len() - 1;
                    self.program(index, &[]);
                    self.announce(self.services[index].vip);
                }
                Some("CiliumL2AnnouncementPolicy" | "Deployment") => {}
                other => panic!("an object that the script has no use for: {other:?}"),
            }
        }
    }

    fn kubectl(&mut self, arguments: &[&str], input: &str) -> Answer {
        const NODE_NAMES: &str = "jsonpath={.items[*].metadata.name}";
        match arguments {
            ["get", "nodes", "--output", NODE_NAMES] => {
                // Nodes come one after the other.
                let asked = self.log.iter().filter(|one| one.contains(NODE_NAMES)).count();
                let there = if asked < 2 || self.fault == Fault::NodeLost { 2 } else { 3 };
                said(NAMES[..there].join(" "))
            }
            ["get", "nodes", "--selector", "node-role.kubernetes.io/control-plane", ..] => {
                said("172.18.0.2 fc00::2")
            }
            ["get", "service", name, "--output", _] => {
                let lost = self.fault == Fault::NoAddress;
                let service = self.services.iter_mut().find(|one| one.name == *name);
                let service = service.expect("the Service");
                service.asked += 1;
                // Addresses take their time.
                said(if service.asked < 2 || lost {
                    String::new()
                } else {
                    service.vip.to_string()
                })
            }
            ["get", "pods", "--selector", "app=web", ..] => said(NAMES[HOME]),
            ["--namespace", "kube-system", "get", "lease", name, ..] => {
                assert!(name.starts_with("cilium-l2announce-default-web-"), "{name}");
                said(NAMES[self.holder])
            }
            ["apply", "--filename", "-"] => {
                self.apply(input);
                said("")
            }
            ["apply", "--filename", file] => {
                let text = fs::read_to_string(project("deploy/kind").join(file)).expect("a file");
                self.apply(&text);
                said("")
            }
            ["patch", "service", name, "--patch", patch] => {
                let patch: serde_json::Value = serde_json::from_str(patch).expect("JSON");
                let index = self.services.iter().position(|one| one.name == *name).expect("it");
                let policy = patch["spec"]["externalTrafficPolicy"].as_str().expect("a policy");
                policy.clone_into(&mut self.services[index].policy);
                self.patches += 1;
                let deaf: &[usize] = match (self.fault, self.patches) {
                    (Fault::FlipUnheard, 1) => &[0],
                    (Fault::BackUnheard, 2) => &[2],
                    _ => &[],
                };
                self.program(index, deaf);
                said(format!("service/{name} patched\n"))
            }
            ["wait" | "rollout", ..] => said(""),
            ["get", "nodes,pods,services,leases", ..] => {
                Answer(0, "what the cluster looked like\n".to_owned(), String::new())
            }
            _ => Answer(127, String::new(), format!("kubectl: no {arguments:?}\n")),
        }
    }

    fn docker(&self, arguments: &[&str]) -> Answer {
        match arguments {
            ["network", "inspect", "kind" | "k3d-inspect-ci"] => said(
                r#"[{"IPAM":{"Config":[{"Subnet":"fc00:f853:ccd:e793::/64"},{"Subnet":"192.168.0.0/22"}]}}]"#,
            ),
            ["cp", from, to] => {
                let (node, to) = to.split_once(':').expect("a node");
                let to = self.root(position(node)).join(to.trim_start_matches('/'));
                fs::create_dir_all(to.parent().expect("a folder")).expect("mkdir");
                run::install(Path::new(from), &to);
                said("")
            }
            ["exec", node, command @ ..] => self.exec(position(node), command),
            _ => Answer(127, String::new(), format!("docker: no {arguments:?}\n")),
        }
    }

    /// Runs a command on a node: in its network namespace and its cgroup, under its name, with its
    /// BPF file system as the only one, and what `docker cp` left there in the place of its root.
    fn exec(&self, place: usize, command: &[&str]) -> Answer {
        let node = &self.nodes[place];
        node.0.set_agent_alive().expect("a sign of life");
        let root = self.root(place);
        let inside = |word: &str| {
            let file = root.join(word.trim_start_matches('/'));
            if word.starts_with('/') && file.is_file() { file } else { word.into() }
        };
        let name = CString::new(NAMES[place]).expect("a name");
        let alone = || {
            let mut process = Command::new(inside(command[0]));
            process.args(command[1..].iter().map(|word| inside(word))).stdin(Stdio::null());
            let name = name.clone();
            let rename = move || {
                nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWUTS)?;
                // SAFETY: the name is a string of this length, and outlives the call.
                let done = unsafe { libc::sethostname(name.as_ptr(), name.as_bytes().len()) };
                if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
            };
            // SAFETY: the closure makes two system calls and allocates nothing.
            unsafe { process.pre_exec(rename) };
            // A container's BPF file system is found and not named.
            let process = node.0.exec_in(Ns::Node, &mut process).expect("the node");
            process.env_remove("INSPECT_BPFFS").output()
        };
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
        match node.0.run_alone(None, alone).expect("mounts of its own") {
            Ok(output) => Answer(
                output.status.code().expect("it ends by itself"),
                text(output.stdout),
                text(output.stderr),
            ),
            Err(error) => Answer(126, String::new(), format!("docker: {}: {error}\n", command[0])),
        }
    }

    fn answer(&mut self, words: &[&str], input: &str) -> Answer {
        self.log.push(words.join(" "));
        match words {
            ["kind", "get", "clusters"] => {
                said(if self.fault == Fault::Taken { "other\ninspect-ci\n" } else { "other\n" })
            }
            ["kind", "create", "cluster", "--name", "inspect-ci", "--config", file] => {
                assert!(project("deploy/kind").join(file).is_file(), "{file}");
                self.is_up = true;
                said("")
            }
            ["kind", "delete", "cluster", "--name", "inspect-ci"]
            | ["k3d", "cluster", "delete", "inspect-ci"] => {
                self.is_up = false;
                said("")
            }
            ["k3d", "cluster", "list", "--output", "json"] => said(r#"[{"name":"other"}]"#),
            ["k3d", "cluster", "create", "inspect-ci", ..] => {
                self.is_up = true;
                said("")
            }
            ["k3d", "kubeconfig", "get", "inspect-ci"] => said("apiVersion: v1\nkind: Config\n"),
            ["helm", "install", "cilium", "cilium", ..] if self.fault == Fault::Helm => {
                Answer(1, String::new(), "Error: context deadline exceeded\n".to_owned())
            }
            ["helm", "install", "cilium", "cilium", rest @ ..] => {
                assert!(rest.contains(&"k8sServiceHost=172.18.0.2"), "{rest:?}");
                said("")
            }
            ["kubectl", rest @ ..] => self.kubectl(rest, input),
            ["docker", rest @ ..] => self.docker(rest),
            _ => Answer(127, String::new(), format!("no such command: {words:?}\n")),
        }
    }

    /// Answers the stand-ins' questions until one says `end`.
    ///
    /// Both pipes are held open at both ends: nobody waits for anybody to open one, so that none
    /// can be missed.
    fn serve(&mut self) {
        let hold = |name: &str| {
            let pipe = OpenOptions::new().read(true).write(true).open(self.path(name));
            pipe.expect("a pipe")
        };
        let (ask, mut answers) = (BufReader::new(hold("ask")), hold("answer"));
        for asked in ask.split(END) {
            let asked = String::from_utf8(asked.expect("a question")).expect("UTF-8");
            let words: Vec<&str> = asked.split_terminator('\0').collect();
            if words == ["end"] {
                return;
            }
            let input = fs::read_to_string(self.path("in")).expect("its input");
            let Answer(code, out, err) = self.answer(&words, &input);
            fs::write(self.path("out"), out).expect("a file");
            fs::write(self.path("err"), err).expect("a file");
            writeln!(answers, "{code}").expect("an answer");
        }
    }

    /// Runs the script with this fault: its exit code, what it said, and what it said on standard
    /// error.
    fn script(&mut self, fault: Fault, holder: usize, arguments: &[&str]) -> Ran {
        (self.fault, self.holder) = (fault, holder);
        (self.is_up, self.patches, self.pool) = (false, 0, None);
        self.services.clear();
        self.log.clear();
        let fakes = self.folder.path().to_owned();
        let results = self.path("results");
        let caller = self.path("caller");
        for folder in [&results, &caller] {
            drop(fs::remove_dir_all(folder));
        }
        for place in 0..NAMES.len() {
            drop(fs::remove_dir_all(self.root(place)));
        }
        fs::create_dir_all(&caller).expect("mkdir");
        // Named by a path that is relative to the caller.
        run::install(Path::new(env!("CARGO_BIN_EXE_inspect")), &caller.join("inspect-static"));
        let path = std::env::var("PATH").expect("a PATH");
        let mut command = Command::new("bash");
        command
            .arg(project("deploy/kind/run"))
            .args(arguments)
            .arg("./inspect-static")
            .current_dir(&caller)
            .env("PATH", format!("{}:{path}", fakes.join("bin").display()))
            .env("FAKES", &fakes)
            .env("RESULTS", &results)
            .env("TMPDIR", &caller)
            .env("TRIES", "3")
            .env("PAUSE", "0.1")
            .stdin(Stdio::null());
        let output = thread::scope(|scope| {
            let serving = scope.spawn(|| self.serve());
            let output = command.output().expect("bash");
            fs::write(fakes.join("ask"), [b"end\0", &[END][..]].concat())
                .expect("somebody who listens");
            serving.join().expect("the stand-ins");
            output
        });
        // What it had in its temporary folder is gone.
        assert_eq!(run::names_in(&caller), ["inspect-static"]);
        Ran {
            code: output.status.code().expect("it ends by itself"),
            out: String::from_utf8(output.stdout).expect("UTF-8"),
            err: String::from_utf8(output.stderr).expect("UTF-8"),
        }
    }
}

#[derive(Debug)]
struct Ran {
    code: i32,
    out: String,
    err: String,
}

fn project(path: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).join(path)
}

fn position(node: &str) -> usize {
    NAMES.iter().position(|name| *name == node).expect("a node of the cluster")
}

/// The three nodes, and a folder with the commands that the script takes for Docker's and
/// Kubernetes'.
fn world() -> World {
    const FAKE: &str = "#!/bin/bash\nset -eu\nexec 9>\"$FAKES/lock\"\nflock 9\n: >\"$FAKES/in\"\n\
                        if [[ \" $* \" = *' - '* ]]; then cat >\"$FAKES/in\"; fi\n\
                        { printf '%s\\0' \"${0##*/}\" \"$@\"; printf '\\004'; } >\"$FAKES/ask\"\n\
                        read -r code <\"$FAKES/answer\"\n\
                        cat \"$FAKES/out\"\ncat \"$FAKES/err\" >&2\nexit \"$code\"\n";
    let world = World::new();
    fs::create_dir(world.path("bin")).expect("mkdir");
    let unpacked = deploy_tools::programs().expect("HOME, or INSPECTOR_TOOLS").join("usr");
    if unpacked.join("bin/jq").is_file() {
        let libraries = unpacked.join("lib").join(format!("{}-linux-gnu", std::env::consts::ARCH));
        let (libraries, jq) = (libraries.display(), unpacked.join("bin/jq"));
        let text =
            format!("#!/bin/sh\nLD_LIBRARY_PATH='{libraries}' exec '{}' \"$@\"\n", jq.display());
        run::script(&world.path("bin/jq"), &text);
    }
    for (tool, how) in [("flock", "it is of util-linux"), ("jq", "run `cargo xtask setup`")] {
        let own = world.path("bin").join(tool);
        let found =
            Command::new(if own.is_file() { own } else { tool.into() }).arg("--version").output();
        assert!(found.is_ok_and(|output| output.status.success()), "no `{tool}`: {how}");
    }
    for tool in ["docker", "kind", "k3d", "kubectl", "helm"] {
        run::script(&world.path("bin").join(tool), FAKE);
    }
    for pipe in ["ask", "answer"] {
        let made = Command::new("mkfifo").arg(world.path(pipe)).status().expect("mkfifo");
        assert!(made.success());
    }
    world
}

#[test]
fn the_script_holds_on_three_nodes_and_leaves_evidence() {
    let mut world = world();
    // The announcer has no replica; then the one that has it announces.
    for (holder, verdict) in [(0, "NO: "), (HOME, "YES: ")] {
        let ran = world.script(Fault::Nothing, holder, &[]);
        assert_eq!(ran.code, 0, "{ran:#?}");
        assert!(ran.out.ends_with("all of it holds\n"), "{ran:#?}");
        assert!(!world.is_up, "the cluster is taken down");
        assert_eq!(world.patches, 2, "there and back");
        // In the network of the engine, at its upper end.
        assert_eq!(world.pool, Some(([192, 168, 3, 200].into(), [192, 168, 3, 220].into())));
        let lines: Vec<&str> = ran.out.lines().collect();
        let of = |vip: &str| lines.iter().rev().find(|line| line.contains(vip)).expect("it");
        assert!(of("192.168.3.200").starts_with("YES: "), "{lines:#?}");
        assert!(of("192.168.3.201").starts_with(verdict), "{lines:#?}");
        for name in NAMES {
            let asked = world
                .log
                .iter()
                .filter(|one| one.starts_with(&format!("docker exec {name} /inspect")));
            assert!(asked.count() >= 8, "{name}: {:#?}", world.log);
            let junit = fs::read_to_string(world.path("results").join(format!("{name}.xml")));
            roxmltree::Document::parse(&junit.expect("a JUnit file")).expect("XML");
        }
        for service in ["web-cluster", "web-local"] {
            let file = world.path("results").join(format!("{service}.jsonl"));
            assert_eq!(fs::read_to_string(file).expect("evidence").lines().count(), 3);
        }
    }
    let ran = world.script(Fault::Nothing, 2, &["--k3d"]);
    assert_eq!(ran.code, 0, "{ran:#?}");
    assert!(world.log.iter().any(|one| one.starts_with("k3d cluster delete")), "{:#?}", world.log);
    assert!(!world.log.iter().any(|one| one.starts_with("kind ")), "{:#?}", world.log);
}

#[test]
fn with_a_fault_the_script_fails_and_says_what() {
    let mut world = world();
    for (fault, words) in [
        (Fault::BackendLost, "FAILED: on inspect-ci-worker2: inspect vip 192.168.3.200:80/tcp"),
        (
            Fault::LocalServed,
            "FAILED: on inspect-ci-worker2: inspect vip 192.168.3.201:80/tcp --expect not-served",
        ),
        (
            Fault::FlipUnheard,
            "FAILED: on inspect-ci-control-plane: inspect vip 192.168.3.201:80/tcp --expect served",
        ),
        (
            Fault::BackUnheard,
            "FAILED: on inspect-ci-worker2: inspect vip 192.168.3.201:80/tcp --expect not-served",
        ),
        (Fault::WrongAnnouncer, "FAILED: the merged evidence of web-cluster"),
        (Fault::Helm, "Error: context deadline exceeded"),
        (Fault::NodeLost, "FAILED: not three nodes: inspect-ci-control-plane inspect-ci-worker"),
        (Fault::NoAddress, "FAILED: web-cluster got no address"),
    ] {
        let ran = world.script(fault, 0, &[]);
        assert_eq!(ran.code, 1, "{fault:?}: {ran:#?}");
        assert!(ran.err.contains(words), "{fault:?}: {ran:#?}");
        assert!(ran.err.contains("what the cluster looked like"), "{fault:?}: {ran:#?}");
        assert!(!ran.out.contains("all of it holds"), "{fault:?}: {ran:#?}");
        let created = world.log.iter().any(|one| one.starts_with("kind create"));
        assert!(created && !world.is_up, "{fault:?}: its cluster is left behind");
    }
    // Somebody else's cluster is left alone.
    let ran = world.script(Fault::Taken, 0, &[]);
    assert_eq!(ran.code, 2, "{ran:#?}");
    assert!(ran.err.contains("there is a cluster inspect-ci already"), "{ran:#?}");
    assert_eq!(world.log, ["kind get clusters"]);
}
