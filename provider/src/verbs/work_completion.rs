//! The conversion of a completion for the program.

use urnic_device::cqe::{Cqe, CqeFlags};
use urnic_rdma_core::{IBV_WC_GRH, IBV_WC_WITH_IMM, IBV_WC_WITH_INV, ibv_wc};

/// The completion as `ibv_poll_cq` returns it; `wr_id` is the id of its work request.
#[inline]
pub(crate) fn work_completion(cqe: &Cqe, wr_id: u64) -> ibv_wc {
    ibv_wc {
        wr_id,
        status: cqe.status.into(),
        opcode: cqe.opcode.into(),
        vendor_err: cqe.vendor_error.get(),
        byte_len: cqe.byte_len.get(),
        imm_data: extra(cqe),
        qp_num: cqe.label.get(),
        src_qp: cqe.source_qpn.get(),
        wc_flags: flags(cqe),
        pkey_index: 0,
        slid: 0,
        sl: service_level(cqe),
        dlid_path_bits: 0,
    }
}

/// The `sl` of a completion: for a datagram the kind of its header, as Mellanox's adapters give it
/// (1: IPv6, 2: IPv4). UCX finds the destination address of the header by it.
#[inline]
pub(crate) fn service_level(cqe: &Cqe) -> u8 {
    let has = |flag: CqeFlags| cqe.flags & flag.bits() != 0;
    match (has(CqeFlags::DATAGRAM), has(CqeFlags::IPV6)) {
        (false, _) => 0,
        (true, true) => 1,
        (true, false) => 2,
    }
}

/// The `wc_flags` of a completion.
#[inline]
pub(crate) fn flags(cqe: &Cqe) -> u32 {
    let mut flags = 0;
    if cqe.flags & CqeFlags::WITH_IMM.bits() != 0 {
        flags |= IBV_WC_WITH_IMM;
    }
    if cqe.flags & CqeFlags::WITH_INV.bits() != 0 {
        flags |= IBV_WC_WITH_INV;
    }
    if cqe.flags & CqeFlags::DATAGRAM.bits() != 0 {
        flags |= IBV_WC_GRH;
    }
    flags
}

/// The `imm_data` of a completion: in network order as received, or the invalidated STag as a
/// number.
#[inline]
pub(crate) fn extra(cqe: &Cqe) -> u32 {
    u32::from_ne_bytes(cqe.extra)
}

/// Whether the completion belongs to a receive.
#[inline]
pub(crate) fn is_receive(cqe: &Cqe) -> bool {
    cqe.opcode & 0x80 != 0
}
