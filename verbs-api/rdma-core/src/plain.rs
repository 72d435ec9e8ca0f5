//! The structures that may be all zeroes.

use urnic_sys::Plain;

use crate::{
    ibv_cq_init_attr_ex, ibv_device_attr, ibv_device_attr_ex, ibv_port_attr, ibv_qp_attr, ibv_qp_init_attr,
    ibv_qp_init_attr_ex, ibv_send_wr, ibv_srq_init_attr, verbs_cq, verbs_device, verbs_qp, verbs_srq,
};

macro_rules! plain {
    ($($structure:ty)*) => { $(
        // SAFETY: numbers, pointers, functions that may be null, mutexes and condition variables of
        // Linux, and unions of these.
        unsafe impl Plain for $structure {}
    )* };
}

plain! {
    ibv_cq_init_attr_ex ibv_device_attr ibv_device_attr_ex ibv_port_attr ibv_qp_attr ibv_qp_init_attr
    ibv_qp_init_attr_ex ibv_send_wr ibv_srq_init_attr verbs_cq verbs_device verbs_qp verbs_srq
}
