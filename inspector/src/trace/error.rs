//! Why something could not be traced.

use std::io;

use aya::maps::MapError;
use aya::programs::ProgramError;

/// Why something could not be traced. Each message names the call, the object and the way out.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// Our object file or its maps could not be loaded.
    #[error(
        "bpf(BPF_MAP_CREATE) for the tracer's maps: {0}; run as root or with CAP_BPF and \
         CAP_NET_ADMIN"
    )]
    Load(#[source] Box<aya::EbpfError>),
    /// The kernel did not take one of our programs.
    #[error(
        "bpf(BPF_PROG_LOAD) of {program}: {source}; run as root or with CAP_BPF and CAP_NET_ADMIN"
    )]
    Program {
        /// Name of the program.
        program: &'static str,
        /// aya's error, with the verifier's words.
        #[source]
        source: Box<ProgramError>,
    },
    /// The messages of our programs cannot be read.
    #[error("the map of the tracer's own messages: {0}; this is a defect of this build")]
    Log(#[source] Box<aya_log::Error>),
    /// No device of that name, or it cannot be asked about.
    #[error(
        "{call} of device {device}: {source}; `ip link` lists the devices of this network namespace"
    )]
    Device {
        /// The call that failed.
        call: &'static str,
        /// Name of the device.
        device: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The kernel did not attach our program to the device.
    #[error(
        "bpf(BPF_LINK_CREATE) at tcx ingress of device {device}: {source}; it needs Linux 6.6 or \
         later and CAP_NET_ADMIN, and can be done once per device"
    )]
    Attach {
        /// Name of the device.
        device: String,
        /// aya's error.
        #[source]
        source: Box<ProgramError>,
    },
    /// One of our maps could not be read or written.
    #[error("map {map}: {source}; it holds a limited number of entries, watch fewer")]
    Map {
        /// Name of the map.
        map: &'static str,
        /// aya's error, with the call.
        #[source]
        source: Box<MapError>,
    },
    /// An object that the object file should have is not there, or an event has not its size.
    #[error("{0}; this is a defect of this build, whose two sides do not match")]
    Mismatch(String),
    /// Waiting for events failed.
    #[error("poll() for events: {0}")]
    Wait(#[source] io::Error),
}
