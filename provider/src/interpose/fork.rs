//! libibverbs' functions that prepare for fork(2). libibverbs asks the kernel by RDMA netlink,
//! which this plug-in refuses to the program, whether that is necessary.

use std::ffi::{CStr, c_int, c_void};

use super::fds::we_answer;
use super::missing;
use crate::copy_on_fork::children_may_have_registered_memory;
use crate::register::symbol_of_libibverbs;

/// `IBV_FORK_UNNEEDED` of `enum ibv_fork_status`.
const UNNEEDED: c_int = 2;

/// `ibv_fork_init(3)`: does nothing where it is unnecessary.
#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn ibv_fork_init() -> c_int {
    match is_unnecessary() {
        true => 0,
        false => of_libibverbs(c"ibv_fork_init").map_or(libc::ENOSYS, |init| init()),
    }
}

/// `ibv_is_fork_initialized(3)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn ibv_is_fork_initialized() -> c_int {
    match is_unnecessary() {
        true => UNNEEDED,
        false => of_libibverbs(c"ibv_is_fork_initialized").map_or_else(|| missing(0), |status| status()),
    }
}

fn is_unnecessary() -> bool {
    we_answer() && children_may_have_registered_memory()
}

/// A function of libibverbs without arguments.
fn of_libibverbs(name: &CStr) -> Option<extern "C" fn() -> c_int> {
    let address = symbol_of_libibverbs(name);
    // SAFETY: null, or libibverbs' function of this name, which has no arguments.
    unsafe { std::mem::transmute::<*mut c_void, Option<extern "C" fn() -> c_int>>(address) }
}
