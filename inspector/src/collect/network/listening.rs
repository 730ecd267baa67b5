//! Which ports somebody listens on, by `/proc/net`.
//!
//! Not by `sock_diag`: asking that makes the kernel load a module where it is not loaded yet. The
//! kernel lists listening TCP sockets before all others, so that few lines are read of many.

use std::{
    collections::BTreeSet,
    fs::File,
    io::{self, BufRead, BufReader},
};

/// State of a TCP socket that listens, and of a UDP socket that is not connected.
const LISTEN: &str = "0A";
const UNCONNECTED: &str = "07";

/// The ports of `wanted` at which a TCP socket listens.
///
/// # Errors
/// The error of reading `/proc/thread-self/net/tcp` or `tcp6`.
pub fn tcp(wanted: &BTreeSet<u16>) -> io::Result<Vec<u16>> {
    read(["tcp", "tcp6"], |lines| tcp_ports(lines, wanted))
}

/// The ports of `wanted` at which a UDP socket receives from anybody.
///
/// # Errors
/// The error of reading `/proc/thread-self/net/udp` or `udp6`.
pub fn udp(wanted: &BTreeSet<u16>) -> io::Result<Vec<u16>> {
    read(["udp", "udp6"], |lines| udp_ports(lines, wanted))
}

fn read(
    names: [&str; 2],
    ports: impl Fn(BufReader<File>) -> io::Result<BTreeSet<u16>>,
) -> io::Result<Vec<u16>> {
    let mut all = BTreeSet::new();
    for name in names {
        match File::open(format!("/proc/thread-self/net/{name}")) {
            Ok(file) => all.extend(ports(BufReader::new(file))?),
            // A kernel without IPv6.
            Err(error) if error.kind() == io::ErrorKind::NotFound && name.ends_with('6') => {}
            Err(error) => return Err(error),
        }
    }
    Ok(all.into_iter().collect())
}

fn tcp_ports(lines: impl BufRead, wanted: &BTreeSet<u16>) -> io::Result<BTreeSet<u16>> {
    let mut ports = BTreeSet::new();
    for line in lines.lines().skip(1) {
        match socket(&line?) {
            Some((port, state)) if state == LISTEN => {
                ports.extend(wanted.get(&port));
            }
            // Those that listen come first.
            _ => break,
        }
    }
    Ok(ports)
}

fn udp_ports(lines: impl BufRead, wanted: &BTreeSet<u16>) -> io::Result<BTreeSet<u16>> {
    let mut ports = BTreeSet::new();
    for line in lines.lines().skip(1) {
        if let Some((port, state)) = socket(&line?)
            && state == UNCONNECTED
        {
            ports.extend(wanted.get(&port));
        }
    }
    Ok(ports)
}

/// Local port and state of a line: `0: 0100007F:1F90 00000000:0000 0A …`.
fn socket(line: &str) -> Option<(u16, String)> {
    let mut words = line.split_ascii_whitespace().skip(1);
    let (_, port) = words.next()?.rsplit_once(':')?;
    let state = words.nth(1)?;
    Some((u16::from_str_radix(port, 16).ok()?, state.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TCP: &str = "  sl  local_address rem_address   st tx_queue rx_queue\n\
        \x20  0: 0100007F:273A 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0\n\
        \x20  1: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0\n\
        \x20  2: 0100007F:2743 0100007F:9C40 01 00000000:00000000 00:00000000 00000000     0\n";

    #[test]
    fn only_sockets_that_listen_count() {
        let wanted = BTreeSet::from([10042, 10051]);
        assert_eq!(tcp_ports(TCP.as_bytes(), &wanted).unwrap(), BTreeSet::from([10042]));
        let udp = TCP.replace(" 0A ", " 07 ");
        assert_eq!(udp_ports(udp.as_bytes(), &wanted).unwrap(), BTreeSet::from([10042]));
        assert!(tcp_ports(udp.as_bytes(), &wanted).unwrap().is_empty());
    }
}
