//! Completions that mean delivery: by Reads and confirmations of a peer on another device, and by
//! what is counted for a peer on this one.
//!
//! RFC 5040 lets a Send or Write complete once the lower layer has taken it. A peer answers a Read
//! after it has placed and delivered all that was sent before the request (RFC 5040 §5.5). So the
//! answer to any Read confirms the messages before it. Where the program posts no Read, the
//! requester sends one of its own, of length zero: at most one at a time, when nothing else is to
//! be sent or much is unconfirmed.

use crate::tuning::UNCONFIRMED_MAX;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use urnic_wire::ddp::TaggedHeader;
use urnic_wire::rdmap::{Control, Opcode, ReadRequest};

/// How much of what was sent the peer has confirmed. Positions count the bytes of the stream.
#[derive(Debug, Default)]
pub(super) struct Delivery {
    /// Requests complete when they are confirmed.
    on: bool,
    /// Behind the last message.
    sent: u64,
    /// Behind the last message that the program expects a completion of.
    signaled: u64,
    /// Behind the last Read request: its answer confirms all before it.
    covered: u64,
    /// All before this position is delivered.
    confirmed: u64,
    /// The position that the requester's own Read will confirm, if one is in flight.
    probe: Option<u64>,
    /// Unsignalled messages must be confirmed as well: the queue pair closes.
    all: bool,
    /// The peer does not know yet that we take confirmations: the requester's own Read says so.
    /// Until one is sent, unsignalled messages must be confirmed as well.
    untold: bool,
}

impl Delivery {
    /// Requests complete when they are confirmed, from now on. `is_told`: the peer knows that we
    /// take confirmations.
    pub(super) fn begin(&mut self, is_told: bool) {
        (self.on, self.untold) = (true, !is_told);
    }

    /// Requests complete when the stream has taken them, from now on.
    pub(super) fn stop(&mut self) {
        self.on = false;
    }

    #[inline]
    pub(super) fn is_on(&self) -> bool {
        self.on
    }

    /// The queue pair closes: unsignalled messages are confirmed, too.
    pub(super) fn confirm_all(&mut self) {
        self.all = true;
    }

    /// The position up to which requests are complete, if the stream has taken all up to `taken`.
    #[inline]
    pub(super) fn known(&self, taken: u64) -> u64 {
        if self.on { taken.min(self.confirmed) } else { taken }
    }

    /// A message was sent that ends at `position`.
    #[inline]
    pub(super) fn sent(&mut self, position: u64, signaled: bool) {
        self.sent = position;
        if signaled {
            self.signaled = position;
        }
    }

    /// A Read or atomic request was sent that ends at `position`.
    pub(super) fn requested(&mut self, position: u64) {
        self.covered = position;
    }

    /// The requester's own Read was sent; it ends at `position`.
    pub(super) fn probed(&mut self, position: u64) {
        self.requested(position);
        (self.probe, self.untold) = (Some(position), false);
    }

    /// The request that ended at `position` was answered.
    pub(super) fn answered(&mut self, position: u64) {
        self.confirmed = self.confirmed.max(position);
        if self.probe == Some(position) {
            self.probe = None;
        }
    }

    /// The peer ends: it has processed all up to `position`.
    pub(super) fn confirmed_to(&mut self, position: u64) {
        self.confirmed = self.confirmed.max(position);
    }

    /// The number of Reads of the requester's own that are in flight.
    #[inline]
    pub(super) fn probes(&self) -> usize {
        usize::from(self.probe.is_some())
    }

    /// Whether messages wait for a Read that was not sent yet.
    #[inline]
    pub(super) fn is_wanted(&self) -> bool {
        let last = if self.all || self.untold {
            self.sent
        } else {
            self.signaled
        };
        self.on && self.probe.is_none() && self.covered < last
    }

    /// Whether enough bytes are unconfirmed to send a Read before the next message; `half_used`:
    /// half of the send queue waits for completion.
    #[inline]
    pub(super) fn is_due(&self, half_used: bool) -> bool {
        self.on
            && self.probe.is_none()
            && self.covered < self.sent
            && (half_used || self.sent - self.covered >= UNCONFIRMED_MAX)
    }

    /// The position in the stream at which the last message ends.
    #[inline]
    pub(super) fn last_sent(&self) -> u64 {
        self.sent
    }

    /// Whether messages are unconfirmed.
    pub(super) fn is_pending(&self) -> bool {
        self.on && self.confirmed < self.sent
    }
}

// A confirmation: what an end tells a peer that understands it about messages that no Read may
// confirm in time, a Read Response of length zero that answers no Read (design: completions).

/// STag in zero-length messages of our own: some hardware faults on 0, though no peer may check it
/// (row EMPA-20).
pub(super) const ANY_STAG: u32 = 1;

/// Source offset of the Reads of length zero that confirm messages: an end that sends it accepts a
/// last confirmation.
pub(super) const MARK: u64 = u64::from_be_bytes(*b"urnic\0\0\x01");

/// The header of a confirmation: all up to `position` of what the peer sent is processed.
pub(super) fn header(position: u64) -> TaggedHeader {
    TaggedHeader {
        last: true,
        rsvd_ulp: Control::from(Opcode::ReadResponse).byte(),
        stag: ANY_STAG,
        to: position,
    }
}

/// Whether a Read Response with this header and `len` bytes is a confirmation. The Response to
/// a Read of ours of length zero has the offset 0.
#[inline]
pub(super) fn is_confirmation(header: &TaggedHeader, len: usize) -> bool {
    header.last && len == 0 && header.stag == ANY_STAG && header.to != 0
}

/// Whether the peer that sent this request takes a confirmation.
pub(super) fn is_taken_by_sender_of(request: &ReadRequest) -> bool {
    request.size == 0 && request.source_stag == ANY_STAG && request.source_to == MARK
}

// How far a peer on the same device has processed our messages: they complete after that.
//
// RFC 5040 lets a Send or Write complete once the lower layer has taken it; of a peer elsewhere no
// more can be known. Where both ends of a stream are queue pairs of one device, each counts the
// bytes of the stream up to which it has placed, delivered or answered everything, and the other's
// requests complete when they are among these.

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
