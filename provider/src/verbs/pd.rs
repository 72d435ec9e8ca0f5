//! Protection domains, and parent domains (`ibv_alloc_parent_domain(3)`): another handle for a
//! domain, with the program's own allocator for the objects in it. The allocator provides the rings
//! of queue pairs, shared receive queues and completion queues.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use urnic_sync::Mutex;

use rustix::io::Errno;
use urnic_driver::{Reason, Refusal, RingPlacement};
use urnic_rdma_core::*;

use super::faulted;
use crate::context::OpenContext;
use crate::file::File;
use crate::file::domain::Domain;
use crate::from_c::{Given, SharedWithC, ToFree, objects, pointers};

/// A protection domain: the part of libibverbs, then the part of the provider.
#[repr(C)]
pub(crate) struct Pd {
    /// Must be first: libibverbs' pointer is also the provider's.
    abi: SharedWithC<ibv_pd>,
    /// The context in which the domain was created.
    context: OpenContext,
    domain: Arc<Domain>,
    file: Weak<File>,
    /// The number of queues and parent domains in this domain, in any context. A parent domain
    /// counts its own.
    members: Arc<AtomicU32>,
    /// For a parent domain: its membership in the domain.
    parent_of: Option<DomainMembership>,
    /// For a parent domain: the allocator of its queues.
    allocator: Option<Allocator>,
}

/// The membership of a queue or parent domain in a domain.
pub(super) struct DomainMembership {
    members: Arc<AtomicU32>,
    domain: Arc<Domain>,
}

impl DomainMembership {
    /// The domain of this membership.
    pub(super) fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }
}

impl Drop for DomainMembership {
    fn drop(&mut self) {
        self.members.fetch_sub(1, Ordering::Relaxed);
    }
}

objects! { Pd: ibv_pd; }

pointers! {
    ibv_parent_domain_init_attr { pd: Pd; }
}

impl Pd {
    /// libibverbs' pointer to the domain.
    pub(super) fn public(&self) -> *mut ibv_pd {
        self.abi.get()
    }

    /// The context in which the domain was created.
    pub(super) fn context(&self) -> OpenContext {
        self.context
    }

    /// The shared domain, which lives as long as any object is in it.
    ///
    /// Errors: NOENT if another context freed the domain.
    pub(super) fn domain(&self) -> Result<&Arc<Domain>, Errno> {
        if let Some(file) = self.file() {
            file.domains.check(self.domain.device.id, &self.domain)?;
        }
        Ok(&self.domain)
    }

    /// A handle for this shared domain in this context.
    fn boxed(context: OpenContext, file: Weak<File>, domain: Arc<Domain>) -> Box<Pd> {
        Box::new(Pd {
            abi: Pd::abi(context, &domain),
            context,
            file,
            members: domain.members.clone(),
            domain,
            parent_of: None,
            allocator: None,
        })
    }

    fn abi(context: OpenContext, domain: &Domain) -> SharedWithC<ibv_pd> {
        SharedWithC::new(ibv_pd {
            context: context.public(),
            handle: domain.device.id,
        })
    }

    /// The open device file that the domain belongs to.
    pub(super) fn file(&self) -> Option<Arc<File>> {
        File::upgraded(&self.file)
    }

    /// The rings of a queue in this domain.
    pub(super) fn rings(&self, resource: Resource) -> Rings {
        Rings::of(
            self.allocator.map(|allocator| Allocator {
                domain: self.public(),
                ..allocator
            }),
            resource,
        )
    }

    /// Admits a queue. The call must come before the queue is created, so that the domain cannot be
    /// freed in the meantime.
    ///
    /// Errors: those of [`Pd::domain`].
    pub(super) fn admit(&self) -> Result<DomainMembership, Errno> {
        self.members.fetch_add(1, Ordering::Relaxed);
        let membership = DomainMembership {
            members: self.members.clone(),
            domain: self.domain.clone(),
        };
        self.domain()?;
        Ok(membership)
    }
}

/// `ibv_alloc_pd(3)`.
pub(super) fn alloc_pd(context: OpenContext) -> Result<Box<Pd>, Refusal> {
    faulted::call(context.driver, "alloc_pd")?;
    let domain = Arc::new(Domain::alloc(context.driver)?);
    let file = context.file();
    if let Some(file) = file {
        file.domains.enter(domain.device.id, domain.clone());
    }
    let file = file.map(Arc::downgrade).unwrap_or_default();
    Ok(Pd::boxed(context, file, domain))
}

/// `ibv_import_pd(3)`: ENOENT if no context of the file has such a domain; EIO in a forked child.
pub(super) fn import_pd(context: OpenContext, handle: u32) -> Result<Box<Pd>, Errno> {
    let file = context.file().ok_or(Errno::IO)?;
    let domain = file.domains.find(handle)?;
    Ok(Pd::boxed(context, Arc::downgrade(file), domain))
}

/// `ibv_unimport_pd(3)`: removes one handle of the domain. The objects in the domain stay, and may
/// no longer use this handle.
pub(super) fn unimport_pd(pd: ToFree<Pd>) -> Result<(), Errno> {
    if pd.parent_of.is_some() {
        tracing::warn!("ibv_unimport_pd of a parent domain, which cannot be imported");
        return Ok(());
    }
    pd.free();
    Ok(())
}

/// `ibv_alloc_parent_domain(3)`: EOPNOTSUPP for allocators if the device does not support queues in
/// arbitrary memory.
pub(super) fn alloc_parent_domain(
    context: OpenContext,
    attr: Given<'_, ibv_parent_domain_init_attr>,
) -> Result<Box<Pd>, Refusal> {
    const KNOWN: u32 = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
    let has = |bit: u32| attr.comp_mask & bit != 0;
    let unknown = attr.comp_mask & !KNOWN;
    if unknown != 0 {
        let (argument, bits) = ("comp_mask", unknown.into());
        return Err(Reason::Bits { argument, bits }.invalid());
    }
    let pd = attr.pd().ok_or(Reason::Null("pd").invalid())?;
    let allocator = if has(IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS) {
        let (Some(alloc), Some(free)) = (attr.alloc, attr.free) else {
            return Err(Reason::Null("alloc or free").invalid());
        };
        if !pd.domain()?.driver.takes_rings() {
            return Err(Errno::OPNOTSUPP.into());
        }
        let given = has(IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT);
        let context = if given {
            attr.pd_context
        } else {
            std::ptr::null_mut()
        };
        Some(Allocator {
            alloc,
            free,
            context,
            domain: std::ptr::null_mut(),
        })
    } else {
        None
    };
    let domain = pd.domain()?.clone();
    Ok(Box::new(Pd {
        abi: Pd::abi(context, &domain),
        context,
        domain,
        file: pd.file.clone(),
        members: Arc::default(),
        parent_of: Some(pd.admit()?),
        allocator,
    }))
}

/// `ibv_dealloc_pd(3)`: EBUSY while a queue is in the domain, or while it has a parent domain;
/// ENOENT if another context freed it.
///
/// With regions in the domain, the call "may fail" according to the manual page. Here it succeeds,
/// and the domain ends with the last region: over iWARP, perftest 4.5 leaves one region registered,
/// and would report an error after a correct measurement.
pub(super) fn dealloc_pd(pd: ToFree<Pd>) -> Result<(), Refusal> {
    if pd.members.load(Ordering::Relaxed) > 0 {
        return Err(Reason::UsedBy("queues or parent domains").with(Errno::BUSY));
    }
    if pd.parent_of.is_none() {
        let domain = &pd.domain;
        if let Some(file) = pd.file() {
            let empty = || pd.members.load(Ordering::Relaxed) == 0;
            file.domains.withdraw_if(domain.device.id, domain, empty)?;
        }
        if Arc::strong_count(domain) > 1 {
            tracing::info!(
                "protection domain {} is freed with regions in it, or imported ones left",
                domain.device.id
            );
        }
    }
    pd.free();
    Ok(())
}

/// `ibv_alloc_td(3)`: the queues always lock, so the provider does not use the program's promise.
pub(super) fn alloc_td(context: OpenContext, attr: &ibv_td_init_attr) -> Result<Box<ibv_td>, Refusal> {
    if attr.comp_mask != 0 {
        let (argument, bits) = ("comp_mask", attr.comp_mask.into());
        return Err(Reason::Bits { argument, bits }.invalid());
    }
    Ok(Box::new(ibv_td {
        context: context.public(),
    }))
}

/// `ibv_dealloc_td(3)`.
pub(super) fn dealloc_td(td: ToFree<ibv_td>) -> Result<(), Errno> {
    td.free();
    Ok(())
}

/// The purpose of a ring, for the program's allocator.
#[derive(Debug, Clone, Copy)]
#[repr(u64)]
pub(super) enum Resource {
    /// A send or a receive queue.
    QueuePair = 1,
    /// A shared receive queue.
    SharedReceives = 2,
    /// A completion queue.
    Completions = 3,
}

/// A parent domain's allocator.
#[derive(Debug, Clone, Copy)]
struct Allocator {
    alloc: ParentDomainAlloc,
    free: ParentDomainFree,
    context: *mut c_void,
    /// The parent domain, which cannot be freed before its queues (EBUSY).
    domain: *mut ibv_pd,
}

// SAFETY: the program that gives libibverbs an allocator is responsible for the threads that create
// its queues.
unsafe impl Send for Allocator {}
// SAFETY: the program that gives libibverbs an allocator is responsible for the threads that create
// its queues.
unsafe impl Sync for Allocator {}

/// The rings of one queue, in memory from the allocator of its parent domain, if there is one. They
/// are freed after the queue.
pub(super) struct Rings {
    allocator: Option<Allocator>,
    resource: Resource,
    /// The addresses of the pieces of memory that the allocator returned.
    pieces: Mutex<Vec<usize>>,
    /// Held by one caller at a time while other rings replace these. Without the lock, concurrent
    /// callers would free each other's rings.
    changing: Mutex<()>,
}

// SAFETY: `alloc` promises exclusive memory of that size, and the memory is freed after the queue
// was destroyed or its creation failed.
unsafe impl RingPlacement for Rings {
    fn place(&self, len: usize, align: usize) -> Result<Option<NonNull<u8>>, Errno> {
        let Some(Allocator {
            alloc,
            domain,
            context,
            ..
        }) = self.allocator
        else {
            return Ok(None);
        };
        // SAFETY: the program's function, called according to its manual page.
        let piece = unsafe { alloc(domain, context, len, align, self.resource as u64) };
        if piece.addr() == IBV_ALLOCATOR_USE_DEFAULT {
            return Ok(None);
        }
        let piece = NonNull::new(piece.cast::<u8>()).ok_or(Errno::NOMEM)?;
        self.with_pieces(|pieces| pieces.push(piece.as_ptr().expose_provenance()));
        Ok(Some(piece))
    }
}

impl Rings {
    /// The rings of a queue with this allocator.
    fn of(allocator: Option<Allocator>, resource: Resource) -> Rings {
        Rings {
            allocator,
            resource,
            pieces: Mutex::default(),
            changing: Mutex::default(),
        }
    }

    /// The rings of a queue that is in no domain.
    pub(super) fn anywhere(resource: Resource) -> Rings {
        Rings::of(None, resource)
    }

    fn with_pieces<T>(&self, what: impl FnOnce(&mut Vec<usize>) -> T) -> T {
        what(&mut self.pieces.lock())
    }

    /// Lets `change` replace these rings by others. The old rings are freed if `change` succeeds;
    /// otherwise the new ones are freed.
    ///
    /// Errors: the errors of `change`.
    pub(super) fn replaced<T, E>(&self, change: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let _alone = self.changing.lock();
        let before = self.with_pieces(|pieces| pieces.len());
        let changed = change();
        let over: Vec<_> = self.with_pieces(|pieces| match changed {
            Ok(_) => pieces.drain(..before).collect(),
            Err(_) => pieces.drain(before..).collect(),
        });
        self.give_back(over);
        changed
    }

    fn give_back(&self, pieces: Vec<usize>) {
        let Some(Allocator {
            free,
            domain,
            context,
            ..
        }) = self.allocator
        else {
            return;
        };
        for piece in pieces {
            let piece = std::ptr::with_exposed_provenance_mut(piece);
            // SAFETY: the program's function, with memory that the program's allocation function
            // returned and that is no longer in use.
            unsafe { free(domain, context, piece, self.resource as u64) };
        }
    }
}

impl Drop for Rings {
    fn drop(&mut self) {
        let pieces = self.with_pieces(std::mem::take);
        self.give_back(pieces);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    /// The addresses in use, and the number of further addresses that may be allocated.
    struct Heap {
        out: RefCell<Vec<usize>>,
        left: RefCell<usize>,
    }

    fn heap<'a>(heap: *mut c_void) -> &'a Heap {
        // SAFETY: the test's own.
        unsafe { &*heap.cast::<Heap>() }
    }

    unsafe extern "C" fn alloc(_: *mut ibv_pd, heap: *mut c_void, _: usize, _: usize, _: u64) -> *mut c_void {
        let heap = self::heap(heap);
        let left = heap.left.replace_with(|left| left.saturating_sub(1));
        if left == 0 {
            return std::ptr::null_mut();
        }
        heap.out.borrow_mut().push(left << 12);
        std::ptr::without_provenance_mut(left << 12)
    }

    unsafe extern "C" fn free(_: *mut ibv_pd, heap: *mut c_void, piece: *mut c_void, _: u64) {
        let out = &self::heap(heap).out;
        let at = out.borrow().iter().position(|out| *out == piece.addr()).unwrap();
        out.borrow_mut().remove(at);
    }

    #[test]
    fn memory_of_the_allocator_is_freed_once() {
        let mut heap = Heap {
            out: RefCell::default(),
            left: RefCell::new(4),
        };
        let allocator = Allocator {
            alloc,
            free,
            context: (&raw mut heap).cast(),
            domain: std::ptr::null_mut(),
        };
        let rings = Rings::of(Some(allocator), Resource::Completions);
        let place = || rings.place(64, 4096);
        assert!(matches!(place(), Ok(Some(_))));
        assert_eq!(
            rings.replaced(|| place().and(Err::<(), _>(Errno::INVAL))),
            Err(Errno::INVAL)
        );
        assert_eq!(*heap.out.borrow(), [4 << 12], "the new one went back");
        assert_eq!(rings.replaced(|| place().map(drop)), Ok(()));
        assert_eq!(*heap.out.borrow(), [2 << 12], "the old one went back");
        assert!(matches!(place(), Ok(Some(_))));
        assert_eq!(place(), Err(Errno::NOMEM));
        drop(rings);
        assert!(heap.out.borrow().is_empty());
    }
}
