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
pub(crate) mod messages;
pub(crate) mod mpa;
pub(crate) mod queue;
mod ulpdu;

pub(crate) use ulpdu::{Head, LlpError};

use crate::host::Unreachable;
use crate::llp::buffers::BufferPool;
use crate::memory::{MemoryTable, Window};
use crate::stream::Stream;
use crate::time::Now;
use loopback::Loopback;
use messages::Messages;
use mpa::Mpa;

/// A lower layer.
#[derive(Debug)]
pub(crate) enum Llp {
    /// MPA over a byte stream.
    Mpa(Box<Mpa>),
    /// A stream of messages (SCTP).
    Messages(Box<Messages>),
    /// The queue pair is its own peer.
    Loopback(Box<Loopback>),
}

impl Llp {
    /// The most bytes of a ULPDU at present.
    #[inline]
    pub(crate) fn mulpdu(&self) -> usize {
        match self {
            Llp::Mpa(mpa) => mpa.tx.mulpdu(),
            Llp::Messages(messages) => messages.mulpdu(),
            Llp::Loopback(_) => queue::MULPDU,
        }
    }

    /// Whether another ULPDU may be opened. Without room, [`flush`](Self::flush) must take
    /// something first.
    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        match self {
            Llp::Mpa(mpa) => mpa.tx.has_room(),
            Llp::Messages(messages) => messages.has_room(),
            Llp::Loopback(loopback) => loopback.queue.has_room(),
        }
    }

    /// Begins a ULPDU: `head`, then exactly `payload_len` bytes of payload. There must be room, and
    /// the whole must not be longer than the MULPDU.
    #[inline]
    pub(crate) fn open(&mut self, buffers: &BufferPool, head: impl Into<Head>, payload_len: usize) {
        let head = head.into();
        match self {
            Llp::Mpa(mpa) => mpa.tx.open(buffers, &head, payload_len),
            Llp::Messages(messages) => messages.tx.open(buffers, &head, payload_len),
            Llp::Loopback(loopback) => loopback.queue.open(buffers, &head, payload_len),
        }
    }

    /// The place of the next `len` bytes of payload, to be filled by the caller.
    #[inline]
    pub(crate) fn put(&mut self, len: usize) -> &mut [u8] {
        match self {
            Llp::Mpa(mpa) => mpa.tx.put(len),
            Llp::Messages(messages) => messages.tx.put(len),
            Llp::Loopback(loopback) => loopback.queue.put(len),
        }
    }

    /// Adds the `len` bytes of `window` from `at` on as the next payload; they may change at any
    /// time. If they cannot be accessed, the ULPDU cannot be used.
    #[inline]
    pub(crate) fn gather(&mut self, window: &Window<'_>, at: u64, len: usize) -> Result<(), Unreachable> {
        match self {
            Llp::Mpa(mpa) => mpa.tx.gather(window, at, len),
            Llp::Messages(messages) => window.copy_out(at, messages.tx.put(len)),
            Llp::Loopback(loopback) => window.copy_out(at, loopback.queue.put(len)),
        }
    }

    /// Ends the ULPDU; returns the position after it, to be compared with [`taken`](Self::taken).
    #[inline]
    pub(crate) fn seal(&mut self) -> u64 {
        match self {
            Llp::Mpa(mpa) => mpa.tx.seal(),
            Llp::Messages(messages) => messages.tx.seal(),
            Llp::Loopback(loopback) => loopback.seal(),
        }
    }

    /// Takes back the ULPDU that was opened and not sealed.
    pub(crate) fn cancel(&mut self) {
        match self {
            Llp::Mpa(mpa) => mpa.tx.cancel(),
            Llp::Messages(messages) => messages.tx.cancel(),
            Llp::Loopback(loopback) => loopback.queue.cancel(),
        }
    }

    /// The position up to which the lower layer has taken sealed bytes: they will arrive unless the
    /// stream is lost.
    #[inline]
    pub(crate) fn taken(&self) -> u64 {
        match self {
            Llp::Mpa(mpa) => mpa.tx.taken(),
            Llp::Messages(messages) => messages.tx.position(),
            Llp::Loopback(loopback) => loopback.taken(),
        }
    }

    /// The position after the last ULPDU that was sealed.
    #[inline]
    pub(crate) fn sealed(&self) -> u64 {
        match self {
            Llp::Mpa(mpa) => mpa.tx.sealed(),
            Llp::Messages(messages) => messages.tx.sealed(),
            Llp::Loopback(loopback) => loopback.queue.sealed(),
        }
    }

    /// Whether everything sealed has been taken.
    #[inline]
    pub(crate) fn is_flushed(&self) -> bool {
        match self {
            Llp::Mpa(mpa) => mpa.tx.is_flushed(),
            Llp::Messages(messages) => messages.tx.is_empty(),
            Llp::Loopback(loopback) => loopback.queue.is_empty(),
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
            Llp::Messages(messages) => messages.flush(stream, calls),
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
            Llp::Messages(messages) => {
                messages.tx.release(buffers);
                messages.rx.release(buffers);
            }
            Llp::Loopback(loopback) => loopback.queue.release(buffers),
        }
    }

    /// Whether the peer may end the stream here: no ULPDU has arrived in part, or waits.
    pub(crate) fn is_between_ulpdus(&self) -> bool {
        match self {
            Llp::Mpa(mpa) => mpa.rx.at_boundary(),
            Llp::Messages(messages) => messages.rx.is_empty(),
            Llp::Loopback(_) => true,
        }
    }

    /// Drops all that has arrived: nothing after an error may be used (RFC 5044 §8).
    pub(crate) fn discard_input(&mut self) {
        match self {
            Llp::Mpa(mpa) => mpa.rx.discard(),
            Llp::Messages(messages) => messages.rx.discard(),
            Llp::Loopback(loopback) => loopback.queue.discard(),
        }
    }

    /// Drops all that has arrived, and all that the stream has not taken.
    pub(crate) fn discard(&mut self) {
        self.discard_input();
        match self {
            Llp::Mpa(mpa) => mpa.tx.drop_unsent(),
            Llp::Messages(messages) => messages.tx.discard(),
            Llp::Loopback(_) => {}
        }
    }
}

/// ULPDUs that have arrived.
pub(crate) trait Arrived {
    /// Whether there is a ULPDU, complete and checked.
    ///
    /// # Errors
    /// Nothing after this ULPDU may be used.
    fn next(&mut self) -> Result<bool, LlpError>;

    /// That ULPDU.
    fn ulpdu(&self) -> &[u8];

    /// Bytes after [`ulpdu`](Self::ulpdu) that belong to it, and are placed already.
    fn placed(&self) -> usize {
        0
    }

    /// Its position in the direction from the peer.
    fn position(&self) -> u64;

    /// Removes it.
    fn consume(&mut self);
}

impl Arrived for mpa::FpduReceiver {
    #[inline]
    fn next(&mut self) -> Result<bool, LlpError> {
        mpa::FpduReceiver::next(self)
    }

    #[inline]
    fn ulpdu(&self) -> &[u8] {
        mpa::FpduReceiver::ulpdu(self)
    }

    #[inline]
    fn position(&self) -> u64 {
        mpa::FpduReceiver::position(self)
    }

    #[inline]
    fn consume(&mut self) {
        mpa::FpduReceiver::consume(self);
    }
}

impl Arrived for queue::UlpduQueue {
    fn next(&mut self) -> Result<bool, LlpError> {
        Ok(!self.is_empty())
    }

    fn ulpdu(&self) -> &[u8] {
        self.front().unwrap_or_default()
    }

    fn placed(&self) -> usize {
        queue::UlpduQueue::placed(self)
    }

    fn position(&self) -> u64 {
        queue::UlpduQueue::position(self)
    }

    fn consume(&mut self) {
        queue::UlpduQueue::consume(self);
    }
}
