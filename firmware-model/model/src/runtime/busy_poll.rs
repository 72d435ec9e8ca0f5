//! Busy-polling by the background thread: when it begins, what it costs at most, and when it ends.
//!
//! A peer's Writes, Reads and atomics give the program no completion, so a program that waits for
//! them reads its memory and polls no queue. A thread that sleeps on the stream takes 5 to 10 us to
//! wake. While such messages arrive at short intervals, the background thread therefore polls the
//! stream instead of sleeping:
//!
//! | busy-polling | condition |
//! |---|---|
//! | begins | [`BUSY_AFTER`] one-sided messages in a row, each within the limit after the one before, while the program does not poll; a processor is free; the budget is not used up |
//! | ends | nothing arrived for the limit: the next time takes twice as many messages, up to [`BUSY_AFTER_MAX`] |
//! | ends | no processor is free any more: the next check is after [`BUSY_CHECK`], and later with each check in vain |
//! | ends | another thread took the processor: the next check is after [`BUSY_RETRY`], and later each time |
//! | ends | pollers find the messages |
//!
//! The budget is a share of one processor, for all devices of the process together.
//!
//! A processor is free if not more threads of the host want one than this thread may use
//! ([`Processors`]). A thread that may use one processor only, as those of a pinned program, cannot
//! know what else wants it: it takes the processor for free if the other threads of its process
//! hardly use it, and learns of other processes when they take the processor.

use crate::config::BusyPoll;
use crate::time::Nanos;
use crate::tuning::{
    BUSY_AFTER, BUSY_AFTER_MAX, BUSY_CHECK, BUSY_RETRY, BUSY_RETRY_MAX, BUSY_SHARED_BY, BUSY_WINDOW,
};
use rustix::fs::{Mode, OFlags};
use rustix::time::{ClockId, Timespec, clock_gettime};
use std::time::Duration;
use urnic_sync::Mutex;

/// The arrivals of a device, and whether to busy-poll for the next one.
#[derive(Debug)]
pub(super) struct BusyPolling {
    config: BusyPoll,
    /// The queue pair of the last one-sided message.
    qid: u32,
    arrived_at: Nanos,
    /// Messages in a row at short intervals.
    in_a_row: u32,
    /// Such messages after which busy-polling begins.
    begins_at: u32,
    /// The time before which the thread does not check for a free processor again, and whether one
    /// was free at the last check.
    next_check: Nanos,
    free: bool,
    /// The time from the next check in vain to the one after it.
    retry: Duration,
}

/// Why a busy-poll ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// A message arrived.
    Arrival,
    /// Nothing arrived for the limit.
    Limit,
    /// Another thread took the processor for a while.
    Preempted,
    /// The budget is used up.
    Exhausted,
    /// There is other work.
    Other,
}

impl BusyPolling {
    pub(super) fn new(config: BusyPoll) -> BusyPolling {
        BusyPolling {
            config,
            qid: 0,
            arrived_at: Nanos::default(),
            in_a_row: 0,
            begins_at: BUSY_AFTER,
            next_check: Nanos::default(),
            free: false,
            retry: BUSY_CHECK,
        }
    }

    /// Notes one-sided messages for a queue pair, which no poller would have found.
    pub(super) fn note_arrival(&mut self, qid: u32, now: Nanos) {
        let is_soon = now.since(self.arrived_at) <= self.config.limit;
        self.in_a_row = if is_soon {
            self.in_a_row.saturating_add(1)
        } else {
            0
        };
        (self.qid, self.arrived_at) = (qid, now);
    }

    /// Pollers find the messages.
    pub(super) fn forget(&mut self) {
        self.in_a_row = 0;
    }

    /// The queue pair to poll from `now` on, and the time until which its next message is awaited;
    /// `None` = the thread sleeps. `is_free`: queries whether a processor is free.
    pub(super) fn next(&mut self, now: Nanos, is_free: impl FnOnce() -> bool) -> Option<(u32, Nanos)> {
        let until = self.arrived_at + self.config.limit;
        if self.in_a_row < self.begins_at || now >= until {
            return None;
        }
        if now >= self.next_check {
            self.free = is_free();
            self.next_check = now + if self.free { BUSY_CHECK } else { self.retry };
            self.retry = match self.free {
                true => (self.retry / 2).max(BUSY_CHECK),
                false => (2 * self.retry).min(self.retry.max(BUSY_RETRY)),
            };
        }
        self.free.then_some((self.qid, until))
    }

    /// Notes the end of a busy-poll.
    pub(super) fn note_end(&mut self, end: End, now: Nanos) {
        match end {
            End::Arrival => self.begins_at = BUSY_AFTER,
            End::Limit => {
                self.begins_at = (2 * self.begins_at).min(BUSY_AFTER_MAX);
                self.in_a_row = 0;
            }
            End::Preempted => {
                // The next check will halve it.
                self.retry = (4 * self.retry).clamp(BUSY_RETRY, BUSY_RETRY_MAX);
                (self.free, self.next_check) = (false, now + self.retry);
            }
            End::Exhausted => (self.free, self.next_check) = (false, now + BUSY_RETRY),
            End::Other => {}
        }
    }
}

/// The time for which the threads of a process may still busy-poll.
#[derive(Debug)]
pub(super) struct Budget {
    left: Duration,
    filled_at: Nanos,
}

/// That of this process.
static OF_PROCESS: Mutex<Budget> = Mutex::new(Budget {
    left: Duration::ZERO,
    filled_at: Nanos(0),
});

impl Budget {
    /// Takes time for a busy-poll of this length out of the budget of this process. Returns the
    /// time granted.
    pub(super) fn take(now: Nanos, length: Duration, share: u32) -> Duration {
        // A child of fork(2) may find it locked for ever, by a thread that it does not have.
        let budget = OF_PROCESS.try_lock();
        budget.map_or(Duration::ZERO, |mut budget| budget.grant(now, length, share))
    }

    /// Returns time that was granted and not used.
    pub(super) fn put_back(unused: Duration) {
        if let Some(mut budget) = OF_PROCESS.try_lock() {
            budget.left += unused;
        }
    }

    /// `share`: percent of one processor.
    fn grant(&mut self, now: Nanos, length: Duration, share: u32) -> Duration {
        let of = |time: Duration| time * share / 100;
        let gained = of(now.since(self.filled_at).min(BUSY_WINDOW));
        self.left = (self.left + gained).min(of(BUSY_WINDOW));
        self.filled_at = self.filled_at.max(now);
        let granted = length.min(self.left);
        self.left -= granted;
        granted
    }
}

/// The processors that the background thread may use.
#[derive(Debug, Default)]
pub(super) struct Processors {
    /// The time of the last look at one processor, and the processor time that the process's other
    /// threads had used.
    looked: Option<(Duration, Duration)>,
}

impl Processors {
    /// Whether one is free for this thread, which runs. `false` if the kernel does not tell.
    pub(super) fn has_free(&mut self) -> bool {
        match rustix::thread::sched_getaffinity(None).map(|allowed| allowed.count()) {
            Ok(1) => self.is_left_alone(),
            Ok(allowed) => runnable_threads().is_some_and(|threads| threads <= allowed),
            Err(_) => false,
        }
    }

    /// Whether the process's other threads hardly ran since the last look.
    fn is_left_alone(&mut self) -> bool {
        let [now, process, thread] = [
            ClockId::Monotonic,
            ClockId::ProcessCPUTime,
            ClockId::ThreadCPUTime,
        ]
        .map(elapsed);
        let others = process.saturating_sub(thread);
        let before = self.looked.replace((now, others));
        before.is_some_and(|before| is_small(before, (now, others)))
    }
}

/// Whether the processor time used between two looks is small compared with the time between them.
fn is_small(before: (Duration, Duration), now: (Duration, Duration)) -> bool {
    let used = now.1.saturating_sub(before.1);
    used * BUSY_SHARED_BY <= now.0.saturating_sub(before.0)
}

fn elapsed(clock: ClockId) -> Duration {
    let Timespec { tv_sec, tv_nsec } = clock_gettime(clock);
    Duration::new(tv_sec.try_into().unwrap_or(0), tv_nsec.try_into().unwrap_or(0))
}

fn runnable_threads() -> Option<u32> {
    let file = rustix::fs::open("/proc/loadavg", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut text = [0u8; 128];
    let len = rustix::io::read(&file, &mut text).ok()?;
    runnable_in(str::from_utf8(text.get(..len)?).ok()?)
}

/// The number of runnable threads in the text of `/proc/loadavg` (proc(5)).
fn runnable_in(text: &str) -> Option<u32> {
    let (runnable, _) = text.split_whitespace().nth(3)?.split_once('/')?;
    runnable.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: BusyPoll = BusyPoll {
        limit: Duration::from_micros(50),
        share: 100,
    };

    fn at(micros: u64) -> Nanos {
        Nanos(1_000_000_000) + Duration::from_micros(micros)
    }

    /// Notes `count` messages at an interval of `interval` us, and returns the time of the last.
    fn arrivals(busy: &mut BusyPolling, from: u64, count: u32, interval: u64) -> u64 {
        for n in 0..u64::from(count) {
            busy.note_arrival(7, at(from + n * interval));
        }
        from + u64::from(count - 1) * interval
    }

    #[test]
    fn messages_at_short_intervals_are_awaited_busily() {
        let mut busy = BusyPolling::new(CONFIG);
        let last = arrivals(&mut busy, 0, BUSY_AFTER, 20);
        assert_eq!(busy.next(at(last), || true), None);
        let last = arrivals(&mut busy, last + 20, 1, 20);
        assert_eq!(busy.next(at(last + 1), || true), Some((7, at(last + 50))));
        assert_eq!(busy.next(at(last + 50), || true), None);
        arrivals(&mut busy, last + 101, 1, 20);
        assert_eq!(busy.next(at(last + 102), || true), None);
    }

    #[test]
    fn rare_messages_are_not_awaited() {
        let mut busy = BusyPolling::new(CONFIG);
        let last = arrivals(&mut busy, 0, 10 * BUSY_AFTER, 51);
        assert_eq!(busy.next(at(last), || true), None);
    }

    /// An interval just above the limit costs less and less.
    #[test]
    fn each_vain_wait_makes_the_next_one_rarer() {
        let mut busy = BusyPolling::new(CONFIG);
        let mut now = 0;
        for expected in [2, 4, 8, 16] {
            while busy.next(at(now), || true).is_none() {
                now = arrivals(&mut busy, now + 10, 1, 0);
            }
            busy.note_end(End::Limit, at(now + 50));
            assert_eq!(busy.begins_at, expected * BUSY_AFTER);
            now += 60;
        }
        for _ in 0..64 {
            busy.note_end(End::Limit, at(now));
        }
        assert_eq!(busy.begins_at, BUSY_AFTER_MAX);
        busy.note_end(End::Arrival, at(now));
        assert_eq!(busy.begins_at, BUSY_AFTER);
    }

    #[test]
    fn without_a_free_processor_the_thread_sleeps() {
        let mut busy = BusyPolling::new(CONFIG);
        let last = arrivals(&mut busy, 0, 2 * BUSY_AFTER, 10);
        assert_eq!(busy.next(at(last), || false), None);
        let last = arrivals(&mut busy, last + 10, 2, 10);
        assert_eq!(busy.next(at(last), || unreachable!("asked too soon")), None);
        let later = last + BUSY_CHECK.as_micros() as u64;
        let last = arrivals(&mut busy, later, 2 * BUSY_AFTER, 10);
        assert!(busy.next(at(last), || true).is_some());
    }

    /// Another process on the same processor: it loses a turn of the scheduler each time.
    #[test]
    fn each_loss_of_the_processor_makes_the_next_one_rarer() {
        let mut busy = BusyPolling::new(CONFIG);
        let mut last = 0;
        for expected in [20, 40, 80, 160, 320, 640, 1280, 2000, 2000] {
            last = arrivals(&mut busy, last + 10, 2 * BUSY_AFTER, 10);
            assert!(busy.next(at(last), || true).is_some());
            busy.note_end(End::Arrival, at(last));
            busy.note_end(End::Preempted, at(last));
            let early = arrivals(&mut busy, last + expected * 1000 - 500, 2 * BUSY_AFTER, 10);
            assert_eq!(busy.next(at(early), || unreachable!("{expected} ms")), None);
            last += expected * 1000;
        }
        for _ in 0..12 {
            last = arrivals(&mut busy, last + 2000, 2 * BUSY_AFTER, 10);
            assert!(busy.next(at(last), || true).is_some());
        }
        assert_eq!(busy.retry, BUSY_CHECK);
    }

    #[test]
    fn a_program_that_computes_leaves_its_only_processor_to_nobody() {
        let micros = Duration::from_micros;
        let looks = |used, time| is_small((micros(0), micros(0)), (micros(time), micros(used)));
        assert!(looks(100, 2000));
        assert!(!looks(300, 2000));
        // Two threads ran on other processors meanwhile.
        assert!(!looks(4000, 2000));
    }

    #[test]
    fn one_processor_is_not_free_before_the_second_look() {
        let mut processors = Processors::default();
        assert!(!processors.is_left_alone());
        assert!(processors.looked.is_some());
    }

    #[test]
    fn a_limit_of_zero_turns_it_off() {
        let limit = Duration::ZERO;
        let mut busy = BusyPolling::new(BusyPoll { limit, ..CONFIG });
        let last = arrivals(&mut busy, 0, 100, 1);
        assert_eq!(busy.next(at(last), || unreachable!("off")), None);
    }

    #[test]
    fn a_budget_is_a_share_of_the_time() {
        let mut budget = Budget {
            left: Duration::ZERO,
            filled_at: at(0),
        };
        let micros = Duration::from_micros;
        assert_eq!(budget.grant(at(100), micros(50), 25), micros(25));
        assert_eq!(budget.grant(at(100), micros(50), 25), micros(0));
        assert_eq!(budget.grant(at(500), micros(50), 25), micros(50));
        // A long time without a busy-poll is not saved up.
        assert_eq!(budget.grant(at(60_000_000), 2 * BUSY_WINDOW, 25), BUSY_WINDOW / 4);
    }

    #[test]
    fn the_kernels_count_of_runnable_threads() {
        assert_eq!(runnable_in("0.20 0.18 0.12 3/80 11206\n"), Some(3));
        for text in ["", "0.20 0.18 0.12", "0.20 0.18 0.12 3", "a b c d/e"] {
            assert_eq!(runnable_in(text), None, "{text}");
        }
        assert!(runnable_threads().is_some_and(|threads| threads > 0));
    }
}
