//! Programs of the system that are asked for what the kernel tells only in their own language.

use std::{
    env,
    io::{self, Read},
    os::{fd::AsRawFd, unix::fs::PermissionsExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

/// How long a program may take altogether.
const PATIENCE: Duration = Duration::from_secs(3);

/// Bytes of output that are read.
const LIMIT: usize = 32 << 20;

/// Why a program did not answer.
#[derive(Debug, thiserror::Error)]
pub enum ToolError {
    /// It could not be started, or its output not be read.
    #[error("cannot run {tool}: {source}")]
    Run {
        /// Its name.
        tool: String,
        /// Why.
        source: io::Error,
    },
    /// It failed.
    #[error("{tool} fails ({status}): {said}")]
    Failed {
        /// Its name.
        tool: String,
        /// Its exit status.
        status: String,
        /// The first line that it said on standard error.
        said: String,
    },
    /// It took too long.
    #[error("{tool} did not end within {} s", PATIENCE.as_secs())]
    Slow {
        /// Its name.
        tool: String,
    },
    /// It said too much.
    #[error("{tool} says more than {} MiB", LIMIT >> 20)]
    Long {
        /// Its name.
        tool: String,
    },
}

/// The program with this name in `PATH`, or where system programs are.
pub fn find(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(PathBuf::from))
        .filter(|folder| folder.is_absolute())
        .map(|folder| folder.join(name))
        .find(|file| is_executable(file))
}

fn is_executable(file: &Path) -> bool {
    file.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

/// A program that runs, in the network namespace of the thread that started it. It is ended when
/// this is dropped.
pub struct Tool {
    name: String,
    child: Child,
    end: Instant,
}

impl Tool {
    /// Starts `program`.
    ///
    /// # Errors
    /// [`ToolError::Run`].
    pub fn start(program: &Path, arguments: &[&str]) -> Result<Self, ToolError> {
        let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        match child {
            Ok(child) => Ok(Self { name, child, end: Instant::now() + PATIENCE }),
            Err(source) => Err(ToolError::Run { tool: name, source }),
        }
    }

    /// What it prints, when it has ended.
    ///
    /// # Errors
    /// [`ToolError`].
    pub fn output(mut self) -> Result<String, ToolError> {
        let (mut out, mut err) = (self.child.stdout.take(), self.child.stderr.take());
        let (mut said, mut complained) = (Vec::new(), Vec::new());
        while out.is_some() || err.is_some() {
            self.wait(out.as_ref().map(AsRawFd::as_raw_fd), err.as_ref().map(AsRawFd::as_raw_fd))?;
            self.read(&mut out, &mut said)?;
            self.read(&mut err, &mut complained)?;
        }
        // It has closed its output; a program that lives on after that is not waited for long.
        let status = loop {
            match self.child.try_wait() {
                Ok(Some(status)) => break status,
                Ok(None) if Instant::now() < self.end => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Ok(None) => return Err(ToolError::Slow { tool: self.name.clone() }),
                Err(source) => return Err(self.failed(source)),
            }
        };
        if !status.success() {
            let said = String::from_utf8_lossy(&complained);
            return Err(ToolError::Failed {
                tool: self.name.clone(),
                status: status.to_string(),
                said: said.lines().next().unwrap_or("it does not say why").to_owned(),
            });
        }
        Ok(String::from_utf8_lossy(&said).into_owned())
    }

    fn failed(&self, source: io::Error) -> ToolError {
        ToolError::Run { tool: self.name.clone(), source }
    }

    /// Waits until one of the descriptors can be read.
    fn wait(&self, out: Option<i32>, err: Option<i32>) -> Result<(), ToolError> {
        loop {
            let left = self.end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ToolError::Slow { tool: self.name.clone() });
            }
            // A negative descriptor is passed over.
            let mut polled = [out, err].map(|fd| libc::pollfd {
                fd: fd.unwrap_or(-1),
                events: libc::POLLIN,
                revents: 0,
            });
            // A millisecond more, so that the time is over when poll says so.
            let left = i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX);
            // SAFETY: poll reads and writes the two entries of `polled`.
            if unsafe { libc::poll(polled.as_mut_ptr(), 2, left) } >= 0 {
                if polled.iter().any(|one| one.revents != 0) {
                    return Ok(());
                }
                continue;
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(self.failed(error));
            }
        }
    }

    /// Reads once, if there is something; a pipe that has ended is closed.
    fn read<R: Read + AsRawFd>(
        &self,
        pipe: &mut Option<R>,
        to: &mut Vec<u8>,
    ) -> Result<(), ToolError> {
        let Some(open) = pipe else { return Ok(()) };
        let mut ready = libc::pollfd { fd: open.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: poll reads and writes the one entry.
        if unsafe { libc::poll(&raw mut ready, 1, 0) } <= 0 {
            return Ok(());
        }
        let mut buffer = [0; 1 << 13];
        match open.read(&mut buffer) {
            Ok(0) => *pipe = None,
            Ok(length) if to.len() + length > LIMIT => {
                return Err(ToolError::Long { tool: self.name.clone() });
            }
            Ok(length) => to.extend(&buffer[..length]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(self.failed(error)),
        }
        Ok(())
    }
}

impl Drop for Tool {
    fn drop(&mut self) {
        // Of one that has ended this does nothing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Result<String, ToolError> {
        Tool::start(&find("sh").unwrap(), &["-c", script])?.output()
    }

    #[test]
    fn what_a_program_prints_is_read() {
        assert_eq!(shell("echo yes; echo no >&2").unwrap(), "yes\n");
        let long = shell("head -c 300000 /dev/zero | tr '\\0' x").unwrap();
        assert_eq!(long.len(), 300_000);
        assert_eq!(find("no-such-program-anywhere"), None);
    }

    #[test]
    fn one_that_fails_or_hangs_is_told_of() {
        let error = shell("echo broken >&2; exit 3").unwrap_err().to_string();
        assert!(error.starts_with("sh fails") && error.ends_with("broken"), "{error}");
        let started = Instant::now();
        assert_eq!(shell("exec sleep 60").unwrap_err().to_string(), "sh did not end within 3 s");
        let closed = shell("exec >&- 2>&-; exec sleep 60").unwrap_err().to_string();
        assert_eq!(closed, "sh did not end within 3 s");
        assert!(started.elapsed() < Duration::from_secs(30));
        let error = shell("exec cat /dev/zero").unwrap_err().to_string();
        assert_eq!(error, "sh says more than 32 MiB");
    }
}
