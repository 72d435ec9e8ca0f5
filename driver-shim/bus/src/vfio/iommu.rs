//! DMA through an IOMMU: each registration is pinned and gets IOVAs of its own.

use urnic_sync::Mutex;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::iova::IovaSpace;
use super::uapi;
use urnic_process::fds::InternalFd;

/// Page size of the processor; the pages of the IOMMU may be larger.
const PAGE: u64 = 4096;

/// Kernels before 5.4 do not report which addresses can be mapped. These ranges are what every
/// IOMMU of a PC can map, without the window of its interrupts.
const ANY_IOMMU: [uapi::IovaRange; 2] = [
    uapi::IovaRange {
        first: PAGE,
        last: 0xfedf_ffff,
    },
    uapi::IovaRange {
        first: 0xfef0_0000,
        last: (1 << 39) - 1,
    },
];

/// The address space of a device behind an IOMMU.
pub(super) struct Iommu {
    way: Way,
    space: Mutex<IovaSpace>,
    granule: u64,
}

enum Way {
    /// A container with a type1 IOMMU.
    Type1(InternalFd),
    /// An I/O address space of iommufd.
    Iommufd(InternalFd, u32),
}

impl Iommu {
    /// Makes the IOMMU of a container.
    ///
    /// # Errors
    /// The kernel's errors; `EOPNOTSUPP` if the kernel allows no address.
    pub(super) fn type1(container: InternalFd) -> Result<Iommu, Errno> {
        let mut info = uapi::IommuInfo::new();
        uapi::call(container.get().ok_or(Errno::IO)?, &mut *info)?;
        let smallest = match info.flags & uapi::IOMMU_PGSIZES {
            0 => PAGE,
            _ => 1 << info.page_sizes.trailing_zeros().min(30),
        };
        let ranges = info.iova_ranges();
        let ranges = ranges.as_deref().unwrap_or(&ANY_IOMMU);
        Iommu::new(Way::Type1(container), ranges, smallest)
    }

    /// Makes the IOMMU of an I/O address space to which the device is attached.
    ///
    /// # Errors
    /// The kernel's errors; `EOPNOTSUPP` if the kernel allows no address.
    pub(super) fn iommufd(iommufd: InternalFd, ioas: u32) -> Result<Iommu, Errno> {
        let (ranges, alignment) = uapi::iova_ranges(iommufd.get().ok_or(Errno::IO)?, ioas)?;
        Iommu::new(Way::Iommufd(iommufd, ioas), &ranges, alignment)
    }

    fn new(way: Way, ranges: &[uapi::IovaRange], smallest: u64) -> Result<Iommu, Errno> {
        let granule = smallest
            .max(PAGE)
            .checked_next_power_of_two()
            .ok_or(Errno::OPNOTSUPP)?;
        let mut space = IovaSpace::new(granule);
        for range in ranges {
            tracing::debug!("IOVAs {:#x} to {:#x}", range.first, range.last);
            space.add(range.first, range.last);
        }
        if space.is_full() {
            return Err(Errno::OPNOTSUPP);
        }
        Ok(Iommu {
            way,
            space: Mutex::new(space),
            granule,
        })
    }

    /// The name of the way to the IOMMU, in a few words.
    pub(super) fn name(&self) -> &'static str {
        match self.way {
            Way::Type1(_) => "IOMMU (VFIO container)",
            Way::Iommufd(..) => "IOMMU (iommufd)",
        }
    }

    /// Pins memory and maps it. Returns the IOVA of its first byte.
    ///
    /// # Errors
    /// `ENOMEM` if no IOVAs are left, there are too many mappings, or the process may lock no more
    /// memory; `EFAULT` if pages are missing, or are read-only and `write` is set; `EIO` in a
    /// forked child.
    pub(super) fn map(&self, address: usize, len: usize, write: bool) -> Result<u64, Errno> {
        if len == 0 {
            return Ok(0);
        }
        let (address, len) = (address as u64, len as u64);
        let start = address / self.granule * self.granule;
        let end = address
            .checked_add(len)
            .and_then(|end| end.checked_next_multiple_of(self.granule));
        let whole = end.ok_or(Errno::INVAL)? - start;
        let Some(iova) = self.space.lock().allocate(whole, start) else {
            tracing::error!("no {whole} bytes are left of the device's address space");
            return Err(Errno::NOMEM);
        };
        // Mapped writable for every use: with kernels before 6.2 only a write fault makes sure that
        // the pages are the program's own and stay so when the program writes to them. The device
        // itself enforces the rights of the registration.
        let pinned = match self.pin(start, whole, iova, true) {
            Err(Errno::FAULT) if !write => self.pin(start, whole, iova, false),
            pinned => pinned,
        };
        match pinned {
            Ok(()) => Ok(iova + (address - start)),
            Err(errno) => {
                self.space.lock().release(iova);
                tracing::error!("{}", explained(errno, whole));
                Err(if errno == Errno::NOSPC {
                    Errno::NOMEM
                } else {
                    errno
                })
            }
        }
    }

    /// Removes a mapping and unpins its pages.
    pub(super) fn unmap(&self, iova: u64, len: usize) {
        if len == 0 {
            return;
        }
        let start = iova / self.granule * self.granule;
        // The range is unmapped before it is released: no other mapping may get it earlier.
        let Some(whole) = self.space.lock().len_of(start) else {
            tracing::error!("IOVA {start:#x} was not mapped");
            return;
        };
        match self.unpin(start, whole) {
            Ok(()) => {
                self.space.lock().release(start);
            }
            // A forked child has no mappings.
            Err(Errno::IO) => {}
            Err(errno) => tracing::error!("IOVA {start:#x} cannot be unmapped: {errno}"),
        }
    }

    fn pin(&self, address: u64, len: u64, iova: u64, write: bool) -> Result<(), Errno> {
        match &self.way {
            Way::Type1(container) => {
                let flags = uapi::DMA_READ | if write { uapi::DMA_WRITE } else { 0 };
                let mut map = uapi::DmaMap {
                    size: 0,
                    flags,
                    address,
                    iova,
                    len,
                };
                uapi::call(container.get().ok_or(Errno::IO)?, &mut map).map(drop)
            }
            Way::Iommufd(iommufd, ioas) => {
                let writeable = if write { uapi::IOAS_WRITEABLE } else { 0 };
                let flags = uapi::IOAS_FIXED | uapi::IOAS_READABLE | writeable;
                let mut map = uapi::IoasMap {
                    size: 0,
                    flags,
                    ioas: *ioas,
                    reserved: 0,
                    address,
                    len,
                    iova,
                };
                uapi::call(iommufd.get().ok_or(Errno::IO)?, &mut map).map(drop)
            }
        }
    }

    fn unpin(&self, iova: u64, len: u64) -> Result<(), Errno> {
        match &self.way {
            Way::Type1(container) => {
                let mut unmap = uapi::DmaUnmap {
                    size: 0,
                    flags: 0,
                    iova,
                    len,
                };
                uapi::call(container.get().ok_or(Errno::IO)?, &mut unmap)?;
                if unmap.len == len {
                    Ok(())
                } else {
                    Err(Errno::FAULT)
                }
            }
            Way::Iommufd(iommufd, ioas) => {
                let mut unmap = uapi::IoasUnmap {
                    size: 0,
                    ioas: *ioas,
                    iova,
                    len,
                };
                uapi::call(iommufd.get().ok_or(Errno::IO)?, &mut unmap).map(drop)
            }
        }
    }
}

/// The reason why memory cannot be pinned, and how to correct it.
fn explained(errno: Errno, len: u64) -> String {
    match (errno, getrlimit(Resource::Memlock).current) {
        (Errno::NOMEM, Some(limit)) => format!(
            "cannot lock {len} more bytes for the device: the limit is {} KiB for all; raise it by `ulimit -l unlimited`, in \
             /etc/security/limits.conf (memlock) or by LimitMEMLOCK= of the service",
            limit >> 10
        ),
        (Errno::NOSPC, _) => "too many memory registrations: the kernel allows as many as \
            /sys/module/vfio_iommu_type1/parameters/dma_entry_limit says"
            .to_owned(),
        _ => format!("cannot map {len} bytes for the device: {errno}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pinning_error_names_its_cause_and_remedy() {
        assert!(explained(Errno::NOSPC, 4096).contains("dma_entry_limit"));
        assert!(explained(Errno::FAULT, 4096).contains("4096 bytes"));
        if getrlimit(Resource::Memlock).current.is_some() {
            assert!(explained(Errno::NOMEM, 4096).contains("ulimit -l"));
        }
    }

    /// A pipe stands for a container: every request fails, and nothing may stay allocated.
    #[test]
    fn a_refused_mapping_leaves_its_addresses_free() {
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        let container = InternalFd::kept(reader).unwrap();
        let range = uapi::IovaRange {
            first: PAGE,
            last: 2 * PAGE - 1,
        };
        let iommu = Iommu::new(Way::Type1(container), &[range], 1).unwrap();
        for _ in 0..3 {
            assert_eq!(iommu.map(0x1000, 10, true), Err(Errno::NOTTY));
        }
        assert_eq!(
            iommu.map(0x1fff, 2, true),
            Err(Errno::NOMEM),
            "two pages do not fit"
        );
        assert_eq!(iommu.map(usize::MAX, 2, true), Err(Errno::INVAL));
        assert_eq!(iommu.map(0x1fff, 0, true), Ok(0));
    }

    #[test]
    fn without_any_address_there_is_no_device() {
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        let container = InternalFd::kept(reader).unwrap();
        assert_eq!(
            Iommu::new(Way::Type1(container), &[], 1).err(),
            Some(Errno::OPNOTSUPP)
        );
    }
}
