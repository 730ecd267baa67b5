//! `inspect evidence`

use std::{io, path::Path};

use anyhow::bail;
use inspector::{
    evidence::{
        Evidence, Subject,
        file::{self, Document, FileError},
        signature::{self, SignatureError},
    },
    judge,
};

use super::{
    Answer,
    args::{EvidenceCommand, Format, Resolved},
    cluster, output, vip,
};

/// Runs one of the commands.
pub fn run(action: &EvidenceCommand, options: &Resolved) -> anyhow::Result<Answer> {
    if options.from.is_some() {
        bail!("`inspect evidence` takes its files as arguments, not with --from");
    }
    match action {
        EvidenceCommand::Show { file } => show(&Document::read(file)?, options),
        EvidenceCommand::Judge { file, expect } => {
            output::only("evidence judge", vip::FORMS_OF_ONE, options)?;
            let document = Document::read(file)?;
            let judgement = judge::judge(&document.evidence)?;
            if let Some(said) = &document.evidence.verdict
                && *said != serde_json::to_value(&judgement.verdict)?
                && !options.quiet
            {
                output::say(format_args!(
                    "this version judges the evidence otherwise than version {} did",
                    document.evidence.tool.version
                ));
            }
            output::save(&document, options.save.as_deref())?;
            vip::print(&judgement, &expect.claims, Some(&document), options)
        }
        EvidenceCommand::Sign { files, key } => {
            for file in files {
                let signed = signature::sign(file, &Document::read(file)?, key)?;
                output::write_stdout(|out| writeln!(out, "{}", signed.display()))?;
            }
            Ok(Answer::Yes)
        }
        EvidenceCommand::Verify { files, public_key } => {
            verify(files.iter().map(AsRef::as_ref), public_key.as_deref())
        }
        EvidenceCommand::Diff { before, after, ignore } => {
            cluster::diff(before, after, ignore, options)
        }
        EvidenceCommand::Merge { files } => cluster::of_files(files, None, options),
        EvidenceCommand::Schema => {
            let schema = file::schema();
            output::write_stdout(|out| {
                serde_json::to_writer_pretty(&mut *out, &schema)?;
                out.write_all(b"\n")
            })?;
            Ok(Answer::Yes)
        }
    }
}

/// Says of each file whether it is whole; a file that was changed is a "no", one that is none an
/// error.
fn verify<'a>(
    files: impl Iterator<Item = &'a Path>,
    public_key: Option<&str>,
) -> anyhow::Result<Answer> {
    let mut answer = Answer::Yes;
    let mut lines = Vec::new();
    let mut broken = None;
    for file in files {
        match Document::read(file) {
            Ok(document) => {
                let whole = format!("{}: whole, {}", file.display(), document.sha256);
                match public_key.map(|key| signature::verify(file, key)).transpose() {
                    Ok(None) => lines.push(whole),
                    Ok(Some(comment)) => lines.push(format!("{whole}, signed: {comment}")),
                    Err(error @ SignatureError::Bad { .. }) => {
                        lines.push(error.to_string());
                        answer = Answer::No;
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            Err(error @ FileError::Hash { .. }) => {
                lines.push(error.to_string());
                answer = Answer::No;
            }
            Err(error) => {
                if let Some(earlier) = broken.replace(error) {
                    output::say(earlier);
                }
            }
        }
    }
    output::write_stdout(|out| lines.iter().try_for_each(|line| writeln!(out, "{line}")))?;
    match broken {
        Some(error) => Err(error.into()),
        None => Ok(answer),
    }
}

fn show(document: &Document, options: &Resolved) -> anyhow::Result<Answer> {
    output::only("evidence show", output::COMMON, options)?;
    output::write_stdout(|out| match options.format {
        Format::Json => {
            serde_json::to_writer_pretty(&mut *out, document.as_json())?;
            out.write_all(b"\n")
        }
        _ => summary(document, out),
    })?;
    Ok(Answer::Yes)
}

fn summary(document: &Document, out: &mut dyn io::Write) -> io::Result<()> {
    let Evidence { tool, host, time, subject, bpffs, devices, maps, sources, verdict, .. } =
        &document.evidence;
    match subject {
        Subject::Vip(vip) => writeln!(out, "Question   what is programmed for {vip}")?,
        Subject::Tables => writeln!(out, "Question   the load balancer's tables")?,
        Subject::Datapath { .. } => writeln!(out, "Question   which programs are attached where")?,
    }
    writeln!(out, "Node       {}, kernel {}, {}", host.name, host.kernel, host.architecture)?;
    writeln!(out, "Boot       {}", host.boot_id)?;
    writeln!(
        out,
        "Collected  {} to {} by {} {}",
        time.started, time.ended, tool.name, tool.version
    )?;
    writeln!(out, "Command    {}", tool.arguments.join(" "))?;
    writeln!(out, "Privilege  {}", host.capabilities.join(" "))?;
    for one in bpffs {
        let read = if one.read { "read" } else { "not read" };
        writeln!(out, "bpffs      {} ({read}, {} pins)", one.path.display(), one.pins.len())?;
    }
    for device in devices {
        let name = device.name.as_deref().unwrap_or("(no such interface)");
        writeln!(
            out,
            "Device     {} {name}, named by {}",
            device.ifindex,
            device.named_by.join(", ")
        )?;
    }
    for map in maps {
        let total = map.total.map_or_else(String::new, |total| format!(" of {total}"));
        writeln!(out, "Map        {}: {}{total} entries", map.name, map.entries.len())?;
    }
    for source in sources {
        if let Some(reason) = &source.reason {
            writeln!(out, "Not told   {}: {reason}", source.what)?;
        }
    }
    if let Some(sentence) = verdict.as_ref().and_then(|verdict| verdict.get("sentence")) {
        writeln!(out, "Verdict    {}", sentence.as_str().unwrap_or_default())?;
    }
    writeln!(out, "SHA-256    {}", document.sha256)
}
