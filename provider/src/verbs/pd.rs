//! Protection domains, and address handles, which only datagrams would use.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use rustix::io::Errno;
use urnic_rdma_core::*;

use super::faulted;
use super::parent_domain::{Allocator, Resource, Rings};
use super::shared_with_c::SharedWithC;
use crate::context::Context;
use crate::file::File;
use crate::file::domain::Domain;
use crate::guard::{pointer, status};

/// A protection domain: the part of libibverbs, then the part of the provider.
#[repr(C)]
pub(crate) struct Pd {
    /// Must be first: libibverbs' pointer is also the provider's.
    pub(super) abi: SharedWithC<ibv_pd>,
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

impl Pd {
    /// The domain behind libibverbs' pointer.
    ///
    /// # Safety
    /// `pd` came from [`alloc_pd`], [`alloc_parent_domain`] or [`import_pd`] and was not freed.
    pub(super) unsafe fn of<'a>(pd: *mut ibv_pd) -> &'a Pd {
        // SAFETY: the caller promises a domain of this provider, and `abi` is the first field.
        unsafe { &*pd.cast::<Pd>() }
    }

    /// libibverbs' pointer to the context in which the domain was created.
    pub(super) fn ibv_context(&self) -> *mut ibv_context {
        // SAFETY: set at creation, and never changed.
        unsafe { (*self.abi.get()).context }
    }

    /// libibverbs' pointer to the domain.
    pub(super) fn public(&self) -> *mut ibv_pd {
        self.abi.get()
    }

    /// The context in which the domain was created.
    pub(super) fn context(&self) -> &Context {
        // SAFETY: contexts outlive the objects that were created in them.
        unsafe { Context::of(self.ibv_context()) }
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
    fn boxed(context: *mut ibv_context, file: Weak<File>, domain: Arc<Domain>) -> Box<Pd> {
        let handle = domain.device.id;
        Box::new(Pd {
            abi: SharedWithC::new(ibv_pd { context, handle }),
            file,
            members: domain.members.clone(),
            domain,
            parent_of: None,
            allocator: None,
        })
    }

    /// The open device file that the domain belongs to.
    pub(super) fn file(&self) -> Option<Arc<File>> {
        File::upgraded(&self.file)
    }

    /// The rings of a queue in this domain.
    pub(super) fn rings(&self, resource: Resource) -> Rings {
        Rings::of(self.allocator, self.public(), resource)
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
pub(super) unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    pointer(|| {
        // SAFETY: libibverbs gives an open context.
        let ours = unsafe { Context::of(context) };
        faulted::call(ours.driver, "alloc_pd")?;
        let domain = Arc::new(Domain::alloc(ours.driver)?);
        let file = ours.file();
        if let Some(file) = file {
            file.domains.enter(domain.device.id, domain.clone());
        }
        let file = file.map(Arc::downgrade).unwrap_or_default();
        Ok(Pd::boxed(context, file, domain))
    })
    .cast()
}

/// `ibv_import_pd(3)`: ENOENT if no context of the file has such a domain; EIO in a forked child.
pub(super) unsafe extern "C" fn import_pd(context: *mut ibv_context, handle: u32) -> *mut ibv_pd {
    pointer(|| {
        // SAFETY: libibverbs gives an open context.
        let file = unsafe { Context::of(context) }.file().ok_or(Errno::IO)?;
        let domain = file.domains.find(handle)?;
        Ok(Pd::boxed(context, Arc::downgrade(file), domain))
    })
    .cast()
}

/// `ibv_unimport_pd(3)`: removes one handle of the domain. The objects in the domain stay, and may
/// no longer use this handle.
pub(super) unsafe extern "C" fn unimport_pd(pd: *mut ibv_pd) {
    status(|| {
        // SAFETY: a live domain.
        if unsafe { Pd::of(pd) }.parent_of.is_some() {
            tracing::warn!("ibv_unimport_pd of a parent domain, which cannot be imported");
            return Ok(());
        }
        // SAFETY: from `Box::into_raw`, and no other reference is left.
        drop(unsafe { Box::from_raw(pd.cast::<Pd>()) });
        Ok(())
    });
}

/// `ibv_alloc_parent_domain(3)`: EOPNOTSUPP for allocators if the device does not support queues in
/// arbitrary memory.
pub(super) unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    pointer(|| {
        // SAFETY: the program's attributes.
        let attr = unsafe { &*attr };
        let has = |bit: u32| attr.comp_mask & bit != 0;
        if attr.comp_mask & !(IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT)
            != 0
            || attr.pd.is_null()
        {
            return Err(Errno::INVAL);
        }
        // SAFETY: a live domain.
        let pd = unsafe { Pd::of(attr.pd) };
        let allocator = if has(IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS) {
            let (Some(alloc), Some(free)) = (attr.alloc, attr.free) else {
                return Err(Errno::INVAL);
            };
            if !pd.domain()?.driver.takes_rings() {
                return Err(Errno::OPNOTSUPP);
            }
            let given = has(IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT);
            let context = if given {
                attr.pd_context
            } else {
                std::ptr::null_mut()
            };
            Some(Allocator { alloc, free, context })
        } else {
            None
        };
        let domain = pd.domain()?.clone();
        let handle = domain.device.id;
        Ok(Box::new(Pd {
            abi: SharedWithC::new(ibv_pd { context, handle }),
            domain,
            file: pd.file.clone(),
            members: Arc::default(),
            parent_of: Some(pd.admit()?),
            allocator,
        }))
    })
    .cast()
}

/// `ibv_dealloc_pd(3)`: EBUSY while a queue is in the domain, or while it has a parent domain;
/// ENOENT if another context freed it.
///
/// With regions in the domain, the call "may fail" according to the manual page. Here it succeeds,
/// and the domain ends with the last region: over iWARP, perftest 4.5 leaves one region registered,
/// and would report an error after a correct measurement.
pub(super) unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    status(|| {
        // SAFETY: a live domain.
        let this = unsafe { Pd::of(pd) };
        if this.members.load(Ordering::Relaxed) > 0 {
            return Err(Errno::BUSY);
        }
        if this.parent_of.is_none() {
            let domain = &this.domain;
            if let Some(file) = this.file() {
                let empty = || this.members.load(Ordering::Relaxed) == 0;
                file.domains.withdraw_if(domain.device.id, domain, empty)?;
            }
            if Arc::strong_count(domain) > 1 {
                tracing::info!(
                    "protection domain {} is freed with regions in it, or imported ones left",
                    domain.device.id
                );
            }
        }
        // SAFETY: from `Box::into_raw`, and no other reference is left.
        drop(unsafe { Box::from_raw(pd.cast::<Pd>()) });
        Ok(())
    })
}

/// `ibv_alloc_td(3)`: the queues always lock, so the provider does not use the program's promise.
pub(super) unsafe extern "C" fn alloc_td(
    context: *mut ibv_context,
    attr: *mut ibv_td_init_attr,
) -> *mut ibv_td {
    pointer(|| {
        // SAFETY: the program's attributes.
        if unsafe { (*attr).comp_mask } != 0 {
            return Err(Errno::INVAL);
        }
        Ok(Box::new(ibv_td { context }))
    })
}

/// `ibv_dealloc_td(3)`.
pub(super) unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    status(|| {
        // SAFETY: from `Box::into_raw`, and no other reference is left.
        drop(unsafe { Box::from_raw(td) });
        Ok(())
    })
}
