//! A connection that passes nothing, with the answers that TCP would give.

use crate::stream::Answers;
use crate::time::Nanos;
use std::time::Duration;

/// The time after which a peer without an answer gives up, unless the driver has set another.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// The times of a silent connection: when it fell silent, and since when the peer has not
/// acknowledged bytes or answered probes.
#[derive(Debug, Default)]
pub(super) struct Silence {
    pub(super) since: Nanos,
    pub(super) sent: Option<Nanos>,
    pub(super) asked: Option<Nanos>,
}

impl Silence {
    /// The silence of a port that goes down now: bytes sent shortly before may be lost as well.
    pub(super) fn of_port(now: Nanos) -> Silence {
        Silence {
            since: now,
            sent: Some(now),
            asked: None,
        }
    }

    /// The answers of the peer's system at this time: none.
    pub(super) fn answers(&self, now: Nanos) -> Answers {
        let time = |since: Option<Nanos>| since.map_or(Duration::ZERO, |since| now.since(since));
        Answers::of_silence(
            now.since(self.since),
            u32::from(self.sent.is_some()),
            time(self.sent),
            time(self.asked.map(|asked| asked.max(self.since))),
        )
    }
}

/// A port that is down, as a connection sees it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Down {
    pub(super) until: Nanos,
    /// The first time at which something that the peer waits for waited here.
    waiting: Option<Nanos>,
}

impl Down {
    pub(super) fn new(until: Nanos) -> Down {
        Down { until, waiting: None }
    }

    /// The time when the peer gives up by its own timer; `None`: it does not wait for an answer.
    pub(super) fn peer_gives_up(
        &mut self,
        now: Nanos,
        patience: Duration,
        waits: impl FnOnce() -> bool,
    ) -> Option<Nanos> {
        if self.waiting.is_none() && waits() {
            self.waiting = Some(now);
        }
        self.waiting.map(|waiting| waiting + patience)
    }
}
