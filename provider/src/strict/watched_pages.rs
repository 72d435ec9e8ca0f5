//! Pages of posted receives: closed to the program until the completion is polled. A program that
//! looks gets a fault; the handler opens the pages, notes where that was, and lets it continue.
//!
//! The handler uses nothing but atomics and mprotect(2).

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use rustix::mm::{MprotectFlags, mprotect};
use urnic_model::host::fault;

use super::memory;

/// Most ranges at a time; more receives are not watched.
const RANGES: usize = 4096;
/// Most looks that are noted until somebody asks.
const LOOKS: usize = 64;
const PAGE: usize = 4096;

/// A range of whole pages; `len` 0: the place is free. `CLAIMED`: it is being changed.
struct Range {
    start: AtomicUsize,
    len: AtomicUsize,
    wr_id: AtomicU64,
}

const CLAIMED: usize = usize::MAX;

static WATCHED: [Range; RANGES] = [const {
    Range {
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        wr_id: AtomicU64::new(0),
    }
}; RANGES];

/// A look: the instruction, the address, and the receive. The instruction is written last.
struct Noted {
    pc: AtomicUsize,
    addr: AtomicUsize,
    wr_id: AtomicU64,
}

static NOTED: [Noted; LOOKS] = [const {
    Noted {
        pc: AtomicUsize::new(0),
        addr: AtomicUsize::new(0),
        wr_id: AtomicU64::new(0),
    }
}; LOOKS];

/// A place where the program looked at a receive before its completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Look {
    pub(super) pc: usize,
    pub(super) addr: usize,
    pub(super) wr_id: u64,
}

/// Closes the whole pages between `addr` and `addr + len`. Returns the number to open them with;
/// `None` if there are none, or too many are closed.
pub(super) fn close(addr: usize, len: usize, wr_id: u64) -> Option<usize> {
    let start = addr.checked_next_multiple_of(PAGE)?;
    let end = addr.checked_add(len)? & !(PAGE - 1);
    if start >= end {
        return None;
    }
    // Without our handler a look would end the program.
    if !fault::is_in_place(libc::SIGSEGV) {
        return None;
    }
    fault::watch(on_fault);
    let free = |range: &Range| {
        range
            .len
            .compare_exchange(0, CLAIMED, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    };
    let number = WATCHED.iter().position(free)?;
    let range = &WATCHED[number];
    range.start.store(start, Ordering::Relaxed);
    range.wr_id.store(wr_id, Ordering::Relaxed);
    range.len.store(end - start, Ordering::Release);
    if !protect(start, end - start, MprotectFlags::empty()) {
        range.len.store(0, Ordering::Release);
        return None;
    }
    Some(number)
}

/// Opens what [`close`] closed.
pub(super) fn open(number: usize) {
    let Some(range) = WATCHED.get(number) else { return };
    if let Some((start, len)) = of(range) {
        reopen(start, len);
    }
    range.len.store(0, Ordering::Release);
}

/// Opens the pages with bytes between `addr` and `addr + len`, which a request needs, if a receive
/// has closed any of them.
pub(super) fn open_within(addr: usize, len: usize) {
    let end = addr.saturating_add(len);
    let overlaps = |range: &Range| {
        of(range).is_some_and(|(start, size)| start < end && addr < start.saturating_add(size))
    };
    if WATCHED.iter().any(overlaps) {
        let first = addr & !(PAGE - 1);
        reopen(first, end.next_multiple_of(PAGE) - first);
    }
}

/// Opens those of these pages that are closed. The program may have unmapped them meanwhile, and
/// have something else there, whose protection is not to be changed.
fn reopen(start: usize, len: usize) {
    let is_closed = |page: &usize| memory::hash(*page, 1).is_none();
    let both = MprotectFlags::READ | MprotectFlags::WRITE;
    if is_closed(&start) && is_closed(&(start + len - PAGE)) {
        protect(start, len, both);
        return;
    }
    for page in (start..start + len).step_by(PAGE).filter(is_closed) {
        protect(page, PAGE, both);
    }
}

/// The looks since the last call.
pub(super) fn looks() -> Vec<Look> {
    let taken = |noted: &Noted| match noted.pc.load(Ordering::Acquire) {
        0 | CLAIMED => None,
        pc => {
            let look = Look {
                pc,
                addr: noted.addr.load(Ordering::Relaxed),
                wr_id: noted.wr_id.load(Ordering::Relaxed),
            };
            noted.pc.store(0, Ordering::Release);
            Some(look)
        }
    };
    NOTED.iter().filter_map(taken).collect()
}

fn of(range: &Range) -> Option<(usize, usize)> {
    match range.len.load(Ordering::Acquire) {
        0 | CLAIMED => None,
        len => Some((range.start.load(Ordering::Relaxed), len)),
    }
}

fn protect(start: usize, len: usize, flags: MprotectFlags) -> bool {
    if len == 0 || len == CLAIMED {
        return false;
    }
    // SAFETY: pages of a receive that the program has posted: until the completion they belong to
    // the device, which places nothing there, and the handler opens them for anybody else.
    unsafe { mprotect(std::ptr::without_provenance_mut(start), len, flags) }.is_ok()
}

/// A fault at `addr`, by the instruction at `pc`; `ours`: of this library. Whether it was for a
/// closed page, which is open now; other pages of the receive stay closed.
fn on_fault(addr: usize, pc: usize, ours: bool) -> bool {
    let covers = |range: &&Range| of(range).is_some_and(|(start, len)| (start..start + len).contains(&addr));
    let Some(range) = WATCHED.iter().find(covers) else {
        return false;
    };
    let wr_id = range.wr_id.load(Ordering::Relaxed);
    protect(
        addr & !(PAGE - 1),
        PAGE,
        MprotectFlags::READ | MprotectFlags::WRITE,
    );
    let free = |noted: &&Noted| {
        noted
            .pc
            .compare_exchange(0, CLAIMED, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    };
    if !ours && let Some(noted) = NOTED.iter().find(free) {
        noted.addr.store(addr, Ordering::Relaxed);
        noted.wr_id.store(wr_id, Ordering::Relaxed);
        noted.pc.store(pc, Ordering::Release);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

    #[test]
    fn a_look_at_a_closed_page_is_noted_and_succeeds() {
        fault::install();
        // SAFETY: a new mapping, which this test alone uses.
        let page = unsafe {
            let both = ProtFlags::READ | ProtFlags::WRITE;
            mmap_anonymous(std::ptr::null_mut(), 2 * PAGE, both, MapFlags::PRIVATE).unwrap()
        };
        let number = close(page.addr() + 1, 2 * PAGE - 1, 7).unwrap();
        // SAFETY: the mapping above, whose second page the handler opens.
        unsafe { page.byte_add(PAGE + 5).cast::<u8>().write_volatile(3) };
        let ours = |look: &Look| (page.addr()..page.addr() + 2 * PAGE).contains(&look.addr);
        let seen: Vec<Look> = looks().into_iter().filter(ours).collect();
        assert_eq!(seen.len(), 1);
        assert_eq!((seen[0].addr, seen[0].wr_id), (page.addr() + PAGE + 5, 7));
        open(number);
        assert_eq!(close(page.addr() + 1, 10, 7), None, "no whole page");
    }
}
