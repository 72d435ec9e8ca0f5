//! Looks at memory of the program that may not be mapped.

use std::hash::Hasher;

use rustix::mm::{Advice, madvise};

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
        let local = libc::iovec {
            iov_base: piece.as_mut_ptr().cast(),
            iov_len: part,
        };
        let remote = libc::iovec {
            iov_base: std::ptr::without_provenance_mut(addr.checked_add(done)?),
            iov_len: part,
        };
        let me = rustix::process::getpid().as_raw_nonzero().get();
        // SAFETY: `local` is a buffer of ours of this length. The kernel reads the other memory,
        // and returns an error if it is not mapped.
        let got = unsafe { libc::process_vm_readv(me, &local, 1, &remote, 1, 0) };
        if usize::try_from(got) != Ok(part) {
            return None;
        }
        hasher.write(piece.get(..part)?);
        done += part;
    }
    Some(hasher.finish())
}

/// Whether the page with the byte at `addr` can be written at present.
pub(super) fn is_writable(addr: usize) -> bool {
    let page = std::ptr::without_provenance_mut(addr & !(PAGE - 1));
    // SAFETY: populating changes no byte: it does early what a write would do later.
    unsafe { madvise(page, PAGE, Advice::LinuxPopulateWrite) }.is_ok()
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
        let part = (end - at).min(states.len() * PAGE);
        // SAFETY: `states` has a byte for each page; the other memory is not accessed.
        let status =
            unsafe { libc::mincore(std::ptr::without_provenance_mut(at), part, states.as_mut_ptr()) };
        if status != 0 {
            return std::io::Error::last_os_error().raw_os_error() == Some(libc::ENOMEM);
        }
        at += part;
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
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
        let len = 3 * 4096;
        // SAFETY: a new mapping, of which the middle page is unmapped and not used.
        let addr = unsafe {
            let at = mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::PRIVATE).unwrap();
            assert!(!has_hole(at.addr(), len));
            munmap(at.byte_add(4096), 4096).unwrap();
            at.addr()
        };
        assert!(has_hole(addr + 1, len - 2));
        assert!(!has_hole(addr, 4096));
        assert_eq!(hash(addr, len), None);
    }
}
