//! Memory of the program that a command names by address.

use rustix::io::Errno;
use urnic_cm::rdma_cm::command::Destination;
use zerocopy::{Immutable, IntoBytes};

/// Longest value of an option.
const MAX_OPTION: usize = 4096;

/// Writes an answer to the program's memory, truncated to the room for it.
///
/// # Safety
/// The `room` bytes at the address of `answer` are writable memory of the program, and no other
/// code accesses them during the call.
pub(super) unsafe fn write_answer<T: IntoBytes + Immutable>(answer: Destination, value: &T) {
    let bytes = value.as_bytes();
    let len = bytes.len().min(answer.room);
    // SAFETY: the caller promises `room` writable bytes at this address, and `len` is not more;
    // `value` is memory of the driver and does not overlap them.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), answer.address as *mut u8, len) };
}

/// Reads the value of an option from the program's memory.
///
/// # Errors
/// `EFAULT` for a null address, `EINVAL` for a value that is too long.
///
/// # Safety
/// The `len` bytes at `address` are readable memory of the program, unless `address` is 0, and no
/// other code writes them during the call.
pub(super) unsafe fn read_option(address: u64, len: u32) -> Result<Vec<u8>, Errno> {
    let len = len as usize;
    match (address, len) {
        (_, 0) => Ok(Vec::new()),
        (0, _) => Err(Errno::FAULT),
        (_, len) if len > MAX_OPTION => Err(Errno::INVAL),
        // SAFETY: the caller promises `len` readable bytes at this address, which is not null, and
        // that no other code writes them.
        (address, len) => Ok(unsafe { std::slice::from_raw_parts(address as *const u8, len) }.to_vec()),
    }
}
