//! Reads and writes memory of this process that may be unmapped: a program may unmap memory that it
//! has registered.
//!
//! The kernel copies, and reports an error where a plain access would end the program. These calls
//! are neither interposed nor cancellation points.

use rustix::io::Errno;
use rustix::process::getpid;
use urnic_model::host::process_memory;

/// Copies from `address` into a slice.
///
/// # Errors
/// `EFAULT` if a part of the range is not readable.
pub(super) fn read(address: u64, into: &mut [u8]) -> Result<(), Errno> {
    whole(process_memory::read(getpid(), address, into), into.len())
}

/// Copies a slice to `address`.
///
/// # Errors
/// `EFAULT` if a part of the range is not writable.
pub(super) fn write(address: u64, from: &[u8]) -> Result<(), Errno> {
    whole(process_memory::write(getpid(), address, from), from.len())
}

fn whole(copied: Result<usize, Errno>, len: usize) -> Result<(), Errno> {
    if copied == Ok(len) {
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
