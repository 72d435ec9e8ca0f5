//! Messages from the peer: Sends and Immediates into receives, Writes into memory, requests into
//! the queue of answers.

use super::answers::Answers;
use super::confirming::Confirming;
use super::terminate;
use super::terminate::Received;
use crate::counters::Counter;
use crate::memory::{InvalidateBy, MemoryAccess, Need, Violation, Window};
use crate::queues::{BadWqe, CompletionQueue, Overflow, ReceiveSource, RecvWqe};
use crate::rdmap::attachment::WithoutReceive;
use crate::transport::Env;
use crate::transport::completions::Completions;
use crate::transport::placement;
use crate::transport::placement::Cursor;
use std::sync::Arc;
use urnic_device::cqe::{Cqe, CqeFlags};
use urnic_device::event::{Event, EventKind};
use urnic_device::vocabulary::{Access, WcOpcode, WcStatus};
use urnic_wire::ddp::{TaggedHeader, UntaggedHeader};
use urnic_wire::rdmap::{HeaderError, Opcode, PlacementError, ReadRequest, SegmentError, TerminateError};

/// Longest message (RFC 5041 §5.2).
const MAX_MESSAGE: u64 = u32::MAX as u64;

/// The reason why a segment is not taken.
#[derive(Debug)]
pub(super) enum Refusal {
    /// The segment waits for a receive to be posted; nothing of the segment was taken.
    Stall,
    /// The peer is at fault, and a Terminate reports it.
    Terminate(TerminateError),
    /// The answer to a request is well-formed, but the program's memory for it is refused.
    Sink(TerminateError),
    /// The peer is at fault in a Read Request; the Terminate includes its header.
    ReadRequest(TerminateError, ReadRequest),
    /// The peer's Terminate is malformed: the connection ends without a Terminate (row RDM-T-08).
    Silent,
    /// The message is the peer's Terminate.
    Terminated(Received),
    /// A completion queue is full.
    Overflow,
}

macro_rules! refuse_with_terminate {
    ($($error:ty),*) => { $(
        impl From<$error> for Refusal {
            fn from(error: $error) -> Refusal {
                Refusal::Terminate(error.into())
            }
        }
    )* };
}
refuse_with_terminate!(TerminateError, SegmentError, PlacementError, HeaderError);

/// The receive that a message fills.
#[derive(Debug)]
struct Receiving {
    opcode: Opcode,
    room: u64,
    placed: u64,
    cursor: Cursor,
    /// The message is dropped: its payload is not placed.
    dropped: bool,
}

/// The responder of a queue pair.
#[derive(Debug)]
pub(super) struct Responder {
    pub(super) rq: ReceiveSource,
    pub(super) cq: Completions,
    pub(super) answers: Answers,
    pub(super) confirming: Confirming,
    /// The remote rights of the queue pair.
    pub(super) access: Access,
    /// The receive being filled.
    wqe: RecvWqe,
    receiving: Option<Receiving>,
    /// The status of the receive being filled if it is flushed.
    flush_status: Option<WcStatus>,
    /// MSN of the next message on queue 0.
    pub(super) msn: u32,
    pub(super) without_receive: WithoutReceive,
    /// The peer may place payload of Sends in receives before the messages arrive.
    pub(super) peer_fills: bool,
    /// Messages that are dropped, with kind UC.
    pub(super) drops: Drops,
    /// Immediate data of the next Send.
    next_immediate: Option<[u8; 4]>,
    /// Bytes of the last Write, also while it is incomplete.
    written: u64,
    writing: bool,
}

impl Responder {
    pub(super) fn new(rq: ReceiveSource, cq: Arc<CompletionQueue>, drops: Drops) -> Responder {
        Responder {
            rq,
            cq: Completions::new(cq),
            answers: Answers::new(),
            confirming: Confirming::default(),
            access: Access::empty(),
            wqe: RecvWqe::default(),
            receiving: None,
            flush_status: None,
            msn: 1,
            without_receive: WithoutReceive::Refused,
            peer_fills: false,
            drops,
            next_immediate: None,
            written: 0,
            writing: false,
        }
    }

    /// Whether a message is partly received.
    pub(super) fn is_within_message(&self) -> bool {
        self.receiving.is_some()
    }

    /// Sets the state that results when `bytes` bytes of the current message have arrived.
    #[cfg(test)]
    pub(super) fn have_received(&mut self, bytes: u64) {
        match &mut self.receiving {
            Some(receiving) => receiving.placed = bytes,
            None => self.written = bytes,
        }
    }

    /// Whether a receive failed for a reason of this side.
    pub(super) fn is_at_fault(&self) -> bool {
        self.flush_status.is_some()
    }

    /// Accepts the RTR as a Send that no program sent (row EMPA-19).
    pub(super) fn swallow(&mut self) {
        self.msn = self.msn.wrapping_add(1);
    }

    /// Takes the next receive for a message.
    #[inline]
    fn take(&mut self, env: &mut Env<'_>, opcode: Opcode) -> Result<(), Refusal> {
        let receiving = |room, dropped| Receiving {
            opcode,
            room,
            placed: 0,
            cursor: Cursor::default(),
            dropped,
        };
        let taken = match self.drops.take_kept() {
            true => Some(Ok(())),
            false => self.rq.take(&mut self.wqe, env.effects),
        };
        match taken {
            Some(Ok(())) => {
                if self.without_receive == WithoutReceive::WaitsAtFirst {
                    self.without_receive = WithoutReceive::Refused;
                }
                self.receiving = Some(receiving(self.wqe.room(), false));
                Ok(())
            }
            Some(Err(BadWqe { .. })) => {
                self.receiving = Some(receiving(0, false));
                self.flush_status = Some(WcStatus::LocQpOpErr);
                Err(TerminateError::DdpLocalCatastrophic.into())
            }
            None if self.without_receive != WithoutReceive::Refused => Err(Refusal::Stall),
            None if self.drops.are_on() => {
                self.receiving = Some(receiving(0, true));
                Ok(())
            }
            None => {
                let what = match opcode {
                    Opcode::Immediate | Opcode::ImmediateSolicited => "immediate data",
                    _ => "a Send",
                };
                tracing::debug!(taken = self.rq.taken(), "{what} finds no receive posted");
                Err(TerminateError::DdpNoBuffer.into())
            }
        }
    }

    /// Checks a segment of a Send with `len` bytes of payload (row DDP-V-15: MSN, buffer, MO,
    /// length).
    #[inline(always)]
    pub(super) fn begin_send(
        &mut self,
        env: &mut Env<'_>,
        opcode: Opcode,
        header: &UntaggedHeader,
        len: usize,
    ) -> Result<(), Refusal> {
        if header.msn != self.msn {
            return Err(TerminateError::DdpInvalidMsn.into());
        }
        let is_first = self.receiving.is_none();
        if is_first {
            self.drops.begin_send();
            self.take(env, opcode)?;
        }
        let Some(receiving) = &mut self.receiving else {
            return Err(TerminateError::DdpNoBuffer.into());
        };
        if receiving.opcode != opcode {
            return Err(TerminateError::RdmapUnexpectedOpcode.into());
        }
        // The lower layer delivers in order, so there are no gaps (row DDP-S-08).
        let mo = u64::from(header.mo);
        if mo != receiving.placed {
            let first_room = self.wqe.first_room();
            let is_filled = self.peer_fills
                && is_first
                && header.mo <= first_room
                && header.rsvd_ulp_word == self.rq.taken().wrapping_sub(1);
            if !is_filled {
                return Err(TerminateError::DdpInvalidMo.into());
            }
            receiving.placed = mo;
            receiving.cursor.advance(header.mo as usize);
        }
        if mo + len as u64 > receiving.room.min(MAX_MESSAGE) {
            if self.drops.are_on() && mo + len as u64 <= MAX_MESSAGE {
                // The receive is for the next message.
                if !std::mem::replace(&mut receiving.dropped, true) {
                    self.drops.keep_receive();
                }
                return Ok(());
            }
            self.flush_status = Some(WcStatus::LocLenErr);
            return Err(TerminateError::DdpTooLong.into());
        }
        Ok(())
    }

    /// Places bytes of the Send that was checked.
    #[inline(always)]
    pub(super) fn place_send(&mut self, env: &Env<'_>, bytes: &[u8]) -> Result<(), Refusal> {
        let Some(receiving) = &mut self.receiving else {
            return Err(TerminateError::DdpNoBuffer.into());
        };
        if receiving.dropped {
            receiving.placed += bytes.len() as u64;
            return Ok(());
        }
        let sges = self.wqe.sges();
        let list = |n: usize| sges.get(n).copied();
        let pd = self.rq.pd(env.qp.pd);
        if placement::scatter(pd, env, list, &mut receiving.cursor, bytes).is_err() {
            return Err(self.fail_receive());
        }
        receiving.placed += bytes.len() as u64;
        Ok(())
    }

    /// The place of the next bytes of the Send, at most `max`; `None` if it is dropped.
    pub(super) fn send_window<'t>(
        &mut self,
        env: &Env<'t>,
        max: usize,
    ) -> Result<Option<(Window<'t>, usize)>, Refusal> {
        let Some(receiving) = &mut self.receiving else {
            return Err(TerminateError::DdpNoBuffer.into());
        };
        if receiving.dropped {
            return Ok(None);
        }
        let sges = self.wqe.sges();
        let list = |n: usize| sges.get(n).copied();
        let window = placement::window(self.rq.pd(env.qp.pd), env, &list, &mut receiving.cursor, max);
        window.map(Some).map_err(|_| self.fail_receive())
    }

    /// Notes that `n` bytes were placed in the receive.
    pub(super) fn send_placed(&mut self, n: usize) {
        if let Some(receiving) = &mut self.receiving {
            receiving.cursor.advance(n);
            receiving.placed += n as u64;
        }
    }

    /// The memory of the receive that is being filled is inaccessible, or does not match the
    /// receive.
    pub(super) fn fail_receive(&mut self) -> Refusal {
        self.flush_status = Some(WcStatus::LocProtErr);
        TerminateError::DdpLocalCatastrophic.into()
    }

    /// A segment of a Send is placed; the last one delivers it.
    #[inline(always)]
    pub(super) fn end_send(
        &mut self,
        env: &mut Env<'_>,
        opcode: Opcode,
        header: &UntaggedHeader,
    ) -> Result<(), Refusal> {
        if !header.last {
            return Ok(());
        }
        if self.receiving.as_ref().is_some_and(|receiving| receiving.dropped) {
            self.drop_message(env);
            return Ok(());
        }
        // No more than `MAX_MESSAGE`, by `begin_send`.
        let placed = self.receiving.as_ref().map_or(0, |r| r.placed) as u32;
        let mut cqe = env.qp.cqe(self.wqe.cookie, WcOpcode::Recv, WcStatus::Success);
        cqe.byte_len = placed.into();
        let mut flags = CqeFlags::empty();
        if opcode.invalidates() {
            // All segments of a message name the same STag (RFC 5041 §4.3). The STag of the last
            // segment counts.
            let stag = header.rsvd_ulp_word;
            let what = env.qp.invalidable();
            let done = env
                .memory_to_revoke()
                .invalidate(stag, env.qp.accessor(), InvalidateBy::Peer, what);
            if let Err(error) = done {
                self.flush_status = Some(WcStatus::RemInvReqErr);
                return Err(terminate::invalidation(error).into());
            }
            cqe.extra = stag.to_ne_bytes();
            flags |= CqeFlags::WITH_INV;
        } else if let Some(immediate) = self.next_immediate.take() {
            cqe.extra = immediate;
            flags |= CqeFlags::WITH_IMM;
        }
        self.deliver(env, cqe, flags, opcode.solicited())
    }

    /// An Immediate Data message (RFC 7306 §6) with these bytes.
    pub(super) fn immediate(
        &mut self,
        env: &mut Env<'_>,
        opcode: Opcode,
        header: &UntaggedHeader,
        bytes: [u8; 8],
    ) -> Result<(), Refusal> {
        let [a, b, c, d, rest @ ..] = bytes;
        if header.msn != self.msn || self.receiving.is_some() {
            return Err(TerminateError::DdpInvalidMsn.into());
        }
        if header.mo != 0 {
            return Err(TerminateError::DdpInvalidMo.into());
        }
        if !header.last {
            return Err(TerminateError::DdpTooLong.into());
        }
        if rest == super::requester::WITH_NEXT_SEND && self.next_immediate.is_none() {
            self.next_immediate = Some([a, b, c, d]);
            self.msn = self.msn.wrapping_add(1);
            return Ok(());
        }
        if self.drops.take_immediate() {
            // The immediate belongs to the Write that was dropped and counted.
            self.msn = self.msn.wrapping_add(1);
            return Ok(());
        }
        self.take(env, opcode)?;
        if self.receiving.as_ref().is_some_and(|receiving| receiving.dropped) {
            self.drop_message(env);
            return Ok(());
        }
        let mut cqe = env
            .qp
            .cqe(self.wqe.cookie, WcOpcode::RecvRdmaWithImm, WcStatus::Success);
        // No more than `MAX_MESSAGE`, by `begin_write`.
        cqe.byte_len = (self.written as u32).into();
        cqe.extra = [a, b, c, d];
        self.deliver(env, cqe, CqeFlags::WITH_IMM, opcode.solicited())
    }

    #[inline(always)]
    fn deliver(
        &mut self,
        env: &mut Env<'_>,
        mut cqe: Cqe,
        mut flags: CqeFlags,
        solicited: bool,
    ) -> Result<(), Refusal> {
        if solicited {
            flags |= CqeFlags::SOLICITED;
        }
        cqe.flags = flags.bits();
        self.receiving = None;
        self.written = 0;
        self.msn = self.msn.wrapping_add(1);
        self.confirming.message_processed();
        env.counters.add(Counter::RxMessages, 1);
        self.cq.push(cqe, env).map_err(|Overflow| Refusal::Overflow)
    }

    /// Drops the message for queue 0 whose last byte has arrived.
    #[cold]
    fn drop_message(&mut self, env: &Env<'_>) {
        self.receiving = None;
        self.next_immediate = None;
        self.written = 0;
        self.msn = self.msn.wrapping_add(1);
        env.counters.add(Counter::RxMessageDrops, 1);
    }

    /// Kind UC: checks the target of a segment of a Write, before a byte of it is placed. A Write
    /// without permission is dropped.
    pub(super) fn screen_write(&mut self, env: &Env<'_>, header: &TaggedHeader, len: usize) {
        let allowed = len == 0 || self.write_window(env, header.stag, header.to, len).is_ok();
        self.drops.begin_write(allowed);
    }

    /// Kind UC: ends a Write that is dropped. Returns whether the Write was dropped.
    pub(super) fn end_dropped_write(&mut self, env: &Env<'_>, last: bool) -> bool {
        let dropped = self.drops.end_write(last);
        if dropped && last {
            (self.written, self.writing) = (0, false);
            env.counters.add(Counter::RxMessageDrops, 1);
        }
        dropped
    }

    /// Kind UC: the stream ended. A message of which a part has arrived is dropped, and its receive
    /// is for the next message.
    pub(super) fn part(&mut self, env: &Env<'_>) {
        if let Some(receiving) = self.receiving.take() {
            if !receiving.dropped {
                self.drops.keep_receive();
            }
            env.counters.add(Counter::RxMessageDrops, 1);
        }
        self.drops.begin_stream();
        (self.next_immediate, self.written, self.writing) = (None, 0, false);
        self.msn = 1;
        self.answers = Answers::new();
    }

    /// The place of `len` bytes of a Write at `to`.
    #[inline]
    pub(super) fn write_window<'t>(
        &self,
        env: &Env<'t>,
        stag: u32,
        to: u64,
        len: usize,
    ) -> Result<Window<'t>, Refusal> {
        env.memory
            .check(
                env.qp.accessor(),
                MemoryAccess {
                    stag,
                    offset: to,
                    len: len as u64,
                    need: Need::RemoteWrite,
                },
            )
            .and_then(|window| match self.access.contains(Access::REMOTE_WRITE) {
                true => Ok(window),
                false => Err(Violation::AccessRights),
            })
            .map_err(|violation| terminate::tagged(violation).into())
    }

    /// Checks the length of a Write with another segment of `len` bytes. RFC 5041 §7.2 has no code
    /// for a tagged message that is too long: such a message exceeds every buffer that it can be
    /// for.
    #[inline]
    pub(super) fn begin_write(&self, len: usize) -> Result<(), Refusal> {
        let before = if self.writing { self.written } else { 0 };
        match before + len as u64 <= MAX_MESSAGE {
            true => Ok(()),
            false => Err(TerminateError::DdpBaseOrBounds.into()),
        }
    }

    /// A segment of a Write with `len` bytes is placed.
    #[inline]
    pub(super) fn end_write(&mut self, env: &Env<'_>, header: &TaggedHeader, len: usize) {
        let before = if self.writing { self.written } else { 0 };
        self.written = before + len as u64;
        self.writing = !header.last;
        if header.last {
            self.confirming.message_processed();
            env.counters.add(Counter::RxMessages, 1);
            if self.written > 0 {
                env.counters.add(Counter::RxOneSided, 1);
            }
        }
    }

    /// Completes all posted receives in error, in order. Entries of a shared queue do not belong to
    /// a queue pair yet.
    pub(super) fn flush(&mut self, env: &mut Env<'_>) -> Result<(), Overflow> {
        self.answers.clear();
        let kept = self.drops.take_kept();
        if self.receiving.take().is_some_and(|receiving| !receiving.dropped) || kept {
            self.fail(env)?;
        }
        if let ReceiveSource::Own(_) = self.rq {
            while self.rq.take(&mut self.wqe, env.effects).is_some() {
                self.fail(env)?;
            }
        }
        self.cq.flush(env)
    }

    /// Checks whether the last entry of a shared queue that this queue pair takes is taken. An
    /// event reports it once.
    pub(super) fn note_last_wqe(&self, env: &mut Env<'_>) {
        if let ReceiveSource::Shared(_) = self.rq {
            env.effects.event(Event::new(EventKind::LastWqe, env.qp.qid));
        }
    }

    fn fail(&mut self, env: &mut Env<'_>) -> Result<(), Overflow> {
        let status = self.flush_status.take().unwrap_or(WcStatus::WrFlushErr);
        let cqe = env.qp.cqe(self.wqe.cookie, WcOpcode::Recv, status);
        self.cq.push(cqe, env)
    }
}

// Messages that the responder of a queue pair of kind UC drops (InfiniBand Architecture
// Specification vol. 1 §9.9.3): a message that finds no receive or one that is too short, and a
// Write that the protection of memory does not allow. The stream continues after it.

/// The messages that are dropped, and their state.
#[derive(Debug, Default)]
pub(super) struct Drops {
    on: bool,
    /// The last receive taken is reserved for the next message.
    kept: bool,
    /// The Write that is arriving is dropped.
    write: bool,
    /// The Write before was dropped, with an immediate that follows it directly.
    immediate: bool,
}

impl Drops {
    /// `on`: the queue pair is of kind UC. With another kind nothing is dropped.
    pub(super) fn new(on: bool) -> Drops {
        Drops {
            on,
            ..Drops::default()
        }
    }

    #[inline]
    pub(super) fn are_on(&self) -> bool {
        self.on
    }

    /// Reserves the last receive taken, because the message for it is dropped.
    pub(super) fn keep_receive(&mut self) {
        self.kept = true;
    }

    /// Takes the reserved receive. Returns whether there is one.
    #[inline]
    pub(super) fn take_kept(&mut self) -> bool {
        std::mem::take(&mut self.kept)
    }

    /// Begins a segment of a Write. If it is not `allowed`, the whole Write is dropped.
    pub(super) fn begin_write(&mut self, allowed: bool) {
        self.immediate = false;
        self.write |= !allowed;
    }

    /// Whether the Write that is arriving is dropped.
    #[inline]
    pub(super) fn drops_write(&self) -> bool {
        self.write
    }

    /// Memory refuses bytes of the Write that is arriving: drops it, or returns `refusal`.
    pub(super) fn refuse_write<E>(&mut self, refusal: E) -> Result<(), E> {
        match self.on {
            true => {
                self.write = true;
                Ok(())
            }
            false => Err(refusal),
        }
    }

    /// Ends a segment of a Write, the last one if `last`. Returns whether the Write is dropped.
    pub(super) fn end_write(&mut self, last: bool) -> bool {
        let dropped = self.write;
        if last {
            self.immediate = std::mem::take(&mut self.write);
        }
        dropped
    }

    /// Begins a Send: no immediate of an earlier Write can follow.
    #[inline]
    pub(super) fn begin_send(&mut self) {
        self.immediate = false;
    }

    /// Whether an immediate that arrives now belongs to a Write that was dropped.
    #[inline]
    pub(super) fn take_immediate(&mut self) -> bool {
        std::mem::take(&mut self.immediate)
    }

    /// Begins a stream: no message of an earlier stream continues.
    pub(super) fn begin_stream(&mut self) {
        (self.write, self.immediate) = (false, false);
    }
}
