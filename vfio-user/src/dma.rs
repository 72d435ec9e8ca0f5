//! Memory of the client.

use crate::error::Malformed;
use crate::fields::{Fields, Put};
use bitflags::bitflags;

bitflags! {
    /// Access of the server to memory.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct DmaMapFlags: u32 {
        /// The server may read.
        const READ = 1;
        /// The server may write.
        const WRITE = 2;
        const _ = !0;
    }

    /// How memory is unmapped (`VFIO_DMA_UNMAP_FLAG_*`).
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct DmaUnmapFlags: u32 {
        /// The client requests a bitmap of dirty pages.
        const DIRTY_BITMAP = 1;
        /// Unmap all memory; address and size are 0.
        const ALL = 2;
        const _ = !0;
    }
}

/// Memory that the server may access. If the server may map it, a descriptor comes with the
/// message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaMap {
    /// Access of the server.
    pub flags: DmaMapFlags,
    /// Offset of the memory in the descriptor's file; 0 without a descriptor.
    pub offset: u64,
    /// First DMA address.
    pub address: u64,
    /// Length in bytes.
    pub size: u64,
}

/// Memory that the server may no longer access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaUnmap {
    /// How the memory is unmapped.
    pub flags: DmaUnmapFlags,
    /// First DMA address.
    pub address: u64,
    /// Length in bytes.
    pub size: u64,
}

/// A stretch of the client's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaAccess {
    /// First DMA address.
    pub address: u64,
    /// Length in bytes.
    pub count: u64,
}

impl DmaMap {
    /// Length of the payload in bytes.
    pub const LEN: u32 = 32;

    pub(crate) fn parse(mut fields: Fields<'_>) -> Result<DmaMap, Malformed> {
        if fields.u32()? < DmaMap::LEN {
            return Err(Malformed::Argsz);
        }
        Ok(DmaMap {
            flags: DmaMapFlags::from_bits_retain(fields.u32()?),
            offset: fields.u64()?,
            address: fields.u64()?,
            size: fields.u64()?,
        })
    }

    pub(crate) fn emit(&self, out: &mut Vec<u8>) {
        out.put32(DmaMap::LEN);
        out.put32(self.flags.bits());
        out.put64(self.offset);
        out.put64(self.address);
        out.put64(self.size);
    }
}

impl DmaUnmap {
    /// Length of the payload in bytes.
    pub const LEN: u32 = 24;

    pub(crate) fn parse(mut fields: Fields<'_>) -> Result<DmaUnmap, Malformed> {
        if fields.u32()? < DmaUnmap::LEN {
            return Err(Malformed::Argsz);
        }
        Ok(DmaUnmap {
            flags: DmaUnmapFlags::from_bits_retain(fields.u32()?),
            address: fields.u64()?,
            size: fields.u64()?,
        })
    }

    pub(crate) fn emit(&self, out: &mut Vec<u8>) {
        out.put32(DmaUnmap::LEN);
        out.put32(self.flags.bits());
        out.put64(self.address);
        out.put64(self.size);
    }
}

impl DmaAccess {
    pub(crate) fn parse(fields: &mut Fields<'_>) -> Result<DmaAccess, Malformed> {
        Ok(DmaAccess {
            address: fields.u64()?,
            count: fields.u64()?,
        })
    }

    pub(crate) fn emit(&self, out: &mut Vec<u8>) {
        out.put64(self.address);
        out.put64(self.count);
    }
}
