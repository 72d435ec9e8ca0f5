//! How far the peer has processed this end's messages, and so which requests are complete, also
//! when the connection ends.
//!
//! RFC 5040 lets a Send or Write complete once the lower layer has taken it. With
//! `completion=delivered` it completes when the peer has placed or delivered it, which this end
//! learns from one of three sources:
//!
//! | peer | source |
//! |---|---|
//! | another urnic | its [confirmations](super::confirming), which it sends unasked |
//! | any other | the answer to a Read: a peer answers after it has placed and delivered all that was sent before the request (RFC 5040 §5.5) |
//! | a process of this host that shares memory | a word there |
//!
//! In addition to these sources, and with `completion=taken` as well, a request waits until a peer
//! on the same device has counted it as processed.
//!
//! A connection begins with Reads. Where the program posts none, the requester sends one of its
//! own, of length zero: at most one at a time, when nothing else is to be sent or much is
//! unconfirmed.
//! This Read also announces that this end takes confirmations. A peer that understands it sends a
//! confirmation, and from then on the requester sends no Reads of its own.

use crate::stream::same_host::ProcessedWord;
use crate::tuning::UNCONFIRMED_MAX;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// The source of a request's completion after the stream has taken the request. With each source,
/// the request also waits for a peer on the same device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Source {
    /// No confirmation: the request completes when the stream has taken it.
    #[default]
    Stream,
    /// The answers to Reads.
    Reads,
    /// The peer's confirmations.
    Messages,
    /// The word in memory that the local peer shares.
    Word,
}

/// The positions up to which the peer has processed our messages. Positions count the bytes of the
/// stream.
#[derive(Debug, Default)]
pub(super) struct Confirmation {
    source: Source,
    /// A completion proves that the peer has the message, also at the end of the connection.
    delivered: bool,
    positions: Positions,
    /// The word in which a local peer counts the bytes that it has processed.
    word: Option<ProcessedWord>,
    /// The word's value when it was last read, at most the number of bytes that the stream had
    /// taken.
    seen: u64,
    /// The next request waits until the local peer has processed all sent bytes.
    delays_next: bool,
    same_device: Option<PeerProgress>,
}

/// The positions of messages that the peer has confirmed, or must still confirm.
#[derive(Debug, Default)]
struct Positions {
    /// The end of the last message.
    sent: u64,
    /// The end of the last message that the program expects a completion of.
    signaled: u64,
    /// The end of the last Read request: its answer confirms all messages before it.
    covered: u64,
    /// All messages before this position are delivered.
    confirmed: u64,
    /// The position that the requester's own Read will confirm, if one is in flight.
    own: Option<u64>,
    /// Unsignalled messages must be confirmed as well: the queue pair closes.
    all: bool,
    /// The requester has sent a Read of its own, so the peer knows that this end takes
    /// confirmations. Until then, unsignalled messages must be confirmed as well.
    announced: bool,
}

impl Confirmation {
    /// For a new connection. `delivered`: requests complete when the peer has processed them.
    pub(super) fn new(delivered: bool) -> Confirmation {
        Confirmation {
            delivered,
            source: if delivered { Source::Reads } else { Source::Stream },
            ..Confirmation::default()
        }
    }

    /// Uses `word`, in which the local peer counts processed bytes, so that no Reads are needed.
    /// Returns whether requests complete by it.
    pub(super) fn use_word(&mut self, word: ProcessedWord) -> bool {
        self.word = Some(word);
        if matches!(self.source, Source::Reads | Source::Messages) {
            self.source = Source::Word;
        }
        self.source == Source::Word
    }

    /// The peer is a queue pair of this device: requests complete when it has processed them.
    pub(super) fn track(&mut self, peer_progress: PeerProgress) {
        self.same_device = Some(peer_progress);
    }

    /// The position up to which requests are complete, if the stream has taken all up to `taken`.
    #[inline]
    pub(super) fn upto(&self, taken: u64) -> u64 {
        let confirmed = match (self.source, &self.word) {
            (Source::Stream, _) | (Source::Word, None) => taken,
            (Source::Reads | Source::Messages, _) => taken.min(self.positions.confirmed),
            // The value is untrusted: a hostile local peer may write anything at any time.
            (Source::Word, Some(word)) => taken.min(word.read()),
        };
        match &self.same_device {
            Some(peer_progress) => peer_progress.known(confirmed),
            None => confirmed,
        }
    }

    /// The position up to which requests succeed if the connection ends now: without
    /// `completion=delivered`, the bytes that the stream has taken.
    pub(super) fn at_end(&self, taken: u64) -> u64 {
        match self.delivered {
            true => self.upto(taken),
            false => taken,
        }
    }

    /// Whether a completion proves that the peer has the message, also at the end.
    pub(super) fn is_delivery(&self) -> bool {
        self.delivered
    }

    /// Whether the peer knows that this end takes confirmations.
    #[inline]
    pub(super) fn is_announced(&self) -> bool {
        self.delivered && self.positions.announced
    }

    /// Whether all messages up to `taken` that need a confirmation are confirmed.
    pub(super) fn is_all(&self, taken: u64) -> bool {
        match (self.source, &self.word) {
            (Source::Stream, _) | (Source::Word, None) => true,
            (Source::Reads | Source::Messages, _) => self.positions.confirmed >= self.positions.sent,
            (Source::Word, Some(word)) => word.read() >= taken,
        }
    }

    /// Whether requests complete by the answers to Reads.
    #[inline]
    pub(super) fn is_by_reads(&self) -> bool {
        self.source == Source::Reads
    }

    /// Whether requests complete by the local peer's word.
    #[inline]
    pub(super) fn is_by_word(&self) -> bool {
        self.source == Source::Word
    }

    /// Whether the peer confirms the messages that it has processed, by any source.
    pub(super) fn is_by_peer(&self) -> bool {
        self.source != Source::Stream || self.is_same_device()
    }

    /// Whether the peer is a queue pair of this device. A stream between two addresses of this host
    /// counts as such a stream only once its other end is attached here, or will certainly be.
    #[inline]
    pub(super) fn is_same_device(&self) -> bool {
        self.same_device.as_ref().is_some_and(PeerProgress::is_tracked)
    }

    /// No message has to confirm while a peer on this device counts what it has processed.
    #[inline]
    pub(super) fn prefer_same_device(&mut self) {
        if matches!(self.source, Source::Reads | Source::Messages) && self.is_same_device() {
            self.source = Source::Stream;
        }
    }

    /// The peer confirms no more: the requests that the stream has taken are complete.
    pub(super) fn await_no_more(&mut self) {
        (self.source, self.delays_next) = (Source::Stream, false);
        self.same_device = None;
    }

    /// The peer has ended. Without `completion=delivered`, no request waits for the peer any more.
    pub(super) fn peer_finished(&mut self) {
        if !self.delivered {
            self.await_no_more();
        }
    }

    /// The connection ends: no reference to the peer remains.
    pub(super) fn part(&mut self) {
        self.await_no_more();
        self.word = None;
    }

    /// The peer cannot confirm: a completion only shows that the stream has taken the request.
    pub(super) fn give_up(&mut self) {
        (self.source, self.delivered) = (Source::Stream, false);
    }

    /// For a queue pair that is its own peer: messages that the loopback has taken are delivered.
    pub(super) fn stop_reads(&mut self) {
        self.source = Source::Stream;
    }

    /// The queue pair closes: unsignalled messages are confirmed, too.
    pub(super) fn confirm_all(&mut self) {
        self.positions.all = true;
    }
}

// The word of a local peer.

impl Confirmation {
    /// Sets whether the next request waits until the local peer has processed all sent bytes.
    #[inline]
    pub(super) fn delay_next(&mut self, delays: bool) {
        self.delays_next = delays;
    }

    /// The word, if a request waits for it.
    #[inline]
    fn awaited(&self) -> Option<&ProcessedWord> {
        self.word
            .as_ref()
            .filter(|_| self.is_by_word() || self.delays_next)
    }

    /// Whether the local peer has processed more of the `taken` bytes than when the word was last
    /// read.
    #[inline]
    pub(super) fn read_word(&mut self, taken: u64) -> bool {
        let said = self.awaited().map_or(0, ProcessedWord::read);
        self.note_word(said.min(taken))
    }

    /// Whether the local peer has processed all `taken` bytes, some of them since the word was last
    /// read. True once for the bytes that were sent: the peer cannot make it true again byte by
    /// byte.
    #[inline]
    pub(super) fn reads_all_processed(&mut self, taken: u64) -> bool {
        let said = self.awaited().map_or(0, ProcessedWord::read);
        said >= taken && self.note_word(taken)
    }

    /// Notes that the local peer has processed all bytes up to `position`. Returns whether that is
    /// more than before.
    #[inline]
    fn note_word(&mut self, position: u64) -> bool {
        let is_more = position > self.seen;
        self.seen = self.seen.max(position);
        is_more
    }
}

// Reads and messages that confirm.

impl Confirmation {
    /// Notes that a message was sent that ends at `position`.
    #[inline]
    pub(super) fn sent(&mut self, position: u64, signaled: bool) {
        self.positions.sent = position;
        if signaled {
            self.positions.signaled = position;
        }
    }

    /// Notes that a Read or atomic request was sent that ends at `position`.
    pub(super) fn requested(&mut self, position: u64) {
        self.positions.covered = position;
    }

    /// Notes that the requester's own Read was sent; it ends at `position`.
    pub(super) fn own_read_sent(&mut self, position: u64) {
        self.requested(position);
        (self.positions.own, self.positions.announced) = (Some(position), true);
    }

    /// Notes that the request that ended at `position` was answered.
    pub(super) fn answered(&mut self, position: u64) {
        self.confirmed(position);
        if self.positions.own == Some(position) {
            self.positions.own = None;
        }
    }

    /// Notes a confirmation of the peer: it has processed all bytes up to `position`, and will
    /// confirm the next ones unasked.
    pub(super) fn received(&mut self, position: u64) {
        if self.source == Source::Reads {
            self.source = Source::Messages;
        }
        self.confirmed(position);
    }

    /// Whether the peer confirms unasked, so that it is another urnic.
    #[inline]
    pub(super) fn is_unasked(&self) -> bool {
        self.source == Source::Messages
    }

    /// Notes that the peer has processed all bytes up to `position`.
    fn confirmed(&mut self, position: u64) {
        self.positions.confirmed = self.positions.confirmed.max(position);
    }

    /// The number of Reads of the requester's own that are in flight.
    #[inline]
    pub(super) fn own_reads(&self) -> usize {
        usize::from(self.positions.own.is_some())
    }

    /// Whether messages wait for a Read that was not sent yet.
    #[inline]
    pub(super) fn is_read_wanted(&self) -> bool {
        let positions = &self.positions;
        let last = match positions.all || !positions.announced {
            true => positions.sent,
            false => positions.signaled,
        };
        self.is_by_reads() && positions.own.is_none() && positions.covered < last
    }

    /// Whether enough bytes are unconfirmed to send a Read before the next message; `half_used`: at
    /// least half of the send queue waits for completion.
    #[inline]
    pub(super) fn is_read_due(&self, half_used: bool) -> bool {
        let positions = &self.positions;
        self.is_by_reads()
            && positions.own.is_none()
            && positions.covered < positions.sent
            && (half_used || positions.sent - positions.covered >= UNCONFIRMED_MAX)
    }

    /// The position in the stream at which the last message ends.
    #[inline]
    pub(super) fn last_sent(&self) -> u64 {
        self.positions.sent
    }
}

/// STag in zero-length messages of our own: some hardware faults on 0, though no peer may check it
/// (row EMPA-20).
pub(super) const ANY_STAG: u32 = 1;

// A peer on the same device.
//
// Each end counts the bytes of the stream up to which it has placed, delivered or answered
// everything, and the other's requests complete when they are among these.

impl Confirmation {
    /// Counts for a peer on this device that all its bytes up to `position` are processed.
    /// `notify`: the peer learns of it by [`must_notify`](Self::must_notify) only.
    #[inline]
    pub(super) fn note_processed(&mut self, position: u64, notify: bool) {
        if let Some(peer_progress) = &mut self.same_device {
            peer_progress.advance(position, notify);
        }
    }

    /// Whether a peer on this device must be informed that more of its messages are processed.
    #[inline]
    pub(super) fn must_notify(&mut self) -> bool {
        self.same_device.as_mut().is_some_and(PeerProgress::moved)
    }
}

/// The count while no peer counts: all requests that the stream took are complete.
const UNTRACKED: u64 = u64::MAX;

/// A count on a cache line of its own: one end writes it, the other end reads it.
#[repr(align(64))]
#[derive(Debug)]
struct Count(AtomicU64);

/// The counts of both directions of a stream: of the bytes of its first end, and of the bytes of
/// its second end.
#[derive(Debug)]
struct Counts([Count; 2]);

/// One end's access to the counts of a stream.
#[derive(Debug)]
pub struct PeerProgress {
    counts: Arc<Counts>,
    /// The index of our end.
    end: usize,
    /// Whether the count of the peer's bytes has changed since the peer was informed.
    moved: bool,
}

/// The second end's access to the counts of a stream, as long as the first end exists.
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
    fn known(&self, taken: u64) -> u64 {
        taken.min(self.of_ours())
    }

    /// Whether there is another end, now or soon.
    fn is_tracked(&self) -> bool {
        self.of_ours() != UNTRACKED
    }

    #[inline]
    fn of_ours(&self) -> u64 {
        let [first, second] = &self.counts.0;
        let of_ours = if self.end == 0 { first } else { second };
        of_ours.0.load(Ordering::Acquire)
    }

    /// Counts that all bytes of the peer up to `position` are placed, delivered or answered.
    /// `notify`: the peer learns of it by [`moved`](Self::moved) only.
    #[inline]
    fn advance(&mut self, position: u64, notify: bool) {
        let [first, second] = &self.counts.0;
        let of_theirs = if self.end == 0 { second } else { first };
        if of_theirs.0.load(Ordering::Relaxed) != position {
            of_theirs.0.store(position, Ordering::Release);
            self.moved |= notify;
        }
    }

    /// Whether the peer must be informed of a change since the last call.
    #[inline]
    fn moved(&mut self) -> bool {
        std::mem::take(&mut self.moved)
    }
}

impl Rendezvous {
    /// The counts for the end that attaches second, which counts from then on.
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
