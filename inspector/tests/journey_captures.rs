//! Journeys from what tcpdump saw on a real Cilium: two connections at five places, in
//! `lab/captures/v1.18-tcx/proof`. No kernel takes part.

use std::net::{IpAddr, Ipv4Addr};

use inspector::{
    evidence::{
        Evidence,
        file::Document,
        trace::{AnswerCount, HookCount, Stopped, TierUse, Trace, Watched, WatchedHook},
    },
    judge::{
        self, FindingId, Grade, Judgement, Outcome, Served,
        journey::{self, Answer, Conclusion, Keeper, SeenPath, VipLookups},
    },
    report::{
        markdown,
        table::{self, Style},
    },
    trace::{
        journey::{Context, Joiner, Limits, Question},
        pcapng,
        sighting::{Hook, Neighbour, Packet, Sighting, Tier},
    },
};
use inspector_lab::{Capture, evidence::evidence};
use pcap_file::pcapng::{Block, PcapNgReader, blocks::interface_description};

/// The places of the node at which tcpdump listened.
const PLACES: [&str; 4] = ["eno1", "wg0", "lxc2082d2686dee", "lxc4ed9c10b6b39"];

/// Reads lines of `tcpdump -n` as sightings: what tc at that device would have reported.
fn read(device: u32, name: &str, text: &str) -> Vec<Sighting> {
    // tcpdump prints TCP's numbers relative to the first ones of each direction.
    let mut first: std::collections::HashMap<(IpAddr, u16), u32> = std::collections::HashMap::new();
    let mut sightings = Vec::new();
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let mut sighting = Sighting {
            monotonic_ns: nanoseconds(&line[..15]),
            hook: Hook::TcIngress,
            tier: Tier::Tc,
            ifindex: device,
            skb: None,
            packet: None,
            neighbour: None,
            mark: None,
            detail: None,
            flow: None,
            asked: None,
            program: None,
            headers: None,
        };
        let words: Vec<&str> = line.split_whitespace().collect();
        if words[1] == "ARP," {
            let reply = words[2] == "Reply";
            let address: IpAddr =
                words[if reply { 3 } else { 4 }].parse().expect("an address in an ARP line");
            let from_node =
                line.contains("tell 192.168.2.10") || line.contains("is-at 02:00:00:00:02:0a");
            sighting.hook = if from_node { Hook::TcEgress } else { Hook::TcIngress };
            sighting.neighbour = Some(Neighbour { address, state: None });
            sighting.detail = Some(if reply { "reply" } else { "request" }.to_owned());
        } else {
            let end = |text: &str| {
                let (address, port) = text.trim_end_matches(':').rsplit_once('.').expect("a port");
                let address: Ipv4Addr = address.parse().expect("an address");
                (IpAddr::from(address), port.parse::<u16>().expect("a port"))
            };
            let (source, destination) = (end(words[2]), end(words[4]));
            let after = |name: &str| {
                let at = words.iter().position(|word| *word == name)?;
                words[at + 1].trim_end_matches(',').split(':').next()?.parse::<u32>().ok()
            };
            let syn = line.contains("[S");
            let mut flags = 0;
            for (sign, bit) in [('S', 2), ('F', 1), ('P', 8), ('.', 16)] {
                if words[6].contains(sign) {
                    flags |= bit;
                }
            }
            let relative = |base: Option<&u32>, number: u32| {
                if syn { number } else { base.copied().unwrap_or(0).wrapping_add(number) }
            };
            let length = after("length").expect("a length");
            let acknowledged = after("ack").map(|ack| relative(first.get(&destination), ack));
            let sequence = after("seq").map_or_else(
                // A bare acknowledgement has no number in print; the next one is ours.
                || first.get(&source).copied().unwrap_or(0).wrapping_add(1),
                |seq| relative(first.get(&source), seq),
            );
            if syn {
                first.insert(source, sequence);
            }
            let leaves = match name {
                "eno1" | "wg0" => source.0 == IpAddr::from([192, 168, 2, 20]),
                _ => {
                    source.0 != IpAddr::from([10, 77, 1, 143])
                        && source.0 != IpAddr::from([10, 77, 1, 55])
                }
            };
            sighting.hook = if leaves { Hook::TcEgress } else { Hook::TcIngress };
            sighting.packet = Some(Packet {
                source: source.0,
                destination: destination.0,
                protocol: 6,
                ports: Some((source.1, destination.1)),
                tcp: Some((sequence, acknowledged.unwrap_or(0), flags)),
                icmp: None,
                quoted: None,
                ip_id: 0,
                flow_label: 0,
                ttl: 64,
                fragment: false,
                length: length + 40,
                payload_length: length,
            });
        }
        sightings.push(sighting);
    }
    sightings
}

/// `18:41:24.034110`
fn nanoseconds(time: &str) -> u64 {
    let (clock, micros) = time.split_once('.').expect("microseconds");
    let seconds =
        clock.split(':').fold(0, |sum, part| sum * 60 + part.parse::<u64>().expect("digits"));
    (seconds * 1_000_000 + micros.parse::<u64>().expect("digits")) * 1000
}

/// The capture with its node, the question, and everything that tcpdump saw at the node's devices.
fn seen() -> (Evidence, Vec<Sighting>) {
    let capture = Capture::project("v1.18-tcx").expect("the capture");
    let evidence =
        evidence(&capture, "192.168.2.20:443/tcp".parse().expect("a VIP")).expect("evidence");
    let mut sightings = Vec::new();
    for name in PLACES {
        let file = format!("proof/cap-node-{name}.txt");
        let text = capture.text(&file).expect("what tcpdump printed");
        let before = sightings.len();
        sightings.extend(read(index(&evidence, name), name, &text));
        assert!(sightings.len() > before, "{file} holds no packet");
    }
    (evidence, sightings)
}

fn index(evidence: &Evidence, name: &str) -> u32 {
    let network = evidence.network.as_ref().expect("a network");
    network
        .links
        .iter()
        .find(|link| link.name == name)
        .map_or_else(|| panic!("the captured node has no device {name}"), |link| link.ifindex)
}

/// The trace that our tc tier would have made of them.
fn trace(evidence: &Evidence, sightings: Vec<Sighting>, context: &Context) -> Trace {
    let every: Vec<u32> = PLACES.iter().map(|name| index(evidence, name)).collect();
    let watched = |hook| WatchedHook { hook, ifindexes: Some(every.clone()) };
    let started_ns = nanoseconds("18:41:23.000000");
    let ended_ns = nanoseconds("18:41:30.000000");
    let mut joiner = Joiner::new(context.clone(), Limits::default());
    for sighting in sightings {
        joiner.add(sighting);
    }
    let journeys = joiner.finish(ended_ns);
    let mut trace = Trace {
        watched: Watched {
            started_ns,
            tiers: vec![TierUse {
                tier: Tier::Tc,
                hooks: [Hook::TcIngress, Hook::TcEgress].map(watched).into(),
                attached: Vec::new(),
                missing: Vec::new(),
                reason: None,
            }],
            counts: Vec::new(),
            joined: joiner.counts(),
        },
        ended_ns,
        stopped: Stopped::Duration,
        journeys: Vec::new(),
        more: Vec::new(),
        not_kept: 0,
        questions: joiner.questions(),
        answers: Vec::new(),
    };
    let mut keeper = Keeper::default();
    for one in journeys {
        let conclusion = journey::conclude(&one, context, &trace.watched);
        keeper.add(one, &conclusion);
    }
    (trace.journeys, trace.more, trace.not_kept) = keeper.finish();
    trace
}

/// Evidence with the trace in it.
fn traced() -> (Evidence, Context) {
    let (mut evidence, sightings) = seen();
    let context = journey::context(&evidence, &"192.168.2.20:443/tcp".parse().expect("a VIP"));
    evidence.trace = Some(trace(&evidence, sightings, &context));
    (evidence, context)
}

fn judged(evidence: &Evidence) -> Judgement {
    judge::judge(evidence).expect("evidence about a VIP")
}

fn conclusions(evidence: &Evidence) -> Vec<Conclusion> {
    judged(evidence).observed.expect("a trace").conclusions
}

#[test]
fn the_two_connections_are_found_with_all_that_tcpdump_proves() {
    let (evidence, _) = traced();
    let mut found = conclusions(&evidence);
    found.sort_by(|one, other| one.path.cmp(&other.path));
    let [lan, vpn] = found.as_slice() else { panic!("not two journeys: {found:#?}") };
    for (one, device, client, backend) in [
        (lan, "eno1", "192.168.2.50:47894", "10.77.1.143:8443"),
        (vpn, "wg0", "10.90.0.2:45586", "10.77.1.55:8443"),
    ] {
        assert_eq!(one.path, SeenPath::Forwarded { device: device.to_owned() });
        assert_eq!(one.client.as_deref(), Some(client));
        assert_eq!(one.frontend, "192.168.2.20:443/TCP");
        assert_eq!(one.attempts, 1);
        assert_eq!((one.outcome, one.served), (Outcome::DnatBeforeNeigh, Served::Yes), "{one}");
        let translation = one.translation.as_ref().expect("a translation");
        // The packet went to the pod without passing its device: the reply tells.
        assert!(!translation.seen);
        assert_eq!(translation.backend, backend);
        assert_eq!(translation.source, None);
        // Only that no question left was watched, and the report says so.
        assert!(matches!(one.vip_lookups, VipLookups::NoneSeen { .. }), "{:?}", one.vip_lookups);
        let Answer::Answered { syn_ack: true, as_vip: true, backend: by, .. } = &one.answer else {
            panic!("{:?}", one.answer);
        };
        assert_eq!(by.as_deref(), Some(backend));
    }
    assert_eq!(lan.translation.as_ref().expect("a translation").after_ns, 40_000);
    assert_eq!(vpn.translation.as_ref().expect("a translation").after_ns, 81_000);
    // tcpdump saw that the node had to ask for the client, once.
    let asked: Vec<_> =
        lan.lookups.iter().map(|one| (one.address.to_string(), one.is_vip)).collect();
    assert_eq!(asked, [("192.168.2.50".to_owned(), false)]);
}

#[test]
fn the_verdict_says_observed_with_the_count_and_the_file_says_the_same() {
    let (evidence, _) = traced();
    let judgement = judged(&evidence);
    for device in ["eno1", "wg0"] {
        let path = format!("forwarded via {device}");
        let verdict =
            judgement.verdict.paths.iter().find(|one| one.path == path).expect("the path");
        assert_eq!((verdict.grade, verdict.served), (Grade::Observed, Served::Yes));
        let why = verdict.why.join("; ");
        assert!(why.contains("observed: 1 of 1 journeys translated"), "{why}");
        assert!(why.contains("1 answered"), "{why}");
    }
    let observed = judgement.observed.as_ref().expect("a trace");
    assert_eq!(observed.journeys, 2);
    let not: Vec<&String> =
        observed.not_observed.iter().filter(|one| one.starts_with("forwarded via")).collect();
    assert_eq!(not.len(), 0, "{not:?}");
    assert!(observed.not_observed.iter().any(|one| one.starts_with("socket on host")));
    let ids: Vec<FindingId> = judgement.verdict.findings.iter().map(|one| one.id).collect();
    assert!(!ids.contains(&FindingId::ProofConflict), "{ids:?}");
    assert!(!ids.contains(&FindingId::EventsLost), "{ids:?}");
    assert!(!ids.contains(&FindingId::BackendNotProbed), "backends were seen to answer");

    let document = Document::new(evidence);
    let text = serde_json::to_vec(document.as_json()).expect("JSON");
    let read = Document::parse(std::path::Path::new("trace.json"), &text).expect("evidence");
    assert_eq!(judged(&read.evidence), judgement);
    let schema = inspector::evidence::file::schema();
    let validator = jsonschema::validator_for(&schema).expect("a schema");
    let errors: Vec<String> =
        validator.iter_errors(document.as_json()).map(|error| error.to_string()).collect();
    assert!(errors.is_empty(), "{errors:#?}");
}

/// What the reports print of it.
fn printed(judgement: &Judgement, verbose: bool) -> String {
    let mut out = Vec::new();
    let style = Style { width: 1000, color: false, quiet: false, verbose };
    table::write(judgement, &[], style, &mut out).expect("text");
    markdown::write(judgement, &[], "", &mut out).expect("text");
    String::from_utf8(out).expect("UTF-8")
}

#[test]
fn the_reports_tell_the_journey_in_a_sentence_and_by_hook() {
    let (evidence, _) = traced();
    let judgement = judged(&evidence);
    let text = printed(&judgement, false);
    for part in [
        "Observed: 2 connections in 7.0 s (tc)",
        "(for the next hop: 192.168.2.50 on eno1)",
        "10.90.0.2:45586 > 192.168.2.20:443/TCP: arrived on wg0; translated to 10.77.1.55:8443 \
         (inferred from its reply on lxc4ed9c10b6b39, 81 µs); neighbour look-ups for the VIP in \
         between: none seen (watched: tc-egress)",
        "SYN-ACK of 10.77.1.55:8443 after 81 µs, sent to the client as the VIP",
        "## Observed",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    let text = printed(&judgement, true);
    assert!(text.contains("10.77.1.55:8443 > 10.90.0.2:45586 SYN-ACK"), "{text}");
}

#[test]
fn without_traffic_nothing_is_observed_and_nothing_is_denied() {
    let (mut evidence, _) = seen();
    let before = judged(&evidence);
    let context = journey::context(&evidence, &"192.168.2.20:443/tcp".parse().expect("a VIP"));
    evidence.trace = Some(trace(&evidence, Vec::new(), &context));
    let after = judged(&evidence);
    assert_eq!(after.verdict.served, before.verdict.served);
    for (one, other) in after.verdict.paths.iter().zip(&before.verdict.paths) {
        assert_eq!(one, other);
        assert_eq!(one.grade, Grade::Programmed);
    }
    let observed = after.observed.expect("a trace");
    assert_eq!(observed.journeys, 0);
    let text = observed.not_observed.join("\n");
    assert!(text.contains("forwarded via wg0 on 443/TCP"), "{text}");
    assert!(text.contains("--simulate"), "{text}");
}

#[test]
fn a_packet_that_goes_another_way_than_programmed_is_a_conflict_with_both_shown() {
    let (mut evidence, mut sightings) = seen();
    // The first packet on wg0 goes on to eno1 as it is, and nothing else comes.
    let wg0 = index(&evidence, "wg0");
    sightings.retain(|one| one.ifindex == wg0);
    sightings.truncate(1);
    let mut left = sightings[0].clone();
    left.monotonic_ns += 30_000;
    left.hook = Hook::TcEgress;
    left.ifindex = index(&evidence, "eno1");
    sightings.push(left);
    let context = journey::context(&evidence, &"192.168.2.20:443/tcp".parse().expect("a VIP"));
    evidence.trace = Some(trace(&evidence, sightings, &context));
    let judgement = judged(&evidence);
    let path =
        judgement.verdict.paths.iter().find(|one| one.path == "forwarded via wg0").expect("a path");
    assert_eq!((path.outcome, path.grade), (Outcome::Untranslated, Grade::Observed));
    assert_eq!(path.served, Served::No);
    let conflict = judgement
        .verdict
        .findings
        .iter()
        .find(|one| one.id == FindingId::ProofConflict)
        .expect("a conflict");
    assert!(conflict.seen.contains("dnat-before-neigh"), "{}", conflict.seen);
    assert!(conflict.seen.contains("1 of 1 untranslated"), "{}", conflict.seen);
    assert!(conflict.seen.contains("left on eno1 with the VIP"), "{}", conflict.seen);
    // The other path was not observed, and keeps what is programmed.
    let lan = judgement
        .verdict
        .paths
        .iter()
        .find(|one| one.path == "forwarded via eno1")
        .expect("a path");
    assert_eq!((lan.grade, lan.served), (Grade::Programmed, Served::Yes));
}

#[test]
fn lost_events_are_a_finding_and_take_back_what_rests_on_silence() {
    let (mut evidence, _) = traced();
    let trace = evidence.trace.as_mut().expect("a trace");
    trace.watched.counts.push(HookCount {
        tier: Tier::Tc,
        hook: Hook::TcEgress,
        matched: 10,
        lost: 3,
    });
    let judgement = judged(&evidence);
    let lost = judgement.verdict.findings.iter().find(|one| one.id == FindingId::EventsLost);
    assert!(lost.expect("a finding").seen.contains("tc-egress: 3 of 10"));
    for one in judgement.observed.expect("a trace").conclusions {
        let VipLookups::NoneSeen { why } = &one.vip_lookups else { panic!("{one}") };
        assert!(why.contains("3 sightings of look-ups lost"), "{why}");
    }
}

#[test]
fn a_responder_that_is_asked_and_stays_silent_is_found() {
    let (mut evidence, _) = traced();
    let eno1 = index(&evidence, "eno1");
    let silent = |evidence: &Evidence| {
        judged(evidence)
            .verdict
            .findings
            .into_iter()
            .find(|one| one.id == FindingId::AnnounceSilent)
    };
    // tcpdump saw two requests, and two answers.
    let trace = evidence.trace.as_mut().expect("a trace");
    assert_eq!(trace.questions, [Question { ifindex: eno1, requests: 2, replies: 2 }]);
    assert_eq!(silent(&evidence), None);
    // Had nothing answered: the counter decides.
    let trace = evidence.trace.as_mut().expect("a trace");
    trace.questions[0].replies = 0;
    trace.answers = vec![AnswerCount { ifindex: eno1, before: 7, after: 9 }];
    assert_eq!(silent(&evidence), None);
    evidence.trace.as_mut().expect("a trace").answers[0].after = 7;
    let finding = silent(&evidence).expect("a finding");
    assert!(finding.seen.contains("2 requests for 192.168.2.20 arrived on eno1"), "{finding:?}");
    assert!(finding.seen.contains("stays at 7"), "{finding:?}");
}

#[test]
fn the_capture_holds_one_interface_for_each_hook_and_the_journey_with_each_packet() {
    let (evidence, context) = traced();
    let conclusions = conclusions(&evidence);
    let trace = evidence.trace.as_ref().expect("a trace");
    let offset = std::time::Duration::from_secs(1_700_000_000);
    let mut file = Vec::new();
    let mut writer = pcapng::Writer::new(&mut file, offset).expect("a capture");
    let mut written = Vec::new();
    for (journey, conclusion) in trace.journeys.iter().zip(&conclusions) {
        for step in &journey.steps {
            let comment = conclusion.to_string();
            writer.write(&step.sighting, &comment, &context).expect("a packet");
            if let Some(packet) = &step.sighting.packet {
                written.push((step.sighting.monotonic_ns, packet.clone(), comment));
            }
        }
    }
    writer.finish().expect("a capture");

    let mut reader = PcapNgReader::new(file.as_slice()).expect("a capture");
    let (mut names, mut packets) = (Vec::new(), Vec::new());
    while let Some(block) = reader.next_block() {
        match block.expect("a block") {
            Block::InterfaceDescription(interface) => {
                for option in interface.options {
                    if let interface_description::InterfaceDescriptionOption::IfName(name) = option
                    {
                        names.push(name.into_owned());
                    }
                }
            }
            Block::EnhancedPacket(packet) => packets.push(packet.into_owned()),
            other => panic!("{other:?}"),
        }
    }
    names.sort();
    assert_eq!(
        names,
        [
            "eno1 tc-egress",
            "eno1 tc-ingress",
            "lxc2082d2686dee tc-ingress",
            "lxc4ed9c10b6b39 tc-ingress",
            "wg0 tc-egress",
            "wg0 tc-ingress",
        ]
    );
    assert!(written.len() > 8, "{}", written.len());
    assert_eq!(packets.len(), written.len());
    for (packet, (when_ns, headers, comment)) in packets.iter().zip(&written) {
        assert_eq!(packet.timestamp, offset + std::time::Duration::from_nanos(*when_ns));
        assert_eq!(packet.original_len, headers.length);
        assert_eq!(packet.data.len(), 40);
        let IpAddr::V4(source) = headers.source else { panic!("IPv4") };
        assert_eq!(packet.data[12..16], source.octets());
        let ports = headers.ports.expect("ports");
        assert_eq!(packet.data[22..24], ports.1.to_be_bytes());
        assert_eq!(packet.data[24..28], headers.tcp.expect("TCP").0.to_be_bytes());
        let said = format!("{:?}", packet.options);
        assert!(said.contains(&comment.replace('"', "\\\"")), "{said}");
    }
}
