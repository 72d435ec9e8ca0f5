//! Where the frames of a stream end, seen from outside, and how many messages have ended.

use crate::frames::Cutter;
use crate::host::Piece;
use urnic_wire::ddp;
use urnic_wire::mpa::fpdu::LENGTH_LEN;
use urnic_wire::mpa::{marker, startup};

/// Bytes that say how long an FPDU is, and whether a message ends with it: a marker, ULPDU_Length,
/// and the control byte of DDP.
const FPDU_FRONT: usize = marker::LEN + LENGTH_LEN + 2;
/// Bytes that say how long any frame is.
const FRONT: usize = startup::HEADER_LEN;

/// Follows one direction of a stream.
#[derive(Debug)]
pub(super) struct Follower {
    cutter: Cutter,
    /// The front of a frame, until its length is known.
    front: Vec<u8>,
    /// Bytes of a frame behind its front, that have not passed.
    rest: usize,
    ends_message: bool,
    messages: u64,
}

impl Follower {
    pub(super) fn new() -> Follower {
        Follower {
            cutter: Cutter::new(),
            front: Vec::with_capacity(FRONT),
            rest: 0,
            ends_message: false,
            messages: 0,
        }
    }

    /// Messages that have passed.
    pub(super) fn messages(&self) -> u64 {
        self.messages
    }

    /// Whether the sender of this direction wants markers in the other one.
    pub(super) fn requests_markers(&self) -> bool {
        self.cutter.requests_markers
    }

    /// The position in the FPDUs of the stream, if one begins here.
    pub(super) fn fpdu_begins(&self) -> Option<u64> {
        let between = self.rest == 0 && self.front.is_empty();
        self.cutter.fpdu_offset().filter(|_| between)
    }

    /// Bytes that do not reach behind the end of the frame here.
    pub(super) fn in_frame(&self) -> usize {
        match self.rest {
            0 => self.wanted(),
            rest => rest,
        }
    }

    /// Bytes of a front that are missing.
    fn wanted(&self) -> usize {
        match self.front.len() {
            have @ 0..FPDU_FRONT => FPDU_FRONT - have,
            have => FRONT.saturating_sub(have),
        }
    }

    /// The first `len` bytes of these pieces have passed. `marked`: with markers.
    pub(super) fn pass<'a>(&mut self, pieces: impl Iterator<Item = Piece<'a>>, mut len: usize, marked: bool) {
        for piece in pieces {
            let mut piece = piece.first(len);
            len -= piece.len();
            while !piece.is_empty() {
                let n = self.in_frame().min(piece.len());
                if self.rest > 0 {
                    self.pass_rest(n);
                } else if n == 0 || piece.first(n).append_to(&mut self.front).is_err() {
                    // What it was is not to be known any more.
                    self.rest = usize::MAX;
                    return;
                } else {
                    self.note_front(marked);
                }
                piece = piece.skip(n);
            }
        }
    }

    fn note_front(&mut self, marked: bool) {
        if self.front.len() < FPDU_FRONT {
            return;
        }
        let Some(len) = self.cutter.frame_len(&self.front, marked) else {
            return;
        };
        let fpdu = self.cutter.fpdu(&self.front, marked);
        let control = fpdu.and_then(|fpdu| fpdu.get(LENGTH_LEN));
        self.ends_message = control.is_some_and(|control| ddp::is_last(*control));
        self.cutter.pass(&self.front, len);
        self.rest = len.saturating_sub(self.front.len());
        self.front.clear();
        self.pass_rest(0);
    }

    fn pass_rest(&mut self, n: usize) {
        self.rest -= n;
        if self.rest == 0 {
            self.messages += u64::from(std::mem::take(&mut self.ends_message));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use urnic_wire::mpa::fpdu::{self, CrcMode};

    const REQUEST: &[u8] = b"MPA ID Req Frame\x40\x01\x00\x04abcd";

    proptest! {
        #[test]
        fn messages_are_counted_however_they_arrive(
            ulpdus in prop::collection::vec((14usize..3000, any::<bool>()), 1..12),
            pieces in prop::collection::vec(1usize..2000, 1..8),
            marked: bool,
        ) {
            let mut stream = REQUEST.to_vec();
            let (mut offset, mut messages) = (0, 0);
            for (len, last) in ulpdus {
                let mut buffer = vec![0; 2 * len + 64];
                let mut ulpdu = vec![0; len];
                ulpdu[0] = if last { 0xc1 } else { 0x81 };
                messages += u64::from(last);
                let written = match marked {
                    true => marker::emit(offset, &ulpdu, CrcMode::On, &mut buffer),
                    false => fpdu::emit(&ulpdu, CrcMode::On, &mut buffer),
                };
                offset += written as u64;
                stream.extend(&buffer[..written]);
            }
            let mut follower = Follower::new();
            let mut sizes = pieces.iter().cycle();
            let mut rest = &stream[..];
            while !rest.is_empty() {
                let (now, later) = rest.split_at((*sizes.next().unwrap()).min(rest.len()));
                follower.pass([Piece::of(now)].into_iter(), now.len(), marked);
                rest = later;
            }
            prop_assert_eq!(follower.messages(), messages);
            prop_assert_eq!(follower.fpdu_begins(), Some(offset));
        }

        #[test]
        fn anything_may_pass(
            stream in prop::collection::vec(any::<u8>(), 0..400),
            key: bool,
            marked: bool,
        ) {
            let stream = [if key { REQUEST } else { b"" }, &stream].concat();
            let mut follower = Follower::new();
            follower.pass([Piece::of(&stream)].into_iter(), stream.len(), marked);
        }
    }

    /// One who receives no more than is in the frame comes to its end, and not behind it.
    #[test]
    fn a_frame_is_not_left_by_what_is_in_it() {
        let mut buffer = [0; 200];
        let len = fpdu::emit(&[0x41; 100], CrcMode::On, &mut buffer);
        let stream = [REQUEST, &buffer[..len], &buffer[..len]].concat();
        let mut follower = Follower::new();
        let mut at = 0;
        let mut ends = Vec::new();
        while at < stream.len() {
            let n = follower.in_frame().min(stream.len() - at);
            follower.pass([Piece::of(&stream[at..])].into_iter(), n, false);
            at += n;
            if follower.fpdu_begins().is_some() {
                ends.push(at);
            }
        }
        assert_eq!(ends, [24, 24 + len, 24 + 2 * len]);
    }
}
