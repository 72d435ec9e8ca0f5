//! A queue pair that is its own peer: ULPDUs are handed back in memory, with no stream, framing or
//! CRC.

use crate::capture::own_peer::OwnPeerTap;
use crate::llp::queue::UlpduQueue;

/// ULPDUs that were sent and not received yet.
#[derive(Debug, Default)]
pub(crate) struct Loopback {
    pub(crate) queue: UlpduQueue,
    /// Bytes up to which everything was placed, delivered or answered.
    processed: u64,
    tap: Option<Box<OwnPeerTap>>,
}

impl Loopback {
    /// A loopback that is captured.
    pub(crate) fn captured(tap: OwnPeerTap) -> Loopback {
        Loopback {
            tap: Some(Box::new(tap)),
            ..Loopback::default()
        }
    }

    pub(crate) fn seal(&mut self) -> u64 {
        if let Some(tap) = &mut self.tap
            && let Some(ulpdu) = self.queue.opened()
        {
            tap.ulpdu(ulpdu);
        }
        self.queue.seal()
    }

    /// The position up to which messages are delivered. The outcome of each message to a queue pair
    /// that is its own peer is known, so no message completes earlier.
    #[inline]
    pub(crate) fn taken(&self) -> u64 {
        self.processed
    }

    /// Records that everything up to `position` is placed, delivered or answered.
    pub(crate) fn advance(&mut self, position: u64) {
        self.processed = position;
    }
}
