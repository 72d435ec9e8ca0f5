//! Spare Reads: an end that accepts one inbound Read more than it negotiates, for confirmations of
//! delivery, announces it in the messages about the TCP port.
//!
//! A byte of their private data announces it: after the addresses in the request, and first in the
//! reply. Ends without a spare Read send zero there, and ignore it.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use urnic_wire::mad::{IP_ADDRESSING_LEN, IpAddressing, ServiceReply};

use crate::mpa_startup::Time;

/// The private data of an end with a spare Read.
pub(super) const SPARE_READ: [u8; 1] = [1];
/// Most announcements that wait for their stream. Beyond this limit the oldest one is forgotten.
const MAX_ANNOUNCED: usize = 1024;
/// The time in which the stream must follow.
const ANNOUNCED_TIME: Duration = Duration::from_secs(60);

/// Whether the listener that replied has a spare Read.
pub(super) fn has_spare_read(reply: &ServiceReply) -> bool {
    reply.private_data.starts_with(&SPARE_READ)
}

/// The initiators that announced a spare Read and have not connected yet. Forgetting one is safe:
/// the listener's Reads then stay within the number that is negotiated.
#[derive(Debug, Default)]
pub(super) struct Announced(VecDeque<(SocketAddr, Time)>);

impl Announced {
    /// Records the announcement in the private data of a request from `remote`. One without it
    /// replaces an earlier one.
    pub(super) fn add(&mut self, now: Time, remote: IpAddr, private_data: &[u8]) {
        let given = private_data.get(IP_ADDRESSING_LEN..).unwrap_or_default();
        let Some(addressing) = IpAddressing::parse(private_data) else {
            return;
        };
        let from = SocketAddr::new(remote, addressing.source_port);
        self.take(now, from);
        if !given.starts_with(&SPARE_READ) {
            return;
        }
        if self.0.len() >= MAX_ANNOUNCED {
            self.0.pop_front();
        }
        self.0.push_back((from, now));
    }

    /// Whether the initiator of a stream announced a spare Read, and forgets the announcement.
    pub(super) fn take(&mut self, now: Time, remote: SocketAddr) -> bool {
        while let Some((_, since)) = self.0.front()
            && *since + ANNOUNCED_TIME < now
        {
            self.0.pop_front();
        }
        // Linux has all addresses of 127.0.0.0/8, and the device perhaps one.
        let is_same = |from: &SocketAddr| {
            let (from_ip, ip) = (from.ip().to_canonical(), remote.ip().to_canonical());
            from.port() == remote.port() && (from_ip == ip || (from_ip.is_loopback() && ip.is_loopback()))
        };
        let at = self.0.iter().position(|(from, _)| is_same(from));
        at.and_then(|at| self.0.remove(at)).is_some()
    }
}
