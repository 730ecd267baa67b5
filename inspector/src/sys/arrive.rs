//! A packet that arrives on a device without ever having been on a wire.
//!
//! A program of four instructions, never attached to anything, is run once on the frame: it calls
//! `bpf_clone_redirect` with `BPF_F_INGRESS`, which the kernel carries out at once, in a test run
//! too. The copy goes through `netif_rx`: generic XDP, tc ingress and all that follows see it as any
//! other packet of that device. Of a device without Ethernet header the kernel takes the header off
//! by itself (`__bpf_redirect_no_mac`,
//! <https://github.com/torvalds/linux/blob/v6.18/net/core/filter.c>).
//!
//! Nothing is made for it that could be left behind: the program is gone when its descriptor is
//! closed, by the kernel at the latest. A driver's own XDP program is not run: it belongs to the
//! driver's receive queue.

use std::{
    io,
    os::fd::{AsFd as _, OwnedFd},
};

use super::{
    bpf::{self, BPF_PROG_LOAD, LoadAttr},
    test_run,
};

/// `BPF_F_INGRESS`
const INGRESS: i32 = 1;
/// Number of the helper `bpf_clone_redirect`.
const CLONE_REDIRECT: i32 = 13;

/// `struct bpf_insn`
#[repr(C)]
#[derive(Clone, Copy)]
struct Instruction {
    code: u8,
    /// Destination register in the lower half, source in the upper.
    registers: u8,
    offset: i16,
    immediate: i32,
}

impl Instruction {
    const fn new(code: u8, register: u8, immediate: i32) -> Self {
        Self { code, registers: register, offset: 0, immediate }
    }
}

/// What makes frames arrive on one device.
#[derive(Debug)]
pub struct Arrival {
    program: OwnedFd,
}

/// What the kernel did with a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrived {
    /// It was received.
    Received,
    /// It was thrown away before that: the device is down, or the queue of the CPU is full.
    Refused,
    /// There is no such device any more.
    NoDevice,
    /// Something else, as the kernel's error number.
    Failed(i32),
}

impl Arrival {
    /// Makes ready for a device of this thread's network namespace.
    ///
    /// # Errors
    /// The error of `BPF_PROG_LOAD`: `EPERM` without `CAP_BPF` and `CAP_NET_ADMIN`.
    pub fn on(ifindex: u32) -> io::Result<Self> {
        /// `BPF_ALU64 | BPF_MOV | BPF_K`, `BPF_JMP | BPF_CALL`, `BPF_JMP | BPF_EXIT`.
        const MOVE: u8 = 0xb7;
        const CALL: u8 = 0x85;
        const EXIT: u8 = 0x95;
        // Its first register holds the packet already.
        let instructions = [
            Instruction::new(MOVE, 2, ifindex.cast_signed()),
            Instruction::new(MOVE, 3, INGRESS),
            Instruction::new(CALL, 0, CLONE_REDIRECT),
            Instruction::new(EXIT, 0, 0),
        ];
        let mut attr = LoadAttr {
            prog_type: test_run::SCHED_CLS,
            insn_cnt: 4,
            insns: instructions.as_ptr() as u64,
            license: c"GPL".as_ptr() as u64,
            ..LoadAttr::default()
        };
        attr.prog_name[..NAME.len()].copy_from_slice(NAME.as_bytes());
        // SAFETY: the kernel reads the instructions and the licence at their lengths; both outlive
        // the call.
        let fd = unsafe { bpf::bpf(BPF_PROG_LOAD, &mut attr)? };
        // SAFETY: the kernel just returned this descriptor; nobody else owns it.
        Ok(Self { program: unsafe { bpf::owned(fd)? } })
    }

    /// Makes a frame arrive. It begins with an Ethernet header, whatever the device is.
    ///
    /// # Errors
    /// The error of `BPF_PROG_TEST_RUN`; what the kernel did with the frame is no error.
    pub fn frame(&self, frame: &[u8]) -> io::Result<Arrived> {
        let ran = test_run::anywhere(self.program.as_fd(), frame)?;
        Ok(match ran {
            0 => Arrived::Received,
            // NET_RX_DROP
            1 => Arrived::Refused,
            // What the helper says of an index that it does not find.
            number if number == -libc::EINVAL => Arrived::NoDevice,
            number => Arrived::Failed(number.saturating_neg()),
        })
    }
}

/// The program's name, as `bpftool prog` would show it.
const NAME: &str = "inspect_arrive";

const _: () = assert!(size_of::<Instruction>() == 8 && NAME.len() < 16);
