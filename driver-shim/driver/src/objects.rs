//! The driver's objects: contexts with their doorbell pages, and tables of objects, each with the
//! receiver of its events.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use urnic_sync::{Mutex, MutexGuard, RwLock};

use rustix::io::Errno;
use urnic_device::command::{Handle, Nothing, Opcode};
use urnic_device::doorbell::CQ_SLOTS;

use crate::command::CommandQueue;

/// Asynchronous events, with the numbers of `enum ibv_event_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum AsyncEvent {
    /// A completion queue overflowed.
    CqErr = 0,
    /// A queue pair failed.
    QpFatal = 1,
    /// The peer sent a message that the queue pair does not permit.
    QpReqErr = 2,
    /// The peer named memory that it has no permission to access.
    QpAccessErr = 3,
    /// The device stopped.
    DeviceFatal = 8,
    /// The port is up again.
    PortActive = 9,
    /// The port is down.
    PortErr = 10,
    /// A shared receive queue fell below its limit.
    SrqLimit = 15,
    /// The last entry of a shared receive queue was consumed for a queue pair in error.
    QpLastWqe = 16,
    /// The GID table changed.
    GidChange = 18,
}

/// The receiver of a context's events. Called on any thread. The only driver lock held is that of
/// the table of the event's object: an implementation writes to its channel and returns; it must
/// not call the driver.
pub trait ContextEvents: Send + Sync {
    /// An armed completion queue got its completion.
    fn completion(&self, cq_cookie: u64);

    /// An asynchronous event of the element with that cookie; 0 stands for the port or device.
    fn async_event(&self, event: AsyncEvent, element_cookie: u64);
}

/// A program's use of the device (`struct ibv_context`).
#[derive(Debug)]
pub struct Context {
    id: u64,
    pages: Pages,
}

impl Context {
    /// The context with this number in [`Contexts`], and its first doorbell page.
    ///
    /// # Errors
    /// `ENOMEM` if the device has no page left.
    pub(crate) fn new(
        commands: &CommandQueue,
        contexts: &Contexts,
        events: Arc<dyn ContextEvents>,
    ) -> Result<Context, Errno> {
        let pages = Pages::new(commands)?;
        let id = contexts.insert(events);
        Ok(Context { id, pages })
    }

    /// Frees the doorbell pages, and removes the context.
    ///
    /// # Errors
    /// `EBUSY` while the pages have objects.
    pub(crate) fn close(&self, commands: &CommandQueue, contexts: &Contexts) -> Result<(), Errno> {
        self.pages.free(commands)?;
        contexts.remove(self.id);
        Ok(())
    }

    /// The number of the doorbell page for all objects but completion queues.
    pub(crate) fn uar(&self) -> u32 {
        self.pages.own
    }

    /// A slot for the doorbell of a completion queue.
    ///
    /// # Errors
    /// `ENOMEM` if the device has no page left.
    pub(crate) fn cq_slot(&self, commands: &CommandQueue) -> Result<PageSlot, Errno> {
        self.pages.slot(commands)
    }
}

/// The doorbell pages of a context: one page, and further ones if the context has many completion
/// queues.
///
/// The record of a queue counts posted requests, so no request is lost if a doorbell is overwritten
/// in its slot. The arming of a completion queue is only in its slot: two queues that share a slot
/// could lose a wake-up. So no page gets more completion queues than it has slots.
#[derive(Debug)]
struct Pages {
    /// The number of the page for all objects but completion queues.
    own: u32,
    /// Pages with the completion queues in use; the first page is `own`.
    pages: Mutex<Vec<Arc<Page>>>,
}

#[derive(Debug)]
struct Page {
    uar: u32,
    cqs: AtomicU32,
}

/// The slot of a completion queue in a page; dropping the value frees the slot.
#[derive(Debug)]
pub(crate) struct PageSlot(Arc<Page>);

impl Page {
    /// Takes a free slot. The caller holds the lock of the pages: meanwhile slots are only freed.
    fn reserve(self: &Arc<Page>) -> Option<PageSlot> {
        (self.cqs.load(Ordering::Acquire) < CQ_SLOTS).then(|| {
            self.cqs.fetch_add(1, Ordering::AcqRel);
            PageSlot(self.clone())
        })
    }
}

impl PageSlot {
    /// The page's number.
    pub(crate) fn uar(&self) -> u32 {
        self.0.uar
    }
}

impl Drop for PageSlot {
    fn drop(&mut self) {
        self.0.cqs.fetch_sub(1, Ordering::AcqRel);
    }
}

fn allocate(commands: &CommandQueue) -> Result<Arc<Page>, Errno> {
    let uar: Handle = commands.call(Opcode::AllocUar, &Nothing {})?;
    Ok(Arc::new(Page {
        uar: uar.id.get(),
        cqs: AtomicU32::new(0),
    }))
}

impl Pages {
    /// Allocates the first page of a context.
    fn new(commands: &CommandQueue) -> Result<Pages, Errno> {
        let page = allocate(commands)?;
        Ok(Pages {
            own: page.uar,
            pages: Mutex::new(vec![page]),
        })
    }

    /// Allocates a slot for a completion queue, in a new page if all other pages are full.
    fn slot(&self, commands: &CommandQueue) -> Result<PageSlot, Errno> {
        let mut pages = self.pages.lock();
        if let Some(slot) = pages.iter().find_map(Page::reserve) {
            return Ok(slot);
        }
        let page = allocate(commands)?;
        pages.push(page.clone());
        page.reserve().ok_or(Errno::NOMEM)
    }

    /// Frees the pages, the first one last.
    fn free(&self, commands: &CommandQueue) -> Result<(), Errno> {
        let mut pages = self.pages.lock();
        while let Some(page) = pages.last() {
            commands.destroy(Opcode::FreeUar, page.uar)?;
            pages.pop();
        }
        Ok(())
    }
}

/// A protection domain.
#[derive(Debug)]
pub struct Pd {
    /// Number of the protection domain.
    pub id: u32,
}

/// The receiver of an object's events, and the cookie that names the object to the receiver.
#[derive(Clone)]
pub(crate) struct EventTarget {
    pub(crate) events: Arc<dyn ContextEvents>,
    pub(crate) cookie: u64,
}

/// Objects of one kind by device number.
///
/// An event is delivered under the read lock: after [`Table::remove`] returns, no event of the
/// object is delivered any more.
pub(crate) struct Table<T>(RwLock<HashMap<u32, (Arc<T>, EventTarget)>>);

impl<T> Default for Table<T> {
    fn default() -> Table<T> {
        Table(RwLock::default())
    }
}

impl<T> Table<T> {
    pub(crate) fn insert(&self, number: u32, object: Arc<T>, target: EventTarget) {
        self.0.write().insert(number, (object, target));
    }

    /// Removes an object; waits for an event that is being delivered to it.
    pub(crate) fn remove(&self, number: u32) {
        self.0.write().remove(&number);
    }

    pub(crate) fn find(&self, number: u32) -> Option<Arc<T>> {
        self.with(number, |object, _| object.clone())
    }

    /// Calls `work` on an object and the receiver of its events, with the table locked for reading.
    pub(crate) fn with<R>(&self, number: u32, work: impl FnOnce(&Arc<T>, &EventTarget) -> R) -> Option<R> {
        let objects = self.0.read();
        objects.get(&number).map(|(object, target)| work(object, target))
    }

    /// Delivers an asynchronous event of an object.
    pub(crate) fn deliver(&self, number: u32, event: AsyncEvent) {
        self.with(number, |_, target| {
            target.events.async_event(event, target.cookie)
        });
    }

    /// All objects with their numbers.
    pub(crate) fn all(&self) -> Vec<(u32, Arc<T>)> {
        let objects = self.0.read();
        objects
            .iter()
            .map(|(number, (object, _))| (*number, object.clone()))
            .collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.read().len()
    }
}

/// Open contexts by number.
pub(crate) struct Contexts {
    open: RwLock<HashMap<u64, Arc<dyn ContextEvents>>>,
    next: AtomicU64,
}

impl Contexts {
    pub(crate) fn new() -> Contexts {
        Contexts {
            open: RwLock::default(),
            next: AtomicU64::new(1),
        }
    }

    /// Adds a context and returns its number.
    fn insert(&self, events: Arc<dyn ContextEvents>) -> u64 {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.open.write().insert(id, events);
        id
    }

    fn remove(&self, id: u64) {
        self.open.write().remove(&id);
    }

    /// The receiver of the events of a new object in `context`.
    ///
    /// # Errors
    /// `EINVAL` if the context is closed.
    pub(crate) fn target(&self, context: &Context, cookie: u64) -> Result<EventTarget, Errno> {
        let open = self.open.read();
        let events = open.get(&context.id).cloned().ok_or(Errno::INVAL)?;
        Ok(EventTarget { events, cookie })
    }

    /// Delivers an event of the port or device to every context.
    pub(crate) fn deliver_to_all(&self, event: AsyncEvent) {
        let open = self.open.read();
        open.values().for_each(|events| events.async_event(event, 0));
    }

    pub(crate) fn len(&self) -> usize {
        self.open.read().len()
    }

    /// The numbers of the open contexts.
    pub(crate) fn all(&self) -> Vec<u64> {
        self.open.read().keys().copied().collect()
    }
}

/// A memory region, for lists of objects.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Region {
    /// Bytes.
    pub(crate) len: usize,
    /// Number of the protection domain.
    pub(crate) pd: u32,
}

/// The protection domains by number, and the memory regions by STag, for lists of objects.
#[derive(Debug, Default)]
pub(crate) struct Registered {
    domains: Mutex<HashSet<u32>>,
    regions: Mutex<HashMap<u32, Region>>,
}

impl Registered {
    pub(crate) fn domains(&self) -> MutexGuard<'_, HashSet<u32>> {
        self.domains.lock()
    }

    pub(crate) fn regions(&self) -> MutexGuard<'_, HashMap<u32, Region>> {
        self.regions.lock()
    }
}
