//! What the maps alone settle, against what really happened to connections.
//!
//! A frontend that is said to serve nobody must have served nobody, and no connection that worked
//! may have been denied by the verdict. What the maps cannot settle is counted, not hidden.
//!
//! Needs root and bpf(2); fails without.

mod common;

use common::{CAPTURES, Probe, judge};
use inspector::{
    evidence::VipQuery,
    judge::{Judgement, Served},
};
use inspector_lab::{Capture, Lab};

/// The verdict for whoever made this probe; nothing where that needs more than the maps.
fn verdict(judgement: &Judgement, from: &str) -> Option<(Served, Option<f64>)> {
    let path = match from {
        _ if from.starts_with("client") || from.starts_with("vpn") => "forwarded",
        _ if from.starts_with("the node") => "socket on host",
        _ if from.contains("in the socket-LB cgroup") => "pod",
        // Outside of the cgroup all depends on the pod device's program.
        _ => return None,
    };
    if judgement.programmed.frontends.is_empty() {
        return Some((judgement.verdict.served, None));
    }
    let paths: Vec<_> =
        judgement.verdict.paths.iter().filter(|verdict| verdict.path.starts_with(path)).collect();
    assert!(!paths.is_empty(), "{from}: no path {path} in {judgement:#?}");
    let first = (paths[0].served, paths[0].share);
    assert!(paths.iter().all(|path| (path.served, path.share) == first), "{paths:#?}");
    Some(first)
}

#[test]
fn frontends_that_maps_call_dead_served_nobody() {
    let (mut all, mut settled, mut open_failed, mut open_worked, mut beyond) = (0, 0, 0, 0, 0);
    let mut wrong = Vec::new();
    for name in CAPTURES {
        let capture = Capture::project(name).expect("a capture of the project");
        let probes: Vec<Probe> =
            serde_json::from_str(&capture.text("probes.json").expect("probes")).expect("JSON");
        let lab = Lab::builder().project(name).up().expect("a lab");
        for probe in probes {
            all += 1;
            // A loopback address is no VIP; a socket finds the node port by its surrogate.
            if probe.query().address.is_loopback() {
                beyond += 1;
                continue;
            }
            match verdict(&judge(&lab, probe.query()), &probe.from) {
                None => beyond += 1,
                Some((Served::No, _)) if probe.ok => wrong.push((*name, probe)),
                Some((Served::No, _)) => settled += 1,
                Some(_) if probe.ok => open_worked += 1,
                Some(_) => open_failed += 1,
            }
        }
    }
    assert!(wrong.is_empty(), "called dead and worked: {wrong:#?}");
    let text = format!(
        "{all} probes of {} captures: {settled} settled by the maps, all of them right; \
         {open_worked} worked and were not called dead; {open_failed} failed for reasons that maps \
         do not hold; {beyond} are on a path that maps say nothing about",
        CAPTURES.len()
    );
    eprintln!("{text}");
    // The number of probes that maps settle can only grow; if it shrinks, a rule was lost.
    assert_eq!(all, 73 * 6 + 218 + 146 * 2 + 120);
    assert!(settled >= SETTLED, "{text}");
}

/// Probes that the maps settle, of all captures.
const SETTLED: usize = 269;

/// A broken map and what became of six connections.
struct Fault {
    state: String,
    target: VipQuery,
    worked: usize,
    tried: usize,
}

fn faults(folder: &str) -> Vec<Fault> {
    let any_state = Capture::states(&inspector_lab::capture::project_captures().join(folder))
        .expect("the states")
        .remove(0);
    let outcomes = Capture::project(&format!("{folder}/{any_state}"))
        .and_then(|capture| capture.text("outcomes.txt"))
        .expect("the outcomes");
    let mut faults: Vec<Fault> = Vec::new();
    for line in outcomes.lines() {
        if let Some(title) = line.strip_prefix("##### ") {
            let state = title.split(':').next().expect("a name").to_owned();
            faults.push(Fault {
                state,
                target: "192.168.2.20:443/tcp".parse().expect("a VIP"),
                worked: 0,
                tried: 0,
            });
        } else if let [word @ ("OK" | "FAIL"), protocol, place, ..] =
            *line.split_whitespace().collect::<Vec<_>>()
        {
            let fault = faults.last_mut().expect("a title comes first");
            fault.target = format!("{place}/{protocol}").parse().expect("a VIP");
            fault.tried += 1;
            fault.worked += usize::from(word == "OK");
        }
    }
    faults
}

#[test]
fn faults_in_the_maps_are_seen_with_their_share() {
    let mut checked = 0;
    let mut beyond = Vec::new();
    for folder in ["v1.18-faults", "v1.21-faults"] {
        for fault in faults(folder) {
            let name = format!("{folder}/{}", fault.state);
            // The programs, not the maps, were broken here.
            if fault.state.contains("detached") {
                beyond.push(name);
                continue;
            }
            let lab = Lab::builder().project(&name).up().expect("a lab");
            let judgement = judge(&lab, fault.target);
            let (served, share) = verdict(&judgement, "vpn").expect("a path");
            assert!(fault.tried >= 6, "{name}: {} connections", fault.tried);
            let sentence = &judgement.verdict.sentence;
            match (fault.worked, share) {
                (0, _) => assert_eq!(served, Served::No, "{name}: {sentence}"),
                (worked, None) => {
                    assert_eq!(worked, fault.tried, "{name}: {sentence}");
                    assert_ne!(served, Served::No, "{name}: {sentence}");
                }
                (worked, Some(share)) => {
                    // Six connections are few: the share must be possible, not exact.
                    assert!(worked < fault.tried && share > 0.0 && share < 1.0, "{name}: {share}");
                    assert_ne!(served, Served::No, "{name}: {sentence}");
                }
            }
            checked += 1;
        }
    }
    eprintln!("{checked} broken states agree; beyond the maps: {beyond:?}");
    assert_eq!(checked, 8);
}
