//! The end of a command: its output, or its error.

use std::io::IsTerminal as _;
use std::process::ExitCode;

use urnic_console::{READER_GONE, USAGE, Unwritten};

/// The reason why a command failed, and the exit status.
#[derive(Debug)]
pub(crate) struct Failure {
    /// The error in one line; empty if there is no message.
    pub(crate) message: String,
    pub(crate) status: u8,
}

impl Failure {
    /// An error in the arguments or the configuration.
    pub(crate) fn usage(message: impl ToString) -> Self {
        Self {
            message: message.to_string(),
            status: USAGE,
        }
    }

    /// An error at run time.
    pub(crate) fn runtime(message: impl ToString) -> Self {
        Self {
            message: message.to_string(),
            status: 1,
        }
    }

    /// The reader of standard output closed the pipe: there is no message.
    pub(crate) fn reader_gone() -> Self {
        Self {
            message: String::new(),
            status: READER_GONE,
        }
    }

    /// Writes the error line; returns the exit status.
    pub(crate) fn report(&self) -> ExitCode {
        if !self.message.is_empty() {
            urnic_console::complain("urnic", &self.message);
        }
        ExitCode::from(self.status)
    }
}

impl From<Unwritten> for Failure {
    fn from(unwritten: Unwritten) -> Self {
        match unwritten {
            Unwritten::ReaderGone => Self::reader_gone(),
            Unwritten::Failed(_) => Self::runtime(unwritten),
        }
    }
}

/// The number of columns of the terminal at standard output; `None`: it is not a terminal.
pub(crate) fn width() -> Option<usize> {
    if !std::io::stdout().is_terminal() {
        return None;
    }
    let (columns, _) = ratatui::crossterm::terminal::size().ok()?;
    (columns > 0).then_some(columns.into())
}

/// `text` in lines of at most `width` characters. Lines after the first are indented by `indent`.
pub(crate) fn wrapped(text: &str, width: usize, indent: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            None => lines.push(word.to_owned()),
            Some(_) => lines.push(" ".repeat(indent) + word),
        }
    }
    lines
}

/// Writes the whole answer of a command.
pub(crate) fn print(text: &str) -> Result<ExitCode, Failure> {
    urnic_console::print(text)?;
    Ok(ExitCode::SUCCESS)
}

/// Writes the whole answer of a command, which is JSON, as one line.
pub(crate) fn print_json(json: &str) -> Result<ExitCode, Failure> {
    print(&(urnic_console::escaped_json(json) + "\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_no_longer_than_the_width() {
        assert_eq!(wrapped("one two three", 7, 0), ["one two", "three"]);
        assert_eq!(wrapped("one two three", 8, 2), ["one two", "  three"]);
        assert_eq!(wrapped("é é é", 3, 0), ["é é", "é"]);
        assert_eq!(wrapped("  ", 3, 0), [""; 0]);
    }
}
