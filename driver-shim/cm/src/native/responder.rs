//! The responder: streams that listeners accept, and the Requests on them.
//!
//! A queue pair accepts a Request only from the address of the peer named at RTR, and only with the
//! PSNs that the two programs exchanged.
//!
//! *Address.* TCP gives the source of a stream. The source must be the named peer's, unless
//! `native.allow_nat` is set. Other processes of the peer's host pass this check.
//!
//! *PSNs.* At RTS both ends have both PSNs: 48 bits, too many to guess. At RTR the queue pair has
//! only the PSN that it expects, 24 bits: it examines few wrong Requests, and rejects the others
//! unexamined. To reach the right peer nevertheless, the queue pair initiates a connection after
//! each Request that it rejects unexamined. That connection goes to a port that only the peer has.
//! If the Request on that connection is a nudge, the peer's own Request repeats the nonce, and is
//! examined in any case.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rustix::io::Errno;

use super::identity::{Identity, Reason};
use super::streams::World;
use super::{
    Engine, Key, MAX_PARKED_EACH, MAX_WITHOUT_REQUEST, Pair, Phase, RTS_GRACE, RTS_LOOK, Rts, Startup,
    connecting,
};
use crate::carrier::{Inbox, RequestProgress, receive_request};
use crate::mpa_startup::{Close, Reply, Time};
use crate::startup::Responder;

impl Engine {
    /// A listener has a new stream.
    pub(super) fn stream_arrived(&mut self, world: &mut World<'_>, lid: u32, sid: u32) {
        let Some(llp) = self.numbers.llp_of(lid) else {
            world.streams.close(sid, Close::Abort);
            return;
        };
        if self.without_request.len() >= MAX_WITHOUT_REQUEST
            && let Some((_, oldest)) = self.without_request.pop_first()
        {
            tracing::debug!("stream {oldest}: closed: too many streams without a Request");
            self.close_stream(world, oldest, Close::Abort);
        }
        let responder = Responder::new(llp, self.settings.clone(), world.now);
        if world.streams.receive(sid, responder.bytes_needed()).is_err() {
            world.streams.close(sid, Close::Abort);
            return;
        }
        self.arrivals += 1;
        self.without_request.insert(self.arrivals, sid);
        self.timers.set(Key::Stream(sid), responder.deadline());
        self.streams.insert(
            sid,
            Startup::Accepted {
                responder: Box::new(responder),
                order: self.arrivals,
            },
        );
    }

    /// Takes bytes of a Request.
    pub(super) fn request_received(&mut self, world: &mut World<'_>, sid: u32, bytes: Result<&[u8], Errno>) {
        let Some(Startup::Accepted { responder, .. }) = self.streams.get_mut(&sid) else {
            return;
        };
        match receive_request(responder, world.streams, sid, bytes) {
            RequestProgress::Complete => self.answer(world, sid),
            RequestProgress::Incomplete => {}
            RequestProgress::Invalid(_, how) => self.close_stream(world, sid, how),
            RequestProgress::Lost => self.close_stream(world, sid, Close::Abort),
        }
    }

    /// Handles a complete Request according to the state of the queue pair that the Request names.
    fn answer(&mut self, world: &mut World<'_>, sid: u32) {
        let Some(Startup::Accepted { responder, order }) = self.remove_startup(sid) else {
            return;
        };
        let peer = responder
            .request()
            .and_then(|request| Identity::parse(request.private_data));
        let qpn = peer.map_or(0, |peer| peer.to);
        let unidentified = Identity {
            from: 0,
            to: 0,
            unreliable: false,
            sq_psn: None,
            rq_psn: 0,
            rnr_retry: None,
            nonce: 0,
            ticket: None,
        };
        let Ok(ends) = world.streams.ends(sid) else {
            return world.streams.close(sid, Close::Abort);
        };
        self.streams.insert(
            sid,
            Startup::Unanswered {
                qpn,
                responder,
                peer: peer.unwrap_or(unidentified),
                ends,
                order,
            },
        );
        let Some(peer) = peer else {
            return self.reject(world, sid, Reason::NotNative);
        };
        tracing::debug!(
            "stream {sid}: {:#08x} requests a connection with {qpn:#08x}",
            peer.from
        );
        match self.pairs.get(&qpn).map(|pair| &pair.phase) {
            None => self.reject(world, sid, Reason::Unknown),
            // A nudge is not parked: the queue pair stores its nonce.
            Some(Phase::Idle) if peer.sq_psn.is_none() => {
                self.initiate_early(world, qpn);
                self.reject(world, sid, Reason::Busy);
            }
            Some(Phase::Idle) => self.park(world, sid, qpn),
            Some(Phase::Connecting(_)) => match self.examine(world, sid, qpn) {
                Err(reason) => self.reject(world, sid, reason),
                Ok(()) if self.own_has_precedence(qpn, sid) => {
                    tracing::debug!(
                        "stream {sid}: waits: it crosses the request of this end, which has precedence"
                    );
                    self.let_wait(world, sid, qpn, self.settings.initiator_timeout);
                }
                Ok(()) => self.accept_with_rts(world, sid, qpn),
            },
            Some(Phase::Connected { .. }) => self.reject(world, sid, Reason::Connected),
            Some(Phase::Closed) => self.reject(world, sid, Reason::Closed),
        }
    }

    /// Whether this end has an unanswered Request that has precedence over the peer's. A nudge
    /// connects nothing, so it has no precedence.
    fn own_has_precedence(&self, qpn: u32, sid: u32) -> bool {
        let Some(Phase::Connecting(connecting)) = self.pairs.get(&qpn).map(|pair| &pair.phase) else {
            return false;
        };
        let own = connecting.stream.and_then(|own| self.streams.get(&own));
        matches!((own, self.streams.get(&sid)),
            (Some(Startup::Requested { local, .. }), Some(Startup::Unanswered { peer, .. }))
                if local.sq_psn.is_some() && local.has_precedence_over(peer))
    }

    /// The waiting Request that can be accepted now: this end's own Request does not have
    /// precedence.
    pub(super) fn acceptable(&self, qpn: u32) -> Option<u32> {
        match self.pairs.get(&qpn).map(|pair| &pair.phase) {
            Some(Phase::Connecting(connecting)) => connecting
                .waiting_stream
                .filter(|waiting| !self.own_has_precedence(qpn, *waiting)),
            _ => None,
        }
    }

    /// Parks a Request for a queue pair that is not at RTR.
    fn park(&mut self, world: &mut World<'_>, sid: u32, qpn: u32) {
        let Some(pair) = self.pairs.get_mut(&qpn) else {
            return;
        };
        pair.parked.push_back(sid);
        self.parked += 1;
        self.timers
            .set(Key::Stream(sid), Some(world.now + self.park_timeout));
        tracing::debug!("stream {sid}: parked until qpn {qpn:#08x} reaches RTR");
        self.make_room(world, qpn);
    }

    /// The queue pair reached RTR: accepts the parked Request of its peer, and rejects the others.
    pub(super) fn unpark(&mut self, world: &mut World<'_>, qpn: u32) {
        let Some(pair) = self.pairs.get(&qpn) else {
            return;
        };
        let parked = pair.parked.clone();
        let examined: Vec<_> = parked
            .into_iter()
            .map(|sid| (sid, self.examine(world, sid, qpn)))
            .collect();
        // The peer may have abandoned all but its latest Request.
        for (sid, outcome) in examined.into_iter().rev() {
            let may_accept = matches!(
                self.pairs.get(&qpn).map(|pair| &pair.phase),
                Some(Phase::Connecting(connecting)) if connecting.waiting_stream.is_none()
            );
            match outcome {
                Ok(()) if may_accept => self.accept_with_rts(world, sid, qpn),
                Ok(()) => self.reject(world, sid, Reason::Connected),
                Err(reason) => self.reject(world, sid, reason),
            }
        }
    }

    /// Accepts the peer's Request once this end is at RTS, because the Reply has attributes that
    /// the program sets there (`rnr_retry`, `max_rd_atomic`). A program that stays at RTR only
    /// receives: it is waited for until it does something else, and not for longer than
    /// [`RTS_GRACE`].
    pub(super) fn accept_with_rts(&mut self, world: &mut World<'_>, sid: u32, qpn: u32) {
        match self.pairs.get_mut(&qpn).map(|pair| &mut pair.phase) {
            Some(Phase::Connecting(connecting)) if matches!(connecting.rts, Rts::Due | Rts::Awaited(_)) => {
                tracing::debug!("stream {sid}: waits until qpn {qpn:#08x} reaches RTS");
                connecting.rts = Rts::Awaited(world.now + RTS_GRACE);
                self.let_wait(world, sid, qpn, RTS_LOOK);
            }
            _ => self.accept(world, sid, qpn),
        }
    }

    /// The time of the next check whether this end still waits at RTR for RTS; `None`: it does not
    /// wait.
    pub(super) fn awaits_rts(&mut self, world: &mut World<'_>, qpn: u32) -> Option<Time> {
        let connecting = connecting(&mut self.pairs, qpn)?;
        let Rts::Awaited(until) = connecting.rts else {
            return None;
        };
        if world.now >= until || world.streams.has_moved_on(connecting.params.qid) {
            tracing::debug!("qpn {qpn:#08x}: its program seems to stay at RTR");
            connecting.rts = Rts::NotExpected;
            return None;
        }
        Some(until.min(world.now + RTS_LOOK))
    }

    /// Keeps the peer's Request for a time, as the only one.
    fn let_wait(&mut self, world: &mut World<'_>, sid: u32, qpn: u32, limit: Duration) {
        let Some(connecting) = connecting(&mut self.pairs, qpn) else {
            return;
        };
        let older = connecting.waiting_stream.replace(sid);
        self.timers.set(Key::Stream(sid), Some(world.now + limit));
        if let Some(older) = older {
            self.reject(world, older, Reason::Busy);
        }
    }

    /// Accepts the peer's Request.
    pub(super) fn accept(&mut self, world: &mut World<'_>, sid: u32, qpn: u32) {
        let Some(Startup::Unanswered {
            mut responder, peer, ..
        }) = self.remove_startup(sid)
        else {
            return;
        };
        let Some(connecting) = connecting(&mut self.pairs, qpn) else {
            world.streams.close(sid, Close::Abort);
            return;
        };
        // An initiator sends nothing until it has the Reply (RFC 5044 §7.1.2). A stream that the
        // initiator closed is not attached.
        let inbox = world.streams.inbox(sid);
        if inbox != Ok(Inbox::Empty) {
            tracing::debug!(
                "stream {sid}: not accepted, its initiator closed it or sent data before the Reply: {inbox:?}"
            );
            world.streams.close(sid, Close::Abort);
            return self.attempt_if_due(world, qpn);
        }
        let local = connecting.identity(qpn, peer.nonce);
        let depths = connecting.depths(self.delivered.into());
        let sent = match responder.accept(depths, &local.emit(), world.now) {
            Ok(Reply { bytes, negotiated }) => world
                .streams
                .send(sid, &bytes)
                .and(negotiated.ok_or(Errno::INVAL)),
            Err(_) => Err(Errno::INVAL),
        };
        let rnr_retry = peer.rnr_retry.unwrap_or(7);
        match sent.and_then(|negotiated| self.attach(world, qpn, Some(sid), Some(negotiated), rnr_retry)) {
            Ok(()) => tracing::debug!(
                "qpn {qpn:#08x}: accepted the request of {:#08x}, stream {sid}",
                peer.from
            ),
            // The initiator closed the stream in the meantime: this end's Request, or the peer's
            // next Request, connects.
            Err(_) => {
                world.streams.close(sid, Close::Abort);
                self.attempt_if_due(world, qpn);
            }
        }
    }

    /// Rejects a Request: sends a Reply with the reason, then closes the stream.
    pub(super) fn reject(&mut self, world: &mut World<'_>, sid: u32, reason: Reason) {
        tracing::debug!("stream {sid}: rejected: {reason:?}");
        if let Some(Startup::Unanswered { mut responder, .. }) = self.remove_startup(sid)
            && let Ok(reply) = responder.reject(&reason.emit(), None)
        {
            let _ = world.streams.send(sid, &reply);
        }
        world.streams.close(sid, Close::Orderly);
    }
}

impl Engine {
    /// Checks whether a queue pair accepts a Request; an error is the reason of the rejection.
    fn examine(&mut self, world: &mut World<'_>, sid: u32, qpn: u32) -> Result<(), Reason> {
        let Some(Startup::Unanswered { peer, ends, .. }) = self.streams.get(&sid) else {
            return Err(Reason::Closed);
        };
        let (peer, ends) = (*peer, *ends);
        let Some(pair) = self.pairs.get_mut(&qpn) else {
            return Err(Reason::Unknown);
        };
        let connecting = match &mut pair.phase {
            Phase::Connecting(connecting) => connecting,
            Phase::Connected { .. } => return Err(Reason::Connected),
            Phase::Idle => return Err(Reason::Busy),
            Phase::Closed => return Err(Reason::Closed),
        };
        let local = connecting.identity(qpn, 0);
        if !local.names(&peer) {
            return Err(Reason::OtherPeer);
        }
        let streams = &mut *world.streams;
        if !self.allow_nat
            && !connecting
                .params
                .peer
                .is_at(&ends, |address| streams.is_own(address))
        {
            if let Some(count) = pair.mismatches.count(world.now, false) {
                tracing::warn!(
                    "qp {qpn:#08x}: refused a connection from {}, since the peer named in ibv_modify_qp is at {} \
                     ({count} requests refused for this qp so far); if an address is translated on the way, set native.allow_nat=true",
                    ends.remote.ip(),
                    connecting.params.peer.address.ip(),
                );
            }
            self.initiate_early(world, qpn);
            return Err(Reason::Address);
        }
        if peer.sq_psn.is_none() {
            if local.sq_psn == Some(peer.rq_psn) {
                connecting.ticket = Some(peer.nonce);
            }
            self.initiate_early(world, qpn);
            return Err(Reason::Busy);
        }
        let has_ticket = connecting.nudge.is_some() && peer.ticket == connecting.nudge;
        let unexamined = local.sq_psn.is_none() && !has_ticket && pair.mismatches.are_exhausted(world.now);
        if !unexamined && local.matches(&peer) {
            return Ok(());
        }
        if let Some(count) = pair.mismatches.count(world.now, !unexamined) {
            tracing::warn!(
                "qp {qpn:#08x}: refused a connection from {}: its PSNs are not those that ibv_modify_qp was given \
                 ({count} requests refused for this qp so far)",
                ends.remote
            );
        }
        if !unexamined {
            return Err(Reason::OtherPeer);
        }
        self.initiate_early(world, qpn);
        Err(Reason::Busy)
    }

    /// Initiates a connection without waiting for the peer's Request, at RTS at the latest. The
    /// number of attempts stays the same: only the first attempt is earlier.
    fn initiate_early(&mut self, world: &mut World<'_>, qpn: u32) {
        let Some(pair) = self.pairs.get_mut(&qpn) else {
            return;
        };
        pair.connect_at_rts = true;
        if let Phase::Connecting(connecting) = &mut pair.phase
            && connecting.attempts == 0
            && connecting.stream.is_none()
            && connecting.next_attempt > world.now
        {
            connecting.next_attempt = world.now;
            if let Rts::Awaited(_) = connecting.rts {
                connecting.rts = Rts::Due;
            }
            self.attempt_if_due(world, qpn);
        }
    }

    /// Rejects parked Requests beyond the limits, for `qpn` and for the process: the oldest Request
    /// of the network with the most Requests, so that no network occupies all places.
    fn make_room(&mut self, world: &mut World<'_>, qpn: u32) {
        let for_pair = |pair: &Pair| pair.parked.iter().copied().collect::<Vec<u32>>();
        if let Some(pair) = self.pairs.get(&qpn)
            && pair.parked.len() > MAX_PARKED_EACH
            && let Some(sid) = self.oldest_of_largest_network(for_pair(pair))
        {
            self.refuse_parked(world, sid);
        }
        if self.parked > self.max_parked
            && let Some(sid) =
                self.oldest_of_largest_network(self.pairs.values().flat_map(for_pair).collect())
        {
            self.refuse_parked(world, sid);
        }
    }

    /// The oldest parked Request of the network that has the most parked Requests.
    fn oldest_of_largest_network(&self, sids: Vec<u32>) -> Option<u32> {
        let mut networks: HashMap<IpAddr, (usize, Reverse<u64>, u32)> = HashMap::new();
        for sid in sids {
            let Some(Startup::Unanswered { ends, order, .. }) = self.streams.get(&sid) else {
                continue;
            };
            let group = networks
                .entry(network(ends.remote))
                .or_insert((0, Reverse(*order), sid));
            group.0 += 1;
            if *order < group.1.0 {
                (group.1, group.2) = (Reverse(*order), sid);
            }
        }
        networks.into_values().max().map(|(_, _, sid)| sid)
    }

    fn refuse_parked(&mut self, world: &mut World<'_>, sid: u32) {
        if let Some(Startup::Unanswered { qpn, .. }) = self.streams.get(&sid) {
            let qpn = *qpn;
            self.initiate_early(world, qpn);
        }
        self.reject(world, sid, Reason::Busy);
    }
}

/// The network of one owner of addresses: an IPv4 address, or the 64 bits of an IPv6 prefix.
fn network(address: SocketAddr) -> IpAddr {
    match address.ip().to_canonical() {
        IpAddr::V4(ip) => ip.into(),
        IpAddr::V6(ip) => std::net::Ipv6Addr::from(u128::from(ip) & !(u128::from(u64::MAX))).into(),
    }
}
