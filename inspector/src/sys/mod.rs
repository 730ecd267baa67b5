//! The few raw system calls that aya does not have, and what `/proc` and `/sys` say.
//!
//! aya 0.14 opens a pin only for reading and writing and has no batch look-up; both matter here:
//! the first keeps the promise not to modify anything, the second makes large maps quick to read.

pub mod around;
pub mod arrive;
pub mod bpf;
pub mod btf;
pub mod cgroup;
pub mod change;
pub mod host;
pub mod mounts;
pub mod netlink;
pub mod netns;
pub mod program;
pub mod signals;
pub mod tc;
pub mod test_run;
