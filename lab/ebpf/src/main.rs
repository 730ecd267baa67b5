//! A stand-in for Cilium's datapath: test equipment of the lab, and nothing else.
//!
//! It is named and attached like Cilium's programs, reads the same pinned maps with the same keys,
//! and does to a packet what a real Cilium did in the captures, as far as connections show it. It
//! is not Cilium: no policy, no masquerading, no tunnels, no fragments, no events, and it leaves in
//! conntrack what a first packet does ([`traces`]) while it looks connections up in a table of its
//! own ([`maps::FLOWS`]). `lab/README.md` says where captures and stand-in disagree.
//!
//! As in Cilium 1.18, the program that is attached to a device does not refer to the services map
//! itself: a program that it tail-calls does.
#![no_std]
#![no_main]
#![expect(
    clippy::many_single_char_names,
    reason = "words and bytes of addresses, taken apart because an index could be out of bounds"
)]
#![expect(
    clippy::inline_always,
    reason = "a call in BPF takes no more than five registers and 512 bytes of stack in all"
)]

mod config;
mod device;
mod maps;
mod neighbour;
mod packet;
mod reject;
mod service;
mod socket;
mod traces;
mod xdp;

/// Read by the kernel: some helpers are for GPL-compatible programs only.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

/// The verifier refuses programs that could come here; the compiler wants one all the same.
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
