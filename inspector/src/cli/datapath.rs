//! `inspect datapath`

use anyhow::bail;
use inspector::{
    collect::{Options, Question},
    evidence::{Evidence, SourceStatus, programs::DEVICES},
    judge::{Severity, datapath},
    report::datapath::Report,
};

use super::{
    Answer,
    args::{DatapathArgs, Format, Resolved},
    output::{self, Loaded},
};

/// Collects (or reads), saves and prints.
pub fn run(args: &DatapathArgs, options: &Resolved) -> anyhow::Result<Answer> {
    output::only("datapath", output::COMMON, options)?;
    if let (Some(path), Some(_)) = (&options.from, args.pid) {
        bail!(
            "{} holds the processes that it was collected for: --pid works on the node alone",
            path.display()
        );
    }
    output::check_process(args.pid, options)?;
    let node = Options { pid: args.pid, ..Options::new(Question::Datapath) };
    let loaded = Loaded::load(node, options)?;
    let Some(found) = datapath::datapath(loaded.evidence()) else {
        bail!(
            "this evidence holds no attached programs: collect with `inspect datapath --save FILE` \
             or `inspect vip ADDR --save FILE`"
        );
    };
    let answer = conclude(loaded.evidence(), &found);
    let saved = options.save.is_some() || options.format == Format::Markdown;
    if saved {
        let document = output::leaving(loaded.into_document(None), options)?;
        output::save(&document, options.save.as_deref())?;
        let report = Report { datapath: &found, evidence: &document.evidence };
        print(report, &document.sha256, options)?;
    } else {
        print(Report { datapath: &found, evidence: loaded.evidence() }, "", options)?;
    }
    Ok(answer)
}

fn print(report: Report<'_>, sha256: &str, options: &Resolved) -> anyhow::Result<()> {
    output::write_stdout(|out| match options.format {
        Format::Json => report.write_json(out),
        Format::Markdown => report.write_markdown(sha256, out),
        _ => report.write_table(output::style(options), out),
    })?;
    Ok(())
}

/// No if something is wrong, "cannot tell" if the devices could not be asked.
fn conclude(evidence: &Evidence, found: &datapath::Datapath) -> Answer {
    let failed = evidence
        .sources
        .iter()
        .any(|source| source.what == DEVICES && source.status == SourceStatus::Failed);
    if found.findings.iter().any(|finding| finding.severity == Severity::Error) {
        Answer::No
    } else if failed {
        Answer::CannotTell
    } else {
        Answer::Yes
    }
}
