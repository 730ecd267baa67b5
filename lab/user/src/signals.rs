//! What lives in this process, and its removal when a signal ends it.
//!
//! A lab is removed when its value is dropped, also by a panic. A signal drops nothing, so the
//! first lab of a process starts a thread that waits for SIGINT, SIGTERM and SIGHUP, removes every
//! living lab, and then lets the signal do what it would have done. The making of a lab goes in
//! steps, each under a lock that the thread takes for good: nothing is made after it has looked.

use std::{
    collections::BTreeSet,
    fs, io,
    sync::{Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard},
    thread,
};

use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
    low_level::emulate_default_handler,
};

use crate::state;

/// Held for reading by everything that makes or removes; for writing, and for good, at the end.
static STEPS: RwLock<()> = RwLock::new(());

/// Names of the labs that this process has made and not removed.
static LIVING: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Keeps the process from being ended by a signal between a change and the note of it. After a
/// signal this blocks until the process is gone.
pub fn step() -> RwLockReadGuard<'static, ()> {
    STEPS.read().unwrap_or_else(PoisonError::into_inner)
}

/// Notes that the lab `name` is this process's to remove.
pub fn born(name: &str) {
    LIVING.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned());
}

/// Notes that the lab `name` is no longer this process's to remove.
pub fn gone(name: &str) {
    LIVING.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
}

/// Starts the thread that waits for signals; once per process, later calls do nothing.
///
/// # Errors
/// Where the handlers or the thread cannot be made.
pub fn watch() -> io::Result<()> {
    static WATCHED: OnceLock<Result<(), io::ErrorKind>> = OnceLock::new();
    WATCHED.get_or_init(|| start().map_err(|error| error.kind())).map_err(io::Error::from)
}

fn start() -> io::Result<()> {
    let mut signals = Signals::new(not_ignored(&[SIGINT, SIGTERM, SIGHUP])?)?;
    thread::Builder::new().name("lab-signals".into()).spawn(move || {
        for signal in signals.forever() {
            let _no_more_steps = STEPS.write().unwrap_or_else(PoisonError::into_inner);
            for name in LIVING.lock().unwrap_or_else(PoisonError::into_inner).iter() {
                if let Err(error) = state::remove(name) {
                    eprintln!("lab {name}: not all of it could be removed: {error}");
                }
            }
            // Ends the process as the signal would have. It can only fail for a signal that does
            // not exist.
            let _ = emulate_default_handler(signal);
        }
    })?;
    Ok(())
}

/// Those of `signals` that this process was not started to ignore (`nohup`, a shell's background
/// job): installing a handler would undo that.
///
/// # Errors
/// Where `/proc/self/status` cannot be read.
pub fn not_ignored(signals: &[i32]) -> io::Result<Vec<i32>> {
    let status = fs::read_to_string("/proc/self/status")?;
    let ignored = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .ok_or_else(|| io::Error::other("/proc/self/status has no SigIgn line"))?;
    Ok(signals.iter().copied().filter(|signal| ignored & (1 << (signal - 1)) == 0).collect())
}
