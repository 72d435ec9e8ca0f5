//! System calls on TCP sockets.

use super::StreamError;
use super::descriptor::Descriptor;
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, recv, sockopt};
use std::time::Duration;

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

/// Closes a connection with RST, by a linger time of zero.
pub(super) fn reset(socket: Descriptor) {
    let _ = sockopt::set_socket_linger(&socket, Some(Duration::ZERO));
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

// TCP's keep-alive.

/// The limits of TCP_KEEPIDLE and TCP_KEEPINTVL, in seconds, and of TCP_KEEPCNT (tcp(7)).
const MAX_KEEP_ALIVE_S: u64 = 32_767;
const MAX_PROBES: u32 = 127;

/// When TCP asks an idle peer for an answer.
#[derive(Debug, Clone, Copy)]
pub(super) struct KeepAlive {
    idle: Duration,
    interval: Duration,
    /// Unanswered probes that end the connection.
    count: u32,
}

impl KeepAlive {
    /// The present settings of a socket.
    pub(super) fn of(socket: &Descriptor) -> Result<KeepAlive, Errno> {
        Ok(KeepAlive {
            idle: sockopt::tcp_keepidle(socket)?,
            interval: sockopt::tcp_keepintvl(socket)?,
            count: sockopt::tcp_keepcnt(socket)?,
        })
    }

    /// Probes at this interval, without an end: the device decides.
    pub(super) fn at(interval: Duration) -> KeepAlive {
        let interval = Duration::from_secs(interval.as_secs().clamp(1, MAX_KEEP_ALIVE_S));
        KeepAlive {
            idle: interval,
            interval,
            count: MAX_PROBES,
        }
    }

    pub(super) fn set(self, socket: &Descriptor) -> Result<(), Errno> {
        sockopt::set_tcp_keepcnt(socket, self.count)?;
        sockopt::set_tcp_keepintvl(socket, self.interval)?;
        sockopt::set_tcp_keepidle(socket, self.idle)
    }
}
