//! Receives that the peer has posted to a queue of its own: the requester fills them by itself with
//! the payload of long Sends.
//!
//! A posted receive stays as it is until a message takes it, and only messages of this connection
//! do, in order. So the requester knows which receive its next message will take, and may have read
//! it long before. What it reads is the peer's claim: whether the memory may be written is checked
//! at each access, as it is for a Write.

use super::super::layout::EndWords;
use crate::host::SharedWords;
use crate::host::process_memory;
use crate::queues::ReceivePlace;
use rustix::process::Pid;
use std::sync::atomic::{AtomicU32, Ordering};
use urnic_device::wqe::{RecvHeader, Sge};
use zerocopy::{FromBytes, IntoBytes};

/// Most receives that are read at once.
const MOST: usize = 32;
/// Bytes that are read of them.
const BYTES: usize = 1024;
/// Bytes of an entry up to the end of its first element.
const FIRST: usize = size_of::<RecvHeader>() + size_of::<Sge>();
/// The least and the greatest size of an entry, and the greatest number of entries, as logarithms.
const LOG_STRIDES: std::ops::RangeInclusive<u32> = FIRST.ilog2()..=BYTES.ilog2();
const MOST_LOG_SIZE: u32 = 31;

/// Publishes where receives are that the peer may fill; whether they are such that it can.
pub(super) fn offer(ours: &SharedWords<EndWords>, place: &ReceivePlace) -> bool {
    if !LOG_STRIDES.contains(&place.log_stride) {
        return false;
    }
    ours.first_receive.store(place.next, Ordering::Relaxed);
    ours.receives.store(place.entries, Ordering::Relaxed);
    ours.log_receives.store(place.log_size, Ordering::Relaxed);
    ours.log_receive_size.store(place.log_stride, Ordering::Relaxed);
    ours.receive_producer.store(place.producer, Ordering::Release);
    true
}

/// Receives of the peer that were read ahead.
#[derive(Debug, Default)]
pub(super) struct PeerReceives {
    /// The number of the first one.
    first: u32,
    /// How many there are.
    known: usize,
    /// Their first elements. Most connections have no use for them.
    elements: Option<Box<[Sge; MOST]>>,
}

impl PeerReceives {
    /// The first element of receive `number`, if that is posted.
    #[inline]
    pub(super) fn at(&mut self, theirs: &SharedWords<EndWords>, number: u32, process: Pid) -> Option<Sge> {
        if number.wrapping_sub(self.first) as usize >= self.known {
            self.read(theirs, number, process);
        }
        let at = number.wrapping_sub(self.first) as usize;
        self.elements.as_ref()?[..self.known].get(at).copied()
    }

    /// Reads receive `number` and those behind it.
    #[cold]
    fn read(&mut self, theirs: &SharedWords<EndWords>, number: u32, process: Pid) {
        self.known = 0;
        self.first = number;
        let word = |word: &AtomicU32| word.load(Ordering::Relaxed);
        let (log_size, log_stride) = (word(&theirs.log_receives), word(&theirs.log_receive_size));
        if log_size > MOST_LOG_SIZE || !LOG_STRIDES.contains(&log_stride) {
            return;
        }
        let slots = 1u64 << log_size;
        let (slot, stride) = (u64::from(number) & (slots - 1), 1usize << log_stride);
        let to_end = usize::try_from(slots - slot).unwrap_or(MOST);
        let entries = MOST.min((BYTES - FIRST) / stride + 1).min(to_end);
        let mut producers = [0u32; 2];
        let mut bytes = [0; BYTES];
        let len = (entries - 1) * stride + FIRST;
        let there = theirs
            .receives
            .load(Ordering::Relaxed)
            .wrapping_add(slot << log_stride);
        let index = theirs.receive_producer.load(Ordering::Relaxed);
        // The index first: what is posted before it was written has its bytes. And twice: the
        // kernel may read the bytes of a word one by one.
        let [first, again] = &mut producers;
        let parts = [
            (index, first.as_mut_bytes()),
            (index, again.as_mut_bytes()),
            (there, &mut bytes[..len]),
        ];
        let read = process_memory::read_parts(process, parts);
        let [producer, again] = producers;
        if read != Ok(size_of_val(&producers) + len) || producer != again {
            return;
        }
        let posted = producer.wrapping_sub(number);
        if u64::from(posted) > slots {
            return;
        }
        let elements = self.elements.get_or_insert_default();
        for n in 0..entries.min(posted as usize) {
            let entry = &bytes[n * stride..];
            let Ok((header, rest)) = RecvHeader::read_from_prefix(entry) else {
                return;
            };
            elements[n] = match Sge::read_from_prefix(rest) {
                Ok((sge, _)) if header.num_sge.get() > 0 => sge,
                _ => Sge::default(),
            };
            self.known = n + 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::Direction;
    use super::super::super::layout::END_WORDS;
    use super::*;
    use crate::host::SharedMemory;
    use proptest::prelude::*;
    use rustix::process::getpid;
    use zerocopy::IntoBytes;

    const LOG_SIZE: u32 = 4;

    fn words() -> SharedWords<EndWords> {
        let memory = std::sync::Arc::new(SharedMemory::create("receives", 8192).unwrap().0);
        memory.words(END_WORDS.of(Direction::FromInitiator))
    }

    /// The entries of a queue in this process.
    fn queue(log_stride: u32) -> Vec<u8> {
        let stride = 1 << log_stride;
        let mut entries = vec![0; stride << LOG_SIZE];
        for (n, entry) in entries.chunks_mut(stride).enumerate() {
            let header = RecvHeader::new(n as u64, u16::from(n != 5));
            entry[..16].copy_from_slice(header.as_bytes());
            entry[16..FIRST].copy_from_slice(element(n as u32).as_bytes());
        }
        entries
    }

    fn element(n: u32) -> Sge {
        Sge {
            offset: u64::from(n).into(),
            len: (n + 100).into(),
            stag: 7.into(),
        }
    }

    #[test]
    fn shm_21_posted_receives_are_found_in_the_peers_queue() {
        for log_stride in [5, 6, 10] {
            let (producer, entries) = (AtomicU32::new(0), queue(log_stride));
            let (ours, mut receives) = (words(), PeerReceives::default());
            let place = ReceivePlace {
                entries: entries.as_ptr().expose_provenance() as u64,
                producer: (&raw const producer).expose_provenance() as u64,
                log_size: LOG_SIZE,
                log_stride,
                next: u32::MAX - 2,
            };
            assert!(offer(&ours, &place));
            let mut at = |number: u32, posted: u32| {
                producer.store(posted, Ordering::SeqCst);
                receives.at(&ours, number, getpid())
            };
            let first = place.next;
            assert_eq!(at(first, first), None);
            // One by one, then several; the numbers and the ring begin anew.
            assert_eq!(at(first, first.wrapping_add(1)), Some(element(first & 15)));
            for n in 1..20u32 {
                let number = first.wrapping_add(n);
                let expected = match number & 15 {
                    5 => Sge::default(),
                    slot => element(slot),
                };
                assert_eq!(
                    at(number, first.wrapping_add(n.max(10) + 3)),
                    Some(expected),
                    "{n}"
                );
            }
            let behind = first.wrapping_add(23);
            assert_eq!(at(behind, behind), None);
            // More than the queue holds is nonsense.
            assert_eq!(at(behind, behind.wrapping_add(17)), None);
        }
    }

    #[test]
    fn shm_21_a_queue_of_other_entries_is_not_offered() {
        let place = ReceivePlace {
            entries: 4096,
            producer: 8192,
            log_size: LOG_SIZE,
            log_stride: 4,
            next: 0,
        };
        let ours = words();
        assert!(!offer(&ours, &place));
        assert_eq!(ours.receive_producer.load(Ordering::Relaxed), 0);
        assert!(!offer(
            &ours,
            &ReceivePlace {
                log_stride: 11,
                ..place
            }
        ));
    }

    proptest! {
        #[test]
        fn shm_21_any_words_about_receives_are_harmless(
            [receives, producer] in any::<[u64; 2]>(),
            logs in prop::array::uniform2(prop_oneof![0..40u32, any::<u32>()]),
            number in any::<u32>(),
        ) {
            let theirs = words();
            theirs.receives.store(receives, Ordering::Relaxed);
            theirs.receive_producer.store(producer, Ordering::Relaxed);
            theirs.log_receives.store(logs[0], Ordering::Relaxed);
            theirs.log_receive_size.store(logs[1], Ordering::Relaxed);
            PeerReceives::default().at(&theirs, number, getpid());
        }
    }
}
