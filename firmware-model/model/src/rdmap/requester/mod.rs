//! Work requests become messages.

mod local_peer;

use super::confirmation::{ANY_STAG, Confirmation};
use super::confirming::MARK;
use super::terminate::OffendingRequest;
use crate::counters::Counter;
use crate::llp::mpa::{FpduSender, MAX_SHORT};
use crate::llp::{Head, Llp};
use crate::memory::{Invalidable, InvalidateBy, MemoryAccess, Need, Violation, Window};
use crate::queues::{BadWqe, CompletionQueue, Overflow, SendQueue, SendWqe};
use crate::rdmap::attachment::Rtr;
use crate::stream::Stream;
use crate::stream::same_host::LocalPeer;
use crate::transport::Env;
use crate::transport::completions::Completions;
use crate::transport::placement::{self, Cursor};
use crate::tuning::ACCESS_MAX;
use std::collections::VecDeque;
use std::sync::{Arc, Once};
use urnic_device::vocabulary::{WcOpcode, WcStatus};
use urnic_device::wqe::{Opcode, SendFlags};
use urnic_wire::ddp::{TAGGED_LEN, TaggedHeader, UNTAGGED_LEN, UntaggedHeader};
use urnic_wire::rdmap::{
    AtomicOperation, AtomicRequest, Control, ImmediateData, Opcode as Message, QN_READ_REQUEST, QN_SEND,
    ReadRequest, TerminateError,
};

/// Longest message (verbs: 2^31 bytes).
const MAX_MESSAGE: u64 = 1 << 31;

/// Last four bytes of Immediate Data that belongs to the Send right after it. RFC 7306 gives
/// immediates eight bytes and verbs has four; cxgb4 leaves the other four zero (row X73-10). Verbs'
/// Send with immediate is one receive at the peer, for which RFC 7306 has no message: a peer that
/// does not implement this mark completes two receives.
pub(super) const WITH_NEXT_SEND: [u8; 4] = *b"SEND";

/// Limits the log to one line on connections whose requests cannot be confirmed.
static UNCONFIRMED: Once = Once::new();

/// The result of an attempt to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// A ULPDU was framed, or a local request carried out; `ended`: no message is in flight.
    Done { ended: bool },
    /// There is no message to send now.
    Idle,
    /// A request failed locally: it is marked, and the queue pair must end.
    Failed,
}

/// The requester of a queue pair.
#[derive(Debug)]
pub(super) struct Requester {
    pub(super) sq: SendQueue,
    pub(super) cq: Completions,
    pub(super) flights: Flights,
    pub(super) reads: Reads,
    pub(super) confirmation: Confirmation,
    /// The peer, if it shares memory with us.
    pub(super) local_peer: Option<LocalPeer>,
    /// The last attempt to access the peer's memory succeeded.
    worth_draining: bool,
    /// The cost of direct accesses to the local peer's memory, in ULPDUs.
    direct_cost: u32,
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
    /// The status of the next flushed request, once, instead of the usual one.
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
            confirmation: Confirmation::default(),
            local_peer: None,
            worth_draining: true,
            direct_cost: 0,
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

    /// Begins a stream, which may not be the first one: the first message on queue 0 has this MSN.
    pub(super) fn begin(&mut self, first_msn: u32, confirmation: Confirmation) {
        (self.msn, self.first_receive) = (first_msn, first_msn);
        (self.filled, self.confirmation) = (Filled::default(), confirmation);
    }

    /// Whether a message is partly framed: no other message may be framed between its segments (row
    /// DDP-S-11).
    #[inline]
    pub(super) fn is_within_message(&self) -> bool {
        self.sending.is_some()
    }

    /// The number of requests in flight, and the opcode of the oldest.
    pub(super) fn in_flight(&self) -> (usize, Option<Opcode>) {
        let (count, oldest) = self.flights.in_flight();
        let sending = self.sending.as_ref().map(|sending| sending.wqe.opcode);
        (count + usize::from(sending.is_some()), oldest.or(sending))
    }

    /// The length of the transfer in flight, and how much of it is done, in bytes.
    pub(super) fn transfer(&self) -> (u32, u32) {
        let sending = self.sending.as_ref();
        let read = self.reads.transfer();
        read.or_else(|| sending.map(|sending| (sending.len, sending.sent)))
            .unwrap_or_default()
    }

    /// Whether any request would remain incomplete if all bytes that the stream took, up to
    /// `taken`, arrived.
    pub(super) fn is_outstanding(&self, taken: u64) -> bool {
        !self.flights.are_complete(taken) || self.sending.is_some() || self.sq.has_posted()
    }

    /// Frames the next ULPDU; the lower layer has room for it.
    #[inline]
    pub(super) fn step(&mut self, env: &mut Env<'_>, llp: &mut Llp) -> Step {
        if let Some(sending) = self.sending.take() {
            return self.proceed(sending, env, llp);
        }
        if self.confirmation.is_read_due(self.sq.is_half_used()) && self.confirm_by_read(env, llp) {
            return Step::Done { ended: true };
        }
        match self.start(env, llp) {
            Step::Idle if self.confirmation.is_read_wanted() && self.confirm_by_read(env, llp) => {
                Step::Done { ended: true }
            }
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

    /// Sends a Read whose answer confirms the messages before it. Returns whether that was
    /// possible.
    fn confirm_by_read(&mut self, env: &Env<'_>, llp: &mut Llp) -> bool {
        if self.ord_limit() == 0 {
            self.confirmation.give_up();
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
            let position = self.frame_empty_read(MARK, env, llp);
            self.confirmation.own_read_sent(position);
        }
        possible
    }

    #[inline]
    fn start(&mut self, env: &mut Env<'_>, llp: &mut Llp) -> Step {
        let wqe = match self.sq.peek() {
            _ if self.has_failed => return Step::Idle,
            None => return Step::Idle,
            // `flush` finds the entry again and completes it.
            Some(Err(BadWqe { .. })) => return Step::Failed,
            Some(Ok(wqe)) => wqe,
        };
        let reads = self.reads.len().saturating_sub(self.confirmation.own_reads());
        if wqe.flags.contains(SendFlags::FENCE) && reads > 0 {
            return Step::Idle;
        }
        match wqe.opcode {
            Opcode::LocalInv => {
                llp.rest(env.memory);
                let done = self.invalidate(wqe.stag, env);
                return self.local(wqe, done);
            }
            Opcode::BindMw => {
                llp.rest(env.memory);
                let done = env
                    .memory_to_revoke()
                    .bind(&self.sq.bind(&wqe), env.qp.pd, env.qp.qid);
                return self.local(wqe, done.map_err(|_| WcStatus::MwBindErr));
            }
            Opcode::Read | Opcode::ReadInv | Opcode::CompareSwap | Opcode::FetchAdd => {
                if self.ord == 0 || env.qp.unreliable {
                    return self.refuse(wqe, WcStatus::LocQpOpErr);
                }
                if reads >= self.ord as usize || !self.may_request() {
                    return Step::Idle;
                }
                return match wqe.opcode {
                    Opcode::Read | Opcode::ReadInv => self.read(wqe, env, llp),
                    _ => self.request(wqe, env, llp),
                };
            }
            Opcode::SendInv if env.qp.unreliable => return self.refuse(wqe, WcStatus::LocQpOpErr),
            Opcode::Send | Opcode::SendInv | Opcode::SendImm | Opcode::Write | Opcode::WriteImm => {}
        }
        let len = self.payload_len(&wqe);
        if len > MAX_MESSAGE {
            return self.refuse(wqe, WcStatus::LocLenErr);
        }
        if wqe.opcode == Opcode::Write {
            if self.is_to_wait(len, llp) {
                return Step::Idle;
            }
            if let Some(step) = self.run(&wqe, env, llp) {
                return step;
            }
        }
        if wqe.opcode == Opcode::Send {
            self.fill_receives(&wqe, len, env, llp);
        }
        self.proceed(Sending::new(wqe, len as u32), env, llp)
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
                self.put_in_flight(wqe, 0, 0, Wait::Done);
                Step::Done { ended: true }
            }
            Err(status) => self.refuse(wqe, status),
        }
    }

    /// Invalidates a STag for a work request. A NIC for RoCE reports a refusal as it does that of a
    /// bind.
    pub(super) fn invalidate(&self, stag: u32, env: &Env<'_>) -> Result<(), WcStatus> {
        let what = env.qp.invalidable();
        env.memory_to_revoke()
            .invalidate(stag, env.qp.accessor(), InvalidateBy::Local, what)
            .map_err(|_| match what {
                Invalidable::All => WcStatus::LocProtErr,
                Invalidable::OwnWindows => WcStatus::MwBindErr,
            })
    }

    fn refuse(&mut self, wqe: SendWqe, status: WcStatus) -> Step {
        self.put_in_flight(wqe, 0, 0, Wait::Failed(status));
        Step::Failed
    }

    /// Makes the oldest request that `offending` names fail, which may be the one that is partly
    /// framed. Returns whether there is one.
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
    fn put_in_flight(&mut self, wqe: SendWqe, msn: u32, len: u32, wait: Wait) -> u64 {
        self.sq.advance(wqe.blocks);
        self.flights.push(Flight { wqe, msn, len, wait })
    }

    /// Frames the next ULPDU of a Send or Write.
    #[inline]
    fn proceed(&mut self, mut sending: Sending, env: &mut Env<'_>, llp: &mut Llp) -> Step {
        if matches!(sending.wqe.opcode, Opcode::Read | Opcode::ReadInv) {
            return self.fetch(sending, env, llp);
        }
        let position;
        if !sending.immediate_sent {
            position = self.frame_immediate(&sending.wqe, WITH_NEXT_SEND, false, env, llp);
            self.first_receive = self.first_receive.wrapping_add(1);
            sending.immediate_sent = true;
        } else if !sending.payload_done {
            match self.place(&mut sending, env, llp) {
                // A Send whose payload is in its place has a message without payload, which is
                // sealed.
                Ok(true) if sending.payload_done || sending.sent < sending.len => position = llp.sealed(),
                Ok(_) => match self.frame_payload(&mut sending, env, llp) {
                    Ok(sealed) => position = sealed,
                    Err(status) => {
                        llp.cancel();
                        // The immediate of a Send is a message of its own. A peer of kind UC would
                        // take it for the immediate of the next Send.
                        let split = env.qp.unreliable && sending.wqe.opcode == Opcode::SendImm;
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
        self.confirmation.sent(position, signaled);
        self.put_in_flight(sending.wqe, msn, sending.len, Wait::Taken(position));
        Step::Done { ended: true }
    }

    /// Handles the full answer to the oldest Read or atomic.
    pub(super) fn answered(&mut self, env: &Env<'_>) -> Result<(), WcStatus> {
        let Some(pending) = self.reads.pop() else {
            return Ok(());
        };
        self.confirmation.answered(pending.position);
        let Some((number, wqe)) = pending.request else {
            return Ok(());
        };
        let wait = self.fetched(&wqe, env);
        self.flights.set(number, wait);
        match wait {
            Wait::Failed(status) => Err(status),
            _ => Ok(()),
        }
    }

    /// Makes the oldest Read or atomic, to which an answer has arrived, fail because of an error on
    /// this side. The peer has processed all messages before it.
    pub(super) fn fail_answer(&mut self, status: WcStatus) {
        let Some(pending) = self.reads.front() else {
            return;
        };
        self.confirmation.answered(pending.position);
        if let Some((number, _)) = pending.request {
            self.flights.set(number, Wait::Failed(status));
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
                self.put_in_flight(sending.wqe, 0, 0, Wait::Failed(status));
            }
            None => self.flush_status = Some(status),
        }
    }

    /// Completes all finished requests; `taken` is the position up to which the result of the sent
    /// bytes is known.
    #[inline]
    pub(super) fn complete(&mut self, env: &mut Env<'_>, taken: u64) -> Result<(), Overflow> {
        while let Some(Flight { wqe, len, .. }) = self.flights.pop_complete(taken) {
            // The blocks are released first, because a program may post as soon as it polls the
            // completion.
            self.sq.retire(wqe.blocks);
            if wqe.flags.contains(SendFlags::SIGNALED) {
                let opcode = wqe.opcode.completion();
                let mut cqe = env.qp.cqe(wqe.cookie, opcode, WcStatus::Success);
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

    /// Kind UC: the stream ended. Messages that it did not take count as sent; returns their
    /// number.
    pub(super) fn drop_flights(&mut self, taken: u64) -> u64 {
        (self.msn, self.request_msn) = (1, 1);
        self.reads.clear();
        let dropped = self.flights.drop_untaken(taken);
        match self.sending.take() {
            Some(sending) => {
                self.put_in_flight(sending.wqe, 0, sending.len, Wait::Done);
                dropped + 1
            }
            None => dropped,
        }
    }

    /// Completes everything in error, in order; `taken` as for [`complete`](Self::complete).
    pub(super) fn flush(&mut self, env: &mut Env<'_>, taken: u64) -> Result<(), Overflow> {
        self.sending = None;
        self.reads.clear();
        // After the first request that fails, requests that would be complete fail, too.
        self.complete(env, taken)?;
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
                        self.fail(env, cookie, WcOpcode::Send, Some(WcStatus::LocQpOpErr))?;
                        continue;
                    }
                },
            };
            self.sq.retire(wqe.blocks);
            self.fail(env, wqe.cookie, wqe.opcode.completion(), status)?;
        }
    }

    fn fail(
        &mut self,
        env: &mut Env<'_>,
        cookie: u64,
        opcode: WcOpcode,
        status: Option<WcStatus>,
    ) -> Result<(), Overflow> {
        let reason = status.or_else(|| self.flush_status.take());
        let mut cqe = env.qp.cqe(cookie, opcode, reason.unwrap_or(WcStatus::WrFlushErr));
        if reason.is_some() {
            cqe.vendor_error = std::mem::take(&mut self.vendor_error).into();
        }
        self.cq.push(cqe, env)
    }
}

// A request that is being sent, and the payload that is already in its place.

/// A work request of which some segments may be framed.
#[derive(Debug, Clone)]
struct Sending {
    wqe: SendWqe,
    /// The length of the request's payload.
    len: u32,
    /// Bytes of the work request that are framed.
    sent: u32,
    cursor: Cursor,
    /// Whether the immediate before the payload is framed.
    immediate_sent: bool,
    /// Whether the payload is framed, or placed, to its end.
    payload_done: bool,
    /// The number of the peer's receive that was filled, at least in part; or 0.
    receive: u32,
    /// Whether a segment of the payload is framed.
    framed: bool,
}

impl Sending {
    #[inline]
    fn new(wqe: SendWqe, len: u32) -> Sending {
        Sending {
            len,
            sent: 0,
            cursor: Cursor::default(),
            immediate_sent: wqe.opcode != Opcode::SendImm,
            payload_done: false,
            receive: 0,
            framed: false,
            wqe,
        }
    }
}

/// The next requests, if their payload is in the peer's receives already.
#[derive(Debug, Default)]
struct Filled {
    requests: u32,
    /// The number of the receive that has the first request's payload.
    receive: u32,
}

impl Filled {
    /// The first request's receive is number `receive`.
    fn new(requests: u32, receive: u32) -> Filled {
        Filled { requests, receive }
    }

    #[inline]
    fn is_empty(&self) -> bool {
        self.requests == 0
    }

    /// Takes the next request out of the filled ones; returns the number of the receive that has
    /// its payload.
    #[inline]
    fn next(&mut self) -> Option<u32> {
        self.requests = self.requests.checked_sub(1)?;
        let receive = self.receive;
        self.receive = receive.wrapping_add(1);
        Some(receive)
    }
}

// Messages of a requester, segment by segment.

impl Requester {
    /// Frames the next segment of the payload.
    #[inline]
    fn frame_payload(
        &mut self,
        sending: &mut Sending,
        env: &mut Env<'_>,
        llp: &mut Llp,
    ) -> Result<u64, WcStatus> {
        let wqe = &sending.wqe;
        let left = (sending.len - sending.sent) as usize;
        let tagged = matches!(wqe.opcode, Opcode::Write | Opcode::WriteImm);
        let n = left.min(llp.mulpdu() - if tagged { TAGGED_LEN } else { UNTAGGED_LEN });
        let last = n == left;
        if tagged {
            let header = TaggedHeader {
                last,
                rsvd_ulp: Control::from(Message::Write).byte(),
                stag: wqe.stag,
                to: wqe.remote_offset.wrapping_add(sending.sent.into()),
            };
            llp.open(env.buffers, header, n);
        } else {
            let (message, invalidate) = send_message(wqe);
            let header = UntaggedHeader {
                last,
                rsvd_ulp: Control::from(message).byte(),
                // A Send that invalidates has no receive filled.
                rsvd_ulp_word: invalidate | sending.receive,
                qn: QN_SEND,
                msn: self.msn,
                mo: sending.sent,
            };
            llp.open(env.buffers, header, n);
        }
        if wqe.flags.contains(SendFlags::INLINE) {
            self.sq.inline(wqe, sending.sent as usize, llp.put(n));
        } else {
            let list = |index| self.sq.element(wqe, index);
            let mut left = n;
            while left > 0 {
                let access = sending.cursor.access(&list, left, Need::LocalRead);
                let access = access.ok_or(WcStatus::LocProtErr)?;
                let n = access.len as usize;
                let window = env
                    .memory
                    .check_again(&env.recent, env.qp.accessor(), access)
                    .map_err(|_| WcStatus::LocProtErr)?;
                llp.gather(&window, 0, n).map_err(|_| WcStatus::LocProtErr)?;
                window.keep(&env.recent);
                sending.cursor.advance(n);
                left -= n;
            }
        }
        sending.sent += n as u32;
        sending.framed = true;
        sending.payload_done = last;
        if last && !tagged {
            self.msn = self.msn.wrapping_add(1);
        }
        Ok(llp.seal())
    }

    /// Frames an Immediate Data message (RFC 7306 §6).
    fn frame_immediate(
        &mut self,
        wqe: &SendWqe,
        rest: [u8; 4],
        solicited: bool,
        env: &Env<'_>,
        llp: &mut Llp,
    ) -> u64 {
        let message = if solicited {
            Message::ImmediateSolicited
        } else {
            Message::Immediate
        };
        self.open_untagged(message, QN_SEND, self.msn, ImmediateData::LEN, env, llp);
        let place = llp.put(ImmediateData::LEN);
        place[..4].copy_from_slice(&wqe.immediate);
        place[4..].copy_from_slice(&rest);
        self.msn = self.msn.wrapping_add(1);
        llp.seal()
    }

    /// Opens a message of one segment with a fixed header.
    fn open_untagged(&self, message: Message, qn: u32, msn: u32, len: usize, env: &Env<'_>, llp: &mut Llp) {
        let header = UntaggedHeader {
            last: true,
            rsvd_ulp: Control::from(message).byte(),
            rsvd_ulp_word: 0,
            qn,
            msn,
            mo: 0,
        };
        llp.open(env.buffers, header, len);
    }

    /// Frames the request of a Read or an atomic.
    fn request(&mut self, wqe: SendWqe, env: &mut Env<'_>, llp: &mut Llp) -> Step {
        let len = self.payload_len(&wqe);
        if len > MAX_MESSAGE {
            return self.refuse(wqe, WcStatus::LocLenErr);
        }
        // The sink is checked when the answer is placed, and not before: as with an adapter, the
        // peer carries out the request, and its refusal counts before ours.
        let mut elements = (0..).map_while(|n| self.sq.element(&wqe, n));
        let sink = elements.find(|sge| sge.len.get() > 0);
        // The peer sees one contiguous sink, named by the list's first element: the payload is
        // placed by its distance from there (row RDM-R-08).
        let (sink_stag, sink_to) = sink.map_or((ANY_STAG, 0), |sge| (sge.stag.get(), sge.offset.get()));
        let msn = self.request_msn;
        let answer = match self.atomic(&wqe, msn) {
            Some(_) if len != 8 => return self.refuse(wqe, WcStatus::LocLenErr),
            Some(request) => {
                self.open_untagged(
                    Message::AtomicRequest,
                    QN_READ_REQUEST,
                    msn,
                    AtomicRequest::LEN,
                    env,
                    llp,
                );
                request.emit(llp.put(AtomicRequest::LEN));
                Answer::Atomic(request.request_id)
            }
            None => {
                self.open_untagged(
                    Message::ReadRequest,
                    QN_READ_REQUEST,
                    msn,
                    ReadRequest::LEN,
                    env,
                    llp,
                );
                let request = ReadRequest {
                    sink_stag,
                    sink_to,
                    size: len as u32,
                    source_stag: wqe.stag,
                    source_to: wqe.remote_offset,
                };
                request.emit(llp.put(ReadRequest::LEN));
                Answer::Read
            }
        };
        let position = llp.seal();
        env.counters.add(Counter::TxMessages, 1);
        self.confirmation.requested(position);
        self.request_msn = msn.wrapping_add(1);
        let number = self.put_in_flight(wqe, msn, len as u32, Wait::Answer);
        self.reads.push(Pending {
            answer,
            request: Some((number, wqe)),
            position,
            sink_stag,
            sink_to,
            len: len as u32,
            placed: 0,
            cursor: Cursor::default(),
        });
        Step::Done { ended: true }
    }

    fn atomic(&self, wqe: &SendWqe, request_id: u32) -> Option<AtomicRequest> {
        if !matches!(wqe.opcode, Opcode::FetchAdd | Opcode::CompareSwap) {
            return None;
        }
        let operands = self.sq.atomic(wqe);
        let operation = match wqe.opcode {
            Opcode::FetchAdd => AtomicOperation::FetchAdd {
                add: operands.compare_add.get(),
                mask: 0,
            },
            _ => AtomicOperation::CmpSwap {
                swap: operands.swap.get(),
                swap_mask: u64::MAX,
                compare: operands.compare_add.get(),
                compare_mask: u64::MAX,
            },
        };
        Some(AtomicRequest {
            operation,
            request_id,
            stag: wqe.stag,
            to: wqe.remote_offset,
        })
    }

    /// Frames the RTR (RFC 6581 §9.2): a message that no program posted and that completes for no
    /// program.
    pub(in crate::rdmap) fn frame_rtr(&mut self, rtr: Rtr, env: &Env<'_>, llp: &mut Llp) {
        match rtr {
            Rtr::Send => {
                self.open_untagged(Message::Send, QN_SEND, self.msn, 0, env, llp);
                self.msn = self.msn.wrapping_add(1);
                self.first_receive = self.first_receive.wrapping_add(1);
            }
            Rtr::Write => {
                let header = TaggedHeader {
                    last: true,
                    rsvd_ulp: Control::from(Message::Write).byte(),
                    stag: ANY_STAG,
                    to: 0,
                };
                llp.open(env.buffers, header, 0);
            }
            Rtr::Read => {
                self.frame_empty_read(0, env, llp);
                return;
            }
        }
        llp.seal();
    }

    /// Frames a Read of length zero that no program posted; returns the position after it. `mark`
    /// is its source offset, which no peer may check.
    fn frame_empty_read(&mut self, mark: u64, env: &Env<'_>, llp: &mut Llp) -> u64 {
        let msn = self.request_msn;
        self.open_untagged(
            Message::ReadRequest,
            QN_READ_REQUEST,
            msn,
            ReadRequest::LEN,
            env,
            llp,
        );
        let request = ReadRequest {
            sink_stag: ANY_STAG,
            sink_to: 0,
            size: 0,
            source_stag: ANY_STAG,
            source_to: mark,
        };
        request.emit(llp.put(ReadRequest::LEN));
        self.request_msn = msn.wrapping_add(1);
        let position = llp.seal();
        self.reads.push(Pending {
            answer: Answer::Read,
            request: None,
            position,
            sink_stag: ANY_STAG,
            sink_to: 0,
            len: 0,
            placed: 0,
            cursor: Cursor::default(),
        });
        position
    }
}

/// The message of a Send, and the STag it invalidates.
#[inline]
fn send_message(wqe: &SendWqe) -> (Message, u32) {
    let solicited = wqe.flags.contains(SendFlags::SOLICITED);
    match (wqe.opcode, solicited) {
        (Opcode::SendInv, false) => (Message::SendInvalidate, wqe.stag),
        (Opcode::SendInv, true) => (Message::SendSolicitedInvalidate, wqe.stag),
        (_, false) => (Message::Send, 0),
        (_, true) => (Message::SendSolicited, 0),
    }
}

// The requester's part of the fast path: the only request that is posted. A request that is not
// simple (several extents, a fence, an error, others after it) is left to the usual path, which
// starts with it again.

impl Requester {
    /// The next request, if no other one is posted, and if its completion does not depend on the
    /// stream.
    #[inline]
    pub(in crate::rdmap) fn only_request(&mut self) -> Option<SendWqe> {
        if self.sending.is_some() || self.confirmation.is_by_reads() || self.local_peer.is_none() {
            return None;
        }
        let wqe = self.sq.peek()?.ok()?;
        self.sq.is_last(&wqe).then_some(wqe)
    }

    /// Carries out a Write or a Read, from its beginning to its completion, by one access to the
    /// peer's memory. `None`: that is not possible.
    #[inline]
    pub(in crate::rdmap) fn fast_access(
        &mut self,
        wqe: SendWqe,
        env: &mut Env<'_>,
        llp: &Llp,
    ) -> Option<Result<(), Overflow>> {
        let is_possible = self.flights.is_empty() && self.worth_draining && llp.is_flushed();
        let len = self.payload_len(&wqe);
        if !is_possible || len == 0 || len > ACCESS_MAX as u64 {
            return None;
        }
        let mut sending = Sending::new(wqe, len as u32);
        let done = match wqe.opcode {
            // `place` checks whether the memory can be accessed now.
            Opcode::Write => self.place(&mut sending, env, llp),
            Opcode::Read if self.ord > 0 && self.may_request() && self.is_direct(llp) => {
                Ok(self.fetch_some(&mut sending, env, llp))
            }
            _ => return None,
        };
        if done != Ok(true) {
            return None;
        }
        if sending.sent < sending.len {
            self.sending = Some(sending);
            return None;
        }
        self.direct_cost = 0;
        env.counters.add(Counter::TxMessages, 1);
        self.sq.advance(wqe.blocks);
        self.sq.retire(wqe.blocks);
        if !wqe.flags.contains(SendFlags::SIGNALED) {
            return Some(Ok(()));
        }
        let mut cqe = env.qp.cqe(wqe.cookie, wqe.opcode.completion(), WcStatus::Success);
        cqe.byte_len = sending.len.into();
        Some(self.cq.push_one(cqe, env))
    }

    /// Sends a short Send, which completes when the peer has confirmed it. `None`: the Send is not
    /// short.
    #[inline(always)]
    pub(in crate::rdmap) fn fast_send(
        &mut self,
        wqe: SendWqe,
        env: &mut Env<'_>,
        tx: &mut FpduSender,
        stream: &mut dyn Stream,
    ) -> Option<()> {
        let is_possible = self.confirmation.is_by_word()
            && wqe.num_sge <= 1
            && !wqe.flags.contains(SendFlags::FENCE)
            && tx.is_plain_and_flushed();
        let sge = self.sq.sge(&wqe, 0);
        let len = match wqe.flags.contains(SendFlags::INLINE) {
            true => wqe.inline_len,
            false => sge.len.get(),
        };
        if !is_possible || len > MAX_SHORT as u32 {
            return None;
        }
        let (message, invalidate) = send_message(&wqe);
        let header = UntaggedHeader {
            last: true,
            rsvd_ulp: Control::from(message).byte(),
            rsvd_ulp_word: invalidate,
            qn: QN_SEND,
            msn: self.msn,
            mo: 0,
        };
        let fill = |place: &mut [u8]| match wqe.flags.contains(SendFlags::INLINE) {
            true => {
                self.sq.inline(&wqe, 0, place);
                Some(())
            }
            false if place.is_empty() => Some(()),
            false => {
                let access = MemoryAccess::of_element(&sge, Need::LocalRead);
                let window = env.memory.check(env.qp.accessor(), access);
                window.ok()?.copy_out(0, place).ok()
            }
        };
        let position = tx.send_short(env.buffers, &Head::from(header), len as usize, fill, stream)?;
        self.msn = self.msn.wrapping_add(1);
        env.counters.add(Counter::TxMessages, 1);
        env.counters.add(Counter::TxFpdus, 1);
        self.put_in_flight(wqe, self.msn.wrapping_sub(1), len, Wait::Taken(position));
        Some(())
    }
}

// Work requests in flight: executed, not yet complete. They complete in the order in which they
// were posted (RFC 5040 §5.5(15)).

/// The event that a work request waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    /// The request waits until the stream has taken all bytes up to this position.
    Taken(u64),
    /// The request waits for the peer's answer.
    Answer,
    /// The request waits for the flights before it.
    Done,
    /// The request waits for the flights before it, and then fails.
    Failed(WcStatus),
    /// The connection ended before the peer confirmed the request.
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

/// A work request in flight.
#[derive(Debug, Clone)]
pub(super) struct Flight {
    pub(super) wqe: SendWqe,
    /// MSN of the request's message, on the queue that the opcode uses.
    pub(super) msn: u32,
    /// Bytes of the request's message.
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

    /// Adds the newest flight; returns its number.
    #[inline]
    pub(super) fn push(&mut self, flight: Flight) -> u64 {
        self.queue.push_back(flight);
        self.landed + self.queue.len() as u64 - 1
    }

    /// The oldest flight that `offending` names.
    pub(super) fn named_by(&self, offending: OffendingRequest) -> Option<&Flight> {
        self.queue.iter().find(|flight| flight.is_named_by(offending))
    }

    /// The number of requests in flight, and the opcode of the oldest.
    pub(super) fn in_flight(&self) -> (usize, Option<Opcode>) {
        (
            self.queue.len(),
            self.queue.front().map(|flight| flight.wqe.opcode),
        )
    }

    /// The oldest request that failed, and its status.
    pub(super) fn failed(&self) -> Option<(&SendWqe, WcStatus)> {
        self.queue.iter().find_map(|flight| match flight.wait {
            Wait::Failed(status) => Some((&flight.wqe, status)),
            _ => None,
        })
    }

    /// Changes the event that request number `n` waits for.
    pub(super) fn set(&mut self, n: u64, wait: Wait) {
        let index = n.checked_sub(self.landed).and_then(|i| usize::try_from(i).ok());
        if let Some(flight) = index.and_then(|i| self.queue.get_mut(i)) {
            flight.wait = wait;
        }
    }

    /// Makes the oldest request that `offending` names fail. Returns whether there is one. The peer
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

    /// Makes the oldest request fail that the stream has not taken to its end. Returns whether
    /// there is one.
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

    /// The connection ends: sent requests that end up to `known` have succeeded.
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

    /// Completes all sent messages, although the stream has taken only the bytes up to `taken`;
    /// returns the number of messages that the stream has not taken.
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

// Reads and atomics that wait for the peer's answers, which come in the order of the requests (RFC
// 5040 §5.5, RFC 7306 §5.3). A Response is accepted only if it fits the oldest request (row
// RDM-R-07): so a peer cannot write to any other memory by it.

/// The kind of the answer to a request.
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
    /// The position in the stream after the request.
    pub(super) position: u64,
    /// The STag of the sink, as sent to the peer.
    pub(super) sink_stag: u32,
    pub(super) sink_to: u64,
    /// Bytes requested.
    pub(super) len: u32,
    /// Bytes that arrived.
    pub(super) placed: u32,
    pub(super) cursor: Cursor,
}

impl Pending {
    /// Where `len` bytes of a Response with this header belong in the sink, if they do and are
    /// missing.
    fn offset_of(&self, header: &TaggedHeader, len: usize) -> Option<usize> {
        self.request.as_ref()?;
        let missing = self.placed as usize..self.len as usize;
        let at = usize::try_from(header.to.checked_sub(self.sink_to)?).ok()?;
        let end = at.checked_add(len)?;
        let fits = self.answer == Answer::Read
            && header.stag == self.sink_stag
            && missing.start <= at
            && end <= missing.end
            && header.last == (end == missing.end);
        fits.then_some(at)
    }
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

    /// The oldest pending request, which is answered next.
    pub(super) fn front(&self) -> Option<&Pending> {
        self.0.front()
    }

    /// The length of the oldest pending request and the bytes that arrived, if it is a Read of the
    /// program.
    pub(super) fn transfer(&self) -> Option<(u32, u32)> {
        let is_read = |pending: &&Pending| pending.answer == Answer::Read && pending.request.is_some();
        self.0.front().filter(is_read).map(|read| (read.len, read.placed))
    }

    /// Takes the oldest pending request, which is answered.
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

    /// Whether the oldest Read was posted by no program. soft-iWARP sometimes answers a Read of
    /// length zero with a byte: the answer to such a Read is discarded.
    pub(super) fn is_discarded(&self) -> bool {
        self.0.front().is_some_and(|pending| pending.request.is_none())
    }

    /// Places bytes of the Response that was checked.
    pub(super) fn place(&mut self, env: &Env<'_>, sq: &SendQueue, bytes: &[u8]) -> Result<(), Violation> {
        if self.is_discarded() {
            return Ok(());
        }
        let Some(pending) = self.0.front_mut() else {
            return Err(Violation::Bounds);
        };
        let list = |n| pending.request.as_ref().and_then(|(_, wqe)| sq.element(wqe, n));
        placement::scatter(env.qp.pd, env, list, &mut pending.cursor, bytes)?;
        pending.placed += bytes.len() as u32;
        Ok(())
    }

    /// Places the payload of a Response that comes before its turn, if it fits exactly one Read.
    pub(super) fn place_early(
        &self,
        env: &Env<'_>,
        sq: &SendQueue,
        header: &TaggedHeader,
        payload: &[u8],
    ) -> Option<()> {
        let mut fitting = self.0.iter().filter_map(|pending| {
            let at = pending.offset_of(header, payload.len())?;
            Some((pending, at))
        });
        let (pending, at) = fitting.next()?;
        if fitting.next().is_some() {
            return None;
        }
        let list = |n| pending.request.as_ref().and_then(|(_, wqe)| sq.element(wqe, n));
        let mut cursor = Cursor::of_byte(&list, at)?;
        placement::scatter(env.qp.pd, env, list, &mut cursor, payload).ok()
    }

    /// Passes over `len` bytes of the Response that was checked, which were placed before its turn.
    pub(super) fn pass(&mut self, env: &Env<'_>, sq: &SendQueue, len: usize) -> Result<(), Violation> {
        if self.is_discarded() {
            return Ok(());
        }
        let Some(pending) = self.0.front_mut() else {
            return Err(Violation::Bounds);
        };
        let list = |n| pending.request.as_ref().and_then(|(_, wqe)| sq.element(wqe, n));
        placement::pass(env.qp.pd, env, list, &mut pending.cursor, len)?;
        pending.placed += len as u32;
        Ok(())
    }

    /// The place of the next bytes of the Read, at most `max`.
    pub(super) fn window<'t>(
        &mut self,
        env: &Env<'t>,
        sq: &SendQueue,
        max: usize,
    ) -> Result<(Window<'t>, usize), Violation> {
        let Some(pending) = self.0.front_mut() else {
            return Err(Violation::Bounds);
        };
        let list = |n| pending.request.as_ref().and_then(|(_, wqe)| sq.element(wqe, n));
        placement::window(env.qp.pd, env, &list, &mut pending.cursor, max)
    }

    /// Notes that `n` bytes were placed in the oldest Read's sink.
    pub(super) fn placed(&mut self, n: usize) {
        if let Some(pending) = self.0.front_mut() {
            pending.cursor.advance(n);
            pending.placed += n as u32;
        }
    }
}
