//! The handshakes of two processes over words in shared memory: each shows the other that bytes
//! have arrived, or that it waits, and neither may miss the other's word.
//!
//! Most have one form. Each side writes its own word, executes a full fence, and then reads the
//! other's: so at least one of the two finds the other's word. They are functions of the words
//! alone, so that loom can try every interleaving.

use std::sync::atomic::Ordering;

/// An atomic word, as of the standard library or of loom.
pub(crate) trait Word<T> {
    fn load(&self, order: Ordering) -> T;
    fn store(&self, value: T, order: Ordering);
    fn swap(&self, value: T, order: Ordering) -> T;
    fn fetch_or(&self, value: T, order: Ordering) -> T;
}

macro_rules! word {
    ($($atomic:ty, $value:ty;)*) => { $(
        impl Word<$value> for $atomic {
            #[inline]
            fn load(&self, order: Ordering) -> $value { self.load(order) }
            #[inline]
            fn store(&self, value: $value, order: Ordering) { self.store(value, order) }
            #[inline]
            fn swap(&self, value: $value, order: Ordering) -> $value { self.swap(value, order) }
            #[inline]
            fn fetch_or(&self, value: $value, order: Ordering) -> $value { self.fetch_or(value, order) }
        }
    )* };
}

word! {
    std::sync::atomic::AtomicU32, u32;
    std::sync::atomic::AtomicU64, u64;
}
#[cfg(loom)]
word! {
    loom::sync::atomic::AtomicU32, u32;
    loom::sync::atomic::AtomicU64, u64;
}

#[cfg(loom)]
use loom::sync::atomic::fence;
#[cfg(not(loom))]
use std::sync::atomic::fence;

#[inline]
fn full_fence() {
    fence(Ordering::SeqCst);
}

/// Release fence: a thread that sees a later write also sees every earlier one.
#[inline]
fn write_fence() {
    fence(Ordering::Release);
}

/// Acquire fence: if this thread saw a write that follows a [`write_fence`], it now also sees the
/// writes before that fence.
#[inline]
fn read_fence() {
    fence(Ordering::Acquire);
}

/// The sender of a ring found no room: sets the word that shows that it waits. Then the sender must
/// check for room again.
pub(crate) fn want_room(wanted: &impl Word<u32>) {
    wanted.store(1, Ordering::Relaxed);
    full_fence();
}

/// The receiver of a ring has taken all bytes up to `position`. Returns whether the sender waits
/// and must be notified, which happens once; `enough`: there is enough room for that.
#[inline]
pub(crate) fn give_room(
    head: &impl Word<u64>,
    position: u64,
    wanted: &impl Word<u32>,
    enough: impl FnOnce() -> bool,
) -> bool {
    head.store(position, Ordering::Release);
    full_fence();
    wanted.load(Ordering::Relaxed) != 0 && enough() && wanted.swap(0, Ordering::Relaxed) != 0
}

/// The sender of a ring is about to write an inline copy of bytes, which `value` identifies: no
/// other bytes in the ring have it. The sender publishes the tail afterwards.
#[inline]
pub(crate) fn begin_inline_copy(inline_id: &impl Word<u32>, value: u32) {
    inline_id.store(value, Ordering::Relaxed);
    write_fence();
}

/// Reads the inline copy of a ring, if it has the bytes that `value` identifies before and after
/// the read.
#[inline]
pub(crate) fn read_inline_copy<T>(
    inline_id: &impl Word<u32>,
    value: u32,
    copy: impl FnOnce() -> Option<T>,
) -> Option<T> {
    if inline_id.load(Ordering::Acquire) != value {
        return None;
    }
    let copied = copy();
    read_fence();
    copied.filter(|_| inline_id.load(Ordering::Relaxed) == value)
}

/// Bytes were published for the owner of a notification page: sets their connection's bit. Returns
/// whether a thread of the owner sleeps and must be woken.
#[inline]
pub(crate) fn notify(
    bits: &impl Word<u64>,
    bit: u64,
    notified: &impl Word<u32>,
    asleep: &impl Word<u32>,
) -> bool {
    // The published bytes must be visible before the bit is read: an owner that has not taken the
    // bit yet checks for bytes afterwards.
    full_fence();
    if bits.load(Ordering::Relaxed) & bit != 0 {
        return false;
    }
    bits.fetch_or(bit, Ordering::SeqCst);
    if notified.swap(1, Ordering::SeqCst) != 0 {
        return false;
    }
    full_fence();
    asleep.load(Ordering::Relaxed) != 0
}

/// The owner of a notification page clears its first word, and must now [`take`] all bits.
#[inline]
pub(crate) fn clear_notified(notified: &impl Word<u32>) {
    notified.swap(0, Ordering::SeqCst);
}

/// The bits that were set since the last call: the owner must now check for published bytes.
#[inline]
pub(crate) fn take(bits: &impl Word<u64>) -> u64 {
    if bits.load(Ordering::Relaxed) == 0 {
        return 0;
    }
    let set = bits.swap(0, Ordering::SeqCst);
    // A peer that found its bit still set published before.
    full_fence();
    set
}

/// Publishes how many threads of a notification page's owner sleep. A thread that falls asleep must
/// then check that no bit [was set](is_notified_now).
pub(crate) fn publish_asleep(asleep: &impl Word<u32>, threads: u32) {
    asleep.store(threads, Ordering::SeqCst);
}

/// Whether any bit was set since; after [`publish_asleep`].
pub(crate) fn is_notified_now(notified: &impl Word<u32>) -> bool {
    full_fence();
    notified.load(Ordering::Relaxed) != 0
}

/// Publishes that all bytes up to `position` are processed; the other end has published bytes up to
/// `tail`, and the caller has read them. Returns whether these are all bytes, so that the other end
/// must be notified: if the other end publishes more, it notifies this end.
#[inline]
pub(crate) fn confirm(processed: &impl Word<u64>, position: u64, tail: &impl Word<u64>) -> bool {
    processed.store(position, Ordering::Release);
    tail.load(Ordering::Relaxed) == position
}

/// Sets the hazard flag: a thread is about to access memory of another process; `value` is not 0.
/// The thread must then check its permission.
#[inline]
pub(crate) fn set_hazard(hazard: &impl Word<u64>, value: u64) {
    // A revoker that observes this value also observes the copies made under the previous one.
    hazard.store(value, Ordering::Release);
    full_fence();
}

/// The access, if one was made, is over.
#[inline]
pub(crate) fn clear_hazard(hazard: &impl Word<u64>) {
    hazard.store(0, Ordering::Release);
}

/// A permission was changed: returns the hazard flag. The revoker must wait while the flag has this
/// value, unless it is 0.
pub(crate) fn hazard_after_revocation(hazard: &impl Word<u64>) -> u64 {
    full_fence();
    hazard.load(Ordering::SeqCst)
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU32, AtomicU64};
    use loom::thread;

    fn words<const N: usize>() -> Arc<[AtomicU64; N]> {
        Arc::new(std::array::from_fn(|_| AtomicU64::new(0)))
    }

    /// A sender with two bytes for a ring of one either finds room or is notified.
    #[test]
    fn a_sender_without_room_is_notified() {
        loom::model(|| {
            let positions = words::<2>();
            let wanted = Arc::new(AtomicU32::new(0));
            let (theirs, their_wanted) = (positions.clone(), wanted.clone());
            let receiver = thread::spawn(move || {
                let [head, tail] = &*theirs;
                let (mut taken, mut notified) = (0, false);
                for _ in 0..2 {
                    if tail.load(Ordering::Acquire) > taken {
                        taken += 1;
                        notified |= give_room(head, taken, &*their_wanted, || true);
                    }
                }
                (taken, notified)
            });
            let [head, tail] = &*positions;
            tail.store(1, Ordering::Release);
            let mut room = head.load(Ordering::Acquire) == 1;
            if !room {
                want_room(&*wanted);
                room = head.load(Ordering::Acquire) == 1;
            }
            if room {
                tail.store(2, Ordering::Release);
            }
            let (taken, notified) = receiver.join().unwrap();
            assert!(room || notified || taken == 0, "the sender waits for ever");
        });
    }

    /// Two messages follow one another in the inline copy: a receiver takes the first one
    /// unchanged, or from the ring.
    #[test]
    fn inline_copies_are_never_mixed() {
        loom::model(|| {
            // The tail, and the inline copy of two words.
            let words = words::<3>();
            let inline_id = Arc::new(AtomicU32::new(0));
            let (theirs, their_id) = (words.clone(), inline_id.clone());
            let sender = thread::spawn(move || {
                let [tail, first, second] = &*theirs;
                for message in 1..3 {
                    begin_inline_copy(&*their_id, message as u32);
                    first.store(message, Ordering::Relaxed);
                    second.store(message, Ordering::Relaxed);
                    tail.store(message, Ordering::Release);
                }
            });
            let [tail, first, second] = &*words;
            let seen = tail.load(Ordering::Acquire);
            if seen != 0 {
                let both = || Some([first.load(Ordering::Relaxed), second.load(Ordering::Relaxed)]);
                let copied = read_inline_copy(&*inline_id, seen as u32, both);
                assert!(
                    copied.is_none_or(|copied| copied == [seen; 2]),
                    "{seen}: {copied:?}"
                );
            }
            sender.join().unwrap();
        });
    }

    /// An owner that checks finds what two peers publish, and an owner that sleeps is woken by it.
    #[test]
    fn a_notification_is_seen_or_wakes() {
        loom::model(|| {
            let words = words::<2>();
            let flags = Arc::new([AtomicU32::new(0), AtomicU32::new(0)]);
            let peer = |at: usize| {
                let (words, flags) = (words.clone(), flags.clone());
                move || {
                    let [bits, published] = &*words;
                    let [notified, asleep] = &*flags;
                    published.fetch_or(1 << at, Ordering::Relaxed);
                    notify(bits, 1 << at, notified, asleep)
                }
            };
            let other = thread::spawn(peer(1));
            let owner = thread::spawn({
                let (words, flags) = (words.clone(), flags.clone());
                move || {
                    let [bits, published] = &*words;
                    let [notified, asleep] = &*flags;
                    publish_asleep(asleep, 1);
                    if !is_notified_now(notified) {
                        return (true, 0);
                    }
                    publish_asleep(asleep, 0);
                    clear_notified(notified);
                    let set = take(bits);
                    // If a peer's bit was taken, its publication is visible.
                    assert_eq!(published.load(Ordering::Relaxed) & set, set);
                    (false, set)
                }
            });
            let woke = peer(0)();
            let woke = other.join().unwrap() || woke;
            let (sleeps, set) = owner.join().unwrap();
            let [bits, _] = &*words;
            let [notified, _] = &*flags;
            let left = bits.load(Ordering::Relaxed);
            assert_eq!(set | left, 3, "a bit is lost");
            assert!(!sleeps || woke, "it sleeps on");
            assert!(
                left == 0 || notified.load(Ordering::Relaxed) != 0,
                "a bit is set, and the first word is not"
            );
        });
    }

    /// A peer that finds its bit set does not notify: the owner then sees its publication.
    #[test]
    fn bytes_published_while_the_bit_is_set_are_seen() {
        loom::model(|| {
            let words = words::<2>();
            let flags = Arc::new([AtomicU32::new(0), AtomicU32::new(0)]);
            let peer = thread::spawn({
                let (words, flags) = (words.clone(), flags.clone());
                move || {
                    let [bits, published] = &*words;
                    let [notified, asleep] = &*flags;
                    for n in 1..3 {
                        published.store(n, Ordering::Release);
                        notify(bits, 1, notified, asleep);
                    }
                }
            });
            let [bits, published] = &*words;
            let mut seen = 0;
            clear_notified(&flags[0]);
            if take(bits) != 0 {
                seen = published.load(Ordering::Acquire);
            }
            peer.join().unwrap();
            assert!(
                seen == 2 || bits.load(Ordering::Relaxed) != 0,
                "missed, after {seen}"
            );
        });
    }

    /// A second thread falls asleep while the first answers.
    #[test]
    fn a_thread_that_falls_asleep_while_another_answers_is_woken() {
        loom::model(|| {
            let words = words::<1>();
            let flags = Arc::new([AtomicU32::new(0), AtomicU32::new(1)]);
            let peer = thread::spawn({
                let (words, flags) = (words.clone(), flags.clone());
                move || {
                    let [notified, asleep] = &*flags;
                    notify(&words[0], 1, notified, asleep)
                }
            });
            let answers = thread::spawn({
                let (words, flags) = (words.clone(), flags.clone());
                move || {
                    clear_notified(&flags[0]);
                    take(&words[0])
                }
            });
            publish_asleep(&flags[1], 2);
            let sleeps = !is_notified_now(&flags[0]);
            let taken = answers.join().unwrap();
            let woke = peer.join().unwrap();
            assert!(taken == 1 || woke || !sleeps || words[0].load(Ordering::Relaxed) == 0);
        });
    }

    /// The last of two messages is confirmed, and this is notified: the confirmation is visible
    /// then.
    #[test]
    fn a_confirmation_of_all_bytes_is_notified() {
        loom::model(|| {
            let words = words::<3>();
            let flags = Arc::new([AtomicU32::new(0), AtomicU32::new(1)]);
            let (theirs, their_flags) = (words.clone(), flags.clone());
            let peer = thread::spawn(move || {
                let [tail, processed, bits] = &*theirs;
                let [notified, asleep] = &*their_flags;
                let mut before = 0;
                for _ in 0..2 {
                    let position = tail.load(Ordering::Acquire);
                    if position != before && confirm(processed, position, tail) {
                        notify(bits, 1, notified, asleep);
                    }
                    before = position;
                }
                before
            });
            let [tail, processed, bits] = &*words;
            for position in 1..3 {
                tail.store(position, Ordering::Release);
            }
            let mut seen = 0;
            if take(bits) != 0 {
                seen = processed.load(Ordering::Acquire);
            }
            let all = peer.join().unwrap();
            assert!(
                all < 2 || seen == 2 || bits.load(Ordering::Relaxed) != 0,
                "{seen}"
            );
        });
    }

    /// After a revocation, the memory does not change.
    #[test]
    fn a_revocation_waits_for_the_access_in_flight() {
        loom::model(|| {
            let all = words::<3>();
            let theirs = all.clone();
            let peer = thread::spawn(move || {
                let [permission, hazard, memory] = &*theirs;
                for n in 1..3 {
                    set_hazard(hazard, n);
                    if permission.load(Ordering::Acquire) == 0 {
                        memory.store(n, Ordering::Relaxed);
                    }
                    clear_hazard(hazard);
                }
            });
            let [permission, hazard, memory] = &*all;
            permission.store(1, Ordering::SeqCst);
            let value = hazard_after_revocation(hazard);
            while value != 0 && hazard.load(Ordering::SeqCst) == value {
                thread::yield_now();
            }
            let seen = memory.load(Ordering::Relaxed);
            peer.join().unwrap();
            assert_eq!(memory.load(Ordering::Relaxed), seen);
        });
    }
}
