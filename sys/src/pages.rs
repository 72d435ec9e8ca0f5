//! Mapped memory.

use std::ffi::c_void;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};

use rustix::io::Errno;
use rustix::mm::{self, Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap, mmap_anonymous, mprotect};

/// Pages that were mapped for the value alone, and are unmapped with it.
///
/// The value gives a pointer and no references: another process may write shared pages at any time,
/// and pages may have no rights. Code that uses the pointer knows the rights, and orders its
/// accesses.
#[derive(Debug)]
pub struct Pages {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the value is an address and a length, and gives no access.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

const BOTH: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

impl Pages {
    /// Maps `len` zeroed bytes of private memory, which take memory when they are touched.
    ///
    /// # Errors
    /// Those of mmap(2).
    pub fn zeroed(len: usize) -> Result<Pages, Errno> {
        Pages::anonymous(len, BOTH, MapFlags::PRIVATE | MapFlags::NORESERVE)
    }

    /// Maps `len` bytes without rights, to reserve their addresses.
    ///
    /// # Errors
    /// Those of mmap(2).
    pub fn reserved(len: usize) -> Result<Pages, Errno> {
        Pages::reserved_near(0, len)
    }

    /// Maps `len` bytes without rights at `address`, or at another one if that is not free.
    ///
    /// # Errors
    /// Those of mmap(2).
    pub fn reserved_near(address: usize, len: usize) -> Result<Pages, Errno> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let address = ptr::without_provenance_mut(address);
        // SAFETY: the address is a hint: the new mapping replaces no other one.
        let start = unsafe { mmap_anonymous(address, len, ProtFlags::empty(), flags) }?;
        Pages::of(start, len)
    }

    /// Maps `len` bytes of memory in another way, at an address of the kernel's choice.
    ///
    /// # Errors
    /// Those of mmap(2).
    pub fn anonymous(len: usize, rights: ProtFlags, flags: MapFlags) -> Result<Pages, Errno> {
        // SAFETY: `replacing_none`: the new mapping replaces no other one.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), len, rights, replacing_none(flags)) }?;
        Pages::of(start, len)
    }

    /// Maps `len` bytes of a file, shared with all that map it, from `offset` on.
    ///
    /// # Errors
    /// Those of mmap(2).
    pub fn of_file(file: impl AsFd, offset: u64, len: usize, rights: ProtFlags) -> Result<Pages, Errno> {
        // SAFETY: the new mapping is at an address of the kernel's choice, and replaces no other.
        let start = unsafe { mmap(ptr::null_mut(), len, rights, MapFlags::SHARED, file, offset) }?;
        Pages::of(start, len)
    }

    fn of(start: *mut c_void, len: usize) -> Result<Pages, Errno> {
        let start = NonNull::new(start.cast()).ok_or(Errno::NOMEM)?;
        Ok(Pages { start, len })
    }

    /// The pages that [`leak`](Self::leak) returned.
    ///
    /// # Safety
    /// The caller has the only right to them, and no code uses them after the value is dropped.
    pub unsafe fn of_leaked(start: NonNull<u8>, len: usize) -> Pages {
        Pages { start, len }
    }

    /// Keeps the pages mapped; returns the address of the first byte.
    pub fn leak(self) -> NonNull<u8> {
        std::mem::ManuallyDrop::new(self).start
    }

    /// The address of the first byte.
    #[inline]
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Bytes from the first page to the end of the last one.
    #[inline]
    #[expect(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The address of the byte at `offset`; `None` beyond the end.
    #[inline]
    pub fn at(&self, offset: usize) -> Option<NonNull<u8>> {
        let at = NonNull::new(self.start.as_ptr().wrapping_add(offset));
        at.filter(|_| offset <= self.len)
    }

    /// Splits the pages from `offset` on, the offset of a page, off from those before.
    ///
    /// # Panics
    /// If `offset` is beyond the end, or not of a page.
    #[must_use]
    pub fn split_off(&mut self, offset: usize) -> Pages {
        assert!(offset <= self.len && offset.is_multiple_of(4096));
        let start = self.start.map_addr(|address| address.saturating_add(offset));
        let len = self.len - offset;
        self.len = offset;
        Pages { start, len }
    }

    /// The part of `len` bytes that begins at the first multiple of `align` in the pages; the rest
    /// is unmapped. All are multiples of a page.
    ///
    /// # Panics
    /// If there is no such part.
    #[must_use]
    pub fn aligned_part(mut self, align: usize, len: usize) -> Pages {
        let start = self.start.addr().get();
        let mut part = self.split_off(start.next_multiple_of(align) - start);
        drop(part.split_off(len));
        part
    }

    /// Changes the rights of a range that begins and ends at pages.
    ///
    /// # Errors
    /// `EINVAL` for a range beyond the end; those of mprotect(2).
    pub fn protect(&self, offset: usize, len: usize, rights: MprotectFlags) -> Result<(), Errno> {
        let start = self.range(offset, len)?;
        // SAFETY: the range is of this value, which has no references into it.
        unsafe { mprotect(start, len, rights) }
    }

    /// Gives the kernel advice about all pages. It may change what is in them.
    ///
    /// # Errors
    /// Those of madvise(2).
    pub fn advise(&self, advice: Advice) -> Result<(), Errno> {
        // SAFETY: the pages are of this value, which has no references into them.
        unsafe { madvise(self.start.as_ptr().cast(), self.len, advice) }
    }

    /// Locks all pages in memory.
    ///
    /// # Errors
    /// Those of mlock(2).
    pub fn lock(&self) -> Result<(), Errno> {
        // SAFETY: locking changes no byte.
        unsafe { mm::mlock(self.start.as_ptr().cast(), self.len) }
    }

    /// Replaces all pages by those of a file from its beginning on, shared with all that map it.
    ///
    /// # Errors
    /// Those of mmap(2).
    pub fn replace_by_file(&self, file: impl AsFd) -> Result<(), Errno> {
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: the new mapping replaces pages of this value alone, which has no references into
        // them.
        unsafe { mmap(self.start.as_ptr().cast(), self.len, BOTH, flags, file, 0) }.map(drop)
    }

    /// Replaces all pages by zeroed private memory. Async-signal-safe.
    ///
    /// # Errors
    /// Those of mmap(2).
    pub fn replace_by_zeroes(&self) -> Result<(), Errno> {
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: the new mapping replaces pages of this value alone, which has no references into
        // them.
        unsafe { mmap_anonymous(self.start.as_ptr().cast(), self.len, BOTH, flags) }.map(drop)
    }

    fn range(&self, offset: usize, len: usize) -> Result<*mut c_void, Errno> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        match self.at(offset) {
            Some(start) if inside => Ok(start.as_ptr().cast()),
            _ => Err(Errno::INVAL),
        }
    }
}

/// The flags without those that let a mapping replace another one.
fn replacing_none(flags: MapFlags) -> MapFlags {
    flags.difference(MapFlags::FIXED)
}

impl Drop for Pages {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: the pages were mapped for this value, and no code uses them any more.
            let _ = unsafe { mm::munmap(self.start.as_ptr().cast(), self.len) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 4096;

    fn is_mapped(address: usize) -> bool {
        crate::resident::query(address, &mut [0]).is_ok()
    }

    #[test]
    fn pages_are_unmapped_with_their_value_alone() {
        let mut first = Pages::reserved(3 * PAGE).expect("memory");
        let start = first.start().addr().get();
        let mut middle = first.split_off(PAGE);
        let last = middle.split_off(PAGE);
        drop(middle);
        assert!(is_mapped(start) && is_mapped(start + 2 * PAGE));
        assert_eq!((first.len(), last.start().addr().get()), (PAGE, start + 2 * PAGE));
    }

    #[test]
    fn a_part_is_aligned_and_can_be_replaced() {
        let align = 1 << 20;
        let part = Pages::reserved(2 * align)
            .expect("memory")
            .aligned_part(align, align);
        assert!(part.start().addr().get().is_multiple_of(align) && part.len() == align);
        part.replace_by_zeroes().expect("memory");
        assert_eq!(
            part.protect(align - PAGE, 2 * PAGE, MprotectFlags::READ),
            Err(Errno::INVAL)
        );
        part.protect(align - PAGE, PAGE, MprotectFlags::READ)
            .expect("a page of the part");
        assert!(part.at(align).is_some() && part.at(align + 1).is_none());
    }
}
