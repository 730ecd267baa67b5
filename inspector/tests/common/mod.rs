//! What several tests need.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::process::{Command, Output};

use inspector::{
    collect::{self, Options, Question},
    evidence::VipQuery,
    judge::{self, Judgement},
};
use inspector_lab::Lab;
use serde::Deserialize;

/// The captures of a whole node, with the outputs of `cilium-dbg` and the probes.
pub const CAPTURES: &[&str] = &[
    "v1.13-clsact",
    "v1.18-tcx",
    "v1.18-clsact",
    "v1.18-wg0-detached",
    "v1.18-l7lb",
    "v1.18-sock-hostns-only",
    "v1.18-proto-any",
    "v1.19-tcx",
    "v1.21-tcx",
    "v1.21-l7lb",
];

/// One connection that was tried when the capture was taken.
#[derive(Debug, Clone, Deserialize)]
pub struct Probe {
    /// Who connected.
    pub from: String,
    /// `tcp` or `udp`
    pub proto: String,
    /// To which address.
    pub dst: String,
    /// To which port.
    pub port: u16,
    /// Whether the backend answered.
    pub ok: bool,
}

impl Probe {
    /// The question whose answer this connection is.
    pub fn query(&self) -> VipQuery {
        VipQuery {
            address: self.dst.parse().expect("an address"),
            port: Some(self.port),
            protocol: Some(self.proto.parse().expect("a protocol")),
            source: None,
        }
    }
}

/// Runs the program against a lab.
pub fn inspect(lab: &Lab, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_inspect"))
        .args(arguments)
        .env("INSPECT_BPFFS", lab.bpffs())
        .output()
        .expect("the program runs")
}

/// Standard output of a run that went well.
pub fn stdout(output: &Output) -> &str {
    assert!(output.status.success(), "{output:?}");
    std::str::from_utf8(&output.stdout).expect("UTF-8")
}

/// Collects from the lab's real maps and judges.
pub fn judge(lab: &Lab, vip: VipQuery) -> Judgement {
    let mut evidence = collect::node(&Options {
        bpffs: Some(lab.bpffs().to_owned()),
        ..Options::new(Question::Vip(vip))
    })
    .expect("the lab's maps can be read");
    // The programs and the network are those of the machine that the test runs on.
    evidence.attachments = None;
    evidence.network = None;
    judge::judge(&evidence).expect("evidence about a VIP")
}
