//! Writes and Reads that the requester carries out by itself in the memory of a peer on this host.
//! (Sends that it places there are [next door](super::fill).)
//!
//! Payload passes by the stream, so it must not overtake what is there: the requester reaches into
//! the peer's memory only when the peer has processed all that was sent, a first message included
//! (a responder waits for that, RFC 5044 §7.1.2), and no Read is outstanding. Whatever is not
//! possible (an STag that the peer's table does not have, memory that is not there) becomes a
//! message on the stream, and the peer answers it as it would any other.

use super::{MAX_MESSAGE, Requester, Sending, Step};
use crate::counters::Counter;
use crate::host::{Piece, PieceMut};
use crate::llp::Llp;
use crate::memory::{InvalidateBy, Need, Window};
use crate::queues::SendWqe;
use crate::rdmap::env::Env;
use crate::rdmap::flights::Wait;
use crate::rdmap::params::Identity;
use crate::stream::same_host::Neighbour;
use urnic_device::vocabulary::WcStatus;
use urnic_device::wqe::{MAX_INLINE, Opcode, SendFlags};

/// Most bytes of one access: a revocation waits for it.
pub(super) const CHUNK: usize = 1 << 20;
/// A request of at least this length waits until all that was sent is processed, so that it is
/// direct: that takes less time than the copies of the stream.
const WORTH_WAITING: u64 = 16 << 10;
/// Inline data of at most this length is short: clearing a buffer for the longest takes longer than
/// the copy.
const SHORT: usize = 64;
/// Bytes that cost a run of the queue pair as much as one ULPDU more.
const PER_ULPDU: usize = 4096;

impl Requester {
    /// The position up to which requests are complete, if the stream has taken all up to `taken`.
    #[inline]
    pub(in crate::rdmap) fn known(&self, taken: u64) -> u64 {
        match &self.neighbour {
            Some(neighbour) if self.confirms => taken.min(neighbour.confirmed()),
            _ => self.delivery.known(taken),
        }
    }

    /// The peer will confirm no more: what the stream has taken is complete.
    pub(in crate::rdmap) fn await_no_more(&mut self) {
        self.delivery.stop();
        (self.confirms, self.drains) = (false, false);
    }

    /// Whether something waits for the peer to process what was sent.
    #[inline]
    pub(in crate::rdmap) fn awaited(&self) -> Option<&Neighbour> {
        self.neighbour.as_ref().filter(|_| self.confirms || self.drains)
    }

    /// Whether a request is under way.
    pub(in crate::rdmap) fn is_in_flight(&self) -> bool {
        !self.flights.is_empty() || self.sending.is_some()
    }

    /// The connection ends. On return, the peer does not reach into our memory any more.
    pub(in crate::rdmap) fn part(&mut self) {
        self.await_no_more();
        self.neighbour = None;
    }

    /// Whether all messages up to `taken` are confirmed, as far as they are to be.
    pub(in crate::rdmap) fn is_confirmed(&self, taken: u64) -> bool {
        let awaited = self.neighbour.as_ref().filter(|_| self.confirms);
        !self.delivery.is_pending() && awaited.is_none_or(|neighbour| neighbour.confirmed() >= taken)
    }

    /// Whether no request is posted or under way, and none waits for a Read that confirms it.
    #[inline]
    pub(in crate::rdmap) fn is_at_rest(&self) -> bool {
        self.flights.is_empty() && self.sending.is_none() && !self.sq.has_posted() && !self.delivery.is_on()
    }

    /// The peer, if the requester can reach into its memory at some time.
    #[inline]
    pub(super) fn reachable(&self, qp: &Identity, llp: &Llp) -> Option<&Neighbour> {
        let neighbour = self.neighbour.as_ref().filter(|n| n.may_be_reachable())?;
        (!qp.unreliable && llp.sealed() > 0).then_some(neighbour)
    }

    /// Whether the requester may reach into the peer's memory now.
    #[inline]
    pub(super) fn is_direct(&self, qp: &Identity, llp: &Llp) -> bool {
        let neighbour = self.reachable(qp, llp);
        self.reads.len() == 0 && neighbour.is_some_and(|n| n.confirmed() == llp.sealed() && n.is_reachable())
    }

    /// Whether the next request, of `len` bytes, is to wait until the requester may reach into the
    /// peer's memory.
    #[inline]
    pub(super) fn is_to_wait(&mut self, len: u64, qp: &Identity, llp: &Llp) -> bool {
        let is_to_wait = len >= WORTH_WAITING
            && self.worth_draining
            && self.reachable(qp, llp).is_some()
            && !self.is_direct(qp, llp);
        let neighbour = self.neighbour.as_mut().filter(|_| is_to_wait);
        self.drains = neighbour.is_some_and(|neighbour| neighbour.awaits(llp.sealed()));
        self.drains
    }

    /// Places the next payload of a Write or Send in the peer's memory; whether that was possible.
    #[inline]
    pub(super) fn place(
        &mut self,
        sending: &mut Sending,
        qp: &Identity,
        env: &mut Env<'_>,
        llp: &Llp,
    ) -> Result<bool, WcStatus> {
        let wqe = sending.wqe;
        // The segments of a message that are framed end with a last one.
        if sending.framed || sending.len == 0 {
            return Ok(false);
        }
        match wqe.opcode {
            Opcode::Write if self.is_direct(qp, llp) => {}
            Opcode::Send | Opcode::SendImm => return self.fill_receive(sending, qp, env, llp),
            // The peer's completion of a Write with immediate data reports the length, which only
            // the peer's device can know. A Send that invalidates has another word in the place of
            // the receive's number.
            _ => return Ok(false),
        }
        let left = (sending.len - sending.sent) as usize;
        let offset = wqe.remote_offset.wrapping_add(sending.sent.into());
        let target = (wqe.stag, Need::RemoteWrite);
        let placed = if wqe.flags.contains(SendFlags::INLINE) {
            let at = sending.sent as usize;
            match left {
                0..=SHORT => self.write_inline::<SHORT>(&wqe, at, left, offset, env),
                _ => self.write_inline::<MAX_INLINE>(&wqe, at, left, offset, env),
            }
            .then_some(left)
        } else {
            let list = |index| self.sq.element(&wqe, index);
            let (sge, at, n) = sending
                .cursor
                .extent(&list, left.min(CHUNK))
                .ok_or(WcStatus::LocProtErr)?;
            let window = env
                .memory
                .check(sge.stag.get(), qp.pd, qp.qid, at, n as u64, Need::LocalRead)
                .map_err(|_| WcStatus::LocProtErr)?;
            let written = match window.is_elsewhere() {
                false => window.extents(0, n as u64).next().and_then(|first| {
                    let written = self.write(target, offset, first.piece(), env);
                    written.then(|| first.len())
                }),
                // What cannot be read takes the stream, which reports it.
                true => by_buffer(&window, env, |bytes| {
                    window.copy_out(0, bytes).is_ok() && self.write(target, offset, Piece::of(bytes), env)
                }),
            };
            written.inspect(|n| sending.cursor.advance(*n))
        };
        self.worth_draining = placed.is_some();
        let Some(n) = placed else { return Ok(false) };
        if sending.sent == 0 {
            env.counters.add(Counter::DirectWrites, 1);
        }
        self.note_direct(sending, n, env);
        sending.payload_done = sending.sent == sending.len;
        Ok(true)
    }

    /// Writes `left` bytes of inline data, at most `MOST`, from `at` on.
    #[inline]
    fn write_inline<const MOST: usize>(
        &mut self,
        wqe: &SendWqe,
        at: usize,
        left: usize,
        offset: u64,
        env: &Env<'_>,
    ) -> bool {
        let mut bytes = [0; MOST];
        let Some(bytes) = bytes.get_mut(..left) else {
            return false;
        };
        self.sq.inline(wqe, at, bytes);
        self.write((wqe.stag, Need::RemoteWrite), offset, Piece::of(bytes), env)
    }

    pub(super) fn write(&mut self, target: (u32, Need), offset: u64, from: Piece<'_>, env: &Env<'_>) -> bool {
        env.recent.forget();
        let neighbour = self.neighbour.as_mut();
        neighbour.is_some_and(|neighbour| neighbour.write(target, offset, from, env.now.roughly()).is_ok())
    }

    fn read_into(&mut self, stag: u32, offset: u64, into: PieceMut<'_>, env: &Env<'_>) -> bool {
        env.recent.forget();
        let neighbour = self.neighbour.as_mut();
        neighbour.is_some_and(|neighbour| neighbour.read(stag, offset, into, env.now.roughly()).is_ok())
    }

    pub(super) fn note_direct(&mut self, sending: &mut Sending, n: usize, env: &Env<'_>) {
        let counter = match sending.wqe.opcode {
            Opcode::Read | Opcode::ReadInv => Counter::RxBytes,
            _ => Counter::TxBytes,
        };
        env.counters.add(counter, n as u64);
        sending.sent += n as u32;
        self.add_direct_cost(n);
    }

    pub(super) fn add_direct_cost(&mut self, n: usize) {
        self.direct_cost += 1 + (n / PER_ULPDU) as u32;
    }

    /// What was done directly since the last call costs so many ULPDUs.
    #[inline]
    pub(in crate::rdmap) fn take_direct_cost(&mut self) -> u32 {
        std::mem::take(&mut self.direct_cost)
    }

    /// Begins a Read, for which there is room at the peer.
    pub(super) fn read(&mut self, wqe: SendWqe, qp: &Identity, env: &mut Env<'_>, llp: &mut Llp) -> Step {
        let len = self.payload_len(&wqe);
        if self.is_to_wait(len, qp, llp) {
            return Step::Idle;
        }
        if len == 0 || len > MAX_MESSAGE || !self.is_direct(qp, llp) {
            return self.request(wqe, qp, env, llp);
        }
        if wqe.opcode == Opcode::Read
            && let Some(step) = self.run(&wqe, qp, env, llp)
        {
            return step;
        }
        self.fetch(Sending::new(wqe, len as u32), qp, env, llp)
    }

    /// Fetches the next bytes of a Read from the peer's memory, or requests them all from the peer.
    pub(super) fn fetch(
        &mut self,
        mut sending: Sending,
        qp: &Identity,
        env: &mut Env<'_>,
        llp: &mut Llp,
    ) -> Step {
        let wqe = sending.wqe;
        match self.fetch_some(&mut sending, qp, env, llp) {
            Ok(true) => {}
            Ok(false) => return self.request(wqe, qp, env, llp),
            Err(status) => return self.refuse(wqe, status),
        }
        if sending.sent < sending.len {
            self.sending = Some(sending);
            return Step::Done { ended: false };
        }
        env.counters.add(Counter::TxMessages, 1);
        llp.rest(env.memory);
        match self.fetched(&wqe, qp, env) {
            Wait::Failed(status) => self.refuse(wqe, status),
            wait => {
                self.board(wqe, 0, sending.len, wait);
                Step::Done { ended: true }
            }
        }
    }

    /// Fetches the next bytes of a Read from the peer's memory; whether that was possible.
    #[inline]
    pub(super) fn fetch_some(
        &mut self,
        sending: &mut Sending,
        qp: &Identity,
        env: &mut Env<'_>,
        llp: &Llp,
    ) -> Result<bool, WcStatus> {
        let wqe = sending.wqe;
        let list = |index| self.sq.element(&wqe, index);
        let left = (sending.len - sending.sent) as usize;
        let (sge, at, n) = sending
            .cursor
            .extent(&list, left.min(CHUNK))
            .ok_or(WcStatus::LocProtErr)?;
        let stag = sge.stag.get();
        let window = env
            .memory
            .check(stag, qp.pd, qp.qid, at, n as u64, Need::LocalWrite)
            .map_err(|_| WcStatus::LocProtErr)?;
        let offset = wqe.remote_offset.wrapping_add(sending.sent.into());
        let fetched = match (self.is_direct(qp, llp), window.is_elsewhere()) {
            (true, true) => by_buffer(&window, env, |bytes| {
                self.read_into(wqe.stag, offset, PieceMut::of(bytes), env) && window.copy_in(0, bytes).is_ok()
            }),
            (true, false) => window.pieces_mut(0, n as u64).next().and_then(|piece| {
                let n = piece.len();
                self.read_into(wqe.stag, offset, piece, env).then_some(n)
            }),
            (false, _) => None,
        };
        drop(window);
        self.worth_draining = fetched.is_some();
        let Some(n) = fetched else {
            return Ok(false);
        };
        sending.cursor.advance(n);
        self.note_direct(sending, n, env);
        if sending.sent == sending.len {
            env.counters.add(Counter::DirectReads, 1);
        }
        Ok(true)
    }

    /// What a Read whose bytes are all there still has to do: a Read with invalidation invalidates
    /// its sink, which is ours and not a wire feature (row RDM-M-04).
    pub(super) fn fetched(&mut self, wqe: &SendWqe, qp: &Identity, env: &Env<'_>) -> Wait {
        if wqe.opcode != Opcode::ReadInv {
            return Wait::Done;
        }
        let stag = self.sq.sge(wqe, 0).stag.get();
        match env
            .memory_to_revoke()
            .invalidate(stag, qp.pd, qp.qid, InvalidateBy::Local)
        {
            Ok(()) => Wait::Done,
            Err(_) => Wait::Failed(WcStatus::LocProtErr),
        }
    }
}

/// Copies the beginning of memory that is reached by copies, through a buffer that stays in the
/// cache; returns how many bytes.
fn by_buffer(window: &Window<'_>, env: &Env<'_>, copy: impl FnOnce(&mut [u8]) -> bool) -> Option<usize> {
    let mut buffer = env.buffers.take();
    let n = buffer.len().min(window.len() as usize);
    let copied = copy(&mut buffer[..n]);
    env.buffers.give(buffer);
    copied.then_some(n)
}
