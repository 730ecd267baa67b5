//! What was observed of real packets: for a terminal, as Markdown, and single journeys as they end.

use std::io::{self, Write};

use super::markdown::escape;
use super::table::{Style, new_table, print};
use crate::evidence::trace::Stopped;
use crate::judge::journey::{Conclusion, HookTime, duration, hook_name};
use crate::judge::observed::{Observation, TierSummary};
use crate::trace::journey::{Direction, Tie};
use crate::trace::sighting::Tier;

/// How many journeys are shown unless more is asked for.
const SHOWN: usize = 6;

/// The name of a kind of observer.
#[must_use]
pub fn tier_name(tier: Tier) -> &'static str {
    match tier {
        Tier::Tc => "tc",
        Tier::Netlink => "netlink",
        Tier::Tracepoint => "tracepoint",
        Tier::Kprobe => "kprobe",
        Tier::Program => "program",
    }
}

/// `17 connections in 10.0 s, until the command ended`
pub(super) fn heading(observed: &Observation) -> String {
    let stopped = match observed.stopped {
        Stopped::Duration => "",
        Stopped::Count => ", until there were enough",
        Stopped::Interrupt => ", until interrupted",
        Stopped::Command => ", until the command ended",
    };
    let number = match observed.journeys {
        0 => "no connection".to_owned(),
        1 => "1 connection".to_owned(),
        number => format!("{number} connections"),
    };
    format!("{number} in {}{stopped}", duration(observed.window_ns))
}

/// `tc, tracepoint (not kprobe: …)`
pub(super) fn tiers(observed: &Observation) -> String {
    tiers_text(&observed.tiers)
}

/// Kinds of observers, and what each could not do, in words.
pub(super) fn tiers_text(tiers: &[TierSummary]) -> String {
    let used: Vec<&str> =
        tiers.iter().filter(|tier| tier.used).map(|tier| tier_name(tier.tier)).collect();
    let mut text = if used.is_empty() { "nothing was watched".to_owned() } else { used.join(", ") };
    for tier in tiers {
        if let Some(reason) = &tier.reason {
            let what = if tier.used { "in part" } else { "not" };
            text = format!("{text}; {what} {}: {reason}", tier_name(tier.tier));
        }
    }
    text
}

/// The journeys to show: one of each sort first.
pub(super) fn shown(observed: &Observation, all: bool) -> Vec<&Conclusion> {
    if all {
        return observed.conclusions.iter().collect();
    }
    let mut shown: Vec<&Conclusion> = Vec::new();
    for one in &observed.conclusions {
        let alike = |other: &&&Conclusion| {
            (&other.frontend, &other.path, other.outcome, other.served)
                == (&one.frontend, &one.path, one.outcome, one.served)
        };
        if shown.len() < SHOWN && shown.iter().find(alike).is_none() {
            shown.push(one);
        }
    }
    shown
}

/// Who talks to whom: `192.168.2.50:47894 > 192.168.2.20:443/TCP`.
pub(super) fn ends(one: &Conclusion) -> String {
    format!("{} > {}", one.client.as_deref().unwrap_or("?"), one.frontend)
}

/// Writes what was observed.
///
/// # Errors
/// The error of the writer.
pub fn write_observation(
    observed: &Observation,
    style: Style,
    out: &mut (impl Write + ?Sized),
) -> io::Result<()> {
    writeln!(out, "Observed: {} ({})", heading(observed), tiers(observed))?;
    if !observed.counts.is_empty() {
        let mut table = new_table(style);
        table.set_header(["FRONTEND", "PATH", "OUTCOME", "SERVED", "JOURNEYS"]);
        for count in &observed.counts {
            table.add_row([
                count.frontend.clone(),
                count.path.clone(),
                count.outcome.to_string(),
                count.served.to_string(),
                count.journeys.to_string(),
            ]);
        }
        print(&table, out)?;
    }
    for one in shown(observed, style.verbose) {
        write_journey(one, style, out)?;
    }
    if observed.without_vip > 0 {
        writeln!(
            out,
            "  {} connections to backends never carried the VIP: translated at connect, or meant \
             for the backend itself",
            observed.without_vip
        )?;
    }
    if !observed.not_observed.is_empty() {
        writeln!(out, "Not observed:")?;
        for line in &observed.not_observed {
            writeln!(out, "  {line}")?;
        }
    }
    Ok(())
}

/// Writes one journey: its sentence, and with `-v` what every hook reported.
///
/// # Errors
/// The error of the writer.
pub fn write_journey(
    one: &Conclusion,
    style: Style,
    out: &mut (impl Write + ?Sized),
) -> io::Result<()> {
    let mut table = new_table(style);
    table.add_row(["  ".to_owned(), format!("{}: {one}", ends(one))]);
    print(&table, out)?;
    if style.verbose { write_hook_table(one, style, out) } else { Ok(()) }
}

/// Writes what every hook reported of a journey, below its ends.
pub(super) fn write_hooks(
    one: &Conclusion,
    style: Style,
    out: &mut (impl Write + ?Sized),
) -> io::Result<()> {
    writeln!(out, "     {}:", ends(one))?;
    write_hook_table(one, style, out)
}

fn write_hook_table(
    one: &Conclusion,
    style: Style,
    out: &mut (impl Write + ?Sized),
) -> io::Result<()> {
    let mut table = new_table(style);
    for hook in &one.hooks {
        table.add_row(cells(hook));
    }
    print(&table, out)
}

/// `    +18 µs`, `queue lxc1`, `tracepoint`, `>`, `192.168.2.50:47894 > …`
pub(super) fn cells(hook: &HookTime) -> [String; 5] {
    let way = match hook.direction {
        Direction::Request => ">",
        Direction::Reply => "<",
        Direction::Error => "!",
        Direction::Neighbour => "?",
    };
    let times = if hook.times > 1 { format!(" ({} times)", hook.times) } else { String::new() };
    let tie = match hook.tie {
        Tie::Packet => "",
        Tie::Skb => " (by its buffer)",
        Tie::Time => " (at that time)",
    };
    [
        format!("      +{}", duration(hook.after_ns)),
        format!("{} {}", hook_name(hook.hook), hook.device.as_deref().unwrap_or("")),
        tier_name(hook.tier).to_owned(),
        way.to_owned(),
        format!("{}{tie}{times}", hook.what),
    ]
}

/// Writes what was observed as Markdown.
///
/// # Errors
/// The error of the writer.
pub fn write_markdown(observed: &Observation, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "## Observed\n")?;
    writeln!(out, "{}. Watched: {}.\n", escape(&heading(observed)), escape(&tiers(observed)))?;
    if !observed.counts.is_empty() {
        writeln!(out, "| Frontend | Path | Outcome | Served | Journeys |")?;
        writeln!(out, "| --- | --- | --- | --- | --- |")?;
        for count in &observed.counts {
            writeln!(
                out,
                "| {} | {} | {} | {} | {} |",
                escape(&count.frontend),
                escape(&count.path),
                count.outcome,
                count.served,
                count.journeys
            )?;
        }
        writeln!(out)?;
    }
    for one in shown(observed, false) {
        writeln!(out, "- {}: {}", escape(&ends(one)), escape(&one.to_string()))?;
        for hook in &one.hooks {
            let [after, place, tier, _, what] = cells(hook);
            writeln!(
                out,
                "  - {} {} ({tier}): {}",
                escape(after.trim()),
                escape(place.trim()),
                escape(&what)
            )?;
        }
    }
    if !observed.conclusions.is_empty() {
        writeln!(out)?;
    }
    if !observed.not_observed.is_empty() {
        writeln!(out, "Not observed:\n")?;
        for line in &observed.not_observed {
            writeln!(out, "- {}", escape(line))?;
        }
        writeln!(out)?;
    }
    Ok(())
}
