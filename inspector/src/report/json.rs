//! JSON of a judgement.

use std::io::{self, Write};

use serde::Serialize;

use crate::judge::{Judgement, expect::Checked};

/// The document.
#[derive(Serialize)]
struct Document<'a> {
    schema: &'static str,
    #[serde(flatten)]
    judgement: &'a Judgement,
    #[serde(skip_serializing_if = "<[Checked]>::is_empty")]
    expectations: &'a [Checked],
}

/// Writes a judgement as JSON.
///
/// # Errors
/// The error of the writer.
pub fn write(
    judgement: &Judgement,
    expectations: &[Checked],
    out: &mut impl Write,
) -> io::Result<()> {
    let document = Document { schema: "inspector.vip/1", judgement, expectations };
    serde_json::to_writer_pretty(&mut *out, &document)?;
    out.write_all(b"\n")
}

/// Writes several judgements as one JSON document.
///
/// # Errors
/// The error of the writer.
pub fn write_all<'a>(
    judgements: impl Iterator<Item = (&'a Judgement, &'a [Checked])>,
    out: &mut impl Write,
) -> io::Result<()> {
    #[derive(Serialize)]
    struct All<'a> {
        schema: &'static str,
        vips: Vec<Document<'a>>,
    }

    let vips = judgements
        .map(|(judgement, expectations)| Document {
            schema: "inspector.vip/1",
            judgement,
            expectations,
        })
        .collect();
    serde_json::to_writer_pretty(&mut *out, &All { schema: "inspector.check/1", vips })?;
    out.write_all(b"\n")
}
