//! The work of the device, its times, and the thread that is responsible at present. The
//! [runtime](crate::runtime), which is above, does the work.
//!
//! All descriptors are registered once, edge-triggered for both directions, so nothing on the data
//! path changes a registration. A thread that takes an edge must act on it, or put it on the list
//! of [`Schedule::attend_later`].
//!
//! # Adaptive polling
//!
//! A program that polls its completion queues drives the streams itself; otherwise the background
//! thread does (`runtime/background.rs`). [`Sleeper`] says what that thread does. It goes from
//! `AWAKE`, where it does its work, to one of the others, and back:
//!
//! ```text
//!            pollers found the last arrivals, and still poll
//!          ┌────────────────────────────────────────────────► TICKING ──┐
//!          │                                                            │ tick, timer, or a thread
//!          │  else: a thread waits for an event, and polls meanwhile    │ begins to sleep
//!        AWAKE ─────────────────────────────────────────────► LENT ─────┤
//!          ▲ │                                                          │ end of the loan, work
//!          │ │ else: no sends are gathered, nor were a moment ago       │
//!          │ └──────────────────────────────────────────────► ASLEEP ───┤
//!          │                                                            │ a stream, a timer, work
//!          └────────────────────────────────────────────────────────────┘
//! ```
//!
//! | state | looks at the streams | lasts at most | entered by |
//! |---|---|---|---|
//! | `AWAKE` | yes | between two works, while sends are gathered and for `WARM` after: `BURST_TICK`, doubled up to `POLLED_TICK` while the program polls | |
//! | `TICKING` | no, unless a tick finds that no poll was made since the one before | an eighth of `POLLED_TICK` at first, doubled up to `POLLED_TICK`, or `POLLED_TICK_LONG` after `POLLED_TICKS_LONG_AFTER` ticks | [`POLLER`] arrivals in a row that pollers found, or would have found (`POLLS_EVERY`, `POLL_PAUSE`), and a poll within `POLLED_TICK`; more arrivals (`POLLER_BACKOFF`) each time that a one-sided message had to wait for the tick |
//! | `LENT` | no | the loan: `EVENT_WAIT_USUAL` | [`Schedule::borrow_until`] |
//! | `ASLEEP` | yes, in epoll | without a limit | |
//!
//! A timer that is due, and `RETRY_TICK` while something is to be tried again, end each of them
//! earlier. Work that is left while the thread is `TICKING` waits for the tick, unless a poller
//! does it.
//!
//! A poller decides by the number of its polls in a row that found nothing ([`Hot`]); the table of
//! these numbers is in [`tuning`](crate::tuning). [`Hot::note`] sets it to zero when something
//! arrives.

mod patience;
mod readiness;

use crate::events::Requests;
use crate::qp::Gathering;
use crate::qp::Qp;
use crate::shard::{SHARDS, home_shard};
use crate::stream::descriptor::Descriptors;
use crate::stream::linger::Lingering;
use crate::stream::same_host::{Asleep, SameHost};
use crate::time::Nanos;
use crate::tuning::{
    ALL_STREAMS_AFTER, ALL_STREAMS_EVERY, NOTIFICATIONS_EVERY, POLLER_BACKOFF, POLLER_MAX, RELAX_EVERY_POLLS,
    RELAX_HINTS,
};
use patience::Patience;
pub(crate) use readiness::{Interest, Readiness, Token};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;
use urnic_sync::Mutex;

/// Arrivals, and streams that take bytes again, that pollers must find in a row to drive the
/// device, at first.
const POLLER: u32 = 16;
/// Queue pairs served between two reads of the list.
const BATCH: usize = 8;

/// A peer on this host rang.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rung;

/// The work of the device, and the thread that does it.
#[derive(Debug)]
pub(crate) struct Schedule {
    pub(crate) readiness: Option<Readiness>,
    /// The state of the device for local peers.
    pub(crate) same_host: Option<Arc<SameHost>>,
    pub(crate) sleeper: Sleeper,
    hot: [Hot; SHARDS],
    /// Work was left for the background thread since its last check.
    pub(crate) pending: AtomicBool,
    /// Arrivals in a row that pollers must still find until they drive the device; 0 = they do.
    unfound: AtomicU32,
    /// The value at which `unfound` begins: [`POLLER`], or more after pollers that stopped while
    /// one-sided messages arrived.
    finds: AtomicU32,
    /// Until when the background thread leaves the streams to threads that wait for events
    /// ([`lend`](crate::runtime::lend)); 0 = it does not.
    lent_until: AtomicU64,
    /// Queue pairs with something left to do.
    attention: Mutex<Vec<Arc<Qp>>>,
    attention_len: AtomicUsize,
    /// Queue pairs that gather sends.
    bursts: AtomicUsize,
    timers: Mutex<Timers>,
    lingering: Mutex<Vec<Lingering>>,
    /// Connections or events that found no room.
    left_over: AtomicBool,
    /// Too many events wait in queue 0: no work that causes more may run.
    backed_up: AtomicBool,
}

impl Schedule {
    /// A schedule that waits for descriptors.
    pub(crate) fn with_epoll(
        descriptors: &Arc<Descriptors>,
        same_host: Option<Arc<SameHost>>,
    ) -> io::Result<Schedule> {
        let schedule = Schedule {
            readiness: Some(Readiness::new(descriptors)?),
            same_host,
            ..Schedule::manual()
        };
        if let Some(same_host) = &schedule.same_host {
            for fd in same_host.notifications().wakes() {
                schedule.watch(fd, Token::NotificationPage, Interest::Input)?;
            }
        }
        Ok(schedule)
    }

    /// Says to peers on this host that this thread is about to sleep, until the result is dropped.
    ///
    /// # Errors
    /// Something has come from one: the thread must not sleep.
    pub(crate) fn fall_asleep(&self) -> Result<Option<Asleep<'_>>, Rung> {
        match &self.same_host {
            None => Ok(None),
            Some(same_host) => same_host.notifications().fall_asleep().map(Some).ok_or(Rung),
        }
    }

    /// A schedule that only [`step`](crate::runtime::step) drives.
    pub(crate) fn manual() -> Schedule {
        Schedule {
            readiness: None,
            same_host: None,
            sleeper: Sleeper::default(),
            hot: Default::default(),
            pending: AtomicBool::new(false),
            unfound: AtomicU32::new(POLLER),
            finds: AtomicU32::new(POLLER),
            lent_until: AtomicU64::new(0),
            attention: Mutex::default(),
            attention_len: AtomicUsize::new(0),
            bursts: AtomicUsize::new(0),
            timers: Mutex::default(),
            lingering: Mutex::default(),
            left_over: AtomicBool::new(false),
            backed_up: AtomicBool::new(false),
        }
    }

    /// Registers a descriptor.
    pub(crate) fn watch(&self, fd: BorrowedFd<'_>, token: Token, interest: Interest) -> Result<(), Errno> {
        self.readiness
            .as_ref()
            .map_or(Ok(()), |r| r.add(fd, token, interest))
    }

    /// Removes a descriptor from the list. On return, no thread uses it.
    pub(crate) fn unwatch(&self, fd: BorrowedFd<'_>) {
        if let Some(readiness) = &self.readiness {
            readiness.remove(fd);
        }
    }

    /// Gives a registered descriptor a new token and interest. If the descriptor is ready, its
    /// readiness is reported again.
    pub(crate) fn rewatch(&self, fd: BorrowedFd<'_>, token: Token, interest: Interest) {
        if let Some(readiness) = &self.readiness {
            readiness.change(fd, token, interest);
        }
    }

    /// Makes sure that the background thread checks for work soon.
    fn wake(&self) {
        self.pending.store(true, Ordering::SeqCst);
        if self.sleeper.must_be_woken()
            && let Some(readiness) = &self.readiness
        {
            readiness.wake();
        }
    }

    /// The number of polls so far, nearly. Polls drive the receive side.
    #[inline]
    pub(crate) fn polls(&self) -> u32 {
        self.hot.iter().map(Hot::polls).fold(0, u32::wrapping_add)
    }

    /// The number of polls in each shard.
    pub(crate) fn polls_of_shards(&self) -> [u32; SHARDS] {
        std::array::from_fn(|shard| self.hot[shard].polls())
    }

    /// The number of polls that found nothing since the last arrival: one that a poller found, or
    /// one that the background thread found when the polls were `seen`.
    pub(crate) fn empty_polls(&self, seen: &[u32; SHARDS]) -> u32 {
        let empty = |(hot, seen): (&Hot, &u32)| hot.polls().wrapping_sub(*seen).min(hot.patience.idle());
        self.hot.iter().zip(seen).map(empty).fold(0, u32::saturating_add)
    }

    /// The results of the polls of this thread's shard.
    #[inline]
    pub(crate) fn hot(&self) -> &Hot {
        &self.hot[home_shard()]
    }

    /// Whether a thread of shard `shard`, which is not this thread's, has polled since the last
    /// call with this `seen`.
    #[inline]
    pub(crate) fn has_polled_elsewhere(&self, shard: usize, seen: &AtomicU32) -> bool {
        let Some(hot) = self.hot.get(shard).filter(|_| shard != home_shard()) else {
            return false;
        };
        let polls = hot.polls();
        let before = seen.load(Ordering::Relaxed);
        seen.store(polls, Ordering::Relaxed);
        polls != before
    }

    /// Whether sends wait for a poll.
    #[inline]
    pub(crate) fn has_gathered(&self) -> bool {
        self.bursts.load(Ordering::Relaxed) > 0
    }

    pub(crate) fn burst_began(&self) {
        self.bursts.fetch_add(1, Ordering::SeqCst);
        self.wake();
    }

    pub(crate) fn burst_ended(&self) {
        self.bursts.fetch_sub(1, Ordering::SeqCst);
    }

    /// Ends a queue pair's burst, if it is in one.
    pub(crate) fn end_burst(&self, gathering: &mut Gathering) {
        if gathering.end() {
            self.burst_ended();
        }
    }

    /// A thread is about to wait for an interrupt: what pollers found earlier, and the expected
    /// return of other threads, do not count any more.
    pub(crate) fn note_waiter(&self) {
        self.forget_pollers();
        if self.lent_until.load(Ordering::SeqCst) != 0 {
            self.lent_until.store(0, Ordering::SeqCst);
        }
        self.poll_streams();
    }

    /// Makes the background thread wait for the streams again.
    fn poll_streams(&self) {
        if self.sleeper.ignores_streams()
            && let Some(readiness) = &self.readiness
        {
            readiness.wake();
        }
    }

    /// Notes that pollers do not drive the device, or no longer.
    pub(crate) fn forget_pollers(&self) {
        let finds = self.finds.load(Ordering::Relaxed);
        if self.unfound.load(Ordering::Relaxed) != finds {
            self.unfound.store(finds, Ordering::SeqCst);
        }
    }

    /// The pollers that drove the device had stopped, and a one-sided message waited for the
    /// background thread to notice it: next time they must find more arrivals.
    pub(crate) fn distrust_pollers(&self) {
        let finds = self.finds.load(Ordering::Relaxed);
        self.finds
            .store((finds * POLLER_BACKOFF).min(POLLER_MAX), Ordering::Relaxed);
        self.forget_pollers();
    }

    /// Pollers have driven the device for long.
    pub(crate) fn trust_pollers(&self) {
        self.finds.store(POLLER, Ordering::Relaxed);
    }

    /// Notes that a poller received data.
    #[inline]
    pub(crate) fn note_found(&self) {
        // An approximate count; it is not written any more once it is zero.
        let unfound = self.unfound.load(Ordering::Relaxed);
        if unfound > 0 {
            self.unfound.store(unfound - 1, Ordering::Relaxed);
            if unfound == 1 {
                // The wake-up makes the background thread stop waiting for the streams.
                self.wake();
            }
        }
    }

    /// Whether pollers drive the device.
    pub(crate) fn is_driven(&self) -> bool {
        self.unfound.load(Ordering::SeqCst) == 0
    }

    /// Notes that a thread that waits for an event polls the streams itself. A background thread
    /// that sleeps on the streams reads this note when data arrive.
    pub(crate) fn borrow_until(&self, until: Nanos) {
        self.lent_until.store(until.0, Ordering::SeqCst);
    }

    /// Notes that no thread polls the streams for an event any more.
    pub(crate) fn give_back(&self) {
        self.lent_until.store(0, Ordering::SeqCst);
        if !self.is_driven() {
            self.poll_streams();
        }
    }

    /// The time for which threads that wait for events still poll the streams; `None` if none does.
    pub(crate) fn lent(&self, now: Nanos) -> Option<Duration> {
        let until = Nanos(self.lent_until.load(Ordering::SeqCst));
        (until > now).then(|| until.since(now))
    }

    /// A connection could not be accepted, or an event not be posted: to be tried again.
    pub(crate) fn note_left_over(&self) {
        if !self.left_over.swap(true, Ordering::SeqCst) {
            self.wake();
        }
    }

    /// Too many events wait for the driver, or not.
    pub(crate) fn note_backed_up(&self, backed_up: bool) {
        if self.backed_up.load(Ordering::Relaxed) != backed_up {
            self.backed_up.store(backed_up, Ordering::SeqCst);
        }
    }

    /// Whether they do.
    pub(crate) fn is_backed_up(&self) -> bool {
        self.backed_up.load(Ordering::SeqCst)
    }

    /// Whether work was left over; the caller must then try it now.
    pub(crate) fn take_left_over(&self) -> bool {
        self.left_over.swap(false, Ordering::SeqCst)
    }

    /// Notes the result of a retry; `still`: some work found no room again. Returns whether work is
    /// left over.
    pub(crate) fn leave_over(&self, still: bool) -> bool {
        self.left_over.fetch_or(still, Ordering::SeqCst);
        self.left_over.load(Ordering::SeqCst)
    }

    /// Puts a queue pair on the list of those with work for later.
    pub(crate) fn attend_later(&self, qp: &Arc<Qp>, requests: Requests) {
        qp.note_later(requests);
        if !qp.listed.swap(true, Ordering::SeqCst) {
            let mut attention = self.attention.lock();
            attention.push(qp.clone());
            self.attention_len.store(attention.len(), Ordering::SeqCst);
            drop(attention);
            self.wake();
        }
    }

    /// The number of queue pairs that left work for the next poll or tick.
    pub(crate) fn attention(&self) -> usize {
        self.attention_len.load(Ordering::SeqCst)
    }

    /// Whether there is such work, as this thread sees it.
    #[inline]
    pub(crate) fn seems_wanted(&self) -> bool {
        self.attention_len.load(Ordering::Relaxed) > 0
    }

    /// The last few of the first `at` queue pairs on the list, and how many are before them. The
    /// list is not locked while they run, and nothing is allocated for them.
    pub(crate) fn attention_before(&self, at: usize) -> ([Option<Arc<Qp>>; BATCH], usize) {
        let mut batch: [Option<Arc<Qp>>; BATCH] = Default::default();
        let attention = self.attention.lock();
        let at = at.min(attention.len());
        let start = at.saturating_sub(BATCH);
        for (slot, qp) in batch.iter_mut().zip(&attention[start..at]) {
            *slot = Some(qp.clone());
        }
        (batch, start)
    }

    /// Takes those off the list that have nothing left to do. Returns whether some of them left
    /// more than sends to gather.
    pub(crate) fn forget_attended(&self) -> bool {
        let mut busy = false;
        let mut attention = self.attention.lock();
        attention.retain(|qp| {
            busy |= qp.has_later_than_flush();
            if qp.has_later() {
                return true;
            }
            qp.listed.store(false, Ordering::SeqCst);
            // A thread that left something between the two steps found the queue pair listed.
            qp.has_later() && !qp.listed.swap(true, Ordering::SeqCst)
        });
        self.attention_len.store(attention.len(), Ordering::SeqCst);
        busy
    }

    /// Sets a timer.
    pub(crate) fn set_timer(&self, due: Nanos, timer: Timer) {
        // A sleeping thread sleeps until the first timer at the latest, and then finds the next
        // one.
        if self.timers.lock().set(due, timer) {
            self.wake();
        }
    }

    /// When the next timer runs out.
    pub(crate) fn next_timer(&self) -> Option<Nanos> {
        self.timers.lock().next()
    }

    /// Takes a timer that has run out by `now`.
    pub(crate) fn take_timer(&self, now: Nanos) -> Option<Timer> {
        self.timers.lock().take(now)
    }

    /// Lets a stream go.
    pub(crate) fn linger(&self, lingering: Lingering) {
        self.lingering.lock().push(lingering);
        self.wake();
    }

    /// Streams on their way out.
    #[cfg(test)]
    pub(crate) fn lingering(&self) -> usize {
        self.lingering.lock().len()
    }

    /// Serves the lingering streams; returns when to serve them again. `ready`: one of them is
    /// ready.
    pub(crate) fn run_lingering(&self, now: Nanos, ready: bool) -> Option<Nanos> {
        let mut lingering = self.lingering.lock();
        if ready {
            lingering.iter_mut().for_each(|l| l.next_poll = now);
        }
        lingering.retain_mut(|l| !l.poll(now));
        lingering.iter().map(|l| l.next_poll).min()
    }

    /// Removes everything, for a reset, except the lingering streams: when a driver's process has
    /// ended, for any reason, a reset follows, and the messages that completed before it must still
    /// arrive. These streams own their bytes, and end in a bounded time.
    pub(crate) fn clear(&self) {
        self.timers.lock().clear();
        self.attention.lock().clear();
        self.attention_len.store(0, Ordering::SeqCst);
    }
}

// The choice of what a polling thread polls next, by the results of its polls so far.

/// The results of the polls of a shard's threads.
#[repr(align(64))]
#[derive(Debug, Default)]
pub(crate) struct Hot {
    /// The queue pair for which a thread of this shard last found something; 0 = none. It is
    /// polled for completion queues that have had no completion yet.
    pub(crate) qid: AtomicU32,
    polls: AtomicU32,
    /// Polls since something came.
    patience: Patience,
    /// It came for another queue pair than the one that is polled, and the notification page said
    /// so.
    by_notification: AtomicBool,
}

impl Hot {
    /// Counts a poll.
    #[inline]
    pub(crate) fn count_poll(&self) {
        // Approximate: threads of one shard may lose counts to one another.
        let polls = self.polls().wrapping_add(1);
        self.polls.store(polls, Ordering::Relaxed);
    }

    /// The number of polls.
    #[inline]
    fn polls(&self) -> u32 {
        self.polls.load(Ordering::Relaxed)
    }

    /// Whether the next poll covers all streams. While the last stream delivers, this is rare: a
    /// poll of the others takes cache lines away from their senders.
    #[inline]
    pub(crate) fn is_to_poll_all(&self) -> bool {
        let polls = self.polls();
        let idle = self.patience.idle();
        polls.is_multiple_of(ALL_STREAMS_EVERY) || (idle + 1).is_multiple_of(ALL_STREAMS_AFTER)
    }

    /// Whether the poll of the last stream also reads the notification page. Peers that take turns
    /// are found there each time; with a single sender the page's cache line is best left to that
    /// sender.
    #[inline]
    pub(crate) fn is_to_look_at_notifications(&self) -> bool {
        let idle = self.patience.idle();
        self.by_notification.load(Ordering::Relaxed) && idle.is_multiple_of(NOTIFICATIONS_EVERY)
    }

    /// Notes that bytes arrived for this queue pair; `by_notification`: they were found by the
    /// notification page.
    pub(crate) fn note_found(&self, qid: u32, by_notification: bool) {
        self.qid.store(qid, Ordering::Relaxed);
        self.by_notification.store(by_notification, Ordering::Relaxed);
    }

    /// Notes whether a poll brought something. `yield_now` yields the processor, and returns the
    /// time that this took.
    #[inline]
    pub(crate) fn note(&self, arrived: bool, yield_now: impl FnOnce() -> Duration) {
        if arrived {
            return self.patience.note_found();
        }
        let (idle, yields) = self.patience.note_nothing();
        if idle >= RELAX_EVERY_POLLS {
            (0..RELAX_HINTS).for_each(|_| std::hint::spin_loop());
        }
        if yields {
            self.patience.note_yield(idle, yield_now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of `polls` polls of the stream that last delivered, those that become polls of all streams.
    fn of_all(polls: usize, arrived: bool) -> usize {
        let hot = Hot::default();
        let is_of_all = || {
            hot.count_poll();
            let is_of_all = hot.is_to_poll_all();
            hot.note(arrived, || Duration::ZERO);
            is_of_all
        };
        std::iter::repeat_with(is_of_all)
            .take(polls)
            .filter(|all| *all)
            .count()
    }

    /// The notification page finds peers that take turns each time; for a single sender it is not
    /// read.
    #[test]
    fn the_page_is_read_often_only_after_it_found_an_arrival() {
        let hot = Hot::default();
        let heard = || {
            let polls = (0..64).map(|_| {
                let heard = hot.is_to_look_at_notifications();
                hot.note(false, || Duration::ZERO);
                heard
            });
            polls.filter(|heard| *heard).count()
        };
        assert_eq!(heard(), 0);
        hot.note_found(7, true);
        assert_eq!(heard(), 32);
        hot.note_found(7, false);
        assert_eq!(heard(), 0);
    }

    #[test]
    fn a_stream_that_delivers_does_not_starve_the_others() {
        assert_eq!(of_all(640, true), 10);
        assert_eq!(of_all(640, false), 40);
    }
}

// Whether the device's thread sleeps, and which thread must wake it.

/// Checks all its work.
pub(crate) const AWAKE: u8 = 0;
/// Asleep for a millisecond or less, streams ignored.
pub(crate) const TICKING: u8 = 1;
/// Asleep until something is ready.
pub(crate) const ASLEEP: u8 = 2;
/// Asleep for the time of a loan or less, streams ignored.
pub(crate) const LENT: u8 = 3;

/// The state of the background thread, for the threads that depend on it.
#[derive(Debug, Default)]
pub(crate) struct Sleeper(AtomicU8);

impl Sleeper {
    /// Whether the thread must be woken for work that it cannot detect. If so, the caller must wake
    /// it.
    pub(crate) fn must_be_woken(&self) -> bool {
        self.leaves(ASLEEP) || self.leaves(LENT)
    }

    /// Whether the thread does not wait for the streams at present. If so, the caller must wake it.
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

// Timers by their time.

/// The owner of a timer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Timer {
    /// A queue pair.
    Qp(u32),
    /// A completion queue, for its notification.
    Cq(u32),
    /// A stream in streaming mode.
    Stream(u32),
}

/// One time for each object, the earliest that was set: an object that is woken early sets its
/// timer again. So a driver that makes one object set timers repeatedly, for example by resets,
/// does not make this list longer.
#[derive(Debug, Default)]
struct Timers {
    order: BTreeSet<(Nanos, Timer)>,
    of: HashMap<Timer, Nanos>,
}

impl Timers {
    /// Sets a timer; returns whether it is the first that is due from now on.
    fn set(&mut self, due: Nanos, timer: Timer) -> bool {
        if let Some(set) = self.of.get_mut(&timer) {
            if *set <= due {
                return false;
            }
            self.order.remove(&(*set, timer));
            *set = due;
        } else {
            self.of.insert(timer, due);
        }
        let is_first = self.next().is_none_or(|first| due < first);
        self.order.insert((due, timer));
        is_first
    }

    /// When the first is due.
    fn next(&self) -> Option<Nanos> {
        self.order.first().map(|(due, _)| *due)
    }

    /// Takes the first if it is due by `now`.
    fn take(&mut self, now: Nanos) -> Option<Timer> {
        self.next().filter(|due| *due <= now)?;
        let (_, timer) = self.order.pop_first()?;
        self.of.remove(&timer);
        Some(timer)
    }

    fn clear(&mut self) {
        self.order.clear();
        self.of.clear();
    }
}

#[cfg(test)]
mod timers_tests {
    use super::*;

    #[test]
    fn an_object_has_one_timer_the_earliest() {
        let mut timers = Timers::default();
        for n in 0..1000 {
            assert!(timers.set(Nanos(5000 - n), Timer::Qp(1)));
            assert!(!timers.set(Nanos(6000 + n), Timer::Cq(1)));
            assert!(!timers.set(Nanos(5500 + n), Timer::Qp(2)));
        }
        assert_eq!((timers.order.len(), timers.of.len()), (3, 3));
        assert_eq!(timers.take(Nanos(4000)), None);
        assert_eq!(timers.next(), Some(Nanos(4001)));
        let taken: Vec<_> = std::iter::from_fn(|| timers.take(Nanos(6000))).collect();
        assert_eq!(taken, [Timer::Qp(1), Timer::Qp(2), Timer::Cq(1)]);
        assert_eq!((timers.next(), timers.of.len()), (None, 0));
        // One that ran out may be set later than it was.
        assert!(timers.set(Nanos(7000), Timer::Qp(1)));
        assert_eq!(timers.take(Nanos(7000)), Some(Timer::Qp(1)));
    }
}
