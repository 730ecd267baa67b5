//! Several pieces of evidence at once: `inspect evidence merge`, `inspect evidence diff`, and
//! `inspect vip` with more than one `--from`.

use std::path::{Path, PathBuf};

use anyhow::bail;
use inspector::{
    evidence::{Evidence, Subject, VipQuery, file::Document},
    judge::{
        Served,
        cluster::{self, Cluster},
        diff::{self, Class},
        expect::{Expectation, Met},
    },
    report::{cluster as report, junit},
};

use super::{
    Answer,
    args::{Format, Resolved},
    output, vip,
};

/// Judges the evidence of several nodes together: about one VIP, or about each that they hold.
pub fn of_files(
    files: &[PathBuf],
    asked: Option<VipQuery>,
    claims: &[Expectation],
    options: &Resolved,
) -> anyhow::Result<Answer> {
    output::only("evidence merge", vip::FORMS, options)?;
    let mut documents = Vec::new();
    for file in files {
        documents.extend(Document::read_all(file)?);
    }
    // Names and hashes are those of what leaves.
    let documents: Vec<Document> = documents
        .into_iter()
        .map(|document| output::leaving(document, options))
        .collect::<anyhow::Result<_>>()?;
    if let Some(path) = &options.save {
        Document::write_all(documents.iter(), path)?;
    }
    let mut queries: Vec<VipQuery> = Vec::new();
    match asked {
        Some(query) => queries.push(query),
        None => {
            for document in &documents {
                if let Subject::Vip(query) = document.evidence.subject
                    && !queries.contains(&query)
                {
                    queries.push(query);
                }
            }
        }
    }
    if queries.is_empty() {
        bail!("none of the files is about a VIP: collect with `inspect vip ADDR --save FILE`");
    }
    let mut found = Vec::new();
    for query in queries {
        let (hashes, evidence): (Vec<String>, Vec<&Evidence>) = documents
            .iter()
            .filter(|document| asked.is_some() || is_about(&document.evidence, query))
            .map(|document| (document.sha256.clone(), &document.evidence))
            .unzip();
        let mut cluster = cluster::judge(evidence, query)?;
        cluster.hold(claims);
        found.push((cluster, hashes));
    }
    if options.format == Format::Html && found.len() > 1 {
        bail!(
            "a page is about one VIP, the files are about {}: name one with `inspect vip ADDR -o html \
             --from FILE…`",
            found.len()
        );
    }
    output::write_stdout(|out| {
        match options.format {
            Format::Json => {
                let all: Vec<_> = found.iter().map(|(cluster, _)| cluster).collect();
                match all.as_slice() {
                    [one] => serde_json::to_writer_pretty(&mut *out, one)?,
                    several => serde_json::to_writer_pretty(&mut *out, several)?,
                }
                return out.write_all(b"\n");
            }
            Format::Junit => {
                let suites = found.iter().flat_map(|(cluster, hashes)| cluster.suites(hashes));
                return junit::write(&suites.collect::<Vec<_>>(), out);
            }
            _ => {}
        }
        for (index, (cluster, hashes)) in found.iter().enumerate() {
            if index > 0 {
                writeln!(out)?;
            }
            match options.format {
                Format::Markdown => cluster.write_markdown(hashes, out)?,
                Format::Github => cluster.write_annotations(out)?,
                Format::Html => cluster.write_html(hashes, out)?,
                _ => cluster.write_table(output::style(options), out)?,
            }
        }
        Ok(())
    })?;
    Ok(answer(found.iter().map(|(cluster, _)| cluster)))
}

/// What the clusters come to, or the claims if there are any.
fn answer<'c>(clusters: impl Iterator<Item = &'c Cluster>) -> Answer {
    let mut all = Vec::new();
    for cluster in clusters {
        if cluster.expectations.is_empty() {
            all.push(match cluster.served {
                Served::Yes => Met::Yes,
                Served::No | Served::Partly => Met::No,
                Served::Unknown => Met::Unknown,
            });
        }
        all.extend(cluster.expectations.iter().map(|checked| checked.met));
    }
    if all.contains(&Met::No) {
        Answer::No
    } else if all.contains(&Met::Unknown) {
        Answer::CannotTell
    } else {
        Answer::Yes
    }
}

fn is_about(evidence: &Evidence, query: VipQuery) -> bool {
    matches!(evidence.subject, Subject::Vip(collected) if collected == query)
}

/// Compares two files; documents of several VIPs are compared one by one.
pub fn diff(
    before: &Path,
    after: &Path,
    ignore: &[String],
    options: &Resolved,
) -> anyhow::Result<Answer> {
    output::only("evidence diff", output::COMMON, options)?;
    let ignore: Vec<Class> = match ignore {
        [one] if one == "none" => Vec::new(),
        several => several.iter().map(|one| one.parse()).collect::<Result<_, _>>()?,
    };
    let (before, after) = (Document::read_all(before)?, Document::read_all(after)?);
    if before.len() != after.len() {
        bail!(
            "the files hold {} and {} documents: compare files with the same questions",
            before.len(),
            after.len()
        );
    }
    let mut changes = Vec::new();
    for (one, other) in before.iter().zip(&after) {
        for change in diff::diff(&one.evidence, &other.evidence, &ignore)? {
            // What is of the node is told once.
            if !changes.contains(&change) {
                changes.push(change);
            }
        }
    }
    output::write_stdout(|out| match options.format {
        Format::Json => report::write_changes_json(&changes, out),
        Format::Markdown => report::write_changes_markdown(&changes, out),
        _ => report::write_changes(&changes, out),
    })?;
    Ok(if changes.is_empty() { Answer::Yes } else { Answer::No })
}
