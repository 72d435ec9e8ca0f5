//! All bells of a device, and those of its peers.

use super::bell::{Bell, Slot};
use super::owner::User;
use crate::stream::descriptor::{Descriptor, Descriptors};
use crate::sys::failed::FailedCall;
use arc_swap::ArcSwap;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::fd::{AsFd, BorrowedFd};
use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Users with whose processes a device shares memory at most. Those of others use TCP.
const USERS: usize = 64;

/// The bells of a device, one for each user among its peers.
#[derive(Debug)]
pub(crate) struct Bells {
    descriptors: Arc<Descriptors>,
    /// Readable while a bell's descriptor is.
    epoll: Descriptor,
    list: ArcSwap<Vec<Arc<Bell>>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    by_user: HashMap<User, Arc<Bell>>,
    /// Threads that sleep, or are about to.
    asleep: u32,
}

impl State {
    /// Says to all peers how many threads sleep.
    fn tell(&self) {
        for bell in self.by_user.values() {
            bell.set_asleep(self.asleep);
        }
    }
}

impl Bells {
    pub(crate) fn new(descriptors: &Arc<Descriptors>) -> io::Result<Bells> {
        let epoll = FailedCall::named("epoll_create1", epoll::create(CreateFlags::CLOEXEC))?;
        let epoll = descriptors.adopt(epoll)?;
        Ok(Bells {
            descriptors: descriptors.clone(),
            epoll,
            list: ArcSwap::default(),
            state: Mutex::default(),
        })
    }

    /// A place for a connection with a process of `user`.
    pub(super) fn slot(&self, user: User) -> Option<Slot> {
        let mut state = self.state();
        if let Some(bell) = state.by_user.get(&user) {
            return bell.slot();
        }
        if state.by_user.len() >= USERS {
            return None;
        }
        let bell = Arc::new(Bell::new(&self.descriptors).ok()?);
        // Threads may sleep already, and wait for this bell's descriptor from now on, too.
        bell.set_asleep(state.asleep);
        let data = EventData::new_u64(0);
        epoll::add(&self.epoll, bell.descriptor(), data, EventFlags::IN).ok()?;
        state.by_user.insert(user, bell.clone());
        self.list
            .store(Arc::new(state.by_user.values().cloned().collect()));
        bell.slot()
    }

    /// The descriptor that becomes readable when a peer wakes the device.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Passes each queue pair for which something may have come to `act`.
    #[inline]
    pub(crate) fn answer(&self, mut act: impl FnMut(u32)) {
        for bell in self.list.load().iter().filter(|bell| bell.is_rung()) {
            bell.answer(&mut act);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says to peers that this thread is about to sleep, until the value is dropped. `None`: it may
    /// not, because something has come.
    pub(crate) fn fall_asleep(&self) -> Option<Asleep<'_>> {
        let mut state = self.state();
        state.asleep += 1;
        state.tell();
        drop(state);
        let asleep = Asleep(self);
        // A peer that rang before it could see the number wakes nobody. One that rings a bell that
        // is made from here on sees it.
        let rung = self.list.load().iter().any(|bell| bell.is_rung_now());
        (!rung).then_some(asleep)
    }

    /// Takes the wake-ups so far.
    pub(crate) fn take_wakes(&self) {
        self.list.load().iter().for_each(|bell| bell.take_wakes());
    }
}

/// A thread that sleeps, or is about to.
#[derive(Debug)]
pub(crate) struct Asleep<'a>(&'a Bells);

impl Drop for Asleep<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.asleep -= 1;
        state.tell();
    }
}

#[cfg(test)]
mod tests {
    use super::super::bell::PeerBell;
    use super::*;
    use rustix::net::{RecvFlags, recv};

    /// A bell that is made while a thread sleeps wakes it like the others, whoever takes the first
    /// datagram.
    #[test]
    fn shm_03_a_new_bell_wakes_threads_that_slept_before() {
        let descriptors = Descriptors::new(64, None);
        let bells = Bells::new(&descriptors).unwrap();
        let asleep = bells.fall_asleep().unwrap();
        let slot = bells.slot(User::of_number(1).unwrap()).unwrap();
        let woken = || recv(slot.bell.descriptor(), &mut [0u8; 1], RecvFlags::DONTWAIT).is_ok();
        let [memory, waker] = slot.bell.passed();
        let adopt = |fd: BorrowedFd<'_>| descriptors.adopt(fd.try_clone_to_owned().unwrap()).unwrap();
        let peer = PeerBell::open(&adopt(memory), adopt(waker)).unwrap();
        for _ in 0..2 {
            peer.ring(slot.number);
            assert!(woken());
            // Another thread answers; the first sleeps on.
            bells.answer(|_| {});
        }
        drop(asleep);
        peer.ring(slot.number);
        assert!(!woken(), "nobody sleeps");
        assert!(bells.fall_asleep().is_none(), "it was rung");
    }
}
