//! A ring that a queue shares with the device, and its record of indices
//! ([`record`](urnic_device::record)), from the driver's side.
//!
//! A position in a ring is in bytes, and continues at the start after the end.

use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU32;

use urnic_device::wqe::BLOCK_LEN;
use zerocopy::{FromBytes, IntoBytes};

/// A ring and its record. The value is the ring's only writer on this side.
#[derive(Debug)]
pub struct Ring<R> {
    start: NonNull<u8>,
    /// Bytes: a power of two, and not less than [`BLOCK_LEN`].
    len: usize,
    record: NonNull<R>,
}

// SAFETY: the value owns its side of the ring, and the record is shared by reference only.
unsafe impl<R: Sync> Send for Ring<R> {}

impl<R> Ring<R> {
    /// The ring of `len` bytes at `start`.
    ///
    /// # Safety
    /// There are that many bytes, aligned to [`BLOCK_LEN`], which are read and written here and by
    /// the device alone; they and the record outlive the value.
    pub unsafe fn new(start: NonNull<u8>, len: usize, record: &R) -> Ring<R> {
        assert!(len.is_power_of_two() && len >= BLOCK_LEN && start.addr().get().is_multiple_of(BLOCK_LEN));
        Ring {
            start,
            len,
            record: record.into(),
        }
    }

    /// Continues with another ring, with the same record.
    ///
    /// # Safety
    /// As for [`new`](Self::new).
    pub unsafe fn move_to(&mut self, start: NonNull<u8>, len: usize) {
        // SAFETY: the caller promises this of the ring, and the record stays.
        *self = unsafe { Ring::new(start, len, self.record.as_ref()) };
    }

    /// The indices that both sides access atomically.
    #[inline]
    pub fn record(&self) -> &R {
        // SAFETY: the promise of `new`: the record outlives this value.
        unsafe { self.record.as_ref() }
    }

    /// The address of a `T` at this position; for positions at multiples of its length, which
    /// divides that of a block.
    #[inline(always)]
    fn place<T>(&self, at: usize) -> *mut T {
        const { assert!(BLOCK_LEN.is_multiple_of(size_of::<T>())) };
        // SAFETY: both lengths are powers of two, so the offset is at most `len - size_of::<T>()`.
        unsafe { self.start.as_ptr().add(at & (self.len - size_of::<T>())).cast() }
    }

    /// Writes a value.
    #[inline(always)]
    pub fn put<T: IntoBytes>(&mut self, at: usize, value: T) {
        // SAFETY: `place` is within the ring. The device does not read it before the entry is
        // published.
        unsafe { self.place::<T>(at).write_unaligned(value) };
    }

    /// Reads a value.
    #[inline(always)]
    pub fn read<T: FromBytes>(&self, at: usize) -> T {
        // SAFETY: `place` is within the ring, and any bytes are a `T`.
        unsafe { self.place::<T>(at).read_unaligned() }
    }

    /// Reads the first `len` bytes of a value; the rest is zero.
    #[inline(always)]
    pub fn read_part<T: FromBytes + IntoBytes>(&self, at: usize, len: usize) -> T {
        let mut value = T::new_zeroed();
        let bytes = value.as_mut_bytes();
        // SAFETY: `place` is within the ring, and the value is a local of at least this length.
        unsafe {
            ptr::copy_nonoverlapping(
                self.place::<T>(at).cast(),
                bytes.as_mut_ptr(),
                len.min(bytes.len()),
            )
        };
        value
    }

    /// A word that both sides access atomically.
    #[inline(always)]
    pub fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: `place` is within the ring, and at a multiple of 4, as the ring itself.
        unsafe { AtomicU32::from_ptr(self.place(at)) }
    }

    /// Writes bytes from this position on; those for which the ring has no room are left out.
    #[inline(always)]
    pub fn copy_in(&mut self, at: usize, data: &[u8]) {
        let at = at & (self.len - 1);
        let first = data.len().min(self.len - at);
        let rest = (data.len() - first).min(at);
        // SAFETY: the bytes from `at` to the end, and those before `at`, are within the ring. The
        // device does not read them before the entry is published.
        unsafe {
            ptr::copy_nonoverlapping(data.as_ptr(), self.start.as_ptr().add(at), first);
            if rest > 0 {
                ptr::copy_nonoverlapping(data.as_ptr().add(first), self.start.as_ptr(), rest);
            }
        }
    }
}
