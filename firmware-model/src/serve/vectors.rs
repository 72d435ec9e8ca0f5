//! Interrupt vectors: each tells an eventfd of the client.

use crate::device::Interrupts;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl, readlink};
use rustix::io::Errno;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

#[derive(Debug, Default)]
struct Vector {
    eventfd: Option<OwnedFd>,
    masked: bool,
    /// Raised while nobody could be told.
    pending: bool,
}

impl Vector {
    fn raise(&mut self) {
        self.pending = true;
        self.tell();
    }

    fn tell(&mut self) {
        if self.pending
            && !self.masked
            && let Some(eventfd) = &self.eventfd
        {
            // It is full only if the client does not look, and then it will find that something was there.
            let _ = rustix::io::write(eventfd, &1u64.to_ne_bytes());
            self.pending = false;
        }
    }
}

/// The vectors of a function. An interrupt that finds no eventfd, or a masked vector, is pending until that changes.
#[derive(Debug)]
pub(crate) struct Vectors(Vec<Mutex<Vector>>);

impl Vectors {
    pub(crate) fn new(count: u32) -> Vectors {
        Vectors((0..count).map(|_| Mutex::default()).collect())
    }

    fn with<T>(&self, vector: u32, act: impl FnOnce(&mut Vector) -> T) -> Option<T> {
        let lock: &Mutex<Vector> = self.0.get(vector as usize)?;
        let mut vector: MutexGuard<'_, Vector> = lock.lock().unwrap_or_else(PoisonError::into_inner);
        Some(act(&mut vector))
    }

    /// From now on a vector tells this eventfd, or nobody.
    pub(crate) fn assign(&self, vector: u32, eventfd: Option<OwnedFd>) {
        self.with(vector, |vector| {
            vector.eventfd = eventfd;
            vector.tell();
        });
    }

    /// Masks or unmasks a vector.
    pub(crate) fn mask(&self, vector: u32, masked: bool) {
        self.with(vector, |vector| {
            vector.masked = masked;
            vector.tell();
        });
    }

    /// Whether an interrupt waits to be told.
    pub(crate) fn is_pending(&self, vector: u32) -> bool {
        self.with(vector, |vector| vector.pending).unwrap_or(false)
    }

    /// Forgets what is pending, as a reset does.
    pub(crate) fn forget_pending(&self) {
        for vector in 0..self.0.len() as u32 {
            self.with(vector, |vector| (vector.pending, vector.masked) = (false, false));
        }
    }
}

impl Interrupts for Vectors {
    fn raise(&self, vector: u32) {
        self.with(vector, Vector::raise);
    }
}

/// Checks that a descriptor is an eventfd, and makes writes to it return at once, whatever the client does with its end. (Anything else, a
/// pipe that nobody reads say, could make the device wait.)
pub(crate) fn check_eventfd(fd: &OwnedFd) -> Result<(), Errno> {
    let name = readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new())?;
    if name.as_bytes() != b"anon_inode:[eventfd]" {
        return Err(Errno::INVAL);
    }
    fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    fn count(fd: &OwnedFd) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(fd, &mut bytes).map_or(0, |_| u64::from_ne_bytes(bytes))
    }

    fn an_eventfd() -> (OwnedFd, OwnedFd) {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        check_eventfd(&fd).unwrap();
        (fd.try_clone().unwrap(), fd)
    }

    #[test]
    fn an_interrupt_that_nobody_hears_is_told_later() {
        let vectors = Vectors::new(2);
        vectors.raise(1);
        vectors.raise(1);
        assert!(vectors.is_pending(1) && !vectors.is_pending(0));
        let (theirs, ours) = an_eventfd();
        vectors.assign(1, Some(ours));
        assert_eq!(count(&theirs), 1);
        vectors.mask(1, true);
        vectors.raise(1);
        assert_eq!(count(&theirs), 0);
        vectors.mask(1, false);
        assert_eq!(count(&theirs), 1);
        assert!(!vectors.is_pending(1));
        // There is no such vector.
        vectors.raise(2);
        vectors.assign(u32::MAX, None);
    }

    #[test]
    fn a_full_eventfd_stops_nobody() {
        let vectors = Vectors::new(1);
        let (theirs, ours) = an_eventfd();
        rustix::io::write(&theirs, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        vectors.assign(0, Some(ours));
        vectors.raise(0);
        assert_eq!(count(&theirs), u64::MAX - 1);
    }

    #[test]
    fn only_eventfds_are_taken() {
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        assert_eq!(check_eventfd(&reader), Err(Errno::INVAL));
        let null = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(check_eventfd(&null.into()), Err(Errno::INVAL));
    }
}
