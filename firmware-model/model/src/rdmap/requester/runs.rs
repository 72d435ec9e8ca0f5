//! Runs of short Writes, of short Reads, or of Sends that fill receives, that the requester carries
//! out in the memory of a peer on this host by one call: for a short copy, the call takes longer
//! than the copy.

use super::{Requester, Sending, Step};
use crate::counters::Counter;
use crate::host::revocable::batch::{Batch, MOST as BATCH};
use crate::host::{Piece, PieceMut};
use crate::llp::Llp;
use crate::memory::{Need, Window};
use crate::queues::SendWqe;
use crate::rdmap::env::Env;
use crate::rdmap::flights::Wait;
use crate::rdmap::params::Identity;
use std::ops::RangeInclusive;
use urnic_device::wqe::{Opcode, SendFlags};

/// Most bytes of a run of Writes or Reads: a revocation waits for all.
const BYTES: u64 = 128 << 10;
/// Most bytes of a run that are inline.
const INLINE: usize = 2 << 10;

/// The requests of a run.
pub(super) struct Run<'t> {
    wqes: [Option<SendWqe>; BATCH],
    /// Where their bytes are here, unless they are inline.
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
    /// Carries out the next request, a Write or a Read, with those behind it. `None`: there is no
    /// run of them, or something about it needs a closer look.
    #[inline]
    pub(super) fn run(
        &mut self,
        first: &SendWqe,
        qp: &Identity,
        env: &mut Env<'_>,
        llp: &mut Llp,
    ) -> Option<Step> {
        let second = self.sq.behind(first)?;
        let is_mapped = self.neighbour.as_ref().is_some_and(|n| n.is_mapped(first.stag));
        let is_run = second.opcode == first.opcode
            && second.stag == first.stag
            && !is_mapped
            && self.is_direct(qp, llp);
        if !is_run {
            return None;
        }
        let run = self.collect(first, 1..=BYTES, qp, env)?;
        env.recent.forget();
        let (direct, bytes) = match first.opcode {
            Opcode::Write => {
                self.write_run(&run, (first.stag, Need::RemoteWrite), env)?;
                (Counter::DirectWrites, Counter::TxBytes)
            }
            _ => {
                self.read_run(&run, env)?;
                llp.rest(env.memory);
                (Counter::DirectReads, Counter::RxBytes)
            }
        };
        let wqes = run.wqes;
        for (wqe, len) in wqes.into_iter().flatten().zip(run.lens) {
            env.counters.add(direct, 1);
            env.counters.add(bytes, len.into());
            self.add_direct_cost(len as usize);
            match wqe.opcode {
                Opcode::Write => {
                    self.finish(&Sending::new(wqe, len), llp.sealed(), env);
                }
                _ => {
                    env.counters.add(Counter::TxMessages, 1);
                    self.board(wqe, 0, len, Wait::Done);
                }
            }
        }
        Some(Step::Done { ended: true })
    }

    /// The requests from `first` on that can be carried out together, if they are several: each
    /// has at least, and all together at most, so many bytes.
    pub(super) fn collect<'t>(
        &mut self,
        first: &SendWqe,
        lens: RangeInclusive<u64>,
        qp: &Identity,
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
                && inline <= INLINE;
            if !joins {
                break;
            }
            if !is_inline {
                let need = match wqe.opcode {
                    Opcode::Read => Need::LocalWrite,
                    _ => Need::LocalRead,
                };
                let sge = self.sq.sge(&wqe, 0);
                let (stag, at) = (sge.stag.get(), sge.offset.get());
                let Ok(window) = env.memory.check(stag, qp.pd, qp.qid, at, len, need) else {
                    break;
                };
                let is_whole = |window: &Window<'_>| {
                    let extent = window.extents(0, len).next();
                    extent.is_some_and(|extent| extent.len() as u64 == len)
                };
                if window.is_elsewhere() || !is_whole(&window) {
                    break;
                }
                run.windows[run.number] = Some(window);
            }
            run.wqes[run.number] = Some(wqe);
            run.offsets[run.number] = wqe.remote_offset;
            run.lens[run.number] = len as u32;
            run.number += 1;
            next = self.sq.behind(&wqe);
        }
        (run.number > 1).then_some(run)
    }

    /// Writes the bytes of a run to its offsets of the target's STag.
    pub(super) fn write_run(&mut self, run: &Run<'_>, target: (u32, Need), env: &Env<'_>) -> Option<()> {
        let mut bytes = [0; INLINE];
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
        let neighbour = self.neighbour.as_mut()?;
        neighbour
            .write_batch(target, offsets, &mut batch, env.now.roughly())
            .ok()
    }

    fn read_run(&mut self, run: &Run<'_>, env: &Env<'_>) -> Option<()> {
        let mut batch: Batch<PieceMut<'_>> = Batch::new();
        for (window, len) in run.windows[..run.number].iter().flatten().zip(run.lens) {
            batch.push(window.pieces_mut(0, len.into()).next()?);
        }
        let (stag, offsets) = (run.wqes[0]?.stag, &run.offsets[..run.number]);
        let neighbour = self.neighbour.as_mut()?;
        neighbour
            .read_batch(stag, offsets, &mut batch, env.now.roughly())
            .ok()
    }
}
