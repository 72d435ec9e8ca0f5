//! Memory windows.

use std::ffi::c_int;
use std::mem;
use std::sync::Arc;

use rustix::io::Errno;
use urnic_rdma_core::*;

use super::faulted;
use super::pd::Pd;
use super::post::post_send;
use super::shared_with_c::SharedWithC;
use crate::file::domain::Domain;
use crate::guard::{pointer, status};

/// A memory window: the part of libibverbs, then the part of the provider.
#[repr(C)]
struct Mw {
    /// Must be first: libibverbs' pointer is also the provider's.
    abi: SharedWithC<ibv_mw>,
    /// The STag at allocation, which names the window for the device, whatever its bound key is.
    stag: u32,
    domain: Arc<Domain>,
}

/// `ibv_alloc_mw(3)`.
pub(super) unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type) -> *mut ibv_mw {
    pointer(|| {
        // SAFETY: a live domain.
        let pd_ = unsafe { Pd::of(pd) };
        faulted::call(pd_.context().driver, "alloc_mw")?;
        let domain = pd_.domain()?.clone();
        let stag = domain.driver.alloc_mw(&domain.device, kind)?;
        Ok(Box::new(Mw {
            abi: SharedWithC::new(ibv_mw {
                context: pd_.ibv_context(),
                pd,
                rkey: stag,
                handle: stag,
                type_: kind,
            }),
            stag,
            domain,
        }))
    })
    .cast()
}

/// `ibv_dealloc_mw(3)`: also unbinds a bound window.
pub(super) unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    status(|| {
        // SAFETY: a live window of this provider.
        let this = unsafe { &*mw.cast::<Mw>() };
        this.domain.driver.dealloc_mw(this.stag)?;
        // SAFETY: from `Box::into_raw`, and no other reference is left.
        drop(unsafe { Box::from_raw(mw.cast::<Mw>()) });
        Ok(())
    })
}

/// The next key of a window: the program chooses its low byte, which must differ from bind to bind.
fn next_key(rkey: u32) -> u32 {
    rkey & !0xff | rkey.wrapping_add(1) & 0xff
}

/// `ibv_bind_mw(3)`, for windows of type 1: posts an ordinary work request. The new key is in
/// `mw->rkey` when this returns.
pub(super) unsafe extern "C" fn bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, bind: *mut ibv_mw_bind) -> c_int {
    // SAFETY: the program's queue pair, window and structure, all alive.
    unsafe {
        if (*mw).type_ != IBV_MW_TYPE_1 {
            return Errno::INVAL.raw_os_error();
        }
        let rkey = next_key((*mw).rkey);
        let mut wr: ibv_send_wr = mem::zeroed();
        wr.wr_id = (*bind).wr_id;
        wr.opcode = IBV_WR_BIND_MW;
        wr.send_flags = (*bind).send_flags;
        wr.extra.bind_mw.mw = mw;
        wr.extra.bind_mw.rkey = rkey;
        wr.extra.bind_mw.bind_info = (*bind).bind_info;
        let result = post_send(qp, &raw mut wr, std::ptr::null_mut());
        if result == 0 {
            (*mw).rkey = rkey;
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_key_stays_with_its_window() {
        assert_eq!(next_key(0x1234_5600), 0x1234_5601);
        assert_eq!(next_key(0x1234_56ff), 0x1234_5600);
    }
}
