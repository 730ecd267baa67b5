//! `node_config.h`: what the agent compiled the datapath with.

use std::{collections::BTreeMap, fs::File, io, io::Read, path::Path};

/// Where Cilium keeps its state.
pub const STATE: &str = "/var/run/cilium/state";

/// The header's places below the state directory, the newer first.
const PLACES: [&str; 2] = ["globals/node_config.h", "node_config.h"];

/// Bytes that are read: the header has a few thousand.
const LIMIT: u64 = 1 << 20;

/// The macros that decide what happens to a packet for a VIP.
const MACROS: &[&str] = &[
    "DIRECT_ROUTING_DEV_IFINDEX",
    "DSR_ENCAP_MODE",
    "ENABLE_DSR",
    "ENABLE_HOST_ROUTING",
    "ENABLE_IPV4",
    "ENABLE_IPV6",
    "ENABLE_JIFFIES",
    "ENABLE_L2_ANNOUNCEMENTS",
    "ENABLE_L7_LB",
    "ENABLE_MASQUERADE_IPV4",
    "ENABLE_MASQUERADE_IPV6",
    "ENABLE_NODEPORT",
    "ENABLE_NODEPORT_ACCELERATION",
    "ENABLE_SOCKET_LB_FULL",
    "ENABLE_SOCKET_LB_HOST_ONLY",
    "ENABLE_TPROXY",
    "LB_MAGLEV_LUT_SIZE",
    "LB_SELECTION",
    "NODEPORT_PORT_MAX",
    "NODEPORT_PORT_MIN",
    "SERVICE_NO_BACKEND_RESPONSE",
    "TUNNEL_MODE",
];

/// Reads the header below `state`; `None` if there is none.
///
/// # Errors
/// The error of reading it.
pub fn read(state: &Path) -> io::Result<Option<BTreeMap<String, String>>> {
    for place in PLACES {
        let mut text = String::new();
        match File::open(state.join(place)) {
            Ok(file) => file.take(LIMIT).read_to_string(&mut text)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        return Ok(Some(parse(&text)));
    }
    Ok(None)
}

/// The macros that matter, with their values; one without has the empty text.
fn parse(text: &str) -> BTreeMap<String, String> {
    text.lines()
        .filter_map(|line| {
            let define = line.trim().strip_prefix("#define")?;
            let define = define.strip_prefix([' ', '\t'])?.trim();
            let (name, value) = define.split_once([' ', '\t']).unwrap_or((define, ""));
            let value = value.split("/*").next().unwrap_or_default();
            let value = value.split("//").next().unwrap_or_default();
            MACROS.contains(&name).then(|| (name.to_owned(), value.trim().to_owned()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const HEADER: &str = "/*\n * Cilium: #define ENABLE_DSR in a comment\n */\n\
        #define ENABLE_IPV4 1\n\
        #define LB_SELECTION\t1 /* random */\n\
        #define ENABLE_JIFFIES\n\
        #define ENABLE_L7_LBX 1\n\
        #define CILIUM_NET_MAC { .addr = { 0x1, 0x2 } }\n\
        #define   TUNNEL_MODE   1 // yes\n\
        #undef ENABLE_TPROXY\n";

    #[test]
    fn macros_are_read_with_their_values() {
        let read: Vec<_> = parse(HEADER).into_iter().collect();
        let expected = [
            ("ENABLE_IPV4", "1"),
            ("ENABLE_JIFFIES", ""),
            ("LB_SELECTION", "1"),
            ("TUNNEL_MODE", "1"),
        ];
        assert_eq!(read, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
    }

    #[test]
    fn the_newer_place_comes_first() {
        let state = tempfile::tempdir().unwrap();
        assert_eq!(read(state.path()).unwrap(), None);
        fs::write(state.path().join("node_config.h"), "#define LB_SELECTION 1\n").unwrap();
        assert_eq!(read(state.path()).unwrap().unwrap()["LB_SELECTION"], "1");
        fs::create_dir(state.path().join("globals")).unwrap();
        fs::write(state.path().join(PLACES[0]), "#define LB_SELECTION 2\n").unwrap();
        assert_eq!(read(state.path()).unwrap().unwrap()["LB_SELECTION"], "2");
        // Nothing is taken from the other where this one cannot be read.
        fs::write(state.path().join(PLACES[0]), [0xff, 0xfe]).unwrap();
        assert_eq!(read(state.path()).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
