//! A connection that passes nothing, as TCP would tell of it.

use crate::stream::Answers;
use crate::time::Nanos;
use std::time::Duration;

/// The time after which a peer gives up that gets no answer, unless the driver has told another.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// When a connection fell silent, and since when its peer has not acknowledged what was sent, nor
/// answered what was asked.
#[derive(Debug, Default)]
pub(super) struct Silence {
    pub(super) since: Nanos,
    pub(super) sent: Option<Nanos>,
    pub(super) asked: Option<Nanos>,
}

impl Silence {
    /// That of a port which goes down now: what was sent shortly before may be lost as well.
    pub(super) fn of_port(now: Nanos) -> Silence {
        Silence {
            since: now,
            sent: Some(now),
            asked: None,
        }
    }

    /// How the peer's system answers at this time: not at all.
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

    /// When the peer gives up by its own timer; `None`: it does not wait for an answer.
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
