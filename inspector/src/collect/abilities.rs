//! What this node, kernel and user can do (`inspect doctor`): each ability with what it enables.
//!
//! Looks only; nothing is loaded, attached or created to find out.

use std::{fs, path::Path};

use serde::Serialize;

use super::{bpffs, dump, maps};
use crate::{
    cilium::{
        layout::{self, MapKind},
        release,
        runtime_config::{AGENT_LIVENESS, RuntimeConfig},
    },
    evidence::Bpffs,
    sys::host,
    trace::{
        observe::{self, Prospect},
        sighting::Tier,
    },
};

/// Whether an ability is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// It is.
    Good,
    /// It is not, and something is lost.
    Missing,
    /// It is not, and that is usual.
    Absent,
}

/// One ability.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Ability {
    /// What it is.
    pub what: String,
    /// Whether it is there.
    pub status: Status,
    /// What was found.
    pub found: String,
    /// What it enables.
    pub enables: String,
    /// Whether nothing works without it.
    pub essential: bool,
}

impl Ability {
    fn new(
        what: impl Into<String>,
        status: Status,
        found: impl Into<String>,
        enables: &str,
    ) -> Self {
        Self {
            what: what.into(),
            status,
            found: found.into(),
            enables: enables.to_owned(),
            essential: false,
        }
    }

    fn essential(self) -> Self {
        Self { essential: true, ..self }
    }
}

fn good_if(is: bool) -> Status {
    if is { Status::Good } else { Status::Missing }
}

/// Looks at the node.
#[must_use]
pub fn look(bpffs: Option<&Path>) -> Vec<Ability> {
    let mut abilities = Vec::new();
    privileges(&mut abilities);
    kernel(&mut abilities);
    tracing(&mut abilities);
    match bpffs::find(bpffs) {
        Ok(found) => {
            for one in &found {
                file_system(&mut abilities, one);
            }
            if let Some(read) = found.iter().find(|one| one.read) {
                pinned_maps(&mut abilities, read);
            }
        }
        Err(error) => abilities.push(
            Ability::new(
                "Cilium's pins",
                Status::Missing,
                error.to_string(),
                "everything but work on saved evidence",
            )
            .essential(),
        ),
    }
    abilities
}

fn privileges(abilities: &mut Vec<Ability>) {
    let held = host::capabilities().unwrap_or_default();
    let has = |name: &str| held.iter().any(|one| one == name || one == "CAP_SYS_ADMIN");
    // From 6.5 on the setting stops only the making of maps and the loading of programs (commit
    // 1d28635abcf1, "bpf: Move unprivileged checks into map_create() and bpf_prog_load()").
    let unprivileged = version_of(&host::kernel_release()).is_some_and(|kernel| kernel >= (6, 5))
        || fs::read_to_string("/proc/sys/kernel/unprivileged_bpf_disabled")
            .is_ok_and(|text| text.trim() == "0");
    for (name, enables) in [
        ("CAP_BPF", "reading maps: `inspect vip`, `service list`, `lb list`"),
        ("CAP_PERFMON", "tracing with tracepoints and kprobes"),
    ] {
        let found = match (has(name), name == "CAP_BPF" && unprivileged) {
            (true, _) => "held",
            (false, true) => "not held, but this kernel lets everybody read maps that bpffs shows",
            (false, false) => "not held",
        };
        let ability = Ability::new(name, good_if(found != "not held"), found, enables);
        abilities.push(if name == "CAP_BPF" { ability.essential() } else { ability });
    }
    let sys_admin = held.iter().any(|one| one == "CAP_SYS_ADMIN");
    abilities.push(Ability::new(
        "CAP_SYS_ADMIN",
        good_if(sys_admin),
        if sys_admin { "held" } else { "not held" },
        "which maps attached programs reach, Maglev tables: the kernel opens them by id only so",
    ));
    let net_admin = held.iter().any(|one| one == "CAP_NET_ADMIN");
    abilities.push(Ability::new(
        "CAP_NET_ADMIN",
        good_if(net_admin),
        if net_admin { "held" } else { "not held" },
        "which programs are attached to devices",
    ));
    let missing: Vec<&str> = ["CAP_SYS_ADMIN", "CAP_NET_ADMIN"]
        .into_iter()
        .filter(|name| !held.iter().any(|one| one == name))
        .collect();
    let found = match missing.as_slice() {
        [] => "possible".to_owned(),
        missing => format!("needs {}", missing.join(" and ")),
    };
    for (name, enables) in [
        ("simulation", "`inspect vip --simulate`: forwarded paths proved without a client"),
        (
            "injection",
            "`inspect vip --inject`: the whole way and the backend's answer, proved without a client",
        ),
    ] {
        abilities.push(Ability::new(name, good_if(missing.is_empty()), found.clone(), enables));
    }
}

fn kernel(abilities: &mut Vec<Ability>) {
    let release = host::kernel_release();
    let version = version_of(&release);
    let at_least = |major, minor| version.is_some_and(|version| version >= (major, minor));
    abilities.push(Ability::new(
        "kernel",
        good_if(at_least(4, 19)),
        release.clone(),
        "Cilium itself needs 4.19 or newer",
    ));
    abilities.push(Ability::new(
        "batch look-ups",
        good_if(at_least(5, 6)),
        if at_least(5, 6) { "there (5.6 and newer)" } else { "too old: maps are read key by key" },
        "large maps in milliseconds",
    ));
    abilities.push(Ability::new(
        "tcx",
        if at_least(6, 6) { Status::Good } else { Status::Absent },
        if at_least(6, 6) {
            "there (6.6 and newer)"
        } else {
            "too old: Cilium uses clsact filters"
        },
        "observers in front of Cilium's programs without a change of its qdiscs",
    ));
    let btf = Path::new("/sys/kernel/btf/vmlinux").exists();
    abilities.push(Ability::new(
        "kernel BTF",
        good_if(btf),
        if btf { "/sys/kernel/btf/vmlinux" } else { "not there" },
        "tracing that reads kernel structures",
    ));
    let lockdown = host::lockdown();
    let (status, found) = match lockdown.as_deref() {
        None => (
            Status::Absent,
            "cannot be told: not built in, or securityfs is not mounted".to_owned(),
        ),
        Some("none") => (Status::Good, "none".to_owned()),
        Some("integrity") => {
            (Status::Good, "integrity: kprobes and fentry may be refused".to_owned())
        }
        Some(mode) => (Status::Missing, format!("{mode}: every kind of tracing is refused")),
    };
    abilities.push(Ability::new("lockdown", status, found, "tracing beyond tc observers"));
}

/// Which kinds of observers `--trace` and `inspect trace` get here.
fn tracing(abilities: &mut Vec<Ability>) {
    let held = host::capabilities().unwrap_or_default();
    let has = |name: &str| {
        // CAP_SYS_ADMIN holds what was split from it, and CAP_NET_ADMIN was not.
        let split = matches!(name, "CAP_BPF" | "CAP_PERFMON");
        held.iter().any(|one| one == name || split && one == "CAP_SYS_ADMIN")
    };
    for Prospect { tier, found } in observe::prospects(has, host::lockdown().as_deref()) {
        let (name, enables) = match tier {
            Tier::Tc => ("tc", "arrival, replies, what leaves, who asks for a neighbour"),
            Tier::Netlink => ("netlink", "changes of neighbours"),
            Tier::Tracepoint => {
                ("tracepoint", "proof that the VIP was never looked up; routes, drops with reason")
            }
            Tier::Kprobe => ("kprobe", "local delivery, forwarding, the packet of a look-up"),
            Tier::Program => ("program", "packet and verdict of Cilium's own program"),
        };
        let (status, found) = match (found, tier) {
            (Ok(found), _) => (Status::Good, found),
            // The proof rests on the others.
            (Err(why), Tier::Kprobe | Tier::Program) => (Status::Absent, why),
            (Err(why), _) => (Status::Missing, why),
        };
        abilities.push(Ability::new(format!("tracing: {name}"), status, found, enables));
    }
}

/// `6.12.3-amd64` is (6, 12).
fn version_of(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|character: char| !character.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn file_system(abilities: &mut Vec<Ability>, bpffs: &Bpffs) {
    let place = bpffs.path.display();
    let ability = if bpffs.read {
        Ability::new(
            "bpffs",
            Status::Good,
            format!("{place} with {} of Cilium's pins", bpffs.pins.len()),
            "reading Cilium's maps",
        )
        .essential()
    } else {
        Ability::new(
            "second bpffs",
            Status::Missing,
            format!("{place} holds {} of Cilium's pins too", bpffs.pins.len()),
            "nothing: it is a fault (two-bpffs); read it with --bpffs to compare",
        )
    };
    abilities.push(ability);
}

fn pinned_maps(abilities: &mut Vec<Ability>, bpffs: &Bpffs) {
    let cpus = host::possible_cpus().unwrap_or(1);
    let mut any_proto = false;
    let mut alive = None;
    for name in &bpffs.pins {
        if !layout::is_read(name) {
            continue;
        }
        let map = match maps::open(&bpffs.path, name) {
            Ok(map) => map,
            Err((error, _)) => {
                let essential = name.contains("_services_") || name.contains("_backends");
                let ability =
                    Ability::new(name, Status::Missing, error.to_string(), "what it would say");
                abilities.push(if essential { ability.essential() } else { ability });
                continue;
            }
        };
        let layout = map.layout;
        let read = dump::read(&map.fd, &map.info, cpus);
        let (status, entries) = match &read {
            Ok(dump) => {
                let way = match dump.method {
                    dump::Method::Iterate => ", read key by key",
                    _ => "",
                };
                (
                    Status::Good,
                    format!("{} of {} entries{way}", dump.entries.len(), map.info.max_entries),
                )
            }
            Err(error) => (Status::Missing, format!("cannot be read: {error}")),
        };
        if let Ok(dump) = &read {
            for (key, value) in dump.entries.iter() {
                if layout.kind == MapKind::Services {
                    any_proto |= key[key.len() - 4] != 0;
                }
                if layout.kind == MapKind::RuntimeConfig
                    && let Ok(entry) = RuntimeConfig::decode(layout, key, value)
                    && entry.index == AGENT_LIVENESS
                {
                    alive = Some(entry.value);
                }
            }
        }
        abilities.push(Ability::new(
            name,
            status,
            format!("{}, generation {}, {entries}", map.info.map_type, layout.generation),
            enables(layout.kind),
        ));
    }
    for (kind, what) in [(MapKind::Services, "services map"), (MapKind::Backends, "backends map")] {
        let pinned = |pin: &String| {
            layout::LAYOUTS.iter().any(|layout| layout.kind == kind && layout.name == pin)
        };
        if !bpffs.pins.iter().any(pinned) {
            let found = "not pinned: Cilium is starting, or was stopped and cleaned up";
            abilities.push(Ability::new(what, Status::Missing, found, enables(kind)).essential());
        }
    }
    let releases = release::detect(bpffs.pins.iter().map(String::as_str), any_proto);
    abilities.push(Ability::new(
        "Cilium release",
        Status::Good,
        format!("{releases}, told from the pins"),
        "the right look-up order and words",
    ));
    if let Some(alive) = alive {
        let now = host::monotonic_ns();
        let silent = now.checked_sub(alive).filter(|_| alive != 0).map(|ns| ns / 1_000_000_000);
        let (status, found) = match silent {
            Some(seconds) if seconds < 15 => (Status::Good, format!("alive {seconds} s ago")),
            Some(seconds) => (Status::Missing, format!("last sign of life {seconds} s ago")),
            None => (Status::Missing, "no sign of life since boot".to_owned()),
        };
        abilities.push(Ability::new(
            "agent",
            status,
            found,
            "answers to ARP for announced VIPs; inspect itself needs no agent",
        ));
    }
}

/// What a map is read for.
fn enables(kind: MapKind) -> &'static str {
    match kind {
        MapKind::Services => "frontends and their slots",
        MapKind::Backends => "backend addresses and states",
        MapKind::ReverseNat => "whether replies come back as the VIP",
        MapKind::SourceRange => "which clients are let through",
        MapKind::L2Responder => "whether this node answers ARP or NDP for a VIP",
        MapKind::RuntimeConfig => "whether the agent is alive",
        MapKind::Endpoints => "which backends are pods of this node",
        MapKind::Ipcache => "on which node a remote backend is",
        MapKind::Maglev => "the share of each backend under Maglev",
        MapKind::Affinity | MapKind::AffinityMatch => "session affinity",
        MapKind::Devices => "which devices Cilium manages",
        MapKind::SkipLb => "sockets that bypass the load balancer",
        MapKind::Metrics => "drop counters",
        MapKind::Conntrack => "connections that went through the load balancer",
        MapKind::Snat => "source NAT of remote backends",
        MapKind::ReverseSk => "sockets that socket-LB translated",
        MapKind::Health => "health probes",
        MapKind::ActiveConnections => "connections per backend",
        MapKind::NodeMap => "node ids",
        MapKind::NodeportNeigh => "MAC addresses of clients",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_releases_are_read() {
        assert_eq!(version_of("6.18.44-fc-v669"), Some((6, 18)));
        assert_eq!(version_of("5.10.0-30-amd64"), Some((5, 10)));
        assert_eq!(version_of("6.6"), Some((6, 6)));
        assert_eq!(version_of("rubbish"), None);
    }
}
