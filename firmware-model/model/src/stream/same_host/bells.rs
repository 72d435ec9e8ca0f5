//! All bells of a device, and those of its peers.

use super::bell::{Bell, PeerBell, Slot};
use super::owner::User;
use crate::stream::descriptor::{Descriptor, Descriptors};
use crate::sys::failed::FailedCall;
use arc_swap::ArcSwap;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::fs::fstat;
use rustix::io::Errno;
use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Users with whose processes a device shares memory at most. Those of others use TCP.
const USERS: usize = 64;

/// The bells of a device, one for each user among its peers.
#[derive(Debug)]
pub(crate) struct Bells {
    descriptors: Arc<Descriptors>,
    /// Readable while a bell's descriptor is.
    epoll: Descriptor,
    list: ArcSwap<Vec<Arc<Bell>>>,
    by_user: Mutex<HashMap<User, Arc<Bell>>>,
}

impl Bells {
    pub(crate) fn new(descriptors: &Arc<Descriptors>) -> io::Result<Bells> {
        let epoll = FailedCall::named("epoll_create1", epoll::create(CreateFlags::CLOEXEC))?;
        let epoll = descriptors.adopt(epoll)?;
        Ok(Bells {
            descriptors: descriptors.clone(),
            epoll,
            list: ArcSwap::default(),
            by_user: Mutex::default(),
        })
    }

    /// A place for a connection with a process of `user`.
    pub(super) fn slot(&self, user: User) -> Option<Slot> {
        let mut by_user = self.by_user.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(bell) = by_user.get(&user) {
            return bell.slot();
        }
        if by_user.len() >= USERS {
            return None;
        }
        let bell = Arc::new(Bell::new(&self.descriptors).ok()?);
        let data = EventData::new_u64(0);
        epoll::add(&self.epoll, bell.descriptor(), data, EventFlags::IN).ok()?;
        by_user.insert(user, bell.clone());
        self.list.store(Arc::new(by_user.values().cloned().collect()));
        // A thread that sleeps already does not know of this bell.
        bell.wake();
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

    /// Says to peers that this thread is about to sleep, until the value is dropped. `None`: it may
    /// not, because something has come.
    pub(crate) fn fall_asleep(&self) -> Option<Asleep> {
        let asleep = Asleep(self.list.load_full());
        let rung = asleep.0.iter().filter(|bell| !bell.fall_asleep()).count();
        (rung == 0).then_some(asleep)
    }

    /// Takes the wake-ups so far.
    pub(crate) fn take_wakes(&self) {
        self.list.load().iter().for_each(|bell| bell.take_wakes());
    }
}

/// A thread that sleeps, or is about to.
#[derive(Debug)]
pub(crate) struct Asleep(Arc<Vec<Arc<Bell>>>);

impl Drop for Asleep {
    fn drop(&mut self) {
        self.0.iter().for_each(|bell| bell.wake_up());
    }
}

/// The bells of peers, each mapped once however many connections there are.
#[derive(Debug, Default)]
pub(super) struct PeerBells {
    by_file: Mutex<HashMap<(u64, u64), Weak<PeerBell>>>,
}

impl PeerBells {
    /// The bell that these descriptors reach.
    pub(super) fn open(&self, memory: &Descriptor, waker: Descriptor) -> Result<Arc<PeerBell>, Errno> {
        let file = fstat(memory)?;
        let mut by_file = self.by_file.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (file.st_dev, file.st_ino);
        if let Some(known) = by_file.get(&key).and_then(Weak::upgrade) {
            return Ok(known);
        }
        by_file.retain(|_, bell| bell.strong_count() > 0);
        let bell = Arc::new(PeerBell::open(memory, waker)?);
        by_file.insert(key, Arc::downgrade(&bell));
        Ok(bell)
    }
}
