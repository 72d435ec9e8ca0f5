//! Queue pairs and shared receive queues, and the requests posted to them.

use std::ffi::{c_int, c_void};

use std::ptr;

use urnic_rdma_core::*;
use urnic_sys::Plain;

use super::completions::Cq;
use super::device::Device;
use super::extended::{CREATE_QP_EX, CreateQpEx, extended};
use super::library::{api, some, zero};
use super::memory::{Binding, Mw};

/// A receive: its id, and its buffers.
pub(crate) type Receive = (u64, Vec<ibv_sge>);

/// Posts receives as one list.
///
/// # Safety
/// `post` takes such lists.
unsafe fn post_receives(
    list: &mut [Receive],
    post: impl FnOnce(*mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int,
) {
    let mut requests: Vec<ibv_recv_wr> = list
        .iter_mut()
        .map(|(wr_id, list)| ibv_recv_wr {
            wr_id: *wr_id,
            next: ptr::null_mut(),
            sg_list: list.as_mut_ptr(),
            num_sge: list.len() as c_int,
        })
        .collect();
    for i in 1..requests.len() {
        requests[i - 1].next = &raw mut requests[i];
    }
    let mut bad = ptr::null_mut();
    if let Some(first) = requests.first_mut() {
        zero("posting receives", post(first, &raw mut bad));
    }
}

/// A shared receive queue.
pub(crate) struct Srq(*mut ibv_srq);

impl Srq {
    pub(crate) fn new(device: &Device, max_wr: u32, max_sge: u32) -> Srq {
        let mut init = ibv_srq_init_attr {
            srq_context: ptr::null_mut(),
            attr: ibv_srq_attr {
                max_wr,
                max_sge,
                srq_limit: 0,
            },
        };
        // SAFETY: a live domain.
        Srq(some("ibv_create_srq", unsafe {
            (api().ibv_create_srq)(device.pd, &raw mut init)
        }))
    }

    pub(crate) fn post(&self, list: &mut [Receive]) {
        // SAFETY: a live queue.
        unsafe {
            let post = (*(*self.0).context).ops.post_srq_recv.expect("post_srq_recv");
            post_receives(list, |first, bad| post(self.0, first, bad));
        }
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        // SAFETY: no queue pair uses it any more.
        zero("ibv_destroy_srq", unsafe { (api().ibv_destroy_srq)(self.0) });
    }
}

/// What a work request does.
pub(crate) enum Work<'a> {
    Send,
    SendImm(u32),
    SendInv(u32),
    Write(u64, u32),
    WriteImm(u64, u32, u32),
    Read(u64, u32),
    CompareSwap(u64, u32, u64, u64),
    FetchAdd(u64, u32, u64),
    LocalInv(u32),
    Bind(&'a Mw, u32, Binding<'a>),
}

/// A work request. With `IBV_SEND_INLINE`, the elements lead to ordinary memory.
pub(crate) struct Request<'a> {
    pub(crate) id: u64,
    pub(crate) flags: u32,
    pub(crate) work: Work<'a>,
    pub(crate) list: Vec<ibv_sge>,
}

/// The sizes and the kind of a queue pair.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) depth: u32,
    pub(crate) sge: u32,
    pub(crate) inline: u32,
    pub(crate) signal_all: bool,
    /// Requests are posted by `ibv_wr_*`.
    pub(crate) builder: bool,
}

/// A queue pair, with the parameters that the other end needs.
pub(crate) struct Qp {
    qp: *mut ibv_qp,
    builder: *mut ibv_qp_ex,
}

impl Qp {
    pub(crate) fn new(device: &Device, shape: Shape, send: &Cq, receive: &Cq, srq: Option<&Srq>) -> Qp {
        let srq = srq.map_or(ptr::null_mut(), |srq| srq.0);
        let cap = ibv_qp_cap {
            max_send_wr: shape.depth,
            max_recv_wr: if srq.is_null() { shape.depth } else { 0 },
            max_send_sge: shape.sge,
            max_recv_sge: if srq.is_null() { shape.sge } else { 0 },
            max_inline_data: shape.inline,
        };
        // SAFETY: live queues and domain.
        unsafe {
            let qp = if shape.builder {
                let mut init: ibv_qp_init_attr_ex = Plain::zeroes();
                (init.send_cq, init.recv_cq, init.srq) = (send.cq, receive.cq, srq);
                (init.cap, init.qp_type, init.sq_sig_all) = (cap, IBV_QPT_RC, shape.signal_all.into());
                (init.comp_mask, init.pd) =
                    (IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, device.pd);
                init.send_ops_flags = (1 << 10) - 1;
                let create: CreateQpEx = extended(device.context, CREATE_QP_EX);
                create(device.context, &raw mut init)
            } else {
                let mut init: ibv_qp_init_attr = Plain::zeroes();
                (init.send_cq, init.recv_cq, init.srq) = (send.cq, receive.cq, srq);
                (init.cap, init.qp_type, init.sq_sig_all) = (cap, IBV_QPT_RC, shape.signal_all.into());
                (api().ibv_create_qp)(device.pd, &raw mut init)
            };
            let qp = some("ibv_create_qp", qp);
            let builder = match shape.builder {
                true => some("ibv_qp_to_qp_ex", (api().ibv_qp_to_qp_ex)(qp)),
                false => ptr::null_mut(),
            };
            let this = Qp { qp, builder };
            let rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
            let attr = ibv_qp_attr {
                qp_state: IBV_QPS_INIT,
                port_num: 1,
                qp_access_flags: rights | IBV_ACCESS_REMOTE_ATOMIC,
                ..Default::default()
            };
            this.modify(
                attr,
                IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
            );
            this
        }
    }

    fn modify(&self, mut attr: ibv_qp_attr, mask: u32) {
        // SAFETY: a live queue pair.
        let status = unsafe { (api().ibv_modify_qp)(self.qp, &raw mut attr, mask as c_int) };
        zero("ibv_modify_qp", status);
    }

    pub(crate) fn number(&self) -> u32 {
        // SAFETY: a live queue pair.
        unsafe { (*self.qp).qp_num }
    }

    /// Moves the queue pair from INIT to RTR and RTS, connected with the queue pair of this number
    /// at the same address.
    pub(crate) fn connect(&self, gid: ibv_gid, number: u32) {
        let mut rtr = ibv_qp_attr {
            qp_state: IBV_QPS_RTR,
            path_mtu: IBV_MTU_1024,
            dest_qp_num: number,
            max_dest_rd_atomic: 8,
            min_rnr_timer: 12,
            ..Default::default()
        };
        (rtr.ah_attr.is_global, rtr.ah_attr.port_num) = (1, 1);
        (rtr.ah_attr.grh.dgid, rtr.ah_attr.grh.hop_limit) = (gid, 1);
        let mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
        self.modify(rtr, mask | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
        let rts = ibv_qp_attr {
            qp_state: IBV_QPS_RTS,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            max_rd_atomic: 8,
            ..Default::default()
        };
        let mask = IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT;
        self.modify(rts, mask | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
    }

    /// Moves the queue pair to the error state: outstanding requests are flushed.
    pub(crate) fn fail(&self) {
        let attr = ibv_qp_attr {
            qp_state: IBV_QPS_ERR,
            ..Default::default()
        };
        self.modify(attr, IBV_QP_STATE);
    }

    pub(crate) fn receive(&self, list: &mut [Receive]) {
        // SAFETY: a live queue pair.
        unsafe {
            let post = (*(*self.qp).context).ops.post_recv.expect("post_recv");
            post_receives(list, |first, bad| post(self.qp, first, bad));
        }
    }

    /// Binds a window of type 1.
    pub(crate) fn bind(&self, mw: &Mw, id: u64, binding: &Binding<'_>) {
        let mut bind = ibv_mw_bind {
            wr_id: id,
            send_flags: IBV_SEND_SIGNALED,
            bind_info: binding.info(),
        };
        // SAFETY: a live queue pair, window and region.
        let status = unsafe {
            let bind_mw = (*(*self.qp).context).ops.bind_mw.expect("bind_mw");
            bind_mw(self.qp, mw.0, &raw mut bind)
        };
        zero("ibv_bind_mw", status);
    }

    /// Posts requests as one list.
    pub(crate) fn post(&self, requests: &mut [Request<'_>]) {
        if self.builder.is_null() {
            self.post_list(requests);
        } else {
            self.build(requests);
        }
    }

    fn post_list(&self, requests: &mut [Request<'_>]) {
        let mut list: Vec<ibv_send_wr> = requests.iter_mut().map(work_request).collect();
        for i in 1..list.len() {
            list[i - 1].next = &raw mut list[i];
        }
        let mut bad = ptr::null_mut();
        // SAFETY: a live queue pair, and a list that lives until it is posted.
        let status = unsafe {
            let post = (*(*self.qp).context).ops.post_send.expect("post_send");
            post(self.qp, list.as_mut_ptr(), &raw mut bad)
        };
        zero("ibv_post_send", status);
    }

    fn build(&self, requests: &mut [Request<'_>]) {
        let qp = self.builder;
        // SAFETY: a live queue pair that has the builder, whose functions the plug-in filled in.
        unsafe {
            (*qp).wr_start.expect("wr_start")(qp);
            for request in requests {
                ((*qp).wr_id, (*qp).wr_flags) = (request.id, request.flags & !IBV_SEND_INLINE);
                match &request.work {
                    Work::Send => (*qp).wr_send.expect("wr_send")(qp),
                    Work::SendImm(imm) => (*qp).wr_send_imm.expect("wr_send_imm")(qp, *imm),
                    Work::SendInv(key) => (*qp).wr_send_inv.expect("wr_send_inv")(qp, *key),
                    Work::Write(to, key) => (*qp).wr_rdma_write.expect("wr_rdma_write")(qp, *key, *to),
                    Work::WriteImm(to, key, imm) => {
                        (*qp).wr_rdma_write_imm.expect("wr_rdma_write_imm")(qp, *key, *to, *imm);
                    }
                    Work::Read(from, key) => (*qp).wr_rdma_read.expect("wr_rdma_read")(qp, *key, *from),
                    Work::CompareSwap(at, key, compare, swap) => {
                        (*qp).wr_atomic_cmp_swp.expect("wr_atomic_cmp_swp")(qp, *key, *at, *compare, *swap);
                    }
                    Work::FetchAdd(at, key, add) => {
                        (*qp).wr_atomic_fetch_add.expect("wr_atomic_fetch_add")(qp, *key, *at, *add);
                    }
                    Work::LocalInv(key) => (*qp).wr_local_inv.expect("wr_local_inv")(qp, *key),
                    Work::Bind(mw, key, binding) => {
                        let info = binding.info();
                        (*qp).wr_bind_mw.expect("wr_bind_mw")(qp, mw.0, *key, &raw const info);
                    }
                }
                if request.flags & IBV_SEND_INLINE != 0 {
                    let pieces: Vec<ibv_data_buf> = (request.list.iter())
                        .map(|sge| ibv_data_buf {
                            addr: sge.addr as *mut c_void,
                            length: sge.length as usize,
                        })
                        .collect();
                    let set = (*qp).wr_set_inline_data_list.expect("wr_set_inline_data_list");
                    set(qp, pieces.len(), pieces.as_ptr());
                } else if let [sge] = request.list[..] {
                    (*qp).wr_set_sge.expect("wr_set_sge")(qp, sge.lkey, sge.addr, sge.length);
                } else if !matches!(request.work, Work::LocalInv(_) | Work::Bind(..)) {
                    let set = (*qp).wr_set_sge_list.expect("wr_set_sge_list");
                    set(qp, request.list.len(), request.list.as_ptr());
                }
            }
            zero("ibv_wr_complete", (*qp).wr_complete.expect("wr_complete")(qp));
        }
    }
}

fn work_request(request: &mut Request<'_>) -> ibv_send_wr {
    let mut wr = ibv_send_wr::zeroes();
    (wr.wr_id, wr.send_flags) = (request.id, request.flags);
    (wr.sg_list, wr.num_sge) = (request.list.as_mut_ptr(), request.list.len() as c_int);
    let rdma = |remote_addr, rkey| ibv_send_wr_wr {
        rdma: ibv_send_wr_rdma { remote_addr, rkey },
    };
    let atomic = |remote_addr, rkey, compare_add, swap| ibv_send_wr_wr {
        atomic: ibv_send_wr_atomic {
            remote_addr,
            compare_add,
            swap,
            rkey,
        },
    };
    wr.opcode = match &request.work {
        Work::Send => IBV_WR_SEND,
        Work::SendImm(imm) => {
            wr.imm_data = *imm;
            IBV_WR_SEND_WITH_IMM
        }
        Work::SendInv(key) => {
            wr.imm_data = *key;
            IBV_WR_SEND_WITH_INV
        }
        Work::Write(to, key) => {
            wr.wr = rdma(*to, *key);
            IBV_WR_RDMA_WRITE
        }
        Work::WriteImm(to, key, imm) => {
            (wr.wr, wr.imm_data) = (rdma(*to, *key), *imm);
            IBV_WR_RDMA_WRITE_WITH_IMM
        }
        Work::Read(from, key) => {
            wr.wr = rdma(*from, *key);
            IBV_WR_RDMA_READ
        }
        Work::CompareSwap(at, key, compare, swap) => {
            wr.wr = atomic(*at, *key, *compare, *swap);
            IBV_WR_ATOMIC_CMP_AND_SWP
        }
        Work::FetchAdd(at, key, add) => {
            wr.wr = atomic(*at, *key, *add, 0);
            IBV_WR_ATOMIC_FETCH_AND_ADD
        }
        Work::LocalInv(key) => {
            wr.imm_data = *key;
            IBV_WR_LOCAL_INV
        }
        Work::Bind(mw, rkey, binding) => {
            wr.extra.bind_mw = ibv_send_wr_bind_mw {
                mw: mw.0,
                rkey: *rkey,
                bind_info: binding.info(),
            };
            IBV_WR_BIND_MW
        }
    };
    wr
}

impl Drop for Qp {
    fn drop(&mut self) {
        // SAFETY: a live queue pair.
        zero("ibv_destroy_qp", unsafe { (api().ibv_destroy_qp)(self.qp) });
    }
}
