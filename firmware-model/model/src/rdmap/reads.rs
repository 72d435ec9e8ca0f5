//! Reads and atomics that wait for the peer's answers, which come in the order of the requests (RFC
//! 5040 §5.5, RFC 7306 §5.3). A Response is believed only as far as it fits the oldest request (row
//! RDM-R-07): a peer cannot write through it anywhere else.

use super::placement::{self, Cursor};
use crate::memory::{Violation, Window};
use crate::queues::{SendQueue, SendWqe};
use crate::rdmap::env::Env;
use crate::rdmap::params::Identity;
use std::collections::VecDeque;
use urnic_wire::ddp::TaggedHeader;
use urnic_wire::rdmap::TerminateError;

/// What answers the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    /// A Read Response.
    Read,
    /// An Atomic Response with this request identifier.
    Atomic(u32),
}

/// A request on the wire.
#[derive(Debug, Clone)]
pub(super) struct Pending {
    pub(super) answer: Answer,
    /// The work request of the Read, and its number; `None` for a Read that no program posted.
    pub(super) request: Option<(u64, SendWqe)>,
    /// Behind the request, in bytes of the stream.
    pub(super) position: u64,
    /// The STag of the sink, as sent to the peer.
    pub(super) sink_stag: u32,
    pub(super) sink_to: u64,
    /// Bytes requested.
    pub(super) len: u32,
    /// Bytes that came.
    pub(super) placed: u32,
    pub(super) cursor: Cursor,
}

/// All pending Reads, oldest first.
#[derive(Debug, Default)]
pub(super) struct Reads(VecDeque<Pending>);

impl Reads {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn push(&mut self, pending: Pending) {
        self.0.push_back(pending);
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// The oldest, to be answered next.
    pub(super) fn front(&self) -> Option<&Pending> {
        self.0.front()
    }

    /// The bytes of the oldest, and how many of them came, if it is a Read of the program.
    pub(super) fn transfer(&self) -> Option<(u32, u32)> {
        let is_read = |pending: &&Pending| pending.answer == Answer::Read && pending.request.is_some();
        self.0.front().filter(is_read).map(|read| (read.len, read.placed))
    }

    /// Takes the oldest, which is answered.
    pub(super) fn pop(&mut self) -> Option<Pending> {
        self.0.pop_front()
    }

    /// Checks a segment of a Read Response with `len` bytes of payload.
    pub(super) fn check(&self, header: &TaggedHeader, len: usize) -> Result<(), TerminateError> {
        let pending = self
            .0
            .front()
            .filter(|p| p.answer == Answer::Read)
            .ok_or(TerminateError::DdpInvalidStag)?;
        if pending.request.is_none() {
            return Ok(());
        }
        let missing = (pending.len - pending.placed) as usize;
        if len > 0 {
            // A zero-length segment's STag and TO are not checked (RFC 5041 §5.2).
            if header.stag != pending.sink_stag {
                return Err(TerminateError::DdpInvalidStag);
            }
            let expected = pending.sink_to.wrapping_add(pending.placed.into());
            if header.to != expected || len > missing {
                return Err(TerminateError::DdpBaseOrBounds);
            }
        }
        if header.last && len != missing {
            return Err(TerminateError::RdmapOperation);
        }
        Ok(())
    }

    /// Whether no program posted the oldest. soft-iWARP answers a Read of length zero with a byte
    /// now and then: the answer to such a Read is discarded.
    pub(super) fn is_discarded(&self) -> bool {
        self.0.front().is_some_and(|pending| pending.request.is_none())
    }

    /// Places bytes of the Response that was checked.
    pub(super) fn place(
        &mut self,
        qp: &Identity,
        env: &Env<'_>,
        sq: &SendQueue,
        bytes: &[u8],
    ) -> Result<(), Violation> {
        if self.is_discarded() {
            return Ok(());
        }
        let Some(pending) = self.0.front_mut() else {
            return Err(Violation::Bounds);
        };
        let list = |n| pending.request.as_ref().and_then(|(_, wqe)| sq.element(wqe, n));
        placement::scatter(qp, qp.pd, env, list, &mut pending.cursor, bytes)?;
        pending.placed += bytes.len() as u32;
        Ok(())
    }

    /// Where the next bytes of the Read go, at most `max`.
    pub(super) fn window<'t>(
        &mut self,
        qp: &Identity,
        env: &Env<'t>,
        sq: &SendQueue,
        max: usize,
    ) -> Result<(Window<'t>, usize), Violation> {
        let Some(pending) = self.0.front_mut() else {
            return Err(Violation::Bounds);
        };
        let list = |n| pending.request.as_ref().and_then(|(_, wqe)| sq.element(wqe, n));
        placement::window(qp, qp.pd, env, &list, &mut pending.cursor, max)
    }

    /// Notes that `n` bytes were placed in the oldest Read's sink.
    pub(super) fn placed(&mut self, n: usize) {
        if let Some(pending) = self.0.front_mut() {
            pending.cursor.advance(n);
            pending.placed += n as u32;
        }
    }
}
