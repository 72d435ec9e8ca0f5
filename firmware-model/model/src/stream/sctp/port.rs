//! An SCTP port: its associations ([`Endpoint`]), and their streams, in each of which there is a
//! [session](super::session). The device's SCTP thread has the ports; the streams and listeners
//! share the [`Sessions`] with it.

use super::super::Ends;
use super::super::descriptor::Descriptors;
use super::endpoint::Endpoint;
use super::session::{MOST_HELD_BYTES, MOST_KEPT, MOST_KEPT_BYTES, function};
use super::sessions::{SessionId, Sessions, SharedSessions};
use rustix::io::Errno;
use std::collections::{HashMap, HashSet};
use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use urnic_sctp::endpoint::{AssociationId, Event, Peer, Reason, Received};
use urnic_sync::MutexGuard;
use urnic_wire::sctp::chunk::{Contents, SSN_LEN};
use urnic_wire::sctp::session::Function;

/// Batches of packets or events that one call takes, so that a peer that keeps sending does not
/// occupy the thread.
const MOST_BATCHES: usize = 8;
/// Messages that are taken out of a receive window before it is looked whether more are kept.
const TAKEN_TOGETHER: usize = 64;
/// An association without sessions ends after this time; one that the peer began later, because
/// sessions that the peer begins must not meet the end.
const IDLE: Duration = Duration::from_secs(5);
const ACCEPTED_IDLE: Duration = Duration::from_secs(30);

#[derive(Debug)]
struct Association {
    peer: Peer,
    /// Our address.
    local: IpAddr,
    /// The sessions by the numbers of their streams.
    sessions: HashMap<u16, SessionId>,
    /// Numbers on which messages of a session that is over may still come (RFC 5043 §6.6).
    outstanding: HashSet<u16>,
    /// Sessions that wait for the association to be established.
    waiting: Vec<SessionId>,
    /// Since when it has no sessions, and for how long it may.
    idle: Option<Duration>,
    longest_idle: Duration,
}

/// A port.
pub(super) struct Port {
    endpoint: Box<dyn Endpoint>,
    local: SocketAddr,
    descriptors: Arc<Descriptors>,
    sessions: SharedSessions,
    associations: HashMap<AssociationId, Association>,
}

/// The error of a session whose association ended.
fn errno(reason: Reason) -> Errno {
    match reason {
        Reason::Closed | Reason::Aborted => Errno::CONNRESET,
        Reason::Refused => Errno::CONNREFUSED,
        Reason::Silent => Errno::TIMEDOUT,
        Reason::NoDdp => Errno::CONNREFUSED,
        Reason::Violation => Errno::PROTO,
    }
}

impl Port {
    pub(super) fn new(
        endpoint: Box<dyn Endpoint>,
        descriptors: Arc<Descriptors>,
        sessions: SharedSessions,
    ) -> Port {
        let local = sessions.lock().local;
        Port {
            endpoint,
            local,
            descriptors,
            sessions,
            associations: HashMap::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Sessions> {
        self.sessions.lock()
    }

    /// Whether nobody uses it, and it has no association: then nothing can begin any more.
    pub(super) fn close_if_unused(&mut self) -> bool {
        let mut sessions = self.sessions.lock();
        let closes = sessions.close_if_unused(self.associations.is_empty());
        if closes {
            // Under the lock: the next user of the address finds the port free.
            self.endpoint.close();
        }
        closes
    }

    /// When [`Port::run`] has something to do, if nothing arrives before.
    pub(super) fn timeout(&self) -> Option<Duration> {
        let idle = self
            .associations
            .values()
            .filter_map(|a| Some(a.idle? + a.longest_idle));
        idle.chain(self.endpoint.timeout()).min()
    }

    /// Takes what has arrived, does what is due and what the device asked for, and sends the
    /// answers.
    pub(super) fn run(&mut self, now: Duration) {
        let listens = self.lock().is_listening();
        self.endpoint.set_listening(listens);
        self.begin_wanted(now);
        self.take_rest(now);
        for _ in 0..MOST_BATCHES {
            let may_be_more = self.endpoint.receive(now);
            self.events(now);
            self.send_messages(now);
            self.endpoint.flush();
            if !may_be_more {
                break;
            }
        }
        if self.endpoint.timeout().is_some_and(|due| due <= now) {
            self.endpoint.advance(now);
            self.events(now);
            self.send_messages(now);
        }
        self.remove_ended(now);
        // Sessions that waited for the end of an association.
        self.begin_wanted(now);
        self.endpoint.flush();
    }

    /// Whether peers have all that was sent.
    pub(super) fn is_quiet(&mut self) -> bool {
        let mut associations = self.associations.keys();
        !self.sessions.lock().owe() && associations.all(|id| self.endpoint.is_confirmed(*id))
    }

    /// The device ends: so do all associations.
    pub(super) fn end(&mut self, now: Duration) {
        let all: Vec<AssociationId> = self.associations.keys().copied().collect();
        all.into_iter().for_each(|id| self.endpoint.abort(id, now));
        self.endpoint.flush();
        self.lock().end_all(Errno::CONNABORTED);
    }

    /// The thread ends, whatever its reason is.
    pub(super) fn abandon(&self) {
        self.lock().end_all(Errno::CONNABORTED);
    }

    // Associations.

    fn events(&mut self, now: Duration) {
        while let Some(event) = self.endpoint.next_event() {
            match event {
                Event::Accepted(id, peer) => self.add(id, peer, ACCEPTED_IDLE),
                Event::Connected(id) => self.assign_streams(id),
                Event::Moved(id, peer) => {
                    if let Some(association) = self.associations.get_mut(&id) {
                        association.peer = peer;
                    }
                }
                Event::Readable(id) => self.take_messages(id, now),
                Event::Ended(id, reason) => self.ended(id, errno(reason), now),
            }
        }
    }

    fn add(&mut self, id: AssociationId, peer: Peer, longest_idle: Duration) {
        let local = self.endpoint.local_ip(id);
        self.associations.insert(
            id,
            Association {
                peer,
                local,
                sessions: HashMap::new(),
                outstanding: HashSet::new(),
                waiting: Vec::new(),
                idle: None,
                longest_idle,
            },
        );
    }

    /// Begins the sessions that the device wants.
    fn begin_wanted(&mut self, now: Duration) {
        let wanted = self.lock().take_wanted();
        for (session, remote) in wanted {
            if self.lock().get(session).is_none_or(|session| session.is_over()) {
                continue;
            }
            let peer = Peer {
                address: remote,
                port: remote.port(),
            };
            let id = match self.endpoint.connect(peer, now) {
                Ok(id) => id,
                Err(errno) => {
                    self.lock().end(session, errno);
                    continue;
                }
            };
            if self.endpoint.is_closing(id) {
                // The next association with this peer begins when this one has ended.
                self.lock().want(session, remote);
                continue;
            }
            if !self.associations.contains_key(&id) {
                self.add(id, peer, IDLE);
            }
            if let Some(association) = self.associations.get_mut(&id) {
                association.waiting.push(session);
            }
            self.assign_streams(id);
        }
    }

    /// Gives the sessions that wait for an association the lowest numbers that are free.
    fn assign_streams(&mut self, id: AssociationId) {
        let (Some(association), Some(streams)) = (self.associations.get_mut(&id), self.endpoint.streams(id))
        else {
            return;
        };
        let longest = self.endpoint.longest(id);
        let mut sessions = self.sessions.lock();
        for session in mem::take(&mut association.waiting) {
            let is_free = |number: &u16| {
                !association.sessions.contains_key(number) && !association.outstanding.contains(number)
            };
            let free = (0..streams).find(is_free);
            match (free, sessions.get(session)) {
                (Some(number), Some(begun)) => {
                    association.sessions.insert(number, session);
                    begun.establish(longest);
                }
                (None, Some(refused)) => refused.end(Errno::NOSR),
                (_, None) => {}
            }
        }
    }

    fn ended(&mut self, id: AssociationId, errno: Errno, now: Duration) {
        // What came before the end is read first.
        while let Some(received) = self.endpoint.take(id, now) {
            self.arrived(id, &received);
        }
        self.endpoint.forget(id);
        let Some(association) = self.associations.remove(&id) else {
            return;
        };
        let mut sessions = self.lock();
        for session in association.sessions.into_values().chain(association.waiting) {
            sessions.end(session, errno);
        }
    }

    /// Forgets what has ended, and ends associations that have had no session for a while.
    fn remove_ended(&mut self, now: Duration) {
        let mut idle = Vec::new();
        let mut sessions = self.sessions.lock();
        for (id, association) in &mut self.associations {
            let endpoint = &mut *self.endpoint;
            let Association {
                sessions: numbers,
                outstanding,
                ..
            } = association;
            let mut is_used = !association.waiting.is_empty();
            numbers.retain(|number, session| {
                let known = sessions.get(*session);
                is_used |= known.as_ref().is_some_and(|known| !known.only_awaits_last());
                if let Some(known) = known {
                    known.note_unacknowledged(|| endpoint.unacknowledged_of(*id, *number));
                    if !known.is_over() {
                        return true;
                    }
                    if known.may_be_outstanding() {
                        outstanding.insert(*number);
                    }
                }
                // Nothing of ours may arrive in another session.
                endpoint.unacknowledged_of(*id, *number) > 0
            });
            if is_used {
                association.idle = None;
            } else if association
                .idle
                .get_or_insert(now)
                .saturating_add(association.longest_idle)
                <= now
            {
                // Once only: the end is an event.
                association.idle = Some(Duration::MAX - association.longest_idle);
                idle.push(*id);
            }
        }
        sessions.remove_ended();
        drop(sessions);
        for id in idle {
            self.endpoint.shutdown(id, now);
        }
        self.events(now);
    }

    // Messages.

    fn take_messages(&mut self, id: AssociationId, now: Duration) {
        while let Some(true) = self.takes_more(id, now) {
            for _ in 0..TAKEN_TOGETHER {
                let Some(received) = self.endpoint.take(id, now) else {
                    return;
                };
                self.arrived(id, &received);
            }
        }
        self.lock().leaves_some = true;
    }

    /// Takes what was left in receive windows.
    fn take_rest(&mut self, now: Duration) {
        if !mem::take(&mut self.lock().leaves_some) {
            return;
        }
        let all: Vec<AssociationId> = self.associations.keys().copied().collect();
        all.into_iter().for_each(|id| self.take_messages(id, now));
        self.events(now);
    }

    /// Whether messages are taken out of the receive window. If all that were taken wait for an
    /// earlier one, that one may be among those in the window.
    fn takes_more(&mut self, id: AssociationId, now: Duration) -> Option<bool> {
        let association = self.associations.get(&id)?;
        let (mut bytes, mut is_full, mut is_readable) = (0, false, false);
        let mut sessions = self.lock();
        for id in association.sessions.values() {
            if let Some(session) = sessions.get(*id) {
                bytes += session.memory();
                is_full |= session.unread_messages() >= MOST_KEPT;
                is_readable |= session.is_readable();
            }
        }
        drop(sessions);
        if bytes > MOST_HELD_BYTES {
            // A peer that leaves out messages on purpose, in many sessions.
            self.endpoint.abort(id, now);
            self.ended(id, Errno::PROTO, now);
            return None;
        }
        Some((bytes < MOST_KEPT_BYTES && !is_full) || !is_readable)
    }

    /// A message has come for a session, or begins one.
    fn arrived(&mut self, id: AssociationId, received: &Received) {
        let Some(association) = self.associations.get_mut(&id) else {
            return;
        };
        let Received {
            stream,
            contents,
            data,
        } = received;
        let begins = *contents == Contents::SessionControl
            && data.get(..SSN_LEN) == Some(&[0; SSN_LEN])
            && data.get(SSN_LEN..).and_then(function) == Some(Function::Initiate);
        let mut sessions = self.sessions.lock();
        let known = association.sessions.get(stream).copied();
        let is_kept = known
            .and_then(|known| sessions.get(known))
            .is_some_and(|session| !(begins && session.may_be_replaced()));
        let session = match known.filter(|_| is_kept) {
            Some(known) => known,
            None if begins => {
                let ends = Ends {
                    local: SocketAddr::new(association.local, self.local.port()),
                    remote: association.peer.address,
                };
                let longest = self.endpoint.longest(id);
                let Some(begun) = sessions.begin(ends, longest, &self.descriptors) else {
                    return;
                };
                if let Some(old) = association.sessions.insert(*stream, begun) {
                    sessions.end(old, Errno::CONNRESET);
                }
                begun
            }
            // What is left of a session that has ended.
            None => return,
        };
        let Some(session) = sessions.get(session) else {
            return;
        };
        match session.arrived(*contents, data) {
            Ok(true) => session.notify(),
            Ok(false) => {}
            Err(errno) => session.refuse(errno),
        }
    }

    /// Passes messages to their associations.
    fn send_messages(&mut self, now: Duration) {
        let Port {
            associations,
            sessions,
            endpoint,
            ..
        } = self;
        let mut sessions = sessions.lock();
        for (id, association) in associations {
            for (number, session) in &association.sessions {
                let Some(session) = sessions.get(*session).filter(|session| session.owes()) else {
                    continue;
                };
                while endpoint.has_room(*id, *number)
                    && let Some((contents, message)) =
                        session.next_unsent(|| endpoint.unacknowledged_of(*id, *number) == 0)
                {
                    session.taken(contents, message.len());
                    if let Err(errno) = endpoint.send(*id, (*number, contents), message, now) {
                        session.end(errno);
                        break;
                    }
                }
            }
        }
        drop(sessions);
        // Sending may end an association.
        self.events(now);
    }
}

#[cfg(test)]
mod tests;
