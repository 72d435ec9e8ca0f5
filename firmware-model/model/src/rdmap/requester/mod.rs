//! Work requests become messages.

mod alone;
mod direct;
mod fill;
mod framing;
mod runs;
mod sending;
mod words;

use super::completions::Completions;
use super::confirmation;
use super::delivery::Delivery;
use super::flights::{Flight, Flights, Wait};
use super::reads::{Pending, Reads};
use super::terminate::OffendingRequest;
use crate::counters::Counter;
use crate::llp::Llp;
use crate::memory::InvalidateBy;
use crate::queues::{BadWqe, CompletionQueue, Overflow, SendQueue, SendWqe};
use crate::rdmap::env::Env;
use crate::rdmap::params::Identity;
use crate::stream::same_host::Neighbour;
use sending::{Filled, Sending};
use std::sync::{Arc, Once};
use urnic_device::vocabulary::{WcOpcode, WcStatus};
use urnic_device::wqe::{Opcode, SendFlags};

/// Longest message (verbs: 2^31 bytes).
const MAX_MESSAGE: u64 = 1 << 31;

/// Last four bytes of Immediate Data that belongs to the Send right behind it. RFC 7306 gives
/// immediates eight bytes and verbs has four; cxgb4 leaves the rest zero (row X73-10). Verbs' Send
/// with immediate is one receive at the peer, for which RFC 7306 has no message: a peer that does
/// not implement this mark completes two receives.
pub(super) const WITH_NEXT_SEND: [u8; 4] = *b"SEND";

/// The log's one line on connections whose requests cannot be confirmed.
static UNCONFIRMED: Once = Once::new();

/// What came of an attempt to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// A ULPDU was framed, or a local request carried out; `ended`: no message is under way.
    Done { ended: bool },
    /// There is nothing to send now.
    Idle,
    /// A request failed locally: it is marked, and the queue pair must end.
    Failed,
}

/// The requesting half of a queue pair.
#[derive(Debug)]
pub(super) struct Requester {
    pub(super) sq: SendQueue,
    pub(super) cq: Completions,
    pub(super) flights: Flights,
    pub(super) reads: Reads,
    pub(super) delivery: Delivery,
    /// The peer, if it shares memory with us.
    pub(super) neighbour: Option<Neighbour>,
    /// Requests complete when the neighbour has processed them.
    pub(super) confirms: bool,
    /// The next request waits until the neighbour has processed all that was sent.
    drains: bool,
    /// The last attempt to reach into its memory succeeded.
    worth_draining: bool,
    /// What was done in the neighbour's memory, in ULPDUs.
    direct_cost: u32,
    /// A completion says that the peer has the message, also at the end of the connection.
    pub(super) delivered: bool,
    /// A request failed locally: no other one is started.
    pub(super) has_failed: bool,
    /// Most outstanding Reads and atomics of the program.
    pub(super) ord: u32,
    /// Most outstanding Reads and atomics that the peer accepts; 0 = `ord`.
    pub(super) ord_limit: u32,
    sending: Option<Sending>,
    filled: Filled,
    /// Next MSN on queue 0.
    pub(super) msn: u32,
    /// MSN of a message that takes the connection's first receive at the peer, if all messages
    /// before the next one took a receive. It grows with each message that takes none.
    pub(super) first_receive: u32,
    /// Next MSN on queue 1.
    pub(super) request_msn: u32,
    /// How the next flushed request completes instead, once.
    pub(super) flush_status: Option<WcStatus>,
    /// Control word of the peer's Terminate, for the request that it makes fail.
    pub(super) vendor_error: u32,
    /// The message of a request that failed is framed in part.
    pub(super) torn: bool,
}

impl Requester {
    pub(super) fn new(sq: SendQueue, cq: Arc<CompletionQueue>) -> Requester {
        Requester {
            sq,
            cq: Completions::new(cq),
            flights: Flights::default(),
            reads: Reads::default(),
            delivery: Delivery::default(),
            neighbour: None,
            confirms: false,
            drains: false,
            worth_draining: true,
            direct_cost: 0,
            delivered: false,
            has_failed: false,
            ord: 0,
            ord_limit: 0,
            sending: None,
            filled: Filled::default(),
            msn: 1,
            first_receive: 1,
            request_msn: 1,
            flush_status: None,
            vendor_error: 0,
            torn: false,
        }
    }

    /// A stream begins, maybe not the first: the first message on queue 0 has this MSN.
    pub(super) fn begin(&mut self, first_msn: u32) {
        (self.msn, self.first_receive) = (first_msn, first_msn);
        (self.filled, self.delivery) = (Filled::default(), Delivery::default());
    }

    /// Whether a message is partly framed: nothing else may come between its segments (row
    /// DDP-S-11).
    #[inline]
    pub(super) fn is_within_message(&self) -> bool {
        self.sending.is_some()
    }

    /// How many requests are under way, and what the oldest does.
    pub(super) fn under_way(&self) -> (usize, Option<Opcode>) {
        let (count, oldest) = self.flights.under_way();
        let sending = self.sending.as_ref().map(|sending| sending.wqe.opcode);
        (count + usize::from(sending.is_some()), oldest.or(sending))
    }

    /// The length of the transfer under way, and how much of it is done, in bytes.
    pub(super) fn transfer(&self) -> (u32, u32) {
        let sending = self.sending.as_ref();
        let read = self.reads.transfer();
        read.or_else(|| sending.map(|sending| (sending.len, sending.sent)))
            .unwrap_or_default()
    }

    /// Whether any request would not be complete if all that the stream took, up to `taken`,
    /// arrived.
    pub(super) fn is_outstanding(&self, taken: u64) -> bool {
        !self.flights.are_complete(taken) || self.sending.is_some() || self.sq.has_posted()
    }

    /// Frames the next ULPDU; the lower layer has room for it.
    #[inline]
    pub(super) fn step(&mut self, qp: &Identity, env: &mut Env<'_>, llp: &mut Llp) -> Step {
        if let Some(sending) = self.sending.take() {
            return self.proceed(sending, qp, env, llp);
        }
        if self.delivery.is_due(self.sq.is_half_used()) && self.probe(env, llp) {
            return Step::Done { ended: true };
        }
        match self.start(qp, env, llp) {
            Step::Idle if self.delivery.is_wanted() && self.probe(env, llp) => Step::Done { ended: true },
            step => step,
        }
    }

    /// The Reads and atomics that the peer accepts at the same time.
    fn ord_limit(&self) -> u32 {
        if self.ord_limit == 0 {
            self.ord
        } else {
            self.ord_limit
        }
    }

    /// Whether the peer accepts another Read or atomic.
    fn may_request(&self) -> bool {
        self.reads.len() < self.ord_limit() as usize
    }

    /// Sends a Read whose answer confirms the messages before it; whether that was possible.
    fn probe(&mut self, env: &Env<'_>, llp: &mut Llp) -> bool {
        if self.ord_limit() == 0 {
            self.delivery.stop();
            self.delivered = false;
            env.counters.add(Counter::UnconfirmedConnections, 1);
            UNCONFIRMED.call_once(|| {
                tracing::warn!(
                    "a peer accepts no RDMA Read, so requests complete when TCP has taken them, \
                     not when they are delivered (counter unconfirmed_connections)"
                );
            });
            return false;
        }
        let possible = self.may_request();
        if possible {
            let position = self.frame_empty_read(confirmation::MARK, env, llp);
            self.delivery.probed(position);
        }
        possible
    }

    #[inline]
    fn start(&mut self, qp: &Identity, env: &mut Env<'_>, llp: &mut Llp) -> Step {
        let wqe = match self.sq.peek() {
            _ if self.has_failed => return Step::Idle,
            None => return Step::Idle,
            // `flush` finds it again and completes it.
            Some(Err(BadWqe { .. })) => return Step::Failed,
            Some(Ok(wqe)) => wqe,
        };
        let reads = self.reads.len().saturating_sub(self.delivery.probes());
        if wqe.flags.contains(SendFlags::FENCE) && reads > 0 {
            return Step::Idle;
        }
        match wqe.opcode {
            Opcode::LocalInv => {
                llp.rest(env.memory);
                let done = env
                    .memory_to_revoke()
                    .invalidate(wqe.stag, qp.pd, qp.qid, InvalidateBy::Local);
                return self.local(wqe, done.map_err(|_| WcStatus::LocProtErr));
            }
            Opcode::BindMw => {
                llp.rest(env.memory);
                let done = env.memory_to_revoke().bind(&self.sq.bind(&wqe), qp.pd, qp.qid);
                return self.local(wqe, done.map_err(|_| WcStatus::MwBindErr));
            }
            Opcode::Read | Opcode::ReadInv | Opcode::CompareSwap | Opcode::FetchAdd => {
                if self.ord == 0 || qp.unreliable {
                    return self.refuse(wqe, WcStatus::LocQpOpErr);
                }
                if reads >= self.ord as usize || !self.may_request() {
                    return Step::Idle;
                }
                return match wqe.opcode {
                    Opcode::Read | Opcode::ReadInv => self.read(wqe, qp, env, llp),
                    _ => self.operate(wqe, qp, env, llp),
                };
            }
            Opcode::Send | Opcode::SendInv | Opcode::SendImm | Opcode::Write | Opcode::WriteImm => {}
        }
        let len = self.payload_len(&wqe);
        if len > MAX_MESSAGE {
            return self.refuse(wqe, WcStatus::LocLenErr);
        }
        if wqe.opcode == Opcode::Write {
            if self.is_to_wait(len, qp, llp) {
                return Step::Idle;
            }
            if let Some(step) = self.run(&wqe, qp, env, llp) {
                return step;
            }
        }
        if wqe.opcode == Opcode::Send {
            self.fill_receives(&wqe, len, qp, env, llp);
        }
        self.proceed(Sending::new(wqe, len as u32), qp, env, llp)
    }

    /// Bytes of payload, or of a Read.
    #[inline]
    fn payload_len(&self, wqe: &SendWqe) -> u64 {
        if wqe.flags.contains(SendFlags::INLINE) {
            return wqe.inline_len.into();
        }
        (0..usize::from(wqe.num_sge))
            .map(|n| u64::from(self.sq.sge(wqe, n).len.get()))
            .sum()
    }

    /// Completes a request that needs no wire and was carried out at its place in the queue (row
    /// VRB-F-02).
    fn local(&mut self, wqe: SendWqe, done: Result<(), WcStatus>) -> Step {
        match done {
            Ok(()) => {
                self.board(wqe, 0, 0, Wait::Done);
                Step::Done { ended: true }
            }
            Err(status) => self.refuse(wqe, status),
        }
    }

    fn refuse(&mut self, wqe: SendWqe, status: WcStatus) -> Step {
        self.board(wqe, 0, 0, Wait::Failed(status));
        Step::Failed
    }

    /// Makes the oldest request that `offending` names fail, which may be the one that is partly
    /// framed; whether there is one.
    pub(super) fn fail_offending(&mut self, offending: OffendingRequest, status: WcStatus) -> bool {
        if self.flights.fail_offending(offending, status) {
            return true;
        }
        let Some(sending) = &self.sending else {
            return false;
        };
        let flight = Flight {
            wqe: sending.wqe,
            msn: self.msn,
            len: sending.len,
            wait: Wait::Failed(status),
        };
        let found = flight.is_named_by(offending);
        if found {
            self.sending = None;
            self.sq.advance(flight.wqe.blocks);
            self.flights.push(flight);
        }
        found
    }

    /// Takes an executed entry from the queue; returns its number.
    #[inline]
    fn board(&mut self, wqe: SendWqe, msn: u32, len: u32, wait: Wait) -> u64 {
        self.sq.advance(wqe.blocks);
        self.flights.push(Flight { wqe, msn, len, wait })
    }

    /// Frames the next ULPDU of a Send or Write.
    #[inline]
    fn proceed(&mut self, mut sending: Sending, qp: &Identity, env: &mut Env<'_>, llp: &mut Llp) -> Step {
        if matches!(sending.wqe.opcode, Opcode::Read | Opcode::ReadInv) {
            return self.fetch(sending, qp, env, llp);
        }
        let position;
        if !sending.immediate_sent {
            position = self.frame_immediate(&sending.wqe, WITH_NEXT_SEND, false, env, llp);
            self.first_receive = self.first_receive.wrapping_add(1);
            sending.immediate_sent = true;
        } else if !sending.payload_done {
            match self.place(&mut sending, qp, env, llp) {
                // The message of a Send whose payload is in its place has none, but it is sent.
                Ok(true) if sending.payload_done || sending.sent < sending.len => position = llp.sealed(),
                Ok(_) => match self.frame_payload(&mut sending, qp, env, llp) {
                    Ok(sealed) => position = sealed,
                    Err(status) => {
                        llp.cancel();
                        // The immediate of a Send is a message of its own; but a peer of kind UC
                        // would take it for that of the next Send.
                        let split = qp.unreliable && sending.wqe.opcode == Opcode::SendImm;
                        self.torn = sending.framed || split;
                        return self.refuse(sending.wqe, status);
                    }
                },
                Err(status) => return self.refuse(sending.wqe, status),
            }
        } else {
            let solicited = sending.wqe.flags.contains(SendFlags::SOLICITED);
            position = self.frame_immediate(&sending.wqe, [0; 4], solicited, env, llp);
            return self.finish(&sending, position, env);
        }
        if sending.payload_done && sending.wqe.opcode != Opcode::WriteImm {
            return self.finish(&sending, position, env);
        }
        self.sending = Some(sending);
        Step::Done { ended: false }
    }

    #[inline]
    fn finish(&mut self, sending: &Sending, position: u64, env: &Env<'_>) -> Step {
        env.counters.add(Counter::TxMessages, 1);
        let msn = self.msn.wrapping_sub(1);
        let signaled = sending.wqe.flags.contains(SendFlags::SIGNALED);
        self.delivery.sent(position, signaled);
        self.board(sending.wqe, msn, sending.len, Wait::Taken(position));
        Step::Done { ended: true }
    }

    /// The oldest Read or atomic is answered in full.
    pub(super) fn answered(&mut self, qp: &Identity, env: &Env<'_>) -> Result<(), WcStatus> {
        let Some(pending) = self.reads.pop() else {
            return Ok(());
        };
        self.delivery.answered(pending.position);
        let Some((number, wqe)) = pending.request else {
            return Ok(());
        };
        let wait = self.fetched(&wqe, qp, env);
        self.flights.set(number, wait);
        match wait {
            Wait::Failed(status) => Err(status),
            _ => Ok(()),
        }
    }

    /// The oldest Read or atomic cannot be answered, for a reason of ours.
    pub(super) fn fail_answer(&mut self, status: WcStatus) {
        if let Some(Pending {
            request: Some((number, _)),
            ..
        }) = self.reads.front()
        {
            self.flights.set(*number, Wait::Failed(status));
        }
    }

    /// Makes the request fail whose bytes the stream would take next, after the `taken` ones. If
    /// these bytes are an answer, the oldest request fails.
    pub(super) fn fail_untaken(&mut self, taken: u64, status: WcStatus) {
        if self.flights.fail_untaken(taken, status) {
            return;
        }
        match self.sending.take() {
            Some(sending) => {
                self.board(sending.wqe, 0, 0, Wait::Failed(status));
            }
            None => self.flush_status = Some(status),
        }
    }

    /// Completes the requests that are complete; `taken` is the position up to which the result of
    /// what was sent is known.
    #[inline]
    pub(super) fn complete(&mut self, qp: &Identity, env: &mut Env<'_>, taken: u64) -> Result<(), Overflow> {
        while let Some(Flight { wqe, len, .. }) = self.flights.pop_complete(taken) {
            // The blocks come first: a program that sees the completion may post at once.
            self.sq.retire(wqe.blocks);
            if wqe.flags.contains(SendFlags::SIGNALED) {
                let opcode = wqe.opcode.completion();
                let mut cqe = qp.cqe(wqe.cookie, opcode, WcStatus::Success);
                cqe.byte_len = len.into();
                self.cq.push(cqe, env)?;
            }
        }
        self.cq.flush(env)
    }

    /// Whether the oldest request that is not complete failed, or none is left.
    pub(super) fn is_failed_next(&self) -> bool {
        self.flights.is_failed_next()
    }

    /// Kind UC: the stream ended. What it did not take counts as sent; returns how many messages.
    pub(super) fn drop_flights(&mut self, taken: u64) -> u64 {
        (self.msn, self.request_msn) = (1, 1);
        self.reads.clear();
        let dropped = self.flights.drop_untaken(taken);
        match self.sending.take() {
            Some(sending) => {
                self.board(sending.wqe, 0, sending.len, Wait::Done);
                dropped + 1
            }
            None => dropped,
        }
    }

    /// Completes everything in error, in order; `taken` as for [`complete`](Self::complete).
    pub(super) fn flush(&mut self, qp: &Identity, env: &mut Env<'_>, taken: u64) -> Result<(), Overflow> {
        self.sending = None;
        self.reads.clear();
        // Behind the first request that fails, requests that would be complete fail, too.
        self.complete(qp, env, taken)?;
        loop {
            let (wqe, status) = match self.flights.pop() {
                Some(Flight {
                    wqe,
                    wait: Wait::Failed(status),
                    ..
                }) => (wqe, Some(status)),
                Some(Flight { wqe, .. }) => (wqe, None),
                None => match self.sq.peek() {
                    None => return self.cq.flush(env),
                    Some(Ok(wqe)) => {
                        self.sq.advance(wqe.blocks);
                        (wqe, None)
                    }
                    Some(Err(BadWqe { cookie })) => {
                        self.sq.discard();
                        self.fail(qp, env, cookie, WcOpcode::Send, Some(WcStatus::LocQpOpErr))?;
                        continue;
                    }
                },
            };
            self.sq.retire(wqe.blocks);
            self.fail(qp, env, wqe.cookie, wqe.opcode.completion(), status)?;
        }
    }

    fn fail(
        &mut self,
        qp: &Identity,
        env: &mut Env<'_>,
        cookie: u64,
        opcode: WcOpcode,
        status: Option<WcStatus>,
    ) -> Result<(), Overflow> {
        let reason = status.or_else(|| self.flush_status.take());
        let mut cqe = qp.cqe(cookie, opcode, reason.unwrap_or(WcStatus::WrFlushErr));
        if reason.is_some() {
            cqe.vendor_error = std::mem::take(&mut self.vendor_error).into();
        }
        self.cq.push(cqe, env)
    }
}
