//! Memory that test and device share.

use std::rc::Rc;
use std::sync::atomic::AtomicU32;

use zerocopy::FromBytes;

/// A piece of memory that a device reaches.
pub trait Memory {
    /// The address of the first byte, as the device sees it.
    fn iova(&self) -> u64;

    /// The aligned 32-bit word at an offset.
    fn word(&self, at: usize) -> &AtomicU32;

    /// Copies bytes to an offset.
    fn write(&self, at: usize, bytes: &[u8]);

    /// Copies `len` bytes from an offset.
    fn read(&self, at: usize, len: usize) -> Vec<u8>;

    /// The structure at an offset.
    fn load<T: FromBytes>(&self, at: usize) -> T {
        T::read_from_bytes(&self.read(at, size_of::<T>())).expect("as many bytes as it has")
    }
}

impl<M: Memory> Memory for Rc<M> {
    fn iova(&self) -> u64 {
        (**self).iova()
    }

    fn word(&self, at: usize) -> &AtomicU32 {
        (**self).word(at)
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        (**self).write(at, bytes);
    }

    fn read(&self, at: usize, len: usize) -> Vec<u8> {
        (**self).read(at, len)
    }
}
