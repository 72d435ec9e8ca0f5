//! The peer of a connection in memory, as its queue pair uses it apart from the stream: the queue
//! pair reads the position up to which the peer has processed its bytes, and accesses the peer's
//! registered memory.

mod introduced;
pub(super) mod process;

use super::introduction::{Introduction, Traceable};
use super::layout::{Direction, END_WORDS, EndWords, RING_WORDS, RingWords};
use super::notification::PeerPage;
use crate::handshakes;
use crate::host::revocable::{Batch, Condition, NotCopied};
use crate::host::{Piece, PieceMut, SharedMemory, SharedWords, process_memory, revocable};
use crate::memory::{Admission, LastEntry, MemoryAccess, Need, OwnHazardFlag, Permitted};
use crate::queues::ReceivePlace;
use crate::time::Nanos;
use crate::tuning::IDENTITY_LEASE;
use process::PeerProcess;
use rustix::process::{Pid, getpid};
use rustix::thread::gettid;
use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use urnic_device::vocabulary::Access;
use urnic_device::wqe::{RecvHeader, Sge};
use urnic_sync::Mutex;
use zerocopy::{FromBytes, IntoBytes};

/// The peer does not permit the access; the request goes by the stream instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NotReached;

/// The peer of a connection in memory.
#[derive(Debug)]
pub struct LocalPeer {
    ours: SharedWords<EndWords>,
    outgoing: Direction,
    theirs: SharedWords<EndWords>,
    /// The ring of the bytes that the peer sends.
    incoming: SharedWords<RingWords>,
    notifications: Arc<PeerPage>,
    /// The connection's place in the notification page.
    slot: u32,
    /// The peer's process, once it is known whether we reach its memory.
    process: OnceLock<Option<Arc<PeerProcess>>>,
    /// Until then.
    introduction: Mutex<Option<Introduction>>,
    /// The process at the other end, if one or both may reach the other's memory.
    peer: Option<Pid>,
    admission: Option<Admission>,
    /// The peer's permit, once the peer is admitted.
    permitted: (u32, Access),
    /// While the peer is to reach our memory.
    traceable: OnceLock<Traceable>,
    /// The position up to which we have processed the peer's bytes.
    processed: u64,
    /// The peer notifies us when it has processed bytes after this position.
    awaited_from: Option<u64>,
    /// When the process was known to be there.
    seen: Option<Nanos>,
    /// Counts accesses.
    turn: u32,
    /// This process.
    owner: Pid,
    /// The peer's accesses to our memory that were counted.
    accessed: Accessed,
    /// The last entry of the peer's table that we accessed.
    last: Option<LastEntry>,
    /// The receives that the peer has posted.
    receives: PeerReceives,
    /// The peer may fill ours.
    offers_receives: bool,
}

/// Bytes of our memory that the peer says it has written and read.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Accessed {
    pub(crate) written: u64,
    pub(crate) read: u64,
}

impl LocalPeer {
    pub(super) fn new(
        memory: &Arc<SharedMemory>,
        outgoing: Direction,
        (notifications, slot): (Arc<PeerPage>, u32),
        introduction: Option<Introduction>,
        qid: u32,
    ) -> LocalPeer {
        let [ours, theirs] = [outgoing, outgoing.other()].map(|end| END_WORDS.of(end));
        let ours: SharedWords<EndWords> = memory.words(ours);
        ours.qid.store(qid.into(), Ordering::Relaxed);
        let here = introduction.as_ref().and_then(Introduction::here);
        let mut local_peer = LocalPeer {
            ours,
            outgoing,
            theirs: memory.words(theirs),
            incoming: memory.words(RING_WORDS.of(outgoing.other())),
            notifications,
            slot,
            process: match introduction {
                Some(_) => OnceLock::new(),
                None => OnceLock::from(None),
            },
            peer: introduction.as_ref().map(Introduction::peer),
            introduction: Mutex::new(introduction),
            admission: None,
            permitted: (0, Access::empty()),
            traceable: OnceLock::new(),
            processed: 0,
            awaited_from: Some(0),
            seen: None,
            turn: 0,
            owner: getpid(),
            accessed: Accessed::default(),
            last: None,
            receives: PeerReceives::default(),
            offers_receives: false,
        };
        local_peer.admit(here);
        local_peer
    }

    /// The peer's process, if we reach its memory.
    #[inline]
    fn process(&self) -> Option<&Arc<PeerProcess>> {
        self.process.get()?.as_ref()
    }

    /// Sets the peer's permit: accesses with these rights, to memory of domain `pd`, and filling
    /// the receives of [`offer_receives`](Self::offer_receives). On return the peer makes no other
    /// access.
    pub(crate) fn permit(&mut self, pd: u32, rights: Access) {
        self.permitted = (pd, rights);
        if let Some(admission) = &self.admission {
            let mut rights = rights;
            rights.set(Access::LOCAL_WRITE, self.offers_receives);
            admission.permit(pd, rights);
        }
    }

    /// Lets the peer fill receives that are posted there, from the next call of
    /// [`permit`](Self::permit) on, if it may reach our memory.
    pub(crate) fn offer_receives(&mut self, place: &ReceivePlace) {
        self.offers_receives = self.peer.is_some() && offer(&self.ours, place);
    }

    /// Whether the peer may fill receives: it has shown that it may reach our memory.
    pub(crate) fn may_fill(&self) -> bool {
        self.offers_receives && self.admission.is_some()
    }

    /// The place for the payload of a message of `len` bytes that takes the peer's receive `index`,
    /// counted from the first of the connection; and the receive's number in its queue. `None`: the
    /// receive is not posted yet, or cannot be filled from here.
    #[inline]
    pub(crate) fn receive(&mut self, index: u32, len: u32, now: Nanos) -> Option<(Sge, u32)> {
        if !self.is_introduced() {
            return None;
        }
        let permit = self.theirs.permit.load(Ordering::Acquire) as u32;
        if !Access::from_bits_truncate(permit).contains(Access::LOCAL_WRITE) || !self.check_lease(now) {
            return None;
        }
        let process = self.process()?.number;
        let number = self
            .theirs
            .first_receive
            .load(Ordering::Relaxed)
            .wrapping_add(index);
        let sge = self.receives.at(&self.theirs, number, process)?;
        (len <= sge.len.get()).then_some((sge, number))
    }

    /// Whether the peer's process is known to be there.
    #[inline]
    fn check_lease(&mut self, now: Nanos) -> bool {
        let Some(Some(process)) = self.process.get() else {
            return false;
        };
        if self.seen.is_none_or(|seen| now.since(seen) > IDENTITY_LEASE) {
            self.seen = process.is_there().then_some(now);
        }
        self.seen.is_some()
    }

    /// The bytes of our memory that the peer has accessed since the last call, for the counters.
    pub(crate) fn take_accessed(&mut self) -> Accessed {
        // A peer that is not admitted has made no access, whatever its words claim.
        if self.admission.is_none() {
            return Accessed::default();
        }
        let now = Accessed {
            written: self.theirs.written.load(Ordering::Relaxed),
            read: self.theirs.read.load(Ordering::Relaxed),
        };
        let before = std::mem::replace(&mut self.accessed, now);
        Accessed {
            written: now.written.wrapping_sub(before.written),
            read: now.read.wrapping_sub(before.read),
        }
    }

    /// Places bytes in the peer's memory, all of them: those of a Write, or (local) of a receive.
    ///
    /// # Errors
    /// Some may have been placed.
    #[inline]
    pub(crate) fn write(
        &mut self,
        (stag, need): (u32, Need),
        offset: u64,
        from: Piece<'_>,
        now: Nanos,
    ) -> Result<(), NotReached> {
        let len = from.len();
        self.access(stag, len, need, now, |attempt, last| {
            let permitted = attempt.check(last, offset, len)?;
            let (conditions, process) = (attempt.conditions(&permitted), attempt.process_of(&permitted)?);
            revocable::write_if(conditions, process, permitted.address, from)
        })
    }

    /// Places pieces at offsets of one STag, all of them: those of Writes, or (local) of receives.
    ///
    /// # Errors
    /// Some may have been placed.
    pub(crate) fn write_batch(
        &mut self,
        (stag, need): (u32, Need),
        offsets: &[u64],
        batch: &mut Batch<Piece<'_>>,
        now: Nanos,
    ) -> Result<(), NotReached> {
        self.access(stag, batch.len(), need, now, |attempt, last| {
            let (conditions, process) = attempt.check_batch(last, offsets, batch)?;
            batch.write_if(conditions, process)
        })
    }

    /// Fills pieces from offsets of one STag, all of them.
    ///
    /// # Errors
    /// Some may have been filled.
    pub(crate) fn read_batch(
        &mut self,
        stag: u32,
        offsets: &[u64],
        batch: &mut Batch<PieceMut<'_>>,
        now: Nanos,
    ) -> Result<(), NotReached> {
        self.access(stag, batch.len(), Need::RemoteRead, now, |attempt, last| {
            let (conditions, process) = attempt.check_batch(last, offsets, batch)?;
            batch.read_if(conditions, process)
        })
    }

    /// Fetches bytes from the peer's memory, as many as there is room for.
    ///
    /// # Errors
    /// Some may have been fetched.
    #[inline]
    pub(crate) fn read(
        &mut self,
        stag: u32,
        offset: u64,
        mut into: PieceMut<'_>,
        now: Nanos,
    ) -> Result<(), NotReached> {
        let len = into.len();
        self.access(stag, len, Need::RemoteRead, now, |attempt, last| {
            let permitted = attempt.check(last, offset, len)?;
            let (conditions, process) = (attempt.conditions(&permitted), attempt.process_of(&permitted)?);
            revocable::read_if(conditions, process, permitted.address, into.rest(0))
        })
    }

    /// Tries to access `len` bytes of one STag, until that is refused or was not interrupted.
    #[inline(always)]
    fn access(
        &mut self,
        stag: u32,
        len: usize,
        need: Need,
        now: Nanos,
        mut copy: impl FnMut(&Attempt<'_>, &mut Option<LastEntry>) -> Result<usize, NotCopied>,
    ) -> Result<(), NotReached> {
        if !self.check_lease(now) {
            return Err(NotReached);
        }
        let process = self.process.get().and_then(Option::as_ref).ok_or(NotReached)?;
        self.turn = self.turn.wrapping_add(1);
        let thread = thread_number(self.owner);
        let _flag = OwnHazardFlag::set(&self.ours.hazard, self.turn, thread);
        let permit_word = &self.theirs.permit;
        loop {
            let permit = Condition {
                word: permit_word,
                value: permit_word.load(Ordering::Acquire),
            };
            let attempt = Attempt {
                process,
                permit,
                qid: self.theirs.qid.load(Ordering::Relaxed) as u32,
                stag,
                need,
            };
            match copy(&attempt, &mut self.last) {
                Ok(copied) if copied == len => {
                    let total = match need {
                        Need::RemoteWrite | Need::LocalWrite => &self.ours.written,
                        _ => &self.ours.read,
                    };
                    let bytes = total.load(Ordering::Relaxed).wrapping_add(len as u64);
                    total.store(bytes, Ordering::Relaxed);
                    return Ok(());
                }
                Ok(_) | Err(NotCopied::Failed(_)) => return Err(NotReached),
                // The thread may have been stopped for long.
                Err(NotCopied::Interrupted) if process.is_there() => {}
                Err(NotCopied::Interrupted | NotCopied::Refused) => return Err(NotReached),
            }
        }
    }
}

/// An access, with the permission of this moment.
#[derive(Debug)]
struct Attempt<'a> {
    process: &'a PeerProcess,
    permit: Condition<'a>,
    qid: u32,
    stag: u32,
    need: Need,
}

impl<'a> Attempt<'a> {
    /// Checks an access against the peer's table.
    #[inline(always)]
    fn check(
        &self,
        last: &mut Option<LastEntry>,
        offset: u64,
        len: usize,
    ) -> Result<Permitted<'a>, NotCopied> {
        let by = (self.permit.value, self.qid);
        let table = &self.process.table;
        let access = MemoryAccess {
            stag: self.stag,
            offset,
            len: len as u64,
            need: self.need,
        };
        let permitted = table.check(last, by, &access);
        permitted.ok_or(NotCopied::Refused)
    }

    /// The process that has the bytes of an access.
    #[inline]
    fn process_of(&self, permitted: &Permitted<'_>) -> Result<Pid, NotCopied> {
        self.process.of(permitted).ok_or(NotCopied::Refused)
    }

    #[inline]
    fn conditions(&self, permitted: &Permitted<'a>) -> [Condition<'a>; 2] {
        [permitted.condition, self.permit]
    }

    /// Like [`check`](Self::check), for the pieces of a batch, and stores their addresses in it.
    fn check_batch<P>(
        &self,
        last: &mut Option<LastEntry>,
        offsets: &[u64],
        batch: &mut Batch<P>,
    ) -> Result<([Condition<'a>; 2], Pid), NotCopied> {
        let mut found: Option<([Condition<'a>; 2], Pid)> = None;
        for (offset, (len, mut set)) in offsets.iter().zip(batch.places()) {
            let permitted = self.check(last, *offset, len)?;
            // One STag has one condition, unless it changes just now.
            if found.is_some_and(|([first, _], _)| first.value != permitted.condition.value) {
                return Err(NotCopied::Refused);
            }
            found = Some((self.conditions(&permitted), self.process_of(&permitted)?));
            set(permitted.address);
        }
        found.ok_or(NotCopied::Refused)
    }
}

/// The number of the calling thread, in process `process`.
#[inline]
pub(super) fn thread_number(process: Pid) -> u32 {
    thread_local! {
        static NUMBER: Cell<(Option<Pid>, u32)> = const { Cell::new((None, 0)) };
    }
    NUMBER.with(|number| match number.get() {
        // A forked child's first thread has a copy of this, and another number.
        (Some(of), thread) if of == process => thread,
        _ => {
            let thread = gettid().as_raw_nonzero().get().cast_unsigned();
            number.set((Some(process), thread));
            thread
        }
    })
}

// The position up to which each end has processed the other's bytes, and whether the other end
// waits for it.

/// The word in which the peer says how many of our bytes it has processed: placed, delivered, or
/// taken as requests. It may say anything at any time.
#[derive(Debug, Clone)]
pub(crate) struct ProcessedWord(SharedWords<EndWords>);

impl ProcessedWord {
    #[inline]
    pub(crate) fn read(&self) -> u64 {
        processed(&self.0)
    }
}

#[inline]
fn processed(theirs: &EndWords) -> u64 {
    theirs.processed.load(Ordering::Acquire)
}

impl LocalPeer {
    /// The number of our bytes that the peer has processed, as it says.
    #[inline]
    pub(crate) fn confirmed(&self) -> u64 {
        processed(&self.theirs)
    }

    /// Where it says so.
    pub(crate) fn processed_word(&self) -> ProcessedWord {
        ProcessedWord(self.theirs.clone())
    }

    /// Publishes at the beginning whether requests here complete by [`confirmed`](Self::confirmed).
    /// If not, the peer does not notify us of its progress. (Queue pairs of one process publish
    /// their progress by a counter of the device instead, and notify each other of that.)
    pub(crate) fn begin_awaiting(&mut self, confirms: bool) {
        let awaits = confirms || self.peer.is_none_or(|peer| peer == self.owner);
        self.awaited_from = awaits.then_some(0);
        self.ours.unawaited.store(u32::from(!awaits), Ordering::Relaxed);
    }

    /// Whether the peer notifies us when it has processed our bytes up to `sealed`. If not, it will
    /// do so for bytes that are sent from now on: it finds the word changed when it receives them.
    pub(crate) fn awaits(&mut self, sealed: u64) -> bool {
        let from = *self.awaited_from.get_or_insert_with(|| {
            self.ours.unawaited.store(0, Ordering::Relaxed);
            sealed
        });
        sealed > from
    }

    /// Publishes that we have processed the peer's bytes up to `position`. Notifies the peer if
    /// these are all bytes, or if the next message `waits` for something else: the peer may wait
    /// for an earlier request.
    #[inline]
    pub(crate) fn confirm(&mut self, position: u64, waits: bool) {
        if self.processed == position {
            return;
        }
        let is_first = self.processed == 0;
        if is_first {
            self.end_introduction();
        }
        self.processed = position;
        let told = handshakes::confirm(&self.ours.processed, position, &self.incoming.tail) || waits;
        // The first confirmation is awaited in any case, because the initiator then reads our
        // disclosure.
        if is_first || (told && self.theirs.unawaited.load(Ordering::Relaxed) == 0) {
            self.notifications.notify(self.slot);
        }
    }
}

// Receives that the peer has posted to a queue that is not shared: the requester itself fills them
// with the payload of long Sends.
//
// A posted receive stays as it is until a message takes it, and only messages of this connection
// do, in order. So the requester knows which receive its next message will take, and may have read
// it long before. The entries that it reads are not trusted: each access checks that the memory may
// be written, as for a Write.

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
fn offer(ours: &SharedWords<EndWords>, place: &ReceivePlace) -> bool {
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
struct PeerReceives {
    /// The number of the first one.
    first: u32,
    /// The number of receives that are known.
    known: usize,
    /// The first elements of these receives; `None` on connections that fill none, which are most.
    elements: Option<Box<[Sge; MOST]>>,
}

impl PeerReceives {
    /// The first element of receive `number`, if that is posted.
    #[inline]
    fn at(&mut self, theirs: &SharedWords<EndWords>, number: u32, process: Pid) -> Option<Sge> {
        if number.wrapping_sub(self.first) as usize >= self.known {
            self.read(theirs, number, process);
        }
        let at = number.wrapping_sub(self.first) as usize;
        self.elements.as_ref()?[..self.known].get(at).copied()
    }

    /// Reads receive `number` and those after it.
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
        // The index is read first: entries that were posted before it was written are complete. It
        // is read twice, because the kernel may read the bytes of a word one by one.
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
    use super::*;
    use crate::host::SharedMemory;
    use crate::stream::same_host::Direction;
    use crate::stream::same_host::layout::END_WORDS;
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
