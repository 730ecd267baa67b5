//! A simulation, the whole process: a VIP with four frontends, on three devices.
//!
//! Run by `cargo xtask bench`. Fails if the goal is not met. Needs root and iproute2's `ip`.

use std::{
    fs,
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use aya::programs::{
    LinkOrder, SchedClassifier, TcAttachType, links::FdLink, loaded_programs, tc::TcAttachOptions,
};
use inspector::cilium::{
    proto::Protocol,
    services::{Scope, ServiceKey},
};
use inspector_lab::{Lab, Ns};

const VIP: &str = "192.168.2.20";
const RUNS: usize = 21;
const GOAL: Duration = Duration::from_millis(100);

/// Gives the VIP three more frontends, with the backends of the first.
fn more_frontends(lab: &Lab) {
    let services = lab.map("cilium_lb4_services_v2").expect("the services map");
    for slot in 0..=2 {
        let key = |port| {
            let address = VIP.parse().expect("an address");
            let (protocol, scope) = (Protocol::TCP, Scope::External);
            ServiceKey { address, port, protocol, scope, slot }.encode()
        };
        let value = services.lookup(&key(443)).expect("a look-up").expect("the frontend");
        for port in 444..447 {
            services.update(&key(port), &value).expect("an update");
        }
    }
}

/// Gives the node a third device, with the program of the first.
fn third_device(lab: &Lab) {
    for arguments in [
        "link add eno2 type veth peer name wire2",
        "link set wire2 up",
        "link set eno2 up",
        "addr add 192.168.3.10/24 dev eno2",
    ] {
        let mut command = Command::new("ip");
        let command = lab.exec_in(Ns::Node, command.args(arguments.split(' ')));
        assert!(command.expect("the node").status().expect("iproute2").success(), "{arguments}");
    }
    let pin = lab.bpffs().join("cilium/devices/eno1/links/cil_from_netdev");
    let attach = || {
        let link = aya::programs::links::PinnedLink::from_pin(&pin).expect("the link of eno1");
        let id = FdLink::from(link).info().expect("its information").program_id();
        let info = loaded_programs()
            .filter_map(Result::ok)
            .find(|program| program.id() == id)
            .expect("its program");
        let program = SchedClassifier::from_program_info(info, "cil_from_netdev".into());
        let mut program = program.expect("the program");
        let link = program
            .attach_with_options(
                "eno2",
                TcAttachType::Ingress,
                TcAttachOptions::TcxOrder(LinkOrder::first()),
            )
            .and_then(|id| program.take_link(id))
            .expect("tcx");
        let link: FdLink = link.try_into().expect("a link");
        let folder = lab.bpffs().join("cilium/devices/eno2/links");
        fs::create_dir_all(&folder).expect("a folder");
        link.pin(folder.join("cil_from_netdev")).expect("a pin");
    };
    lab.run_in(Ns::Node, attach).expect("the node");
}

fn main() -> ExitCode {
    // `cargo test --benches` runs this too, to see that it builds.
    if std::env::args().any(|argument| argument == "--test") {
        return ExitCode::SUCCESS;
    }
    let lab = match Lab::builder().project("v1.21-tcx").datapath(true).up() {
        Ok(lab) => lab,
        Err(error) => {
            eprintln!("no lab: {error}");
            return ExitCode::FAILURE;
        }
    };
    more_frontends(&lab);
    third_device(&lab);
    let measure = |arguments: &[&str]| {
        let mut times: Vec<(Duration, u64)> = (0..RUNS)
            .map(|_| {
                lab.set_agent_alive().expect("a sign of life");
                let mut command = Command::new(env!("CARGO_BIN_EXE_inspect"));
                command.args(["vip", VIP, "-o", "json"]).args(arguments);
                let command = lab.exec_in(Ns::Node, &mut command).expect("the node");
                command.stdout(Stdio::piped()).stderr(Stdio::inherit());
                let start = Instant::now();
                let output = command.output().expect("the program runs");
                let wall = start.elapsed();
                let json: serde_json::Value =
                    serde_json::from_slice(&output.stdout).expect("a judgement");
                let simulated = json["verdict"]["paths"]
                    .as_array()
                    .expect("paths")
                    .iter()
                    .filter(|path| path["grade"] == "simulated")
                    .count();
                let wanted = if arguments.is_empty() { 0 } else { 12 };
                assert_eq!(simulated, wanted, "paths with a proof by simulation");
                (wall, json["simulation"]["packets"].as_u64().unwrap_or(0))
            })
            .collect();
        times.sort_unstable();
        times[RUNS / 2]
    };
    let (without, _) = measure(&[]);
    let (wall, packets) = measure(&["--simulate"]);
    let milliseconds = |duration: Duration| duration.as_secs_f64() * 1000.0;
    let met = wall < GOAL;
    println!(
        "`vip {VIP} --simulate`, 4 frontends on 3 devices: median {:.1} ms with {packets} packets, \
         {:.1} ms without the simulation  ({} ms: {})",
        milliseconds(wall),
        milliseconds(without),
        GOAL.as_millis(),
        if met { "met" } else { "NOT MET" }
    );
    if met { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
