//! Both directions of one connection: the recipient of each message, and the number of posted
//! receives.

use super::outbox::Outbox;
use super::requester::Requester;
use super::responder::{Responder, UnknownCall};
use super::{Action, Call, CallId, Closing, Event, Invalid, RegionId, Reply, Terms, WorkId};
use crate::chunk::Segment;
use crate::header::{Body, Header};
use crate::limits::Limits;
use crate::triage::{self, Direction, Profile};

/// Which end this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The end that connected: its calls go forward.
    Client,
    /// The end that was connected to.
    Server,
}

/// Options of one end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Client or server.
    pub role: Role,
    /// Whose rules.
    pub profile: Profile,
    /// Credits that our calls ask for.
    pub request: u32,
    /// Credits that the peer's calls are granted. A client grants none before it is told to
    /// ([`Connection::set_grant`]).
    pub grant: u32,
    /// Limits of what one header can make this end hold.
    pub limits: Limits,
    /// Segments that the transport makes of one region, at most.
    pub segments: usize,
    /// RDMA Reads at a time.
    pub max_reads: usize,
}

impl Config {
    /// The defaults of this end.
    pub fn new(role: Role) -> Self {
        Self {
            role,
            profile: Profile::default(),
            request: 64,
            grant: if role == Role::Server { 64 } else { 0 },
            limits: Limits::default(),
            segments: 1,
            max_reads: 16,
        }
    }
}

/// One end of a connection. It outlives the connection: calls that were not answered are sent again
/// over the next one.
pub struct Connection<M> {
    role: Role,
    limits: Limits,
    requester: Requester<M>,
    responder: Responder<M>,
    out: Outbox<M>,
    /// Receives that are posted; `None` while there is no connection.
    posted: Option<usize>,
    terms: Terms,
}

impl<M: Clone> Connection<M> {
    /// An end with no connection yet.
    pub fn new(config: &Config) -> Self {
        let forward = config.role == Role::Client;
        Self {
            role: config.role,
            limits: config.limits,
            // Chunks only in calls that go forward (RPC-BD-04).
            requester: Requester::new(config.request.max(1), config.segments.max(1), forward),
            responder: Responder::new(config.grant, config.max_reads, config.profile, !forward),
            out: Outbox {
                actions: Vec::new(),
                events: Vec::new(),
                works: 0,
            },
            posted: None,
            terms: Terms::default(),
        }
    }

    /// There is a connection. Calls that have not ended are made over it, in their order. A
    /// server's wait for [`peer_takes_calls`](Self::peer_takes_calls).
    pub fn connected(&mut self, terms: Terms) {
        self.posted = Some(0);
        self.terms = terms;
        self.responder.connected(terms);
        if self.role == Role::Client {
            self.requester.connected(terms, &mut self.out);
        }
    }

    /// The peer's upper layer said that it takes backward calls (NFSv4.1 does in CREATE_SESSION and
    /// BIND_CONN_TO_SESSION): until then a server sends none (RFC 8167 §6). Said again after each
    /// connection.
    pub fn peer_takes_calls(&mut self) {
        if self.posted.is_some() && self.role == Role::Server {
            self.requester.connected(self.terms, &mut self.out);
        }
    }

    /// The connection is gone: nothing that was posted will complete, and the peer has no access.
    /// Calls of ours wait for the next one, the peer's are forgotten.
    pub fn disconnected(&mut self) {
        self.posted = None;
        // What was to be done on it; but registrations are not the connection's.
        self.out
            .actions
            .retain(|action| matches!(action, Action::Register { .. } | Action::Release { .. }));
        self.responder.disconnected(&mut self.out);
        self.requester.disconnected(&mut self.out);
    }

    /// Makes a call, now or when there is a connection and a credit; returns its xid.
    ///
    /// # Errors
    /// The fault of the call, which then had no effect.
    pub fn call(&mut self, call: Call<M>) -> Result<u32, Invalid> {
        self.requester.call(call, &mut self.out)
    }

    /// Gives a call up. It ends as [`Event::Answered`] when the peer has no access to its memory
    /// any more, with [`CallError::Cancelled`](super::CallError::Cancelled) or with an answer that
    /// was faster. `false` if there is no such call.
    pub fn cancel(&mut self, xid: u32) -> bool {
        self.requester.cancel(xid, &mut self.out)
    }

    /// Calls of ours that were cancelled after they went out, and that the peer has not answered:
    /// their credits are in use for as long.
    pub fn abandoned(&self) -> usize {
        self.requester.abandoned()
    }

    /// Calls of ours that have not ended.
    pub fn outstanding(&self) -> usize {
        self.requester.outstanding()
    }

    /// Their xids.
    pub fn outstanding_xids(&self) -> Vec<u32> {
        self.requester.xids()
    }

    /// Answers a call of the peer's. Results go to its Write chunks, the rest inline, or to the
    /// Reply chunk if it is too long for that. While as many replies as there are credits have not
    /// completed, it waits for one that does. Where it fits nowhere the peer is told by ERR_CHUNK.
    /// Memory is in use until [`Event::Finished`].
    ///
    /// # Errors
    /// The call is gone.
    pub fn reply(&mut self, call: CallId, reply: &Reply<M>) -> Result<(), UnknownCall> {
        self.responder.reply(call, reply, &mut self.out)
    }

    /// Leaves a call of the peer's without an answer, which ends the connection (RFC 8166 §4.5.4).
    ///
    /// # Errors
    /// The call is gone.
    pub fn drop_call(&mut self, call: CallId) -> Result<(), UnknownCall> {
        self.responder.drop_call(call, &mut self.out)
    }

    /// Credits to ask for from now on, at least 1.
    pub fn set_request(&mut self, credits: u32) {
        self.requester.request(credits, &mut self.out);
    }

    /// Credits to grant from now on; said with the next reply. At least 1 (RFC 8166 §3.3.1), but
    /// for a client that has granted none so far, and so takes no calls.
    pub fn set_grant(&mut self, credits: u32) {
        let least = u32::from(self.role == Role::Server || self.responder.takes_calls());
        self.responder.set_grant(credits.max(least));
    }

    /// Transactions whose chunks broke a connection: a server hands them to the [`Connection`] of
    /// the same client's next connection, which refuses them once (RFC 8166 §4.5.3).
    pub fn refused(&self) -> impl Iterator<Item = u32> {
        self.responder.refused()
    }

    /// See [`refused`](Self::refused).
    pub fn refuse(&mut self, xids: impl IntoIterator<Item = u32>) {
        self.responder.refuse(xids);
    }

    /// A Send came, in one of the receives; it invalidated that handle.
    pub fn received(&mut self, message: &[u8], invalidated: Option<u32>) {
        let Some(posted) = &mut self.posted else { return };
        *posted = posted.saturating_sub(1);
        let server = self.role == Role::Server;
        let parsed = Header::parse(message, &self.limits);
        // Who it is for: what is no reply is a call to a server, and what is no call a reply to a
        // client.
        let is_call = match &parsed {
            Ok((header, payload)) => match (&header.body, triage::direction(header, payload)) {
                (Body::Error(_), _) => false,
                // A server makes no calls with chunks, so that what has any is a call to it.
                (Body::Msg(lists) | Body::NoMsg(lists), Some(Direction::Reply)) => {
                    server && !lists.is_empty()
                }
                (_, Some(Direction::Call)) => true,
                (_, None) => server,
            },
            Err(_) => server,
        };
        if !is_call {
            if let Ok(reply) = parsed.and_then(|(header, payload)| triage::reply_of(header, payload)) {
                self.requester.replied(reply, invalidated, &mut self.out);
            }
        } else if self.responder.takes_calls() {
            self.responder.received(message, parsed, &mut self.out);
        }
        if invalidated.is_some_and(|handle| self.requester.exposes(handle)) {
            self.out.actions.push(Action::Close(Closing::ForeignInvalidation));
        }
    }

    /// A region is exposed by these segments: as many as [`Config::segments`] at most, of the
    /// region's length together.
    pub fn registered(&mut self, region: RegionId, segments: Vec<Segment>) {
        self.requester.registered(region, segments, &mut self.out);
    }

    /// A region could not be exposed: the call fails.
    pub fn register_failed(&mut self, region: RegionId) {
        self.requester.register_failed(region, &mut self.out);
    }

    /// The peer has no access to a region any more.
    pub fn released(&mut self, region: RegionId) {
        self.requester.released(region, &mut self.out);
    }

    /// Access could not be taken away: the connection is closed, and the call ends after that (RFC
    /// 8166 §4.5.4).
    pub fn release_failed(&mut self, region: RegionId) {
        self.requester.release_failed(region, &mut self.out);
    }

    /// A Send or Read is done.
    pub fn completed(&mut self, work: WorkId) {
        self.responder.completed(work, &mut self.out);
    }

    /// A Send or Read failed; [`disconnected`](Self::disconnected) follows. Say it of the one that
    /// broke the connection, not of those that were flushed with it.
    pub fn failed(&mut self, work: WorkId) {
        self.responder.failed(work);
    }

    /// Takes the actions, in order.
    pub fn actions(&mut self) -> Vec<Action<M>> {
        let mut actions = std::mem::take(&mut self.out.actions);
        if let Some(posted) = &mut self.posted {
            // Before any Send that a message may come back for (RFC 8166 §3.3.1, RFC 8167 §4.3).
            let wanted = self.responder.promise() + self.requester.unanswered();
            if let Some(more) = wanted.checked_sub(*posted).filter(|more| *more > 0) {
                actions.insert(0, Action::Receive(more));
                *posted = wanted;
            }
        }
        actions
    }

    /// Takes what the consumer is to be told.
    pub fn events(&mut self) -> Vec<Event<M>> {
        std::mem::take(&mut self.out.events)
    }
}
