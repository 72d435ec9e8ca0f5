//! Signals of the C library: sets of them, the calling thread's mask, and actions.

use std::ffi::c_int;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::ptr;

use rustix::io::Errno;

use crate::{Plain, errno};

/// A set of signals.
#[derive(Debug, Clone, Copy)]
pub struct Signals(libc::sigset_t);

/// Fills a set, which is empty at first.
fn filled(by: impl FnOnce(*mut libc::sigset_t)) -> Signals {
    let mut set = libc::sigset_t::zeroes();
    by(&raw mut set);
    Signals(set)
}

impl Signals {
    /// No signal.
    pub fn none() -> Signals {
        Signals(libc::sigset_t::zeroes())
    }

    /// All signals that a program may block; the C library leaves out those that it uses itself.
    pub fn all() -> Signals {
        // SAFETY: the place is a set.
        filled(|set| unsafe { _ = libc::sigfillset(set) })
    }

    /// These signals.
    pub fn of(signals: &[c_int]) -> Signals {
        signals
            .iter()
            .fold(Signals::none(), |set, signal| set.with(*signal))
    }

    /// The set with this signal.
    #[must_use]
    pub fn with(mut self, signal: c_int) -> Signals {
        // SAFETY: a set; a number that is no signal is an error without effect.
        unsafe { libc::sigaddset(&raw mut self.0, signal) };
        self
    }

    /// The set without this signal.
    #[must_use]
    pub fn without(mut self, signal: c_int) -> Signals {
        // SAFETY: a set; a number that is no signal is an error without effect.
        unsafe { libc::sigdelset(&raw mut self.0, signal) };
        self
    }

    /// Whether the set has this signal.
    pub fn contains(&self, signal: c_int) -> bool {
        // SAFETY: a set; a number that is no signal is an error.
        unsafe { libc::sigismember(&raw const self.0, signal) == 1 }
    }

    /// The set as the C library's functions have it.
    pub fn as_raw(&self) -> libc::sigset_t {
        self.0
    }

    /// Blocks these signals for the calling thread, too; returns the mask before.
    pub fn block(&self) -> Signals {
        change_mask(libc::SIG_BLOCK, &raw const self.0)
    }

    /// Unblocks these signals for the calling thread; returns the mask before.
    pub fn unblock(&self) -> Signals {
        change_mask(libc::SIG_UNBLOCK, &raw const self.0)
    }

    /// Makes this the calling thread's mask. Handlers of pending signals run before this returns.
    pub fn be_mask(&self) {
        change_mask(libc::SIG_SETMASK, &raw const self.0);
    }

    /// The signals that the calling thread blocks.
    pub fn blocked() -> Signals {
        change_mask(libc::SIG_BLOCK, ptr::null())
    }

    /// The signals that are blocked and have arrived, for the thread or the process.
    pub fn pending() -> Signals {
        // SAFETY: the place is a set.
        filled(|set| unsafe { _ = libc::sigpending(set) })
    }

    /// A descriptor that is readable when one of these signals, which are blocked, is pending.
    ///
    /// # Errors
    /// Those of signalfd(2).
    pub fn descriptor(&self) -> Result<OwnedFd, Errno> {
        // SAFETY: the set is live, and a new descriptor has no other owner.
        unsafe {
            match libc::signalfd(-1, &raw const self.0, libc::SFD_CLOEXEC) {
                -1 => Err(errno::last()),
                fd => Ok(OwnedFd::from_raw_fd(fd)),
            }
        }
    }
}

/// A signal that was read from the [descriptor](Signals::descriptor) of a set.
#[derive(Debug, Clone, Copy)]
pub struct Arrived {
    /// The signal.
    pub signal: c_int,
    /// The kernel sent it, as at a key of the terminal; otherwise a process did.
    pub by_kernel: bool,
    /// The process that sent it.
    pub sender: i32,
}

impl Arrived {
    /// Reads one signal.
    ///
    /// # Errors
    /// Those of read(2).
    pub fn read(descriptor: impl AsFd) -> Result<Arrived, Errno> {
        const SI_KERNEL: i32 = 0x80;
        // `struct signalfd_siginfo`: the number, at byte 8 the code, and at byte 12 the sender.
        let mut information = [0; 128];
        rustix::io::read(descriptor, &mut information)?;
        let field = |at: usize| i32::from_ne_bytes([0, 1, 2, 3].map(|byte| information[at + byte]));
        Ok(Arrived {
            signal: field(0),
            by_kernel: field(8) == SI_KERNEL,
            sender: field(12),
        })
    }
}

/// `set` is live, or null, which changes nothing.
fn change_mask(how: c_int, set: *const libc::sigset_t) -> Signals {
    // SAFETY: the callers pass a live set, or null, and the place for the mask before is a set.
    // Only which signals this thread takes changes.
    filled(|before| unsafe { _ = libc::pthread_sigmask(how, set, before) })
}

/// The action for a signal; `None` for a number that is not a signal.
pub fn action(signal: c_int) -> Option<libc::sigaction> {
    let mut action = libc::sigaction::zeroes();
    // SAFETY: a query, which fills the local.
    let done = unsafe { libc::sigaction(signal, ptr::null(), &raw mut action) };
    (done == 0).then_some(action)
}

/// Gives a signal its default action. Does nothing for a number that is no signal.
pub fn by_default(signal: c_int) {
    // SAFETY: the default action runs no code of this process.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_what_was_added_and_not_removed() {
        let set = Signals::of(&[libc::SIGUSR1, libc::SIGUSR2]).without(libc::SIGUSR1);
        assert!(set.contains(libc::SIGUSR2) && !set.contains(libc::SIGUSR1));
        assert!(Signals::all().contains(libc::SIGTERM) && !Signals::none().contains(libc::SIGTERM));
        assert!(!set.with(-1).contains(-1));
    }

    #[test]
    fn blocking_returns_the_mask_before() {
        let set = Signals::of(&[libc::SIGUSR2]);
        let before = set.block();
        assert!(!before.contains(libc::SIGUSR2) && Signals::blocked().contains(libc::SIGUSR2));
        assert!(!Signals::pending().contains(libc::SIGUSR2));
        assert!(set.unblock().contains(libc::SIGUSR2));
        before.be_mask();
        assert!(!Signals::blocked().contains(libc::SIGUSR2));
    }

    #[test]
    fn the_action_of_a_signal_is_known() {
        let action = action(libc::SIGUSR2).map(|action| action.sa_sigaction);
        assert_eq!(action, Some(libc::SIG_DFL));
        assert!(self::action(0).is_none());
    }
}
