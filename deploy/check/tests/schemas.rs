//! Every object in `deploy/`, those that the script of the kind cluster writes and those that the
//! kustomization makes among them, is held against the schema of its API: a field that the API does
//! not know is an error, and so is one of another type or one that is missing. What the schemas let
//! through is tested too: with a field more, or of another type, each of the objects is refused.
//!
//! Needs what `cargo xtask setup` fetches; fails without, and says so.

mod tools;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use inspector_deploy_check::{documents, here_documents};
use jsonschema::Validator;
use kcr_chainsaw_kyverno_io::v1alpha1::tests as chainsaw;
use kcr_cilium_io::{v2, v2alpha1};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tools::{DEPLOY, deploy_tools};

/// Members of kind's `Cluster` (kind.x-k8s.io/v1alpha4) that are ours to use, as its documentation
/// describes them: kind publishes no schema, and its types are a Go module's.
const KIND: [(&str, &[&str]); 3] = [
    ("", &["kind", "apiVersion", "name", "networking", "nodes"]),
    (
        "networking",
        &["disableDefaultCNI", "kubeProxyMode", "ipFamily", "podSubnet", "serviceSubnet"],
    ),
    ("nodes", &["role", "image", "labels", "extraMounts"]),
];

/// Schemas of the Kubernetes API.
fn kubernetes() -> &'static Value {
    static ALL: OnceLock<Value> = OnceLock::new();
    ALL.get_or_init(|| {
        let path = tools::fetched(&deploy_tools::KUBERNETES_SCHEMAS, "_definitions.json");
        serde_json::from_slice(&fs::read(path).expect("the schemas")).expect("JSON")
    })
}

/// The schema of a kind, compiled.
fn validator(group: &str, version: &str, kind: &str) -> Option<Arc<Validator>> {
    static DONE: Mutex<BTreeMap<String, Arc<Validator>>> = Mutex::new(BTreeMap::new());
    let all = kubernetes()["$defs"].as_object().expect("definitions");
    let wanted = json!([{ "group": group, "version": version, "kind": kind }]);
    let (name, _) = all.iter().find(|(_, one)| one["x-kubernetes-group-version-kind"] == wanted)?;
    let mut done = DONE.lock().unwrap_or_else(PoisonError::into_inner);
    let schema = done.entry(name.clone()).or_insert_with(|| {
        let mut schema = kubernetes().clone();
        schema["$ref"] = json!(format!("#/$defs/{name}"));
        Arc::new(jsonschema::validator_for(&schema).expect("a schema"))
    });
    Some(Arc::clone(schema))
}

/// What a type refuses in an object, fields that it has no place for among it.
fn typed<T: DeserializeOwned>(object: &Value) -> Vec<String> {
    let mut content = object.clone();
    // By these the type was chosen, and it has no field for them.
    for key in ["apiVersion", "kind"] {
        content.as_object_mut().and_then(|members| members.remove(key));
    }
    let mut errors = Vec::new();
    let read = serde_ignored::deserialize::<_, _, T>(&content, |path| {
        errors.push(format!("{path} is not known"));
    });
    errors.extend(read.err().map(|error| error.to_string()));
    errors
}

fn kind_cluster(cluster: &Value) -> Vec<String> {
    let of = |place: &str| KIND.iter().find(|one| one.0 == place).expect("a place").1;
    let unknown = |place: &str, node: &Value| match node.as_object() {
        Some(members) => {
            let unknown = members.keys().filter(|key| !of(place).contains(&key.as_str()));
            unknown.map(|key| format!("{place}.{key} is not known")).collect()
        }
        None => vec![format!("{place} is no mapping")],
    };
    let mut errors = unknown("", cluster);
    errors.extend(unknown("networking", &cluster["networking"]));
    for node in cluster["nodes"].as_array().into_iter().flatten() {
        errors.extend(unknown("nodes", node));
    }
    let networking = &cluster["networking"];
    if networking["disableDefaultCNI"] != true {
        errors.push("disableDefaultCNI: Cilium is the CNI".to_owned());
    }
    let modes = ["iptables", "ipvs", "nftables", "none"];
    if !modes.iter().any(|mode| networking["kubeProxyMode"] == *mode) {
        errors.push(format!("kubeProxyMode is {}", networking["kubeProxyMode"]));
    }
    errors
}

/// What is wrong with an object; nothing if its API takes it.
fn check(object: &Value) -> Vec<String> {
    let word = |key: &str| object[key].as_str().unwrap_or_default();
    let (group, version) = word("apiVersion").rsplit_once('/').unwrap_or(("", word("apiVersion")));
    match (group, version, word("kind")) {
        ("cilium.io", "v2alpha1", "CiliumL2AnnouncementPolicy") => {
            typed::<v2alpha1::ciliuml2announcementpolicies::CiliumL2AnnouncementPolicy>(object)
        }
        ("cilium.io", "v2", "CiliumLoadBalancerIPPool") => {
            typed::<v2::ciliumloadbalancerippools::CiliumLoadBalancerIpPool>(object)
        }
        ("chainsaw.kyverno.io", "v1alpha1", "Test") => typed::<chainsaw::Test>(object),
        ("kind.x-k8s.io", "v1alpha4", "Cluster") => kind_cluster(object),
        (group, version, kind) => match validator(group, version, kind) {
            Some(schema) => {
                let errors = schema.iter_errors(object);
                errors.map(|error| format!("{}: {error}", error.instance_path())).collect()
            }
            None => vec![format!("no API has {kind} of `{group}` in {version}")],
        },
    }
}

/// The files below a folder.
fn files(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() { files(&path, into) } else { into.push(path) }
    }
}

/// What `kubectl` makes of the kustomization, which refuses fields that it does not know itself.
fn kustomized(folder: &Path) -> Result<String, String> {
    let kubectl = deploy_tools::kubectl().expect("HOME");
    let output = Command::new(kubectl).arg("kustomize").arg(folder).output();
    let output = output.expect("kubectl: run `cargo xtask setup`, which fetches it");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}

/// Every object, with where it is.
fn objects() -> Vec<(String, Value)> {
    let mut paths = Vec::new();
    files(Path::new(DEPLOY), &mut paths);
    paths.retain(|path| !path.starts_with(Path::new(DEPLOY).join("check")));
    let mut all = Vec::new();
    for path in paths {
        let shown = path.strip_prefix(DEPLOY).expect("below it").display().to_string();
        let read = || fs::read_to_string(&path).expect("a file");
        match path.extension().and_then(|one| one.to_str()) {
            // kubectl resolves it, below.
            Some("yaml") if shown.ends_with("kustomization.yaml") => {}
            Some("yaml") => {
                let found = documents(&read()).unwrap_or_else(|error| panic!("{shown}: {error}"));
                assert!(!found.is_empty(), "{shown} is empty");
                all.extend(found.into_iter().map(|object| (shown.clone(), object)));
            }
            _ if shown == "kind/run" => {
                for (line, text) in here_documents(&read())
                    .into_iter()
                    .filter(|(line, _)| line.starts_with("kubectl"))
                {
                    let text =
                        text.replace("$first", "172.18.255.200").replace("$last", "172.18.255.220");
                    assert!(!text.contains('$'), "a variable that this test does not know: {text}");
                    let found = documents(&text).unwrap_or_else(|error| panic!("{line}: {error}"));
                    all.extend(
                        found.into_iter().map(|object| (format!("{shown}: {line}"), object)),
                    );
                }
            }
            // The container file, and what it copies.
            _ => assert!(
                ["Containerfile", "inspect"].contains(&shown.as_str()),
                "{shown}: a file that nothing here looks at"
            ),
        }
    }
    let made = kustomized(&Path::new(DEPLOY).join("kubernetes")).expect("a kustomization");
    let made = documents(&made).expect("YAML");
    all.extend(made.into_iter().map(|object| ("kubernetes".to_owned(), object)));
    all
}

#[test]
fn every_object_is_what_its_api_takes() {
    let all = objects();
    for (place, object) in &all {
        let errors = check(object);
        assert!(errors.is_empty(), "{place}: {errors:#?}");
    }
    let kinds: BTreeSet<&str> =
        all.iter().map(|(_, object)| object["kind"].as_str().expect("a kind")).collect();
    let expected = [
        "CiliumL2AnnouncementPolicy",
        "CiliumLoadBalancerIPPool",
        "Cluster",
        "ConfigMap",
        "DaemonSet",
        "Deployment",
        "Service",
        "Test",
    ];
    assert_eq!(kinds, expected.into(), "each kind has been looked at");
}

/// Mappings whose members are anything: labels, selectors, amounts, data, what Chainsaw compares.
fn is_free(path: &str) -> bool {
    let last = path.rsplit('/').next().unwrap_or_default();
    let free =
        ["labels", "matchLabels", "annotations", "nodeSelector", "limits", "requests", "data"];
    free.contains(&last) || path == "/spec/selector" || path.contains("/check")
}

/// Every place in an object.
fn places(node: &Value, path: &str, into: &mut Vec<String>) {
    into.push(path.to_owned());
    match node {
        Value::Object(members) => {
            for (key, member) in members {
                let key = key.replace('~', "~0").replace('/', "~1");
                places(member, &format!("{path}/{key}"), into);
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                places(item, &format!("{path}/{index}"), into);
            }
        }
        _ => {}
    }
}

#[test]
fn an_unknown_field_and_a_wrong_type_are_refused_in_every_place() {
    let mut count = 0;
    for (place, object) in objects() {
        let mut all = Vec::new();
        places(&object, "", &mut all);
        for path in all {
            let is_kind = object["kind"] == "Cluster";
            // A Deployment's selector is no Service's.
            let free = is_free(&path) && !(path == "/spec/selector" && object["kind"] != "Service");
            let mut broken = object.clone();
            let node = broken.pointer_mut(&path).expect("a place");
            match node {
                Value::Object(members) if !free => {
                    members.insert("notAField".to_owned(), json!("x"));
                }
                // What nothing describes but kind's page has its names checked alone.
                Value::Object(_) | Value::Array(_) | Value::Null => continue,
                _ if is_kind || path.contains("/check") => continue,
                scalar => *scalar = json!({ "not": "a scalar" }),
            }
            assert!(!check(&broken).is_empty(), "{place}: {path} of {broken:#}");
            count += 1;
        }
    }
    assert!(count > 200, "{count}");
}

#[test]
fn what_is_missing_or_of_another_version_is_refused() {
    for (place, object) in objects() {
        let mut other = object.clone();
        other["apiVersion"] = json!("cilium.io/v9");
        assert!(!check(&other).is_empty(), "{place}");
    }
    let refused = |text: &str| {
        let objects = documents(text).expect("YAML");
        assert!(!check(&objects[0]).is_empty(), "{text}");
    };
    // The pool is v2 since Cilium 1.18, and the policy is v2alpha1 still.
    refused("{apiVersion: cilium.io/v2, kind: CiliumL2AnnouncementPolicy, metadata: {name: x}}");
    refused("{apiVersion: v1, kind: Service, metadata: {name: x}, spec: {ports: [{name: a}]}}");
    refused("{apiVersion: v1, kind: Service, metadata: {name: x}, spec: {ports: [{port: x}]}}");
    refused(
        "{apiVersion: cilium.io/v2, kind: CiliumLoadBalancerIPPool, metadata: {name: x}, spec: \
         {cidrs: [{cidr: 10.0.0.0/8}]}}",
    );
    refused(
        "{apiVersion: cilium.io/v2, kind: CiliumLoadBalancerIPPool, metadata: {name: x}, spec: \
         {allowFirstLastIPs: Perhaps}}",
    );
    refused(
        "{apiVersion: chainsaw.kyverno.io/v1alpha1, kind: Test, metadata: {name: x}, spec: {}}",
    );
}

#[test]
fn the_kustomization_makes_a_new_run_of_a_new_vip() {
    let folder = tempfile::TempDir::new().expect("a folder");
    for name in ["kustomization.yaml", "daemonset.yaml"] {
        let from = Path::new(DEPLOY).join("kubernetes").join(name);
        fs::copy(from, folder.path().join(name)).expect("a copy");
    }
    let file = folder.path().join("kustomization.yaml");
    let text = fs::read_to_string(&file).expect("a file");
    // The name of the ConfigMap that the init container's variables are of.
    let reference = || {
        let all = documents(&kustomized(folder.path()).expect("it is resolved")).expect("YAML");
        let set = all.iter().find(|one| one["kind"] == "DaemonSet").expect("a DaemonSet");
        let map = all.iter().find(|one| one["kind"] == "ConfigMap").expect("a ConfigMap");
        assert_eq!(set["metadata"]["namespace"], "kube-system");
        let first = &set["spec"]["template"]["spec"]["initContainers"][0];
        let name = first["envFrom"][0]["configMapRef"]["name"].clone();
        assert_eq!(name, map["metadata"]["name"], "the one that is made");
        (name, map["data"]["VIP"].clone())
    };
    let (before, vip) = reference();
    fs::write(&file, text.replace(vip.as_str().expect("text"), "10.9.8.7")).expect("a file");
    let (after, vip) = reference();
    assert_eq!(vip, "10.9.8.7");
    assert_ne!(before, after);
    // And a kustomization that is none is refused.
    fs::write(&file, format!("{text}resource: []\n")).expect("a file");
    let error = kustomized(folder.path()).expect_err("a field that it does not know");
    assert!(error.contains("resource"), "{error}");
}
