//! Parent domains (`ibv_alloc_parent_domain(3)`): another handle for a domain, with the program's
//! own allocator for the objects in it. The allocator provides the rings of queue pairs, shared
//! receive queues and completion queues.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use rustix::io::Errno;
use urnic_driver::RingPlacement;
use urnic_rdma_core::*;

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
pub(super) struct Allocator {
    pub(super) alloc: ParentDomainAlloc,
    pub(super) free: ParentDomainFree,
    pub(super) context: *mut c_void,
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
    /// The parent domain, which cannot be freed before its queues (EBUSY).
    domain: *mut ibv_pd,
    resource: Resource,
    /// The pieces of memory that the allocator returned.
    pieces: Mutex<Vec<NonNull<u8>>>,
    /// Held by one caller at a time while other rings replace these. Without the lock, concurrent
    /// callers would free each other's rings.
    changing: Mutex<()>,
}

// SAFETY: the pieces are addresses, and only the address of the domain is used.
unsafe impl Send for Rings {}
// SAFETY: the pieces are addresses, and only the address of the domain is used.
unsafe impl Sync for Rings {}

// SAFETY: `alloc` promises exclusive memory of that size, and the memory is freed after the queue
// was destroyed or its creation failed.
unsafe impl RingPlacement for Rings {
    fn place(&self, len: usize, align: usize) -> Result<Option<NonNull<u8>>, Errno> {
        let Some(allocator) = &self.allocator else {
            return Ok(None);
        };
        // SAFETY: the program's function, called according to its manual page.
        let piece =
            unsafe { (allocator.alloc)(self.domain, allocator.context, len, align, self.resource as u64) };
        if piece.addr() == IBV_ALLOCATOR_USE_DEFAULT {
            return Ok(None);
        }
        let piece = NonNull::new(piece.cast()).ok_or(Errno::NOMEM)?;
        self.with_pieces(|pieces| pieces.push(piece));
        Ok(Some(piece))
    }
}

impl Rings {
    /// The rings of a queue of this domain, which has this allocator.
    pub(super) fn of(allocator: Option<Allocator>, domain: *mut ibv_pd, resource: Resource) -> Rings {
        Rings {
            allocator,
            domain,
            resource,
            pieces: Mutex::default(),
            changing: Mutex::default(),
        }
    }

    /// The rings of a queue that is in no domain.
    pub(super) fn anywhere(resource: Resource) -> Rings {
        Rings::of(None, std::ptr::null_mut(), resource)
    }

    fn with_pieces<T>(&self, what: impl FnOnce(&mut Vec<NonNull<u8>>) -> T) -> T {
        what(&mut self.pieces.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Lets `change` replace these rings by others. The old rings are freed if `change` succeeds;
    /// otherwise the new ones are freed.
    ///
    /// Errors: the errors of `change`.
    pub(super) fn replaced<T>(&self, change: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
        let _alone = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.with_pieces(|pieces| pieces.len());
        let changed = change();
        let over: Vec<_> = self.with_pieces(|pieces| match changed {
            Ok(_) => pieces.drain(..before).collect(),
            Err(_) => pieces.drain(before..).collect(),
        });
        self.give_back(over);
        changed
    }

    fn give_back(&self, pieces: Vec<NonNull<u8>>) {
        let Some(allocator) = &self.allocator else {
            return;
        };
        for piece in pieces {
            // SAFETY: the program's function, with memory that the program's allocation function
            // returned and that is no longer in use.
            unsafe {
                (allocator.free)(
                    self.domain,
                    allocator.context,
                    piece.as_ptr().cast(),
                    self.resource as u64,
                );
            }
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

    unsafe extern "C" fn alloc(_: *mut ibv_pd, heap: *mut c_void, _: usize, _: usize, _: u64) -> *mut c_void {
        // SAFETY: the test's own.
        let heap = unsafe { &*heap.cast::<Heap>() };
        let left = heap.left.replace_with(|left| left.saturating_sub(1));
        if left == 0 {
            return std::ptr::null_mut();
        }
        heap.out.borrow_mut().push(left << 12);
        std::ptr::without_provenance_mut(left << 12)
    }

    unsafe extern "C" fn free(_: *mut ibv_pd, heap: *mut c_void, piece: *mut c_void, _: u64) {
        // SAFETY: the test's own.
        let out = unsafe { &(*heap.cast::<Heap>()).out };
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
        };
        let mut rings = Rings::anywhere(Resource::Completions);
        rings.allocator = Some(allocator);
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
