//! Reads what is in `deploy/`: YAML with the types that its scalars have, and the objects that a
//! script hands to `kubectl`. The tests hold it against the schemas.

use saphyr_parser::{Event, Parser, ScalarStyle};
use serde_json::{Map, Value};

/// A collection that is being read.
enum Open {
    List(Vec<Value>),
    /// The members, and the key whose value comes next.
    Map(Map<String, Value>, Option<String>),
}

/// The documents of a YAML stream, each scalar with the type that YAML's core schema gives it. Empty
/// documents are left out.
///
/// # Errors
/// A sentence with the line: what is no YAML, a key that is there twice or is no text, an alias
/// (none of ours has any).
pub fn documents(text: &str) -> Result<Vec<Value>, String> {
    let mut open: Vec<Open> = Vec::new();
    let mut all = Vec::new();
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| error.to_string())?;
        let line = span.start.line();
        let node = match event {
            Event::Scalar(text, style, _, _) => scalar(&text, style),
            Event::SequenceStart(..) => {
                open.push(Open::List(Vec::new()));
                continue;
            }
            Event::MappingStart(..) => {
                open.push(Open::Map(Map::new(), None));
                continue;
            }
            Event::SequenceEnd | Event::MappingEnd => match open.pop() {
                Some(Open::List(items)) => Value::Array(items),
                Some(Open::Map(members, _)) => Value::Object(members),
                None => return Err(format!("line {line}: an end without a beginning")),
            },
            Event::Alias(_) => return Err(format!("line {line}: an alias")),
            _ => continue,
        };
        match open.last_mut() {
            None if node == Value::Null => {}
            None => all.push(node),
            Some(Open::List(items)) => items.push(node),
            Some(Open::Map(members, key)) => match key.take() {
                Some(key) => {
                    if members.insert(key.clone(), node).is_some() {
                        return Err(format!("line {line}: `{key}` is there twice"));
                    }
                }
                None => match node {
                    Value::String(text) => *key = Some(text),
                    other => return Err(format!("line {line}: the key {other} is no text")),
                },
            },
        }
    }
    Ok(all)
}

/// A scalar by YAML's core schema, as Kubernetes reads it (hexadecimal and octal numbers, which no
/// manifest of ours has, are text here).
fn scalar(text: &str, style: ScalarStyle) -> Value {
    if style != ScalarStyle::Plain {
        return Value::String(text.to_owned());
    }
    match text {
        "" | "~" | "null" | "Null" | "NULL" => Value::Null,
        "true" | "True" | "TRUE" => Value::Bool(true),
        "false" | "False" | "FALSE" => Value::Bool(false),
        _ => {
            let number = || {
                let is_number = text.starts_with(|c: char| c.is_ascii_digit() || "+-.".contains(c));
                let whole = text.parse::<i64>().ok().map(Value::from);
                whole.or_else(|| text.parse::<f64>().ok().map(Value::from)).filter(|_| is_number)
            };
            number().unwrap_or_else(|| Value::String(text.to_owned()))
        }
    }
}

/// The here-documents of a shell script: the line that opens each, and its text, as it is written
/// (variables are not replaced).
#[must_use]
pub fn here_documents(script: &str) -> Vec<(String, String)> {
    let mut all = Vec::new();
    let mut lines = script.lines();
    while let Some(line) = lines.next() {
        let code = line.trim_start();
        let Some((_, word)) = code.split_once("<<").filter(|_| !code.starts_with('#')) else {
            continue;
        };
        // `<<<` is a string, `a << 2` is arithmetic; `<<-` strips tabs, which we do not use.
        if !word.starts_with(|c: char| c.is_ascii_alphabetic() || c == '\'') {
            continue;
        }
        let end: String = word
            .trim_matches(|c| c == '\'' || c == '"')
            .chars()
            .take_while(|c| c.is_ascii_alphanumeric() || *c == '_')
            .collect();
        let body: Vec<&str> = lines.by_ref().take_while(|line| *line != end).collect();
        all.push((code.to_owned(), body.join("\n")));
    }
    all
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn scalars_have_their_types() {
        let text = "a: 1\nb: '1'\nc: yes\nd: true\ne: 1.5\nf:\ng: 1.2.3\nh: [x, -3, \"null\"]\n";
        assert_eq!(
            documents(text),
            Ok(vec![json!({
                "a": 1, "b": "1", "c": "yes", "d": true, "e": 1.5, "f": null, "g": "1.2.3",
                "h": ["x", -3, "null"],
            })])
        );
        assert_eq!(documents("---\n# nothing\n---\na: {}\n").map(|all| all.len()), Ok(1));
    }

    #[test]
    fn what_kubernetes_would_refuse_is_refused() {
        for (text, word) in
            [("a: 1\na: 2\n", "twice"), ("a: [\n", ""), ("a: &x 1\nb: *x\n", "alias")]
        {
            let error = documents(text).expect_err(text);
            assert!(error.contains(word), "{text}: {error}");
        }
    }

    #[test]
    fn here_documents_are_found_and_here_strings_are_not() {
        let script =
            "x <<END\na: 1\nEND\ny <<<word\nb=$((1 << 24 | c))\n# z <<NO\ncat >f <<'B'\nb\nc\nB\n";
        let all = here_documents(script);
        assert_eq!(
            all,
            [
                ("x <<END".to_owned(), "a: 1".to_owned()),
                ("cat >f <<'B'".to_owned(), "b\nc".to_owned())
            ]
        );
    }
}
