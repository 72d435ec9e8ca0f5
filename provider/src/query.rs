//! What the device and its port say of themselves.

use std::ffi::{c_char, c_int};

use rustix::io::Errno;
use urnic_driver_shim::presence::Presence;
use urnic_verbs_api::device::pci;
use urnic_verbs_api::rdma_core::*;

use crate::context::Context;
use crate::guard::status;

/// Completion vectors.
pub(crate) const COMPLETION_VECTORS: c_int = 1;

/// The one port.
const PORT: u8 = 1;

/// Sub-codes of `ibv_port_attr` that have no name in `verbs.h`.
mod port {
    /// `phys_state`: Disabled.
    pub(super) const DISABLED: u8 = 3;
    /// `phys_state`: LinkUp.
    pub(super) const LINK_UP: u8 = 5;
    /// `active_width`: 4X.
    pub(super) const WIDTH_4X: u8 = 2;
    /// `active_speed`: EDR, 25 Gb/s a lane.
    pub(super) const SPEED_EDR: u8 = 32;
    /// The same in units of 100 Mb/s.
    pub(super) const SPEED: u64 = 1000;
}

/// `ibv_query_device_ex(3)`, and `ibv_query_device(3)` with a short `size`.
pub(crate) unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    to: *mut ibv_device_attr_ex,
    size: usize,
) -> c_int {
    status(|| {
        // SAFETY: null, or the program's input.
        if unsafe { input.as_ref() }.is_some_and(|input| input.comp_mask != 0)
            || size < size_of::<ibv_device_attr>()
        {
            return Err(Errno::INVAL);
        }
        // SAFETY: an open context of ours.
        let attributes = device_attributes(unsafe { Context::of(context) }.presence);
        // SAFETY: the program's struct is `size` long; it may be of an older or a newer release than ours.
        unsafe {
            std::ptr::write_bytes(to.cast::<u8>(), 0, size);
            let known = size.min(size_of::<ibv_device_attr_ex>());
            std::ptr::copy_nonoverlapping(std::ptr::from_ref(&attributes).cast::<u8>(), to.cast(), known);
        }
        Ok(())
    })
}

/// `ibv_query_port(3)`.
pub(crate) unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    number: u8,
    to: *mut ibv_port_attr,
) -> c_int {
    status(|| {
        if number != PORT {
            return Err(Errno::INVAL);
        }
        // SAFETY: an open context of ours, and libibverbs' struct.
        unsafe { *to = port_attributes(Context::of(context).presence) };
        Ok(())
    })
}

/// `ibv_query_port_speed(3)`.
pub(crate) unsafe extern "C" fn query_port_speed(_: *mut ibv_context, number: u32, to: *mut u64) -> c_int {
    status(|| {
        if number != u32::from(PORT) {
            return Err(Errno::INVAL);
        }
        // SAFETY: the program's variable.
        unsafe { *to = port::SPEED };
        Ok(())
    })
}

fn device_attributes(presence: &Presence) -> ibv_device_attr_ex {
    let guid = presence.node_guid().to_be();
    // SAFETY: plain integers.
    let mut attributes: ibv_device_attr_ex = unsafe { std::mem::zeroed() };
    attributes.orig_attr = ibv_device_attr {
        fw_ver: version(),
        node_guid: guid,
        sys_image_guid: guid,
        max_mr_size: 1 << 47,
        page_size_cap: 0x1000,
        vendor_id: pci::VENDOR_ID.into(),
        vendor_part_id: pci::DEVICE_ID.into(),
        hw_ver: 1,
        max_qp: 1 << 16,
        max_qp_wr: 1 << 14,
        device_cap_flags: IBV_DEVICE_CURR_QP_STATE_MOD | IBV_DEVICE_RC_RNR_NAK_GEN,
        max_sge: 16,
        max_sge_rd: 16,
        max_cq: 1 << 16,
        max_cqe: 1 << 20,
        max_mr: 1 << 20,
        max_pd: 1 << 16,
        max_qp_rd_atom: 128,
        max_res_rd_atom: 128 << 16,
        max_qp_init_rd_atom: 128,
        max_pkeys: 1,
        phys_port_cnt: PORT,
        ..attributes.orig_attr
    };
    attributes.phys_port_cnt_ex = PORT.into();
    attributes
}

fn port_attributes(presence: &Presence) -> ibv_port_attr {
    let gids = presence.gids();
    let up = !gids.entries().is_empty();
    ibv_port_attr {
        state: if up { IBV_PORT_ACTIVE } else { IBV_PORT_DOWN },
        phys_state: if up { port::LINK_UP } else { port::DISABLED },
        // A message is cut to what the stream carries, so an MTU limits nothing: the largest that verbs can name.
        max_mtu: IBV_MTU_4096,
        active_mtu: IBV_MTU_4096,
        gid_tbl_len: gids.entries().len() as c_int,
        port_cap_flags: IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS,
        max_msg_sz: 1 << 31,
        pkey_tbl_len: 1,
        lid: gids.lid(),
        max_vl_num: 1,
        active_width: port::WIDTH_4X,
        active_speed: port::SPEED_EDR,
        link_layer: IBV_LINK_LAYER_ETHERNET,
        ..ibv_port_attr::default()
    }
}

fn version() -> [c_char; 64] {
    let mut text = [0; 64];
    for (to, from) in text.iter_mut().zip(env!("CARGO_PKG_VERSION").bytes()) {
        *to = from as c_char;
    }
    text
}
