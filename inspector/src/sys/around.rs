//! Programs that run at the entry and at the exit of another BPF program (fentry and fexit).
//!
//! aya 0.14 loads such programs for functions of the kernel alone: with `attach_prog_fd` it loads
//! extensions, which take the other program's place and are not wanted here.

use std::{
    ffi::CStr,
    io,
    os::fd::{BorrowedFd, OwnedFd},
};

use super::bpf;

const BPF_RAW_TRACEPOINT_OPEN: libc::c_long = 17;

/// `BPF_PROG_TYPE_TRACING`
const TRACING: u32 = 26;

/// Room for what the verifier says.
const LOG_BYTES: u32 = 1 << 16;

/// When it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// Before the other program.
    Entry,
    /// When it has returned, and what it tail-called.
    Exit,
}

impl When {
    /// `enum bpf_attach_type`
    fn attach_type(self) -> u32 {
        match self {
            Self::Entry => 24,
            Self::Exit => 25,
        }
    }
}

/// What is loaded, and for what.
#[derive(Debug, Clone, Copy)]
pub struct Around<'a> {
    /// Name; the kernel cuts it to 15 bytes.
    pub name: &'a str,
    /// The instructions (`struct bpf_insn`, 8 bytes each), maps in the place of their descriptors.
    pub instructions: &'a [[u8; 8]],
    /// License.
    pub license: &'a CStr,
    /// When it runs.
    pub when: When,
    /// The other program.
    pub target: BorrowedFd<'a>,
    /// Type id of its function in its own BTF.
    pub function: u32,
}

/// Why it could not be loaded.
#[derive(Debug, thiserror::Error)]
#[error("bpf(BPF_PROG_LOAD) of {name}: {source}{}{said}", if said.is_empty() { "" } else { "; " })]
pub struct Refused {
    /// Name of the program.
    pub name: String,
    /// The system's error.
    pub source: io::Error,
    /// The last thing that the verifier said; nothing if it was not asked.
    pub said: String,
}

/// Loads it. It runs once it is [attached](attach).
///
/// # Errors
/// [`Refused`], with the error of `BPF_PROG_LOAD`: `EPERM` without `CAP_BPF` and `CAP_PERFMON` and
/// where kernel lockdown refuses it, `EINVAL` if the function is none of the other program's.
pub fn load(around: &Around<'_>) -> Result<OwnedFd, Refused> {
    let refused = |source, said| Refused { name: around.name.to_owned(), source, said };
    match try_load(around, None) {
        Ok(fd) => Ok(fd),
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
            Err(refused(error, String::new()))
        }
        // Once more, for the verifier's reason.
        Err(first) => {
            let mut log = vec![0; LOG_BYTES as usize];
            if let Ok(fd) = try_load(around, Some(&mut log)) {
                return Ok(fd);
            }
            let end = log.iter().position(|&byte| byte == 0).unwrap_or(log.len());
            let text = String::from_utf8_lossy(&log[..end]);
            let said = bpf::verifiers_reason(&text);
            Err(refused(first, said.to_owned()))
        }
    }
}

fn try_load(around: &Around<'_>, log: Option<&mut [u8]>) -> io::Result<OwnedFd> {
    let mut prog_name = [0; 16];
    // The last byte ends it.
    for (to, from) in prog_name[..15].iter_mut().zip(around.name.bytes()) {
        *to = from;
    }
    let mut attr = bpf::LoadAttr {
        prog_type: TRACING,
        insn_cnt: u32::try_from(around.instructions.len()).unwrap_or(u32::MAX),
        insns: around.instructions.as_ptr() as u64,
        license: around.license.as_ptr() as u64,
        prog_name,
        expected_attach_type: around.when.attach_type(),
        attach_btf_id: around.function,
        attach_prog_fd: bpf::fd_number(around.target),
        ..bpf::LoadAttr::default()
    };
    if let Some(log) = log {
        attr.log_level = 1;
        attr.log_size = u32::try_from(log.len()).unwrap_or(LOG_BYTES);
        attr.log_buf = log.as_mut_ptr() as u64;
    }
    // SAFETY: instructions, license and log have the lengths given (the license ends in NUL), and
    // outlive the call.
    let fd = unsafe { bpf::bpf(bpf::BPF_PROG_LOAD, &mut attr)? };
    // SAFETY: the kernel just returned this descriptor; nobody else owns it.
    unsafe { bpf::owned(fd) }
}

/// Lets a program run around the one that it was loaded for, until the link is closed.
///
/// # Errors
/// The error of `BPF_RAW_TRACEPOINT_OPEN`, by which such programs are attached.
pub fn attach(program: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    #[repr(C)]
    #[derive(Default)]
    struct OpenAttr {
        name: u64,
        prog_fd: u32,
        pad: u32,
    }
    let mut attr = OpenAttr { prog_fd: bpf::fd_number(program), ..OpenAttr::default() };
    // SAFETY: the attribute holds no address: no name is given.
    let fd = unsafe { bpf::bpf(BPF_RAW_TRACEPOINT_OPEN, &mut attr)? };
    // SAFETY: the kernel just returned this descriptor; nobody else owns it.
    unsafe { bpf::owned(fd) }
}
