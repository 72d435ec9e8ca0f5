//! Where Yama's `ptrace_scope` is 1, processes reach each other's memory only if they allow it.

use rustix::process::{PTracer, Pid, getpid, set_ptracer};
use std::sync::atomic::{AtomicU64, Ordering};

/// A process, and the number of values of [`Traceable`] that it has. (A forked child has a copy of
/// the parent's, and none of its permission.)
static COUNT: AtomicU64 = AtomicU64::new(0);

/// While a value lives, Yama lets processes of this user trace this one as if it were off
/// (`PR_SET_PTRACER`): the kernel has one such permission for a process, of which it tells nothing,
/// and it cannot name more than one process. Where Yama is off the call has no effect.
#[derive(Debug)]
pub(super) struct Traceable {
    process: Pid,
}

/// Counts one more, or one less, for this process; returns how many there are.
fn count(process: Pid, change: i32) -> u32 {
    let process = u64::from(process.as_raw_nonzero().get().cast_unsigned()) << 32;
    let mut before = COUNT.load(Ordering::Relaxed);
    loop {
        let own = if before >> 32 << 32 == process {
            before as u32
        } else {
            0
        };
        let now = own.saturating_add_signed(change);
        let changed = process | u64::from(now);
        match COUNT.compare_exchange_weak(before, changed, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => return now,
            Err(other) => before = other,
        }
    }
}

impl Traceable {
    pub(super) fn new() -> Traceable {
        let process = getpid();
        count(process, 1);
        // Each time: another thread may be about to take it back. It fails where the kernel has no
        // Yama.
        let _ = set_ptracer(PTracer::Any);
        Traceable { process }
    }
}

impl Drop for Traceable {
    fn drop(&mut self) {
        if getpid() != self.process || count(self.process, -1) > 0 {
            return;
        }
        let _ = set_ptracer(PTracer::None);
        // Another thread may have made one meanwhile.
        if count(self.process, 0) > 0 {
            let _ = set_ptracer(PTracer::Any);
        }
    }
}
