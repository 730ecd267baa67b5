//! Processes of the lab that are not a command: they begin as a copy of the process that makes the
//! lab, and keep nothing of it.
//!
//! That process may have other threads, so until it ends such a copy does only what is safe in a
//! signal handler: no allocation, no lock, no panic.

use std::{
    convert::Infallible,
    ffi::CStr,
    fs::File,
    io,
    os::fd::{AsRawFd, OwnedFd, RawFd},
};

use nix::{
    sys::signal::{SigHandler, SigSet, SigmaskHow, Signal, signal, sigprocmask},
    unistd::{ForkResult, fork},
};

/// Starts a process named `name` (15 bytes at most, as `ps` shows it) that has `files` as its
/// descriptors from 3 on, and runs `life` with `state`, which the caller has allocated. It is in the
/// network namespace of the calling thread, by which [`crate::state::remove`] finds it.
///
/// # Safety
/// `life` must do only what is safe in a signal handler.
///
/// # Errors
/// What the system said.
pub unsafe fn start<S>(
    name: &CStr,
    files: &[OwnedFd],
    mut state: S,
    life: impl FnOnce(&mut S) -> Infallible,
) -> io::Result<()> {
    let mut numbers: Vec<RawFd> = files.iter().map(AsRawFd::as_raw_fd).collect();
    let null = File::options().read(true).write(true).open("/dev/null")?;
    // SAFETY: the child does only what is safe in a signal handler: `leave` makes system calls and
    // nothing else, `life` is the caller's promise, and neither returns.
    if let ForkResult::Child = unsafe { fork() }? {
        leave(name, null.as_raw_fd(), &mut numbers);
        life(&mut state);
    }
    Ok(())
}

/// Leaves everything of the parent behind but `files`.
fn leave(name: &CStr, null: RawFd, files: &mut [RawFd]) {
    let mut end = 3;
    // SAFETY: every call takes plain numbers, or pointers to memory of this function for the time
    // of the call; a failure of any leaves the process less tidy.
    unsafe {
        // A terminal's Ctrl-C is not for this process: whoever made the lab ends it.
        libc::setsid();
        libc::prctl(libc::PR_SET_NAME, name.as_ptr());
        libc::chdir(c"/".as_ptr());
        // Whoever reads our maker's output must see its end when our maker ends.
        for standard in 0..3 {
            libc::dup2(null, standard);
        }
        // Out of the way first: any may have a number now that another gets.
        for file in files.iter_mut() {
            *file = libc::fcntl(*file, libc::F_DUPFD, 256 as libc::c_int);
        }
        for file in files {
            libc::dup2(*file, end);
            end += 1;
        }
        // Locks of labs are among the descriptors that our maker had open.
        libc::syscall(libc::SYS_close_range, end, libc::c_uint::MAX, 0);
    }
    for number in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // SAFETY: the default action runs no code of this process.
        let _ = unsafe { signal(number, SigHandler::SigDfl) };
    }
    let _ = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None);
}
