//! Our calls.

use std::time::Duration;

use rustix::io::Errno;

use super::identity::{Identity, Reason};
use super::state::{BACK_OFF, Call, DIAL_TIMEOUT, Engine, Key, LEAST_BUDGET, Pair, Phase, Seek};
use super::streams::World;
use crate::mpa_startup::{Accepted, Answer, Close, Depths, Initiator, Offer, Rtr, Time};

impl Seek {
    /// How we introduce ourselves.
    pub(super) fn identity(&self, qpn: u32, nonce: u64) -> Identity {
        Identity {
            from: qpn,
            to: self.params.peer.qpn,
            sq_psn: self.rts.map(|rts| rts.sq_psn),
            rq_psn: self.params.rq_psn,
            rnr_retry: self.rts.map(|rts| rts.rnr_retry),
            nonce,
            ticket: self.ticket,
        }
    }

    /// When sends have waited long enough; `None` = never.
    fn budget_end(&self, call_grace: Duration) -> Option<Time> {
        let rts = self.rts?;
        let budget = rts.timeout? * (u32::from(rts.retry_cnt) + 1);
        Some(self.since + budget.max(call_grace * LEAST_BUDGET))
    }
}

impl Engine {
    /// Calls if it is time; gives up if it is too late.
    pub(super) fn seek(&mut self, world: &mut World<'_>, qpn: u32) {
        let Some(Pair {
            phase: Phase::Seeking(seek),
            ..
        }) = self.pairs.get(&qpn)
        else {
            return;
        };
        let (qid, end) = (seek.params.qid, seek.budget_end(self.call_grace));
        let asking = seek
            .call
            .is_some_and(|sid| matches!(self.calls.get(&sid), Some(Call::Asking { .. })));
        // A peer that took our call lives, and has its reasons: the call itself has a deadline.
        if !asking && end.is_some_and(|end| world.now >= end) && world.streams.is_waiting(qid) {
            tracing::debug!("qpn {qpn:#08x}: the retry budget is spent");
            if let Some(sid) = seek.call {
                self.hang_up(world, sid, Close::Abort);
            }
            self.give_up(qpn, qid);
            return;
        }
        if seek.call.is_none() && world.now >= seek.next_call {
            self.call(world, qpn);
        }
        let Some(Pair {
            phase: Phase::Seeking(seek),
            ..
        }) = self.pairs.get(&qpn)
        else {
            return;
        };
        // Past the end of the budget a send may be posted at any time: look again every now and
        // then.
        let end = end.map(|end| end.max(world.now + BACK_OFF.1));
        let next_call = seek.call.is_none().then_some(seek.next_call);
        self.timers
            .set(Key::Pair(qpn), next_call.into_iter().chain(end).min());
    }

    fn call(&mut self, world: &mut World<'_>, qpn: u32) {
        let Some(Pair {
            phase: Phase::Seeking(seek),
            ..
        }) = self.pairs.get_mut(&qpn)
        else {
            return;
        };
        let peer = seek.params.peer;
        match world
            .streams
            .connect(peer.address, peer.source.filter(|_| seek.from_source))
        {
            Ok(sid) => {
                tracing::debug!(
                    "qpn {qpn:#08x}: connects to {:#08x} at {}, stream {sid}",
                    peer.qpn,
                    peer.address
                );
                seek.call = Some(sid);
                self.calls.insert(sid, Call::Dialing { qpn });
                self.timers.set(Key::Call(sid), Some(world.now + DIAL_TIMEOUT));
            }
            Err(errno) => self.connect_failed(world, qpn, errno),
        }
    }

    /// TCP connected, or did not.
    pub fn connected(&mut self, world: &mut World<'_>, sid: u32, result: Result<(), Errno>) {
        let Some(Call::Dialing { qpn }) = self.calls.get(&sid) else {
            return;
        };
        let qpn = *qpn;
        if let Err(errno) = result {
            self.hang_up(world, sid, Close::Abort);
            self.connect_failed(world, qpn, errno);
        } else if let Err(errno) = self.ask(world, qpn, sid) {
            self.hang_up(world, sid, Close::Abort);
            self.request_failed(world, qpn, errno);
        }
    }

    /// TCP did not connect. The route to the peer may not take our GID's address for a source: the
    /// next call lets the host choose.
    pub(super) fn connect_failed(&mut self, world: &mut World<'_>, qpn: u32, why: impl std::fmt::Display) {
        if let Some(Pair {
            phase: Phase::Seeking(seek),
            ..
        }) = self.pairs.get_mut(&qpn)
        {
            seek.from_source = !seek.from_source;
        }
        self.request_failed(world, qpn, why);
    }

    fn ask(&mut self, world: &mut World<'_>, qpn: u32, sid: u32) -> Result<(), Errno> {
        let nonce = self.nonce();
        let Some(Pair {
            phase: Phase::Seeking(seek),
            ..
        }) = self.pairs.get_mut(&qpn)
        else {
            return Err(Errno::INVAL);
        };
        let us = seek.identity(qpn, nonce);
        if us.sq_psn.is_none() {
            seek.nudge = Some(nonce);
        }
        // Limits on Reads come from modify_qp at both ends (design: native connections).
        let offer = Offer {
            peer_to_peer: true,
            depths: Depths::default(),
            max_ird: u16::MAX,
        };
        let (initiator, request) = Initiator::new(self.settings.clone(), Some(offer), &us.emit(), world.now)
            .map_err(|_| Errno::INVAL)?;
        world.streams.send(sid, &request)?;
        world.streams.receive(sid, initiator.wants())?;
        self.timers.set(Key::Call(sid), Some(initiator.deadline()));
        self.calls.insert(
            sid,
            Call::Asking {
                qpn,
                initiator: Box::new(initiator),
                us,
            },
        );
        Ok(())
    }

    /// Bytes of the Reply to our call.
    pub(super) fn hear_reply(&mut self, world: &mut World<'_>, sid: u32, bytes: Result<&[u8], Errno>) {
        let Some(Call::Asking { qpn, initiator, us }) = self.calls.get_mut(&sid) else {
            return;
        };
        let (qpn, us) = (*qpn, *us);
        match initiator.take(bytes) {
            Ok(Some(Answer::Accepted(accepted))) => self.accepted(world, sid, qpn, us, accepted),
            Ok(Some(Answer::Rejected(rejected))) => {
                let reason = Reason::parse(&rejected.private_data);
                tracing::debug!("qpn {qpn:#08x}: its request was rejected: {reason:?}");
                self.hang_up(world, sid, Close::Orderly);
                self.rejected(world, qpn, reason);
            }
            Ok(None) => {
                let wants = initiator.wants();
                if let Err(errno) = world.streams.receive(sid, wants) {
                    self.hang_up(world, sid, Close::Abort);
                    self.request_failed(world, qpn, errno);
                }
            }
            Err(failure) => {
                self.hang_up(world, sid, failure.close);
                self.request_failed(world, qpn, failure);
            }
        }
    }

    fn accepted(&mut self, world: &mut World<'_>, sid: u32, qpn: u32, us: Identity, accepted: Accepted) {
        let Some(peer) = Identity::parse(&accepted.private_data).filter(|peer| us.meets(peer)) else {
            tracing::debug!("qpn {qpn:#08x}: another queue pair answered its request");
            self.hang_up(world, sid, Close::Abort);
            self.rejected(world, qpn, Reason::Elsewhere);
            return;
        };
        let mut negotiated = accepted.negotiated;
        // Where only revision 1 is spoken nothing is said about an RTR message, but both ends are
        // ours.
        negotiated.rtr = negotiated
            .rtr
            .or(Some(Rtr::Write))
            .filter(|_| negotiated.terminate.is_none());
        let rnr_retry = peer.rnr_retry.unwrap_or(7);
        match self.attach(world, qpn, Some(sid), Some(negotiated), rnr_retry) {
            Ok(()) => tracing::debug!("qpn {qpn:#08x}: connected, stream {sid}"),
            Err(errno) => {
                self.hang_up(world, sid, Close::Abort);
                self.request_failed(world, qpn, errno);
            }
        }
    }

    /// The peer does not want this call.
    fn rejected(&mut self, world: &mut World<'_>, qpn: u32, reason: Reason) {
        let Some(Pair {
            phase: Phase::Seeking(seek),
            ..
        }) = self.pairs.get_mut(&qpn)
        else {
            return;
        };
        seek.call = None;
        if reason == Reason::Address {
            tracing::warn!(
                "qp {qpn:#08x}: its peer {:#08x} at {} refuses the connection: the source address is not that of the GID that the peer \
                 was given; if an address is translated on the way, set native.allow_nat=true at the peer",
                seek.params.peer.qpn,
                seek.params.peer.address
            );
        }
        // The peer may not want our call since its own is under way.
        if reason.is_passing() || seek.held.is_some() {
            self.request_failed(world, qpn, "turned down");
        } else {
            let qid = seek.params.qid;
            self.give_up(qpn, qid);
        }
    }

    /// Our call came to nothing: take the peer's if there is one, else call again later.
    pub(super) fn request_failed(&mut self, world: &mut World<'_>, qpn: u32, why: impl std::fmt::Display) {
        let Some(Pair {
            phase: Phase::Seeking(seek),
            ..
        }) = self.pairs.get_mut(&qpn)
        else {
            return;
        };
        seek.call = None;
        let pause = BACK_OFF.0 * 2u32.saturating_pow(seek.attempts.min(16));
        seek.attempts += 1;
        seek.next_call = world.now + pause.min(BACK_OFF.1);
        tracing::debug!("qpn {qpn:#08x}: attempt {} failed: {why}", seek.attempts);
        match seek.held.take() {
            Some(sid) => self.accept(world, sid, qpn),
            None => self.seek(world, qpn),
        }
    }
}
