//! Rules that hand marked packets to a local proxy (`TPROXY`).
//!
//! Netfilter has three stores for them: the tables of iptables (legacy), rules of iptables in
//! nftables, which `nft` shows without their parameters, and rules of nftables itself. Each is read
//! with the tool that knows it. A tool is asked only where that makes the kernel load nothing, and
//! only rules that a packet reaches from `PREROUTING` count.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
};

use serde_json::Value;

use super::tool::{self, Tool, ToolError};
use crate::evidence::{SourceStatus, network::Tproxy};

/// What is known of the rules.
#[derive(Debug)]
pub struct Found {
    /// The rules.
    pub rules: Vec<Tproxy>,
    /// How far they were read.
    pub status: SourceStatus,
    /// Why not completely.
    pub reason: Option<String>,
}

/// Reads the rules of this thread's network namespace.
pub fn read() -> Found {
    let mut wanted: Vec<(&[&str], &[&str], Parser)> = Vec::new();
    if has_nftables() {
        // A system without the first has one kind of iptables only, which then is this.
        wanted.push((&["iptables-nft-save", "iptables-save"], &[], |text| Ok(saved(text, false))));
        wanted.push((&["ip6tables-nft-save", "ip6tables-save"], &[], |text| Ok(saved(text, true))));
        wanted.push((&["nft"], &["-j", "list", "ruleset"], ruleset));
    }
    let legacy: [(&str, &[&str], Parser); 2] = [
        ("ip_tables_names", &["iptables-legacy-save", "iptables-save"], |text| {
            Ok(saved(text, false))
        }),
        ("ip6_tables_names", &["ip6tables-legacy-save", "ip6tables-save"], |text| {
            Ok(saved(text, true))
        }),
    ];
    for (names, tools, parser) in legacy {
        match has_legacy_table(names) {
            Ok(true) => wanted.push((tools, &[], parser)),
            Ok(false) => {}
            Err(error) => {
                return Found {
                    rules: Vec::new(),
                    status: SourceStatus::Failed,
                    reason: Some(format!("cannot read /proc/thread-self/net/{names}: {error}")),
                };
            }
        }
    }
    run(&wanted)
}

type Parser = fn(&str) -> Result<Vec<Tproxy>, String>;

/// Starts the tools (of each row the first that is there) and reads what they say.
fn run(wanted: &[(&[&str], &[&str], Parser)]) -> Found {
    let mut running = Vec::new();
    let (mut absent, mut failed) = (Vec::new(), Vec::new());
    for &(names, arguments, parser) in wanted {
        match names.iter().find_map(|name| tool::find(name)) {
            Some(program) => running.push((Tool::start(&program, arguments), parser)),
            None => absent.push(names[0]),
        }
    }
    let mut rules = Vec::new();
    let mut read = 0;
    for (tool, parser) in running {
        let result = tool
            .and_then(Tool::output)
            .map_err(|error: ToolError| error.to_string())
            .and_then(|text| parser(&text));
        match result {
            Ok(more) => {
                read += 1;
                rules.extend(more);
            }
            Err(error) => failed.push(error),
        }
    }
    let mut seen = Vec::new();
    rules.retain(|rule| {
        let is_new = !seen.contains(rule);
        seen.push(rule.clone());
        is_new
    });
    let mut reasons = failed.clone();
    if !absent.is_empty() {
        reasons.push(format!("not installed: {}", absent.join(", ")));
    }
    let status = match (reasons.is_empty(), read, failed.is_empty()) {
        (true, ..) => SourceStatus::Complete,
        (false, 0, true) => SourceStatus::Absent,
        (false, 0, false) => SourceStatus::Failed,
        _ => SourceStatus::Partial,
    };
    Found { rules, status, reason: (!reasons.is_empty()).then(|| reasons.join("; ")) }
}

/// Whether there are tables of iptables (legacy) in which a TPROXY rule could be.
fn has_legacy_table(names: &str) -> io::Result<bool> {
    match fs::read_to_string(format!("/proc/thread-self/net/{names}")) {
        Ok(text) => Ok(text.lines().any(|name| name == "mangle")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether the kernel has nftables at work: asking would otherwise make it load them, and there are
/// no rules in what is not loaded.
fn has_nftables() -> bool {
    // A kernel without modules has everything or nothing, and loads nothing.
    let Ok(modules) = fs::read_to_string("/proc/modules") else { return true };
    let loaded = modules.lines().any(|line| line.split(' ').next() == Some("nf_tables"));
    loaded || {
        let release = crate::sys::host::kernel_release();
        fs::read_to_string(format!("/lib/modules/{release}/modules.builtin"))
            .is_ok_and(|list| list.lines().any(|line| line.ends_with("/nf_tables.ko")))
    }
}

/// The chains that packets reach from where they start, by the chains that each goes on to.
fn reached(
    starts: impl IntoIterator<Item = String>,
    jumps: &BTreeMap<String, Vec<String>>,
) -> BTreeSet<String> {
    let mut reached = BTreeSet::new();
    let mut next: Vec<_> = starts.into_iter().collect();
    while let Some(chain) = next.pop() {
        if reached.insert(chain.clone()) {
            next.extend(jumps.get(&chain).into_iter().flatten().cloned());
        }
    }
    reached
}

/// Reads what `iptables-save` prints.
fn saved(text: &str, ipv6: bool) -> Vec<Tproxy> {
    let mut table = "";
    let mut jumps: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut rules = Vec::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix('*') {
            table = name;
        }
        if table != "mangle" {
            continue;
        }
        let words = words(line);
        let after = |option: &str| {
            let at = words.iter().position(|word| word == option)?;
            // A condition that is turned round is none that this rule has.
            let negated = at > 0 && words[at - 1] == "!";
            words.get(at + 1).filter(|_| !negated).map(String::as_str)
        };
        let (Some(chain), Some(target)) = (after("-A"), after("-j").or_else(|| after("-g"))) else {
            continue;
        };
        if target != "TPROXY" {
            jumps.entry(chain.to_owned()).or_default().push(target.to_owned());
            continue;
        }
        let Some(port) = after("--on-port").and_then(|port| port.parse().ok()) else { continue };
        // A rule with a mark that cannot be told must not pass for one without.
        let has_mark = words.iter().any(|word| word == "--mark");
        let mark = after("--mark").and_then(mark);
        if has_mark && mark.is_none() {
            continue;
        }
        let protocol = after("-p").map(ToOwned::to_owned);
        rules.push((
            chain.to_owned(),
            Tproxy { mark: mark.unwrap_or_default(), port, protocol, ipv6 },
        ));
    }
    let reached = reached(["PREROUTING".to_owned()], &jumps);
    rules.into_iter().filter(|(chain, _)| reached.contains(chain)).map(|(_, rule)| rule).collect()
}

/// `0x26350200` or `0x200/0xf00`; the mask is all bits where there is none.
fn mark(text: &str) -> Option<(u32, u32)> {
    let number = |text: &str| match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    };
    match text.split_once('/') {
        Some((value, mask)) => Some((number(value)?, number(mask)?)),
        None => Some((number(text)?, u32::MAX)),
    }
}

/// Splits a line as a shell would, for the quotes that `iptables-save` writes.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut word) = (Vec::new(), None::<String>);
    let mut quoted = false;
    let mut characters = line.chars();
    while let Some(character) = characters.next() {
        match character {
            '"' => {
                quoted = !quoted;
                word.get_or_insert_default();
            }
            '\\' if quoted => word.get_or_insert_default().extend(characters.next()),
            ' ' if !quoted => words.extend(word.take()),
            _ => word.get_or_insert_default().push(character),
        }
    }
    words.extend(word);
    words
}

/// Reads what `nft -j list ruleset` prints (libnftables-json(5)).
fn ruleset(text: &str) -> Result<Vec<Tproxy>, String> {
    let document: Value = serde_json::from_str(text)
        .map_err(|error| format!("nft's JSON cannot be read: {error}"))?;
    let objects = document["nftables"].as_array().ok_or("nft's JSON has no `nftables`")?;
    let chain_of = |object: &Value, name: &Value| {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        format!("{} {} {}", text(&object["family"]), text(&object["table"]), text(name))
    };
    let starts = objects
        .iter()
        .map(|object| &object["chain"])
        .filter(|chain| chain["hook"] == "prerouting")
        .map(|chain| chain_of(chain, &chain["name"]));
    let mut jumps: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut rules = Vec::new();
    for rule in objects.iter().map(|object| &object["rule"]) {
        let Some(expressions) = rule["expr"].as_array() else { continue };
        let chain = chain_of(rule, &rule["chain"]);
        for expression in expressions {
            for verdict in ["jump", "goto"] {
                let target = &expression[verdict]["target"];
                if target.is_string() {
                    jumps.entry(chain.clone()).or_default().push(chain_of(rule, target));
                }
            }
            let tproxy = &expression["tproxy"];
            let port = tproxy["port"].as_u64().and_then(|port| port.try_into().ok());
            let (Some(port), Some(conditions)) = (port, conditions(expressions)) else { continue };
            let family = tproxy["family"].as_str().or(rule["family"].as_str()).unwrap_or_default();
            let families: &[bool] = match family {
                "ip" => &[false],
                "ip6" => &[true],
                _ => &[false, true],
            };
            for &ipv6 in families {
                let (mark, protocol) = conditions.clone();
                rules.push((chain.clone(), Tproxy { mark, port, protocol, ipv6 }));
            }
        }
    }
    let reached = reached(starts, &jumps);
    Ok(rules
        .into_iter()
        .filter(|(chain, _)| reached.contains(chain))
        .map(|(_, rule)| rule)
        .collect())
}

/// Mark and protocol that a rule of nftables matches; nothing if it has a condition on the mark
/// that is no plain comparison.
fn conditions(expressions: &[Value]) -> Option<((u32, u32), Option<String>)> {
    let (mut mark, mut protocol) = ((0, 0), None);
    let is_mark = |value: &Value| value["meta"]["key"] == "mark";
    for test in expressions.iter().map(|expression| &expression["match"]) {
        let (left, right) = (&test["left"], &test["right"]);
        let masked = &left["&"];
        let number = |value: &Value| value.as_u64().and_then(|number| number.try_into().ok());
        if is_mark(left) || is_mark(&masked[0]) {
            let bits = if masked.is_null() { u32::MAX } else { number(&masked[1])? };
            mark = (number(right).filter(|_| test["op"] == "==")?, bits);
        } else if left["meta"]["key"] == "l4proto" && test["op"] == "==" {
            protocol = right.as_str().map(ToOwned::to_owned);
        }
    }
    Some((mark, protocol))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `iptables-nft-save` 1.8.9 prints Cilium's rules (Cilium 1.18 with a proxy on port 13606,
    /// and one on 10042 for TCP alone).
    const SAVED: &str = r#"# Generated by iptables-save v1.8.9 (nf_tables)
*raw
:CILIUM_PRE_raw - [0:0]
-A CILIUM_PRE_raw -m mark --mark 0x200/0xf00 -m comment --comment "cilium: NOTRACK for proxy traffic" -j CT --notrack
COMMIT
*mangle
:PREROUTING ACCEPT [235:17290]
:CILIUM_PRE_mangle - [0:0]
:OLD_CILIUM_PRE_mangle - [0:0]
-A PREROUTING -m comment --comment "cilium-feeder: CILIUM_PRE_mangle" -j CILIUM_PRE_mangle
-A CILIUM_PRE_mangle ! -o lo -m socket --transparent -m mark ! --mark 0xe00/0xf00 -m mark ! --mark 0x800/0xf00 -m comment --comment "cilium: any->pod redirect proxied traffic to host proxy" -j MARK --set-xmark 0x200/0xffffffff
-A CILIUM_PRE_mangle -p tcp -m mark --mark 0x26350200 -m comment --comment "cilium: TPROXY to host cilium-envoy proxy" -j TPROXY --on-port 13606 --on-ip 127.0.0.1 --tproxy-mark 0x200/0xffffffff
-A CILIUM_PRE_mangle -p udp -m mark --mark 0x26350200 -m comment --comment "a \"quoted\" -j DROP" -j TPROXY --on-port 13606 --on-ip 127.0.0.1 --tproxy-mark 0x200/0xffffffff
-A CILIUM_PRE_mangle -p tcp -m mark --mark 0x200/0xf00 -j TPROXY --on-port 10042 --on-ip 127.0.0.1 --tproxy-mark 0x200/0xffffffff
-A CILIUM_PRE_mangle -p tcp -m mark ! --mark 0x200/0xf00 -j TPROXY --on-port 1 --on-ip 127.0.0.1 --tproxy-mark 0x200/0xffffffff
-A OLD_CILIUM_PRE_mangle -p tcp -m mark --mark 0x26350200 -j TPROXY --on-port 2 --on-ip 127.0.0.1 --tproxy-mark 0x200/0xffffffff
COMMIT
*nat
-A PREROUTING -j TPROXY --on-port 3
COMMIT
"#;

    fn rule(mark: (u32, u32), port: u16, protocol: &str, ipv6: bool) -> Tproxy {
        Tproxy { mark, port, protocol: Some(protocol.to_owned()), ipv6 }
    }

    #[test]
    fn rules_of_iptables_are_read() {
        let expected = [
            rule((0x2635_0200, u32::MAX), 13606, "tcp", true),
            rule((0x2635_0200, u32::MAX), 13606, "udp", true),
            rule((0x200, 0xf00), 10042, "tcp", true),
        ];
        assert_eq!(saved(SAVED, true), expected);
        // The counter-test: without the jump nothing reaches the chain.
        let lines: Vec<_> = SAVED.lines().filter(|line| !line.contains("feeder")).collect();
        assert_eq!(saved(&lines.join("\n"), true), []);
    }

    /// As `nft -j list ruleset` 1.0.6 prints it.
    const RULESET: &str = r#"{"nftables": [
        {"metainfo": {"version": "1.0.6", "release_name": "Lester Gooch #5", "json_schema_version": 1}},
        {"table": {"family": "inet", "name": "t", "handle": 1}},
        {"chain": {"family": "inet", "table": "t", "name": "pre", "handle": 1, "type": "filter", "hook": "prerouting", "prio": -150, "policy": "accept"}},
        {"chain": {"family": "inet", "table": "t", "name": "proxy", "handle": 2}},
        {"chain": {"family": "inet", "table": "t", "name": "unused", "handle": 3}},
        {"rule": {"family": "inet", "table": "t", "chain": "pre", "handle": 4, "expr": [{"jump": {"target": "proxy"}}]}},
        {"rule": {"family": "inet", "table": "t", "chain": "proxy", "handle": 5, "expr": [{"match": {"op": "==", "left": {"meta": {"key": "l4proto"}}, "right": "tcp"}}, {"match": {"op": "==", "left": {"meta": {"key": "mark"}}, "right": 641008128}}, {"tproxy": {"family": "ip", "addr": "127.0.0.1", "port": 13606}}]}},
        {"rule": {"family": "inet", "table": "t", "chain": "proxy", "handle": 6, "expr": [{"match": {"op": "==", "left": {"&": [{"meta": {"key": "mark"}}, 3840]}, "right": 512}}, {"match": {"op": "==", "left": {"meta": {"key": "l4proto"}}, "right": "udp"}}, {"tproxy": {"port": 10042}}]}},
        {"rule": {"family": "inet", "table": "t", "chain": "proxy", "handle": 7, "expr": [{"match": {"op": "!=", "left": {"meta": {"key": "mark"}}, "right": 512}}, {"tproxy": {"port": 1}}]}},
        {"rule": {"family": "inet", "table": "t", "chain": "unused", "handle": 8, "expr": [{"tproxy": {"port": 2}}]}},
        {"rule": {"family": "ip", "table": "mangle", "chain": "CILIUM_PRE_mangle", "handle": 9, "expr": [{"xt": null}]}}
    ]}"#;

    #[test]
    fn rules_of_nftables_are_read() {
        let expected = [
            rule((0x2635_0200, u32::MAX), 13606, "tcp", false),
            rule((0x200, 0xf00), 10042, "udp", false),
            rule((0x200, 0xf00), 10042, "udp", true),
        ];
        assert_eq!(ruleset(RULESET).unwrap(), expected);
        assert!(ruleset("{}").unwrap_err().contains("no `nftables`"));
        assert!(ruleset("nonsense").unwrap_err().contains("cannot be read"));
    }

    #[test]
    fn tools_that_are_missing_or_fail_are_told_of() {
        let parser: Parser = |_| Ok(Vec::new());
        let found = run(&[(&["no-such-tool"], &[], parser)]);
        assert_eq!(found.status, SourceStatus::Absent);
        assert_eq!(found.reason.unwrap(), "not installed: no-such-tool");
        let found = run(&[(&["no-such-tool", "true"], &[], parser), (&["false"], &[], parser)]);
        assert_eq!(found.status, SourceStatus::Partial);
        assert!(found.reason.unwrap().starts_with("false fails"));
        assert_eq!(run(&[(&["false"], &[], parser)]).status, SourceStatus::Failed);
        assert_eq!(run(&[(&["true"], &[], parser)]).status, SourceStatus::Complete);
        assert_eq!(run(&[]).status, SourceStatus::Complete);
    }
}
