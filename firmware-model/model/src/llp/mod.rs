//! The layer below DDP (RFC 5041 §3): it carries ULPDUs in order with their boundaries, says how long one may be
//! (MULPDU), and reports how it ends.
//!
//! [`mpa`] frames ULPDUs over a byte [`Stream`]; [`loopback`] hands them back to the queue pair that sent them. What
//! is above knows no FPDUs, CRCs, markers or sockets; what is below knows no STags.
//!
//! A ULPDU is written where it will be sent from: [`open`](Llp::open) with its header, then its payload in order
//! by [`put`](Llp::put) (copied beside the header) and [`gather`](Llp::gather) (left where it is if that
//! pays), then [`seal`](Llp::seal). [`cancel`](Llp::cancel) takes back one that was not sealed.

#![forbid(unsafe_code)]

pub mod buffers;
pub(crate) mod loopback;
pub(crate) mod mpa;

use crate::host::Unreachable;
use crate::llp::buffers::BufferPool;
use crate::memory::{MemoryTable, Window};
use crate::stream::{Stream, StreamError};
use crate::time::Nanos;
use loopback::Loopback;
use mpa::Mpa;
use rustix::io::Errno;
use urnic_wire::ddp::{TaggedHeader, UNTAGGED_LEN, UntaggedHeader};
use urnic_wire::rdmap::TerminateError;

/// Why the lower layer cannot go on.
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
    /// Memory that was to be sent from, or received into, is not there any more.
    #[error("memory of a work request is gone")]
    Fault,
}

impl LlpError {
    /// What the peer is to be told about an error in what it sent; `None` where it cannot be told.
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
    /// `WouldBlock` is no error and does not come here.
    fn from(error: StreamError) -> LlpError {
        match error {
            StreamError::WouldBlock => LlpError::Lost(Errno::AGAIN),
            StreamError::Closed(errno) => LlpError::Lost(errno),
            StreamError::Fault => LlpError::Fault,
        }
    }
}

/// What a ULPDU begins with. Its length is one of two, so that copying it is two or three stores.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Head {
    octets: [u8; UNTAGGED_LEN],
    len: usize,
}

impl Head {
    #[inline]
    fn len(&self) -> usize {
        self.len
    }

    /// Writes the head to the front of `place`, and perhaps a little behind it, where the payload will be.
    #[inline]
    fn write(&self, place: &mut [u8]) {
        if let Some(place) = place.first_chunk_mut() {
            *place = self.octets;
        }
    }
}

impl From<TaggedHeader> for Head {
    #[inline]
    fn from(header: TaggedHeader) -> Head {
        let mut octets = [0; UNTAGGED_LEN];
        let len = header.emit(&mut octets);
        Head { octets, len }
    }
}

impl From<UntaggedHeader> for Head {
    #[inline]
    fn from(header: UntaggedHeader) -> Head {
        let mut octets = [0; UNTAGGED_LEN];
        let len = header.emit(&mut octets);
        Head { octets, len }
    }
}

/// A lower layer.
#[derive(Debug)]
pub(crate) enum Llp {
    /// MPA over a byte stream.
    Mpa(Box<Mpa>),
    /// The queue pair is its own peer.
    Loopback(Box<Loopback>),
}

impl Llp {
    /// Most bytes of a ULPDU at present.
    #[inline]
    pub(crate) fn mulpdu(&self) -> usize {
        match self {
            Llp::Mpa(mpa) => mpa.tx.mulpdu(),
            Llp::Loopback(_) => loopback::MULPDU,
        }
    }

    /// Whether another ULPDU may be opened. Without room, [`flush`](Self::flush) must take something first.
    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        match self {
            Llp::Mpa(mpa) => mpa.tx.has_room(),
            Llp::Loopback(loopback) => loopback.has_room(),
        }
    }

    /// Begins a ULPDU: `head`, behind which come exactly `payload_len` bytes. There must be room, and the whole
    /// no longer than the MULPDU.
    #[inline]
    pub(crate) fn open(&mut self, buffers: &BufferPool, head: impl Into<Head>, payload_len: usize) {
        let head = head.into();
        match self {
            Llp::Mpa(mpa) => mpa.tx.open(buffers, &head, payload_len),
            Llp::Loopback(loopback) => loopback.open(buffers, &head, payload_len),
        }
    }

    /// The place of the next `len` bytes of payload, to be filled by the caller.
    #[inline]
    pub(crate) fn put(&mut self, len: usize) -> &mut [u8] {
        match self {
            Llp::Mpa(mpa) => mpa.tx.put(len),
            Llp::Loopback(loopback) => loopback.put(len),
        }
    }

    /// The next payload is the `len` bytes of `window` from `at` on, which may change at any moment. If they cannot be reached, the
    /// ULPDU is of no use.
    #[inline]
    pub(crate) fn gather(&mut self, window: &Window<'_>, at: u64, len: usize) -> Result<(), Unreachable> {
        match self {
            Llp::Mpa(mpa) => mpa.tx.gather(window, at, len),
            Llp::Loopback(loopback) => window.copy_out(at, loopback.put(len)),
        }
    }

    /// Ends the ULPDU; returns the position behind it, to be compared with [`taken`](Self::taken).
    #[inline]
    pub(crate) fn seal(&mut self) -> u64 {
        match self {
            Llp::Mpa(mpa) => mpa.tx.seal(),
            Llp::Loopback(loopback) => loopback.seal(),
        }
    }

    /// Takes back the ULPDU that was opened and not sealed.
    pub(crate) fn cancel(&mut self) {
        match self {
            Llp::Mpa(mpa) => mpa.tx.cancel(),
            Llp::Loopback(loopback) => loopback.cancel(),
        }
    }

    /// Up to where the lower layer has taken what was sealed: it will arrive unless the stream is lost.
    #[inline]
    pub(crate) fn taken(&self) -> u64 {
        match self {
            Llp::Mpa(mpa) => mpa.tx.taken(),
            Llp::Loopback(loopback) => loopback.taken(),
        }
    }

    /// Whether everything sealed has been taken.
    #[inline]
    pub(crate) fn is_flushed(&self) -> bool {
        match self {
            Llp::Mpa(mpa) => mpa.tx.is_flushed(),
            Llp::Loopback(loopback) => loopback.is_empty(),
        }
    }

    /// Hands sealed ULPDUs down; `false` if the stream takes no more for now.
    pub(crate) fn flush(
        &mut self,
        memory: &MemoryTable,
        stream: &mut dyn Stream,
        calls: &mut u64,
    ) -> Result<bool, LlpError> {
        match self {
            Llp::Mpa(mpa) => mpa.tx.flush(memory, stream, calls),
            Llp::Loopback(_) => Ok(true),
        }
    }

    /// Must be called between framing and [`flush`](Self::flush) before a STag is revoked: payload that was gathered would keep the revocation
    /// waiting.
    pub(crate) fn rest(&mut self, memory: &MemoryTable) {
        if let Llp::Mpa(mpa) = self {
            mpa.tx.rest(memory);
        }
    }

    /// Looks at the stream's segment size if that is due.
    pub(crate) fn refresh(&mut self, now: Nanos, stream: &dyn Stream) {
        if let Llp::Mpa(mpa) = self {
            mpa.tx.refresh(now, stream);
        }
    }

    /// Gives back the buffers that hold nothing.
    #[inline]
    pub(crate) fn release(&mut self, buffers: &BufferPool) {
        match self {
            Llp::Mpa(mpa) => {
                mpa.tx.release(buffers);
                mpa.rx.release(buffers);
            }
            Llp::Loopback(loopback) => loopback.release(buffers),
        }
    }
}
