//! Memory registration.
//!
//! A kernel driver would pin the pages. Here they are only made to exist: the device reads and writes them through
//! the program's own mapping, and finds no hole as long as the program keeps its part of the contract.

use std::ffi::c_void;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};
use urnic_verbs_api::device::command::{CreateMr, Handle, Opcode};
use urnic_verbs_api::vocabulary::Access;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

use super::{Driver, Pd};
use crate::bus::Mapping;

const PAGE: usize = 4096;

/// A registered region.
#[derive(Debug)]
pub struct Mr {
    /// Its Stag: both keys.
    pub stag: u32,
    dma: Mapping,
    len: usize,
}

impl Driver {
    /// Registers `len` bytes at `addr`; they are named from `base` on: the address, what `ibv_reg_mr_iova` was told, or 0 if zero-based.
    ///
    /// # Errors
    /// `EFAULT` if a page is not mapped, or is read-only where `access` lets somebody write; `EINVAL` if the range wraps or the device
    /// refuses the rights (a remote writer without `LOCAL_WRITE`); `ENOMEM`; `EIO` in a forked child.
    pub fn register(
        &self,
        pd: &Pd,
        addr: *mut c_void,
        len: usize,
        base: u64,
        access: Access,
    ) -> Result<Mr, Errno> {
        self.alive()?;
        base.checked_add(len as u64).ok_or(Errno::INVAL)?;
        let write = access.intersects(Access::WRITERS);
        populate(addr, len, write)?;
        let dma = self.bus.map(addr.cast(), len, write)?;
        let mut arguments = CreateMr {
            base: base.into(),
            len: (len as u64).into(),
            dma: 0.into(),
            pd: pd.id.into(),
            access: access.bits().into(),
            log_page: 0.into(),
            reserved: 0.into(),
        };
        let created = match &dma {
            Mapping::Contiguous(iova) => {
                arguments.dma = (*iova).into();
                self.commands.call::<_, Handle>(Opcode::CreateMr, &arguments)
            }
            Mapping::Pages {
                pages,
                log_page,
                offset,
            } => {
                arguments.dma = (*offset).into();
                arguments.log_page = (*log_page).into();
                let list: Vec<U64> = pages.iter().map(|page| U64::new(*page)).collect();
                self.commands
                    .send::<_, Handle>(Opcode::CreateMr, &arguments, list.as_bytes())
            }
        };
        match created {
            Ok(handle) => Ok(Mr {
                stag: handle.id.get(),
                dma,
                len,
            }),
            Err(errno) => {
                self.bus.unmap(&dma, len);
                Err(errno)
            }
        }
    }

    /// Revokes a registration. When this returns, nothing is placed or read through it any more.
    ///
    /// # Errors
    /// `EBUSY` while a window is bound to it; `EIO` in a forked child.
    pub fn deregister(&self, mr: &Mr) -> Result<(), Errno> {
        self.here()?;
        self.commands.destroy(Opcode::DestroyMr, mr.stag)?;
        self.bus.unmap(&mr.dma, mr.len);
        Ok(())
    }
}

/// Makes the pages exist, writable if asked.
fn populate(addr: *mut c_void, len: usize, write: bool) -> Result<(), Errno> {
    let start = addr.addr() & !(PAGE - 1);
    let end = addr
        .addr()
        .checked_add(len)
        .and_then(|end| end.checked_next_multiple_of(PAGE))
        .ok_or(Errno::INVAL)?;
    if len == 0 {
        return Ok(());
    }
    let advice = if write {
        Advice::LinuxPopulateWrite
    } else {
        Advice::LinuxPopulateRead
    };
    loop {
        // SAFETY: populating changes no byte: it does early what touching the pages would do.
        match unsafe { madvise(addr.with_addr(start), end - start, advice) } {
            Ok(()) => return Ok(()),
            Err(Errno::INTR | Errno::AGAIN) => {}
            // Kernels before 5.14 do not know it; newer ones say the same of rights that do not fit and of device memory.
            Err(Errno::INVAL) => return check(start, end, write),
            // A hole is told as ENOMEM; a page behind the end of a file as EFAULT.
            Err(_) => return Err(Errno::FAULT),
        }
    }
}

/// The same judgement from the list of mappings.
fn check(start: usize, end: usize, write: bool) -> Result<(), Errno> {
    let maps = slurp("/proc/self/maps")?;
    covered(&maps, start, end, write)
        .then_some(())
        .ok_or(Errno::FAULT)
}

/// Whether mappings with the rights cover the range without a hole. Lines are in order of address.
fn covered(maps: &str, start: usize, end: usize, write: bool) -> bool {
    let mut reached = start;
    for line in maps.lines() {
        let mut words = line.split([' ', '-']);
        let mut number = || usize::from_str_radix(words.next()?, 16).ok();
        let (Some(from), Some(to)) = (number(), number()) else {
            return false;
        };
        let rights = words.next().unwrap_or_default().as_bytes();
        if to <= reached {
            continue;
        }
        if from > reached || rights.first() != Some(&b'r') || write && rights.get(1) != Some(&b'w') {
            return false;
        }
        reached = to;
        if reached >= end {
            return true;
        }
    }
    false
}

fn slurp(path: &str) -> Result<String, Errno> {
    let fd = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut bytes = Vec::new();
    let mut chunk = vec![0; 1 << 16];
    loop {
        match rustix::io::read(&fd, &mut chunk) {
            Ok(0) => return String::from_utf8(bytes).map_err(|_| Errno::IO),
            Ok(n) => bytes.extend_from_slice(chunk.get(..n).unwrap_or_default()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

    /// Three fresh pages, the middle one gone or read-only.
    fn with_pages(change: impl Fn(*mut c_void), test: impl Fn(*mut c_void)) {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping of the test's own, unmapped below.
        let pages =
            unsafe { mmap_anonymous(std::ptr::null_mut(), 3 * PAGE, prot, MapFlags::PRIVATE) }.unwrap();
        change(pages.wrapping_byte_add(PAGE));
        test(pages);
        // SAFETY: as above; unmapping a hole again is no error.
        unsafe { munmap(pages, 3 * PAGE) }.unwrap();
    }

    fn both(addr: *mut c_void, len: usize, write: bool) -> Result<(), Errno> {
        let (start, end) = (
            addr.addr() & !(PAGE - 1),
            (addr.addr() + len).next_multiple_of(PAGE),
        );
        let by_list = check(start, end, write);
        assert_eq!(populate(addr, len, write), by_list);
        by_list
    }

    #[test]
    fn a_hole_is_a_fault() {
        // SAFETY: the middle page of the test's own mapping.
        let punch = |page| unsafe { munmap(page, PAGE) }.unwrap();
        with_pages(punch, |pages| {
            assert_eq!(both(pages, PAGE, true), Ok(()));
            assert_eq!(both(pages.wrapping_byte_add(100), PAGE, true), Err(Errno::FAULT));
            assert_eq!(both(pages.wrapping_byte_add(2 * PAGE), PAGE, false), Ok(()));
            assert_eq!(both(pages.wrapping_byte_add(PAGE), 1, false), Err(Errno::FAULT));
        });
    }

    #[test]
    fn memory_that_somebody_shall_write_must_be_writable() {
        // SAFETY: the middle page of the test's own mapping.
        let protect = |page| unsafe { mprotect(page, PAGE, MprotectFlags::READ) }.unwrap();
        with_pages(protect, |pages| {
            assert_eq!(both(pages, 3 * PAGE, false), Ok(()));
            assert_eq!(both(pages, 3 * PAGE, true), Err(Errno::FAULT));
        });
    }

    #[test]
    fn a_range_that_wraps_is_invalid() {
        assert_eq!(
            populate(std::ptr::without_provenance_mut(usize::MAX - 10), 100, false),
            Err(Errno::INVAL)
        );
    }
}
