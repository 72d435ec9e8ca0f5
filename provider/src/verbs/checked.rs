//! The verbs of a process with the option `strict`, whose checks ([`strict`](crate::strict)) learn
//! here what the program creates, registers, destroys and waits for. What it posts and polls they
//! learn from the queues. In other processes libibverbs gets the unchecked functions directly.

use std::ffi::{c_int, c_void};

use rustix::io::Errno;
use urnic_device::vocabulary::Access;
use urnic_rdma_core::*;

use super::cq::Cq;
use super::pd::Pd;
use super::{ah, cq, cq_ex, dm, mr, mw, observed, pd, qp, qp_ex, srq};
use crate::guard::contained;
use crate::strict::{self, CallSite, Kind, Region, Rule, Strict};

/// The operations, with the checked functions in the place of the functions that they call.
pub(super) fn in_place_of(operations: ContextOps) -> ContextOps {
    operations
        .alloc_pd(alloc_pd)
        .dealloc_pd(dealloc_pd)
        .create_ah(create_ah)
        .destroy_ah(destroy_ah)
        .reg_mr(reg_mr)
        .rereg_mr(rereg_mr)
        .dereg_mr(dereg_mr)
        .reg_dm_mr(reg_dm_mr)
        .reg_dmabuf_mr(reg_dmabuf_mr)
        .alloc_null_mr(alloc_null_mr)
        .import_mr(import_mr)
        .alloc_mw(alloc_mw)
        .dealloc_mw(dealloc_mw)
        .create_srq(create_srq)
        .create_srq_ex(create_srq_ex)
        .destroy_srq(destroy_srq)
        .create_cq(create_cq)
        .create_cq_ex(create_cq_ex)
        .destroy_cq(destroy_cq)
        .poll_cq(poll_cq)
        .cq_event(cq_event)
        .req_notify_cq(req_notify_cq)
        .create_qp(create_qp)
        .create_qp_ex(create_qp_ex)
        .destroy_qp(destroy_qp)
}

/// Tells the checks.
fn tell(what: impl FnOnce(&'static Strict)) {
    contained(|| {
        if let Some(strict) = strict::current() {
            what(strict);
        }
    });
}

fn created<T>(kind: Kind, object: *mut T) -> *mut T {
    tell(|strict| strict.objects.created(kind, object.addr()));
    object
}

/// Notes what became of an object that the program destroys.
fn destroyed(kind: Kind, address: usize, status: c_int) -> c_int {
    tell(|strict| match status {
        0 => strict.objects.destroyed(kind, address),
        _ if status == Errno::BUSY.raw_os_error() => {
            strict
                .findings
                .report(Rule::DestroyedTooEarly, &CallSite::here(), || {
                    format!(
                        "{} cannot be destroyed (EBUSY): others still use it",
                        kind.counted(1)
                    )
                });
        }
        _ => {}
    });
    status
}

macro_rules! creators {
    ($($kind:ident: $name:ident = $module:ident($($arg:ident: $ty:ty),*) -> $object:ty;)*) => { $(
        unsafe extern "C" fn $name($($arg: $ty),*) -> $object {
            // SAFETY: the caller's arguments.
            created(Kind::$kind, unsafe { $module::$name($($arg),*) })
        }
    )* };
}

creators! {
    ProtectionDomain: alloc_pd = pd(context: *mut ibv_context) -> *mut ibv_pd;
    AddressHandle: create_ah = ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah;
    MemoryWindow: alloc_mw = mw(pd: *mut ibv_pd, kind: ibv_mw_type) -> *mut ibv_mw;
    SharedReceiveQueue: create_srq = srq(pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> *mut ibv_srq;
    SharedReceiveQueue: create_srq_ex = srq(
        context: *mut ibv_context, attr: *mut ibv_srq_init_attr_ex
    ) -> *mut ibv_srq;
    CompletionQueue: create_cq = cq(
        context: *mut ibv_context, cqe: c_int, channel: *mut ibv_comp_channel, vector: c_int
    ) -> *mut ibv_cq;
    CompletionQueue: create_cq_ex = cq_ex(
        context: *mut ibv_context, attr: *mut ibv_cq_init_attr_ex
    ) -> *mut ibv_cq_ex;
    QueuePair: create_qp = qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp;
    QueuePair: create_qp_ex = qp_ex(
        context: *mut ibv_context, attr: *mut ibv_qp_init_attr_ex
    ) -> *mut ibv_qp;
}

macro_rules! destroyers {
    ($($kind:ident: $name:ident = $module:ident($object:ty);)*) => { $(
        unsafe extern "C" fn $name(object: $object) -> c_int {
            let address = object.addr();
            // SAFETY: the caller's argument.
            destroyed(Kind::$kind, address, unsafe { $module::$name(object) })
        }
    )* };
}

destroyers! {
    ProtectionDomain: dealloc_pd = pd(*mut ibv_pd);
    AddressHandle: destroy_ah = ah(*mut ibv_ah);
    MemoryWindow: dealloc_mw = mw(*mut ibv_mw);
    SharedReceiveQueue: destroy_srq = srq(*mut ibv_srq);
    CompletionQueue: destroy_cq = cq(*mut ibv_cq);
    QueuePair: destroy_qp = qp(*mut ibv_qp);
}

/// Rights by which peers write there; a window on the region may give them.
const REMOTE_WRITE: u32 = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND;
/// The rights of peers.
const REMOTE: u32 = IBV_ACCESS_REMOTE_READ | REMOTE_WRITE;

/// Notes a region that the program registered. `base`: the name of its first byte; `addr`: where it
/// is, if that is the program's own memory.
///
/// # Safety
/// `pd` is a live domain, and `region` null or a new region in it.
unsafe fn registered(
    pd: *mut ibv_pd,
    region: *mut ibv_mr,
    base: u64,
    addr: Option<*mut c_void>,
    access: u32,
) -> *mut ibv_mr {
    // SAFETY: the caller promises a region, or null.
    if let Some(mr) = unsafe { region.as_ref() } {
        // SAFETY: the caller promises a live domain.
        let pd = unsafe { Pd::of(pd) }
            .domain()
            .map_or(0, |domain| domain.device.id);
        tell(|strict| {
            let region = Region {
                pd,
                base,
                len: mr.length as u64,
                addr: addr.map(|addr| addr.addr()),
                writable: access & IBV_ACCESS_LOCAL_WRITE != 0,
                remote: access & REMOTE != 0,
                remote_write: access & REMOTE_WRITE != 0,
            };
            strict.regions.registered(mr.lkey, region);
        });
    }
    created(Kind::MemoryRegion, region)
}

/// The name of the first byte of a region with these rights.
fn base_of(iova: u64, access: c_int) -> u64 {
    match access as u32 & Access::ZERO_BASED.bits() {
        0 => iova,
        _ => 0,
    }
}

/// Where a region with these rights is, if it must stay mapped.
fn place_of(addr: *mut c_void, access: c_int) -> Option<*mut c_void> {
    (access as u32 & IBV_ACCESS_ON_DEMAND == 0).then_some(addr)
}

unsafe extern "C" fn reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the caller's arguments.
    unsafe {
        let region = observed::reg_mr(pd, addr, length, iova, access);
        registered(
            pd,
            region,
            base_of(iova, access),
            place_of(addr, access),
            access as u32,
        )
    }
}

unsafe extern "C" fn rereg_mr(
    region: *mut verbs_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    // SAFETY: the caller's arguments.
    let status = unsafe { observed::rereg_mr(region, flags, pd, addr, length, access) };
    // SAFETY: a live region.
    let key = unsafe { (*region).ibv_mr.lkey };
    if status == 0 {
        let has = |bit| flags as u32 & bit != 0;
        // SAFETY: with this flag, a live domain.
        let new_pd = has(IBV_REREG_MR_CHANGE_PD).then(|| unsafe { Pd::of(pd) });
        tell(|strict| {
            let Some(mut known) = strict.regions.of(key) else {
                return;
            };
            if let Some(domain) = new_pd.and_then(|pd| pd.domain().ok()) {
                known.pd = domain.device.id;
            }
            if has(IBV_REREG_MR_CHANGE_ACCESS) {
                known.writable = access as u32 & IBV_ACCESS_LOCAL_WRITE != 0;
                known.remote = access as u32 & REMOTE != 0;
                known.remote_write = access as u32 & REMOTE_WRITE != 0;
            }
            if has(IBV_REREG_MR_CHANGE_TRANSLATION) {
                known.base = base_of(addr.addr() as u64, access);
                known.len = length as u64;
                known.addr = place_of(addr, access).map(|addr| addr.addr());
            }
            strict.regions.registered(key, known);
        });
    }
    status
}

unsafe extern "C" fn dereg_mr(region: *mut verbs_mr) -> c_int {
    // SAFETY: a live region.
    let key = unsafe { (*region).ibv_mr.lkey };
    tell(|strict| strict.regions.check_mapped(key, &strict.findings));
    // SAFETY: the caller's argument.
    let status = unsafe { mr::dereg_mr(region) };
    if status == 0 {
        tell(|strict| strict.regions.deregistered(key));
    }
    destroyed(Kind::MemoryRegion, region.addr(), status)
}

unsafe extern "C" fn reg_dm_mr(
    pd: *mut ibv_pd,
    dm: *mut ibv_dm,
    offset: u64,
    length: usize,
    access: u32,
) -> *mut ibv_mr {
    // SAFETY: the caller's arguments.
    unsafe {
        let region = dm::reg_dm_mr(pd, dm, offset, length, access);
        registered(pd, region, 0, None, access)
    }
}

unsafe extern "C" fn reg_dmabuf_mr(
    pd: *mut ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the caller's arguments.
    unsafe {
        let region = mr::reg_dmabuf_mr(pd, offset, length, iova, fd, access);
        registered(pd, region, base_of(iova, access), None, access as u32)
    }
}

unsafe extern "C" fn alloc_null_mr(pd: *mut ibv_pd) -> *mut ibv_mr {
    // SAFETY: the caller's argument.
    unsafe { registered(pd, mr::alloc_null_mr(pd), 0, None, IBV_ACCESS_LOCAL_WRITE) }
}

unsafe extern "C" fn import_mr(pd: *mut ibv_pd, handle: u32) -> *mut ibv_mr {
    // SAFETY: the caller's arguments.
    let region = unsafe { mr::import_mr(pd, handle) };
    // Its memory and rights are those of another handle, which is possibly not known here.
    // SAFETY: a region, or null.
    if let Some(mr) = unsafe { region.as_ref() } {
        // SAFETY: a live domain.
        let pd = unsafe { Pd::of(pd) }
            .domain()
            .map_or(0, |domain| domain.device.id);
        tell(|strict| {
            if strict.regions.of(mr.lkey).is_none() {
                let whole = Region {
                    pd,
                    base: 0,
                    len: u64::MAX,
                    addr: None,
                    writable: true,
                    remote: true,
                    remote_write: true,
                };
                strict.regions.registered(mr.lkey, whole);
            }
        });
    }
    region
}

unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: a live queue.
    let queue = unsafe { Cq::of(cq) };
    if let Some(check) = &queue.check {
        contained(|| check.polled());
    }
    // SAFETY: the caller's arguments.
    unsafe { observed::poll_cq(cq, num_entries, wc) }
}

unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: a live queue.
    let queue = unsafe { Cq::of(cq) };
    if let Some(check) = &queue.check {
        contained(|| {
            let waiting = queue.waiting();
            check.armed(waiting);
        });
    }
    // SAFETY: the caller's arguments.
    unsafe { cq::req_notify_cq(cq, solicited_only) }
}

/// `ibv_get_cq_event(3)` returns an event of this queue.
unsafe extern "C" fn cq_event(cq: *mut ibv_cq) {
    // SAFETY: a live queue.
    let queue = unsafe { Cq::of(cq) };
    if let Some(check) = &queue.check {
        contained(|| check.waited());
    }
}
