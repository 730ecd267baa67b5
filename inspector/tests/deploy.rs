//! What is in `deploy/` and in the pages about it: the `DaemonSet`'s privileges are enough and not too
//! many, the manifests are what the pages say, and the commands of the pages run.
//!
//! Needs root, bpf(2), `setpriv` of util-linux and the programs of netfilter; fails without.

mod netfilter;
mod node;
mod run;

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use inspector::lint::yaml::{self, Node as Yaml};
use minisign::KeyPair;
use nix::mount::{MsFlags, mount};
use node::Node;
use run::{Ran, inspect, run};
use tempfile::TempDir;

fn project(path: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).join(path)
}

fn documents(path: &str) -> Vec<Yaml> {
    let text = fs::read_to_string(project(path)).expect(path);
    let documents = yaml::parse(0, &text).unwrap_or_else(|error| panic!("{path}: {error:?}"));
    documents.into_iter().map(|document| document.root).collect()
}

/// The init container of the `DaemonSet`.
fn container() -> Yaml {
    let set = documents("deploy/kubernetes/daemonset.yaml").remove(0);
    let pod = set.at(&["spec", "template", "spec"]).expect("a pod");
    assert!(pod.get("hostNetwork").is_some_and(Yaml::is_true));
    pod.get("initContainers").expect("init containers").items()[0].clone()
}

/// Capabilities that the manifest adds, in the names of setpriv.
fn capabilities() -> Vec<String> {
    let container = container();
    let all = container.at(&["securityContext", "capabilities"]).expect("capabilities");
    assert_eq!(all.get("drop").expect("drop").items()[0].text(), Some("ALL"));
    let added = all.get("add").expect("add").items();
    added.iter().map(|one| one.text().expect("a name").to_lowercase()).collect()
}

/// What `inspect` says on the node as root with these capabilities alone, and a BPF file system that
/// is mounted read-only.
fn restricted(node: &Node, capabilities: &[String], vip: &str) -> Ran {
    node.0.set_agent_alive().expect("a sign of life");
    let bounding: Vec<String> = capabilities.iter().map(|name| format!(",+{name}")).collect();
    let alone = || {
        let path = node.0.bpffs();
        let read_only = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        mount(Some(path), path, None::<&str>, MsFlags::MS_BIND, None::<&str>)
            .expect("a bind mount");
        mount(None::<&str>, path, None::<&str>, read_only, None::<&str>).expect("read-only");
        fs::create_dir(path.join("x")).expect_err("the BPF file system can be written to");
        let mut command = Command::new("setpriv");
        command
            .args(["--bounding-set", &format!("-all{}", bounding.concat())])
            .args(["--inh-caps", "-all", "--no-new-privs", env!("CARGO_BIN_EXE_inspect")])
            .args(["vip", vip, "-o", "json"]);
        // Where there is no program that lists rules, the privilege to list them is not missed.
        netfilter::with_tools(&mut command, &netfilter::root());
        run(node.0.exec_in(inspector_lab::Ns::Node, &mut command).expect("the node"))
    };
    node.0.run_alone(None, alone).expect("mounts of its own")
}

#[test]
fn the_capabilities_of_the_manifest_are_enough_and_none_is_too_many() {
    let capabilities = capabilities();
    let node = Node::new("v1.21-l7lb");
    let vip = "192.168.2.30";
    let facts = |ran: &Ran| {
        let all = ran.json();
        (all["verdict"].clone(), all["not_measured"].clone())
    };
    let mut command = inspect(["vip", vip, "-o", "json"]);
    netfilter::with_tools(&mut command, &netfilter::root());
    let whole = node.run(&mut command);
    let unknown = whole.json()["not_measured"].to_string();
    assert!(!unknown.contains("TPROXY rules"), "{unknown}");
    assert_eq!(facts(&restricted(&node, &capabilities, vip)), facts(&whole));
    for one in &capabilities {
        let fewer: Vec<String> = capabilities.iter().filter(|name| *name != one).cloned().collect();
        let ran = restricted(&node, &fewer, vip);
        assert!(
            ran.code == Some(3) || facts(&ran) != facts(&whole),
            "the same without {one}: the manifest asks for too much"
        );
    }
}

#[test]
fn the_manifests_hold_what_the_page_says() {
    let container = container();
    let context = container.get("securityContext").expect("a context");
    assert!(context.get("readOnlyRootFilesystem").is_some_and(Yaml::is_true));
    assert!(context.get("privileged").is_none_or(|one| !one.is_true()));
    let mounts = container.get("volumeMounts").expect("mounts").items();
    let paths: BTreeSet<&str> = mounts.iter().filter_map(|one| one.text_of("mountPath")).collect();
    assert_eq!(paths, ["/sys/fs/bpf", "/sys/fs/cgroup", "/var/run/cilium/state"].into());
    assert!(mounts.iter().all(|one| one.get("readOnly").is_some_and(Yaml::is_true)));
    let page = fs::read_to_string(project("docs/kubernetes.md")).expect("the page");
    for name in capabilities() {
        assert!(page.contains(&format!("`{}`", name.to_uppercase())), "{name}");
    }
    for path in paths {
        assert!(page.contains(path), "{path}");
    }
    // The command line is one that the program takes.
    let arguments: Vec<&str> =
        container.get("args").expect("arguments").items().iter().filter_map(Yaml::text).collect();
    let file = project("inspector/tests/evidence/1.0/v1.21-tcx-192.168.2.21.json");
    let file = file.to_str().expect("UTF-8");
    let mut all: Vec<&str> =
        arguments.iter().map(|one| if *one == "$(VIP)" { "192.168.2.21" } else { one }).collect();
    all.extend(["--from", file]);
    let ran = run(&mut inspect(&all));
    assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""), "an init container has to end well");
    assert_eq!(ran.out.lines().count(), 1, "a log is read line by line");
}

#[test]
fn the_twin_of_the_kind_cluster_is_what_lint_flags() {
    let file = project("deploy/kind/workload.yaml");
    let ran = run(&mut inspect(["lint", file.to_str().expect("UTF-8"), "-o", "json"]));
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let findings = ran.json()["findings"].clone();
    assert_eq!(findings.as_array().map(Vec::len), Some(1), "{findings:#}");
    assert_eq!(findings[0]["service"], "default/web-local");
    // And so says the Chainsaw test.
    let test = fs::read_to_string(project("deploy/chainsaw/chainsaw-test.yaml")).expect("it");
    assert!(test.contains("findings[].id): [announced-no-local-backend]"), "{test}");
    documents("deploy/chainsaw/chainsaw-test.yaml");
    documents("deploy/kind/cluster.yaml");
    documents("deploy/kubernetes/kustomization.yaml");
    documents(".github/workflows/kind.yml");
}

/// The blocks of a page in this language, each with its text.
fn blocks(page: &str, language: &str) -> Vec<String> {
    let mut found = Vec::new();
    // The language of the block that is open, and its lines.
    let mut inside: Option<(&str, Vec<&str>)> = None;
    for line in page.lines() {
        match (&mut inside, line.strip_prefix("```")) {
            (None, Some(name)) => inside = Some((name, Vec::new())),
            (Some((name, lines)), Some("")) => {
                if *name == language {
                    found.push(lines.join("\n"));
                }
                inside = None;
            }
            (Some((_, lines)), _) => lines.push(line),
            _ => {}
        }
    }
    assert!(inside.is_none(), "a block does not end");
    found
}

/// Runs a line of a page as a shell would, with what is in `bin` below the folder on the path; `# exit
/// N` behind it is what it ends with.
fn run_line(line: &str, folder: &Path) {
    let (command, exit) = match line.rsplit_once("# exit ") {
        Some((command, code)) => (command, code.trim().parse().expect("an exit code")),
        None => (line, 0),
    };
    let binary = Path::new(env!("CARGO_BIN_EXE_inspect")).parent().expect("a folder");
    let path = std::env::var("PATH").expect("a PATH");
    let output = Command::new("sh")
        .args(["-c", command])
        .current_dir(folder)
        .env("PATH", format!("{}:{}:{path}", folder.join("bin").display(), binary.display()))
        .output()
        .expect("a shell");
    assert_eq!(output.status.code(), Some(exit), "{line}: {output:?}");
    assert!(output.stderr.is_empty(), "{line}: {output:?}");
}

/// A page, of whose blocks each one is run, or said not to be beside it.
fn page(name: &str) -> String {
    let text = fs::read_to_string(project("docs").join(name)).expect(name);
    let said = "not run by the project's tests";
    let mut rest = text.as_str();
    while let Some((_, block)) = rest.split_once("```text\n") {
        let (_, after) = block.split_once("```\n").expect("the end of the block");
        let paragraph = after.trim_start().split("\n\n").next().unwrap_or_default();
        assert!(paragraph.replace('\n', " ").contains(said), "{name}: {paragraph}");
        rest = after;
    }
    assert_eq!(blocks(&text, "").len(), 0, "{name}: a block that nothing runs");
    text
}

/// What the commands of the page on manifests stand in for Helm and `kubectl` with: a chart's Service,
/// and the nodes of a cluster.
const OTHERS: [(&str, &str); 2] = [
    (
        "helm",
        "[ \"$*\" = 'template my-chart' ] && echo '---\n# Source: x/templates/a.yaml\n{apiVersion: v1, \
         kind: Service, metadata: {name: chart}, spec: {type: LoadBalancer, externalTrafficPolicy: Local}}'",
    ),
    (
        "kubectl",
        "[ \"$*\" = 'get nodes -o yaml' ] && echo '{apiVersion: v1, kind: List, items: [{apiVersion: v1, \
         kind: Node, metadata: {name: n1, labels: {kubernetes.io/os: linux}}}]}'",
    ),
];

#[test]
fn the_commands_of_the_page_on_manifests_run() {
    let folder = TempDir::new().expect("a folder");
    let copied = Command::new("cp")
        .arg("-R")
        .arg(format!("{}/.", project("inspector/tests/manifests/homelab").display()))
        .arg(folder.path())
        .status();
    assert!(copied.expect("cp").success());
    fs::create_dir(folder.path().join("bin")).expect("mkdir");
    for (name, script) in OTHERS {
        let file = folder.path().join("bin").join(name);
        run::script(&file, &format!("#!/bin/sh\n{script}\n"));
    }
    let text = page("lint.md");
    let lines = blocks(&text, "sh").join("\n");
    assert!(lines.lines().count() >= 4, "the page has lost its commands");
    for line in lines.lines() {
        run_line(line, folder.path());
    }
    let sarif = fs::read_to_string(folder.path().join("lint.sarif")).expect("a report");
    assert!(sarif.contains("announced-no-local-backend"), "{sarif}");
}

#[test]
fn the_commands_of_the_pages_run() {
    let folder = TempDir::new().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let kept = project("inspector/tests/evidence/1.0/v1.21-tcx-192.168.2.21.json");
    fs::copy(&kept, at("node1.json")).expect("a copy");
    // Another node, and another moment.
    let text = fs::read_to_string(&kept).expect("a kept file");
    let mut other: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    other["host"]["name"] = "another".into();
    fs::write(at("node2.json"), run::sealed(other.clone())).expect("a file");
    other["host"]["kernel"] = "7.0".into();
    fs::write(at("node1-after.json"), run::sealed(other)).expect("a file");
    let both = ["node1.json", "node2.json"].map(|name| fs::read_to_string(at(name)).expect("it"));
    fs::write(at("nodes.jsonl"), both.concat()).expect("a file");
    let pair = KeyPair::generate_unencrypted_keypair().expect("a key pair");
    fs::write(at("minisign.key"), pair.sk.to_box(None).expect("a box").into_string()).expect("it");
    fs::write(at("minisign.pub"), pair.pk.to_box().expect("a box").into_string()).expect("it");
    let mut count = 0;
    for page in ["decision-records.md", "ci.md", "kubernetes.md"] {
        let text = self::page(page);
        for (index, block) in blocks(&text, "yaml").iter().enumerate() {
            assert_eq!(index, 0, "one file for each page");
            fs::write(at("vips.yaml"), block).expect("a file");
        }
        for line in blocks(&text, "sh").iter().flat_map(|block| block.lines()) {
            run_line(line, folder.path());
            count += 1;
        }
    }
    assert!(count >= 12, "the pages have lost their commands: {count}");
    for made in ["record.md", "record.html", "record.svg", "vips.xml", "cluster.json"] {
        assert!(at(made).metadata().is_ok_and(|one| one.len() > 200), "{made}");
    }
}
