//! The functions of libibverbs, and the checks of what they return.

use std::ffi::{CString, c_int, c_void};
use std::io;
use std::mem;
use std::sync::OnceLock;

use urnic_rdma_core::*;
use urnic_sys::loader::LoadedFile;

/// Declares the functions of the library that are used.
macro_rules! library {
    ($(fn $name:ident($($arg:ty),*) -> $ret:ty;)*) => {
        pub(super) struct Api { $(pub(super) $name: unsafe extern "C" fn($($arg),*) -> $ret,)* }

        impl Api {
            fn load() -> Api {
                // SAFETY: a plain library.
                let library = unsafe { LoadedFile::load(c"libibverbs.so.1") }.expect("libibverbs is installed");
                $(
                    let name = CString::new(stringify!($name)).expect("a name");
                    let $name = library.symbol(&name);
                    assert!(!$name.is_null(), "libibverbs has no {name:?}");
                )*
                library.keep();
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

pub(super) fn api() -> &'static Api {
    static API: OnceLock<Api> = OnceLock::new();
    API.get_or_init(Api::load)
}

#[track_caller]
pub(super) fn some<T>(what: &str, pointer: *mut T) -> *mut T {
    assert!(!pointer.is_null(), "{what}: {}", io::Error::last_os_error());
    pointer
}

#[track_caller]
pub(super) fn zero(what: &str, status: c_int) {
    assert!(
        status == 0,
        "{what}: {}",
        io::Error::from_raw_os_error(status.abs())
    );
}
