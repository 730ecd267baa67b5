//! What connections through the stand-in datapath leave in Cilium's maps, read with inspector's
//! decoders.
//!
//! Needs root and a cgroup2 mount; fails without.

use std::{
    collections::BTreeSet,
    io::Write,
    net::{IpAddr, SocketAddr, UdpSocket},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use inspector::cilium::{
    affinity::{Affinity, Client},
    conntrack::{Conntrack, CtFlags},
    error::DecodeError,
    layout::{self, Layout, MapType},
    mac::Mac,
    metrics::{Direction, Metric},
    nodeport_neigh::NodeportNeigh,
    proto::Protocol,
    services::{Scope, Service},
    snat::Snat,
    tuple::TupleFlags,
};
use inspector::{collect, evidence::programs::HookKind};
use inspector_lab::{
    Capture, Lab, MapHandle, Ns, Xdp, bpf,
    capture::MapSpec,
    lab::exec_outside,
    probe::{Attempt, Outcome},
};

fn lab(capture: &str) -> Lab {
    Lab::builder().project(capture).datapath(true).up().expect("a lab")
}

/// Makes connections, all from the place of the first.
fn connect(lab: &Lab, attempts: &[Attempt]) -> Vec<Outcome> {
    let source = attempts[0].source().expect("a place");
    let mut command = Command::new(env!("CARGO_BIN_EXE_inspector-lab"));
    command.args(["connect", "--patience", "2500"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    if source.in_cgroup {
        lab.exec_in(source.place, &mut command).expect("the place");
    } else {
        exec_outside(lab.record(), source.place, &mut command).expect("the place");
    }
    let mut child = command.spawn().expect("inspector-lab");
    let text = serde_json::to_vec(attempts).expect("JSON");
    child.stdin.take().expect("stdin").write_all(&text).expect("written");
    let output = child.wait_with_output().expect("its output");
    assert!(output.status.success());
    serde_json::from_slice(&output.stdout).expect("outcomes")
}

fn attempt(from: &str, proto: &str, dst: &str, port: u16) -> Attempt {
    let dst = dst.parse().expect("an address");
    Attempt { from: from.into(), proto: proto.into(), dst, port }
}

/// Makes one connection, which must be answered.
fn reach(lab: &Lab, from: &str, proto: &str, dst: &str, port: u16) -> Outcome {
    let outcome = connect(lab, &[attempt(from, proto, dst, port)]).remove(0);
    assert!(outcome.ok, "{outcome:?}");
    outcome
}

/// An address with a port as the lab prints it: the captures have no brackets.
fn ends(text: Option<&String>) -> (IpAddr, u16) {
    let (host, port) = text.expect("an address").rsplit_once(':').expect("a port");
    let host: IpAddr = host.trim_matches(['[', ']']).parse().expect("an address");
    (host.to_canonical(), port.parse().expect("a port"))
}

/// The client's end. A socket that is not connected does not know its own address: then the
/// backend's word is taken, which is right where the source is not rewritten.
fn client(outcome: &Outcome) -> (IpAddr, u16) {
    let (ip, port) = ends(outcome.src.as_ref());
    if ip.is_unspecified() { ends(outcome.peer_seen_by_backend.as_ref()) } else { (ip, port) }
}

type Decode<T> = fn(&'static Layout, &[u8], &[u8]) -> Result<T, DecodeError>;

/// All entries of a map, decoded.
fn entries<T>(lab: &Lab, name: &str, decode: Decode<T>) -> Vec<T> {
    let map = lab.map(name).expect(name);
    let spec = map.spec();
    let layout = layout::detect(name, spec.map_type, spec.key_size, spec.value_size);
    let layout = layout.expect("a known layout");
    let entries = map.entries().expect("its entries");
    entries.iter().map(|e| decode(layout, &e.key, &e.value).expect("decoded")).collect()
}

/// The one entry that `is` says.
fn one<T: std::fmt::Debug>(entries: Vec<T>, what: &str, is: impl Fn(&T) -> bool) -> T {
    let mut found: Vec<T> = entries.into_iter().filter(|entry| is(entry)).collect();
    assert_eq!(found.len(), 1, "{what}: {found:?}");
    found.remove(0)
}

/// Name of a map of an IP version.
fn family(address: IpAddr, v4: &'static str, v6: &'static str) -> &'static str {
    if address.is_ipv4() { v4 } else { v6 }
}

/// The service behind a frontend, from the services map.
fn service(lab: &Lab, vip: SocketAddr, protocol: Protocol) -> Service {
    let name = family(vip.ip(), "cilium_lb4_services_v2", "cilium_lb6_services_v2");
    one(entries(lab, name, Service::decode), "service", |entry| {
        entry.key.address == vip.ip()
            && entry.key.port == vip.port()
            && entry.key.slot == 0
            && entry.key.scope == Scope::External
            && (entry.key.protocol == protocol || entry.key.protocol == Protocol(0))
    })
}

const SYN: u8 = 2;

/// Makes a connection, and looks for everything that it must have left.
fn leaves(lab: &Lab, from: &str, proto: &str, dst: &str, port: u16, elsewhere: bool) {
    let before = bpf::monotonic_ns() / 1_000_000_000;
    let outcome = reach(lab, from, proto, dst, port);
    let after = bpf::monotonic_ns() / 1_000_000_000;
    let (client, client_port) = client(&outcome);
    let (seen, seen_port) = ends(outcome.peer_seen_by_backend.as_ref());
    let vip: IpAddr = dst.parse().expect("an address");
    let tcp = proto == "tcp";
    let protocol = Protocol(if tcp { 6 } else { 17 });
    let service = service(lab, SocketAddr::new(vip, port), protocol);
    let what = format!("{from} {proto} {dst}:{port}");

    let any = family(vip, "cilium_ct_any4_global", "cilium_ct_any6_global");
    let own = if tcp { family(vip, "cilium_ct4_global", "cilium_ct6_global") } else { any };
    let of_client = || {
        let all = entries(lab, own, Conntrack::decode).into_iter();
        all.filter(|entry| entry.source == client && entry.source_port == client_port)
            .filter(|entry| entry.protocol == protocol)
            // Not one of the capture, whose client may have had this port too.
            .filter(|entry| (before + 60..=after + 60).contains(&u64::from(entry.lifetime)))
            .collect::<Vec<_>>()
    };
    let kind = |flags: u8| {
        let entry = one(of_client(), &what, |entry| entry.tuple_flags == TupleFlags(flags));
        let seen = (entry.tx_flags_seen, entry.rx_flags_seen);
        let syn = if tcp { SYN } else { 0 };
        assert_eq!(
            seen,
            if flags & TupleFlags::IN == 0 { (syn, 0) } else { (0, syn) },
            "{entry:?}"
        );
        entry
    };

    let to_vip = kind(TupleFlags::SERVICE);
    assert_eq!((to_vip.destination, to_vip.destination_port), (vip, port), "{to_vip:?}");
    assert_eq!(to_vip.rev_nat_index, service.rev_nat_index, "{to_vip:?}");
    let to_backend = kind(0);
    assert!(to_backend.flags.node_port(), "{to_backend:?}");
    assert_eq!(to_backend.rev_nat_index, to_vip.rev_nat_index, "{to_backend:?}");
    assert_eq!(Some(to_backend.destination_port), outcome.backend_port, "{what}");
    if let Some(backend) = &outcome.backend_ip {
        assert_eq!(to_backend.destination.to_string(), *backend, "{what}");
    }
    // The id in the service's entry is that of this very backend.
    let id = u32::try_from(to_vip.backend_id().expect("a backend")).expect("32 bits");
    assert_eq!(address_of(lab, vip, id), (to_backend.destination, to_backend.destination_port));

    let related = entries(lab, any, Conntrack::decode).into_iter().filter(|entry| {
        let flags = TupleFlags(TupleFlags::IN | TupleFlags::RELATED);
        (entry.source, entry.destination) == (client, to_backend.destination)
            && entry.tuple_flags == flags
            && entry.protocol == Protocol(if vip.is_ipv4() { 1 } else { 58 })
            && (entry.source_port, entry.destination_port) == (0, 0)
            && (before + 60..=after + 60).contains(&u64::from(entry.lifetime))
    });
    assert_eq!(related.count(), usize::from(!elsewhere), "{what}");

    let snat = family(vip, "cilium_snat_v4_external", "cilium_snat_v6_external");
    let snat = || {
        let all = entries(lab, snat, Snat::decode).into_iter();
        all.filter(|entry| (before..=after).contains(&entry.created)).collect::<Vec<_>>()
    };
    let backend = (to_backend.destination, to_backend.destination_port);
    if elsewhere {
        assert_eq!(of_client().len(), 2, "{what}");
        let out = one(snat(), &what, |entry| {
            (entry.source, entry.source_port) == (client, client_port)
                && (entry.destination, entry.destination_port) == backend
        });
        assert_eq!((out.tuple_flags, out.protocol), (TupleFlags(0), protocol));
        assert_eq!((out.to_address, out.to_port), (seen, seen_port));
        let back = one(snat(), &what, |entry| {
            (entry.source, entry.source_port) == backend
                && (entry.destination, entry.destination_port) == (seen, seen_port)
        });
        assert_eq!((back.tuple_flags, back.protocol), (TupleFlags(TupleFlags::IN), protocol));
        assert_eq!((back.to_address, back.to_port), (client, client_port));
    } else {
        assert_eq!(of_client().len(), 3, "{what}");
        assert_eq!((seen, seen_port), (client, client_port), "{what}");
        let to_pod = kind(TupleFlags::IN);
        assert_eq!((to_pod.destination, to_pod.destination_port), backend, "{to_pod:?}");
        assert_eq!((to_pod.rev_nat_index, to_pod.flags), (0, CtFlags(0)), "{to_pod:?}");
        assert!(
            !snat().iter().any(|entry| (entry.source, entry.source_port) == (client, client_port))
        );
    }

    let neigh = family(vip, "cilium_nodeport_neigh4", "cilium_nodeport_neigh6");
    let neigh =
        one(entries(lab, neigh, NodeportNeigh::decode), &what, |entry| entry.address == client);
    if from == "vpn" {
        // No Ethernet header: bytes of the packet, as in the captures. IPv4: not to be fragmented,
        // 64 hops, the protocol; IPv6: TCP or UDP, 64 hops, the start of the source address.
        let Mac(bytes) = neigh.mac;
        if vip.is_ipv4() {
            assert_eq!(bytes[..4], [0x40, 0, 0x40, protocol.0], "{neigh:?}");
        } else {
            assert_eq!(bytes, [protocol.0, 64, 0xfd, 0, 0, 0x90], "{neigh:?}");
        }
    } else {
        assert_eq!(neigh.mac, mac_of(lab, Ns::Client), "{what}");
    }
}

/// Address and port of a backend.
fn address_of(lab: &Lab, vip: IpAddr, id: u32) -> (IpAddr, u16) {
    let name = family(vip, "cilium_lb4_backends_v3", "cilium_lb6_backends_v3");
    let name = if lab.pin_path(name).exists() {
        name
    } else {
        family(vip, "cilium_lb4_backends_v2", "cilium_lb6_backends_v2")
    };
    let value = lab.map(name).expect(name).lookup(&id.to_ne_bytes()).expect(name);
    let value = value.expect("the backend");
    let (address, rest): (IpAddr, _) = if vip.is_ipv4() {
        let (address, rest) = value.split_first_chunk::<4>().expect("an address");
        ((*address).into(), rest)
    } else {
        let (address, rest) = value.split_first_chunk::<16>().expect("an address");
        ((*address).into(), rest)
    };
    (address, u16::from_be_bytes([rest[0], rest[1]]))
}

/// The MAC address of the one Ethernet device of a place in the LAN.
fn mac_of(lab: &Lab, place: Ns) -> Mac {
    let mut command = Command::new("ip");
    command.args(["-j", "link", "show"]);
    let output = lab.exec_in(place, &mut command).expect("the place").output().expect("ip");
    let links: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).expect("JSON");
    let ethernet = links.iter().filter(|link| link["link_type"] == "ether");
    let macs: Vec<&str> = ethernet.map(|link| link["address"].as_str().expect("it")).collect();
    assert_eq!(macs.len(), 1, "{macs:?}");
    let bytes: Vec<u8> =
        macs[0].split(':').map(|byte| u8::from_str_radix(byte, 16).expect("hex")).collect();
    Mac(bytes.try_into().expect("six bytes"))
}

#[test]
fn connections_leave_what_they_left_in_1_13() {
    let lab = lab("v1.13-clsact");
    for from in ["client", "vpn"] {
        leaves(&lab, from, "tcp", "192.168.2.20", 443, false);
        leaves(&lab, from, "udp", "192.168.2.22", 25565, false);
        leaves(&lab, from, "tcp", "192.168.2.32", 80, true);
        leaves(&lab, from, "tcp", "fd00:2::20", 443, false);
        leaves(&lab, from, "udp", "fd00:2::22", 25565, false);
        leaves(&lab, from, "tcp", "fd00:2::32", 80, true);
    }
}

#[test]
fn connections_leave_what_they_left_in_1_18() {
    let lab = lab("v1.18-tcx");
    for from in ["client", "vpn"] {
        leaves(&lab, from, "tcp", "192.168.2.20", 443, false);
        leaves(&lab, from, "udp", "192.168.2.22", 25565, false);
        leaves(&lab, from, "tcp", "192.168.2.32", 80, true);
        leaves(&lab, from, "tcp", "fd00:2::20", 443, false);
        leaves(&lab, from, "udp", "fd00:2::22", 25565, false);
    }
}

#[test]
fn connections_leave_what_they_left_in_1_21() {
    let lab = lab("v1.21-tcx");
    for from in ["client", "vpn"] {
        leaves(&lab, from, "tcp", "192.168.2.20", 443, false);
        leaves(&lab, from, "udp", "192.168.2.22", 25565, false);
        leaves(&lab, from, "tcp", "192.168.2.32", 80, true);
        leaves(&lab, from, "tcp", "fd00:2::20", 443, false);
        leaves(&lab, from, "udp", "fd00:2::22", 25565, false);
        leaves(&lab, from, "tcp", "fd00:2::32", 80, true);
    }
}

/// Who answers `count` connections.
fn answers(lab: &Lab, attempt: &Attempt, count: usize) -> BTreeSet<String> {
    let outcomes = connect(lab, &vec![attempt.clone(); count]);
    assert!(outcomes.iter().all(|outcome| outcome.ok), "{outcomes:?}");
    outcomes.into_iter().filter_map(|outcome| outcome.answered_by).collect()
}

fn affinity(lab: &Lab, vip: &Attempt, client: IpAddr) -> Affinity {
    let rev_nat = service(lab, SocketAddr::new(vip.dst, vip.port), Protocol(6)).rev_nat_index;
    let name = family(vip.dst, "cilium_lb4_affinity", "cilium_lb6_affinity");
    one(entries(lab, name, Affinity::decode), "affinity", |entry| {
        entry.client == Client::Address(client) && entry.rev_nat_index == rev_nat
    })
}

/// Writes an entry of `cilium_lb4_affinity` or `lb6`.
fn put_affinity(lab: &Lab, vip: &Attempt, entry: &Affinity) {
    let name = family(vip.dst, "cilium_lb4_affinity", "cilium_lb6_affinity");
    let map = lab.map(name).expect(name);
    let spec = map.spec();
    let layout = layout::detect(name, spec.map_type, spec.key_size, spec.value_size);
    let (key, value) = entry.encode(layout.expect("a layout")).expect("encoded");
    map.update(&key, &value).expect("written");
}

/// Ids of the backends of a service, from its slots.
fn backends(lab: &Lab, vip: &Attempt) -> Vec<u32> {
    let name = family(vip.dst, "cilium_lb4_services_v2", "cilium_lb6_services_v2");
    let map = lab.map(name).expect(name);
    let size = map.spec().key_size as usize;
    let frontend: Vec<u8> = match vip.dst {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    let mut slots: Vec<(u16, u32)> = Vec::new();
    for entry in map.entries().expect("its entries") {
        let (address, rest) = entry.key.split_at(size - 8);
        let (slot, scope) = (u16::from_ne_bytes([rest[2], rest[3]]), rest[5]);
        if address == frontend && rest[..2] == vip.port.to_be_bytes() && slot > 0 && scope == 0 {
            slots.push((slot, u32::from_ne_bytes(entry.value[..4].try_into().expect("an id"))));
        }
    }
    slots.sort_unstable();
    slots.into_iter().map(|(_, id)| id).collect()
}

#[test]
fn affinity_sticks_to_what_the_map_says() {
    let lab = lab("v1.21-tcx");
    for vip in
        [attempt("client", "tcp", "192.168.2.23", 80), attempt("client", "tcp", "fd00:2::23", 80)]
    {
        let ids = backends(&lab, &vip);
        assert_eq!(ids.len(), 2, "{ids:?}");
        let outcome = reach(&lab, "client", "tcp", &vip.dst.to_string(), 80);
        let (client, _) = client(&outcome);
        let now = bpf::monotonic_ns() / 1_000_000_000;
        let entry = affinity(&lab, &vip, client);
        assert!(ids.contains(&entry.backend_id) && entry.last_used.abs_diff(now) < 5, "{entry:?}");

        // The entry decides, whichever backend it says.
        let mut who = BTreeSet::new();
        for &backend_id in &ids {
            put_affinity(&lab, &vip, &Affinity { backend_id, ..entry });
            let answered = answers(&lab, &vip, 12);
            assert_eq!(answered.len(), 1, "{answered:?}");
            who.extend(answered);
            assert_eq!(affinity(&lab, &vip, client).backend_id, backend_id);
        }
        assert_eq!(who.len(), 2, "{who:?}");

        // Over: 600 seconds, of which one entry has had more. Chosen anew each time.
        let chosen_anew = |stale: &Affinity| {
            let chosen: BTreeSet<u32> = (0..16)
                .map(|_| {
                    put_affinity(&lab, &vip, stale);
                    answers(&lab, &vip, 1);
                    affinity(&lab, &vip, client).backend_id
                })
                .collect();
            assert_eq!(chosen, ids.iter().copied().collect());
        };
        chosen_anew(&Affinity { last_used: now.saturating_sub(601), ..entry });
        // No backend of the service any more, though it is one of another.
        let matches = lab.map("cilium_lb_affinity_match").expect("it");
        let mut key = entry.backend_id.to_ne_bytes().to_vec();
        key.extend(entry.rev_nat_index.to_be_bytes());
        key.extend([0, 0]);
        matches.delete(&key).expect("deleted");
        chosen_anew(&entry);
    }
}

/// Sends a datagram from this place and port to a VIP; the first word of the answer is who answers.
fn ask(lab: &Lab, place: Ns, from: SocketAddr, vip: SocketAddr) -> String {
    lab.run_in(place, || {
        let socket = UdpSocket::bind(from).expect("a socket");
        socket.set_read_timeout(Some(Duration::from_millis(2500))).expect("set");
        socket.send_to(b"who?", vip).expect("sent");
        let mut answer = [0; 256];
        let length = socket.recv(&mut answer).expect("an answer");
        let answer = String::from_utf8_lossy(&answer[..length]).into_owned();
        answer.split(' ').next().unwrap_or_default().to_owned()
    })
    .expect("the place")
}

#[test]
fn a_known_connection_keeps_its_backend() {
    let lab = lab("v1.13-clsact");
    let vip = attempt("vpn", "udp", "192.168.2.28", 53);
    let ids = backends(&lab, &vip);
    assert_eq!(ids.len(), 2, "{ids:?}");
    let name = "cilium_ct_any4_global";
    let map = lab.map(name).expect(name);
    let spec = map.spec();
    let layout = layout::detect(name, spec.map_type, spec.key_size, spec.value_size);
    let layout = layout.expect("a layout");
    // One that is there, as a model for others.
    let outcome = reach(&lab, "vpn", "udp", "192.168.2.28", 53);
    let (client, port) = client(&outcome);
    let model = one(entries(&lab, name, Conntrack::decode), "it", |entry| {
        entry.source == client && entry.source_port == port && entry.tuple_flags.is_service()
    });
    let mut who = [BTreeSet::new(), BTreeSet::new()];
    for (number, source_port) in (20_000..20_024).enumerate() {
        let which = number % 2;
        let mut entry = Conntrack { source_port, ..model };
        entry.head.0[8..].copy_from_slice(&u64::from(ids[which]).to_le_bytes());
        let (key, value) = entry.encode(layout).expect("encoded");
        map.update(&key, &value).expect("written");
        let vip = SocketAddr::new(vip.dst, vip.port);
        who[which].insert(ask(&lab, Ns::Vpn, SocketAddr::new(client, source_port), vip));
    }
    assert!(who[0].len() == 1 && who[1].len() == 1 && who[0] != who[1], "{who:?}");
}

/// Packets dropped on receipt for a reason, over all CPUs.
fn drops(lab: &Lab, reason: u8) -> (u64, u64) {
    let metrics = entries(lab, "cilium_metrics", Metric::decode);
    let of_reason = metrics
        .iter()
        .filter(|metric| metric.reason == reason && metric.direction == Direction::Ingress);
    of_reason.fold((0, 0), |(packets, bytes), metric| {
        metric.per_cpu.iter().fold((packets, bytes), |(packets, bytes), cpu| {
            (packets + cpu.packets, bytes + cpu.bytes)
        })
    })
}

#[test]
fn drops_are_counted() {
    for capture in ["v1.13-clsact", "v1.21-tcx"] {
        let lab = lab(capture);
        // Not in the source ranges; a cluster address from outside.
        for (dst, reason) in [("192.168.2.34", 177), ("10.96.0.5", 174)] {
            let before = drops(&lab, reason);
            let outcome = connect(&lab, &[attempt("client", "tcp", dst, 80)]).remove(0);
            assert!(!outcome.ok, "{outcome:?}");
            let after = drops(&lab, reason);
            // A SYN, and perhaps the same again.
            assert!(after.0 > before.0, "{capture} {dst}: {before:?} {after:?}");
            let each = (after.1 - before.1) / (after.0 - before.0);
            assert_eq!(each, 74, "{capture} {dst}");
        }
    }
}

#[test]
fn the_maglev_table_decides_where_there_is_one() {
    // The capture's map is empty; the template that it was made with is the lab's.
    let lab = lab("v1.21-tcx");
    let size = 16381_usize;
    for (vip, outer) in [
        (attempt("client", "tcp", "192.168.2.28", 80), "cilium_lb4_maglev"),
        (attempt("client", "tcp", "fd00:2::28", 80), "cilium_lb6_maglev"),
    ] {
        let ids = backends(&lab, &vip);
        assert_eq!(ids.len(), 2, "{ids:?}");
        assert_eq!(answers(&lab, &vip, 24).len(), 2, "by chance");
        let service = service(&lab, SocketAddr::new(vip.dst, vip.port), Protocol(6));
        let spec = MapSpec {
            map_type: MapType::ARRAY,
            key_size: 4,
            value_size: u32::try_from(size * 4).expect("small"),
            max_entries: 1,
            flags: 0,
            name: "cilium_maglev".into(),
        };
        let put = |table: &[u32]| {
            let inner = MapHandle::create("a table", &spec).expect("a table");
            let bytes: Vec<u8> = table.iter().flat_map(|id| id.to_ne_bytes()).collect();
            inner.update(&0_u32.to_ne_bytes(), &bytes).expect("filled");
            let key = service.rev_nat_index.to_be_bytes();
            lab.map(outer).expect(outer).update_inner(&key, &inner).expect("put");
        };
        let mut who = BTreeSet::new();
        for &id in &ids {
            put(&vec![id; size]);
            let answered = answers(&lab, &vip, 12);
            assert_eq!(answered.len(), 1, "{answered:?}");
            who.extend(answered);
        }
        assert_eq!(who.len(), 2, "{who:?}");
        // Half and half: connections are spread over the table.
        let mixed: Vec<u32> = (0..size).map(|place| ids[place % 2]).collect();
        put(&mixed);
        assert_eq!(answers(&lab, &vip, 24).len(), 2);
        // A place with a backend that is none.
        put(&vec![0xffff; size]);
        assert!(!connect(&lab, std::slice::from_ref(&vip)).remove(0).ok);
    }
}

#[test]
fn a_capture_has_all_maps_that_are_filled() {
    // Else the stand-in would fill maps of its own, which nobody sees.
    for name in ["v1.13-clsact", "v1.18-tcx", "v1.21-tcx"] {
        let capture = Capture::project(name).expect("the capture");
        for map in [
            "cilium_ct4_global",
            "cilium_ct6_global",
            "cilium_ct_any4_global",
            "cilium_ct_any6_global",
            "cilium_snat_v4_external",
            "cilium_snat_v6_external",
            "cilium_lb4_affinity",
            "cilium_lb6_affinity",
            "cilium_nodeport_neigh4",
            "cilium_nodeport_neigh6",
            "cilium_metrics",
        ] {
            assert!(capture.map(map).is_some(), "{name}: {map}");
        }
    }
}

#[test]
fn the_program_at_xdp_serves_backends_elsewhere() {
    let lab = Lab::builder().project("v1.21-tcx").xdp("eno1", Xdp::Generic).up().expect("a lab");
    // Neighbours are made known, by the program at tc; local backends are its business anyway.
    leaves(&lab, "client", "tcp", "192.168.2.32", 80, true);
    leaves(&lab, "client", "tcp", "fd00:2::32", 80, true);
    leaves(&lab, "client", "tcp", "192.168.2.20", 443, false);
    leaves(&lab, "client", "udp", "fd00:2::22", 25565, false);
    // Dropped, and counted as its own.
    assert!(!connect(&lab, &[attempt("client", "tcp", "192.168.2.34", 80)]).remove(0).ok);
    let counted = entries(&lab, "cilium_metrics", Metric::decode).into_iter().filter(|metric| {
        let line_of_ours = metric.file == 4 && metric.reason == 177;
        line_of_ours && metric.per_cpu.iter().any(|cpu| cpu.packets > 0)
    });
    assert_eq!(counted.count(), 1);

    // With the program at tc gone, what it does fails, and what is done at XDP goes on.
    let links = lab.bpffs().join("cilium/devices/eno1/links");
    assert!(links.join("cil_xdp_entry").exists());
    std::fs::remove_file(links.join("cil_from_netdev")).expect("the pin");
    let start = Instant::now();
    while connect(&lab, &[attempt("client", "tcp", "192.168.2.20", 443)]).remove(0).ok {
        assert!(start.elapsed() < Duration::from_secs(5), "it is still attached");
    }
    leaves(&lab, "client", "tcp", "192.168.2.32", 80, true);
    leaves(&lab, "client", "tcp", "fd00:2::32", 80, true);
}

#[test]
fn the_program_at_xdp_is_attached_as_asked() {
    for (mode, kind) in [(Xdp::Generic, HookKind::XdpGeneric), (Xdp::Native, HookKind::XdpNative)] {
        let lab = Lab::builder().project("v1.18-tcx").xdp("eno1", mode).up().expect("a lab");
        // As inspector's own collector sees it.
        let found = lab.run_in(Ns::Node, || collect::programs::collect(lab.bpffs(), &[]).0);
        let found = found.expect("the node");
        let hooks: Vec<_> = found.hooks.iter().filter(|hook| hook.kind == kind).collect();
        assert_eq!(hooks.len(), 1, "{hooks:?}");
        assert_eq!(hooks[0].ifindex, 2, "{hooks:?}");
        let program = found.programs.iter().find(|program| program.id == hooks[0].program);
        assert_eq!(program.map(|program| &*program.name), Some("cil_xdp_entry"));
        let pin = lab.bpffs().join("cilium/devices/eno1/links/cil_xdp_entry");
        let pinned = found.links.iter().filter(|link| link.kind == "xdp" && !link.defunct);
        assert_eq!(pinned.map(|link| link.program).collect::<Vec<_>>(), [hooks[0].program]);
        assert!(pin.exists(), "{}", pin.display());
        // Passed on to the program at tc.
        reach(&lab, "client", "tcp", "192.168.2.20", 443);
    }
}
