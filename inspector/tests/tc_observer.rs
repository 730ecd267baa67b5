//! The tc observer on a real kernel: real packets on a real device, in network namespaces that the
//! test makes. Needs root.

mod net;

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::process::ExitStatusExt as _;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use aya::programs::{SchedClassifier, TcAttachType};
use inspector::trace::TraceError;
use inspector::trace::tc::{Arrival, DeviceCount, Observer, Ports, RING_BYTES, Tcp};
use net::{CLIENT_DEVICE, CLIENT_V4, CLIENT_V6, DEVICE, index, node_and_client, send_frame, tun};

const VIP_V4: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 20);
const VIP_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, 0x20);
/// Next to the VIPs, and not watched.
const CONTROL_V4: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 21);
const CONTROL_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, 0x21);

/// What [`attached`] says when nothing is.
const NOTHING: [u32; 0] = [];

const TCP: u8 = 6;
const UDP: u8 = 17;
const SYN: u8 = 2;

#[test]
fn real_packets_for_a_vip_are_seen_and_others_are_not() {
    let (node, client) = node_and_client();
    node.run(|| {
        let mut observer = watching();
        let ifindex = observer.attach(DEVICE).expect("attach");
        assert_eq!(ifindex, index(DEVICE));
        let before = monotonic();

        client.run(|| {
            for (vip, control, source) in [
                (IpAddr::from(VIP_V4), IpAddr::from(CONTROL_V4), IpAddr::from(CLIENT_V4)),
                (IpAddr::from(VIP_V6), IpAddr::from(CONTROL_V6), IpAddr::from(CLIENT_V6)),
            ] {
                for to in [control, vip, control] {
                    send_udp((source, 40001).into(), (to, 53).into(), b"hello");
                    send_syn((source, 40002).into(), (to, 443).into());
                }
            }
        });

        let mut arrivals = read(&mut observer, 4);
        for arrival in &arrivals {
            assert!(
                (before..=monotonic()).contains(&arrival.monotonic),
                "{arrival:?} is not between {before:?} and now"
            );
            assert_eq!(arrival.ifindex, ifindex);
            assert!(!arrival.is_fragment, "{arrival:?}");
        }
        arrivals.sort_by_key(|arrival| (arrival.vip, arrival.protocol));
        let [tcp_v4, udp_v4, tcp_v6, udp_v6] = arrivals.as_slice() else {
            panic!("not four arrivals: {arrivals:#?}");
        };

        for (arrival, vip, source, ip_header) in [
            (udp_v4, IpAddr::from(VIP_V4), IpAddr::from(CLIENT_V4), 20),
            (udp_v6, VIP_V6.into(), CLIENT_V6.into(), 40),
        ] {
            assert_eq!((arrival.vip, arrival.source), (vip, source));
            assert_eq!(arrival.protocol, UDP);
            assert_eq!(arrival.ports, Some(Ports { source: 40001, destination: 53 }));
            assert_eq!(arrival.tcp, None);
            assert_eq!((arrival.length, arrival.payload_length), (ip_header + 8 + 5, 5));
        }
        for (arrival, vip, source) in [
            (tcp_v4, IpAddr::from(VIP_V4), IpAddr::from(CLIENT_V4)),
            (tcp_v6, VIP_V6.into(), CLIENT_V6.into()),
        ] {
            assert_eq!((arrival.vip, arrival.source), (vip, source));
            assert_eq!(arrival.protocol, TCP);
            assert_eq!(arrival.ports, Some(Ports { source: 40002, destination: 443 }));
            // The ECN bits (0xc0) depend on the system's settings.
            assert_eq!(arrival.tcp.map(|tcp| tcp.flags & 0x3f), Some(SYN));
            assert_eq!(arrival.payload_length, 0);
        }

        // An Ethernet header goes in front of each.
        let bytes = |a: &Arrival, b: &Arrival| u64::from(a.length + b.length + 2 * 14);
        assert_eq!(
            observer.counts().expect("counts"),
            [
                DeviceCount {
                    ifindex,
                    vip: VIP_V4.into(),
                    packets: 2,
                    bytes: bytes(tcp_v4, udp_v4)
                },
                DeviceCount {
                    ifindex,
                    vip: VIP_V6.into(),
                    packets: 2,
                    bytes: bytes(tcp_v6, udp_v6)
                },
            ]
        );
        assert_no_trouble(&observer);
    });
}

#[test]
fn options_extension_headers_fragments_and_vlan_tags_are_understood() {
    let (node, client) = node_and_client();
    node.run(|| {
        let mut observer = watching();
        observer.attach(DEVICE).expect("attach");

        client.run(|| {
            // Four times "no operation".
            send_udp_with(
                VIP_V4.into(),
                1,
                b"options",
                libc::IPPROTO_IP,
                libc::IP_OPTIONS,
                &[1; 4],
            );
            // One destination options header, of padding.
            let padding = [0, 0, 1, 4, 0, 0, 0, 0];
            let (level, name) = (libc::IPPROTO_IPV6, libc::IPV6_DSTOPTS);
            send_udp_with(VIP_V6.into(), 2, b"extension", level, name, &padding);
            // More than one frame takes, twice.
            send_udp((CLIENT_V4, 40001).into(), (VIP_V4, 3).into(), &[0; 3000]);
            send_udp((CLIENT_V6, 40001).into(), (VIP_V6, 4).into(), &[0; 3000]);
            // The kernel takes the outer tag off before tc sees the frame, the inner one stays.
            let mut frame = vec![0xff; 12];
            frame.extend([0x88, 0xa8, 0, 7, 0x81, 0x00, 0, 8, 0x08, 0x00]);
            frame.extend(ipv4(UDP, &[&[0, 9, 0, 5, 0, 12, 0, 0], b"vlan".as_slice()].concat()));
            send_frame(CLIENT_DEVICE, &frame);
        });

        let arrivals = read(&mut observer, 9);
        let to_port = |port| {
            let found: Vec<_> = arrivals
                .iter()
                .filter(|arrival| arrival.ports.is_some_and(|ports| ports.destination == port))
                .collect();
            let [arrival] = found.as_slice() else {
                panic!("not one packet to port {port}: {arrivals:#?}");
            };
            (*arrival).clone()
        };
        let options = to_port(1);
        assert_eq!((options.length, options.payload_length), (24 + 8 + 7, 7));
        let extension = to_port(2);
        assert_eq!((extension.length, extension.payload_length), (40 + 8 + 8 + 9, 9));
        assert_eq!((extension.protocol, extension.is_fragment), (UDP, false));
        let vlan = to_port(5);
        assert_eq!((vlan.source, vlan.payload_length), (CLIENT_V4.into(), 4));

        for first in [to_port(3), to_port(4)] {
            let fragments: Vec<_> = arrivals
                .iter()
                .filter(|arrival| arrival.is_fragment && arrival.vip == first.vip)
                .collect();
            assert_eq!(fragments.len(), 3, "{fragments:#?}");
            assert_eq!(fragments.iter().filter(|fragment| fragment.ports.is_some()).count(), 1);
            assert_eq!(fragments.iter().map(|fragment| fragment.payload_length).sum::<u32>(), 3000);
            for fragment in fragments {
                assert_eq!(fragment.protocol, UDP);
                assert_ne!(fragment.ip_id, 0);
                assert_eq!(fragment.ip_id, first.ip_id);
            }
        }
        assert_no_trouble(&observer);
    });
}

#[test]
fn packets_of_a_device_without_link_layer_header_are_seen() {
    net::Host::new().run(|| {
        let mut device = tun("wg0");
        let mut observer = watching();
        let ifindex = observer.attach("wg0").expect("attach");

        // Source port 51600, destination port 443, sequence number, offset of 24 bytes, SYN.
        let mut syn = vec![0xc9, 0x90, 0x01, 0xbb, 0x01, 0x23, 0x45, 0x67, 0, 0, 0, 0, 0x60, 0x02];
        syn.extend([0; 10]);
        syn.extend(b"abc");
        let v4 = ipv4(TCP, &syn);
        let v6 = ipv6(VIP_V6, TCP, &syn);
        let control = ipv6(CONTROL_V6, TCP, &syn);
        for packet in [&control, &v4, &v6, &control] {
            assert_eq!(device.write(packet).expect("write to the TUN device"), packet.len());
        }

        let mut arrivals = read(&mut observer, 2);
        arrivals.sort_by_key(|arrival| arrival.vip);
        for arrival in &mut arrivals {
            assert_ne!(arrival.monotonic, Duration::ZERO);
            arrival.monotonic = Duration::ZERO;
        }
        let expected = Arrival {
            monotonic: Duration::ZERO,
            ifindex,
            source: CLIENT_V4.into(),
            vip: VIP_V4.into(),
            protocol: TCP,
            ports: Some(Ports { source: 51600, destination: 443 }),
            tcp: Some(Tcp { sequence: 0x0123_4567, flags: SYN }),
            is_fragment: false,
            ip_id: 0xabcd,
            flow_label: 0,
            length: 20 + 27,
            payload_length: 3,
        };
        assert_eq!(
            arrivals,
            [
                expected.clone(),
                Arrival {
                    source: CLIENT_V6.into(),
                    vip: VIP_V6.into(),
                    ip_id: 0,
                    flow_label: 0x5_4321,
                    length: 40 + 27,
                    ..expected
                }
            ]
        );
        assert_eq!(
            observer.counts().expect("counts"),
            [
                DeviceCount { ifindex, vip: VIP_V4.into(), packets: 1, bytes: 20 + 27 },
                DeviceCount { ifindex, vip: VIP_V6.into(), packets: 1, bytes: 40 + 27 },
            ]
        );
        assert_no_trouble(&observer);
    });
}

#[test]
fn events_that_find_no_room_are_counted_as_lost() {
    const SENT: u64 = 200;
    let (node, client) = node_and_client();
    node.run(|| {
        // One page: room for fewer than 50 events.
        let mut observer = Observer::load(1).expect("load");
        observer.watch(VIP_V4.into()).expect("watch");
        let ifindex = observer.attach(DEVICE).expect("attach");
        client.run(|| {
            for _ in 0..SENT {
                send_udp((CLIENT_V4, 40001).into(), (VIP_V4, 53).into(), b"");
            }
        });

        let deadline = Instant::now() + Duration::from_secs(5);
        let expected =
            DeviceCount { ifindex, vip: VIP_V4.into(), packets: SENT, bytes: SENT * (14 + 20 + 8) };
        while observer.counts().expect("counts") != [expected] {
            assert!(Instant::now() < deadline, "{:?}", observer.counts());
            std::thread::sleep(Duration::from_millis(10));
        }
        let mut seen = 0;
        while observer.next_arrival().expect("event").is_some() {
            seen += 1;
        }
        let lost = observer.totals().expect("totals").lost_events;
        assert!(seen > 0 && lost > 0, "{seen} seen, {lost} lost");
        assert_eq!(seen + lost, SENT);
    });
}

#[test]
fn malformed_packets_are_counted_and_said_but_are_no_event() {
    log::set_logger(&LOG).expect("no other logger");
    log::set_max_level(log::LevelFilter::Warn);
    let (node, client) = node_and_client();
    node.run(|| {
        let mut observer = watching();
        let ifindex = observer.attach(DEVICE).expect("attach");
        client.run(|| {
            let mut frame = vec![0xff; 12];
            frame.extend([0x08, 0x00]);
            frame.extend(ipv4(UDP, &[0, 9, 0, 5, 0, 8, 0, 0]));
            // A header of 12 bytes.
            frame[14] = 0x43;
            send_frame(CLIENT_DEVICE, &frame);
        });
        read(&mut observer, 0);
        let totals = observer.totals().expect("totals");
        assert_eq!((totals.malformed, totals.lost_events, totals.uncounted), (1, 0, 0));
        assert_eq!(
            observer.counts().expect("counts"),
            [DeviceCount { ifindex, vip: VIP_V4.into(), packets: 1, bytes: 14 + 28 }]
        );
        let messages = LOG.0.lock().expect("log").join("\n");
        assert!(
            messages.contains(&format!(
                "device {ifindex}: malformed packet for a watched VIP, reason 1; 1 on this CPU"
            )),
            "{messages}"
        );
    });
}

#[test]
fn it_is_first_lets_packets_go_on_and_is_gone_when_dropped() {
    let (node, client) = node_and_client();
    node.run(|| {
        assert_eq!(attached(), NOTHING);
        let mut early = watching();
        early.attach(DEVICE).expect("attach");
        let early_ids = attached();
        assert_eq!(early_ids.len(), 1);
        let mut late = watching();
        late.attach(DEVICE).expect("attach");
        let ids = attached();
        assert_eq!(ids.len(), 2);
        assert_eq!(ids[1], early_ids[0], "the later one is not first");

        // Both see the packet: the first one has let it go on.
        client.run(|| send_udp((CLIENT_V4, 40001).into(), (VIP_V4, 53).into(), b""));
        assert_eq!(read(&mut late, 1).len(), 1);
        assert_eq!(read(&mut early, 1).len(), 1);

        let error = late.attach(DEVICE).expect_err("attached twice");
        assert!(matches!(error, TraceError::Attach { .. }), "{error}");
        assert_eq!(attached(), ids);

        drop(late);
        assert_eq!(attached(), early_ids);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            let _observer = early;
            panic!("on purpose");
        }));
        assert!(panicked.is_err());
        assert_eq!(attached(), NOTHING);
    });
}

/// This test is its own victim: in the process that it starts, it attaches and waits for the end.
#[test]
fn a_killed_process_leaves_nothing_attached() {
    const NAME: &str = "a_killed_process_leaves_nothing_attached";
    const ROLE: &str = "INSPECTOR_TEST_VICTIM";
    const READY: &str = "the observer is attached";
    if std::env::var_os(ROLE).is_some() {
        let mut observer = watching();
        observer.attach(DEVICE).expect("attach");
        println!("{READY}");
        std::thread::sleep(Duration::from_mins(1));
        panic!("nobody ended this process");
    }

    let (node, _client) = node_and_client();
    for signal in [libc::SIGKILL, libc::SIGTERM, libc::SIGINT] {
        // A process is in the network namespace of the thread that starts it.
        node.run(|| {
            let mut victim = std::process::Command::new(std::env::current_exe().expect("self"))
                .args(["--exact", NAME, "--nocapture"])
                .env(ROLE, "1")
                .stdout(std::process::Stdio::piped())
                .spawn()
                .expect("start this test once more");
            let stdout = BufReader::new(victim.stdout.take().expect("piped"));
            let is_ready = stdout.lines().map_while(Result::ok).any(|line| line.contains(READY));
            let before = attached().len();
            let pid = i32::try_from(victim.id()).expect("a process id");
            // SAFETY: no pointers are involved; the process is our child, not yet waited for.
            assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
            let status = victim.wait().expect("wait");
            assert!(is_ready, "the victim did not attach: {status}");
            assert_eq!(before, 1);
            assert_eq!(status.signal(), Some(signal), "{status}");
            assert_eq!(attached(), NOTHING, "after signal {signal}");
        });
    }
}

#[test]
fn a_device_that_is_not_there_is_named() {
    net::Host::new().run(|| {
        let mut observer = watching();
        for name in ["nosuch0", "a-name-that-is-too-long-for-a-device", "", "nul\0"] {
            let error = observer.attach(name).expect_err("attached to nothing");
            assert!(matches!(error, TraceError::Device { .. }), "{error}");
            assert!(error.to_string().contains(&format!("of device {name}: ")), "{error}");
        }
    });
}

/// An observer that watches both VIPs.
fn watching() -> Observer {
    let mut observer = Observer::load(RING_BYTES).expect("load");
    for vip in [IpAddr::from(VIP_V4), VIP_V6.into()] {
        observer.watch(vip).expect("watch");
    }
    observer
}

/// Reads `count` events, and then for a while whether there are more, which is a failure.
fn read(observer: &mut Observer, count: usize) -> Vec<Arrival> {
    const PATIENCE: Duration = Duration::from_secs(5);
    const SILENCE: Duration = Duration::from_millis(200);
    let mut arrivals = Vec::new();
    let mut deadline = Instant::now() + if count == 0 { SILENCE } else { PATIENCE };
    loop {
        while let Some(arrival) = observer.next_arrival().expect("event") {
            arrivals.push(arrival);
            if arrivals.len() == count {
                deadline = Instant::now() + SILENCE;
            }
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            assert_eq!(arrivals.len(), count, "{arrivals:#?}");
            return arrivals;
        }
        observer.wait(left).expect("wait");
    }
}

fn assert_no_trouble(observer: &Observer) {
    let totals = observer.totals().expect("totals");
    assert_eq!((totals.lost_events, totals.malformed, totals.uncounted), (0, 0, 0));
}

/// Ids of the programs at the device's tcx ingress, in the order in which they run.
fn attached() -> Vec<u32> {
    let (_, programs) =
        SchedClassifier::query_tcx(DEVICE, TcAttachType::Ingress).expect("tcx: needs Linux 6.6");
    programs.iter().map(aya::programs::ProgramInfo::id).collect()
}

/// Now, on the clock that the kernel stamps events with.
fn monotonic() -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a timespec to be written.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    assert_eq!(result, 0);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).expect("below 10^9"))
}

fn send_udp(from: SocketAddr, to: SocketAddr, payload: &[u8]) {
    let socket = UdpSocket::bind(from).expect("bind");
    assert_eq!(socket.send_to(payload, to).expect("send"), payload.len());
}

/// Sends a datagram from a socket with one option set.
fn send_udp_with(vip: IpAddr, port: u16, payload: &[u8], level: i32, option: i32, value: &[u8]) {
    let from = if vip.is_ipv4() { IpAddr::from(CLIENT_V4) } else { CLIENT_V6.into() };
    let socket = UdpSocket::bind((from, 40001)).expect("bind");
    // SAFETY: the pointer is to a live slice of the length given.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            value.as_ptr().cast(),
            u32::try_from(value.len()).expect("a short option"),
        )
    };
    assert_eq!(result, 0, "setsockopt: {}", std::io::Error::last_os_error());
    assert_eq!(socket.send_to(payload, (vip, port)).expect("send"), payload.len());
}

/// Starts a TCP connection and gives it up before the kernel would send its SYN again.
fn send_syn(from: SocketAddr, to: SocketAddr) {
    let (family, size) = match from {
        SocketAddr::V4(_) => (libc::AF_INET, size_of::<libc::sockaddr_in>()),
        SocketAddr::V6(_) => (libc::AF_INET6, size_of::<libc::sockaddr_in6>()),
    };
    let size = u32::try_from(size).expect("a small size");
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: no pointers are involved.
    let socket = unsafe { libc::socket(family, kind, 0) };
    assert!(socket >= 0, "socket: {}", std::io::Error::last_os_error());
    // SAFETY: the descriptor was just made, and belongs to nothing else.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    let (from, to) = (raw_address(from), raw_address(to));
    // SAFETY: the pointer is to a live address of at least this size.
    let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const from).cast(), size) };
    assert_eq!(bound, 0, "bind: {}", std::io::Error::last_os_error());
    // SAFETY: as above.
    let connected = unsafe { libc::connect(socket.as_raw_fd(), (&raw const to).cast(), size) };
    let error = std::io::Error::last_os_error();
    assert_eq!(connected, -1);
    assert_eq!(error.raw_os_error(), Some(libc::EINPROGRESS), "connect: {error}");
}

/// The address as the kernel takes it. `sockaddr_in6` begins like `sockaddr_in` up to the port.
fn raw_address(address: SocketAddr) -> libc::sockaddr_in6 {
    // SAFETY: sockaddr_in6 is plain data, for which all zeros are valid.
    let mut raw: libc::sockaddr_in6 = unsafe { std::mem::zeroed() };
    raw.sin6_port = address.port().to_be();
    match address.ip() {
        IpAddr::V4(ip) => {
            raw.sin6_family = u16::try_from(libc::AF_INET).expect("a small number");
            // IPv4's address stands where IPv6 has its flow label.
            raw.sin6_flowinfo = u32::from_ne_bytes(ip.octets());
        }
        IpAddr::V6(ip) => {
            raw.sin6_family = u16::try_from(libc::AF_INET6).expect("a small number");
            raw.sin6_addr.s6_addr = ip.octets();
        }
    }
    raw
}

/// An IPv4 packet from the client to the VIP, with identification 0xabcd.
fn ipv4(protocol: u8, payload: &[u8]) -> Vec<u8> {
    let [high, low] = u16::try_from(20 + payload.len()).expect("a short packet").to_be_bytes();
    let mut packet = vec![0x45, 0, high, low, 0xab, 0xcd, 0, 0, 64, protocol, 0, 0];
    packet.extend(CLIENT_V4.octets());
    packet.extend(VIP_V4.octets());
    packet.extend(payload);
    packet
}

/// An IPv6 packet from the client, with flow label 0x54321.
fn ipv6(to: Ipv6Addr, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let [high, low] = u16::try_from(payload.len()).expect("a short packet").to_be_bytes();
    let mut packet = vec![0x60, 0x05, 0x43, 0x21, high, low, protocol, 64];
    packet.extend(CLIENT_V6.octets());
    packet.extend(to.octets());
    packet.extend(payload);
    packet
}

/// Keeps what the programs say.
struct Log(Mutex<Vec<String>>);

static LOG: Log = Log(Mutex::new(Vec::new()));

impl log::Log for Log {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        self.0.lock().expect("log").push(record.args().to_string());
    }

    fn flush(&self) {}
}
