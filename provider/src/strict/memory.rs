//! Looks at memory of the program that may not be mapped.

use std::hash::Hasher;

use rustix::io::Errno;
use rustix::process::getpid;
use urnic_model::host::process_memory;
use urnic_sys::resident;

const PAGE: usize = 4096;
/// Memory is read in pieces of this length.
const PIECE: usize = 64 << 10;

/// A hash of `len` bytes at `addr`; `None` if they cannot be read.
pub(super) fn hash(addr: usize, len: usize) -> Option<u64> {
    let mut hasher = std::hash::DefaultHasher::new();
    let mut piece = vec![0u8; len.min(PIECE)];
    let mut done = 0;
    while done < len {
        let part = (len - done).min(PIECE);
        let piece = piece.get_mut(..part)?;
        let got = process_memory::read(getpid(), addr.checked_add(done)? as u64, piece);
        if got != Ok(part) {
            return None;
        }
        hasher.write(piece);
        done += part;
    }
    Some(hasher.finish())
}

/// Whether the page with the byte at `addr` can be written at present.
pub(super) fn is_writable(addr: usize) -> bool {
    resident::populate(addr & !(PAGE - 1), PAGE, true).is_ok()
}

/// Copies `len` bytes of this process; those that cannot be read or written are left out.
pub(super) fn copy(from: usize, to: usize, len: usize) {
    let local = libc::iovec {
        iov_base: std::ptr::without_provenance_mut(from),
        iov_len: len,
    };
    let remote = libc::iovec {
        iov_base: std::ptr::without_provenance_mut(to),
        iov_len: len,
    };
    let me = rustix::process::getpid().as_raw_nonzero().get();
    // SAFETY: the kernel copies, and stops at memory that is not mapped; the program has given its
    // memory for this.
    unsafe { libc::process_vm_writev(me, &local, 1, &remote, 1, 0) };
}

/// Whether a page between `addr` and `addr + len` is not mapped.
pub(super) fn has_hole(addr: usize, len: usize) -> bool {
    /// Pages that one call looks at.
    const PAGES: usize = 1 << 16;
    let Some(end) = addr.checked_add(len) else {
        return false;
    };
    let mut states = vec![0u8; PAGES.min(len / PAGE + 2)];
    let mut at = addr & !(PAGE - 1);
    while at < end {
        let pages = (end - at).div_ceil(PAGE).min(states.len());
        match resident::query(at, states.get_mut(..pages).unwrap_or_default()) {
            Ok(()) => at += pages * PAGE,
            Err(errno) => return errno == Errno::NOMEM,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_changes_with_any_byte() {
        let mut bytes = vec![7u8; 3 * PIECE + 5];
        let addr = bytes.as_ptr().addr();
        let before = hash(addr, bytes.len());
        assert!(before.is_some());
        assert_eq!(hash(addr, bytes.len()), before);
        bytes[3 * PIECE + 4] = 8;
        assert_ne!(hash(addr, bytes.len()), before);
    }

    #[test]
    fn unmapped_memory_has_no_hash_and_is_a_hole() {
        let len = 3 * 4096;
        let mut pages = urnic_sys::Pages::zeroed(len).unwrap();
        let addr = pages.start().addr().get();
        assert!(!has_hole(addr, len));
        let mut middle = pages.split_off(4096);
        let _last = middle.split_off(4096);
        drop(middle);
        assert!(has_hole(addr + 1, len - 2));
        assert!(!has_hole(addr, 4096));
        assert_eq!(hash(addr, len), None);
    }
}
