//! The RDMA Read Request header (RFC 5040 §4.4).

use super::control::{HeaderError, Opcode};
use core::fmt;
use zerocopy::byteorder::big_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Layout {
    sink_stag: U32,
    sink_to: U64,
    size: U32,
    source_stag: U32,
    source_to: U64,
}

const _: () = assert!(size_of::<Layout>() == ReadRequest::LEN);

/// A request that the peer sends `size` bytes from its source buffer to the requester's sink
/// buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRequest {
    /// STag of the requester's buffer; the Response returns it uninterpreted.
    pub sink_stag: u32,
    /// Tagged offset in the requester's buffer; the Response returns it uninterpreted.
    pub sink_to: u64,
    /// RDMA Read Message Size, in bytes. At zero the source is not validated (RFC 5040 §5.2.1).
    pub size: u32,
    /// STag of the responder's buffer.
    pub source_stag: u32,
    /// Tagged offset in the responder's buffer.
    pub source_to: u64,
}

impl ReadRequest {
    /// Bytes of the header, which is the whole payload.
    pub const LEN: usize = 28;

    /// Parses the payload of a Read Request.
    ///
    /// # Errors
    /// [`HeaderError::Length`] unless the payload has exactly [`Self::LEN`] bytes.
    #[inline]
    pub fn parse(payload: &[u8]) -> Result<Self, HeaderError> {
        let layout = Layout::ref_from_bytes(payload).map_err(|_| HeaderError::Length {
            opcode: Opcode::ReadRequest,
            expected: Self::LEN,
            found: payload.len(),
        })?;
        Ok(Self {
            sink_stag: layout.sink_stag.get(),
            sink_to: layout.sink_to.get(),
            size: layout.size.get(),
            source_stag: layout.source_stag.get(),
            source_to: layout.source_to.get(),
        })
    }

    /// Writes the header to the front of `buffer`; returns [`Self::LEN`].
    ///
    /// # Panics
    /// If `buffer` is shorter than [`Self::LEN`].
    #[inline]
    pub fn emit(&self, buffer: &mut [u8]) -> usize {
        let layout = Layout {
            sink_stag: U32::new(self.sink_stag),
            sink_to: U64::new(self.sink_to),
            size: U32::new(self.size),
            source_stag: U32::new(self.source_stag),
            source_to: U64::new(self.source_to),
        };
        buffer[..Self::LEN].copy_from_slice(layout.as_bytes());
        Self::LEN
    }
}

impl fmt::Display for ReadRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            sink_stag,
            sink_to,
            size,
            source_stag,
            source_to,
        } = self;
        write!(f, "size {size} from stag 0x{source_stag:08x} to 0x{source_to:x}")?;
        write!(f, " into stag 0x{sink_stag:08x} to 0x{sink_to:x}")
    }
}
