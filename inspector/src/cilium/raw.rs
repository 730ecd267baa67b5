//! Borrowing the raw structs from map bytes, and the pieces that all of them share.
//!
//! Every raw struct is `#[repr(C)]`, made of byte arrays and the types of
//! [`order`](super::order), and therefore [`Unaligned`]: any slice of the right length can be
//! viewed as one without a copy.

use std::{
    fmt::Debug,
    hash::Hash,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{
    error::{DecodeError, EncodeError},
    layout::Layout,
};

/// Declares raw structs with the derives that they all need, and checks their size at compile time.
macro_rules! raw_struct {
    ($(
        $(#[$meta:meta])*
        struct $name:ident $(<$param:ident $(, const $size:ident: usize)?>)? { $($fields:tt)* }
    )*) => { $(
        $(#[$meta])*
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, Hash,
            zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable,
            zerocopy::Unaligned,
        )]
        #[repr(C)]
        pub struct $name $(<$param $(, const $size: usize)?>)? { $($fields)* }
    )* };
}
pub(super) use raw_struct;

/// Checks the sizes of raw structs at compile time.
macro_rules! assert_sizes {
    ($($name:ty = $size:literal),* $(,)?) => { $( const _: () = assert!(size_of::<$name>() == $size); )* };
}
pub(super) use assert_sizes;

/// The bytes of an IPv4 or an IPv6 address in a raw struct.
pub trait RawAddress:
    FromBytes + IntoBytes + KnownLayout + Immutable + Unaligned + Copy + Eq + Hash + Debug
{
    /// The address.
    fn to_ip(self) -> IpAddr;
}

impl RawAddress for [u8; 4] {
    fn to_ip(self) -> IpAddr {
        IpAddr::V4(Ipv4Addr::from(self))
    }
}

impl RawAddress for [u8; 16] {
    fn to_ip(self) -> IpAddr {
        IpAddr::V6(Ipv6Addr::from(self))
    }
}

/// Views `bytes` as the key `T` of `layout`, without a copy.
///
/// # Errors
/// [`DecodeError::Size`] if the length is not that of `T`.
pub fn key<'a, T: FromBytes + KnownLayout + Immutable + Unaligned>(
    layout: &'static Layout,
    bytes: &'a [u8],
) -> Result<&'a T, DecodeError> {
    view(layout, "key", bytes)
}

/// Views `bytes` as the value `T` of `layout`, without a copy.
///
/// # Errors
/// [`DecodeError::Size`] if the length is not that of `T`.
pub fn value<'a, T: FromBytes + KnownLayout + Immutable + Unaligned>(
    layout: &'static Layout,
    bytes: &'a [u8],
) -> Result<&'a T, DecodeError> {
    view(layout, "value", bytes)
}

fn view<'a, T: FromBytes + KnownLayout + Immutable + Unaligned>(
    layout: &'static Layout,
    part: &'static str,
    bytes: &'a [u8],
) -> Result<&'a T, DecodeError> {
    T::ref_from_bytes(bytes).map_err(|_| DecodeError::Size {
        map: layout.name,
        part,
        expected: size_of::<T>(),
        found: bytes.len(),
    })
}

/// The bytes of a raw key and a raw value.
pub(super) fn pair<K, V>(key: &K, value: &V) -> (Vec<u8>, Vec<u8>)
where
    K: IntoBytes + Immutable,
    V: IntoBytes + Immutable,
{
    (key.as_bytes().to_vec(), value.as_bytes().to_vec())
}

/// The first and the last 8 of 16 bytes.
pub(super) fn halves(bytes: [u8; 16]) -> [[u8; 8]; 2] {
    zerocopy::transmute!(bytes)
}

/// Fails if `address` is not of the family that `layout` holds.
pub(super) fn check_family(layout: &'static Layout, address: IpAddr) -> Result<(), EncodeError> {
    use super::layout::Family;
    match (layout.family, address) {
        (Some(Family::V4), IpAddr::V6(_)) | (Some(Family::V6), IpAddr::V4(_)) => {
            Err(EncodeError::Family { map: layout.name, address })
        }
        _ => Ok(()),
    }
}

/// An address of either family in 16 bytes, with a byte elsewhere that tells the family: the form
/// of the keys that one map has for both (`cilium_lxc`, `cilium_ipcache`, `cilium_node_map`).
pub(super) mod either {
    use super::{DecodeError, IpAddr, Ipv4Addr, Ipv6Addr, Layout};

    /// `ENDPOINT_KEY_IPV4`
    const V4: u8 = 1;
    /// `ENDPOINT_KEY_IPV6`
    const V6: u8 = 2;

    /// The address; of IPv4 the first 4 bytes count, the rest is padding.
    pub fn decode(
        layout: &'static Layout,
        family: u8,
        address: [u8; 16],
    ) -> Result<IpAddr, DecodeError> {
        match family {
            V4 => Ok(v4(address)),
            V6 => Ok(IpAddr::V6(Ipv6Addr::from(address))),
            other => Err(DecodeError::Field {
                map: layout.name,
                field: "family",
                found: other.into(),
                expected: "1 (IPv4) or 2 (IPv6)",
            }),
        }
    }

    /// The IPv4 address in the first 4 bytes.
    pub fn v4(address: [u8; 16]) -> IpAddr {
        let [a, b, c, d, ..] = address;
        IpAddr::V4(Ipv4Addr::new(a, b, c, d))
    }

    /// The family byte and the 16 bytes of an address.
    pub fn encode(address: IpAddr) -> (u8, [u8; 16]) {
        match address {
            IpAddr::V4(address) => {
                let mut bytes = [0; 16];
                bytes[..4].copy_from_slice(&address.octets());
                (V4, bytes)
            }
            IpAddr::V6(address) => (V6, address.octets()),
        }
    }
}

/// Length in bits of an address of the family of `address`.
pub(super) fn address_bits(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

/// The prefix length of the address part, where the key's own counts 32 fixed bits before it.
///
/// # Errors
/// [`DecodeError::Field`] if it is less than 32 or more than 32 and the address.
pub(super) fn prefix_len(
    layout: &'static Layout,
    found: u32,
    address: IpAddr,
) -> Result<u8, DecodeError> {
    let (bits, expected) = if address.is_ipv4() {
        (32, "from 32 to 64 (IPv4)")
    } else {
        (128, "from 32 to 160 (IPv6)")
    };
    found
        .checked_sub(32)
        .filter(|length| *length <= bits)
        .and_then(|length| u8::try_from(length).ok())
        .ok_or(DecodeError::Field {
            map: layout.name,
            field: "prefix length",
            found: found.into(),
            expected,
        })
}
