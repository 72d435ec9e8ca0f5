//! Who of a server's threads takes what came.
//!
//! Epoll tells of connections that are nobody's, of calls that wait for a thread, and of the end. A thread to which calls came one upon another *keeps* their connection: it asks for no more events, but
//! looks for itself between two calls, since to be told takes longer than most calls do. Calls that came together wait for it if it answers fast, else they go to the others. A thread that is
//! held up in a service has its connection taken from it.

use crate::endpoint::{Endpoint, Taken};
use crate::lock::lock;
use crate::shares::Charge;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::{Errno, read, write};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// A call that nobody has answered yet.
pub(crate) struct Job<Peer> {
    pub(crate) peer: Arc<Peer>,
    pub(crate) taken: Taken,
    /// Memory that is counted for the reply.
    pub(crate) reserved: Option<Charge>,
}

/// What epoll tells of.
pub(crate) enum Told {
    Stop,
    /// Calls wait.
    Jobs,
    /// Something came on the connection with this key.
    Peer(u64),
}

/// Tokens beside the keys of connections, which are addresses.
const STOP: u64 = 0;
const JOBS: u64 = 1;

const ONCE: EventFlags = EventFlags::IN.union(EventFlags::ONESHOT);

/// See the module. What a connection is, is its user's affair.
pub(crate) struct Dispatch<Peer> {
    epoll: OwnedFd,
    stop: OwnedFd,
    /// Calls that wait for a thread, and their count.
    jobs: Mutex<VecDeque<Job<Peer>>>,
    count: OwnedFd,
    /// How many connections a thread keeps.
    kept: AtomicUsize,
    /// Says that there are some again, or something else to look after.
    keeping: OwnedFd,
    attention: AtomicBool,
}

impl<Peer> Dispatch<Peer> {
    pub(crate) fn new() -> io::Result<Self> {
        let counter = |flags| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | flags);
        let dispatch = Self {
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
            stop: counter(EventfdFlags::empty())?,
            jobs: Mutex::default(),
            count: counter(EventfdFlags::SEMAPHORE)?,
            kept: AtomicUsize::new(0),
            keeping: counter(EventfdFlags::empty())?,
            attention: AtomicBool::new(false),
        };
        for (fd, token) in [(&dispatch.stop, STOP), (&dispatch.count, JOBS)] {
            epoll::add(&dispatch.epoll, fd, EventData::new_u64(token), EventFlags::IN)?;
        }
        Ok(dispatch)
    }

    /// Waits for something to do, or only looks.
    pub(crate) fn wait(&self, time: Option<&Timespec>) -> io::Result<Option<Told>> {
        // One and no more: what epoll has told of is told to nobody else.
        let mut event = [Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(STOP),
        }];
        match epoll::wait(&self.epoll, &mut event, time) {
            Ok(0) | Err(Errno::INTR) => Ok(None),
            Ok(_) => Ok(Some(match event[0].data.u64() {
                STOP => Told::Stop,
                JOBS => Told::Jobs,
                key => Told::Peer(key),
            })),
            Err(error) => Err(error.into()),
        }
    }

    /// Has all be told to stop.
    pub(crate) fn stop(&self) {
        let _ = write(&self.stop, &1_u64.to_ne_bytes());
    }

    /// Readable once that was done.
    pub(crate) fn stopped(&self) -> BorrowedFd<'_> {
        self.stop.as_fd()
    }

    /// Has threads told of a connection, once.
    pub(crate) fn add(&self, key: u64, fd: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(key), ONCE)?)
    }

    /// Once more.
    pub(crate) fn again(&self, key: u64, endpoint: &Endpoint) {
        if let Some(link) = endpoint.link() {
            let _ = epoll::modify(&self.epoll, link.fd(), EventData::new_u64(key), ONCE);
        }
    }

    /// Never again.
    pub(crate) fn remove(&self, fd: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Puts a call behind the others.
    pub(crate) fn leave(&self, job: Job<Peer>) {
        lock(&self.jobs).push_back(job);
        let _ = write(&self.count, &1_u64.to_ne_bytes());
    }

    pub(crate) fn next(&self) -> Option<Job<Peer>> {
        let mut count = [0; 8];
        read(&self.count, &mut count).ok()?;
        lock(&self.jobs).pop_front()
    }

    /// Forgets the calls that nobody has begun: they hold on to their connections, and those to this.
    pub(crate) fn clear(&self) {
        lock(&self.jobs).clear();
    }

    /// Has the thread that looks after connections look at once.
    pub(crate) fn attention(&self) {
        self.attention.store(true, Ordering::SeqCst);
        let _ = write(&self.keeping, &1_u64.to_ne_bytes());
    }

    /// Whether something wanted attention since this was last asked.
    pub(crate) fn had_attention(&self) -> bool {
        self.attention.swap(false, Ordering::SeqCst)
    }

    /// A thread keeps a connection.
    pub(crate) fn keeps(&self) {
        if self.kept.fetch_add(1, Ordering::SeqCst) == 0 {
            let _ = write(&self.keeping, &1_u64.to_ne_bytes());
        }
    }

    pub(crate) fn keeps_no_more(&self) {
        self.kept.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether one is kept.
    pub(crate) fn any_kept(&self) -> bool {
        let mut count = [0; 8];
        let _ = read(&self.keeping, &mut count);
        self.kept.load(Ordering::SeqCst) > 0
    }

    /// Becomes readable when threads begin to keep connections, or something wants [attention](Self::attention), until it is asked
    /// whether [any are kept](Self::any_kept).
    pub(crate) fn keeping(&self) -> BorrowedFd<'_> {
        self.keeping.as_fd()
    }
}
