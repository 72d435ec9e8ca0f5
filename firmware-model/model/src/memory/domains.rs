//! Protection domains, and the objects in them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use urnic_sync::{Mutex, MutexGuard};

/// The kinds of objects in a protection domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DomainUse {
    /// A memory region or window.
    Memory,
    /// A queue pair: a stream that its STags are associated with.
    QueuePair,
    /// A shared receive queue.
    SharedReceiveQueue,
}

#[derive(Debug, Default)]
struct Contents {
    queue_pairs: u32,
    others: u32,
}

impl Contents {
    fn of(&mut self, what: DomainUse) -> &mut u32 {
        match what {
            DomainUse::QueuePair => &mut self.queue_pairs,
            DomainUse::Memory | DomainUse::SharedReceiveQueue => &mut self.others,
        }
    }
}

/// The protection domains of the device.
#[derive(Debug)]
pub struct Domains {
    limit: u32,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    last: u32,
    domains: HashMap<u32, Contents>,
}

impl Domains {
    pub(crate) fn new(limit: u32) -> Domains {
        Domains {
            limit,
            table: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock()
    }

    /// Makes a domain; `None` if there are too many. Numbers start at 1 and are used again late.
    pub(crate) fn allocate(&self) -> Option<u32> {
        let mut table = self.lock();
        if table.domains.len() >= self.limit as usize {
            return None;
        }
        loop {
            table.last = table.last.wrapping_add(1).max(1);
            let id = table.last;
            if let Entry::Vacant(free) = table.domains.entry(id) {
                free.insert(Contents::default());
                return Some(id);
            }
        }
    }

    /// Frees a domain: `None` if there is no such domain, `Some(false)` if something is still in
    /// it.
    pub(crate) fn free(&self, pd: u32) -> Option<bool> {
        let mut table = self.lock();
        let contents = table.domains.get(&pd)?;
        let empty = contents.queue_pairs == 0 && contents.others == 0;
        if empty {
            table.domains.remove(&pd);
        }
        Some(empty)
    }

    /// Puts something into a domain; `false` if there is no such domain.
    #[must_use]
    pub(crate) fn enter(&self, pd: u32, what: DomainUse) -> bool {
        let mut table = self.lock();
        let Some(contents) = table.domains.get_mut(&pd) else {
            return false;
        };
        *contents.of(what) += 1;
        true
    }

    /// Takes it out again.
    pub(crate) fn leave(&self, pd: u32, what: DomainUse) {
        if let Some(contents) = self.lock().domains.get_mut(&pd) {
            let count = contents.of(what);
            *count = count.saturating_sub(1);
        }
    }

    /// Queue pairs in a domain: the streams that share its STags (RFC 5040 §8.1.1(7)).
    pub(crate) fn queue_pairs(&self, pd: u32) -> u32 {
        self.lock().domains.get(&pd).map_or(0, |c| c.queue_pairs)
    }

    /// Forgets all of them.
    pub(crate) fn clear(&self) {
        self.lock().domains.clear();
    }
}
