//! A function as its client sees it over vfio-user: messages in, replies out. No I/O: messages
//! reach the hardware through [`Hardware`].

use super::config_space::{self, BAR_MSIX_LEN, ConfigSpace, MAX_VECTORS, PBA_OFFSET};
use super::passed::Passed;
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use urnic_device::pci::{BAR_DOORBELLS, BAR_MSIX, BAR_REGISTERS};
use urnic_device::registers::BAR_LEN;
use urnic_vfio_user::{
    Capabilities, Command, DeviceFlags, DeviceInfo, DmaMap, DmaUnmap, DmaUnmapFlags, IrqAction, IrqData,
    IrqFlags, IrqInfo, Kind, Limits, MAJOR, MINOR, Malformed, Memory, Message, RegionAccess, RegionFlags,
    RegionInfo, Reply, Request, SetIrqs, SmallWrite, SparseArea, Urnic, Version, emit_error, irq_index,
    region_index,
};

/// Maximum number of bytes that one message may transfer, in either direction.
pub(crate) const MAX_TRANSFER: usize = 1 << 20;
/// Maximum number of descriptors in one message; QEMU refuses a server that declares more.
pub(crate) const MAX_FDS: usize = 16;
/// Maximum number of extents of memory that are lent at the same time.
pub(crate) const MAX_DMA_MAPS: u64 = 1 << 20;
/// Limits of the messages that a client may send.
pub(crate) const LIMITS: Limits = Limits {
    // The longest header of a transfer is 32 bytes.
    message: MAX_TRANSFER + 64,
    fds: MAX_FDS,
};

/// A message from the client.
pub(crate) type Incoming = Message<Passed>;

/// The hardware that messages act on.
pub(crate) trait Hardware {
    /// Starts the device after the client has declared its capabilities. Returns how memory without
    /// descriptors is accessed, if the client declared urnic's own capability.
    fn start(&mut self, client: &Capabilities) -> Result<Option<Memory>, Errno>;
    /// Reads a register.
    fn register(&mut self, offset: u32) -> u32;
    /// Writes a register.
    fn set_register(&mut self, offset: u32, value: u32);
    /// Length of BAR 2 in bytes, a power of two.
    fn doorbells_len(&self) -> u64;
    /// The memory of BAR 2.
    fn doorbells(&self) -> Result<OwnedFd, Errno>;
    /// Reads from the doorbell pages.
    fn doorbells_read(&mut self, offset: u64, into: &mut [u8]);
    /// Performs a doorbell write that came as a message.
    fn ring(&mut self, offset: u64, value: u64);
    /// Number of interrupt vectors.
    fn vectors(&self) -> u32;
    /// Sets the eventfd that a vector signals, or none.
    fn assign(&mut self, vector: u32, eventfd: Option<OwnedFd>);
    /// Masks or unmasks a vector.
    fn mask(&mut self, vector: u32, masked: bool);
    /// Raises a vector.
    fn raise(&mut self, vector: u32);
    /// Whether a vector's interrupt waits to be signalled.
    fn is_pending(&self, vector: u32) -> bool;
    /// Maps memory that the client lends.
    fn map(&mut self, map: &DmaMap, file: Option<Passed>) -> Result<(), Errno>;
    /// Unmaps the client's memory from the first to the last address.
    fn unmap(&mut self, first: u64, last: u64) -> Result<(), Errno>;
    /// Resets the function.
    fn reset(&mut self);
}

/// Bytes and descriptors to send.
#[derive(Debug, Default)]
pub(crate) struct Outgoing {
    pub(crate) bytes: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
}

/// The connection ends after the pending output is sent.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Disconnect;

#[derive(Debug)]
struct Present {
    config: ConfigSpace,
    /// The MSI-X table. It only stores values: the client routes interrupts by SET_IRQS.
    table: [u8; PBA_OFFSET as usize],
    /// Maximum number of data bytes that the client accepts in a message.
    room: usize,
}

/// A function. It is absent until the versions are agreed.
#[derive(Debug, Default)]
pub(crate) struct Function {
    present: Option<Present>,
}

fn errno_of(error: Malformed) -> Errno {
    match error {
        Malformed::Command(command) if Command::from_raw(command).is_some() => Errno::NOTSUP,
        Malformed::Command(_) => Errno::NOSYS,
        _ => Errno::INVAL,
    }
}

impl Function {
    /// Whether the client has completed the version exchange.
    pub(crate) fn is_present(&self) -> bool {
        self.present.is_some()
    }

    /// Executes a command and appends the reply. (Replies to the server's own commands do not come
    /// here.)
    pub(crate) fn message(
        &mut self,
        message: Incoming,
        hardware: &mut dyn Hardware,
        out: &mut Outgoing,
    ) -> Result<(), Disconnect> {
        let Incoming {
            header,
            payload,
            mut fds,
        } = message;
        let first = self.present.is_none();
        let start = (out.bytes.len(), out.fds.len());
        let done = Request::parse(header.command, &payload)
            .map_err(errno_of)
            .and_then(|request| self.request(request, &mut fds, header.id, hardware, out));
        if let Err(errno) = done {
            tracing::debug!(command = header.command, %errno, "refused");
            out.bytes.truncate(start.0);
            out.fds.truncate(start.1);
            emit_error(
                header.id,
                header.command,
                errno.raw_os_error() as u32,
                &mut out.bytes,
            );
        }
        if header.kind == (Kind::Command { no_reply: true }) {
            out.bytes.truncate(start.0);
            out.fds.truncate(start.1);
        }
        // A client that fails the version exchange is disconnected.
        if first && done.is_err() {
            Err(Disconnect)
        } else {
            Ok(())
        }
    }

    /// Handles the first request, which must be the version.
    fn begin(
        &mut self,
        request: &Request<'_>,
        id: u16,
        hardware: &mut dyn Hardware,
        out: &mut Outgoing,
    ) -> Result<(), Errno> {
        let Request::Version(version) = request else {
            return Err(Errno::INVAL);
        };
        let (present, answer) = Present::begin(version, hardware)?;
        self.present = Some(present);
        Reply::Version(answer).emit(id, &mut out.bytes);
        Ok(())
    }

    fn request(
        &mut self,
        request: Request<'_>,
        fds: &mut Vec<Passed>,
        id: u16,
        hardware: &mut dyn Hardware,
        out: &mut Outgoing,
    ) -> Result<(), Errno> {
        let takes_fds = matches!(request, Request::DmaMap(_) | Request::SetIrqs(_));
        if !takes_fds && !fds.is_empty() {
            return Err(Errno::INVAL);
        }
        let Some(present) = &mut self.present else {
            return self.begin(&request, id, hardware, out);
        };
        let mut read = Vec::new();
        let reply = match request {
            Request::DmaMap(map) => {
                if fds.len() > 1 {
                    return Err(Errno::INVAL);
                }
                hardware.map(&map, fds.pop())?;
                Reply::DmaMap
            }
            Request::DmaUnmap(unmap) => {
                present.unmap(&unmap, hardware)?;
                Reply::DmaUnmap(unmap)
            }
            Request::DeviceInfo { .. } => Reply::DeviceInfo(DeviceInfo {
                flags: DeviceFlags::RESET | DeviceFlags::PCI,
                regions: region_index::COUNT,
                irqs: irq_index::COUNT,
            }),
            Request::RegionInfo { argsz, index } => {
                let info = region(index, hardware)?;
                if info.flags.contains(RegionFlags::MMAP) {
                    out.fds.push(hardware.doorbells()?);
                }
                Reply::RegionInfo(info.within(argsz))
            }
            Request::IrqInfo { index, .. } => Reply::IrqInfo(irqs(index, hardware)?),
            Request::SetIrqs(set) => {
                set_irqs(&set, std::mem::take(fds), hardware)?;
                Reply::SetIrqs
            }
            Request::RegionRead(access) => {
                read.resize(present.check(access, hardware)?, 0);
                present.read(access, &mut read, hardware);
                Reply::RegionRead {
                    offset: access.offset,
                    region: access.region,
                    data: &read,
                }
            }
            Request::RegionWrite { offset, region, data } => {
                let count = data.len() as u32;
                let access = RegionAccess {
                    offset,
                    region,
                    count,
                };
                present.check(access, hardware)?;
                present.write(access, data, hardware)?;
                Reply::RegionWrite(access)
            }
            Request::RegionWriteMulti(writes) => {
                Reply::RegionWriteMulti(present.write_multi(&writes, hardware)?)
            }
            Request::DeviceReset => {
                hardware.reset();
                present.reset(hardware);
                Reply::DeviceReset
            }
            Request::RegionIoFds { .. } => return Err(Errno::NOTSUP),
            // The version is agreed already, or the request is not for a server.
            Request::Version(_) | Request::DmaRead(_) | Request::DmaWrite { .. } => return Err(Errno::INVAL),
        };
        reply.emit(id, &mut out.bytes);
        Ok(())
    }
}

fn bar_lens(hardware: &dyn Hardware) -> [u64; 6] {
    let mut bars = [0; 6];
    bars[usize::from(BAR_REGISTERS)] = BAR_LEN.into();
    bars[usize::from(BAR_DOORBELLS)] = hardware.doorbells_len();
    bars[usize::from(BAR_MSIX)] = BAR_MSIX_LEN;
    bars
}

const REGISTERS: u32 = BAR_REGISTERS as u32;
const DOORBELLS: u32 = BAR_DOORBELLS as u32;
const MSIX: u32 = BAR_MSIX as u32;

fn region(index: u32, hardware: &dyn Hardware) -> Result<RegionInfo, Errno> {
    let access = RegionFlags::READ | RegionFlags::WRITE;
    let bars = bar_lens(hardware);
    let info = |flags, size, sparse| RegionInfo::new(index, flags, size, 0, sparse);
    Ok(match index {
        DOORBELLS => {
            let all = SparseArea {
                offset: 0,
                size: bars[index as usize],
            };
            info(access | RegionFlags::MMAP, all.size, Some(vec![all]))
        }
        REGISTERS | MSIX => info(access, bars[index as usize], None),
        region_index::CONFIG => info(access, config_space::LEN as u64, None),
        0..region_index::COUNT => info(RegionFlags::empty(), 0, None),
        _ => return Err(Errno::INVAL),
    })
}

fn irqs(index: u32, hardware: &dyn Hardware) -> Result<IrqInfo, Errno> {
    let (flags, count) = match index {
        irq_index::MSIX => (IrqFlags::EVENTFD | IrqFlags::MASKABLE, hardware.vectors()),
        0..irq_index::COUNT => (IrqFlags::empty(), 0),
        _ => return Err(Errno::INVAL),
    };
    Ok(IrqInfo { flags, index, count })
}

/// All forms of SET_IRQS. With eventfds: one for each vector, or none at all, which removes the
/// eventfds of the vectors.
fn set_irqs(set: &SetIrqs<'_>, fds: Vec<Passed>, hardware: &mut dyn Hardware) -> Result<(), Errno> {
    let available = irqs(set.index, hardware)?.count;
    let end = set.start.checked_add(set.count).ok_or(Errno::INVAL)?;
    if end > available {
        return Err(Errno::INVAL);
    }
    let range = set.start..end;
    if !fds.is_empty() && (set.data != IrqData::Eventfd || fds.len() != range.len()) {
        return Err(Errno::INVAL);
    }
    let mut act = |vector: u32| match set.action {
        IrqAction::Trigger => hardware.raise(vector),
        IrqAction::Mask => hardware.mask(vector, true),
        IrqAction::Unmask => hardware.mask(vector, false),
    };
    match (set.data, set.action) {
        (IrqData::None, IrqAction::Trigger) if range.is_empty() => {
            (0..available).for_each(|vector| hardware.assign(vector, None));
        }
        (IrqData::None, _) => range.for_each(act),
        (IrqData::Bool(chosen), _) => {
            let chosen = range.zip(chosen).filter(|(_, chosen)| **chosen != 0);
            chosen.for_each(|(vector, _)| act(vector));
        }
        (IrqData::Eventfd, IrqAction::Trigger) => {
            // Other descriptors, for example a full pipe, could block the device.
            let eventfd = |fd| match fd {
                Passed::Eventfd(fd) => Ok(fd),
                Passed::Memory(_) | Passed::Other => Err(Errno::INVAL),
            };
            let fds: Vec<OwnedFd> = fds.into_iter().map(eventfd).collect::<Result<_, _>>()?;
            let mut fds = fds.into_iter();
            range.for_each(|vector| hardware.assign(vector, fds.next()));
        }
        // An eventfd that signals masking by the owner is unsupported: no owner requests it.
        (IrqData::Eventfd, IrqAction::Mask | IrqAction::Unmask) => return Err(Errno::NOTSUP),
    }
    Ok(())
}

impl Present {
    /// Handles the first message: agrees the version and the capabilities, and starts the device.
    fn begin(asked: &Version, hardware: &mut dyn Hardware) -> Result<(Present, Version), Errno> {
        if asked.major != MAJOR {
            return Err(Errno::PROTONOSUPPORT);
        }
        let client = &asked.capabilities;
        let room = client.data_xfer_size().min(MAX_TRANSFER);
        if room == 0 {
            return Err(Errno::INVAL);
        }
        let memory = hardware.start(client)?;
        // Only capabilities that the client mentions are returned: QEMU accepts no reply that is
        // longer than its request.
        let lower = |theirs: Option<u64>, ours: u64| theirs.map(|theirs| theirs.min(ours));
        let capabilities = Capabilities {
            max_msg_fds: lower(client.max_msg_fds, MAX_FDS as u64),
            max_data_xfer_size: lower(client.max_data_xfer_size, MAX_TRANSFER as u64),
            max_dma_maps: lower(client.max_dma_maps, MAX_DMA_MAPS),
            pgsizes: client.pgsizes.map(|_| 4096),
            write_multiple: client.write_multiple,
            urnic: memory.map(|memory| Urnic {
                identity: false,
                memory: Some(memory),
            }),
        };
        let answer = Version {
            major: MAJOR,
            minor: asked.minor.min(MINOR),
            capabilities,
        };
        let present = Present {
            config: ConfigSpace::new(bar_lens(hardware), hardware.vectors()),
            table: [0; PBA_OFFSET as usize],
            room,
        };
        Ok((present, answer))
    }

    fn reset(&mut self, hardware: &dyn Hardware) {
        self.config = ConfigSpace::new(bar_lens(hardware), hardware.vectors());
        self.table.fill(0);
    }

    fn unmap(&self, unmap: &DmaUnmap, hardware: &mut dyn Hardware) -> Result<(), Errno> {
        if unmap.flags == DmaUnmapFlags::ALL {
            return match (unmap.address, unmap.size) {
                (0, 0) => hardware.unmap(0, u64::MAX),
                _ => Err(Errno::INVAL),
            };
        }
        if !unmap.flags.is_empty() {
            return Err(Errno::NOTSUP);
        }
        let size = unmap.size.checked_sub(1).ok_or(Errno::INVAL)?;
        let last = unmap.address.checked_add(size).ok_or(Errno::INVAL)?;
        hardware.unmap(unmap.address, last)
    }

    /// The length of an access, if it lies inside of a region and fits in a reply.
    fn check(&self, access: RegionAccess, hardware: &dyn Hardware) -> Result<usize, Errno> {
        let len = region(access.region, hardware)?.size;
        let end = access.offset.checked_add(access.count.into());
        if end.is_none_or(|end| end > len) {
            return Err(Errno::INVAL);
        }
        if access.count as usize > self.room {
            return Err(Errno::TOOBIG);
        }
        Ok(access.count as usize)
    }

    fn read(&self, access: RegionAccess, into: &mut [u8], hardware: &mut dyn Hardware) {
        let offset = access.offset as usize;
        match access.region {
            // Reading a register has no side effect, so each byte may come from its own read.
            REGISTERS => {
                let mut word = (u32::MAX, [0; 4]);
                for (i, byte) in into.iter_mut().enumerate() {
                    let at = (offset + i) as u32;
                    if word.0 != at & !3 {
                        word = (at & !3, hardware.register(at & !3).to_le_bytes());
                    }
                    *byte = word.1[at as usize & 3];
                }
            }
            DOORBELLS => hardware.doorbells_read(access.offset, into),
            MSIX => {
                let vectors = hardware.vectors().min(MAX_VECTORS);
                for (i, byte) in into.iter_mut().enumerate() {
                    *byte = match self.table.get(offset + i) {
                        Some(byte) => *byte,
                        None => pending_byte(offset + i - self.table.len(), vectors, hardware),
                    };
                }
            }
            _ => {
                if let Some(bytes) = self.config.read(offset, into.len()) {
                    into.copy_from_slice(bytes);
                }
            }
        }
    }

    fn write(&mut self, access: RegionAccess, data: &[u8], hardware: &mut dyn Hardware) -> Result<(), Errno> {
        match access.region {
            REGISTERS => {
                let (words, rest) = data.as_chunks();
                if !access.offset.is_multiple_of(4) || !rest.is_empty() {
                    return Err(Errno::INVAL);
                }
                for (i, word) in words.iter().enumerate() {
                    let value = u32::from_le_bytes(*word);
                    hardware.set_register(access.offset as u32 + 4 * i as u32, value);
                }
            }
            DOORBELLS => {
                let value = data
                    .try_into()
                    .map(u64::from_le_bytes)
                    .map_err(|_| Errno::INVAL)?;
                if !access.offset.is_multiple_of(8) {
                    return Err(Errno::INVAL);
                }
                hardware.ring(access.offset, value);
            }
            MSIX => {
                let table = self.table.get_mut(access.offset as usize..).unwrap_or_default();
                // Pending bits are read-only.
                let len = data.len().min(table.len());
                table[..len].copy_from_slice(&data[..len]);
            }
            _ => {
                let resets = self.config.write(access.offset as usize, data);
                if resets.ok_or(Errno::INVAL)? {
                    hardware.reset();
                    self.reset(hardware);
                }
            }
        }
        Ok(())
    }

    /// Performs several writes, up to the first that fails.
    fn write_multi(&mut self, writes: &[SmallWrite], hardware: &mut dyn Hardware) -> Result<u64, Errno> {
        for (done, write) in writes.iter().enumerate() {
            let checked = self.check(write.access, hardware);
            if let Err(errno) = checked.and_then(|_| self.write(write.access, write.data(), hardware)) {
                return if done == 0 { Err(errno) } else { Ok(done as u64) };
            }
        }
        Ok(writes.len() as u64)
    }
}

/// The pending bits of eight vectors.
fn pending_byte(index: usize, vectors: u32, hardware: &dyn Hardware) -> u8 {
    (0..8).fold(0, |byte, bit| {
        let vector = 8 * index as u32 + bit;
        byte | u8::from(vector < vectors && hardware.is_pending(vector)) << bit
    })
}
