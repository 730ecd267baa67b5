//! `inspect lint`

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use inspector::lint::{self, File};

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
    let mut files = Vec::new();
    for path in paths {
        read(path, true, &mut files)?;
    }
    files.sort_by(|one, other| one.path.cmp(&other.path));
    files.dedup_by(|one, other| one.path == other.path);
    let report = match lint::lint(&files) {
        Ok(report) => report,
        Err(malformed) => {
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

/// Reads a file, the manifests below a folder, or standard input (`-`).
fn read(path: &Path, named: bool, files: &mut Vec<File>) -> anyhow::Result<()> {
    let shown = path.to_string_lossy().into_owned();
    let failed = |error: std::io::Error| anyhow::anyhow!("cannot read {shown}: {error}");
    if named && path == Path::new("-") {
        let mut text = Vec::new();
        std::io::stdin().lock().read_to_end(&mut text).map_err(failed)?;
        files.push(File { path: "(standard input)".to_owned(), text: utf8(&shown, text)? });
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
                read(&entry.path(), false, files)?;
            }
        }
        return Ok(());
    }
    let is_manifest = path.file_name().is_some_and(|name| name == "Kustomization")
        || path.extension().is_some_and(|one| EXTENSIONS.iter().any(|wanted| one == *wanted));
    if named || metadata.is_file() && is_manifest {
        let text = fs::read(path).map_err(failed)?;
        files.push(File { text: utf8(&shown, text)?, path: shown });
    }
    Ok(())
}

fn utf8(path: &str, text: Vec<u8>) -> anyhow::Result<String> {
    String::from_utf8(text).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        let before = String::from_utf8_lossy(&error.as_bytes()[..valid]);
        let line = before.matches('\n').count() + 1;
        anyhow::anyhow!("{path}:{line}: the file is not UTF-8")
    })
}
