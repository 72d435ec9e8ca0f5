//! Rings, with bytes of any lengths, and with words that cannot be.

use super::super::layout::MEMORY;
use super::*;
use proptest::prelude::*;
use std::collections::VecDeque;

fn ends() -> (Arc<SharedMemory>, Sender, Receiver) {
    let memory = Arc::new(SharedMemory::create("ring", MEMORY).unwrap().0);
    let direction = Direction::FromResponder;
    let (sender, receiver) = (
        Sender::new(memory.clone(), direction),
        Receiver::new(memory.clone(), direction),
    );
    (memory, sender, receiver)
}

#[derive(Debug, Clone)]
enum Step {
    Send(Vec<usize>),
    Receive(Vec<usize>),
}

fn step() -> impl Strategy<Value = Step> {
    let sizes = || prop::collection::vec(prop_oneof![0..200usize, 0..9000usize, 0..600_000usize], 1..4);
    prop_oneof![sizes().prop_map(Step::Send), sizes().prop_map(Step::Receive)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// However the bytes are cut, they arrive in order, and a sender that found no room is told
    /// when there is.
    #[test]
    fn shm_02_bytes_arrive_in_order(steps in prop::collection::vec(step(), 1..60)) {
        let (_, mut sender, mut receiver) = ends();
        let mut under_way = VecDeque::new();
        let mut next = 0u8;
        let mut waits = false;
        for step in steps {
            match step {
                Step::Send(sizes) => {
                    let mut fill = |len| (0..len).map(|_| { next = next.wrapping_mul(5).wrapping_add(3); next }).collect();
                    let bytes: Vec<Vec<u8>> = sizes.into_iter().map(&mut fill).collect();
                    let pieces: Vec<_> = bytes.iter().map(|b| Piece::of(b)).collect();
                    let all = bytes.concat();
                    let sent = match sender.send(&pieces) {
                        Ok(sent) => sent,
                        Err(error) => { prop_assert_eq!(error, StreamError::WouldBlock); 0 }
                    };
                    prop_assert!(sent > 0 || all.is_empty() || !under_way.is_empty());
                    waits |= sent < all.len();
                    next = all.get(..sent).and_then(|s| s.last().copied()).unwrap_or(next);
                    if sent < all.len() {
                        // The next send continues behind what was taken.
                        next = under_way.back().copied().filter(|_| sent == 0).unwrap_or(next);
                    }
                    under_way.extend(&all[..sent]);
                }
                Step::Receive(sizes) => {
                    let mut into: Vec<Vec<u8>> = sizes.into_iter().map(|n| vec![0; n]).collect();
                    let room: usize = into.iter().map(Vec::len).sum();
                    let mut pieces: Vec<_> = into.iter_mut().map(|b| PieceMut::of(b)).collect();
                    let received = receiver.receive(&mut pieces);
                    drop(pieces);
                    match received {
                        Ok((received, told)) => {
                            prop_assert_eq!(received, room.min(under_way.len()));
                            let expected: Vec<u8> = under_way.drain(..received).collect();
                            prop_assert_eq!(&into.concat()[..received], &expected[..]);
                            prop_assert!(told || !waits || !under_way.is_empty());
                            waits &= !told;
                        }
                        Err(error) => {
                            prop_assert_eq!(error, StreamError::WouldBlock);
                            prop_assert!(under_way.is_empty());
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn two_threads_pass_many_bytes() {
    let (_, mut sender, mut receiver) = ends();
    const TOTAL: usize = 50 << 20;
    let sending = std::thread::spawn(move || {
        let mut sent = 0;
        while sent < TOTAL {
            let len = (sent % 70_001 + 1).min(TOTAL - sent);
            let bytes: Vec<u8> = (sent..sent + len).map(|n| (n % 251) as u8).collect();
            let mut at = 0;
            while at < len {
                match sender.send(&[Piece::of(&bytes[at..])]) {
                    Ok(n) => at += n,
                    Err(StreamError::WouldBlock) => std::thread::yield_now(),
                    Err(error) => panic!("{error}"),
                }
            }
            sent += len;
        }
        sender.end();
    });
    let mut received = 0;
    let mut into = vec![0; 33_333];
    while !receiver.is_ended() {
        match receiver.receive(&mut [PieceMut::of(&mut into)]) {
            Ok((n, _)) => {
                let right = |(at, byte): (usize, &u8)| *byte == ((received + at) % 251) as u8;
                assert!(into[..n].iter().enumerate().all(right), "behind {received}");
                received += n;
            }
            Err(StreamError::WouldBlock) => std::thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(received, TOTAL);
    sending.join().unwrap();
}

#[test]
fn a_ring_grows_when_it_was_too_small_and_no_further() {
    let (memory, mut sender, mut receiver) = ends();
    let length = || {
        memory
            .word(RING_WORDS.of(Direction::FromResponder) + LENGTH)
            .load(Ordering::Relaxed) as usize
    };
    let bytes = vec![1; 2 * MOST];
    sender.send(&[Piece::of(&bytes[..100])]).unwrap();
    assert_eq!(length(), FIRST, "small messages need no more");
    for _ in 0..20 {
        while receiver.receive(&mut [PieceMut::of(&mut vec![0; MOST])]).is_ok() {}
        sender.send(&[Piece::of(&bytes)]).unwrap();
    }
    assert_eq!(length(), MOST);
    // Many small messages that find no room make it grow, too.
    let (memory, mut sender, mut receiver) = ends();
    for _ in 0..20 {
        while receiver.receive(&mut [PieceMut::of(&mut vec![0; MOST])]).is_ok() {}
        while sender.send(&[Piece::of(&bytes[..64])]) == Ok(64) {}
    }
    assert_eq!(
        memory
            .word(RING_WORDS.of(Direction::FromResponder) + LENGTH)
            .load(Ordering::Relaxed) as usize,
        MOST
    );
}

/// Whatever a hostile peer writes into the words, an end reports a broken connection or carries
/// on, and reads and writes nothing outside the ring.
#[test]
fn shm_07_words_that_cannot_be_end_the_connection() {
    let bad_lengths = [0, 1, 256, 4095, 3 * 4096, 2 * MOST as u32, u32::MAX];
    for length in bad_lengths {
        let (memory, mut sender, mut receiver) = ends();
        sender.send(&[Piece::of(b"good")]).unwrap();
        memory
            .word(RING_WORDS.of(Direction::FromResponder) + LENGTH)
            .store(length, Ordering::Relaxed);
        let received = receiver.receive(&mut [PieceMut::of(&mut [0; 8])]);
        assert_eq!(received.err(), Some(broken()), "length {length}");
    }
    for tail in [FIRST as u64 + 1, u64::MAX, 1 << 63] {
        let (memory, mut sender, mut receiver) = ends();
        sender.send(&[Piece::of(b"good")]).unwrap();
        memory
            .word64(RING_WORDS.of(Direction::FromResponder) + TAIL)
            .store(tail, Ordering::Relaxed);
        let received = receiver.receive(&mut [PieceMut::of(&mut [0; 8])]);
        assert_eq!(received.err(), Some(broken()), "tail {tail}");
    }
    for head in [5, u64::MAX - FIRST as u64, 1 << 63] {
        let (memory, mut sender, _) = ends();
        sender.send(&[Piece::of(b"good")]).unwrap();
        memory
            .word64(RING_WORDS.of(Direction::FromResponder) + HEAD)
            .store(head, Ordering::Relaxed);
        let sent = sender.send(&[Piece::of(&[0; FIRST])]);
        assert_eq!(sent.err(), Some(broken()), "head {head}");
    }
}

#[test]
fn inaccessible_memory_is_a_fault_and_sends_nothing() {
    crate::host::fault::install();
    let (_, mut sender, mut receiver) = ends();
    let gone = SharedMemory::create("gone", 4096).unwrap().0;
    // A piece that refers to memory which is unmapped before it is used.
    let piece = gone.piece();
    let pieces = [Piece::of(b"before"), unsafe_gone(piece)];
    drop(gone);
    assert_eq!(sender.send(&pieces), Err(StreamError::Fault));
    assert!(receiver.is_empty());
    sender.send(&[Piece::of(b"behind")]).unwrap();
    let mut into = [0; 6];
    receiver.receive(&mut [PieceMut::of(&mut into)]).unwrap();
    assert_eq!(&into, b"behind");
}

/// What was shown to the receiver before a fault is sent, as by a system call.
#[test]
fn a_fault_behind_many_bytes_counts_what_is_before() {
    crate::host::fault::install();
    let (_, mut sender, mut receiver) = ends();
    let gone = SharedMemory::create("gone", 4096).unwrap().0;
    let before: Vec<u8> = (0..3 * PART + 5).map(|n| n as u8).collect();
    let pieces = [Piece::of(&before), unsafe_gone(gone.piece())];
    drop(gone);
    let sent = sender.send(&pieces).unwrap();
    assert_eq!(sent, 3 * PART);
    assert_eq!(sender.send(&[pieces[1]]), Err(StreamError::Fault));
    let mut into = vec![0; before.len()];
    let (received, _) = receiver.receive(&mut [PieceMut::of(&mut into)]).unwrap();
    assert_eq!((received, &into[..sent]), (sent, &before[..sent]));
}

/// The piece for a life of its own, as a registration gives it out.
fn unsafe_gone(piece: Piece<'_>) -> Piece<'static> {
    // SAFETY: a piece is an address and a length; the memory is only read by guarded copies.
    unsafe { std::mem::transmute::<Piece<'_>, Piece<'static>>(piece) }
}
