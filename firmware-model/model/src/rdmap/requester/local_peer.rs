//! Direct access to the memory of a local peer: Writes and Reads, singly and in runs, and long
//! Sends.
//!
//! Payload that is written directly bypasses the stream, so it must not overtake bytes in the
//! stream: the requester accesses the peer's memory only when the peer has processed all sent
//! bytes, including a first message (a responder waits for that, RFC 5044 §7.1.2), and no Read is
//! outstanding. If direct access is not possible (the peer's table does not have the STag, or the
//! memory is not mapped), the request becomes a message on the stream, and the peer answers it like
//! any other.

use super::{Filled, MAX_MESSAGE, Requester, Sending, Step, Wait};
use crate::counters::Counter;
use crate::host::revocable::{Batch, MOST as BATCH};
use crate::host::{Piece, PieceMut};
use crate::llp::Llp;
use crate::memory::{MemoryAccess, Need, Window};
use crate::queues::SendWqe;
use crate::stream::same_host::LocalPeer;
use crate::transport::Env;
use crate::tuning::{
    ACCESS_MAX, DIRECT_BYTES_PER_ULPDU, FILL_ALONE_MIN, FILL_MIN, FILL_TOGETHER_MAX, INLINE_SHORT,
    RUN_BYTES_MAX, RUN_INLINE_MAX, WAIT_MIN,
};
use std::ops::RangeInclusive;
use urnic_device::vocabulary::WcStatus;
use urnic_device::wqe::{MAX_INLINE, Opcode, SendFlags};

impl Requester {
    /// Whether a request is in flight.
    pub(in crate::rdmap) fn is_in_flight(&self) -> bool {
        !self.flights.is_empty() || self.sending.is_some()
    }

    /// The connection ends. On return, the peer does not access our memory any more.
    pub(in crate::rdmap) fn part(&mut self) {
        self.confirmation.part();
        self.local_peer = None;
    }

    /// Whether no request is posted or in flight, and none waits for a Read that confirms it.
    #[inline]
    pub(in crate::rdmap) fn is_at_rest(&self) -> bool {
        self.flights.is_empty()
            && self.sending.is_none()
            && !self.sq.has_posted()
            && !self.confirmation.is_by_reads()
    }

    /// The peer, if the requester can or will be able to access its memory.
    #[inline]
    pub(super) fn reachable(&self, llp: &Llp) -> Option<&LocalPeer> {
        let local_peer = self.local_peer.as_ref().filter(|n| n.may_be_reachable())?;
        (llp.sealed() > 0).then_some(local_peer)
    }

    /// Whether the requester may access the peer's memory now.
    #[inline]
    pub(super) fn is_direct(&self, llp: &Llp) -> bool {
        let local_peer = self.reachable(llp);
        self.reads.len() == 0 && local_peer.is_some_and(|n| n.confirmed() == llp.sealed() && n.is_reachable())
    }

    /// Whether the next request, of `len` bytes, must wait until the requester may access the
    /// peer's memory.
    #[inline]
    pub(super) fn is_to_wait(&mut self, len: u64, llp: &Llp) -> bool {
        let is_to_wait =
            len >= WAIT_MIN && self.worth_draining && self.reachable(llp).is_some() && !self.is_direct(llp);
        let local_peer = self.local_peer.as_mut().filter(|_| is_to_wait);
        let waits = local_peer.is_some_and(|local_peer| local_peer.awaits(llp.sealed()));
        self.confirmation.delay_next(waits);
        waits
    }

    /// Places the next payload of a Write or Send in the peer's memory. Returns whether that was
    /// possible.
    #[inline]
    pub(super) fn place(
        &mut self,
        sending: &mut Sending,
        env: &mut Env<'_>,
        llp: &Llp,
    ) -> Result<bool, WcStatus> {
        let wqe = sending.wqe;
        // The segments of a message that is partly framed must end with a last one.
        if sending.framed || sending.len == 0 {
            return Ok(false);
        }
        match wqe.opcode {
            Opcode::Write if self.is_direct(llp) => {}
            Opcode::Send | Opcode::SendImm => return self.fill_receive(sending, env, llp),
            // The peer's completion of a Write with immediate data reports the length, and only the
            // peer's device can determine the length. A Send that invalidates has another word in
            // the place of the receive's number.
            _ => return Ok(false),
        }
        let left = (sending.len - sending.sent) as usize;
        let offset = wqe.remote_offset.wrapping_add(sending.sent.into());
        let target = (wqe.stag, Need::RemoteWrite);
        let placed = if wqe.flags.contains(SendFlags::INLINE) {
            let at = sending.sent as usize;
            match left {
                0..=INLINE_SHORT => self.write_inline::<INLINE_SHORT>(&wqe, at, left, offset, env),
                _ => self.write_inline::<MAX_INLINE>(&wqe, at, left, offset, env),
            }
            .then_some(left)
        } else {
            let list = |index| self.sq.element(&wqe, index);
            let access = sending
                .cursor
                .access(&list, left.min(ACCESS_MAX), Need::LocalRead);
            let access = access.ok_or(WcStatus::LocProtErr)?;
            let refused = |_| WcStatus::LocProtErr;
            let window = env.memory.check(env.qp.accessor(), access).map_err(refused)?;
            let written = match window.is_unmapped() {
                false => window.extents(0, access.len).next().and_then(|first| {
                    let written = self.write(target, offset, first.piece(), env);
                    written.then(|| first.len())
                }),
                // If the source cannot be read, the message takes the stream, which reports the
                // fault.
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
        let local_peer = self.local_peer.as_mut();
        local_peer.is_some_and(|local_peer| local_peer.write(target, offset, from, env.now.roughly()).is_ok())
    }

    fn read_into(&mut self, stag: u32, offset: u64, into: PieceMut<'_>, env: &Env<'_>) -> bool {
        env.recent.forget();
        let local_peer = self.local_peer.as_mut();
        local_peer.is_some_and(|local_peer| local_peer.read(stag, offset, into, env.now.roughly()).is_ok())
    }

    pub(super) fn note_direct(&mut self, sending: &mut Sending, n: usize, env: &mut Env<'_>) {
        match sending.wqe.opcode {
            Opcode::Read | Opcode::ReadInv => env.received(n as u64),
            _ => env.sent(n as u64),
        }
        sending.sent += n as u32;
        self.add_direct_cost(n);
    }

    pub(super) fn add_direct_cost(&mut self, n: usize) {
        self.direct_cost += 1 + (n / DIRECT_BYTES_PER_ULPDU) as u32;
    }

    /// The cost of the direct accesses since the last call, in ULPDUs.
    #[inline]
    pub(in crate::rdmap) fn take_direct_cost(&mut self) -> u32 {
        std::mem::take(&mut self.direct_cost)
    }

    /// Begins a Read, for which there is room at the peer.
    pub(super) fn read(&mut self, wqe: SendWqe, env: &mut Env<'_>, llp: &mut Llp) -> Step {
        let len = self.payload_len(&wqe);
        if self.is_to_wait(len, llp) {
            return Step::Idle;
        }
        if len == 0 || len > MAX_MESSAGE || !self.is_direct(llp) {
            return self.request(wqe, env, llp);
        }
        if wqe.opcode == Opcode::Read
            && let Some(step) = self.run(&wqe, env, llp)
        {
            return step;
        }
        self.fetch(Sending::new(wqe, len as u32), env, llp)
    }

    /// Fetches the next bytes of a Read from the peer's memory, or requests them all from the peer.
    pub(super) fn fetch(&mut self, mut sending: Sending, env: &mut Env<'_>, llp: &mut Llp) -> Step {
        let wqe = sending.wqe;
        if !self.fetch_some(&mut sending, env, llp) {
            return self.request(wqe, env, llp);
        }
        if sending.sent < sending.len {
            self.sending = Some(sending);
            return Step::Done { ended: false };
        }
        env.counters.add(Counter::TxMessages, 1);
        llp.rest(env.memory);
        match self.fetched(&wqe, env) {
            Wait::Failed(status) => self.refuse(wqe, status),
            wait => {
                self.put_in_flight(wqe, 0, sending.len, wait);
                Step::Done { ended: true }
            }
        }
    }

    /// Fetches the next bytes of a Read from the peer's memory. Returns whether that was possible:
    /// not if the sink is refused, because the peer's refusal counts before that.
    #[inline]
    pub(super) fn fetch_some(&mut self, sending: &mut Sending, env: &mut Env<'_>, llp: &Llp) -> bool {
        let wqe = sending.wqe;
        let list = |index| self.sq.element(&wqe, index);
        let left = (sending.len - sending.sent) as usize;
        let access = sending
            .cursor
            .access(&list, left.min(ACCESS_MAX), Need::LocalWrite);
        let Some(access) = access else {
            return false;
        };
        let Ok(window) = env.memory.check(env.qp.accessor(), access) else {
            return false;
        };
        let offset = wqe.remote_offset.wrapping_add(sending.sent.into());
        let fetched = match (self.is_direct(llp), window.is_unmapped()) {
            (true, true) => by_buffer(&window, env, |bytes| {
                self.read_into(wqe.stag, offset, PieceMut::of(bytes), env) && window.copy_in(0, bytes).is_ok()
            }),
            (true, false) => window.pieces_mut(0, access.len).next().and_then(|piece| {
                let n = piece.len();
                self.read_into(wqe.stag, offset, piece, env).then_some(n)
            }),
            (false, _) => None,
        };
        drop(window);
        self.worth_draining = fetched.is_some();
        let Some(n) = fetched else {
            return false;
        };
        sending.cursor.advance(n);
        self.note_direct(sending, n, env);
        if sending.sent == sending.len {
            env.counters.add(Counter::DirectReads, 1);
        }
        true
    }

    /// The remaining step of a Read whose bytes have all arrived: a Read with invalidation
    /// invalidates its sink, which is local and not a wire feature (row RDM-M-04).
    pub(super) fn fetched(&mut self, wqe: &SendWqe, env: &Env<'_>) -> Wait {
        if wqe.opcode != Opcode::ReadInv {
            return Wait::Done;
        }
        let stag = self.sq.sge(wqe, 0).stag.get();
        match self.invalidate(stag, env) {
            Ok(()) => Wait::Done,
            Err(status) => Wait::Failed(status),
        }
    }
}

/// Copies the beginning of memory that is accessed by copies, through a buffer that stays in the
/// cache; returns the number of bytes.
fn by_buffer(window: &Window<'_>, env: &Env<'_>, copy: impl FnOnce(&mut [u8]) -> bool) -> Option<usize> {
    let mut buffer = env.buffers.take();
    let n = buffer.len().min(window.len() as usize);
    let copied = copy(&mut buffer[..n]);
    env.buffers.give(buffer);
    copied.then_some(n)
}

// Long Sends whose payload the requester places in the receive that a peer on this host has posted
// for them: one copy, by one processor, where the ring takes two.
//
// The message follows on the stream as its last segment, with the payload's length as its message
// offset and nothing after its header: all payload before that offset is in its place. Where the
// header has the STag to invalidate it has the number of the receive, so that the peer refuses a
// message whose payload is in another receive than the one that it takes. Each message has a
// receive of its own, so no placement has to wait for messages before it (RFC 5041 §5.3: segments
// may be placed in any order), and those of several messages may be one call.

const _: () = assert!(MAX_INLINE < FILL_ALONE_MIN);

impl Requester {
    /// Places the payloads of the next request, a Send of `len` bytes, and of the Sends after it in
    /// the receives that the peer has posted for them, by one call. Does nothing for a single Send,
    /// or if that is not possible.
    #[inline]
    pub(super) fn fill_receives(&mut self, first: &SendWqe, len: u64, env: &Env<'_>, llp: &Llp) {
        let is_second = |wqe: SendWqe| wqe.opcode == Opcode::Send;
        // A fenced request waits for Reads.
        let is_run = (FILL_MIN as u64..FILL_TOGETHER_MAX).contains(&len)
            && self.filled.is_empty()
            && self.sq.next_after(first).is_some_and(is_second)
            && self.reads.len() == 0
            && self.reachable(llp).is_some();
        if !is_run {
            return;
        }
        let Some(mut run) = self.collect(first, FILL_MIN as u64..=FILL_TOGETHER_MAX, env) else {
            return;
        };
        let Some((stag, receive)) = self.find_receives(&mut run, env) else {
            return;
        };
        env.recent.forget();
        if self.write_run(&run, (stag, Need::LocalWrite), env).is_some() {
            self.filled = Filled::new(run.number as u32, receive);
        }
    }

    /// Finds the receives of a run, and ends the run before the first request whose receive is
    /// missing or has another STag than the first one. Returns the STag of the receives and the
    /// number of the first one, if several requests are left.
    fn find_receives(&mut self, run: &mut Run<'_>, env: &Env<'_>) -> Option<(u32, u32)> {
        let index = self.msn.wrapping_sub(self.first_receive);
        let local_peer = self.local_peer.as_mut()?;
        let mut first = None;
        let mut found = 0;
        for (n, offset) in (0..run.number).zip(&mut run.offsets) {
            let index = index.wrapping_add(n as u32);
            let Some((element, number)) = local_peer.receive(index, run.lens[n], env.now.roughly()) else {
                break;
            };
            let stag = element.stag.get();
            if first.get_or_insert((stag, number)).0 != stag {
                break;
            }
            *offset = element.offset.get();
            found = n + 1;
        }
        run.number = found;
        first.filter(|_| found > 1)
    }

    /// Whether it is faster to place the payload of a Send in the peer's receive than to send it.
    /// No part of the Send may be framed.
    #[inline]
    fn is_to_fill(&mut self, sending: &Sending, llp: &Llp) -> bool {
        let is_worth = match sending.len as usize {
            0..FILL_ALONE_MIN => false,
            FILL_ALONE_MIN..FILL_MIN => self.flights.is_empty() && self.sq.next_after(&sending.wqe).is_none(),
            FILL_MIN..=ACCESS_MAX => true,
            _ => false,
        };
        is_worth && self.reachable(llp).is_some()
    }

    /// Places the next payload of a Send in the receive that the peer has posted for it. Returns
    /// whether that was possible. If a message was placed only in part, its remaining payload goes
    /// by the stream.
    #[inline]
    pub(super) fn fill_receive(
        &mut self,
        sending: &mut Sending,
        env: &mut Env<'_>,
        llp: &Llp,
    ) -> Result<bool, WcStatus> {
        if let Some(number) = self.filled.next() {
            env.counters.add(Counter::DirectSends, 1);
            sending.receive = number;
            self.note_direct(sending, sending.len as usize, env);
            return Ok(true);
        }
        if !self.is_to_fill(sending, llp) {
            return Ok(false);
        }
        let wqe = sending.wqe;
        let list = |index| self.sq.element(&wqe, index);
        let left = (sending.len - sending.sent) as usize;
        let access = sending.cursor.access(&list, left, Need::LocalRead);
        let access = access.ok_or(WcStatus::LocProtErr)?;
        let refused = |_| WcStatus::LocProtErr;
        let window = env.memory.check(env.qp.accessor(), access).map_err(refused)?;
        // Two threads copy faster out of a served program's memory.
        if window.is_unmapped() {
            return Ok(false);
        }
        let Some(extent) = window.extents(0, access.len).next() else {
            return Ok(false);
        };
        let index = self.msn.wrapping_sub(self.first_receive);
        let local_peer = self.local_peer.as_mut();
        let receive = local_peer.and_then(|n| n.receive(index, sending.len, env.now.roughly()));
        let Some((element, number)) = receive else {
            return Ok(false);
        };
        let target = (element.stag.get(), Need::LocalWrite);
        let offset = element.offset.get().wrapping_add(sending.sent.into());
        if !self.write(target, offset, extent.piece(), env) {
            return Ok(false);
        }
        if sending.sent == 0 {
            env.counters.add(Counter::DirectSends, 1);
        }
        sending.receive = number;
        sending.cursor.advance(extent.len());
        self.note_direct(sending, extent.len(), env);
        Ok(true)
    }
}

// Runs of short Writes, of short Reads, or of Sends that fill receives, that the requester carries
// out in the memory of a peer on this host by one call: for a short copy, the call takes longer
// than the copy.

/// The requests of a run.
pub(super) struct Run<'t> {
    wqes: [Option<SendWqe>; BATCH],
    /// The local memory of the requests, unless their payload is inline.
    windows: [Option<Window<'t>>; BATCH],
    pub(super) offsets: [u64; BATCH],
    pub(super) lens: [u32; BATCH],
    pub(super) number: usize,
}

impl Run<'_> {
    fn wqes(&self) -> impl Iterator<Item = (&SendWqe, u32)> {
        self.wqes[..self.number].iter().flatten().zip(self.lens)
    }
}

impl Requester {
    /// Carries out the next request, a Write or a Read, together with the requests after it.
    /// `None`: the next requests are no run, or need the usual path.
    #[inline]
    pub(super) fn run(&mut self, first: &SendWqe, env: &mut Env<'_>, llp: &mut Llp) -> Option<Step> {
        let second = self.sq.next_after(first)?;
        let is_run = second.opcode == first.opcode && second.stag == first.stag && self.is_direct(llp);
        if !is_run {
            return None;
        }
        let run = self.collect(first, 1..=RUN_BYTES_MAX, env)?;
        env.recent.forget();
        match first.opcode {
            Opcode::Write => {
                self.write_run(&run, (first.stag, Need::RemoteWrite), env)?;
            }
            _ => {
                self.read_run(&run, env)?;
                llp.rest(env.memory);
            }
        }
        let wqes = run.wqes;
        for (wqe, len) in wqes.into_iter().flatten().zip(run.lens) {
            self.add_direct_cost(len as usize);
            match wqe.opcode {
                Opcode::Write => {
                    env.counters.add(Counter::DirectWrites, 1);
                    env.sent(len.into());
                    self.finish(&Sending::new(wqe, len), llp.sealed(), env);
                }
                _ => {
                    env.counters.add(Counter::DirectReads, 1);
                    env.received(len.into());
                    env.counters.add(Counter::TxMessages, 1);
                    self.put_in_flight(wqe, 0, len, Wait::Done);
                }
            }
        }
        Some(Step::Done { ended: true })
    }

    /// The requests from `first` on that can be carried out together, if there are several. Each
    /// has at least `lens.start()` bytes, and all together have at most `lens.end()` bytes.
    pub(super) fn collect<'t>(
        &mut self,
        first: &SendWqe,
        lens: RangeInclusive<u64>,
        env: &Env<'t>,
    ) -> Option<Run<'t>> {
        let mut run = Run {
            wqes: [None; BATCH],
            windows: [const { None }; BATCH],
            offsets: [0; BATCH],
            lens: [0; BATCH],
            number: 0,
        };
        let (mut bytes, mut inline) = (0, 0);
        let mut next = Some(*first);
        while run.number < BATCH
            && let Some(wqe) = next
        {
            let len = self.payload_len(&wqe);
            bytes += len;
            let is_inline = wqe.flags.contains(SendFlags::INLINE);
            inline += usize::from(is_inline) * len as usize;
            let joins = wqe.opcode == first.opcode
                && wqe.stag == first.stag
                && wqe.num_sge <= 1
                && len >= *lens.start()
                && bytes <= *lens.end()
                && inline <= RUN_INLINE_MAX;
            if !joins {
                break;
            }
            if !is_inline {
                let need = match wqe.opcode {
                    Opcode::Read => Need::LocalWrite,
                    _ => Need::LocalRead,
                };
                let access = MemoryAccess::of_element(&self.sq.sge(&wqe, 0), need);
                let Ok(window) = env.memory.check(env.qp.accessor(), access) else {
                    break;
                };
                let is_whole = |window: &Window<'_>| {
                    let extent = window.extents(0, len).next();
                    extent.is_some_and(|extent| extent.len() as u64 == len)
                };
                if window.is_unmapped() || !is_whole(&window) {
                    break;
                }
                run.windows[run.number] = Some(window);
            }
            run.wqes[run.number] = Some(wqe);
            run.offsets[run.number] = wqe.remote_offset;
            run.lens[run.number] = len as u32;
            run.number += 1;
            next = self.sq.next_after(&wqe);
        }
        (run.number > 1).then_some(run)
    }

    /// Writes the bytes of a run to its offsets of the target's STag.
    pub(super) fn write_run(&mut self, run: &Run<'_>, target: (u32, Need), env: &Env<'_>) -> Option<()> {
        let mut bytes = [0; RUN_INLINE_MAX];
        let mut room = bytes.as_mut_slice();
        let mut batch: Batch<Piece<'_>> = Batch::new();
        let extents: [_; BATCH] = std::array::from_fn(|n| {
            let window = run.windows[n].as_ref()?;
            window.extents(0, run.lens[n].into()).next()
        });
        for ((wqe, len), extent) in run.wqes().zip(&extents) {
            batch.push(match extent {
                Some(extent) => extent.piece(),
                None => {
                    let (here, rest) = room.split_at_mut(len as usize);
                    room = rest;
                    self.sq.inline(wqe, 0, here);
                    Piece::of(here)
                }
            });
        }
        let offsets = &run.offsets[..run.number];
        let local_peer = self.local_peer.as_mut()?;
        local_peer
            .write_batch(target, offsets, &mut batch, env.now.roughly())
            .ok()
    }

    fn read_run(&mut self, run: &Run<'_>, env: &Env<'_>) -> Option<()> {
        let mut batch: Batch<PieceMut<'_>> = Batch::new();
        for (window, len) in run.windows[..run.number].iter().flatten().zip(run.lens) {
            batch.push(window.pieces_mut(0, len.into()).next()?);
        }
        let (stag, offsets) = (run.wqes[0]?.stag, &run.offsets[..run.number]);
        let local_peer = self.local_peer.as_mut()?;
        local_peer
            .read_batch(stag, offsets, &mut batch, env.now.roughly())
            .ok()
    }
}
