//! Small real programs, maps, links and filters for tests: named and attached like Cilium's.
//!
//! Everything lives as long as its descriptor, so that a panic or a kill leaves nothing behind.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use netlink_packet_core::{
    DefaultNla, NLM_F_ACK, NLM_F_CREATE, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage,
    NetlinkPayload,
};
use netlink_packet_route::{
    RouteNetlinkMessage,
    tc::{TcAttribute, TcBpfFlags, TcFilterBpfOption, TcHandle, TcMessage, TcOption},
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

pub const SOCKET_FILTER: u32 = 1;
pub const SCHED_CLS: u32 = 3;
pub const XDP: u32 = 6;
pub const CGROUP_SOCK_ADDR: u32 = 18;

pub const TCX_INGRESS: u32 = 46;
pub const TCX_EGRESS: u32 = 47;
pub const NETKIT_PRIMARY: u32 = 54;
pub const NETKIT_PEER: u32 = 55;
pub const XDP_HOOK: u32 = 37;
pub const INET4_CONNECT: u32 = 10;
pub const UDP4_SENDMSG: u32 = 14;

const HASH: u32 = 1;
const ARRAY: u32 = 2;
const PROG_ARRAY: u32 = 3;

/// Calls `bpf(2)` with words as its attribute.
fn bpf(command: i32, attribute: &[u8]) -> io::Result<i32> {
    // SAFETY: the attribute is a buffer of the length given, which the kernel copies; the addresses
    // in it are of buffers that the callers keep.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, command, attribute.as_ptr(), attribute.len()) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(i32::try_from(result).expect("a descriptor or 0"))
}

fn owned(fd: i32) -> OwnedFd {
    // SAFETY: the kernel just returned this descriptor; nobody else owns it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// Builds an attribute.
#[derive(Default)]
struct Attribute(Vec<u8>);

impl Attribute {
    fn word(mut self, word: u32) -> Self {
        self.0.extend(word.to_ne_bytes());
        self
    }

    fn fd(self, fd: BorrowedFd<'_>) -> Self {
        self.word(fd.as_raw_fd().unsigned_abs())
    }

    fn address<T>(mut self, of: *const T) -> Self {
        assert!(self.0.len().is_multiple_of(8), "addresses are aligned");
        self.0.extend((of as u64).to_ne_bytes());
        self
    }

    fn name(mut self, name: &str) -> Self {
        let mut bytes = [0; 16];
        let length = name.len().min(15);
        bytes[..length].copy_from_slice(&name.as_bytes()[..length]);
        self.0.extend(bytes);
        self
    }

    fn call(self, what: &str, command: i32) -> i32 {
        bpf(command, &self.0).unwrap_or_else(|error| {
            panic!("{what}: {error}; this test needs root and a kernel that has this")
        })
    }
}

/// A map.
pub struct Map {
    fd: OwnedFd,
    pub id: u32,
}

impl AsFd for Map {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Id of a map (offset 4 of its information) or program (the same).
fn id(fd: BorrowedFd<'_>) -> u32 {
    let mut info = [0_u32; 4];
    Attribute::default()
        .fd(fd)
        .word(16)
        .address(info.as_mut_ptr())
        .call("BPF_OBJ_GET_INFO_BY_FD", 15);
    info[1]
}

impl Map {
    fn create(kind: u32, name: &str, key: u32, value: u32, entries: u32, flags: u32) -> Self {
        let fd = Attribute::default()
            .word(kind)
            .word(key)
            .word(value)
            .word(entries)
            .word(flags)
            .word(0)
            .word(0)
            .name(name)
            .call("BPF_MAP_CREATE", 0);
        let fd = owned(fd);
        Self { id: id(fd.as_fd()), fd }
    }

    /// A hash map.
    pub fn hash(name: &str, key: u32, value: u32) -> Self {
        Self::create(HASH, name, key, value, 16, 0)
    }

    /// A program array of Cilium's size.
    pub fn programs(name: &str) -> Self {
        Self::create(PROG_ARRAY, name, 4, 4, 50, 0)
    }

    /// Puts a program into a program array.
    pub fn put(&self, index: u32, program: &Program) {
        let value = program.fd.as_raw_fd();
        Attribute::default()
            .fd(self.as_fd())
            .word(0)
            .address(&raw const index)
            .address(&raw const value)
            .address(std::ptr::null::<u8>())
            .call("BPF_MAP_UPDATE_ELEM", 2);
    }

    /// Read-only data with types: `eth_header_length`, one byte, and `limit`, four.
    pub fn constants(eth_header_length: u8, limit: u32) -> Self {
        let btf = btf(&[], true);
        let fd = Attribute::default()
            .word(ARRAY)
            .word(4)
            .word(8)
            .word(1)
            // BPF_F_RDONLY_PROG
            .word(1 << 7)
            .word(0)
            .word(0)
            .name(".rodata.config")
            .word(0)
            .fd(btf.as_fd())
            // No key type; the section is the last type.
            .word(0)
            .word(5)
            .call("BPF_MAP_CREATE", 0);
        let map = Self { id: id(owned_dup(fd).as_fd()), fd: owned(fd) };
        let mut value = vec![eth_header_length, 0, 0, 0];
        value.extend(limit.to_ne_bytes());
        let index = 0_u32;
        Attribute::default()
            .fd(map.as_fd())
            .word(0)
            .address(&raw const index)
            .address(value.as_ptr())
            .address(std::ptr::null::<u8>())
            .call("BPF_MAP_UPDATE_ELEM", 2);
        // BPF_MAP_FREEZE
        Attribute::default().fd(map.as_fd()).call("BPF_MAP_FREEZE", 22);
        map
    }

    /// The map with this id.
    pub fn by_id(id: u32) -> Self {
        let fd = Attribute::default().word(id).word(0).word(0).call("BPF_MAP_GET_FD_BY_ID", 14);
        Self { fd: owned(fd), id }
    }
}

/// A second descriptor of the same object.
fn owned_dup(fd: i32) -> OwnedFd {
    // SAFETY: the descriptor is open.
    let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
    assert!(copy >= 0, "fcntl: {}", io::Error::last_os_error());
    owned(copy)
}

/// BTF with a prototype and these functions; or with a data section.
fn btf(functions: &[&str], section: bool) -> OwnedFd {
    let mut strings = vec![0];
    let mut string = |text: &str| {
        let at = u32::try_from(strings.len()).expect("short");
        strings.extend(text.as_bytes());
        strings.push(0);
        at
    };
    // 1: int.
    let mut types = vec![string("int"), 1 << 24, 4, 1 << 24 | 32];
    if section {
        // 2: u8; 3, 4: variables; 5: the section.
        types.extend([string("u8"), 1 << 24, 1, 8]);
        types.extend([string("eth_header_length"), 14 << 24, 2, 1]);
        types.extend([string("limit"), 14 << 24, 1, 1]);
        types.extend([string(".rodata.config"), 15 << 24 | 2, 8, 3, 0, 1, 4, 4, 4]);
    } else {
        // 2: the prototype; 3 and on: the functions, global ones; then what they take.
        let context = 3 + u32::try_from(functions.len()).expect("few");
        types.extend([0, 13 << 24 | 1, 1, string("skb"), context]);
        for function in functions {
            types.extend([string(function), 12 << 24 | 1, 2]);
        }
        types.extend([0, 2 << 24, context + 1]);
        types.extend([string("__sk_buff"), 4 << 24, 0]);
    }
    let types: Vec<u8> = types.into_iter().flat_map(u32::to_ne_bytes).collect();
    let length = |part: &[u8]| u32::try_from(part.len()).expect("short");
    let mut bytes = 0xeb9f_u16.to_ne_bytes().to_vec();
    bytes.extend([1, 0]);
    for word in [24, 0, length(&types), length(&types), length(&strings)] {
        bytes.extend(word.to_ne_bytes());
    }
    bytes.extend(types);
    bytes.extend(strings);
    let fd = Attribute::default()
        .address(bytes.as_ptr())
        .address(std::ptr::null::<u8>())
        .word(length(&bytes))
        .word(0)
        .word(0)
        .word(0)
        .call("BPF_BTF_LOAD", 18);
    owned(fd)
}

/// What a program is to be.
pub struct Code<'a> {
    kind: u32,
    attach_type: u32,
    name: &'a str,
    full_name: Option<&'a str>,
    maps: Vec<&'a Map>,
    tail_call: Option<&'a Map>,
    writes: Vec<(u32, [u8; 4])>,
    result: i32,
}

impl<'a> Code<'a> {
    /// A classifier that lets every packet go on.
    pub fn tc(name: &'a str) -> Self {
        let kind = SCHED_CLS;
        Self {
            kind,
            attach_type: 0,
            name,
            full_name: None,
            maps: vec![],
            tail_call: None,
            writes: vec![],
            result: -1,
        }
    }

    /// An XDP program that lets every packet go on.
    pub fn xdp(name: &'a str) -> Self {
        Self { kind: XDP, attach_type: XDP_HOOK, result: 2, ..Self::tc(name) }
    }

    /// A program of a socket hook that allows everything.
    pub fn socket(name: &'a str, attach_type: u32) -> Self {
        Self { kind: CGROUP_SOCK_ADDR, attach_type, result: 1, ..Self::tc(name) }
    }

    /// With BTF in which its function has the full name.
    pub fn with_btf(mut self) -> Self {
        self.full_name = Some(self.name);
        self
    }

    /// That uses this map.
    pub fn uses(mut self, map: &'a Map) -> Self {
        self.maps.push(map);
        self
    }

    /// That calls place 7 of this array.
    pub fn calls(mut self, array: &'a Map) -> Self {
        self.tail_call = Some(array);
        self
    }

    /// That writes these bytes into the packet at this offset.
    pub fn writes(mut self, offset: u32, bytes: [u8; 4]) -> Self {
        self.writes.push((offset, bytes));
        self
    }

    /// That returns this.
    pub fn returns(mut self, result: i32) -> Self {
        self.result = result;
        self
    }

    /// Loads it.
    pub fn load(self) -> Program {
        let mut code = Vec::new();
        // r6 = r1
        instruction(&mut code, 0xbf, 0x16, 0);
        for map in &self.maps {
            // r2 = map
            instruction(&mut code, 0x18, 0x12, map.as_fd().as_raw_fd());
            instruction(&mut code, 0, 0, 0);
        }
        if let Some(array) = self.tail_call {
            // r1 = r6, r2 = array, r3 = 7, call bpf_tail_call
            instruction(&mut code, 0xbf, 0x61, 0);
            instruction(&mut code, 0x18, 0x12, array.as_fd().as_raw_fd());
            instruction(&mut code, 0, 0, 0);
            instruction(&mut code, 0xb7, 0x03, 7);
            instruction(&mut code, 0x85, 0x00, 12);
        }
        for &(offset, bytes) in &self.writes {
            // *(u32 *)(r10 - 4) = bytes
            code.extend([0x62, 0x0a, 0xfc, 0xff]);
            code.extend(bytes);
            // bpf_skb_store_bytes(r1 = r6, r2 = offset, r3 = r10 - 4, r4 = 4, r5 = 0)
            instruction(&mut code, 0xbf, 0x61, 0);
            instruction(&mut code, 0xb7, 0x02, offset.cast_signed());
            instruction(&mut code, 0xbf, 0xa3, 0);
            instruction(&mut code, 0x07, 0x03, -4);
            instruction(&mut code, 0xb7, 0x04, 4);
            instruction(&mut code, 0xb7, 0x05, 0);
            instruction(&mut code, 0x85, 0x00, 9);
        }
        // r0 = result; exit
        instruction(&mut code, 0xb7, 0x00, self.result);
        instruction(&mut code, 0x95, 0x00, 0);
        let count = u32::try_from(code.len() / 8).expect("short");
        let license = c"GPL";
        let mut log = vec![0_u8; 4096];
        let btf = self.full_name.map(|name| btf(&[name], false));
        let function = [0_u32, 3];
        let mut attribute = Attribute::default()
            .word(self.kind)
            .word(count)
            .address(code.as_ptr())
            .address(license.as_ptr())
            .word(1)
            .word(4096)
            .address(log.as_mut_ptr())
            .word(0)
            .word(0)
            .name(self.name)
            .word(0)
            .word(self.attach_type);
        if let Some(btf) = &btf {
            attribute = attribute
                .fd(btf.as_fd())
                .word(8)
                .address(function.as_ptr())
                .word(1)
                .word(0)
                .address(std::ptr::null::<u8>())
                .word(0)
                .word(0);
        }
        let fd = bpf(5, &attribute.0).unwrap_or_else(|error| {
            panic!("BPF_PROG_LOAD of {}: {error}: {}", self.name, String::from_utf8_lossy(&log))
        });
        let fd = owned(fd);
        Program { id: id(fd.as_fd()), fd }
    }
}

/// `registers` is the source in the upper half, the destination in the lower.
fn instruction(code: &mut Vec<u8>, operation: u8, registers: u8, immediate: i32) {
    code.extend([operation, registers, 0, 0]);
    code.extend(immediate.to_ne_bytes());
}

/// A loaded program.
pub struct Program {
    pub fd: OwnedFd,
    pub id: u32,
}

/// A link.
pub struct Link {
    fd: OwnedFd,
    pub id: u32,
}

impl Program {
    /// Attaches to tcx at the end of the chain, or in front of everything.
    pub fn tcx(&self, ifindex: u32, attach_type: u32, in_front: bool) -> Link {
        // BPF_F_BEFORE without a relative: first of all.
        self.link(
            "tcx (Linux 6.6 or later)",
            ifindex,
            attach_type,
            if in_front { 1 << 3 } else { 0 },
        )
    }

    /// Attaches to the end of the chain of a netkit pair's peer, or of its primary device; the
    /// primary one is named for both.
    pub fn netkit(&self, primary: u32, of_peer: bool) -> Link {
        self.link(
            "netkit (Linux 6.7 or later)",
            primary,
            if of_peer { NETKIT_PEER } else { NETKIT_PRIMARY },
            0,
        )
    }

    /// Attaches to XDP in the stack or in the driver.
    pub fn xdp(&self, ifindex: u32, generic: bool) -> Link {
        self.link("XDP", ifindex, XDP_HOOK, if generic { 1 << 1 } else { 1 << 2 })
    }

    /// Attaches to a socket hook of a cgroup.
    pub fn cgroup(&self, folder: BorrowedFd<'_>, attach_type: u32) -> Link {
        self.link("cgroup", folder.as_raw_fd().unsigned_abs(), attach_type, 0)
    }

    fn link(&self, what: &str, target: u32, attach_type: u32, flags: u32) -> Link {
        let attribute = Attribute::default()
            .fd(self.fd.as_fd())
            .word(target)
            .word(attach_type)
            .word(flags)
            // No relative link or program, any revision.
            .word(0)
            .word(0)
            .word(0)
            .word(0);
        let fd = owned(attribute.call(&format!("BPF_LINK_CREATE, {what}"), 28));
        // The id of a link stands where that of a map does.
        Link { id: id(fd.as_fd()), fd }
    }

    /// Adds it as a direct-action filter, as Cilium did before tcx; the qdisc must be there.
    pub fn filter(&self, ifindex: u32, egress: bool, name: &str, priority: u16) {
        let mut message = TcMessage::with_index(ifindex.cast_signed());
        message.header.parent =
            TcHandle { major: 0xffff, minor: if egress { 0xfff3 } else { 0xfff2 } };
        message.header.handle = TcHandle { major: 0, minor: 1 };
        // Every protocol, in network byte order.
        message.header.info = u32::from(priority) << 16 | u32::from(3_u16.to_be());
        message.attributes = vec![
            TcAttribute::Kind("bpf".to_owned()),
            TcAttribute::Options(vec![
                TcOption::Bpf(TcFilterBpfOption::ProgFd(self.fd.as_raw_fd().unsigned_abs())),
                TcOption::Bpf(TcFilterBpfOption::ProgName(name.to_owned())),
                TcOption::Bpf(TcFilterBpfOption::Flags(TcBpfFlags::DirectAction)),
            ]),
        ];
        netlink("RTM_NEWTFILTER", RouteNetlinkMessage::NewTrafficFilter(message));
    }
}

/// Adds a clsact qdisc.
pub fn clsact(ifindex: u32) {
    let mut message = TcMessage::with_index(ifindex.cast_signed());
    message.header.parent = TcHandle { major: 0xffff, minor: 0xfff1 };
    message.header.handle = TcHandle { major: 0xffff, minor: 0 };
    message.attributes = vec![TcAttribute::Kind("clsact".to_owned())];
    netlink("RTM_NEWQDISC", RouteNetlinkMessage::NewQueueDiscipline(message));
}

/// Adds a filter of classic BPF at ingress, which is no program that could be asked about.
pub fn classic(ifindex: u32, priority: u16) {
    /// `TCA_BPF_OPS_LEN` and `TCA_BPF_OPS`
    const OPS_LEN: u16 = 4;
    const OPS: u16 = 5;
    let mut message = TcMessage::with_index(ifindex.cast_signed());
    message.header.parent = TcHandle { major: 0xffff, minor: 0xfff2 };
    message.header.info = u32::from(priority) << 16 | u32::from(3_u16.to_be());
    let option = |kind, value: &[u8]| {
        TcOption::Bpf(TcFilterBpfOption::Other(DefaultNla::new(kind, value.to_vec())))
    };
    message.attributes = vec![
        TcAttribute::Kind("bpf".to_owned()),
        // One instruction: return 0, "no match".
        TcAttribute::Options(vec![
            option(OPS_LEN, &1_u16.to_ne_bytes()),
            option(OPS, &[0x06, 0, 0, 0, 0, 0, 0, 0]),
        ]),
    ];
    netlink("RTM_NEWTFILTER", RouteNetlinkMessage::NewTrafficFilter(message));
}

fn netlink(what: &str, message: RouteNetlinkMessage) {
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE;
    let mut message = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(message));
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    let mut socket = Socket::new(NETLINK_ROUTE).expect("netlink");
    socket.bind_auto().expect("bind");
    socket.connect(&SocketAddr::new(0, 0)).expect("connect");
    socket.send(&bytes, 0).expect("send");
    let (answer, _) = socket.recv_from_full().expect("answer");
    let answer = NetlinkMessage::<RouteNetlinkMessage>::deserialize(&answer).expect("netlink");
    match answer.payload {
        NetlinkPayload::Error(error) if error.code.is_none() => {}
        other => panic!("{what}: {other:?}"),
    }
}

impl Link {
    /// Pins it, with the folders above.
    pub fn pin(&self, path: &Path) {
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("folders in bpffs");
        pin(self.fd.as_fd(), path);
    }
}

/// Pins an object.
pub fn pin(object: BorrowedFd<'_>, path: &Path) {
    let path = CString::new(path.as_os_str().as_bytes()).expect("a path");
    Attribute::default().address(path.as_ptr()).fd(object).word(0).call("BPF_OBJ_PIN", 6);
}
