//! Signals: urnic's code runs inside another program, and must not take that program's signals.
//!
//! Threads of urnic take no signals. A thread of the program that works for the device takes them
//! when the work is finished, as a thread in a system call takes them on return: a handler may jump
//! away, exit or fork, so the thread must hold no lock at that time.

use std::ffi::c_int;

use urnic_sys::signals::{Signals, action};

/// Signals that an instruction of the thread itself raises, which cannot wait.
const FAULTS: [c_int; 6] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGTRAP,
    libc::SIGSYS,
];

/// Runs `f` with all signals blocked on this thread except those of faults. A thread started by `f`
/// inherits that mask permanently. Threads that work for the device recover from faults in the
/// program's memory, and the kernel ends a process that blocks these signals.
pub fn blocked<T>(f: impl FnOnce() -> T) -> T {
    let deferred = DeferredSignals::from_here();
    let result = f();
    deferred.release();
    result
}

/// The signal mask of the calling thread before its signals were deferred. The type has no `Drop`:
/// a handler that runs in [`DeferredSignals::release`] may jump out of it.
#[derive(Clone, Copy)]
pub struct DeferredSignals {
    before: Signals,
}

impl DeferredSignals {
    /// Holds back all signals from the calling thread except those of faults.
    pub fn from_here() -> DeferredSignals {
        let signals = FAULTS.into_iter().fold(Signals::all(), Signals::without);
        DeferredSignals {
            before: signals.block(),
        }
    }

    /// Whether a pending signal would have interrupted a system call that waits: a signal whose
    /// handler was installed without `SA_RESTART`.
    pub fn would_interrupt(&self) -> bool {
        let pending = Signals::pending();
        let came = |signal| pending.contains(signal) && !self.before.contains(signal);
        (1..=libc::SIGRTMAX()).any(|signal| came(signal) && interrupts(signal))
    }

    /// Restores the thread's signal mask. Handlers of pending signals run before this returns.
    pub fn release(self) {
        self.before.be_mask();
    }
}

/// Whether a system call that waits ends with `EINTR` when `signal` arrives.
fn interrupts(signal: c_int) -> bool {
    action(signal).is_some_and(|action| {
        let is_handled = !matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN);
        is_handled && action.sa_flags & libc::SA_RESTART == 0
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use urnic_sys::Plain;

    thread_local!(static CAME: Cell<u32> = const { Cell::new(0) });

    extern "C" fn note(_: c_int) {
        CAME.set(CAME.get() + 1);
    }

    fn handle(signal: c_int, handler: libc::sighandler_t, flags: c_int) {
        let mut action = libc::sigaction::zeroes();
        action.sa_sigaction = handler;
        action.sa_flags = flags;
        // SAFETY: the handler accesses only thread-local data.
        let done = unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) };
        assert_eq!(done, 0);
    }

    /// Raises a signal on this thread while signals are deferred. Returns how often the handler ran
    /// before the release and in all, and whether the signal would interrupt.
    fn met_by(signal: c_int) -> (u32, u32, bool) {
        CAME.set(0);
        let deferred = DeferredSignals::from_here();
        // SAFETY: the test below has installed a handler for the signal or blocked it.
        unsafe { libc::pthread_kill(libc::pthread_self(), signal) };
        let (during, interrupted) = (CAME.get(), deferred.would_interrupt());
        deferred.release();
        (during, CAME.get(), interrupted)
    }

    /// Signals that no other test of this process uses.
    #[test]
    fn a_signal_waits_and_then_interrupts_like_a_system_call() {
        let handler = note as extern "C" fn(c_int) as libc::sighandler_t;
        let (restarts, interrupts, ignored, blocked) = (
            libc::SIGRTMIN(),
            libc::SIGRTMIN() + 1,
            libc::SIGRTMIN() + 2,
            libc::SIGRTMIN() + 3,
        );
        handle(restarts, handler, libc::SA_RESTART);
        handle(interrupts, handler, 0);
        handle(ignored, libc::SIG_IGN, 0);
        handle(blocked, handler, 0);
        assert_eq!(met_by(restarts), (0, 1, false));
        assert_eq!(met_by(interrupts), (0, 1, true));
        assert_eq!(met_by(ignored), (0, 0, false));
        // The program blocks the signal.
        Signals::of(&[blocked]).block();
        assert_eq!(met_by(blocked), (0, 0, false));
    }
}
