//! Holds back signals while something must not be left half done.

use std::{mem::MaybeUninit, os::unix::process::CommandExt, process::Command, ptr};

/// Signals that end the process when nobody handles them and that a user or a service manager
/// sends.
const ENDING: [libc::c_int; 4] = [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM];

/// While this lives, the signals that end a process wait (on this thread, which must be the only
/// one that does not hold them back). They arrive when it is dropped.
#[must_use]
pub struct Held {
    before: libc::sigset_t,
}

/// Starts to hold signals back.
pub fn hold() -> Held {
    let mut ending = MaybeUninit::uninit();
    let mut before = MaybeUninit::uninit();
    // SAFETY: `sigemptyset` initialises the set that the others change and read; both sets outlive
    // the calls, and the last one writes all of `before`. None of them fails with valid signals.
    unsafe {
        libc::sigemptyset(ending.as_mut_ptr());
        for signal in ENDING {
            libc::sigaddset(ending.as_mut_ptr(), signal);
        }
        libc::sigemptyset(before.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, ending.as_ptr(), before.as_mut_ptr());
        Held { before: before.assume_init() }
    }
}

impl Held {
    /// Whether one of the signals has come meanwhile.
    #[must_use]
    pub fn pending(&self) -> bool {
        let mut waiting = MaybeUninit::uninit();
        // SAFETY: `sigpending` writes all of the set, which the others only read.
        unsafe {
            libc::sigpending(waiting.as_mut_ptr()) == 0
                && ENDING.iter().any(|&signal| libc::sigismember(waiting.as_ptr(), signal) == 1)
        }
    }
}

impl Held {
    /// Takes one of the signals that have come, so that it does not arrive when this is dropped;
    /// whether there was one.
    #[must_use]
    pub fn take(&self) -> bool {
        let mut ending = MaybeUninit::uninit();
        let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: as in `hold`; nobody wants to know who sent the signal, and the time is read only.
        unsafe {
            libc::sigemptyset(ending.as_mut_ptr());
            for signal in ENDING {
                libc::sigaddset(ending.as_mut_ptr(), signal);
            }
            libc::sigtimedwait(ending.as_ptr(), ptr::null_mut(), &raw const at_once) > 0
        }
    }
}

impl Held {
    /// Lets a command start with the signals as they were before this held them back.
    pub fn let_through(&self, command: &mut Command) {
        let before = self.before;
        // SAFETY: between fork and exec the closure makes one system call, with a set that it owns,
        // and allocates nothing.
        unsafe {
            command.pre_exec(move || {
                libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut());
                Ok(())
            });
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: the set was written by `pthread_sigmask`; nobody wants the present one.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether this thread holds back SIGTERM.
    fn holds() -> bool {
        let mut now = MaybeUninit::uninit();
        // SAFETY: with a null new set the call only writes the present one to `now`.
        unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, ptr::null(), now.as_mut_ptr());
            libc::sigismember(now.as_ptr(), libc::SIGTERM) == 1
        }
    }

    #[test]
    fn a_signal_waits_while_it_is_held_back() {
        assert!(!holds());
        let held = hold();
        assert!(holds());
        assert!(!held.pending());
        // SAFETY: the signal goes to this thread, which holds it back.
        unsafe {
            libc::raise(libc::SIGTERM);
        }
        assert!(held.pending());
        // Else it would end the tests.
        assert!(held.take());
        assert!(!held.pending() && !held.take());
        drop(held);
        assert!(!holds());
    }
}
