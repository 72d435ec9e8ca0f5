//! Rings, with bytes of any lengths, and with words that cannot be.

use super::super::layout::MEMORY;
use super::*;
use proptest::prelude::*;
use std::collections::VecDeque;

fn ends() -> (Arc<SharedMemory>, RingSender, RingReceiver) {
    let memory = Arc::new(SharedMemory::create("ring", MEMORY).unwrap().0);
    let direction = Direction::FromResponder;
    let (sender, receiver) = (
        RingSender::new(memory.clone(), direction),
        RingReceiver::new(memory.clone(), direction),
    );
    (memory, sender, receiver)
}

#[derive(Debug, Clone)]
enum Step {
    Send(Vec<usize>),
    Receive(Vec<usize>),
}

fn step() -> impl Strategy<Value = Step> {
    let sizes = || {
        prop::collection::vec(
            prop_oneof![0..24usize, 0..200usize, 0..9000usize, 0..600_000usize],
            1..4,
        )
    };
    prop_oneof![sizes().prop_map(Step::Send), sizes().prop_map(Step::Receive)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// However the bytes are cut, they arrive in order, and a sender that found no room is notified
    /// when there is some.
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
                        // The next send continues after what was taken.
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
    passes(50 << 20, 70_001);
}

/// Beside the tail, which the next message may overwrite at any time.
#[test]
fn two_threads_pass_many_short_messages() {
    passes(4 << 20, INLINE_COPY_MAX + 3);
}

/// Passes so many bytes from one thread to another, in messages of all lengths up to a longest one.
fn passes(total: usize, longest: usize) {
    let (_, mut sender, mut receiver) = ends();
    let sending = std::thread::spawn(move || {
        let mut sent = 0;
        while sent < total {
            let len = (sent % longest + 1).min(total - sent);
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
                assert!(into[..n].iter().enumerate().all(right), "after {received}");
                received += n;
            }
            Err(StreamError::WouldBlock) => std::thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(received, total);
    sending.join().unwrap();
}

#[test]
fn a_single_short_message_is_taken_from_the_inline_copy() {
    let (memory, mut sender, mut receiver) = ends();
    let ring = FIRST_RINGS.of(Direction::FromResponder);
    let mut into = [0; 2 * INLINE_COPY_MAX];
    let mut receive = |receiver: &mut RingReceiver, room: usize| {
        let (received, _) = receiver.receive(&mut [PieceMut::of(&mut into[..room])]).unwrap();
        into[..received].to_vec()
    };
    for len in [1, 32, INLINE_COPY_MAX] {
        sender.send(&[Piece::of(&vec![7; len])]).unwrap();
        memory.copy_in(ring, &[0; 2 * INLINE_COPY_MAX]);
        assert_eq!(receive(&mut receiver, 2 * INLINE_COPY_MAX), vec![7; len]);
    }
    // Two messages; a longer one; and one of which fewer bytes are requested.
    let cases: [(&[usize], usize); 3] = [
        (&[8, 8], 16),
        (&[INLINE_COPY_MAX + 1], INLINE_COPY_MAX + 1),
        (&[32], 31),
    ];
    for (sent, room) in cases {
        let (memory, mut sender, mut receiver) = ends();
        for len in sent {
            sender.send(&[Piece::of(&vec![7; *len])]).unwrap();
        }
        memory.copy_in(ring, &[9; 2 * INLINE_COPY_MAX]);
        assert_eq!(receive(&mut receiver, room), vec![9; room]);
    }
}

#[test]
fn a_ring_grows_when_it_was_too_small_and_no_further() {
    let (memory, mut sender, mut receiver) = ends();
    let length_in = |memory: &Arc<SharedMemory>| {
        let words = memory.words::<RingWords>(RING_WORDS.of(Direction::FromResponder));
        words.length.load(Ordering::Relaxed) as usize
    };
    let bytes = vec![1; 2 * MOST];
    sender.send(&[Piece::of(&bytes[..100])]).unwrap();
    assert_eq!(length_in(&memory), FIRST, "small messages need no more");
    for _ in 0..20 {
        while receiver.receive(&mut [PieceMut::of(&mut vec![0; MOST])]).is_ok() {}
        sender.send(&[Piece::of(&bytes)]).unwrap();
    }
    assert_eq!(length_in(&memory), MOST);
    // Many small messages that find no room make it grow, too.
    let (memory, mut sender, mut receiver) = ends();
    for _ in 0..20 {
        while receiver.receive(&mut [PieceMut::of(&mut vec![0; MOST])]).is_ok() {}
        while sender.send(&[Piece::of(&bytes[..64])]) == Ok(64) {}
    }
    assert_eq!(length_in(&memory), MOST);
}

/// A sender that found no room detects by itself when there is enough.
#[test]
fn shm_02_a_sender_without_room_sees_when_there_is_some() {
    let (memory, mut sender, mut receiver) = ends();
    let bytes = vec![7; MOST];
    assert_eq!(sender.send(&[Piece::of(&bytes)]), Ok(MOST));
    let mut take = |n: usize| receiver.receive(&mut [PieceMut::of(&mut vec![0; n])]).unwrap();
    assert!(!sender.has_room());
    take(RING_PART - 1);
    assert!(!sender.has_room());
    take(1);
    assert!(sender.has_room());
    assert_eq!(sender.send(&[Piece::of(&bytes)]), Ok(RING_PART));
    // An impossible value is no reason to wait.
    let words = memory.words::<RingWords>(RING_WORDS.of(Direction::FromResponder));
    words.head.store(u64::MAX, Ordering::Relaxed);
    assert!(sender.has_room());
    assert_eq!(sender.send(&[Piece::of(&bytes)]), Err(broken()));
}

/// Whatever a hostile peer writes into the words, an end reports a broken connection or continues,
/// and reads and writes nothing outside the ring.
#[test]
fn shm_07_words_that_cannot_be_end_the_connection() {
    let bad_lengths = [0, 1, 256, 4095, 3 * 4096, 2 * MOST as u32, u32::MAX];
    for length in bad_lengths {
        let (memory, mut sender, mut receiver) = ends();
        sender.send(&[Piece::of(b"good")]).unwrap();
        let words = memory.words::<RingWords>(RING_WORDS.of(Direction::FromResponder));
        words.length.store(length, Ordering::Relaxed);
        let received = receiver.receive(&mut [PieceMut::of(&mut [0; 8])]);
        assert_eq!(received.err(), Some(broken()), "length {length}");
    }
    for tail in [FIRST as u64 + 1, u64::MAX, 1 << 63] {
        let (memory, mut sender, mut receiver) = ends();
        sender.send(&[Piece::of(b"good")]).unwrap();
        let words = memory.words::<RingWords>(RING_WORDS.of(Direction::FromResponder));
        words.tail.store(tail, Ordering::Relaxed);
        let received = receiver.receive(&mut [PieceMut::of(&mut [0; 8])]);
        assert_eq!(received.err(), Some(broken()), "tail {tail}");
    }
    for head in [5, u64::MAX - FIRST as u64, 1 << 63] {
        let (memory, mut sender, _) = ends();
        sender.send(&[Piece::of(b"good")]).unwrap();
        let words = memory.words::<RingWords>(RING_WORDS.of(Direction::FromResponder));
        words.head.store(head, Ordering::Relaxed);
        let sent = sender.send(&[Piece::of(&[0; FIRST])]);
        assert_eq!(sent.err(), Some(broken()), "head {head}");
    }
}

#[test]
fn inaccessible_memory_is_a_fault_and_sends_nothing() {
    crate::host::fault::install();
    let (_, mut sender, mut receiver) = ends();
    let pieces = [Piece::of(b"before"), inaccessible()];
    assert_eq!(sender.send(&pieces), Err(StreamError::Fault));
    assert!(receiver.is_empty());
    sender.send(&[Piece::of(b"behind")]).unwrap();
    let mut into = [0; 6];
    receiver.receive(&mut [PieceMut::of(&mut into)]).unwrap();
    assert_eq!(&into, b"behind");
}

/// Bytes that were published before a fault count as sent, as by a system call.
#[test]
fn a_fault_after_many_bytes_counts_those_before_it() {
    crate::host::fault::install();
    let (_, mut sender, mut receiver) = ends();
    let before: Vec<u8> = (0..3 * RING_PART + 5).map(|n| n as u8).collect();
    let pieces = [Piece::of(&before), inaccessible()];
    let sent = sender.send(&pieces).unwrap();
    assert_eq!(sent, 3 * RING_PART);
    assert_eq!(sender.send(&[pieces[1]]), Err(StreamError::Fault));
    let mut into = vec![0; before.len()];
    let (received, _) = receiver.receive(&mut [PieceMut::of(&mut into)]).unwrap();
    assert_eq!((received, &into[..sent]), (sent, &before[..sent]));
}

/// A page without rights, which stays for ever: no other thread gets its address.
fn inaccessible() -> Piece<'static> {
    let start = urnic_sys::Pages::reserved(4096).unwrap().leak();
    // SAFETY: it is never unmapped, and only read by guarded copies.
    let page = Box::leak(Box::new(unsafe { Mapping::of_raw(start, 4096) }));
    page.piece()
}
