//! Regions: base address registers, configuration space.

use crate::error::Malformed;
use crate::fields::{Fields, Put};
use bitflags::bitflags;

bitflags! {
    /// Permitted access to a region (`VFIO_REGION_INFO_FLAG_*`).
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct RegionFlags: u32 {
        /// The region can be read.
        const READ = 1;
        /// The region can be written.
        const WRITE = 2;
        /// The region can be mapped: a descriptor comes with the reply.
        const MMAP = 4;
        /// The region has capabilities.
        const CAPS = 8;
        const _ = !0;
    }
}

const CAP_SPARSE_MMAP: u16 = 1;
const CAP_HEADER_LEN: usize = 8;

/// A part of a region that can be mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SparseArea {
    /// Offset of the part in the region.
    pub offset: u64,
    /// Length in bytes.
    pub size: u64,
}

/// Reply to [`Request::RegionInfo`](crate::Request::RegionInfo).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegionInfo {
    /// Number of bytes that the whole reply needs. If that is more than the client had room for,
    /// `sparse` is missing, and the client repeats the request.
    pub argsz: u32,
    /// Permitted access to the region.
    pub flags: RegionFlags,
    /// Region: one of [`region_index`](crate::region_index).
    pub index: u32,
    /// Length in bytes; 0 if there is no such region.
    pub size: u64,
    /// Offset of the region in the file of the descriptor that came with the reply.
    pub offset: u64,
    /// The only parts that can be mapped. `None` means that the whole region can be mapped.
    pub sparse: Option<Vec<SparseArea>>,
}

impl RegionInfo {
    /// Length of the payload without capabilities in bytes.
    pub const LEN: u32 = 32;

    /// A complete reply.
    pub fn new(
        index: u32,
        flags: RegionFlags,
        size: u64,
        offset: u64,
        sparse: Option<Vec<SparseArea>>,
    ) -> RegionInfo {
        let (caps, flags) = match &sparse {
            Some(areas) => (
                CAP_HEADER_LEN as u32 + 8 + 16 * areas.len() as u32,
                flags | RegionFlags::CAPS,
            ),
            None => (0, flags - RegionFlags::CAPS),
        };
        RegionInfo {
            argsz: RegionInfo::LEN + caps,
            flags,
            index,
            size,
            offset,
            sparse,
        }
    }

    /// The reply for a client that has room for `room` bytes.
    pub fn within(mut self, room: u32) -> RegionInfo {
        if self.argsz > room {
            self.sparse = None;
        }
        self
    }

    pub(crate) fn parse(payload: Fields<'_>) -> Result<RegionInfo, Malformed> {
        let mut fields = payload;
        let argsz = fields.u32()?;
        let flags = RegionFlags::from_bits_retain(fields.u32()?);
        let (index, caps) = (fields.u32()?, fields.u32()?);
        let (size, offset) = (fields.u64()?, fields.u64()?);
        let whole = payload.0.len() > RegionInfo::LEN as usize;
        let sparse = if flags.contains(RegionFlags::CAPS) && whole {
            sparse_areas(payload, caps)?
        } else {
            None
        };
        Ok(RegionInfo {
            argsz,
            flags,
            index,
            size,
            offset,
            sparse,
        })
    }

    pub(crate) fn emit(&self, out: &mut Vec<u8>) {
        out.put32(self.argsz);
        out.put32(self.flags.bits());
        out.put32(self.index);
        // The offset is also set if the capability did not fit: QEMU refuses a 0.
        let has_caps = self.flags.contains(RegionFlags::CAPS);
        out.put32(if has_caps { RegionInfo::LEN } else { 0 });
        out.put64(self.size);
        out.put64(self.offset);
        if let Some(areas) = &self.sparse {
            out.put16(CAP_SPARSE_MMAP);
            out.put16(1);
            out.put32(0);
            out.put32(areas.len() as u32);
            out.put32(0);
            for area in areas {
                out.put64(area.offset);
                out.put64(area.size);
            }
        }
    }
}

/// Finds the sparse-mmap capability in the chain that begins at `at`. Each link must point forward.
fn sparse_areas(payload: Fields<'_>, mut at: u32) -> Result<Option<Vec<SparseArea>>, Malformed> {
    while at != 0 {
        if at < RegionInfo::LEN {
            return Err(Malformed::Capability);
        }
        let mut fields = Fields(payload.0.get(at as usize..).ok_or(Malformed::Short)?);
        let (id, _version, next) = (fields.u16()?, fields.u16()?, fields.u32()?);
        if id == CAP_SPARSE_MMAP {
            let count = fields.u32()? as usize;
            fields.u32()?;
            if count > fields.0.len() / 16 {
                return Err(Malformed::Short);
            }
            let area = |fields: &mut Fields<'_>| {
                Ok(SparseArea {
                    offset: fields.u64()?,
                    size: fields.u64()?,
                })
            };
            return (0..count)
                .map(|_| area(&mut fields))
                .collect::<Result<_, _>>()
                .map(Some);
        }
        if next != 0 && next <= at {
            return Err(Malformed::Capability);
        }
        at = next;
    }
    Ok(None)
}

/// A stretch of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionAccess {
    /// Offset of the stretch in the region.
    pub offset: u64,
    /// Region: one of [`region_index`](crate::region_index).
    pub region: u32,
    /// Length in bytes.
    pub count: u32,
}

impl RegionAccess {
    pub(crate) fn parse(fields: &mut Fields<'_>) -> Result<RegionAccess, Malformed> {
        Ok(RegionAccess {
            offset: fields.u64()?,
            region: fields.u32()?,
            count: fields.u32()?,
        })
    }

    pub(crate) fn emit(&self, out: &mut Vec<u8>) {
        out.put64(self.offset);
        out.put32(self.region);
        out.put32(self.count);
    }
}

/// One write of a [`Request::RegionWriteMulti`](crate::Request::RegionWriteMulti).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SmallWrite {
    /// Destination; `count` is at most 8.
    pub access: RegionAccess,
    data: [u8; 8],
}

impl SmallWrite {
    /// Length in bytes.
    pub(crate) const LEN: usize = 24;

    /// A write of `data`; `None` if it is longer than 8 bytes.
    pub fn new(region: u32, offset: u64, data: &[u8]) -> Option<SmallWrite> {
        let mut all = [0; 8];
        all.get_mut(..data.len())?.copy_from_slice(data);
        let access = RegionAccess {
            offset,
            region,
            count: data.len() as u32,
        };
        Some(SmallWrite { access, data: all })
    }

    /// The bytes to write.
    pub fn data(&self) -> &[u8] {
        &self.data[..self.access.count as usize]
    }

    pub(crate) fn parse(fields: &mut Fields<'_>) -> Result<SmallWrite, Malformed> {
        let access = RegionAccess::parse(fields)?;
        let data = fields.bytes(8)?;
        let data = data.get(..access.count as usize).ok_or(Malformed::Count)?;
        SmallWrite::new(access.region, access.offset, data).ok_or(Malformed::Count)
    }

    pub(crate) fn emit(&self, out: &mut Vec<u8>) {
        self.access.emit(out);
        out.extend_from_slice(&self.data);
    }
}
