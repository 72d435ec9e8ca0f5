//! Interrupt vectors: each signals an eventfd of the client.

use super::interruption::Interruptible;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use urnic_model::Interrupts;
use urnic_sync::{Mutex, MutexGuard};

#[derive(Debug, Default)]
struct Vector {
    eventfd: Option<OwnedFd>,
    masked: bool,
    /// Raised while it could not be signalled.
    pending: bool,
}

impl Vector {
    fn raise(&mut self) {
        self.pending = true;
        self.signal();
    }

    fn signal(&mut self) {
        if self.pending
            && !self.masked
            && let Some(eventfd) = &self.eventfd
        {
            // The eventfd is full only if the client does not read it; a later read then finds that
            // an interrupt came.
            if rustix::io::write(eventfd, &1u64.to_ne_bytes()) == Err(Errno::INTR) {
                // The client filled the eventfd, made it block again, and disconnected: this thread
                // was interrupted.
                self.eventfd = None;
            }
            self.pending = false;
        }
    }
}

/// The vectors of a function. An interrupt of a vector that is masked or has no eventfd stays
/// pending until that changes.
#[derive(Debug)]
pub(crate) struct Vectors {
    vectors: Vec<Mutex<Vector>>,
    threads: Arc<Interruptible>,
}

impl Vectors {
    /// Creates `count` vectors. The device's own thread, which raises most of them, joins
    /// `threads`.
    pub(crate) fn new(count: u32, threads: Arc<Interruptible>) -> Vectors {
        Vectors {
            vectors: (0..count).map(|_| Mutex::default()).collect(),
            threads,
        }
    }

    fn with<T>(&self, vector: u32, act: impl FnOnce(&mut Vector) -> T) -> Option<T> {
        let lock: &Mutex<Vector> = self.vectors.get(vector as usize)?;
        let mut vector: MutexGuard<'_, Vector> = lock.lock();
        Some(act(&mut vector))
    }

    /// Sets the eventfd that a vector signals, or none.
    pub(crate) fn assign(&self, vector: u32, eventfd: Option<OwnedFd>) {
        if let Some(eventfd) = &eventfd {
            // A client that does not read must not block the device. The client can clear the flag,
            // which harms only itself.
            let _ = fcntl_getfl(eventfd).and_then(|flags| fcntl_setfl(eventfd, flags | OFlags::NONBLOCK));
        }
        self.with(vector, |vector| {
            vector.eventfd = eventfd;
            vector.signal();
        });
    }

    /// Masks or unmasks a vector.
    pub(crate) fn mask(&self, vector: u32, masked: bool) {
        self.with(vector, |vector| {
            vector.masked = masked;
            vector.signal();
        });
    }

    /// Whether a vector's interrupt waits to be signalled.
    pub(crate) fn is_pending(&self, vector: u32) -> bool {
        self.with(vector, |vector| vector.pending).unwrap_or(false)
    }

    /// Clears pending interrupts and masks, as a reset does.
    pub(crate) fn clear_pending(&self) {
        for vector in 0..self.vectors.len() as u32 {
            self.with(vector, |vector| (vector.pending, vector.masked) = (false, false));
        }
    }
}

impl Interrupts for Vectors {
    fn raise(&self, vector: u32) {
        self.with(vector, Vector::raise);
    }

    fn on_own_thread(&self) {
        self.threads.enter();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    fn count(fd: &OwnedFd) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(fd, &mut bytes).map_or(0, |_| u64::from_ne_bytes(bytes))
    }

    fn eventfd_pair() -> (OwnedFd, OwnedFd) {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        (fd.try_clone().unwrap(), fd)
    }

    #[test]
    fn a_pending_interrupt_is_signalled_later() {
        let vectors = Vectors::new(2, Arc::default());
        vectors.raise(1);
        vectors.raise(1);
        assert!(vectors.is_pending(1) && !vectors.is_pending(0));
        let (theirs, ours) = eventfd_pair();
        vectors.assign(1, Some(ours));
        assert_eq!(count(&theirs), 1);
        vectors.mask(1, true);
        vectors.raise(1);
        assert_eq!(count(&theirs), 0);
        vectors.mask(1, false);
        assert_eq!(count(&theirs), 1);
        assert!(!vectors.is_pending(1));
        // The vector does not exist.
        vectors.raise(2);
        vectors.assign(u32::MAX, None);
    }

    #[test]
    fn a_full_eventfd_does_not_block() {
        let vectors = Vectors::new(1, Arc::default());
        let (theirs, ours) = eventfd_pair();
        rustix::io::write(&theirs, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        vectors.assign(0, Some(ours));
        vectors.raise(0);
        assert_eq!(count(&theirs), u64::MAX - 1);
    }
}
