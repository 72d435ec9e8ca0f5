//! Native connections: programs exchange GIDs and queue pair numbers themselves, and then call
//! `modify_qp`.
//!
//! The transition to RTR names the peer ([`Engine::reached_rtr`]). The side with the lower (GID,
//! QPN) connects to the port in the peer's number; the other side waits, and also connects if no
//! Request arrived for a while. A Request for a queue pair that has not reached RTR is parked. Both
//! sides identify themselves in MPA private data (`identity.rs`), and the responder checks the
//! initiator's address and PSNs (`responder.rs`). The states of a queue pair:
//!
//! ```text
//!             RTR                   own Request accepted: attach, RTR goes out, gate opens
//!   Idle ───────────────▶ Connecting ───────────────────────────────────────────▶ Connected
//!     requests are parked    │  │   a Request of the peer: Reply, attach;
//!                            │  │   the gate opens at the first FPDU
//!                            │  └───────────────────────────────────────────────▶ Connected
//!                            └ rejected permanently, or retries exhausted ───────▶ Closed
//! ```
//!
//! In `Closed`, sends complete with `RETRY_EXC_ERR`. A queue pair of kind UC never comes there: it
//! stays in `Connecting`, to which it also returns when its stream ends ([`Engine::lost`]).
//!
//! The engine does no I/O: events of streams and the time go in; it acts through [`Streams`], and
//! returns [`Notice`]s about queue pairs.

mod address;
mod identity;
mod initiator;
mod numbers;
mod responder;
mod streams;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use rustix::io::Errno;

use crate::carrier::{Attachment, StreamOwner, Terms};
use crate::mpa_startup::{Close, Negotiated, Settings, Time};
use crate::startup::{Initiator, Responder};
use crate::timeouts::rnr_timeout;
use crate::timers::Timers;
use identity::{Identity, PsnMismatches, Reason};
use numbers::Numbers;
use urnic_config::{Config, Llp, RtrTypes};

pub use address::{Endpoints, HostAddress, LocalHost, Peer};
pub use identity::PSN_MASK;
pub use streams::{Streams, World};

/// Maximum number of streams whose Request is due. Beyond this limit the oldest stream is closed,
/// since an initiator normally sends its Request at once.
const MAX_WITHOUT_REQUEST: usize = 256;
/// Maximum number of Requests parked for one queue pair.
const MAX_PARKED_EACH: usize = 8;
/// The longest time that either end waits at RTR for its own transition to RTS, which sets what its
/// Request or Reply has: its PSN, `rnr_retry` and number of Reads. Most programs change to RTS
/// immediately.
const RTS_GRACE: Duration = Duration::from_millis(20);
/// The interval at which an end that waits at RTR checks whether its program is doing something
/// else.
const RTS_LOOK: Duration = Duration::from_millis(1);
/// The time that a stream may use to connect: long enough for the loss of some SYNs.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// First and longest pause between attempts.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(1000));
/// Minimum retry budget, in units of `native.call_grace_ms`: one of them passes before the peer
/// initiates a connection that this end should initiate.
const MIN_BUDGET: u32 = 2;
/// How long sends wait for the first connection, in units of `native.call_grace_ms`. On InfiniBand
/// such sends are lost at once if the peer is not ready. Here the connection takes time even if the
/// peer is ready, and more on a busy machine.
const PATIENCE: u32 = 16;
/// Longest pause between attempts while sends are dropped: the peer may have ended, and initiates
/// itself when it returns.
const RELEASED_BACK_OFF: Duration = Duration::from_secs(30);

/// A request to the driver concerning a queue pair, named by its device number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    /// The queue pair is connected, and may send: open the gate.
    Open(u32),
    /// The peer cannot be reached: posted sends and later ones fail.
    Unreachable(u32),
}

/// The parameters of a queue pair at RTR.
#[derive(Debug, Clone, Copy)]
pub struct PeerParams {
    /// The device's number of the queue pair.
    pub qid: u32,
    /// The peer that the program named.
    pub peer: Peer,
    /// The PSN that the peer's `sq_psn` must equal.
    pub rq_psn: u32,
    /// Maximum number of inbound Reads.
    pub ird: u8,
    /// The RNR timer, as a code of InfiniBand's table.
    pub min_rnr_timer: u8,
    /// The queue pair is of kind UC.
    pub unreliable: bool,
}

/// The parameters of a queue pair at RTS.
#[derive(Debug, Clone, Copy)]
pub struct RtsParams {
    /// This end's PSN, which the peer's `rq_psn` must equal.
    pub sq_psn: u32,
    /// Maximum number of outbound Reads.
    pub ord: u8,
    /// Retries of a Send while the peer has no receive posted; 7 = no limit.
    pub rnr_retry: u8,
    /// The time for which a send is retried
    /// ([`retry_time`](crate::timeouts::retry_time)); `None` = no limit.
    pub retry_time: Option<Duration>,
}

/// The connection state of a queue pair.
#[derive(Debug)]
struct Pair {
    phase: Phase,
    /// Streams with Requests that arrived before RTR, oldest first.
    parked: VecDeque<u32>,
    /// The count of Requests with wrong PSNs.
    mismatches: PsnMismatches,
    /// This end rejected a request that may have been the peer's: at RTS this end connects without
    /// waiting for the peer's next request.
    connect_at_rts: bool,
}

impl Pair {
    fn new() -> Pair {
        Pair {
            phase: Phase::Idle,
            parked: VecDeque::new(),
            mismatches: PsnMismatches::default(),
            connect_at_rts: false,
        }
    }
}

#[derive(Debug)]
enum Phase {
    /// Below RTR.
    Idle,
    /// At RTR or RTS, not connected.
    Connecting(Box<ConnectState>),
    /// Attached.
    Connected {
        qid: u32,
        /// The first FPDU is due.
        fenced: bool,
        /// The peer's `rnr_retry`.
        rnr_retry: u8,
        /// Kind UC: the attributes with which it connects again.
        again: Option<(PeerParams, Option<RtsParams>)>,
    },
    /// The queue pair failed, or the peer rejected it permanently.
    Closed,
}

/// How far a queue pair that connects is from RTS.
#[derive(Debug)]
enum Rts {
    /// At RTR.
    Due,
    /// At RTR: this end waits for RTS until this time.
    Awaited(Time),
    /// At RTR: this end has waited for RTS in vain, since the program only receives.
    NotExpected,
    /// At RTS.
    Reached(RtsParams),
}

impl Rts {
    /// The program's parameters, once they are known.
    fn params(&self) -> Option<RtsParams> {
        match self {
            Rts::Reached(params) => Some(*params),
            Rts::Due | Rts::Awaited(_) | Rts::NotExpected => None,
        }
    }
}

/// The state of a queue pair while it connects.
#[derive(Debug)]
struct ConnectState {
    params: PeerParams,
    rts: Rts,
    /// The time at which the queue pair reached RTS, or RTR if it has not reached RTS.
    since: Time,
    /// The stream that this end initiated.
    stream: Option<u32>,
    /// The time of the next attempt, while `stream` is `None`.
    next_attempt: Time,
    attempts: u32,
    /// The peer's stream. It waits while `stream`, which has precedence, is not answered, or until
    /// RTS.
    waiting_stream: Option<u32>,
    /// Attempts come from [`Peer::source`]; else the host chooses the source. Alternates after each
    /// failure to connect.
    from_source: bool,
    /// The nonce of the last nudge that this end sent.
    nudge: Option<u64>,
    /// The nonce of the peer's last nudge.
    ticket: Option<u64>,
    /// Kind UC: sends wait no more for the connection; they are dropped until it exists.
    released: bool,
}

impl ConnectState {
    /// A queue pair that reached RTR; its first attempt is at `next_attempt`.
    fn new(params: PeerParams, now: Time, next_attempt: Time) -> ConnectState {
        ConnectState {
            params,
            rts: Rts::Due,
            since: now,
            stream: None,
            next_attempt,
            attempts: 0,
            waiting_stream: None,
            from_source: true,
            nudge: None,
            ticket: None,
            released: false,
        }
    }

    /// When sends wait no longer for the first connection; `None`: they do not wait.
    fn release_at(&self, connect_grace: Duration) -> Option<Time> {
        (!self.released).then(|| self.since + (connect_grace * PATIENCE).max(BACK_OFF.1))
    }

    /// Longest pause between attempts.
    fn longest_pause(&self) -> Duration {
        match self.released {
            true => RELEASED_BACK_OFF,
            false => BACK_OFF.1,
        }
    }
}

/// The state of a queue pair that connects.
fn connecting(pairs: &mut HashMap<u32, Pair>, qpn: u32) -> Option<&mut ConnectState> {
    match &mut pairs.get_mut(&qpn)?.phase {
        Phase::Connecting(connecting) => Some(connecting),
        _ => None,
    }
}

/// A stream in start-up.
#[derive(Debug)]
enum Startup {
    /// Initiator: the stream connects.
    Connecting { qpn: u32, llp: Llp },
    /// Initiator: the Reply is due.
    Requested {
        qpn: u32,
        initiator: Box<Initiator>,
        local: Identity,
    },
    /// Responder: the Request is due.
    Accepted { responder: Box<Responder>, order: u64 },
    /// Responder: the Request is not answered, because the queue pair is not at RTR, or this end's
    /// Request has precedence.
    Unanswered {
        qpn: u32,
        responder: Box<Responder>,
        peer: Identity,
        ends: Endpoints,
        /// The position in the order of arrivals.
        order: u64,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Key {
    Pair(u32),
    Stream(u32),
}

/// All native connections of the process.
#[derive(Debug)]
pub struct Engine {
    config: Config,
    settings: Settings,
    connect_grace: Duration,
    park_timeout: Duration,
    max_parked: usize,
    /// Accept Requests from any source address.
    allow_nat: bool,
    /// Requests complete when the peer has placed or delivered them.
    delivered: bool,
    numbers: Numbers,
    pairs: HashMap<u32, Pair>,
    /// Queue pair numbers of connected queue pairs, by device number.
    connected: HashMap<u32, u32>,
    streams: HashMap<u32, Startup>,
    /// Streams whose Request is due, by order of arrival.
    without_request: BTreeMap<u64, u32>,
    arrivals: u64,
    parked: usize,
    timers: Timers<Key>,
    /// The secret from which nonces are made.
    seed: u128,
    nonces: u64,
    notices: Vec<Notice>,
}

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
            config: config.clone(),
            settings: Settings {
                rtr,
                ..Settings::from(&config.mpa)
            },
            connect_grace: native.call_grace,
            park_timeout: native.park_timeout,
            max_parked: native.max_parked,
            allow_nat: native.allow_nat,
            delivered: config.completion.is_delivered_on_native(),
            numbers: Numbers::new(config),
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
    /// The errors of [`Streams::listen`].
    pub fn add_queue_pair(&mut self, world: &mut World<'_>) -> Result<u32, Errno> {
        let qpn = self.numbers.take(world.streams)?;
        self.pairs.insert(qpn, Pair::new());
        Ok(qpn)
    }

    /// A port that is in numbers of queue pairs of this process, and in none of another process of
    /// the host.
    ///
    /// # Errors
    /// The errors of [`Streams::listen`].
    pub fn own_port(&mut self, streams: &mut dyn Streams) -> Result<u16, Errno> {
        self.numbers.port(streams)
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
        if peer.we_initiate {
            connecting.rts = Rts::Awaited(world.now + RTS_GRACE);
        }
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
        let Some(pair) = self.pairs.get_mut(&qpn) else {
            return;
        };
        let connecting = match &mut pair.phase {
            Phase::Connecting(connecting) => connecting,
            Phase::Connected {
                again: Some((_, known)),
                ..
            } => {
                *known = Some(rts);
                return;
            }
            _ => return,
        };
        connecting.rts = Rts::Reached(rts);
        connecting.since = world.now;
        if connecting.params.peer.is_self {
            let qid = connecting.params.qid;
            return self.loop_back(world, qpn, qid, rts.rnr_retry);
        }
        if (connecting.params.peer.we_initiate || pair.connect_at_rts)
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
        (pair.mismatches, pair.connect_at_rts) = (PsnMismatches::default(), false);
        let mut rejected: Vec<u32> = if may_reconnect {
            Vec::new()
        } else {
            pair.parked.iter().copied().collect()
        };
        self.timers.set(Key::Pair(qpn), None);
        match phase {
            Phase::Connecting(connecting) => {
                rejected.extend(connecting.waiting_stream);
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

    fn pair_timer(&mut self, world: &mut World<'_>, qpn: u32) {
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

    fn startup_timed_out(&mut self, world: &mut World<'_>, sid: u32) {
        match self.streams.get(&sid) {
            Some(Startup::Connecting { qpn, .. }) => {
                let qpn = *qpn;
                self.close_stream(world, sid, Close::Abort);
                self.connect_failed(world, qpn, "connecting timed out");
            }
            Some(Startup::Requested { qpn, .. }) => {
                let qpn = *qpn;
                self.close_stream(world, sid, Close::Abort);
                self.request_failed(world, qpn, "the Reply timed out");
            }
            Some(Startup::Accepted { .. }) => {
                tracing::debug!("stream {sid}: closed: the Request timed out");
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
    fn close_unreachable(&mut self, qpn: u32, qid: u32) {
        if let Some(pair) = self.pairs.get_mut(&qpn) {
            pair.phase = Phase::Closed;
        }
        self.connected.remove(&qid);
        self.timers.set(Key::Pair(qpn), None);
        self.notices.push(Notice::Unreachable(qid));
    }

    /// A number that a peer cannot predict.
    fn nonce(&mut self) -> u64 {
        self.nonces += 1;
        let mut hasher = DefaultHasher::new();
        (self.seed, self.nonces).hash(&mut hasher);
        hasher.finish()
    }

    /// Closes a stream in start-up and removes it.
    fn close_stream(&mut self, world: &mut World<'_>, sid: u32, how: Close) {
        self.remove_startup(sid);
        world.streams.close(sid, how);
    }

    /// Removes a stream that is no longer in start-up: it is closed, or attached.
    fn remove_startup(&mut self, sid: u32) -> Option<Startup> {
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
                        && connecting.waiting_stream == Some(sid)
                    {
                        connecting.waiting_stream = None;
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
    fn attach(
        &mut self,
        world: &mut World<'_>,
        qpn: u32,
        sid: Option<u32>,
        negotiated: Option<Negotiated>,
        rnr_retry: u8,
    ) -> Result<(), Errno> {
        let Some(Phase::Connecting(connecting)) = self.pairs.get(&qpn).map(|pair| &pair.phase) else {
            return Err(Errno::INVAL);
        };
        let params = connecting.params;
        // An initiator may handle fewer Reads than this end requests (RFC 6581 §9.1).
        let limit = negotiated.and_then(|negotiated| negotiated.depths.ord);
        let rts = connecting.rts.params();
        let requested = rts.map_or(0, |rts| rts.ord.into());
        let attachment = Attachment {
            qid: params.qid,
            negotiated,
            ird: params.ird.into(),
            ord: limit.map_or(requested, |limit| requested.min(limit)),
            ord_limit: limit.unwrap_or(0),
            delivered: self.delivered && !params.unreliable,
            terms: Terms::Native {
                unreliable: params.unreliable,
                rnr_timeout: rnr_timeout(rnr_retry, params.min_rnr_timer),
            },
        };
        if let Err(errno) = world.streams.attach(sid, &attachment) {
            tracing::debug!("qpn {qpn:#08x}: not attached: {errno}");
            return Err(errno);
        }
        let (waiting, own) = (connecting.waiting_stream, connecting.stream);
        let again = params.unreliable.then_some((params, rts));
        if let Some(sid) = sid {
            self.remove_startup(sid);
        }
        // Other streams between the two queue pairs are closed.
        for other in own.into_iter().filter(|own| Some(*own) != sid) {
            self.close_stream(world, other, Close::Abort);
        }
        for other in waiting.into_iter().filter(|waiting| Some(*waiting) != sid) {
            self.reject(world, other, Reason::Connected);
        }
        let fenced = negotiated.is_some_and(|negotiated| negotiated.fenced);
        if let Some(pair) = self.pairs.get_mut(&qpn) {
            let qid = params.qid;
            pair.phase = Phase::Connected {
                qid,
                fenced,
                rnr_retry,
                again,
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

    fn loop_back(&mut self, world: &mut World<'_>, qpn: u32, qid: u32, rnr_retry: u8) {
        match self.attach(world, qpn, None, None, rnr_retry) {
            Ok(()) => tracing::debug!("qpn {qpn:#08x}, qid {qid}: connected to itself"),
            Err(_) => self.close_unreachable(qpn, qid),
        }
    }
}

impl<'a> StreamOwner<World<'a>> for Engine {
    fn has_queue_pair(&self, qid: u32) -> bool {
        self.connected.contains_key(&qid)
    }

    fn has_listener(&self, lid: u32) -> bool {
        self.numbers.llp_of(lid).is_some()
    }

    fn has_stream(&self, sid: u32) -> bool {
        self.streams.contains_key(&sid)
    }

    fn first_fpdu(&mut self, _world: &mut World<'a>, qid: u32) {
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

    fn arrived(&mut self, world: &mut World<'a>, lid: u32, sid: u32) {
        self.stream_arrived(world, lid, sid);
    }

    fn connected(&mut self, world: &mut World<'a>, sid: u32, outcome: Result<(), Errno>) {
        self.stream_connected(world, sid, outcome);
    }

    fn received(&mut self, world: &mut World<'a>, sid: u32, bytes: Result<&[u8], Errno>) {
        match self.streams.get(&sid) {
            Some(Startup::Requested { .. }) => self.reply_received(world, sid, bytes),
            Some(Startup::Accepted { .. }) => self.request_received(world, sid, bytes),
            Some(Startup::Connecting { .. } | Startup::Unanswered { .. }) | None => {}
        }
    }

    fn closed(&mut self, world: &mut World<'a>, sid: u32) {
        match self.streams.get(&sid) {
            Some(Startup::Connecting { qpn, .. }) => {
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
}

impl Engine {
    /// The stream of a connected queue pair ended. One of kind UC connects again.
    pub fn lost(&mut self, world: &mut World<'_>, qid: u32) {
        let Some(qpn) = self.connected.get(&qid).copied() else {
            return;
        };
        let Some(pair) = self.pairs.get_mut(&qpn) else {
            return;
        };
        let Phase::Connected {
            again: Some((params, rts)),
            ..
        } = pair.phase
        else {
            return;
        };
        self.connected.remove(&qid);
        let wait = match params.peer.we_initiate {
            true => BACK_OFF.0,
            false => self.connect_grace,
        };
        let connecting = ConnectState {
            rts: rts.map_or(Rts::Due, Rts::Reached),
            released: true,
            ..ConnectState::new(params, world.now, world.now + wait)
        };
        pair.phase = Phase::Connecting(Box::new(connecting));
        tracing::debug!("qpn {qpn:#08x}: its stream ended; it connects again");
        if params.peer.is_self {
            return self.loop_back(world, qpn, qid, 7);
        }
        self.timers.set(Key::Pair(qpn), Some(world.now + wait));
    }

    /// The initiator was accepted, and sends nothing.
    fn first_fpdu_missing(&mut self, qpn: u32, qid: u32) {
        match self.pairs.get(&qpn).map(|pair| &pair.phase) {
            Some(Phase::Connected { again: Some(_), .. }) => {
                // The device gives the stream up, and reports its end.
                self.timers.set(Key::Pair(qpn), None);
                self.notices.push(Notice::Unreachable(qid));
            }
            _ => self.close_unreachable(qpn, qid),
        }
    }

    /// The peer rejected the Request, and would reject the next one.
    fn rejected_for_good(&mut self, world: &mut World<'_>, qpn: u32) {
        let Some(connecting) = connecting(&mut self.pairs, qpn) else {
            return;
        };
        let qid = connecting.params.qid;
        if !connecting.params.unreliable {
            return self.close_unreachable(qpn, qid);
        }
        connecting.released = true;
        connecting.next_attempt = world.now + RELEASED_BACK_OFF;
        let next_attempt = connecting.next_attempt;
        self.timers.set(Key::Pair(qpn), Some(next_attempt));
        self.notices.push(Notice::Open(qid));
    }
}
