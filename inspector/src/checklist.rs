//! Expectations for many VIPs in one file, to be kept beside the manifests of a cluster.
//!
//! ```yaml
//! vips:
//!   - vip: 192.168.2.20:443/tcp
//!     via: [eno1, wg0]
//!     expect: [served, announced@eno1, no-finding:device-no-datapath]
//! ```
//!
//! The claims are those of `--expect`.

use crate::{
    evidence::VipQuery,
    judge::expect::Expectation,
    lint::yaml::{self, Node, Value},
};

/// What is expected of one VIP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    /// The VIP, with the client's address where one is given.
    pub query: VipQuery,
    /// Only these devices.
    pub via: Vec<String>,
    /// The claims; `served` where none are given.
    pub claims: Vec<Expectation>,
    /// Line of the file, from 1.
    pub line: usize,
}

/// Why a file is no list of expectations.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{path}:{line}: {reason}")]
pub struct ChecklistError {
    /// Path of the file.
    pub path: String,
    /// Line, from 1.
    pub line: usize,
    /// What is wrong.
    pub reason: String,
}

/// Reads a file's text; `path` is for error messages.
///
/// # Errors
/// [`ChecklistError`], with the line.
pub fn parse(path: &str, text: &str) -> Result<Vec<Item>, ChecklistError> {
    let error =
        |line: usize, reason: String| ChecklistError { path: path.to_owned(), line, reason };
    let documents = yaml::parse(0, text)
        .map_err(|one| error(one.line, format!("column {}: {}", one.column, one.reason)))?;
    let mut items = Vec::new();
    for document in &documents {
        let at = |node: &Node| node.at.line;
        if let Some((place, key)) = &document.repeated {
            return Err(error(place.line, format!("the key `{key}` is there twice")));
        }
        only(&document.root, &["vips"]).map_err(|(line, reason)| error(line, reason))?;
        let Some(vips) = document.root.get("vips") else {
            return Err(error(at(&document.root), "it has no list `vips`".to_owned()));
        };
        let Value::List(vips) = &vips.value else {
            return Err(error(at(vips), "`vips` is no list".to_owned()));
        };
        for node in vips {
            items.push(item(node).map_err(|(line, reason)| error(line, reason))?);
        }
    }
    if items.is_empty() {
        return Err(error(1, "it expects nothing: name at least one VIP below `vips`".to_owned()));
    }
    Ok(items)
}

type Refused = (usize, String);

/// Refuses members with other names: a misspelt one would expect nothing.
fn only(node: &Node, names: &[&str]) -> Result<(), Refused> {
    if !matches!(node.value, Value::Map(_)) {
        return Err((node.at.line, format!("a mapping with {} is wanted here", names.join(", "))));
    }
    match node.members().iter().find(|(name, _)| !names.contains(&name.as_str())) {
        Some((name, value)) => {
            Err((value.at.line, format!("`{name}` is not known: use {}", names.join(", "))))
        }
        None => Ok(()),
    }
}

fn item(node: &Node) -> Result<Item, Refused> {
    only(node, &["vip", "source", "via", "expect"])?;
    let text = |key: &str| -> Result<Option<(usize, &str)>, Refused> {
        match node.get(key) {
            None => Ok(None),
            Some(value) => match value.text() {
                Some(text) => Ok(Some((value.at.line, text))),
                None => Err((value.at.line, format!("`{key}` is no text"))),
            },
        }
    };
    let list = |key: &str| -> Result<Vec<(usize, &str)>, Refused> {
        let Some(value) = node.get(key) else { return Ok(Vec::new()) };
        match &value.value {
            Value::Scalar(text) => Ok(vec![(value.at.line, text)]),
            Value::List(items) => items
                .iter()
                .map(|one| match one.text() {
                    Some(text) => Ok((one.at.line, text)),
                    None => Err((one.at.line, format!("`{key}` is a list of texts"))),
                })
                .collect(),
            _ => Err((value.at.line, format!("`{key}` is no list"))),
        }
    };
    let (line, vip) = text("vip")?.ok_or((node.at.line, "it has no `vip`".to_owned()))?;
    let mut query: VipQuery = vip.parse().map_err(|error| (line, format!("{error}")))?;
    if let Some((line, source)) = text("source")? {
        let source: std::net::IpAddr =
            source.parse().map_err(|_| (line, format!("`{source}` is no IP address")))?;
        if source.is_ipv4() != query.address.is_ipv4() {
            return Err((
                line,
                format!("the source {source} and {} are of different IP families", query.address),
            ));
        }
        query.source = Some(source);
    }
    let mut claims = Vec::new();
    for (line, claim) in list("expect")? {
        claims.push(claim.parse::<Expectation>().map_err(|error| (line, error.to_string()))?);
    }
    if claims.is_empty() {
        claims.push("served".parse().map_err(|_| (line, "`served` is no claim".to_owned()))?);
    }
    let via = list("via")?.into_iter().map(|(_, device)| device.to_owned()).collect();
    Ok(Item { query, via, claims, line: node.at.line })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_read_with_their_lines() {
        let text = "# ours\nvips:\n  - vip: 192.168.2.20:443/tcp\n    via: [eno1, wg0]\n    source: \
                    10.0.0.1\n    expect: [served, announced@eno1]\n  - vip: fd00:2::20\n";
        let items = parse("x.yaml", text).expect("a checklist");
        assert_eq!(items.len(), 2);
        assert_eq!((items[0].line, items[1].line), (3, 7));
        assert_eq!(items[0].query.to_string(), "192.168.2.20:443/TCP");
        assert_eq!(items[0].query.source, Some("10.0.0.1".parse().expect("an address")));
        assert_eq!(items[0].via, ["eno1", "wg0"]);
        let claims: Vec<String> = items[0].claims.iter().map(ToString::to_string).collect();
        assert_eq!(claims, ["served", "announced@eno1"]);
        assert_eq!(items[1].claims[0].to_string(), "served");
    }

    #[test]
    fn what_is_none_is_refused_with_its_line() {
        for (text, line, says) in [
            ("", 1, "expects nothing"),
            ("vips: []\n", 1, "expects nothing"),
            ("vips:\n  - vip: nonsense\n", 2, "no IP address"),
            ("vips:\n  - vip: 10.0.0.1\n    expect: [served, sevred]\n", 3, "no claim"),
            ("vips:\n  - vip: 10.0.0.1\n    expct: [served]\n", 3, "`expct` is not known"),
            ("vips:\n  - vip: 10.0.0.1\n    source: fd00::1\n", 3, "different IP families"),
            ("vips:\n  - expect: served\n", 2, "no `vip`"),
            ("- vip: 10.0.0.1\n", 1, "mapping"),
            ("vips: [\n", 1, ""),
        ] {
            let error = parse("x.yaml", text).expect_err(text);
            assert!(error.reason.contains(says), "{text}: {error}");
            assert!(error.line >= line, "{text}: {error}");
        }
    }
}
