//! Streams that are no longer in use, kept until the peer has the sent data.
//!
//! Closing a socket with unread input makes TCP discard what it has accepted for sending.
//! Therefore: FIN, drain the input, and close when the peer has acknowledged everything or closed
//! its side, or when a time limit has passed.

use super::{Stream, StreamError};
use crate::host::{Piece, PieceMut};
use crate::time::Nanos;
use std::time::Duration;

/// First pause between two checks; it doubles.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(64);
/// Bytes drained in one check, so that a peer that keeps sending does not occupy the thread.
const DRAIN: usize = 1 << 20;

/// A closing stream.
#[derive(Debug)]
pub(crate) struct Lingering {
    stream: Box<dyn Stream>,
    unsent: Vec<u8>,
    until: Nanos,
    pause: Duration,
    pub(crate) next_poll: Nanos,
}

impl Lingering {
    /// Closes a stream once its `unsent` bytes are sent, at `until` at the latest.
    pub(crate) fn new(stream: Box<dyn Stream>, unsent: Vec<u8>, now: Nanos, until: Nanos) -> Lingering {
        let mut lingering = Lingering {
            stream,
            unsent,
            until,
            pause: FIRST_PAUSE,
            next_poll: now,
        };
        if lingering.unsent.is_empty() {
            lingering.stream.finish();
        }
        lingering
    }

    /// Looks whether it may be closed; `true` = drop it.
    pub(crate) fn poll(&mut self, now: Nanos) -> bool {
        if now < self.next_poll {
            return false;
        }
        self.next_poll = now + self.pause;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        if let Some(due) = self.stream.advance(now) {
            self.next_poll = self.next_poll.min(due);
            return now >= self.until;
        }
        now >= self.until || !self.flush() || self.drained() || self.is_acknowledged()
    }

    /// `false` if the connection is closed.
    fn flush(&mut self) -> bool {
        while !self.unsent.is_empty() {
            match self.stream.send(&[Piece::of(&self.unsent)]) {
                Ok(n) => drop(self.unsent.drain(..n)),
                Err(StreamError::WouldBlock) => return true,
                Err(_) => return false,
            }
            if self.unsent.is_empty() {
                self.stream.finish();
            }
        }
        true
    }

    /// Discards received data; returns whether the peer has finished.
    fn drained(&mut self) -> bool {
        let mut waste = [0u8; 16 << 10];
        let mut total = 0;
        while total < DRAIN {
            match self.stream.receive(&mut [PieceMut::of(&mut waste)]) {
                Ok(0) => return self.unsent.is_empty(),
                Ok(n) => total += n,
                Err(StreamError::WouldBlock) => return false,
                Err(_) => return true,
            }
        }
        false
    }

    fn is_acknowledged(&self) -> bool {
        self.unsent.is_empty() && self.stream.unacknowledged() == 0
    }
}
