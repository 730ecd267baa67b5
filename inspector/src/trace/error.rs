//! Why something could not be traced.

use std::io;

use aya::maps::MapError;

/// Why something could not be traced. Each message names the call, the object and the way out.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// Our object file or its maps could not be loaded.
    #[error(
        "bpf(BPF_MAP_CREATE) for the tracer's maps: {0}; run as root or with CAP_BPF and \
         CAP_NET_ADMIN"
    )]
    Load(#[source] Box<aya::EbpfError>),
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
    /// The clsact qdisc or the process that guards the filters could not be made.
    #[error("clsact on the watched devices: {0}; it needs CAP_NET_ADMIN and CONFIG_NET_CLS_ACT")]
    Clsact(#[source] io::Error),
    /// The thread's network namespace could not be told.
    #[error("stat of /proc/thread-self/ns/net: {0}; /proc has to be mounted")]
    Netns(#[source] io::Error),
    /// Notifications could not be read.
    #[error("receiving notifications over netlink: {0}")]
    Netlink(#[source] io::Error),
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
