//! The kernel's interface: structures and requests of `linux/vfio.h` and `linux/iommufd.h`. Only
//! this file issues them.

use std::ffi::{CStr, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl, opcode};

/// `VFIO_API_VERSION`.
pub(super) const API_VERSION: i32 = 0;
/// `VFIO_TYPE1v2_IOMMU`, the second version of the type1 IOMMU.
pub(super) const TYPE1V2_IOMMU: u32 = 3;
/// `VFIO_NOIOMMU_IOMMU`.
pub(super) const NOIOMMU_IOMMU: u32 = 8;

/// `VFIO_GROUP_FLAGS_VIABLE`: no device of the group has a kernel driver.
pub(super) const GROUP_VIABLE: u32 = 1 << 0;
/// `VFIO_DEVICE_FLAGS_RESET`: the device can be reset.
pub(super) const DEVICE_RESET: u32 = 1 << 0;
/// `VFIO_DEVICE_FLAGS_PCI`.
pub(super) const DEVICE_PCI: u32 = 1 << 1;
/// `VFIO_REGION_INFO_FLAG_MMAP`.
pub(super) const REGION_MMAP: u32 = 1 << 2;
/// `VFIO_IOMMU_INFO_PGSIZES`.
pub(super) const IOMMU_PGSIZES: u32 = 1 << 0;
/// `VFIO_IOMMU_INFO_CAPS`.
pub(super) const IOMMU_CAPS: u32 = 1 << 1;
/// `VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE`.
pub(super) const CAP_IOVA_RANGE: u16 = 1;
/// `VFIO_DMA_MAP_FLAG_READ`: the device may read.
pub(super) const DMA_READ: u32 = 1 << 0;
/// `VFIO_DMA_MAP_FLAG_WRITE`: the device may write.
pub(super) const DMA_WRITE: u32 = 1 << 1;
/// `IOMMU_IOAS_MAP_FIXED_IOVA`.
pub(super) const IOAS_FIXED: u32 = 1 << 0;
/// `IOMMU_IOAS_MAP_WRITEABLE`.
pub(super) const IOAS_WRITEABLE: u32 = 1 << 1;
/// `IOMMU_IOAS_MAP_READABLE`.
pub(super) const IOAS_READABLE: u32 = 1 << 2;
/// `VFIO_IRQ_SET_DATA_NONE | VFIO_IRQ_SET_ACTION_TRIGGER`; with a count of 0 it turns an index off.
pub(super) const IRQ_OFF: u32 = 1 << 0 | 1 << 5;
/// `VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER`.
pub(super) const IRQ_EVENTFD: u32 = 1 << 2 | 1 << 5;

/// `VFIO_PCI_CONFIG_REGION_INDEX`; the region index of a BAR is the number of the BAR.
pub(super) const CONFIG_REGION: u32 = 7;
/// `VFIO_PCI_MSIX_IRQ_INDEX`.
pub(super) const MSIX: u32 = 2;
/// `VFIO_PCI_ERR_IRQ_INDEX`: an error that the bus cannot correct.
pub(super) const ERR: u32 = 3;
/// `VFIO_PCI_REQ_IRQ_INDEX`: the kernel requests the device.
pub(super) const REQ: u32 = 4;

/// Most vectors that one request sets up.
pub(super) const MAX_VECTORS: usize = 64;
/// Room for the capabilities of an information structure.
pub(super) const CAPS_LEN: usize = 4096 - 24;

/// The type letter of the requests of both families.
const LETTER: u8 = b';';

macro_rules! arguments {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $len:literal { $($field:ident @ $offset:literal: $ty:ty,)* })*) => { $(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy)]
        pub(super) struct $name { $(pub(super) $field: $ty,)* }

        const _: () = {
            assert!(size_of::<$name>() == $len);
            $(assert!(std::mem::offset_of!($name, $field) == $offset);)*
        };

        // SAFETY: request, size and offsets are those of the headers; the first field gives the
        // kernel the length of the structure, and the kernel accesses no more.
        unsafe impl Argument for $name {
            const OPCODE: Opcode = opcode::none(LETTER, $number);

            fn set_len(&mut self) {
                self.size = $len;
            }
        }
    )* };
}

/// The argument of a request that takes a structure.
///
/// # Safety
///
/// For [`Argument::OPCODE`] the kernel reads and writes only this structure, and memory that an
/// integer in the structure names for mapping. Any bytes are a value.
pub(super) unsafe trait Argument {
    const OPCODE: Opcode;
    /// Sets the structure's length field, as the kernel demands.
    fn set_len(&mut self);
}

arguments! {
    /// `struct vfio_group_status`.
    GroupStatus = 103, 8 { size @ 0: u32, flags @ 4: u32, }
    /// `struct vfio_device_info`.
    DeviceInfo = 107, 20 { size @ 0: u32, flags @ 4: u32, regions @ 8: u32, irqs @ 12: u32, caps @ 16: u32, }
    /// `struct vfio_region_info`.
    RegionInfo = 108, 32 { size @ 0: u32, flags @ 4: u32, index @ 8: u32, caps @ 12: u32, len @ 16: u64, offset @ 24: u64, }
    /// `struct vfio_irq_info`.
    IrqInfo = 109, 16 { size @ 0: u32, flags @ 4: u32, index @ 8: u32, count @ 12: u32, }
    /// `struct vfio_irq_set`, with room for eventfds.
    IrqSet = 110, 276 { size @ 0: u32, flags @ 4: u32, index @ 8: u32, start @ 12: u32, count @ 16: u32, fds @ 20: [i32; MAX_VECTORS], }
    /// `struct vfio_iommu_type1_info`, with room for capabilities.
    IommuInfo = 112, 4096 { size @ 0: u32, flags @ 4: u32, page_sizes @ 8: u64, caps @ 16: u32, pad @ 20: u32, space @ 24: [u8; CAPS_LEN], }
    /// `struct vfio_iommu_type1_dma_map`.
    DmaMap = 113, 32 { size @ 0: u32, flags @ 4: u32, address @ 8: u64, iova @ 16: u64, len @ 24: u64, }
    /// `struct vfio_iommu_type1_dma_unmap`.
    DmaUnmap = 114, 24 { size @ 0: u32, flags @ 4: u32, iova @ 8: u64, len @ 16: u64, }
    /// `struct vfio_device_bind_iommufd`.
    BindIommufd = 118, 16 { size @ 0: u32, flags @ 4: u32, iommufd @ 8: i32, device @ 12: u32, }
    /// `struct vfio_device_attach_iommufd_pt`.
    AttachIommufd = 119, 12 { size @ 0: u32, flags @ 4: u32, ioas @ 8: u32, }
    /// `struct iommu_ioas_alloc`.
    IoasAlloc = 0x81, 12 { size @ 0: u32, flags @ 4: u32, ioas @ 8: u32, }
    /// `struct iommu_ioas_map`.
    IoasMap = 0x85, 40 { size @ 0: u32, flags @ 4: u32, ioas @ 8: u32, reserved @ 12: u32, address @ 16: u64, len @ 24: u64, iova @ 32: u64, }
    /// `struct iommu_ioas_unmap`.
    IoasUnmap = 0x86, 24 { size @ 0: u32, ioas @ 4: u32, iova @ 8: u64, len @ 16: u64, }
}

/// `struct iommu_ioas_iova_ranges`. It is no [`Argument`], as it names memory that the kernel
/// writes.
#[repr(C)]
struct IoasIovaRanges {
    size: u32,
    ioas: u32,
    count: u32,
    reserved: u32,
    ranges: u64,
    alignment: u64,
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<IoasIovaRanges>() == 32);
    assert!(offset_of!(IoasIovaRanges, count) == 8);
    assert!(offset_of!(IoasIovaRanges, ranges) == 16);
    assert!(offset_of!(IoasIovaRanges, alignment) == 24);
    assert!(size_of::<IovaRange>() == 16);
};

/// `struct iommu_iova_range`, and `struct vfio_iova_range`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct IovaRange {
    pub(super) first: u64,
    pub(super) last: u64,
}

/// A request in the form that the kernel takes.
struct Request {
    opcode: Opcode,
    argument: *mut c_void,
}

// SAFETY: `as_ptr` only returns the pointer; the code that makes the value guarantees the pointer.
unsafe impl Ioctl for Request {
    type Output = i32;
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        self.opcode
    }

    fn as_ptr(&mut self) -> *mut c_void {
        self.argument
    }

    unsafe fn output_from_ptr(output: IoctlOutput, _: *mut c_void) -> Result<i32, Errno> {
        Ok(output)
    }
}

/// Issues a request that takes a structure.
///
/// # Errors
/// The kernel's errors.
pub(super) fn call<T: Argument>(fd: BorrowedFd<'_>, argument: &mut T) -> Result<i32, Errno> {
    argument.set_len();
    let request = Request {
        opcode: T::OPCODE,
        argument: std::ptr::from_mut(argument).cast(),
    };
    // SAFETY: the structure belongs to this request (contract of `Argument`), and `argument` is an
    // exclusive reference to it.
    unsafe { ioctl(fd, request) }
}

/// Issues a request whose argument is a number.
fn plain(fd: BorrowedFd<'_>, number: u8, argument: u32) -> Result<i32, Errno> {
    let request = Request {
        opcode: opcode::none(LETTER, number),
        argument: std::ptr::without_provenance_mut(argument as usize),
    };
    // SAFETY: the functions below pass only requests whose argument is a number.
    unsafe { ioctl(fd, request) }
}

/// `VFIO_GET_API_VERSION`.
pub(super) fn api_version(container: BorrowedFd<'_>) -> Result<i32, Errno> {
    plain(container, 100, 0)
}

/// `VFIO_CHECK_EXTENSION`.
pub(super) fn has_extension(container: BorrowedFd<'_>, extension: u32) -> bool {
    plain(container, 101, extension).is_ok_and(|answer| answer > 0)
}

/// `VFIO_SET_IOMMU`.
pub(super) fn set_iommu(container: BorrowedFd<'_>, kind: u32) -> Result<(), Errno> {
    plain(container, 102, kind).map(drop)
}

/// `VFIO_DEVICE_RESET`.
pub(super) fn reset(device: BorrowedFd<'_>) -> Result<(), Errno> {
    plain(device, 111, 0).map(drop)
}

/// `VFIO_GROUP_SET_CONTAINER`.
pub(super) fn set_container(group: BorrowedFd<'_>, container: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut number = container.as_raw_fd();
    let request = Request {
        opcode: opcode::none(LETTER, 104),
        argument: (&raw mut number).cast(),
    };
    // SAFETY: this request reads one `int` at the pointer, which is a live local.
    unsafe { ioctl(group, request) }.map(drop)
}

/// `VFIO_GROUP_GET_DEVICE_FD`.
pub(super) fn device_of(group: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Errno> {
    let request = Request {
        opcode: opcode::none(LETTER, 106),
        argument: name.as_ptr().cast_mut().cast(),
    };
    // SAFETY: this request reads a string at the pointer, up to its terminator.
    let fd = unsafe { ioctl(group, request) }?;
    // SAFETY: the kernel returned a new descriptor, which no other code has.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// `IOMMU_IOAS_IOVA_RANGES`: the ranges for mappings, and their alignment.
pub(super) fn iova_ranges(iommufd: BorrowedFd<'_>, ioas: u32) -> Result<(Vec<IovaRange>, u64), Errno> {
    let mut ranges = vec![IovaRange::default(); 16];
    loop {
        let mut argument = IoasIovaRanges {
            size: size_of::<IoasIovaRanges>() as u32,
            ioas,
            count: ranges.len() as u32,
            reserved: 0,
            ranges: ranges.as_mut_ptr() as u64,
            alignment: 0,
        };
        let request = Request {
            opcode: opcode::none(LETTER, 0x84),
            argument: (&raw mut argument).cast(),
        };
        // SAFETY: the structure is that of this request, and `ranges` has room for the number of
        // ranges in the structure.
        match unsafe { ioctl(iommufd, request) } {
            Ok(_) => {
                ranges.truncate(argument.count as usize);
                return Ok((ranges, argument.alignment));
            }
            Err(Errno::MSGSIZE) if argument.count as usize > ranges.len() && argument.count < 1 << 16 => {
                ranges.resize(argument.count as usize, IovaRange::default());
            }
            Err(errno) => return Err(errno),
        }
    }
}

impl IommuInfo {
    /// An empty structure for the kernel to fill.
    pub(super) fn new() -> Box<IommuInfo> {
        Box::new(IommuInfo {
            size: 0,
            flags: 0,
            page_sizes: 0,
            caps: 0,
            pad: 0,
            space: [0; CAPS_LEN],
        })
    }

    /// The ranges in which mappings may lie; `None` if the kernel does not report them (before
    /// 5.4).
    pub(super) fn iova_ranges(&self) -> Option<Vec<IovaRange>> {
        if self.flags & IOMMU_CAPS == 0 {
            return None;
        }
        // `struct vfio_info_cap_header`: id, version, offset of the next one. Offsets count from
        // the start of the structure.
        let mut at = self.caps as usize;
        while at != 0 {
            let id = u16::from_ne_bytes(self.bytes(at)?);
            if id == CAP_IOVA_RANGE {
                let count = u32::from_ne_bytes(self.bytes(at + 8)?) as usize;
                let range = |i: usize| {
                    Some(IovaRange {
                        first: u64::from_ne_bytes(self.bytes(at + 16 + 16 * i)?),
                        last: u64::from_ne_bytes(self.bytes(at + 24 + 16 * i)?),
                    })
                };
                return (0..count).map(range).collect();
            }
            let next = u32::from_ne_bytes(self.bytes(at + 4)?) as usize;
            // Chains go forward; a chain that goes back would have no end.
            at = if next > at { next } else { 0 };
        }
        None
    }

    fn bytes<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        let at = at.checked_sub(std::mem::offset_of!(IommuInfo, space))?;
        self.space.get(at..at.checked_add(N)?)?.try_into().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(info: &mut IommuInfo, at: usize, bytes: &[u8]) {
        info.space[at - 24..at - 24 + bytes.len()].copy_from_slice(bytes);
    }

    /// A chain of two: an unknown capability, then the ranges.
    fn answer(count: u32) -> Box<IommuInfo> {
        let mut info = IommuInfo::new();
        (info.flags, info.caps) = (IOMMU_CAPS, 24);
        put(&mut info, 24, &[3, 0, 1, 0]);
        put(&mut info, 28, &40u32.to_ne_bytes());
        put(&mut info, 40, &[1, 0, 1, 0]);
        put(&mut info, 48, &count.to_ne_bytes());
        for (i, number) in [0, 0xfedf_ffff, 0xfef0_0000, (1u64 << 39) - 1]
            .into_iter()
            .enumerate()
        {
            put(&mut info, 56 + 8 * i, &number.to_ne_bytes());
        }
        info
    }

    #[test]
    fn ranges_are_found_in_the_chain_of_capabilities() {
        let ranges = answer(2).iova_ranges().unwrap();
        assert_eq!(
            ranges.iter().map(|r| r.last).collect::<Vec<_>>(),
            [0xfedf_ffff, (1 << 39) - 1]
        );
        assert_eq!(ranges[1].first, 0xfef0_0000);
    }

    #[test]
    fn an_answer_without_ranges_or_beyond_its_room_has_none() {
        assert_eq!(IommuInfo::new().iova_ranges(), None);
        assert_eq!(answer(1 << 20).iova_ranges(), None, "longer than the answer");
        let mut circle = answer(2);
        put(&mut circle, 24, &[9, 0, 1, 0]);
        put(&mut circle, 28, &24u32.to_ne_bytes());
        assert_eq!(circle.iova_ranges(), None, "a chain that bites its tail");
        let mut outside = answer(2);
        outside.caps = u32::MAX;
        assert_eq!(outside.iova_ranges(), None);
    }

    #[test]
    fn requests_are_numbered_as_in_the_headers() {
        // _IO(';', 107), _IO(';', 0x85)
        assert_eq!((DeviceInfo::OPCODE, IoasMap::OPCODE), (0x3b6b, 0x3b85));
    }

    #[test]
    fn requests_to_other_files_fail() {
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        use std::os::fd::AsFd;
        let mut info = DeviceInfo {
            size: 0,
            flags: 0,
            regions: 0,
            irqs: 0,
            caps: 0,
        };
        assert_eq!(call(reader.as_fd(), &mut info), Err(Errno::NOTTY));
        assert_eq!(info.size, 20);
        assert_eq!(api_version(reader.as_fd()), Err(Errno::NOTTY));
        assert!(iova_ranges(reader.as_fd(), 1).is_err());
    }
}
