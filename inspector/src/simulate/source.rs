//! Whose packet it is to be: addresses that belong to nobody, and that the kernel's test run can
//! carry.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::{cilium::mac::Mac, judge::targets::Ranges};

/// The client on a device with Ethernet headers: of the ranges for documentation (RFC 5737, 3849).
const CLIENT_V4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 77);
const CLIENT_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0x77);

/// The client on a device without: its bytes 0 and 1 (IPv4), or 4 and 5 (IPv6), are those of the
/// Ethernet type, see [`fits`].
const L3_CLIENT_V4: Ipv4Addr = Ipv4Addr::new(8, 0, 0, 77);
const L3_CLIENT_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0x86dd, 0, 0, 0, 0, 0x77);

/// Its MAC address: of the range for documentation (RFC 7042).
pub const CLIENT_MAC: Mac = Mac([0, 0, 0x5e, 0, 0x53, 0x77]);

/// Why the source on a device without Ethernet header is what it is.
pub const L3_TRICK: &str = "the kernel's test run takes bytes 12 and 13 for an Ethernet type, and \
     a packet without Ethernet header has its source address there: only sources in 8.0.0.0/16, or \
     xxxx:xxxx:86dd::/48, can be simulated";

/// Source ports of packets, one after the other: of those that Linux gives to clients, from any one
/// on.
#[derive(Debug)]
pub struct Ports(u16);

impl Ports {
    const ALL: std::ops::Range<u16> = 32_768..60_999;

    /// Begins at any of them.
    #[must_use]
    pub fn from_any() -> Self {
        Self(fastrand::u16(Self::ALL))
    }

    /// The one that was handed out last.
    #[must_use]
    pub fn last(&self) -> u16 {
        self.0
    }

    /// The next one.
    pub fn another(&mut self) -> u16 {
        self.0 = if self.0 >= Self::ALL.end { Self::ALL.start } else { self.0 + 1 };
        self.0
    }
}

/// Addresses of controls: of the other ranges for documentation. More than one, in case somebody
/// has made one of them a frontend.
pub fn controls(v6: bool) -> impl Iterator<Item = IpAddr> {
    (77..=84).map(move |last: u8| {
        if v6 {
            IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0xffff, 0, 0, 0, 0, last.into()))
        } else {
            IpAddr::V4(Ipv4Addr::new(203, 0, 113, last))
        }
    })
}

/// Whether a packet from this source can be simulated on a device: on one without Ethernet header
/// the source must look like the Ethernet type that the kernel's test run looks for.
#[must_use]
pub fn fits(source: IpAddr, ethernet: bool) -> bool {
    ethernet
        || match source {
            IpAddr::V4(address) => address.octets()[..2] == [0x08, 0x00],
            IpAddr::V6(address) => address.octets()[4..6] == [0x86, 0xdd],
        }
}

/// A client that nobody is.
#[must_use]
pub fn nobody(v6: bool, ethernet: bool) -> IpAddr {
    match (v6, ethernet) {
        (false, true) => CLIENT_V4.into(),
        (true, true) => CLIENT_V6.into(),
        (false, false) => L3_CLIENT_V4.into(),
        (true, false) => L3_CLIENT_V6.into(),
    }
}

/// Clients that nobody is, in the order in which they are used: the next ones are for when a run
/// that was killed has left something of the first.
pub fn nobodies(v6: bool, ethernet: bool) -> impl Iterator<Item = IpAddr> {
    (0..16).map(move |more: u8| match nobody(v6, ethernet) {
        IpAddr::V4(first) => Ipv4Addr::from(u32::from(first) + u32::from(more)).into(),
        IpAddr::V6(first) => Ipv6Addr::from(u128::from(first) + u128::from(more)).into(),
    })
}

/// A client that a frontend with source ranges lets through.
#[must_use]
pub fn admitted(ranges: &Ranges, v6: bool, ethernet: bool, taken: &[IpAddr]) -> Option<IpAddr> {
    let usual = nobody(v6, ethernet);
    let of_ranges = ranges.list.iter().filter(|_| !ranges.deny).filter_map(|range| within(range));
    std::iter::once(usual).chain(of_ranges).find(|&source| {
        source.is_ipv6() == v6
            && fits(source, ethernet)
            && ranges.admit(source)
            && !taken.contains(&source)
    })
}

/// An address inside of a range: its 77th where it is large enough, else its last but one.
fn within(range: &str) -> Option<IpAddr> {
    let (start, bits) = range.split_once('/')?;
    let (start, bits): (IpAddr, u32) = (start.parse().ok()?, bits.parse().ok()?);
    Some(match start {
        IpAddr::V4(start) => {
            let room = 32_u32.checked_sub(bits)?;
            let host = if room > 7 { 77 } else { (1_u32 << room).saturating_sub(2) };
            Ipv4Addr::from(u32::from(start) | host).into()
        }
        IpAddr::V6(start) => {
            let room = 128_u32.checked_sub(bits)?;
            let host = if room > 7 { 0x77 } else { (1_u128 << room).saturating_sub(2) };
            Ipv6Addr::from(u128::from(start) | host).into()
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_fits_everywhere() {
        for v6 in [false, true] {
            for ethernet in [false, true] {
                let source = nobody(v6, ethernet);
                assert!(fits(source, ethernet));
                assert_eq!(source.is_ipv6(), v6);
            }
            assert!(!fits(nobody(v6, true), false));
        }
    }

    #[test]
    fn a_source_inside_of_a_range() {
        for (range, expected) in [
            ("192.168.2.0/24", "192.168.2.77"),
            ("10.0.0.0/8", "10.0.0.77"),
            ("192.168.2.50/32", "192.168.2.50"),
            ("192.168.2.48/30", "192.168.2.50"),
            ("192.168.2.48/31", "192.168.2.48"),
            ("fd00:2::/64", "fd00:2::77"),
            ("fd00:2::50/128", "fd00:2::50"),
            ("0.0.0.0/0", "0.0.0.77"),
        ] {
            let source = within(range).unwrap();
            assert_eq!(source, expected.parse::<IpAddr>().unwrap(), "{range}");
            assert!(Ranges { deny: false, list: vec![range.to_owned()] }.admit(source), "{range}");
        }
        assert_eq!(within("rubbish"), None);
        assert_eq!(within("10.0.0.0/33"), None);
    }

    #[test]
    fn whom_ranges_let_through() {
        let allow = |range: &str| Ranges { deny: false, list: vec![range.to_owned()] };
        let found = |ranges: &Ranges, ethernet| admitted(ranges, false, ethernet, &[]);
        let usual: IpAddr = CLIENT_V4.into();
        assert_eq!(found(&allow("192.0.2.0/24"), true), Some(usual));
        assert_eq!(found(&allow("192.168.2.0/24"), true), Some(IpAddr::from([192, 168, 2, 77])));
        assert_eq!(found(&allow("192.168.2.0/24"), false), None);
        assert_eq!(found(&allow("0.0.0.0/0"), false), Some(L3_CLIENT_V4.into()));
        let deny = Ranges { deny: true, list: vec!["192.168.2.0/24".to_owned()] };
        assert_eq!(found(&deny, true), Some(usual));
        let taken = [IpAddr::from([192, 168, 2, 77])];
        assert_eq!(admitted(&allow("192.168.2.0/24"), false, true, &taken), None);
    }
}
