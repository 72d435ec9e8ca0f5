//! Command lines as clap parses them: help goes to standard output, an error is one line.

use std::io::IsTerminal as _;
use std::process::ExitCode;

use clap::builder::StyledStr;
use clap::error::ErrorKind;
use clap::{ArgMatches, Command, FromArgMatches};

use crate::output::{READER_GONE, Unwritten, complain, print};

/// The exit status after an error in the arguments.
pub const USAGE: u8 = 2;

/// A command line: clap's result, and the matches that it came from.
pub type Parsed<T> = (T, ArgMatches);

/// Parses the arguments of this process. This function writes help and version, and the line about
/// an error.
///
/// # Errors
/// The exit status with which the program must end.
pub fn parsed<T: FromArgMatches>(mut command: Command) -> Result<Parsed<T>, ExitCode> {
    let read = command
        .try_get_matches_from_mut(std::env::args_os())
        .and_then(|matches| Ok((T::from_arg_matches(&matches)?, matches)));
    read.map_err(|error| answer(command.get_name(), &error))
}

/// Writes clap's text to the stream where it belongs; returns the exit status.
fn answer(program: &str, error: &clap::Error) -> ExitCode {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            match print(&styled(&error.render(), std::io::stdout().is_terminal())) {
                Ok(()) => ExitCode::SUCCESS,
                Err(Unwritten::ReaderGone) => ExitCode::from(READER_GONE),
                Err(unwritten) => {
                    complain(program, &unwritten.to_string());
                    ExitCode::FAILURE
                }
            }
        }
        // `urnic` alone: its help is the best answer, though no success.
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            use std::io::Write as _;
            let text = styled(&error.render(), std::io::stderr().is_terminal());
            let _ = std::io::stderr().write_all(text.as_bytes());
            ExitCode::from(USAGE)
        }
        _ => {
            complain(program, &mistake(error));
            ExitCode::from(USAGE)
        }
    }
}

fn styled(text: &StyledStr, terminal: bool) -> String {
    match terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()) {
        true => text.ansi().to_string(),
        false => text.to_string(),
    }
}

/// What is wrong and what to do, in one line. clap's text has several paragraphs: the error, tips,
/// the usage, a pointer to the help.
fn mistake(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let mut parts: Vec<String> = Vec::new();
    let mut help = "see --help".to_owned();
    for paragraph in text.split("\n\n") {
        let line = paragraph.split_whitespace().collect::<Vec<_>>().join(" ");
        if let Some(mistake) = line.strip_prefix("error: ") {
            parts.push(mistake.to_owned());
        } else if let Some(usage) = line.strip_prefix("Usage: ") {
            help = format!("usage: {usage}");
        } else if let Some(tip) = line.strip_prefix("tip: ") {
            parts.push(tip.to_owned());
        }
    }
    parts.push(help);
    parts.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Arg;

    fn command() -> Command {
        Command::new("prog")
            .arg(Arg::new("way").long("way").value_parser(["auto", "messages"]))
            .arg(Arg::new("file").required(true))
    }

    fn mistake_in(arguments: &[&str]) -> String {
        let words = ["prog"].iter().chain(arguments);
        mistake(&command().try_get_matches_from(words).expect_err("a mistake"))
    }

    #[test]
    fn a_usage_error_is_one_line_that_names_the_argument() {
        for (arguments, says) in [
            (&[][..], "<file>"),
            (&["--bogus", "a"], "unexpected argument '--bogus' found"),
            (&["--way", "x", "a"], "[possible values: auto, messages]"),
            (&["a", "--way"], "--way"),
            (&["a", "b"], "'b'"),
        ] {
            let mistake = mistake_in(arguments);
            assert!(mistake.contains(says), "{mistake}");
            assert!(
                !mistake.contains('\n') && !mistake.starts_with("error"),
                "{mistake}"
            );
        }
    }

    #[test]
    fn a_mistake_has_a_hint() {
        assert!(mistake_in(&[]).contains("usage: prog"), "{}", mistake_in(&[]));
        assert!(
            mistake_in(&["--wax", "auto", "a"]).contains("--way"),
            "{}",
            mistake_in(&["--wax", "auto", "a"])
        );
        assert!(mistake_in(&["a", "--way", "x"]).contains("see --help"));
    }
}
