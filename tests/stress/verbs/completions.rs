//! Completion queues, polled in each possible way.

use std::ffi::c_int;
use std::ptr;

use urnic_rdma_core::*;

use super::device::Device;
use super::extended::{CREATE_CQ_EX, CreateCqEx, extended};
use super::library::{api, some, zero};

/// How a completion queue is polled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Manner {
    /// `ibv_poll_cq`.
    Polled,
    /// `ibv_start_poll`.
    Extended,
    /// `ibv_poll_cq`, after an event.
    Events,
}

/// A completion queue.
pub(crate) struct Cq {
    pub(super) cq: *mut ibv_cq,
    channel: *mut ibv_comp_channel,
    manner: Manner,
}

/// A work completion, however it was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Completion {
    pub(crate) id: u64,
    pub(crate) status: u32,
    pub(crate) opcode: u32,
    pub(crate) len: u32,
    pub(crate) qp: u32,
    pub(crate) flags: u32,
    pub(crate) extra: u32,
    pub(crate) vendor: u32,
}

impl Cq {
    pub(crate) fn new(device: &Device, size: u32, manner: Manner) -> Cq {
        let (context, mut channel) = (device.context, ptr::null_mut());
        // SAFETY: an open context.
        unsafe {
            if manner == Manner::Extended {
                let mut attr = ibv_cq_init_attr_ex {
                    cqe: size,
                    cq_context: ptr::null_mut(),
                    channel,
                    comp_vector: 0,
                    wc_flags: IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_IMM | IBV_WC_EX_WITH_QP_NUM,
                    comp_mask: 0,
                    flags: 0,
                    parent_domain: ptr::null_mut(),
                };
                let create: CreateCqEx = extended(context, CREATE_CQ_EX);
                let cq = some("ibv_create_cq_ex", create(context, &raw mut attr)).cast();
                return Cq { cq, channel, manner };
            }
            if manner == Manner::Events {
                channel = some(
                    "ibv_create_comp_channel",
                    (api().ibv_create_comp_channel)(context),
                );
            }
            let cq = (api().ibv_create_cq)(context, size as c_int, ptr::null_mut(), channel, 0);
            let cq = Cq {
                cq: some("ibv_create_cq", cq),
                channel,
                manner,
            };
            cq.arm();
            cq
        }
    }

    fn arm(&self) {
        if self.manner == Manner::Events {
            // SAFETY: a live queue.
            zero("ibv_req_notify_cq", unsafe {
                (*(*self.cq).context).ops.req_notify_cq.expect("req_notify_cq")(self.cq, 0)
            });
        }
    }

    pub(crate) fn resize(&self, size: u32) {
        // SAFETY: a live queue.
        zero("ibv_resize_cq", unsafe {
            (api().ibv_resize_cq)(self.cq, size as c_int)
        });
    }

    /// Takes the available completions; of a queue with events, only if there is an event.
    pub(crate) fn take(&self, into: &mut Vec<Completion>) {
        match self.manner {
            Manner::Extended => self.take_extended(into),
            Manner::Polled => self.take_plain(into),
            Manner::Events => {
                // SAFETY: a live channel.
                let fd = unsafe { (*self.channel).fd };
                let mut wait = libc::pollfd {
                    fd,
                    events: libc::POLLIN,
                    revents: 0,
                };
                // SAFETY: one descriptor.
                if unsafe { libc::poll(&raw mut wait, 1, 0) } == 1 {
                    let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
                    // SAFETY: a live channel and queue.
                    unsafe {
                        let status = (api().ibv_get_cq_event)(self.channel, &raw mut cq, &raw mut context);
                        zero("ibv_get_cq_event", status);
                        (api().ibv_ack_cq_events)(cq, 1);
                    }
                    assert_eq!(cq, self.cq, "the event of another queue");
                    self.arm();
                    self.take_plain(into);
                }
            }
        }
    }

    fn take_plain(&self, into: &mut Vec<Completion>) {
        loop {
            let mut list = [ibv_wc::default(); 5];
            // SAFETY: a live queue, and an array with room for the number of entries that is
            // passed.
            let n = unsafe {
                let poll = (*(*self.cq).context).ops.poll_cq.expect("poll_cq");
                poll(self.cq, list.len() as c_int, list.as_mut_ptr())
            };
            let n = usize::try_from(n).expect("ibv_poll_cq");
            into.extend(list[..n].iter().map(|wc| Completion {
                id: wc.wr_id,
                status: wc.status,
                opcode: wc.opcode,
                len: wc.byte_len,
                qp: wc.qp_num,
                flags: wc.wc_flags,
                extra: wc.imm_data,
                vendor: wc.vendor_err,
            }));
            if n == 0 {
                return;
            }
        }
    }

    fn take_extended(&self, into: &mut Vec<Completion>) {
        let cq: *mut ibv_cq_ex = self.cq.cast();
        let mut attr = ibv_poll_cq_attr::default();
        // SAFETY: a live extended queue, whose functions libibverbs and the plug-in filled in; read
        // while it is polled.
        unsafe {
            let mut status = (*cq).start_poll.expect("start_poll")(cq, &raw mut attr);
            if status == libc::ENOENT {
                return;
            }
            while status == 0 {
                into.push(Completion {
                    id: (*cq).wr_id,
                    status: (*cq).status,
                    opcode: (*cq).read_opcode.expect("read_opcode")(cq),
                    len: (*cq).read_byte_len.expect("read_byte_len")(cq),
                    qp: (*cq).read_qp_num.expect("read_qp_num")(cq),
                    flags: (*cq).read_wc_flags.expect("read_wc_flags")(cq),
                    extra: (*cq).read_imm_data.expect("read_imm_data")(cq),
                    vendor: (*cq).read_vendor_err.expect("read_vendor_err")(cq),
                });
                status = (*cq).next_poll.expect("next_poll")(cq);
            }
            assert_eq!(status, libc::ENOENT, "ibv_next_poll");
            (*cq).end_poll.expect("end_poll")(cq);
        }
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // SAFETY: no queue pair completes there any more.
        unsafe {
            zero("ibv_destroy_cq", (api().ibv_destroy_cq)(self.cq));
            if !self.channel.is_null() {
                zero(
                    "ibv_destroy_comp_channel",
                    (api().ibv_destroy_comp_channel)(self.channel),
                );
            }
        }
    }
}
