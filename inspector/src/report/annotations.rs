//! Workflow commands that GitHub and Gitea show beside a change.

use std::io::{self, Write};

use crate::judge::Severity;

/// One annotation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Annotation {
    /// How bad it is; a note is shown as a notice.
    pub severity: Severity,
    /// Its title.
    pub title: String,
    /// Its text.
    pub message: String,
    /// File and line, where it has them.
    pub location: Option<(String, usize)>,
}

/// The message of a workflow command: what would end it is encoded.
fn escape(text: &str) -> String {
    text.replace('%', "%25").replace('\r', "%0D").replace('\n', "%0A")
}

/// A property of a workflow command.
fn escape_property(text: &str) -> String {
    escape(text).replace(':', "%3A").replace(',', "%2C")
}

/// Writes annotations, one a line.
///
/// # Errors
/// The error of the writer.
pub fn write(annotations: &[Annotation], out: &mut (impl Write + ?Sized)) -> io::Result<()> {
    for Annotation { severity, title, message, location } in annotations {
        let command = match severity {
            Severity::Error => "error",
            Severity::Warning => "warning",
            Severity::Note => "notice",
        };
        write!(out, "::{command} ")?;
        if let Some((file, line)) = location {
            write!(out, "file={},line={line},", escape_property(file))?;
        }
        writeln!(out, "title={}::{}", escape_property(title), escape(message))?;
    }
    Ok(())
}
