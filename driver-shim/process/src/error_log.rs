//! Complaints that a program would otherwise see several times in a row: one that looks for devices
//! tries several paths.

use std::cell::Cell;
use std::sync::Mutex;

thread_local!(static TIMES: Cell<u32> = const { Cell::new(0) });

/// How often this thread had something to complain of, said or not.
pub fn times() -> u32 {
    TIMES.get()
}

/// An error in the log, unless it is the one that was said last.
pub fn once(complaint: String) {
    TIMES.set(TIMES.get().wrapping_add(1));
    static LAST: Mutex<String> = Mutex::new(String::new());
    // Another thread says something just now; in a forked child it may be one of the parent's.
    let Ok(mut last) = LAST.try_lock() else { return };
    if *last != complaint {
        tracing::error!("{complaint}");
        *last = complaint;
    }
}
