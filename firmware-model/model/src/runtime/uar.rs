//! Doorbell pages: the clients that may ring through a page, and the slots of queues.

use crate::host::SharedMemory;
use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::{fmt, io};
use urnic_device::doorbell::{CQ_SLOTS, PAGE_LEN, SLOTS, WAKE};
use urnic_sync::{Mutex, MutexGuard};

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
    /// The number of queues that were created with the page.
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
        self.slots.lock()
    }

    /// Gives a queue the slot with the fewest users in its half of the page, and returns the byte
    /// offset of the slot. An arm that is overwritten before the device reads it is lost, unlike a
    /// post, whose index is in a record; so completion queues have a half for themselves.
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

    /// Removes a queue; returns the offset of its slot.
    pub(crate) fn leave(&self, user: PageUser) -> Option<u32> {
        self.users.fetch_sub(1, Ordering::AcqRel);
        let mut users = self.lock();
        let slot = users.iter().position(|slot| slot.contains(&user))?;
        users[slot].retain(|t| *t != user);
        Some(slot as u32 * 8)
    }

    /// Removes all queues.
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

// Doorbell pages as plain memory, for drivers in other processes. Stores of such drivers make no
// message, so the device reads the pages.
//
// The queues to which slots were assigned determine which slots the device reads. A slot keeps the
// value that was rung until the device takes it and writes 0, which rings nothing.

/// The memory of BAR 2.
pub struct DoorbellPages {
    fd: OwnedFd,
    memory: SharedMemory,
    count: u32,
    state: Mutex<AssignedSlots>,
}

#[derive(Default)]
struct AssignedSlots {
    /// Slots in use, as (page, byte offset), once for each queue to which the slot was assigned.
    slots: Vec<(u32, u32)>,
    /// At least one slot has more than one queue.
    shared: bool,
    asleep: bool,
}

/// The doorbells that were taken from the slots.
#[derive(Default)]
pub(crate) struct Rung {
    /// Page, byte offset, value.
    pub(crate) doorbells: Vec<(u32, u32, u64)>,
    /// At least one slot has more than one queue.
    pub(crate) shared: bool,
}

impl fmt::Debug for DoorbellPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DoorbellPages({})", self.count)
    }
}

impl DoorbellPages {
    /// Makes `count` zeroed pages, in a file that no process can truncate.
    pub(crate) fn new(count: u32) -> io::Result<DoorbellPages> {
        let len = count as usize * PAGE_LEN as usize;
        let (memory, fd) = SharedMemory::create("urnic-doorbells", len)?;
        Ok(DoorbellPages {
            fd,
            memory,
            count,
            state: Mutex::default(),
        })
    }

    /// The file, for mmap by drivers.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.count as usize * PAGE_LEN as usize
    }

    /// Whether there are no pages.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    fn at(&self, page: u32, offset: u32) -> Option<usize> {
        let inside = page < self.count && offset < PAGE_LEN;
        inside.then(|| page as usize * PAGE_LEN as usize + offset as usize)
    }

    fn slot(&self, page: u32, offset: u32) -> Option<&AtomicU64> {
        Some(self.memory.word64(self.at(page, offset & !7)?))
    }

    fn wake_word(&self, page: u32) -> Option<&AtomicU32> {
        Some(self.memory.word(self.at(page, WAKE)?))
    }

    fn state(&self) -> MutexGuard<'_, AssignedSlots> {
        self.state.lock()
    }

    /// Begins to watch a slot, which a queue is about to get.
    pub(crate) fn watch(&self, page: u32, offset: u32) {
        let mut state = self.state();
        state.shared |= state.slots.contains(&(page, offset));
        state.slots.push((page, offset));
        self.write_wake_word(page, state.asleep);
    }

    /// Ends the watch of a slot whose queue was destroyed.
    pub(crate) fn unwatch(&self, page: u32, offset: u32) {
        let slots = &mut self.state().slots;
        if let Some(index) = slots.iter().position(|slot| *slot == (page, offset)) {
            slots.swap_remove(index);
        }
        if !slots.contains(&(page, offset))
            && let Some(slot) = self.slot(page, offset)
        {
            // A doorbell that was rung before the queue was destroyed.
            slot.store(0, Ordering::Relaxed);
        }
    }

    /// Forgets all slots: all queues were destroyed.
    pub(crate) fn clear(&self) {
        let mut state = self.state();
        for (page, offset) in state.slots.drain(..) {
            if let Some(slot) = self.slot(page, offset) {
                slot.store(0, Ordering::Relaxed);
            }
        }
        state.shared = false;
    }

    /// Rings like a driver.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn store(&self, page: u32, offset: u32, value: u64) {
        if let Some(slot) = self.slot(page, offset) {
            slot.store(value.to_le(), Ordering::Release);
        }
    }

    /// The wake word, which a driver reads after its store.
    #[cfg(test)]
    pub(crate) fn is_asleep(&self, page: u32) -> bool {
        fence(Ordering::SeqCst);
        self.wake_word(page).unwrap().load(Ordering::Relaxed) != 0
    }

    /// Takes the doorbells since the previous call.
    pub(crate) fn take(&self) -> Rung {
        let state = self.state();
        let mut rung = Rung {
            shared: state.shared,
            ..Rung::default()
        };
        for &(page, offset) in &state.slots {
            if let Some(slot) = self.slot(page, offset)
                && slot.load(Ordering::Relaxed) != 0
            {
                let value = u64::from_le(slot.swap(0, Ordering::AcqRel));
                rung.doorbells.push((page, offset, value));
            }
        }
        rung
    }

    /// Takes the values in slots of no queue, of pages that have queues.
    pub(crate) fn take_from_free_slots(&self) -> Vec<(u32, u32, u64)> {
        let state = self.state();
        let assigned: BTreeSet<(u32, u32)> = state.slots.iter().copied().collect();
        let pages: BTreeSet<u32> = assigned.iter().map(|(page, _)| *page).collect();
        let free = pages
            .into_iter()
            .flat_map(|page| (0..WAKE).step_by(8).map(move |offset| (page, offset)))
            .filter(|place| !assigned.contains(place));
        free.filter_map(|(page, offset)| {
            let slot = self.slot(page, offset)?;
            // Most slots are 0. Only a store of the driver moves the slot's cache line.
            let is_rung = slot.load(Ordering::Relaxed) != 0;
            let value = is_rung.then(|| u64::from_le(slot.swap(0, Ordering::AcqRel)))?;
            Some((page, offset, value))
        })
        .collect()
    }

    fn write_wake_word(&self, page: u32, asleep: bool) {
        if let Some(word) = self.wake_word(page) {
            word.store(u32::from(asleep).to_le(), Ordering::Relaxed);
        }
    }

    /// Writes to every page in use whether the device polls it without a kick. A device that is
    /// about to sleep must poll once more after this call.
    pub(crate) fn sleep(&self, asleep: bool) {
        let mut state = self.state();
        state.asleep = asleep;
        let mut last = None;
        for &(page, _) in &state.slots {
            if last != Some(page) {
                self.write_wake_word(page, asleep);
            }
            last = Some(page);
        }
        fence(Ordering::SeqCst);
    }
}
