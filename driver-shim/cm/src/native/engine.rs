//! The lifecycle of queue pairs (added, RTR, RTS, attached, removed), timers, and streams in
//! start-up.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use rustix::io::Errno;

use super::identity::Reason;
use super::numbers::Numbers;
use super::psn_mismatches::PsnMismatches;
use super::rnr::rnr_timeout;
use super::state::{
    ConnectState, Engine, Key, Notice, Pair, PeerParams, Phase, RTS_GRACE, RTS_LOOK, RtsParams, Startup,
};
use super::streams::{Attachment, World};
use crate::mpa_startup::{Close, Negotiated, Settings, Time};
use crate::timers::Timers;
use urnic_config::{Config, RtrTypes};

impl Engine {
    /// Creates the engine of the process; `seed` is random and secret.
    pub fn new(config: &Config, seed: u128) -> Engine {
        let native = &config.native;
        // The RTR message that opens the responder's fence is a zero-length Write: it needs no
        // buffer and no Read (design: native connections).
        let rtr = RtrTypes {
            send: false,
            write: true,
            read: false,
        };
        Engine {
            settings: Settings {
                rtr,
                ..Settings::from(&config.mpa)
            },
            connect_grace: native.call_grace,
            park_timeout: native.park_timeout,
            max_parked: native.max_parked,
            allow_nat: native.allow_nat,
            delivered: config.completion.is_delivered_on_native(),
            numbers: Numbers::new(native.listen, native.port_range.clone()),
            pairs: HashMap::new(),
            connected: HashMap::new(),
            streams: HashMap::new(),
            without_request: BTreeMap::new(),
            arrivals: 0,
            parked: 0,
            timers: Timers::default(),
            seed,
            nonces: 0,
            notices: Vec::new(),
        }
    }

    /// Takes a number for a new queue pair. Requests for it are parked from now on.
    ///
    /// # Errors
    /// The errors of [`Streams::listen`](super::Streams::listen).
    pub fn add_queue_pair(&mut self, world: &mut World<'_>) -> Result<u32, Errno> {
        let qpn = self.numbers.take(world.streams)?;
        self.pairs.insert(qpn, Pair::new());
        Ok(qpn)
    }

    /// Removes a destroyed queue pair; its number may be used again.
    pub fn remove_queue_pair(&mut self, world: &mut World<'_>, qpn: u32) {
        self.retire(world, qpn, false);
        if self.pairs.remove(&qpn).is_some() {
            self.numbers.release(qpn);
        }
    }

    /// The queue pair reached RTR.
    pub fn reached_rtr(&mut self, world: &mut World<'_>, qpn: u32, params: PeerParams) {
        let Some(pair) = self.pairs.get_mut(&qpn) else {
            return;
        };
        let peer = params.peer;
        tracing::debug!(
            "qpn {qpn:#08x}: its peer is {:#08x} at {}",
            peer.qpn,
            peer.address
        );
        let wait = if peer.we_initiate {
            RTS_LOOK
        } else {
            self.connect_grace
        };
        let mut connecting = ConnectState::new(params, world.now, world.now + wait);
        connecting.rts_until = peer.we_initiate.then_some(world.now + RTS_GRACE);
        pair.phase = Phase::Connecting(Box::new(connecting));
        if peer.is_self {
            // Its own attributes, those of RTS, are the peer's.
            return;
        }
        self.timers.set(Key::Pair(qpn), Some(world.now + wait));
        self.unpark(world, qpn);
    }

    /// The queue pair reached RTS.
    pub fn reached_rts(&mut self, world: &mut World<'_>, qpn: u32, rts: RtsParams) {
        if let Some((_, known)) = self.pairs.get_mut(&qpn).and_then(|pair| pair.again.as_mut()) {
            *known = Some(rts);
        }
        let Some(Pair {
            phase: Phase::Connecting(connecting),
            connect_at_rts,
            ..
        }) = self.pairs.get_mut(&qpn)
        else {
            return;
        };
        connecting.rts = Some(rts);
        connecting.since = world.now;
        if connecting.params.peer.is_self {
            let qid = connecting.params.qid;
            return self.loop_back(world, qpn, qid, rts.rnr_retry);
        }
        if (connecting.params.peer.we_initiate || *connect_at_rts)
            && connecting.stream.is_none()
            && connecting.attempts == 0
        {
            connecting.next_attempt = world.now;
        }
        match self.acceptable(qpn) {
            Some(sid) => self.accept(world, sid, qpn),
            None => self.attempt_if_due(world, qpn),
        }
    }

    /// Ends the connection of a queue pair that failed, or that was reset and may connect again
    /// (`may_reconnect`).
    pub fn retire(&mut self, world: &mut World<'_>, qpn: u32, may_reconnect: bool) {
        let Some(pair) = self.pairs.get_mut(&qpn) else {
            return;
        };
        let phase = std::mem::replace(
            &mut pair.phase,
            if may_reconnect { Phase::Idle } else { Phase::Closed },
        );
        (pair.mismatches, pair.connect_at_rts, pair.again) = (PsnMismatches::default(), false, None);
        let mut rejected: Vec<u32> = if may_reconnect {
            Vec::new()
        } else {
            pair.parked.iter().copied().collect()
        };
        self.timers.set(Key::Pair(qpn), None);
        match phase {
            Phase::Connecting(connecting) => {
                rejected.extend(connecting.held);
                if let Some(sid) = connecting.stream {
                    self.close_stream(world, sid, Close::Abort);
                }
            }
            Phase::Connected { qid, .. } => {
                self.connected.remove(&qid);
            }
            Phase::Idle | Phase::Closed => {}
        }
        for sid in rejected {
            self.reject(world, sid, Reason::Closed);
        }
    }

    /// The time that Sends of the peer of a connected queue pair wait for a posted receive, after
    /// this end changed its `min_rnr_timer`. `None`: not connected.
    pub fn rnr_timeout(&self, qpn: u32, min_rnr_timer: u8) -> Option<Option<Duration>> {
        match self.pairs.get(&qpn)?.phase {
            Phase::Connected { rnr_retry, .. } => Some(rnr_timeout(rnr_retry, min_rnr_timer)),
            _ => None,
        }
    }

    /// The queue pair received its first FPDU: the fence opens.
    pub fn first_fpdu(&mut self, qid: u32) {
        let Some(qpn) = self.connected.get(&qid) else {
            return;
        };
        if let Some(Pair {
            phase: Phase::Connected { fenced, .. },
            ..
        }) = self.pairs.get_mut(qpn)
            && std::mem::take(fenced)
        {
            tracing::debug!("qpn {qpn:#08x}: received the first FPDU");
            self.timers.set(Key::Pair(*qpn), None);
            self.notices.push(Notice::Open(qid));
        }
    }

    /// The requested bytes of a stream arrived, or fewer if the peer closed it; or an error.
    pub fn received(&mut self, world: &mut World<'_>, sid: u32, bytes: Result<&[u8], Errno>) {
        match self.streams.get(&sid) {
            Some(Startup::Requested { .. }) => self.reply_received(world, sid, bytes),
            Some(Startup::Accepted { .. }) => self.request_received(world, sid, bytes),
            Some(Startup::Connecting { .. } | Startup::Unanswered { .. }) | None => {}
        }
    }

    /// A stream has ended.
    pub fn closed(&mut self, world: &mut World<'_>, sid: u32) {
        match self.streams.get(&sid) {
            Some(Startup::Connecting { qpn }) => {
                let qpn = *qpn;
                self.close_stream(world, sid, Close::Abort);
                self.connect_failed(world, qpn, "the connection ended");
            }
            Some(Startup::Requested { qpn, .. }) => {
                let qpn = *qpn;
                self.close_stream(world, sid, Close::Abort);
                self.request_failed(world, qpn, "the connection ended");
            }
            Some(Startup::Accepted { .. } | Startup::Unanswered { .. }) => {
                self.close_stream(world, sid, Close::Abort)
            }
            None => {}
        }
    }

    /// Handles timers that are due. Returns the time of the next one.
    pub fn tick(&mut self, world: &mut World<'_>) -> Option<Time> {
        while let Some(key) = self.timers.due(world.now) {
            match key {
                Key::Pair(qpn) => self.pair_timer(world, qpn),
                Key::Stream(sid) => self.startup_timed_out(world, sid),
            }
        }
        self.timers.next()
    }

    /// The time of the next timer.
    pub fn deadline(&self) -> Option<Time> {
        self.timers.next()
    }

    /// Takes the queued notices.
    pub fn notices(&mut self) -> Vec<Notice> {
        std::mem::take(&mut self.notices)
    }

    pub(super) fn pair_timer(&mut self, world: &mut World<'_>, qpn: u32) {
        match self.pairs.get(&qpn).map(|pair| &pair.phase) {
            Some(Phase::Connecting(_)) => self.attempt_if_due(world, qpn),
            Some(Phase::Connected {
                qid, fenced: true, ..
            }) => {
                let qid = *qid;
                tracing::debug!(
                    "qpn {qpn:#08x}: timed out while waiting for the first FPDU of the initiator"
                );
                self.first_fpdu_missing(qpn, qid);
            }
            _ => {}
        }
    }

    pub(super) fn startup_timed_out(&mut self, world: &mut World<'_>, sid: u32) {
        match self.streams.get(&sid) {
            Some(Startup::Connecting { qpn }) => {
                let qpn = *qpn;
                self.close_stream(world, sid, Close::Abort);
                self.connect_failed(world, qpn, "the TCP connection timed out");
            }
            Some(Startup::Requested { qpn, .. }) => {
                let qpn = *qpn;
                self.close_stream(world, sid, Close::Abort);
                self.request_failed(world, qpn, "the Reply timed out");
            }
            Some(Startup::Accepted { .. }) => {
                tracing::debug!("stream {sid}: closed: the MPA Request timed out");
                self.close_stream(world, sid, Close::Abort);
            }
            Some(Startup::Unanswered { qpn, .. }) => {
                let qpn = *qpn;
                if self.acceptable(qpn) != Some(sid) {
                    self.reject(world, sid, Reason::Busy);
                } else if let Some(next) = self.awaits_rts(world, qpn) {
                    self.timers.set(Key::Stream(sid), Some(next));
                } else {
                    self.accept(world, sid, qpn);
                }
            }
            None => {}
        }
    }

    /// Closes a queue pair whose peer cannot be reached.
    pub(super) fn close_unreachable(&mut self, qpn: u32, qid: u32) {
        if let Some(pair) = self.pairs.get_mut(&qpn) {
            pair.phase = Phase::Closed;
        }
        self.connected.remove(&qid);
        self.timers.set(Key::Pair(qpn), None);
        self.notices.push(Notice::Unreachable(qid));
    }

    /// A number that a peer cannot predict.
    pub(super) fn nonce(&mut self) -> u64 {
        self.nonces += 1;
        let mut hasher = DefaultHasher::new();
        (self.seed, self.nonces).hash(&mut hasher);
        hasher.finish()
    }

    /// Closes a stream in start-up and removes it.
    pub(super) fn close_stream(&mut self, world: &mut World<'_>, sid: u32, how: Close) {
        self.remove_startup(sid);
        world.streams.close(sid, how);
    }

    /// Removes a stream that is no longer in start-up: it is closed, or attached.
    pub(super) fn remove_startup(&mut self, sid: u32) -> Option<Startup> {
        self.timers.set(Key::Stream(sid), None);
        let startup = self.streams.remove(&sid)?;
        match &startup {
            Startup::Accepted { order, .. } => {
                self.without_request.remove(order);
            }
            Startup::Unanswered { qpn, .. } => {
                if let Some(pair) = self.pairs.get_mut(qpn) {
                    let before = pair.parked.len();
                    pair.parked.retain(|parked| *parked != sid);
                    self.parked -= before - pair.parked.len();
                    if let Phase::Connecting(connecting) = &mut pair.phase
                        && connecting.held == Some(sid)
                    {
                        connecting.held = None;
                    }
                }
            }
            Startup::Connecting { .. } | Startup::Requested { .. } => {}
        }
        Some(startup)
    }

    /// Attaches a stream whose start-up is over, or makes the queue pair its own peer.
    ///
    /// # Errors
    /// The stream is closed, or the queue pair failed: then nothing has changed.
    pub(super) fn attach(
        &mut self,
        world: &mut World<'_>,
        qpn: u32,
        sid: Option<u32>,
        negotiated: Option<Negotiated>,
        rnr_retry: u8,
    ) -> Result<(), Errno> {
        let Some(Pair {
            phase: Phase::Connecting(connecting),
            ..
        }) = self.pairs.get(&qpn)
        else {
            return Err(Errno::INVAL);
        };
        let params = connecting.params;
        // An initiator may handle fewer Reads than this end requests (RFC 6581 §9.1).
        let limit = negotiated.and_then(|negotiated| negotiated.depths.ord);
        let requested = connecting.rts.map_or(0, |rts| rts.ord);
        let attachment = Attachment {
            qid: params.qid,
            negotiated,
            ird: params.ird,
            ord: limit.map_or(requested, |limit| {
                requested.min(limit.try_into().unwrap_or(requested))
            }),
            ord_limit: limit.unwrap_or(0),
            delivered: self.delivered && !params.unreliable,
            unreliable: params.unreliable,
            rnr_timeout: rnr_timeout(rnr_retry, params.min_rnr_timer),
        };
        if let Err(errno) = world.streams.attach(sid, &attachment) {
            tracing::debug!("qpn {qpn:#08x}: not attached: {errno}");
            return Err(errno);
        }
        let (held, own) = (connecting.held, connecting.stream);
        let again = params.unreliable.then_some((params, connecting.rts));
        if let Some(sid) = sid {
            self.remove_startup(sid);
        }
        // Other streams between the two queue pairs are closed.
        for other in own.into_iter().filter(|own| Some(*own) != sid) {
            self.close_stream(world, other, Close::Abort);
        }
        for other in held.into_iter().filter(|held| Some(*held) != sid) {
            self.reject(world, other, Reason::Connected);
        }
        let fenced = negotiated.is_some_and(|negotiated| negotiated.fenced);
        if let Some(pair) = self.pairs.get_mut(&qpn) {
            let qid = params.qid;
            pair.again = again;
            pair.phase = Phase::Connected {
                qid,
                fenced,
                rnr_retry,
            };
        }
        let deadline = fenced.then_some(world.now + self.settings.rtr_timeout);
        self.timers.set(Key::Pair(qpn), deadline);
        self.connected.insert(params.qid, qpn);
        if !fenced {
            self.notices.push(Notice::Open(params.qid));
        }
        Ok(())
    }

    pub(super) fn loop_back(&mut self, world: &mut World<'_>, qpn: u32, qid: u32, rnr_retry: u8) {
        match self.attach(world, qpn, None, None, rnr_retry) {
            Ok(()) => tracing::debug!("qpn {qpn:#08x}, qid {qid}: connected to itself"),
            Err(_) => self.close_unreachable(qpn, qid),
        }
    }
}
