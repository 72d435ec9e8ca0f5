//! The signal state that this process was started with, which `urnic run` passes to the program.
//!
//! Rust's runtime ignores SIGPIPE before `main`, and `std::process::Command` starts a program with
//! the default action and an empty mask. A program under `urnic run` must find the same state as
//! without urnic: SIGPIPE ignored by a parent stays ignored, and blocked signals stay blocked.

use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use urnic_sys::signals::{self, Signals};

/// SIGPIPE was ignored when this process started.
static PIPE_IGNORED: AtomicBool = AtomicBool::new(false);
/// SIGCHLD was ignored. This process gives it its default action to wait for a child.
static CHLD_IGNORED: AtomicBool = AtomicBool::new(false);

// Runs before Rust's own initialisation, which is a part of the C `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = remember;

extern "C" fn remember() {
    let ignored = |signal| signals::action(signal).is_some_and(|action| action.sa_sigaction == libc::SIG_IGN);
    PIPE_IGNORED.store(ignored(libc::SIGPIPE), Ordering::Relaxed);
    CHLD_IGNORED.store(ignored(libc::SIGCHLD), Ordering::Relaxed);
}

/// Makes `command` start with the signal state that this process was started with.
pub(crate) fn passed_on(command: &mut Command) -> &mut Command {
    let blocked = Signals::blocked();
    // SAFETY: the closure makes async-signal-safe calls with values that it owns, and allocates
    // nothing.
    unsafe {
        command.pre_exec(move || {
            if PIPE_IGNORED.load(Ordering::Relaxed) {
                libc::signal(libc::SIGPIPE, libc::SIG_IGN);
            }
            if CHLD_IGNORED.load(Ordering::Relaxed) {
                libc::signal(libc::SIGCHLD, libc::SIG_IGN);
            }
            blocked.be_mask();
            Ok(())
        })
    }
}
