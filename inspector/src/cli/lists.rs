//! `inspect service list` and `inspect lb list`

use anyhow::bail;
use inspector::{
    cilium::layout::{Family, LAYOUTS, Layout, MapKind},
    collect::Question,
    evidence::{
        Evidence, Subject,
        tables::{Problem, Tables},
    },
    report::{
        TextTable,
        lb_list::{self, View},
        service_list,
    },
};

use super::{
    Answer,
    args::{Format, Resolved, Views},
    output::{self, Loaded},
};

const SERVICES: &[MapKind] = &[MapKind::Services, MapKind::Backends];

/// Prints the services.
pub fn service_list(options: &Resolved) -> anyhow::Result<Answer> {
    output::only("service list", output::COMMON, options)?;
    let tables = load(SERVICES, options)?;
    match options.format {
        Format::Json => {
            output::write_stdout(|mut out| service_list::write_json(&tables, &mut out))?;
        }
        _ => print(&service_list::table(&tables), options)?,
    }
    Ok(conclude(&tables, options))
}

/// Prints one view of the load balancer's maps.
pub fn lb_list(views: &Views, options: &Resolved) -> anyhow::Result<Answer> {
    output::only("lb list", output::COMMON, options)?;
    let view = views.view();
    let kinds = match view {
        View::Services => SERVICES,
        View::Frontends => &[MapKind::Services],
        View::Backends => &[MapKind::Backends],
        View::RevNat => &[MapKind::ReverseNat],
        View::SourceRanges => &[MapKind::SourceRange],
    };
    let tables = load(kinds, options)?;
    match options.format {
        Format::Json => {
            output::write_stdout(|mut out| lb_list::write_json(&tables, view, &mut out))?;
        }
        _ => print(&lb_list::table(&tables, view), options)?,
    }
    Ok(conclude(&tables, options))
}

fn load(kinds: &[MapKind], options: &Resolved) -> anyhow::Result<Tables> {
    let loaded = Loaded::new(Question::Tables(kinds.to_vec()), options)?;
    let evidence = loaded.evidence();
    if let (Some(path), Subject::Vip(vip)) = (&options.from, &evidence.subject) {
        bail!(
            "{} holds only what concerns {vip}: collect with `inspect lb list --save FILE` to have \
             all entries",
            path.display()
        );
    }
    if let (Some(path), Subject::Datapath { .. }) = (&options.from, &evidence.subject) {
        bail!(
            "{} holds attached programs and no map entries: show it with `inspect datapath --from \
             FILE`",
            path.display()
        );
    }
    for kind in kinds {
        let there = evidence.maps.iter().any(|map| {
            map.problem.is_some() || map.kind().is_some_and(|(found, _, _)| found == *kind)
        });
        if !there && *kind != MapKind::SourceRange {
            let place = match &options.from {
                Some(path) => path.display().to_string(),
                None => evidence
                    .bpffs
                    .iter()
                    .find(|bpffs| bpffs.read)
                    .map_or_else(String::new, |bpffs| bpffs.path.display().to_string()),
            };
            bail!("{place} has no {} map", kind_name(*kind));
        }
    }
    let mut tables = Tables::new(evidence);
    tables.problems.extend(missing_families(evidence, kinds));
    if options.save.is_some() {
        let document = output::leaving(loaded.into_document(None), options)?;
        output::save(&document, options.save.as_deref())?;
    }
    Ok(tables)
}

/// Maps of a family that are not pinned although others of that family are.
fn missing_families(evidence: &Evidence, kinds: &[MapKind]) -> Vec<Problem> {
    let pins: Vec<&String> =
        evidence.bpffs.iter().filter(|bpffs| bpffs.read).flat_map(|bpffs| &bpffs.pins).collect();
    let mut missing = Vec::new();
    for (prefix, family) in [("cilium_lb4_", Family::V4), ("cilium_lb6_", Family::V6)] {
        for kind in kinds.iter().filter(|kind| **kind != MapKind::SourceRange) {
            let has = |layout: &Layout| pins.iter().any(|pin| *pin == layout.name);
            let mut layouts = LAYOUTS
                .iter()
                .filter(|layout| layout.kind == *kind && layout.family == Some(family));
            let newest = layouts.clone().max_by_key(|layout| layout.generation);
            if let Some(newest) = newest
                && pins.iter().any(|pin| pin.starts_with(prefix))
                && !layouts.any(has)
                && !evidence.maps.iter().any(|map| map.name == newest.name)
            {
                missing.push(Problem::Map {
                    map: newest.name.to_owned(),
                    reason: format!(
                        "{} is not pinned, though other {prefix}… maps are: the list lacks what it \
                         would hold",
                        newest.name
                    ),
                });
            }
        }
    }
    missing
}

fn kind_name(kind: MapKind) -> &'static str {
    match kind {
        MapKind::Services => "services",
        MapKind::Backends => "backends",
        MapKind::ReverseNat => "reverse NAT",
        _ => "source range",
    }
}

fn print(table: &TextTable, options: &Resolved) -> anyhow::Result<()> {
    output::write_stdout(|mut out| match options.format {
        Format::Markdown => table.write_markdown(&mut out),
        _ => table.write_plain(&mut out),
    })?;
    Ok(())
}

/// Problems are told of on standard error, so that the list stays comparable.
fn conclude(tables: &Tables, options: &Resolved) -> Answer {
    const SHOWN: usize = 20;
    if !options.quiet {
        for problem in tables.problems.iter().take(SHOWN) {
            output::say(problem);
        }
        if let Some(more) = tables.problems.len().checked_sub(SHOWN).filter(|&more| more > 0) {
            output::say(format_args!("and {more} more problems: `-o json` lists all"));
        }
    }
    let missing = |problem: &Problem| {
        matches!(problem, Problem::Map { .. } | Problem::Entry { .. } | Problem::Incomplete { .. })
    };
    if tables.problems.iter().any(missing) { Answer::CannotTell } else { Answer::Yes }
}
