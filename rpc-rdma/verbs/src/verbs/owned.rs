//! Owners of the objects of libibverbs and librdmacm, and plain structures of these libraries.

use rdma_mummy_sys as sys;
use std::ffi::c_int;
use std::io;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

/// An object of C that the value owns alone and destroys.
pub(super) struct Owned<T: Object>(NonNull<T>);

/// Objects of which there are owners.
///
/// # Safety
/// The libraries permit the use of an object by several threads at the same time.
pub(super) unsafe trait Object: Sized {
    /// The function that destroys an object. It returns 0 or an errno.
    const DESTROY: unsafe extern "C" fn(*mut Self) -> c_int;
}

// SAFETY: the contract of `Object`.
unsafe impl<T: Object> Send for Owned<T> {}
// SAFETY: the contract of `Object`.
unsafe impl<T: Object> Sync for Owned<T> {}

impl<T: Object> Owned<T> {
    /// The object that a function returned. The function returns null and sets errno if it fails.
    ///
    /// # Safety
    /// `object` is null, or was just made, and only the value destroys it. What the object was made
    /// of exists as long as the value.
    pub(super) unsafe fn made(object: *mut T) -> io::Result<Self> {
        NonNull::new(object)
            .map(Self)
            .ok_or_else(io::Error::last_os_error)
    }

    /// The object, which exists as long as `self`.
    pub(super) fn as_ptr(&self) -> *mut T {
        self.0.as_ptr()
    }

    /// Destroys the object; returns what the function for it returned.
    pub(super) fn destroy(self) -> c_int {
        let object = ManuallyDrop::new(self);
        // SAFETY: the object exists, and its only owner, `self`, is not dropped.
        unsafe { T::DESTROY(object.as_ptr()) }
    }
}

impl<T: Object> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: the object exists, and its only owner ends here.
        unsafe { T::DESTROY(self.as_ptr()) };
    }
}

// SAFETY: ibv_destroy_cq(3) and the other verbs are thread-safe.
unsafe impl Object for sys::ibv_cq {
    const DESTROY: unsafe extern "C" fn(*mut Self) -> c_int = sys::ibv_destroy_cq;
}
// SAFETY: as above.
unsafe impl Object for sys::ibv_comp_channel {
    const DESTROY: unsafe extern "C" fn(*mut Self) -> c_int = sys::ibv_destroy_comp_channel;
}
// SAFETY: as above.
unsafe impl Object for sys::ibv_pd {
    const DESTROY: unsafe extern "C" fn(*mut Self) -> c_int = sys::ibv_dealloc_pd;
}
// SAFETY: as above.
unsafe impl Object for sys::ibv_mr {
    const DESTROY: unsafe extern "C" fn(*mut Self) -> c_int = sys::ibv_dereg_mr;
}
// SAFETY: as above.
unsafe impl Object for sys::ibv_mw {
    const DESTROY: unsafe extern "C" fn(*mut Self) -> c_int = {
        // The verb is an inline function of the header, so the bindings have no C function.
        unsafe extern "C" fn dealloc(window: *mut sys::ibv_mw) -> c_int {
            // SAFETY: the caller promises that the window exists.
            unsafe { sys::ibv_dealloc_mw(window) }
        }
        dealloc
    };
}
// SAFETY: librdmacm's functions are thread-safe.
unsafe impl Object for sys::rdma_cm_id {
    const DESTROY: unsafe extern "C" fn(*mut Self) -> c_int = sys::rdma_destroy_id;
}
// SAFETY: librdmacm's functions are thread-safe.
unsafe impl Object for sys::rdma_cm_event {
    const DESTROY: unsafe extern "C" fn(*mut Self) -> c_int = sys::rdma_ack_cm_event;
}
// SAFETY: librdmacm's functions are thread-safe.
unsafe impl Object for sys::rdma_event_channel {
    const DESTROY: unsafe extern "C" fn(*mut Self) -> c_int = {
        unsafe extern "C" fn destroy(channel: *mut sys::rdma_event_channel) -> c_int {
            // SAFETY: the caller promises that the channel exists.
            unsafe { sys::rdma_destroy_event_channel(channel) };
            0
        }
        destroy
    };
}

/// A structure of numbers, pointers and unions of them.
///
/// # Safety
/// All zeroes is a value of the structure.
pub(super) unsafe trait Plain: Sized {
    /// All zeroes.
    fn zeroes() -> Self {
        // SAFETY: the contract of this trait.
        unsafe { std::mem::zeroed() }
    }
}

// SAFETY: numbers only.
unsafe impl Plain for sys::ibv_device_attr {}
// SAFETY: numbers, and a union of numbers.
unsafe impl Plain for sys::ibv_wc {}
// SAFETY: numbers, pointers, and unions of them.
unsafe impl Plain for sys::ibv_send_wr {}
