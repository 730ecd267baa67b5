//! Route netlink, asked and answered on one socket: the devices of this network namespace with
//! their XDP programs, and their clsact filters.

use std::{collections::BTreeMap, io};

use netlink_packet_core::{
    NLM_F_DUMP, NLM_F_REQUEST, NetlinkBuffer, NetlinkHeader, NetlinkMessage, NetlinkPayload,
    Nla as _,
};
use netlink_packet_route::{
    RouteNetlinkMessage,
    link::{LinkAttribute, LinkExtentMask, LinkMessage, LinkXdp, XdpAttached},
    tc::{TcAttribute, TcBpfFlags, TcFilterBpfOption, TcHandle, TcHeader, TcMessage, TcOption},
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

/// A device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Interface index.
    pub ifindex: u32,
    /// Name.
    pub name: String,
    /// Programs of XDP, with the mode.
    pub xdp: Vec<(XdpMode, u32)>,
}

/// Where an XDP program runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum XdpMode {
    /// In the driver.
    Native,
    /// In the stack.
    Generic,
    /// In the hardware.
    Offload,
}

/// What has clsact filters on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Classifier {
    /// Whether there are filters at egress too: clsact has them, the older ingress qdisc has not.
    pub egress: bool,
    /// The block that the ingress filters are in, if other devices share it.
    pub ingress_block: Option<u32>,
    /// The block that the egress filters are in, if other devices share it.
    pub egress_block: Option<u32>,
}

/// A direction of clsact.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// `ffff:fff2`
    Ingress,
    /// `ffff:fff3`
    Egress,
}

/// A filter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter {
    /// Kind: `bpf`, `flower`, ….
    pub kind: String,
    /// Priority: lower ones come first.
    pub priority: u16,
    /// Ethertype that it is for, host byte order; 3 (`ETH_P_ALL`) is every one.
    pub protocol: u16,
    /// Handle.
    pub handle: u32,
    /// Chain: only those in chain 0 are met without a `goto`.
    pub chain: u32,
    /// Of kind `bpf`.
    pub bpf: Option<BpfFilter>,
}

/// What a filter of kind `bpf` runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BpfFilter {
    /// Program id; nothing for a filter of classic BPF.
    pub program: Option<u32>,
    /// Name (`TCA_BPF_NAME`).
    pub name: Option<String>,
    /// Whether its return value is the verdict.
    pub direct_action: bool,
}

/// A socket for route netlink of the network namespace in which it was opened.
#[derive(Debug)]
pub struct RouteSocket {
    socket: Socket,
    sequence: u32,
    buffer: Vec<u8>,
    /// Messages that could not be understood, with why.
    pub malformed: Vec<String>,
}

impl RouteSocket {
    /// Opens it.
    ///
    /// # Errors
    /// The error of `socket(2)`, `bind(2)` or `connect(2)`.
    pub fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        // The kernel fills at most 32 KiB at once.
        Ok(Self { socket, sequence: 0, buffer: Vec::with_capacity(1 << 16), malformed: Vec::new() })
    }

    /// The devices, by index.
    ///
    /// # Errors
    /// The error of the request, or `Interrupted` if the list changed again and again meanwhile.
    pub fn devices(&mut self) -> io::Result<Vec<Device>> {
        let mut request = LinkMessage::default();
        request.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
        let mut devices = Vec::new();
        self.dump(RouteNetlinkMessage::GetLink(request), |answer| match answer {
            None => devices.clear(),
            Some(RouteNetlinkMessage::NewLink(link)) => devices.push(device(&link)),
            Some(_) => {}
        })?;
        devices.sort_by_key(|device: &Device| device.ifindex);
        Ok(devices)
    }

    /// The devices that have a clsact or ingress qdisc.
    ///
    /// # Errors
    /// As [`Self::devices`].
    pub fn classifiers(&mut self) -> io::Result<BTreeMap<u32, Classifier>> {
        let mut found = BTreeMap::new();
        let request = TcMessage::default();
        self.dump(RouteNetlinkMessage::GetQueueDiscipline(request), |answer| match answer {
            None => found.clear(),
            Some(RouteNetlinkMessage::NewQueueDiscipline(qdisc)) => {
                if let Some((ifindex, classifier)) = classifier(&qdisc) {
                    found.insert(ifindex, classifier);
                }
            }
            Some(_) => {}
        })?;
        Ok(found)
    }

    /// The filters of one direction of a device's clsact qdisc, in the order in which they run.
    ///
    /// # Errors
    /// As [`Self::devices`]. A device that is gone has none.
    pub fn filters(&mut self, ifindex: u32, direction: Direction) -> io::Result<Vec<Filter>> {
        let mut request = TcMessage::default();
        request.header.index = ifindex.cast_signed();
        request.header.parent = TcHandle {
            major: 0xffff,
            minor: match direction {
                Direction::Ingress => 0xfff2,
                Direction::Egress => 0xfff3,
            },
        };
        let mut filters = Vec::new();
        self.dump(RouteNetlinkMessage::GetTrafficFilter(request), |answer| match answer {
            None => filters.clear(),
            Some(RouteNetlinkMessage::NewTrafficFilter(message)) => filters.extend(filter(message)),
            Some(_) => {}
        })?;
        Ok(filters)
    }

    /// Sends a request for a list and hands out its members; `None` means that what was handed
    /// out is void, since the list changed, and comes again.
    fn dump(
        &mut self,
        request: RouteNetlinkMessage,
        mut member: impl FnMut(Option<RouteNetlinkMessage>),
    ) -> io::Result<()> {
        const ATTEMPTS: usize = 5;
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | NLM_F_DUMP;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(request));
        for _ in 0..ATTEMPTS {
            self.sequence += 1;
            message.header.sequence_number = self.sequence;
            message.finalize();
            let mut bytes = vec![0; message.buffer_len()];
            message.serialize(&mut bytes);
            self.socket.send(&bytes, 0)?;
            if self.receive(&mut member)? {
                return Ok(());
            }
            member(None);
        }
        Err(io::Error::new(
            io::ErrorKind::Interrupted,
            "the kernel's list changed every time that it was read",
        ))
    }

    /// Reads one answer to its end; `false` if the list changed while the kernel made it.
    fn receive(
        &mut self,
        member: &mut impl FnMut(Option<RouteNetlinkMessage>),
    ) -> io::Result<bool> {
        /// `NLM_F_DUMP_INTR`
        const INTERRUPTED: u16 = 0x10;
        let mut whole = true;
        loop {
            self.buffer.clear();
            self.socket.recv(&mut self.buffer, 0)?;
            let mut rest = self.buffer.as_slice();
            while !rest.is_empty() {
                let broken = |why: &dyn std::fmt::Display| {
                    io::Error::new(io::ErrorKind::InvalidData, format!("netlink: {why}"))
                };
                let frame = NetlinkBuffer::new_checked(rest).map_err(|error| broken(&error))?;
                let length = frame.length() as usize;
                let ours = frame.sequence_number() == self.sequence;
                whole &= !ours || frame.flags() & INTERRUPTED == 0;
                let (this, next) = rest.split_at(length.next_multiple_of(4).min(rest.len()));
                rest = next;
                if !ours {
                    continue;
                }
                let message = match NetlinkMessage::<RouteNetlinkMessage>::deserialize(this) {
                    Ok(message) => message,
                    // One strange device must not hide the others.
                    Err(error) => {
                        self.malformed.push(error.to_string());
                        continue;
                    }
                };
                match message.payload {
                    NetlinkPayload::Done(_) => return Ok(whole),
                    NetlinkPayload::Error(error) if error.code.is_some() => {
                        return Err(error.to_io());
                    }
                    NetlinkPayload::InnerMessage(inner) => member(Some(inner)),
                    _ => {}
                }
            }
        }
    }
}

fn device(link: &LinkMessage) -> Device {
    let mut name = String::new();
    let mut xdp = Vec::new();
    for attribute in &link.attributes {
        match attribute {
            LinkAttribute::IfName(found) => name.clone_from(found),
            LinkAttribute::Xdp(found) => xdp = xdp_programs(found),
            _ => {}
        }
    }
    Device { ifindex: link.header.index, name, xdp }
}

/// Kernels name the program of each mode (since Linux 4.19); before, one program and its mode.
fn xdp_programs(attributes: &[LinkXdp]) -> Vec<(XdpMode, u32)> {
    let mut programs = Vec::new();
    let (mut attached, mut only) = (XdpAttached::None, None);
    for attribute in attributes {
        match attribute {
            LinkXdp::DrvProgId(id) => programs.push((XdpMode::Native, *id)),
            LinkXdp::SkbProgId(id) => programs.push((XdpMode::Generic, *id)),
            LinkXdp::HwProgId(id) => programs.push((XdpMode::Offload, *id)),
            LinkXdp::Attached(mode) => attached = *mode,
            LinkXdp::ProgId(id) => only = Some(*id),
            _ => {}
        }
    }
    if programs.is_empty()
        && let Some(id) = only
    {
        let mode = match attached {
            XdpAttached::SocketBuffer => XdpMode::Generic,
            XdpAttached::Hardware => XdpMode::Offload,
            _ => XdpMode::Native,
        };
        programs.push((mode, id));
    }
    programs
}

fn classifier(qdisc: &TcMessage) -> Option<(u32, Classifier)> {
    const TCA_INGRESS_BLOCK: u16 = 13;
    const TCA_EGRESS_BLOCK: u16 = 14;
    let mut found = Classifier::default();
    let mut known = false;
    for attribute in &qdisc.attributes {
        match attribute {
            TcAttribute::Kind(kind) => {
                known = matches!(kind.as_str(), "clsact" | "ingress");
                found.egress = kind == "clsact";
            }
            TcAttribute::Other(other) => {
                let mut bytes = [0; 4];
                if other.value_len() == bytes.len() {
                    other.emit_value(&mut bytes);
                    let block = Some(u32::from_ne_bytes(bytes)).filter(|&block| block != 0);
                    match other.kind() {
                        TCA_INGRESS_BLOCK => found.ingress_block = block,
                        TCA_EGRESS_BLOCK => found.egress_block = block,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    known.then(|| (qdisc.header.index.cast_unsigned(), found))
}

/// A filter, or nothing for the empty shell that the kernel lists for each priority.
fn filter(message: TcMessage) -> Option<Filter> {
    let TcHeader { handle, info, .. } = message.header;
    let handle = u32::from(handle);
    let mut filter = Filter {
        kind: String::new(),
        priority: u16::try_from(info >> 16).ok()?,
        // The kernel keeps it in network byte order.
        protocol: u16::from_be(u16::try_from(info & 0xffff).ok()?),
        handle,
        chain: 0,
        bpf: None,
    };
    let mut bpf = BpfFilter { program: None, name: None, direct_action: false };
    let mut options = 0_usize;
    for attribute in message.attributes {
        match attribute {
            TcAttribute::Kind(kind) => filter.kind = kind,
            TcAttribute::Chain(chain) => filter.chain = chain,
            TcAttribute::Options(list) => {
                options += list.len();
                for option in list {
                    match option {
                        TcOption::Bpf(TcFilterBpfOption::ProgId(id)) => bpf.program = Some(id),
                        TcOption::Bpf(TcFilterBpfOption::ProgName(name)) => bpf.name = Some(name),
                        TcOption::Bpf(TcFilterBpfOption::Flags(flags)) => {
                            bpf.direct_action = flags.contains(TcBpfFlags::DirectAction);
                        }
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    if handle == 0 && options == 0 {
        return None;
    }
    if filter.kind == "bpf" {
        filter.bpf = Some(bpf);
    }
    Some(filter)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_device_is_there() {
        let mut socket = RouteSocket::open().expect("route netlink");
        let devices = socket.devices().expect("devices");
        assert!(devices.iter().any(|one| one.ifindex == 1 && one.name == "lo"), "{devices:?}");
        assert_eq!(socket.filters(1, Direction::Ingress).expect("filters"), []);
        assert_eq!(socket.filters(u32::MAX >> 1, Direction::Egress).expect("no device"), []);
        assert_eq!(socket.malformed, [""; 0]);
    }

    #[test]
    fn xdp_programs_of_old_and_new_kernels_are_understood() {
        let attached = |mode| LinkXdp::Attached(mode);
        assert_eq!(xdp_programs(&[attached(XdpAttached::None)]), []);
        assert_eq!(
            xdp_programs(&[attached(XdpAttached::SocketBuffer), LinkXdp::ProgId(7)]),
            [(XdpMode::Generic, 7)]
        );
        assert_eq!(
            xdp_programs(&[
                attached(XdpAttached::Driver),
                LinkXdp::ProgId(7),
                LinkXdp::DrvProgId(7)
            ]),
            [(XdpMode::Native, 7)]
        );
        assert_eq!(
            xdp_programs(&[
                attached(XdpAttached::Multiple),
                LinkXdp::DrvProgId(7),
                LinkXdp::SkbProgId(8),
                LinkXdp::HwProgId(9)
            ]),
            [(XdpMode::Native, 7), (XdpMode::Generic, 8), (XdpMode::Offload, 9)]
        );
    }
}
