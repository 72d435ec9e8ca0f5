//! Whether the device's thread sleeps, and which thread must wake it.

use std::sync::atomic::{AtomicU8, Ordering};

/// Checks all its work.
pub(crate) const AWAKE: u8 = 0;
/// Asleep for a millisecond or less, streams ignored.
pub(crate) const TICKING: u8 = 1;
/// Asleep until something is ready.
pub(crate) const ASLEEP: u8 = 2;
/// Asleep for the time of a loan or less, streams ignored.
pub(crate) const LENT: u8 = 3;

/// Whether the thread sleeps, as far as other threads depend on it.
#[derive(Debug, Default)]
pub(crate) struct Sleeper(AtomicU8);

impl Sleeper {
    /// Whether the thread must be woken for work that it cannot detect. If so, the caller must wake
    /// it.
    pub(crate) fn must_be_woken(&self) -> bool {
        self.leaves(ASLEEP) || self.leaves(LENT)
    }

    /// Whether the thread leaves the streams alone at present. If so, the caller must wake it.
    pub(crate) fn ignores_streams(&self) -> bool {
        self.leaves(TICKING) || self.leaves(LENT)
    }

    /// Whether the thread sleeps in that way. If so, later calls find it awake.
    fn leaves(&self, state: u8) -> bool {
        self.0.load(Ordering::SeqCst) == state
            && self
                .0
                .compare_exchange(state, AWAKE, Ordering::SeqCst, Ordering::SeqCst)
                .is_ok()
    }

    /// Whether the thread sleeps until something is ready.
    #[cfg(test)]
    pub(crate) fn is_asleep(&self) -> bool {
        self.0.load(Ordering::SeqCst) == ASLEEP
    }

    /// The next action of the thread.
    pub(crate) fn set(&self, state: u8) {
        self.0.store(state, Ordering::SeqCst);
    }
}
