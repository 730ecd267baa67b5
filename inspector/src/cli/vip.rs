//! `inspect vip`

use std::time::Duration;

use inspector::{
    collect::{self, Question},
    evidence::{VipQuery, file::Document},
    judge::{
        self, Judgement, Served,
        expect::{Checked, Expectation, Met},
        journey,
    },
    report::{annotations, ci, html, json, junit, markdown, picture, table},
    simulate::{self, Request, SimulateError},
    sys::signals,
};

use super::{
    Answer,
    args::{Format, Resolved, VipArgs},
    cluster, inject,
    output::{self, Loaded},
    watch::{self, Prepared, Until},
};

/// Collects (or reads), judges, saves and prints.
pub fn run(args: &VipArgs, options: &Resolved) -> anyhow::Result<Answer> {
    output::only("vip", FORMS_OF_NODE, options)?;
    if args.trace.is_none()
        && let Some(name) = args.watch.given()
    {
        anyhow::bail!("{name} is about tracing: give --trace too");
    }
    if args.trace.is_some() && options.from.is_some() {
        anyhow::bail!(
            "--trace needs the node: a file is judged with what was seen when it was collected"
        );
    }
    inject::check(args, options)?;
    if !options.nodes.is_empty() {
        if args.source.is_some() || !args.via.is_empty() {
            anyhow::bail!(
                "several nodes are judged whole: leave out --via and --source, or judge the nodes \
                 one by one"
            );
        }
        return cluster::of_files(&options.nodes, Some(args.vip), &args.expect.claims, options);
    }
    let query = VipQuery { source: args.source, ..args.vip };
    if let Some(source) = args.source
        && source.is_ipv4() != query.address.is_ipv4()
    {
        anyhow::bail!("--source {source} and {} are of different IP families", query.address);
    }
    output::check_process(args.pid, options)?;
    let node = collect::Options {
        state: args.state.clone(),
        agent: args.agent.clone(),
        pid: args.pid,
        ..collect::Options::new(Question::Vip(query))
    };
    if args.simulate.is_some() && options.from.is_some() {
        anyhow::bail!(
            "--simulate needs the node: a file is judged with what was simulated when it was collected"
        );
    }
    let prepared = args.trace.map(|_| watch::prepare(&args.watch, options)).transpose()?;
    let usual = || args.inject.prove.then_some(simulate::USUAL_PACKETS);
    let mut loaded = match args.simulate.or_else(usual) {
        Some(at_most) if !args.inject.dry_run => simulated(&node, at_most, args, options)?,
        _ => Loaded::load(node, options)?,
    };
    if args.inject.is_wanted() {
        loaded.narrow(&args.via);
        let evidence = loaded.node_mut().ok_or_else(|| anyhow::anyhow!("no node"))?;
        if inject::run(evidence, &query, args, options)? == inject::Left::Nothing {
            return Ok(Answer::Yes);
        }
    }
    if let (Some(duration), Some(prepared)) = (args.trace, prepared) {
        loaded.narrow(&args.via);
        observe(&mut loaded, duration, prepared, args, options)?;
    }
    let judgement = if let Loaded::File(document) = &loaded {
        // The file stays as it is; the question may be another one.
        let mut evidence = document.evidence.clone();
        if !args.via.is_empty() {
            evidence.via.clone_from(&args.via);
        }
        judge::judge_question(&evidence, query)?
    } else {
        loaded.narrow(&args.via);
        judge::judge_question(loaded.evidence(), query)?
    };
    let verdict = serde_json::to_value(&judgement.verdict)?;
    // The document (and its hash) costs as much as all the rest: made only where it is used.
    let needed = options.save.is_some() || names_hash(options.format);
    let document = if needed {
        Some(output::leaving(loaded.into_document(Some(verdict)), options)?)
    } else {
        None
    };
    // An answer that was had is given, whether it can be saved or not.
    let answer = print(&judgement, &args.expect.claims, document.as_ref(), options);
    if let Some(document) = &document {
        output::save(document, options.save.as_deref())?;
    }
    answer
}

/// Watches real packets, and adds what was seen.
fn observe(
    loaded: &mut Loaded,
    duration: Option<Duration>,
    prepared: Prepared,
    args: &VipArgs,
    options: &Resolved,
) -> anyhow::Result<()> {
    /// How long it is watched unless something else says when to stop.
    const USUAL: Duration = Duration::from_secs(10);
    let evidence = loaded.node_mut().ok_or_else(|| anyhow::anyhow!("no node to trace"))?;
    let query = VipQuery { source: args.source, ..args.vip };
    let context = journey::context(evidence, &query);
    let usual = args.watch.command.is_empty().then_some(USUAL);
    let until = Until { duration: duration.or(usual), unread: false };
    let subject = (&*evidence, &[query][..], context);
    let trace =
        watch::watch(subject, &args.watch, prepared, until, options, &mut |_, _, _| Ok(()))?;
    evidence.trace = Some(trace);
    Ok(())
}

/// The forms of several nodes.
pub const FORMS: &[Format] =
    &[Format::Table, Format::Json, Format::Markdown, Format::Junit, Format::Github, Format::Html];

/// The forms of one judgement.
pub const FORMS_OF_ONE: &[Format] = &[
    Format::Table,
    Format::Json,
    Format::Markdown,
    Format::Junit,
    Format::Github,
    Format::Html,
    Format::Svg,
];

/// The forms of what reads a node: the evidence itself too.
pub const FORMS_OF_NODE: &[Format] = &[
    Format::Table,
    Format::Json,
    Format::Markdown,
    Format::Junit,
    Format::Github,
    Format::Html,
    Format::Svg,
    Format::Evidence,
];

/// Whether a form names the hash of the evidence.
fn names_hash(format: Format) -> bool {
    matches!(format, Format::Markdown | Format::Junit | Format::Html | Format::Evidence)
}

/// Collects and simulates; anew if a program was replaced in between.
fn simulated(
    node: &collect::Options,
    at_most: u32,
    args: &VipArgs,
    options: &Resolved,
) -> anyhow::Result<Loaded> {
    /// How often it is begun anew.
    const ATTEMPTS: u32 = 3;
    let Question::Vip(query) = node.question else { unreachable!("asked by `run`") };
    let request = Request { at_most, source: args.source };
    // A signal waits until everything is taken back.
    let held = signals::hold();
    let mut attempt = 1;
    loop {
        let mut loaded = Loaded::load(node.clone(), options)?;
        loaded.narrow(&args.via);
        let evidence = loaded.node_mut().ok_or_else(|| anyhow::anyhow!("no node to simulate"))?;
        let mut work = || simulate::run(evidence, &query, &request, &held);
        let result = match &options.netns {
            Some(netns) => netns.run(work).map_err(collect::CollectError::from)?,
            None => work(),
        };
        match result {
            Err(SimulateError::Replaced { .. }) if attempt < ATTEMPTS && !held.pending() => {
                attempt += 1;
            }
            result => {
                result?;
                return Ok(loaded);
            }
        }
    }
}

/// Prints a judgement and says what it comes to.
pub fn print(
    judgement: &Judgement,
    claims: &[Expectation],
    document: Option<&Document>,
    options: &Resolved,
) -> anyhow::Result<Answer> {
    let sha256 = document.map_or("", |document| document.sha256.as_str());
    let checked: Vec<Checked> = claims.iter().map(|claim| claim.check(judgement)).collect();
    output::write_stdout(|mut out| match options.format {
        Format::Json => json::write(judgement, &checked, &mut out),
        Format::Markdown => markdown::write(judgement, &checked, sha256, &mut out),
        Format::Junit => junit::write(&[ci::suite(judgement, &checked, sha256)], &mut out),
        Format::Github => annotations::write(&ci::annotations(judgement, &checked), &mut out),
        Format::Html => html::write(judgement, &checked, sha256, out),
        Format::Svg => writeln!(out, "{}", picture::svg(judgement)),
        Format::Evidence => match document {
            Some(document) => document.write_line(out),
            None => Ok(()),
        },
        _ => table::write(judgement, &checked, output::style(options), &mut out),
    })?;
    // Evidence is printed to be judged elsewhere.
    if options.format == Format::Evidence {
        return Ok(Answer::Yes);
    }
    Ok(answer(judgement, &checked))
}

/// What a judgement comes to, or the expectations if there are any. Where packets were to be seen
/// and none came, it cannot be told; that a claim does not hold is told all the same.
pub fn answer(judgement: &Judgement, checked: &[Checked]) -> Answer {
    let unseen = judgement.observed.as_ref().is_some_and(|observed| observed.journeys == 0);
    // What is known without a packet is known.
    let unsent = judgement.injection.as_ref().is_some_and(|injection| injection.packets == 0);
    let nothing = unseen || unsent && judgement.verdict.served != Served::No;
    if nothing && checked.iter().all(|one| one.met != Met::No) {
        return Answer::CannotTell;
    }
    if checked.is_empty() {
        return match judgement.verdict.served {
            Served::Yes => Answer::Yes,
            Served::No | Served::Partly => Answer::No,
            Served::Unknown => Answer::CannotTell,
        };
    }
    if checked.iter().any(|one| one.met == Met::No) {
        Answer::No
    } else if checked.iter().any(|one| one.met == Met::Unknown) {
        Answer::CannotTell
    } else {
        Answer::Yes
    }
}
