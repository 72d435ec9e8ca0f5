//! fork(2): a child has no device.
//!
//! The firmware's thread is not in the child, so a device that the parent opened does not work
//! there. The child must not keep the parent's sockets open: otherwise, when the parent is killed,
//! its peers would not notice. A child that opens the device itself gets a new one.
//!
//! The plug-in registers `before`, `in_parent` and `in_child` with pthread_atfork(3). Children of
//! vfork and posix_spawn share the parent's memory until they exec; for them no handler runs, and
//! [`fds`](urnic_process::fds) detects by the process id that the table is the parent's.

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU32, Ordering};
use urnic_sync::{Mutex, MutexGuard, Published};

use super::{MAKING, Making, registry};
use urnic_process::fds;

thread_local! {
    static ACROSS_FORK: registry::AcrossFork<Option<Making>> = const { Cell::new(None) };
}

/// A number that rarely changes, on a separate cache line: the fast path reads it.
#[repr(align(64))]
struct CacheLine(AtomicU32);

/// The number of forks between the first process and this one.
static GENERATION: CacheLine = CacheLine(AtomicU32::new(0));

/// The process that created an object. In a forked child the object is unusable and must not
/// be locked: at the fork, a thread that only the parent has may have held the lock, which then
/// stays locked in the child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CreationProcess(u32);

impl CreationProcess {
    /// This process, as the creator of an object.
    pub fn current() -> CreationProcess {
        CreationProcess(GENERATION.0.load(Ordering::Relaxed))
    }

    /// Whether the object was made in this process.
    #[inline]
    pub fn is_current(self) -> bool {
        self == CreationProcess::current()
    }
}

/// The generation that has opened a device last.
static OPENED: AtomicU32 = AtomicU32::new(0);

/// To be called when this process has opened a device.
pub fn opened_device() {
    OPENED.store(GENERATION.0.load(Ordering::Relaxed), Ordering::Relaxed);
}

/// Whether this process is a forked child that has opened no device: all of its objects are the
/// parent's.
pub fn is_child_without_device() -> bool {
    OPENED.load(Ordering::Relaxed) != GENERATION.0.load(Ordering::Relaxed)
}

/// A lock on the state of one process. A child continues with the parent's state, unless another
/// thread held the lock at the fork: then the child starts with a new default state.
#[derive(Debug)]
pub struct OwnLock<T: 'static>(Published<Mutex<T>>);

impl<T: Default + Send> OwnLock<T> {
    /// Makes a lock whose value is the default.
    #[allow(clippy::new_without_default)]
    pub const fn new() -> OwnLock<T> {
        OwnLock(Published::new())
    }

    /// Waits for the lock and takes it.
    pub fn lock(&self) -> MutexGuard<'static, T> {
        self.0.get_or_init(Mutex::default).lock()
    }

    /// To be called in the child after every fork.
    pub fn after_fork_in_child(&self) {
        if self.0.get().is_some_and(|mutex| mutex.try_lock().is_none()) {
            self.0.take();
        }
    }
}

/// Before fork, in the parent.
pub fn before() {
    ACROSS_FORK.set(Some(ManuallyDrop::new(MAKING.lock())));
    registry::before_fork();
}

/// After fork, in the parent.
pub fn in_parent() {
    registry::after_fork_in_parent();
    drop(ACROSS_FORK.take().map(ManuallyDrop::into_inner));
}

/// After fork, in the child: closes the device's fds.
pub fn in_child() {
    GENERATION.0.fetch_add(1, Ordering::Relaxed);
    fds::after_fork();
    registry::after_fork_in_child();
    drop(ACROSS_FORK.take().map(ManuallyDrop::into_inner));
}
