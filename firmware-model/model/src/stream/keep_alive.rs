//! TCP's keep-alive.

use super::descriptor::Descriptor;
use rustix::io::Errno;
use rustix::net::sockopt;
use std::time::Duration;

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
