//! The original of each interposed function: the next definition in the program's search order,
//! which may belong to another preloaded library.
//!
//! They are looked up when the plug-in is loaded, since dlsym(3) is not async-signal-safe and
//! signal handlers call some of them. All of them unwind: a thread may be cancelled inside them,
//! and the frames of the plug-in that it then leaves have nothing to drop.

// The test binary must not interpose itself, so nothing starts there.
#![cfg_attr(test, allow(dead_code))]

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulong, c_void};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::sighandler_t;

use urnic_sys::loader::next_definition;

/// The next definition of a function of type `F`.
pub(crate) struct Next<F> {
    name: &'static CStr,
    /// Null until the lookup, and if this libc does not have the function.
    address: AtomicPtr<c_void>,
    function: PhantomData<F>,
}

impl<F> Next<F> {
    /// # Safety
    /// `F` is a function pointer of the type that the function of this name has; an `unsafe` one,
    /// if the function is not sound with any arguments.
    const unsafe fn new(name: &'static CStr) -> Next<F> {
        Next {
            name,
            address: AtomicPtr::new(std::ptr::null_mut()),
            function: PhantomData,
        }
    }

    /// The function; `None` when this libc does not have it.
    #[inline]
    pub(crate) fn get(&self) -> Option<F> {
        let mut address = self.address.load(Ordering::Relaxed);
        if address.is_null() {
            address = self.look_up();
        }
        // SAFETY: the promise of `new`: null, or the address of that function.
        unsafe { std::mem::transmute_copy::<*mut c_void, Option<F>>(&address) }
    }

    /// Looks the function up by its name. Done before this plug-in's constructor ran if another
    /// library's constructor calls an interposed function.
    #[cold]
    #[inline(never)]
    fn look_up(&self) -> *mut c_void {
        let address = next_definition(self.name);
        self.address.store(address, Ordering::Relaxed);
        address
    }
}

macro_rules! real {
    ($look_up:ident, unsafe; $($name:ident: $args:tt $(-> $ret:ty)?;)*) => {
        real! { $look_up; $($name: unsafe extern "C-unwind" fn $args $(-> $ret)?;)* }
    };
    ($look_up:ident, safe; $($name:ident: $args:tt $(-> $ret:ty)?;)*) => {
        real! { $look_up; $($name: extern "C-unwind" fn $args $(-> $ret)?;)* }
    };
    ($look_up:ident; $($name:ident: $function:ty;)*) => {
        $(
            #[allow(non_upper_case_globals)]
            pub(crate) static $name: Next<$function> = {
                const NAME: &CStr = match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                    Ok(name) => name,
                    Err(_) => panic!(),
                };
                // SAFETY: the type is that of the function's manual page.
                unsafe { Next::new(NAME) }
            };
        )*

        fn $look_up() {
            $($name.look_up();)*
        }
    };
}

/// Looks up all functions.
pub(crate) fn look_up_all() {
    look_up_safe();
    look_up_unsafe();
}

/// `struct stat` and similar structures: passed through, never accessed.
pub(crate) type Opaque = *mut c_void;

// Functions of numbers alone, which access no memory of the caller.
real! {
    look_up_safe, safe;
    close: (c_int) -> c_int;
    close_range: (c_uint, c_uint, c_int) -> c_int;
    closefrom: (c_int);
    dup: (c_int) -> c_int;
    dup2: (c_int, c_int) -> c_int;
    dup3: (c_int, c_int, c_int) -> c_int;
    socket: (c_int, c_int, c_int) -> c_int;
    pause: () -> c_int;
    sigignore: (c_int) -> c_int;
    siginterrupt: (c_int, c_int) -> c_int;
}

real! {
    look_up_unsafe, unsafe;
    open: (*const c_char, c_int, ...) -> c_int;
    open64: (*const c_char, c_int, ...) -> c_int;
    openat: (c_int, *const c_char, c_int, ...) -> c_int;
    openat64: (c_int, *const c_char, c_int, ...) -> c_int;
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
    write: (c_int, *const c_void, usize) -> isize;
    recv: (c_int, *mut c_void, usize, c_int) -> isize;
    send: (c_int, *const c_void, usize, c_int) -> isize;
    sendto: (c_int, *const c_void, usize, c_int, *const c_void, c_uint) -> isize;
    sendmsg: (c_int, *const libc::msghdr, c_int) -> isize;
    ioctl: (c_int, c_ulong, ...) -> c_int;
    fcntl: (c_int, c_int, ...) -> c_int;
    fcntl64: (c_int, c_int, ...) -> c_int;
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
}
