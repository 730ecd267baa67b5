//! The machine: names, kernel, capabilities, clocks.

use std::{fs, io, time::Duration};

/// Number of possible CPUs: how many values an entry of a per-CPU map has.
///
/// # Errors
/// The error of reading `/sys/devices/system/cpu/possible`, or `InvalidData` for a list that is
/// none.
pub fn possible_cpus() -> io::Result<usize> {
    let text = fs::read_to_string("/sys/devices/system/cpu/possible")?;
    parse_cpu_list(&text).ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("/sys/devices/system/cpu/possible holds {:?}, no list of CPUs", text.trim()),
        )
    })
}

/// `0-3,8` is CPUs 0 to 8: the kernel numbers values by the highest CPU, gaps included, so count
/// members as `num_possible_cpus()` does.
fn parse_cpu_list(text: &str) -> Option<usize> {
    let mut count = 0;
    for range in text.trim().split(',') {
        let (low, high) = range.split_once('-').unwrap_or((range, range));
        let (low, high): (usize, usize) = (low.parse().ok()?, high.parse().ok()?);
        count += high.checked_sub(low)? + 1;
    }
    Some(count)
}

/// `CLOCK_MONOTONIC`, the clock of Cilium's agent liveness.
#[must_use]
pub fn monotonic() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid timespec to write to.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    debug_assert_eq!(result, 0, "CLOCK_MONOTONIC exists on every Linux");
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or_default(),
        u32::try_from(time.tv_nsec).unwrap_or_default(),
    )
}

/// The same in nanoseconds, as the kernel's own time stamps are.
#[must_use]
pub fn monotonic_ns() -> u64 {
    u64::try_from(monotonic().as_nanos()).unwrap_or(u64::MAX)
}

/// Host name as the kernel has it.
#[must_use]
pub fn hostname() -> String {
    read_word("/proc/sys/kernel/hostname")
}

/// Kernel release, as `uname -r` prints it.
#[must_use]
pub fn kernel_release() -> String {
    read_word("/proc/sys/kernel/osrelease")
}

/// Random id of this boot.
#[must_use]
pub fn boot_id() -> String {
    read_word("/proc/sys/kernel/random/boot_id")
}

/// Lockdown mode in force: `none`, `integrity`, `confidentiality`; `None` where it cannot be told,
/// because the kernel has no such feature or securityfs is not mounted.
#[must_use]
pub fn lockdown() -> Option<String> {
    let text = fs::read_to_string("/sys/kernel/security/lockdown").ok()?;
    let (_, rest) = text.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

fn read_word(path: &str) -> String {
    fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default()
}

/// The capabilities that matter here, with their bit in the kernel's sets.
const CAPABILITIES: &[(&str, u32)] =
    &[("CAP_NET_ADMIN", 12), ("CAP_SYS_ADMIN", 21), ("CAP_PERFMON", 38), ("CAP_BPF", 39)];

/// Effective capabilities of this process, of those that matter to inspector.
///
/// # Errors
/// The error of reading `/proc/self/status`.
pub fn capabilities() -> io::Result<Vec<String>> {
    let status = fs::read_to_string("/proc/self/status")?;
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .unwrap_or_default();
    Ok(CAPABILITIES
        .iter()
        .filter(|(_, bit)| mask & (1 << bit) != 0)
        .map(|(name, _)| (*name).to_owned())
        .collect())
}

/// Name of the network interface with this index in the present network namespace.
#[must_use]
pub fn interface_name(index: u32) -> Option<String> {
    let mut buffer = [0_u8; libc::IF_NAMESIZE];
    // SAFETY: the buffer has the IF_NAMESIZE bytes that the call may write.
    let name = unsafe { libc::if_indextoname(index, buffer.as_mut_ptr().cast()) };
    if name.is_null() {
        return None;
    }
    let end = buffer.iter().position(|&byte| byte == 0)?;
    Some(String::from_utf8_lossy(&buffer[..end]).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists_are_counted() {
        assert_eq!(parse_cpu_list("0-1\n"), Some(2));
        assert_eq!(parse_cpu_list("0\n"), Some(1));
        assert_eq!(parse_cpu_list("0-3,8-11"), Some(8));
        assert_eq!(parse_cpu_list(""), None);
        assert_eq!(parse_cpu_list("3-1"), None);
    }

    #[test]
    fn this_machine_answers() {
        assert!(possible_cpus().unwrap() >= 1);
        assert!(!kernel_release().is_empty());
        assert!(monotonic() > Duration::ZERO);
        assert_eq!(interface_name(1).as_deref(), Some("lo"));
    }
}
