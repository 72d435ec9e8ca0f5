//! Work requests under way: executed, not yet complete. They complete in the order in which they
//! were posted (RFC 5040 §5.5(15)).

use super::terminate::OffendingRequest;
use crate::queues::SendWqe;
use std::collections::VecDeque;
use urnic_device::vocabulary::WcStatus;
use urnic_device::wqe::Opcode;

/// What a work request waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    /// The stream taking all up to this position.
    Taken(u64),
    /// The peer's answer.
    Answer,
    /// The flights before it.
    Done,
    /// The flights before it; then the request fails.
    Failed(WcStatus),
    /// Nothing: the connection ended before the peer confirmed the request.
    Unconfirmed,
}

impl Wait {
    /// Whether the flight ended successfully, for the position `taken` of the stream.
    #[inline]
    fn is_over(self, taken: u64) -> bool {
        match self {
            Wait::Taken(position) => position <= taken,
            Wait::Done => true,
            Wait::Answer | Wait::Failed(_) | Wait::Unconfirmed => false,
        }
    }
}

/// A work request under way.
#[derive(Debug, Clone)]
pub(super) struct Flight {
    pub(super) wqe: SendWqe,
    /// MSN of its message, on the queue that the opcode uses.
    pub(super) msn: u32,
    /// Bytes of its message.
    pub(super) len: u32,
    pub(super) wait: Wait,
}

impl Flight {
    pub(super) fn is_named_by(&self, offending: OffendingRequest) -> bool {
        let wqe = &self.wqe;
        match (wqe.opcode, offending) {
            (
                Opcode::Send | Opcode::SendInv | Opcode::SendImm | Opcode::WriteImm,
                OffendingRequest::Send(msn),
            )
            | (
                Opcode::Read | Opcode::ReadInv | Opcode::CompareSwap | Opcode::FetchAdd,
                OffendingRequest::Request(msn),
            ) => msn == self.msn,
            (Opcode::Write | Opcode::WriteImm, OffendingRequest::Write { stag, to }) => {
                stag == wqe.stag && to.wrapping_sub(wqe.remote_offset) < self.len.into()
            }
            _ => false,
        }
    }
}

/// The flights of one queue pair, oldest first, numbered from 0.
#[derive(Debug, Default)]
pub(super) struct Flights {
    queue: VecDeque<Flight>,
    landed: u64,
}

impl Flights {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether all flights are successfully complete, for the position `taken` of the stream.
    pub(super) fn are_complete(&self, taken: u64) -> bool {
        self.queue.iter().all(|flight| flight.wait.is_over(taken))
    }

    /// Adds the newest; returns its number.
    #[inline]
    pub(super) fn push(&mut self, flight: Flight) -> u64 {
        self.queue.push_back(flight);
        self.landed + self.queue.len() as u64 - 1
    }

    /// The oldest flight that `offending` names.
    pub(super) fn named_by(&self, offending: OffendingRequest) -> Option<&Flight> {
        self.queue.iter().find(|flight| flight.is_named_by(offending))
    }

    /// How many there are, and what the oldest does.
    pub(super) fn under_way(&self) -> (usize, Option<Opcode>) {
        (
            self.queue.len(),
            self.queue.front().map(|flight| flight.wqe.opcode),
        )
    }

    /// The oldest request that failed, and how.
    pub(super) fn failed(&self) -> Option<(&SendWqe, WcStatus)> {
        self.queue.iter().find_map(|flight| match flight.wait {
            Wait::Failed(status) => Some((&flight.wqe, status)),
            _ => None,
        })
    }

    /// Changes what number `n` waits for.
    pub(super) fn set(&mut self, n: u64, wait: Wait) {
        let index = n.checked_sub(self.landed).and_then(|i| usize::try_from(i).ok());
        if let Some(flight) = index.and_then(|i| self.queue.get_mut(i)) {
            flight.wait = wait;
        }
    }

    /// Makes the oldest request that `offending` names fail; whether there is one. The peer
    /// processes messages in order, so the Sends and Writes before that request succeeded.
    pub(super) fn fail_offending(&mut self, offending: OffendingRequest, status: WcStatus) -> bool {
        let Some(at) = self.queue.iter().position(|f| f.is_named_by(offending)) else {
            return false;
        };
        for flight in self.queue.range_mut(..at) {
            if matches!(flight.wait, Wait::Taken(_)) {
                flight.wait = Wait::Done;
            }
        }
        self.queue[at].wait = Wait::Failed(status);
        true
    }

    /// Makes the oldest request fail that the stream has not taken to its end; whether there is
    /// one.
    pub(super) fn fail_untaken(&mut self, taken: u64, status: WcStatus) -> bool {
        let sent = |wait| matches!(wait, Wait::Taken(position) if position > taken);
        let found = self.queue.iter_mut().find(|flight| sent(flight.wait));
        found.map(|f| f.wait = Wait::Failed(status)).is_some()
    }

    /// Takes the oldest flight if it is successfully complete, for the position `taken` of the
    /// stream.
    #[inline]
    pub(super) fn pop_complete(&mut self, taken: u64) -> Option<Flight> {
        match self.queue.front()?.wait.is_over(taken) {
            true => self.pop(),
            false => None,
        }
    }

    /// The connection ends: of what was sent, what ends up to `known` has succeeded.
    pub(super) fn settle(&mut self, known: u64) {
        for flight in &mut self.queue {
            if let Wait::Taken(position) = flight.wait {
                flight.wait = match position <= known {
                    true => Wait::Done,
                    false => Wait::Unconfirmed,
                };
            }
        }
    }

    /// Makes what the stream has not taken up to `taken` complete; returns how many messages.
    pub(super) fn drop_untaken(&mut self, taken: u64) -> u64 {
        let mut dropped = 0;
        for flight in &mut self.queue {
            if let Wait::Taken(position) = flight.wait {
                dropped += u64::from(position > taken);
                flight.wait = Wait::Done;
            }
        }
        dropped
    }

    /// Whether the oldest flight failed, or there is none.
    pub(super) fn is_failed_next(&self) -> bool {
        let oldest = self.queue.front();
        oldest.is_none_or(|flight| matches!(flight.wait, Wait::Failed(_)))
    }

    /// Takes the oldest request, in any state.
    #[inline]
    pub(super) fn pop(&mut self) -> Option<Flight> {
        self.landed += 1;
        let flight = self.queue.pop_front();
        if flight.is_none() {
            self.landed -= 1;
        }
        flight
    }
}
