//! Whether pages of this process are mapped and present, and making them so.
//!
//! The functions take any address: they neither read nor change a byte there.

use std::ptr::without_provenance_mut;

use rustix::io::Errno;

use crate::errno;
use rustix::mm::{Advice, madvise};

const PAGE: usize = 4096;

/// Asks which of the pages from `start` on, the address of a page, are present (mincore(2)): the
/// lowest bit of their bytes in `states`.
///
/// # Errors
/// `ENOMEM`: one of the pages is not mapped.
pub fn query(start: usize, states: &mut [u8]) -> Result<(), Errno> {
    let len = states.len() * PAGE;
    // SAFETY: `states` has a byte for each page of the range, which the call does not touch.
    match unsafe { libc::mincore(without_provenance_mut(start), len, states.as_mut_ptr()) } {
        0 => Ok(()),
        _ => Err(errno::last()),
    }
}

/// Makes the pages of a range present, which begins and ends at pages; with `write`, writable. Its
/// effect is that of a read or write of each page, except that no byte changes.
///
/// # Errors
/// Those of madvise(2) with `MADV_POPULATE_READ` or `MADV_POPULATE_WRITE`.
pub fn populate(start: usize, len: usize, write: bool) -> Result<(), Errno> {
    let advice = if write {
        Advice::LinuxPopulateWrite
    } else {
        Advice::LinuxPopulateRead
    };
    loop {
        // SAFETY: populating changes no byte.
        match unsafe { madvise(without_provenance_mut(start), len, advice) } {
            // A signal interrupted the call; its handler runs before the next try.
            Err(Errno::INTR) => {}
            done => return done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pages;

    #[test]
    fn populated_pages_are_present_and_unmapped_ones_are_errors() {
        let mut pages = Pages::zeroed(2 * PAGE).expect("memory");
        let start = pages.start().addr().get();
        let mut states = [0; 2];
        assert_eq!(populate(start, PAGE, true), Ok(()));
        assert_eq!(query(start, &mut states), Ok(()));
        assert_eq!(states.map(|state| state & 1), [1, 0]);
        drop(pages.split_off(PAGE));
        assert_eq!(query(start, &mut states[..1]), Ok(()));
    }
}
