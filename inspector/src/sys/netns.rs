//! Network namespaces other than the one in which the program was started.
//!
//! A thread enters one; mounts, and so the BPF file system, stay those of the process. What is
//! read below `/proc` has to be read by `/proc/thread-self` then: `/proc/self` is the process's
//! first thread, which stays where it was.

use std::{
    fmt,
    fs::{File, OpenOptions},
    io,
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
    panic,
    path::{Path, PathBuf},
    str::FromStr,
    thread,
};

/// Where iproute2 keeps its names for network namespaces.
const NAMES: &str = "/run/netns";

/// A network namespace by what names it: a path, a name that `ip netns` knows, or the id of a
/// process that is in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Netns(String);

impl FromStr for Netns {
    type Err = NetnsError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.is_empty() || text == "." || text == ".." {
            return Err(NetnsError::Nothing(text.to_owned()));
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for Netns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why a network namespace could not be entered.
#[derive(Debug, thiserror::Error)]
pub enum NetnsError {
    /// Text that names nothing.
    #[error("`{0}` names no network namespace: give a path, a name or a process id")]
    Nothing(String),
    /// There is no file that stands for it.
    #[error(
        "there is no network namespace {given}: {} does not exist; give a path, a name that `ip \
         netns list` shows, or the id of a process in it", path.display()
    )]
    Missing {
        /// What was given.
        given: Netns,
        /// The file that was looked for.
        path: PathBuf,
    },
    /// Its file could not be opened.
    #[error("cannot open the network namespace {given} ({}): {source}", path.display())]
    Open {
        /// What was given.
        given: Netns,
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// What was given is something else.
    #[error(
        "{} is no network namespace: give a file below {NAMES} or /proc/PID/ns/net",
        path.display()
    )]
    Other {
        /// The file.
        path: PathBuf,
    },
    /// It could not be entered.
    #[error("cannot enter the network namespace {given}: {source}; needed: CAP_SYS_ADMIN")]
    Enter {
        /// What was given.
        given: Netns,
        /// Why.
        source: io::Error,
    },
}

impl NetnsError {
    /// Whether more privilege would have helped.
    #[must_use]
    pub fn is_permission(&self) -> bool {
        match self {
            Self::Open { source, .. } | Self::Enter { source, .. } => {
                source.kind() == io::ErrorKind::PermissionDenied
            }
            Self::Nothing(_) | Self::Missing { .. } | Self::Other { .. } => false,
        }
    }
}

impl Netns {
    /// The file that stands for it. A number is a process if there is one, else a name.
    fn path(&self) -> PathBuf {
        if self.0.contains('/') {
            return PathBuf::from(&self.0);
        }
        let named = Path::new(NAMES).join(&self.0);
        let is_number = self.0.bytes().all(|byte| byte.is_ascii_digit());
        if is_number {
            let process = Path::new("/proc").join(&self.0);
            if process.exists() || !named.exists() {
                return process.join("ns/net");
            }
        }
        named
    }

    fn open(&self) -> Result<(File, PathBuf), NetnsError> {
        let path = self.path();
        // Not to wait for the other end of a pipe, should it be one.
        let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path);
        match opened {
            Ok(file) => Ok((file, path)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(NetnsError::Missing { given: self.clone(), path })
            }
            Err(source) => Err(NetnsError::Open { given: self.clone(), path, source }),
        }
    }

    /// Moves this thread into it. Threads that it starts afterwards are there too.
    fn enter(&self) -> Result<(), NetnsError> {
        let (file, path) = self.open()?;
        // SAFETY: the call takes a descriptor, which is open, and a flag.
        let result = unsafe { libc::setns(file.as_raw_fd(), libc::CLONE_NEWNET) };
        if result == 0 {
            return Ok(());
        }
        let source = io::Error::last_os_error();
        // EINVAL: another kind of namespace, or no namespace at all.
        Err(if source.raw_os_error() == Some(libc::EINVAL) {
            NetnsError::Other { path }
        } else {
            NetnsError::Enter { given: self.clone(), source }
        })
    }

    /// Runs `work` in it, on a thread of its own; a panic there is one here.
    ///
    /// # Errors
    /// [`NetnsError`] if it cannot be entered; then `work` does not run.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, NetnsError> {
        thread::scope(|scope| {
            let thread = scope.spawn(|| {
                self.enter()?;
                Ok(work())
            });
            thread.join().unwrap_or_else(|payload| panic::resume_unwind(payload))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        text.parse::<Netns>().and_then(|netns| netns.run(|| ())).unwrap_err().to_string()
    }

    #[test]
    fn what_is_none_is_said_in_one_sentence() {
        for (given, says) in [
            ("", "`` names no network namespace"),
            ("..", "`..` names no network namespace"),
            ("no-such-name", "/run/netns/no-such-name does not exist"),
            ("4194399", "/proc/4194399/ns/net does not exist"),
            ("/no/such/file", "/no/such/file does not exist"),
            ("/proc/version", "/proc/version is no network namespace"),
            ("/proc/self/ns/uts", "/proc/self/ns/uts is no network namespace"),
        ] {
            let error = error(given);
            assert!(error.contains(says), "{given}: {error}");
            assert!(!error.contains('\n'), "{error}");
        }
    }
}
