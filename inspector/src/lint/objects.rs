//! From files to Kubernetes objects, as they are written.

use std::collections::BTreeSet;

use super::{
    File, Malformed,
    yaml::{self, Node, Place, Value},
};

/// An object of Kubernetes'.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    /// All of it.
    pub root: Node,
    /// Group of its API: `cilium.io`, empty for the core.
    pub group: String,
    /// Kind.
    pub kind: String,
    /// Names and stated namespaces that it had before a kustomization gave it others: patches may
    /// name it by them.
    pub former: Vec<(String, Option<String>)>,
}

impl Object {
    /// From a document; nothing if it is no object.
    #[must_use]
    pub fn new(root: Node) -> Option<Self> {
        let version = root.text_of("apiVersion")?;
        let group = version.split_once('/').map_or("", |(group, _)| group).to_owned();
        let kind = root.text_of("kind")?.to_owned();
        Some(Self { root, group, kind, former: Vec::new() })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.root.at(&["metadata", "name"]).and_then(Node::text).unwrap_or_default()
    }

    /// Its namespace, where it says one.
    #[must_use]
    pub fn stated_namespace(&self) -> Option<&str> {
        self.root.at(&["metadata", "namespace"]).and_then(Node::text)
    }

    /// Its namespace: `default` where it says none.
    #[must_use]
    pub fn namespace(&self) -> &str {
        self.stated_namespace().unwrap_or("default")
    }

    /// Whether it has, or had, a name that meets one condition and a namespace that meets another.
    pub fn is_called(&self, name: impl Fn(&str) -> bool, namespace: impl Fn(&str) -> bool) -> bool {
        let now = (self.name(), self.stated_namespace());
        let before = self.former.iter().map(|(name, space)| (name.as_str(), space.as_deref()));
        before.chain([now]).any(|(one, space)| name(one) && namespace(space.unwrap_or("default")))
    }

    /// The value of a label.
    #[must_use]
    pub fn label(&self, key: &str) -> Option<&str> {
        let labels = self.root.at(&["metadata", "labels"])?;
        labels.get(key).map(|value| value.text().unwrap_or_default())
    }

    /// Where it begins.
    #[must_use]
    pub fn at(&self) -> Place {
        self.root.at
    }

    /// `Deployment games/minecraft`
    #[must_use]
    pub fn title(&self) -> String {
        format!("{} {}/{}", self.kind, self.namespace(), self.name())
    }
}

/// What one file holds.
#[derive(Debug, Default)]
pub(super) struct Content {
    /// Documents that are objects, those of lists one by one.
    pub objects: Vec<Object>,
    /// Every document: patches need not be objects.
    pub documents: Vec<Node>,
}

/// What the files hold, one content for each.
#[derive(Debug, Default)]
pub(super) struct Contents {
    pub files: Vec<Content>,
    pub malformed: Vec<Malformed>,
    /// Indices of the files that are templates.
    pub templates: Vec<usize>,
}

/// The folder of a path, without the last slash; empty at the top.
pub(super) fn folder(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// Folders of Helm charts whose templates are files of the tree.
fn template_folders(files: &[File]) -> BTreeSet<String> {
    files
        .iter()
        .filter(|file| file.path.rsplit('/').next() == Some("Chart.yaml"))
        .map(|file| match folder(&file.path) {
            "" => "templates/".to_owned(),
            folder => format!("{folder}/templates/"),
        })
        .collect()
}

/// What Helm printed before the chart's notes, if these begin at or above a line: they are text for
/// people, below the manifests.
fn without_notes(text: &str, line: usize) -> Option<&str> {
    if !text.contains("# Source: ") {
        return None;
    }
    let mut start = 0;
    for row in text.split_inclusive('\n').take(line) {
        if row.trim_end() == "NOTES:" {
            return Some(&text[..start]);
        }
        start += row.len();
    }
    None
}

/// Reads every file.
pub(super) fn read(files: &[File]) -> Contents {
    let charts = template_folders(files);
    let mut contents = Contents::default();
    for (index, file) in files.iter().enumerate() {
        let in_chart = charts.iter().any(|folder| file.path.starts_with(folder.as_str()));
        let has_braces = file.text.contains("{{");
        let mut content = Content::default();
        let parsed = yaml::parse(index, &file.text).or_else(|error| {
            match without_notes(&file.text, error.line) {
                Some(text) => yaml::parse(index, text),
                None => Err(error),
            }
        });
        match parsed {
            // Text between braces is read as mappings, in places where no manifest has any.
            Ok(documents)
                if has_braces
                    && (in_chart || documents.iter().any(|one| one.complex_key.is_some())) =>
            {
                contents.templates.push(index);
            }
            Ok(documents) => {
                for document in documents {
                    let is_object = document.root.get("kind").is_some();
                    if let Some((at, key)) = document.repeated.filter(|_| is_object) {
                        contents.malformed.push(Malformed {
                            path: file.path.clone(),
                            line: at.line,
                            reason: format!("the key `{key}` is there twice"),
                        });
                    }
                    objects(&document.root, &mut content.objects);
                    content.documents.push(document.root);
                }
            }
            Err(_) if in_chart || has_braces || file.text.contains("{%") => {
                contents.templates.push(index);
            }
            Err(error) => contents.malformed.push(Malformed {
                path: file.path.clone(),
                line: error.line,
                reason: format!("column {}: {}", error.column, error.reason),
            }),
        }
        contents.files.push(content);
    }
    contents
}

/// The objects of a document: the items of a list one by one.
fn objects(root: &Node, into: &mut Vec<Object>) {
    let Some(object) = Object::new(root.clone()) else { return };
    match object.root.get("items").map(|items| &items.value) {
        Some(Value::List(items)) if object.kind.ends_with("List") => {
            for item in items {
                objects(item, into);
            }
        }
        _ => into.push(object),
    }
}
