//! How a process learns which of its many connections in shared memory have something, by reading
//! one cache line; and how it is woken if it sleeps.
//!
//! A bell is memory that a device shares with the peers of one user: a bit for each connection, a
//! word that says whether any bit was set, and the number of the device's threads that sleep. A
//! peer sets the bit, then the first word, and sends a datagram to the bell's socket if a thread
//! sleeps. Peers of another user have another bell, so a hostile one can ring too often or take its
//! own user's rings away, and no others.

use crate::handshakes;
use crate::host::SharedMemory;
use crate::stream::descriptor::{Descriptor, Descriptors};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};
use rustix::process::{Pid, getpid};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of a bell's memory.
pub(super) const MEMORY: usize = 4096;
/// Where things are in it.
const RUNG: usize = 0;
const ASLEEP: usize = 4;
const BITS: usize = 64;
const WORDS: usize = (MEMORY - BITS) / 8;
/// Wake-ups taken at once. More than a queue of datagrams usually holds, and one is enough to wake.
const WAKES: usize = 1024;
/// Connections that share a bell at most.
pub(super) const SLOTS: u32 = (WORDS * 64) as u32;

fn rung(memory: &SharedMemory) -> &AtomicU32 {
    memory.word(RUNG)
}

fn asleep(memory: &SharedMemory) -> &AtomicU32 {
    memory.word(ASLEEP)
}

fn bits(memory: &SharedMemory, word: usize) -> &AtomicU64 {
    memory.word64(BITS + 8 * word)
}

/// The device's end of a bell.
#[derive(Debug)]
pub(crate) struct Bell {
    memory: SharedMemory,
    /// What peers get: the memory and a socket that reaches `wakes`.
    file: Descriptor,
    waker: Descriptor,
    wakes: Descriptor,
    /// The queue pair of each connection; 0: none yet.
    connections: Mutex<Connections>,
    /// The process that has the bell. A forked child has a copy that it must not use.
    process: Pid,
}

#[derive(Debug, Default)]
struct Connections {
    qids: Vec<u32>,
    free: Vec<u32>,
}

/// A connection's place in a bell; dropping it makes the place free.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) bell: Arc<Bell>,
    pub(super) number: u32,
}

impl Bell {
    pub(super) fn new(descriptors: &Arc<Descriptors>) -> Result<Bell, Errno> {
        let (memory, file) = SharedMemory::create("urnic-bell", MEMORY)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (waker, wakes) = socketpair(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        Ok(Bell {
            memory,
            file: descriptors.adopt(file)?,
            waker: descriptors.adopt(waker)?,
            wakes: descriptors.adopt(wakes)?,
            connections: Mutex::default(),
            process: getpid(),
        })
    }

    /// The descriptors for a peer, in the order of [`PeerBell::open`].
    pub(super) fn passed(&self) -> [BorrowedFd<'_>; 2] {
        [self.file.as_fd(), self.waker.as_fd()]
    }

    /// The descriptor that becomes readable when a peer wakes the device.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.wakes.as_fd()
    }

    fn connections(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for one more connection.
    pub(super) fn slot(self: &Arc<Bell>) -> Option<Slot> {
        let mut connections = self.connections();
        let number = match connections.free.pop() {
            Some(number) => number,
            None => {
                let number = u32::try_from(connections.qids.len()).ok()?;
                (number < SLOTS).then(|| connections.qids.push(0))?;
                number
            }
        };
        drop(connections);
        Some(Slot {
            bell: self.clone(),
            number,
        })
    }

    /// Whether something may have come.
    #[inline]
    pub(crate) fn is_rung(&self) -> bool {
        rung(&self.memory).load(Ordering::Relaxed) != 0
    }

    /// Passes each queue pair for which something may have come to `act`, and forgets that it was
    /// rung for.
    pub(crate) fn answer(&self, mut act: impl FnMut(u32)) {
        handshakes::hear(rung(&self.memory));
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

    /// Says to peers how many of the device's threads sleep. Who wakes one does not change the
    /// number: another thread may take the datagram, and the sleeper sleep on.
    pub(super) fn set_asleep(&self, threads: u32) {
        handshakes::say_asleep(asleep(&self.memory), threads);
    }

    /// Whether something has come, for a thread that said before that it falls asleep.
    pub(super) fn is_rung_now(&self) -> bool {
        handshakes::is_rung_now(rung(&self.memory))
    }

    /// Takes the wake-ups so far, as far as peers do not send them faster than that.
    pub(crate) fn take_wakes(&self) {
        let take = || recv(&self.wakes, &mut [0u8; 1], RecvFlags::DONTWAIT);
        let _ = (0..WAKES).try_for_each(|_| take().map(drop));
    }
}

impl Slot {
    /// Whether this is the process that has the connection, and not a forked child.
    pub(super) fn is_own(&self) -> bool {
        getpid() == self.bell.process
    }

    /// What rings for the slot belongs to this queue pair from now on.
    pub(super) fn bind(&self, qid: u32) {
        if let Some(place) = self.bell.connections().qids.get_mut(self.number as usize) {
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
        let mut connections = self.bell.connections();
        if let Some(place) = connections.qids.get_mut(self.number as usize) {
            *place = 0;
        }
        connections.free.push(self.number);
    }
}

/// A peer's bell.
#[derive(Debug)]
pub(super) struct PeerBell {
    memory: SharedMemory,
    waker: Descriptor,
}

impl PeerBell {
    /// The bell behind the descriptors that a peer passed.
    ///
    /// # Errors
    /// They are not those of a bell.
    pub(super) fn open(memory: &Descriptor, waker: Descriptor) -> Result<PeerBell, Errno> {
        Ok(PeerBell {
            memory: SharedMemory::open(memory.as_fd(), MEMORY)?,
            waker,
        })
    }

    /// Rings for a slot, and wakes the peer if it sleeps.
    #[inline]
    pub(super) fn ring(&self, slot: u32) {
        let slot = slot % SLOTS;
        let (bits, bit) = (bits(&self.memory, slot as usize / 64), 1 << (slot % 64));
        if handshakes::ring(bits, bit, rung(&self.memory), asleep(&self.memory)) {
            // A full socket wakes as well, and one whose reader is gone has none to wake.
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let _ = send(&self.waker, &[1u8], flags);
        }
    }
}
