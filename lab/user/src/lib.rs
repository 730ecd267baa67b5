//! The lab: a Cilium-like node in network namespaces, with what a real Cilium's maps held in real,
//! pinned kernel maps.
//!
//! Tests take a [`Lab`] of their own (several at once are fine); people and scripts use the binary
//! `inspector-lab`, which `cargo xtask lab` runs. No program of Cilium runs in it; a stand-in
//! ([`datapath`]) does what the captures show of one. Everything is made on this machine and needs root.
//!
//! ```no_run
//! use inspector_lab::Lab;
//!
//! let lab = Lab::builder().project("v1.21-tcx").up().expect("a lab");
//! let services = lab.map("cilium_lb4_services_v2").expect("the services map");
//! services.delete(&[0; 12]).expect_err("there is no such key");
//! ```
//!
//! What it is not: a place to learn what Cilium's bytes mean (`inspector::cilium`), or how a real
//! Cilium behaves (the captures say that).

pub mod bpf;
pub mod capture;
pub mod cgroup;
mod child;
pub mod cluster;
pub mod datapath;
pub mod evidence;
mod filter;
pub mod lab;
pub mod maps;
pub mod netns;
mod network;
mod plan;
pub mod probe;
pub mod server;
mod signals;
pub mod state;
mod tun;
pub mod wireguard;

pub use capture::{Capture, CaptureError};
pub use datapath::{Datapath, DatapathError, Xdp};
pub use lab::{Builder, Lab, LabError};
pub use maps::{MapError, MapHandle};
pub use netns::Ns;
pub use network::NetworkError;
pub use plan::PlanError;
pub use state::{Agent, StateError};
