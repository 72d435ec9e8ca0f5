//! How a command ends: what it prints, or what went wrong.

use std::io::Write as _;
use std::process::ExitCode;

/// What went wrong, in one line, and the status to leave with.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) message: String,
    pub(crate) status: u8,
}

impl Failure {
    /// A mistake in the call or the configuration.
    pub(crate) fn usage(message: impl ToString) -> Self {
        Self {
            message: message.to_string(),
            status: 2,
        }
    }

    /// Something that did not work.
    pub(crate) fn runtime(message: impl ToString) -> Self {
        Self {
            message: message.to_string(),
            status: 1,
        }
    }
}

/// Standard output, where a reader that left early (`urnic info | head`) is no failure.
pub(crate) fn print(text: &str) -> Result<ExitCode, Failure> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(Failure::runtime(error)),
        _ => Ok(ExitCode::SUCCESS),
    }
}
