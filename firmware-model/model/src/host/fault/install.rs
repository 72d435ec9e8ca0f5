//! Puts the handler of SIGSEGV and SIGBUS into the place of the program's.
//!
//! The plug-in takes the program's calls of sigaction(2) and its kin ([`replace`]). The kernel then
//! has our handler, with the mask and the flags that the program requested; so the kernel still
//! handles masks, alternate stacks, `SA_NODEFER` and `SA_RESTART`, and our handler calls the
//! program's as a function. `SA_RESETHAND` is done here. A program that makes the system call
//! itself takes our handler's place: then a fault in a copy of ours goes to its handler. A program
//! that ignores one of these signals and then calls execve(2) has it handled by default in the new
//! program, not ignored, because the kernel resets handlers.

use super::disposition::{SIGNALS, kernel, wanted};
use super::handler::on_fault;
use crate::sys::SignalMask;
use libc::c_int;
use rustix::process::getpid;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

/// The process that these actions belong to; 0: the handler is not installed. A child of vfork(2)
/// shares this memory, but not its parent's actions.
static OWNER: AtomicI32 = AtomicI32::new(0);
static LOCKED: AtomicBool = AtomicBool::new(false);

/// Calls of this process, one at a time. No handler may run meanwhile that makes such a call.
fn alone<T>(f: impl FnOnce() -> T) -> T {
    let mask = SignalMask::EVERY.exchange();
    while LOCKED.swap(true, Ordering::Acquire) {
        rustix::thread::sched_yield();
    }
    let result = f();
    LOCKED.store(false, Ordering::Release);
    mask.exchange();
    result
}

fn is_ours(action: &libc::sigaction) -> bool {
    action.sa_sigaction == on_fault as *const () as usize
}

/// The action that is set in the kernel for `program`, the program's own action.
fn in_its_place(program: &libc::sigaction) -> libc::sigaction {
    let kept = match program.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => libc::SA_ONSTACK | libc::SA_RESTART,
        _ => program.sa_flags & (libc::SA_ONSTACK | libc::SA_RESTART | libc::SA_NODEFER),
    };
    libc::sigaction {
        sa_sigaction: on_fault as *const () as usize,
        sa_flags: kept | libc::SA_SIGINFO,
        ..*program
    }
}

/// Takes the place of what the kernel has for `signal`, unless that is ours.
fn take_place(signal: c_int) {
    let (Some(wanted), Some(before)) = (wanted(signal), kernel(signal, None)) else {
        return;
    };
    if !is_ours(&before) {
        wanted.note(&before);
        kernel(signal, Some(&in_its_place(&before)));
    }
}

/// Makes this process recover from faults in accesses of this library from now on. Where a library
/// refuses the handler, such faults end the process as before.
pub fn install() {
    alone(|| {
        let own = getpid().as_raw_nonzero().get();
        if OWNER.swap(own, Ordering::AcqRel) != own {
            SIGNALS.into_iter().for_each(take_place);
        }
    });
}

/// After the program set its action past us, while [`install`] was under way in another thread.
pub fn install_again(signal: c_int) {
    alone(|| take_place(signal));
}

/// Whether the program's action for `signal` is kept here, and set by [`replace`].
pub fn is_in_place(signal: c_int) -> bool {
    SIGNALS.contains(&signal)
        && match OWNER.load(Ordering::Acquire) {
            0 => false,
            owner => owner == getpid().as_raw_nonzero().get(),
        }
}

/// sigaction(2) for a signal that [is in place](is_in_place): sets the program's action, if there
/// is a new one, and returns the one before. `None` if the C library refuses.
pub fn replace(signal: c_int, new: Option<&libc::sigaction>) -> Option<libc::sigaction> {
    let wanted = wanted(signal)?;
    alone(|| {
        let before = match new {
            None => kernel(signal, None)?,
            Some(new) => kernel(signal, Some(&in_its_place(new)))?,
        };
        let old = match is_ours(&before) {
            true => libc::sigaction {
                sa_sigaction: wanted.handler.load(Ordering::Relaxed),
                sa_flags: wanted.flags.load(Ordering::Relaxed),
                ..before
            },
            // Set past us.
            false => before,
        };
        if let Some(new) = new {
            wanted.note(new);
        }
        Some(old)
    })
}

/// For a child of fork(2), whose actions are copies of its parent's.
pub fn after_fork_in_child() {
    LOCKED.store(false, Ordering::Release);
    if OWNER.load(Ordering::Acquire) != 0 {
        OWNER.store(getpid().as_raw_nonzero().get(), Ordering::Release);
    }
}
