//! Functions that take or make an fd, except those that open.

use std::ffi::{c_int, c_long, c_uint, c_ulong, c_void};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use urnic_driver::watch;
use urnic_presence::rdma_netlink::socket::LONGEST;
use urnic_presence::{Presence, command, registry};
use urnic_process::fds::{self, Kind};
use urnic_process::signals::DeferredSignals;

use super::{ACTIVE, NewFd, exported, missing};
use crate::copy_on_fork::children_may_have_registered_memory;
use crate::guard::{guarded, set_errno};
use crate::real;

/// `NETLINK_RDMA` of `<linux/netlink.h>`.
const NETLINK_RDMA: c_int = 20;
/// `CLOSE_RANGE_CLOEXEC` of `<linux/close_range.h>`.
const CLOSE_RANGE_CLOEXEC: c_int = 4;

fn refuse(errno: Errno) -> c_int {
    set_errno(errno);
    -1
}

exported! { close(fd: c_int) -> c_int }
extern "C-unwind" fn close(fd: c_int) -> c_int {
    let Some(next) = real::close.get() else {
        return missing(-1);
    };
    match fds::kind(fd) {
        None => {}
        // The program closes all numbers in a loop: it did not open this fd.
        Some(kind) if kind.is_internal() => return refuse(Errno::BADF),
        Some(_) => forget(fd),
    }
    next(fd)
}

#[cold]
fn forget(fd: c_int) {
    let _ = guarded(|| {
        registry::forget(fd);
        Ok(())
    });
}

exported! { dup2(old: c_int, new: c_int) -> c_int }
extern "C-unwind" fn dup2(old: c_int, new: c_int) -> c_int {
    let Some(next) = real::dup2.get() else {
        return missing(-1);
    };
    if let Err(errno) = release_target(old, new) {
        return refuse(errno);
    }
    remember(old, next(old, new))
}

exported! { dup3(old: c_int, new: c_int, flags: c_int) -> c_int }
extern "C-unwind" fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    let Some(next) = real::dup3.get() else {
        return missing(-1);
    };
    // With other flags the call fails, and `new` does not change.
    if flags & !libc::O_CLOEXEC == 0
        && let Err(errno) = release_target(old, new)
    {
        return refuse(errno);
    }
    remember(old, next(old, new, flags))
}

exported! { dup(old: c_int) -> c_int }
extern "C-unwind" fn dup(old: c_int) -> c_int {
    let Some(next) = real::dup.get() else {
        return missing(-1);
    };
    remember(old, next(old))
}

/// `fcntl` is variadic; the C ABIs of Linux pass its third argument like a named argument, and
/// without a third argument no code reads it.
macro_rules! fcntls {
    ($($name:ident)*) => {$(
        exported! { $name(fd: c_int, command: c_int; argument: c_long) -> c_int }
        unsafe extern "C-unwind" fn $name(fd: c_int, command: c_int, argument: c_long) -> c_int {
            let Some(next) = real::$name.get() else { return missing(-1) };
            // SAFETY: the C caller's arguments.
            let answer = unsafe { next(fd, command, argument) };
            match command {
                libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => remember(fd, answer),
                _ => answer,
            }
        }
    )*};
}
fcntls! { fcntl fcntl64 }

/// Called after the program made `new` another fd of the file of `old`: records `new` too if `old`
/// is a device file, a channel of the connection manager, or a netlink socket.
fn remember(old: c_int, new: c_int) -> c_int {
    if new < 0 || new == old || !matches!(fds::kind(old), Some(Kind::Cm | Kind::Uverbs | Kind::Netlink)) {
        return new;
    }
    // SAFETY: the descriptor was opened a moment ago, and the caller does not have it yet.
    let Some(duplicate) = (unsafe { NewFd::of(new) }) else {
        return new;
    };
    if let Err(errno) = guarded(|| registry::duplicated(old, duplicate.as_fd())) {
        // Data written to an fd without a record would be lost.
        duplicate.discard();
        return refuse(errno);
    }
    duplicate.give()
}

/// Called before `new` is replaced by `old`. `EBUSY`, which dup2(2) documents for numbers that are
/// being opened, when `new` is an fd of the plug-in.
fn release_target(old: c_int, new: c_int) -> Result<(), Errno> {
    let Some(kind) = fds::kind(new) else { return Ok(()) };
    if old == new {
        return Ok(());
    }
    if kind.is_internal() {
        return Err(Errno::BUSY);
    }
    if urnic_sys::descriptors::is_open(old) {
        forget(new);
    }
    Ok(())
}

exported! { close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int }
extern "C-unwind" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let Some(next) = real::close_range.get() else {
        return missing(-1);
    };
    // The plug-in's fds are close-on-exec already.
    if flags & CLOSE_RANGE_CLOEXEC != 0 || first > last {
        return next(first, last, flags);
    }
    let mut from = first;
    for (fd, kind) in fds::ours_within(first, last) {
        if !kind.is_internal() {
            forget(fd);
            continue;
        }
        let ours = fd as c_uint;
        if from < ours {
            let closed = next(from, ours - 1, flags);
            if closed != 0 {
                return closed;
            }
        }
        from = ours + 1;
    }
    if from > last {
        return 0;
    }
    next(from, last, flags)
}

exported! { closefrom(low: c_int) }
extern "C-unwind" fn closefrom(low: c_int) {
    let first = low.max(0) as c_uint;
    let ours = fds::ours_within(first, c_uint::MAX).next().is_some();
    if ours && close_range(first, c_uint::MAX, 0) == 0 {
        return;
    }
    if let Some(next) = real::closefrom.get() {
        next(low);
    }
}

exported! { write(fd: c_int, bytes: *const c_void, length: usize) -> isize }
unsafe extern "C-unwind" fn write(fd: c_int, bytes: *const c_void, length: usize) -> isize {
    let Some(next) = real::write.get() else {
        return missing(-1);
    };
    match fds::kind(fd) {
        Some(Kind::Uverbs) => {
            if let Some(answer) = command(fd, bytes, length) {
                return answer;
            }
        }
        // SAFETY: the C caller's arguments.
        Some(Kind::Cm) => return unsafe { manage(fd, bytes, length) },
        // SAFETY: the C caller's arguments.
        Some(Kind::Netlink) if is_netlink(fd) => return unsafe { send_request(fd, bytes, length) },
        _ => {}
    }
    // SAFETY: the C caller's arguments.
    unsafe { next(fd, bytes, length) }
}

#[cold]
fn command(fd: c_int, bytes: *const c_void, length: usize) -> Option<isize> {
    // SAFETY: the C caller is responsible for its buffer, and for the address in the command.
    let outcome = guarded(|| unsafe { command::write(fd, bytes.cast(), length) }.transpose()).transpose()?;
    Some(match outcome {
        Ok(written) => written as isize,
        Err(errno) => refuse(errno) as isize,
    })
}

exported! { ioctl(fd: c_int, request: c_ulong; argument: *mut c_void) -> c_int }
/// `ioctl` is variadic, like [`fcntl`].
unsafe extern "C-unwind" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    let Some(next) = real::ioctl.get() else {
        return missing(-1);
    };
    if u64::from(request as u32) == command::VERBS_IOCTL {
        // SAFETY: the C caller's argument for that request.
        let outcome = guarded(|| Ok(unsafe { command::ioctl(fd, argument.cast()) }));
        match outcome.ok().flatten() {
            Some(Ok(())) => return 0,
            Some(Err(errno)) => return refuse(errno),
            None => {}
        }
    }
    // SAFETY: the C caller's arguments.
    unsafe { next(fd, request, argument) }
}

/// Runs a command of the connection manager. Only the command for the next event waits. While it
/// waits, the calling thread may be cancelled, or leave by a jump out of a signal handler, as when
/// signals are let through; so nothing here is dropped.
///
/// # Safety
/// The conditions of write(2), and those of the command's addresses.
#[cold]
unsafe extern "C-unwind" fn manage(fd: c_int, bytes: *const c_void, length: usize) -> isize {
    let (Some(wait), Some(pause)) = (real::recv.get(), real::pause.get()) else {
        return missing(-1);
    };
    loop {
        let signals = DeferredSignals::from_here();
        // SAFETY: the C caller is responsible for its buffer, and for the addresses in the command.
        let outcome = guarded(|| unsafe { urnic_driver::cm_write(fd, bytes.cast(), length, &signals) });
        signals.release();
        match outcome {
            Ok(Some(written)) => return written as isize,
            Ok(None) => {}
            // Another thread closes the channel at this moment; as below.
            Err(Errno::BADFD) => return pause() as isize,
            Err(error) => return refuse(error) as isize,
        }
        let mut byte = 0u8;
        // SAFETY: a local; the byte that says that there is an event stays where it is. An fd that
        // shall not block does not.
        match unsafe { wait(fd, (&raw mut byte).cast(), 1, libc::MSG_PEEK) } {
            ..0 => return -1,
            // Another thread closed the channel. In a kernel a call in progress continues, and no
            // event comes.
            0 => return pause() as isize,
            1.. => {}
        }
    }
}

/// One line per function: the arguments before the buffer. A channel of the connection manager is
/// reported as the character device as which it was opened.
macro_rules! fstats {
    ($($name:ident($($before:ident: $bt:ty),*);)*) => {$(
        exported! { $name($($before: $bt,)* fd: c_int, to: *mut libc::stat) -> c_int }
        unsafe extern "C-unwind" fn $name($($before: $bt,)* fd: c_int, to: *mut libc::stat) -> c_int {
            let Some(next) = real::$name.get() else { return missing(-1) };
            // SAFETY: the C caller's arguments; a call that succeeds has filled the buffer.
            unsafe {
                let answer = next($($before,)* fd, to);
                if answer == 0 && fds::kind(fd) == Some(Kind::Cm) {
                    as_device(&mut *to);
                }
                answer
            }
        }
    )*};
}
fstats! { fstat(); fstat64(); __fxstat(version: c_int); __fxstat64(version: c_int); }

#[cold]
fn as_device(stat: &mut libc::stat) {
    let (major, minor) = registry::CM_DEVICE;
    stat.st_mode = libc::S_IFCHR | 0o666;
    stat.st_rdev = libc::makedev(major, minor);
}

exported! { socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int }
extern "C-unwind" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    let Some(next) = real::socket.get() else {
        return missing(-1);
    };
    if domain == libc::AF_NETLINK && protocol == NETLINK_RDMA && we_answer() {
        return netlink_socket(next(domain, kind, libc::NETLINK_USERSOCK));
    }
    next(domain, kind, protocol)
}

/// Records the new socket in place of one of the kernel's RDMA netlink.
#[cold]
fn netlink_socket(opened: c_int) -> c_int {
    // SAFETY: the function opened the fd just now, and the caller does not have it yet.
    let Some(opened) = (unsafe { NewFd::of(opened) }) else {
        return match Errno::from_io_error(&std::io::Error::last_os_error()) {
            // Without such sockets libibverbs scans sysfs, where the presence is.
            Some(Errno::AFNOSUPPORT) => refuse(Errno::PROTONOSUPPORT),
            _ => opened,
        };
    };
    if let Err(errno) = guarded(|| registry::enter_netlink(opened.as_fd())) {
        opened.discard();
        return refuse(errno);
    }
    opened.give()
}

/// Whether `fd` is still the socket of RDMA netlink that was entered. If not, a raw system call has
/// closed the socket, and the number is that of another file, which is not ours.
#[cold]
fn is_netlink(fd: c_int) -> bool {
    let kind = fds::verified_kind(fd);
    if kind.is_none() {
        forget(fd);
    }
    kind == Some(Kind::Netlink)
}

/// Answers requests to RDMA netlink, if `fd` is a socket of ours. The replies are in the socket
/// when this returns.
///
/// # Safety
/// `bytes` points to `length` readable bytes.
#[cold]
unsafe fn send_request(fd: c_int, bytes: *const c_void, length: usize) -> isize {
    if bytes.is_null() {
        return refuse(Errno::FAULT) as isize;
    }
    if length > LONGEST {
        return refuse(Errno::MSGSIZE) as isize;
    }
    // SAFETY: the caller's promise.
    let request = unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), length) };
    match guarded(|| watch::netlink::answer(fd, request, children_may_have_registered_memory())) {
        Ok(()) => length as isize,
        Err(errno) => refuse(errno) as isize,
    }
}

exported! { send(fd: c_int, bytes: *const c_void, length: usize, flags: c_int) -> isize }
unsafe extern "C-unwind" fn send(fd: c_int, bytes: *const c_void, length: usize, flags: c_int) -> isize {
    let Some(next) = real::send.get() else {
        return missing(-1);
    };
    // SAFETY: the C caller's arguments.
    unsafe {
        match fds::kind(fd) {
            Some(Kind::Netlink) if is_netlink(fd) => send_request(fd, bytes, length),
            _ => next(fd, bytes, length, flags),
        }
    }
}

exported! {
    sendto(fd: c_int, bytes: *const c_void, length: usize, flags: c_int, to: *const c_void, to_len: c_uint) -> isize
}
unsafe extern "C-unwind" fn sendto(
    fd: c_int,
    bytes: *const c_void,
    length: usize,
    flags: c_int,
    to: *const c_void,
    to_len: c_uint,
) -> isize {
    let Some(next) = real::sendto.get() else {
        return missing(-1);
    };
    // SAFETY: the C caller's arguments.
    unsafe {
        match fds::kind(fd) {
            Some(Kind::Netlink) if is_netlink(fd) => send_request(fd, bytes, length),
            _ => next(fd, bytes, length, flags, to, to_len),
        }
    }
}

exported! { sendmsg(fd: c_int, message: *const libc::msghdr, flags: c_int) -> isize }
unsafe extern "C-unwind" fn sendmsg(fd: c_int, message: *const libc::msghdr, flags: c_int) -> isize {
    let Some(next) = real::sendmsg.get() else {
        return missing(-1);
    };
    // SAFETY: the C caller's arguments.
    unsafe {
        match fds::kind(fd) {
            Some(Kind::Netlink) if is_netlink(fd) => send_gathered(fd, message),
            _ => next(fd, message, flags),
        }
    }
}

/// Answers requests that may be in several pieces of memory.
///
/// # Safety
/// `message` is null or a message of sendmsg(2).
#[cold]
unsafe fn send_gathered(fd: c_int, message: *const libc::msghdr) -> isize {
    if message.is_null() {
        return refuse(Errno::FAULT) as isize;
    }
    let mut request = [0u8; LONGEST];
    let mut length = 0usize;
    // SAFETY: the caller's promise: `msg_iovlen` pieces, each with readable memory of its length.
    unsafe {
        for piece in (0..(*message).msg_iovlen).map(|index| *(*message).msg_iov.add(index)) {
            let Some(place) = request.get_mut(length..length.saturating_add(piece.iov_len)) else {
                return refuse(Errno::MSGSIZE) as isize;
            };
            if piece.iov_len > 0 {
                piece
                    .iov_base
                    .cast::<u8>()
                    .copy_to_nonoverlapping(place.as_mut_ptr(), piece.iov_len);
            }
            length += piece.iov_len;
        }
        send_request(fd, request.as_ptr().cast(), length)
    }
}

/// The kernel's RDMA netlink does not contain our devices. Without a presence of this plug-in, the
/// kernel's answer is better.
#[cold]
pub(super) fn we_answer() -> bool {
    ACTIVE.load(Ordering::Relaxed)
        && guarded(|| {
            crate::first_search::first_search();
            Presence::current()?;
            crate::register::with_every_libibverbs()
        })
        .is_ok()
}
