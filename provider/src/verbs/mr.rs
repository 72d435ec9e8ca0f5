//! Memory regions.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Weak};

use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use urnic_device::command::features;
use urnic_device::vocabulary::Access;
use urnic_rdma_core::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_ON_DEMAND, IBV_ADVISE_MR_ADVICE_PREFETCH,
    IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, IBV_ADVISE_MR_FLAG_FLUSH,
    IBV_MR_TYPE_DMABUF_MR, IBV_MR_TYPE_IMPORTED_MR, IBV_MR_TYPE_MR, IBV_MR_TYPE_NULL_MR,
    IBV_REREG_MR_CHANGE_ACCESS, IBV_REREG_MR_CHANGE_PD, IBV_REREG_MR_CHANGE_TRANSLATION,
    IBV_REREG_MR_FLAGS_SUPPORTED, ibv_mr, ibv_pd, ibv_sge, verbs_mr,
};

use super::faulted;
use super::pd::Pd;
use super::shared_with_c::SharedWithC;
use super::unaligned;
use crate::copy_on_fork::children_may_have_registered_memory;
use crate::file::File;
use crate::file::device_memory::Memory;
use crate::file::dmabuf::Mapped;
use crate::file::on_demand::Place;
use crate::file::region::{Region, State};
use crate::guard::{pointer, status};
use crate::library::Library;

/// A memory region: the part of libibverbs, then the part of the provider.
#[repr(C)]
pub(super) struct Mr {
    /// Must be first: libibverbs' pointer is also the provider's.
    abi: SharedWithC<verbs_mr>,
    region: Arc<Region>,
    file: Weak<File>,
    /// The libibverbs that withholds the memory from forked children, where that was taken back.
    inherited: Option<&'static Library>,
}

/// Lets forked children have the memory of a new region. After `ibv_fork_init`, libibverbs
/// withholds it (releases before 51 even where its answer is that this is unnecessary). It counts
/// the registrations of each range, and this takes back its count of this one, so what another
/// device needs stays. A child that another thread forks in the midst of a registration may miss
/// the memory.
fn inherit(library: &'static Library, addr: *mut c_void, length: usize) -> Option<&'static Library> {
    let inherited = children_may_have_registered_memory().then_some(library)?;
    inherited.give_to_children(addr, length);
    Some(inherited)
}

/// The access rights for the device: hints are removed.
///
/// Errors: INVAL for unknown bits, and for remote write access to memory that the device itself may
/// not write.
fn access(raw: c_int) -> Result<Access, Errno> {
    let access = Access::from_bits(raw as u32).ok_or(Errno::INVAL)?;
    if access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC)
        && !access.contains(Access::LOCAL_WRITE)
    {
        return Err(Errno::INVAL);
    }
    Ok(access - (Access::OPTIONAL | Access::HUGETLB))
}

/// `ibv_reg_mr(3)` and `ibv_reg_mr_iova(3)`: work requests name the first byte `iova`, or 0 if the
/// region is zero-based. On demand, the memory need not be mapped, and the whole address space is
/// also a valid region (implicit: address 0, length `SIZE_MAX`). EOPNOTSUPP for an on-demand region
/// if the device does not support them.
pub(super) unsafe extern "C" fn reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    flags: c_int,
) -> *mut ibv_mr {
    pointer(|| {
        // SAFETY: a live domain.
        faulted::call(unsafe { Pd::of(pd) }.context().driver, "reg_mr")?;
        let access = access(flags)?;
        if length == 0 {
            return Err(Errno::INVAL);
        }
        let base = if access.contains(Access::ZERO_BASED) {
            0
        } else {
            iova
        };
        // SAFETY: a live domain.
        let pd_ = unsafe { Pd::of(pd) };
        let domain = pd_.domain()?.clone();
        let device = domain
            .driver
            .register(&domain.device, addr, length, base, access)?;
        let place = Place {
            addr,
            len: length,
            base,
            access,
        };
        domain.on_demand.put(device.stag, place);
        let state = State::new(device, domain, length, flags as u32);
        let mut mr = Mr::entered(pd_, addr, IBV_MR_TYPE_MR, state);
        if !access.contains(Access::ON_DEMAND) {
            mr.inherited = inherit(pd_.context().library, addr, length);
        }
        Ok(mr)
    })
    .cast()
}

impl Mr {
    /// Makes a new region in this domain, and enters it for import by other contexts on the same
    /// file.
    fn entered(pd: &Pd, addr: *mut c_void, mr_type: u32, state: State) -> Box<Mr> {
        let handle = state.device.stag;
        let abi = described(pd, handle, addr, mr_type, &state);
        let region = Arc::new(Region::new(state));
        let file = pd.file();
        if let Some(file) = &file {
            file.regions.enter(handle, region.clone());
        }
        Box::new(Mr {
            abi: SharedWithC::new(abi),
            region,
            file: file.as_ref().map(Arc::downgrade).unwrap_or_default(),
            inherited: None,
        })
    }

    /// Restores the count of the present memory, which libibverbs takes back when the region has
    /// left it.
    fn withhold_again(&self) {
        if let Some(library) = self.inherited {
            // SAFETY: the program's structure, which the program does not use meanwhile.
            let public = unsafe { &(*self.abi.get()).ibv_mr };
            library.withhold_from_children(public.addr, public.length);
        }
    }
}

/// The structure that the program sees of a region in this domain.
fn described(pd: &Pd, handle: u32, addr: *mut c_void, mr_type: u32, state: &State) -> verbs_mr {
    verbs_mr {
        ibv_mr: ibv_mr {
            context: pd.ibv_context(),
            pd: pd.public(),
            addr,
            length: state.length,
            handle,
            lkey: state.lkey,
            rkey: state.rkey,
        },
        mr_type,
        access: state.flags,
    }
}

/// `ibv_import_mr(3)`: the region's keys and length; its address is not returned. ENOENT if no
/// context of the file has such a region; EIO in a forked child.
pub(super) unsafe extern "C" fn import_mr(pd: *mut ibv_pd, handle: u32) -> *mut ibv_mr {
    pointer(|| {
        // SAFETY: a live domain.
        let pd_ = unsafe { Pd::of(pd) };
        let file = pd_.file().ok_or(Errno::IO)?;
        let region = file.regions.find(handle)?;
        let abi = match &*region.lock()? {
            Some(state) => described(pd_, handle, null_mut(), IBV_MR_TYPE_IMPORTED_MR, state),
            None => return Err(Errno::NOENT),
        };
        Ok(Box::new(Mr {
            abi: SharedWithC::new(abi),
            region,
            file: Arc::downgrade(&file),
            inherited: None,
        }))
    })
    .cast()
}

/// `ibv_unimport_mr(3)`: removes one handle of the region.
pub(super) unsafe extern "C" fn unimport_mr(mr: *mut ibv_mr) {
    status(|| {
        // SAFETY: from `Box::into_raw`, and no other reference is left.
        drop(unsafe { Box::from_raw(mr.cast::<Mr>()) });
        Ok(())
    });
}

/// The address, length and name of the first byte of a region's new memory.
fn new_memory(addr: *mut c_void, length: usize, rights: Access) -> Result<(*mut c_void, usize, u64), Errno> {
    if length == 0 {
        return Err(Errno::INVAL);
    }
    let base = if rights.contains(Access::ZERO_BASED) {
        0
    } else {
        addr.addr() as u64
    };
    Ok((addr, length, base))
}

/// `ibv_rereg_mr(3)`: the keys do not change. ENOENT if another context deregistered the region.
pub(super) unsafe extern "C" fn rereg_mr(
    mr: *mut verbs_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    rights: c_int,
) -> c_int {
    status(|| {
        // SAFETY: a live region of this provider.
        let this = unsafe { &*mr.cast::<Mr>() };
        let mut state = this.region.lock()?;
        let state = state.as_mut().ok_or(Errno::NOENT)?;
        let flags = flags as u32;
        let has = |bit| flags & bit != 0;
        if flags & !IBV_REREG_MR_FLAGS_SUPPORTED != 0 {
            return Err(Errno::INVAL);
        }
        let old = state.flags;
        let raw = if has(IBV_REREG_MR_CHANGE_ACCESS) {
            rights
        } else {
            old as c_int
        };
        let rights = access(raw)?;
        let memory = has(IBV_REREG_MR_CHANGE_TRANSLATION)
            .then(|| new_memory(addr, length, rights))
            .transpose()?;
        // The device accesses regions on demand and other regions in different ways.
        if memory.is_none() && (raw ^ old as c_int) as u32 & IBV_ACCESS_ON_DEMAND != 0 {
            return Err(Errno::INVAL);
        }
        let domain = match has(IBV_REREG_MR_CHANGE_PD) {
            true if pd.is_null() => return Err(Errno::INVAL),
            // SAFETY: a live domain.
            true => Some(unsafe { Pd::of(pd) }.domain()?.clone()),
            false => None,
        };
        this.region.driver.reregister(
            &mut state.device,
            &urnic_driver::Reregistration {
                memory,
                pd: domain.as_ref().map(|domain| &domain.device),
                access: has(IBV_REREG_MR_CHANGE_ACCESS),
                rights,
            },
        )?;
        let stag = state.device.stag;
        let was = state.domain.on_demand.take(stag);
        if let Some(domain) = domain {
            state.domain = domain;
        }
        let place = match (memory, was) {
            (Some((addr, len, base)), _) => Some(Place {
                addr,
                len,
                base,
                access: rights,
            }),
            (None, was) => was.map(|was| Place {
                access: rights,
                ..was
            }),
        };
        if let Some(place) = place {
            state.domain.on_demand.put(stag, place);
        }
        state.flags = raw as u32;
        if let Some((addr, length, _)) = memory {
            state.length = length;
            state.unmap();
            this.inherited
                .inspect(|library| library.give_to_children(addr, length));
            this.withhold_again();
        }
        // SAFETY: the program's structure, which the program does not use during the change.
        unsafe { (*this.abi.get()).access = state.flags };
        Ok(())
    })
}

/// Registers a region of device memory.
///
/// Errors: INVAL outside of the device memory, and for a region on demand, since device memory is
/// always present; the errors of [`reg_mr`].
///
/// # Safety
/// `pd` is a live domain.
pub(super) unsafe fn of_device_memory(
    pd: *mut ibv_pd,
    memory: &Arc<Memory>,
    offset: u64,
    length: usize,
    flags: u32,
) -> Result<Box<Mr>, Errno> {
    let access = access(flags as c_int)?;
    if access.contains(Access::ON_DEMAND) {
        return Err(Errno::INVAL);
    }
    let addr = memory.range(offset, length)?.cast();
    // SAFETY: the caller promises a live domain.
    let pd_ = unsafe { Pd::of(pd) };
    let domain = pd_.domain()?.clone();
    let device = domain.driver.register(&domain.device, addr, length, 0, access)?;
    let state = State::new(device, domain, length, flags).within(memory.clone());
    Ok(Mr::entered(pd_, null_mut(), IBV_MR_TYPE_MR, state))
}

/// `ibv_reg_dmabuf_mr(3)`, also for other files that can be mapped: work requests name the byte
/// `offset` of the file `iova`, or 0 if the region is zero-based. EOPNOTSUPP if the device is in
/// another process, or the file cannot be mapped; EINVAL outside of the file and on demand; else
/// the errors of [`Mapped::new`] and [`reg_mr`].
pub(super) unsafe extern "C" fn reg_dmabuf_mr(
    pd: *mut ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    flags: c_int,
) -> *mut ibv_mr {
    pointer(|| {
        let access = access(flags)?;
        if access.contains(Access::ON_DEMAND) {
            return Err(Errno::INVAL);
        }
        // SAFETY: a live domain.
        let pd_ = unsafe { Pd::of(pd) };
        let domain = pd_.domain()?.clone();
        if domain.driver.attributes().features & features::ON_DEMAND == 0 {
            // A device in another process has only the memory that the program itself has mapped.
            return Err(Errno::OPNOTSUPP);
        }
        if fd < 0 {
            return Err(Errno::BADF);
        }
        // SAFETY: the program's descriptor, which it keeps open during the call.
        let file = unsafe { BorrowedFd::borrow_raw(fd) };
        let (mapped, addr) = Mapped::new(file, offset, length, access.contains(Access::LOCAL_WRITE))?;
        let base = if access.contains(Access::ZERO_BASED) {
            0
        } else {
            iova
        };
        let device = domain
            .driver
            .register(&domain.device, addr, length, base, access)?;
        let state = State::new(device, domain, length, flags as u32).of_file(mapped);
        let shown = std::ptr::without_provenance_mut(offset as usize);
        Ok(Mr::entered(pd_, shown, IBV_MR_TYPE_DMABUF_MR, state))
    })
    .cast()
}

/// `ibv_alloc_null_mr(3)`.
pub(super) unsafe extern "C" fn alloc_null_mr(pd: *mut ibv_pd) -> *mut ibv_mr {
    pointer(|| {
        // SAFETY: a live domain.
        let pd_ = unsafe { Pd::of(pd) };
        let domain = pd_.domain()?.clone();
        let device = domain.driver.register_null(&domain.device)?;
        let mut state = State::new(device, domain, usize::MAX, IBV_ACCESS_LOCAL_WRITE);
        state.rkey = 0;
        Ok(Mr::entered(pd_, null_mut(), IBV_MR_TYPE_NULL_MR, state))
    })
    .cast()
}

/// `ibv_dereg_mr(3)`: after it returns, no byte is read or written through the region. ENOENT if
/// another context deregistered the region.
pub(super) unsafe extern "C" fn dereg_mr(mr: *mut verbs_mr) -> c_int {
    status(|| {
        // SAFETY: a live region of this provider.
        let this = unsafe { &*mr.cast::<Mr>() };
        let mut state = this.region.lock()?;
        let known = state.as_ref().ok_or(Errno::NOENT)?;
        let handle = known.device.stag;
        this.region.driver.deregister(&known.device)?;
        known.domain.on_demand.take(handle);
        *state = None;
        if let Some(file) = this.file.upgrade() {
            // A new region of another thread may already have the handle: that region keeps it.
            let _ = file.regions.withdraw(handle, &this.region);
        }
        drop(state);
        // SAFETY: from `Box::into_raw`, and no other reference is left.
        unsafe { Box::from_raw(mr.cast::<Mr>()) }.withhold_again();
        Ok(())
    })
}

/// `ibv_advise_mr(3)`: EOPNOTSUPP for advice other than prefetching, EINVAL for unknown flags, else
/// the errors of [`asked`](crate::file::on_demand::Places::asked). Pages that cannot be loaded are
/// an error only with the flush flag: otherwise each later access detects the fault.
pub(super) unsafe extern "C" fn advise_mr(
    pd: *mut ibv_pd,
    advice: c_int,
    flags: u32,
    elements: *mut ibv_sge,
    count: u32,
) -> c_int {
    status(|| {
        let (fault, write) = match u32::try_from(advice) {
            Ok(IBV_ADVISE_MR_ADVICE_PREFETCH) => (true, false),
            Ok(IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE) => (true, true),
            Ok(IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT) => (false, false),
            _ => return Err(Errno::OPNOTSUPP),
        };
        if flags & !IBV_ADVISE_MR_FLAG_FLUSH != 0 || count == 0 || elements.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: a live domain.
        let domain = unsafe { Pd::of(pd) }.domain()?;
        // In a forked child a thread of the parent may hold the lock of the places.
        domain.driver.check_process()?;
        let places = &domain.on_demand;
        // SAFETY: the program's list has `count` elements.
        let elements = unsafe { unaligned::elements(elements, count as usize) };
        let asked: Result<Vec<_>, Errno> = elements.iter().map(|e| places.asked(&e.get(), write)).collect();
        for (addr, len) in asked? {
            if fault
                && let Err(errno) = urnic_driver::prefetch(addr, len, write)
                && flags & IBV_ADVISE_MR_FLAG_FLUSH != 0
            {
                return Err(errno);
            }
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use urnic_rdma_core::*;

    #[test]
    fn rights_that_need_local_write_are_refused_without_it() {
        let local = IBV_ACCESS_LOCAL_WRITE as c_int;
        for writer in [
            IBV_ACCESS_REMOTE_WRITE as c_int,
            IBV_ACCESS_REMOTE_ATOMIC as c_int,
        ] {
            assert_eq!(access(writer), Err(Errno::INVAL));
            assert!(access(writer | local).is_ok());
        }
        assert_eq!(access(0), Ok(Access::empty()));
        assert_eq!(access(IBV_ACCESS_REMOTE_READ as c_int), Ok(Access::REMOTE_READ));
    }

    #[test]
    fn unknown_rights_are_refused_and_hints_are_not() {
        assert_eq!(access(1 << 8), Err(Errno::INVAL));
        assert_eq!(access(i32::MIN), Err(Errno::INVAL));
        assert_eq!(
            access(IBV_ACCESS_RELAXED_ORDERING as c_int | 1 << 29),
            Ok(Access::empty())
        );
        assert_eq!(access(IBV_ACCESS_HUGETLB as c_int), Ok(Access::empty()));
        assert_eq!(access(IBV_ACCESS_ON_DEMAND as c_int), Ok(Access::ON_DEMAND));
    }
}
