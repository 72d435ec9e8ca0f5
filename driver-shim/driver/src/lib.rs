//! The driver: what a kernel module would do between verbs and a device. Commands, events, shared memory, objects and their life.
//!
//! One [`Driver`] serves the whole process. Its own thread takes asynchronous events and makes connections; completions
//! notify their channel on whichever thread the device raised them.
//!
//! Order of locks: a queue pair's attributes, then native connections or the connection manager, then the command queue. [`ContextEvents`] and [`Poster`] are
//! called with none of them held.

mod cm;
mod command;
mod cq;
mod dma;
mod event;
#[cfg(test)]
mod fake_bus;
mod loss;
mod memory;
mod pages;
mod patience;
mod process;
mod qp;
mod rim;
mod snapshot;
mod srq;
mod state;
mod streams;
mod transition;
pub mod watch;
mod window;
mod worker;

pub use cm::{CmChannel, cm_write};
pub use cq::Cq;
pub use dma::{Anywhere, DmaMemory, RingPlacement};
pub use memory::{Mr, Reregistration, prefetch};
pub use process::{abandon_in_child, addresses, exit};
pub use qp::{Completed, Poster, Qp, QpInit};
pub use srq::Srq;
pub use urnic_cm::qp_attr::{QpAttr, QpCaps, QpMask};
pub use urnic_process::addressing::{AddressVector, Gid};

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use rustix::io::Errno;
use urnic_device::command::{Count, DeviceAttributes, Handle, Nothing, Opcode};
use urnic_device::stream::{self, ip_of};

use crate::watch::StatSocket;
use command::CommandQueue;
use dma::DmaPool;
use event::EventQueue;
use patience::Patience;
use urnic_cm::native::Home;
use urnic_config::Config;
use urnic_device::bus::{Bus, Signal, SignalHandler};
use urnic_presence::Presence;
use urnic_process::fds::InternalFd;
use urnic_process::gids::GidTable;
use urnic_process::lock::lock;

/// What the device can do: the limits that it reports and firmware version, in native numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes {
    /// Firmware version.
    pub firmware: (u16, u16, u16),
    /// Largest registration in bytes.
    pub max_mr_size: u64,
    /// Queue pairs.
    pub max_qp: u32,
    /// Work requests per queue.
    pub max_qp_wr: u32,
    /// Elements per request.
    pub max_sge: u32,
    /// Elements of a Read.
    pub max_sge_rd: u32,
    /// Inline bytes per request.
    pub max_inline: u32,
    /// Completion queues.
    pub max_cq: u32,
    /// Entries per completion queue.
    pub max_cqe: u32,
    /// Registrations.
    pub max_mr: u32,
    /// Protection domains.
    pub max_pd: u32,
    /// Memory windows.
    pub max_mw: u32,
    /// Shared receive queues.
    pub max_srq: u32,
    /// Entries per shared receive queue.
    pub max_srq_wr: u32,
    /// Inbound Reads per queue pair.
    pub max_ird: u32,
    /// Outbound Reads per queue pair.
    pub max_ord: u32,
    /// Completion vectors.
    pub completion_vectors: u32,
    /// `urnic_device::command::features`.
    pub features: u32,
}

impl From<DeviceAttributes> for Attributes {
    fn from(d: DeviceAttributes) -> Attributes {
        let firmware = d.firmware.get();
        Attributes {
            firmware: ((firmware >> 32) as u16, (firmware >> 16) as u16, firmware as u16),
            max_mr_size: d.max_mr_size.get(),
            max_qp: d.max_qp.get(),
            max_qp_wr: d.max_qp_wr.get(),
            max_sge: d.max_sge.get(),
            max_sge_rd: d.max_sge_rd.get(),
            max_inline: d.max_inline.get(),
            max_cq: d.max_cq.get(),
            max_cqe: d.max_cqe.get(),
            max_mr: d.max_mr.get(),
            max_pd: d.max_pd.get(),
            max_mw: d.max_mw.get(),
            max_srq: d.max_srq.get(),
            max_srq_wr: d.max_srq_wr.get(),
            max_ird: d.max_ird.get(),
            max_ord: d.max_ord.get(),
            completion_vectors: d.completion_vectors.get(),
            features: d.features.get(),
        }
    }
}

/// Asynchronous events, with the numbers of `enum ibv_event_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum AsyncEvent {
    /// A completion queue overflowed.
    CqErr = 0,
    /// A queue pair failed.
    QpFatal = 1,
    /// The peer sent something that its queue pair may not send.
    QpReqErr = 2,
    /// The peer asked for memory that it may not touch.
    QpAccessErr = 3,
    /// The device stopped.
    DeviceFatal = 8,
    /// A shared receive queue fell below its limit.
    SrqLimit = 15,
    /// The last entry of a shared receive queue was consumed for a queue pair in error.
    QpLastWqe = 16,
    /// The GID table changed.
    GidChange = 18,
}

/// Where the events of a context go. Called on any thread, with no lock that a call into the driver takes but that of its own object's
/// table: an implementation writes to its channel and returns; it must not call the driver.
pub trait ContextEvents: Send + Sync {
    /// An armed completion queue got its completion.
    fn completion(&self, cq_cookie: u64);

    /// Something happened to the element with that cookie; 0 = to the port or device.
    fn async_event(&self, event: AsyncEvent, element_cookie: u64);
}

/// A program's use of the device (`struct ibv_context`).
#[derive(Debug)]
pub struct Context {
    id: u64,
    pages: pages::Pages,
}

/// A protection domain.
#[derive(Debug)]
pub struct Pd {
    /// Its number.
    pub id: u32,
}

/// Whom the events of an object go to.
#[derive(Clone)]
struct Target {
    events: Arc<dyn ContextEvents>,
    cookie: u64,
}

/// The driver of one device. See the [module](self).
pub struct Driver {
    bus: Arc<dyn Bus>,
    pool: Arc<DmaPool>,
    commands: CommandQueue,
    attributes: Attributes,
    home: Home,
    config: Config,
    /// Asynchronous events of everything: device queue 0.
    async_events: EventQueue,
    /// Completion notifications, one queue per vector.
    notifications: Vec<EventQueue>,
    contexts: RwLock<HashMap<u64, Arc<dyn ContextEvents>>>,
    next_context: AtomicU64,
    /// Completion queues by cqid. Read-locked while an event is delivered, so that none comes after destruction.
    cqs: RwLock<HashMap<u32, (Arc<Cq>, Target)>>,
    /// Queue pairs by qid, alike.
    qps: RwLock<HashMap<u32, (Arc<Qp>, Target)>>,
    /// Shared receive queues by srqid, alike.
    srqs: RwLock<HashMap<u32, (Arc<Srq>, Target)>>,
    /// The qids of queue pairs by the numbers that programs know them by.
    qids: Mutex<HashMap<u32, u32>>,
    native: Mutex<rim::Native>,
    cm: Mutex<cm::Manager>,
    patience: Patience,
    /// Completion queues, by cqid and consumer index, that were armed since the device is lost.
    armed: Mutex<Vec<(u32, u32)>>,
    /// Somebody handles events; and there may be some.
    events_turn: Mutex<()>,
    events_due: AtomicBool,
    /// Wakes the driver's thread.
    wake: InternalFd,
    /// Until when it sleeps by itself: nanoseconds of its clock, or [`worker::AWAKE`].
    asleep_until: AtomicU64,
    /// It let what completed arrive, and ended.
    ended: (Mutex<bool>, Condvar),
    /// Where other processes ask what this one is at.
    stat_socket: OnceLock<StatSocket>,
    /// This is a child of the process that opened the device.
    abandoned: AtomicBool,
    stopped: AtomicBool,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver")
            .field("attributes", &self.attributes)
            .finish_non_exhaustive()
    }
}

impl Drop for Driver {
    /// The device lets go of the memory that the driver lent it, before that is unmapped.
    fn drop(&mut self) {
        if self.alive().is_ok() {
            self.commands.reset();
        }
    }
}

/// Longest that the end of the process waits for the device's: more than its streams take to let what was sent arrive.
const EXIT_PATIENCE: Duration = Duration::from_secs(5);
/// Most addresses that are asked for.
const MAX_GIDS: usize = 256;

impl Driver {
    /// The driver of this process: opened at the first call, and again in a forked child. It lives until the process ends.
    ///
    /// Configuration and addresses are those of the first call.
    ///
    /// # Errors
    /// `ENODEV`, `ENOMEM`, `EMFILE`, those of the device.
    pub fn open(config: &Config, gids: &GidTable) -> Result<Arc<Driver>, Errno> {
        process::open(config, gids)
    }

    /// Drives the device behind `bus`.
    ///
    /// # Errors
    /// `ENODEV` if it is no device of ours, `ENOMEM`, those of the device and of making a thread.
    pub fn start(bus: Arc<dyn Bus>, config: Config) -> Result<Arc<Driver>, Errno> {
        let pool = DmaPool::new(bus.clone());
        let wake = worker::wake_fd()?;
        // Interrupts come from the first command on, the driver that takes them exists only at the end: they are empty until then.
        let here: Arc<std::sync::OnceLock<std::sync::Weak<Driver>>> = Arc::default();
        let there = here.clone();
        let handler: SignalHandler = Arc::new(move |signal| {
            if let Some(driver) = there.get().and_then(std::sync::Weak::upgrade) {
                match signal {
                    Signal::Interrupt(vector) => driver.interrupt(vector),
                    Signal::Lost => driver.lose(),
                }
            }
        });
        bus.signals(handler.clone());
        let commands = CommandQueue::start(bus.clone(), pool.clone(), handler)?;
        let (buffer, _) =
            commands.fetch::<_, Nothing>(Opcode::QueryDevice, &Nothing {}, size_of::<DeviceAttributes>())?;
        let attributes = Attributes::from(buffer.read::<DeviceAttributes>(0));
        bus.features(attributes.features);
        let gids = read_gids(&commands)?;
        let async_events = EventQueue::create(&commands, &pool, 4096, 0)?;
        // A notification needs an armed queue and disarms it: as many entries as queues never overflow.
        let notifications = (0..attributes.completion_vectors)
            .map(|v| EventQueue::create(&commands, &pool, attributes.max_cq, v + 1))
            .collect::<Result<Vec<_>, _>>()?;
        let native = Mutex::new(rim::Native::new(&config)?);
        let cm = Mutex::new(cm::Manager::new(&config, &attributes)?);
        let home = Home {
            gids,
            listen: config.native.listen,
        };
        let driver = Arc::new(Driver {
            bus,
            pool,
            commands,
            attributes,
            home,
            config,
            async_events,
            notifications,
            contexts: RwLock::default(),
            next_context: AtomicU64::new(1),
            cqs: RwLock::default(),
            qps: RwLock::default(),
            srqs: RwLock::default(),
            qids: Mutex::default(),
            native,
            cm,
            patience: Patience::default(),
            armed: Mutex::default(),
            events_turn: Mutex::default(),
            events_due: AtomicBool::new(false),
            wake,
            asleep_until: AtomicU64::new(worker::AWAKE),
            ended: Default::default(),
            stat_socket: OnceLock::new(),
            abandoned: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
        });
        let _ = here.set(Arc::downgrade(&driver));
        // A loss that was told before somebody listened.
        if !command::is_ready(&*driver.bus) {
            driver.lose();
        }
        worker::start(driver.clone())?;
        Ok(driver)
    }

    /// Lets other processes of the user ask what this one is at, where they look for it.
    pub fn be_watched(&self, presence: &Presence) {
        let Some(folder) = watch::folder(presence) else {
            return;
        };
        if self.stat_socket.get().is_some() {
            return;
        }
        match StatSocket::open(folder) {
            // Two threads may have come here: the second one's stat_socket goes again.
            Ok(stat_socket) => drop(self.stat_socket.set(stat_socket)),
            Err(errno) => tracing::warn!(
                "`urnic stat` will not see this process: {}: {errno}",
                folder.display()
            ),
        }
        self.wake();
    }

    /// Ends the device: what completed still arrives, then nothing works any more. Takes a bounded time.
    pub fn shutdown(&self) {
        if self.here().is_ok() && !self.stopped.swap(true, Ordering::AcqRel) {
            self.close_door();
            self.wake();
            // On the thread, because this one may hold the device's locks: exit(3) in a handler of a signal that came in a call of ours.
            let (ended, told) = &self.ended;
            let ended = lock(ended);
            drop(told.wait_timeout_while(ended, EXIT_PATIENCE, |ended| !*ended));
        }
    }

    /// No other process asks what this one is at any more.
    fn close_door(&self) {
        if let Some(stat_socket) = self.stat_socket.get() {
            stat_socket.close();
        }
    }

    /// Whether the device is gone for good.
    fn is_lost(&self) -> bool {
        self.commands.is_lost()
    }

    /// Whether this is the process that opened the device.
    ///
    /// # Errors
    /// `EIO` in a child of it.
    pub fn here(&self) -> Result<(), Errno> {
        if self.abandoned.load(Ordering::Relaxed) {
            Err(Errno::IO)
        } else {
            Ok(())
        }
    }

    /// `EIO` in a child of the process that opened the device, and when the device is lost.
    fn alive(&self) -> Result<(), Errno> {
        if self.commands.is_lost() {
            return Err(Errno::IO);
        }
        self.here()
    }

    /// What the device can do.
    pub fn attributes(&self) -> &Attributes {
        &self.attributes
    }

    /// Whether queues may be wherever a [`RingPlacement`] says.
    pub fn takes_rings(&self) -> bool {
        self.bus.adopts()
    }

    /// The GID table: no holes, stable while the device is open.
    pub fn gids(&self) -> &[Gid] {
        &self.home.gids
    }

    /// An entry of it.
    pub fn gid(&self, index: usize) -> Option<&Gid> {
        self.home.gids.get(index)
    }

    /// The port's LID: the low 16 bits of GID 0's address.
    pub fn lid(&self) -> u16 {
        self.home.lid()
    }

    /// Opens a context, whose events go to `events`.
    ///
    /// # Errors
    /// `ENOMEM` when the device has no doorbell page left; `EIO` in a forked child.
    pub fn open_context(&self, events: Arc<dyn ContextEvents>) -> Result<Context, Errno> {
        self.alive()?;
        let pages = pages::Pages::new(&self.commands)?;
        let id = self.next_context.fetch_add(1, Ordering::Relaxed);
        self.contexts
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(id, events);
        Ok(Context { id, pages })
    }

    /// Closes a context; everything made in it must be gone.
    ///
    /// # Errors
    /// `EBUSY`; `EIO` in a forked child.
    pub fn close_context(&self, context: &Context) -> Result<(), Errno> {
        self.here()?;
        context.pages.free(&self.commands)?;
        self.contexts
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&context.id);
        Ok(())
    }

    /// Makes a protection domain.
    ///
    /// # Errors
    /// `ENOMEM`; `EIO` in a forked child.
    pub fn alloc_pd(&self) -> Result<Pd, Errno> {
        self.alive()?;
        let handle: Handle = self.commands.call(Opcode::AllocPd, &Nothing {})?;
        Ok(Pd { id: handle.id.get() })
    }

    /// Frees it.
    ///
    /// # Errors
    /// `EBUSY` while anything is in it; `EIO` in a forked child.
    pub fn free_pd(&self, pd: &Pd) -> Result<(), Errno> {
        self.here()?;
        self.commands.destroy(Opcode::FreePd, pd.id)
    }

    fn target(&self, context: u64, cookie: u64) -> Result<Target, Errno> {
        let contexts = self.contexts.read().unwrap_or_else(PoisonError::into_inner);
        let events = contexts.get(&context).cloned().ok_or(Errno::INVAL)?;
        Ok(Target { events, cookie })
    }

    fn qp(&self, qid: u32) -> Option<Arc<Qp>> {
        self.qps
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&qid)
            .map(|(qp, _)| qp.clone())
    }

    /// The device's number of the queue pair that programs know by `qpn`.
    fn qid_of(&self, qpn: u32) -> Option<u32> {
        lock(&self.qids).get(&qpn).copied()
    }

    fn own_qp(&self, qp: &Arc<Qp>, target: Target) {
        lock(&self.qids).insert(qp.qpn, qp.qid);
        self.qps
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(qp.qid, (qp.clone(), target));
    }

    fn disown_qp(&self, qp: &Qp) {
        lock(&self.qids).remove(&qp.qpn);
        self.qps
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&qp.qid);
    }
}

fn read_gids(commands: &CommandQueue) -> Result<Vec<Gid>, Errno> {
    const ENTRY: usize = size_of::<stream::Address>();
    let (buffer, count) =
        commands.fetch::<_, Count>(Opcode::QueryAddresses, &Nothing {}, MAX_GIDS * ENTRY)?;
    let count = (count.count.get() as usize).min(MAX_GIDS);
    Ok((0..count)
        .map(|i| buffer.read::<stream::Address>(i * ENTRY))
        .map(|a| Gid {
            ip: ip_of(&a.ip),
            scope: a.scope.get(),
            prefix_len: u8::try_from(a.prefix_len.get()).unwrap_or(u8::MAX),
        })
        .collect())
}
