//! Label selectors, and what one says of the nodes that another selects.

use std::{collections::BTreeSet, fmt};

use super::yaml::Node;

/// How a requirement compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operator {
    /// The label has one of the values.
    In,
    /// The label is not there, or has none of the values.
    NotIn,
    /// The label is there.
    Exists,
    /// The label is not there.
    DoesNotExist,
    /// The label is a number above the value.
    Gt,
    /// The label is a number below the value.
    Lt,
    /// An operator that is none.
    Unknown,
}

/// One requirement on a label.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requirement {
    /// The label.
    pub key: String,
    /// How it is compared.
    pub operator: Operator,
    /// With what.
    pub values: Vec<String>,
}

/// Requirements that all have to hold; none selects everything.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Selector(pub Vec<Requirement>);

impl fmt::Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, operator, values } = self;
        let list = values.join(", ");
        match (operator, values.as_slice()) {
            (Operator::In, [one]) => write!(f, "{key}={one}"),
            (Operator::In, _) => write!(f, "{key} in ({list})"),
            (Operator::NotIn, _) => write!(f, "{key} not in ({list})"),
            (Operator::Exists, _) => f.write_str(key),
            (Operator::DoesNotExist, _) => write!(f, "!{key}"),
            (Operator::Gt, _) => write!(f, "{key} > {list}"),
            (Operator::Lt, _) => write!(f, "{key} < {list}"),
            (Operator::Unknown, _) => write!(f, "{key} (unknown operator)"),
        }
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, one) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str(", ")?;
            }
            one.fmt(f)?;
        }
        Ok(())
    }
}

impl Requirement {
    fn equals(key: &str, value: &str) -> Self {
        Self { key: key.to_owned(), operator: Operator::In, values: vec![value.to_owned()] }
    }

    /// An entry of `matchExpressions`.
    pub(super) fn expression(node: &Node) -> Self {
        let operator = match node.text_of("operator").unwrap_or_default() {
            "In" => Operator::In,
            "NotIn" => Operator::NotIn,
            "Exists" => Operator::Exists,
            "DoesNotExist" => Operator::DoesNotExist,
            "Gt" => Operator::Gt,
            "Lt" => Operator::Lt,
            _ => Operator::Unknown,
        };
        let values = node.get("values").map(Node::items).unwrap_or_default();
        Self {
            key: node.text_of("key").unwrap_or_default().to_owned(),
            operator,
            values: values.iter().filter_map(Node::text).map(str::to_owned).collect(),
        }
    }

    /// Whether a label value (none if it is not there) meets it.
    #[must_use]
    pub fn matches(&self, label: Option<&str>) -> bool {
        let among = |label: &str| self.values.iter().any(|value| value == label);
        match self.operator {
            Operator::In => label.is_some_and(among),
            Operator::NotIn => !label.is_some_and(among),
            Operator::Exists => label.is_some(),
            Operator::DoesNotExist => label.is_none(),
            Operator::Gt | Operator::Lt => {
                let number = |text: &str| text.parse::<i64>().ok();
                match (label.and_then(number), self.values.first().and_then(|one| number(one))) {
                    (Some(label), Some(value)) if self.operator == Operator::Gt => label > value,
                    (Some(label), Some(value)) => label < value,
                    _ => false,
                }
            }
            Operator::Unknown => false,
        }
    }
}

impl Selector {
    /// A map of labels that all have to be there: a Service's `selector`, `nodeSelector` of a pod.
    #[must_use]
    pub fn labels(node: &Node) -> Self {
        Self(
            node.members()
                .iter()
                .map(|(key, value)| Requirement::equals(key, value.text().unwrap_or_default()))
                .collect(),
        )
    }

    /// A `LabelSelector`: `matchLabels` and `matchExpressions`.
    #[must_use]
    pub fn new(node: &Node) -> Self {
        let mut all = node.get("matchLabels").map(Self::labels).unwrap_or_default();
        let expressions = node.get("matchExpressions").map(Node::items).unwrap_or_default();
        all.0.extend(expressions.iter().map(Requirement::expression));
        all
    }

    /// Whether labels meet every requirement.
    #[must_use]
    pub fn matches<'l>(&self, label: impl Fn(&str) -> Option<&'l str>) -> bool {
        self.0.iter().all(|one| one.matches(label(&one.key)))
    }

    /// Whether everything that this selects is sure to meet a requirement.
    #[must_use]
    pub fn implies(&self, requirement: &Requirement) -> bool {
        // What is known of the label on whatever this selects.
        let mut exists = None;
        let mut among: Option<BTreeSet<&str>> = None;
        let mut not: BTreeSet<&str> = BTreeSet::new();
        for one in self.0.iter().filter(|one| one.key == requirement.key) {
            if one == requirement {
                return true;
            }
            let values = one.values.iter().map(String::as_str);
            match one.operator {
                Operator::In => {
                    exists = Some(true);
                    let values: BTreeSet<&str> = values.collect();
                    among = Some(match among {
                        Some(before) => before.intersection(&values).copied().collect(),
                        None => values,
                    });
                }
                Operator::NotIn => not.extend(values),
                Operator::Exists | Operator::Gt | Operator::Lt => exists = Some(true),
                Operator::DoesNotExist => exists = Some(false),
                Operator::Unknown => {}
            }
        }
        if exists == Some(false) {
            return matches!(requirement.operator, Operator::DoesNotExist | Operator::NotIn);
        }
        if let Some(among) = among {
            return among
                .iter()
                .all(|value| not.contains(value) || requirement.matches(Some(value)));
        }
        match requirement.operator {
            Operator::Exists => exists == Some(true),
            Operator::NotIn => requirement.values.iter().all(|value| not.contains(value.as_str())),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::lint::yaml;

    fn selector(text: &str) -> Selector {
        Selector::new(&yaml::parse(0, text).expect("YAML")[0].root)
    }

    #[test]
    fn labels_are_matched_as_kubernetes_does() {
        let one = selector(
            "{matchLabels: {a: x}, matchExpressions: [{key: b, operator: NotIn, values: [y]}, \
             {key: c, operator: DoesNotExist}]}",
        );
        let with = |labels: &[(&'static str, &'static str)]| {
            one.matches(|key| labels.iter().find(|label| label.0 == key).map(|label| label.1))
        };
        assert!(with(&[("a", "x")]));
        assert!(with(&[("a", "x"), ("b", "z")]));
        assert!(!with(&[("a", "x"), ("b", "y")]));
        assert!(!with(&[("a", "x"), ("c", "")]));
        assert!(!with(&[("a", "z")]));
        assert!(Selector::default().matches(|_| None), "an empty selector selects everything");
    }

    fn requirement() -> impl Strategy<Value = Requirement> {
        let operator = prop_oneof![
            Just(Operator::In),
            Just(Operator::NotIn),
            Just(Operator::Exists),
            Just(Operator::DoesNotExist),
            Just(Operator::Gt),
            Just(Operator::Lt),
        ];
        let values = proptest::collection::vec("[0-4]", 1..3);
        ("[ab]", operator, values).prop_map(|(key, operator, values)| Requirement {
            key,
            operator,
            values,
        })
    }

    proptest! {
        /// What is called implied holds for every label that the selector lets through.
        #[test]
        fn nothing_is_implied_that_does_not_follow(
            all in proptest::collection::vec(requirement(), 0..4),
            other in requirement(),
        ) {
            let selector = Selector(all);
            if selector.implies(&other) {
                let labels = [None, Some("0"), Some("1"), Some("2"), Some("3"), Some("4"), Some("5")];
                for a in labels {
                    for b in labels {
                        let label = |key: &str| if key == "a" { a } else { b };
                        if selector.matches(label) {
                            prop_assert!(
                                other.matches(label(&other.key)),
                                "{selector} lets a={a:?} b={b:?} through, {other} does not"
                            );
                        }
                    }
                }
            }
        }
    }
}
