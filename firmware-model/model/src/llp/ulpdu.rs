//! The headers that ULPDUs begin with, and the reasons why a ULPDU cannot be carried.

use crate::stream::StreamError;
use rustix::io::Errno;
use urnic_wire::ddp::{TaggedHeader, UNTAGGED_LEN, UntaggedHeader};
use urnic_wire::rdmap::TerminateError;

/// The reason why the lower layer cannot continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum LlpError {
    /// The stream was reset, timed out, or ended inside an FPDU (RFC 5044 §8, code 1).
    #[error("stream lost: {0}")]
    Lost(Errno),
    /// An FPDU's CRC is wrong (code 2).
    #[error("FPDU with a wrong CRC")]
    Crc,
    /// A marker and ULPDU_Length disagree (code 3).
    #[error("FPDU with a wrong marker")]
    Marker,
    /// The memory of a work request is unmapped, so its bytes cannot be sent or received.
    #[error("memory of a work request is unmapped")]
    Fault,
}

impl LlpError {
    /// The Terminate that reports an error in received bytes; `None` if no Terminate can be sent.
    pub(crate) fn terminate(self) -> Option<TerminateError> {
        match self {
            LlpError::Lost(_) => None,
            LlpError::Crc => Some(TerminateError::MpaCrc),
            LlpError::Marker => Some(TerminateError::MpaMarker),
            LlpError::Fault => Some(TerminateError::DdpLocalCatastrophic),
        }
    }
}

impl From<StreamError> for LlpError {
    /// `WouldBlock` is no error: callers handle it before they convert.
    fn from(error: StreamError) -> LlpError {
        match error {
            StreamError::WouldBlock => LlpError::Lost(Errno::AGAIN),
            StreamError::Closed(errno) => LlpError::Lost(errno),
            StreamError::Fault => LlpError::Fault,
        }
    }
}

/// The header that a ULPDU begins with. It has one of two lengths, so that copying it is two or
/// three stores.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Head {
    bytes: [u8; UNTAGGED_LEN],
    len: usize,
}

impl Head {
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Writes the head to the front of `place`. May also write a few bytes after the head, which
    /// the payload overwrites.
    #[inline]
    pub(super) fn write(&self, place: &mut [u8]) {
        if let Some(place) = place.first_chunk_mut() {
            *place = self.bytes;
        }
    }
}

impl From<TaggedHeader> for Head {
    #[inline]
    fn from(header: TaggedHeader) -> Head {
        let mut bytes = [0; UNTAGGED_LEN];
        let len = header.emit(&mut bytes);
        Head { bytes, len }
    }
}

impl From<UntaggedHeader> for Head {
    #[inline]
    fn from(header: UntaggedHeader) -> Head {
        let mut bytes = [0; UNTAGGED_LEN];
        let len = header.emit(&mut bytes);
        Head { bytes, len }
    }
}
