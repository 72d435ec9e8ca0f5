//! Tables of the driver's objects: each object with the receiver of its events.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use rustix::io::Errno;

use crate::pages::Pages;

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
    pub(crate) id: u64,
    pub(crate) pages: Pages,
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
        self.0
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(number, (object, target));
    }

    /// Removes an object; waits for an event that is being delivered to it.
    pub(crate) fn remove(&self, number: u32) {
        self.0
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&number);
    }

    pub(crate) fn find(&self, number: u32) -> Option<Arc<T>> {
        self.with(number, |object, _| object.clone())
    }

    /// Calls `work` on an object and the receiver of its events, with the table locked for reading.
    pub(crate) fn with<R>(&self, number: u32, work: impl FnOnce(&Arc<T>, &EventTarget) -> R) -> Option<R> {
        let objects = self.0.read().unwrap_or_else(PoisonError::into_inner);
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
        let objects = self.0.read().unwrap_or_else(PoisonError::into_inner);
        objects
            .iter()
            .map(|(number, (object, _))| (*number, object.clone()))
            .collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.read().unwrap_or_else(PoisonError::into_inner).len()
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
    pub(crate) fn insert(&self, events: Arc<dyn ContextEvents>) -> u64 {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.open
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(id, events);
        id
    }

    pub(crate) fn remove(&self, id: u64) {
        self.open
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&id);
    }

    /// The receiver of the events of a new object in context `context`.
    ///
    /// # Errors
    /// `EINVAL` if the context is closed.
    pub(crate) fn target(&self, context: u64, cookie: u64) -> Result<EventTarget, Errno> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        let events = open.get(&context).cloned().ok_or(Errno::INVAL)?;
        Ok(EventTarget { events, cookie })
    }

    /// Delivers an event of the port or device to every context.
    pub(crate) fn deliver_to_all(&self, event: AsyncEvent) {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        open.values().for_each(|events| events.async_event(event, 0));
    }

    pub(crate) fn len(&self) -> usize {
        self.open.read().unwrap_or_else(PoisonError::into_inner).len()
    }
}

/// What a plan of faults lets happen.
#[derive(Debug, Clone)]
pub(crate) enum Planned {
    /// This queue pair fails.
    Error(u32),
    /// This completion queue overflows, and with it these queue pairs fail.
    CqOverflow(u32, Vec<u32>),
    /// The port is down.
    PortDown,
    /// The addresses of the port seem to change.
    GidChange,
}
