//! The memory that holds a side's regions. Only this file and `verbs` use raw pointers.

use std::ptr;

/// Zeroed memory, page aligned, that the device and the program both use.
pub(crate) struct Arena {
    pub(crate) base: *mut u8,
    pub(crate) len: usize,
}

// SAFETY: `Arena` only holds the address and length of a mapping; neither depends on a thread.
unsafe impl Send for Arena {}

impl Arena {
    pub(crate) fn new(len: usize) -> Arena {
        let (access, kind) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        // SAFETY: new memory.
        let base = unsafe { libc::mmap(ptr::null_mut(), len, access, kind, -1, 0) };
        assert!(base != libc::MAP_FAILED, "no memory");
        Arena {
            base: base.cast(),
            len,
        }
    }

    pub(crate) fn address(&self, at: usize) -> u64 {
        self.base.addr() as u64 + at as u64
    }

    pub(crate) fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len);
        // SAFETY: within the memory; the bytes are elsewhere.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.base.add(at), bytes.len()) };
    }

    pub(crate) fn read(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at + len <= self.len);
        let mut bytes = vec![0; len];
        // SAFETY: within the memory; the bytes are elsewhere.
        unsafe { ptr::copy_nonoverlapping(self.base.add(at), bytes.as_mut_ptr(), len) };
        bytes
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: this arena owns the mapping of `len` bytes at `base`; all its users have ended.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}
