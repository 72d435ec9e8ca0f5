//! Event queues: rings of 32-byte entries with a phase like that of a [`cqe`](super::cqe), each
//! tied to an interrupt vector.
//!
//! Queue 0 receives the asynchronous events of the whole function; further queues receive
//! completion notifications. The driver keeps its consumer index in the queue's
//! [record](super::record::EqRecord). A completion notification needs an armed completion queue and
//! disarms it, so a queue with as many entries as completion queues never overflows. Asynchronous
//! events wait in the device while the queue is full.
//!
//! The device reports an event that a command causes after it has written the command's completion.
//! An event of an object that was destroyed meanwhile may still come; numbers are not reused soon,
//! so the driver cannot mistake it for an event of a new object.

use crate::vocabulary::numbered;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of an entry.
pub const EVENT_LEN: usize = 32;
/// Offset of the phase word in an entry.
pub const PHASE: usize = 28;

numbered! {
    /// The kinds of events. Parentheses contain the meaning of `object`.
    EventKind: u8 {
        /// An armed completion queue (cqid) got its completion.
        Completion = 1,
        /// A completion queue (cqid) overflowed; its queue pairs go to the error state.
        CqError = 2,
        /// A queue pair (qid) went to the error state; `code` is a [`QpFault`]; `data` is the
        /// control word of the Terminate that was sent, received, or could not be sent; 0x20010000
        /// for a lost stream (RFC 5044 §8, code 1); else 0.
        QpError = 3,
        /// A queue pair (qid) with a fence received its first valid FPDU, and accepted its message:
        /// the fence opens (RFC 5044 §7.1.2(4)).
        FirstFpdu = 4,
        /// The peer of a queue pair (qid) closed its stream in an orderly way.
        PeerClosed = 5,
        /// A closing queue pair (qid) has no stream any more.
        Closed = 6,
        /// The last entry of the shared receive queue was consumed for a queue pair (qid) in error.
        LastWqe = 7,
        /// A shared receive queue (srqid) fell below its limit.
        SrqLimit = 8,
        /// A stream (sid) is connected, or failed to connect and is freed: `code` is an errno, 0 =
        /// connected.
        StreamConnected = 16,
        /// A listener (lid) accepted a stream: `data` is its sid.
        StreamAccepted = 17,
        /// A receive command on a stream (sid) ended: `data` bytes arrived, `code` is an errno, 0 =
        /// all of them; fewer bytes with code 0: the peer closed.
        StreamReceived = 18,
        /// A stream (sid) is closed: `code` is an errno, 0 = orderly.
        StreamClosed = 19,
        /// A datagram of a queue pair (qid) did not arrive: `code` is an errno, `ECONNREFUSED` if
        /// no process has its destination port; `data` is the PSN of its request: the first request
        /// after a reset has PSN 0, each further one the next, modulo 2^24. Only with
        /// [`REPORT_REFUSED`](super::stream::bind::REPORT_REFUSED), and only if the network reports
        /// it.
        DatagramRefused = 20,
        /// Addresses or link state of the port changed.
        PortChange = 32,
        /// The device stopped; see the fatal code register.
        Fatal = 33,
    }
}

numbered! {
    /// The reason why a queue pair failed.
    QpFault: u16 {
        /// The driver requested the error state.
        Requested = 0,
        /// We sent a Terminate, or would have if the stream had let us.
        TerminateSent = 1,
        /// The peer sent a Terminate.
        TerminateReceived = 2,
        /// The stream was reset, timed out, or closed with work outstanding.
        StreamLost = 3,
        /// A completion queue overflowed.
        CqOverflow = 4,
        /// A local work request failed (bad STag, bad entry, DMA).
        LocalWork = 5,
    }
}

/// An event.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Event {
    /// [`EventKind`].
    pub kind: u8,
    reserved: u8,
    /// A code, whose meaning depends on the kind.
    pub code: U16,
    /// The object of the event.
    pub object: U32,
    /// Data, whose meaning depends on the kind.
    pub data: U64,
    reserved2: [U32; 3],
    /// Phase, bit 0.
    pub phase: U32,
}

impl Event {
    /// An event with no code and no data.
    pub fn new(kind: EventKind, object: u32) -> Event {
        Event {
            kind: kind as u8,
            object: object.into(),
            ..Event::default()
        }
    }

    /// Returns the event with `code` set.
    pub fn with_code(mut self, code: u16) -> Event {
        self.code = code.into();
        self
    }

    /// Returns the event with `data` set.
    pub fn with_data(mut self, data: u64) -> Event {
        self.data = data.into();
        self
    }
}

const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(size_of::<Event>() == EVENT_LEN);
    assert!(offset_of!(Event, code) == 2);
    assert!(offset_of!(Event, object) == 4);
    assert!(offset_of!(Event, data) == 8);
    assert!(offset_of!(Event, phase) == PHASE);
};
