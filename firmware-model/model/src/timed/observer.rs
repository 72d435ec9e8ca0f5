//! Who is told of messages.

use crate::time::Nanos;
use std::fmt::Debug;
use std::sync::OnceLock;
use urnic_wire::rdmap::Opcode;

/// An RDMAP message that passed the connection of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Passed {
    /// The queue pair's number for programs.
    pub qpn: u32,
    /// It was sent; otherwise it was received, and is placed.
    pub sent: bool,
    /// Its kind.
    pub opcode: Opcode,
    /// Bytes behind the headers of DDP.
    pub bytes: u64,
    /// When the first segment passed.
    pub first: Nanos,
    /// When the last segment had passed.
    pub last: Nanos,
}

/// Is told of messages. The thread that tells has locks of the device: an observer must not call
/// the device.
pub trait Observer: Send + Sync + Debug {
    /// A message has passed.
    fn passed(&self, message: Passed);
}

static OBSERVER: OnceLock<&'static dyn Observer> = OnceLock::new();

/// Lets devices of this process that are started from now on tell `observer`. The first one counts.
pub fn observe(observer: &'static dyn Observer) {
    let _ = OBSERVER.set(observer);
}

/// The observer of the process, if it has one.
pub(crate) fn observer() -> Option<&'static dyn Observer> {
    OBSERVER.get().copied()
}
