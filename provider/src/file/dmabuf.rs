//! Memory of a dma-buf, or of another file that can be mapped, for a region
//! (`ibv_reg_dmabuf_mr(3)`).

use std::ffi::c_void;

use rustix::fd::{AsFd, BorrowedFd};
use rustix::fs::{SeekFrom, fstat, seek};
use rustix::io::Errno;
use rustix::mm::ProtFlags;
use rustix::param::page_size;

use crate::mapping::Mapping;

/// Maps `length` bytes of a file from `offset` on, as long as the region exists: the program may
/// close its descriptor. Returns the address of the first byte, too.
///
/// # Errors
/// EINVAL for a range outside of the file, EBADF, EOPNOTSUPP for a file that cannot be mapped, EACCES
/// for a file that may not be written, and the other errors of mmap(2).
pub(crate) fn map(
    fd: BorrowedFd<'_>,
    offset: u64,
    length: usize,
    writable: bool,
) -> Result<(Mapping, *mut c_void), Errno> {
    let end = offset.checked_add(length as u64).ok_or(Errno::INVAL)?;
    if length == 0 || end > size(fd)? {
        return Err(Errno::INVAL);
    }
    let within = (offset % page_size() as u64) as usize;
    let len = within.checked_add(length).ok_or(Errno::INVAL)?;
    let write = if writable {
        ProtFlags::WRITE
    } else {
        ProtFlags::empty()
    };
    let mapping = Mapping::of_file(fd, offset - within as u64, len, ProtFlags::READ | write);
    let mapping = mapping.map_err(|errno| {
        if errno == Errno::NODEV {
            Errno::OPNOTSUPP
        } else {
            errno
        }
    })?;
    let start = mapping.start().wrapping_byte_add(within);
    Ok((mapping, start))
}

/// The size of a file in bytes. The size of a dma-buf is available by lseek(2) only.
fn size(fd: impl AsFd) -> Result<u64, Errno> {
    let status = fstat(&fd)?;
    match u64::try_from(status.st_size) {
        Ok(size @ 1..) => Ok(size),
        _ => seek(&fd, SeekFrom::End(0)).map_err(|errno| match errno {
            Errno::SPIPE => Errno::OPNOTSUPP,
            errno => errno,
        }),
    }
}
