//! Suppression of repeated error lines: a program that searches for devices tries several paths,
//! and each attempt fails with the same error.

use std::cell::Cell;
use urnic_sync::Mutex;

thread_local!(static COUNT: Cell<u32> = const { Cell::new(0) });

/// The number of errors of this thread, logged or suppressed.
pub fn count() -> u32 {
    COUNT.get()
}

/// Logs an error, unless the last error logged here was the same.
pub fn log_once(error: String) {
    COUNT.set(COUNT.get().wrapping_add(1));
    static LAST: Mutex<String> = Mutex::new(String::new());
    // Another thread logs an error now; in a forked child it may be a thread of the parent.
    let Some(mut last) = LAST.try_lock() else {
        return;
    };
    if *last != error {
        tracing::error!("{error}");
        *last = error;
    }
}
