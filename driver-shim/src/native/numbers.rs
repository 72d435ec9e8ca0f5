//! Queue pair numbers: the TCP port of one of the process's listeners, and an index behind it.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;

use rustix::io::Errno;

use super::Streams;

/// Queue pairs behind one listener: the index has 8 bits.
const PER_LISTENER: u32 = 256;

/// The numbers of the process. A listener stays for good once it is open, since numbers that are known abroad name its port.
#[derive(Debug)]
pub(super) struct Numbers {
    listen: Option<IpAddr>,
    ports: Option<RangeInclusive<u16>>,
    listeners: Vec<Listener>,
}

#[derive(Debug)]
struct Listener {
    lid: u32,
    port: u16,
    /// Indices never used yet are those from here on.
    fresh: u32,
    /// Indices given back, oldest first: a number rests for as long as possible.
    free: VecDeque<u32>,
}

impl Numbers {
    pub(super) fn new(listen: Option<IpAddr>, ports: Option<RangeInclusive<u16>>) -> Numbers {
        Numbers {
            listen,
            ports,
            listeners: Vec::new(),
        }
    }

    /// A number that no queue pair has. Opens a listener if all are full.
    ///
    /// # Errors
    /// Those of listening: `EADDRINUSE` with no port of the range left, `EADDRNOTAVAIL`, `ENOMEM`.
    pub(super) fn take(&mut self, streams: &mut dyn Streams) -> Result<u32, Errno> {
        let has_room = |listener: &&mut Listener| listener.fresh < PER_LISTENER || !listener.free.is_empty();
        if !self.listeners.iter_mut().any(|listener| has_room(&listener)) {
            let listener = self.open(streams)?;
            tracing::debug!("listening on port {}", listener.port);
            self.listeners.push(listener);
        }
        let listener = self.listeners.iter_mut().find(has_room).ok_or(Errno::NOMEM)?;
        let index = if listener.fresh < PER_LISTENER {
            listener.fresh += 1;
            Some(listener.fresh - 1)
        } else {
            listener.free.pop_front()
        };
        Ok(u32::from(listener.port) << 8 | index.ok_or(Errno::NOMEM)?)
    }

    /// Gives a number back.
    pub(super) fn give_back(&mut self, qpn: u32) {
        let port = super::address::port_of(qpn);
        if let Some(listener) = self.listeners.iter_mut().find(|listener| listener.port == port) {
            listener.free.push_back(qpn & (PER_LISTENER - 1));
        }
    }

    /// Whether it is one of ours.
    pub(super) fn has_listener(&self, lid: u32) -> bool {
        self.listeners.iter().any(|listener| listener.lid == lid)
    }

    fn open(&self, streams: &mut dyn Streams) -> Result<Listener, Errno> {
        let mut listen = |port| {
            let ip = self.listen.unwrap_or(IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED));
            let (lid, port) = streams.listen(SocketAddr::new(ip, port))?;
            Ok(Listener {
                lid,
                port,
                fresh: 0,
                free: VecDeque::new(),
            })
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
