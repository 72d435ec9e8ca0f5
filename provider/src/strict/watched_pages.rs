//! Pages of requests: until the completion is polled, the program cannot access those of receives
//! and Reads, and can only read those that are sent. Any other access faults; the handler restores
//! access to the page, records the instruction, and lets it continue.
//!
//! The handler uses nothing but atomics, mprotect(2) and the unwinder.

use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};

use rustix::mm::{MprotectFlags, mprotect};
use urnic_device::vocabulary::WcOpcode;
use urnic_model::host::fault::{self, Fault};

use super::memory;
use crate::call_site::{CallSite, MOST_FRAMES, of_interrupted};

/// Most ranges at a time; more requests are not watched.
const RANGES: usize = 4096;
/// Most accesses that are recorded between two calls of [`looks`].
const LOOKS: usize = 64;
/// Bytes of stack that the unwinder may need.
const STACK_OF_UNWINDER: usize = 4096;
const PAGE: usize = 4096;

/// A range of whole pages; `len` 0: the place is free. `CLAIMED`: it is being changed.
struct Range {
    start: AtomicUsize,
    len: AtomicUsize,
    wr_id: AtomicU64,
    opcode: AtomicU8,
}

const CLAIMED: usize = usize::MAX;

static WATCHED: [Range; RANGES] = [const {
    Range {
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        wr_id: AtomicU64::new(0),
        opcode: AtomicU8::new(0),
    }
}; RANGES];

/// Outstanding receives and Reads whose bytes the device itself places in the program's memory.
static PLACED: AtomicUsize = AtomicUsize::new(0);

/// A recorded access: the call site, the address, and the request. The number of frames is written
/// last; 0: nothing is recorded here. `CLAIMED`: it is being written.
struct Noted {
    depth: AtomicUsize,
    frames: [AtomicUsize; MOST_FRAMES],
    addr: AtomicUsize,
    wr_id: AtomicU64,
    opcode: AtomicU8,
}

static NOTED: [Noted; LOOKS] = [const {
    Noted {
        depth: AtomicUsize::new(0),
        frames: [const { AtomicUsize::new(0) }; MOST_FRAMES],
        addr: AtomicUsize::new(0),
        wr_id: AtomicU64::new(0),
        opcode: AtomicU8::new(0),
    }
}; LOOKS];

/// A request whose memory is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Watched {
    pub(super) wr_id: u64,
    pub(super) opcode: WcOpcode,
}

impl Watched {
    /// Whether the program may read the memory until then.
    pub(super) fn is_sent(self) -> bool {
        matches!(self.opcode, WcOpcode::Send | WcOpcode::RdmaWrite)
    }
}

/// A place where the program used the memory of a request before its completion.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Look {
    pub(super) site: CallSite,
    pub(super) addr: usize,
    pub(super) request: Watched,
}

/// While this value exists, the device itself places the bytes of a receive or a Read in the
/// program's memory: then sent memory is not watched, because the device might write there.
#[derive(Debug)]
pub(super) struct PlacedByDevice(());

impl PlacedByDevice {
    pub(super) fn new() -> PlacedByDevice {
        PLACED.fetch_add(1, Ordering::SeqCst);
        PlacedByDevice(())
    }
}

impl Drop for PlacedByDevice {
    fn drop(&mut self) {
        PLACED.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Makes the whole pages between `addr` and `addr + len` inaccessible, or read-only. Returns the
/// number by which to open them; `None` if there are none, or too many pages are closed.
pub(super) fn close(addr: usize, len: usize, request: Watched) -> Option<usize> {
    let start = addr.checked_next_multiple_of(PAGE)?;
    let end = addr.checked_add(len)? & !(PAGE - 1);
    if start >= end || (request.is_sent() && PLACED.load(Ordering::SeqCst) > 0) {
        return None;
    }
    // Without our handler an access would end the program.
    if !fault::is_in_place(libc::SIGSEGV) {
        return None;
    }
    fault::watch(&ON_FAULT);
    let free = |range: &Range| {
        range
            .len
            .compare_exchange(0, CLAIMED, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    };
    let number = WATCHED.iter().position(free)?;
    let range = &WATCHED[number];
    range.start.store(start, Ordering::Relaxed);
    range.wr_id.store(request.wr_id, Ordering::Relaxed);
    range.opcode.store(request.opcode as u8, Ordering::Relaxed);
    range.len.store(end - start, Ordering::Release);
    let rights = match request.is_sent() {
        true => MprotectFlags::READ,
        false => MprotectFlags::empty(),
    };
    if !protect(start, end - start, rights) {
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

/// Opens the pages with bytes between `addr` and `addr + len`, which a request needs, to be read or
/// also to be written, if another one has closed any of them.
pub(super) fn open_within(addr: usize, len: usize, writes: bool) {
    let end = addr.saturating_add(len);
    let overlaps = |range: &Range| {
        let hinders = writes || of_request(range).is_none_or(|request| !request.is_sent());
        let overlaps = |(start, size): (usize, usize)| start < end && addr < start.saturating_add(size);
        hinders && of(range).is_some_and(overlaps)
    };
    if WATCHED.iter().any(overlaps) {
        let first = addr & !(PAGE - 1);
        reopen(first, end.next_multiple_of(PAGE) - first);
    }
}

/// Opens those of these pages that are closed. The program may have unmapped them and mapped
/// something else there, whose protection must not change.
fn reopen(start: usize, len: usize) {
    let is_closed = |page: &usize| !memory::is_writable(*page);
    let both = MprotectFlags::READ | MprotectFlags::WRITE;
    if is_closed(&start) && is_closed(&(start + len - PAGE)) {
        protect(start, len, both);
        return;
    }
    for page in (start..start + len).step_by(PAGE).filter(is_closed) {
        protect(page, PAGE, both);
    }
}

/// The accesses that were recorded since the last call.
pub(super) fn looks() -> Vec<Look> {
    let taken = |noted: &Noted| match noted.depth.load(Ordering::Relaxed) {
        0 | CLAIMED => None,
        depth => {
            // Another thread may be the first to take it.
            (noted.depth)
                .compare_exchange(depth, CLAIMED, Ordering::AcqRel, Ordering::Relaxed)
                .ok()?;
            let frames = noted.frames.iter().take(depth);
            let addresses = frames.map(|frame| frame.load(Ordering::Relaxed)).collect();
            let look = Look {
                site: CallSite::of_addresses(addresses),
                addr: noted.addr.load(Ordering::Relaxed),
                request: Watched {
                    wr_id: noted.wr_id.load(Ordering::Relaxed),
                    opcode: WcOpcode::from_raw(noted.opcode.load(Ordering::Relaxed))?,
                },
            };
            noted.depth.store(0, Ordering::Release);
            Some(look)
        }
    };
    NOTED.iter().filter_map(taken).collect()
}

fn of_request(range: &Range) -> Option<Watched> {
    let wr_id = range.wr_id.load(Ordering::Relaxed);
    let opcode = WcOpcode::from_raw(range.opcode.load(Ordering::Relaxed))?;
    Some(Watched { wr_id, opcode })
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
    // SAFETY: pages of a request that the program has posted: until the completion they belong to
    // the device, which places nothing there, and the handler opens them for anybody else.
    unsafe { mprotect(std::ptr::without_provenance_mut(start), len, flags) }.is_ok()
}

static ON_FAULT: fault::Watch = on_fault;

/// Whether a fault was for a closed page, which is open now; other pages of the request stay
/// closed.
fn on_fault(fault: Fault) -> bool {
    let addr = fault.addr;
    let covers = |range: &&Range| of(range).is_some_and(|(start, len)| (start..start + len).contains(&addr));
    let Some(range) = WATCHED.iter().find(covers) else {
        return false;
    };
    let (wr_id, opcode) = (&range.wr_id, &range.opcode);
    protect(
        addr & !(PAGE - 1),
        PAGE,
        MprotectFlags::READ | MprotectFlags::WRITE,
    );
    let free = |noted: &&Noted| {
        noted
            .depth
            .compare_exchange(0, CLAIMED, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    };
    if !fault.ours
        && let Some(noted) = NOTED.iter().find(free)
    {
        noted.addr.store(addr, Ordering::Relaxed);
        noted
            .wr_id
            .store(wr_id.load(Ordering::Relaxed), Ordering::Relaxed);
        noted
            .opcode
            .store(opcode.load(Ordering::Relaxed), Ordering::Relaxed);
        noted.depth.store(note_place(noted, fault), Ordering::Release);
    }
    true
}

/// Notes the frames at a fault; returns their number. On a small stack for signals the instruction
/// is the only one.
fn note_place(noted: &Noted, fault: Fault) -> usize {
    let mut depth = 0;
    let mut take = |address: usize| {
        if let Some(frame) = noted.frames.get(depth) {
            frame.store(address, Ordering::Relaxed);
            depth += 1;
        }
    };
    match fault.stack_left {
        Some(left) if left < STACK_OF_UNWINDER => take(fault.pc.wrapping_add(1)),
        _ => of_interrupted(fault.pc, take),
    }
    depth
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_pages() -> *mut std::ffi::c_void {
        fault::install();
        urnic_sys::Pages::zeroed(2 * PAGE).unwrap().leak().as_ptr().cast()
    }

    fn looks_within(page: *mut std::ffi::c_void) -> Vec<Look> {
        // Other tests may take the records of this test's pages, and this test theirs.
        let ours = |look: &Look| (page.addr()..page.addr() + 2 * PAGE).contains(&look.addr);
        looks().into_iter().filter(ours).collect()
    }

    /// Clears memory by libc's function, not by instructions of the caller.
    #[inline(never)]
    fn clear(start: *mut u8, len: usize) {
        let memset = std::hint::black_box(libc::memset as unsafe extern "C" fn(_, _, _) -> _);
        // SAFETY: the mapping of a test, whose pages the handler opens.
        unsafe { memset(start.cast(), 0, len) };
    }

    /// The records belong to the process: one test uses them at a time.
    static LOOKS_OF_ONE: urnic_sync::Mutex<()> = urnic_sync::Mutex::new(());

    #[test]
    fn an_access_to_a_closed_page_is_recorded_and_succeeds() {
        let _one = LOOKS_OF_ONE.lock();
        let page = two_pages();
        let request = Watched {
            wr_id: 7,
            opcode: WcOpcode::Recv,
        };
        let number = close(page.addr() + 1, 2 * PAGE - 1, request).unwrap();
        clear(page.wrapping_byte_add(PAGE + 5).cast(), 8);
        let seen = looks_within(page);
        assert_eq!(seen.len(), 1);
        assert_eq!((seen[0].addr, seen[0].request), (page.addr() + PAGE + 5, request));
        let frames = seen[0].site.functions();
        let own = "an_access_to_a_closed_page_is_recorded_and_succeeds";
        assert!(frames.iter().any(|frame| frame.contains(own)), "{frames:?}");
        open(number);
        assert_eq!(close(page.addr() + 1, 10, request), None, "no whole page");
    }

    #[test]
    fn memory_that_is_sent_may_be_read_and_its_writer_is_noted() {
        let _one = LOOKS_OF_ONE.lock();
        let page = two_pages();
        let request = Watched {
            wr_id: 8,
            opcode: WcOpcode::Send,
        };
        let number = close(page.addr(), 2 * PAGE, request).unwrap();
        let byte = page.cast::<u8>();
        // SAFETY: the mapping above.
        assert_eq!(unsafe { byte.read_volatile() }, 0);
        assert_eq!(looks_within(page), []);
        // Another request that reads it does not open it, one that writes it does.
        open_within(page.addr(), PAGE, false);
        assert!(!memory::is_writable(page.addr()));
        open_within(page.addr(), 1, true);
        assert!(memory::is_writable(page.addr()));
        // SAFETY: the mapping above, whose second page the handler opens.
        unsafe { byte.add(PAGE).write_volatile(3) };
        let seen = looks_within(page);
        assert_eq!(
            (seen.len(), seen[0].addr, seen[0].request),
            (1, page.addr() + PAGE, request)
        );
        open(number);
        // The device itself places something: then nothing is watched.
        let placed = PlacedByDevice::new();
        assert_eq!(close(page.addr(), 2 * PAGE, request), None);
        drop(placed);
    }
}
