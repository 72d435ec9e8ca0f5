//! The end of a command: its output, or its error.

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

/// Writes the whole answer of a command.
pub(crate) fn print(text: &str) -> Result<ExitCode, Failure> {
    urnic_console::print(text)?;
    Ok(ExitCode::SUCCESS)
}

/// Writes the whole answer of a command, which is JSON, as one line.
pub(crate) fn print_json(json: &str) -> Result<ExitCode, Failure> {
    print(&(urnic_console::escaped_json(json) + "\n"))
}
