//! System calls on TCP sockets.

use super::StreamError;
use super::descriptor::Descriptor;
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, recv, sockopt};

/// The outcome of a system call on a stream, EINTR aside.
pub(super) fn outcome(errno: Errno) -> StreamError {
    match errno {
        Errno::AGAIN => StreamError::WouldBlock,
        Errno::FAULT => StreamError::Fault,
        errno => StreamError::Closed(errno),
    }
}

/// Makes a system call on a stream, again after EINTR.
#[inline]
pub(super) fn uninterrupted(mut call: impl FnMut() -> Result<usize, Errno>) -> Result<usize, StreamError> {
    loop {
        match call() {
            Ok(n) => return Ok(n),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(outcome(errno)),
        }
    }
}

/// Whether bytes have arrived (true) or the peer's FIN (false); takes nothing.
pub(super) fn peek(socket: &Descriptor) -> Result<bool, StreamError> {
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    uninterrupted(|| recv(socket, &mut [0u8; 1], flags).map(|(n, _)| n)).map(|n| n > 0)
}

/// Sets the traffic class of a socket's packets.
pub(super) fn mark(socket: BorrowedFd<'_>, family: AddressFamily, traffic_class: u8) -> Result<(), Errno> {
    if traffic_class == 0 {
        return Ok(());
    }
    if family == AddressFamily::INET6 {
        sockopt::set_ipv6_tclass(socket, traffic_class.into())?;
    }
    // Also for an IPv6 socket: it may carry IPv4.
    sockopt::set_ip_tos(socket, traffic_class)
}
