//! fork(2): a child has no device.
//!
//! The firmware's thread is not in the child, so a device that the parent opened is dead there. What must not happen is
//! that the child keeps the parent's sockets open: when the parent is killed, its peers would never know. A child that
//! opens the device itself gets a fresh one.
//!
//! The plug-in registers these three with pthread_atfork(3). Children of vfork and posix_spawn share the parent's memory until they
//! exec; for them nothing runs, and [`fds`](super::fds) sees by the process id that the table is not theirs.

use std::cell::UnsafeCell;
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicU32, Ordering};

use super::{MAKING, Making, fds, registry};

/// The lock that the forking thread holds across fork, so that the child finds what it protects whole.
struct AcrossFork(UnsafeCell<Option<MutexGuard<'static, Option<Making>>>>);

// SAFETY: only the thread that holds MAKING touches the cell, in the three functions below.
unsafe impl Sync for AcrossFork {}

static ACROSS_FORK: AcrossFork = AcrossFork(UnsafeCell::new(None));

/// How many forks lie between the first process and this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// Changes in every forked child: what was opened under another generation is unusable.
pub fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// Before fork, in the parent.
pub fn before() {
    let making = MAKING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    // SAFETY: we hold MAKING.
    unsafe { *ACROSS_FORK.0.get() = Some(making) };
    registry::before_fork();
}

/// After fork, in the parent.
pub fn in_parent() {
    registry::after_fork_in_parent();
    // SAFETY: this thread took MAKING in before().
    drop(unsafe { (*ACROSS_FORK.0.get()).take() });
}

/// After fork, in the child: closes the device's fds.
pub fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    fds::after_fork();
    registry::after_fork_in_child();
    // SAFETY: as in the parent; the child's only thread is the one that forked.
    drop(unsafe { (*ACROSS_FORK.0.get()).take() });
}
