//! Deadlines, at most one for each key.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;

use crate::mpa_startup::Time;

/// A deadline for each key that has one.
#[derive(Debug)]
pub(crate) struct Timers<K> {
    by_key: HashMap<K, Time>,
    by_time: BTreeSet<(Time, K)>,
}

impl<K> Default for Timers<K> {
    fn default() -> Timers<K> {
        Timers {
            by_key: HashMap::new(),
            by_time: BTreeSet::new(),
        }
    }
}

impl<K: Copy + Ord + Hash> Timers<K> {
    /// Sets or clears the deadline of `key`.
    pub(crate) fn set(&mut self, key: K, at: Option<Time>) {
        let old = match at {
            Some(at) => self.by_key.insert(key, at),
            None => self.by_key.remove(&key),
        };
        if let Some(old) = old {
            self.by_time.remove(&(old, key));
        }
        if let Some(at) = at {
            self.by_time.insert((at, key));
        }
    }

    /// The earliest deadline.
    pub(crate) fn next(&self) -> Option<Time> {
        self.by_time.first().map(|(at, _)| *at)
    }

    /// Removes the earliest deadline if it is reached, and returns its key.
    pub(crate) fn due(&mut self, now: Time) -> Option<K> {
        let (at, key) = *self.by_time.first()?;
        (at <= now).then(|| {
            self.set(key, None);
            key
        })
    }
}
