//! The private data of a connection's set-up (RFC 8797).
//!
//! ```text
//! f6 ab 0e 18   version(8)   reserved(7) R(1)   send size(8)   receive size(8)
//! ```

/// Bytes that either end can send and receive in one message without private data (RFC 8166
/// §3.3.3).
pub const DEFAULT_INLINE: usize = 1024;

const FORMAT: [u8; 4] = [0xf6, 0xab, 0x0e, 0x18];
const VERSION: u8 = 1;
const REMOTE_INVALIDATION: u8 = 1;
/// Unit of a size byte: 0 means one unit, 1 means two units.
const SIZE_UNIT: usize = 1024;

/// The private data of RFC 8797. The default applies to a peer that sent none (§5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrivateData {
    /// R: the sender of the private data supports Sends that invalidate: as a requester it accepts
    /// them, as a responder it may send them.
    pub remote_invalidation: bool,
    /// Maximum bytes of one Send from the sender of the private data.
    pub send_size: usize,
    /// Bytes that each receive of the sender of the private data holds.
    pub receive_size: usize,
}

impl Default for PrivateData {
    fn default() -> Self {
        Self {
            remote_invalidation: false,
            send_size: DEFAULT_INLINE,
            receive_size: DEFAULT_INLINE,
        }
    }
}

impl PrivateData {
    /// Bytes on the wire.
    pub const LEN: usize = 8;

    /// Finds the format of RFC 8797 at any offset of a peer's private data (§5.2). `None` if there
    /// is none with a supported version, or if it is truncated.
    pub fn find(private_data: &[u8]) -> Option<Self> {
        private_data.windows(Self::LEN).find_map(|window| match window {
            [a, b, c, d, VERSION, flags, send, receive] if [*a, *b, *c, *d] == FORMAT => Some(Self {
                remote_invalidation: flags & REMOTE_INVALIDATION != 0,
                send_size: bytes(*send),
                receive_size: bytes(*receive),
            }),
            _ => None,
        })
    }

    /// The private data in bytes. Sizes are rounded down to a multiple of 1024 and limited to 1 …
    /// 256 KiB.
    pub fn emit(&self) -> [u8; Self::LEN] {
        let [a, b, c, d] = FORMAT;
        let flags = u8::from(self.remote_invalidation) * REMOTE_INVALIDATION;
        [
            a,
            b,
            c,
            d,
            VERSION,
            flags,
            size_byte(self.send_size),
            size_byte(self.receive_size),
        ]
    }

    /// The inline threshold, in bytes of the longest Send, for messages from the end that sent
    /// `self` to the end that sent `peer`.
    pub fn threshold(&self, peer: &Self) -> usize {
        self.send_size.min(peer.receive_size)
    }
}

fn bytes(size: u8) -> usize {
    (usize::from(size) + 1) * SIZE_UNIT
}

fn size_byte(bytes: usize) -> u8 {
    (bytes / SIZE_UNIT).clamp(1, 256).wrapping_sub(1) as u8
}
