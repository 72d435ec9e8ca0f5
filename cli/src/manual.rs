//! `urnic man`: a manual page for each command, made from its help. `docs/urnic.1` is written by
//! hand: it has the options, files and variables that the commands share.

use clap::Command;
use clap::builder::Resettable;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};
use std::path::Path;

use crate::answer::Failure;

/// The commands that have a page, and those below them; `trace` has some.
fn documented(cli: Command) -> Vec<Command> {
    // `help` has no page, and the keys of options are in urnic(1).
    let mut cli = cli.disable_help_subcommand(true).mut_subcommands(|command| {
        command
            .disable_help_subcommand(true)
            .after_long_help(Resettable::Reset)
    });
    cli.build();
    let shown = |of: &Command| -> Vec<Command> {
        let commands = of.get_subcommands().filter(|command| !command.is_hide_set());
        commands.cloned().collect()
    };
    let first = shown(&cli);
    let below: Vec<Command> = first.iter().flat_map(shown).collect();
    first.into_iter().chain(below).collect()
}

/// The name of a page: `urnic-trace-join`.
fn name(command: &Command) -> String {
    let name = command.get_display_name().unwrap_or(command.get_name());
    name.to_owned()
}

/// The page of one command, for `man -l -`: of `run`, or of `trace-join`.
pub(crate) fn page(cli: Command, of: &str) -> Result<String, Failure> {
    let commands = documented(cli);
    let named: Vec<String> = commands.iter().map(name).collect();
    let short = |name: &String| name.trim_start_matches("urnic-").to_owned();
    match named.iter().position(|name| short(name) == of) {
        Some(at) => rendered(&commands[at]),
        None => Err(Failure::usage(format!(
            "{of} is no command; there are {}",
            named.iter().map(short).collect::<Vec<_>>().join(", ")
        ))),
    }
}

/// Writes the pages of all commands into a folder.
pub(crate) fn write(cli: Command, folder: &Path) -> Result<(), Failure> {
    for command in documented(cli) {
        let file = folder.join(format!("{}.1", name(&command)));
        std::fs::write(&file, rendered(&command)?)
            .map_err(|error| Failure::runtime(format!("{}: {error}", file.display())))?;
    }
    Ok(())
}

fn rendered(command: &Command) -> Result<String, Failure> {
    let manual = Man::new(command.clone())
        .title(name(command).to_uppercase())
        .section("1")
        .source(concat!("urnic ", env!("CARGO_PKG_VERSION")))
        .manual("User Commands")
        .date("");
    let mut more = Roff::new();
    more.control("SH", ["SEE ALSO"]);
    more.text([
        bold("urnic"),
        roman("(1): the options that commands share, files, environment variables, exit status"),
    ]);
    let mut text = Vec::new();
    manual
        .render(&mut text)
        .and_then(|()| more.to_writer(&mut text))
        .map_err(|error| Failure::runtime(error.to_string()))?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}
