//! The distribution of calls to the threads of a server.
//!
//! Epoll reports connections that no thread keeps, calls that wait for a thread, and the stop of
//! the server. A thread that receives several calls of one connection in a row *keeps* the
//! connection: it does not arm the connection again, but polls between two calls, because an event
//! takes longer than most calls. Calls that arrived together wait for this thread if it is fast.
//! Otherwise they go to other threads. A connection is released from a thread that is blocked in a
//! service.

use crate::endpoint::{Endpoint, ReceivedCall};
use crate::shares::Charge;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::{Errno, read, write};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use urnic_sync::Mutex;

/// A call without an answer.
pub(crate) struct Job<Peer> {
    pub(crate) peer: Arc<Peer>,
    pub(crate) received: ReceivedCall,
    /// Memory that is counted for the reply.
    pub(crate) reserved: Option<Charge>,
}

/// An event of epoll.
pub(crate) enum Wakeup {
    Stop,
    /// Calls wait for a thread.
    Jobs,
    /// The connection with this key has completions.
    Peer(u64),
}

/// Tokens of epoll. Other tokens are the keys of connections, which are addresses.
const STOP: u64 = 0;
const JOBS: u64 = 1;

const ONCE: EventFlags = EventFlags::IN.union(EventFlags::ONESHOT);

/// The events of a server's threads, for any type of connection.
pub(crate) struct Dispatch<Peer> {
    epoll: OwnedFd,
    stop: OwnedFd,
    /// Calls that wait for a thread, and their count.
    jobs: Mutex<VecDeque<Job<Peer>>>,
    count: OwnedFd,
    /// Number of connections that threads keep.
    kept: AtomicUsize,
    /// Becomes readable when threads begin to keep connections, or when
    /// a [check](Dispatch::request_check) is requested.
    keeping: OwnedFd,
    check_requested: AtomicBool,
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
            check_requested: AtomicBool::new(false),
        };
        for (fd, token) in [(&dispatch.stop, STOP), (&dispatch.count, JOBS)] {
            epoll::add(&dispatch.epoll, fd, EventData::new_u64(token), EventFlags::IN)?;
        }
        Ok(dispatch)
    }

    /// Waits for an event, for at most this time.
    pub(crate) fn wait(&self, time: Option<&Timespec>) -> io::Result<Option<Wakeup>> {
        // One event only, because epoll reports an event to one thread.
        let mut event = [Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(STOP),
        }];
        match epoll::wait(&self.epoll, &mut event, time) {
            Ok(0) | Err(Errno::INTR) => Ok(None),
            Ok(_) => Ok(Some(match event[0].data.u64() {
                STOP => Wakeup::Stop,
                JOBS => Wakeup::Jobs,
                key => Wakeup::Peer(key),
            })),
            Err(error) => Err(error.into()),
        }
    }

    /// Stops all threads.
    pub(crate) fn stop(&self) {
        let _ = write(&self.stop, &1_u64.to_ne_bytes());
    }

    /// A descriptor that is readable after [`stop`](Self::stop).
    pub(crate) fn stopped(&self) -> BorrowedFd<'_> {
        self.stop.as_fd()
    }

    /// Adds a connection, armed for one event.
    pub(crate) fn add(&self, key: u64, fd: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(key), ONCE)?)
    }

    /// Arms a connection for one more event.
    pub(crate) fn rearm(&self, key: u64, endpoint: &Endpoint) {
        if let Some(link) = endpoint.link() {
            let _ = epoll::modify(&self.epoll, link.fd(), EventData::new_u64(key), ONCE);
        }
    }

    /// Removes a connection.
    pub(crate) fn remove(&self, fd: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Queues a call for any thread.
    pub(crate) fn queue(&self, job: Job<Peer>) {
        self.jobs.lock().push_back(job);
        let _ = write(&self.count, &1_u64.to_ne_bytes());
    }

    pub(crate) fn next(&self) -> Option<Job<Peer>> {
        let mut count = [0; 8];
        read(&self.count, &mut count).ok()?;
        self.jobs.lock().pop_front()
    }

    /// Drops the queued calls. They hold their connections, which hold this object.
    pub(crate) fn clear(&self) {
        self.jobs.lock().clear();
    }

    /// Wakes the accepting thread, which checks connections.
    pub(crate) fn request_check(&self) {
        self.check_requested.store(true, Ordering::SeqCst);
        let _ = write(&self.keeping, &1_u64.to_ne_bytes());
    }

    /// Whether attention was requested since the last call of this function.
    pub(crate) fn take_check_request(&self) -> bool {
        self.check_requested.swap(false, Ordering::SeqCst)
    }

    /// Notes that a thread keeps one more connection.
    pub(crate) fn add_kept(&self) {
        if self.kept.fetch_add(1, Ordering::SeqCst) == 0 {
            let _ = write(&self.keeping, &1_u64.to_ne_bytes());
        }
    }

    pub(crate) fn remove_kept(&self) {
        self.kept.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether threads keep connections.
    pub(crate) fn any_kept(&self) -> bool {
        let mut count = [0; 8];
        let _ = read(&self.keeping, &mut count);
        self.kept.load(Ordering::SeqCst) > 0
    }

    /// A descriptor that becomes readable when threads begin to keep connections, or when
    /// a [check](Self::request_check) is requested. It stays readable until
    /// [`any_kept`](Self::any_kept) is called.
    pub(crate) fn keeping(&self) -> BorrowedFd<'_> {
        self.keeping.as_fd()
    }
}
