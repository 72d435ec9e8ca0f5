//! Copies of memory that another process has mapped, or that this one may have unmapped:
//! process_vm_readv(2) and process_vm_writev(2).

use crate::sys::last_errno;
use rustix::io::Errno;
use rustix::process::Pid;

/// Copies bytes out of a process, as many as are there from `address` on.
///
/// # Errors
/// Those of process_vm_readv(2).
pub fn read(process: Pid, address: u64, into: &mut [u8]) -> Result<usize, Errno> {
    process_vm(
        libc::SYS_process_vm_readv,
        process,
        address,
        into.as_mut_ptr(),
        into.len(),
    )
}

/// Copies bytes into a process, as many as have room from `address` on.
///
/// # Errors
/// Those of process_vm_writev(2).
pub fn write(process: Pid, address: u64, from: &[u8]) -> Result<usize, Errno> {
    process_vm(
        libc::SYS_process_vm_writev,
        process,
        address,
        from.as_ptr().cast_mut(),
        from.len(),
    )
}

/// Whether a system call is one of the two.
pub(crate) fn is_copy(number: libc::c_long) -> bool {
    matches!(number, libc::SYS_process_vm_readv | libc::SYS_process_vm_writev)
}

/// The extents of a copy, here and there.
pub(super) fn extents(there: u64, here: *mut u8, len: usize) -> [libc::iovec; 2] {
    let local = libc::iovec {
        iov_base: here.cast(),
        iov_len: len,
    };
    let remote = libc::iovec {
        iov_base: std::ptr::without_provenance_mut(there as usize),
        iov_len: len,
    };
    [local, remote]
}

/// `here` is only read by a call that writes there.
fn process_vm(
    call: libc::c_long,
    process: Pid,
    there: u64,
    here: *mut u8,
    len: usize,
) -> Result<usize, Errno> {
    let [local, remote] = extents(there, here, len);
    // SAFETY: `here` is a live slice of `len` bytes, writable if this call writes to it; what is
    // `there` is checked by the kernel.
    let done = unsafe {
        libc::syscall(
            call,
            process.as_raw_nonzero().get(),
            &raw const local,
            1usize,
            &raw const remote,
            1usize,
            0usize,
        )
    };
    usize::try_from(done).map_err(|_| last_errno())
}
