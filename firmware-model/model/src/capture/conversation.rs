//! A TCP connection as the capture records it.
//!
//! The kernel does the real TCP, so the record shows the connection as the device saw it, without
//! loss and reordering: the handshake, each byte once, acknowledgements where an analyser would
//! need them, and how the connection ended.

use super::pcapng::{ACK, FIN, MAX_PAYLOAD, PSH, RST, SYN, Segment};
use crate::frames::Cutter;
use std::net::SocketAddr;

/// The addresses of the initiator and the responder.
pub(super) type Ends = (SocketAddr, SocketAddr);

/// The destination of segments with their payload.
pub(super) type Write<'w> = dyn FnMut(Segment, &[u8]) + 'w;

/// One of the ends, by its place in [`Ends`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// The end that connected.
    Initiator,
    /// The end that accepted.
    Responder,
}

/// Bytes after which the other end acknowledges, if it has not sent a packet since.
const ACKNOWLEDGE: u32 = 1 << 20;

/// The bytes and segments of one end.
#[derive(Debug)]
struct Direction {
    /// Bytes recorded; the bytes before this position were already reported, by the end that
    /// processed them first.
    taken: u64,
    /// The last of these bytes: the front of an incomplete frame.
    pending: Vec<u8>,
    cutter: Cutter,
    /// Sequence number of the next byte.
    sequence: u32,
    /// The last position of the other end that this end acknowledged.
    acknowledged: u32,
    finished: bool,
}

/// A connection.
#[derive(Debug)]
pub(super) struct Conversation {
    ends: Ends,
    directions: [Direction; 2],
    reset: bool,
}

impl Side {
    pub(super) fn other(self) -> Side {
        match self {
            Side::Initiator => Side::Responder,
            Side::Responder => Side::Initiator,
        }
    }
}

impl Direction {
    fn new(sequence: u32) -> Direction {
        Direction {
            taken: 0,
            pending: Vec::new(),
            cutter: Cutter::new(),
            sequence,
            acknowledged: 0,
            finished: false,
        }
    }
}

impl Conversation {
    /// A connection that was just made; `number` makes its sequence numbers differ from those of
    /// others. Segments to be written go to `write`.
    pub(super) fn open(ends: Ends, number: u32, write: &mut Write<'_>) -> Conversation {
        // Any distance is sufficient that a connection's bytes seldom bridge (RFC 9293 §3.4.1
        // requires a clock).
        let first = number.wrapping_mul(0x9e37_79b9);
        let mut conversation = Conversation {
            ends,
            directions: [Direction::new(first), Direction::new(!first)],
            reset: false,
        };
        conversation.bare(Side::Initiator, SYN, write);
        conversation.bare(Side::Responder, SYN | ACK, write);
        conversation.bare(Side::Initiator, ACK, write);
        conversation
    }

    /// Segment without payload.
    fn bare(&mut self, from: Side, flags: u8, write: &mut Write<'_>) {
        self.segment(from, flags, &[], write);
    }

    fn segment(&mut self, from: Side, flags: u8, payload: &[u8], write: &mut Write<'_>) {
        let acknowledged = match flags & ACK {
            0 => 0,
            _ => self.directions[from.other() as usize].sequence,
        };
        let (from_address, to) = match from {
            Side::Initiator => self.ends,
            Side::Responder => (self.ends.1, self.ends.0),
        };
        let direction = &mut self.directions[from as usize];
        direction.acknowledged = acknowledged;
        write(
            Segment {
                from: from_address,
                to,
                sequence: direction.sequence,
                acknowledged,
                flags,
            },
            payload,
        );
        // SYN and FIN count as one byte each (RFC 9293 §3.4).
        let counted = payload.len() as u32 + u32::from(flags & (SYN | FIN) != 0);
        direction.sequence = direction.sequence.wrapping_add(counted);
    }

    /// Records that one end sent `bytes`, which begin at position `offset` of its stream.
    pub(super) fn bytes(&mut self, from: Side, offset: u64, bytes: &[u8], write: &mut Write<'_>) {
        let other = from.other() as usize;
        let marked = self.directions[other].cutter.requests_markers;
        let direction = &mut self.directions[from as usize];
        let known = usize::try_from(direction.taken.saturating_sub(offset)).unwrap_or(usize::MAX);
        let Some(new) = bytes.get(known..).filter(|new| !new.is_empty()) else {
            return;
        };
        direction.taken += new.len() as u64;
        let mut pending = std::mem::take(&mut direction.pending);
        pending.extend(new);
        let mut rest = &pending[..];
        loop {
            // A packet holds one frame, or as much of it as fits: Wireshark's dissector (4.0 to
            // 4.4) loses a stream in which a segment ends an FPDU and has a few bytes of the next.
            let cutter = &mut self.directions[from as usize].cutter;
            let Some((frame, later)) = cutter
                .frame_len(rest, marked)
                .filter(|len| *len > 0)
                .and_then(|len| rest.split_at_checked(len))
            else {
                break;
            };
            cutter.pass(frame, frame.len());
            self.frame(from, frame, write);
            rest = later;
        }
        let done = pending.len() - rest.len();
        pending.drain(..done);
        self.directions[from as usize].pending = pending;
    }

    fn frame(&mut self, from: Side, frame: &[u8], write: &mut Write<'_>) {
        for piece in frame.chunks(MAX_PAYLOAD) {
            self.segment(from, PSH | ACK, piece, write);
        }
        let sent = self.directions[from as usize].sequence;
        if sent.wrapping_sub(self.directions[from.other() as usize].acknowledged) >= ACKNOWLEDGE {
            self.bare(from.other(), ACK, write);
        }
    }

    /// The rest of a frame that will not be completed.
    fn flush(&mut self, from: Side, write: &mut Write<'_>) {
        let rest = std::mem::take(&mut self.directions[from as usize].pending);
        self.frame(from, &rest, write);
    }

    /// Records that one end finished sending.
    pub(super) fn finish(&mut self, from: Side, write: &mut Write<'_>) {
        if self.reset || std::mem::replace(&mut self.directions[from as usize].finished, true) {
            return;
        }
        self.flush(from, write);
        self.bare(from, FIN | ACK, write);
        if self.directions[from.other() as usize].finished {
            self.bare(from.other(), ACK, write);
        }
    }

    /// Records that one end reset the connection.
    pub(super) fn reset(&mut self, from: Side, write: &mut Write<'_>) {
        if std::mem::replace(&mut self.reset, true) || self.directions.iter().all(|d| d.finished) {
            return;
        }
        self.flush(from, write);
        self.flush(from.other(), write);
        self.bare(from, RST | ACK, write);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The written packets: sender's port, sequence and acknowledgement from the handshake on,
    /// flags, payload.
    type Written = Vec<(u16, u32, u32, u8, Vec<u8>)>;

    const INITIATOR: u16 = 1;
    const RESPONDER: u16 = 2;

    fn ends() -> Ends {
        ("10.0.0.1:1".parse().unwrap(), "10.0.0.2:2".parse().unwrap())
    }

    fn recorded(script: impl FnOnce(&mut Conversation, &mut Write<'_>)) -> Written {
        let mut written = Written::new();
        let mut isns = [0; 2];
        let mut write = |segment: Segment, payload: &[u8]| {
            let from = segment.from.port();
            if segment.flags & SYN != 0 {
                isns[usize::from(from - 1)] = segment.sequence;
            }
            let [own, other] = [isns[usize::from(from - 1)], isns[usize::from(2 - from)]];
            let acknowledged = match segment.flags & ACK {
                0 => 0,
                _ => segment.acknowledged.wrapping_sub(other),
            };
            let sequence = segment.sequence.wrapping_sub(own);
            written.push((from, sequence, acknowledged, segment.flags, payload.to_vec()));
        };
        let mut conversation = Conversation::open(ends(), 7, &mut write);
        script(&mut conversation, &mut write);
        written
    }

    #[test]
    fn a_connection_from_syn_to_the_last_ack() {
        let written = recorded(|conversation, write| {
            conversation.bytes(Side::Initiator, 0, b"hello", write);
            conversation.bytes(Side::Responder, 0, b"hi", write);
            conversation.finish(Side::Initiator, write);
            conversation.finish(Side::Responder, write);
        });
        let want: Written = vec![
            (INITIATOR, 0, 0, SYN, vec![]),
            (RESPONDER, 0, 1, SYN | ACK, vec![]),
            (INITIATOR, 1, 1, ACK, vec![]),
            (INITIATOR, 1, 1, PSH | ACK, b"hello".to_vec()),
            (RESPONDER, 1, 6, PSH | ACK, b"hi".to_vec()),
            (INITIATOR, 6, 3, FIN | ACK, vec![]),
            (RESPONDER, 3, 7, FIN | ACK, vec![]),
            (INITIATOR, 7, 4, ACK, vec![]),
        ];
        assert_eq!(written, want);
    }

    #[test]
    fn a_frame_is_written_when_whole_or_when_the_stream_ends() {
        let request = b"MPA ID Req Frame\x40\x01\x00\x00";
        let written = recorded(|conversation, write| {
            conversation.bytes(Side::Initiator, 0, &request[..7], write);
            conversation.bytes(Side::Initiator, 7, &request[7..], write);
            conversation.bytes(Side::Initiator, 20, &[0, 18, 0x41], write);
            conversation.reset(Side::Responder, write);
            conversation.finish(Side::Initiator, write);
        });
        let want: Written = vec![
            (INITIATOR, 1, 1, PSH | ACK, request.to_vec()),
            (INITIATOR, 21, 1, PSH | ACK, vec![0, 18, 0x41]),
            (RESPONDER, 1, 24, RST | ACK, vec![]),
        ];
        assert_eq!(written[3..], want);
    }

    #[test]
    fn long_frames_take_packets_and_a_silent_peer_acknowledges() {
        let long = vec![b'x'; 2_000_000];
        let written = recorded(|conversation, write| conversation.bytes(Side::Initiator, 0, &long, write));
        let (data, acks): (Vec<_>, Vec<_>) = written[3..].iter().partition(|(from, ..)| *from == INITIATOR);
        let mut next = 1;
        for (_, sequence, _, _, payload) in data {
            assert_eq!(*sequence, next);
            assert!(payload.len() <= MAX_PAYLOAD);
            next += payload.len() as u32;
        }
        assert_eq!(next, 2_000_001);
        assert_eq!(acks.len(), 1);
    }

    proptest! {
        /// Both ends report all their bytes, in any interleaving in which no end receives bytes
        /// before they are sent.
        #[test]
        fn each_byte_is_written_once(
            stream in prop::collection::vec(any::<u8>(), 1..300),
            turns in prop::collection::vec((any::<bool>(), 1usize..50), 1..60),
        ) {
            let written = recorded(|conversation, write| {
                let mut offsets = [0usize; 2];
                for (which, len) in turns.into_iter().chain([(true, 300), (false, 300)]) {
                    let at = offsets[usize::from(which)];
                    let end = (at + len).min(stream.len());
                    conversation.bytes(Side::Responder, at as u64, &stream[at..end], write);
                    offsets[usize::from(which)] = end;
                }
                conversation.finish(Side::Responder, write);
            });
            let data: Vec<u8> = written.iter().flat_map(|(_, _, _, _, payload)| payload.clone()).collect();
            prop_assert_eq!(data, stream);
        }
    }
}
