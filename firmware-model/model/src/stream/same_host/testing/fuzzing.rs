//! An end of a connection in memory whose other end is a fuzzer, which may change every word and
//! byte that both have mapped, and the messages of start-up.

use crate::host::{Piece, PieceMut, SharedMemory};
use crate::memory::{ForeignTable, MemoryAccess, Need};
use crate::stream::descriptor::Descriptors;
use crate::stream::same_host::layout::Direction;
use crate::stream::same_host::layout::MEMORY;
use crate::stream::same_host::messages::{Disclosure, Greeting, Message};
use crate::stream::same_host::notification::{MEMORY as PAGE, NotificationPage, PeerPage, SLOTS};
use crate::stream::same_host::ring::{RingReceiver, RingSender};
use rustix::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use urnic_testkit::Source;
use zerocopy::FromBytes;

/// Entries of the table of STags.
const ENTRIES: u32 = 8;
/// Bytes of the memory of a connection in which its words are.
const WORDS: usize = 4096;

/// A mostly small number, as lengths and positions are.
fn number(source: &mut Source<'_>) -> u64 {
    match source.byte() {
        0xff => u64::from_le_bytes(source.take()),
        0xfe => source.word().into(),
        byte => u64::from(byte) << (source.byte() % 24),
    }
}

/// Sends, receives, answers a notification page and checks accesses, between changes of any word:
/// nothing panics and nothing outside is touched, whatever the words are.
pub(crate) fn same_host(data: &[u8]) {
    let mut source = Source::new(data);
    let descriptors = Descriptors::new(16, None);
    let connection = SharedMemory::create("fuzzed", MEMORY).map(|(memory, _)| Arc::new(memory));
    let table = SharedMemory::create("fuzzed", 64 + ENTRIES as usize * 64);
    let (Ok(connection), Ok((table, file)), Ok(notifications)) =
        (connection, table, NotificationPage::new(&descriptors))
    else {
        return;
    };
    let notifications = Arc::new(notifications);
    let [memory, waker] = notifications
        .passed()
        .map(|fd| fd.try_clone_to_owned().map(|fd| descriptors.adopt(fd)));
    let (Ok(Ok(memory)), Ok(Ok(waker))) = (memory, waker) else {
        return;
    };
    let (Ok(peer), Ok(page_words)) = (
        PeerPage::open(&memory, &waker, &descriptors),
        SharedMemory::open(memory.as_fd(), PAGE),
    ) else {
        return;
    };
    let slots: Vec<_> = (0..70).filter_map(|_| notifications.slot()).collect();
    slots.iter().for_each(|slot| slot.bind(slot.number + 1));
    let mut sender = RingSender::new(connection.clone(), Direction::FromInitiator);
    let mut receiver = RingReceiver::new(connection.clone(), Direction::FromResponder);
    let mut bytes = vec![0u8; 1 << 20];
    while !source.is_empty() {
        match source.byte() % 8 {
            0 => {
                let bytes: [u8; size_of::<Greeting>()] = source.take();
                let greeting = Greeting::read_from_bytes(&bytes);
                if let Ok(greeting) = greeting
                    && greeting.is_valid()
                {
                    assert!(greeting.slot() < SLOTS);
                    assert!(greeting.descriptors(source.byte().is_multiple_of(2)) <= 3);
                    let _ = (greeting.initiator(), greeting.nonce());
                }
                let bytes: [u8; size_of::<Disclosure>()] = source.take();
                let disclosure = Disclosure::read_from_bytes(&bytes);
                if let Ok(disclosure) = disclosure
                    && disclosure.is_valid()
                {
                    let host = disclosure.table().is_some_and(|table| table.host_proof.is_some());
                    assert!(!host || disclosure.descriptors(false) == 2);
                }
            }
            1 => {
                let at = number(&mut source) as usize % (WORDS / 8) * 8;
                connection
                    .word64(at)
                    .store(number(&mut source), Ordering::Relaxed);
            }
            2 => {
                let n = number(&mut source) as usize % bytes.len();
                if let Ok(sent) = sender.send(&[Piece::of(&bytes[..n])]) {
                    assert!(sent <= n);
                }
            }
            3 => {
                let n = number(&mut source) as usize % bytes.len();
                if let Ok((received, _)) = receiver.receive(&mut [PieceMut::of(&mut bytes[..n])]) {
                    assert!(received <= n);
                }
                let _ = (receiver.is_ended(), receiver.is_left());
            }
            4 => {
                let at = number(&mut source) as usize % (PAGE / 8) * 8;
                page_words
                    .word64(at)
                    .store(number(&mut source), Ordering::Relaxed);
            }
            5 => {
                peer.notify(number(&mut source) as u32);
                if notifications.is_rung() {
                    // Slots without a connection have no queue pair.
                    notifications.answer(|qid| assert!((1..=70).contains(&qid)));
                }
                notifications.take_wakes();
            }
            6 => {
                let at = number(&mut source) as usize % (table.len() / 8) * 8;
                table.word64(at).store(number(&mut source), Ordering::Relaxed);
            }
            _ => {
                let Ok(foreign) = ForeignTable::open(file.as_fd(), ENTRIES) else {
                    return;
                };
                let (stag, permit) = (number(&mut source) as u32, number(&mut source));
                let (offset, len) = (number(&mut source), number(&mut source));
                let mut last = None;
                for need in [Need::RemoteRead, Need::RemoteWrite, Need::RemoteAtomic] {
                    for offset in [offset, offset.wrapping_add(len)] {
                        let access = MemoryAccess {
                            stag,
                            offset,
                            len,
                            need,
                        };
                        let _ = foreign.check(&mut last, (permit, 1), &access);
                    }
                }
                foreign.proof();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn shm_07_any_words_in_shared_memory_are_harmless(data in prop::collection::vec(any::<u8>(), 0..600)) {
            super::same_host(&data);
        }
    }
}
