//! The layer below DDP (RFC 5041 §3): it carries ULPDUs in order with their boundaries, reports how
//! long one may be (MULPDU), and how the stream ends.
//!
//! [`mpa`] frames ULPDUs over a byte [`Stream`]; [`loopback`] hands them back to the queue pair
//! that sent them. The layers above do not depend on FPDUs, CRCs, markers or sockets; the layers
//! below do not depend on STags.
//!
//! A ULPDU is written where it will be sent from: [`open`](Llp::open) with its header, then its
//! payload in order by [`put`](Llp::put) (copied after the header) and [`gather`](Llp::gather)
//! (left where it is if that is cheaper), then [`seal`](Llp::seal). [`cancel`](Llp::cancel) takes
//! back one that was not sealed.

#![forbid(unsafe_code)]

pub mod buffers;
pub(crate) mod loopback;
pub(crate) mod mpa;
mod ulpdu;

pub(crate) use ulpdu::{Head, LlpError};

use crate::host::Unreachable;
use crate::llp::buffers::BufferPool;
use crate::memory::{MemoryTable, Window};
use crate::stream::Stream;
use crate::time::Now;
use loopback::Loopback;
use mpa::Mpa;

/// A lower layer.
#[derive(Debug)]
pub(crate) enum Llp {
    /// MPA over a byte stream.
    Mpa(Box<Mpa>),
    /// The queue pair is its own peer.
    Loopback(Box<Loopback>),
}

impl Llp {
    /// The most bytes of a ULPDU at present.
    #[inline]
    pub(crate) fn mulpdu(&self) -> usize {
        match self {
            Llp::Mpa(mpa) => mpa.tx.mulpdu(),
            Llp::Loopback(_) => loopback::MULPDU,
        }
    }

    /// Whether another ULPDU may be opened. Without room, [`flush`](Self::flush) must take
    /// something first.
    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        match self {
            Llp::Mpa(mpa) => mpa.tx.has_room(),
            Llp::Loopback(loopback) => loopback.has_room(),
        }
    }

    /// Begins a ULPDU: `head`, then exactly `payload_len` bytes of payload. There must be room, and
    /// the whole must not be longer than the MULPDU.
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

    /// Adds the `len` bytes of `window` from `at` on as the next payload; they may change at any
    /// time. If they cannot be accessed, the ULPDU cannot be used.
    #[inline]
    pub(crate) fn gather(&mut self, window: &Window<'_>, at: u64, len: usize) -> Result<(), Unreachable> {
        match self {
            Llp::Mpa(mpa) => mpa.tx.gather(window, at, len),
            Llp::Loopback(loopback) => window.copy_out(at, loopback.put(len)),
        }
    }

    /// Ends the ULPDU; returns the position after it, to be compared with [`taken`](Self::taken).
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

    /// The position up to which the lower layer has taken sealed bytes: they will arrive unless the
    /// stream is lost.
    #[inline]
    pub(crate) fn taken(&self) -> u64 {
        match self {
            Llp::Mpa(mpa) => mpa.tx.taken(),
            Llp::Loopback(loopback) => loopback.taken(),
        }
    }

    /// The position after the last ULPDU that was sealed.
    #[inline]
    pub(crate) fn sealed(&self) -> u64 {
        match self {
            Llp::Mpa(mpa) => mpa.tx.sealed(),
            Llp::Loopback(loopback) => loopback.sealed(),
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

    /// Passes sealed ULPDUs to the stream; `false` if the stream takes no more for now.
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

    /// Must be called between framing and [`flush`](Self::flush) before a STag is revoked: payload
    /// that was gathered would keep the revocation waiting.
    pub(crate) fn rest(&mut self, memory: &MemoryTable) {
        if let Llp::Mpa(mpa) = self {
            mpa.tx.rest(memory);
        }
    }

    /// The peer takes ULPDUs that are longer than the lower layer would choose.
    #[inline]
    pub(crate) fn allow_long(&mut self) {
        if let Llp::Mpa(mpa) = self {
            mpa.tx.allow_long();
        }
    }

    /// Reads the stream's segment size if that is due.
    #[inline]
    pub(crate) fn refresh(&mut self, now: &Now<'_>, stream: &dyn Stream) {
        if let Llp::Mpa(mpa) = self {
            mpa.tx.refresh(now, stream);
        }
    }

    /// Returns the empty buffers to the pool.
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
