//! The watch over the peer of one connection: since when its system has been silent, although
//! requests wait for it.

use crate::stream::Answers;
use crate::time::Nanos;
use std::time::Duration;

/// The number of unanswered retransmissions or probes before a peer counts as silent, however late
/// they are: on a path with a long round trip the limit may be too short for them.
const TRIES: u32 = 3;
/// The number of checks within the limit.
const LOOKS: u32 = 8;
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
    told: bool,
    /// The checks while requests wait.
    looks: Option<Looks>,
    /// The position in the stream up to which the peer's system had acknowledged everything at the
    /// last check.
    pub(super) acknowledged: u64,
}

/// The state of a watch while requests wait for the peer.
#[derive(Debug)]
struct Looks {
    since: Nanos,
    last: Nanos,
    next: Nanos,
    /// Retransmissions before the peer's last sign of life, of bytes that are still
    /// unacknowledged.
    retransmissions: u32,
    /// The stream probes the peer's system at intervals.
    asks: bool,
}

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Look {
    /// The peer has answered, or may still do so.
    Goes,
    /// The stream must probe the peer's system at this interval from now on.
    Ask(Duration),
    /// The peer has been silent for this time, and is lost.
    Silent(Duration),
}

impl Watch {
    /// A connection begins; `possible`: its stream reports how the peer's system answers.
    pub(super) fn begin(&mut self, possible: bool) {
        self.possible = possible;
        (self.told, self.looks, self.acknowledged) = (false, None, 0);
    }

    /// The connection ends: nothing waits for the peer any more.
    pub(super) fn end(&mut self) {
        (self.possible, self.looks) = (false, None);
    }

    /// Sets the time after which a silent peer is lost; zero leaves that to TCP. Returns whether
    /// the stream must stop asking.
    pub(super) fn set_limit(&mut self, limit: Duration) -> bool {
        self.limit = (!limit.is_zero()).then_some(limit);
        self.told = false;
        self.rest()
    }

    /// The limit, if a request that begins to wait must start a watch.
    #[inline]
    pub(super) fn may_start(&self) -> Option<Duration> {
        self.limit.filter(|_| self.possible && self.looks.is_none())
    }

    /// A request has begun to wait. Returns whether the stream still needs the limit.
    pub(super) fn start(&mut self, limit: Duration, now: Nanos, answers: &Answers) -> bool {
        self.looks = Some(Looks {
            since: now,
            last: now,
            next: now + limit / LOOKS,
            retransmissions: answers.retransmissions,
            asks: false,
        });
        !std::mem::replace(&mut self.told, true)
    }

    /// No request waits any more. Returns whether the stream must stop its probes.
    pub(super) fn rest(&mut self) -> bool {
        self.looks.take().is_some_and(|looks| looks.asks)
    }

    /// The time of the next check.
    pub(super) fn deadline(&self) -> Option<Nanos> {
        self.looks.as_ref().map(|looks| looks.next)
    }

    /// Checks how the peer's system has answered since the last check, while requests wait.
    pub(super) fn look(&mut self, now: Nanos, answers: &Answers) -> Look {
        let (Some(limit), Some(looks)) = (self.limit, &mut self.looks) else {
            return Look::Goes;
        };
        let silence = answers.last.min(now.since(looks.since));
        if answers.last < now.since(looks.last) {
            looks.retransmissions = answers.retransmissions;
        }
        let tries = answers.retransmissions.saturating_sub(looks.retransmissions) + answers.probes;
        if silence >= limit && tries >= TRIES {
            return Look::Silent(silence);
        }
        looks.last = now;
        looks.next = now + limit / LOOKS;
        if answers.unacknowledged > 0 || std::mem::replace(&mut looks.asks, true) {
            return Look::Goes;
        }
        Look::Ask((limit / LOOKS).max(SHORTEST_INTERVAL))
    }
}
