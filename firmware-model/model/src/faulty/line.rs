//! Bytes that a connection has taken, but that arrive late.

use crate::stream::{Stream, StreamError};
use crate::time::Nanos;
use rustix::io::Errno;
use std::collections::VecDeque;
use urnic_faults::Lateness;

/// Most bytes that are late, after which a connection takes no more, and most of one call.
const CAPACITY: usize = 1 << 20;
pub(super) const PORTION: usize = 64 << 10;

/// Bytes on a slow path, in order.
#[derive(Debug, Default)]
pub(super) struct Line {
    /// The bytes that are left of each portion, and when they are due.
    portions: VecDeque<(Nanos, Vec<u8>)>,
    len: usize,
    /// The time of the last call.
    now: Nanos,
    /// The time when the slow part of the path is free.
    free: Nanos,
    /// Nothing leaves before this time: the port is down.
    held_until: Option<Nanos>,
    /// Our direction ends after the bytes.
    finishes: bool,
    failed: Option<Errno>,
}

impl Line {
    pub(super) fn is_empty(&self) -> bool {
        self.portions.is_empty()
    }

    /// Bytes in flight.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Whether there is room for more bytes.
    ///
    /// # Errors
    /// `WouldBlock`: there will be room later. `Closed`: earlier bytes could not be sent.
    pub(super) fn check(&self) -> Result<(), StreamError> {
        match self.failed {
            Some(errno) => Err(StreamError::Closed(errno)),
            None if self.len >= CAPACITY => Err(StreamError::WouldBlock),
            None => Ok(()),
        }
    }

    /// Takes a portion. It does not overtake those before.
    pub(super) fn push(&mut self, bytes: Vec<u8>, late: Lateness) {
        self.free = self.free.max(self.now) + late.transfer;
        let before = self.portions.back().map_or(self.now, |(due, _)| *due);
        let due = (self.free + late.time).max(before);
        self.len += bytes.len();
        self.portions.push_back((due, bytes));
    }

    /// Lets nothing leave before this time; `None`: no longer.
    pub(super) fn hold(&mut self, until: Option<Nanos>) {
        self.held_until = until;
    }

    /// Ends our direction of `stream` after the bytes.
    pub(super) fn finish(&mut self, stream: &mut dyn Stream) {
        self.finishes = !self.is_empty() || self.held_until.is_some();
        if !self.finishes {
            stream.finish();
        }
    }

    /// Loses everything.
    pub(super) fn clear(&mut self) {
        self.portions.clear();
        (self.len, self.finishes) = (0, false);
    }

    /// Sends the bytes that are due. Returns the time when more are due. Bytes that the stream does
    /// not take are sent when it is ready.
    pub(super) fn advance(&mut self, now: Nanos, stream: &mut dyn Stream) -> Option<Nanos> {
        self.now = now;
        if self.held_until.is_some() {
            return self.held_until;
        }
        while let Some((due, bytes)) = self.portions.front_mut() {
            if *due > now {
                return Some(*due);
            }
            match stream.send_bytes(bytes) {
                Ok(taken) => {
                    self.len -= taken;
                    bytes.drain(..taken);
                    if bytes.is_empty() {
                        self.portions.pop_front();
                    }
                }
                Err(StreamError::Closed(errno)) => {
                    self.failed = Some(errno);
                    self.clear();
                }
                // The bytes are in memory of this crate, so they are accessible.
                Err(StreamError::WouldBlock | StreamError::Fault) => return None,
            }
        }
        if std::mem::take(&mut self.finishes) {
            stream.finish();
        }
        None
    }
}
