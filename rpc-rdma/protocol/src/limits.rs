//! Limits of the resources that the header of a peer can make a receiver hold.

/// Limits of the resources that one header can make the receiver hold. A responder holds as many
/// calls as it grants credits. The lengths of Write chunks and of the Reply chunk have no limit,
/// because they are memory of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Segments in all lists together. Each Write chunk counts as one more segment.
    pub segments: usize,
    /// Bytes of all Read chunks together.
    pub read_bytes: u64,
}

impl Default for Limits {
    /// The limits are sufficient for an NFS WRITE or READ of one MiB in pages of 4 KiB.
    fn default() -> Self {
        Self {
            segments: 512,
            read_bytes: 2 << 20,
        }
    }
}
