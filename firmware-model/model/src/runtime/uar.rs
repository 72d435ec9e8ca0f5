//! Doorbell pages: which clients may ring through which page, and which slot each queue gets.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use urnic_device::doorbell::{CQ_SLOTS, SLOTS};

/// The object of a slot's doorbells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageUser {
    /// A completion queue.
    Cq(u32),
    /// A queue pair.
    Qp(u32),
    /// A shared receive queue.
    Srq(u32),
}

/// A doorbell page.
#[derive(Debug)]
pub(crate) struct Uar {
    pub(crate) id: u32,
    /// Queues that were created with it.
    pub(crate) users: AtomicU32,
    slots: Mutex<Vec<Vec<PageUser>>>,
}

impl Uar {
    pub(crate) fn new(id: u32) -> Uar {
        Uar {
            id,
            users: AtomicU32::new(0),
            slots: Mutex::new(vec![Vec::new(); SLOTS as usize]),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Vec<PageUser>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a queue the slot of its half of the page that has the fewest users, and returns its
    /// byte offset. An arm that is overwritten before the device looks is lost, unlike a post,
    /// whose index is in a record; so completion queues have a half for themselves.
    pub(crate) fn enter(&self, user: PageUser) -> u32 {
        self.users.fetch_add(1, Ordering::AcqRel);
        let mut users = self.lock();
        let middle = CQ_SLOTS as usize;
        let half = match user {
            PageUser::Cq(_) => 0..middle,
            PageUser::Qp(_) | PageUser::Srq(_) => middle..users.len(),
        };
        let slot = half.min_by_key(|slot| users[*slot].len()).unwrap_or(0);
        users[slot].push(user);
        slot as u32 * 8
    }

    /// Takes a queue out; where it was.
    pub(crate) fn leave(&self, user: PageUser) -> Option<u32> {
        self.users.fetch_sub(1, Ordering::AcqRel);
        let mut users = self.lock();
        let slot = users.iter().position(|slot| slot.contains(&user))?;
        users[slot].retain(|t| *t != user);
        Some(slot as u32 * 8)
    }

    /// Takes all queues out.
    pub(crate) fn clear(&self) {
        self.lock().iter_mut().for_each(Vec::clear);
        self.users.store(0, Ordering::Release);
    }

    /// The queues that share the slot at a byte offset.
    pub(crate) fn at(&self, offset: u32) -> Vec<PageUser> {
        let users = self.lock();
        users.get(offset as usize / 8).cloned().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn slots_are_shared_only_when_a_half_is_full() {
        let uar = Uar::new(1);
        let half = CQ_SLOTS;
        let rest = SLOTS - half;
        let cqs: HashSet<u32> = (0..half).map(|i| uar.enter(PageUser::Cq(i))).collect();
        let qps: HashSet<u32> = (0..rest).map(|i| uar.enter(PageUser::Qp(i))).collect();
        assert_eq!(cqs.union(&qps).count(), SLOTS as usize);
        let shared = uar.enter(PageUser::Qp(rest));
        assert_eq!(uar.at(shared).len(), 2);
        assert_eq!(uar.leave(PageUser::Qp(rest)), Some(shared));
        assert_eq!(uar.at(shared).len(), 1);
        assert_eq!(uar.users.load(Ordering::Relaxed), SLOTS);
    }
}
