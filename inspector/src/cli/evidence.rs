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
use serde::Serialize;
use serde_json::json;

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
        EvidenceCommand::Show { file } => {
            show(&output::leaving(Document::read(file)?, options)?, options)
        }
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
            let document = output::leaving(document, options)?;
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
            verify(files.iter().map(AsRef::as_ref), public_key.as_deref(), options)
        }
        EvidenceCommand::Diff { before, after, ignore } => {
            cluster::diff(before, after, ignore, options)
        }
        EvidenceCommand::Merge { files, expect } => {
            cluster::of_files(files, None, &expect.claims, options)
        }
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

/// What is said of a file.
#[derive(Serialize)]
struct Verified {
    /// As it was given.
    file: String,
    /// Whether it is complete and unchanged.
    whole: bool,
    /// SHA-256 of the content, where it is whole.
    #[serde(skip_serializing_if = "Option::is_none")]
    sha256: Option<String>,
    /// Whether the signature is good; not where none was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    signed: Option<bool>,
    /// The trusted comment of a good signature.
    #[serde(skip_serializing_if = "Option::is_none")]
    comment: Option<String>,
    /// What is wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// Whether it is no evidence at all.
    #[serde(skip)]
    none: bool,
}

impl Verified {
    fn is_good(&self) -> bool {
        self.whole && self.signed != Some(false)
    }

    fn line(&self) -> String {
        if let Some(error) = &self.error {
            return error.clone();
        }
        let sha256 = self.sha256.as_deref().unwrap_or_default();
        let whole = format!("{}: whole, {sha256}", self.file);
        match &self.comment {
            Some(comment) => format!("{whole}, signed: {comment}"),
            None => whole,
        }
    }
}

/// Says of each file whether it is whole; a file that was changed is a "no", one that is none an
/// error.
fn verify<'a>(
    files: impl Iterator<Item = &'a Path>,
    public_key: Option<&str>,
    options: &Resolved,
) -> anyhow::Result<Answer> {
    output::only("evidence verify", &[Format::Table, Format::Json], options)?;
    let mut all = Vec::new();
    let mut broken = None;
    for path in files {
        let file = path.display().to_string();
        let none = Verified {
            file,
            whole: false,
            sha256: None,
            signed: None,
            comment: None,
            error: None,
            none: false,
        };
        match Document::read(path) {
            Ok(document) => {
                let whole = Verified { whole: true, sha256: Some(document.sha256), ..none };
                match public_key.map(|key| signature::verify(path, key)).transpose() {
                    Ok(comment) => {
                        let signed = comment.is_some().then_some(true);
                        all.push(Verified { signed, comment, ..whole });
                    }
                    Err(error @ SignatureError::Bad { .. }) => {
                        let error = Some(error.to_string());
                        all.push(Verified { signed: Some(false), error, ..whole });
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            Err(error @ FileError::Hash { .. }) => {
                all.push(Verified { error: Some(error.to_string()), ..none });
            }
            Err(error) => {
                all.push(Verified { error: Some(error.to_string()), none: true, ..none });
                if let Some(earlier) = broken.replace(error) {
                    output::say(earlier);
                }
            }
        }
    }
    let good = all.iter().all(Verified::is_good);
    output::write_stdout(|out| match options.format {
        Format::Json => {
            let schema = "inspector.verify/1";
            let document = json!({ "schema": schema, "good": good, "files": all });
            serde_json::to_writer_pretty(&mut *out, &document)?;
            out.write_all(b"\n")
        }
        // What is no evidence is told of on standard error.
        _ => all.iter().filter(|one| !one.none).try_for_each(|one| writeln!(out, "{}", one.line())),
    })?;
    match broken {
        Some(error) => Err(error.into()),
        None if good => Ok(Answer::Yes),
        None => Ok(Answer::No),
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
