//! A device, and memory registered with it.

use super::cm::Id;
use super::owned::{Owned, Plain};
use super::result::returned;
use crate::memory::{Arena, Pool};
use rdma_mummy_sys as sys;
use std::ffi::c_void;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use urnic_sync::Mutex;

/// A device, with a protection domain in which a pool's arenas are registered.
pub(crate) struct Device {
    pub(super) context: NonNull<sys::ibv_context>,
    /// The registrations of arenas, by arena number. They are dropped before the domain.
    arenas: Mutex<Vec<Arc<Region>>>,
    pub(super) domain: Owned<sys::ibv_pd>,
    pool: Pool,
    pub(crate) limits: Limits,
}

/// The limits and features of a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Maximum work requests of a queue.
    pub(crate) works: u32,
    /// Maximum elements of a request.
    pub(crate) elements: u32,
    /// Maximum concurrent RDMA Reads of a queue pair, in each direction.
    pub(crate) reads: u8,
    /// The device supports memory windows of type 2, which work requests bind.
    pub(crate) windows: bool,
    /// The device supports Sends that invalidate.
    pub(crate) invalidates: bool,
    /// The sink of an RDMA Read must permit remote Writes, because on iWARP the peer gets its STag
    /// (RFC 5040 §5.2).
    pub(crate) open_sinks: bool,
}

// SAFETY: libibverbs' contexts may be used by all threads.
unsafe impl Send for Device {}
// SAFETY: libibverbs' contexts may be used by several threads at the same time.
unsafe impl Sync for Device {}

impl Device {
    /// The key of the device to which an identifier is bound.
    pub(crate) fn key(id: &Id) -> io::Result<usize> {
        Ok(id.context()?.as_ptr() as usize)
    }

    /// The device to which `id` is bound. `windows` permits the use of its memory windows, if it
    /// supports them. The device must be dropped before all identifiers that are bound to it,
    /// because they keep it open.
    pub(crate) fn of(id: &Id, pool: &Pool, windows: bool) -> io::Result<Self> {
        let context = id.context()?;
        let mut attributes = sys::ibv_device_attr::zeroes();
        // SAFETY: the device is open as long as the identifier, and `attributes` is a valid place
        // for the result.
        returned(unsafe { sys::ibv_query_device(context.as_ptr(), &mut attributes) })?;
        // SAFETY: the device is open as long as the identifier, so its context is valid.
        let iwarp = unsafe { (*(*context.as_ptr()).device).transport_type }
            == sys::ibv_transport_type::IBV_TRANSPORT_IWARP;
        // SAFETY: the device is open as long as the identifier, which the caller keeps longer than
        // the result.
        let domain = unsafe { Owned::made(sys::ibv_alloc_pd(context.as_ptr())) }?;
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

    /// The registration of an arena of the pool, for local use and for windows.
    pub(crate) fn arena(&self, number: usize) -> io::Result<Arc<Region>> {
        let mut arenas = self.arenas.lock();
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

    /// Registers memory that the peer may read or, with `writes`, write.
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
        // SAFETY: the domain exists, and links, which own regions, keep the device. The memory
        // belongs to the pool, which stays mapped as long as this device keeps the pool.
        let region =
            unsafe { Owned::made(sys::ibv_reg_mr(self.domain.as_ptr(), place, len, access as i32)) }?;
        // SAFETY: the region was just made, and its keys do not change.
        let (local_key, remote_key) = unsafe { ((*region.as_ptr()).lkey, (*region.as_ptr()).rkey) };
        Ok(Region {
            region,
            local_key,
            remote_key,
        })
    }

    /// A new window, not bound to memory.
    pub(super) fn window(&self) -> io::Result<Window> {
        // SAFETY: the domain exists, and links, which own windows, keep the device.
        let window = unsafe {
            Owned::made(sys::ibv_alloc_mw(
                self.domain.as_ptr(),
                sys::ibv_mw_type::IBV_MW_TYPE_2,
            ))
        };
        window.map(Window)
    }
}

/// Registered memory.
pub(crate) struct Region {
    pub(super) region: Owned<sys::ibv_mr>,
    pub(crate) local_key: u32,
    pub(crate) remote_key: u32,
}

impl Region {
    /// Deregisters the memory. The peer has no more access when this returns.
    pub(crate) fn close(self) -> io::Result<()> {
        returned(self.region.destroy())
    }
}

/// A memory window of type 2: a key that work requests bind to memory and invalidate.
pub(crate) struct Window(pub(super) Owned<sys::ibv_mw>);

impl Window {
    /// The key of the window while it is bound.
    pub(crate) fn remote_key(&self) -> u32 {
        // SAFETY: the window exists as long as `self`.
        unsafe { (*self.0.as_ptr()).rkey }
    }

    /// The key that the window gets when it is bound the next time (ibv_inc_rkey(3)).
    pub(crate) fn next_key(&self) -> u32 {
        let key = self.remote_key();
        key & !0xff | key.wrapping_add(1) & 0xff
    }
}
