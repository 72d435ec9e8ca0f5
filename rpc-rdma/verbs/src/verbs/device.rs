//! A device, and memory that is registered with it.

use super::cm::Id;
use super::result::{made, returned};
use crate::lock::lock;
use crate::memory::{Arena, Pool};
use rdma_mummy_sys as sys;
use std::ffi::c_void;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, PoisonError};

/// A device, with a protection domain in which a pool's arenas are registered.
pub(crate) struct Device {
    pub(super) context: NonNull<sys::ibv_context>,
    pub(super) domain: NonNull<sys::ibv_pd>,
    pool: Pool,
    /// One for each arena, by number.
    arenas: Mutex<Vec<Arc<Region>>>,
    pub(crate) limits: Limits,
}

/// What a device can do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Work requests of a queue.
    pub(crate) works: u32,
    /// Elements of a request.
    pub(crate) elements: u32,
    /// RDMA Reads that a queue pair may make, and be asked for, at a time.
    pub(crate) reads: u8,
    /// Memory windows of type 2, for which there are work requests.
    pub(crate) windows: bool,
    /// Sends that invalidate.
    pub(crate) invalidates: bool,
    /// Where an RDMA Read's bytes go must be open to the peer's Writes, since on iWARP the peer is
    /// told its STag (RFC 5040 §5.2).
    pub(crate) open_sinks: bool,
}

// SAFETY: libibverbs' contexts and protection domains may be used by all threads.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// Names the device that an identifier was bound to.
    pub(crate) fn key(id: &Id) -> io::Result<usize> {
        Ok(id.context()?.as_ptr() as usize)
    }

    /// The device that `id` was bound to; its windows are there or not, if it has any. To be
    /// dropped before all identifiers that are: it is them that keep the device open.
    pub(crate) fn of(id: &Id, pool: &Pool, windows: bool) -> io::Result<Self> {
        let context = id.context()?;
        // SAFETY: all zeroes is a value of this plain structure.
        let mut attributes: sys::ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the device is open as long as the identifier, and the place for the answer is
        // there.
        returned(unsafe { sys::ibv_query_device(context.as_ptr(), &mut attributes) })?;
        // SAFETY: as above.
        let iwarp = unsafe { (*(*context.as_ptr()).device).transport_type }
            == sys::ibv_transport_type::IBV_TRANSPORT_IWARP;
        // SAFETY: as above.
        let domain = made(unsafe { sys::ibv_alloc_pd(context.as_ptr()) })?;
        let reads = attributes.max_qp_rd_atom.min(attributes.max_qp_init_rd_atom);
        let can = |flag: sys::ibv_device_cap_flags| attributes.device_cap_flags & flag.0 != 0;
        let limits = Limits {
            works: attributes.max_qp_wr.max(1) as u32,
            elements: attributes.max_sge.clamp(1, 16) as u32,
            reads: reads.clamp(1, 16) as u8,
            windows: windows && can(sys::ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2B),
            invalidates: can(sys::ibv_device_cap_flags::IBV_DEVICE_MEM_MGT_EXTENSIONS),
            open_sinks: iwarp,
        };
        Ok(Self {
            context,
            domain,
            pool: pool.clone(),
            arenas: Mutex::default(),
            limits,
        })
    }

    /// The registration of an arena of the pool, for our own use and to bind windows to.
    pub(crate) fn arena(&self, number: usize) -> io::Result<Arc<Region>> {
        let mut arenas = lock(&self.arenas);
        if arenas.len() <= number {
            for arena in self.pool.arenas_from(arenas.len()) {
                arenas.push(Arc::new(self.register_arena(arena)?));
            }
        }
        let region = arenas.get(number).cloned();
        region.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn register_arena(&self, arena: Arena) -> io::Result<Region> {
        let mut access = sys::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0;
        if self.limits.windows {
            access |= sys::ibv_access_flags::IBV_ACCESS_MW_BIND.0;
        }
        self.register(arena.base, crate::memory::MAX_BUFFER, access)
    }

    /// Registers memory for the peer: to be read, or to be written.
    pub(crate) fn open(&self, at: usize, len: usize, writes: bool) -> io::Result<Region> {
        let access = if writes {
            sys::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0 | sys::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0
        } else {
            sys::ibv_access_flags::IBV_ACCESS_REMOTE_READ.0
        };
        self.register(at, len, access)
    }

    fn register(&self, at: usize, len: usize, access: u32) -> io::Result<Region> {
        let place = ptr::with_exposed_provenance_mut::<c_void>(at);
        // SAFETY: the domain is there; the memory is a pool's, which stays mapped as long as this
        // device keeps the pool.
        let region = unsafe { sys::ibv_reg_mr(self.domain.as_ptr(), place, len, access as i32) };
        made(region).map(Region)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.arenas
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .clear();
        // SAFETY: links, regions and windows of this domain are owned by links, which keep the
        // device; arenas are gone.
        unsafe { sys::ibv_dealloc_pd(self.domain.as_ptr()) };
    }
}

/// Registered memory.
pub(crate) struct Region(pub(super) NonNull<sys::ibv_mr>);

// SAFETY: libibverbs' regions may be used by all threads.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    pub(crate) fn local_key(&self) -> u32 {
        // SAFETY: the region is there.
        unsafe { (*self.0.as_ptr()).lkey }
    }

    pub(crate) fn remote_key(&self) -> u32 {
        // SAFETY: the region is there.
        unsafe { (*self.0.as_ptr()).rkey }
    }

    /// Deregisters it; the peer has no access when this is done.
    pub(crate) fn close(self) -> io::Result<()> {
        let region = std::mem::ManuallyDrop::new(self);
        // SAFETY: the region is there, and nobody has it any more.
        returned(unsafe { sys::ibv_dereg_mr(region.0.as_ptr()) })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: as in `close`.
        unsafe { sys::ibv_dereg_mr(self.0.as_ptr()) };
    }
}

/// A memory window of type 2: a key that work requests bind to memory and invalidate.
pub(crate) struct Window(pub(super) NonNull<sys::ibv_mw>);

// SAFETY: libibverbs' windows may be used by all threads, one at a time.
unsafe impl Send for Window {}

impl Window {
    /// What it is known by while it is bound.
    pub(crate) fn remote_key(&self) -> u32 {
        // SAFETY: the window is there.
        unsafe { (*self.0.as_ptr()).rkey }
    }

    /// What it will be known by when it is bound the next time.
    pub(crate) fn next_key(&self) -> u32 {
        // SAFETY: computes.
        unsafe { sys::ibv_inc_rkey(self.remote_key()) }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: the window is there, and nobody has it any more.
        unsafe { sys::ibv_dealloc_mw(self.0.as_ptr()) };
    }
}
