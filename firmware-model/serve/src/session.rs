//! The session of one connection, which is one function, and its thread.

use super::endpoint::Endpoint;
use super::faults::Faults;
use super::function::{Disconnect, Function, Hardware, Outgoing};
use super::interruption::Interruptible;
use super::link::{Broken, Link, Received, wait};
use super::memory::{Budget, ClientMemory};
use super::passed::Passed;
use super::remote::Remote;
use super::vectors::Vectors;
use rustix::event::{PollFd, PollFlags};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::thread::sched_yield;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use urnic_device::doorbell::PAGE_LEN;
use urnic_device::registers::fatal;
use urnic_model::config::ModelConfig;
use urnic_model::{Device, Interrupts};
use urnic_vfio_user::{Capabilities, DmaMap, Memory};

/// A client that has not completed the version exchange within this time is disconnected.
const VERSION_TIMEOUT: Duration = Duration::from_secs(10);
/// The thread busy-polls the doorbells for this time after the last one that rang, then sleeps
/// until it is kicked.
const BUSY_POLL: Duration = Duration::from_micros(100);
/// During busy-poll, the number of polls of the doorbells for each read of the socket.
const POLLS_PER_READ: u32 = 8;

/// A function and its client.
pub(super) struct Session {
    link: Arc<Link>,
    memory: Arc<ClientMemory>,
    config: ModelConfig,
    process_vm: bool,
    stop: AtomicBool,
    threads: Arc<Interruptible>,
}

impl Session {
    /// A session for an accepted connection.
    ///
    /// # Errors
    ///
    /// The process has no free descriptor; the socket is returned.
    pub(super) fn new(
        socket: OwnedFd,
        endpoint: &Endpoint,
        budget: Arc<Budget>,
    ) -> Result<Arc<Session>, (Errno, OwnedFd)> {
        let memory = ClientMemory::new(budget).and_then(|memory| {
            let wake = fcntl_dupfd_cloexec(memory.faults().wake(), 0)?;
            Ok((memory, wake))
        });
        let (memory, wake) = match memory {
            Ok(made) => made,
            Err(errno) => return Err((errno, socket)),
        };
        Ok(Arc::new(Session {
            link: Arc::new(Link::new(socket, wake)),
            memory: Arc::new(memory),
            config: endpoint.config.clone(),
            process_vm: endpoint.process_vm,
            stop: AtomicBool::new(false),
            threads: Arc::default(),
        }))
    }

    /// The session's threads, which the server interrupts when the client has gone.
    pub(super) fn threads(&self) -> Arc<Interruptible> {
        self.threads.clone()
    }

    /// Makes [`run`](Session::run) return soon.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = rustix::io::write(self.memory.faults().wake(), &1u64.to_ne_bytes());
    }

    /// Whether the client has gone or been disconnected, so that the session only has to detect it
    /// or to clean up.
    pub(super) fn is_leaving(&self) -> bool {
        self.link.is_leaving()
    }

    /// Ends the client's connection, and with it all waits for the client's replies.
    pub(super) fn cut_off(&self) {
        self.link.disconnect();
    }

    /// Serves the client until it disconnects.
    pub(super) fn run(&self) {
        self.threads.enter();
        let mut wiring = Wiring {
            session: self,
            vectors: Arc::new(Vectors::new(self.config.vectors, self.threads.clone())),
            device: None,
        };
        let Err(Broken) = self.serve(&mut wiring);
        // A driver that detects its device's end completes the open requests itself: the device
        // must not complete them afterwards.
        if let Some(device) = wiring.device.take() {
            // Data that has completed still arrives.
            device.shutdown();
            device.reset();
        }
        self.link.disconnect();
        drop(wiring);
        // Closed here, because another thread may drop the session last.
        self.link.close();
        tracing::info!("client disconnected");
    }

    fn serve(&self, wiring: &mut Wiring<'_>) -> Result<std::convert::Infallible, Broken> {
        let mut function = Function::default();
        let begun = Instant::now();
        let mut last_rung = begun;
        let mut polls = 0u32;
        loop {
            let mut busy = self.execute_commands(&mut function, wiring)?;
            polls = polls.wrapping_add(1);
            if polls.is_multiple_of(POLLS_PER_READ) || busy {
                busy |= self.link.try_receive()? != Received::Empty;
            }
            busy |= wiring.poll();
            self.handle_faults(wiring)?;
            if self.stop.load(Ordering::SeqCst) {
                return Err(Broken);
            }
            if busy {
                last_rung = Instant::now();
            } else if wiring.device.is_some() && last_rung.elapsed() < BUSY_POLL {
                // The thread that rings next may be waiting for this processor.
                sched_yield();
            } else {
                self.sleep(&function, wiring, begun)?;
                last_rung = Instant::now();
                // Most likely a message ended the sleep.
                polls = POLLS_PER_READ - 1;
            }
        }
    }

    /// Executes the commands that have arrived.
    fn execute_commands(&self, function: &mut Function, wiring: &mut Wiring<'_>) -> Result<bool, Broken> {
        let mut any = false;
        while self.memory.faults().is_empty()
            && let Some(message) = self.link.command()
        {
            let mut out = Outgoing::default();
            let done = function.message(message, wiring, &mut out);
            self.link.send(&out)?;
            if done == Err(Disconnect) {
                return Err(self.link.disconnect());
            }
            any = true;
        }
        Ok(any)
    }

    /// Sleeps until there is a message, a fault or a request to stop.
    fn sleep(&self, function: &Function, wiring: &Wiring<'_>, begun: Instant) -> Result<(), Broken> {
        if let Some(device) = &wiring.device {
            device.doorbells_asleep(true);
            if device.scan_doorbells() {
                device.doorbells_asleep(false);
                return Ok(());
            }
        }
        let limit = match function.is_present() {
            true => None,
            false => match VERSION_TIMEOUT.checked_sub(begun.elapsed()) {
                Some(left) => Some(left),
                None => return Err(self.link.disconnect()),
            },
        };
        let wake = self.memory.faults().wake();
        let mut fds = [
            PollFd::from_borrowed_fd(self.link.socket(), PollFlags::IN),
            PollFd::from_borrowed_fd(wake, PollFlags::IN),
        ];
        // A thread that waited for a reply may have queued a command; a command that is queued from
        // now on wakes this thread.
        if !self.link.has_command() {
            wait(&mut fds, limit);
        }
        let _ = rustix::io::read(wake, &mut [0u8; 8]);
        if let Some(device) = &wiring.device {
            device.doorbells_asleep(false);
        }
        Ok(())
    }

    /// Handles a fault: memory vanished under the device, so the device stops with `HOST_MEMORY` as
    /// the reason for its driver.
    fn handle_faults(&self, wiring: &Wiring<'_>) -> Result<(), Broken> {
        if self.memory.faults().is_empty() {
            return Ok(());
        }
        if let Some(device) = &wiring.device {
            device.fail(fatal::HOST_MEMORY);
        }
        let faults = self.memory.faults().take();
        if faults == Faults::Lost {
            tracing::warn!(
                "the client truncated or unmapped memory in use by the device, which is lost: connection closed"
            );
        } else {
            tracing::warn!("the client unmapped memory that the device still used: function stopped");
        }
        self.memory
            .restore_holes(faults)
            .map_err(|_| self.link.disconnect())
    }
}

/// The hardware that the function's messages act on.
struct Wiring<'a> {
    session: &'a Session,
    vectors: Arc<Vectors>,
    /// Set by the first message.
    device: Option<Device>,
}

impl Wiring<'_> {
    /// Polls the doorbells and the network; returns whether a doorbell rang.
    fn poll(&self) -> bool {
        let Some(device) = &self.device else {
            return false;
        };
        let rung = device.scan_doorbells();
        device.progress(0);
        rung
    }
}

impl Hardware for Wiring<'_> {
    fn start(&mut self, client: &Capabilities) -> Result<Option<Memory>, Errno> {
        let session = self.session;
        let remote = Remote::new(session.link.clone(), client, session.process_vm);
        let memory = remote.memory();
        session.memory.set_remote(remote);
        let device = Device::start(
            session.config.clone(),
            session.memory.clone(),
            self.vectors.clone(),
        );
        self.device = Some(device.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?);
        tracing::info!(?memory, "client connected");
        Ok(client.urnic.map(|_| memory))
    }

    fn register(&mut self, offset: u32) -> u32 {
        self.device.as_ref().map_or(0, |device| device.bar0_read(offset))
    }

    fn set_register(&mut self, offset: u32, value: u32) {
        if let Some(device) = &self.device {
            device.bar0_write(offset, value);
        }
    }

    fn doorbells_len(&self) -> u64 {
        let pages = self.device.as_ref().and_then(Device::doorbell_pages);
        pages.map_or(0, |pages| pages.len() as u64)
    }

    fn doorbells(&self) -> Result<OwnedFd, Errno> {
        let pages = self
            .device
            .as_ref()
            .and_then(Device::doorbell_pages)
            .ok_or(Errno::NODEV)?;
        fcntl_dupfd_cloexec(pages.fd(), 0)
    }

    fn doorbells_read(&mut self, offset: u64, into: &mut [u8]) {
        if let Some(pages) = self.device.as_ref().and_then(Device::doorbell_pages) {
            // Inside of the file, as the caller has checked, so the read is complete.
            let _ = rustix::io::pread(pages.fd().as_fd(), into, offset);
        }
    }

    fn ring(&mut self, offset: u64, value: u64) {
        if let Some(device) = &self.device {
            let (page, offset) = (offset / u64::from(PAGE_LEN), offset % u64::from(PAGE_LEN));
            device.doorbell(page as u32, offset as u32, value);
        }
    }

    fn vectors(&self) -> u32 {
        self.session.config.vectors
    }

    fn assign(&mut self, vector: u32, eventfd: Option<OwnedFd>) {
        self.vectors.assign(vector, eventfd);
    }

    fn mask(&mut self, vector: u32, masked: bool) {
        self.vectors.mask(vector, masked);
    }

    fn raise(&mut self, vector: u32) {
        self.vectors.raise(vector);
    }

    fn is_pending(&self, vector: u32) -> bool {
        self.vectors.is_pending(vector)
    }

    fn map(&mut self, map: &DmaMap, file: Option<Passed>) -> Result<(), Errno> {
        self.session.memory.map(map, file)
    }

    fn unmap(&mut self, first: u64, last: u64) -> Result<(), Errno> {
        self.session.memory.unmap(first, last, self.device.as_ref())
    }

    fn reset(&mut self) {
        if let Some(device) = &self.device {
            device.reset();
        }
        self.vectors.clear_pending();
    }
}
