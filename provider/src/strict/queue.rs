//! Completion queues: whether the requests that complete there fit, and whether an event may have
//! been missed.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::{self, ThreadId};

use urnic_process::lock::lock;

use super::call_site::CallSite;
use super::process::{Strict, current};
use super::rule::Rule;

/// The check of one completion queue.
#[derive(Debug)]
pub(crate) struct QueueCheck {
    /// The number of entries that the program asked for.
    entries: AtomicU32,
    /// Requests that are posted and will complete here: signalled sends, and receives.
    outstanding: AtomicU32,
    /// The program has not polled since.
    armed: Mutex<Option<Armed>>,
}

/// A request for an event while completions waited.
#[derive(Debug)]
struct Armed {
    site: CallSite,
    waiting: u32,
    thread: ThreadId,
}

impl QueueCheck {
    /// The check of a queue for which the program asked for this many entries.
    pub(crate) fn new(entries: u32) -> QueueCheck {
        QueueCheck {
            entries: AtomicU32::new(entries),
            outstanding: AtomicU32::new(0),
            armed: Mutex::default(),
        }
    }

    /// The program changed the number of entries.
    pub(crate) fn resized(&self, entries: u32) {
        self.entries.store(entries, Ordering::Relaxed);
    }

    /// One more request will complete here.
    pub(super) fn add(&self, strict: &Strict, site: &CallSite) {
        let outstanding = self.outstanding.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        let entries = self.entries.load(Ordering::Relaxed);
        if outstanding > entries {
            strict.findings.report(Rule::CqTooSmall, site, || {
                format!(
                    "{outstanding} requests are outstanding whose completions go to a completion queue \
                     that was created for {entries}"
                )
            });
        }
    }

    /// `count` requests completed, or will not complete.
    pub(super) fn remove(&self, count: u32) {
        self.outstanding.fetch_sub(count, Ordering::Relaxed);
    }

    /// The program requested an event while `waiting` completions were in the queue.
    pub(crate) fn armed(&self, waiting: u32) {
        *lock(&self.armed) = (waiting > 0).then(|| Armed {
            site: CallSite::here(),
            waiting,
            thread: thread::current().id(),
        });
    }

    /// The program polls.
    pub(crate) fn polled(&self) {
        *lock(&self.armed) = None;
    }

    /// The program waited for an event, and has one.
    pub(crate) fn waited(&self) {
        let mut armed = lock(&self.armed);
        // Another thread may wait while the one that requested the event is about to poll.
        let Some(Armed { site, waiting, .. }) = armed.take_if(|armed| armed.thread == thread::current().id())
        else {
            return;
        };
        drop(armed);
        if let Some(strict) = current() {
            strict.findings.report(Rule::MissedRearm, &site, || {
                format!(
                    "an event was requested while {waiting} completions waited, which cause none, and the \
                     program waited for an event without another poll"
                )
            });
        }
    }
}
