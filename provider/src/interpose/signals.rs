//! The program's actions for SIGSEGV and SIGBUS, while the device in this process has a handler for
//! them (`fault` in the firmware model).
//!
//! The program sets and queries its own action, as if the device's handler did not exist. Other
//! signals, and calls of a process without an open device, are passed on unchanged. The C library's
//! functions here call each other without any interposed function; so each of them is interposed.

use std::ffi::c_int;

use libc::sighandler_t;
use urnic_model::host::fault;
use urnic_sys::Plain;
use urnic_sys::signals::Signals;

use super::{exported, missing};
use crate::from_c::{Copied, FromC, Out};
use crate::guard::set_errno;
use crate::real;

/// The value that sigset(3) takes and returns for a blocked signal (`SIG_HOLD`).
const HOLD: sighandler_t = 2;

/// Called after the program has set an action: the device may have installed its handler since.
fn keep_handler(signal: c_int) {
    if fault::is_in_place(signal) {
        fault::install_again(signal);
    }
}

/// Sets and returns the program's action for a signal that the plug-in handles.
fn act(signal: c_int, new: Option<libc::sigaction>, old: Option<Out<'_, libc::sigaction>>) -> c_int {
    let Some(before) = fault::replace(signal, new.as_ref()) else {
        // The C library has set errno.
        return -1;
    };
    if let Some(mut old) = old {
        old.set(before);
    }
    0
}

macro_rules! sigactions {
    ($($name:ident)*) => {$(
        exported! { $name(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int }
        unsafe extern "C-unwind" fn $name(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int {
            let Some(next) = real::$name.get() else { return missing(-1) };
            if fault::is_in_place(signal) {
                // SAFETY: each null, or the C caller's action, which may be where the old one goes.
                let (new, old) = unsafe { (Option::<Copied<_>>::from_c(new), Option::<Out<_>>::from_c(old)) };
                return act(signal, new.map(|new| new.0), old);
            }
            // SAFETY: the C caller's arguments.
            let answer = unsafe { next(signal, new, old) };
            if answer == 0 && !new.is_null() {
                keep_handler(signal);
            }
            answer
        }
    )*};
}
sigactions! { sigaction __sigaction }

/// Sets `handler` for a signal that the plug-in handles; returns the previous handler.
fn set(signal: c_int, handler: sighandler_t, flags: c_int, masks_itself: bool) -> sighandler_t {
    if handler == libc::SIG_ERR {
        set_errno(rustix::io::Errno::INVAL);
        return libc::SIG_ERR;
    }
    let mut new = libc::sigaction::zeroes();
    new.sa_sigaction = handler;
    new.sa_flags = flags;
    if masks_itself {
        new.sa_mask = Signals::of(&[signal]).as_raw();
    }
    fault::replace(signal, Some(&new)).map_or(libc::SIG_ERR, |old| old.sa_sigaction)
}

/// One line per function: its flags, and whether the signal is in its own mask (signal(2),
/// "Portability").
macro_rules! signals {
    ($($name:ident: $flags:expr, $masks_itself:expr;)*) => {$(
        exported! { $name(signal: c_int, handler: sighandler_t) -> sighandler_t }
        unsafe extern "C-unwind" fn $name(signal: c_int, handler: sighandler_t) -> sighandler_t {
            let Some(next) = real::$name.get() else { return missing(libc::SIG_ERR) };
            if fault::is_in_place(signal) {
                return set(signal, handler, $flags, $masks_itself);
            }
            // SAFETY: the C caller's arguments.
            let before = unsafe { next(signal, handler) };
            if before != libc::SIG_ERR {
                keep_handler(signal);
            }
            before
        }
    )*};
}
signals! {
    signal: libc::SA_RESTART, true;
    bsd_signal: libc::SA_RESTART, true;
    ssignal: libc::SA_RESTART, true;
    sysv_signal: libc::SA_RESETHAND | libc::SA_NODEFER, false;
    __sysv_signal: libc::SA_RESETHAND | libc::SA_NODEFER, false;
}

exported! { sigset(signal: c_int, handler: sighandler_t) -> sighandler_t }
unsafe extern "C-unwind" fn sigset(signal: c_int, handler: sighandler_t) -> sighandler_t {
    let Some(next) = real::sigset.get() else {
        return missing(libc::SIG_ERR);
    };
    if !fault::is_in_place(signal) {
        // SAFETY: the C caller's arguments.
        return unsafe { next(signal, handler) };
    }
    let before = match handler {
        HOLD => fault::replace(signal, None).map_or(libc::SIG_ERR, |old| old.sa_sigaction),
        handler => set(signal, handler, 0, false),
    };
    if before == libc::SIG_ERR {
        return before;
    }
    let signals = Signals::of(&[signal]);
    let mask = if handler == HOLD {
        signals.block()
    } else {
        signals.unblock()
    };
    if mask.contains(signal) { HOLD } else { before }
}

exported! { sigignore(signal: c_int) -> c_int }
extern "C-unwind" fn sigignore(signal: c_int) -> c_int {
    let Some(next) = real::sigignore.get() else {
        return missing(-1);
    };
    if fault::is_in_place(signal) {
        let before = set(signal, libc::SIG_IGN, 0, false);
        return if before == libc::SIG_ERR { -1 } else { 0 };
    }
    next(signal)
}

exported! { siginterrupt(signal: c_int, interrupts: c_int) -> c_int }
extern "C-unwind" fn siginterrupt(signal: c_int, interrupts: c_int) -> c_int {
    let Some(next) = real::siginterrupt.get() else {
        return missing(-1);
    };
    // The C library also stores the setting for later calls of signal(2). The code below restores
    // the device's handler.
    let answer = next(signal, interrupts);
    if answer == 0
        && fault::is_in_place(signal)
        && let Some(mut action) = fault::replace(signal, None)
    {
        match interrupts {
            0 => action.sa_flags |= libc::SA_RESTART,
            _ => action.sa_flags &= !libc::SA_RESTART,
        }
        fault::replace(signal, Some(&action));
    }
    answer
}

/// Gives the device the function that installs its handler.
pub(crate) fn look_up() {
    if let Some(sigaction) = real::sigaction.get() {
        fault::set_action_by(sigaction);
    }
}
