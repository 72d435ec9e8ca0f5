//! Memory registration.
//!
//! A kernel driver would pin the pages. Here the driver only makes the pages present: the device
//! reads and writes them through the program's own mapping, and finds no hole as long as the
//! program keeps its part of the contract. Pages of regions on demand need not be present: for
//! these regions the kernel copies for the device.

use std::ffi::c_void;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};
use urnic_device::command::{CreateMr, Handle, ModifyMr, NULL_REGION, Nothing, Opcode, features, reregister};
use urnic_device::vocabulary::Access;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

use crate::driver::Driver;
use crate::objects::Pd;
use urnic_device::bus::Mapping;

const PAGE: usize = 4096;

/// A registered region.
#[derive(Debug)]
pub struct Mr {
    /// The region's STag: both keys.
    pub stag: u32,
    /// `None` for a region without memory, or on demand.
    dma: Option<Mapping>,
    len: usize,
}

/// A change of a registration.
#[derive(Debug, Default)]
pub struct Reregistration<'a> {
    /// Other memory: its address, its length, and the offset that names its first byte.
    pub memory: Option<(*mut c_void, usize, u64)>,
    /// Another protection domain.
    pub pd: Option<&'a Pd>,
    /// Whether the rights change.
    pub access: bool,
    /// The rights after the change, also if they stay.
    pub rights: Access,
}

/// The arguments of `CreateMr` for memory that is mapped as `dma`, and the page list if the command
/// needs one.
fn create_arguments(pd: &Pd, dma: &Mapping, len: usize, base: u64, access: Access) -> (CreateMr, Vec<U64>) {
    let (dma, log_page, list) = match dma {
        Mapping::Contiguous(iova) => (*iova, 0, Vec::new()),
        Mapping::Pages {
            pages,
            log_page,
            offset,
        } => (
            *offset,
            *log_page,
            pages.iter().map(|page| U64::new(*page)).collect(),
        ),
    };
    let arguments = CreateMr {
        base: base.into(),
        len: (len as u64).into(),
        dma: dma.into(),
        pd: pd.id.into(),
        access: access.bits().into(),
        log_page: log_page.into(),
        reserved: 0.into(),
    };
    (arguments, list)
}

impl Driver {
    /// Registers `len` bytes at `addr`. `base` names the first byte: the address, the argument of
    /// `ibv_reg_mr_iova`, or 0 if zero-based.
    ///
    /// # Errors
    /// `EFAULT` if a page is not mapped, or is read-only where `access` permits writes; `EINVAL` if
    /// the range wraps or the device refuses the rights (a remote writer without `LOCAL_WRITE`);
    /// `EOPNOTSUPP` for `ON_DEMAND` where the device does not support it; `ENOMEM` if no memory is
    /// left; `EIO` in a forked child.
    pub fn register(
        &self,
        pd: &Pd,
        addr: *mut c_void,
        len: usize,
        base: u64,
        access: Access,
    ) -> Result<Mr, Errno> {
        self.check_usable()?;
        let mapping = self.map(addr, len, base, access)?;
        let (arguments, list) = create_arguments(pd, &mapping, len, base, access);
        let dma = (!access.contains(Access::ON_DEMAND)).then_some(mapping);
        let created = if list.is_empty() {
            self.commands.call::<_, Handle>(Opcode::CreateMr, &arguments)
        } else {
            self.commands
                .send::<_, Handle>(Opcode::CreateMr, &arguments, list.as_bytes())
        };
        match created {
            Ok(handle) => Ok(Mr {
                stag: handle.id.get(),
                dma,
                len,
            }),
            Err(errno) => {
                self.unmap(dma.as_ref(), len);
                Err(errno)
            }
        }
    }

    /// Registers a region without memory (`ibv_alloc_null_mr(3)`): the device gathers zeroes from
    /// the region, and discards data that is scattered to it.
    ///
    /// # Errors
    /// `ENOMEM` if the device has no room; `EIO` in a forked child.
    pub fn register_null(&self, pd: &Pd) -> Result<Mr, Errno> {
        self.check_usable()?;
        let nothing = Mapping::Contiguous(0);
        let (mut arguments, _) = create_arguments(pd, &nothing, usize::MAX, 0, Access::LOCAL_WRITE);
        arguments.log_page = NULL_REGION.into();
        let handle: Handle = self.commands.call(Opcode::CreateMr, &arguments)?;
        Ok(Mr {
            stag: handle.id.get(),
            dma: None,
            len: 0,
        })
    }

    /// Makes memory present, and maps it for the device. For a region on demand, only returns the
    /// range in which memory may appear.
    fn map(&self, addr: *mut c_void, len: usize, base: u64, access: Access) -> Result<Mapping, Errno> {
        base.checked_add(len as u64).ok_or(Errno::INVAL)?;
        if access.contains(Access::ON_DEMAND) {
            if self.attributes.features & features::ON_DEMAND == 0 {
                return Err(Errno::OPNOTSUPP);
            }
            return Ok(Mapping::Contiguous(addr.expose_provenance() as u64));
        }
        let write = access.intersects(Access::WRITERS);
        populate(addr, len, write)?;
        self.bus.map(addr.cast(), len, write)
    }

    fn unmap(&self, dma: Option<&Mapping>, len: usize) {
        if let Some(dma) = dma {
            self.bus.unmap(dma, len);
        }
    }

    /// Applies `change` to a registration (`ibv_rereg_mr(3)`). The STag stays the same. A failed
    /// call changes nothing.
    ///
    /// # Errors
    /// The errors of [`Driver::register`]; `EBUSY` while a window is bound to the region.
    pub fn reregister(&self, mr: &mut Mr, change: &Reregistration<'_>) -> Result<(), Errno> {
        self.check_usable()?;
        let dma = match change.memory {
            Some((addr, len, base)) => Some((self.map(addr, len, base, change.rights)?, len, base)),
            None => None,
        };
        let mapped = |dma| (!change.rights.contains(Access::ON_DEMAND)).then_some(dma);
        let mut changes = 0;
        let mut put = |given: bool, bit: u32| changes |= if given { bit } else { 0 };
        put(dma.is_some(), reregister::TRANSLATION);
        put(change.pd.is_some(), reregister::PD);
        put(change.access, reregister::ACCESS);
        let no_memory = Mapping::Contiguous(0);
        let (mapping, len, base) = dma
            .as_ref()
            .map_or((&no_memory, 0, 0), |(dma, len, base)| (dma, *len, *base));
        let no_pd = Pd { id: 0 };
        let (new, list) = create_arguments(change.pd.unwrap_or(&no_pd), mapping, len, base, change.rights);
        let arguments = ModifyMr {
            stag: mr.stag.into(),
            what: changes.into(),
            new,
        };
        let changed = if list.is_empty() {
            self.commands.run(Opcode::ModifyMr, &arguments)
        } else {
            self.commands
                .send::<_, Nothing>(Opcode::ModifyMr, &arguments, list.as_bytes())
                .map(drop)
        };
        match changed {
            Ok(()) => {
                if let Some((dma, len, _)) = dma {
                    self.unmap(mr.dma.as_ref(), mr.len);
                    (mr.dma, mr.len) = (mapped(dma), len);
                }
                Ok(())
            }
            Err(errno) => {
                if let Some((dma, len, _)) = dma {
                    self.unmap(mapped(dma).as_ref(), len);
                }
                Err(errno)
            }
        }
    }

    /// Revokes a registration. When this returns, the device no longer places or reads data through
    /// it.
    ///
    /// # Errors
    /// `EBUSY` while a window is bound to the region; `EIO` in a forked child.
    pub fn deregister(&self, mr: &Mr) -> Result<(), Errno> {
        self.check_process()?;
        self.commands.destroy(Opcode::DestroyMr, mr.stag)?;
        self.unmap(mr.dma.as_ref(), mr.len);
        Ok(())
    }
}

/// Makes pages of a region on demand present before they are used; with `write`, writable
/// (`ibv_advise_mr(3)`).
///
/// # Errors
/// The errors of [`Driver::register`].
pub fn prefetch(addr: *mut c_void, len: usize, write: bool) -> Result<(), Errno> {
    populate(addr, len, write)
}

/// Makes the pages present; with `write`, writable.
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
        // SAFETY: populating changes no byte: its effect is the early effect of touching the pages.
        match unsafe { madvise(addr.with_addr(start), end - start, advice) } {
            Ok(()) => return Ok(()),
            // A signal interrupted the call; its handler runs before the next try.
            Err(Errno::INTR) => {}
            // Kernels before 5.14 do not support the advice; newer ones return the same error for
            // rights that do not fit and for device memory.
            Err(Errno::INVAL) => return check(start, end, write),
            // The kernel reports a hole as ENOMEM, and a page behind the end of a file as EFAULT.
            Err(_) => return Err(Errno::FAULT),
        }
    }
}

/// Checks the pages by the list of mappings.
fn check(start: usize, end: usize, write: bool) -> Result<(), Errno> {
    let maps = read_file("/proc/self/maps")?;
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

fn read_file(path: &str) -> Result<String, Errno> {
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

    /// Calls `test` with three new pages, whose middle one `change` unmaps or makes read-only.
    fn with_pages(change: impl Fn(*mut c_void), test: impl Fn(*mut c_void)) {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping of the test's own, unmapped below.
        let pages =
            unsafe { mmap_anonymous(std::ptr::null_mut(), 3 * PAGE, prot, MapFlags::PRIVATE) }.unwrap();
        change(pages.wrapping_byte_add(PAGE));
        test(pages);
        // SAFETY: the mapping made above; unmapping a hole again is no error.
        unsafe { munmap(pages, 3 * PAGE) }.unwrap();
    }

    fn check_both_ways(addr: *mut c_void, len: usize, write: bool) -> Result<(), Errno> {
        let (start, end) = (
            addr.addr() & !(PAGE - 1),
            (addr.addr() + len).next_multiple_of(PAGE),
        );
        let by_list = check(start, end, write);
        assert_eq!(populate(addr, len, write), by_list);
        by_list
    }

    #[test]
    fn a_hole_in_the_range_fails_with_efault() {
        // SAFETY: the middle page of the test's own mapping.
        let punch = |page| unsafe { munmap(page, PAGE) }.unwrap();
        with_pages(punch, |pages| {
            assert_eq!(check_both_ways(pages, PAGE, true), Ok(()));
            assert_eq!(
                check_both_ways(pages.wrapping_byte_add(100), PAGE, true),
                Err(Errno::FAULT)
            );
            assert_eq!(
                check_both_ways(pages.wrapping_byte_add(2 * PAGE), PAGE, false),
                Ok(())
            );
            assert_eq!(
                check_both_ways(pages.wrapping_byte_add(PAGE), 1, false),
                Err(Errno::FAULT)
            );
        });
    }

    #[test]
    fn memory_for_writing_must_be_writable() {
        // SAFETY: the middle page of the test's own mapping.
        let protect = |page| unsafe { mprotect(page, PAGE, MprotectFlags::READ) }.unwrap();
        with_pages(protect, |pages| {
            assert_eq!(check_both_ways(pages, 3 * PAGE, false), Ok(()));
            assert_eq!(check_both_ways(pages, 3 * PAGE, true), Err(Errno::FAULT));
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
