//! The thread that waits for the function's interrupts, and detects that the function is gone.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::inner::Inner;
use urnic_device::bus::Signal;
use urnic_process::fds::InternalFd;
use urnic_process::signals;
use urnic_process::threads;

/// Time between two reads of a register, which check whether the device responds: no other event
/// reports that the process of a device died.
const LOOK_EVERY: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// Starts the thread, with all signals blocked.
///
/// # Errors
/// `EAGAIN` if the kernel permits no more threads.
pub(super) fn start(inner: Arc<Inner>) -> Result<std::thread::JoinHandle<()>, Errno> {
    let thread = std::thread::Builder::new()
        .name("urnic-vfio".to_owned())
        .stack_size(256 << 10);
    signals::blocked(|| threads::start(thread, move || serve(&inner)))
        .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))
}

fn serve(inner: &Inner) {
    let sources = &inner.sources;
    let Some(wake) = sources.wake.get() else { return };
    let special = [sources.error.as_ref(), sources.request.as_ref()].map(|fd| fd.and_then(InternalFd::get));
    let vectors: Vec<BorrowedFd<'_>> = sources.vectors.iter().filter_map(InternalFd::get).collect();
    // The wake-up descriptor replaces the descriptors of interrupts that the function lacks.
    let fds: Vec<BorrowedFd<'_>> = std::iter::once(wake)
        .chain(special.map(|fd| fd.unwrap_or(wake)))
        .chain(vectors.iter().copied())
        .collect();
    let mut reported = false;
    while !inner.is_stopped() {
        let mut polled: Vec<PollFd<'_>> = fds
            .iter()
            .map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN))
            .collect();
        if poll(&mut polled, (!reported).then_some(&LOOK_EVERY)) == Ok(0) {
            inner.look();
        }
        let rang: Vec<bool> = polled
            .iter()
            .map(|fd| fd.revents().contains(PollFlags::IN))
            .collect();
        let rang = |i: usize| rang.get(i) == Some(&true);
        if rang(0) {
            let _ = rustix::io::read(wake, &mut [0; 8]);
        }
        if let (true, Some(error)) = (rang(1), special[0]) {
            let _ = rustix::io::read(error, &mut [0; 8]);
            inner.lose("the bus reports an error that it cannot correct");
        }
        for (vector, fd) in vectors.iter().enumerate().filter(|(i, _)| rang(3 + i)) {
            let _ = rustix::io::read(fd, &mut [0; 8]);
            inner.notify(Signal::Interrupt(vector as u32));
        }
        let wanted_back = rang(2) && special[1].is_some();
        if wanted_back {
            inner.lose("it is being taken out");
        }
        if inner.is_lost() && !std::mem::replace(&mut reported, true) {
            inner.silence();
            inner.notify(Signal::Lost);
        }
        // Returned only after the report: closing a function that does not respond takes the kernel
        // a minute, in which this thread could not end.
        if wanted_back {
            inner.give_back();
            return;
        }
    }
}
