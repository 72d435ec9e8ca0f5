//! The sessions of a port, which its streams and its listener share with the thread.

use super::super::Ends;
use super::super::descriptor::{Descriptor, Descriptors};
use super::session::Session;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use urnic_sync::Mutex;

/// A session of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct SessionId(u64);

pub(super) type SharedSessions = Arc<Mutex<Sessions>>;

/// The sessions of a port.
#[derive(Debug)]
pub(super) struct Sessions {
    /// The address to which the port is bound.
    pub(super) local: SocketAddr,
    /// Messages were left in receive windows, because so many are not read.
    pub(super) leaves_some: bool,
    /// Somebody is about to use the port, which is not closed meanwhile.
    is_reserved: bool,
    is_closed: bool,
    /// The listener has gone, and the thread has not looked since.
    may_close: bool,
    all: HashMap<SessionId, Session>,
    next: u64,
    /// Sessions that the device begins, with their peers.
    wanted: Vec<(SessionId, SocketAddr)>,
    listening: Option<Listening>,
}

/// What a listener waits for.
#[derive(Debug)]
struct Listening {
    backlog: usize,
    accepted: VecDeque<SessionId>,
    /// An eventfd, which is written when there is a session to accept.
    notification: Arc<Descriptor>,
}

/// A new eventfd.
pub(super) fn new_eventfd(descriptors: &Arc<Descriptors>) -> Result<Descriptor, Errno> {
    descriptors.adopt(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

impl Sessions {
    pub(super) fn new(local: SocketAddr) -> Sessions {
        Sessions {
            local,
            leaves_some: false,
            is_reserved: true,
            is_closed: false,
            may_close: false,
            all: HashMap::new(),
            next: 0,
            wanted: Vec::new(),
            listening: None,
        }
    }

    pub(super) fn get(&mut self, id: SessionId) -> Option<&mut Session> {
        self.all.get_mut(&id)
    }

    /// Keeps the port open until the next session or listener; `false`: it is closed.
    pub(super) fn reserve(&mut self) -> bool {
        self.is_reserved = !self.is_closed;
        self.is_reserved
    }

    /// Whether the thread must still look whether it closes the port.
    pub(super) fn may_close(&self) -> bool {
        self.may_close
    }

    /// Closes the port, if there is neither a session nor a listener.
    pub(super) fn close_if_unused(&mut self, has_no_associations: bool) -> bool {
        self.may_close = false;
        self.is_closed =
            has_no_associations && self.all.is_empty() && self.listening.is_none() && !self.is_reserved;
        self.is_closed
    }

    fn insert(&mut self, session: Session) -> SessionId {
        let id = SessionId(self.next);
        self.next += 1;
        self.all.insert(id, session);
        id
    }

    pub(super) fn end(&mut self, id: SessionId, errno: Errno) {
        if let Some(session) = self.get(id) {
            session.end(errno);
        }
    }

    /// Ends all sessions, and those that begin from now on.
    pub(super) fn end_all(&mut self, errno: Errno) {
        self.is_closed = true;
        self.all.values_mut().for_each(|session| session.end(errno));
    }

    /// Whether a session has something to be sent.
    pub(super) fn owe(&self) -> bool {
        self.all.values().any(Session::owes)
    }

    /// Forgets the sessions that are over and that the device has no stream for.
    pub(super) fn remove_ended(&mut self) {
        self.all
            .retain(|_, session| session.is_open || !session.is_over());
    }

    // Sessions that the device begins.

    /// Begins a session with a peer, once the thread gets to it.
    pub(super) fn connect(&mut self, ends: Ends, descriptors: &Arc<Descriptors>) -> Result<SessionId, Errno> {
        self.is_reserved = false;
        let notification = Arc::new(new_eventfd(descriptors)?);
        let id = self.insert(Session::new(ends, notification));
        self.wanted.push((id, ends.remote));
        Ok(id)
    }

    /// Begins it later.
    pub(super) fn want(&mut self, id: SessionId, remote: SocketAddr) {
        self.wanted.push((id, remote));
    }

    pub(super) fn take_wanted(&mut self) -> Vec<(SessionId, SocketAddr)> {
        std::mem::take(&mut self.wanted)
    }

    /// The device has no stream for the session any more.
    pub(super) fn close(&mut self, id: SessionId) {
        if let Some(session) = self.get(id) {
            session.close();
        }
    }

    // Sessions that peers begin.

    /// Accepts sessions. Returns the eventfd that tells of them.
    ///
    /// # Errors
    /// `EADDRINUSE`: there is a listener.
    pub(super) fn listen(
        &mut self,
        backlog: u32,
        descriptors: &Arc<Descriptors>,
    ) -> Result<Arc<Descriptor>, Errno> {
        self.is_reserved = false;
        if self.listening.is_some() {
            return Err(Errno::ADDRINUSE);
        }
        let notification = Arc::new(new_eventfd(descriptors)?);
        self.listening = Some(Listening {
            backlog: backlog as usize,
            accepted: VecDeque::new(),
            notification: notification.clone(),
        });
        Ok(notification)
    }

    pub(super) fn is_listening(&self) -> bool {
        self.listening.is_some()
    }

    /// Nothing is accepted any more; sessions that wait end.
    pub(super) fn unlisten(&mut self) {
        self.may_close = true;
        if let Some(listening) = self.listening.take() {
            listening.accepted.into_iter().for_each(|id| self.close(id));
        }
    }

    /// A peer begins a session on an association with this [longest](Session::establish) message.
    /// If nobody can accept it, its only answer is a Terminate (RFC 5043 §6.4). `None`: not even
    /// that.
    pub(super) fn begin(
        &mut self,
        ends: Ends,
        longest: usize,
        descriptors: &Arc<Descriptors>,
    ) -> Option<SessionId> {
        let notification = match new_eventfd(descriptors) {
            Ok(notification) => Arc::new(notification),
            Err(errno) => {
                tracing::debug!(%errno, "a DDP session is not accepted");
                return None;
            }
        };
        let mut session = Session::new(ends, notification);
        session.by_peer = true;
        session.establish(longest);
        let listening = self.listening.as_mut();
        let listening = listening.filter(|listening| listening.accepted.len() < listening.backlog);
        match listening {
            None => {
                session.close();
                Some(self.insert(session))
            }
            Some(listening) => {
                let id = SessionId(self.next);
                listening.accepted.push_back(id);
                // It fails only if the counter is full, which wakes as well.
                let _ = rustix::io::write(&*listening.notification, &1u64.to_ne_bytes());
                Some(self.insert(session))
            }
        }
    }

    /// The next session that a peer began.
    pub(super) fn accept(&mut self) -> Option<SessionId> {
        self.listening.as_mut()?.accepted.pop_front()
    }
}
