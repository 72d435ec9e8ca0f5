//! Payload of large segments goes from the stream directly to its place.

use super::Engine;
use super::receive::{Stop, note_first_fpdu};
use crate::counters::Counter;
use crate::host::PieceMut;
use crate::llp::mpa::Filled;
use crate::llp::{Llp, LlpError};
use crate::rdmap::env::Env;
use crate::rdmap::responder::Refusal;
use crate::stream::Stream;

impl Engine {
    /// Has the payload of a large segment read directly to its place, if no other bytes come before
    /// it.
    pub(super) fn begin_direct(&mut self, env: &mut Env<'_>) -> Result<(), Stop> {
        let Some(Llp::Mpa(mpa)) = &mut self.llp else {
            return Ok(());
        };
        let Some((head, ulpdu_len)) = mpa
            .rx
            .direct_candidate()
            .filter(|(head, _)| !self.held.stops(head))
        else {
            return Ok(());
        };
        match self.halves.begin_direct(env, head, ulpdu_len) {
            // Without a receive the segment is assembled first, and then held.
            Ok(None) | Err(Refusal::Stall) => {}
            Ok(Some(segment)) => {
                let at = segment.len - mpa.rx.begin_direct();
                self.direct = Some((segment, at, mpa.rx.position()));
            }
            Err(refusal) => return Err(Stop::new(refusal, head, ulpdu_len)),
        }
        Ok(())
    }

    /// Reads from the stream: into the buffer, or payload to its place.
    pub(super) fn fill(
        &mut self,
        env: &mut Env<'_>,
        stream: &mut dyn Stream,
    ) -> Result<(usize, Filled), Stop> {
        let Some(Llp::Mpa(mpa)) = &mut self.llp else {
            return Ok((0, Filled::Nothing));
        };
        if self.direct.is_none() {
            return Ok(mpa.rx.fill(env.buffers, stream)?);
        }
        self.fill_direct(env, stream)
    }

    fn fill_direct(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> Result<(usize, Filled), Stop> {
        let (Some(Llp::Mpa(mpa)), Some((segment, at, _))) = (&mut self.llp, &self.direct) else {
            return Ok((0, Filled::Nothing));
        };
        let (segment, at) = (*segment, *at);
        let window = match at < segment.len {
            false => None,
            true => match self.halves.window(env, &segment, at) {
                Ok(window) => window,
                Err(refusal) => return Err(Stop::in_segment(refusal, &segment)),
            },
        };
        // Where memory is reached by copies, which may begin in the middle of a segment
        // (`ibv_rereg_mr`), one more buffer lies between.
        let elsewhere = window.as_ref().filter(|(window, _)| window.is_elsewhere());
        // What is dropped goes into such a buffer, too.
        let dropped = if window.is_none() { segment.len - at } else { 0 };
        let mut between = (elsewhere.is_some() || dropped > 0).then(|| env.buffers.take());
        let mut pieces = self.pieces.take();
        match (&window, &mut between) {
            (Some((_, n)), Some(buffer)) => {
                let n = buffer.len().min(*n);
                pieces.push(PieceMut::of(&mut buffer[..n]));
            }
            (Some((window, n)), None) => pieces.extend(window.pieces_mut(0, *n as u64)),
            (None, Some(buffer)) => {
                let n = buffer.len().min(dropped);
                pieces.push(PieceMut::of(&mut buffer[..n]));
            }
            (None, None) => {}
        }
        let mut read = mpa.rx.fill_direct(env.buffers, stream, &mut pieces);
        self.pieces.give(pieces);
        if let Some(buffer) = between {
            if let (Ok((placed, ..)), Some((window, _))) = (&read, &window)
                && window.copy_in(0, &buffer[..*placed]).is_err()
            {
                read = Err(LlpError::Fault);
            }
            env.buffers.give(buffer);
        }
        if let (Err(LlpError::Fault), Some((window, n))) = (&read, &window) {
            window.report(0, *n as u64);
        }
        drop(window);
        let (placed, bytes, filled) = match read {
            Ok(read) => read,
            Err(LlpError::Fault) => {
                return Err(Stop::in_segment(self.halves.place_failed(&segment), &segment));
            }
            Err(error) => return Err(Stop::Llp(error)),
        };
        self.note_placed(env, placed)?;
        Ok((bytes, filled))
    }

    /// Notes that `placed` bytes of the segment are in their place, and ends it if it is complete.
    fn note_placed(&mut self, env: &mut Env<'_>, placed: usize) -> Result<(), Stop> {
        let (Some(Llp::Mpa(mpa)), Some((segment, at, _))) = (&self.llp, &mut self.direct) else {
            return Ok(());
        };
        *at += placed;
        self.halves.placed(segment, placed);
        if !mpa.rx.direct_ended() {
            return Ok(());
        }
        let segment = *segment;
        let is_first = !std::mem::replace(&mut self.fpdu_received, true);
        env.counters.add(Counter::RxFpdus, 1);
        if let Err(refusal) = self.halves.end(env, &segment) {
            return Err(Stop::in_segment(refusal, &segment));
        }
        self.direct = None;
        if is_first {
            note_first_fpdu(&self.halves, env, self.initiator, self.may_begin);
        }
        self.halves.responder.cq.flush(env)?;
        self.note_progress();
        Ok(())
    }
}
