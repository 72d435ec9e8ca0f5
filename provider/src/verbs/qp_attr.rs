//! Attributes of queue pairs, from libibverbs' structures to the driver's and back.

use urnic_device::vocabulary::QpState;
use urnic_driver::{AddressVector, QpAttr, QpCaps};
use urnic_rdma_core::*;

/// The capacities of a queue pair. A queue pair with a shared receive queue has no receive
/// capacities of its own (`ibv_create_qp(3)`).
pub(super) fn own_caps(caps: QpCaps, shares: bool) -> QpCaps {
    if shares {
        QpCaps {
            max_recv_wr: 0,
            max_recv_sge: 0,
            ..caps
        }
    } else {
        caps
    }
}

pub(super) fn caps(cap: &ibv_qp_cap) -> QpCaps {
    QpCaps {
        max_send_wr: cap.max_send_wr,
        max_recv_wr: cap.max_recv_wr,
        max_send_sge: cap.max_send_sge,
        max_recv_sge: cap.max_recv_sge,
        max_inline: cap.max_inline_data,
    }
}

pub(super) fn ibv_caps(caps: QpCaps) -> ibv_qp_cap {
    ibv_qp_cap {
        max_send_wr: caps.max_send_wr,
        max_recv_wr: caps.max_recv_wr,
        max_send_sge: caps.max_send_sge,
        max_recv_sge: caps.max_recv_sge,
        max_inline_data: caps.max_inline,
    }
}

pub(super) fn device_attr(attr: &ibv_qp_attr) -> QpAttr {
    let ah = &attr.ah_attr;
    QpAttr {
        state: attr.qp_state,
        cur_state: attr.cur_qp_state,
        path_mtu: attr.path_mtu,
        rq_psn: attr.rq_psn,
        sq_psn: attr.sq_psn,
        dest_qpn: attr.dest_qp_num,
        qkey: attr.qkey,
        access: attr.qp_access_flags,
        pkey_index: attr.pkey_index,
        port: attr.port_num,
        max_dest_rd_atomic: attr.max_dest_rd_atomic,
        max_rd_atomic: attr.max_rd_atomic,
        // A field of 5 bits: adapters take no more of a larger value, and DLSlime sets 32.
        min_rnr_timer: attr.min_rnr_timer & 0x1f,
        timeout: attr.timeout,
        retry_cnt: attr.retry_cnt,
        rnr_retry: attr.rnr_retry,
        av: address_vector(ah),
    }
}

pub(super) fn address_vector(ah: &ibv_ah_attr) -> AddressVector {
    AddressVector {
        is_global: ah.is_global != 0,
        dgid: ah.grh.dgid.raw,
        sgid_index: ah.grh.sgid_index,
        flow_label: ah.grh.flow_label,
        hop_limit: ah.grh.hop_limit,
        traffic_class: ah.grh.traffic_class,
        dlid: ah.dlid,
        sl: ah.sl,
        src_path_bits: ah.src_path_bits,
        static_rate: ah.static_rate,
        port: ah.port_num,
    }
}

pub(super) fn ibv_attr(attr: &QpAttr, caps: QpCaps) -> ibv_qp_attr {
    let av = &attr.av;
    ibv_qp_attr {
        qp_state: attr.state,
        cur_qp_state: attr.cur_state,
        path_mtu: attr.path_mtu,
        path_mig_state: IBV_MIG_MIGRATED,
        rq_psn: attr.rq_psn,
        sq_psn: attr.sq_psn,
        dest_qp_num: attr.dest_qpn,
        qkey: attr.qkey,
        qp_access_flags: attr.access,
        cap: ibv_caps(caps),
        ah_attr: ibv_ah_attr {
            grh: ibv_global_route {
                dgid: ibv_gid { raw: av.dgid },
                flow_label: av.flow_label,
                sgid_index: av.sgid_index,
                hop_limit: av.hop_limit,
                traffic_class: av.traffic_class,
            },
            dlid: av.dlid,
            sl: av.sl,
            src_path_bits: av.src_path_bits,
            static_rate: av.static_rate,
            is_global: av.is_global.into(),
            port_num: av.port,
        },
        pkey_index: attr.pkey_index,
        sq_draining: (attr.state == QpState::Sqd as u32).into(),
        max_rd_atomic: attr.max_rd_atomic,
        max_dest_rd_atomic: attr.max_dest_rd_atomic,
        min_rnr_timer: attr.min_rnr_timer,
        port_num: attr.port,
        timeout: attr.timeout,
        retry_cnt: attr.retry_cnt,
        rnr_retry: attr.rnr_retry,
        ..ibv_qp_attr::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rnr_timer_has_five_bits() {
        for (set, taken) in [(0x1f, 0x1f), (0x20, 0), (0x2c, 12)] {
            let attr = device_attr(&ibv_qp_attr {
                min_rnr_timer: set,
                ..ibv_qp_attr::default()
            });
            assert_eq!(attr.min_rnr_timer, taken, "{set}");
        }
    }

    #[test]
    fn attributes_come_back_from_a_query_as_they_were_set() {
        let mut set = ibv_qp_attr {
            qp_state: IBV_QPS_RTS,
            cur_qp_state: IBV_QPS_RTS,
            path_mtu: IBV_MTU_2048,
            path_mig_state: IBV_MIG_MIGRATED,
            rq_psn: 1,
            sq_psn: 2,
            dest_qp_num: 3,
            qp_access_flags: IBV_ACCESS_REMOTE_READ,
            cap: ibv_qp_cap {
                max_send_wr: 4,
                max_recv_wr: 5,
                max_send_sge: 6,
                max_recv_sge: 7,
                max_inline_data: 8,
            },
            max_rd_atomic: 9,
            max_dest_rd_atomic: 10,
            min_rnr_timer: 11,
            port_num: 1,
            timeout: 12,
            retry_cnt: 13,
            rnr_retry: 14,
            ..ibv_qp_attr::default()
        };
        set.ah_attr = ibv_ah_attr {
            grh: ibv_global_route {
                dgid: ibv_gid { raw: [7; 16] },
                flow_label: 1,
                sgid_index: 2,
                hop_limit: 3,
                traffic_class: 4,
            },
            dlid: 5,
            sl: 6,
            src_path_bits: 7,
            static_rate: 8,
            is_global: 1,
            port_num: 1,
        };
        assert_eq!(ibv_attr(&device_attr(&set), caps(&set.cap)), set);
    }
}
