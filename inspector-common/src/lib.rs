//! Types that inspector and its eBPF programs share: the layouts of the maps between them, and the
//! packet parser, which is here so that the code that runs in the kernel is tested on the host.
//!
//! Unless a field says otherwise, numbers are in host byte order: both sides run on one machine.
#![no_std]
#![expect(
    clippy::inline_always,
    reason = "a call in BPF takes no more than five registers and 512 bytes of stack in all"
)]

pub mod filter;
pub mod observe;
pub mod packet;
