//! Memory regions.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Weak};

use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use urnic_device::command::features;
use urnic_device::vocabulary::Access;
use urnic_driver::{Reason, Refusal};
use urnic_rdma_core::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_ON_DEMAND, IBV_ADVISE_MR_ADVICE_PREFETCH,
    IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, IBV_ADVISE_MR_FLAG_FLUSH,
    IBV_MR_TYPE_DMABUF_MR, IBV_MR_TYPE_IMPORTED_MR, IBV_MR_TYPE_MR, IBV_MR_TYPE_NULL_MR,
    IBV_REREG_MR_CHANGE_ACCESS, IBV_REREG_MR_CHANGE_PD, IBV_REREG_MR_CHANGE_TRANSLATION,
    IBV_REREG_MR_FLAGS_SUPPORTED, ibv_mr, ibv_pd, ibv_sge, verbs_mr,
};
use zerocopy::Unalign;

use super::faulted;
use super::pd::Pd;
use crate::copy_on_fork::children_may_have_registered_memory;
use crate::file::File;
use crate::file::device_memory;
use crate::file::domain::Place;
use crate::file::region::{Region, State, map_file};
use crate::from_c::{SharedWithC, ToFree, objects};
use crate::library::Library;

/// A memory region: the part of libibverbs, then the part of the provider.
#[repr(C)]
pub(super) struct Mr {
    /// Must be first: libibverbs' pointer is also the provider's.
    abi: SharedWithC<verbs_mr>,
    region: Arc<Region>,
    file: Weak<File>,
    /// The libibverbs that counts the memory as withheld from forked children, if that count was
    /// removed.
    inherited: Option<&'static Library>,
}

objects! { Mr: ibv_mr, verbs_mr; }

const NO_LENGTH: Reason = Reason::Rule("length is 0");

/// Gives the memory of a new region to forked children. After `ibv_fork_init`, libibverbs withholds
/// it (releases before 51 even if its answer is that this is unnecessary). It counts the
/// registrations of each range, and this removes its count of the new one, so memory that another
/// device needs stays withheld. A child that another thread forks during a registration may miss
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
fn access(raw: c_int) -> Result<Access, Refusal> {
    let unknown = Reason::Bits {
        argument: "access",
        bits: (raw as u32 & !Access::all().bits()).into(),
    };
    let access = Access::from_bits(raw as u32).ok_or(unknown.invalid())?;
    for (right, given) in [
        (Access::REMOTE_WRITE, "REMOTE_WRITE"),
        (Access::REMOTE_ATOMIC, "REMOTE_ATOMIC"),
    ] {
        if access.contains(right) && !access.contains(Access::LOCAL_WRITE) {
            let missing = "LOCAL_WRITE";
            return Err(Reason::Needs { given, missing }.invalid());
        }
    }
    Ok(access - (Access::OPTIONAL | Access::HUGETLB))
}

/// The refusal of memory that is not there; or another error.
fn unmapped(errno: Errno) -> Refusal {
    match errno {
        Errno::FAULT => Reason::Rule(
            "a page between addr and addr + length is not mapped, or read-only and the rights include writing",
        )
        .with(errno),
        errno => errno.into(),
    }
}

/// `ibv_reg_mr(3)` and `ibv_reg_mr_iova(3)`: work requests name the first byte `iova`, or 0 if the
/// region is zero-based. On demand, the memory need not be mapped, and the whole address space is
/// also a valid region (implicit: address 0, length `SIZE_MAX`). EOPNOTSUPP for an on-demand region
/// if the device does not support them. A region of no bytes, which is not on demand, serves
/// requests of length zero.
pub(super) fn reg_mr(
    pd: &Pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    flags: c_int,
) -> Result<Box<Mr>, Refusal> {
    let context = pd.context();
    faulted::call(context.driver, "reg_mr")?;
    let access = access(flags)?;
    if length == 0 && access.contains(Access::ON_DEMAND) {
        return Err(NO_LENGTH.invalid());
    }
    let base = if access.contains(Access::ZERO_BASED) {
        0
    } else {
        iova
    };
    let domain = pd.admit_to_domain()?;
    let device = domain
        .driver
        .register(&domain.device, addr, length, base, access)
        .map_err(unmapped)?;
    let place = Place {
        addr: addr.addr(),
        len: length,
        base,
        access,
    };
    domain.on_demand.put(device.stag, place);
    let state = State::new(device, domain, length, flags as u32);
    let mut mr = Mr::entered(pd, addr, IBV_MR_TYPE_MR, state);
    if !access.contains(Access::ON_DEMAND) {
        mr.inherited = inherit(context.library, addr, length);
    }
    Ok(mr)
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

    /// The key by which the program names the region.
    pub(super) fn lkey(&self) -> u32 {
        self.public().lkey
    }

    /// The length of the region in bytes.
    pub(super) fn length(&self) -> usize {
        self.public().length
    }

    /// The structure that the program sees.
    fn public(&self) -> &ibv_mr {
        // SAFETY: the program's structure, which the program does not change.
        unsafe { &(*self.abi.get()).ibv_mr }
    }

    /// Restores the count of the present memory, because libibverbs removes a count when the region
    /// has left it.
    fn withhold_again(&self) {
        if let Some(library) = self.inherited {
            library.withhold_from_children(self.public().addr, self.public().length);
        }
    }
}

/// The structure that the program sees of a region in this domain.
fn described(pd: &Pd, handle: u32, addr: *mut c_void, mr_type: u32, state: &State) -> verbs_mr {
    verbs_mr {
        ibv_mr: ibv_mr {
            context: pd.context().public(),
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
pub(super) fn import_mr(pd: &Pd, handle: u32) -> Result<Box<Mr>, Refusal> {
    let file = pd.file().ok_or(Errno::IO)?;
    let region = file.regions.find(handle)?;
    let abi = match &*region.lock()? {
        Some(state) => described(pd, handle, null_mut(), IBV_MR_TYPE_IMPORTED_MR, state),
        None => return Err(Errno::NOENT.into()),
    };
    Ok(Box::new(Mr {
        abi: SharedWithC::new(abi),
        region,
        file: Arc::downgrade(&file),
        inherited: None,
    }))
}

/// `ibv_unimport_mr(3)`: removes one handle of the region.
pub(super) fn unimport_mr(mr: ToFree<Mr>) -> Result<(), Errno> {
    mr.free();
    Ok(())
}

/// The address, length and name of the first byte of a region's new memory.
fn new_memory(
    addr: *mut c_void,
    length: usize,
    rights: Access,
) -> Result<(*mut c_void, usize, u64), Refusal> {
    if length == 0 {
        return Err(NO_LENGTH.invalid());
    }
    let base = if rights.contains(Access::ZERO_BASED) {
        0
    } else {
        addr.addr() as u64
    };
    Ok((addr, length, base))
}

/// The memory and the access rights of a reregistration, if its flags change them.
#[derive(Clone, Copy)]
pub(super) struct Memory {
    pub(super) addr: *mut c_void,
    pub(super) length: usize,
    pub(super) rights: c_int,
}

/// The domain of a reregistration, which is a domain only if the flags say so.
pub(super) fn changed_domain(flags: c_int, pd: *mut ibv_pd) -> *mut ibv_pd {
    match flags as u32 & IBV_REREG_MR_CHANGE_PD {
        0 => null_mut(),
        _ => pd,
    }
}

/// `ibv_rereg_mr(3)`: the keys do not change. ENOENT if another context deregistered the region,
/// EINVAL for a handle that the program changed.
pub(super) fn rereg_mr(mr: &Mr, flags: u32, pd: Option<&Pd>, new: Memory) -> Result<(), Refusal> {
    let mut state = mr.region.lock()?;
    let state = state.as_mut().ok_or(Errno::NOENT)?;
    if mr.public().handle != state.device.stag {
        return Err(Reason::ChangedHandle.invalid());
    }
    let has = |bit| flags & bit != 0;
    let unknown = flags & !IBV_REREG_MR_FLAGS_SUPPORTED;
    if unknown != 0 {
        let (argument, bits) = ("flags", unknown.into());
        return Err(Reason::Bits { argument, bits }.invalid());
    }
    let old = state.flags;
    let raw = if has(IBV_REREG_MR_CHANGE_ACCESS) {
        new.rights
    } else {
        old as c_int
    };
    let rights = access(raw)?;
    let memory = has(IBV_REREG_MR_CHANGE_TRANSLATION)
        .then(|| new_memory(new.addr, new.length, rights))
        .transpose()?;
    // The device accesses regions on demand and other regions in different ways.
    if memory.is_none() && (raw ^ old as c_int) as u32 & IBV_ACCESS_ON_DEMAND != 0 {
        return Err(Reason::Rule("ON_DEMAND can change only with the translation").invalid());
    }
    let domain = match has(IBV_REREG_MR_CHANGE_PD) {
        true => Some(pd.ok_or(Reason::Null("pd").invalid())?.admit_to_domain()?),
        false => None,
    };
    mr.region.driver.reregister(
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
            addr: addr.addr(),
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
        mr.inherited
            .inspect(|library| library.give_to_children(addr, length));
        mr.withhold_again();
    }
    // SAFETY: the program's structure, which the program does not use during the change.
    unsafe { (*mr.abi.get()).access = state.flags };
    Ok(())
}

/// Registers a region of device memory.
///
/// Errors: INVAL outside of the device memory, and for a region on demand, since device memory is
/// always present; the errors of [`reg_mr`].
pub(super) fn of_device_memory(
    pd: &Pd,
    memory: &Arc<device_memory::Memory>,
    offset: u64,
    length: usize,
    flags: u32,
) -> Result<Box<Mr>, Refusal> {
    let access = access(flags as c_int)?;
    if access.contains(Access::ON_DEMAND) {
        return Err(Reason::Rule("device memory cannot be ON_DEMAND").invalid());
    }
    let addr = memory.range(offset, length)?.cast();
    let domain = pd.admit_to_domain()?;
    let device = domain.driver.register(&domain.device, addr, length, 0, access)?;
    let state = State::new(device, domain, length, flags).within(memory.clone());
    Ok(Mr::entered(pd, null_mut(), IBV_MR_TYPE_MR, state))
}

/// `ibv_reg_dmabuf_mr(3)`, also for other files that can be mapped: work requests name the byte
/// `offset` of the file `iova`, or 0 if the region is zero-based. EOPNOTSUPP if the device is in
/// another process, or the file cannot be mapped, or the program cannot access what is mapped;
/// EINVAL outside of the file and on demand; else the errors of [`map_file`] and [`reg_mr`].
///
/// Without a descriptor it is EOPNOTSUPP, too: NCCL and UCX ask with -1 whether the device reaches
/// the memory of a GPU, and a kernel that can answers EBADF.
pub(super) fn reg_dmabuf_mr(
    pd: &Pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: Option<BorrowedFd<'_>>,
    flags: c_int,
) -> Result<Box<Mr>, Refusal> {
    let access = access(flags)?;
    if access.contains(Access::ON_DEMAND) {
        return Err(Reason::Rule("a file cannot be ON_DEMAND").invalid());
    }
    let domain = pd.admit_to_domain()?;
    if domain.driver.attributes().features & features::ON_DEMAND == 0 {
        // A device in another process has only the memory that the program itself has mapped.
        return Err(Errno::OPNOTSUPP.into());
    }
    let file = fd.ok_or(Errno::OPNOTSUPP)?;
    let (mapped, addr) = map_file(file, offset, length, access.contains(Access::LOCAL_WRITE))?;
    let base = if access.contains(Access::ZERO_BASED) {
        0
    } else {
        iova
    };
    let device = domain
        .driver
        .register(&domain.device, addr, length, base, access)
        .map_err(|errno| match errno {
            // Memory of a device, which system calls do not access.
            Errno::FAULT => Errno::OPNOTSUPP,
            errno => errno,
        })?;
    let state = State::new(device, domain, length, flags as u32).of_file(mapped);
    let shown = std::ptr::without_provenance_mut(offset as usize);
    Ok(Mr::entered(pd, shown, IBV_MR_TYPE_DMABUF_MR, state))
}

/// `ibv_alloc_null_mr(3)`.
pub(super) fn alloc_null_mr(pd: &Pd) -> Result<Box<Mr>, Refusal> {
    let domain = pd.admit_to_domain()?;
    let device = domain.driver.register_null(&domain.device)?;
    let mut state = State::new(device, domain, usize::MAX, IBV_ACCESS_LOCAL_WRITE);
    state.rkey = 0;
    Ok(Mr::entered(pd, null_mut(), IBV_MR_TYPE_NULL_MR, state))
}

/// `ibv_dereg_mr(3)`: after it returns, no byte is read or written through the region. ENOENT if
/// another context deregistered the region, and for a handle that the program changed.
pub(super) fn dereg_mr(mr: ToFree<Mr>) -> Result<(), Refusal> {
    let mut state = mr.region.lock()?;
    let known = state.as_ref().ok_or(Errno::NOENT)?;
    let handle = known.device.stag;
    if mr.public().handle != handle {
        return Err(Reason::ChangedHandle.with(Errno::NOENT));
    }
    mr.region.driver.deregister(&known.device)?;
    known.domain.on_demand.take(handle);
    *state = None;
    if let Some(file) = mr.file.upgrade() {
        // A new region of another thread may already have the handle: that region keeps it.
        let _ = file.regions.withdraw(handle, &mr.region);
    }
    drop(state);
    mr.withhold_again();
    mr.free();
    Ok(())
}

/// `ibv_advise_mr(3)`: EOPNOTSUPP for advice other than prefetching, and for a region that is not
/// on demand; EINVAL for unknown flags; else the errors of
/// [`asked`](crate::file::domain::Places::asked). Pages that cannot be loaded are an error only
/// with the flush flag: otherwise each later access detects the fault.
pub(super) fn advise_mr(
    pd: &Pd,
    advice: c_int,
    flags: u32,
    elements: &[Unalign<ibv_sge>],
) -> Result<(), Refusal> {
    let (fault, write) = match u32::try_from(advice) {
        Ok(IBV_ADVISE_MR_ADVICE_PREFETCH) => (true, false),
        Ok(IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE) => (true, true),
        Ok(IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT) => (false, false),
        _ => return Err(Errno::OPNOTSUPP.into()),
    };
    if flags & !IBV_ADVISE_MR_FLAG_FLUSH != 0 || elements.is_empty() {
        return Err(Errno::INVAL.into());
    }
    let domain = pd.domain()?;
    // In a forked child a thread of the parent may hold the lock of the places.
    domain.driver.check_process()?;
    let places = &domain.on_demand;
    let is_ordinary = |key| {
        let region = pd.file().and_then(|file| file.regions.find(key).ok());
        region.is_some_and(|region| region.is_in(domain))
    };
    let asked = elements.iter().map(|element| {
        let element = element.get();
        places.asked(&element, write).map_err(|errno| match errno {
            Errno::NOENT if is_ordinary(element.lkey) => Errno::OPNOTSUPP,
            errno => errno,
        })
    });
    let asked: Result<Vec<_>, Errno> = asked.collect();
    for (addr, len) in asked? {
        if fault
            && let Err(errno) = urnic_driver::prefetch(addr, len, write)
            && flags & IBV_ADVISE_MR_FLAG_FLUSH != 0
        {
            return Err(errno.into());
        }
    }
    Ok(())
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
            assert_eq!(access(writer).unwrap_err().errno, Errno::INVAL);
            assert!(access(writer | local).is_ok());
        }
        assert_eq!(access(0), Ok(Access::empty()));
        assert_eq!(access(IBV_ACCESS_REMOTE_READ as c_int), Ok(Access::REMOTE_READ));
    }

    #[test]
    fn unknown_rights_are_refused_and_hints_are_not() {
        assert_eq!(access(1 << 8).unwrap_err().errno, Errno::INVAL);
        assert_eq!(access(i32::MIN).unwrap_err().errno, Errno::INVAL);
        assert_eq!(
            access(IBV_ACCESS_RELAXED_ORDERING as c_int | 1 << 29),
            Ok(Access::empty())
        );
        assert_eq!(access(IBV_ACCESS_HUGETLB as c_int), Ok(Access::empty()));
        assert_eq!(access(IBV_ACCESS_ON_DEMAND as c_int), Ok(Access::ON_DEMAND));
    }
}
