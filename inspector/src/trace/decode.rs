//! From what a hook reports to a [`Sighting`].

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use inspector_common::observe::{
    Address, Event, FLAG_ARP, FLAG_FLOW, FLAG_MARK, FLAG_VALUE, hook, tier,
};
use inspector_common::packet::{Details, Ip};

use super::sighting::{Flow, Hook, Neighbour, Packet, RanProgram, Sighting, Tier};

/// Tiers by their number in events.
pub(super) const TIERS: [(u8, Tier); 4] = [
    (tier::TC, Tier::Tc),
    (tier::TRACEPOINT, Tier::Tracepoint),
    (tier::KPROBE, Tier::Kprobe),
    (tier::PROGRAM, Tier::Program),
];

/// Hooks by their number in events.
pub(super) const HOOKS: [(u8, Hook); 18] = [
    (hook::TC_INGRESS, Hook::TcIngress),
    (hook::TC_EGRESS, Hook::TcEgress),
    (hook::PROGRAM_ENTRY, Hook::ProgramEntry),
    (hook::PROGRAM_EXIT, Hook::ProgramExit),
    (hook::RECEIVE, Hook::Receive),
    (hook::ROUTE, Hook::Route),
    (hook::LOCAL_DELIVER, Hook::LocalDeliver),
    (hook::FORWARD, Hook::Forward),
    (hook::QUEUE, Hook::Queue),
    (hook::TRANSMIT, Hook::Transmit),
    (hook::NEIGH_CREATE, Hook::NeighCreate),
    (hook::NEIGH_RESOLVE, Hook::NeighResolve),
    (hook::NEIGH_SOLICIT, Hook::NeighSolicit),
    (hook::NEIGH_UPDATE, Hook::NeighUpdate),
    (hook::NEIGH_DEAD, Hook::NeighDead),
    (hook::DROP, Hook::Drop),
    (hook::TCP_RESET, Hook::TcpReset),
    (hook::ICMP_SEND, Hook::IcmpSend),
];

/// Why an event is no sighting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Undecoded {
    /// The packet's headers contradict themselves: somebody sent it so.
    Malformed,
    /// The event is not what our programs report.
    Unknown,
}

/// The bytes of the headers in an event, where there are any.
pub(super) fn headers(event: &Event) -> Option<Box<[u8]>> {
    let headers = event.headers.get(..usize::from(event.header_length))?;
    (!headers.is_empty()).then(|| headers.into())
}

/// Makes a sighting of an event, without the bytes of its [`headers`]. `reasons` are the names of the reasons of drops, if known;
/// `named` knows the programs that are traced.
pub(super) fn sighting(
    event: &Event,
    reasons: Option<&BTreeMap<u32, String>>,
    named: impl FnOnce(u32) -> Option<RanProgram>,
) -> Result<Sighting, Undecoded> {
    // Exhaustive, so that a new field is not forgotten here.
    let Event {
        monotonic_ns,
        skb,
        neighbour,
        source,
        gateway,
        ifindex,
        mark,
        length,
        value,
        tier,
        hook,
        flags,
        protocol,
        header_length,
        reserved: _,
        program,
        headers,
    } = *event;
    let by_number = |wanted: u8| move |(number, _): &&(u8, _)| *number == wanted;
    let (_, tier) = *TIERS.iter().find(by_number(tier)).ok_or(Undecoded::Unknown)?;
    let (_, hook) = *HOOKS.iter().find(|(number, _)| *number == hook).ok_or(Undecoded::Unknown)?;
    let headers = headers.get(..usize::from(header_length)).ok_or(Undecoded::Unknown)?;
    let value = (flags & FLAG_VALUE != 0).then_some(value);
    let is_flow = flags & FLAG_FLOW != 0;
    let packet = if headers.is_empty() || flags & FLAG_ARP != 0 {
        None
    } else {
        Some(packet(headers, length)?)
    };
    let flow = match (is_flow, source.ip(), neighbour.ip()) {
        (true, Some(source), Some(destination)) => {
            Some(Flow { source, destination, protocol, gateway: gateway.ip() })
        }
        (true, ..) => return Err(Undecoded::Unknown),
        _ => None,
    };
    let is_neighbour = matches!(hook, Hook::NeighCreate | Hook::NeighResolve | Hook::NeighSolicit)
        || matches!(hook, Hook::NeighUpdate | Hook::NeighDead);
    let neighbour = if is_flow { Address::NONE } else { neighbour };
    let state = value.filter(|_| is_neighbour).map(state_name);
    let detail = match (hook, value) {
        (Hook::Drop, Some(reason)) => {
            let name = reasons.and_then(|reasons| reasons.get(&reason)).cloned();
            Some(name.unwrap_or_else(|| format!("reason {reason}")))
        }
        (Hook::IcmpSend, Some(value)) => {
            Some(format!("type {}, code {}", value >> 8, value & 0xff))
        }
        (Hook::ProgramExit, Some(value)) => Some(verdict(value.cast_signed())),
        _ => None,
    };
    Ok(Sighting {
        monotonic_ns,
        hook,
        tier,
        ifindex,
        skb: Some(skb).filter(|&skb| skb != 0),
        packet,
        neighbour: neighbour.ip().map(|address| Neighbour { address, state }),
        mark: (flags & FLAG_MARK != 0).then_some(mark),
        program: (program != 0).then(|| named(program)).flatten(),
        detail,
        flow,
        asked: None,
        headers: None,
    })
}

/// What a program at tc returned, as number and name.
fn verdict(returned: i32) -> String {
    let name = match returned {
        -1 => "TC_ACT_UNSPEC",
        0 => "TC_ACT_OK",
        1 => "TC_ACT_RECLASSIFY",
        2 => "TC_ACT_SHOT",
        3 => "TC_ACT_PIPE",
        4 => "TC_ACT_STOLEN",
        5 => "TC_ACT_QUEUED",
        6 => "TC_ACT_REPEAT",
        7 => "TC_ACT_REDIRECT",
        8 => "TC_ACT_TRAP",
        other => return other.to_string(),
    };
    format!("{returned} {name}")
}

/// Reads the headers of a packet that is `length` long.
fn packet(headers: &[u8], length: u32) -> Result<Packet, Undecoded> {
    let ip = Ip::find(headers).ok_or(Undecoded::Malformed)?;
    let details = ip.details(headers, length).map_err(|_| Undecoded::Malformed)?;
    let quoted = details.quoted.and_then(|at| {
        let headers = headers.get(usize::try_from(at).ok()?..)?;
        let ip = Ip::find(headers)?;
        let details = ip.quoted_details(headers).ok()?;
        Some(Box::new(whole(&ip, &details, None)))
    });
    Ok(whole(&ip, &details, quoted))
}

fn whole(ip: &Ip, details: &Details, quoted: Option<Box<Packet>>) -> Packet {
    let Details {
        length,
        payload_length,
        flow_label,
        ip_id,
        ttl,
        is_fragment,
        protocol,
        ports,
        tcp,
        icmp,
        quoted: _,
    } = *details;
    Packet {
        source: ip.source(),
        destination: ip.destination(),
        protocol,
        ports,
        tcp,
        icmp,
        quoted,
        ip_id,
        flow_label,
        ttl,
        fragment: is_fragment,
        length,
        payload_length,
    }
}

/// Name of a neighbour's state (`NUD_…`).
pub(super) fn state_name(state: u32) -> String {
    match state {
        0 => "NONE",
        0x01 => "INCOMPLETE",
        0x02 => "REACHABLE",
        0x04 => "STALE",
        0x08 => "DELAY",
        0x10 => "PROBE",
        0x20 => "FAILED",
        0x40 => "NOARP",
        0x80 => "PERMANENT",
        other => return format!("state {other:#x}"),
    }
    .to_owned()
}

/// An address as netlink has it.
pub(super) fn address(bytes: &[u8]) -> Option<IpAddr> {
    if let Ok(octets) = <[u8; 4]>::try_from(bytes) {
        return Some(Ipv4Addr::from(octets).into());
    }
    <[u8; 16]>::try_from(bytes).ok().map(|octets| Ipv6Addr::from(octets).into())
}
