//! Output of the programs, with the errors of writing.

use std::fmt;
use std::io::{self, ErrorKind, Write as _};

/// The exit status of a program whose output has no reader: 128 plus the number of SIGPIPE.
pub const READER_GONE: u8 = 141;

/// Why a result could not be written to standard output.
#[derive(Debug)]
pub enum Unwritten {
    /// The reader closed the pipe.
    ReaderGone,
    /// The write failed.
    Failed(io::Error),
}

impl fmt::Display for Unwritten {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ReaderGone => f.write_str("the reader of standard output has left"),
            Self::Failed(error) => write!(f, "cannot write to standard output: {error}"),
        }
    }
}

impl std::error::Error for Unwritten {}

impl From<io::Error> for Unwritten {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::BrokenPipe => Self::ReaderGone,
            _ => Self::Failed(error),
        }
    }
}

/// Writes `text` to standard output at once.
///
/// # Errors
/// The text, or a part of it, was not written: the reader closed the pipe, or the write failed.
pub fn print(text: &str) -> Result<(), Unwritten> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// Writes `program: message` to standard error, as one line: control characters in the message are
/// escaped. A failed write to standard error is ignored.
pub fn complain(program: &str, message: &str) {
    let line = format!("{program}: {}\n", escaped(message));
    // One write, so that lines of several processes stay whole.
    let _ = io::stderr().write_all(line.as_bytes());
}

/// Escapes what changes the terminal, or the order or the lines of a text: control characters, line
/// ends too, and those of Unicode that change the direction of writing. For every text that another
/// process, a peer or a file has chosen, such as a program's name.
pub fn escaped(text: &str) -> String {
    let escape = |c: char| match changes_text(c) {
        true => c.escape_default().to_string(),
        false => c.to_string(),
    };
    text.chars().map(escape).collect()
}

/// Escapes the same characters in JSON, so that its strings keep their values. Outside of strings
/// JSON has none of them.
pub fn escaped_json(json: &str) -> String {
    let escape = |c: char| match changes_text(c) {
        true => format!("\\u{:04x}", u32::from(c)),
        false => c.to_string(),
    };
    json.chars().map(escape).collect()
}

/// Whether a terminal does something else with the character than to show it in its place.
fn changes_text(c: char) -> bool {
    let changes_order = matches!(
        c,
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
    );
    c.is_control() || changes_order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_line_without_control_characters() {
        assert_eq!(escaped("a\nb\t\x1b[1m é"), "a\\nb\\t\\u{1b}[1m é");
        assert_eq!(
            escaped("\u{9b}2J \u{7f} \u{202e}x\u{2028}"),
            "\\u{9b}2J \\u{7f} \\u{202e}x\\u{2028}"
        );
    }

    #[test]
    fn json_keeps_its_values_without_control_characters() {
        assert_eq!(
            escaped_json("{\"a\u{9b}\":\"\\u001b\u{7f}é\"}"),
            "{\"a\\u009b\":\"\\u001b\\u007fé\"}"
        );
    }

    #[test]
    fn a_broken_pipe_differs_from_other_errors() {
        let unwritten = |kind| Unwritten::from(io::Error::from(kind));
        assert!(matches!(unwritten(ErrorKind::BrokenPipe), Unwritten::ReaderGone));
        let full = unwritten(ErrorKind::StorageFull);
        assert!(
            full.to_string().starts_with("cannot write to standard output: "),
            "{full}"
        );
    }
}
