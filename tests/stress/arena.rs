//! The memory that holds a side's regions. Only this file and `verbs` use raw pointers.

use std::ptr;

use urnic_sys::Pages;

/// Zeroed memory, page aligned, that the device and the program both use.
pub(crate) struct Arena(Pages);

impl Arena {
    pub(crate) fn new(len: usize) -> Arena {
        Arena(Pages::zeroed(len).expect("memory"))
    }

    pub(crate) fn base(&self) -> *mut u8 {
        self.0.start().as_ptr()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn address(&self, at: usize) -> u64 {
        self.base().addr() as u64 + at as u64
    }

    pub(crate) fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len());
        // SAFETY: within the memory; the bytes are elsewhere.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.base().add(at), bytes.len()) };
    }

    pub(crate) fn read(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at + len <= self.len());
        let mut bytes = vec![0; len];
        // SAFETY: within the memory; the bytes are elsewhere.
        unsafe { ptr::copy_nonoverlapping(self.base().add(at), bytes.as_mut_ptr(), len) };
        bytes
    }
}
