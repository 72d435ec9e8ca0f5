//! Work queue entries.
//!
//! A **send queue** is a ring of 64-byte blocks, a power of two of them. An entry takes 1 …
//! [`MAX_BLOCKS`] successive blocks (it may wrap): a [`SendHeader`] of 32 bytes and, from byte 32
//! on, its operands:
//!
//! | opcode | operands |
//! |---|---|
//! | Send, Write, Read families | `num_sge` × [`Sge`]; with [`SendFlags::INLINE`] `inline_len` bytes of data instead |
//! | atomics | [`AtomicOperands`], then one [`Sge`] for the result |
//! | `BindMw` | [`BindOperands`] |
//! | `LocalInv` | none: `stag` is invalidated |
//!
//! An entry of a queue pair of kind UD is a Send or a Send with immediate data; its operands begin
//! with a [`DatagramAddress`], and [`Sge`]s or data follow from byte 64 on.
//!
//! A **receive queue** is a ring of entries of `1 << log_stride` bytes: a [`RecvHeader`], then
//! `num_sge` × [`Sge`].

use crate::vocabulary::{WcOpcode, numbered};
use bitflags::bitflags;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes in a send queue block.
pub const BLOCK_LEN: usize = 64;
/// Blocks of the longest entry.
pub const MAX_BLOCKS: usize = 16;
/// Offset of the operands in an entry.
pub const OPERANDS: usize = 32;
/// Most scatter/gather elements of a send or receive entry.
pub const MAX_SGE: usize = 32;
/// Most inline data of an entry.
pub const MAX_INLINE: usize = MAX_BLOCKS * BLOCK_LEN - OPERANDS;

/// Number of blocks of an entry with `operand_len` bytes of operands.
#[inline]
pub const fn blocks(operand_len: usize) -> usize {
    (OPERANDS + operand_len).div_ceil(BLOCK_LEN)
}

numbered! {
    /// Operation of a send queue entry.
    Opcode: u8 {
        /// Send.
        Send = 0,
        /// Send; on delivery the peer invalidates the STag (RFC 5040 §5.3).
        SendInv = 1,
        /// Send with Immediate Data (RFC 7306 §6).
        SendImm = 2,
        /// RDMA Write.
        Write = 3,
        /// RDMA Write followed by Immediate Data (RFC 7306 §6).
        WriteImm = 4,
        /// RDMA Read.
        Read = 5,
        /// RDMA Read whose sink STag is invalidated locally on completion.
        ReadInv = 6,
        /// Compare-and-swap of 64 bits (RFC 7306 §5).
        CompareSwap = 7,
        /// Fetch-and-add of 64 bits (RFC 7306 §5).
        FetchAdd = 8,
        /// Invalidate a local STag.
        LocalInv = 9,
        /// Bind a memory window.
        BindMw = 10,
    }
}

impl Opcode {
    /// The opcode of the completion of this operation.
    pub fn completion(self) -> WcOpcode {
        match self {
            Opcode::Send | Opcode::SendInv | Opcode::SendImm => WcOpcode::Send,
            Opcode::Write | Opcode::WriteImm => WcOpcode::RdmaWrite,
            Opcode::Read | Opcode::ReadInv => WcOpcode::RdmaRead,
            Opcode::CompareSwap => WcOpcode::CompSwap,
            Opcode::FetchAdd => WcOpcode::FetchAdd,
            Opcode::LocalInv => WcOpcode::LocalInv,
            Opcode::BindMw => WcOpcode::BindMw,
        }
    }
}

bitflags! {
    /// Flags of a send queue entry.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct SendFlags: u8 {
        /// Make a completion on success; failures always make one.
        const SIGNALED = 1;
        /// The Solicited Event form of the message.
        const SOLICITED = 2;
        /// Read fence: start only when all earlier Reads and atomics are complete.
        const FENCE = 4;
        /// The operands are the data itself.
        const INLINE = 8;
    }
}

/// First 32 bytes of a send queue entry.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct SendHeader {
    /// [`Opcode`].
    pub opcode: u8,
    /// [`SendFlags`].
    pub flags: u8,
    /// Scatter/gather elements in the operands; 0 when inline.
    pub num_sge: u8,
    /// Blocks of this entry, 1 … [`MAX_BLOCKS`].
    pub blocks: u8,
    /// Bytes of inline data.
    pub inline_len: U32,
    /// Returned in the completion.
    pub cookie: U64,
    /// Peer's tagged offset (Write, Read, atomics).
    pub remote_offset: U64,
    /// Peer's STag (Write, Read, atomics), or the STag to invalidate.
    pub stag: U32,
    /// Immediate data as it goes on the wire (first byte first).
    pub immediate: [u8; 4],
}

/// A piece of local memory; laid out like `struct ibv_sge` on a little-endian machine.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Sge {
    /// Tagged offset of the first byte.
    pub offset: U64,
    /// Length in bytes; 0 = nothing, and the STag is not checked (VRB-M-07).
    pub len: U32,
    /// Local STag.
    pub stag: U32,
}

/// The destination of a datagram: the first operand in entries of queue pairs of kind UD.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct DatagramAddress {
    /// Address of the receiver or of a multicast group; IPv4 as IPv4-mapped IPv6, network order.
    pub ip: [u8; 16],
    /// Q_Key of the receiver; with bit 31 set: that of the sending queue pair (IBTA vol. 1
    /// §10.2.5).
    pub qkey: U32,
    /// Number of the receiving queue pair, 24 bits; 0xffffff for a multicast group.
    pub qpn: U32,
    /// IPv6 scope of a link-local address.
    pub scope: U32,
    /// UDP port of the receiver.
    pub port: U16,
    /// Index in the address table: the address to send from.
    pub source: u8,
    /// The IP header's traffic class (IPv4: TOS byte).
    pub traffic_class: u8,
}

/// Operands of an atomic.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct AtomicOperands {
    /// Value to add, or to compare with.
    pub compare_add: U64,
    /// Value to store if the comparison holds.
    pub swap: U64,
}

/// Operands of a memory window bind.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct BindOperands {
    /// Start of the window in the region.
    pub offset: U64,
    /// Length; 0 unbinds.
    pub len: U64,
    /// STag of the region.
    pub mr_stag: U32,
    /// [`Access`](crate::vocabulary::Access) of the window.
    pub access: U32,
    /// New STag of the window: only the key (low 8 bits) may change.
    pub new_stag: U32,
    reserved: U32,
}

/// First 16 bytes of a receive queue entry.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RecvHeader {
    /// Returned in the completion.
    pub cookie: U64,
    /// Scatter/gather elements that follow.
    pub num_sge: U16,
    reserved: [u8; 6],
}

impl RecvHeader {
    /// A header of an entry with `num_sge` elements.
    pub fn new(cookie: u64, num_sge: u16) -> RecvHeader {
        RecvHeader {
            cookie: cookie.into(),
            num_sge: num_sge.into(),
            reserved: [0; 6],
        }
    }
}

const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(size_of::<SendHeader>() == OPERANDS);
    assert!(offset_of!(SendHeader, cookie) == 8);
    assert!(offset_of!(SendHeader, remote_offset) == 16);
    assert!(offset_of!(SendHeader, stag) == 24);
    assert!(offset_of!(SendHeader, immediate) == 28);
    assert!(size_of::<Sge>() == 16);
    assert!(offset_of!(Sge, len) == 8);
    assert!(offset_of!(Sge, stag) == 12);
    assert!(size_of::<DatagramAddress>() == 32);
    assert!(size_of::<AtomicOperands>() == 16);
    assert!(size_of::<BindOperands>() == 32);
    assert!(size_of::<RecvHeader>() == 16);
    assert!(offset_of!(RecvHeader, num_sge) == 8);
    assert!(blocks(0) == 1 && blocks(2 * 16) == 1 && blocks(3 * 16) == 2);
    assert!(blocks(MAX_INLINE) == MAX_BLOCKS);
    assert!(blocks(MAX_SGE * 16) <= MAX_BLOCKS);
};
