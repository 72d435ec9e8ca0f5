//! A short way for a message that comes, or a request that is posted, alone, where the peer shares
//! memory with us: what a program waits for that sends one message to and fro. Whatever is not
//! simple takes the usual way ([`transmit`](Engine::transmit), [`receive`](Engine::receive)).

use super::receive::{Stop, admit, note_first_fpdu};
use super::{Engine, Progress};
use crate::counters::Counter;
use crate::llp::Llp;
use crate::llp::mpa::{Receiver, SHORT_FPDU};
use crate::probes;
use crate::queues::Overflow;
use crate::rdmap::env::Env;
use crate::rdmap::inbound::Halves;
use crate::stream::Stream;
use urnic_device::event::QpFault;
use urnic_device::vocabulary::QpState;
use urnic_device::wqe::Opcode;

impl Engine {
    /// Carries out the next request, if it is the only one and simple. Returns whether it did, and
    /// nothing is left for the usual way.
    #[inline]
    pub fn transmit_alone(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> bool {
        let is_plain = matches!(self.progress, Progress::Open)
            && self.state == QpState::Rts
            && self.may_send()
            && self.rtr.is_none()
            && !(self.unreachable || self.peer_closed);
        let Halves {
            qp,
            requester,
            responder,
            silent,
            ..
        } = &mut self.halves;
        if !is_plain || !responder.answers.is_empty() {
            return false;
        }
        let (Some(llp), Some(wqe)) = (&mut self.llp, requester.alone()) else {
            return false;
        };
        match (wqe.opcode, llp) {
            (Opcode::Write | Opcode::Read, llp) => match requester.complete_alone(wqe, qp, env, llp) {
                Some(Ok(())) => true,
                Some(Err(Overflow)) => {
                    self.fail(QpFault::CqOverflow, env, stream);
                    false
                }
                None => false,
            },
            (Opcode::Send, Llp::Mpa(mpa)) => {
                let before = mpa.tx.taken();
                if requester.send_alone(wqe, qp, env, &mut mpa.tx, stream).is_none() {
                    return false;
                }
                *silent = false;
                let taken = mpa.tx.taken() - before;
                env.counters.add(Counter::TxCalls, 1);
                env.counters.add(Counter::TxBytes, taken);
                probes::sent(qp.label, taken);
                mpa.tx.is_flushed()
            }
            _ => false,
        }
    }

    /// Receives what has arrived, if that is one short FPDU with nothing before it. Returns whether
    /// it did, and more may have come only since.
    #[inline]
    pub(super) fn receive_alone(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> Result<bool, Stop> {
        let Some(Llp::Mpa(mpa)) = &mut self.llp else {
            return Ok(false);
        };
        if !mpa.rx.is_plain_and_empty() || !self.held.is_empty() || self.input_ended || env.is_stopped() {
            return Ok(false);
        }
        let mut bytes = [0; SHORT_FPDU];
        let Some(bytes) = stream.receive_short(&mut bytes).and_then(|n| bytes.get(..n)) else {
            return Ok(false);
        };
        env.counters.add(Counter::RxCalls, 1);
        env.counters.add(Counter::RxBytes, bytes.len() as u64);
        probes::received(self.halves.qp.label, bytes.len());
        let Some(ulpdu) = Receiver::ulpdu_of(bytes) else {
            mpa.rx.accept(env.buffers, bytes);
            return Ok(false);
        };
        let is_first = !std::mem::replace(&mut self.fpdu_received, true);
        let admitted = admit(&mut self.halves, &mut self.held, env, mpa.rx.position(), ulpdu);
        match &admitted {
            Ok(()) => {
                if is_first {
                    note_first_fpdu(&self.halves, env, self.initiator, self.may_begin);
                }
                mpa.rx.pass(bytes.len());
                env.counters.add(Counter::RxFpdus, 1);
            }
            Err(_) => mpa.rx.accept(env.buffers, bytes),
        }
        env.recent.forget();
        let pushed = self.halves.responder.cq.flush(env);
        self.note_progress();
        admitted?;
        pushed?;
        if !self.held.is_empty() {
            self.note_waiting(env);
        }
        Ok(true)
    }
}
