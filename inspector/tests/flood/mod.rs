//! Many packets for a VIP, each one the first of a connection of its own, from a device of this
//! thread's network namespace; and what has to be known for a session that watches them.

#![allow(dead_code, reason = "each binary uses its part")]

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr},
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
    thread,
    time::{Duration, Instant},
};

use inspector::{
    collect::{self, Options, Question},
    evidence::{Evidence, VipQuery, trace::Trace},
    trace::{
        journey::{Context, Device, DeviceKind, FrontendAddress},
        observe::{Plan, Watched},
        sighting::Tier,
    },
};
use inspector_lab::Lab;

/// Where the packets go: routed nowhere, so that the node drops each of them.
pub const VIP: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 20);
/// The VIP's port.
pub const PORT: u16 = 443;

const TCP: u8 = 6;
/// Frames that are handed to the kernel at once.
const AT_ONCE: usize = 32;
const FRAME: usize = 14 + 20 + 20;

/// Sends from one device to a device of this hardware address.
pub struct Sender {
    socket: OwnedFd,
    device: String,
    frames: Box<[[u8; FRAME]; AT_ONCE]>,
    sent: u32,
}

impl Sender {
    pub fn new(device: &str, to: [u8; 6]) -> Self {
        // Nothing else is to leave the device, which counts what does.
        fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1").expect("IPv6, in this kernel");
        // SAFETY: no pointers are involved.
        let socket =
            unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        assert!(socket >= 0, "socket(AF_PACKET): {}", io::Error::last_os_error());
        // SAFETY: the descriptor was just made, and belongs to nothing else.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        // SAFETY: sockaddr_ll is plain data, for which all zeros are valid.
        let mut at: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        at.sll_family = u16::try_from(libc::AF_PACKET).expect("a small number");
        let index = nix::net::if_::if_nametoindex(device).expect("the device");
        at.sll_ifindex = i32::try_from(index).expect("an interface index");
        let size = u32::try_from(size_of_val(&at)).expect("a small size");
        // SAFETY: the pointer is to a live value of the size given.
        let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const at).cast(), size) };
        assert_eq!(bound, 0, "bind: {}", io::Error::last_os_error());
        let mut frame = [0; FRAME];
        frame[..6].copy_from_slice(&to);
        frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 1]);
        frame[12..16].copy_from_slice(&[8, 0, 0x45, 0]);
        frame[16..18].copy_from_slice(&40_u16.to_be_bytes());
        frame[20..24].copy_from_slice(&[0x40, 0, 64, TCP]);
        frame[30..34].copy_from_slice(&VIP.octets());
        frame[36..38].copy_from_slice(&PORT.to_be_bytes());
        // A first packet.
        frame[46..50].copy_from_slice(&[0x50, 2, 0xff, 0xff]);
        Self { socket, device: device.to_owned(), frames: Box::new([frame; AT_ONCE]), sent: 0 }
    }

    /// Sends `count` packets, at this rate a second if there is one; how many of them have arrived,
    /// as the device says. Those that have not are no loss of the observers: they were never there.
    pub fn send(&mut self, count: u32, rate: Option<u32>) -> u64 {
        let (arrived_before, gone_before) = sent_by(&self.device);
        let begun = Instant::now();
        let mut left = usize::try_from(count).expect("a small number");
        while left > 0 {
            let batch = left.min(AT_ONCE);
            for at in 0..batch {
                let number = self.sent + u32::try_from(at).expect("small");
                address(&mut self.frames[at], number);
            }
            let sent = self.hand_over(batch);
            self.sent += u32::try_from(sent).expect("small");
            left -= sent;
            if let Some(rate) = rate {
                let done = count - u32::try_from(left).expect("small");
                let due = begun + Duration::from_secs_f64(f64::from(done) / f64::from(rate));
                thread::sleep(due.saturating_duration_since(Instant::now()));
            }
        }
        let (arrived, gone) = sent_by(&self.device);
        let (arrived, gone) = (arrived - arrived_before, gone - gone_before);
        assert_eq!(arrived + gone, u64::from(count), "what device {} says", self.device);
        arrived
    }

    /// How many of the first frames the kernel has taken: all, unless its buffers are full.
    fn hand_over(&mut self, batch: usize) -> usize {
        let mut parts = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: FRAME }; AT_ONCE];
        // SAFETY: mmsghdr is plain data, for which all zeros are valid.
        let mut messages: [libc::mmsghdr; AT_ONCE] = unsafe { std::mem::zeroed() };
        for ((frame, part), message) in self.frames.iter_mut().zip(&mut parts).zip(&mut messages) {
            part.iov_base = frame.as_mut_ptr().cast();
            message.msg_hdr.msg_iov = part;
            message.msg_hdr.msg_iovlen = 1;
        }
        loop {
            // SAFETY: `batch` messages, each of one part, which is a frame; all outlive the call.
            let sent = unsafe {
                libc::sendmmsg(
                    self.socket.as_raw_fd(),
                    messages.as_mut_ptr(),
                    u32::try_from(batch).expect("small"),
                    0,
                )
            };
            if let Ok(sent) = usize::try_from(sent) {
                return sent;
            }
            match io::Error::last_os_error() {
                error if error.raw_os_error() == Some(libc::ENOBUFS) => thread::yield_now(),
                error => panic!("sendmmsg: {error}"),
            }
        }
    }
}

/// Gives a frame the addresses and numbers of connection `number`.
fn address(frame: &mut [u8; FRAME], number: u32) {
    // Ports from 1024 on; when they are used up, another client.
    const PORTS: u32 = 64_000;
    let [_, _, high, low] = (number / PORTS).to_be_bytes();
    let port = u16::try_from(1024 + number % PORTS).expect("a port");
    frame[26..30].copy_from_slice(&[10, 99, high, low]);
    frame[34..36].copy_from_slice(&port.to_be_bytes());
    frame[18..20].copy_from_slice(&number.to_be_bytes()[2..]);
    // Sequence numbers are far apart.
    frame[38..42].copy_from_slice(&number.wrapping_mul(0x9e37_79b1).to_be_bytes());
    frame[24..26].fill(0);
    let (words, _) = frame[14..34].as_chunks::<2>();
    let mut sum: u32 = words.iter().map(|word| u32::from(u16::from_be_bytes(*word))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    frame[24..26].copy_from_slice(&(!u16::try_from(sum).expect("folded")).to_be_bytes());
}

/// Packets that a device of this thread's network namespace has handed to its other end, and those
/// that found no room there.
fn sent_by(device: &str) -> (u64, u64) {
    let text = fs::read_to_string("/proc/thread-self/net/dev").expect("/proc");
    let line = text.lines().find_map(|line| line.trim().strip_prefix(&format!("{device}:")));
    let numbers: Vec<u64> = line
        .unwrap_or_else(|| panic!("no device {device} in {text}"))
        .split_whitespace()
        .map(|number| number.parse().expect("a number"))
        .collect();
    // Eight numbers of what was received, then bytes, packets, errors, drops.
    (numbers[9], numbers[11])
}

/// The hardware address of a device of this thread's network namespace.
pub fn hardware_address(device: &str) -> [u8; 6] {
    let addresses = nix::ifaddrs::getifaddrs().expect("addresses");
    addresses
        .filter(|one| one.interface_name == device)
        .find_map(|one| one.address?.as_link_addr()?.addr())
        .expect("a hardware address")
}

/// Watches the VIP at ingress of a device, and by these tiers.
pub fn plan(device: &str, tiers: &[Tier]) -> Plan {
    Plan {
        addresses: vec![Watched { address: VIP.into(), port: None }],
        ingress: vec![device.to_owned()],
        tiers: tiers.iter().copied().collect(),
        ..Plan::default()
    }
}

/// What a session wants to know of this thread's network namespace: evidence of a node on
/// which nothing of Cilium's is attached, and the VIP's packets come by `device`.
pub fn node(device: &str) -> (Evidence, Context) {
    let lab = Lab::builder().project("v1.21-tcx").only(["cilium_lb4_services_v2"]).up();
    let lab = lab.expect("a lab (this needs root and bpf(2))");
    let address = IpAddr::from(VIP);
    let query = VipQuery { address, port: None, protocol: None, source: None };
    let bpffs = Some(lab.bpffs().to_owned());
    let options = Options { bpffs, ..Options::new(Question::Vip(query)) };
    let evidence = collect::node(&options).expect("the node");
    let ifindex = nix::net::if_::if_nametoindex(device).expect("the device");
    let mut context = Context::default();
    context.vips.insert(address);
    context.frontends.push(FrontendAddress {
        address,
        port: PORT,
        protocol: TCP,
        proxy_port: None,
    });
    let device = Device { name: device.to_owned(), kind: DeviceKind::Outside };
    context.devices.insert(ifindex, device);
    (evidence, context)
}

/// Connections in a trace.
pub fn journeys(trace: &Trace) -> u64 {
    let more: u64 = trace.more.iter().map(|more| more.times).sum();
    trace.journeys.len() as u64 + more + trace.not_kept
}
