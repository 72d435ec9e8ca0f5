//! The initiator: connection attempts to the peer, and the Replies to them.

use std::time::Duration;

use rustix::io::Errno;

use super::identity::{Identity, Reason};
use super::streams::World;
use super::{
    BACK_OFF, CONNECT_TIMEOUT, ConnectState, Engine, Key, MIN_BUDGET, Notice, Phase, RTS_GRACE, Startup,
    connecting,
};
use crate::mpa_startup::{Accepted, Answer, Close, Depths, Offer, Rtr, Time};
use crate::startup::Initiator;
use urnic_config::Llp;

impl ConnectState {
    /// The program's depths and `spare` Reads, for confirmations of delivery. Kind UC has no Reads.
    pub(super) fn depths(&self, spare: u16) -> Depths {
        if self.params.unreliable {
            return Depths {
                ird: Some(0),
                ord: Some(0),
            };
        }
        Depths {
            ird: Some(u16::from(self.params.ird) + spare),
            ord: self.rts.params().map(|rts| u16::from(rts.ord) + spare),
        }
    }

    /// The private data of this end.
    pub(super) fn identity(&self, qpn: u32, nonce: u64) -> Identity {
        Identity {
            from: qpn,
            to: self.params.peer.qpn,
            unreliable: self.params.unreliable,
            sq_psn: self.rts.params().map(|rts| rts.sq_psn),
            rq_psn: self.params.rq_psn,
            rnr_retry: self.rts.params().map(|rts| rts.rnr_retry),
            nonce,
            ticket: self.ticket,
        }
    }

    /// The end of the retry budget of a send that has waited since `waiting`, at which it fails;
    /// `None` = no end.
    fn budget_end(&self, waiting: Time, connect_grace: Duration) -> Option<Time> {
        let rts = self.rts.params()?;
        if self.params.unreliable {
            return self.release_at(connect_grace);
        }
        let budget = rts.retry_time?.max(connect_grace * MIN_BUDGET);
        Some(self.since.max(waiting) + budget)
    }
}

impl Engine {
    /// Starts an attempt if one is due; stops at the end of the retry budget.
    pub(super) fn attempt_if_due(&mut self, world: &mut World<'_>, qpn: u32) {
        let Some(connecting) = connecting(&mut self.pairs, qpn) else {
            return;
        };
        let qid = connecting.params.qid;
        // A send may be posted at any time: while there is none, this end checks periodically.
        let waiting = world.streams.waiting_since(qid);
        let end = connecting.budget_end(waiting.unwrap_or(world.now), self.connect_grace);
        let over = waiting.is_some() && end.is_some_and(|end| world.now >= end);
        if over && connecting.params.unreliable {
            connecting.released = true;
            self.notices.push(Notice::Open(qid));
            return self.attempt_if_due(world, qpn);
        }
        if over {
            tracing::debug!("qpn {qpn:#08x}: the retry budget is exhausted");
            let peer = connecting.params.peer.address;
            if self.config.llp_facing(peer.ip()) == Llp::Sctp {
                tracing::warn!(
                    "qp {qpn:#08x}: no connection to {peer} over SCTP (the peer must have llp=sctp, too, and an \
                     sctp.transport that fits)"
                );
            }
            if let Some(sid) = connecting.stream {
                self.close_stream(world, sid, Close::Abort);
            }
            self.close_unreachable(qpn, qid);
            return;
        }
        if connecting.stream.is_none() && world.now >= connecting.next_attempt {
            let later = match connecting.waiting_stream {
                // The peer's Request connects, at RTS.
                Some(_) => Some(world.now + RTS_GRACE),
                None => self.awaits_rts(world, qpn),
            };
            match later {
                Some(later) => self.postpone(qpn, later),
                None => self.connect(world, qpn),
            }
        }
        let Some(Phase::Connecting(connecting)) = self.pairs.get(&qpn).map(|pair| &pair.phase) else {
            return;
        };
        let end = match waiting {
            Some(_) => end,
            None => end.map(|_| world.now + BACK_OFF.1),
        };
        let next_attempt = connecting.stream.is_none().then_some(connecting.next_attempt);
        self.timers
            .set(Key::Pair(qpn), next_attempt.into_iter().chain(end).min());
    }

    /// The next attempt is at this time.
    fn postpone(&mut self, qpn: u32, next_attempt: Time) {
        if let Some(connecting) = connecting(&mut self.pairs, qpn) {
            connecting.next_attempt = next_attempt;
        }
    }

    fn connect(&mut self, world: &mut World<'_>, qpn: u32) {
        let Some(connecting) = connecting(&mut self.pairs, qpn) else {
            return;
        };
        let peer = connecting.params.peer;
        let llp = match connecting.params.unreliable {
            true => Llp::Tcp,
            false => self.config.llp_facing(peer.address.ip()),
        };
        let source = peer.source.filter(|_| connecting.from_source);
        match world.streams.connect(llp, peer.address, source) {
            Ok(sid) => {
                tracing::debug!(
                    "qpn {qpn:#08x}: connects to {:#08x} at {}, {} stream {sid}",
                    peer.qpn,
                    peer.address,
                    llp.name()
                );
                connecting.stream = Some(sid);
                self.streams.insert(sid, Startup::Connecting { qpn, llp });
                self.timers
                    .set(Key::Stream(sid), Some(world.now + CONNECT_TIMEOUT));
            }
            Err(errno) => self.connect_failed(world, qpn, errno),
        }
    }

    /// A stream connected, or failed to connect.
    pub(super) fn stream_connected(&mut self, world: &mut World<'_>, sid: u32, result: Result<(), Errno>) {
        let Some(Startup::Connecting { qpn, llp }) = self.streams.get(&sid) else {
            return;
        };
        let (qpn, llp) = (*qpn, *llp);
        if let Err(errno) = result {
            self.close_stream(world, sid, Close::Abort);
            self.connect_failed(world, qpn, errno);
        } else if let Err(errno) = self.send_request(world, qpn, sid, llp) {
            self.close_stream(world, sid, Close::Abort);
            self.request_failed(world, qpn, errno);
        }
    }

    /// A stream failed to connect. The route to the peer may not accept the GID's address as a
    /// source: in the next attempt the host chooses the source.
    pub(super) fn connect_failed(&mut self, world: &mut World<'_>, qpn: u32, why: impl std::fmt::Display) {
        if let Some(connecting) = connecting(&mut self.pairs, qpn) {
            connecting.from_source = !connecting.from_source;
        }
        self.request_failed(world, qpn, why);
    }

    fn send_request(&mut self, world: &mut World<'_>, qpn: u32, sid: u32, llp: Llp) -> Result<(), Errno> {
        let nonce = self.nonce();
        let Some(connecting) = connecting(&mut self.pairs, qpn) else {
            return Err(Errno::INVAL);
        };
        let local = connecting.identity(qpn, nonce);
        if local.sq_psn.is_none() {
            connecting.nudge = Some(nonce);
        }
        // Without confirmations, limits on Reads come from modify_qp at both ends (design: native
        // connections).
        let depths = match self.delivered {
            true => connecting.depths(1),
            false => Depths::default(),
        };
        let offer = Offer {
            peer_to_peer: true,
            depths,
            max_ird: u16::MAX,
        };
        let (initiator, request) =
            Initiator::new(llp, self.settings.clone(), Some(offer), &local.emit(), world.now)
                .map_err(|_| Errno::INVAL)?;
        world.streams.send(sid, &request)?;
        world.streams.receive(sid, initiator.bytes_needed())?;
        self.timers.set(Key::Stream(sid), Some(initiator.deadline()));
        self.streams.insert(
            sid,
            Startup::Requested {
                qpn,
                initiator: Box::new(initiator),
                local,
            },
        );
        Ok(())
    }

    /// Takes bytes of the Reply.
    pub(super) fn reply_received(&mut self, world: &mut World<'_>, sid: u32, bytes: Result<&[u8], Errno>) {
        let Some(Startup::Requested {
            qpn,
            initiator,
            local,
        }) = self.streams.get_mut(&sid)
        else {
            return;
        };
        let (qpn, local) = (*qpn, *local);
        match initiator.take(bytes) {
            Ok(Some(Answer::Accepted(accepted))) => self.accepted(world, sid, qpn, local, accepted),
            Ok(Some(Answer::Rejected(rejected))) => {
                let reason = Reason::parse(&rejected.private_data);
                tracing::debug!("qpn {qpn:#08x}: its request was rejected: {reason:?}");
                self.close_stream(world, sid, Close::Orderly);
                self.rejected(world, qpn, reason);
            }
            Ok(None) => {
                let bytes_needed = initiator.bytes_needed();
                if let Err(errno) = world.streams.receive(sid, bytes_needed) {
                    self.close_stream(world, sid, Close::Abort);
                    self.request_failed(world, qpn, errno);
                }
            }
            Err(failure) => {
                self.close_stream(world, sid, failure.close);
                self.request_failed(world, qpn, failure);
            }
        }
    }

    fn accepted(&mut self, world: &mut World<'_>, sid: u32, qpn: u32, local: Identity, accepted: Accepted) {
        let Some(peer) = Identity::parse(&accepted.private_data).filter(|peer| local.matches(peer)) else {
            tracing::debug!("qpn {qpn:#08x}: rejected the Reply, which came from another queue pair");
            self.close_stream(world, sid, Close::Abort);
            self.rejected(world, qpn, Reason::OtherPeer);
            return;
        };
        let mut negotiated = accepted.negotiated;
        // Revision 1 negotiates no RTR message, but both ends are urnic, which uses one. Over SCTP
        // there is no fence to open.
        if negotiated.llp == Llp::Tcp && negotiated.terminate.is_none() {
            negotiated.rtr = negotiated.rtr.or(Some(Rtr::Write));
        }
        let rnr_retry = peer.rnr_retry.unwrap_or(7);
        match self.attach(world, qpn, Some(sid), Some(negotiated), rnr_retry) {
            Ok(()) => tracing::debug!("qpn {qpn:#08x}: connected, stream {sid}"),
            Err(errno) => {
                self.close_stream(world, sid, Close::Abort);
                self.request_failed(world, qpn, errno);
            }
        }
    }

    /// The peer rejected the Request.
    fn rejected(&mut self, world: &mut World<'_>, qpn: u32, reason: Reason) {
        let Some(connecting) = connecting(&mut self.pairs, qpn) else {
            return;
        };
        connecting.stream = None;
        if reason == Reason::Address {
            tracing::warn!(
                "qp {qpn:#08x}: its peer {:#08x} at {} refuses the connection: the source address is not that of the GID that the peer \
                 was given; if an address is translated on the way, set native.allow_nat=true at the peer",
                connecting.params.peer.qpn,
                connecting.params.peer.address
            );
        }
        // The peer may reject this Request because this end accepts the peer's Request instead.
        if reason.is_temporary() || connecting.waiting_stream.is_some() {
            self.request_failed(world, qpn, "rejected");
        } else {
            self.rejected_for_good(world, qpn);
        }
    }

    /// An attempt failed: accept the peer's Request if one waits, else retry later.
    pub(super) fn request_failed(&mut self, world: &mut World<'_>, qpn: u32, why: impl std::fmt::Display) {
        let Some(connecting) = connecting(&mut self.pairs, qpn) else {
            return;
        };
        connecting.stream = None;
        let pause = BACK_OFF.0 * 2u32.saturating_pow(connecting.attempts.min(16));
        connecting.attempts += 1;
        connecting.next_attempt = world.now + pause.min(connecting.longest_pause());
        tracing::debug!("qpn {qpn:#08x}: attempt {} failed: {why}", connecting.attempts);
        match connecting.waiting_stream.take() {
            Some(sid) => self.accept_with_rts(world, sid, qpn),
            None => self.attempt_if_due(world, qpn),
        }
    }
}
