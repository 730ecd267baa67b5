//! `inspect lint`

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use inspector::lint::{self, File, Malformed};

use super::{
    Answer,
    args::{Format, Resolved},
    output,
};

const FORMS: &[Format] =
    &[Format::Table, Format::Json, Format::Markdown, Format::Junit, Format::Sarif, Format::Github];

/// Files of a folder that are read: their extensions, and the one name without any.
const EXTENSIONS: [&str; 2] = ["yaml", "yml"];

/// Reads, judges and prints.
pub fn run(paths: &[PathBuf], options: &Resolved) -> anyhow::Result<Answer> {
    if options.from.is_some() || options.save.is_some() {
        bail!("`inspect lint` reads manifests: it takes neither --from nor --save");
    }
    output::only("lint", FORMS, options)?;
    let mut found = Found::default();
    for path in paths {
        read(path, true, &mut found)?;
    }
    found.take_json()?;
    let Found { mut files, mut malformed, .. } = found;
    files.sort_by(|one, other| one.path.cmp(&other.path));
    files.dedup_by(|one, other| one.path == other.path);
    let report = match lint::lint(&files) {
        Ok(report) if malformed.is_empty() => report,
        outcome => {
            malformed.extend(outcome.err().unwrap_or_default());
            malformed.sort_by(|one, other| (&one.path, one.line).cmp(&(&other.path, other.line)));
            malformed.dedup();
            let (last, others) = malformed.split_last().context("no file is named")?;
            others.iter().for_each(output::say);
            return Err(last.clone().into());
        }
    };
    output::write_stdout(|out| match options.format {
        Format::Json => report.write_json(out),
        Format::Markdown => report.write_markdown(out),
        Format::Junit => report.write_junit(out),
        Format::Sarif => report.write_sarif(out),
        Format::Github => report.write_annotations(out),
        _ => report.write_table(output::style(options), out),
    })?;
    Ok(match report.answer {
        lint::Answer::Yes => Answer::Yes,
        lint::Answer::No => Answer::No,
        lint::Answer::Unknown => Answer::CannotTell,
    })
}

/// What was read.
#[derive(Default)]
struct Found {
    files: Vec<File>,
    /// Files that are no text.
    malformed: Vec<Malformed>,
    /// JSON files of folders, not read yet: most are no manifests.
    json: Vec<PathBuf>,
}

impl Found {
    /// Reads the JSON files whose names stand in a kustomization: patches, mostly.
    fn take_json(&mut self) -> anyhow::Result<()> {
        let is_kustomization = |file: &&File| {
            let name = file.path.rsplit('/').next().unwrap_or_default();
            name.split('.').next().is_some_and(|stem| stem.eq_ignore_ascii_case("kustomization"))
        };
        let texts: Vec<String> =
            self.files.iter().filter(is_kustomization).map(|file| file.text.clone()).collect();
        for path in std::mem::take(&mut self.json) {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if texts.iter().any(|text| text.contains(&name)) {
                let shown = path.to_string_lossy().into_owned();
                let content = fs::read(&path)
                    .map_err(|error| anyhow::anyhow!("cannot read {shown}: {error}"))?;
                self.take(shown, content);
            }
        }
        Ok(())
    }

    fn take(&mut self, path: String, content: Vec<u8>) {
        match String::from_utf8(content) {
            Ok(text) => self.files.push(File { path, text }),
            Err(error) => {
                let valid = error.utf8_error().valid_up_to();
                let content = error.as_bytes();
                let line = content[..valid].split(|byte| *byte == b'\n').count();
                // A byte order mark of UTF-16.
                let is_wide =
                    content.starts_with(&[0xff, 0xfe]) || content.starts_with(&[0xfe, 0xff]);
                let reason = if is_wide {
                    "the file is UTF-16, and not UTF-8"
                } else {
                    "the file is not UTF-8"
                };
                self.malformed.push(Malformed { path, line, reason: reason.to_owned() });
            }
        }
    }
}

/// Reads a file, the manifests below a folder, or standard input (`-`).
fn read(path: &Path, named: bool, found: &mut Found) -> anyhow::Result<()> {
    let shown = path.to_string_lossy().into_owned();
    let failed = |error: std::io::Error| anyhow::anyhow!("cannot read {shown}: {error}");
    if named && path == Path::new("-") {
        let mut text = Vec::new();
        std::io::stdin().lock().read_to_end(&mut text).map_err(failed)?;
        found.take("(standard input)".to_owned(), text);
        return Ok(());
    }
    // What a link of a folder leads to is read where it is: no circles, and nothing twice.
    let metadata = if named { fs::metadata(path) } else { fs::symlink_metadata(path) };
    let metadata = metadata.map_err(failed)?;
    if metadata.is_dir() {
        for entry in fs::read_dir(path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            let hidden = name.to_string_lossy().starts_with('.');
            if !hidden {
                read(&entry.path(), false, found)?;
            }
        }
        return Ok(());
    }
    let is_manifest = path.file_name().is_some_and(|name| name == "Kustomization")
        || path.extension().is_some_and(|one| EXTENSIONS.iter().any(|wanted| one == *wanted));
    if named || metadata.is_file() && is_manifest {
        let content = fs::read(path).map_err(failed)?;
        found.take(shown, content);
    } else if metadata.is_file() && path.extension().is_some_and(|one| one == "json") {
        found.json.push(path.to_owned());
    }
    Ok(())
}
