//! YAML as a tree in which every node knows its file and line.

use std::collections::{HashMap, HashSet};

use saphyr_parser::{Event, Parser, ScalarStyle, ScanError, Span};

/// Where something stands: the number of a file, and its line from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Place {
    /// Index of the file among those that were given.
    pub file: usize,
    /// Line, from 1.
    pub line: usize,
}

/// One node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// What it is.
    pub value: Value,
    /// Where it stands.
    pub at: Place,
}

/// What a node is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// Nothing: empty, `~` or `null`.
    Null,
    /// Text, a number or a truth value, as it is written.
    Scalar(String),
    /// A sequence.
    List(Vec<Node>),
    /// A mapping, in the order in which it is written.
    Map(Vec<(String, Node)>),
}

/// One document of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// Its content.
    pub root: Node,
    /// A key that is there twice in one mapping.
    pub repeated: Option<(Place, String)>,
    /// Where a mapping is the key of another, which no manifest has: `{{ … }}` of a template reads
    /// like that.
    pub complex_key: Option<Place>,
}

/// Why text is no YAML.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Malformed {
    /// Line, from 1.
    pub line: usize,
    /// Column, from 1.
    pub column: usize,
    /// What is wrong.
    pub reason: String,
}

/// Deepest nesting that is read; manifests have about 20 levels.
const DEPTH: usize = 128;
/// Most nodes that aliases of one file may stand for: a few hundred bytes can name billions.
const ALIASED: usize = 100_000;
/// Most nodes that anchors of one file may name, those of one in the other counted again: each is kept
/// until its document ends.
const ANCHORED: usize = 1_000_000;
/// From this many members on, the keys of a mapping are looked up and not gone through.
const MANY: usize = 32;

impl Node {
    /// The member of a mapping.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Self> {
        match &self.value {
            Value::Map(members) => members.iter().find(|(name, _)| name == key).map(|(_, v)| v),
            _ => None,
        }
    }

    /// The member of a mapping.
    pub fn get_mut(&mut self, key: &str) -> Option<&mut Self> {
        match &mut self.value {
            Value::Map(members) => members.iter_mut().find(|(name, _)| name == key).map(|(_, v)| v),
            _ => None,
        }
    }

    /// The node at the end of a row of members.
    #[must_use]
    pub fn at(&self, path: &[&str]) -> Option<&Self> {
        path.iter().try_fold(self, |node, key| node.get(key))
    }

    /// The text of a scalar.
    #[must_use]
    pub fn text(&self) -> Option<&str> {
        match &self.value {
            Value::Scalar(text) => Some(text),
            _ => None,
        }
    }

    /// The text of a member.
    #[must_use]
    pub fn text_of(&self, key: &str) -> Option<&str> {
        self.get(key)?.text()
    }

    /// Whether it is the truth value.
    #[must_use]
    pub fn is_true(&self) -> bool {
        self.text().is_some_and(|text| matches!(text, "true" | "True" | "TRUE"))
    }

    /// The items of a sequence; none of anything else.
    #[must_use]
    pub fn items(&self) -> &[Self] {
        match &self.value {
            Value::List(items) => items,
            _ => &[],
        }
    }

    /// The members of a mapping; none of anything else.
    #[must_use]
    pub fn members(&self) -> &[(String, Self)] {
        match &self.value {
            Value::Map(members) => members,
            _ => &[],
        }
    }

    /// Sets a member, and makes a mapping of what is none.
    pub fn set(&mut self, key: &str, node: Self) {
        if let Some(there) = self.get_mut(key) {
            *there = node;
            return;
        }
        if !matches!(self.value, Value::Map(_)) {
            self.value = Value::Map(Vec::new());
        }
        if let Value::Map(members) = &mut self.value {
            members.push((key.to_owned(), node));
        }
    }

    /// The member of a mapping, made empty if it is not there.
    pub fn entry(&mut self, key: &str) -> &mut Self {
        if self.get(key).is_none() {
            let empty = Self { value: Value::Map(Vec::new()), at: self.at };
            self.set(key, empty);
        }
        let Value::Map(members) = &mut self.value else {
            unreachable!("setting a member made it a mapping")
        };
        let index = members.iter().position(|(name, _)| name == key).unwrap_or_default();
        &mut members[index].1
    }

    /// Removes a member.
    pub fn remove(&mut self, key: &str) {
        if let Value::Map(members) = &mut self.value {
            members.retain(|(name, _)| name != key);
        }
    }

    /// Number of nodes in it.
    fn weight(&self) -> usize {
        1 + match &self.value {
            Value::Null | Value::Scalar(_) => 0,
            Value::List(items) => items.iter().map(Self::weight).sum(),
            Value::Map(members) => members.iter().map(|(_, node)| node.weight()).sum(),
        }
    }
}

/// A collection that is being read.
struct Open {
    at: Place,
    anchor: usize,
    kind: Kind,
}

enum Kind {
    List(Vec<Node>),
    Map { members: Vec<(String, Node)>, key: Key, seen: HashSet<String> },
}

/// The key whose value comes next.
enum Key {
    /// The key itself comes next.
    Wanted,
    Text(String),
    /// A mapping or a sequence.
    Complex,
}

/// Reads the documents of one file.
struct Loader {
    file: usize,
    open: Vec<Open>,
    anchors: HashMap<usize, Node>,
    aliased: usize,
    anchored: usize,
    documents: Vec<Document>,
    repeated: Option<(Place, String)>,
    complex_key: Option<Place>,
}

/// Reads the documents of a stream. Empty documents are left out.
///
/// # Errors
/// [`Malformed`], with the line, for what is no YAML or nests without end.
pub fn parse(file: usize, text: &str) -> Result<Vec<Document>, Malformed> {
    let mut loader = Loader {
        file,
        open: Vec::new(),
        anchors: HashMap::new(),
        aliased: 0,
        anchored: 0,
        documents: Vec::new(),
        repeated: None,
        complex_key: None,
    };
    // A byte order mark is no content.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut parser = Parser::new_from_str(text);
    while let Some(event) = parser.next_event() {
        let (event, span) = event.map_err(|error| scan_error(&error, text))?;
        loader.event(event, span)?;
    }
    Ok(loader.documents)
}

fn scan_error(error: &ScanError, text: &str) -> Malformed {
    let marker = error.marker();
    let (mut line, mut column) = (marker.line(), marker.col() + 1);
    // The parser names where the value before the tab began; who looks there sees no tab.
    if error.info().contains("tab") {
        let indented = |row: &str| {
            let indent = row.len() - row.trim_start_matches([' ', '\t']).len();
            row[..indent].find('\t')
        };
        let mut rows = text.lines().enumerate().skip(line.saturating_sub(1));
        let found = rows.find_map(|(index, row)| Some((index + 1, indented(row)? + 1)));
        (line, column) = found.unwrap_or((line, column));
    }
    Malformed { line, column, reason: error.info().replace(['\n', '\r'], " ") }
}

impl Loader {
    fn event(&mut self, event: Event<'_>, span: Span) -> Result<(), Malformed> {
        let at = Place { file: self.file, line: span.start.line() };
        let malformed = |reason: &str| Malformed {
            line: span.start.line(),
            column: span.start.col() + 1,
            reason: reason.to_owned(),
        };
        match event {
            Event::Scalar(text, style, anchor, _) => {
                let value = if style == ScalarStyle::Plain
                    && matches!(text.as_ref(), "" | "~" | "null" | "Null" | "NULL")
                {
                    Value::Null
                } else {
                    Value::Scalar(text.into_owned())
                };
                self.complete(Node { value, at }, anchor);
            }
            Event::SequenceStart(anchor, _) => {
                self.open.push(Open { at, anchor, kind: Kind::List(Vec::new()) });
            }
            Event::MappingStart(anchor, _) => {
                let kind =
                    Kind::Map { members: Vec::new(), key: Key::Wanted, seen: HashSet::new() };
                self.open.push(Open { at, anchor, kind });
            }
            Event::SequenceEnd | Event::MappingEnd => {
                if let Some(Open { at, anchor, kind }) = self.open.pop() {
                    let value = match kind {
                        Kind::List(items) => Value::List(items),
                        Kind::Map { members, .. } => Value::Map(merge_keys(members)),
                    };
                    self.complete(Node { value, at }, anchor);
                }
            }
            Event::Alias(anchor) => {
                let node = self
                    .anchors
                    .get(&anchor)
                    .cloned()
                    .ok_or_else(|| malformed("an alias to something that contains it"))?;
                self.aliased += node.weight();
                if self.aliased > ALIASED {
                    return Err(malformed("its aliases stand for more than 100000 nodes"));
                }
                self.complete(node, 0);
            }
            Event::DocumentStart(_) => {
                self.anchors.clear();
                self.repeated = None;
                self.complex_key = None;
            }
            Event::Nothing | Event::StreamStart | Event::StreamEnd | Event::DocumentEnd => {}
        }
        if self.open.len() > DEPTH {
            return Err(malformed("it nests deeper than 128 levels"));
        }
        if self.anchored > ANCHORED {
            return Err(malformed("its anchors name more than 1000000 nodes"));
        }
        Ok(())
    }

    /// Puts a node where it belongs.
    fn complete(&mut self, node: Node, anchor: usize) {
        if anchor != 0 {
            self.anchored += node.weight();
            if self.anchored <= ANCHORED {
                self.anchors.insert(anchor, node.clone());
            }
        }
        let Some(open) = self.open.last_mut() else {
            if node.value != Value::Null {
                self.documents.push(Document {
                    root: node,
                    repeated: self.repeated.take(),
                    complex_key: self.complex_key.take(),
                });
            }
            return;
        };
        match &mut open.kind {
            Kind::List(items) => items.push(node),
            Kind::Map { members, key, seen } => match std::mem::replace(key, Key::Wanted) {
                Key::Wanted => {
                    *key = match node.value {
                        Value::Scalar(text) => Key::Text(text),
                        Value::Null => Key::Text(String::new()),
                        Value::List(_) | Value::Map(_) => {
                            self.complex_key.get_or_insert(node.at);
                            Key::Complex
                        }
                    };
                }
                Key::Complex => {}
                Key::Text(name) => {
                    if members.len() == MANY {
                        seen.extend(members.iter().map(|(there, _)| there.clone()));
                    }
                    let is_there = if members.len() < MANY {
                        members.iter().any(|(there, _)| *there == name)
                    } else {
                        !seen.insert(name.clone())
                    };
                    if name == "<<" || !is_there {
                        members.push((name, node));
                    } else if self.repeated.is_none() {
                        self.repeated = Some((node.at, name.clone()));
                        // The last one counts; of one that is told of, at least.
                        if let Some(there) = members.iter_mut().find(|(there, _)| *there == name) {
                            there.1 = node;
                        }
                    }
                }
            },
        }
    }
}

/// `<<: *other` adds the members of another mapping that are not there.
fn merge_keys(members: Vec<(String, Node)>) -> Vec<(String, Node)> {
    if members.iter().all(|(name, _)| name != "<<") {
        return members;
    }
    let (merged, mut own): (Vec<_>, Vec<_>) =
        members.into_iter().partition(|(name, _)| name == "<<");
    let mut there: HashSet<String> = own.iter().map(|(name, _)| name.clone()).collect();
    for (_, node) in merged {
        let sources = match node.value {
            Value::List(items) => items,
            _ => vec![node],
        };
        for source in sources {
            if let Value::Map(others) = source.value {
                for (name, node) in others {
                    if there.insert(name.clone()) {
                        own.push((name, node));
                    }
                }
            }
        }
    }
    own
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use proptest::prelude::*;

    use super::*;

    fn one(text: &str) -> Node {
        let mut documents = parse(0, text).expect("YAML");
        assert_eq!(documents.len(), 1, "{documents:?}");
        documents.remove(0).root
    }

    #[test]
    fn nodes_know_their_lines() {
        let root = one("a: 1\nb:\n  - x\n  - c: 'two'\n");
        assert_eq!(root.get("a").map(|node| node.at.line), Some(1));
        let items = root.get("b").expect("b").items();
        assert_eq!(items[0].at.line, 3);
        assert_eq!(items[1].text_of("c"), Some("two"));
        assert_eq!(items[1].get("c").map(|node| node.at.line), Some(4));
    }

    #[test]
    fn a_stream_is_read_document_by_document() {
        let documents = parse(3, "---\na: 1\n---\n# nothing\n---\nb: 2\n...\n").expect("YAML");
        let lines: Vec<_> = documents.iter().map(|one| one.root.at).collect();
        assert_eq!(lines, [Place { file: 3, line: 2 }, Place { file: 3, line: 6 }]);
    }

    #[test]
    fn aliases_and_merge_keys_stand_for_what_they_name() {
        let root = one("base: &b {x: 1, y: 2}\nuse:\n  <<: *b\n  y: 3\n");
        assert_eq!(root.at(&["use", "x"]).and_then(Node::text), Some("1"));
        assert_eq!(root.at(&["use", "y"]).and_then(Node::text), Some("3"));
    }

    #[test]
    fn what_is_no_yaml_is_told_of_with_its_line() {
        let error = parse(0, "a: 1\nb: [1, 2\nc: 3\n").unwrap_err();
        assert!(error.line >= 2 && !error.reason.is_empty(), "{error:?}");
        let error = parse(0, "a: 1\n\tb: 2\n").unwrap_err();
        assert_eq!(error.line, 2, "{error:?}");
    }

    #[test]
    fn aliases_that_stand_for_billions_are_refused() {
        let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
        for level in 1..12 {
            let before = format!("*a{}, ", level - 1).repeat(10);
            writeln!(text, "a{level}: &a{level} [{before}]").expect("text");
        }
        let error = parse(0, &text).unwrap_err();
        assert!(error.reason.contains("aliases"), "{error:?}");
    }

    #[test]
    fn anchors_around_anchors_are_refused_where_they_name_too_much() {
        let many = "x, ".repeat(20_000);
        let text = format!("{}[{many}]{}\n", "&a [".repeat(100), "]".repeat(100));
        let error = parse(0, &text).unwrap_err();
        assert!(error.reason.contains("anchors"), "{error:?}");
    }

    #[test]
    fn a_mapping_with_many_members_is_read_and_its_repeated_key_found() {
        let mut text = String::new();
        for index in 0..50_000 {
            writeln!(text, "k{index}: {index}").expect("text");
        }
        let all = parse(0, &text).expect("YAML");
        assert_eq!(all[0].repeated, None);
        assert_eq!(all[0].root.members().len(), 50_000);
        assert_eq!(all[0].root.text_of("k49999"), Some("49999"));
        text.push_str("k31: again\nk5: again\n");
        let all = parse(0, &text).expect("YAML");
        let (at, key) = all[0].repeated.as_ref().expect("a repeated key");
        assert_eq!((at.line, key.as_str()), (50_001, "k31"));
        assert_eq!(all[0].root.text_of("k31"), Some("again"), "the last one counts");
    }

    #[test]
    fn nesting_without_end_is_refused() {
        let error = parse(0, &"[".repeat(100_000)).unwrap_err();
        assert!(!error.reason.is_empty(), "{error:?}");
    }

    #[test]
    fn a_template_and_a_repeated_key_are_marked() {
        let document = &parse(0, "name: {{ x }}\n").expect("YAML")[0];
        assert!(document.complex_key.is_some(), "{document:?}");
        let document = &parse(0, "a: 1\na: 2\n").expect("YAML")[0];
        assert_eq!(document.repeated.as_ref().map(|one| one.0.line), Some(2));
    }

    proptest! {
        #[test]
        fn no_text_panics(text in ".{0,200}") {
            drop(parse(0, &text));
        }

        #[test]
        fn nothing_that_looks_like_yaml_panics(text in "[-a:{}\\[\\]&*!|> \n'\"#,]{0,120}") {
            drop(parse(0, &text));
        }
    }
}
