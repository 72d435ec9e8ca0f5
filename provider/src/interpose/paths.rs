//! Functions that take a path.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd};
use std::ptr::null_mut;

use rustix::io::Errno;
use urnic_driver::watch;
use urnic_presence::redirect::{PathBuffer, Target, may_be_ours};
use urnic_presence::registry;
use urnic_presence::{HwCounter, Presence};

use super::{NO_LIST, discard, exported, missing, redirect};
use crate::guard::{guarded, uncancelled};
use crate::log::complaining;
use crate::real::{self, Opaque};

/// Calls `next` with the path that replaces `path`. Out of line, so that only paths that may belong
/// to the presence have the cost of the buffer.
///
/// # Safety
/// `path` is a C string.
#[cold]
#[inline(never)]
unsafe fn redirected<R>(path: *const c_char, next: impl FnOnce(*const c_char) -> R) -> R {
    let mut buffer = PathBuffer::new();
    // SAFETY: the caller promises a C string.
    match unsafe { redirect(path, &mut buffer) } {
        Some((found, target)) => watched(target, || next(found.as_ptr())),
        None => next(path),
    }
}

/// Replaces the path, as [`redirected`] does, for functions that open: an fd of the device's node,
/// or of the connection manager's, is recorded.
///
/// # Safety
/// The conditions of [`redirected`].
#[cold]
#[inline(never)]
unsafe fn redirected_open(path: *const c_char, next: impl FnOnce(*const c_char) -> c_int) -> c_int {
    let mut buffer = PathBuffer::new();
    // SAFETY: the caller promises a C string.
    match unsafe { redirect(path, &mut buffer) } {
        Some((found, Target::HwCounter(device, counter))) => live(found, device, counter, next),
        Some((found, target)) => {
            let mut fd = watched(target, || next(found.as_ptr()));
            if fd >= 0 {
                if target == Target::RdmaCm {
                    fd = out_of_the_way(fd);
                }
                // SAFETY: the fd was opened just now, and the caller does not have it yet.
                let opened = unsafe { BorrowedFd::borrow_raw(fd) };
                let entered = guarded(|| match target {
                    Target::Uverbs => registry::enter_uverbs(opened),
                    Target::RdmaCm => crate::opening::open_cm_channel(opened),
                    Target::Tree | Target::DeviceScan | Target::HwCounter(..) => Ok(()),
                });
                if let Err(errno) = entered {
                    // An fd without a record is worse than none.
                    // SAFETY: the fd was opened just now.
                    unsafe { discard(fd) };
                    crate::guard::set_errno(errno);
                    return -1;
                }
            }
            fd
        }
        None => next(path),
    }
}

/// Calls the real function for a file of the presence. If there is no descriptor left, this is
/// logged, because a program would only report a missing device.
fn watched<R>(target: Target, call: impl FnOnce() -> R) -> R {
    // SAFETY: libc's own place for the calling thread's errno.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: libc's own place for the calling thread's errno.
    let before = unsafe { place.replace(0) };
    let result = call();
    // SAFETY: libc's own place for the calling thread's errno.
    let after = unsafe { place.read() };
    if matches!(after, libc::EMFILE | libc::ENFILE) {
        let errno = Errno::from_raw_os_error(after);
        let what = match target {
            Target::DeviceScan => NO_LIST,
            _ => "a file that stands for an RDMA device cannot be opened",
        };
        let _: Result<(), Errno> = guarded(|| complaining(what, || Err(errno)));
    }
    // SAFETY: libc's own place for the calling thread's errno.
    unsafe { place.write(if after == 0 { before } else { after }) };
    result
}

/// The first number for channels of the connection manager, if there are enough numbers.
///
/// librspreload gives the program an fd of /dev/null for each rsocket, whose own fd is its
/// channel's. Its select() then searches for the first number that belongs to the rsocket, and uses
/// the channel's number instead unless that number is higher: iperf3's server would never be
/// notified of data to read.
const CHANNELS: c_int = 256;

/// Moves a newly opened channel to another fd number.
fn out_of_the_way(fd: c_int) -> c_int {
    // SAFETY: the fd was opened just now, and the caller does not have it yet.
    let opened = unsafe { BorrowedFd::borrow_raw(fd) };
    let (Ok(flags), Ok(moved)) = (
        rustix::io::fcntl_getfd(opened),
        rustix::io::fcntl_dupfd_cloexec(opened, CHANNELS),
    ) else {
        return fd;
    };
    if rustix::io::fcntl_setfd(&moved, flags).is_err() {
        return fd;
    }
    // SAFETY: the fd was opened just now under this number, and the caller does not have it; the
    // channel has another number now.
    unsafe { discard(fd) };
    moved.into_raw_fd()
}

/// Replaces the path, as [`redirected`] does, for `fopen`.
///
/// # Safety
/// The conditions of [`redirected`].
#[cold]
#[inline(never)]
unsafe fn redirected_fopen(path: *const c_char, next: impl FnOnce(*const c_char) -> Opaque) -> Opaque {
    let mut buffer = PathBuffer::new();
    // SAFETY: the caller promises a C string.
    match unsafe { redirect(path, &mut buffer) } {
        Some((found, Target::HwCounter(device, counter))) => live(found, device, counter, next),
        Some((found, target)) => watched(target, || next(found.as_ptr())),
        None => next(path),
    }
}

/// Opens a file with the present value of a counter of the device with this index, or the file in
/// the tree if no value is available. Such a file does not block, and the call is no cancellation
/// point.
fn live<R>(found: &CStr, device: usize, counter: HwCounter, next: impl FnOnce(*const c_char) -> R) -> R {
    uncancelled(|| {
        let file = guarded(|| {
            let presence = Presence::current()?;
            let shown = presence.devices().get(device).ok_or(Errno::NODEV)?;
            let file = watch::hw_counter(presence, shown, counter)?;
            let path =
                CString::new(format!("/proc/self/fd/{}", file.as_raw_fd())).map_err(|_| Errno::INVAL)?;
            Ok((file, path))
        });
        match &file {
            Ok((_, path)) => next(path.as_ptr()),
            Err(_) => next(found.as_ptr()),
        }
    })
}

/// One line per function: its arguments, with a semicolon at the place of the path, its return
/// type, its result if this libc does not have it, and the function that handles a path of the
/// presence.
macro_rules! on_path {
    ($($name:ident($($before:ident: $bt:ty),*; $($after:ident: $at:ty),* $(; $mode:ident: $mt:ty)?) -> $ret:ty, $fails:expr, $ours:ident;)*) => {$(
        exported! { $name($($before: $bt,)* path: *const c_char $(, $after: $at)* $(; $mode: $mt)?) -> $ret }
        unsafe extern "C-unwind" fn $name($($before: $bt,)* path: *const c_char $(, $after: $at)* $(, $mode: $mt)?) -> $ret {
            let Some(next) = real::$name() else { return missing($fails) };
            // SAFETY: the C caller's path, null or a string.
            if unsafe { may_be_ours(path) } {
                // SAFETY: the C caller's arguments, with another path, which is a C string.
                return unsafe { $ours(path, |path| next($($before,)* path $(, $after)* $(, $mode)?)) };
            }
            // SAFETY: the C caller's arguments.
            unsafe { next($($before,)* path $(, $after)* $(, $mode)?) }
        }
    )*};
}

// `open` and similar functions are variadic: the mode is present only with O_CREAT or O_TMPFILE.
// The C ABIs of Linux pass it like a named third or fourth argument, so it is always taken and
// always passed on; without those flags no code reads it.
on_path! {
    open(; flags: c_int; mode: c_uint) -> c_int, -1, redirected_open;
    open64(; flags: c_int; mode: c_uint) -> c_int, -1, redirected_open;
    openat(at: c_int; flags: c_int; mode: c_uint) -> c_int, -1, redirected_open;
    openat64(at: c_int; flags: c_int; mode: c_uint) -> c_int, -1, redirected_open;
    __open_2(; flags: c_int) -> c_int, -1, redirected_open;
    __open64_2(; flags: c_int) -> c_int, -1, redirected_open;
    __openat_2(at: c_int; flags: c_int) -> c_int, -1, redirected_open;
    __openat64_2(at: c_int; flags: c_int) -> c_int, -1, redirected_open;
    fopen(; mode: *const c_char) -> Opaque, null_mut(), redirected_fopen;
    fopen64(; mode: *const c_char) -> Opaque, null_mut(), redirected_fopen;
    opendir(;) -> Opaque, null_mut(), redirected;
    scandir(; names: Opaque, filter: Opaque, compare: Opaque) -> c_int, -1, redirected;
    scandir64(; names: Opaque, filter: Opaque, compare: Opaque) -> c_int, -1, redirected;
    stat(; to: Opaque) -> c_int, -1, redirected;
    stat64(; to: Opaque) -> c_int, -1, redirected;
    lstat(; to: Opaque) -> c_int, -1, redirected;
    lstat64(; to: Opaque) -> c_int, -1, redirected;
    fstatat(at: c_int; to: Opaque, flags: c_int) -> c_int, -1, redirected;
    fstatat64(at: c_int; to: Opaque, flags: c_int) -> c_int, -1, redirected;
    statx(at: c_int; flags: c_int, mask: c_uint, to: Opaque) -> c_int, -1, redirected;
    __xstat(version: c_int; to: Opaque) -> c_int, -1, redirected;
    __xstat64(version: c_int; to: Opaque) -> c_int, -1, redirected;
    __lxstat(version: c_int; to: Opaque) -> c_int, -1, redirected;
    __lxstat64(version: c_int; to: Opaque) -> c_int, -1, redirected;
    __fxstatat(version: c_int, at: c_int; to: Opaque, flags: c_int) -> c_int, -1, redirected;
    __fxstatat64(version: c_int, at: c_int; to: Opaque, flags: c_int) -> c_int, -1, redirected;
    access(; mode: c_int) -> c_int, -1, redirected;
    eaccess(; mode: c_int) -> c_int, -1, redirected;
    euidaccess(; mode: c_int) -> c_int, -1, redirected;
    faccessat(at: c_int; mode: c_int, flags: c_int) -> c_int, -1, redirected;
    readlink(; to: *mut c_char, size: usize) -> isize, -1, redirected;
    __readlink_chk(; to: *mut c_char, size: usize, room: usize) -> isize, -1, redirected;
    readlinkat(at: c_int; to: *mut c_char, size: usize) -> isize, -1, redirected;
    __readlinkat_chk(at: c_int; to: *mut c_char, size: usize, room: usize) -> isize, -1, redirected;
    realpath(; to: *mut c_char) -> *mut c_char, null_mut(), redirected;
    __realpath_chk(; to: *mut c_char, room: usize) -> *mut c_char, null_mut(), redirected;
    canonicalize_file_name(;) -> *mut c_char, null_mut(), redirected;
    getxattr(; name: *const c_char, to: *mut c_void, size: usize) -> isize, -1, redirected;
    lgetxattr(; name: *const c_char, to: *mut c_void, size: usize) -> isize, -1, redirected;
    listxattr(; to: *mut c_char, size: usize) -> isize, -1, redirected;
    llistxattr(; to: *mut c_char, size: usize) -> isize, -1, redirected;
    chdir(;) -> c_int, -1, redirected;
}
