//! Probes: connections from every place of a lab to what a capture's probes went to, and what
//! happened, in the form of `probes.json`.
//!
//! The lab's command does it in two halves: one process per place makes the connections
//! ([`connect_all`]), another starts these and puts together what they say ([`Attempt`],
//! [`Outcome`]).

use std::{
    io::{self, Read},
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    sync::Mutex,
    thread,
    time::Duration,
};

use serde::{Deserialize, Serialize};

use crate::{
    capture::{Capture, CaptureError},
    netns::Ns,
    plan::Plan,
    server::Transport,
};

/// The file of a capture.
pub const PROBES: &str = "probes.json";

/// How long a connection may take to say something.
pub const PATIENCE: Duration = Duration::from_millis(1500);

/// How many connections one place has under way at a time.
const AT_ONCE: usize = 48;

/// A connection to be tried, or one that was: `from`, `proto`, `dst` and `port` are enough.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempt {
    /// The place, in the captures' words (see [`Attempt::source`]).
    pub from: String,
    /// `tcp` or `udp`.
    pub proto: String,
    /// Address.
    pub dst: IpAddr,
    /// Port.
    pub port: u16,
}

/// What happened to an attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// What was tried.
    #[serde(flatten)]
    pub attempt: Attempt,
    /// Whether someone answered.
    pub ok: bool,
    /// What the client took for its own address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub src: Option<String>,
    /// Who answered: a pod, or `ext` for the plain host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answered_by: Option<String>,
    /// What the server took for the client's address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer_seen_by_backend: Option<String>,
    /// The server's address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend_ip: Option<String>,
    /// The server's port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend_port: Option<u16>,
    /// What the client was told, in Python's words, as in the captures.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Where a client is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Source {
    /// The place.
    pub place: Ns,
    /// Whether its process is in the cgroup with socket load balancing.
    pub in_cgroup: bool,
}

impl Attempt {
    /// Where the client of this attempt is; `None` for words that no capture has.
    #[must_use]
    pub fn source(&self) -> Option<Source> {
        let first = self.from.split([' ', ',']).next()?;
        match first {
            "client" => Some(Source { place: Ns::Client, in_cgroup: false }),
            "vpn" => Some(Source { place: Ns::Vpn, in_cgroup: false }),
            "the" if self.from.starts_with("the node itself") => {
                Some(Source { place: Ns::Node, in_cgroup: true })
            }
            _ if first.starts_with("pod") => {
                let in_cgroup = !self.from.contains("outside");
                Some(Source { place: first.parse().ok()?, in_cgroup })
            }
            _ => None,
        }
    }
}

/// Attempts that the captures' probes made; for a capture without, one from every place to every
/// frontend in its services maps.
///
/// # Errors
/// [`ProbeError`].
pub fn attempts(capture: &Capture) -> Result<Vec<Attempt>, ProbeError> {
    if capture.has(PROBES) {
        return Ok(outcomes(capture)?.into_iter().map(|outcome| outcome.attempt).collect());
    }
    let mut found = Vec::new();
    let sources = [
        ("client", Ns::Client),
        ("vpn", Ns::Vpn),
        ("the node itself (socket LB, same cgroup)", Ns::Node),
        ("pod2, process in the socket-LB cgroup (as a pod is)", Ns::Pod(2)),
        ("pod2, process outside that cgroup", Ns::Pod(2)),
    ];
    let pods = Plan::of(Some(capture)).map_or(0, |plan| plan.pods().count());
    for (frontend, transport) in frontends(capture) {
        for (from, place) in sources {
            if matches!(place, Ns::Pod(number) if usize::from(number) > pods) {
                continue;
            }
            found.push(Attempt {
                from: from.into(),
                proto: transport.to_string(),
                dst: frontend.ip(),
                port: frontend.port(),
            });
        }
    }
    Ok(found)
}

/// What the captures' probes met with.
///
/// # Errors
/// [`ProbeError`].
pub fn outcomes(capture: &Capture) -> Result<Vec<Outcome>, ProbeError> {
    let text = capture.text(PROBES)?;
    serde_json::from_str(&text).map_err(|source| ProbeError::Json {
        file: capture.path().join(PROBES).display().to_string(),
        source,
    })
}

/// Why the probes of a capture cannot be told.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// The file could not be read.
    #[error(transparent)]
    Capture(#[from] CaptureError),
    /// The file is not what it should be.
    #[error("{file}: {source}")]
    Json {
        /// The file.
        file: String,
        /// What is wrong.
        source: serde_json::Error,
    },
}

/// Frontends with an address and a port, sorted; both protocols where the map does not say.
fn frontends(capture: &Capture) -> Vec<(SocketAddr, Transport)> {
    let mut found = Vec::new();
    for name in ["cilium_lb4_services_v2", "cilium_lb6_services_v2"] {
        for entry in capture.map(name).map_or(&[][..], |map| &map.entries) {
            // Address, port (network byte order), slot, protocol, scope, padding.
            let Some((address, rest)) =
                entry.key.len().checked_sub(8).map(|at| entry.key.split_at(at))
            else {
                continue;
            };
            let &[high, low, 0, 0, protocol, 0, ..] = rest else { continue };
            let address = match (<[u8; 4]>::try_from(address), <[u8; 16]>::try_from(address)) {
                (Ok(v4), _) => IpAddr::from(v4),
                (_, Ok(v6)) => IpAddr::from(v6),
                _ => continue,
            };
            let frontend = SocketAddr::from((address, u16::from_be_bytes([high, low])));
            if address.is_unspecified() || frontend.port() == 0 {
                continue;
            }
            if matches!(protocol, 0 | 6) {
                found.push((frontend, Transport::Tcp));
            }
            if matches!(protocol, 0 | 17) {
                found.push((frontend, Transport::Udp));
            }
        }
    }
    found.sort();
    found.dedup();
    found
}

/// Makes the connections from here, many at a time; outcomes in the order of the attempts.
#[must_use]
pub fn connect_all(attempts: &[Attempt], patience: Duration) -> Vec<Outcome> {
    let next = Mutex::new(0..attempts.len());
    let done = Mutex::new(vec![None; attempts.len()]);
    let lock = |range: &Mutex<std::ops::Range<usize>>| {
        range.lock().unwrap_or_else(std::sync::PoisonError::into_inner).next()
    };
    thread::scope(|scope| {
        for _ in 0..AT_ONCE.min(attempts.len()) {
            scope.spawn(|| {
                while let Some(number) = lock(&next) {
                    let outcome = connect(&attempts[number], patience);
                    done.lock().unwrap_or_else(std::sync::PoisonError::into_inner)[number] =
                        Some(outcome);
                }
            });
        }
    });
    let done = done.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    done.into_iter().flatten().collect()
}

/// Makes one connection from here and reads what the server says.
fn connect(attempt: &Attempt, patience: Duration) -> Outcome {
    let to = SocketAddr::from((attempt.dst, attempt.port));
    let result = match &attempt.proto[..] {
        "udp" => over_udp(to, patience),
        _ => over_tcp(to, patience),
    };
    let mut outcome = Outcome {
        attempt: attempt.clone(),
        ok: false,
        src: None,
        answered_by: None,
        peer_seen_by_backend: None,
        backend_ip: None,
        backend_port: None,
        error: None,
    };
    match result {
        Ok((own, line)) => {
            outcome.src = Some(own.to_string());
            outcome.ok = true;
            // `pod1 tcp 8443 peer=ADDRESS:PORT local=ADDRESS`
            let mut words = line.split_whitespace();
            outcome.answered_by = words.next().map(Into::into);
            outcome.backend_port = words.nth(1).and_then(|port| port.parse().ok());
            for word in words {
                match word.split_once('=') {
                    Some(("peer", peer)) => outcome.peer_seen_by_backend = Some(peer.into()),
                    Some(("local", local)) => outcome.backend_ip = Some(local.into()),
                    _ => {}
                }
            }
        }
        Err(error) => outcome.error = Some(in_words(&error)),
    }
    outcome
}

fn over_tcp(to: SocketAddr, patience: Duration) -> io::Result<(SocketAddr, String)> {
    let stream = TcpStream::connect_timeout(&to, patience)?;
    stream.set_read_timeout(Some(patience))?;
    let own = stream.local_addr()?;
    let mut line = String::new();
    stream.take(1024).read_to_string(&mut line)?;
    if line.is_empty() {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
    }
    Ok((own, line))
}

fn over_udp(to: SocketAddr, patience: Duration) -> io::Result<(SocketAddr, String)> {
    let any: IpAddr = if to.is_ipv4() { [0; 4].into() } else { [0_u16; 8].into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.set_read_timeout(Some(patience))?;
    // Not connected, so that a reply from another address than the one asked is seen as such.
    socket.send_to(b"who is there?\n", to)?;
    let mut line = [0; 1024];
    let (length, from) = socket.recv_from(&mut line)?;
    if from != to {
        return Err(io::Error::other(format!("{from} answered for {to}")));
    }
    Ok((socket.local_addr()?, String::from_utf8_lossy(&line[..length]).into_owned()))
}

/// An error as the captures' probes wrote it.
fn in_words(error: &io::Error) -> String {
    if matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock) {
        return "TimeoutError timed out".into();
    }
    let Some(number) = error.raw_os_error() else { return format!("OSError {error}") };
    let class = match number {
        libc::EPERM | libc::EACCES => "PermissionError",
        libc::ECONNREFUSED => "ConnectionRefusedError",
        libc::ECONNRESET => "ConnectionResetError",
        _ => "OSError",
    };
    let text = error.to_string();
    let text = text.split(" (os error").next().unwrap_or_default();
    format!("{class} [Errno {number}] {text}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_from_the_captures_words() {
        let source = |from: &str| {
            let dst = [127, 0, 0, 1].into();
            Attempt { from: from.into(), proto: "tcp".into(), dst, port: 1 }.source()
        };
        let at = |place, in_cgroup| Some(Source { place, in_cgroup });
        assert_eq!(source("client (v4)"), at(Ns::Client, false));
        assert_eq!(source("vpn"), at(Ns::Vpn, false));
        assert_eq!(source("the node itself (socket LB, same cgroup)"), at(Ns::Node, true));
        assert_eq!(
            source("pod2, process in the socket-LB cgroup (as a pod is)"),
            at(Ns::Pod(2), true)
        );
        assert_eq!(source("pod2, process outside that cgroup"), at(Ns::Pod(2), false));
        assert_eq!(source("the moon"), None);
    }

    #[test]
    fn without_probes_every_frontend_is_tried_from_every_place() {
        let capture = Capture::project("v1.18-faults/00-baseline").expect("the state");
        assert!(!capture.has(PROBES));
        let found = attempts(&capture).expect("attempts");
        let places = |dst: &str, proto: &str, port: u16| {
            let dst: IpAddr = dst.parse().expect("an address");
            let same = |a: &&Attempt| (a.dst, &a.proto[..], a.port) == (dst, proto, port);
            found.iter().filter(same).map(|a| a.from.as_str()).collect::<Vec<_>>()
        };
        // The state says nothing of pods.
        let all = ["client", "vpn", "the node itself (socket LB, same cgroup)"];
        assert_eq!(places("192.168.2.20", "tcp", 443), all);
        assert_eq!(places("192.168.2.22", "udp", 25565), all);
        assert!(places("192.168.2.20", "udp", 443).is_empty());
        assert!(found.iter().all(|a| a.port != 0 && !a.dst.is_unspecified()));
    }

    #[test]
    fn every_captured_probe_has_a_place() {
        for path in crate::capture::list_project().expect("the captures") {
            let capture = Capture::open(path).expect("a capture");
            if !capture.has(PROBES) {
                continue;
            }
            for attempt in attempts(&capture).expect("its probes") {
                assert!(attempt.source().is_some(), "{attempt:?}");
            }
        }
    }
}
