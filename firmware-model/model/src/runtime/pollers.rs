//! What the background thread knows of the threads that poll: it looks at the count of their polls
//! whenever it wakes.

use crate::time::Nanos;
use std::time::Duration;

/// Longest time that a gathered send waits for a poller that has stopped, at first.
const BURST_TICK: Duration = Duration::from_micros(100);
/// The interval at which a look checks that a poller still polls: at first, and after so many looks
/// in a row that found polls. Each takes a poller's processor away for 10 to 20 us.
const POLLED_TICK: Duration = Duration::from_millis(1);
const LONG_TICK: Duration = Duration::from_millis(2);
const LONG_AFTER: u32 = 32;
/// A program that polls so often at least polls all the time.
const POLLS_EVERY: Duration = Duration::from_micros(20);
/// A program that has not polled for so long does something else.
const PAUSE: Duration = Duration::from_micros(200);

/// Whether a poller would have found what the background thread found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Finder {
    /// One was at it, and would have found it as well.
    Poller,
    /// None has polled for a while.
    Nobody,
    /// It cannot be told.
    Unknown,
}

/// The polls, as of the last look.
#[derive(Debug)]
pub(super) struct Pollers {
    polls: u32,
    looked_at: Nanos,
    /// The last look that found polls since the one before.
    polled_at: Nanos,
    /// That was the last look, or there has been too little time for a poll since.
    polled: bool,
    burst_tick: Duration,
    /// Looks in a row that found polls since the one before.
    in_a_row: u32,
}

impl Pollers {
    /// There have been so many polls.
    pub(super) fn new(polls: u32) -> Pollers {
        Pollers {
            polls,
            looked_at: Nanos::default(),
            polled_at: Nanos::default(),
            polled: false,
            burst_tick: BURST_TICK,
            in_a_row: 0,
        }
    }

    /// A look, when there have been `polls`; `woken`: another thread ended the sleep before it
    /// early.
    pub(super) fn look(&mut self, now: Nanos, polls: u32, woken: bool) {
        self.polled = self.polls != polls || (woken && self.polled);
        if self.polls != polls {
            (self.polls, self.polled_at) = (polls, now);
        }
        self.looked_at = now;
        self.in_a_row = match self.polled {
            true => self.in_a_row.saturating_add(1),
            false => 0,
        };
        self.burst_tick = match self.polled {
            true => (2 * self.burst_tick).min(POLLED_TICK),
            false => BURST_TICK,
        };
    }

    /// Whether there have been polls since the look before the last.
    pub(super) fn have_polled(&self) -> bool {
        self.polled
    }

    /// Whether the polls go on. Two looks may be so close to each other that there is none between
    /// them.
    pub(super) fn go_on(&self) -> bool {
        self.looked_at.since(self.polled_at) < POLLED_TICK
    }

    /// When to look whether they still go on.
    pub(super) fn polled_tick(&self) -> Duration {
        match self.in_a_row {
            0..LONG_AFTER => POLLED_TICK,
            _ => LONG_TICK,
        }
    }

    /// When to look whether pollers have sent what is gathered. As long as they do, looks become
    /// rarer: each takes a poller's processor away.
    pub(super) fn burst_tick(&self) -> Duration {
        self.burst_tick
    }

    /// Something came to the background thread by now, when there have been `polls`.
    pub(super) fn finder(&self, now: Nanos, polls: u32) -> Finder {
        match polls.wrapping_sub(self.polls) {
            0 if now.since(self.polled_at) >= PAUSE => Finder::Nobody,
            0 => Finder::Unknown,
            polls if POLLS_EVERY.saturating_mul(polls) >= now.since(self.looked_at) => Finder::Poller,
            _ => Finder::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(micros: u64) -> Nanos {
        Nanos(1_000_000_000) + Duration::from_micros(micros)
    }

    #[test]
    fn looks_become_rarer_while_pollers_poll() {
        let mut pollers = Pollers::new(7);
        let mut now = 0;
        let mut ticks = Vec::new();
        for polls in 8..14 {
            now += pollers.burst_tick().as_micros() as u64;
            pollers.look(at(now), polls, false);
            ticks.push(pollers.burst_tick().as_micros());
        }
        assert_eq!(ticks, [200, 400, 800, 1000, 1000, 1000]);
        pollers.look(at(now + 1000), 13, false);
        assert_eq!(pollers.burst_tick(), BURST_TICK);
    }

    #[test]
    fn a_program_that_polls_for_long_is_looked_at_less_often() {
        let mut pollers = Pollers::new(0);
        let mut now = 0;
        for polls in 1..=LONG_AFTER {
            assert_eq!(pollers.polled_tick(), POLLED_TICK, "{polls}");
            now += 1000;
            pollers.look(at(now), polls, false);
        }
        assert_eq!(pollers.polled_tick(), LONG_TICK);
        pollers.look(at(now + 2000), LONG_AFTER, false);
        assert!(!pollers.go_on());
        assert_eq!(pollers.polled_tick(), POLLED_TICK);
    }

    /// A thread that sends for a while does not poll meanwhile.
    #[test]
    fn a_short_time_without_polls_is_not_their_end() {
        let mut pollers = Pollers::new(0);
        pollers.look(at(0), 1, false);
        for now in [10, 50, 200, 999] {
            pollers.look(at(now), 1, false);
            assert!(pollers.go_on() && !pollers.have_polled(), "{now}");
        }
        pollers.look(at(1000), 1, false);
        assert!(!pollers.go_on());
    }

    #[test]
    fn a_wake_says_nothing_about_polls() {
        let mut pollers = Pollers::new(0);
        pollers.look(at(0), 1, false);
        pollers.look(at(1), 1, true);
        assert!(pollers.have_polled());
        pollers.look(at(2), 1, false);
        pollers.look(at(3), 1, true);
        assert!(!pollers.have_polled());
    }

    #[test]
    fn who_polls_often_would_have_found_it() {
        let mut pollers = Pollers::new(0);
        pollers.look(at(0), 10, false);
        let cases = [
            (20, 11, Finder::Poller),
            (21, 11, Finder::Unknown),
            (1000, 60, Finder::Poller),
            (1000, 59, Finder::Unknown),
            (199, 10, Finder::Unknown),
            (200, 10, Finder::Nobody),
        ];
        for (now, polls, finder) in cases {
            assert_eq!(
                pollers.finder(at(now), polls),
                finder,
                "{polls} polls by {now} us"
            );
        }
    }
}
