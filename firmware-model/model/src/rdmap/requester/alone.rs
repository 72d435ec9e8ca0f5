//! A short way for the request that is posted alone: most programs that wait for an answer post one
//! request at a time, and then what it passes through between the ring and the peer is what they
//! wait for. Whatever is not simple about a request (several extents, a fence, an error, others
//! behind it) is left to the usual way, which begins anew.

use super::direct::CHUNK;
use super::framing::send_message;
use super::{Requester, Sending};
use crate::counters::Counter;
use crate::llp::mpa::{MAX_SHORT, Sender};
use crate::llp::{Head, Llp};
use crate::memory::Need;
use crate::queues::{Overflow, SendWqe};
use crate::rdmap::env::Env;
use crate::rdmap::flights::Wait;
use crate::rdmap::params::Identity;
use crate::stream::Stream;
use urnic_device::vocabulary::WcStatus;
use urnic_device::wqe::{Opcode, SendFlags};
use urnic_wire::ddp::UntaggedHeader;
use urnic_wire::rdmap::{Control, QN_SEND};

impl Requester {
    /// The next request, if no other one is posted, and the stream is not needed to know when it is
    /// complete.
    #[inline]
    pub(in crate::rdmap) fn alone(&mut self) -> Option<SendWqe> {
        if self.sending.is_some() || self.delivery.is_on() || self.neighbour.is_none() {
            return None;
        }
        let wqe = self.sq.peek()?.ok()?;
        self.sq.behind(&wqe).is_none().then_some(wqe)
    }

    /// Carries out a Write or a Read, from its beginning to its completion, by one access to the
    /// peer's memory. `None`: that is not possible.
    #[inline]
    pub(in crate::rdmap) fn complete_alone(
        &mut self,
        wqe: SendWqe,
        qp: &Identity,
        env: &mut Env<'_>,
        llp: &Llp,
    ) -> Option<Result<(), Overflow>> {
        let is_possible = self.flights.is_empty() && self.worth_draining && llp.is_flushed();
        let len = self.payload_len(&wqe);
        if !is_possible || len == 0 || len > CHUNK as u64 || !self.is_direct(qp, llp) {
            return None;
        }
        let mut sending = Sending::new(wqe, len as u32);
        let done = match wqe.opcode {
            Opcode::Write => self.place(&mut sending, qp, env, llp),
            Opcode::Read if self.ord > 0 && self.may_request() => self.fetch_some(&mut sending, qp, env, llp),
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
        let mut cqe = qp.cqe(wqe.cookie, wqe.opcode.completion(), WcStatus::Success);
        cqe.byte_len = sending.len.into();
        Some(self.cq.push_alone(cqe, env))
    }

    /// Sends a short Send, which completes when the peer has confirmed it. `None`: it is not short.
    #[inline]
    pub(in crate::rdmap) fn send_alone(
        &mut self,
        wqe: SendWqe,
        qp: &Identity,
        env: &mut Env<'_>,
        tx: &mut Sender,
        stream: &mut dyn Stream,
    ) -> Option<()> {
        let is_possible = self.confirms
            && wqe.num_sge <= 1
            && !wqe.flags.contains(SendFlags::FENCE)
            && tx.is_plain_and_flushed();
        let len = self.payload_len(&wqe);
        if !is_possible || len > MAX_SHORT as u64 {
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
                let (sge, by) = (self.sq.sge(&wqe, 0), (qp.pd, qp.qid));
                let (stag, at) = (sge.stag.get(), sge.offset.get());
                let window = env.memory.check(stag, by.0, by.1, at, len, Need::LocalRead);
                window.ok()?.copy_out(0, place).ok()
            }
        };
        let position = tx.send_short(env.buffers, &Head::from(header), len as usize, fill, stream)?;
        self.msn = self.msn.wrapping_add(1);
        env.counters.add(Counter::TxMessages, 1);
        env.counters.add(Counter::TxFpdus, 1);
        self.board(wqe, self.msn.wrapping_sub(1), len as u32, Wait::Taken(position));
        Some(())
    }
}
