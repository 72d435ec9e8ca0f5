//! Handles accesses to client memory that has vanished: the client truncated the file (`SIGBUS`),
//! or it unmapped the memory while a ring or a record was still there (`SIGSEGV`, because memory
//! without rights replaces it).
//!
//! Neither fault may end the process, which serves other clients. A handler makes the access
//! possible and records the fault; the function's own thread stops the function. The handler uses
//! only atomics and system calls. Its cost is bounded, however many pages are accessed before the
//! function has stopped:
//!
//! * A hole becomes a page of zeros, for the first [`MAX_RECORDED`] holes: two mappings each.
//! * After a truncated file, or one more hole, the whole [block](super::block) of the function
//!   becomes one anonymous mapping, by one call that needs no additional mapping. The connection
//!   then ends.
//! * [`FaultLog::stopped`] is set by the first fault. The engines check it before each segment and
//!   each command and do nothing while it is set, so that each thread writes at most one segment to
//!   such memory.

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use urnic_sync::{Mutex, Published};
use urnic_sys::{Plain, signals};

/// Maximum number of watched blocks, of all functions together.
const MAX_WATCHED: usize = 4096;
/// Number of holes that are recorded one by one before a function has been stopped.
const MAX_RECORDED: usize = 8;
const PAGE: usize = 4096;
const HUGE: usize = 2 << 20;

/// Faults of one function.
#[derive(Debug)]
struct Log {
    /// The eventfd that is written at each fault.
    wake: AtomicI32,
    /// The pages that were put in place of holes.
    pages: [AtomicUsize; MAX_RECORDED],
    count: AtomicUsize,
    /// The memory at the function's addresses is no longer the client's memory.
    lost: AtomicBool,
    /// There was a fault that the function's thread has not handled.
    stopped: AtomicBool,
}

/// Unused logs. Logs are never freed, so that the handler can always access one.
static SPARE: Mutex<Vec<&'static Log>> = Mutex::new(Vec::new());

#[derive(Debug)]
struct Slot {
    start: AtomicUsize,
    len: AtomicUsize,
    log: Published<Log>,
}

static SLOTS: [Slot; MAX_WATCHED] = [const {
    Slot {
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        log: Published::new(),
    }
}; MAX_WATCHED];

/// A handler with `SA_SIGINFO`.
type Handler = unsafe extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);

/// The actions that were installed before the handler.
static PREVIOUS: [Published<libc::sigaction>; 2] = [const { Published::new() }; 2];
const SIGNALS: [libc::c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];

/// Installs the handler, once.
fn install_handler() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        for (signal, previous) in SIGNALS.into_iter().zip(&PREVIOUS) {
            previous.set(signals::action(signal).unwrap_or(libc::sigaction::zeroes()));
            let mut action = libc::sigaction::zeroes();
            action.sa_sigaction = on_fault as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            // SAFETY: the handler uses atomics and system calls only.
            unsafe { libc::sigaction(signal, &action, null_mut()) };
        }
    });
}

extern "C" fn on_fault(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t` to a handler with SA_SIGINFO; a positive code
    // means that the address of the fault is set.
    let address = unsafe { ((*info).si_code > 0).then(|| (*info).si_addr().addr()) };
    if address.is_some_and(|address| restore_access(address, signal == libc::SIGBUS)) {
        return;
    }
    // The address is in no block: the previous action applies.
    for (known, previous) in SIGNALS.into_iter().zip(&PREVIOUS) {
        if known == signal
            && let Some(previous) = previous.get()
        {
            match previous.sa_sigaction {
                // The access is repeated and causes the previous action.
                // SAFETY: `previous` is what sigaction(2) wrote when the handler was installed;
                // null is allowed for the old action.
                libc::SIG_DFL | libc::SIG_IGN => unsafe {
                    libc::sigaction(signal, previous, null_mut());
                },
                // SAFETY: a handler for this signal; one without SA_SIGINFO takes the first
                // argument and ignores the others.
                handler => unsafe {
                    std::mem::transmute::<usize, Handler>(handler)(signal, info, context);
                },
            }
        }
    }
}

/// Makes an access possible, if it went to a block. Async-signal-safe.
fn restore_access(address: usize, short: bool) -> bool {
    for slot in &SLOTS {
        let (start, len) = (
            slot.start.load(Ordering::Acquire),
            slot.len.load(Ordering::Relaxed),
        );
        if start == 0 || address.wrapping_sub(start) >= len {
            continue;
        }
        let Some(log) = slot.log.get() else { continue };
        log.stopped.store(true, Ordering::Relaxed);
        let open = |at: usize, len: usize| make_accessible(at & !(len - 1), len);
        let restored = if short {
            replace_block(log, start, len, address)
        } else if log.lost.load(Ordering::Acquire) {
            // The block is replaced already, but not yet accessible, or only in part.
            open(address, HUGE) || open(address, PAGE)
        } else if log.record(address & !(PAGE - 1)) {
            open(address, PAGE)
        } else {
            replace_block(log, start, len, address)
        };
        log.notify();
        return restored;
    }
    false
}

/// Makes memory without rights readable and writable. If a file has been mapped there meanwhile,
/// the file stays.
fn make_accessible(at: usize, len: usize) -> bool {
    let at: *mut libc::c_void = std::ptr::with_exposed_provenance_mut(at);
    // SAFETY: inside of a block, which begins and ends at multiples of 1 GiB.
    unsafe { mprotect(at, len, MprotectFlags::READ | MprotectFlags::WRITE) }.is_ok()
}

/// Puts zeros in place of a whole block, in two steps. Memory without write permission does not
/// count against the process's memory limit, so the first step cannot fail for that reason. It
/// needs no new mapping, because no mapping reaches beyond the block.
fn replace_block(log: &Log, start: usize, len: usize, address: usize) -> bool {
    log.lost.store(true, Ordering::Release);
    let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
    let block = std::ptr::with_exposed_provenance_mut(start);
    // SAFETY: a whole block, in which only `memory` and this handler make mappings.
    let cleared = unsafe { mmap_anonymous(block, len, ProtFlags::empty(), flags) }.is_ok();
    // A kernel that commits no more memory than it has (vm.overcommit_memory=2) may refuse the
    // whole block; a part of it is enough for this access.
    cleared
        && (make_accessible(start, len)
            || make_accessible(address & !(HUGE - 1), HUGE)
            || make_accessible(address & !(PAGE - 1), PAGE))
}

impl Log {
    /// Records a hole; `false` if there were too many.
    fn record(&self, page: usize) -> bool {
        let index = self.count.fetch_add(1, Ordering::AcqRel);
        match self.pages.get(index) {
            Some(place) => place.store(page, Ordering::Release),
            None => return false,
        }
        true
    }

    fn notify(&self) {
        // SAFETY: `wake` holds an open eventfd for as long as a block is watched.
        let wake = unsafe { BorrowedFd::borrow_raw(self.wake.load(Ordering::Relaxed)) };
        let _ = rustix::io::write(wake, &1u64.to_ne_bytes());
    }
}

/// The faults that were recorded for a function.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Faults {
    /// No fault.
    None,
    /// Memory that the client had unmapped was accessed, in these pages.
    Holes(Vec<usize>),
    /// A file was shorter than before, or there were too many faults: the client's memory is no
    /// longer mapped.
    Lost,
}

/// The faults of one function.
#[derive(Debug)]
pub(crate) struct FaultLog {
    log: &'static Log,
    wake: OwnedFd,
}

impl FaultLog {
    /// A log that writes an eventfd of its own at each fault. From now on faults in watched blocks
    /// are caught.
    pub(crate) fn new() -> Result<FaultLog, Errno> {
        install_handler();
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let spare = SPARE.lock().pop();
        let log = spare.unwrap_or_else(|| {
            Box::leak(Box::new(Log {
                wake: AtomicI32::new(-1),
                pages: [const { AtomicUsize::new(0) }; MAX_RECORDED],
                count: AtomicUsize::new(0),
                lost: AtomicBool::new(false),
                stopped: AtomicBool::new(false),
            }))
        });
        log.wake.store(wake.as_raw_fd(), Ordering::Relaxed);
        Ok(FaultLog { log, wake })
    }

    /// An eventfd that is readable after a fault. A thread that sleeps on it can also be woken by a
    /// write.
    pub(crate) fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Takes the faults recorded since the last call. If there were any, the caller has stopped the
    /// function's device before the call; the device may work again afterwards, unless its memory
    /// is lost.
    pub(crate) fn take(&self) -> Faults {
        if self.log.lost.load(Ordering::Acquire) {
            return Faults::Lost;
        }
        self.log.stopped.store(false, Ordering::SeqCst);
        match self.log.count.swap(0, Ordering::AcqRel) {
            0 => Faults::None,
            count => Faults::Holes(
                self.log.pages[..count.min(MAX_RECORDED)]
                    .iter()
                    .map(|p| p.load(Ordering::Acquire))
                    .collect(),
            ),
        }
    }

    /// Whether no fault was recorded.
    pub(crate) fn is_empty(&self) -> bool {
        !self.log.stopped.load(Ordering::Relaxed)
    }

    /// Set from the first fault until [`take`](FaultLog::take): the device does nothing meanwhile.
    pub(crate) fn stopped(&self) -> &'static AtomicBool {
        &self.log.stopped
    }

    /// Marks the client's memory as lost, as after a fault that cannot be undone.
    pub(crate) fn lose(&self) {
        self.log.lost.store(true, Ordering::Release);
        self.log.stopped.store(true, Ordering::SeqCst);
        self.log.notify();
    }

    /// Watches the block of `len` bytes at `start`, both multiples of 1 GiB, until the watch is
    /// dropped. The caller drops the watch before another function gets the block and before the
    /// log is dropped. `None` if too many blocks are watched.
    pub(crate) fn watch(&self, start: usize, len: usize) -> Option<Watch> {
        let slot = SLOTS.iter().find(|slot| slot.log.claim_for(self.log))?;
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
        SPARE.lock().push(self.log);
    }
}

/// A block that is watched.
#[derive(Debug)]
pub(crate) struct Watch(&'static Slot);

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.start.store(0, Ordering::Release);
        self.0.log.take();
    }
}
