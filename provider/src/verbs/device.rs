//! The attributes of the device and its port, as queries report them.

use std::ffi::{c_char, c_int};

use rustix::io::Errno;
use urnic_config::Identity;
use urnic_device::command::features;
use urnic_device::{INTERFACE_VERSION, pci};
use urnic_driver::{Attributes, MAX_ADDRESS_HANDLES};
use urnic_rdma_core::*;

use super::send_queue::MAX_MESSAGE;
use crate::context::OpenContext;
use crate::file::device_memory;
use urnic_sys::Plain;

use crate::from_c::{Buffer, Copied, Out, set_prefix};

/// The device has one port.
const PORT: u8 = 1;
/// `phys_state` of a port whose link is up.
const LINK_UP: u8 = 5;
/// `phys_state` of a port without a link.
const LINK_DISABLED: u8 = 3;
/// `active_width` of four lanes.
const WIDTH_4X: u8 = 2;
/// `active_speed` of 25.78125 Gb/s a lane: four lanes have about the speed of copying in memory.
const SPEED_EDR: u8 = 32;
/// The speed of four lanes, in units of 100 Mb/s.
const SPEED: u64 = 1000;

/// A count in the type of verbs.
fn int(count: u32) -> c_int {
    c_int::try_from(count).unwrap_or(c_int::MAX)
}

/// `ibv_query_device(3)` and `ibv_query_device_ex(3)`: write the part of the answer that fits the
/// caller's structure.
pub(super) fn query_device_ex(
    context: OpenContext,
    input: Option<Copied<ibv_query_device_ex_input>>,
    attr: Buffer<'_>,
) -> Result<(), Errno> {
    if input.is_some_and(|input| input.0.comp_mask != 0) {
        return Err(Errno::INVAL);
    }
    let (attributes, identity) = (context.driver.attributes(), context.driver.identity());
    let mut answer = device_attributes(attributes, identity, context.shown().node_guid());
    if identity.is_roce() && attributes.features & features::DATAGRAMS != 0 {
        show_multicast(&mut answer.orig_attr);
    }
    set_prefix(attr.bytes(), &answer);
    Ok(())
}

/// A program that sees a RoCE NIC may use multicast groups. Each is a socket of its own in each
/// queue pair, so no number is a limit of the device.
fn show_multicast(attr: &mut ibv_device_attr) {
    attr.max_mcast_grp = attr.max_qp;
    attr.max_mcast_qp_attach = attr.max_qp;
    attr.max_total_mcast_qp_attach = attr.max_qp;
}

fn device_attributes(device: &Attributes, identity: Identity, node_guid: u64) -> ibv_device_attr_ex {
    let mut answer = ibv_device_attr_ex::zeroes();
    let (major, minor, patch) = device.firmware;
    let version = format!("{major}.{minor}.{patch}");
    let attr = &mut answer.orig_attr;
    for (to, from) in attr.fw_ver.iter_mut().zip(version.bytes()) {
        *to = from as c_char;
    }
    attr.node_guid = node_guid.to_be();
    attr.sys_image_guid = node_guid.to_be();
    attr.max_mr_size = device.max_mr_size;
    attr.page_size_cap = !0xfff;
    attr.vendor_id = pci::VENDOR_ID.into();
    attr.vendor_part_id = pci::DEVICE_ID.into();
    attr.hw_ver = INTERFACE_VERSION >> 16;
    attr.max_qp = int(device.max_qp);
    attr.max_qp_wr = int(device.max_qp_wr);
    attr.device_cap_flags = IBV_DEVICE_CURR_QP_STATE_MOD
        | IBV_DEVICE_SYS_IMAGE_GUID
        | IBV_DEVICE_RC_RNR_NAK_GEN
        | IBV_DEVICE_MEM_MGT_EXTENSIONS;
    if device.features & features::WINDOWS != 0 {
        attr.device_cap_flags |= IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2B;
        attr.max_mw = int(device.max_mw);
    }
    if device.features & features::SRQ != 0 {
        attr.max_srq = int(device.max_srq);
        attr.max_srq_wr = int(device.max_srq_wr);
        attr.max_srq_sge = int(device.max_sge);
    }
    attr.max_sge = int(device.max_sge);
    attr.max_sge_rd = int(device.max_sge_rd);
    attr.max_cq = int(device.max_cq);
    attr.max_cqe = int(device.max_cqe);
    attr.max_mr = int(device.max_mr);
    attr.max_pd = int(device.max_pd);
    attr.max_qp_rd_atom = int(device.max_ird);
    attr.max_res_rd_atom = int(device.max_ird.saturating_mul(device.max_qp));
    attr.max_qp_init_rd_atom = int(device.max_ord);
    attr.atomic_cap = if device.features & features::ATOMICS != 0 {
        IBV_ATOMIC_HCA
    } else {
        IBV_ATOMIC_NONE
    };
    attr.max_ah = int(MAX_ADDRESS_HANDLES);
    attr.max_pkeys = 1;
    attr.phys_port_cnt = PORT;
    if device.features & features::MODERATION != 0 {
        answer.cq_mod_caps.max_cq_count = u16::MAX;
        answer.cq_mod_caps.max_cq_period = u16::MAX;
    }
    if device.features & features::ON_DEMAND != 0 {
        answer.odp_caps.general_caps = IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT;
        answer.odp_caps.rc_odp_caps = IBV_ODP_SUPPORT_SEND
            | IBV_ODP_SUPPORT_RECV
            | IBV_ODP_SUPPORT_WRITE
            | IBV_ODP_SUPPORT_READ
            | IBV_ODP_SUPPORT_SRQ_RECV;
        if device.features & features::ATOMICS != 0 {
            answer.odp_caps.rc_odp_caps |= IBV_ODP_SUPPORT_ATOMIC;
        }
        if identity.is_roce() && device.features & features::UNRELIABLE != 0 {
            answer.odp_caps.uc_odp_caps = IBV_ODP_SUPPORT_SEND
                | IBV_ODP_SUPPORT_RECV
                | IBV_ODP_SUPPORT_WRITE
                | IBV_ODP_SUPPORT_SRQ_RECV;
        }
    }
    // The clock of completion timestamps counts nanoseconds: 1 GHz, in kHz.
    answer.completion_timestamp_mask = u64::MAX;
    answer.hca_core_clock = 1_000_000;
    answer.device_cap_flags_ex = attr.device_cap_flags.into();
    answer.max_dm_size = device_memory::MAX as u64;
    answer.phys_port_cnt_ex = PORT.into();
    answer
}

/// `ibv_query_port(3)`.
pub(super) fn query_port(
    context: OpenContext,
    port_num: u8,
    mut attr: Out<'_, ibv_port_attr>,
) -> Result<(), Errno> {
    if port_num != PORT {
        return Err(Errno::INVAL);
    }
    let gids = context.driver.port_gids().len();
    let (state, phys_state) = if gids > 0 && !context.driver.port_is_down() {
        (IBV_PORT_ACTIVE, LINK_UP)
    } else {
        (IBV_PORT_DOWN, LINK_DISABLED)
    };
    attr.set(ibv_port_attr {
        state,
        phys_state,
        // Messages are split to the size that the stream supports, so programs may choose any MTU.
        max_mtu: IBV_MTU_4096,
        active_mtu: path_mtu(context).into(),
        gid_tbl_len: int(gids as u32),
        port_cap_flags: IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS,
        max_msg_sz: MAX_MESSAGE,
        pkey_tbl_len: 1,
        lid: context.driver.lid(),
        max_vl_num: 1,
        active_width: WIDTH_4X,
        active_speed: SPEED_EDR,
        link_layer: IBV_LINK_LAYER_ETHERNET,
        ..ibv_port_attr::default()
    });
    Ok(())
}

/// `ibv_query_port_speed(3)`.
pub(super) fn query_port_speed(port_num: u32, mut speed: Out<'_, u64>) -> Result<(), Errno> {
    if port_num != u32::from(PORT) {
        return Err(Errno::INVAL);
    }
    speed.set(SPEED);
    Ok(())
}

/// The active MTU of the port, in bytes.
pub(super) fn active_mtu(context: OpenContext) -> u32 {
    128 << path_mtu(context)
}

/// The active MTU of the port (`enum ibv_mtu`).
fn path_mtu(context: OpenContext) -> u8 {
    let is_roce = context.driver.identity().is_roce();
    context.shown().gids().path_mtu(is_roce)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: Attributes = Attributes {
        firmware: (1, 2, 3),
        max_mr_size: 1 << 40,
        max_qp: 1 << 16,
        max_qp_wr: 1 << 14,
        max_sge: 32,
        max_sge_rd: 1,
        max_inline: 900,
        max_cq: 1 << 16,
        max_cqe: 1 << 22,
        max_mr: 1 << 20,
        max_pd: 1 << 16,
        max_mw: 77,
        max_srq: 77,
        max_srq_wr: 77,
        max_ird: 128,
        max_ord: 64,
        completion_vectors: 4,
        features: features::IMMEDIATE,
    };

    #[test]
    fn capabilities_without_a_verb_are_not_shown() {
        let shown = device_attributes(&DEVICE, Identity::Iwarp, 0x1122_3344_5566_7788).orig_attr;
        assert_eq!(
            (shown.max_mw, shown.max_srq, shown.max_srq_wr, shown.max_srq_sge),
            (0, 0, 0, 0)
        );
        assert_eq!(
            shown.device_cap_flags & (IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2B),
            0
        );
        assert_eq!(shown.atomic_cap, IBV_ATOMIC_NONE);
        let atomic = Attributes {
            features: features::ATOMICS,
            ..DEVICE
        };
        assert_eq!(
            device_attributes(&atomic, Identity::Iwarp, 1)
                .orig_attr
                .atomic_cap,
            IBV_ATOMIC_HCA
        );
    }

    #[test]
    fn only_a_roce_nic_has_on_demand_paging_of_unreliable_connections() {
        let device = Attributes {
            features: features::ON_DEMAND | features::UNRELIABLE,
            ..DEVICE
        };
        let caps = |identity| device_attributes(&device, identity, 1).odp_caps.uc_odp_caps;
        assert_eq!(caps(Identity::Iwarp), 0);
        assert_ne!(caps(Identity::Roce) & IBV_ODP_SUPPORT_WRITE, 0);
        assert_eq!(caps(Identity::Roce) & IBV_ODP_SUPPORT_READ, 0);
    }

    #[test]
    fn numbers_keep_their_meaning_and_order() {
        let shown = device_attributes(&DEVICE, Identity::Iwarp, 0x1122_3344_5566_7788).orig_attr;
        assert_eq!(
            shown.node_guid.to_ne_bytes(),
            [0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88]
        );
        let version: Vec<u8> = shown.fw_ver.iter().take(6).map(|c| *c as u8).collect();
        assert_eq!(version, b"1.2.3\0");
        assert_eq!((shown.max_qp_rd_atom, shown.max_qp_init_rd_atom), (128, 64));
        assert_eq!(shown.max_res_rd_atom, 128 << 16);
    }
}
