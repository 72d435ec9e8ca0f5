//! The watch over the peer of one connection: the time since which the peer's system has been
//! silent while requests wait for it.

use crate::stream::Answers;
use crate::time::Nanos;
use std::time::Duration;

/// The number of unanswered retransmissions or probes before a peer counts as silent, however late
/// they are: on a path with a long round trip the limit may be too short for them.
const TRIES: u32 = 3;
/// The number of checks within the limit.
const CHECKS: u32 = 8;
/// The shortest interval of probes to the peer's system while a request waits and all bytes are
/// acknowledged: TCP's keep-alive counts in seconds.
const SHORTEST_INTERVAL: Duration = Duration::from_secs(1);

/// The watch over the peer of one connection.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// The time after which a silent peer is lost; `None`: TCP decides.
    limit: Option<Duration>,
    /// The stream reports how the peer's system answers.
    possible: bool,
    /// The stream has the limit.
    stream_has_limit: bool,
    /// The checks while requests wait.
    checks: Option<Checks>,
    /// The position in the stream up to which the peer's system had acknowledged everything at the
    /// last check.
    pub(super) acknowledged: u64,
}

/// The state of a watch while requests wait for the peer.
#[derive(Debug)]
struct Checks {
    since: Nanos,
    last: Nanos,
    next: Nanos,
    /// Retransmissions before the last answer of the peer's system, of bytes that are still
    /// unacknowledged.
    retransmissions: u32,
    /// The stream probes the peer's system at intervals.
    probes: bool,
}

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Check {
    /// The peer has answered, or may still do so.
    Answering,
    /// The stream must probe the peer's system at this interval from now on.
    Probe(Duration),
    /// The peer has been silent for this time, and is lost.
    Silent(Duration),
}

impl Watch {
    /// A connection begins; `possible`: its stream reports how the peer's system answers.
    pub(super) fn begin(&mut self, possible: bool) {
        self.possible = possible;
        (self.stream_has_limit, self.checks, self.acknowledged) = (false, None, 0);
    }

    /// Ends the watch: no request waits for the peer any more.
    pub(super) fn end(&mut self) {
        (self.possible, self.checks) = (false, None);
    }

    /// Sets the time after which a silent peer is lost; zero leaves that to TCP. Returns whether
    /// the stream must stop its probes.
    pub(super) fn set_limit(&mut self, limit: Duration) -> bool {
        self.limit = (!limit.is_zero()).then_some(limit);
        self.stream_has_limit = false;
        self.rest()
    }

    /// The limit, if a request that begins to wait must start a watch.
    #[inline]
    pub(super) fn may_start(&self) -> Option<Duration> {
        self.limit.filter(|_| self.possible && self.checks.is_none())
    }

    /// A request has begun to wait. Returns whether the stream still needs the limit.
    pub(super) fn start(&mut self, limit: Duration, now: Nanos, answers: &Answers) -> bool {
        self.checks = Some(Checks {
            since: now,
            last: now,
            next: now + limit / CHECKS,
            retransmissions: answers.retransmissions,
            probes: false,
        });
        !std::mem::replace(&mut self.stream_has_limit, true)
    }

    /// No request waits any more. Returns whether the stream must stop its probes.
    pub(super) fn rest(&mut self) -> bool {
        self.checks.take().is_some_and(|checks| checks.probes)
    }

    /// The time of the next check.
    pub(super) fn deadline(&self) -> Option<Nanos> {
        self.checks.as_ref().map(|checks| checks.next)
    }

    /// Checks how the peer's system has answered since the last check, while requests wait.
    pub(super) fn check(&mut self, now: Nanos, answers: &Answers) -> Check {
        let (Some(limit), Some(checks)) = (self.limit, &mut self.checks) else {
            return Check::Answering;
        };
        let silence = answers.last.min(now.since(checks.since));
        if answers.last < now.since(checks.last) {
            checks.retransmissions = answers.retransmissions;
        }
        let tries = answers.retransmissions.saturating_sub(checks.retransmissions) + answers.probes;
        if silence >= limit && tries >= TRIES {
            return Check::Silent(silence);
        }
        checks.last = now;
        checks.next = now + limit / CHECKS;
        if answers.unacknowledged > 0 || std::mem::replace(&mut checks.probes, true) {
            return Check::Answering;
        }
        Check::Probe((limit / CHECKS).max(SHORTEST_INTERVAL))
    }
}
