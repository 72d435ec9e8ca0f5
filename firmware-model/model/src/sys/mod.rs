//! The few system calls that rustix does not have. Through `libc::syscall`, which is neither
//! interposed by us nor a cancellation point.

mod control;
pub(crate) mod datagrams;
pub(crate) mod failed;
pub(crate) mod sctp;
pub(crate) mod thread_start;

use rustix::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::io::Errno;
use rustix::process::{Pid, getpriority_process};
pub(crate) use urnic_sys::errno::last as last_errno;
use urnic_sys::{Numbers, Plain};

/// The error of a system call that was made without libc: such a call returns its negative number.
pub(crate) fn errno_of(result: i64) -> Errno {
    Errno::from_raw_os_error(i32::try_from(result.wrapping_neg()).unwrap_or(libc::EINVAL))
}

/// Sets an integer option of a socket.
fn set(
    socket: BorrowedFd<'_>,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
) -> Result<(), Errno> {
    set_bytes(socket, level, name, &value.to_ne_bytes())
}

/// Sets an option of a socket.
fn set_bytes(
    socket: BorrowedFd<'_>,
    level: libc::c_int,
    name: libc::c_int,
    value: &[u8],
) -> Result<(), Errno> {
    // SAFETY: `value` is live and as long as the call says; the kernel only reads it.
    let done = unsafe {
        libc::syscall(
            libc::SYS_setsockopt,
            socket.as_raw_fd(),
            level,
            name,
            value.as_ptr(),
            value.len(),
        )
    };
    if done == 0 { Ok(()) } else { Err(last_errno()) }
}

/// Reads an option of a socket over `value`. Returns the value, and the number of bytes that the
/// kernel wrote.
fn get<T: Numbers>(
    socket: BorrowedFd<'_>,
    level: libc::c_int,
    name: libc::c_int,
    mut value: T,
) -> Result<(T, usize), Errno> {
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: `value` and `len` are live, and `len` is the size of `value`, which any bytes are.
    let done = unsafe {
        libc::syscall(
            libc::SYS_getsockopt,
            socket.as_raw_fd(),
            level,
            name,
            &raw mut value,
            &raw mut len,
        )
    };
    if done == 0 {
        Ok((value, len as usize))
    } else {
        Err(last_errno())
    }
}

/// Lets the kernel choose the port of a socket that is bound to an address alone when the socket
/// connects: the port only has to differ from those of connections to the same remote address.
pub(crate) fn choose_port_late(socket: BorrowedFd<'_>) -> Result<(), Errno> {
    // Also for an IPv6 socket.
    set(socket, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, 1)
}

/// Whether a process has a thread of this number. (Numbers that no thread can have, such as 0, make
/// the kernel report `EINVAL`.)
pub(crate) fn has_thread(process: Pid, thread: u32) -> bool {
    // SAFETY: signal 0 is none; the call only looks the thread up.
    let done = unsafe { libc::syscall(libc::SYS_tgkill, process.as_raw_nonzero().get(), thread, 0) };
    done == 0 || last_errno() == Errno::PERM
}

/// `TCP_RTO_MAX_MS` (Linux 6.15): the longest time from one retransmission, or probe of the peer's
/// window, to the next; not in libc yet.
const TCP_RTO_MAX_MS: libc::c_int = 44;

/// Limits the time from one retransmission, or probe of the peer's window, to the next, in
/// milliseconds from 1,000 to 120,000.
///
/// # Errors
/// `ENOPROTOOPT` with older kernels, which take up to two minutes.
pub(crate) fn limit_retransmission(socket: BorrowedFd<'_>, milliseconds: u32) -> Result<(), Errno> {
    let milliseconds = i32::try_from(milliseconds).unwrap_or(i32::MAX);
    set(socket, libc::IPPROTO_TCP, TCP_RTO_MAX_MS, milliseconds)
}

/// `TCP_INFO`: statistics of a connection.
pub(crate) fn tcp_info(socket: BorrowedFd<'_>) -> Result<libc::tcp_info, Errno> {
    get(
        socket,
        libc::IPPROTO_TCP,
        libc::TCP_INFO,
        libc::tcp_info::zeroes(),
    )
    .map(|(info, _)| info)
}

/// `TCP_MAXSEG`: largest segment that is sent at present, in bytes.
pub(crate) fn tcp_maxseg(socket: BorrowedFd<'_>) -> Result<u32, Errno> {
    get(socket, libc::IPPROTO_TCP, libc::TCP_MAXSEG, 0i32).map(|(value, _)| value.unsigned_abs())
}

/// `SIOCOUTQ`: bytes sent, or waiting to be, that the peer has not acknowledged.
pub(crate) fn unacknowledged(socket: BorrowedFd<'_>) -> Result<u32, Errno> {
    let mut value: libc::c_int = 0;
    // SAFETY: `TIOCOUTQ` (the same number as SIOCOUTQ) writes an int to a live one.
    let done = unsafe {
        libc::syscall(
            libc::SYS_ioctl,
            socket.as_raw_fd(),
            libc::TIOCOUTQ,
            &raw mut value,
        )
    };
    if done == 0 {
        Ok(value.unsigned_abs())
    } else {
        Err(last_errno())
    }
}

/// The real, effective and saved user of the calling thread: getresuid(2).
pub(crate) fn users() -> [u32; 3] {
    let [mut real, mut effective, mut saved] = [u32::MAX; 3];
    // SAFETY: the call writes to the three numbers, which are live, and cannot fail.
    unsafe {
        libc::syscall(
            libc::SYS_getresuid,
            &raw mut real,
            &raw mut effective,
            &raw mut saved,
        )
    };
    [real, effective, saved]
}

/// `SO_PEERPIDFD` (Linux 6.5): a pidfd of the process at the other end of a unix socket, as of
/// connect(2) or listen(2). Unlike the process number it never means another process.
pub(crate) fn peer_pidfd(socket: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    const SO_PEERPIDFD: libc::c_int = 77;
    let (pidfd, _) = get(socket, libc::SOL_SOCKET, SO_PEERPIDFD, -1i32)?;
    // SAFETY: the kernel has just opened this number for the caller.
    Ok(unsafe { OwnedFd::from_raw_fd(pidfd) })
}

/// Calls `act` with all signals of the calling thread blocked but those of faults. A thread that
/// `act` starts inherits that: signals are the program's.
pub(crate) fn with_signals_blocked<T>(act: impl FnOnce() -> T) -> T {
    let mask = SignalMask::ALL.exchange();
    let done = act();
    mask.exchange();
    done
}

/// A signal mask in the kernel's format: bit n − 1 stands for signal n.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SignalMask(u64);

impl SignalMask {
    /// Every signal but those of faults, which cannot wait: the kernel ends a process that blocks
    /// them.
    pub(crate) const ALL: SignalMask = SignalMask(!(1 << (libc::SIGSEGV - 1) | 1 << (libc::SIGBUS - 1)));

    /// Every signal. The kernel ends a process whose thread faults meanwhile.
    pub(crate) const EVERY: SignalMask = SignalMask(!0);

    /// Makes this the calling thread's mask and returns the old one.
    pub(crate) fn exchange(self) -> SignalMask {
        let mut old = 0u64;
        // SAFETY: both masks are live and of the size given. Only which signals this thread takes
        // changes.
        unsafe {
            libc::syscall(
                libc::SYS_rt_sigprocmask,
                libc::SIG_SETMASK,
                &raw const self.0,
                &raw mut old,
                size_of::<u64>(),
            )
        };
        SignalMask(old)
    }
}

/// Requests that the scheduler runs the calling thread soon after it wakes, by a short slice
/// (unsupported for ordinary threads by kernels before 6.12) and, where the process has the
/// permission, by a priority above that of the program. Best effort.
pub(crate) fn ask_for_prompt_running(slice_ns: u64, nice: i32) {
    #[repr(C)]
    struct SchedAttr {
        size: u32,
        policy: u32,
        flags: u64,
        nice: i32,
        priority: u32,
        runtime: u64,
        deadline: u64,
        period: u64,
    }
    let present = getpriority_process(None).unwrap_or_default();
    for nice in [nice.min(present), present] {
        let attr = SchedAttr {
            size: size_of::<SchedAttr>() as u32,
            policy: libc::SCHED_OTHER as u32,
            flags: 0,
            nice,
            priority: 0,
            runtime: slice_ns,
            deadline: 0,
            period: 0,
        };
        // SAFETY: `attr` is live and contains its size; 0 is the calling thread.
        if unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) } == 0 {
            return;
        }
    }
}
