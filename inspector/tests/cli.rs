//! What the program says of itself: help, completions, the manual page.

use std::process::Command;

fn inspect(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_inspect"))
        .args(arguments)
        .output()
        .expect("the program runs");
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// The commands that the design and the README name.
const COMMANDS: [&str; 11] = [
    "vip",
    "trace",
    "service",
    "lb",
    "datapath",
    "evidence",
    "lint",
    "check",
    "doctor",
    "completions",
    "man",
];

#[test]
fn help_names_every_command_and_the_exit_codes() {
    let help = inspect(&["--help"]);
    for command in COMMANDS {
        let row = format!("\n  {command} ");
        assert!(help.contains(&row), "no {command} in {help}");
    }
    assert!(help.contains("Exit codes: 0") && help.contains("3 cannot be"), "{help}");
}

#[test]
fn completions_are_made_for_every_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = inspect(&["completions", shell]);
        for word in ["vip", "--expect", "--source-ranges"] {
            assert!(script.contains(word.trim_start_matches('-')), "{shell}: no {word}");
        }
    }
}

#[test]
fn the_bash_completion_is_a_script_that_bash_takes() {
    let script = inspect(&["completions", "bash"]);
    let status = Command::new("bash").args(["-n", "-c", &script]).status().expect("bash");
    assert!(status.success());
}

#[test]
fn the_manual_page_has_a_section_for_each_command() {
    let page = inspect(&["man"]);
    assert!(page.contains(".TH inspect 1"), "{page}");
    for section in ["INSPECT VIP", "INSPECT LB LIST", "INSPECT SERVICE LIST", "INSPECT DATAPATH"] {
        assert!(page.contains(&format!(".SH {section}\n")), "no {section}");
    }
}
