//! What the hooks reported, as a pcapng file: one interface for each hook of each device, and with
//! each packet the journey that it belongs to, as a comment.
//!
//! No payload leaves the kernel, so each packet holds headers alone, with its full length beside
//! them. Where an observer kept the bytes of the headers, these are written; else they are made
//! anew from what was parsed: options are missing then, and checksums are zero.

use std::borrow::Cow;
use std::collections::HashMap;
use std::io::{self, Write};
use std::net::IpAddr;
use std::time::Duration;

use pcap_file::pcapng::blocks::enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption};
use pcap_file::pcapng::blocks::interface_description::{
    InterfaceDescriptionBlock, InterfaceDescriptionOption,
};
use pcap_file::pcapng::{PcapNgBlock as _, PcapNgWriter};
use pcap_file::{DataLink, PcapError};

use super::journey::Context;
use super::sighting::{Hook, Packet, Sighting, Tier};

const TCP: u8 = 6;
const UDP: u8 = 17;

/// Writes sightings as a capture.
pub struct Writer<W: Write> {
    out: PcapNgWriter<W>,
    /// Interfaces by hook, tier and device.
    interfaces: HashMap<(Hook, Tier, u32), u32>,
    /// What is added to a monotonic time to get the time of day.
    offset: Duration,
}

fn failed(error: PcapError) -> io::Error {
    match error {
        PcapError::IoError(error) => error,
        other => io::Error::other(other),
    }
}

impl<W: Write> Writer<W> {
    /// Begins a capture. `offset` is the time of day at which `CLOCK_MONOTONIC` was zero, since
    /// 1970.
    ///
    /// # Errors
    /// The error of the writer.
    pub fn new(out: W, offset: Duration) -> io::Result<Self> {
        let writer = PcapNgWriter::new(out).map_err(failed)?;
        Ok(Self { out: writer, interfaces: HashMap::new(), offset })
    }

    /// Writes a packet; `comment` is what is known of its journey. A sighting without a packet is
    /// passed over.
    ///
    /// # Errors
    /// The error of the writer.
    pub fn write(
        &mut self,
        sighting: &Sighting,
        comment: &str,
        context: &Context,
    ) -> io::Result<()> {
        let Some(packet) = &sighting.packet else { return Ok(()) };
        let data: Cow<'_, [u8]> = match &sighting.headers {
            Some(headers) => Cow::Borrowed(headers.as_ref()),
            None => Cow::Owned(headers(packet)),
        };
        let interface_id = self.interface(sighting, context)?;
        let block = EnhancedPacketBlock {
            interface_id,
            timestamp: self.offset + Duration::from_nanos(sighting.monotonic_ns),
            // What a damaged length says of a packet shorter than its headers is not believed.
            original_len: packet.length.max(u32::try_from(data.len()).unwrap_or(u32::MAX)),
            data,
            options: vec![EnhancedPacketOption::Comment(Cow::Borrowed(comment))],
        };
        self.out.write_block(&block.into_block()).map_err(failed)?;
        Ok(())
    }

    /// Flushes the writer.
    ///
    /// # Errors
    /// The error of the writer.
    pub fn finish(mut self) -> io::Result<()> {
        self.out.get_mut().flush()
    }

    /// The interface that stands for a hook, which is described at first use.
    fn interface(&mut self, sighting: &Sighting, context: &Context) -> io::Result<u32> {
        let key = (sighting.hook, sighting.tier, sighting.ifindex);
        if let Some(id) = self.interfaces.get(&key) {
            return Ok(*id);
        }
        let word = |value: serde_json::Result<serde_json::Value>| {
            value.ok().and_then(|value| Some(value.as_str()?.to_owned())).unwrap_or_default()
        };
        let hook = word(serde_json::to_value(sighting.hook));
        let tier = word(serde_json::to_value(sighting.tier));
        let name = match sighting.ifindex {
            0 => hook.clone(),
            ifindex => format!("{} {hook}", context.device(ifindex)),
        };
        let block = InterfaceDescriptionBlock {
            linktype: DataLink::RAW,
            snaplen: 0,
            options: vec![
                InterfaceDescriptionOption::IfName(Cow::Owned(name)),
                InterfaceDescriptionOption::IfDescription(Cow::Owned(format!("{hook} ({tier})"))),
                // Nanoseconds.
                InterfaceDescriptionOption::IfTsResol(9),
            ],
        };
        self.out.write_block(&block.into_block()).map_err(failed)?;
        let id = u32::try_from(self.interfaces.len()).unwrap_or(u32::MAX);
        self.interfaces.insert(key, id);
        Ok(id)
    }
}

/// The headers of a packet, as bytes from the IP header on.
fn headers(packet: &Packet) -> Vec<u8> {
    let transport = transport(packet);
    let mut bytes = Vec::with_capacity(60);
    match (packet.source, packet.destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            bytes.extend([0x45, 0]);
            bytes.extend(u16::try_from(packet.length).unwrap_or(0).to_be_bytes());
            bytes.extend(packet.ip_id.to_be_bytes());
            bytes.extend([0, 0, packet.ttl, packet.protocol, 0, 0]);
            bytes.extend(source.octets());
            bytes.extend(destination.octets());
        }
        (source, destination) => {
            let v6 = |address: IpAddr| match address {
                IpAddr::V4(address) => address.to_ipv6_mapped(),
                IpAddr::V6(address) => address,
            };
            bytes.extend((0x6000_0000 | packet.flow_label & 0xf_ffff).to_be_bytes());
            let length = u16::try_from(packet.length.saturating_sub(40)).unwrap_or(0);
            bytes.extend(length.to_be_bytes());
            bytes.extend([packet.protocol, packet.ttl]);
            bytes.extend(v6(source).octets());
            bytes.extend(v6(destination).octets());
        }
    }
    bytes.extend(transport);
    bytes
}

fn transport(packet: &Packet) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Some((kind, code)) = packet.icmp {
        bytes.extend([kind, code, 0, 0, 0, 0, 0, 0]);
        bytes.extend(packet.quoted.as_deref().map(headers).unwrap_or_default());
        return bytes;
    }
    let Some((source, destination)) = packet.ports else { return bytes };
    bytes.extend(source.to_be_bytes());
    bytes.extend(destination.to_be_bytes());
    match (packet.protocol, packet.tcp) {
        (TCP, Some((sequence, acknowledged, flags))) => {
            bytes.extend(sequence.to_be_bytes());
            bytes.extend(acknowledged.to_be_bytes());
            bytes.extend([0x50, flags, 0, 0, 0, 0, 0, 0]);
        }
        (UDP, _) => {
            let length = packet.payload_length.saturating_add(8);
            bytes.extend(u16::try_from(length).unwrap_or(0).to_be_bytes());
            bytes.extend([0, 0]);
        }
        _ => {}
    }
    bytes
}
