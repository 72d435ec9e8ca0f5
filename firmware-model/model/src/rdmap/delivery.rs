//! Completions that mean delivery, where the peer is on another device.
//!
//! RFC 5040 lets a Send or Write complete once the lower layer has taken it. A peer answers a Read
//! after it has placed and delivered all that was sent before the request (RFC 5040 §5.5). So the
//! answer to any Read confirms the messages before it. Where the program posts no Read, the
//! requester sends one of its own, of length zero: at most one at a time, when nothing else is to
//! be sent or much is unconfirmed.

/// Bytes sent since the last Read request that require another one, though there is more to send.
const FAR_BEHIND: u64 = 256 << 10;

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
    /// The position that the requester's own Read will confirm, if one is under way.
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

    /// The number of Reads of the requester's own that are under way.
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
            && (half_used || self.sent - self.covered >= FAR_BEHIND)
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
