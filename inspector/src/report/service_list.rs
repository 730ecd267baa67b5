//! `inspect service list`: what `cilium-dbg service list` prints, from the maps alone.
//!
//! The agent prints its own tables; the maps are what it made of them. What cannot be told from
//! the maps is listed in `docs/service-list.md`.

use std::{
    fmt,
    io::{self, Write},
    net::IpAddr,
};

use serde::Serialize;

use super::text_table::TextTable;
use crate::{
    cilium::{
        backends::{Backend, BackendState},
        flags::{ServiceFlags, ServiceType},
        proto::Protocol,
        release::{QuarantinedWord, Release, ServiceListFormat},
        services::{Scope, ServiceKey, ServiceValue},
    },
    evidence::tables::{Frontend, FrontendName, Problem, Tables},
};

/// One backend of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ListedBackend {
    /// Address.
    pub address: IpAddr,
    /// Port.
    pub port: u16,
    /// Protocol.
    pub protocol: Protocol,
    /// State, in the agent's words.
    pub state: &'static str,
    /// Whether this is the local proxy of an L7 frontend, which is in no backend map.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub proxy: bool,
}

/// One row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ListedService {
    /// Id of the frontend, which is its reverse NAT index.
    pub id: u16,
    /// Address.
    pub address: IpAddr,
    /// Port.
    pub port: u16,
    /// Protocol.
    pub protocol: Protocol,
    /// Scope.
    pub scope: Scope,
    /// Type.
    pub r#type: ServiceType,
    /// externalTrafficPolicy is Local.
    pub external_traffic_policy_local: bool,
    /// internalTrafficPolicy is Local.
    pub internal_traffic_policy_local: bool,
    /// Backends.
    pub backends: Vec<ListedBackend>,
}

/// The rows, sorted by id and then by frontend.
#[must_use]
pub fn rows(tables: &Tables) -> Vec<ListedService> {
    let behaviour = tables.releases.behaviour();
    let format = behaviour.service_list;
    let mut rows: Vec<ListedService> = tables
        .frontends()
        .filter_map(|frontend| {
            let master = frontend.master?;
            let hidden = frontend.key.is_wildcard()
                || (format.node_port_surrogate_only && has_surrogate(tables, &frontend));
            (!hidden).then(|| row(tables, behaviour.release, format, &frontend, master))
        })
        .collect();
    rows.sort_by_key(|row| (row.id, row.address, row.port, row.protocol, row.scope));
    rows
}

/// Whether a node port on one of the node's addresses also stands under the unspecified address.
fn has_surrogate(tables: &Tables, frontend: &Frontend<'_>) -> bool {
    let flags = frontend.master.map_or(ServiceFlags(0), ServiceValue::flags);
    let on_node = matches!(flags.service_type(), ServiceType::NodePort | ServiceType::HostPort);
    if !on_node || frontend.key.address.is_unspecified() {
        return false;
    }
    let unspecified = match frontend.key.address {
        IpAddr::V4(_) => IpAddr::from([0; 4]),
        IpAddr::V6(_) => IpAddr::from([0; 16]),
    };
    let surrogate = ServiceKey { address: unspecified, ..frontend.key };
    tables.services().binary_search_by_key(&surrogate, |entry| entry.key).is_ok()
}

fn row(
    tables: &Tables,
    release: Release,
    format: ServiceListFormat,
    frontend: &Frontend<'_>,
    master: &ServiceValue,
) -> ListedService {
    let ServiceKey { address, port, protocol, scope, slot: _ } = frontend.key;
    let flags = master.flags();
    let count = master.count.get();
    let mut found: Vec<(&Backend, bool)> = frontend
        .slots
        .iter()
        .filter_map(|entry| {
            let backend = tables.backend(address, entry.value.union.get())?;
            Some((backend, entry.key.slot <= count))
        })
        .collect();
    if release >= Release::V1_18 {
        found.sort_by_key(|(backend, _)| (backend.address, backend.port, backend.id));
    } else {
        found.sort_by_key(|(backend, _)| backend.id);
    }
    // One entry of the backend map serves all frontends and holds the state that one of them
    // gives it. Terminating backends are chosen only where there is no active one.
    let any_active =
        found.iter().any(|(backend, chosen)| *chosen && backend.state == BackendState::Active);
    let mut backends: Vec<ListedBackend> = found
        .into_iter()
        .map(|(backend, selectable)| ListedBackend {
            address: backend.address,
            port: backend.port,
            protocol: backend.protocol,
            state: match backend.state {
                BackendState::Terminating if selectable && any_active => "active",
                _ => state(release, format, backend, selectable, count),
            },
            proxy: false,
        })
        .collect();
    if format.l7_backend && flags.l7() {
        backends.push(ListedBackend {
            address: match address {
                IpAddr::V4(_) => IpAddr::from([127, 0, 0, 1]),
                IpAddr::V6(_) => IpAddr::V6(std::net::Ipv6Addr::LOCALHOST),
            },
            port: master.l7_proxy_port(),
            protocol: Protocol::TCP,
            state: "active",
            proxy: true,
        });
    }
    ListedService {
        id: master.rev_nat_index.get(),
        address,
        port,
        protocol,
        scope,
        r#type: flags.service_type(),
        external_traffic_policy_local: flags.ext_local(),
        internal_traffic_policy_local: flags.int_local(),
        backends,
    }
}

/// The agent's word for the state of a backend.
fn state(
    release: Release,
    format: ServiceListFormat,
    backend: &Backend,
    selectable: bool,
    count: u16,
) -> &'static str {
    match backend.state {
        BackendState::Active if !selectable && format.quarantined == QuarantinedWord::OfSlot => {
            "quarantined"
        }
        BackendState::Quarantined if format.quarantined == QuarantinedWord::Never => "active",
        // A terminating backend that still serves is used when there is no other; one that is
        // behind an empty count does not serve.
        BackendState::Terminating if release >= Release::V1_19 && count == 0 => {
            "terminating-not-serving"
        }
        state => state.as_str().unwrap_or("unknown"),
    }
}

impl ListedService {
    /// The frontend as Cilium prints it.
    #[must_use]
    pub fn frontend(&self, release: Release) -> FrontendName {
        let Self { address, port, protocol, scope, .. } = *self;
        FrontendName { key: ServiceKey { address, port, protocol, scope, slot: 0 }, release }
    }
}

/// `1 => 10.77.1.228:8080/TCP (active)`
struct BackendCell<'a>(ServiceListFormat, usize, &'a ListedBackend);

impl fmt::Display for BackendCell<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(format, number, backend) = self;
        match backend.address {
            IpAddr::V4(address) => write!(f, "{number} => {address}:{}", backend.port)?,
            IpAddr::V6(address) => write!(f, "{number} => [{address}]:{}", backend.port)?,
        }
        if format.protocol {
            write!(f, "/{}", backend.protocol)?;
        }
        if format.state {
            write!(f, " ({})", backend.state)?;
        }
        Ok(())
    }
}

/// Makes the table.
#[must_use]
pub fn table(tables: &Tables) -> TextTable {
    let behaviour = tables.releases.behaviour();
    let format = behaviour.service_list;
    let mut table = TextTable::new(&["ID", "Frontend", "Service Type", "Backend"], true);
    for row in rows(tables) {
        table.cell(row.id);
        table.cell(row.frontend(behaviour.release));
        table.cell(row.r#type.as_str());
        match row.backends.first() {
            Some(first) => table.cell(BackendCell(format, 1, first)),
            None => table.cell(""),
        }
        for (index, backend) in row.backends.iter().enumerate().skip(1) {
            table.cell("");
            table.cell("");
            table.cell("");
            table.cell(BackendCell(format, index + 1, backend));
        }
    }
    table
}

/// Writes the rows as JSON.
///
/// # Errors
/// The error of the writer.
pub fn write_json(tables: &Tables, out: &mut impl Write) -> io::Result<()> {
    #[derive(Serialize)]
    struct Envelope<'t> {
        schema: &'static str,
        release: String,
        services: Vec<ListedService>,
        problems: &'t [Problem],
    }

    let envelope = Envelope {
        schema: "inspector.service-list/1",
        release: tables.releases.to_string(),
        services: rows(tables),
        problems: &tables.problems,
    };
    serde_json::to_writer(&mut *out, &envelope)?;
    out.write_all(b"\n")
}
