//! The frames of a stream and their messages, as seen from outside, by what does not take part in
//! the connection: captures, faults and timelines.

use crate::host::Piece;
use crate::time::Nanos;
use urnic_wire::ddp;
use urnic_wire::mpa::fpdu::LENGTH_LEN;
use urnic_wire::mpa::{fpdu, marker, startup};
use urnic_wire::rdmap::{Control, Opcode};

// The ends of MPA's frames in one direction of a stream.
//
// Captures and faults observe a stream from outside, where TCP, and the reader's socket, may cut it
// anywhere.

/// The common beginning of the keys of start-up frames (RFC 5044 §7.1.1).
const KEY: &[u8] = b"MPA ID ";
/// The beginning of the key of the RTR frame proposed in 2007, in either spelling.
const RTR_KEY: &[u8] = b"MPA ID Rt";
/// The M bit of the byte after the key (RFC 5044 §7.1.1).
const WANTS_MARKERS: u8 = 0x80;

/// The part that comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// A start-up frame.
    StartUp,
    /// The first FPDU, or the RTR frame of 2007.
    Started,
    /// FPDUs.
    FullOperation,
    /// The stream is not MPA.
    Unknown,
}

/// Cuts one direction.
#[derive(Debug)]
pub(crate) struct Cutter {
    phase: Phase,
    /// Bytes of FPDUs and markers before the front.
    offset: u64,
    /// This side requested markers in the data that it receives.
    pub(crate) requests_markers: bool,
}

impl Cutter {
    pub(crate) fn new() -> Cutter {
        Cutter {
            phase: Phase::StartUp,
            offset: 0,
            requests_markers: false,
        }
    }

    /// Length of the frame at the front of `bytes`, which may be longer than `bytes`; `None` if
    /// `bytes` are too few to determine it. `marked`: the other side requested markers.
    pub(crate) fn frame_len(&mut self, bytes: &[u8], marked: bool) -> Option<usize> {
        loop {
            return match self.phase {
                Phase::StartUp => {
                    let known = bytes.len().min(KEY.len());
                    if bytes[..known] != KEY[..known] {
                        self.phase = Phase::Unknown;
                        continue;
                    }
                    startup_len(bytes)
                }
                Phase::Started => {
                    if bytes.get(..RTR_KEY.len())? == RTR_KEY {
                        return startup_len(bytes);
                    }
                    self.phase = Phase::FullOperation;
                    continue;
                }
                Phase::FullOperation if marked => marker::wire_len(self.offset, bytes),
                Phase::FullOperation => fpdu::ulpdu_len(bytes).map(fpdu::fpdu_len),
                Phase::Unknown => (!bytes.is_empty()).then_some(bytes.len()),
            };
        }
    }

    /// The FPDU at the front of `bytes`, whose length is known, without a marker in front of it;
    /// `None`: no FPDU follows.
    pub(crate) fn fpdu<'b>(&self, bytes: &'b [u8], marked: bool) -> Option<&'b [u8]> {
        match self.phase {
            Phase::FullOperation if marked && marker::distance(self.offset) == 0 => bytes.get(marker::LEN..),
            Phase::FullOperation => Some(bytes),
            _ => None,
        }
    }

    /// Position of the front, if it is in FPDUs: bytes of FPDUs and markers before it.
    pub(crate) fn fpdu_offset(&self) -> Option<u64> {
        matches!(self.phase, Phase::Started | Phase::FullOperation).then_some(self.offset)
    }

    /// Passes over the frame at the front, whose length was returned before; `front`: its bytes, or
    /// at least the header of a start-up frame.
    pub(crate) fn pass(&mut self, front: &[u8], len: usize) {
        match self.phase {
            Phase::StartUp => {
                self.requests_markers = front.get(16).is_some_and(|flags| flags & WANTS_MARKERS != 0);
                self.phase = Phase::Started;
            }
            Phase::Started => self.phase = Phase::FullOperation,
            Phase::FullOperation => self.offset += len as u64,
            Phase::Unknown => {}
        }
    }
}

fn startup_len(bytes: &[u8]) -> Option<usize> {
    let len = bytes.get(startup::HEADER_LEN - 2..startup::HEADER_LEN)?;
    Some(startup::HEADER_LEN + usize::from(u16::from_be_bytes([len[0], len[1]])))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use urnic_wire::mpa::fpdu::CrcMode;

    const REQUEST: &[u8] = b"MPA ID Req Frame\x40\x01\x00\x04abcd";

    /// Feeds a stream in pieces; the lengths of the frames found.
    fn cut(stream: &[u8], pieces: &[usize], marked: bool) -> Vec<usize> {
        let mut cutter = Cutter::new();
        let (mut pending, mut found) = (Vec::new(), Vec::new());
        let mut rest = stream;
        let mut sizes = pieces.iter().cycle();
        while !rest.is_empty() {
            let (now, later) = rest.split_at((*sizes.next().unwrap()).min(rest.len()));
            pending.extend(now);
            rest = later;
            while let Some(len) = cutter
                .frame_len(&pending, marked)
                .filter(|len| *len <= pending.len())
            {
                cutter.pass(&pending[..len], len);
                found.push(len);
                pending.drain(..len);
            }
        }
        assert!(pending.is_empty(), "all of it was frames");
        found
    }

    proptest! {
        #[test]
        fn frames_are_found_however_they_arrive(
            ulpdus in prop::collection::vec(14usize..3000, 1..12),
            pieces in prop::collection::vec(1usize..2000, 1..8),
            marked: bool,
        ) {
            let mut stream = REQUEST.to_vec();
            let mut lengths = vec![REQUEST.len()];
            let mut offset = 0;
            for len in ulpdus {
                let mut buffer = vec![0; 2 * len + 64];
                let ulpdu = vec![0xa5; len];
                let written = match marked {
                    true => marker::emit(offset, &ulpdu, CrcMode::On, &mut buffer),
                    false => fpdu::emit(&ulpdu, CrcMode::On, &mut buffer),
                };
                offset += written as u64;
                stream.extend(&buffer[..written]);
                lengths.push(written);
            }
            prop_assert_eq!(cut(&stream, &pieces, marked), lengths);
        }
    }

    #[test]
    fn the_rtr_frame_of_2007_is_one_of_start_up() {
        for key in [&b"MPA ID RtR Frame"[..], b"MPA ID Rtr Frame"] {
            let fpdu = [
                0, 0x12, 0x41, 0x43, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 2, 3, 4,
            ];
            let stream = [REQUEST, key, &[0, 1, 0, 0], &fpdu].concat();
            assert_eq!(cut(&stream, &[3], false), [24, 20, 24]);
        }
    }

    #[test]
    fn data_that_is_not_mpa_is_captured_unchanged() {
        assert_eq!(cut(b"GET / HTTP/1.0\r\n", &[5], false), [5, 5, 5, 1]);
        assert_eq!(cut(b"MPA, I say", &[2], false), [4, 2, 2, 2]);
    }
}

// Where the frames of a stream end, seen from outside, and how many messages have ended.

/// Bytes that determine the length of an FPDU and its message: a marker, ULPDU_Length, and the
/// control bytes of DDP and RDMAP.
const FPDU_FRONT: usize = marker::LEN + LENGTH_LEN + 2;
/// Bytes that determine the length of any frame.
const FRONT: usize = startup::HEADER_LEN;
/// Bytes up to the end of the message offset of a Send, without a marker; and where that begins.
const SEND_FRONT: usize = LENGTH_LEN + ddp::UNTAGGED_LEN;
const MO: usize = SEND_FRONT - 4;

/// An RDMAP message that has passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Message {
    /// The opcode.
    pub(crate) opcode: Opcode,
    /// Bytes after the headers of DDP.
    pub(crate) bytes: u64,
    /// The time when its first byte passed.
    pub(crate) began: Nanos,
}

impl Message {
    fn is_counted(self) -> bool {
        self.opcode != Opcode::Write || self.bytes > 0
    }
}

/// Follows one direction of a stream.
#[derive(Debug)]
pub(crate) struct Follower {
    cutter: Cutter,
    /// The front of a frame, until its length is known, and other bytes of it that are needed.
    front: Vec<u8>,
    /// Bytes of the front that are needed.
    needed: usize,
    /// Bytes of a frame after its front, that have not passed.
    rest: usize,
    /// The messages in flight: segments of several opcodes may alternate.
    open: Vec<Message>,
    /// The message of the frame, if it ends with the frame.
    ending: Option<Message>,
    messages: u64,
}

impl Follower {
    pub(crate) fn new() -> Follower {
        Follower {
            cutter: Cutter::new(),
            front: Vec::with_capacity(FRONT),
            needed: FPDU_FRONT,
            rest: 0,
            open: Vec::new(),
            ending: None,
            messages: 0,
        }
    }

    /// Messages that have passed, without Writes of length zero: most of these are urnic's
    /// confirmations.
    pub(crate) fn messages(&self) -> u64 {
        self.messages
    }

    /// Whether the sender of this direction wants markers in the other one.
    pub(crate) fn requests_markers(&self) -> bool {
        self.cutter.requests_markers
    }

    /// The position in the FPDUs of the stream, if one begins here.
    pub(crate) fn fpdu_begins(&self) -> Option<u64> {
        let between = self.rest == 0 && self.front.is_empty();
        self.cutter.fpdu_offset().filter(|_| between)
    }

    /// Bytes that do not reach beyond the end of the frame here.
    pub(crate) fn in_frame(&self) -> usize {
        match self.rest {
            0 => self.needed - self.front.len(),
            rest => rest,
        }
    }

    /// The first `len` bytes of these pieces have passed, at a time. `marked`: with markers. Calls
    /// `ended` for each message that ends with them.
    pub(crate) fn pass<'a>(
        &mut self,
        pieces: impl Iterator<Item = Piece<'a>>,
        mut len: usize,
        marked: bool,
        at: Nanos,
        ended: &mut dyn FnMut(Message),
    ) {
        for piece in pieces {
            let mut piece = piece.first(len);
            len -= piece.len();
            while !piece.is_empty() {
                let n = self.in_frame().min(piece.len());
                if self.rest > 0 {
                    self.pass_rest(n, ended);
                } else if n == 0 || piece.first(n).append_to(&mut self.front).is_err() {
                    // The kind of the frame cannot be determined any more.
                    self.rest = usize::MAX;
                    return;
                } else {
                    self.note_front(marked, at, ended);
                }
                piece = piece.skip(n);
            }
        }
    }

    fn note_front(&mut self, marked: bool, at: Nanos, ended: &mut dyn FnMut(Message)) {
        if self.front.len() < self.needed {
            return;
        }
        let Some(len) = self.cutter.frame_len(&self.front, marked) else {
            // `in_frame` is 0 if no more bytes are needed.
            self.needed = FRONT.max(self.front.len());
            return;
        };
        let fpdu = self.cutter.fpdu(&self.front, marked);
        if let Some(fpdu) = fpdu
            && let [high, low, control, rdmap, ..] = fpdu
            && let Ok(Control { opcode }) = Control::parse(*rdmap)
        {
            let header = ddp::header_len(*control);
            let payload = usize::from(u16::from_be_bytes([*high, *low])).saturating_sub(header);
            let mut before = None;
            if is_send(opcode) && header == ddp::UNTAGGED_LEN && !marked && len >= SEND_FRONT {
                before = fpdu.get(MO..).and_then(|mo| mo.first_chunk());
                if before.is_none() {
                    self.needed = SEND_FRONT;
                    return;
                }
            }
            let before = before.map(|mo| u32::from_be_bytes(*mo).into());
            self.segment(opcode, (before, payload as u64), ddp::is_last(*control), at);
        }
        self.cutter.pass(&self.front, len);
        self.rest = len.saturating_sub(self.front.len());
        self.front.clear();
        self.needed = FPDU_FRONT;
        self.pass_rest(0, ended);
    }

    /// A segment with `payload` bytes begins. `before`, if known, is the number of bytes of its
    /// message before it, including payload that was placed directly.
    fn segment(&mut self, opcode: Opcode, (before, payload): (Option<u64>, u64), last: bool, at: Nanos) {
        let known = self.open.iter().position(|message| message.opcode == opcode);
        let mut message = known.map_or(
            Message {
                opcode,
                bytes: 0,
                began: at,
            },
            |known| self.open.swap_remove(known),
        );
        message.bytes = before.unwrap_or(message.bytes) + payload;
        match last {
            true => self.ending = Some(message),
            false => self.open.push(message),
        }
    }

    fn pass_rest(&mut self, n: usize, ended: &mut dyn FnMut(Message)) {
        self.rest -= n;
        if self.rest == 0
            && let Some(message) = self.ending.take()
        {
            self.messages += u64::from(message.is_counted());
            ended(message);
        }
    }
}

/// Whether a message is a Send.
fn is_send(opcode: Opcode) -> bool {
    matches!(
        opcode,
        Opcode::Send | Opcode::SendInvalidate | Opcode::SendSolicited | Opcode::SendSolicitedInvalidate
    )
}

#[cfg(test)]
mod follower_tests {
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
            let (mut offset, mut messages) = (0, Vec::new());
            let mut bytes = 0;
            for (len, last) in ulpdus {
                let mut buffer = vec![0; 2 * len + 64];
                let mut ulpdu = vec![0; len];
                ulpdu[0] = if last { 0xc1 } else { 0x81 };
                ulpdu[1] = 0x40;
                bytes += len as u64 - 14;
                if last {
                    messages.push((Opcode::Write, std::mem::take(&mut bytes)));
                }
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
            let mut found = Vec::new();
            while !rest.is_empty() {
                let (now, later) = rest.split_at((*sizes.next().unwrap()).min(rest.len()));
                let mut ended = |message: Message| found.push((message.opcode, message.bytes));
                follower.pass([Piece::of(now)].into_iter(), now.len(), marked, Nanos(0), &mut ended);
                rest = later;
            }
            let counted = messages.iter().filter(|(_, bytes)| *bytes > 0).count();
            prop_assert_eq!(follower.messages(), counted as u64);
            prop_assert_eq!(found, messages);
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
            follower.pass([Piece::of(&stream)].into_iter(), stream.len(), marked, Nanos(0), &mut |_| {});
        }
    }

    /// Segments of a Write and of a Read Response may alternate.
    #[test]
    fn a_message_begins_with_its_first_segment() {
        let segment = |opcode: Opcode, last: bool| {
            let mut buffer = [0; 64];
            let control = if last { 0xc1 } else { 0x81 };
            let ulpdu = [&[control, Control::from(opcode).byte()][..], &[0; 22]].concat();
            let len = fpdu::emit(&ulpdu, CrcMode::On, &mut buffer);
            buffer[..len].to_vec()
        };
        let (write, response) = (Opcode::Write, Opcode::ReadResponse);
        let segments = [(write, false), (response, false), (write, true), (response, true)];
        let mut follower = Follower::new();
        let mut found = Vec::new();
        let mut pass = |bytes: &[u8], at: u64| {
            let mut ended = |message| found.push((at, message));
            follower.pass(
                [Piece::of(bytes)].into_iter(),
                bytes.len(),
                false,
                Nanos(at),
                &mut ended,
            );
        };
        pass(REQUEST, 1);
        for (at, (opcode, last)) in (2..).zip(segments) {
            pass(&segment(opcode, last), at);
        }
        let message = |opcode, began| Message {
            opcode,
            bytes: 20,
            began: Nanos(began),
        };
        assert_eq!(found, [(4, message(write, 2)), (5, message(response, 3))]);
    }

    /// The cuts of the stream do not matter.
    #[test]
    fn a_send_whose_payload_was_placed_directly_has_its_bytes() {
        let segment = |last: bool, mo: u32, payload: usize| {
            let mut buffer = [0; 200];
            let control = [if last { 0x41 } else { 0x01 }, Control::from(Opcode::Send).byte()];
            let ulpdu = [&control[..], &[0; 12], &mo.to_be_bytes(), &vec![9; payload]].concat();
            let len = fpdu::emit(&ulpdu, CrcMode::On, &mut buffer);
            buffer[..len].to_vec()
        };
        let stream = [
            REQUEST.to_vec(),
            segment(true, 1000, 0),
            segment(false, 500, 100),
            segment(true, 600, 50),
            segment(true, 0, 7),
        ]
        .concat();
        for size in 1..50 {
            let mut follower = Follower::new();
            let mut found = Vec::new();
            for bytes in stream.chunks(size) {
                let mut ended = |message: Message| found.push(message.bytes);
                follower.pass(
                    [Piece::of(bytes)].into_iter(),
                    bytes.len(),
                    false,
                    Nanos(0),
                    &mut ended,
                );
            }
            assert_eq!(found, [1000, 650, 7], "{size} at a time");
        }
    }

    /// A receiver that takes no more than `left` reaches the end of the frame, and never passes it.
    #[test]
    fn contents_of_a_frame_do_not_end_it() {
        let mut buffer = [0; 200];
        let len = fpdu::emit(&[0x41; 100], CrcMode::On, &mut buffer);
        let stream = [REQUEST, &buffer[..len], &buffer[..len]].concat();
        let mut follower = Follower::new();
        let mut at = 0;
        let mut ends = Vec::new();
        while at < stream.len() {
            let n = follower.in_frame().min(stream.len() - at);
            follower.pass(
                [Piece::of(&stream[at..])].into_iter(),
                n,
                false,
                Nanos(0),
                &mut |_| {},
            );
            at += n;
            if follower.fpdu_begins().is_some() {
                ends.push(at);
            }
        }
        assert_eq!(ends, [24, 24 + len, 24 + 2 * len]);
    }
}
