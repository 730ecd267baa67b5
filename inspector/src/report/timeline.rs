//! The journeys of real packets as timelines in a page: every hook that reported a connection on an
//! axis of time from its arrival, with the neighbour look-ups, the translation and the answer.
//!
//! A journey has microseconds between its hooks and may have a second before a look-up is given up,
//! so that the axis is logarithmic. It is HTML and CSS alone: text stays as large as the reader has
//! it, and on narrow screens the parts of a row stand below each other.

use std::io::{self, Write};

use super::{
    journeys::{self, cells},
    page,
    picture::xml,
};
use crate::judge::{
    journey::{Answer, Conclusion, HookTime, Translation, duration},
    observed::Observation,
};
use crate::trace::{journey::Direction, sighting::Hook};

pub(super) const STYLE: &str = "\
.journey{margin:1.2rem 0 2rem}.steps{list-style:none;margin:.5rem 0;padding:0}\
.steps li{display:grid;grid-template-columns:5rem 18rem minmax(0,1fr);gap:0 .6rem;padding:.15rem 0}\
.when{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}\
.what{grid-column:2/-1;color:var(--quiet);font-size:.875rem}\
.track{position:relative;height:1.5rem;background:linear-gradient(var(--line),var(--line)) 0 50%/100% 1px \
no-repeat}.track .tick{position:absolute;top:0;bottom:0;width:1px;background:var(--line)}\
.track .mark{position:absolute;top:50%;width:.8rem;height:.8rem;margin:-.4rem 0 0 -.4rem;border-radius:50%;\
background:var(--ink);border:2px solid var(--paper)}\
.reply .mark{background:var(--good)}.failed .mark{background:var(--bad);border-radius:0}\
.look-up .mark{background:var(--warn);border-radius:0;transform:rotate(45deg)}\
.axis .track{height:1.5rem;background:none;color:var(--quiet);font-size:.75rem}\
.axis .label{position:absolute;top:0;transform:translateX(-50%);white-space:nowrap}\
.axis .label.first{transform:none}.axis .label.last{transform:translateX(-100%)}\
.span .track{background:none}.span .part{position:absolute;top:.35rem;height:.8rem;min-width:2px}\
.part.vip{background:repeating-linear-gradient(45deg,var(--warn) 0 4px,transparent 4px 7px);\
border:1px solid var(--warn)}.part.done{background:var(--good)}\
.badge{display:inline-block;border:1px solid var(--line);border-radius:.6rem;padding:0 .5rem;\
color:var(--ink);background:var(--soft);font-weight:600;margin-right:.4rem}\
.badge.yes{border-color:var(--good)}.badge.no{border-color:var(--bad)}.badge.look{border-color:var(--warn)}\
.legend{font-size:.875rem;color:var(--quiet)}\
@media(max-width:48rem){.steps li{grid-template-columns:5rem minmax(0,1fr)}.when{text-align:left}\
.track{grid-column:1/-1;margin:0 .5rem}.what{grid-column:1/-1}.axis .when,.axis .where,.span .when{display:none}\
.span .where{grid-column:1/-1}.axis .label.odd{display:none}}";

/// Positions on the axis, in percent.
struct Axis {
    last_ns: u64,
}

impl Axis {
    /// Where the axis leaves zero: below that, hooks are as good as at once.
    const UNIT_NS: f64 = 1_000.0;

    fn of(one: &Conclusion) -> Self {
        let hooks = one.hooks.iter().map(|hook| hook.after_ns).max().unwrap_or_default();
        let waited = match one.answer {
            Answer::Silent { waited_ns } | Answer::NotYet { waited_ns } => waited_ns,
            _ => 0,
        };
        Self { last_ns: hooks.max(waited).max(10_000) }
    }

    /// The place of a moment.
    fn at(&self, after_ns: u64) -> f64 {
        #[allow(clippy::cast_precision_loss, reason = "a place on a screen")]
        let scaled = |ns: u64| (1.0 + ns as f64 / Self::UNIT_NS).ln();
        100.0 * scaled(after_ns) / scaled(self.last_ns)
    }

    /// The powers of ten on it, in nanoseconds, and its end.
    fn ticks(&self) -> Vec<u64> {
        let powers = (3..=11).map(|power| 10_u64.pow(power));
        // One that is too close to the end would be written over it.
        let mut ticks: Vec<u64> = std::iter::once(0)
            .chain(powers.filter(|&tick| tick < self.last_ns && self.at(tick) < 88.0))
            .collect();
        ticks.push(self.last_ns);
        ticks
    }
}

/// How long after its arrival the packet was translated, and where.
fn translated(one: &Conclusion) -> Option<(&Translation, u64)> {
    one.translation.as_ref().map(|translation| (translation, translation.after_ns))
}

/// When the answer was seen.
fn answered(one: &Conclusion) -> Option<u64> {
    match one.answer {
        Answer::Answered { after_ns, .. }
        | Answer::Refused { after_ns, .. }
        | Answer::Reset { after_ns }
        | Answer::Unreachable { after_ns, .. } => Some(after_ns),
        Answer::Silent { .. } | Answer::NotYet { .. } => None,
    }
}

/// The class of a hook: which sign stands on the axis.
fn class_of(hook: &HookTime) -> &'static str {
    match (hook.hook, hook.direction) {
        (Hook::Drop | Hook::NeighDead | Hook::IcmpSend | Hook::TcpReset, _)
        | (_, Direction::Error) => "failed",
        (Hook::NeighCreate | Hook::NeighResolve | Hook::NeighSolicit | Hook::NeighUpdate, _)
        | (_, Direction::Neighbour) => "look-up",
        (_, Direction::Reply) => "reply",
        (_, Direction::Request) => "request",
    }
}

/// What a hook means for the connection, where it is one of the moments that matter: class and text.
/// Each moment is told once, at the first hook that shows it.
fn badges(one: &Conclusion, index: usize) -> Vec<(&'static str, String)> {
    let hook = &one.hooks[index];
    let is_first =
        |test: &dyn Fn(&HookTime) -> bool| one.hooks.iter().position(test) == Some(index);
    let mut badges = Vec::new();
    if index == 0 {
        let device = hook.device.as_deref().map(|device| format!(" on {device}"));
        badges.push(("", format!("arrival{}", device.unwrap_or_default())));
    }
    if let Some((translation, after_ns)) = translated(one)
        && is_first(&|other| {
            other.after_ns == after_ns
                && other.hook == translation.hook
                && other.device == translation.device
        })
    {
        // Its reply tells of it where it was not seen itself.
        let word = if translation.seen { "translated" } else { "had been translated" };
        badges.push(("yes", format!("{word} to {}", translation.backend)));
    }
    if class_of(hook) == "look-up" {
        let look_up = one
            .lookups
            .iter()
            .find(|look| look.after_ns == hook.after_ns && look.hook == hook.hook);
        if let Some(look_up) = look_up {
            let whose = if look_up.is_vip { "the VIP" } else { "a next hop" };
            badges.push(("look", format!("{whose} looked up as a neighbour")));
        }
    }
    if let Some(after_ns) = answered(one)
        && is_first(&|other| {
            other.after_ns == after_ns
                && matches!(other.direction, Direction::Reply | Direction::Error)
        })
    {
        let good = matches!(one.answer, Answer::Answered { .. });
        badges.push((if good { "yes" } else { "no" }, "answer".to_owned()));
    }
    badges
}

/// Writes what was observed: counts, and the journeys as timelines.
///
/// # Errors
/// The error of the writer.
pub(super) fn write(observed: &Observation, out: &mut (impl Write + ?Sized)) -> io::Result<()> {
    writeln!(
        out,
        "<section class=\"observed\"><h2>Observed</h2><p>{}. Watched: {}.</p>",
        xml(&journeys::heading(observed)),
        xml(&journeys::tiers(observed))
    )?;
    if !observed.counts.is_empty() {
        let rows = observed.counts.iter().map(|count| {
            vec![
                count.frontend.clone(),
                count.path.clone(),
                count.outcome.to_string(),
                count.served.to_string(),
                count.journeys.to_string(),
            ]
        });
        page::table(&["Frontend", "Path", "Outcome", "Served", "Journeys"], rows, out)?;
    }
    let shown = journeys::shown(observed, false);
    for one in &shown {
        journey(one, out)?;
    }
    if !shown.is_empty() {
        writeln!(
            out,
            "<p class=\"legend\">The axis is logarithmic, from the first report of the packet. Round \
             signs are packets (green: of the answer), diamonds neighbour look-ups, squares what \
             failed. Shown: {} of {} journeys that were kept, one of each sort first.</p>",
            shown.len(),
            observed.conclusions.len()
        )?;
    }
    if !observed.not_observed.is_empty() {
        writeln!(out, "<p>Not observed:</p><ul>")?;
        for line in &observed.not_observed {
            writeln!(out, "<li>{}</li>", xml(line))?;
        }
        writeln!(out, "</ul>")?;
    }
    writeln!(out, "</section>")
}

/// One journey.
///
/// # Errors
/// The error of the writer.
pub(super) fn journey(one: &Conclusion, out: &mut (impl Write + ?Sized)) -> io::Result<()> {
    let axis = Axis::of(one);
    writeln!(
        out,
        "<article class=\"journey\"><h3>{} <span class=\"badge {}\">{}, served: {}</span></h3><p>{}</p>",
        xml(&journeys::ends(one)),
        page::class_of(one.served),
        one.outcome,
        one.served,
        xml(&one.to_string())
    )?;
    write!(
        out,
        "<ol class=\"steps\"><li class=\"axis\"><span class=\"when\"></span><span class=\"where\">\
         </span><span class=\"track\">"
    )?;
    let ticks = axis.ticks();
    for (index, &tick) in ticks.iter().enumerate() {
        let place = match index {
            0 => " first",
            last if last + 1 == ticks.len() => " last",
            odd if odd % 2 == 1 => " odd",
            _ => "",
        };
        let text = if tick == 0 { "0".to_owned() } else { duration(tick) };
        let at = axis.at(tick);
        write!(out, "<span class=\"label{place}\" style=\"left:{at:.2}%\">{text}</span>")?;
    }
    writeln!(out, "</span></li>")?;
    spans(one, &axis, out)?;
    let inner = &ticks[1..ticks.len() - 1];
    for (index, hook) in one.hooks.iter().enumerate() {
        let [after, place, tier, _, what] = cells(hook);
        write!(
            out,
            "<li class=\"{}\"><span class=\"when\">{}</span><span class=\"where\">{} \
             <span class=\"quiet\">{tier}</span></span><span class=\"track\">",
            class_of(hook),
            xml(after.trim()),
            xml(place.trim())
        )?;
        for &tick in inner {
            write!(out, "<span class=\"tick\" style=\"left:{:.2}%\"></span>", axis.at(tick))?;
        }
        let at = axis.at(hook.after_ns);
        write!(out, "<span class=\"mark\" style=\"left:{at:.2}%\"></span></span>")?;
        write!(out, "<span class=\"what\">")?;
        for (class, text) in badges(one, index) {
            write!(out, "<span class=\"badge {class}\">{}</span>", xml(&text))?;
        }
        writeln!(out, "{}</span></li>", xml(&what))?;
    }
    writeln!(out, "</ol></article>")
}

/// The times that matter, as bars: with the VIP as destination, and translated until the answer.
fn spans(one: &Conclusion, axis: &Axis, out: &mut (impl Write + ?Sized)) -> io::Result<()> {
    let end = answered(one).unwrap_or(axis.last_ns);
    let translated = translated(one).map(|(_, after_ns)| after_ns);
    // Where the translated packet was not seen, its reply tells that it was translated before.
    let seen = one.translation.as_ref().is_none_or(|translation| translation.seen);
    let text =
        if seen { "with the VIP as destination" } else { "at most, with the VIP as destination" };
    let mut parts = vec![("vip", text, 0, translated.unwrap_or(end))];
    if let Some(after_ns) = translated {
        let text = match answered(one) {
            Some(_) => "translated, until the answer",
            None => "translated, no answer",
        };
        parts.push(("done", text, after_ns, end.max(after_ns)));
    }
    for (class, text, from, to) in parts {
        let (left, right) = (axis.at(from), axis.at(to));
        writeln!(
            out,
            "<li class=\"span\"><span class=\"when\">{}</span><span class=\"where\">{text}</span>\
             <span class=\"track\"><span class=\"part {class}\" style=\"left:{left:.2}%;\
             width:{:.2}%\"></span></span></li>",
            duration(to - from),
            right - left
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_axis_goes_from_zero_to_its_end_and_never_back() {
        let axis = Axis { last_ns: 3_000_000_000 };
        assert!(axis.at(0).abs() < 1e-9 && (axis.at(3_000_000_000) - 100.0).abs() < 1e-9);
        let places: Vec<f64> = [0, 500, 1_000, 20_000, 1_000_000, 999_999_999, 3_000_000_000]
            .map(|after_ns| axis.at(after_ns))
            .to_vec();
        assert!(places.is_sorted(), "{places:?}");
        // Microseconds keep room beside a second.
        assert!(axis.at(20_000) - axis.at(1_000) > 10.0, "{places:?}");
        let ticks = axis.ticks();
        assert_eq!(ticks.first(), Some(&0));
        assert_eq!(ticks.last(), Some(&3_000_000_000));
        assert!(ticks.is_sorted() && ticks.contains(&1_000_000), "{ticks:?}");
    }
}
