//! The terms of a connection.

use crate::private_data::{DEFAULT_INLINE, PrivateData};

/// The terms that both ends agreed on at the connection's set-up, as seen by this end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Bytes of the longest Send of this end.
    pub send: usize,
    /// Bytes of the longest Send of the peer.
    pub receive: usize,
    /// Whether replies may invalidate STags remotely.
    pub remote_invalidation: bool,
}

impl Default for Terms {
    fn default() -> Self {
        Self {
            send: DEFAULT_INLINE,
            receive: DEFAULT_INLINE,
            remote_invalidation: false,
        }
    }
}

impl Terms {
    /// The terms that follow from the private data of both ends (RFC 8797 §4).
    pub fn agreed(ours: &PrivateData, theirs: &PrivateData) -> Self {
        Self {
            send: ours.threshold(theirs),
            receive: theirs.threshold(ours),
            remote_invalidation: ours.remote_invalidation && theirs.remote_invalidation,
        }
    }
}
