//! Kustomizations, as far as plain files resolve them: resources, components, strategic-merge and
//! JSON patches, namespace, prefix, suffix and labels. What else a kustomization does (charts,
//! generators, replacements, remote bases) is not done here but said.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    File,
    objects::{Contents, Object, folder},
    selector::Selector,
    yaml::{self, Node, Value},
};

/// Names that a kustomization's file can have.
const NAMES: [&str; 3] = ["kustomization.yaml", "kustomization.yml", "Kustomization"];
/// Deepest chain of bases.
const DEPTH: usize = 32;
/// Fields that make or change objects in ways that are not resolved here.
const NOT_RESOLVED: [&str; 8] = [
    "helmCharts",
    "helmChartInflationGenerator",
    "generators",
    "transformers",
    "replacements",
    "vars",
    "validators",
    "openapi",
];

/// The objects that the tree makes, and what of it could not be resolved.
#[derive(Debug, Default)]
pub(super) struct Resolved {
    pub objects: Vec<Object>,
    pub notes: Vec<String>,
}

struct Tree<'t> {
    files: &'t [File],
    contents: &'t Contents,
    /// Files by normalised path.
    by_path: BTreeMap<String, usize>,
    /// Kustomizations by folder.
    kustomizations: BTreeMap<String, usize>,
    notes: BTreeSet<String>,
}

/// Joins a folder and a relative path, `.` and `..` resolved by their words.
fn join(folder: &str, path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    let all = if path.starts_with('/') { path.to_owned() } else { format!("{folder}/{path}") };
    for part in all.split('/') {
        match part {
            "" | "." => {}
            ".." if parts.last().is_some_and(|last| *last != "..") => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    let joined = parts.join("/");
    if all.starts_with('/') && !folder.is_empty() || path.starts_with('/') {
        format!("/{joined}")
    } else {
        joined
    }
}

/// Whether a resource is fetched from elsewhere.
fn is_remote(path: &str) -> bool {
    path.contains("://")
        || path.contains("?ref=")
        || path.starts_with("git@")
        || path.starts_with("github.com/")
}

/// Resolves the kustomizations that no other one uses; files that none names are plain manifests.
pub(super) fn resolve(files: &[File], contents: &Contents) -> Resolved {
    let mut tree = Tree {
        files,
        contents,
        by_path: BTreeMap::new(),
        kustomizations: BTreeMap::new(),
        notes: BTreeSet::new(),
    };
    for (index, file) in files.iter().enumerate() {
        let path = normal(&file.path);
        let name = path.rsplit('/').next().unwrap_or_default();
        if NAMES.contains(&name) && !contents.files[index].documents.is_empty() {
            tree.kustomizations.insert(folder(&path).to_owned(), index);
        }
        tree.by_path.insert(path, index);
    }
    let mut used: BTreeSet<String> = BTreeSet::new();
    let mut owned: BTreeSet<usize> = tree.kustomizations.values().copied().collect();
    for (place, index) in &tree.kustomizations {
        for path in tree.contents.files[*index].documents.iter().flat_map(named) {
            let path = join(place, path);
            match tree.by_path.get(&path) {
                Some(file) => {
                    owned.insert(*file);
                }
                None => {
                    used.insert(path);
                }
            }
        }
    }
    let roots: Vec<String> =
        tree.kustomizations.keys().filter(|place| !used.contains(*place)).cloned().collect();
    let mut objects = Vec::new();
    let mut reached = BTreeSet::new();
    for root in &roots {
        let mut own = Vec::new();
        tree.accumulate(root, &mut own, &mut reached, 0);
        objects.append(&mut own);
    }
    for place in tree.kustomizations.keys().filter(|place| !reached.contains(*place)) {
        tree.notes.insert(format!("the kustomization in {place}/ is used only by itself"));
    }
    for (index, content) in contents.files.iter().enumerate() {
        if !owned.contains(&index) {
            objects.extend(content.objects.iter().cloned());
        }
    }
    Resolved { objects, notes: tree.notes.into_iter().collect() }
}

fn normal(path: &str) -> String {
    match path.strip_prefix('/') {
        Some(rest) => format!("/{}", join("", rest)),
        None => join("", path),
    }
}

/// Every file or folder that a kustomization names.
fn named(root: &Node) -> impl Iterator<Item = &str> {
    let lists = ["resources", "bases", "components", "patchesStrategicMerge", "crds"];
    let plain = lists.into_iter().filter_map(|key| root.get(key)).flat_map(Node::items);
    let patches = ["patches", "patchesJson6902", "replacements"];
    let paths = patches
        .into_iter()
        .filter_map(|key| root.get(key))
        .flat_map(Node::items)
        .filter_map(|patch| patch.get("path"));
    let more = ["transformers", "generators", "configurations"];
    let more = more.into_iter().filter_map(|key| root.get(key)).flat_map(Node::items);
    plain
        .chain(paths)
        .chain(more)
        .filter_map(Node::text)
        .filter(|text| !text.contains('\n') && !is_remote(text))
}

impl Tree<'_> {
    /// Adds what a kustomization makes to `own`, and does to all of `own` what it does.
    fn accumulate(
        &mut self,
        place: &str,
        own: &mut Vec<Object>,
        reached: &mut BTreeSet<String>,
        depth: usize,
    ) {
        let Some(index) = self.kustomizations.get(place).copied() else { return };
        if depth > DEPTH {
            self.notes.insert(format!("the kustomization in {place}/ leads back to itself"));
            return;
        }
        reached.insert(place.to_owned());
        let Some(root) = self.contents.files[index].documents.first() else { return };
        let title = &self.files[index].path;
        for key in NOT_RESOLVED {
            if root.get(key).is_some() {
                self.notes.insert(format!("{title}: `{key}` is not resolved"));
            }
        }
        for key in ["resources", "bases"] {
            for path in root.get(key).map(Node::items).unwrap_or_default() {
                let Some(path) = path.text() else { continue };
                if is_remote(path) {
                    self.notes.insert(format!("{title}: {path} is not fetched"));
                    continue;
                }
                let path = join(place, path);
                if let Some(file) = self.by_path.get(&path) {
                    own.extend(self.contents.files[*file].objects.iter().cloned());
                } else if self.kustomizations.contains_key(&path) {
                    let mut base = Vec::new();
                    self.accumulate(&path, &mut base, reached, depth + 1);
                    own.append(&mut base);
                } else {
                    self.notes
                        .insert(format!("{title}: {path} is not among the files that were read"));
                }
            }
        }
        for path in root.get("components").map(Node::items).unwrap_or_default() {
            let Some(path) = path.text() else { continue };
            let path = join(place, path);
            if self.kustomizations.contains_key(&path) {
                self.accumulate(&path, own, reached, depth + 1);
            } else {
                self.notes.insert(format!("{title}: {path} is not among the files that were read"));
            }
        }
        self.patches(place, index, own);
        transform(root, own);
    }

    /// Applies every patch of a kustomization.
    fn patches(&mut self, place: &str, index: usize, own: &mut Vec<Object>) {
        let Some(root) = self.contents.files[index].documents.first() else { return };
        let title = self.files[index].path.clone();
        for patch in root.get("patchesStrategicMerge").map(Node::items).unwrap_or_default() {
            let Some(text) = patch.text() else { continue };
            for document in self.patch_documents(place, text, patch, false, &title) {
                self.apply(&document, None, own, &title);
            }
        }
        for key in ["patches", "patchesJson6902"] {
            for patch in root.get(key).map(Node::items).unwrap_or_default() {
                let inline = patch.get("patch").filter(|node| node.value != Value::Null);
                let Some(source) = inline.or_else(|| patch.get("path")) else { continue };
                let Some(text) = source.text() else { continue };
                let documents = self.patch_documents(place, text, source, inline.is_some(), &title);
                for document in documents {
                    self.apply(&document, patch.get("target"), own, &title);
                }
            }
        }
    }

    /// The documents of a patch: text of its own, or a file. Where either may stand, it is a file if
    /// there is one.
    fn patch_documents(
        &mut self,
        place: &str,
        text: &str,
        source: &Node,
        inline: bool,
        title: &str,
    ) -> Vec<Node> {
        if !inline && let Some(file) = self.by_path.get(&join(place, text)) {
            return self.contents.files[*file].documents.clone();
        }
        let looks_inline = inline || text.contains('\n') || text.contains(": ");
        match yaml::parse(source.at.file, text) {
            Ok(documents) if looks_inline => documents
                .into_iter()
                .map(|mut document| {
                    place_at(&mut document.root, source);
                    document.root
                })
                .collect(),
            Ok(_) => {
                let path = join(place, text);
                self.notes.insert(format!("{title}: {path} is not among the files that were read"));
                Vec::new()
            }
            Err(error) => {
                self.notes.insert(format!(
                    "{title}:{}: the patch is no YAML: {}",
                    source.at.line, error.reason
                ));
                Vec::new()
            }
        }
    }

    fn apply(&mut self, patch: &Node, target: Option<&Node>, own: &mut Vec<Object>, title: &str) {
        let target = match target.map(Target::new).transpose() {
            Ok(target) => target,
            Err(what) => {
                self.notes
                    .insert(format!("{title}: the patch's target {what}, and is not resolved"));
                return;
            }
        };
        let named = Object::new(patch.clone());
        let hit = |object: &Object| match (&target, &named) {
            (Some(target), _) => target.meets(object),
            (None, Some(named)) => {
                let space = named.stated_namespace();
                named.kind == object.kind
                    && named.group == object.group
                    && object.is_called(
                        |name| name == named.name(),
                        |one| space.is_none_or(|space| space == one),
                    )
            }
            (None, None) => false,
        };
        let mut count = 0;
        for object in own.iter_mut().filter(|object| hit(object)) {
            count += 1;
            if let Value::List(operations) = &patch.value {
                for operation in operations {
                    if let Err(reason) = json_patch(&mut object.root, operation) {
                        self.notes
                            .insert(format!("{title}: a patch of {}: {reason}", object.title()));
                    }
                }
            } else {
                let (name, space) = (object.name().to_owned(), object.stated_namespace());
                let space = space.map(str::to_owned);
                merge(&mut object.root, patch);
                // A patch with a target may name something else, and renames nothing.
                restore(&mut object.root, "name", Some(name));
                restore(&mut object.root, "namespace", space);
            }
        }
        if patch.text_of("$patch") == Some("delete") {
            own.retain(|object| !hit(object));
        }
        if let (0, None) = (count, &target) {
            let what = named.map_or("what it does not name".to_owned(), |named| named.title());
            self.notes.insert(format!("{title}: a patch is of {what}, which is not there"));
        }
    }
}

/// Which objects a patch is for.
struct Target<'p> {
    node: &'p Node,
    labels: Vec<(&'p str, Option<&'p str>)>,
}

impl<'p> Target<'p> {
    /// From a patch's `target`. An error says what of it is not resolved.
    fn new(node: &'p Node) -> Result<Self, String> {
        // They are regular expressions that have to meet the whole.
        let plain = |text: &str| {
            text == ".*" || !text.contains(['*', '+', '?', '[', '(', '|', '^', '$', '\\', '{'])
        };
        for key in ["name", "namespace", "kind", "group", "version"] {
            if let Some(text) = node.text_of(key).filter(|text| !plain(text)) {
                return Err(format!("is an expression ({text})"));
            }
        }
        if node.text_of("annotationSelector").is_some_and(|text| !text.is_empty()) {
            return Err("has an annotationSelector".to_owned());
        }
        let mut labels = Vec::new();
        let selector = node.text_of("labelSelector").unwrap_or_default();
        for one in selector.split(',').map(str::trim).filter(|one| !one.is_empty()) {
            if one.contains(['!', '(', ')', '<', '>', ' ']) && !one.contains('=')
                || one.contains("!=")
                || one.contains('(')
            {
                return Err(format!("has a labelSelector ({selector})"));
            }
            labels.push(match one.split_once('=') {
                Some((key, value)) => (key.trim(), Some(value.trim_start_matches('=').trim())),
                None => (one, None),
            });
        }
        Ok(Self { node, labels })
    }

    fn meets(&self, object: &Object) -> bool {
        let meets = |key: &str, found: &str| {
            let wanted = self.node.text_of(key).unwrap_or_default();
            wanted.is_empty() || wanted == ".*" || wanted == found
        };
        let version = object.root.text_of("apiVersion").unwrap_or_default();
        meets("kind", &object.kind)
            && meets("group", &object.group)
            && meets("version", version.rsplit('/').next().unwrap_or_default())
            && object.is_called(|name| meets("name", name), |space| meets("namespace", space))
            && self.labels.iter().all(|(key, wanted)| {
                object.label(key).is_some_and(|found| wanted.is_none_or(|one| one == found))
            })
    }
}

/// Puts what was read from a patch in a string where the string stands.
fn place_at(node: &mut Node, source: &Node) {
    // The text of a block begins on the line below its marker.
    node.at.line += source.at.line.saturating_sub(1);
    match &mut node.value {
        Value::List(items) => items.iter_mut().for_each(|item| place_at(item, source)),
        Value::Map(members) => members.iter_mut().for_each(|(_, item)| place_at(item, source)),
        Value::Null | Value::Scalar(_) => {}
    }
}

fn restore(root: &mut Node, key: &str, value: Option<String>) {
    let metadata = root.entry("metadata");
    match value {
        Some(text) => {
            let at = metadata.get(key).map_or(metadata.at, |node| node.at);
            metadata.set(key, Node { value: Value::Scalar(text), at });
        }
        None => metadata.remove(key),
    }
}

/// A strategic merge: mappings are merged, `null` and `$patch: delete` remove, lists are replaced.
/// (Those lists of Kubernetes' that merge by a key, containers and ports, decide nothing here.)
fn merge(into: &mut Node, patch: &Node) {
    let Value::Map(members) = &patch.value else {
        *into = patch.clone();
        return;
    };
    if !matches!(into.value, Value::Map(_)) || patch.text_of("$patch") == Some("replace") {
        into.value = Value::Map(Vec::new());
    }
    for (key, node) in members.iter().filter(|(key, _)| key != "$patch") {
        if node.value == Value::Null || node.text_of("$patch") == Some("delete") {
            into.remove(key);
        } else if let Some(there) = into.get_mut(key) {
            merge(there, node);
        } else {
            into.set(key, node.clone());
        }
    }
}

/// One operation of a JSON patch (RFC 6902).
fn json_patch(root: &mut Node, operation: &Node) -> Result<(), String> {
    let path = operation.text_of("path").unwrap_or_default();
    let parts: Vec<String> =
        path.split('/').skip(1).map(|part| part.replace("~1", "/").replace("~0", "~")).collect();
    let Some((last, folders)) = parts.split_last() else {
        return Err(format!("`{path}` is no path below the root"));
    };
    let mut node = root;
    for part in folders {
        let missing = || format!("nothing is at {path}");
        node = match &mut node.value {
            Value::List(items) => {
                let index: usize = part.parse().map_err(|_| missing())?;
                items.get_mut(index)
            }
            Value::Map(members) => {
                members.iter_mut().find(|(name, _)| name == part).map(|(_, member)| member)
            }
            Value::Null | Value::Scalar(_) => None,
        }
        .ok_or_else(missing)?;
    }
    let value = operation.get("value").cloned();
    match (operation.text_of("op").unwrap_or_default(), &mut node.value) {
        ("add" | "replace", Value::List(items)) => {
            let value = value.ok_or("it has no value")?;
            match last.parse::<usize>() {
                Ok(index) if operation.text_of("op") == Some("replace") && index < items.len() => {
                    items[index] = value;
                }
                Ok(index) if index <= items.len() => items.insert(index, value),
                _ if last == "-" => items.push(value),
                _ => return Err(format!("{path} is outside of the list")),
            }
        }
        ("add" | "replace", _) => node.set(last, value.ok_or("it has no value")?),
        ("remove", Value::List(items)) => match last.parse::<usize>() {
            Ok(index) if index < items.len() => drop(items.remove(index)),
            _ => return Err(format!("{path} is outside of the list")),
        },
        ("remove", _) => node.remove(last),
        ("test", _) => {}
        (other, _) => return Err(format!("operation `{other}` is not resolved")),
    }
    Ok(())
}

/// Namespace, prefix, suffix and labels.
fn transform(root: &Node, own: &mut [Object]) {
    let scalar = |node: &Node, text: String| Node { value: Value::Scalar(text), at: node.at };
    for object in own.iter_mut() {
        let before = (object.name().to_owned(), object.stated_namespace().map(str::to_owned));
        if let Some(namespace) = root.text_of("namespace")
            && !is_cluster_scoped(object)
        {
            let metadata = object.root.entry("metadata");
            let node = scalar(metadata, namespace.to_owned());
            metadata.set("namespace", node);
        }
        let prefix = root.text_of("namePrefix").unwrap_or_default();
        let suffix = root.text_of("nameSuffix").unwrap_or_default();
        if !prefix.is_empty() || !suffix.is_empty() {
            let name = format!("{prefix}{}{suffix}", object.name());
            let metadata = object.root.entry("metadata");
            let node = scalar(metadata, name);
            metadata.set("name", node);
        }
        if (object.name(), object.stated_namespace()) != (before.0.as_str(), before.1.as_deref()) {
            object.former.push(before);
        }
        if let Some(labels) = root.get("commonLabels") {
            add_labels(object, labels, true, true);
        }
        for one in root.get("labels").map(Node::items).unwrap_or_default() {
            let Some(pairs) = one.get("pairs") else { continue };
            let selectors = one.get("includeSelectors").is_some_and(Node::is_true);
            let templates = selectors || one.get("includeTemplates").is_some_and(Node::is_true);
            add_labels(object, pairs, selectors, templates);
        }
    }
}

fn is_cluster_scoped(object: &Object) -> bool {
    matches!(
        object.kind.as_str(),
        "CiliumL2AnnouncementPolicy" | "CiliumLoadBalancerIPPool" | "Node" | "Namespace"
    )
}

fn add_labels(object: &mut Object, labels: &Node, selectors: bool, templates: bool) {
    let add = |node: &mut Node| {
        for (key, value) in labels.members() {
            node.set(key, value.clone());
        }
    };
    add(object.root.entry("metadata").entry("labels"));
    let has_template = object.root.at(&["spec", "template"]).is_some();
    if templates && has_template {
        let template = object.root.entry("spec").entry("template");
        add(template.entry("metadata").entry("labels"));
    }
    if selectors {
        if object.kind == "Service" && object.group.is_empty() {
            if object.root.at(&["spec", "selector"]).is_some() {
                add(object.root.entry("spec").entry("selector"));
            }
        } else if has_template {
            add(object.root.entry("spec").entry("selector").entry("matchLabels"));
        }
    }
}

/// Whether labels of a pod template meet a Service's selector.
pub(super) fn selects(selector: &Selector, labels: Option<&Node>) -> bool {
    selector.matches(|key| {
        labels.and_then(|labels| labels.get(key)).map(|value| value.text().unwrap_or_default())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lint::objects;

    fn built(files: &[(&str, &str)]) -> Resolved {
        let files: Vec<File> = files
            .iter()
            .map(|(path, text)| File { path: (*path).to_owned(), text: (*text).to_owned() })
            .collect();
        let contents = objects::read(&files);
        assert!(contents.malformed.is_empty(), "{:?}", contents.malformed);
        resolve(&files, &contents)
    }

    const SERVICE: &str = "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec:\n  type: \
                           LoadBalancer\n  selector: {app: web}\n  externalTrafficPolicy: Local\n";

    #[test]
    fn an_overlay_changes_its_base_and_the_base_alone_is_not_judged() {
        let resolved = built(&[
            ("base/kustomization.yaml", "resources: [service.yaml]\n"),
            ("base/service.yaml", SERVICE),
            (
                "prod/kustomization.yaml",
                "resources: [../base]\nnamespace: web\nnamePrefix: p-\ncommonLabels: {tier: \
                 front}\npatches:\n  - patch: |-\n      apiVersion: v1\n      kind: Service\n      \
                 metadata: {name: web}\n      spec: {externalTrafficPolicy: Cluster}\n",
            ),
        ]);
        assert_eq!(resolved.objects.len(), 1, "{:?}", resolved.objects);
        let service = &resolved.objects[0];
        assert_eq!((service.namespace(), service.name()), ("web", "p-web"));
        assert_eq!(service.label("tier"), Some("front"));
        let spec = service.root.get("spec").expect("spec");
        assert_eq!(spec.text_of("externalTrafficPolicy"), Some("Cluster"));
        assert_eq!(spec.at(&["selector", "tier"]).and_then(Node::text), Some("front"));
        let place = spec.get("externalTrafficPolicy").expect("it").at;
        assert_eq!((place.file, place.line), (2, 10), "where the patch says so");
        assert!(resolved.notes.is_empty(), "{:?}", resolved.notes);
    }

    #[test]
    fn json_patches_and_components_are_applied() {
        let resolved = built(&[
            ("app/kustomization.yaml", "resources: [service.yaml]\ncomponents: [../common]\n"),
            ("app/service.yaml", SERVICE),
            (
                "common/kustomization.yaml",
                "kind: Component\napiVersion: kustomize.config.k8s.io/v1alpha1\npatches:\n  - \
                 target: {kind: Service}\n    path: fix.yaml\n",
            ),
            (
                "common/fix.yaml",
                "- {op: replace, path: /spec/externalTrafficPolicy, value: Cluster}\n- {op: add, \
                 path: /metadata/labels, value: {a~1b: c}}\n",
            ),
        ]);
        assert_eq!(resolved.objects.len(), 1);
        let spec = resolved.objects[0].root.get("spec").expect("spec");
        assert_eq!(spec.text_of("externalTrafficPolicy"), Some("Cluster"));
        assert!(resolved.notes.is_empty(), "{:?}", resolved.notes);
    }

    #[test]
    fn what_is_not_resolved_is_said() {
        let resolved = built(&[(
            "kustomization.yaml",
            "resources: [gone.yaml, 'https://example.org/x.yaml']\nhelmCharts: [{name: x}]\n",
        )]);
        let all = resolved.notes.join("\n");
        for word in ["gone.yaml is not among", "is not fetched", "`helmCharts` is not resolved"] {
            assert!(all.contains(word), "no `{word}` in {all}");
        }
    }

    #[test]
    fn a_circle_of_kustomizations_ends() {
        let resolved = built(&[
            ("a/kustomization.yaml", "resources: [../b]\n"),
            ("b/kustomization.yaml", "resources: [../a]\n"),
            ("c/kustomization.yaml", "resources: [../a]\n"),
        ]);
        assert!(resolved.notes.iter().any(|note| note.contains("leads back")), "{resolved:?}");
    }
}
