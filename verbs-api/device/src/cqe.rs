//! Completion queue entries: 64 bytes, a power of two of them per queue.
//!
//! The last word holds the phase: 1 on the device's first pass over the ring, 0 on the second, and
//! so on. The device writes it last, with release order; the driver reads it first, with acquire
//! order. The ring starts zeroed.

use crate::vocabulary::{WcOpcode, WcStatus};
use bitflags::bitflags;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of an entry.
pub const CQE_LEN: usize = 64;
/// Bytes at the beginning of an entry that are not reserved, without the phase: what the device has
/// to write, since the ring starts zeroed.
pub const CONTENT: usize = 48;
/// Offset of the phase word in an entry.
pub const PHASE: usize = 60;

bitflags! {
    /// Flags of a completion.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct CqeFlags: u8 {
        /// `extra` is immediate data.
        const WITH_IMM = 1;
        /// `extra` is the STag that the peer's Send invalidated (native order).
        const WITH_INV = 2;
        /// The message was of the Solicited Event form.
        const SOLICITED = 4;
        /// A datagram: 40 bytes of global route header are in front of its payload, and count in
        /// `byte_len`; `source_qpn` and `source_port` are valid.
        const DATAGRAM = 8;
        /// The header of the datagram is that of IPv6; else of IPv4.
        const IPV6 = 16;
    }
}

/// A completion.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Cqe {
    /// The work queue entry's cookie.
    pub cookie: U64,
    /// The label that the driver gave the queue pair.
    pub label: U32,
    /// Device number of the queue pair.
    pub qid: U32,
    /// Bytes received, read or sent; 0 for a request without payload, or that failed.
    pub byte_len: U32,
    /// Immediate data (first byte first) or invalidated STag, depending on the flags.
    pub extra: [u8; 4],
    /// [`WcOpcode`](crate::vocabulary::WcOpcode).
    pub opcode: u8,
    /// [`WcStatus`](crate::vocabulary::WcStatus).
    pub status: u8,
    /// [`CqeFlags`].
    pub flags: u8,
    reserved: u8,
    /// With a failure that a Terminate reported: its control word (RFC 5040 §4.8), host order; else
    /// 0.
    pub vendor_error: U32,
    /// When the device made the entry: nanoseconds of its free-running clock. May be 0 in a queue
    /// that is [`UNTIMED`](crate::command::cq::UNTIMED).
    pub timestamp: U64,
    /// The queue pair that sent a datagram, 24 bits.
    pub source_qpn: U32,
    /// The UDP port that a datagram came from.
    pub source_port: U32,
    reserved2: [U32; 3],
    /// Phase, bit 0.
    pub phase: U32,
}

impl Cqe {
    /// A completion of a queue pair's work request, without flags, bytes, timestamp and phase.
    #[inline]
    pub fn new(cookie: u64, label: u32, qid: u32, opcode: WcOpcode, status: WcStatus) -> Cqe {
        Cqe {
            cookie: cookie.into(),
            label: label.into(),
            qid: qid.into(),
            opcode: opcode as u8,
            status: status as u8,
            ..Cqe::default()
        }
    }
}

const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(size_of::<Cqe>() == CQE_LEN);
    assert!(offset_of!(Cqe, reserved2) == CONTENT);
    assert!(offset_of!(Cqe, label) == 8);
    assert!(offset_of!(Cqe, qid) == 12);
    assert!(offset_of!(Cqe, byte_len) == 16);
    assert!(offset_of!(Cqe, extra) == 20);
    assert!(offset_of!(Cqe, opcode) == 24);
    assert!(offset_of!(Cqe, status) == 25);
    assert!(offset_of!(Cqe, flags) == 26);
    assert!(offset_of!(Cqe, vendor_error) == 28);
    assert!(offset_of!(Cqe, timestamp) == 32);
    assert!(offset_of!(Cqe, source_qpn) == 40);
    assert!(offset_of!(Cqe, source_port) == 44);
    assert!(offset_of!(Cqe, phase) == PHASE);
};
