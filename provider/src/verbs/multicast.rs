//! Multicast groups of queue pairs for datagrams.

use std::ffi::c_int;

use rustix::io::Errno;
use urnic_rdma_core::{ibv_gid, ibv_qp};

use super::qp::Qp;
use crate::guard::status;

/// `ibv_attach_mcast(3)`: EINVAL for a queue pair of another kind than UD.
pub(super) unsafe extern "C" fn attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int {
    // SAFETY: a live queue pair, and the program's GID.
    status(|| unsafe { group(qp, gid, |qp, gid| qp.attach_multicast(gid)) })
}

/// `ibv_detach_mcast(3)`: EINVAL for a group that is not attached.
pub(super) unsafe extern "C" fn detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int {
    // SAFETY: a live queue pair, and the program's GID.
    status(|| unsafe { group(qp, gid, |qp, gid| qp.detach_multicast(gid)) })
}

/// # Safety
/// `qp` is a live queue pair, and `gid` is null or the program's.
unsafe fn group(
    qp: *mut ibv_qp,
    gid: *const ibv_gid,
    act: impl FnOnce(&urnic_driver::Qp, &[u8; 16]) -> Result<(), Errno>,
) -> Result<(), Errno> {
    if gid.is_null() {
        return Err(Errno::INVAL);
    }
    // SAFETY: the caller promises a live queue pair, and a GID that can be read.
    unsafe { act(&Qp::of(qp).device, &gid.read_unaligned().raw) }
}
