//! Atomics and Immediate Data (RFC 7306 §5, §6).

use super::control::{HeaderError, Opcode};
use core::fmt;
use zerocopy::byteorder::big_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RequestLayout {
    /// 28 reserved bits and AOpCode.
    operation: U32,
    request_id: U32,
    stag: U32,
    to: U64,
    add_or_swap: U64,
    add_or_swap_mask: U64,
    compare: U64,
    compare_mask: U64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct ResponseLayout {
    request_id: U32,
    original: U64,
}

const _: () = assert!(size_of::<RequestLayout>() == AtomicRequest::LEN);
const _: () = assert!(size_of::<ResponseLayout>() == AtomicResponse::LEN);

const FETCH_ADD: u8 = 0;
const CMP_SWAP: u8 = 2;

/// The operation of an Atomic Request on a 64-bit value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicOperation {
    /// Adds to the value (RFC 7306 §5.1.1).
    FetchAdd {
        /// The number to add.
        add: u64,
        /// Each set bit is the most significant bit of a field; no carry leaves the field.
        mask: u64,
    },
    /// Replaces the value if the comparison holds (RFC 7306 §5.1.2).
    CmpSwap {
        /// The new value.
        swap: u64,
        /// The bits of the value to write.
        swap_mask: u64,
        /// The value to compare with.
        compare: u64,
        /// The bits to compare.
        compare_mask: u64,
    },
}

/// An Atomic Operation Request header (RFC 7306 §5.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicRequest {
    /// The operation.
    pub operation: AtomicOperation,
    /// Number that the Response returns.
    pub request_id: u32,
    /// STag of the responder's buffer.
    pub stag: u32,
    /// Tagged offset of the value in the responder's buffer.
    pub to: u64,
}

impl AtomicRequest {
    /// Bytes of the header, which is the whole payload.
    pub const LEN: usize = 52;

    const OPERATION: u32 = 0xf;

    /// Parses the payload of an Atomic Request. Ignores reserved bits, and the compare fields of a
    /// FetchAdd.
    ///
    /// # Errors
    /// [`HeaderError`] if the length is not [`Self::LEN`] or the AOpCode is not assigned.
    #[inline]
    pub fn parse(payload: &[u8]) -> Result<Self, HeaderError> {
        let layout = RequestLayout::ref_from_bytes(payload).map_err(|_| HeaderError::Length {
            opcode: Opcode::AtomicRequest,
            expected: Self::LEN,
            found: payload.len(),
        })?;
        let operation = match (layout.operation.get() & Self::OPERATION) as u8 {
            FETCH_ADD => AtomicOperation::FetchAdd {
                add: layout.add_or_swap.get(),
                mask: layout.add_or_swap_mask.get(),
            },
            CMP_SWAP => AtomicOperation::CmpSwap {
                swap: layout.add_or_swap.get(),
                swap_mask: layout.add_or_swap_mask.get(),
                compare: layout.compare.get(),
                compare_mask: layout.compare_mask.get(),
            },
            other => return Err(HeaderError::AtomicOperation(other)),
        };
        Ok(Self {
            operation,
            request_id: layout.request_id.get(),
            stag: layout.stag.get(),
            to: layout.to.get(),
        })
    }

    /// Writes the header to the front of `buffer`; returns [`Self::LEN`].
    ///
    /// # Panics
    /// If `buffer` is shorter than [`Self::LEN`].
    #[inline]
    pub fn emit(&self, buffer: &mut [u8]) -> usize {
        // A FetchAdd has compare data 0 and compare mask all ones (RFC 7306 §5.2.1).
        let (code, data, mask, compare, compare_mask) = match self.operation {
            AtomicOperation::FetchAdd { add, mask } => (FETCH_ADD, add, mask, 0, u64::MAX),
            AtomicOperation::CmpSwap {
                swap,
                swap_mask,
                compare,
                compare_mask,
            } => (CMP_SWAP, swap, swap_mask, compare, compare_mask),
        };
        let layout = RequestLayout {
            operation: U32::new(code.into()),
            request_id: U32::new(self.request_id),
            stag: U32::new(self.stag),
            to: U64::new(self.to),
            add_or_swap: U64::new(data),
            add_or_swap_mask: U64::new(mask),
            compare: U64::new(compare),
            compare_mask: U64::new(compare_mask),
        };
        buffer[..Self::LEN].copy_from_slice(layout.as_bytes());
        Self::LEN
    }
}

impl fmt::Display for AtomicRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            operation,
            request_id,
            stag,
            to,
        } = self;
        write!(f, "id {request_id} stag 0x{stag:08x} to 0x{to:x} ")?;
        match operation {
            AtomicOperation::FetchAdd { add, mask } => write!(f, "FetchAdd 0x{add:x} mask 0x{mask:x}"),
            AtomicOperation::CmpSwap {
                swap,
                swap_mask,
                compare,
                compare_mask,
            } => {
                write!(
                    f,
                    "CmpSwap 0x{compare:x}/0x{compare_mask:x} -> 0x{swap:x}/0x{swap_mask:x}"
                )
            }
        }
    }
}

/// An Atomic Operation Response header (RFC 7306 §5.2.2).
///
/// The header has 12 bytes, as in the RFC's figure 6; the 32 bytes in §4 of the RFC contradict the
/// figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicResponse {
    /// Request identifier of the Request.
    pub request_id: u32,
    /// The value before the operation.
    pub original: u64,
}

impl AtomicResponse {
    /// Bytes of the header, which is the whole payload.
    pub const LEN: usize = 12;

    /// Parses the payload of an Atomic Response.
    ///
    /// # Errors
    /// [`HeaderError::Length`] unless the payload has exactly [`Self::LEN`] bytes.
    #[inline]
    pub fn parse(payload: &[u8]) -> Result<Self, HeaderError> {
        let layout = ResponseLayout::ref_from_bytes(payload).map_err(|_| HeaderError::Length {
            opcode: Opcode::AtomicResponse,
            expected: Self::LEN,
            found: payload.len(),
        })?;
        Ok(Self {
            request_id: layout.request_id.get(),
            original: layout.original.get(),
        })
    }

    /// Writes the header to the front of `buffer`; returns [`Self::LEN`].
    ///
    /// # Panics
    /// If `buffer` is shorter than [`Self::LEN`].
    #[inline]
    pub fn emit(&self, buffer: &mut [u8]) -> usize {
        let layout = ResponseLayout {
            request_id: U32::new(self.request_id),
            original: U64::new(self.original),
        };
        buffer[..Self::LEN].copy_from_slice(layout.as_bytes());
        Self::LEN
    }
}

impl fmt::Display for AtomicResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "id {} original 0x{:x}", self.request_id, self.original)
    }
}

/// The payload of an Immediate Data message (RFC 7306 §6.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImmediateData(pub [u8; Self::LEN]);

impl ImmediateData {
    /// Bytes of the payload.
    pub const LEN: usize = 8;

    /// Encodes the 32 bits of the verbs' immediate data, which are in network order already.
    ///
    /// No RFC maps 32 bits to 64. As in Chelsio's hardware, the 32 bits come first and zeros
    /// follow.
    #[inline]
    pub const fn from_verbs(imm: [u8; 4]) -> Self {
        let [a, b, c, d] = imm;
        Self([a, b, c, d, 0, 0, 0, 0])
    }

    /// The 32 bits for verbs, in network order.
    #[inline]
    pub const fn verbs(self) -> [u8; 4] {
        let [a, b, c, d, ..] = self.0;
        [a, b, c, d]
    }

    /// Parses the payload of an Immediate Data message, with or without SE.
    ///
    /// # Errors
    /// [`HeaderError::Length`] unless the payload has exactly [`Self::LEN`] bytes.
    #[inline]
    pub fn parse(payload: &[u8]) -> Result<Self, HeaderError> {
        payload.try_into().map(Self).map_err(|_| HeaderError::Length {
            opcode: Opcode::Immediate,
            expected: Self::LEN,
            found: payload.len(),
        })
    }

    /// Writes the payload to the front of `buffer`; returns [`Self::LEN`].
    ///
    /// # Panics
    /// If `buffer` is shorter than [`Self::LEN`].
    #[inline]
    pub fn emit(&self, buffer: &mut [u8]) -> usize {
        buffer[..Self::LEN].copy_from_slice(&self.0);
        Self::LEN
    }
}

impl fmt::Display for ImmediateData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "data 0x{:016x}", u64::from_be_bytes(self.0))
    }
}
