//! The socket reverse maps: how to show a socket that was connected to a backend the frontend that
//! it asked for.
//!
//! Layout: `struct ipv4_revnat_tuple`, `struct ipv4_revnat_entry` and their IPv6 forms of Cilium's
//! `bpf/bpf_sock.c`, the same from 1.10 to 1.21.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::{
    error::{DecodeError, EncodeError},
    layout::{Family, Layout},
    order::{HostU64, NetU16},
    raw::{self, RawAddress, assert_sizes, raw_struct},
};

raw_struct! {
    /// Key of the socket reverse maps: 16 bytes (IPv4) or 32 (IPv6).
    struct ReverseSkKey<A, const PAD: usize> {
        /// Cookie of the socket.
        pub cookie: HostU64,
        /// Backend address.
        pub address: A,
        /// Backend port.
        pub port: NetU16,
        /// Padding, zero.
        pub pad: [u8; PAD],
    }

    /// Value of the socket reverse maps: 8 bytes (IPv4) or 20 (IPv6).
    struct ReverseSkValue<A> {
        /// Frontend address.
        pub address: A,
        /// Frontend port.
        pub port: NetU16,
        /// Reverse NAT index of the frontend.
        pub rev_nat_index: NetU16,
    }
}
assert_sizes! {
    ReverseSkKey<[u8; 4], 2> = 16, ReverseSkKey<[u8; 16], 6> = 32,
    ReverseSkValue<[u8; 4]> = 8, ReverseSkValue<[u8; 16]> = 20,
}

/// A translated socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ReverseSk {
    /// Cookie of the socket.
    pub cookie: u64,
    /// Address of the backend that it talks to.
    pub backend: IpAddr,
    /// Port of the backend.
    pub backend_port: u16,
    /// Address of the frontend that it asked for.
    pub frontend: IpAddr,
    /// Port of the frontend.
    pub frontend_port: u16,
    /// Reverse NAT index of the frontend.
    pub rev_nat_index: u16,
}

impl ReverseSk {
    /// Reads an entry.
    ///
    /// # Errors
    /// [`DecodeError::Size`] if key or value are not as long as `layout` says.
    pub fn decode(layout: &'static Layout, key: &[u8], value: &[u8]) -> Result<Self, DecodeError> {
        match layout.family {
            Some(Family::V4) => Self::decode_as::<[u8; 4], 2>(layout, key, value),
            _ => Self::decode_as::<[u8; 16], 6>(layout, key, value),
        }
    }

    fn decode_as<A: RawAddress, const PAD: usize>(
        layout: &'static Layout,
        key: &[u8],
        value: &[u8],
    ) -> Result<Self, DecodeError> {
        let key: &ReverseSkKey<A, PAD> = raw::key(layout, key)?;
        let value: &ReverseSkValue<A> = raw::value(layout, value)?;
        Ok(Self {
            cookie: key.cookie.get(),
            backend: key.address.to_ip(),
            backend_port: key.port.get(),
            frontend: value.address.to_ip(),
            frontend_port: value.port.get(),
            rev_nat_index: value.rev_nat_index.get(),
        })
    }

    /// The bytes of key and value in `layout`.
    ///
    /// # Errors
    /// [`EncodeError::Family`] if one of the addresses is of the other family.
    pub fn encode(&self, layout: &'static Layout) -> Result<(Vec<u8>, Vec<u8>), EncodeError> {
        raw::check_family(layout, self.backend)?;
        match (self.backend, self.frontend) {
            (IpAddr::V4(backend), IpAddr::V4(frontend)) => {
                Ok(raw::pair(&self.key::<_, 2>(backend.octets()), &self.value(frontend.octets())))
            }
            (IpAddr::V6(backend), IpAddr::V6(frontend)) => {
                Ok(raw::pair(&self.key::<_, 6>(backend.octets()), &self.value(frontend.octets())))
            }
            (_, address) => Err(EncodeError::Family { map: layout.name, address }),
        }
    }

    fn key<A, const PAD: usize>(&self, address: A) -> ReverseSkKey<A, PAD> {
        ReverseSkKey {
            cookie: self.cookie.into(),
            address,
            port: self.backend_port.into(),
            pad: [0; PAD],
        }
    }

    fn value<A>(&self, address: A) -> ReverseSkValue<A> {
        ReverseSkValue {
            address,
            port: self.frontend_port.into(),
            rev_nat_index: self.rev_nat_index.into(),
        }
    }
}
