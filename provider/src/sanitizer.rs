//! The options that the runtimes of gcc's and clang's sanitizers query at program start. They use
//! the first definition in the program's search order: the program's own, else the definitions
//! here.

// The test binary is not a plug-in.
#![cfg_attr(test, allow(dead_code))]

use std::ffi::{CStr, c_char};

/// AddressSanitizer's runtime requires to be the first library, but a preloaded plug-in comes
/// before it. The runtime also works after the plug-in, because its functions call the next
/// definitions, which are those of the runtime.
const ADDRESS: &CStr = c"verify_asan_link_order=0";

/// ThreadSanitizer does not observe the atomic operations in a library that it did not compile, and
/// reports the accesses that they order as races. The same line is in `share/tsan.supp`.
const THREAD: &CStr = c"called_from_lib:liburnic.so\n";

#[cfg_attr(not(test), unsafe(no_mangle))]
extern "C" fn __asan_default_options() -> *const c_char {
    ADDRESS.as_ptr()
}

#[cfg_attr(not(test), unsafe(no_mangle))]
extern "C" fn __tsan_default_suppressions() -> *const c_char {
    THREAD.as_ptr()
}
