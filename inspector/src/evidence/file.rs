//! Evidence as a file: write, read, verify.
//!
//! The document carries the SHA-256 of its own content: of the JSON without the field `sha256`,
//! object members sorted by name, no white space. A reader that meets another hash refuses the
//! file, since a verdict on edited evidence is worth nothing.

use std::{
    fs,
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, fchown},
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::{Evidence, SCHEMA};
use crate::sys::signals;

/// Evidence as read, with the document that it was read from.
#[derive(Debug, Clone, PartialEq)]
pub struct Document {
    /// What this version understands of it.
    pub evidence: Evidence,
    /// SHA-256 of the content, hexadecimal digits.
    pub sha256: String,
    /// All of it, fields of later minors included: written back unchanged.
    value: Value,
}

/// Why a file is no evidence.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file could not be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file could not be written.
    #[error("cannot write {path}: {source}")]
    Write {
        /// Path of the file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// More than any evidence has.
    #[error(
        "{path} is larger than the {} MiB that are read at most (all maps of ten thousand services \
         take 21 MiB): give a file of evidence, or fewer nodes at once",
        LIMIT >> 20
    )]
    TooLarge {
        /// Path of the file.
        path: PathBuf,
    },
    /// Nothing is in it.
    #[error("{path} is empty: the evidence was not written, collect or copy it again")]
    Empty {
        /// Path of the file.
        path: PathBuf,
    },
    /// The file ends too early.
    #[error(
        "{path} is cut off (line {line}): the evidence is not complete, collect or copy it again"
    )]
    Truncated {
        /// Path of the file.
        path: PathBuf,
        /// Line at which it ends.
        line: usize,
    },
    /// The file is no JSON, or not of this shape.
    #[error("{path} is no evidence file: {reason}")]
    Malformed {
        /// Path of the file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A schema of another major version.
    #[error(
        "{path} has schema {found}, this version reads {SCHEMA}: use a version of inspect that \
         knows it"
    )]
    Schema {
        /// Path of the file.
        path: PathBuf,
        /// The schema found.
        found: String,
    },
    /// The content is not what was hashed.
    #[error(
        "{path} was changed after it was collected: its content has SHA-256 {found}, it says {said}"
    )]
    Hash {
        /// Path of the file.
        path: PathBuf,
        /// Hash of the content.
        found: String,
        /// Hash that the file carries.
        said: String,
    },
}

/// How much is read of a file, in bytes: twelve times what all 60,267 entries of ten thousand
/// services take (21.3 MB), which are read in a tenfold of it in memory.
pub const LIMIT: u64 = 256 << 20;

/// All of a file, or of standard input where `path` is `-`, if it is not larger than `limit` bytes.
/// No more than that is read, since a pipe or a device does not tell how much will come.
fn read_text(path: &Path, limit: u64) -> Result<Vec<u8>, FileError> {
    let failed = |source| FileError::Read { path: path.to_owned(), source };
    let input: Box<dyn Read> = if path == Path::new("-") {
        Box::new(io::stdin().lock())
    } else {
        Box::new(fs::File::open(path).map_err(failed)?)
    };
    let size = fs::metadata(path).map_or(0, |metadata| metadata.len());
    let mut text = Vec::new();
    if size <= limit {
        text.reserve(usize::try_from(size).unwrap_or_default());
        input.take(limit + 1).read_to_end(&mut text).map_err(failed)?;
    }
    if size.max(text.len() as u64) > limit {
        return Err(FileError::TooLarge { path: path.to_owned() });
    }
    Ok(text)
}

/// SHA-256 over the canonical form of a document, the field `sha256` left out.
fn hash(document: &Value) -> String {
    struct HashWriter(Sha256);

    impl Write for HashWriter {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.update(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    let mut content = document.clone();
    if let Value::Object(members) = &mut content {
        members.remove("sha256");
    }
    let mut writer = HashWriter(Sha256::new());
    // Object members are kept sorted by serde_json, which makes this form canonical. Writing to a
    // hash cannot fail.
    if serde_json::to_writer(&mut writer, &content).is_err() {
        unreachable!("JSON values can be written");
    }
    super::Hex(&writer.0.finalize()).to_string()
}

/// The JSON Schema of the files.
#[must_use]
pub fn schema() -> Value {
    let mut schema = schemars::schema_for!(Evidence).to_value();
    schema["properties"]["sha256"] = json!({
        "type": "string",
        "pattern": "^[0-9a-f]{64}$",
        "description": "SHA-256 of the document without this field, members sorted by name, no \
                        white space.",
    });
    if let Some(Value::Array(required)) = schema.get_mut("required") {
        required.push("sha256".into());
    }
    schema
}

/// Whether a string anywhere in the document could act on a terminal.
fn has_control_characters(value: &Value) -> bool {
    let acts = |text: &str| text.chars().any(|c| c.is_control() && !matches!(c, '\n' | '\t'));
    match value {
        Value::String(text) => acts(text),
        Value::Array(items) => items.iter().any(has_control_characters),
        Value::Object(members) => {
            members.iter().any(|(name, value)| acts(name) || has_control_characters(value))
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}

impl Document {
    /// From freshly collected evidence.
    ///
    /// # Panics
    /// Never: evidence can be written as JSON.
    #[must_use]
    pub fn new(evidence: Evidence) -> Self {
        let mut value = serde_json::to_value(&evidence).expect("evidence can be written as JSON");
        let sha256 = hash(&value);
        value["sha256"] = Value::String(sha256.clone());
        Self { evidence, sha256, value }
    }

    /// Reads a file; `-` is standard input.
    ///
    /// # Errors
    /// [`FileError`] for everything that is not complete, unchanged evidence of a known schema.
    pub fn read(path: &Path) -> Result<Self, FileError> {
        let text = read_text(path, LIMIT)?;
        Self::parse(path, &text)
    }

    /// Reads a file that holds one document or several, one behind the other, as `inspect check
    /// --save` and the logs of several nodes have them; `-` is standard input.
    ///
    /// # Errors
    /// As [`Document::read`], for the first document that is not good.
    pub fn read_all(path: &Path) -> Result<Vec<Self>, FileError> {
        let text = read_text(path, LIMIT)?;
        let mut documents = Vec::new();
        let mut values = serde_json::Deserializer::from_slice(&text).into_iter::<Value>();
        let mut start = 0;
        while let Some(value) = values.next() {
            // What is wrong with the text is told by the reader of one document.
            let end = if value.is_ok() { values.byte_offset() } else { text.len() };
            documents.push(Self::parse(path, &text[start..end])?);
            start = end;
            if value.is_err() {
                break;
            }
        }
        if documents.is_empty() {
            return Err(FileError::Empty { path: path.to_owned() });
        }
        Ok(documents)
    }

    /// Writes the document in one line.
    ///
    /// # Errors
    /// The error of the writer.
    pub fn write_line(&self, out: &mut (impl Write + ?Sized)) -> io::Result<()> {
        serde_json::to_writer(&mut *out, &self.value)?;
        out.write_all(b"\n")
    }

    /// Writes several documents to a file, each a line; see [`Document::read_all`].
    ///
    /// # Errors
    /// [`FileError::Write`].
    pub fn write_all<'d>(
        documents: impl Iterator<Item = &'d Self>,
        path: &Path,
    ) -> Result<(), FileError> {
        let failed = |source| FileError::Write { path: path.to_owned(), source };
        let mut text = Vec::new();
        for document in documents {
            serde_json::to_writer(&mut text, &document.value).map_err(|e| failed(e.into()))?;
            text.push(b'\n');
        }
        write_whole(path, &text).map_err(failed)
    }

    /// Reads evidence from the text of a file; `path` is for error messages.
    ///
    /// # Errors
    /// As [`Document::read`].
    pub fn parse(path: &Path, text: &[u8]) -> Result<Self, FileError> {
        let path_owned = || path.to_owned();
        let malformed = |reason: String| FileError::Malformed { path: path.to_owned(), reason };
        if text.trim_ascii().is_empty() {
            return Err(FileError::Empty { path: path_owned() });
        }
        let value: Value = serde_json::from_slice(text).map_err(|error| {
            if error.is_eof() {
                FileError::Truncated { path: path_owned(), line: error.line() }
            } else {
                malformed(format!("it is not JSON ({error})"))
            }
        })?;
        if has_control_characters(&value) {
            return Err(malformed(
                "it holds control characters, which would reach the terminal and which no \
                 collector writes"
                    .to_owned(),
            ));
        }
        let Some(schema) = value.get("schema").and_then(Value::as_str) else {
            return Err(malformed("it has no field `schema`".to_owned()));
        };
        if schema != SCHEMA {
            return Err(FileError::Schema { path: path_owned(), found: schema.to_owned() });
        }
        let Some(said) = value.get("sha256").and_then(Value::as_str) else {
            return Err(malformed("it has no field `sha256`".to_owned()));
        };
        let found = hash(&value);
        if found != said {
            return Err(FileError::Hash { path: path_owned(), found, said: said.to_owned() });
        }
        let mut evidence: Evidence =
            serde_json::from_slice(text).map_err(|error| malformed(error.to_string()))?;
        for record in &mut evidence.maps {
            record.check_lengths(evidence.host.cpus).map_err(&malformed)?;
        }
        Ok(Self { evidence, sha256: found, value })
    }

    /// Reads a document whose content was changed on purpose, and gives it its own hash.
    ///
    /// # Errors
    /// As [`Document::read`], the hash apart.
    pub fn resealed(text: &[u8]) -> Result<Self, FileError> {
        let path = Path::new("(changed)");
        let mut value: Value = serde_json::from_slice(text).map_err(|error| {
            FileError::Malformed { path: path.to_owned(), reason: error.to_string() }
        })?;
        value["sha256"] = Value::String(hash(&value));
        Self::parse(path, value.to_string().as_bytes())
    }

    /// The document as JSON, fields that this version does not know included.
    #[must_use]
    pub fn as_json(&self) -> &Value {
        &self.value
    }

    /// Writes the document to a file that is complete or not there: first to a temporary file
    /// beside it, then renamed. `-` is standard output.
    ///
    /// # Errors
    /// [`FileError::Write`].
    pub fn write(&self, path: &Path) -> Result<(), FileError> {
        let failed = |source| FileError::Write { path: path.to_owned(), source };
        let mut text = serde_json::to_vec_pretty(&self.value).map_err(|e| failed(e.into()))?;
        text.push(b'\n');
        if path == Path::new("-") {
            return io::stdout().lock().write_all(&text).map_err(failed);
        }
        write_whole(path, &text).map_err(failed)
    }
}

/// Gives a file the owner and the mode of the one at `path`, if there is one.
fn keep_access(file: &fs::File, path: &Path) -> io::Result<()> {
    let Ok(before) = path.metadata() else { return Ok(()) };
    // Who may not give it away keeps it.
    let given = fchown(file, Some(before.uid()), Some(before.gid()));
    if given.is_err() && file.metadata()?.uid() != before.uid() {
        return Ok(());
    }
    file.set_permissions(before.permissions())
}

/// Writes a file so that it is there whole or not at all.
fn write_whole(path: &Path, text: &[u8]) -> io::Result<()> {
    let name = path
        .file_name()
        .ok_or_else(|| io::Error::new(io::ErrorKind::IsADirectory, "it names a directory"))?;
    // Devices and pipes cannot be replaced, and need not be.
    if path.metadata().is_ok_and(|metadata| !metadata.is_file()) {
        return fs::OpenOptions::new().write(true).open(path)?.write_all(text);
    }
    let mut temporary = name.to_owned();
    temporary.push(format!(".{}.tmp", std::process::id()));
    let temporary = path.with_file_name(temporary);
    // Whoever interrupts us finds the old file or the new one, and nothing beside it.
    let _held = signals::hold();
    // Not over a file, nor through a link, that somebody put there before us. It holds addresses of
    // clients: ours alone, unless whoever made the file that it replaces said otherwise.
    let mut file =
        fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    let written = keep_access(&file, path)
        .and_then(|()| file.write_all(text))
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        // Best effort: the error that matters is the one that is returned.
        drop(fs::remove_file(&temporary));
    }
    written
}
