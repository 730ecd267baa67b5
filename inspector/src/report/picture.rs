//! The packet's way as a picture: for each frontend and path where it comes in, which program it
//! meets, what becomes of it, where it goes, and which neighbour is looked up. As SVG and as a
//! Mermaid flow chart.

use std::fmt::Write as _;

use crate::judge::{Judgement, Outcome, PathVerdict, Served};

/// The stations of one lane.
pub(super) struct Lane {
    /// Frontend and path.
    pub title: String,
    /// From where it comes in to where it ends.
    pub stations: Vec<String>,
    /// The neighbour that is looked up.
    pub neighbour: String,
    /// Whether the client is served.
    pub served: Served,
}

/// Text between tags and in attributes of XML.
pub(super) fn xml(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            other if other.is_control() && !matches!(other, '\n' | '\t') => {
                escaped.push('\u{fffd}');
            }
            other => escaped.push(other),
        }
    }
    escaped
}

fn entrance(path: &PathVerdict) -> String {
    match &path.device {
        Some(device) if path.path.starts_with("forwarded via") => format!("client, on {device}"),
        _ => path.path.clone(),
    }
}

fn lane(judgement: &Judgement, path: &PathVerdict) -> Lane {
    let mut stations = vec![entrance(path), format!("to {}", path.frontend)];
    // The first reason names the program that the packet meets.
    stations.extend(path.why.first().cloned());
    stations.push(path.outcome.to_string());
    match path.outcome {
        Outcome::DnatBeforeNeigh | Outcome::SocketTranslated => {
            let frontends = judgement.programmed.frontends.iter();
            let found =
                frontends.filter(|one| one.frontend.trim_end_matches("/i") == path.frontend);
            let mut backends: Vec<&str> = found
                .flat_map(|one| &one.backends)
                .filter(|backend| backend.selectable)
                .filter_map(|backend| backend.address.as_deref())
                .collect();
            backends.sort_unstable();
            backends.dedup();
            stations.push(match backends.as_slice() {
                [] => "a backend".to_owned(),
                [one] => (*one).to_owned(),
                [one, rest @ ..] => format!("{one} or {} more", rest.len()),
            });
        }
        Outcome::ProxiedBeforeNeigh => stations.push("local proxy".to_owned()),
        Outcome::Untranslated => stations.push("up the stack, VIP as destination".to_owned()),
        Outcome::NoBackend | Outcome::Denied | Outcome::Dropped => {
            stations.push("ends in BPF".to_owned());
        }
        Outcome::Unknown => stations.push("not known".to_owned()),
    }
    Lane {
        title: format!("{} {}", path.frontend, path.path),
        stations,
        neighbour: match &path.neighbour {
            Some(neighbour) => format!("neighbour look-up: {neighbour}"),
            None => "neighbour look-up: not read".to_owned(),
        },
        served: path.served,
    }
}

/// The packet's way on each path.
pub(super) fn lanes(judgement: &Judgement) -> Vec<Lane> {
    judgement.verdict.paths.iter().map(|path| lane(judgement, path)).collect()
}

/// Breaks text into rows of at most `width` characters.
fn rows(text: &str, width: usize) -> Vec<String> {
    let mut rows: Vec<String> = vec![String::new()];
    for word in text.split_whitespace() {
        let last = rows.len() - 1;
        if rows[last].is_empty() {
            rows[last].push_str(word);
        } else if rows[last].chars().count() + 1 + word.chars().count() <= width {
            rows[last].push(' ');
            rows[last].push_str(word);
        } else {
            rows.push(word.to_owned());
        }
    }
    rows
}

const BOX_WIDTH: usize = 176;
const GAP: usize = 28;
const LINE: usize = 16;
const PER_ROW: usize = 24;

/// The picture as SVG, in colours that follow the reader's light or dark setting.
#[must_use]
pub fn svg(judgement: &Judgement) -> String {
    let lanes = lanes(judgement);
    let stations = lanes.iter().map(|lane| lane.stations.len()).max().unwrap_or(1);
    let width = 16 + stations * (BOX_WIDTH + GAP);
    let mut body = String::new();
    let mut top = 8;
    for lane in &lanes {
        let texts: Vec<Vec<String>> =
            lane.stations.iter().map(|station| rows(station, PER_ROW)).collect();
        let tallest = texts.iter().map(Vec::len).max().unwrap_or(1);
        let height = tallest * LINE + 14;
        let class = match lane.served {
            Served::Yes => "yes",
            Served::No => "no",
            Served::Partly | Served::Unknown => "unsure",
        };
        let title = xml(&lane.title);
        // Writing to a string cannot fail.
        let _ = write!(
            body,
            "<g class=\"lane {class}\" role=\"img\" aria-label=\"{title}\"><text class=\"title\" \
             x=\"8\" y=\"{}\">{title}</text>",
            top + 12
        );
        top += 20;
        for (index, text) in texts.iter().enumerate() {
            let x = 8 + index * (BOX_WIDTH + GAP);
            let last = if index + 1 == texts.len() { " last" } else { "" };
            let _ = write!(
                body,
                "<rect class=\"box{last}\" x=\"{x}\" y=\"{top}\" width=\"{BOX_WIDTH}\" \
                 height=\"{height}\" rx=\"6\"/>"
            );
            for (row, line) in text.iter().enumerate() {
                let y = top + 19 + row * LINE;
                let _ = write!(body, "<text x=\"{}\" y=\"{y}\">{}</text>", x + 8, xml(line));
            }
            if index > 0 {
                let y = top + height / 2;
                let _ = write!(
                    body,
                    "<path class=\"arrow\" d=\"M{} {y}H{}\" marker-end=\"url(#tip)\"/>",
                    x - GAP,
                    x - 6
                );
            }
        }
        top += height + LINE + 2;
        let _ = write!(
            body,
            "<text class=\"neighbour\" x=\"8\" y=\"{top}\">{}</text></g>",
            xml(&lane.neighbour)
        );
        top += 22;
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {top}\" width=\"{width}\" \
         height=\"{top}\"><style>text{{font:12px system-ui,sans-serif;fill:#1a1a1a}}.title{{font-weight:600}}\
         .neighbour{{font-style:italic;fill:#595959}}.box{{fill:#f4f4f4;stroke:#8a8a8a}}\
         .arrow{{stroke:#595959;fill:none}}.tip{{fill:#595959}}.yes .last{{fill:#dff3e3;stroke:#1a7f37}}\
         .no .last{{fill:#fde4e1;stroke:#b42318}}.unsure .last{{fill:#fff3cd;stroke:#8a6100}}\
         @media(prefers-color-scheme:dark){{text{{fill:#ececec}}.neighbour{{fill:#b0b0b0}}\
         .box{{fill:#262626;stroke:#7a7a7a}}.arrow{{stroke:#b0b0b0}}.tip{{fill:#b0b0b0}}\
         .yes .last{{fill:#12351c;stroke:#4cc26a}}.no .last{{fill:#431512;stroke:#ff8a7e}}\
         .unsure .last{{fill:#3d3000;stroke:#e0b23e}}}}</style><defs><marker id=\"tip\" \
         viewBox=\"0 0 8 8\" refX=\"6\" refY=\"4\" markerWidth=\"8\" markerHeight=\"8\" \
         orient=\"auto\"><path class=\"tip\" d=\"M0 0L8 4L0 8z\"/></marker></defs>{body}</svg>"
    )
}

/// The picture as a Mermaid flow chart.
#[must_use]
pub fn mermaid(judgement: &Judgement) -> String {
    // Mermaid reads entities of its own form, `#quot;`.
    let quote = |text: &str| text.replace('#', "#35;").replace('"', "#quot;").replace('\n', " ");
    let mut chart = String::from("flowchart LR\n");
    for (number, lane) in lanes(judgement).iter().enumerate() {
        // Writing to a string cannot fail.
        let _ = writeln!(chart, "  subgraph s{number}[\"{}\"]", quote(&lane.title));
        let _ = writeln!(chart, "    direction LR");
        for (index, station) in lane.stations.iter().enumerate() {
            let _ = writeln!(chart, "    p{number}_{index}[\"{}\"]", quote(station));
            if index > 0 {
                let _ = writeln!(chart, "    p{number}_{} --> p{number}_{index}", index - 1);
            }
        }
        let last = lane.stations.len() - 1;
        let _ =
            writeln!(chart, "    p{number}_{last} -.- n{number}([\"{}\"])", quote(&lane.neighbour));
        let _ = writeln!(chart, "  end");
    }
    chart
}
