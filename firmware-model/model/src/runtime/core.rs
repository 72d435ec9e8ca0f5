//! The state of the whole device. The rest of the [runtime](crate::runtime) uses it, and so do the
//! commands and the [device](crate::device) that the host sees.

use super::streaming::Streams;
use super::{DoorbellPages, PageUser, Registers, Uar};
use crate::capture::tapped::Tapped;
use crate::config::ModelConfig;
use crate::counters::Counters;
use crate::events::{Effects, EventQueue};
use crate::faulty::Faulty;
use crate::host::{HostMemory, RemoteMemory};
use crate::llp::buffers::BufferPool;
use crate::memory::{MemoryTable, PageRoom, Recent};
use crate::qp::Qp;
use crate::queues::{CompletionQueue, SharedReceiveQueue};
use crate::rdmap::Rendezvous;
use crate::schedule::{Interest, Schedule, Token};
use crate::stream::datagram::DatagramSocket;
use crate::stream::descriptor::Descriptors;
use crate::stream::linger::Lingering;
use crate::stream::roce_port::{RocePorts, ServiceName};
use crate::stream::same_host::SameHost;
use crate::stream::sctp::{Sctp, SctpSettings};
use crate::stream::tcp::Tcp;
use crate::stream::{Ends, Network, Stream};
use crate::table::Table;
use crate::time::{Clock, Now};
use crate::timed;
use crate::timed::Timed;
use crate::transport::{Env, Moved};
use arc_swap::ArcSwapOption;
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use urnic_device::command::Status;
use urnic_device::event::Event;
use urnic_sync::{Mutex, MutexGuard};

/// Event queues by number, from 0.
pub(crate) type EventQueues = BTreeMap<u32, Arc<EventQueue>>;

/// The device's state.
///
/// Lock order: registers (commands) → event queue table, stream or queue pair → completion queue or
/// event queue ring. [`Effects`] are raised with none of them held.
pub(crate) struct Core {
    pub(crate) config: Arc<ModelConfig>,
    pub(crate) host: Arc<dyn HostMemory>,
    /// The host's memory has wrong contents.
    stopped: &'static AtomicBool,
    interrupts: Arc<dyn Interrupts>,
    pub(crate) network: Arc<dyn Network>,
    /// SCTP, in datagrams of that network. `None`: the network has none that arrive by themselves.
    pub(crate) sctp: Option<Sctp>,
    /// The port of the queue pairs that speak RoCE v2.
    pub(crate) roce: Arc<RocePorts>,
    pub(crate) clock: Clock,
    pub(crate) memory: MemoryTable,
    pub(crate) page_room: Arc<PageRoom>,
    pub(crate) buffers: BufferPool,
    /// The counts that belong to no queue pair, and the counts of destroyed queue pairs.
    pub(crate) counters: Counters,
    registers: Mutex<Registers>,
    event_queues: Mutex<EventQueues>,
    /// Event queue 0.
    pub(crate) async_events: ArcSwapOption<EventQueue>,
    /// Page 0.
    pub(crate) own_page: Arc<Uar>,
    pub(crate) uars: Table<Uar>,
    /// Memory of the doorbell pages, if the driver rings in plain memory.
    pub(crate) pages: Option<DoorbellPages>,
    pub(crate) cqs: Table<CompletionQueue>,
    pub(crate) srqs: Table<SharedReceiveQueue>,
    pub(crate) qps: Table<Qp>,
    /// Queue pairs whose peers are on this host, with the progress counts of their streams. The key
    /// is the ends of the stream, the queue pair's own end first. A leaf lock.
    ends: Mutex<HashMap<Ends, (u32, Rendezvous)>>,
    pub(crate) streams: Streams,
    /// UDP ports that no queue pair has yet.
    pub(crate) ports: Ports,
    pub(crate) schedule: Schedule,
    descriptors: Arc<Descriptors>,
    abandoned: AtomicBool,
}

fn secret() -> io::Result<[u64; 5]> {
    let mut seed = [0u64; 5];
    for word in &mut seed {
        let mut bytes = [0u8; 8];
        // A read of 8 bytes is never short once the kernel's generator is seeded.
        getrandom(&mut bytes, GetRandomFlags::empty())?;
        *word = u64::from_ne_bytes(bytes);
    }
    Ok(seed)
}

impl Core {
    pub(crate) fn with_tcp(
        config: ModelConfig,
        host: Arc<dyn HostMemory>,
        interrupts: Arc<dyn Interrupts>,
    ) -> io::Result<Arc<Core>> {
        // Lingering streams are counted in addition to streams that have a queue pair or are in
        // streaming mode.
        let limit = 2 * (config.limits.qps + config.limits.streams) as usize + 64;
        let limit = limit.min(config.limits.descriptors as usize);
        let descriptors = Descriptors::new(limit, config.descriptors);
        let same_host = match config.shares_memory() {
            true => Self::same_host(&descriptors, &config)?,
            false => None,
        };
        let network = Arc::new(Tcp {
            descriptors: descriptors.clone(),
            same_host: same_host.clone(),
        });
        let schedule = Schedule::with_epoll(&descriptors, same_host.clone())?;
        let core = Self::new(
            config,
            host,
            interrupts,
            network,
            Clock::Monotonic,
            schedule,
            descriptors,
        )?;
        if let Some(same_host) = same_host {
            let [proof, ..] = secret()?;
            let host = core.host.remote().and_then(RemoteMemory::process).cloned();
            let exported =
                (core.memory.export(proof, host)).and_then(|(exports, file)| same_host.export(exports, file));
            if let Err(errno) = exported {
                tracing::info!(%errno, "peers on this host cannot reach the device's memory");
            }
        }
        Ok(core)
    }

    /// The resources for connections on this host; `None` if the kernel does not report the user at
    /// the other end.
    fn same_host(descriptors: &Arc<Descriptors>, config: &ModelConfig) -> io::Result<Option<Arc<SameHost>>> {
        match SameHost::new(descriptors, config.thread_start) {
            Ok(same_host) => Ok(Some(Arc::new(same_host))),
            // Resources that are exhausted now would be exhausted for the queue pairs, too.
            Err(errno @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => Err(errno.into()),
            Err(errno) => {
                tracing::info!(%errno, "connections on this host use TCP: the kernel does not report the user of a connection");
                Ok(None)
            }
        }
    }

    pub(crate) fn manual(
        config: ModelConfig,
        host: Arc<dyn HostMemory>,
        interrupts: Arc<dyn Interrupts>,
        network: Arc<dyn Network>,
    ) -> io::Result<Arc<Core>> {
        Self::new(
            config,
            host,
            interrupts,
            network,
            Clock::Manual(AtomicU64::new(0)),
            Schedule::manual(),
            Descriptors::new(0, None),
        )
    }

    fn new(
        config: ModelConfig,
        host: Arc<dyn HostMemory>,
        interrupts: Arc<dyn Interrupts>,
        network: Arc<dyn Network>,
        clock: Clock,
        schedule: Schedule,
        descriptors: Arc<Descriptors>,
    ) -> io::Result<Arc<Core>> {
        let limits = &config.limits;
        let network: Arc<dyn Network> = match &config.faulty {
            Some(name) => Arc::new(Faulty::new(network, urnic_faults::plan(), name)),
            None => {
                urnic_faults::plan().note_passed_by();
                network
            }
        };
        let network: Arc<dyn Network> = match &config.capture {
            Some(capture) => Arc::new(Tapped::new(network, capture.clone())),
            None => network,
        };
        let network: Arc<dyn Network> = match timed::observer() {
            Some(observer) => Arc::new(Timed::new(network, observer)),
            None => network,
        };
        let settings = SctpSettings {
            transport: config.sctp,
            is_watched: config.capture.is_some() || config.faulty.is_some(),
            start: config.thread_start,
        };
        let is_driven = schedule.readiness.is_some();
        let sctp = is_driven.then(|| Sctp::new(network.clone(), settings, descriptors.clone()));
        Ok(Arc::new(Core {
            sctp,
            roce: Arc::new(RocePorts::new(
                network.clone(),
                descriptors.clone(),
                config.thread_start,
            )),
            memory: MemoryTable::new(limits.mrs, limits.mws, limits.pds, secret()?),
            page_room: PageRoom::new(limits.mr_pages as usize),
            buffers: BufferPool::default(),
            counters: Counters::default(),
            registers: Mutex::new(Registers::default()),
            event_queues: Mutex::default(),
            async_events: ArcSwapOption::empty(),
            own_page: Arc::new(Uar::new(0)),
            uars: Table::dense(limits.uars.saturating_sub(1)),
            pages: (config.doorbell_memory)
                .then(|| DoorbellPages::new(limits.uars))
                .transpose()?,
            cqs: Table::new(limits.cqs),
            srqs: Table::new(limits.srqs),
            qps: Table::new(limits.qps),
            ends: Mutex::default(),
            streams: Streams::new(limits.streams),
            ports: Ports::new(limits.streams),
            abandoned: AtomicBool::new(false),
            config: Arc::new(config),
            stopped: host.stopped(),
            host,
            interrupts,
            network,
            clock,
            schedule,
            descriptors,
        }))
    }

    pub(crate) fn registers(&self) -> MutexGuard<'_, Registers> {
        self.registers.lock()
    }

    pub(crate) fn event_queues(&self) -> MutexGuard<'_, EventQueues> {
        self.event_queues.lock()
    }

    pub(crate) fn ends(&self) -> MutexGuard<'_, HashMap<Ends, (u32, Rendezvous)>> {
        self.ends.lock()
    }

    /// The surroundings of a run of the queue pair's engine.
    #[inline]
    pub(crate) fn env<'a>(&'a self, qp: &'a Qp, effects: &'a mut Effects) -> Env<'a> {
        Env {
            qp: &qp.identity,
            memory: &self.memory,
            recent: Recent::default(),
            now: Now::of(&self.clock),
            buffers: &self.buffers,
            counters: &qp.counters,
            effects,
            moved: Moved::default(),
            stopped: self.stopped,
        }
    }

    /// Whether the device must not use the host's memory any more.
    #[inline]
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// The network of a lower layer ([`llp`](urnic_device::stream::llp)).
    pub(crate) fn network_of(&self, is_sctp: bool) -> Result<&dyn Network, Status> {
        match (is_sctp, &self.sctp) {
            (false, _) => Ok(&*self.network),
            (true, Some(sctp)) => Ok(sctp),
            (true, None) => Err(Status::InvalidArgument),
        }
    }

    /// Closes a stream after its `unsent` bytes are sent.
    pub(crate) fn linger(&self, stream: Box<dyn Stream>, unsent: Vec<u8>) {
        if let Some(fd) = stream.descriptor() {
            self.schedule.rewatch(fd, Token::Linger, Interest::InputAndRoom);
        }
        let now = self.clock.now();
        let until = now + self.config.linger;
        self.schedule.linger(Lingering::new(stream, unsent, now, until));
    }

    /// The doorbell page with this number; page 0 always exists.
    pub(crate) fn page(&self, uar: u32) -> Option<Arc<Uar>> {
        match uar {
            0 => Some(self.own_page.clone()),
            _ => self.uars.find(uar).map(|page| page.clone()),
        }
    }

    #[inline]
    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Relaxed)
    }

    /// Async-signal-safe: atomics and system calls only.
    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
        self.descriptors.close_all();
        if let Some(sctp) = &self.sctp {
            sctp.abandon();
        }
        if let Some(capture) = &self.config.capture {
            capture.abandon_in_child();
        }
    }

    #[cfg(test)]
    pub(crate) fn descriptor_numbers(&self) -> Vec<i32> {
        self.descriptors.numbers()
    }

    /// Called at the start of the background thread.
    pub(crate) fn on_own_thread(&self) {
        self.interrupts.on_own_thread();
    }

    /// Raises a vector, with no lock held.
    pub(crate) fn interrupt(&self, vector: u32) {
        self.interrupts.raise(vector);
    }

    /// Posts events, and raises the interrupt if one is requested.
    pub(crate) fn post(&self, queue: &EventQueue, events: impl IntoIterator<Item = Event>) {
        self.post_now(queue, events);
        if queue.waiting() > 0 {
            self.schedule.note_left_over();
        }
    }

    fn post_now(&self, queue: &EventQueue, events: impl IntoIterator<Item = Event>) {
        if queue.post(events) {
            self.interrupt(queue.vector);
        }
        if queue.id == 0 {
            let limit = self.config.limits.waiting_events as usize;
            self.schedule.note_backed_up(queue.waiting() >= limit);
        }
    }

    /// Posts the events that found no room before. Returns whether some events still wait.
    pub(crate) fn post_waiting(&self) -> bool {
        let waiting: Vec<_> = self
            .event_queues()
            .values()
            .filter(|queue| queue.waiting() > 0)
            .cloned()
            .collect();
        waiting.iter().for_each(|queue| self.post_now(queue, []));
        waiting.iter().any(|queue| queue.waiting() > 0)
    }

    /// Whether a command may cause events in a queue: if the driver takes no events, the number
    /// that the device keeps must stay limited.
    pub(crate) fn has_room_for_events(&self, queue: &EventQueue) -> bool {
        queue.waiting() < self.config.limits.waiting_events as usize
    }

    /// Assigns a doorbell slot to a queue, and returns its offset.
    pub(crate) fn enter_page(&self, page: &Uar, user: PageUser) -> u32 {
        let offset = page.enter(user);
        if let Some(pages) = &self.pages {
            pages.watch(page.id, offset);
        }
        offset
    }

    /// Removes the queue with the slot at `offset` from its page.
    pub(crate) fn leave_page(&self, uar: u32, user: PageUser) {
        if let Some(page) = self.page(uar)
            && let Some(offset) = page.leave(user)
            && let Some(pages) = &self.pages
        {
            pages.unwatch(uar, offset);
        }
    }
}

// The destination of the device's interrupts.

/// The destination of the device's interrupts.
pub trait Interrupts: Send + Sync {
    /// Raises a vector. Called from any thread that drives the device, with none of its locks held.
    fn raise(&self, vector: u32);

    /// Called once on the device's own thread, before the thread raises a vector. No call of the
    /// host is on that thread's stack.
    fn on_own_thread(&self) {}
}

// UDP ports that are bound, and that no queue pair has.

/// One port.
#[derive(Debug)]
pub(crate) struct BoundPort {
    pub(crate) sockets: Vec<Box<dyn DatagramSocket>>,
    /// Present if the port's number is that of services. A queue pair does not need it.
    pub(crate) service: Option<ServiceName>,
}

/// Bound ports, by number.
#[derive(Debug)]
pub(crate) struct Ports {
    limit: usize,
    state: Mutex<BoundPorts>,
}

#[derive(Debug, Default)]
struct BoundPorts {
    last: u32,
    bound: HashMap<u32, BoundPort>,
}

impl Ports {
    pub(crate) fn new(limit: u32) -> Ports {
        Ports {
            limit: limit as usize,
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, BoundPorts> {
        self.state.lock()
    }

    /// Keeps a port; `None` if there are too many.
    pub(crate) fn insert(&self, port: BoundPort) -> Option<u32> {
        let mut state = self.state();
        if state.bound.len() >= self.limit {
            return None;
        }
        loop {
            state.last = state.last.wrapping_add(1).max(1);
            let id = state.last;
            if let Entry::Vacant(vacant) = state.bound.entry(id) {
                vacant.insert(port);
                return Some(id);
            }
        }
    }

    /// Removes a port: it belongs to the caller.
    pub(crate) fn take(&self, id: u32) -> Option<BoundPort> {
        self.state().bound.remove(&id)
    }

    /// Closes all ports.
    pub(crate) fn clear(&self) {
        let closed = std::mem::take(&mut self.state().bound);
        drop(closed);
    }
}
