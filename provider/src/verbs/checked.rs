//! The verbs of a process with the option `strict`, which report the objects that the program
//! creates, registers, destroys and waits for to the checks ([`strict`](crate::strict)). The queues
//! report posts and polls. In other processes libibverbs gets the unchecked functions directly.

use std::ffi::{c_int, c_void};

use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use urnic_device::vocabulary::Access;
use urnic_driver::Refusal;
use urnic_rdma_core::*;

use super::ah::Ah;
use super::cq::Cq;
use super::dm::Dm;
use super::mr::{Memory, Mr, changed_domain};
use super::mw::Mw;
use super::pd::Pd;
use super::qp::Qp;
use super::srq::Srq;
use super::{ah, cq, cq_ex, dm, mr, mw, observed, pd, qp, qp_ex, srq};
use crate::context::OpenContext;
use crate::from_c::{Given, Room, ToFree, operations};
use crate::guard::contained;
use crate::strict::{self, CallSite, Kind, Region, Rule, Strict};

operations! {
    /// The operations, with the checked functions in the place of the functions that they call.
    pub(super) fn in_place_of;
    alloc_pd(context: *mut ibv_context) -> *mut ibv_pd = self::alloc_pd(context);
    dealloc_pd(pd: *mut ibv_pd) -> c_int = self::dealloc_pd(pd);
    create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah = self::create_ah(pd, attr);
    destroy_ah(ah: *mut ibv_ah) -> c_int = self::destroy_ah(ah);
    reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: c_int) -> *mut ibv_mr =
        self::reg_mr(pd, addr, length, iova, access);
    rereg_mr(
        mr: *mut verbs_mr, flags: c_int, pd: *mut ibv_pd, addr: *mut c_void, length: usize, rights: c_int
    ) -> c_int = self::rereg_mr(mr, flags as u32, changed_domain(flags, pd), Memory { addr, length, rights });
    dereg_mr(mr: *mut verbs_mr) -> c_int = self::dereg_mr(mr);
    reg_dm_mr(pd: *mut ibv_pd, dm: *mut ibv_dm, offset: u64, length: usize, access: u32) -> *mut ibv_mr =
        self::reg_dm_mr(pd, dm, offset, length, access);
    reg_dmabuf_mr(
        pd: *mut ibv_pd, offset: u64, length: usize, iova: u64, fd: c_int, access: c_int
    ) -> *mut ibv_mr = self::reg_dmabuf_mr(pd, offset, length, iova, fd, access);
    alloc_null_mr(pd: *mut ibv_pd) -> *mut ibv_mr = self::alloc_null_mr(pd);
    import_mr(pd: *mut ibv_pd, handle: u32) -> *mut ibv_mr = self::import_mr(pd, handle);
    alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type) -> *mut ibv_mw = self::alloc_mw(pd, kind);
    dealloc_mw(mw: *mut ibv_mw) -> c_int = self::dealloc_mw(mw);
    create_srq(pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> *mut ibv_srq = self::create_srq(pd, attr);
    create_srq_ex(context: *mut ibv_context, attr: *mut ibv_srq_init_attr_ex) -> *mut ibv_srq =
        self::create_srq_ex(attr);
    destroy_srq(srq: *mut ibv_srq) -> c_int = self::destroy_srq(srq);
    create_cq(
        context: *mut ibv_context, cqe: c_int, channel: *mut ibv_comp_channel, vector: c_int
    ) -> *mut ibv_cq = self::create_cq(context, cqe, channel, vector);
    create_cq_ex(context: *mut ibv_context, attr: *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex =
        self::create_cq_ex(context, attr);
    destroy_cq(cq: *mut ibv_cq) -> c_int = self::destroy_cq(cq);
    poll_cq(cq: *mut ibv_cq, count: c_int, wc: *mut ibv_wc) -> c_int = self::poll_cq(cq, (wc, count));
    cq_event(cq: *mut ibv_cq) = self::cq_event(cq);
    req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int =
        self::req_notify_cq(cq, solicited_only);
    create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp = self::create_qp(pd, attr);
    create_qp_ex(context: *mut ibv_context, attr: *mut ibv_qp_init_attr_ex) -> *mut ibv_qp =
        self::create_qp_ex(context, attr);
    destroy_qp(qp: *mut ibv_qp) -> c_int = self::destroy_qp(qp);
}

/// Calls the checks.
fn tell(what: impl FnOnce(&'static Strict)) {
    contained(|| {
        if let Some(strict) = strict::current() {
            what(strict);
        }
    });
}

fn created<T>(kind: Kind, object: Result<Box<T>, Refusal>) -> Result<Box<T>, Refusal> {
    object.inspect(|object| {
        let address = std::ptr::from_ref::<T>(object).addr();
        tell(|strict| strict.objects.created(kind, address));
    })
}

/// Destroys an object by `destroy`, and notes what became of it.
fn destroyed<T>(
    kind: Kind,
    object: ToFree<T>,
    destroy: impl FnOnce(ToFree<T>) -> Result<(), Refusal>,
) -> Result<(), Refusal> {
    let address = std::ptr::from_ref::<T>(&object).addr();
    let outcome = destroy(object);
    tell(|strict| match outcome {
        Ok(()) => strict.objects.destroyed(kind, address),
        Err(Refusal {
            errno: Errno::BUSY, ..
        }) => {
            strict
                .findings
                .report(Rule::DestroyedTooEarly, &CallSite::here(), || {
                    format!(
                        "{} cannot be destroyed (EBUSY): others still use it",
                        kind.counted(1)
                    )
                });
        }
        Err(_) => {}
    });
    outcome
}

macro_rules! creators {
    ($($kind:ident: $name:ident = $module:ident($($arg:ident: $ty:ty),*) -> $object:ty;)*) => { $(
        fn $name($($arg: $ty),*) -> Result<Box<$object>, Refusal> {
            created(Kind::$kind, $module::$name($($arg),*))
        }
    )* };
}

creators! {
    ProtectionDomain: alloc_pd = pd(context: OpenContext) -> Pd;
    AddressHandle: create_ah = ah(pd: &Pd, attr: &ibv_ah_attr) -> Ah;
    MemoryWindow: alloc_mw = mw(pd: &Pd, kind: ibv_mw_type) -> Mw;
    SharedReceiveQueue: create_srq = srq(pd: &Pd, attr: Given<'_, ibv_srq_init_attr>) -> Srq;
    SharedReceiveQueue: create_srq_ex = srq(attr: Given<'_, ibv_srq_init_attr_ex>) -> Srq;
    CompletionQueue: create_cq = cq(
        context: OpenContext, cqe: c_int, channel: Option<&ibv_comp_channel>, vector: c_int
    ) -> Cq;
    CompletionQueue: create_cq_ex = cq_ex(
        context: OpenContext, attr: Given<'_, ibv_cq_init_attr_ex>
    ) -> Cq;
    QueuePair: create_qp = qp(pd: &Pd, attr: Given<'_, ibv_qp_init_attr>) -> Qp;
    QueuePair: create_qp_ex = qp_ex(context: OpenContext, attr: Given<'_, ibv_qp_init_attr_ex>) -> Qp;
}

macro_rules! destroyers {
    ($($kind:ident: $name:ident = $module:ident($object:ty);)*) => { $(
        fn $name(object: ToFree<$object>) -> Result<(), Refusal> {
            destroyed(Kind::$kind, object, $module::$name)
        }
    )* };
}

destroyers! {
    ProtectionDomain: dealloc_pd = pd(Pd);
    AddressHandle: destroy_ah = ah(Ah);
    MemoryWindow: dealloc_mw = mw(Mw);
    SharedReceiveQueue: destroy_srq = srq(Srq);
    CompletionQueue: destroy_cq = cq(Cq);
    QueuePair: destroy_qp = qp(Qp);
}

/// Rights by which peers write there; a window on the region may give them.
const REMOTE_WRITE: u32 = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND;
/// The rights of peers.
const REMOTE: u32 = IBV_ACCESS_REMOTE_READ | REMOTE_WRITE;

/// The number of the domain in the device; 0 if it was freed.
fn number_of(pd: &Pd) -> u32 {
    pd.domain().map_or(0, |domain| domain.device.id)
}

/// Notes a region that the program registered. `base`: the name of its first byte; `addr`: where it
/// is, if that is the program's own memory.
fn registered(
    pd: &Pd,
    region: Result<Box<Mr>, Refusal>,
    base: u64,
    addr: Option<*mut c_void>,
    access: u32,
) -> Result<Box<Mr>, Refusal> {
    if let Ok(mr) = &region {
        tell(|strict| {
            let region = Region {
                pd: number_of(pd),
                base,
                len: mr.length() as u64,
                addr: addr.map(|addr| addr.addr()),
                writable: access & IBV_ACCESS_LOCAL_WRITE != 0,
                remote: access & REMOTE != 0,
                remote_write: access & REMOTE_WRITE != 0,
            };
            strict.regions.registered(mr.lkey(), region);
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

/// The address of a region with these rights, if it must stay mapped.
fn place_of(addr: *mut c_void, access: c_int) -> Option<*mut c_void> {
    (access as u32 & IBV_ACCESS_ON_DEMAND == 0).then_some(addr)
}

fn reg_mr(pd: &Pd, addr: *mut c_void, length: usize, iova: u64, access: c_int) -> Result<Box<Mr>, Refusal> {
    let region = observed::reg_mr(pd, addr, length, iova, access);
    let (base, addr) = (base_of(iova, access), place_of(addr, access));
    registered(pd, region, base, addr, access as u32)
}

fn rereg_mr(mr: &Mr, flags: u32, pd: Option<&Pd>, new: Memory) -> Result<(), Refusal> {
    observed::rereg_mr(mr, flags, pd, new)?;
    let has = |bit| flags & bit != 0;
    tell(|strict| {
        let Some(mut known) = strict.regions.of(mr.lkey()) else {
            return;
        };
        if let Some(domain) = pd.and_then(|pd| pd.domain().ok()) {
            known.pd = domain.device.id;
        }
        if has(IBV_REREG_MR_CHANGE_ACCESS) {
            known.writable = new.rights as u32 & IBV_ACCESS_LOCAL_WRITE != 0;
            known.remote = new.rights as u32 & REMOTE != 0;
            known.remote_write = new.rights as u32 & REMOTE_WRITE != 0;
        }
        if has(IBV_REREG_MR_CHANGE_TRANSLATION) {
            known.base = base_of(new.addr.addr() as u64, new.rights);
            known.len = new.length as u64;
            known.addr = place_of(new.addr, new.rights).map(|addr| addr.addr());
        }
        strict.regions.registered(mr.lkey(), known);
    });
    Ok(())
}

fn dereg_mr(mr: ToFree<Mr>) -> Result<(), Refusal> {
    let key = mr.lkey();
    tell(|strict| strict.regions.check_mapped(key, &strict.findings));
    destroyed(Kind::MemoryRegion, mr, |mr| {
        mr::dereg_mr(mr)?;
        tell(|strict| strict.regions.deregistered(key));
        Ok(())
    })
}

fn reg_dm_mr(pd: &Pd, dm: &Dm, offset: u64, length: usize, access: u32) -> Result<Box<Mr>, Refusal> {
    let region = dm::reg_dm_mr(pd, dm, offset, length, access);
    registered(pd, region, 0, None, access)
}

fn reg_dmabuf_mr(
    pd: &Pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: Option<BorrowedFd<'_>>,
    access: c_int,
) -> Result<Box<Mr>, Refusal> {
    let region = mr::reg_dmabuf_mr(pd, offset, length, iova, fd, access);
    registered(pd, region, base_of(iova, access), None, access as u32)
}

fn alloc_null_mr(pd: &Pd) -> Result<Box<Mr>, Refusal> {
    registered(pd, mr::alloc_null_mr(pd), 0, None, IBV_ACCESS_LOCAL_WRITE)
}

fn import_mr(pd: &Pd, handle: u32) -> Result<Box<Mr>, Refusal> {
    let mr = mr::import_mr(pd, handle)?;
    // Its memory and rights are those of another handle, which is possibly not known here.
    tell(|strict| {
        if strict.regions.of(mr.lkey()).is_none() {
            let whole = Region {
                pd: number_of(pd),
                base: 0,
                len: u64::MAX,
                addr: None,
                writable: true,
                remote: true,
                remote_write: true,
            };
            strict.regions.registered(mr.lkey(), whole);
        }
    });
    Ok(mr)
}

fn poll_cq(cq: &Cq, room: Room<'_, ibv_wc>) -> c_int {
    if let Some(check) = &cq.check {
        contained(|| check.polled());
    }
    observed::poll_cq(cq, room)
}

fn req_notify_cq(cq: &Cq, solicited_only: c_int) -> c_int {
    if let Some(check) = &cq.check {
        contained(|| {
            let waiting = cq.waiting();
            check.armed(waiting);
        });
    }
    cq::req_notify_cq(cq, solicited_only)
}

/// `ibv_get_cq_event(3)` returns an event of this queue.
fn cq_event(cq: &Cq) {
    if let Some(check) = &cq.check {
        contained(|| check.waited());
    }
}
