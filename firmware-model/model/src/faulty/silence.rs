//! A connection that passes nothing, as TCP would tell of it.

use crate::stream::Answers;
use crate::time::Nanos;
use std::time::Duration;

/// When a connection fell silent, and since when its peer has not acknowledged what was sent, nor
/// answered what was asked.
#[derive(Debug, Default)]
pub(super) struct Silence {
    pub(super) since: Nanos,
    pub(super) sent: Option<Nanos>,
    pub(super) asked: Option<Nanos>,
}

impl Silence {
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
