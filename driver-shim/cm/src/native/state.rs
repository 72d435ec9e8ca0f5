//! The state of native connections.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use super::address::{Endpoints, Peer};
use super::identity::Identity;
use super::numbers::Numbers;
use super::psn_mismatches::PsnMismatches;
use crate::mpa_startup::{Initiator, Responder, Settings, Time};
use crate::timers::Timers;

/// Maximum number of streams whose Request is due. Beyond this limit the oldest stream is closed,
/// since an initiator normally sends its Request at once.
pub(super) const MAX_WITHOUT_REQUEST: usize = 256;
/// Maximum number of Requests parked for one queue pair.
pub(super) const MAX_PARKED_EACH: usize = 8;
/// The longest time that either end waits at RTR for its own transition to RTS, which sets what its
/// Request or Reply has: its PSN, `rnr_retry` and number of Reads. Most programs change to RTS
/// immediately.
pub(super) const RTS_GRACE: Duration = Duration::from_millis(20);
/// The interval at which an end that waits so looks whether its program has gone on to something
/// else.
pub(super) const RTS_LOOK: Duration = Duration::from_millis(1);
/// The time that TCP may use to connect: long enough for the loss of some SYNs.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// First and longest pause between attempts.
pub(super) const BACK_OFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(1000));
/// Minimum retry budget, in units of `native.call_grace_ms`: one of them passes before the peer
/// initiates a connection that this end should initiate.
pub(super) const MIN_BUDGET: u32 = 2;

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
    /// ([`retry_time`](crate::ack_timeout::retry_time)); `None` = no limit.
    pub retry_time: Option<Duration>,
}

/// The connection state of a queue pair.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) phase: Phase,
    /// Streams with Requests that arrived before RTR, oldest first.
    pub(super) parked: VecDeque<u32>,
    /// The count of Requests with wrong PSNs.
    pub(super) mismatches: PsnMismatches,
    /// This end rejected a request that may have been the peer's: at RTS this end connects without
    /// waiting for the peer's next request.
    pub(super) connect_at_rts: bool,
    /// A connected queue pair of kind UC: the attributes with which it connects again.
    pub(super) again: Option<(PeerParams, Option<RtsParams>)>,
}

impl Pair {
    pub(super) fn new() -> Pair {
        Pair {
            phase: Phase::Idle,
            parked: VecDeque::new(),
            mismatches: PsnMismatches::default(),
            connect_at_rts: false,
            again: None,
        }
    }
}

#[derive(Debug)]
pub(super) enum Phase {
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
    },
    /// The queue pair failed, or the peer rejected it permanently.
    Closed,
}

/// The state of a queue pair while it connects.
#[derive(Debug)]
pub(super) struct ConnectState {
    pub(super) params: PeerParams,
    pub(super) rts: Option<RtsParams>,
    /// The time at which the queue pair reached RTS, or RTR if it has not reached RTS.
    pub(super) since: Time,
    /// The stream that this end initiated.
    pub(super) stream: Option<u32>,
    /// The time of the next attempt, while `stream` is `None`.
    pub(super) next_attempt: Time,
    pub(super) attempts: u32,
    /// The peer's stream, kept while `stream`, which has precedence, is not answered, or until RTS.
    pub(super) held: Option<u32>,
    /// Until when this end waits at RTR for RTS.
    pub(super) rts_until: Option<Time>,
    /// It has waited for RTS, in vain: the program only receives.
    pub(super) stays: bool,
    /// Attempts come from [`Peer::source`]; else the host chooses the source. Alternates after each
    /// failure to connect.
    pub(super) from_source: bool,
    /// The nonce of the last nudge that this end sent.
    pub(super) nudge: Option<u64>,
    /// The nonce of the peer's last nudge.
    pub(super) ticket: Option<u64>,
    /// Kind UC: sends wait no more for the connection; they are dropped until it exists.
    pub(super) released: bool,
}

impl ConnectState {
    /// A queue pair that reached RTR; its first attempt is at `next_attempt`.
    pub(super) fn new(params: PeerParams, now: Time, next_attempt: Time) -> ConnectState {
        ConnectState {
            params,
            rts: None,
            since: now,
            stream: None,
            next_attempt,
            attempts: 0,
            held: None,
            rts_until: None,
            stays: false,
            from_source: true,
            nudge: None,
            ticket: None,
            released: false,
        }
    }
}

/// A stream in start-up.
#[derive(Debug)]
pub(super) enum Startup {
    /// Initiator: TCP connects.
    Connecting { qpn: u32 },
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
pub(super) enum Key {
    Pair(u32),
    Stream(u32),
}

/// All native connections of the process.
#[derive(Debug)]
pub struct Engine {
    pub(super) settings: Settings,
    pub(super) connect_grace: Duration,
    pub(super) park_timeout: Duration,
    pub(super) max_parked: usize,
    /// Accept Requests from any source address.
    pub(super) allow_nat: bool,
    /// Requests complete when the peer has placed or delivered them.
    pub(super) delivered: bool,
    pub(super) numbers: Numbers,
    pub(super) pairs: HashMap<u32, Pair>,
    /// Queue pair numbers of connected queue pairs, by device number.
    pub(super) connected: HashMap<u32, u32>,
    pub(super) streams: HashMap<u32, Startup>,
    /// Streams whose Request is due, by order of arrival.
    pub(super) without_request: BTreeMap<u64, u32>,
    pub(super) arrivals: u64,
    pub(super) parked: usize,
    pub(super) timers: Timers<Key>,
    /// The secret from which nonces are made.
    pub(super) seed: u128,
    pub(super) nonces: u64,
    pub(super) notices: Vec<Notice>,
}
