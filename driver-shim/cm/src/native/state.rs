//! The state of native connections.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use super::address::{Ends, Peer};
use super::guesses::Guesses;
use super::identity::Identity;
use super::numbers::Numbers;
use crate::mpa_startup::{Initiator, Responder, Settings, Time};
use crate::timers::Timers;

/// Streams whose Request is due. Beyond this limit the oldest is closed, since a genuine initiator
/// sends it at once.
pub(super) const MAX_LISTENING: usize = 256;
/// Requests parked for one queue pair.
pub(super) const MAX_PARKED_EACH: usize = 8;
/// How long the initiator waits at RTR for its own RTS, which has its PSN. Most programs go there
/// at once.
pub(super) const RTS_GRACE: Duration = Duration::from_millis(20);
/// How long a TCP connection may take: some SYNs are lost.
pub(super) const DIAL_TIMEOUT: Duration = Duration::from_secs(5);
/// First and longest pause between attempts.
pub(super) const BACK_OFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(1000));
/// Least retry budget, in graces of the other side's call: InfiniBand's budgets reckon with
/// microseconds, and with a peer that is there.
pub(super) const LEAST_BUDGET: u32 = 4;
/// A finding of the engine about a queue pair, by its device number.
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
pub(super) struct Pair {
    pub(super) phase: Phase,
    /// Requests for it that came before RTR, oldest first.
    pub(super) parked: VecDeque<u32>,
    /// Requests for it with wrong PSNs.
    pub(super) guesses: Guesses,
    /// A request that may have been the peer's was rejected: at RTS this end connects without
    /// waiting for the peer's next one.
    pub(super) connect_at_rts: bool,
}

impl Pair {
    pub(super) fn new() -> Pair {
        Pair {
            phase: Phase::Idle,
            parked: VecDeque::new(),
            guesses: Guesses::default(),
            connect_at_rts: false,
        }
    }
}

#[derive(Debug)]
pub(super) enum Phase {
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
    /// Failed, or rejected for good.
    Closed,
}

/// A pair that looks for its other half.
#[derive(Debug)]
pub(super) struct Seek {
    pub(super) params: PeerParams,
    pub(super) rts: Option<RtsParams>,
    /// When it got ready to send.
    pub(super) since: Time,
    /// Our stream to the peer.
    pub(super) call: Option<u32>,
    /// When to connect (again), while there is none.
    pub(super) next_call: Time,
    pub(super) attempts: u32,
    /// The peer's stream, kept while ours, which has precedence, is not answered.
    pub(super) held: Option<u32>,
    /// Our calls come from [`Peer::source`]; else from an address that the host chooses, as every
    /// other time while none gets through.
    pub(super) from_source: bool,
    /// Nonce of our last nudge.
    pub(super) nudge: Option<u64>,
    /// Nonce of the peer's.
    pub(super) ticket: Option<u64>,
}

/// A stream in start-up.
#[derive(Debug)]
pub(super) enum Call {
    /// We are the initiator: TCP connects.
    Dialing { qpn: u32 },
    /// We are the initiator: the Reply is due.
    Asking {
        qpn: u32,
        initiator: Box<Initiator>,
        us: Identity,
    },
    /// We are the responder: the Request is due.
    Listening { responder: Box<Responder>, order: u64 },
    /// We are the responder and have not answered: the queue pair is not at RTR, or our own request
    /// has precedence.
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
pub(super) enum Key {
    Pair(u32),
    Call(u32),
}

/// All native connections of the process.
#[derive(Debug)]
pub struct Engine {
    pub(super) settings: Settings,
    pub(super) call_grace: Duration,
    pub(super) park_timeout: Duration,
    pub(super) max_parked: usize,
    /// Calls are taken from any source address.
    pub(super) allow_nat: bool,
    pub(super) numbers: Numbers,
    pub(super) pairs: HashMap<u32, Pair>,
    /// Queue pair number by device number, for those that are connected.
    pub(super) connected: HashMap<u32, u32>,
    pub(super) calls: HashMap<u32, Call>,
    /// Calls whose Request is due, oldest first.
    pub(super) listening: BTreeMap<u64, u32>,
    pub(super) arrivals: u64,
    pub(super) parked: usize,
    pub(super) timers: Timers<Key>,
    /// What nonces are made from.
    pub(super) seed: u128,
    pub(super) nonces: u64,
    pub(super) notices: Vec<Notice>,
}
