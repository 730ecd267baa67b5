//! The network of a node as `inspect vip` collects it: on a lab with the network of a capture, seen
//! from another network namespace.
//!
//! Needs root, bpf(2), veth and TUN devices; fails without.

mod common;

use std::{
    fs,
    io::{Read, Write},
    net::{IpAddr, TcpListener, UdpSocket},
    os::unix::{fs::MetadataExt, net::UnixListener},
    path::Path,
    process::{Child, Command},
    thread,
};

use common::inspect;
use inspector::evidence::{Evidence, Source, SourceStatus, file::Document};
use inspector_lab::{Capture, Lab, Ns};

fn lab(capture: &str) -> Lab {
    Lab::builder().project(capture).network(true).up().expect("a lab with a network")
}

/// What `inspect vip` saves.
fn saved(lab: &Lab, vip: &str, arguments: &[&str]) -> Evidence {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("evidence.json");
    let mut all = vec!["vip", vip, "--save", file.to_str().expect("UTF-8")];
    all.extend(arguments);
    let output = inspect(lab, &all);
    assert!(
        output.stderr.is_empty() && file.exists(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Document::read(&file).expect("evidence").evidence
}

/// A process in a network namespace; ended when this is dropped.
struct Sleeper(Child);

impl Drop for Sleeper {
    fn drop(&mut self) {
        self.0.kill().and_then(|()| self.0.wait().map(drop)).expect("our own child");
    }
}

fn source<'a>(evidence: &'a Evidence, what: &str) -> &'a Source {
    evidence.sources.iter().find(|one| one.what == what).unwrap_or_else(|| panic!("no {what}"))
}

#[test]
fn the_network_is_that_of_the_namespace_that_was_named() {
    let lab = lab("v1.18-wg0-detached");
    let path = lab.netns(Ns::Node).expect("the node");
    let name = path.file_name().and_then(|name| name.to_str()).expect("a name");
    let sleeper = Sleeper(
        lab.run_in(Ns::Node, || Command::new("sleep").arg("600").spawn().expect("sleep"))
            .expect("the node"),
    );
    let pid = sleeper.0.id().to_string();
    let path_text = path.to_str().expect("UTF-8");
    let results = [path_text, name, &pid]
        .map(|given| (given, saved(&lab, "192.168.2.20", &["--netns", given])));
    drop(sleeper);

    let inode = fs::metadata(&path).expect("the namespace").ino();
    for (given, evidence) in results {
        let network = evidence.network.as_ref().expect("the network");
        let namespace = network.namespace.as_ref().expect("the namespace");
        assert_eq!((namespace.inode, namespace.chosen.as_deref()), (inode, Some(given)));
        let link = |name: &str| network.links.iter().find(|link| link.name == name).expect(name);
        let (eno1, wg0) = (link("eno1"), link("wg0"));
        assert_eq!((eno1.ifindex, wg0.ifindex), (2, 3));
        assert!(eno1.ethernet && !wg0.ethernet);
        assert!(wg0.addresses.contains(&"10.90.0.1/24".to_owned()), "{wg0:?}");
        // What the VPN's clients met: the stack routes the VIP to the LAN.
        let vip: IpAddr = "192.168.2.20".parse().expect("an address");
        for input in [None, Some(3)] {
            let answer = network.route(vip, input).expect("asked").answer.as_ref();
            let route = answer.expect("a route");
            assert_eq!((route.output, route.gateway), (Some(2), None), "{input:?}");
        }
        let backends: Vec<_> = network.routes.iter().filter(|one| one.destination != vip).collect();
        assert!(backends.iter().any(|one| one.input == Some(3)), "{backends:?}");
        assert_eq!(network.sysctls["net.ipv4.ip_forward"], 1);
        for what in ["links", "neighbours", "rules", "table 2004", "routes", "sysctls"] {
            assert_eq!(source(&evidence, what).status, SourceStatus::Complete, "{what}");
        }
        assert_eq!(source(&evidence, "WireGuard").status, SourceStatus::Absent);
        // The packets of a pod come from the pod's address.
        let pod = network.links.iter().find(|link| link.name.starts_with("lxc")).expect("a pod");
        let from = network.route(vip, Some(pod.ifindex)).expect("asked").source.expect("IPv4");
        assert!(from.to_string().starts_with("10.77.1."), "{from}");
        // Devices have the names of that namespace.
        let named: Vec<_> = evidence.devices.iter().filter(|one| one.ifindex == 2).collect();
        assert!(named.iter().all(|one| one.name.as_deref() == Some("eno1")), "{named:?}");
        assert!(!named.is_empty());
    }

    // The counter-test: this process's own namespace is another one.
    let here = saved(&lab, "192.168.2.20", &[]).network.expect("the network").namespace;
    let here = here.expect("the namespace");
    assert_ne!(here.inode, inode);
    assert_eq!(here.chosen, None);
}

#[test]
fn a_namespace_that_is_none_is_an_error_of_one_sentence() {
    let lab = Lab::builder().project("v1.18-tcx").up().expect("a lab");
    for command in [&["vip", "192.168.2.20"][..], &["doctor"], &["lb", "list"]] {
        let mut arguments = command.to_vec();
        arguments.extend(["--netns", "no-such-name"]);
        let output = inspect(&lab, &arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains("there is no network namespace no-such-name"), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}

#[test]
fn what_leads_to_a_proxy_is_read() {
    let lab = lab("v1.21-l7lb");
    let netns = lab.netns(Ns::Node).expect("the node");
    let netns = netns.to_str().expect("UTF-8");
    // .30 is an L7 frontend with the proxy port 10042; nobody listens there in the capture.
    let evidence = saved(&lab, "192.168.2.30", &["--netns", netns]);
    let network = evidence.network.as_ref().expect("the network");
    assert_eq!(network.listening, [0_u16; 0]);
    assert_eq!(network.proxy_routes, ["local default dev lo"]);
    assert_eq!(network.proxy_routes_v6, ["local default dev lo"]);
    assert!(
        network
            .rules
            .iter()
            .any(|rule| { !rule.ipv6 && rule.mark == Some((0x200, 0xf00)) && rule.table == 2004 })
    );
    assert_eq!(source(&evidence, "listening sockets").status, SourceStatus::Complete);

    let sockets = lab.run_in(Ns::Node, || {
        let tcp = TcpListener::bind("127.0.0.1:10042").expect("listen");
        let other = TcpListener::bind("127.0.0.1:10043").expect("listen");
        let udp = UdpSocket::bind("[::]:10042").expect("bind");
        (tcp, other, udp)
    });
    let sockets = sockets.expect("the node");
    let network = saved(&lab, "192.168.2.30", &["--netns", netns]).network.expect("the network");
    assert_eq!((network.listening, network.listening_udp), (vec![10042], vec![10042]));
    drop(sockets);

    // The counter-test: for a frontend without a proxy nobody looks.
    let evidence = saved(&lab, "192.168.2.20", &["--netns", netns]);
    for what in ["listening sockets", "TPROXY rules"] {
        assert_eq!(source(&evidence, what).status, SourceStatus::NotAttempted, "{what}");
    }
}

#[test]
fn what_the_datapath_was_compiled_with_is_read() {
    let lab = Lab::builder().project("v1.18-tcx").up().expect("a lab");
    let state = tempfile::tempdir().expect("a folder");
    let path = state.path().to_str().expect("UTF-8");
    let evidence = saved(&lab, "192.168.2.20", &["--state", path]);
    assert_eq!(source(&evidence, "node_config.h").status, SourceStatus::Absent);
    fs::create_dir(state.path().join("globals")).expect("mkdir");
    let header = "#define ENABLE_NODEPORT 1\n#define LB_SELECTION 2\n#define HOST_ID 1\n";
    fs::write(state.path().join("globals/node_config.h"), header).expect("write");
    let evidence = saved(&lab, "192.168.2.20", &["--state", path]);
    assert_eq!(source(&evidence, "node_config.h").status, SourceStatus::Complete);
    let config = evidence.network.expect("the network").node_config;
    let read: Vec<_> = config.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    assert_eq!(read, [("ENABLE_NODEPORT", "1"), ("LB_SELECTION", "2")]);
}

/// An agent that answers once, with what a capture's agent answered; ends when it has.
fn agent(socket: &Path, answer: Vec<u8>) -> thread::JoinHandle<String> {
    let listener = UnixListener::bind(socket).expect("a socket");
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        let mut request = Vec::new();
        let mut buffer = [0; 1024];
        while !request.ends_with(b"\r\n\r\n") {
            let length = stream.read(&mut buffer).expect("a request");
            assert!(length > 0, "the request ends early");
            request.extend(&buffer[..length]);
        }
        // The client may go when it has seen enough.
        let _ = stream.write_all(&answer);
        String::from_utf8(request).expect("UTF-8")
    })
}

#[test]
fn the_agent_is_asked_on_demand() {
    let folder = tempfile::tempdir().expect("a folder");
    for (number, name, expected) in [
        (1, "v1.21-tcx", ["192.168.2.20:443/TCP"].as_slice()),
        // The agent of this version tells no protocol.
        (2, "v1.13-clsact", &["192.168.2.20:443"]),
    ] {
        let capture = Capture::project(name).expect("a capture");
        let list = capture.text("cilium/service-list.json").expect("the agent's list");
        let lab = Lab::builder().project(name).up().expect("a lab");
        let socket = folder.path().join(format!("{number}.sock"));
        let head = "HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n";
        let server = agent(&socket, format!("{head}{list}").into_bytes());
        let option = format!("--agent={}", socket.display());
        let evidence = saved(&lab, "192.168.2.20", &[&option]);
        assert_eq!(source(&evidence, "agent's services").status, SourceStatus::Complete);
        let mut frontends = evidence.network.expect("the network").agent_frontends.expect("asked");
        frontends.retain(|frontend| frontend.starts_with("192.168.2.20:443"));
        assert_eq!(frontends, expected, "{name}");
        let request = server.join().expect("the server");
        assert!(request.starts_with("GET /v1/service HTTP/1.0\r\n"), "{request}");

        let evidence = saved(&lab, "192.168.2.20", &[]);
        let not_asked = source(&evidence, "agent's services");
        assert_eq!(not_asked.status, SourceStatus::NotAttempted);
        assert_eq!(evidence.network.expect("the network").agent_frontends, None);
    }
}

#[test]
fn an_agent_that_fails_is_a_source_that_says_so() {
    let lab = Lab::builder().project("v1.18-tcx").up().expect("a lab");
    let folder = tempfile::tempdir().expect("a folder");
    let asked = |socket: &Path| {
        let evidence = saved(&lab, "192.168.2.20", &[&format!("--agent={}", socket.display())]);
        let source = source(&evidence, "agent's services").clone();
        assert_eq!(source.status, SourceStatus::Failed);
        source.reason.expect("a reason")
    };
    let missing = asked(&folder.path().join("missing.sock"));
    assert!(missing.ends_with("name its socket with --agent=SOCKET"), "{missing}");
    for (number, answer, says) in [
        (1, &b"HTTP/1.0 500 Internal Server Error\r\n\r\n"[..], "500 Internal Server Error"),
        (2, b"HTTP/1.0 200 OK\r\n\r\n{\"not\": \"a list\"}", "cannot be read"),
        (3, b"HTTP/1.0 200 OK\r\nContent-Length: 900\r\n\r\n[", "1 bytes of 900"),
        (4, b"", "no HTTP response"),
    ] {
        let socket = folder.path().join(format!("{number}.sock"));
        let server = agent(&socket, answer.to_vec());
        let reason = asked(&socket);
        assert!(reason.contains(says), "{reason}");
        server.join().expect("the server");
    }
    // One that takes the connection and says nothing.
    let socket = folder.path().join("silent.sock");
    let silent = UnixListener::bind(&socket).expect("a socket");
    let reason = asked(&socket);
    assert!(reason.ends_with("did not answer within 5 s"), "{reason}");
    drop(silent);
}
