//! Queue pair numbers: the TCP port of one of the process's listeners, and an index behind it.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;

use rustix::io::Errno;

use super::streams::Streams;

/// Queue pairs behind one listener: the index has 8 bits.
const PER_LISTENER: u32 = 256;

/// Numbers that rest, given back and not used again, before the oldest of them is: a late call for
/// its last life finds nobody.
const RESTING: usize = 64;

/// The numbers of the process. A listener stays for good once it is open, since numbers that are
/// known abroad name its port.
#[derive(Debug)]
pub(super) struct Numbers {
    listen: Option<IpAddr>,
    ports: Option<RangeInclusive<u16>>,
    /// Of the last one, indices from `fresh` on were never used.
    listeners: Vec<Listener>,
    fresh: u32,
    /// Numbers given back, oldest first.
    free: VecDeque<u32>,
}

#[derive(Debug)]
struct Listener {
    lid: u32,
    port: u16,
}

impl Numbers {
    pub(super) fn new(listen: Option<IpAddr>, ports: Option<RangeInclusive<u16>>) -> Numbers {
        Numbers {
            listen,
            ports,
            listeners: Vec::new(),
            fresh: 0,
            free: VecDeque::new(),
        }
    }

    /// A number that no queue pair has: one never used, else one that rested for long, else one of
    /// a new listener.
    ///
    /// # Errors
    /// Those of listening: `EADDRINUSE` with no port of the range left, `EADDRNOTAVAIL`, `ENOMEM`.
    pub(super) fn take(&mut self, streams: &mut dyn Streams) -> Result<u32, Errno> {
        let is_used_up = self.listeners.is_empty() || self.fresh == PER_LISTENER;
        if is_used_up {
            if self.free.len() > RESTING
                && let Some(oldest) = self.free.pop_front()
            {
                return Ok(oldest);
            }
            match self.open(streams) {
                Ok(listener) => {
                    tracing::debug!("listening on port {}", listener.port);
                    self.listeners.push(listener);
                    self.fresh = 0;
                }
                // Better a number that did not rest than none.
                Err(errno) => return self.free.pop_front().ok_or(errno),
            }
        }
        let port = self.listeners.last().ok_or(Errno::NOMEM)?.port;
        self.fresh += 1;
        Ok(u32::from(port) << 8 | (self.fresh - 1))
    }

    /// Gives a number back.
    pub(super) fn give_back(&mut self, qpn: u32) {
        self.free.push_back(qpn);
    }

    /// Whether it is one of ours.
    pub(super) fn has_listener(&self, lid: u32) -> bool {
        self.listeners.iter().any(|listener| listener.lid == lid)
    }

    fn open(&self, streams: &mut dyn Streams) -> Result<Listener, Errno> {
        let mut listen = |port| {
            let ip = self.listen.unwrap_or(IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED));
            let (lid, port) = streams.listen(SocketAddr::new(ip, port))?;
            Ok(Listener { lid, port })
        };
        let Some(ports) = &self.ports else {
            return listen(0);
        };
        let mut last = Errno::ADDRINUSE;
        for port in ports.clone() {
            if self.listeners.iter().any(|listener| listener.port == port) {
                continue;
            }
            match listen(port) {
                Ok(listener) => return Ok(listener),
                // Others look for a port in the same range.
                Err(errno @ (Errno::ADDRINUSE | Errno::ACCESS | Errno::PERM)) => last = errno,
                Err(errno) => return Err(errno),
            }
        }
        Err(last)
    }
}
