//! Errors of messages and streams.

/// A payload is invalid. The next message of the stream can still be parsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The payload ends too early.
    #[error("the payload ends too early")]
    Short,
    /// `argsz` is less than the length of its structure.
    #[error("argsz is too small")]
    Argsz,
    /// A count differs from the number of bytes that follow it.
    #[error("the count does not match the entries that follow")]
    Count,
    /// Flags exclude each other or are unknown.
    #[error("flags {0:#x} make no sense")]
    Flags(u32),
    /// A chain of capabilities leads out of the payload or backwards.
    #[error("the capabilities lead nowhere")]
    Capability,
    /// The version data is not the expected JSON.
    #[error("the version data are not the JSON expected")]
    Json,
    /// The command is unknown or unsupported.
    #[error("unknown command {0}")]
    Command(u16),
}

/// The rest of the stream cannot be parsed; the connection must be closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// The header has an unknown type, or its size is less than the header's length.
    #[error("the peer sent a header that makes no sense")]
    Header,
    /// A message is longer than agreed.
    #[error("the peer sent a message of {0} bytes, more than agreed")]
    TooLong(u32),
    /// More descriptors came with one message than agreed.
    #[error("the peer sent more file descriptors with one message than agreed")]
    TooManyFds,
}
