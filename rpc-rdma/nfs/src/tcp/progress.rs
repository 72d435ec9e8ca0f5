//! The time for which a connection makes no progress. Threads only count bytes and messages. The
//! checks of the accepting thread measure the time, so a suspension of the machine does not count
//! against the peers.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use urnic_sync::Mutex;

/// Progress of one direction of a connection. One thread at a time begins and ends messages.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// Odd while a message is in progress; each message has another number.
    state: AtomicU64,
    /// Bytes of the message so far.
    moved: AtomicU64,
    /// The state at the last check, and the time for which it has not changed.
    age: Mutex<(u64, Duration)>,
}

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// No message has been in progress for this time.
    Idle(Duration),
    /// A message has been in progress for this time, and this number of bytes has moved.
    Busy(Duration, u64),
}

impl Progress {
    /// A message begins.
    pub(super) fn begin(&self) {
        self.moved.store(0, Relaxed);
        self.state.store((self.state.load(Relaxed) + 1) | 1, Relaxed);
    }

    /// A message ends.
    pub(super) fn end(&self) {
        self.state.store((self.state.load(Relaxed) | 1) + 1, Relaxed);
    }

    pub(super) fn moved(&self, bytes: usize) {
        self.moved.fetch_add(bytes as u64, Relaxed);
    }

    /// Checks the state, `elapsed` after the last check.
    pub(super) fn check(&self, elapsed: Duration) -> State {
        let state = self.state.load(Relaxed);
        let mut age = self.age.lock();
        *age = match *age {
            (last, time) if last == state => (state, time + elapsed),
            _ => (state, Duration::ZERO),
        };
        self.state_for(state, age.1)
    }

    /// The result of the last check.
    pub(super) fn last(&self) -> State {
        let (state, time) = *self.age.lock();
        self.state_for(state, time)
    }

    fn state_for(&self, state: u64, time: Duration) -> State {
        if state & 1 == 1 {
            State::Busy(time, self.moved.load(Relaxed))
        } else {
            State::Idle(time)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_state_unchanged_between_checks_ages() {
        const SECOND: Duration = Duration::from_secs(1);
        let progress = Progress::default();
        assert_eq!(progress.check(SECOND), State::Idle(SECOND));
        progress.begin();
        progress.moved(7);
        assert_eq!(progress.check(SECOND), State::Busy(Duration::ZERO, 7));
        assert_eq!(progress.check(SECOND), State::Busy(SECOND, 7));
        // A new message begins.
        progress.begin();
        assert_eq!(progress.check(SECOND), State::Busy(Duration::ZERO, 0));
        progress.end();
        progress.begin();
        progress.end();
        assert_eq!(progress.check(SECOND), State::Idle(Duration::ZERO));
        assert_eq!(progress.check(SECOND), State::Idle(SECOND));
        assert_eq!(progress.last(), State::Idle(SECOND));
    }
}
