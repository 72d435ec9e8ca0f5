//! MPA start-up frames as bytes, and the introduction in their private data by which a native
//! connection is made.

use crate::peer::Peer;

/// Flag M of start-up frames: the sender requires markers.
pub const MARKERS: u8 = 0x80;
/// Flag C: the sender requires CRCs.
pub const CRC: u8 = 0x40;
/// Flag R of a Reply: the responder rejects.
pub const REJECT: u8 = 0x20;
/// Flag S: the private data begins with a word (RFC 6581 §6).
pub const ENHANCED: u8 = 0x10;

/// The frames' keys (RFC 5044 §7.1.1).
const REQUEST_KEY: &[u8; 16] = b"MPA ID Req Frame";
const REPLY_KEY: &[u8; 16] = b"MPA ID Rep Frame";
/// A, C, and no negotiation of read depths (RFC 6581 §9).
pub const WORD: u32 = 0xbfff_bfff;

/// A start-up frame (RFC 5044 §7.1.1, RFC 6581 §6).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Key of a Request.
    pub request: bool,
    /// M, C, R, S and reserved ones.
    pub flags: u8,
    /// Revision.
    pub revision: u8,
    /// Private data, with the word if there is one.
    pub private_data: Vec<u8>,
}

impl Frame {
    /// The bytes of the frame.
    pub fn to_bytes(&self) -> Vec<u8> {
        let key = if self.request { REQUEST_KEY } else { REPLY_KEY };
        let len = (self.private_data.len() as u16).to_be_bytes();
        [&key[..], &[self.flags, self.revision], &len, &self.private_data].concat()
    }

    /// Reads one frame.
    #[track_caller]
    pub fn read(peer: &mut Peer) -> Self {
        let head = peer.read_bytes(20);
        let request = head.starts_with(REQUEST_KEY);
        assert!(request || head.starts_with(REPLY_KEY), "{head:02x?}");
        let len = u16::from_be_bytes([head[18], head[19]]);
        Self {
            request,
            flags: head[16],
            revision: head[17],
            private_data: peer.read_bytes(len.into()),
        }
    }

    /// The word at the start of the private data.
    pub fn word(&self) -> Option<u32> {
        let bytes = self.private_data.first_chunk()?;
        (self.flags & ENHANCED != 0).then(|| u32::from_be_bytes(*bytes))
    }
}

/// The parameters of one end of a native connection, in private data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Introduction {
    /// The queue pair number of this end.
    pub from: u32,
    /// The queue pair number of the peer.
    pub to: u32,
    /// The first PSN of this end.
    pub sq_psn: u32,
    /// The first PSN that this end expects.
    pub rq_psn: u32,
    /// How often the Sends of this end are repeated when no receive is posted: 7 = for ever.
    pub rnr_retry: u8,
    /// Distinguishes the connection attempts of this end.
    pub nonce: u64,
}

impl Introduction {
    /// The bytes of the introduction: version 1, a connect, with a valid PSN and `rnr_retry`.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = b"uRNC".to_vec();
        bytes.extend([1, 0, 3, self.rnr_retry]);
        bytes.extend(
            [self.from, self.to, self.sq_psn, self.rq_psn]
                .map(u32::to_be_bytes)
                .concat(),
        );
        bytes.extend(self.nonce.to_be_bytes());
        bytes
    }

    /// The bytes after a word: private data of an enhanced frame.
    pub fn with_word(&self, word: u32) -> Vec<u8> {
        [word.to_be_bytes().to_vec(), self.to_bytes()].concat()
    }

    /// The bytes of an end that connects from RTR on, before it has its first PSN and `rnr_retry`,
    /// which it gets at RTS.
    pub fn before_rts(&self, word: u32) -> Vec<u8> {
        let mut private_data = self.with_word(word);
        private_data[10..12].fill(0);
        private_data[20..24].fill(0);
        private_data
    }
}
