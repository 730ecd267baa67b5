//! `inspect lint` on five thousand manifests: the whole process.
//!
//! Run by `cargo xtask bench`. Prints what it measured, and fails if the goal is not met.

use std::{
    fmt::Write as _,
    fs,
    path::Path,
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

const MANIFESTS: usize = 5000;
const RUNS: usize = 11;
const GOAL: Duration = Duration::from_secs(1);

/// A tree as repositories have them: a folder for each application with a kustomization, a
/// Deployment, a Service and what else there is.
fn make(root: &Path) -> usize {
    let policy = "apiVersion: cilium.io/v2alpha1\nkind: CiliumL2AnnouncementPolicy\nmetadata: \
                  {name: lan}\nspec: {loadBalancerIPs: true}\n";
    fs::write(root.join("policy.yaml"), policy).expect("a file");
    let mut count = 1;
    for app in 0.. {
        let folder = root.join(format!("apps/app-{app}"));
        fs::create_dir_all(&folder).expect("a folder");
        let mut environment = String::new();
        for index in 0..20 {
            write!(
                environment,
                "            - name: SETTING_{index}\n              value: \"{index}\"\n"
            )
            .expect("text");
        }
        let policy = if app % 10 == 0 { "Local" } else { "Cluster" };
        let files = [
            (
                "kustomization.yaml",
                format!(
                    "namespace: app-{app}\nresources: [deployment.yaml, service.yaml, config.yaml, account.yaml]\n"
                ),
            ),
            (
                "deployment.yaml",
                format!(
                    "apiVersion: apps/v1\nkind: Deployment\nmetadata:\n  name: app\nspec:\n  \
                     replicas: 2\n  selector:\n    matchLabels: {{app: a{app}}}\n  template:\n    \
                     metadata:\n      labels: {{app: a{app}}}\n    spec:\n      containers:\n        \
                     - name: app\n          image: example.org/app:{app}\n          env:\n{environment}"
                ),
            ),
            (
                "service.yaml",
                format!(
                    "apiVersion: v1\nkind: Service\nmetadata:\n  name: app\nspec:\n  type: \
                     LoadBalancer\n  externalTrafficPolicy: {policy}\n  selector: {{app: a{app}}}\n  \
                     ports:\n    - {{port: 80, targetPort: 8080}}\n"
                ),
            ),
            (
                "config.yaml",
                format!(
                    "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: app\ndata:\n  file: |\n{}",
                    "    a line of a configuration file\n".repeat(40)
                ),
            ),
            (
                "account.yaml",
                "apiVersion: v1\nkind: ServiceAccount\nmetadata:\n  name: app\n".to_owned(),
            ),
        ];
        for (name, text) in files {
            if count == MANIFESTS {
                return count;
            }
            fs::write(folder.join(name), text).expect("a file");
            count += 1;
        }
    }
    count
}

fn main() -> ExitCode {
    // `cargo test --benches` runs this too, to see that it builds.
    if std::env::args().any(|argument| argument == "--test") {
        return ExitCode::SUCCESS;
    }
    let root = tempfile::TempDir::new().expect("a folder");
    let count = make(root.path());
    let mut times: Vec<Duration> = (0..RUNS)
        .map(|_| {
            let start = Instant::now();
            let status = Command::new(env!("CARGO_BIN_EXE_inspect"))
                .args(["lint", "-o", "json", "."])
                .current_dir(root.path())
                .stdout(Stdio::null())
                .status()
                .expect("the program runs");
            assert_eq!(status.code(), Some(1), "one in ten Services breaks the rule");
            start.elapsed()
        })
        .collect();
    times.sort();
    let median = times[RUNS / 2];
    let met = median <= GOAL;
    println!(
        "lint of {count} manifests: {:.0} ms (median of {RUNS}, goal {:.0} ms){}",
        median.as_secs_f64() * 1e3,
        GOAL.as_secs_f64() * 1e3,
        if met { "" } else { ": MISSED" }
    );
    if met { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
