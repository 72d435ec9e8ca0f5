//! Work requests and lists in a program's memory, which may lie in packed structs: C compilers on
//! x86-64 and arm64 read such ones, and so do other providers; a Rust reference to them would be
//! undefined behaviour.

use std::mem::MaybeUninit;
use std::slice;

use zerocopy::Unalign;

/// The structure at `pointer`, or the copy that `place` then has of one that is not aligned; `None`
/// at null.
///
/// # Safety
/// `pointer` is null or has a `T`, which nobody changes meanwhile.
#[inline]
pub(super) unsafe fn structure<T: Copy>(pointer: *const T, place: &mut MaybeUninit<T>) -> Option<&T> {
    if pointer.is_aligned() {
        // SAFETY: aligned, and as the caller promises.
        unsafe { pointer.as_ref() }
    } else {
        // SAFETY: null is aligned, so the caller promises a `T`.
        Some(place.write(unsafe { pointer.read_unaligned() }))
    }
}

/// The list at `list` as a slice.
///
/// # Safety
/// `list` has `count` elements, which nobody changes meanwhile; it may be anything if there are
/// none.
#[inline]
pub(super) unsafe fn elements<'a, T>(list: *const T, count: usize) -> &'a [Unalign<T>] {
    if count == 0 {
        return &[];
    }
    // SAFETY: as the caller promises; an `Unalign` has the layout of what it holds, at any address.
    unsafe { slice::from_raw_parts(list.cast(), count) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_and_lists_are_read_at_any_address() {
        let mut memory = [0u64; 4];
        let start = memory.as_mut_ptr().cast::<u8>();
        for offset in 0..8 {
            // SAFETY: the memory has room for two numbers behind any of these offsets.
            let (first, both) = unsafe {
                let at = start.add(offset).cast::<u64>();
                at.write_unaligned(7);
                at.add(1).write_unaligned(9);
                (
                    structure(at, &mut MaybeUninit::uninit()).copied(),
                    elements(at, 2),
                )
            };
            assert_eq!(first, Some(7));
            assert_eq!(both.iter().map(Unalign::get).collect::<Vec<_>>(), [7, 9]);
        }
        // SAFETY: null, and no elements.
        unsafe {
            assert_eq!(
                structure::<u64>(std::ptr::null(), &mut MaybeUninit::uninit()),
                None
            );
            assert!(elements::<u64>(std::ptr::dangling(), 0).is_empty());
        }
    }
}
