//! What was used lately, up to a number.

use std::collections::HashMap;
use std::hash::Hash;

/// A map that forgets what was not used for longest.
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
            // Half at a time, as finding them takes a look at all.
            let mut times: Vec<_> = self.all.values().map(|(used, _)| *used).collect();
            let middle = times.len() / 2;
            let (_, middle, _) = times.select_nth_unstable(middle);
            let middle = *middle;
            self.all.retain(|_, (used, _)| *used > middle);
        }
        self.clock += 1;
        self.all.insert(key, (self.clock, value));
    }

    /// Does the next one push nothing out?
    pub(super) fn has_room(&self) -> bool {
        self.all.len() < self.limit
    }

    pub(super) fn remove(&mut self, key: &K) {
        self.all.remove(key);
    }

    pub(super) fn forget(&mut self, which: impl Fn(&K) -> bool) {
        self.all.retain(|key, _| !which(key));
    }
}
