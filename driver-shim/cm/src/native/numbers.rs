//! Queue pair numbers: the port of one of the process's listeners, and an index after it.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;

use rustix::io::Errno;

use super::streams::Streams;
use crate::carrier::listen_over;
use urnic_config::{Config, Llp};

/// Queue pairs of one listener: the index has 8 bits.
const PER_LISTENER: u32 = 256;

/// The number of returned queue pair numbers that stay unused: the oldest is used again only when
/// there are more, so that a late Request for the earlier queue pair reaches no other queue pair.
const QUARANTINE: usize = 64;

/// The queue pair numbers of the process. An open listener is never closed, since peers may have
/// numbers that contain its port.
#[derive(Debug)]
pub(super) struct Numbers {
    listen: Option<IpAddr>,
    ports: Option<RangeInclusive<u16>>,
    /// The lower layers over which each listener listens.
    llps: Vec<Llp>,
    /// Open listeners. Indices of the last listener from `fresh` on were never used.
    listeners: Vec<Listener>,
    fresh: u32,
    /// Returned numbers, oldest first.
    free: VecDeque<u32>,
}

#[derive(Debug)]
struct Listener {
    /// The listeners of the device.
    lids: Vec<(u32, Llp)>,
    port: u16,
}

impl Numbers {
    pub(super) fn new(config: &Config) -> Numbers {
        Numbers {
            listen: config.native.listen,
            ports: config.native.port_range.clone(),
            llps: config.llps(),
            listeners: Vec::new(),
            fresh: 0,
            free: VecDeque::new(),
        }
    }

    /// A number that no queue pair has: a number never used, else the oldest of more than
    /// `QUARANTINE` returned numbers, else a number of a new listener.
    ///
    /// # Errors
    /// Those of listening: `EADDRINUSE` with no port of the range left, `EADDRNOTAVAIL`, `ENOMEM`.
    pub(super) fn take(&mut self, streams: &mut dyn Streams) -> Result<u32, Errno> {
        let is_used_up = self.listeners.is_empty() || self.fresh == PER_LISTENER;
        if is_used_up {
            if self.free.len() > QUARANTINE
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
                // Without another number, the oldest returned number is used at once.
                Err(errno) => return self.free.pop_front().ok_or(errno),
            }
        }
        let port = self.listeners.last().ok_or(Errno::NOMEM)?.port;
        self.fresh += 1;
        Ok(u32::from(port) << 8 | (self.fresh - 1))
    }

    /// The port in the first numbers, which no other process of the host has.
    ///
    /// # Errors
    /// Those of listening.
    pub(super) fn port(&mut self, streams: &mut dyn Streams) -> Result<u16, Errno> {
        if self.listeners.is_empty() {
            let listener = self.open(streams)?;
            self.listeners.push(listener);
            self.fresh = 0;
        }
        Ok(self.listeners.first().ok_or(Errno::NOMEM)?.port)
    }

    /// Returns a number for later use.
    pub(super) fn release(&mut self, qpn: u32) {
        self.free.push_back(qpn);
    }

    /// The lower layer of `lid`; `None` if it is no listener of native connections.
    pub(super) fn llp_of(&self, lid: u32) -> Option<Llp> {
        let mut lids = self.listeners.iter().flat_map(|listener| &listener.lids);
        lids.find(|(own, _)| *own == lid).map(|(_, llp)| *llp)
    }

    fn open(&self, streams: &mut dyn Streams) -> Result<Listener, Errno> {
        let mut listen = |port| {
            let ip = self.listen.unwrap_or(IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED));
            let (lids, port) = listen_over(
                streams,
                &self.llps,
                SocketAddr::new(ip, port),
                |streams, llp, local| streams.listen(llp, local),
                |streams, lid| streams.unlisten(lid),
            )?;
            Ok(Listener { lids, port })
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
                // Other processes use ports of the same range.
                Err(errno @ (Errno::ADDRINUSE | Errno::ACCESS | Errno::PERM)) => last = errno,
                Err(errno) => return Err(errno),
            }
        }
        Err(last)
    }
}
