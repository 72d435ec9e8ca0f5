//! Where Yama's `ptrace_scope` is 1, processes reach each other's memory only if they allow it.

use rustix::process::{PTracer, Pid, getpid, set_ptracer};
use std::sync::{Mutex, PoisonError};

/// The number of values of [`Traceable`] in this process.
static COUNT: Mutex<usize> = Mutex::new(0);

/// While a value lives, Yama lets processes of this user trace this one as if it were off
/// (`PR_SET_PTRACER`): the kernel has one such permission for a process, of which it tells nothing,
/// and it cannot name more than one process. Where Yama is off the call has no effect.
#[derive(Debug)]
pub(super) struct Traceable {
    process: Pid,
}

fn count(change: impl FnOnce(usize) -> usize) {
    let mut count = COUNT.lock().unwrap_or_else(PoisonError::into_inner);
    let before = *count;
    *count = change(before);
    let tracer = match (before, *count) {
        (0, 1..) => PTracer::Any,
        (1.., 0) => PTracer::None,
        _ => return,
    };
    // It fails where the kernel has no Yama.
    let _ = set_ptracer(tracer);
}

impl Traceable {
    pub(super) fn new() -> Traceable {
        count(|count| count + 1);
        Traceable { process: getpid() }
    }
}

impl Drop for Traceable {
    fn drop(&mut self) {
        // A forked child has neither the permission nor a lock that can be relied on.
        if getpid() == self.process {
            count(|count| count.saturating_sub(1));
        }
    }
}
