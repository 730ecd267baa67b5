//! `inspect lb list`: what `cilium-dbg bpf lb list` prints, from the same maps.

use std::{
    fmt,
    io::{self, Write},
    net::IpAddr,
};

use serde::{Serialize, Serializer};

use super::text_table::TextTable;
use crate::{
    cilium::{
        backends::{Backend, BackendState},
        flags::{ServiceFlags, ServiceType},
        layout::Family,
        proto::Protocol,
        release::{BackendsForm, FrontendsForm, Grouping, LbListFormat},
        services::{Scope, ServiceKey, ServiceValue},
    },
    evidence::tables::{Frontend, Problem, ServiceEntry, Tables},
};

/// Which of the views.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum View {
    /// Services with their backends' addresses.
    #[default]
    Services,
    /// The raw service entries.
    Frontends,
    /// The backend map.
    Backends,
    /// The reverse NAT map.
    RevNat,
    /// The source range map.
    SourceRanges,
}

/// `IP:PORT`, brackets around IPv6.
struct Socket(IpAddr, u16);

impl fmt::Display for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            IpAddr::V4(address) => write!(f, "{address}:{}", self.1),
            IpAddr::V6(address) => write!(f, "[{address}]:{}", self.1),
        }
    }
}

/// First column of a service entry.
struct FrontendCell<'a>(LbListFormat, &'a ServiceKey);

impl fmt::Display for FrontendCell<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ServiceKey { address, port, protocol, scope, slot } = *self.1;
        Socket(address, port).fmt(f)?;
        if self.0.protocol {
            write!(f, "/{protocol}")?;
        }
        if scope == Scope::Internal {
            f.write_str("/i")?;
        }
        if self.0.grouping == Grouping::Slot {
            write!(f, " ({slot})")?;
        }
        Ok(())
    }
}

/// Second column of a service entry.
struct BackendCell<'a>(LbListFormat, &'a Tables, &'a ServiceEntry);

impl fmt::Display for BackendCell<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(format, tables, ServiceEntry { key, value }) = self;
        let id = value.rev_nat_index;
        if key.is_master() {
            let any = if key.address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
            write!(f, "{any} ({id})")?;
            if format.slot {
                f.write_str(" (0)")?;
            }
            write!(f, " [{}]", value.flags().text(tables.release()))?;
            if format.space_after_flags {
                f.write_str(" ")?;
                if value.flags().l7() {
                    write!(f, "(L7LB Proxy Port: {})", value.l7_proxy_port())?;
                }
            }
            return Ok(());
        }
        let Some(backend) = tables.backend(key.address, value.union.get()) else {
            return write!(f, "backend {} not found", value.union);
        };
        match backend.address {
            IpAddr::V4(address) => write!(f, "{address}")?,
            IpAddr::V6(address) => write!(f, "[{address}]")?,
        }
        if format.cluster && backend.cluster_id != 0 {
            write!(f, "@{}", backend.cluster_id)?;
        }
        write!(f, ":{}", backend.port)?;
        if format.protocol {
            write!(f, "/{}", backend.protocol)?;
        }
        write!(f, " ({id})")?;
        if format.slot {
            write!(f, " ({})", key.slot)?;
        }
        Ok(())
    }
}

/// Makes the table of one view.
#[must_use]
pub fn table(tables: &Tables, view: View) -> TextTable {
    let format = tables.releases.behaviour().lb_list;
    let second = if format.slot { "BACKEND ADDRESS (REVNAT_ID) (SLOT)" } else { "BACKEND ADDRESS" };
    match view {
        View::Services => {
            let header: &[&str] = if format.slot {
                &["SERVICE ADDRESS", "BACKEND ADDRESS (REVNAT_ID) (SLOT)"]
            } else {
                &["SERVICE ADDRESS", "BACKEND ADDRESS"]
            };
            let mut table = TextTable::new(header, false);
            grouped(&mut table, tables, format, |entry| BackendCell(format, tables, entry));
            table
        }
        View::Frontends => {
            let mut table = TextTable::new(&["SERVICE ADDRESS", "BACKEND ID"], false);
            grouped(&mut table, tables, format, |entry| FrontendsCell(format, entry));
            table
        }
        View::Backends => {
            let mut table = TextTable::new(id_header(second), false);
            for family in [Family::V4, Family::V6] {
                for backend in tables.backends(family) {
                    table.cell(backend.id);
                    table.cell(BackendsCell(format, backend));
                }
            }
            table
        }
        View::RevNat => {
            let mut table = TextTable::new(id_header(second), false);
            for entry in tables.reverse_nat.values() {
                table.cell(entry.index);
                table.cell(Socket(entry.address, entry.port));
            }
            table
        }
        View::SourceRanges => {
            let mut table = TextTable::new(&["SOURCE RANGE (REVNAT_ID)", ""], false);
            for range in tables.source_ranges.values().flatten() {
                table.cell(format_args!(
                    "{}/{} ({})",
                    range.address, range.prefix_len, range.rev_nat_index
                ));
                table.cell("");
            }
            table
        }
    }
}

fn id_header(second: &'static str) -> &'static [&'static str] {
    match second {
        "BACKEND ADDRESS" => &["ID", "BACKEND ADDRESS"],
        _ => &["ID", "BACKEND ADDRESS (REVNAT_ID) (SLOT)"],
    }
}

/// Rows of service entries: the first column is shown once for each group.
fn grouped<'t, D: fmt::Display>(
    table: &mut TextTable,
    tables: &'t Tables,
    format: LbListFormat,
    second: impl Fn(&'t ServiceEntry) -> D,
) {
    let mut before: Option<ServiceKey> = None;
    for entry in tables.services() {
        let group = ServiceKey { slot: 0, ..entry.key };
        if format.grouping == Grouping::Frontend && before == Some(group) {
            table.cell("");
        } else {
            table.cell(FrontendCell(format, &entry.key));
        }
        table.cell(second(entry));
        before = Some(group);
    }
}

/// Second column of `--frontends`.
struct FrontendsCell<'a>(LbListFormat, &'a ServiceEntry);

impl fmt::Display for FrontendsCell<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ServiceValue { union, count, rev_nat_index, flags, flags2, qcount } = self.1.value;
        write!(f, "{union} {count}")?;
        if self.0.frontends == FrontendsForm::CountQcount {
            write!(f, "[{qcount}]")?;
        }
        write!(f, " ({rev_nat_index}) [{flags:#x} {flags2:#x}]")
    }
}

/// Second column of `--backends`.
struct BackendsCell<'a>(LbListFormat, &'a Backend);

impl fmt::Display for BackendsCell<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(format, backend) = self;
        write!(f, "{}://", backend.protocol)?;
        match format.backends {
            BackendsForm::AddressPort => Socket(backend.address, backend.port).fmt(f),
            BackendsForm::Address | BackendsForm::Absent => {
                write!(f, "{}", backend.address)?;
                if format.cluster && backend.cluster_id != 0 {
                    write!(f, "@{}", backend.cluster_id)?;
                }
                Ok(())
            }
        }
    }
}

/// One frontend with real fields.
#[derive(Serialize)]
struct FrontendRow<'t> {
    address: IpAddr,
    port: u16,
    protocol: Protocol,
    scope: Scope,
    #[serde(flatten)]
    master: Option<MasterFields>,
    #[serde(serialize_with = "slots")]
    slots: (&'t Tables, &'t [ServiceEntry]),
}

#[derive(Serialize)]
struct MasterFields {
    id: u16,
    r#type: ServiceType,
    flags: String,
    flag_bits: ServiceFlags,
    wildcard: bool,
    count: u16,
    qcount: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    session_affinity_s: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    algorithm: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    l7_proxy_port: Option<u16>,
}

#[derive(Serialize)]
struct SlotRow<'t> {
    slot: u16,
    backend_id: u32,
    /// Nothing if the backend is not there.
    backend: Option<BackendFields<'t>>,
}

#[derive(Serialize)]
struct BackendFields<'t> {
    address: &'t IpAddr,
    port: u16,
    protocol: Protocol,
    state: BackendState,
    #[serde(skip_serializing_if = "is_zero")]
    cluster_id: u16,
    #[serde(skip_serializing_if = "is_zero_u8")]
    zone: u8,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
fn is_zero(number: &u16) -> bool {
    *number == 0
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
fn is_zero_u8(number: &u8) -> bool {
    *number == 0
}

fn slots<S: Serializer>(
    (tables, slots): &(&Tables, &[ServiceEntry]),
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(slots.iter().map(|entry| {
        let backend_id = entry.value.union.get();
        SlotRow {
            slot: entry.key.slot,
            backend_id,
            backend: tables.backend(entry.key.address, backend_id).map(BackendFields::new),
        }
    }))
}

impl<'t> BackendFields<'t> {
    fn new(backend: &'t Backend) -> Self {
        let Backend { id: _, address, port, protocol, state, cluster_id, zone } = backend;
        Self {
            address,
            port: *port,
            protocol: *protocol,
            state: *state,
            cluster_id: *cluster_id,
            zone: *zone,
        }
    }
}

impl<'t> FrontendRow<'t> {
    fn new(tables: &'t Tables, frontend: Frontend<'t>) -> Self {
        let Frontend { key, master, slots } = frontend;
        let ServiceKey { address, port, protocol, scope, slot: _ } = key;
        let master = master.map(|value| {
            let flags = value.flags();
            let plain = !flags.l7();
            MasterFields {
                id: value.rev_nat_index.get(),
                r#type: flags.service_type(),
                flags: flags.text(tables.release()).to_string(),
                flag_bits: flags,
                wildcard: key.is_wildcard(),
                count: value.count.get(),
                qcount: value.qcount.get(),
                session_affinity_s: (flags.affinity() && plain).then(|| value.affinity_timeout_s()),
                algorithm: Some(value.algorithm()).filter(|&number| plain && number != 0),
                l7_proxy_port: flags.l7().then(|| value.l7_proxy_port()),
            }
        });
        Self { address, port, protocol, scope, master, slots: (tables, slots) }
    }
}

#[derive(Serialize)]
struct BackendRow<'t> {
    id: u32,
    #[serde(flatten)]
    fields: BackendFields<'t>,
}

#[derive(Serialize)]
struct RevNatRow {
    id: u16,
    address: IpAddr,
    port: u16,
}

#[derive(Serialize)]
struct SourceRangeRow {
    id: u16,
    range: String,
}

/// Writes one view as JSON with real fields.
///
/// # Errors
/// The error of the writer.
pub fn write_json(tables: &Tables, view: View, out: &mut impl Write) -> io::Result<()> {
    #[derive(Serialize)]
    struct Envelope<'t> {
        schema: &'static str,
        release: String,
        #[serde(flatten)]
        rows: Rows<'t>,
        problems: &'t [Problem],
    }

    let envelope = Envelope {
        schema: "inspector.lb-list/1",
        release: tables.releases.to_string(),
        rows: Rows { tables, view },
        problems: &tables.problems,
    };
    serde_json::to_writer(&mut *out, &envelope)?;
    out.write_all(b"\n")
}

/// The rows of a view as one member of the document, streamed.
struct Rows<'t> {
    tables: &'t Tables,
    view: View,
}

impl Serialize for Rows<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeMap;

        let tables = self.tables;
        let mut map = serializer.serialize_map(None)?;
        match self.view {
            View::Services | View::Frontends => {
                map.serialize_entry(
                    "frontends",
                    &Seq(|| tables.frontends().map(|frontend| FrontendRow::new(tables, frontend))),
                )?;
            }
            View::Backends => map.serialize_entry(
                "backends",
                &Seq(|| {
                    [Family::V4, Family::V6]
                        .into_iter()
                        .flat_map(|family| tables.backends(family))
                        .map(|backend| BackendRow {
                            id: backend.id,
                            fields: BackendFields::new(backend),
                        })
                }),
            )?,
            View::RevNat => map.serialize_entry(
                "reverse_nat",
                &Seq(|| {
                    tables.reverse_nat.values().map(|entry| RevNatRow {
                        id: entry.index,
                        address: entry.address,
                        port: entry.port,
                    })
                }),
            )?,
            View::SourceRanges => map.serialize_entry(
                "source_ranges",
                &Seq(|| {
                    tables.source_ranges.values().flatten().map(|range| SourceRangeRow {
                        id: range.rev_nat_index,
                        range: format!("{}/{}", range.address, range.prefix_len),
                    })
                }),
            )?,
        }
        map.end()
    }
}

/// A sequence that is made while it is written.
struct Seq<F>(F);

impl<F, I> Serialize for Seq<F>
where
    F: Fn() -> I,
    I: Iterator,
    I::Item: Serialize,
{
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq((self.0)())
    }
}
