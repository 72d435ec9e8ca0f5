//! The descriptors of the port, and which of them are ready: one epoll instance, which the device
//! watches in their place.

use crate::stream::descriptor::{Descriptor, Descriptors};
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::io::Errno;
use std::mem::MaybeUninit;
use std::sync::Arc;

/// Descriptors that are named by one call at most.
pub(super) const MOST: usize = 32;

/// What is ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// A socket of the port has packets.
    Socket(u32),
    /// Another member wants to connect.
    Listener(u32),
    /// Another member has passed on a packet, or has closed the connection.
    Member(u32),
}

impl Source {
    fn encode(self) -> EventData {
        let (kind, id) = match self {
            Source::Socket(id) => (0, id),
            Source::Listener(id) => (1, id),
            Source::Member(id) => (2, id),
        };
        EventData::new_u64(kind << 32 | u64::from(id))
    }

    fn decode(data: EventData) -> Source {
        let id = data.u64() as u32;
        match data.u64() >> 32 {
            0 => Source::Socket(id),
            1 => Source::Listener(id),
            _ => Source::Member(id),
        }
    }
}

/// The epoll instance.
#[derive(Debug)]
pub(super) struct Ready {
    epoll: Descriptor,
    next: u32,
}

impl Ready {
    /// # Errors
    /// Those of epoll_create(2); `EMFILE`: the device has no room for a descriptor.
    pub(super) fn new(descriptors: &Arc<Descriptors>) -> Result<Ready, Errno> {
        let epoll = descriptors.adopt(epoll::create(CreateFlags::CLOEXEC)?)?;
        Ok(Ready { epoll, next: 0 })
    }

    /// Watches a descriptor for input until it is closed; `source` makes its name of a number that
    /// no other one has. Returns the number.
    ///
    /// # Errors
    /// Those of epoll_ctl(2).
    pub(super) fn add(&mut self, fd: BorrowedFd<'_>, source: fn(u32) -> Source) -> Result<u32, Errno> {
        let id = self.next;
        // Level-triggered: pollers leave packets in the sockets.
        epoll::add(&self.epoll, fd, source(id).encode(), EventFlags::IN)?;
        self.next = self.next.wrapping_add(1);
        Ok(id)
    }

    /// The sources that are ready, some of them if there are many. Does not wait.
    pub(super) fn take(&self) -> impl Iterator<Item = Source> + use<> {
        let mut events = [MaybeUninit::<Event>::uninit(); MOST];
        let found = epoll::wait(&self.epoll, &mut events, Some(&Timespec::default()));
        let mut sources = [None; MOST];
        if let Ok((found, _)) = found {
            for (place, event) in sources.iter_mut().zip(found) {
                *place = Some(Source::decode(event.data));
            }
        }
        sources.into_iter().flatten()
    }

    /// The descriptor to poll for readiness.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
