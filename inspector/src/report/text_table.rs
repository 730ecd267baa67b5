//! Plain columns, aligned as `cilium-dbg` aligns them.
//!
//! `cilium-dbg` prints through Go's `text/tabwriter` (minimum width 5, padding 3). The same widths
//! and trailing spaces are made here, so that `diff <(cilium-dbg … | sort) <(inspect … | sort)` is
//! empty. All cells live in one string: tens of thousands of rows are usual.

use std::io::{self, Write};

/// Smallest width of a column, padding included.
const MIN_WIDTH: usize = 5;
/// Spaces behind the widest cell of a column.
const PADDING: usize = 3;

/// Rows of cells.
#[derive(Debug)]
pub struct TextTable {
    header: &'static [&'static str],
    /// Whether the header's last cell is padded like the others.
    padded_header: bool,
    text: String,
    /// End of each cell in `text`.
    ends: Vec<u32>,
}

impl TextTable {
    /// An empty table; a `padded_header` has spaces behind its last cell too.
    #[must_use]
    pub fn new(header: &'static [&'static str], padded_header: bool) -> Self {
        Self { header, padded_header, text: String::new(), ends: Vec::new() }
    }

    /// Appends a cell; a row is complete after as many as the header has.
    ///
    /// # Panics
    /// If all cells together are longer than 4 GiB.
    pub fn cell(&mut self, cell: impl std::fmt::Display) {
        use std::fmt::Write as _;
        // Writing to a string cannot fail.
        let written = write!(self.text, "{cell}");
        debug_assert!(written.is_ok());
        self.ends.push(u32::try_from(self.text.len()).expect("less than 4 GiB of text"));
    }

    /// The rows, each a list of cells.
    pub fn rows(&self) -> impl Iterator<Item = Vec<&str>> {
        let columns = self.header.len();
        (0..self.ends.len() / columns)
            .map(move |row| (0..columns).map(|column| self.at(row * columns + column)).collect())
    }

    /// Number of rows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len() / self.header.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    fn at(&self, index: usize) -> &str {
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before] as usize);
        &self.text[start..self.ends[index] as usize]
    }

    /// Writes the table as `cilium-dbg` would.
    ///
    /// # Errors
    /// The error of the writer.
    pub fn write_plain(&self, out: &mut impl Write) -> io::Result<()> {
        let columns = self.header.len();
        let mut widths = vec![0; columns];
        for (column, title) in self.header.iter().enumerate() {
            // An unpadded last title is no cell of the column, in the eyes of the tab writer.
            if self.padded_header || column + 1 < columns {
                widths[column] = title.chars().count();
            }
        }
        for index in 0..self.ends.len() {
            let width = &mut widths[index % columns];
            // Cells are ASCII: addresses, numbers and fixed words.
            *width = (*width).max(self.at(index).len());
        }
        for width in &mut widths {
            *width = (*width + PADDING).max(MIN_WIDTH);
        }
        let mut line = String::new();
        for (column, title) in self.header.iter().enumerate() {
            if self.padded_header || column + 1 < columns {
                pad(&mut line, title, widths[column]);
            } else {
                line.push_str(title);
            }
        }
        line.push('\n');
        for index in 0..self.ends.len() {
            pad(&mut line, self.at(index), widths[index % columns]);
            if index % columns + 1 == columns {
                line.push('\n');
                if line.len() > 1 << 15 {
                    out.write_all(line.as_bytes())?;
                    line.clear();
                }
            }
        }
        out.write_all(line.as_bytes())
    }

    /// Writes the table as Markdown.
    ///
    /// # Errors
    /// The error of the writer.
    pub fn write_markdown(&self, out: &mut impl Write) -> io::Result<()> {
        writeln!(out, "| {} |", self.header.join(" | "))?;
        writeln!(out, "|{}", " --- |".repeat(self.header.len()))?;
        for row in self.rows() {
            let cells: Vec<String> = row.iter().map(|cell| super::markdown::escape(cell)).collect();
            writeln!(out, "| {} |", cells.join(" | "))?;
        }
        Ok(())
    }
}

fn pad(line: &mut String, cell: &str, width: usize) {
    line.push_str(cell);
    line.extend(std::iter::repeat_n(' ', width.saturating_sub(cell.len())));
}
