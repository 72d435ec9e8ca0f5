//! Opens the device, and then overflows its stack: Rust's own handler prints a message about that.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::hint::black_box;

type List = unsafe extern "C" fn(*mut c_int) -> *mut *mut c_void;
type Name = unsafe extern "C" fn(*mut c_void) -> *const c_char;
type Open = unsafe extern "C" fn(*mut c_void) -> *mut c_void;

/// Opens urnic0 with libibverbs.
fn open() {
    // SAFETY: the functions have these types (verbs.h), and get what they return.
    unsafe {
        let library = libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW);
        assert!(!library.is_null(), "libibverbs is installed");
        let symbol = |name: &CStr| libc::dlsym(library, name.as_ptr());
        let list: List = std::mem::transmute(symbol(c"ibv_get_device_list"));
        let name: Name = std::mem::transmute(symbol(c"ibv_get_device_name"));
        let open: Open = std::mem::transmute(symbol(c"ibv_open_device"));
        let mut count = 0;
        let devices = list(&mut count);
        let ours = (0..count as usize)
            .map(|n| *devices.add(n))
            .find(|device| CStr::from_ptr(name(*device)) == c"urnic0");
        assert!(!open(ours.expect("urnic0 is there")).is_null(), "urnic0 opens");
    }
}

#[allow(unconditional_recursion)]
fn deeper(depth: u64) -> u64 {
    let frame = black_box([depth; 64]);
    deeper(depth + 1) + frame[(depth % 64) as usize]
}

fn main() {
    // SAFETY: a limit of this process.
    unsafe {
        let none = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        libc::setrlimit(libc::RLIMIT_CORE, &none);
    }
    open();
    println!("open");
    println!("{}", deeper(0));
}
