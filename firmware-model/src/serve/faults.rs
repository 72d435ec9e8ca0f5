//! When the client's memory vanishes under the device: its file was made shorter (`SIGBUS`), or it was taken back while a ring or a record
//! still lay there (`SIGSEGV`, since a hole is in its place).
//!
//! Neither may end the process, which serves others. A handler puts a page of zeros where the access went and leaves word; the function that
//! did it is stopped by its own thread. The handler uses nothing but atomics and system calls.

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, Once, PoisonError};

/// Windows of all functions together.
const MAX_WATCHED: usize = 4096;
/// Faults that are noted one by one before a function has been stopped.
const MAX_NOTED: usize = 64;
const PAGE: usize = 4096;

/// Faults of one function.
#[derive(Debug)]
struct Log {
    /// Told of each.
    wake: AtomicI32,
    /// The pages that were put in place of holes.
    pages: [AtomicUsize; MAX_NOTED],
    count: AtomicUsize,
    /// A file was shorter than its mapping.
    short: AtomicBool,
}

/// Logs are never freed, so that the handler may always look at one; these are out of use.
static SPARE: Mutex<Vec<&'static Log>> = Mutex::new(Vec::new());

#[derive(Debug)]
struct Slot {
    start: AtomicUsize,
    len: AtomicUsize,
    log: AtomicPtr<Log>,
}

static SLOTS: [Slot; MAX_WATCHED] = [const {
    Slot {
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        log: AtomicPtr::new(null_mut()),
    }
}; MAX_WATCHED];

/// Who was there before the handler.
static mut PREVIOUS: [MaybeUninit<libc::sigaction>; 2] = [MaybeUninit::zeroed(); 2];
const SIGNALS: [libc::c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];

/// Installs the handler, once.
fn catch() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        for (i, signal) in SIGNALS.into_iter().enumerate() {
            // SAFETY: zeros are a valid `sigaction`, and `call_once` lets nobody else at `PREVIOUS` before the handler is there.
            unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = on_fault as *const () as usize;
                action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
                libc::sigaction(signal, &action, (&raw mut PREVIOUS[i]).cast());
            }
        }
    });
}

extern "C" fn on_fault(signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t` to a handler with SA_SIGINFO; a positive code says that it has a fault's address.
    let address = unsafe { ((*info).si_code > 0).then(|| (*info).si_addr().addr()) };
    if address.is_some_and(|address| mend(address, signal == libc::SIGBUS)) {
        return;
    }
    // Not ours: as if there had been no handler. The access is made again and meets the one before.
    for (i, known) in SIGNALS.into_iter().enumerate() {
        if known == signal {
            // SAFETY: `PREVIOUS[i]` was filled when the handler was installed, and is only read since.
            unsafe { libc::sigaction(signal, (&raw const PREVIOUS[i]).cast(), null_mut()) };
        }
    }
}

/// Puts a page where an access went, if that is in a window. Async-signal-safe.
fn mend(address: usize, short: bool) -> bool {
    for slot in &SLOTS {
        let start = slot.start.load(Ordering::Acquire);
        if start == 0 || address.wrapping_sub(start) >= slot.len.load(Ordering::Relaxed) {
            continue;
        }
        // SAFETY: logs are never freed.
        let Some(log) = (unsafe { slot.log.load(Ordering::Acquire).as_ref() }) else {
            continue;
        };
        return put_page(address, short) && log.note(address & !(PAGE - 1), short);
    }
    false
}

fn put_page(address: usize, short: bool) -> bool {
    let rights = ProtFlags::READ | ProtFlags::WRITE;
    let page: *mut libc::c_void = std::ptr::with_exposed_provenance_mut(address & !(PAGE - 1));
    if !short {
        // A hole is memory without rights. Should a file be there by now, it stays.
        // SAFETY: the page is in a window, where only `memory` and this handler map.
        return unsafe { mprotect(page, PAGE, MprotectFlags::READ | MprotectFlags::WRITE) }.is_ok();
    }
    // A file of huge pages can be replaced by whole ones only.
    [PAGE, 2 << 20, 1 << 30].into_iter().any(|len| {
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        let page = std::ptr::with_exposed_provenance_mut(address & !(len - 1));
        // SAFETY: windows begin and end at multiples of 1 GiB, so this is inside of one, where only `memory` and this handler map.
        unsafe { mmap_anonymous(page, len, rights, flags) }.is_ok()
    })
}

impl Log {
    fn note(&self, page: usize, short: bool) -> bool {
        if short {
            self.short.store(true, Ordering::Relaxed);
        }
        let index = self.count.fetch_add(1, Ordering::AcqRel);
        if let Some(place) = self.pages.get(index) {
            place.store(page, Ordering::Release);
        }
        // SAFETY: the number is that of an eventfd for as long as a window is watched.
        let wake = unsafe { BorrowedFd::borrow_raw(self.wake.load(Ordering::Relaxed)) };
        let _ = rustix::io::write(wake, &1u64.to_ne_bytes());
        true
    }
}

/// What has been noted of a function.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Faults {
    /// Nothing.
    None,
    /// Memory that had been taken back was accessed, in these pages.
    Holes(Vec<usize>),
    /// A file was shorter than it had been, or there were too many faults to tell.
    Lost,
}

/// The faults of one function.
#[derive(Debug)]
pub(crate) struct FaultLog {
    log: &'static Log,
    wake: OwnedFd,
}

impl FaultLog {
    /// A log that tells `wake`'s eventfd of faults. From now on faults in watched windows are caught.
    pub(crate) fn new() -> Result<FaultLog, Errno> {
        catch();
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let log = spare.unwrap_or_else(|| {
            Box::leak(Box::new(Log {
                wake: AtomicI32::new(-1),
                pages: [const { AtomicUsize::new(0) }; MAX_NOTED],
                count: AtomicUsize::new(0),
                short: AtomicBool::new(false),
            }))
        });
        log.wake.store(wake.as_raw_fd(), Ordering::Relaxed);
        Ok(FaultLog { log, wake })
    }

    /// Readable when there was a fault; for whoever sleeps, and for others that want to wake it.
    pub(crate) fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// What was noted since the last call. The function's device must not run meanwhile if there was anything.
    pub(crate) fn take(&self) -> Faults {
        let count = self.log.count.swap(0, Ordering::AcqRel);
        let short = self.log.short.swap(false, Ordering::Relaxed);
        match count {
            0 => Faults::None,
            _ if short || count > MAX_NOTED => Faults::Lost,
            _ => Faults::Holes(
                self.log.pages[..count]
                    .iter()
                    .map(|p| p.load(Ordering::Acquire))
                    .collect(),
            ),
        }
    }

    /// Whether anything was noted.
    pub(crate) fn is_empty(&self) -> bool {
        self.log.count.load(Ordering::Relaxed) == 0
    }

    /// Watches the window of `len` bytes at `start`, both multiples of 1 GiB, until the watch is dropped, which must be before the window goes and
    /// before the log does. `None` if there is no room for more.
    pub(crate) fn watch(&self, start: usize, len: usize) -> Option<Watch> {
        let log = std::ptr::from_ref(self.log).cast_mut();
        let free = |slot: &&Slot| {
            slot.log
                .compare_exchange(null_mut(), log, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        };
        let slot = SLOTS.iter().find(free)?;
        slot.len.store(len, Ordering::Relaxed);
        slot.start.store(start, Ordering::Release);
        Some(Watch(slot))
    }
}

impl Drop for FaultLog {
    fn drop(&mut self) {
        self.log.wake.store(-1, Ordering::Relaxed);
        self.take();
        SPARE
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(self.log);
    }
}

/// A window that is watched.
#[derive(Debug)]
pub(crate) struct Watch(&'static Slot);

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.start.store(0, Ordering::Release);
        self.0.log.store(null_mut(), Ordering::Release);
    }
}
