//! Payload of large segments goes from the stream directly to its place.
//!
//! Several segments of a message that a peer on this host lends ([`Stream::lent`]) come by one
//! copy: the headers between them are examined first, as far as they say where the payload goes.
//! Then each segment is processed as if it had come by itself.

use super::Engine;
use super::receive::{Stop, note_first_fpdu};
use crate::counters::Counter;
use crate::host::PieceMut;
use crate::llp::mpa::Filled;
use crate::llp::{Llp, LlpError};
use crate::rdmap::ahead::{Ahead, TOGETHER, begins, continued};
use crate::rdmap::env::Env;
use crate::rdmap::responder::Refusal;
use crate::stream::{Between, Stream};
use rustix::io::Errno;

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
                self.direct.segment = Some((segment, at));
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
        if self.direct.segment.is_none() && self.direct.ahead.is_empty() {
            return Ok(mpa.rx.fill(env.buffers, stream)?);
        }
        if self.direct.ahead.is_empty() {
            self.receive_ahead(env, stream)?;
        }
        match self.direct.ahead.pop_front() {
            Some(ahead) => self.fill_ahead(env, ahead),
            None => self.fill_direct(env, stream),
        }
    }

    fn fill_direct(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> Result<(usize, Filled), Stop> {
        let (Some(Llp::Mpa(mpa)), Some((segment, at))) = (&mut self.llp, &self.direct.segment) else {
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
        let mut pieces = self.direct.pieces.take();
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
        self.direct.pieces.give(pieces);
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

    /// Receives the segment and those behind it by one copy, if the peer lends them and their
    /// payload belongs side by side.
    fn receive_ahead(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> Result<(), Stop> {
        let (Some(Llp::Mpa(mpa)), Some((segment, at))) = (&self.llp, &self.direct.segment) else {
            return Ok(());
        };
        let (segment, at) = (*segment, *at);
        let Some((missing, mut trailer)) = mpa.rx.direct_missing().filter(|_| !segment.header.last()) else {
            return Ok(());
        };
        if missing == 0 || stream.lent(0).is_none_or(|piece| piece.len != missing) {
            return Ok(());
        }
        let ahead = &mut self.direct.ahead;
        let (mut header, mut len, mut total) = (segment.header, segment.len, missing);
        ahead.push_back(Ahead {
            len: missing,
            behind: None,
        });
        while ahead.len() < TOGETHER
            && !header.last()
            && let Some(piece) = stream.lent(ahead.len())
        {
            let with = |last| {
                let header = continued(&header, len, last);
                begins(&piece.between, trailer, &header, piece.len).map(|trailer| (header, trailer))
            };
            let Some((next, its_trailer)) = with(false).or_else(|| with(true)) else {
                break;
            };
            (header, len, trailer) = (next, piece.len, its_trailer);
            total += len;
            if let Some(before) = ahead.back_mut() {
                before.behind = Some(piece.between);
            }
            ahead.push_back(Ahead { len, behind: None });
        }
        let window = match ahead.len() {
            1 => None,
            _ => (self.halves.window_ahead(env, &segment, total))
                .map_err(|refusal| Stop::in_segment(refusal, &segment))?,
        };
        let window = window.filter(|(window, n)| !window.is_elsewhere() && (missing..=total).contains(n));
        let ahead = &mut self.direct.ahead;
        if let Some((window, n)) = window {
            while total > n
                && let Some(last) = ahead.pop_back()
            {
                total -= last.len;
            }
            if let Some(last) = ahead.back_mut() {
                last.behind = None;
            }
            let mut pieces = window.pieces_mut(0, total as u64);
            if ahead.len() > 1
                && let (Some(whole), None) = (pieces.next(), pieces.next())
                && stream.receive_lent(ahead.len(), whole)
            {
                debug_assert_eq!(at + missing, segment.len);
                return Ok(());
            }
        }
        ahead.clear();
        Ok(())
    }

    /// The payload of the segment is in its place already.
    fn fill_ahead(&mut self, env: &mut Env<'_>, ahead: Ahead) -> Result<(usize, Filled), Stop> {
        let Some(Llp::Mpa(mpa)) = &mut self.llp else {
            return Ok((0, Filled::Nothing));
        };
        if mpa
            .rx
            .direct_missing()
            .is_none_or(|(missing, _)| missing != ahead.len)
        {
            // Its header was not taken for what it was before the copy.
            return Err(Stop::Llp(LlpError::Lost(Errno::PROTO)));
        }
        let behind = ahead.behind.as_ref().map_or(&[][..], Between::bytes);
        mpa.rx.fill_ahead(env.buffers, behind);
        self.note_placed(env, ahead.len)?;
        Ok((ahead.len + behind.len(), Filled::All))
    }

    /// Notes that `placed` bytes of the segment are in their place, and ends it if it is complete.
    fn note_placed(&mut self, env: &mut Env<'_>, placed: usize) -> Result<(), Stop> {
        let (Some(Llp::Mpa(mpa)), Some((segment, at))) = (&self.llp, &mut self.direct.segment) else {
            return Ok(());
        };
        *at += placed;
        self.halves.placed(segment, placed);
        if !mpa.rx.direct_ended() {
            return Ok(());
        }
        let segment = *segment;
        self.direct.segment = None;
        if !self.fpdu_received {
            self.fpdu_received = true;
            note_first_fpdu(&self.halves, env, self.initiator, self.may_begin);
        }
        env.counters.add(Counter::RxFpdus, 1);
        if let Err(refusal) = self.halves.end(env, &segment) {
            return Err(Stop::in_segment(refusal, &segment));
        }
        self.halves.responder.cq.flush(env)?;
        self.note_progress();
        Ok(())
    }
}
