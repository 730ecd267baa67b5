//! Any bytes as an entry of any map: see `../check.rs`.

#![no_main]

use std::sync::atomic::{AtomicU8, Ordering};

use cilium::layout::LAYOUTS;
use libfuzzer_sys::fuzz_target;

#[path = "../check.rs"]
mod check;
// The module's source and not the crate that it belongs to: that crate's build makes the eBPF
// programs, which a sanitizer's flags and a nightly compiler without set-up cannot.
#[expect(dead_code, reason = "the target uses entries and layouts, not all of the module")]
#[path = "../../inspector/src/cilium/mod.rs"]
mod cilium;

/// libFuzzer takes what it finds in this section for coverage. Many layouts share all of their
/// code, so that without it one of them stands for all, in fuzzing and in the minimised corpus.
// SAFETY: the section is libFuzzer's own for arrays of byte counters, which this is.
#[used]
#[unsafe(link_section = "__libfuzzer_extra_counters")]
static LAYOUT_SEEN: [AtomicU8; 256] = [const { AtomicU8::new(0) }; 256];

fuzz_target!(|input: &[u8]| {
    if check::decode(input) {
        LAYOUT_SEEN[usize::from(input[0]) % LAYOUTS.len()].fetch_add(1, Ordering::Relaxed);
    }
});
