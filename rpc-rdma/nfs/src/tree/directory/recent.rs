//! Maps of a limited number of recently used values, and descriptors of a limited age.

use rustix::fd::OwnedFd;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;
use std::time::{Duration, Instant};
use urnic_sync::{Mutex, MutexGuard};

/// A map of limited size that removes the values that were unused for the longest time.
#[derive(Debug)]
pub(super) struct Recent<K, V> {
    all: HashMap<K, (u64, V)>,
    clock: u64,
    limit: usize,
}

impl<K: Hash + Eq + Clone, V: Clone> Recent<K, V> {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            all: HashMap::new(),
            clock: 0,
            limit: limit.max(2),
        }
    }

    pub(super) fn find(&mut self, key: &K) -> Option<V> {
        self.clock += 1;
        let (used, value) = self.all.get_mut(key)?;
        *used = self.clock;
        Some(value.clone())
    }

    pub(super) fn insert(&mut self, key: K, value: V) {
        if self.all.len() >= self.limit {
            // Half of the values are removed at a time, because the search for them visits all
            // values.
            let mut times: Vec<_> = self.all.values().map(|(used, _)| *used).collect();
            let middle = times.len() / 2;
            let (_, middle, _) = times.select_nth_unstable(middle);
            let middle = *middle;
            self.all.retain(|_, (used, _)| *used > middle);
        }
        self.clock += 1;
        self.all.insert(key, (self.clock, value));
    }

    /// Whether the next value removes no other.
    pub(super) fn has_room(&self) -> bool {
        self.all.len() < self.limit
    }

    pub(super) fn remove(&mut self, key: &K) {
        self.all.remove(key);
    }

    pub(super) fn forget(&mut self, which: impl Fn(&K, &V) -> bool) {
        self.all.retain(|key, (_, value)| !which(key, value));
    }
}

/// Time for which a file stays open. Then it is opened again, so that moves and new permissions
/// take effect. Unused files must not prevent the execution of programs (ETXTBSY) or the unmounting
/// of file systems.
pub(super) const AGE: Duration = Duration::from_secs(5);

type Opened<K> = Recent<K, (Instant, Arc<OwnedFd>)>;

/// Descriptors that are open, by key.
#[derive(Debug)]
pub(super) struct Descriptors<K>(Arc<Mutex<Opened<K>>>);

impl<K: Hash + Eq + Clone> Descriptors<K> {
    pub(super) fn new(limit: usize) -> Self {
        Self(Arc::new(Mutex::new(Recent::new(limit))))
    }

    fn lock(&self) -> MutexGuard<'_, Opened<K>> {
        self.0.lock()
    }

    pub(super) fn find(&self, key: &K) -> Option<Arc<OwnedFd>> {
        self.lock().find(key).map(|(_, fd)| fd)
    }

    pub(super) fn insert(&self, key: K, fd: Arc<OwnedFd>) {
        self.lock().insert(key, (Instant::now(), fd));
    }

    pub(super) fn forget(&self, which: impl Fn(&K) -> bool) {
        self.lock().forget(|key, _| which(key));
    }

    pub(super) fn remove(&self, key: &K) {
        self.lock().remove(key);
    }

    /// Returns a function that closes the descriptors that are too old. It returns `false` when the
    /// map no longer exists.
    pub(super) fn aging(&self) -> impl Fn(Instant) -> bool + Send + use<K>
    where
        K: Send,
    {
        let all = Arc::downgrade(&self.0);
        move |now| {
            let Some(all) = all.upgrade() else { return false };
            let mut all = all.lock();
            all.forget(|_, (opened, _)| now.saturating_duration_since(*opened) >= AGE);
            true
        }
    }
}
