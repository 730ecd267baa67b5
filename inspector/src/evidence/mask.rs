//! Evidence without the addresses of clients, for those who may see the rest.
//!
//! A client's address is what was asked about (`--source`), what the kernel was asked for a route
//! as, what a WireGuard peer may send from, and every member that is named as a source or a client.
//! Each is replaced, wherever it stands as a word, by one of a range that nobody has, the same for
//! the same. The entries of maps stay: they are of Services and backends. Of the asked source as
//! many bits stay as the source ranges of the frontends compare.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use serde_json::Value;

use super::{Evidence, Hex, Subject, file::Document, tables::Tables};

/// Why evidence could not be masked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MaskError {
    /// What is left is no evidence.
    #[error("the evidence cannot be masked: {0}")]
    Malformed(String),
}

/// Names of members that hold a client's address.
const NAMES: [&str; 6] = ["source", "client", "saddr", "src", "allowed", "endpoint"];
/// Parts in which no client is named, and whose bytes verdicts rest on.
const KEPT: [&str; 5] = ["maps", "maglev", "bpffs", "attachments", "sha256"];

/// The parts whose packets were made here, with packets and map keys in hexadecimal digits.
const MADE_HERE: [&str; 2] = ["simulation", "injection"];
/// Its members that hold them.
const BYTES: [&str; 4] = ["packet_in", "packet_out", "key", "value"];

/// The addresses that were replaced, with what replaces them.
#[derive(Default)]
struct Names {
    by_address: BTreeMap<IpAddr, IpAddr>,
    counts: [u32; 2],
}

impl Names {
    fn name(&mut self, address: IpAddr) {
        if self.by_address.contains_key(&address) || address.is_unspecified() {
            return;
        }
        let count = &mut self.counts[usize::from(address.is_ipv6())];
        *count += 1;
        // Of 198.18.0.0/15 (benchmarks) and 2001:db8::/32 (documentation).
        let name = if address.is_ipv4() {
            IpAddr::from(Ipv4Addr::from(0xc612_0000 | *count & 0x1_ffff))
        } else {
            IpAddr::from(Ipv6Addr::from(0x2001_0db8_u128 << 96 | u128::from(*count)))
        };
        self.by_address.insert(address, name);
    }
}

/// The evidence without clients' addresses, with a hash of its own.
///
/// # Errors
/// [`MaskError`].
pub fn clients(document: &Document) -> Result<Document, MaskError> {
    let mut value = document.as_json().clone();
    let mut names = Names::default();
    if let Subject::Vip(query) = document.evidence.subject
        && let Some(source) = query.source
    {
        let kept = compared_bits(&document.evidence, source);
        let masked = truncate(source, kept);
        names.by_address.insert(source, masked);
    }
    each_part(&mut value, &mut |name, part| {
        // They come from nobody, or from the source that was asked for.
        if !MADE_HERE.contains(&name) {
            collect(part, false, &mut names);
        }
    });
    // Addresses of the node, the VIP and next hops are no clients'.
    for address in own(&document.evidence) {
        names.by_address.remove(&address);
    }
    each_part(&mut value, &mut |name, part| {
        replace(part, &names.by_address);
        if MADE_HERE.contains(&name) {
            replace_bytes(part, &names.by_address);
        }
    });
    let text = serde_json::to_vec(&value).map_err(|e| MaskError::Malformed(e.to_string()))?;
    Document::resealed(&text).map_err(|error| MaskError::Malformed(error.to_string()))
}

/// Addresses that stay: those of the node's devices, of neighbours and gateways, and the VIP.
fn own(evidence: &Evidence) -> Vec<IpAddr> {
    let mut all = Vec::new();
    if let Subject::Vip(query) = evidence.subject {
        all.push(query.address);
    }
    let Some(network) = &evidence.network else { return all };
    for link in &network.links {
        let addresses =
            link.addresses.iter().filter_map(|one| one.split('/').next()?.parse::<IpAddr>().ok());
        all.extend(addresses);
    }
    all.extend(network.neighbours.iter().map(|entry| entry.address));
    for route in &network.routes {
        all.push(route.destination);
        if let Ok(answer) = &route.answer {
            all.extend(answer.gateway);
            all.extend(answer.source);
        }
    }
    all
}

/// How many leading bits of a source the source ranges of the VIP's frontends compare at most.
fn compared_bits(evidence: &Evidence, source: IpAddr) -> u32 {
    let tables = Tables::new(evidence);
    let all = tables.source_ranges.values().flatten();
    let bits = all
        .filter(|range| range.address.is_ipv4() == source.is_ipv4())
        .map(|range| u32::from(range.prefix_len));
    bits.max().unwrap_or(0)
}

/// The address with the bits behind the first `bits` replaced by zeros.
fn truncate(address: IpAddr, bits: u32) -> IpAddr {
    match address {
        IpAddr::V4(address) => {
            let mask = u32::MAX.checked_shl(32 - bits.min(32)).unwrap_or(0);
            Ipv4Addr::from(u32::from(address) & mask).into()
        }
        IpAddr::V6(address) => {
            let mask = u128::MAX.checked_shl(128 - bits.min(128)).unwrap_or(0);
            Ipv6Addr::from(u128::from(address) & mask).into()
        }
    }
}

fn each_part(value: &mut Value, act: &mut dyn FnMut(&str, &mut Value)) {
    if let Value::Object(members) = value {
        for (name, part) in members.iter_mut() {
            if !KEPT.contains(&name.as_str()) {
                act(name, part);
            }
        }
    }
}

/// Finds the addresses in members that hold clients'.
fn collect(value: &mut Value, is_client: bool, names: &mut Names) {
    match value {
        Value::String(text) if is_client => {
            let address = text.split('/').next().unwrap_or_default();
            if let Ok(address) = address.parse() {
                names.name(address);
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| collect(item, is_client, names)),
        Value::Object(members) => {
            for (name, member) in members.iter_mut() {
                collect(member, NAMES.contains(&name.as_str()), names);
            }
        }
        _ => {}
    }
}

/// Replaces addresses where they stand as words.
fn replace(value: &mut Value, names: &BTreeMap<IpAddr, IpAddr>) {
    match value {
        Value::String(text) => {
            for (address, name) in names {
                *text = replace_word(text, &address.to_string(), &name.to_string());
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| replace(item, names)),
        Value::Object(members) => members.values_mut().for_each(|member| replace(member, names)),
        _ => {}
    }
}

/// Replaces addresses where they stand as bytes, in hexadecimal digits.
fn replace_bytes(value: &mut Value, names: &BTreeMap<IpAddr, IpAddr>) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(|item| replace_bytes(item, names)),
        Value::Object(members) => {
            for (name, member) in members.iter_mut() {
                match member {
                    Value::String(text) if BYTES.contains(&name.as_str()) => {
                        for (&address, &name) in names {
                            *text = replace_digits(text, &digits(address), &digits(name));
                        }
                    }
                    member => replace_bytes(member, names),
                }
            }
        }
        _ => {}
    }
}

/// The bytes of an address as they stand in a packet.
fn digits(address: IpAddr) -> String {
    match address {
        IpAddr::V4(address) => Hex(&address.octets()).to_string(),
        IpAddr::V6(address) => Hex(&address.octets()).to_string(),
    }
}

/// Replaces digits that begin at a byte.
fn replace_digits(text: &str, digits: &str, by: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(byte) = rest.get(..2) {
        if rest.starts_with(digits) {
            out.push_str(by);
            rest = &rest[digits.len()..];
        } else {
            out.push_str(byte);
            rest = &rest[2..];
        }
    }
    out.push_str(rest);
    out
}

/// Replaces a word that is no part of a longer address.
fn replace_word(text: &str, word: &str, by: &str) -> String {
    let part_of_address = |c: char| c.is_ascii_hexdigit() || c == '.';
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(word) {
        let (before, after) = (&rest[..at], &rest[at + word.len()..]);
        let bound = !before.ends_with(part_of_address) && !after.starts_with(part_of_address);
        out.push_str(before);
        out.push_str(if bound { by } else { word });
        rest = after;
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_replaced_whole() {
        for (text, shown) in [
            ("10.0.0.1", "X"),
            ("10.0.0.1:80", "X:80"),
            ("from 10.0.0.1 to 10.0.0.11", "from X to 10.0.0.11"),
            ("110.0.0.1", "110.0.0.1"),
            ("10.0.0.1/32,10.0.0.1", "X/32,X"),
        ] {
            assert_eq!(replace_word(text, "10.0.0.1", "X"), shown);
        }
    }

    #[test]
    fn bytes_are_replaced_where_they_begin() {
        let name = |text: &str| replace_digits(text, "c0a80263", "00000000");
        assert_eq!(name("4500c0a80263c0a80214"), "450000000000c0a80214");
        // Half a byte off it is something else.
        assert_eq!(name("0c0a802630"), "0c0a802630");
        assert_eq!(name("c0a802"), "c0a802");
    }

    #[test]
    fn a_source_keeps_the_bits_that_are_compared() {
        let source: IpAddr = "10.9.9.9".parse().expect("an address");
        assert_eq!(truncate(source, 0).to_string(), "0.0.0.0");
        assert_eq!(truncate(source, 8).to_string(), "10.0.0.0");
        assert_eq!(truncate(source, 32), source);
        let source: IpAddr = "fd00::9:9".parse().expect("an address");
        assert_eq!(truncate(source, 0).to_string(), "::");
        assert_eq!(truncate(source, 128), source);
    }
}
