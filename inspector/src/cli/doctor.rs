//! `inspect doctor`

use std::io::{self, Write};

use anyhow::bail;
use comfy_table::{Cell, Color};
use inspector::{
    collect::{
        CollectError,
        abilities::{self, Ability, Status},
    },
    report::table,
};
use serde::Serialize;

use super::{
    Answer,
    args::{Format, Resolved},
    output,
};

/// Looks and prints; "cannot tell" if something essential is missing.
pub fn run(options: &Resolved) -> anyhow::Result<Answer> {
    output::only("doctor", output::COMMON, options)?;
    if options.from.is_some() || options.save.is_some() {
        bail!("`inspect doctor` looks at this node: it takes neither --from nor --save");
    }
    let look = || abilities::look(options.bpffs.as_deref());
    let abilities = match &options.netns {
        Some(netns) => netns.run(look).map_err(CollectError::from)?,
        None => look(),
    };
    output::write_stdout(|out| match options.format {
        Format::Json => json(&abilities, out),
        Format::Markdown => markdown(&abilities, out),
        _ => print(&abilities, options, out),
    })?;
    let lost = abilities.iter().any(|one| one.essential && one.status == Status::Missing);
    Ok(if lost { Answer::CannotTell } else { Answer::Yes })
}

fn word(status: Status) -> &'static str {
    match status {
        Status::Good => "ok",
        Status::Missing => "MISSING",
        Status::Absent => "absent",
    }
}

fn json(abilities: &[Ability], out: &mut dyn Write) -> io::Result<()> {
    #[derive(Serialize)]
    struct Document<'a> {
        schema: &'static str,
        abilities: &'a [Ability],
    }

    serde_json::to_writer_pretty(&mut *out, &Document { schema: "inspector.doctor/1", abilities })?;
    out.write_all(b"\n")
}

fn markdown(abilities: &[Ability], out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "| | What | Found | Enables |\n| --- | --- | --- | --- |")?;
    for Ability { what, status, found, enables, essential: _ } in abilities {
        writeln!(out, "| {} | {what} | {found} | {enables} |", word(*status))?;
    }
    Ok(())
}

fn print(abilities: &[Ability], options: &Resolved, out: &mut dyn Write) -> io::Result<()> {
    let mut table = table::new_table(output::style(options));
    table.set_header(["", "WHAT", "FOUND", "ENABLES"]);
    for Ability { what, status, found, enables, essential: _ } in abilities {
        if options.quiet && *status != Status::Missing {
            continue;
        }
        let color = match status {
            Status::Good => Color::Green,
            Status::Missing => Color::Red,
            Status::Absent => Color::DarkGrey,
        };
        table.add_row([
            Cell::new(word(*status)).fg(color),
            Cell::new(what),
            Cell::new(found),
            Cell::new(enables),
        ]);
    }
    table::print(&table, out)
}
