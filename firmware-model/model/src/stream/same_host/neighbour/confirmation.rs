//! What each end has processed of the other's bytes, and whether anybody waits for it.

use super::Neighbour;
use crate::handshakes;
use std::sync::atomic::Ordering;

impl Neighbour {
    /// How many bytes of ours the peer has processed: placed, delivered, or taken as requests.
    #[inline]
    pub(crate) fn confirmed(&self) -> u64 {
        self.theirs.processed.load(Ordering::Acquire)
    }

    /// Says at the beginning whether requests here complete by [`confirmed`](Self::confirmed). If
    /// not, the peer does not wake us for it. (Queue pairs of one process tell each other in
    /// another way how far they are, and then wake each other by this.)
    pub(crate) fn begin_awaiting(&mut self, confirms: bool) {
        let awaits = confirms || self.peer.is_none_or(|peer| peer == self.owner);
        self.awaited_from = awaits.then_some(0);
        self.ours.unawaited.store(u32::from(!awaits), Ordering::Relaxed);
    }

    /// Whether the peer wakes us when it has processed what was sent up to `sealed`. If not, it
    /// will do so for what is sent from now on: whoever receives that finds the word changed.
    pub(crate) fn awaits(&mut self, sealed: u64) -> bool {
        let from = *self.awaited_from.get_or_insert_with(|| {
            self.ours.unawaited.store(0, Ordering::Relaxed);
            sealed
        });
        sealed > from
    }

    /// We have processed the peer's bytes up to `position`. The peer is told if that is all, or if
    /// what follows `waits` for something else: it may wait for a request before.
    #[inline]
    pub(crate) fn confirm(&mut self, position: u64, waits: bool) {
        if self.processed == position {
            return;
        }
        let is_first = self.processed == 0;
        if is_first {
            self.end_introduction();
        }
        self.processed = position;
        let told = handshakes::confirm(&self.ours.processed, position, &self.incoming.tail) || waits;
        // The first confirmation is awaited in any case: the initiator then takes our disclosure.
        if is_first || (told && self.theirs.unawaited.load(Ordering::Relaxed) == 0) {
            self.bell.ring(self.slot);
        }
    }
}
