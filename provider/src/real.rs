//! The functions behind the interposed functions: the next definition in the program's search
//! order, which may belong to another preloaded library.
//!
//! They are looked up when the plug-in is loaded, since dlsym(3) is not async-signal-safe and
//! signal handlers call some of them. All of them unwind: a thread may be cancelled inside them,
//! and the frames of the plug-in that it then leaves have nothing to drop.

// The test binary must not interpose itself, so nothing starts there.
#![cfg_attr(test, allow(dead_code))]

use libc::sighandler_t;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulong, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

fn next(name: &CStr) -> *mut c_void {
    // SAFETY: the name is a C string.
    unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) }
}

macro_rules! real {
    ($($name:ident: ($($arg:ty),* $(; $dots:tt)?) $(-> $ret:ty)?;)*) => {
        #[allow(non_upper_case_globals)]
        mod addresses {
            use super::*;
            $(pub(super) static $name: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());)*
        }

        $(
            /// The next definition; None when this libc does not have the function.
            #[inline]
            pub(crate) fn $name() -> Option<unsafe extern "C-unwind" fn($($arg),* $(, $dots)?) $(-> $ret)?> {
                let mut address = addresses::$name.load(Ordering::Relaxed);
                if address.is_null() {
                    address = look_up::$name();
                }
                // SAFETY: null, or the address of that libc function.
                unsafe { std::mem::transmute(address) }
            }
        )*

        mod look_up {
            use super::*;
            $(
                /// Looks a function up by name before this plug-in's constructor ran: constructors
                /// of other libraries may call interposed functions.
                #[cold]
                #[inline(never)]
                pub(super) fn $name() -> *mut c_void {
                    const NAME: &CStr = match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                        Ok(name) => name,
                        Err(_) => c"",
                    };
                    let address = next(NAME);
                    addresses::$name.store(address, Ordering::Relaxed);
                    address
                }
            )*
        }

        /// Looks up all functions.
        pub(crate) fn look_up_all() {
            $(look_up::$name();)*
        }
    };
}

/// `struct stat` and similar structures: passed through, never accessed.
pub(crate) type Opaque = *mut c_void;

real! {
    open: (*const c_char, c_int; ...) -> c_int;
    open64: (*const c_char, c_int; ...) -> c_int;
    openat: (c_int, *const c_char, c_int; ...) -> c_int;
    openat64: (c_int, *const c_char, c_int; ...) -> c_int;
    __open_2: (*const c_char, c_int) -> c_int;
    __open64_2: (*const c_char, c_int) -> c_int;
    __openat_2: (c_int, *const c_char, c_int) -> c_int;
    __openat64_2: (c_int, *const c_char, c_int) -> c_int;
    fopen: (*const c_char, *const c_char) -> Opaque;
    fopen64: (*const c_char, *const c_char) -> Opaque;
    opendir: (*const c_char) -> Opaque;
    scandir: (*const c_char, Opaque, Opaque, Opaque) -> c_int;
    scandir64: (*const c_char, Opaque, Opaque, Opaque) -> c_int;
    stat: (*const c_char, Opaque) -> c_int;
    stat64: (*const c_char, Opaque) -> c_int;
    lstat: (*const c_char, Opaque) -> c_int;
    lstat64: (*const c_char, Opaque) -> c_int;
    fstatat: (c_int, *const c_char, Opaque, c_int) -> c_int;
    fstatat64: (c_int, *const c_char, Opaque, c_int) -> c_int;
    statx: (c_int, *const c_char, c_int, c_uint, Opaque) -> c_int;
    __xstat: (c_int, *const c_char, Opaque) -> c_int;
    __xstat64: (c_int, *const c_char, Opaque) -> c_int;
    __lxstat: (c_int, *const c_char, Opaque) -> c_int;
    __lxstat64: (c_int, *const c_char, Opaque) -> c_int;
    __fxstatat: (c_int, c_int, *const c_char, Opaque, c_int) -> c_int;
    __fxstatat64: (c_int, c_int, *const c_char, Opaque, c_int) -> c_int;
    access: (*const c_char, c_int) -> c_int;
    eaccess: (*const c_char, c_int) -> c_int;
    euidaccess: (*const c_char, c_int) -> c_int;
    faccessat: (c_int, *const c_char, c_int, c_int) -> c_int;
    readlink: (*const c_char, *mut c_char, usize) -> isize;
    __readlink_chk: (*const c_char, *mut c_char, usize, usize) -> isize;
    readlinkat: (c_int, *const c_char, *mut c_char, usize) -> isize;
    __readlinkat_chk: (c_int, *const c_char, *mut c_char, usize, usize) -> isize;
    realpath: (*const c_char, *mut c_char) -> *mut c_char;
    __realpath_chk: (*const c_char, *mut c_char, usize) -> *mut c_char;
    canonicalize_file_name: (*const c_char) -> *mut c_char;
    getxattr: (*const c_char, *const c_char, *mut c_void, usize) -> isize;
    lgetxattr: (*const c_char, *const c_char, *mut c_void, usize) -> isize;
    listxattr: (*const c_char, *mut c_char, usize) -> isize;
    llistxattr: (*const c_char, *mut c_char, usize) -> isize;
    chdir: (*const c_char) -> c_int;
    execve: (*const c_char, *const *mut c_char, *const *mut c_char) -> c_int;
    execv: (*const c_char, *const *mut c_char) -> c_int;
    execvp: (*const c_char, *const *mut c_char) -> c_int;
    execvpe: (*const c_char, *const *mut c_char, *const *mut c_char) -> c_int;
    posix_spawn: (Opaque, *const c_char, Opaque, Opaque, *const *mut c_char, *const *mut c_char) -> c_int;
    posix_spawnp: (Opaque, *const c_char, Opaque, Opaque, *const *mut c_char, *const *mut c_char) -> c_int;
    close: (c_int) -> c_int;
    close_range: (c_uint, c_uint, c_int) -> c_int;
    closefrom: (c_int);
    dup: (c_int) -> c_int;
    dup2: (c_int, c_int) -> c_int;
    dup3: (c_int, c_int, c_int) -> c_int;
    write: (c_int, *const c_void, usize) -> isize;
    socket: (c_int, c_int, c_int) -> c_int;
    pause: () -> c_int;
    recv: (c_int, *mut c_void, usize, c_int) -> isize;
    ioctl: (c_int, c_ulong; ...) -> c_int;
    fcntl: (c_int, c_int; ...) -> c_int;
    fcntl64: (c_int, c_int; ...) -> c_int;
    fstat: (c_int, *mut libc::stat) -> c_int;
    fstat64: (c_int, *mut libc::stat) -> c_int;
    __fxstat: (c_int, c_int, *mut libc::stat) -> c_int;
    __fxstat64: (c_int, c_int, *mut libc::stat) -> c_int;
    sigaction: (c_int, *const libc::sigaction, *mut libc::sigaction) -> c_int;
    __sigaction: (c_int, *const libc::sigaction, *mut libc::sigaction) -> c_int;
    signal: (c_int, sighandler_t) -> sighandler_t;
    bsd_signal: (c_int, sighandler_t) -> sighandler_t;
    ssignal: (c_int, sighandler_t) -> sighandler_t;
    sysv_signal: (c_int, sighandler_t) -> sighandler_t;
    __sysv_signal: (c_int, sighandler_t) -> sighandler_t;
    sigset: (c_int, sighandler_t) -> sighandler_t;
    sigignore: (c_int) -> c_int;
    siginterrupt: (c_int, c_int) -> c_int;
}
