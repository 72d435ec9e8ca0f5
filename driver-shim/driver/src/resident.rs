//! Making the pages of registered memory present, and a record of the pages that are present
//! already.
//!
//! Programs register parts of memory that they have registered as a whole, for one transfer at a
//! time. The kernel takes some 40 us to walk through the pages of 1 MiB again, about half as long
//! as a copy of them. So the pages of a live registration are not walked through again.

use std::collections::BTreeMap;
use std::ffi::c_void;
use urnic_sync::Mutex;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use urnic_sys::resident;

const PAGE: usize = 4096;
/// Registrations that are examined to find one that covers a range. Those that cover each other are
/// not noted, so few have to be.
const EXAMINED: usize = 8;

/// The pages that a registration made present, until [`Resident::forget`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Kept {
    start: usize,
    /// Tells registrations of one address apart.
    number: u64,
}

/// The pages of a registration after its first.
#[derive(Debug, Clone, Copy)]
struct Pages {
    end: usize,
    write: bool,
}

/// The memory that live registrations made present.
#[derive(Debug, Default)]
pub(crate) struct Resident(Mutex<Noted>);

#[derive(Debug, Default)]
struct Noted {
    pages: BTreeMap<Kept, Pages>,
    next: u64,
}

impl Noted {
    /// Whether one registration covers the pages.
    fn cover(&self, start: usize, end: usize, write: bool) -> bool {
        let last = Kept {
            start,
            number: u64::MAX,
        };
        let mut before = self.pages.range(..=last).rev().take(EXAMINED);
        before.any(|(_, pages)| pages.end >= end && (pages.write || !write))
    }
}

impl Resident {
    /// Makes the pages present; with `write`, writable. Returns the record to
    /// [forget](Self::forget) when the memory is deregistered; `None` if another registration
    /// covers the pages.
    ///
    /// # Errors
    /// `EFAULT`: a page is not mapped, or not with these rights; `EINVAL`: the range wraps.
    pub(crate) fn keep(&self, addr: *mut c_void, len: usize, write: bool) -> Result<Option<Kept>, Errno> {
        let (start, end) = pages_of(addr, len)?;
        if start == end {
            return Ok(None);
        }
        if self.0.lock().cover(start, end, write) && are_present(addr.with_addr(start), end - start) {
            return Ok(None);
        }
        populate(addr, len, write)?;
        let mut noted = self.0.lock();
        let kept = Kept {
            start,
            number: noted.next,
        };
        noted.next += 1;
        noted.pages.insert(kept, Pages { end, write });
        Ok(Some(kept))
    }

    /// The memory of which [`keep`](Self::keep) returned this was deregistered.
    pub(crate) fn forget(&self, kept: Option<Kept>) {
        if let Some(kept) = kept {
            self.0.lock().pages.remove(&kept);
        }
    }
}

/// The addresses of the first page and after the last page of a range.
fn pages_of(addr: *mut c_void, len: usize) -> Result<(usize, usize), Errno> {
    let start = addr.addr() & !(PAGE - 1);
    let end = addr.addr().checked_add(len);
    let end = end.and_then(|end| end.checked_next_multiple_of(PAGE));
    match len {
        0 => Ok((start, start)),
        _ => Ok((start, end.ok_or(Errno::INVAL)?)),
    }
}

/// Whether the pages are mapped, and present: a program may have unmapped memory that it had
/// registered, or given its pages back. The kernel takes about a microsecond for 1 MiB.
fn are_present(start: *mut c_void, len: usize) -> bool {
    let mut present = [0; 1024];
    let most = present.len() * PAGE;
    (0..len).step_by(most).all(|at| {
        let part = present.get_mut(..most.min(len - at) / PAGE).unwrap_or_default();
        resident::query(start.addr() + at, part).is_ok() && part.iter().all(|page| page & 1 == 1)
    })
}

/// Makes the pages present; with `write`, writable.
///
/// # Errors
/// Those of [`Resident::keep`].
pub(crate) fn populate(addr: *mut c_void, len: usize, write: bool) -> Result<(), Errno> {
    let (start, end) = pages_of(addr, len)?;
    if start == end {
        return Ok(());
    }
    match resident::populate(start, end - start, write) {
        Ok(()) => Ok(()),
        // Kernels before 5.14 do not support the advice; newer ones return the same error for
        // rights that do not fit and for device memory.
        Err(Errno::INVAL) => check(start, end, write),
        // The kernel reports a hole as ENOMEM, and a page beyond the end of a file as EFAULT.
        Err(_) => Err(Errno::FAULT),
    }
}

/// Checks the pages by the list of mappings.
fn check(start: usize, end: usize, write: bool) -> Result<(), Errno> {
    let maps = read_file("/proc/self/maps")?;
    covered(&maps, start, end, write)
        .then_some(())
        .ok_or(Errno::FAULT)
}

/// Whether mappings with the rights cover the range without a hole. Lines are in order of address.
fn covered(maps: &str, start: usize, end: usize, write: bool) -> bool {
    let mut reached = start;
    for line in maps.lines() {
        let mut words = line.split([' ', '-']);
        let mut number = || usize::from_str_radix(words.next()?, 16).ok();
        let (Some(from), Some(to)) = (number(), number()) else {
            return false;
        };
        let rights = words.next().unwrap_or_default().as_bytes();
        if to <= reached {
            continue;
        }
        if from > reached || rights.first() != Some(&b'r') || write && rights.get(1) != Some(&b'w') {
            return false;
        }
        reached = to;
        if reached >= end {
            return true;
        }
    }
    false
}

fn read_file(path: &str) -> Result<String, Errno> {
    let fd = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut bytes = Vec::new();
    let mut chunk = vec![0; 1 << 16];
    loop {
        match rustix::io::read(&fd, &mut chunk) {
            Ok(0) => return String::from_utf8(bytes).map_err(|_| Errno::IO),
            Ok(n) => bytes.extend_from_slice(chunk.get(..n).unwrap_or_default()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mm::{Advice, MprotectFlags};
    use urnic_sys::Pages;

    /// Three new pages, and the address of the first.
    fn three_pages() -> (Pages, *mut c_void) {
        let pages = Pages::zeroed(3 * PAGE).unwrap();
        let start = pages.start().as_ptr().cast();
        (pages, start)
    }

    /// Unmaps the middle one of three pages; returns the first and the last.
    fn punch(mut pages: Pages) -> [Pages; 2] {
        let mut middle = pages.split_off(PAGE);
        let last = middle.split_off(PAGE);
        [pages, last]
    }

    fn check_both_ways(addr: *mut c_void, len: usize, write: bool) -> Result<(), Errno> {
        let (start, end) = (
            addr.addr() & !(PAGE - 1),
            (addr.addr() + len).next_multiple_of(PAGE),
        );
        let by_list = check(start, end, write);
        assert_eq!(populate(addr, len, write), by_list);
        by_list
    }

    #[test]
    fn a_hole_in_the_range_fails_with_efault() {
        let (pages, start) = three_pages();
        let _rest = punch(pages);
        let at = |offset| start.wrapping_byte_add(offset);
        assert_eq!(check_both_ways(start, PAGE, true), Ok(()));
        assert_eq!(check_both_ways(at(100), PAGE, true), Err(Errno::FAULT));
        assert_eq!(check_both_ways(at(2 * PAGE), PAGE, false), Ok(()));
        assert_eq!(check_both_ways(at(PAGE), 1, false), Err(Errno::FAULT));
    }

    #[test]
    fn memory_for_writing_must_be_writable() {
        let (pages, start) = three_pages();
        pages.protect(PAGE, PAGE, MprotectFlags::READ).unwrap();
        assert_eq!(check_both_ways(start, 3 * PAGE, false), Ok(()));
        assert_eq!(check_both_ways(start, 3 * PAGE, true), Err(Errno::FAULT));
    }

    #[test]
    fn pages_of_a_live_registration_are_present() {
        let resident = Resident::default();
        let (_pages, start) = three_pages();
        let whole = resident.keep(start, 3 * PAGE, true).unwrap();
        assert!(whole.is_some());
        let part = start.wrapping_byte_add(PAGE + 10);
        assert_eq!(resident.keep(part, PAGE, true), Ok(None));
        assert_eq!(resident.keep(start, 3 * PAGE, false), Ok(None));
        resident.forget(whole);
        let again = resident.keep(part, PAGE, true).unwrap();
        assert!(again.is_some(), "nothing keeps the pages present any more");
        let overlapping = resident.keep(start, 2 * PAGE, true).unwrap();
        assert!(overlapping.is_some(), "the first page is in no registration");
        resident.forget(again);
        resident.forget(overlapping);
        assert!(resident.0.lock().pages.is_empty());
    }

    #[test]
    fn pages_present_for_reading_may_not_be_writable() {
        let resident = Resident::default();
        let (pages, start) = three_pages();
        pages.protect(PAGE, PAGE, MprotectFlags::READ).unwrap();
        assert!(resident.keep(start, 3 * PAGE, false).unwrap().is_some());
        assert_eq!(resident.keep(start, 3 * PAGE, false), Ok(None));
        assert_eq!(resident.keep(start, 3 * PAGE, true), Err(Errno::FAULT));
    }

    #[test]
    fn pages_that_were_given_back_become_present_again() {
        let resident = Resident::default();
        let (pages, start) = three_pages();
        assert!(resident.keep(start, 3 * PAGE, true).unwrap().is_some());
        assert!(are_present(start, 3 * PAGE));
        pages.advise(Advice::LinuxDontNeed).unwrap();
        assert!(!are_present(start, 3 * PAGE));
        assert!(resident.keep(start, 3 * PAGE, true).unwrap().is_some());
        assert!(are_present(start, 3 * PAGE));
    }

    #[test]
    fn a_hole_in_a_live_registration_is_found() {
        let resident = Resident::default();
        let (pages, start) = three_pages();
        assert!(resident.keep(start, 3 * PAGE, true).unwrap().is_some());
        let _rest = punch(pages);
        assert_eq!(resident.keep(start, PAGE, true), Ok(None));
        assert_eq!(resident.keep(start, 2 * PAGE, true), Err(Errno::FAULT));
    }

    #[test]
    fn a_range_that_wraps_is_invalid() {
        assert_eq!(
            populate(std::ptr::without_provenance_mut(usize::MAX - 10), 100, false),
            Err(Errno::INVAL)
        );
    }
}
