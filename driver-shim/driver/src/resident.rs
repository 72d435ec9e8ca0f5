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
use rustix::mm::{Advice, madvise};

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
        let part = most.min(len - at);
        // SAFETY: the array has a byte for each page of the part; the memory itself is not touched.
        let found = unsafe { libc::mincore(start.wrapping_byte_add(at), part, present.as_mut_ptr()) };
        found == 0 && present.iter().take(part / PAGE).all(|page| page & 1 == 1)
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
    let advice = if write {
        Advice::LinuxPopulateWrite
    } else {
        Advice::LinuxPopulateRead
    };
    loop {
        // SAFETY: populating changes no byte: its effect is the early effect of touching the pages.
        match unsafe { madvise(addr.with_addr(start), end - start, advice) } {
            Ok(()) => return Ok(()),
            // A signal interrupted the call; its handler runs before the next try.
            Err(Errno::INTR) => {}
            // Kernels before 5.14 do not support the advice; newer ones return the same error for
            // rights that do not fit and for device memory.
            Err(Errno::INVAL) => return check(start, end, write),
            // The kernel reports a hole as ENOMEM, and a page beyond the end of a file as EFAULT.
            Err(_) => return Err(Errno::FAULT),
        }
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
    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

    /// Calls `test` with three new pages, whose middle one `change` unmaps or makes read-only.
    fn with_pages(change: impl Fn(*mut c_void), test: impl Fn(*mut c_void)) {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping of the test's own, unmapped below.
        let pages =
            unsafe { mmap_anonymous(std::ptr::null_mut(), 3 * PAGE, prot, MapFlags::PRIVATE) }.unwrap();
        change(pages.wrapping_byte_add(PAGE));
        test(pages);
        // SAFETY: the mapping made above; unmapping a hole again is no error.
        unsafe { munmap(pages, 3 * PAGE) }.unwrap();
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
        // SAFETY: the middle page of the test's own mapping.
        let punch = |page| unsafe { munmap(page, PAGE) }.unwrap();
        with_pages(punch, |pages| {
            assert_eq!(check_both_ways(pages, PAGE, true), Ok(()));
            assert_eq!(
                check_both_ways(pages.wrapping_byte_add(100), PAGE, true),
                Err(Errno::FAULT)
            );
            assert_eq!(
                check_both_ways(pages.wrapping_byte_add(2 * PAGE), PAGE, false),
                Ok(())
            );
            assert_eq!(
                check_both_ways(pages.wrapping_byte_add(PAGE), 1, false),
                Err(Errno::FAULT)
            );
        });
    }

    #[test]
    fn memory_for_writing_must_be_writable() {
        // SAFETY: the middle page of the test's own mapping.
        let protect = |page| unsafe { mprotect(page, PAGE, MprotectFlags::READ) }.unwrap();
        with_pages(protect, |pages| {
            assert_eq!(check_both_ways(pages, 3 * PAGE, false), Ok(()));
            assert_eq!(check_both_ways(pages, 3 * PAGE, true), Err(Errno::FAULT));
        });
    }

    #[test]
    fn pages_of_a_live_registration_are_present() {
        let resident = Resident::default();
        with_pages(
            |_| {},
            |pages| {
                let whole = resident.keep(pages, 3 * PAGE, true).unwrap();
                assert!(whole.is_some());
                let part = pages.wrapping_byte_add(PAGE + 10);
                assert_eq!(resident.keep(part, PAGE, true), Ok(None));
                assert_eq!(resident.keep(pages, 3 * PAGE, false), Ok(None));
                resident.forget(whole);
                let again = resident.keep(part, PAGE, true).unwrap();
                assert!(again.is_some(), "nothing keeps the pages present any more");
                let overlapping = resident.keep(pages, 2 * PAGE, true).unwrap();
                assert!(overlapping.is_some(), "the first page is in no registration");
                resident.forget(again);
                resident.forget(overlapping);
                assert!(resident.0.lock().pages.is_empty());
            },
        );
    }

    #[test]
    fn pages_present_for_reading_may_not_be_writable() {
        let resident = Resident::default();
        // SAFETY: the middle page of the test's own mapping.
        let protect = |page| unsafe { mprotect(page, PAGE, MprotectFlags::READ) }.unwrap();
        with_pages(protect, |pages| {
            assert!(resident.keep(pages, 3 * PAGE, false).unwrap().is_some());
            assert_eq!(resident.keep(pages, 3 * PAGE, false), Ok(None));
            assert_eq!(resident.keep(pages, 3 * PAGE, true), Err(Errno::FAULT));
        });
    }

    #[test]
    fn pages_that_were_given_back_become_present_again() {
        let resident = Resident::default();
        with_pages(
            |_| {},
            |pages| {
                assert!(resident.keep(pages, 3 * PAGE, true).unwrap().is_some());
                assert!(are_present(pages, 3 * PAGE));
                // SAFETY: the test's own mapping, in which nothing is.
                unsafe { madvise(pages, 3 * PAGE, Advice::LinuxDontNeed) }.unwrap();
                assert!(!are_present(pages, 3 * PAGE));
                assert!(resident.keep(pages, 3 * PAGE, true).unwrap().is_some());
                assert!(are_present(pages, 3 * PAGE));
            },
        );
    }

    #[test]
    fn a_hole_in_a_live_registration_is_found() {
        let resident = Resident::default();
        with_pages(
            |_| {},
            |pages| {
                assert!(resident.keep(pages, 3 * PAGE, true).unwrap().is_some());
                // SAFETY: the middle page of the test's own mapping.
                unsafe { munmap(pages.wrapping_byte_add(PAGE), PAGE) }.unwrap();
                assert_eq!(resident.keep(pages, PAGE, true), Ok(None));
                assert_eq!(resident.keep(pages, 2 * PAGE, true), Err(Errno::FAULT));
            },
        );
    }

    #[test]
    fn a_range_that_wraps_is_invalid() {
        assert_eq!(
            populate(std::ptr::without_provenance_mut(usize::MAX - 10), 100, false),
            Err(Errno::INVAL)
        );
    }
}
