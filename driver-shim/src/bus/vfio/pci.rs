//! The function itself: configuration space, registers, doorbell pages, interrupts.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};

use rustix::io::{Errno, pread, pwrite};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use urnic_verbs_api::device::{doorbell, pci};

use super::uapi;
use crate::presence::InternalFd;

/// Offsets in configuration space (PCI 3.0 §6.1).
const VENDOR_ID: u64 = 0x00;
const DEVICE_ID: u64 = 0x02;
const COMMAND: u64 = 0x04;
/// Bits of the command register: answer to accesses of memory, begin accesses itself, no INTx.
const COMMAND_BITS: u16 = 1 << 1 | 1 << 2 | 1 << 10;

/// The function: registers and interrupts by its file, until that is given back.
pub(super) struct PciFunction {
    file: RwLock<Option<InternalFd>>,
    config: u64,
    registers: Region,
    vectors: u32,
}

/// Where a region lies in the function's file.
#[derive(Debug, Clone, Copy)]
struct Region {
    at: u64,
    len: u64,
    flags: u32,
}

/// The doorbell pages, mapped here.
pub(super) struct Doorbells {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: memory of a device, accessed by 64-bit atomics only.
unsafe impl Send for Doorbells {}
// SAFETY: as above.
unsafe impl Sync for Doorbells {}

impl PciFunction {
    /// The function behind `file`, reset, with its doorbell pages, ready to access memory. Its ids come first.
    ///
    /// # Errors
    /// What it lacks, or the step that the kernel refused.
    pub(super) fn new(file: InternalFd) -> Result<(PciFunction, Doorbells), Unfit> {
        let fd = file.get().ok_or(Unfit::Step("opening", Errno::IO))?;
        let mut info = uapi::DeviceInfo {
            size: 0,
            flags: 0,
            regions: 0,
            irqs: 0,
            caps: 0,
        };
        uapi::call(fd, &mut info).map_err(|errno| Unfit::Step("VFIO_DEVICE_GET_INFO", errno))?;
        if info.flags & uapi::DEVICE_PCI == 0 {
            return Err(Unfit::Lacks("is no PCI function to VFIO"));
        }
        let config = region(fd, uapi::CONFIG_REGION)?.at;
        let ids = (read16(fd, config + VENDOR_ID)?, read16(fd, config + DEVICE_ID)?);
        if ids != (pci::VENDOR_ID, pci::DEVICE_ID) {
            return Err(Unfit::Foreign(ids.0, ids.1));
        }
        if info.flags & uapi::DEVICE_RESET != 0 {
            // The registers have a reset of their own, which the driver uses.
            if let Err(errno) = uapi::reset(fd) {
                tracing::warn!("VFIO_DEVICE_RESET: {errno}");
            }
        }
        let command = read16(fd, config + COMMAND)? | COMMAND_BITS;
        pwrite(fd, &command.to_le_bytes(), config + COMMAND)
            .map_err(|errno| Unfit::Step("enabling bus mastering", errno))?;
        let registers = region(fd, pci::BAR_REGISTERS.into())?;
        if registers.len < 4096 {
            return Err(Unfit::Lacks("BAR 0 is too small"));
        }
        let doorbells = Doorbells::map(fd, region(fd, pci::BAR_DOORBELLS.into())?)?;
        let mut irqs = uapi::IrqInfo {
            size: 0,
            flags: 0,
            index: uapi::MSIX,
            count: 0,
        };
        uapi::call(fd, &mut irqs).map_err(|errno| Unfit::Step("VFIO_DEVICE_GET_IRQ_INFO", errno))?;
        let function = PciFunction {
            file: RwLock::new(Some(file)),
            config,
            registers,
            vectors: irqs.count,
        };
        Ok((function, doorbells))
    }

    /// Number of MSI-X vectors.
    pub(super) fn vectors(&self) -> u32 {
        self.vectors
    }

    /// Runs `f` with the function's file; `None` once it was given back, or in a forked child.
    fn with<T>(&self, f: impl FnOnce(BorrowedFd<'_>) -> T) -> Option<T> {
        let file = self.file.read().unwrap_or_else(PoisonError::into_inner);
        file.as_ref().and_then(InternalFd::get).map(f)
    }

    /// Reads a register; all ones if it cannot be read, as from a bus where nobody answers.
    pub(super) fn read32(&self, offset: u32) -> u32 {
        let mut bytes = [0xff; 4];
        let inside = u64::from(offset) + 4 <= self.registers.len;
        let read = self.with(|fd| pread(fd, &mut bytes, self.registers.at + u64::from(offset)));
        match read {
            Some(Ok(4)) if inside => u32::from_le_bytes(bytes),
            _ => u32::MAX,
        }
    }

    /// Writes a register.
    pub(super) fn write32(&self, offset: u32, value: u32) {
        if u64::from(offset) + 4 <= self.registers.len {
            // Who is not there takes no writes; the next read tells.
            let _ = self.with(|fd| pwrite(fd, &value.to_le_bytes(), self.registers.at + u64::from(offset)));
        }
    }

    /// Has the vectors of an interrupt index raise these eventfds.
    ///
    /// # Errors
    /// The kernel's; `EIO` when the function was given back.
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

    /// Whether the function has such an interrupt.
    pub(super) fn has_irq(&self, index: u32) -> bool {
        let mut info = uapi::IrqInfo {
            size: 0,
            flags: 0,
            index,
            count: 0,
        };
        self.with(|fd| uapi::call(fd, &mut info).is_ok()).unwrap_or(false) && info.count > 0
    }

    /// Gives the function back: no interrupts, no accesses of its own any more, and the file is closed.
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
        *self.file.write().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// What is wrong with a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unfit {
    /// Its ids are these.
    Foreign(u16, u16),
    /// It is not as such a device is.
    Lacks(&'static str),
    /// The kernel refused this step.
    Step(&'static str, Errno),
}

fn region(fd: BorrowedFd<'_>, index: u32) -> Result<Region, Unfit> {
    let mut info = uapi::RegionInfo {
        size: 0,
        flags: 0,
        index,
        caps: 0,
        len: 0,
        offset: 0,
    };
    uapi::call(fd, &mut info).map_err(|errno| Unfit::Step("VFIO_DEVICE_GET_REGION_INFO", errno))?;
    Ok(Region {
        at: info.offset,
        len: info.len,
        flags: info.flags,
    })
}

fn read16(fd: BorrowedFd<'_>, at: u64) -> Result<u16, Unfit> {
    let mut bytes = [0; 2];
    match pread(fd, &mut bytes, at) {
        Ok(2) => Ok(u16::from_le_bytes(bytes)),
        Ok(_) => Err(Unfit::Step("reading configuration space", Errno::IO)),
        Err(errno) => Err(Unfit::Step("reading configuration space", errno)),
    }
}

impl Doorbells {
    fn map(fd: BorrowedFd<'_>, region: Region) -> Result<Doorbells, Unfit> {
        let len = usize::try_from(region.len).unwrap_or(0);
        if len < doorbell::PAGE_LEN as usize || region.flags & uapi::REGION_MMAP == 0 {
            return Err(Unfit::Lacks("BAR 2, the doorbells, cannot be mapped"));
        }
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        let base = unsafe { mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, fd, region.at) }
            .map_err(|errno| Unfit::Step("mapping BAR 2", errno))?;
        // A child that kept the mapping would keep the function.
        // SAFETY: the mapping just made; the child finds other memory there, see `blind`.
        let _ = unsafe { madvise(base, len, Advice::LinuxDontFork) };
        let base = NonNull::new(base.cast()).ok_or(Unfit::Step("mapping BAR 2", Errno::NOMEM))?;
        Ok(Doorbells { base, len })
    }

    /// The 64-bit slot at `offset` of page `uar`; `None` outside.
    fn slot(&self, uar: u32, offset: u32) -> Option<&AtomicU64> {
        let at = (uar as usize)
            .checked_mul(doorbell::PAGE_LEN as usize)?
            .checked_add(offset as usize)?;
        if !at.is_multiple_of(8) || at.checked_add(8)? > self.len {
            return None;
        }
        // SAFETY: inside the mapping and aligned; it stays mapped as long as this lives.
        Some(unsafe { &*self.base.as_ptr().add(at).cast::<AtomicU64>() })
    }

    /// Stores into a slot. What was written to queues before is seen first.
    pub(super) fn store(&self, uar: u32, offset: u32, value: u64) {
        if let Some(slot) = self.slot(uar, offset) {
            slot.store(value.to_le(), Ordering::Release);
        }
    }

    /// The wake word of page `uar` (`urnic_verbs_api::device::doorbell`), as of after what was stored before.
    pub(super) fn wake(&self, uar: u32) -> u32 {
        std::sync::atomic::fence(Ordering::SeqCst);
        self.slot(uar, doorbell::WAKE)
            .map_or(0, |slot| u64::from_le(slot.load(Ordering::Relaxed)) as u32)
    }

    /// Puts plain memory in place of the device's, where doorbells are stored in vain. Async-signal-safe.
    pub(super) fn blind(&self) {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::FIXED;
        // SAFETY: replaces a mapping that is ours alone; who uses it goes through atomics and minds no other content.
        let _ = unsafe { mmap_anonymous(self.base.as_ptr().cast(), self.len, prot, flags) };
    }
}

impl Drop for Doorbells {
    fn drop(&mut self) {
        // SAFETY: our own mapping, to which nobody has a reference any more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(count: usize) -> Doorbells {
        let len = count * doorbell::PAGE_LEN as usize;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping of the test's own.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), len, prot, MapFlags::SHARED) }.unwrap();
        Doorbells {
            base: NonNull::new(base.cast()).unwrap(),
            len,
        }
    }

    #[test]
    fn a_doorbell_lands_in_its_slot_and_never_outside() {
        let doorbells = pages(2);
        doorbells.store(1, 16, 0x1122_3344_5566_7788);
        assert_eq!(
            doorbells.slot(1, 16).unwrap().load(Ordering::Relaxed),
            0x1122_3344_5566_7788u64.to_le()
        );
        for (uar, offset) in [(2, 0), (u32::MAX, u32::MAX), (1, 4096), (1, 4092), (0, 4)] {
            assert!(doorbells.slot(uar, offset).is_none());
            doorbells.store(uar, offset, 1);
        }
        assert!(doorbells.slot(1, 4088).is_some());
    }

    #[test]
    fn the_wake_word_is_the_device_s_until_it_is_blinded() {
        let doorbells = pages(1);
        assert_eq!(doorbells.wake(0), 0);
        doorbells
            .slot(0, doorbell::WAKE)
            .unwrap()
            .store(1u64.to_le(), Ordering::Relaxed);
        assert_eq!(doorbells.wake(0), 1);
        doorbells.blind();
        assert_eq!(doorbells.wake(0), 0);
        doorbells.store(0, 0, 5);
    }
}
