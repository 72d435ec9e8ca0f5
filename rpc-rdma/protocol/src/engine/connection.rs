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

/// The role of an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The end that connected. Its calls go forward.
    Client,
    /// The end that accepted the connection.
    Server,
}

/// Options of one end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Client or server.
    pub role: Role,
    /// The specification that this end follows as a receiver.
    pub profile: Profile,
    /// Credits that the calls of this end request.
    pub request: u32,
    /// Credits that this end grants to the calls of the peer. A client grants none before
    /// [`Connection::set_grant`].
    pub grant: u32,
    /// Limits of the resources that one header can make this end hold.
    pub limits: Limits,
    /// Maximum segments that the transport makes of one region.
    pub segments: usize,
    /// Maximum number of concurrent RDMA Reads.
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

/// One end of a connection. The value outlives a connection: calls without an answer are sent again
/// over the next connection.
pub struct Connection<M> {
    role: Role,
    limits: Limits,
    requester: Requester<M>,
    responder: Responder<M>,
    out: Outbox<M>,
    /// Number of posted receives. `None` while there is no connection.
    posted: Option<usize>,
    terms: Terms,
}

impl<M: Clone> Connection<M> {
    /// An end without a connection.
    pub fn new(config: &Config) -> Self {
        let forward = config.role == Role::Client;
        Self {
            role: config.role,
            limits: config.limits,
            // Only forward calls may have chunks (RPC-BD-04).
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

    /// Begins a connection. Outstanding calls are made over it in their order. The calls of a
    /// server wait for [`peer_takes_calls`](Self::peer_takes_calls).
    pub fn connected(&mut self, terms: Terms) {
        self.posted = Some(0);
        self.terms = terms;
        self.responder.connected(terms);
        if self.role == Role::Client {
            self.requester.connected(terms, &mut self.out);
        }
    }

    /// Notes that the peer's upper layer accepts backward calls, as NFSv4.1 negotiates by
    /// CREATE_SESSION and BIND_CONN_TO_SESSION. Before, a server sends none (RFC 8167 §6). The note
    /// is valid for one connection.
    pub fn peer_takes_calls(&mut self) {
        if self.posted.is_some() && self.role == Role::Server {
            self.requester.connected(self.terms, &mut self.out);
        }
    }

    /// Ends the connection: no posted work completes any more, and the peer has no access. Calls of
    /// this end wait for the next connection. Calls of the peer are dropped.
    pub fn disconnected(&mut self) {
        self.posted = None;
        // Actions for the connection are dropped. Registrations do not belong to the connection.
        self.out
            .actions
            .retain(|action| matches!(action, Action::Register { .. } | Action::Release { .. }));
        self.responder.disconnected(&mut self.out);
        self.requester.disconnected(&mut self.out);
    }

    /// Makes a call, now or when there is a connection and a credit. Returns its xid.
    ///
    /// # Errors
    /// The fault of the call, which then has no effect.
    pub fn call(&mut self, call: Call<M>) -> Result<u32, Invalid> {
        self.requester.call(call, &mut self.out)
    }

    /// Cancels a call. When the peer has no more access to the call's memory, the call ends as
    /// [`Event::Answered`] with [`CallError::Cancelled`](super::CallError::Cancelled), or with an
    /// answer that arrived earlier. Returns `false` if there is no such call.
    pub fn cancel(&mut self, xid: u32) -> bool {
        self.requester.cancel(xid, &mut self.out)
    }

    /// Number of calls of this end that were cancelled after they were sent and that have no
    /// answer. Each uses a credit until its answer.
    pub fn abandoned(&self) -> usize {
        self.requester.abandoned()
    }

    /// Number of calls of this end that have not ended.
    pub fn outstanding(&self) -> usize {
        self.requester.outstanding()
    }

    /// The xids of the calls of this end that have not ended.
    pub fn outstanding_xids(&self) -> Vec<u32> {
        self.requester.xids()
    }

    /// Answers a call of the peer. Results go to the Write chunks of the call. The rest goes
    /// inline, or to the Reply chunk if it is too long for a Send. The reply waits while as many
    /// replies as the credits have not completed. A reply that fits neither way becomes ERR_CHUNK.
    /// The memory of the reply is in use until [`Event::Finished`].
    ///
    /// # Errors
    /// The call has ended.
    pub fn reply(&mut self, call: CallId, reply: &Reply<M>) -> Result<(), UnknownCall> {
        self.responder.reply(call, reply, &mut self.out)
    }

    /// Drops a call of the peer without an answer, which ends the connection (RFC 8166 §4.5.4).
    ///
    /// # Errors
    /// The call has ended.
    pub fn drop_call(&mut self, call: CallId) -> Result<(), UnknownCall> {
        self.responder.drop_call(call, &mut self.out)
    }

    /// Sets the number of credits to request from now on, at least 1.
    pub fn set_request(&mut self, credits: u32) {
        self.requester.request(credits, &mut self.out);
    }

    /// Sets the number of credits to grant from now on. The next reply carries it. It is at least 1
    /// (RFC 8166 §3.3.1), except for a client that has granted none yet and so accepts no calls.
    pub fn set_grant(&mut self, credits: u32) {
        let least = u32::from(self.role == Role::Server || self.responder.takes_calls());
        self.responder.set_grant(credits.max(least));
    }

    /// Transactions whose chunks broke a connection. A server passes them to
    /// [`refuse`](Self::refuse) of the same client's next [`Connection`], which refuses each once
    /// (RFC 8166 §4.5.3).
    pub fn refused(&self) -> impl Iterator<Item = u32> {
        self.responder.refused()
    }

    /// Adds transactions to refuse, from [`refused`](Self::refused) of an earlier connection.
    pub fn refuse(&mut self, xids: impl IntoIterator<Item = u32>) {
        self.responder.refuse(xids);
    }

    /// Handles a Send that arrived in a receive. `invalidated` is the handle that it invalidated.
    pub fn received(&mut self, message: &[u8], invalidated: Option<u32>) {
        let Some(posted) = &mut self.posted else { return };
        *posted = posted.saturating_sub(1);
        let server = self.role == Role::Server;
        let parsed = Header::parse(message, &self.limits);
        // A message without a valid header or a direction is treated as a call at a server, and as
        // a reply at a client.
        let is_call = match &parsed {
            Ok((header, payload)) => match (&header.body, triage::direction(header, payload)) {
                (Body::Error(_), _) => false,
                // A server makes no calls with chunks, so a message with chunks is a call to it.
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

    /// Notes that a region is exposed by these segments. There are at most [`Config::segments`],
    /// and their total length is that of the region.
    pub fn registered(&mut self, region: RegionId, segments: Vec<Segment>) {
        self.requester.registered(region, segments, &mut self.out);
    }

    /// Notes that a region could not be exposed, so its call fails.
    pub fn register_failed(&mut self, region: RegionId) {
        self.requester.register_failed(region, &mut self.out);
    }

    /// Notes that the peer has no more access to a region.
    pub fn released(&mut self, region: RegionId) {
        self.requester.released(region, &mut self.out);
    }

    /// Notes that the access to a region could not be revoked. The connection is closed, and then
    /// the call ends (RFC 8166 §4.5.4).
    pub fn release_failed(&mut self, region: RegionId) {
        self.requester.release_failed(region, &mut self.out);
    }

    /// Notes that a Send or Read has completed.
    pub fn completed(&mut self, work: WorkId) {
        self.responder.completed(work, &mut self.out);
    }

    /// Notes that a Send or Read failed. [`disconnected`](Self::disconnected) must follow. The
    /// transport must report the request that broke the connection, not the flushed requests.
    pub fn failed(&mut self, work: WorkId) {
        self.responder.failed(work);
    }

    /// Takes the actions, in order.
    pub fn actions(&mut self) -> Vec<Action<M>> {
        let mut actions = std::mem::take(&mut self.out.actions);
        if let Some(posted) = &mut self.posted {
            // Receives come before any Send that the peer may answer (RFC 8166 §3.3.1, RFC 8167
            // §4.3).
            let wanted = self.responder.promise() + self.requester.unanswered();
            if let Some(more) = wanted.checked_sub(*posted).filter(|more| *more > 0) {
                actions.insert(0, Action::Receive(more));
                *posted = wanted;
            }
        }
        actions
    }

    /// Takes the events for the consumer, in order.
    pub fn events(&mut self) -> Vec<Event<M>> {
        std::mem::take(&mut self.out.events)
    }
}
