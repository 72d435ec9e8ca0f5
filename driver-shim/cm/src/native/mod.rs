//! Native connections: queue pairs whose programs exchanged GIDs and numbers by themselves and then called `modify_qp`.
//!
//! Going to RTR names the peer, and [`Engine::meet`] registers the pair. The side with the lower (GID, QPN) calls at the port in the
//! peer's number; the other one waits, and calls as well if nothing came for a while. A call for a queue pair that has not
//! reached RTR is parked. Both sides introduce themselves in MPA private data ([`identity`]), and the responder checks the initiator's
//! address and PSNs ([`admission`]). What happens to a pair:
//!
//! ```text
//!             meet (RTR)            our call accepted: attach, RTR message goes out, gate opens
//!   Idle ───────────────▶ Seeking ─────────────────────────────────────────────────────▶ Connected
//!     calls are parked       │  │   a call of the peer: Reply, attach; gate opens at the first FPDU
//!                            │  └──────────────────────────────────────────────────────▶ Connected
//!                            └ turned down for good, or the retry budget is spent ─────▶ Closed (sends: RETRY_EXC_ERR)
//! ```
//!
//! The engine does no I/O: it is told events of streams and the time, and acts through [`Streams`]. What it finds out about queue pairs
//! comes out as [`Notice`]s.

mod address;
mod admission;
mod called;
mod calling;
mod identity;
mod numbers;
mod stream_events;
#[cfg(test)]
mod tests;

pub use address::{Ends, Home, Peer, Place};
pub use identity::PSN_MASK;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::time::Duration;

use rustix::io::Errno;

use crate::carrier::Carrier;
use crate::mpa_startup::{Close, Initiator, Negotiated, Responder, Settings, Time};
use crate::timers::Timers;
use admission::Guesses;
use identity::{Identity, Reason};
use numbers::Numbers;
use urnic_config::{Config, RtrTypes};

/// Calls whose Request is still on its way: beyond, the oldest gives way, since a genuine caller sends it at once.
const MAX_LISTENING: usize = 256;
/// Calls parked for one queue pair.
const MAX_PARKED_EACH: usize = 8;
/// How long the caller waits at RTR for its own RTS, which tells its PSN; most programs go there in the next line.
const RTS_GRACE: Duration = Duration::from_millis(20);
/// How long a TCP connection may take: some SYNs are lost.
const DIAL_TIMEOUT: Duration = Duration::from_secs(5);
/// First and longest pause between calls.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(1000));
/// Least retry budget, in graces of the other side's call: InfiniBand's budgets reckon with microseconds, and with a peer that is there.
const LEAST_BUDGET: u32 = 4;
/// Least time that an empty receive queue is borne when the sender tries again at all: `min_rnr_timer` is a least time too.
const LEAST_RNR: Duration = Duration::from_millis(100);

/// The device's stream commands ([`Engine::received`] follows a receive), and what else the engine needs of the world.
pub trait Streams: Carrier {
    /// Listens at an address, port 0 for any; returns listener and port. An unspecified address means all, IPv4 and IPv6.
    fn listen(&mut self, local: SocketAddr) -> Result<(u32, u16), Errno>;
    /// Begins a connection from this address, or from one that the host chooses; [`Engine::connected`] follows.
    fn connect(&mut self, remote: SocketAddr, local: Option<SocketAddr>) -> Result<u32, Errno>;
    /// Both ends of a connected stream.
    fn ends(&mut self, sid: u32) -> Result<Ends, Errno>;
    /// Whether an address is one of this host.
    fn is_own(&mut self, place: Place) -> bool;
    /// Hands a stream to a queue pair; without one the queue pair is its own peer.
    fn attach(&mut self, sid: Option<u32>, attachment: &Attachment) -> Result<(), Errno>;
    /// Whether sends were posted to the queue pair that wait for its connection.
    fn is_waiting(&mut self, qid: u32) -> bool;
}

/// How a queue pair is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attachment {
    /// Its device number.
    pub qid: u32,
    /// What start-up came to; none for a loop.
    pub negotiated: Option<Negotiated>,
    /// Inbound and outbound Reads.
    pub ird: u8,
    /// As above.
    pub ord: u8,
    /// How long a Send of the peer may find no receive posted; `None` = for ever.
    pub rnr_timeout: Option<Duration>,
}

/// What the engine found out about a queue pair, by its device number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    /// It is connected, and may send: open the gate.
    Open(u32),
    /// Its peer cannot be reached: posted sends and those to come fail.
    Unreachable(u32),
}

/// What a queue pair brings along at RTR.
#[derive(Debug, Clone, Copy)]
pub struct PeerParams {
    /// The queue pair's number.
    pub qid: u32,
    /// The peer that it names.
    pub peer: Peer,
    /// The PSN that the peer's `sq_psn` must equal.
    pub rq_psn: u32,
    /// Inbound Reads.
    pub ird: u8,
    /// Code of InfiniBand's table.
    pub min_rnr_timer: u8,
}

/// What it brings along at RTS.
#[derive(Debug, Clone, Copy)]
pub struct RtsParams {
    /// This end's PSN, which the peer's `rq_psn` must equal.
    pub sq_psn: u32,
    /// Outbound Reads.
    pub ord: u8,
    /// How often a Send is tried again when the peer has no receive posted; 7 = for ever.
    pub rnr_retry: u8,
    /// How long one try may take; `None` = for ever.
    pub timeout: Option<Duration>,
    /// How often a connection attempt is repeated.
    pub retry_cnt: u8,
}

/// A queue pair, as far as connections are concerned.
#[derive(Debug)]
struct Pair {
    phase: Phase,
    /// Calls for it that came before RTR, oldest first.
    parked: VecDeque<u32>,
    /// Calls for it with wrong PSNs.
    guesses: Guesses,
    /// A call that may have been the peer's was not taken: at RTS it is called without waiting for its next one.
    hurried: bool,
}

impl Pair {
    fn new() -> Pair {
        Pair {
            phase: Phase::Idle,
            parked: VecDeque::new(),
            guesses: Guesses::default(),
            hurried: false,
        }
    }
}

#[derive(Debug)]
enum Phase {
    /// Below RTR.
    Idle,
    /// At RTR or RTS, not connected.
    Seeking(Box<Seek>),
    /// Attached.
    Connected {
        qid: u32,
        /// The first FPDU is due.
        fenced: bool,
        /// The peer's `rnr_retry`.
        rnr_retry: u8,
    },
    /// Failed, or turned down for good.
    Closed,
}

/// A pair that looks for its other half.
#[derive(Debug)]
struct Seek {
    params: PeerParams,
    rts: Option<RtsParams>,
    /// When it got ready to send.
    since: Time,
    /// Our call.
    call: Option<u32>,
    /// When to call (again), while there is none.
    next_call: Time,
    attempts: u32,
    /// The peer's call, kept while ours, which goes before, is not answered.
    held: Option<u32>,
    /// Our calls come from [`Peer::source`]; else from an address that the host chooses, as every other time while none gets through.
    from_source: bool,
    /// Nonce of our last nudge.
    nudge: Option<u64>,
    /// Nonce of the peer's.
    ticket: Option<u64>,
}

/// A stream in start-up.
#[derive(Debug)]
enum Call {
    /// We call: TCP connects.
    Dialing { qpn: u32 },
    /// We call: the Reply is due.
    Asking {
        qpn: u32,
        initiator: Box<Initiator>,
        us: Identity,
    },
    /// We are called: the Request is due.
    Listening { responder: Box<Responder>, order: u64 },
    /// We are called, and have not answered: the queue pair is not at RTR, or our own call goes before.
    Waiting {
        qpn: u32,
        responder: Box<Responder>,
        caller: Identity,
        ends: Ends,
        /// Of its arrival.
        order: u64,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Key {
    Pair(u32),
    Call(u32),
}

/// Who knows where to whom: all native pairs of the process.
#[derive(Debug)]
pub struct Engine {
    settings: Settings,
    call_grace: Duration,
    park_timeout: Duration,
    max_parked: usize,
    /// Calls are taken from any source address.
    allow_nat: bool,
    numbers: Numbers,
    pairs: HashMap<u32, Pair>,
    /// Queue pair number by device number, for those that are connected.
    connected: HashMap<u32, u32>,
    calls: HashMap<u32, Call>,
    /// Calls whose Request is due, oldest first.
    listening: BTreeMap<u64, u32>,
    arrivals: u64,
    parked: usize,
    timers: Timers<Key>,
    /// What nonces are made from.
    seed: u128,
    nonces: u64,
    notices: Vec<Notice>,
}

/// The world while the engine is at work.
pub struct World<'a> {
    /// The time.
    pub now: Time,
    /// The device's streams.
    pub streams: &'a mut dyn Streams,
}

impl Engine {
    /// An engine for the process; `seed` is random and told to nobody.
    pub fn new(config: &Config, seed: u128) -> Engine {
        let native = &config.native;
        // What opens the responder's fence is ours to choose: a zero-length Write takes no buffer and no Read (design: native connections).
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
            hurried,
            ..
        }) = self.pairs.get_mut(&qpn)
        else {
            return;
        };
        seek.rts = Some(rts);
        seek.since = world.now;
        if (seek.params.peer.we_call || *hurried) && seek.call.is_none() && seek.attempts == 0 {
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
        (pair.guesses, pair.hurried) = (Guesses::default(), false);
        let mut turned_down: Vec<u32> = if again {
            Vec::new()
        } else {
            pair.parked.iter().copied().collect()
        };
        self.timers.set(Key::Pair(qpn), None);
        match phase {
            Phase::Seeking(seek) => {
                turned_down.extend(seek.held);
                if let Some(sid) = seek.call {
                    self.hang_up(world, sid, Close::Abort);
                }
            }
            Phase::Connected { qid, .. } => {
                self.connected.remove(&qid);
            }
            Phase::Idle | Phase::Closed => {}
        }
        for sid in turned_down {
            self.turn_down(world, sid, Reason::Gone);
        }
    }

    /// How long the peer of a connected queue pair lets its Sends find no receive posted, for a new `min_rnr_timer` of ours.
    /// `None`: not connected.
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

    /// Bytes of a stream arrived: as many as were asked for, or fewer if the peer closed; or an error.
    pub fn received(&mut self, world: &mut World<'_>, sid: u32, octets: Result<&[u8], Errno>) {
        match self.calls.get(&sid) {
            Some(Call::Asking { .. }) => self.hear_reply(world, sid, octets),
            Some(Call::Listening { .. }) => self.hear_request(world, sid, octets),
            Some(Call::Dialing { .. } | Call::Waiting { .. }) | None => {}
        }
    }

    /// A stream is gone.
    pub fn closed(&mut self, world: &mut World<'_>, sid: u32) {
        match self.calls.get(&sid) {
            Some(Call::Dialing { qpn }) => {
                let qpn = *qpn;
                self.hang_up(world, sid, Close::Abort);
                self.dial_failed(world, qpn, "the connection ended");
            }
            Some(Call::Asking { qpn, .. }) => {
                let qpn = *qpn;
                self.hang_up(world, sid, Close::Abort);
                self.call_failed(world, qpn, "the connection ended");
            }
            Some(Call::Listening { .. } | Call::Waiting { .. }) => self.hang_up(world, sid, Close::Abort),
            None => {}
        }
    }

    /// Does what is due; returns when to come back.
    pub fn tick(&mut self, world: &mut World<'_>) -> Option<Time> {
        while let Some(key) = self.timers.due(world.now) {
            match key {
                Key::Pair(qpn) => self.pair_due(world, qpn),
                Key::Call(sid) => self.call_due(world, sid),
            }
        }
        self.timers.next()
    }

    /// Takes what was found out about queue pairs.
    pub fn notices(&mut self) -> Vec<Notice> {
        std::mem::take(&mut self.notices)
    }

    fn pair_due(&mut self, world: &mut World<'_>, qpn: u32) {
        match self.pairs.get(&qpn).map(|pair| &pair.phase) {
            Some(Phase::Seeking(_)) => self.seek(world, qpn),
            Some(Phase::Connected {
                qid, fenced: true, ..
            }) => {
                let qid = *qid;
                tracing::debug!("qpn {qpn:#08x}: no FPDU from the caller in time");
                self.give_up(qpn, qid);
            }
            _ => {}
        }
    }

    fn call_due(&mut self, world: &mut World<'_>, sid: u32) {
        match self.calls.get(&sid) {
            Some(Call::Dialing { qpn }) => {
                let qpn = *qpn;
                self.hang_up(world, sid, Close::Abort);
                self.dial_failed(world, qpn, "no TCP connection in time");
            }
            Some(Call::Asking { qpn, .. }) => {
                let qpn = *qpn;
                self.hang_up(world, sid, Close::Abort);
                self.call_failed(world, qpn, "no answer in time");
            }
            Some(Call::Listening { .. }) => {
                tracing::debug!("stream {sid}: no MPA Request in time");
                self.hang_up(world, sid, Close::Abort);
            }
            Some(Call::Waiting { .. }) => self.turn_down(world, sid, Reason::Busy),
            None => {}
        }
    }

    /// Its peer is out of reach for good.
    fn give_up(&mut self, qpn: u32, qid: u32) {
        if let Some(pair) = self.pairs.get_mut(&qpn) {
            pair.phase = Phase::Closed;
        }
        self.connected.remove(&qid);
        self.timers.set(Key::Pair(qpn), None);
        self.notices.push(Notice::Unreachable(qid));
    }

    /// A number that nobody can foretell.
    fn nonce(&mut self) -> u64 {
        self.nonces += 1;
        let mut hasher = DefaultHasher::new();
        (self.seed, self.nonces).hash(&mut hasher);
        hasher.finish()
    }

    /// Ends a stream in start-up and forgets it.
    fn hang_up(&mut self, world: &mut World<'_>, sid: u32, how: Close) {
        self.forget(sid);
        world.streams.close(sid, how);
    }

    /// Forgets a stream in start-up: it is closed, or attached.
    fn forget(&mut self, sid: u32) -> Option<Call> {
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
    fn attach(
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
            self.turn_down(world, other, Reason::Connected);
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

    fn loop_back(&mut self, world: &mut World<'_>, qpn: u32, qid: u32) {
        match self.attach(world, qpn, None, None, 7) {
            Ok(()) => tracing::debug!("qpn {qpn:#08x}, qid {qid}: is its own peer"),
            Err(_) => self.give_up(qpn, qid),
        }
    }
}

/// InfiniBand's table of RNR NAK timer codes, in units of 10 µs.
const RNR_TIMERS: [u32; 32] = [
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
    3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
];

/// How long a sender that tries again `rnr_retry` times bears a receiver that asks it to wait `min_rnr_timer` each time; `None` = for ever.
fn rnr_timeout(rnr_retry: u8, min_rnr_timer: u8) -> Option<Duration> {
    match rnr_retry {
        7.. => None,
        0 => Some(Duration::ZERO),
        tries => {
            let timer = RNR_TIMERS
                .get(usize::from(min_rnr_timer))
                .copied()
                .unwrap_or(65536);
            Some((Duration::from_micros(10 * u64::from(timer)) * u32::from(tries)).max(LEAST_RNR))
        }
    }
}
