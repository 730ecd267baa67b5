//! The tc observer: packets for watched VIPs, as they arrive at a device, before Cilium sees them.
//!
//! Needs Linux 6.6 (tcx) and, without root, `CAP_BPF` and `CAP_NET_ADMIN`. It works under kernel
//! lockdown.

use std::net::IpAddr;
use std::os::fd::AsFd as _;
use std::os::fd::AsRawFd as _;
use std::time::Duration;
use std::{fmt, io};

use aya::maps::{HashMap, Map, MapData, MapError, PerCpuArray, PerCpuHashMap, RingBuf};
use aya::programs::tc::TcAttachOptions;
use aya::programs::{LinkOrder, SchedClassifier, TcAttachType};
use aya::{Ebpf, EbpfLoader};
use aya_log::EbpfLogger;
use inspector_common::arrival::{
    Address, ArrivalEvent, Count, CountKey, FLAG_FRAGMENT, FLAG_PORTS, Totals, name,
};
use log::Log;
use zerocopy::FromBytes as _;

use super::TraceError;
use super::device::Device;

/// Size of the ring buffer for events unless told otherwise, bytes: more than 10,000 events.
pub const RING_BYTES: u32 = 1 << 20;

/// Sees packets for a set of VIPs arrive at a set of devices, until it is dropped.
///
/// It is first in the tcx chain of each device at the time of [`attach`](Self::attach), and lets
/// every packet go on. Packets to other addresses cost a look at their IP header and one map
/// look-up. One observer is for one network namespace: devices are told apart by their index.
pub struct Observer {
    ebpf: Ebpf,
    vips: HashMap<MapData, Address, u8>,
    devices: HashMap<MapData, u32, u32>,
    counts: PerCpuHashMap<MapData, CountKey, Count>,
    totals: PerCpuArray<MapData, Totals>,
    events: RingBuf<MapData>,
    messages: EbpfLogger<&'static dyn Log>,
}

/// One packet for a watched VIP, as it was when it arrived at a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arrival {
    /// When, as time of `CLOCK_MONOTONIC`.
    pub monotonic: Duration,
    /// Index of the device.
    pub ifindex: u32,
    /// Source address.
    pub source: IpAddr,
    /// Destination address: the VIP.
    pub vip: IpAddr,
    /// Number of the transport protocol, after IPv6's extension headers.
    pub protocol: u8,
    /// The ports, where the packet has them (TCP, UDP, SCTP; not in later fragments).
    pub ports: Option<Ports>,
    /// What TCP's header says.
    pub tcp: Option<Tcp>,
    /// Whether it is a fragment.
    pub is_fragment: bool,
    /// IPv4: identification. IPv6: the lower half of the fragment header's, if there is one, else
    /// 0.
    pub ip_id: u16,
    /// IPv6: flow label. IPv4: 0.
    pub flow_label: u32,
    /// Length from the IP header to the end, bytes.
    pub length: u32,
    /// Length of what follows the transport header, bytes.
    pub payload_length: u32,
}

/// Ports of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ports {
    /// Source port.
    pub source: u16,
    /// Destination port.
    pub destination: u16,
}

/// What an [`Arrival`] keeps of a TCP header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tcp {
    /// Sequence number.
    pub sequence: u32,
    /// The flags byte: FIN is bit 0, SYN bit 1.
    pub flags: u8,
}

/// How many packets for one VIP have arrived at one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceCount {
    /// Index of the device.
    pub ifindex: u32,
    /// The VIP.
    pub vip: IpAddr,
    /// Packets. A packet that the device has merged from several (GRO) is one.
    pub packets: u64,
    /// Bytes, the link layer's header included.
    pub bytes: u64,
}

impl Observer {
    /// Loads the program and its maps into the kernel; nothing is attached yet. `ring_bytes` is
    /// the size of the ring buffer for events, rounded up to a power of two of pages; see
    /// [`RING_BYTES`].
    ///
    /// # Errors
    /// [`TraceError::Load`] or [`TraceError::Program`] if the kernel refuses them, mostly for want
    /// of privilege.
    pub fn load(ring_bytes: u32) -> Result<Self, TraceError> {
        let object = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/inspector-ebpf"));
        let mut ebpf = EbpfLoader::new()
            .map_max_entries(name::EVENTS, ring_bytes)
            .load(object)
            .map_err(|error| TraceError::Load(Box::new(error)))?;
        let messages =
            EbpfLogger::init(&mut ebpf).map_err(|error| TraceError::Log(Box::new(error)))?;
        classifier(&mut ebpf)?.load().map_err(|source| TraceError::Program {
            program: name::PROGRAM,
            source: Box::new(source),
        })?;
        Ok(Self {
            vips: take(&mut ebpf, name::VIPS)?,
            devices: take(&mut ebpf, name::DEVICES)?,
            counts: take(&mut ebpf, name::COUNTS)?,
            totals: take(&mut ebpf, name::TOTALS)?,
            events: take(&mut ebpf, name::EVENTS)?,
            messages,
            ebpf,
        })
    }

    /// Adds a VIP to those that are watched, at once and on every device.
    ///
    /// # Errors
    /// [`TraceError::Map`] if the map is full (16,384 addresses).
    pub fn watch(&mut self, vip: IpAddr) -> Result<(), TraceError> {
        self.vips.insert(Address::from(vip), 0, 0).map_err(in_map(name::VIPS))
    }

    /// Attaches to the ingress of a device of this thread's network namespace, before everything
    /// that is attached there, and returns the device's index. It stays until the observer is
    /// dropped.
    ///
    /// # Errors
    /// [`TraceError::Device`] if there is no such device, [`TraceError::Attach`] if the kernel
    /// refuses; then nothing is attached to it.
    pub fn attach(&mut self, device: &str) -> Result<u32, TraceError> {
        let Device { ifindex, link } = Device::by_name(device)?;
        // Before the program runs there, so that the first packet is seen.
        self.devices.insert(ifindex, link as u32, 0).map_err(in_map(name::DEVICES))?;
        classifier(&mut self.ebpf)?
            .attach_with_options(
                device,
                TcAttachType::Ingress,
                TcAttachOptions::TcxOrder(LinkOrder::first()),
            )
            .map_err(|source| TraceError::Attach {
                device: device.to_owned(),
                source: Box::new(source),
            })?;
        Ok(ifindex)
    }

    /// The next event that has not been read, if there is one. It does not wait.
    ///
    /// Messages of the program itself go to the global logger (crate `log`).
    ///
    /// # Errors
    /// [`TraceError::Mismatch`] if an event has not the size that it should.
    pub fn next_arrival(&mut self) -> Result<Option<Arrival>, TraceError> {
        self.messages.flush();
        let Some(item) = self.events.next() else { return Ok(None) };
        let event = ArrivalEvent::read_from_bytes(&item)
            .map_err(|_| TraceError::Mismatch(format!("an event of {} bytes", item.len())))?;
        Ok(Some(event.into()))
    }

    /// Waits until there is something to be read by [`next_arrival`](Self::next_arrival), at most
    /// for `timeout`; `false` if the time is over. A signal ends the wait early, as if the time
    /// were over.
    ///
    /// # Errors
    /// [`TraceError::Wait`] if the kernel refuses to wait.
    pub fn wait(&self, timeout: Duration) -> Result<bool, TraceError> {
        let poll = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let mut fds =
            [poll(self.events.as_fd().as_raw_fd()), poll(self.messages.as_fd().as_raw_fd())];
        // Rounded up: a wait of 0.5 ms must not become a busy loop.
        let millis = i32::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX);
        // SAFETY: fds points to two pollfd, whose descriptors live as long as self.
        let ready = unsafe { libc::poll(fds.as_mut_ptr(), 2, millis) };
        if ready >= 0 {
            return Ok(ready > 0);
        }
        match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::Interrupted => Ok(false),
            error => Err(TraceError::Wait(error)),
        }
    }

    /// What has been counted so far, for each device and VIP of which a packet has arrived, in the
    /// order of device and VIP. Every packet counts, whether its event was lost or not.
    ///
    /// # Errors
    /// [`TraceError::Map`] if the kernel refuses to read the map.
    pub fn counts(&self) -> Result<Vec<DeviceCount>, TraceError> {
        let mut counts = self
            .counts
            .iter()
            .map(|entry| {
                let (CountKey { vip, ifindex }, per_cpu) = entry.map_err(in_map(name::COUNTS))?;
                Ok(DeviceCount {
                    ifindex,
                    vip: vip.into(),
                    packets: per_cpu.iter().map(|count| count.packets).sum(),
                    bytes: per_cpu.iter().map(|count| count.bytes).sum(),
                })
            })
            .collect::<Result<Vec<_>, TraceError>>()?;
        counts.sort_by_key(|count| (count.ifindex, count.vip));
        Ok(counts)
    }

    /// Events lost, malformed packets and packets not counted so far, over all CPUs.
    ///
    /// # Errors
    /// [`TraceError::Map`] if the kernel refuses to read the map.
    pub fn totals(&self) -> Result<Totals, TraceError> {
        let per_cpu = self.totals.get(&0, 0).map_err(in_map(name::TOTALS))?;
        Ok(per_cpu.iter().fold(Totals::default(), |sum, cpu| Totals {
            lost_events: sum.lost_events + cpu.lost_events,
            malformed: sum.malformed + cpu.malformed,
            uncounted: sum.uncounted + cpu.uncounted,
        }))
    }
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observer").finish_non_exhaustive()
    }
}

impl From<ArrivalEvent> for Arrival {
    fn from(event: ArrivalEvent) -> Self {
        // Exhaustive, so that a new field is not forgotten here.
        let ArrivalEvent {
            monotonic_ns,
            source,
            destination,
            ifindex,
            length,
            flow_label,
            tcp_sequence,
            payload_length,
            ip_id,
            source_port,
            destination_port,
            flags,
            protocol,
            tcp_flags,
            reserved: _,
        } = event;
        let has_ports = flags & FLAG_PORTS != 0;
        let is_tcp = has_ports && i32::from(protocol) == libc::IPPROTO_TCP;
        Self {
            monotonic: Duration::from_nanos(monotonic_ns),
            ifindex,
            source: source.into(),
            vip: destination.into(),
            protocol,
            ports: has_ports
                .then_some(Ports { source: source_port, destination: destination_port }),
            tcp: is_tcp.then_some(Tcp { sequence: tcp_sequence, flags: tcp_flags }),
            is_fragment: flags & FLAG_FRAGMENT != 0,
            ip_id,
            flow_label,
            length,
            payload_length,
        }
    }
}

fn classifier(ebpf: &mut Ebpf) -> Result<&mut SchedClassifier, TraceError> {
    ebpf.program_mut(name::PROGRAM)
        .and_then(|program| program.try_into().ok())
        .ok_or_else(|| TraceError::Mismatch(format!("no classifier {}", name::PROGRAM)))
}

fn take<M: TryFrom<Map, Error = MapError>>(
    ebpf: &mut Ebpf,
    map: &'static str,
) -> Result<M, TraceError> {
    ebpf.take_map(map)
        .ok_or_else(|| TraceError::Mismatch(format!("no map {map}")))?
        .try_into()
        .map_err(in_map(map))
}

fn in_map(map: &'static str) -> impl Fn(MapError) -> TraceError {
    move |source| TraceError::Map { map, source: Box::new(source) }
}
