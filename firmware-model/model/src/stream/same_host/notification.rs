//! Notifications: a process finds those of its many connections in shared memory that have new
//! bytes by reading one cache line, and is woken if it sleeps.
//!
//! A notification page is memory that a device shares with its local peers, processes of one user:
//! a bit for each connection, a word that says whether any bit was set, and the number of the
//! device's threads that sleep. A peer sets the bit, then the first word, and writes a byte into
//! the page's pipe if a thread sleeps. The wake-up is a pipe because it can carry nothing but
//! bytes: a unix socket could bring descriptors, whose close may block.

use crate::handshakes;
use crate::host::SharedMemory;
use crate::stream::descriptor::{Descriptor, Descriptors};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd};
use rustix::fs::{CWD, Mode, OFlags, openat, readlinkat};
use rustix::io::{Errno, read, write};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, getpid};
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use urnic_sync::{Mutex, MutexGuard};

/// Bytes of a notification page's memory.
pub(super) const MEMORY: usize = 4096;
/// Offsets in the page.
const NOTIFIED: usize = 0;
const ASLEEP: usize = 4;
const BITS: usize = 64;
const WORDS: usize = (MEMORY - BITS) / 8;
/// Bytes that are read from the pipe at once, and how often: twice as many as a pipe usually holds.
const WAKES: usize = 4096;
const READS: usize = 32;
/// Connections that share a notification page at most.
pub(super) const SLOTS: u32 = (WORDS * 64) as u32;

fn notified(memory: &SharedMemory) -> &AtomicU32 {
    memory.word(NOTIFIED)
}

fn asleep(memory: &SharedMemory) -> &AtomicU32 {
    memory.word(ASLEEP)
}

fn bits(memory: &SharedMemory, word: usize) -> &AtomicU64 {
    memory.word64(BITS + 8 * word)
}

/// The device's end of a notification page.
#[derive(Debug)]
pub(crate) struct NotificationPage {
    memory: SharedMemory,
    /// The descriptors that peers get: the memory, and the end of the pipe that they write to.
    file: Descriptor,
    waker: Descriptor,
    /// The end that is read here.
    wakes: Descriptor,
    /// By which the device wakes its own threads: peers may fill the pipe, or empty it.
    own: Descriptor,
    /// Threads that sleep, or are about to.
    asleep: Mutex<u32>,
    /// The queue pair of each connection; 0: none yet.
    connections: Mutex<Connections>,
    /// The process that has the notification page. A forked child has a copy that it must not use.
    process: Pid,
}

#[derive(Debug, Default)]
struct Connections {
    qids: Vec<u32>,
    free: Vec<u32>,
}

/// A connection's place in a notification page; dropping it makes the place free.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) notifications: Arc<NotificationPage>,
    pub(super) number: u32,
}

impl NotificationPage {
    pub(super) fn new(descriptors: &Arc<Descriptors>) -> Result<NotificationPage, Errno> {
        let (memory, file) = SharedMemory::create("urnic-notifications", MEMORY)?;
        let (wakes, waker) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        Ok(NotificationPage {
            memory,
            file: descriptors.adopt(file)?,
            waker: descriptors.adopt(waker)?,
            wakes: descriptors.adopt(wakes)?,
            own: descriptors.adopt(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)?,
            asleep: Mutex::default(),
            connections: Mutex::default(),
            process: getpid(),
        })
    }

    /// The descriptors for a peer, in the order of [`PeerPage::open`].
    pub(super) fn passed(&self) -> [BorrowedFd<'_>; 2] {
        [self.file.as_fd(), self.waker.as_fd()]
    }

    /// The descriptors that become readable when a peer, or the device itself, wakes the device.
    pub(crate) fn wakes(&self) -> [BorrowedFd<'_>; 2] {
        [self.wakes.as_fd(), self.own.as_fd()]
    }

    fn connections(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock()
    }

    /// A place for one more connection.
    pub(super) fn slot(self: &Arc<NotificationPage>) -> Option<Slot> {
        let mut connections = self.connections();
        let number = match connections.free.pop() {
            Some(number) => number,
            None => {
                let number = u32::try_from(connections.qids.len()).ok()?;
                (number < SLOTS).then(|| connections.qids.push(0))?;
                number
            }
        };
        let is_only = connections.qids.len() == connections.free.len() + 1;
        drop(connections);
        if is_only {
            // The thread that sleeps does not know of any connection.
            self.wake();
        }
        Some(Slot {
            notifications: self.clone(),
            number,
        })
    }

    /// Whether something may have come.
    #[inline]
    pub(crate) fn is_rung(&self) -> bool {
        notified(&self.memory).load(Ordering::Relaxed) != 0
    }

    /// Passes each queue pair that was notified for to `act`, and clears its notification.
    pub(crate) fn answer(&self, mut act: impl FnMut(u32)) {
        handshakes::clear_notified(notified(&self.memory));
        let used = self.connections().qids.len();
        for word in 0..used.div_ceil(64) {
            let mut set = handshakes::take(bits(&self.memory, word));
            while set != 0 {
                let slot = word * 64 + set.trailing_zeros() as usize;
                set &= set - 1;
                let qid = self.connections().qids.get(slot).copied();
                match qid {
                    None | Some(0) => {}
                    Some(qid) => act(qid),
                }
            }
        }
    }

    /// Whether a queue pair has a connection here.
    pub(crate) fn has_connections(&self) -> bool {
        let connections = self.connections();
        connections.qids.len() > connections.free.len()
    }

    /// The queue pairs that have connections here. A peer that rings wrongly, or takes the rings of
    /// others away, is to delay them only: they are served at intervals in any case.
    pub(crate) fn connected(&self) -> Vec<u32> {
        let mut qids = self.connections().qids.clone();
        qids.retain(|qid| *qid != 0);
        qids.sort_unstable();
        qids.dedup();
        qids
    }

    /// Counts the threads that sleep, and publishes the number to peers. A peer that wakes one does
    /// not change the number: another thread may take the byte, and then the sleeper continues to
    /// sleep.
    fn count_asleep(&self, change: impl FnOnce(u32) -> u32) {
        let mut threads = self.asleep.lock();
        *threads = change(*threads);
        handshakes::publish_asleep(asleep(&self.memory), *threads);
    }

    /// Says to peers that this thread is about to sleep, until the value is dropped. `None`: it may
    /// not, because something has come.
    pub(crate) fn fall_asleep(&self) -> Option<Asleep<'_>> {
        self.count_asleep(|threads| threads + 1);
        let asleep = Asleep(self);
        // A peer that notified before it could see the number wakes no thread.
        (!handshakes::is_notified_now(notified(&self.memory))).then_some(asleep)
    }

    /// Wakes a thread of this device.
    pub(super) fn wake(&self) {
        let _ = write(&self.own, &1u64.to_ne_bytes());
    }

    /// Takes the wake-ups so far, but no more than a limit: peers may send them faster than they
    /// are taken.
    pub(crate) fn take_wakes(&self) {
        let mut bytes = [MaybeUninit::<u8>::uninit(); WAKES];
        let mut take = || read(&self.wakes, &mut bytes).is_ok_and(|(taken, _)| !taken.is_empty());
        let _ = (0..READS).try_for_each(|_| take().then_some(()));
        let _ = read(&self.own, &mut [0u8; 8]);
    }
}

/// A thread that sleeps, or is about to.
#[derive(Debug)]
pub(crate) struct Asleep<'a>(&'a NotificationPage);

impl Drop for Asleep<'_> {
    fn drop(&mut self) {
        self.0.count_asleep(|threads| threads - 1);
    }
}

impl Slot {
    /// Whether this is the process that has the connection, and not a forked child.
    pub(super) fn is_own(&self) -> bool {
        getpid() == self.notifications.process
    }

    /// Assigns notifications of the slot to this queue pair from now on.
    pub(super) fn bind(&self, qid: u32) {
        if let Some(place) = self
            .notifications
            .connections()
            .qids
            .get_mut(self.number as usize)
        {
            *place = qid;
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // In a forked child, the lock may be that of a thread which is not there.
        if !self.is_own() {
            return;
        }
        let mut connections = self.notifications.connections();
        if let Some(place) = connections.qids.get_mut(self.number as usize) {
            *place = 0;
        }
        connections.free.push(self.number);
    }
}

/// A peer's notification page.
#[derive(Debug)]
pub(super) struct PeerPage {
    memory: SharedMemory,
    waker: Descriptor,
}

/// The path of a descriptor of this process.
fn path_of(fd: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

/// Checks that a descriptor is an end of a pipe (pipe(7)) of no file system, which no operation can
/// make wait but reading and writing.
pub(super) fn check_pipe(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    let target = readlinkat(CWD, path_of(fd), Vec::new())?;
    let is_pipe = target.as_bytes().starts_with(b"pipe:[");
    is_pipe.then_some(()).ok_or(Errno::INVAL)
}

impl PeerPage {
    /// The notification page of the descriptors that a peer passed: memory of [`MEMORY`] bytes,
    /// and a pipe.
    ///
    /// # Errors
    /// They are not those of a notification page.
    pub(super) fn open(
        memory: &Descriptor,
        waker: &Descriptor,
        descriptors: &Arc<Descriptors>,
    ) -> Result<PeerPage, Errno> {
        check_pipe(waker.as_fd())?;
        // The peer may make the descriptor that it passed blocking, so the pipe is opened anew. It
        // is opened for reading, too, because a write to a pipe without a reader raises SIGPIPE.
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
        let own = openat(CWD, path_of(waker.as_fd()), flags, Mode::empty())?;
        Ok(PeerPage {
            memory: SharedMemory::open(memory.as_fd(), MEMORY)?,
            waker: descriptors.adopt(own)?,
        })
    }

    /// Rings for a slot, and wakes the peer if it sleeps.
    #[inline]
    pub(super) fn notify(&self, slot: u32) {
        let slot = slot % SLOTS;
        let (bits, bit) = (bits(&self.memory, slot as usize / 64), 1 << (slot % 64));
        if handshakes::notify(bits, bit, notified(&self.memory), asleep(&self.memory)) {
            // A full pipe wakes as well.
            let _ = write(&self.waker, &[1]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::OwnedFd;
    use rustix::fs::{fcntl_getfl, fcntl_setfl};

    fn peer_of(notifications: &NotificationPage, descriptors: &Arc<Descriptors>) -> PeerPage {
        let adopt = |fd: BorrowedFd<'_>| descriptors.adopt(fd.try_clone_to_owned().unwrap()).unwrap();
        let [memory, waker] = notifications.passed().map(adopt);
        PeerPage::open(&memory, &waker, descriptors).unwrap()
    }

    fn is_woken(notifications: &NotificationPage) -> bool {
        read(&notifications.wakes, &mut [0u8; 1]) == Ok(1)
    }

    #[test]
    fn shm_03_a_sleeper_is_woken_even_if_another_takes_the_byte() {
        let descriptors = Descriptors::new(64, None);
        let notifications = Arc::new(NotificationPage::new(&descriptors).unwrap());
        let asleep = notifications.fall_asleep().unwrap();
        let slot = notifications.slot().unwrap();
        let peer = peer_of(&notifications, &descriptors);
        for _ in 0..2 {
            peer.notify(slot.number);
            assert!(is_woken(&notifications));
            // Another thread answers; the first sleeps on.
            notifications.answer(|_| {});
        }
        drop(asleep);
        peer.notify(slot.number);
        assert!(!is_woken(&notifications), "nobody sleeps");
        assert!(notifications.fall_asleep().is_none(), "it was notified");
    }

    /// The process that made the pipe makes its own ends blocking, and does not read.
    #[test]
    fn shm_22_a_peer_cannot_make_a_ring_wait() {
        let descriptors = Descriptors::new(64, None);
        let notifications = Arc::new(NotificationPage::new(&descriptors).unwrap());
        let _asleep = notifications.fall_asleep().unwrap();
        let slot = notifications.slot().unwrap();
        let peer = peer_of(&notifications, &descriptors);
        for end in [&notifications.waker, &notifications.wakes] {
            let flags = fcntl_getfl(end).unwrap();
            fcntl_setfl(end, flags - OFlags::NONBLOCK).unwrap();
        }
        let written = || write(&peer.waker, &[0; WAKES]);
        while written().is_ok() {}
        notifications.wake();
        for _ in 0..2 {
            peer.notify(slot.number);
            notifications.answer(|_| {});
        }
        // No process has the pipe open any more: the write raises no signal.
        drop((slot, _asleep));
        drop(notifications);
        peer.notify(0);
    }

    #[test]
    fn shm_22_only_a_pipe_is_a_waker() {
        let descriptors = Descriptors::new(64, None);
        let notifications = NotificationPage::new(&descriptors).unwrap();
        let memory = notifications.file.as_fd();
        let file = tempfile();
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        for fd in [memory, file.as_fd(), socket.as_fd()] {
            assert_eq!(check_pipe(fd), Err(Errno::INVAL));
        }
        for fd in [&notifications.waker, &notifications.wakes] {
            assert_eq!(check_pipe(fd.as_fd()), Ok(()));
        }
    }

    /// A file with a name as the kernel shows it for a pipe.
    fn tempfile() -> OwnedFd {
        rustix::fs::memfd_create("pipe:[1]", rustix::fs::MemfdFlags::CLOEXEC).unwrap()
    }
}
