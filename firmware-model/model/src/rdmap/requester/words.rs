//! Atomic operations that the requester carries out by itself in memory that a peer on this host
//! shares with it. They are the processor's own, as those of the peer's device and program are, so
//! that all of them are atomic towards each other.

use super::{Requester, Step};
use crate::counters::Counter;
use crate::host::revocable::in_place::Operation;
use crate::llp::Llp;
use crate::memory::Need;
use crate::queues::SendWqe;
use crate::rdmap::env::Env;
use crate::rdmap::flights::Wait;
use crate::rdmap::params::Identity;
use urnic_device::vocabulary::WcStatus;
use urnic_device::wqe::Opcode;

/// Bytes of a word, and of its place here.
const WORD: u32 = 8;

impl Requester {
    /// Begins an atomic operation, for which there is room at the peer.
    pub(super) fn operate(&mut self, wqe: SendWqe, qp: &Identity, env: &mut Env<'_>, llp: &mut Llp) -> Step {
        if !self.is_direct(qp, llp) {
            return self.request(wqe, qp, env, llp);
        }
        let sge = self.sq.sge(&wqe, 0);
        let (stag, at) = (sge.stag.get(), sge.offset.get());
        // Whatever is unusual here is the other way's to refuse.
        let sink = (wqe.num_sge == 1 && sge.len.get() == WORD).then(|| {
            env.memory
                .check(stag, qp.pd, qp.qid, at, WORD.into(), Need::LocalWrite)
        });
        let sink = sink.and_then(Result::ok).filter(|sink| !sink.is_elsewhere());
        let old = sink.as_ref().and_then(|_| {
            let neighbour = self.neighbour.as_mut()?;
            let operands = self.sq.atomic(&wqe);
            let operation = match wqe.opcode {
                Opcode::FetchAdd => Operation::Add(operands.compare_add.get()),
                _ => Operation::Swap {
                    expected: operands.compare_add.get(),
                    new: operands.swap.get(),
                },
            };
            neighbour
                .operate(wqe.stag, wqe.remote_offset, operation, env.now.roughly())
                .ok()
        });
        let (Some(sink), Some(old)) = (sink, old) else {
            return self.request(wqe, qp, env, llp);
        };
        let stored = sink.copy_in(0, &old.to_ne_bytes());
        drop(sink);
        env.counters.add(Counter::DirectAtomics, 1);
        env.counters.add(Counter::TxMessages, 1);
        self.add_direct_cost(WORD as usize);
        llp.rest(env.memory);
        if stored.is_err() {
            return self.refuse(wqe, WcStatus::LocProtErr);
        }
        self.board(wqe, 0, WORD, Wait::Done);
        Step::Done { ended: true }
    }
}
