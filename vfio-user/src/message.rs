//! Commands and replies.

use crate::device::DeviceInfo;
use crate::dma::{DmaAccess, DmaMap, DmaUnmap};
use crate::error::Malformed;
use crate::fields::{Fields, Put};
use crate::header::Command;
use crate::header::{Header, Kind};
use crate::irq::{IrqInfo, SetIrqs};
use crate::region::{RegionAccess, RegionInfo, SmallWrite};
use crate::version::Version;

/// A parsed command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request<'a> {
    /// Negotiate the version and capabilities: the first message of a connection.
    Version(Version),
    /// Permit the server to access memory.
    DmaMap(DmaMap),
    /// End the server's access to memory.
    DmaUnmap(DmaUnmap),
    /// Query the device.
    DeviceInfo {
        /// Room for the reply's payload in bytes.
        argsz: u32,
    },
    /// Query a region.
    RegionInfo {
        /// Room for the reply's payload in bytes.
        argsz: u32,
        /// Region: one of [`region_index`](crate::region_index).
        index: u32,
    },
    /// Query the descriptors that stand for writes to a region.
    RegionIoFds {
        /// Room for the reply's payload in bytes.
        argsz: u32,
        /// Region: one of [`region_index`](crate::region_index).
        index: u32,
    },
    /// Query a kind of interrupts.
    IrqInfo {
        /// Room for the reply's payload in bytes.
        argsz: u32,
        /// Kind of interrupts: one of [`irq_index`](crate::irq_index).
        index: u32,
    },
    /// Set up, mask or raise interrupts.
    SetIrqs(SetIrqs<'a>),
    /// Read a region.
    RegionRead(RegionAccess),
    /// Write a region.
    RegionWrite {
        /// Offset in the region.
        offset: u64,
        /// Region: one of [`region_index`](crate::region_index).
        region: u32,
        /// Bytes to write.
        data: &'a [u8],
    },
    /// Perform several small writes; mostly without a reply.
    RegionWriteMulti(Vec<SmallWrite>),
    /// From the server: read memory.
    DmaRead(DmaAccess),
    /// From the server: write memory.
    DmaWrite {
        /// First DMA address.
        address: u64,
        /// Bytes to write.
        data: &'a [u8],
    },
    /// Reset the device.
    DeviceReset,
}

fn argsz_and_index(mut fields: Fields<'_>, least: u32, len: usize) -> Result<(u32, u32), Malformed> {
    let mut all = Fields(fields.bytes(len)?);
    let argsz = all.u32()?;
    all.u32()?;
    if argsz < least {
        return Err(Malformed::Argsz);
    }
    Ok((argsz, all.u32()?))
}

fn exactly(data: &[u8], count: u64) -> Result<&[u8], Malformed> {
    if data.len() as u64 == count {
        Ok(data)
    } else {
        Err(Malformed::Count)
    }
}

impl<'a> Request<'a> {
    /// Parses a command's payload.
    ///
    /// # Errors
    ///
    /// [`Malformed`]: the payload is invalid, or the command is unknown.
    pub fn parse(command: u16, payload: &'a [u8]) -> Result<Request<'a>, Malformed> {
        let mut fields = Fields(payload);
        let unknown = Malformed::Command(command);
        Ok(match Command::from_raw(command).ok_or(unknown)? {
            Command::Version => Request::Version(Version::parse(fields)?),
            Command::DmaMap => Request::DmaMap(DmaMap::parse(fields)?),
            Command::DmaUnmap => Request::DmaUnmap(DmaUnmap::parse(fields)?),
            Command::DeviceInfo => {
                let (argsz, _) = argsz_and_index(fields, DeviceInfo::LEN, 16)?;
                Request::DeviceInfo { argsz }
            }
            Command::RegionInfo => {
                let (argsz, index) = argsz_and_index(fields, RegionInfo::LEN, 32)?;
                Request::RegionInfo { argsz, index }
            }
            Command::RegionIoFds => {
                let (argsz, index) = argsz_and_index(fields, 16, 16)?;
                Request::RegionIoFds { argsz, index }
            }
            Command::IrqInfo => {
                let (argsz, index) = argsz_and_index(fields, IrqInfo::LEN, 16)?;
                Request::IrqInfo { argsz, index }
            }
            Command::SetIrqs => Request::SetIrqs(SetIrqs::parse(fields)?),
            Command::RegionRead => Request::RegionRead(RegionAccess::parse(&mut fields)?),
            Command::RegionWrite => {
                let access = RegionAccess::parse(&mut fields)?;
                Request::RegionWrite {
                    offset: access.offset,
                    region: access.region,
                    data: exactly(fields.0, access.count.into())?,
                }
            }
            Command::RegionWriteMulti => {
                let count = fields.u64()?;
                if count > (fields.0.len() / SmallWrite::LEN) as u64 {
                    return Err(Malformed::Short);
                }
                let writes = (0..count).map(|_| SmallWrite::parse(&mut fields));
                Request::RegionWriteMulti(writes.collect::<Result<_, _>>()?)
            }
            Command::DmaRead => Request::DmaRead(DmaAccess::parse(&mut fields)?),
            Command::DmaWrite => {
                let access = DmaAccess::parse(&mut fields)?;
                Request::DmaWrite {
                    address: access.address,
                    data: exactly(fields.0, access.count)?,
                }
            }
            Command::DeviceReset => Request::DeviceReset,
            Command::DirtyPages
            | Command::DeviceFeature
            | Command::MigrationRead
            | Command::MigrationWrite => return Err(unknown),
        })
    }

    /// The command of this request.
    pub fn command(&self) -> Command {
        match self {
            Request::Version(_) => Command::Version,
            Request::DmaMap(_) => Command::DmaMap,
            Request::DmaUnmap(_) => Command::DmaUnmap,
            Request::DeviceInfo { .. } => Command::DeviceInfo,
            Request::RegionInfo { .. } => Command::RegionInfo,
            Request::RegionIoFds { .. } => Command::RegionIoFds,
            Request::IrqInfo { .. } => Command::IrqInfo,
            Request::SetIrqs(_) => Command::SetIrqs,
            Request::RegionRead(_) => Command::RegionRead,
            Request::RegionWrite { .. } => Command::RegionWrite,
            Request::RegionWriteMulti(_) => Command::RegionWriteMulti,
            Request::DmaRead(_) => Command::DmaRead,
            Request::DmaWrite { .. } => Command::DmaWrite,
            Request::DeviceReset => Command::DeviceReset,
        }
    }

    /// Appends the message to `out`.
    pub fn emit(&self, id: u16, no_reply: bool, out: &mut Vec<u8>) {
        let kind = Kind::Command { no_reply };
        Header::emit(id, self.command() as u16, kind, out, |out| self.emit_payload(out));
    }

    fn emit_payload(&self, out: &mut Vec<u8>) {
        let put_query = |out: &mut Vec<u8>, argsz: u32, index: u32, len: usize| {
            let start = out.len();
            out.put32(argsz);
            out.put32(0);
            out.put32(index);
            out.resize(start + len, 0);
        };
        match self {
            Request::Version(version) => version.emit(out),
            Request::DmaMap(map) => map.emit(out),
            Request::DmaUnmap(unmap) => unmap.emit(out),
            Request::DeviceInfo { argsz } => put_query(out, *argsz, 0, 16),
            Request::RegionInfo { argsz, index } => put_query(out, *argsz, *index, 32),
            Request::RegionIoFds { argsz, index } | Request::IrqInfo { argsz, index } => {
                put_query(out, *argsz, *index, 16);
            }
            Request::SetIrqs(set) => set.emit(out),
            Request::RegionRead(access) => access.emit(out),
            Request::RegionWrite { offset, region, data } => {
                put_region(out, *offset, *region, data);
            }
            Request::RegionWriteMulti(writes) => {
                out.put64(writes.len() as u64);
                writes.iter().for_each(|write| write.emit(out));
            }
            Request::DmaRead(access) => access.emit(out),
            Request::DmaWrite { address, data } => put_dma(out, *address, data),
            Request::DeviceReset => {}
        }
    }
}

fn put_region(out: &mut Vec<u8>, offset: u64, region: u32, data: &[u8]) {
    let count = data.len() as u32;
    RegionAccess {
        offset,
        region,
        count,
    }
    .emit(out);
    out.extend_from_slice(data);
}

fn put_dma(out: &mut Vec<u8>, address: u64, data: &[u8]) {
    let count = data.len() as u64;
    DmaAccess { address, count }.emit(out);
    out.extend_from_slice(data);
}

/// A parsed successful reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply<'a> {
    /// The version and the capabilities that the server agrees to.
    Version(Version),
    /// The memory can be accessed.
    DmaMap,
    /// The server no longer accesses the memory.
    DmaUnmap(DmaUnmap),
    /// Information about the device.
    DeviceInfo(DeviceInfo),
    /// Information about a region. A descriptor comes with it if the region can be mapped.
    RegionInfo(RegionInfo),
    /// Information about a kind of interrupts.
    IrqInfo(IrqInfo),
    /// The interrupts are set.
    SetIrqs,
    /// Data read from a region.
    RegionRead {
        /// Offset in the region.
        offset: u64,
        /// Region: one of [`region_index`](crate::region_index).
        region: u32,
        /// Bytes that were read.
        data: &'a [u8],
    },
    /// The write that was done.
    RegionWrite(RegionAccess),
    /// Number of writes that were done.
    RegionWriteMulti(u64),
    /// Data read from the client's memory.
    DmaRead {
        /// First DMA address.
        address: u64,
        /// Bytes that were read.
        data: &'a [u8],
    },
    /// The client's memory has been written. The payload differs between clients: the specification
    /// has an address and a 32-bit count; other clients send a 64-bit count or, as QEMU, no
    /// payload.
    DmaWrite,
    /// The device has been reset.
    DeviceReset,
}

impl<'a> Reply<'a> {
    /// Parses a reply's payload.
    ///
    /// # Errors
    ///
    /// [`Malformed`]: the payload is invalid, or the command is unknown.
    pub fn parse(command: u16, payload: &'a [u8]) -> Result<Reply<'a>, Malformed> {
        let mut fields = Fields(payload);
        let unknown = Malformed::Command(command);
        Ok(match Command::from_raw(command).ok_or(unknown)? {
            Command::Version => Reply::Version(Version::parse(fields)?),
            Command::DmaMap => Reply::DmaMap,
            Command::DmaUnmap => Reply::DmaUnmap(DmaUnmap::parse(fields)?),
            Command::DeviceInfo => Reply::DeviceInfo(DeviceInfo::parse(fields)?),
            Command::RegionInfo => Reply::RegionInfo(RegionInfo::parse(fields)?),
            Command::IrqInfo => Reply::IrqInfo(IrqInfo::parse(fields)?),
            Command::SetIrqs => Reply::SetIrqs,
            Command::RegionRead => {
                let access = RegionAccess::parse(&mut fields)?;
                Reply::RegionRead {
                    offset: access.offset,
                    region: access.region,
                    data: exactly(fields.0, access.count.into())?,
                }
            }
            Command::RegionWrite => Reply::RegionWrite(RegionAccess::parse(&mut fields)?),
            Command::RegionWriteMulti => Reply::RegionWriteMulti(fields.u64()?),
            Command::DmaRead => {
                let access = DmaAccess::parse(&mut fields)?;
                Reply::DmaRead {
                    address: access.address,
                    data: exactly(fields.0, access.count)?,
                }
            }
            Command::DmaWrite => Reply::DmaWrite,
            Command::DeviceReset => Reply::DeviceReset,
            Command::RegionIoFds
            | Command::DirtyPages
            | Command::DeviceFeature
            | Command::MigrationRead
            | Command::MigrationWrite => return Err(unknown),
        })
    }

    /// The command to which this replies.
    pub fn command(&self) -> Command {
        match self {
            Reply::Version(_) => Command::Version,
            Reply::DmaMap => Command::DmaMap,
            Reply::DmaUnmap(_) => Command::DmaUnmap,
            Reply::DeviceInfo(_) => Command::DeviceInfo,
            Reply::RegionInfo(_) => Command::RegionInfo,
            Reply::IrqInfo(_) => Command::IrqInfo,
            Reply::SetIrqs => Command::SetIrqs,
            Reply::RegionRead { .. } => Command::RegionRead,
            Reply::RegionWrite(_) => Command::RegionWrite,
            Reply::RegionWriteMulti(_) => Command::RegionWriteMulti,
            Reply::DmaRead { .. } => Command::DmaRead,
            Reply::DmaWrite => Command::DmaWrite,
            Reply::DeviceReset => Command::DeviceReset,
        }
    }

    /// Appends the message to `out`; `id` is the command's id.
    pub fn emit(&self, id: u16, out: &mut Vec<u8>) {
        let kind = Kind::Reply { error: None };
        Header::emit(id, self.command() as u16, kind, out, |out| match self {
            Reply::Version(version) => version.emit(out),
            Reply::DmaUnmap(unmap) => unmap.emit(out),
            Reply::DeviceInfo(info) => info.emit(out),
            Reply::RegionInfo(info) => info.emit(out),
            Reply::IrqInfo(info) => info.emit(out),
            Reply::RegionRead { offset, region, data } => put_region(out, *offset, *region, data),
            Reply::RegionWrite(access) => access.emit(out),
            Reply::RegionWriteMulti(count) => out.put64(*count),
            Reply::DmaRead { address, data } => put_dma(out, *address, data),
            Reply::DmaMap | Reply::SetIrqs | Reply::DmaWrite | Reply::DeviceReset => {}
        });
    }
}

/// Appends an error reply to the command `command` of id `id`; `errno` is not 0.
pub fn emit_error(id: u16, command: u16, errno: u32, out: &mut Vec<u8>) {
    let kind = Kind::Reply { error: Some(errno) };
    Header::emit(id, command, kind, out, |_| {});
}
