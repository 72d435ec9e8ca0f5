//! Doorbell pages that this process maps.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

use rustix::io::Errno;
use rustix::mm::{Advice, ProtFlags};
use rustix::thread::{Timespec, nanosleep, sched_getaffinity, sched_yield};
use std::os::fd::BorrowedFd;
use urnic_device::command::features;
use urnic_device::doorbell::{PAGE_LEN, WAKE};
use urnic_sys::Pages;

/// After `POLLS_BEFORE_YIELD` polls in a row without a doorbell in between, a poller yields at
/// every `YIELD_EVERY`th poll. The thread that makes the completion, a thread of the device for
/// example, may be waiting for this processor.
const POLLS_BEFORE_YIELD: u32 = 256;
const YIELD_EVERY: u32 = 16;
/// A poller and a thread of the device at each end need three processors. With fewer, a poller that
/// only yields keeps one of them, since it is always ready to run, and the device's threads share
/// the rest. So there the poller sleeps briefly after at most `MOST_POLLS` empty polls (some 100
/// us), and earlier if recent waits lasted that long.
const WANTED_PROCESSORS: u32 = 3;
const MOST_POLLS: u32 = 2048;
const NAP: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 20_000,
};

/// BAR 2, mapped. A store rings, unless the device is a program that sleeps: then the driver must
/// kick the device.
#[derive(Debug)]
pub struct DoorbellPages {
    /// Accessed by atomics only, from any thread.
    pages: Pages,
    /// The pages are plain memory and have wake words ([`features::DOORBELL_MEMORY`]).
    memory: AtomicBool,
    /// Empty polls since the last doorbell.
    idle: AtomicU32,
    /// There are too few processors for pollers that never sleep.
    cramped: bool,
    /// Empty polls before the first nap.
    nap_after: AtomicU32,
}

impl DoorbellPages {
    /// Maps `len` bytes of the file, starting at `offset`.
    ///
    /// # Errors
    /// The errors of mmap(2).
    pub fn map(fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<DoorbellPages, Errno> {
        let pages = Pages::of_file(fd, offset, len, ProtFlags::READ | ProtFlags::WRITE)?;
        // A child must be unable to ring, whichever way it is made. A child made by fork(3) gets
        // pages of its own instead.
        let _ = pages.advise(Advice::LinuxDontFork);
        Ok(DoorbellPages {
            pages,
            memory: AtomicBool::new(false),
            idle: AtomicU32::new(0),
            cramped: sched_getaffinity(None).is_ok_and(|set| set.count() < WANTED_PROCESSORS),
            nap_after: AtomicU32::new(MOST_POLLS),
        })
    }

    /// Stores the features of the device.
    pub fn features(&self, bits: u32) {
        self.memory
            .store(bits & features::DOORBELL_MEMORY != 0, Ordering::Relaxed);
    }

    /// Stores a doorbell. Returns whether the device sleeps and must be kicked (`registers::KICK`).
    #[inline]
    pub fn ring(&self, uar: u32, offset: u32, value: u64) -> bool {
        self.note_rung();
        let at = uar as usize * PAGE_LEN as usize + offset as usize;
        let Some(slot) = self.place(at, 8) else {
            return false;
        };
        // SAFETY: `place` checked that the slot lies inside and is aligned; both sides access it
        // atomically.
        unsafe { AtomicU64::from_ptr(slot.cast()) }.store(value.to_le(), Ordering::Release);
        if !self.memory.load(Ordering::Relaxed) {
            return false;
        }
        fence(Ordering::SeqCst);
        let wake = self.place(uar as usize * PAGE_LEN as usize + WAKE as usize, 4);
        // SAFETY: `place` checked that the word lies inside and is aligned; both sides access it
        // atomically.
        wake.is_some_and(|wake| unsafe { AtomicU32::from_ptr(wake.cast()) }.load(Ordering::Relaxed) != 0)
    }

    fn place(&self, at: usize, size: usize) -> Option<*mut u8> {
        let inside = at.is_multiple_of(size) && at.checked_add(size)? <= self.pages.len();
        Some(self.pages.at(at).filter(|_| inside)?.as_ptr())
    }

    /// Called after a poll that found nothing. The device works on other threads, so the poller can
    /// only give up processor time.
    #[inline]
    pub fn yield_when_idle(&self) {
        let idle = self.idle.load(Ordering::Relaxed).wrapping_add(1);
        self.idle.store(idle, Ordering::Relaxed);
        if idle < POLLS_BEFORE_YIELD || !idle.is_multiple_of(YIELD_EVERY) {
            return;
        }
        // A hardware device uses no processor of this machine.
        let served = self.memory.load(Ordering::Relaxed);
        if served && self.cramped && idle >= self.nap_after.load(Ordering::Relaxed) {
            // A signal may end the nap early, which does no harm.
            let _ = nanosleep(&NAP);
        } else {
            sched_yield();
        }
    }

    /// A wait ended: adapts the number of polls before the first nap, since the next wait may be as
    /// long.
    #[inline]
    fn note_rung(&self) {
        let idle = self.idle.load(Ordering::Relaxed);
        if idle == 0 {
            return;
        }
        self.idle.store(0, Ordering::Relaxed);
        let limit = self.nap_after.load(Ordering::Relaxed);
        let next = match idle {
            // After more than one nap it does not matter when the first began; before the second it
            // may have been too early.
            _ if idle >= limit + 2 * YIELD_EVERY => (limit / 4).max(POLLS_BEFORE_YIELD),
            POLLS_BEFORE_YIELD.. => (limit * 2).min(MOST_POLLS),
            _ => limit,
        };
        if next != limit {
            self.nap_after.store(next, Ordering::Relaxed);
        }
    }

    /// Replaces the pages by pages that ring nothing: in a forked child, or when the device is
    /// returned. Async-signal-safe.
    pub fn cut(&self) {
        // In a child nothing is mapped there (MADV_DONTFORK). A concurrent store goes to the old
        // page or to the new one.
        let _ = self.pages.replace_by_zeroes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::os::fd::AsFd;

    fn pages() -> DoorbellPages {
        let file = memfd_create("doorbells", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 2 * u64::from(PAGE_LEN)).unwrap();
        DoorbellPages::map(file.as_fd(), 0, 2 * PAGE_LEN as usize).unwrap()
    }

    fn sleep(pages: &DoorbellPages, uar: u32) {
        let wake = pages.place((uar * PAGE_LEN + WAKE) as usize, 4).unwrap();
        // SAFETY: inside the pages, and aligned.
        unsafe { AtomicU32::from_ptr(wake.cast()) }.store(1, Ordering::SeqCst);
    }

    #[test]
    fn only_a_sleeping_device_that_polls_memory_is_kicked() {
        let pages = pages();
        sleep(&pages, 1);
        assert!(!pages.ring(1, 8, 5), "silicon is rung by the store");
        pages.features(features::DOORBELL_MEMORY);
        assert!(pages.ring(1, 8, 5));
        assert!(!pages.ring(0, 8, 5), "awake");
    }

    #[test]
    fn a_doorbell_outside_the_pages_wakes_nothing() {
        let pages = pages();
        pages.features(features::DOORBELL_MEMORY);
        sleep(&pages, 0);
        sleep(&pages, 1);
        for (uar, offset) in [(2, 0), (0, 3), (u32::MAX, 0), (1, 4096)] {
            assert!(!pages.ring(uar, offset, 1));
        }
    }

    #[test]
    fn long_waits_make_pollers_nap_sooner_and_short_ones_later() {
        let pages = pages();
        let after_waits_of = |polls: u32, waits: u32| {
            for _ in 0..waits {
                pages.idle.store(polls, Ordering::Relaxed);
                pages.ring(0, 0, 1);
            }
            pages.nap_after.load(Ordering::Relaxed)
        };
        assert_eq!(after_waits_of(2 * MOST_POLLS, 1), MOST_POLLS / 4);
        assert_eq!(after_waits_of(2 * MOST_POLLS, 5), POLLS_BEFORE_YIELD);
        assert_eq!(
            after_waits_of(3, 5),
            POLLS_BEFORE_YIELD,
            "posts in a row change nothing"
        );
        // The answer came during the first nap.
        assert_eq!(after_waits_of(POLLS_BEFORE_YIELD + 1, 1), 2 * POLLS_BEFORE_YIELD);
        assert_eq!(after_waits_of(POLLS_BEFORE_YIELD + 1, 9), MOST_POLLS);
    }
}
