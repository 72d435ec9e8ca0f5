//! Why a queue pair is run.

use bitflags::bitflags;

bitflags! {
    /// What a queue pair is requested to do.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) struct Requests: u32 {
        /// The driver rang for the send queue.
        const SEND = 1;
        /// The stream may have bytes, or receives were posted.
        const RECEIVE = 1 << 1;
        /// The stream may take bytes again.
        const WRITABLE = 1 << 2;
        /// The peer's side of the stream has ended: read to the end.
        const HANG_UP = 1 << 3;
        /// Send what was gathered.
        const FLUSH = 1 << 4;
        /// A timer expired.
        const TIMER = 1 << 5;
        /// A completion queue overflowed.
        const CQ_LOST = 1 << 6;
        /// Continue to send; the driver did not ring.
        const RESUME = 1 << 7;
        /// The command that attached a stream is complete.
        const ATTACHED = 1 << 8;
        /// The peer, a queue pair of this device, has processed more of what was sent.
        const PEER_PROGRESS = 1 << 9;
        /// Check again whether something was requested.
        const AGAIN = 1 << 10;
    }
}
