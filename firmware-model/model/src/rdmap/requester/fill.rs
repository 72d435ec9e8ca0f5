//! Long Sends whose payload the requester places in the receive that a peer on this host has posted
//! for them: one copy, by one processor, where the ring takes two.
//!
//! The message follows on the stream as its last segment, with the payload's length as its message
//! offset and nothing behind its header: all that comes before that offset is in its place. Where
//! the header has the STag to invalidate it has the number of the receive, so that the peer refuses
//! a message whose payload is in another receive than the one that it takes. Each message has a
//! receive of its own, so no placement has to wait for messages before it (RFC 5041 §5.3: segments
//! may be placed in any order), and those of several messages may be one call.

use super::direct::CHUNK;
use super::runs::Run;
use super::sending::Filled;
use super::{Requester, Sending};
use crate::counters::Counter;
use crate::llp::Llp;
use crate::memory::Need;
use crate::queues::SendWqe;
use crate::rdmap::env::Env;
use crate::rdmap::params::Identity;
use urnic_device::vocabulary::WcStatus;
use urnic_device::wqe::{MAX_INLINE, Opcode};

/// A Send of at least this length, and at most [`CHUNK`], is placed in the peer's receive. Above,
/// payload may be in no cache, and then copies by both processors, through the ring, take less
/// time.
const WORTH_FILLING: usize = 24 << 10;
/// So is a Send of at least this length while no other request is posted or under way: who waits
/// for it waits for one copy instead of two.
const WORTH_FILLING_ALONE: usize = 3 << 10;
/// Most bytes of Sends that are placed by one call: above, the call takes far less time than the
/// copies.
const TOGETHER: u64 = 256 << 10;

const _: () = assert!(MAX_INLINE < WORTH_FILLING_ALONE);

impl Requester {
    /// Places the payloads of the next request, a Send of `len` bytes, and of those behind it in
    /// the receives that the peer has posted for them, by one call, if they are several and that is
    /// possible.
    #[inline]
    pub(super) fn fill_receives(
        &mut self,
        first: &SendWqe,
        len: u64,
        qp: &Identity,
        env: &Env<'_>,
        llp: &Llp,
    ) {
        let is_second = |wqe: SendWqe| wqe.opcode == Opcode::Send;
        // What is fenced waits for Reads.
        let is_run = (WORTH_FILLING as u64..TOGETHER).contains(&len)
            && self.filled.is_empty()
            && self.sq.behind(first).is_some_and(is_second)
            && self.reads.len() == 0
            && self.reachable(qp, llp).is_some();
        if !is_run {
            return;
        }
        let Some(mut run) = self.collect(first, WORTH_FILLING as u64..=TOGETHER, qp, env) else {
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

    /// Finds the receives of a run, and leaves those requests in it whose receives are of one STag,
    /// if they are several; returns that, and the number of the first receive.
    fn find_receives(&mut self, run: &mut Run<'_>, env: &Env<'_>) -> Option<(u32, u32)> {
        let index = self.msn.wrapping_sub(self.first_receive);
        let neighbour = self.neighbour.as_mut()?;
        let mut first = None;
        let mut found = 0;
        for (n, offset) in (0..run.number).zip(&mut run.offsets) {
            let index = index.wrapping_add(n as u32);
            let Some((element, number)) = neighbour.receive(index, run.lens[n], env.now.roughly()) else {
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
        first.filter(|(stag, _)| found > 1 && !neighbour.is_mapped(*stag))
    }

    /// Whether the payload of a Send, of which nothing is framed, is better placed in the peer's
    /// receive than sent.
    #[inline]
    fn is_to_fill(&mut self, sending: &Sending, qp: &Identity, llp: &Llp) -> bool {
        let is_worth = match sending.len as usize {
            0..WORTH_FILLING_ALONE => false,
            WORTH_FILLING_ALONE..WORTH_FILLING => {
                self.flights.is_empty() && self.sq.behind(&sending.wqe).is_none()
            }
            WORTH_FILLING..=CHUNK => true,
            _ => false,
        };
        is_worth && self.reachable(qp, llp).is_some()
    }

    /// Places the next payload of a Send in the receive that the peer has posted for it; whether
    /// that was possible. The rest of a message that was placed in part goes by the stream.
    #[inline]
    pub(super) fn fill_receive(
        &mut self,
        sending: &mut Sending,
        qp: &Identity,
        env: &Env<'_>,
        llp: &Llp,
    ) -> Result<bool, WcStatus> {
        if let Some(number) = self.filled.next() {
            env.counters.add(Counter::DirectSends, 1);
            sending.receive = number;
            self.note_direct(sending, sending.len as usize, env);
            return Ok(true);
        }
        if !self.is_to_fill(sending, qp, llp) {
            return Ok(false);
        }
        let wqe = sending.wqe;
        let list = |index| self.sq.element(&wqe, index);
        let left = (sending.len - sending.sent) as usize;
        let (sge, at, n) = sending.cursor.extent(&list, left).ok_or(WcStatus::LocProtErr)?;
        let window = env
            .memory
            .check(sge.stag.get(), qp.pd, qp.qid, at, n as u64, Need::LocalRead)
            .map_err(|_| WcStatus::LocProtErr)?;
        // Copies out of a served program's memory are better made by two threads.
        if window.is_elsewhere() {
            return Ok(false);
        }
        let Some(extent) = window.extents(0, n as u64).next() else {
            return Ok(false);
        };
        let index = self.msn.wrapping_sub(self.first_receive);
        let neighbour = self.neighbour.as_mut();
        let receive = neighbour.and_then(|n| n.receive(index, sending.len, env.now.roughly()));
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
