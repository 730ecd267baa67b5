//! The frontends that Cilium's agent has, asked of its API: only to compare, and only on demand.

use std::{
    fmt,
    io::{self, Read, Write},
    net::IpAddr,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use serde::Deserialize;

/// Where the agent's API is.
pub const SOCKET: &str = "/var/run/cilium/cilium.sock";

/// Time for everything, and bytes of the answer. Ten thousand services are about 20 MiB.
const PATIENCE: Duration = Duration::from_secs(5);
const LIMIT: usize = 128 << 20;

/// HTTP 1.0, so that the answer comes in one piece and ends with the connection.
const REQUEST: &[u8] =
    b"GET /v1/service HTTP/1.0\r\nHost: localhost\r\nAccept: application/json\r\n\r\n";

/// Why the agent did not answer.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The connection failed.
    #[error(
        "cannot ask the agent at {}: {source}{}", path.display(),
        if source.kind() == io::ErrorKind::NotFound { "; name its socket with --agent=SOCKET" } else { "" }
    )]
    Io {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It took too long.
    #[error("the agent at {} did not answer within {} s", path.display(), PATIENCE.as_secs())]
    Slow {
        /// The socket.
        path: PathBuf,
    },
    /// What came is not what was asked for.
    #[error("{} is no agent's API: {what}", path.display())]
    Answer {
        /// The socket.
        path: PathBuf,
        /// What came.
        what: String,
    },
}

#[derive(Deserialize)]
struct Service {
    spec: Spec,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Spec {
    frontend_address: Frontend,
}

#[derive(Deserialize)]
struct Frontend {
    ip: Option<IpAddr>,
    #[serde(default)]
    port: u16,
    #[serde(default)]
    protocol: String,
    #[serde(default)]
    scope: String,
}

/// As `cilium-dbg service list` shows them: `192.168.2.20:443/TCP`, `[fd00:2::20]:443/TCP/i`;
/// before Cilium 1.17 the agent does not tell the protocol.
impl fmt::Display for Frontend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.ip {
            Some(IpAddr::V4(ip)) => write!(f, "{ip}:{}", self.port)?,
            Some(IpAddr::V6(ip)) => write!(f, "[{ip}]:{}", self.port)?,
            None => write!(f, ":{}", self.port)?,
        }
        if !self.protocol.is_empty() && !self.protocol.eq_ignore_ascii_case("none") {
            write!(f, "/{}", self.protocol.to_ascii_uppercase())?;
        }
        if self.scope == "internal" {
            f.write_str("/i")?;
        }
        Ok(())
    }
}

/// Asks the agent for its frontends with the address `vip`.
///
/// # Errors
/// [`AgentError`].
pub fn frontends(path: &Path, vip: IpAddr) -> Result<Vec<String>, AgentError> {
    let answer = |what: String| AgentError::Answer { path: path.to_owned(), what };
    let response = ask(path)?;
    let body = body(&response).map_err(answer)?;
    let services: Vec<Service> = serde_json::from_slice(body)
        .map_err(|error| answer(format!("its list of services cannot be read: {error}")))?;
    let mut found: Vec<_> = services
        .into_iter()
        .map(|service| service.spec.frontend_address)
        .filter(|frontend| frontend.ip == Some(vip))
        .map(|frontend| frontend.to_string())
        .collect();
    found.sort();
    found.dedup();
    Ok(found)
}

fn ask(path: &Path) -> Result<Vec<u8>, AgentError> {
    let end = Instant::now() + PATIENCE;
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            AgentError::Slow { path: path.to_owned() }
        }
        _ => AgentError::Io { path: path.to_owned(), source },
    };
    let mut stream = connect(path).map_err(failed)?;
    stream.write_all(REQUEST).map_err(failed)?;
    let mut response = Vec::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(AgentError::Slow { path: path.to_owned() });
        }
        stream.set_read_timeout(Some(left)).map_err(failed)?;
        match stream.read(&mut buffer) {
            Ok(0) => return Ok(response),
            Ok(length) if response.len() + length > LIMIT => {
                let what = format!("its answer is longer than {} MiB", LIMIT >> 20);
                return Err(AgentError::Answer { path: path.to_owned(), what });
            }
            Ok(length) => response.extend(&buffer[..length]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(failed(error)),
        }
    }
}

/// Connects in a time that is bounded, which the standard library cannot.
fn connect(path: &Path) -> io::Result<UnixStream> {
    let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None)?;
    // The kernel waits as long for a place in the queue of a listener.
    socket.set_write_timeout(Some(PATIENCE))?;
    socket.connect(&socket2::SockAddr::unix(path)?)?;
    Ok(UnixStream::from(std::os::fd::OwnedFd::from(socket)))
}

/// The body of a response that says 200.
fn body(response: &[u8]) -> Result<&[u8], String> {
    let end = response
        .windows(4)
        .position(|four| four == b"\r\n\r\n")
        .ok_or("its answer is no HTTP response")?;
    let head = String::from_utf8_lossy(&response[..end]);
    let body = &response[end + 4..];
    let mut lines = head.lines();
    let status = lines.next().unwrap_or_default();
    let mut words = status.split(' ');
    if !words.next().is_some_and(|version| version.starts_with("HTTP/1.")) {
        return Err("its answer is no HTTP response".to_owned());
    }
    if words.next() != Some("200") {
        return Err(format!("it answers `{status}`"));
    }
    for line in lines {
        let (name, value) = line.split_once(':').unwrap_or((line, ""));
        if name.eq_ignore_ascii_case("content-length")
            && value.trim().parse().is_ok_and(|length: usize| length != body.len())
        {
            return Err(format!("its answer has {} bytes of {}", body.len(), value.trim()));
        }
        if name.eq_ignore_ascii_case("transfer-encoding") {
            return Err("its answer comes in pieces, which HTTP 1.0 does not have".to_owned());
        }
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_is_taken_whole_or_not_at_all() {
        assert_eq!(body(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n[]"), Ok(&b"[]"[..]));
        assert_eq!(body(b"HTTP/1.0 200 OK\r\n\r\n[]"), Ok(&b"[]"[..]));
        for (response, says) in [
            (&b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\n[]"[..], "2 bytes of 3"),
            (b"HTTP/1.1 404 Not Found\r\n\r\n", "`HTTP/1.1 404 Not Found`"),
            (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n[]", "in pieces"),
            (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "no HTTP"),
            (b"", "no HTTP"),
        ] {
            let error = body(response).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }
}
