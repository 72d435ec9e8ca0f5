//! Segments that a peer on this host lends, and that come by one copy.

use super::rig::*;
use crate::host::{Piece, PieceMut, Unreachable};
use crate::rdmap::{Attachment, RxOutcome};
use crate::stream::{Between, LargePiece, Stream, StreamError};
use proptest::prelude::*;
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use urnic_device::event::QpFault;
use urnic_device::vocabulary::WcStatus;
use urnic_wire::ddp::UNTAGGED_LEN;
use urnic_wire::mpa::fpdu::{CRC_LEN, LENGTH_LEN};

/// Bytes of a stream that come through memory, or that the peer lends.
#[derive(Debug, Clone)]
enum Part {
    Bytes(Vec<u8>),
    Lent(Vec<u8>),
}

/// What the engine did.
#[derive(Debug, Default)]
struct Seen {
    sent: Vec<u8>,
    /// Pieces of each copy of several.
    together: Vec<usize>,
}

/// A stream with these bytes.
#[derive(Debug)]
struct Script {
    parts: VecDeque<Part>,
    is_cut: bool,
    /// Several lent pieces can be received together.
    lends: bool,
    seen: Arc<Mutex<Seen>>,
}

impl Script {
    /// Takes bytes from the front as far as they belong to one part.
    fn take(&mut self, into: &mut PieceMut<'_>) -> usize {
        let Some(Part::Bytes(front) | Part::Lent(front)) = self.parts.front_mut() else {
            return 0;
        };
        let n = front.len().min(into.len());
        // SAFETY: the pieces are of this process, and there.
        let n = unsafe { into.copy_in(&front[..n]) };
        front.drain(..n);
        if front.is_empty() {
            self.parts.pop_front();
        }
        n
    }
}

impl Stream for Script {
    fn send(&mut self, pieces: &[Piece<'_>]) -> Result<usize, StreamError> {
        let sent = &mut self.seen.lock().unwrap().sent;
        let before = sent.len();
        for piece in pieces {
            piece.append_to(sent).map_err(|Unreachable| StreamError::Fault)?;
        }
        Ok(sent.len() - before)
    }

    fn receive(&mut self, into: &mut [PieceMut<'_>]) -> Result<usize, StreamError> {
        let mut received = 0;
        self.is_cut = false;
        for piece in into {
            let mut at = 0;
            while at < piece.len() {
                self.is_cut = received > 0 && matches!(self.parts.front(), Some(Part::Lent(_)));
                match self.is_cut {
                    true => return Ok(received),
                    false if self.parts.is_empty() && received == 0 => return Err(StreamError::WouldBlock),
                    false if self.parts.is_empty() => return Ok(received),
                    false => {}
                }
                let n = self.take(&mut piece.rest(at));
                (at, received) = (at + n, received + n);
            }
        }
        Ok(received)
    }

    fn is_cut(&self) -> bool {
        self.is_cut
    }

    fn lent(&mut self, n: usize) -> Option<LargePiece> {
        let mut parts = self.parts.iter().take(2 * n + 1).skip((2 * n).saturating_sub(1));
        let mut between = Between::of_len(0);
        if n > 0 {
            let Some(Part::Bytes(bytes)) = parts.next() else {
                return None;
            };
            between = Between::of_len(bytes.len());
            (bytes.len() == between.bytes().len()).then(|| between.bytes_mut().copy_from_slice(bytes))?;
        }
        match parts.next() {
            Some(Part::Lent(bytes)) if self.lends => Some(LargePiece {
                len: bytes.len(),
                between,
            }),
            _ => None,
        }
    }

    fn receive_lent(&mut self, pieces: usize, mut into: PieceMut<'_>) -> bool {
        self.seen.lock().unwrap().together.push(pieces);
        let mut at = 0;
        for n in 0..2 * pieces - 1 {
            match n % 2 {
                0 => at += self.take(&mut into.rest(at)),
                _ => drop(self.parts.pop_front()),
            }
        }
        assert_eq!(at, into.len());
        true
    }

    fn peek(&mut self) -> Result<bool, StreamError> {
        match self.parts.is_empty() {
            true => Err(StreamError::WouldBlock),
            false => Ok(true),
        }
    }

    fn finish(&mut self) {}

    fn reset(&mut self) {}

    fn mss(&self) -> u32 {
        65_496
    }

    fn established(&mut self) -> Result<bool, Errno> {
        Ok(true)
    }

    fn unacknowledged(&self) -> u32 {
        0
    }

    fn local(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, 1).into()
    }

    fn remote(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, 2).into()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// The FPDUs of these ULPDUs, whose payload is lent; a header has `header_len` bytes.
fn lent(ulpdus: &[Vec<u8>], header_len: usize) -> VecDeque<Part> {
    let mut parts = VecDeque::new();
    let mut before = Vec::new();
    for ulpdu in ulpdus {
        let frame = fpdu_of(ulpdu);
        let (head, rest) = frame.split_at(LENGTH_LEN + header_len);
        let (payload, trailer) = rest.split_at(ulpdu.len() - header_len);
        before.extend_from_slice(head);
        parts.push_back(Part::Bytes(std::mem::replace(&mut before, trailer.to_vec())));
        parts.push_back(Part::Lent(payload.to_vec()));
    }
    parts.push_back(Part::Bytes(before));
    parts
}

/// The segments of a Send with this payload.
fn segments(msn: u32, lengths: &[usize]) -> Vec<Vec<u8>> {
    let payload = pattern(lengths.iter().sum());
    let (mut mo, mut rest) = (0, &payload[..]);
    let segment = |len: &usize| {
        let part = rest.split_off(..*len).unwrap();
        let segment = send_segment(rest.is_empty(), msn, mo, part);
        mo += *len as u32;
        segment
    };
    lengths.iter().map(segment).collect()
}

/// An end of a connection that is in memory, so without CRCs, with this to receive.
fn node(parts: VecDeque<Part>, lends: bool) -> (Node, Region, Arc<Mutex<Seen>>) {
    let (memory, pd) = table();
    let mut node = Node::new(&Shape::default(), memory, pd, &Arc::new(AtomicU64::new(0)));
    let seen = Arc::new(Mutex::new(Seen::default()));
    let attachment = Attachment {
        crc: false,
        ..agreed(true)
    };
    let region = node.contiguous(1 << 21, everything());
    let stream = Script {
        parts,
        is_cut: false,
        lends,
        seen: seen.clone(),
    };
    node.attach(&attachment, stream);
    (node, region, seen)
}

#[test]
fn shm_17_segments_of_a_send_come_by_one_copy() {
    let lengths = [60_000; 20];
    let mut parts = lent(&segments(1, &lengths), UNTAGGED_LEN);
    parts.extend(lent(&segments(2, &[30_000, 20_000]), UNTAGGED_LEN));
    let (mut node, region, seen) = node(parts, true);
    node.post_recv(1, &[region.sge(0, 1_200_000)]);
    // A list: the parts do not lie side by side.
    node.post_recv(2, &[region.sge(1_200_000, 40_000), region.sge(1_250_000, 40_000)]);
    while node.pump() {}
    let done = [(1, WcStatus::Success, 1_200_000), (2, WcStatus::Success, 50_000)];
    assert_eq!(node.received(), done);
    let bytes = region.bytes();
    assert!(bytes[..1_200_000] == pattern(1_200_000));
    assert!(bytes[1_200_000..1_240_000] == pattern(50_000)[..40_000]);
    assert!(bytes[1_250_000..1_260_000] == pattern(50_000)[40_000..]);
    assert_eq!(seen.lock().unwrap().together, [8, 8, 4]);
}

#[test]
fn shm_17_segments_of_a_read_come_by_one_copy() {
    let payload = pattern(300_000);
    let (mut node, region, seen) = node(VecDeque::new(), true);
    let sink = region.sge(100, payload.len());
    let response = |n: usize, part: &[u8]| {
        let last = if n == 4 { 0x40 } else { 0 };
        let to = region.base + 100 + 60_000 * n as u64;
        tagged(0x81 | last, 0x42, region.stag, to, part)
    };
    let ulpdus: Vec<_> = payload
        .chunks(60_000)
        .enumerate()
        .map(|(n, part)| response(n, part))
        .collect();
    node.post(&Work::read(1, 5, 0).sge(sink));
    while node.pump() {}
    let parts = lent(&ulpdus, urnic_wire::ddp::TAGGED_LEN);
    node.with(|engine, env, _| {
        let mut stream = Script {
            parts,
            is_cut: false,
            lends: true,
            seen: seen.clone(),
        };
        while matches!(engine.receive(env, &mut stream), RxOutcome::More) {}
    });
    node.pump();
    assert_eq!(node.sent(), [(1, WcStatus::Success)]);
    assert!(region.bytes()[100..300_100] == payload);
    assert_eq!(seen.lock().unwrap().together, [5]);
}

/// What a program and a peer see of a connection.
#[derive(Debug, PartialEq)]
struct Outcome {
    received: Vec<(u64, WcStatus, u32)>,
    faults: Vec<(QpFault, u32)>,
    sent: Vec<u8>,
}

/// And the memory then.
fn outcome(parts: &VecDeque<Part>, lends: bool, room: usize) -> (Outcome, Vec<u8>) {
    let (mut node, region, seen) = node(parts.clone(), lends);
    node.post_recv(1, &[region.sge(0, room)]);
    node.post_recv(2, &[region.sge(1 << 20, 1 << 20)]);
    while node.pump() {}
    let outcome = Outcome {
        received: node.received(),
        faults: node.faults(),
        sent: seen.lock().unwrap().sent.clone(),
    };
    (outcome, region.bytes())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Nothing differs from pieces that come one by one, whatever is between them: errors neither,
    /// nor what is placed before.
    #[test]
    fn shm_17_segments_together_are_as_segments_one_by_one(
        lengths in prop::collection::vec(20_000..65_000usize, 1..12),
        change in prop::option::of((0..12usize, 0..30usize, any::<u8>())),
        short in prop::option::of(0..100_000usize),
    ) {
        let total: usize = lengths.iter().sum();
        let mut parts = lent(&segments(1, &lengths), UNTAGGED_LEN);
        parts.extend(lent(&segments(2, &lengths), UNTAGGED_LEN));
        if let Some((part, at, value)) = change
            && let Some(Part::Bytes(bytes)) = parts.get_mut(2 * part)
            && let Some(byte) = bytes.get_mut(at)
        {
            *byte = value;
        }
        let room = total.saturating_sub(short.unwrap_or(0)).max(1);
        let (together, alone) = (outcome(&parts, true, room), outcome(&parts, false, room));
        prop_assert_eq!(&together.0, &alone.0);
        prop_assert!(together.1 == alone.1, "other bytes are placed");
        let behind = &together.1[room..1 << 20];
        prop_assert!(behind.iter().all(|byte| *byte == 0), "bytes behind the receive are placed");
    }
}

/// A segment begins behind the CRC of the one before.
const _: () = assert!(Between::MOST >= 3 + CRC_LEN + LENGTH_LEN + UNTAGGED_LEN);
