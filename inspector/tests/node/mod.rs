//! A node of the lab on which the stand-in for Cilium's datapath is attached: what tests change
//! there, and what they ask it.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::{IpAddr, TcpListener},
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use inspector::trace::{observe::Observers, sighting::Sighting};
use inspector_lab::{
    Lab, Ns,
    lab::exec_outside,
    probe::{self, Attempt, Outcome},
};
use serde_json::Value;

use crate::run::{Ran, inspect, run};

/// A lab with its datapath, which is gone when this is dropped.
pub struct Node(pub Lab);

impl Node {
    /// The node of a capture.
    pub fn new(capture: &str) -> Self {
        let lab = Lab::builder().project(capture).datapath(true).up();
        Self(lab.expect("a lab (this test needs root, bpf(2), a cgroup2 mount and TUN devices)"))
    }

    /// The node of a capture whose wg0 is a real tunnel.
    pub fn with_wireguard(capture: &str) -> Self {
        let lab = Lab::builder().project(capture).datapath(true).wireguard(true).up();
        Self(lab.expect("a lab (this test needs root and WireGuard in the kernel)"))
    }

    /// Lets the Services' target port 8443 (IPv4) be one at which nobody listens.
    pub fn let_backends_refuse(&self) {
        let map = self.0.map("cilium_lb4_backends_v3").expect("the backends");
        for entry in map.entries().expect("its entries") {
            let mut value = entry.value.clone();
            if value[4..6] == 8443_u16.to_be_bytes() {
                value[4..6].copy_from_slice(&8444_u16.to_be_bytes());
                map.update(&entry.key, &value).expect("an entry");
            }
        }
    }

    /// Listens on the node as a local proxy does, at port 80 and at the proxy's own: it answers as the
    /// VIP, which is no address of the node.
    pub fn listen_as_proxy(&self, proxy_port: u16) -> [TcpListener; 2] {
        let listen = |port: u16| {
            let listener = TcpListener::bind(("0.0.0.0", port)).expect("a listener");
            let yes: libc::c_int = 1;
            // SAFETY: the kernel reads one number of the length given.
            let set = unsafe {
                libc::setsockopt(
                    listener.as_raw_fd(),
                    libc::SOL_IP,
                    libc::IP_TRANSPARENT,
                    (&raw const yes).cast(),
                    4,
                )
            };
            assert_eq!(set, 0, "IP_TRANSPARENT: {}", std::io::Error::last_os_error());
            listener
        };
        self.0.run_in(Ns::Node, || [80, proxy_port].map(listen)).expect("the node")
    }

    /// What `inspect` says on the node, in the cgroup with socket load balancing.
    pub fn inspect(&self, arguments: &[&str]) -> Ran {
        self.run(&mut inspect(arguments))
    }

    /// What a command says there.
    pub fn run(&self, command: &mut Command) -> Ran {
        self.0.set_agent_alive().expect("a sign of life");
        // Other labs may be up on this machine.
        let alone = || run(self.0.exec_in(Ns::Node, command).expect("the node"));
        self.0.run_alone(None, alone).expect("mounts of its own")
    }

    /// The verdict on a VIP.
    pub fn vip(&self, arguments: &[&str]) -> Ran {
        self.inspect(&[&["vip", "-o", "json"], arguments].concat())
    }

    /// The same, asked by a process that is not in the cgroup with socket load balancing.
    pub fn vip_outside(&self, arguments: &[&str]) -> Ran {
        self.0.set_agent_alive().expect("a sign of life");
        let alone = || {
            let mut command = inspect([&["vip", "-o", "json"], arguments].concat());
            run(exec_outside(self.0.record(), Ns::Node, &mut command).expect("the node"))
        };
        self.0.run_alone(None, alone).expect("mounts of its own")
    }

    /// Runs `ip` of iproute2 in a place of the lab.
    #[track_caller]
    pub fn ip(&self, place: Ns, arguments: &str) -> String {
        let mut command = Command::new("ip");
        command.args(arguments.split(' '));
        let output = self.0.exec_in(place, &mut command).expect("the place").output();
        let output = output.expect("`ip`, of iproute2, which this test needs");
        assert!(output.status.success(), "ip {arguments}: {output:?}");
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    /// A path in the folder of Cilium's links.
    pub fn link(&self, path: &str) -> PathBuf {
        self.0.bpffs().join("cilium").join(path)
    }

    /// Removes the pin of a link, by which alone its program is attached.
    pub fn detach(&self, path: &str) {
        let path = self.link(path);
        fs::remove_file(&path).unwrap_or_else(|error| panic!("rm {}: {error}", path.display()));
    }

    /// Connects (or sends, over UDP) from a place, in no cgroup of the lab's.
    pub fn connect(&self, from: Ns, protocol: &str, to: &str, port: u16) -> Outcome {
        self.0.set_agent_alive().expect("a sign of life");
        let attempt = Attempt {
            from: from.to_string(),
            proto: protocol.to_owned(),
            dst: to.parse::<IpAddr>().expect("an address"),
            port,
        };
        let patience = Duration::from_millis(2500);
        let connect = || probe::connect_all(&[attempt], patience).remove(0);
        self.0.run_in(from, connect).expect("the place")
    }

    /// Interface index of a device of the node.
    pub fn index(&self, device: &str) -> u32 {
        let index = || nix::net::if_::if_nametoindex(device).expect("a device");
        self.0.run_in(Ns::Node, index).expect("the node")
    }
}

/// Checks that a finding is not there.
#[track_caller]
pub fn absent(ran: &Ran, id: &str) {
    assert_eq!(ran.seen(id), [""; 0], "{ran:?}");
}

/// Checks that nothing is wrong with the node: no finding but notes.
#[track_caller]
pub fn sound(ran: &Ran) {
    let findings = ran.findings();
    let bad: Vec<_> = findings.iter().filter(|(_, severity, _)| severity != "note").collect();
    assert!(bad.is_empty(), "{bad:#?}");
}

/// Checks that a finding is there once: how bad it is and what was seen.
#[track_caller]
pub fn found(ran: &Ran, id: &str, severity: &str, seen: &str) {
    let all = ran.findings();
    let these: Vec<_> = all.iter().filter(|one| one.0 == id).collect();
    assert!(these.len() == 1, "{id} in {all:#?}");
    assert_eq!((these[0].1.as_str(), these[0].2.as_str()), (severity, seen));
}

/// A finding, whole.
#[track_caller]
pub fn finding(ran: &Ran, id: &str) -> Value {
    let json = ran.json();
    let all = json["verdict"]["findings"].as_array().expect("findings");
    all.iter().find(|one| one["id"] == id).unwrap_or_else(|| panic!("{id} in {all:#?}")).clone()
}

/// The verdict on a path of a frontend, by the port of its name: `443/TCP`.
#[track_caller]
pub fn path(ran: &Ran, port: &str, path: &str) -> Value {
    let json = ran.json();
    let all = json["verdict"]["paths"].as_array().expect("paths");
    all.iter()
        .find(|one| {
            let frontend = one["frontend"].as_str().expect("a frontend");
            one["path"] == path && frontend.ends_with(&format!(":{port}"))
        })
        .unwrap_or_else(|| panic!("{port} {path} in {all:#?}"))
        .clone()
}

/// Outcome, served and neighbour of a path.
#[track_caller]
pub fn fate(ran: &Ran, port: &str, of: &str) -> (String, String, String) {
    let path = path(ran, port, of);
    let text = |member: &str| path[member].as_str().unwrap_or_default().to_owned();
    (text("outcome"), text("served"), text("neighbour"))
}

/// The reasons of a path, in one text.
#[track_caller]
pub fn why(ran: &Ran, port: &str, of: &str) -> String {
    let path = path(ran, port, of);
    let reasons = path["why"].as_array().expect("reasons");
    reasons.iter().map(|one| one.as_str().expect("text")).collect::<Vec<_>>().join("; ")
}

/// Whether the node serves the VIP, and the sentence.
#[track_caller]
pub fn answer(ran: &Ran) -> (String, String) {
    let verdict = &ran.json()["verdict"];
    let text = |member: &str| verdict[member].as_str().expect("text").to_owned();
    (text("served"), text("sentence"))
}

/// Text that is compared with [`fate`].
pub fn is(outcome: &str, served: &str, neighbour: &str) -> (String, String, String) {
    (outcome.to_owned(), served.to_owned(), neighbour.to_owned())
}

/// Writes `node_config.h` with these macros into a state directory.
pub fn state(folder: &Path, macros: &[&str]) {
    fs::create_dir_all(folder.join("globals")).expect("mkdir");
    let lines: Vec<String> = macros.iter().map(|name| format!("#define {name} 1\n")).collect();
    fs::write(folder.join("globals/node_config.h"), lines.concat()).expect("a file");
}

/// Keys and values of maps, by the maps' names.
pub type Contents = BTreeMap<String, BTreeSet<(Vec<u8>, Vec<u8>)>>;

/// Everything that is in the maps that programs write to, but for counters.
pub fn contents(node: &Node) -> Contents {
    /// Counters, and the agent's sign of life, which the lab refreshes.
    const MOVING: [&str; 3] = ["cilium_metrics", "cilium_runtime_config", "cilium_policystats"];
    let globals = node.0.bpffs().join("tc/globals");
    let mut maps = BTreeMap::new();
    for entry in fs::read_dir(globals).expect("pins") {
        let name = entry.expect("a pin").file_name().into_string().expect("UTF-8");
        // What is no map (a program array's entries cannot be read) is passed over.
        let Ok(map) = node.0.map(&name) else { continue };
        if MOVING.contains(&name.as_str()) || name.ends_with("_alloc_retries") {
            continue;
        }
        let Ok(entries) = map.entries() else { continue };
        let entries = entries.into_iter().map(|entry| (entry.key, entry.value)).collect();
        maps.insert(name, entries);
    }
    assert!(maps.contains_key("cilium_ct4_global"), "{:?}", maps.keys());
    maps
}

/// What observers see from now on for so long: all of it, and nothing that was lost.
#[track_caller]
pub fn seen_for(observers: &mut Observers, time: Duration) -> Vec<Sighting> {
    let mut seen = Vec::new();
    let deadline = Instant::now() + time;
    loop {
        while let Some(sighting) = observers.next().expect("event") {
            seen.push(sighting);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        observers.wait(left).expect("wait");
    }
    for count in observers.counts().expect("counts") {
        assert_eq!(count.lost, 0, "{count:?}");
    }
    assert_eq!(observers.malformed(), 0);
    seen
}
