//! Why somebody has a queue pair look at itself.

use std::ops::BitOr;

/// What a queue pair is asked to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Asked(pub(crate) u32);

impl Asked {
    /// Only to look whether something else was asked.
    pub(crate) const NOTHING: Asked = Asked(0);
    /// The driver rang for the send queue.
    pub(crate) const SEND: Asked = Asked(1);
    /// The stream may have bytes, or receives were posted.
    pub(crate) const RECEIVE: Asked = Asked(1 << 1);
    /// The stream may take bytes again.
    pub(crate) const WRITABLE: Asked = Asked(1 << 2);
    /// The peer's side of the stream has ended: read to the end.
    pub(crate) const HANG_UP: Asked = Asked(1 << 3);
    /// Send what was gathered.
    pub(crate) const FLUSH: Asked = Asked(1 << 4);
    /// A timer ran out.
    pub(crate) const TIMER: Asked = Asked(1 << 5);
    /// A completion queue overflowed.
    pub(crate) const CQ_LOST: Asked = Asked(1 << 6);
    /// Go on sending; the driver did not ring.
    pub(crate) const RESUME: Asked = Asked(1 << 7);
    /// The command that attached a stream is complete.
    pub(crate) const ATTACHED: Asked = Asked(1 << 8);
    /// The peer, a queue pair of this device, is through with more of what was sent.
    pub(crate) const JUDGED: Asked = Asked(1 << 9);
    /// To look again whether something was asked.
    pub(crate) const AGAIN: Asked = Asked(1 << 10);

    pub(crate) fn has(self, other: Asked) -> bool {
        self.0 & other.0 != 0
    }

    pub(crate) fn only(self, others: Asked) -> bool {
        self.0 & !others.0 == 0
    }
}

impl BitOr for Asked {
    type Output = Asked;

    fn bitor(self, other: Asked) -> Asked {
        Asked(self.0 | other.0)
    }
}
