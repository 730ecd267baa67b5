//! `JUnit` XML: what CI systems show as tests.

use std::io::{self, Write};

/// What became of a case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Status {
    /// It holds.
    Passed,
    /// It does not.
    Failed {
        /// One line.
        message: String,
        /// The finding's id, or another word for the kind of failure.
        kind: String,
        /// All that is to be said.
        text: String,
    },
    /// It could not be told, or does not concern the answer: why.
    Skipped(String),
}

/// One case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    /// What groups the cases.
    pub class: String,
    /// Its name within the class.
    pub name: String,
    /// What became of it.
    pub status: Status,
    /// File and line, where it has them.
    pub location: Option<(String, usize)>,
}

/// A suite: the cases of one question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Suite {
    /// Its name.
    pub name: String,
    /// Host name of the node.
    pub hostname: Option<String>,
    /// When, UTC.
    pub timestamp: Option<String>,
    /// Facts beside the cases.
    pub properties: Vec<(String, String)>,
    /// Its cases.
    pub cases: Vec<Case>,
}

/// Text in an attribute or an element. XML has no form at all for most control characters.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\n' => escaped.push_str("&#10;"),
            '\t' => escaped.push_str("&#9;"),
            other if other.is_control() || matches!(other, '\u{fffe}' | '\u{ffff}') => {
                escaped.push('\u{fffd}');
            }
            other => escaped.push(other),
        }
    }
    escaped
}

/// Writes suites as one document.
///
/// # Errors
/// The error of the writer.
pub fn write(suites: &[Suite], out: &mut (impl Write + ?Sized)) -> io::Result<()> {
    let count = |suite: &Suite, what: fn(&Status) -> bool| {
        suite.cases.iter().filter(|case| what(&case.status)).count()
    };
    let failed = |status: &Status| matches!(status, Status::Failed { .. });
    let skipped = |status: &Status| matches!(status, Status::Skipped(_));
    let tests: usize = suites.iter().map(|suite| suite.cases.len()).sum();
    let failures: usize = suites.iter().map(|suite| count(suite, failed)).sum();
    let skips: usize = suites.iter().map(|suite| count(suite, skipped)).sum();
    writeln!(out, r#"<?xml version="1.0" encoding="UTF-8"?>"#)?;
    writeln!(
        out,
        r#"<testsuites name="inspect" tests="{tests}" failures="{failures}" errors="0" skipped="{skips}">"#
    )?;
    for suite in suites {
        write!(
            out,
            r#"  <testsuite name="{}" tests="{}" failures="{}" errors="0" skipped="{}""#,
            escape(&suite.name),
            suite.cases.len(),
            count(suite, failed),
            count(suite, skipped)
        )?;
        for (name, value) in [("hostname", &suite.hostname), ("timestamp", &suite.timestamp)] {
            if let Some(value) = value {
                write!(out, r#" {name}="{}""#, escape(value))?;
            }
        }
        writeln!(out, ">")?;
        if !suite.properties.is_empty() {
            writeln!(out, "    <properties>")?;
            for (name, value) in &suite.properties {
                writeln!(
                    out,
                    r#"      <property name="{}" value="{}"/>"#,
                    escape(name),
                    escape(value)
                )?;
            }
            writeln!(out, "    </properties>")?;
        }
        for case in &suite.cases {
            write_case(case, out)?;
        }
        writeln!(out, "  </testsuite>")?;
    }
    writeln!(out, "</testsuites>")
}

fn write_case(case: &Case, out: &mut (impl Write + ?Sized)) -> io::Result<()> {
    write!(
        out,
        r#"    <testcase classname="{}" name="{}""#,
        escape(&case.class),
        escape(&case.name)
    )?;
    if let Some((file, line)) = &case.location {
        write!(out, r#" file="{}" line="{line}""#, escape(file))?;
    }
    match &case.status {
        Status::Passed => writeln!(out, "/>"),
        Status::Failed { message, kind, text } => {
            writeln!(out, ">")?;
            writeln!(
                out,
                r#"      <failure message="{}" type="{}">{}</failure>"#,
                escape(message),
                escape(kind),
                escape(text)
            )?;
            writeln!(out, "    </testcase>")
        }
        Status::Skipped(why) => {
            writeln!(out, ">")?;
            writeln!(out, r#"      <skipped message="{}"/>"#, escape(why))?;
            writeln!(out, "    </testcase>")
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Whatever the text, the document is XML and says the same.
        #[test]
        fn any_text_makes_a_document(text in any::<String>()) {
            let case = Case {
                class: text.clone(),
                name: text.clone(),
                status: Status::Failed {
                    message: text.clone(),
                    kind: text.clone(),
                    text: text.clone(),
                },
                location: Some((text.clone(), 1)),
            };
            let suite = Suite {
                name: text.clone(),
                hostname: Some(text.clone()),
                timestamp: None,
                properties: vec![(text.clone(), text.clone())],
                cases: vec![case],
            };
            let mut out = Vec::new();
            write(&[suite], &mut out).expect("a vector takes it");
            let out = String::from_utf8(out).expect("UTF-8");
            let document = roxmltree::Document::parse(&out).expect("XML");
            let failure = document.descendants().find(|node| node.has_tag_name("failure"));
            let shown: String = text
                .chars()
                .map(|c| match c {
                    '\n' | '\t' => c,
                    c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => '\u{fffd}',
                    c => c,
                })
                .collect();
            prop_assert_eq!(failure.and_then(|node| node.attribute("message")), Some(shown.as_str()));
        }
    }
}
