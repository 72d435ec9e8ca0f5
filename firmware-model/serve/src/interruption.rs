//! Interrupts system calls in which a client makes a session's threads wait.
//!
//! Some calls on a descriptor from a client may wait for as long as the client likes: closing a TCP
//! socket with a linger time, or writing to an eventfd that is full and blocks (the client shares
//! its flags). While the client stays, it harms only itself. When the client has gone, or the
//! server ends, the session's threads are interrupted by a signal until they have ended.

use std::sync::Once;
use urnic_sync::Mutex;
use urnic_sys::Plain;
use urnic_sys::signals::Signals;

/// The signal that interrupts. No other code uses it, and its default action is to ignore it.
const SIGNAL: libc::c_int = libc::SIGURG;

extern "C" fn on_signal(_: libc::c_int) {}

/// Threads that can be interrupted.
#[derive(Debug, Default)]
pub(crate) struct Interruptible {
    threads: Mutex<Vec<libc::pid_t>>,
}

impl Interruptible {
    /// Makes the calling thread interruptible from now on.
    pub(crate) fn enter(&self) {
        static INSTALLED: Once = Once::new();
        INSTALLED.call_once(|| {
            let mut action = libc::sigaction::zeroes();
            action.sa_sigaction = on_signal as *const () as usize;
            // SAFETY: the handler does nothing. Without SA_RESTART system calls fail with EINTR.
            unsafe { libc::sigaction(SIGNAL, &action, std::ptr::null_mut()) };
        });
        Signals::of(&[SIGNAL]).unblock();
        // Not libc's function, which came with glibc 2.30.
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        self.threads.lock().push(thread);
    }

    /// Interrupts the threads that have entered. If a thread number now belongs to another thread
    /// of this process, the signal does no harm: that thread repeats its call.
    pub(crate) fn interrupt(&self) {
        let threads = self.threads.lock();
        for thread in threads.iter() {
            // SAFETY: passes only numbers; the signal has a handler, or is ignored.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), *thread, SIGNAL) };
        }
    }
}
