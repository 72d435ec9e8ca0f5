//! Address handles: the peers of datagrams.

use std::ffi::c_int;

use urnic_driver::Destination;
use urnic_rdma_core::*;

use super::pd::Pd;
use super::qp_attr::address_vector;
use crate::guard::{pointer, status};

/// An address handle: the part of libibverbs, then the part of the provider.
#[repr(C)]
pub(crate) struct Ah {
    /// Must be first: libibverbs' pointer is also the provider's.
    abi: ibv_ah,
    pub(super) destination: Destination,
}

impl Ah {
    /// The address handle behind libibverbs' pointer.
    ///
    /// # Safety
    /// `ah` came from [`create_ah`] and was not destroyed.
    #[inline]
    pub(super) unsafe fn of<'a>(ah: *mut ibv_ah) -> &'a Ah {
        // SAFETY: the caller promises a handle of this provider, and `abi` is the first field.
        unsafe { &*ah.cast::<Ah>() }
    }
}

/// `ibv_create_ah(3)`: EINVAL for an address that is not global, as for all Ethernet devices, or
/// whose source is not an address of this device of the same family.
pub(super) unsafe extern "C" fn create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    pointer(|| {
        // SAFETY: a live domain, and the program's attributes.
        let (pd_, attr) = unsafe { (Pd::of(pd), &*attr) };
        let destination = pd_.context().driver.destination(&address_vector(attr))?;
        Ok(Box::new(Ah {
            abi: ibv_ah {
                context: pd_.ibv_context(),
                pd,
                handle: 0,
            },
            destination,
        }))
    })
    .cast()
}

/// `ibv_destroy_ah(3)`.
pub(super) unsafe extern "C" fn destroy_ah(ah: *mut ibv_ah) -> c_int {
    status(|| {
        // SAFETY: from `Box::into_raw`, and no other reference is left.
        drop(unsafe { Box::from_raw(ah.cast::<Ah>()) });
        Ok(())
    })
}
