//! What is wrong with messages and streams.

/// A payload that makes no sense. The stream goes on behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// It ends too early.
    #[error("the payload ends too early")]
    Short,
    /// `argsz` is less than the structure that it stands in.
    #[error("argsz is too small")]
    Argsz,
    /// A count that is not the number of bytes behind it.
    #[error("the count is not what follows")]
    Count,
    /// Flags that exclude each other, or unknown ones.
    #[error("flags {0:#x} make no sense")]
    Flags(u32),
    /// A chain of capabilities that leads nowhere.
    #[error("the capabilities lead nowhere")]
    Capability,
    /// Version data that are not the JSON that they ought to be.
    #[error("the version data are not the JSON expected")]
    Json,
    /// A command that is not understood here.
    #[error("unknown command {0}")]
    Command(u16),
}

/// The stream cannot be understood any further; its connection must be closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// A header of an unknown type, or one that says that the message is shorter than it.
    #[error("the peer sent a header that makes no sense")]
    Header,
    /// A message longer than agreed.
    #[error("the peer sent a message of {0} bytes, more than agreed")]
    TooLong(u32),
    /// More descriptors with one message than agreed.
    #[error("the peer sent more file descriptors with one message than agreed")]
    TooManyFds,
}
