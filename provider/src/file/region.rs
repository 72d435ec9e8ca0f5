//! Memory regions, shared by all contexts that import them, and the memory of a dma-buf, or of
//! another file that can be mapped, for a region (`ibv_reg_dmabuf_mr(3)`).

use std::ffi::c_void;
use std::sync::Arc;
use urnic_sync::{Mutex, MutexGuard};

use rustix::fd::{AsFd, BorrowedFd};
use rustix::fs::{SeekFrom, fstat, seek};
use rustix::io::Errno;
use rustix::mm::ProtFlags;
use rustix::param::page_size;
use urnic_driver::Driver;

use super::device_memory::Memory;
use super::domain::{Domain, DomainMembership};
use urnic_sys::Pages;

/// A memory region.
pub(crate) struct Region {
    pub(crate) driver: Arc<Driver>,
    /// None after deregistration.
    state: Mutex<Option<State>>,
}

/// The state that a reregistration changes.
pub(crate) struct State {
    pub(crate) device: urnic_driver::Mr,
    pub(crate) domain: DomainMembership,
    /// The keys, and the length in bytes, that the program gets.
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
    pub(crate) length: usize,
    /// The region's access rights, as the program gave them.
    pub(crate) flags: u32,
    /// The device memory that contains the region, if any; the reference keeps it in use.
    _device_memory: Option<Arc<Memory>>,
    /// The file's pages that the region is, if it is a file's.
    mapped: Option<Pages>,
}

impl Region {
    /// A region that the device has registered.
    pub(crate) fn new(state: State) -> Region {
        Region {
            driver: state.domain.driver.clone(),
            state: Mutex::new(Some(state)),
        }
    }

    /// Whether it is in the domain; `false` for a region that a call is changing or ending.
    pub(crate) fn is_in(&self, domain: &Arc<Domain>) -> bool {
        let state = self.state.try_lock();
        state.is_some_and(|state| {
            let state = state.as_ref();
            state.is_some_and(|state| Arc::ptr_eq(state.domain.domain(), domain))
        })
    }

    /// Errors: IO in a forked child, where a thread of the parent may hold the lock.
    pub(crate) fn lock(&self) -> Result<MutexGuard<'_, Option<State>>, Errno> {
        self.driver.check_process()?;
        Ok(self.state.lock())
    }
}

impl Drop for Region {
    /// All handles and the file are gone: the region ends, as in a kernel.
    fn drop(&mut self) {
        if self.driver.check_process().is_err() {
            return;
        }
        let state = self.state.get_mut();
        let Some(state) = state.take() else { return };
        match self.driver.deregister(&state.device) {
            Ok(()) => drop(state.domain.on_demand.take(state.device.stag)),
            Err(errno) => {
                tracing::debug!("region {:#x}: {errno}", state.device.stag);
                // A window keeps the region: memory that the region leads to must not be freed.
                std::mem::forget(state);
            }
        }
    }
}

impl State {
    /// The state of a region whose local and remote key are the same.
    pub(crate) fn new(
        device: urnic_driver::Mr,
        domain: DomainMembership,
        length: usize,
        flags: u32,
    ) -> State {
        State {
            lkey: device.stag,
            rkey: device.stag,
            device,
            domain,
            length,
            flags,
            _device_memory: None,
            mapped: None,
        }
    }

    /// The state of a region in device memory.
    pub(crate) fn within(self, memory: Arc<Memory>) -> State {
        State {
            _device_memory: Some(memory),
            ..self
        }
    }

    /// The state of a region of a file's pages.
    pub(crate) fn of_file(self, mapped: Pages) -> State {
        State {
            mapped: Some(mapped),
            ..self
        }
    }

    /// The region has other memory now.
    pub(crate) fn unmap(&mut self) {
        self.mapped = None;
    }
}

/// Maps `length` bytes of a file from `offset` on, as long as the region exists: the program may
/// close its descriptor. Returns the address of the first byte, too.
///
/// # Errors
/// EINVAL for a range outside of the file, EBADF, EOPNOTSUPP for a file that cannot be mapped,
/// EACCES for a file that may not be written, and the other errors of mmap(2).
pub(crate) fn map_file(
    fd: BorrowedFd<'_>,
    offset: u64,
    length: usize,
    writable: bool,
) -> Result<(Pages, *mut c_void), Errno> {
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
    let mapping = Pages::of_file(fd, offset - within as u64, len, ProtFlags::READ | write);
    let mapping = mapping.map_err(|errno| match cannot_be_mapped(errno) {
        true => Errno::OPNOTSUPP,
        false => errno,
    })?;
    let start = mapping.start().as_ptr().wrapping_byte_add(within);
    Ok((mapping, start.cast()))
}

/// Whether an error of mmap(2) for a range within a file means that such files cannot be mapped.
fn cannot_be_mapped(errno: Errno) -> bool {
    /// `ENOTSUPP` of the kernel, which some of its drivers return to programs.
    const NOTSUPP: i32 = 524;
    // `EINVAL` is the kernel's error for a dma-buf whose exporter has no mmap.
    matches!(
        errno,
        Errno::NODEV | Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS | Errno::NXIO | Errno::NOTTY
    ) || errno.raw_os_error() == NOTSUPP
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_files_that_cannot_be_mapped_are_known() {
        for errno in [19, 22, 25, 38, 6, 95, 524] {
            assert!(cannot_be_mapped(Errno::from_raw_os_error(errno)), "{errno}");
        }
        for errno in [
            Errno::ACCESS,
            Errno::PERM,
            Errno::NOMEM,
            Errno::AGAIN,
            Errno::BADF,
        ] {
            assert!(!cannot_be_mapped(errno), "{errno}");
        }
    }
}
