//! Questions to the kernel over netlink, blocking and read-only.
//!
//! The socket is that of `netlink-sys`. Messages are read here, attribute by attribute, and only
//! those that are needed: a node has hundreds of devices and thousands of neighbours, each with
//! dozens of attributes, and one that a newer kernel has added, or has made longer, must not spoil
//! the rest. (The `netlink-packet-*` crates read all of a message or refuse it.)
//!
//! Every request here is a "get". Nothing in this file can change anything; the little that is
//! changed is in [`super::change`].

use std::{fmt, io, net::IpAddr};

use netlink_sys::{Socket, SocketAddr};

/// Length of `struct nlmsghdr`.
const HEADER: usize = 16;

/// `NLMSG_NOOP`, `NLMSG_ERROR`, `NLMSG_DONE` (linux/netlink.h).
const NOOP: u16 = 1;
const ERROR: u16 = 2;
const DONE: u16 = 3;

/// Flags of messages (linux/netlink.h).
pub(super) const NLM_F_ACK: u16 = 0x4;
const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_DUMP_INTR: u16 = 0x10;
const NLM_F_DUMP: u16 = 0x300;

/// What of an attribute's type is no flag.
const NLA_TYPE_MASK: u16 = 0x3fff;

/// Bytes for one `recv`. The kernel fills 32 KiB of a dump at a time where there is room for it.
const BUFFER: usize = 32 * 1024;

/// Requests that are sent at once: their answers have to fit into the socket's receive buffer,
/// which holds about two hundred small ones by default.
const BATCH: usize = 64;

/// Seconds that the kernel may take for one answer; it takes microseconds.
const PATIENCE_S: libc::time_t = 5;

/// How often a dump is read again that changed while it was read.
const ATTEMPTS: usize = 3;

/// Why a question over netlink has no answer.
#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    /// A call on the socket failed.
    #[error("netlink {call}: {source}")]
    Call {
        /// The call.
        call: &'static str,
        /// What it failed with.
        source: io::Error,
    },
    /// The kernel refused the request.
    #[error("the kernel refuses the netlink request {request}: {source}")]
    Refused {
        /// The request.
        request: Request,
        /// Why.
        source: io::Error,
    },
    /// What came back is no sequence of messages.
    #[error("the kernel's answer to the netlink request {0} cannot be read: it is cut short")]
    Malformed(Request),
}

impl NetlinkError {
    /// The kernel's refusal of a request.
    pub(crate) fn refused(request: Request, number: i32) -> Self {
        Self::Refused { request, source: io::Error::from_raw_os_error(number) }
    }

    /// The number of the error that the kernel gave.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Call { source, .. } | Self::Refused { source, .. } => source.raw_os_error(),
            Self::Malformed(_) => None,
        }
    }
}

/// A kind of request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Message type: `RTM_GETLINK`, …, or the id of a generic netlink family.
    pub kind: u16,
    /// Its name, for errors.
    pub name: &'static str,
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// A socket for questions to one part of the kernel, in the network namespace of the thread that
/// opened it.
pub struct Netlink {
    socket: Socket,
    sequence: u32,
    buffer: Vec<u8>,
}

impl Netlink {
    /// Opens a socket of `protocol`: `NETLINK_ROUTE`, `NETLINK_GENERIC`, ….
    ///
    /// # Errors
    /// [`NetlinkError::Call`].
    pub fn open(protocol: i32) -> Result<Self, NetlinkError> {
        // The type of netlink-sys' parameter; protocols are small numbers.
        let protocol = protocol.try_into().unwrap_or(isize::MAX);
        let socket = Socket::new(protocol).map_err(call("socket"))?;
        let patience = libc::timeval { tv_sec: PATIENCE_S, tv_usec: 0 };
        // SAFETY: the kernel reads one timeval of the length given.
        let result = unsafe {
            libc::setsockopt(
                std::os::fd::AsRawFd::as_raw_fd(&socket),
                libc::SOL_SOCKET,
                libc::SO_RCVTIMEO,
                (&raw const patience).cast(),
                u32::try_from(size_of::<libc::timeval>()).unwrap_or_default(),
            )
        };
        if result != 0 {
            return Err(call("setsockopt(SO_RCVTIMEO)")(io::Error::last_os_error()));
        }
        // So that the kernel filters dumps of routes by table and device. One that cannot (before
        // 4.20) sends everything, and what is not wanted is left out here.
        let _ = socket.set_netlink_get_strict_chk(true);
        Ok(Self { socket, sequence: 0, buffer: Vec::with_capacity(BUFFER) })
    }

    /// Asks for everything of a kind; `body` is the message after its header, and each answer's
    /// body is handed to `collect`, which starts anew with an empty collection for each attempt.
    ///
    /// Also returns whether the kernel says that nothing changed while it was read.
    ///
    /// # Errors
    /// [`NetlinkError`].
    pub fn dump<T: Default>(
        &mut self,
        request: Request,
        body: &[u8],
        mut collect: impl FnMut(&mut T, &[u8]),
    ) -> Result<(T, bool), NetlinkError> {
        let mut attempt = 1;
        loop {
            let mut all = T::default();
            let steady = self.dump_once(request, body, |message| collect(&mut all, message))?;
            if steady || attempt == ATTEMPTS {
                return Ok((all, steady));
            }
            attempt += 1;
        }
    }

    fn dump_once(
        &mut self,
        request: Request,
        body: &[u8],
        mut each: impl FnMut(&[u8]),
    ) -> Result<bool, NetlinkError> {
        self.sequence += 1;
        let mut message = Vec::new();
        push_message(&mut message, request.kind, NLM_F_DUMP, self.sequence, body);
        self.send(&message)?;
        let mut steady = true;
        loop {
            self.receive()?;
            for message in Messages(&self.buffer) {
                let message = message.ok_or(NetlinkError::Malformed(request))?;
                // What is left of a question that was given up.
                if message.sequence != self.sequence {
                    continue;
                }
                steady &= message.flags & NLM_F_DUMP_INTR == 0;
                match message.kind {
                    NOOP => {}
                    // The end of a dump carries an error number of its own.
                    DONE | ERROR => match error_of(message.body) {
                        0 => return Ok(steady),
                        number => return Err(NetlinkError::refused(request, number)),
                    },
                    _ => each(message.body),
                }
            }
        }
    }

    /// Asks several questions that have one answer each. The answers come in the order of the
    /// questions; one that the kernel refused is the number of its error.
    ///
    /// # Errors
    /// [`NetlinkError`] if the questions could not be asked at all.
    pub fn ask(
        &mut self,
        request: Request,
        bodies: &[Vec<u8>],
    ) -> Result<Vec<Result<Vec<u8>, i32>>, NetlinkError> {
        let mut answers = Vec::with_capacity(bodies.len());
        for batch in bodies.chunks(BATCH) {
            let first = self.sequence + 1;
            let mut messages = Vec::new();
            for body in batch {
                self.sequence += 1;
                // No acknowledgement is asked for: a question has either an answer or an error.
                push_message(&mut messages, request.kind, 0, self.sequence, body);
            }
            self.send(&messages)?;
            let mut got: Vec<Option<Result<Vec<u8>, i32>>> = vec![None; batch.len()];
            while got.iter().any(Option::is_none) {
                self.receive()?;
                for message in Messages(&self.buffer) {
                    let message = message.ok_or(NetlinkError::Malformed(request))?;
                    let place = message.sequence.checked_sub(first).map(|place| place as usize);
                    let Some(slot) = place.and_then(|place| got.get_mut(place)) else { continue };
                    *slot = match message.kind {
                        NOOP => continue,
                        ERROR => Some(Err(error_of(message.body))),
                        _ => Some(Ok(message.body.to_vec())),
                    };
                }
            }
            answers.extend(got.into_iter().flatten());
        }
        Ok(answers)
    }

    fn send(&self, messages: &[u8]) -> Result<(), NetlinkError> {
        let kernel = SocketAddr::new(0, 0);
        self.socket.send_to(messages, &kernel, 0).map_err(call("send"))?;
        Ok(())
    }

    /// Receives into the buffer.
    fn receive(&mut self) -> Result<(), NetlinkError> {
        loop {
            self.buffer.clear();
            match self.socket.recv(&mut self.buffer, 0) {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(call("receive")(error)),
            }
        }
    }
}

fn call(call: &'static str) -> impl FnOnce(io::Error) -> NetlinkError {
    move |source| NetlinkError::Call { call, source }
}

/// The error of a `NLMSG_ERROR` or `NLMSG_DONE`, as a positive number; 0 is none.
pub(super) fn error_of(body: &[u8]) -> i32 {
    u32_at(body, 0).map_or(0, |number| number.cast_signed().saturating_neg())
}

/// A message with its header taken apart.
struct Message<'a> {
    kind: u16,
    flags: u16,
    sequence: u32,
    body: &'a [u8],
}

/// The messages in a buffer; `None` for one that is cut short, which is the last.
struct Messages<'a>(&'a [u8]);

impl<'a> Iterator for Messages<'a> {
    type Item = Option<Message<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let buffer = std::mem::take(&mut self.0);
        let length = u32_at(buffer, 0).map_or(0, |length| length as usize);
        let (Some(body), Some(kind), Some(flags), Some(sequence)) =
            (buffer.get(HEADER..length), u16_at(buffer, 4), u16_at(buffer, 6), u32_at(buffer, 8))
        else {
            return Some(None);
        };
        self.0 = buffer.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(Some(Message { kind, flags, sequence, body }))
    }
}

/// Types and bodies of the messages in `bytes`, as the kernel sends notifications. Stops at one that
/// is cut short.
pub fn bodies(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    Messages(bytes).map_while(|message| message.map(|message| (message.kind, message.body)))
}

/// Appends a request: `struct nlmsghdr`, body, padding.
pub(super) fn push_message(to: &mut Vec<u8>, kind: u16, flags: u16, sequence: u32, body: &[u8]) {
    let length = HEADER + body.len();
    to.extend(u32::try_from(length).unwrap_or(u32::MAX).to_ne_bytes());
    to.extend(kind.to_ne_bytes());
    to.extend((NLM_F_REQUEST | flags).to_ne_bytes());
    to.extend(sequence.to_ne_bytes());
    // The kernel knows the sender by its address.
    to.extend(0_u32.to_ne_bytes());
    to.extend(body);
    to.resize(to.len().next_multiple_of(4), 0);
}

/// Appends an attribute: length, type, value, padding.
pub fn push_attribute(to: &mut Vec<u8>, kind: u16, value: &[u8]) {
    to.extend(u16::try_from(4 + value.len()).unwrap_or(u16::MAX).to_ne_bytes());
    to.extend(kind.to_ne_bytes());
    to.extend(value);
    to.resize(to.len().next_multiple_of(4), 0);
}

/// An address as attributes hold it: its bytes.
#[must_use]
pub fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// The attributes in `bytes`: type (without the flag bits) and value. Stops at one that is cut
/// short.
pub fn attributes(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let (length, kind) = (usize::from(u16_at(rest, 0)?), u16_at(rest, 2)?);
        let value = rest.get(4..length)?;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind & NLA_TYPE_MASK, value))
    })
}

/// The 16-bit number in host byte order at `offset`.
#[must_use]
pub fn u16_at(bytes: &[u8], offset: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(offset..)?.first_chunk().copied()?))
}

/// The 32-bit number in host byte order at `offset`.
#[must_use]
pub fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(offset..)?.first_chunk().copied()?))
}

/// The 64-bit number in host byte order at `offset`.
#[must_use]
pub fn u64_at(bytes: &[u8], offset: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(offset..)?.first_chunk().copied()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_and_attributes_are_read_as_they_are_written() {
        let mut body = vec![1, 2, 3, 4];
        push_attribute(&mut body, 7, b"odd");
        push_attribute(&mut body, 8, b"");
        let mut buffer = Vec::new();
        push_message(&mut buffer, 20, NLM_F_DUMP, 5, &body);
        push_message(&mut buffer, 21, 0, 6, &[9]);
        let messages: Vec<_> = Messages(&buffer).map(Option::unwrap).collect();
        assert_eq!(messages.len(), 2);
        assert_eq!((messages[0].kind, messages[0].sequence), (20, 5));
        let read: Vec<_> = attributes(&messages[0].body[4..]).collect();
        assert_eq!(read, [(7, &b"odd"[..]), (8, &b""[..])]);
        assert_eq!((messages[1].kind, messages[1].body), (21, &[9_u8][..]));
    }

    #[test]
    fn what_is_cut_short_ends_the_reading() {
        let mut body = Vec::new();
        push_attribute(&mut body, 7, b"value");
        assert_eq!(attributes(&body[..6]).count(), 0);
        let mut buffer = Vec::new();
        push_message(&mut buffer, 20, 0, 1, &body);
        assert!(Messages(&buffer[..HEADER + 2]).next().unwrap().is_none());
        // A length shorter than its own header.
        buffer[..4].copy_from_slice(&3_u32.to_ne_bytes());
        let mut messages = Messages(&buffer);
        assert!(messages.next().unwrap().is_none());
        assert!(messages.next().is_none());
    }

    #[test]
    fn the_kernel_refuses_with_a_name() {
        let mut netlink = Netlink::open(libc::NETLINK_ROUTE).unwrap();
        let request = Request { kind: libc::RTM_GETLINK, name: "RTM_GETLINK" };
        let mut body = vec![0; 16];
        body[4..8].copy_from_slice(&i32::MAX.to_ne_bytes());
        let answers = netlink.ask(request, &[body.clone(), vec![0; 1], body]).unwrap();
        assert_eq!(answers, [Err(libc::ENODEV), Err(libc::EINVAL), Err(libc::ENODEV)]);
    }
}
