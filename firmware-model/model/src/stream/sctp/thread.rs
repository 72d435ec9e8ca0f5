//! The thread that has the SCTP ports of a device: it waits for what peers send, for what is due,
//! and for what streams and listeners ask for. The library's associations cannot go from one thread
//! to another.

use super::super::descriptor::{Descriptor, Descriptors};
use super::endpoint::MakeEndpoint;
use super::port::Port;
use super::sessions::{SharedSessions, new_eventfd};
use crate::sys;
use crate::sys::thread_start::ThreadStart;
use crate::tuning::{NICE, SLICE_NS};
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;
use std::collections::HashMap;
use std::fmt;
use std::mem;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};
use urnic_sync::Mutex;

/// Events taken at once.
const BATCH: usize = 32;
/// The number of the eventfd among those of the ports.
const WAKE: u64 = u64::MAX;
/// The longest wait: associations without sessions end, and ports without associations are closed.
const LONGEST_WAIT: Duration = Duration::from_secs(1);
/// Pause of the thread after its descriptors were closed.
const LOST: Duration = Duration::from_millis(20);
/// The longest wait for peers at the end of the device, and the pause between two looks.
const FINISH: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(1);
const STACK: usize = 256 << 10;

/// A port that the thread is to have.
pub(super) struct NewPort {
    pub(super) endpoint: MakeEndpoint,
    pub(super) sessions: SharedSessions,
}

impl fmt::Debug for NewPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewPort").finish_non_exhaustive()
    }
}

/// The thread, as the streams and listeners see it.
#[derive(Debug)]
pub(super) struct Thread {
    pub(super) descriptors: Arc<Descriptors>,
    epoll: Descriptor,
    /// An eventfd, which wakes the thread.
    wake: Descriptor,
    /// The thread has been asked to look, and has not yet.
    asked: AtomicBool,
    ended: AtomicBool,
    new: Mutex<Vec<NewPort>>,
    handle: Mutex<Option<JoinHandle<()>>>,
}

impl Thread {
    pub(super) fn start(descriptors: &Arc<Descriptors>, start: ThreadStart) -> Result<Arc<Thread>, Errno> {
        let epoll = descriptors.adopt(epoll::create(CreateFlags::CLOEXEC)?)?;
        let wake = new_eventfd(descriptors)?;
        epoll::add(&epoll, &wake, EventData::new_u64(WAKE), EventFlags::IN)?;
        let thread = Arc::new(Thread {
            descriptors: descriptors.clone(),
            epoll,
            wake,
            asked: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            new: Mutex::default(),
            handle: Mutex::default(),
        });
        let runs = thread.clone();
        let builder = Builder::new().name("urnic-sctp".to_owned()).stack_size(STACK);
        let run = Box::new(move || {
            sys::ask_for_prompt_running(SLICE_NS, NICE);
            Running::new(&runs).run();
        });
        let handle = sys::with_signals_blocked(|| (start.0)(builder, run));
        let handle = handle.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))?;
        *thread.handle.lock() = Some(handle);
        Ok(thread)
    }

    /// Gives the thread a port.
    pub(super) fn add(&self, port: NewPort) {
        self.new.lock().push(port);
        self.ask();
    }

    /// Has the thread look at its sessions.
    pub(super) fn ask(&self) {
        if !self.asked.swap(true, Ordering::SeqCst) {
            // It fails only if the counter is full, which wakes as well.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    /// Ends the thread. `waits`: until it has ended.
    pub(super) fn end(&self, waits: bool) {
        self.ended.store(true, Ordering::SeqCst);
        let handle = self.handle.lock().take();
        self.asked.store(false, Ordering::SeqCst);
        self.ask();
        match handle {
            // The thread can end only by a panic, which has been reported.
            Some(handle) if waits => drop(handle.join()),
            other => mem::forget(other),
        }
    }
}

/// What the thread has.
struct Running<'a> {
    thread: &'a Thread,
    begun: Instant,
    ports: HashMap<u64, Port>,
    next: u64,
}

impl Drop for Running<'_> {
    /// Also if it panics: nobody would serve the sessions.
    fn drop(&mut self) {
        self.ports.values().for_each(Port::abandon);
    }
}

impl Running<'_> {
    fn new(thread: &Thread) -> Running<'_> {
        Running {
            thread,
            begun: Instant::now(),
            ports: HashMap::new(),
            next: 0,
        }
    }

    fn run(&mut self) {
        while !self.thread.ended.load(Ordering::SeqCst) {
            let ready = self.wait();
            let is_asked = self.thread.asked.swap(false, Ordering::SeqCst);
            self.take_new();
            let now = self.begun.elapsed();
            for (number, port) in &mut self.ports {
                let is_due = port.timeout().is_some_and(|due| due <= now);
                if is_asked || is_due || ready.contains(number) {
                    port.run(now);
                }
            }
            self.ports.retain(|_, port| !port.close_if_unused());
        }
        self.finish();
        let now = self.begun.elapsed();
        self.ports.values_mut().for_each(|port| port.end(now));
    }

    /// The device ends: waits for a limited time until peers have what was sent.
    fn finish(&mut self) {
        let until = self.begun.elapsed() + FINISH;
        loop {
            let now = self.begun.elapsed();
            self.ports.values_mut().for_each(|port| port.run(now));
            if now >= until || self.ports.values_mut().all(Port::is_quiet) {
                return;
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn take_new(&mut self) {
        for new in mem::take(&mut *self.thread.new.lock()) {
            let number = EventData::new_u64(self.next);
            let endpoint = (new.endpoint)();
            if let Some(descriptor) = endpoint.descriptor()
                && let Err(errno) = epoll::add(&self.thread.epoll, descriptor, number, EventFlags::IN)
            {
                tracing::error!(%errno, "an SCTP port cannot be watched");
            }
            let port = Port::new(endpoint, self.thread.descriptors.clone(), new.sessions);
            self.ports.insert(self.next, port);
            self.next += 1;
        }
    }

    /// Waits until there is something to do; returns the numbers of ports with something to take.
    fn wait(&self) -> Vec<u64> {
        let now = self.begun.elapsed();
        let due = self.ports.values().filter_map(Port::timeout).min();
        let limit = due.map_or(LONGEST_WAIT, |due| due.saturating_sub(now).min(LONGEST_WAIT));
        // Kernels before 5.11 count in milliseconds.
        let limit = Duration::from_millis(u64::try_from(limit.as_micros().div_ceil(1000)).unwrap_or(0));
        let timeout = Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        };
        let mut events = [MaybeUninit::<Event>::uninit(); BATCH];
        let Ok((ready, _)) = epoll::wait(&self.thread.epoll, &mut events, Some(&timeout)) else {
            // The program has closed the device's descriptors: the thread must not spin.
            std::thread::sleep(LOST);
            return Vec::new();
        };
        let numbers: Vec<u64> = ready.iter().map(|event| event.data.u64()).collect();
        if numbers.contains(&WAKE) {
            let _ = rustix::io::read(&self.thread.wake, &mut [0u8; 8]);
        }
        numbers
    }
}
