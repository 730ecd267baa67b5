//! What is watched, as user space has set it.

use aya_ebpf::bindings::BPF_F_NO_PREALLOC;
use aya_ebpf::macros::map;
use aya_ebpf::maps::{Array, HashMap};
use inspector_common::filter::Sets;
use inspector_common::observe::{Address, Endpoint, SIEVE_WORDS, Settings};

/// User space sets it before it loads; the verifier then knows every offset as a constant.
#[unsafe(no_mangle)]
static SETTINGS: Settings = Settings {
    netns: 0,
    has_clients: 0,
    // Only the layout matters here.
    // SAFETY: plain numbers, for which all zeros are valid.
    offsets: unsafe { core::mem::zeroed() },
};

#[map]
static SIEVE: Array<[u64; SIEVE_WORDS]> = Array::with_max_entries(1, 0);

#[map]
static ADDRESSES: HashMap<Address, u32> = HashMap::with_max_entries(65_536, BPF_F_NO_PREALLOC);

#[map]
static ENDPOINTS: HashMap<Endpoint, u8> = HashMap::with_max_entries(262_144, BPF_F_NO_PREALLOC);

#[map]
static CLIENTS: HashMap<Address, u8> = HashMap::with_max_entries(65_536, BPF_F_NO_PREALLOC);

/// A setting, read so that the compiler does not take its initial value for it.
macro_rules! setting {
    ($($path:ident).+) => {{
        // SAFETY: a valid, aligned place that nothing writes to while a program runs.
        unsafe { core::ptr::read_volatile(&raw const $crate::watched::settings().$($path).+) }
    }};
}
pub(crate) use setting;

#[inline(always)]
pub fn settings() -> &'static Settings {
    &SETTINGS
}

/// The sets of the plan.
pub struct Watched;

impl Sets for Watched {
    #[inline(always)]
    fn maybe(&self, address: &Address) -> bool {
        let bit = address.bit();
        let Some(sieve) = SIEVE.get_ptr(0) else { return false };
        // SAFETY: the element lives as long as the program; a word that is being written may have
        // the new bit or not.
        let word = unsafe { (*sieve)[(bit >> 6) as usize & (SIEVE_WORDS - 1)] };
        word >> (bit & 63) & 1 != 0
    }

    #[inline(always)]
    fn roles(&self, address: &Address) -> u32 {
        // SAFETY: a u32 is read at once, and is valid whatever a concurrent update writes.
        unsafe { ADDRESSES.get(address) }.copied().unwrap_or(0)
    }

    #[inline(always)]
    fn endpoint(&self, endpoint: &Endpoint) -> bool {
        ENDPOINTS.get_ptr(endpoint).is_some()
    }

    #[inline(always)]
    fn client(&self, address: &Address) -> bool {
        setting!(has_clients) == 0 || CLIENTS.get_ptr(address).is_some()
    }
}

/// Whether the address matters as a neighbour.
#[inline(always)]
pub fn is_neighbour(address: &Address) -> bool {
    address.family != 0 && Watched.maybe(address) && Watched.roles(address) != 0
}
