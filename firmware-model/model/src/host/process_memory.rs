//! Copies of memory that another process has mapped, or that this one may have unmapped:
//! process_vm_readv(2) and process_vm_writev(2).

use crate::sys::last_errno;
use rustix::io::Errno;
use rustix::process::Pid;

/// Copies bytes out of a process, up to the first inaccessible one from `address` on.
///
/// # Errors
/// Those of process_vm_readv(2).
pub fn read(process: Pid, address: u64, into: &mut [u8]) -> Result<usize, Errno> {
    let [local, remote] = extents(address, into.as_mut_ptr(), into.len());
    process_vm(libc::SYS_process_vm_readv, process, [&[local], &[remote]])
}

/// Copies parts out of a process, one after the other, up to the first inaccessible byte.
///
/// # Errors
/// Those of process_vm_readv(2).
pub(crate) fn read_parts<const N: usize>(process: Pid, parts: [(u64, &mut [u8]); N]) -> Result<usize, Errno> {
    let lists = parts.map(|(there, here)| extents(there, here.as_mut_ptr(), here.len()));
    let (local, remote) = (lists.map(|[local, _]| local), lists.map(|[_, remote]| remote));
    process_vm(libc::SYS_process_vm_readv, process, [&local, &remote])
}

/// Copies bytes into a process, as many as have room from `address` on.
///
/// # Errors
/// Those of process_vm_writev(2).
pub fn write(process: Pid, address: u64, from: &[u8]) -> Result<usize, Errno> {
    // The kernel only reads here.
    let [local, remote] = extents(address, from.as_ptr().cast_mut(), from.len());
    process_vm(libc::SYS_process_vm_writev, process, [&[local], &[remote]])
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

/// Copies between extents of two lists of one length: here, and there.
fn process_vm(
    call: libc::c_long,
    process: Pid,
    [local, remote]: [&[libc::iovec]; 2],
) -> Result<usize, Errno> {
    // SAFETY: the callers made the extents here of live slices, which are writable if this call
    // writes to them; what is there is checked by the kernel.
    let done = unsafe {
        libc::syscall(
            call,
            process.as_raw_nonzero().get(),
            local.as_ptr(),
            local.len(),
            remote.as_ptr(),
            remote.len(),
            0usize,
        )
    };
    usize::try_from(done).map_err(|_| last_errno())
}
