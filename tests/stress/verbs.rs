//! libibverbs as the stress program uses it: loaded at run time, so that nothing need be installed to build this, and called as any program calls
//! it. Objects are destroyed when dropped, and a destruction that fails ends the program.

use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::mem;
use std::ptr;
use std::sync::OnceLock;

use urnic_verbs_api::rdma_core::*;

use crate::arena::Arena;

/// Declares the functions of the library that are used.
macro_rules! library {
    ($(fn $name:ident($($arg:ty),*) -> $ret:ty;)*) => {
        struct Api { $($name: unsafe extern "C" fn($($arg),*) -> $ret,)* }

        impl Api {
            fn load() -> Api {
                // SAFETY: a plain library.
                let library = unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW) };
                assert!(!library.is_null(), "libibverbs.so.1 is not installed");
                $(
                    let name = concat!(stringify!($name), "\0");
                    // SAFETY: a loaded library, and a name that ends with 0.
                    let $name = unsafe { libc::dlsym(library, name.as_ptr().cast()) };
                    assert!(!$name.is_null(), "libibverbs has no {name}");
                )*
                // SAFETY: the functions have these types (`infiniband/verbs.h`).
                unsafe { Api { $($name: mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> $ret>($name),)* } }
            }
        }
    };
}

library! {
    fn ibv_get_device_list(*mut c_int) -> *mut *mut ibv_device;
    fn ibv_get_device_name(*mut ibv_device) -> *const std::ffi::c_char;
    fn ibv_open_device(*mut ibv_device) -> *mut ibv_context;
    fn ibv_close_device(*mut ibv_context) -> c_int;
    fn ibv_query_gid(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
    fn ibv_alloc_pd(*mut ibv_context) -> *mut ibv_pd;
    fn ibv_dealloc_pd(*mut ibv_pd) -> c_int;
    fn ibv_reg_mr_iova(*mut ibv_pd, *mut c_void, usize, u64, c_int) -> *mut ibv_mr;
    fn ibv_rereg_mr(*mut ibv_mr, c_int, *mut ibv_pd, *mut c_void, usize, c_int) -> c_int;
    fn ibv_dereg_mr(*mut ibv_mr) -> c_int;
    fn ibv_create_comp_channel(*mut ibv_context) -> *mut ibv_comp_channel;
    fn ibv_destroy_comp_channel(*mut ibv_comp_channel) -> c_int;
    fn ibv_create_cq(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
    fn ibv_resize_cq(*mut ibv_cq, c_int) -> c_int;
    fn ibv_destroy_cq(*mut ibv_cq) -> c_int;
    fn ibv_get_cq_event(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
    fn ibv_ack_cq_events(*mut ibv_cq, u32) -> ();
    fn ibv_create_srq(*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq;
    fn ibv_destroy_srq(*mut ibv_srq) -> c_int;
    fn ibv_create_qp(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    fn ibv_qp_to_qp_ex(*mut ibv_qp) -> *mut ibv_qp_ex;
    fn ibv_modify_qp(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    fn ibv_destroy_qp(*mut ibv_qp) -> c_int;
}

fn api() -> &'static Api {
    static API: OnceLock<Api> = OnceLock::new();
    API.get_or_init(Api::load)
}

#[track_caller]
fn some<T>(what: &str, pointer: *mut T) -> *mut T {
    assert!(!pointer.is_null(), "{what}: {}", io::Error::last_os_error());
    pointer
}

#[track_caller]
fn zero(what: &str, status: c_int) {
    assert!(
        status == 0,
        "{what}: {}",
        io::Error::from_raw_os_error(status.abs())
    );
}

/// A member of the extended context, as far before the context proper as `infiniband/verbs.h` has it (all of the members lie at fixed
/// distances from its end).
///
/// # Safety
/// `F` is the member's type.
unsafe fn extended<F: Copy>(context: *mut ibv_context, before: usize) -> F {
    // SAFETY: an open context, which is extended since rdma-core 14.
    unsafe { *context.byte_sub(before).cast::<F>() }
}

type CreateQpEx = unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_init_attr_ex) -> *mut ibv_qp;
const CREATE_QP_EX: usize = 56;
type CreateCqEx = unsafe extern "C" fn(*mut ibv_context, *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex;
const CREATE_CQ_EX: usize = 120;

/// The open device and a protection domain in it.
pub(crate) struct Device {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    on_demand: bool,
}

impl Device {
    pub(crate) fn open() -> Device {
        let mut count = 0;
        // SAFETY: as the manual has it.
        unsafe {
            let list = some("ibv_get_device_list", (api().ibv_get_device_list)(&raw mut count));
            let named = |i: &usize| CStr::from_ptr((api().ibv_get_device_name)(*list.add(*i))) == c"urnic0";
            let found = (0..count as usize).find(named).expect("no urnic0");
            let context = some("ibv_open_device", (api().ibv_open_device)(*list.add(found)));
            let pd = some("ibv_alloc_pd", (api().ibv_alloc_pd)(context));
            // All of the address space, where there are regions on demand.
            let access = IBV_ACCESS_ON_DEMAND as c_int;
            let mr = (api().ibv_reg_mr_iova)(pd, ptr::null_mut(), usize::MAX, 0, access);
            let on_demand = !mr.is_null();
            if on_demand {
                zero("ibv_dereg_mr", (api().ibv_dereg_mr)(mr));
            }
            Device {
                context,
                pd,
                on_demand,
            }
        }
    }

    /// Whether regions may be on demand.
    pub(crate) fn on_demand(&self) -> bool {
        self.on_demand
    }

    pub(crate) fn gid(&self) -> ibv_gid {
        let mut gid = ibv_gid { raw: [0; 16] };
        // SAFETY: an open context.
        zero("ibv_query_gid", unsafe {
            (api().ibv_query_gid)(self.context, 1, 0, &raw mut gid)
        });
        gid
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: what was made in them is gone.
        unsafe {
            zero("ibv_dealloc_pd", (api().ibv_dealloc_pd)(self.pd));
            zero("ibv_close_device", (api().ibv_close_device)(self.context));
        }
    }
}

/// A memory region.
pub(crate) struct Mr {
    mr: *mut ibv_mr,
    name: u64,
}

impl Mr {
    /// Of `len` octets of the arena from `at`, the first of which is called `name`.
    pub(crate) fn new(device: &Device, arena: &Arena, at: usize, len: usize, name: u64, access: u32) -> Mr {
        assert!(at + len <= arena.len);
        // SAFETY: memory that is there as long as the region.
        let mr = unsafe {
            (api().ibv_reg_mr_iova)(device.pd, arena.base.add(at).cast(), len, name, access as c_int)
        };
        Mr {
            mr: some("ibv_reg_mr_iova", mr),
            name,
        }
    }

    /// Other memory, and other rights; the key stays.
    pub(crate) fn moved(&mut self, arena: &Arena, at: usize, len: usize, name: u64, access: u32) {
        assert!(at + len <= arena.len);
        let flags = (IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_ACCESS) as c_int;
        // SAFETY: a live region, and memory that is there as long.
        zero("ibv_rereg_mr", unsafe {
            let addr = arena.base.add(at).cast();
            (api().ibv_rereg_mr)(self.mr, flags, ptr::null_mut(), addr, len, access as c_int)
        });
        self.name = name;
    }

    /// Other rights.
    pub(crate) fn restricted(&mut self, access: u32) {
        let flags = IBV_REREG_MR_CHANGE_ACCESS as c_int;
        // SAFETY: a live region.
        zero("ibv_rereg_mr", unsafe {
            (api().ibv_rereg_mr)(
                self.mr,
                flags,
                ptr::null_mut(),
                ptr::null_mut(),
                0,
                access as c_int,
            )
        });
    }

    /// What its first octet is called.
    pub(crate) fn name(&self) -> u64 {
        self.name
    }

    pub(crate) fn key(&self) -> u32 {
        // SAFETY: a live region.
        unsafe { (*self.mr).lkey }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: a live region.
        zero("ibv_dereg_mr", unsafe { (api().ibv_dereg_mr)(self.mr) });
    }
}

/// A memory window.
pub(crate) struct Mw(*mut ibv_mw);

impl Mw {
    pub(crate) fn new(device: &Device, kind: ibv_mw_type) -> Mw {
        // SAFETY: an open context, whose operations libibverbs filled in.
        let mw = unsafe { (*device.context).ops.alloc_mw.expect("alloc_mw")(device.pd, kind) };
        Mw(some("ibv_alloc_mw", mw))
    }

    pub(crate) fn key(&self) -> u32 {
        // SAFETY: a live window.
        unsafe { (*self.0).rkey }
    }

    /// The key for the next bind of a window of type 2 (`ibv_inc_rkey`), which it has from now on.
    pub(crate) fn next_key(&self) -> u32 {
        let key = self.key();
        let next = key & !0xff | key.wrapping_add(1) & 0xff;
        // SAFETY: a live window, whose key is the program's to write.
        unsafe { (*self.0).rkey = next };
        next
    }
}

impl Drop for Mw {
    fn drop(&mut self) {
        // SAFETY: a live window.
        zero("ibv_dealloc_mw", unsafe {
            (*(*self.0).context).ops.dealloc_mw.expect("dealloc_mw")(self.0)
        });
    }
}

/// What a bound window shows.
pub(crate) struct Binding<'a> {
    pub(crate) mr: &'a Mr,
    pub(crate) address: u64,
    pub(crate) len: u64,
    pub(crate) access: u32,
}

impl Binding<'_> {
    fn info(&self) -> ibv_mw_bind_info {
        ibv_mw_bind_info {
            mr: self.mr.mr,
            addr: self.address,
            length: self.len,
            mw_access_flags: self.access,
        }
    }
}

/// How a completion queue is looked at.
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
    cq: *mut ibv_cq,
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

    /// Takes what is there; of a queue with events, only if there is one.
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
            // SAFETY: a live queue, and an array of so many.
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
        // SAFETY: a live extended queue, whose functions libibverbs and the plug-in filled in; read while it is polled.
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

/// A receive: its id, and where it goes.
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

/// How large a queue pair is, and of which kind.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) depth: u32,
    pub(crate) sge: u32,
    pub(crate) inline: u32,
    pub(crate) signal_all: bool,
    /// Requests are posted by `ibv_wr_*`.
    pub(crate) builder: bool,
}

/// A queue pair, and what tells the other end about it.
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
                let mut init: ibv_qp_init_attr_ex = mem::zeroed();
                (init.send_cq, init.recv_cq, init.srq) = (send.cq, receive.cq, srq);
                (init.cap, init.qp_type, init.sq_sig_all) = (cap, IBV_QPT_RC, shape.signal_all.into());
                (init.comp_mask, init.pd) =
                    (IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, device.pd);
                init.send_ops_flags = (1 << 10) - 1;
                let create: CreateQpEx = extended(device.context, CREATE_QP_EX);
                create(device.context, &raw mut init)
            } else {
                let mut init: ibv_qp_init_attr = mem::zeroed();
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

    /// INIT to RTR and RTS, with that queue pair at the same address.
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

    /// To the error state: what is outstanding is flushed.
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
    // SAFETY: all zeroes is a request.
    let mut wr: ibv_send_wr = unsafe { mem::zeroed() };
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
