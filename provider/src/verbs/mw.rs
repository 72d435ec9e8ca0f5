//! Memory windows.

use std::ffi::c_int;
use std::sync::Arc;

use rustix::io::Errno;
use urnic_driver::Refusal;
use urnic_rdma_core::*;

use super::faulted;
use super::pd::Pd;
use super::post::post_send;
use super::qp::Qp;
use crate::file::domain::Domain;
use urnic_sys::Plain;

use crate::from_c::{FromC, Given, Requests, SharedWithC, ToFree, objects};

/// A memory window: the part of libibverbs, then the part of the provider.
#[repr(C)]
pub(super) struct Mw {
    /// Must be first: libibverbs' pointer is also the provider's.
    abi: SharedWithC<ibv_mw>,
    /// The STag at allocation, which names the window for the device, whatever its bound key is.
    stag: u32,
    domain: Arc<Domain>,
}

objects! { Mw: ibv_mw; }

/// `ibv_alloc_mw(3)`.
pub(super) fn alloc_mw(pd: &Pd, kind: ibv_mw_type) -> Result<Box<Mw>, Refusal> {
    let context = pd.context();
    faulted::call(context.driver, "alloc_mw")?;
    let domain = pd.domain()?.clone();
    let stag = domain.driver.alloc_mw(&domain.device, kind)?;
    Ok(Box::new(Mw {
        abi: SharedWithC::new(ibv_mw {
            context: context.public(),
            pd: pd.public(),
            rkey: stag,
            handle: stag,
            type_: kind,
        }),
        stag,
        domain,
    }))
}

/// `ibv_dealloc_mw(3)`: also unbinds a bound window.
pub(super) fn dealloc_mw(mw: ToFree<Mw>) -> Result<(), Refusal> {
    mw.domain.driver.dealloc_mw(mw.stag)?;
    mw.free();
    Ok(())
}

/// The next key of a window: the program chooses its low byte, which must differ from bind to bind.
fn next_key(rkey: u32) -> u32 {
    rkey & !0xff | rkey.wrapping_add(1) & 0xff
}

/// `ibv_bind_mw(3)`, for windows of type 1: posts an ordinary work request. The new key is in
/// `mw->rkey` when this returns.
pub(super) fn bind_mw(qp: &Qp, mut mw: Given<'_, ibv_mw>, bind: &ibv_mw_bind) -> c_int {
    if mw.type_ != IBV_MW_TYPE_1 {
        return Errno::INVAL.raw_os_error();
    }
    let rkey = next_key(mw.rkey);
    let mut wr = ibv_send_wr::zeroes();
    wr.wr_id = bind.wr_id;
    wr.opcode = IBV_WR_BIND_MW;
    wr.send_flags = bind.send_flags;
    wr.extra.bind_mw = ibv_send_wr_bind_mw {
        mw: std::ptr::null_mut(),
        rkey,
        bind_info: bind.bind_info,
    };
    // SAFETY: a list of one request, which has the fields of its opcode: the program's.
    let result = post_send(qp, unsafe { Requests::from_c(&raw mut wr) }, None);
    if result == 0 {
        mw.rkey = rkey;
    }
    result
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
