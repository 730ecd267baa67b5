//! `inspect trace`

use std::{collections::BTreeSet, net::IpAddr};

use anyhow::bail;
use inspector::{
    cilium::{flags::ServiceType, layout::MapKind, services::Scope},
    collect::Question,
    evidence::{Evidence, VipQuery, tables::Tables, trace::Watched},
    judge::journey::{self, Conclusion},
    report::journeys,
    trace::journey::{Context, Journey},
};

use super::{
    Answer,
    args::{Format, Resolved, TraceArgs},
    output::{self, Loaded},
    watch::{self, Until},
};

/// What has to be known of every VIP to tell their packets.
const KINDS: &[MapKind] = &[
    MapKind::Services,
    MapKind::Backends,
    MapKind::ReverseNat,
    MapKind::Endpoints,
    MapKind::L2Responder,
    MapKind::Devices,
];

/// Watches, and prints each connection as it comes to an end.
pub fn run(args: &TraceArgs, options: &Resolved) -> anyhow::Result<Answer> {
    output::only("trace", &[Format::Table, Format::Json], options)?;
    if options.from.is_some() || options.save.is_some() || options.mask.is_some() {
        bail!(
            "`inspect trace` shows what passes this node now: it takes neither --from nor --save nor \
             --mask; `inspect vip ADDR --trace --save FILE` keeps what was seen"
        );
    }
    if let (Some(vip), Some(source)) = (args.vip, args.source)
        && source.is_ipv4() != vip.address.is_ipv4()
    {
        bail!("--source {source} and {} are of different IP families", vip.address);
    }
    let prepared = watch::prepare(&args.watch, options)?;
    let mut evidence = load(args.vip, options)?;
    evidence.via.clone_from(&args.via);
    let queries: Vec<VipQuery> = match args.vip {
        Some(vip) => vec![vip],
        None => vips(&evidence)
            .into_iter()
            .filter(|vip| args.source.is_none_or(|source| source.is_ipv4() == vip.is_ipv4()))
            .map(|address| VipQuery { address, port: None, protocol: None, source: None })
            .collect(),
    };
    if queries.is_empty() {
        bail!(
            "this node has no address of a LoadBalancer Service: name one, as in `inspect trace ADDR`"
        );
    }
    let queries: Vec<VipQuery> =
        queries.into_iter().map(|query| VipQuery { source: args.source, ..query }).collect();
    let mut context = Context::default();
    for query in &queries {
        merge(&mut context, journey::context(&evidence, query));
    }
    let style = output::style(options);
    let mut each = |journey: &Journey, conclusion: &Conclusion, context: &Context| {
        let conclusion =
            &Conclusion { hooks: journey::hooks(journey, context), ..conclusion.clone() };
        output::write_stdout(|out| match options.format {
            Format::Json => {
                serde_json::to_writer(&mut *out, conclusion)?;
                out.write_all(b"\n")
            }
            _ => journeys::write_journey(conclusion, style, out),
        })?;
        Ok(())
    };
    let until = Until { duration: args.duration, unread: true };
    let subject = (&evidence, queries.as_slice(), context);
    let trace = watch::watch(subject, &args.watch, prepared, until, options, &mut each)?;
    let kept = trace.journeys.len() as u64 + trace.more.iter().map(|more| more.times).sum::<u64>();
    let journeys = kept + trace.not_kept;
    if !options.quiet {
        output::say(summary(journeys, &trace.watched));
    }
    Ok(if journeys == 0 { Answer::CannotTell } else { Answer::Yes })
}

/// The evidence about a VIP, or about all of them.
fn load(vip: Option<VipQuery>, options: &Resolved) -> anyhow::Result<Evidence> {
    let node = |question| match Loaded::new(question, options)? {
        Loaded::Node(evidence) => anyhow::Ok(*evidence),
        Loaded::File(_) => bail!("`inspect trace` takes no --from"),
    };
    if let Some(vip) = vip {
        return node(Question::Vip(vip));
    }
    let datapath = node(Question::Datapath)?;
    let tables = node(Question::Tables(KINDS.to_vec()))?;
    Ok(Evidence { network: datapath.network, attachments: datapath.attachments, ..tables })
}

/// Every address of a Service of type `LoadBalancer`.
fn vips(evidence: &Evidence) -> BTreeSet<IpAddr> {
    Tables::new(evidence)
        .frontends()
        .filter(|frontend| frontend.key.scope == Scope::External)
        .filter(|frontend| {
            frontend
                .master
                .is_some_and(|value| value.flags().service_type() == ServiceType::LoadBalancer)
        })
        .map(|frontend| frontend.key.address)
        .collect()
}

/// Adds what is known for another VIP.
fn merge(context: &mut Context, other: Context) {
    context.vips.extend(other.vips);
    context.frontends.extend(other.frontends);
    context.backends.extend(other.backends);
    context.next_hops.extend(other.next_hops);
    context.host_addresses.extend(other.host_addresses);
    context.devices.extend(other.devices);
}

/// `3 connections; watched: tc, tracepoint; 12 sightings lost`
fn summary(connections: u64, watched: &Watched) -> String {
    let number = match connections {
        0 => "no connection came: connect a client meanwhile, or try `inspect vip ADDR --simulate`"
            .to_owned(),
        1 => "1 connection".to_owned(),
        number => format!("{number} connections"),
    };
    let used: Vec<&str> = watched
        .tiers
        .iter()
        .filter(|tier| !tier.attached.is_empty())
        .map(|tier| journeys::tier_name(tier.tier))
        .collect();
    let mut text = format!("{number}; watched: {}", used.join(", "));
    for tier in &watched.tiers {
        if let Some(reason) = &tier.reason {
            text = format!("{text}; not {}: {reason}", journeys::tier_name(tier.tier));
        }
    }
    match watched.lost_in_all() {
        0 => text,
        lost => format!("{text}; {lost} sightings lost"),
    }
}
