//! Functions that take a path.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::null_mut;

use rustix::io::Errno;
use urnic_driver::watch;
use urnic_presence::redirect::{PathBuffer, Target, may_be_ours};
use urnic_presence::registry;
use urnic_presence::{HwCounter, Presence};

use super::{NO_LIST, NewFd, exported, missing, redirect};
use crate::guard::{errno, guarded, restore_errno, set_errno, uncancelled};
use crate::log::complaining;
use crate::real::{self, Opaque};

/// The path, if it may belong to the presence.
///
/// # Safety
/// `path` is null or a C string.
#[inline]
unsafe fn ours<'a>(path: *const c_char) -> Option<&'a CStr> {
    // SAFETY: the caller promises null, which is never ours, or a C string.
    unsafe { may_be_ours(path).then(|| CStr::from_ptr(path)) }
}

/// Calls `next` with the path that replaces `path`. Out of line, so that only paths that may belong
/// to the presence have the cost of the buffer.
#[cold]
#[inline(never)]
fn redirected<R>(path: &CStr, next: impl FnOnce(*const c_char) -> R) -> R {
    let mut buffer = PathBuffer::new();
    match redirect(path, &mut buffer) {
        Some((found, target)) => watched(target, || next(found.as_ptr())),
        None => next(path.as_ptr()),
    }
}

/// Replaces the path, as [`redirected`] does, for functions that open: an fd of the device's node,
/// or of the connection manager's, is recorded.
#[cold]
#[inline(never)]
fn redirected_open(path: &CStr, next: impl FnOnce(*const c_char) -> c_int) -> c_int {
    let mut buffer = PathBuffer::new();
    match redirect(path, &mut buffer) {
        Some((found, Target::HwCounter(device, counter))) => live(found, device, counter, next),
        Some((found, target)) => {
            let answer = watched(target, || next(found.as_ptr()));
            // SAFETY: the function opened the fd just now, and the caller does not have it yet.
            let Some(mut opened) = (unsafe { NewFd::of(answer) }) else {
                return answer;
            };
            if target == Target::RdmaCm {
                opened = out_of_the_way(opened);
            }
            let entered = guarded(|| match target {
                Target::Uverbs => registry::enter_uverbs(opened.as_fd()),
                Target::RdmaCm => crate::opening::open_cm_channel(opened.as_fd()),
                Target::Tree | Target::DeviceScan | Target::HwCounter(..) => Ok(()),
            });
            if let Err(errno) = entered {
                // An fd without a record must not reach the program.
                opened.discard();
                set_errno(errno);
                return -1;
            }
            opened.give()
        }
        None => next(path.as_ptr()),
    }
}

/// Calls the real function for a file of the presence. If there is no descriptor left, this is
/// logged, because a program would only report a missing device.
fn watched<R>(target: Target, call: impl FnOnce() -> R) -> R {
    let before = errno();
    restore_errno(0);
    let result = call();
    let after = errno();
    if matches!(after, libc::EMFILE | libc::ENFILE) {
        let errno = Errno::from_raw_os_error(after);
        let what = match target {
            Target::DeviceScan => NO_LIST,
            _ => "a file that stands for an RDMA device cannot be opened",
        };
        let _: Result<(), Errno> = guarded(|| complaining(what, || Err(errno)));
    }
    restore_errno(if after == 0 { before } else { after });
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
fn out_of_the_way(opened: NewFd) -> NewFd {
    let (Ok(flags), Ok(moved)) = (
        rustix::io::fcntl_getfd(&opened),
        rustix::io::fcntl_dupfd_cloexec(&opened, CHANNELS),
    ) else {
        return opened;
    };
    if rustix::io::fcntl_setfd(&moved, flags).is_err() {
        return opened;
    }
    opened.discard();
    moved.into()
}

/// Replaces the path, as [`redirected`] does, for `fopen`.
#[cold]
#[inline(never)]
fn redirected_fopen(path: &CStr, next: impl FnOnce(*const c_char) -> Opaque) -> Opaque {
    let mut buffer = PathBuffer::new();
    match redirect(path, &mut buffer) {
        Some((found, Target::HwCounter(device, counter))) => live(found, device, counter, next),
        Some((found, target)) => watched(target, || next(found.as_ptr())),
        None => next(path.as_ptr()),
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
            let Some(next) = real::$name.get() else { return missing($fails) };
            // SAFETY: the C caller's arguments, with its own path or another C string.
            let call = |path| unsafe { next($($before,)* path $(, $after)* $(, $mode)?) };
            // SAFETY: the C caller's path, null or a string.
            match unsafe { ours(path) } {
                Some(path) => $ours(path, call),
                None => call(path),
            }
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
