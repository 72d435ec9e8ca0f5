//! What a thread of the program does, according to the kernel.

use std::fs;
use std::mem::MaybeUninit;
use std::time::Duration;

use rustix::thread::{Pid, gettid};

/// A thread, and the processor time that it had used at some moment.
#[derive(Debug, Clone, Copy)]
pub struct Activity {
    thread: Pid,
    used: Option<Duration>,
}

impl Activity {
    /// The calling thread, now.
    pub fn here() -> Activity {
        let thread = gettid();
        Activity {
            thread,
            used: used_by(thread),
        }
    }

    /// Whether the thread is doing something else since then: it has used `chance` of processor
    /// time, it sleeps, or it has ended. A thread that waits for a processor, or was stopped, is
    /// not.
    pub fn has_moved_on(&self, chance: Duration) -> bool {
        match (used_by(self.thread), self.used) {
            (Some(now), Some(then)) => now >= then + chance || sleeps(self.thread),
            (None, Some(_)) => true,
            // The clocks cannot be read.
            (_, None) => sleeps(self.thread),
        }
    }
}

/// The processor time that a thread of this process has used; `None` if there is no such thread.
fn used_by(thread: Pid) -> Option<Duration> {
    // The kernel's clocks of threads (linux/posix-timers_types.h, MAKE_THREAD_CPUCLOCK): the
    // inverted number, one bit for a thread's, and the clock: of the scheduler.
    const THREAD: libc::clockid_t = 4;
    const SCHED: libc::clockid_t = 2;
    let clock = (!thread.as_raw_nonzero().get() << 3) | THREAD | SCHED;
    let mut time = MaybeUninit::<libc::timespec>::zeroed();
    // SAFETY: the call writes to `time` only, and an all-zero timespec is a valid one.
    let time = unsafe { (libc::clock_gettime(clock, time.as_mut_ptr()) == 0).then(|| time.assume_init()) }?;
    Some(Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32))
}

/// Whether a thread of this process sleeps in a system call that can be interrupted (`proc(5)`,
/// state `S`). `false` if that cannot be known.
fn sleeps(thread: Pid) -> bool {
    let path = format!("/proc/self/task/{}/stat", thread.as_raw_nonzero());
    // The name of the thread is in parentheses, and may contain some.
    fs::read_to_string(path).is_ok_and(|stat| {
        stat.rsplit_once(") ")
            .is_some_and(|(_, fields)| fields.starts_with('S'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;
    use std::time::Instant;

    const CHANCE: Duration = Duration::from_millis(1);

    /// Waits until a condition is true, which must be soon, whatever else runs on the machine.
    fn becomes(what: &str, is_true: impl Fn() -> bool) {
        let start = Instant::now();
        while !is_true() {
            assert!(start.elapsed() < Duration::from_secs(20), "never: {what}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_thread_that_sleeps_has_moved_on() {
        let (ours, theirs) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        let thread = std::thread::Builder::new().name("a) R (b".to_owned());
        let thread = thread.spawn(move || {
            ours.send(Activity::here()).expect("the test waits");
            let _ = ended.recv();
        });
        let activity = theirs.recv().expect("the thread tells");
        becomes("it sleeps", || activity.has_moved_on(Duration::MAX / 2));
        drop(end);
        thread.expect("a thread").join().expect("no panic");
        becomes("it has ended", || activity.has_moved_on(Duration::MAX / 2));
    }

    #[test]
    fn a_thread_that_works_has_moved_on_after_a_while() {
        let (ours, theirs) = mpsc::channel();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                ours.send(Activity::here()).expect("the test waits");
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
            let activity = theirs.recv().expect("the thread tells");
            assert!(
                !activity.has_moved_on(Duration::from_secs(3600)),
                "it does not sleep"
            );
            becomes("it has used a processor", || activity.has_moved_on(CHANCE));
            stop.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn the_calling_thread_has_not_moved_on() {
        assert!(!Activity::here().has_moved_on(Duration::from_secs(3600)));
    }
}
