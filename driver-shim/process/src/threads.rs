//! New threads in a program that is not urnic's own.

use std::hint::black_box;
use std::io;
use std::sync::mpsc;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

/// The longest wait for a new thread to run. A program may open the device in a constructor of a
/// shared library: there the loader's lock is held, for which the new thread waits.
const LIMIT: Duration = Duration::from_secs(1);

/// Starts a thread, and waits until it runs and has an arena of the allocator.
///
/// A thread makes mappings when it begins: a signal stack, and at its first allocation an arena,
/// which glibc trims by munmap(2). Programs do not expect that opening a device leaves a thread in
/// such calls: libfabric, for example, overwrites the code of munmap(2) afterwards, and a thread in
/// that function crashes.
///
/// # Errors
/// The errors of starting a thread.
pub fn start(builder: Builder, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    let (begun, waits) = mpsc::sync_channel::<()>(1);
    let thread = builder.spawn(move || {
        drop(black_box(Box::new(0u64)));
        drop(begun);
        run();
    })?;
    // Nothing is sent: the thread drops its end.
    let _ = waits.recv_timeout(LIMIT);
    Ok(thread)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// The number of threads of this process with this name. A thread takes its name when it runs.
    fn named(name: &str) -> usize {
        let tasks = fs::read_dir("/proc/self/task").expect("our threads");
        let names = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
        names.filter(|comm| comm.trim() == name).count()
    }

    #[test]
    fn a_started_thread_runs() {
        let mut ends = Vec::new();
        for count in 1..=100 {
            let (end, ended) = mpsc::channel::<()>();
            let builder = Builder::new().name("started".to_owned()).stack_size(128 << 10);
            let wait = move || {
                let _ = ended.recv();
            };
            let thread = start(builder, wait).expect("a thread");
            assert_eq!(named("started"), count);
            ends.push((end, thread));
        }
        for (end, thread) in ends {
            drop(end);
            thread.join().expect("no panic");
        }
    }
}
