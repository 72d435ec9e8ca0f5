//! When the client's memory vanishes under the device: its file was truncated (`SIGBUS`), or it was
//! taken back while a ring or a record still lay there (`SIGSEGV`, since memory without rights is
//! in its place).
//!
//! Neither may end the process, which serves others. A handler makes the access possible and leaves
//! word; the function is stopped by its own thread. The handler uses nothing but atomics and system
//! calls. What it may cost is bounded, however many pages are touched before the function has
//! stopped:
//!
//! * A hole becomes a page of zeros, for the first [`MAX_NOTED`] of them: two mappings each.
//! * A truncated file, or one hole more, and the whole [block](super::block) of the function
//!   becomes one anonymous mapping, by one call that needs no mapping more than there are. The
//!   connection then ends.
//! * [`FaultLog::stopped`] is set by the first fault. The engines look at it before each segment
//!   and each command, and do nothing from then on, so that no more than a segment for each thread
//!   is written to such memory.

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, Once, PoisonError};

/// Blocks of all functions together.
const MAX_WATCHED: usize = 4096;
/// Holes that are noted one by one before a function has been stopped.
const MAX_NOTED: usize = 8;
const PAGE: usize = 4096;
const HUGE: usize = 2 << 20;

/// Faults of one function.
#[derive(Debug)]
struct Log {
    /// Told of each.
    wake: AtomicI32,
    /// The pages that were put in place of holes.
    pages: [AtomicUsize; MAX_NOTED],
    count: AtomicUsize,
    /// What is at the function's addresses is not the client's memory any more.
    lost: AtomicBool,
    /// There was a fault that the function's thread has not dealt with.
    stopped: AtomicBool,
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

/// A handler with `SA_SIGINFO`.
type Handler = unsafe extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);

/// Who was there before the handler.
static mut PREVIOUS: [MaybeUninit<libc::sigaction>; 2] = [MaybeUninit::zeroed(); 2];
const SIGNALS: [libc::c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];

/// Installs the handler, once.
fn catch() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        for (i, signal) in SIGNALS.into_iter().enumerate() {
            // SAFETY: zeros are a valid `sigaction`, and `call_once` lets nobody else at `PREVIOUS`
            // before the handler is there.
            unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = on_fault as *const () as usize;
                action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
                libc::sigaction(signal, &action, (&raw mut PREVIOUS[i]).cast());
            }
        }
    });
}

extern "C" fn on_fault(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t` to a handler with SA_SIGINFO; a positive code
    // says that it has a fault's address.
    let address = unsafe { ((*info).si_code > 0).then(|| (*info).si_addr().addr()) };
    if address.is_some_and(|address| mend(address, signal == libc::SIGBUS)) {
        return;
    }
    // Not ours: as if there had been no handler.
    for (i, known) in SIGNALS.into_iter().enumerate() {
        if known == signal {
            // SAFETY: `PREVIOUS[i]` was filled when the handler was installed, and is only read
            // since.
            let previous = unsafe { &*(&raw const PREVIOUS[i]).cast::<libc::sigaction>() };
            match previous.sa_sigaction {
                // The access is made again and meets it.
                // SAFETY: `previous` is what sigaction(2) wrote when the handler was installed;
                // null is allowed for the old action.
                libc::SIG_DFL | libc::SIG_IGN => unsafe {
                    libc::sigaction(signal, previous, null_mut());
                },
                // SAFETY: a handler for this signal; one without SA_SIGINFO takes the first
                // argument, and does not look at the others.
                handler => unsafe {
                    std::mem::transmute::<usize, Handler>(handler)(signal, info, context);
                },
            }
        }
    }
}

/// Makes an access possible, if it went to a block. Async-signal-safe.
fn mend(address: usize, short: bool) -> bool {
    for slot in &SLOTS {
        let (start, len) = (
            slot.start.load(Ordering::Acquire),
            slot.len.load(Ordering::Relaxed),
        );
        if start == 0 || address.wrapping_sub(start) >= len {
            continue;
        }
        // SAFETY: logs are never freed.
        let Some(log) = (unsafe { slot.log.load(Ordering::Acquire).as_ref() }) else {
            continue;
        };
        log.stopped.store(true, Ordering::Relaxed);
        let open = |at: usize, len: usize| make_accessible(at & !(len - 1), len);
        let mended = if short {
            raze(log, start, len, address)
        } else if log.lost.load(Ordering::Acquire) {
            // Razed already, and not yet accessible, or not all of it.
            open(address, HUGE) || open(address, PAGE)
        } else if log.note(address & !(PAGE - 1)) {
            open(address, PAGE)
        } else {
            raze(log, start, len, address)
        };
        log.tell();
        return mended;
    }
    false
}

/// Makes memory without rights readable and writable. Should a file be there by now, it stays.
fn make_accessible(at: usize, len: usize) -> bool {
    let at: *mut libc::c_void = std::ptr::with_exposed_provenance_mut(at);
    // SAFETY: inside of a block, which begins and ends at multiples of 1 GiB.
    unsafe { mprotect(at, len, MprotectFlags::READ | MprotectFlags::WRITE) }.is_ok()
}

/// Puts zeros in place of a whole block. In two steps: memory that cannot be written is not counted
/// against what the process may have, so the first cannot fail for that reason, and it needs no new
/// mapping, because no mapping reaches beyond the block.
fn raze(log: &Log, start: usize, len: usize, address: usize) -> bool {
    log.lost.store(true, Ordering::Release);
    let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
    let block = std::ptr::with_exposed_provenance_mut(start);
    // SAFETY: a block, where only `memory` and this handler map.
    let cleared = unsafe { mmap_anonymous(block, len, ProtFlags::empty(), flags) }.is_ok();
    // Where the kernel commits no more memory than it has (vm.overcommit_memory=2), a part must do.
    cleared
        && (make_accessible(start, len)
            || make_accessible(address & !(HUGE - 1), HUGE)
            || make_accessible(address & !(PAGE - 1), PAGE))
}

impl Log {
    /// Notes a hole; `false` if there were too many.
    fn note(&self, page: usize) -> bool {
        let index = self.count.fetch_add(1, Ordering::AcqRel);
        match self.pages.get(index) {
            Some(place) => place.store(page, Ordering::Release),
            None => return false,
        }
        true
    }

    fn tell(&self) {
        // SAFETY: the number is that of an eventfd for as long as a block is watched.
        let wake = unsafe { BorrowedFd::borrow_raw(self.wake.load(Ordering::Relaxed)) };
        let _ = rustix::io::write(wake, &1u64.to_ne_bytes());
    }
}

/// What has been noted of a function.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Faults {
    /// Nothing.
    None,
    /// Memory that had been taken back was accessed, in these pages.
    Holes(Vec<usize>),
    /// A file was shorter than it had been, or there were too many faults: the client's memory is
    /// not here any more.
    Lost,
}

/// The faults of one function.
#[derive(Debug)]
pub(crate) struct FaultLog {
    log: &'static Log,
    wake: OwnedFd,
}

impl FaultLog {
    /// A log that tells an eventfd of its own of faults. From now on faults in watched blocks are
    /// caught.
    pub(crate) fn new() -> Result<FaultLog, Errno> {
        catch();
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let log = spare.unwrap_or_else(|| {
            Box::leak(Box::new(Log {
                wake: AtomicI32::new(-1),
                pages: [const { AtomicUsize::new(0) }; MAX_NOTED],
                count: AtomicUsize::new(0),
                lost: AtomicBool::new(false),
                stopped: AtomicBool::new(false),
            }))
        });
        log.wake.store(wake.as_raw_fd(), Ordering::Relaxed);
        Ok(FaultLog { log, wake })
    }

    /// Readable when there was a fault; for whoever sleeps, and for others that want to wake it.
    pub(crate) fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// What was noted since the last call. Nothing of the function's device is left when this is
    /// called, if there was anything: it may work again from now on, unless its memory is lost.
    pub(crate) fn take(&self) -> Faults {
        if self.log.lost.load(Ordering::Acquire) {
            return Faults::Lost;
        }
        self.log.stopped.store(false, Ordering::SeqCst);
        match self.log.count.swap(0, Ordering::AcqRel) {
            0 => Faults::None,
            count => Faults::Holes(
                self.log.pages[..count.min(MAX_NOTED)]
                    .iter()
                    .map(|p| p.load(Ordering::Acquire))
                    .collect(),
            ),
        }
    }

    /// Whether nothing was noted.
    pub(crate) fn is_empty(&self) -> bool {
        !self.log.stopped.load(Ordering::Relaxed)
    }

    /// Set from the first fault until [`take`](FaultLog::take): the device does nothing meanwhile.
    pub(crate) fn stopped(&self) -> &'static AtomicBool {
        &self.log.stopped
    }

    /// The client's memory is not what it should be: as by a fault that cannot be undone.
    pub(crate) fn lose(&self) {
        self.log.lost.store(true, Ordering::Release);
        self.log.stopped.store(true, Ordering::SeqCst);
        self.log.tell();
    }

    /// Watches the block of `len` bytes at `start`, both multiples of 1 GiB, until the watch is
    /// dropped, which must be before another function has the block and before the log goes. `None`
    /// if there is no room for more.
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
        self.log.count.store(0, Ordering::Relaxed);
        self.log.lost.store(false, Ordering::Relaxed);
        self.log.stopped.store(false, Ordering::Relaxed);
        SPARE
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(self.log);
    }
}

/// A block that is watched.
#[derive(Debug)]
pub(crate) struct Watch(&'static Slot);

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.start.store(0, Ordering::Release);
        self.0.log.store(null_mut(), Ordering::Release);
    }
}
