//! Injection at the command line: what would be sent is shown, the user asked, and then it is sent.

use std::{
    io::{self, IsTerminal, Write},
    time::Duration,
};

use inspector::{
    collect::CollectError,
    evidence::{Evidence, VipQuery, injection::Injection},
    inject::{self, InjectError, Plan, Request},
    judge::{self, FindingId},
    report::injection as report,
    sys::signals,
};

use super::{
    args::{Format, Resolved, VipArgs},
    output,
};

/// How long an answer is waited for unless the user says otherwise.
const USUAL: Duration = Duration::from_secs(2);

/// What datagrams say unless the user says otherwise.
const PAYLOAD: &[u8] = b"inspect";

/// What is left to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// The answer is to be judged and printed.
    Judgement,
    /// Nothing: what would be sent was shown.
    Nothing,
}

/// Checks what can be checked before the node is read.
pub fn check(args: &VipArgs, options: &Resolved) -> anyhow::Result<()> {
    let inject = &args.inject;
    if !inject.is_wanted() {
        return match inject.given() {
            Some(name) => anyhow::bail!("{name} is about injection: give --inject or --prove too"),
            None => Ok(()),
        };
    }
    if options.from.is_some() {
        anyhow::bail!(
            "--inject needs the node: a file is judged with what was injected when it was collected"
        );
    }
    if inject.dry_run {
        if !matches!(options.format, Format::Table | Format::Json) {
            anyhow::bail!("--dry-run shows what would be sent as `table` or `json`");
        }
        // Not to be taken for one that was met, or saved.
        if options.save.is_some() || !args.expect.claims.is_empty() {
            anyhow::bail!("--dry-run gives no answer: there is nothing to --save, or to --expect");
        }
    } else if !inject.yes && !io::stdin().is_terminal() {
        anyhow::bail!(
            "--inject sends real packets to backends and there is nobody to ask: look at them with \
             --dry-run, then give --yes"
        );
    }
    Ok(())
}

/// Injects, if the user agrees, and adds what came of it.
pub fn run(
    evidence: &mut Evidence,
    query: &VipQuery,
    args: &VipArgs,
    options: &Resolved,
) -> anyhow::Result<Left> {
    if args.inject.prove
        && !args.inject.dry_run
        && let Some(why) = conflict(evidence, query)?
    {
        evidence.injection = Some(Injection { stopped: Some(why), ..Injection::default() });
        return Ok(Left::Judgement);
    }
    let request = Request {
        source: args.source,
        payload: args.inject.payload.as_ref().map_or_else(|| PAYLOAD.to_vec(), |one| one.0.clone()),
        wait: args.inject.inject.flatten().unwrap_or(USUAL),
    };
    let plan = inside(options, || inject::plan(evidence, query, &request))?;
    if args.inject.dry_run {
        show(&plan, options)?;
        return Ok(Left::Nothing);
    }
    if !args.inject.yes && !plan.probes.is_empty() && !agrees(&plan)? {
        anyhow::bail!("nothing was sent, since you did not agree");
    }
    // A signal waits until everything is taken back, and ends the waiting and not the program.
    let held = signals::hold();
    let mut plan = Some(plan);
    inside(options, || match plan.take() {
        Some(plan) => inject::run(evidence, query, plan, &held),
        None => Ok(()),
    })?;
    let _ = held.take();
    Ok(Left::Judgement)
}

/// Does something in the network namespace that was chosen.
fn inside<T: Send>(
    options: &Resolved,
    work: impl FnOnce() -> Result<T, InjectError> + Send,
) -> anyhow::Result<T> {
    Ok(match &options.netns {
        Some(netns) => netns.run(work).map_err(CollectError::from)??,
        None => work()?,
    })
}

/// What a simulation says against what is programmed, if anything.
fn conflict(evidence: &Evidence, query: &VipQuery) -> anyhow::Result<Option<String>> {
    let judgement = judge::judge_question(evidence, *query)?;
    let finding = judgement.verdict.findings.iter().find(|one| one.id == FindingId::ProofConflict);
    if let Some(finding) = finding {
        return Ok(Some(format!(
            "the simulation contradicts what is programmed: {}",
            finding.seen
        )));
    }
    let mut simulated = judgement.verdict.paths.iter().filter_map(|path| {
        let one = path.simulated.as_ref().filter(|one| !one.control.good)?;
        Some(format!(
            "the control of the simulation failed: a packet to {}, which is no frontend, was {} on \
             {}",
            one.control.destination, one.control.result, path.path
        ))
    });
    Ok(simulated.next())
}

fn show(plan: &Plan, options: &Resolved) -> io::Result<()> {
    output::write_stdout(|mut out| {
        if options.format == Format::Json {
            return report::write_plan_json(plan, &mut out);
        }
        report::write_plan(plan, &mut out)?;
        writeln!(out, "{}", sentence(plan))
    })
}

/// What it comes to.
fn sentence(plan: &Plan) -> String {
    match plan.probes.len() {
        0 => "Nothing would be sent.".to_owned(),
        1 => "1 packet and its control. Nothing was sent.".to_owned(),
        more => format!("{more} packets and their controls. Nothing was sent."),
    }
}

/// Shows what would be sent and asks, on the terminal.
fn agrees(plan: &Plan) -> anyhow::Result<bool> {
    let mut terminal = io::stderr().lock();
    report::write_plan(plan, &mut terminal)?;
    match plan.probes.len() {
        1 => write!(terminal, "Send 1 packet and its control? [y/N] ")?,
        more => write!(terminal, "Send {more} packets and their controls? [y/N] ")?,
    }
    terminal.flush()?;
    let mut answer = String::new();
    io::stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
