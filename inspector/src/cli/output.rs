//! Where the evidence comes from, and where what is printed goes.

use std::{
    fmt::Display,
    io::{self, BufWriter, Write},
    path::Path,
};

use inspector::{
    collect::{self, Options, Question},
    evidence::{Evidence, VipQuery, file::Document, mask},
    report::table::Style,
};

use clap::ValueEnum;

use super::args::{Format, Mask, Resolved};

/// Writes to standard output through a buffer.
///
/// # Errors
/// The error of the writer.
pub fn write_stdout(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let mut out = BufWriter::with_capacity(1 << 16, io::stdout().lock());
    write(&mut out)?;
    out.flush()
}

/// Says something on standard error. That nobody listens there is no reason to fail, which
/// `eprintln!` would.
pub fn say(message: impl Display) {
    drop(writeln!(io::stderr().lock(), "inspect: {message}"));
}

/// The evidence for a question: from a file, or from this node.
pub enum Loaded {
    /// From a file, with everything that the file holds.
    File(Box<Document>),
    /// From this node.
    Node(Box<Evidence>),
}

impl Loaded {
    /// Reads the file that was named, else the node.
    pub fn new(question: Question, options: &Resolved) -> anyhow::Result<Self> {
        Self::load(Options::new(question), options)
    }

    /// Reads the file that was named, else the node, as `node` says; what every command takes is
    /// filled in.
    pub fn load(node: Options, options: &Resolved) -> anyhow::Result<Self> {
        if !options.nodes.is_empty() {
            anyhow::bail!("this command takes one file with --from; `inspect vip` takes several");
        }
        if let Some(path) = &options.from {
            return Ok(Self::File(Box::new(Document::read(path)?)));
        }
        Ok(Self::Node(Box::new(collect::node(&filled_in(node, options))?)))
    }

    /// Reads this node once for many VIPs.
    pub fn vips(queries: &[VipQuery], options: &Resolved) -> anyhow::Result<Vec<Self>> {
        let Some(first) = queries.first() else { return Ok(Vec::new()) };
        let node = filled_in(Options::new(Question::Vip(*first)), options);
        let all = collect::vips(&node, queries)?;
        Ok(all.into_iter().map(|evidence| Self::Node(Box::new(evidence))).collect())
    }

    /// The evidence.
    pub fn evidence(&self) -> &Evidence {
        match self {
            Self::File(document) => &document.evidence,
            Self::Node(evidence) => evidence,
        }
    }

    /// The evidence, to be added to; nothing if it is from a file, which stays as it is.
    pub fn node_mut(&mut self) -> Option<&mut Evidence> {
        match self {
            Self::File(_) => None,
            Self::Node(evidence) => Some(evidence),
        }
    }

    /// Narrows the question to some devices.
    pub fn narrow(&mut self, via: &[String]) {
        if let Self::Node(evidence) = self {
            evidence.via = via.to_vec();
        }
    }

    /// As a document; what a file held is kept unchanged.
    pub fn into_document(self, verdict: Option<serde_json::Value>) -> Document {
        match self {
            Self::File(document) => *document,
            Self::Node(mut evidence) => {
                evidence.verdict = verdict;
                Document::new(*evidence)
            }
        }
    }
}

/// A question to the node with what every command takes.
fn filled_in(node: Options, options: &Resolved) -> Options {
    Options {
        bpffs: options.bpffs.clone(),
        netns: options.netns.clone(),
        // Paths need not be UTF-8.
        arguments: std::env::args_os()
            .map(|argument| argument.to_string_lossy().into_owned())
            .collect(),
        ..node
    }
}

/// Refuses a form that a command does not have.
pub fn only(command: &str, forms: &[Format], options: &Resolved) -> anyhow::Result<()> {
    if forms.contains(&options.format) {
        return Ok(());
    }
    let name = |form: &Format| {
        form.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    };
    let names: Vec<String> = forms.iter().map(name).collect();
    anyhow::bail!(
        "`inspect {command}` has no form `{}`: use one of {}",
        name(&options.format),
        names.join(", ")
    )
}

/// The forms that every command has.
pub const COMMON: &[Format] = &[Format::Table, Format::Json, Format::Markdown];

/// Refuses a process that is not there.
pub fn check_process(pid: Option<u32>, options: &Resolved) -> anyhow::Result<()> {
    let Some(pid) = pid.filter(|_| options.from.is_none()) else { return Ok(()) };
    if pid == 0 || !Path::new("/proc").join(pid.to_string()).exists() {
        anyhow::bail!("there is no process {pid}: give the id of a running one with --pid");
    }
    Ok(())
}

/// The document as it leaves this program: masked, where the user wants it.
pub fn leaving(document: Document, options: &Resolved) -> anyhow::Result<Document> {
    match options.mask {
        Some(Mask::Clients) => Ok(mask::clients(&document)?),
        None => Ok(document),
    }
}

/// Saves a document where the user wants it.
pub fn save(document: &Document, path: Option<&Path>) -> anyhow::Result<()> {
    if let Some(path) = path {
        document.write(path)?;
    }
    Ok(())
}

/// Columns where standard output is no terminal.
const DEFAULT_WIDTH: u16 = 100;

/// How tables are drawn.
pub fn style(options: &Resolved) -> Style {
    let terminal = comfy_table::Table::new().width();
    Style {
        width: terminal.unwrap_or(DEFAULT_WIDTH).max(60),
        color: options.color,
        quiet: options.quiet,
        verbose: options.verbose,
    }
}
