//! The function itself: configuration space, registers, doorbell pages, interrupts.

use std::os::fd::{AsRawFd, BorrowedFd};
use urnic_sync::RwLock;

use rustix::io::{Errno, pread, pwrite};
use urnic_device::{doorbell, pci, registers};

use super::uapi;
use crate::doorbells::DoorbellPages;
use urnic_process::fds::InternalFd;

/// Offsets in configuration space (PCI 3.0 §6.1).
const VENDOR_ID: u64 = 0x00;
const DEVICE_ID: u64 = 0x02;
const COMMAND: u64 = 0x04;
/// Bits of the command register: respond to memory accesses, start accesses as bus master, no INTx.
const COMMAND_BITS: u16 = 1 << 1 | 1 << 2 | 1 << 10;

/// The function: registers and interrupts by its file, until the function is returned.
pub(super) struct PciFunction {
    file: RwLock<Option<InternalFd>>,
    config: u64,
    registers: Region,
    vectors: u32,
}

/// The place of a region in the function's file.
#[derive(Debug, Clone, Copy)]
struct Region {
    at: u64,
    len: u64,
    flags: u32,
}

impl PciFunction {
    /// Sets up the function of `file`: checks its ids, resets it, maps its doorbell pages, and
    /// permits it to access memory.
    ///
    /// # Errors
    /// [`Unusable`]: the missing feature, or the step that the kernel refused.
    pub(super) fn new(file: InternalFd) -> Result<(PciFunction, DoorbellPages), Unusable> {
        let fd = file.get().ok_or(Unusable::Step("opening", Errno::IO))?;
        let mut info = uapi::DeviceInfo {
            size: 0,
            flags: 0,
            regions: 0,
            irqs: 0,
            caps: 0,
        };
        uapi::call(fd, &mut info).map_err(|errno| Unusable::Step("VFIO_DEVICE_GET_INFO", errno))?;
        if info.flags & uapi::DEVICE_PCI == 0 {
            return Err(Unusable::Lacks("is no PCI function to VFIO"));
        }
        let config = region(fd, uapi::CONFIG_REGION)?.at;
        let ids = (read16(fd, config + VENDOR_ID)?, read16(fd, config + DEVICE_ID)?);
        if ids != (pci::VENDOR_ID, pci::DEVICE_ID) {
            return Err(Unusable::WrongId(ids.0, ids.1));
        }
        if info.flags & uapi::DEVICE_RESET != 0 {
            // The registers have a separate reset, which the driver uses.
            if let Err(errno) = uapi::reset(fd) {
                tracing::warn!("VFIO_DEVICE_RESET: {errno}");
            }
        }
        let command = read16(fd, config + COMMAND)? | COMMAND_BITS;
        pwrite(fd, &command.to_le_bytes(), config + COMMAND)
            .map_err(|errno| Unusable::Step("enabling bus mastering", errno))?;
        let bar0 = region(fd, pci::BAR_REGISTERS.into())?;
        if bar0.len < registers::BAR_LEN.into() {
            return Err(Unusable::Lacks("BAR 0 is too small"));
        }
        let doorbells = doorbells(fd)?;
        let mut irqs = uapi::IrqInfo {
            size: 0,
            flags: 0,
            index: uapi::MSIX,
            count: 0,
        };
        uapi::call(fd, &mut irqs).map_err(|errno| Unusable::Step("VFIO_DEVICE_GET_IRQ_INFO", errno))?;
        let function = PciFunction {
            file: RwLock::new(Some(file)),
            config,
            registers: bar0,
            vectors: irqs.count,
        };
        Ok((function, doorbells))
    }

    /// Number of MSI-X vectors.
    pub(super) fn vectors(&self) -> u32 {
        self.vectors
    }

    /// Runs `f` with the function's file; `None` after the function was returned, or in a forked
    /// child.
    fn with<T>(&self, f: impl FnOnce(BorrowedFd<'_>) -> T) -> Option<T> {
        let file = self.file.read();
        file.as_ref().and_then(InternalFd::get).map(f)
    }

    /// Reads a register; all ones if the read fails, as from a bus without a device.
    pub(super) fn read32(&self, offset: u32) -> u32 {
        let mut bytes = [0xff; 4];
        let inside = u64::from(offset) + 4 <= self.registers.len;
        let read = self.with(|fd| pread(fd, &mut bytes, self.registers.at + u64::from(offset)));
        match read {
            Some(Ok(4)) if inside => u32::from_le_bytes(bytes),
            _ => registers::GONE,
        }
    }

    /// Writes a register.
    pub(super) fn write32(&self, offset: u32, value: u32) {
        if u64::from(offset) + 4 <= self.registers.len {
            // A missing device ignores writes; the next read detects it.
            let _ = self.with(|fd| pwrite(fd, &value.to_le_bytes(), self.registers.at + u64::from(offset)));
        }
    }

    /// Makes the vectors of an interrupt index raise these eventfds.
    ///
    /// # Errors
    /// The kernel's errors; `EIO` after the function was returned.
    pub(super) fn raise(&self, index: u32, eventfds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let mut set = uapi::IrqSet {
            size: 0,
            flags: uapi::IRQ_EVENTFD,
            index,
            start: 0,
            count: eventfds.len().min(uapi::MAX_VECTORS) as u32,
            fds: [-1; uapi::MAX_VECTORS],
        };
        for (slot, fd) in set.fds.iter_mut().zip(eventfds) {
            *slot = fd.as_raw_fd();
        }
        self.with(|fd| uapi::call(fd, &mut set))
            .unwrap_or(Err(Errno::IO))
            .map(drop)
    }

    /// Whether the function has the interrupt with this index.
    pub(super) fn has_irq(&self, index: u32) -> bool {
        let mut info = uapi::IrqInfo {
            size: 0,
            flags: 0,
            index,
            count: 0,
        };
        self.with(|fd| uapi::call(fd, &mut info).is_ok()).unwrap_or(false) && info.count > 0
    }

    /// Returns the function: turns off its interrupts and its accesses to memory, and closes the
    /// file.
    pub(super) fn give_back(&self) {
        let mut off = uapi::IrqSet {
            size: 0,
            flags: uapi::IRQ_OFF,
            index: uapi::MSIX,
            start: 0,
            count: 0,
            fds: [-1; uapi::MAX_VECTORS],
        };
        self.with(|fd| {
            let _ = uapi::call(fd, &mut off);
            if let Ok(command) = read16(fd, self.config + COMMAND) {
                let _ = pwrite(fd, &(command & !(1 << 2)).to_le_bytes(), self.config + COMMAND);
            }
        });
        *self.file.write() = None;
    }
}

/// Why a function cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unusable {
    /// The function has these ids, which are not urnic's.
    WrongId(u16, u16),
    /// The function lacks this feature.
    Lacks(&'static str),
    /// The kernel refused this step.
    Step(&'static str, Errno),
}

fn region(fd: BorrowedFd<'_>, index: u32) -> Result<Region, Unusable> {
    let mut info = uapi::RegionInfo {
        size: 0,
        flags: 0,
        index,
        caps: 0,
        len: 0,
        offset: 0,
    };
    uapi::call(fd, &mut info).map_err(|errno| Unusable::Step("VFIO_DEVICE_GET_REGION_INFO", errno))?;
    Ok(Region {
        at: info.offset,
        len: info.len,
        flags: info.flags,
    })
}

fn read16(fd: BorrowedFd<'_>, at: u64) -> Result<u16, Unusable> {
    let mut bytes = [0; 2];
    match pread(fd, &mut bytes, at) {
        Ok(2) => Ok(u16::from_le_bytes(bytes)),
        Ok(_) => Err(Unusable::Step("reading configuration space", Errno::IO)),
        Err(errno) => Err(Unusable::Step("reading configuration space", errno)),
    }
}

fn doorbells(fd: BorrowedFd<'_>) -> Result<DoorbellPages, Unusable> {
    let region = region(fd, pci::BAR_DOORBELLS.into())?;
    let len = usize::try_from(region.len).unwrap_or(0);
    if len < doorbell::PAGE_LEN as usize || region.flags & uapi::REGION_MMAP == 0 {
        return Err(Unusable::Lacks("BAR 2, the doorbells, cannot be mapped"));
    }
    DoorbellPages::map(fd, region.at, len).map_err(|errno| Unusable::Step("mapping BAR 2", errno))
}
