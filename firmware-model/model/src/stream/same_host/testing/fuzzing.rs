//! An end of a connection in memory whose other end is a fuzzer, which may change every word and
//! byte that both have mapped, and the messages of start-up.

use crate::host::{Piece, PieceMut, SharedMemory};
use crate::memory::{ForeignTable, Need};
use crate::stream::descriptor::Descriptors;
use crate::stream::same_host::bell::{Bell, MEMORY as BELL, PeerBell, SLOTS};
use crate::stream::same_host::direction::Direction;
use crate::stream::same_host::layout::MEMORY;
use crate::stream::same_host::messages::{Disclosure, Greeting, Message};
use crate::stream::same_host::ring::{Receiver, Sender};
use rustix::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use zerocopy::FromBytes;

/// Entries of the table of STags.
const ENTRIES: u32 = 8;
/// Bytes of the memory of a connection in which its words are.
const WORDS: usize = 4096;

/// The rest of the fuzzer's bytes, then zeroes.
struct Source<'a>(&'a [u8]);

impl Source<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        let n = N.min(self.0.len());
        let (head, tail) = self.0.split_at(n);
        bytes[..n].copy_from_slice(head);
        self.0 = tail;
        bytes
    }

    fn byte(&mut self) -> u8 {
        let [byte] = self.take();
        byte
    }

    /// Mostly a small number, as lengths and positions are.
    fn number(&mut self) -> u64 {
        match self.byte() {
            0xff => u64::from_le_bytes(self.take()),
            0xfe => u32::from_le_bytes(self.take()).into(),
            byte => u64::from(byte) << (self.byte() % 24),
        }
    }
}

/// Sends, receives, answers a bell and checks accesses, between changes of any word: nothing panics
/// and nothing outside is touched, whatever the words say.
pub(crate) fn same_host(data: &[u8]) {
    let mut source = Source(data);
    let descriptors = Descriptors::new(16, None);
    let connection = SharedMemory::create("fuzzed", MEMORY).map(|(memory, _)| Arc::new(memory));
    let table = SharedMemory::create("fuzzed", 64 + ENTRIES as usize * 64);
    let (Ok(connection), Ok((table, file)), Ok(bell)) = (connection, table, Bell::new(&descriptors)) else {
        return;
    };
    let bell = Arc::new(bell);
    let [memory, waker] = bell
        .passed()
        .map(|fd| fd.try_clone_to_owned().map(|fd| descriptors.adopt(fd)));
    let (Ok(Ok(memory)), Ok(Ok(waker))) = (memory, waker) else {
        return;
    };
    let (Ok(peer), Ok(bell_words)) = (
        PeerBell::open(&memory, &waker, &descriptors),
        SharedMemory::open(memory.as_fd(), BELL),
    ) else {
        return;
    };
    let slots: Vec<_> = (0..70).filter_map(|_| bell.slot()).collect();
    slots.iter().for_each(|slot| slot.bind(slot.number + 1));
    let mut sender = Sender::new(connection.clone(), Direction::FromInitiator);
    let mut receiver = Receiver::new(connection.clone(), Direction::FromResponder);
    let mut bytes = vec![0u8; 1 << 20];
    while !source.0.is_empty() {
        match source.byte() % 8 {
            0 => {
                let bytes: [u8; size_of::<Greeting>()] = source.take();
                let greeting = Greeting::read_from_bytes(&bytes);
                if let Ok(greeting) = greeting
                    && greeting.is_valid()
                {
                    assert!(greeting.slot() < SLOTS);
                    assert!(greeting.descriptors(source.byte() % 2 == 0) <= 3);
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
                let at = source.number() as usize % (WORDS / 8) * 8;
                connection.word64(at).store(source.number(), Ordering::Relaxed);
            }
            2 => {
                let n = source.number() as usize % bytes.len();
                if let Ok(sent) = sender.send(&[Piece::of(&bytes[..n])]) {
                    assert!(sent <= n);
                }
            }
            3 => {
                let n = source.number() as usize % bytes.len();
                if let Ok((received, _)) = receiver.receive(&mut [PieceMut::of(&mut bytes[..n])]) {
                    assert!(received <= n);
                }
                let _ = (receiver.is_ended(), receiver.is_left());
            }
            4 => {
                let at = source.number() as usize % (BELL / 8) * 8;
                bell_words.word64(at).store(source.number(), Ordering::Relaxed);
            }
            5 => {
                peer.ring(source.number() as u32);
                if bell.is_rung() {
                    // Slots that no connection has are nobody's.
                    bell.answer(|qid| assert!((1..=70).contains(&qid)));
                }
                bell.take_wakes();
            }
            6 => {
                let at = source.number() as usize % (table.len() / 8) * 8;
                table.word64(at).store(source.number(), Ordering::Relaxed);
            }
            _ => {
                let Ok(foreign) = ForeignTable::open(file.as_fd(), ENTRIES) else {
                    return;
                };
                let (stag, permit) = (source.number() as u32, source.number());
                let (offset, len) = (source.number(), source.number());
                let mut last = None;
                for need in [Need::RemoteRead, Need::RemoteWrite, Need::RemoteAtomic] {
                    for offset in [offset, offset.wrapping_add(len)] {
                        let _ = foreign.check(&mut last, stag, (permit, 1), offset, len, need);
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
