//! libibverbs as the stress program uses it: loaded at run time, so that nothing need be installed
//! to build this, and called as any program calls it. Objects are destroyed when dropped, and a
//! destruction that fails ends the program.

use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::mem;
use std::ptr;
use std::sync::OnceLock;

use urnic_rdma_core::*;

mod completions;
mod memory;
mod queues;

pub(crate) use completions::{Completion, Cq, Manner};
pub(crate) use memory::{Binding, Mr, Mw};
pub(crate) use queues::{Qp, Receive, Request, Shape, Srq, Work};

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

/// A member of the extended context, as far before the context proper as `infiniband/verbs.h` has
/// it (all of the members lie at fixed distances from its end).
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
