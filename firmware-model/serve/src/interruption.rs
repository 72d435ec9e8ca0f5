//! Ends the system calls that a client makes a session's threads wait in.
//!
//! Some calls on what a client passed may wait for as long as the client likes: closing a TCP
//! socket with a linger time, or writing to an eventfd that is full and blocks (the client shares
//! its flags). While the client stays it harms itself only. When it has gone, or the server ends,
//! its threads are interrupted by a signal until they have ended.

use std::sync::{Mutex, Once, PoisonError};

/// Nobody else uses it, and by default it does nothing.
const SIGNAL: libc::c_int = libc::SIGURG;

extern "C" fn on_signal(_: libc::c_int) {}

/// Threads that can be interrupted.
#[derive(Debug, Default)]
pub(crate) struct Interruptible {
    threads: Mutex<Vec<libc::pid_t>>,
}

impl Interruptible {
    /// From now on the calling thread can be interrupted.
    pub(crate) fn enter(&self) {
        static INSTALLED: Once = Once::new();
        INSTALLED.call_once(|| {
            // SAFETY: zeros are a valid `sigaction`; the handler does nothing. Without SA_RESTART
            // system calls end with EINTR.
            unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = on_signal as *const () as usize;
                libc::sigaction(SIGNAL, &action, std::ptr::null_mut());
            }
        });
        // SAFETY: the set is initialised before use; only which signals this thread takes changes.
        let thread = unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            libc::sigaddset(&mut set, SIGNAL);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, std::ptr::null_mut());
            libc::gettid()
        };
        self.threads
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(thread);
    }

    /// Interrupts the threads that have entered. A number that belongs to another thread of this
    /// process by now does no harm: that thread tries again what it did.
    pub(crate) fn interrupt(&self) {
        let threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        for thread in threads.iter() {
            // SAFETY: numbers only; the signal has a handler, or does nothing.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), *thread, SIGNAL) };
        }
    }
}
