//! `inspect check`

use std::{fs, path::Path};

use anyhow::bail;
use inspector::{
    checklist::{self, Item},
    evidence::{Evidence, VipQuery, file::Document},
    judge::{self, JudgeError, Judgement, expect::Checked},
    report::{annotations, ci, json, junit, markdown, table},
};

use super::{
    Answer,
    args::{Format, Resolved},
    output::{self, Loaded},
    vip,
};

const FORMS: &[Format] = &[
    Format::Table,
    Format::Json,
    Format::Markdown,
    Format::Junit,
    Format::Github,
    Format::Evidence,
];

/// One VIP of the file, judged.
struct Held {
    judgement: Judgement,
    checked: Vec<Checked>,
    document: Document,
}

/// Reads the file, collects and judges each VIP, and prints.
pub fn run(file: &Path, options: &Resolved) -> anyhow::Result<Answer> {
    output::only("check", FORMS, options)?;
    let shown = file.to_string_lossy();
    let text = fs::read_to_string(file)
        .map_err(|error| anyhow::anyhow!("cannot read {shown}: {error}"))?;
    let items = checklist::parse(&shown, &text)?;
    if !options.nodes.is_empty() {
        bail!("`inspect check` takes one file with --from; it may hold several documents");
    }
    let documents = match &options.from {
        Some(path) => Some(Document::read_all(path)?),
        None => None,
    };
    let held = if let Some(documents) = &documents {
        let held = items.iter().map(|item| from_documents(item, documents, options));
        held.collect::<anyhow::Result<Vec<_>>>()?
    } else {
        // The node is read once: all VIPs are judged as they were at one moment.
        let queries: Vec<VipQuery> = items.iter().map(|item| item.query).collect();
        let loaded = Loaded::vips(&queries, options)?;
        let pairs = items.iter().zip(loaded);
        pairs.map(|(item, loaded)| of_node(item, loaded, options)).collect::<anyhow::Result<_>>()?
    };
    if let Some(path) = &options.save {
        Document::write_all(held.iter().map(|one| &one.document), path)?;
    }
    print(&held, options)?;
    if options.format == Format::Evidence {
        return Ok(Answer::Yes);
    }
    let answers = || held.iter().map(|one| vip::answer(&one.judgement, &one.checked));
    Ok(if answers().any(|answer| answer == Answer::No) {
        Answer::No
    } else if answers().any(|answer| answer == Answer::CannotTell) {
        Answer::CannotTell
    } else {
        Answer::Yes
    })
}

/// Judges evidence as an item of the file asks.
fn judged(item: &Item, evidence: &Evidence) -> Result<(Judgement, Vec<Checked>), JudgeError> {
    let judgement = judge::judge_question(evidence, item.query)?;
    let checked = item.claims.iter().map(|claim| claim.check(&judgement)).collect();
    Ok((judgement, checked))
}

/// Judges the first document that is about the VIP.
fn from_documents(item: &Item, documents: &[Document], options: &Resolved) -> anyhow::Result<Held> {
    let mut refused = None;
    for document in documents {
        let mut evidence = document.evidence.clone();
        if !item.via.is_empty() {
            evidence.via.clone_from(&item.via);
        }
        match judged(item, &evidence) {
            Ok((judgement, checked)) => {
                let document = output::leaving(document.clone(), options)?;
                return Ok(Held { judgement, checked, document });
            }
            Err(error) => refused = Some(error),
        }
    }
    match refused {
        Some(error) => Err(error.into()),
        None => bail!("the file holds no evidence"),
    }
}

fn of_node(item: &Item, mut loaded: Loaded, options: &Resolved) -> anyhow::Result<Held> {
    loaded.narrow(&item.via);
    let (judgement, checked) = judged(item, loaded.evidence())?;
    let verdict = serde_json::to_value(&judgement.verdict)?;
    let document = output::leaving(loaded.into_document(Some(verdict)), options)?;
    Ok(Held { judgement, checked, document })
}

fn print(held: &[Held], options: &Resolved) -> anyhow::Result<()> {
    output::write_stdout(|mut out| match options.format {
        Format::Json => json::write_all(
            held.iter().map(|one| (&one.judgement, one.checked.as_slice())),
            &mut out,
        ),
        Format::Junit => {
            let suites: Vec<_> = held
                .iter()
                .map(|one| ci::suite(&one.judgement, &one.checked, &one.document.sha256))
                .collect();
            junit::write(&suites, out)
        }
        Format::Github => held.iter().try_for_each(|one| {
            annotations::write(&ci::annotations(&one.judgement, &one.checked), out)
        }),
        Format::Evidence => held.iter().try_for_each(|one| one.document.write_line(out)),
        Format::Markdown => held.iter().try_for_each(|one| {
            markdown::write(&one.judgement, &one.checked, &one.document.sha256, &mut out)
        }),
        _ => {
            let mut style = output::style(options);
            for (index, one) in held.iter().enumerate() {
                if index > 0 {
                    writeln!(out)?;
                }
                // Many VIPs: their claims, and all the rest of those that fail.
                style.quiet = options.quiet
                    || !options.verbose && vip::answer(&one.judgement, &one.checked) == Answer::Yes;
                if style.quiet {
                    write!(out, "{}: ", one.judgement.vip)?;
                }
                table::write(&one.judgement, &one.checked, style, &mut out)?;
            }
            Ok(())
        }
    })?;
    Ok(())
}
