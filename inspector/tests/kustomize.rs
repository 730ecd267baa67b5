//! Kustomizations, as `inspect lint` resolves them from files and as Kustomize itself does: of every
//! tree here, both have to make the same Services, announced in the same way. Needs no root, and the
//! `kubectl` that `cargo xtask setup` fetches; fails without.

use std::{
    fs,
    io::Write as _,
    path::Path,
    process::{Command, Stdio},
};

use serde_json::Value;
use tempfile::TempDir;

#[allow(dead_code, reason = "set-up and the tests of deploy/check use the rest")]
#[path = "../../xtask/src/deploy_tools.rs"]
mod deploy_tools;
#[allow(dead_code, reason = "build scripts use the rest")]
#[path = "../../xtask/src/toolchain.rs"]
mod toolchain;

/// The base of every tree: a policy, three Services and what is behind them.
const BASE: &str = "
apiVersion: cilium.io/v2alpha1
kind: CiliumL2AnnouncementPolicy
metadata: {name: lan, labels: {app: net}}
spec: {loadBalancerIPs: true, nodeSelector: {matchExpressions: [{key: pool, operator: In, values: [a, b]}]}}
---
apiVersion: v1
kind: Service
metadata: {name: web, labels: {app: web, tier: front}}
spec: {type: LoadBalancer, externalTrafficPolicy: Local, selector: {app: web}, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: dns, labels: {app: dns}}
spec: {type: LoadBalancer, externalTrafficPolicy: Local, selector: {app: dns}, ports: [{port: 53}]}
---
apiVersion: v1
kind: Service
metadata: {name: api, labels: {app: api, tier: front}}
spec: {type: LoadBalancer, externalTrafficPolicy: Cluster, selector: {app: api}, ports: [{port: 8080}]}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: dns, labels: {app: dns}}
spec:
  selector: {matchLabels: {app: dns}}
  template:
    metadata: {labels: {app: dns}}
    spec:
      nodeSelector: {kubernetes.io/os: linux}
      tolerations: [{operator: Exists}]
      containers: [{name: dns, image: dns}]
";

/// The base under a prefix of its own, by which overlays need not call its objects.
const PREFIXED: &str = "resources: [all.yaml]\nnamePrefix: base-\nnamespace: inner\n";
const PLAIN: &str = "resources: [all.yaml]\n";

/// A tree: its name, the kustomization of its base, of its overlay, and further files.
type Tree = (&'static str, &'static str, &'static str, &'static [(&'static str, &'static str)]);

const TREES: [Tree; 19] = [
    ("nothing", PLAIN, "resources: [../base]\n", &[]),
    (
        "names and labels",
        PLAIN,
        "resources: [../base]\nnamespace: prod\nnamePrefix: p-\nnameSuffix: -s\ncommonLabels: {env: prod}\n",
        &[],
    ),
    (
        "labels that are in no selector",
        PLAIN,
        "resources: [../base]\nlabels: [{pairs: {env: prod}}]\n",
        &[],
    ),
    (
        "labels in selectors",
        PLAIN,
        "resources: [../base]\nlabels: [{pairs: {env: prod}, includeSelectors: true}]\n",
        &[],
    ),
    (
        "labels in templates",
        PLAIN,
        "resources: [../base]\nlabels: [{pairs: {env: prod}, includeTemplates: true}]\n",
        &[],
    ),
    (
        "a patch by the name before the prefix",
        PREFIXED,
        "resources: [../base]\npatches:\n  - patch: |-\n      apiVersion: v1\n      kind: Service\n      metadata: {name: web}\n      spec: {externalTrafficPolicy: Cluster}\n",
        &[],
    ),
    (
        "a target by the name before the prefix",
        PREFIXED,
        "resources: [../base]\nnamePrefix: p-\npatches:\n  - target: {kind: Service, name: web}\n    patch: '[{\"op\":\"replace\",\"path\":\"/spec/externalTrafficPolicy\",\"value\":\"Cluster\"}]'\n",
        &[],
    ),
    (
        "a target by the name behind the prefix",
        PREFIXED,
        "resources: [../base]\npatches:\n  - target: {kind: Service, name: base-web, namespace: inner}\n    path: p.yaml\n",
        &[("overlay/p.yaml", "- {op: remove, path: /spec/externalTrafficPolicy}\n")],
    ),
    (
        "a target of another namespace",
        PREFIXED,
        "resources: [../base]\npatches:\n  - target: {kind: Service, namespace: outer}\n    patch: '[{\"op\":\"remove\",\"path\":\"/spec/externalTrafficPolicy\"}]'\n",
        &[],
    ),
    (
        "a target by labels",
        PLAIN,
        "resources: [../base]\npatches:\n  - target: {kind: Service, labelSelector: 'tier=front,app'}\n    patch: '[{\"op\":\"add\",\"path\":\"/spec/externalTrafficPolicy\",\"value\":\"Local\"}]'\n",
        &[],
    ),
    (
        "a target by group and version",
        PLAIN,
        "resources: [../base]\npatches:\n  - target: {group: cilium.io, version: v2alpha1}\n    patch: '[{\"op\":\"replace\",\"path\":\"/spec/loadBalancerIPs\",\"value\":false},{\"op\":\"add\",\"path\":\"/spec/externalIPs\",\"value\":true}]'\n",
        &[],
    ),
    (
        "an object is taken away",
        PLAIN,
        "resources: [../base]\npatches:\n  - patch: |-\n      $patch: delete\n      apiVersion: v1\n      kind: Service\n      metadata: {name: web}\n",
        &[],
    ),
    (
        "a field is taken away",
        PLAIN,
        "resources: [../base]\npatchesStrategicMerge:\n  - p.yaml\n  - |-\n    apiVersion: v1\n    kind: Service\n    metadata: {name: dns}\n    spec: {externalTrafficPolicy: null}\n",
        &[(
            "overlay/p.yaml",
            "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {type: ClusterIP, externalTrafficPolicy: null}\n",
        )],
    ),
    (
        "JSON patches as they were",
        PLAIN,
        "bases: [../base]\npatchesJson6902:\n  - target: {version: v1, kind: Service, name: web}\n    path: p.json\n",
        &[(
            "overlay/p.json",
            "[\n  {\"op\": \"test\", \"path\": \"/spec/type\", \"value\": \"LoadBalancer\"},\n  {\"op\": \"add\", \"path\": \"/spec/externalIPs\", \"value\": [\"192.168.2.9\"]},\n  {\"op\": \"add\", \"path\": \"/spec/externalIPs/-\", \"value\": \"192.168.2.8\"},\n  {\"op\": \"remove\", \"path\": \"/spec/externalIPs/0\"},\n  {\"op\": \"replace\", \"path\": \"/metadata/labels/app\", \"value\": \"x\"}\n]\n",
        )],
    ),
    (
        "lists are replaced",
        PLAIN,
        "resources: [../base]\npatches:\n  - path: p.yaml\n",
        &[(
            "overlay/p.yaml",
            "apiVersion: cilium.io/v2alpha1\nkind: CiliumL2AnnouncementPolicy\nmetadata: {name: lan}\nspec: {nodeSelector: {matchExpressions: [{key: pool, operator: Exists}]}}\n---\napiVersion: apps/v1\nkind: DaemonSet\nmetadata: {name: dns}\nspec: {template: {spec: {nodeSelector: {pool: a}, tolerations: [{key: x, operator: Exists}]}}}\n",
        )],
    ),
    (
        "components one after the other",
        PLAIN,
        "resources: [../base]\ncomponents: [../one, ../two]\n",
        &[
            (
                "one/kustomization.yaml",
                "apiVersion: kustomize.config.k8s.io/v1alpha1\nkind: Component\nnameSuffix: -one\npatches:\n  - target: {kind: Service}\n    patch: '[{\"op\":\"add\",\"path\":\"/spec/externalTrafficPolicy\",\"value\":\"Cluster\"}]'\n",
            ),
            (
                "two/kustomization.yaml",
                "apiVersion: kustomize.config.k8s.io/v1alpha1\nkind: Component\npatches:\n  - target: {kind: Service, name: web}\n    patch: '[{\"op\":\"add\",\"path\":\"/spec/externalTrafficPolicy\",\"value\":\"Local\"}]'\n",
            ),
        ],
    ),
    (
        "a folder of several layers",
        PLAIN,
        "resources: [../middle, more.yaml]\nnamePrefix: top-\npatches:\n  - target: {kind: Service, name: mid-web}\n    patch: '[{\"op\":\"replace\",\"path\":\"/spec/externalTrafficPolicy\",\"value\":\"Cluster\"}]'\n",
        &[
            ("middle/kustomization.yml", "resources: [../base]\nnamePrefix: mid-\n"),
            (
                "overlay/more.yaml",
                "apiVersion: v1\nkind: List\nitems:\n  - apiVersion: v1\n    kind: Service\n    metadata: {name: listed}\n    spec: {type: LoadBalancer, externalTrafficPolicy: Local, selector: {app: dns}}\n",
            ),
        ],
    ),
    (
        "a patch replaces a mapping",
        PLAIN,
        "resources: [../base]\npatches:\n  - patch: |-\n      apiVersion: v1\n      kind: Service\n      metadata: {name: dns}\n      spec:\n        selector: {$patch: replace, app: web}\n",
        &[],
    ),
    (
        "a patch with a target renames nothing",
        PLAIN,
        "resources: [../base]\npatches:\n  - target: {kind: Service, name: web}\n    patch: |-\n      apiVersion: v1\n      kind: Service\n      metadata: {name: whatever}\n      spec: {externalTrafficPolicy: Cluster}\n",
        &[],
    ),
];

fn lint(arguments: &[&str], folder: &Path, input: Option<&str>) -> Value {
    let mut command = Command::new(env!("CARGO_BIN_EXE_inspect"));
    command.args(["lint", "-o", "json"]).args(arguments).current_dir(folder);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the program runs");
    child.stdin.take().expect("a pipe").write_all(input.unwrap_or("").as_bytes()).expect("it");
    let output = child.wait_with_output().expect("it ends");
    assert!(output.stderr.is_empty(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// What is said of each Service, without where it is written.
fn services(report: &Value) -> Vec<Value> {
    let mut all: Vec<Value> = report["services"].as_array().expect("services").clone();
    for one in &mut all {
        one.as_object_mut().expect("a mapping").remove("location");
    }
    all.sort_by_key(ToString::to_string);
    all
}

#[test]
fn the_files_make_what_kustomize_makes_of_them() {
    let kubectl = deploy_tools::kubectl().expect("HOME");
    assert!(kubectl.is_file(), "{} is missing: run `cargo xtask setup`", kubectl.display());
    let mut seen = std::collections::BTreeSet::new();
    for (name, base, overlay, files) in TREES {
        let folder = TempDir::new().expect("a folder");
        let all = [
            ("base/all.yaml", BASE),
            ("base/kustomization.yaml", base),
            ("overlay/kustomization.yaml", overlay),
        ];
        for (path, text) in all.iter().chain(files) {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("mkdir");
            fs::write(path, text).expect("a file");
        }
        let output = Command::new(&kubectl)
            .args(["kustomize", "overlay"])
            .current_dir(folder.path())
            .output()
            .expect("kubectl");
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        let rendered = String::from_utf8(output.stdout).expect("UTF-8");
        let (files, made) =
            (lint(&["."], folder.path(), None), lint(&["-"], folder.path(), Some(&rendered)));
        assert_eq!(services(&files), services(&made), "{name}: {rendered}");
        assert_eq!(
            (&files["answer"], &files["policies"]),
            (&made["answer"], &made["policies"]),
            "{name}"
        );
        let notes = files["not_judged"].as_array().expect("notes");
        let silent = notes.iter().all(|note| note.to_string().contains("announces nothing"));
        assert!(silent, "{name}: {notes:#?}");
        seen.insert(services(&files).iter().map(ToString::to_string).collect::<Vec<_>>());
    }
    assert!(seen.len() > 12, "the trees are too much alike: {}", seen.len());
}

#[test]
fn what_is_not_resolved_is_said_and_a_patch_of_nothing_too() {
    let folder = TempDir::new().expect("a folder");
    fs::write(folder.path().join("all.yaml"), BASE).expect("a file");
    for (kustomization, word) in [
        ("patches: [{target: {name: 'w.*'}, patch: '[]'}]", "is an expression (w.*)"),
        (
            "patches: [{target: {labelSelector: 'app in (web)'}, patch: '[]'}]",
            "has a labelSelector",
        ),
        ("patches: [{target: {labelSelector: 'app!=web'}, patch: '[]'}]", "has a labelSelector"),
        (
            "patches: [{target: {annotationSelector: 'a=b'}, patch: '[]'}]",
            "has an annotationSelector",
        ),
        ("patches: [{path: gone.yaml}]", "gone.yaml is not among"),
        (
            "patches: [{patch: '{apiVersion: v1, kind: Service, metadata: {name: gone}}'}]",
            "a patch is of Service default/gone, which is not there",
        ),
        ("patches: [{target: {kind: Service}, patch: '[{op: move, path: /a}]'}]", "`move` is not"),
    ] {
        let text = format!("resources: [all.yaml]\n{kustomization}\n");
        fs::write(folder.path().join("kustomization.yaml"), text).expect("a file");
        let report = lint(&["."], folder.path(), None);
        let notes = report["not_judged"].to_string();
        assert!(notes.contains(word), "no `{word}` in {notes}");
    }
}
