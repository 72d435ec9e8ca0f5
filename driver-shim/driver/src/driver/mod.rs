//! The driver and its objects: start and end, contexts, queue pairs and completion queues.

mod cq;
pub(crate) mod qp;
mod srq;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;
use urnic_sync::Mutex;

use rustix::io::Errno;
use urnic_device::command::{Handle, Nothing, Opcode};
use urnic_device::cqe::CQE_LEN;
use urnic_device::doorbell::{Doorbell, Kind};
use urnic_device::vocabulary::QpKind;

use crate::attributes::{Attributes, read_attributes, read_gids, require_wire};
use crate::command::{self, CommandQueue};
use crate::connections::Connections;
use crate::dma::{DmaMemory, DmaPool};
use crate::events::{EventLoop, EventQueues, now};
use crate::gate::Gate;
use crate::manager::Manager;
use crate::objects::{Context, ContextEvents, Contexts, EventTarget, PageSlot, Pd, Registered, Table};
use crate::planned::PlannedFaults;
use crate::resident::Resident;
use crate::watch::{Failures, StatSocket};
use urnic_cm::native::LocalHost;
use urnic_cm::qp_attr::{QpAttr, QpCaps};
use urnic_config::{Config, Identity};
use urnic_device::bus::{Bus, Signal, SignalHandler};
use urnic_presence::Presence;
use urnic_process::activity::Activity;
use urnic_process::addressing::Gid;
use urnic_process::port_gids::PortGid;

/// Longest wait for the end of the device when the process ends: longer than its streams take to
/// deliver sent data.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// The driver of one device. See the [crate] documentation.
pub struct Driver {
    /// The command queue, its bus, and the memory that the device accesses.
    commands: CommandQueue,
    attributes: Attributes,
    local_host: LocalHost,
    config: Config,
    objects: Objects,
    event_queues: EventQueues,
    event_loop: EventLoop,
    connections: Connections<Driver>,
    resident: Resident,
    planned: PlannedFaults,
    /// Completions in error that the program has polled.
    failures: Failures,
    /// The socket for requests of `urnic stat` of other processes.
    stat_socket: OnceLock<StatSocket>,
    /// This process is a child of the process that opened the device.
    abandoned: AtomicBool,
}

/// The objects of a device.
pub(crate) struct Objects {
    contexts: Contexts,
    cqs: Table<Cq>,
    qps: Table<Qp>,
    srqs: Table<Srq>,
    registered: Registered,
    /// Device numbers of queue pairs by their verbs numbers.
    qids: Mutex<HashMap<u32, u32>>,
    /// Completion queues, by cqid and consumer index, that were armed after the loss of the device.
    armed: Mutex<Vec<(u32, u32)>>,
    /// The number of address handles; the device does not know them.
    address_handles: AtomicU32,
}

/// A queue pair.
pub struct Qp {
    driver: Arc<Driver>,
    /// Device number.
    pub qid: u32,
    /// The verbs number of the queue pair, and the label of its completions.
    pub qpn: u32,
    /// The service of the queue pair.
    pub kind: QpKind,
    /// It has a path of RoCE v2 to its peer, and no stream.
    has_path: AtomicBool,
    /// Its number is that of its own UDP port, and not one of the connection manager.
    number_is_port: bool,
    /// The largest path MTU of the port, in bytes; 0 = any.
    pub(crate) max_mtu: u32,
    /// Number of the protection domain.
    pd: u32,
    uar: u32,
    doorbell: u32,
    /// Device numbers of the completion queues of sends and receives.
    cqs: (u32, u32),
    caps: QpCaps,
    sq: DmaMemory,
    rq: DmaMemory,
    record: DmaMemory,
    sq_blocks: u32,
    rq_entries: u32,
    rq_log_stride: u32,
    /// Device number of the shared queue that the receives come from.
    srq: Option<u32>,
    gate: Gate,
    /// The connection manager made the connection.
    managed: AtomicBool,
    ack_timeout: AtomicU8,
    /// The program of a RoCE NIC brought it to RTR with the attributes of the connection manager.
    awaits_stream: AtomicBool,
    /// The state that was last requested and reached.
    last_state: AtomicU8,
    /// Attributes as they were set. Locked during a change; this lock is taken before the lock of
    /// native connections.
    attr: Mutex<QpAttr>,
    /// The thread that brought it to RTR, at that time.
    at_rtr: Mutex<Option<Activity>>,
}

/// A completion queue. It starts with consumer index 0 and phase 1.
pub struct Cq {
    driver: Arc<Driver>,
    /// Device number.
    pub id: u32,
    slot: PageSlot,
    doorbell: u32,
    ring: Mutex<Ring>,
    record: DmaMemory,
}

/// The ring of a completion queue.
pub(crate) struct Ring {
    memory: DmaMemory,
    log_size: u32,
    /// Index of the completion in the first slot on the first pass.
    base: u32,
}

impl Ring {
    /// The memory of the ring.
    pub(crate) fn memory(&self) -> &DmaMemory {
        &self.memory
    }

    /// Entries: a power of two.
    pub(crate) fn entries(&self) -> u32 {
        1 << self.log_size
    }

    /// Byte offset of a completion, and its phase.
    pub(crate) fn place(&self, index: u32) -> (usize, u32) {
        let from_base = index.wrapping_sub(self.base);
        let slot = (from_base & (self.entries() - 1)) as usize;
        (slot * CQE_LEN, !(from_base >> self.log_size) & 1)
    }
}

/// A receive queue that several queue pairs share.
pub struct Srq {
    driver: Arc<Driver>,
    /// Device number.
    pub id: u32,
    /// Number of the protection domain.
    pd: u32,
    uar: u32,
    doorbell: u32,
    ring: DmaMemory,
    record: DmaMemory,
    entries: u32,
    log_stride: u32,
    max_wr: u32,
    max_sge: u32,
    /// The armed limit; 0 after the event.
    limit: AtomicU32,
}

/// A doorbell write, to be passed to [`Driver::ring`]. As soon as an entry is published, another
/// thread may poll its completion and destroy the queue, while the posting thread still has to
/// ring. So this refers to no queue. The device ignores a doorbell of a queue that it does not
/// have.
#[must_use]
#[derive(Debug, Clone, Copy)]
pub struct DoorbellWrite {
    uar: u32,
    offset: u32,
    value: u64,
}

impl DoorbellWrite {
    /// The write of `doorbell` at `offset` of doorbell page `uar`.
    #[inline]
    pub(crate) fn new((uar, offset): (u32, u32), kind: Kind, queue: u32, index: u32) -> DoorbellWrite {
        let value = Doorbell { kind, queue, index }.encode();
        DoorbellWrite { uar, offset, value }
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver")
            .field("attributes", &self.attributes)
            .finish_non_exhaustive()
    }
}

impl Drop for Driver {
    /// Makes the device release the driver's memory before the memory is unmapped.
    fn drop(&mut self) {
        if self.check_usable().is_ok() {
            self.commands.reset();
        }
    }
}

impl Driver {
    /// The command queue of the device.
    #[inline]
    pub(crate) fn commands(&self) -> &CommandQueue {
        &self.commands
    }

    /// The bus that reaches the device.
    #[inline]
    pub(crate) fn bus(&self) -> &Arc<dyn Bus> {
        self.commands.bus()
    }

    /// The memory that the device accesses.
    pub(crate) fn pool(&self) -> &Arc<DmaPool> {
        self.commands.pool()
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    pub(crate) fn local_host(&self) -> &LocalHost {
        &self.local_host
    }

    pub(crate) fn objects(&self) -> &Objects {
        &self.objects
    }

    pub(crate) fn event_queues(&self) -> &EventQueues {
        &self.event_queues
    }

    pub(crate) fn event_loop(&self) -> &EventLoop {
        &self.event_loop
    }

    pub(crate) fn connections(&self) -> &Connections<Driver> {
        &self.connections
    }

    /// The registered pages that this driver made present.
    pub(crate) fn resident(&self) -> &Resident {
        &self.resident
    }

    /// The planned faults of the device.
    pub(crate) fn planned(&self) -> &PlannedFaults {
        &self.planned
    }

    pub(crate) fn stat_socket(&self) -> Option<&StatSocket> {
        self.stat_socket.get()
    }

    /// Abandons the device in a forked child. Async-signal-safe.
    pub(crate) fn abandon_in_child(&self) {
        self.abandoned.store(true, Ordering::Release);
        self.bus().abandon_in_child();
    }

    /// Whether the device is lost.
    pub(crate) fn is_lost(&self) -> bool {
        self.commands.is_lost()
    }

    /// Checks that this is the process that opened the device.
    ///
    /// # Errors
    /// `EIO` in a forked child of that process.
    pub fn check_process(&self) -> Result<(), Errno> {
        if self.abandoned.load(Ordering::Relaxed) {
            Err(Errno::IO)
        } else {
            Ok(())
        }
    }

    /// Checks that this process opened the device, and that the device is not lost.
    ///
    /// # Errors
    /// `EIO` in a forked child of that process, or on a lost device.
    pub(crate) fn check_usable(&self) -> Result<(), Errno> {
        if self.commands.is_lost() {
            return Err(Errno::IO);
        }
        self.check_process()
    }

    /// The limits and features of the device.
    pub fn attributes(&self) -> &Attributes {
        &self.attributes
    }

    /// Whether the device accepts rings at the addresses of a
    /// [`RingPlacement`](crate::RingPlacement).
    pub fn takes_rings(&self) -> bool {
        self.bus().adopts()
    }

    /// Completions in error that the program has polled.
    pub fn failures(&self) -> &Failures {
        &self.failures
    }

    /// The addresses of the device.
    pub fn gids(&self) -> &[Gid] {
        &self.local_host.gids
    }

    /// The GID table of the port: no holes, stable while the device is open.
    pub fn port_gids(&self) -> &[PortGid] {
        &self.local_host.table
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// The kind of device that programs see.
    pub fn identity(&self) -> Identity {
        self.config.identity
    }

    /// The port's LID: the low 16 bits of the first address; 0 for a RoCE NIC, which has none.
    pub fn lid(&self) -> u16 {
        self.local_host.lid()
    }

    /// Opens a context whose events go to `events`.
    ///
    /// # Errors
    /// `ENOMEM` if the device has no doorbell page left; `EIO` in a forked child or on a lost
    /// device.
    pub fn open_context(&self, events: Arc<dyn ContextEvents>) -> Result<Context, Errno> {
        self.check_usable()?;
        Context::new(&self.commands, &self.objects.contexts, events)
    }

    /// Closes a context. All its objects must be destroyed before.
    ///
    /// # Errors
    /// `EBUSY` if the context still has objects; `EIO` in a forked child.
    pub fn close_context(&self, context: &Context) -> Result<(), Errno> {
        self.check_process()?;
        context.close(&self.commands, &self.objects.contexts)
    }

    /// Creates a protection domain.
    ///
    /// # Errors
    /// `ENOMEM` if the device has no room; `EIO` in a forked child or on a lost device.
    pub fn alloc_pd(&self) -> Result<Pd, Errno> {
        self.check_usable()?;
        let handle: Handle = self.commands.call(Opcode::AllocPd, &Nothing {})?;
        let id = handle.id.get();
        self.objects.registered.domains().insert(id);
        Ok(Pd { id })
    }

    /// Frees a protection domain.
    ///
    /// # Errors
    /// `EBUSY` while the domain has objects; `EIO` in a forked child.
    pub fn free_pd(&self, pd: &Pd) -> Result<(), Errno> {
        self.check_process()?;
        // Before the device gives the number to another domain.
        self.objects.registered.domains().remove(&pd.id);
        self.commands.destroy(Opcode::FreePd, pd.id).inspect_err(|_| {
            self.objects.registered.domains().insert(pd.id);
        })
    }

    /// The queue pair with device number `qid`.
    pub(crate) fn qp(&self, qid: u32) -> Option<Arc<Qp>> {
        self.objects.qps.find(qid)
    }

    /// The device number of the queue pair with the verbs number `qpn`.
    pub(crate) fn qid_of(&self, qpn: u32) -> Option<u32> {
        self.objects.qids.lock().get(&qpn).copied()
    }

    pub(crate) fn insert_qp(&self, qp: &Arc<Qp>, target: EventTarget) {
        self.objects.qids.lock().insert(qp.qpn, qp.qid);
        self.objects.qps.insert(qp.qid, qp.clone(), target);
    }

    pub(crate) fn remove_qp(&self, qp: &Qp) {
        self.objects.qids.lock().remove(&qp.qpn);
        self.objects.qps.remove(qp.qid);
    }
}

impl Driver {
    /// Starts the driver of the device on `bus`.
    ///
    /// # Errors
    /// `ENODEV` if the device does not have this interface; `ENOMEM` if no memory is left; the
    /// errors of the device and of starting a thread.
    pub fn start(bus: Arc<dyn Bus>, config: Config) -> Result<Arc<Driver>, Errno> {
        Driver::start_among(bus, config, 0, &OnceLock::new())
    }

    /// Starts the driver of the device with this index, whose process has its connection manager at
    /// `manager`.
    ///
    /// # Errors
    /// Those of [`Driver::start`]; `ENOMEM` if the process has opened too many devices.
    pub(crate) fn start_among(
        bus: Arc<dyn Bus>,
        config: Config,
        index: usize,
        manager: &OnceLock<Arc<Manager<Driver>>>,
    ) -> Result<Arc<Driver>, Errno> {
        let pool = DmaPool::new(bus.clone());
        let event_loop = EventLoop::new()?;
        // Interrupts come from the first command on, but the driver that handles them exists only
        // at the end. Their queues are empty until then.
        let started: Arc<OnceLock<Weak<Driver>>> = Arc::default();
        let handler: SignalHandler = {
            let started = started.clone();
            Arc::new(move |signal| {
                if let Some(driver) = started.get().and_then(Weak::upgrade) {
                    match signal {
                        Signal::Interrupt(vector) => driver.interrupt(vector),
                        Signal::Lost => driver.device_lost(),
                    }
                }
            })
        };
        bus.signals(handler.clone());
        let commands = CommandQueue::start(bus, pool, handler)?;
        let attributes = read_attributes(&commands)?;
        require_wire(&config, &attributes)?;
        commands.bus().features(attributes.features);
        let local_host = LocalHost::new(read_gids(&commands)?, config.native.listen, config.identity);
        let event_queues = EventQueues::create(&commands, &attributes)?;
        let connections = Connections::new(&config, &attributes, index, manager)?;
        let driver = Arc::new(Driver {
            commands,
            attributes,
            local_host,
            config,
            objects: Objects::new(),
            event_queues,
            event_loop,
            connections,
            resident: Resident::default(),
            planned: PlannedFaults::default(),
            failures: Failures::default(),
            stat_socket: OnceLock::new(),
            abandoned: AtomicBool::new(false),
        });
        let _ = started.set(Arc::downgrade(&driver));
        let connections = &driver.connections;
        connections.manager().started(connections.slot(), &driver);
        // The device may have been lost before the handler had a driver.
        if !command::is_ready(&**driver.bus()) {
            driver.device_lost();
        }
        driver.clone().start_thread()?;
        Ok(driver)
    }

    /// Opens the socket that answers `urnic stat` of the user's other processes.
    pub fn open_stat_socket(&self, presence: &Presence) {
        if self.stat_socket.get().is_some() {
            return;
        }
        let opened = presence.folder().map_err(|refusal| refusal.to_string());
        match opened.and_then(|folder| StatSocket::open(folder).map_err(|errno| errno.to_string())) {
            // If two threads open a socket, the second one is closed again.
            Ok(stat_socket) => drop(self.stat_socket.set(stat_socket)),
            Err(reason) => tracing::warn!(
                "`urnic stat` cannot query this process: no socket in the folder of {}: {reason}",
                presence.root().display()
            ),
        }
        self.event_loop.wake();
    }

    /// Ends the device: data of completed requests still arrives, then every call fails. Takes a
    /// bounded time.
    pub fn shutdown(&self) {
        if self.begin_shutdown() {
            self.event_loop.wait_for_end(EXIT_TIMEOUT);
        }
    }

    /// Makes the driver's thread end the device. The calling thread does not: it may hold the
    /// device's locks, since a signal handler that interrupted a call of the driver may call
    /// exit(3). Returns whether the device must be waited for.
    fn begin_shutdown(&self) -> bool {
        let first = self.check_process().is_ok() && self.event_loop.stop();
        if first {
            self.close_stat_socket();
            self.event_loop.wake();
        }
        first
    }

    /// Ends several devices, in the time of one.
    pub(crate) fn shutdown_all(drivers: Vec<Arc<Driver>>) {
        let ending: Vec<_> = drivers
            .into_iter()
            .filter(|driver| driver.begin_shutdown())
            .collect();
        let until = now() + EXIT_TIMEOUT;
        for driver in ending {
            driver.event_loop.wait_for_end(until.saturating_sub(now()));
        }
    }

    /// Closes the socket that answers `urnic stat`.
    pub(crate) fn close_stat_socket(&self) {
        if let Some(stat_socket) = self.stat_socket.get() {
            stat_socket.close();
        }
    }
}

impl Objects {
    fn new() -> Objects {
        Objects {
            contexts: Contexts::new(),
            cqs: Table::default(),
            qps: Table::default(),
            srqs: Table::default(),
            registered: Registered::default(),
            qids: Mutex::default(),
            armed: Mutex::default(),
            address_handles: AtomicU32::new(0),
        }
    }

    /// The number of address handles.
    pub(crate) fn address_handles(&self) -> &AtomicU32 {
        &self.address_handles
    }

    /// Open contexts.
    pub(crate) fn contexts(&self) -> &Contexts {
        &self.contexts
    }

    /// Completion queues.
    pub(crate) fn cqs(&self) -> &Table<Cq> {
        &self.cqs
    }

    /// Queue pairs.
    pub(crate) fn qps(&self) -> &Table<Qp> {
        &self.qps
    }

    /// Shared receive queues.
    pub(crate) fn srqs(&self) -> &Table<Srq> {
        &self.srqs
    }

    /// Protection domains and memory regions.
    pub(crate) fn registered(&self) -> &Registered {
        &self.registered
    }

    /// Records that a completion queue of a lost device was armed.
    pub(crate) fn arm(&self, cqid: u32, consumer: u32) {
        self.armed.lock().push((cqid, consumer));
    }

    /// Takes the completion queues, by cqid and consumer index, that were armed since the last
    /// call.
    pub(crate) fn take_armed(&self) -> Vec<(u32, u32)> {
        std::mem::take(&mut *self.armed.lock())
    }
}

impl Driver {
    /// Rings. A device in this process does the work before this returns.
    #[inline]
    pub fn ring(&self, write: DoorbellWrite) {
        self.commands.bus().doorbell(write.uar, write.offset, write.value);
        if self.commands.is_lost() {
            self.event_loop.wake();
        }
    }
}
