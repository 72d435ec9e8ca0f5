//! The peer's calls, and those of strangers.

use rustix::io::Errno;

use super::identity::{Identity, Reason};
use super::state::{Call, Engine, Key, MAX_LISTENING, Pair, Phase};
use super::streams::World;
use crate::carrier::{Due, Inbox, hear_request};
use crate::mpa_startup::{Close, Depths, Reply, Responder};

impl Engine {
    /// A listener has a new stream.
    pub fn arrived(&mut self, world: &mut World<'_>, lid: u32, sid: u32) {
        if !self.numbers.has_listener(lid) {
            world.streams.close(sid, Close::Abort);
            return;
        }
        if self.listening.len() >= MAX_LISTENING
            && let Some((_, oldest)) = self.listening.pop_first()
        {
            tracing::debug!("stream {oldest}: closed: too many streams without a Request");
            self.hang_up(world, oldest, Close::Abort);
        }
        let responder = Responder::new(self.settings.clone(), world.now);
        if world.streams.receive(sid, responder.wants()).is_err() {
            world.streams.close(sid, Close::Abort);
            return;
        }
        self.arrivals += 1;
        self.listening.insert(self.arrivals, sid);
        self.timers.set(Key::Call(sid), responder.deadline());
        self.calls.insert(
            sid,
            Call::Listening {
                responder: Box::new(responder),
                order: self.arrivals,
            },
        );
    }

    /// Bytes of a Request.
    pub(super) fn hear_request(&mut self, world: &mut World<'_>, sid: u32, bytes: Result<&[u8], Errno>) {
        let Some(Call::Listening { responder, .. }) = self.calls.get_mut(&sid) else {
            return;
        };
        match hear_request(responder, world.streams, sid, bytes) {
            Due::Whole => self.answer(world, sid),
            Due::More => {}
            Due::HangUp(how) => self.hang_up(world, sid, how),
        }
    }

    /// A Request is whole: whom does it want, and what is that one up to?
    fn answer(&mut self, world: &mut World<'_>, sid: u32) {
        let Some(Call::Listening { responder, order }) = self.forget(sid) else {
            return;
        };
        let caller = responder
            .request()
            .and_then(|request| Identity::parse(&request.private_data));
        let qpn = caller.map_or(0, |caller| caller.to);
        let nobody = Identity {
            from: 0,
            to: 0,
            sq_psn: None,
            rq_psn: 0,
            rnr_retry: None,
            nonce: 0,
            ticket: None,
        };
        let Ok(ends) = world.streams.ends(sid) else {
            return world.streams.close(sid, Close::Abort);
        };
        self.calls.insert(
            sid,
            Call::Waiting {
                qpn,
                responder,
                caller: caller.unwrap_or(nobody),
                ends,
                order,
            },
        );
        let Some(caller) = caller else {
            return self.reject(world, sid, Reason::Foreign);
        };
        tracing::debug!(
            "stream {sid}: {:#08x} requests a connection with {qpn:#08x}",
            caller.from
        );
        match self.pairs.get(&qpn).map(|pair| &pair.phase) {
            None => self.reject(world, sid, Reason::Unknown),
            // A nudge needs no place: it is remembered as such.
            Some(Phase::Idle) if caller.sq_psn.is_none() => {
                self.hurry(world, qpn);
                self.reject(world, sid, Reason::Busy);
            }
            Some(Phase::Idle) => self.park(world, sid, qpn),
            Some(Phase::Seeking(seek)) => {
                let ours = seek.call.and_then(|ours| self.calls.get(&ours));
                // A nudge connects nothing, so it goes before nothing.
                let goes_before = matches!(ours, Some(Call::Asking { us, .. })
                    if us.sq_psn.is_some() && us.goes_before(&caller));
                match self.examine(world, sid, qpn) {
                    Err(reason) => self.reject(world, sid, reason),
                    Ok(()) if goes_before => self.hold(world, sid, qpn),
                    Ok(()) => self.accept(world, sid, qpn),
                }
            }
            Some(Phase::Connected { .. }) => self.reject(world, sid, Reason::Connected),
            Some(Phase::Closed) => self.reject(world, sid, Reason::Gone),
        }
    }

    /// Keeps a call for a queue pair that is not at RTR.
    fn park(&mut self, world: &mut World<'_>, sid: u32, qpn: u32) {
        let Some(pair) = self.pairs.get_mut(&qpn) else {
            return;
        };
        pair.parked.push_back(sid);
        self.parked += 1;
        self.timers
            .set(Key::Call(sid), Some(world.now + self.park_timeout));
        tracing::debug!("stream {sid}: parked until qpn {qpn:#08x} reaches RTR");
        self.make_room(world, qpn);
    }

    /// The queue pair reached RTR: takes the parked call of its peer, and rejects the others.
    pub(super) fn unpark(&mut self, world: &mut World<'_>, qpn: u32) {
        let Some(pair) = self.pairs.get(&qpn) else {
            return;
        };
        let parked = pair.parked.clone();
        let examined: Vec<_> = parked
            .into_iter()
            .map(|sid| (sid, self.examine(world, sid, qpn)))
            .collect();
        // The latest call is the one the peer still cares for.
        for (sid, outcome) in examined.into_iter().rev() {
            let seeks = matches!(self.pairs.get(&qpn), Some(pair) if matches!(pair.phase, Phase::Seeking(_)));
            match outcome {
                Ok(()) if seeks => self.accept(world, sid, qpn),
                Ok(()) => self.reject(world, sid, Reason::Connected),
                Err(reason) => self.reject(world, sid, reason),
            }
        }
    }

    /// Keeps the peer's call while ours, which goes before, is not answered.
    fn hold(&mut self, world: &mut World<'_>, sid: u32, qpn: u32) {
        let Some(Pair {
            phase: Phase::Seeking(seek),
            ..
        }) = self.pairs.get_mut(&qpn)
        else {
            return;
        };
        tracing::debug!("stream {sid}: crosses our own request, which has precedence");
        let older = seek.held.replace(sid);
        self.timers
            .set(Key::Call(sid), Some(world.now + self.settings.initiator_timeout));
        if let Some(older) = older {
            self.reject(world, older, Reason::Busy);
        }
    }

    /// Takes the peer's call.
    pub(super) fn accept(&mut self, world: &mut World<'_>, sid: u32, qpn: u32) {
        let Some(Call::Waiting {
            mut responder,
            caller,
            ..
        }) = self.forget(sid)
        else {
            return;
        };
        let Some(Pair {
            phase: Phase::Seeking(seek),
            ..
        }) = self.pairs.get_mut(&qpn)
        else {
            world.streams.close(sid, Close::Abort);
            return;
        };
        // A caller sends nothing until it has our Reply (RFC 5044 §7.1.2); one that closed it is
        // not worth a connection.
        let inbox = world.streams.inbox(sid);
        if inbox != Ok(Inbox::Empty) {
            tracing::debug!(
                "stream {sid}: not accepted, its initiator closed it or sent data before the Reply: {inbox:?}"
            );
            world.streams.close(sid, Close::Abort);
            return self.seek(world, qpn);
        }
        let us = seek.identity(qpn, caller.nonce);
        // Told only to a caller that gives numbers of its own; ours never do.
        let depths = Depths {
            ird: Some(seek.params.ird.into()),
            ord: seek.rts.map(|rts| rts.ord.into()),
        };
        let sent = match responder.accept(depths, &us.emit(), world.now) {
            Ok(Reply { bytes, negotiated }) => world
                .streams
                .send(sid, &bytes)
                .and(negotiated.ok_or(Errno::INVAL)),
            Err(_) => Err(Errno::INVAL),
        };
        let rnr_retry = caller.rnr_retry.unwrap_or(7);
        match sent.and_then(|negotiated| self.attach(world, qpn, Some(sid), Some(negotiated), rnr_retry)) {
            Ok(()) => tracing::debug!(
                "qpn {qpn:#08x}: accepted the request of {:#08x}, stream {sid}",
                caller.from
            ),
            // The caller closed it meanwhile: our own call, or its next one, will do.
            Err(_) => {
                world.streams.close(sid, Close::Abort);
                self.seek(world, qpn);
            }
        }
    }

    /// Turns a call down: a rejecting Reply that says why, then the end.
    pub(super) fn reject(&mut self, world: &mut World<'_>, sid: u32, reason: Reason) {
        tracing::debug!("stream {sid}: rejected: {reason:?}");
        if let Some(Call::Waiting { mut responder, .. }) = self.forget(sid)
            && let Ok(reply) = responder.reject(&reason.emit(), None)
        {
            let _ = world.streams.send(sid, &reply);
        }
        world.streams.close(sid, Close::Orderly);
    }
}
