//! The RPC-over-RDMA header (RFC 8166 §4).

use crate::chunk::ChunkLists;
use crate::limits::Limits;
use crate::malformed::Malformed;
use crate::procedure;
use crate::xdr::{Reader, UNIT, put_word};
use std::fmt;

/// The supported version of the protocol (RFC 8166 §4.2.2).
pub const VERSION: u32 = 1;

/// Bytes of the four fixed fields, which all versions have (RFC 8166 §4.2).
pub const FIXED_LEN: usize = 4 * UNIT;

/// Bytes of the shortest header that carries a call or a reply: the fixed fields and three absent
/// lists. RFC 8166 §4.5 requires a responder to discard shorter messages. RDMA_ERROR, which only
/// requesters accept, may have 20 bytes.
pub const MIN_LEN: usize = FIXED_LEN + 3 * UNIT;

/// Values of rdma_err.
mod error_code {
    pub(super) const VERS: u32 = 1;
    pub(super) const CHUNK: u32 = 2;
}

/// The contents of RDMA_ERROR (RFC 8166 §4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ErrorBody {
    /// ERR_VERS: the peer does not support the version.
    #[error("the peer speaks RPC-over-RDMA versions {low} to {high}")]
    Version {
        /// Lowest version that the peer supports.
        low: u32,
        /// Highest version that the peer supports.
        high: u32,
    },
    /// ERR_CHUNK (the draft's RDMA_ERR_BADHEADER): the header was invalid, or no RPC reply is
    /// possible.
    #[error("the peer could not use the header or its chunks")]
    Chunk,
}

/// The part of a header after the fixed fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// RDMA_MSG: the payload follows the header in the same Send.
    Msg(ChunkLists),
    /// RDMA_NOMSG: the payload is in the position-zero Read chunk (calls), or in the Reply chunk
    /// (replies).
    NoMsg(ChunkLists),
    /// RDMA_ERROR.
    Error(ErrorBody),
}

/// An RPC-over-RDMA header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Transaction id, the same as in the RPC message.
    pub xid: u32,
    /// [`VERSION`]. In RDMA_ERROR, the version of the header that it answers (RFC 8166 §4.5).
    pub version: u32,
    /// Credits requested (calls) or granted (replies).
    pub credits: u32,
    /// The part after the fixed fields.
    pub body: Body,
}

impl Header {
    /// Splits a received message into the header and the bytes after it. These bytes are the
    /// payload if the body is [`Body::Msg`].
    ///
    /// # Errors
    /// The first fault in the order of the bytes. After an unsupported version, the rest is not
    /// parsed, except for RDMA_ERROR, which has the same form in all versions.
    pub fn parse<'a>(message: &'a [u8], limits: &Limits) -> Result<(Self, &'a [u8]), Malformed> {
        let mut reader = Reader(message);
        let xid = reader.word()?;
        let version = reader.word()?;
        let credits = reader.word()?;
        let procedure = reader.word()?;
        if version != VERSION && procedure != procedure::ERROR {
            return Err(Malformed::Version(version));
        }
        let body = match procedure {
            procedure::MSG => Body::Msg(ChunkLists::parse(&mut reader, limits)?),
            procedure::NOMSG => {
                let lists = ChunkLists::parse(&mut reader, limits)?;
                // RFC 8166 §4.2.4: a Read list or a Reply chunk must be present and hold the
                // payload. The Write list never holds it.
                if lists.reads.is_empty() && lists.reply.is_none() {
                    return Err(Malformed::NoPayload);
                }
                Body::NoMsg(lists)
            }
            procedure::MSGP | procedure::DONE => return Err(Malformed::Withdrawn(procedure)),
            procedure::ERROR => Body::Error(match reader.word()? {
                error_code::VERS => ErrorBody::Version {
                    low: reader.word()?,
                    high: reader.word()?,
                },
                error_code::CHUNK => ErrorBody::Chunk,
                code => return Err(Malformed::ErrorCode(code)),
            }),
            other => return Err(Malformed::Procedure(other)),
        };
        let header = Self {
            xid,
            version,
            credits,
            body,
        };
        Ok((header, reader.0))
    }

    /// Number of bytes that [`emit`](Self::emit) writes.
    pub fn encoded_len(&self) -> usize {
        FIXED_LEN
            + match &self.body {
                Body::Msg(lists) | Body::NoMsg(lists) => lists.encoded_len(),
                Body::Error(ErrorBody::Version { .. }) => 3 * UNIT,
                Body::Error(ErrorBody::Chunk) => UNIT,
            }
    }

    /// Appends the header to `out`.
    pub fn emit(&self, out: &mut Vec<u8>) {
        out.reserve(self.encoded_len());
        let procedure = match self.body {
            Body::Msg(_) => procedure::MSG,
            Body::NoMsg(_) => procedure::NOMSG,
            Body::Error(_) => procedure::ERROR,
        };
        for word in [self.xid, self.version, self.credits, procedure] {
            put_word(word, out);
        }
        match &self.body {
            Body::Msg(lists) | Body::NoMsg(lists) => lists.emit(out),
            Body::Error(ErrorBody::Version { low, high }) => {
                for word in [error_code::VERS, *low, *high] {
                    put_word(word, out);
                }
            }
            Body::Error(ErrorBody::Chunk) => put_word(error_code::CHUNK, out),
        }
    }
}

/// Xid, version and procedure of any message that has the four fixed fields. The rest of the
/// message may be invalid.
pub(crate) fn fixed(message: &[u8]) -> Option<(u32, u32, u32)> {
    let mut reader = Reader(message);
    let (xid, version, _credits, procedure) = (
        reader.word().ok()?,
        reader.word().ok()?,
        reader.word().ok()?,
        reader.word().ok()?,
    );
    Some((xid, version, procedure))
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Self { xid, credits, .. } = self;
        match &self.body {
            Body::Msg(lists) => write!(f, "RDMA_MSG xid {xid:#010x} credits {credits}{lists}"),
            Body::NoMsg(lists) => write!(f, "RDMA_NOMSG xid {xid:#010x} credits {credits}{lists}"),
            Body::Error(ErrorBody::Chunk) => write!(f, "RDMA_ERROR xid {xid:#010x} ERR_CHUNK"),
            Body::Error(ErrorBody::Version { low, high }) => {
                write!(f, "RDMA_ERROR xid {xid:#010x} ERR_VERS {low}..{high}")
            }
        }
    }
}
