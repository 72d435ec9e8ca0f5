//! Queue pairs enter, reach RTR and RTS, are attached, and leave; timers and streams in start-up.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use rustix::io::Errno;

use super::guesses::Guesses;
use super::identity::Reason;
use super::numbers::Numbers;
use super::rnr::rnr_timeout;
use super::state::{Call, Engine, Key, Notice, Pair, PeerParams, Phase, RTS_GRACE, RtsParams, Seek};
use super::streams::{Attachment, World};
use crate::mpa_startup::{Close, Negotiated, Settings, Time};
use crate::timers::Timers;
use urnic_config::{Config, RtrTypes};

impl Engine {
    /// An engine for the process; `seed` is random and told to nobody.
    pub fn new(config: &Config, seed: u128) -> Engine {
        let native = &config.native;
        // What opens the responder's fence is ours to choose: a zero-length Write takes no buffer
        // and no Read (design: native connections).
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
            call_grace: native.call_grace,
            park_timeout: native.park_timeout,
            max_parked: native.max_parked,
            allow_nat: native.allow_nat,
            numbers: Numbers::new(native.listen, native.port_range.clone()),
            pairs: HashMap::new(),
            connected: HashMap::new(),
            calls: HashMap::new(),
            listening: BTreeMap::new(),
            arrivals: 0,
            parked: 0,
            timers: Timers::default(),
            seed,
            nonces: 0,
            notices: Vec::new(),
        }
    }

    /// A number for a new queue pair, for which calls are taken from now on.
    ///
    /// # Errors
    /// Those of listening.
    pub fn enter(&mut self, world: &mut World<'_>) -> Result<u32, Errno> {
        let qpn = self.numbers.take(world.streams)?;
        self.pairs.insert(qpn, Pair::new());
        Ok(qpn)
    }

    /// The queue pair is gone; its number may be used again.
    pub fn leave(&mut self, world: &mut World<'_>, qpn: u32) {
        self.retire(world, qpn, false);
        if self.pairs.remove(&qpn).is_some() {
            self.numbers.give_back(qpn);
        }
    }

    /// The queue pair reached RTR.
    pub fn meet(&mut self, world: &mut World<'_>, qpn: u32, params: PeerParams) {
        let Some(pair) = self.pairs.get_mut(&qpn) else {
            return;
        };
        let PeerParams { qid, peer, .. } = params;
        tracing::debug!(
            "qpn {qpn:#08x}: its peer is {:#08x} at {}",
            peer.qpn,
            peer.address
        );
        let wait = if peer.we_call { RTS_GRACE } else { self.call_grace };
        let seek = Seek {
            params,
            rts: None,
            since: world.now,
            call: None,
            next_call: world.now + wait,
            attempts: 0,
            held: None,
            from_source: true,
            nudge: None,
            ticket: None,
        };
        pair.phase = Phase::Seeking(Box::new(seek));
        if peer.is_self {
            self.loop_back(world, qpn, qid);
            return;
        }
        self.timers.set(Key::Pair(qpn), Some(world.now + wait));
        self.unpark(world, qpn);
    }

    /// The queue pair reached RTS.
    pub fn ready(&mut self, world: &mut World<'_>, qpn: u32, rts: RtsParams) {
        let Some(Pair {
            phase: Phase::Seeking(seek),
            connect_at_rts,
            ..
        }) = self.pairs.get_mut(&qpn)
        else {
            return;
        };
        seek.rts = Some(rts);
        seek.since = world.now;
        if (seek.params.peer.we_call || *connect_at_rts) && seek.call.is_none() && seek.attempts == 0 {
            seek.next_call = world.now;
        }
        self.seek(world, qpn);
    }

    /// The queue pair is no longer to be connected: it failed, or (`again`) may begin anew.
    pub fn retire(&mut self, world: &mut World<'_>, qpn: u32, again: bool) {
        let Some(pair) = self.pairs.get_mut(&qpn) else {
            return;
        };
        let phase = std::mem::replace(&mut pair.phase, if again { Phase::Idle } else { Phase::Closed });
        (pair.guesses, pair.connect_at_rts) = (Guesses::default(), false);
        let mut rejected: Vec<u32> = if again {
            Vec::new()
        } else {
            pair.parked.iter().copied().collect()
        };
        self.timers.set(Key::Pair(qpn), None);
        match phase {
            Phase::Seeking(seek) => {
                rejected.extend(seek.held);
                if let Some(sid) = seek.call {
                    self.hang_up(world, sid, Close::Abort);
                }
            }
            Phase::Connected { qid, .. } => {
                self.connected.remove(&qid);
            }
            Phase::Idle | Phase::Closed => {}
        }
        for sid in rejected {
            self.reject(world, sid, Reason::Gone);
        }
    }

    /// How long the peer of a connected queue pair lets its Sends find no receive posted, for a new
    /// `min_rnr_timer` of ours. `None`: not connected.
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
            tracing::debug!("qpn {qpn:#08x}: the first FPDU is here");
            self.timers.set(Key::Pair(*qpn), None);
            self.notices.push(Notice::Open(qid));
        }
    }

    /// Bytes of a stream arrived: as many as were asked for, or fewer if the peer closed; or an
    /// error.
    pub fn received(&mut self, world: &mut World<'_>, sid: u32, bytes: Result<&[u8], Errno>) {
        match self.calls.get(&sid) {
            Some(Call::Asking { .. }) => self.hear_reply(world, sid, bytes),
            Some(Call::Listening { .. }) => self.hear_request(world, sid, bytes),
            Some(Call::Dialing { .. } | Call::Waiting { .. }) | None => {}
        }
    }

    /// A stream has ended.
    pub fn closed(&mut self, world: &mut World<'_>, sid: u32) {
        match self.calls.get(&sid) {
            Some(Call::Dialing { qpn }) => {
                let qpn = *qpn;
                self.hang_up(world, sid, Close::Abort);
                self.connect_failed(world, qpn, "the connection ended");
            }
            Some(Call::Asking { qpn, .. }) => {
                let qpn = *qpn;
                self.hang_up(world, sid, Close::Abort);
                self.request_failed(world, qpn, "the connection ended");
            }
            Some(Call::Listening { .. } | Call::Waiting { .. }) => self.hang_up(world, sid, Close::Abort),
            None => {}
        }
    }

    /// Does what is due. Returns when it is to be called again.
    pub fn tick(&mut self, world: &mut World<'_>) -> Option<Time> {
        while let Some(key) = self.timers.due(world.now) {
            match key {
                Key::Pair(qpn) => self.pair_due(world, qpn),
                Key::Call(sid) => self.call_due(world, sid),
            }
        }
        self.timers.next()
    }

    /// Takes the findings about queue pairs.
    pub fn notices(&mut self) -> Vec<Notice> {
        std::mem::take(&mut self.notices)
    }

    pub(super) fn pair_due(&mut self, world: &mut World<'_>, qpn: u32) {
        match self.pairs.get(&qpn).map(|pair| &pair.phase) {
            Some(Phase::Seeking(_)) => self.seek(world, qpn),
            Some(Phase::Connected {
                qid, fenced: true, ..
            }) => {
                let qid = *qid;
                tracing::debug!("qpn {qpn:#08x}: no first FPDU from the initiator in time");
                self.give_up(qpn, qid);
            }
            _ => {}
        }
    }

    pub(super) fn call_due(&mut self, world: &mut World<'_>, sid: u32) {
        match self.calls.get(&sid) {
            Some(Call::Dialing { qpn }) => {
                let qpn = *qpn;
                self.hang_up(world, sid, Close::Abort);
                self.connect_failed(world, qpn, "no TCP connection in time");
            }
            Some(Call::Asking { qpn, .. }) => {
                let qpn = *qpn;
                self.hang_up(world, sid, Close::Abort);
                self.request_failed(world, qpn, "no answer in time");
            }
            Some(Call::Listening { .. }) => {
                tracing::debug!("stream {sid}: no MPA Request in time");
                self.hang_up(world, sid, Close::Abort);
            }
            Some(Call::Waiting { .. }) => self.reject(world, sid, Reason::Busy),
            None => {}
        }
    }

    /// Its peer is out of reach for good.
    pub(super) fn give_up(&mut self, qpn: u32, qid: u32) {
        if let Some(pair) = self.pairs.get_mut(&qpn) {
            pair.phase = Phase::Closed;
        }
        self.connected.remove(&qid);
        self.timers.set(Key::Pair(qpn), None);
        self.notices.push(Notice::Unreachable(qid));
    }

    /// A number that nobody can foretell.
    pub(super) fn nonce(&mut self) -> u64 {
        self.nonces += 1;
        let mut hasher = DefaultHasher::new();
        (self.seed, self.nonces).hash(&mut hasher);
        hasher.finish()
    }

    /// Ends a stream in start-up and forgets it.
    pub(super) fn hang_up(&mut self, world: &mut World<'_>, sid: u32, how: Close) {
        self.forget(sid);
        world.streams.close(sid, how);
    }

    /// Forgets a stream in start-up: it is closed, or attached.
    pub(super) fn forget(&mut self, sid: u32) -> Option<Call> {
        self.timers.set(Key::Call(sid), None);
        let call = self.calls.remove(&sid)?;
        match &call {
            Call::Listening { order, .. } => {
                self.listening.remove(order);
            }
            Call::Waiting { qpn, .. } => {
                if let Some(pair) = self.pairs.get_mut(qpn) {
                    let before = pair.parked.len();
                    pair.parked.retain(|parked| *parked != sid);
                    self.parked -= before - pair.parked.len();
                    if let Phase::Seeking(seek) = &mut pair.phase
                        && seek.held == Some(sid)
                    {
                        seek.held = None;
                    }
                }
            }
            Call::Dialing { .. } | Call::Asking { .. } => {}
        }
        Some(call)
    }

    /// Attaches a stream whose start-up is over, or loops the queue pair back.
    ///
    /// # Errors
    /// The stream is gone, or the queue pair failed: then nothing has changed.
    pub(super) fn attach(
        &mut self,
        world: &mut World<'_>,
        qpn: u32,
        sid: Option<u32>,
        negotiated: Option<Negotiated>,
        rnr_retry: u8,
    ) -> Result<(), Errno> {
        let Some(Pair {
            phase: Phase::Seeking(seek),
            ..
        }) = self.pairs.get(&qpn)
        else {
            return Err(Errno::INVAL);
        };
        let params = seek.params;
        // A caller may hold fewer of our Reads than we wish for (RFC 6581 §9.1).
        let limit = negotiated.and_then(|negotiated| negotiated.depths.ord);
        let wish = seek.rts.map_or(0, |rts| rts.ord);
        let attachment = Attachment {
            qid: params.qid,
            negotiated,
            ird: params.ird,
            ord: limit.map_or(wish, |limit| wish.min(limit.try_into().unwrap_or(wish))),
            rnr_timeout: rnr_timeout(rnr_retry, params.min_rnr_timer),
        };
        if let Err(errno) = world.streams.attach(sid, &attachment) {
            tracing::debug!("qpn {qpn:#08x}: not attached: {errno}");
            return Err(errno);
        }
        let (held, call) = (seek.held, seek.call);
        if let Some(sid) = sid {
            self.forget(sid);
        }
        // Whatever else was under way between the two is settled.
        for other in call.into_iter().filter(|call| Some(*call) != sid) {
            self.hang_up(world, other, Close::Abort);
        }
        for other in held.into_iter().filter(|held| Some(*held) != sid) {
            self.reject(world, other, Reason::Connected);
        }
        let fenced = negotiated.is_some_and(|negotiated| negotiated.fenced);
        if let Some(pair) = self.pairs.get_mut(&qpn) {
            let qid = params.qid;
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

    pub(super) fn loop_back(&mut self, world: &mut World<'_>, qpn: u32, qid: u32) {
        match self.attach(world, qpn, None, None, 7) {
            Ok(()) => tracing::debug!("qpn {qpn:#08x}, qid {qid}: is its own peer"),
            Err(_) => self.give_up(qpn, qid),
        }
    }
}
