//! The state of an initiator's attempt to connect.

use super::command::Parameters;
use crate::mpa_startup::{Initiator, Time};

/// What is known about the TCP port of a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Location {
    /// The peer was not asked.
    Unasked,
    /// The peer did not answer.
    Silent,
    /// The peer has no listener whose port is not that of TCP.
    Absent,
    /// The peer named the port.
    Known,
}

/// A connection attempt in progress.
#[derive(Debug)]
pub(super) struct Connecting {
    pub(super) sid: u32,
    pub(super) parameters: Parameters,
    /// The peer's TCP port.
    pub(super) port: u16,
    /// What the peer said about its TCP port.
    pub(super) location: Location,
    /// TCP chose a port that differs from the id's.
    pub(super) other_port: bool,
    /// The attempt uses RFC 6581; the second attempt does not (RFC 6581 §10).
    pub(super) enhanced: bool,
    /// The Reply is due; `None`: TCP connects.
    pub(super) initiator: Option<Box<Initiator>>,
    pub(super) deadline: Time,
}
