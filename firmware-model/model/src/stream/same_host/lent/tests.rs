//! Lent pieces, however the bytes are cut, and whatever is withdrawn or cannot be fetched.

use super::super::direction::Direction;
use super::super::layout::{LENT_WORDS, MEMORY};
use super::super::neighbour::process::{PeerProcess, TableMessage};
use super::super::ring::{Receiver, Sender};
use super::words::*;
use super::*;
use crate::host::{Piece, PieceMut, SharedMemory, revocable};
use crate::memory::{Exports, MemoryTable};
use crate::stream::descriptor::Descriptors;
use crate::stream::{Between, Stable, StreamError};
use proptest::prelude::*;
use rustix::process::getpid;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Both ends of a direction, in this process.
struct Ends {
    memory: Arc<SharedMemory>,
    sender: Sender,
    lender: Lender,
    receiver: Receiver,
    /// The table is read whenever a piece is fetched.
    _exports: Arc<Exports>,
}

impl Ends {
    fn new() -> Ends {
        let memory = Arc::new(SharedMemory::create("lent", MEMORY).unwrap().0);
        let descriptors = Descriptors::new(16, None);
        let (exports, file) = MemoryTable::new(8, 1, 1, [1, 2, 3, 4, 5]).export(0x5eed).unwrap();
        let table = TableMessage {
            process: getpid().as_raw_nonzero().get().cast_unsigned(),
            slots: exports.slots(),
            address: exports.address(),
        };
        let file = descriptors.adopt(file).unwrap();
        let process = PeerProcess::open(getpid(), &file, table, &descriptors).unwrap();
        let direction = Direction::FromInitiator;
        let mut receiver = Receiver::new(memory.clone(), direction);
        receiver.fetch_by(Fetcher::new(&memory, direction, &Arc::new(process)));
        Ends {
            sender: Sender::new(memory.clone(), direction),
            lender: Lender::new(&memory, direction, getpid()),
            receiver,
            memory,
            _exports: exports,
        }
    }

    fn send(&mut self, pieces: &[Piece<'_>], stable: Stable) -> usize {
        match self.lender.send(&mut self.sender, pieces, stable) {
            Ok(sent) => sent,
            Err(StreamError::WouldBlock) => 0,
            Err(error) => panic!("{error}"),
        }
    }

    /// Receives at most `room` bytes; whether the sender is told.
    fn receive(&mut self, room: usize) -> (Vec<u8>, bool) {
        let mut bytes = vec![0; room];
        match self.receiver.receive(&mut [PieceMut::of(&mut bytes)]) {
            Ok((n, told)) => {
                bytes.truncate(n);
                (bytes, told)
            }
            Err(StreamError::WouldBlock) => (Vec::new(), false),
            Err(error) => panic!("{error}"),
        }
    }

    /// Receives at most `most` lent pieces by one copy, with what is between them; whether the
    /// sender is told.
    fn receive_together(&mut self, most: usize) -> (Vec<u8>, bool) {
        let pieces: Vec<_> = (0..most).map_while(|n| self.receiver.lent(n)).collect();
        let mut copied = vec![0; pieces.iter().map(|piece| piece.len).sum()];
        let into = PieceMut::of(&mut copied);
        let Some(told) = self.receiver.receive_lent(pieces.len(), into) else {
            return (Vec::new(), false);
        };
        let mut bytes = Vec::new();
        let mut rest = &copied[..];
        for piece in pieces {
            let (payload, behind) = rest.split_at(piece.len);
            bytes.extend_from_slice(piece.between.bytes());
            bytes.extend_from_slice(payload);
            rest = behind;
        }
        (bytes, told)
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        self.memory
            .word64(LENT_WORDS.of(Direction::FromInitiator) + offset)
    }

    /// Pieces that the receiver has.
    fn fetched(&self) -> u64 {
        self.word(FETCHED).load(Ordering::Relaxed) >> 32
    }
}

/// Bytes that differ from their neighbours.
fn bytes(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|n| ((n * 31 + seed * 7) >> 3) as u8).collect()
}

fn all_stable() -> Stable {
    let mut stable = Stable::default();
    (0..64).for_each(|piece| stable.mark(piece));
    stable
}

#[derive(Debug, Clone)]
enum Step {
    Send,
    Receive(usize),
    ReceiveTogether(usize),
    Withdraw,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => Just(Step::Send),
        4 => prop_oneof![1..100usize, 1..40_000usize, 1..400_000usize].prop_map(Step::Receive),
        3 => (1..6usize).prop_map(Step::ReceiveTogether),
        1 => Just(Step::Withdraw),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// The bytes arrive in order, whichever are lent and whenever pieces are withdrawn; and a
    /// sender that has not all taken is told when it can go on.
    #[test]
    fn shm_17_lent_pieces_arrive_in_order(
        sizes in prop::collection::vec(
            (prop_oneof![1..Between::MOST, 0..200usize], prop_oneof![1..200usize, 10_000..70_000usize, 1..300_000usize]),
            1..12,
        ),
        steps in prop::collection::vec(step(), 0..60),
    ) {
        let mut ends = Ends::new();
        // Some bytes, and then some of a buffer from which all are taken in turn.
        let heads = bytes(sizes.iter().map(|(head, _)| head).sum(), 1);
        let bodies = bytes(sizes.iter().map(|(_, body)| body).sum(), 2);
        let (mut heads_left, mut bodies_left) = (&heads[..], &bodies[..]);
        let mut content = Vec::new();
        for (head, body) in sizes {
            content.push(heads_left.split_off(..head).unwrap());
            content.push(bodies_left.split_off(..body).unwrap());
        }
        let whole = content.concat();
        let mut taken = 0;
        let mut received = Vec::new();
        let mut send = |ends: &mut Ends| {
            let mut skip = taken;
            let mut pieces = Vec::new();
            for piece in &content {
                let skipped = skip.min(piece.len());
                skip -= skipped;
                if skipped < piece.len() {
                    pieces.push(Piece::of(&piece[skipped..]));
                }
            }
            taken += ends.send(&pieces, all_stable());
            taken
        };
        for step in steps {
            match step {
                Step::Send => { send(&mut ends); }
                Step::Receive(room) => received.extend(ends.receive(room).0),
                Step::ReceiveTogether(most) => received.extend(ends.receive_together(most).0),
                Step::Withdraw => ends.lender.lending().withdraw(),
            }
        }
        // From here on the sender acts only when it is told.
        let mut told = true;
        for _ in 0..10_000 {
            if std::mem::take(&mut told) {
                send(&mut ends);
            }
            let (together, is_told) = ends.receive_together(3);
            let (bytes, is_told_then) = ends.receive(50_000);
            let is_told = is_told || is_told_then;
            told |= is_told;
            if together.is_empty() && bytes.is_empty() && !is_told {
                break;
            }
            received.extend(together);
            received.extend(bytes);
        }
        prop_assert_eq!(received.len(), whole.len());
        prop_assert!(received == whole);
        prop_assert_eq!(send(&mut ends), whole.len());
    }

    /// Nothing that the receiver writes makes the sender panic, or touch what it does not have.
    #[test]
    fn shm_07_a_sender_survives_any_words_of_the_receiver(
        words in prop::collection::vec((0..LENT_WORDS.len / 8, any::<u64>(), 0..8u64), 1..30),
    ) {
        let mut ends = Ends::new();
        let content = [bytes(40_000, 1), bytes(70_000, 2)];
        let pieces = content.each_ref().map(|bytes| Piece::of(bytes));
        let mut taken = 0;
        for (at, value, small) in words {
            let value = if small < 4 { small << 32 | value & 0xffff } else { value };
            ends.word(8 * at).store(value, Ordering::Relaxed);
            let rest = pieces.iter().scan(taken, |skip, piece| {
                let piece = piece.skip((*skip).min(piece.len()));
                *skip = skip.saturating_sub(piece.len());
                Some(piece)
            });
            let rest: Vec<_> = rest.filter(|piece| !piece.is_empty()).collect();
            match ends.lender.send(&mut ends.sender, &rest, all_stable()) {
                Ok(n) => taken += n,
                Err(StreamError::WouldBlock) => {}
                Err(_) => break,
            }
            prop_assert!(taken <= 110_000);
            if taken > 0 {
                break;
            }
        }
    }

    /// Nothing that the sender writes makes the receiver panic, or touch what it does not have.
    #[test]
    fn shm_07_a_receiver_survives_any_words_of_the_sender(
        words in prop::collection::vec((0..LENT_WORDS.len / 8, any::<u64>(), 0..8u64), 1..40),
    ) {
        let mut ends = Ends::new();
        for (at, value, small) in words {
            let value = if small < 5 { small } else { value };
            ends.word(8 * at).store(value, Ordering::Relaxed);
            let mut into = vec![0; 3000];
            let _ = ends.receiver.available();
            let _ = ends.receiver.receive(&mut [PieceMut::of(&mut into)]);
            let shown: Vec<_> = (0..3).map_while(|n| ends.receiver.lent(n)).collect();
            let len: usize = shown.iter().map(|piece| piece.len).sum();
            let _ = ends.receiver.receive_lent(shown.len(), PieceMut::of(&mut into));
            if len <= 1 << 20 {
                let mut into = vec![0; len];
                let _ = ends.receiver.receive_lent(shown.len(), PieceMut::of(&mut into));
            }
        }
    }
}

#[test]
fn shm_17_pieces_side_by_side_are_fetched_by_one_copy() {
    if !revocable::is_available() {
        eprintln!("SKIPPED: this C library registers no restartable sequences");
        return;
    }
    // Three large pieces side by side, and a few bytes before each.
    let (heads, bodies) = (bytes(24, 1), bytes(90_000, 2));
    let parts = heads.chunks(8).zip(bodies.chunks(30_000));
    let parts: Vec<_> = parts.flat_map(|(head, body)| [head, body]).collect();
    let whole = parts.concat();
    let pieces: Vec<_> = parts.iter().map(|part| Piece::of(part)).collect();
    let lent = || {
        let mut ends = Ends::new();
        assert_eq!(ends.send(&pieces, all_stable()), 8);
        assert!(ends.receiver.lent(0).is_none(), "bytes come before the piece");
        assert_eq!(ends.receive(100_000).0, &whole[..8]);
        ends
    };
    // All of them, by one copy.
    let mut ends = lent();
    let (received, told) = ends.receive_together(5);
    assert!(received == whole[8..], "three pieces, and what is between");
    assert!(told && ends.fetched() == 3);
    assert_eq!(ends.receiver.available(), Err(StreamError::WouldBlock));
    // One by one behind the first two.
    let mut ends = lent();
    assert!(ends.receive_together(2).0 == whole[8..60_016]);
    assert!(ends.receive(8).0 == whole[60_016..60_024]);
    // Not in the middle of one.
    assert!(ends.receive(1).0 == whole[60_024..60_025]);
    assert!(ends.receiver.lent(0).is_none());
    // None that was withdrawn since it was shown.
    let mut ends = lent();
    assert!((0..3).all(|n| ends.receiver.lent(n).is_some()));
    ends.lender.lending().withdraw();
    let mut into = vec![0; 90_000];
    assert_eq!(ends.receiver.receive_lent(3, PieceMut::of(&mut into)), None);
    assert!(into.iter().all(|byte| *byte == 0));
    // And not more than there is room for.
    let mut ends = lent();
    assert!((0..3).all(|n| ends.receiver.lent(n).is_some()));
    assert_eq!(ends.receiver.receive_lent(3, PieceMut::of(&mut into[1..])), None);
    assert_eq!(ends.receiver.receive_lent(4, PieceMut::of(&mut into)), None);
}

#[test]
fn shm_17_a_large_piece_is_fetched_by_one_copy() {
    if !revocable::is_available() {
        eprintln!("SKIPPED: this C library registers no restartable sequences");
        return;
    }
    let mut ends = Ends::new();
    let (head, body, tail) = (bytes(20, 1), bytes(60_000, 2), bytes(8, 3));
    let pieces = [&head, &body, &tail].map(|bytes| Piece::of(bytes));
    let mut stable = Stable::default();
    stable.mark(1);
    // What was put into the ring before the piece is taken; the rest waits for the receiver.
    assert_eq!(ends.send(&pieces, stable), 20);
    // What comes before the piece is received alone, so that the piece gets to its place directly.
    assert_eq!(ends.receive(100_000).0, head);
    assert!(ends.receiver.is_cut());
    let (received, told) = ends.receive(60_000);
    assert_eq!(received, body);
    assert!(told);
    assert_eq!(ends.word(BUFFERED).load(Ordering::Relaxed), 0);
    assert_eq!(ends.send(&[pieces[1], pieces[2]], stable), 60_008);
    assert_eq!(ends.receive(100).0, tail);
}

/// When the withdrawal has returned, the bytes may change: the receiver gets what the sender then
/// offers.
#[test]
fn shm_17_a_withdrawn_piece_is_not_read_any_more() {
    let mut ends = Ends::new();
    let body = bytes(200_000, 1);
    let mut memory = body.clone();
    assert_eq!(ends.send(&[Piece::of(&memory)], all_stable()), 0);
    ends.lender.lending().withdraw();
    memory.fill(0xee);
    let mut received: Vec<u8> = Vec::new();
    let mut taken = 0;
    while received.len() < body.len() {
        let (bytes, told) = ends.receive(30_000);
        received.extend(&bytes);
        assert!(!bytes.is_empty() || told, "nobody goes on");
        if told {
            taken += ends.send(&[Piece::of(&body[taken..])], all_stable());
        }
    }
    assert_eq!(received, body);
    assert_eq!(ends.fetched(), 1);
}

/// As in a process that gave up its user's rights (setuid(2)).
#[test]
fn shm_17_pieces_that_cannot_be_fetched_pass_through_memory() {
    let mut ends = Ends::new();
    let body = bytes(150_000, 1);
    let pieces = [Piece::of(&body)];
    assert_eq!(ends.send(&pieces, all_stable()), 0);
    // An address where nothing is.
    ends.word(PIECES + ADDRESS).store(8, Ordering::Relaxed);
    let mut received: Vec<u8> = Vec::new();
    let mut taken = 0;
    while received.len() < body.len() {
        let (bytes, told) = ends.receive(1 << 20);
        received.extend(&bytes);
        assert!(!bytes.is_empty() || told, "nobody goes on");
        if told {
            taken += ends.send(&[Piece::of(&body[taken..])], all_stable());
        }
    }
    assert_eq!(received, body);
    // Nothing is lent after that.
    assert!(ends.send(&pieces, all_stable()) > 0);
    assert_eq!(ends.word(COUNT).load(Ordering::Relaxed), 1);
}
