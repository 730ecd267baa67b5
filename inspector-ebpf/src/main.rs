//! inspector's eBPF programs: one object file, of which user space loads what it needs.
//!
//! None of them decides about a packet or changes one.
#![no_std]
#![no_main]
#![expect(
    clippy::cast_possible_truncation,
    reason = "sizes are small, lengths of packets fit, and the kernel keeps short numbers in long words"
)]
#![expect(
    clippy::inline_always,
    reason = "a call in BPF takes no more than five registers and 512 bytes of stack in all"
)]

mod emit;
mod kernel;
mod probe;
mod program;
mod tc;
mod tracepoint;
mod watched;

/// Read by the kernel: helpers for GPL-compatible programs only are used.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

/// The verifier refuses programs that could come here; the compiler wants one all the same.
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
