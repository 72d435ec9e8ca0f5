//! What the runtimes of gcc's and clang's sanitizers ask a program for at its start. They take the
//! first definition in the program's search order: the program's own, else these.

// The test binary is no plug-in.
#![cfg_attr(test, allow(dead_code))]

use std::ffi::{CStr, c_char};

/// AddressSanitizer's runtime wants to be the first library, but a plug-in that is preloaded comes
/// before it. It works behind us as well: our functions call the next definitions, which are its.
const ADDRESS: &CStr = c"verify_asan_link_order=0";

/// ThreadSanitizer knows nothing of the atomic operations in a library that it did not compile, and
/// takes what they order for races. The same line is in `share/tsan.supp`.
const THREAD: &CStr = c"called_from_lib:liburnic.so\n";

#[cfg_attr(not(test), unsafe(no_mangle))]
extern "C" fn __asan_default_options() -> *const c_char {
    ADDRESS.as_ptr()
}

#[cfg_attr(not(test), unsafe(no_mangle))]
extern "C" fn __tsan_default_suppressions() -> *const c_char {
    THREAD.as_ptr()
}
