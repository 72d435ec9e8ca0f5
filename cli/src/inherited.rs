//! The signal state that this process was started with, which `urnic run` passes to the program.
//!
//! Rust's runtime ignores SIGPIPE before `main`, and `std::process::Command` starts a program with
//! the default action and an empty mask. A program under `urnic run` must find the same state as
//! without urnic: SIGPIPE ignored by a parent stays ignored, and blocked signals stay blocked.

use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

/// SIGPIPE was ignored when this process started.
static PIPE_IGNORED: AtomicBool = AtomicBool::new(false);

// Runs before Rust's own initialisation, which is a part of the C `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = remember;

extern "C" fn remember() {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: without a new action sigaction(2) only fills `action`, a local for which all-zero is
    // valid.
    let action = unsafe {
        libc::sigaction(libc::SIGPIPE, std::ptr::null(), action.as_mut_ptr());
        action.assume_init()
    };
    PIPE_IGNORED.store(action.sa_sigaction == libc::SIG_IGN, Ordering::Relaxed);
}

/// Makes `command` start with the signal state that this process was started with.
pub(crate) fn passed_on(command: &mut Command) -> &mut Command {
    let mut blocked = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: without a new set pthread_sigmask(3) only fills `blocked`, a local for which all-zero
    // is valid.
    let blocked = unsafe {
        libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), blocked.as_mut_ptr());
        blocked.assume_init()
    };
    // SAFETY: the closure makes two async-signal-safe calls with values that it owns, and allocates
    // nothing.
    unsafe {
        command.pre_exec(move || {
            if PIPE_IGNORED.load(Ordering::Relaxed) {
                libc::signal(libc::SIGPIPE, libc::SIG_IGN);
            }
            libc::pthread_sigmask(libc::SIG_SETMASK, &blocked, std::ptr::null_mut());
            Ok(())
        })
    }
}
