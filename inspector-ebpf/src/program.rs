//! The program tier: entry and exit of a program that somebody else has attached to a device.
//!
//! Each is loaded for one such program. They do not refer to the arguments directly: what the
//! verifier makes of them depends on what the other program's BTF says of its own.

use aya_ebpf::EbpfContext;
use aya_ebpf::helpers::generated::{bpf_get_func_arg, bpf_get_func_ret};
use aya_ebpf::macros::{fentry, fexit, map};
use aya_ebpf::maps::Array;
use aya_ebpf::programs::{FEntryContext, FExitContext};
use inspector_common::observe::{hook, tier};

use crate::kernel::{Place, member, packet, read};
use crate::watched::setting;

/// Id of the program that is watched: every pair of ours gets a map of its own.
#[map]
static TARGET: Array<u32> = Array::with_max_entries(1, 0);

/// The head of the name of the protocol of the sockets that the kernel makes for test runs.
const TEST_RUN: u64 = u64::from_ne_bytes(*b"bpf_dumm");

#[fentry]
#[allow(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn program_entry(ctx: FEntryContext) -> i32 {
    if let Some(skb) = first_argument(&ctx) {
        packet(tier::PROGRAM, hook::PROGRAM_ENTRY, skb, Place::Network, None);
    }
    0
}

#[fexit]
#[allow(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn program_exit(ctx: FExitContext) -> i32 {
    let mut returned = 0_u64;
    // SAFETY: the context is the one that the kernel gave, and there is room for the value.
    let failed = unsafe { bpf_get_func_ret(ctx.as_ptr(), &raw mut returned) };
    if failed == 0
        && let Some(skb) = first_argument(&ctx)
    {
        let returned = Some(returned as u32);
        packet(tier::PROGRAM, hook::PROGRAM_EXIT, skb, Place::Network, returned);
    }
    0
}

#[inline(always)]
fn first_argument(ctx: &impl EbpfContext) -> Option<u64> {
    let mut skb = 0_u64;
    // SAFETY: as above.
    let failed = unsafe { bpf_get_func_arg(ctx.as_ptr(), 0, &raw mut skb) };
    (failed == 0).then_some(skb)
}

/// Id of the program that is watched.
#[inline(always)]
pub fn target() -> u32 {
    TARGET.get(0).copied().unwrap_or(0)
}

/// Whether the packet is that of a test run (`BPF_PROG_TEST_RUN`): no packet that arrived.
#[inline(always)]
pub fn is_test_run(skb: u64) -> bool {
    let socket: u64 = member!(skb, skb_sk);
    if socket == 0 {
        return false;
    }
    let protocol: u64 = member!(socket, sk_prot);
    let name: u64 = read(protocol + u64::from(setting!(offsets.proto_name)));
    name == TEST_RUN
}
