//! How far a peer on the same device has processed our messages: they complete after that.
//!
//! RFC 5040 lets a Send or Write complete once the lower layer has taken it; of a peer elsewhere no
//! more can be known. Where both ends of a stream are queue pairs of one device, each counts the
//! bytes of the stream up to which it has placed, delivered or answered everything, and the other's
//! requests complete when they are among these.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// No peer counts: requests that the stream took are complete.
const UNTRACKED: u64 = u64::MAX;

/// A count alone on its cache line: one end writes it, the other end reads it.
#[repr(align(64))]
#[derive(Debug)]
struct Count(AtomicU64);

/// The counts of both directions of a stream: of what its first end sent, and of what its second
/// did.
#[derive(Debug)]
struct Counts([Count; 2]);

/// The counts of a stream, as one of its ends sees them.
#[derive(Debug)]
pub struct PeerProgress {
    counts: Arc<Counts>,
    /// Which end we are.
    end: usize,
    /// Whether the count of what the peer sent has changed since the peer was informed.
    moved: bool,
}

/// Where the second end finds the counts of a stream, as long as the first end exists.
#[derive(Debug)]
pub struct Rendezvous(Weak<Counts>);

impl PeerProgress {
    /// The counts for the end that attaches first. `awaited`: the peer will attach, too, so that
    /// nothing completes before.
    pub fn first(awaited: bool) -> PeerProgress {
        let count = |at| Count(AtomicU64::new(at));
        let of_first = if awaited { 0 } else { UNTRACKED };
        PeerProgress {
            counts: Arc::new(Counts([count(of_first), count(0)])),
            end: 0,
            moved: false,
        }
    }

    /// The value with which the other end joins.
    pub fn rendezvous(&self) -> Rendezvous {
        Rendezvous(Arc::downgrade(&self.counts))
    }

    /// The number of bytes with a known outcome, of the `taken` bytes that the stream took from
    /// this side.
    #[inline]
    pub(super) fn known(&self, taken: u64) -> u64 {
        taken.min(self.of_ours())
    }

    /// Whether there is another end, now or soon.
    pub(super) fn is_tracked(&self) -> bool {
        self.of_ours() != UNTRACKED
    }

    #[inline]
    fn of_ours(&self) -> u64 {
        let [first, second] = &self.counts.0;
        let of_ours = if self.end == 0 { first } else { second };
        of_ours.0.load(Ordering::Acquire)
    }

    /// All up to `position` of what the peer sent is placed, delivered or answered. `tell`: the
    /// peer learns of it by [`moved`](Self::moved) only.
    #[inline]
    pub(super) fn advance(&mut self, position: u64, tell: bool) {
        let [first, second] = &self.counts.0;
        let of_theirs = if self.end == 0 { second } else { first };
        if of_theirs.0.load(Ordering::Relaxed) != position {
            of_theirs.0.store(position, Ordering::Release);
            self.moved |= tell;
        }
    }

    /// Whether the peer must be informed of a change since the last call.
    #[inline]
    pub(super) fn moved(&mut self) -> bool {
        std::mem::take(&mut self.moved)
    }
}

impl Rendezvous {
    /// The counts for the end that attaches second, which counts from now on.
    pub fn join(&self) -> Option<PeerProgress> {
        let counts = self.0.upgrade()?;
        let [of_first, _] = &counts.0;
        let _ = (of_first.0).compare_exchange(UNTRACKED, 0, Ordering::AcqRel, Ordering::Relaxed);
        Some(PeerProgress {
            counts,
            end: 1,
            moved: false,
        })
    }
}
