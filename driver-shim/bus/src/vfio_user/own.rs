//! Reads and writes memory of this process that may be unmapped: a program may unmap memory that it
//! has registered.
//!
//! The kernel copies, and reports an error where a plain access would end the program. These calls
//! are neither interposed nor cancellation points.

use rustix::io::Errno;

/// Copies from `address` into a slice.
///
/// # Errors
/// `EFAULT` if a part of the range is not readable.
pub(super) fn read(address: u64, into: &mut [u8]) -> Result<(), Errno> {
    let (local, remote) = (
        piece(into.as_mut_ptr().cast(), into.len()),
        remote(address, into.len())?,
    );
    // SAFETY: the call writes `into` only; the kernel checks the other range.
    let copied = unsafe { libc::process_vm_readv(own_pid(), &local, 1, &remote, 1, 0) };
    whole(copied, into.len())
}

/// Copies a slice to `address`.
///
/// # Errors
/// `EFAULT` if a part of the range is not writable.
pub(super) fn write(address: u64, from: &[u8]) -> Result<(), Errno> {
    let (local, remote) = (
        piece(from.as_ptr().cast_mut().cast(), from.len()),
        remote(address, from.len())?,
    );
    // SAFETY: the call reads `from` only. The other range is memory that the program registered for
    // the device to write, and the kernel checks it.
    let copied = unsafe { libc::process_vm_writev(own_pid(), &local, 1, &remote, 1, 0) };
    whole(copied, from.len())
}

fn own_pid() -> i32 {
    rustix::process::getpid().as_raw_pid()
}

fn piece(base: *mut libc::c_void, len: usize) -> libc::iovec {
    libc::iovec {
        iov_base: base,
        iov_len: len,
    }
}

fn remote(address: u64, len: usize) -> Result<libc::iovec, Errno> {
    let address = usize::try_from(address).map_err(|_| Errno::FAULT)?;
    Ok(piece(std::ptr::with_exposed_provenance_mut(address), len))
}

fn whole(copied: isize, len: usize) -> Result<(), Errno> {
    if usize::try_from(copied) == Ok(len) {
        Ok(())
    } else {
        Err(Errno::FAULT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_to_unmapped_memory_returns_efault() {
        let mut memory = [7u8; 64];
        let address = memory.as_mut_ptr().expose_provenance() as u64;
        let mut seen = [0; 64];
        read(address, &mut seen).unwrap();
        assert_eq!(seen, [7; 64]);
        write(address, &[9; 64]).unwrap();
        assert_eq!(memory, [9; 64]);
        assert_eq!(read(8, &mut seen), Err(Errno::FAULT));
        assert_eq!(write(8, &seen), Err(Errno::FAULT));
        assert_eq!(read(u64::MAX - 8, &mut seen), Err(Errno::FAULT));
    }
}
