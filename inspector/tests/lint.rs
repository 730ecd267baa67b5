//! `inspect lint` on a tree like the one behind the first story: four Services that may be
//! announced from a node without a backend, one `DaemonSet` that is everywhere. Needs no root.

use std::{
    fmt::Write as _,
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use serde_json::Value;
use tempfile::TempDir;

fn tree() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/manifests/homelab"))
}

/// A copy of the tree that a test may change.
fn copy() -> TempDir {
    fn copy_into(from: &Path, to: &Path) {
        fs::create_dir_all(to).expect("mkdir");
        for entry in fs::read_dir(from).expect("a folder") {
            let entry = entry.expect("an entry");
            let target = to.join(entry.file_name());
            if entry.path().is_dir() {
                copy_into(&entry.path(), &target);
            } else {
                fs::copy(entry.path(), target).expect("a copy");
            }
        }
    }
    let folder = TempDir::new().expect("a folder");
    copy_into(&tree(), folder.path());
    folder
}

fn lint(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_inspect"));
    command.arg("lint").args(arguments).current_dir(folder).stdin(Stdio::null());
    let output = command.output().expect("the program runs");
    assert!(!String::from_utf8_lossy(&output.stderr).contains("panicked"), "{output:?}");
    output
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// The state of each Service, by name.
fn states(report: &Value) -> Vec<(String, String)> {
    let word = |value: &Value| value.as_str().expect("text").to_owned();
    let services = report["services"].as_array().expect("services");
    let mut all: Vec<_> =
        services.iter().map(|one| (word(&one["service"]), word(&one["state"]))).collect();
    all.sort();
    all
}

fn change(path: &Path, from: &str, to: &str) {
    let before = fs::read_to_string(path).expect("a file");
    assert!(before.contains(from), "{} has no `{from}`", path.display());
    fs::write(path, before.replace(from, to)).expect("a file");
}

const FLAGGED: [&str; 4] =
    ["games/minecraft-tcp", "games/minecraft-udp", "gateway/proxy", "monitoring/syslog"];

#[test]
fn four_services_are_flagged_before_the_fix_and_none_after() {
    let folder = copy();
    let output = lint(folder.path(), &["-o", "json", "."]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let report = json(&output);
    let mut found: Vec<_> = report["findings"]
        .as_array()
        .expect("findings")
        .iter()
        .map(|one| {
            assert_eq!(one["id"], "announced-no-local-backend");
            one["service"].as_str().expect("text").to_owned()
        })
        .collect();
    found.sort();
    assert_eq!(found, FLAGGED);
    let state = |name: &str| states(&report).into_iter().find(|one| one.0 == name).expect("it").1;
    assert_eq!(state("dns/resolver"), "good", "the DaemonSet is on every node: {report:#}");
    assert_eq!(state("monitoring/cloud"), "not-announced", "{report:#}");
    // Each names the line of the policy, in the folder where it is.
    let place = &report["findings"][0]["location"];
    assert_eq!((&place["path"], &place["line"]), (&"./games/services.yaml".into(), &10.into()));

    for file in ["games/services.yaml", "gateway/proxy.yaml", "monitoring/syslog.yaml"] {
        change(
            &folder.path().join(file),
            "externalTrafficPolicy: Local",
            "externalTrafficPolicy: Cluster",
        );
    }
    let output = lint(folder.path(), &["-o", "json", "."]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report = json(&output);
    assert_eq!(report["findings"], Value::Array(Vec::new()));
    assert_eq!(state_of(&report, "dns/resolver"), "good");
}

fn state_of(report: &Value, name: &str) -> String {
    states(report).into_iter().find(|one| one.0 == name).expect("it").1
}

#[test]
fn the_exemption_holds_only_where_the_daemonset_is_sure_to_run() {
    let resolver = |from: &str, to: &str, policy: Option<(&str, &str)>| {
        let folder = copy();
        change(&folder.path().join("dns/resolver.yaml"), from, to);
        if let Some((from, to)) = policy {
            change(&folder.path().join("network/l2-policy.yaml"), from, to);
        }
        let output = lint(folder.path(), &["-o", "json", "."]);
        let report = json(&output);
        let services = report["services"].as_array().expect("services");
        let one = services.iter().find(|one| one["service"] == "dns/resolver").expect("it");
        (
            one["state"].as_str().expect("text").to_owned(),
            one["why"].as_str().expect("text").to_owned(),
        )
    };
    let linux = "kubernetes.io/os: linux";
    // Fewer nodes than the policy selects.
    let (state, why) = resolver(linux, "pool: edge", None);
    assert!(state == "flagged" && why.contains("pool=edge"), "{why}");
    // The policy selects the same.
    let edge = "- {key: pool, operator: In, values: [edge]}\n      - key: node-role";
    let (state, why) = resolver(linux, "pool: edge", Some(("- key: node-role", edge)));
    assert!(state == "good", "{why}");
    // The policy lets control-plane nodes announce.
    let all = Some(("operator: DoesNotExist", "operator: Exists"));
    let (state, why) = resolver(linux, linux, all);
    assert!(state == "flagged" && why.contains("control-plane"), "{why}");
    // The DaemonSet tolerates everything.
    let tolerates = "kubernetes.io/os: linux}\n      tolerations: [{operator: Exists}";
    let (state, why) = resolver("kubernetes.io/os: linux}", &format!("{tolerates}]"), all);
    assert!(state == "good", "{why}");
    // Other pods decide where its pods go: not computed, and said.
    let affinity = "kubernetes.io/os: linux}\n      affinity: {podAntiAffinity: \
                    {requiredDuringSchedulingIgnoredDuringExecution: [{topologyKey: zone}]}}";
    let (state, why) = resolver("kubernetes.io/os: linux}", affinity, None);
    assert!(state == "flagged" && why.contains("podAntiAffinity"), "{why}");
    // Another namespace than the Service's.
    let (state, why) = resolver(
        "name: resolver, namespace: dns}\nspec:\n  selector",
        "name: resolver, namespace: other}\nspec:\n  selector",
        None,
    );
    assert!(state == "flagged" && why.contains("no workload"), "{why}");
}

#[test]
fn nodes_in_the_tree_are_held_against_one_by_one() {
    let folder = copy();
    let nodes = folder.path().join("nodes.yaml");
    let list = |extra: &str| {
        format!(
            "apiVersion: v1\nkind: NodeList\nitems:\n  - apiVersion: v1\n    kind: Node\n    \
             metadata: {{name: n1, labels: {{kubernetes.io/os: linux}}}}\n  - apiVersion: v1\n    \
             kind: Node\n    metadata: {{name: n2, labels: {{kubernetes.io/os: linux}}}}\n{extra}"
        )
    };
    fs::write(&nodes, list("")).expect("a file");
    let report = json(&lint(folder.path(), &["-o", "json", "."]));
    assert_eq!(state_of(&report, "dns/resolver"), "good", "{report:#}");
    fs::write(&nodes, list("    spec: {taints: [{key: gpu, effect: NoSchedule}]}\n"))
        .expect("a file");
    let report = json(&lint(folder.path(), &["-o", "json", "."]));
    assert_eq!(state_of(&report, "dns/resolver"), "flagged", "{report:#}");
    let said = serde_json::to_string(&report).expect("JSON");
    assert!(said.contains("taint gpu of node n2"), "{said}");
}

#[test]
fn nothing_to_hold_against_the_rule_is_no_pass() {
    let folder = copy();
    for (remove, says) in [
        ("network", "no CiliumL2AnnouncementPolicy that announces"),
        ("games", ""),
        ("gateway", ""),
        ("dns", ""),
        ("monitoring", "neither a Service"),
    ] {
        fs::remove_dir_all(folder.path().join(remove)).expect("removed");
        let output = lint(folder.path(), &["."]);
        assert_eq!(output.status.code(), Some(3), "{output:?}");
        assert!(text(&output.stdout).contains(says), "{output:?}");
    }
    // A policy alone, and one that announces nothing.
    let folder = copy();
    let output = lint(folder.path(), &["network"]);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    assert!(text(&output.stdout).contains("no Service of type LoadBalancer"), "{output:?}");
    let policy = folder.path().join("network/l2-policy.yaml");
    change(&policy, "loadBalancerIPs: true", "loadBalancerIPs: false");
    let output = lint(folder.path(), &["."]);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    assert!(text(&output.stdout).contains("policy lan announces nothing"), "{output:?}");
}

#[test]
fn malformed_yaml_names_file_and_line() {
    let folder = copy();
    fs::write(folder.path().join("broken.yaml"), "a: 1\nb: [1, 2\nc: 3\n").expect("a file");
    let output = lint(folder.path(), &["."]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert_eq!(text(&output.stdout), "", "{output:?}");
    assert!(text(&output.stderr).starts_with("inspect: ./broken.yaml:3: column"), "{output:?}");
    // Each such file is named.
    fs::write(folder.path().join("twice.yaml"), "kind: A\napiVersion: v1\nkind: B\n").expect("it");
    let output = lint(folder.path(), &["."]);
    assert_eq!(text(&output.stderr).lines().count(), 2, "{output:?}");
    assert!(text(&output.stderr).contains("./twice.yaml:3: the key `kind`"), "{output:?}");
    fs::write(folder.path().join("latin.yaml"), b"a: 1\nb: \xe9\n").expect("a file");
    let output = lint(folder.path(), &["latin.yaml"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(text(&output.stderr).contains("latin.yaml:2: the file is not UTF-8"), "{output:?}");
    let output = lint(folder.path(), &["gone"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(text(&output.stderr).contains("cannot read gone"), "{output:?}");
}

/// Every shape of what is no manifest: each file is named with the line where it goes wrong, and there
/// is no answer.
#[test]
fn whatever_is_wrong_with_a_file_its_line_is_named() {
    let service = fs::read_to_string(tree().join("games/services.yaml")).expect("a file");
    let lines = service.lines().count();
    let nested = format!("{}x{}\n", "[".repeat(200), "]".repeat(200));
    let aliases = {
        let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
        for level in 1..12 {
            let before = vec![format!("*a{}", level - 1); 10].join(", ");
            writeln!(text, "a{level}: &a{level} [{before}]").expect("text");
        }
        text
    };
    let wide: Vec<u8> = "\u{feff}kind: A\n".encode_utf16().flat_map(u16::to_le_bytes).collect();
    let cases: [(&str, Vec<u8>, usize, &str); 15] = [
        ("tab", b"a:\n  b: 1\n\tc: 2\n".to_vec(), 3, "tab"),
        ("quote", b"a: 1\nb: \"x\nc: 2\n".to_vec(), 2, "quote"),
        ("single-quote", b"a: 1\nb: 'x\nc: 2\n".to_vec(), 2, "quote"),
        ("bracket", b"a: 1\nb: [1, 2\nc: 3\n".to_vec(), 3, ""),
        ("indent", b"a:\n    b: 1\n  c: 2\n".to_vec(), 3, ""),
        ("colon", b"a: 1\nb: c: d\n".to_vec(), 2, ""),
        (
            "twice",
            b"apiVersion: v1\nkind: A\nmetadata:\n  name: x\n  name: y\n".to_vec(),
            5,
            "`name`",
        ),
        ("twice-crlf", b"apiVersion: v1\r\nkind: A\r\nkind: B\r\n".to_vec(), 3, "`kind`"),
        ("alias", b"a: 1\nb: *nothing\n".to_vec(), 2, ""),
        ("aliases", aliases.into_bytes(), 0, "aliases"),
        ("nested", nested.into_bytes(), 1, ""),
        ("latin", b"a: 1\nb: \xe9\n".to_vec(), 2, "not UTF-8"),
        ("wide", wide, 1, "UTF-16"),
        ("binary", (0..=255).cycle().take(4096).collect(), 2, "not UTF-8"),
        ("nul", b"a: 1\nb: \0\0\n".to_vec(), 2, ""),
    ];
    for (name, content, line, word) in &cases {
        let folder = copy();
        let file = folder.path().join(format!("{name}.yaml"));
        fs::write(&file, content).expect("a file");
        // Below many lines that are right, in a document of its own.
        if content.is_ascii() && *name != "binary" {
            let mut text = service.clone().into_bytes();
            text.extend(b"---\n");
            text.extend(content);
            fs::write(folder.path().join(format!("{name}-below.yaml")), text).expect("a file");
        }
        let output = lint(folder.path(), &["."]);
        assert_eq!(output.status.code(), Some(2), "{name}: {output:?}");
        assert_eq!(text(&output.stdout), "", "{name}: {output:?}");
        let said = text(&output.stderr);
        let place = |suffix: &str| {
            let start = format!("inspect: ./{name}{suffix}.yaml:");
            let row = said.lines().find_map(|row| row.strip_prefix(&start));
            let row = row.unwrap_or_else(|| panic!("{name}{suffix} is not named: {said}"));
            let (number, reason) = row.split_once(':').expect("a line");
            assert!(reason.contains(word), "{name}: {reason}");
            number.parse::<usize>().expect("a number")
        };
        let found = place("");
        assert!(found >= 1 && (*line == 0 || found == *line), "{name}: line {found}: {said}");
        if content.is_ascii() && *name != "binary" {
            assert_eq!(place("-below"), found + lines + 1, "{name}: {said}");
        }
    }
}

#[test]
fn what_only_looks_odd_is_read() {
    // A byte order mark, lines that end as Windows has them, and comments that are no text of ours.
    let folder = copy();
    for file in ["games/services.yaml", "gateway/proxy.yaml", "monitoring/syslog.yaml"] {
        let path = folder.path().join(file);
        let before = fs::read_to_string(&path).expect("a file").replace('\n', "\r\n");
        fs::write(&path, format!("\u{feff}# \u{1f6a2}\r\n{before}")).expect("a file");
    }
    let report = json(&lint(folder.path(), &["-o", "json", "."]));
    let findings = report["findings"].as_array().expect("findings");
    assert_eq!(findings.len(), 4, "{report:#}");
    assert_eq!(findings[0]["location"]["line"], 11, "one line further down: {report:#}");
    // A file of 50 MB: one manifest that is one long text, and a mapping with fifty thousand members.
    let mut text = String::from("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: big}\ndata:\n");
    for index in 0..50_000 {
        writeln!(text, "  key-{index}: value").expect("text");
    }
    text.push_str("  text: |\n");
    text.push_str(&"    a line of a configuration file, of which there are many\n".repeat(850_000));
    assert!(text.len() > 50_000_000);
    fs::write(folder.path().join("big.yaml"), text).expect("a file");
    let report = json(&lint(folder.path(), &["-o", "json", "."]));
    assert_eq!(report["findings"].as_array().map(Vec::len), Some(4));
    // A kustomization that is its own base ends, and is said.
    let circle = folder.path().join("circle");
    fs::create_dir(&circle).expect("mkdir");
    fs::write(circle.join("kustomization.yaml"), "resources: [../circle]\n").expect("a file");
    let report = json(&lint(folder.path(), &["-o", "json", "."]));
    let said = report["not_judged"].to_string();
    assert!(said.contains("circle/ is used only by itself"), "{said}");
}

#[test]
fn what_helm_prints_around_the_manifests_is_no_manifest() {
    let folder = copy();
    let rendered = "NAME: x\nLAST DEPLOYED: Mon Jan  1 00:00:00 2024\nSTATUS: pending-install\nHOOKS:\n\
                    MANIFEST:\n---\n# Source: x/templates/service.yaml\napiVersion: v1\nkind: Service\n\
                    metadata: {name: late}\nspec: {type: LoadBalancer, externalTrafficPolicy: Local}\n\n\
                    NOTES:\n1. Get the URL by running:\n  export IP=$(kubectl get svc late -o jsonpath=\"{.status\n\
                    2. It's at: http://$IP:80, {not yaml\n";
    fs::write(folder.path().join("rendered.yaml"), rendered).expect("a file");
    let report = json(&lint(folder.path(), &["-o", "json", "network", "rendered.yaml"]));
    assert_eq!(report["findings"][0]["service"], "default/late", "{report:#}");
    // What is wrong above the notes is.
    let broken = rendered.replace("{name: late}", "{name: late");
    fs::write(folder.path().join("rendered.yaml"), broken).expect("a file");
    let output = lint(folder.path(), &["network", "rendered.yaml"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(text(&output.stderr).starts_with("inspect: rendered.yaml:1"), "{output:?}");
}

/// The Services of a tree by their state: two policies, one of nothing but externalIPs.
#[test]
fn services_of_every_kind_are_paired_as_cilium_pairs_them() {
    let folder = tree().join("../pairing");
    let report = json(&lint(&folder, &["-o", "json", "."]));
    let expected = [
        ("default/l2-class", "flagged"),
        ("default/other-class", "not-announced"),
        ("default/outside", "flagged"),
        ("default/set", "good"),
        // By the second policy it is announced from every node, the storage nodes among them.
        ("default/set-with-outside", "flagged"),
        ("default/wants", "flagged"),
        ("quiet/outside", "not-announced"),
    ];
    let expected = expected.map(|(name, state)| (name.to_owned(), state.to_owned()));
    assert_eq!(states(&report), expected, "{report:#}");
    let of = |name: &str| {
        let services = report["services"].as_array().expect("services");
        services.iter().find(|one| one["service"] == name).expect("it").clone()
    };
    let addresses = of("default/wants")["addresses"].to_string();
    for word in [
        "fd00:10::1 (asked for)",
        "192.168.2.201 (asked for)",
        "fd00:10::/112",
        "192.168.2.200 to 192.168.2.210",
    ] {
        assert!(addresses.contains(word), "{addresses}");
    }
    let why = of("default/other-class")["why"].to_string();
    assert!(why.contains("example.org/cloud is not that of the L2 announcer"), "{why}");
}

#[test]
fn templates_are_said_and_not_guessed_and_rendered_ones_are_read_from_standard_input() {
    let folder = copy();
    let chart = folder.path().join("chart/templates");
    fs::create_dir_all(&chart).expect("mkdir");
    fs::write(folder.path().join("chart/Chart.yaml"), "apiVersion: v2\nname: x\n").expect("it");
    let template = "{{- if .Values.lb }}\napiVersion: v1\nkind: Service\nmetadata: {name: {{ .Release.Name }}}\n{{- end }}\n";
    fs::write(chart.join("service.yaml"), template).expect("a file");
    let report = json(&lint(folder.path(), &["-o", "json", "."]));
    let said = report["not_judged"].to_string();
    assert!(said.contains("chart/templates/service.yaml: a template"), "{said}");

    let rendered = "---\n# Source: x/templates/service.yaml\napiVersion: v1\nkind: \
                    Service\nmetadata: {name: late}\nspec: {type: LoadBalancer, \
                    externalTrafficPolicy: Local}\n";
    let mut child = Command::new(env!("CARGO_BIN_EXE_inspect"))
        .args(["lint", "network", "-", "-o", "json"])
        .current_dir(folder.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program runs");
    child.stdin.take().expect("a pipe").write_all(rendered.as_bytes()).expect("it reads");
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let report = json(&output);
    assert_eq!(report["findings"][0]["service"], "default/late");
    assert_eq!(report["findings"][0]["location"]["path"], "(standard input)");
}

#[test]
fn a_policy_that_is_not_rendered_is_not_guessed() {
    let folder = copy();
    for file in ["games/services.yaml", "gateway/proxy.yaml", "monitoring/syslog.yaml"] {
        change(
            &folder.path().join(file),
            "externalTrafficPolicy: Local",
            "externalTrafficPolicy: ${POLICY}",
        );
    }
    let output = lint(folder.path(), &["."]);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    assert!(text(&output.stdout).contains("not rendered"), "{output:?}");
}

/// Every form says the same of the same tree.
#[test]
fn every_form_names_the_same_services() {
    let folder = tree();
    for form in ["table", "json", "markdown", "junit", "sarif", "github"] {
        let output = lint(&folder, &["-o", form, "."]);
        assert_eq!(output.status.code(), Some(1), "{form}: {output:?}");
        let shown = text(&output.stdout).replace('\\', "");
        for name in FLAGGED {
            assert!(shown.contains(name), "{form} does not name {name}: {shown}");
        }
        assert!(shown.contains("announced-no-local-backend"), "{form}: {shown}");
        assert!(shown.contains("games/services.yaml"), "{form}: {shown}");
    }
}

#[test]
fn junit_and_sarif_are_what_readers_of_them_take() {
    let output = lint(&tree(), &["-o", "junit", "."]);
    let document = roxmltree::Document::parse(text(&output.stdout)).expect("XML");
    let root = document.root_element();
    let failed: Vec<_> = document
        .descendants()
        .filter(|node| node.has_tag_name("failure"))
        .filter_map(|node| node.parent()?.attribute("name"))
        .collect();
    assert_eq!(root.attribute("failures"), Some("4"));
    assert_eq!(failed.len(), 4, "{failed:?}");
    let cases = document.descendants().filter(|node| node.has_tag_name("testcase")).count();
    assert_eq!(root.attribute("tests"), Some(cases.to_string().as_str()));

    let report = json(&lint(&tree(), &["-o", "sarif", "."]));
    let run = &report["runs"][0];
    assert_eq!(
        (&report["version"], &run["tool"]["driver"]["name"]),
        (&"2.1.0".into(), &"inspect".into())
    );
    let results = run["results"].as_array().expect("results");
    assert_eq!(results.len(), 4);
    for result in results {
        let place = &result["locations"][0]["physicalLocation"];
        let file = place["artifactLocation"]["uri"].as_str().expect("a path");
        let line = place["region"]["startLine"].as_u64().expect("a line");
        let content = fs::read_to_string(tree().join(file)).expect("the file");
        let row = content.lines().nth(usize::try_from(line).expect("a line") - 1).expect("a line");
        assert!(row.contains("externalTrafficPolicy: Local"), "{file}:{line}: {row}");
    }
}

#[test]
fn what_is_asked_in_vain_is_refused() {
    let output = lint(&tree(), &["--from", "x.json", "."]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let output = Command::new(env!("CARGO_BIN_EXE_inspect"))
        .args(["doctor", "-o", "sarif"])
        .output()
        .expect("the program runs");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(text(&output.stderr).contains("use one of table, json, markdown"), "{output:?}");
}
