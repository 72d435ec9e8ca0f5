//! Protection domains.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};

use urnic_verbs_api::rdma_core::{ibv_context, ibv_pd};

use crate::guard::{pointer, status};

/// Numbers of protection domains, for people who read dumps.
static NEXT: AtomicU32 = AtomicU32::new(1);

/// `ibv_alloc_pd(3)`.
pub(crate) unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    pointer(|| {
        let handle = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(ibv_pd { context, handle }))
    })
}

/// `ibv_dealloc_pd(3)`.
pub(crate) unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    status(|| {
        // SAFETY: from alloc_pd, and the program's no longer.
        drop(unsafe { Box::from_raw(pd) });
        Ok(())
    })
}
