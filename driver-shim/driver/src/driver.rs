//! The state of the driver and of its objects. The other files have the functions, by topic.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use rustix::io::Errno;
use urnic_device::command::{Handle, Nothing, Opcode};
use urnic_device::cqe::CQE_LEN;
use urnic_device::vocabulary::QpKind;

use crate::adaptive_poll::AdaptivePoll;
use crate::attributes::Attributes;
use crate::command::CommandQueue;
use crate::connections::Connections;
use crate::dma::{DmaMemory, DmaPool};
use crate::event::EventQueue;
use crate::event_loop::EventLoop;
use crate::failures::Failures;
use crate::manager::Manager;
use crate::manager::number::Slot;
use crate::objects::{Context, ContextEvents, Contexts, EventTarget, Pd, Planned, Table};
use crate::pages::{PageSlot, Pages};
use crate::poster::Poster;
use crate::resident::Resident;
use crate::watch::StatSocket;
use urnic_cm::native::LocalHost;
use urnic_cm::qp_attr::{QpAttr, QpCaps};
use urnic_config::{Config, Identity};
use urnic_device::bus::Bus;
use urnic_process::activity::Activity;
use urnic_process::addressing::Gid;
use urnic_process::lock::lock;
use urnic_process::port_gids::PortGid;

/// The driver of one device. See the [crate] documentation.
pub struct Driver {
    pub(crate) bus: Arc<dyn Bus>,
    pub(crate) pool: Arc<DmaPool>,
    pub(crate) commands: CommandQueue,
    pub(crate) attributes: Attributes,
    pub(crate) local_host: LocalHost,
    pub(crate) config: Config,
    /// Asynchronous events of all objects: device queue 0.
    pub(crate) async_events: EventQueue,
    /// Completion notifications, one queue per vector.
    pub(crate) notifications: Vec<EventQueue>,
    pub(crate) contexts: Contexts,
    pub(crate) cqs: Table<Cq>,
    pub(crate) qps: Table<Qp>,
    pub(crate) srqs: Table<Srq>,
    /// Device numbers of queue pairs by their verbs numbers.
    pub(crate) qids: Mutex<HashMap<u32, u32>>,
    pub(crate) connections: Connections,
    /// The connection manager of the process.
    pub(crate) rdma_cm: Arc<Manager<Driver>>,
    /// The device's place in the connection manager.
    pub(crate) slot: Slot,
    pub(crate) event_poll: AdaptivePoll,
    /// Completion queues, by cqid and consumer index, that were armed after the loss of the device.
    pub(crate) armed: Mutex<Vec<(u32, u32)>>,
    pub(crate) event_loop: EventLoop,
    /// Completions in error that the program has polled.
    pub(crate) failures: Failures,
    pub(crate) resident: Resident,
    /// What a plan of faults lets happen, and the driver's thread does.
    pub(crate) planned: Mutex<Vec<Planned>>,
    /// The program was told that the port is down, and not yet that it is up again.
    pub(crate) port_reported_down: AtomicBool,
    /// The end of the time for which a device that a plan of faults stopped cannot be opened.
    pub(crate) returns_at: Mutex<Option<Duration>>,
    /// The socket for requests of `urnic stat` of other processes.
    pub(crate) stat_socket: OnceLock<StatSocket>,
    /// This process is a child of the process that opened the device.
    pub(crate) abandoned: AtomicBool,
}

/// A queue pair.
///
/// *The gate.* Until the connection is established (and on an MPA responder until the first FPDU
/// arrived: RFC 5044 §7.1.2(4)) nothing may reach the device. The poster writes entries and checks
/// [`Qp::gate_is_open`]. If the gate is closed, the poster neither publishes nor rings, and checks
/// again after it released the lock of the send queue: [`Poster::gate_opened`], which is called
/// after the gate is open, may have found that lock held.
pub struct Qp {
    pub(crate) driver: Arc<Driver>,
    /// Device number.
    pub qid: u32,
    /// The verbs number of the queue pair, and the label of its completions.
    pub qpn: u32,
    /// The service of the queue pair.
    pub kind: QpKind,
    pub(crate) uar: u32,
    pub(crate) doorbell: u32,
    /// Device numbers of the completion queues of sends and receives.
    pub(crate) cqs: (u32, u32),
    pub(crate) caps: QpCaps,
    pub(crate) sq: DmaMemory,
    pub(crate) rq: DmaMemory,
    pub(crate) record: DmaMemory,
    pub(crate) sq_blocks: u32,
    pub(crate) rq_entries: u32,
    pub(crate) rq_log_stride: u32,
    /// Device number of the shared queue that the receives come from.
    pub(crate) srq: Option<u32>,
    pub(crate) gate: AtomicBool,
    /// What decides about the gate.
    pub(crate) gate_state: Mutex<GateState>,
    /// The connection manager made the connection.
    pub(crate) managed: AtomicBool,
    pub(crate) ack_timeout: AtomicU8,
    /// The program of a RoCE NIC brought it to RTR with the attributes of the connection manager.
    pub(crate) awaits_stream: AtomicBool,
    /// The state that was last requested and reached.
    pub(crate) last_state: AtomicU8,
    /// Attributes as they were set. Locked during a change; this lock is taken before the lock of
    /// native connections.
    pub(crate) attr: Mutex<QpAttr>,
    /// The thread that brought it to RTR, at that time.
    pub(crate) at_rtr: Mutex<Option<Activity>>,
    /// Locked during calls to the poster, so that no call is in progress after the poster is
    /// removed.
    pub(crate) poster: Mutex<Option<Arc<dyn Poster>>>,
}

/// Why the gate of a queue pair is open or closed.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct GateState {
    /// The connection is established, or the queue pair failed: requests may reach the device.
    pub(crate) connected: bool,
    /// The program of a RoCE NIC drains the send queue: the state that programs see is SQD.
    pub(crate) draining: bool,
}

/// A completion queue. It starts with consumer index 0 and phase 1.
pub struct Cq {
    pub(crate) driver: Arc<Driver>,
    /// Device number.
    pub id: u32,
    pub(crate) slot: PageSlot,
    pub(crate) doorbell: u32,
    pub(crate) ring: Mutex<Ring>,
    pub(crate) record: DmaMemory,
}

/// The ring of a completion queue.
pub(crate) struct Ring {
    pub(crate) memory: DmaMemory,
    pub(crate) log_size: u32,
    /// Index of the completion in the first slot on the first pass.
    pub(crate) base: u32,
}

impl Ring {
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
    pub(crate) driver: Arc<Driver>,
    /// Device number.
    pub id: u32,
    pub(crate) uar: u32,
    pub(crate) doorbell: u32,
    pub(crate) ring: DmaMemory,
    pub(crate) record: DmaMemory,
    pub(crate) entries: u32,
    pub(crate) log_stride: u32,
    pub(crate) max_wr: u32,
    pub(crate) max_sge: u32,
    /// The armed limit; 0 after the event.
    pub(crate) limit: AtomicU32,
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
        self.bus.adopts()
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
        let pages = Pages::new(&self.commands)?;
        let id = self.contexts.insert(events);
        Ok(Context { id, pages })
    }

    /// Closes a context. All its objects must be destroyed before.
    ///
    /// # Errors
    /// `EBUSY` if the context still has objects; `EIO` in a forked child.
    pub fn close_context(&self, context: &Context) -> Result<(), Errno> {
        self.check_process()?;
        context.pages.free(&self.commands)?;
        self.contexts.remove(context.id);
        Ok(())
    }

    /// Creates a protection domain.
    ///
    /// # Errors
    /// `ENOMEM` if the device has no room; `EIO` in a forked child or on a lost device.
    pub fn alloc_pd(&self) -> Result<Pd, Errno> {
        self.check_usable()?;
        let handle: Handle = self.commands.call(Opcode::AllocPd, &Nothing {})?;
        Ok(Pd { id: handle.id.get() })
    }

    /// Frees a protection domain.
    ///
    /// # Errors
    /// `EBUSY` while the domain has objects; `EIO` in a forked child.
    pub fn free_pd(&self, pd: &Pd) -> Result<(), Errno> {
        self.check_process()?;
        self.commands.destroy(Opcode::FreePd, pd.id)
    }

    /// The queue pair with device number `qid`.
    pub(crate) fn qp(&self, qid: u32) -> Option<Arc<Qp>> {
        self.qps.find(qid)
    }

    /// The device number of the queue pair with the verbs number `qpn`.
    pub(crate) fn qid_of(&self, qpn: u32) -> Option<u32> {
        lock(&self.qids).get(&qpn).copied()
    }

    pub(crate) fn insert_qp(&self, qp: &Arc<Qp>, target: EventTarget) {
        lock(&self.qids).insert(qp.qpn, qp.qid);
        self.qps.insert(qp.qid, qp.clone(), target);
    }

    pub(crate) fn remove_qp(&self, qp: &Qp) {
        lock(&self.qids).remove(&qp.qpn);
        self.qps.remove(qp.qid);
    }
}
