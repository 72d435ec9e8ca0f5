//! Work requests and lists in a program's memory, which may be in packed structs. C compilers on
//! x86-64 and arm64 read such structs, and so do other providers; a Rust reference to them would be
//! undefined behaviour.

use std::mem::MaybeUninit;
use std::slice;

use zerocopy::Unalign;

/// The structure at `pointer`, or its copy in `place` if the structure is not aligned; `None` for
/// null.
///
/// # Safety
/// `pointer` is null or leads to a `T`, which no thread changes during the use of the result.
#[inline]
pub(super) unsafe fn structure<T: Copy>(pointer: *const T, place: &mut MaybeUninit<T>) -> Option<&T> {
    if pointer.is_aligned() {
        // SAFETY: the pointer is aligned, and the caller promises null or a `T`.
        unsafe { pointer.as_ref() }
    } else {
        // SAFETY: null is aligned, so the caller promises a `T`.
        Some(place.write(unsafe { pointer.read_unaligned() }))
    }
}

/// The list at `list` as a slice.
///
/// # Safety
/// `list` has `count` elements, which no thread changes during the use of the result; with a
/// `count` of 0, any pointer is valid.
#[inline]
pub(super) unsafe fn elements<'a, T>(list: *const T, count: usize) -> &'a [Unalign<T>] {
    if count == 0 {
        return &[];
    }
    // SAFETY: the caller promises `count` elements; an `Unalign` has the layout of its value, at
    // any address.
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
            // SAFETY: the memory has space for two numbers behind any of these offsets.
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
        // SAFETY: null, and a list without elements.
        unsafe {
            assert_eq!(
                structure::<u64>(std::ptr::null(), &mut MaybeUninit::uninit()),
                None
            );
            assert!(elements::<u64>(std::ptr::dangling(), 0).is_empty());
        }
    }
}
