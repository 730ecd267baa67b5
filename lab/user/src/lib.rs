//! The lab: a Cilium-like node in network namespaces, with what a real Cilium's maps held in real,
//! pinned kernel maps.
//!
//! Tests take a [`Lab`] of their own (several at once are fine); people and scripts use the binary
//! `inspector-lab`, which `cargo xtask lab` runs. The lab holds state, not behaviour: no program of
//! Cilium runs in it. Everything is made on this machine and needs root.
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
pub mod evidence;
pub mod lab;
pub mod maps;
pub mod netns;
mod network;
mod plan;
mod signals;
pub mod state;
mod tun;

pub use capture::{Capture, CaptureError};
pub use lab::{Builder, Lab, LabError};
pub use maps::{MapError, MapHandle};
pub use netns::Ns;
pub use network::NetworkError;
pub use plan::PlanError;
pub use state::{Agent, StateError};
