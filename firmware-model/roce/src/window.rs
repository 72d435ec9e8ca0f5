//! How many packets may be in flight.
//!
//! RoCE v2 has no window of its own: adapters are paced by hardware. Software over UDP has the
//! socket's buffers, which lose what does not fit, so the requester paces itself as TCP does
//! (RFC 5681): it begins with few packets, doubles with each round trip until the first loss, then
//! grows by a packet for each round trip. A loss and a congestion notification halve the window, at
//! most once for the packets in flight; a timeout leaves one packet.

/// The window of a connection in packets. Responses of Reads count, too: a Read that is longer is
/// requested in parts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    size: u32,
    /// Growth is slow from here on.
    threshold: u32,
    most: u32,
    /// Packets acknowledged since the window has grown by one.
    acknowledged: u32,
    /// First packet that was not yet sent when the window last shrank: losses and congestion of
    /// packets before it are the same event.
    shrunk_until: u64,
}

/// Packets in flight at first (RFC 6928: ten).
const INITIAL: u32 = 10;

impl Window {
    pub(crate) fn new(most: u32) -> Self {
        let most = most.max(1);
        Self {
            size: INITIAL.min(most),
            threshold: most,
            most,
            acknowledged: 0,
            shrunk_until: 0,
        }
    }

    pub(crate) fn size(&self) -> u32 {
        self.size
    }

    pub(crate) fn acknowledged(&mut self, packets: u64) {
        let packets = u32::try_from(packets).unwrap_or(u32::MAX);
        if self.size < self.threshold {
            self.size = self.size.saturating_add(packets).min(self.threshold);
            return;
        }
        self.acknowledged = self.acknowledged.saturating_add(packets);
        if self.acknowledged >= self.size {
            self.acknowledged = 0;
            self.size = (self.size + 1).min(self.most);
        }
    }

    /// A packet at `oldest` was lost, or the network is congested; `unsent` is the first packet
    /// that was never sent.
    pub(crate) fn congested(&mut self, oldest: u64, unsent: u64) {
        if oldest < self.shrunk_until {
            return;
        }
        self.shrunk_until = unsent;
        self.threshold = (self.size / 2).max(1);
        self.size = self.threshold;
        self.acknowledged = 0;
    }

    /// Nothing came for the Local ACK Timeout.
    pub(crate) fn timed_out(&mut self, unsent: u64) {
        self.shrunk_until = unsent;
        self.threshold = (self.size / 2).max(2).min(self.most);
        self.size = 1;
        self.acknowledged = 0;
    }
}
