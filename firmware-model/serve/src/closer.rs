//! Closes sockets of clients that were rejected, or could not be served.
//!
//! Data that a client has sent and the server has not read may carry descriptors whose close
//! blocks; they are closed together with the socket. The server's own thread must not wait for
//! that.

use super::interruption::Interruptible;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

/// Sockets that may wait to be closed. At this number no further client is accepted, so there are
/// at most this many, and those of clients that were accepted before.
const MAX_WAITING: usize = 64;

/// A socket, or what owns one.
type Owner = Box<dyn Send>;

/// A thread that closes sockets.
#[derive(Debug)]
pub(crate) struct Closer {
    sender: Sender<Owner>,
    waiting: Arc<AtomicUsize>,
    threads: Arc<Interruptible>,
    thread: JoinHandle<()>,
}

impl Closer {
    /// Starts the thread.
    pub(crate) fn start() -> std::io::Result<Closer> {
        let (sender, receiver) = channel::<Owner>();
        let waiting = Arc::new(AtomicUsize::new(0));
        let threads = Arc::new(Interruptible::default());
        let (of_thread, left) = (threads.clone(), waiting.clone());
        let thread = std::thread::Builder::new()
            .name("urnic-closer".to_owned())
            .spawn(move || {
                of_thread.enter();
                for owner in receiver {
                    drop(owner);
                    left.fetch_sub(1, Ordering::Release);
                }
            })?;
        Ok(Closer {
            sender,
            waiting,
            threads,
            thread,
        })
    }

    /// Whether as many sockets wait as may.
    pub(crate) fn is_full(&self) -> bool {
        self.waiting.load(Ordering::Acquire) >= MAX_WAITING
    }

    /// Whether a socket waits to be closed.
    pub(crate) fn is_busy(&self) -> bool {
        self.waiting.load(Ordering::Acquire) > 0
    }

    /// Closes a socket. The peer sees it at once.
    pub(crate) fn close(&self, socket: OwnedFd) {
        let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Both);
        self.drop_owner(Box::new(socket));
    }

    /// Drops a value that owns the last descriptor of a socket.
    pub(crate) fn drop_owner(&self, owner: Owner) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        // The thread runs as long as this sender exists.
        let _ = self.sender.send(owner);
    }

    /// Interrupts a blocking close in the thread.
    pub(crate) fn interrupt_if_busy(&self) {
        if self.is_busy() {
            self.threads.interrupt();
        }
    }

    /// Ends the thread if all sockets are closed.
    pub(crate) fn finish(self) -> Result<(), Closer> {
        if self.is_busy() {
            return Err(self);
        }
        drop(self.sender);
        // The thread can only fail by a panic, which has been reported.
        let _ = self.thread.join();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use urnic_sync::{Condvar, Mutex};

    /// Whether closing goes on, and how many were closed by another thread than the closer's.
    #[derive(Default)]
    struct Gate {
        open: Mutex<bool>,
        opened: Condvar,
        elsewhere: AtomicUsize,
    }

    /// Its close waits at the gate.
    struct Held(Arc<Gate>);

    impl Drop for Held {
        fn drop(&mut self) {
            if std::thread::current().name() != Some("urnic-closer") {
                self.0.elsewhere.fetch_add(1, Ordering::Relaxed);
                return;
            }
            let open = self.0.open.lock();
            drop(self.0.opened.wait_while(open, |open| !*open));
        }
    }

    #[test]
    fn the_caller_closes_no_socket_however_many_come() {
        let mut closer = Closer::start().unwrap();
        let gate = Arc::new(Gate::default());
        for _ in 0..4 * MAX_WAITING {
            closer.drop_owner(Box::new(Held(gate.clone())));
        }
        assert!(closer.is_full());
        *gate.open.lock() = true;
        gate.opened.notify_all();
        while let Err(busy) = closer.finish() {
            closer = busy;
            std::thread::yield_now();
        }
        assert_eq!(gate.elsewhere.load(Ordering::Relaxed), 0);
        assert_eq!(Arc::strong_count(&gate), 1, "all are closed");
    }
}
